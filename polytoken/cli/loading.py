"""Loading a model for a command: progress while it lasts, and a way out."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from polytoken.cli.interrupts import status_of, word_of
from polytoken.cli.output import say
from polytoken.cli.progress import show_progress

if TYPE_CHECKING:
    from polytoken.assembly import EngineOptions
    from polytoken.engine import Engine


def load_engine(options: EngineOptions, *, verbose: bool) -> Engine:
    """A running engine. Ctrl-C and SIGTERM end the process at once."""
    from polytoken.api import open_engine  # noqa: PLC0415

    try:
        with show_progress(verbose=verbose) as progress:
            return open_engine(options, progress=progress, warn=lambda text: say("warning", text))
    except KeyboardInterrupt as interrupt:
        # A load cannot be stopped half-way, and an interpreter that winds up around the loading thread may crash.
        # Nothing has been printed yet.
        status = status_of(interrupt)
        say("note", word_of(status))
        os._exit(status)
