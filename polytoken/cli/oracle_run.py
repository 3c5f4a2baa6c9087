"""`polytoken oracle run`: run a real entry point and print receipts that another implementation can be held against."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import write
from polytoken.cli.progress import show_progress
from polytoken.errors import UsageError

_MODE = "Mode (one of these; none is one plain forward)"
_CASE = "What is run"


def _mode(text: str, *names: str) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_MODE)


def _case(text: str, **words: Any) -> Any:
    return typer.Option(help=text, rich_help_panel=_CASE, **words)


def run(
    *,
    model: flags.Model = flags.HERE,
    decode: Annotated[bool, _mode("A forward, then greedy steps to the end.", "--decode")] = False,
    mtp: Annotated[bool, _mode("One MTP round by hand.", "--mtp")] = False,
    ar: Annotated[bool, _mode("The AR lane to its natural end.", "--ar")] = False,
    mtp_prefill: Annotated[bool, _mode("The MTP lane's prefill, with windows.", "--mtp-prefill")] = False,
    mtp_generate: Annotated[bool, _mode("The MTP lane to its natural end.", "--mtp-generate")] = False,
    canvas: Annotated[bool, _mode("The canvas lane, denoise by denoise.", "--canvas")] = False,
    server_defaults: Annotated[bool, _case("Draw as the server would for this checkpoint.")] = False,
    readme: Annotated[Path | None, _case("A text to summarise, in the place of `ping`.", metavar="FILE")] = None,
    restored_suffixes: Annotated[
        Path | None, _case("Go on with three suffixes, the second with this text.", metavar="FILE")
    ] = None,
    snapshot_restore: Annotated[bool, _case("Restore a snapshot before each suffix.")] = False,
    chat: Annotated[bool, _case("Three turns of a conversation.")] = False,
    source_run: Annotated[Path | None, _case("Reproduce this run of `polytoken eval chat`.", metavar="FILE")] = None,
    token_events: Annotated[str, _case("full or progress: ids as they come, or a line a second.")] = "full",
    max_new_tokens: Annotated[
        int | None, _case("Cap on an answer (default: its natural end).", min=1, show_default=False)
    ] = None,
    depth: Annotated[int | None, _case("Drafts per window (default: 3).", min=1, show_default=False)] = None,
    temperature: Annotated[
        float | None, _case("Of --ar and --mtp-generate (default: 0.6).", min=0.0, show_default=False)
    ] = None,
    top_p: Annotated[float | None, _case("Of the same (default: 0.95).", show_default=False)] = None,
    top_k: Annotated[int | None, _case("Of the same (default: 20).", min=0, show_default=False)] = None,
    seed: Annotated[int | None, _case("Of the same and of --canvas (default: 0).", show_default=False)] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the receipts to a file, too.")] = None,
    canary: Annotated[str, typer.Option(help="auto, native, mlx or off: who probes the device meanwhile.")] = "auto",
    canary_library: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A library with the native probe.", show_default=False)
    ] = None,
    dtype: flags.Dtype = "auto",
    dequantise: flags.Dequantise = None,
    products: flags.Products = "exact",
    threads: flags.Threads = 1,
    device: flags.Device = "auto",
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    store: flags.Store = None,
    prefill_chunk_size: flags.PrefillChunkSize = 256,
    prefix_cache_mib: flags.PrefixCacheMib = 512,
) -> None:
    """Print receipts (JSON lines) on stdout, progress on stderr. Exit 2 usage, 3 mismatch, 4 non-finite, 86 canary."""
    from polytoken.oracle.plan import Plan, choose_mode  # noqa: PLC0415

    plan = Plan(
        mode=choose_mode(
            decode=decode, mtp=mtp, ar=ar, mtp_prefill=mtp_prefill, mtp_generate=mtp_generate, canvas=canvas
        ),
        server_defaults=server_defaults, readme=readme, restored_suffixes=restored_suffixes,
        snapshot_restore=snapshot_restore, chat=chat, source_run=source_run, token_events=token_events,  # type: ignore[arg-type]
        canary=canary, canary_library=canary_library,  # type: ignore[arg-type]
        temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, max_new_tokens=max_new_tokens, depth=depth,
    )  # fmt: skip
    flags.check_revision(model, revision)
    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415
    from polytoken.oracle.receipt import Receipts  # noqa: PLC0415
    from polytoken.oracle.run import run_oracle  # noqa: PLC0415

    options = EngineOptions(
        model=model, lane=plan.lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads,
        device=device, revision=revision, offline=offline, store=store, prefill_chunk_size=prefill_chunk_size,
        prefix_cache_mib=prefix_cache_mib, batch_size=1,
    )  # fmt: skip
    with open_output(output) as file, show_progress(verbose=False) as progress:
        run_oracle(plan, options, Receipts(write, tell, file=file, descriptor=descriptor()), progress=progress)


@contextmanager
def open_output(path: Path | None) -> Iterator[TextIO | None]:
    """The file of `--output`, opened before the work begins.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        yield None
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--output: cannot write {str(path)!r}: {error.strerror or error}", field="--output") from None
    with file:
        yield file


def tell(line: str) -> None:
    """Progress, on stderr at once."""
    sys.stderr.write(line)
    sys.stderr.flush()


def descriptor() -> int | None:
    """Of standard error; None where that is no file."""
    try:
        return sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):
        return None
