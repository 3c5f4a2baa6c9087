"""POST /v1/responses: OpenAI's newer form of a conversation, with or without the server remembering it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.events import Event, ToolCallDelta
from polytoken.server.answer import Answer, Delta, Reasoning, usage_of
from polytoken.server.asking import answer_headers, handed_on, new_id, session_of
from polytoken.server.beside import beside
from polytoken.server.body import check, read_record
from polytoken.server.chat import Chat, open_chat, take
from polytoken.server.errors import ApiError, bad_request, shown, unsupported
from polytoken.server.records import FIRST_FAULT, ChatRequest, Record
from polytoken.server.remembered import Remembered
from polytoken.server.reply import First, reply
from polytoken.server.state import ServerState, state_of
from polytoken.server.stream import KEEP_ALIVE, frame
from polytoken.server.turn import Member
from polytoken.server.wording import Wording
from polytoken.text.committed import reply_message

_NAMES: Final = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
}
_PARTS: Final = ("input_text", "output_text", "text")


class ResponsesRequest(Record):
    """POST /v1/responses."""

    model: str | None = None
    input: str | Annotated[list[dict[str, Any]], FIRST_FAULT]
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    stream: bool | None = None
    store: bool | None = None
    tools: Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    background: bool | None = None


async def responses(request: HttpRequest) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_record(request, ResponsesRequest, state.settings)
    if body.background:
        raise unsupported("background is not supported", param="background")
    if body.top_logprobs:
        raise unsupported("top_logprobs is not supported here; chat completions have them", param="top_logprobs")
    for name in ("conversation", "prompt"):  # kept at OpenAI: without them the answer would be to something else
        if (body.model_extra or {}).get(name) is not None:
            raise unsupported(f"{name} is not supported; previous_response_id goes on from a response", param=name)
    earlier = None if body.previous_response_id is None else state.responses.get(body.previous_response_id)
    before = () if earlier is None else earlier.turns
    wording = Wording()

    def read() -> tuple[list[dict[str, Any]], ChatRequest]:
        turns = [*before, *input_turns(body.input, wording, first=len(before) + (body.instructions is not None))]
        record = to_chat(body, turns, wording)
        with wording.told():
            return turns, check(ChatRequest, record)

    turns, asked = await beside(read, body, before)
    session = session_of(request.headers, body.metadata)
    if session is None and body.store is not False:  # what is remembered here goes on from its tokens, too
        session = new_id("conv_") if earlier is None else earlier.session
    with wording.told():
        async with state.pool.use(body.model) as model:
            chat = await open_chat(state, model, asked, prefix="resp_", session=session)
        call = _Call(state, chat, body, turns, session)
        headers = answer_headers(chat.answer_id, asked, chat.model)
        return await reply(
            request, chat.turn, stream=body.stream, whole=call.whole, frames=call.frames, headers=headers
        )


def to_chat(body: ResponsesRequest, turns: list[dict[str, Any]], wording: Wording) -> dict[str, Any]:
    """The same call in the words of chat completions; `wording` learns what is called otherwise."""
    instructions = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    for ours, theirs in _NAMES.items():
        wording.name(ours, theirs)
    if instructions:
        wording.name("messages[0]", "instructions")
        wording.name("messages[0].content", "instructions")
    record: dict[str, Any] = {
        "model": body.model, "messages": [*instructions, *turns], "max_tokens": body.max_output_tokens,
        "temperature": body.temperature, "top_p": body.top_p, "parallel_tool_calls": body.parallel_tool_calls,
        "tool_choice": body.tool_choice, "metadata": body.metadata, **handed_on(body),
    }  # fmt: skip
    if body.reasoning and body.reasoning.get("effort") is not None:
        record["reasoning_effort"] = body.reasoning["effort"]
    form = (body.text or {}).get("format")
    if isinstance(form, dict):
        inner = {name: value for name, value in form.items() if name != "type"}
        kind = form.get("type")
        record["response_format"] = {"type": kind, "json_schema": inner} if kind == "json_schema" else form
    if body.tools:
        for index, tool in enumerate(body.tools):
            wording.name(f"tools[{index}].function", f"tools[{index}]")
            if tool.get("type") != "function":
                raise unsupported(
                    f"tools[{index}] has type {shown(tool.get('type'))}; only function is known", param="tools"
                )
        record["tools"] = [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in body.tools
        ]
    return record


def input_turns(given: str | list[dict[str, Any]], wording: Wording, *, first: int) -> list[dict[str, Any]]:
    """The input items as messages, of which the first one has that place in the chat."""
    if isinstance(given, str):
        wording.name(f"messages[{first}]", "input")
        wording.name(f"messages[{first}].content", "input")
        return [{"role": "user", "content": given}]
    turns: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        kind, place = item.get("type", "message"), f"input[{index}]"
        ours = f"messages[{first + len(turns)}]"
        if kind == "message":
            wording.name(ours, place)
            turns.append({"role": item.get("role"), "content": _text(item.get("content"), f"{place}.content")})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments") or "{}"}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not turns or turns[-1]["role"] != "assistant":
                turns.append({"role": "assistant", "content": ""})
            calls = turns[-1].setdefault("tool_calls", [])
            ours = f"messages[{first + len(turns) - 1}].tool_calls[{len(calls)}]"
            wording.name(ours, place)
            wording.name(f"{ours}.id", f"{place}.call_id")
            wording.name(f"{ours}.function", place)
            calls.append(call)
        elif kind == "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _text(output, f"{place}.output")
            wording.name(ours, place)
            wording.name(f"{ours}.content", f"{place}.output")
            wording.name(f"{ours}.tool_call_id", f"{place}.call_id")
            turns.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        elif kind != "reasoning":
            raise unsupported(f"{place} has type {shown(kind)}, which is not known", param=f"{place}.type")
    return turns


def _text(content: Any, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{place} must be text or a list of parts", param=place)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in _PARTS or not isinstance(part.get("text"), str):
            raise unsupported(f"{place} holds a part that is no text", param=place)
    return "".join(part["text"] for part in content)


@dataclass(eq=False)
class _Call:
    """One answer on its way: output items open and close as reasoning, text and calls take turns."""

    state: ServerState
    chat: Chat
    body: ResponsesRequest
    turns: list[dict[str, Any]]
    session: str | None
    items: list[dict[str, Any]] = field(default_factory=list)
    number: int = 0
    _kind: str | None = None

    async def whole(self) -> dict[str, Any]:
        async for item in self.chat.turn.events():
            if item is not None:
                self._parts(*item)
        self._end()
        return self._finish()

    async def frames(self, first: First) -> AsyncIterator[bytes]:
        yield self._event("response.created", response=self._record("in_progress"))
        yield self._event("response.in_progress", response=self._record("in_progress"))
        try:
            async for item in self.chat.turn.events(first):
                if item is None:
                    yield KEEP_ALIVE
                    continue
                yield b"".join(self._parts(*item))
        except ApiError as error:
            failed = {**self._record("failed"), "error": {"code": error.code, "message": error.message}}
            yield self._event("response.failed", response=failed)
            return
        for part in self._end():
            yield part
        record = self._finish()
        yield self._event(f"response.{record['status']}", response=record)

    def _finish(self) -> dict[str, Any]:
        answer = self.chat.answers[0]
        if self.body.store is not False:
            conversation = Remembered((*self.turns, _said(answer)), self.session)
            self.state.responses.put(self.chat.answer_id, conversation)
        return self._record("incomplete" if answer.finish_reason == "length" else "completed")

    def _record(self, status: str) -> dict[str, Any]:
        body, done = self.body, status in ("completed", "incomplete")
        record: dict[str, Any] = {
            "id": self.chat.answer_id, "object": "response", "created_at": self.chat.created, "status": status,
            "model": self.chat.model.name, "output": list(self.items), "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {}, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": body.previous_response_id, "store": body.store is not False,
            "temperature": body.temperature, "top_p": body.top_p, "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [], "text": body.text or {"format": {"type": "text"}}, "truncation": "disabled",
            "usage": None, "completed_at": int(time.time()) if done else None,
        }  # fmt: skip
        if done:
            usage = usage_of(self.chat.answers)
            record["usage"] = {
                "input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached},
                "output_tokens": usage.completion, "output_tokens_details": {"reasoning_tokens": usage.reasoning},
                "total_tokens": usage.prompt + usage.completion,
            }  # fmt: skip
        return record

    def _parts(self, member: Member, event: Event) -> list[bytes]:
        return [part for delta in take(self.chat, member, event) for part in self._delta(delta)]

    def _delta(self, delta: Delta) -> list[bytes]:
        if isinstance(delta, ToolCallDelta):
            return self._call(delta)
        kind = "reasoning" if isinstance(delta, Reasoning) else "message"
        parts = [] if self._kind == kind else [*self._close(), *self._open(kind)]
        item = self.items[-1]
        item["content"][0]["text"] += delta.text
        name = "response.reasoning_text.delta" if kind == "reasoning" else "response.output_text.delta"
        more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
        return [*parts, self._event(name, **self._at(), content_index=0, delta=delta.text, **more)]

    def _call(self, step: ToolCallDelta) -> list[bytes]:
        parts: list[bytes] = []
        if step.name is not None:
            parts += self._close()
            parts += self._open("function_call", {"call_id": step.call_id, "name": step.name, "arguments": ""})
        if step.arguments:
            self.items[-1]["arguments"] += step.arguments
            parts.append(self._event("response.function_call_arguments.delta", **self._at(), delta=step.arguments))
        if step.done:
            parts += self._close("incomplete" if step.valid is False else "completed")
        return parts

    def _open(self, kind: str, members: Mapping[str, Any] | None = None) -> list[bytes]:
        self._kind = kind
        item: dict[str, Any] = {"type": kind, "id": new_id("item_"), "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        item |= members or {}
        self.items.append(item)
        parts = [self._event("response.output_item.added", output_index=len(self.items) - 1, item=_copy(item))]
        if kind in ("message", "reasoning"):
            item["content"].append(_part(kind))
            parts.append(self._event("response.content_part.added", **self._at(), content_index=0, part=_part(kind)))
        return parts

    def _end(self) -> list[bytes]:
        """Close what is open, as cut short where the limit of tokens ended the answer."""
        return self._close("incomplete" if self.chat.answers[0].finish_reason == "length" else "completed")

    def _close(self, status: str = "completed") -> list[bytes]:
        if self._kind is None:
            return []
        kind, item = self._kind, self.items[-1]
        self._kind = None
        item["status"] = status
        parts: list[bytes] = []
        if kind == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            parts.append(self._event("response.function_call_arguments.done", **self._at(), **done))
        else:
            part = item["content"][0]
            name = "response.reasoning_text.done" if kind == "reasoning" else "response.output_text.done"
            more: dict[str, Any] = {} if kind == "reasoning" else {"logprobs": []}
            parts.append(self._event(name, **self._at(), content_index=0, text=part["text"], **more))
            parts.append(self._event("response.content_part.done", **self._at(), content_index=0, part=dict(part)))
        parts.append(self._event("response.output_item.done", output_index=len(self.items) - 1, item=_copy(item)))
        return parts

    def _at(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _event(self, name: str, /, **members: Any) -> bytes:
        self.number += 1
        return frame({"type": name, "sequence_number": self.number - 1, **members}, event=name)


def _part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(item: Mapping[str, Any]) -> dict[str, Any]:
    return {name: [dict(part) for part in value] if isinstance(value, list) else value for name, value in item.items()}


def _said(answer: Answer) -> dict[str, Any]:
    """The answer as a message of the conversation that goes on."""
    return reply_message(content="".join(answer.content), tool_calls=answer.calls.calls)
