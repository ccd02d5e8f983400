"""Rank 0's line to the service actor, and what becomes of it when the service dies."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.config.derived import comeback_s, engine_place_s
from rlcore.launch.ray.calls import ActorLost, answer, get, get_when_up
from rlcore.launch.ray.service_actor import Opened
from rollout.rewards.pool import START_TIMEOUT_S as REWARD_START_TIMEOUT_S

if TYPE_CHECKING:
    pass

GRACE_S = 60.0  # the service keeps its own limits; ours comes a little later
WORD_S = 60.0  # for the service to answer what needs no work
WORD_KEY = "60 s and cluster.heartbeat_timeout_s, in which one that hangs is replaced"
SERVICE = "the rollout service"


class ServiceClient:
    """Rank 0's line to the service. Its main thread and its publication thread use it, never both
    at once.
    """

    def __init__(self, actor: Any, config: Config, *, greedy_baseline: bool) -> None:
        self.actor = actor
        self.config = config
        self._greedy_baseline = greedy_baseline
        self._life = ""
        self._started = False
        self._said: list[Any] = []  # calls whose answer is awaited with the next one's
        # What a new service is told, in this order: where it was, and which weights are in force.
        self.state: Mapping[str, Any] | None = None
        self.ledger: Path | None = None
        self.published: tuple[int, int, int] | None = None

    # --- life -------------------------------------------------------------------------------------

    def open(self) -> Opened:
        """Raises UserError for bad prompts and the like."""
        limit = self.config.cluster.start_timeout_s

        def ask() -> Any:
            return self.actor.open.remote(greedy_baseline=self._greedy_baseline)

        opened: Opened = get_when_up(
            ask, limit_s=limit, what=f"opening {SERVICE}", key="cluster.start_timeout_s"
        )
        self._life = opened.life
        self._said = []
        return opened

    def start(self) -> None:
        limit = (
            comeback_s(self.config.rollout.engine, engine_place_s(self.config))
            + REWARD_START_TIMEOUT_S
            + GRACE_S
        )
        self.ask(
            "start", limit_s=limit, key="cluster.start_timeout_s and rollout.engine.start_timeout_s"
        )
        self._started = True

    def revive(self) -> None:
        """After ActorLost: the new service, in the state of the last hand-over; its engines wait
        for weights.

        Raises ActorLost where engines share the trainer's GPUs: nobody knows what they keep there.
        """
        if self.config.rollout.engine.colocated:
            raise ActorLost(
                f"{SERVICE} died, and with it the knowledge of what its engines keep on the"
                " trainer's GPUs"
            )
        self.open()
        if self._started:
            self.start()
        if self.state is not None:
            self.restore()
        if self.ledger is not None:
            self.keep_ledger()
        if self.published is not None:
            self.ask("source", "published", *self.published)

    def restore(self) -> None:
        """Tell it `state`."""
        self._ask_for_long("restore", self.state)

    def keep_ledger(self) -> None:
        """Tell it where `ledger` is."""
        self._ask_for_long("keep_ledger", self.ledger)

    def _ask_for_long(self, method: str, argument: Any) -> None:
        """What a large buffer or a long journal takes its time for."""
        self.ask(
            "source",
            method,
            argument,
            limit_s=self.config.cluster.start_timeout_s,
            key="cluster.start_timeout_s",
        )

    # --- calls ------------------------------------------------------------------------------------

    def ask(self, part: str, *arguments: Any, limit_s: float = WORD_S, key: str = WORD_KEY) -> Any:
        """The answer, for the main thread. Raises ActorLost, DeadlineExceeded, or what the service
        raised.

        Args:
            limit_s: for a service that lives; one that hangs gets `cluster.heartbeat_timeout_s`
                more, and is lost then.
        """
        heartbeat_s = self.config.cluster.heartbeat_timeout_s
        for said in self._taken():
            get(said, limit_s=WORD_S + heartbeat_s, what=SERVICE, key=WORD_KEY)
        return get(
            self._call(part, arguments),
            limit_s=limit_s + heartbeat_s,
            what=f"{SERVICE}: {part}",
            key=key,
        )

    async def answer(self, part: str, *arguments: Any) -> Any:
        """As `ask`, for the publication's loop, which has limits of its own."""
        for said in self._taken():
            await answer(said, what=SERVICE)
        return await answer(self._call(part, arguments), what=SERVICE)

    def say(self, *arguments: Any) -> None:
        """Heard before the next question is answered."""
        self._said.append(self._call("told", arguments))

    def _call(self, part: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.actor, part).remote(self._life, *arguments)

    def _taken(self) -> list[Any]:
        said = self._said
        self._said = []
        return said
