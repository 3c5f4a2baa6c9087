"""Check every form of the exact products on this machine against the scalar reference, then measure them.

    python -m polytoken.kernels.selftest [--json] [--seconds 0.3] [--cases 400]

Exit status 0 when every bit agrees, 1 when any differs or the extension is missing.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from polytoken.host import processor_name
from polytoken.kernels.products import extension

ROW_MAJOR: Final = 101
COL_MAJOR: Final = 102
NO_TRANS: Final = 111
TRANS: Final = 112
CONJ_TRANS: Final = 113

DTYPES: Final = {"sgemm": np.float32, "dgemm": np.float64, "cgemm": np.complex64}


@dataclass(frozen=True)
class Case:
    """One product as BLAS sees it: c (m x n) = alpha * op(a) * op(b) + beta * c, stored with leading dimensions."""

    symbol: str
    m: int
    n: int
    k: int
    order: int = ROW_MAJOR
    transa: int = NO_TRANS
    transb: int = NO_TRANS
    alpha: complex = 1
    beta: complex = 0
    pad_a: int = 0
    pad_b: int = 0
    pad_c: int = 0
    shift: int = 0  # items before the first one of a and b, so that alignment varies
    seed: int = 0

    def leading(self) -> tuple[int, int, int]:
        def length(rows: int, cols: int) -> int:
            return max(1, cols if self.order == ROW_MAJOR else rows)

        a = (self.m, self.k) if self.transa == NO_TRANS else (self.k, self.m)
        b = (self.k, self.n) if self.transb == NO_TRANS else (self.n, self.k)
        return length(*a) + self.pad_a, length(*b) + self.pad_b, length(self.m, self.n) + self.pad_c

    def operands(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        rng = np.random.default_rng(self.seed)
        sides = max(1, self.m, self.n, self.k)
        return tuple(normal(rng, (self.shift + sides * ld,), DTYPES[self.symbol]) for ld in self.leading())  # type: ignore[return-value]

    def run(self, a: np.ndarray, b: np.ndarray, c: np.ndarray, *, fused: int = -1) -> np.ndarray:
        """The product into a copy of c; `fused` 0 or 1 runs the scalar reference instead of the form in use."""
        lda, ldb, ldc = self.leading()
        real = self.symbol != "cgemm"
        alpha, beta = (x.real if real else x for x in (complex(self.alpha), complex(self.beta)))
        out = c.copy()
        product = getattr(extension(), self.symbol)
        product(self.transa, self.transb, self.m, self.n, self.k, alpha, a[self.shift :], lda, b[self.shift :], ldb,
                beta, out, ldc, order=self.order, fused=fused)  # fmt: skip
        return out

    def agrees(self) -> bool:
        """Whether the form in use gives the reference's bits, and leaves everything around c alone."""
        a, b, c = self.operands()
        fused = int(extension().fused())
        return self.run(a, b, c).tobytes() == self.run(a, b, c, fused=fused).tobytes()


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Standard normal numbers, complex ones with both parts."""
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype == np.complex64 else x).astype(dtype)


def random_case(rng: random.Random) -> Case:
    """A case that visits edges often: empty, single, just beside the tiles' sizes, and past the inner blocks."""
    symbol = rng.choice(["sgemm"] * 6 + ["dgemm", "cgemm"])
    around = [0, 1, 1, 2, 3, 5, 6, 7, 8, 9, 13, 15, 16, 17, 31, 32, 33, 63, 64, 65]
    m, n, k = (rng.choice([rng.choice(around), rng.randrange(1, 90)]) for _ in range(3))
    match rng.randrange(10):
        case 0:
            k = rng.randrange(300, 1500)
        case 1:
            n = rng.randrange(100, 700)
        case 2:
            m = rng.randrange(100, 700)
        case _:
            pass
    scales: list[tuple[complex, complex]] = [(1, 0), (1, 0), (1, 0), (1, 1), (0.7, 0), (0.3, -1.5)]
    if symbol == "cgemm":
        scales = [(1, 0), (1, 1), (0.5 + 1j, 0.25 - 1j)]
    alpha, beta = rng.choice(scales)
    pads = [rng.choice([0, 0, 1, 3, 16]) for _ in range(3)]
    return Case(
        symbol, m, n, k,
        order=rng.choice([ROW_MAJOR, ROW_MAJOR, COL_MAJOR]),
        transa=rng.choice([NO_TRANS, TRANS, CONJ_TRANS]),
        transb=rng.choice([NO_TRANS, TRANS, TRANS, CONJ_TRANS]),
        alpha=alpha, beta=beta, pad_a=pads[0], pad_b=pads[1], pad_c=pads[2],
        shift=rng.randrange(4), seed=rng.randrange(1 << 30),
    )  # fmt: skip


@dataclass(frozen=True)
class Check:
    """How many random cases a form was held to, and those whose bits differ."""

    form: str
    cases: int
    differing: tuple[Case, ...]


def check(form: str, *, cases: int, seed: int = 0) -> Check:
    extension().set_form(form)
    rng = random.Random(seed)
    drawn = [random_case(rng) for _ in range(cases)]
    return Check(form, cases, tuple(case for case in drawn if not case.agrees()))


