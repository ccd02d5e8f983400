"""The server of the page: who is answered, with what, and what stays shut."""

from __future__ import annotations

import http.client
import json
import math
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlcore.data.sample import Sample, TurnSpan, VersionSpan
from rlcore.errors import UserError
from rlcore.launch.commands.view import RunApi, greeting, named
from rlcore.runs.directory import RunDirectory
from rlcore.runs.rollouts import write_rollouts
from rlcore.runs.sample_index import write_index
from rlcore.view import comparison
from rlcore.view.comparison import answers_of, sets_of
from rlcore.view.export import export_page
from rlcore.view.metrics import MAX_POINTS, MetricsTable
from rlcore.view.run import RunView, TokenTexts
from rlcore.view.server import ViewServer
from rollout.collection.evaluation import means

Answer = tuple[int, http.client.HTTPMessage, bytes]


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    found = RunDirectory(tmp_path / "run")
    found.rollouts.mkdir(parents=True)
    found.metrics_path.write_text('{"step": 1, "a": NaN, "b": 2.5}\n{"step": 2, "b": 3}\n{"torn')
    record(found, 1, [sample(k) for k in range(6)])
    return found


def record(run: RunDirectory, step: int, samples: Sequence[Sample]) -> None:
    write_index(run.index_path(step), step, write_rollouts(run.rollouts_path(step), step, samples))


def sample(k: int) -> Sample:
    return Sample(
        draw=k // 2, index=k % 2, prompt_id=f"file:{k // 2}", group_id=k // 2, rollout_id=k,
        tokens=np.arange(3, dtype=np.int32), loss_mask=np.array([0, 1, 1], dtype=np.uint8),
        rollout_logprobs=np.zeros(2, dtype=np.float32), versions=(VersionSpan(0, 0, 2),),
        finish_reason="stop", reward=float(k), prompt_text="Prompt", response_text=f"answer {k}",
    )  # fmt: skip


@pytest.fixture
def view(run: RunDirectory) -> RunView:
    return RunView("run", run.path)


@pytest.fixture
def server(view: RunView) -> Iterator[ViewServer]:
    made = ViewServer(RunApi([view], follow=False))
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.stop()
    thread.join()


def ask(server: ViewServer, path: str, *, method: str = "GET", host: str | None = None) -> Answer:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", f"127.0.0.1:{server.port}" if host is None else host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.headers, answer.read()
    connection.close()
    return found


def get(server: ViewServer, name: str) -> Any:
    status, _, content = ask(server, f"/{server.token}/api/{name}")
    assert status == 200, content
    return json.loads(content)


def refused(server: ViewServer, asked: str, said: str = "") -> None:
    status, _, content = ask(server, f"/{server.token}/api/{asked}")
    assert status == 400
    assert json.loads(content)["error"]
    assert said in content.decode()


def test_the_page_allows_its_own_scripts_alone(server: ViewServer) -> None:
    status, headers, content = ask(server, f"/{server.token}/")
    assert status == 200
    assert b"rlcore view" in content
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert server.address[0] == "127.0.0.1"


@pytest.mark.parametrize("path", ["/", "/api/runs", "/x/", "/x/api/runs", "//", "/{token}x/"])
def test_without_the_token_there_is_nothing(server: ViewServer, path: str) -> None:
    status, _, content = ask(server, path.format(token=server.token))
    assert status == 403
    assert b"run" not in content.replace(b"rlcore view has printed", b"")


HERE = ["localhost:9", "127.0.0.1:9", "[::1]:9", "LOCALHOST"]  # the other end of a tunnel, too
ELSEWHERE = ["evil.example", "evil.example:80", "", "127.0.0.1.evil.example:1"]
FILES = ["../server.py", "static/style.css", "..%2fserver.py", "apis/runs", "index.html"]


@pytest.mark.parametrize(
    ("path", "given", "status"),
    [
        *[("api/runs", {"host": host}, 200) for host in HERE],
        *[("api/runs", {"host": host}, 403) for host in ELSEWHERE],
        *[
            ("api/runs", {"method": method}, 501)
            for method in ("POST", "PUT", "DELETE", "OPTIONS", "HEAD")
        ],
        *[(path, {}, 404) for path in (*FILES, "/etc/passwd")],
    ],
)
def test_it_only_reads_its_own_files_under_its_own_name(
    server: ViewServer, path: str, given: dict[str, str], status: int
) -> None:
    assert ask(server, f"/{server.token}/{path}", **given)[0] == status


