"""A process that writes records until it is killed: `disk_writer.py ROOT LIMIT SEED`."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from disk_records import SPACE, make_record

from polytoken.cache.disk.store import DiskStore


def main() -> None:
    root, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    draws = random.Random(seed)
    store = DiskStore(root, limit_bytes=limit)
    print("ready", flush=True)
    while True:
        number = draws.randrange(200)
        store.put(SPACE, make_record(number, size=draws.choice((100, 30_000, 2_000_000))), replace=True)
        store.flush(60)


if __name__ == "__main__":
    main()
