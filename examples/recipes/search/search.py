"""A tool that searches documents, for Search-R1's task.

It asks a retrieval server as Search-R1's own: POST {"queries", "topk", "return_scores"} is answered
by {"result": [[{"document": {"contents"}, "score"}, ...]]}. A server that is down is asked again,
then fails the rollout: the model is never told of it.
"""

from __future__ import annotations

from typing import Any

from rollout.json_client import JsonClient, NoAnswer

ANSWER_BYTES = 16 << 20


class Search:
    """One instance a rollout.

    Args:
        url: of the retrieval server, or several, which are asked in turns.
        topk: documents of a query.
        timeout_s: of one request.
    """

    def __init__(
        self,
        *,
        url: str | list[str] = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout_s: float = 15.0,
    ) -> None:
        self._topk = topk
        self._client = JsonClient(
            [url] if isinstance(url, str) else url,
            where="rollout.workflow.options.url",
            timeout_s=timeout_s,
            retries=2,
            concurrency=8,
            answer_bytes=ANSWER_BYTES,
        )

    async def search(self, query: str) -> str:
        """Search Wikipedia.

        Args:
            query: what to look for
        """
        body = {"queries": [query], "topk": self._topk, "return_scores": True}
        documents: list[str] = await self._client.post(body, read=_documents)
        return "\n".join(map(_shown, range(1, len(documents) + 1), documents))

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()


def _documents(answer: Any) -> list[str]:
    """The texts of the only query's documents. Raises NoAnswer for an answer of another form."""
    try:
        (found,) = answer["result"]
        return [str(one["document"]["contents"]) for one in found]
    except (KeyError, TypeError, ValueError) as error:
        raise NoAnswer(
            f"the retrieval server answered {str(answer)[:200]!r}, expected"
            ' {"result": [[{"document": {"contents": ...}}, ...]]}',
            again=False,
        ) from error


def _shown(number: int, contents: str) -> str:
    """A document as the model sees it; the first line of its contents is the title."""
    title, _, text = contents.partition("\n")
    return f"Doc {number} (title: {title}) {text}"
