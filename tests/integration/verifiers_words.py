"""A taskset of `verifiers`, with a harness of its own: no package index, no container."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterable
from typing import Any

import verifiers.v1 as vf

__all__ = ["Echo", "Words"]


class WordData(vf.TaskData):
    """A word to be said, and how it ends."""

    word: str = ""
    fails: bool = False


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def said(self, trace: vf.Trace) -> float:
        """1 for the word."""
        if self.data.fails:
            raise RuntimeError("the judge is ill")
        return float(self.data.word in (trace.last_reply or ""))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Characters of the last reply."""
        return float(len(trace.last_reply or ""))


class Words(vf.Taskset[WordTask]):
    """Three words."""

    def load(self) -> Iterable[WordTask]:
        for word in ("ab", "ba", "aa"):
            data = WordData(
                prompt=f"Say {word}", system_prompt="Be brief.", word=word,
                fails=os.environ.get("WORDS_FAIL") == "1",
            )  # fmt: skip
            yield WordTask(data, self.config.task)


class Echo(vf.Harness[vf.HarnessConfig]):
    """Asks twice: once whole, once streaming, as the package's own programs do."""

    APPENDS_SYSTEM_PROMPT = True
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: Any,
    ) -> vf.ProgramResult:  # fmt: skip
        """Talk to the interception server; every call is recorded there."""
        import asyncio

        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        for stream in (False, True):
            reply = await asyncio.to_thread(_ask, endpoint, secret, ctx.model, messages, stream)
            messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": "?"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


def _ask(endpoint: str, secret: str, model: str, messages: list[Any], stream: bool) -> str:
    body: dict[str, Any] = {"model": model, "messages": messages}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        endpoint.rstrip("/") + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    if not stream:
        return json.loads(text)["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)
