"""Variants that decode token by token: our own lane, and the peer's loop over the same network."""

from __future__ import annotations

from typing import Any

from polytoken.bench.driver import Driver
from polytoken.bench.floor import cache_bytes_read
from polytoken.bench.options import BenchOptions
from polytoken.bench.peer import run_mlx_lm
from polytoken.bench.report import Floor
from polytoken.bench.roofline import Bandwidth
from polytoken.bench.sample import Sample, Variant
from polytoken.cache.bank import StateBank
from polytoken.engine import LoadedLane
from polytoken.kernels import products
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane


def plan_ar(driver: Driver, options: BenchOptions, bandwidth: Bandwidth) -> list[Variant]:
    """Our lane first, then the peer once with each kind of products."""
    floor = causal_floor(driver, options, bandwidth)
    return [ar_variant(driver, floor, name="polytoken"), *peer_variants(driver, options, floor)]


def causal_floor(driver: Driver, options: BenchOptions, bandwidth: Bandwidth) -> Floor:
    """Of one forward of a causal model, half-way through the new tokens."""

    def read(loaded: LoadedLane) -> tuple[int, int]:
        model = _causal(loaded).model
        return model.weight_bytes_per_forward, cache_bytes_read(model, options.prompt_tokens + options.new_tokens // 2)

    return Floor.of(*driver.engine.call(read), bandwidth)


def ar_variant(driver: Driver, floor: Floor, *, name: str) -> Variant:
    """Our autoregressive lane over the loaded model, whatever lane it was loaded for."""

    def read_bytes(sample: Sample) -> float:
        assert sample.result is not None
        return (sample.result.forwards - 1) * floor.bytes_per_forward

    return Variant(name, "ar", lambda: driver.run(as_ar), read_bytes)


def peer_variants(driver: Driver, options: BenchOptions, floor: Floor) -> list[Variant]:
    """The peer, if it was asked for, once with each kind of products."""
    return [] if options.against is None else [_peer(driver, options, floor, kind) for kind in options.peer_products]


def as_ar(loaded: LoadedLane) -> Lane[Any]:
    """The ar lane over the loaded model."""
    lane = _causal(loaded)
    if isinstance(lane, ArLane):
        return lane
    return ArLane(
        lane.model,
        StateBank(0, identity=lane.bank.identity),
        prefill_chunk=lane.prefill_chunk,
        eos_ids=tuple(lane.eos_ids),
        turn_end_id=lane.turn_end_id,
        max_positions=lane.max_positions,
    )


def _peer(driver: Driver, options: BenchOptions, floor: Floor, kind: str) -> Variant:
    wanted = options.engine.products if kind == "same" else kind
    threads = options.engine.threads

    def on_owner(loaded: LoadedLane) -> Sample:
        before = products.report().kind
        switches = before not in ("not_needed", wanted)
        if switches:
            products.enable(wanted, threads=threads)
        try:
            network = _causal(loaded).model.network  # type: ignore[attr-defined]  # of mlx-lm's families
            return run_mlx_lm(
                network, driver.prompt_ids, new_tokens=driver.new_tokens, prefill_chunk=driver.prefill_chunk
            )
        finally:
            if switches:
                products.enable(options.engine.products, threads=threads)

    return Variant(
        f"mlx-lm, {kind} products",
        "peer",
        lambda: driver.engine.call(on_owner),
        lambda sample: (len(sample.token_ids) - 1) * floor.bytes_per_forward,
    )


def _causal(loaded: LoadedLane) -> ArLane | MtpLane:
    assert isinstance(loaded.lane, ArLane | MtpLane)
    return loaded.lane
