"""`polytoken generate`: one prompt, or many requests as JSON lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polytoken.cli import options as flags
from polytoken.cli.interrupts import draining
from polytoken.cli.loading import load_engine
from polytoken.cli.output import (
    JsonLines,
    PlainText,
    describe_result,
    describe_runtime,
    describe_summary,
    say,
)
from polytoken.cli.progress import waiting
from polytoken.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, UsageError
from polytoken.events import (
    Event,
    GenerationResult,
    InferenceSummary,
    RequestRejected,
    RuntimeLoaded,
    is_failure,
)
from polytoken.request import Request, RequestDefaults, SamplingParams, parse_record

if TYPE_CHECKING:
    from polytoken.engine import Engine, LoadedLane

SINGLE_ID = "single"  # the id of a prompt on the command line
Source = Iterable[Request | RequestRejected]


def generate(
    *,
    model: flags.Model,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="One user turn; - reads standard input.")] = None,
    messages: Annotated[
        str | None, typer.Option(metavar="FILE", help="Chat turns as a JSON list; - reads standard input.")
    ] = None,
    requests_jsonl: Annotated[
        str | None, typer.Option(metavar="PATH", help="Many requests, one JSON object a line; - reads standard input.")
    ] = None,
    stream: Annotated[bool, typer.Option("--stream", help="Print text as it comes.")] = False,
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
    max_queue_size: flags.MaxQueueSize = 128,
) -> None:
    """Generate text: one answer, or a stream of events for many requests."""
    machine = json or requests_jsonl is not None
    _check_combination(
        prompt=prompt, messages=messages, requests=requests_jsonl, stream=stream, json=json, raw=raw,
        logprobs=logprobs, machine=machine,
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

    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415

    engine_options = EngineOptions(
        model=model, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, batch_size=batch_size, prefill_chunk_size=prefill_chunk_size,
        prefix_cache_mib=prefix_cache_mib, max_queue_size=max_queue_size,
    )  # fmt: skip
    with load_engine(engine_options, verbose=verbose) as engine:
        chosen = defaults(engine.sampling)
        source: Source
        if record is not None:
            source = [_single_request(record, chosen, raw=raw)]
        else:
            from polytoken.engine import read_requests  # noqa: PLC0415

            source = read_requests(str(requests_jsonl), chosen)
        printer = JsonLines() if machine else PlainText(stream=stream)
        report = verbose or (sys.stderr.isatty() and not machine)
        status = _serve(engine, source, printer, loaded=_with_defaults(engine.loaded, chosen, raw), report=report,
                        measure=verbose)  # fmt: skip
    raise typer.Exit(status)


def _serve(
    engine: Engine,
    source: Source,
    printer: JsonLines | PlainText,
    *,
    loaded: RuntimeLoaded,
    report: bool,
    measure: bool,
) -> int:
    """Print every event of one run and return the exit status."""
    failed = False
    result: GenerationResult | None = None
    with draining(engine) as interrupt:
        printer(loaded)
        if report:
            say("note", describe_runtime(loaded))
        wanted = interrupt.guard(source)
        for event in _watch_prefill(engine.run(wanted, token_events=printer.token_events)):
            printer(event)
            failed = failed or is_failure(event)
            if isinstance(event, GenerationResult):
                result = event
            elif isinstance(event, InferenceSummary) and report:
                many = event.finished_requests + event.failed_requests + event.rejected_requests > 1
                if result is not None and not many:
                    say("note", describe_result(result, floor_share=_floor_share(engine, result) if measure else None))
                else:
                    say("note", describe_summary(event))
    if interrupt.pressed:
        return EXIT_INTERRUPTED
    return EXIT_FAILURE if failed else EXIT_OK


def _watch_prefill(events: Iterator[Event]) -> Iterator[Event]:
    """The same events, with a spinner on a terminal until the first of them."""
    with waiting("Reading the prompt"):
        first = next(events, None)
    if first is not None:
        yield first
        yield from events


def _floor_share(engine: Engine, result: GenerationResult) -> float | None:
    """How close decoding came to reading every weight once per forward at this machine's measured read bandwidth."""
    rate = result.decode_tokens_per_second
    if rate is None:
        return None
    from polytoken.bench.roofline import decode_floor, read_bandwidth  # noqa: PLC0415
    from polytoken.lanes.ar import ArLane  # noqa: PLC0415

    def floor(loaded: LoadedLane) -> float | None:  # on the thread that owns the device
        lane = loaded.lane
        if not isinstance(lane, ArLane):
            return None
        return decode_floor(lane.model.weight_bytes_per_forward, 0, read_bandwidth())

    seconds = engine.call(floor)
    return None if seconds is None else seconds * rate / result.tokens_per_forward


def _check_combination(
    *, prompt: str | None, messages: str | None, requests: str | None, stream: bool, json: bool, raw: bool,
    logprobs: int | None, machine: bool,
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
    if raw and prompt is None:
        raise UsageError(f"--raw goes with --prompt only, not with {given[0]}", field="--raw")
    if logprobs is not None and not machine:
        raise UsageError("--logprobs shows in events only; add --json", field="--logprobs")


def _check_input(path: str) -> None:
    """End at once, with the event that reading would give, when the requests cannot be read: no model is loaded."""
    if path == "-" or os.access(path, os.R_OK):
        return
    from polytoken.engine import read_requests  # noqa: PLC0415

    printer = JsonLines()
    for event in read_requests(path, RequestDefaults()):
        if isinstance(event, RequestRejected):
            printer(event)
            raise typer.Exit(EXIT_FAILURE)
        return


def _single_record(*, prompt: str | None, messages: str | None, seed: int) -> dict[str, Any]:
    """The record that a JSON line with the same content would hold; its seed is taken as it is."""
    record: dict[str, Any] = {"request_id": SINGLE_ID, "seed": seed}
    if messages is not None:
        return {**record, "messages": flags.read_messages(messages)}
    if prompt == "-":
        try:
            prompt = sys.stdin.read()
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
