"""`polytoken rm`: delete a model that pull or a conversion made."""

from __future__ import annotations

from typing import Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import say
from polytoken.cli.streams import standard_input
from polytoken.cli.tables import size_text
from polytoken.errors import UsageError


def rm(
    *,
    name: Annotated[str, typer.Argument(help="A name that `polytoken models` lists.", show_default=False)],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    store: flags.Store = None,
) -> None:
    """Delete a pulled or converted model."""
    models = flags.open_store(store)
    known = {record.name: record for record in models.list()}
    if not yes and name in known and known[name].state != "available":
        if not standard_input().isatty():
            raise UsageError("--yes is needed where nobody can be asked", field="--yes")
        typer.confirm(f"Delete {name} ({size_text(known[name].bytes)})?", abort=True)
    say("note", f"{name} deleted, {size_text(models.remove(name))} freed")
