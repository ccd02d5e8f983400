"""The tokenizer of a model folder, and its use in bulk."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from rlcore.data.messages import Message
from rlcore.errors import ConfigError, DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ENCODE_CHUNK = 4096  # texts a call; bounds the Python lists that the tokenizer returns


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Load the Hugging Face tokenizer in `folder`; nothing is downloaded.

    Raises:
        ModelError: the folder does not exist, or holds no tokenizer that transformers can load.
    """
    # Slow to import.
    from transformers import AutoTokenizer, PreTrainedTokenizerFast
    from transformers.models.auto.tokenization_auto import get_tokenizer_config

    if not Path(folder).is_dir():
        raise ModelError(
            f"tokenizer: {folder} is not a folder; set model.tokenizer or model.path to a Hugging"
            " Face folder"
        )
    try:
        named = get_tokenizer_config(str(folder), local_files_only=True).get("tokenizer_class")
        # For some model types AutoTokenizer takes a class of its own in place of this general one,
        # and makes another tokenizer of the same vocabulary.
        kind = PreTrainedTokenizerFast if named == "TokenizersBackend" else AutoTokenizer
        tokenizer: PreTrainedTokenizerBase = kind.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"tokenizer: {folder} holds no tokenizer that can be loaded"
            f" ({type(error).__name__}: {reason})"
        ) from error
    # Without tokenizer files, transformers makes one for the model type with only special tokens.
    if set(tokenizer.get_vocab()) <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        raise ModelError(
            f"tokenizer: {folder} holds no tokenizer: no tokenizer.json, tokenizer.model or"
            " vocab.json in it; copy them there, or set model.tokenizer to a folder that has them"
        )
    return tokenizer


def leading_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return `[bos]` if the tokenizer puts a BOS before plain text, else `[]`."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return []
    return [bos] if tokenizer("")["input_ids"][:1] == [bos] else []


def encode(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    where: Sequence[str],
    *,
    special: bool = False,
) -> list[NDArray[np.int32]]:
    """Encode each text, int32 [n].

    Args:
        special: add the special tokens of a complete text; inside a prompt, an EOS would end it.

    Raises:
        DataError: the tokenizer refuses a text; names its row, from `where`.
    """
    out: list[NDArray[np.int32]] = []
    for start in range(0, len(texts), ENCODE_CHUNK):
        chunk = list(texts[start : start + ENCODE_CHUNK])
        try:
            encoded = _encode(tokenizer, chunk, special)
        # tokenizers raises no narrower error; encoding one by one shows the failing text
        except Exception:  # noqa: BLE001
            encoded = [
                _encode_row(tokenizer, text, row, special)
                for text, row in zip(chunk, where[start:])
            ]
        out += [np.array(ids, dtype=np.int32) for ids in encoded]
    return out


def _encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], special: bool = False
) -> list[list[int]]:
    if _is_plain(tokenizer):
        # Offsets and other results, which the general call computes, take as long as the ids.
        backend = tokenizer.backend_tokenizer
        found = backend.encode_batch_fast(texts, add_special_tokens=special)
        return [encoding.ids for encoding in found]
    encoded = tokenizer(
        texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False
    )
    ids: list[list[int]] = encoded["input_ids"]
    return ids


def _is_plain(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer passes texts unchanged to its backend, and returns all of its ids."""
    kind: type = type(tokenizer)
    if not _is_plain_class(kind) or tokenizer.split_special_tokens:
        return False
    backend = tokenizer.backend_tokenizer
    return not (backend.truncation or backend.padding or backend.encode_special_tokens)


@cache
def _is_plain_class(kind: type) -> bool:
    from transformers import PreTrainedTokenizerFast

    # `_batch_encode_plus` exists in older versions.
    ways = ("__call__", "_encode_plus", "_batch_encode_plus")
    return issubclass(kind, PreTrainedTokenizerFast) and all(
        getattr(kind, way, None) is getattr(PreTrainedTokenizerFast, way, None) for way in ways
    )


def _encode_row(
    tokenizer: PreTrainedTokenizerBase, text: str, where: str, special: bool
) -> list[int]:
    try:
        return _encode(tokenizer, [text], special)[0]
    except Exception as error:
        missing = [symbol for symbol in dict.fromkeys(text) if not _has(tokenizer, symbol)]
        symbols = "".join(missing)
        which = f": it lacks the symbols {symbols[:40]!r}" if missing else ""
        raise DataError(
            f"{where}: the tokenizer cannot encode {text[:80]!r}{which} ({error}). A model of"
            " `rlcore init-model` only knows the characters of its --alphabet"
        ) from error


def _has(tokenizer: PreTrainedTokenizerBase, symbol: str) -> bool:
    """Whether the tokenizer encodes a single character."""
    try:
        return bool(_encode(tokenizer, [symbol])[0])
    except Exception:  # noqa: BLE001 - tokenizers raises no narrower error
        return False


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    where: str,
    *,
    add_generation_prompt: bool,
    tools: Sequence[dict[str, Any]] = (),
    chat_kwargs: Mapping[str, Any] = MappingProxyType({}),
    every_call: bool = True,
) -> str:
    """Render messages by the tokenizer's chat template, special tokens included.

    Args:
        tools: the tools offered to the model, as JSON schemas.
        chat_kwargs: further variables of the template.
        every_call: require that the text contains all tool calls of the messages.

    Raises:
        DataError: there is no template, or it refuses the messages, omits a call, or takes no
            tools; names the row `where`.
        ConfigError: the template does not read one of `chat_kwargs`.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"{where}: the prompt is a list of chat messages, but the tokenizer"
            f" {tokenizer.name_or_path!r} has no chat template; give text prompts or a tokenizer"
            " with a template"
        )
    given = [dict(tool) for tool in tools] or None
    _check_template(tokenizer, where, given, chat_kwargs)
    settings = {"tools": given, "add_generation_prompt": add_generation_prompt, **chat_kwargs}
    has_calls = any(message.get("tool_calls") for message in messages)
    # DeepSeek's templates expect messages with calls in the form of OpenAI's API.
    forms = (_render_plain, _render_as_sent) if has_calls else (_render_plain,)
    refusal: Exception | None = None
    for form in forms:
        render = partial(form, tokenizer, settings)
        try:
            text = render(messages)
            if not every_call or shows_calls(render, messages):
                return text
            refusal = None
        # recovery: try the other form
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            refusal = error
    if refusal is not None:
        raise DataError(f"{where}: the chat template refuses the messages: {refusal}") from refusal
    raise DataError(
        f"{where}: the chat template leaves out calls of tools; take a template that writes calls,"
        " also of a message that has a content, or leave those messages out of the rows"
    )


