from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted import Script, scripted_engine
from server_running import Running

import polytoken
from polytoken.testkit.tiny import write_checkpoint


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of three layers with a tokenizer and a chat template; 512 positions."""
    return write_checkpoint(tmp_path_factory.mktemp("served"), "qwen3", seed=1).path


@pytest.fixture(scope="session")
def tiny(tiny_path: Path) -> Iterator[Running]:
    """A server over the random model."""
    with Running({"tiny": polytoken.load(tiny_path)}) as server:
        yield server


@pytest.fixture(scope="session")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server over a random block-diffusion model of two layers with a canvas of 6."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "canvas_length": 6}
    path = write_checkpoint(tmp_path_factory.mktemp("canvas"), "diffusion_gemma", config=layers).path
    with Running({"canvas": polytoken.load(path)}) as server:
        yield server


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def scripted(tmp_path: Path, script: Script) -> Iterator[Running]:
    """A server whose model says what `script` tells it to."""
    with Running({"scripted": scripted_engine(tmp_path, script)}) as server:
        yield server
