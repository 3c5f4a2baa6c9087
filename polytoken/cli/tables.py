"""Columns on stdout: a table on a terminal, aligned text that is never cut in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polytoken.cli.output import write

_GAP: Final = "  "


@dataclass(frozen=True)
class Column:
    """A heading, and whether its values stand at the right."""

    title: str
    right: bool = False


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print rows under headings; columns without any value are left out."""
    kept = [index for index in range(len(columns)) if any(row[index] for row in rows)]
    columns = [columns[index] for index in kept]
    rows = [[printable(row[index]) for index in kept] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console  # noqa: PLC0415
        from rich.table import Table  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        table = Table(box=None, pad_edge=False)
        for column in columns:
            table.add_column(column.title, justify="right" if column.right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(value) for value in row))
        Console().print(table)
        return
    lines = [[column.title for column in columns], *rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for line in lines:
        cells = [
            value.rjust(width) if column.right else value.ljust(width)
            for value, width, column in zip(line, widths, columns, strict=True)
        ]
        write(_GAP.join(cells).rstrip() + "\n")


def print_fields(fields: Sequence[tuple[str, str]]) -> None:
    """Print names and values, one pair a line."""
    width = max(len(name) for name, _ in fields)
    for name, value in fields:
        write(f"{name.ljust(width)}{_GAP}{printable(value)}\n")


def printable(text: str) -> str:
    """The text on one line and without what steers a terminal: such characters are spelled as in Python."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def size_text(count: int) -> str:
    """Bytes in the unit that fits."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def count_text(count: int) -> str:
    """A number of weights in thousands, millions or billions."""
    for limit, unit in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= limit:
            return f"{count / limit:.1f} {unit}"
    return str(count) if count else ""
