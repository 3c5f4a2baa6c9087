"""Structured output: what was asked for comes, with drafts and without; what cannot be promised is refused."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_running import Running

import polytoken
from polytoken.errors import RequestError
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.sampling.grammar import ReasoningMarks, calls_grammar, compile_grammar, json_grammar, regex_grammar
from polytoken.testkit.tiny import write_checkpoint

CHAT = "/v1/chat/completions"
SCHEMA = {
    "type": "object",
    "properties": {"size": {"enum": ["small", "large"]}, "count": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["size", "count"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = [
    {"type": "function", "function": {"name": "order", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "bill", "parameters": NOTHING}},
]
ASK: dict[str, Any] = {"messages": [{"role": "user", "content": "order"}], "enable_thinking": False, "max_tokens": 300}


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One random model with a draft head on two lanes."""
    path = write_checkpoint(
        tmp_path_factory.mktemp("head"), "qwen3_5", seed=5, config={"max_position_embeddings": 2048}
    ).path
    engines = {
        "ar": polytoken.load(path, lane="ar"),
        "mtp": polytoken.load(path, lane="mtp", mtp=MtpSettings(depth=3)),
    }
    with Running(engines) as server:
        yield server


def answer(server: Running, **body: Any) -> dict[str, Any]:
    status, record = server.post(CHAT, {**ASK, **body})
    assert status == 200, record
    choice: dict[str, Any] = record["choices"][0]
    return choice


def check(text: str) -> None:
    value = json.loads(text)
    assert value["size"] in ("small", "large")
    assert 0 <= value["count"] <= 99
    assert len(value) == 2


@pytest.mark.parametrize("lane", ["ar", "mtp"])
def test_the_answer_satisfies_the_schema(heads: Running, lane: str) -> None:
    """A16: greedy and drawn, of a model that would never write it by itself; drafts go on."""
    for words in ({"temperature": 0}, {"temperature": 1, "seed": 1}, {"temperature": 1, "seed": 2, "top_p": 0.9}):
        choice = answer(heads, model=lane, response_format=form(SCHEMA), **words)
        check(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"


def test_drafts_do_not_change_what_a_grammar_gives(heads: Running) -> None:
    """C10, D18: the same text with and without speculation, penalties among it, and drafts were made."""
    for words in (
        {"temperature": 0},
        {"temperature": 0, "frequency_penalty": 1.0},
        {"temperature": 0, "logprobs": True},
    ):
        plain = answer(heads, model="ar", response_format=form(SCHEMA), **words)
        _, record = heads.post(CHAT, {**ASK, "model": "mtp", "response_format": form(SCHEMA), **words})
        assert record["choices"][0]["message"]["content"] == plain["message"]["content"]
        assert record["timings"]["draft_n"] >= record["timings"]["draft_n_accepted"] > 0


def test_objects_expressions_and_calls(heads: Running) -> None:
    for lane in ("ar", "mtp"):
        text = answer(heads, model=lane, response_format={"type": "regex", "regex": "[ab]{2,4}-[0-9]{3}"})
        assert re.fullmatch("[ab]{2,4}-[0-9]{3}", text["message"]["content"])
        choice = answer(heads, model=lane, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert choice["finish_reason"] == "tool_calls", choice
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] in ("order", "bill")
        json.loads(call["function"]["arguments"])
        named = {"type": "function", "function": {"name": "order"}}
        (call,) = answer(heads, model=lane, tools=TOOLS, tool_choice=named)["message"]["tool_calls"]
        check(call["function"]["arguments"])
    body = {**ASK, "model": "mtp", "tools": TOOLS, "tool_choice": named}
    steps = [d for c in heads.stream(CHAT, body)[:-1] for d in c["choices"][0]["delta"].get("tool_calls", [])]
    assert steps[0]["function"]["name"] == "order"
    check("".join(step["function"]["arguments"] for step in steps))


GEMMA_TEMPLATE = (
    "{{ bos_token }}{%- if tools -%}{{ '<start_of_turn>user\\n' + (tools | tojson) + '<end_of_turn>\\n' }}{%- endif -%}"
    "{%- for m in messages -%}{{ '<start_of_turn>' + m.role + '\\n' + m.content }}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{ '<|tool_call>call:' + call.function.name + '{}<tool_call|>' }}{%- endfor -%}"
    "{{ '<end_of_turn>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"
)


def test_a_call_is_forced_in_gemmas_markup(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, "gemma3_text", seed=2, config={"max_position_embeddings": 2048}).path
    (path / "chat_template.jinja").write_text(GEMMA_TEMPLATE)
    with Running({"gemma": polytoken.load(path)}) as server:
        words = {"model": "gemma", "tools": TOOLS, "temperature": 1}
        for seed in range(3):
            choice = answer(server, **words, tool_choice="required", parallel_tool_calls=False, seed=seed)
            assert choice["finish_reason"] == "tool_calls", choice
            (call,) = choice["message"]["tool_calls"]
            assert call["function"]["name"] in ("order", "bill")
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
        named = {"type": "function", "function": {"name": "order"}}
        (call,) = answer(server, **words, tool_choice=named)["message"]["tool_calls"]
        check(call["function"]["arguments"])


def test_an_answer_cut_by_length_is_a_beginning(heads: Running) -> None:
    """A16."""
    choice = answer(heads, model="mtp", response_format=form(SCHEMA), max_tokens=6)
    assert choice["finish_reason"] == "length"
    assert '{"size":"small","count":'.startswith(choice["message"]["content"].replace(" ", "").replace("\n", "")[:8])


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "notatype"},
        {"type": "json_schema"},
        {"type": "json_schema", "json_schema": {"name": "x"}},
        form({"type": "notatype"}),
        form({"not": {"type": "string"}}),
        form({"type": "array", "uniqueItems": True}),
        form({"$ref": "#/nowhere"}),
        {"type": "regex", "regex": "("},
        {"type": "regex"},
    ],
)
def test_a_bad_format_is_refused(heads: Running, bad: Any) -> None:
    """A16: never free text instead."""
    status, record = heads.post(CHAT, {**ASK, "model": "ar", "response_format": bad})
    assert status == 400, record
    assert record["error"]["param"].startswith("response_format")


