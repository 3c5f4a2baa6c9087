"""How much a scheduler may hold and do at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polytoken.errors import UsageError

FLAGS: Final = {
    "max_rows": "--batch-size",
    "rows_per_step": "--max-batch-tokens",
    "max_pending": "--max-queue-size",
    "prefill_budget": "--prefill-chunk-size",
    "remembered_ids": "--remembered-ids",
}


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """How much may happen at once.

    Attributes:
        max_rows: rows held by the lane, prefilling and active together.
        rows_per_step: rows of one step, None for `max_rows`.
        max_pending: requests that wait for a row.
        prefill_budget: prompt tokens computed in one turn; a lane's chunk must not be larger.
        remembered_ids: how many ended requests keep their id taken, None for all, which grows for ever.
            Within one run of the engine an id stays taken in any case.

    Raises:
        UsageError: naming the flag, when a value is not an integer above 0.
    """

    max_rows: int = 4
    rows_per_step: int | None = None
    max_pending: int = 128
    prefill_budget: int = 256
    remembered_ids: int | None = 100_000

    def __post_init__(self) -> None:
        for name, flag in FLAGS.items():
            value = getattr(self, name)
            if value is None and name in ("rows_per_step", "remembered_ids"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
                raise UsageError(f"{flag} must be an integer above 0, not {value!r}", field=flag)

    @property
    def capacity(self) -> int:
        """Rows of one step."""
        return self.max_rows if self.rows_per_step is None else min(self.max_rows, self.rows_per_step)
