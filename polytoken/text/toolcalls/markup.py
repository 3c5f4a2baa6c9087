"""The markups in which models write tool calls, and which of them a chat template teaches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class ToolMarkup:
    """One way to write a call.

    Attributes:
        name: for messages.
        opening, closing: the tags around one or more calls.
        quote: what stands around a string, where that is not the quotation mark of JSON.
    """

    name: str
    opening: str
    closing: str
    quote: str | None = None

    @property
    def marks(self) -> frozenset[str]:
        """Texts that a tokenizer may have as control tokens and that count all the same."""
        return frozenset({self.opening, self.closing} | ({self.quote} if self.quote else set()))


# Hermes and Qwen share the tags. Inside is a JSON object with name and arguments, or `<function=name>` with
# `<parameter=key>` blocks; the first character tells which, so one reader serves both.
TAGGED: Final = ToolMarkup("tagged", "<tool_call>", "</tool_call>")
# `call:name{key:value}` with bare keys; only the string quotes and the tags differ.
GEMMA4: Final = ToolMarkup("gemma4", "<|tool_call>", "<tool_call|>", quote='<|"|>')
GEMMA_FUNCTIONS: Final = ToolMarkup("gemma_functions", "<start_function_call>", "<end_function_call>", quote="<escape>")


def tool_markup(chat_template: str | None) -> ToolMarkup | None:
    """The markup that a chat template writes calls in, or None if it knows none of ours."""
    for markup in (GEMMA4, GEMMA_FUNCTIONS, TAGGED):
        if chat_template is not None and markup.opening in chat_template:
            return markup
    return None
