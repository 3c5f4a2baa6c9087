"""Prompt prefill: one partition of the prompt for every lane, on an absolute grid, with reuse of banked prefixes.

The body, all but the last token, is encoded in chunks whose edges are multiples of the chunk size; the last token is
encoded alone, as every later token will be. So a prompt is cut at the same places whether it starts cold or from a
restored prefix, and a hit in the bank changes speed but never a bit of the result.

Where cutting changes no bit (a free identity) what is left of a prompt is encoded in one forward, its last token
included, if it is no longer than a chunk: that is the whole cost of a short turn behind a long history.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

import mlx.core as mx

from polytoken.cache.answers import Found
from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.models.base import CausalModel, Hidden

COUNTS: Final = (
    "prefill_chunks",
    "prefill_fused",
    "restored_suffix_prefill_chunks",
    "restored_suffix_prefill_fused",
)
"""Forwards of prompts: all chunks; and how prompts that start cold, or behind a restored prefix, were finished."""


class Prefill:
    """The prefill of one row, at most one chunk per `step`.

    Args:
        model: encodes; it is asked for a fresh state unless `found` brings a live one.
        found: what of the prompt is restored, None to ask the bank for it here.
        identity: what states are banked under, None for the bank's own.
        bank_whole: whether the state at the prompt's end may be banked.
        session: whom the banked states belong to, None for nobody in particular.
        counts: where forwards are counted, by the names that lanes report.

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
        found: Found | None = None,
        identity: StateIdentity | None = None,
        bank_whole: bool = True,
        session: str | None = None,
        counts: Counter[str] | None = None,
    ) -> None:
        self.ids = ids
        self.logits: mx.array | None = None
        self.bank_whole = bank_whole
        self._model = model
        self._bank = bank
        self._chunk = chunk
        self._identity = identity or bank.identity
        self._session = session
        self._counts: Counter[str] = Counter() if counts is None else counts
        if found is None:
            found = bank.find(ids, identity=identity, session=session)
        self.cache: DecodingState = model.make_cache() if found.live is None else found.live.state
        if found.snapshot is not None:
            self.cache.restore(found.snapshot)
        if found.tail is not None:
            self.logits = found.tail.logits
        self.cached_tokens = self.position = found.length
        self.miss = None if found.miss is None else str(found.miss)

    @property
    def remaining(self) -> int:
        return len(self.ids) - self.position

    @property
    def cost(self) -> int:
        """Tokens that the next step will compute: to the next grid edge or the end of the prompt, or all at once."""
        if self._fused:
            return self.remaining
        return min(self.remaining, self._chunk - self.position % self._chunk)

    @property
    def _fused(self) -> bool:
        return self._identity.free and self.remaining <= self._chunk

    def step(self) -> bool:
        """Encode what `cost` says and bank the state there; True when the whole prompt is encoded."""
        if self.remaining:
            stop = self.position + self.cost
            restored = "restored_suffix_" if self.cached_tokens else ""
            self._counts["prefill_chunks"] += 1
            if stop < len(self.ids):
                self._counts["restored_suffix_prefill_chunks"] += bool(restored)
                self._encode(stop)
                self._bank.put(self.ids[:stop], self.cache, identity=self._identity, session=self._session)
            else:
                self._counts[f"{restored}prefill_fused"] += self._fused
                if not self._fused:
                    self._counts["restored_suffix_prefill_chunks"] += bool(restored)
                    self._encode(stop - 1)
                self._finish()
        return not self.remaining

    def release(self) -> None:
        """Drop the arrays; the row is over."""
        self.cache = DecodingState([])
        self.logits = None

    def _encode(self, stop: int) -> None:
        """Run ids[position:stop] through the network for the cache alone."""
        if stop > self.position:
            self._forward(stop, keep=0)
            mx.eval(self.cache.arrays())

    def _finish(self) -> None:
        """Encode what is left, and bank the whole prompt with the logits that follow it."""
        hidden = self._forward(len(self.ids), keep=1)
        self.logits = self._model.project(hidden.post[:, -1])
        mx.eval(self.logits, self.cache.arrays())
        if self.bank_whole:
            tail = Tail(logits=self.logits, hidden=hidden.post)
            self._bank.put(self.ids, self.cache, tail=tail, identity=self._identity, session=self._session)

    def _forward(self, stop: int, *, keep: int) -> Hidden:
        ids = mx.array([self.ids[self.position : stop]], dtype=mx.int32)
        hidden = self._model.forward(ids, self.cache, keep=keep)
        self.position = stop
        return hidden
