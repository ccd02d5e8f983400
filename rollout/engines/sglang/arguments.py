"""Turns `rollout.engine` into the command line of an SGLang server.

SGLang's own parser checks names and values, in its process (entry.py). Arguments that rlcore sets
itself are refused when a configuration is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rlcore.config.checks.engine import argument_name
from rlcore.config.sections.rollout import EngineConfig

DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# A user's own `rollout.engine.server` overrides these.
DEFAULTS: dict[str, Any] = {"log_level_http": "warning"}  # else a line for every request
CPU_DEFAULTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "grammar_backend": "none",
    "sleep_on_idle": True,  # else the scheduler burns a core that the trainer could use
    "max_total_tokens": 32768,  # bounds the KV cache
    # After the start, a tenth of the memory that was free before it must still be free, even if
    # other programs took some meanwhile.
    "mem_fraction_static": 0.9,
    "max_running_requests": 64,
}


def command_line(
    config: EngineConfig,
    *,
    model_path: str,
    tokenizer: str | None,
    dtype: str,
    device: str,
    port: int,
    nccl_port: int,
    arguments: Mapping[str, Any],
) -> list[str]:
    """Make the arguments of `sglang.launch_server`.

    Args:
        dtype: fp32 | bf16.
        device: cuda | cpu.
        port, nccl_port: held for the server until it listens on them.
        arguments: more of sglang's own arguments, by name; they override `config.server`.
    """
    given = {argument_name(name): value for name, value in config.server.items()}
    values = DEFAULTS | (CPU_DEFAULTS if device == "cpu" else {}) | given | dict(arguments)
    values |= {
        "model_path": model_path,
        "tokenizer_path": tokenizer,
        "dtype": DTYPES[config.dtype or dtype],
        "tp_size": config.tensor_parallel,
        "device": device,
        "host": config.host,
        "port": port,
        "nccl_port": nccl_port,
    }
    return [word for name, value in values.items() for word in option(name, value)]


def option(name: str, value: Any) -> list[str]:
    """Write one argument as words of the command line.

    True is a flag, false its opposite (entry.py removes it where sglang has none), null nothing.
    """
    name = name.replace("_", "-")
    flag = f"--{name}"
    if value is None:
        return []
    if isinstance(value, bool):
        return [flag if value else f"--no-{name}"]
    if isinstance(value, list | tuple):
        return [flag, *(str(one) for one in value)]
    return [f"{flag}={json.dumps(value) if isinstance(value, dict) else value}"]
