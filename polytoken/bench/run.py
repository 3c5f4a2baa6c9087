"""`polytoken bench`: load, prefill and decode, measured so that another person gets the same figures.

The engine runs as users run it (scheduler, events, owner thread). The peer gets the same network object, so the same
weights, and the same prompt and number of tokens. Variants alternate within one process, one warm-up each; medians are
reported. Decode is timed from the first token to the last and never holds any prefill.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from polytoken.api import make_request, open_engine
from polytoken.assembly import EngineOptions
from polytoken.bench.machine import Machine, describe_machine
from polytoken.bench.peer import Sample, run_mlx_lm
from polytoken.bench.report import Floor, Measurement, Report
from polytoken.bench.roofline import Bandwidth, best_seconds, decode_floor, read_bandwidth
from polytoken.checkpoint.progress import Progress, silent
from polytoken.engine import Engine, LoadedLane
from polytoken.errors import UsageError
from polytoken.kernels import products
from polytoken.lanes.ar import ArLane
from polytoken.models.base import CausalModel
from polytoken.request import SamplingParams

PEERS = ("mlx-lm",)
FILLER = (
    "A short history of measurement: people have compared lengths with the body, then with a rod, and at last with "
    "the wave of a chosen light. Each step traded convenience for agreement between strangers. "
)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        engine: the engine's options; prefix reuse is switched off for the run.
        against: `mlx-lm` or None.
        peer_products: what stands behind the peer's float32 products on the CPU, one variant each: `same` (as ours),
            `stock` (what MLX came with), or the path of a BLAS library.
        prompt_tokens, new_tokens: size of the work.
        rounds: timed rounds, after one warm-up.
    """

    engine: EngineOptions
    against: str | None = None
    peer_products: tuple[str, ...] = ("same", "stock")
    prompt_tokens: int = 512
    new_tokens: int = 128
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.against is not None and self.against not in PEERS:
            raise UsageError(f"--against must be one of {', '.join(PEERS)}, not {self.against!r}", field="--against")
        for name, least in (("prompt_tokens", 2), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least {least}", field=flag)


@dataclass
class _Variant:
    name: str
    run: Callable[[], Sample]
    samples: list[Sample] = field(default_factory=list)


def run_bench(options: BenchOptions, *, progress: Progress = silent) -> Report:
    """Measure, and report. Raises PolytokenError when the model cannot be loaded or the prompt does not fit."""
    engine_options = replace(options.engine, prefix_cache_mib=0)
    with open_engine(engine_options, progress=progress) as engine:
        machine = engine.call(lambda _: describe_machine())
        bandwidth = engine.call(lambda _: read_bandwidth())
        product_rate = engine.call(lambda _: _product_rate())
        ids = _prompt_ids(engine, options.prompt_tokens)
        variants = [_Variant("polytoken", lambda: _run_engine(engine, ids, options))]
        if options.against is not None:
            variants += [_peer_variant(engine, ids, options, name) for name in options.peer_products]
        total = (options.rounds + 1) * len(variants)
        for step in range(total):
            variant = variants[step % len(variants)]
            progress(f"measuring {variant.name}", step, total, "runs")
            sample = variant.run()
            if step >= len(variants):  # the first lap warms up
                variant.samples.append(sample)
        progress("measuring", total, total, "runs")
        return _report(engine, machine, variants, options=options, bandwidth=bandwidth, product_rate=product_rate)


def _prompt_ids(engine: Engine, count: int) -> tuple[int, ...]:
    """Exactly `count` ids of plain English, whatever the tokenizer."""
    text = FILLER * (count // 8 + 1)
    request = make_request(engine, text, raw=True, max_new_tokens=1)
    ids = engine.call(lambda lane: tuple(lane.encode(request)))
    return ids[:count]


def _run_engine(engine: Engine, ids: Sequence[int], options: BenchOptions) -> Sample:
    request = make_request(
        engine, token_ids=ids, max_new_tokens=options.new_tokens, sampling=SamplingParams(), ignore_eos=True
    )
    result = engine.generate(request)
    assert result.ttft_seconds is not None and result.decode_tokens_per_second is not None
    decode_seconds = (result.generated_tokens - 1) / result.decode_tokens_per_second
    return Sample(result.ttft_seconds, decode_seconds, result.token_ids)


def _peer_variant(engine: Engine, ids: Sequence[int], options: BenchOptions, kind: str) -> _Variant:
    wanted = options.engine.products if kind == "same" else kind
    threads = options.engine.threads

    def on_owner(lane: LoadedLane) -> Sample:
        before = products.report().kind
        switches = before not in ("not_needed", wanted)
        if switches:
            products.enable(wanted, threads=threads)
        try:
            return run_mlx_lm(
                _model(lane).network,  # type: ignore[attr-defined]
                ids,
                new_tokens=options.new_tokens,
                prefill_chunk=options.engine.prefill_chunk_size,
            )
        finally:
            if switches:
                products.enable(options.engine.products, threads=threads)

    return _Variant(f"mlx-lm, {kind} products", lambda: engine.call(on_owner))


def _model(lane: LoadedLane) -> CausalModel:
    assert isinstance(lane.lane, ArLane)
    return lane.lane.model


def _product_rate() -> float:
    """GFLOP/s of a square product of 1,024 in the compute dtype of the CPU (float32)."""
    size = 1024
    left, right = mx.random.normal((size, size)), mx.random.normal((size, size))
    mx.eval(left, right)
    return 2 * size**3 / best_seconds(lambda: left @ right, seconds=0.3) / 1e9


def _report(
    engine: Engine,
    machine: Machine,
    variants: Sequence[_Variant],
    *,
    options: BenchOptions,
    bandwidth: Bandwidth,
    product_rate: float,
) -> Report:
    loaded = engine.loaded
    ours = variants[0].samples[0].token_ids
    weight_bytes, cache_bytes = engine.call(lambda lane: _bytes_read(lane, options))
    floor = decode_floor(weight_bytes, cache_bytes, bandwidth)
    return Report(
        machine=machine,
        engine=loaded.engine,
        model=str(loaded.extra["model"]),
        identity=str(loaded.extra["identity"]),
        dtype=str(loaded.extra["dtype"]),
        device=str(loaded.extra["device"]),
        products=dict(loaded.extra["products"]),
        load_seconds=loaded.load_seconds,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        rounds=options.rounds,
        floor=Floor(
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            gb_per_second=bandwidth.gb_per_second,
            method=bandwidth.method,
            tokens_per_second=1 / floor,
        ),
        product_gflops=product_rate,
        measurements=tuple(_measure(variant, options, ours=ours, floor=floor) for variant in variants),
    )


def _bytes_read(lane: LoadedLane, options: BenchOptions) -> tuple[int, int]:
    """Bytes of weights, and of cache half-way through decoding, that one forward reads."""
    model = _model(lane)
    cache = model.make_cache()
    model.forward(mx.zeros((1, 2), dtype=mx.int32), cache, keep=0)
    per_token = cache.nbytes / 2
    return model.weight_bytes_per_forward, int(per_token * (options.prompt_tokens + options.new_tokens / 2))


def _measure(variant: _Variant, options: BenchOptions, *, ours: tuple[int, ...], floor: float) -> Measurement:
    prefill = [options.prompt_tokens / sample.prefill_seconds for sample in variant.samples]
    decode = [(len(sample.token_ids) - 1) / sample.decode_seconds for sample in variant.samples]
    theirs = variant.samples[0].token_ids
    agreed = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
    return Measurement(
        name=variant.name,
        prefill_tokens_per_second=statistics.median(prefill),
        prefill_range=(min(prefill), max(prefill)),
        decode_tokens_per_second=statistics.median(decode),
        decode_range=(min(decode), max(decode)),
        floor_share=statistics.median(decode) * floor,
        tokens_per_forward=1.0,
        first_difference=agreed,
    )
