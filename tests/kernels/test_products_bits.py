"""Bit equality of every form with the scalar reference, over shapes, flags, leading dimensions and scales."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.kernels.selftest import COL_MAJOR, CONJ_TRANS, NO_TRANS, ROW_MAJOR, TRANS, Case, check

SIDES = st.one_of(
    st.integers(0, 40), st.sampled_from([47, 48, 49, 63, 64, 65, 95, 96, 97, 127, 128, 129]), st.integers(100, 400)
)
INNER = st.one_of(st.integers(0, 40), st.sampled_from([255, 256, 257, 319, 320, 321, 640, 641]), st.integers(41, 700))
REAL = st.sampled_from([0.0, 1.0, -1.0, 0.7, 3.0])


@st.composite
def cases(draw: st.DrawFn, symbol: str = "sgemm") -> Case:
    flags = st.sampled_from([NO_TRANS, TRANS, CONJ_TRANS])
    pads = st.sampled_from([0, 0, 1, 5, 16])
    small = symbol != "sgemm"
    m, n, k = (draw(st.integers(0, 40) if small else side) for side in (SIDES, SIDES, INNER))
    alpha, beta = draw(REAL), draw(REAL)
    return Case(
        symbol, m, n, k,
        order=draw(st.sampled_from([ROW_MAJOR, COL_MAJOR])), transa=draw(flags), transb=draw(flags),
        alpha=complex(alpha, draw(REAL)) if symbol == "cgemm" else alpha,
        beta=complex(beta, draw(REAL)) if symbol == "cgemm" else beta,
        pad_a=draw(pads), pad_b=draw(pads), pad_c=draw(pads),
        shift=draw(st.integers(0, 5)), seed=draw(st.integers(0, 1 << 20)),
    )  # fmt: skip


@given(case=cases())
@settings(max_examples=150, deadline=None)
def test_sgemm_gives_the_references_bits(extension: ModuleType, case: Case) -> None:
    for form in extension.forms():
        extension.set_form(form)
        assert case.agrees(), form
    extension.set_form(extension.forms()[0])


@pytest.mark.parametrize("symbol", ["dgemm", "cgemm"])
def test_dgemm_and_cgemm_give_the_references_bits(form: str, symbol: str) -> None:
    @given(case=cases(symbol))
    @settings(max_examples=60, deadline=None)
    def holds(case: Case) -> None:
        assert case.agrees()

    holds()


def test_random_cases_of_the_selftest(form: str) -> None:
    assert check(form, cases=250, seed=1).differing == ()


def test_fused_forms_give_equal_bits(extension: ModuleType) -> None:
    results = {}
    case = Case("sgemm", 37, 61, 530, transb=TRANS, seed=5)
    for form in extension.forms():
        extension.set_form(form)
        if extension.fused():
            results[form] = case.run(*case.operands()).tobytes()
    extension.set_form(extension.forms()[0])
    assert len(set(results.values())) <= 1


@pytest.mark.parametrize("m", range(1, 20))
def test_few_rows_at_every_width_of_the_last_group(form: str, m: int) -> None:
    for n in (*range(1, 20), 31, 33, 47, 49, 63, 65, 100):
        for transb in (NO_TRANS, TRANS):
            for k in (1, 7, 8, 16, 37):
                assert Case("sgemm", m, n, k, transb=transb, alpha=1, beta=1, seed=m + n).agrees(), (m, n, k, transb)


def test_large_weights_that_do_not_count_as_cached(form: str) -> None:
    for m in (1, 3, 8, 9):
        assert Case("sgemm", m, 1003, 531, transb=TRANS, seed=m).agrees()


@pytest.mark.parametrize("shape", [(3, 5), (40, 50), (1, 16), (0, 4), (4, 0)])
def test_an_empty_inner_dimension_scales_c(form: str, shape: tuple[int, int]) -> None:
    m, n = shape
    empty = Case("sgemm", m, n, 0, alpha=2, beta=0)
    a, b, c = empty.operands()
    size = m * n
    assert not empty.run(a, b, np.full_like(c, np.nan))[:size].any()
    scaled = Case("sgemm", m, n, 0, alpha=float("inf"), beta=-0.5).run(a, b, c)
    assert np.array_equal(scaled[:size], (0 + np.float32(-0.5) * c)[:size])


def test_beta_zero_never_reads_c(form: str) -> None:
    for m, n, transb in ((1, 70, TRANS), (5, 64, NO_TRANS), (70, 70, TRANS), (3, 3, NO_TRANS), (70, 2, TRANS)):
        for k, alpha in ((20, 1.0), (700, 1.0), (700, 0.5)):
            case = Case("sgemm", m, n, k, transb=transb, alpha=alpha)
            a, b, c = case.operands()
            poisoned = case.run(a, b, np.full_like(c, np.nan))[: m * n]
            assert np.isfinite(poisoned).all()
            assert np.array_equal(poisoned, case.run(a, b, np.zeros_like(c))[: m * n])


def test_nan_and_infinity_go_where_the_sum_sends_them_and_nowhere_else(form: str) -> None:
    rng = np.random.default_rng(3)
    for m, n, k in ((1, 37, 50), (7, 19, 33), (70, 45, 400), (45, 3, 9)):
        for transb in (NO_TRANS, TRANS):
            case = Case("sgemm", m, n, k, transb=transb)
            a, b, c = case.operands()
            for _ in range(4):
                a[rng.integers(m * k)] = rng.choice([np.nan, np.inf, -np.inf])
                b[rng.integers(k * n)] = rng.choice([np.nan, np.inf, 0.0])
            got, want = case.run(a, b, c), case.run(a, b, c, fused=int(form != "portable"))
            assert np.array_equal(got, want, equal_nan=True)
            assert np.isfinite(got[: m * n]).any() or m == 1


def test_nothing_beyond_the_operands_is_touched(extension: ModuleType) -> None:
    """Operands that end at a page without access: reading or writing past them would end the process."""
    script = """
        import ctypes, mmap, random, sys
        import numpy as np
        from polytoken.kernels.products import extension
        P, page = extension(), mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

        class Guarded:
            def __init__(self, floats):
                self.pages = (4 * floats + page - 1) // page
                self.map = mmap.mmap(-1, (self.pages + 1) * page)
                base = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
                assert libc.mprotect(base + self.pages * page, page, 0) == 0
                self.all = np.frombuffer(self.map, np.float32, count=self.pages * page // 4)
            def last(self, floats):
                return self.all[len(self.all) - floats:]

        A, B, C = (Guarded(300 * 300) for _ in range(3))
        rng = random.Random(0)
        for form in P.forms():
            P.set_form(form)
            for _ in range(1500):
                m, n, k = (rng.choice([1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, rng.randrange(1, 300)]) for _ in range(3))
                ta, tb = rng.choice([111, 112]), rng.choice([111, 112])
                a, b, c = A.last(m * k), B.last(n * k), C.last(m * n)
                P.sgemm(ta, tb, m, n, k, 1.0, a, k if ta == 111 else m, b, n if tb == 111 else k, 0.0, c, n)
        print("untouched")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "untouched", (done.returncode, done.stderr[-500:])


def test_operands_that_do_not_fit_are_refused(extension: ModuleType) -> None:
    x = np.zeros(12, np.float32)
    good = (NO_TRANS, NO_TRANS, 3, 4, 4, 1.0, x, 4, np.zeros(16, np.float32), 4, 0.0, np.zeros(12, np.float32), 4)
    extension.sgemm(*good)
    for position, wrong in ((0, 110), (2, -1), (2, 4), (7, 3), (9, 3), (12, 3), (6, x.astype(np.float64))):
        bad = list(good)
        bad[position] = wrong
        with pytest.raises(ValueError):
            extension.sgemm(*bad)
    with pytest.raises(ValueError, match="cannot run the form"):
        extension.set_form("abacus")
    with pytest.raises(ValueError):
        extension.set_threads(0)


def test_reading_rate_is_positive(extension: ModuleType) -> None:
    assert extension.read_bandwidth(8 << 20, 0.05) > 0.05
    with pytest.raises(ValueError):
        extension.read_bandwidth(1, 0.1)
