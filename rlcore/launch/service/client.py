"""Calls the rollout service for rank 0, and recovers when the service dies."""

from __future__ import annotations

from typing import Any

from rlcore.config import Config
from rlcore.config.derived import comeback_s, engine_place_s
from rlcore.deadlines import REWARD_START_S, SERVICE_ANSWER_S, SERVICE_GRACE_S
from rlcore.launch.service.channel import Channel, ServiceLost
from rlcore.launch.service.host import OpenedService

WORD_KEY = "60 s and cluster.heartbeat_timeout_s, in which one that hangs is replaced"
SERVICE = "the rollout service"
# Methods of `RolloutSource` that a replacement service is told again, in this order.
TOLD_AGAIN = ("restore", "keep_ledger", "admit_engines", "published")


class ServiceClient:
    """Calls the service for rank 0, and recovers when it dies.

    Rank 0's main thread and its publication thread use it, never both at once.
    """

    def __init__(self, channel: Channel, config: Config, *, greedy_baseline: bool) -> None:
        self._channel = channel
        self.config = config
        self._greedy_baseline = greedy_baseline
        self._token = ""
        self._started = False
        self._unanswered: list[Any] = []  # notifications, awaited with the next call
        self._told: dict[str, tuple[Any, ...]] = {}  # newest arguments of methods in TOLD_AGAIN

    # --- the service's life -----------------------------------------------------------------------

    def open(self) -> OpenedService:
        """Let the service read its prompts. Raises UserError for bad prompts and the like."""
        opened: OpenedService = self._channel.open(
            greedy_baseline=self._greedy_baseline,
            limit_s=self.config.cluster.start_timeout_s,
            what=f"opening {SERVICE}",
            key="cluster.start_timeout_s",
        )
        self._token = opened.token
        self._unanswered = []
        return opened

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        limit = (
            comeback_s(self.config.rollout.engine, engine_place_s(self.config))
            + REWARD_START_S
            + SERVICE_GRACE_S
        )
        self.call(
            "start", limit_s=limit, key="cluster.start_timeout_s and rollout.engine.start_timeout_s"
        )
        self._started = True

    def reopen(self) -> None:
        """Bring the replacement service, after ServiceLost, to the state of the last hand-over.

        Its engines wait for weights. Raises ServiceLost where engines share the trainer's GPUs:
        what they hold there is not known any more.
        """
        if self.config.rollout.engine.colocated:
            raise ServiceLost(
                f"{SERVICE} died, and with it the knowledge of what its engines keep on the"
                " trainer's GPUs"
            )
        self.open()
        if self._started:
            self.start()
        for method in TOLD_AGAIN:
            if method in self._told:
                self._tell(method)

    def tell(self, method: str, *arguments: Any) -> None:
        """Call a method in TOLD_AGAIN, of the replacement if the service has died."""
        self.remember(method, *arguments)
        try:
            self._tell(method)
        except ServiceLost:
            self.reopen()  # which tells it

    def remember(self, method: str, *arguments: Any) -> None:
        """Have a replacement service told this."""
        self._told[method] = arguments

    @property
    def state(self) -> Any:
        """The state that a replacement service would restore; None for its beginning."""
        return self._told.get("restore", (None,))[0]

    def _tell(self, method: str) -> None:
        # A large buffer or a long journal takes its time.
        start_s = self.config.cluster.start_timeout_s
        slow = {"limit_s": start_s, "key": "cluster.start_timeout_s"}
        limits: dict[str, Any] = {} if method == "published" else slow
        self.call("source", method, *self._told[method], **limits)

    # --- calls ------------------------------------------------------------------------------------

    def call(
        self, part: str, *arguments: Any, limit_s: float = SERVICE_ANSWER_S, key: str = WORD_KEY
    ) -> Any:
        """Call a method of the host, from the main thread.

        Raises ServiceLost, DeadlineExceeded, or what the service raised.

        Args:
            limit_s: for a service that lives. A service that hangs has
                `cluster.heartbeat_timeout_s` more, after which it is lost.
        """
        heartbeat_s = self.config.cluster.heartbeat_timeout_s
        for notification in self._take_unanswered():
            self._channel.get(
                notification, limit_s=SERVICE_ANSWER_S + heartbeat_s, what=SERVICE, key=WORD_KEY
            )
        return self._channel.get(
            self._send(part, arguments),
            limit_s=limit_s + heartbeat_s,
            what=f"{SERVICE}: {part}",
            key=key,
        )

    async def call_async(self, part: str, *arguments: Any) -> Any:
        """As `call`, from the publication's loop, which has limits of its own."""
        for notification in self._take_unanswered():
            await self._channel.answer(notification, what=SERVICE)
        return await self._channel.answer(self._send(part, arguments), what=SERVICE)

    def notify(self, *arguments: Any) -> None:
        """Call the host's `notify` without waiting; the next call waits for it."""
        self._unanswered.append(self._send("notify", arguments))

    def _send(self, part: str, arguments: tuple[Any, ...]) -> Any:
        return self._channel.send(part, self._token, *arguments)

    def _take_unanswered(self) -> list[Any]:
        notifications = self._unanswered
        self._unanswered = []
        return notifications
