"""Drafts from a separate, smaller model over the same vocabulary.

The model's state is at the tokens the trunk has forwarded, less those still owed. A window's first forward runs the
owed tokens and the primary, which are true and stay; the drafts that are run behind them are taken back, whatever
became of them, and those that were accepted are owed to the next window's first forward.
"""

from __future__ import annotations

import mlx.core as mx

from polytoken.cache.layers import CacheLayer, KVLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.errors import UsageError
from polytoken.lanes.mtp.draft import Cue, Draft, Drafter, Kept, draw_chain
from polytoken.lanes.mtp.head import MOST_OWED
from polytoken.lanes.mtp.steps import Steps
from polytoken.lanes.mtp.way_back import Way, remember, return_to
from polytoken.models.base import CausalModel, Hidden


class ModelDrafter(Drafter):
    """A causal model with one row's state."""

    name = "model"

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.reset()

    def reset(self) -> list[CacheLayer]:
        self.state = self._model.make_cache()
        self._owed: list[int] = []
        self._true: Way | None = None  # the recurrent layers' way back, while drafting
        self._chained = 0
        return self.state.layers

    def rows_wanted(self, rows: int) -> int | None:
        return 1

    def follow(self, ids: mx.array, hidden: Hidden) -> None:
        self._model.forward(ids, self.state, keep=0)

    def begin(self, prompt: tuple[int, ...]) -> None:
        assert self.state.offset == len(prompt)

    def propose(self, cue: Cue) -> Steps[Draft]:
        if cue.depth == 0:
            return Draft(self.name)
        logits = self._run(mx.array([[*self._owed, cue.primary]], dtype=mx.int32))
        self._true, self._chained = remember(self.state), 0

        def advance(next_ids: mx.array) -> mx.array:
            self._chained += 1
            return self._run(next_ids)

        return (yield from draw_chain(cue, logits, advance, source=self.name))

    def commit(self, kept: Kept) -> None:
        primary, *accepted = kept.window
        if self._true is None:
            if len(self._owed) + len(kept.window) > MOST_OWED:  # before this window's, which may be taken back
                mx.async_eval(self.settle())
            self._owed += [primary, *accepted]
        else:
            return_to(self.state, self._true, self._chained)
            self._owed = accepted
        self._true = None

    def take_back(self, tokens: int) -> None:
        del self._owed[-tokens:]

    def settle(self) -> list[mx.array]:
        if self._owed:
            self._model.forward(mx.array([self._owed], dtype=mx.int32), self.state, keep=0)
            self._owed = []
        return self.state.arrays()

    def _run(self, ids: mx.array) -> mx.array:
        """Logits float32 [1, V] behind ids [1, S]."""
        return self._model.project(self._model.forward(ids, self.state, keep=1).post[:, -1])


def check_draft_model(draft: CausalModel, trunk: CausalModel) -> None:
    """Refuse a model that cannot draft for the trunk.

    Raises:
        UsageError: `draft_model`.
    """
    if draft.vocab_size != trunk.vocab_size:
        raise UsageError(
            f"the draft model has {draft.vocab_size} ids and the model {trunk.vocab_size}: they must share a tokenizer",
            code="draft_model",
            field="--draft-model",
        )
    kinds = sorted(
        {layer.kind for layer in draft.make_cache().layers if not isinstance(layer, KVLayer | RecurrentLayer)}
    )
    if kinds:
        raise UsageError(
            f"the draft model has {', '.join(kinds)} layers, which cannot take back several drafts exactly",
            code="draft_model",
            field="--draft-model",
        )
