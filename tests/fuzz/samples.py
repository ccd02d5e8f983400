"""Samples that workflows return, and rewards that workers, services and judges answer.

A sample that cannot be fails its rollout; a reward that is none is `reward.on_error`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orjson

from rlcore.config.sections.reward import RewardConfig
from rlcore.config.sections.reward_services import JudgeConfig, RewardServiceConfig
from rlcore.config.sections.root import Config
from rlcore.data.batch import RolloutBatch
from rlcore.data.generation import Completion, Generate, GenerateRequest, SamplingParams
from rlcore.data.prompts import Prompt
from rlcore.data.sample import Sample, SamplingMasks, VersionSpan
from rlcore.launch.commands.init_model import ALPHABETS, char_tokenizer
from rlcore.runs.rollouts import decode_samples, encode_samples
from rollout.collection.group_runner import GroupRunner
from rollout.conversation.samples import make_sample
from rollout.json_client import NoAnswer
from rollout.rewards.base import RewardPart, Score
from rollout.rewards.pool import Worker
from rollout.rewards.scorer import Scorer, build_scorer
from rollout.rewards.services import JudgePart, ServicePart
from rollout.rewards.worker import pack
from rollout.workflows.context import WorkflowContext
from tests.fuzz.harness import ACCEPTED, Case, Target
from tests.fuzz.mutation import ODD_NUMBERS, Mutator, written
from tests.fuzz.oracle import check_sample, need

TOKENIZER = char_tokenizer(ALPHABETS["addition"])
VOCAB = len(TOKENIZER)
VERSIONS = (4, 5)
TEXT = "12+34="
PROMPT = Prompt(
    "rows.jsonl:1", np.array(TOKENIZER(TEXT)["input_ids"], np.int32), TEXT, "46", {"level": 1}
)


def made_samples() -> list[Sample]:
    """Return the samples of one draw."""
    request = GenerateRequest(PROMPT.tokens, SamplingParams(8), 3, n=2)
    return [make_sample(PROMPT, 3, index, one) for index, one in enumerate(completions(request))]


class Broken:
    """A workflow that breaks what it has made; a case sets how."""

    change: Callable[[list[Sample]], Any]

    def __init__(self, context: WorkflowContext) -> None:
        self.context = context

    async def __call__(self, prompt: Prompt, draw: int, generate: Generate) -> Any:
        """See `rlcore.interfaces.Workflow`."""
        request = GenerateRequest(prompt.tokens, self.context.sampling, draw, n=2)
        made = enumerate(await generate(request))
        return type(self).change([make_sample(prompt, draw, i, one) for i, one in made])


async def generate(request: GenerateRequest) -> list[Completion]:
    """Answer as an engine does."""
    return completions(request)


def completions(request: GenerateRequest) -> list[Completion]:
    """Return what an engine made that took new weights in the middle."""
    tokens = np.array([7, 8, 2], dtype=np.int32)
    spans = (VersionSpan(VERSIONS[0], 0, 1), VersionSpan(VERSIONS[1], 1, 3))
    logprobs = np.array([-0.1, -1e-7, -3.0], dtype=np.float32)
    masks = SamplingMasks(np.array([7, 9, 2], np.int32), np.array([2, 0, 1], np.int32))
    return [Completion(tokens, logprobs, "stop", spans, masks) for _ in range(request.n)]


def broken_array(mutator: Mutator, array: Any) -> Any:
    """Return an array of another type, shape or content."""
    random = mutator.random
    changed = array.copy()
    kind = random.choice(("value", "value", "dtype", "shape", "list", "none", "object"))
    if kind == "value" and len(array):
        number = random.choice([one for one in ODD_NUMBERS if abs(one) < 2**31 or one != one])
        with np.errstate(all="ignore"):
            value = np.asarray(number, dtype=np.float64).astype(array.dtype)
        changed[random.randrange(len(array))] = value
        return changed
    if kind == "dtype":
        return array.astype(random.choice(("i8", "f8", "u1", "f2", "i2", "?", "c16", "S3")))
    if kind == "shape":
        return random.choice((array[:-1], array[None], array[:0], np.concatenate([array, array])))
    return {"list": array.tolist(), "none": None}.get(kind, array.astype(object))


def broken_samples(mutator: Mutator, samples: list[Sample]) -> Any:
    """Return samples with fields that cannot be, or something else than samples."""
    if mutator.keep:
        return samples
    mutator.changed = True
    random = mutator.random
    if random.random() < 0.05:
        return random.choice(
            (None, (), [], samples[0], tuple(samples), [*samples, None], iter(samples), samples * 2)
        )
    for _ in range(random.choice((1, 1, 2))):
        sample = random.choice(samples)
        name = random.choice(Sample.__slots__)
        value = getattr(sample, name)
        if isinstance(value, np.ndarray):
            setattr(sample, name, broken_array(mutator, value))
        elif name == "sampling_mask" and value is not None and random.random() < 0.8:
            arrays = [copy.copy(value.tokens), copy.copy(value.counts)]
            at = random.randrange(2)
            arrays[at] = broken_array(mutator, arrays[at])
            sample.sampling_mask = SamplingMasks(*arrays)
        elif name == "versions" and random.random() < 0.8:
            rows = mutator.value([[span.version, span.start, span.end] for span in value])
            sample.versions = tuple(VersionSpan(*row) for row in rows)
        else:
            setattr(sample, name, mutator.odd(value))
    return samples


@contextmanager
def open_samples() -> Iterator[Case]:
    """A runner of groups, whose workflow is broken."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({"vocab_size": VOCAB}))
        config = Config.model_validate(
            {
                "run": {"name": "fuzz"},
                "model": {"path": folder},
                "data": {"paths": ["none.jsonl"]},
                "training": {"steps": 1},
                "rollout": {
                    "prompts_per_step": 1,
                    "samples_per_prompt": 2,
                    "workflow": {"name": f"{__name__}:Broken", "retries": 0},
                    "sampling": {"max_new_tokens": 8},
                    "engine": {"kind": "sglang"},
                },
            }
        )
        sampling = SamplingParams(max_new_tokens=8)
        context = WorkflowContext(sampling, 2, 0, TOKENIZER, settings=config.rollout.workflow)
        scorer = build_scorer(config.reward)
        dispatcher: Any = SimpleNamespace(one=generate)
        runner = GroupRunner(config, dispatcher, scorer, context)
        loop = asyncio.new_event_loop()

        def case(mutator: Mutator) -> str:
            Broken.change = lambda samples: broken_samples(mutator, samples)
            work = runner.run({3: PROMPT})
            [group] = loop.run_until_complete(asyncio.wait_for(work, 10))
            if group.failures:
                assert not group.samples
                return f"RolloutFailed ({group.failures[0].kind})"
            return trained_on(group.samples)

        yield case
        loop.close()


