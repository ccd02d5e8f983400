"""Compares the ledger of a run with itself, its newest checkpoint, recorded samples and versions.

Every check yields contradictions as sentences. The audit changes nothing, so a run in progress can
be audited too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rlcore.config import Config
from rlcore.config.load import load_config
from rlcore.data.curriculum.history import num_results
from rlcore.errors import DataError, UserError
from rlcore.runs.checkpoints import Checkpoint, latest_checkpoint
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import read_rollouts
from rlcore.runs.versions import Version, read_versions
from rollout.accounting.journal_reader import History, JournalPosition, read_journal
from rollout.accounting.ledger import Ledger

SHOWN = 5  # draws that a contradiction names


@dataclass
class Audit:
    """What a run's ledger says, and what contradicts it."""

    draws: int = 0
    states: dict[str, int] = field(default_factory=dict)  # state -> draws
    steps: int = 0  # steps that consumed draws
    # reason -> draws that were requeued for it, their samples given up
    given_up: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)  # kind of failure -> draws
    restarts: int = 0
    rewound: int = 0  # entries of the journal that restarts have rewound
    checkpoint: int | None = None  # step of the checkpoint that was compared
    recorded: int = 0  # steps whose recorded samples were compared
    contradictions: list[str] = field(default_factory=list)


def audit(run: RunDirectory, *, recordings: bool = True) -> Audit:
    """Audit `run`, with every recorded sample if `recordings` is set.

    Raises UserError if the folder holds no run, or the run has no ledger.
    """
    if not run.config_path.is_file():
        raise UserError(f"{run.path}: no config.yaml in it; expected the folder of a run")
    config = load_config([run.config_path]).config
    if not run.ledger_path.is_file():
        raise UserError(
            f"{run.path}: no {run.ledger_path.name} in it; runs that generate write one"
        )
    # A run in progress writes these last, so read them first.
    recorded = run.recorded_steps()
    checkpoint = latest_checkpoint(run.checkpoints)
    found = Audit()
    try:
        history = read_journal(run.ledger_path)
        ledger = history.at()
    except DataError as error:
        found.contradictions.append(str(error))
        return found
    assert ledger is not None
    found.draws = len(ledger)
    found.states = ledger.balance()
    found.steps = ledger.last_step
    for _, entry in history.entries():
        for key, transition, counts in (
            ("because", "requeued", found.given_up),
            ("kind", "failed", found.failed),
        ):
            if key in entry:
                counts[entry[key]] = counts.get(entry[key], 0) + len(entry[transition])
    found.restarts = len(history.starts[1:])
    found.rewound = history.rewound_transitions
    found.contradictions += [*check_steps(history), *check_rows(history)]
    if checkpoint is not None:
        found.checkpoint = checkpoint.step
        found.contradictions += check_checkpoint(checkpoint, history)
    try:
        versions = read_versions(run.versions_path)
        found.contradictions += check_versions(versions)
        if recordings:
            _compare_recordings(run, config, ledger, history, recorded, Lineage(versions), found)
    except DataError as error:
        found.contradictions.append(str(error))
    return found


# --- ledger and checkpoint ------------------------------------------------------------------------


def check_steps(history: History) -> Iterator[str]:
    """Steps follow one another; each consumed draws before its cut and none after."""
    done = consuming = 0
    for number, entry in history.entries():
        if "ledger" in entry:
            done = consuming = Ledger.of(entry["ledger"]).last_step
        elif "consumed" in entry:
            consuming = entry["step"]
            if consuming != done + 1:
                yield (
                    f"line {number}: step {consuming} consumed draws {_some(entry['consumed'])},"
                    f" step {done + 1} was the next"
                )
        elif "cut" in entry:
            done = entry["cut"]
            if done != consuming:
                yield (
                    f"line {number}: the cut of step {done}, while the last step that consumed"
                    f" draws is {consuming}"
                )


def check_rows(history: History) -> Iterator[str]:
    """A draw that is repeated has the row that the curriculum first chose for it."""
    chosen: dict[int, int] = {}
    for number, draw, row in _choices(history):
        before = chosen.setdefault(draw, row)
        if before != row:
            yield f"line {number}: draw {draw} is of row {row}, and was of row {before} before"


