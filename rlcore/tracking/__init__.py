"""What a run tells the world: metrics.jsonl, TensorBoard, wandb, the progress display; plots and
reports made from it.
"""

from rlcore.tracking.base import BaseTracker
from rlcore.tracking.build import Trackers, build_trackers
from rlcore.tracking.samples import pick_samples

__all__ = ["BaseTracker", "Trackers", "build_trackers", "pick_samples"]
