"""The process group of the backend `nccl_rules`."""

from __future__ import annotations

from tests.nccl_rules.moves import Moves
from tests.nccl_rules.point_to_point import PointToPoint
from tests.nccl_rules.reductions import Reductions


class NcclRulesGroup(Moves, Reductions, PointToPoint):
    """All operations; see the package for the rules."""
