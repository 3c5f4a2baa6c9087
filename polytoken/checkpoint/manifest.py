"""What a complete checkpoint directory says about itself, so that a half-made or altered one is never believed.

Two spellings are read: `polytoken.json`, which conversions write, and `export_manifest.json`, which training exports
carry (schema 25).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.checkpoint.progress import Progress, silent
from polytoken.errors import CheckpointError

MANIFEST: Final = "polytoken.json"
EXPORT_MANIFEST: Final = "export_manifest.json"
FORMAT: Final = 1
EXPORT_SCHEMA: Final = 25
_BLOCK: Final = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """Size and SHA-256 of one file of the checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """A checkpoint's own description.

    Attributes:
        kind: "polytoken" or "export".
        source: where the weights came from; free-form, JSON values only.
        files: name -> size and hash of every other file of the directory.
        tensor_count: tensors in the weight files, packed parts counted one by one.
        dtype: dtype of the weights, or of the scales when they are packed.
        quantisation: human description, or None for plain weights.
        parameters: number of weights, tied ones once; 0 when the manifest does not say.
        step: training step of an export, else 0.
    """

    kind: str
    source: Mapping[str, Any]
    files: Mapping[str, FileRecord]
    tensor_count: int
    dtype: str
    quantisation: str | None
    parameters: int
    step: int

    def as_json(self) -> dict[str, Any]:
        """The record as written to `polytoken.json`."""
        return {
            "format": FORMAT,
            "made_by": "polytoken",
            "source": dict(self.source),
            "files": {name: {"bytes": f.bytes, "sha256": f.sha256} for name, f in sorted(self.files.items())},
            "tensor_count": self.tensor_count,
            "dtype": self.dtype,
            "quantisation": self.quantisation,
            "parameters": self.parameters,
            "step": self.step,
        }


def hash_file(path: Path, *, progress: Progress = silent, stage: str = "hash") -> str:
    """SHA-256 of a file in hex, read in blocks."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            done += len(block)
            progress(stage, done, total, "bytes")
    return digest.hexdigest()


def describe_files(directory: Path, *, progress: Progress = silent) -> dict[str, FileRecord]:
    """Size and hash of every plain file in `directory` except the manifest."""
    return {
        path.name: FileRecord(bytes=path.stat().st_size, sha256=hash_file(path, progress=progress))
        for path in sorted(directory.iterdir())
        if path.is_file() and path.name != MANIFEST
    }


def _parse_files(raw: Any) -> dict[str, FileRecord]:
    if isinstance(raw, dict):
        items = [(name, value) for name, value in raw.items()]
    elif isinstance(raw, list):
        items = [(value.get("name"), value) for value in raw if isinstance(value, dict)]
    else:
        raise ValueError("files")
    files: dict[str, FileRecord] = {}
    for name, value in items:
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
            raise ValueError(f"file name {name!r}")
        files[name] = FileRecord(bytes=int(value["bytes"]), sha256=str(value.get("sha256", "")))
    return files


def read_manifest(directory: Path) -> Manifest | None:
    """The manifest of a checkpoint directory, or None when it carries none.

    Raises:
        CheckpointError: `bad_manifest` for unreadable content or an unknown schema.
    """
    for name, kind, key, known in (
        (MANIFEST, "polytoken", "format", FORMAT),
        (EXPORT_MANIFEST, "export", "schema", EXPORT_SCHEMA),
    ):
        path = directory / name
        if not path.is_file():
            continue
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(raw, dict):
                raise ValueError("not an object")
            version = raw.get(key)
            if version != known:
                raise CheckpointError(
                    f"{path} has {key} {version!r}; this version of polytoken reads {known}",
                    code="bad_manifest",
                    field=name,
                )
            return Manifest(
                kind=kind,
                source=dict(raw.get("source") or {}),
                files=_parse_files(raw.get("files", {})),
                tensor_count=int(raw.get("tensor_count", 0)),
                dtype=str(raw.get("dtype", "")),
                quantisation=raw.get("quantisation"),
                parameters=int(raw.get("parameters", 0)),
                step=int(raw.get("step", 0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as fault:
            raise CheckpointError(
                f"{path} cannot be read as a manifest ({fault})", code="bad_manifest", field=name
            ) from None
    return None


def way_back(manifest: Manifest) -> str:
    """How to get a damaged model whole again."""
    name = manifest.source.get("name")
    if manifest.source.get("kind") == "catalogue" and name:
        return f"run `polytoken pull {name} --force`"
    if manifest.source.get("kind") == "gguf":
        return "delete the folder and name the GGUF file again"
    return "fetch the model again"


def check_files(
    directory: Path,
    manifest: Manifest,
    *,
    hashes: bool = False,
    known: Mapping[str, str] | None = None,
    progress: Progress = silent,
) -> None:
    """Hold the directory against its manifest: names and sizes always, contents when `hashes`.

    With `known`, hashes by file name that were computed already, only those contents are compared.

    Raises:
        CheckpointError: `missing_file`, or `damaged_file` when size or hash differ.
    """
    for name, record in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing although the manifest lists it; restore the file or fetch the model again",
                code="missing_file",
                field=name,
            )
        size = path.stat().st_size
        if size != record.bytes:
            raise CheckpointError(
                f"{path} has {size} bytes where the manifest says {record.bytes}; {way_back(manifest)}",
                code="damaged_file",
                field=name,
            )
        found = hash_file(path, progress=progress) if hashes and record.sha256 else (known or {}).get(name)
        if record.sha256 and found is not None and found != record.sha256.lower():
            raise CheckpointError(
                f"{path} is damaged: its content is not what {directory.name}'s manifest promises; "
                f"{way_back(manifest)}",
                code="damaged_file",
                field=name,
            )
