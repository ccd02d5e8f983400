"""The reward `math`: 1 where the last answer in the response equals the label, else 0.

math-verify compares them. Only worker processes import this module: sympy may run for ever, and
then the pool's deadline ends it. math-verify's own time limits are signals, which fail off the main
thread, so they are switched off.
"""

from __future__ import annotations

import logging

from math_verify import parse, verify

from rlcore.data.sample import Sample

# these warn once that their time limits are off
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def math(sample: Sample) -> float:
    """Compare the last answer with the label: plain ("3/4") or LaTeX, bare or in `$` or `\\boxed`.

    Raises:
        ValueError: the label is no mathematics; the sample then counts as a reward error.
    """
    label = str(sample.label)
    gold = parse(
        label if "$" in label or "\\boxed" in label else f"\\boxed{{{label}}}", parsing_timeout=None
    )
    if not gold:
        raise ValueError(f"the label {label!r} cannot be parsed as mathematics")
    answer = parse(sample.response_text, parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
