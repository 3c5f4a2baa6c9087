"""Conversations in files: read whole or not at all, replaced whole or not at all."""

from __future__ import annotations

import json
import os
import re
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from polytoken.errors import UsageError

FORMAT: Final = 2  # of saved conversations; 1 had no stream and is read, too
FOLDER: Final = "conversations"  # inside a session folder, or the user's cache folder
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True)
class SavedConversation:
    """What a file holds.

    Attributes:
        system: the system prompt, None for none.
        turns: user and assistant messages in order.
        model: identity of the checkpoint that answered, "" if the file does not say.
        stream: the ids that were committed, as `CommittedStream.to_record` gives them, or None.
    """

    system: str | None
    turns: list[dict[str, str]]
    model: str = ""
    stream: dict[str, Any] | None = None


def conversation_file(name: str, session_dir: Path | None) -> Path:
    """Where the conversation of this name is kept."""
    if _NAME.fullmatch(name) is None:
        raise UsageError(
            f"--session: {name!r} is no name; use letters, digits, dots, dashes and underscores, 64 at most",
            field="--session",
        )
    return conversations_folder(session_dir) / f"{name}.json"


def conversations_folder(session_dir: Path | None) -> Path:
    """Where named conversations are kept."""
    if session_dir is not None:
        return session_dir.expanduser() / FOLDER
    from polytoken.checkpoint.store import default_cache_root  # noqa: PLC0415

    return default_cache_root() / FOLDER


def conversation_names(folder: Path) -> list[str]:
    """Names of the conversations kept in a folder, the latest first."""
    with suppress(OSError):
        files = [path for path in folder.glob("*.json") if _NAME.fullmatch(path.stem)]
        return [path.stem for path in sorted(files, key=lambda path: path.stat().st_mtime, reverse=True)]
    return []


def write_conversation(path: Path, saved: SavedConversation) -> None:
    """Put the conversation in place of the file; a reader sees the old one or the new one, also after a crash.

    Raises:
        UsageError: what the system has against it.
    """
    record = {"format": FORMAT, "model": saved.model, "system": saved.system, "messages": saved.turns}
    text = json.dumps({**record, "stream": saved.stream}, ensure_ascii=False, indent=1) + "\n"
    partial: str | None = None
    try:
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    except OSError as error:
        if partial is not None:
            with suppress(OSError):
                Path(partial).unlink()
        raise UsageError(f"cannot write {str(path)!r}: {error.strerror or error}") from None


def read_conversation(path: Path) -> SavedConversation:
    """The conversation in a file.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    name = str(path)
    try:
        record = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {name!r}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{name!r} is not JSON: {error}") from None
    wrong = UsageError(f"{name!r} is not a conversation that chat wrote")
    if not isinstance(record, dict) or record.get("format") not in (1, FORMAT):
        raise wrong
    system, messages = record.get("system"), record.get("messages")
    model, stream = record.get("model", ""), record.get("stream")
    if not isinstance(system, str | None) or not isinstance(messages, list):
        raise wrong
    if not isinstance(model, str) or not isinstance(stream, dict | None):
        raise wrong
    for item in messages:
        if not isinstance(item, dict) or not all(isinstance(item.get(key), str) for key in ("role", "content")):
            raise wrong
    turns = [{"role": item["role"], "content": item["content"]} for item in messages]
    return SavedConversation(system, turns, model, stream)
