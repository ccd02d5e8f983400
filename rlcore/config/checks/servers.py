"""Checks of the SGLang servers that a run starts. Pure, as all checks.

`OURS` lists the arguments that rlcore sets itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from rlcore.config.messages import Problem
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.root import Config

ANY_ADDRESS = ("", "0.0.0.0", "::")

_WEIGHTS = (
    "weights are published to the ranks of one server, all of which hold parts of every layer"
)
_PARTS = (
    "set rollout.engine.tensor_parallel: each rank of a server is taken to hold its own part of"
    " every layer, and no copies"
)
_HTTP = "engines are asked and controlled over HTTP, which a server of SMG's gRPC does not speak"
_ELSEWHERE = "an engine over several machines is started by hand, and given by rollout.engine.urls"
_PLAIN = (
    "engines speak plain HTTP on rollout.engine.host; put a proxy with TLS in front, and give"
    " rollout.engine.urls"
)
OURS: dict[str, str] = {  # arguments of sglang.launch_server -> what to do instead
    "model_path": "set model.path",
    "model": "set model.path",
    "tokenizer_path": "set model.tokenizer",
    "dtype": "set rollout.engine.dtype",
    "tp_size": "set rollout.engine.tensor_parallel",
    "tensor_parallel_size": "set rollout.engine.tensor_parallel",
    "device": "set rollout.engine.device",
    "base_gpu_id": "set rollout.engine.gpus",
    "gpu_id_step": "set rollout.engine.gpus",
    "host": "set rollout.engine.host",
    "port": "free ports are chosen when the engine starts",
    "nccl_port": "free ports are chosen when the engine starts",
    "api_key": "set RLCORE_ENGINE_API_KEY in the environment",
    "admin_api_key": "set RLCORE_ENGINE_ADMIN_KEY in the environment",
    "config": "write its arguments here",
    "dp_size": f"set rollout.engine.count: {_WEIGHTS}",
    "data_parallel_size": f"set rollout.engine.count: {_WEIGHTS}",
    "pp_size": f"set rollout.engine.tensor_parallel: {_WEIGHTS}",
    "pipeline_parallel_size": f"set rollout.engine.tensor_parallel: {_WEIGHTS}",
    "attn_dp_size": _PARTS,
    "attention_data_parallel_size": _PARTS,
    "attn_cp_size": _PARTS,
    "attention_context_parallel_size": _PARTS,
    "dcp_size": _PARTS,
    "decode_context_parallel_size": _PARTS,
    "moe_dp_size": _PARTS,
    "moe_data_parallel_size": _PARTS,
    "dwdp_size": _PARTS,
    "grpc_mode": _HTTP,
    "smg_grpc_mode": _HTTP,
    "nnodes": _ELSEWHERE,
    "node_rank": _ELSEWHERE,
    "dist_init_addr": _ELSEWHERE,
    "nccl_init_addr": _ELSEWHERE,
    "tokenizer_worker_num": "sglang asks for its keys only where it has one tokenizer",
    "ssl_keyfile": _PLAIN,
    "ssl_certfile": _PLAIN,
    "ssl_keyfile_password": _PLAIN,
    "weight_version": "it counts the publications of the run",
}


def managed_servers(config: Config) -> Iterator[Problem]:
    """Servers that the run starts have an address and a device of this machine, and no argument
    that is rlcore's to set.
    """
    engine = config.rollout.engine
    if engine.kind == "sglang" and not engine.urls:
        yield from cannot_start(engine)


def cannot_start(engine: EngineConfig) -> Iterator[Problem]:
    """Yield arguments, hosts and devices that no server can be started with."""
    for name in engine.server:
        if (instead := OURS.get(argument_name(name))) is not None:
            yield Problem(f"rollout.engine.server.{name}", f"not to be given here: {instead}")
    if engine.host in ANY_ADDRESS:
        message = (
            f"{engine.host!r} is every address of this machine; give one that others can reach"
            " it at"
        )
        yield Problem("rollout.engine.host", message)
    if engine.device not in (None, "cuda", "cpu"):
        message = (
            f"got {engine.device!r}, expected 'cuda' or 'cpu'; rollout.engine.gpus chooses among"
            " GPUs"
        )
        yield Problem("rollout.engine.device", message)


def argument_name(given: str) -> str:
    """Return SGLang's name of an argument, spelled `tp_size`, `tp-size` or `--tp-size`."""
    return given.lstrip("-").replace("-", "_")
