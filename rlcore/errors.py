"""Errors that users see. The command line prints them without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class RlcoreError(Exception):
    """Every error that rlcore raises on purpose."""


class UserError(RlcoreError, ValueError):
    """Bad input. The message names the input, the value, what was expected and what to do."""


class ConfigError(UserError):
    """The configuration is wrong."""


class DataError(UserError):
    """A prompt file or a row of it is wrong."""


class ModelError(UserError):
    """A model folder cannot be used."""


class RunFailed(RlcoreError):
    """The run cannot continue: a worker is dead, or no engine is left."""


class DeadlineExceeded(RunFailed, TimeoutError):
    """A wait exceeded its limit. The message names the awaited part and the key of the limit."""


class FailedElsewhere(RunFailed):
    """Another rank failed. This rank waits while the other one reports the reason."""


class PartLost(RunFailed):
    """This process lost a part of the run and can neither continue nor save.

    Restarting the ranks may help.
    """


class EngineFailed(RunFailed):
    """One engine, named in the message, died, hangs, or answers nonsense; others may take over."""


class InvalidAnswer(EngineFailed):
    """One engine, named in the message, answered a request with something that does not fit it."""


class EngineHangs(EngineFailed, DeadlineExceeded):
    """An engine did not answer in time. The message names the engine and the key of the limit."""


class NoEngineLeft(EngineFailed):
    """No engine runs and none can be restarted. The message says how each one ended."""


class TooManyFailed(RunFailed):
    """More rollouts or rewards failed than the run may ignore. The run saves before it ends."""


class EmptyBatch(RunFailed):
    """No sample is left to train on: bad input that only a run reveals. Earlier steps are kept."""


class PublicationFailed(RlcoreError):
    """An engine missed a part of a publication, which is repeated with the other engines."""


class RolloutFailed(RlcoreError):
    """One rollout failed for a reason other than the policy, and must not be trained on.

    Args:
        kind: the counter of the failure: "error" (an exception), "timeout", "exit" (`sys.exit`),
            "result" (an invalid return value), or a word that the workflow chose.
        place: location in the user's code, as ` (file:line in name)`; it ends the message.
    """

    def __init__(self, kind: str, message: str, place: str = "") -> None:
        super().__init__(kind, message, place)
        self.kind = kind
        self.message = message
        self.place = place

    def __str__(self) -> str:
        return self.message + self.place


# Exit codes of the `rlcore` command.
FAILED = 1
BAD_INPUT = 2
INTERRUPTED = 130  # the run was asked to stop before its end


def exit_code(status: str) -> int:
    """Return the exit code of a run that ended without an error."""
    return INTERRUPTED if status == "interrupted" else 0


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """Prefix errors about a file, a data set or a model folder with the key that names it."""
    try:
        yield
    except (DataError, ModelError) as error:
        raise type(error)(f"{key}: {error}") from error
    except OSError as error:
        raise DataError(f"{key}: {error}") from error
