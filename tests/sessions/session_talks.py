"""Conversations through a lane and its bank, each turn held against the same request served cold, on the grid."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mtp_models import small, tuned

from polytoken.cache import branches
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.sessions import SessionBook
from polytoken.cache.state import DecodingState
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings
from polytoken.models.base import CausalModel
from polytoken.request import Request, SamplingParams

CHUNK = 8
EOS = 7
KINDS = ("dense", "sliding", "hybrid", "mtp hybrid", "mtp next", "mtp copies")
EVERY_KIND = (*KINDS, "mtp model", "mtp both")
_names = itertools.count()


def model_of(kind: str) -> CausalModel:
    """A tiny network of the kind; heads are right part of the time."""
    if kind == "mtp hybrid":
        return tuned("qwen3_5", "a", "free")
    if kind == "mtp next":
        return tuned("qwen3_next", "a", "free")
    families = {"dense": "llama", "sliding": "gemma3_text", "mtp copies": "qwen3"}
    return small(families.get(kind, "qwen3_5"), seed=5)


def make_lane(kind: str, limit: int, *, free: bool = True, book: SessionBook | None = None, **bank: Any) -> Lane[Any]:
    model = model_of(kind)
    identity = StateIdentity(checkpoint=kind, lane="ar", grid=CHUNK, free=free)
    common: dict[str, Any] = {"prefill_chunk": CHUNK, "eos_ids": (EOS,), "max_positions": 500}
    if not kind.startswith("mtp"):
        return ArLane(model, StateBank(limit, identity=identity, sessions=book, **bank), **common)
    drafter = {"mtp copies": "lookup", "mtp model": "model", "mtp both": "lookup+model"}.get(kind, "head")
    settings = MtpSettings(depth=3, drafter=drafter, lookup=LookupSettings(gram=2))
    drafting = small("qwen3_5", seed=5) if "model" in drafter else None  # the model itself: it is right
    identity = identify(identity, settings, model)
    store = StateBank(limit, identity=identity, sessions=book, **bank)
    return MtpLane(model, store, settings=settings, draft_model=drafting, record_cycles=True, **common)


def bits(array: mx.array) -> bytes:
    return repr((array.shape, str(array.dtype))).encode() + np.array(array.astype(mx.float32)).tobytes()


def state_bits(state: DecodingState) -> list[list[bytes]]:
    return [[bits(array) for array in layer.snapshot().arrays()] for layer in state.layers]


class Talks:
    """Sessions over one lane; `say` is a turn, and every turn is checked against a cold one.

    Attributes:
        lane, cold: the lane under test, and one that stores nothing and encodes on the grid.
        texts: what each session has committed, by this file's own bookkeeping.
    """

    def __init__(self, kind: str, limit: int, **bank: Any) -> None:
        self.lane = make_lane(kind, limit, **bank)
        self.cold = make_lane(kind, 0, free=False)
        self.texts: dict[str, tuple[int, ...]] = {}
        self.snapshots: dict[str, tuple[int, ...]] = {}
        self._stored: dict[int, tuple[mx.array, bytes]] = {}
        self._watch(limit)

    @property
    def bank(self) -> StateBank:
        return self.lane.bank

    def say(
        self,
        session: str | None,
        prompt: Sequence[int],
        *,
        count: int = 6,
        seed: int = 0,
        sampling: SamplingParams | None = None,
        keep: int | None = None,
        cancel: bool = False,
    ) -> Any:
        """One request whose prompt is everything so far, ended as by a stop string behind its first `keep` ids.

        Returns the row, over.
        """
        request = Request(
            request_id=f"r{next(_names)}",
            token_ids=tuple(prompt),
            max_new_tokens=count,
            seed=seed,
            sampling=sampling or SamplingParams(),
            session=session,
            stop=() if keep is None else ("~",),
        )
        row, anew = self.lane.open(request, prompt), self.cold.open(replace(request, session=None), prompt)
        for lane, each in ((self.lane, row), (self.cold, anew)):
            while not lane.prefill_step(each):
                pass
        assert anew.cached_tokens == 0
        assert state_bits(row.prefill.cache) == state_bits(anew.prefill.cache)
        assert bits(row.prefill.logits) == bits(anew.prefill.logits)
        if cancel:
            self.lane.close(row, keep=False)
            self.check()
            return row
        warm, cold = self._run(self.lane, row, keep=keep), self._run(self.cold, anew, keep=keep)
        assert warm == cold
        ids = warm if keep is None else warm[:keep]
        if session is not None:
            self.lane.remember(row, ids)
            self.texts[session] = (*prompt, *ids)
            assert self.bank.sessions.committed(session) == self.texts[session]
        self.lane.close(row, keep=True)
        self.cold.close(anew, keep=True)
        self.check()
        return row

    def fork(self, source: str, session: str) -> None:
        branches.fork_session(self.bank, source, session)
        self.texts[session] = self.snapshots.get(source) or self.texts[source]
        self.check()

    def snapshot(self, name: str, session: str) -> None:
        branches.take_snapshot(self.bank, name, session)
        self.snapshots[name] = self.texts[session]
        self.check()

    def restore(self, name: str, session: str) -> None:
        branches.restore_session(self.bank, name, session)
        self.texts[session] = self.snapshots[name]
        self.check()

    def clear(self, session: str) -> None:
        self.bank.clear(session)
        self.texts.pop(session, None)
        self.check()

    def check(self) -> None:
        """Bytes are exact and no stored bit has changed."""
        bank = self.bank
        held = [array for node in bank._tree for array in node.arrays()]
        assert bank._tree.nbytes == sum(array.nbytes for array in held)
        assert bank.nbytes == bank._tree.nbytes + sum(live.nbytes for live in bank._live._states.values())
        assert bank.nbytes <= bank.limit_bytes
        for array in held:
            known, digest = self._stored.setdefault(id(array), (array, bits(array)))
            assert known is array and bits(array) == digest

    def _run(self, lane: Lane[Any], row: Any, *, keep: int | None) -> tuple[int, ...]:
        """The output ids of a prefilled row, up to the step that brings the last of `keep`, as a scheduler would stop.

        A head's history must have grown with them.
        """
        ids: list[int] = []
        while True:
            (commit,) = lane.step([row])
            assert not isinstance(commit, Exception), commit
            ids += commit.token_ids
            drafter = getattr(row, "drafter", None)
            if isinstance(drafter, HeadDrafter):
                assert drafter.history.offset + drafter.owed == row.state.offset - 1
            if commit.stop_reason is not None or (keep is not None and len(ids) >= keep):
                return tuple(ids)

    def _watch(self, limit: int) -> None:
        """See to it that the budget holds between any two steps of a put."""
        tree = self.bank._tree

        def watched(step: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                result = step(*args, **kwargs)
                assert self.bank.nbytes <= limit
                return result

            return run

        for name in ("insert", "replace", "remove", "touch", "set_marks"):
            setattr(tree, name, watched(getattr(tree, name)))
