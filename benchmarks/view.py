"""How quick `rlcore view` is on a large run: time to the first table, and of filters.

    python benchmarks/view.py                      2,500 steps of 4,096 samples, in the server
    python benchmarks/view.py --browser            and in Chromium (needs playwright and Chromium)
    python benchmarks/view.py --steps 500 --folder /tmp/large   a smaller run, kept for later

The run is made at first: its recordings are copies of a few files with short texts, its index has
random scalars.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

import numpy as np

from rlcore.data.sample import Sample, VersionSpan
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import write_rollouts
from rlcore.runs.sample_index import MERGED, Scalars, merge_tables, write_index

GROUP = 16
DIFFERENT = 4  # recordings that are made; the others are hard links to them
CHROMIUM = "/usr/bin/chromium"
STARTED_S = 60.0
# Looks at every frame for the rows that a screen has: a locator looks again after up to 0.5 s.
UNTIL_SHOWN = """rows => new Promise((done, failed) => {
  const shown = () => document.querySelectorAll(rows).length >= 50;
  const look = () => (shown() ? done() : requestAnimationFrame(look));
  look();
  setTimeout(() => failed(new Error("no table")), 60000);
})"""
FILTERS = {
    "reward < 0.1": [["reward", "<", 0.1]],
    "reward > 0.9 and length < 100": [["reward", ">", 0.9], ["length", "<", 100]],
    "finish = length": [["finish", "=", "length"]],
    "groups without variance": [["flat", "=", 1]],
    "a part of the reward >= 0.99": [["part.form", ">=", 0.99]],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2_500)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--folder", type=Path, help="where the run is kept, or is already")
    parser.add_argument("--browser", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="rlcore-view-"))
    run = folder / "large"
    try:
        if not (run / "metrics.jsonl").exists():
            make_run(run, arguments.steps, arguments.samples)
        told: dict[str, float] = {"load": os.getloadavg()[0]}
        if arguments.browser:
            with served(run) as (url, _):
                told |= in_the_browser(url)
        with served(run) as (url, server):
            told |= {"server: runs, just started (s)": seconds_of(url, "runs", {})}
            told |= of_the_server(url)
            told["memory of the server (MB)"] = resident(server.pid)
        print(json.dumps(told, indent=2))
    finally:
        if arguments.folder is None:
            shutil.rmtree(folder)


def make_run(run: Path, steps: int, samples: int) -> None:
    """Make a run of so many steps and samples, most of its recordings hard links."""
    directory = RunDirectory(run)
    directory.rollouts.mkdir(parents=True)
    rng = np.random.default_rng(0)
    made: list[tuple[Path, list[Scalars]]] = []
    for step in range(1, steps + 1):
        path = directory.rollouts_path(step)
        if len(made) < DIFFERENT:
            scalars = write_rollouts(path, step, list(_samples(rng, samples)))
            made.append((path, scalars))
        else:
            original, scalars = made[step % DIFFERENT]
            os.link(original, path)
        write_index(directory.index_path(step), step, scalars)
        if step % MERGED == 0:
            tables = [directory.index_path(one) for one in range(step - MERGED + 1, step + 1)]
            merge_tables(directory.merged_index / tables[-1].name, tables)
    directory.config_path.write_text("# a run of benchmarks/view.py\n")
    with open(directory.metrics_path, "w") as file:
        for step in range(1, steps + 1):
            row = {f"metric/{k}": float(rng.normal()) for k in range(60)}
            file.write(json.dumps({"step": step, "rollout/reward": step / steps} | row) + "\n")


def _samples(rng: np.random.Generator, count: int) -> Iterator[Sample]:
    for row in range(count):
        length = int(rng.integers(1, 200))
        reward = float(rng.random()) if row // GROUP % 5 else 0.0
        yield Sample(
            draw=row // GROUP,
            index=row % GROUP,
            prompt_id=f"train.jsonl:{row // GROUP}",
            group_id=row // GROUP,
            rollout_id=row,
            tokens=np.zeros(2, dtype=np.int32),
            loss_mask=np.array([0, 1], dtype=np.uint8),
            rollout_logprobs=np.array([-0.5], dtype=np.float32),
            versions=(VersionSpan(0, 0, 1),),
            finish_reason="length" if length > 190 else "stop",
            reward=reward,
            reward_parts={"right": reward, "form": float(rng.random())},
            prompt_text=f"what is {row}?",
            response_text=f"it is {length}",
            metadata={"source": f"set-{row % 3}"},
        )


@contextmanager
def served(run: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the run by the command, in another process."""
    server = subprocess.Popen(
        [sys.executable, "-m", "rlcore", "view", str(run)], stdout=subprocess.PIPE, text=True
    )
    kill = threading.Timer(STARTED_S, server.kill)
    kill.start()
    assert server.stdout is not None
    line = server.stdout.readline()
    kill.cancel()
    try:
        yield line.split()[-1], server
    finally:
        server.terminate()
        server.wait(STARTED_S)


def of_the_server(url: str) -> dict[str, float]:
    """Return the seconds of the first page of samples, and of filters and orders over all steps."""
    run = {"run": "large"}
    found = {"runs (s)": timed(url, "runs", {}), "first table (s)": timed(url, "samples", run)}
    everything = {**run, "steps": "all"}
    for name, filters in FILTERS.items():
        asked = {**everything, "filter": json.dumps(filters)}
        found[f"filter {name} (s)"] = timed(url, "samples", asked)
        found[f"filter {name}, sorted (s)"] = timed(url, "samples", asked | {"sort": "-length"})
    found["sorted, no filter (s)"] = timed(url, "samples", {**everything, "sort": "-reward"})
    sample = {"step": 1, "draw": 3, "index": 2}
    found["same prompt over all steps (s)"] = timed(url, "prompt", run | sample)
    found["a sample (s)"] = timed(url, "sample", run | sample)
    return found


def timed(url: str, name: str, asked: dict[str, object]) -> float:
    """Return the seconds of a request, the second time: files are then in the page cache."""
    seconds_of(url, name, asked)
    return seconds_of(url, name, asked)


def seconds_of(url: str, name: str, asked: dict[str, object]) -> float:
    """Return the seconds of a request."""
    start = time.perf_counter()
    with urlopen(f"{url}api/{name}?{urlencode(asked)}", timeout=60) as answer:
        answer.read()
    return round(time.perf_counter() - start, 3)


def in_the_browser(url: str) -> dict[str, float]:
    """Return the seconds until a reader sees the first table, and until a filter is shown.

    The server was started a moment ago, and the first table waits for all that it reads at first.
    """
    from playwright.sync_api import sync_playwright

    found = {}
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto("about:blank")
        start = time.perf_counter()
        page.goto(url + "#samples")
        page.evaluate(UNTIL_SHOWN, "tr[data-filled]")
        found["browser: first table with texts (s)"] = round(time.perf_counter() - start, 3)
        for name, filters in FILTERS.items():
            query = urlencode({"run": "large", "steps": "all", "filter": json.dumps(filters)})
            start = time.perf_counter()
            page.evaluate(
                "query => { main.replaceChildren(); location.hash = query; }", f"#samples?{query}"
            )
            page.evaluate(UNTIL_SHOWN, "tr[data-at]")
            found[f"browser: filter {name} (s)"] = round(time.perf_counter() - start, 3)
        browser.close()
    return found


def resident(process: int) -> int:
    """Return the memory of a process that is its own, in MB: mapped files do not count."""
    fields = Path(f"/proc/{process}/statm").read_text().split()
    pages = int(fields[1]) - int(fields[2])
    return pages * resource.getpagesize() >> 20


if __name__ == "__main__":
    main()
