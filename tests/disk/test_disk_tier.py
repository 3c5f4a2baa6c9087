"""Going on from what an earlier process left on disk gives, bit for bit, what a cold run gives.

`Talks.say` compares logits, states, head histories and tokens of every turn with a run that stores nothing.
"""

from __future__ import annotations

import hashlib
import random
import resource
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from disk_records import folder_bytes
from disk_talks import DiskTalks, restore_often
from session_talks import CANVAS_KINDS, CHUNK, KINDS

from polytoken.cache import branches
from polytoken.cache.disk import tier
from polytoken.cache.disk.folder import Folder
from polytoken.cache.disk.listing import clear_sessions, read_folder
from polytoken.cache.disk.record import read_header
from polytoken.cache.tier import SessionRecord


@pytest.mark.parametrize("kind", KINDS)
def test_a_conversation_goes_on_after_a_restart_as_if_there_had_been_none(tmp_path: Path, kind: str) -> None:
    """E12 too: speculating or not, only the new text is computed."""
    run = DiskTalks(tmp_path, kind)
    text: tuple[int, ...] = tuple(range(20, 61))
    for turn in range(4):
        row = run.talks.say("a", text, count=5 + turn)
        assert row.cached_tokens == (0 if turn == 0 else len(text) - 3)
        run.restart()
        assert run.talks.bank.sessions.committed("a") == run.talks.texts["a"]
        text = (*run.talks.texts["a"], 100 + turn, 101, 102)
    run.close()


@pytest.mark.parametrize("kind", CANVAS_KINDS)
def test_a_canvas_conversation_goes_on_after_a_restart_from_its_last_whole_chunk(tmp_path: Path, kind: str) -> None:
    """E07: also a fork of it, and one that parts from it anywhere; every state, latent and token as cold."""
    run = DiskTalks(tmp_path, kind)
    text: tuple[int, ...] = tuple(range(20, 41))
    before = 0
    for turn in range(3):
        row = run.talks.say("a", text, count=5 + turn)
        assert row.cached_tokens == before // CHUNK * CHUNK
        before = len(text)
        run.restart()
        assert run.talks.bank.sessions.committed("a") == run.talks.texts["a"]
        text = (*run.talks.texts["a"], 100 + turn, 101, 102)
    run.talks.fork("a", "b")
    assert run.talks.say("b", (*run.talks.texts["b"], 9), count=5).cached_tokens == before // CHUNK * CHUNK
    run.restart()
    assert run.talks.say(None, (*text[:19], 9, 9), count=5).cached_tokens == 16
    run.close()


@pytest.mark.parametrize("kind", KINDS)
def test_e07_restores_at_any_position(tmp_path: Path, kind: str) -> None:
    """E07: also in the middle of blocks. `benchmarks/disk_trials.py` makes two hundred, with 64 tokens behind each."""
    restore_often(tmp_path, kind, history=50, restores=8, count=4)


@pytest.mark.parametrize("kind", ["sliding", "mtp hybrid"])
@pytest.mark.parametrize("memory", [150_000, 1 << 28])
def test_random_talks_with_restarts_evictions_and_damage(tmp_path: Path, kind: str, memory: int) -> None:
    """E07, E09: both budgets too small, files damaged now and then, the folder watched: never a wrong bit."""
    limit, most = 100_000 if kind == "sliding" else 300_000, 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.is_set():
            most = max(most, folder_bytes(tmp_path))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    draws = random.Random(memory)
    run = DiskTalks(tmp_path, kind, memory=memory, disk=limit)
    evicted = 0
    for _ in range(20):
        step, name = draws.random(), draws.choice("abc")
        more = tuple(draws.randrange(10, 14) for _ in range(draws.randrange(1, 9)))
        text = run.talks.texts.get(name, (1, 2, 3))
        if step < 0.5:
            run.talks.say(name, (*text, *more), count=draws.randrange(1, 7))
        elif step < 0.6:
            run.talks.say(name, (*text[: draws.randrange(len(text))], *more), count=2)
        elif step < 0.7:
            run.talks.say(None, (1, 2, 3, *more), count=2)
        elif step < 0.75:
            run.talks.clear(name)
        else:
            run.tier.store.flush(60)
            counts = run.tier.store.statistics()
            evicted += counts.evictions
            if step < 0.85:
                damage_one(tmp_path, draws)
            run.restart()
    run.close()
    stop.set()
    watcher.join()
    assert most <= limit
    assert evicted


