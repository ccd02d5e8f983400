"""The error that a tool tells the model."""

from __future__ import annotations


class ToolError(Exception):
    """What a tool tells the model in place of a result; the rollout goes on."""
