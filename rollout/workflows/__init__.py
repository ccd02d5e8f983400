"""Workflows make samples from a prompt. Each has a file of its own."""

from rollout.workflows.base import WorkflowContext
from rollout.workflows.registry import build_workflow

__all__ = ["WorkflowContext", "build_workflow"]
