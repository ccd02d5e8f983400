"""Changes valid examples into broken ones: JSON values, texts and bytes.

A `Mutator` draws from one seeded generator: target, seed and number of a case make it again.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

ODD_NUMBERS: tuple[Any, ...] = (
    *(0, 1, -1, 2, -2, 127, 128, 255, 256, 2**15, 2**31 - 1, 2**31, -(2**31) - 1, 2**32),
    *(2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**30, 10**400),
    *(0.5, -0.0, 1.0, 1e-45, 1e-3, 1.1e-3, 3.4e38, 3.5e38, -3.5e38, 1e39, 1e308, -1e308),
    *(float("nan"), float("inf"), -float("inf"), True, False),
)
ODD_TEXTS = (
    *("", " ", "0", "-1", "1e999", "NaN", "null", "true", "../../etc/passwd", "/dev/null", "\x00"),
    *("\x1b[2J", "é", "\ud800", "🦜", "\u202e", "%s%n", "{0}", "${HOME}", "a" * 5000, "0" * 5000),
    *("999999999999999999999", "AAAA", "AAA", "====", "__class__", "torch", "object", "<f4"),
)
PIECES = (
    *(b"\x00", b"\xff", b"\xff\xfe", b"\xed\xa0\x80", b"\n", b"\r\n", b'"', b"\\", b"{", b"}"),
    *(b"[", b"]", b":", b",", b"NaN", b"-Infinity", b"1e999", b"9" * 400, b"null", b"\\ud800"),
    *(b"\x80\x04", b"cos\nsystem\n", b"!!python/object:os.system", b"&a", b"*a", b"? ", b"- "),
)
DEEP = 20_000  # brackets inside each other
Path = tuple[Any, ...]


class Mutator:
    """Makes the mutations of one case.

    Attributes:
        random: the case's own generator, also for other choices that it needs.
        keep: the case shows the valid example, unchanged.
        changed: whether anything was changed so far.
    """

    def __init__(self, seed: str, *, keep: bool = False) -> None:
        self.random = random.Random(seed)
        self.changed = False
        self.keep = keep or self.random.random() < 0.03  # some cases stay as they are

    def value(self, example: Any) -> Any:
        """Return a copy of a JSON-able value, with some of its nodes changed."""
        if self.keep:
            return _copy(example)
        holder = [_copy(example)]
        for _ in range(self.random.choice((1, 1, 1, 2, 3))):
            self._change_node(holder)
        self.changed = True
        return holder[0]

    def document(self, example: Any) -> bytes:
        """Return JSON text of a value that was changed, or JSON text that was."""
        if self.keep or self.random.random() < 0.25:
            return self.bytes(written(example))
        text = written(self.value(example))
        return self.bytes(text) if self.random.random() < 0.1 else text

    def bytes(self, example: bytes) -> bytes:
        """Return changed bytes: flipped, cut, doubled, mixed, or with odd pieces among them."""
        if self.keep:
            return example
        self.changed = True
        data = bytearray(example)
        for _ in range(self.random.choice((1, 1, 1, 2, 4))):
            self.random.choice(_OF_BYTES)(self.random, data)
        return bytes(data)

    def lines(self, example: bytes) -> bytes:
        """Return lines of JSON of which one was changed, or the order, or bytes anywhere."""
        kind = self.random.choice(("value", "value", "value", "order", "bytes"))
        if self.keep or kind == "bytes":
            return self.bytes(example)
        rows = example.split(b"\n")[:-1]
        at = self.random.randrange(len(rows))
        if kind == "value":
            rows[at] = self.document(json.loads(rows[at])).replace(b"\n", b" ")
        else:
            self.changed = True
            other = self.random.randrange(len(rows) + 1)
            rows[other:other] = rows[at : at + self.random.choice((1, 2))]
            if self.random.random() < 0.5:
                del rows[at]
        return b"\n".join(rows) + b"\n"

    def text(self, example: str) -> str:
        """Return changed text, which may hold what no encoding can write."""
        if self.keep:
            return example
        if self.random.random() < 0.3:
            at = self.random.randrange(len(example) + 1)
            self.changed = True
            return example[:at] + self.random.choice(ODD_TEXTS) + example[at:]
        return self.bytes(example.encode("utf-8", "surrogatepass")).decode(
            "utf-8", self.random.choice(("replace", "surrogateescape", "ignore"))
        )

    def odd(self, like: Any = None) -> Any:
        """Return a value that does not belong where `like` stands."""
        if self.random.random() < 0.4:
            return self._near(like)
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: self.random.choice(ODD_NUMBERS),
            lambda: self.random.choice(ODD_TEXTS),
            lambda: None,
            lambda: self.random.choice(([], {}, [[]], [None], {"": None}, [0] * 300)),
            lambda: [like],
            lambda: {"type": like},
            lambda: [like] * self.random.choice((2, 3, 50)),
        )
        return self.random.choice(kinds)()

    def _near(self, like: Any) -> Any:
        """Return a neighbour of a value: another number, a text that is a little different."""
        if isinstance(like, bool):
            return not like
        if isinstance(like, int | float):
            half = like + 0.5 if abs(like) < 1e300 else 0.5
            return self.random.choice((like + 1, like - 1, -like, like * 2, half, str(like)))
        if isinstance(like, str):
            changed = bytearray(like.encode("utf-8", "surrogatepass"))
            self.random.choice(_OF_BYTES)(self.random, changed)
            return changed.decode("utf-8", "replace")
        if isinstance(like, list) and like:
            at = self.random.randrange(len(like))
            other = self.random.randrange(len(like))
            swapped = [*like]
            swapped[at] = like[other]
            return self.random.choice(
                (like[:at], like[at:], [*like, like[at]], like[::-1], swapped, like * 2)
            )
        if isinstance(like, dict) and like:
            key = self.random.choice([*like])
            without = {name: item for name, item in like.items() if name != key}
            renamed = {**without, f"{key}_": like[key]}
            return self.random.choice((without, renamed, {**like, "more": like[key]}, [*like]))
        return self.random.choice(ODD_NUMBERS)

    def _change_node(self, holder: list[Any]) -> None:
        places = [place for place in _places(holder) if place]
        place = self.random.choice(places)
        found = _at(holder, place)
        if self.random.random() < 0.15:  # swap with another node, which may be of another kind
            other = self.random.choice(places)
            if other[: len(place)] != place and place[: len(other)] != other:
                _put(holder, place, _at(holder, other))
                _put(holder, other, found)
            return
        _put(holder, place, _copy(self.odd(found)))


def written(value: Any) -> bytes:
    """Return a value as JSON text, with numbers and half characters that JSON does not have."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def _copy(value: Any) -> Any:
    """Return a copy without a part that occurs twice, which a change might put into itself."""
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def _places(value: Any, path: Path = ()) -> list[Path]:
    """Return the paths of all nodes; of long lists the first and last few."""
    found = [path]
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list):
        numbered = [*enumerate(value)]
        items = numbered if len(numbered) <= 8 else numbered[:4] + numbered[-2:]
    for key, item in items:
        found += _places(item, (*path, key))
    return found