def test_a_choice_of_no_tool_is_refused(heads: Running) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "none"}}):
        status, record = heads.post(CHAT, {**ASK, "model": "ar", "tool_choice": choice})
        assert (status, record["error"]["param"]) == (400, "tool_choice")


def test_thinking_has_a_budget(heads: Running) -> None:
    """A19: the block that the model opens by itself, or the prompt, ends at the budget, and an answer follows."""
    tokenizer = heads.state.pool.loaded["ar"].tokenizer
    opening = tokenizer.encode("<think>", add_special_tokens=False)
    bias = {str(opening[0]): 100}
    body = {"enable_thinking": True, "thinking_budget": 16, "logit_bias": bias, "temperature": 0}
    for lane in ("ar", "mtp"):
        _, record = heads.post(CHAT, {**ASK, **body, "model": lane, "response_format": form(SCHEMA)})
        choice = record["choices"][0]
        assert record["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 16 + 2
        assert choice["message"]["reasoning_content"]
        check(choice["message"]["content"])


def test_requests_of_every_kind_beside_each_other_answer_as_alone(heads: Running) -> None:
    """A23: plain, penalties, schema, forced call, drawn, log-probabilities, joining and leaving at different times."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0, "max_tokens": 24},
        {"temperature": 0, "max_tokens": 40, "frequency_penalty": 1.0},
        {"temperature": 0, "response_format": form(SCHEMA)},
        {"temperature": 1, "seed": 4, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"temperature": 1, "seed": 5, "max_tokens": 33},
        {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 2},
    ]

    def ask(kind: int) -> Any:
        choice = answer(heads, model="mtp", **kinds[kind])
        for call in choice["message"].get("tool_calls", ()):
            call.pop("id")
        return choice

    alone = [ask(kind) for kind in range(len(kinds))]
    wrong: list[int] = []

    def work(number: int) -> None:
        rng = random.Random(number)
        for _ in range(2):
            time.sleep(rng.random() / 50)
            kind = rng.randrange(len(kinds))
            if ask(kind) != alone[kind]:
                wrong.append(kind)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_formats_tools_choices_and_streams_together(heads: Running) -> None:
    """Each of several choices satisfies the schema, streamed too; with tools at hand a format holds for the content."""
    body: dict[str, Any] = {"response_format": form(SCHEMA), "temperature": 1, "seed": 2, "n": 3}
    for words in ({}, {"tools": TOOLS, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}):
        _, record = heads.post(CHAT, {**ASK, "model": "mtp", **body, **words})
        texts = [choice["message"]["content"] for choice in record["choices"]]
        for text in texts:
            check(text)
        chunks = heads.stream(CHAT, {**ASK, "model": "mtp", **body, **words})
        for index, text in enumerate(texts):
            parts = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
            assert "".join(part["delta"].get("content") or "" for part in parts) == text
            assert [part["finish_reason"] for part in parts if part["finish_reason"]] == ["stop"]
    status, record = heads.post(CHAT, {**ASK, "model": "mtp", **body, "tools": TOOLS, "tool_choice": "required"})
    assert (status, record["error"]["param"]) == (400, "response_format")


SCALARS = st.sampled_from(
    [
        {"type": "boolean"},
        {"type": "integer", "minimum": 0, "maximum": 20},
        {"enum": ["a", "b c", 3, None]},
        {"type": "string", "maxLength": 6},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"const": "fix"},
    ]
)


def objects(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    properties = st.dictionaries(st.sampled_from(["size", "count", "ä", "x y"]), values, min_size=1, max_size=3)
    return properties.map(
        lambda named: {
            "type": "object", "properties": named, "required": sorted(named), "additionalProperties": False,
        }
    )  # fmt: skip


SCHEMAS = objects(
    st.recursive(
        SCALARS,
        lambda inner: st.one_of(
            objects(inner),
            inner.map(lambda item: {"type": "array", "items": item, "minItems": 1, "maxItems": 2}),
            st.lists(inner, min_size=2, max_size=2).map(lambda both: {"anyOf": both}),
        ),
        max_leaves=4,
    )
)


@given(schema=SCHEMAS, seed=st.integers(0, 1000), temperature=st.sampled_from([0, 1]))
@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_whatever_the_schema_the_answer_parses_and_validates(
    heads: Running, schema: dict[str, Any], seed: int, temperature: int
) -> None:
    """A16: random schemas, greedy and drawn, with drafts."""
    body = {**ASK, "model": "mtp", "response_format": form(schema), "seed": seed, "temperature": temperature}
    status, record = heads.post(CHAT, {**body, "max_tokens": 600})
    assert status == 200, record
    (choice,) = record["choices"]
    assert choice["finish_reason"] == "stop"
    jsonschema.validate(json.loads(choice["message"]["content"]), schema)
    assert record["timings"]["draft_n"] > 0


THINKING_TEMPLATE = (
    "{%- for m in messages -%}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)


def test_thinking_that_the_prompt_opens_has_a_budget(tmp_path: Path) -> None:
    """A19: the other way to begin a block; with a schema behind it and without."""
    path = write_checkpoint(tmp_path, "qwen3_5", seed=5, config={"max_position_embeddings": 2048}).path
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": THINKING_TEMPLATE}))
    with Running({"mtp": polytoken.load(path, lane="mtp", mtp=MtpSettings(depth=3))}) as server:
        body = {"messages": ASK["messages"], "thinking_budget": 16, "temperature": 0, "max_tokens": 200}
        for words in ({"response_format": form(SCHEMA)}, {}):
            status, record = server.post(CHAT, {**body, **words})
            assert status == 200, record
            assert 0 < record["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 16 + 1  # and the tag
            assert record["choices"][0]["message"]["content"]
            if words:
                check(record["choices"][0]["message"]["content"])


# -- the grammar's state ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from polytoken.checkpoint.tokenizer import load_tokenizer  # noqa: PLC0415
    from polytoken.testkit.tokenizer import write_tokenizer  # noqa: PLC0415

    folder = tmp_path_factory.mktemp("grammar")
    write_tokenizer(folder, "qwen", vocab_size=512)
    (folder / "config.json").write_text("{}")
    return load_tokenizer(folder)


CASES: dict[str, tuple[str, bool | None]] = {
    '{"size": "small", "count": 7}': (json_grammar(SCHEMA), None),
    "ab-123": (regex_grammar("[ab]{2}-[0-9]{3}"), None),
    '<think>{"a</think>{"size": "large", "count": 0}': (json_grammar(SCHEMA), False),
    'notes {"x</think>{"size": "large", "count": 0}': (json_grammar(SCHEMA), True),
}


@pytest.mark.parametrize("text", CASES)
def test_going_back_leaves_no_trace(tokenizer: Any, text: str) -> None:
    """D18: at every place, across the end of reasoning too, the masks after a rollback are those of a fresh walk."""
    grammar_text, opened = CASES[text]
    opening = tokenizer.encode("<think>", add_special_tokens=False)[0]
    closing = tuple(tokenizer.encode("</think>", add_special_tokens=False))
    marks = None if opened is None else ReasoningMarks(opening, closing, opened)
    grammar = compile_grammar(grammar_text, tokenizer, vocab_size=520, eos_ids=tokenizer.eos_ids, reasoning=marks)
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_ids[0]]
    masks, walker = [], grammar.open()
    for token_id in ids:
        mask = walker.allowed()
        assert mask is None or mask[token_id]
        masks.append(None if mask is None else mask.copy())
        walker.observe(token_id)
    for ahead in (1, 2, 3, 5):
        state = grammar.open()
        for place, token_id in enumerate(ids):
            mark = state.mark()
            for drafted in [*ids[place : place + ahead], *([65, 66] if place + ahead >= len(ids) else [])]:
                state.observe(drafted)
            state.rollback(mark)
            mask = state.allowed()
            assert (mask is None) == (masks[place] is None)
            assert mask is None or (mask == masks[place]).all()
            state.observe(token_id)


def test_calls_of_two_tools(tokenizer: Any) -> None:
    grammar = compile_grammar(
        calls_grammar(TOOLS, tokenizer, several=True), tokenizer, vocab_size=512, eos_ids=tokenizer.eos_ids
    )
    text = (
        '<tool_call>\n{"name": "bill", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "order", "arguments": {"size": "small", "count": 3}}\n</tool_call>'
    )
    state = grammar.open()
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        mask = state.allowed()
        assert mask is not None
        assert mask[token_id]
        state.observe(token_id)
    mask = state.allowed()
    assert mask is not None
    assert all(mask[token_id] for token_id in tokenizer.eos_ids)
    with pytest.raises(RequestError, match="breaks the grammar"):
        state.observe(tokenizer.encode("x", add_special_tokens=False)[0])
