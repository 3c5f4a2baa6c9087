"""Running totals of one run, or of all requests that belong to none, and the summary made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from polytoken.events import InferenceSummary
from polytoken.lanes.base import Row

# What a lane counts over its whole life and the summary counts for its own requests; the rest goes into `extra`.
CACHE_COUNTS: Final = ("prefix_cache_hits", "prefix_cache_misses", "prefix_cache_reused_tokens")
MEMORY_FIELDS: Final = ("mlx_active_memory_bytes", "mlx_peak_memory_bytes")


@dataclass(eq=False)
class Totals:
    """Counts since `started`, of the requests that are counted here and of no others.

    Attributes:
        started: clock reading at the start of the run, in seconds.
        decode_seconds: time inside every `lane.step` that had one of their rows, and waiting for the device at the end.
        cache_hits, cache_misses, cache_reused_tokens: prompts that began with something stored, or with nothing of it.
        denoising: True on the canvas lane, whose steps are denoises and have rates of their own.
        row_steps: steps of single rows.
        peak_active: most rows held at once, prefilling and active together.
    """

    started: float
    finished: int = 0
    failed: int = 0
    rejected: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    forwards: int = 0
    decode_seconds: float = 0.0
    denoising: bool = False
    row_steps: int = 0
    peak_active: int = 0
    cache_hits: int = 0
    cache_misses: int = 0
    cache_reused_tokens: int = 0
    interrupted: bool = False

    def count_prompt(self, row: Row) -> None:
        """Count a row whose prompt has been prefilled."""
        self.prompt_tokens += row.prompt_tokens
        self.cache_hits += row.cached_tokens > 0
        self.cache_misses += row.cached_tokens == 0 and row.cache_miss is not None
        self.cache_reused_tokens += row.cached_tokens

    def summary(self, now: float, statistics: Mapping[str, Any]) -> InferenceSummary:
        """The record of these totals at clock reading `now`, beside what the lane says about itself."""
        elapsed = now - self.started
        return InferenceSummary(
            elapsed_seconds=elapsed,
            finished_requests=self.finished,
            failed_requests=self.failed,
            rejected_requests=self.rejected,
            prompt_tokens=self.prompt_tokens,
            generated_tokens=self.generated_tokens,
            forwards=self.forwards,
            tokens_per_forward=self.generated_tokens / max(self.forwards, 1),
            generated_tokens_per_second=self.generated_tokens / elapsed if elapsed > 0 else 0.0,
            decode_scheduler_seconds=self.decode_seconds,
            peak_active_requests=self.peak_active,
            prefix_cache_hits=self.cache_hits,
            prefix_cache_misses=self.cache_misses,
            prefix_cache_reused_tokens=self.cache_reused_tokens,
            mlx_peak_memory_bytes=int(statistics.get("mlx_peak_memory_bytes", 0)),
            interrupted=self.interrupted,
            extra={name: value for name, value in statistics.items() if name not in CACHE_COUNTS + MEMORY_FIELDS}
            | self._denoise_rates(elapsed),
        )

    def _denoise_rates(self, elapsed: float) -> dict[str, float]:
        if not self.denoising:
            return {}
        return {
            "denoise_steps_per_second": self.row_steps / max(elapsed, 1e-9),
            "denoise_scheduler_seconds": self.decode_seconds,
            "scheduler_denoises_per_second": self.row_steps / max(self.decode_seconds, 1e-9),
        }
