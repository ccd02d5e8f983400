"""Each view of the page, on a run with single answers and one with conversations."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from conftest import Reader, browsing, reading, serving
from view_runs import branched, crowded, measured

from rlcore.errors import DataError
from rlcore.launch.commands.view import view_runs
from rlcore.runs.rollouts import read_rollouts

NARROW = (390, 800)


@pytest.fixture(scope="module")
def reader(single: Path, talks: Path, chromium: Any) -> Iterator[Reader]:
    with browsing(chromium, single, talks) as reader:
        yield reader


def sample(run: Path, step: int, at: int = 0, **more: object) -> str:
    """The address of a sample of a step, by default the first."""
    record = read_rollouts(run / "rollouts" / f"step_{step:06d}.parquet")[at]
    where = {"run": run.name, "step": step, "draw": record["draw"], "index": record["index"]}
    return f"sample?{urlencode({**where, **more})}"


def test_runs_and_their_steps(reader: Reader) -> None:
    reader.open("runs")
    assert "completed" in reader.text("table >> nth=0")
    assert reader.page.locator(".spark").count() == 2
    assert reader.page.locator("tr[data-row]").count() == 5  # four steps, and 0
    reader.see("tr[data-row] a").click()
    reader.shown("samples")
    assert reader.page.locator("tr[data-row]").count() == 16


def test_curves_have_definitions(reader: Reader) -> None:
    reader.open("curves?metrics=rollout/reward,eval/score")
    assert reader.page.locator(".chart svg path.line").count() == 3  # one run was not evaluated
    heading = reader.see(".chart h3")
    reader.page.locator("aside input").nth(1).wait_for()
    heading.hover()
    reader.see("#tip:has-text('averaged over')")
    assert "reward" in reader.text("#tip")
    reader.page.locator(".chart svg").first.hover()
    assert "step" in reader.text(".chart figcaption")


def test_more_metrics_than_one_answer_holds(chromium: Any, tmp_path: Path) -> None:
    """The page draws the first of those that are chosen; an exported one holds all of them."""
    names = [f"m{k:02d}" for k in range(60)]
    rows = [{"step": step} | dict.fromkeys(names, step / 2) for step in (1, 2)]
    run = measured(tmp_path / "run", rows).path
    with browsing(chromium, run) as reader:
        reader.open(f"curves?metrics={','.join(names)}")
        reader.see(".note:has-text('the first 50 of 60 metrics')")
        assert reader.page.locator(".chart svg").count() == 50
    target = tmp_path / "page.html"
    assert view_runs([run], port=0, follow=False, export=target, step=None) == 0
    with reading(chromium, target.as_uri()) as reader:
        reader.open("curves?metrics=m59")
        reader.see(".chart path.line")


def test_samples_sort_filter_and_search(reader: Reader) -> None:
    reader.open("samples?run=single&steps=all")
    assert reader.text("[data-total]") == "64 samples"
    reader.see("th button:has-text('reward')").click()
    reader.see("th[aria-sort=descending]")
    rewards = cells(reader, "reward")
    assert rewards == sorted(rewards, reverse=True)
    reader.see("[aria-label='Add a condition']").fill(f"reward<{rewards[10]}")
    reader.press("Enter")
    reader.see(".chip")
    fewer = cells(reader, "reward")
    assert len(fewer) < len(rewards)
    assert max(fewer) <= rewards[10]
    reader.see(".chip").click()
    reader.see("[data-total='64']")
    asked = read_rollouts(reader_run(reader, "single"))[3]["prompt_text"]
    reader.see("[aria-label='Search the texts']").fill(asked)
    reader.press("Enter")
    reader.see(f"[role=status]:has-text('{asked}')")
    reader.see("tr[data-filled]")
    found = reader.page.locator("tr[data-row] .prompt").all_inner_texts()
    assert found
    assert all(asked.strip()[-20:] in text for text in found)


def test_every_sample_that_a_search_finds_gets_its_text(chromium: Any, tmp_path: Path) -> None:
    run = crowded(tmp_path / "run", samples=600)
    with browsing(chromium, run) as reader:
        reader.open("samples?text=evil")
        assert "600 samples" in reader.text("main [role=status]")
        assert reader.page.locator("tr[data-filled]").count() == 600


def test_branches_and_verdicts_are_marked(chromium: Any, tmp_path: Path) -> None:
    run = branched(tmp_path / "run")
    with browsing(chromium, run) as reader:
        reader.open("samples")
        rows = reader.page.locator("tr[data-row]").all_inner_texts()
        assert ["right" in row for row in rows] == [True, *[False] * 4]
        assert ["wrong" in row for row in rows] == [False, *[True] * 3, False]
        shown = reader.page.locator("td[title^=branch]")
        titles = shown.evaluate_all("cells => cells.map((cell) => cell.title)")
        assert sorted(titles) == [f"branch {k} of 3 of rollout 1" for k in (1, 2, 3)]
        reader.open(sample(run, 1, at=2))
        assert "branch 2 of 3 of rollout 1" in reader.text("section.head")
        assert "wrong" in reader.text("section.head")
        reader.open(sample(run, 1, at=2, tab="group"))
        articles = reader.page.locator("article h3").all_inner_texts()
        assert ["rollout 1" in article for article in articles] == [False, *[True] * 3, False]


def reader_run(reader: Reader, name: str) -> Path:
    """The newest recording of a run."""
    answer = reader.page.request.get(f"{reader.url}api/runs").json()
    path = next(Path(run["path"]) for run in answer["runs"] if run["name"] == name)
    return max((path / "rollouts").glob("*.parquet"))


def cells(reader: Reader, title: str) -> list[float]:
    """The numbers of a column, as they are shown."""
    reader.see("tr[data-row]")
    heads = [head.strip("\u2191\u2193 ") for head in reader.page.locator("th").all_inner_texts()]
    column = reader.page.locator(f"tr[data-row] td:nth-child({heads.index(title) + 1})")
    return [float(text) for text in column.all_inner_texts()]


def test_groups_without_variance_are_found(reader: Reader) -> None:
    query = urlencode({"run": "talks", "steps": "all", "filter": json.dumps([["flat", "=", 1]])})
    reader.open(f"samples?{query}")
    # all answers of this environment get the same reward
    assert reader.page.locator("tr[data-row]").count() == 16


def test_a_conversation_by_turns(reader: Reader, talks: Path) -> None:
    records = read_rollouts(talks / "rollouts" / "step_000002.parquet")
    reader.open(sample(talks, 2, at=next(k for k, r in enumerate(records) if r["turns"] == 2)))
    roles = reader.page.locator(".turn .who b").all_inner_texts()
    assert roles == ["user", "assistant", "user", "assistant"]
    told = reader.page.locator(".turn.assistant .why").all_inner_texts()
    assert ["turn 1" in told[0], "reward 0.5" in told[0]] == [True, True]
    assert ["turn 2" in told[1], "reward 1" in told[1]] == [True, True]


def test_tokens_by_every_vector_that_was_trained(reader: Reader, single: Path) -> None:
    reader.open(sample(single, 2, tab="tokens"))
    options = reader.page.locator("[aria-label='Colour by'] option").all()
    names = [str(option.get_attribute("value")) for option in options]
    always = {"advantage", "logprob", "engine_logprob", "gap", "ratio", "clipped", "entropy"}
    assert always | {"value", "return", "weight", "correction", "version", "staleness"} <= {*names}
    record = read_rollouts(single / "rollouts" / "step_000002.parquet")[0]
    for name in names:
        reader.see("[aria-label='Colour by']").select_option(name)
        reader.see(f".tokens[data-vector='{name}']")
    first = record["loss_mask"].index(1)
    reader.see(f"[data-t='{first}']").hover()
    told = reader.text(".token-details")
    assert f"token {record['tokens'][first]} at {first}" in told
    shown = re.search(r"\badvantage\s+([-+.\de]+\d)", told)
    assert shown
    assert float(shown[1]) == pytest.approx(record["advantages"][0], rel=1e-4)
    texts = reader.page.locator("[data-t]").all_inner_texts()
    assert record["response_text"] in "".join(texts)
    assert "context" in str(reader.see("[data-t='0']").get_attribute("class"))


def test_a_group_side_by_side(reader: Reader, single: Path) -> None:
    reader.open(sample(single, 3, tab="group"))
    assert reader.page.locator(".group article").count() == 4
    records = read_rollouts(single / "rollouts" / "step_000003.parquet")[:4]
    answers = [[t for t, bit in zip(r["tokens"], r["loss_mask"]) if bit] for r in records]
    common = next((k for k, tokens in enumerate(zip(*answers)) if len({*tokens}) > 1), None)
    common = min(map(len, answers)) if common is None else common
    assert f"share the first {common} tokens" in reader.text(".note")
    shown = reader.page.locator(".group pre").all_inner_texts()
    assert all(record["response_text"] in text for record, text in zip(records, shown))


def test_the_same_prompt_over_the_steps_and_why(reader: Reader, single: Path) -> None:
    reader.open(sample(single, 2, tab="prompt"))
    record = read_rollouts(single / "rollouts" / "step_000002.parquet")[0]
    assert f"4 samples of {record['prompt_id']}" in reader.text(".note")
    assert reader.page.locator("circle.point").count() == 4
    reader.open(sample(single, 2, tab="history"))
    assert "trainable tokens" in reader.text("main")
    assert "null" not in reader.text("main")
    rows = reader.page.locator(".body tbody tr").all_inner_texts()
    assert [row.split("\t")[1] for row in rows] == ["drawn", "finished", "consumed"]


def test_evaluations_and_flips(reader: Reader, single: Path) -> None:
    reader.open("evaluations?run=single&step=4&before=0")
    assert reader.page.locator("[aria-label=Evaluations] tr[data-row]").count() == 3
    now = read_rollouts(single / "evaluations" / "step_000004.parquet")
    then = read_rollouts(single / "evaluations" / "step_000000.parquet")
    verdicts = [[one["metadata"].get("correct") for one in pair] for pair in zip(now, then)]
    flips = sum(set(pair) == {True, False} for pair in verdicts)
    assert reader.page.locator("tr.better, tr.worse").count() == flips
    assert reader.page.locator("table.answers tr[data-row]").count() == 6


def test_two_runs_side_by_side(reader: Reader) -> None:
    reader.open("compare?a=single&a_step=1&b=single&b_step=4")
    assert "rollout/reward" in reader.text("table >> nth=0")
    assert reader.page.locator("rect.bar").count() == 40
    reader.see("[aria-label='Run b']").select_option("talks")
    reader.see("th:has-text('talks 2')")


def test_keys_alone_lead_through_the_page(reader: Reader) -> None:
    reader.open("runs")
    reader.press("3")
    reader.shown("samples")
    reader.press("j", "j")
    assert reader.page.locator("tr.here").count() == 1
    at = reader.see("tr.here").get_attribute("data-at")
    assert str(at).endswith(":1")
    reader.press("k", "j", "Enter")
    reader.shown("sample")
    reader.press("t")
    reader.see(".tokens .text").focus()
    reader.press("ArrowRight", "ArrowRight")
    assert reader.see(".token.at").get_attribute("data-t") == "1"
    reader.press("g")
    reader.see(".group")
    reader.press("]")
    reader.see("article.chosen")
    reader.press("?")
    assert "next, previous row" in reader.text("dialog")
    reader.press("Escape")
    reader.open("samples")
    reader.press("/")
    label = reader.page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label == "Add a condition"
    reader.press("Escape")
    assert reader.page.evaluate("document.activeElement === document.body")


VIEWS = ("runs", "curves", "samples?run=single&steps=all", "evaluations", "untrained", "compare")


@pytest.mark.parametrize(
    ("size", "scheme"),
    [
        pytest.param((1280, 800), "dark", id="wide-dark"),
        pytest.param(NARROW, "light", id="narrow-light"),
        pytest.param((1280, 800), "light", id="wide-light", marks=pytest.mark.full),
        pytest.param(NARROW, "dark", id="narrow-dark", marks=pytest.mark.full),
    ],
)
def test_every_width_and_scheme(
    single: Path, talks: Path, chromium: Any, scheme: str, size: tuple[int, int]
) -> None:
    """Nothing is wider than the window; text can be told from what is behind it."""
    with browsing(chromium, single, talks, size=size, color_scheme=scheme) as reader:
        for view in (*VIEWS, *(sample(single, 2, tab=t) for t in ("talk", "tokens", "group"))):
            reader.open(view)
            wide = reader.page.evaluate("document.documentElement.scrollWidth - innerWidth")
            assert wide <= 0, view
            assert len(reader.page.screenshot()) > 5_000
        style = "getComputedStyle(document.documentElement)"
        colours = (reader.page.evaluate(f"{style}.{name}") for name in ("color", "backgroundColor"))
        # The sums of red, green and blue of `rgb(...)`.
        text, back = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
        assert (text > back) == (scheme == "dark")
        assert abs(text - back) > 450


def test_a_run_that_goes_on_is_followed(single: Path, chromium: Any, tmp_path: Path) -> None:
    """Its files grow behind the page, which shows the new step by itself."""
    growing = tmp_path / "growing"
    (growing / "rollouts").mkdir(parents=True)
    (growing / "config.yaml").write_text("model: {}\n")
    rows = (single / "metrics.jsonl").read_text().splitlines(keepends=True)
    (growing / "metrics.jsonl").write_text("".join(rows[:2]))
    with browsing(chromium, growing, follow=True) as reader:
        reader.open("runs")
        assert reader.page.locator("tr[data-row]").count() == 2
        with open(growing / "metrics.jsonl", "a") as file:
            file.writelines(rows[2:])
        for folder in ("rollouts", "index"):
            name = f"{folder}/step_000004.parquet"
            (growing / folder).mkdir(exist_ok=True)
            (growing / name).write_bytes((single / name).read_bytes())
        reader.see("tr[data-row] >> nth=4")
        reader.see("td a[href*='steps=4']")  # indexed too


def test_what_changes_while_a_field_is_used_is_drawn_after_it(
    chromium: Any, tmp_path: Path
) -> None:
    rows = [{"step": step, "m": step / 2} for step in range(1, 5)]
    runs = [measured(tmp_path / name, rows[:2]) for name in ("one", "other")]
    with browsing(chromium, *(run.path for run in runs), follow=True) as reader:
        reader.open("curves?metrics=m")
        reader.see("aside [type=search]").focus()
        measured(runs[0].path, rows[:3])
        for _ in range(2):  # the second one was asked for after the file had grown
            with reader.page.expect_response(lambda answer: "api/runs" in answer.url):
                pass
        assert "step 2" in reader.text("figcaption")
        reader.press("Escape")
        reader.see("figcaption:has-text('step 3')")
        reader.see("#run").focus()  # it keeps the focus after a choice
        measured(runs[0].path, rows)
        reader.see("figcaption:has-text('step 4')")


def test_a_late_failure_leaves_the_view_at_hand(chromium: Any, tmp_path: Path) -> None:
    run = measured(tmp_path / "run", [{"step": 1, "m": 1.0}])
    asked = threading.Event()

    def fail_late(_: object) -> None:
        asked.wait(60)
        raise DataError("too late")

    with serving(run.path) as server, reading(chromium, server.url) as reader:
        server.api.find_timeline = fail_late
        reader.open("runs")
        with reader.page.expect_request(lambda request: "api/timeline" in request.url):
            reader.press("7")
        reader.press("2")
        reader.shown("curves")
        with reader.page.expect_event("console"):  # which tells of every refusal
            asked.set()
        reader.page.wait_for_timeout(300)
        reader.shown("curves")
        assert "status of 400" in reader.complaints.pop()
