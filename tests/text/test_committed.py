"""The next turn's ids go on from the committed ones, or the place where histories part has a name."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from chat_templates import GEMMA, HERMES, PLAIN, REASONING  # type: ignore[import-not-found]
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_fallback, byte_level, byte_level_with_bos

from polytoken.checkpoint.tokenizer import load_tokenizer
from polytoken.errors import RequestError
from polytoken.testkit.tokenizer import StyleName, write_tokenizer
from polytoken.text.committed import (
    CommittedStream,
    Encoding,
    PartingReason,
    commit_turn,
    encode_turn,
    same_message,
    shorten,
)
from polytoken.text.prompt import chat_ids, normalise_messages, render

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


@cache
def styled(style: StyleName, template: str) -> Any:
    """The product's own tokenizer over a family's tiny files, with another template."""
    with TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), style, vocab_size=420)
        tokenizer = load_tokenizer(Path(folder))
    tokenizer.fast.chat_template = template
    return replace(tokenizer, chat_template=template)


CASES = {
    "plain": (lambda: styled("llama", PLAIN), "<|im_end|>", False),
    "plain, merged text": (lambda: byte_level(template=PLAIN), "<|im_end|>", False),
    "plain, begin token": (lambda: byte_level_with_bos(template=PLAIN), "<|im_end|>", False),
    "reasoning": (lambda: styled("qwen", REASONING), "<|im_end|>", True),
    "reasoning, merged text": (lambda: byte_level(template=REASONING), "<|im_end|>", True),
    "hermes": (lambda: byte_level(template=HERMES), "<|im_end|>", True),
    "gemma": (lambda: styled("gemma4", GEMMA), "<turn|>", True),
}


class Talk:
    """A conversation between a client that sees visible text alone and a model that cuts its words into odd tokens."""

    def __init__(self, case: str, seed: int) -> None:
        make, self.end, self.calls = CASES[case]
        self.tokenizer = make()
        self.gemma = case == "gemma"
        self.think = "reasoning" in case
        self.random = random.Random(seed)
        self.messages: list[dict[str, Any]] = []
        self.stream: CommittedStream | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        return TOOLS if self.calls else []

    def words(self) -> str:
        pieces = ["the ", "quick", " brown", "fox.", "\n", "né", " 12", "世界", "  ", "`x`", "😀"]
        return "".join(self.random.choices(pieces, k=self.random.randint(1, 6))).strip() or "yes"

    def encode(self) -> Encoding:
        return encode_turn(self.tokenizer, self.messages, self.stream, think=self.think, tools=self.tools)

    def written(self, text: str) -> list[int]:
        """Ids of a text that is written piece by piece, so that they differ from those of reading it."""
        ids: list[int] = []
        while text:
            size = self.random.randint(1, 4)
            ids += self.tokenizer.encode(text[:size], add_special_tokens=False)
            text = text[size:]
        return ids

    def ask(self) -> None:
        self.messages.append({"role": "user", "content": self.words()})

    def answer(self, encoding: Encoding, *, call: bool, ended: bool = True) -> None:
        content = "" if call and self.random.random() < 0.5 else self.words()
        notes = f"{self.words()}" if self.think else ""
        text = (f"{notes}\n</think>\n\n" if self.think else "") + content
        reply: dict[str, Any] = {"content": content}
        if call:
            arguments = {"city": self.words(), "n": str(self.random.randint(0, 9))}
            reply["tool_calls"] = [
                {"id": f"call_{self.random.random()}", "type": "function",
                 "function": {"name": "look", "arguments": json.dumps(arguments, ensure_ascii=False)}}
            ]  # fmt: skip
            if self.gemma:
                inner = ",".join(f'{key}:<|"|>{value}<|"|>' for key, value in arguments.items())
                text += f"<|tool_call>call:look{{{inner}}}<tool_call|>"
            else:
                written = json.dumps({"arguments": arguments, "name": "look"}, indent=self.random.choice([None, 1]))
                text += f"<tool_call>\n{written}\n</tool_call>"
        if notes:
            reply["reasoning_content"] = notes
        ids = self.written(text)
        visible = self.tokenizer.decode(ids, skip_special_tokens=True)
        if ended:
            ids += self.tokenizer.encode(self.end, add_special_tokens=False)
        self.stream = commit_turn(
            self.tokenizer, self.messages, encoding, ids, reply, visible=visible, think=self.think, tools=self.tools
        )
        self.messages.append(self.seen(reply))
        if call:
            self.messages.append({"role": "tool", "content": self.words(), "tool_call_id": "whatever"})

    def seen(self, reply: dict[str, Any]) -> dict[str, Any]:
        """The reply as a client sends it back: reasoning dropped or kept, calls spelled anew, ids kept or changed."""
        message = {"role": "assistant", **reply}
        if self.random.random() < 0.7:
            message.pop("reasoning_content", None)
        if self.random.random() < 0.3:
            message["content"] += "\n"
        if not message["content"] and self.random.random() < 0.5:
            message["content"] = None
        calls = [json.loads(json.dumps(call)) for call in message.get("tool_calls", [])]
        for call in calls:
            value = json.loads(call["function"]["arguments"])
            value = dict(reversed(value.items())) if self.random.random() < 0.5 else value
            call["function"]["arguments"] = self.random.choice(
                [json.dumps(value), json.dumps(value, indent=2, ensure_ascii=False), value]
            )
            if self.random.random() < 0.5:
                call["id"] = "changed"
        return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize("case", CASES)
@given(seed=st.integers(0, 2**32), turns=st.integers(1, 5))
@settings(max_examples=25, deadline=None)
def test_e14_e15_all_that_was_committed_is_kept(case: str, seed: int, turns: int) -> None:
    talk = Talk(case, seed)
    talk.ask()
    for _ in range(turns):
        call = talk.calls and talk.random.random() < 0.5
        ended = talk.random.random() < 0.8
        talk.answer(talk.encode(), call=call, ended=ended)
        if not call:
            talk.ask()
        encoding = talk.encode()
        assert talk.stream is not None
        # An end mark that the template does not write there goes; it was never fed.
        foreign = talk.gemma and call and ended
        assert (encoding.parting, encoding.kept) == (None, len(talk.stream.ids) - foreign)
        assert encoding.ids[: encoding.kept] == talk.stream.ids[: encoding.kept]
        # What is new is, to the letter, how the template ends; the end mark is there once, whoever wrote it.
        text = render(talk.tokenizer, normalise_messages(talk.messages), think=talk.think, tools=talk.tools)
        new = talk.tokenizer.decode(encoding.ids[encoding.kept :], skip_special_tokens=False)
        assert new
        assert text.endswith(new)
        whole = talk.tokenizer.decode(encoding.ids, skip_special_tokens=False)
        assert whole.startswith(talk.stream.head)
        for message in talk.messages:
            assert (message["content"] or "").strip() in whole
        if not talk.gemma:  # whose turns stay open over a call
            assert whole.count(talk.end) == text.count(talk.end)


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_the_text_equals_the_templates_where_nothing_is_hidden(seed: int) -> None:
    """Without reasoning and calls the decode of the kept stream is the rendering of the visible history."""
    talk = Talk("plain, merged text", seed)
    talk.ask()
    for _ in range(4):
        talk.answer(talk.encode(), call=False, ended=talk.random.random() < 0.5)
        talk.messages[-1]["content"] = talk.messages[-1]["content"].strip()
        talk.ask()
    expected = render(talk.tokenizer, talk.messages, think=False)
    assert talk.tokenizer.decode(talk.encode().ids, skip_special_tokens=False) == expected


def test_the_model_and_the_reader_cut_text_differently() -> None:
    """What the tests above rely on: encoding the same text anew gives other tokens, and would lose the cache."""
    talk = conversation("plain, merged text")
    talk.messages = [{**message, "content": message["content"].strip()} for message in talk.messages]
    anew = chat_ids(talk.tokenizer, talk.messages, think=False)
    kept = talk.encode().ids
    assert kept != anew
    assert talk.tokenizer.decode(kept, skip_special_tokens=False) == talk.tokenizer.decode(
        anew, skip_special_tokens=False
    )


def conversation(case: str = "reasoning", *, turns: int = 3) -> Talk:
    talk = Talk(case, 5)
    talk.ask()
    for _ in range(turns):
        talk.answer(talk.encode(), call=False)
        talk.ask()
    return talk


def parting_of(talk: Talk, encoding: Encoding, reason: PartingReason, message: int) -> None:
    assert talk.stream is not None
    assert encoding.parting is not None
    assert (encoding.parting.reason, encoding.parting.message) == (reason, message)
    assert encoding.parting.token == encoding.kept
    assert encoding.ids[: encoding.kept] == talk.stream.ids[: encoding.kept]
    assert str(message) in str(encoding.parting)


@pytest.mark.parametrize(("index", "kept"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_e14_a_change_keeps_the_turns_in_front_of_it_and_is_named(index: int, kept: int) -> None:
    talk = conversation()
    assert talk.stream is not None
    talk.messages[index] = {**talk.messages[index], "content": "something else"}
    encoding = talk.encode()
    parting_of(talk, encoding, PartingReason.MESSAGE, index)
    assert encoding.kept == ([0] + [turn.stop for turn in talk.stream.turns])[kept]
    text = render(talk.tokenizer, normalise_messages(talk.messages), think=True, tools=TOOLS)
    assert text.endswith(talk.tokenizer.decode(encoding.ids[encoding.kept :], skip_special_tokens=False))
    if not kept:
        assert encoding.ids == chat_ids(talk.tokenizer, talk.messages, think=True, tools=TOOLS)


def test_the_same_question_again_has_the_same_prompt() -> None:
    talk = Talk("reasoning", 3)
    talk.ask()
    talk.answer(talk.encode(), call=False)
    talk.ask()
    first = talk.encode()
    talk.answer(first, call=False)
    talk.messages.pop()
    again = talk.encode()
    assert again.ids == first.ids
    parting_of(talk, again, PartingReason.SHORTER, 3)
    talk.think = False  # asked for without reasoning, the prompt ends otherwise
    assert talk.encode().ids[: first.kept] == first.ids[: first.kept]
    assert talk.encode().ids != first.ids


def test_a_template_that_opens_otherwise_is_named() -> None:
    talk = conversation()
    talk.calls = False  # the tools are gone, and with them the system turn that lists them
    encoding = talk.encode()
    parting_of(talk, encoding, PartingReason.HEAD, 0)
    assert encoding.ids == chat_ids(talk.tokenizer, talk.messages, think=True)


def test_a_template_that_hides_the_turn_is_named() -> None:
    blind = PLAIN.replace("m['content']", "(m['content'] if m['role'] != 'assistant' else '...')")
    tokenizer = byte_level(template=blind)
    asked = [{"role": "user", "content": "a"}]
    stream = commit_turn(tokenizer, asked, encode_turn(tokenizer, asked, None, think=False), [5], {"content": "b"},
                         visible="b", think=False)  # fmt: skip
    asked += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    encoding = encode_turn(tokenizer, asked, stream, think=False)
    assert encoding.parting is not None
    assert encoding.parting.reason is PartingReason.TEMPLATE
    assert encoding.ids == chat_ids(tokenizer, asked, think=False)


def test_decomposed_text_keeps_the_cache_where_the_tokenizer_composes_it(tmp_path: Path) -> None:
    """E14: as text from a Mac comes; Qwen's tokenizers compose, and the ids are those of the composed text."""
    write_tokenizer(tmp_path, "qwen", vocab_size=420)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": {"type": "NFC"}}))
    tokenizer = load_tokenizer(tmp_path)
    asked = [{"role": "user", "content": "a"}]
    stream = commit_turn(tokenizer, asked, encode_turn(tokenizer, asked, None, think=False),
                         tokenizer.encode("fox", add_special_tokens=False), {"content": "fox"}, visible="fox",
                         think=False)  # fmt: skip
    asked += [{"role": "assistant", "content": "fox"}, {"role": "user", "content": "cafe\u0301"}]
    encoding = encode_turn(tokenizer, asked, stream, think=False)
    assert encoding.parting is None and encoding.kept == len(stream.ids)
    asked[-1] = {"role": "user", "content": "caf\u00e9"}
    assert encode_turn(tokenizer, asked, stream, think=False).ids == encoding.ids


