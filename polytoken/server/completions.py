"""POST /v1/completions: text that is continued as it stands."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.events import Event, GenerationResult, Token, TokenLogprob
from polytoken.server.answer import Answer, stats_of, usage_of
from polytoken.server.asking import answer_headers, check_choices, new_id, requests_of
from polytoken.server.body import read_record
from polytoken.server.errors import ApiError, bad_request, unsupported
from polytoken.server.logprobs import completion_logprobs
from polytoken.server.pool import Model
from polytoken.server.prompt import Prompt, check_room, text_prompt
from polytoken.server.records import CompletionRequest
from polytoken.server.reply import First, reply
from polytoken.server.state import ServerState, state_of
from polytoken.server.stream import DONE, KEEP_ALIVE, frame
from polytoken.server.structure import grammar_of
from polytoken.server.turn import Member, Turn
from polytoken.server.wording import Wording


@dataclass(eq=False)
class Completion:
    """One call on its way."""

    model: Model
    body: CompletionRequest
    turn: Turn
    answers: list[Answer]
    answer_id: str
    created: int
    offsets: list[int]  # characters of each choice so far, for logprobs

    def base(self) -> dict[str, Any]:
        """What every answer and chunk begins with."""
        return {
            "id": self.answer_id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }


async def completions(request: HttpRequest) -> Response:
    """Continue a text."""
    state = state_of(request)
    body = await read_record(request, CompletionRequest, state.settings)
    check_choices(body, state.settings.max_choices)
    _refuse(body)
    async with state.pool.use(body.model) as model:
        call = await _open(state, model, body)
    return await reply(
        request,
        call.turn,
        stream=body.stream,
        whole=lambda: _whole(call),
        frames=lambda first: _frames(call, first),
        headers=answer_headers(call.answer_id, body, call.model),
    )


def _refuse(body: CompletionRequest) -> None:
    if body.echo:
        raise unsupported("echo is not supported: the prompt has no log-probabilities here", param="echo")
    if body.suffix:
        raise unsupported("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise unsupported("best_of other than n is not supported; ask for n choices and choose", param="best_of")


async def _open(state: ServerState, model: Model, body: CompletionRequest) -> Completion:
    texts = _texts(body)
    if len(texts) * (body.n or 1) > state.settings.max_choices:
        raise bad_request(f"prompts times n must be at most {state.settings.max_choices}", param="prompt")
    prompts = []
    for index, text in enumerate(texts):
        wording = Wording()
        if isinstance(body.prompt, list) and not isinstance(body.prompt[0], int):
            wording.name("prompt", f"prompt[{index}]")
        with wording.told():
            prompts.append(await text_prompt(model, text))
            check_room(model, prompts[-1], state.settings.max_context, param="prompt")
    grammar = await grammar_of(model, Prompt(()), body.response_format, think=False)
    answer_id = new_id("cmpl-")
    requests = requests_of(
        model,
        body,
        prompts,
        answer_id=answer_id,
        limit=16 if body.max_tokens is None else body.max_tokens,  # OpenAI's default for this endpoint
        cap=state.settings.max_new_tokens,
        logprobs=body.logprobs,
        extra={"grammar": grammar},
    )
    turn = state.open_turn(model, requests)
    answers = [Answer() for _ in requests]
    return Completion(model, body, turn, answers, answer_id, int(time.time()), [0] * len(requests))


def _texts(body: CompletionRequest) -> list[str | list[int]]:
    prompt: Any = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be an empty list", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [list(prompt)]
    return list(prompt)


async def _whole(call: Completion) -> dict[str, Any]:
    async for item in call.turn.events():
        if item is not None:
            _take(call, *item)
    first = call.answers[0].result
    assert first is not None
    return {
        **call.base(),
        "choices": [
            _choice(call, index, answer.result.text if answer.result else "", answer.logprobs, answer.finish_reason)
            for index, answer in enumerate(call.answers)
        ],
        "usage": usage_of(call.answers, per_prompt=call.body.n or 1).openai(),
        "timings": stats_of(first),
    }


def _choice(call: Completion, index: int, text: str, entries: list[TokenLogprob], finish: str | None) -> dict[str, Any]:
    logprobs = None
    if call.body.logprobs is not None:
        logprobs = completion_logprobs(call.model.tokenizer, entries, start=call.offsets[index])
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}


def _take(call: Completion, member: Member, event: Event) -> str:
    answer = call.answers[member.index]
    if isinstance(event, Token):
        answer.push(event)
        return event.delta  # a text is continued as it stands, tags included
    if isinstance(event, GenerationResult):
        answer.finish(event)
    return ""


async def _frames(call: Completion, first: First) -> AsyncIterator[bytes]:
    try:
        async for item in call.turn.events(first):
            if item is None:
                yield KEEP_ALIVE
                continue
            yield b"".join(_parts(call, *item))
    except ApiError as error:
        yield frame(error.openai())
        yield DONE
        return
    if call.body.wants_usage:
        result = call.answers[0].result
        assert result is not None
        usage = usage_of(call.answers, per_prompt=call.body.n or 1).openai()
        yield frame({**call.base(), "choices": [], "usage": usage, "timings": stats_of(result)})
    yield DONE


def _parts(call: Completion, member: Member, event: Event) -> list[bytes]:
    index = member.index
    text = _take(call, member, event)
    entries = list(event.logprobs or ()) if isinstance(event, Token) else []
    parts = []
    if text or entries:
        choice = _choice(call, index, text, entries, None)
        if call.body.logprobs is not None and choice["logprobs"]["tokens"]:
            call.offsets[index] += sum(len(token) for token in choice["logprobs"]["tokens"])
        parts.append(_frame(call, choice))
    if isinstance(event, GenerationResult):
        choice = _choice(call, index, "", [], call.answers[index].finish_reason)
        parts.append(_frame(call, choice))
    return parts


def _frame(call: Completion, choice: dict[str, Any]) -> bytes:
    usage = {"usage": None} if call.body.wants_usage else {}  # null before the last chunk, as OpenAI has it
    return frame({**call.base(), "choices": [choice], **usage})
