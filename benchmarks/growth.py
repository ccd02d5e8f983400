"""Whether a long run grows: memory, descriptors, threads and the run's folder, every 100 steps.

    python benchmarks/growth.py [--steps 10000] [--out runs/growth] [--plot docs/images/growth.png]

It trains a tiny model on additions in one process, with the embedded engine in it: the smallest
steps that there are. It writes growth.csv beside the run, and the curves. The last lines that it
prints compare the last tenth of the run with the tenth after its first quarter.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

POLL_S = 0.2
END_S = 60.0
SILENT_S = 300.0  # without a step, before the run counts as hung
KEEP = 100
SETTINGS = (
    "run.name=growth",
    "run.threads=1",
    "data.paths=train.jsonl",
    "model.path=model",
    "model.dtype=fp32",
    "rollout.service=in_process",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "rollout.sampling.max_new_tokens=2",
    "reward.parts={exact_match: {function: exact_match}}",
    "checkpoint.every=500",
    "checkpoint.export_hf=false",
    f"tracking.keep_rollouts={KEEP}",
    "tracking.show_every=1000",
)


@dataclass(frozen=True)
class Look:
    """What the run's processes and its folder hold at a step."""

    step: int
    seconds: float
    rss_mb: float  # resident memory of the trainer and its descendants
    descriptors: int
    threads: int
    processes: int
    folder_mb: float  # but for metrics, ledger and versions, which are a line a step
    journals_mb: float
    files: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Train and measure; exit code 1 if the run fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--every", type=int, default=100, help="steps from one look to the next")
    parser.add_argument("--out", type=Path, default=Path("runs/growth"))
    parser.add_argument("--plot", type=Path, help="a PNG or SVG of the curves")
    parser.add_argument("--limit-s", type=float, help="end the run cleanly after so many seconds")
    given = parser.parse_args(arguments)
    given.out.mkdir(parents=True, exist_ok=True)
    looks = measure(given.out, given.steps, given.every, given.limit_s)
    write_csv(given.out / "growth.csv", looks)
    if given.plot is not None:
        plot(looks, given.plot)
    print(*compare(looks), sep="\n")
    return 0 if looks and looks[-1].step >= given.every else 1


def measure(out: Path, steps: int, every: int, limit_s: float | None) -> list[Look]:
    """Run the trainer and look at it every so many steps."""
    prepare(out)
    command = [sys.executable, "-m", "rlcore", "train", *SETTINGS, f"training.steps={steps}"]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).resolve().parents[1])}
    looks: list[Look] = []
    began = time.monotonic()
    moved = began
    with (out / "output.log").open("wb") as log:
        run = subprocess.Popen(
            [*command, "--overwrite", "run.dir=runs"],
            cwd=out,
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            while run.poll() is None:
                step = last_step(out / "runs" / "growth" / "metrics.jsonl")
                if step >= (looks[-1].step if looks else 0) + every:
                    looks.append(look(run.pid, out / "runs" / "growth", step, began))
                    moved = time.monotonic()
                now = time.monotonic()
                if now - moved > SILENT_S or (limit_s is not None and now - began > limit_s):
                    break
                time.sleep(POLL_S)
        finally:
            if run.poll() is None:
                run.terminate()
                try:
                    run.wait(timeout=END_S)
                except subprocess.TimeoutExpired:
                    run.kill()
                    run.wait(timeout=END_S)
    return looks


def prepare(out: Path) -> None:
    """Write the model and the additions."""
    model = out / "model"
    command = [sys.executable, "-m", "rlcore", "init-model", str(model), "--overwrite"]
    sizes = ["--hidden", "16", "--layers", "1", "--heads", "2", "--kv-heads", "1"]
    subprocess.run([*command, *sizes, "--intermediate", "32"], check=True, timeout=300)
    lines = (
        f'{{"prompt": "{a}+{b}=", "label": "{a + b}"}}\n' for a in range(50) for b in range(50)
    )
    (out / "train.jsonl").write_text("".join(lines))


def last_step(metrics: Path) -> int:
    """Return the step of the last whole line, 0 if there is none; reads the end of the file."""
    try:
        with metrics.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 65536))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return 0
    whole = [line for line in lines[:-1] if line.startswith(b'{"step": ')]
    return int(whole[-1][9:].partition(b",")[0]) if whole else 0


def look(pid: int, folder: Path, step: int, began: float) -> Look:
    """Measure the process, its descendants, and the folder."""
    pids = descendants(pid)
    journals = [folder / name for name in ("metrics.jsonl", "ledger.jsonl", "versions.jsonl")]
    in_journals = sum(path.stat().st_size for path in journals if path.exists())
    total, files = disk_use(folder)
    return Look(
        step=step,
        seconds=round(time.monotonic() - began, 1),
        rss_mb=round(sum(map(resident, pids)) / 2**20, 1),
        descriptors=sum(entries(pid, "fd") for pid in pids),
        threads=sum(entries(pid, "task") for pid in pids),
        processes=len(pids),
        folder_mb=round((total - in_journals) / 2**20, 2),
        journals_mb=round(in_journals / 2**20, 2),
        files=files,
    )


def descendants(pid: int) -> list[int]:
    """Return the process and all that it and its children started."""
    found = [pid]
    for each in found:
        try:
            for task in Path(f"/proc/{each}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
    return found


def resident(pid: int) -> int:
    """Return the resident bytes of a process, 0 if it is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def entries(pid: int, folder: str) -> int:
    """Return how many descriptors (fd) or threads (task) a process has, 0 if it is gone."""
    try:
        return len(os.listdir(f"/proc/{pid}/{folder}"))
    except FileNotFoundError:
        return 0


def disk_use(folder: Path) -> tuple[int, int]:
    """Return the bytes and the number of the files in a folder that changes meanwhile."""
    total = 0
    count = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
                count += 1
            except FileNotFoundError:
                continue
    return total, count


def write_csv(path: Path, looks: Sequence[Look]) -> None:
    """Write a row a look."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Look)])
        writer.writeheader()
        writer.writerows(asdict(each) for each in looks)


def compare(looks: Sequence[Look]) -> list[str]:
    """Say how the last tenth differs from the tenth after the first quarter."""
    tenth = len(looks) // 10
    if tenth == 0:
        return [f"{len(looks)} looks are too few to compare"]
    start = len(looks) // 4
    early = looks[start : start + tenth]
    late = looks[-tenth:]
    lines = [f"steps {early[0].step}-{early[-1].step} and {late[0].step}-{late[-1].step}, medians:"]
    for name in ("rss_mb", "descriptors", "threads", "processes", "folder_mb", "files"):
        before = median(getattr(each, name) for each in early)
        after = median(getattr(each, name) for each in late)
        lines.append(f"  {name:12} {before:10.1f} {after:10.1f}")
    return lines


def plot(looks: Sequence[Look], path: Path) -> None:
    """Draw memory, descriptors and threads, and the folder, over the steps."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    panels = (
        ("resident memory, MB", ("rss_mb",)),
        ("descriptors and threads", ("descriptors", "threads")),
        ("run's folder, MB", ("folder_mb", "journals_mb")),
    )
    for axes, (title, names) in zip(figure.subplots(3, 1, sharex=True), panels):
        for name in names:
            axes.plot([each.step for each in looks], [getattr(each, name) for each in looks])
        axes.set_title(title, loc="left", fontsize=10)
        if len(names) > 1:
            axes.legend(names, fontsize=8, frameon=False)
        axes.set_ylim(0, 1.15 * max(getattr(each, name) for each in looks for name in names))
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("step")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
