"""The real small model behind the real clients: what they get is what the engine gives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from server_running import Running

import polytoken

pytestmark = pytest.mark.model
ASK: Any = [{"role": "user", "content": "What is the capital of France?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(smollm2: Path) -> Iterator[Running]:
    with Running({"smollm2": polytoken.load(smollm2)}) as running:
        yield running


def test_the_clients_get_what_the_engine_gives(server: Running) -> None:
    engine = server.state.pool.loaded["smollm2"].engine
    words: Any = {"messages": ASK, "temperature": 0.0, "max_tokens": 16}
    alone = polytoken.generate(engine, messages=ASK, max_new_tokens=16, sampling={"temperature": 0.0})
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    chat = client.chat.completions.create(model="smollm2", logprobs=True, top_logprobs=2, **words)
    assert chat.choices[0].message.content == alone.text
    assert chat.choices[0].logprobs is not None
    entries = chat.choices[0].logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == alone.text
    chunks = client.chat.completions.create(model="smollm2", stream=True, **words)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == alone.text
    answer = client.responses.create(model="smollm2", input=ASK, temperature=0, max_output_tokens=16)
    assert answer.output_text == alone.text
    claude = anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0)
    message = claude.messages.create(model="smollm2", max_tokens=16, extra_body={"temperature": 0}, messages=ASK)
    assert message.content[0].text == alone.text  # type: ignore[union-attr]


def test_a_schema_and_a_forced_call(server: Running) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    answer = client.chat.completions.create(model="smollm2", messages=ASK, response_format=form, max_tokens=60)
    assert set(json.loads(answer.choices[0].message.content or "")) == {"city"}
    tools: Any = [{"type": "function", "function": {"name": "tell", "parameters": SCHEMA}}]
    answer = client.chat.completions.create(
        model="smollm2", messages=ASK, tools=tools, tool_choice="required", parallel_tool_calls=False, max_tokens=80
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert set(json.loads(call.function.arguments)) == {"city"}  # type: ignore[union-attr]
