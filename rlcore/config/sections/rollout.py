"""The section `rollout`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from rlcore.config.engine_registry import check_name
from rlcore.config.sections.base import (
    AdapterPath,
    ListPath,
    OutputPath,
    Plugin,
    Probability,
    ProgramPath,
    Section,
    a_text_is_a_name,
)

ToolParser = Literal[
    "auto",
    "seed_oss",
    "minimax-m2",
    "qwen3_coder",
    "glm45",
    "hermes",
    "deepseekv3",
    "deepseekv31",
    "deepseekv32",
    "kimi_k2",
    "gpt-oss",
    "mistral",
    "llama3",
]


class SamplingConfig(Section):
    """How responses are sampled."""

    temperature: NonNegativeFloat = 1.0
    """Temperature of the softmax; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Sample from the most likely tokens whose probabilities reach this sum."""
    top_k: int = -1
    """Sample from this many most likely tokens; -1: from all."""
    max_new_tokens: PositiveInt = 1024
    """Longest response."""
    stop: list[str] = Field(default_factory=list)
    """Strings that end a response."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Tokens that end a response, in addition to the tokenizer's eos."""


class RestartConfig(Section):
    """Restarts of failed engines, each after a pause that doubles until the engine serves."""

    limit: NonNegativeInt = 10
    """Restarts of one engine within `window_s`; at the next failure it is given up."""
    window_s: PositiveFloat = 86_400.0
    """Earlier restarts do not count, so that a fault per day does not end an engine."""
    backoff_s: PositiveFloat = 1.0
    """Pause before the first restart."""
    max_backoff_s: PositiveFloat = 60.0
    """Longest pause before a restart."""


class EngineConfig(Section):
    """The engines that generate: which, how many, and how they are reached and updated."""

    kind: Annotated[str, AfterValidator(check_name)] = "embedded"
    """`embedded` (rlcore's own, on torch), `sglang`, or `package.module:Class` of an engine."""
    count: PositiveInt = 1
    """Engines that the run starts."""
    device: str | None = None
    """Device of the engines; default: cuda where available, otherwise cpu."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Precision of the engines; default: `model.dtype`."""
    quantization: Literal["fp8"] | None = None
    """Publish the matrices of all layers in FP8, in blocks of 128 x 128; the trainer's stay."""
    threads: PositiveInt | None = None
    """Torch threads of an engine process; default: torch's choice."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More environment variables of engine processes, which inherit suitable ones."""
    max_batch: PositiveInt = 256
    """Embedded: sequences generated together."""
    bucket_bytes: PositiveInt = 256 << 20
    """Largest flat bucket in which weights are published. Each is a call to every engine: with 16
    or more engines of a large model 1 GiB is quicker."""
    start_timeout_s: PositiveFloat = 900.0
    """Longest start of an engine; the first one on a machine compiles kernels."""
    request_timeout_s: PositiveFloat | None = None
    """Longest time for one request, then aborted; default: 600 s and 1 s a token of a response."""
    progress_timeout_s: PositiveFloat = 300.0
    """Longest time that an engine with requests may make no token before it is restarted."""
    update_timeout_s: PositiveFloat = 300.0
    """Longest time for one bucket of a weight update."""

    # SGLang: the servers and their arguments.
    python: ProgramPath | None = None
    """SGLang: interpreter of the engine's own environment; default: that of .venv-sglang."""
    urls: list[str] = Field(default_factory=list)
    """SGLang: URLs of external engines, instead of engines that the run starts."""
    urls_file: ListPath | None = None
    """SGLang: a JSON file with a list of such URLs, or a folder of such files. It is read again
    before each publication: engines may come and go."""
    tensor_parallel: PositiveInt = 1
    """SGLang: tensor-parallel ranks of one engine."""
    gpus: list[NonNegativeInt] = Field(default_factory=list)
    """SGLang: GPUs of this machine, assigned to engines in order; default: chosen by rlcore."""
    host: str = "127.0.0.1"
    """SGLang: address that engines listen on, and are reached at."""
    server: dict[str, Any] = Field(default_factory=dict)
    """Any argument of `python -m sglang.launch_server`; the options of another engine."""
    router_url: str | None = None
    """SGLang: an sglang-router in front of the engines, for generation."""
    max_in_flight: PositiveInt = 256
    """SGLang: requests that one engine has at a time."""
    retries: NonNegativeInt = 3
    """How often a request is sent again when its engine fails."""

    # The comparison of the engine's log-probs with the trainer's.
    logprobs_every: NonNegativeInt = 20
    """Steps from one comparison with the trainer's log-probs to the next; 0: never."""
    max_logprob_diff: PositiveFloat | None = None
    """Largest mean difference in nats; default: 0.001 in fp32, 0.1 in bf16, 0.2 in FP8."""

    # Publication and health.
    transport: Literal["auto", "distributed", "tensor", "disk", "delta"] = "auto"
    """How weights reach the engines."""
    senders: PositiveInt | None = None
    """Transport distributed: ranks of the trainer that engines are assigned to, each of which sends
    to its own; default: on GPUs as many as engines, on the CPU one."""
    rails: PositiveInt | None = None
    """Transport distributed: ranks of one machine whose network cards together carry the weights of
    an engine; default: over NCCL as many as the engine has GPUs, if so many are free, else one."""
    weights_dir: OutputPath | None = None
    """Transports disk and delta: folder shared with the engines; default: the run's."""
    health_every_s: PositiveFloat = 5.0
    """Time from one health check of an engine to the next."""
    health_timeout_s: PositiveFloat = 120.0
    """Longest time that an engine may answer no health check."""
    restart: RestartConfig = Field(default_factory=RestartConfig)
    colocated: bool = False
    """Trainer and engines take turns on the same GPUs; on several nodes under Ray."""

    @property
    def is_external(self) -> bool:
        """Whether the engines are external."""
        return bool(self.urls) or self.urls_file is not None

    @property
    def named_by(self) -> str:
        """The key that names external engines."""
        return f"rollout.engine.{'urls' if self.urls_file is None else 'urls_file'}"


