"""A hundred kills in the middle of writes, and two hundred restores after restarts with 64 tokens behind each.

    python benchmarks/disk_trials.py [--kills 100] [--restores 200]

The tests do the same with fewer. Exits with a traceback at the first wrong bit.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

import mlx.core as mx

from polytoken.kernels import products

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("disk", "reference", "mtp", "canvas_lane", "sessions")]

from disk_talks import restore_often  # noqa: E402
from session_talks import KINDS  # noqa: E402
from test_disk_kill import kill_while_writing  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--restores", type=int, default=200)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    products.enable("exact")
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        interrupted = sum(kill_while_writing(Path(folder), trial) for trial in range(arguments.kills))
    print(
        f"{arguments.kills} kills, {interrupted} of them in the middle of a file: "
        f"no wrong record, no limit exceeded ({time.monotonic() - start:.0f} s)",
        flush=True,
    )
    done, each = 0, -(-arguments.restores // len(KINDS))
    for kind in KINDS if arguments.restores else ():
        with tempfile.TemporaryDirectory() as folder:
            cached = restore_often(Path(folder), kind, history=150, restores=each, count=64)
        done += len(cached)
        print(f"{kind}: {len(cached)} restores, {sum(cached)} tokens from the disk, every bit as cold", flush=True)
    print(f"{done} restores ({time.monotonic() - start:.0f} s)")


if __name__ == "__main__":
    main()
