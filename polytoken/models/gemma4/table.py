"""The tied embedding table, plain or packed: rows in, logits of any vocabulary range out."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.canvas import SoftPart, SoftSum


class Table:
    """V rows of H, used as embedding and as output head."""

    def __init__(self, embedding: nn.Embedding | nn.QuantizedEmbedding, *, hidden_size: int, softcap: float) -> None:
        self._embedding = embedding
        self._packed = isinstance(embedding, nn.QuantizedEmbedding)
        self._softcap = softcap
        self.dtype: mx.Dtype = (embedding.scales if self._packed else embedding.weight).dtype
        self._scale = mx.array(math.sqrt(hidden_size), self.dtype)  # rounded to the table's dtype, as training did

    def rows(self, ids: mx.array) -> mx.array:
        """Scaled rows [..., H] of ids [...]."""
        rows: mx.array = self._embedding(ids)
        return rows * self._scale

    def project(self, flat: mx.array, start: int, stop: int) -> mx.array:
        """Soft-capped logits float32 [R, stop - start] of hidden rows [R, H]."""
        logits = self._product(flat, start, stop, transpose=True).astype(mx.float32)
        return mx.tanh(logits / self._softcap) * self._softcap

    def soft_add(self, total: SoftSum | None, part: SoftPart) -> SoftSum:
        """`total` with one more chunk; see `CanvasModel.soft_add`."""
        rows = self._product(part.shares.astype(self.dtype), part.start, part.stop, transpose=False).astype(mx.float32)
        if total is None:
            return SoftSum(part.top, part.total, rows)
        top = mx.maximum(part.top, total.top)
        old, new = mx.exp(total.top - top), mx.exp(part.top - top)
        return SoftSum(top, total.total * old + part.total * new, total.rows * old[:, None] + rows * new[:, None])

    def soft_rows(self, total: SoftSum) -> mx.array:
        """[R, H]: the mean row under the softmax, scaled like an embedding."""
        return (total.rows / total.total[:, None]).astype(self.dtype) * self._scale

    def _product(self, x: mx.array, start: int, stop: int, *, transpose: bool) -> mx.array:
        """x times rows [start, stop) of the table, transposed or not; packed rows stay packed."""
        table = self._embedding
        product: mx.array
        if not self._packed:
            rows = table.weight[start:stop]
            product = x @ (rows.T if transpose else rows)
            return product
        biases = table.get("biases")
        product = mx.quantized_matmul(
            x,
            table.weight[start:stop],
            table.scales[start:stop],
            None if biases is None else biases[start:stop],
            transpose=transpose,
            group_size=table.group_size,
            bits=table.bits,
            mode=table.mode,
        )
        return product
