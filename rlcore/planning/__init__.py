"""Estimates of the memory and time that a run needs, without weights, torch or a GPU.

docs/planning.md has the model behind the estimates.
"""
