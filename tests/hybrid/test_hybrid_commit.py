"""Verify and commit against single steps, bit for bit, on the CPU; and how rows are cut into forwards."""

from __future__ import annotations

import mlx.core as mx
import pytest
from hybrid_models import FAMILIES, bits, run, run_in, some_ids, state_bits, tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.cache.recurrent import RecurrentLayer
from polytoken.errors import CacheError
from polytoken.models.hybrid.delta import _MOST_KEPT

NUMERICS = {"fp32": ("float32", None), "bf16": ("bfloat16", None), "packed": ("float32", 4)}
CASES = [(family, numerics) for family in FAMILIES for numerics in NUMERICS]


def model_of(family, numerics: str, shape: str = "a"):
    dtype, packed = NUMERICS[numerics]
    return tiny(family, shape, dtype=dtype, bits=packed)


# Where a state begins matters to every type of number alike: all of them see two beginnings, fp32 all four.
BEGINNINGS = [
    pytest.param(family, numerics, prompt, marks=[pytest.mark.slow] * (numerics != "fp32" and prompt in (1, 2)))
    for family, numerics in CASES
    for prompt in (0, 1, 2, 13)
]


@pytest.mark.parametrize("family, numerics, prompt", BEGINNINGS)
def test_every_accepted_prefix_equals_single_steps(family, numerics: str, prompt: int) -> None:
    """All m of a window of five, from an empty state, from one shorter than the conv tail, and from a longer one."""
    model, width = model_of(family, numerics), 5
    ids = some_ids(prompt + width + 2, seed=prompt)
    start, window, after = ids[:prompt], ids[prompt : prompt + width], ids[prompt + width :]
    single = model.make_cache()
    if start:
        run(model, single, start)
    base, singles, logits = state_bits(single), [], []
    for token in window:
        logits.append(bits(model.project(run(model, single, [token]).post)))
        singles.append(state_bits(single))
    for keep in range(width + 1):
        state = model.make_cache()
        if start:
            run(model, state, start)
        with state.capturing():
            verified = run(model, state, window)
        assert bits(model.project(verified.post)) == b"".join(logits)
        state.commit(keep, width)
        assert state.offset == prompt + keep
        assert state_bits(state) == (base if keep == 0 else singles[keep - 1])
        # and they go on alike
        twin = model.make_cache()
        run_in(model, twin, [*start, *window[:keep]], [1]) if start or keep else None
        assert run_in(model, state, after, [2]) == run_in(model, twin, after, [1])
        assert state_bits(state) == state_bits(twin)


@pytest.mark.parametrize("family", FAMILIES)
def test_other_head_sizes_do_too(family) -> None:
    """Sizes that no fused kernel takes, three value heads to a key head, another interval."""
    model = tiny(family, "b")
    ids = some_ids(12, seed=9)
    state, single = model.make_cache(), model.make_cache()
    run(model, state, ids[:6])
    with state.capturing():
        run(model, state, ids[6:])
    state.commit(3, 6)
    run_in(model, single, ids[:9], [1])
    assert state_bits(state) == state_bits(single)


@pytest.mark.parametrize("rows", [_MOST_KEPT, _MOST_KEPT + 1])
@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_that_were_kept_and_rows_run_again_give_the_same(family, rows: int) -> None:
    """A window's matrices are all kept up to some width; behind that the accepted rows go through the net again."""
    model, ids = tiny(family), some_ids(3 + rows, seed=2)
    for keep in (1, 7, rows - 1):
        state, single = model.make_cache(), model.make_cache()
        run(model, state, ids[:3])
        with state.capturing():
            run(model, state, ids[3:])
        state.commit(keep, rows)
        run_in(model, single, ids[: 3 + keep], [1])
        assert state_bits(state) == state_bits(single)


@pytest.mark.parametrize("family, numerics", CASES)
@given(sizes=st.lists(st.integers(1, 19), min_size=1, max_size=5), seed=st.integers(0, 3))
@settings(max_examples=settings.default.max_examples // 30, deadline=None)
def test_how_a_prompt_is_cut_changes_no_bit(family, numerics: str, sizes: list[int], seed: int) -> None:
    model, ids = model_of(family, numerics), some_ids(24, seed=seed)
    cut, single = model.make_cache(), model.make_cache()
    assert run_in(model, cut, ids, sizes) == run_in(model, single, ids, [1])
    assert state_bits(cut) == state_bits(single)


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_many_cycles_equal_plain_decoding(family, data: st.DataObject) -> None:
    """Windows of guesses, of which some prefix is kept; roll-backs that run the kept rows again give the same."""
    model = tiny(family)
    state, again, single = model.make_cache(), model.make_cache(), model.make_cache()
    ids = some_ids(data.draw(st.integers(1, 6)), seed=1)
    for each in (state, again, single):
        run(model, each, ids)
    for cycle in range(4):
        width = data.draw(st.integers(1, 6))
        keep = data.draw(st.integers(0, width))
        window = some_ids(width, seed=100 * cycle + width)
        for each in (state, again):
            with each.capturing():
                run(model, each, window)
        state.commit(keep, width)
        again.commit(0, width)
        if keep:
            run(model, again, window[:keep])
            run_in(model, single, window, [1]) if keep == width else run_in(model, single, window[:keep], [1])
        assert state_bits(state) == state_bits(single) == state_bits(again)


@pytest.mark.parametrize("family", FAMILIES)
def test_capturing_changes_no_number_and_unarmed_windows_stay(family) -> None:
    model, ids = tiny(family), some_ids(7)
    armed, plain = model.make_cache(), model.make_cache()
    with armed.capturing():
        first = run(model, armed, ids)
    second = run(model, plain, ids)
    assert bits(first.post) == bits(second.post) and bits(first.pre) == bits(second.pre)
    assert state_bits(armed) == state_bits(plain)
    before = state_bits(plain)
    with pytest.raises(CacheError, match="recurrent"):
        plain.commit(3, 7)
    assert state_bits(plain) == before and plain.offset == 7
    plain.commit(7, 7)


def test_the_state_has_the_shapes_and_dtypes_it_should() -> None:
    model = tiny("qwen3_5", dtype="bfloat16")
    state = model.make_cache()
    run(model, state, some_ids(2))
    kinds = [type(layer).__name__ for layer in state.layers]
    assert kinds == ["RecurrentLayer"] * 3 + ["KVLayer"]
    layer = state.layers[0]
    assert isinstance(layer, RecurrentLayer) and layer.slots is not None
    conv, matrix = layer.slots
    assert (conv.shape, conv.dtype) == ((1, 3, 2 * 2 * 32 + 4 * 32), mx.bfloat16)
    assert (matrix.shape, matrix.dtype) == ((1, 4, 32, 32), mx.float32)
    assert layer.nbytes == layer.held_bytes == conv.nbytes + matrix.nbytes
