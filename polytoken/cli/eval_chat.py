"""`polytoken eval chat`: warm-up and three turns against any OpenAI-compatible server, for the oracle to reproduce."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from polytoken.cli.oracle_run import open_output
from polytoken.cli.output import say, write
from polytoken.errors import EXIT_FAILURE, EXIT_OK, UsageError

_SERVER = "Server"


def _server(text: str, **words: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=_SERVER, **words)


def chat(
    *,
    url: Annotated[str, _server("Of the server, without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str, _server("As the server calls it.")],
    api_key: Annotated[str | None, _server("Shown to the server.", envvar="POLYTOKEN_API_KEY")] = None,
    lane: Annotated[str | None, _server("mtp or ar (default: what our own server says, else ar).")] = None,
    prefill_chunk: Annotated[int, _server("Prompt tokens per forward.", min=1)] = 256,
    context: Annotated[int | None, _server("Its context (default: what it says).", min=1)] = None,
    counts_end: Annotated[
        bool | None,
        _server("Whether it counts the id that ends an answer (default: yes for ours).", show_default=False),
    ] = None,
    readme: Annotated[Path, typer.Option(metavar="FILE", help="The text that the first turn summarises.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Of every turn.")] = 2048,
    warmup_tokens: Annotated[int, typer.Option(min=1, help="Of the warm-up.")] = 32,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.6,
    top_p: Annotated[float, typer.Option()] = 0.95,
    top_k: Annotated[int, typer.Option(min=0)] = 20,
    seed: Annotated[int, typer.Option()] = 0,
    think: Annotated[bool, typer.Option("--think/--no-think", help="Whether reasoning is asked for.")] = True,
    canary: Annotated[str, typer.Option(help="on or off, as the oracle's run will be.")] = "on",
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the records to a file, too.")] = None,
) -> int:
    """Write the records that `oracle run --chat --source-run` reproduces. Status 1 if a turn did not end by itself."""
    from polytoken.oracle.client import ChatClient, EvalPlan  # noqa: PLC0415
    from polytoken.oracle.prompts import first_prompt  # noqa: PLC0415
    from polytoken.oracle.receipt import encode  # noqa: PLC0415

    if lane not in (None, "ar", "mtp"):
        raise UsageError("--lane must be ar or mtp", field="--lane")
    if canary not in ("on", "off"):
        raise UsageError("--canary must be on or off", field="--canary")
    plan = EvalPlan(
        url=url, model=model, first=first_prompt(readme), temperature=temperature, top_p=top_p, top_k=top_k, seed=seed,
        max_generated_tokens=max_new_tokens, warmup_tokens=warmup_tokens, lane=lane, prefill_chunk=prefill_chunk,
        context_tokens=context, canary=canary == "on", counts_end=counts_end, think=think, api_key=api_key,
    )  # fmt: skip
    with open_output(output) as file:

        def emit(event: str, **fields: Any) -> None:
            line = encode(event, fields)
            write(line)
            if file is not None:
                file.write(line)
                file.flush()

        complete = ChatClient(plan, emit).run()
    if not complete:
        say("note", "a turn did not end by itself: the oracle will not take this for a source")
    return EXIT_OK if complete else EXIT_FAILURE
