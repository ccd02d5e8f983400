"""The errors between a batch, an algorithm and its configuration.

AlgorithmError (a ValueError)
 +- InputError               a record was built with a wrong shape, dtype, device or cu_seqlens
 +- UnknownNameError         no estimator or policy loss of this name, or no such import path
 +- DuplicateNameError       two plugins claim one name
 +- KeywordError             a constructor keyword that is unknown, missing or of the wrong type
 +- MissingInputError        a field that the algorithm needs is absent
 +- OutputError              a result of a wrong shape or dtype, or with numbers that are not finite
 +- EstimatorMutationError   the algorithm wrote into its inputs
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class AlgorithmError(ValueError):
    """Base of every error raised on purpose by `rlcore.algorithms`."""


class InputError(AlgorithmError):
    """A record was built from tensors that do not fit together."""


class UnknownNameError(AlgorithmError):
    """No algorithm of this name is registered, installed or importable."""


class DuplicateNameError(AlgorithmError):
    """A name is already taken by another algorithm."""


class KeywordError(AlgorithmError):
    """The constructor of an algorithm does not take this keyword or this value."""


class MissingInputError(AlgorithmError):
    """The batch lacks a field that the algorithm declared in `needs`."""


class OutputError(AlgorithmError):
    """The result of an algorithm is unusable."""


class EstimatorMutationError(AlgorithmError):
    """An algorithm wrote into an input, which is read-only."""


def known_names(name: str, known: Iterable[str]) -> str:
    """Return "known: a, b, c" and, where one is close, "; did you mean 'b'?"."""
    names = sorted(known)
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    return f"known: {', '.join(names) or 'none'}{hint}"