# ---- measurement -----------------------------------------------------------------------------------------------------

WEIGHTS: Final = [Case("sgemm", m, 8192, 2048, transb=TRANS) for m in (1, 4, 8, 16, 32, 64, 128, 512)]
SHAPES: Final = [
    *WEIGHTS,
    Case("sgemm", 64, 576, 576, transb=TRANS),
    Case("sgemm", 64, 576, 1536, transb=TRANS),
    Case("sgemm", 64, 1536, 576, transb=TRANS),
    Case("sgemm", 512, 1536, 576, transb=TRANS),
    Case("sgemm", 1, 576, 576, transb=TRANS),
    Case("sgemm", 1, 49152, 576, transb=TRANS),
    Case("sgemm", 2048, 2048, 2048, transb=TRANS),
    Case("sgemm", 2048, 2048, 2048),
    Case("sgemm", 1, 2048, 64, transb=TRANS),  # one query against 2048 keys
    Case("sgemm", 1, 64, 2048),  # its weights times the values
    Case("sgemm", 4, 64, 2048),
    Case("sgemm", 512, 512, 64, transb=TRANS),
    Case("sgemm", 512, 64, 512),
]


@dataclass(frozen=True)
class Measurement:
    """The best of many runs of one shape; gbs counts each weight (b) as read once."""

    form: str
    m: int
    n: int
    k: int
    transposed: bool
    ms: float
    gflops: float
    gbs: float


def best_seconds(run: Callable[[], object], *, seconds: float) -> float:
    """The shortest of many runs within about `seconds`, after one to warm up."""
    run()
    best, start = float("inf"), time.perf_counter()
    runs = 0
    while runs < 3 or time.perf_counter() - start < seconds:
        t = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - t)
        runs += 1
    return best


def measure(form: str, case: Case, *, seconds: float) -> Measurement:
    products = extension()
    products.set_form(form)
    rng = np.random.default_rng(0)
    lda, ldb, ldc = case.leading()
    a = normal(rng, (case.m * case.k,), np.float32)
    b = normal(rng, (case.n * case.k,), np.float32)
    c = np.zeros(case.m * case.n, np.float32)

    def run() -> None:
        products.sgemm(case.transa, case.transb, case.m, case.n, case.k, 1.0, a, lda, b, ldb, 0.0, c, ldc)

    best = best_seconds(run, seconds=seconds)
    work = 2 * case.m * case.n * case.k
    return Measurement(
        form, case.m, case.n, case.k, case.transb != NO_TRANS,
        ms=best * 1e3, gflops=work / best / 1e9, gbs=4 * case.n * case.k / best / 1e9,
    )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m polytoken.kernels.selftest", description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--cases", type=int, default=400, help="random products per form (default 400)")
    parser.add_argument("--seconds", type=float, default=0.3, help="time per measured shape; 0 measures nothing")
    parser.add_argument("--all", action="store_true", help="measure the portable form too")
    parser.add_argument("--threads", type=int, default=1, help="threads of one product while measuring")
    options = parser.parse_args(arguments)
    try:
        products = extension()
    except ImportError as error:
        print(f"the compiled extension is not there: {error}", file=sys.stderr)
        return 1

    before, before_threads = products.form(), products.threads()
    forms = products.forms()
    checks = [check(form, cases=options.cases) for form in forms]
    products.set_threads(options.threads)
    read, table = 0.0, []
    if options.seconds > 0:
        read = products.read_bandwidth(256 << 20, max(1.0, options.seconds))
        # the portable form is there to be right; its speed matters only where it is the only one
        timed = [form for form in forms if options.all or form != "portable" or len(forms) == 1]
        table = [measure(form, shape, seconds=options.seconds) for shape in SHAPES for form in timed]
    products.set_form(before)
    products.set_threads(before_threads)

    if options.json:
        print(
            json.dumps(
                {
                    "processor": processor_name(),
                    "machine": platform.machine(),
                    "python": platform.python_version(),
                    "threads": options.threads,
                    "checks": [asdict(replace(c, differing=c.differing[:5])) for c in checks],
                    "read_gbs": round(read, 2),
                    "measurements": [asdict(m) for m in table],
                },
                default=str,
            )
        )
    else:
        print(f"{processor_name()}, one-thread read {read:.1f} GB/s, {options.threads} thread(s)")
        for c in checks:
            print(f"{c.form:9} {c.cases} random products, {len(c.differing)} differ from the reference")
            for case in c.differing[:5]:
                print(f"          {case}")
        if table:
            print(f"\n{'form':9}{'rows x columns x inner':>24} b   {'ms':>10}{'GFLOP/s':>10}{'GB/s of b':>11}")
        for m in table:
            shape = f"{m.m} x {m.n} x {m.k}"
            side = "W'" if m.transposed else "W "
            print(f"{m.form:9}{shape:>24} {side}  {m.ms:>10.3f}{m.gflops:>10.1f}{m.gbs:>11.1f}")
    return 1 if any(c.differing for c in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
