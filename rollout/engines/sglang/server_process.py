"""An SGLang server that we start, watch and end, in the engines' own Python environment."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import torch

from rlcore.config.checks.engine import FLASH_RL, argument_name, cannot_start, server_argument
from rlcore.config.derived import in_weight_group
from rlcore.config.sections.rollout import EngineConfig
from rlcore.config.sections.training import TLSConfig
from rlcore.deadlines import ENGINE_ENDING_S
from rlcore.errors import ConfigError
from rlcore.hf_config.read import read_config
from rlcore.interpreters.ask import Interpreter, ask, cuda_toolkit
from rlcore.quantised_weights import QUANTIZATION_CONFIG
from rlcore.stores import loopback_interface
from rlcore.tls import server_context
from rollout.engines.checks import folder_vocab_size
from rollout.engines.child_process import ChildServer, engine_environment
from rollout.engines.factories import EngineNode, Keys
from rollout.engines.sglang.entry import RENDEZVOUS, RENDEZVOUS_SCHEME
from rollout.weight_sync.process_group import (
    CHOSEN_INTERFACE,
    interface_of,
    is_loopback,
    name_gpus,
    own_address,
)

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
ENTRY = Path(__file__).with_name("entry.py")
CHECKOUT = Path(__file__).resolve().parents[3]
# The engine must not inherit the trainer's Python path.
NOT_FOR_ENGINES = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"}
FLASH_RL_FAMILIES = ("qwen2", "qwen3")  # models whose loaders declare support
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
# Graphs are released with the rest only if they were captured for that; SGLang copies what they
# hold to host memory meanwhile.
RELEASED_GRAPHS = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
# GPUs used by a trainer are not equally free, which SGLang otherwise takes for an error.
UNEQUAL_GPUS = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
# Otherwise every kernel that FP8 may need is compiled before the server answers. SGLang says this
# takes 10 to 20 minutes, more than `start_timeout_s`.
COMPILED_WHEN_NEEDED = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}
# Without a compiler the import of DeepGEMM ends the server, on Hopper and newer.
NO_DEEP_GEMM = {"SGLANG_ENABLE_JIT_DEEPGEMM": "0"}
logger = logging.getLogger(__name__)

# A user's own `rollout.engine.server` overrides these.
DEFAULTS: dict[str, Any] = {"log_level_http": "warning"}  # avoids a log line for every request
# A trainer that is offloaded keeps CUDA's context and NCCL's communicators, 7 to 10 GiB of a rank.
COLOCATED_DEFAULTS: dict[str, Any] = {"mem_fraction_static": 0.75}
CPU_DEFAULTS: dict[str, Any] = {
    # The server answers probes between batches. One of SGLang's 4096 tokens takes a model of 135M
    # parameters minutes on busy cores.
    "chunked_prefill_size": 512,
    "attention_backend": "torch_native",
    "cuda_graph_backend_decode": "disabled",
    "cuda_graph_backend_prefill": "disabled",
    "grammar_backend": "none",
    # Without this an idle scheduler uses a whole core, which the trainer could use.
    "sleep_on_idle": True,
    # Limits the KV cache.
    "max_total_tokens": 32768,
    # After the start, a tenth of the memory that was free before it must still be free, even if
    # other programs took some meanwhile.
    "mem_fraction_static": 0.9,
    "max_running_requests": 64,
}


class ManagedServer(ChildServer):
    """A server process and its children, from each start to its end.

    Use it from one event loop. The server listens on a port of `config.host`. It ends with this
    process, however this process ends, and its children end with it.

    Args:
        name: for messages, as "engine-0".
        model_path: a Hugging Face folder; its weights are served until the first publication,
            unless `arguments` say that they are not read.
        dtype: fp32 | bf16, where `config.dtype` is not set.
        log: takes what the server prints; a restart appends.
        gpus: names as in CUDA_VISIBLE_DEVICES, one for each tensor-parallel rank; if empty, all
            visible ones.
        arguments: more of sglang's own arguments, by name, which `config.server` cannot override.
        tls: `cluster.tls`, with a certificate.
        node: this machine's part of a server on several machines.

    Raises:
        ConfigError: there is no engine environment, or no server can be started with the device,
            host or arguments of the configuration.
        ModelError: `model_path` is not a Hugging Face folder.
    """

    # uvicorn stops at SIGINT. At SIGTERM SGLang waits for every request, in steps of 5 s.
    stop_signal = signal.SIGINT
    # Enough for a traceback of the scheduler and the last lines of its parent.
    log_lines = 30

    def __init__(
        self,
        name: str,
        model_path: str,
        *,
        config: EngineConfig,
        dtype: str,
        tokenizer: str | None,
        log: Path,
        keys: Keys,
        gpus: Sequence[str] = (),
        arguments: Mapping[str, Any] | None = None,
        tls: TLSConfig | None = None,
        node: EngineNode | None = None,
    ) -> None:
        for problem in cannot_start(config):
            raise ConfigError(str(problem))
        # Check the model here, since the server would bury the error in a long log.
        folder_vocab_size(model_path)
        family = read_config(model_path).get("model_type")
        load_format = server_argument(config, "load_format")
        # SGLang cannot load other quantised models a second time.
        if load_format == FLASH_RL and family not in FLASH_RL_FAMILIES:
            raise ConfigError(
                f"rollout.engine.server.load_format: got {load_format!r} for a model of type"
                f" {family}, but with it SGLang publishes only into"
                f" {' and '.join(FLASH_RL_FAMILIES)}: leave it and the quantization out"
            )
        super().__init__(name, log)
        self.model_path = os.path.abspath(model_path)
        self.config = config
        self.keys = keys
        self.device = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
        self.python = engine_python(config)
        self._nccl_checked = False
        self._dtype = dtype
        self._visible = tuple(gpus)
        self.gpus = name_gpus(gpus)
        self._arguments = dict(arguments or {})
        if tls is not None:
            # Check the files here, since SGLang would end with a traceback.
            server_context(tls)
            self._arguments |= {
                "ssl_certfile": os.path.abspath(str(tls.certificate_file)),
                "ssl_keyfile": os.path.abspath(str(tls.key_file)),
                "ssl_ca_certs": os.path.abspath(tls.ca_file),
            }
        if node is not None:
            self._arguments |= {
                "nnodes": node.nodes,
                "node_rank": node.rank,
                "dist_init_addr": node.head,
            }
        self._node = node
        self._tokenizer = None if tokenizer is None else os.path.abspath(tokenizer)

    async def start(self, port: int = 0) -> str:
        """Start the server, and return its URL once it has answered a first request.

        Call it from a thread that lives as long as the server. A second call ends the remains of
        the first server.

        Args:
            port: the port of the server; 0 stands for a free port.

        Raises:
            ConfigError: `rollout.engine.host` is not an address of this machine, or weights go over
                NCCL and the engines' environment has another version of it.
            UserError: an argument in `rollout.engine.server` that sglang does not know or take.
            RunFailed, DeadlineExceeded: the server ended, or was not ready within
                `rollout.engine.start_timeout_s`; with the last lines of its log.
        """
        await self.kill()
        on_gpu = self.device == "cuda" and torch.cuda.is_available()
        if on_gpu and in_weight_group(self.config) and not self._nccl_checked:
            await check_nccl(self.python)
            self._nccl_checked = True
        with held_ports(self.config.host, port, 0) as (port, nccl_port):
            await self.launch(
                [self.python, str(ENTRY), *self.command_line(port, nccl_port)],
                self._standard_input,
                timeout_s=self.config.start_timeout_s,
                environment=self._environment(),
            )
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"{'https' if 'ssl_certfile' in self._arguments else 'http'}://{host}:{port}"

    def command_line(self, port: int, nccl_port: int) -> list[str]:
        """Make the arguments of `sglang.launch_server`, which checks names and values itself.

        Both ports are held for the server until it listens on them.
        """
        given = {argument_name(name): value for name, value in self.config.server.items()}
        values = DEFAULTS | {"watchdog_timeout": longest_pause_s(self.config)}
        if self.device == "cpu":
            values |= CPU_DEFAULTS
        elif self.config.colocated:
            values |= COLOCATED_DEFAULTS
        values |= given | self._arguments
        if self.config.quantization is not None:
            values |= quantised_arguments(given.get("json_model_override_args"))
        values |= {
            "model_path": self.model_path,
            "tokenizer_path": self._tokenizer,
            "dtype": DTYPES[self.config.dtype or self._dtype],
            "tp_size": self.config.tensor_parallel,
            "device": self.device,
            "host": self.config.host,
            "port": port,
            "nccl_port": nccl_port,
        }
        return [word for name, value in values.items() for word in option(name, value)]

    def _standard_input(self, ready_fd: int) -> bytes:
        """Make entry.py's standard input. Other users of the machine cannot see the keys there."""
        return orjson.dumps(
            {
                "api_key": self.keys.api,
                "admin_key": self.keys.admin,
                "ready_fd": ready_fd,
                "parent_pid": os.getpid(),
            }
        )

    def _environment(self) -> dict[str, str]:
        on_gpu = self.device != "cpu"
        variables = {
            name: value
            for name, value in engine_environment(
                self.config, on_gpu=on_gpu, gpus=self._visible if on_gpu else ()
            ).items()
            if name not in NOT_FOR_ENGINES or name in self.config.environment
        }
        # Inputs of convolutions are bf16 by default, whatever the model's dtype.
        dtype = DTYPES[self.config.dtype or self._dtype]
        variables.setdefault("SGLANG_MAMBA_CONV_DTYPE", dtype)
        if on_gpu:
            variables |= gpu_environment(self.config, variables)
        else:
            variables["SGLANG_USE_CPU_ENGINE"] = "1"
            # By default SGLang gives each rank a NUMA node, and fails if there are too few.
            if self.config.tensor_parallel > 1:
                ranks = self.config.tensor_parallel // (self._node.nodes if self._node else 1)
                variables.setdefault("SGLANG_CPU_OMP_THREADS_BIND", cores_of_ranks(ranks))
        if self._node is not None:
            for name, value in node_environment(self._node).items():
                variables.setdefault(name, value)
        elif is_loopback(self.config.host) and variables.get(GLOO_INTERFACE) in (
            None,
            os.environ.get(CHOSEN_INTERFACE),
        ):
            # The trainer is on this machine, so gloo can listen on loopback only, whatever a rank
            # in the same process has chosen for itself.
            variables[GLOO_INTERFACE] = loopback_interface()
        if self.config.threads is not None:
            variables["OMP_NUM_THREADS"] = str(self.config.threads)
        return variables


