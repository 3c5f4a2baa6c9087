"""The ids of one answer that a repetition penalty applies to."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx

from polytoken.errors import RequestError


class SeenIds:
    """The ids a repetition penalty applies to, as a mask that lives on the device and changes only by new ids.

    Attributes:
        mask: bool [V].
    """

    def __init__(self, ids: Iterable[int], *, excluded: Iterable[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._done = set(excluded)  # excluded ids count as dealt with and so never enter the mask
        self.mask = mx.zeros((vocab_size,), mx.bool_)
        self.observe(ids)

    def observe(self, ids: Iterable[int]) -> None:
        """Add ids. Raises RequestError for one outside the vocabulary, which a device would not notice."""
        fresh = sorted(set(ids) - self._done)
        if not fresh:
            return
        if fresh[0] < 0 or fresh[-1] >= self._vocab_size:
            bad = fresh[0] if fresh[0] < 0 else fresh[-1]
            raise RequestError(f"id {bad} lies outside the vocabulary of {self._vocab_size}", field="token_ids")
        self._done.update(fresh)
        # A new array takes the old one's place: graphs already submitted keep theirs.
        self.mask = mx.put_along_axis(self.mask, mx.array(fresh, mx.int32), mx.array(True), axis=0)
