"""Checks of a run's length, batches, data, layout and launcher. Pure, like all checks."""

from __future__ import annotations

import math
from operator import attrgetter

from rlcore.config.built_in import ESTIMATORS
from rlcore.config.derived import (
    generates,
    gpus_per_node,
    model_parallel_size,
    pack_multiple,
    published_adapters,
    updates_per_step,
)
from rlcore.config.engine_registry import is_import_path
from rlcore.config.messages import ConfigIssue
from rlcore.config.sections.base import Found
from rlcore.config.sections.root import Config
from rlcore.config.sections.training import RayConfig

_SIZES = ("tensor", "pipeline", "context", "expert")
_LENGTHS = ("steps", "episodes", "epochs")
_NOT_READ_BY_SFT = (
    *("reward", "rollout", "critic", "reference", "teacher", "algorithm.estimator"),
    *("algorithm.normalize_advantages", "algorithm.kl.monitor", "algorithm.old_logprobs"),
)
_NOT_READ_BY_PREFERENCES = ("reward", "rollout", "critic", "teacher", "algorithm.kl.monitor")
_SHARES = "but Ray gives a share of one GPU or a whole number"


def length(config: Config) -> Found:
    """The run's length is given exactly once."""
    kinds = [kind for kind in _LENGTHS if kind != "episodes" or not config.learns_from_rows]
    given = [kind for kind in _LENGTHS if getattr(config.training, kind) is not None]
    names = ", ".join(f"training.{kind}" for kind in kinds)
    if not given:
        yield "training", f"how long to train is missing: set one of {names}"
    elif len(given) > 1:
        yield f"training.{given[1]}", f"{' and '.join(given)} are both given: keep one of {names}"
    elif given[0] not in kinds:
        message = f"{config.kind_of_learning} counts no episodes: set one of {names}"
        yield f"training.{given[0]}", message


def early_stopping(config: Config) -> Found:
    """Early stopping has a KL to compare with the target."""
    unmeasured = config.learns_from_rows or config.training.debug == "rollout_only"
    if config.training.early_stopping and unmeasured:
        rows = config.learns_from_rows
        why = config.kind_of_learning if rows else "training.debug: rollout_only"
        yield "training.early_stopping", f"{why} measures no KL against the reference: turn it off"


def batch(config: Config) -> Found:
    """Every optimizer step has samples, and groups are large enough for the estimator."""
    algorithm = config.algorithm
    if config.is_sft:
        if algorithm.minibatches > (size := config.training.batch_size):
            yield "algorithm.minibatches", f"more than training.batch_size ({size})"
        return
    if algorithm.minibatches > (prompts := config.rollout.prompts_per_step):
        message = f"got {algorithm.minibatches}, at most rollout.prompts_per_step ({prompts})"
        yield "algorithm.minibatches", f"{message}: a group is never split"
    estimator = ESTIMATORS.get(algorithm.estimator.name)
    if config.rollout.samples_per_prompt == 1:
        if estimator is not None and estimator.compares_group:
            yield one_sample(f"estimator {algorithm.estimator.name!r}")
        if algorithm.normalize_advantages == "group":
            yield one_sample("algorithm.normalize_advantages: group")


def one_sample(comparer: str) -> ConfigIssue:
    """Refuse one sample per prompt where `comparer` compares the samples of a prompt."""
    message = f"got 1, but {comparer} compares the samples of one prompt: use 2 or more"
    return ConfigIssue("rollout.samples_per_prompt", message)


def data(config: Config) -> Found:
    """Supervised fine-tuning has labels, and a push to the hub has an exported folder."""
    if config.is_sft and config.data.label_key is None:
        yield "data.label_key", "missing: supervised fine-tuning trains on the labels"
    if config.tracking.hub.repo and not config.checkpoint.export_hf:
        message = "only an exported folder can be pushed: set checkpoint.export_hf to true"
        yield "tracking.hub.repo", message


def debugging(config: Config) -> Found:
    """Only runs with rollouts set training.debug."""
    debug = config.training.debug
    if debug is not None and config.learns_from_rows:
        message = f"{debug} is for runs with rollouts, not for {config.kind_of_learning}"
        yield "training.debug", message


