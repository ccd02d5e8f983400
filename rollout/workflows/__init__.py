"""Workflows: from a prompt to its samples. One file each."""

from rollout.workflows.base import WorkflowContext
from rollout.workflows.registry import build_workflow

__all__ = ["WorkflowContext", "build_workflow"]
