"""The errors between a batch, an algorithm and its configuration."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AlgorithmError(ValueError):
    """Base of every error raised on purpose by `rlcore.algorithms`."""


class InputError(AlgorithmError):
    """A record was built with a wrong shape, dtype, device or cu_seqlens."""


class UnknownNameError(AlgorithmError):
    """No algorithm of this name is registered, installed or importable."""


class DuplicateNameError(AlgorithmError):
    """A name is already taken by another algorithm."""


class KeywordError(AlgorithmError):
    """A keyword of a constructor is unknown, missing or of the wrong type."""


class MissingInputError(AlgorithmError):
    """The batch lacks a field that the algorithm declared in `needs`."""


class UndeclaredInputError(AlgorithmError):
    """An algorithm used a field that it did not declare and that is None; names its line."""


class OutputError(AlgorithmError):
    """A result has a wrong shape or dtype, or numbers that are not finite."""


class EstimatorMutationError(AlgorithmError):
    """An algorithm wrote into an input, which is read-only."""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c" and, where one is close, "; did you mean 'b'?"."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"known: {', '.join(names) or 'none'}{hint}"
