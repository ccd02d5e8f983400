"""Runs on a Ray cluster: trainer ranks, rollout service and engines as actors. Nothing else in
rlcore imports ray.
"""
