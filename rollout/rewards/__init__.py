"""Rewards: named parts, summed. `build.py` makes them from the configuration."""
