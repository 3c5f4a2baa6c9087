"""Loading a model for a command: progress while it lasts, and a way out."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from polytoken.cli.output import say
from polytoken.cli.progress import show_progress
from polytoken.errors import EXIT_INTERRUPTED

if TYPE_CHECKING:
    from polytoken.assembly import EngineOptions
    from polytoken.engine import Engine


def load_engine(options: EngineOptions, *, verbose: bool) -> Engine:
    """A running engine. Ctrl-C ends the process at once."""
    from polytoken.api import open_engine  # noqa: PLC0415

    try:
        with show_progress(verbose=verbose) as progress:
            return open_engine(options, progress=progress, warn=lambda text: say("warning", text))
    except KeyboardInterrupt:
        # A load cannot be stopped half-way, and an interpreter that winds up around the loading thread may crash.
        say("note", "interrupted")
        sys.stdout.flush()
        os._exit(EXIT_INTERRUPTED)
