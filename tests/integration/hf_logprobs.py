"""What transformers computes for samples that a run has recorded, with the weights behind them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from rlcore.data.sample import Sample
from rlcore.runs.versions import read_versions
from tests.integration.workspace import Run, Workspace


@torch.no_grad()
def logprobs(folder: Path, samples: Sequence[Sample], temperature: float = 1.0) -> list[Tensor]:
    """Compute the log-probs of each sample's trainable tokens [m], with the weights in `folder`."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    out = []
    for sample in samples:
        tokens = torch.from_numpy(sample.tokens).long()
        logits = model(tokens[None]).logits[0, :-1] / temperature
        of_tokens = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        out.append(of_tokens[torch.from_numpy(sample.loss_mask[1:]).bool()])
    return out


@torch.no_grad()
def scores(folder: Path, sample: Sample) -> Tensor:
    """Compute what the reward model in `folder` says at every position, [T]."""
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    hidden = model.model(torch.from_numpy(sample.tokens).long()[None]).last_hidden_state
    found: Tensor = model.score(hidden)[0, :, 0]
    return found


def policy_before(workspace: Workspace, run: Run, step: int, *, start: Path | None = None) -> Path:
    """A Hugging Face folder of the weights that `step` trained, exported from their checkpoint.

    Args:
        start: of the weights with which the run began; default: those of its model.
    """
    if step == 1:
        return start or workspace.model
    folder = workspace.folder / "exports" / run.folder.name / str(step - 1)
    if not folder.exists():
        assert workspace.command("export", str(run.checkpoint(step - 1)), str(folder)).code == 0
    return folder


def gaps_by_version(
    workspace: Workspace, run: Run, samples: Sequence[Sample], *, start: Path | None = None
) -> dict[int, float]:
    """Compute the largest |log-prob of the engine - log-prob by its version's weights| of a token.

    Args:
        start: see `policy_before`.
    """
    gaps = {}
    for version in read_versions(run.folder / "versions.jsonl"):
        made = [sample for sample in samples if version.version in sample.token_versions()]
        if not made:
            continue
        folder = policy_before(workspace, run, version.step + 1, start=start)
        gaps[version.version] = max(
            float((torch.from_numpy(sample.rollout_logprobs) - found).abs()[own].max())
            for sample, found in zip(made, logprobs(folder, made), strict=True)
            if (own := torch.from_numpy(sample.token_versions() == version.version)).any()
        )
    return gaps
