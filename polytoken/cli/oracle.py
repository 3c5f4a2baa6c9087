"""`polytoken oracle ...`: receipts of real runs, their comparison, and the gate. One command per file."""

from __future__ import annotations

import typer

from polytoken.cli.oracle_compare import compare, schema
from polytoken.cli.oracle_gate import gate
from polytoken.cli.oracle_reference import reference
from polytoken.cli.oracle_run import run

oracle = typer.Typer(
    name="oracle",
    help="Prove an engine right: receipts of real runs, comparison of two receipts, a gate for a checkpoint.",
    no_args_is_help=True,
)
for command in (run, compare, gate, reference, schema):
    oracle.command()(command)
