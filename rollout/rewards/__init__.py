"""Rewards: the weighted sum of named parts. `scorer.py` makes them from the configuration."""