def _at(value: Any, path: Path) -> Any:
    for key in path:
        value = value[key]
    return value


def _put(value: Any, path: Path, new: Any) -> None:
    _at(value, path[:-1])[path[-1]] = new


# --- changes of bytes -----------------------------------------------------------------------------


def _flip(random: random.Random, data: bytearray) -> None:
    if data:
        data[random.randrange(len(data))] ^= 1 << random.randrange(8)


def _set(random: random.Random, data: bytearray) -> None:
    if data:
        data[random.randrange(len(data))] = random.choice(b"\x00\x01\x7f\x80\xff09az\"'{}[]:,-\n ")


def _truncate(random: random.Random, data: bytearray) -> None:
    del data[random.randrange(len(data) + 1) :]


def _remove(random: random.Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    del data[at : at + random.choice((1, 1, 2, 8, 64))]


def _double(random: random.Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    part = data[at : at + random.choice((1, 4, 32, 1000))]
    data[at:at] = part * random.choice((1, 1, 2, 50))


def _insert(random: random.Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    data[at:at] = random.choice(PIECES)


def _noise(random: random.Random, data: bytearray) -> None:
    at = random.randrange(len(data) + 1)
    size = random.choice((1, 4, 8, 64))
    data[at : at + size] = random.randbytes(size)


def _swap(random: random.Random, data: bytearray) -> None:
    first = random.randrange(len(data) + 1)
    second = random.randrange(first, len(data) + 1)
    size = random.choice((1, 4, 16))
    one = data[first : first + size]
    other = data[second : second + size]
    data[second : second + size] = one
    data[first : first + size] = other


def _nest(random: random.Random, data: bytearray) -> None:
    """Rarely, since it is long: far more brackets than any reader takes."""
    if random.random() < 0.2:
        at = random.randrange(len(data) + 1)
        data[at:at] = random.choice((b"[", b'{"a":')) * DEEP


_OF_BYTES = (_flip, _set, _truncate, _remove, _double, _insert, _noise, _swap, _nest)
