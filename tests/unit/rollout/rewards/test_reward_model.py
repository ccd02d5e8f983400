"""A reward model folder: scores at the last token whatever the padding, and folders that cannot
serve.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3ForSequenceClassification

from rlcore.config.sections.reward import RewardConfig
from rlcore.errors import ModelError
from rollout.rewards.scorer import build_scorer

VOCAB = 13


def qwen3(num_labels: int = 1) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        head_dim=8,
        num_labels=num_labels,
        pad_token_id=0,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("reward-model")
    Qwen3ForSequenceClassification(qwen3()).save_pretrained(path)
    return path


def scorer(folder: Path, vocab_size: int = VOCAB):
    config = {"parts": {"judge": {"model": {"path": str(folder), "batch_size": 4}}}}
    return build_scorer(RewardConfig.model_validate(config), vocab_size=vocab_size, device="cpu")


def test_scores_equal_one_by_one_without_padding(folder, sample):
    rng = np.random.default_rng(0)
    batch = [sample("x", index=i) for i in range(9)]
    for i, s in enumerate(batch):  # id 0, the folder's pad token, occurs inside and at the end
        s.tokens = np.append(rng.integers(0, VOCAB, 1 + i % 4 * 3), 0).astype(np.int32)
        s.loss_mask = np.zeros(len(s.tokens), np.uint8)

    async def scenario():
        judge = scorer(folder)
        try:
            groups = (batch[:2], batch[2:5], batch[5:])
            return await asyncio.wait_for(
                asyncio.gather(*(judge.score(group) for group in groups)), 30
            )
        finally:
            await judge.close()

    counts = asyncio.run(scenario())
    assert [c.errors for c in counts] == [0, 0, 0]
    model = Qwen3ForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        for s in batch:
            hidden = model.model(torch.from_numpy(s.tokens).long()[None]).last_hidden_state
            assert s.reward == pytest.approx(model.score(hidden)[0, -1, 0].item(), abs=1e-5)
    assert len({round(s.reward, 6) for s in batch}) > 5


def test_a_vocabulary_of_another_size_names_both(folder):
    with pytest.raises(
        ModelError,
        match=rf"reward.parts.judge.model.path.*vocabulary of {VOCAB}, the policy one of 31",
    ):
        scorer(folder, vocab_size=31)


def test_folders_that_are_no_reward_model(tmp_path, caplog):
    with pytest.raises(ModelError, match="missing is not a folder"):
        scorer(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"empty: no config\.json"):
        scorer(tmp_path / "empty")
    Qwen3ForSequenceClassification(qwen3(num_labels=3)).save_pretrained(tmp_path / "three")
    with pytest.raises(ModelError, match="three has 3 outputs, a reward model has 1"):
        scorer(tmp_path / "three")
    Qwen3ForCausalLM(qwen3()).save_pretrained(tmp_path / "language")
    with (
        caplog.at_level(logging.ERROR),
        pytest.raises(ModelError, match=r"lacks the weights of score\.weight"),
    ):
        scorer(tmp_path / "language")
