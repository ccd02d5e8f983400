"""Starts stock SGLang: `PYTHON entry.py <arguments of sglang.launch_server>`, with JSON on stdin.

The script is run by path in the engine's environment, which lacks rlcore, so it imports only files
of its own folder. The JSON may have `api_key`, `admin_key`, `ready_fd` and `parent_pid`. When the
server answers, one line of JSON is written to `ready_fd`: {"port": ...}, or {"error": ...} if an
argument is wrong.

Processes that SGLang spawns import this file again, as `__mp_main__`: its top-level statements run
there too.
"""

from __future__ import annotations

import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    # The script's own folder is on the path, where a file could shadow a module of the same name.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != HERE]

import argparse  # noqa: E402
import ctypes  # noqa: E402
import difflib  # noqa: E402
import importlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import ssl  # noqa: E402
import tempfile  # noqa: E402
import time  # noqa: E402
import urllib.error  # noqa: E402
import urllib.parse  # noqa: E402
import urllib.request  # noqa: E402
from collections.abc import Callable, Collection, Iterator  # noqa: E402
from datetime import timedelta  # noqa: E402
from typing import Any, NoReturn  # noqa: E402

VERSION = "0.5.23"
PR_SET_PDEATHSIG = 1
EXIT_BAD_ARGUMENT = 2
POLL_S = 0.1
RENDEZVOUS = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"
RENDEZVOUS_SCHEME = (
    "rlcore"  # scheme of RENDEZVOUS for ranks on several machines: rlcore://host:port
)


def die_with_parent(is_there: Callable[[], bool]) -> None:
    """Have the kernel end this process with its parent.

    Args:
        is_there: whether the parent is still running, asked after the request to the kernel.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if not is_there():
        print("the process that started this one is gone", file=sys.stderr, flush=True)
        os._exit(1)


def install_stubs() -> None:
    """Install stubs, in this process, for modules that do not exist for the CPU."""
    folder = os.path.join(HERE, "cpu")
    if folder not in sys.path:
        # At the end of the path, so that a real package is preferred.
        sys.path.append(folder)
    importlib.import_module("stubs").install()


def without_idle(arguments: list[str], known: Collection[str]) -> list[str]:
    """Drop `--no-x` if SGLang knows only `--x`, which is off by default.

    Switches that are on by default have both.
    """
    return [
        word
        for word in arguments
        if word in known or not (word.startswith("--no-") and f"--{word[5:]}" in known)
    ]


class BadArgument(Exception):
    """An argument that SGLang does not know or take."""


class Parser(argparse.ArgumentParser):
    """SGLang's arguments, with their errors as exceptions, and no abbreviations."""

    def __init__(self) -> None:
        from sglang.srt.server_args import ServerArgs

        super().__init__(prog="sglang", allow_abbrev=False, add_help=False)
        ServerArgs.add_cli_args(self)

    def error(self, message: str) -> NoReturn:
        raise BadArgument(message)

    def check(self, arguments: list[str]) -> list[str]:
        """Return the arguments to start with. Raises BadArgument, with the nearest known name."""
        arguments = without_idle(arguments, self._option_string_actions)
        _, unknown = self.parse_known_args(arguments)
        for name in (
            argument.partition("=")[0] for argument in unknown if argument.startswith("--")
        ):
            # False was written as --no-x.
            name = f"--{name.removeprefix('--no-').removeprefix('--')}"
            near = difflib.get_close_matches(name, self._option_string_actions, n=1)
            hint = f"; did you mean {near[0][2:].replace('-', '_')}?" if near else ""
            raise BadArgument(
                f"sglang {VERSION} has no argument {name[2:].replace('-', '_')}{hint}"
            )
        if unknown:
            raise BadArgument(f"sglang {VERSION} does not understand {' '.join(unknown)}")
        return arguments


