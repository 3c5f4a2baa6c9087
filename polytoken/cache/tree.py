"""The bank's store: token sequences as a tree of blocks, in least-recently-used order.

A node is one run of tokens behind its parent: a whole grid block, or the rest of a whole prompt (then it has no
children). It holds only its own tokens' rows, so a common prefix is stored once and memory is linear in distinct tokens.

A node is never older than its children: using a node uses its ancestors. So the oldest node of all is always a leaf,
and evicting from the old end never breaks a chain.
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import mlx.core as mx

from polytoken.cache.blocks import LayerBlock
from polytoken.cache.identity import StateIdentity

ID_BYTES = 8


def encode_ids(ids: Sequence[int]) -> bytes:
    """The ids as 8 little-endian signed bytes each: compared as a whole, and what token hashes are taken over."""
    numbers = array("q", ids)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


@dataclass(frozen=True, eq=False)
class Tail:
    """What a whole prompt leaves behind for its first step, so that no forward is needed to go on.

    Attributes:
        logits: [1, V], the last row.
        hidden: the last hidden row [1, 1, H] in the lane's variant, or None.
    """

    logits: mx.array
    hidden: mx.array | None = None

    def arrays(self) -> list[mx.array]:
        return [self.logits] if self.hidden is None else [self.logits, self.hidden]

    @property
    def nbytes(self) -> int:
        return sum(int(item.nbytes) for item in self.arrays())


class Node:
    """One stored run of tokens.

    Attributes:
        parent: the run before it, None for a root.
        key: its own ids, encoded.
        stop: tokens from the root to its end.
        blocks: one per layer; () for a root.
        tail: the last row's outputs, if the run ends a prompt.
        children: by key.
        reach: per layer, the first row of the unbroken run of rows that ends at `stop`.
    """

    __slots__ = ("blocks", "children", "key", "parent", "reach", "stop", "tail")

    def __init__(self, parent: Node | None, key: bytes, blocks: tuple[LayerBlock, ...], tail: Tail | None) -> None:
        self.parent = parent
        self.key = key
        self.stop: int = 0 if parent is None else parent.stop + len(key) // ID_BYTES
        self.blocks = blocks
        self.tail = tail
        self.children: dict[bytes, Node] = {}
        self.reach: tuple[int, ...] = ()
        self.update_reach()

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays held, exactly."""
        return sum(block.nbytes for block in self.blocks) + (0 if self.tail is None else self.tail.nbytes)

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

    def path(self) -> list[Node]:
        """The nodes from the first run to this one, without the root."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def arrays(self) -> list[mx.array]:
        tail = [] if self.tail is None else self.tail.arrays()
        return [item for block in self.blocks for item in block.arrays] + tail

    def common_ids(self, rest: bytes) -> int:
        """How many ids of `rest` agree with the best of the children, from the first on."""
        best = 0
        for key in self.children:
            while key.startswith(rest[: best + ID_BYTES]) and best < min(len(key), len(rest)):
                best += ID_BYTES
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
        return self._roots.get(identity) or Node(None, b"", (), None)

    def identities(self) -> list[StateIdentity]:
        """Identities that something is stored for."""
        return [identity for identity, root in self._roots.items() if root.children]

    def walk(self, identity: StateIdentity, key: bytes) -> Node:
        """The deepest node whose tokens are a prefix of the key: whole blocks, or the whole key."""
        node, width = self.root(identity), identity.grid * ID_BYTES
        at = 0
        while at < len(key):
            child = node.children.get(key[at : at + width])
            if child is None:
                break
            node, at = child, at + width
        return node

    def touch(self, node: Node) -> None:
        """Make the node and its ancestors the most recently used."""
        for each in reversed(node.path()):
            self._order.move_to_end(each)

    def insert(self, identity: StateIdentity, node: Node) -> None:
        """Add a node whose parent is stored (or is the identity's root)."""
        assert node.parent is not None
        root = node
        while root.parent is not None:
            root = root.parent
        self._roots[identity] = root
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


def hash_ids(key: bytes) -> bytes:
    """SHA-256 over encoded ids; used only to remember what is gone, never to match."""
    return hashlib.sha256(key).digest()
