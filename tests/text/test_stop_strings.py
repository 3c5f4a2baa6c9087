"""Stop strings: one rule for every way of cutting the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polytoken.text.stops import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        step = matcher.push(piece)
        shown += step.text
        if step.stop_string is not None:
            return shown, step.stop_string
        assert any(stop.startswith(matcher.held) for stop in stops) or not matcher.held
    return shown + matcher.finish(), None


def reference(stops: list[str], text: str) -> tuple[str, str | None]:
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    st.text("abc", max_size=30),
    st.lists(st.integers(0, 30), max_size=8),
)
def test_any_cutting_gives_the_same(stops: list[str], text: str, cuts: list[int]) -> None:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[left:right] for left, right in pairwise(places)]
    assert run(stops, pieces) == run(stops, list(text)) == run(stops, [text]) == reference(stops, text)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["END"], "the END of", ("the ", "END")),
        (["END"], "the EN", ("the EN", None)),
        (["aab"], "aaab", ("a", "aab")),
        (["ab", "abc"], "xabc", ("x", "ab")),  # the first that is complete
        (["bc", "abc"], "xabc", ("x", "abc")),  # complete together: the longest
        (["abcd", "bc"], "abcd", ("a", "bc")),  # no waiting for what began earlier
        (["\n\n", "\n"], "a\n\nb", ("a", "\n")),
        (["👩\u200d👧", "界"], "世👩\u200d👩界", ("世👩\u200d👩", "界")),
        (["x", "x"], "axb", ("a", "x")),
        ([], "anything", ("anything", None)),
    ],
)
def test_examples(stops: list[str], text: str, expected: tuple[str, str | None]) -> None:
    assert run(stops, [text]) == run(stops, list(text)) == expected


def test_what_stands_behind_the_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("a E").text == "a "
    step = matcher.push("ND tail")
    assert (step.text, step.stop_string, step.rest) == ("", "END", " tail")


def test_a_long_stop_string_costs_no_more_than_its_length() -> None:
    stop = "a" * 20_000 + "b"
    assert run([stop], ["a" * 40_000, "b"]) == ("a" * 20_000, stop)


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
