"""Assigns sequences to optimizer steps, ranks and packs, and finds the prefixes of a pack."""
