"""E07: a process killed in the middle of a write leaves a folder that the next one uses as if nothing had been."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from disk_records import SPACE, folder_bytes, is_intact, make_record, name_of

from polytoken.cache.disk.store import DiskStore

LIMIT = 12 << 20


def kill_while_writing(root: Path, trial: int) -> bool:
    """Run a writer, kill it at a random moment, and check what is left; whether it was in the middle of a file."""
    writer = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("disk_writer.py")), str(root), str(LIMIT), str(trial)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        stdout=subprocess.PIPE,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == b"ready\n"
    time.sleep(random.Random(trial).uniform(0, 0.15))
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    writer.stdout.close()
    partial = root / "partial"
    interrupted = partial.is_dir() and any(partial.iterdir())
    assert folder_bytes(root) <= LIMIT
    store = DiskStore(root, limit_bytes=LIMIT)
    for number in range(200):
        record = store.get(SPACE, name_of(number))
        assert record is None or is_intact(record, number)
    assert store.statistics().refused == {}  # what has its name is whole
    store.put(SPACE, make_record(trial, size=1_000_000), replace=True)
    assert store.close(60) == 0
    assert store.statistics().writes == 1
    assert not any(partial.iterdir())
    assert folder_bytes(root) <= LIMIT
    return interrupted


@pytest.mark.parametrize("trials", [10])
def test_e07_killed_at_a_random_moment(tmp_path: Path, trials: int) -> None:
    """`benchmarks/disk_trials.py` does the same a hundred times."""
    for trial in range(trials):
        kill_while_writing(tmp_path, trial)
