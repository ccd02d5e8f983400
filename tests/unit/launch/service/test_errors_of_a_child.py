"""What rank 0 is told of an error in the rollout service's process."""

from __future__ import annotations

import re

from rlcore.errors import RunFailed
from rlcore.launch.service.child import _sendable


def test_an_error_that_is_not_ours_names_the_line_that_raised() -> None:
    try:
        raise KeyError("nothing")
    except KeyError as error:
        told = _sendable(error, "next_step")
    assert isinstance(told, RunFailed)
    assert re.fullmatch(
        r"the rollout service: next_step: KeyError: 'nothing' \(.*test_errors_of_a_child\.py:\d+ in"
        r" test_an_error_that_is_not_ours_names_the_line_that_raised\)",
        str(told),
    )


def test_our_own_error_is_told_as_it_is() -> None:
    error = RunFailed("no engine is left")
    assert _sendable(error, "next_step") is error
