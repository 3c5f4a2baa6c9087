"""A session folder in which there are things of others: they stay as they are, and cost nothing but themselves."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_records import SPACE, is_intact, make_record, name_of

from polytoken.cache.disk import listing
from polytoken.cache.disk.record import VERSION
from polytoken.cache.disk.store import DiskStore

MIB = 1 << 20
PLACE = name_of(1).path


def open_store(root: Path, warn: Callable[[str], None] = lambda text: None) -> DiskStore:
    return DiskStore(root, limit_bytes=10 * MIB, warn=warn)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder that holds record 2; where record 1 would lie there is nothing."""
    store = open_store(tmp_path / "folder")
    store.put(SPACE, make_record(2))
    assert store.close(60) == 0
    return tmp_path / "folder"


@pytest.mark.parametrize(
    "make",
    [
        lambda path: path.mkdir(),
        os.mkfifo,
        lambda path: path.symlink_to(path.name),
        lambda path: path.symlink_to(path.parents[3] / "letter"),
    ],
    ids=["folder", "pipe", "link to itself", "link to a letter"],
)
def test_e07_what_is_no_file_is_not_read_and_not_deleted(root: Path, make: Callable[[Path], None]) -> None:
    """E07: whatever bears a record's name: nobody waits for it, follows it or stops saving over it."""
    letter = root.parent / "letter"
    letter.write_text("dear")
    make(root / PLACE)
    warnings: list[str] = []
    store = open_store(root, warnings.append)
    outcome: list[object] = []
    reader = threading.Thread(target=lambda: outcome.append(store.get(SPACE, name_of(1))), daemon=True)
    reader.start()
    reader.join(30)
    assert outcome == [None] and store.statistics().refused == {"unreadable": 1}
    store.put(SPACE, make_record(3))
    store.remove([name_of(1)])
    assert store.flush(30)
    read = store.get(SPACE, name_of(3))
    assert read is not None and is_intact(read, 3)
    assert store.close(60) == 0 and warnings == []
    assert listing.read_folder(root).records == 2
    listing.clear_sessions(root, None)
    assert os.path.lexists(root / PLACE) and letter.read_text() == "dear"
    assert not (root / name_of(2).path).exists()


def test_files_of_others_in_the_folder_of_what_is_being_written_stay(root: Path) -> None:
    """Other programs call a folder `partial`, too; what a killed writer of ours left there goes all the same."""
    mine, ours = root / "partial" / "download.part", root / "partial" / "17.123456"
    mine.write_text("half")
    (root / "partial" / "more").mkdir()
    ours.write_bytes(b"x" * 5000)
    warnings: list[str] = []
    store = open_store(root, warnings.append)
    store.put(SPACE, make_record(3))
    assert store.flush(30) and store.close(60) == 0
    assert warnings == [] and mine.read_text() == "half" and (root / "partial" / "more").is_dir()
    assert not ours.exists() and store.statistics().nbytes < 10 * 5000


def test_a_lock_of_another_program_is_not_written_over(root: Path) -> None:
    (root / "lock").write_text("process 17 has this folder")
    warnings: list[str] = []
    store = open_store(root, warnings.append)
    store.put(SPACE, make_record(3))
    assert store.get(SPACE, name_of(2)) is not None and store.close(60) == 0
    assert len(warnings) == 1 and "'lock' in it is another program's" in warnings[0]
    assert (root / "lock").read_text() == "process 17 has this folder"


def test_names_of_another_version_of_the_program_stay(root: Path) -> None:
    """E08: an older program that opens the folder of a newer one neither uses its sessions nor deletes them."""
    text = (root / name_of(2).path).read_bytes()
    newer = root / "names" / f"{'a' * 64}.root.session.safetensors"
    newer.parent.mkdir()
    newer.write_bytes(text.replace(f'"version":"{VERSION}"'.encode(), f'"version":"{VERSION + 1}"'.encode(), 1))
    damaged = newer.with_name(f"{'b' * 64}.root.session.safetensors")
    damaged.write_bytes(text[:-1])
    report = listing.read_folder(root)
    assert (report.damaged, report.of_other_versions) == (1, 1)
    store = open_store(root)
    space = listing.NAMES
    assert [store.get(space, name) for name in store.names(space.path)] == [None, None]
    assert store.statistics().refused == {"other_version": 1, "truncated": 1}
    assert store.flush(30) and store.close(60) == 0
    assert newer.exists() and not damaged.exists()
