"""Reading and tokenising prompts: what comes out, and what every kind of bad row gets."""

from __future__ import annotations

import json
import logging
import math
import re
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import BatchEncoding, PreTrainedTokenizerFast

from rlcore.config.sections.data import DataConfig
from rlcore.data.examples import open_examples
from rlcore.data.prompts import PromptSet
from rlcore.data.rows import open_rows
from rlcore.data.tokenizer import encode, load_tokenizer, stop_token_ids
from rlcore.errors import ConfigError, DataError, ModelError
from tests.unit.data.prompt_sets import excluded, load_set

GOOD = {"prompt": "1+2=", "label": "3"}
GOOD_CHAT = {"prompt": [{"role": "user", "content": "1"}], "label": "3", "tools": []}


def test_text_rows_become_prompts(write_rows, tokenizer):
    path = write_rows([GOOD, {"prompt": "10+2=", "label": 12, "source": "book"}])
    prompts = load_set([path], tokenizer)
    assert len(prompts) == 2
    second = prompts[1]
    assert second.prompt_id == f"{path}:2"
    assert second.tokens.dtype == np.int32
    assert tokenizer.decode(second.tokens) == second.text == "10+2="
    assert (second.label, second.row) == (12, {"source": "book"})
    assert prompts.lengths.tolist() == [4, 5]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["1+2="], "abcdef": ["3"]}, ": not a readable parquet file"),
        ({"prompt": ["1+2=", "abcdef"], "label": ["3", "4"]}, ":1 to 2: a text that is not UTF-8"),
    ],
)
def test_parquet_names_and_texts_that_are_not_utf8_are_refused(
    tmp_path, tokenizer, columns, message
):
    path = tmp_path / "rows.parquet"
    as_is = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table(columns), path, store_schema=False, **as_is)
    path.write_bytes(path.read_bytes().replace(b"abcdef", b"ab\xd9def"))
    with pytest.raises(DataError, match=rf"rows\.parquet{message}"):
        load_set([str(path)], tokenizer)


def test_several_files_are_read_in_order(write_rows, tokenizer):
    paths = [write_rows([GOOD], "b.jsonl"), write_rows([{"prompt": "5=", "label": "5"}], "a.jsonl")]
    assert [p.text for p in load_set(paths, tokenizer)] == ["1+2=", "5="]


def test_chats_go_through_the_template_with_a_generation_prompt(write_rows, chat_tokenizer):
    messages = [{"role": "system", "content": "+"}, {"role": "user", "content": "1+2"}]
    prompts = load_set([write_rows([{"prompt": messages, "label": "3"}])], chat_tokenizer)
    assert prompts[0].text == "<+\n<1+2\n<"
    assert chat_tokenizer.decode(prompts[0].tokens) == "<+\n<1+2\n<"


def test_parquet_chats_drop_fields_that_are_null(tmp_path, chat_tokenizer):
    messages = [
        {"role": "user", "content": "1", "name": None},
        {"role": "user", "content": "2", "name": "x"},
    ]
    pq.write_table(
        pa.Table.from_pylist([{"prompt": messages, "label": "3"}]), tmp_path / "chat.parquet"
    )
    prompts = load_set([str(tmp_path / "chat.parquet")], chat_tokenizer)
    assert prompts.examples[0].prompt == [
        {"role": "user", "content": "1"},
        {"role": "user", "content": "2", "name": "x"},
    ]


def test_bos_is_put_before_text_but_never_eos(write_rows, tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<pad>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos>", special_tokens=[("<pad>", 0), ("<eos>", 1)]
    )
    assert tokenizer("1").input_ids == [0, 3, 1]
    prompts = load_set(
        [write_rows([GOOD, {"prompt": [{"role": "user", "content": "1"}], "label": "1"}])],
        tokenizer,
    )
    assert prompts[0].tokens.tolist()[0] == 0
    assert prompts[0].tokens.tolist()[-1] != 1
    assert prompts[1].tokens.tolist() == [3], "a chat template writes its own BOS"


