"""Runs on a Ray cluster, with trainer ranks, rollout service and engines as actors.

Nothing outside this folder imports ray.
"""
