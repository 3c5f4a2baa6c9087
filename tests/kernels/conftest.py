"""The compiled extension, one form at a time; MLX on the CPU with what stood behind its products put back after."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

import mlx.core as mx
import pytest

from polytoken.kernels import blocks, products


@pytest.fixture(scope="session")
def extension() -> ModuleType:
    """Missing on Linux with a compiler is a failure, never a skip: the build must have gone wrong."""
    if not sys.platform.startswith("linux"):
        pytest.skip("the exact products are for Linux")
    try:
        return products.extension()
    except ImportError:
        if any(shutil.which(name) for name in ("cc", "gcc", "clang")):
            raise
        pytest.skip("not built, and there is no compiler here to build it")


def runnable_forms() -> tuple[str, ...]:
    with suppress(ImportError):
        return tuple(products.extension().forms())
    return ("not built",)


@pytest.fixture(params=runnable_forms())
def form(request: pytest.FixtureRequest, extension: ModuleType) -> Iterator[str]:
    """Every form this machine can run, forced in turn."""
    before = extension.form()
    extension.set_form(request.param)
    yield request.param
    extension.set_form(before)


@pytest.fixture
def on_cpu(extension: ModuleType) -> Iterator[products.ProductsReport]:
    """MLX computing on the CPU through the exact products."""
    before, report = mx.default_device(), products.enable("exact")
    mx.set_default_device(mx.cpu)
    yield report
    products.enable("stock")
    mx.set_default_device(before)


@pytest.fixture(scope="module")
def fused() -> Iterator[ModuleType | None]:
    """Missing on Linux although the other extension was built is a failure, never a skip."""
    if not sys.platform.startswith("linux"):
        pytest.skip("fused blocks are for Linux")
    before = mx.default_device()
    mx.set_default_device(mx.cpu)
    if products.enable("exact").kind != "exact":
        pytest.skip("there are no exact products here")
    assert blocks.report() == blocks.BlocksReport(mx.__version__, None)
    yield blocks.extension()
    products.enable("stock")
    mx.set_default_device(before)
