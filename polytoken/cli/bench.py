"""`polytoken bench`: how fast, honestly measured, beside what the machine's memory allows."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from polytoken.cli import lane_flags
from polytoken.cli import options as flags
from polytoken.cli.output import report_dropped_head, say, write
from polytoken.cli.progress import show_progress
from polytoken.errors import UsageError
from polytoken.events import RuntimeLoaded


def bench(
    *,
    model: flags.Model = flags.HERE,
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
    depths: Annotated[
        str | None,
        typer.Option(metavar="N,N,...", help="Depths of the mtp lane to measure (default: 3).", show_default=False),
    ] = None,
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
    depth_policy: lane_flags.DepthPolicy = None,
    drafter: lane_flags.Drafter = None,
    draft_model: lane_flags.DraftModel = None,
    history_window: lane_flags.HistoryWindow = None,
    lookup_gram: lane_flags.LookupGram = None,
    lookup_longest: lane_flags.LookupLongest = None,
    policy: lane_flags.Policy = None,
    canvas_length: lane_flags.CanvasLength = None,
    max_batch_tokens: lane_flags.MaxBatchTokens = None,
    vocab_chunk_size: lane_flags.VocabChunkSize = None,
    max_denoising_steps: lane_flags.MaxDenoisingSteps = None,
    commit_failure_budget: lane_flags.CommitFailureBudget = None,
    commit_top_k: lane_flags.CommitTopK = None,
    commit_min_p: lane_flags.CommitMinP = None,
    commit_target_confidence: lane_flags.CommitTargetConfidence = None,
) -> None:
    """Measure load, prefill and decode: medians, warmed up, beside the byte floor of this machine."""
    if peer_products and against is None:
        raise UsageError("--peer-products goes with --against", field="--peer-products")
    special = lane_flags.LaneFlags(
        depth_policy=depth_policy, drafter=drafter, draft_model=draft_model, history_window=history_window,
        lookup_gram=lookup_gram, lookup_longest=lookup_longest, policy=policy, canvas_length=canvas_length,
        max_batch_tokens=max_batch_tokens, vocab_chunk_size=vocab_chunk_size, max_denoising_steps=max_denoising_steps,
        commit_failure_budget=commit_failure_budget, commit_top_k=commit_top_k, commit_min_p=commit_min_p,
        commit_target_confidence=commit_target_confidence,
    )  # fmt: skip
    chosen_lane = special.engine_options(lane)
    if depths is not None and lane not in ("auto", "mtp"):
        raise UsageError(f"--depths belongs to the mtp lane; this is {lane} (--lane says so)", field="--depths")
    wanted_depths = _parse_depths(depths)
    if output is not None:
        _check_output(output)
    flags.check_revision(model, revision)
    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415
    from polytoken.bench.options import BenchOptions  # noqa: PLC0415
    from polytoken.bench.run import run_bench  # noqa: PLC0415

    engine = EngineOptions(
        model=model, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, prefill_chunk_size=prefill_chunk_size,
        **chosen_lane,
    )  # fmt: skip
    options = BenchOptions(
        engine=engine, against=against, peer_products=tuple(peer_products or BenchOptions.peer_products),
        depths=wanted_depths, prompt_tokens=prompt_tokens, new_tokens=new_tokens, rounds=rounds,
    )  # fmt: skip

    def check(loaded: RuntimeLoaded) -> None:
        special.check_loaded(loaded)
        report_dropped_head(loaded)

    with show_progress(verbose=verbose, runs=True) as progress:
        report = run_bench(options, progress=progress, check=check)
    record = report.to_json()
    if output is not None:
        _save(output, record + "\n")
    if json:
        write(record + "\n")
    else:
        from rich.console import Console  # noqa: PLC0415

        report.print(Console())


def _check_output(path: Path) -> None:
    """Refuse a file that cannot be written before minutes of measuring, leaving everything as it is."""
    with _writing(path):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists():
            path.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=path.parent).close()


def _save(path: Path, text: str) -> None:
    with _writing(path):
        path.write_text(text, encoding="utf-8")
    say("note", f"report written to {path}")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"--output: cannot write {str(path)!r}: {error.strerror or error}", field="--output") from None


def _parse_depths(text: str | None) -> tuple[int, ...]:
    try:
        return () if text is None else tuple(int(word) for word in text.split(","))
    except ValueError:
        raise UsageError(f"--depths: {text!r} is not of the form 1,2,3", field="--depths") from None