def test_long_numbers_in_a_text_and_64_bits_are_read(write_rows) -> None:
    label = "12345678901234567890123"
    text = f'{{"prompt": "1+1=", "label": "{label}", "x": [18446744073709551615, 1.5e300]}}'
    rows = open_rows(Path(write_rows([text])))
    assert rows[0]["label"] == label
    assert rows[0]["x"] == [2**64 - 1, 1.5e300]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "not JSON"),
        ("", "not JSON"),
        ('["1+1=", "2"]', "expected a JSON object, got list"),
        ({"question": "1+1=", "label": "2"}, "no key 'prompt'.*'question', 'label'"),
        ({"prompt": "1+1="}, "no key 'label'.*data.label_key"),
        ({"prompt": "1+1=", "labels": "2"}, "no key 'label'.*did you mean 'labels'"),
        (
            '{"prompt": "1+1=", "label": 12345678901234567890123}',
            "12345678901234567890123 does not fit into 64 bits.*write it as text",
        ),
        ('{"prompt": "1+1=", "label": [18446744073709551616]}', "does not fit into 64 bits"),
        ({"prompt": 7, "label": "2"}, "must be text or a list of chat messages.*got int: 7"),
        ({"prompt": None, "label": "2"}, "got NoneType"),
        ({"prompt": "", "label": "2"}, "not empty"),
        ({"prompt": [], "label": "2"}, "not empty"),
        ({"prompt": ["hello"], "label": "2"}, "each message"),
        ({"prompt": [{"role": "user"}], "label": "2"}, "each message"),
        ({"prompt": [{"role": "user", "content": 3}], "label": "2"}, "each message"),
        (
            {"prompt": "1+QR=", "label": "2"},
            "cannot encode '1.QR='.*lacks the symbols 'QR'.*--alphabet",
        ),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(write_rows, tokenizer, row, message):
    path = write_rows([GOOD, row, GOOD])
    with pytest.raises(DataError, match=rf"rows\.jsonl:2: .*{message}"):
        load_set([path], tokenizer)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ],
)
def test_a_chat_that_the_template_refuses_is_named(write_rows, tokenizer, template, message):
    tokenizer.chat_template = template
    path = write_rows([{"prompt": [{"role": "user", "content": "1"}], "label": "1"}])
    with pytest.raises(DataError, match=rf"rows\.jsonl:1: .*{message}"):
        load_set([path], tokenizer)


def test_long_prompts_are_excluded_counted_and_reported(write_rows, tokenizer, caplog):
    path = write_rows(
        [GOOD, {"prompt": "1111+2=", "label": "3"}, GOOD, {"prompt": "1+2222=", "label": "3"}]
    )
    with caplog.at_level(logging.WARNING):
        prompts = load_set([path], tokenizer, max_prompt_tokens=4)
    assert [p.prompt_id for p in prompts] == [f"{path}:1", f"{path}:3"]
    assert excluded(prompts) == [f"{path}:2", f"{path}:4"]
    assert "2 of 4 prompts" in caplog.text
    assert f"{path}:2" in caplog.text


def test_no_prompt_left_is_an_error(write_rows, tokenizer):
    with pytest.raises(
        ConfigError,
        match=r"all 2 prompts have more than data.max_prompt_tokens = 3 .*the shortest has 4",
    ):
        load_set([write_rows([GOOD, GOOD])], tokenizer, max_prompt_tokens=3)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.jsonl", b"", "is empty"),
        ("rows.csv", b"a,b", "suffix '.csv'"),
        ("broken.parquet", b"not parquet", "not a readable parquet"),
    ],
)
def test_a_bad_file_is_named(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=f"{name}.*{message}"):
        load_set([str(tmp_path / name)], tokenizer)
    with pytest.raises(DataError, match=r"missing\.jsonl does not exist"):
        load_set([str(tmp_path / "missing.jsonl")], tokenizer)


def test_crlf_bom_and_trailing_blank_lines_are_fine(tmp_path, tokenizer):
    path = tmp_path / "windows.jsonl"
    row = json.dumps(GOOD).encode()
    path.write_bytes(b"\xef\xbb\xbf" + row + b"\r\n" + row + b"\r\n\r\n")
    assert len(load_set([str(path)], tokenizer)) == 2


def test_fingerprint_sees_order_and_content(write_rows, tokenizer):
    other = {"prompt": "3+4=", "label": "7"}
    files = ([GOOD, other], [other, GOOD], [GOOD], [GOOD, other])
    assert len({load_set([write_rows(rows)], tokenizer).fingerprint() for rows in files}) == 3


ROW = {
    "prompt": [{"role": "user", "content": "1+2="}, {"role": "user", "content": "="}],
    "label": {"answers": ["3", "4"]},
    "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    "metadata": {"id": 1, "weight": 0.5, "nested": [{"a": None}]},
    "source": "sums",
}


