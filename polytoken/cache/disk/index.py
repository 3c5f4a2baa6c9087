"""What lies in a session folder, by name and size alone, in order of use: no file is opened for it.

A record's file is called KEY.PARENT.HINT.safetensors in the folder of its format and identity, so a scan knows which
record continues which. What others continue is never dropped before them, so a chain stays usable from its beginning.
"""

from __future__ import annotations

import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

BLOCK: Final = 4096
"""A file is charged in whole blocks of this many bytes, as a file system does."""
_RECORD: Final = re.compile(r"([0-9a-f]{64})\.([0-9a-f]{16}|root)\.([0-9a-z]{1,16})\.safetensors")
_FORMAT_FOLDER: Final = re.compile(r"v[0-9]{1,6}")
_IDENTITY_FOLDER: Final = re.compile(r"[0-9a-f]{32}")
_PARTIAL_FILE: Final = re.compile(r"[0-9]+\.[0-9]+")
LOCK: Final = "lock"
NAMES: Final = "names"
PARTIAL: Final = "partial"
MARK: Final = "mark"
"""The hint of restore points."""


def charge(size: int) -> int:
    """What a file of `size` bytes counts for."""
    return -(-size // BLOCK) * BLOCK


@dataclass(frozen=True)
class FileName:
    """Where a record lies.

    Attributes:
        space: folder of the format and the identity, relative to the root.
        key: hex, 64 digits.
        parent: hex, the first 16 digits of the parent's key, or "root".
        hint: up to 16 digits and letters by which a reader chooses among the records that continue the same one.
    """

    space: str
    key: str
    parent: str
    hint: str

    @classmethod
    def of(cls, space: str, key: bytes, parent: bytes | None, hint: str) -> FileName:
        """The name of a record."""
        return cls(space, key.hex(), "root" if parent is None else parent.hex()[:16], hint)

    @property
    def path(self) -> str:
        """Relative to the root."""
        return f"{self.space}/{self.key}.{self.parent}.{self.hint}.safetensors"


@dataclass
class Item:
    """One file: what it is charged, and when it was last used (nanoseconds since the epoch)."""

    charged: int
    used: int


class Index:
    """The records of one folder, least recently used first.

    Attributes:
        charged: bytes charged for all records and all other files of ours.
    """

    def __init__(self) -> None:
        self._items: OrderedDict[FileName, Item] = OrderedDict()
        self._children: dict[tuple[str, str], set[FileName]] = {}
        self._short: dict[tuple[str, str], FileName] = {}
        self.charged = 0

    def __contains__(self, name: FileName) -> bool:
        return name in self._items

    def __len__(self) -> int:
        return len(self._items)

    def items(self) -> list[tuple[FileName, Item]]:
        """Names and items, least recently used first."""
        return list(self._items.items())

    def item(self, name: FileName) -> Item:
        """What is known of a file. Raises KeyError."""
        return self._items[name]

    def parent(self, name: FileName) -> FileName | None:
        """The record that this one continues, if it is here."""
        return self._short.get((name.space, name.parent))

    def find(self, space: str, key: str) -> FileName | None:
        """The record of a key (hex), if it is here."""
        name = self._short.get((space, key[:16]))
        return name if name is not None and name.key == key else None

    def add(self, name: FileName, size: int, used: int) -> None:
        """Note a file, as the most recently used."""
        self.drop(name)
        self._items[name] = Item(charge(size), used)
        self._short[name.space, name.key[:16]] = name
        self._children.setdefault((name.space, name.parent), set()).add(name)
        self.charged += charge(size)

    def drop(self, name: FileName) -> None:
        """Forget a file, if it is known."""
        item = self._items.pop(name, None)
        if item is not None:
            self._short.pop((name.space, name.key[:16]), None)
            family = self._children[name.space, name.parent]
            family.discard(name)
            if not family:
                del self._children[name.space, name.parent]
            self.charged -= item.charged

    def touch(self, name: FileName, used: int) -> None:
        """Make a file the most recently used, if it is known."""
        item = self._items.get(name)
        if item is not None:
            item.used = used
            self._items.move_to_end(name)

    def path_to(self, name: FileName) -> list[FileName]:
        """The record and those that it continues, as far as they are here; itself first."""
        path: list[FileName] = []
        at: FileName | None = name
        while at is not None and at not in path[-1:]:
            path.append(at)
            at = self.parent(at)
        return path

    def continuing(self, name: FileName) -> list[FileName]:
        """The records that continue this one."""
        return list(self._children.get((name.space, name.key[:16]), ()))

    def tree(self, name: FileName) -> list[FileName]:
        """The record, if it is here, and all that continues it; what continues others comes after them."""
        found = [name]
        for each in found:  # grows meanwhile
            found.extend(self.continuing(each))
        return found

    def victims(self, keep: frozenset[FileName]) -> Iterator[FileName]:
        """What to drop, one after the other: the least recently used that nothing continues, never one of `keep`.

        Drop each before asking for the next.
        """
        while True:
            found = next(
                (n for n in self._items if n not in keep and (n.space, n.key[:16]) not in self._children), None
            )
            if found is None:
                return
            yield found


def scan(root: Path) -> Index:
    """The index of a folder as it is now. Files that come or go meanwhile may or may not be in it.

    Records whose parent is missing cannot be reached, and go first. Raises OSError if the folder cannot be read.
    """
    index = Index()
    found: list[tuple[int, FileName, int]] = []
    for path, entry in our_files(root):
        status = _status(entry)
        if status is None:
            continue
        match = _RECORD.fullmatch(entry.name)
        if match is None:
            index.charged += charge(status.st_size)
        else:
            found.append((status.st_mtime_ns, FileName(path, match[1], match[2], match[3]), status.st_size))
    keys = {(name.space, name.key[:16]) for _, name, _ in found}
    found.sort(key=lambda each: (each[1].parent == "root" or (each[1].space, each[1].parent) in keys, each[0]))
    for used, name, size in found:
        index.add(name, size, used)
    return index


def our_files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All files that belong to a session folder, records, names and what is being written, and their folders' paths.

    Whatever else lies there, links and folders of such names among it, is not ours: it is neither counted nor ever
    deleted.
    """
    for top in _entries(root):
        if _FORMAT_FOLDER.fullmatch(top.name):
            for space in _entries(top.path):
                if _IDENTITY_FOLDER.fullmatch(space.name):
                    for entry in _files(space.path, _RECORD):
                        yield f"{top.name}/{space.name}", entry
        elif top.name == LOCK and _is_plain(top):
            yield "", top
        elif top.name == NAMES:
            for entry in _files(top.path, _RECORD):
                yield NAMES, entry
    for entry in partial_files(root):
        yield PARTIAL, entry


def partial_files(root: Path) -> list[os.DirEntry[str]]:
    """What is being written, or was when its writer was killed."""
    return _files(root / PARTIAL, _PARTIAL_FILE)


def _files(folder: str | Path, name: re.Pattern[str]) -> list[os.DirEntry[str]]:
    return [entry for entry in _entries(folder) if name.fullmatch(entry.name) and _is_plain(entry)]


def _is_plain(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False)


def _entries(folder: str | Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
