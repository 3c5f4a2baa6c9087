"""Conversations through a lane and its bank, each turn held against the same request served cold, on the grid."""

from __future__ import annotations

import itertools
import random
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from canvas_serving import SETTINGS, load_diffusion, load_modilify, open_lane
from mtp_models import small, tuned

from polytoken.cache import branches
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.lookup import join_spot
from polytoken.cache.sessions import SessionBook
from polytoken.cache.state import DecodingState
from polytoken.checkpoint.runtime import Runtime
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.rolling import RollingRow
from polytoken.lanes.canvas.state import collect_arrays
from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.row import MtpRow
from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings
from polytoken.models.base import CausalModel
from polytoken.request import Request, SamplingParams

CHUNK = 8
EOS = 7
KINDS = ("dense", "sliding", "hybrid", "mtp hybrid", "mtp next", "mtp copies")
EVERY_KIND = (*KINDS, "mtp model", "mtp both")
CANVAS_KINDS = ("canvas modilify", "canvas block", "canvas rolled")
_names = itertools.count()


def model_of(kind: str) -> CausalModel:
    """A tiny network of the kind; heads are right part of the time."""
    if kind == "mtp hybrid":
        return tuned("qwen3_5", "a", "free")
    if kind == "mtp next":
        return tuned("qwen3_next", "a", "free")
    families = {"dense": "llama", "sliding": "gemma3_text", "mtp copies": "qwen3"}
    return small(families.get(kind, "qwen3_5"), seed=5)


@lru_cache
def runtime_of(kind: str) -> Runtime:
    """A tiny network of the kind, with latent deliberation or without, on the canvas lane."""
    with tempfile.TemporaryDirectory() as folder:
        return (load_modilify if kind == "canvas modilify" else load_diffusion)(Path(folder) / "model")


def make_lane(kind: str, limit: int, *, free: bool = True, book: SessionBook | None = None, **bank: Any) -> Lane[Any]:
    if kind in CANVAS_KINDS:
        identity = StateIdentity(checkpoint=kind, lane="canvas", grid=CHUNK)
        store = StateBank(limit, identity=identity, sessions=book, **bank)
        return open_lane(runtime_of(kind), SETTINGS[kind.removeprefix("canvas ")], chunk=CHUNK, bank=store)
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


def row_bits(row: Any) -> list[Any]:
    """All that a row goes on from: its state, and on a canvas what deliberation has learnt."""
    learnt = collect_arrays(row.state) if isinstance(row, RollingRow) else []
    state = row.state if isinstance(row, MtpRow) else row.cache
    return [*state_bits(state), [bits(array) for array in learnt]]


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
        self._digests: dict[str, tuple[tuple[int, ...], str]] = {}
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
        if isinstance(self.lane, CanvasLane):
            sampling = None  # it draws by a law of its own
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
        if not isinstance(self.lane, CanvasLane):
            assert bits(row.prefill.logits) == bits(anew.prefill.logits)
        if cancel:
            self.lane.close(row, keep=False)
            self.check()
            return row
        warm, cold = self._run(self.lane, row, keep=keep), self._run(self.cold, anew, keep=keep)
        assert warm == cold
        assert row_bits(row) == row_bits(anew)
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
        spot = self.bank.locate(self.texts[session])
        self._digests.pop(name, None)
        if spot.position:
            self._digests[name] = self.texts[session][: spot.position], join_spot(spot).digest()
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
        """Bytes are exact, and no stored bit has changed, nor any named snapshot."""
        bank = self.bank
        held = [array for node in bank._tree for array in node.arrays()]
        assert bank._tree.nbytes == sum(array.nbytes for array in held)
        assert bank.nbytes == bank._tree.nbytes + sum(live.nbytes for live in bank._live._states.values())
        assert bank.nbytes <= bank.limit_bytes
        for array in held:
            known, digest = self._stored.setdefault(id(array), (array, bits(array)))
            assert known is array and bits(array) == digest
        for ids, digest in self._digests.values():
            spot = bank.locate(ids)
            assert spot.position == len(ids) and join_spot(spot).digest() == digest

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


def play(talks: Talks, step: tuple[Any, ...]) -> None:
    """One step of a conversation, by its name and what it takes."""
    kind, *rest = step
    texts = talks.texts
    if kind == "turn":
        name, more, count, sampling, keep = rest
        talks.say(name, (*texts.get(name, (1, 2, 3)), *more), count=count, seed=count, sampling=sampling, keep=keep)
    elif kind == "edit":  # the client goes back to somewhere in the middle and says something else
        name, share, more, count = rest
        text = texts.get(name, ())
        talks.say(name, (*text[: int(share * len(text))], *more), count=count)
    elif kind == "again":  # the same prompt once more, as it stands
        name, count = rest
        talks.say(name, texts.get(name) or (4, 4), count=count)
    elif kind == "cancel":
        name, more = rest
        talks.say(name, (*texts.get(name, ()), *more), cancel=True)
    elif kind == "stranger":
        more, count = rest
        talks.say(None, (1, 2, 3, *more), count=count)
    elif kind == "fork":
        source, name = rest
        if source in texts and name not in texts:
            talks.fork(source, name)
    elif kind == "snapshot":
        (name,) = rest
        if name in texts:
            talks.snapshot("s", name)
    elif kind == "restore":
        (name,) = rest
        if talks.snapshots:
            talks.restore("s", name)
    elif kind == "clear":
        talks.clear(*rest)


def random_step(draws: random.Random) -> tuple[Any, ...]:
    """A step for `play`: mostly turns, and half of those with drawn tokens."""
    name, other = draws.choice("abc"), draws.choice("abc")
    more = tuple(draws.randrange(10, 14) for _ in range(draws.randrange(1, 12)))
    usual = SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    count = draws.randrange(1, 8)
    turn = ("turn", name, more, count, draws.choice((SamplingParams(), usual)), draws.choice((None, None, 1, 3)))
    return draws.choice(
        (
            turn, turn, turn, turn,
            ("edit", name, draws.random(), more, count),
            ("edit", name, draws.random(), more, count),
            ("again", name, count),
            ("cancel", name, more),
            ("stranger", more, count),
            ("fork", name, other),
            ("snapshot", name),
            ("restore", name),
            ("clear", name),
        )
    )  # fmt: skip