@pytest.mark.parametrize(
    "asked",
    ["samples?run=../run", "sample?run=run&step=../1&draw=0&index=0", "nothing", "samples",
     "sample?run=run&step=1&draw=0&index=77", "samples?run=run&steps=1-x",
     "samples?run=run&limit=-1",
     "samples?run=run&filter=[1]", "samples?run=run&filter=[[%22reward%22,%22<%22,NaN]]",
     f"samples?run=run&filter=[[%22reward%22,%22<%22,1{'0' * 400}]]",
     f"texts?run=run{'&at=1:1' * 501}",
     "draw?run=run&draw=0", "evaluation?run=run&step=9&before=9"],
)  # fmt: skip
def test_wrong_requests_are_told_so(server: ViewServer, asked: str) -> None:
    refused(server, asked)


def test_samples_are_sorted_searched_and_shown(server: ViewServer, run: RunDirectory) -> None:
    found = get(server, "samples?run=run&sort=-reward&limit=2")
    assert [row["reward"] for row in found["rows"]] == [5.0, 4.0]
    assert get(server, "search?run=run&text=ANSWER+3")["rows"][0]["reward"] == 3.0
    few = "&filter=[[%22reward%22,%22<%22,3]]"
    assert get(server, f"search?run=run&text=answer{few}")["rows"][-1]["reward"] == 2.0
    assert get(server, "sample?run=run&step=1&draw=1&index=1")["group"] == [0, 1]
    assert get(server, "prompt?run=run&step=1&draw=1&index=1")["total"] == 2
    record(run, 2, [sample(9)])
    (listed,) = get(server, "runs")["runs"]
    assert (listed["steps"]["last"], listed["samples"]) == (2, 7)
    record(run, 2, [sample(9), sample(10)])
    assert get(server, "runs")["runs"][0]["samples"] == 8, "it was recorded anew"


def test_words_of_a_conversation_are_found(server: ViewServer, run: RunDirectory) -> None:
    said = [{"role": "assistant", "content": 'Far from "Zanzibar".'}]
    asked = replace(sample(1), messages=said, turn_spans=(TurnSpan(0, 1, 0, 2),))
    record(run, 1, [sample(0), asked])
    [row] = get(server, "search?run=run&text=from+%22zanzibar")["rows"]
    assert row["reward"] == 1.0


def test_metrics_with_nan_and_a_torn_line(server: ViewServer) -> None:
    found = get(server, "curves?metric=b&metric=a")
    assert found == {
        "b": {"run": {"steps": [1, 2], "values": [2.5, 3.0]}},
        "a": {"run": {"steps": [1], "values": [None]}},  # the line has a gap there
    }
    [run] = get(server, "runs")["runs"]
    assert run["newest"] == {"step": 2.0, "b": 3.0}
    assert "a" in run["metrics"]


def table_of(folder: Path, rows: Sequence[dict[str, Any]]) -> tuple[MetricsTable, Path]:
    path = folder / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return MetricsTable(lambda: path), path


def test_values_that_are_not_finite_are_shown_as_such(tmp_path: Path) -> None:
    rows = [{"step": step, "a": 1.0 if step < 5000 else math.nan} for step in range(5001)]
    rows += [{"step": 5001, "a": math.nan, "high": math.inf, "eval/score": -math.inf}]
    table, _ = table_of(tmp_path, rows)
    assert table.newest() == {
        "step": 5001, "a": "NaN", "high": "Infinity", "eval/score": "-Infinity"
    }  # fmt: skip
    assert table.rows([5000]) == [{"step": 5000, "a": "NaN"}]
    assert table.last("eval/score") == "-Infinity"
    curve = table.curve("a")
    assert len(curve["steps"]) <= MAX_POINTS
    np.testing.assert_array_equal(np.isnan(curve["values"]), curve["steps"] >= 5000)


