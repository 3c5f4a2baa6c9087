"""Reasoning and answer in one stream of text, told apart by tags such as `<think>`.

The rule, the same for any cutting of the text into pieces:

- A block is open at the start if the prompt opened it, or if the text itself begins with the opening tag (after white
  space at most). What stands before the first closing tag is then reasoning, what follows it is the answer.
- A block that is never closed is reasoning to the end.
- Everywhere else tags are ordinary text: an answer may quote them, and a closing tag without a block closes nothing.

Every character goes to exactly one side and keeps its order; only the tags that open and close the block are dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

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
    """

    def __init__(self, *, opened: bool, tags: ReasoningTags = THINK) -> None:
        self._opened = opened
        self._opening = tags.opening
        self._closing = StopMatcher([tags.closing])
        self._held = ""  # only at the start
        self.channel = Channel.START

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
            self.channel = Channel.REASONING if self._opened else Channel.CONTENT
        if self.channel is Channel.REASONING:
            return ChannelStep(reasoning=held + self._closing.finish())
        return ChannelStep(content=held)

    def _start(self, text: str) -> str:
        """Decide where the stream begins; the text to go on with, or an empty one while that is open."""
        self._held = ""
        begun = text.lstrip()
        space = len(text) - len(begun)
        if begun.startswith(self._opening):
            # A model may write the tag although the prompt did: it is dropped in both cases.
            self.channel = Channel.REASONING
            return text[:space] + begun[len(self._opening) :]
        if self._opening.startswith(begun) and space <= MAX_HELD_SPACE:
            self._held = text
            return ""
        self.channel = Channel.REASONING if self._opened else Channel.CONTENT
        return text

    def _reason(self, text: str) -> ChannelStep:
        step = self._closing.push(text)
        if step.stop_string is None:
            return ChannelStep(reasoning=step.text)
        self.channel = Channel.CONTENT
        return ChannelStep(reasoning=step.text, content=step.rest)


def split_reasoning(text: str, *, opened: bool, tags: ReasoningTags = THINK) -> tuple[str, str]:
    """Reasoning and answer of a complete text; `opened` tells whether the prompt had opened the block."""
    splitter = ReasoningSplitter(opened=opened, tags=tags)
    first, last = splitter.push(text), splitter.finish()
    return first.reasoning + last.reasoning, first.content + last.content


def opens_reasoning(prompt: str, *, tags: ReasoningTags = THINK) -> bool:
    """Whether a rendered prompt ends inside a block, so that the model's first words are reasoning.

    Only white space may follow the tag: a tag that a user quotes earlier in the conversation opens nothing.
    """
    return prompt.rstrip().endswith(tags.opening)
