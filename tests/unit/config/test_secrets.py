"""Secrets are masked wherever a configuration is written or shown, and nothing else is."""

from __future__ import annotations

from base64 import b64encode

import pytest

from rlcore.config.load import load_config, refuse_masked
from rlcore.config.secrets import MASK, is_secret, mask_arguments, mask_text, masked
from rlcore.config.yaml_settings import render_config
from rlcore.errors import ConfigError

ENVIRONMENT = "cluster.ray.runtime_env.env_vars"
SECRET = (
    f"{ENVIRONMENT}.WANDB_API_KEY=hidden-1",
    f"{ENVIRONMENT}={{PLAIN_NAME: hidden-2}}",
    "data.chat_template_kwargs.HF_TOKEN=hidden-3",
    "rollout.engine.kind=sglang",
    "rollout.engine.urls=['http://user:hidden-4@10.0.0.7:30000', 'http://10.0.0.8:30000']",
    "data.chat_template_kwargs.place='https://x.org/v1?model=a&api_key=hidden-5#top'",
    "cluster.ray.runtime_env.pip=[a, 'https://hidden-6@host/simple']",
    "cluster.launcher=ray",
)


def test_no_secret_is_rendered_and_all_else_is(load) -> None:
    loaded = load(*SECRET)
    text = render_config(masked(loaded.config.model_dump()), loaded.origins)
    assert "hidden" in render_config(loaded.config.model_dump(), loaded.origins)
    assert "hidden" not in text
    assert "http://10.0.0.8:30000" in text
    assert f"http://{MASK}@10.0.0.7:30000" in text
    assert f"https://x.org/v1?model=a&api_key={MASK}#top" in text


def test_masks_load_again_and_are_refused_by_a_command(load, write) -> None:
    """`rlcore export RUN` needs none of the secrets; a run that would use a mask is refused."""
    loaded = load(*SECRET)
    text = render_config(masked(loaded.config.model_dump()), loaded.origins)
    written = write("config.yaml", text)
    again = load_config([written])
    assert again.config.model_dump() == masked(loaded.config.model_dump())
    with pytest.raises(ConfigError, match=r"\(masked\), which stands for a secret") as caught:
        refuse_masked(again)
    for key in ("rollout.engine.urls", f"{ENVIRONMENT}.WANDB_API_KEY", f"{ENVIRONMENT}.PLAIN_NAME"):
        assert key in str(caught.value)
    refuse_masked(load())


@pytest.mark.parametrize(
    "key",
    ["api_key", "WANDB_API_KEY", "hfToken", "HF_TOKEN", "client_secret", "DB_PASSWORD", "SECRET_ID",
     "key", "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS", "Authorization", "auth", "PROXY_AUTH",
     "bearer", "pat", "GITHUB_PAT", "sig", "x-signature", "session_cookie", "DB_PASS"],
)  # fmt: skip
def test_names_of_secrets(key: str) -> None:
    assert is_secret(("reward", "parts", "a", "args", key))


@pytest.mark.parametrize("section", ["rollout.engine.environment", ENVIRONMENT, "x.environment"])
def test_every_value_of_an_environment_is_a_secret(section: str) -> None:
    assert is_secret((*section.split("."), "NCCL_DEBUG"))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["run", "--api-key", "hidden", "x"], ["run", "--api-key", MASK, "x"]),
        (["run", "--token=hidden", "-v"], ["run", f"--token={MASK}", "-v"]),
        (["env", "HF_TOKEN=hidden", "run"], ["env", f"HF_TOKEN={MASK}", "run"]),
        (["curl", "-H", "Authorization: Bearer hidden"], ["curl", "-H", f"Authorization: {MASK}"]),
        (["curl", "-H", "X-Api-Key: hidden"], ["curl", "-H", f"X-Api-Key: {MASK}"]),
        (["run", "--max-tokens", "5", "--key-file", "a"],) * 2,
        (["the key", "password", "a b"],) * 2,
    ],
)
def test_words_of_a_command(words: list[str], shown: list[str]) -> None:
    assert masked({"command": words}, ("rollout", "workflow"))["command"] == shown


@pytest.mark.parametrize(
    "path",
    ["rollout.sampling.max_new_tokens", "rollout.sampling.stop_token_ids", "data.prompt_key",
     "data.label_key", "model.tokenizer", "reward.parts.a.service.api_key_env",
     "policy.megatron.moe_token_dispatcher_type", "algorithm.estimator.answer_key",
     "data.chat_template_kwargs.eos_token", "reward.parts.a.args.keyword",
     "rollout.workflow.env.taskset", "algorithm.estimator.path", "data.chat_template_kwargs.author",
     "data.chat_template_kwargs.design"],
)  # fmt: skip
def test_names_that_only_look_like_it(path: str) -> None:
    assert not is_secret(tuple(path.split(".")))