def test_metrics_that_are_no_numbers_begin_late_or_end(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": step, "a": step} for step in range(9)]
    rows[2] |= {"a": None, "text": "x", "true": True}
    rows[3] |= {"a": "x", "late": 0.5, "text": "y"}
    rows += [{"step": 10**30, "a": 1}, {"step": 5000, "a": 10**400, "new": 1}]
    table, path = table_of(tmp_path, rows)
    assert table.names() == ["a", "late", "new", "step", "true"]
    assert list(table.steps) == [*range(9), 5000]
    assert table.rows([2, 3, 4]) == [
        {"step": 2, "true": 1},
        {"step": 3, "late": 0.5},
        {"step": 4, "a": 4},
    ]
    assert table.newest() == {"step": 5000, "new": 1}
    with path.open("a") as file:
        file.write('{"step": 5001, "a": 2}\n')
    assert table.newest() == {"step": 5001, "a": 2}
    assert table.curve("new")["steps"].tolist() == [5000]
    assert table.curve("a")["steps"][-2:].tolist() == [8, 5001]


def test_a_step_without_its_samples_is_compared_by_what_is_left(
    server: ViewServer, run: RunDirectory
) -> None:
    for step in (1, 2):
        record(run, step, [sample(k) for k in range(6)])
    asked = "compare?a=run&a_step=1&b=run&b_step=2"
    assert len(get(server, asked)["prompts"]) == 3
    run.rollouts_path(1).unlink()  # as tracking.keep_rollouts does
    found = get(server, asked)
    assert found["prompts"] == []
    assert "samples of step 1 are not on the disk" in found["missing"]
    assert ["b", 2.5, 3.0] in found["metrics"]
    assert [sum(side) for side in found["histograms"]] == [6, 6]


@pytest.mark.parametrize("name", ["rollouts", "index"])
def test_links_out_of_the_run_are_not_followed(
    server: ViewServer, run: RunDirectory, name: str
) -> None:
    path = run.path / name / "step_000001.parquet"
    secret = run.path.parent / "secret"
    path.rename(secret)
    path.symlink_to(secret)
    refused(server, "sample?run=run&step=1&draw=0&index=0", "link out of the run")


def test_what_few_readers_of_json_know_is_shown_and_exported(
    server: ViewServer, run: RunDirectory, tmp_path: Path
) -> None:
    metadata = {"seed": 2**70, "half": "\ud800", "loss": math.nan}
    record(run, 1, [replace(sample(0), metadata=metadata)])
    shown = get(server, "sample?run=run&step=1&draw=0&index=0")
    target = tmp_path / "page.html"
    export_page(server.api, target, step=None)
    exported = embedded(target)["runs"]["run"]["samples"]["1:0:0"]
    for page in (shown, exported):
        assert page["record"]["metadata"] == metadata | {"loss": None}


def embedded(page: Path) -> Any:
    block = page.read_text().partition('id="embedded">')[2].partition("</script>")[0]
    return json.loads(block, parse_constant=pytest.fail)


def test_an_exported_page_has_no_folders_of_the_machine(run: RunDirectory, tmp_path: Path) -> None:
    """Paths are planted wherever a run writes some; what the data says stays."""
    folder = tmp_path / "planted"
    said = f"read {folder}/notes.txt"
    kept = "http://rm:8000/score/x: 1/2 and/or runs/a, ./runs/a, org/name:train:7"  # begin no path
    error = f"{kept} [Errno 2] No such file: '{folder}/x.py', file://{folder}/y, {folder}"
    one = replace(
        sample(0), prompt_id=f"{folder}/rows.jsonl:7", prompt_text=said, label={"path": said},
        metadata={"reward_error": error, "reward_info": {"x": {"problem": error}}, "path": said},
    )  # fmt: skip
    for step in (1, 2):
        record(run, step, [one, replace(one, index=1)])
    run.evaluations.mkdir()
    write_rollouts(run.evaluations_path(1), 1, [one])
    run.result_path.write_text(json.dumps({"status": "failed", "reason": error, "steps": 2}))
    config = {"model": {"path": str(folder / "model")}, "run": {"dir": str(folder)}}
    run.config_path.write_text(json.dumps(config))
    view = RunView("run", run.path)
    export_page(RunApi([view], follow=False), tmp_path / "page.html", step=None)
    found = embedded(tmp_path / "page.html")

    page = found["runs"]["run"]["samples"]["2:0:0"]
    assert page["record"]["prompt_id"] == "rows.jsonl:7"
    assert page["trouble"].startswith("no tokenizer here (tokenizer.json), so")
    cut = f"{kept} [Errno 2] No such file: 'x.py', y, planted"
    assert page["record"]["metadata"] == {
        "reward_error": cut, "reward_info": {"x": {"problem": cut}}, "path": said,
    }  # fmt: skip
    assert page["record"]["label"] == {"path": said}
    assert page["messages"][0]["content"] == said
    listed = found["answers"]["runs?"]["runs"][0]
    assert (listed["path"], listed["reason"]) == ("run", cut)
    # what the data said aside, no folder is left in the file
    assert str(tmp_path) not in json.dumps(found).replace(said, "")


def test_evaluations_are_read_without_their_tokens(
    view: RunView, run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.evaluations.mkdir()
    for step in (0, 1):
        answers = [replace(sample(k), metadata={"correct": k < 2 + step}) for k in range(6)]
        for answer in answers:
            answer.reward = 0.25 + answer.metadata["correct"] / 8  # no reward is above a half
        write_rollouts(run.evaluations_path(step), step, answers)
    read_table = comparison.read_table
    read: set[str] = set()

    def watched(path: Path, *, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
        for row, answer in read_table(path, columns=columns):
            read.update(answer)
            yield row, answer

    monkeypatch.setattr(comparison, "read_table", watched)
    newest = sets_of(view)[0]
    assert [newest[name] for name in ("right", "better", "worse")] == [3, 1, 0]
    assert not {"tokens", "rollout_logprobs", "response_text"} & read
    [flipped, *_] = answers_of(view, "", 1, 0)["rows"]
    assert flipped["flip"] == "better"
    told = {"response": "answer 2", "length": 2, "finish": "stop", "reward": 0.375}
    told |= {"verdict": "right"}
    assert told.items() <= flipped["now"].items()
    assert "tokens" not in read


def test_an_evaluation_counts_rollouts_and_judges_them_as_the_accuracy_does(
    view: RunView, run: RunDirectory
) -> None:
    """Two rollouts to each prompt, the second of two branches; one prompt has no verdict at all."""
    run.evaluations.mkdir()
    verdicts = [True, True, False, None, None, None]
    made = [sample(k) for k in range(6)]
    for k, (one, correct) in enumerate(zip(made, verdicts)):
        one.prompt_id = f"file:{k // 3}"
        one.draw = k // 3
        one.rollout_id = (one.draw << 20) + (k % 3 > 0)
        one.reward = 1.0
        one.metadata = {} if correct is None else {"correct": correct}
    write_rollouts(run.evaluations_path(1), 1, made)
    (found,) = sets_of(view)
    accuracy = means([made[:1], made[1:3], made[3:4], made[4:]])["accuracy"]
    assert (found["answers"], found["right"], accuracy) == (4, 1, 0.5)
    shown = [row["now"] for row in answers_of(view, "", 1, 1)["rows"]]
    assert [one["verdict"] for one in shown] == ["right", "wrong", "", ""]
    assert [one["branches"] for one in shown] == [1, 2, 1, 2]

    write_rollouts(run.evaluations_path(2), 2, made[3:])
    assert sets_of(view)[0]["right"] is None, "nothing says right or wrong"


def test_a_ledger_out_of_the_run_is_not_read(server: ViewServer, run: RunDirectory) -> None:
    secret = run.path.parent / "secret"
    secret.write_text(json.dumps({"failed": [0], "kind": "theirs"}) + "\n")
    run.ledger_path.symlink_to(secret)
    for asked in ("ledger?run=run", "draw?run=run&draw=0"):
        refused(server, asked, "link out of the run")


def test_requests_that_meet_count_each_line_of_the_ledger_once(
    view: RunView, run: RunDirectory
) -> None:
    failed = "".join(json.dumps({"failed": [draw], "kind": "slow"}) + "\n" for draw in range(9000))
    run.ledger_path.write_text(failed)
    api = RunApi([view], follow=False)
    with ThreadPoolExecutor(4) as threads:
        asked = threads.map(lambda _: api.answer("ledger", {"run": ["run"]}), range(4))
        told = [answer["counts"] for answer in asked]
    assert told == [[["failed", "slow", 9000]]] * 4


def test_runs_are_named_and_other_folders_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run"):
        RunView("x", tmp_path)
    paths = [tmp_path / "a" / "run", tmp_path / "b" / "run", tmp_path / "a" / ".." / "a" / "run"]
    assert [*named(paths)] == ["run", "b/run"]


def test_over_ssh_the_tunnel_is_told(server: ViewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    assert "ssh" not in "\n".join(greeting(server))
    monkeypatch.setenv("SSH_CONNECTION", "1 2 3 4")
    assert f"-L {server.port}:127.0.0.1:{server.port}" in "\n".join(greeting(server))


def byte_tokenizer() -> Tokenizer:
    """Each byte is a token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: at for at, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_character_of_several_tokens_stands_at_its_first(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(lambda: {"model": {"path": str(tmp_path)}}, tmp_path / "runs" / "a")
    tokens = tokenizer.encode("aé b😀cd").ids
    assert len(tokens) == 11
    assert texts.of(tokens) == ["a", "é", "", " ", "b", "😀", "", "", "", "c", "d"]
    # bytes that are no character stay as they are, and so does what follows
    broken = [*tokens[:2], *tokens[3:5]]
    assert texts.of(broken) == ["a", "\ufffd", " ", "b"]
    assert texts.trouble == ""


def test_without_a_tokenizer_tokens_are_shown_by_number(tmp_path: Path) -> None:
    texts = TokenTexts(lambda: json.loads("{}"), tmp_path)
    assert texts.of([5, 7]) == ["[5]", "[7]"]
    assert "shown by number" in texts.trouble
