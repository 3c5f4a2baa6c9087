"""`polytoken generate`: one prompt, or many requests as JSON lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytoken.cli import lane_flags
from polytoken.cli import options as flags
from polytoken.cli.interrupts import draining
from polytoken.cli.loading import load_engine
from polytoken.cli.output import (
    JsonLines,
    PlainText,
    describe_result,
    describe_runtime,
    describe_summary,
    report_dropped_head,
    say,
)
from polytoken.cli.progress import waiting
from polytoken.cli.speed import floor_share
from polytoken.cli.streams import standard_input
from polytoken.cli.watch import CanvasView, open_view
from polytoken.errors import EXIT_FAILURE, EXIT_OK, NonFiniteError, UsageError
from polytoken.events import (
    Event,
    GenerationFailed,
    GenerationResult,
    InferenceSummary,
    RequestRejected,
    RuntimeLoaded,
    is_failure,
)
from polytoken.request import Request, RequestDefaults, SamplingParams, parse_record

if TYPE_CHECKING:
    from polytoken.engine import Engine

SINGLE_ID = "single"  # the id of a prompt on the command line
Source = Iterable[Request | RequestRejected]


def generate(
    *,
    model: flags.Model = flags.HERE,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One user turn; - reads standard input.")] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat turns as a JSON list; - reads standard input.")
    ] = None,
    requests_jsonl: Annotated[
        str | None, typer.Option(metavar="PATH", help="Many requests, one JSON object a line; - reads standard input.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Watch the canvas settle (canvas lane, on a terminal).")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print every event as a line of JSON.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Encode the prompt as it stands: no chat template.")] = False,
    max_new_tokens: flags.MaxNewTokens = None,
    stop: flags.Stop = None,
    think: flags.Think = "true",
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after end tokens, up to the cap.")] = False,
    verbose: flags.Verbose = False,
    seed: flags.Seed = 42,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    logprobs: flags.Logprobs = None,
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
    prefill_chunk_size: flags.PrefillChunkSize = 256,
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
    """Generate text: one answer, or a stream of events for many requests."""
    machine = json or requests_jsonl is not None
    _check_combination(
        prompt=prompt, messages=messages, requests=requests_jsonl, stream=stream, watch=watch, json=json, raw=raw,
        logprobs=logprobs, machine=machine,
    )  # fmt: skip
    special = lane_flags.LaneFlags(
        depth=depth, depth_policy=depth_policy, drafter=drafter, draft_model=draft_model,
        history_window=history_window, lookup_gram=lookup_gram, lookup_longest=lookup_longest, policy=policy,
        canvas_length=canvas_length, pipeline_depth=pipeline_depth, max_batch_tokens=max_batch_tokens,
        vocab_chunk_size=vocab_chunk_size, max_denoising_steps=max_denoising_steps,
        commit_failure_budget=commit_failure_budget, commit_top_k=commit_top_k, commit_min_p=commit_min_p,
        commit_target_confidence=commit_target_confidence,
    )  # fmt: skip
    members = flags.sampling_members(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=logit_bias,
        logprobs=logprobs,
    )  # fmt: skip

    def defaults(recommended: SamplingParams) -> RequestDefaults:
        return flags.request_defaults(
            members, recommended=recommended, max_new_tokens=max_new_tokens, seed=seed,
            think=flags.parse_switch(think), stop=stop, ignore_eos=ignore_eos,
        )  # fmt: skip

    record = None
    if requests_jsonl is None:
        record = _single_record(prompt=prompt, messages=messages, seed=seed)
        _single_request(record, defaults(SamplingParams()), raw=raw)  # a bad one is told before the model is loaded
    else:
        _check_input(requests_jsonl)
    flags.check_revision(model, revision)
    chosen_lane = special.engine_options(lane)
    if watch and lane not in ("auto", "canvas"):
        raise UsageError(f"--watch belongs to the canvas lane; this is {lane} (--lane says so)", field="--watch")

    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415

    engine_options = EngineOptions(
        model=model, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, batch_size=batch_size, prefill_chunk_size=prefill_chunk_size,
        prefix_cache_mib=prefix_cache_mib, session_cache_mib=session_cache_mib, prefix_reuse=prefix_reuse,
        session_dir=session_dir, session_disk_mib=session_disk_mib, max_queue_size=max_queue_size, **chosen_lane,
    )  # fmt: skip
    with load_engine(engine_options, verbose=verbose) as engine:
        special.check_loaded(engine.loaded, members)
        flags.check_vocabulary(engine, members)
        report_dropped_head(engine.loaded)
        chosen = defaults(engine.sampling)
        source: Source
        view: CanvasView | None = None
        if record is not None:
            request = _single_request(record, chosen, raw=raw)
            source, view = [request], open_view(engine, request) if watch else None
        else:
            from polytoken.engine import read_requests  # noqa: PLC0415

            source = read_requests(str(requests_jsonl), chosen)
        printer = JsonLines() if machine else PlainText(stream=stream)
        report = verbose or (sys.stderr.isatty() and not machine)
        status = _serve(engine, source, printer, loaded=_with_defaults(engine.loaded, chosen, raw), view=view,
                        report=report, measure=verbose, single=record is not None)  # fmt: skip
    raise typer.Exit(status)


def _serve(
    engine: Engine,
    source: Source,
    printer: JsonLines | PlainText,
    *,
    loaded: RuntimeLoaded,
    view: CanvasView | None,
    report: bool,
    measure: bool,
    single: bool,
) -> int:
    """Print every event of one run and return the exit status."""
    status = EXIT_OK
    result: GenerationResult | None = None
    with draining(engine) as interrupt:
        printer(loaded)
        if report:
            say("note", describe_runtime(loaded))
        wanted = interrupt.guard(source)
        events = engine.run(wanted, token_events=printer.token_events)
        for event in _watch_prefill(engine, events) if view is None else view.show(events):
            printer(event)
            if is_failure(event):
                status = _failure_status(event, single=single)
            if isinstance(event, GenerationResult):
                result = event
            elif isinstance(event, InferenceSummary):
                _conclude(engine, event, result, report=report, measure=measure)
    return interrupt.status or status


def _failure_status(event: Event, *, single: bool) -> int:
    """What a failure makes of the exit status: for a prompt of its own the failure's own, among many just 1."""
    if single and isinstance(event, GenerationFailed) and event.code == NonFiniteError.code:
        return NonFiniteError.exit_status
    return EXIT_FAILURE


