"""Curricula choose the prompt of each draw by the policy's results on the prompts so far.

A curriculum is a pure function from recorded results to weights: see `history` and `stream`.
"""

from rlcore.data.curriculum.history import PromptHistory, build_curriculum

__all__ = ["PromptHistory", "build_curriculum"]
