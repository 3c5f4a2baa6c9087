"""Tiny checkpoints that end their answers by themselves, and a way to run the oracle inside the test's process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from oracle_runs import Ran, run_plan

from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import write_checkpoint

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
Run = Callable[..., Ran]


def end_soon(path: Path, ids: int = 40) -> str:
    """Let many ids end an answer, so that a random model stops by itself."""
    file = path / "generation_config.json"
    record = json.loads(file.read_text())
    own = record["eos_token_id"]
    record["eos_token_id"] = sorted({*(own if isinstance(own, list) else [own]), *range(40, 40 + ids)})
    file.write_text(json.dumps(record))
    return str(path)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random hybrid with a draft head that is right part of the time; answers end after a dozen tokens."""
    made = write_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5", acceptance=HISTORY_MATTERS)
    return end_soon(made.path)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of three layers without a head."""
    return end_soon(write_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", seed=1).path)


@pytest.fixture(scope="session")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A block-diffusion model of two layers with a canvas of 6."""
    config = {**TWO_LAYERS, "canvas_length": 6}
    return str(write_checkpoint(tmp_path_factory.mktemp("canvas"), "diffusion_gemma", config=config).path)


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    """A short text to summarise."""
    path = tmp_path / "readme.txt"
    path.write_text("A short text about ships and the sea.\n")
    return path


@pytest.fixture
def run() -> Run:
    def ran(model: str, *, chunk: int = 16, **plan: Any) -> Ran:
        return run_plan(model, chunk=chunk, **plan)

    return ran