def _conclude(
    engine: Engine, summary: InferenceSummary, result: GenerationResult | None, *, report: bool, measure: bool
) -> None:
    """Say how it went; what is suspicious in any case, the rest where it is wanted."""
    if warning := summary.extra.get("draft_warning"):
        say("warning", str(warning))
    if not report:
        return
    if result is None or summary.finished_requests + summary.failed_requests + summary.rejected_requests > 1:
        say("note", describe_summary(summary))
        return
    share = floor_share(engine, result) if measure else None
    say("note", describe_result(result, floor_share=share, canvas_length=engine.loaded.extra.get("canvas_length")))


def _watch_prefill(engine: Engine, events: Iterator[Event]) -> Iterator[Event]:
    """The same events; until the first of them a terminal shows how far the prompt is."""
    from polytoken.api import watch_prefill  # noqa: PLC0415

    if not sys.stderr.isatty():
        yield from events
        return
    with waiting("Reading the prompt") as say_how_far:
        watch_prefill(engine, lambda _, done, total: say_how_far(f"Reading the prompt: {done:,} of {total:,} tokens"))
        first = next(events, None)
    if first is not None:
        yield first
        yield from events


def _check_combination(
    *, prompt: str | None, messages: str | None, requests: str | None, stream: bool, watch: bool, json: bool,
    raw: bool, logprobs: int | None, machine: bool,
) -> None:  # fmt: skip
    """Refuse flags that would have no effect together."""
    given = [name for name, value in (("--prompt", prompt), ("--messages", messages), ("--requests-jsonl", requests))
             if value is not None]  # fmt: skip
    if len(given) != 1:
        wrong = f"{given[0]} excludes {given[1]}" if given else "nothing to answer"
        raise UsageError(f"{wrong}; give exactly one of --prompt, --messages and --requests-jsonl")
    if stream and machine:
        other = "--json" if json else "--requests-jsonl"
        raise UsageError(f"--stream excludes {other}: its events already come as they happen", field="--stream")
    if watch and (machine or stream):
        other = "--stream" if stream else "--json" if json else "--requests-jsonl"
        raise UsageError(f"--watch excludes {other}: it shows one answer to somebody who looks", field="--watch")
    if watch and not sys.stdout.isatty():
        raise UsageError("--watch needs a terminal on standard output; --stream and --json do not", field="--watch")
    if raw and prompt is None:
        raise UsageError(f"--raw goes with --prompt only, not with {given[0]}", field="--raw")
    if logprobs is not None and not machine:
        raise UsageError("--logprobs shows in events only; add --json", field="--logprobs")


def _check_input(path: str) -> None:
    """End at once, with the event that reading would give, when the requests cannot be read: no model is loaded."""
    from polytoken.engine.jsonl import check_readable  # noqa: PLC0415

    if fault := check_readable(path):
        JsonLines()(fault)
        raise typer.Exit(EXIT_FAILURE)


def _single_record(*, prompt: str | None, messages: str | None, seed: int) -> dict[str, Any]:
    """The record that a JSON line with the same content would hold; its seed is taken as it is."""
    record: dict[str, Any] = {"request_id": SINGLE_ID, "seed": seed}
    if messages is not None:
        return {**record, "messages": flags.read_messages(messages)}
    if prompt == "-":
        try:
            prompt = standard_input("--prompt").read()
        except UnicodeDecodeError as error:
            raise UsageError(f"--prompt: standard input is not text: {error}", field="--prompt") from None
        prompt = prompt.removesuffix("\n")
    return {**record, "prompt": prompt}


def _single_request(record: Mapping[str, Any], defaults: RequestDefaults, *, raw: bool) -> Request:
    with flags.flag_errors():
        request = parse_record(record, defaults)
    return replace(request, messages=None, raw_prompt=record["prompt"]) if raw else request


def _with_defaults(loaded: RuntimeLoaded, defaults: RequestDefaults, raw: bool) -> RuntimeLoaded:
    """The first event, with what the flags say about requests beside what they say about the engine."""
    return replace(loaded, settings={**loaded.settings, "requests": {**asdict(defaults), "raw": raw}})
