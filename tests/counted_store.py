"""A rank's connection to the store of a run, which counts what passes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rlcore.stores import Store


class CountedStore:
    """Counts `writes`, `reads` and `bytes` of values, and `looks` for keys.

    A rank that waits for something looks for it again and again: the number of looks depends on how
    long it takes, the other numbers do not.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.count: Counter[str] = Counter()
        # Looks by what is before the first slash of a key.
        self.looks: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self.count.update(writes=1, bytes=len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        value = self._store.get(key)
        self.count.update(reads=1, bytes=len(value))
        return value

    def check(self, keys: Sequence[str]) -> bool:
        self.count.update(looks=1)
        self.looks.update(key.partition("/")[0] for key in keys)
        return self._store.check(list(keys))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self.count.update(writes=1)
        return self._store.compare_set(key, expected, desired)

    def delete_key(self, key: str) -> bool:
        self.count.update(writes=1)
        return self._store.delete_key(key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)
