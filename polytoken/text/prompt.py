"""From a request to prompt ids: chat template, raw text, or ids that were given.

The ids are those of the reference tokenizer's own `apply_chat_template(tokenize=True)`. A template is never rendered
to text and encoded again, because the second encoding would add special tokens that the template already wrote.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

from polytoken.errors import PolytokenError, RequestError
from polytoken.request import Request
from polytoken.text.ports import Tokenizer

MAX_TEMPLATE_MESSAGE: Final = 300  # characters of a template's own error that are quoted


def prompt_ids(tokenizer: Tokenizer, request: Request) -> tuple[int, ...]:
    """The ids a model reads before it generates; never empty.

    Raises:
        RequestError: `bad_messages` (content that is neither text nor text parts), `bad_template` (no template, or one
            that fails), `bad_prompt` (no ids at all, ids outside the vocabulary, text that is not Unicode).
    """
    if request.token_ids is not None:
        return _given_ids(request.token_ids, tokenizer.vocab_size)
    if request.raw_prompt is not None:
        return _raw_ids(tokenizer, request.raw_prompt)
    assert request.messages is not None
    return chat_ids(tokenizer, request.messages, think=request.think, tools=request.tools)


def chat_ids(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> tuple[int, ...]:
    """Ids of a conversation followed by the opening of the assistant's turn. Errors as in `prompt_ids`."""
    turns = _for_template(normalise_messages(messages))
    with _template_errors(tokenizer, tools):
        encoding = _apply_template(tokenizer, turns, think=think, tools=tools)
    return encoding_ids(encoding)


def render(
    tokenizer: Tokenizer,
    turns: Sequence[Mapping[str, Any]],
    *,
    think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    opening: bool = True,
    extra: Mapping[str, Any] | None = None,
) -> str:
    """The text that `chat_ids` encodes, of normalised messages; without `opening`, up to the end of the last of them.

    `extra` are further words for the template, which win over ours. Errors as in `prompt_ids`.
    """
    words = {"enable_thinking": think, **({"tools": list(tools)} if tools else {}), **(extra or {})}
    with _template_errors(tokenizer, tools):
        return tokenizer.render_chat_template(_for_template(turns), add_generation_prompt=opening, **words)


