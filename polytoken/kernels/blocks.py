"""Decoder blocks as two MLX operations each: the compiled extension `_fused`, where it can be used.

On the CPU every MLX operation costs microseconds whatever its size, and one decoded row of a small model runs over a
thousand of them. `_fused` computes a llama-type block, products included, in two. It is built against the C++ headers
of one version of MLX and refuses any other; without it the same blocks run as MLX's own operations, only slower.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Final

import mlx.core as mx
import numpy as np

from polytoken.host import installed_version
from polytoken.kernels import products

ROW_CONTRACT: Final = (
    "A row of a fused block depends on that row, its position and the keys and values that it sees alone: not on how "
    "many rows are computed together, and not on keys that are masked."
)


@dataclass(frozen=True)
class BlocksReport:
    """Whether decoder blocks are fused on the CPU.

    Attributes:
        built_for: version of MLX that the extension was built for, None without one.
        reason: why it cannot be used, None when it can.
    """

    built_for: str | None
    reason: str | None

    @property
    def usable(self) -> bool:
        return self.reason is None


def report() -> BlocksReport:
    """Whether decoder blocks are fused on the CPU now."""
    found = _find()[1]
    if found.usable and products.report().kind != "exact":
        return replace(found, reason="exact products are not in use")
    return found


def extension() -> ModuleType | None:
    """The extension if it can be used now: it loads, answers rightly, and exact products are in use (else None).

    With other products behind MLX, blocks are left to MLX's operations, so that those products are what runs.
    """
    return _find()[0] if products.report().kind == "exact" else None


@cache
def _find() -> tuple[ModuleType | None, BlocksReport]:
    try:
        fused = import_module("polytoken.kernels._fused")
    except ImportError as error:
        return None, BlocksReport(None, f"the extension is not there or was built for another MLX ({error})")
    running = installed_version("mlx") or fused.running
    if fused.built_for not in (running, running.split(".dev")[0]):
        why = f"it was built for MLX {fused.built_for}, and {running} is installed; build the project again"
        return None, BlocksReport(fused.built_for, why)
    try:
        probe(fused)
    except Exception as error:
        return None, BlocksReport(fused.built_for, f"its probe failed ({error})")
    return fused, BlocksReport(fused.built_for, None)


def probe(fused: ModuleType) -> None:
    """Norm a row and compare; raises ValueError when it comes out wrong, TypeError when arrays are strangers to it."""
    row = np.arange(1, 20, dtype=np.float32)[None]
    normed = np.array(fused.norm(mx.array(row), mx.ones((19,)), 0.0))
    if not np.allclose(normed, row / np.sqrt(np.mean(row**2)), rtol=1e-6):
        raise ValueError("a norm came out wrong")
