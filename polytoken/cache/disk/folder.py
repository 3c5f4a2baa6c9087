"""A session folder that several processes use at once, killed ones among them: its lock, its budget, its atomic files.

Layout under the root:

    lock                                            held (flock) by whoever changes anything; 16 bytes, new each time
    partial/PROCESS.TIME                            what is being written; a killed writer's goes with the next write
    vFORMAT/IDENTITY/KEY.PARENT.HINT.safetensors    records
    names/KEY.root.session.safetensors              named sessions

A file gets its name by one rename after its bytes are on the disk, so whatever bears a name is whole. Only the holder
of the lock writes, and it makes room before it does, so the bytes of all files stay within the limit at every instant.
Reading takes no lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

from polytoken.cache.disk.index import LOCK, MARK, NAMES, PARTIAL, FileName, Index, charge, partial_files, scan
from polytoken.cache.disk.names import SNAPSHOT, read_name
from polytoken.cache.disk.record import RecordFault, open_file, read_header

_POLL_SECONDS: Final = 0.01
_STAMP_BYTES: Final = 16
_PIECE: Final = 1 << 20  # bytes written between two looks at whether to stop


class Stopped(Exception):  # noqa: N818  (no error)
    """The work was given up because the owner is closing."""


def never() -> bool:
    """The `stop` of work that is never given up."""
    return False


class Folder:
    """One process's view of a session folder. `index` may be behind what other processes did, until `locked`.

    Not safe for several threads, but for reading files.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.index = Index()
        self._stamp = b""
        self._told: dict[FileName, tuple[int, tuple[tuple[str, str], ...]]] = {}  # by snapshot: time, spaces and keys

    def refresh(self) -> None:
        """Look at the folder anew. Raises OSError if it cannot be read."""
        self.index = scan(self.root)

    @contextlib.contextmanager
    def locked(self, stop: Callable[[], bool] = never) -> Iterator[bool]:
        """Hold the folder for changes, with an index that is true; whether it had to be read anew for that.

        Raises OSError if the folder cannot be written, and Stopped when `stop` says so while another holds it.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        handle = self._acquire(stop)
        try:
            stale = not self._stamp or os.pread(handle, _STAMP_BYTES, 0) != self._stamp
            if stale:
                self.refresh()
            # From here on, should this process die, everybody looks anew.
            stamp = os.urandom(_STAMP_BYTES)
            os.pwrite(handle, stamp, 0)
            self._stamp = b""
            self._sweep()
            yield stale
            self._stamp = stamp
        finally:
            os.close(handle)

    def _acquire(self, stop: Callable[[], bool]) -> int:
        path = self.root / LOCK
        while True:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
            try:
                _check_lock(handle)
                while not _try_lock(handle):
                    if stop():
                        raise Stopped
                    time.sleep(_POLL_SECONDS)
                if _same_file(handle, path):  # or else somebody removed the folder meanwhile
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)

    def _sweep(self) -> None:
        """Delete what killed writers left: nobody but the holder of the lock writes."""
        for entry in partial_files(self.root):
            size = entry.stat(follow_symlinks=False).st_size
            Path(entry.path).unlink()
            self.index.charged = max(0, self.index.charged - charge(size))

    # What follows needs the lock

    def make_room(
        self, size: int, limit: int, *, keep: FileName | None = None, waiting: Iterable[FileName] = ()
    ) -> list[FileName] | None:
        """Delete the least recently used records until a file of `size` bytes fits; which went.

        What records that are `waiting` to be written continue goes after all others, and after that what named
        snapshots stand on: the newest of them, up to half the limit, so that old ones don't stop the rest. None, and
        nothing goes, if it cannot fit beside `keep` and what that continues.
        """
        kept = frozenset() if keep is None else frozenset(self.index.path_to(keep))
        held = sum(self.index.item(name).charged for name in kept if name in self.index)
        if held + charge(size) > limit:
            return None
        dropped: list[FileName] = []
        victims = self._victims(kept, waiting, most=limit // 2)
        while self.index.charged + charge(size) > limit:
            name = next(victims, None)
            if name is None:
                return None  # what is left are names and foreign bytes, not records
            if self._used_elsewhere(name):
                continue
            self.remove(name)
            dropped.append(name)
        return dropped

    def _victims(self, kept: frozenset[FileName], waiting: Iterable[FileName], *, most: int) -> Iterator[FileName]:
        pinned = kept | self._pinned(most)
        yield from self.index.victims(pinned.union(*map(self.index.path_to, waiting)))
        yield from self.index.victims(pinned)
        yield from self.index.victims(kept)

    def _pinned(self, most: int) -> frozenset[FileName]:
        """The records of the newest named snapshots and of their states, which take at most `most` bytes."""
        found: set[FileName] = set()
        for name, item in reversed(self.index.items()):
            if name.space != NAMES or name.hint != SNAPSHOT:
                continue
            runs = self._runs_of(name, item.used)
            more = {name, *runs, *(each for run in runs for each in self.index.continuing(run) if each.hint == MARK)}
            if sum(self.index.item(each).charged for each in found | more) > most:
                break
            found |= more
        return frozenset(found)

    def _runs_of(self, name: FileName, used: int) -> list[FileName]:
        """The runs that a name's record tells of and that are here; nothing is read twice."""
        known = self._told.get(name)
        if known is None or known[0] != used:
            try:
                header = read_header(self.root / name.path)
                told = None if header is None else read_name(header.meta)
            except (OSError, RecordFault):
                told = None
            keys = () if told is None else tuple((told.space, key) for key in told.runs)
            known = self._told[name] = used, keys
        runs = (self.index.find(space, key) for space, key in known[1])
        return [run for run in runs if run is not None]

    def _used_elsewhere(self, name: FileName) -> bool:
        """Whether another process used the record since we last looked; it is then no longer among the oldest."""
        try:
            used = (self.root / name.path).stat().st_mtime_ns
        except FileNotFoundError:
            return False
        if used <= self.index.item(name).used:
            return False
        self.index.touch(name, used)
        return True

    def remove(self, name: FileName) -> bool:
        """Delete a record; whether it was there. What is no plain file of that name stays: it is not ours."""
        self.index.drop(name)
        path = self.root / name.path
        try:
            if not stat.S_ISREG(path.lstat().st_mode):
                return False
            path.unlink()
        except FileNotFoundError:
            return False
        with contextlib.suppress(OSError):  # not empty
            path.parent.rmdir()
        return True

    def remove_tree(self, name: FileName) -> list[FileName]:
        """Delete a record and all that continues it; which these were."""
        tree = self.index.tree(name)
        for each in reversed(tree):
            self.remove(each)
        return tree

    def write(
        self, name: FileName, pieces: Iterable[memoryview | bytes], size: int, *, stop: Callable[[], bool] = never
    ) -> None:
        """Write a record under its name; room for `size` bytes was made before. Raises OSError or Stopped."""
        self._write_file(self.root / name.path, pieces, stop)
        self.index.add(name, size, time.time_ns())

    def _write_file(self, path: Path, pieces: Iterable[memoryview | bytes], stop: Callable[[], bool]) -> None:
        partial = self.root / PARTIAL / f"{os.getpid()}.{time.monotonic_ns()}"
        partial.parent.mkdir(exist_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with partial.open("xb", buffering=0) as file:
                for piece in pieces:
                    _write_piece(file.fileno(), piece, stop)
                os.fsync(file.fileno())
            partial.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink()
            raise
        _sync_folder(path.parent)

    def touch(self, names: Iterable[FileName]) -> None:
        """Say on the disk that these were used now, the last one last. Needs no lock; what is gone is passed over."""
        for name in names:
            now = time.time_ns()
            with contextlib.suppress(OSError):
                os.utime(self.root / name.path, ns=(now, now))
            self.index.touch(name, now)


def _write_piece(handle: int, piece: memoryview | bytes, stop: Callable[[], bool]) -> None:
    view = memoryview(piece).cast("B") if len(piece) else memoryview(b"")
    while len(view):
        if stop():
            raise Stopped
        view = view[os.write(handle, view[:_PIECE]) :]


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _check_lock(handle: int) -> None:
    """Raise OSError if a file called `lock` was there before us: it is not written over."""
    status = os.fstat(handle)
    if not stat.S_ISREG(status.st_mode) or status.st_size not in (0, _STAMP_BYTES):
        raise OSError(errno.EEXIST, f"the {LOCK!r} in it is another program's")


def _same_file(handle: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    here = os.fstat(handle)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def explain(error: Exception) -> str:
    """Why the disk takes no more, in a few words."""
    if not isinstance(error, OSError):
        return f"internal error: {type(error).__name__}: {error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "the disk is full"
    return error.strerror or str(error)


def read_file(path: Path) -> bytes | None:
    """A file's bytes; None if it is not there. Raises OSError for what the system refuses."""
    try:
        with open_file(path) as file:
            return file.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
