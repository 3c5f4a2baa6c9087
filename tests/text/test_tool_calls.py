"""Tool calls in text: the same for any cutting, nothing lost, nothing held for long, nothing invented."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from typing import Any

import mlx_lm.tool_parsers.gemma4
import mlx_lm.tool_parsers.qwen3_coder
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytoken.events import ToolCall, ToolCallDelta, ToolCallSum
from polytoken.text.toolcalls import (
    GEMMA4,
    GEMMA_FUNCTIONS,
    TAGGED,
    ToolCallParser,
    ToolMarkup,
    parse_tool_calls,
    tool_markup,
)
from polytoken.text.toolcalls.parser import MAX_HEAD

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string"},
                    "count": {"type": "integer"},
                    "ratio": {"type": "number"},
                    "exact": {"type": "boolean"},
                    "options": {"type": "object"},
                    "either": {"anyOf": [{"type": "string"}, {"type": "array"}]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]


def stream(text: str, sizes: Sequence[int], markup: ToolMarkup = TAGGED) -> tuple[str, tuple[ToolCall, ...]]:
    """Content and calls of a text that comes in pieces of these sizes, the rest character by character."""
    parser = ToolCallParser(markup, tools=TOOLS)
    pieces: list[str | ToolCallDelta] = []
    at = 0
    for size in [*sizes, *[1] * len(text)]:
        pieces += parser.push(text[at : at + size])
        at += size
    pieces += parser.finish()
    calls = ToolCallSum()
    for piece in pieces:
        if isinstance(piece, ToolCallDelta):
            calls.add(piece)
    return "".join(piece for piece in pieces if isinstance(piece, str)), calls.calls


def parse(text: str, markup: ToolMarkup = TAGGED) -> tuple[str, tuple[ToolCall, ...]]:
    return parse_tool_calls(text, markup, tools=TOOLS)


def arguments(call: ToolCall) -> Any:
    assert call.valid
    return json.loads(call.arguments)


TAGS = ("<tool_call>", "</tool_call>", "<tool", "_call>", "```", "`", "\n", " ", "text", "é", "<")
JSON = ("{", "}", "[", "]", ",", ":", '"', "\\", "\\u", '"query": "a"', '"count": 5.0', '"x": NaN', "'y': None")
CALLS = (
    '{"name": "search", "arguments": ',
    '{"arguments": {"a": 1}, "name": "stop"}',
    '{"name": "stop"}',
    '{"name": ""}',
)
XML = ("<function=search>", "<parameter=query>", "<parameter=count>", "</parameter>", "</function>", "5", "null")
GEMMA = (
    "<|tool_call>",
    "<tool_call|>",
    "call:",
    "search",
    "stop{}",
    "query:",
    '<|"|>',
    "count:5.0",
    "call:search{query:<|",
)
FRAGMENTS = st.lists(st.sampled_from([*TAGS, *JSON, *CALLS, *XML]), max_size=24).map("".join)
GEMMA_FRAGMENTS = st.lists(st.sampled_from([*GEMMA, *JSON[:6], "a", "1", " ", "<|tool", "<"]), max_size=20).map("".join)


@given(FRAGMENTS, st.lists(st.integers(0, 30), max_size=12))
def test_cutting_changes_nothing(text: str, sizes: list[int]) -> None:
    assert stream(text, sizes) == parse(text) == stream(text, [])


@given(GEMMA_FRAGMENTS, st.lists(st.integers(0, 30), max_size=12))
def test_cutting_changes_nothing_with_marks(text: str, sizes: list[int]) -> None:
    assert stream(text, sizes, GEMMA4) == parse(text, GEMMA4)


@given(FRAGMENTS)
def test_what_yields_no_call_is_content_to_the_last_character(text: str) -> None:
    content, calls = parse(text)
    if not calls:
        assert content == text
    for call in calls:
        assert call.name in text
        if call.valid:
            assert isinstance(json.loads(call.arguments), dict)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
OBJECTS = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)


@given(st.lists(OBJECTS, max_size=3), st.lists(st.integers(0, 40), max_size=8), st.sampled_from([None, 1]))
def test_a29_every_call_of_a_turn(objects: list[dict[str, Any]], sizes: list[int], indent: int | None) -> None:
    calls = [json.dumps({"name": f"t{i}", "arguments": value}, indent=indent) for i, value in enumerate(objects)]
    text = "Now.\n" + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)
    content, found = stream(text, sizes)
    assert content.strip() == "Now."
    assert [(call.name, arguments(call)) for call in found] == [(f"t{i}", value) for i, value in enumerate(objects)]
    assert [call.call_id for call in found] == [f"call_{i}" for i in range(len(objects))]


@given(OBJECTS)
def test_pythons_spelling_reads_like_json(value: dict[str, Any]) -> None:
    written = repr({"name": "t", "arguments": value})
    if "\\x" in written or "\\U" in written or "\\u" in written:
        return  # escapes that are Python's alone
    _, (call,) = parse(f"<tool_call>{written}</tool_call>")
    assert arguments(call) == ast.literal_eval(written)["arguments"]


SIMPLE = st.dictionaries(
    st.from_regex(r"[a-z_]{1,8}", fullmatch=True),
    st.text(st.characters(codec="utf-8", exclude_characters="<>|\0\x85\r"), max_size=12).filter(
        lambda text: text.lower() != "null"
    ),
    max_size=4,
)


@given(SIMPLE, st.sampled_from([TAGGED, GEMMA4]))
def test_the_same_as_the_parsers_of_mlx_lm(value: dict[str, str], markup: ToolMarkup) -> None:
    if markup is TAGGED:
        theirs = mlx_lm.tool_parsers.qwen3_coder
        blocks = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in value.items())
        body = f"<function=other>\n{blocks}</function>"
    else:
        theirs = mlx_lm.tool_parsers.gemma4
        body = "call:other{" + ",".join(f'{key}:<|"|>{text}<|"|>' for key, text in value.items()) + "}"
    expected = theirs.parse_tool_call(body, None)
    _, (call,) = parse(f"{markup.opening}{body}{markup.closing}", markup)
    assert (call.name, arguments(call)) == (expected["name"], expected["arguments"])


def call_of(body: str) -> str:
    return f'<tool_call>{{"name": "search", "arguments": {body}}}</tool_call>'


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"count": 5.0}', '{"count": 5}'),  # whole, and declared so
        ('{"ratio": 5.0}', '{"ratio": 5.0}'),
        ('{"count": 5.5}', '{"count": 5.5}'),  # not lossless: as written
        ('{"exact": "true"}', '{"exact": "true"}'),
        ('{"query": "a",}', '{"query": "a"}'),
        ("{'query': 'it\"s \\' so'}", '{"query": "it\\"s \' so"}'),
        ('{"query": null}', '{"query": null}'),
        ('{"options": {"a": [1, {"b": []}]}}', '{"options": {"a": [1, {"b": []}]}}'),
        ("{}", "{}"),
        ("null", "{}"),
        ('"{\\"query\\": \\"a\\"}"', '{"query": "a"}'),  # written into a string
        ('{query: "a"}', '{"query": "a"}'),
        ('{"query": "\\d+ \\u00e9 \n"}', '{"query": "\\\\d+ \\u00e9 \\n"}'),
    ],
)
def test_a30_no_call_is_dropped_over_its_form(body: str, expected: str) -> None:
    content, (call,) = parse(call_of(body))
    assert (content, call.arguments, call.valid, call.declared) == ("", expected, True, True)


@pytest.mark.parametrize("body", ['{"query": NaN}', '{"query" "a"}', "[1]", '"text"', '{"query": 007}', "{" * 5])
def test_a30_what_cannot_be_read_goes_on_as_it_stands_and_says_so(body: str) -> None:
    content, (call, after) = parse(call_of(body) + '<tool_call>{"name": "stop"}</tool_call>rest')
    assert (content, call.name, call.valid) == ("rest", "search", False)
    assert body.removeprefix('{"query"').removeprefix(":").strip().split()[0][:3] in call.arguments
    assert (after.name, after.valid) == ("stop", True)


@pytest.mark.parametrize(
    ("tail", "content"),
    [("}}</tool_call>b", "b"), ("}</tool_call>b", "b"), ("}}}</tool_call>b", "b"), ("}}", ""), ("}}\n", "")],
)
def test_slips_with_the_last_brace(tail: str, content: str) -> None:
    found, (call,) = parse('<tool_call>{"name": "search", "arguments": {"query": "a"' + tail)
    assert (found, call.valid, call.arguments) == (content, True, '{"query": "a"}')


def test_xml_values_have_the_declared_types() -> None:
    values = {"query": "5", "count": "5.0", "ratio": "1e3", "exact": "True", "options": "{'a': None}", "other": "[1]"}
    values |= {"either": "[1, 2]"}
    blocks = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in values.items())
    _, (call,) = parse(f"<tool_call>\n<function=search>\n{blocks}</function>\n</tool_call>")
    expected = {"query": "5", "count": 5, "ratio": 1e3, "exact": True, "options": {"a": None}, "other": "[1]"}
    assert arguments(call) == {**expected, "either": [1, 2]}
    odd = {"count": "many", "exact": "maybe", "options": "none of it {", "ratio": "NaN"}
    blocks = "".join(f"<parameter={key}>{text}</parameter>" for key, text in odd.items())
    _, (call,) = parse(f"<tool_call><function=search>{blocks}</function></tool_call>")
    assert arguments(call) == odd  # kept as text rather than dropped


def test_several_calls_between_two_tags() -> None:
    for text, markup in [
        ('<tool_call>{"name": "stop"}\n{"name": "search", "arguments": {"count": 1}}</tool_call>', TAGGED),
        ("<tool_call><function=stop></function><function=search><parameter=count>1</parameter></function></tool_call>",
         TAGGED),
        ("<|tool_call>call:stop{}call:search{count:1}<tool_call|>", GEMMA4),
        ("<start_function_call>call:stop{} call:search{count:1}<end_function_call>", GEMMA_FUNCTIONS),
    ]:  # fmt: skip
        content, calls = parse(text, markup)
        assert content == ""
        assert [(call.name, arguments(call)) for call in calls] == [("stop", {}), ("search", {"count": 1})]


def test_arguments_are_streamed_before_the_call_ends() -> None:
    parser = ToolCallParser(TAGGED, tools=TOOLS)
    (begun,) = parser.push('<tool_call>\n{"name": "search", "arguments": {"query": "al')
    assert isinstance(begun, ToolCallDelta)
    assert (begun.index, begun.call_id, begun.name) == (0, "call_0", "search")
    assert begun.arguments == '{"query": "al'
    assert parser.push("pha") == [ToolCallDelta(index=0, arguments="pha")]
    xml = ToolCallParser(TAGGED, tools=TOOLS)
    (begun,) = xml.push("<tool_call>\n<function=search>\n<parameter=query>\nal")
    assert isinstance(begun, ToolCallDelta)
    assert begun.arguments == '{"query": "al'


def test_unknown_tools_are_calls_that_say_so() -> None:
    _, (call,) = parse('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>')
    assert (call.name, call.declared, call.valid) == ("nobody", False, True)


@pytest.mark.parametrize(
    "text",
    [
        "Write `<tool_call>` to call.",
        "<tool_call> is the tag, </tool_call> closes it",
        "<tool_call></tool_call>",
        '<tool_call>{"name": 3}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>get_weather(city='x')</tool_call>",
        "<tool_call><function=></function></tool_call>",
        '```xml\n<tool_call>\n{"name": "search", "arguments": {}}\n</tool_call>\n```\n',
        "<tool_call>",
        "<tool_call>{",
        "<tool_ca",
    ],
)
def test_a07_what_is_no_call_is_text(text: str) -> None:
    assert parse(text) == (text, ())


def test_a_call_behind_a_quoted_tag_is_still_found() -> None:
    content, (call,) = parse('Write <tool_call> so:\n```\n<tool_call>\n```\n<tool_call>{"name": "stop"}</tool_call>')
    assert content == "Write <tool_call> so:\n```\n<tool_call>\n```\n"
    assert call.name == "stop"


@pytest.mark.parametrize("opening", ["```\n<tool_call>\n", '<tool_call>{"arguments": {"a": "', "<tool_call>{'x': '"])
def test_a07_no_opening_holds_a_stream(opening: str) -> None:
    parser = ToolCallParser(TAGGED, tools=TOOLS)
    parser.push(opening)
    shown = held = 0
    for _ in range(5000):
        shown += sum(len(piece) for piece in parser.push("word ") if isinstance(piece, str))
        held = max(held, len(opening) + 5 * (_ + 1) - shown)
    assert held <= MAX_HEAD + len(opening) + 5
    assert shown > 5 * 4000


def test_a_call_whose_text_breaks_off_is_not_valid() -> None:
    content, (call,) = parse('a<tool_call>{"name": "search", "arguments": {"query": "al')
    assert (content, call.valid, call.arguments) == ("a", False, '{"query": "al')
    _, (call,) = parse("<tool_call><function=search><parameter=count>12")
    assert (call.valid, call.arguments) == (False, '{"count": 12')


def test_brackets_without_end_are_no_recursion() -> None:
    content, (call,) = parse('<tool_call>{"name": "t", "arguments": {"a": ' + "[" * 5000 + "</tool_call>x")
    assert (content, call.valid) == ("x", False)
    assert call.arguments.count("[") == 5000


def test_control_tokens_count_where_they_mean_something() -> None:
    parser = ToolCallParser(GEMMA4, tools=TOOLS)
    assert not parser.wants('<|"|>')
    assert not parser.wants("<tool_call|>")
    assert parser.push("```\n<|tool") == ["```\n"]
    assert parser.wants("<|tool_call>")
    assert parser.mark("<|tool_call>") == ["<|tool"]  # a control token is no quotation
    assert parser.wants('<|"|>')
    parser.push("call:search{query:")
    parser.mark('<|"|>')
    assert [piece.arguments for piece in parser.push("a") if isinstance(piece, ToolCallDelta)] == ["a"]


def test_the_template_names_the_markup() -> None:
    assert tool_markup("{{ '<tool_call>' }}") is TAGGED
    assert tool_markup("<tool_call>\n<function=") is TAGGED
    assert tool_markup("<|tool_call>call:") is GEMMA4
    assert tool_markup("<start_function_call>") is GEMMA_FUNCTIONS
    assert tool_markup("{{ messages }}") is None
    assert tool_markup(None) is None
