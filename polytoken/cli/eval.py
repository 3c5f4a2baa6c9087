"""`polytoken eval ...`: runs against a server, from the client's side."""

from __future__ import annotations

import typer

from polytoken.cli.eval_chat import chat

evaluate = typer.Typer(name="eval", help="Run a server from the client's side.", no_args_is_help=True)
evaluate.command("chat")(chat)


@evaluate.callback()
def common() -> None:
    """Run a server from the client's side."""
