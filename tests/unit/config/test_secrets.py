"""Secrets are masked wherever a configuration is written or shown, and nothing else is."""

from __future__ import annotations

import pytest

from rlcore.config.load import load_config, refuse_masked
from rlcore.config.secrets import MASK, is_secret, mask_arguments, mask_urls, masked
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
     "key", "AWS_SECRET_ACCESS_KEY", "GOOGLE_CREDENTIALS"],
)  # fmt: skip
def test_names_of_secrets(key: str) -> None:
    assert is_secret(("rollout", "engine", "environment", key))


@pytest.mark.parametrize(
    "path",
    ["rollout.sampling.max_new_tokens", "rollout.sampling.stop_token_ids", "data.prompt_key",
     "data.label_key", "model.tokenizer", "reward.parts.a.service.api_key_env",
     "policy.megatron.moe_token_dispatcher_type", "algorithm.estimator.answer_key",
     "data.chat_template_kwargs.eos_token", "rollout.engine.environment.NCCL_DEBUG",
     "rollout.engine.environment.TOKENIZERS_PARALLELISM", "reward.parts.a.args.keyword"],
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
    ],
)
def test_urls(text: str, shown: str) -> None:
    assert mask_urls(text) == shown


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
