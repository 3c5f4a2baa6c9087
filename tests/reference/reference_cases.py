"""Which checkpoints have reference arrays: read by the maker of the arrays and by the tests."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from polytoken.testkit.acceptance import HISTORY_MATTERS, NEARLY_FREE
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

    def write_tuned(self, directory: Path, tuning: str) -> TinyCheckpoint:
        """The case's checkpoint with a draft head that is often right, as TUNINGS says."""
        return write_checkpoint(
            directory,
            self.family,
            shape=self.shape,
            seed=self.seed,
            acceptance=TUNINGS[tuning],
            config={"tie_word_embeddings": False},
        )

    def digest(self) -> str:
        """SHA-256 of the case's weights, so that arrays made for other weights are noticed."""
        with tempfile.TemporaryDirectory() as directory:
            path = self.write(Path(directory)).path
            return sha256((path / "model.safetensors").read_bytes()).hexdigest()

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

HYBRID_CASES = (
    Case("qwen3_5", "a", 0),
    Case("qwen3_5", "b", 7),
    Case("qwen3_5_moe", "a", 0),
    Case("qwen3_5_moe", "b", 11),
    Case("qwen3_next", "a", 0),
    Case("qwen3_next", "b", 7),
)
DIFFUSION_CASES = (Case("diffusion_gemma", "a", 0), Case("diffusion_gemma", "b", 7))
# Checkpoints with exact counts of accepted drafts, by the name that stands before their arrays.
TUNINGS = {"free": NEARLY_FREE, "history": HISTORY_MATTERS}

# "long" is several sliding windows, "short" about one.
PROMPTS = ("long", "short")
