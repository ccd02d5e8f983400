"""A publication on rank 0: whatever fails, all buckets are gathered and all ranks learn of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from rlcore.errors import ModelError, NoEngineLeft, PartLost, PublicationFailed, RunFailed
from rlcore.interfaces import BucketSender, Orders, RankAddress
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.sender_ranks import PublicationCalls, SenderRanks
from rlcore.trainer.weight_publisher import MAX_ATTEMPTS, WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets

BUCKETS = cut_buckets([TensorSpec(f"w{i}", (4,), "float32") for i in range(3)], 16)


class Backend:
    base = None

    def __init__(self) -> None:
        self.gathered: list[int] = []

    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, torch.Tensor]]:
        assert not everywhere
        for bucket in BUCKETS:
            self.gathered.append(bucket.index)
            yield bucket, torch.zeros(16, dtype=torch.uint8)


class EnginesSide:
    """Raises what `errors` holds for a step, one after the other; None is success."""

    def __init__(self, **errors: list[Exception | None]) -> None:
        self.errors = errors
        self.steps: list[str] = []

    def begin(self, method: str, *given: Any) -> Future[Any]:
        call: Future[Any] = Future()
        shown = {
            "open": lambda: "stale" if given[2] else "",
            "send": lambda: given[0],
            "finish": lambda: given[0],
        }
        self.steps.append(f"{method} {shown.get(method, str)()}".strip())
        error = self.errors[method].pop(0) if self.errors.get(method) else None
        if error is not None:
            call.set_exception(error)
        else:
            call.set_result({"open": Orders("none", {0: "serve"}), "stop": {"a": 1}}.get(method))
        return call


class Sender(BucketSender):
    def __init__(self, steps: list[str]) -> None:
        self.steps = steps

    def send(self, bucket: Bucket, flat: torch.Tensor, stopped: Any) -> None:
        if stopped() is not None:
            assert stopped() in ({"a": 1}, {})
            self.steps.append(f"rest {bucket.index}")


def publisher(tmp_path: Path, engines: EnginesSide) -> tuple[WeightPublisher, Backend]:
    backend: Any = Backend()
    sync = RankSync(HashStore(), 0, 1, timeout_s=5)
    ranks = SenderRanks(
        sync,
        make=lambda transport: Sender(engines.steps),
        address=RankAddress("here"),
        calls=PublicationCalls(engines.begin, 5.0),
    )
    journal = VersionJournal(tmp_path / "versions.jsonl")
    return WeightPublisher(backend, sync, ranks, journal=journal, timeout_s=5), backend


SENT = ["send 0", "send 1", "send 2"]


def test_each_publication_gets_a_new_version(tmp_path: Path) -> None:
    engines = EnginesSide()
    publishing, backend = publisher(tmp_path, engines)
    assert publishing.publish(1) == publishing.publish(2) == ""
    assert engines.steps == ["open", *SENT, "finish 1", "open", *SENT, "finish 2"]
    assert publishing.version == 2
    assert backend.gathered == [0, 1, 2] * 2


FAILED = ["open", "send 0", "send 1", "stop", "rest 1", "rest 2", "cancel"]


def test_after_a_failed_bucket_the_rest_is_gathered_and_all_runs_again(tmp_path: Path) -> None:
    """What engines were called for before is still sent."""
    engines = EnginesSide(send=[None, PublicationFailed("engine-0 is gone")])
    publishing, backend = publisher(tmp_path, engines)
    assert publishing.publish(1) == ""
    assert engines.steps == [*FAILED, "open", *SENT, "finish 2"]
    assert backend.gathered == [0, 1, 2] * 2


def test_bad_input_is_raised_when_all_is_gathered(tmp_path: Path) -> None:
    engines = EnginesSide(send=[None, ModelError("no such tensor")])
    publishing, backend = publisher(tmp_path, engines)
    with pytest.raises(ModelError, match="no such tensor"):
        publishing.publish(1)
    assert backend.gathered == [0, 1, 2]
    assert engines.steps == FAILED


@pytest.mark.parametrize(("step", "before"), [("open", 0), ("send", 1), ("finish", 0)])
def test_an_error_that_no_attempt_can_mend_is_the_answer_when_all_is_gathered(
    tmp_path: Path, step: str, before: int
) -> None:
    """A full disk, say: the trainer still has its own weights to save."""
    engines = EnginesSide(**{step: [*[None] * before, RunFailed("no room for the weights")]})
    publishing, backend = publisher(tmp_path, engines)
    assert publishing.publish(1) == "no room for the weights"
    assert backend.gathered == ([] if step == "open" else [0, 1, 2])
    assert engines.steps[-1] == "cancel"
    assert engines.steps.count("open") == 1


def test_it_gives_up_after_some_attempts(tmp_path: Path) -> None:
    engines = EnginesSide(finish=[PublicationFailed("not taken")] * MAX_ATTEMPTS)
    assert "could not be published in 5 attempts" in publisher(tmp_path, engines)[0].publish(3)
    assert engines.steps.count("cancel") == MAX_ATTEMPTS


def test_the_reason_why_no_engine_is_left_is_the_answer(tmp_path: Path) -> None:
    engines = EnginesSide(open=[NoEngineLeft("engine-0: killed by SIGKILL")])
    assert publisher(tmp_path, engines)[0].publish(1) == "engine-0: killed by SIGKILL"


@pytest.mark.parametrize("step", ["open", "send", "finish"])
def test_a_service_that_is_lost_meanwhile_costs_an_attempt(tmp_path: Path, step: str) -> None:
    """The next one opens at its replacement."""
    lost = PartLost("the rollout service died")
    engines = EnginesSide(**{step: [lost]}, stop=[lost], cancel=[lost])
    assert publisher(tmp_path, engines)[0].publish(1) == ""
    assert engines.steps[-5:] == ["open", *SENT, "finish 2"]


def test_a_service_without_a_replacement_is_no_reason_to_save_and_stop(tmp_path: Path) -> None:
    """The launcher learns of it as it is, and starts the ranks again."""

    class Gone(EnginesSide):
        def begin(self, method: str, *given: Any) -> Future[Any]:
            if method == "open":
                raise PartLost("the rollout service died")
            return super().begin(method, *given)

    engines = Gone(cancel=[PartLost("the rollout service died")])
    with pytest.raises(PartLost, match="the rollout service died"):
        publisher(tmp_path, engines)[0].publish(1)


def test_a_catch_up_sends_the_current_version(tmp_path: Path) -> None:
    engines = EnginesSide()
    publishing, _ = publisher(tmp_path, engines)
    publishing.publish(1)
    assert publishing.catch_up() == ""
    assert engines.steps[-5:] == ["open stale", *SENT, "finish 1"]


def test_a_catch_up_is_tried_once_and_returns_what_no_attempt_can_mend(tmp_path: Path) -> None:
    engines = EnginesSide(
        finish=[PublicationFailed("it died again"), RunFailed("no room for the weights")]
    )
    publishing, _ = publisher(tmp_path, engines)
    assert publishing.catch_up() == ""
    assert engines.steps.count("cancel") == engines.steps.count("open stale") == 1
    assert publishing.catch_up() == "no room for the weights"
