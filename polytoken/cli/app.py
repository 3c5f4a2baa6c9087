"""The table of verbs."""

from __future__ import annotations

from typing import Annotated

import typer

from polytoken.cli.bench import bench
from polytoken.cli.chat import chat
from polytoken.cli.doctor import doctor
from polytoken.cli.eval import evaluate
from polytoken.cli.generate import generate
from polytoken.cli.inspect import inspect
from polytoken.cli.models import models
from polytoken.cli.oracle import oracle
from polytoken.cli.pull import pull
from polytoken.cli.rm import rm
from polytoken.cli.serve import serve
from polytoken.cli.sessions import sessions
from polytoken.cli.version import print_version, version

app = typer.Typer(
    name="polytoken",
    help="LLM inference on MLX: several tokens per forward pass, and proof that they are the right ones.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog="A first run: polytoken pull smollm2-135m, then polytoken chat --model smollm2-135m",
)

for verb in (generate, chat, serve, pull, models, inspect, rm, doctor, bench, version):
    app.command()(verb)
app.add_typer(oracle)
app.add_typer(evaluate)
app.add_typer(sessions)


@app.callback()
def common(
    show_version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=print_version, is_eager=True),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and the engine's log on stderr.")] = False,
) -> None:
    """Options in front of the verb. `debug` is read by `entry`, which is where errors end."""


command = typer.main.get_command(app)  # once: a call of `app` itself builds every verb anew
