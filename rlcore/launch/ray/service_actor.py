"""The rollout service as an actor, which a new rank 0 finds with its engines running.

When it dies, Ray starts it again, without any state.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray

from rlcore.config import Config
from rlcore.interfaces import RolloutEngine
from rlcore.launch.logs import log_folder
from rlcore.launch.ray.actor_env import ActorEnv, log_to
from rlcore.launch.ray.calls import NAMESPACE
from rlcore.launch.ray.engine_hosts import cluster_engines
from rlcore.launch.service.host import ServiceHost
from rollout.engines.factories import Keys


class ServiceActor(ServiceHost):
    """A `ServiceHost` as an async actor.

    Args:
        hosts: the names of the engines' actors, in order. Handles would not outlive the process
            that was given them.
    """

    def __init__(
        self, actor_env: ActorEnv, config: Config, hosts: Sequence[str], keys: Keys
    ) -> None:
        actor_env.enter()
        super().__init__(config)
        self._actor_env = actor_env
        self._hosts = hosts
        self._keys = keys

    def _engines(self) -> Sequence[RolloutEngine]:
        hosts = [ray.get_actor(name, namespace=NAMESPACE) for name in self._hosts]
        return cluster_engines(self._config, hosts, self._keys)

    def _open_log(self) -> bool:
        self._actor_env.redirect_output()
        log_to(log_folder(self._config.run) / "service.log")
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
