"""The ids of a conversation's next turn, so that they go on from what the model has really read and written.

A client sends the visible history again with every turn. Rendering and encoding it anew would give other ids than
those in the cache: templates strip reasoning and put tool calls into their own words, and text that was generated token
by token is cut into other tokens when it is read. So the stream of committed ids is kept beside the messages it stands
for. As long as the next messages extend these, only what comes behind the last answer is rendered and encoded:

    ids = committed ids + encode(rest of the last answer that no whole token spells + rendering behind the answer)

The rendering behind an answer is found by rendering the history with a seam in place of the answer's last words, and is
trusted only if the true rendering ends in it too. Where histories part, as many whole turns as can be are kept, and
`Parting` says which message differs and at which token.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from hashlib import sha256
from typing import Any

from polytoken.errors import RequestError
from polytoken.events import ToolCall
from polytoken.text.ports import Tokenizer
from polytoken.text.profile import Kind, decode_profile
from polytoken.text.prompt import chat_ids, normalise_messages, render
from polytoken.text.toolcalls.markup import tool_markup

Message = Mapping[str, Any]


class PartingReason(StrEnum):
    """Why not all committed ids were kept."""

    MESSAGE = "message_differs"  # the visible history is another from `message` on
    SHORTER = "history_shortened"  # it ends before the committed one does
    HEAD = "template_head_differs"  # same messages, but the template opens them otherwise (thinking, tools, a date)
    TEMPLATE = "template_hides_turn"  # the rendering does not show where the answer ends
    SEAM = "seam_not_exact"  # what follows cannot be encoded alone without changing the text


@dataclass(frozen=True)
class Parting:
    """Where committed and asked history part: the first message, and the first token that was not kept."""

    reason: PartingReason
    message: int
    token: int

    def __str__(self) -> str:
        return f"{self.reason} at message {self.message}, token {self.token}"


@dataclass(frozen=True)
class CommittedTurn:
    """One answered turn of a stream.

    Attributes:
        messages: how many messages it and all before it are, its answer included.
        prompt_stop: ids up to the end of its prompt.
        stop: ids up to the end of its answer.
        think: as the prompt was rendered.
        seam: end of the answer's visible text that no whole token of the kept ids spells (a stop string cut it).
    """

    messages: int
    prompt_stop: int
    stop: int
    think: bool
    seam: str = ""


@dataclass(frozen=True)
class CommittedStream:
    """What a conversation's cache was made of, and the messages it stands for.

    Attributes:
        ids: prompts and answers in order, as they were fed.
        messages: normalised, answers included as they were told to the client.
        turns: never empty.
        head: rendering of the messages before the first answer.
    """

    ids: tuple[int, ...]
    messages: tuple[Message, ...]
    turns: tuple[CommittedTurn, ...]
    head: str

    def to_record(self) -> dict[str, Any]:
        """The stream as JSON."""
        return {
            "ids": list(self.ids),
            "messages": [dict(message) for message in self.messages],
            "turns": [vars(turn) for turn in self.turns],
            "head": self.head,
        }

    @classmethod
    def from_record(cls, record: Any) -> CommittedStream:
        """The stream that a record was made from. Raises ValueError for anything else."""
        try:
            stream = cls(
                ids=tuple(record["ids"]),
                messages=tuple(record["messages"]),
                turns=tuple(CommittedTurn(**turn) for turn in record["turns"]),
                head=record["head"],
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"no committed stream: {error}") from None
        if not isinstance(stream.head, str) or not all(isinstance(item, Mapping) for item in stream.messages):
            raise ValueError("no committed stream: head and messages are not what they should be")
        last = 0
        for turn in stream.turns:
            numbers = (turn.messages, turn.prompt_stop, turn.stop)
            if not all(type(number) is int for number in numbers) or not last < turn.prompt_stop <= turn.stop:
                raise ValueError("no committed stream: turns do not follow each other")
            last = turn.stop
        whole = stream.turns and stream.turns[-1].messages == len(stream.messages) and last == len(stream.ids)
        if not whole or not all(type(item) is int and item >= 0 for item in stream.ids):
            raise ValueError("no committed stream: ids and turns do not agree")
        return stream


@dataclass(frozen=True)
class Encoding:
    """Prompt ids of a turn.

    Attributes:
        ids: all of them.
        kept: how many of the first are committed ones.
        turns: of the committed stream, those that are kept whole.
        parting: why not all committed ids were kept; None if they were, or there were none.
    """

    ids: tuple[int, ...]
    kept: int = 0
    turns: tuple[CommittedTurn, ...] = ()
    parting: Parting | None = None


def encode_turn(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    committed: CommittedStream | None,
    *,
    think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> Encoding:
    """Prompt ids of the next turn, which begin with as many committed ids as the histories have in common.

    Raises:
        RequestError: as `chat_ids` does.
    """
    wanted = normalise_messages(messages)
    if committed is None:
        return Encoding(chat_ids(tokenizer, messages, think=think, tools=tools))
    common = _common_messages(committed.messages, wanted)
    first = committed.turns[0].messages - 1
    reason = PartingReason.SHORTER if common == len(wanted) else PartingReason.MESSAGE
    if common >= first and committed.head != render(tokenizer, wanted[:first], think=think, tools=tools, opening=False):
        common, reason = 0, PartingReason.HEAD
    failures, latest = 0, len(committed.turns)
    for count in range(len(committed.turns), 0, -1):
        turn = committed.turns[count - 1]
        if turn.messages - 1 == common == len(wanted) and turn.think == think:  # the same question again
            parting = Parting(reason, common, turn.prompt_stop)
            return Encoding(committed.ids[: turn.prompt_stop], turn.prompt_stop, committed.turns[: count - 1], parting)
        if turn.messages > common or count > latest:
            continue
        tail = _rendering_behind(tokenizer, wanted, turn.messages - 1, think=think, tools=tools)
        joined = None if tail is None else _join(tokenizer, committed.ids[: turn.stop], turn, tail)
        if joined is None:
            reason = PartingReason.TEMPLATE if tail is None else PartingReason.SEAM
            common = turn.messages - 1
            # What spoils one turn's rendering mostly spoils that of all before it: further back in growing steps, so
            # that a long history costs a few renderings and not one for each turn.
            failures += 1
            latest = count - max(1, (1 << failures) // 8)
            continue
        ids, kept = joined
        whole = count == len(committed.turns)
        return Encoding(ids, kept, committed.turns[:count], None if whole else Parting(reason, common, kept))
    return Encoding(chat_ids(tokenizer, messages, think=think, tools=tools), parting=Parting(reason, common, 0))


def commit_turn(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    encoding: Encoding,
    answer_ids: Sequence[int],
    reply: Message,
    *,
    visible: str,
    think: bool,
    tools: Sequence[Mapping[str, Any]] = (),
) -> CommittedStream:
    """The stream after a turn was answered.

    Args:
        messages: of the request.
        encoding: of the same request.
        answer_ids: what the model wrote, the stop id included.
        reply: the answer as the client was told it: `content`, and where there are any `tool_calls` in the form of the
            OpenAI API and `reasoning_content`.
        visible: the visible text of the answer; ids behind its end, which a stop string cut off, are not kept.
    """
    asked = normalise_messages(messages)
    told = normalise_messages([{"role": "assistant", **reply}])
    kept, seam = _cut(tokenizer, tuple(answer_ids), visible)
    ids = encoding.ids + kept
    turn = CommittedTurn(len(asked) + 1, len(encoding.ids), len(ids), think, seam)
    turns = (*encoding.turns, turn)
    head = render(tokenizer, asked[: turns[0].messages - 1], think=think, tools=tools, opening=False)
    return CommittedStream(ids, (*asked, *told), turns, head)


def reply_message(
    *, content: str | None, reasoning: str | None = None, tool_calls: Sequence[ToolCall] = ()
) -> dict[str, Any]:
    """An answer as a message; `tool_calls` are those of a result."""
    message: dict[str, Any] = {"role": "assistant", "content": content or ""}
    if reasoning:
        message["reasoning_content"] = reasoning
    if tool_calls:
        message["tool_calls"] = [call_record(call) for call in tool_calls]
    return message


def call_record(call: ToolCall) -> dict[str, Any]:
    """A whole call as a message of the OpenAI API holds it."""
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def same_message(told: Message, given: Message) -> bool:
    """Whether a client's message is the one it was told or has sent before.

    White space around an answer, ids and the spelling of calls, and reasoning that is left out make no difference.
    """
    if told["role"] != given["role"] or told.get("name") != given.get("name"):
        return False
    if told["role"] != "assistant":
        return bool(told["content"] == given["content"])
    notes = given.get("reasoning_content") or given.get("reasoning")
    if notes and str(notes).strip() != str(told.get("reasoning_content") or "").strip():
        return False
    return told["content"].strip() == given["content"].strip() and _calls(told) == _calls(given)


def _common_messages(told: Sequence[Message], given: Sequence[Message]) -> int:
    common = 0
    for one, other in zip(told, given, strict=False):
        if not same_message(one, other):
            break
        common += 1
    return common


def _calls(message: Message) -> list[tuple[Any, Any]]:
    """Names and arguments of a message's tool calls, read."""
    found = []
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            with suppress(ValueError, RecursionError):
                arguments = json.loads(arguments)
        found.append((function.get("name"), arguments))
    return found


