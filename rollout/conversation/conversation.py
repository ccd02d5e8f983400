"""A conversation with the policy: each generated token is stored once and never rendered again."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rlcore.config.sections.rollout import WorkflowConfig
from rlcore.data.generation import Completion, Generate, GenerateRequest, SamplingParams
from rlcore.data.messages import Message, check_messages
from rlcore.data.prompts import Prompt
from rlcore.data.sample import FinishReason, Sample
from rlcore.errors import ConfigError, RolloutFailed, RunFailed
from rollout.conversation.chat_template import ChatTemplate, Kind
from rollout.conversation.reply import Reply
from rollout.conversation.reply_parser import ReplyParser
from rollout.conversation.samples import samples_of
from rollout.conversation.tree import Node, Tree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_LIMIT = 1 << 30  # token limit if the engine enforces its own
FROM_ZERO = ("engine_s", "tool_s", "tool_calls", "tool_errors")  # measured in every conversation


@dataclass(frozen=True)
class WorkflowContext:
    """Gives a workflow, at its construction, the sampling settings and random numbers to use.

    A run constructs several workflows: for training, for evaluation, and for the greedy baseline of
    an estimator that needs it. Their requests differ by `seed` alone.

    Attributes:
        policies: the names in `rollout.policies`.
        policy: the one of them that answers; None: the trained one.
        context: tokens that the engine can hold, prompt and answers together.
        served: the running engines' own limit, which may be smaller; None: unknown.
        chat_kwargs: further variables of the chat template.
    """

    sampling: SamplingParams
    samples_per_prompt: int
    seed: int
    tokenizer: PreTrainedTokenizerBase
    settings: WorkflowConfig = field(default_factory=WorkflowConfig)
    context: int = NO_LIMIT
    served: Callable[[], int | None] = lambda: None
    chat_kwargs: Mapping[str, Any] = field(default_factory=dict)
    tool_parser: str = "auto"
    policies: tuple[str, ...] = ()
    policy: str | None = None

    def conversation(
        self,
        prompt: Prompt,
        draw: int,
        index: int,
        generate: Generate,
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> Conversation:
        """Begin a conversation with the prompt of a row; a text prompt continues by tokens only.

        `tools` are added to those of the row. (draw, index) is the address of the rollout.
        """
        return Conversation(self, prompt, draw, index, generate, tools=tools)

    @property
    def max_total_tokens(self) -> int:
        """Token limit of prompt and answers together."""
        served = self.served()
        return self.context if served is None else min(self.context, served)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template that renders the messages of all conversations."""
        return ChatTemplate(
            self.tokenizer, self.sampling.stop_token_ids, chat_kwargs=self.chat_kwargs
        )

    @cached_property
    def parse(self) -> ReplyParser:
        """The parser of the model's replies."""
        return ReplyParser(self.tokenizer, self.tool_parser, head=self.template.head)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Decode tokens, including special ones."""
        # bypass the Python wrapper of the tokenizer, which costs more than the decoding
        if self.tokenizer.is_fast:
            backend = self.tokenizer.backend_tokenizer
            return str(backend.decode(tokens.tolist(), skip_special_tokens=False))
        return str(self.tokenizer.decode(tokens.tolist(), clean_up_tokenization_spaces=False))


@dataclass
class _Shared:
    """State that the branches of a rollout share."""

    context: WorkflowContext
    prompt: Prompt
    draw: int
    index: int
    generate: Generate
    tree: Tree = field(default_factory=Tree)
    made: int = 0  # tokens generated so far
    aborted: bool = False  # an engine aborted a turn: the draw is made again
    finish_reasons: dict[Node, FinishReason] = field(default_factory=dict)
    measured: dict[str, float] = field(default_factory=lambda: dict.fromkeys(FROM_ZERO, 0.0))


class Conversation:
    """One branch of a rollout; the first branch begins with the prompt of a row.

    Calls of one branch alternate: `generate`, then `append` or `fork`, then `generate`. Branches
    may run concurrently. `WorkflowContext.conversation` makes the first one.
    """

    def __init__(
        self,
        context: WorkflowContext,
        prompt: Prompt,
        draw: int,
        index: int,
        generate: Generate,
        *,
        tools: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._shared = _Shared(context, prompt, draw, index, generate)
        if tools and prompt.messages is None:
            raise _no_chat("tools")
        self._messages = [dict(message) for message in prompt.messages or ()]
        # last node of this branch, and the tokens of its whole path
        self._node: Node | None = None
        self._tokens = prompt.tokens
        # the last request and its answer
        self._sent = prompt.tokens[:0]
        self.tools: tuple[dict[str, Any], ...] = (*prompt.tools, *tools)
        # the tokens lack some messages or tools, so all messages must be rendered again
        self._stale = bool(tools)

    @property
    def messages(self) -> list[Message]:
        """All messages so far, including the model's."""
        return list(self._messages)

    @property
    def turns(self) -> int:
        """Number of model turns in this rollout so far, over all branches."""
        return self._shared.tree.turns

    @property
    def branches(self) -> int:
        """Number of branches, without the first, that have a turn of their own."""
        return self._shared.tree.branches

    @property
    def tokens_left(self) -> int:
        """Number of tokens that the model may write in its next turn."""
        return self._budget()[0]

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of each turn."""
        return self._shared.context.sampling

    @property
    def policies(self) -> tuple[str, ...]:
        """The names in `rollout.policies`, which may take a turn."""
        return self._shared.context.policies

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The tokens of this branch so far, [T]: the prefix of the next request."""
        return self._tokens

    @property
    def completion(self) -> Completion | None:
        """The engine's completion of the last turn; None if the model has not just answered."""
        return None if self._node is None else self._node.completion

    async def generate(
        self,
        max_new_tokens: int | None = None,
        *,
        stop: Sequence[str] = (),
        policy: str | None = None,
    ) -> Reply:
        """Let the model take its turn.

        Args:
            max_new_tokens: limit of this turn, if smaller than the run's.
            stop: texts that end the turn, in addition to the run's.
            policy: of `rollout.policies`: who takes the turn, which is not trained on; default: the
                policy of the rollout.

        If a budget leaves no token, no request is made: the reply is empty, and its `finish_reason`
        names the budget ("context", "length" or "turns").

        A `finish_reason` of "abort" says that an engine aborted the turn: end the rollout, whose
        draw is made again.

        Raises:
            RunFailed: the last message is the model's own.
        """
        shared = self._shared
        if self._answered():
            raise RunFailed(
                "conversation: the model has just answered; append messages before it continues"
            )
        self._begin()
        self._check_append_only()
        left, limit = self._budget()
        sampling = shared.context.sampling
        asked = sampling.max_new_tokens
        size = min(asked if max_new_tokens is None else min(asked, max_new_tokens), left)
        if size < 1:
            self.end(limit)
            return Reply("", "", (), limit, 0)
        if size != asked or stop:
            sampling = replace(sampling, max_new_tokens=size, stop=(*sampling.stop, *stop))
        request = GenerateRequest(
            self._tokens,
            sampling,
            shared.draw,
            first_sample=shared.index,
            turn=shared.tree.take_turn(),
            seed=seed_of(shared.context.seed, policy),
            policy=policy or shared.context.policy,
        )
        parent = self._node
        assert parent is not None
        completion = await self._completed(request)
        reason = completion.finish_reason
        if reason == "length" and size == left:
            # the limit leaves no room for another turn
            reason = limit
        reply = self._read(completion.tokens)
        shared.made += len(completion.tokens)
        self._node = shared.tree.turn(parent, request.turn, completion, reply.message)
        if policy is not None:
            self._node.dropped = policy
        shared.finish_reasons[self._node] = reason
        self._messages.append(reply.message)
        self._shared.aborted |= reason == "abort"
        self._tokens = np.concatenate([self._tokens, completion.tokens])
        self._sent = self._tokens
        return replace(reply, finish_reason=reason, tokens_left=self.tokens_left)

    async def _completed(self, request: GenerateRequest) -> Completion:
        began = time.perf_counter()
        (completion,) = await self._shared.generate(request)
        self.measure("engine_s", time.perf_counter() - began)
        if (cached := completion.cached_tokens) is not None:
            self.measure("cached_tokens", cached)
            self.measure("prefilled_tokens", len(request.prompt) - cached)
        return completion

    async def append(self, messages: Sequence[Message]) -> None:
        """Add messages after the model's turn: all results of tools at once, or other messages.

        Raises:
            ConfigError: the template would change earlier turns and `history` is not set, or the
                template refuses the messages.
        """
        new = check_messages("conversation", "messages", messages)
        if not new:
            return
        if self._shared.prompt.messages is None:
            raise _no_chat("messages")
        self._messages += new
        # before the first turn, the new messages are rendered with the prompt
        if self._node is None:
            self._stale = True
            return
        if not self._answered():
            raise RunFailed(
                "conversation: append all messages between two turns in one call, as a template"
                " renders neighbours together"
            )
        if self._changes_the_past("tool" if all(m["role"] == "tool" for m in new) else "user"):
            self._render_again()
            return
        tokens = self._shared.context.template.suffix(
            new, self.tools, last_token=int(self._tokens[-1]) if len(self._tokens) else None
        )
        self._node = self._shared.tree.context(self._node, tokens, new)
        self._tokens = np.concatenate([self._tokens, tokens])

    def append_tokens(self, tokens: Sequence[int] | NDArray[np.int32]) -> None:
        """Add context as tokens, for a model without a chat template."""
        self._begin()
        added = np.asarray(tokens, dtype=np.int32)
        self._node = self._shared.tree.context(self._node, added, ())
        self._tokens = np.concatenate([self._tokens, added])

    def reward(self, value: float) -> None:
        """Reward the last turn at its last token; several rewards add up."""
        turn = self._turn_to("reward")
        turn.reward = (turn.reward or 0.0) + float(value)

    def discard(self, reason: str) -> None:
        """Do not train on the last turn: its tokens become context, or belong to no sample.

        Args:
            reason: a word; `conversation/untrained_<reason>` counts the tokens.
        """
        self._turn_to("discard").dropped = reason

    def measure(self, name: str, value: float) -> None:
        """Add to a measurement of the rollout, averaged as the metric `conversation/<name>`."""
        measured = self._shared.measured
        measured[name] = measured.get(name, 0.0) + float(value)

    def fork(
        self,
        messages: Sequence[Message] | None = None,
        *,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> Conversation:
        """Begin a branch that shares all turns so far; it counts once both branches have continued.

        Args:
            messages: continue with these instead, rendered again, for a compacted history. Model
                turns that they quote are context there.
            tools: JSON schemas for the rendering of `messages`; default: those of this branch.
        """
        branch = Conversation.__new__(Conversation)
        branch.__dict__.update(self.__dict__)
        branch._messages = list(self._messages)
        if messages is not None:
            branch._messages = check_messages("conversation", "messages", messages)
            branch.tools = self.tools if tools is None else tuple(tools)
            branch._render_again()
        return branch

    def samples(self, outcome: float | Mapping[str, float] | None = None) -> list[Sample]:
        """The samples of the whole rollout, one for each leaf of its branches.

        Args:
            outcome: reward of the rollout, or several rewards by name, for parts with
                `source: workflow`.

        Raises:
            RolloutFailed: no turn of the model is left to train on.
        """
        shared = self._shared
        if isinstance(outcome, int | float):
            outcome = {"reward": float(outcome)}
        counts = {"turns": float(self.turns), "branches": float(self.branches)}
        found = samples_of(
            shared.tree,
            shared.prompt,
            shared.draw,
            shared.index,
            outcome={name: float(value) for name, value in (outcome or {}).items()},
            finish_reasons=shared.finish_reasons,
            measured={**shared.measured, **counts},
        )
        if not found:
            turns = sum(node.turn is not None for node in shared.tree.nodes)
            why = f"all {turns} were discarded" if turns else "the model was never asked"
            if not turns and shared.tree.nodes and not self.tokens_left:
                room = shared.context.max_total_tokens
                why = f"{len(self._tokens)} tokens of messages and tools leave no room in {room}"
            raise RolloutFailed("result", f"there is no turn of the model to train on: {why}")
        for sample in found if shared.aborted else ():
            sample.finish_reason = "abort"
        return found

    def end(self, reason: FinishReason) -> None:
        """Set the reason for which the rollout ends here, if the model itself did not end it."""
        if self._node is not None:
            last = self._node if self._node.turn is not None else self._node.parent
            if last is not None and last.turn is not None:
                self._shared.finish_reasons[last] = reason

    def _answered(self) -> bool:
        return self._node is not None and self._node.turn is not None

    def _turn_to(self, act: str) -> Node:
        """The turn that was just made."""
        if self._node is None or self._node.turn is None:
            raise RunFailed(f"conversation: there is no turn to {act}; call it after generate()")
        return self._node

    def _begin(self) -> None:
        """Create the root of this branch, if it has none.

        If a new rendering begins with tokens that the model has seen and written, the branch
        continues from those tokens, and trains on them.
        """
        if self._node is not None:
            return
        if self._stale:
            self._tokens = self._shared.context.template.prompt(self._messages, self.tools)
            self._stale = False
        tree = self._shared.tree
        parent = tree.last_turn_in(self._tokens, len(self._messages))
        known = [] if parent is None else parent.path()
        rest = self._tokens[sum(len(node.tokens) for node in known) :]
        said = sum(len(node.messages) for node in known)
        self._node = tree.context(parent, rest, self._messages[said:])

    def _render_again(self) -> None:
        """Continue from a new rendering of all messages."""
        self._node = None
        self._stale = True
        self._sent = self._sent[:0]

    def _changes_the_past(self, kind: Kind) -> bool:
        """Whether such messages require a branch. Raises ConfigError if `history` is not set."""
        context = self._shared.context
        history = context.settings.history
        if history == "keep" or context.template.keeps_the_past(kind, self.tools):
            return False
        if history == "branch":
            return True
        raise ConfigError(
            f"rollout.workflow.history: the chat template of {context.tokenizer.name_or_path!r}"
            f" changes earlier turns of the model where a {kind} message follows (it drops their"
            " thoughts, say). Choose keep, to go on from what the model saw and wrote, or branch,"
            " to render all messages again, which begins a new sample"
        )

    def _budget(self) -> tuple[int, FinishReason]:
        """The number of tokens left for the next turn, and the budget that limits it."""
        shared = self._shared
        limits = shared.context.settings
        if limits.max_turns is not None and shared.tree.turns >= limits.max_turns:
            return 0, "turns"
        room = max(0, shared.context.max_total_tokens - len(self._tokens))
        if limits.max_tokens is not None:
            left = max(0, limits.max_tokens - shared.made)
            if left < room:
                return left, "length"
        return room, "context"

    def _read(self, tokens: NDArray[np.int32]) -> Reply:
        context = self._shared.context
        ended = bool(len(tokens)) and int(tokens[-1]) in context.sampling.stop_token_ids
        text = context.decode(tokens[:-1] if ended else tokens)
        head = context.decode(self._tokens[-64:]) if context.parse.reads_sent else ""
        return context.parse(head, text, self.tools)

    def _check_append_only(self) -> None:
        # compare bytes: numpy takes four times as long for a few hundred tokens
        if self._tokens[: len(self._sent)].tobytes() != self._sent.tobytes():
            raise RunFailed(
                "conversation: the next request does not begin with the tokens that the model was"
                " sent and wrote; this is a bug in rlcore"
            )


def seed_of(seed: int, policy: str | None) -> int:
    """Return the seed of a policy's turns, which may have the address of another policy's."""
    return seed if policy is None else seed + zlib.crc32(policy.encode())


def _no_chat(what: str) -> ConfigError:
    return ConfigError(
        f"rollout.workflow: {what} need a chat, and the prompts are texts: set data.as_chat: true,"
        " or give rows with messages"
    )
