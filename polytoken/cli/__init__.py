"""The command line: one file per verb, each a thin call into the rooms below.

Nothing here or in the verbs' files imports MLX, numpy or transformers before a verb runs, so that `--help` and a
mistyped flag answer at once. The environment is read in `options.py` alone (POLYTOKEN_STORE).
"""

from __future__ import annotations

from collections.abc import Sequence

from polytoken.errors import EXIT_INTERRUPTED


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return the process's exit status."""
    try:
        from polytoken.cli.entry import run  # noqa: PLC0415  (`import polytoken.cli` itself costs nothing)

        return run(arguments)
    except KeyboardInterrupt:  # before or after the part that knows what to do about it
        return EXIT_INTERRUPTED
