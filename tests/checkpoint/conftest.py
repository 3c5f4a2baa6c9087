"""The pulled SmolLM2, once a session, in the user's own cache folder so that other tests and runs share it."""

from __future__ import annotations

from pathlib import Path

import pytest

from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.errors import CheckpointError


@pytest.fixture(scope="session")
def smollm2() -> Path:
    store = CheckpointStore(default_cache_root())
    try:
        return store.pull("smollm2-135m")
    except CheckpointError as fault:
        if fault.code == "no_network":
            pytest.skip(str(fault))
        raise
