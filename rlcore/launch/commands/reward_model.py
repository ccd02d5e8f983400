"""`rlcore reward-model`: serves a reward model on Megatron, for the reward services of runs.

It is a server of its own, since filters and evaluation need scores while the trainer's ranks are
not training, and the policy's layout is seldom the reward model's.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
import torch

from rlcore.config import Config
from rlcore.config.load import Loaded, load_config, refuse_masked, split_arguments
from rlcore.data.tokenizer import encode, load_tokenizer
from rlcore.deadlines import SCORE_IDLE_S
from rlcore.errors import ConfigError, RunFailed
from rlcore.launch.environment import is_rank
from rlcore.launch.input_checks import check_model
from rlcore.launch.local import launch_ranks
from rlcore.launch.logs import log_folder
from rlcore.launch.process import Process, join
from rlcore.runs.files import write_atomic
from rlcore.tls import server_context

if TYPE_CHECKING:
    from backends.megatron.reward_model import RewardModel
    from rollout.rewards.services.classify_server import ClassifyServer, Encode, Tokens, Waiting

SECTIONS = ("run", "model", "policy", "cluster")  # of the configuration; nothing reads the others
# A supervised run generates nothing, so that no check asks for engines.
PRESETS = (
    "run.name=reward-model",
    "data.paths=unused",
    "training.steps=1",
    "algorithm.loss.name=sft",
)
LOOPBACK = ("127.0.0.1", "::1", "localhost")
SCORE = "score"
IDLE = "idle"
END = "end"


@dataclass(frozen=True)
class Address:
    """Where the server listens, and who may ask it."""

    host: str
    port: int
    api_key_env: str | None = None  # the variable with the key that requests carry; None: no key
    # holds a JSON list with the URL while the server is ready
    urls_file: Path | None = None

    @property
    def key(self) -> str | None:
        """The key. Raises ConfigError where its variable is not set."""
        if self.api_key_env is None:
            return None
        key = os.environ.get(self.api_key_env)
        if not key:
            raise ConfigError(f"--api-key-env: the variable {self.api_key_env} is not set")
        return key


def read_settings(settings: Sequence[str]) -> Loaded:
    """Load a configuration of which only `SECTIONS` count. Raises ConfigError for any other key."""
    loaded = load_config(*split_arguments(settings), presets=PRESETS)
    refuse_masked(loaded)
    ours = {preset.partition("=")[0] for preset in PRESETS}
    for key, origin in loaded.origins.items():
        if origin != "default" and key not in ours and key.partition(".")[0] not in SECTIONS:
            raise loaded.error(key, f"rlcore reward-model reads {', '.join(SECTIONS)} alone")
    if loaded.config.policy.checkpoint is not None:
        raise loaded.error(
            "policy.checkpoint", "holds a policy; the reward model is the folder model.path"
        )
    if loaded.config.cluster.launcher == "ray":
        raise loaded.error(
            "cluster.launcher",
            "ray starts no reward model: use local, or start `rlcore reward-model` by torchrun",
        )
    return loaded


def serve_reward_model(
    settings: Sequence[str], address: Address, *, arguments: Sequence[str] = ()
) -> int:
    """Serve until SIGINT or SIGTERM; return the exit code, 0.

    Args:
        arguments: the command line after `rlcore`, with which the ranks are started.

    Raises:
        UserError: the folder is no reward model, or the layout or the address does not fit.
        RunFailed: a rank died.
    """
    config = read_settings(settings).config
    _ = address.key
    processes = config.cluster.processes_per_node
    if processes > 1 and not is_rank():
        _check(config, processes)
        return launch_ranks(config, arguments)
    with ExitStack() as stack:
        process = stack.enter_context(join(config))
        process.log.open(log_folder(config.run))
        with process.reporting_errors():
            _serve(config, process, address, stack)
    return 0


def _check(config: Config, world_size: int) -> None:
    from backends.megatron.convert.read import read_architecture
    from backends.megatron.policy_checks import check_reward_model

    check_model(config, world_size)
    check_reward_model(read_architecture(config.model.path, bridge=config.model.bridge))


def _serve(config: Config, process: Process, address: Address, stack: ExitStack) -> None:
    """Build the model, listen on rank 0, and score what comes. Collective."""
    from backends.megatron.reward_model import RewardModel

    sync = process.sync
    start_s = config.cluster.start_timeout_s
    _check(config, process.world_size)
    encoder = sync.run_on_rank0(
        "reading the tokenizer",
        lambda: text_encoder(config.model.tokenizer or config.model.path),
        timeout_s=start_s,
    )
    try:
        model = RewardModel(config, device=process.device)
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            f"{config.model.path} does not fit into the memory of its {process.world_size} GPU(s):"
            f" set policy.parallel.tensor, pipeline or expert: {error}"
        ) from error
    stack.callback(model.close)
    sync.barrier("building the model", timeout_s=start_s)

    def listen() -> ClassifyServer:
        assert encoder is not None
        return _listen(model, encoder, address, stack)

    _answer(process, model, sync.run_on_rank0("starting the server", listen))


def _answer(process: Process, model: RewardModel, server: ClassifyServer | None) -> None:
    """Score what the server of rank 0 is asked for, until a rank is asked to end. Collective."""
    sync = process.sync
    while True:
        sync.announce_interrupt()
        taken: list[Waiting] = []
        word = None
        if server is not None and sync.interrupt_requested:
            word = END
        elif server is not None:
            sync.doing = "waiting for texts"
            taken = server.take(model.pass_tokens, timeout_s=SCORE_IDLE_S)
            word = SCORE if taken else IDLE
        word = model.agree(word)
        if word == END:
            return
        if word == SCORE:
            sync.doing = "scoring texts"
            scores = _scores(model, None if server is None else [text.tokens for text in taken])
            if server is not None and scores is not None:
                server.answer(taken, scores)


def _scores(model: RewardModel, texts: Sequence[Tokens] | None) -> list[float] | None:
    try:
        return model.score(texts)
    except torch.OutOfMemoryError as error:
        raise RunFailed(
            "the GPU's memory is too small for a pass: set policy.max_tokens_per_microbatch to less"
            f" than {model.config.policy.max_tokens_per_microbatch}: {error}"
        ) from error


def text_encoder(folder: str) -> Encode:
    """What makes tokens of texts: with the special tokens that the tokenizer puts around a text."""
    tokenizer = load_tokenizer(folder)

    def encoder(texts: Sequence[str]) -> Sequence[Tokens]:
        where = [f"text {number}" for number in range(1, len(texts) + 1)]
        bos = tokenizer.bos_token_id
        # what a chat template has rendered begins with its BOS already
        return [
            tokens[1:] if len(tokens) > 1 and tokens[0] == tokens[1] == bos else tokens
            for tokens in encode(tokenizer, texts, where, special=True)
        ]

    return encoder


def _listen(
    model: RewardModel, encoder: Encode, address: Address, stack: ExitStack
) -> ClassifyServer:
    """Start the server, and tell where it is."""
    from rollout.rewards.services.classify_server import ClassifyServer

    server = ClassifyServer(
        encoder, max_tokens=model.max_tokens, vocab_size=model.vocab_size, key=address.key
    )
    stack.callback(server.close)
    tls = model.config.cluster.tls
    port = server.start(address.host, address.port, None if tls is None else server_context(tls))
    host = socket.gethostname() if address.host in ("", "0.0.0.0", "::") else address.host
    scheme = "http" if tls is None else "https"
    url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}/classify"
    given = [f"reward.parts.NAME.service.url={url}", "reward.parts.NAME.service.format=sglang"]
    if tls is not None:
        given.append(f"reward.parts.NAME.service.ca_file={tls.ca_file}")
    if address.api_key_env is not None:
        given.append(f"reward.parts.NAME.service.api_key_env={address.api_key_env}")
    print("ready. For the trainer:", f"rlcore train ... {' '.join(given)}", sep="\n  ", flush=True)
    if address.key is None and address.host not in LOOPBACK:
        print("note: whoever reaches this address may use it: --api-key-env NAME asks for a key")
    if address.urls_file is not None:
        stack.callback(address.urls_file.unlink, missing_ok=True)
        write_atomic(address.urls_file, orjson.dumps([url]))
    return server
