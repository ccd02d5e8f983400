"""Prefixes that are computed once, on the device: attention against the CPU, and a model's step."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import prefixes
import torch
from one_gpu.checks import relative
from one_gpu.models import SHAPES, make_config, write_model
from one_gpu.section import Found, Setting, seconds_of
from one_gpu.step import Trainer, set_environment, trainer

from rlcore.data.packing.sharing import share_prefixes

if TYPE_CHECKING:
    from backends.megatron.batch.cp_layout import PackLayout

MODEL = "0.5B"
GROUPS = prefixes.Setting("P 1024 R 256 n 16", 4, 16, 1024, (256, 256))
TOY_GROUPS = prefixes.Setting("P 24 R 8 n 4", 2, 4, 24, (8, 8), pack=128)
# From how many copies of keys for each token of the pack on the attention is merged.
FORMS = {"gathered": float("inf"), "merged": 0.0}


def check_sharing(setting: Setting) -> Found:
    """Check attention with shared prefixes; measure updates and scores with and without them."""
    found = Found()
    _check_attention(setting, found)
    _measure(setting, found)
    return found


def _check_attention(setting: Setting, found: Found) -> None:
    """Both forms in bf16 and the copying one in fp32, against fp32 on the CPU."""
    small = prefixes.Setting("attention", 3, 8, 300, (20, 60), tree=0)
    batch = prefixes.make_batch(small, vocab=1000)
    sharing = share_prefixes(batch.tokens, batch.lengths, multiple=1)
    generator = torch.Generator().manual_seed(6)
    tensors = [
        torch.randn(sharing.size, heads, 64, generator=generator).bfloat16()
        for heads in (12, 2, 2, 12)
    ]

    def results(form: str, device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        from backends.megatron.cpu.shim import importing_megatron

        with importing_megatron():
            from backends.megatron.batch.pack import lay_out
            from backends.megatron.model.attention import core
            from backends.megatron.parallel.state import ALONE

        where = torch.device(device)
        layout, _ = lay_out(sharing, batch.lengths, sharing.size, where, ALONE)
        assert layout.prefixes is not None
        varlen = core.uses_varlen(where, dtype)
        attend: Callable[..., torch.Tensor]
        if form == "merged":
            attend = _merged(varlen=varlen)
        else:
            attend = core.varlen_attention if varlen else core.bucketed_attention
        *inputs, weight = (x.to(where, dtype) for x in tensors)
        inputs = [x.requires_grad_() for x in inputs]
        out = attend(*inputs, layout, 64**-0.5)
        return [out, *torch.autograd.grad((out * weight.view_as(out)).sum(), inputs)]

    expected = results("gathered", "cpu", torch.float32)
    ways = [("gathered", torch.float32, 1e-4), ("gathered", torch.bfloat16, 0.02)]
    ways.append(("merged", torch.bfloat16, 0.02))
    for form, dtype, bound in ways:
        got = results(form, setting.device, dtype)
        label = "bf16" if dtype is torch.bfloat16 else "fp32"
        for name, one, other in zip(("output", "dQ", "dK", "dV"), got, expected):
            found.check(f"shared prefixes {form} {label}: {name}", relative(one, other), bound)


def _merged(*, varlen: bool) -> Callable[..., torch.Tensor]:
    from backends.megatron.model.attention.merged import merged_attention

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: PackLayout, scale: float
    ) -> torch.Tensor:
        return merged_attention(q, k, v, layout, scale, varlen=varlen)

    return attend


def _measure(setting: Setting, found: Found) -> None:
    groups = TOY_GROUPS if setting.toy else GROUPS
    shape = SHAPES["toy" if setting.toy else MODEL]
    folder = setting.work / "model"
    batch = prefixes.make_batch(groups, shape.vocab)
    config = make_config(
        folder,
        dtype=setting.size.dtype,
        micro_tokens=groups.pack,
        optimizer={"lr": 1e-30, "weight_decay": 0.0, "distributed": True},
        offload=False,
    )
    set_environment(config, setting.device)
    write_model(folder, shape, setting.size.torch_dtype, device=setting.device)
    with trainer(config, batch, setting.device) as made:
        off = _side(made, "off", "off", setting, found)
        for form in FORMS:
            side = _side(made, form, "on", setting, found)
            for what in ("update", "score"):
                ratio = off[what] / side[what]
                limit = f"the ratio of tokens is {off['slots'] / side['slots']:.2f}"
                found.number(f"{form}: {what}, times as fast", ratio, "", limit)
            gap = float((side["logprobs"] - off["logprobs"]).abs().mean())
            found.check(f"{form}: mean change of log-probs", gap, 0.02)
            norm = abs(side["norm"] / off["norm"] - 1)
            found.check(f"{form}: change of the gradient norm", norm, 0.02)


def _side(made: Trainer, name: str, share: str, setting: Setting, found: Found) -> dict[str, Any]:
    """Seconds, log-probs and gradient norm of one way."""
    from backends.megatron.model.attention import core

    core.MERGED_FROM_VARLEN = core.MERGED_FROM = FORMS.get(name, float("inf"))
    config = made.config
    policy = config.policy.model_copy(update={"share_prefixes": share})
    made.reload(config.model_copy(update={"policy": policy}))
    made.assign()
    norm = made.update().metrics["train/grad_norm"]
    rounds = setting.size.rounds
    side: dict[str, Any] = {
        "norm": norm,
        "logprobs": made.score()["logprobs"],
        "slots": made.slots,
        "update": seconds_of(made.update, rounds, cuda=setting.cuda),
        "score": seconds_of(made.score, rounds, cuda=setting.cuda),
    }
    found.number(f"{name}: update", side["update"], "s", f"{side['slots']} slots")
    found.number(f"{name}: score", side["score"], "s")
    return side
