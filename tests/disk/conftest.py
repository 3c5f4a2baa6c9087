"""MLX on the CPU through the exact products, and the conversations and tiny models of the folders beside this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from polytoken.kernels import products

for folder in ("reference", "mtp", "canvas_lane", "sessions"):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / folder))


@pytest.fixture(scope="module", autouse=True)
def exact_cpu() -> Iterator[None]:
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    report = products.enable("exact")
    assert report.kind in ("exact", "not_needed"), report.reason
    yield
    products.enable("stock")
    mx.set_default_device(before)
