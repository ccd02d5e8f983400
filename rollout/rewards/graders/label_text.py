"""Labels that are written as text: JSON, or Python's own literals."""

from __future__ import annotations

import ast
import json
from typing import Any

import numpy as np


def literal_of(value: Any) -> Any:
    """Return what a text writes, as JSON or as Python (`{'N': None}`); all else as it is.

    Arrays and tuples become lists, as columns of data sets come in either form.
    """
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return list(value)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(value.strip())
    # what it raises for texts that are no literal, or one nested too deep
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return value
