from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from rlcore.errors import DataError
from rlcore.timeline import files
from rlcore.timeline.files import HEADER, Span, members, read_spans, recorded_steps
from rlcore.timeline.recorder import GROUP, Recorder, TrackAllocator, group_key, now, of_group
from tests.trace_rules import names_of, read_trace

MAIN = ("rank 0", "main")
LIMIT = 1 << 20


def opened(run: Path, process: str = "rank_0", limit: int = LIMIT) -> Recorder:
    recorder = Recorder()
    recorder.open(run / "timeline", process, limit_bytes=limit)
    return recorder


def step_of(
    recorder: Recorder, step: int, name: str = "step", track: tuple[str, str] = MAIN
) -> None:
    with recorder.span(track, name):
        pass
    recorder.flush(step)


def names(run: Path, *steps: int) -> list[str]:
    return [span.name for span in read_spans(run, *steps).spans]


def test_spans_moments_and_counters_come_back(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    began = now()
    with recorder.span(MAIN, "step", weight=3):
        recorder.instant(("rollouts", "hand-over"), "step 1", groups=4)
        recorder.counter("rollouts", "in flight", 7)
    recorder.add(("engine a", "slot 0"), "request", began, now(), groups=["1/2"])
    recorder.flush(1)
    found = {span.name: span for span in read_spans(tmp_path).spans}
    assert found["step"].args == {"weight": 3}
    assert (found["step"].group, found["step"].lane, found["step"].step) == (*MAIN, 1)
    assert found["step 1"].kind == "i"
    assert found["in flight"].args == {"value": 7}
    assert found["request"].begin <= found["step"].begin <= found["in flight"].begin
    assert found["request"].end >= found["step"].end


def test_a_span_that_fails_says_so(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    with pytest.raises(ValueError, match="no"), recorder.span(MAIN, "step"):
        raise ValueError("no")
    recorder.flush(1)
    assert read_spans(tmp_path).spans[0].args == {"failed": "ValueError"}


def test_a_recorder_that_is_off_makes_nothing(tmp_path: Path) -> None:
    recorder = opened(tmp_path, limit=0)
    step_of(recorder, 1)
    recorder.begin(0)
    assert not (tmp_path / "timeline").exists()
    with pytest.raises(DataError, match="timeline_mb"):
        read_spans(tmp_path)


def test_threads_and_tasks_lose_nothing(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    stop = threading.Event()

    def record(thread: int) -> None:
        for number in range(500):
            recorder.add((f"thread {thread}", "main"), str(number), now(), now())

    def flush() -> None:
        while not stop.is_set():
            recorder.flush(1)

    async def tasks() -> list[str]:
        lanes = TrackAllocator("rewards", "worker")

        async def one(draw: int) -> str:
            GROUP.set(group_key(5, draw))
            lane = lanes.take()
            await asyncio.sleep(0)
            recorder.add(lanes.track(lane), "part", now(), now(), **of_group())
            lanes.give_back(lane)
            return of_group()["group"]

        return await asyncio.gather(*(one(draw) for draw in range(20)))

    threads = [threading.Thread(target=record, args=(number,)) for number in range(3)]
    flusher = threading.Thread(target=flush)
    for thread in (*threads, flusher):
        thread.start()
    assert asyncio.run(tasks()) == [f"5/{draw}" for draw in range(20)]
    for thread in threads:
        thread.join(timeout=60)
    stop.set()
    flusher.join(timeout=60)
    recorder.add(MAIN, "step", 0.0, now())
    recorder.flush(1)
    spans = read_spans(tmp_path).spans
    assert len(spans) == 3 * 500 + 20 + 1
    assert {span.args["group"] for span in spans if span.group == "rewards"} == {
        f"5/{draw}" for draw in range(20)
    }


def test_memory_is_bounded_and_what_is_lost_is_counted(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.max_records = 3
    for number in range(5):
        recorder.add(MAIN, str(number), number, number + 1)
    recorder.flush(1)
    found = read_spans(tmp_path)
    assert [span.name for span in found.spans] == ["0", "1", "2"]
    assert found.lost == 2
    step_of(recorder, 2)
    assert read_spans(tmp_path, 2).spans[0].name == "step", "there is room again"


def test_files_are_bounded_and_keep_the_newest_steps(tmp_path: Path) -> None:
    recorder = opened(tmp_path, limit=20_000)
    most_files = 0
    for step in range(1, 301):
        step_of(recorder, step, f"step {step}")
        sizes = [path.stat().st_size for path in (tmp_path / "timeline").iterdir()]
        most_files = max(most_files, len(sizes))
        assert sum(sizes) <= 20_000 + 2000
    assert most_files == 2
    steps = recorded_steps(tmp_path)
    assert steps == [*range(steps[0], 301)]
    assert 10 < len(steps) < 290
    assert names(tmp_path, 300) == ["step 300"]
    other = opened(tmp_path, "rank_1")
    for step in range(299, 303):  # a full file makes nothing void in those of others
        step_of(other, step, f"other {step}", ("rank 1", "main"))
        step_of(recorder, step, f"step {step}")


def test_steps_that_a_resumed_run_makes_again_are_read_once(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.begin(0)
    other = opened(tmp_path, "rank_1")
    for step in (1, 2, 3):
        step_of(first, step, f"old {step}")
        step_of(other, step, f"other {step}", ("rank 1", "main"))
    torn = tmp_path / "timeline" / "rank_0.json.gz"
    whole = torn.read_bytes()
    step_of(first, 4, "old 4")
    fourth = torn.read_bytes()[len(whole) :]
    for size in (HEADER.size - 1, HEADER.size + 3, len(fourth) - 1):
        torn.write_bytes(whole + fourth[:size])
        assert recorded_steps(tmp_path) == [1, 2, 3], "a step that is torn, or being written"
    again = opened(tmp_path)
    again.begin(1)
    assert recorded_steps(tmp_path) == [1]
    step_of(again, 2, "new 2")
    found = read_spans(tmp_path)
    # the run goes on without a rank 1, which had made steps 2 and 3 too
    assert [span.name for span in found.spans] == ["old 1", "other 1", "new 2"]
    assert list(found.windows) == [1, 2]
    read_trace(torn)


def test_only_what_overlaps_the_steps_is_read(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    for step in range(1, 5):
        at = 10.0 * step
        recorder.add(MAIN, f"step {step}", at, at + 9)
        recorder.add(("engine a", "slot 0"), f"long {step}", at + 8, at + 11)
        recorder.flush(step)
    found = read_spans(tmp_path, 2, 2)
    assert [span.name for span in found.spans] == ["long 1", "step 2", "long 2"]
    assert found.windows == {2: (2.0, 11.0)}, "`long 1` had begun before"
    assert names(tmp_path, 3, 4) == ["long 2", "step 3", "long 3", "step 4", "long 4"]


def test_processes_meet_by_the_wall_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one machine share a clock; that of another began elsewhere."""
    for process, clock, wall in (
        ("rank_0", 100.0, 1000.0), ("rank_1", 101.0, 1001.0), ("rank_2", 5000.0, 1000.5),
    ):  # fmt: skip
        monkeypatch.setattr(files.time, "perf_counter", lambda clock=clock: clock)
        monkeypatch.setattr(files.time, "time", lambda wall=wall: wall)
        recorder = opened(tmp_path, process)
        at = clock if process == "rank_2" else 100.0
        recorder.add((process.replace("_", " "), "main"), process, at + 1, at + 3)
        recorder.flush(1)
    found = {span.name: span for span in read_spans(tmp_path).spans}
    assert found["rank_0"].begin == found["rank_1"].begin == 0.0
    assert found["rank_2"].begin == pytest.approx(0.5)


def test_a_disk_that_refuses_ends_the_timeline_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "timeline").write_text("a file")
    recorder = opened(tmp_path)
    step_of(recorder, 1)
    step_of(recorder, 2)
    assert len([r for r in caplog.records if "not recorded any more" in r.message]) == 1
    assert not recorder.enabled


def test_a_name_that_no_file_can_hold_does_not_end_the_run(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.begin(1)
    recorder.add(("tools", "\ud800"), "\ud800", 1.0, 2.0)
    recorder.flush(1)
    assert not recorder.enabled


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    step_of(recorder, 1)
    path = tmp_path / "timeline" / "rank_0.json.gz"
    whole = path.read_bytes()
    for at in (HEADER.size + 9, len(whole) - 6):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(DataError, match=r"rank_0\.json\.gz.*step 1"):
            read_spans(tmp_path)
    path.write_bytes(b"[\n" + whole)
    with pytest.raises(DataError, match="no step of a timeline at byte 0"):
        read_spans(tmp_path)
    again = opened(tmp_path)
    step_of(again, 2)
    assert not again.enabled, "it is no reason to end a run"


def test_a_file_is_a_trace_whatever_names_say(tmp_path: Path) -> None:
    recorder = opened(tmp_path)
    recorder.begin(-1)
    name = '\n{"ph":"i"},\n],'
    recorder.add(("tools", name), name, 1.0, 2.5, text=name)
    recorder.add(MAIN, "step", 1.0, 3.0)
    recorder.counter("rollouts", "in flight", 7)
    recorder.flush(1)
    recorder.flush(2)
    path = tmp_path / "timeline" / "rank_0.json.gz"
    assert [(one.step, one.voids) for one in members(path)] == [(-1, True), (1, False), (2, False)]
    events = read_trace(path)
    assert {*names_of(events).values()} == {MAIN, ("tools", name), ("rollouts", "in flight")}


def test_a_span_knows_how_long_it_took() -> None:
    assert Span("X", *MAIN, "a", 1.0, 3.5, 1).seconds == 2.5
