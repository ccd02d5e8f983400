"""Checks of the layout of ranks.

Imports neither torch nor Megatron, so that `rlcore plan` and login nodes can use it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.megatron.convert.architecture import Architecture
from rlcore.config.sections.policy import ParallelConfig
from rlcore.errors import ConfigError, ModelError, RunFailed


def check_layout(arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a layout that does not fit the model or the number of processes.

    Raises ConfigError naming the key, the reason and a remedy. Uses neither torch.distributed nor
    Megatron.
    """
    tp = parallel.tensor
    pp = parallel.pipeline
    replica = tp * pp * parallel.context
    if world_size % replica:
        raise ConfigError(
            f"policy.parallel: tensor {tp} x pipeline {pp} x context {parallel.context} = {replica}"
            f" does not divide the world size {world_size}; start a multiple of {replica}"
            f" processes, or lay it out over a divisor of {world_size}"
        )
    model = arch.transformer
    heads = model["num_attention_heads"]
    sizes = [("attention heads", heads), ("feed-forward width", model["ffn_hidden_size"])]
    # Tensor parallelism also splits the projections to the low-rank forms.
    if arch.latent_attention:
        low_rank = model["kv_lora_rank"] + model["qk_pos_emb_head_dim"]
        sizes.append(("kv_lora_rank + qk_rope_head_dim", low_rank))
        sizes.append(("q_lora_rank", model["q_lora_rank"] or heads))
    if any(arch.recurrent_layers):
        assert arch.table.recurrence is not None
        what = arch.table.recurrence.divided
        _check_key_heads(what, model["linear_num_key_heads"], parallel)
        sizes.append((what, model["linear_num_key_heads"]))
    for what, size in sizes:
        if size % tp:
            nearest = _nearest_tensor(arch, tp, sizes)
            raise ConfigError(
                f"policy.parallel.tensor: {tp} does not divide the model's {what} ({size}); set it"
                f" to {nearest}"
            )
    if not _fits_kv_heads(arch, tp):
        if arch.full_heads is not None:
            raise ConfigError(
                f"policy.parallel.tensor: {tp} does not divide the model's"
                f" {model['num_query_groups']} KV heads of layers with a window and"
                f" {arch.full_heads[0]} of the others; set it to {_nearest_tensor(arch, tp, sizes)}"
            )
        groups = model["num_query_groups"]
        head_dim = model["kv_channels"]
        raise ConfigError(
            f"policy.parallel.tensor: {tp} does not fit the model's {groups} KV heads of size"
            f" {head_dim}: expected a divisor of {groups}, or a multiple of it that divides"
            f" {groups * head_dim}, the rows of all KV heads; set it to"
            f" {_nearest_tensor(arch, tp, sizes)}"
        )
    layers_of_stages(model["num_layers"], parallel)
    _check_experts(arch, parallel, world_size)


def _check_key_heads(what: str, heads: int, parallel: ParallelConfig) -> None:
    """Refuse ranks that would have no equal shares of a recurrent layer's key heads."""
    tp = parallel.tensor
    cp = parallel.context
    if heads % tp == 0 and heads % (tp * cp):
        raise ConfigError(
            f"policy.parallel: tensor {tp} x context {cp} = {tp * cp} does not divide the"
            f" model's {heads} {what}, which context-parallel ranks share; set context to"
            f" {_nearest_divisor(cp, heads // tp)}"
        )


def _fits_kv_heads(arch: Architecture, tp: int) -> bool:
    """Whether all ranks hold the same number of whole KV heads, or equal parts of one.

    A norm over all heads has whole heads, and so have layers of which some have others.
    """
    if arch.full_heads is not None:
        return arch.full_heads[0] % tp == 0 and arch.transformer["num_query_groups"] % tp == 0
    groups: int = arch.transformer["num_query_groups"]
    rows: int = groups * arch.transformer["kv_channels"]
    divides = tp % groups == 0 and rows % tp == 0
    return groups % tp == 0 or (divides and not arch.table.norm_over_heads)


def _nearest_tensor(arch: Architecture, tp: int, sizes: Sequence[tuple[str, int]]) -> int:
    """The largest tensor-parallel size up to `tp` that fits the model."""
    fitting = (n for n in range(tp, 0, -1) if _fits_kv_heads(arch, n))
    return next(n for n in fitting if not any(size % n for _, size in sizes))


def layers_of_stages(layers: int, parallel: ParallelConfig) -> list[int]:
    """The number of layers of each pipeline stage, over all its model chunks.

    Raises ConfigError naming the keys and the nearest split that fits, if the layers do not divide.
    """
    pp = parallel.pipeline
    vpp = parallel.virtual_pipeline
    first = parallel.first_stage_layers
    last = parallel.last_stage_layers
    middle = pp - (first is not None) - (last is not None)
    rest = layers - (first or 0) - (last or 0)
    if rest < middle or (rest > 0 and not middle) or (middle and rest % middle):
        left = (
            f"{rest} are left for {middle} stages" if rest >= 0 else f"{-rest} too many are given"
        )
        ends = (("first_stage_layers", first), ("last_stage_layers", last))
        given = "".join(f", {key} {size}" for key, size in ends if size is not None)
        raise ConfigError(
            f"policy.parallel: pipeline {pp}{given} does not divide the model's"
            f" {layers} layers: {left}; {_advice(layers, pp)}"
        )
    each = rest // middle if middle else 0
    stages = [*([first] if first else []), *[each] * middle, *([last] if last else [])]
    if any(n % vpp for n in stages):
        raise ConfigError(
            f"policy.parallel: virtual_pipeline {vpp} does not divide the layers of every stage,"
            f" {stages} of {layers} layers; set it to 1, or first_stage_layers and"
            " last_stage_layers so that it does"
        )
    return stages


