"""What of a request fits a lane: its ids, its length, and limits that only another lane knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polytoken.errors import RequestError
from polytoken.request import Request


def check_ids(ids: Sequence[int], *, vocab_size: int) -> None:
    """Refuse a prompt that the network has no embedding for.

    A tokenizer may know more ids than its network has rows, and a device looks such an id up in whatever memory
    follows the table, without a word.

    Args:
        vocab_size: rows of the network's embedding, V.

    Raises:
        RequestError: `bad_prompt`.
    """
    if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
        index, wrong = next((index, each) for index, each in enumerate(ids) if not 0 <= each < vocab_size)
        raise RequestError(
            f"token {index} of the prompt has id {wrong}, outside the network's vocabulary of {vocab_size}",
            code="bad_prompt",
            field="messages",
        )


def fit_length(request: Request, prompt_tokens: int, *, max_positions: int) -> Request:
    """The request with an output limit that fits the model's positions.

    A limit that was only a default shrinks to what is left; one that the caller chose is kept or refused.

    Raises:
        RequestError: `too_long`.
    """
    room = max_positions - prompt_tokens
    if request.limit_is_default and room >= 1:
        return replace(request, max_new_tokens=min(request.max_new_tokens, room))
    if request.max_new_tokens > room:
        raise RequestError(
            f"prompt of {prompt_tokens} tokens + max_new_tokens {request.max_new_tokens} exceeds the model's "
            f"{max_positions} positions; shorten the prompt or lower max_new_tokens",
            code="too_long",
            field="max_new_tokens",
        )
    return request


def refuse_denoising_limit(request: Request, *, lane: str) -> None:
    """Refuse a cap on denoises where nothing is denoised, rather than pass over it.

    Raises:
        RequestError: `unsupported`.
    """
    if request.max_denoising_steps is not None:
        raise RequestError(
            f"max_denoising_steps belongs to the canvas lane; the {lane} lane takes max_new_tokens",
            code="unsupported",
            field="max_denoising_steps",
        )


def refuse_grammar(request: Request, *, lane: str) -> None:
    """Refuse a grammar where tokens are not committed one after another under a mask.

    Raises:
        RequestError: `unsupported`.
    """
    if request.grammar is not None:
        raise RequestError(
            f"structured output is not supported by the {lane} lane, which commits whole parts of a canvas",
            code="unsupported",
            field="response_format",
        )
