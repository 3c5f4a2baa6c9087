"""The way back over rows that were forwarded and, in part, are not to stay."""

from __future__ import annotations

from collections.abc import Sequence

from polytoken.cache.blocks import LayerSnapshot
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState

Way = Sequence[LayerSnapshot | None]
"""One entry per layer: a recurrent layer's state, None where rows can be cut."""


def remember(state: DecodingState) -> Way:
    """The way back to the state now: recurrent slots by reference, since they are only ever rebound; rows are cut."""
    return [
        LayerSnapshot(layer.kind, None, layer.offset, () if layer.slots is None else (layer.slots,))
        if isinstance(layer, RecurrentLayer)
        else None
        for layer in state.layers
    ]


def return_to(state: DecodingState, way: Way, rows: int) -> None:
    """Take back the last rows, all those forwarded since `way` was remembered."""
    for layer, there in zip(state.layers, way, strict=True):
        if there is None:
            layer.trim(rows)
        else:
            layer.restore(there)
