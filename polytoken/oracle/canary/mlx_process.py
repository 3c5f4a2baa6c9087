"""The process behind `MlxProbe`: answers every line on its input with how long a trifling product took.

An answer is two whole numbers of nanoseconds: until the product was scheduled, and until it was done.
"""

from __future__ import annotations

import sys
import time


def main(device: str) -> None:
    import mlx.core as mx  # noqa: PLC0415  (a process that cannot import it says so by ending)

    mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)
    a = mx.ones((16, 16))
    mx.eval(a @ a)
    for _ in sys.stdin:
        start = time.perf_counter_ns()
        product = a @ a
        mx.async_eval(product)
        scheduled = time.perf_counter_ns() - start
        mx.eval(product)
        print(scheduled, time.perf_counter_ns() - start, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "gpu")
