"""Stubs of SGLang servers, which pass the checks of a run and take its publications at once.

    python benchmarks/workers/engine_stubs.py MODEL ADDRESS COUNT TENSOR_PARALLEL

They say that they are on GPUs, queue the calls of buckets, and serve the model in that folder. They
receive no weights. Their ports are printed on one line; they end when standard input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from null_server import ANSWERS, COMPLETION, DONE, SERVER_INFO, NullServer, answer

from rollout.engines.sglang.patches import HAS_TURNS

ALREADY_DEFAULT = "default"  # the version of a server that got no weights


class Server:
    """One server, of which every connection knows the version of the weights."""

    def __init__(self, model: Path, tensor_parallel: int) -> None:
        config = json.loads((model / "config.json").read_text())
        self.version = ALREADY_DEFAULT
        self.no_token = answer(
            {"error": {"message": f"valid range is [0, {config['vocab_size']})"}},
            b"400 Bad Request",
        )
        info = SERVER_INFO | {
            "device": "cuda",
            "tp_size": tensor_parallel,
            "dp_size": 1,
            "pp_size": 1,
            "internal_states": [{HAS_TURNS: True}],
        }
        model_info = {name: config[name] for name in ("model_type", "architectures")}
        self.answers = ANSWERS | {b"/server_info": answer(info), b"/model_info": answer(model_info)}

    def reply(self, route: bytes, body: bytes) -> bytes:
        if route == b"/update_weight_version":
            self.version = json.loads(body)["new_version"]
        if route == b"/generate":
            return self.generate(json.loads(body))
        return self.answers.get(route, DONE)

    def generate(self, request: dict[str, Any]) -> bytes:
        if "token_ids_logprob" in request:
            return self.no_token
        [one] = COMPLETION
        spans = [{"version": self.version, "start": 0, "end": len(one["output_ids"])}]  # type: ignore[arg-type]
        meta = one["meta_info"] | {"weight_versions": spans}  # type: ignore[operator]
        return answer([one | {"meta_info": meta}] * len(request["input_ids"]))


class Connection(NullServer):
    def __init__(self, server: Server) -> None:
        super().__init__()
        self.reply = server.reply  # type: ignore[method-assign]


async def serve(model: Path, address: str, count: int, tensor_parallel: int) -> None:
    loop = asyncio.get_running_loop()
    listeners = []
    for _ in range(count):
        server = Server(model, tensor_parallel)
        listeners.append(
            await loop.create_server(lambda one=server: Connection(one), address, 0)  # type: ignore[misc]
        )
    print(*(one.sockets[0].getsockname()[1] for one in listeners), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])))
