"""Variants of the mtp lane: every depth beside our ar lane and the peer's, on the same weights in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polytoken.bench.ar import ar_variant, causal_floor, peer_variants
from polytoken.bench.driver import Driver
from polytoken.bench.floor import least_bytes
from polytoken.bench.options import BenchOptions
from polytoken.bench.report import Floor
from polytoken.bench.roofline import Bandwidth
from polytoken.bench.sample import Sample, Variant
from polytoken.engine import LoadedLane
from polytoken.events import GenerationResult
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane

AR = "ar"  # the name of our own lane without drafts
_COUNTS = (
    *("verify_calls", "drafted_tokens", "accepted_drafts", "bonus_tokens", "correction_tokens", "copied_tokens"),
    *("accepted_copies", "forwards_again"),
)
_SECONDS = ("draft_seconds", "verify_seconds", "accept_seconds")


def plan_mtp(driver: Driver, options: BenchOptions, bandwidth: Bandwidth) -> list[Variant]:
    """Each depth, then our ar lane, then the peer."""
    floor = causal_floor(driver, options, bandwidth)
    depths = options.depths or (options.engine.mtp.depth,)
    drafting = [_depth_variant(driver, options, floor, depth) for depth in depths]
    return [*drafting, ar_variant(driver, floor, name=AR), *peer_variants(driver, options, floor)]


def describe_drafting(variant: Variant) -> dict[str, Any]:
    """What a variant's rounds did, counts of all rounds together."""
    results = variant.results
    drafted, accepted = (_total(results, name) for name in ("drafted_by_depth", "accepted_by_depth"))
    counts = {name: sum(int(result.extra.get(name, 0)) for result in results) for name in _COUNTS}
    windows = max(counts["verify_calls"], 1)
    return {
        **counts,
        "acceptance": counts["accepted_drafts"] / max(counts["drafted_tokens"], 1),
        "drafted_by_depth": drafted,
        "accepted_by_depth": accepted,
        "acceptance_by_depth": [a / max(d, 1) for a, d in zip(accepted, drafted, strict=True)],
        "tokens_per_window": sum(result.generated_tokens - 1 for result in results) / windows,
        **{name: sum(float(result.extra.get(name, 0.0)) for result in results) / windows for name in _SECONDS},
        "speculation": str(results[-1].extra.get("speculation", "on")),
    }


def _depth_variant(driver: Driver, options: BenchOptions, floor: Floor, depth: int) -> Variant:
    settings = replace(options.engine.mtp, depth=depth)

    def choose(loaded: LoadedLane) -> Lane[Any]:
        assert isinstance(loaded.lane, MtpLane)
        loaded.lane.settings = settings
        return loaded.lane

    def read_bytes(sample: Sample) -> float:
        result = sample.result
        assert result is not None
        return driver.engine.call(lambda loaded: least_bytes(loaded.lane, result, cache_bytes=floor.cache_bytes))

    if settings.network is None:
        name = f"mtp, {settings.drafter}"
    else:
        source = "" if settings.drafter == "head" else f" by {settings.drafter}"
        name = f"mtp{source}, depth {depth}" + ("" if settings.policy == "fixed" else f" at most ({settings.policy})")
    return Variant(name, "mtp", lambda: driver.run(choose), read_bytes)


def _total(results: Sequence[GenerationResult], name: str) -> list[int]:
    """Sums by depth over results whose lists may differ in length."""
    lists = [result.extra.get(name, []) for result in results]
    return [sum(counts[j] for counts in lists if j < len(counts)) for j in range(max(map(len, lists), default=0))]
