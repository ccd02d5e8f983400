"""The command line, environment and ports of an SGLang server. No server is started."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from rlcore.config import Config
from rlcore.config.checks.engine import OURS, cannot_start
from rlcore.config.sections.rollout import EngineConfig
from rlcore.deadlines import ENGINE_ENDING_S
from rlcore.errors import ConfigError, ModelError, UserError
from rlcore.stores import loopback_interface
from rollout.engines.child_process import members
from rollout.engines.factories import ADMIN_KEY, API_KEY, EngineNode, Keys
from rollout.engines.sglang.entry import without_idle
from rollout.engines.sglang.factory import SGLangFactory
from rollout.engines.sglang.server_process import (
    ENTRY,
    GLOO_INTERFACE,
    ManagedServer,
    cores_of_ranks,
    engine_python,
    held_ports,
    option,
)
from rollout.weight_sync.process_group import CHOSEN_INTERFACE

Words = Callable[..., list[str]]
MINE = "mine, of 32 random characters"


@pytest.fixture
def words(tmp_path: Path, folder: Path) -> Words:
    """The words of the command line for settings of `rollout.engine`."""
    return lambda **settings: server(tmp_path, folder, **settings).command_line(1, 2)


def test_the_configuration_becomes_arguments(words: Words, folder: Path) -> None:
    given = words(tensor_parallel=2, host="10.0.0.1")
    assert {
        f"--model-path={folder}",
        "--dtype=float32",
        "--tp-size=2",
        "--host=10.0.0.1",
        "--port=1",
        "--nccl-port=2",
    } <= set(given)
    assert not any(word.startswith("--tokenizer-path") for word in given)
    assert "--dtype=bfloat16" in words(dtype="bf16")


def test_what_the_cpu_needs_is_left_out_on_a_gpu_and_can_be_overridden(words: Words) -> None:
    assert "--attention-backend=torch_native" in words()
    assert not any(word.startswith("--attention-backend") for word in words(device="cuda"))
    mine = words(server={"attention-backend": "intel_amx", "sleep_on_idle": False})
    assert "--attention-backend=intel_amx" in mine
    assert not any(
        word.startswith(("--attention-backend=torch", "--sleep-on-idle")) for word in mine
    )


def test_the_watchdog_outlasts_a_publication_that_fails_elsewhere(words: Words) -> None:
    [given] = [word for word in words(update_timeout_s=100.0) if "--watchdog-timeout" in word]
    assert float(given.partition("=")[2]) > 2 * (100 + ENGINE_ENDING_S)
    assert "--watchdog-timeout=7" in words(server={"watchdog_timeout": 7})


def test_what_the_run_needs_is_stronger_than_what_the_user_says(words: Words) -> None:
    needed = {"enable_memory_saver": True}
    assert "--enable-memory-saver" in words(server=dict.fromkeys(needed, False), arguments=needed)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, ["--some-name"]),
        (False, ["--no-some-name"]),
        (None, []),
        (-1, ["--some-name=-1"]),
        ([1, 2], ["--some-name", "1", "2"]),
        ({"a": [1]}, ['--some-name={"a": [1]}']),
        ("two words", ["--some-name=two words"]),
    ],
)
def test_values_as_words(value: object, expected: list[str]) -> None:
    assert option("some_name", value) == expected


def test_a_switch_that_is_off_anyway_is_not_switched_off() -> None:
    known = {"--plain", "--both", "--no-both"}
    given = ["--no-plain", "--no-both", "--no-such", "--plain"]
    assert without_idle(given, known) == ["--no-both", "--no-such", "--plain"]


@pytest.mark.parametrize("name", [*OURS, "tp-size", "--tp-size"])
def test_what_rlcore_sets_itself_is_refused_with_what_to_do(name: str) -> None:
    instead = OURS[name.removeprefix("--").replace("-", "_")]
    (problem,) = cannot_start(EngineConfig(kind="sglang", server={"context_length": 64, name: 1}))
    assert str(problem) == f"rollout.engine.server.{name}: not to be given here: {instead}"


FP8 = {"quantization": "fp8", "load-format": "flash_rl"}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"--quantization": "fp8"}, "--quantization: got 'fp8'.*flash_rl .*load_format None"),
        ({"quantization": "fp8", "load_format": "auto"}, "quantization: got 'fp8'.*'auto'"),
        (FP8 | {"quantization": "awq"}, "quantization: got 'awq'"),
        ({"torchao_config": "int8wo"}, "torchao_config: got 'int8wo'"),
        (FP8, ""),
        ({"quantization": None, "torchao_config": ""}, ""),
        ({"quantization": "unquant", "kv_cache_dtype": "fp8_e4m3"}, ""),
    ],
)
def test_quantised_engines_are_refused_unless_weights_can_be_published_to_them(
    given: dict[str, object], refused: str
) -> None:
    problems = list(cannot_start(EngineConfig(kind="sglang", server=given)))
    assert len(problems) == bool(refused)
    assert all(re.search(refused, str(problem)) for problem in problems)


def test_only_some_models_are_quantised_again(tmp_path: Path, folder: Path) -> None:
    server(tmp_path, folder, server=FP8)  # a Qwen3
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "vocab_size": 8}')
    with pytest.raises(ConfigError, match=r"for a model of type qwen3_moe, .* qwen2 and qwen3"):
        server(tmp_path, tmp_path, server=FP8)


def test_the_names_of_the_keys_are_those_that_are_read() -> None:
    assert API_KEY in OURS["api_key"].split()
    assert ADMIN_KEY in OURS["admin_api_key"].split()


def test_keys_come_from_the_environment_or_are_made_and_are_not_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(API_KEY, MINE)
    monkeypatch.delenv(ADMIN_KEY, raising=False)
    first = Keys.from_environment()
    second = Keys.from_environment()
    assert first.api == second.api == MINE
    assert first.admin != second.admin
    assert len(first.admin) >= 32
    assert MINE not in repr(first)
    assert first.admin not in repr(first)


@pytest.mark.parametrize(
    ("api", "admin", "said"),
    [
        ("short", MINE, f"{API_KEY} has 5 characters, expected at least 16"),
        (MINE, "short", f"{ADMIN_KEY} has 5 characters, expected at least 16"),
        (MINE, MINE, f"{API_KEY} and {ADMIN_KEY} are the same"),
    ],
)
def test_keys_that_protect_nothing_are_refused(
    monkeypatch: pytest.MonkeyPatch, api: str, admin: str, said: str
) -> None:
    monkeypatch.setenv(API_KEY, api)
    monkeypatch.setenv(ADMIN_KEY, admin)
    with pytest.raises(UserError, match=said):
        Keys.from_environment()


def test_held_ports_are_nobody_elses_but_can_be_listened_on() -> None:
    with held_ports("127.0.0.1", *[0] * 20) as ports:
        assert len(set(ports)) == 20
        others = [socket.create_server(("127.0.0.1", 0)) for _ in range(50)]
        assert not set(ports) & {other.getsockname()[1] for other in others}
        for other in others:
            other.close()
        # as a server does: with SO_REUSEADDR
        with socket.create_server(("127.0.0.1", ports[0])) as server:
            socket.create_connection(server.getsockname()).close()
        rude = socket.socket()
        with pytest.raises(OSError, match="in use"):
            rude.bind(("127.0.0.1", ports[1]))
        rude.close()


def test_a_port_that_somebody_listens_on_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(ConfigError, match=f"no port {port} of '127.0.0.1' can be had"),
            held_ports("127.0.0.1", port, 0),
        ):
            pass
    # of a server that has just ended
    with held_ports("127.0.0.1", port, 0) as (again, other):
        assert again == port != other


def test_a_host_that_is_no_address_of_this_machine_is_refused() -> None:
    wanted = (
        r"rollout\.engine\.host: no port of '192\.0\.2\.1' can be had .*address of this machine"
    )
    with pytest.raises(ConfigError, match=wanted), held_ports("192.0.2.1", 0):
        pass


def server(
    tmp_path: Path,
    model: Path,
    *,
    gpus: Sequence[str] = (),
    arguments: dict[str, object] | None = None,
    **settings: object,
) -> ManagedServer:
    (tmp_path / "python").touch()
    config = EngineConfig(
        **{"kind": "sglang", "device": "cpu", "python": str(tmp_path / "python")} | settings
    )
    return ManagedServer(
        "e",
        str(model),
        config=config,
        dtype="fp32",
        tokenizer=None,
        log=tmp_path / "log",
        keys=Keys("a", "b"),
        gpus=gpus,
        arguments=arguments,
    )


def test_a_missing_environment_names_the_script_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"rollout\.engine\.python: there is no .*nowhere; run scripts/install_sglang\.sh",
    ):
        engine_python(EngineConfig(kind="sglang", python=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"host": "0.0.0.0"}, r"rollout\.engine\.host: '0\.0\.0\.0' is every address"),
        (
            {"server": {"--api-key": "x"}},
            r"rollout\.engine\.server\.--api-key: not to be given here",
        ),
        (
            {"device": "cuda:1"},
            (
                r"rollout\.engine\.device: got 'cuda:1', expected 'cuda' or 'cpu';"
                r" rollout\.engine\.gpus"
            ),
        ),
    ],
)
def test_what_no_server_can_be_started_with(
    tmp_path: Path, folder: Path, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        server(tmp_path, folder, **settings)


def test_a_model_that_is_not_there_is_seen_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        server(tmp_path, tmp_path / "none")


def test_the_engines_environment_is_its_own(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTHONPATH", "RANK", "MASTER_PORT", API_KEY, ADMIN_KEY):
        monkeypatch.setenv(name, "1")
    variables = server(tmp_path, folder, threads=3)._environment()
    assert not {"PYTHONPATH", "RANK", "MASTER_PORT", API_KEY, ADMIN_KEY} & set(variables)
    assert (variables["OMP_NUM_THREADS"], variables["SGLANG_USE_CPU_ENGINE"]) == ("3", "1")
    # SGLang's default would round the inputs of convolutions of an fp32 model.
    dtypes = [
        server(tmp_path, folder, dtype=dtype)._environment()["SGLANG_MAMBA_CONV_DTYPE"]
        for dtype in ("fp32", "bf16")
    ]
    assert dtypes == ["float32", "bfloat16"]
    assert (
        server(tmp_path, folder, device="cuda", gpus=["2", "3"])._environment()[
            "CUDA_VISIBLE_DEVICES"
        ]
        == "2,3"
    )
    shared = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}.items()
    assert shared <= server(tmp_path, folder, device="cuda", colocated=True)._environment().items()
    assert not shared <= server(tmp_path, folder, colocated=True)._environment().items()


def test_a_server_on_loopback_has_its_groups_there(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself gloo takes the address of the machine's name, which others reach."""
    monkeypatch.delenv(GLOO_INTERFACE, raising=False)
    assert server(tmp_path, folder)._environment()[GLOO_INTERFACE] == loopback_interface()
    assert GLOO_INTERFACE not in server(tmp_path, folder, host="192.0.2.7")._environment()
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    assert server(tmp_path, folder)._environment()[GLOO_INTERFACE] == "eth7"
    # a rank in this process has chosen it for itself
    monkeypatch.setenv(CHOSEN_INTERFACE, "eth7")
    assert server(tmp_path, folder)._environment()[GLOO_INTERFACE] == loopback_interface()


