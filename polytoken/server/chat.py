"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.events import Event, GenerationResult, Token
from polytoken.server.answer import Answer, Content, Delta, Reasoning, stats_of, usage_of
from polytoken.server.asking import answer_headers, check_choices, new_id, requests_of, session_of
from polytoken.server.beside import beside
from polytoken.server.body import read_record
from polytoken.server.errors import ApiError, bad_request, shown, unsupported
from polytoken.server.logprobs import chat_logprobs
from polytoken.server.pool import Model
from polytoken.server.prompt import Prompt, chat_prompt, check_room
from polytoken.server.records import ChatRequest
from polytoken.server.reply import First, reply
from polytoken.server.state import ServerState, state_of
from polytoken.server.stream import DONE, KEEP_ALIVE, frame
from polytoken.server.structure import grammar_of
from polytoken.server.turn import Member, Turn
from polytoken.server.watch import Watch, watch_requests
from polytoken.text.committed import call_record
from polytoken.text.toolcalls import TAGGED, ToolCallParser, tool_markup


@dataclass(eq=False)
class Chat:
    """One call on its way: what was asked, and the answers so far."""

    state: ServerState
    model: Model
    body: ChatRequest
    turn: Turn
    answers: list[Answer]
    answer_id: str
    created: int
    watch: Watch | None = None

    def base(self, kind: str) -> dict[str, Any]:
        """What every answer and chunk begins with."""
        return {
            "id": self.answer_id,
            "object": kind,
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }


async def chat_completions(request: HttpRequest) -> Response:
    """Answer a conversation."""
    state = state_of(request)
    body = await read_record(request, ChatRequest, state.settings)
    check_choices(body, state.settings.max_choices)
    async with state.pool.use(body.model) as model:
        chat = await open_chat(state, model, body, session=session_of(request.headers, body.metadata))
    return await answer(request, chat)


async def open_chat(
    state: ServerState, model: Model, body: ChatRequest, *, prefix: str = "chatcmpl-", session: str | None = None
) -> Chat:
    """Check the call against the model, and queue its requests; the answer's id begins with `prefix`."""
    tools = await beside(lambda: tools_of(body), body.tools)
    if body.top_logprobs is not None and not body.logprobs:
        raise unsupported("top_logprobs needs logprobs: true", param="top_logprobs")
    prompt = await prompt_of(model, body, tools)
    check_room(model, prompt, state.settings.max_context, param="messages")
    grammar = await grammar_of(
        model,
        prompt,
        body.response_format,
        think=thinks(body),
        forced=forced_tools(body, tools),
        several=body.parallel_tool_calls is not False and not isinstance(body.tool_choice, dict),
        budget=body.thinking_budget,
    )
    answer_id = new_id(prefix)
    requests = requests_of(
        model,
        body,
        [prompt],
        answer_id=answer_id,
        limit=body.max_completion_tokens or body.max_tokens,
        cap=state.settings.max_new_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        session=session,
        extra={"tools": prompt.tools, "think": thinks(body), "grammar": grammar},
    )
    watch = await watch_requests(model, requests) if body.polytoken is not None and body.polytoken.watch else None
    turn = state.open_turn(model, requests)
    if watch is not None:
        watch.turn = turn
    told_apart = not tools or (prompt.tools and tool_markup(model.tokenizer.chat_template) is not None)  # by the engine
    answers = [
        Answer(None if told_apart else ToolCallParser(TAGGED, tools=tools, call_id=f"call_{request.request_id[-8:]}_"))
        for request in requests
    ]
    return Chat(state, model, body, turn, answers, answer_id, int(time.time()), watch)


async def prompt_of(model: Model, body: ChatRequest, tools: Sequence[dict[str, Any]]) -> Prompt:
    """What the model reads for this call, `tools_of` it among that. Errors as in `chat_prompt`."""

    def turns() -> list[dict[str, Any]]:
        return [{"content": "", **message.model_dump(exclude_none=True)} for message in body.messages]

    messages = await beside(turns, body.messages)
    return await chat_prompt(model, messages, think=thinks(body), tools=tools, extra=body.chat_template_kwargs)


def thinks(body: ChatRequest) -> bool:
    """Whether the template is asked for reasoning; the plainest word counts."""
    if body.enable_thinking is not None:
        return body.enable_thinking
    words = body.chat_template_kwargs or {}
    if isinstance(words.get("enable_thinking"), bool):
        return bool(words["enable_thinking"])
    return body.reasoning_effort not in ("none", "minimal")


def tools_of(body: ChatRequest) -> list[dict[str, Any]]:
    """What the model may call in this turn."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools or ()]


def forced_tools(body: ChatRequest, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools of which one must be called; none where the model is free.

    Raises:
        ApiError: 400 for a choice that names no tool.
    """
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return []
    if choice == "required":
        if not tools:
            raise bad_request("tool_choice required needs tools", param="tool_choice")
        return list(tools)
    named = choice.get("function", choice) if isinstance(choice, dict) else {}
    name = named.get("name") if isinstance(named, dict) else None
    chosen = [tool for tool in tools if tool["function"]["name"] == name]
    if not chosen:
        raise bad_request(f"tool_choice names no tool of this request: {shown(name)}", param="tool_choice")
    return chosen


