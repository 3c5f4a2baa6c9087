"""`polytoken oracle reference ENGINE`: the same receipts from another engine on the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytoken.cli.oracle_run import open_output, tell
from polytoken.cli.output import write
from polytoken.errors import UsageError


def reference(
    engine: Annotated[str, typer.Argument(metavar="ENGINE", help="transformers or mlx-lm.")],
    *,
    model: Annotated[Path, typer.Option(metavar="FOLDER", help="A checkpoint's folder.")],
    decode: Annotated[bool, typer.Option("--decode", help="A forward, then greedy steps to the end.")] = False,
    ar: Annotated[bool, typer.Option("--ar", help="A greedy answer to its natural end.")] = False,
    readme: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text to summarise, in the place of `ping`.")
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Cap on an answer.", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the receipts to a file, too.")] = None,
) -> None:
    """Print receipts of another engine, for `compare`. It is run where that engine is installed; greedy only."""
    from polytoken.oracle.adapters.engine import load_engine, write_reference  # noqa: PLC0415
    from polytoken.oracle.plan import choose_mode  # noqa: PLC0415
    from polytoken.oracle.prompts import first_prompt  # noqa: PLC0415
    from polytoken.oracle.receipt import Receipts  # noqa: PLC0415

    mode = choose_mode(decode=decode, ar=ar)
    prompt = first_prompt(readme)
    if not model.is_dir():
        raise UsageError(f"--model: {str(model)!r} is no folder", field="--model")
    with open_output(output) as file:
        write_reference(
            lambda: load_engine(engine, model),
            Receipts(write, tell, file=file),
            checkpoint=model,
            mode=mode,
            prompt=prompt,
            limit=max_new_tokens,
        )