class WorkflowConfig(Plugin):
    """The workflow, from a prompt to samples: its `name` and its own keywords."""

    name: str = "single_turn"
    """`single_turn`, `env`, `agent`, `verifiers`, or `package.module:Name`."""
    max_turns: PositiveInt | None = None
    """Turns of the model in a rollout; default: as many as the budgets of tokens allow."""
    max_tokens: PositiveInt | None = None
    """Tokens that the model may write in a rollout; `sampling.max_new_tokens` is of a turn."""
    timeout_s: PositiveFloat = 600.0
    """Longest time of one try of a rollout, excluding waits for the engine."""
    retries: NonNegativeInt = 1
    """How often a failed rollout is retried before its group is given up."""
    history: Literal["keep", "branch"] | None = None
    """Where the chat template changes earlier turns: keep them as written, or begin a sample."""


# The name of the trained policy, where a program names the policy that answers.
TRAINED = "policy"


class RolloutConfig(Section):
    """Generation: engines, the size of a step, sampling, workflow, staleness."""

    engine: EngineConfig = Field(default_factory=EngineConfig)
    service: Literal["process", "in_process"] = "process"
    """Where the rollout service runs: in a child process of rank 0, or, for a debugger, in rank 0's
    process (`in_process`), and there with it a single embedded engine."""
    prompts_per_step: PositiveInt = 32
    """Prompts, and so groups, of one training step."""
    samples_per_prompt: PositiveInt = 8
    """Samples of one prompt: the size of a group."""
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    workflow: WorkflowConfig = Field(default_factory=WorkflowConfig)
    policies: dict[str, AdapterPath] = Field(default_factory=dict)
    """Frozen policies by name: PEFT folders on the run's model, which engines serve beside the
    trained one. A workflow or an evaluation set names the policy that answers."""
    tool_parser: ToolParser = "auto"
    """The format of tool calls, by SGLang's names; default: from tokenizer or chat template."""
    max_staleness: NonNegativeInt = 0
    """Training steps that generation may be ahead; 0: trainer and engines alternate."""
    on_update: Literal["drain", "retract", "in_place", "abort"] = "drain"
    """What a weight update does to responses in flight."""
    filters: list[str] = Field(default_factory=list)
    """`zero_variance`, `mixed_verdicts` (some right, some wrong) or `package.module:function`: only
    groups that pass are trained on."""
    oversample: float = Field(default=1.0, ge=1.0)
    """Groups that are started per group that is needed, as filters drop some."""
    max_failed: Probability = 0.1
    """Largest share of a step's draws whose groups may fail; one always may, unless it is 0."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time that a step may wait for its rollouts."""

    _a_text_is_a_name = field_validator("workflow", mode="before")(a_text_is_a_name)