async def answer(request: HttpRequest, chat: Chat) -> Response:
    """The whole answer, or the stream of it."""
    return await reply(
        request,
        chat.turn,
        stream=chat.body.stream,
        whole=lambda: _whole(chat),
        frames=lambda first: _frames(chat, first),
        headers=answer_headers(chat.answer_id, chat.body, chat.model),
    )


async def _whole(chat: Chat) -> dict[str, Any]:
    async for item in chat.turn.events():
        if item is not None:
            take(chat, *item)
    choices = [_choice(chat, index, answer) for index, answer in enumerate(chat.answers)]
    first = chat.answers[0].result
    assert first is not None
    return {
        **chat.base("chat.completion"),
        "choices": choices,
        "usage": usage_of(chat.answers, per_prompt=len(chat.answers)).openai(),
        "timings": stats_of(first),
    }


def _choice(chat: Chat, index: int, answer: Answer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": "".join(answer.content), "refusal": None}
    if answer.calls.calls:
        message["tool_calls"] = [call_record(call) for call in answer.calls.calls]
        message["content"] = message["content"] or None
    if answer.reasoning:
        message["reasoning_content"] = "".join(answer.reasoning)
    return {
        "index": index,
        "message": message,
        "logprobs": _logprobs(chat, answer.logprobs) if chat.body.logprobs else None,
        "finish_reason": answer.finish_reason,
    }


def delta_record(delta: Delta) -> dict[str, Any]:
    """What a chunk says of it; empty for a step that only ends a call."""
    if isinstance(delta, Reasoning):
        return {"reasoning_content": delta.text}
    if isinstance(delta, Content):
        return {"content": delta.text}
    if delta.name is None and not delta.arguments:
        return {}
    call: dict[str, Any] = {"index": delta.index, "function": {"arguments": delta.arguments}}
    if delta.name is not None:
        call = {"index": delta.index, "id": delta.call_id, "type": "function",
                "function": {"name": delta.name, "arguments": delta.arguments}}  # fmt: skip
    return {"tool_calls": [call]}


def take(chat: Chat, member: Member, event: Event) -> Sequence[Delta]:
    """Feed one event to its choice; what that adds."""
    answer = chat.answers[member.index]
    if isinstance(event, Token):
        return answer.push(event)
    if isinstance(event, GenerationResult):
        return answer.finish(event)
    return ()


async def _frames(chat: Chat, first: First) -> AsyncIterator[bytes]:
    """The stream: the role, what comes, the end of each choice, usage when asked for, and [DONE] in every case."""
    for answer in range(len(chat.answers)):
        yield _chunk(chat, answer, {"role": "assistant", "content": ""})
    try:
        async for item in chat.turn.events(first):
            if item is None:
                yield KEEP_ALIVE
                continue
            yield b"".join(_parts(chat, *item))  # one write for what came together
    except ApiError as error:
        yield frame(error.openai())
        yield DONE
        return
    if chat.body.wants_usage:
        usage = usage_of(chat.answers, per_prompt=len(chat.answers)).openai()
        result = chat.answers[0].result
        assert result is not None
        yield frame({**chat.base("chat.completion.chunk"), "choices": [], "usage": usage, "timings": stats_of(result)})
    yield DONE


def _parts(chat: Chat, member: Member, event: Event) -> list[bytes]:
    index = member.index
    parts = []
    fresh = [] if not isinstance(event, Token) or event.logprobs is None else list(event.logprobs)
    for delta in take(chat, member, event):
        record = delta_record(delta)
        if record:
            parts.append(_chunk(chat, index, record, fresh))
            fresh = []
    if fresh:
        parts.append(_chunk(chat, index, {}, fresh))  # tokens whose text is still held back
    seen = None if chat.watch is None else chat.watch.record(member, event)
    if seen is not None:
        choice = {"index": index, "delta": {}, "logprobs": None, "finish_reason": None}
        parts.append(_frame(chat, choice, polytoken=seen))
    if isinstance(event, GenerationResult):
        parts.append(_chunk(chat, index, {}, finish=chat.answers[index].finish_reason))
    return parts


def _chunk(
    chat: Chat, index: int, delta: dict[str, Any], logprobs: Sequence[Any] = (), finish: str | None = None
) -> bytes:
    entries = _logprobs(chat, logprobs) if logprobs else None
    choice = {"index": index, "delta": delta, "logprobs": entries, "finish_reason": finish}
    return _frame(chat, choice)


def _frame(chat: Chat, choice: dict[str, Any], **more: Any) -> bytes:
    usage = {"usage": None} if chat.body.wants_usage else {}  # null before the last chunk, as OpenAI has it
    return frame({**chat.base("chat.completion.chunk"), "choices": [choice], **usage, **more})


def _logprobs(chat: Chat, entries: Sequence[Any]) -> dict[str, Any] | None:
    return {"content": chat_logprobs(chat.model.tokenizer, entries), "refusal": None}
