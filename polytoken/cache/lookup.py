"""Where in the store a prompt can be gone on from, and why not further."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from polytoken.cache.answers import Miss, MissReason
from polytoken.cache.blocks import LayerSnapshot, join_blocks
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import Snapshot
from polytoken.cache.tree import ID_BYTES, WHOLE, Node, PrefixTree, name_run

Fits = Callable[[Node, int], bool]
"""Whether a place in a node is one that the caller can go on from."""


class Spot(NamedTuple):
    """A place to go on from: `position` tokens, of which the last lie in `node`; a root and 0 for none."""

    node: Node
    position: int


def best_spot(identity: StateIdentity, node: Node, key: bytes, *, need_tail: bool) -> Spot:
    """The deepest place where a prompt can be gone on from, when `node` is the deepest block on its way."""
    n = len(key) // ID_BYTES
    last = n - 1 if need_tail else n

    def fits(each: Node, position: int) -> bool:
        mark = each.marks.get(position)
        return position <= last or (mark is not None and mark.tail is not None)

    if not identity.free:
        parent, ending = node.ending(key)
        for whole in (parent.children.get(ending), node):
            if whole is not None and whole.stop == n and whole.complete and fits(whole, n):
                return Spot(whole, n)
        while node.parent is not None and not (node.complete and node.stop <= last):
            node = node.parent
        return Spot(node, node.stop)

    best = best_child(node, key[node.stop * ID_BYTES :], fits=fits, last=last)
    each: Node | None = node
    while best is None and each is not None and each.parent is not None:
        places = [position for position in each.positions(n) if fits(each, position)]
        places = places or each.positions(last)
        best = Spot(each, places[0]) if places else None
        each = each.parent
    return best or Spot(node.root(), 0)


def best_child(node: Node, rest: bytes, *, fits: Fits, last: int) -> Spot | None:
    """The deepest place within runs behind `node` that begin like `rest`."""
    best: Spot | None = None
    for child in node.children.values():
        for position in reversed(child.marks):
            if best is not None and position <= best.position:
                break
            same = rest.startswith(child.key[: (position - node.stop) * ID_BYTES])
            if same and fits(child, position) and child.holds(position):
                best = Spot(child, position)
                break
    common, nearest = node.common_ids(rest)
    if nearest is not None and not nearest.has_states:
        places = nearest.positions(min(node.stop + common, last))
        if places and (best is None or places[0] > best.position):
            best = Spot(nearest, places[0])
    return best


def join_spot(spot: Spot) -> Snapshot:
    """The state at a place, sharing the stored arrays."""
    chain = [each.blocks for each in spot.node.path()]
    mark = spot.node.marks.get(spot.position)
    states = iter(mark.states if mark is not None else ())
    layers: list[LayerSnapshot] = []
    for blocks in zip(*chain, strict=True):
        if blocks[-1].alone:
            state = next(states)
            layers.append(LayerSnapshot(state.kind, state.window, spot.position, (state.arrays,)))
            continue
        layer = join_blocks(blocks, spot.position)
        assert layer is not None  # `holds` says so
        layers.append(layer)
    return Snapshot(tuple(layers), spot.position)


def explain(  # noqa: PLR0911  # one return per reason
    tree: PrefixTree, lost: Mapping[bytes, MissReason], identity: StateIdentity, key: bytes, *, node: Node, usable: int
) -> Miss:
    """Why nothing behind `usable` tokens was restored, when `node` is the deepest block whose tokens agree."""
    rest = key[node.stop * ID_BYTES :]
    common, nearest = node.common_ids(rest)
    agreed = node.stop + common
    for parent, run in (node.ending(key), (node, rest[: identity.grid * ID_BYTES]), (node, rest)):
        gone = lost.get(name_run(parent, run)) if run else None
        if gone is not None:
            return Miss(gone, agreed)
    if not rest or (identity.free and common * ID_BYTES == len(rest)):
        there = best_spot(identity, node, key, need_tail=False).position == agreed
        return Miss(MissReason.NO_TAIL if there else MissReason.NO_COVERAGE, agreed)
    ended = nearest is None or (len(nearest.key) // ID_BYTES == common and not nearest.children)
    parted = bool(node.children) and not (common and ended)
    if usable < (agreed if identity.free else node.stop) and not (identity.free and parted):
        return Miss(MissReason.NO_COVERAGE, agreed)
    for other in tree.identities():
        if tree.walk(other, key).stop > agreed:
            return Miss(MissReason.IDENTITY_MISMATCH, agreed, ", ".join(identity.differing(other)))
    if node.parent is None and not node.children:
        return Miss(MissReason.COLD, 0)
    if not identity.free and (common * ID_BYTES == len(rest) or rest[: common * ID_BYTES] + WHOLE in node.children):
        return Miss(MissReason.OFF_GRID, agreed)
    if agreed == 0:
        return Miss(MissReason.NEW_PROMPT, 0)
    return Miss(MissReason.PREFIX_DIVERGENCE if parted else MissReason.NEW_SUFFIX, agreed)
