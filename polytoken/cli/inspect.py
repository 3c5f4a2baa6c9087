"""`polytoken inspect`: what a checkpoint is, from its headers alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import write_json
from polytoken.cli.progress import show_progress
from polytoken.cli.tables import count_text, print_fields, size_text
from polytoken.errors import EXIT_FAILURE


def inspect(
    *,
    name: Annotated[str, typer.Argument(help="Folder, hub id, GGUF file or catalogue name.", show_default=False)],
    json: flags.Json = False,
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    store: flags.Store = None,
) -> None:
    """Say what a checkpoint is and whether it can be loaded, without reading its weights."""
    flags.require_backend()
    from polytoken.checkpoint.inspect import inspect as report_on  # noqa: PLC0415

    flags.check_revision(name, revision)
    with show_progress() as progress:
        report = report_on(
            name, store=flags.open_store(store), revision=revision, offline=offline, progress=progress
        ).as_json()
    report["lane"] = _lane(report)
    if json:
        write_json(report)
    else:
        print_fields([(title.replace("_", " "), _text(title, value)) for title, value in report.items()
                      if value is not None and value != ""])  # fmt: skip
    if not report["supported"]:
        raise typer.Exit(EXIT_FAILURE)


def _lane(report: Mapping[str, Any]) -> str | None:
    """The lane that `--lane auto` would choose; None for a checkpoint that cannot be loaded."""
    from polytoken.models import diffusion_gemma, modilify_mk2  # noqa: PLC0415

    if not report["supported"]:
        return None
    if report["family"] in (diffusion_gemma.FAMILY.name, modilify_mk2.FAMILY.name):
        return "canvas"
    return "mtp" if report["draft_head_usable"] else "ar"


def _text(title: str, value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if title == "parameters":
        return f"{value} ({count_text(value)})"
    if title == "bytes":
        return f"{value} ({size_text(value)})"
    if isinstance(value, dict):
        sizes = title in ("dtypes", "kv_bytes_per_token")
        return ", ".join(f"{key} {size_text(item) if sizes else item}" for key, item in value.items())
    return str(value)
