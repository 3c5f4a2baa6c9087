"""The bank against a naive model: every stored prefix in one list, oldest first.

Invariants 2, 6, 7 and 8: the longest stored true prefix is found, a hit refreshes it, the least recently used leaf
goes first, bytes are exact and never above the limit even between the steps of a put, and no stored bit ever changes.
"""

from __future__ import annotations

import mlx.core as mx
from cache_rows import bits, cold_state, feed_state, make_layers, state_bits
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polytoken.cache.bank import StateBank, Tail
from polytoken.cache.identity import StateIdentity

GRID, WINDOW = 3, 5
WINDOWS = (None, WINDOW)
ROW = 2 * (3 + 5) * 4
TAIL = 8

Key = tuple[tuple[int, ...], bool]
"""(ids, whether they are a whole prompt)."""


class NaiveBank:
    """What the bank should hold, written down as plainly as possible."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held: dict[Key, dict] = {}  # oldest first

    def nbytes(self) -> int:
        return sum(info["bytes"] for info in self.held.values())

    def parent(self, key: Key) -> Key:
        return key[0][: (len(key[0]) - 1) // GRID * GRID], False

    def path(self, key: Key) -> list[Key]:
        """The key and its ancestors, deepest first, the empty one left out."""
        keys = []
        while key[0]:
            keys.append(key)
            key = self.parent(key)
        return keys

    def complete(self, key: Key) -> bool:
        """Are the last WINDOW - 1 rows there, in this entry or behind each other in its ancestors?"""
        need = max(0, len(key[0]) - (WINDOW - 1))
        rows: set[int] = set()
        for each in self.path(key):
            rows |= set(self.held[each]["sliding"])
        return rows >= set(range(need, len(key[0])))

    def touch(self, key: Key) -> None:
        for each in self.path(key):
            self.held[each] = self.held.pop(each)

    def find(self, ids: tuple[int, ...], need_tail: bool) -> tuple[int, bool]:
        """Length restored, and whether it is the whole prompt with its tail."""
        for key in ((ids, True), (ids, False)):
            if key in self.held and self.complete(key) and (self.held[key]["tail"] or not need_tail):
                self.touch(key)
                return len(ids), self.held[key]["tail"]
        for length in range(len(ids) - need_tail, 0, -1):
            key = (ids[:length], False)
            if key in self.held and self.complete(key):
                self.touch(key)
                return length, False
        return 0, False

    def put(self, ids: tuple[int, ...], tail: bool, first_row: int) -> None:
        """`first_row`: the oldest row that the offered state's sliding layer still has."""
        whole = tail or len(ids) % GRID > 0
        key = (ids, whole)
        changes: dict[Key, dict] = {}
        for each in reversed(self.path(key)):
            if each not in self.held:
                stop, start = len(each[0]), len(self.parent(each)[0])
                sliding = range(max(start, stop - (WINDOW - 1), first_row), stop)
                changes[each] = {"full": stop - start, "sliding": sliding, "tail": each == key and tail}
        if key in self.held:
            changes[key] = dict(self.held[key], tail=self.held[key]["tail"] or tail)
        before, self.held = self.held, {**self.held, **changes}
        if not self.complete(key):
            changes[key]["sliding"] = range(max(0, len(ids) - (WINDOW - 1)), len(ids))
        self.held = before
        for info in changes.values():
            info["bytes"] = (info["full"] + len(info["sliding"])) * ROW + TAIL * info["tail"]
        if key in before and changes[key] == before[key]:
            return
        # Copies come before what they replace goes.
        grows = sum(
            self.bytes_of_copies(before[each], info) if each in before else info["bytes"]
            for each, info in changes.items()
        )
        if sum(before[each]["bytes"] for each in self.path(key) if each in before) + grows > self.limit:
            return
        for each in self.path(key):
            if each in self.held:
                self.held[each] = self.held.pop(each)
        while self.nbytes() + grows > self.limit:
            self.evict(protect=self.path(key))
        for each, info in changes.items():
            self.held[each] = info
        self.touch(key)

    def bytes_of_copies(self, old: dict, new: dict) -> int:
        """What completing an entry copies: all sliding rows if it gets any, and the tail if it had none."""
        rows = len(new["sliding"]) * ROW if new["sliding"] != old["sliding"] else 0
        return rows + TAIL * (new["tail"] and not old["tail"])

    def evict(self, protect: list[Key]) -> None:
        leaf = next(k for k in self.held if not self.children(k) and k not in protect)
        del self.held[leaf]
        for each in self.path(leaf)[1:]:
            if self.children(each) or each in protect or self.complete(each):
                return
            del self.held[each]

    def children(self, key: Key) -> list[Key]:
        return [k for k in self.held if self.parent(k) == key and k != key]


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=14).map(tuple)