def trained_on(samples: Sequence[Sample]) -> str:
    """Check samples that got through, and do with them what a run does next."""
    for sample in samples:
        check_sample(sample, vocab_size=VOCAB, versions=VERSIONS)
        need(sample.draw == sample.group_id == 3, f"draw {sample.draw}, group {sample.group_id}")
    need(len({sample.sequence_id for sample in samples}) == len(samples), "two of one address")
    RolloutBatch.from_samples(samples, reward_parts=["a"])
    for before, after in zip(samples, decode_samples(encode_samples(samples)), strict=True):
        need(before.tokens.tolist() == after.tokens.tolist(), "tokens changed on the disk")
        need(before.versions == after.versions, "versions changed on the disk")
    return ACCEPTED


# --- rewards --------------------------------------------------------------------------------------


class Answered:
    """A server's client that got `content`."""

    content = b""

    async def post(self, *_: Any) -> Any:
        """Read the answer as `JsonClient` does; `http_answers` tests that one itself."""
        try:
            return orjson.loads(self.content)
        except orjson.JSONDecodeError as error:
            raise NoAnswer(f"no JSON: {error}", again=False) from error


class Writes(Worker):
    """A worker whose process wrote `content` into its socket, and ended."""

    content = b""
    breaks_frame = False
    mutator: Mutator

    async def _exchange(self, message: Any) -> dict[str, Any]:
        frame = pack(self.content.replace(b"IDENTITY", message[0].encode()))
        self.reader = asyncio.StreamReader()
        self.reader.feed_data(self.mutator.bytes(frame) if self.breaks_frame else frame)
        self.reader.feed_eof()
        return await self._receive()

    async def kill(self) -> int | None:
        """There is no process to end."""
        return -9

    end = kill


