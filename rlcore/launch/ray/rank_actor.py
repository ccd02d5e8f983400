"""A trainer rank as an actor: it sets torchrun's environment, and runs what torchrun runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

import ray

from rlcore.config.load import Loaded
from rlcore.launch.environment import SUPERVISED, THREADS
from rlcore.launch.ray.actor_env import ActorEnv
from rlcore.launch.ray.engine_hosts import ADDRESS, NODE_ADDRESS
from rlcore.timeline.start import START, now


class RankActor:
    """Runs one rank, once, in the main thread of its process."""

    def __init__(self, actor_env: ActorEnv) -> None:
        actor_env.enter()
        self._actor_env = actor_env

    def where(self) -> tuple[str, int, list[str]]:
        """The node's id, the process id, the GPUs that Ray gave it."""
        gpus = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        return ray.get_runtime_context().get_node_id(), os.getpid(), gpus

    def run(
        self,
        environment: Mapping[str, str],
        loaded: Loaded,
        *,
        resume: bool,
        overwrite: bool,
    ) -> int:
        """Train, and return the rank's exit code.

        Args:
            environment: the variables that torchrun would set, and for rank 0 the engines' keys.

        Raises:
            RlcoreError: as `rlcore.launch.rank.train_rank`.
        """
        START.origin = now()  # the process may have waited for this since long ago
        # A rank that Ray gave GPUs sees only those, numbered from 0. Else it is as under torchrun.
        has_own = loaded.config.cluster.ray.rank_gpus > 0 and bool(self.where()[2])
        local = {"LOCAL_RANK": "0"} if has_own else {}
        # Ray's own setting is one thread; the user's is among the variables.
        os.environ.pop(THREADS, None)
        os.environ.update({**environment, **local, SUPERVISED: str(os.getppid())})
        from rlcore.launch.rank import train_rank

        if environment["RANK"] == "0":
            self._actor_env.redirect_output()
            # for the rollout service, which is a process of its own
            os.environ[ADDRESS] = ray.get_runtime_context().gcs_address
            os.environ[NODE_ADDRESS] = ray.util.get_node_ip_address()
        return train_rank(loaded, resume=resume, overwrite=overwrite)
