"""Makes one measurement of `logprobs.py`, in its own process, and prints it as JSON.

Extra peak memory on a CPU is how far the resident set rises above where it stood before the first
pass (VmHWM, which /proc/self/clear_refs resets): unlike a tally of tensors it holds the scratch
memory of the matmul libraries too. On CUDA it is `max_memory_allocated`. Gradients of hidden states
and weight count, since every head must make them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

sys.path.insert(0, str(Path(__file__).parents[2]))
from backends.megatron.model.head import fused_logprobs

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# (hidden, weight, tokens) -> a scalar to go backward from
Head = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Measured:
    seconds: float  # median of a forward and a backward pass
    cpu_seconds: float  # the same by the process's CPU clock, over all threads
    # of the matmuls that the head needs, at the rate of one large one; CPU seconds on a CPU
    matmul_seconds: float
    extra_bytes: int  # peak of the first pass above what stood before it


class _Alone(ProcessGroup):
    """The group of one tensor-parallel rank."""

    def __init__(self) -> None:
        super().__init__(0, 1)


def ours(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    logprobs, entropy = fused_logprobs(
        hidden, weight, tokens, vocab_size=weight.size(0), tp=_Alone()
    )
    assert entropy is not None
    return _objective(logprobs, entropy)


def log_softmax(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    log_p = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    return _objective(log_p.gather(1, tokens[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1))


def cross_entropy(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), tokens)


def _objective(logprobs: Tensor, entropy: Tensor) -> Tensor:
    """Rows with weights of their own, as advantages are."""
    weights = torch.linspace(-1, 1, len(logprobs), device=logprobs.device)
    return (weights * logprobs).sum() - 0.01 * entropy.sum()


HEADS: dict[str, Head] = {"ours": ours, "log_softmax": log_softmax, "cross_entropy": cross_entropy}
MATMULS = {"ours": 4, "log_softmax": 3, "cross_entropy": 3}  # ours computes the logits twice


class Machine:
    """Clocks and memory of one device."""

    def __init__(self, device: str) -> None:
        self.cuda = device == "cuda"

    def seconds(self) -> tuple[float, float]:
        """(wall clock, this process's CPU clock), with the device's work done."""
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()

    def extra_bytes(self, work: Callable[[], object]) -> int:
        """Measure how far memory rises during `work`."""
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        before = _status_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        work()
        return _status_bytes("VmHWM") - before


def _status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: this measurement needs Linux")


def measure(head: str, arguments: argparse.Namespace) -> Measured:
    machine = Machine(arguments.device)
    dtype = DTYPES[arguments.dtype]
    torch.manual_seed(0)
    hidden, weight, tokens = _inputs(arguments.tokens, arguments.vocabulary, arguments, dtype)

    def one_pass(hidden: Tensor = hidden, weight: Tensor = weight, tokens: Tensor = tokens) -> None:
        torch.autograd.grad(HEADS[head](hidden, weight, tokens), (hidden, weight))

    # threads and libraries are loaded, and not counted
    one_pass(*_inputs(16, 64, arguments, dtype))
    extra = machine.extra_bytes(one_pass)
    passes = [timed(one_pass, machine) for _ in range(arguments.repeats)]
    product = torch.empty(1024, 4096, dtype=dtype, device=arguments.device)
    rows = hidden.detach()[:1024]
    columns = weight.detach()[:4096]
    rate = [
        timed(lambda: torch.mm(rows, columns.t(), out=product), machine)
        for _ in range(2 + arguments.repeats)
    ][2:]
    wall, cpu = (statistics.median(one[i] for one in passes) for i in (0, 1))
    tile = statistics.median(one[0 if machine.cuda else 1] for one in rate)
    share = arguments.tokens * arguments.vocabulary / (len(rows) * len(columns))
    return Measured(wall, cpu, MATMULS[head] * share * tile, extra)


def _inputs(
    tokens: int, vocabulary: int, arguments: argparse.Namespace, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    hidden = (
        torch.randn(tokens, arguments.hidden, device=arguments.device).to(dtype).requires_grad_()
    )
    weight = (
        (torch.randn(vocabulary, arguments.hidden, device=arguments.device) * 0.1)
        .to(dtype)
        .requires_grad_()
    )
    return hidden, weight, torch.randint(vocabulary, (tokens,), device=arguments.device)


def timed(work: Callable[[], object], machine: Machine) -> tuple[float, float]:
    wall, cpu = machine.seconds()
    work()
    wall_after, cpu_after = machine.seconds()
    return wall_after - wall, cpu_after - cpu


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("head", choices=HEADS)
    parser.add_argument("dtype", choices=DTYPES)
    for name in ("threads", "tokens", "hidden", "vocabulary", "repeats"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(json.dumps(asdict(measure(arguments.head, arguments))))


if __name__ == "__main__":
    main()
