"""Curricula choose the prompt of each draw by how the policy has done on the prompts so far.

A curriculum is a pure function from recorded results to weights: see `history` and `stream`.
"""

from rlcore.data.curriculum.history import PromptHistory, build_curriculum

__all__ = ["PromptHistory", "build_curriculum"]
