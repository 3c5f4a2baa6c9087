"""The text of one request: deltas, stop strings, full text, for any grouping of ids into commits."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import CORPUS, WrappedTokenizer, byte_fallback, byte_level, metaspace

from polytoken.text.channels import ReasoningSplitter
from polytoken.text.stream import TextStream

MAKERS = [byte_level, byte_fallback, metaspace]
TEXT = "The quick fox 👩‍👩‍👧‍👦 says नमस्ते दुनिया, 你好世界. Isn't it late? No! e\u0301"


def run(stream: TextStream, groups: Sequence[Sequence[int]]) -> tuple[str, int, str | None]:
    """Visible text, ids consumed, stop string; checks what must hold at every step."""
    shown, consumed = "", 0
    for group in groups:
        step = stream.push(group)
        shown += step.delta
        consumed += step.consumed
        assert stream.text == shown
        if step.stop_string is not None:
            assert stream.finish() == ""
            return shown, consumed, step.stop_string
        assert step.consumed == len(group)
    shown += stream.finish()
    assert stream.text == shown
    assert stream.finish() == ""
    return shown, consumed, stream.stop_string


def grouped(ids: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(list(ids[start : start + size]))
        start += size
    return [*groups, list(ids[start:])]


def singles(ids: Sequence[int]) -> list[list[int]]:
    return [[token_id] for token_id in ids]


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_grouping_changes_nothing(make: Callable[[], WrappedTokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    text = data.draw(st.sampled_from([TEXT, *CORPUS]))
    ids = tokenizer.encode(text, add_special_tokens=True)
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=6))
    ids = [*ids, *noise] if data.draw(st.booleans()) else [*noise, *ids]
    stop = data.draw(st.lists(st.sampled_from(["late", "界", "e", "fox 👩", "\ufffd", "zzz"]), max_size=3))
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=20))
    expected = run(TextStream(tokenizer, stop=stop), singles(ids))
    assert run(TextStream(tokenizer, stop=stop), grouped(ids, sizes)) == expected
    assert run(TextStream(tokenizer, stop=stop), [ids]) == expected


@settings(max_examples=60, deadline=None)
@given(ids=st.lists(st.integers(0, 600), max_size=60))
def test_visible_and_full_text_are_the_decodes(ids: list[int]) -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += stream.push([token_id]).delta
        assert stream.full_text == tokenizer.decode(ids[:count], skip_special_tokens=False)
    assert shown + stream.finish() == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", MAKERS)
def test_full_text_in_a_long_answer(make: Callable[[], WrappedTokenizer]) -> None:
    tokenizer = make()
    eos = tokenizer.inner.convert_tokens_to_ids("</s>")
    ids = tokenizer.encode(" ".join(CORPUS), add_special_tokens=True)
    ids = [*ids[:80], eos, *ids[80:], eos]
    stream = TextStream(tokenizer)
    for count, token_id in enumerate(ids, start=1):
        stream.push([token_id])
        assert stream.full_text == tokenizer.decode(ids[:count], skip_special_tokens=False)
    rest = stream.finish()
    assert stream.text.endswith(rest)
    assert stream.text == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_stop_strings_at_every_place(make: Callable[[], WrappedTokenizer]) -> None:
    tokenizer = make()
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    text = tokenizer.decode(ids, skip_special_tokens=True)
    for start in range(0, len(text), 3):
        for length in (1, 2, 5, 11):
            stop = text[start : start + length]
            expected = text[: text.index(stop)]
            one = run(TextStream(tokenizer, stop=[stop, "never"]), singles(ids))
            assert (one[0], one[2]) == (expected, stop)
            # The match is complete with the last consumed id and not before.
            assert stop in tokenizer.decode(ids[: one[1]], skip_special_tokens=True)
            assert stop not in tokenizer.decode(ids[: one[1] - 1], skip_special_tokens=True)
            assert run(TextStream(tokenizer, stop=[stop, "never"]), grouped(ids, [4] * 40)) == one


def test_the_rest_of_a_commit_is_not_consumed() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("one two STOP three four", add_special_tokens=False)
    stream = TextStream(tokenizer, stop=["STOP"])
    step = stream.push(ids)
    assert (step.delta, step.stop_string) == ("one two ", "STOP")
    assert 0 < step.consumed < len(ids)
    assert stream.full_text == tokenizer.decode(ids[: step.consumed], skip_special_tokens=False)
    assert "three" not in stream.full_text
    with pytest.raises(RuntimeError, match="ended"):
        stream.push(ids)


def test_half_a_stop_string_comes_out_at_the_end() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer, stop=["STOP"])
    assert stream.push(tokenizer.encode("go STO", add_special_tokens=False)).delta == "go "
    assert stream.finish() == "STO"
    with pytest.raises(RuntimeError, match="ended"):
        stream.push([1])


def test_a_stop_string_may_be_met_by_finish() -> None:
    tokenizer = byte_level()
    first = tokenizer.encode("𓀀", add_special_tokens=False)[:1]
    stream = TextStream(tokenizer, stop=["a\ufffd"])
    stream.push([*tokenizer.encode("ba", add_special_tokens=False), *first])
    assert stream.finish() == ""
    assert (stream.text, stream.stop_string) == ("b", "a\ufffd")


def test_stop_strings_do_not_see_special_tokens() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("ab<|im_end|>cd<tool>", add_special_tokens=False)
    assert run(TextStream(tokenizer, stop=["<|im_end|>"]), [ids])[0] == "abcd<tool>"
    assert run(TextStream(tokenizer, stop=["bc"]), [ids])[::2] == ("a", "bc")


def test_stop_ids_are_not_visible() -> None:
    tokenizer = byte_level()
    dot = tokenizer.encode("!", add_special_tokens=False)
    ids = [*tokenizer.encode("Hi", add_special_tokens=False), *dot]
    stream = TextStream(tokenizer, stop_ids=frozenset(dot))
    assert stream.push(ids).delta + stream.finish() == "Hi"
    assert stream.full_text == "Hi!"


def test_nothing_at_all() -> None:
    stream = TextStream(byte_level(), stop=["x"])
    assert (stream.push([]).consumed, stream.push([]).delta) == (0, "")
    assert (stream.finish(), stream.text, stream.full_text) == ("", "", "")


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), max_size=30))
@pytest.mark.parametrize(
    ("text", "opened", "expected"),
    [
        ("the END is near</think>yes END no", True, ("the END is near</think>yes ", "END")),
        ("<think>END</think>END", False, ("<think>END</think>", "END")),
        ("no block END", False, ("no block ", "END")),
        ("END in notes only", True, ("END in notes only", None)),
        ("<thin END", False, ("<thin ", "END")),
        ("  <thi", False, ("  <thi", None)),
    ],
)
def test_stop_strings_leave_reasoning_alone(
    text: str, opened: bool, expected: tuple[str, str | None], sizes: list[int]
) -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(tokenizer, stop=["END"], reasoning=ReasoningSplitter(opened=opened))
    assert run(stream, grouped(ids, sizes))[::2] == expected


def test_a_token_is_cheap() -> None:
    tokenizer = byte_level()
    ids = (tokenizer.encode(" ".join(CORPUS), add_special_tokens=False) * 20)[:2000]
    best = float("inf")
    for _ in range(3):
        stream = TextStream(tokenizer, stop=["\n\nUser:", "never"])
        start = time.process_time()
        for token_id in ids:
            stream.push([token_id])
            assert stream.full_text
        best = min(best, (time.process_time() - start) / len(ids))
    assert best < 250e-6  # about 35 microseconds on an idle core; the bound only catches a growing cost


@pytest.mark.model
def test_smollm2() -> None:
    from polytoken.checkpoint.store import CheckpointStore, default_cache_root  # noqa: PLC0415
    from polytoken.checkpoint.tokenizer import load_tokenizer  # noqa: PLC0415
    from polytoken.request import Request  # noqa: PLC0415
    from polytoken.text.prompt import prompt_ids  # noqa: PLC0415

    directory: Path | None = CheckpointStore(default_cache_root()).path("smollm2-135m")
    if directory is None:
        pytest.skip("smollm2-135m is not pulled")
    tokenizer = load_tokenizer(directory)
    for text in (TEXT, *CORPUS):
        ids = tokenizer.encode(text, add_special_tokens=False)
        stream = TextStream(tokenizer)
        for count, token_id in enumerate(ids, start=1):
            stream.push([token_id])
            assert stream.full_text == tokenizer.decode(ids[:count])
        stream.finish()
        assert stream.text == text
    messages = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    )
    ids = prompt_ids(tokenizer, Request(request_id="r", max_new_tokens=1, messages=messages, think=False))
    plain = [messages[0], {"role": "user", "content": "Hi"}]
    expected = tokenizer.fast.apply_chat_template(
        plain, tokenize=True, add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    assert list(ids) == list(expected)