def _choices(
    history: History, until: JournalPosition | None = None
) -> Iterator[tuple[int, int, int]]:
    """(line, draw, row) of each row that a curriculum chose."""
    for number, entry in history.entries(until):
        for draw, row in zip(entry.get("drawn", ()), entry.get("rows", ())):
            yield number, draw, row


def _check_curriculum(
    name: str, saved: Mapping[str, Any], history: History, step: int
) -> Iterator[str]:
    """The checkpoint has the choices and results that the journal has at its cut."""
    cut = history.cuts[step]
    chosen = {draw: row for _, draw, row in _choices(history, cut)}
    for draw, row in saved["rows"]:
        if chosen.get(draw, row) != row:
            yield f"draw {draw} is of row {row} in {name} and of row {chosen[draw]} in the journal"
    entries = [entry for _, entry in history.entries(cut)]
    # a ledger inside the journal replaced the entries that held the results
    if any("ledger" in entry for entry in entries):
        return
    results = sum(len(entry.get("passed", ())) for entry in entries)
    if (kept := num_results(saved["results"])) != results:
        yield f"{name} has the results of {kept} groups, the journal of {results}"


def check_checkpoint(checkpoint: Checkpoint, history: History) -> Iterator[str]:
    """The checkpoint's ledger equals the journal's at its cut, as do its stream and groups."""
    name = f"the checkpoint of step {checkpoint.step}"
    source = checkpoint.state["source"]
    at_cut = history.at(checkpoint.step)
    if at_cut is None:
        yield f"the journal has no cut of step {checkpoint.step}, of which there is a checkpoint"
        return
    saved = Ledger.of(source["ledger"])
    if len(saved) != len(at_cut):
        yield f"{name} knows {len(saved)} draws, the journal {len(at_cut)} at its cut"
    common = range(min(len(saved), len(at_cut)))
    if differ := [draw for draw in common if saved.state(draw) != at_cut.state(draw)]:
        first = differ[0]
        yield (
            f"draw {first} is {saved.state(first)} in {name} and {at_cut.state(first)} in the"
            f" journal; so {len(differ)} draws"
        )
    stream = source["stream"]
    if (stream["cursor"], stream["requeued"]) != (len(saved), saved.requeued()):
        there = f"at draw {stream['cursor']}, with {_some(stream['requeued'])} to come again"
        yield (
            f"the stream of {name} is {there}; its ledger has {len(saved)} draws, requeued"
            f" {_some(saved.requeued())}"
        )
    if "curriculum" in stream:
        yield from _check_curriculum(name, stream["curriculum"], history, checkpoint.step)
    groups = sorted(group["draw"] for group in source.get("ahead", {}).get("groups", ()))
    finished = [draw for draw in saved.unsettled() if saved.state(draw) == "finished"]
    if groups != finished:
        yield f"{name} keeps the groups of draws {_some(groups)}, finished are {_some(finished)}"


# --- ledger and recordings ------------------------------------------------------------------------


def _compare_recordings(
    run: RunDirectory,
    config: Config,
    ledger: Ledger,
    history: History,
    recorded: Sequence[int],
    lineage: Lineage,
    found: Audit,
) -> None:
    consumed = ledger.consumed()
    saved = found.checkpoint or 0
    prompts = PromptsOfRows(history)
    if config.tracking.save_rollouts:
        pruned = run.pruned_through()
        missing = sorted(s for s in set(consumed) - set(recorded) if pruned < s <= saved)
        found.contradictions += [
            f"{run.rollouts_path(step).name} is missing, tracking.save_rollouts is on"
            for step in missing
        ]
    for step in recorded:
        records = read_rollouts(run.rollouts_path(step), arrays=True)
        found.contradictions += check_recording(step, records, consumed.get(step, []))
        found.contradictions += lineage.check(step, records, history.bounds.get(step))
        found.contradictions += prompts.check(step, records)
        found.recorded += 1


