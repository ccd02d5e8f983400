"""Conversations of many turns: an append-only tree of tokens, and the samples made from it."""
