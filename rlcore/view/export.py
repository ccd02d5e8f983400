"""Writes the page and its data to a file that needs no server."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Set
from pathlib import Path
from typing import Any

from rlcore.errors import DataError, UserError
from rlcore.runs.files import write_atomic
from rlcore.view.api import Api
from rlcore.view.detail import excerpt_of, sample_page
from rlcore.view.run import RunView
from rlcore.view.server import PAGE, POLICY, SCRIPTS, STYLE, static, to_json

MAX_SAMPLES = 512  # of a step; the file says how many more are left out
MAX_EVALUATIONS = 5
# These keys hold texts of the run: paths, and errors that contain paths. Folder names would reveal
# the machine and its user.
_OF_THE_RUN = frozenset({"path", "prompt_id", "reason", "trouble", "missing", "detail", "why"})
_OF_REWARDS = frozenset({"reward_error", "reward_info"})
# These keys hold content of the data and the model, whose inner keys are arbitrary.
_OF_THE_DATA = frozenset({"messages", "label"})
# Not the slashes of a URL, of a relative path or of "and/or".
_FOLDERS = re.compile(r"""(?<![\w:/.~\-])(?:file:/+|/)(?:[^\s/:,;'"<>()]*/)*""")


def export_page(api: Api, target: Path, *, step: int | None) -> str:
    """Write the page with one step of each run; return a line that describes its content.

    Raises:
        UserError: a run lacks that step, or the file cannot be written.
    """
    described = []
    runs = {}
    answers: dict[str, Any] = {}
    for run in api.runs.values():
        steps = [*run.recorded()]
        if step is not None and step not in steps:
            has = f"it has steps {min(steps)} to {max(steps)}" if steps else "it has none"
            raise UserError(f"{run.path}: no samples of step {step}; {has}")
        chosen = step if step is not None else max(steps, default=None)
        given = runs[run.name] = _samples(api, run, chosen)
        described.append(f"{run.name} step {chosen} ({len(given['rows'])} samples)")
        answers |= _answers(api, run, given)
    names = {name for run in api.runs.values() for name in run.metrics.names()}
    data = {
        "runs": runs,
        "curves": {
            name: {run.name: run.metrics.curve(name) for run in api.runs.values()}
            for name in sorted(names)
        },
        "answers": answers
        | _comparisons(api)
        | {"runs?": api.answer("runs", {}), "definitions?": api.answer("definitions", {})},
    }
    data["answers"]["runs?"]["follow"] = False
    try:
        write_atomic(target, page_with(to_json(without_folders(data))), mode=0o600)
    except OSError as error:
        raise UserError(f"--export {target}: {error.strerror}") from error
    return f"{target}: {', '.join(described)}"


def without_folders(value: Any, known: Set[str] = _OF_THE_RUN, *, cut: bool = False) -> Any:
    """Return `value`, with absolute paths in texts of `known` keys cut to their last part."""
    if isinstance(value, dict):
        return {
            key: inner
            if key in _OF_THE_DATA
            else without_folders(
                inner, _OF_REWARDS if key == "metadata" else known, cut=cut or key in known
            )
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_folders(inner, known, cut=cut) for inner in value]
    return _FOLDERS.sub("", value) if cut and isinstance(value, str) else value


def page_with(data: bytes) -> bytes:
    """Return the page with embedded scripts, style and data, and a policy that allows no others."""
    # Escape "<", so that no text of a run can end the block, which is data and never run.
    block = data.replace(b"<", b"\\u003c").replace(b">", b"\\u003e").replace(b"&", b"\\u0026")
    style = static(STYLE)
    script = b"\n".join(static(name).replace(b'"use strict";\n', b"", 1) for name in SCRIPTS)
    script = b'"use strict";\n' + script
    if b"</script" in script or b"</style" in style:
        raise ValueError("a file of the page would end its own block")
    policy = POLICY.format(sources=f"script-src {_hash(script)}; style-src {_hash(style)}")
    # A <meta> policy may not contain frame-ancestors.
    policy = policy.replace(" frame-ancestors 'none';", "")
    page = static(PAGE)
    head = f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'.encode()
    page = page.replace(b'<meta charset="utf-8">\n', b'<meta charset="utf-8">\n' + head)
    page = page.replace(
        b'<link rel="stylesheet" href="style.css">', b"<style>" + style + b"</style>"
    )
    for name in SCRIPTS:
        page = page.replace(f'<script src="{name}"></script>\n'.encode(), b"")
    return page.replace(
        b"</body>",
        b'<script type="application/json" id="embedded">'
        + block
        + b"</script>\n<script>"
        + script
        + b"</script>\n</body>",
    )


def _hash(content: bytes) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


def _samples(api: Api, run: RunView, step: int | None) -> dict[str, Any]:
    """Return the samples of a step, and each draw's prompt with its samples over the steps."""
    if step is None:
        return {"rows": [], "texts": {}, "samples": {}, "prompts": {}}
    rows = run.samples.select(step, step, limit=MAX_SAMPLES).rows
    records = run.records(step, [row["row"] for row in rows])
    prompts = {}
    for draw, row in {row["draw"]: row for row in reversed(rows)}.items():
        given = {"run": run.name, "step": row["step"], "draw": draw, "index": row["index"]}
        prompts[str(draw)] = api.answer("prompt", {key: [str(v)] for key, v in given.items()})
    return {
        "rows": rows,
        "texts": {f"{step}:{row}": excerpt_of(record) for row, record in records.items()},
        "samples": {
            f"{step}:{row['draw']}:{row['index']}": sample_page(run, records[row["row"]])
            | {"scalars": row, "group": [r["index"] for r in rows if r["draw"] == row["draw"]]}
            for row in rows
        },
        "prompts": prompts,
    }


def _answers(api: Api, run: RunView, samples: dict[str, Any]) -> dict[str, Any]:
    """Return the answers that the other views of a run need, by request."""
    views = ("steps", "evaluations", "ledger", "timeline")
    asked: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in views]
    asked += [("draw", {"draw": row["draw"]}) for row in samples["rows"]]
    for one in api.answer("evaluations", {"run": [run.name]})[:MAX_EVALUATIONS]:
        before = one["step"] if one["before"] is None else one["before"]
        asked.append(("evaluation", {"set": one["set"], "step": one["step"], "before": before}))
    return _answered(api, [(name, {"run": run.name, **given}) for name, given in asked])


def _comparisons(api: Api) -> dict[str, Any]:
    """Return the page's default comparisons: each run with another."""
    asked = []
    for run in api.runs.values():
        other = next((one for one in api.runs.values() if one is not run), run)
        steps = {one.name: one.samples.steps() for one in (run, other)}
        if all(steps.values()):
            at = steps[run.name][0 if other is run else -1]
            given = {"a": run.name, "a_step": at, "b": other.name, "b_step": steps[other.name][-1]}
            asked.append(("compare", given))
    return _answered(api, asked)


def _answered(api: Api, asked: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the available answers, by request."""
    found = {}
    for name, given in asked:
        try:
            answer = api.answer(name, {key: [str(value)] for key, value in given.items()})
        # Recovery: the view shows that the file lacks it.
        except DataError:
            continue
        question = "&".join(f"{key}={value}" for key, value in sorted(given.items()))
        found[f"{name}?{question}"] = answer
    return found
