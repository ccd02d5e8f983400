"""A stand-in for an SGLang server that answers at once, always with the same completion.

It parses only lengths, so that measurements show the client. `python
benchmarks/workers/null_server.py` prints its port on a line of its own, and ends when its standard
input ends.
"""

from __future__ import annotations

import asyncio
import json
import sys

RESPONSE_TOKENS = 8
VERSION = "1"

COMPLETION = [
    {
        "text": "12345678",
        "output_ids": list(range(1, RESPONSE_TOKENS + 1)),
        "meta_info": {
            "id": "0-0-0-0",
            "finish_reason": {"type": "length", "length": RESPONSE_TOKENS},
            "prompt_tokens": 48,
            "weight_version": VERSION,
            "num_retractions": 0,
            "completion_tokens": RESPONSE_TOKENS,
            "cached_tokens": 0,
            "weight_versions": [{"version": VERSION, "start": 0, "end": RESPONSE_TOKENS}],
            "e2e_latency": 0.01,
            "output_token_logprobs": [
                [-0.123456789012345, token, None] for token in range(1, RESPONSE_TOKENS + 1)
            ],
        },
    }
]
SERVER_INFO = {
    "version": "0.5.23",
    "model_path": "null",
    "max_req_input_len": 4000,
    "sampling_mask_max_tokens": 4096,
    "enable_return_routed_experts": False,
    "device": "cpu",
    "dtype": "float32",
    "tp_size": 1,
}


def answer(value: object, status: bytes = b"200 OK") -> bytes:
    body = json.dumps(value, separators=(",", ":")).encode()
    head = b"HTTP/1.1 %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % (status, len(body)) + body


ANSWERS = {
    b"/generate": answer(COMPLETION),
    b"/server_info": answer(SERVER_INFO),
    b"/model_info": answer(SERVER_INFO),
}
DONE = answer({"success": True, "message": ""})  # what control routes say


class NullServer(asyncio.Protocol):
    """One connection. Requests may come in pieces; there is one at a time."""

    transport: asyncio.Transport

    def __init__(self) -> None:
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self._got += data
        head, found, body = self._got.partition(b"\r\n\r\n")
        if not found:
            return
        _, declared, rest = head.lower().partition(b"content-length: ")
        if declared and len(body) < int(rest.partition(b"\r\n")[0]):
            return
        self._got = b""
        self.transport.write(self.reply(head.split(b" ", 2)[1], body))

    def reply(self, route: bytes, body: bytes) -> bytes:
        return ANSWERS.get(route, DONE)


async def serve() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(NullServer, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


if __name__ == "__main__":
    asyncio.run(serve())
