"""The real clients over every lane: tiny canvas models and a hybrid with a draft head, beside the engines."""

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
from polytoken.engine import Engine
from polytoken.events import GenerationResult
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.modilify import modilify_config, write_modilify
from polytoken.testkit.tiny import write_checkpoint

CANVAS = ("modilify", "diffusion_gemma")
LANES = (*CANVAS, "hybrid")
TOKENS = 24
HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}},
    "required": ["size"],
    "additionalProperties": False,
}
FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


def load_modilify(folder: Path) -> Engine:
    """Two layers that are sure of what they see, so that a canvas settles within a few denoises."""
    text = {**modilify_config("b")["text_config"], **LAYERS}
    config = {"text_config": text, "latent_num_layers": 1}
    return polytoken.load(write_modilify(folder, shape="b", weights="echo", config=config).path)


def load_diffusion(folder: Path) -> Engine:
    path = write_checkpoint(folder, "diffusion_gemma", config={**LAYERS, "canvas_length": 6}).path
    return polytoken.load(path, canvas=CanvasSettings(max_denoising_steps=4))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("lanes")
    engines = {
        "modilify": load_modilify(folder / "modilify"),
        "diffusion_gemma": load_diffusion(folder / "block"),
        "hybrid": polytoken.load(
            write_checkpoint(folder / "hybrid", "qwen3_5", acceptance=HISTORY_MATTERS).path, lane="mtp"
        ),
    }
    with Running(engines) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as made:
        yield made


def alone(server: Running, name: str, **words: Any) -> GenerationResult:
    """What the engine itself gives."""
    engine = server.state.pool.loaded[name].engine
    return polytoken.generate(engine, seed=7, max_new_tokens=TOKENS, **words)


@pytest.mark.parametrize("name", LANES)
def test_chat_whole_and_streamed(server: Running, client: openai.OpenAI, name: str) -> None:
    result = alone(server, name, messages=HELLO)
    words: Any = {"model": name, "messages": HELLO, "max_tokens": TOKENS, "seed": 7}
    answer = client.chat.completions.create(**words)
    (choice,) = answer.choices
    assert choice.message.content == result.content
    assert getattr(choice.message, "reasoning_content", None) == result.reasoning
    assert choice.finish_reason == ("length" if result.stop_reason == "max_new_tokens" else "stop")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (
        result.prompt_tokens,
        result.generated_tokens,
    )
    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **words))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == result.content
    finishes = [choice.finish_reason for chunk in chunks for choice in chunk.choices if choice.finish_reason]
    assert finishes == [choice.finish_reason]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == result.generated_tokens


@pytest.mark.parametrize("name", LANES)
def test_texts_are_continued(server: Running, client: openai.OpenAI, name: str) -> None:
    result = alone(server, name, prompt="The river", raw=True)
    words: Any = {"model": name, "prompt": "The river", "max_tokens": TOKENS, "seed": 7}
    assert client.completions.create(**words).choices[0].text == result.text
    chunks = client.completions.create(stream=True, **words)
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == result.text


@pytest.mark.parametrize("name", LANES)
def test_responses(server: Running, client: openai.OpenAI, name: str) -> None:
    result = alone(server, name, messages=HELLO)
    words: Any = {"model": name, "input": HELLO, "max_output_tokens": TOKENS, "extra_body": {"seed": 7}}
    answer = client.responses.create(**words)
    assert answer.output_text == result.content
    assert answer.usage is not None
    assert answer.usage.output_tokens == result.generated_tokens
    with client.responses.stream(**words) as stream:
        events = list(stream)
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == result.content
    assert events[-1].type in ("response.completed", "response.incomplete")
    second = client.responses.create(**{**words, "input": "more"}, previous_response_id=answer.id)
    assert second.usage is not None
    assert second.usage.input_tokens > answer.usage.input_tokens


@pytest.mark.parametrize("name", LANES)
def test_messages(server: Running, claude: anthropic.Anthropic, name: str) -> None:
    result = alone(server, name, messages=HELLO, think=False)
    words: Any = {"model": name, "messages": HELLO, "max_tokens": TOKENS, "extra_body": {"seed": 7}}
    words["thinking"] = {"type": "disabled"}
    answer = claude.messages.create(**words)
    texts = [block.text for block in answer.content if block.type == "text"]
    assert "".join(texts) == result.content
    assert answer.usage.output_tokens == result.generated_tokens
    with claude.messages.stream(**words) as stream:
        assert "".join(stream.text_stream) == result.content
        final = stream.get_final_message()
    assert final.stop_reason == answer.stop_reason
    assert final.usage.output_tokens == result.generated_tokens
    count = claude.messages.count_tokens(model=name, messages=HELLO, thinking={"type": "disabled"})
    assert count.input_tokens == result.prompt_tokens


