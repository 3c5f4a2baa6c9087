"""`polytoken bench`: how fast, honestly measured, beside what the machine's memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import say, write
from polytoken.cli.progress import show_progress
from polytoken.errors import UsageError


def bench(
    *,
    model: flags.Model,
    against: Annotated[str | None, typer.Option(metavar="PEER", help="Measure mlx-lm in the same run.")] = None,
    peer_products: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KIND",
            help="What the peer multiplies with on the CPU: same, stock or a BLAS by path. Repeatable. "
            "[default: same, stock]",
            show_default=False,
        ),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="Tokens of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens to generate.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Timed rounds, after one to warm up.")] = 3,
    json: flags.Json = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the JSON report to a file, too.")] = None,
    verbose: flags.Verbose = False,
    lane: flags.Lane = "auto",
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
    """Measure load, prefill and decode: medians, warmed up, beside the byte floor of this machine."""
    if peer_products and against is None:
        raise UsageError("--peer-products goes with --against", field="--peer-products")
    flags.check_revision(model, revision)
    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415
    from polytoken.bench.run import BenchOptions, run_bench  # noqa: PLC0415

    engine = EngineOptions(
        model=model, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, prefill_chunk_size=prefill_chunk_size,
    )  # fmt: skip
    options = BenchOptions(
        engine=engine, against=against, peer_products=tuple(peer_products or BenchOptions.peer_products),
        prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds,
    )  # fmt: skip
    with show_progress(verbose=verbose) as progress:
        report = run_bench(options, progress=progress)
    record = report.to_json()
    if output is not None:
        _save(output, record + "\n")
    if json:
        write(record + "\n")
    else:
        from rich.console import Console  # noqa: PLC0415

        report.print(Console())


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: cannot write {str(path)!r}: {error.strerror or error}", field="--output") from None
    say("note", f"report written to {path}")
