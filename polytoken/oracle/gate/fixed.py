"""The fixed-shape mode: every decoding forward has the same number of rows, whatever is decoded.

On a GPU a product of one row and one of k rows may be summed in another order, so that plain decoding and a verify
window round apart. Here a single row is run with k - 1 rows of padding, which are taken back at once: the same kernels
give it the same bits as in a window. It costs what the padding costs.
"""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.models.base import CausalModel, Hidden
from polytoken.models.draft import DraftingModel


class FixedShape(DraftingModel):
    """A model whose single-row forwards are run as `rows` rows.

    Args:
        model: the network.
        rows: of every decoding forward, depth + 1.
    """

    def __init__(self, model: CausalModel, rows: int) -> None:
        self._model, self.rows = model, rows
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.weight_bytes_per_forward = model.weight_bytes_per_forward
        self.draft_head = getattr(model, "draft_head", None)
        self.draft_head_note = getattr(model, "draft_head_note", "")

    def make_cache(self) -> DecodingState:
        return self._model.make_cache()

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        if int(ids.shape[1]) != 1 or self.rows == 1:
            return self._model.forward(ids, cache, keep=keep)
        padded = mx.broadcast_to(ids, (1, self.rows))
        with cache.capturing():
            hidden = self._model.forward(padded, cache)
        cache.commit(1, self.rows)
        return hidden.rows(0, 1)

    def project(self, hidden: mx.array) -> mx.array:
        """Logits of one row are computed beside the padding's, too."""
        if hidden.ndim == 2 and int(hidden.shape[0]) == 1 and self.rows > 1:
            return self._model.project(mx.broadcast_to(hidden, (self.rows, int(hidden.shape[1]))))[:1]
        return self._model.project(hidden)
