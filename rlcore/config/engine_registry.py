"""The kinds of engines: facts that configuration and launchers need without importing an engine.

An engine of this repository is a folder under `rollout/engines/` and a row of `KINDS`. An engine
class of another package, named by its import path, has the same facts in its attribute `kind`.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

RECORDS = ("sampling_mask", "routed_experts")
# An SGLang server's longest prompt is this many tokens shorter than its longest sequence.
SGLANG_ANSWER_RESERVE = 4


@dataclass(frozen=True)
class EngineKind:
    """The facts about a kind of engine; the defaults suit an engine of another package.

    Transports are an attribute of each engine, since engines of one kind differ in them.

    Attributes:
        factory: import path of its `rollout.engines.factories.EngineFactory`; "" where the class
            that has these facts is the factory.
        title: its name in messages.
        own_keys: the keys of `rollout.engine` that this kind reads and other kinds may not. If
            "urls" is among them, the kind supports external engines.
        not_read: the error about such a key in a configuration of another kind.
        standalone: `rlcore engine` starts engines of this kind without a trainer.
        batches: the engine decodes one call at a time, so a step's requests go out as few calls.
        repeatable: the address of a token fixes its random number.
        masks_need_top_k: it reports a sampling mask only where `top_k` bounds it.
        records: what it can report with a completion: "sampling_mask", "routed_experts".
        stop_strings: it ends responses at `rollout.sampling.stop`.
        colocated: it can release its memory, for `rollout.engine.colocated`.
        shares_gpu: it takes no more of a GPU's memory than it needs, so several share one.
        context_reserve: tokens of the model's context that a prompt and its response must leave
            free; None: the engine itself says how long they may be.
        answer_reserve: tokens of its longest sequence that no prompt may take.
        sets_cumem: it sets NCCL_CUMEM_ENABLE, and the trainer must use the same value.
    """

    factory: str = ""
    title: str = "this engine"
    own_keys: tuple[str, ...] = ("server",)
    not_read: str = ""
    standalone: bool = False
    batches: bool = False
    repeatable: bool = False
    masks_need_top_k: bool = False
    records: tuple[str, ...] = ()
    stop_strings: bool = False
    colocated: bool = False
    shares_gpu: bool = False
    context_reserve: int | None = None
    answer_reserve: int = 0
    sets_cumem: bool = False


KINDS = {
    "embedded": EngineKind(
        factory="rollout.engines.embedded.factory:EmbeddedFactory",
        title="the embedded engine",
        own_keys=("max_batch", "environment"),
        not_read="only the embedded engine reads it: leave it out",
        batches=True,
        repeatable=True,
        records=RECORDS,
        stop_strings=True,
        colocated=True,
        shares_gpu=True,
        context_reserve=0,
    ),
    "sglang": EngineKind(
        factory="rollout.engines.sglang.factory:SGLangFactory",
        title="SGLang",
        own_keys=(
            *("python", "urls", "urls_file", "tensor_parallel", "gpus", "host", "server"),
            *("router_url", "transport", "weights_dir", "max_in_flight", "environment"),
        ),
        not_read="only SGLang engines read it: set rollout.engine.kind=sglang, or leave it out",
        standalone=True,
        masks_need_top_k=True,
        records=RECORDS,
        stop_strings=True,
        colocated=True,
        # SGLang reserves two tokens of its context_length.
        context_reserve=2,
        answer_reserve=SGLANG_ANSWER_RESERVE,
        sets_cumem=True,
    ),
}


def is_import_path(name: str) -> bool:
    """Whether `rollout.engine.kind` names the class of another package."""
    return ":" in name


def check_name(name: str) -> str:
    """Return `name`. Raises ValueError unless it is a known kind or an import path."""
    if name in KINDS or is_import_path(name):
        return name
    near = difflib.get_close_matches(name, KINDS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    known = " or ".join(map(repr, KINDS))
    raise ValueError(f"one of {known}, or the import path 'package.module:Class'{hint}")
