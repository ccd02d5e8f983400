"""Hugging Face datasets, and rows that stay on the disk."""

from __future__ import annotations

import sys
import tracemalloc
from pathlib import Path

import numpy as np
import public_rows as public
import pytest

from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import check_examples, open_examples
from rlcore.data.paths.hub import check_path, expand, open_path
from rlcore.data.ragged_file import RaggedWriter
from rlcore.data.rows import open_rows
from rlcore.errors import DataError
from tests.unit.data.prompt_sets import load_set


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"openai/gsm8k .*pip install 'rlcore\[datasets\]'"):
        check_path("openai/gsm8k")
    (tmp_path / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"pip install 'rlcore\[datasets\]'"):
        check_path(str(tmp_path))


def test_what_is_no_data_set_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"holds no files of rows; .*/\*\*/\*\.parquet"):
        expand(str(tmp_path), "train")
    with pytest.raises(DataError, match=r"\*\.jsonl matches no file"):
        expand(f"{tmp_path}/*.jsonl", "train")
    for path in ("data/train.jsonl", "data/train.parquet", "./a/b/c", "/nowhere/rows"):
        with pytest.raises(DataError, match="does not exist"):
            check_path(path)


def names(folder, *wanted):
    for name in wanted:
        (folder / name).write_text("")
    return str(folder)


def test_a_pattern_stands_for_its_matches_in_order(tmp_path):
    folder = names(tmp_path, "b.jsonl", "a.jsonl", "c.parquet")
    (tmp_path / "d").mkdir()
    names(tmp_path / "d", "z.jsonl")
    assert expand(f"{folder}/?.jsonl", "train") == [f"{folder}/a.jsonl", f"{folder}/b.jsonl"]
    assert expand(f"{folder}/**/*.jsonl", "train") == [
        f"{folder}/{name}.jsonl" for name in ("a", "b", "d/z")
    ]
    odd = tmp_path / "x[1].jsonl"
    odd.write_text("")
    assert expand(str(odd), "train") == [str(odd)], "a file that is there is itself"


SLICES = ("[-3:]", "[:-3]", "[2:5]", "[:]", "[::2]", "[1::3]", "[-4:-1:2]", "[0:100]", "[9:]")


@pytest.mark.parametrize("text", SLICES)
@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_slice_has_the_rows_of_pythons_slice(write_rows, tmp_path, text, suffix):
    rows = [{"prompt": f"{i}=", "label": str(i)} for i in range(10)]
    path = write_rows(rows)
    if suffix == "parquet":
        path = public.write_parquet(tmp_path / "rows.parquet", rows)
    parts = [int(part) if part else None for part in text[1:-1].split(":")]
    data = DataConfig(paths=[f"{path}@{text}"])
    examples = open_examples(data)
    expected = list(range(10))[slice(*parts)]
    assert len(examples) == len(expected)
    assert [int(example.label) for example in examples] == expected
    assert [int(examples[i].label) for i in range(len(examples))] == expected
    assert [examples.where(i) for i in range(len(examples))] == [
        f"{path}:{i + 1}" for i in expected
    ]
    check_examples(data)


def test_a_slice_of_a_pattern_or_folder_is_one_of_a_single_file(tmp_path):
    folder = names(tmp_path, "a.jsonl")
    assert expand(f"{folder}/*.jsonl@[:3]", "train") == [f"{folder}/a.jsonl@[:3]"]
    assert expand(f"{folder}@[:3]", "train") == [f"{folder}/a.jsonl@[:3]"]
    names(tmp_path, "b.jsonl", "c.jsonl@[:3]")
    for path in (f"{folder}/*.jsonl@[:3]", f"{folder}@[:3]"):
        with pytest.raises(DataError, match="is a slice of 2 files; give each file its own slice"):
            expand(path, "train")
    whole = f"{folder}/c.jsonl@[:3]"
    assert expand(whole, "train") == [whole], "a file that is there is itself"
    assert expand("openai/gsm8k:test@[:3]", "train") == ["openai/gsm8k:test@[:3]"]
    assert len(open_path("reasoning-gym:gcd?size=9@[-2:]", subset=None, split="train")) == 2


@pytest.mark.parametrize(
    "text",
    [
        *("@[5]", "@[]", "@[50%:]", "@[:10%]", "@[a:b]", "@[::0]", "@[::-1]", "@[1:2:3:4]"),
        "@[1:2",
        *("[:10%]", "[:100]", "[10:]", ":train[:10%]", ":train[:100]"),
    ],
)
def test_other_slices_are_refused_by_saying_how_one_is_written(write_rows, text):
    path = write_rows([{"prompt": "1=", "label": "1"}])
    for whole in (path, "openai/gsm8k"):
        with pytest.raises(DataError, match=r"a slice is written PATH@\[first:last\]"):
            check_examples(DataConfig(paths=[whole + text]))
    with pytest.raises(DataError, match=r"data\.split: 'train\[:10%\]' is a slice, which goes"):
        check_examples(DataConfig(paths=[path], split="train[:10%]"))
    with pytest.raises(DataError, match="selects none of the 1 rows"):
        open_examples(DataConfig(paths=[f"{path}@[1:]"]))


def test_a_folder_stands_for_its_shards_in_order(tmp_path):
    folder = names(tmp_path, "part-2.jsonl", "part-1.jsonl", "info.json", ".part-0.jsonl", "README")
    assert expand(folder, "train") == [f"{folder}/part-1.jsonl", f"{folder}/part-2.jsonl"]
    names(tmp_path, "rows.parquet")
    with pytest.raises(DataError, match=r"files of several kinds: \.jsonl, \.parquet; .*pattern"):
        expand(folder, "train")


