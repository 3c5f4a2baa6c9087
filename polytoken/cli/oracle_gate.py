"""`polytoken oracle gate`: hold this machine and checkpoint to every promise of equality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.oracle_run import open_output, tell
from polytoken.cli.output import say, write
from polytoken.cli.progress import show_progress
from polytoken.errors import UsageError

if TYPE_CHECKING:
    from polytoken.oracle.gate.outcome import Outcome


def gate(
    *,
    model: flags.Model = flags.HERE,
    depths: Annotated[str, typer.Option(metavar="N,N,...", help="Drafts per window.")] = "1,2,3",
    contexts: Annotated[str, typer.Option(metavar="N,N,...", help="Prompt lengths in tokens.")] = "7,64,300",
    prompts: Annotated[int, typer.Option(min=1, help="Texts of each length.")] = 2,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of every answer.")] = 32,
    seeds: Annotated[int, typer.Option(min=2, help="Draws for the sampled law.")] = 24,
    temperature: Annotated[float, typer.Option(min=0.01, help="Of the sampled law.")] = 0.8,
    top_p: Annotated[float, typer.Option(help="Of the sampled law.")] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Of the sampled law.")] = 20,
    fixed_shape: Annotated[
        bool, typer.Option("--fixed-shape", help="Try the mode with as many rows in every forward, and its cost.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the receipt to a file.")] = None,
    json: flags.Json = False,
    dtype: flags.Dtype = "auto",
    dequantise: flags.Dequantise = None,
    products: flags.Products = "exact",
    threads: flags.Threads = 1,
    device: flags.Device = "auto",
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    store: flags.Store = None,
    prefill_chunk_size: flags.PrefillChunkSize = 256,
) -> None:
    """Greedy AR = MTP, sampled law, restore = cold, company, seeds: a table, a receipt, and status 3 if any differs."""
    flags.check_revision(model, revision)
    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415
    from polytoken.oracle.gate.company import AGAIN  # noqa: PLC0415
    from polytoken.oracle.gate.matrix import Matrix  # noqa: PLC0415
    from polytoken.oracle.gate.run import run_gate  # noqa: PLC0415
    from polytoken.oracle.receipt import Receipts  # noqa: PLC0415

    matrix = Matrix(
        depths=_numbers("--depths", depths), contexts=_numbers("--contexts", contexts), prompts=prompts,
        new_tokens=new_tokens, seeds=seeds, temperature=temperature, top_p=top_p, top_k=top_k, fixed=fixed_shape,
    )  # fmt: skip
    options = EngineOptions(
        model=model, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, prefill_chunk_size=prefill_chunk_size, batch_size=4,
    )  # fmt: skip
    with open_output(output) as file, show_progress(verbose=False) as progress:
        receipts = Receipts(write if json else _drop, tell, file=file)
        result = run_gate(options, matrix, receipts, tell=_drop_outcome if json else _tell, progress=progress)
    say("note", f"{result.verdict}: {len(result.outcomes)} cases, {result.near_ties} near ties")
    if result.unrepeated:
        of = sum(outcome.check == AGAIN for outcome in result.outcomes)
        say("note", f"{result.unrepeated} of {of} requests do not repeat alone: one run and the next round apart here")
    if not any(outcome.check == "greedy AR = MTP" for outcome in result.outcomes):
        say("note", "the mtp lane was not held: that needs a draft head, and --depths")
    if result.cost is not None:
        rows, ratio = int(result.cost["rows"]), result.cost["ratio"]
        say("note", f"the fixed-shape mode ({rows} rows in every forward) takes {ratio:.2f} times as long per token")


def _tell(outcome: Outcome) -> None:
    case = ", ".join(f"{name} {value}" for name, value in outcome.case.items() if value is not None)
    why = "" if outcome.detail.get("repeats_alone", True) else "  does not repeat alone"
    if outcome.verdict in ("near tie", "different"):
        told = {name: value for name, value in outcome.detail.items() if name != "repeats_alone" and value is not None}
        why += "  " + ", ".join(f"{name} {value}" for name, value in told.items())
    write(f"{outcome.verdict:<14}{outcome.check:<36}{case}{why}\n")


def _drop(line: str) -> None:
    """The table is printed instead."""


def _drop_outcome(outcome: Outcome) -> None:
    """The receipts say it."""


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",") if word.strip())
    except ValueError:
        raise UsageError(f"{flag}: {text!r} is not of the form 1,2,3", field=flag) from None