def test_a_long_history_that_cannot_be_gone_on_from_costs_a_few_renderings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one for each of its turns: that would hold up everybody's prompts for minutes."""
    tokenizer = styled("llama", PLAIN)
    messages: list[dict[str, Any]] = []
    stream = None
    for turn in range(60):
        messages.append({"role": "user", "content": f"q{turn}"})
        encoding = encode_turn(tokenizer, messages, stream, think=False)
        answer = tokenizer.encode(f"a{turn}", add_special_tokens=False)
        reply = {"role": "assistant", "content": f"a{turn}"}
        stream = commit_turn(tokenizer, messages, encoding, answer, reply, visible=f"a{turn}", think=False)
        messages.append(reply)
    messages.append({"role": "user", "content": "last"})
    rendered: list[int] = []

    def hide_answers_from(first: int) -> Encoding:
        """The next prompt under a template that does not show the answers from this message on as they are."""

        def hidden(tokenizer: Any, messages: Any, **options: Any) -> str:
            rendered.append(len(messages))
            shown = [{**each, "content": each["content"] if i < first else "?"} for i, each in enumerate(messages)]
            return render(tokenizer, shown, **options)

        monkeypatch.setattr("polytoken.text.committed.render", hidden)
        rendered.clear()
        return encode_turn(tokenizer, messages, stream, think=False)

    nothing = hide_answers_from(1)
    assert nothing.kept == 0 and nothing.parting is not None and nothing.parting.reason is PartingReason.TEMPLATE
    assert len(rendered) < 25
    for first in (119, 101, 61):
        some = hide_answers_from(first)
        assert first // 2 >= len(some.turns) > first // 4 and len(rendered) < 25


