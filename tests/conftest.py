"""What every test may rely on: exact products behind MLX on the CPU, and the real small model where asked for."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from polytoken.backend import enable_products, select_device
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.errors import CheckpointError

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in a shell's background, this process ignores Ctrl-C, and so would every program it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def device() -> str:
    chosen = select_device("auto")
    enable_products(chosen, "exact", threads=1)
    return chosen


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
