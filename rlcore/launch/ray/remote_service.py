"""The rollout service as rank 0 uses it under Ray: samples, publication, and engine memory.

All of it calls the service actor through a `ServiceClient`, which recovers when the service dies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlcore.config import Config
from rlcore.config.derived import comeback_s, engine_place_s
from rlcore.data.batch import StepRollouts
from rlcore.data.generation import MemoryTag
from rlcore.data.sample import Sample
from rlcore.deadlines import REWARD_START_S, SERVICE_ANSWER_S, SERVICE_GRACE_S
from rlcore.errors import EngineFailed, PublicationFailed
from rlcore.interfaces import RolloutEngine, WeightVerifier
from rlcore.launch.compose import RolloutHandles, all_engines_timeout_s
from rlcore.launch.process import Process
from rlcore.launch.ray.calls import ActorLost, answer, get, get_when_up
from rlcore.launch.ray.service_actor import EngineInfo, OpenedService
from rollout.asyncio_utils import LoopThread
from rollout.weight_sync.process_group import GroupAddress
from rollout.weight_sync.publication import WeightPublication

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


WORD_KEY = "60 s and cluster.heartbeat_timeout_s, in which one that hangs is replaced"
SERVICE = "the rollout service"
# Methods of `RolloutSource` that a replacement service is told again, in this order.
TOLD_AGAIN = ("restore", "keep_ledger", "admit_engines", "published")


def open_remote_service(
    actor: Any,
    config: Config,
    process: Process,
    tokenizer: PreTrainedTokenizerBase,
    stack: ExitStack,
    *,
    greedy_baseline: bool,
) -> RolloutHandles:
    """Open the service of `actor`, a Ray handle, for rank 0; see `compose.OpenService`."""
    client = ServiceClient(actor, config, greedy_baseline=greedy_baseline)
    opened = client.open()
    thread = LoopThread("publication")
    stack.callback(thread.close)
    sink = WeightPublication(config, RemoteParticipants(client), thread.loop, device=process.device)
    stack.callback(sink.close)
    return RolloutHandles(
        RemoteSource(client),
        sink,
        opened.num_prompts,
        opened.prompt_lengths,
        RemoteMemory(client),
    )


class ServiceClient:
    """Calls the service for rank 0, and recovers when it dies.

    Rank 0's main thread and its publication thread use it, never both at once.
    """

    def __init__(self, actor: Any, config: Config, *, greedy_baseline: bool) -> None:
        self.actor = actor
        self.config = config
        self._greedy_baseline = greedy_baseline
        self._token = ""
        self._started = False
        self._unanswered: list[Any] = []  # notifications, awaited with the next call
        self._told: dict[str, tuple[Any, ...]] = {}  # newest arguments of methods in TOLD_AGAIN

    # --- the service's life -----------------------------------------------------------------------

    def open(self) -> OpenedService:
        """Let the service read its prompts. Raises UserError for bad prompts and the like."""
        limit = self.config.cluster.start_timeout_s
        opened: OpenedService = get_when_up(
            lambda: self.actor.open.remote(greedy_baseline=self._greedy_baseline),
            limit_s=limit,
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
        """Bring the replacement service, after ActorLost, to the state of the last hand-over.

        Its engines wait for weights. Raises ActorLost where engines share the trainer's GPUs: what
        they hold there is not known any more.
        """
        if self.config.rollout.engine.colocated:
            raise ActorLost(
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
        except ActorLost:
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
        """Call a method of the actor, from the main thread.

        Raises ActorLost, DeadlineExceeded, or what the service raised.

        Args:
            limit_s: for a service that lives. A service that hangs has
                `cluster.heartbeat_timeout_s` more, after which it is lost.
        """
        heartbeat_s = self.config.cluster.heartbeat_timeout_s
        for notification in self._take_unanswered():
            get(notification, limit_s=SERVICE_ANSWER_S + heartbeat_s, what=SERVICE, key=WORD_KEY)
        return get(
            self._send(part, arguments),
            limit_s=limit_s + heartbeat_s,
            what=f"{SERVICE}: {part}",
            key=key,
        )

    async def call_async(self, part: str, *arguments: Any) -> Any:
        """As `call`, from the publication's loop, which has limits of its own."""
        for notification in self._take_unanswered():
            await answer(notification, what=SERVICE)
        return await answer(self._send(part, arguments), what=SERVICE)

    def notify(self, *arguments: Any) -> None:
        """Call the actor's `notify` without waiting; the next call waits for it."""
        self._unanswered.append(self._send("notify", arguments))

    def _send(self, part: str, arguments: tuple[Any, ...]) -> Any:
        return getattr(self.actor, part).remote(self._token, *arguments)

    def _take_unanswered(self) -> list[Any]:
        notifications = self._unanswered
        self._unanswered = []
        return notifications