def test_a_machine_of_an_engine_meets_the_others_by_its_address(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (GLOO_INTERFACE, "SGLANG_HOST_IP"):
        monkeypatch.delenv(name, raising=False)
    ranks = {"SGLANG_CPU_OMP_THREADS_BIND": cores_of_ranks(2)}  # its own, of four
    config = server(tmp_path, folder, tensor_parallel=4).config

    def started(head: str) -> ManagedServer:
        return ManagedServer(
            "engine-0", str(folder), config=config, dtype="fp32", tokenizer=None,
            log=tmp_path / "log", keys=Keys(MINE, MINE), node=EngineNode(2, 1, head),
        )  # fmt: skip

    there = started("127.0.0.1:20000")
    expected = {
        "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": "rlcore://127.0.0.1:20000",
        "SGLANG_HOST_IP": "127.0.0.1",
        GLOO_INTERFACE: loopback_interface(),
        **ranks,
    }
    assert expected.items() <= there._environment().items()
    words = there.command_line(1, 2)
    assert {"--nnodes=2", "--node-rank=1", "--dist-init-addr=127.0.0.1:20000"} <= {*words}
    monkeypatch.setenv(GLOO_INTERFACE, "eth7")
    assert there._environment()[GLOO_INTERFACE] == "eth7"
    with pytest.raises(ConfigError, match=r"--head: no route leads from here to nowhere.invalid:1"):
        started("nowhere.invalid:1")._environment()


def test_a_server_can_be_given_variables_that_the_trainer_keeps_to_itself(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "the trainer's")
    mine = {"PYTHONPATH": "mine", "CUDA_VISIBLE_DEVICES": "7", "SGLANG_X": "1"}
    started = server(tmp_path, folder, device="cuda", gpus=["2"], environment=mine)
    assert mine.items() <= started._environment().items()


@pytest.mark.parametrize(
    ("cores", "ranks", "expected"),
    [
        ({0, 1, 2, 3, 8}, 2, "0,1|2,3,8"),
        ({4, 5}, 2, "4|5"),
        ({3}, 2, "3|3"),
        ({0, 1}, 4, "0|0|1|1"),
    ],
)
def test_ranks_on_the_cpu_share_out_the_cores(
    cores: set[int], ranks: int, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: cores)
    assert cores_of_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("given", "code", "message"),
    [
        ("", 2, "expected JSON on the standard input"),
        ('{"parent_pid": 1}', 1, "the process that started this one is gone"),
    ],
)
def test_a_server_whose_parent_is_gone_already_does_not_start(
    given: str, code: int, message: str
) -> None:
    """Besides, the http.py beside the script must not be imported for the standard library's."""
    ended = subprocess.run(
        [sys.executable, str(ENTRY)], input=given, capture_output=True, text=True, timeout=30
    )
    assert ended.returncode == code
    assert message in ended.stderr