def _rendering_behind(
    tokenizer: Tokenizer, messages: list[dict[str, Any]], index: int, *, think: bool, tools: Sequence[Mapping[str, Any]]
) -> str | None:
    """What the template writes behind the answer `messages[index]`, the opening of the next one included."""
    seam = f"seam{sha256(json.dumps(messages, sort_keys=True, default=str).encode(errors='replace')).hexdigest()[:24]}"
    answer = messages[index]
    calls = answer.get("tool_calls")
    if calls:
        last = dict(calls[-1])
        function = {**last.get("function", last), "arguments": {seam: seam}}
        last = {**last, "function": function} if "function" in last else function
        marked = {**answer, "tool_calls": [*calls[:-1], last]}
    else:
        marked = {**answer, "content": seam}
    try:
        text = render(tokenizer, [*messages[:index], marked, *messages[index + 1 :]], think=think, tools=tools)
        true = render(tokenizer, messages, think=think, tools=tools)
    except RequestError:
        return None  # the template wants something of the answer that the seam is not
    place = text.rfind(seam)
    if place < 0:
        return None
    tail = text[place + len(seam) :]
    if calls:
        markup = tool_markup(tokenizer.chat_template)
        if markup is None or markup.closing not in tail:
            return None
        tail = tail[tail.index(markup.closing) + len(markup.closing) :]
    return tail if true.endswith(tail) else None


