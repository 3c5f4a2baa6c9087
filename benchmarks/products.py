"""What the products behind MLX cost on the CPU: MLX's own, the exact ones, and a BLAS by path, in one run.

    python benchmarks/products.py [--library PATH] [--rounds 5] [--threads 1] [--json]

Variants alternate within every shape, so that a busy machine hurts them alike; the best time of each is kept. GB/s
counts every weight as read once and stands beside the machine's own one-thread reading rate.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable

import mlx.core as mx

from polytoken.host import processor_name
from polytoken.kernels import products


def linear(rows: int, out: int, inner: int) -> tuple[str, int, int, Callable[[], mx.array]]:
    x, w = mx.random.normal((rows, inner)), mx.random.normal((out, inner))
    mx.eval(x, w)
    return f"linear {rows} x {out} x {inner}", 2 * rows * out * inner, w.nbytes, lambda: x @ w.T


def square(n: int) -> tuple[str, int, int, Callable[[], mx.array]]:
    a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
    mx.eval(a, b)
    return f"matmul {n} x {n} x {n}", 2 * n**3, b.nbytes, lambda: a @ b


def attention(rows: int, keys: int) -> tuple[str, int, int, Callable[[], mx.array]]:
    q, kv = mx.random.normal((1, 16, rows, 64)), mx.random.normal((1, 4, keys, 64))
    mx.eval(q, kv)
    work = 2 * 2 * 16 * rows * keys * 64
    return (
        f"attention {rows} on {keys} keys",
        work,
        2 * kv.nbytes,
        lambda: mx.fast.scaled_dot_product_attention(q, kv, kv, scale=0.125),
    )


def once(run: Callable[[], mx.array]) -> float:
    start = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", help="path or soname of a BLAS to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of a shape (default 5)")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--largest", type=float, default=2.5e9, help="multiply-adds up to which MLX's own is measured")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    report = products.enable("exact", threads=options.threads)
    if report.kind != "exact":
        print(f"no exact products here: {report.reason}", file=sys.stderr)
        return 1
    read = products.extension().read_bandwidth(256 << 20, 2.0)
    kinds = ["stock", "exact"] + ([options.library] if options.library else [])
    shapes = [
        *(lambda rows=rows: linear(rows, 8192, 2048) for rows in (1, 2, 4, 8, 16, 32, 64, 128, 512)),
        lambda: linear(1, 576, 576),
        lambda: linear(64, 1536, 576),
        lambda: linear(512, 1536, 576),
        lambda: linear(1, 49152, 576),
        lambda: square(512),
        lambda: square(2048),
        lambda: attention(1, 2048),
        lambda: attention(4, 2048),
        lambda: attention(512, 512),
    ]
    rows = []
    for make in shapes:
        name, work, weight_bytes, run = make()
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(options.rounds):
            for kind in kinds:
                if kind == "stock" and work / 2 > options.largest:
                    continue
                products.enable(kind, threads=options.threads)
                once(run)
                # short products are repeated until they have been timed for a while
                started = time.perf_counter()
                while True:
                    seconds[kind].append(once(run))
                    if time.perf_counter() - started > 0.05:
                        break
        for kind in kinds:
            if seconds[kind]:
                best = min(seconds[kind])
                rows.append(
                    {
                        "shape": name,
                        "products": kind,
                        "ms": best * 1e3,
                        "gflops": work / best / 1e9,
                        "gbs": weight_bytes / best / 1e9,
                    }
                )
    products.enable("stock")

    if options.json:
        print(json.dumps({"processor": processor_name(), "form": report.form, "threads": options.threads,
                          "read_gbs": read, "rounds": options.rounds, "rows": rows}))  # fmt: skip
        return 0
    print(f"{processor_name()}, form {report.form}, {options.threads} thread(s), one-thread read {read:.1f} GB/s")
    print(f"{'shape':28}{'products':12}{'ms':>10}{'GFLOP/s':>10}{'GB/s':>8}")
    for row in rows:
        kind = row["products"] if row["products"] in ("stock", "exact") else "library"
        print(f"{row['shape']:28}{kind:12}{row['ms']:>10.3f}{row['gflops']:>10.1f}{row['gbs']:>8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
