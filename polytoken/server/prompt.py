"""A conversation or text as prompt ids, made before the request is queued, so that what is wrong is told at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from polytoken.errors import PolytokenError
from polytoken.lanes.limits import check_ids
from polytoken.request import Request
from polytoken.server.beside import beside
from polytoken.server.body import check_counts
from polytoken.server.errors import ApiError, bad_request, from_engine
from polytoken.server.pool import Model
from polytoken.text.prompt import normalise_messages, prompt_ids, render

MAX_ARGUMENTS: Final = 10_000  # values of one earlier call's arguments, which are text in the body and read here


@dataclass(frozen=True)
class Prompt:
    """What the model reads.

    Attributes:
        ids: never empty.
        turns: what they were rendered from, for a session whose ids go on from earlier ones; None where the ids are
            all there is.
        tools: those that the template was given; none where the turns tell of them in words.
    """

    ids: tuple[int, ...]
    turns: tuple[Mapping[str, Any], ...] | None = None
    tools: tuple[Mapping[str, Any], ...] = ()


async def chat_prompt(
    model: Model,
    messages: Sequence[Mapping[str, Any]],
    *,
    think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
    extra: Mapping[str, Any] | None = None,
) -> Prompt:
    """The rendered conversation with the opening of the assistant's turn.

    Args:
        messages: in OpenAI's form.
        think: whether the template is asked for a block of reasoning.
        tools: in OpenAI's form.
        extra: further words for the template.

    Raises:
        ApiError: 400, what is wrong with a message or the template.
    """

    def make() -> Prompt:
        turns = [_turn(message, f"messages[{at}]") for at, message in enumerate(normalise_messages(messages))]
        listed = [dict(tool) for tool in tools]
        template = model.tokenizer.chat_template
        if template is None:
            raise bad_request("this model has no chat template; use /v1/completions", param="messages")
        if "tools" not in template:  # a template that knows nothing of tools is told in words
            turns, listed = _in_words(turns, listed), []
        text = render(model.tokenizer, turns, think=think, tools=listed, extra=extra)
        ids = tuple(model.tokenizer.encode(text, add_special_tokens=False))
        return Prompt(ids, None if extra else tuple(turns), tuple(listed))

    return await _made(model, make, messages, tools, param="messages")


async def text_prompt(model: Model, text: str | Sequence[int]) -> Prompt:
    """A raw prompt: text that is encoded as it stands, or ids.

    Raises:
        ApiError: 400.
    """

    def make() -> Prompt:
        if isinstance(text, str):
            request = Request(request_id="prompt", raw_prompt=text, max_new_tokens=1)
        else:
            request = Request(request_id="prompt", token_ids=tuple(text), max_new_tokens=1)
        return Prompt(prompt_ids(model.tokenizer, request))

    return await _made(model, make, text, param="prompt")


def check_room(model: Model, prompt: Prompt, limit: int | None, *, param: str) -> None:
    """Refuse a prompt that leaves no room for an answer; `param` is the field that holds it.

    Raises:
        ApiError: 400 `context_length_exceeded`, with the limit.
    """
    most = model.max_positions - 1 if limit is None else min(limit, model.max_positions - 1)
    if len(prompt.ids) > most:
        raise bad_request(
            f"the prompt has {len(prompt.ids)} tokens, and at most {most} are possible here "
            f"(the model's context is {model.max_positions} tokens)",
            param=param,
            code="context_length_exceeded",
        )


async def _made(model: Model, make: Callable[[], Prompt], *source: Any, param: str) -> Prompt:
    try:
        rows = await model.vocab_size()
        prompt = await beside(make, *source)
        check_ids(prompt.ids, vocab_size=rows)  # by the lane, too, but then a stream may have begun
    except PolytokenError as error:
        fault = from_engine(error)
        if fault.param == "messages":
            fault.rename(param)
        raise fault from None
    if not prompt.ids:
        raise bad_request("the prompt is empty: it has no tokens", param=param)
    return prompt


def _turn(message: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message as templates expect it: arguments as objects, one name for one role, no null members."""
    turn = {name: value for name, value in message.items() if value is not None}
    turn.setdefault("content", "")
    if turn["role"] == "developer":
        turn["role"] = "system"
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_call(call, f"{place}.tool_calls[{at}]") for at, call in enumerate(turn["tool_calls"])]
    return turn


def _call(call: Mapping[str, Any], place: str) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            check_counts(arguments.encode(errors="replace"), items=MAX_ARGUMENTS, values=MAX_ARGUMENTS)
            value = json.loads(arguments) if arguments.strip() else {}
        except ApiError:
            place += ".function.arguments"
            text = f"{place} holds more than {MAX_ARGUMENTS} values"
            raise ApiError(413, text, code="too_many_items", param=place) from None
        except (ValueError, RecursionError):
            value = arguments  # what the model wrote was no JSON either: the template may quote it
        function["arguments"] = value
    elif arguments is None:
        function["arguments"] = {}
    return {**call, "type": "function", "function": function}


_WORDS: Final = (
    "You may call functions. Their signatures, one JSON object a line:\n<tools>\n{tools}\n</tools>\n"
    'To call one, write a JSON object with "name" and "arguments" between tags:\n'
    '<tool_call>\n{{"name": <name>, "arguments": <object>}}\n</tool_call>'
)


def _in_words(turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation with tools and calls spelled out, for templates that know only roles and text."""
    spelled = []
    for turn in turns:
        content = turn["content"]
        for call in turn.get("tool_calls", ()):
            body = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            content += f"\n<tool_call>\n{json.dumps(body, ensure_ascii=False)}\n</tool_call>"
        if turn["role"] == "tool":
            spelled.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
        else:
            spelled.append({"role": turn["role"], "content": content.strip() if turn.get("tool_calls") else content})
    if tools:
        words = _WORDS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if spelled and spelled[0]["role"] == "system":
            spelled[0] = {**spelled[0], "content": f"{spelled[0]['content']}\n\n{words}".strip()}
        else:
            spelled.insert(0, {"role": "system", "content": words})
    return spelled