SERVER = """#!{python}
import json, os, sys, time
told = json.loads(sys.stdin.read())
with os.fdopen(told["ready_fd"], "w") as ready:
    ready.write(json.dumps(dict(port=7)) + chr(10))
time.sleep(60)
"""


async def test_a_second_start_ends_the_first_server(tmp_path: Path, folder: Path) -> None:
    """With a stand-in for the engines' interpreter, which does not run what it is given."""
    one = server(tmp_path, folder)
    (tmp_path / "python").write_text(SERVER.format(python=sys.executable))
    (tmp_path / "python").chmod(0o755)

    url = await one.start()
    first = one.pid
    assert url.startswith("http://127.0.0.1:")
    await one.start()
    assert one.pid != first
    assert members(first) == []
    assert members(one.pid) == [one.pid]
    await one.stop()
    assert members(one.pid) == []


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "mixtral", "glm4_moe"])
def test_a_family_whose_head_sglang_never_ties_is_refused_tied(tmp_path: Path, family: str) -> None:
    """SGLang would generate with a head that nothing writes."""
    for tied in ({}, {"tie_word_embeddings": False}):
        build_clients(tmp_path, {"model_type": family, **tied})
    with pytest.raises(ModelError, match=f"does not read for {family}: its head would be another"):
        build_clients(tmp_path, {"model_type": family, "tie_word_embeddings": True})
    build_clients(tmp_path, {"model_type": "qwen3", "tie_word_embeddings": True})


