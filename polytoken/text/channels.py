"""Reasoning and answer in one stream of text, told apart by tags such as `<think>`.

The rule, the same for any cutting of the text into pieces:

- A block is open at the start if the prompt opened it, or if the text itself begins with the opening tag (after white
  space at most). What stands before the first closing tag is then reasoning, what follows it is the answer.
- A block that is never closed is reasoning to the end.
- Where tools are declared, the opening tag of a call ends a block that was left open, if it stands at the start of a
  line outside a code fence: models forget to close their thoughts before they act.
- Everywhere else tags are ordinary text: an answer may quote them, and a closing tag without a block closes nothing.

Every character goes to exactly one side and keeps its order; only the tags that open and close the block are dropped.

Tags may be control tokens of the tokenizer, which visible text leaves out: `wants` says which of them to push as text.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from polytoken.text.fence import CodeFence
from polytoken.text.stops import StopMatcher

MAX_HELD_SPACE: Final = 64  # characters of white space that may be held while an opening tag could follow


@dataclass(frozen=True)
class ReasoningTags:
    """The two strings around a block of reasoning; neither may be empty."""

    opening: str = "<think>"
    closing: str = "</think>"

    def __post_init__(self) -> None:
        if not self.opening or not self.closing:
            raise ValueError("reasoning tags must not be empty")


THINK: Final = ReasoningTags()
GEMMA4_THOUGHT: Final = ReasoningTags("<|channel>thought\n", "<channel|>")


def reasoning_tags(chat_template: str | None) -> ReasoningTags:
    """The tags that a chat template speaks of; `<think>`, which many models write unasked, if it speaks of none."""
    return GEMMA4_THOUGHT if chat_template is not None and "<|channel>" in chat_template else THINK


@dataclass(frozen=True)
class ChannelStep:
    """Text that each side gains; often one of them is empty."""

    reasoning: str = ""
    content: str = ""


class Channel(Enum):
    """Where the stream stands: not decided yet, inside the block, or in the answer."""

    START = "start"
    REASONING = "reasoning"
    CONTENT = "content"


class ReasoningSplitter:
    """Splits text as it comes. Held back is at most an unfinished tag, or white space in front of one.

    Attributes:
        channel: the side to which the next text goes, as far as it is known.
        reasoned: whether there was a block.
    """

    def __init__(self, *, opened: bool, tags: ReasoningTags = THINK, call_tag: str | None = None) -> None:
        """A splitter for one answer.

        Args:
            opened: whether the prompt opened the block.
            tags: around the block.
            call_tag: the opening tag of tool calls, where the request declared tools.
        """
        self._opened = opened
        self._opening = tags.opening
        self._ending = tags.closing
        self._call_tag = call_tag
        self._closing = self._seek_end()
        self._fence = CodeFence()
        self._held = ""  # only at the start
        self.channel = Channel.START
        self.reasoned = False

    def wants(self, mark: str) -> bool:
        """Whether a control token with this text would mean something here: that it begins the tag, or closes it."""
        if mark and self.channel is Channel.START and self._opening.startswith(mark):
            return not self._held.strip()
        return mark == self._ending and (self.channel is Channel.REASONING or self._starts_inside)

    def push(self, text: str) -> ChannelStep:
        """Take the next piece of text."""
        if self.channel is Channel.START:
            text = self._start(self._held + text)
        if self.channel is Channel.REASONING:
            return self._reason(text)
        return ChannelStep(content=text)

    def finish(self) -> ChannelStep:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        if self.channel is Channel.START:
            self._decide(reasoning=self._opened)
        if self.channel is Channel.REASONING:
            return ChannelStep(reasoning=held + self._closing.finish())
        return ChannelStep(content=held)

    def end_reasoning(self) -> ChannelStep:
        """The block ends here although nothing closed it: a control token began a call."""
        step = self.finish()
        self.channel = Channel.CONTENT
        return step

    @property
    def _starts_inside(self) -> bool:
        return self.channel is Channel.START and self._opened

    def _start(self, text: str) -> str:
        """Decide where the stream begins; the text to go on with, or an empty one while that is open."""
        self._held = ""
        begun = text.lstrip()
        space = len(text) - len(begun)
        if begun.startswith(self._opening):
            # A model may write the tag although the prompt did: it is dropped in both cases.
            self._decide(reasoning=True)
            return text[:space] + begun[len(self._opening) :]
        if self._opening.startswith(begun) and space <= MAX_HELD_SPACE:
            self._held = text
            return ""
        self._decide(reasoning=self._opened)
        return text

    def _decide(self, *, reasoning: bool) -> None:
        self.channel = Channel.REASONING if reasoning else Channel.CONTENT
        self.reasoned = reasoning

    def _reason(self, text: str) -> ChannelStep:
        notes = ""
        while True:
            step = self._closing.push(text)
            notes += step.text
            if step.stop_string is None:
                self._fence.push(step.text)
                return ChannelStep(reasoning=notes)
            if step.stop_string == self._ending:
                self.channel = Channel.CONTENT
                return ChannelStep(reasoning=notes, content=step.rest)
            self._fence.push(step.text)
            if self._fence.at_line_start and not self._fence.is_open:
                self.channel = Channel.CONTENT
                return ChannelStep(reasoning=notes, content=step.stop_string + step.rest)
            notes += step.stop_string
            self._fence.push(step.stop_string)
            self._closing, text = self._seek_end(), step.rest

    def _seek_end(self) -> StopMatcher:
        return StopMatcher([self._ending] if self._call_tag is None else [self._ending, self._call_tag])


def split_reasoning(text: str, *, opened: bool, tags: ReasoningTags = THINK) -> tuple[str, str]:
    """Reasoning and answer of a complete text; `opened` tells whether the prompt had opened the block."""
    splitter = ReasoningSplitter(opened=opened, tags=tags)
    first, last = splitter.push(text), splitter.finish()
    return first.reasoning + last.reasoning, first.content + last.content


def opens_reasoning(prompt: str, *, tags: ReasoningTags = THINK) -> bool:
    """Whether a rendered prompt ends inside a block, so that the model's first words are reasoning.

    Only white space may follow the tag: a tag that a user quotes earlier in the conversation opens nothing.
    """
    return prompt.rstrip().endswith(tags.opening.rstrip())
