"""Prompts that cannot fit are left out, and sources are drawn from by weight."""

from __future__ import annotations

import json
import logging
from collections import Counter

import numpy as np
import pytest

from rlcore.data.loading import (
    MixtureStream,
    Share,
    check_context,
    load_prompts,
    prompt_stream,
    prompt_warnings,
)
from rlcore.errors import ConfigError, DataError

ROWS = [{"prompt": "1" * n, "label": "1"} for n in (3, 7, 5, 9)]


@pytest.fixture
def model(tmp_path):
    """A folder that says how long a context may be."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 10}))
    return tmp_path


def test_a_prompt_that_leaves_no_room_is_left_out(write_rows, tokenizer, make_run, model, caplog):
    run = make_run(model=model, max_new_tokens=4, paths=[write_rows(ROWS)])
    with caplog.at_level(logging.WARNING):
        prompts = load_prompts(run, tokenizer)
    assert [len(prompt.tokens) for prompt in prompts] == [3, 5]
    assert prompts.num_excluded == 2
    assert (
        "2 of 4 prompts have more than the context of 10 (max_position_embeddings in config.json)"
        " less max_new_tokens (4) = 6 tokens and are left out" in caplog.text
    )
    longer = load_prompts(run, tokenizer, run.data.paths, max_new_tokens=7)  # an evaluation's
    assert [len(prompt.tokens) for prompt in longer] == [3]


def test_each_row_is_counted_under_the_tightest_limit(write_rows, tokenizer, make_run, model):
    run = make_run(model=model, max_new_tokens=4, max_prompt_tokens=4, paths=[write_rows(ROWS)])
    prompts = load_prompts(run, tokenizer)
    assert [(limit.why, len(rows)) for limit, rows in prompts.left_out.items()] == [
        ("data.max_prompt_tokens", 3)
    ]


def test_servers_keep_some_of_the_context(write_rows, tokenizer, make_run, model):
    run = make_run(model=model, max_new_tokens=2, paths=[write_rows(ROWS)])
    assert len(load_prompts(run, tokenizer)) == 3
    run.rollout.engine.kind = "sglang"
    assert [len(p.tokens) for p in load_prompts(run, tokenizer)] == [3, 5]
    run.rollout.engine.server = {"context_length": 11}
    assert [len(p.tokens) for p in load_prompts(run, tokenizer)] == [3, 7, 5]


def test_sparse_attention_ends_where_it_is_no_longer_dense(write_rows, tokenizer, make_run, model):
    sizes = {"max_position_embeddings": 100, "index_topk": 10}
    (model / "config.json").write_text(json.dumps(sizes))
    run = make_run(model=model, max_new_tokens=4, paths=[write_rows(ROWS)])
    assert [len(prompt.tokens) for prompt in load_prompts(run, tokenizer)] == [3, 5]
    run.rollout.engine.server = {"context_length": 50}
    with pytest.raises(ConfigError, match=r"context of 10 \(index_topk in config\.json\)"):
        check_context(make_run(model=model, max_new_tokens=10, paths=["none"]))
    assert len(load_prompts(run, tokenizer)) == 2


def test_nothing_fits(write_rows, tokenizer, make_run, model):
    run = make_run(model=model, max_new_tokens=8, paths=[write_rows(ROWS)])
    with pytest.raises(ConfigError, match=r"all 4 prompts .*context of 10 .*max_new_tokens \(8\)"):
        load_prompts(run, tokenizer)


def test_a_response_as_long_as_the_context_is_refused_without_reading_the_data(make_run, model):
    check_context(make_run(model=model, max_new_tokens=9, paths=["none"]))
    with pytest.raises(ConfigError, match=r"max_new_tokens: 10 leaves no room .*context of 10"):
        check_context(make_run(model=model, max_new_tokens=10, paths=["none"]))
    run = make_run(model=model, max_new_tokens=2, paths=["none"])
    run.evaluation.paths = ["held_out"]
    run.evaluation.max_new_tokens = 12
    with pytest.raises(ConfigError, match=r"12 leaves no room .*evaluation\.max_new_tokens"):
        check_context(run)


def test_steps_of_more_prompts_than_there_are_get_a_note(make_run):
    run = make_run(paths=["none"], max_new_tokens=2)
    run.rollout.prompts_per_step = 5000
    [note] = prompt_warnings(run, 3000)
    assert note.startswith("rollout.prompts_per_step: 5000 is more than the 3000 prompts")
    assert prompt_warnings(run, 5000) == []
    run.algorithm.loss.name = "sft"
    run.training.batch_size = 256
    [note] = prompt_warnings(run, 100)
    assert note.startswith("training.batch_size: 256 is more than the 100 rows")
    assert prompt_warnings(run, 256) == []


def test_a_resume_with_other_files_names_them(tmp_path, tokenizer, make_run):
    for name in "abc":
        (tmp_path / f"{name}.jsonl").write_text('{"prompt": "1+1", "label": "2"}\n')
    run = make_run(paths=[f"{tmp_path}/*.jsonl"])

    def stream():
        return prompt_stream(run, load_prompts(run, tokenizer))

    before = stream()
    saved = before.snapshot()
    assert list(saved["files"]) == [f"{tmp_path}/{name}.jsonl" for name in "abc"]
    stream().restore(saved)
    (tmp_path / "d.jsonl").write_text('{"prompt": "1+2", "label": "3"}\n')
    (tmp_path / "a.jsonl").unlink()
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write('{"prompt": "1+3", "label": "4"}\n')
    with pytest.raises(
        DataError,
        match=r"saved with 3 prompts .*; new: \S+d\.jsonl; gone: \S+a\.jsonl; with other numbers of"
        r" rows: \S+b\.jsonl; resume with the same data",
    ):
        stream().restore(saved)


# --- sources --------------------------------------------------------------------------------------


@pytest.fixture
def two_sources(write_rows):
    ones = [{"prompt": f"1+{i}", "label": "1"} for i in range(3)]
    twos = [{"question": f"2+{i}", "x": "2"} for i in range(5)]
    return {
        "ones": {"paths": write_rows(ones, "a.jsonl"), "weight": 1, "system_prompt": "0"},
        "twos": {
            "paths": write_rows(twos, "b.jsonl"),
            "weight": 3,
            "prompt_key": "question",
            "label_key": "x",
        },
    }


def test_sources_have_keys_and_names_of_their_own(two_sources, chat_tokenizer, make_run):
    run = make_run(sources=two_sources)
    prompts = load_prompts(run, chat_tokenizer)
    assert [p.row["source"] for p in prompts] == ["ones"] * 3 + ["twos"] * 5
    assert (prompts[0].text, prompts[3].text) == ("<0\n<1+0\n<", "2+0")
    assert [p.label for p in prompts] == ["1"] * 3 + ["2"] * 5
    stream = prompt_stream(run, prompts)
    drawn = Counter(prompts[stream.row(draw)].row["source"] for draw in range(4000))
    assert drawn["twos"] / 4000 == pytest.approx(0.75, abs=0.02)
    two_sources["ones"]["weight"] = 2
    other = make_run(sources=two_sources)
    reweighted = prompt_stream(other, load_prompts(other, chat_tokenizer))
    with pytest.raises(DataError, match="fingerprint"):  # other weights are another order
        reweighted.restore(stream.snapshot())


def test_sources_without_weights_give_each_row_once_an_epoch(two_sources, chat_tokenizer, make_run):
    for source in two_sources.values():
        del source["weight"]
    run = make_run(sources=two_sources)
    stream = prompt_stream(run, load_prompts(run, chat_tokenizer))
    assert sorted(stream.row(draw) for draw in range(8)) == list(range(8))


def test_a_source_of_which_nothing_fits_is_named(two_sources, tokenizer, make_run):
    two_sources["ones"].pop("system_prompt")
    two_sources["ones"]["prompt_template"] = "11111111{prompt}"
    run = make_run(sources=two_sources, max_prompt_tokens=5)
    with pytest.raises(ConfigError, match=r"data\.sources\.ones: none of its rows is left"):
        prompt_stream(run, load_prompts(run, tokenizer))


SHARES = [Share("a", 0, 7, 0.5), Share("b", 7, 40, 2.0), Share("c", 47, 3, 1e-3)]


def oracle(count: int, *, seed: int) -> list[int]:
    """The same draws, made one after another with counters instead of by address."""
    stream = MixtureStream(SHARES, seed=seed)
    passes: list[list[int]] = [[] for _ in SHARES]
    epochs = [0] * len(SHARES)
    rows = []
    for draw in range(count):
        source = stream.source(draw)
        share = SHARES[source]
        if not passes[source]:
            order = stream._permutation(share.size, stream._seeds[source], epochs[source])
            passes[source] = order.tolist()
            epochs[source] += 1
        rows.append(share.first + passes[source].pop(0))
    return rows


def test_a_draw_of_the_mixture_is_a_function_of_its_number():
    expected = oracle(20_000, seed=3)
    forward = MixtureStream(SHARES, seed=3)
    assert [forward.row(draw) for draw in range(20_000)] == expected
    numbers = np.random.default_rng(0).permutation(20_000)[:3000].tolist()
    anyhow = MixtureStream(SHARES, seed=3)
    assert [anyhow.row(draw) for draw in numbers] == [expected[draw] for draw in numbers]
    assert (
        MixtureStream(SHARES, seed=4).row(5) != expected[5] or oracle(50, seed=4) != expected[:50]
    )


def test_a_resumed_mixture_goes_on_and_draws_the_same_rows():
    stream = MixtureStream(SHARES, seed=5, fingerprint="x")
    rows = [stream.row(draw) for draw in stream.take(10_000)]
    stream.requeue(77)
    again = MixtureStream(SHARES, seed=5, fingerprint="x")
    again.restore(json.loads(json.dumps(stream.snapshot())))
    draws = again.take(3)
    assert draws == [77, 10_000, 10_001]
    assert [again.row(draw) for draw in draws] == [stream.row(draw) for draw in draws]
    assert again.row(77) == rows[77]


def test_the_order_of_a_mixture_is_pinned():
    """Runs that were begun go on in the same order with later versions."""
    stream = MixtureStream(SHARES, seed=1)
    assert [stream.row(draw) for draw in range(8)] == PINNED


PINNED = [37, 2, 17, 43, 25, 4, 39, 15]


def test_each_pass_over_a_source_has_each_row_once() -> None:
    """Also where its draws are found in several blocks."""
    shares = [Share("a", 0, 700, 3.0), Share("b", 700, 300, 1.0)]
    stream = MixtureStream(shares, seed=5)
    drawn: list[list[int]] = [[], []]
    for draw in range(13_000):
        drawn[stream.source(draw)].append(stream.row(draw))
    for share, rows in zip(shares, drawn):
        assert len(rows) > 3 * share.size
        for begin in range(0, len(rows) - share.size, share.size):
            once = sorted(rows[begin : begin + share.size])
            assert once == [*range(share.first, share.first + share.size)]
