"""`polytoken sessions`: what a session folder holds, and how to be rid of it."""

from __future__ import annotations

import datetime
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.chat_files import conversation_names, conversations_folder
from polytoken.cli.output import say, write_json
from polytoken.cli.tables import Column, print_fields, print_table, size_text
from polytoken.errors import UsageError

if TYPE_CHECKING:
    from polytoken.cache.disk.listing import FolderReport, SessionReport

sessions = typer.Typer(
    name="sessions",
    help="List, show and clear saved sessions: polytoken sessions list --session-dir DIR.",
    no_args_is_help=True,
)

Folder = Annotated[
    Path,
    typer.Option("--session-dir", metavar="DIR", help="The folder that was named when chatting.", show_default=False),
]


@sessions.command("list")
def list_sessions(*, session_dir: Folder, json: flags.Json = False) -> None:
    """List the named sessions and snapshots in a folder, the most recently used first."""
    report = _read(session_dir)
    if json:
        write_json({"session_dir": str(session_dir), **report.as_json(), "conversations": _conversations(session_dir)})
        return
    if not report.sessions:
        say("note", f"no named sessions in {session_dir}")
    else:
        columns = (Column("name"), Column("kind"), Column("model"), Column("tokens", right=True),
                   Column("stored", right=True), Column("size", right=True), Column("last used"))  # fmt: skip
        rows = [
            (
                each.name,
                each.kind,
                each.model,
                str(each.tokens),
                str(each.stored_tokens),
                size_text(each.bytes),
                _date(each.used),
            )
            for each in report.sessions
        ]
        print_table(columns, rows)
    if texts := _conversations(session_dir):
        say("note", f"conversations of chat, to go on with --session NAME: {', '.join(texts)}")
    say("note", _describe(report))


@sessions.command("show")
def show_session(
    *,
    name: Annotated[str, typer.Argument(help="A name that `polytoken sessions list` lists.", show_default=False)],
    session_dir: Folder,
    json: flags.Json = False,
) -> None:
    """Show one session or snapshot: where it stands, what of it is stored, and what its states depend on."""
    found = [each for each in _read(session_dir).sessions if each.name == name]
    if not found:
        raise _unknown(name, session_dir)
    if json:
        write_json([each.as_json() for each in found])
        return
    for each in found:
        print_fields(_fields(each))


@sessions.command("clear")
def clear(
    *,
    name: Annotated[
        str | None, typer.Argument(help="The session; leave it out with --all.", show_default=False)
    ] = None,
    session_dir: Folder,
    everything: Annotated[bool, typer.Option("--all", help="Every session, and states without a name.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete a name (session, snapshot and conversation), or all of them. What other names stand on stays."""
    from polytoken.cache.disk.listing import clear_sessions  # noqa: PLC0415

    if (name is None) != everything:
        raise UsageError("name one session, or give --all", field="--all")
    report, texts = _read(session_dir), _conversations(session_dir)
    if name is not None and name not in {*(each.name for each in report.sessions), *texts}:
        raise _unknown(name, session_dir)
    if not (report.sessions or report.records or report.damaged or report.of_other_versions or texts):
        say("note", f"nothing to clear in {session_dir}")
        return
    if not yes:
        if not sys.stdin.isatty():
            raise UsageError("--yes is needed where nobody can be asked", field="--yes")
        what = f"everything in {session_dir} ({size_text(report.bytes)})" if name is None else f"session {name!r}"
        typer.confirm(f"Delete {what}?", abort=True)
    try:
        for text in texts if name is None else {name}.intersection(texts):
            (conversations_folder(session_dir) / f"{text}.json").unlink(missing_ok=True)
        cleared, freed = clear_sessions(session_dir.expanduser(), None if name is None else {name})
    except OSError as error:
        raise _unusable(session_dir, error) from None
    say("note", f"{cleared} session{'' if cleared == 1 else 's'} deleted, {size_text(freed)} freed")


def _read(session_dir: Path) -> FolderReport:
    from polytoken.cache.disk.listing import read_folder  # noqa: PLC0415

    folder = session_dir.expanduser()
    try:
        if not folder.exists():
            raise UsageError(f"--session-dir: there is no folder {session_dir}", field="--session-dir")
        if not folder.is_dir():
            raise UsageError(f"--session-dir: {session_dir} is no folder", field="--session-dir")
        return read_folder(folder)
    except OSError as error:
        raise _unusable(session_dir, error) from None


def _conversations(session_dir: Path) -> list[str]:
    """Names of the conversations that chat keeps in the folder, beside their states."""
    return conversation_names(conversations_folder(session_dir))


def _unknown(name: str, session_dir: Path) -> UsageError:
    return UsageError(
        f"there is no session {name!r} in {session_dir}; see `polytoken sessions list`",
        code="unknown_session",
    )


def _unusable(session_dir: Path, error: OSError) -> UsageError:
    return UsageError(f"--session-dir: cannot use {session_dir}: {error.strerror or error}", field="--session-dir")


def _describe(report: FolderReport) -> str:
    parts = [f"{size_text(report.bytes)} in {report.records} records"]
    if report.unnamed_bytes:
        parts.append(f"{size_text(report.unnamed_bytes)} of them in no named session")
    if report.damaged:
        parts.append(f"{report.damaged} damaged, to be written anew or cleared")
    if report.of_other_versions:
        parts.append(f"{report.of_other_versions} names of another version of this program")
    return ", ".join(parts)


def _fields(each: SessionReport) -> list[tuple[str, str]]:
    missing = each.tokens - each.stored_tokens
    stored = f"{each.stored_tokens}" + (f" ({missing} to be computed again)" if missing > 0 else "")
    return [
        ("name", each.name),
        ("kind", each.kind),
        ("model", each.model),
        ("last used", _date(each.used)),
        ("tokens", str(each.tokens)),
        ("stored", stored),
        ("size", size_text(each.bytes)),
        ("shared", size_text(each.shared_bytes)),
        *((key, str(value)) for key, value in each.identity.items() if value is not None),
    ]


def _date(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
