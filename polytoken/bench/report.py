"""A benchmark's figures: a table for people, a record for programs."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from polytoken.bench.machine import Machine

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The byte floor of decoding: no single-row forward can beat reading its bytes once.

    Attributes:
        weight_bytes, cache_bytes: read per forward; the cache half-way through the generated tokens.
        gb_per_second, method: measured read bandwidth.
        tokens_per_second: bandwidth over bytes.
    """

    weight_bytes: int
    cache_bytes: int
    gb_per_second: float
    method: str
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """Medians of one variant, with the smallest and largest round beside them.

    Attributes:
        prefill_tokens_per_second: prompt tokens over time to the first token.
        decode_tokens_per_second: from the first token to the last.
        floor_share: decode rate over the floor's.
        first_difference: index of the first token unlike ours, None when all are equal.
    """

    name: str
    prefill_tokens_per_second: float
    prefill_range: tuple[float, float]
    decode_tokens_per_second: float
    decode_range: tuple[float, float]
    floor_share: float
    tokens_per_forward: float
    first_difference: int | None


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a second person needs to repeat the measurement and to compare."""

    machine: Machine
    engine: str
    model: str
    identity: str
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
        return json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1)

    def print(self, console: Console) -> None:
        """The table, with ratios to each peer."""
        ours = self.measurements[0]
        table = Table(title=f"{self.model}, {self.dtype}, {self.prompt_tokens} prompt + {self.new_tokens} new tokens")
        for heading in ("", "prefill tok/s", "decode tok/s", "of byte floor", "same tokens"):
            table.add_column(heading, justify="left" if not heading else "right")
        for each in self.measurements:
            table.add_row(
                each.name,
                f"{each.prefill_tokens_per_second:.1f}" + _ratio(ours, each, "prefill_tokens_per_second"),
                f"{each.decode_tokens_per_second:.1f}" + _ratio(ours, each, "decode_tokens_per_second"),
                f"{each.floor_share:.0%}",
                "yes" if each.first_difference is None else f"until {each.first_difference}",
            )
        console.print(table)
        floor = self.floor
        console.print(
            f"byte floor {floor.tokens_per_second:.1f} tok/s: {(floor.weight_bytes + floor.cache_bytes) / 1e6:.0f} MB "
            f"per token at {floor.gb_per_second:.1f} GB/s ({floor.method}); float32 products "
            f"{self.product_gflops:.0f} GFLOP/s; load {self.load_seconds:.1f} s; medians of {self.rounds} rounds; "
            f"tokens per forward {ours.tokens_per_forward:.2f}"
        )
        console.print(f"{self.machine.processor}, {self.machine.device}; load average {self.machine.load_average}")


def _ratio(ours: Measurement, other: Measurement, field: str) -> str:
    """How many times faster ours is, beside the other's figure."""
    if ours is other:
        return ""
    return f" (ours {getattr(ours, field) / getattr(other, field):.2f}x)"