def longest_pause_s(config: EngineConfig) -> float:
    """Return the seconds that an engine may be paused, while another one fails a publication.

    The failing one is given up after `update_timeout_s`, and the next attempt may meet another.
    SGLang's watchdog takes a batch that an `in_place` pause holds for a hung one, and ends the
    server. Engines that hang are found by the fleet itself (`progress_timeout_s`).
    """
    return 3 * (config.update_timeout_s + ENGINE_ENDING_S)


def gpu_environment(config: EngineConfig, variables: Mapping[str, str]) -> dict[str, str]:
    """The variables to add, without those that `variables` have already.

    Warns if the server would find no compiler for GPUs.
    """
    added: dict[str, str] = {}
    if config.colocated:
        added |= RELEASED_GRAPHS | UNEQUAL_GPUS
    if config.quantization is not None:
        added |= COMPILED_WHEN_NEEDED
    if cuda_toolkit(variables) is None:
        added |= NO_DEEP_GEMM
        logger.warning(
            "no CUDA toolkit is found for the SGLang server (CUDA_HOME, nvcc on PATH,"
            " /usr/local/cuda): it can use no kernel that it compiles itself, and DeepGEMM is"
            " switched off; install the CUDA toolkit, or set CUDA_HOME in"
            " rollout.engine.environment"
        )
    return {name: value for name, value in added.items() if name not in variables}


