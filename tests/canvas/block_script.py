"""A denoiser that is a formula, and noise that is a table: shared by the block sampler's test and its reference."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from polytoken.lanes.canvas.block import BlockPolicy

FIXTURE = "block_reference.npz"
DRAWS = 60  # canvases of noise, more than any case uses


@dataclass(frozen=True)
class Script:
    """One case: settings, and a seed from which tables and denoiser are made.

    The denoiser wants a fixed answer in every block. It is the surer of a slot the more of its left neighbours already
    hold what is wanted, so that a canvas settles from left to right over several steps.
    """

    name: str
    policy: BlockPolicy
    seed: int
    C: int = 10
    V: int = 24
    blocks: int = 2
    answers: np.ndarray = field(init=False)
    canvases: np.ndarray = field(init=False)
    blur: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        object.__setattr__(self, "answers", rng.integers(0, self.V, (self.blocks, self.C)))
        object.__setattr__(self, "canvases", rng.integers(0, self.V, (DRAWS, self.C)))
        object.__setattr__(self, "blur", rng.normal(0, 1.5, (self.blocks, self.V, self.V)).astype(np.float32))

    def uniforms(self, draw: int) -> np.ndarray:
        """float32 [C, V] of the step that draws this canvas of noise."""
        return np.random.default_rng((self.seed, draw)).random((self.C, self.V), dtype=np.float32)

    def logits(self, canvas: np.ndarray, *, block: int, step: int) -> np.ndarray:
        """float32 [C, V] for canvas ids [C]; `step` is the countdown."""
        wanted = self.answers[block]
        right = np.concatenate([[1.0], (canvas == wanted)[:-1]])
        settled = np.array([right[max(j - 2, 0) : j + 1].mean() for j in range(self.C)])
        out = self.blur[block][canvas].copy()
        gone = self.policy.max_denoising_steps - step
        out[np.arange(self.C), wanted] += (1.0 + 4.0 * settled + 0.5 * gone).astype(np.float32)
        return out


CASES = (
    Script("defaults", BlockPolicy(max_denoising_steps=20), 0),
    Script("loose", BlockPolicy(max_denoising_steps=16, entropy_bound=3.0, confidence_threshold=0.3), 1),
    Script("patient", BlockPolicy(max_denoising_steps=20, stability_threshold=3, confidence_threshold=0.5), 2),
    Script("unstable", BlockPolicy(max_denoising_steps=12, stability_threshold=0, confidence_threshold=0.8), 3),
    Script("short", BlockPolicy(max_denoising_steps=3, t_min=0.2, t_max=1.5), 4),
)
