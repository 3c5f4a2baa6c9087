"""The text of one request while its ids are committed: detokenizer, stop strings, reasoning and tool calls joined."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polytoken.events import AnswerDelta, AnswerSum, ToolCallDelta
from polytoken.text.channels import Channel, ReasoningSplitter
from polytoken.text.detokenizer import Detokenizer
from polytoken.text.ports import Tokenizer
from polytoken.text.profile import Kind, decode_profile
from polytoken.text.stops import StopMatcher
from polytoken.text.toolcalls.parser import Piece, ToolCallParser


@dataclass(frozen=True)
class TextStep:
    """What one commit did to the text.

    Attributes:
        consumed: how many of the pushed ids belong to the result; fewer than all only when a stop string matched.
        delta: visible text that this step adds.
        stop_string: the stop string that ended the request, or None.
    """

    consumed: int
    delta: str
    stop_string: str | None = None


class TextStream:
    """Visible and full text of one request.

    Visible text leaves out special tokens and stop ids, and ends before a stop string. It only ever grows:

        deltas joined == text, and at the end text + finish() == visible decode of all ids, cut before the stop string
        (for a decoder whose text for more ids begins with its text for fewer; else see `Detokenizer`).

    Held back are an unfinished character, the beginning of a possible stop string and, with a splitter, the beginning
    of a possible opening tag; nothing else.
    `drain` tells the same text apart into reasoning, content and tool calls, without their markup. Markup may consist
    of control tokens, which visible text leaves out.
    The result does not depend on how ids are grouped into commits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: Sequence[str] = (),
        stop_ids: frozenset[int] = frozenset(),
        reasoning: ReasoningSplitter | None = None,
        tool_calls: ToolCallParser | None = None,
        on_end: Callable[[TextStream], None] | None = None,
    ) -> None:
        """A stream for one request.

        Args:
            tokenizer: the checkpoint's tokenizer.
            stop: strings that end the request, none empty.
            stop_ids: ids that end it; never visible, also when the tokenizer has them as ordinary tokens.
            reasoning: a fresh splitter of the model's tags. Stop strings are then sought in the answer only, since a
                caller who asks to stop at a word does not mean the model's own notes. The visible text keeps both.
            tool_calls: a fresh parser of the model's calls, if the request declared tools.
            on_end: called once with this stream, when its text is complete and drained.
        """
        self._tokenizer = tokenizer
        self._profile = decode_profile(tokenizer)
        self._stop_ids = stop_ids
        self._matcher = StopMatcher(stop)
        self._reasoning = reasoning
        self._tool_calls = tool_calls
        self._on_end = on_end
        self._ids: list[int] = []
        self._answer_sum = AnswerSum()
        self._marks: dict[int, str] = {}  # texts of control tokens, as they are met
        self._gain = _Gain()
        self._mark_held = ""  # a control token that may begin the opening tag
        self._undecided_ids = 0  # ids pushed while it was open whether they are reasoning
        self._undecided = ""  # text that may yet prove to be reasoning or answer
        self._full = Detokenizer(tokenizer, skip_special=False)
        self._visible = self._full  # one stream serves both until the first id that one of them must not see
        self._shown: list[str] = []
        self._finished = False
        self._stop_string: str | None = None

    @property
    def text(self) -> str:
        """Visible text so far: all deltas joined."""
        if len(self._shown) > 1:
            self._shown = ["".join(self._shown)]
        return self._shown[0] if self._shown else ""

    @property
    def full_text(self) -> str:
        """Decode of all consumed ids with special tokens kept, as the tokenizer itself would give it."""
        return self._full.text

    @property
    def answer(self) -> AnswerSum:
        """Everything drained so far, for `on_end`."""
        return self._answer_sum

    @property
    def ids(self) -> tuple[int, ...]:
        """All consumed ids."""
        return tuple(self._ids)

    @property
    def stop_string(self) -> str | None:
        """The stop string that was met, also by `finish`."""
        return self._stop_string

    def push(self, ids: Sequence[int]) -> TextStep:
        """Take committed ids in order, up to the one that completes a stop string.

        Raises:
            RuntimeError: after a stop string or `finish`; the caller has lost track of its request.
        """
        if self._finished:
            raise RuntimeError("ids were pushed to a text stream that has ended")
        parts: list[str] = []
        for position, token_id in enumerate(ids, start=1):
            part = self._take(token_id)
            parts.append(part)
            if self._stop_string is not None:
                shown = self._show("".join(parts))
                self._end()
                return TextStep(position, shown, self._stop_string)
        return TextStep(len(ids), self._show("".join(parts)))

    def finish(self) -> str:
        """Visible text that was held back. Empty after a stop string, and when called again."""
        if self._finished:
            return ""
        rest = self._match(self._visible.finish())
        if self._undecided:
            rest += self._decide()
        elif self._reasoning is not None and self._reasoning.channel is Channel.REASONING:
            self._gain.reasoning += self._reasoning.finish().reasoning
        if self._stop_string is None:
            rest += self._answer(self._matcher.finish())
        self._finished = True
        shown = self._show(rest)
        self._end()
        return shown

    def drain(self) -> AnswerDelta:
        """What reasoning, content and tool calls have gained since the last call."""
        gain, self._gain = self._gain, _Gain()
        delta = AnswerDelta(gain.reasoning, gain.content, tuple(gain.tool_calls), gain.reasoning_tokens)
        if self._on_end is not None:
            self._answer_sum.add(delta)
            if self._finished:
                on_end, self._on_end = self._on_end, None
                on_end(self)
        return delta

    def _take(self, token_id: int) -> str:
        self._ids.append(token_id)
        reasoned = self._reasoning is not None and self._reasoning.channel is not Channel.CONTENT
        text = self._take_text(token_id)
        if reasoned:
            self._count_reasoning()
        return text

    def _take_text(self, token_id: int) -> str:
        if self._is_hidden(token_id):
            if self._visible is self._full:
                self._visible = self._full.fork()
            self._full.push(token_id)
            return self._take_mark(token_id)
        delta = self._full.push(token_id)
        if self._visible is not self._full:
            delta = self._visible.push(token_id)
        return self._match(delta)

    def _take_mark(self, token_id: int) -> str:
        """A token that is not visible, but may be markup."""
        if token_id in self._stop_ids or (self._reasoning is None and self._tool_calls is None):
            return ""
        mark = self._marks.get(token_id)
        if mark is None:
            mark = self._marks[token_id] = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if self._reasoning is not None and self._reasoning.wants(mark):
            step = self._reasoning.push(mark)
            if self._reasoning.channel is Channel.START:
                self._mark_held = mark
                return ""
            # What was undecided is told in this step, less a control token before it that proved to be no tag.
            self._gain.reasoning += step.reasoning.replace(self._mark_held, "", 1)
            shown, self._undecided, self._mark_held = self._undecided, "", ""
            return shown + self._answer(step.content)
        if self._tool_calls is not None and self._tool_calls.wants(mark):
            if self._reasoning is not None and self._reasoning.channel is Channel.REASONING:
                self._gain.reasoning += self._reasoning.end_reasoning().reasoning
            shown = self._answer(self._matcher.finish())
            self._gain.add(self._tool_calls.mark(mark))
            return shown
        return ""

    def _count_reasoning(self) -> None:
        """Count the latest id, which came before the answer began."""
        assert self._reasoning is not None
        self._undecided_ids += 1
        if self._reasoning.channel is Channel.START:
            return
        if self._reasoning.channel is Channel.REASONING or self._reasoning.reasoned:
            self._gain.reasoning_tokens += self._undecided_ids
        self._undecided_ids = 0

    def _is_hidden(self, token_id: int) -> bool:
        return token_id in self._stop_ids or self._profile.kind(self._tokenizer, token_id) is Kind.SPECIAL

    def _match(self, delta: str) -> str:
        if not delta:
            return ""
        notes, answer = self._without_reasoning(delta)
        step = self._matcher.push(answer)
        if step.stop_string is not None:
            self._stop_string = step.stop_string
            self._finished = True
        return notes + self._answer(step.text)

    def _answer(self, text: str) -> str:
        """Text of the answer that is certain to be shown."""
        if self._tool_calls is None:
            self._gain.content += text
        elif text:
            self._gain.add(self._tool_calls.push(text))
        return text

    def _without_reasoning(self, delta: str) -> tuple[str, str]:
        """The part of the text in which no stop string counts, tags included, and the answer behind it."""
        splitter = self._reasoning
        if splitter is None or (splitter.channel is Channel.CONTENT and not self._undecided):
            return "", delta
        text, self._undecided = self._undecided + delta, ""
        step = splitter.push(delta)
        answer = step.content
        notes = step.reasoning
        if self._mark_held and splitter.channel is not Channel.START:  # a control token that proved to be no tag
            notes, self._mark_held = notes.replace(self._mark_held, "", 1), ""
        self._gain.reasoning += notes
        if splitter.channel is Channel.START:
            self._undecided = text
            return "", ""
        if splitter.channel is Channel.REASONING:
            return text, ""
        extra = len(answer) - len(text)
        if extra > 0:
            # The beginning of a call's tag, which was shown with the reasoning before it was complete; or a control
            # token that proved to be no tag, which nobody is shown.
            if splitter.reasoned:
                self._answer(answer[:extra])
            answer = answer[extra:]
        return text[: len(text) - len(answer)], answer

    def _decide(self) -> str:
        """Release what the splitter held to the end: an answer that only looked like the beginning of a tag."""
        assert self._reasoning is not None
        text, self._undecided = self._undecided, ""
        self._reasoning.finish()
        if self._reasoning.channel is Channel.REASONING:
            self._gain.reasoning += text
            self._gain.reasoning_tokens += self._undecided_ids
            return text
        return self._match(text)

    def _end(self) -> None:
        if self._tool_calls is not None:
            self._gain.add(self._tool_calls.finish())

    def _show(self, text: str) -> str:
        if text:
            self._shown.append(text)
        return text


class _Gain:
    """What was told apart since it was last asked for."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self.tool_calls: list[ToolCallDelta] = []
        self.reasoning_tokens = 0

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if isinstance(piece, ToolCallDelta):
                self.tool_calls.append(piece)
            else:
                self.content += piece
