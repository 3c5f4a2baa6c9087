"""What a lane may ask of a network's own draft head: from a hidden row and the next token, the token after that.

A head's row i is made of the pair (h_i, t_{i+1}) and predicts t_{i+2}. Its cache holds one row per pair, so it is one
shorter than the sequence: after a prompt of n tokens and the token t_n chosen from it, the pairs 0 to n - 2 are the
history, and (h_{n-1}, t_n) is the first row to draft from. Positions are the cache's own offsets.

    rows = head.take(model.forward(ids, state))              # what the head reads of the trunk's rows
    head.append(rows[:, :-1], ids[:, 1:], history)           # history of the prompt
    logits, rows = head.draft(rows[:, -1:], token, history)  # first draft, from a true row
    logits, rows = head.draft(rows, drafted, history)        # next draft, from the head's own row
    history.commit(1, 2)                                     # keep the true row, take back the other

A lane slices rows along axis 1 and hands them back; what they mean and how wide they are is the head's business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.errors import CheckpointError
from polytoken.models.base import CausalModel, Hidden

Variant = Literal["post", "pre"]
"""Rows after a final norm, or the residual stream before it."""

ConcatOrder = Literal["embedding_hidden", "hidden_embedding"]

_SPELLINGS: Mapping[str, str] = {"post_norm": "post", "pre_norm": "pre"}
SETTINGS_KEY = "mtp_contract"


@dataclass(frozen=True)
class DraftSettings:
    """How a head was trained: a property of the checkpoint, which nothing in its tensors shows.

    The wrong variant drafts fluently and is accepted less often, so it is stated, never guessed. A checkpoint states it
    in config.json under `mtp_contract`, or in the header of mtp.safetensors, by the names below.

    Attributes:
        base_hidden_variant: which trunk rows the head reads.
        hidden_variant: which of its own rows it reads in a chained draft.
        concat_order: what comes first in the input of its fusion.
    """

    base_hidden_variant: Variant = "post"
    hidden_variant: Variant = "post"
    concat_order: ConcatOrder = "embedding_hidden"

    def __str__(self) -> str:
        first = self.concat_order.partition("_")[0]
        return f"reads {self.base_hidden_variant}-norm rows, chains {self.hidden_variant}-norm rows, {first} first"

    @staticmethod
    def read(*places: object) -> DraftSettings:
        """From records that may hold some of the names; earlier places win, unknown names are somebody else's.

        Raises:
            CheckpointError: `unsupported_config` for a value that is not known.
        """
        known = {"base_hidden_variant": Variant, "hidden_variant": Variant, "concat_order": ConcatOrder}
        chosen: dict[str, Any] = {}
        for place in reversed([place for place in places if isinstance(place, Mapping)]):
            for name, values in known.items():
                if place.get(name) is None:
                    continue
                value = _SPELLINGS.get(str(place[name]), place[name])
                if value not in get_args(values):
                    allowed = ", ".join(get_args(values))
                    raise CheckpointError(
                        f"the draft head's {name} is {place[name]!r}; known: {allowed}",
                        code="unsupported_config",
                        field=f"{SETTINGS_KEY}.{name}",
                    )
                chosen[name] = value
        return DraftSettings(**chosen)


class DraftHead(ABC):
    """A head that drafts with the trunk's embedding and vocabulary projection.

    Attributes:
        settings: which rows it reads.
        weight_bytes_per_draft: bytes of weights that one single-row draft reads, the vocabulary projection included.
    """

    settings: DraftSettings
    weight_bytes_per_draft: int

    @abstractmethod
    def make_cache(self) -> DecodingState:
        """An empty history: every layer of it can be trimmed row by row."""

    @abstractmethod
    def take(self, hidden: Hidden) -> mx.array:
        """What the head reads of the trunk's rows: [1, R, W]."""

    @abstractmethod
    def draft(
        self, hidden: mx.array, next_ids: mx.array, cache: DecodingState, *, keep: int | None = None
    ) -> tuple[mx.array, mx.array]:
        """Run R pairs, which the history keeps; lazy.

        Args:
            hidden: [1, R, W], from `take` or from an earlier `draft`.
            next_ids: int [1, R], the token that follows each row.
            cache: the history, which advances by R.
            keep: return the last k rows only, so that true rows can be appended and drafted from in one forward.

        Returns:
            logits: float32 [1, min(R, k), V], of the token after `next_ids`.
            hidden: [1, min(R, k), W], to chain from.
        """

    @abstractmethod
    def append(self, hidden: mx.array, next_ids: mx.array, cache: DecodingState) -> None:
        """Add R pairs to the history and nothing more: no vocabulary product, no returned rows.

        Lazy: evaluate `cache.arrays()` with the cycle's other outputs, or unread appends pile up.
        """


class DraftingModel(CausalModel):
    """A causal model of a family whose checkpoints may carry a draft head.

    Attributes:
        draft_head: the head, or None.
        draft_head_note: one sentence on the head, or on why there is none.
    """

    draft_head: DraftHead | None = None
    draft_head_note: str = ""

    def post_norm(self, pre: mx.array) -> mx.array:
        """Rows `post` of rows `pre`; asked of a model whose head reads `pre` rows alone."""
        raise NotImplementedError