class PromptsOfRows:
    """The prompt of each row that a curriculum chose, taken from the recordings."""

    def __init__(self, history: History) -> None:
        self._rows = {draw: row for _, draw, row in _choices(history)}
        self._prompts: dict[int, str] = {}

    def check(self, step: int, records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
        """All draws of one row have the same prompt."""
        for draw, prompt in {record["draw"]: record["prompt_id"] for record in records}.items():
            row = self._rows.get(draw)
            if row is not None and self._prompts.setdefault(row, prompt) != prompt:
                yield (
                    f"step {step} was trained on prompt {prompt} for draw {draw}, which the ledger"
                    f" says is of row {row}, and that is {self._prompts[row]}"
                )


def check_recording(
    step: int, records: Sequence[Mapping[str, Any]], consumed: Sequence[int]
) -> Iterator[str]:
    """The step trained on exactly the draws that it consumed, and on each sample once."""
    recorded = {record["draw"] for record in records}
    if missing := sorted(set(consumed) - recorded):
        yield f"step {step} consumed draws {_some(missing)}, of which no sample is recorded"
    if unknown := sorted(recorded - set(consumed)):
        yield (
            f"step {step} was trained on draws {_some(unknown)}, which the ledger does not say it"
            " consumed"
        )
    for (draw, index), count in Counter((r["draw"], r["index"]) for r in records).most_common(1):
        if count > 1:
            yield f"step {step} was trained twice on sample {index} of draw {draw}"


# --- recordings and versions ---------------------------------------------------------------------


def check_versions(versions: Sequence[Version]) -> Iterator[str]:
    """Incarnations never decrease, and steps never decrease within an incarnation."""
    for before, after in pairwise(versions):
        if after.incarnation < before.incarnation:
            yield (
                f"version {after.version} is of incarnation {after.incarnation}, the one before of"
                f" {before.incarnation}"
            )
        if after.incarnation == before.incarnation and after.step < before.step:
            yield (
                f"version {after.version} has the weights of step {after.step}, the one before"
                f" those of {before.step}"
            )


class Lineage:
    """Knows which weights descend from which.

    A trainer that restarted from step r has lost the weights of later steps.
    """

    def __init__(self, versions: Sequence[Version]) -> None:
        self._index = {made.version: index for index, made in enumerate(versions)}
        self._versions = versions

    def check(
        self, step: int, records: Sequence[Mapping[str, Any]], max_staleness: int | None
    ) -> Iterator[str]:
        """The tokens of `step` come from ancestors of its weights, within the bound, if known."""
        trained = records[0].get("policy_version") if records else None
        if trained not in self._index:
            yield f"step {step} has trained version {trained}, which was never published"
            return
        of = self._versions[self._index[trained]].step
        if of != step - 1:
            yield f"step {step} has trained version {trained}, which is of step {of}"
        if self._forgotten(trained, len(self._versions), done=step):
            yield f"step {step} was recorded by a trainer that was restarted from an earlier step"
        for version in sorted({span[0] for record in records for span in record["versions"]}):
            if wrong := self._wrong(step, trained, version, max_staleness):
                yield f"step {step} was trained on tokens of version {version}, {wrong}"

    def _wrong(self, step: int, trained: int, version: int, max_staleness: int | None) -> str:
        """Why the step may not contain tokens of this version; "" if it may."""
        if version not in self._index:
            return "which was never published"
        made = self._versions[self._index[version]].step
        if self._forgotten(version, self._index[trained] + 1, done=made):
            return f"of step {made} of a trainer that was rolled back behind it"
        if 0 <= step - 1 - made <= (step if max_staleness is None else max_staleness):
            return ""
        return f"of policy step {made}: rollout.max_staleness was {max_staleness}"

    def _forgotten(self, version: int, until: int, *, done: int) -> bool:
        """Whether an incarnation after `version`, before index `until`, restarted below `done`."""
        since = self._versions[self._index[version] : until]
        return any(
            after.step < done
            for before, after in pairwise(since)
            if after.incarnation > before.incarnation
        )


def _some(draws: Sequence[int]) -> str:
    if not draws:
        return "none"
    more = f" and {len(draws) - SHOWN} more" if len(draws) > SHOWN else ""
    return ", ".join(map(str, draws[:SHOWN])) + more
