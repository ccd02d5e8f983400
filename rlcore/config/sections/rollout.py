from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from rlcore.config.engine_kinds import check_name
from rlcore.config.sections.base import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Section,
)


class SamplingConfig(Section):
    """How responses are drawn. `temperature: 0` is greedy."""

    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1  # -1: off
    max_new_tokens: PositiveInt = 1024
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)  # the tokenizer's eos is always one


class RestartConfig(Section):
    """What becomes of an engine that failed: it is started again, after a pause that doubles until
    it has served again.
    """

    limit: NonNegativeInt = 10  # restarts of one engine in a run
    backoff_s: PositiveFloat = 1.0  # before the first
    max_backoff_s: PositiveFloat = 60.0


class EngineConfig(Section):
    # a row of rlcore.config.engine_kinds.KINDS, or the import path of an engine's class
    kind: Annotated[str, AfterValidator(check_name)] = "embedded"
    count: PositiveInt = 1  # engines that the run starts
    # embedded: default true where the run has one process and one engine
    in_process: bool | None = None
    device: str | None = None  # default: cuda when there is one, else cpu
    dtype: Literal["fp32", "bf16"] | None = None  # default: `model.dtype`
    threads: PositiveInt | None = None  # torch threads of an engine process
    max_batch: PositiveInt = 256  # embedded: sequences generated together
    # weights are published in flat buckets of at most this size
    bucket_bytes: PositiveInt = 256 << 20
    start_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 600.0
    update_timeout_s: PositiveFloat = 300.0  # one bucket

    # sglang: which servers, and what they are told
    # interpreter of the engine's own environment; default: .venv-sglang's
    python: str | None = None
    urls: list[str] = Field(default_factory=list)  # engines that somebody else runs
    tensor_parallel: PositiveInt = 1  # ranks of one engine
    # of this machine, shared out in order; default: chosen by us
    gpus: list[NonNegativeInt] = Field(default_factory=list)
    # the address that engines listen on, and are reached at
    host: str = "127.0.0.1"
    # any argument of `python -m sglang.launch_server`; the options of another package's engine
    server: dict[str, Any] = Field(default_factory=dict)
    # an sglang-router in front of the engines, for generation
    router_url: str | None = None
    # sglang: requests that one engine is given at a time
    max_in_flight: PositiveInt = 256
    # times that a request is sent again when its engine fails
    retries: NonNegativeInt = 3

    # log-probs against the trainer's: on the first step, where a difference ends the run; then it
    # is a warning steps from one comparison to the next; 0: never compared
    logprobs_every: NonNegativeInt = 20
    # mean over tokens, in nats; default: 0.001 in fp32, 0.1 in bf16
    max_logprob_diff: PositiveFloat | None = None

    # publication, health
    transport: Literal["auto", "distributed", "tensor", "disk", "delta"] = "auto"
    # disk and delta: a folder that trainer and engines share; default: the run's
    weights_dir: str | None = None
    # publications from one checksum of all weights to the next; 0: never
    verify_every: NonNegativeInt = 0
    health_every_s: PositiveFloat = 5.0
    health_timeout_s: PositiveFloat = 10.0
    restart: RestartConfig = Field(default_factory=RestartConfig)
    colocated: bool = False  # trainer and engines take turns on the same GPUs


class RolloutConfig(Section):
    engine: EngineConfig = Field(default_factory=EngineConfig)
    prompts_per_step: PositiveInt = 32
    samples_per_prompt: PositiveInt = 8
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    workflow: str = "single_turn"
    max_staleness: NonNegativeInt = 0
    on_update: Literal["drain", "retract", "in_place", "abort"] = "drain"
    filters: list[str] = Field(default_factory=list)
    oversample: float = Field(default=1.0, ge=1.0)
    timeout_s: PositiveFloat = 1800.0  # the longest that a step may wait for its rollouts