def test_of_a_folder_with_splits_one_is_taken(tmp_path):
    """As verl's and the hub's folders: who trains on the test set learns nothing from it."""
    shards = [f"train-0000{i}-of-00002.parquet" for i in (1, 0)]
    folder = names(tmp_path, *shards, "test.parquet")
    assert expand(folder, "train") == [f"{folder}/{name}" for name in sorted(shards)]
    assert expand(f"{folder}:test", "train") == [f"{folder}/test.parquet"]
    with pytest.raises(DataError, match=r"no files of the split 'dev' .* it has 'test', 'train'"):
        expand(folder, "dev")
    other = tmp_path / "other"
    other.mkdir()
    names(other, "a.jsonl")
    with pytest.raises(DataError, match="no files of the split 'test'"):
        expand(f"{other}:test", "train")


def test_shards_are_read_as_one_and_every_source_has_its_split(tmp_path):
    for name, text in (("train", "1"), ("test", "2")):
        for number in (1, 0):
            row = f'{{"prompt": "{text}+{number}", "label": "x"}}\n'
            (tmp_path / f"{name}-{number}-of-2.jsonl").write_text(row * 2)
    found = open_examples(DataConfig(paths=[str(tmp_path)]))
    assert [(e.prompt, e.where) for e in found] == [
        (f"1+{number}", f"{tmp_path}/train-{number}-of-2.jsonl:{line}")
        for number in (0, 1)
        for line in (1, 2)
    ]
    sources = {"a": {"paths": [str(tmp_path)]}, "b": {"paths": [str(tmp_path)], "split": "test"}}
    data = DataConfig.model_validate({"sources": sources})
    assert [e.prompt for e in open_examples(data)][::2] == ["1+0", "1+1", "2+0", "2+1"]
    check_examples(data)
    with pytest.raises(DataError, match="matches no file"):
        check_examples(data, [f"{tmp_path}/*.parquet"])


def test_more_shards_than_a_process_may_open_are_an_error_that_says_so(tmp_path):
    resource = pytest.importorskip("resource")
    paths = []
    for number in range(40):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_text("{}\n")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, before[1]))
    try:
        with pytest.raises(DataError, match=r"Too many open files; raise the limit \(ulimit -n\)"):
            list(map(open_rows, paths))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def gsm8k():
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_list([public.verl_gsm8k(f"{i}+1", str(i + 1)) for i in range(9)])


def test_a_saved_folder_is_read_like_parquet(tmp_path, gsm8k, tokenizer):
    gsm8k.save_to_disk(tmp_path / "saved")
    prompts = load_set([str(tmp_path / "saved")], tokenizer_of(tokenizer))
    parquet = public.write_parquet(tmp_path / "rows.parquet", gsm8k.to_list())
    assert prompts.fingerprint() == load_set([parquet], tokenizer).fingerprint()
    assert [p.label for p in prompts] == [str(i + 1) for i in range(9)]
    assert prompts[8].prompt_id == f"{tmp_path / 'saved'}:9"


def test_a_split_is_chosen(tmp_path, gsm8k, tokenizer):
    import datasets

    path = tmp_path / "splits"
    datasets.DatasetDict({"train": gsm8k, "test": gsm8k.select([3])}).save_to_disk(path)
    found = open_examples(DataConfig(paths=[str(path)], split="test"))
    assert [example.label for example in found] == ["4"]
    named = open_examples(DataConfig(paths=[f"{path}:test"]))
    assert [(e.where, e.label) for e in named] == [(f"{path}:test:1", "4")]
    with pytest.raises(DataError, match=r"has no split 'dev' \(data\.split\).*'train', 'test'"):
        open_examples(DataConfig(paths=[str(path)], split="dev"))


def test_a_name_needs_the_network(monkeypatch, tokenizer):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        DataError, match=r"no-such/set is no file or folder here, and .*save_to_disk"
    ):
        load_set(["no-such/set"], tokenizer)


def tokenizer_of(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return tokenizer


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_stay_on_the_disk(write_rows, tmp_path, tokenizer, kind):
    """A row of a kilobyte costs few bytes of memory, so that a million are no matter."""
    rows = [{**public.plain("1+2=", "3"), "note": "x" * 1000, "n": i} for i in range(5000)]
    parquet = str(tmp_path / "rows.parquet")
    path = write_rows(rows) if kind == "jsonl" else public.write_parquet(tmp_path / parquet, rows)
    del rows
    load_set([path], tokenizer, max_prompts=10)  # what is imported on first use
    tracemalloc.start()
    prompts = load_set([path], tokenizer)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(prompts) < 150
    assert prompts[4321].row["n"] == 4321


def test_a_row_of_a_large_parquet_file_is_found(tmp_path):
    rows = [{"prompt": "1", "label": str(i)} for i in range(5000)]
    file = open_rows(tmp_path / public.write_parquet(tmp_path / "rows.parquet", rows))
    assert len(file) == 5000
    for i in (0, 1023, 1024, 3333, 4999):
        assert file[i]["label"] == str(i)
    assert [row["label"] for row in file] == [str(i) for i in range(5000)]


def test_a_ragged_array_gives_back_what_was_written():
    writer = RaggedWriter(np.int32)
    given = [np.arange(n, dtype=np.int32) for n in (3, 0, 5)]
    for values in given:
        writer.add(values)
    array = writer.done()
    assert len(array) == 3
    assert [array[i].tolist() for i in range(3)] == [values.tolist() for values in given]
    assert RaggedWriter(np.uint8).done().values.shape == (0,)