class OfWorker(RewardPart):
    """The part of a pool with one worker."""

    def __init__(self, worker: Writes) -> None:
        self.worker = worker

    async def score(self, samples: Sequence[Sample]) -> list[Score]:
        """See `RewardPart`."""
        return [await self.worker.call("a", sample, 60.0) for sample in samples]


VERDICT = {"score": 0.5, "correct": True, "parts": {"form": 1.0}, "info": {"why": "good"}}
SERVICES: dict[str, tuple[dict[str, Any], Any]] = {
    "slime": ({"format": "slime"}, 0.5),
    "slime by key": ({"format": "slime", "key": "reward"}, {"reward": VERDICT}),
    "openrlhf": ({"format": "openrlhf", "batch_size": 4}, {"rewards": [0.5, 0.5]}),
    "sglang": ({"format": "sglang", "batch_size": 4}, [{"embedding": [0.5]}] * 2),
}
RATING = {"choices": [{"message": {"role": "assistant", "content": "It is fine. [[5]]"}}]}


@contextmanager
def open_rewards() -> Iterator[Case]:
    """A scorer with one part, whose maker answers broken rewards."""
    config = RewardConfig.model_validate({"parts": {"a": {"function": "exact_match"}}})
    loop = asyncio.new_event_loop()

    async def score(part: RewardPart) -> str:
        samples = made_samples()
        counts = await Scorer(config, {"a": part}).score(samples)
        for sample in samples:
            for name, value in sample.reward_parts.items():
                need(isinstance(name, str) and type(value) is float, f"{name}: {value!r}")
                need(math.isfinite(value) and abs(value) < 3.5e38, f"{name}: {value!r}")
            correct = sample.metadata.get("correct")
            need(correct is None or type(correct) is bool, f"correct {correct!r}")
        trained_on(samples)
        return "reward.on_error" if counts.errors or counts.timeouts else ACCEPTED

    def part_of(mutator: Mutator) -> RewardPart:
        kind = mutator.random.choice(("worker", "judge", *SERVICES))
        if kind == "worker":
            worker = Writes(process=None, reader=None, writer=None)  # type: ignore[arg-type]
            worker.mutator = mutator
            worker.breaks_frame = mutator.random.random() < 0.3
            answer = {"id": "IDENTITY", **VERDICT}
            worker.content = written(answer) if worker.breaks_frame else mutator.document(answer)
            return OfWorker(worker)
        client: Any = Answered()
        part: Any
        if kind == "judge":
            part = JudgePart("a", JudgeConfig(url=["http://127.0.0.1:1"], model="judge"))
            client.content = mutator.document(RATING)
        else:
            options, answer = SERVICES[kind]
            part = ServicePart("a", RewardServiceConfig(url=["http://127.0.0.1:1"], **options))
            client.content = mutator.document(answer)
        part._client = client
        return part  # type: ignore[no-any-return]

    def case(mutator: Mutator) -> str:
        work = score(part_of(mutator))
        return loop.run_until_complete(asyncio.wait_for(work, 10))

    yield case
    loop.close()


TARGETS = (Target("workflow-samples", open_samples), Target("rewards", open_rewards))
