"""The bank's store: token sequences as a tree of runs, in least-recently-used order.

A node is one run of tokens behind its parent: a block of the grid, or what is left of a sequence behind the last one.
It holds only its own tokens' rows, so a common prefix is stored once, and memory is linear in distinct tokens. What
cannot be cut out of rows (recurrent states, last outputs) lies in the node's marks.

Under a free identity the last run of a sequence is open: a longer one takes its place and inherits its marks. Otherwise
it is sealed: it has no children and is kept apart even if it is as long as a block, since a prompt's last token may
have been encoded alone, and where that changes its bits no longer prompt may go on from there.

A node is never older than its children: using a node uses its ancestors.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock, first_needed
from polytoken.cache.identity import StateIdentity
from polytoken.cache.marks import Mark
from polytoken.cache.tail import Tail

ID_BYTES = 8
WHOLE = b"$"
"""Ends the key of a sealed run."""


def encode_ids(ids: Sequence[int]) -> bytes:
    """The ids as 8 little-endian signed bytes each: compared as a whole, and what token hashes are taken over."""
    packed = array("q", ids)
    if _SWAPPED:
        packed.byteswap()
    return packed.tobytes()


def decode_ids(key: bytes) -> tuple[int, ...]:
    """The inverse of `encode_ids`."""
    packed = array("q", key[: len(key) // ID_BYTES * ID_BYTES])
    if _SWAPPED:
        packed.byteswap()
    return tuple(packed)


_SWAPPED = array("q", [1]).tobytes()[0] != 1


class Node:
    """One stored run of tokens.

    Attributes:
        parent: the run before it, None for a root.
        key: its own ids, encoded, and `WHOLE` if it is sealed (a root: its identity).
        stop: tokens from the root to its end.
        blocks: rows, one block per layer, empty for layers whose state stands alone; () for a root.
        marks: by position within (start, stop].
        children: by key.
        holders: who wants it kept (sessions and named snapshots), with the position each of them stands at.
        shared: whether somebody without a session stored it, too.
        digest: SHA-256 chained over the identity and the ids; it names what is gone and never decides a match.
        reach: per layer, the first row of the unbroken run of rows that ends at `stop`.
        nbytes: bytes of the arrays held, exactly.
    """

    __slots__ = (
        "blocks", "children", "digest", "holders", "key", "marks", "nbytes", "parent", "reach", "shared", "stop",
    )  # fmt: skip

    def __init__(
        self,
        parent: Node | None,
        key: bytes,
        *,
        blocks: tuple[LayerBlock, ...] = (),
        marks: Sequence[Mark] = (),
    ) -> None:
        self.parent = parent
        self.key = key
        self.stop: int = 0 if parent is None else parent.stop + len(key) // ID_BYTES
        self.children: dict[bytes, Node] = {}
        self.holders: dict[str, int] = {}
        self.shared = False
        self.digest = name_run(parent, key)
        self.blocks: tuple[LayerBlock, ...] = ()
        self.marks: dict[int, Mark] = {}
        self.reach: tuple[int, ...] = ()
        self.nbytes = 0
        self.hold(blocks, marks)

    @property
    def start(self) -> int:
        """Tokens before it."""
        return 0 if self.parent is None else self.parent.stop

    @property
    def tail(self) -> Tail | None:
        """The last row's outputs at `stop`, if they are stored."""
        mark = self.marks.get(self.stop)
        return None if mark is None else mark.tail

    @property
    def is_sealed(self) -> bool:
        """Whether it serves a prompt of exactly its length alone."""
        return self.parent is not None and len(self.key) % ID_BYTES > 0

    @property
    def has_states(self) -> bool:
        """Whether the network has layers that can be restored at marks only."""
        return any(block.alone for block in self.blocks)

    @property
    def complete(self) -> bool:
        """Whether a state at `stop` can be rebuilt from this node and its ancestors."""
        return self.holds(self.stop)

    @property
    def useful(self) -> bool:
        """Whether a state anywhere in this run can be rebuilt."""
        return self.complete or any(self.holds(position) for position in self.marks)

    def holds(self, position: int) -> bool:
        """Whether a state at `position` in (start, stop] can be rebuilt from this node and its ancestors."""
        if self.parent is None:
            return False
        if self.has_states and not (position in self.marks and self.marks[position].states):
            return False
        return not self.gaps(position)

    def gaps(self, position: int) -> list[int]:
        """Indices of the layers that lack rows for a state at `position`."""
        pairs = zip(self.blocks, self.reach, strict=True)
        return [
            i for i, (block, reach) in enumerate(pairs) if not block.alone and reach > first_needed(block, position)
        ]

    def positions(self, most: int) -> list[int]:
        """Where in (start, min(stop, most)] a state can be rebuilt, the last place first; of rows only the last."""
        top = min(self.stop, most)
        places = [top] if top > self.start and not self.has_states else []
        places += [position for position in reversed(self.marks) if position <= top and position not in places]
        return [position for position in places if self.holds(position)]

    def hold(self, blocks: tuple[LayerBlock, ...], marks: Iterable[Mark]) -> None:
        """Have these contents, instead of others."""
        changed = blocks is not self.blocks
        self.blocks = blocks
        self.marks = {mark.position: mark for mark in sorted(marks, key=lambda mark: mark.position)}
        self.nbytes = sum(block.nbytes for block in blocks) + sum(mark.nbytes for mark in self.marks.values())
        if changed:
            self._update_reach()

    def _update_reach(self) -> None:
        """Recompute `reach` here and below, after the blocks here have changed."""
        todo = [self]
        while todo:
            node = todo.pop()
            above = node.parent
            if above is not None:
                node.reach = tuple(
                    above.reach[i] if above.reach and block.start == above.stop else block.start
                    for i, block in enumerate(node.blocks)
                )
            todo.extend(node.children.values())

    def ending(self, key: bytes) -> tuple[Node, bytes]:
        """The sealed run that ends the whole prompt `key`, if this is the deepest block on the way: parent and key."""
        parent = self if self.parent is None or self.stop * ID_BYTES < len(key) else self.parent
        return parent, key[parent.stop * ID_BYTES :] + WHOLE

    def path(self) -> list[Node]:
        """The nodes from the first run to this one, without the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def root(self) -> Node:
        """Where the path to this node starts."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def own_ids(self) -> tuple[int, ...]:
        """The ids of this run."""
        return decode_ids(self.key)

    def ids(self) -> tuple[int, ...]:
        """All ids from the first to `stop`."""
        return decode_ids(b"".join(node.key[: len(node.key) // ID_BYTES * ID_BYTES] for node in self.path()))

    def arrays(self) -> list[mx.array]:
        rows = [item for block in self.blocks for item in block.arrays]
        return rows + [item for mark in self.marks.values() for item in mark.arrays()]

    def common_ids(self, rest: bytes) -> tuple[int, Node | None]:
        """How many ids of `rest` agree with the best of the children, from the first on, and which child that is."""
        best, found, probe = 0, None, rest[:ID_BYTES]
        for key, child in self.children.items():  # thousands perhaps: one comparison for each that is no better
            if len(probe) > best and key.startswith(probe):
                best, found = common_bytes(key, rest), child
                probe = rest[: best + ID_BYTES]
        return best // ID_BYTES, found


def common_bytes(one: bytes, other: bytes) -> int:
    """Length of the common beginning, in whole ids."""
    low, high = 0, min(len(one), len(other)) // ID_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * ID_BYTES] == other[: middle * ID_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * ID_BYTES


class PrefixTree:
    """All nodes of all identities, their bytes, and their order of use.

    Attributes:
        nbytes: exact sum over the arrays of all nodes.
    """

    def __init__(self) -> None:
        self._roots: dict[StateIdentity, Node] = {}
        self._order: OrderedDict[Node, None] = OrderedDict()  # oldest first
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Node]:
        """Nodes, least recently used first."""
        return iter(self._order)

    def __contains__(self, node: Node) -> bool:
        return node in self._order

    def root(self, identity: StateIdentity) -> Node:
        """The root of an identity's sequences; a fresh one if nothing is stored for it yet."""
        return self._roots.get(identity) or Node(None, repr(identity).encode())

    def identities(self) -> list[StateIdentity]:
        """Identities that something is stored for."""
        return [identity for identity, root in self._roots.items() if root.children]

    def identity_of(self, node: Node) -> StateIdentity:
        """The identity that a stored node belongs to."""
        root = node.root()
        return next(identity for identity, each in self._roots.items() if each is root)

    def walk(self, identity: StateIdentity, key: bytes, *, start: Node | None = None) -> Node:
        """The deepest block of the grid whose tokens are a prefix of the key; `start` is one that is known to be."""
        node, width = start or self.root(identity), identity.grid * ID_BYTES
        for at in range(node.stop * ID_BYTES, len(key) - width + 1, width):
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            node = child
        return node

    def touch(self, node: Node) -> None:
        """Make the node and its ancestors the most recently used."""
        for each in reversed(node.path()):
            self._order.move_to_end(each)

    def insert(self, identity: StateIdentity, node: Node) -> None:
        """Add a node whose parent is stored (or is the identity's root)."""
        assert node.parent is not None
        self._roots[identity] = node.root()
        node.parent.children[node.key] = node
        self._order[node] = None
        self.nbytes += node.nbytes
        self.touch(node)

    def replace(self, node: Node, blocks: tuple[LayerBlock, ...], marks: Sequence[Mark]) -> None:
        """Give a stored node other contents."""
        self.nbytes -= node.nbytes
        node.hold(blocks, marks)
        self.nbytes += node.nbytes
        self.touch(node)

    def set_marks(self, node: Node, marks: Sequence[Mark]) -> None:
        """Give a stored node other marks, and leave its age."""
        self.nbytes -= node.nbytes
        node.hold(node.blocks, marks)
        self.nbytes += node.nbytes

    def remove(self, node: Node) -> None:
        """Take out a node that has no children."""
        assert node.parent is not None and not node.children
        del self._order[node]
        del node.parent.children[node.key]
        self.nbytes -= node.nbytes

    def drop_oldest(self, keep: Node, *, spare: Callable[[Node], bool] = lambda node: False) -> list[Node]:
        """Remove the least recently used leaf, and what no restore can reach any more; never `keep`.

        Nor leaves that `spare` says yes to: [] when there is no other.
        """
        above = set(keep.path())
        node = next((each for each in self._order if not (each.children or each in above or spare(each))), None)
        dropped: list[Node] = []
        while node is not None:
            parent = node.parent
            assert parent is not None
            self.remove(node)
            dropped.append(node)
            # Rows without a state of their own served only the blocks behind them.
            if parent in above or parent.parent is None or parent.children or parent.useful or spare(parent):
                return dropped
            node = parent
        return dropped

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._order.clear()
        self.nbytes = 0


def name_run(parent: Node | None, key: bytes) -> bytes:
    """The `digest` of a run of ids behind `parent`, stored or not."""
    return hashlib.sha256((b"" if parent is None else parent.digest) + key).digest()
