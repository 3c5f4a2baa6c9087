"""What an answer must be: response formats, forced tool calls and thinking budgets, as a grammar for the request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from polytoken.errors import PolytokenError
from polytoken.sampling.grammar import (
    Grammar,
    ReasoningMarks,
    calls_grammar,
    compile_grammar,
    json_grammar,
    regex_grammar,
)
from polytoken.server.errors import bad_request, from_engine, unsupported
from polytoken.server.pool import Model
from polytoken.server.prompt import Prompt
from polytoken.server.records import ResponseFormat
from polytoken.text.answer import prompt_opens_reasoning
from polytoken.text.channels import reasoning_tags
from polytoken.text.toolcalls import TAGGED, tool_markup


async def grammar_of(
    model: Model,
    prompt: Prompt,
    form: ResponseFormat | None,
    *,
    think: bool = True,
    forced: Sequence[Mapping[str, Any]] = (),
    several: bool = True,
    budget: int | None = None,
) -> Grammar | None:
    """The grammar of the answer; None where it may be anything.

    Args:
        think: whether the model may begin its answer with a block of reasoning.
        forced: tools of which one must be called.
        several: whether more than one call may be made.
        budget: most tokens of reasoning.

    Raises:
        ApiError: 400, what cannot be promised or is no schema.
    """
    wanted = form is not None and form.type != "text"
    if not wanted and not forced and budget is None:
        return None
    if model.lane == "canvas":
        name = "response_format" if wanted else "tool_choice" if forced else "thinking_budget"
        raise unsupported(f"{name} is not supported by the canvas lane", param=name)
    if forced and wanted:
        raise bad_request("a response_format and a forced tool call exclude each other", param="response_format")
    try:
        vocab_size = await model.vocab_size()

        def make() -> Grammar:
            text = _text(model, form, forced, several=several)
            return compile_grammar(
                text,
                model.tokenizer,
                vocab_size=vocab_size,
                eos_ids=model.tokenizer.eos_ids,
                reasoning=_marks(model, prompt, think=think, wanted=budget is not None),
                budget=budget,
            )

        return await asyncio.to_thread(make)  # a large schema takes its time
    except PolytokenError as error:
        fault = from_engine(error)
        if forced and fault.param == "response_format":
            fault.param = "tools"  # the grammar was made of their schemas
        raise fault from None


def _text(model: Model, form: ResponseFormat | None, forced: Sequence[Mapping[str, Any]], *, several: bool) -> str:
    if forced:
        markup = tool_markup(model.tokenizer.chat_template) or TAGGED
        return calls_grammar(
            forced, model.tokenizer, several=several, tags=(markup.opening, markup.closing), bare=markup is not TAGGED
        )
    if form is None or form.type == "text":
        return ""
    if form.type == "json_object":
        return json_grammar()
    if form.type == "regex":
        if not form.regex:
            raise bad_request("response_format.regex is required", param="response_format.regex")
        return regex_grammar(form.regex)
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise bad_request("response_format.json_schema.schema is required", param="response_format.json_schema")
    return json_grammar(form.json_schema.schema_)


def _marks(model: Model, prompt: Prompt, *, think: bool, wanted: bool) -> ReasoningMarks | None:
    """How the model writes reasoning; None for a template that speaks of none, unless it is `wanted` all the same."""
    tokenizer = model.tokenizer
    tags = reasoning_tags(tokenizer.chat_template)
    template = tokenizer.chat_template or ""
    if not wanted and tags.opening.strip() not in template and tags.closing.strip() not in template:
        return None
    opening = tokenizer.encode(tags.opening, add_special_tokens=False)
    closing = tuple(tokenizer.encode(tags.closing, add_special_tokens=False))
    opened = prompt_opens_reasoning(tokenizer, prompt.ids, tags)
    return ReasoningMarks(opening[0] if think and len(opening) == 1 else None, closing, opened)
