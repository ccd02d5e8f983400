"""Errors that users meet. The command line prints them without a traceback.

RlcoreError
+-- UserError            bad input: exit code 2
|   +-- ConfigError
|   +-- DataError
|   +-- ModelError
+-- RunFailed            the run cannot go on: exit code 1
|   +-- DeadlineExceeded
|   +-- FailedElsewhere  another rank failed and knows why
|   +-- PartLost         rank 0 lost its rollout service: the launcher starts the ranks again
|   +-- EngineFailed     one engine died, hangs or answers nonsense: another can take its requests
|   |   +-- EngineHangs  it did not answer in time; a DeadlineExceeded too
|   |   +-- NoEngineLeft none runs and none can be started again: the run saves, then stops
|   +-- TooManyFailed    rollouts or rewards fail too often: the run saves, then stops
|   +-- EmptyBatch       prompts, rewards and filters leave nothing to train on: exit code 2
+-- PublicationFailed    an engine missed a part of a publication: it runs again with the others
+-- RolloutFailed        one rollout failed, not the run: it is tried again, then its group given up
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


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
    """A wait exceeded its limit. The message names what was waited for and the key of the limit."""


class FailedElsewhere(RunFailed):
    """Another rank failed. It reports the reason, and this rank gives it time to."""


class PartLost(RunFailed):
    """This process lost contact with a part of the run and can neither go on nor save.

    Another start of the ranks may help.
    """


class EngineFailed(RunFailed):
    """One engine died, hangs, or answers nonsense; its requests may go to another. Names it."""


class EngineHangs(EngineFailed, DeadlineExceeded):
    """An engine did not answer in time. The message names the engine and the key of the limit."""


class NoEngineLeft(EngineFailed):
    """No engine runs and none can be started again; the message says how each one ended."""


class TooManyFailed(RunFailed):
    """More rollouts or rewards failed than the run may ignore. What was trained is saved first."""


class EmptyBatch(RunFailed):
    """Nothing is left to train on: bad input that shows only in the run. Earlier steps are kept."""


class PublicationFailed(RlcoreError):
    """An engine missed a part of a publication; the others wait until it runs again."""


class RolloutFailed(RlcoreError):
    """One rollout failed for a reason that is not the policy's, and must not be trained on.

    Args:
        kind: "error" (an exception), "timeout", "exit" (`sys.exit`), "result" (nonsense was
            returned), or a word of the workflow's own: under it failures are counted.
        place: of the user's code, as ` (file:line in name)`; it ends the message.
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
INTERRUPTED = 130  # a run that was asked to stop before its end


def exit_code(status: str) -> int:
    """Return the exit code of a run that did not fail."""
    return INTERRUPTED if status == "interrupted" else 0


@contextmanager
def named_by(key: str) -> Iterator[None]:
    """Begin errors about a file, a data set or a model folder with the key that names it."""
    try:
        yield
    except (DataError, ModelError) as error:
        raise type(error)(f"{key}: {error}") from error
    except OSError as error:
        raise DataError(f"{key}: {error}") from error
