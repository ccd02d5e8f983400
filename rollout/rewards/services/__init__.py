"""Rewards from servers: reward services and judges."""