def build_clients(folder: Path, model: dict[str, Any]) -> None:
    """For no server, with this config.json."""
    (folder / "config.json").write_text(json.dumps(model))
    given = {
        "run": {"name": "x"},
        "model": {"path": str(folder)},
        "data": {"paths": ["d"]},
        "training": {"steps": 1},
        "rollout": {"engine": {"kind": "sglang"}},
    }
    keys = Keys("k" * 32, "a" * 32)
    assert SGLangFactory.build_clients(Config.model_validate(given), [], keys=keys) == []


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe", "qwen3_next"])
def test_dense_layers_of_a_family_to_which_sglang_gives_experts_are_refused(
    tmp_path: Path, family: str
) -> None:
    """A real server keeps its random experts there, and leaves the dense layer's tensors out."""
    model = {"model_type": family, "num_hidden_layers": 4}
    for experts_alone in ({}, {"mlp_only_layers": [], "decoder_sparse_step": 1}):
        build_clients(tmp_path, {**model, **experts_alone})
    # A layer that the model does not have.
    build_clients(tmp_path, {**model, "mlp_only_layers": [4]})
    for key, layers in (
        ({"mlp_only_layers": [1]}, r"\[1\]"),
        ({"decoder_sparse_step": 2}, r"\[0, 2\]"),
    ):
        with pytest.raises(
            ModelError, match=rf"layers {layers} are dense.* none dense .* {family}"
        ):
            build_clients(tmp_path, {**model, **key})