def shows_calls(render: Callable[[Sequence[Message]], str], messages: Sequence[Message]) -> bool:
    """Whether a rendering contains every tool call.

    Called names get a mark, because tool descriptions and contents may contain the names as well.
    """
    marks: list[str] = []
    marked = []
    for message in messages:
        calls = []
        for call in message.get("tool_calls") or ():
            name = call["function"]["name"]
            marks.append(f"{name}_{len(marks):05d}_")
            named: dict[str, Any] = {"function": {**call["function"], "name": marks[-1]}}
            # Kimi-K2's template writes the name as a part of the id.
            if found := re.fullmatch(rf"(.*\.)?{re.escape(name)}(:\d+)", str(call.get("id"))):
                named["id"] = f"{found[1] or ''}{marks[-1]}{found[2]}"
            calls.append({**call, **named})
        marked.append({**message, "tool_calls": calls} if calls else message)
    if not marks:
        return True
    text = render(marked)
    return all(mark in text for mark in marks)


def _render_plain(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], messages: Sequence[Message]
) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **settings))


def _render_as_sent(
    tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any], messages: Sequence[Message]
) -> str:
    """Render messages whose calls have arguments as JSON text and whose content is null.

    `apply_chat_template` drops a null content, and such templates then fail.
    """
    from transformers.utils.chat_template_utils import render_jinja_template

    template = tokenizer.get_chat_template(tools=settings["tools"])
    texts, _ = render_jinja_template(
        [[_as_sent(message) for message in messages]],
        chat_template=template,
        **{**tokenizer.special_tokens_map, **settings},
    )
    return str(texts[0])


def _as_sent(message: Message) -> Message:
    calls = []
    for call in message.get("tool_calls") or ():
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        function = {**call["function"], "arguments": arguments}
        calls.append({"type": "function", **call, "function": function})
    return (
        {**message, "content": message.get("content") or None, "tool_calls": calls}
        if calls
        else message
    )


def _check_template(
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    tools: list[dict[str, Any]] | None,
    chat_kwargs: Mapping[str, Any],
) -> None:
    """Refuse tools and variables that the template would silently ignore."""
    if not tools and not chat_kwargs:
        return
    template = tokenizer.get_chat_template(tools=tools)
    if tools and "tools" not in template:
        raise DataError(
            f"{where}: the row has tools, but the chat template of {tokenizer.name_or_path!r}"
            " describes none; set data.tools_key to null, or use a model that was trained with"
            " tools"
        )
    for name in chat_kwargs:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: the chat template of"
                f" {tokenizer.name_or_path!r} does not read it"
            )


def decode(tokenizer: PreTrainedTokenizerBase, sequences: Sequence[NDArray[np.int32]]) -> list[str]:
    """Decode each sequence without special tokens, exactly as the tokens spell it."""
    if not sequences:
        # Some versions of transformers make an empty text of an empty list.
        return []
    return list(
        tokenizer.batch_decode(
            [ids.tolist() for ids in sequences],
            skip_special_tokens=True,
            clean_up_tokenization_spaces=False,
        )
    )


def stop_token_ids(
    tokenizer: PreTrainedTokenizerBase, extra: Sequence[int] = ()
) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's EOS and `extra`, in increasing order.

    Raises:
        ModelError: there is none, so no response would ever stop.
    """
    ids = set(extra)
    if tokenizer.eos_token_id is not None:
        ids.add(int(tokenizer.eos_token_id))
    if not ids:
        raise ModelError(
            "the tokenizer has no eos token; set rollout.sampling.stop_token_ids, or no response"
            " ever stops"
        )
    return tuple(sorted(ids))
