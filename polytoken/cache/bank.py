"""The state bank: prompts that share a beginning pay for it once.

Keys are token prefixes, compared in full: multiples of the chunk grid, usable by every prompt that starts with them,
and whole prompts, usable by an equal prompt alone. A warm prompt is therefore encoded on the same chunks as a cold one,
and a hit changes the speed and not one bit of the output. Whatever is not restored has a stated reason.

Only the thread that owns MLX may call a bank.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence

import mlx.core as mx

from polytoken.cache.answers import BankStatistics, Entry, Found, Miss, MissReason, PutOutcome
from polytoken.cache.blocks import LayerSnapshot, join_blocks
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState, Snapshot
from polytoken.cache.tail import Tail
from polytoken.cache.tree import ID_BYTES, WHOLE, Node, PrefixTree, encode_ids, name_run
from polytoken.errors import CacheError

__all__ = [
    "BankStatistics",
    "Entry",
    "Found",
    "Miss",
    "MissReason",
    "PutOutcome",
    "StateBank",
    "Tail",
]

REMEMBERED_LOSSES = 4096
"""How many evicted or refused runs are remembered by digest, so that a later miss can say so."""


class StateBank:
    """A store of decoding states by token prefix, within a limit of bytes.

    `limit_bytes` bounds the exact sum of bytes of all arrays held, at every instant; 0 turns the bank off. `identity`
    is what lookups and puts are made under unless they name another: states of different identities never meet.
    """

    def __init__(self, limit_bytes: int, *, identity: StateIdentity) -> None:
        self.limit_bytes = limit_bytes
        self.identity = identity
        self._tree = PrefixTree()
        self._lost: OrderedDict[bytes, MissReason] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[str] = Counter()
        self._partial: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._tree)

    def __bool__(self) -> bool:
        return True  # an empty bank is still a bank

    @property
    def nbytes(self) -> int:
        """Exact bytes of all arrays held."""
        return self._tree.nbytes

    def find(self, ids: Sequence[int], *, need_tail: bool = True, identity: StateIdentity | None = None) -> Found:
        """The longest stored prefix of `ids` to go on from, which becomes the most recently used.

        With `need_tail` (a lane that samples from the last row) a whole prompt counts only if its tail is stored;
        otherwise the state before its last chunk is found, so that one chunk gives the last row again.
        """
        if not ids:
            return Found(0)
        identity = identity or self.identity
        key = encode_ids(ids)
        node = self._tree.walk(identity, key)
        parent, ending = node.ending(key)
        for whole in (parent.children.get(ending), node):
            if (
                whole is not None
                and whole.stop == len(ids)
                and whole.complete
                and not (need_tail and whole.tail is None)
            ):
                return self._count(Found(whole.stop, self._join(whole), whole.tail and whole.tail.view()))
        last = len(ids) - 1 if need_tail else len(ids)
        usable = node
        while usable.parent is not None and not (usable.complete and usable.stop <= last):
            usable = usable.parent
        miss = self._explain(identity, key, node=node, usable=usable)
        snapshot = None if usable.parent is None else self._join(usable)
        return self._count(Found(usable.stop, snapshot, None, miss))

    def put(
        self,
        ids: Sequence[int],
        state: DecodingState,
        *,
        tail: Tail | None = None,
        identity: StateIdentity | None = None,
    ) -> PutOutcome:
        """Store the state after exactly `ids`: as a whole prompt if `tail` is given or they end between grid points.

        Copies are compact and evaluated here, so nothing done later to `state` reaches them. What is present stays as
        it is and as old as it is. A state that would not fit the limit beside nothing else is refused, and nobody is
        evicted for it; otherwise the least recently used leaves go until it fits, and only then is it copied.
        Raises CacheError when `state` is not at `len(ids)` or its layers are not those stored before it.
        """
        if self.limit_bytes <= 0:
            return PutOutcome.BANK_OFF
        if not ids or state.offset != len(ids):
            raise CacheError(f"a state of {state.offset} tokens was offered for a key of {len(ids)}")
        identity = identity or self.identity
        key = encode_ids(ids)
        node = self._tree.walk(identity, key)
        if node.blocks and [(b.kind, b.window) for b in node.blocks] != [(x.kind, x.window) for x in state.layers]:
            raise CacheError("a state was offered whose layers differ from those stored under the same identity")
        is_whole = tail is not None or len(ids) % identity.grid > 0
        parent, ending = node.ending(key)
        if is_whole:
            present, anchor = parent.children.get(ending), parent
        else:
            present, anchor = node if node.stop == len(ids) else None, node
        if present is not None:
            return self._complete(present, state, tail)
        runs = cut_runs(key, anchor, identity.grid)
        if is_whole:
            runs[-1] += WHOLE
        return self._extend(anchor, runs, state, tail=tail, identity=identity)

    def clear(self) -> int:
        """Forget everything stored, give back its memory, and return the number of runs dropped."""
        dropped = len(self._tree)
        self._tree.clear()
        self._lost.clear()
        return dropped

    def entries(self, identity: StateIdentity | None = None) -> list[Entry]:
        """The runs stored under one identity, least recently used first."""
        root = self._tree.root(identity or self.identity)
        return [
            Entry(node.ids(), node.nbytes, restorable=node.complete, whole_prompt=node.is_whole)
            for node in self._tree
            if node.root() is root
        ]

    def statistics(self) -> BankStatistics:
        """The counters now."""
        count = self._counts
        return BankStatistics(
            hits=count["hits"],
            full_hits=count["full_hits"],
            misses=dict(self._misses),
            partial=dict(self._partial),
            reused_tokens=count["reused_tokens"],
            puts=count["puts"],
            refusals=count["refusals"],
            evictions=count["evictions"],
            entries=len(self._tree),
            nbytes=self.nbytes,
            limit_bytes=self.limit_bytes,
        )

    def _complete(self, node: Node, state: DecodingState, tail: Tail | None) -> PutOutcome:
        """Give a stored run what it lacks: rows that were gone when it was stored, or the last row's outputs."""
        gaps = node.gaps()
        if not gaps and (tail is None or node.tail is not None):
            return PutOutcome.PRESENT
        blocks = tuple(
            layer.block(0, node.stop) if i in gaps else block
            for i, (layer, block) in enumerate(zip(state.layers, node.blocks, strict=True))
        )
        tail = node.tail or (tail and tail.copy())
        improved = Node(node.parent, node.key, blocks=blocks, tail=tail)
        if not self._make_room(node, improved.nbytes - node.nbytes):
            return self._refuse(node.digest)
        mx.eval(improved.arrays())
        self._tree.replace(node, blocks, tail)
        self._counts["puts"] += 1
        return PutOutcome.STORED

    def _extend(
        self, anchor: Node, runs: list[bytes], state: DecodingState, *, tail: Tail | None, identity: StateIdentity
    ) -> PutOutcome:
        """Hang runs that are not stored yet behind `anchor`, the last one with the tail."""
        chain, parent = [], anchor
        for run in runs:
            blocks = state.blocks(parent.stop, parent.stop + len(run) // ID_BYTES)
            parent = Node(parent, run, blocks=blocks)
            chain.append(parent)
        last = chain[-1]
        gaps = last.gaps()
        if gaps:  # rows between here and the stored ancestors are gone: this run holds its state whole
            whole = (state.layers[i].block(0, last.stop) if i in gaps else b for i, b in enumerate(last.blocks))
            last.blocks = tuple(whole)
            last.update_reach()
        last.tail = tail and tail.copy()
        if not self._make_room(anchor, sum(node.nbytes for node in chain)):
            return self._refuse(chain[0].digest)
        mx.eval([array for node in chain for array in node.arrays()])
        for node in chain:
            self._tree.insert(identity, node)
            self._lost.pop(node.digest, None)
        self._counts["puts"] += 1
        return PutOutcome.STORED

    def _make_room(self, anchor: Node, nbytes: int) -> bool:
        """Evict until `nbytes` more fit behind `anchor`, whose path stays; False, and all stay, if they never can."""
        if sum(node.nbytes for node in anchor.path()) + nbytes > self.limit_bytes:
            return False
        self._tree.touch(anchor)
        while self.nbytes + nbytes > self.limit_bytes:
            for node in self._tree.drop_oldest(keep=anchor):
                self._counts["evictions"] += 1
                self._remember(node.digest, MissReason.EVICTED)
        return True

    def _refuse(self, digest: bytes) -> PutOutcome:
        self._counts["refusals"] += 1
        self._remember(digest, MissReason.OVERSIZE)
        return PutOutcome.OVERSIZE

    def _remember(self, digest: bytes, reason: MissReason) -> None:
        self._lost[digest] = reason
        if len(self._lost) > REMEMBERED_LOSSES:
            self._lost.popitem(last=False)

    def _join(self, node: Node) -> Snapshot:
        """The state at a complete node, sharing the stored arrays; the node becomes the most recently used."""
        self._tree.touch(node)
        chain = [each.blocks for each in node.path()]
        layers: list[LayerSnapshot] = []
        for blocks in zip(*chain, strict=True):
            layer = join_blocks(blocks)
            assert layer is not None  # `complete` says so
            layers.append(layer)
        return Snapshot(tuple(layers), node.stop)

    def _explain(  # noqa: PLR0911  # one return per reason
        self, identity: StateIdentity, key: bytes, *, node: Node, usable: Node
    ) -> Miss:
        """Why nothing behind `usable` was restored, when `node` is the deepest whose tokens agree."""
        if self.limit_bytes <= 0:
            return Miss(MissReason.BANK_OFF, 0)
        rest = key[node.stop * ID_BYTES :]
        common = node.common_ids(rest)
        agreed = node.stop + common
        for parent, run in (node.ending(key), (node, rest[: identity.grid * ID_BYTES])):
            lost = self._lost.get(name_run(parent, run))
            if lost is not None:
                return Miss(lost, agreed)
        if not rest:
            return Miss(MissReason.NO_TAIL if node.complete else MissReason.NO_COVERAGE, agreed)
        if usable is not node:
            return Miss(MissReason.NO_COVERAGE, agreed)
        for other in self._tree.identities():
            if self._tree.walk(other, key).stop > agreed:
                return Miss(MissReason.IDENTITY_MISMATCH, agreed, ", ".join(identity.differing(other)))
        if node.parent is None and not node.children:
            return Miss(MissReason.COLD, 0)
        if common * ID_BYTES == len(rest) or rest[: common * ID_BYTES] + WHOLE in node.children:
            return Miss(MissReason.OFF_GRID, agreed)
        if agreed == 0:
            return Miss(MissReason.NEW_PROMPT, 0)
        return Miss(MissReason.PREFIX_DIVERGENCE if node.children else MissReason.NEW_SUFFIX, agreed)

    def _count(self, found: Found) -> Found:
        self._counts["hits"] += found.length > 0
        self._counts["full_hits"] += found.miss is None
        self._counts["reused_tokens"] += found.length
        if found.miss is not None:
            (self._partial if found.length else self._misses)[found.miss.reason.value] += 1
        return found


def cut_runs(key: bytes, node: Node, grid: int) -> list[bytes]:
    """What of the key lies behind `node`, cut at the grid points."""
    return [key[at : at + grid * ID_BYTES] for at in range(node.stop * ID_BYTES, len(key), grid * ID_BYTES)]
