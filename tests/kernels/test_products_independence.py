"""What exactness means to a user: a row's numbers depend on nothing but that row."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from types import ModuleType

import numpy as np
import pytest

from polytoken.kernels.selftest import NO_TRANS, TRANS

RNG = np.random.default_rng(11)


def floats(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32)


def times(extension: ModuleType, x: np.ndarray, w: np.ndarray, *, transposed: bool = True) -> np.ndarray:
    """x (m, k) times w, stored (n, k) when transposed and (k, n) when not."""
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    m, k = x.shape
    n = w.shape[0] if transposed else w.shape[1]
    out = np.empty((m, n), np.float32)
    flag = TRANS if transposed else NO_TRANS
    extension.sgemm(NO_TRANS, flag, m, n, k, 1.0, x, max(1, k), w, max(1, k if transposed else n), 0.0, out, max(1, n))
    return out


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("transposed", [True, False])
def test_rows_do_not_depend_on_how_many_there_are(form: str, extension: ModuleType, transposed: bool) -> None:
    x, w = floats(512, 333), floats(97, 333)
    w = w if transposed else w.T
    whole = times(extension, x, w, transposed=transposed)
    for chunk in (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 31, 64, 100, 257):
        for start in range(0, 512, chunk):
            part = times(extension, x[start : start + chunk], w, transposed=transposed)
            assert same(part, whole[start : start + chunk]), (chunk, start)


@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_columns_do_not_depend_on_their_neighbours(form: str, extension: ModuleType, rows: int) -> None:
    x, w = floats(rows, 200), floats(150, 200)
    whole = times(extension, x, w)
    for chosen in (slice(0, 1), slice(3, 9), slice(5, 150, 7), slice(64, 128), slice(149, None), slice(None, None, -1)):
        assert same(times(extension, x, w[chosen]), np.ascontiguousarray(whole[:, chosen]))


@pytest.mark.parametrize("rows", [1, 2, 4, 8, 9, 70])
def test_both_layouts_give_equal_bits(form: str, extension: ModuleType, rows: int) -> None:
    for n, k in ((1, 5), (7, 64), (64, 130), (100, 700)):
        x, w = floats(rows, k), floats(n, k)
        assert same(times(extension, x, w), times(extension, x, w.T, transposed=False))


@pytest.mark.parametrize("rows", [1, 5, 8, 33])
@pytest.mark.parametrize("transposed", [True, False])
def test_zeros_around_the_inner_dimension_change_no_bit(
    form: str, extension: ModuleType, rows: int, transposed: bool
) -> None:
    for k in (1, 13, 64, 300):
        x, w = floats(rows, k), floats(50, k)
        whole = times(extension, x, w if transposed else w.T, transposed=transposed)
        for before, after in ((0, 1), (0, 7), (0, 400), (1, 0), (7, 0), (400, 0), (3, 5)):
            wide_x = np.pad(x, ((0, 0), (before, after)))
            # what the zero weights meet is arbitrary, as stale values beyond a mask are
            wide_w = np.concatenate([floats(50, before), w, floats(50, after)], axis=1)
            wide_w = wide_w if transposed else wide_w.T
            assert same(times(extension, wide_x, wide_w, transposed=transposed), whole), (k, before, after)


def test_thread_counts_give_equal_bits(form: str, extension: ModuleType) -> None:
    shapes = ((1, 5000, 600), (4, 3001, 333), (300, 200, 150), (2000, 33, 70), (65, 513, 1000))
    for transposed in (True, False):
        for m, n, k in shapes:
            x, w = floats(m, k), floats(n, k) if transposed else floats(k, n)
            results = []
            for count in (1, 2, 3):
                extension.set_threads(count)
                results.append(times(extension, x, w, transposed=transposed))
            extension.set_threads(1)
            assert same(results[0], results[1])
            assert same(results[0], results[2])


def test_several_callers_at_once(extension: ModuleType) -> None:
    x, w = floats(64, 400), floats(900, 400)
    want = times(extension, x, w)
    wrong: list[int] = []

    def call(rows: int) -> None:
        for _ in range(20):
            if not same(times(extension, x[:rows], w), want[:rows]):
                wrong.append(rows)

    extension.set_threads(2)
    callers = [threading.Thread(target=call, args=(rows,)) for rows in (64, 1, 8, 33)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=300)
    extension.set_threads(1)
    assert not any(caller.is_alive() for caller in callers)
    assert wrong == []


def test_a_forked_child_does_not_wait_for_its_parents_threads(extension: ModuleType) -> None:
    script = """
        import os
        import numpy as np
        from polytoken.kernels.products import extension
        P = extension()
        P.set_threads(2)
        x = np.ones((200, 200), np.float32)
        def product():
            out = np.zeros((200, 200), np.float32)
            P.sgemm(111, 112, 200, 200, 200, 1.0, x, 200, x, 200, 0.0, out, 200)
            return bool((out == 200).all())
        first = product()
        child = os.fork()
        if child == 0:
            os._exit(0 if product() else 3)
        print(first, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), product())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.stdout.split() == ["True", "0", "True"], done.stderr[-500:]
