"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's conversation, translated to and from the chat's."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.events import Event, ToolCallDelta
from polytoken.server.answer import Answer, Content, Delta, Reasoning, Usage, usage_of
from polytoken.server.asking import answer_headers, handed_on, session_of
from polytoken.server.beside import beside
from polytoken.server.body import check, read_record
from polytoken.server.chat import Chat, open_chat, prompt_of, take, tools_of
from polytoken.server.errors import ApiError, bad_request, shown, unsupported
from polytoken.server.records import FIRST_FAULT, ChatRequest, Record
from polytoken.server.reply import First, reply
from polytoken.server.state import state_of
from polytoken.server.stream import JsonResponse, frame
from polytoken.server.turn import Member
from polytoken.server.wording import Wording

_NAMES: Final = {"stop": "stop_sequences", "thinking_budget": "thinking.budget_tokens"}
SIGNATURE: Final = "polytoken"  # of thinking blocks: nothing is signed here, and nothing is checked when one comes back


class Turn(Record):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[dict[str, Any]], FIRST_FAULT]


class CountRequest(Record):
    """What is counted: all that makes the prompt."""

    model: str | None = None
    messages: Annotated[list[Turn], Field(min_length=1, fail_fast=True)]
    system: str | Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: Annotated[list[str], FIRST_FAULT] | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None


async def messages(request: HttpRequest) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_record(request, MessagesRequest, state.settings)
    wording = Wording()
    asked = await _asked(body, wording)
    session = session_of(request.headers, body.metadata)
    with wording.told():
        async with state.pool.use(body.model) as model:
            chat = await open_chat(state, model, asked, prefix="msg_", session=session)
        return await reply(
            request,
            chat.turn,
            stream=body.stream,
            whole=lambda: _whole(chat),
            frames=_Stream(chat).frames,
            headers={**answer_headers(chat.answer_id, asked, chat.model), "request-id": chat.answer_id},
        )


async def count_tokens(request: HttpRequest) -> Response:
    """How many tokens the prompt has."""
    state = state_of(request)
    body = await read_record(request, CountRequest, state.settings)
    wording = Wording()
    asked = await _asked(body, wording)
    with wording.told():
        async with state.pool.use(body.model) as model:
            tools = await beside(lambda: tools_of(asked), asked.tools)
            prompt = await prompt_of(model, asked, tools)
    return JsonResponse({"input_tokens": len(prompt.ids)})


async def _asked(body: CountRequest, wording: Wording) -> ChatRequest:
    """The same call, checked, in OpenAI's words; `wording` learns what is called otherwise."""

    def read() -> ChatRequest:
        record = to_chat(body, wording)
        with wording.told():
            return check(ChatRequest, record)

    return await beside(read, body)


def to_chat(body: CountRequest, wording: Wording) -> dict[str, Any]:
    """The record of the same call for chat completions."""
    turns: list[dict[str, Any]] = []
    for ours, theirs in _NAMES.items():
        wording.name(ours, theirs)
    if body.system is not None:
        turns.append({"role": "system", "content": _text(body.system, "system")})
        wording.name("messages[0]", "system")
        wording.name("messages[0].content", "system")
    for index, turn in enumerate(body.messages):
        turns += _turns(turn, f"messages[{index}]", wording, first=len(turns))
    record: dict[str, Any] = {"model": body.model, "messages": turns, **_choice(body)}
    tools = [_tool(tool, index) for index, tool in enumerate(body.tools or ())]
    for index in range(len(tools)):
        wording.name(f"tools[{index}].function", f"tools[{index}]")
        wording.name(f"tools[{index}].function.parameters", f"tools[{index}].input_schema")
    if tools:
        record["tools"] = tools
    thinking = body.thinking or {}
    if thinking:
        record["enable_thinking"] = thinking.get("type") in ("enabled", "adaptive")
        if record["enable_thinking"] and isinstance(thinking.get("budget_tokens"), int):
            record["thinking_budget"] = thinking["budget_tokens"]
    if isinstance(body, MessagesRequest):
        record |= {
            "max_tokens": body.max_tokens,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "top_k": body.top_k,
            "stop": body.stop_sequences,
            "metadata": body.metadata,
        }
    return {**record, **handed_on(body)}


