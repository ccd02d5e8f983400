"""What every engine keeps when it generates."""

from __future__ import annotations

import numpy as np

from rlcore.algorithms.testing.contract import Rule
from rlcore.data.generation import Completion, GenerateRequest, Prefix
from rlcore.errors import UserError
from rollout.engines.testing.session import Session

COMPLETIONS = Rule(
    "completions",
    "generate returns n completions a request, in the order of the requests",
    "sort answers back into the order in which they were asked",
)
TOKENS = Rule(
    "tokens",
    "tokens are int32 [m] inside the vocabulary, at most max_new_tokens of them",
    "return token ids as the model's, new tokens only, and cut at max_new_tokens",
)
LOGPROBS = Rule(
    "logprobs",
    "log-probs are float32 [m], finite and at most 0",
    "return the log-prob of each token that was drawn, of logits / temperature",
)
FINISH = Rule(
    "finish-reasons",
    "a response ends by 'stop' at a stop token, which is kept, or by 'length' at max_new_tokens",
    "keep the stop token as the last token, and report why the response ended",
)
VERSIONS = Rule(
    "versions",
    "version spans cover all tokens of a completion, in order, with the version that made them",
    "stamp each token with the version of set_version that was in force",
)
PREFIXES = Rule(
    "prefixes",
    "a completion behind a prefix holds what is new; max_new_tokens counts the prefix too",
    "feed prompt and prefix to the model, and make max_new_tokens - len(prefix) tokens",
)
REPEATABLE = Rule(
    "repeatable",
    "the same request gives the same tokens and log-probs; another sample index gives others",
    "draw each random number from (seed, draw, sample, turn, position), or state"
    " EngineKind(repeatable=False)",
)
BAD_REQUEST = Rule(
    "bad-request",
    "a request that no engine can serve is UserError, so that no other engine is asked",
    "check the request first, as rollout.engines.checks.check_request does",
)


async def completions(session: Session) -> None:
    """Each request is recognized by the length that it asks for."""
    lengths = [3, 1, 4]
    requests = [
        session.request(draw, n=1 + draw % 2, max_new_tokens=length)
        for draw, length in enumerate(lengths)
    ]
    answers = await session.generate(*requests)
    for length, made in zip(lengths, answers):
        got = [len(completion.tokens) for completion in made]
        session.expect(
            got == [length] * len(made),
            f"responses of {got} tokens",
            f"{length} tokens, as max_new_tokens says where nothing stops",
        )


async def tokens(session: Session) -> None:
    """Types, ranges and lengths of tokens."""
    for request, completion in await _sampled(session):
        made = completion.tokens
        session.expect(
            isinstance(made, np.ndarray) and made.dtype == np.int32 and made.ndim == 1,
            f"{type(made).__name__} {getattr(made, 'dtype', '')} {getattr(made, 'shape', '')}",
            "a numpy array, int32 [m]",
        )
        inside = not len(made) or (made.min() >= 0 and made.max() < session.vocab_size)
        session.expect(bool(inside), made.tolist(), f"tokens from 0 to {session.vocab_size - 1}")
        limit = request.sampling.max_new_tokens
        session.expect(len(made) <= limit, f"{len(made)} tokens", f"at most {limit}")


async def logprobs(session: Session) -> None:
    """Types, ranges and lengths of log-probs, at several temperatures."""
    for _, completion in await _sampled(session):
        made = completion.logprobs
        session.expect(
            isinstance(made, np.ndarray) and made.dtype == np.float32,
            f"{type(made).__name__} {getattr(made, 'dtype', '')}",
            "a numpy array, float32",
        )
        wanted = completion.tokens.shape
        session.expect(made.shape == wanted, f"shape {made.shape}", f"{wanted}, one a token")
        good = bool(np.isfinite(made).all() and (made <= 0).all())
        session.expect(good, made.tolist(), "finite numbers, at most 0")


async def finish_reasons(session: Session) -> None:
    """A greedy response is stopped at its own first token."""
    full = await session.one(session.request(7, temperature=0.0))
    session.expect(full.finish_reason == "length", repr(full.finish_reason), "'length'")
    first = int(full.tokens[0])
    cut = await session.one(session.request(7, temperature=0.0, stop_token_ids=(first,)))
    got = f"{cut.tokens.tolist()}, {cut.finish_reason!r}"
    stopped = cut.tokens.tolist() == [first] and cut.finish_reason == "stop"
    session.expect(stopped, got, f"[{first}], 'stop': {first} is a stop token")


async def versions(session: Session) -> None:
    """All tokens are of the version that is in force."""
    for _, completion in await _sampled(session):
        spans = [(span.version, span.start, span.end) for span in completion.versions]
        wanted = [(session.version, 0, len(completion.tokens))]
        session.expect(spans == wanted, f"(version, start, end) {spans}", f"{wanted}")


async def prefixes(session: Session) -> None:
    """The rest of a greedy response is asked for, behind its first tokens."""
    full = await session.one(session.request(8, temperature=0.0))
    prefix = Prefix(0, full.tokens[:2])
    rest = await session.one(session.request(8, temperature=0.0, prefixes=[prefix]))
    length = len(full.tokens) - 2
    session.expect(len(rest.tokens) == length, f"{len(rest.tokens)} tokens", f"{length}")
    if session.kind.repeatable:
        wanted = full.tokens[2:].tolist()
        session.expect(rest.tokens.tolist() == wanted, rest.tokens.tolist(), f"{wanted}")


async def repeatable(session: Session) -> None:
    """The same call twice; and samples that only their index tells apart."""
    request = session.request(9, n=4, max_new_tokens=8)
    first, second = [(await session.generate(request))[0] for _ in range(2)]
    for one, other in zip(first, second):
        same = one.tokens.tolist() == other.tokens.tolist()
        same = same and one.logprobs.tolist() == other.logprobs.tolist()
        session.expect(same, f"{other.tokens.tolist()}", f"{one.tokens.tolist()}, as before")
    alone = await session.one(session.request(9, first=2, max_new_tokens=8))
    wanted = first[2].tokens.tolist()
    session.expect(alone.tokens.tolist() == wanted, f"{alone.tokens.tolist()}", f"{wanted}")
    different = {tuple(completion.tokens.tolist()) for completion in first}
    session.expect(len(different) > 1, "four samples that are all alike", "different samples")


async def bad_request(session: Session) -> None:
    """A prompt outside the vocabulary."""
    request = session.request(1)
    request.prompt[0] = session.vocab_size
    await session.refused(
        f"generate, with the prompt token {session.vocab_size},",
        session.engine.generate([request]),
        UserError,
    )
    await session.one(session.request(1))  # the engine is none the worse for it


async def _sampled(session: Session) -> list[tuple[GenerateRequest, Completion]]:
    """Requests at several temperatures, with their completions."""
    requests = [
        session.request(draw, n=2, temperature=temperature)
        for draw, temperature in enumerate((1.0, 0.7, 0.0))
    ]
    answers = await session.generate(*requests)
    return [(request, one) for request, made in zip(requests, answers) for one in made]
