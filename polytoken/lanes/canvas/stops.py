"""Which ids end an answer, which ids are special, and why a row ends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from polytoken.models.canvas import CanvasTokens


@dataclass(frozen=True)
class EndIds:
    """The special ids of a checkpoint, as the canvas lane needs them.

    Attributes:
        turn_end: the end-of-turn id, None when the model has none.
        stops: every id that ends an answer, the turn end first, without repeats.
        pad: what stands where no output will come.
        excluded: ids that the repetition penalty never touches.
    """

    turn_end: int | None
    stops: tuple[int, ...]
    pad: int
    excluded: frozenset[int]

    @classmethod
    def from_config(cls, tokens: CanvasTokens, generation: Mapping[str, Any]) -> EndIds:
        """From the model's configuration and the generation configuration, which goes first where it is not null."""
        eos = _ids(generation.get("eos_token_id")) or list(tokens.eos)
        turn_end = next(iter(_ids(generation.get("turn_end_token_id"))), tokens.turn_end)
        pad = next(iter(_ids(generation.get("pad_token_id"))), tokens.pad)
        stops = dict.fromkeys(([] if turn_end is None else [turn_end]) + eos)
        spared = [
            *_ids(generation.get("bos_token_id")),
            *_ids(tokens.image),
            *_ids(generation.get("repetition_penalty_exclude_token_ids")),
        ]
        return cls(turn_end=turn_end, stops=tuple(stops), pad=pad, excluded=frozenset([pad, *stops, *spared]))


def is_stop(ids: mx.array, stop_ids: Sequence[int]) -> mx.array:
    """bool, same shape as ids int32: whether each is one of the stop ids, of which there may be none."""
    if not stop_ids:
        return mx.zeros(ids.shape, mx.bool_)
    return mx.any(ids[..., None] == mx.array(list(stop_ids), mx.int32), axis=-1)


def stop_reason(
    block: Sequence[int],
    *,
    stop_ids: Sequence[int],
    turn_end: int | None,
    generated: int,
    max_new_tokens: int,
    steps: int,
    max_denoising_steps: int | None,
    max_ponder_steps: int,
) -> str | None:
    """Why a row ends with this step, the first reason that holds, or None while it goes on.

    Args:
        block: ids committed by this step.
        stop_ids: ids that end an answer; empty when the caller wants them ignored.
        turn_end: the one among them that is reported as `turn_end`.
        generated: ids committed so far, the block included.
        max_new_tokens: limit of the answer.
        steps: denoises so far, this one included.
        max_denoising_steps: limit of these, None for none.
        max_ponder_steps: after so many denoises without a commit the policy jumps.
    """
    ending = [token_id for token_id in block if token_id in stop_ids]
    if ending:
        return "turn_end" if turn_end in ending else "eos"
    if generated >= max_new_tokens:
        return "max_new_tokens"
    if max_denoising_steps is not None and steps >= max_denoising_steps:
        return "max_denoising_steps"
    if steps >= max_new_tokens * max_ponder_steps:
        return "episode_watchdog"  # out of reach while jumps always commit: a defect if it is ever seen
    return None


def _ids(value: int | Iterable[int | None] | None) -> list[int]:
    """A configuration value as a list of ids: null, one id, or several."""
    if value is None:
        return []
    if isinstance(value, int):
        return [value]
    return [token_id for token_id in value if token_id is not None]
