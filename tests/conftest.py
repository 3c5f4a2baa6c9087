"""What every test may rely on: exact products behind MLX on the CPU, and the real small model where asked for."""

from __future__ import annotations

import gc
import signal
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from polytoken.backend import enable_products, select_device
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.errors import CheckpointError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background, this process ignores Ctrl-C, and so would every program it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests that take many seconds")


def pytest_configure(config: pytest.Config) -> None:
    """Properties get the same examples in every run; with `--slow` others each time, and three times as many.

    What a busy machine makes slow is not a fault: properties have no deadline, and neither has the making of examples.
    """
    patient: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("repeatable", derandomize=True, **patient)
    settings.register_profile("slow", max_examples=3 * settings.default.max_examples, **patient)
    settings.load_profile("slow" if config.getoption("--slow") else "repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    for item in items:
        if item.get_closest_marker("slow") is not None:
            item.add_marker(pytest.mark.skip(reason="slow: run with --slow"))


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    chosen = select_device("auto")
    enable_products(chosen, "exact", threads=1)
    return chosen


@pytest.fixture(scope="module", autouse=True)
def settled_objects() -> None:
    """An engine that closes looks through every object for garbage; those of pytest and of the libraries stay out."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The pulled SmolLM2, in the user's own cache folder so that other tests and runs share it."""
    store = CheckpointStore(default_cache_root())
    try:
        return store.pull("smollm2-135m")
    except CheckpointError as fault:
        if fault.code == "no_network":
            pytest.skip(str(fault))
        raise
