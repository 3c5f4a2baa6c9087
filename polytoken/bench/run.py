"""`polytoken bench`: load, prefill and decode, measured so that another person gets the same figures.

Every lane runs through the engine's scheduler on its owner thread. Variants work on the same loaded weights, the same
prompt and the same number of tokens; they alternate within one process, one warm-up each, and medians are reported.
Decode is timed from the first token to the last and never holds any prefill. Read bandwidth is measured before and
after each run, which is held to its own: on a shared host it is another one seconds later.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import mlx.core as mx

from polytoken.api import open_engine
from polytoken.bench.ar import causal_floor, plan_ar
from polytoken.bench.canvas import canvas_floor, describe_denoising, plan_canvas
from polytoken.bench.driver import Driver
from polytoken.bench.machine import describe_machine
from polytoken.bench.mtp import AR, describe_drafting, plan_mtp
from polytoken.bench.options import BenchOptions
from polytoken.bench.report import Measurement, Report
from polytoken.bench.roofline import Bandwidth, best_seconds, read_bandwidth, sustained_bandwidth
from polytoken.bench.sample import Sample, Variant
from polytoken.checkpoint.progress import Progress, silent
from polytoken.events import RuntimeLoaded

_PRODUCT_SIZE = 1024
_PRODUCT_SECONDS = 0.3
_PLANS = {"ar": plan_ar, "mtp": plan_mtp, "canvas": plan_canvas}


def run_bench(
    options: BenchOptions, *, progress: Progress = silent, check: Callable[[RuntimeLoaded], None] | None = None
) -> Report:
    """Measure, and report. `check` may refuse what was loaded before anything is measured.

    Raises PolytokenError when the model cannot be loaded or the prompt does not fit.
    """
    with open_engine(options.loading(), progress=progress) as engine:
        loaded = engine.loaded
        options.check_lane(loaded.lane)
        if check is not None:
            check(loaded)
        machine = engine.call(lambda _: describe_machine())
        bandwidth = engine.call(lambda _: read_bandwidth())
        gflops = engine.call(lambda _: _product_rate(str(loaded.extra["dtype"])))
        driver = Driver(
            engine,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            prefill_chunk=options.engine.prefill_chunk_size,
        )
        variants = _PLANS[loaded.lane](driver, options, bandwidth)
        beside = _take_turns(
            variants,
            rounds=options.rounds,
            progress=progress,
            measure=lambda: engine.call(lambda _: sustained_bandwidth()),
        )
        make_floor = canvas_floor if loaded.lane == "canvas" else causal_floor
        return Report(
            machine=machine,
            engine=loaded.engine,
            model=str(loaded.extra["model"]),
            identity=str(loaded.extra["identity"]),
            lane=loaded.lane,
            dtype=str(loaded.extra["dtype"]),
            device=str(loaded.extra["device"]),
            products=dict(loaded.extra["products"]),
            load_seconds=loaded.load_seconds,
            prompt_tokens=options.prompt_tokens,
            new_tokens=options.new_tokens,
            rounds=options.rounds,
            floor=make_floor(driver, options, bandwidth).beside(beside),
            product_gflops=gflops,
            measurements=_measure_all(variants, driver, options, gflops=gflops),
        )


def _take_turns(
    variants: list[Variant], *, rounds: int, progress: Progress, measure: Callable[[], Bandwidth]
) -> Bandwidth:
    """Run all variants in turns, the first lap to warm up; `measure` gives the read bandwidth of the moment.

    Returns the median of the bandwidths beside the timed runs.
    """
    total = (rounds + 1) * len(variants)
    before = measure()
    for step in range(total):
        variant = variants[step % len(variants)]
        progress(f"measuring {variant.name}", step, total, "runs")
        sample = variant.run()
        after = measure()
        if step >= len(variants):
            beside = (before.gb_per_second + after.gb_per_second) / 2
            variant.samples.append(replace(sample, gb_per_second=beside))
        before = after
    progress("measuring", total, total, "runs")
    rates = (sample.gb_per_second for variant in variants for sample in variant.samples)
    return Bandwidth(statistics.median(rates), before.method)


def _product_rate(dtype: str) -> float:
    """GFLOP/s of a large square product in the compute dtype."""
    size = _PRODUCT_SIZE
    kind = getattr(mx, dtype, mx.float32)
    left, right = (mx.random.normal((size, size)).astype(kind) for _ in range(2))
    mx.eval(left, right)
    return 2 * size**3 / best_seconds(lambda: left @ right, seconds=_PRODUCT_SECONDS) / 1e9


def _measure_all(
    variants: list[Variant], driver: Driver, options: BenchOptions, *, gflops: float
) -> tuple[Measurement, ...]:
    ours = variants[0].samples[0].token_ids
    plain = next((variant for variant in variants if variant.name == AR), None)
    measured = []
    for variant in variants:
        details: dict[str, Any] = {}
        if variant.lane == "mtp":
            assert plain is not None
            details = {**describe_drafting(variant), "against_ar": _decode(variant) / _decode(plain)}
        elif variant.lane == "canvas":
            details = describe_denoising(variant, driver, gflops=gflops)
        measured.append(_measure(variant, options, ours=ours, details=details))
    return tuple(measured)


def _measure(variant: Variant, options: BenchOptions, *, ours: tuple[int, ...], details: dict[str, Any]) -> Measurement:
    prefill = [options.prompt_tokens / sample.prefill_seconds for sample in variant.samples]
    decode = [_rate(variant, sample) for sample in variant.samples]
    shares = [variant.floor_share(sample) for sample in variant.samples]
    theirs = variant.samples[0].token_ids
    results = variant.results
    return Measurement(
        name=variant.name,
        lane=variant.lane,
        prefill_tokens_per_second=statistics.median(prefill),
        prefill_range=(min(prefill), max(prefill)),
        decode_tokens_per_second=statistics.median(decode),
        decode_range=(min(decode), max(decode)),
        floor_share=statistics.median(shares),
        floor_share_range=(min(shares), max(shares)),
        gb_per_second=variant.median(lambda sample: sample.gb_per_second),
        tokens_per_forward=statistics.median(result.tokens_per_forward for result in results) if results else 1.0,
        first_difference=next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None),
        details=details,
    )


def _decode(variant: Variant) -> float:
    return variant.median(lambda sample: _rate(variant, sample))


def _rate(variant: Variant, sample: Sample) -> float:
    """Tokens per second of one round's decoding."""
    return variant.counted_tokens(sample) / sample.decode_seconds
