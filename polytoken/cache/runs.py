"""Making the runs of tokens that a store is to hold, out of a decoding state."""

from __future__ import annotations

from collections.abc import Sequence

from polytoken.cache.blocks import LayerBlock, stitch_blocks
from polytoken.cache.marks import Mark
from polytoken.cache.state import DecodingState
from polytoken.cache.tail import Tail
from polytoken.cache.tree import ID_BYTES, Node


def make_chain(
    anchor: Node, runs: Sequence[bytes], state: DecodingState, *, tail: Tail | None, shorter: Sequence[Node]
) -> list[Node]:
    """Nodes for the runs, one behind the other and the first behind `anchor`, not stored yet and not evaluated.

    The last one gets the state's own restore point and the tail; the first inherits those of the `shorter` runs that it
    begins with, and rows that only they still have.
    """
    chain: list[Node] = []
    parent = anchor
    for number, run in enumerate(runs, start=1):
        stop = parent.stop + len(run) // ID_BYTES
        offered = state.blocks(parent.stop, stop)
        mark = make_mark(stop, offered, tail if number == len(runs) else None)
        blocks = tuple(without_state(block, stop) for block in offered)
        marks = [mark] if mark.states or mark.tail is not None else []
        if parent is anchor:
            for old in shorter:
                blocks = tuple(map(stitch_blocks, old.blocks, blocks))
                marks += [kept for kept in old.marks.values() if kept.position != stop]
        parent = Node(parent, run, blocks=blocks, marks=marks)
        chain.append(parent)
    last = chain[-1]
    gaps = last.gaps(last.stop)
    if gaps:  # rows between here and the stored ancestors are gone: this run holds its state whole
        whole = (state.layers[i].block(0, last.stop) if i in gaps else b for i, b in enumerate(last.blocks))
        last.hold(tuple(whole), last.marks.values())
    return chain


def cut_runs(key: bytes, node: Node, grid: int) -> list[bytes]:
    """What of the key lies behind `node`, cut at the grid points."""
    return [key[at : at + grid * ID_BYTES] for at in range(node.stop * ID_BYTES, len(key), grid * ID_BYTES)]


def make_mark(position: int, blocks: Sequence[LayerBlock], tail: Tail | None) -> Mark:
    """The mark at the end of a run, from its blocks; without states if not all of them are still there."""
    alone = [block for block in blocks if block.alone]
    states = tuple(alone) if all(block.arrays for block in alone) else ()
    return Mark(position, states, tail and tail.copy())


def without_state(block: LayerBlock, stop: int) -> LayerBlock:
    """A run's own part of a block: of a state that stands alone, nothing."""
    return LayerBlock(block.kind, block.window, stop, stop, block.needs, (), alone=True) if block.alone else block