def damage_one(root: Path, draws: random.Random) -> None:
    files = sorted(root.glob("v*/*/*.safetensors"))
    if files:
        path = draws.choice(files)
        data = bytearray(path.read_bytes())
        data[draws.randrange(len(data))] ^= 1 << draws.randrange(8)
        path.write_bytes(data)


def test_a_damaged_run_costs_what_is_behind_it(tmp_path: Path) -> None:
    """E07: the rest of the chain is computed again, and stored again."""
    run = DiskTalks(tmp_path, "hybrid")
    run.talks.say("a", tuple(range(20, 61)), count=5)
    run.close()
    runs = {}
    for path in tmp_path.glob("v*/*/*.safetensors"):
        header = read_header(path)
        assert header is not None
        if header.kind == "run":
            runs[header.meta["start"]] = path
    runs[16].write_bytes(runs[16].read_bytes()[:-1])
    again = DiskTalks(tmp_path, "hybrid")
    assert again.talks.say(None, tuple(range(20, 61)), count=5).cached_tokens < 24
    assert again.tier.store.statistics().refused == {"truncated": 1}
    again.restart()
    assert again.talks.say(None, (*range(20, 61), 7, 8), count=5).cached_tokens >= 40
    again.close()


def test_e08_states_of_another_program_or_machine_are_a_miss(tmp_path: Path) -> None:
    """E08: what made them is part of their name."""
    for seen, (environment, cached) in enumerate((("one", 0), ("other", 0), ("one", 41))):
        run = DiskTalks(tmp_path, "dense", environment=environment)
        row = run.talks.say("a", (*range(20, 61), 5), count=3)
        assert row.cached_tokens >= cached and (cached or row.cached_tokens == 0)
        assert [each.name for each in run.tier.sessions()] == ["a"]
        run.tier.store.flush(60)
        assert (run.tier.statistics()["records_of_others"] > 0) == (seen > 0)  # and that is why
        run.close()


def test_a_cleared_session_does_not_come_back(tmp_path: Path) -> None:
    run = DiskTalks(tmp_path, "mtp hybrid")
    run.talks.say("a", tuple(range(20, 61)), count=5)
    run.talks.say("b", tuple(range(70, 90)), count=5)
    run.talks.clear("a")
    run.restart()
    assert run.talks.bank.sessions.committed("a") is None
    assert run.talks.bank.sessions.committed("b") is not None
    assert run.talks.say("a", tuple(range(20, 61)), count=5).cached_tokens == 0
    run.close()


def test_a_run_that_the_disk_was_too_slow_for_is_written_later(tmp_path: Path) -> None:
    run = DiskTalks(tmp_path, "dense")
    run.tier.store.pending_limit = 13_000  # two runs
    text = tuple(range(20, 120))
    with Folder(tmp_path).locked():  # another process is at work
        run.talks.say("a", text, count=3)
        assert run.tier.statistics()["behind"] > 0
    run.restart()
    assert run.talks.say("a", (*run.talks.texts["a"], 5), count=3).cached_tokens == len(run.talks.texts["a"]) - 4
    run.close()


