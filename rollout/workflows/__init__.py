"""Workflows: from a prompt to its samples. One file each."""

from rollout.workflows.base import WorkflowContext, build_workflow

__all__ = ["WorkflowContext", "build_workflow"]
