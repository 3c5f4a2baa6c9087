"""The limit counts what is really in memory, at the moment when copies come to be as well as between the steps."""

from __future__ import annotations

import random
from typing import Any

import mlx.core as mx
import pytest
from cache_rows import feed_state, make_layers

from polytoken.cache import bank as bank_module
from polytoken.cache import branches
from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState

GRID, WINDOW = 3, 5
LIMITS = (900, 2_200)
SEEDS = (3, 0)


class Watched:
    """MLX as the bank sees it: whenever it makes copies real, they and all that is held are added up."""

    def __init__(self, bank: StateBank) -> None:
        self.bank, self.most, self.evals = bank, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def eval(self, *trees: Any) -> None:
        mx.eval(*trees)
        held = {id(array): array.nbytes for node in self.bank._tree for array in node.arrays()}
        fresh = {id(array): array.nbytes for tree in trees for array in tree}
        self.most = max(self.most, sum({**held, **fresh}.values()) + self.bank._live.nbytes)
        self.evals += 1


def state_of(ids: tuple[int, ...], hybrid: bool, *, settled: bool) -> DecodingState:
    state = make_layers((None, WINDOW))
    feed_state(state, ids, len(ids))
    if settled:
        state.settle()  # the sliding layer has its window alone
    if hybrid:
        layer = RecurrentLayer()
        layer.advance(len(ids), (mx.full((1, 20), float(hash(ids) % 65521)),))
        state = DecodingState([*state.layers, layer])
    return state


@pytest.mark.parametrize("free", [True, False], ids=["free", "grid"])
@pytest.mark.parametrize("hybrid", [False, True], ids=["sliding", "hybrid"])
@pytest.mark.parametrize("limit", LIMITS)
def test_the_limit_holds_while_copies_are_made(
    limit: int, hybrid: bool, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E18, E19: random prompts that branch, go on and are completed, of sessions, forks and snapshots."""
    for seed in SEEDS:
        draws = random.Random(f"{limit} {hybrid} {free} {seed}")
        identity = StateIdentity(checkpoint="c", lane="ar", grid=GRID, free=free)
        bank = StateBank(limit, identity=identity, session_limit_bytes=draws.choice((None, limit // 2)))
        watched = Watched(bank)
        monkeypatch.setattr(bank_module, "mx", watched)
        play(bank, draws, hybrid=hybrid)
        assert watched.evals > 0 and limit // 3 < watched.most <= limit


def play(bank: StateBank, draws: random.Random, *, hybrid: bool) -> None:
    for _ in range(80):
        ids = tuple(draws.randrange(2) for _ in range(draws.randrange(1, 15)))
        session = draws.choice((None, "a", "b", "c"))
        state = state_of(ids, hybrid, settled=draws.random() < 0.5)
        tail = Tail(mx.zeros((1, 3))) if draws.random() < 0.4 else None
        bank.put(ids, state, tail=tail, session=session)
        if session is not None:
            bank.commit(session, ids)
            branch(bank, draws, session, ids, state)
        bank.find(tuple(draws.randrange(2) for _ in range(draws.randrange(1, 15))))
        assert bank.nbytes <= bank.limit_bytes


def branch(bank: StateBank, draws: random.Random, session: str, ids: tuple[int, ...], state: DecodingState) -> None:
    if draws.random() < 0.3:
        bank.keep_live(session, ids, state)
    if draws.random() < 0.1:
        branches.take_snapshot(bank, draws.choice("st"), session)
    if draws.random() < 0.1:
        branches.drop_snapshot(bank, draws.choice("st"))
    if bank.sessions.committed("d") is None:
        branches.fork_session(bank, session, "d")
    elif draws.random() < 0.1:
        bank.clear("d")
