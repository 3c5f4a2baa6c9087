"""From what the user typed to a checkpoint folder.

In this order: a folder that exists; a GGUF file that exists; something that can only be a path (an error when nothing
is there); a catalogue name; a hub id. A folder or file on disk never causes a network call.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.checkpoint.catalogue import CATALOGUE
from polytoken.checkpoint.config import CONFIG
from polytoken.checkpoint.files import read_table
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.store import CheckpointStore
from polytoken.errors import CheckpointError

HUB_PATTERNS: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*")
LONGEST_NAME: Final = 4095  # characters of a path, and of anything else that names a model
PROBE_TIMEOUT_S: Final = 20.0  # for the one question whether the hub answers; name look-ups have no limit of their own
_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_LONGEST_ID: Final = 96
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_DRIVE: Final = re.compile(r"[A-Za-z]:[\\/]")


@dataclass(frozen=True)
class Resolved:
    """Where a model lies.

    Attributes:
        directory: the checkpoint folder.
        name: short name for reports.
        kind: "directory", "gguf", "catalogue" or "hub".
        revision: the commit of a hub snapshot, else None.
    """

    directory: Path
    name: str
    kind: str
    revision: str | None = None


def looks_like_path(model: str) -> bool:
    """Whether `model` can only be meant as a path, so that it must exist and is never asked for elsewhere."""
    if model.startswith(("/", "./", "../", "~", ".\\", "..\\", "\\")) or model in (".", ".."):
        return True
    if _DRIVE.match(model) or "\\" in model or model.endswith("/"):
        return True
    return model.lower().endswith((".gguf", ".safetensors", ".json")) or model.count("/") > 1


def resolve(
    model: str | Path,
    *,
    store: CheckpointStore,
    revision: str | None = None,
    offline: bool = False,
    progress: Progress = silent,
) -> Resolved:
    """Find the checkpoint folder for what the user named.

    Args:
        model: a folder, a `.gguf` file, a catalogue name, or a hub id `org/name[@revision]`.
        store: where pulled models are and converted GGUF files go.
        revision: branch, tag or commit of a hub id; may not contradict one written behind `@`.
        offline: look into the hub's local cache only.
        progress: for the conversion of a GGUF file or a download.

    Raises:
        CheckpointError: `missing_path`, `not_a_checkpoint`, `not_pulled` (the text names the command), `unknown_model`,
            `bad_revision`, `not_cached`, `missing_file`, `no_network`, `hub_refused`.
    """
    text = str(model)
    if not text.strip():
        raise CheckpointError("no model is named; give a folder, a hub id or a catalogue name", code="unknown_model")
    if len(text) > LONGEST_NAME or "\0" in text:
        raise CheckpointError(
            f"no model is called {text[:40]!r}... ({len(text)} characters): no file system has such a name; give a "
            "folder, a hub id or a catalogue name",
            code="unknown_model",
            field="model",
        )
    # `~` alone is expanded: "~user" and a file that merely starts with a tilde stay as they are.
    path = Path(text).expanduser() if text == "~" or text.startswith("~/") else Path(text)
    if _exists(path) or isinstance(model, Path) or looks_like_path(text):
        return _resolve_path(path, store=store, progress=progress)
    if text in CATALOGUE:
        directory = store.path(text)
        if directory is None:
            raise CheckpointError(
                f"{text} is not on this machine yet; run `polytoken pull {text}`", code="not_pulled", field="model"
            )
        return Resolved(directory=directory, name=text, kind="catalogue")
    if (directory := store.path(text)) is not None:
        return Resolved(directory=directory, name=text, kind="gguf")
    repo, at, pinned = text.partition("@")
    if (at and not pinned) or revision == "":
        raise CheckpointError(
            f"{text!r} names an empty revision; give a branch, tag or commit, or leave it out",
            code="bad_revision",
            field="revision",
        )
    if at and revision is not None and revision != pinned:
        raise CheckpointError(
            f"{text!r} and revision {revision!r} contradict each other; give one revision",
            code="bad_revision",
            field="revision",
        )
    refused = ".." in repo or "--" in repo or repo.endswith(("-", ".", ".git")) or len(repo) > _LONGEST_ID
    if _HUB_ID.fullmatch(repo) is None or refused:  # what the hub's client would refuse, in its own words
        raise _unknown(text)
    return _resolve_hub(repo, revision=pinned or revision, offline=offline, progress=progress)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # one part of it is longer than a file's name may be
        return False


def _unknown(text: str) -> CheckpointError:
    close = difflib.get_close_matches(text, CATALOGUE, n=1)
    hint = f"did you mean {close[0]}?" if close else f"the catalogue has {', '.join(CATALOGUE)}"
    return CheckpointError(
        f"no model is called {text!r}: it is no folder here, no catalogue name and no hub id (org/name); {hint}",
        code="unknown_model",
        field="model",
    )


def _resolve_path(path: Path, *, store: CheckpointStore, progress: Progress) -> Resolved:
    if not _exists(path):
        raise CheckpointError(f"no such file or folder: {path}", code="missing_path", field="model")
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise CheckpointError(
                f"{path} is a folder without {CONFIG}; give the folder that holds the model's files",
                code="not_a_checkpoint",
                field="model",
            )
        return Resolved(directory=path, name=path.resolve().name, kind="directory")
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise CheckpointError(
                f"{path} is not a GGUF file; give a .gguf file or the folder that holds the model's files",
                code="not_a_checkpoint",
                field="model",
            )
        directory = store.add_gguf(path, progress=progress)
        return Resolved(directory=directory, name=path.stem, kind="gguf")
    raise CheckpointError(f"no such file or folder: {path}", code="missing_path", field="model")


def _within(seconds: float, work: Callable[[], Any]) -> Any:
    """The result of `work`, or TimeoutError; a call that hangs is left behind on a daemon thread."""
    result: list[Any] = []
    fault: list[BaseException] = []

    def run() -> None:
        try:
            result.append(work())
        except BaseException as error:
            fault.append(error)

    thread = threading.Thread(target=run, name="hub-probe", daemon=True)
    thread.start()
    thread.join(seconds)
    if fault:
        raise fault[0]
    if not result:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    return result[0]


def _resolve_hub(repo: str, *, revision: str | None, offline: bool, progress: Progress) -> Resolved:
    """A snapshot of a hub repository: from the cache when that is allowed to be enough, else fetched."""
    import huggingface_hub as hub  # noqa: PLC0415  (half a second that a local folder need not pay)
    from huggingface_hub import constants, errors  # noqa: PLC0415  (no attribute of the package before that)

    shown = f"{repo}@{revision}" if revision else repo
    offline = offline or constants.is_offline_mode()
    unreachable: Exception | None = None
    pinned = revision is not None and _COMMIT.fullmatch(revision) is not None
    if pinned and not offline:
        # A commit never changes: a complete snapshot of it needs no question.
        with contextlib.suppress(CheckpointError, errors.LocalEntryNotFoundError):
            return _check_snapshot(_snapshot(hub, repo, revision, local=True, progress=progress), repo, shown)
    if not offline:
        try:
            _within(
                PROBE_TIMEOUT_S,
                lambda: hub.HfApi().repo_info(repo, revision=revision, timeout=PROBE_TIMEOUT_S / 2),
            )
        except errors.RevisionNotFoundError:
            raise CheckpointError(
                f"the hub's {repo} has no revision {revision!r}", code="bad_revision", field="revision"
            ) from None
        except errors.GatedRepoError:
            raise CheckpointError(
                f"the hub asks for an accepted licence before it gives out {repo}; accept it there and log in with "
                "the hub's own client",
                code="hub_refused",
                field="model",
            ) from None
        except errors.RepositoryNotFoundError:
            raise CheckpointError(
                f"no model is called {shown!r}: there is no such folder here, and the hub has no such repository (or "
                "it is private and you are not logged in)",
                code="unknown_model",
                field="model",
            ) from None
        except Exception as fault:  # no route, no name, no answer: the cache may still do
            unreachable, offline = fault, True
    try:
        directory = _snapshot(hub, repo, revision, local=offline, progress=progress)
    except errors.IncompleteSnapshotError as fault:
        raise CheckpointError(
            f"the cached snapshot of {shown} is incomplete: {_first_line(fault)}; fetch it once while online",
            code="missing_file",
            field="model",
        ) from None
    except errors.LocalEntryNotFoundError:
        if unreachable is None:
            raise CheckpointError(
                f"{shown} is not in the hub's cache on this machine, and offline use is on; fetch it once while online",
                code="not_cached",
                field="model",
            ) from None
        raise CheckpointError(
            f"the hub cannot be reached for {shown} ({_first_line(unreachable)}), and it is not in the local cache; "
            "check the network or give a local folder",
            code="no_network",
            field="model",
        ) from None
    except OSError as fault:
        raise CheckpointError(
            f"{shown} could not be fetched ({type(fault).__name__}: {_first_line(fault)})",
            code="no_network",
            field="model",
        ) from None
    return _check_snapshot(directory, repo, shown)


def _first_line(fault: BaseException) -> str:
    lines = str(fault).strip().splitlines()
    return (lines[0] if lines else type(fault).__name__)[:300]


def _snapshot(hub: Any, repo: str, revision: str | None, *, local: bool, progress: Progress) -> Path:
    return Path(
        hub.snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(HUB_PATTERNS),
            local_files_only=local,
            etag_timeout=10,
            tqdm_class=_reporting_bar(progress),
        )
    )


def _reporting_bar(progress: Progress) -> type:
    """A progress bar class for the hub's client that draws nothing and reports the bytes written."""
    from tqdm import tqdm  # type: ignore[import-untyped,unused-ignore]  # noqa: PLC0415  (the hub client brings it)

    class Bar(tqdm):  # type: ignore[misc,type-arg,unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            # Of the client's three bars (files, bytes received, bytes written) the last says how far the disk is.
            self.counts = kwargs.get("unit") == "B" and str(kwargs.get("desc", "")).startswith("Reconstructing")
            super().__init__(*args, **{**kwargs, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if self.counts and self.total:
                progress("download", int(min(self.n, self.total)), int(self.total), "bytes")
            return shown

    return Bar


class _Nowhere(io.TextIOBase):
    """A file that swallows what is written to it."""

    def write(self, text: str) -> int:
        return len(text)


def _check_snapshot(directory: Path, repo: str, shown: str) -> Resolved:
    """Refuse a snapshot that an interrupted download left incomplete, by the name of what is missing."""
    if not (directory / CONFIG).is_file():
        raise CheckpointError(
            f"the cached snapshot of {shown} lacks {CONFIG}; fetch it again while online",
            code="missing_file",
            field=CONFIG,
        )
    try:
        read_table(directory)
    except CheckpointError as fault:
        raise CheckpointError(
            f"the cached snapshot of {shown} is incomplete: {fault}", code=fault.code, field=fault.field
        ) from None
    return Resolved(directory=directory, name=repo.partition("/")[2], kind="hub", revision=directory.name)
