"""Opens the rollout service in a child of rank 0, under the launchers local and torchrun."""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from rlcore.config import Config
from rlcore.config.derived import has_service_process
from rlcore.launch.compose import OpenService, RolloutHandles
from rlcore.launch.process import Process
from rlcore.launch.service.child_channel import ChildChannel
from rlcore.launch.service.handles import open_remote_service

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def begin_own_process(config: Config, stack: ExitStack) -> OpenService | None:
    """Start the service's process on rank 0, and return what opens the service in it.

    None where the service is in rank 0's process, and on other ranks. The process imports while
    this one joins the others and reads its input.

    Args:
        stack: ends the process.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank != 0 or not has_service_process(config, int(os.environ.get("WORLD_SIZE", "1"))):
        return None
    channel = ChildChannel()
    stack.callback(channel.close)

    def open_service(
        config: Config,
        process: Process,
        tokenizer: PreTrainedTokenizerBase,
        stack: ExitStack,
        *,
        greedy_baseline: bool,
    ) -> RolloutHandles:
        channel.begin(config, process.world_size)
        stack.callback(channel.close)
        return open_remote_service(
            channel, config, process, tokenizer, stack, greedy_baseline=greedy_baseline
        )

    return open_service
