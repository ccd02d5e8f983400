"""Tracking: metrics.jsonl, TensorBoard, wandb, the progress display, and plots and reports."""

from rlcore.tracking.base import BaseTracker
from rlcore.tracking.build import Trackers, build_trackers
from rlcore.tracking.format import pick_samples

__all__ = ["BaseTracker", "Trackers", "build_trackers", "pick_samples"]