def training_notes(config: Config) -> Found:
    """Yield limits that have no effect, or stop too early."""
    training = config.training
    ahead = config.rollout.max_staleness if generates(config) else 0
    if training.early_stopping and ahead and config.algorithm.kl.reward_kind == "k1":
        yield (
            "training.early_stopping",
            f"with rollout.max_staleness {ahead} tokens come from older weights, and for these the"
            " k1 estimate falls below 0 as the policy moves away, so the run may continue far"
            " beyond target_kl: set algorithm.kl.reward_kind to k2, which is never negative",
        )
    path = "training.max_update_kl"
    if training.max_update_kl is None:
        return
    if config.learns_from_rows:
        yield path, f"is ignored: {config.kind_of_learning} measures no policy/approxkl_avg"
    elif updates_per_step(config) == 1:
        message = "is ignored: a batch gets one optimizer step (algorithm.epochs x minibatches)"
        yield path, f"{message}, nothing is left to end"
    elif config.algorithm.old_logprobs == "rollout":
        yield (
            path,
            "counts from the engine's log-probs (algorithm.old_logprobs: rollout): tokens of older"
            " weights may exceed it before the policy has moved, which leaves one optimizer step",
        )


def unread_notes(config: Config) -> Found:
    """Yield keys that learning from rows does not read."""
    unread = _NOT_READ_BY_PREFERENCES if config.is_preference else ()
    for path in _NOT_READ_BY_SFT if config.is_sft else unread:
        parent, _, name = path.rpartition(".")
        section = attrgetter(parent)(config) if parent else config
        default = type(section).model_fields[name].get_default(call_default_factory=True)
        if getattr(section, name) != default:
            yield path, f"is ignored: {config.kind_of_learning} trains on the answers of its rows"


def layout(config: Config) -> Found:
    """The parallel layout is consistent and fits the launcher."""
    parallel = config.policy.parallel
    cluster = config.cluster
    model = model_parallel_size(config)
    processes = cluster.nodes * cluster.processes_per_node
    if cluster.launcher == "local" and cluster.nodes > 1:
        message = "the local launcher starts processes on this machine alone: use torchrun or ray"
        yield "cluster.nodes", message
    elif cluster.launcher != "torchrun" and processes < model:
        path = "policy.parallel." + next(axis for axis in _SIZES if getattr(parallel, axis) > 1)
        other = "cluster.launcher=torchrun" if cluster.launcher == "local" else "cluster.nodes"
        # This check runs before the model is read. The hint avoids a second error later.
        heads = "; the model's attention heads must divide by it" * path.endswith(".tensor")
        yield (
            path,
            f"the layout needs {model} processes and the {cluster.launcher} launcher starts"
            f" {processes}: set cluster.processes_per_node={model}, or {other}{heads}",
        )
    elif processes > 1 and processes % model:
        yield (
            "policy.parallel",
            f"{processes} processes do not divide into models of {model} (tensor x pipeline x"
            f" context, and experts): set cluster.processes_per_node to a multiple of {model}",
        )


def fp8(config: Config) -> Found:
    """FP8 has the layers and the dtype that it needs."""
    if config.policy.fp8 is None:
        return
    if config.policy.transformer_engine == "off":
        message = "needs Transformer Engine's layers: set policy.transformer_engine to auto"
        yield "policy.fp8", message
    if config.model.dtype != "bf16":
        yield "policy.fp8", f"needs model.dtype: bf16, got {config.model.dtype}"


def adapters(config: Config) -> Found:
    """Adapters have layers that compute them, and engines that take them."""
    lora = config.policy.lora
    if config.rollout.policies and published_adapters(config) is None:
        message = "engines serve them beside the adapters of the trained policy: set policy.lora"
        yield "rollout.policies", f"{message}, with merged: false, or leave them out"
    if lora is None:
        return
    if config.policy.fp8 is not None:
        yield "policy.lora", "needs Megatron's own layers, and policy.fp8 others: leave one out"
    if config.policy.mtp_coef:
        message = "trains whole weights, and policy.lora adapters alone: leave one out"
        yield "policy.mtp_coef", message
    if lora.merged or not generates(config):
        return
    whole = "set policy.lora.merged to true, which publishes whole weights"
    if is_import_path(config.rollout.engine.kind):
        yield "rollout.engine.kind", f"engines of other packages take no adapters: {whole}"
    if config.rollout.engine.router_url is not None:
        message = "a router does not know which engine has which adapter: leave it out, or"
        yield "rollout.engine.router_url", f"{message} {whole}"
    if config.rollout.on_update == "in_place" and config.rollout.engine.kind == "sglang":
        yield (
            "rollout.on_update",
            "got in_place, but a response keeps the adapter with which it began: use retract, which"
            " lets it end, or drain or abort",
        )


