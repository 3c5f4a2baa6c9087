"""Progress of a download, a conversion or a load, drawn on stderr when someone looks."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from polytoken.checkpoint.progress import Progress

_TITLES: Final = {
    "download": "Downloading",
    "verify": "Checking",
    "unpack": "Unpacking",
    "convert": "Converting",
    "hash": "Hashing",
    "load": "Loading",
}


@contextmanager
def show_progress(*, verbose: bool = False, runs: bool = False) -> Iterator[Progress]:
    """A callback for work that reports itself: bars on a terminal, lines with `verbose`, or nothing.

    With `runs`, measured runs get a line each where there is no terminal: they take minutes.
    """
    if sys.stderr.isatty():
        with _bars() as progress:
            yield progress
    else:
        yield _Lines(runs=runs) if verbose else _tell_runs if runs else _ignore


@contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on a terminal; what is said beside it can be changed by the function that is given."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console  # noqa: PLC0415

    with Console(stderr=True).status(what) as status:
        yield status.update


@contextmanager
def _bars() -> Iterator[Progress]:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import (  # noqa: PLC0415
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        ProgressColumn,
        TaskID,
        TextColumn,
        TimeElapsedColumn,
        TransferSpeedColumn,
    )
    from rich.progress import Progress as Bars  # noqa: PLC0415

    console = Console(stderr=True)
    columns: dict[str, tuple[ProgressColumn, ...]] = {
        "bytes": (DownloadColumn(), TransferSpeedColumn()),
        "tensors": (MofNCompleteColumn(),),
    }
    shown: Bars | None = None
    task = TaskID(0)
    current = ""

    def report(stage: str, done: int, total: int, unit: str) -> None:
        nonlocal shown, task, current
        title, kind = _TITLES.get(stage, stage.capitalize()), stage.partition(" ")[0]
        if shown is None or kind != current:  # one bar at a time: stages follow one another
            if shown is not None:
                shown.stop()
            current = kind
            shown = Bars(
                TextColumn("{task.description}"), BarColumn(), *columns.get(unit, columns["tensors"]),
                TimeElapsedColumn(), console=console, transient=True,
            )  # fmt: skip
            shown.start()
            task = shown.add_task(title, total=total or None)
        shown.update(task, description=title, completed=done, total=total or None)

    try:
        yield report
    finally:
        if shown is not None:
            shown.stop()


class _Lines:
    """One line for every finished stage, and for every run that begins if `runs` says so."""

    def __init__(self, *, runs: bool) -> None:
        self._told: set[str] = set()
        self._runs = runs

    def __call__(self, stage: str, done: int, total: int, unit: str) -> None:
        if self._runs:
            _tell_runs(stage, done, total, unit)
        if total and done >= total and stage not in self._told:
            self._told.add(stage)
            amount = f"{total / (1 << 20):.0f} MiB" if unit == "bytes" else f"{total} {unit}"
            print(f"polytoken: {_TITLES.get(stage, stage).lower()}: {amount}", file=sys.stderr, flush=True)


def _tell_runs(stage: str, done: int, total: int, unit: str) -> None:
    if unit == "runs" and done < total:
        print(f"polytoken: {stage}: run {done + 1} of {total}", file=sys.stderr, flush=True)


def _ignore(stage: str, done: int, total: int, unit: str) -> None:
    """Nobody looks."""
