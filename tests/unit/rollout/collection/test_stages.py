"""Where unfinished workflows are, and how many are at their start."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rlcore.data.prompts import Prompt
from rollout.collection.group_runner import Stages

PROMPT = Prompt("rows:1", np.zeros(1, dtype=np.int32), "")
KEYS = [(draw, False, rollout) for draw in (1, 2) for rollout in (0, 1)]
STAGES = ("start", "generation", "workflow", "reward", None)


@given(st.lists(st.tuples(st.sampled_from(KEYS), st.sampled_from(STAGES))))
def test_the_count_is_that_of_the_workflows_at_their_start(moves: list) -> None:
    stages = Stages()
    known: dict = {}
    for key, stage in moves:
        if stage is None:
            stages.leave(key)
            known.pop(key, None)
        else:
            stages.enter(key, stage, PROMPT)
            known[key] = stage
        assert stages.starting == list(known.values()).count("start")
        for stage in STAGES[:-1]:
            draws = {draw for (draw, _, _), its in known.items() if its == stage}
            assert stages.waiting({stage}).keys() == draws
            assert stages.waiting({stage}, of={2}).keys() == draws & {2}