@pytest.mark.parametrize("key", ["use_qk_norm", "use_routing_bias", "scoring_func", "rotary_dim"])
def test_so_is_a_folder_of_minimax_without_a_key_that_sglang_needs(
    tmp_path: Path, key: str
) -> None:
    """transformers does not write them, and SGLang leaves out what they do not ask for."""
    place = Path(__file__).parents[5] / "examples/models/MiniMax-M2/config.json"
    model = json.loads(place.read_text())
    build_clients(tmp_path, model)
    del model[key]
    with pytest.raises(ModelError, match=rf"config.json without {key}, from which SGLang"):
        build_clients(tmp_path, model)


@pytest.mark.parametrize("inside", [False, True])
def test_so_are_layer_types_that_sglang_does_not_read(tmp_path: Path, inside: bool) -> None:
    linear, full = "linear_attention", "full_attention"

    def build(kinds: list[str], **more: int) -> None:
        text = {"model_type": "qwen3_5_text", "layer_types": kinds, **more}
        build_clients(tmp_path, {"model_type": "qwen3_5", "text_config": text} if inside else text)

    build([linear, linear, linear, full])
    build([linear, full] * 2, full_attention_interval=2)
    for kinds, more in (([linear, full] * 2, {}), ([full, linear], {"full_attention_interval": 2})):
        with pytest.raises(ModelError, match=r"layer_types .* goes by full_attention_interval"):
            build(kinds, **more)


@pytest.mark.parametrize("family", ["glm4_moe_lite", "glm_moe_dsa"])
def test_so_is_an_order_of_dense_layers_that_sglang_does_not_read(
    tmp_path: Path, family: str
) -> None:
    kinds = ["dense", "sparse", "sparse"]
    model = {"model_type": family, "num_hidden_layers": 3, "first_k_dense_replace": 1}
    for same in ({}, {"mlp_layer_types": kinds}):
        build_clients(tmp_path, {**model, **same})
    for other in (kinds[::-1], ["dense", *kinds[:2]]):
        with pytest.raises(ModelError, match=r"by mlp_layer_types .* makes \[0\] dense"):
            build_clients(tmp_path, {**model, "mlp_layer_types": other})
