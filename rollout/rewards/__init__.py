"""Rewards: the weighted sum of named parts. `build.py` makes them from the configuration."""