def _advice(layers: int, pp: int) -> str:
    if pp > layers:
        return f"choose at most {layers} stages"
    if layers % pp == 0:
        return f"leave first_stage_layers and last_stage_layers out for {layers // pp} in each"
    each = -(-layers // pp)
    short = layers - each * (pp - 1)
    if short > 0:
        return (
            f"set last_stage_layers={short} alone for {pp - 1} stages of {each} and a short"
            " last one"
        )
    each = layers // pp
    return (
        f"set last_stage_layers={layers - each * (pp - 1)} alone for {pp - 1} stages of {each} and"
        " a long last one"
    )


def check_others(
    others: Mapping[str, Architecture], parallel: ParallelConfig, world_size: int
) -> None:
    """Call `check_layout` for the other models; `others` maps keys of folders to models."""
    for key, arch in others.items():
        try:
            check_layout(arch, parallel, world_size)
        except ConfigError as error:
            raise ConfigError(
                f"{key}: {arch.folder} does not fit the policy's layout: {error}"
            ) from error


def check_vocabularies(others: Mapping[str, Architecture], policy: Architecture) -> None:
    """Raise ModelError naming the key of a model with another vocabulary than the policy's."""
    for key, arch in others.items():
        if arch.vocab_size != policy.vocab_size:
            raise ModelError(
                f"{key}: {arch.folder} has a vocabulary of {arch.vocab_size}, the policy"
                f" {policy.folder} has {policy.vocab_size}; they must share one tokenizer"
            )


def _check_experts(arch: Architecture, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse a layout of experts that does not fit or would give wrong gradients."""
    tp = parallel.tensor
    pp = parallel.pipeline
    ep = parallel.expert
    etp = tp if parallel.expert_tensor is None else parallel.expert_tensor
    if not arch.num_experts:
        if ep > 1 or etp != tp:
            key = "expert" if ep > 1 else "expert_tensor"
            raise ConfigError(
                f"policy.parallel.{key}: the {arch.family} model has no experts to lay out; leave"
                " it out"
            )
        return
    if tp > 1 and not parallel.sequence:
        raise ConfigError(
            f"policy.parallel.sequence: false, but experts under tensor {tp} need sequence"
            " parallelism: otherwise every tensor-parallel rank would send all tokens to them; set"
            " it to true"
        )
    _check_sizes(arch, tp, etp, ep)
    if ep == 1 and etp != tp:
        raise ConfigError(
            f"policy.parallel: tensor {tp}, expert_tensor {etp}, expert 1: megatron-core sums the"
            " gradients of experts over the data-parallel ranks of the dense weights, which misses"
            " the copies that the tensor-parallel ranks hold; leave expert_tensor"
            f" out{'' if arch.num_experts % (tp // etp) else f', or set expert={tp // etp}'}"
        )
    if etp > 1 and arch.transformer["add_bias_linear"]:
        raise ConfigError(
            f"policy.parallel.expert_tensor: {etp}, but the experts of {arch.family} have biases,"
            f" which each of their tensor-parallel ranks would add; set it to 1, with expert={tp}"
        )
    if world_size % (etp * ep * pp):
        smaller = _nearest_divisor(ep, arch.num_experts, world_size // (etp * pp))
        raise ConfigError(
            f"policy.parallel: expert_tensor {etp} x expert {ep} x pipeline {pp} = {etp * ep * pp}"
            f" does not divide the world size {world_size}; start a multiple of it, or set"
            f" expert={smaller}"
        )


def _check_sizes(arch: Architecture, tp: int, etp: int, ep: int) -> None:
    if tp % etp:
        raise ConfigError(
            f"policy.parallel.expert_tensor: {etp} does not divide tensor ({tp}); leave it out, or"
            f" set it to {_nearest_divisor(etp, tp)}"
        )
    if arch.num_experts % ep:
        raise ConfigError(
            f"policy.parallel.expert: {ep} does not divide the model's experts"
            f" ({arch.num_experts}); set it to {_nearest_divisor(ep, arch.num_experts)}"
        )
    for key, size, field in (
        ("expert_tensor", etp, "moe_ffn_hidden_size"),
        ("tensor", tp, "moe_shared_expert_intermediate_size"),
    ):
        width = arch.transformer.get(field)
        if width and width % size:
            raise ConfigError(
                f"policy.parallel.{key}: {size} does not divide an expert's width ({width}); set it"
                f" to {_nearest_divisor(size, width, tp)}"
            )


def _nearest_divisor(wanted: int, *sizes: int) -> int:
    """The largest number up to `wanted` that divides all of `sizes`."""
    return next(n for n in range(wanted, 0, -1) if not any(size % n for size in sizes))


def check_lengths(lengths: Sequence[int], arch: Architecture) -> None:
    """Raise RunFailed for a sequence that is longer than `arch.max_tokens`."""
    longest = max(lengths, default=0)
    if arch.max_tokens is not None and longest > arch.max_tokens:
        raise RunFailed(
            f"a sequence has {longest} tokens, more than index_topk of {arch.family}"
            f" ({arch.max_tokens}): only up to there its sparse attention is dense, which is what"
            " is computed here; set data.max_prompt_tokens and rollout.sampling.max_new_tokens"
        )
