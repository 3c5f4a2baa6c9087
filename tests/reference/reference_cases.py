"""Which checkpoints have reference arrays: read by the maker of the arrays and by the tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from polytoken.testkit.tiny import Family, TinyCheckpoint, write_checkpoint

FIXTURES = Path(__file__).resolve().parent.parent / "fixtures"


@dataclass(frozen=True)
class Case:
    """One checkpoint with reference arrays.

    Its arrays lie in `tests/fixtures/<family>.npz` under the names `<shape>/<array>`.
    """

    family: Family
    shape: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.family}-{self.shape}"

    def write(self, directory: Path) -> TinyCheckpoint:
        return write_checkpoint(directory, self.family, shape=self.shape, seed=self.seed)

    def arrays(self) -> dict[str, np.ndarray]:
        """The case's reference arrays by their short names."""
        with np.load(FIXTURES / f"{self.family}.npz") as file:
            prefix = f"{self.shape}/"
            return {key.removeprefix(prefix): file[key] for key in file.files if key.startswith(prefix)}


CAUSAL_CASES = (
    Case("llama", "a", 0),
    Case("llama", "b", 7),
    Case("llama", "sliding", 3),
    Case("qwen2", "a", 0),
    Case("qwen2", "b", 7),
    Case("qwen3", "a", 0),
    Case("qwen3", "b", 7),
    Case("gemma3_text", "a", 0),
    Case("gemma3_text", "b", 7),
)

# "long" is several sliding windows, "short" about one.
PROMPTS = ("long", "short")
