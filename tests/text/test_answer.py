"""Reasoning, content and tool calls of one answer, told apart from its ids as the prompt and the template say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from chat_templates import GEMMA, HERMES, PLAIN, REASONING  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers_for_tests import WrappedTokenizer, byte_level, byte_level_backend, wrap

from polytoken.events import AnswerSum
from polytoken.request import Request
from polytoken.text.answer import open_answer
from polytoken.text.channels import GEMMA4_THOUGHT, THINK, reasoning_tags
from polytoken.text.stream import TextStream

TOOLS = ({"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}},)
CALL = '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>'


def gemma() -> WrappedTokenizer:
    """A tokenizer whose markup consists of control tokens, which visible text leaves out."""
    tokenizer = wrap(type(byte_level_backend()).from_str(byte_level_backend().to_str()), template=GEMMA + "<|channel>")
    marks = ["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<turn|>"]
    tokenizer.inner.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return WrappedTokenizer(tokenizer.inner)


def opened(tokenizer: Any, prompt: str, *, stop: Sequence[str] = (), tools: Any = TOOLS) -> TextStream:
    request = Request(request_id="r", max_new_tokens=9, raw_prompt="x", stop=tuple(stop), tools=tools)
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    return open_answer(tokenizer, request, ids, stop_ids=frozenset({tokenizer.inner.convert_tokens_to_ids("</s>")}))


def told(stream: TextStream, ids: Sequence[int], size: int = 1) -> dict[str, Any]:
    """The members of a result, from ids that come in groups of this size."""
    total = AnswerSum()
    for at in range(0, len(ids), size):
        step = stream.push(ids[at : at + size])
        total.add(stream.drain())
        if step.stop_string is not None:
            break
    stream.finish()
    total.add(stream.drain())
    fields = total.fields()
    calls = fields["tool_calls"] or ()
    fields["tool_calls"] = [(call.name, json.loads(call.arguments) if call.valid else call.arguments) for call in calls]
    return fields


def read(template: str, prompt: str, text: str, **words: Any) -> dict[str, Any]:
    tokenizer = byte_level(template=template)
    return told(opened(tokenizer, prompt, **words), tokenizer.encode(text, add_special_tokens=False))


def test_reasoning_begins_where_the_prompt_opened_it() -> None:
    inside = read(REASONING, "<|im_start|>assistant\n<think>\n", "I see.\n</think>\n\nFour.")
    assert (inside["reasoning"], inside["content"]) == ("I see.\n", "\n\nFour.")
    outside = read(REASONING, "<|im_start|>assistant\n<think>\n\n</think>\n\n", "I see.\n</think>\n\nFour.")
    assert (outside["reasoning"], outside["content"]) == (None, "I see.\n</think>\n\nFour.")
    own = read(REASONING, "<|im_start|>assistant\n", "<think>I see.</think>Four.")
    assert (own["reasoning"], own["content"]) == ("I see.", "Four.")
    unclosed = read(REASONING, "<think>\n", "never closed")
    assert (unclosed["reasoning"], unclosed["content"]) == ("never closed", "")


def test_reasoning_tokens_are_counted() -> None:
    tokenizer = byte_level(template=REASONING)
    notes, answer = (tokenizer.encode(text, add_special_tokens=False) for text in ("I see.\n</think>", "Four."))
    assert told(opened(tokenizer, "<think>\n"), notes + answer)["reasoning_tokens"] == len(notes)
    assert told(opened(tokenizer, "<think>\n"), notes[:3])["reasoning_tokens"] == 3
    assert told(opened(tokenizer, "assistant\n"), answer)["reasoning_tokens"] is None
    whole = tokenizer.encode("<think>I see.</think>", add_special_tokens=False)
    assert told(opened(tokenizer, "assistant\n"), whole + answer)["reasoning_tokens"] == len(whole)


def test_a20_stop_strings_do_not_fire_inside_reasoning() -> None:
    found = read(REASONING, "<think>\n", "The END is near.</think>It is fine. END of it", stop=["END"])
    assert (found["reasoning"], found["content"]) == ("The END is near.", "It is fine. ")


def test_a18_quoted_tags_in_an_answer_stay() -> None:
    found = read(PLAIN, "assistant\n", "Write `<think>` and `</think>`, as in <think>x</think>.", tools=())
    assert (found["reasoning"], found["content"]) == (None, "Write `<think>` and `</think>`, as in <think>x</think>.")


def test_calls_are_told_apart_where_tools_were_declared() -> None:
    found = read(HERMES, "assistant\n", f"Now.\n{CALL}\n{CALL}")
    assert (found["content"], found["tool_calls"]) == ("Now.\n\n", [("look", {"a": 1})] * 2)
    without = read(HERMES, "assistant\n", f"Now.\n{CALL}", tools=())
    assert (without["content"], without["tool_calls"]) == (f"Now.\n{CALL}", [])
    unknown = read(PLAIN, "assistant\n", f"Now.\n{CALL}")  # a template that teaches no markup
    assert unknown["content"] == f"Now.\n{CALL}"


def test_a_call_ends_reasoning_that_was_left_open() -> None:
    found = read(REASONING, "<think>\n", f"I look.\n{CALL}")
    assert (found["reasoning"], found["content"], found["tool_calls"]) == ("I look.\n", "", [("look", {"a": 1})])
    quoted = read(REASONING, "<think>\n", f"Say `{CALL}`?\n```\n{CALL}\n```\n</think>No.")
    assert (quoted["content"], quoted["tool_calls"]) == ("No.", [])
    assert quoted["reasoning"].count("<tool_call>") == 2


def test_f02_markup_of_control_tokens_is_read_and_not_shown() -> None:
    tokenizer = gemma()
    text = '<|channel>thought\nI look.<channel|>Now.<|tool_call>call:look{a:<|"|>x{y<|"|>}<tool_call|>'
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = opened(tokenizer, "<|turn>model\n")
    found = told(stream, ids)
    assert (found["reasoning"], found["content"]) == ("I look.", "Now.")
    assert found["tool_calls"] == [("look", {"a": "x{y"})]
    assert "<" not in stream.text
    stray = tokenizer.encode('Well<channel|> <|"|>no<tool_call|>.', add_special_tokens=False)
    assert told(opened(tokenizer, "<|turn>model\n"), stray)["content"] == "Well no."
    other = tokenizer.encode("<|channel>final\nYes.", add_special_tokens=False)
    assert told(opened(tokenizer, "<|turn>model\n"), other)["content"] == "final\nYes."
    open_thought = tokenizer.encode(
        "<|channel>thought\nSo<|tool_call>call:look{}<tool_call|>", add_special_tokens=False
    )
    found = told(opened(tokenizer, "<|turn>model\n"), open_thought)
    assert (found["reasoning"], found["content"], found["tool_calls"]) == ("So", "", [("look", {})])


@pytest.mark.parametrize("before", ["", "\n", "<|channel>", "\n<|channel>"])
def test_a_control_token_that_ends_an_empty_thought_tells_nothing_twice(before: str) -> None:
    tokenizer = gemma()
    ids = tokenizer.encode(f"{before}<channel|>", add_special_tokens=False)
    for answer in ("", "Yes."):
        stream = opened(tokenizer, "<|channel>thought\n", tools=())
        found = told(stream, [*ids, *tokenizer.encode(answer, add_special_tokens=False)])
        blank = before.replace("<|channel>", "")
        assert (found["reasoning"] or "", found["content"], stream.text) == (blank, answer, blank + answer)


PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", CALL, "<tool_call>", "</tool_call>", "a", "\n", "```", "END", "EN", "😀", "<|im_end|>",
         "<|channel>", "thought\n", "<channel|>", '<|"|>', "<|tool_call>call:look{", "}<tool_call|>"]
    ),
    max_size=10,
).map("".join)  # fmt: skip


@pytest.mark.parametrize("kind", ["tags", "control tokens"])
@given(text=PIECES, size=st.integers(1, 9), thinking=st.booleans())
@settings(max_examples=150, deadline=None)
def test_grouping_changes_nothing_and_nothing_is_lost(kind: str, text: str, size: int, thinking: bool) -> None:
    tokenizer = byte_level(template=REASONING) if kind == "tags" else gemma()
    ids = tokenizer.encode(text, add_special_tokens=False)
    prompt = ("<think>\n" if kind == "tags" else "<|channel>thought\n") if thinking else "x"
    one = opened(tokenizer, prompt, stop=["END"])
    many = opened(tokenizer, prompt, stop=["END"])
    expected = told(one, ids)
    assert told(many, ids, size) == expected
    assert many.text == one.text
    plain = opened(tokenizer, prompt, tools=())
    parts = told(plain, ids)
    if kind == "tags" and not parts["reasoning"]:
        assert parts["content"] in plain.text
    assert len(parts["content"]) + len(parts["reasoning"] or "") <= len(plain.text)


def test_a24_two_answers_do_not_disturb_each_other() -> None:
    tokenizer = byte_level(template=REASONING)
    texts = [f"I see.</think>Now.\n{CALL}", f"Hm.\n{CALL}", f"a</think>{CALL} b"]
    all_ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    alone = [told(opened(tokenizer, "<think>\n"), ids) for ids in all_ids]
    streams, sums = [opened(tokenizer, "<think>\n") for _ in texts], [AnswerSum() for _ in texts]
    for step in range(max(map(len, all_ids))):
        for stream, total, ids in zip(streams, sums, all_ids, strict=True):
            stream.push(ids[step : step + 1])
            total.add(stream.drain())
    for stream, total, expected in zip(streams, sums, alone, strict=True):
        stream.finish()
        total.add(stream.drain())
        assert (total.fields()["reasoning"], total.fields()["content"]) == (expected["reasoning"], expected["content"])


def test_the_end_is_reported_once_and_complete() -> None:
    tokenizer = byte_level(template=REASONING)
    ends: list[tuple[str, Any]] = []
    request = Request(request_id="r", max_new_tokens=9, raw_prompt="x", stop=("END",))
    for text in ("b</think>cEND", "b</think>c"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = open_answer(
            tokenizer, request, tokenizer.encode("<think>", add_special_tokens=False), stop_ids=frozenset(),
            on_end=lambda done: ends.append((done.text, done.answer.fields()["content"])),
        )  # fmt: skip
        stream.push(ids)
        stream.finish()
        stream.drain()
        stream.drain()
        assert stream.ids == tuple(ids)
    assert ends == [("b</think>c", "c")] * 2


def test_the_template_names_the_tags() -> None:
    assert reasoning_tags(None) is THINK
    assert reasoning_tags(PLAIN) is THINK
    assert reasoning_tags("<|channel>thought") is GEMMA4_THOUGHT
