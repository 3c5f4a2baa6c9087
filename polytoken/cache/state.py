"""The decoding state of one sequence, and its immutable snapshots."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from polytoken.cache.blocks import LayerBlock, LayerSnapshot
from polytoken.cache.layers import CacheLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.errors import CacheError

_DTYPE_TAGS = {
    mx.bfloat16: "BF16",
    mx.float16: "F16",
    mx.float32: "F32",
    mx.int32: "I32",
    mx.int64: "I64",
    mx.uint32: "U32",
}


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A decoding state at one moment. Immutable for ever: borrowers copy out of it and nobody writes into it.

    Attributes:
        layers: one record per layer.
        offset: tokens encoded.
    """

    layers: tuple[LayerSnapshot, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the valid state of all layers."""
        return sum(layer.nbytes for layer in self.layers)

    def arrays(self) -> list[mx.array]:
        """All arrays as stored, for evaluation."""
        return [array for layer in self.layers for part in layer.parts for array in part]

    def digest(self) -> str:
        """SHA-256 (hex) over every layer's arrays: "[", then dtype tag, JSON shape and float32 bytes each, then "]"."""
        sha = hashlib.sha256()
        for layer in self.layers:
            sha.update(b"[")
            for array in layer.arrays():
                sha.update(f"{_DTYPE_TAGS[array.dtype]}{json.dumps(array.shape, separators=(',', ':'))}".encode())
                sha.update(np.asarray(array.astype(mx.float32)).astype("<f4").tobytes())
            sha.update(b"]")
        return sha.hexdigest()


class DecodingState:
    """The cache of one row: one layer of it per layer of the network, all at the same offset.

    Attributes:
        layers: what a network is given as its `cache`.
    """

    def __init__(self, layers: Iterable[CacheLayer]) -> None:
        self.layers: list[CacheLayer] = list(layers)

    @property
    def offset(self) -> int:
        """Tokens encoded. Raises CacheError if the layers disagree (a forward that failed half-way)."""
        offsets = {layer.offset for layer in self.layers}
        if len(offsets) > 1:
            raise CacheError(f"the layers of a decoding state disagree about its length: {sorted(offsets)}")
        return offsets.pop() if offsets else 0

    @property
    def nbytes(self) -> int:
        """Bytes of the valid state."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def held_bytes(self) -> int:
        """Bytes of memory in use, spare capacity included."""
        return sum(layer.held_bytes for layer in self.layers)

    def arrays(self) -> list[mx.array]:
        """The live arrays of all layers, for `mx.eval`."""
        return [array for layer in self.layers for array in layer.arrays()]

    def trim(self, n: int) -> int:
        """Take back the last n tokens in every layer, or in none: raises CacheError, changing nothing."""
        length = self.offset
        refusing = [f"{i} ({layer.kind})" for i, layer in enumerate(self.layers) if not layer.can_trim(n)]
        if refusing:
            raise CacheError(f"cannot take back {n} of {length} tokens exactly: layers {', '.join(refusing)} refuse")
        for layer in self.layers:
            layer.trim(n)
        return n

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Within it, recurrent layers keep what taking back the last forward needs; arm it around a verify forward.

            with state.capturing():
                hidden = model.forward(window, state)  # w rows
            state.commit(accepted, w)

        What was kept stays after the end of the scope, until it is used (`commit`, `trim`), settled or overtaken.
        """
        layers = [layer for layer in self.layers if isinstance(layer, RecurrentLayer)]
        before = [layer.armed for layer in layers]
        for layer in layers:
            layer.armed = True
        try:
            yield
        finally:
            for layer, armed in zip(layers, before, strict=True):
                layer.armed = armed

    def can_commit(self, keep: int, of: int) -> bool:
        """Whether `commit(keep, of)` would be exact. If not: restore an older state and run the kept rows again."""
        return 0 <= keep <= of <= self.offset and not self._refusing(keep, of)

    def commit(self, keep: int, of: int) -> None:
        """Of the last forward's `of` rows keep the first `keep`, 0 <= keep <= of, exactly; the rest never happened.

        The state is then the one that `keep` single steps give. On the CPU that holds bit for bit. All layers are asked
        before any is changed: raises CacheError, changing nothing, where one cannot go back exactly. What was kept for
        this is used up, also if all rows stay. Lazy: nothing is evaluated here.
        """
        length = self.offset
        if not 0 <= keep <= of <= length:
            raise CacheError(f"cannot keep {keep} of the last {of} rows of a state of {length} tokens")
        refusing = self._refusing(keep, of)
        if refusing:
            raise CacheError(f"cannot keep {keep} of the last {of} rows exactly: layers {', '.join(refusing)} refuse")
        for layer in self.layers:
            layer.trim(of - keep)
            if isinstance(layer, RecurrentLayer):
                layer.settle()

    def _refusing(self, keep: int, of: int) -> list[str]:
        """The layers that cannot keep exactly the first `keep` of the last `of` rows."""

        def refuses(layer: CacheLayer) -> bool:
            if isinstance(layer, RecurrentLayer) and layer.captured not in (0, of):
                return True  # these are the rows of another forward
            return not layer.can_trim(of - keep)

        return [f"{i} ({layer.kind})" for i, layer in enumerate(self.layers) if refuses(layer)]

    def settle(self) -> None:
        """Declare what was appended final; rows kept only for a roll-back may go."""
        for layer in self.layers:
            layer.settle()

    def blocks(self, start: int, stop: int) -> tuple[LayerBlock, ...]:
        """Every layer's block of the tokens [start, stop), in memory of its own; lazy until evaluated."""
        return tuple(layer.block(start, stop) for layer in self.layers)

    def snapshot(self) -> Snapshot:
        """The state now, copied compactly and evaluated."""
        snapshot = Snapshot(tuple(layer.snapshot() for layer in self.layers), self.offset)
        mx.eval(snapshot.arrays())
        return snapshot

    def restore(self, snapshot: Snapshot) -> None:
        """Become the snapshot's state in fresh private arrays, evaluated.

        Raises CacheError, changing nothing, if the snapshot is of other layers.
        """
        if len(snapshot.layers) != len(self.layers):
            raise CacheError(f"a snapshot of {len(snapshot.layers)} layers does not fit a state of {len(self.layers)}")
        for layer, stored in zip(self.layers, snapshot.layers, strict=True):
            layer.check_snapshot(stored)
        for layer, stored in zip(self.layers, snapshot.layers, strict=True):
            layer.restore(stored)
        mx.eval(self.arrays())