def _changed(value: Any) -> Any:
    """Yield the value with one of the leaves inside of it changed, each in turn."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from ({**value, key: one} for one in _changed(item))
            yield {name: one for name, one in value.items() if name != key}
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from ([*value[:place], one, *value[place + 1 :]] for one in _changed(item))
        yield [*value, "more"]
    else:
        yield {"user": "system", "function": "g"}.get(value, 2 if isinstance(value, int) else "5")


def test_the_fingerprint_sees_every_leaf_of_a_row(write_rows, chat_tokenizer):
    chat_tokenizer.chat_template += "{{ '' if tools else '' }}"

    def fingerprint(row: Any, name: str = "rows.jsonl") -> str:
        path = write_rows([row, GOOD_CHAT], name)
        data = DataConfig(paths=[path], format="slime")
        return PromptSet.of(open_examples(data), chat_tokenizer).fingerprint()

    rows = [{**ROW, name: one} for name, value in ROW.items() for one in _changed(value)]
    seen = set()
    for row in rows:
        try:
            seen.add(fingerprint(row))
        except DataError:  # no such message or tool
            rows = [one for one in rows if one is not row]
    assert len(rows) > 15
    assert len(seen) == len(rows)
    assert fingerprint(ROW) not in seen
    # neither the order of columns nor the file's name says anything else
    assert fingerprint(dict(reversed(ROW.items())), "other.jsonl") == fingerprint(ROW)


def test_values_of_arrow_have_digests_that_stay(tmp_path, tokenizer):
    def load(bits: bytes) -> str:
        column = {"b": [bits], "d": [Decimal("1.5")], "t": [datetime(2026, 1, 2)], "f": [math.nan]}
        table = pa.table({"prompt": ["1="], "label": ["1"], **column})
        pq.write_table(table, tmp_path / "rows.parquet")
        return load_set([str(tmp_path / "rows.parquet")], tokenizer).fingerprint()

    assert load(b"\xff") == load(b"\xff") != load(b"\xfe")


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 1000])
def test_a_resume_names_the_row_that_differs(write_rows, tokenizer, size):
    rows = [{"prompt": f"{i}=", "label": str(i)} for i in range(size)]
    path = write_rows(rows)
    before = load_set([path], tokenizer).record
    saved = json.loads(json.dumps(before.saved()))
    assert before.changes(saved) == ""
    assert len(saved["blocks"]) <= 75
    for place in {0, size // 3, size - 1}:
        write_rows([*rows[:place], {**rows[place], "label": "-"}, *rows[place + 1 :]])
        now = load_set([path], tokenizer).record
        assert now.fingerprint != before.fingerprint
        assert now.changes(saved) == f"; {path}:{place + 1} differs"
    write_rows([{**row, "label": "-"} for row in rows])
    also = "; others differ too" if size > 1 else ""
    assert load_set([path], tokenizer).record.changes(saved) == f"; {path}:1 differs{also}"
    if size == 1000:
        write_rows([*rows[:500], *({**row, "label": "-"} for row in rows[500:510]), *rows[510:]])
        said = load_set([path], tokenizer).record.changes(saved)
        first, last = re.findall(r"rows\.jsonl:(\d+)", said)
        assert said.startswith("; several rows differ, the first of them between")
        assert int(first) <= 501 <= int(last) < int(first) + 20


def test_tokenizer_folder(tmp_path: Path, tokenizer):
    tokenizer.save_pretrained(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert loaded("1+2=")["input_ids"] == tokenizer("1+2=")["input_ids"]
    with pytest.raises(ModelError, match="missing is not a folder"):
        load_tokenizer(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match="empty holds no tokenizer that can be loaded"):
        load_tokenizer(tmp_path / "empty")


class SpacedTokenizer(PreTrainedTokenizerFast):
    """Changes texts before its backend sees them, as some classes of transformers do."""

    def __call__(self, text: list[str], *args: Any, **given: Any) -> BatchEncoding:
        return super().__call__([t.replace("1", "2") for t in text], *args, **given)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", [PreTrainedTokenizerFast, SpacedTokenizer])
@pytest.mark.parametrize("limit", [None, 3])
def test_ids_are_those_that_the_tokenizer_itself_gives(tokenizer, kind, limit, special):
    texts = ["12+3=", "", f"{tokenizer.eos_token}1", "3" * 700]
    made = kind(tokenizer_object=tokenizer.backend_tokenizer, eos_token=tokenizer.eos_token)
    expected = [made([text], add_special_tokens=special)["input_ids"][0] for text in texts]
    if limit is not None:  # left there by another call, or by tokenizer.json
        made.backend_tokenizer.enable_truncation(limit)
    found = encode(made, texts, texts, special=special)
    assert [ids.tolist() for ids in found] == expected
    assert all(ids.dtype == np.int32 for ids in found)


def test_a_response_must_be_able_to_stop(tokenizer):
    assert stop_token_ids(tokenizer, [7]) == (1, 7)
    tokenizer.eos_token = None
    assert stop_token_ids(tokenizer, [7]) == (7,)
    with pytest.raises(ModelError, match="stop_token_ids"):
        stop_token_ids(tokenizer)
