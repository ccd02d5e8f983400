from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlcore.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, Section


class SamplingConfig(Section):
    """How responses are drawn. `temperature: 0` is greedy."""

    temperature: NonNegativeFloat = 1.0
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = -1                             # -1: off
    max_new_tokens: PositiveInt = 1024
    stop: list[str] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)    # the tokenizer's eos is always one


class EngineConfig(Section):
    kind: Literal["embedded", "sglang"] = "embedded"
    in_process: bool | None = None              # embedded: default true under the local launcher, else false
    device: str | None = None                   # default: cuda when there is one, else cpu
    dtype: Literal["fp32", "bf16"] | None = None    # default: `model.dtype`
    threads: PositiveInt | None = None          # torch threads of an engine process
    max_batch: PositiveInt = 256                # sequences generated together
    python: str | None = None                   # interpreter of the engine's own environment (sglang)
    urls: list[str] = Field(default_factory=list)   # engines that somebody else runs
    bucket_bytes: PositiveInt = 256 << 20       # weights are published in flat buckets of at most this size
    start_timeout_s: PositiveFloat = 300.0
    request_timeout_s: PositiveFloat = 600.0
    update_timeout_s: PositiveFloat = 300.0     # one bucket


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
    timeout_s: PositiveFloat = 1800.0           # the longest that a step may wait for its rollouts