def _join(
    tokenizer: Tokenizer, ids: tuple[int, ...], turn: CommittedTurn, tail: str
) -> tuple[tuple[int, ...], int] | None:
    """Committed ids with the encoded tail behind them, and how many of them were kept; None if that is not exact."""
    if turn.stop > turn.prompt_stop and _is_mark(tokenizer, ids[-1]):
        # The model ended its answer itself. The template does the same, unless the model used another mark for it.
        mark = tokenizer.decode([ids[-1]], skip_special_tokens=False)
        at = len(tail) - len(tail.lstrip())
        if tail.startswith(mark, at):
            tail = tail[at + len(mark) :]
        else:
            ids = ids[:-1]
    text = turn.seam + tail
    joined = (*ids, *tokenizer.encode(text, add_special_tokens=False))
    # Only a window is decoded: joining cannot change text further away than that.
    near = max(0, len(ids) - 64)
    before = tokenizer.decode(ids[near:], skip_special_tokens=False)
    # Tokenizers that compose characters would do so to the whole rendering, too.
    exact = (before + text, before + unicodedata.normalize("NFC", text))
    if tokenizer.decode(joined[near:], skip_special_tokens=False) not in exact:
        return None
    return joined, len(ids)


def _is_mark(tokenizer: Tokenizer, token_id: int) -> bool:
    return decode_profile(tokenizer).kind(tokenizer, token_id) is Kind.SPECIAL


def _cut(tokenizer: Tokenizer, ids: tuple[int, ...], visible: str) -> tuple[tuple[int, ...], str]:
    """The answer's ids up to the end of its visible text, and what is left of that behind the last whole token."""
    whole = tokenizer.decode(ids, skip_special_tokens=True)
    if len(whole) <= len(visible) or not whole.startswith(visible):
        return ids, ""
    low, high = 0, len(ids)  # the decode of ids[:low] lies within the visible text, that of ids[:high] does not
    while high - low > 1:
        middle = (low + high) // 2
        if visible.startswith(tokenizer.decode(ids[:middle], skip_special_tokens=True)):
            low = middle
        else:
            high = middle
    return ids[:low], visible[len(tokenizer.decode(ids[:low], skip_special_tokens=True)) :]


def shorten(stream: CommittedStream, turns: int) -> CommittedStream | None:
    """The stream without all but its first `turns` turns; None for none of them."""
    if turns <= 0:
        return None
    kept = stream.turns[:turns]
    return replace(stream, ids=stream.ids[: kept[-1].stop], messages=stream.messages[: kept[-1].messages], turns=kept)
