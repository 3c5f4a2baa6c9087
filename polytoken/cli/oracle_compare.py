"""`polytoken oracle compare A B`: the first difference of two receipts, near ties, and a verdict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import say, write, write_json
from polytoken.errors import EXIT_MISMATCH, EXIT_OK, UsageError

Receipt = Annotated[Path, typer.Argument(metavar="FILE", help="A receipt: JSON lines.", show_default=False)]


def compare(
    left: Receipt,
    right: Receipt,
    *,
    mode: Annotated[
        str, typer.Option(help="semantic, or exact: equal bits or nothing.", metavar="semantic|exact")
    ] = "semantic",
    tolerance: Annotated[
        float | None,
        typer.Option(help="Of a logit (default: by the coarser compute type).", min=0.0, show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Hold both against the schema first.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a report with plots.")] = None,
    json: flags.Json = False,
) -> int:
    """Say in one line whether two receipts are identical, of the same law, or different. Exit 3 when they differ."""
    from polytoken.oracle.compare.reading import read_comparable  # noqa: PLC0415
    from polytoken.oracle.compare.rows import Tolerance  # noqa: PLC0415
    from polytoken.oracle.compare.verdict import compare as hold  # noqa: PLC0415

    if mode not in ("semantic", "exact"):
        raise UsageError("--mode must be semantic or exact", field="--mode")
    receipts = [read_comparable(path) for path in (left, right)]
    if check:
        _check(left, receipts[0])
        _check(right, receipts[1])
    bound = None if tolerance is None else Tolerance(tolerance, 0.0)
    found = hold(receipts[0], receipts[1], exact=mode == "exact", tolerance=bound)
    if html is not None:
        from polytoken.oracle.compare.report import html_report  # noqa: PLC0415

        _save(html, html_report(found, names=(left.name, right.name)))
    if json:
        write_json(found.to_dict())
    else:
        write(found.explain() + "\n")
        for note in found.notes:
            say("note", note)
    return EXIT_MISMATCH if found.verdict == "different" else EXIT_OK


def schema() -> None:
    """Print the JSON schema of receipts."""
    from polytoken.oracle.schema import schema_text  # noqa: PLC0415

    write(schema_text())


def _check(path: Path, records: list[dict[str, object]]) -> None:
    from polytoken.oracle.schema import violations  # noqa: PLC0415

    faults = violations(records)
    if faults:
        raise UsageError(f"{path} is no valid receipt: {faults[0]} ({len(faults)} faults)")


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--html: cannot write {str(path)!r}: {error.strerror or error}", field="--html") from None
    say("note", f"report written to {path}")