def serve(arguments: list[str], settings: dict[str, Any]) -> None:
    """Run the server until SIGINT or SIGTERM."""
    from sglang.srt.entrypoints import engine
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.runtime_context import get_context
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(arguments)

    def init_with_keys(*of: Any) -> Any:
        # Not in the arguments: SGLang logs them, and shows them to every holder of the API key.
        get_context().override(
            "rlcore", api_key=settings.get("api_key"), admin_api_key=settings.get("admin_key")
        )
        return engine.init_tokenizer_manager(*of)

    if args.device == "cpu":
        importlib.import_module("stubs").install_mamba_cache()
    args.resolve_once()
    if in_turn(args):
        load_beside("patches").install_in_server(load_beside("../bucket_turns"))
    if args.node_rank > 0:
        # A machine that answers no requests reports when its ranks are ready. SGLang's health
        # server would listen there for requests from anyone.
        engine.launch_dummy_health_check_server = lambda *of: report(settings, {"port": args.port})
    launch_server(
        args,
        init_tokenizer_manager_func=init_with_keys,
        execute_warmup_func=lambda args: warm_up(args, settings.get("api_key")),
        launch_callback=lambda: report(settings, {"port": args.port}),
        run_scheduler_process_func=run_scheduler,
    )


def run_scheduler(args: Any, *others: Any, **named: Any) -> None:
    """Run a scheduler's process, with our patches."""
    if os.environ.get(RENDEZVOUS, "").startswith(f"{RENDEZVOUS_SCHEME}:"):
        use_store_at_one_address()
    # SGLang's FP8 kernels for the CPU need AMX.
    if args.device == "cpu" and args.quantization == "fp8":
        importlib.import_module("stubs").install_fp8()
    if args.device == "cpu":
        importlib.import_module("stubs").install_gated_delta_rule()
        importlib.import_module("stubs").install_shared_expert_gate()
        importlib.import_module("stubs").install_norm_over_heads()
    if args.device == "cpu" and args.attn_dp_size > 1:
        importlib.import_module("stubs").install_data_parallel_attention()
    patches = load_beside("patches")
    states = [patches.HAS_DIGESTS] + ([patches.HAS_TURNS] if in_turn(args) else [])
    patches.install_in_scheduler(load_beside("../../weight_sync/digests"), states)
    from sglang.srt.managers.scheduler import run_scheduler_process

    run_scheduler_process(args, *others, **named)


