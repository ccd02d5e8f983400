"""What a configuration asks of the machine on which its trainer runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlcore.config import Config
from rlcore.config.derived import generates, in_weight_group
from rlcore.config.engine_registry import KINDS
from rlcore.config.sections.sandbox import SandboxConfig
from rlcore.interpreters.ask import CHECKOUT

FILES = 512  # that a trainer holds open beside its engines' connections: libraries, logs, sockets


@dataclass(frozen=True)
class Needs:
    """The needs of one run on this machine; the defaults are those of no run in particular.

    Attributes:
        engine_python: the interpreter of SGLang's environment; None where no SGLang is started.
        nccl: whether weights go to engines over NCCL, where both sides have GPUs.
        ranks, engine_gpus: GPUs of this machine, if it has any.
        shared_gpus: GPUs of the trainer, on all machines, that colocated engines take.
        sandbox: where programs that a model wrote run; None where none does, or elsewhere.
        extras: packages beyond the required ones.
    """

    run_folder: Path = Path("runs")
    engine_python: Path | None = None
    engine_device: str | None = None
    engine_environment: Mapping[str, str] = field(default_factory=dict)
    nccl: bool = False
    ranks: int = 1
    engine_gpus: int = 0
    shared_gpus: int = 0
    sandbox: SandboxConfig | None = None
    nodes: int = 1
    launcher: str = "local"
    files: int = FILES
    extras: tuple[str, ...] = ()
    wandb_online: bool = False
    engine_urls: bool = False
    transformer_engine: bool = True
    deterministic: bool = False
    bf16: bool = True
    model: Path | None = None

    @property
    def configured(self) -> bool:
        """Whether they are those of a run."""
        return self.model is not None

    @property
    def several(self) -> bool:
        """Whether the run has other processes here than one trainer."""
        return self.ranks > 1 or self.engine_python is not None

    @classmethod
    def of(cls, config: Config | None) -> Needs:
        """The needs of a run; of none in particular those of whatever is installed."""
        if config is None:
            python = engine_python(None)
            return cls(engine_python=python if python.is_file() else None)
        engine = config.rollout.engine
        cluster = config.cluster
        sglang = generates(config) and engine.kind in KINDS and KINDS[engine.kind].standalone
        started = sglang and not engine.is_external
        apart = not engine.colocated and cluster.launcher != "ray"
        count = len(engine.urls) or engine.count
        extras = ("ray",) * (cluster.launcher == "ray") + ("wandb",) * config.tracking.wandb.enabled
        return cls(
            run_folder=Path(config.run.dir),
            engine_python=engine_python(engine.python) if started else None,
            engine_device=engine.device,
            engine_environment=engine.environment,
            nccl=started and in_weight_group(engine) and engine.device != "cpu",
            ranks=cluster.processes_per_node,
            engine_gpus=engine.count * engine.tensor_parallel
            if started and apart and engine.device != "cpu"
            else 0,
            shared_gpus=engine.count * engine.tensor_parallel
            if started and engine.colocated and engine.device != "cpu"
            else 0,
            sandbox=_sandbox(config),
            nodes=cluster.nodes,
            launcher=cluster.launcher,
            files=FILES + (count * engine.max_in_flight if sglang else 0),
            extras=extras,
            wandb_online=config.tracking.wandb.enabled and config.tracking.wandb.mode == "online",
            engine_urls=sglang and engine.is_external,
            transformer_engine=config.policy.transformer_engine == "auto",
            deterministic=config.run.deterministic,
            bf16=config.model.dtype == "bf16",
            model=Path(config.model.path),
        )


def _sandbox(config: Config) -> SandboxConfig | None:
    rewards = [config.reward, *(one.reward for one in config.evaluation.sets.values())]
    for reward in rewards:
        runs_code = reward is not None and any(
            part.function == "code" for part in reward.parts.values()
        )
        if reward is not None and runs_code and reward.sandbox.kind != "fusion":
            return reward.sandbox
    return None


def engine_python(given: str | None) -> Path:
    """The interpreter of the engines' environment, as a run finds it. Not resolved: it is a link
    by which Python finds its environment.
    """
    default = CHECKOUT / ".venv-sglang" / "bin" / "python"
    return Path(os.path.abspath(given)) if given else default
