"""The one place where the rooms are put together: options in, a running engine out; and the Python interface on top.

import polytoken

with polytoken.load("smollm2-135m") as engine:
    print(polytoken.generate(engine, "What is the capital of France?").text)
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from polytoken import __version__
from polytoken.backend import DEVICES, enable_products, require_mlx, select_device
from polytoken.checkpoint.progress import Progress, silent
from polytoken.engine import Engine, Label, LoadedLane, SchedulerLimits, error_of
from polytoken.errors import RequestError, UsageError
from polytoken.events import GenerationFailed, GenerationResult, RequestRejected, RuntimeLoaded, Token
from polytoken.request import Request, RequestDefaults, SamplingParams, derive_seed

LANES = ("auto", "ar")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything an engine can be told. Every field has an effect that `runtime_loaded` reports.

    Attributes:
        model: folder, hub id, GGUF file or catalogue name.
        lane: `ar`, or `auto` for what suits the checkpoint.
        dtype: of weights and arithmetic: `auto` (float32 on the CPU, as stored on a GPU), `float32`, `bfloat16`, ...
        dequantise: unpack quantised weights at load; None means on the CPU when memory allows.
        products: what multiplies float32 matrices on the CPU: `exact`, `stock`, or the path of a BLAS library.
        threads: most threads that one product may use.
        device: `auto`, `cpu` or `gpu`.
        revision: branch, tag or commit of a hub id.
        offline: never use the network.
        store: folder of pulled models, None for the user's cache folder.
        batch_size: rows prefilling or decoding at once.
        prefill_chunk_size: prompt tokens per prefill forward, and per turn of the scheduler.
        prefix_cache_mib: MiB for reusable prompt states; 0 turns reuse off.
        max_queue_size: requests that may wait.
        token_events: whether `token` events are sent to those who do not say.
    """

    model: str
    lane: str = "auto"
    dtype: str = "auto"
    dequantise: bool | None = None
    products: str = "exact"
    threads: int = 1
    device: str = "auto"
    revision: str | None = None
    offline: bool = False
    store: Path | None = None
    batch_size: int = 4
    prefill_chunk_size: int = 256
    prefix_cache_mib: int = 512
    max_queue_size: int = 128
    token_events: bool = True

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise UsageError(f"--lane must be one of {', '.join(LANES)}, not {self.lane!r}", field="--lane")
        if self.device not in DEVICES:
            raise UsageError(f"--device must be one of {', '.join(DEVICES)}, not {self.device!r}", field="--device")
        if self.prefix_cache_mib < 0:
            raise UsageError("--prefix-cache-mib must be 0 (off) or more", field="--prefix-cache-mib")
        self.limits()  # checks the rest

    def limits(self) -> SchedulerLimits:
        """The scheduler's share of the options."""
        return SchedulerLimits(
            max_rows=self.batch_size, max_pending=self.max_queue_size, prefill_budget=self.prefill_chunk_size
        )


def open_engine(options: EngineOptions, *, progress: Progress = silent) -> Engine:
    """Load the model on the engine's own thread and return the engine, running.

    Raises:
        PolytokenError: what is wrong with the options, the checkpoint or the backend.
    """
    require_mlx()
    engine = Engine(lambda: _load_lane(options, progress), options.limits(), token_events=options.token_events)
    engine.start()
    return engine


def load(model: str | Path, **options: Any) -> Engine:
    """A running engine for a model; see `EngineOptions` for the keywords. Close it, or use it in a `with`."""
    return open_engine(EngineOptions(model=str(model), **options))


_counter = itertools.count(1)


def make_request(
    engine: Engine,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    token_ids: Sequence[int] | None = None,
    raw: bool = False,
    max_new_tokens: int | None = None,
    seed: int | None = None,
    think: bool = True,
    sampling: SamplingParams | None = None,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    request_id: str | None = None,
) -> Request:
    """A request for this engine, from exactly one of `prompt`, `messages` and `token_ids`.

    Args:
        prompt: one user turn, or with `raw` text that is encoded as it stands.
        messages: chat turns with `role` and `content`.
        token_ids: prompt ids that are used as they stand.
        max_new_tokens: None for up to 8192, as far as the context has room.
        seed: None derives one from the request id.
        sampling: None for what the checkpoint recommends.
        request_id: None for a fresh one.

    Raises:
        RequestError: `prompt_xor_messages`, `bad_limit`, `bad_seed`, `bad_request_id`.
    """
    if sum(item is not None for item in (prompt, messages, token_ids)) != 1:
        raise RequestError(
            "give exactly one of prompt, messages and token_ids", code="prompt_xor_messages", field="prompt"
        )
    defaults = RequestDefaults()
    request_id = request_id or f"python-{next(_counter)}"
    if prompt is not None and not raw:
        messages = [{"role": "user", "content": prompt}]
    return Request(
        request_id=request_id,
        max_new_tokens=defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
        limit_is_default=max_new_tokens is None,
        messages=None if messages is None else tuple(messages),
        raw_prompt=prompt if raw else None,
        token_ids=None if token_ids is None else tuple(token_ids),
        seed=derive_seed(defaults.seed, request_id) if seed is None else seed,
        think=think,
        sampling=engine.sampling if sampling is None else sampling,
        stop=tuple(stop),
        ignore_eos=ignore_eos,
    )


