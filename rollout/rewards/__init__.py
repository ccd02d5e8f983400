"""Rewards: the weighted sum of named parts. `scorer.py` builds them from the configuration."""