def adapter_notes(config: Config) -> Found:
    """Merged weights below fp32 lose most of what an adapter adds."""
    lora = config.policy.lora
    dtype = config.rollout.engine.dtype or config.model.dtype
    if lora is not None and lora.merged and dtype != "fp32" and generates(config):
        yield (
            "policy.lora.merged",
            f"engines get sums rounded to {dtype}: of an update of a thousandth of the weights"
            " they miss three quarters",
        )


def lengths(config: Config) -> Found:
    """The longest sample fits into a micro-batch, with the padding that the layout needs."""
    limit = config.policy.max_tokens_per_microbatch
    prompt = config.data.max_prompt_tokens
    response = 0 if config.learns_from_rows else config.rollout.sampling.max_new_tokens
    multiple = pack_multiple(config)
    needed = -(-((prompt or 1) + response) // multiple) * multiple
    if needed > limit:
        parts = [] if prompt is None else [f"data.max_prompt_tokens ({prompt})"]
        parts += [f"rollout.sampling.max_new_tokens ({response})"] if response else []
        padded = f", padded to a multiple of {multiple} by the layout" if multiple > 1 else ""
        message = f"got {limit}, less than one sample can have: {' + '.join(parts)}{padded}"
        yield "policy.max_tokens_per_microbatch", f"{message}; set it to {needed} or more"


def routing(config: Config) -> Found:
    """Routing replay has a source of routed experts."""
    sources = {"engine": "engine"} | ({"logprobs": "log-prob pass"} if config.is_sft else {})
    source = sources.get(config.policy.routing_replay)
    if source is not None and config.learns_from_rows:
        message = f"{config.kind_of_learning} has no {source} to replay: use 'none'"
        yield "policy.routing_replay", message


def ray_launcher(config: Config) -> Found:
    """No key decides what Ray decides: addresses, GPUs and their shares."""
    engine = config.rollout.engine
    ray = config.cluster.ray
    if config.cluster.launcher != "ray":
        return
    if ray.address is not None and "://" in ray.address:
        message = f"got {ray.address!r}, expected HOST:PORT of the cluster's head node"
        yield "cluster.ray.address", f"{message}: start `rlcore train` on one of its nodes"
    if engine.colocated and is_import_path(engine.kind):
        yield (
            "rollout.engine.colocated",
            "under Ray an engine of another package runs in the rollout service's process, which"
            " has no GPU: turn it off, or use another cluster.launcher",
        )
    if engine.gpus:
        yield "rollout.engine.gpus", f"got {engine.gpus}, but Ray chooses GPUs: leave it out"
    if not (ray.rank_gpus < 1 or ray.rank_gpus.is_integer()):
        yield "cluster.ray.rank_gpus", f"got {ray.rank_gpus:g}, {_SHARES}"
    if engine.device == "cpu" or engine.is_external or not generates(config):
        return
    width = engine.tensor_parallel
    nodes = config.cluster.nodes
    count = engine.count // nodes
    needed = count * width
    shared = not ray.engine_gpus.is_integer() and (ray.engine_gpus > 1 or width > 1)
    of_each = f" of each of {nodes} nodes" if nodes > 1 else ""
    if engine.colocated and needed > (there := math.ceil(gpus_per_node(config))) > 0:
        yield (
            "rollout.engine.count",
            f"{count} x rollout.engine.tensor_parallel {width} need {needed} GPUs{of_each}, but the"
            f" ranks, whose GPUs they share, have {there}: use fewer or smaller engines",
        )
    elif not engine.colocated and shared:
        message = f"got {ray.engine_gpus:g}, {_SHARES}, and an engine needs one GPU for each of its"
        yield "cluster.ray.engine_gpus", f"{message} {width} tensor-parallel ranks: set it to 1"


def ray_notes(config: Config) -> Found:
    """Yield `cluster.ray` where another launcher ignores it."""
    if config.cluster.launcher != "ray" and config.cluster.ray != RayConfig():
        yield "cluster.ray", f"is ignored: cluster.launcher is {config.cluster.launcher}"
