"""Errors that users meet. The command line prints them without a traceback.

RlcoreError
+-- UserError            bad input: exit code 2
|   +-- ConfigError
|   +-- DataError
|   +-- ModelError
+-- RunFailed            the run cannot go on: exit code 1
|   +-- DeadlineExceeded
|   +-- FailedElsewhere  another rank failed, and knows why
|   +-- PartLost         rank 0 has lost its rollout service: the launcher starts the ranks again
|   +-- EngineFailed     one engine died, hangs or talks nonsense: another can take its requests
|   |   +-- EngineHangs  ... it did not answer in time; a DeadlineExceeded too
|   |   +-- NoEngineLeft ... none runs and none can be started again: the run saves, then stops
|   +-- EmptyBatch       prompts, rewards and filters leave nothing to train on: exit code 2
+-- PublicationFailed    an engine did not take a publication whole: the caller runs it again with the rest
"""

from __future__ import annotations


class RlcoreError(Exception):
    """Every error that rlcore raises on purpose."""


class UserError(RlcoreError, ValueError):
    """Bad input: names the thing, what was got, what was expected and what to do."""


class ConfigError(UserError):
    """The configuration is wrong."""


class DataError(UserError):
    """A prompt file or a row of it is wrong."""


class ModelError(UserError):
    """A model folder cannot be used."""


class RunFailed(RlcoreError):
    """The run cannot go on: a dead worker, no engine left."""


class DeadlineExceeded(RunFailed, TimeoutError):
    """Something took longer than its limit; the message names who was waited for and which key sets
    the limit.
    """


class FailedElsewhere(RunFailed):
    """Another rank failed; that one tells the reason, and this one gives it time to."""


class PartLost(RunFailed):
    """A process of the run is lost to this one, which cannot go on, nor save: another start of the
    ranks may.
    """


class EngineFailed(RunFailed):
    """One engine died, hangs, or answers what it must not; its requests may go to another. Names
    the engine.
    """


class EngineHangs(EngineFailed, DeadlineExceeded):
    """An engine did not answer in time; the message names the engine and which key sets the limit."""


class NoEngineLeft(EngineFailed):
    """No engine runs and none can be started again; the message says how each one ended."""


class EmptyBatch(RunFailed):
    """Nothing is left to train on: bad input that only shows while the run goes. What it has done
    so far is kept.
    """


class PublicationFailed(RlcoreError):
    """An engine did not take a publication whole and is out of it; the others wait for the
    transaction to be run again.
    """


# Exit codes of the `rlcore` command.
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # of a run that was asked to stop before its end


def exit_code(status: str) -> int:
    """The exit code of a run that did not fail."""
    return INTERRUPTED if status == "interrupted" else 0