def generate(engine: Engine, prompt: str | None = None, **request: Any) -> GenerationResult:
    """The whole answer to one request; keywords as in `make_request`. Raises PolytokenError if there is none."""
    return engine.generate(make_request(engine, prompt, **request))


def stream(engine: Engine, prompt: str | None = None, **request: Any) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Pairs (new text, new ids) as they are committed; keywords as in `make_request`.

    Leaving the iterator early cancels the request. Raises PolytokenError if the request fails.
    """
    made = make_request(engine, prompt, **request)
    for event in engine.stream(made, token_events=True):
        if isinstance(event, Token):
            yield event.delta, event.token_ids
        elif isinstance(event, (GenerationFailed, RequestRejected)):
            raise error_of(event)


def chat(engine: Engine, messages: Sequence[Mapping[str, Any]], **request: Any) -> GenerationResult:
    """The next turn of a conversation; the same as `generate(engine, messages=...)`."""
    return generate(engine, messages=messages, **request)


# -- loading, on the owner thread ------------------------------------------------------------------------------------


def _load_lane(options: EngineOptions, progress: Progress) -> LoadedLane:
    start = time.perf_counter()
    device = select_device(options.device)
    products = enable_products(device, options.products, threads=options.threads)
    # Imported here, on the thread that owns MLX.

    from polytoken.cache.bank import StateBank  # noqa: PLC0415
    from polytoken.cache.identity import StateIdentity  # noqa: PLC0415
    from polytoken.checkpoint import CheckpointStore, load_runtime  # noqa: PLC0415
    from polytoken.lanes.ar import ArLane  # noqa: PLC0415
    from polytoken.text.prompt import prompt_ids  # noqa: PLC0415
    from polytoken.text.stream import TextStream  # noqa: PLC0415

    runtime = load_runtime(
        options.model,
        store=None if options.store is None else CheckpointStore(options.store),
        dtype=options.dtype,
        dequantise=options.dequantise,
        revision=options.revision,
        offline=options.offline,
        progress=progress,
    )
    identity = StateIdentity(
        checkpoint=runtime.identity,
        lane="ar",
        grid=options.prefill_chunk_size,
        numerics=f"{device}/{runtime.dtype}/{products.kind}/{products.form}",
        template_hash=runtime.tokenizer.identity,
    )
    turn_end_id = runtime.generation.get("turn_end_token_id", runtime.config.get("turn_end_token_id"))
    lane = ArLane(
        runtime.model,
        StateBank(options.prefix_cache_mib * _MIB, identity=identity),
        prefill_chunk=options.prefill_chunk_size,
        eos_ids=runtime.tokenizer.eos_ids,
        turn_end_id=turn_end_id,
        max_positions=runtime.max_positions,
    )
    tokenizer, stop_ids = runtime.tokenizer, lane.eos_ids

    def open_text(request: Request) -> TextStream:
        return TextStream(tokenizer, stop=request.stop, stop_ids=frozenset() if request.ignore_eos else stop_ids)

    loaded = RuntimeLoaded(
        engine=f"polytoken {__version__}",
        checkpoint=str(runtime.checkpoint),
        step=runtime.step,
        restored_trainable_tensors=runtime.tensor_count,
        backend="mlx",
        lane=lane.name,
        execution=lane.execution,
        load_seconds=time.perf_counter() - start,
        extra={
            "model": runtime.name,
            "revision": runtime.revision,
            "identity": runtime.identity,
            "device": device,
            "dtype": runtime.dtype,
            "quantisation": runtime.quantisation,
            "stored_quantisation": runtime.stored_quantisation,
            "parameters": runtime.parameters,
            "weight_bytes": runtime.weight_bytes,
            "max_positions": runtime.max_positions,
            "products": asdict(products),
        },
        settings={**asdict(options), "store": None if options.store is None else str(options.store)},
    )
    return LoadedLane(
        lane=lane,
        encode=lambda request: prompt_ids(tokenizer, request),
        open_text=open_text,
        label=Label(str(runtime.checkpoint), runtime.step),
        loaded=loaded,
        sampling=recommended_sampling(runtime.generation),
        release=_release_device,
    )


def _release_device() -> None:
    """Last act on the owner thread: wait for work in flight, give memory back, and end the thread's streams.

    A stream that is still alive when its thread has gone can abort the process at exit.
    """
    import mlx.core as mx  # noqa: PLC0415

    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()


def recommended_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """The sampling a checkpoint's generation_config.json asks for: greedy unless it says `do_sample`."""
    if generation.get("do_sample") is not True:
        return SamplingParams()
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    return replace(SamplingParams(temperature=1.0), **given)