def _tool(tool: dict[str, Any], index: int) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise unsupported(
            f"tools[{index}] has type {shown(tool['type'])}; only custom is known", param=f"tools[{index}].type"
        )
    name = tool.get("name")
    if not isinstance(name, str):
        raise bad_request(f"tools[{index}].name is required", param=f"tools[{index}].name", code="missing_field")
    function = {"name": name, "description": tool.get("description"), "parameters": tool.get("input_schema")}
    return {"type": "function", "function": {key: value for key, value in function.items() if value is not None}}


def _choice(body: CountRequest) -> dict[str, Any]:
    choice = body.tool_choice
    if choice is None:
        return {}
    kind = choice.get("type")
    if kind == "tool":
        wanted: Any = {"type": "function", "function": {"name": choice.get("name")}}
    elif kind in ("auto", "none", "any"):
        wanted = "required" if kind == "any" else kind
    else:
        raise bad_request(f"tool_choice.type {shown(kind)} is not known", param="tool_choice.type")
    return {"tool_choice": wanted, "parallel_tool_calls": choice.get("disable_parallel_tool_use") is not True}


def _turns(turn: Turn, place: str, wording: Wording, *, first: int) -> list[dict[str, Any]]:
    """The message at `place` as those of a chat, of which the first one has that place there."""
    if isinstance(turn.content, str):
        wording.name(f"messages[{first}]", place)
        return [{"role": turn.role, "content": turn.content}]
    results: list[dict[str, Any]] = []
    message: dict[str, Any] = {"role": turn.role, "content": ""}
    calls: list[dict[str, Any]] = []
    called: list[str] = []
    for index, block in enumerate(turn.content):
        here, kind = f"{place}.content[{index}]", block.get("type")
        if kind == "text":
            message["content"] += _text([block], here)
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        elif kind == "tool_use":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": str(block.get("name")), "arguments": arguments}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
            called.append(here)
        elif kind == "tool_result":
            if not isinstance(block.get("tool_use_id"), str):
                raise bad_request(f"{here}.tool_use_id is required", param=f"{here}.tool_use_id", code="missing_field")
            content = _text(block.get("content") or "", f"{here}.content")
            wording.name(f"messages[{first + len(results)}]", here)
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": content})
        elif kind != "redacted_thinking":
            raise unsupported(
                f"{here} has type {shown(kind)}; text, thinking, tool_use, tool_result are known", param=here
            )
    if calls:
        message["tool_calls"] = calls
    ours = f"messages[{first + len(results)}]"
    wording.name(ours, place)
    for at, here in enumerate(called):
        wording.name(f"{ours}.tool_calls[{at}]", here)
        wording.name(f"{ours}.tool_calls[{at}].function", here)
        wording.name(f"{ours}.tool_calls[{at}].function.arguments", f"{here}.input")
    keep = calls or message["content"] or not results
    return [*results, *([message] if keep else [])]


def _text(content: Any, place: str) -> str:
    if isinstance(content, str):
        return content
    parts = []
    for block in content if isinstance(content, list) else [content]:
        if not isinstance(block, dict) or block.get("type") != "text" or not isinstance(block.get("text"), str):
            raise unsupported(f"{place} must be text", param=place)
        parts.append(block["text"])
    return "".join(parts)


def stop_of(answer: Answer) -> tuple[str, str | None]:
    """Anthropic's reason, and the stop sequence that matched."""
    assert answer.result is not None
    if answer.result.stop_reason == "stop_string":
        return "stop_sequence", answer.result.stop_string
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return reasons.get(answer.finish_reason, "end_turn"), None


def usage_record(usage: Usage) -> dict[str, int]:
    """Here, other than with OpenAI, cached tokens are no part of the input tokens."""
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    }


