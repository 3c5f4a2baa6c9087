"""Draws are addressed: by seed, position, purpose and index, and by nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.sampling.draws import Draw, Draws, Purpose

WORD = (1 << 64) - 1


def philox(seed: int, position: int, purpose: int, index: int) -> float:
    """Philox4x64-10 written out from the paper (Salmon et al. 2011), for the contract that draws.py states."""
    c = [index + 1, purpose, position, 0]
    k = [seed % 2**64, int.from_bytes(b"polytok1", "big")]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & WORD, (a >> 64) ^ c[3] ^ k[1], a & WORD]
        k = [(k[0] + 0x9E3779B97F4A7C15) & WORD, (k[1] + 0xBB67AE8584CAA73B) & WORD]
    return (c[0] >> 11) / 2**53


@pytest.mark.parametrize(
    ("seed", "position", "purpose", "index", "value"),
    [
        (0, 0, Purpose.TOKEN, 0, 0.9136639652755472),
        (42, 0, Purpose.TOKEN, 0, 0.09188978182044905),
        (42, 1, Purpose.TOKEN, 0, 0.8686400235773278),
        (42, 0, Purpose.DRAFT, 0, 0.8962095094206816),
        (42, 0, Purpose.ACCEPT, 0, 0.7843702615272069),
        (42, 0, Purpose.CORRECTION, 0, 0.13293085414112538),
        (42, 0, Purpose.BONUS, 0, 0.5745573607690333),
        (42, 0, Purpose.TOKEN, 1, 0.9397133933643769),
        (-1, 7, Purpose.TOKEN, 0, 0.4505382494837745),
        (6356741843985375812, 123456, Purpose.ACCEPT, 0, 0.4581120207812708),
    ],
)
def test_golden_values(seed: int, position: int, purpose: Purpose, index: int, value: float) -> None:
    """A change here changes the text of every seeded request: raise the version and say so."""
    assert Draws(seed).uniform(position, purpose, index=index) == value


@settings(max_examples=100, deadline=None)
@given(st.integers(-(2**70), 2**70), st.integers(0, WORD), st.sampled_from(list(Purpose)), st.integers(0, WORD - 1))
def test_draws_are_philox(seed: int, position: int, purpose: Purpose, index: int) -> None:
    value = Draws(seed).uniform(position, purpose, index=index)
    assert value == philox(seed, position, purpose, index)
    assert 0.0 <= value < 1.0


def test_seeds_are_taken_modulo_2_to_the_64() -> None:
    for seed in (-1, 0, 5, 2**63):
        same = {Draws(seed + turn * 2**64).uniform(3, Purpose.TOKEN) for turn in (-2, -1, 0, 1, 10**30)}
        assert len(same) == 1
    assert Draws(5).uniform(0, Purpose.TOKEN) != Draws(5 + 2**32).uniform(0, Purpose.TOKEN)


def test_order_company_and_threads_do_not_matter() -> None:
    asked = [(position, purpose) for position in range(50) for purpose in Purpose]
    draws = Draws(9)
    forward = [draws.uniform(*one) for one in asked]
    backward = [draws.uniform(*one) for one in reversed(asked)][::-1]
    with ThreadPoolExecutor(8) as pool:
        threaded = list(pool.map(lambda one: Draws(9).uniform(*one), asked))
    assert forward == backward == threaded


def test_the_global_generator_is_not_touched() -> None:
    np.random.seed(1)
    first = np.random.random()
    np.random.seed(1)
    before = Draws(1).uniform(0, Purpose.TOKEN)
    assert np.random.random() == first
    np.random.seed(2)
    assert Draws(1).uniform(0, Purpose.TOKEN) == before


def test_d12_purposes_positions_and_seeds_are_independent() -> None:
    n = 4000
    streams = {purpose.name: [Draws(7).uniform(i, purpose) for i in range(n)] for purpose in Purpose}
    streams["index 1"] = [Draws(7).uniform(i, Purpose.ACCEPT, index=1) for i in range(n)]
    streams["seed 8"] = [Draws(8).uniform(i, Purpose.ACCEPT) for i in range(n)]
    streams["next position"] = [Draws(7).uniform(i + 1, Purpose.ACCEPT) for i in range(n)]
    streams["over seeds"] = [Draws(i).uniform(0, Purpose.ACCEPT) for i in range(n)]
    matrix = np.array(list(streams.values()))
    assert np.abs(matrix.mean(axis=1) - 0.5).max() < 4.5 * np.sqrt(1 / 12 / n)
    off = np.corrcoef(matrix) - np.eye(len(streams))
    assert np.abs(off).max() < 4.5 / np.sqrt(n)
    # A rejection conditions on the coin: the draw that follows must still cover all of [0, 1) evenly.
    accept, correction = np.array(streams["ACCEPT"]), np.array(streams["CORRECTION"])
    counts = np.histogram(correction[accept > 0.8], bins=10, range=(0, 1))[0]
    expected = counts.sum() / 10
    assert ((counts - expected) ** 2 / expected).sum() < 9 + 4.5 * np.sqrt(18)


def test_draws_can_be_recorded() -> None:
    log: list[Draw] = []
    draws = Draws(42, log=log)
    values = [draws.uniform(0, Purpose.TOKEN), draws.uniform(1, Purpose.ACCEPT, index=2)]
    assert log == [Draw(0, Purpose.TOKEN, 0, values[0]), Draw(1, Purpose.ACCEPT, 2, values[1])]


@pytest.mark.parametrize(("position", "index"), [(-1, 0), (2**64, 0), (0, -1), (0, 2**64 - 1)])
def test_addresses_out_of_range_are_refused(position: int, index: int) -> None:
    with pytest.raises(ValueError, match="must be from 0"):
        Draws(1).uniform(position, Purpose.TOKEN, index=index)