def test_a_decoder_that_changes_text_at_a_seam_is_never_trusted() -> None:
    """Text that is encoded alone gains a space with this tokenizer: the miss is named, the ids are the template's."""
    tokenizer = byte_fallback()
    tokenizer.inner.chat_template = tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
    )
    asked = [{"role": "user", "content": "a"}]
    answer = tokenizer.encode("fox", add_special_tokens=False)
    stream = commit_turn(tokenizer, asked, encode_turn(tokenizer, asked, None, think=False), answer,
                         {"content": "fox"}, visible="fox", think=False)  # fmt: skip
    asked += [{"role": "assistant", "content": "fox"}, {"role": "user", "content": "c"}]
    encoding = encode_turn(tokenizer, asked, stream, think=False)
    if encoding.parting is None:
        whole = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        before = tokenizer.decode(stream.ids, skip_special_tokens=False)
        assert whole == before + ";user:c;"
    else:
        assert encoding.parting.reason is PartingReason.SEAM
        assert encoding.ids == chat_ids(tokenizer, asked, think=False)


@pytest.mark.parametrize("stop", ["quick", "ick b", "fox", "q", "世"])
def test_a_stop_string_is_cut_out_of_the_stream(stop: str) -> None:
    tokenizer = byte_level(template=PLAIN)
    asked = [{"role": "user", "content": "a"}]
    first = encode_turn(tokenizer, asked, None, think=False)
    ids = tokenizer.encode("The quick brown fox 世界 jumps", add_special_tokens=False)
    visible = "The quick brown fox 世界 jumps".split(stop, maxsplit=1)[0]
    told = {"content": visible}
    stream = commit_turn(tokenizer, asked, first, ids, told, visible=visible, think=False)
    asked += [{"role": "assistant", "content": visible.strip()}, {"role": "user", "content": "c"}]
    encoding = encode_turn(tokenizer, asked, stream, think=False)
    assert (encoding.parting, encoding.kept) == (None, len(stream.ids))
    assert encoding.ids[: len(first.ids)] == first.ids
    text = tokenizer.decode(encoding.ids, skip_special_tokens=False)
    behind = "<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert text == tokenizer.decode(first.ids, skip_special_tokens=False) + visible + behind


