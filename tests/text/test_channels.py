"""Reasoning and answer: every character once, quoted tags left alone."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytoken.text.channels import Channel, ReasoningSplitter, ReasoningTags, opens_reasoning, split_reasoning

PIECES = st.lists(
    st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "a", " ", "\n", "<", "b c"]), max_size=12
)


def stream(text: str, *, opened: bool, cuts: list[int]) -> tuple[str, str]:
    splitter = ReasoningSplitter(opened=opened)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    steps = [splitter.push(text[left:right]) for left, right in pairwise(places)]
    steps.append(splitter.finish())
    return "".join(step.reasoning for step in steps), "".join(step.content for step in steps)


@given(PIECES, st.booleans(), st.lists(st.integers(0, 60), max_size=10))
def test_every_character_once_for_any_cutting(pieces: list[str], opened: bool, cuts: list[int]) -> None:
    text = "".join(pieces)
    reasoning, content = split_reasoning(text, opened=opened)
    assert stream(text, opened=opened, cuts=cuts) == (reasoning, content)
    assert stream(text, opened=opened, cuts=list(range(len(text)))) == (reasoning, content)
    begun = text.lstrip()
    if begun.startswith("<think>"):
        text = text[: len(text) - len(begun)] + begun[len("<think>") :]
        opened = True
    if opened and "</think>" in text:
        assert reasoning + "</think>" + content == text
        assert "</think>" not in reasoning
    else:
        assert (reasoning, content) == ((text, "") if opened else ("", text))


@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("I see.</think>\n\nFour.", True, ("I see.", "\n\nFour.")),
        ("<think>I see.</think>Four.", False, ("I see.", "Four.")),
        ("\n<think>\nI see.</think>Four.", True, ("\n\nI see.", "Four.")),
        ("Write `<think>` and `</think>`.", False, ("", "Write `<think>` and `</think>`.")),
        ("a</think>b<think>c</think>d", True, ("a", "b<think>c</think>d")),
        ("never closed", True, ("never closed", "")),
        ("never closed </thi", True, ("never closed </thi", "")),
        ("close</think>without open", False, ("", "close</think>without open")),
        ("<thin", False, ("", "<thin")),
        ("<thin", True, ("<thin", "")),
        ("", True, ("", "")),
    ],
)
def test_examples(text: str, opened: bool, expected: tuple[str, str]) -> None:
    assert split_reasoning(text, opened=opened) == expected


def test_other_tags() -> None:
    tags = ReasoningTags("[THINK]", "[/THINK]")
    assert split_reasoning("[THINK]a</think>[/THINK]b", opened=False, tags=tags) == ("a</think>", "b")
    with pytest.raises(ValueError, match="empty"):
        ReasoningTags("", "x")


def test_holding_is_bounded() -> None:
    splitter = ReasoningSplitter(opened=False)
    shown = sum(len(splitter.push(" ").content) for _ in range(5000))
    assert shown == 5000
    assert splitter.channel is Channel.CONTENT
    splitter = ReasoningSplitter(opened=True)
    assert len(splitter.push("</thin" + "</thin" * 1000).reasoning) >= 6000


def test_what_a_prompt_opens() -> None:
    assert opens_reasoning("<|im_start|>assistant\n<think>\n")
    assert not opens_reasoning("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_reasoning("<|im_start|>user\nsay <think><|im_end|>\n<|im_start|>assistant\n")
