"""What a row of the rolling canvas carries from one denoise to the next.

Every field is an array with a leading row axis, or a dataclass of such fields. So rows are cut out, put together and
collected for evaluation by recursion over the fields, whatever is added to a state later; no field may be None, a
number or a list. B rows, C canvas slots. Physical arrays are indexed by slot, logical ones by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

import mlx.core as mx

from polytoken.lanes.canvas import ring
from polytoken.models.latent.state import LatentState

StateT = TypeVar("StateT")

_REFILLED_WITH_ZERO: Final = (
    "token_latents",
    "confidence",
    "age",
    "token_changed",
    "confidence_delta",
    "entropy_delta",
)


@dataclass(frozen=True, eq=False)
class RollingState:
    """The canvas, what was learnt about it, and where it begins.

    Attributes:
        canvas: int32 [B, C] ids, physical.
        latent: what deliberation carries.
        head: int32 [B], the slot of logical position 0.
    """

    canvas: mx.array
    latent: LatentState
    head: mx.array

    @classmethod
    def initial(cls, noise: mx.array, latent: LatentState, *, max_new_tokens: int, pad_id: int) -> RollingState:
        """The state after prefill, from noise int32 [B, C] and a latent state that has seen nothing."""
        return cls(
            canvas=ring.initial_canvas(noise, max_new_tokens=max_new_tokens, pad_id=pad_id),
            latent=latent,
            head=mx.zeros((noise.shape[0],), mx.int32),
        )

    def advance_ring(self, lengths: mx.array, noise: mx.array, *, entropy_fill_value: float) -> RollingState:
        """The state after committing the first lengths int32 [B] positions.

        Committed slots are refilled in place: ids from noise int32 [B, C] at the same slot, latents and observations
        as new, entropy with the fill value (log V). All other slots, memory, fast weights and clocks stay.
        """
        C = self.canvas.shape[1]
        refill = ring.refilled_slots(self.head, lengths, C)
        latent = self.latent
        fresh: dict[str, Any] = {"entropy": mx.where(refill, entropy_fill_value, latent.entropy)}
        for name in _REFILLED_WITH_ZERO:
            old = getattr(latent, name)
            where = refill if old.ndim == refill.ndim else refill[..., None]
            fresh[name] = mx.where(where, mx.zeros((), old.dtype), old)
        return RollingState(
            canvas=mx.where(refill, noise, self.canvas).astype(mx.int32),
            latent=replace(latent, **fresh),
            head=ring.advance_head(self.head, lengths, C),
        )


def slice_row(state: StateT, row: int) -> StateT:
    """The state of one row, with a row axis of 1."""
    return _mapped([state], lambda parts: parts[0][row : row + 1])


def concat_rows(states: Sequence[StateT]) -> StateT:
    """One state whose rows are those of all states, in order."""
    return _mapped(states, lambda parts: mx.concatenate(parts, axis=0))


def collect_arrays(state: Any) -> list[mx.array]:
    """All arrays of a state, for evaluation."""
    if isinstance(state, mx.array):
        return [state]
    return [array for item in fields(state) for array in collect_arrays(getattr(state, item.name))]


def _mapped(states: Sequence[StateT], combine: Any) -> StateT:
    """A state of the same kind whose arrays are `combine` of the states' arrays in the same place."""
    first: Any = states[0]
    if isinstance(first, mx.array):
        return combine(states)  # type: ignore[no-any-return]
    return type(first)(  # type: ignore[no-any-return]
        **{item.name: _mapped([getattr(state, item.name) for state in states], combine) for item in fields(first)}
    )
