"""The variant of the canvas lane: how many denoises an answer takes, and how fast they are."""

from __future__ import annotations

import statistics
from typing import Any

from polytoken.bench.driver import Driver
from polytoken.bench.floor import decode_seconds, least_bytes, least_flops
from polytoken.bench.options import BenchOptions
from polytoken.bench.report import Floor
from polytoken.bench.roofline import Bandwidth
from polytoken.bench.sample import Sample, Variant
from polytoken.engine import LoadedLane
from polytoken.lanes.canvas.lane import CanvasLane


def plan_canvas(driver: Driver, options: BenchOptions, bandwidth: Bandwidth) -> list[Variant]:
    """One variant: the lane under the policy it was loaded with."""

    def read_bytes(sample: Sample) -> float:
        result = sample.result
        assert result is not None
        return driver.engine.call(lambda loaded: least_bytes(loaded.lane, result))

    policy = driver.engine.loaded.extra["policy"]
    return [
        Variant(
            f"canvas, {policy} policy",
            "canvas",
            lambda: driver.run(lambda loaded: loaded.lane),
            read_bytes,
            counted_tokens=lambda sample: len(sample.token_ids),
        )
    ]


def canvas_floor(driver: Driver, options: BenchOptions, bandwidth: Bandwidth) -> Floor:
    """Of one denoise, half-way through the new tokens."""
    cost = driver.engine.call(
        lambda loaded: _canvas(loaded).model.denoise_cost(options.prompt_tokens + options.new_tokens // 2)
    )
    return Floor.of(cost.weight_bytes, cost.state_bytes, bandwidth, flops=cost.flops)


def describe_denoising(variant: Variant, driver: Driver, *, gflops: float) -> dict[str, Any]:
    """Counts of one round (all have the same seed), medians of what is timed."""
    results = variant.results
    one = results[0]
    length = int(driver.engine.loaded.extra["canvas_length"])
    steps = int(one.extra["denoise_steps"])
    canvases = one.extra.get("canvas_count") or one.generated_tokens / length
    flops = driver.engine.call(lambda loaded: least_flops(_canvas(loaded), one))
    seconds = statistics.median(decode_seconds(result) or 0.0 for result in results)
    firsts = [result.ttft_seconds for result in results if result.ttft_seconds is not None]
    return {
        "canvas_length": length,
        "denoise_steps": steps,
        "steps_per_canvas": steps / canvases if canvases else None,
        "jump_count": int(one.extra["jump_count"]),
        "stop_reason": one.stop_reason,
        "denoises_per_second": statistics.median(result.extra["denoise_steps_per_second"] for result in results),
        "ttfd_seconds": statistics.median(result.extra["ttfd_seconds"] for result in results),
        "ttft_seconds": statistics.median(firsts) if firsts else None,
        "flop_floor_share": flops / (gflops * 1e9) / seconds,
    }


def _canvas(loaded: LoadedLane) -> CanvasLane:
    assert isinstance(loaded.lane, CanvasLane)
    return loaded.lane
