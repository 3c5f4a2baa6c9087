"""Rounds in turns, each held to the bandwidth just before and just after it."""

from __future__ import annotations

import pytest

from polytoken.bench.roofline import Bandwidth, sustained_bandwidth
from polytoken.bench.run import _take_turns
from polytoken.bench.sample import Sample, Variant


def test_each_round_is_held_to_its_own_bandwidth() -> None:
    """A host that slows to a quarter half-way: shares stay, where one figure for all would set them apart."""
    rates = iter([20.0, 20.0, 20.0, 20.0, 20.0, 12.5, 5.0, 5.0, 5.0])
    seconds = {"a": iter([9.0, 1.0, 20 / 16.25, 4.0]), "b": iter([9.0, 2.0, 40 / 8.75, 8.0])}
    told: list[tuple[str, int]] = []

    def variant(name: str) -> Variant:
        return Variant(name, "ar", lambda: Sample(0.1, next(seconds[name]), (1, 2)), lambda _: 10e9)

    first, second = variant("a"), variant("b")
    beside = _take_turns(
        [first, second],
        rounds=3,
        progress=lambda stage, done, total, unit: told.append((stage, done)),
        measure=lambda: Bandwidth(next(rates), "made up"),
    )
    assert [sample.gb_per_second for sample in first.samples] == [20.0, 16.25, 5.0]
    assert [sample.gb_per_second for sample in second.samples] == [20.0, 8.75, 5.0]
    assert [first.floor_share(sample) for sample in first.samples] == pytest.approx([0.5, 0.5, 0.5])
    assert [second.floor_share(sample) for sample in second.samples] == pytest.approx([0.25, 0.25, 0.25])
    assert beside == Bandwidth((8.75 + 16.25) / 2, "made up")
    assert told[:2] == [("measuring a", 0), ("measuring b", 1)] and told[-1] == ("measuring", 8)


def test_sustained_bandwidth_is_a_rate() -> None:
    found = sustained_bandwidth(seconds=0.01)
    assert 0.05 < found.gb_per_second < 10_000 and found.method
