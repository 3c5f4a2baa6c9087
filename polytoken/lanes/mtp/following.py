"""The trunk as prefill sees it: every forward of the prompt is followed by the row's drafter.

Prefill cuts the prompt, banks states and restores them; it is one for all lanes. Here it is given a network whose state
has the drafter's layers beside the trunk's, so that history streams along chunk by chunk, is banked with the trunk's
state, and comes back with it.
"""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.state import DecodingState
from polytoken.lanes.mtp.draft import Drafter
from polytoken.models.base import CausalModel, Hidden


class FollowedModel(CausalModel):
    """A trunk and one row's drafter, encoding together.

    Attributes:
        trunk: the network that verifies.
        drafter: the row's.
        state: the trunk's own share of the latest state made, which windows are verified on.
    """

    def __init__(self, trunk: CausalModel, drafter: Drafter) -> None:
        self.trunk = trunk
        self.vocab_size = trunk.vocab_size
        self.hidden_size = trunk.hidden_size
        self.weight_bytes_per_forward = trunk.weight_bytes_per_forward
        self.drafter = drafter
        self.state = DecodingState([])

    def make_cache(self) -> DecodingState:
        """An empty state of both. There is one at a time: the drafter forgets what it had."""
        self.state = self.trunk.make_cache()
        return DecodingState([*self.state.layers, *self.drafter.reset()])

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        S = int(ids.shape[1])
        wanted = self.drafter.rows_wanted(S)
        both = None if keep is None or wanted is None else max(keep, wanted)
        hidden = self.trunk.forward(ids, self.state, keep=both)
        self.drafter.follow(ids, hidden)
        R = int(hidden.post.shape[1])
        return hidden if keep is None or keep >= R else hidden.rows(R - keep, R)

    def project(self, hidden: mx.array) -> mx.array:
        return self.trunk.project(hidden)
