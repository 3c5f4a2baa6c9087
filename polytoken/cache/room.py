"""Who goes when a bank has too little room: the limits of all, of one session, and of one sequence's restore points."""

from __future__ import annotations

from collections.abc import Callable

from polytoken.cache.anchors import choose_anchors
from polytoken.cache.live import LiveStates
from polytoken.cache.sessions import SessionBook
from polytoken.cache.tree import Node, PrefixTree

__all__ = ["Room"]


class Room:
    """The bytes that a bank's runs and live states may take.

    Args:
        tree, live, book: the bank's.
        limit_bytes: bound on what tree and live states hold together.
        session_limit_bytes: bound on what one session may hold.
        mark_bytes: bound on the restore points of one sequence.
        on_eviction: told of each run that went, after it is gone.
    """

    def __init__(
        self,
        tree: PrefixTree,
        live: LiveStates,
        book: SessionBook,
        *,
        limit_bytes: int,
        session_limit_bytes: int,
        mark_bytes: int,
        on_eviction: Callable[[Node], None],
    ) -> None:
        self._tree = tree
        self._live = live
        self._book = book
        self.limit_bytes = limit_bytes
        self.session_limit_bytes = session_limit_bytes
        self.mark_bytes = mark_bytes
        self._on_eviction = on_eviction

    @property
    def nbytes(self) -> int:
        """Exact bytes of all arrays held."""
        return self._tree.nbytes + self._live.nbytes

    def make(self, anchor: Node, nbytes: int, *, session: str | None = None, gently: bool = False) -> bool:
        """Evict until `nbytes` more fit behind `anchor`, whose path stays; False, and all stay, if they never can.

        Live states go first, the least recently used before others; then leaves, those of sessions used lately last
        (`gently`: not at all), and those of named snapshots never. With `session` its limit counts, too.
        """
        path = anchor.path()
        held = sum(node.nbytes for node in path)
        if session is not None and held + nbytes > self.session_limit_bytes:
            return False
        stay = {node for snapshot in self._book.snapshots.values() for node in snapshot.nodes()}.difference(path)
        if held + sum(node.nbytes for node in stay) + nbytes > self.limit_bytes:
            return False
        self._tree.touch(anchor)
        book = self._book
        while self.nbytes + nbytes > self.limit_bytes:
            if self._live.drop_oldest():
                continue
            dropped = self._tree.drop_oldest(anchor, spare=lambda node: book.is_pinned(node) or book.is_active(node))
            if not dropped and gently:
                return False
            for node in dropped or self._tree.drop_oldest(anchor, spare=book.is_pinned):
                book.leave_node(node)
                self._on_eviction(node)
        return True

    def thin(self, node: Node, *, newest: int) -> int:
        """Keep the restore points on the way to a node within their limit; how many went.

        Those at `newest` and where named snapshots stand stay. Where sessions stand and branches part is wanted before
        others.
        """
        path = node.path()
        sizes = {position: mark.nbytes for each in path for position, mark in each.marks.items()}
        if sum(sizes.values()) <= self.mark_bytes:
            return 0
        stay = {newest} | {at for each in path for at in self._book.pinned_at(each)}
        wanted = stay | {position for each in path for position in each.holders.values()}
        wanted |= {each.stop for each in path if len(each.children) > 1}
        grid = self._tree.identity_of(node).grid
        keep = choose_anchors(sizes, wanted=wanted, budget=self.mark_bytes, grid=grid) | stay
        thinned = 0
        for each in path:
            kept = [mark for position, mark in each.marks.items() if position in keep]
            if len(kept) < len(each.marks):
                thinned += len(each.marks) - len(kept)
                self._tree.set_marks(each, kept)
        return thinned
