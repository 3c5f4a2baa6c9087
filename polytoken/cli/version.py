"""`polytoken version` and `--version`."""

from __future__ import annotations

import typer

from polytoken import __version__
from polytoken.cli.output import write


def version() -> None:
    """Print the version."""
    write(f"polytoken {__version__}\n")


def print_version(wanted: bool) -> None:
    """Callback of `--version`: print and leave."""
    if wanted:
        version()
        raise typer.Exit
