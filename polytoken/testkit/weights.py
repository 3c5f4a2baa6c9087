"""Random weights that are never stored: a tensor is a function of its name, its shape, its kind and a seed.

Each tensor has a generator of its own (Philox, keyed by the seed and the SHA-256 of the name), so adding, dropping or
reordering tensors changes no other tensor. Only integer sums, one correctly rounded square root and correctly rounded
products lie between the generator's raw words and the result: the bits are the same on every machine and NumPy.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]

Kind = Literal[
    "matrix",  # bell / sqrt(fan_in), fan_in being the last dimension
    "matrix_small",  # an eighth of that
    "embedding",  # bell / sqrt(columns): a tied head then gives logits up to about 5, not always the input again
    "embedding_sharp",  # 16 bell / columns: a head that favours its input, hence a denoiser that is sure of some slots
    "embedding_unit",  # bell, for untied tables
    "norm",  # 1 + 0.2 bell: a norm that multiplies by its weight
    "norm_small",  # 0.3 of that, for norms that end a residual branch
    "norm_zero_centred",  # 0.2 bell: a norm that multiplies by one plus its weight
    "bias",  # 0.2 bell
    "a_log",  # uniform in [-0.7, 1.1): decay rates from 0.5 to 3
    "dt_bias",  # uniform in [-1, 1)
    "layer_scalar",  # uniform in [0.7, 1)
]


@dataclass(frozen=True)
class TensorSpec:
    """Shape and kind of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    kind: Kind = "matrix"


Table = Mapping[str, TensorSpec]


def draw(name: str, spec: TensorSpec, *, seed: int) -> Floats:
    """The tensor `name` under `seed`, float32 of `spec.shape`.

    No kind ever gives a neutral tensor (ones for a norm, zeros for a bias): a network that forgets one of them, or adds
    one to a norm that does not want it, gives visibly different numbers.
    """
    values = _DRAW[spec.kind](_words(name, math.prod(spec.shape), seed=seed), spec)
    return values.astype(np.float32).reshape(spec.shape)


def draw_all(table: Table, *, seed: int) -> dict[str, Floats]:
    """Every tensor of a table."""
    return {name: draw(name, spec, seed=seed) for name, spec in table.items()}


def _words(name: str, count: int, *, seed: int) -> npt.NDArray[np.uint64]:
    """`count` raw 64-bit words of the tensor's own generator."""
    digest = hashlib.sha256(f"{seed}\n{name}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype="<u8").astype(np.uint64)
    words: npt.NDArray[np.uint64] = np.random.Philox(key=key).random_raw(count)
    return words


def _bell(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """Mean 0, variance 1, |x| <= 3.47, bell-shaped: the centred sum of the four 16-bit lanes of each word.

    A true normal deviate would need log and cos, whose last bit differs between mathematics libraries.
    """
    lanes = sum(((words >> np.uint64(shift)) & np.uint64(0xFFFF)).astype(np.int64) for shift in (0, 16, 32, 48))
    centred = np.asarray(lanes, dtype=np.float64) - 2 * 0xFFFF
    return centred * (1.0 / math.sqrt(4 * (65536**2 - 1) / 12))


def _uniform(words: npt.NDArray[np.uint64], low: float, high: float) -> npt.NDArray[np.float64]:
    """Uniform in [low, high) from the top 32 bits of each word."""
    return low + (high - low) * ((words >> np.uint64(32)).astype(np.float64) * 2.0**-32)


_DRAW: Mapping[Kind, Callable[[npt.NDArray[np.uint64], TensorSpec], npt.NDArray[np.float64]]] = {
    "matrix": lambda words, spec: _bell(words) * (1.0 / math.sqrt(spec.shape[-1])),
    "matrix_small": lambda words, spec: _bell(words) * (0.125 / math.sqrt(spec.shape[-1])),
    "embedding": lambda words, spec: _bell(words) * (1.0 / math.sqrt(spec.shape[-1])),
    "embedding_sharp": lambda words, spec: _bell(words) * (16.0 / spec.shape[-1]),
    "embedding_unit": lambda words, spec: _bell(words),
    "norm": lambda words, spec: 1.0 + 0.2 * _bell(words),
    "norm_small": lambda words, spec: 0.3 + 0.06 * _bell(words),
    "norm_zero_centred": lambda words, spec: 0.2 * _bell(words),
    "bias": lambda words, spec: 0.2 * _bell(words),
    "a_log": lambda words, spec: _uniform(words, -0.7, 1.1),
    "dt_bias": lambda words, spec: _uniform(words, -1.0, 1.0),
    "layer_scalar": lambda words, spec: _uniform(words, 0.7, 1.0),
}
