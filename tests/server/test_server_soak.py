"""Seconds of many streams with random disconnects; `benchmarks/server_soak.py` does it for longer."""

from __future__ import annotations

import gc
import importlib.util
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from server_running import Running

import polytoken

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "server_soak.py"


def load_script() -> Any:
    import sys  # noqa: PLC0415

    spec = importlib.util.spec_from_file_location("server_soak", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["server_soak"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("streams", "seconds"), [(6, 2), pytest.param(64, 10, marks=pytest.mark.slow)])
def test_survivors_say_what_they_say_alone_and_nothing_stays_open(
    tiny_path: Path, streams: int, seconds: float
) -> None:
    """A23, A24: greedy and seeded streams beside each other, half of them left at a random place."""
    soak = load_script().soak
    with Running({"tiny": polytoken.load(tiny_path, batch_size=8)}) as server:
        soak(server.url, streams=4, seconds=seconds / 10, tokens=16)
        gc.collect()
        before = mx.get_active_memory()
        outcome = soak(server.url, streams=streams, seconds=seconds, tokens=16)
        assert outcome.wrong == []
        assert outcome.finished >= streams // 3
        assert outcome.left >= streams // 3
        assert outcome.still_open == 0
        assert not server.state.turns
        assert mx.get_active_memory() <= before + (8 << 20)
