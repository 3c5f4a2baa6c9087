"""The detokenizer against the tokenizer's own decode of all ids, at every prefix."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import (
    CORPUS,
    WrappedTokenizer,
    byte_fallback,
    byte_level,
    byte_level_backend,
    metaspace,
    word_piece,
    wrap,
)

from polytoken.text import profile
from polytoken.text.detokenizer import WINDOW, Detokenizer
from polytoken.text.profile import REPLACEMENT, Kind, decode_profile

MAKERS = [byte_level, byte_fallback, metaspace, word_piece]
STABLE = [byte_level, metaspace]  # decoders that never take text back, whatever the ids
TEXTS = [
    *CORPUS,
    "👩‍👩‍👧‍👦 and 👨🏽‍🚀🇨🇿 done",
    "e\u0301a\u0308\u0323 combining, क्षत्रिय, ตัวอักษร, 한국어",
    "  two  spaces\t\ttabs\r\n\r\n   end  ",
    "𓀀𓁐 \U0010fffd and a real \ufffd inside",
    "ends with a real \ufffd",
    "def f():\n    return '\\u00e9'  # é\n",
]


def check_prefixes(tokenizer: WrappedTokenizer, ids: Sequence[int], *, skip_special: bool) -> tuple[str, Detokenizer]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    shown = ""
    for count, token_id in enumerate(ids, start=1):
        shown += detokenizer.push(token_id)
        assert detokenizer.text == tokenizer.decode(ids[:count], skip_special_tokens=skip_special)
    return shown + detokenizer.finish(), detokenizer


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("text", TEXTS)
def test_texts_come_back(make: Callable[[], WrappedTokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=True)
    shown, _ = check_prefixes(tokenizer, ids, skip_special=True)
    if make is not word_piece:  # its clean-up takes spaces back that were shown
        assert shown == tokenizer.decode(ids, skip_special_tokens=True)
    if make in (byte_level, byte_fallback):
        assert shown == text or make is byte_fallback


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random_ids(make: Callable[[], WrappedTokenizer], data: st.DataObject) -> None:
    tokenizer = make()
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=90))
    skip = data.draw(st.booleans())
    shown, _ = check_prefixes(tokenizer, ids, skip_special=skip)
    if make in STABLE:
        assert shown == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=80))
def test_random_bytes(data: bytes) -> None:
    tokenizer = byte_level()
    symbols = {symbol: tokenizer.inner.convert_tokens_to_ids(symbol) for symbol in _byte_symbols().values()}
    ids = [symbols[_byte_symbols()[byte]] for byte in data]
    shown, _ = check_prefixes(tokenizer, ids, skip_special=True)
    assert shown == data.decode(errors="replace")


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.text(max_size=3), st.binary(max_size=2)), max_size=12))
def test_byte_fallback_runs(parts: list[str | bytes]) -> None:
    tokenizer = byte_fallback()
    ids: list[int] = []
    for part in parts:
        data = part.encode(errors="ignore") if isinstance(part, str) else part
        ids += [tokenizer.inner.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in data]
        ids += tokenizer.encode("a b", add_special_tokens=False) if len(data) % 2 else []
    check_prefixes(tokenizer, ids, skip_special=True)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_round_trip(make: Callable[[], WrappedTokenizer], text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    shown, _ = check_prefixes(tokenizer, ids, skip_special=False)
    assert shown == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_no_part_of_a_character_is_shown(make: Callable[[], WrappedTokenizer]) -> None:
    tokenizer = make()
    text = "नमस्ते 👩‍👩‍👧‍👦 𓀀 界"
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    shown = ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        delta = detokenizer.push(token_id)
        assert REPLACEMENT not in delta
        shown += delta
        assert text.startswith(shown)
    assert shown == text


def test_the_window_stays_short() -> None:
    for make in MAKERS:
        tokenizer = make()
        ids = tokenizer.encode(" ".join(CORPUS[:3]) * 3, add_special_tokens=False)
        detokenizer = Detokenizer(tokenizer, skip_special=True)
        longest = 0
        for token_id in ids:
            detokenizer.push(token_id)
            longest = max(longest, len(detokenizer._window))
        assert longest <= WINDOW + 16


def test_a_real_replacement_mark_comes_out() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("a\ufffd", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    assert "".join(map(detokenizer.push, ids)) == "a"
    assert detokenizer.finish() == "\ufffd"
    assert detokenizer.finish() == ""


def test_endless_bad_bytes_do_not_stall() -> None:
    for tokenizer, name in ((byte_level(), _byte_symbols()[0xFF]), (byte_fallback(), "<0xFF>")):
        token_id = tokenizer.inner.convert_tokens_to_ids(name)
        detokenizer = Detokenizer(tokenizer, skip_special=True)
        shown = 0
        for count in range(1, 201):
            shown += len(detokenizer.push(token_id))
            assert count - shown <= 5
        assert shown + len(detokenizer.finish()) == 200
        assert tokenizer is byte_fallback() or len(detokenizer._window) < WINDOW + 8


def test_a_character_after_bad_bytes_is_whole() -> None:
    tokenizer = byte_level()
    data = b"\xff\xff\xff\xff" + "界".encode() + b"\xe4"
    ids = [tokenizer.inner.convert_tokens_to_ids(_byte_symbols()[byte]) for byte in data]
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    shown = "".join(map(detokenizer.push, ids))
    assert shown == "\ufffd\ufffd\ufffd\ufffd界"
    assert detokenizer.finish() == "\ufffd"


def test_special_tokens_inside_a_character() -> None:
    tokenizer = byte_level()
    first, *rest = tokenizer.encode("𓀀", add_special_tokens=False)
    eos, extra = tokenizer.inner.convert_tokens_to_ids(["</s>", "<extra>"])
    shown, _ = check_prefixes(tokenizer, [first, eos, extra, *rest], skip_special=True)
    assert shown == "𓀀"
    check_prefixes(tokenizer, [first, eos, extra, *rest], skip_special=False)


def test_text_that_changes_is_continued_where_it_differs() -> None:
    tokenizer = word_piece()
    ids = tokenizer.encode("isn ' t it", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    shown = ""
    for token_id in ids:
        before = shown
        shown += detokenizer.push(token_id)
        assert shown.startswith(before)
    assert detokenizer.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_a_fork_is_independent() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("नमस्ते दुनिया", add_special_tokens=False)
    one = Detokenizer(tokenizer, skip_special=True)
    for token_id in ids[:5]:
        one.push(token_id)
    two = one.fork()
    before = one.text
    for token_id in ids[5:]:
        two.push(token_id)
    assert one.text == before
    assert two.text == tokenizer.decode(ids, skip_special_tokens=True)


def test_kinds_of_ids() -> None:
    tokenizer = byte_level()
    asked = decode_profile(tokenizer)
    kinds = {name: asked.kind(tokenizer, tokenizer.inner.convert_tokens_to_ids(name)) for name in ("</s>", "<extra>")}
    assert set(kinds.values()) == {Kind.SPECIAL}
    assert asked.kind(tokenizer, tokenizer.inner.convert_tokens_to_ids("<tool>")) is Kind.TEXT
    assert asked.kind(tokenizer, tokenizer.vocab_size + 7) is Kind.NOTHING
    assert asked.kind(tokenizer, -1) is Kind.NOTHING
    assert decode_profile(metaspace()).partial_id is None
    for tokenizer in (byte_level(), byte_fallback()):
        partial = decode_profile(tokenizer).partial_id
        assert partial is not None
        assert tokenizer.decode([partial], skip_special_tokens=False) == REPLACEMENT


def test_profiles_are_kept_and_dropped_with_the_tokenizer() -> None:
    tokenizer = wrap(byte_level_backend())
    assert decode_profile(tokenizer) is decode_profile(tokenizer)
    key = id(tokenizer)
    assert key in profile._PROFILES
    del tokenizer
    gc.collect()
    assert key not in profile._PROFILES


def test_cost_per_token_does_not_grow() -> None:
    tokenizer = byte_level()
    ids = (tokenizer.encode(" ".join(CORPUS), add_special_tokens=False) * 40)[:4000]
    detokenizer = Detokenizer(tokenizer, skip_special=True)
    spent = []
    for part in range(4):
        start = time.process_time()
        for token_id in ids[part * 1000 : (part + 1) * 1000]:
            detokenizer.push(token_id)
        spent.append(time.process_time() - start)
    assert min(spent[2:]) < 3 * min(spent[:2])


def _byte_symbols() -> dict[int, str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    symbols = {byte: chr(byte) for byte in printable}
    return symbols | {byte: chr(256 + index) for index, byte in enumerate(others)}
