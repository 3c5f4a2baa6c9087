"""What a bank tells the store below it, and asks of it, in terms of its own nodes and sessions; silent without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polytoken.cache.identity import StateIdentity
from polytoken.cache.sessions import Session
from polytoken.cache.tier import Offer, SecondTier, SessionRecord, StoredRun
from polytoken.cache.tree import Node, PrefixTree

__all__ = ["Below"]


class Below:
    """The store below a bank, or nothing.

    Args:
        tree: the bank's, which knows what identity a node is of.
        tier: the store, None for none.
    """

    def __init__(self, tree: PrefixTree, tier: SecondTier | None) -> None:
        self._tree = tree
        self._tier = tier

    def sessions(self) -> list[SessionRecord]:
        """Sessions and snapshots that it remembers, least recently used first."""
        return [] if self._tier is None else self._tier.sessions()

    def statistics(self) -> Mapping[str, Any]:
        """Its counters."""
        return {} if self._tier is None else self._tier.statistics()

    def find(self, identity: StateIdentity, node: Node, rest: bytes) -> Offer | None:
        """A run that goes on behind the node with the encoded ids `rest`, if the node has no such child."""
        offer = None if self._tier is None else self._tier.find(identity, node.digest, rest)
        if offer is None or any(child.digest == offer.digest for child in node.children.values()):
            return None  # nothing is read for what is here
        return offer

    def stored(self, node: Node) -> None:
        """The node is in the tree now, or holds more than before."""
        if self._tier is not None:
            self._tier.stored(self._run(node))

    def dropped(self, node: Node) -> None:
        """The node had to make room."""
        if self._tier is not None:
            self._tier.dropped(self._run(node))

    def forget(self, digests: Sequence[bytes]) -> None:
        """Runs of these digests must not come back."""
        if self._tier is not None and digests:
            self._tier.forget(digests)

    def save(self, session: Session | None) -> None:
        """Remember what the session (or snapshot) has committed, if anything."""
        if self._tier is not None and session is not None and session.committed is not None:
            committed = session.committed
            self._tier.remember_session(
                SessionRecord(name=session.name, identity=committed.identity, ids=committed.ids, pinned=session.pinned)
            )

    def forget_session(self, session: Session) -> None:
        """Forget a session or snapshot, and its states if nothing of them is in the tree."""
        if self._tier is not None:
            self._tier.forget_session(session.name, pinned=session.pinned, states=not session.heads)

    def _run(self, node: Node) -> StoredRun:
        assert node.parent is not None
        return StoredRun(
            identity=self._tree.identity_of(node),
            parent=node.parent.digest,
            digest=node.digest,
            start=node.start,
            stop=node.stop,
            ids=node.own_ids(),
            sealed=node.is_sealed,
            blocks=node.blocks,
            marks=tuple(node.marks.values()),
        )