def use_store_at_one_address() -> None:
    """Let ranks of several machines join in a store that listens only on the given address.

    torch's own `tcp://` listens on every interface.
    """
    from torch.distributed import TCPStore, register_rendezvous_handler

    def stores(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
        parts = urllib.parse.urlsplit(url)
        asked = dict(urllib.parse.parse_qsl(parts.query))
        rank = int(asked["rank"])
        size = int(asked["world_size"])
        assert parts.hostname is not None
        assert parts.port is not None
        descriptor = None
        if rank == 0:
            family = socket.AF_INET6 if ":" in parts.hostname else socket.AF_INET
            listener = socket.create_server((parts.hostname, parts.port), family=family)
            descriptor = listener.detach()
        yield (
            TCPStore(
                parts.hostname, parts.port, size, rank == 0, timeout, master_listen_fd=descriptor
            ),
            rank,
            size,
        )

    register_rendezvous_handler(RENDEZVOUS_SCHEME, stores)


def in_turn(args: Any) -> bool:
    """Whether one process gets the calls for all buckets, and so can order them."""
    return bool(args.tokenizer_worker_num == 1)


def load_beside(name: str) -> Any:
    """Import a file by its path from here, since this folder is not on the import path."""
    spec = importlib.util.spec_from_file_location(
        f"rlcore_{os.path.basename(name)}", f"{HERE}/{name}.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def warm_up(args: Any, key: str | None) -> bool:
    """Let the server answer requests such as users send, by token ids, before it counts as ready.

    SGLang's own warm-up is an English sentence, which not every tokenizer can read, and greedy: the
    kernels of top-p and top-k would be compiled inside the scheduler, at the first step of a run.
    """
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.tokenizer_manager import ServerStatus

    manager = get_global_state().tokenizer_manager
    route = "classify" if args.is_embedding else "generate"
    for body in first_requests(args, manager.max_req_input_len):
        ask(f"{args.url()}/{route}", body, key, args.ssl_ca_certs)
    manager.server_status = ServerStatus.Up
    return True


def first_requests(args: Any, longest: int) -> list[dict[str, Any]]:
    """A score of a reward model; or a greedy response, and one that samples after a long prompt.

    Args:
        longest: the server takes fewer tokens than this.
    """
    if args.is_embedding:
        return [{"input_ids": [0]}]
    greedy = {"max_new_tokens": 2, "temperature": 0.0}
    sampled = {"max_new_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 50}
    tokens = 2
    # A CPU compiles nothing. More than a chunk is computed in two parts, by other kernels.
    if args.device != "cpu" and (args.chunked_prefill_size or 0) > 0:
        tokens = max(2, min(args.chunked_prefill_size + 1, longest - 8))
    return [
        {"input_ids": [0], "sampling_params": greedy},
        {"input_ids": [0] * tokens, "sampling_params": sampled},
    ]


def ask(url: str, body: dict[str, Any], key: str | None, ca_file: str | None) -> None:
    """Send a request, as soon as the server listens. An error ends this process."""
    headers = {"Content-Type": "application/json"} | (
        {"Authorization": f"Bearer {key}"} if key else {}
    )
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    context = ssl.create_default_context(cafile=ca_file) if url.startswith("https:") else None
    # The parent has a deadline for this loop.
    while True:
        try:
            with urllib.request.urlopen(request, context=context) as answer:
                answer.read()
            return
        except urllib.error.HTTPError as error:
            print(
                f"the first request failed: {error}: {error.read().decode(errors='replace')}",
                file=sys.stderr,
                flush=True,
            )
            # The server's children end with this process.
            os._exit(1)
        except urllib.error.URLError as error:
            if isinstance(error.reason, ssl.SSLCertVerificationError):
                print(
                    f"the certificate of {url} is not accepted by {ca_file}: {error.reason}",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)
            # The server does not listen yet.
            time.sleep(POLL_S)


def report(settings: dict[str, Any], line: dict[str, Any]) -> None:
    """Write one line to the parent, if it gave us a descriptor and no line was written before."""
    if (fd := settings.pop("ready_fd", None)) is not None:
        with os.fdopen(fd, "w") as ready:
            ready.write(json.dumps(line) + "\n")


def main() -> int:
    if sys.argv[1:] == ["--version"]:
        from sglang.version import __version__

        print(__version__)
        return 0
    given = sys.stdin.buffer.read()
    # The parent is gone, or the script was started by hand.
    if not given:
        print("expected JSON on the standard input: {} for a server without keys", file=sys.stderr)
        return EXIT_BAD_ARGUMENT
    settings = json.loads(given)
    if (parent := settings.get("parent_pid")) is not None:
        die_with_parent(lambda: os.getppid() == parent)
    from sglang.srt.utils import kill_process_tree
    from sglang.version import __version__

    try:
        if __version__ != VERSION:
            raise BadArgument(
                f"this is sglang {__version__}; rlcore drives {VERSION}: run"
                " scripts/install_sglang.sh"
            )
        arguments = Parser().check(sys.argv[1:])
    except BadArgument as error:
        report(settings, {"error": str(error)})
        print(error, file=sys.stderr)
        return EXIT_BAD_ARGUMENT
    # The ranks' rendezvous is a folder of their own: a TCP store would listen on every interface.
    with tempfile.TemporaryDirectory(prefix="rlcore-engine-", ignore_cleanup_errors=True) as folder:
        os.environ.setdefault(RENDEZVOUS, f"file://{folder}/ranks")
        try:
            serve(arguments, settings)
        except KeyboardInterrupt:
            # uvicorn raises SIGINT again after it has closed its connections.
            pass
        finally:
            kill_process_tree(os.getpid(), include_parent=False)
    return 0


# SGLang's own children do this too, but only after all their imports
if __name__ == "__mp_main__":
    # A process that inherits orphans is not in our process group.
    die_with_parent(lambda: os.getpgid(os.getppid()) == os.getpgrp())
if __name__ in ("__main__", "__mp_main__") and os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    install_stubs()
if __name__ == "__main__":
    sys.exit(main())