async def check_nccl(engine: str, trainer: str = sys.executable) -> None:
    """Raise ConfigError unless both interpreters have the same NCCL.

    Ranks with different versions form no communicator: every publication over NCCL would fail.
    """
    theirs, ours = await asyncio.gather(_asked(engine), _asked(trainer))
    if theirs.nccl == ours.nccl != "":
        return
    package = f"nvidia-nccl-cu{ours.cuda.partition('.')[0] or '13'}"
    do = (
        f"run {trainer} -m pip install --no-deps {package}=={theirs.nccl}"
        if theirs.nccl
        else "install a torch with CUDA there (scripts/install_sglang.sh --gpu)"
    )
    raise ConfigError(
        f"rollout.engine.python: {engine} has NCCL {theirs.nccl or 'of no version'}, the trainer's"
        f" {trainer} has {ours.nccl or 'none'}, and weights go to engines over NCCL, which needs"
        f" the same version on both sides: {do}, or set rollout.engine.transport to disk"
    )


async def _asked(python: str) -> Interpreter:
    """Ask an interpreter. Raises ConfigError if it does not answer, or its torch is broken."""
    found = await asyncio.to_thread(ask, python, [])
    if found.broken:
        raise ConfigError(
            f"rollout.engine.python: {python} does not report its torch's NCCL: {found.broken}"
        )
    return found


