"""Prompt prefill of this lane: the encoder alone, on an absolute grid, with reuse of banked prefixes."""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.bank import StateBank
from polytoken.cache.state import DecodingState
from polytoken.models.canvas import CanvasModel


class CanvasPrefill:
    """The prefill of one row, at most one chunk per `step`.

    Chunks end at multiples of the chunk size and at the end of the prompt, wherever it was restored to, so that a hit
    changes speed and never a bit. Unlike the lanes that sample from the last row, this one encodes the last token with
    its chunk and asks the bank for no tail: a canvas reads the prompt's keys and values and nothing else of it.

    Attributes:
        ids: the whole prompt, n tokens.
        cache: the row's private decoding state; holds `position` tokens.
        cached_tokens: tokens restored from the bank.
        miss: why not more was restored, None after a full hit.
    """

    def __init__(
        self, model: CanvasModel, bank: StateBank, ids: tuple[int, ...], *, chunk: int, session: str | None = None
    ) -> None:
        self.ids = ids
        self._model = model
        self._bank = bank
        self._chunk = chunk
        self._session = session
        self.cache: DecodingState = model.make_cache()
        found = bank.find(ids, need_tail=False, session=session)
        self.cached_tokens = found.length
        self.miss = None if found.miss is None else str(found.miss)
        if found.snapshot is not None:
            self.cache.restore(found.snapshot)
        self.position = found.length

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.position

    @property
    def cost(self) -> int:
        """Tokens that the next step will encode: up to the next grid edge or the end of the prompt."""
        return min(self.remaining, self._chunk - self.position % self._chunk)

    def step(self) -> bool:
        """Encode one chunk and bank the state behind it; True when the whole prompt is encoded."""
        if self.remaining:
            stop = self.position + self.cost
            self._model.encode(mx.array([self.ids[self.position : stop]], dtype=mx.int32), self.cache)
            mx.eval(self.cache.arrays())
            self.position = stop
            self._bank.put(self.ids[:stop], self.cache, session=self._session)
        if self.remaining:
            return False
        self.cache.settle()  # nothing of a prompt is ever taken back
        return True

    def release(self) -> None:
        """Drop the arrays; the row is over."""
        self.cache = self._model.make_cache()
