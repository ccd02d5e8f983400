"""Records of routed experts: read as they were written, and never in one long step."""

from __future__ import annotations

import base64
import binascii
from typing import Any

import numpy as np
import orjson
import pytest

from rollout.engines import routed_records
from rollout.engines.checks import ExpertLayers
from rollout.engines.routed_records import LARGE, PIECE, decode, parse

LAYERS = 94
TOPK = 8
MODEL = ExpertLayers(LAYERS, tuple(range(3, LAYERS)), 128, TOPK)


def record(tokens: int) -> tuple[np.ndarray[Any, Any], str]:
    experts = np.random.default_rng(0).integers(0, 128, (tokens, LAYERS, TOPK), dtype=np.int32)
    return experts, base64.b64encode(experts.tobytes()).decode()


def answer(texts: list[str], said: str) -> bytes:
    """Of a server, whose texts may hold anything."""
    return orjson.dumps(
        [{"text": said, "meta_info": {"id": said, "routed_experts": text}} for text in texts]
    )


@pytest.mark.parametrize("tokens", [0, 1, 2, 3, 100, 1001])
@pytest.mark.parametrize("piece", [1, 9000, PIECE])
def test_a_record_is_read_in_pieces_of_any_size(tokens: int, piece: int) -> None:
    experts, text = record(tokens)
    found = list(decode(memoryview(text.encode()), (tokens, LAYERS, TOPK), piece))
    whole = np.concatenate(found) if found else experts[:0]
    assert np.array_equal(whole, experts)
    assert np.array_equal(MODEL.decode(text, tokens), experts[:, 3:].astype(np.int16))


def test_no_step_of_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each holds Python's lock: neither parser nor decoder gets a record whole."""
    experts, text = record(2000)
    content = answer([text] * 3, "hello")
    steps: list[int] = []
    loads = orjson.loads
    b64 = binascii.a2b_base64

    def counted(data: Any, **given: Any) -> Any:
        steps.append(len(data))
        return b64(data, **given) if given else loads(data)

    monkeypatch.setattr(routed_records.orjson, "loads", counted)
    monkeypatch.setattr(routed_records.binascii, "a2b_base64", counted)
    parts = parse(content)
    for part in parts:
        found = MODEL.decode(part["meta_info"]["routed_experts"], 2000)
        assert np.array_equal(found, experts[:, 3:].astype(np.int16))
    assert max(steps) <= PIECE * 4 // 3 < len(text) / 10


@pytest.mark.parametrize(
    "said", ['"routed_experts":"', '\\"routed_experts\\":\\"3', "x" * LARGE, '","routed_experts":"']
)
def test_what_a_model_writes_is_no_record(said: str) -> None:
    _, text = record(400)
    texts = [text, text[:-8], ""]
    content = answer(texts, said)
    assert len(content) > LARGE
    for part, expected in zip(parse(content), texts, strict=True):
        assert part["text"] == said
        assert bytes(part["meta_info"]["routed_experts"]).decode() == expected


@pytest.mark.parametrize("wrong", ["short", "no base64", "beyond"])
def test_what_is_no_record_is_refused(wrong: str) -> None:
    experts, text = record(6)
    if wrong == "short":
        text = text[:-4]
    elif wrong == "no base64":
        text = "!" + text[1:]
    else:
        experts[5, 50, 0] = 128
        text = base64.b64encode(experts.tobytes()).decode()
    with pytest.raises(ValueError):
        MODEL.decode(text, 6)


def test_an_answer_that_is_cut_off_is_no_json() -> None:
    _, text = record(400)
    with pytest.raises(orjson.JSONDecodeError):
        parse(answer([text], "a")[:-100])