class RemoteParticipants:
    """Implements `rollout.weight_sync.publication.Participants`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._engines: dict[str, RemoteEngineHandle] = {}

    async def candidates(self) -> Sequence[RolloutEngine]:
        """Implements the protocol; of the replacement if the service has died."""
        return await self._participants("candidates")

    async def stale(self) -> Sequence[RolloutEngine]:
        """Implements the protocol; of the replacement if the service has died."""
        return await self._participants("stale")

    async def _participants(self, method: str) -> Sequence[Any]:
        try:
            found = await self._client.call_async("participants", method)
        except ActorLost:
            await asyncio.to_thread(self._client.reopen)
            found = await self._client.call_async("participants", method)
        names = {info.name for info in found}
        if method == "candidates":  # the others do not run, or have left, and are in no group
            for name in self._engines.keys() - names:
                self._engines[name].in_group = None
        return [self._handle(info) for info in found]

    def _handle(self, info: EngineInfo) -> RemoteEngineHandle:
        """Return the one handle of an engine, by which transports know their connections."""
        handle = self._engines.setdefault(info.name, RemoteEngineHandle(self._client, info))
        handle.update(info)
        return handle

    def draining(self, engine: RolloutEngine) -> None:
        """Implements the protocol."""
        self._client.notify("draining", engine.name)

    def published(self, engine: RolloutEngine, version: int) -> None:
        """Implements the protocol."""
        self._client.notify("published", engine.name, version)

    def missed(self, engine: RolloutEngine) -> None:
        """Implements the protocol."""
        self._client.notify("missed", engine.name)

    async def out(self, engine: RolloutEngine, why: str) -> None:
        """Implements the protocol; a service that is lost has no engines to hold up."""
        try:
            await self._client.call_async("notify", "out", engine.name, why)
        # recovery: the next attempt finds the engine as the new service does
        except ActorLost:
            return


def _remote(verb: str) -> Callable[..., Coroutine[Any, Any, Any]]:
    """Make the method of `RemoteEngineHandle` that calls `verb` of its engine in the service."""

    async def call(handle: RemoteEngineHandle, *arguments: Any) -> Any:
        return await handle.call(verb, *arguments)

    return call


class RemoteEngineHandle:
    """The methods of an engine that a publication and its transports use."""

    def __init__(self, client: ServiceClient, info: EngineInfo) -> None:
        self._client = client
        self.update(info)

    def update(self, info: EngineInfo) -> None:
        """Take what the service says of the engine now."""
        self.name = info.name
        self.managed = info.managed
        self.transports = info.transports
        self.url = info.url
        self.group_ranks = info.group_ranks
        self.in_group = info.in_group
        self.gpus = info.gpus
        self.digests_buckets = info.digests_buckets
        self.queues_buckets = info.queues_buckets

    health = _remote("health")
    pause = _remote("pause")
    resume = _remote("resume")
    begin_update = _remote("begin_update")
    receive_bucket = _remote("receive_bucket")
    bucket_digests = _remote("bucket_digests")
    receive_serialized = _remote("receive_serialized")
    load_folder = _remote("load_folder")
    end_update = _remote("end_update")
    set_version = _remote("set_version")
    checksum = _remote("checksum")

    async def join_group(self, address: GroupAddress, rank: int) -> None:
        """Let the engine join the process group for weights."""
        await self.call("join_group", address, rank)
        self.in_group = address.name

    def verifier(self) -> WeightVerifier:
        """Implements the protocol. Raises PublicationFailed where the service is gone.

        The next attempt finds another service.
        """
        try:
            found: WeightVerifier = self._client.call("verifier", self.name)
        except ActorLost as error:
            raise PublicationFailed(f"engine {self.name}: {error}") from error
        return found

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the engine. Raises EngineFailed where it or the service is gone."""
        try:
            return await self._client.call_async("engine", self.name, verb, *arguments)
        except ActorLost as error:
            raise EngineFailed(f"engine {self.name}: {error}") from error


class RemoteSource:
    """Implements `rlcore.interfaces.RolloutSource`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = client.config.rollout.timeout_s + SERVICE_GRACE_S

    def start(self) -> None:
        """Start the service's engines and reward workers."""
        self._client.start()

    def next_step(self, step: int) -> StepRollouts | None:
        """Implements the protocol; None also where the service was replaced."""
        found: tuple[StepRollouts, Mapping[str, Any]] | None = self._work("next_step", step)
        if found is None:
            return None
        rollouts, state = found
        self._client.remember("restore", state)
        return rollouts

    def evaluate(
        self, sets: Sequence[str] | None = None
    ) -> tuple[dict[str, float], list[Sample]] | None:
        """Implements the protocol; None also where the service was replaced."""
        scored: tuple[dict[str, float], list[Sample]] | None
        scored = self._work("source", "evaluate", sets)
        return scored

    def published(self, step: int, version: int, incarnation: int) -> None:
        """Implements the protocol."""
        self._client.tell("published", step, version, incarnation)

    def snapshot(self) -> dict[str, Any]:
        """The state of the newest hand-over, which came with it."""
        return dict(self._client.state or self._client.call("source", "snapshot"))

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Implements the protocol."""
        self._client.tell("restore", state)

    def keep_ledger(self, path: Path) -> None:
        """Implements the protocol."""
        self._client.tell("keep_ledger", path.absolute())

    def admit_engines(self, folder: Path) -> None:
        """Implements the protocol."""
        self._client.tell("admit_engines", folder.absolute())

    def close(self) -> None:
        """Do nothing: the service belongs to the driver."""

    def _work(self, part: str, *arguments: Any) -> Any:
        """Make a call that takes as long as generation; None where the service was replaced."""
        try:
            return self._client.call(
                part, *arguments, limit_s=self._limit_s, key="rollout.timeout_s"
            )
        except ActorLost:
            self._client.reopen()
            return None


class RemoteMemory:
    """Implements `rlcore.interfaces.EngineMemory`."""

    def __init__(self, client: ServiceClient) -> None:
        self._client = client
        self._limit_s = all_engines_timeout_s(client.config) + SERVICE_GRACE_S

    def release(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("release", tags)

    def restore(self, tags: Sequence[MemoryTag]) -> None:
        """Implements the protocol."""
        self._call("restore", tags)

    def any_running(self) -> bool:
        """Implements the protocol."""
        return bool(self._call("any_running"))

    def _call(self, method: str, *arguments: Any) -> Any:
        return self._client.call(
            "memory",
            method,
            *arguments,
            limit_s=self._limit_s,
            key="rollout.engine.update_timeout_s",
        )
