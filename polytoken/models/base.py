"""What a lane may ask of a network: arrays in, arrays out. No request, event or tokenizer is known here."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import mlx.core as mx

from polytoken.cache.state import DecodingState


@dataclass(frozen=True)
class Hidden:
    """Hidden rows of one forward, in the variants the family offers.

    Attributes:
        post: [1, R, H], after the final norm; what `CausalModel.project` reads.
        pre: [1, R, H], the residual stream before the final norm, or None if the family does not offer it.
        wide: [1, R, W], a widened stream for draft heads that want one, or None.
    """

    post: mx.array
    pre: mx.array | None = None
    wide: mx.array | None = None

    def rows(self, start: int, stop: int) -> Hidden:
        """The rows [start, stop) of every variant."""

        def cut(array: mx.array | None) -> mx.array | None:
            return None if array is None else array[:, start:stop]

        return Hidden(self.post[:, start:stop], cut(self.pre), cut(self.wide))


class CausalModel(ABC):
    """A causal language model over one sequence at a time.

    Attributes:
        vocab_size: V, number of rows of the output head.
        hidden_size: H.
        weight_bytes_per_forward: bytes of weights that one single-row forward reads (the byte floor of decoding);
            an embedding that is only indexed counts one row, a tied head counts once.
    """

    vocab_size: int
    hidden_size: int
    weight_bytes_per_forward: int

    @abstractmethod
    def make_cache(self) -> DecodingState:
        """A fresh, empty decoding state: one layer of cache per layer of the network."""

    @abstractmethod
    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        """Run ids int32 [1, S] on top of the cache, which advances by S; nothing is evaluated here.

        `keep` limits the returned rows to the last k (R = min(k, S)); None keeps all S. The rows that are not kept
        still reach the cache, but no vocabulary product is ever spent on them.
        """

    @abstractmethod
    def project(self, hidden: mx.array) -> mx.array:
        """Logits float32 [..., V] of post-norm hidden rows [..., H], with the family's softcap if it has one."""