@pytest.mark.parametrize("name", LANES)
def test_tools_may_be_offered(client: openai.OpenAI, claude: anthropic.Anthropic, name: str) -> None:
    """A09: what a random model writes is no call, and comes as text."""
    words: Any = {"model": name, "max_tokens": TOKENS}
    answer = client.chat.completions.create(messages=HELLO, tools=TOOLS, seed=7, **words)
    assert answer.choices[0].message.content is not None
    assert answer.choices[0].message.tool_calls is None
    chunks = client.chat.completions.create(messages=HELLO, tools=TOOLS, seed=7, stream=True, **words)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    history: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5 C"},
    ]
    assert client.chat.completions.create(messages=history, tools=TOOLS, **words).usage is not None
    anthropic_tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    message = claude.messages.create(messages=HELLO, tools=anthropic_tools, **words)
    assert message.stop_reason in ("end_turn", "max_tokens")


@pytest.mark.parametrize("name", LANES)
def test_several_choices(client: openai.OpenAI, name: str) -> None:
    """A13, F03: each choice is its own, and the first is the one that the seed gives alone."""
    words: Any = {"model": name, "messages": HELLO, "max_tokens": TOKENS, "seed": 7}
    single = client.chat.completions.create(**words)
    answer = client.chat.completions.create(n=3, **words)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.choices[0].message.content == single.choices[0].message.content
    assert answer.usage is not None
    assert single.usage is not None
    assert answer.usage.prompt_tokens == single.usage.prompt_tokens


@pytest.mark.parametrize("name", CANVAS)
@pytest.mark.parametrize(
    ("param", "words"),
    [
        ("response_format", {"response_format": FORMAT}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
        ("logprobs", {"logprobs": True}),
        ("logit_bias", {"logit_bias": {"5": 1}}),
        ("frequency_penalty", {"frequency_penalty": 1.0}),
        ("presence_penalty", {"presence_penalty": 1.0}),
        ("thinking_budget", {"extra_body": {"thinking_budget": 3}}),
    ],
)
def test_a_canvas_refuses_what_it_cannot_promise(client: openai.OpenAI, name: str, param: str, words: Any) -> None:
    """F03: a 400 with the field's name, whole and streamed, and no stream is begun."""
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=name, messages=HELLO, max_tokens=4, stream=stream, **words)
        assert (refused.value.param, refused.value.code) == (param, "unsupported")
        assert "canvas" in refused.value.message


@pytest.mark.parametrize("name", CANVAS)
def test_a_law_of_sampling_that_a_canvas_has_not_is_named(server: Running, name: str) -> None:
    """Most clients send a temperature with everything: it has no effect, which the answer says."""
    body = {"model": name, "messages": HELLO, "max_tokens": TOKENS, "seed": 7}
    _, plain, headers = server.request("POST", "/v1/chat/completions", body)
    assert "x-polytoken-ignored" not in headers
    words = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": None}
    status, record, headers = server.request("POST", "/v1/chat/completions", {**body, **words})
    assert (status, headers["x-polytoken-ignored"]) == (200, "temperature,top_k,top_p")
    assert record["choices"] == plain["choices"]
    status, _, headers = server.request("POST", "/v1/messages", {**body, "temperature": 1.0})
    assert (status, "temperature" in headers["x-polytoken-ignored"]) == (200, True)
    status, record, _ = server.request("POST", "/v1/chat/completions", {**body, "temperature": -1})
    assert (status, record["error"]["param"]) == (400, "temperature")


@pytest.mark.parametrize("name", CANVAS)
def test_other_endpoints_of_a_canvas_refuse_alike(
    client: openai.OpenAI, claude: anthropic.Anthropic, name: str
) -> None:
    """F03."""
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    with pytest.raises(openai.BadRequestError, match="canvas"):
        client.responses.create(model=name, input="x", text=text)
    tools: Any = [{"name": "look", "input_schema": {"type": "object"}}]
    with pytest.raises(anthropic.BadRequestError, match="canvas"):
        claude.messages.create(model=name, messages=HELLO, max_tokens=4, tools=tools, tool_choice={"type": "any"})
    with pytest.raises(openai.BadRequestError, match="canvas"):
        client.completions.create(model=name, prompt="x", logprobs=2)


def test_a_hybrid_with_a_head_has_structure_and_log_probabilities(client: openai.OpenAI) -> None:
    words: Any = {"model": "hybrid", "messages": HELLO, "max_tokens": 80, "extra_body": {"enable_thinking": False}}
    answer = client.chat.completions.create(response_format=FORMAT, logprobs=True, top_logprobs=2, **words)
    (choice,) = answer.choices
    assert json.loads(choice.message.content or "")["size"] in ("small", "large")
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    assert all(len(entry.top_logprobs) == 2 for entry in entries)
    assert answer.model_extra is not None
    assert answer.model_extra["timings"]["draft_n"] > 0
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    response = client.responses.create(model="hybrid", input="hello", text=text, reasoning={"effort": "none"})
    assert json.loads(response.output_text)["size"] in ("small", "large")
    answer = client.chat.completions.create(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **words)
    assert answer.choices[0].finish_reason in ("tool_calls", "length")
