"""A publication on rank 0: whatever fails, all buckets are gathered and all ranks learn of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from rlcore.errors import ModelError, NoEngineLeft, PartLost, PublicationFailed, RunFailed
from rlcore.runs.versions import VersionJournal
from rlcore.trainer.rank_sync import RankSync
from rlcore.trainer.weight_publisher import MAX_ATTEMPTS, WeightPublisher
from rlcore.weights import Bucket, TensorSpec, cut_buckets

BUCKETS = cut_buckets([TensorSpec(f"w{i}", (4,), "float32") for i in range(3)], 16)


class Backend:
    def __init__(self) -> None:
        self.gathered: list[int] = []

    def buckets(self) -> tuple[Bucket, ...]:
        return BUCKETS

    def export_buckets(self, *, everywhere: bool = False) -> Iterator[tuple[Bucket, torch.Tensor]]:
        assert not everywhere
        for bucket in BUCKETS:
            self.gathered.append(bucket.index)
            yield bucket, torch.zeros(16, dtype=torch.uint8)


class Sink:
    """Raises what `errors` holds for a step, one after the other; None is success."""

    def __init__(self, **errors: list[Exception | None]) -> None:
        self.errors = errors
        self.steps: list[str] = []

    def _step(self, name: str, said: object = "") -> None:
        self.steps.append(f"{name} {said}".strip())
        if self.errors.get(name) and (error := self.errors[name].pop(0)) is not None:
            raise error

    handle_gpus = ()

    def prepare(
        self,
        buckets: Sequence[Bucket],
        *,
        only_stale: bool = False,
        trainer_gpus: Sequence[str] = (),
        trainer_ranks: Sequence[object] = (),
    ) -> None:
        self._step("prepare", "stale" if only_stale else "")

    def send(self, bucket: Bucket, flat: torch.Tensor, handles: None) -> None:
        self._step("send", bucket.index)

    def send_called(self, bucket: Bucket, flat: torch.Tensor) -> None:
        self._step("called", bucket.index)

    def finish(self, version: int) -> None:
        self._step("finish", version)

    def cancel(self) -> None:
        self._step("cancel")

    def close(self) -> None: ...


def publisher(tmp_path: Path, sink: Sink) -> tuple[WeightPublisher, Backend]:
    backend = Backend()
    sync = RankSync(HashStore(), 0, 1, timeout_s=5)
    journal = VersionJournal(tmp_path / "versions.jsonl")
    return WeightPublisher(backend, sync, sink=sink, journal=journal, timeout_s=5), backend  # type: ignore[arg-type]


SENT = ["send 0", "send 1", "send 2"]


def test_each_publication_gets_a_new_version(tmp_path: Path) -> None:
    sink = Sink()
    publishing, backend = publisher(tmp_path, sink)
    assert publishing.publish(1) == publishing.publish(2) == ""
    assert sink.steps == ["prepare", *SENT, "finish 1", "prepare", *SENT, "finish 2"]
    assert publishing.version == 2
    assert backend.gathered == [0, 1, 2] * 2


def test_after_a_failed_bucket_the_rest_is_gathered_and_all_runs_again(tmp_path: Path) -> None:
    sink = Sink(send=[None, PublicationFailed("engine-0 is gone")])
    publishing, backend = publisher(tmp_path, sink)
    assert publishing.publish(1) == ""
    failed = ["prepare", "send 0", "send 1", "called 2", "cancel"]
    assert sink.steps == [*failed, "prepare", *SENT, "finish 2"]
    assert backend.gathered == [0, 1, 2] * 2


def test_bad_input_is_raised_when_all_is_gathered(tmp_path: Path) -> None:
    sink = Sink(send=[None, ModelError("no such tensor")], called=[RunFailed("no loop")])
    publishing, backend = publisher(tmp_path, sink)
    with pytest.raises(ModelError, match="no such tensor"):
        publishing.publish(1)
    assert backend.gathered == [0, 1, 2]
    assert sink.steps == ["prepare", "send 0", "send 1", "called 2", "cancel"]


@pytest.mark.parametrize(("step", "before"), [("prepare", 0), ("send", 1), ("finish", 0)])
def test_an_error_that_no_attempt_can_mend_is_the_answer_when_all_is_gathered(
    tmp_path: Path, step: str, before: int
) -> None:
    """A full disk, say: the trainer still has its own weights to save."""
    sink = Sink(**{step: [*[None] * before, RunFailed("no room for the weights")]})
    publishing, backend = publisher(tmp_path, sink)
    assert publishing.publish(1) == "no room for the weights"
    assert backend.gathered == ([] if step == "prepare" else [0, 1, 2])
    assert sink.steps[-1] == "cancel"
    assert sink.steps.count("prepare") == 1


def test_it_gives_up_after_some_attempts(tmp_path: Path) -> None:
    sink = Sink(finish=[PublicationFailed("not taken")] * MAX_ATTEMPTS)
    assert "could not be published in 5 attempts" in publisher(tmp_path, sink)[0].publish(3)
    assert sink.steps.count("cancel") == MAX_ATTEMPTS


def test_the_reason_why_no_engine_is_left_is_the_answer(tmp_path: Path) -> None:
    sink = Sink(prepare=[NoEngineLeft("engine-0: killed by SIGKILL")])
    assert publisher(tmp_path, sink)[0].publish(1) == "engine-0: killed by SIGKILL"


@pytest.mark.parametrize("step", ["prepare", "send", "finish"])
def test_a_lost_service_is_no_reason_to_save_and_stop(tmp_path: Path, step: str) -> None:
    """The launcher learns of it as it is, and starts the ranks again."""
    sink = Sink(**{step: [PartLost("the rollout service died")]})
    with pytest.raises(PartLost, match="the rollout service died"):
        publisher(tmp_path, sink)[0].publish(1)
    assert sink.steps[-1] == "cancel"


def test_a_catch_up_sends_the_current_version(tmp_path: Path) -> None:
    sink = Sink()
    publishing, _ = publisher(tmp_path, sink)
    publishing.publish(1)
    assert publishing.catch_up() == ""
    assert sink.steps[-5:] == ["prepare stale", *SENT, "finish 1"]


def test_a_catch_up_is_tried_once_and_returns_what_no_attempt_can_mend(tmp_path: Path) -> None:
    sink = Sink(finish=[PublicationFailed("it died again"), RunFailed("no room for the weights")])
    publishing, _ = publisher(tmp_path, sink)
    assert publishing.catch_up() == ""
    assert sink.steps.count("cancel") == sink.steps.count("prepare stale") == 1
    assert publishing.catch_up() == "no room for the weights"