def test_values_that_are_no_text_stay() -> None:
    values = {"x": {"y": {"token": 7, "password": None, "key": "", "secrets": ["a", {"k": 1}]}}}
    assert masked(values)["x"]["y"] == values["x"]["y"] | {"secrets": [MASK, {"k": 1}]}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no http://a:b@c:1/d, then", f"no http://{MASK}@c:1/d, then"),
        ("p@ss http://u:p@ss@h/x", f"p@ss http://{MASK}@h/x"),
        ("http://h/a@b and c@d", "http://h/a@b and c@d"),
        ("reasoning-gym:sums?seed=1&size=500", "reasoning-gym:sums?seed=1&size=500"),
        ("s3://bucket/file?token=x&n=2", f"s3://bucket/file?token={MASK}&n=2"),
        ("http://h/v1/chat/completions?n=2", "http://h/v1/chat/completions?n=2"),
        ("https://h/x?sig=a&code=b&se=1", f"https://h/x?sig={MASK}&code={MASK}&se=1"),
        ("https://h/x?v=a8Kd72hsQz91", f"https://h/x?v={MASK}"),
        (
            "to https://h/services/T0AB12CD34EF/B0AB12CD34EF/x.",
            f"to https://h/services/{MASK}/{MASK}/x.",
        ),
        ("https://h/v1/models/qwen2.5-7b-instruct", "https://h/v1/models/qwen2.5-7b-instruct"),
        ("s3://bucket/3f2b9c8d1e2f3a4b/a.parquet", "s3://bucket/3f2b9c8d1e2f3a4b/a.parquet"),
        ("got Authorization: Bearer hidden-1", f"got Authorization: Bearer {MASK}"),
    ],
)
def test_urls(text: str, shown: str) -> None:
    assert mask_text(text) == shown


def test_a_wrong_value_is_refused_without_showing_a_secret(refusal) -> None:
    lines = refusal("rollout.engine.count=http://user:hidden@host")
    assert "hidden" not in "\n".join(lines)
    assert f"http://{MASK}@host" in lines[0]


def test_overrides_with_secrets_are_masked_as_a_whole() -> None:
    plain = ["train", "a.yaml", "data.prompt_key=problem", "--resume", "run.name=x"]
    assert mask_arguments(plain) == plain
    shown = mask_arguments(["train", *SECRET])
    assert "hidden" not in " ".join(shown)
    assert shown[1] == f"{ENVIRONMENT}.WANDB_API_KEY={MASK}"
    assert "rollout.engine.kind=sglang" in shown


def test_a_login_is_masked_under_every_key(load) -> None:
    """Every text of a whole configuration becomes a URL with a password and a parameter."""
    planted = "http://user:hidden@host/a8Kd72hsQz91hidden?token=hidden&sig=hidden"

    def plant(value: object) -> object:
        if isinstance(value, dict):
            return {key: plant(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [plant(inner) for inner in value] or [planted]
        return planted if isinstance(value, str) else value

    values = plant(load(*SECRET).config.model_dump())
    assert str(values).count("hidden") > 200
    assert "hidden" not in str(masked(values))


def test_a_secret_is_hidden_in_texts_of_others(load) -> None:
    """A client's error, or a server's answer, may quote a part of the configuration in any form."""
    load(
        "reward.parts.a.function=m:f",
        "reward.parts.a.args.api_key='hid\"den key'",
        "reward.parts.a.args.url='https://user:hidden%20word@host/x?token=hidden-token'",
        "rollout.workflow.name=agent",
        "rollout.workflow.command=[run, --token, hidden-argument]",
        "rollout.engine.environment={NCCL_DEBUG: VERSION, PLAIN: a8Kd72hsQz91}",
    )
    quotes = ['hid"den key', 'hid\\"den key', "hid%22den%20key", "hidden word", "hidden%20word"]
    quotes += [b64encode(b"user:hidden word").decode()]
    quotes += ["hidden-token", "hidden-argument", "a8Kd72hsQz91"]
    for quote in quotes:
        assert mask_text(f"it said: {quote}!") == f"it said: {MASK}!"
    assert mask_text("its VERSION") == "its VERSION", "a word is no secret"


def test_secrets_of_the_environment_are_hidden(load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hidden-tracker")
    monkeypatch.setenv("MY_JUDGE", "hidden-judge")
    service = "{url: 'http://h/', model: m, api_key_env: MY_JUDGE}"
    load(f"reward.parts.a={{judge: {service}}}")
    assert mask_text("hidden-tracker hidden-judge") == f"{MASK} {MASK}"