@contextmanager
def _template_errors(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """Whatever goes wrong with a template is the request's error: it is data and may raise anything."""
    if tokenizer.chat_template is None:
        raise RequestError(
            "this tokenizer has no chat template; send the text as a raw prompt instead of chat messages",
            code="bad_template",
            field="messages",
        )
    if tools and "tools" not in tokenizer.chat_template:
        raise RequestError(
            "this model's chat template knows no tools; leave them out, or describe them in a system message",
            code="bad_tools",
            field="tools",
        )
    try:
        yield
    except PolytokenError:
        raise
    except Exception as error:
        raise RequestError(
            f"the chat template failed: {_one_line(error)}", code="bad_template", field="messages"
        ) from error


def _for_template(turns: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages with the arguments of tool calls as objects, which is what templates expect."""
    return [
        {**turn, "tool_calls": [_read_call(call) for call in turn["tool_calls"]]}
        if isinstance(turn.get("tool_calls"), (list, tuple))
        else dict(turn)
        for turn in turns
    ]


def _read_call(call: Any) -> Any:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    function = {**function, "arguments": arguments}
    return {**call, "function": function} if "function" in call else function


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Copies of the messages whose content is always a string: null becomes empty, text parts are joined.

    Other members (tool calls, names, reasoning) are kept as they are.

    Raises:
        RequestError: `bad_messages`, with the index of the message and, for an unknown part, its type.
    """
    if not messages:
        raise RequestError("messages must not be empty", code="bad_messages", field="messages")
    return [_normalise_message(message, index) for index, message in enumerate(messages)]


def encoding_ids(encoding: Any) -> tuple[int, ...]:
    """Ids out of any of the forms tokenizers answer in.

    Accepted: a flat list or tuple, a mapping with or an object having `input_ids`, an array with `tolist()`, and each
    of these around exactly one list (a batch of one).

    Raises:
        RequestError: `bad_template` for any other form or an entry that is not an integer, `bad_prompt` for no ids.
    """
    value = encoding
    if isinstance(value, Mapping):
        value = value.get("input_ids")
    elif hasattr(value, "input_ids"):
        value = value.input_ids
    value = _plain(value)
    if isinstance(value, (list, tuple)) and len(value) == 1:
        inner = _plain(value[0])
        value = inner if isinstance(inner, (list, tuple)) else value
    if not isinstance(value, (list, tuple)):
        raise RequestError(
            f"the chat template gave {type(encoding).__name__} where token ids were expected",
            code="bad_template",
            field="messages",
        )
    ids = [_token_id(item) for item in value]
    if any(item is None or item < 0 for item in ids):
        raise RequestError(
            "the chat template gave entries that are not token ids", code="bad_template", field="messages"
        )
    return _not_empty(tuple(item for item in ids if item is not None), field="messages")


def _apply_template(
    tokenizer: Tokenizer, turns: list[dict[str, Any]], *, think: bool, tools: Sequence[Mapping[str, Any]]
) -> Any:
    """Call the template with all we have to say, then with less if a word is unknown to the function."""
    listed = {"tools": list(tools)} if tools else {}
    settings: tuple[dict[str, Any], ...] = (
        {"tokenize": True, "return_dict": False, "enable_thinking": think, **listed},
        {"enable_thinking": think, **listed},  # an adapter that always answers in ids
    )
    if not tools:  # which must not go unheard
        settings += ({"tokenize": True}, {})
    for words in settings[:-1]:
        try:
            return tokenizer.apply_chat_template(turns, add_generation_prompt=True, **words)
        except TypeError:
            continue  # one with another cause, inside the template, comes again from the last call
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, **settings[-1])


def _normalise_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    field = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{field} must be an object with a role", code="bad_messages", field=field)
    if "content" not in message and not message.get("tool_calls"):
        raise RequestError(f"{field} must have content or tool calls", code="bad_messages", field=field)
    content = _content_text(message.get("content"), f"{field}.content")
    return {**message, "content": content}


def _content_text(content: object, field: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _unicode(content, code="bad_messages", field=field)
    if not isinstance(content, (list, tuple)):
        raise RequestError(
            f"{field} must be text, null or a list of text parts, not {type(content).__name__}",
            code="bad_messages",
            field=field,
        )
    # Joined with nothing between, as a template that takes the parts itself writes them.
    return "".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text":
        raise RequestError(f"{field} has type {kind!r}; only 'text' is known", code="bad_messages", field=field)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{field} has no text", code="bad_messages", field=field)
    return _unicode(text, code="bad_messages", field=field)


def _raw_ids(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    """The reference encoding with special tokens, less a begin token that the text already spells."""
    _unicode(text, code="bad_prompt", field="raw_prompt")
    ids = tuple(tokenizer.encode(text, add_special_tokens=True))
    bos = tokenizer.bos_id
    if bos is not None and ids[:2] == (bos, bos):
        spelled = 0
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            if token_id != bos:
                break
            spelled += 1
        # Only the one that was added goes: someone who spells the token twice gets it twice.
        ids = ids[1:] if 0 < spelled < _leading(ids, bos) else ids
    return _not_empty(ids, field="raw_prompt")


def _leading(ids: Sequence[int], token_id: int) -> int:
    return next((index for index, item in enumerate(ids) if item != token_id), len(ids))


def _given_ids(token_ids: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    if set(map(type, token_ids)) == {int} and min(token_ids) >= 0 and max(token_ids) < vocab_size:
        return tuple(token_ids)  # a long history is looked at in every turn, so plain ones go fast
    ids: list[int] = []
    for index, item in enumerate(token_ids):
        token_id = _token_id(item)
        if token_id is None or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"token_ids[{index}] is {item!r}; ids are integers from 0 to {vocab_size - 1}",
                code="bad_prompt",
                field=f"token_ids[{index}]",
            )
        ids.append(token_id)
    return _not_empty(tuple(ids), field="token_ids")


def _not_empty(ids: tuple[int, ...], *, field: str) -> tuple[int, ...]:
    if not ids:
        raise RequestError("the prompt is empty: it has no tokens", code="bad_prompt", field=field)
    return ids


def _token_id(item: object) -> int | None:
    """The integer an entry stands for (numpy's integers too), or None for anything else, booleans included."""
    if isinstance(item, bool):
        return None
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return None


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _unicode(text: str, *, code: str, field: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{field} holds a lone surrogate, which is not text", code=code, field=field) from None
    return text


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MAX_TEMPLATE_MESSAGE else text[:MAX_TEMPLATE_MESSAGE] + "..."
