"""Defines the context that a workflow is built with."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import Generate, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.errors import ConfigError
from rollout.conversation.chat_template import ChatTemplate
from rollout.conversation.conversation import Conversation, Rules
from rollout.conversation.parsing import ReplyParser

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


NO_LIMIT = 1 << 30  # tokens of an engine that knows its own limit


def bound_options(workflow: type, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys of `rollout.workflow` as the constructor of a workflow gets them.

    Raises:
        ConfigError: it does not take them.
    """
    try:
        return inspect.signature(workflow).bind(None, **options).arguments
    except TypeError as error:
        raise ConfigError(f"rollout.workflow: {name}: {error}") from error


@dataclass(frozen=True)
class WorkflowContext:
    """Tells a workflow, at its construction, how to sample and which random numbers to use.

    A run constructs several workflows: for training, for evaluation, and for the greedy baseline of
    an estimator that needs it. Only `seed` tells their requests apart.
    """

    sampling: SamplingParams
    samples_per_prompt: int
    seed: int
    tokenizer: PreTrainedTokenizerBase
    settings: WorkflowConfig = field(default_factory=WorkflowConfig)
    context: int = NO_LIMIT  # tokens of prompt and answers that the engine takes
    served: Callable[[], int | None] = lambda: None  # ... as the engines say, once they run
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of the chat template
    tool_parser: str = "auto"

    def conversation(
        self,
        prompt: Prompt,
        draw: int,
        index: int,
        generate: Generate,
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Conversation:
        """Begin a conversation with the prompt of a row; a text is continued by tokens alone.

        Args:
            draw, index: address of the rollout.
            tools: beside those of the row.
        """
        return Conversation(self.rules, prompt, draw, index, generate, tools=tools)

    @cached_property
    def rules(self) -> Rules:
        """What all conversations of this workflow have in common."""
        template = ChatTemplate(
            self.tokenizer, self.sampling.stop_token_ids, chat_kwargs=self.chat_kwargs
        )
        parse = ReplyParser(self.tokenizer, self.tool_parser, head=template.head)
        return Rules(
            sampling=self.sampling,
            seed=self.seed,
            template=template,
            parse=parse,
            reads_sent=parse.reads_sent,
            decode=self._decode,
            context=self.context,
            max_tokens=self.settings.max_tokens,
            max_turns=self.settings.max_turns,
            history=self.settings.history,
            served=self.served,
        )

    def _decode(self, tokens: NDArray[np.int32]) -> str:
        """Return the text of tokens, special ones included."""
        if self.tokenizer.is_fast:  # what lies before it costs more than the decoding
            backend = self.tokenizer.backend_tokenizer
            return str(backend.decode(tokens.tolist(), skip_special_tokens=False))
        return str(self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))
