"""`polytoken version` and `--version`."""

from __future__ import annotations

import typer

from polytoken import __version__


def version() -> None:
    """Print the version."""
    typer.echo(f"polytoken {__version__}")


def print_version(wanted: bool) -> None:
    """Callback of `--version`: print and leave."""
    if wanted:
        version()
        raise typer.Exit