class BankMachine(RuleBasedStateMachine):
    @initialize(limit=st.sampled_from([10 * ROW, 25 * ROW, 60 * ROW, 200 * ROW]))
    def open(self, limit: int) -> None:
        self.bank = StateBank(limit, identity=StateIdentity(checkpoint="c", lane="ar", grid=GRID))
        self.naive = NaiveBank(limit)
        self.digests: dict[int, tuple[object, list[bytes]]] = {}
        self.rows: list[tuple[object, tuple[int, ...]]] = []
        self.prefilling: list[tuple[object, tuple[int, ...]]] = []
        tree = self.bank._tree

        def watch(step):
            def watched(*args, **kwargs):
                result = step(*args, **kwargs)
                assert tree.nbytes <= limit
                return result

            return watched

        for name in ("insert", "replace", "drop_oldest", "touch"):
            setattr(tree, name, watch(getattr(tree, name)))

    @rule(ids=prompts, need_tail=st.booleans(), store=st.booleans(), by_chunk=st.booleans())
    def serve(self, ids: tuple[int, ...], need_tail: bool, store: bool, by_chunk: bool) -> None:
        found = self.bank.find(ids, need_tail=need_tail)
        length, with_tail = self.naive.find(ids, need_tail)
        assert found.length == length and (found.tail is not None) == with_tail
        assert (found.miss is None) == (length == len(ids))
        state = make_layers(WINDOWS)
        if found.snapshot is not None:
            state.restore(found.snapshot)
            assert state_bits(state) == state_bits(cold_state(ids[:length], WINDOWS, grid=GRID))
        while state.offset < len(ids):
            feed_state(state, ids, min(len(ids), state.offset // GRID * GRID + GRID))
            if store and by_chunk and state.offset < len(ids):
                self.put(ids[: state.offset], state, tail=False)
        if store:
            self.put(ids, state, tail=need_tail)
        assert state_bits(state) == state_bits(cold_state(ids, WINDOWS, grid=GRID))
        self.rows = [*self.rows[-2:], (state, ids)]

    @rule(ids=prompts)
    def begin(self, ids: tuple[int, ...]) -> None:
        state = make_layers(WINDOWS)
        found = self.bank.find(ids)
        assert found.length == self.naive.find(ids, True)[0]
        if found.snapshot is not None:
            state.restore(found.snapshot)
        self.prefilling.append((state, ids))

    @precondition(lambda self: self.prefilling)
    @rule()
    def prefill_one_chunk(self) -> None:
        """Several prompts are encoded in turns, so that others' puts come between two puts of one prompt."""
        state, ids = self.prefilling.pop(0)
        if state.offset < len(ids):
            feed_state(state, ids, min(len(ids), state.offset // GRID * GRID + GRID))
            self.put(ids[: state.offset], state, tail=state.offset == len(ids))
            self.prefilling.append((state, ids))

    @rule(more=prompts, back=st.integers(0, 3))
    def go_on(self, more: tuple[int, ...], back: int) -> None:
        """Rows that once borrowed from the bank, or were stored in it, generate and roll back."""
        if self.rows:
            state, ids = self.rows.pop(0)
            longer = ids + tuple(9 + token for token in more)
            feed_state(state, longer, len(longer))
            if state.layers[1].can_trim(back):
                state.trim(back)
            self.rows.append((state, longer[: state.offset]))

    @rule(ids=prompts)
    def settle_and_offer(self, ids: tuple[int, ...]) -> None:
        state = cold_state(ids, WINDOWS, grid=len(ids))
        state.settle()
        self.put(ids, state, tail=False)

    def put(self, ids: tuple[int, ...], state, *, tail: bool) -> None:
        sliding = state.layers[1]
        first_row = sliding.offset - sliding._buffer.rows
        self.bank.put(ids, state, tail=Tail(mx.array([[1.0, float(len(ids))]])) if tail else None)
        self.naive.put(ids, tail, first_row)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "bank"):
            return
        entries = self.bank.entries()
        expected = [(ids, whole, info["bytes"]) for (ids, whole), info in self.naive.held.items()]
        assert [(entry.ids, entry.whole_prompt, entry.nbytes) for entry in entries] == expected
        assert [entry.restorable for entry in entries] == [self.naive.complete(key) for key in self.naive.held]
        real = sum(array.nbytes for node in self.bank._tree for array in node.arrays())
        assert self.bank.nbytes == real == self.naive.nbytes() <= self.bank.limit_bytes

    @invariant()
    def no_stored_bit_changes(self) -> None:
        if not hasattr(self, "bank"):
            return
        for node in self.bank._tree:
            for array in node.arrays():
                known, digest = self.digests.setdefault(id(array), (array, bits(array)))
                assert known is array and bits(array) == digest


TestBankMachine = BankMachine.TestCase
TestBankMachine.settings = settings(max_examples=50, stateful_step_count=25, deadline=None)