def test_the_shorter_run_stays_until_the_longer_one_is_written(tmp_path: Path) -> None:
    """E07: the process ends between the two (here because the disk is full): nothing of what was there is lost."""
    run = DiskTalks(tmp_path, "dense")
    run.talks.say("a", tuple(range(20, 61)), count=3)
    assert run.tier.store.flush(60)
    before, limits = run.talks.texts["a"], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (512, limits[1]))
    try:
        run.talks.say("a", (*before, 5), count=1)
        assert run.tier.store.flush(60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert run.talks.bank.statistics().superseded > 0 and run.tier.store.statistics().read_only
    run.restart()
    assert run.talks.say(None, (*before, 5), count=3).cached_tokens == len(before)
    run.close()


@pytest.mark.parametrize("kind", ["dense", "hybrid", "mtp hybrid", "canvas modilify"])
def test_a_named_snapshot_outlives_the_process(tmp_path: Path, kind: str) -> None:
    """E01, E18: its tokens and states, though the conversation went on behind it; dropped, it does not come back."""
    run = DiskTalks(tmp_path, kind)
    run.talks.say("a", tuple(range(20, 41)), count=5)
    run.talks.snapshot("s", "a")
    point = run.talks.texts["a"]
    run.talks.say("a", (*point, 50, 51, 52), count=5)  # the run that the snapshot ends in is replaced by a longer one
    run.restart()
    run.talks.snapshots["s"] = point
    bank = run.talks.bank
    assert bank.sessions.snapshots["s"].committed.ids == point and bank.nbytes == 0
    run.talks.fork("s", "b")
    row = run.talks.say("b", (*point, 60, 61), count=5)
    assert row.cached_tokens == (len(point) // CHUNK * CHUNK if kind.startswith("canvas") else len(point))
    (listed,) = [each for each in read_folder(tmp_path).sessions if each.kind == "snapshot"]
    assert (listed.name, listed.tokens) == ("s", len(point))
    assert listed.stored_tokens == (
        21 // CHUNK * CHUNK if kind.startswith("canvas") else len(point)
    )  # when it was named
    run.talks.restore("s", "a")
    assert run.talks.texts["a"] == point
    run.restart()
    assert branches.drop_snapshot(run.talks.bank, "s")
    run.restart()
    assert not run.talks.bank.sessions.snapshots
    run.close()


def test_what_is_forgotten_after_a_restart_leaves_the_disk(tmp_path: Path) -> None:
    """Its states are not in memory, and go all the same, but for those that another name stands on."""
    run = DiskTalks(tmp_path, "dense")
    common = tuple(range(20, 37))
    run.talks.say("a", (*common, *range(50, 66)), count=5)
    run.talks.say("b", (*common, *range(70, 86)), count=5)
    run.talks.snapshot("s", "a")
    run.restart()
    run.talks.clear("a")
    assert run.tier.store.flush(60)
    assert {(each.name, each.stored_tokens) for each in read_folder(tmp_path).sessions} == {("b", 38), ("s", 38)}
    branches.drop_snapshot(run.talks.bank, "s")
    run.restart()
    (left,) = read_folder(tmp_path).sessions
    assert (left.name, left.stored_tokens) == ("b", 38)
    assert run.talks.say(None, (*common, *range(50, 66), 5), count=2).cached_tokens == 17
    run.close()


def test_snapshots_are_the_last_to_go_from_the_disk_and_keep_to_its_limit(tmp_path: Path) -> None:
    """E09: strangers fill the folder many times over; a name that alone exceeds it is not kept whole."""
    limit = 200_000
    run = DiskTalks(tmp_path, "dense", disk=limit)
    run.talks.say("a", tuple(range(20, 41)), count=5)
    run.talks.snapshot("s", "a")
    point = run.talks.texts["a"]
    ids = run.talks.lane.model.vocab_size
    for start in range(100, 340, 16):
        run.talks.say(None, tuple(each % ids for each in range(start, start + 30)), count=2)
        assert run.tier.store.flush(60) and folder_bytes(tmp_path) <= limit
    assert run.tier.store.statistics().evictions > 5
    run.restart()
    assert run.talks.say(None, (*point, 5), count=2).cached_tokens == len(point)
    run.talks.say("big", tuple(range(20, 320)), count=5)
    run.talks.snapshot("t", "big")
    assert run.tier.store.flush(60) and folder_bytes(tmp_path) <= limit
    run.talks.say(None, tuple(range(400, 430)), count=2)
    run.restart()  # the name that takes more than half of the folder keeps nobody out
    assert run.talks.say(None, (*range(400, 430), 5), count=2).cached_tokens == 30
    assert folder_bytes(tmp_path) <= limit
    run.close()


@pytest.mark.parametrize("kind", ["dense", "mtp hybrid"])
def test_what_the_disk_evicted_is_written_again_from_memory_before_what_continues_it(tmp_path: Path, kind: str) -> None:
    """E06, E09: a run is on the disk with all that it continues, or for a named reason not at all."""
    run = DiskTalks(tmp_path, kind, disk=160_000 if kind == "dense" else 700_000)
    run.talks.say("a", tuple(range(20, 41)), count=5)
    assert run.tier.store.flush(60)
    ids = run.talks.lane.model.vocab_size
    for start in range(100, 340, 16):
        run.talks.say(None, tuple(each % ids for each in range(start, start + 30)), count=2)
        assert run.tier.store.flush(60)
    assert {each.stored_tokens for each in read_folder(tmp_path).sessions} <= {0}  # not a token of it is left
    run.talks.say("a", (*run.talks.texts["a"], 50, 51, 52), count=5)
    run.restart()
    text = run.talks.texts["a"]
    assert run.talks.say("a", (*text, 5), count=5).cached_tokens == len(text)
    assert "no_parent" not in run.tier.statistics()["dropped"]
    run.close()


def test_saving_a_long_conversation_costs_its_length_and_not_the_square_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every turn names all runs that its states are in; what is hashed for that is counted."""
    hashed: list[int] = []

    def count(data: bytes = b"") -> Any:
        hashed.append(len(data))
        return hashlib.sha256(data)

    def cost_of_a_turn(length: int) -> int:
        run = DiskTalks(tmp_path / str(length), "dense")
        text = tuple(20 + i % 7 for i in range(length))
        run.talks.say("a", text, count=1)
        assert run.tier.store.flush(30)
        with monkeypatch.context() as patch:
            patch.setattr(tier, "hashlib", SimpleNamespace(sha256=count))
            hashed.clear()
            committed = run.talks.bank.sessions.get("a").committed
            run.tier.remember_session(SessionRecord(name="a", identity=committed.identity, ids=committed.ids))
        assert len(run.tier.path(committed.identity, committed.ids)) == -(-len(committed.ids) // CHUNK)
        run.close()
        return sum(hashed)

    assert cost_of_a_turn(400) < 4.5 * cost_of_a_turn(100)


@pytest.mark.parametrize("restarted", [False, True])
def test_what_a_branch_stands_on_stays_when_the_other_is_cleared(tmp_path: Path, restarted: bool) -> None:
    """E18: the run that both stood on was replaced by a longer one, when one of them went on."""
    run = DiskTalks(tmp_path, "mtp hybrid")
    run.talks.say("a", tuple(range(20, 61)), count=3)
    run.talks.fork("a", "b")
    if restarted:
        run.restart()
    run.talks.say("a", (*run.talks.texts["a"], 5), count=3)
    assert run.talks.bank.statistics().superseded > 0
    text = run.talks.texts["b"]
    run.restart()
    assert {each.name: each.stored_tokens - each.tokens for each in read_folder(tmp_path).sessions} == {"a": 0, "b": 0}
    assert clear_sessions(tmp_path, {"a"})[0] == 1
    run.restart()
    assert run.talks.say("b", (*text, 9), count=3).cached_tokens == len(text)
    run.close()