def _head(chat: Chat, usage: Usage) -> dict[str, Any]:
    return {
        "id": chat.answer_id, "type": "message", "role": "assistant", "model": chat.model.name, "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": usage_record(usage),
    }  # fmt: skip


async def _whole(chat: Chat) -> dict[str, Any]:
    async for item in chat.turn.events():
        if item is not None:
            take(chat, *item)
    answer = chat.answers[0]
    blocks: list[dict[str, Any]] = []
    if answer.reasoning:
        blocks.append({"type": "thinking", "thinking": "".join(answer.reasoning), "signature": SIGNATURE})
    text = "".join(answer.content)
    if text:
        blocks.append({"type": "text", "text": text})
    blocks += [
        {"type": "tool_use", "id": call.call_id, "name": call.name, "input": _input(call.arguments)}
        for call in answer.calls.calls
    ]
    reason, matched = stop_of(answer)
    head = _head(chat, usage_of(chat.answers))
    return {**head, "content": blocks, "stop_reason": reason, "stop_sequence": matched}


def _input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object; what is none is handed on as it stands."""
    try:
        value = json.loads(arguments or "{}")
    except ValueError:
        value = arguments
    return value if isinstance(value, dict) else {"raw": value}


class _Stream:
    """The events of one answer: blocks open and close as reasoning, text and calls take turns."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._index = -1
        self._kind: str | None = None  # of the open block

    async def frames(self, first: First) -> AsyncIterator[bytes]:
        member = self._chat.turn.members[0]
        head = _head(self._chat, Usage(prompt=member.prompt_tokens, cached=member.cached_tokens))
        yield _event("message_start", message=head)
        try:
            async for item in self._chat.turn.events(first):
                if item is None:
                    yield _event("ping")
                    continue
                yield b"".join(self._parts(*item))
        except ApiError as error:
            yield frame(error.anthropic(self._chat.answer_id), event="error")
            return
        if self._index < 0:
            yield self._open({"type": "text", "text": ""}, "text")
        yield self._close()
        reason, matched = stop_of(self._chat.answers[0])
        usage = usage_record(usage_of(self._chat.answers))
        yield _event("message_delta", delta={"stop_reason": reason, "stop_sequence": matched}, usage=usage)
        yield _event("message_stop")

    def _parts(self, member: Member, event: Event) -> list[bytes]:
        return [part for delta in take(self._chat, member, event) for part in self._delta(delta)]

    def _delta(self, delta: Delta) -> list[bytes]:
        if isinstance(delta, Reasoning):
            parts = self._switch("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            return [*parts, self._add(type="thinking_delta", thinking=delta.text)]
        if isinstance(delta, Content):
            return [*self._switch("text", {"type": "text", "text": ""}), self._add(type="text_delta", text=delta.text)]
        return self._call(delta)

    def _call(self, step: ToolCallDelta) -> list[bytes]:
        parts: list[bytes] = []
        if step.name is not None:
            block: dict[str, Any] = {"type": "tool_use", "id": step.call_id, "name": step.name, "input": {}}
            parts += self._switch(f"tool {step.index}", block)
        if step.arguments:
            parts.append(self._add(type="input_json_delta", partial_json=step.arguments))
        return parts

    def _switch(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        if self._kind == kind:
            return []
        closing = [] if self._kind is None else [self._close()]
        return [*closing, self._open(block, kind)]

    def _open(self, block: dict[str, Any], kind: str) -> bytes:
        self._kind = kind
        self._index += 1
        return _event("content_block_start", index=self._index, content_block=block)

    def _close(self) -> bytes:
        signed = b""
        if self._kind == "thinking":
            signed = self._add(type="signature_delta", signature=SIGNATURE)
        return signed + _event("content_block_stop", index=self._index)

    def _add(self, **delta: Any) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(name: str, /, **members: Any) -> bytes:
    return frame({"type": name, **members}, event=name)
