"""The store of the disk tier: what is written comes back, the limit holds at every instant, faults cost a miss."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_records import SPACE, all_files, folder_bytes, is_intact, key_of, make_record, name_of

from polytoken.cache.disk import folder
from polytoken.cache.disk.answers import DiskPut
from polytoken.cache.disk.folder import Folder
from polytoken.cache.disk.record import Space
from polytoken.cache.disk.store import DiskStore

MIB = 1 << 20


def assert_set(event: threading.Event) -> None:
    assert event.wait(60)


def open_store(root: Path, limit: int = 10 * MIB, **options: object) -> DiskStore:
    return DiskStore(root, limit_bytes=limit, **options)  # type: ignore[arg-type]


def test_records_survive_the_process(tmp_path: Path) -> None:
    store = open_store(tmp_path / "made")
    for number in range(5):
        assert store.put(SPACE, make_record(number, parent=number - 1 if number else None)) is DiskPut.QUEUED
        waiting = store.get(SPACE, name_of(number, parent=number - 1 if number else None))
        assert waiting is not None and is_intact(waiting, number)  # also before it is written
    assert store.put(SPACE, make_record(0)) is DiskPut.PRESENT
    assert store.close(60) == 0
    again = open_store(tmp_path / "made")
    for number in range(5):
        name = name_of(number, parent=number - 1 if number else None)
        assert name in again
        read = again.get(SPACE, name)
        assert read is not None and is_intact(read, number)
    assert again.children(SPACE, key_of(2), "h") == [name_of(3, parent=2)]
    assert again.children(SPACE, None, "h") == [name_of(0)]
    assert again.children(SPACE, None, "other") == []
    assert again.find(SPACE, key_of(4)) == name_of(4, parent=3)
    assert again.get(SPACE, name_of(9)) is None
    assert again.statistics().reads == 5
    again.close()


def test_e08_identities_never_meet(tmp_path: Path) -> None:
    """E08: under another identity the same key finds nothing, and a file put in its place is refused."""
    store, other = open_store(tmp_path), Space.of({"checkpoint": "another", "grid": 64})
    store.put(SPACE, make_record(1))
    store.flush(60)
    name = name_of(1, space=other)
    assert store.get(other, name) is None
    (tmp_path / other.path).mkdir(parents=True)
    (tmp_path / name.path).write_bytes((tmp_path / name_of(1).path).read_bytes())
    assert store.get(other, name) is None
    assert store.statistics().refused == {"misplaced": 1}
    store.flush(60)
    assert not (tmp_path / name.path).exists()
    assert store.get(SPACE, name_of(1)) is not None
    store.close(60)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-7], "truncated"),
        (lambda data: data[:-7] + bytes(7), "corrupt"),
        (lambda data: b"", "truncated"),
        (lambda data: b"something else entirely, and longer than any opening", "foreign"),
        (lambda data: data.replace(b'"version":"1"', b'"version":"9"'), "other_version"),
    ],
)
def test_e07_a_damaged_file_is_counted_deleted_and_can_be_written_anew(
    tmp_path: Path, damage: Callable[[bytes], bytes], reason: str
) -> None:
    """E07: a restore that cannot be verified is dropped and counted."""
    store = open_store(tmp_path)
    store.put(SPACE, make_record(1))
    store.close(60)
    path = tmp_path / name_of(1).path
    path.write_bytes(damage(path.read_bytes()))
    again = open_store(tmp_path)
    assert again.get(SPACE, name_of(1)) is None
    assert again.get(SPACE, name_of(1)) is None
    assert again.statistics().refused == {reason: 1}
    assert again.flush(60)
    assert not path.exists()
    assert again.put(SPACE, make_record(1)) is DiskPut.QUEUED
    assert again.flush(60)
    read = again.get(SPACE, name_of(1))
    assert read is not None and is_intact(read, 1)
    again.close()


def test_what_another_deleted_is_gone_and_counted(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.put(SPACE, make_record(1))
    store.flush(60)
    (tmp_path / name_of(1).path).unlink()
    assert store.get(SPACE, name_of(1)) is None
    assert store.statistics().gone == 1
    assert name_of(1) not in store
    store.close(60)


def test_e09_the_limit_holds_at_every_instant_and_the_oldest_goes_first(tmp_path: Path) -> None:
    """E09: a watcher adds up all files, those being written among them, while several models fill the folder."""
    limit, most, seen = 2 * MIB, 0, 0
    stop = threading.Event()

    def watch() -> None:
        nonlocal most, seen
        while not stop.is_set():
            most, seen = max(most, folder_bytes(tmp_path)), seen + 1

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    draws = random.Random(5)
    for model in range(3):
        space = Space.of({"checkpoint": f"model {model}", "grid": 64})
        store = open_store(tmp_path, limit)
        for number in range(60):
            store.put(space, make_record(number, size=draws.choice((10, 50_000, 400_000))))
            if number % 4 == 0:
                store.flush(60)
        store.close(60)
        assert folder_bytes(tmp_path) <= limit
    stop.set()
    watcher.join()
    assert seen > 10
    assert limit // 2 < most <= limit
    last = {Space.of({"checkpoint": f"model {model}", "grid": 64}).path for model in (1, 2)}
    assert {f"{path.parent.parent.name}/{path.parent.name}" for path in all_files(tmp_path / "v1")} <= last


def test_e09_no_write_ever_ends_above_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E09: chains that branch, replaced records, snapshots' names; looked at around every single write."""
    limit, seen = 300_000, []

    class Watched:
        def __getattr__(self, name: str) -> object:
            return getattr(os, name)

        def write(self, handle: int, data: memoryview) -> int:
            seen.append(folder_bytes(tmp_path))
            written = os.write(handle, data[: 1 + len(data) // 3])
            seen.append(folder_bytes(tmp_path))
            return written

    monkeypatch.setattr(folder, "os", Watched())
    store, draws = open_store(tmp_path, limit), random.Random(3)
    parents: dict[int, int | None] = {}
    for number in range(60):
        parents[number] = draws.choice([None, *range(max(0, number - 6), number)])
        store.put(SPACE, make_record(number, parent=parents[number], size=draws.choice((10, 20_000, 70_000))))
        again = draws.randrange(number + 1)
        store.put(SPACE, make_record(again, parent=parents[again], size=30_000), replace=True)
        store.flush(60)
    assert store.statistics().evictions > 20 and store.close(60) == 0
    assert limit * 0.8 < max(seen) <= limit
    for number, parent in parents.items():  # and nothing is there without what it continues
        if name_of(number, parent=parent) in store and parent is not None:
            assert name_of(parent, parent=parents[parent]) in store


def test_e09_a_lower_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(20):
        store.put(SPACE, make_record(number, size=100_000))
    store.close(60)
    store = open_store(tmp_path, MIB)
    store.flush(60)
    assert folder_bytes(tmp_path) <= MIB
    assert store.statistics().evictions >= 10
    assert name_of(19) in store
    store.close(60)


def test_what_is_used_stays_and_a_chain_is_dropped_from_its_end(tmp_path: Path) -> None:
    """E06: no record is left that nobody can reach."""
    store = open_store(tmp_path, 1_000_000)
    for number in range(4):
        store.put(SPACE, make_record(number, parent=number - 1 if number else None, size=100_000))
    store.put(SPACE, make_record(10, size=100_000))
    store.flush(60)
    store.touch([name_of(1, parent=0), name_of(0)])
    for number in range(20, 27):
        store.put(SPACE, make_record(number, size=100_000))
    store.flush(60)
    assert name_of(0) in store and name_of(1, parent=0) in store
    assert name_of(3, parent=2) not in store and name_of(2, parent=1) not in store
    assert name_of(10) not in store
    assert store.put(SPACE, make_record(3, parent=2)) is DiskPut.NO_PARENT
    store.close(60)


def test_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1_000_000)
    for number in range(8):
        store.put(SPACE, make_record(number, size=100_000))
    store.flush(60)
    time.sleep(0.02)
    store.touch([name_of(0)])
    store.close(60)
    again = open_store(tmp_path, 500_000)
    again.flush(60)
    assert name_of(0) in again and name_of(1) not in again
    again.close()


def test_a_use_in_another_process_counts(tmp_path: Path) -> None:
    one, other = open_store(tmp_path, 900_000), open_store(tmp_path, 900_000)
    for number in range(8):
        one.put(SPACE, make_record(number, size=100_000))
    one.flush(60)
    other.touch([name_of(0)])
    other.flush(60)
    one.put(SPACE, make_record(8, size=100_000))
    one.flush(60)
    assert name_of(0) in one and name_of(1) not in one
    one.close()
    other.close()


def test_e19_what_exceeds_the_limit_is_refused_and_nothing_goes_for_it(tmp_path: Path) -> None:
    """E19: an entry larger than the budget evicts nobody; nor does one that cannot fit beside what it continues."""
    store = open_store(tmp_path, 400_000)
    store.put(SPACE, make_record(0, size=100_000))
    store.put(SPACE, make_record(1, parent=0, size=100_000))
    assert store.put(SPACE, make_record(5, size=500_000)) is DiskPut.OVERSIZE
    store.put(SPACE, make_record(2, parent=1, size=300_000))
    store.flush(60)
    assert store.statistics().dropped == {"oversize": 2}
    assert name_of(1, parent=0) in store and name_of(2, parent=1) not in store
    store.close(60)


def test_a_slow_disk_drops_and_counts_and_never_makes_anybody_wait(tmp_path: Path) -> None:
    store = open_store(tmp_path, pending_bytes=250_000)
    with Folder(tmp_path).locked():  # another process is at work
        start = time.monotonic()
        outcomes = [store.put(SPACE, make_record(number, size=100_000)) for number in range(5)]
        assert store.admits(name_of(7), 100_000) is DiskPut.BUSY
        assert time.monotonic() - start < 10
        assert outcomes == [DiskPut.QUEUED] * 2 + [DiskPut.BUSY] * 3
        assert store.statistics().pending_bytes == 200_000
        assert not store.flush(0.05)
    assert store.flush(60)
    assert store.statistics().dropped == {"busy": 3}
    assert store.statistics().pending_bytes == 0
    store.close(60)


def test_close_keeps_its_deadline_and_says_what_it_gave_up(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with Folder(tmp_path).locked():
        for number in range(3):
            store.put(SPACE, make_record(number))
        start = time.monotonic()
        assert store.close(0.1) == 3
        assert time.monotonic() - start < 10
    assert store.statistics().dropped == {"closed": 3}
    assert store.put(SPACE, make_record(9)) is DiskPut.CLOSED
    assert store.close(60) == 0
    assert [path.name for path in all_files(tmp_path)] == ["lock"]


def test_removal_takes_what_continues_it_along(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    for number in range(3):
        store.put(SPACE, make_record(number, parent=number - 1 if number else None))
    store.put(SPACE, make_record(9))
    store.flush(60)
    store.put(SPACE, make_record(3, parent=2))  # most likely still waiting
    store.remove([name_of(1, parent=0)])
    assert name_of(1, parent=0) not in store and name_of(3, parent=2) not in store
    store.flush(60)
    assert {path.name.split(".")[0] for path in all_files(tmp_path / "v1")} == {key_of(0).hex(), key_of(9).hex()}
    assert store.statistics().nbytes == folder_bytes(tmp_path)
    store.close(60)


@pytest.mark.parametrize("again", [False, True])
def test_what_is_removed_while_it_is_written_is_gone_and_what_is_put_again_stays(tmp_path: Path, again: bool) -> None:
    """For whoever asks before the removal has had its turn, too, and also if another process wrote meanwhile."""
    store, gate, writing = open_store(tmp_path), threading.Event(), threading.Event()
    write, remove = store._write_there, store._remove

    def held_write(*args: object) -> DiskPut:
        writing.set()
        assert gate.wait(60)
        return write(*args)  # type: ignore[arg-type]

    held, listed = threading.Event(), []

    def held_removal(*args: object) -> None:
        listed.extend([name_of(1) in store, store.find(SPACE, key_of(1)), store.children(SPACE, None, "h")])
        store._look()
        listed.append(name_of(1) in store)
        held.set()
        remove(*args)  # type: ignore[arg-type]

    store._write_there, store._remove = held_write, held_removal  # type: ignore[method-assign]
    assert store.put(SPACE, make_record(1)) is DiskPut.QUEUED
    assert writing.wait(60)
    store.remove([name_of(1)])
    if again:
        assert store.put(SPACE, make_record(1)) is DiskPut.QUEUED
    gate.set()
    assert held.wait(60) and store.flush(60)
    present = name_of(1) if again else None
    assert listed == [again, present, [present] if again else [], again]
    assert (name_of(1) in store) is again and store.find(SPACE, key_of(1)) == present
    assert (store.get(SPACE, name_of(1)) is not None) is again
    assert store.close(60) == 0
    assert len(list(tmp_path.rglob("*.safetensors"))) == again


def test_what_is_put_again_before_the_writer_comes_to_the_removal_stays(tmp_path: Path) -> None:
    store, gate = open_store(tmp_path), threading.Event()
    with store._change:
        store._order(lambda: assert_set(gate))
    for _ in range(3):
        assert store.put(SPACE, make_record(1)) is DiskPut.QUEUED
        store.remove([name_of(1)])
    assert store.put(SPACE, make_record(1)) is DiskPut.QUEUED
    gate.set()
    assert store.flush(60)
    assert store.get(SPACE, name_of(1)) is not None and (tmp_path / name_of(1).path).exists()
    assert store.close(60) == 0


def test_a_removal_goes_through_a_chain_of_any_length(tmp_path: Path) -> None:
    store = open_store(tmp_path, 100 * MIB)
    for number in range(1500):
        store.put(SPACE, make_record(number, parent=number - 1 if number else None, size=1))
    store.remove([name_of(0)])
    store.flush(60)
    assert len(store.names(SPACE.path)) == 0
    store.close(60)


def test_files_of_others_are_neither_counted_nor_deleted(tmp_path: Path) -> None:
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "home.txt").write_bytes(b"x" * 3 * MIB)
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "notes.txt").write_bytes(b"x" * MIB)
    store = open_store(tmp_path, MIB)
    store.put(SPACE, make_record(1))
    store.flush(60)
    assert name_of(1) in store and store.statistics().evictions == 0
    store.remove([name_of(1)])
    store.close(60)
    assert [path.name for path in all_files(tmp_path)] == ["home.txt", "lock", "notes.txt"]


def test_a_full_disk_is_one_warning_and_no_error(tmp_path: Path) -> None:
    """E09: full disk means no caching and a warning. The system refuses the write; reading goes on."""
    script = """
import resource, signal, sys
from pathlib import Path
from disk_records import SPACE, make_record, name_of
from polytoken.cache.disk.store import DiskStore
warnings = []
store = DiskStore(Path(sys.argv[1]), limit_bytes=1 << 24, warn=warnings.append)
store.put(SPACE, make_record(1, size=1000)); store.flush(60)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
for number in range(2, 6):
    store.put(SPACE, make_record(number, size=200_000)); store.flush(60)
assert len(warnings) == 1 and "nothing is saved" in warnings[0], warnings
assert store.get(SPACE, name_of(1)) is not None
assert store.statistics().dropped == {"read_only": 4}, store.statistics()
assert not list((Path(sys.argv[1]) / "partial").iterdir())
assert store.close(60) == 0
"""
    run_script(script, tmp_path / "made")


def test_a_folder_that_cannot_be_written_is_read_with_one_warning(tmp_path: Path) -> None:
    store = open_store(tmp_path / "made")
    store.put(SPACE, make_record(1))
    store.close(60)
    script = """
import os, sys
from pathlib import Path
from disk_records import SPACE, make_record, name_of
from polytoken.cache.disk.store import DiskStore
if os.getuid() == 0:
    os.setgid(65534); os.setuid(65534)
warnings = []
store = DiskStore(Path(sys.argv[1]), limit_bytes=1 << 24, warn=warnings.append)
assert len(warnings) == 1 and "ermission denied" in warnings[0], warnings
assert store.get(SPACE, name_of(1)) is not None
assert store.put(SPACE, make_record(2)) == "read_only"
store.touch([name_of(1)]); store.remove([name_of(1)]); store.flush(1)
assert store.close(60) == 0 and len(warnings) == 1
"""
    for path in (tmp_path / "made").rglob("*"):
        path.chmod(0o555 if path.is_dir() else 0o444)
    (tmp_path / "made").chmod(0o555)
    opened = [tmp_path, *tmp_path.parents]
    modes = [path.stat().st_mode & 0o777 for path in opened]
    try:
        for path, mode in zip(opened, modes, strict=True):
            if mode & 0o5 != 0o5:
                path.chmod(mode | 0o5)
        run_script(script, tmp_path / "made")
    finally:
        for path, mode in zip(opened, modes, strict=True):
            if path.stat().st_mode & 0o777 != mode:
                path.chmod(mode)


def run_script(script: str, *words: object) -> None:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_two_processes_and_a_reader_on_one_folder(tmp_path: Path) -> None:
    """Both write the same and different records under one limit, in turns; nothing wrong is ever read."""
    limit = 3 * MIB
    script = """
import random, sys
from pathlib import Path
from disk_records import SPACE, folder_bytes, is_intact, make_record, name_of
from polytoken.cache.disk.store import DiskStore
root, limit, draws = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
store = DiskStore(root, limit_bytes=limit)
for turn in range(150):
    number = draws.randrange(60)
    store.put(SPACE, make_record(number, size=draws.choice((100, 100_000))))
    number = draws.randrange(60)
    record = store.get(SPACE, name_of(number))
    assert record is None or is_intact(record, number)
    if turn % 10 == 0: store.flush(60)
    assert folder_bytes(root) <= limit
store.close(60)
statistics = store.statistics()
assert not statistics.refused and not statistics.read_only, statistics
assert statistics.writes > 0, statistics
"""
    threads = [threading.Thread(target=run_script, args=(script, tmp_path, limit, seed)) for seed in range(2)]
    faults: list[threading.ExceptHookArgs] = []
    threading.excepthook, before = faults.append, threading.excepthook
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        threading.excepthook = before
    assert not faults, [str(fault.exc_value) for fault in faults]
    assert folder_bytes(tmp_path) <= limit
