"""Has SGLang look once an update whether a model has copies of its weights that would stay old.

SGLang 0.5.23 refuses updates of such models. Before it loads a bucket it goes through all modules
of the model several times: 60 % of what a bucket costs beside its bytes (96 layers, on a CPU:
benchmarks/bucket_costs.py). Its own comment says that the answer is certain from the start on.

Runs in the engines' environment, which does not have rlcore: it imports nothing of ours.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Wrap a function and a method of this process."""
    from sglang.srt.managers.scheduler_components.weight_updater import (
        SchedulerWeightUpdaterManager as Manager,
    )
    from sglang.srt.model_executor.model_runner_components import weight_updater

    look = weight_updater._unsupported_derived_weight_cache_error
    begin = Manager.begin_weight_update
    seen: dict[int, str | None] = {}  # by the identity of a model

    def look_once(model: Any = None) -> str | None:
        if id(model) not in seen:
            seen[id(model)] = look(model)
        return seen[id(model)]

    def begin_anew(self: Any, request: Any) -> Any:
        seen.clear()
        return begin(self, request)

    weight_updater._unsupported_derived_weight_cache_error = look_once
    Manager.begin_weight_update = begin_anew
