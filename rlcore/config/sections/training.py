"""The sections `run`, `training`, `checkpoint`, `tracking` and `cluster`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from rlcore.config.sections.base import (
    CertificatePath,
    CheckpointPath,
    Found,
    OutputPath,
    RecordingPath,
    Section,
)


class RunConfig(Section):
    """The name of the run and its folder: `<dir>/<name>/`."""

    name: str
    """Name of the run, and of its folder."""
    dir: OutputPath = "runs"
    """Folder that holds the folders of runs."""
    seed: int = 1
    """Seed of every random number: data order, sampling, initial heads."""
    deterministic: bool = False
    """Use torch's deterministic algorithms: bit-equal reruns on one layout."""
    threads: int | None = None
    """Torch's intra-op threads per process; default: OMP_NUM_THREADS, otherwise a share of the
    cores, or 1 where that is as fast, as measured at the start."""


class TrainingConfig(Section):
    """How long to train: one of `steps`, `episodes` or `epochs`."""

    steps: PositiveInt | None = None
    """Length of the run in training steps."""
    episodes: PositiveInt | None = None
    """Length of the run in samples."""
    epochs: PositiveFloat | None = None
    """Length of the run in passes over the prompts, if no filter drops any."""
    batch_size: PositiveInt = 256
    """Rows a step, where answers come from rows: supervised fine-tuning, preferences."""
    early_stopping: bool = False
    """End the run after a step whose KL exceeds `target_kl`."""
    target_kl: NonNegativeFloat | None = None
    """Largest `objective/kl` (nats per sequence) under early stopping."""
    max_update_kl: PositiveFloat | None = None
    """End the optimizer steps of a step when `policy/approxkl_avg` exceeds this."""
    debug: Literal["rollout_only", "train_only"] | None = None
    """Generate and score alone, or train alone on a recorded step."""
    replay: RecordingPath | None = None
    """`train_only`: the rollouts/step_*.parquet file to train on again."""
    replay_from: CheckpointPath | None = None
    """`train_only`: training checkpoint to start from, optimizer state included."""

    def errors(self) -> Found:
        """Early stopping has a target; training.debug and training.replay go together."""
        if self.early_stopping and not self.target_kl:
            got = "null" if self.target_kl is None else f"{self.target_kl:g}"
            message = f"got {got}, expected a positive number, as training.early_stopping is on"
            yield "target_kl", message
        if self.debug == "train_only" and self.replay is None:
            yield (
                "debug",
                "train_only trains on a saved step again: name its rollouts/step_*.parquet in"
                " training.replay",
            )
        for key in ("replay", "replay_from"):
            if getattr(self, key) is not None and self.debug != "train_only":
                yield key, "a saved step is trained on only with training.debug: train_only"

    def warnings(self) -> Found:
        """Yield a target that has no effect."""
        if self.target_kl and not self.early_stopping:
            yield "target_kl", f"{self.target_kl:g} is ignored: training.early_stopping is off"


class BestConfig(Section):
    """Keep the checkpoint with the best value of one metric of the evaluation."""

    metric: str
    """Metric of the evaluation, as eval/score or eval/NAME/pass@1 of the set NAME."""
    mode: Literal["max", "min"] = "max"
    """Whether the largest or the smallest value is the best."""


class CheckpointConfig(Section):
    """Training checkpoints, and the Hugging Face folder at the end."""

    every: NonNegativeInt = 0
    """Steps from one checkpoint to the next; 0: at the end alone."""
    keep: PositiveInt = 2
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """Write from a copy in host memory while training continues."""
    export_hf: bool = True
    """Write a Hugging Face folder at the end."""
    best: BestConfig | None = None


class HubConfig(Section):
    """Push the final model to the Hugging Face hub."""

    repo: str | None = None
    """Repository to push to; default: none."""
    private: bool = True
    """Make the repository private."""


class WandbConfig(Section):
    """Metrics in Weights & Biases."""

    enabled: bool = False
    """Send metrics to wandb."""
    project: str = "rlcore"
    """Project of the run."""
    entity: str | None = None
    """Team or user of the project; default: that of the login."""
    mode: Literal["online", "offline"] = "online"
    """Send at once, or keep the records for `wandb sync`."""
    tags: list[str] = Field(default_factory=list)
    """Tags of the run."""


class TrackingConfig(Section):
    """What is logged in addition to metrics.jsonl, which is always written."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    tensorboard: bool = False
    """Write TensorBoard's event files."""
    hub: HubConfig = Field(default_factory=HubConfig)
    show_samples: NonNegativeInt = 2
    """Generated samples that are shown at each report."""
    show_every: PositiveInt = 10
    """Steps from one report of samples to the next."""
    save_rollouts: bool = True
    """Write the samples of each step to rollouts/."""
    keep_rollouts: PositiveInt | None = None
    """Newest steps whose samples are kept, and those that a kept checkpoint needs; null: all."""
    timeline_mb: NonNegativeInt = 64
    """Most megabytes of each process's timeline, the newest steps; 0: none is recorded."""
    peak_tflops: PositiveFloat | None = None
    """Peak of one GPU, for perf/mfu; default: its data sheet's, where rlcore knows it."""


class RayConfig(Section):
    """What the ray launcher asks of a cluster; Ray counts CPUs and GPUs, it enforces neither."""

    address: str | None = None
    """HOST:PORT, `auto` (Ray's choice) or `local`; default: your own cluster here, or `local`."""
    rank_cpus: NonNegativeFloat = 1.0
    """CPUs of a trainer process; rank 0 shares them with the rollout service."""
    rank_gpus: NonNegativeFloat = 1.0
    """GPUs of a trainer process, where the cluster has GPUs."""
    engine_cpus: NonNegativeFloat = 1.0
    """CPUs of an engine."""
    engine_gpus: NonNegativeFloat = 1.0
    """GPUs of each tensor-parallel rank of an engine."""
    runtime_env: dict[str, Any] = Field(default_factory=dict)
    """Ray's runtime environment of all actors: env_vars, working_dir, ..."""
    env_from_shell: list[str] = Field(default_factory=list)
    """Variables that all actors get as they are where the run is started: WANDB_API_KEY, ..."""


class TLSConfig(Section):
    """TLS between the run, its engines and a reward model's server, by files in PEM."""

    ca_file: CertificatePath
    """Certificates of the authorities; clients accept servers of these alone."""
    certificate_file: CertificatePath | None = None
    """Certificate of the servers that the run starts, with the chain to an authority."""
    key_file: CertificatePath | None = None
    """Private key of the certificate, without a passphrase, readable by its owner alone."""


class ClusterConfig(Section):
    """Processes and machines of the trainer, and their limits of time."""

    launcher: Literal["local", "torchrun", "ray"] = "local"
    """What starts the trainer's processes."""
    nodes: PositiveInt = 1
    """Machines of the trainer."""
    processes_per_node: PositiveInt = 1
    """Trainer processes on each machine, one per GPU."""
    collective_timeout_s: PositiveFloat = 600.0
    """A collective that takes longer ends the run."""
    heartbeat_timeout_s: PositiveFloat = 120.0
    """A process that is silent for longer counts as hung, and is named."""
    start_timeout_s: PositiveFloat = 600.0
    """Longest start of all processes."""
    max_restarts: NonNegativeInt = 3
    """Ray: how often all ranks start again when one is lost."""
    tls: TLSConfig | None = None
    ray: RayConfig = Field(default_factory=RayConfig)
