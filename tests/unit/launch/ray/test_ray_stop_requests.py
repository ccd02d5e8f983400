"""Signals of the driver's process: what they do while the run goes, and while it closes."""

from __future__ import annotations

import os
import signal

import pytest

from rlcore.launch.ray.status import StopRequests


def ask() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_second_signal_ends_the_run_at_once() -> None:
    requests = StopRequests()
    with requests.counting_signals(), requests.interrupting_on_second():
        ask()
        assert requests.count == 1
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_signals_do_not_interrupt_the_closing() -> None:
    """The exit code of the run stays."""
    requests = StopRequests()
    with requests.counting_signals():
        with requests.interrupting_on_second():
            ask()
        ask()
        assert requests.count == 2


def test_afterwards_signals_have_their_old_handlers() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests().counting_signals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before
