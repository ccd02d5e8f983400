"""Runs on a Ray cluster, with trainer ranks and engines as actors.

Nothing outside this folder imports ray.
"""
