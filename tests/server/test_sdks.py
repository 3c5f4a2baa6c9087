"""The flows of the real `openai` and `anthropic` clients, over a model that says what it is told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest
from scripted import Script
from server_running import Running

CALLS = (
    'Let me look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 5.0}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture
def client(scripted: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture
def claude(scripted: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=scripted.url, api_key="any", max_retries=0) as made:
        yield made


def test_openai_chat(client: openai.OpenAI, script: Script) -> None:
    script.says = lambda prompt: "<think>hm</think>Hello."
    answer = client.chat.completions.create(model="scripted", messages=HELLO)
    assert answer.choices[0].message.content == "Hello."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == 4
    chunks = list(
        client.chat.completions.create(
            model="scripted", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello."
    assert chunks[-1].usage == answer.usage
    assert client.models.list().data[0].id == "scripted"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model="scripted", messages=HELLO, temperature=-1)
    with pytest.raises(openai.BadRequestError, match="embeddings"):
        client.embeddings.create(model="scripted", input="x")
    assert client.completions.create(model="scripted", prompt="x", max_tokens=99).choices[0].text.endswith("Hello.")


@pytest.mark.parametrize("group", [1, 4, 1000])
def test_openai_tools(client: openai.OpenAI, script: Script, group: int) -> None:
    """A29, A30, A08: two calls with distinct ids, streamed and not; a whole number written 5.0 is one."""
    script.says, script.group = lambda prompt: CALLS, group
    answer = client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS)
    message = answer.choices[0].message
    assert answer.choices[0].finish_reason == "tool_calls"
    assert [call.function.name for call in message.tool_calls or []] == ["weather", "weather"]  # type: ignore[union-attr]
    arguments = [json.loads(call.function.arguments) for call in message.tool_calls or []]  # type: ignore[union-attr]
    assert arguments == [{"city": "Oslo", "days": 5}, {"city": "Rome"}]
    assert len({call.id for call in message.tool_calls or []}) == 2
    assert (message.content or "").strip() == "Let me look."

    merged: dict[int, dict[str, str]] = {}
    finishes = []
    for chunk in client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS, stream=True):
        finishes += [choice.finish_reason for choice in chunk.choices if choice.finish_reason]
        for step in chunk.choices[0].delta.tool_calls or []:
            call = merged.setdefault(step.index, {"id": "", "arguments": ""})
            call["id"] += step.id or ""
            call["arguments"] += (step.function.arguments if step.function else "") or ""
    assert finishes == ["tool_calls"]
    assert [json.loads(call["arguments"]) for _, call in sorted(merged.items())] == arguments

    history = [*HELLO, message.model_dump(exclude_none=True)]  # what a client sends back: B02
    history += [{"role": "tool", "tool_call_id": call.id, "content": "5 C"} for call in message.tool_calls or []]
    script.says = lambda prompt: "Cold." if "5 C" in prompt and "Oslo" in prompt else "?"
    answer = client.chat.completions.create(model="scripted", messages=history, tools=TOOLS)
    assert answer.choices[0].message.content == "Cold."


def test_an_opening_tag_in_code_holds_nothing_back(client: openai.OpenAI, script: Script) -> None:
    """A07: no call is invented, and text keeps coming."""
    text = "Write:\n```\n<tool_call>\n```\n" + "and so on " * 300
    script.says, script.group = lambda prompt: text, 20
    stream = client.chat.completions.create(model="scripted", messages=HELLO, tools=TOOLS, stream=True)
    chunks = [chunk for chunk in stream if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    assert len(chunks) > 100
    assert not any(chunk.choices[0].delta.tool_calls for chunk in chunks)


def test_openai_responses(client: openai.OpenAI, script: Script) -> None:
    script.says = lambda prompt: f"<think>n</think>turn {prompt.count('user')}"
    first = client.responses.create(model="scripted", input="hello", instructions="be brief")
    assert (first.status, first.output_text) == ("completed", "turn 1")
    assert [item.type for item in first.output] == ["reasoning", "message"]
    second = client.responses.create(model="scripted", input="again", previous_response_id=first.id)
    assert second.output_text == "turn 2"
    assert first.usage is not None
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens
    with client.responses.stream(model="scripted", input="hello") as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert final.output_text == "turn 1"
    assert events[0].type == "response.created"
    assert events[-1].type == "response.completed"
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="scripted", input="x", previous_response_id="resp_none")
    stateless = client.responses.create(model="scripted", input=[{"role": "user", "content": "a"}], store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="scripted", input="x", previous_response_id=stateless.id)


def test_openai_responses_with_calls(client: openai.OpenAI, script: Script) -> None:
    script.says = lambda prompt: "Mild." if "function says 5" in prompt else CALLS
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS}]
    with client.responses.stream(model="scripted", input="hello", tools=tools) as stream:
        final = stream.get_final_response() if list(stream) else None
    assert final is not None
    calls = [item for item in final.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": "Oslo", "days": 5}, {"city": "Rome"}]
    outputs: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "function says 5"} for call in calls
    ]
    answer = client.responses.create(model="scripted", input=outputs, previous_response_id=final.id, tools=tools)
    assert answer.output_text == "Mild."


def test_anthropic_messages(claude: anthropic.Anthropic, script: Script) -> None:
    script.says = lambda prompt: "<think>hm</think>Hello there."
    answer = claude.messages.create(model="scripted", max_tokens=99, messages=HELLO, system="be brief")
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert answer.content[-1].text == "Hello there."  # type: ignore[union-attr]
    assert answer.stop_reason == "end_turn"
    count = claude.messages.count_tokens(model="scripted", messages=HELLO, system="be brief")
    assert count.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)
    stopped = claude.messages.create(model="scripted", max_tokens=99, messages=HELLO, stop_sequences=[" there"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " there")
    assert claude.messages.create(model="scripted", max_tokens=2, messages=HELLO).stop_reason == "max_tokens"
    with claude.messages.stream(model="scripted", max_tokens=99, messages=HELLO) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[-1].text == "Hello there."  # type: ignore[union-attr]
    assert final.usage.output_tokens == answer.usage.output_tokens
    assert (names[0], names[-2], names[-1]) == ("message_start", "message_delta", "message_stop")
    with pytest.raises(anthropic.BadRequestError):
        claude.messages.create(model="scripted", max_tokens=0, messages=HELLO)
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="other", max_tokens=9, messages=HELLO)


def test_anthropic_tools(claude: anthropic.Anthropic, script: Script) -> None:
    script.says = lambda prompt: "Cold." if "five degrees" in prompt else CALLS
    tools: Any = [{"name": "weather", "input_schema": PARAMETERS}]
    with claude.messages.stream(model="scripted", max_tokens=500, messages=HELLO, tools=tools) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    uses = [block for block in final.content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"city": "Oslo", "days": 5}, {"city": "Rome"}]
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "five degrees"} for use in uses]
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": [block.model_dump() for block in final.content]},
        {"role": "user", "content": results},
    ]
    answer = claude.messages.create(model="scripted", max_tokens=99, messages=history, tools=tools)
    assert answer.content[0].text == "Cold."  # type: ignore[union-attr]
    history[-1]["content"] = [{"type": "tool_result", "content": "x"}]
    with pytest.raises(anthropic.BadRequestError, match="tool_use_id"):
        claude.messages.create(model="scripted", max_tokens=99, messages=history, tools=tools)
