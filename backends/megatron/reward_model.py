"""A reward model on Megatron-Core: a sequence classifier with one output, in any layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from backends.megatron.cpu.shim import expected_warnings_off, importing_megatron, megatron_device

with importing_megatron():
    from backends.megatron.batch.local_batch import LocalBatch, plan_rules
    from backends.megatron.build import BuildContext
    from backends.megatron.checks.prefixes import choose_prefix_sharing
    from backends.megatron.convert.read import read_architecture
    from backends.megatron.model.head import HeadOptions
    from backends.megatron.model.layers import layers_of
    from backends.megatron.parallel.agreement import broadcast_json
    from backends.megatron.parallel.state import destroy_parallel, init_parallel, init_process_group
    from backends.megatron.training.passes import score_pass
from backends.megatron.policy_checks import check_reward_model
from rlcore.config import Config
from rlcore.config.derived import micro_batch_tokens, pack_multiple
from rlcore.data.batch import RolloutBatch
from rlcore.data.packing.plan import plan_minibatches

_HEAD = HeadOptions(temperature=1.0, chunk_elements=None)  # a value head reads neither


class RewardModel:
    """The classifier in `model.path`, laid out as `policy.parallel` says.

    Construction, `agree` and `score` are collective. Raises ConfigError or ModelError for a layout,
    a field or a folder that does not fit.
    """

    def __init__(self, config: Config, *, device: torch.device) -> None:
        self.config = config
        self.device = device
        timeout_s = config.cluster.collective_timeout_s
        arch = read_architecture(config.model.path, bridge=config.model.bridge)
        check_reward_model(arch)
        self._owns_process_group = init_process_group(device, timeout_s=timeout_s)
        try:
            with megatron_device(device), expected_warnings_off():
                self.parallel = init_parallel(
                    config.policy.parallel, timeout_s=timeout_s, seed=config.run.seed
                )
                context = BuildContext(config, arch, self.parallel, device)
                self._model = context.build(arch, value_head=True)
                context.load(self._model, arch, config.model.path)
        except BaseException:
            self.close()
            raise
        layers = layers_of(config, device.type, latent=arch.latent_attention)
        self._shares_prefixes = choose_prefix_sharing(
            config, transformer_engine=layers.transformer_engine
        ).on
        for module in self._model.modules:
            module.eval()

    @property
    def vocab_size(self) -> int:
        """The symbols that the model knows."""
        return self._model.arch.vocab_size

    @property
    def max_tokens(self) -> int:
        """The tokens of the longest text: a micro-batch has it, and the token behind its end."""
        longest = micro_batch_tokens(self.config) - 1
        return min(longest, self._model.arch.max_position_embeddings)

    @property
    def pass_tokens(self) -> int:
        """The tokens that keep every replica and pipeline stage busy in one pass."""
        stages = self.config.policy.parallel.pipeline
        filled = 1 if stages == 1 else 2 * stages
        return micro_batch_tokens(self.config) * filled * self.parallel.dp_size

    def agree(self, word: str | None) -> str:
        """Send a word of rank 0 to every rank; the others pass None."""
        agreed: str = broadcast_json(word, 0, self.parallel.control_group)
        return agreed

    def score(self, sequences: Sequence[NDArray[np.int32]] | None) -> list[float] | None:
        """The score of each sequence of tokens [T_i], on rank 0; the others pass and get None."""
        batch = None
        plans = None
        if sequences is not None:
            batch = as_batch(sequences)
            rules = plan_rules(
                self.config,
                self.parallel,
                self._model.arch.shape.cost,
                share_prefixes=self._shares_prefixes,
            )
            plans = plan_minibatches(rules, batch, [range(len(sequences))])
        local = LocalBatch(
            batch,
            plans,
            self.parallel,
            self.device,
            pad_multiple=pack_multiple(self.config),
            share_prefixes=self._shares_prefixes,
        )
        with megatron_device(self.device):
            outputs = score_pass(self._model, local.micro_batches(0), _HEAD)
        own = [torch.cat(outputs)] if self.parallel.is_last_stage else None
        scores = local.collect(own, 1)
        return None if scores is None else scores[0].tolist()

    def close(self) -> None:
        """Give up Megatron's groups, and the process group if it was made here."""
        destroy_parallel()
        if self._owns_process_group:
            dist.destroy_process_group()


def as_batch(sequences: Sequence[NDArray[np.int32]]) -> RolloutBatch:
    """The sequences, each with one more token, whose prediction is what a value head is asked for.

    A head reads the state before a token, and a reward model scores the state of the last one. No
    token attends to a later one, so the one behind the end changes nothing.
    """
    lengths = torch.tensor([len(tokens) + 1 for tokens in sequences])
    cu_tokens = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=cu_tokens[1:])
    tokens = torch.zeros(int(cu_tokens[-1]), dtype=torch.int32)
    behind = torch.zeros(len(tokens), dtype=torch.bool)
    behind[cu_tokens[1:] - 1] = True
    tokens[~behind] = torch.from_numpy(np.concatenate(sequences))
    # answers to one question may come together
    together = {"group_ids": torch.zeros(len(lengths), dtype=torch.int64)}
    return RolloutBatch(tokens=tokens, cu_tokens=cu_tokens, loss_mask=behind, vectors=together)
