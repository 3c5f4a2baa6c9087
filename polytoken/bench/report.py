"""A benchmark's figures: a table for people, a record for programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

from polytoken.bench.machine import Machine
from polytoken.bench.roofline import Bandwidth

SCHEMA = 3


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The floor of one forward: it cannot be faster than reading its bytes once.

    Attributes:
        weight_bytes, cache_bytes: read per forward; the cache half-way through the generated tokens.
        flops: of a denoise; None where a forward has few rows and reading is all that counts.
        gb_per_second, method: read bandwidth beside the rounds, the median over all of them.
        peak_gb_per_second: the best burst, measured before them.
        forwards_per_second: gb_per_second over bytes.
    """

    weight_bytes: int
    cache_bytes: int
    flops: int | None
    gb_per_second: float
    method: str
    peak_gb_per_second: float
    forwards_per_second: float

    @classmethod
    def of(
        cls,
        weight_bytes: int,
        cache_bytes: int,
        bandwidth: Bandwidth,
        *,
        flops: int | None = None,
        peak: float | None = None,
    ) -> Floor:
        """The floor of a forward that reads so many bytes."""
        rate = bandwidth.gb_per_second * 1e9 / (weight_bytes + cache_bytes)
        return cls(
            weight_bytes=weight_bytes,
            cache_bytes=cache_bytes,
            flops=flops,
            gb_per_second=bandwidth.gb_per_second,
            method=bandwidth.method,
            peak_gb_per_second=bandwidth.gb_per_second if peak is None else peak,
            forwards_per_second=rate,
        )

    @property
    def bytes_per_forward(self) -> int:
        return self.weight_bytes + self.cache_bytes

    def beside(self, bandwidth: Bandwidth) -> Floor:
        """The same at another bandwidth; the best burst stays."""
        return Floor.of(self.weight_bytes, self.cache_bytes, bandwidth, flops=self.flops, peak=self.peak_gb_per_second)


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Medians of one variant, with the smallest and largest round beside them.

    Attributes:
        lane: the lane at work, or `peer`.
        prefill_tokens_per_second: prompt tokens over time to the first token (on a canvas, to the first denoise).
        decode_tokens_per_second: from the first token to the last; on a canvas over all denoises.
        floor_share: least time for the bytes that decoding reads, over its time; each round against the bandwidth
            measured just before and just after it.
        gb_per_second: that bandwidth.
        first_difference: index of the first token unlike the first variant's, None when all are equal.
        details: the lane's own figures; members of the measurement in JSON.
    """

    name: str
    lane: str
    prefill_tokens_per_second: float
    prefill_range: tuple[float, float]
    decode_tokens_per_second: float
    decode_range: tuple[float, float]
    floor_share: float
    floor_share_range: tuple[float, float]
    gb_per_second: float
    tokens_per_forward: float
    first_difference: int | None
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a second person needs to repeat the measurement and to compare."""

    machine: Machine
    engine: str
    model: str
    identity: str
    lane: str
    dtype: str
    device: str
    products: dict[str, Any]
    load_seconds: float
    prompt_tokens: int
    new_tokens: int
    rounds: int
    floor: Floor
    product_gflops: float
    measurements: tuple[Measurement, ...]

    def to_json(self) -> str:
        record = {"schema": SCHEMA, **asdict(self)}
        record["measurements"] = [_flat(row) for row in record["measurements"]]
        return json.dumps(record, indent=1, allow_nan=False)

    def print(self, console: Console) -> None:
        """The table: how many times faster the first variant is than another stands beside the other's rate."""
        title = f"{self.model}, {self.dtype}, {self.prompt_tokens} prompt + {self.new_tokens} new tokens"
        table = Table(title=title)
        for heading in ("", *_COLUMNS):
            table.add_column(heading, justify="left" if not heading else "right")
        for row in self.measurements:
            table.add_row(row.name, *(show(self.measurements[0], row) for show in _COLUMNS.values()))
        console.print(table)
        for row in self.measurements:
            if row.details:
                console.print(f"{row.name}: {_LINES[row.lane](row.details)}")
        console.print(self._conditions())

    def _conditions(self) -> str:
        floor = self.floor
        per = "denoise" if self.lane == "canvas" else "forward"
        flops = "" if floor.flops is None else f" and {floor.flops / 1e9:.2f} GFLOP"
        return (
            f"byte floor {floor.forwards_per_second:.1f} {per}s/s: "
            f"{floor.bytes_per_forward / 1e6:.0f} MB{flops} per {per} at "
            f"{floor.gb_per_second:.1f} GB/s ({floor.method}; best {floor.peak_gb_per_second:.1f}); "
            f"{self.dtype} products {self.product_gflops:.0f} GFLOP/s; load {self.load_seconds:.1f} s; "
            f"medians of {self.rounds} rounds, the share of each against the bandwidth just before and after it\n"
            f"{self.machine.processor}, {self.machine.device}; load average {self.machine.load_average}"
        )


_Show = Callable[[Measurement, Measurement], str]
_COLUMNS: Mapping[str, _Show] = {
    "prefill tok/s": lambda first, row: (
        f"{row.prefill_tokens_per_second:.1f}" + _ratio(first, row, "prefill_tokens_per_second")
    ),
    "decode tok/s": lambda first, row: (
        f"{row.decode_tokens_per_second:.1f}" + _ratio(first, row, "decode_tokens_per_second")
    ),
    "tokens/forward": lambda first, row: f"{row.tokens_per_forward:.2f}",
    "of byte floor": lambda first, row: f"{row.floor_share:.0%}",
    "same tokens": lambda first, row: "yes" if row.first_difference is None else f"until {row.first_difference}",
}


def _drafting(figures: Mapping[str, Any]) -> str:
    shares = " ".join(f"{share:.0%}" for share in figures["acceptance_by_depth"])
    by_depth = f", by depth {shares}" if shares else ""
    off = "" if figures["speculation"] == "on" else f"; speculation {figures['speculation']}"
    return (
        f"{figures['against_ar']:.2f} times ar, {figures['acceptance']:.0%} of drafts accepted{by_depth}, "
        f"{figures['tokens_per_window']:.2f} tokens per window{off}"
    )


def _denoising(figures: Mapping[str, Any]) -> str:
    return (
        f"{figures['denoise_steps']} denoises, {_number(figures['steps_per_canvas'], '.1f')} per canvas of "
        f"{figures['canvas_length']}, {figures['denoises_per_second']:.1f} denoises/s, first denoise after "
        f"{figures['ttfd_seconds']:.3f} s, first token after {_number(figures['ttft_seconds'], '.3f', ' s')}, "
        f"{figures['flop_floor_share']:.0%} of the FLOP floor"
    )


_LINES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {"mtp": _drafting, "canvas": _denoising}


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    """A measurement's record with the lane's own figures among its members."""
    details = row.pop("details")
    return {**row, **details}


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "none" if value is None else f"{value:{form}}{unit}"


def _ratio(first: Measurement, other: Measurement, name: str) -> str:
    if first is other or not getattr(other, name):
        return ""
    return f" ({getattr(first, name) / getattr(other, name):.2f}x)"
