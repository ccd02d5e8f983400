"""The LM head alone, both passes, beside the matmuls that it needs and plain heads."""

from __future__ import annotations

import statistics

import torch
from one_gpu.section import Found, Setting
from workers.logprobs_case import HEADS, MATMULS, Machine, timed

TOKENS = 16384
HIDDEN = 1536
VOCABULARY = 151936


def head_alone(setting: Setting) -> Found:
    """Seconds and extra memory of each head, at the shape of the 1.5B model."""
    found = Found()
    tokens, hidden, vocabulary = (64, 32, 512) if setting.toy else (TOKENS, HIDDEN, VOCABULARY)
    dtype = torch.float32 if setting.toy else torch.bfloat16
    machine = Machine("cuda" if setting.cuda else "cpu")
    generator = torch.Generator().manual_seed(5)
    states = torch.randn(tokens, hidden, generator=generator)
    table = torch.randn(vocabulary, hidden, generator=generator) * 0.1
    states, table = (x.to(setting.device, dtype).requires_grad_() for x in (states, table))
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(setting.device)
    product = [
        timed(lambda: torch.mm(states.detach(), table.detach().t()), machine)[0] for _ in range(5)
    ]
    for name, head in HEADS.items():

        def both_passes(head=head) -> None:
            torch.autograd.grad(head(states, table, targets), (states, table))

        try:
            both_passes()
            extra = machine.extra_bytes(both_passes)
            seconds = statistics.median(timed(both_passes, machine)[0] for _ in range(5))
        except torch.OutOfMemoryError:
            found.numbers[f"{name} head"] = "out of memory"
            print(f"  {name} head: out of memory", flush=True)
            continue
        ideal = MATMULS[name] * statistics.median(product[2:])
        found.number(f"{name} head", seconds, "s", f"its matmuls alone {ideal:.4g} s")
        found.number(f"{name} head, extra memory", extra / 2**20, "MiB")
    return found
