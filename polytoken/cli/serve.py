"""`polytoken serve`: OpenAI's and Anthropic's endpoints over the engine."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from polytoken.cli import lane_flags
from polytoken.cli import options as flags
from polytoken.cli.loading import load_engine
from polytoken.cli.output import describe_runtime, report_dropped_head, say
from polytoken.errors import BackendError, UsageError

if TYPE_CHECKING:
    from polytoken.assembly import EngineOptions
    from polytoken.engine import Engine
    from polytoken.server.settings import ServerSettings

_SERVER: Final = "Server"
_NEEDED: Final = ("starlette", "uvicorn", "pydantic", "prometheus_client", "llguidance")


def _option(text: str, *names: str, **words: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_SERVER, **words)


def serve(
    *,
    model: Annotated[
        list[str],
        typer.Option(
            "--model",
            "--checkpoint",
            metavar="[NAME=]MODEL",
            help="Folder, hub id, GGUF file or catalogue name; NAME is what clients call it. Repeatable.",
            show_default=False,
        ),
    ],
    host: Annotated[str, _option("Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1",
    port: Annotated[int, _option("0 takes a free one.")] = 8000,
    api_key: Annotated[
        list[str] | None,
        _option("Key that clients must show. Repeatable.", envvar="POLYTOKEN_API_KEY", show_envvar=True),
    ] = None,
    admin_key: Annotated[
        list[str] | None,
        _option(
            "Key for /admin alone (default: the API key; without any, this machine only).",
            envvar="POLYTOKEN_ADMIN_KEY",
            show_envvar=True,
        ),
    ] = None,
    cors_origin: Annotated[list[str] | None, _option("Web origin that may call; * for all. Repeatable.")] = None,
    allowed_host: Annotated[list[str] | None, _option("Further name of a loopback server. Repeatable.")] = None,
    max_body_mib: Annotated[float, _option("Largest request body, in MiB.")] = 8.0,
    max_context: Annotated[int | None, _option("Most prompt tokens (default: the model's).")] = None,
    max_new_tokens: Annotated[int | None, _option("Most new tokens (default: what the context has room for).")] = None,
    max_choices: Annotated[int, _option("Largest n.")] = 16,
    rate_limit: Annotated[int, _option("Requests a minute and client; 0 for no limit.")] = 0,
    request_timeout: Annotated[float, _option("Seconds that a request may take.")] = 600.0,
    keep_alive: Annotated[float, _option("Seconds of silence before a stream gets a comment.")] = 5.0,
    drain_seconds: Annotated[float, _option("Seconds that a shutdown gives open streams.")] = 30.0,
    max_loaded: Annotated[int, _option("Models in memory at once; the others are loaded when asked for.")] = 1,
    access_log: Annotated[bool, _option("Log every request.")] = True,
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
    batch_size: flags.BatchSize = 4,
    prefill_chunk_size: flags.PrefillChunkSize = 64,
    prefix_cache_mib: flags.PrefixCacheMib = 512,
    session_cache_mib: flags.SessionCacheMib = None,
    prefix_reuse: flags.PrefixReuse = "exact",
    session_dir: flags.SessionDir = None,
    session_disk_mib: flags.SessionDiskMib = None,
    max_queue_size: flags.MaxQueueSize = 128,
    depth: lane_flags.Depth = None,
    depth_policy: lane_flags.DepthPolicy = None,
    drafter: lane_flags.Drafter = None,
    draft_model: lane_flags.DraftModel = None,
    history_window: lane_flags.HistoryWindow = None,
    lookup_gram: lane_flags.LookupGram = None,
    lookup_longest: lane_flags.LookupLongest = None,
    policy: lane_flags.Policy = None,
    canvas_length: lane_flags.CanvasLength = None,
    pipeline_depth: lane_flags.PipelineDepth = None,
    max_batch_tokens: lane_flags.MaxBatchTokens = None,
    vocab_chunk_size: lane_flags.VocabChunkSize = None,
    max_denoising_steps: lane_flags.MaxDenoisingSteps = None,
    commit_failure_budget: lane_flags.CommitFailureBudget = None,
    commit_top_k: lane_flags.CommitTopK = None,
    commit_min_p: lane_flags.CommitMinP = None,
    commit_target_confidence: lane_flags.CommitTargetConfidence = None,
) -> None:
    """Serve models over HTTP, as OpenAI and Anthropic do, with a chat page at /."""
    # A conversation is sent again with every turn and reused in whole chunks: small ones leave less to compute again.
    _check_installed()
    from polytoken.server.settings import ServerSettings  # noqa: PLC0415

    settings = ServerSettings(
        host=host, port=port, api_keys=tuple(api_key or ()), admin_keys=tuple(admin_key or ()),
        cors_origins=tuple(cors_origin or ()), allowed_hosts=tuple(allowed_host or ()),
        max_body_mib=max_body_mib, max_context=max_context, max_new_tokens=max_new_tokens, max_choices=max_choices,
        rate_limit=rate_limit, request_timeout=request_timeout, keep_alive=keep_alive, drain_seconds=drain_seconds,
        max_loaded=max_loaded, access_log=access_log,
    )  # fmt: skip
    special = lane_flags.LaneFlags(
        depth=depth, depth_policy=depth_policy, drafter=drafter, draft_model=draft_model,
        history_window=history_window, lookup_gram=lookup_gram, lookup_longest=lookup_longest, policy=policy,
        canvas_length=canvas_length, pipeline_depth=pipeline_depth, max_batch_tokens=max_batch_tokens,
        vocab_chunk_size=vocab_chunk_size, max_denoising_steps=max_denoising_steps,
        commit_failure_budget=commit_failure_budget, commit_top_k=commit_top_k, commit_min_p=commit_min_p,
        commit_target_confidence=commit_target_confidence,
    )  # fmt: skip
    chosen_lane = special.engine_options(lane)
    named = name_models(model)
    for path in named.values():
        flags.check_revision(path, revision)

    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415

    options = {
        name: EngineOptions(
            model=path, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads,
            device=device, revision=revision, offline=offline, store=store, batch_size=batch_size,
            prefill_chunk_size=prefill_chunk_size, prefix_cache_mib=prefix_cache_mib,
            session_cache_mib=session_cache_mib, prefix_reuse=prefix_reuse, session_dir=session_dir,
            session_disk_mib=session_disk_mib, max_queue_size=max_queue_size, **chosen_lane,
        )
        for name, path in named.items()
    }  # fmt: skip
    _run(settings, options, special, verbose=verbose)


def _run(
    settings: ServerSettings, options: dict[str, EngineOptions], special: lane_flags.LaneFlags, *, verbose: bool
) -> None:
    from polytoken.checkpoint.memory import available_bytes  # noqa: PLC0415
    from polytoken.server.pool import ModelPool  # noqa: PLC0415
    from polytoken.server.run import open_socket, serve  # noqa: PLC0415

    door = open_socket(settings)  # before a model is loaded for nothing

    def open_engine(wanted: EngineOptions) -> Engine:
        engine = load_engine(wanted, verbose=verbose)
        special.check_loaded(engine.loaded)
        report_dropped_head(engine.loaded)
        say("note", describe_runtime(engine.loaded))
        return engine

    first, wanted = next(iter(options.items()))
    engine = open_engine(wanted)  # here, where Ctrl-C still ends a load

    def make_pool() -> ModelPool:
        pool = ModelPool(options, open_engine, max_loaded=settings.max_loaded, available=available_bytes)
        pool.adopt(first, engine)
        return pool

    _log_to_stderr()
    with engine:
        asyncio.run(serve(door, settings, make_pool, lambda url: _announce(url, settings, list(options))))


def name_models(models: list[str]) -> dict[str, str]:
    """Model by name: `NAME=MODEL`, or the last part of a path or id.

    Raises:
        UsageError: two models have one name.
    """
    named: dict[str, str] = {}
    for word in models:
        name, mark, path = word.partition("=")
        if not mark or not name or Path(word).exists():
            name, path = Path(word).name or word, word
        if name in named:
            raise UsageError(f"--model: two models are called {name!r}; name one NAME=MODEL", field="--model")
        named[name] = path
    return named


def _announce(url: str, settings: ServerSettings, names: list[str]) -> None:
    """The banner on standard output; its first line ends with the base URL, for programs to read."""
    from polytoken.server.run import outside_url  # noqa: PLC0415

    key = "<your key>" if settings.api_keys else "any"
    shown = " -H 'Authorization: Bearer <your key>'" if settings.api_keys else ""
    lines = [
        f"polytoken serves {', '.join(names)} at {url}",
        f"  chat page      {url}/",
        f"  API            {url}/docs     health {url}/health     metrics {url}/metrics",
    ]
    if settings.host in ("0.0.0.0", "::") and (outside := outside_url(int(url.rpartition(":")[2]))):
        lines.append(f"  from outside   {outside}/")
    lines += [
        "  OpenAI clients",
        f"    export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={key}",
        "  Anthropic clients",
        f"    export ANTHROPIC_BASE_URL={url} ANTHROPIC_API_KEY={key}",
        "  a first call",
        f"    curl {url}/v1/chat/completions{shown} -H 'Content-Type: application/json' \\",
        """      -d '{"messages": [{"role": "user", "content": "Hello"}]}'""",
        f"  to end it      Ctrl-C: open answers have {settings.drain_seconds:g} s to finish; twice ends at once",
        f"  model          {names[0]}",
    ]
    if not settings.loopback and not settings.api_keys:
        say("warning", f"anyone who reaches {settings.host} may use this server; --api-key asks for a key")
    print("\n".join(lines), flush=True)


def _log_to_stderr() -> None:
    """The access log and what went wrong, on stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    for name in ("polytoken.access", "polytoken.server", "polytoken.engine", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO if name in ("polytoken.access", "polytoken.server") else logging.WARNING)


def _check_installed() -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise BackendError(
            f'serve needs {", ".join(missing)}: pip install "polytoken[server]"', code="missing_server", field="serve"
        )