def test_what_counts_as_the_same_message() -> None:
    call = {"function": {"name": "f", "arguments": '{"a": 1, "b": "é"}'}}
    told = {"role": "assistant", "content": "x", "reasoning_content": "r", "tool_calls": [call]}
    spelled = {"id": "n", "function": {"name": "f", "arguments": '{"b":"\\u00e9",\n"a":1}'}}
    assert same_message(told, {"role": "assistant", "content": " x\n", "tool_calls": [spelled]})
    assert same_message(told, {**told, "reasoning_content": "r\n"})
    assert not same_message(told, {**told, "reasoning_content": "other"})
    assert not same_message(told, {**told, "tool_calls": []})
    assert not same_message(told, {**told, "tool_calls": [{"function": {"name": "g", "arguments": {}}}]})
    assert not same_message(told, {**told, "role": "user"})
    user = {"role": "user", "content": "a"}
    assert not same_message(user, {**user, "content": "a "})
    assert not same_message(user, {**user, "name": "n"})


def test_a_stream_survives_json() -> None:
    talk = conversation()
    assert talk.stream is not None
    record = json.loads(json.dumps(talk.stream.to_record()))
    again = CommittedStream.from_record(record)
    assert (again.ids, again.turns, again.head) == (talk.stream.ids, talk.stream.turns, talk.stream.head)
    before = talk.encode()
    talk.stream = again
    assert talk.encode() == before
    for damage in ({"ids": record["ids"][:-1]}, {"turns": []}, {"ids": ["a"]}, {"messages": []}, {"head": None}):
        with pytest.raises(ValueError, match="committed stream"):
            CommittedStream.from_record({**record, **damage})
    with pytest.raises(ValueError, match="committed stream"):
        CommittedStream.from_record([])


def test_turns_can_be_taken_back() -> None:
    talk = conversation()
    assert talk.stream is not None
    shorter = shorten(talk.stream, 2)
    assert shorter is not None
    assert (len(shorter.turns), len(shorter.messages), len(shorter.ids)) == (2, 4, talk.stream.turns[1].stop)
    assert shorten(talk.stream, 0) is None


def test_tools_reach_the_template_or_are_refused() -> None:
    asked = [{"role": "user", "content": "a"}]
    with pytest.raises(RequestError, match="knows no tools"):
        chat_ids(byte_level(template=PLAIN), asked, think=False, tools=TOOLS)
    tokenizer = byte_level(template=HERMES)
    ids = chat_ids(tokenizer, asked, think=False, tools=TOOLS)
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert '"name": "look"' in text
    assert text == render(tokenizer, asked, think=False, tools=TOOLS)
