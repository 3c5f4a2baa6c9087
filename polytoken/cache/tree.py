"""The bank's store: token sequences as a tree of blocks, in least-recently-used order.

A node is one run of tokens behind its parent: a block of the grid, or the end of a whole prompt. The latter has no
children and is kept apart even if it is as long as a block: a prompt's last token may be encoded alone, and on a
backend where that changes its bits, no longer prompt may go on from there. A node holds only its own tokens' rows, so
a common prefix is stored once, and memory is linear in distinct tokens.

A node is never older than its children: using a node uses its ancestors. So the oldest node of all is always a leaf,
and evicting from the old end never breaks a chain.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.identity import StateIdentity
from polytoken.cache.tail import Tail

ID_BYTES = 8
WHOLE = b"$"
"""Ends the key of a run that ends a whole prompt."""


def encode_ids(ids: Sequence[int]) -> bytes:
    """The ids as 8 little-endian signed bytes each: compared as a whole, and what token hashes are taken over."""
    return struct.pack(f"<{len(ids)}q", *ids)


def decode_ids(key: bytes) -> tuple[int, ...]:
    """The inverse of `encode_ids`."""
    return struct.unpack(f"<{len(key) // ID_BYTES}q", key)


class Node:
    """One stored run of tokens.

    Attributes:
        parent: the run before it, None for a root.
        key: its own ids, encoded, and `WHOLE` if they end a whole prompt (a root: its identity).
        stop: tokens from the root to its end.
        blocks: one per layer; () for a root.
        tail: the last row's outputs, if the run ends a prompt.
        children: by key.
        digest: SHA-256 chained over the identity and the ids; it names what is gone and never decides a match.
        reach: per layer, the first row of the unbroken run of rows that ends at `stop`.
    """

    __slots__ = ("blocks", "children", "digest", "key", "parent", "reach", "stop", "tail")

    def __init__(
        self, parent: Node | None, key: bytes, *, blocks: tuple[LayerBlock, ...] = (), tail: Tail | None = None
    ) -> None:
        self.parent = parent
        self.key = key
        self.stop: int = 0 if parent is None else parent.stop + len(key) // ID_BYTES
        self.blocks = blocks
        self.tail = tail
        self.children: dict[bytes, Node] = {}
        self.digest = name_run(parent, key)
        self.reach: tuple[int, ...] = ()
        self.update_reach()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, exactly."""
        return sum(block.nbytes for block in self.blocks) + (0 if self.tail is None else self.tail.nbytes)

    @property
    def is_whole(self) -> bool:
        """Whether it ends a whole prompt."""
        return self.parent is not None and len(self.key) % ID_BYTES > 0

    @property
    def complete(self) -> bool:
        """Whether a state at `stop` can be rebuilt from this node and its ancestors."""
        return self.parent is not None and not self.gaps()

    def gaps(self) -> list[int]:
        """Indices of the layers that lack rows for a state at `stop`."""
        pairs = zip(self.blocks, self.reach, strict=True)
        return [i for i, (block, reach) in enumerate(pairs) if reach > block.needs]

    def update_reach(self) -> None:
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
        """The run that ends the whole prompt `key`, if this is the deepest block on the way: its parent and its key."""
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

    def ids(self) -> tuple[int, ...]:
        """All ids from the first to `stop`."""
        return decode_ids(b"".join(node.key[: len(node.key) // ID_BYTES * ID_BYTES] for node in self.path()))

    def arrays(self) -> list[mx.array]:
        tail = [] if self.tail is None else self.tail.arrays()
        return [item for block in self.blocks for item in block.arrays] + tail

    def common_ids(self, rest: bytes) -> int:
        """How many ids of `rest` agree with the best of the children, from the first on."""
        best, probe = 0, rest[:ID_BYTES]
        for key in self.children:  # there may be thousands: one comparison for each that is no better than the best
            while len(probe) > best and key.startswith(probe):
                best = len(probe)
                probe = rest[: best + ID_BYTES]
        return best // ID_BYTES


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

    def root(self, identity: StateIdentity) -> Node:
        """The root of an identity's sequences; a fresh one if nothing is stored for it yet."""
        return self._roots.get(identity) or Node(None, repr(identity).encode())

    def identities(self) -> list[StateIdentity]:
        """Identities that something is stored for."""
        return [identity for identity, root in self._roots.items() if root.children]

    def walk(self, identity: StateIdentity, key: bytes) -> Node:
        """The deepest block of the grid whose tokens are a prefix of the key."""
        node, width = self.root(identity), identity.grid * ID_BYTES
        for at in range(0, len(key) - width + 1, width):
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

    def replace(self, node: Node, blocks: tuple[LayerBlock, ...], tail: Tail | None) -> None:
        """Give a stored node other contents."""
        self.nbytes -= node.nbytes
        node.blocks, node.tail = blocks, tail
        node.update_reach()
        self.nbytes += node.nbytes
        self.touch(node)

    def drop_oldest(self, keep: Node) -> list[Node]:
        """Remove the least recently used leaf, and what no restore can reach any more; never `keep`."""
        node = next(iter(self._order))
        dropped = []
        while True:
            parent = node.parent
            assert parent is not None and not node.children
            del self._order[node]
            del parent.children[node.key]
            self.nbytes -= node.nbytes
            dropped.append(node)
            # Rows without a state of their own served only the blocks behind them.
            if parent is keep or parent.parent is None or parent.children or parent.complete:
                return dropped
            node = parent

    def clear(self) -> None:
        """Forget everything."""
        self._roots.clear()
        self._order.clear()
        self.nbytes = 0


def name_run(parent: Node | None, key: bytes) -> bytes:
    """The `digest` of a run of ids behind `parent`, stored or not."""
    return hashlib.sha256((b"" if parent is None else parent.digest) + key).digest()
