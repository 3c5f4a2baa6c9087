"""The text of one request, told apart as the checkpoint's template teaches it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Final

from polytoken.request import Request
from polytoken.text.channels import ReasoningSplitter, ReasoningTags, opens_reasoning, reasoning_tags
from polytoken.text.ports import Tokenizer
from polytoken.text.stream import TextStream
from polytoken.text.toolcalls import ToolCallParser, tool_markup

TAIL_IDS: Final = 32  # ids at the end of a prompt in which an opening tag is looked for


def open_answer(
    tokenizer: Tokenizer,
    request: Request,
    prompt_ids: Sequence[int],
    *,
    stop_ids: frozenset[int],
    on_end: Callable[[TextStream], None] | None = None,
) -> TextStream:
    """A fresh stream for a request: reasoning begins inside a block if the prompt ends in one.

    Tool calls are told apart if the request declares tools and the template knows a markup of ours; without either
    they are text.

    Args:
        prompt_ids: what the model reads, however it was made.
        stop_ids: ids that end the answer.
        on_end: called when the text is complete.
    """
    template = tokenizer.chat_template
    tags = reasoning_tags(template)
    markup = tool_markup(template) if request.tools else None
    calls = None
    if markup is not None:
        name = sha256(request.request_id.encode()).hexdigest()[:12]
        calls = ToolCallParser(markup, tools=request.tools, call_id=f"call_{name}_")
    reasoning = ReasoningSplitter(
        opened=prompt_opens_reasoning(tokenizer, prompt_ids, tags),
        tags=tags,
        call_tag=None if markup is None else markup.opening,
    )
    return TextStream(
        tokenizer, stop=request.stop, stop_ids=stop_ids, reasoning=reasoning, tool_calls=calls, on_end=on_end
    )


def prompt_opens_reasoning(tokenizer: Tokenizer, prompt_ids: Sequence[int], tags: ReasoningTags) -> bool:
    """Whether the ids of a prompt end inside a block, so that the model's first ids are reasoning."""
    tail = tokenizer.decode(prompt_ids[-TAIL_IDS:], skip_special_tokens=False)
    return opens_reasoning(tail, tags=tags)
