"""Which restore points of one sequence stay when their bytes exceed a budget."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def choose_anchors(sizes: Mapping[int, int], *, wanted: Collection[int], budget: int, grid: int) -> set[int]:
    """The positions that stay, of the positions and bytes in `sizes`.

    First those that are `wanted`, from the last backwards; then all multiples of a stride, the smallest grid * 2^j of
    which the budget has room for as many as the sequence can have; then others, from the last backwards. The stride
    depends on the length alone, and its multiples are among those of half of it: so thinning a sequence again and again
    while it grows keeps the multiples that thinning it once would keep, and never leaves a hole in the middle.
    """
    chosen: set[int] = set()
    left = budget

    def take(positions: Collection[int]) -> None:
        nonlocal left
        for position in sorted(positions, reverse=True):
            if position in sizes and position not in chosen and sizes[position] <= left:
                chosen.add(position)
                left -= sizes[position]

    take(wanted)
    stride, last, largest = grid, max(sizes, default=0), max(sizes.values(), default=0)
    while last // stride * largest > left and stride <= last:
        stride *= 2
    take([position for position in sizes if position % stride == 0])
    take(sizes)
    return chosen
