"""Networks and heads for the lane's tests: tiny hybrids from files, and tables that need next to no time."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from reference_cases import HYBRID_CASES, Case

from polytoken.cache.blocks import LayerBlock, LayerSnapshot
from polytoken.cache.layers import CacheLayer
from polytoken.cache.recurrent import RecurrentLayer, Slots
from polytoken.cache.state import DecodingState
from polytoken.checkpoint import load_runtime
from polytoken.models.base import CausalModel, Hidden
from polytoken.models.draft import DraftHead, DraftingModel, DraftSettings
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import Family, write_checkpoint

FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def case_of(family: Family, shape: str) -> Case:
    return next(case for case in HYBRID_CASES if (case.family, case.shape) == (family, shape))


@lru_cache
def tuned(family: Family, shape: str = "a", tuning: str = "history") -> DraftingModel:
    """A reference case whose head is right part of the time."""
    with tempfile.TemporaryDirectory() as directory:
        return _load(case_of(family, shape).write_tuned(Path(directory), tuning).path)


@lru_cache
def small(
    family: str, *, seed: int = 3, dtype: str = "float32", acceptance: bool = False, bits: int | None = None
) -> Any:
    """Any tiny model; its head, if it has one, is random unless `acceptance`."""
    with tempfile.TemporaryDirectory() as directory:
        path = write_checkpoint(
            directory,
            family,  # type: ignore[arg-type]
            seed=seed,
            tokenizer=family not in FAMILIES,
            bits=bits,
            acceptance=HISTORY_MATTERS if acceptance else None,
        ).path
        return load_runtime(path, dtype=dtype, dequantise=False if bits else None).model


def _load(path: Path) -> DraftingModel:
    model = load_runtime(path).model
    assert isinstance(model, DraftingModel)
    return model


class OtherHead(DraftingModel):
    """A model with another head put on."""

    def __init__(self, model: DraftingModel, head: DraftHead) -> None:
        self.__dict__.update(model.__dict__)
        self._model, self.draft_head = model, head

    def make_cache(self) -> DecodingState:
        return self._model.make_cache()

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        return self._model.forward(ids, cache, keep=keep)

    def project(self, hidden: mx.array) -> mx.array:
        return self._model.project(hidden)


class ChangedHead(DraftHead):
    """A real head whose logits are changed on the way out."""

    def __init__(self, head: DraftHead, change: Any) -> None:
        self._head, self._change = head, change
        self.settings, self.weight_bytes_per_draft = head.settings, head.weight_bytes_per_draft

    def make_cache(self) -> DecodingState:
        return self._head.make_cache()

    def take(self, hidden: Hidden) -> mx.array:
        return self._head.take(hidden)

    def draft(
        self, hidden: mx.array, next_ids: mx.array, cache: DecodingState, *, keep: int | None = None
    ) -> tuple[mx.array, mx.array]:
        logits, rows = self._head.draft(hidden, next_ids, cache, keep=keep)
        return self._change(logits), rows

    def append(self, hidden: mx.array, next_ids: mx.array, cache: DecodingState) -> None:
        self._head.append(hidden, next_ids, cache)


def with_wrong_head(model: DraftingModel) -> DraftingModel:
    """The head proposes what it thinks least likely."""
    assert model.draft_head is not None
    return OtherHead(model, ChangedHead(model.draft_head, lambda logits: -logits))


# -- tables -----------------------------------------------------------------------------------------------------------


class CountLayer(CacheLayer):
    """A layer that holds nothing but its length."""

    kind = "count"
    nbytes = held_bytes = 0

    def arrays(self) -> list[mx.array]:
        return []

    def can_trim(self, n: int) -> bool:
        return 0 <= n <= self.offset

    def block(self, start: int, stop: int) -> LayerBlock:
        return LayerBlock(self.kind, None, 0, stop, 0, ())

    def restore(self, snapshot: LayerSnapshot) -> None:
        self.offset = snapshot.offset

    def _trim(self, n: int) -> None:
        self.offset -= n


class _Replay:
    nbytes = 0

    def __init__(self, ids: mx.array) -> None:
        self.ids = ids

    def __call__(self, before: Slots | None, keep: int) -> Slots:
        return (self.ids[:, keep - 1 : keep],)


class TableModel(DraftingModel):
    """Logits of the next id from the last two: `table` float32 [V, V, V]. Its state is the last id."""

    def __init__(self, table: np.ndarray, head: DraftHead | None = None) -> None:
        self.table = mx.array(table.astype(np.float32))
        self.vocab_size = self.hidden_size = int(table.shape[0])
        self.weight_bytes_per_forward = 1
        self.draft_head = head
        self.rows = 0

    def make_cache(self) -> DecodingState:
        return DecodingState([RecurrentLayer()])

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        (layer,) = cache.layers
        assert isinstance(layer, RecurrentLayer)
        last = mx.zeros((1, 1), mx.int32) if layer.slots is None else layer.slots[0]
        S = ids.shape[1]
        before = mx.concatenate([last, ids[:, :-1]], axis=1) if S > 1 else last
        layer.advance(S, (ids[:, -1:],), _Replay(ids))
        rows = self.table[before, ids]
        return Hidden(rows if keep is None or keep >= S else rows[:, S - keep :])

    def project(self, hidden: mx.array) -> mx.array:
        return hidden


class TableHead(DraftHead):
    """Logits of the id after next from the next: `table` float32 [V, V]."""

    settings = DraftSettings()
    weight_bytes_per_draft = 1

    def __init__(self, table: np.ndarray) -> None:
        self.table = mx.array(table.astype(np.float32))

    def make_cache(self) -> DecodingState:
        return DecodingState([CountLayer()])

    def take(self, hidden: Hidden) -> mx.array:
        return hidden.post

    def draft(
        self, hidden: mx.array, next_ids: mx.array, cache: DecodingState, *, keep: int | None = None
    ) -> tuple[mx.array, mx.array]:
        assert hidden.shape[1] == next_ids.shape[1]
        cache.layers[0].offset += next_ids.shape[1]
        if keep is not None:
            next_ids = next_ids[:, -keep:]
        logits = self.table[next_ids]
        return logits, logits

    def append(self, hidden: mx.array, next_ids: mx.array, cache: DecodingState) -> None:
        assert hidden.shape[1] == next_ids.shape[1]
        cache.layers[0].offset += next_ids.shape[1]


class NoWayBack(CausalModel):
    """A model whose layers refuse to go back."""

    vocab_size = hidden_size = 4
    weight_bytes_per_forward = 1

    def make_cache(self) -> DecodingState:
        class Stuck(CountLayer):
            kind = "stuck"

            def can_trim(self, n: int) -> bool:
                return n == 0

        return DecodingState([Stuck()])

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        cache.layers[0].offset += ids.shape[1]
        return Hidden(mx.zeros((1, ids.shape[1], 4)))

    def project(self, hidden: mx.array) -> mx.array:
        return hidden