def node_environment(node: EngineNode) -> dict[str, str]:
    """Variables for the rendezvous of this machine's ranks with the others, and for their address.

    By default gloo uses the interface of the host name, which may be loopback, and SGLang the
    interface that leads to the internet.
    """
    try:
        address = own_address(f"http://{node.head}")
    except OSError as error:
        raise ConfigError(f"--head: no route leads from here to {node.head}: {error}") from error
    found = {RENDEZVOUS: f"{RENDEZVOUS_SCHEME}://{node.head}", "SGLANG_HOST_IP": address}
    interface = interface_of(address)
    return found if interface is None else {**found, GLOO_INTERFACE: interface}


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


def quantised_arguments(override: Any) -> dict[str, Any]:
    """The arguments of a server whose weights come in FP8.

    The folder's own weights have no scales, and are not read.

    Args:
        override: what the user gave for `json_model_override_args`, or None.
    """
    given = json.loads(override) if isinstance(override, str) else override or {}
    return {
        "quantization": "fp8",
        "load_format": "dummy",
        "json_model_override_args": {**given, "quantization_config": dict(QUANTIZATION_CONFIG)},
    }


def engine_python(config: EngineConfig) -> str:
    """Return `rollout.engine.python`, or the Python of the checkout's engine environment.

    Raises:
        ConfigError: there is no such file.
    """
    python = Path(config.python) if config.python else CHECKOUT / ".venv-sglang" / "bin" / "python"
    if not python.is_file():
        raise ConfigError(
            f"rollout.engine.python: there is no {python}; run scripts/install_sglang.sh, or give"
            " the interpreter of an environment with sglang"
        )
    # The link is not resolved, since Python finds its environment by it.
    return os.path.abspath(python)


def cores_of_ranks(ranks: int) -> str:
    """Divide this process's cores among ranks, as "0,1|2,3". Ranks share cores if there are few."""
    cores = sorted(os.sched_getaffinity(0))
    parts = [
        cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks]
        for rank in range(ranks)
    ]
    return "|".join(
        ",".join(map(str, part or [cores[rank * len(cores) // ranks]]))
        for rank, part in enumerate(parts)
    )


@contextmanager
def held_ports(host: str, *ports: int) -> Iterator[list[int]]:
    """Reserve these ports while the context lasts, a free one for each 0.

    They are bound with SO_REUSEADDR and never listen: the kernel gives them to no other program as
    a free port, but a server that names one may bind it and listen.

    Raises:
        ConfigError: `host` is not an address of this machine, or another program listens on one of
            `ports`.
    """
    with ExitStack() as stack:
        try:
            held = [stack.enter_context(one) for one in _bound(host, ports)]
        except OSError as error:
            named = "".join(f" {port}" for port in ports if port)
            raise ConfigError(
                f"rollout.engine.host: no port{named} of {host!r} can be had ({error}); expected an"
                " address of this machine"
            ) from error
        yield [one.getsockname()[1] for one in held]


def _bound(host: str, ports: Sequence[int]) -> Iterator[socket.socket]:
    for port in ports:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        one = socket.socket(family, kind, protocol)
        yield one
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
