"""Prompt prefill: one partition of the prompt for every lane, on an absolute grid, with reuse of banked prefixes.

The body, all but the last token, is encoded in chunks whose edges are multiples of the chunk size; the last token is
encoded alone, as every later token will be. So a prompt is cut at the same places whether it starts cold or from a
restored prefix, and a hit in the bank changes speed but never a bit of the result.
"""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.models.base import CausalModel, Hidden


class Prefill:
    """The prefill of one row, at most one chunk per `step`.

    Args:
        identity: what states are banked under, None for the bank's own.
        reusable: how many of the prompt's first tokens may be restored; None for all. With a number, which excludes
            whole prompts, none are banked either.

    Attributes:
        ids: the whole prompt, n tokens.
        cache: the row's private decoding state; holds `position` tokens.
        cached_tokens: tokens restored from the bank.
        miss: why not more was restored, None after a full hit.
        logits: float32 [1, V] of the last prompt token once `step` has returned True.
    """

    def __init__(
        self,
        model: CausalModel,
        bank: StateBank,
        ids: tuple[int, ...],
        *,
        chunk: int,
        identity: StateIdentity | None = None,
        reusable: int | None = None,
    ) -> None:
        self.ids = ids
        self.logits: mx.array | None = None
        self._model = model
        self._bank = bank
        self._chunk = chunk
        self.cache: DecodingState = model.make_cache()
        self._identity = identity
        self._whole = reusable is None
        found = bank.find(ids[:reusable], need_tail=self._whole, identity=identity)
        self.cached_tokens = found.length
        self.miss = None if found.miss is None else str(found.miss)
        if found.snapshot is not None:
            self.cache.restore(found.snapshot)
        if found.tail is not None:
            self.logits = found.tail.logits
        self.position = found.length

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.position

    @property
    def cost(self) -> int:
        """Tokens that the next step will compute: up to the next grid edge or the end of the prompt."""
        return min(self.remaining, self._chunk - self.position % self._chunk)

    def step(self) -> bool:
        """Encode up to the next grid edge and bank the state there; True when the whole prompt is encoded."""
        if self.remaining:
            stop = self.position + self.cost
            if stop < len(self.ids):
                self._encode(stop)
                self._bank.put(self.ids[:stop], self.cache, identity=self._identity)
            else:
                self._encode(stop - 1)
                self._finish()
        return not self.remaining

    def release(self) -> None:
        """Drop the arrays; the row is over."""
        self.cache = self._model.make_cache()
        self.logits = None

    def _encode(self, stop: int) -> None:
        """Run ids[position:stop] through the network for the cache alone."""
        if stop > self.position:
            self._forward(stop, keep=0)
            mx.eval(self.cache.arrays())

    def _finish(self) -> None:
        """Encode the last token alone, and bank the whole prompt with the logits that follow it."""
        hidden = self._forward(len(self.ids), keep=1)
        self.logits = self._model.project(hidden.post[:, -1])
        mx.eval(self.logits, self.cache.arrays())
        if self._whole:
            tail = Tail(logits=self.logits, hidden=hidden.post)
            self._bank.put(self.ids, self.cache, tail=tail, identity=self._identity)

    def _forward(self, stop: int, *, keep: int) -> Hidden:
        ids = mx.array([self.ids[self.position : stop]], dtype=mx.int32)
        hidden = self._model.forward(ids, self.cache, keep=keep)
        self.position = stop
        return hidden
