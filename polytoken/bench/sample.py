"""Timed runs, and what is run: variants of one benchmark take turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

from polytoken.events import GenerationResult


@dataclass(frozen=True)
class Sample:
    """One timed run.

    Attributes:
        prefill_seconds: from the start to the first token on the host, that token's forward included; on a canvas to
            the first denoise.
        decode_seconds: from the first token to the last; on a canvas all denoises.
        token_ids: what was generated.
        result: the engine's own record of it, None for a peer.
        gb_per_second: read bandwidth beside this run, the mean of just before and just after it; 0 when not measured.
    """

    prefill_seconds: float
    decode_seconds: float
    token_ids: tuple[int, ...]
    result: GenerationResult | None = None
    gb_per_second: float = 0.0


@dataclass
class Variant:
    """One way of doing the work.

    Attributes:
        name: in the report.
        lane: the lane at work, or `peer`.
        run: does the work once.
        read_bytes: the least bytes that its decoding reads.
        counted_tokens: tokens that fall into `decode_seconds`.
        samples: of the timed rounds.
    """

    name: str
    lane: str
    run: Callable[[], Sample]
    read_bytes: Callable[[Sample], float]
    counted_tokens: Callable[[Sample], int] = lambda sample: len(sample.token_ids) - 1
    samples: list[Sample] = field(default_factory=list)

    def floor_share(self, sample: Sample) -> float:
        """The least time for a run's reads at the bandwidth beside it, over the time it took."""
        return self.read_bytes(sample) / (sample.gb_per_second * 1e9) / sample.decode_seconds

    @property
    def results(self) -> list[GenerationResult]:
        """The engine's records of all rounds."""
        return [sample.result for sample in self.samples if sample.result is not None]

    def median(self, figure: Callable[[Sample], float]) -> float:
        """The median of a figure over the rounds."""
        return statistics.median(figure(sample) for sample in self.samples)
