"""Running the command line inside the test's process, and a tiny model for it to run."""

from __future__ import annotations

import io
import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polytoken.cli import main
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.layouts import Layout
from polytoken.testkit.modilify import modilify_config, write_modilify
from polytoken.testkit.tiny import write_checkpoint

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}


@dataclass(frozen=True)
class Outcome:
    """What one command left behind."""

    status: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        """Standard output as JSON lines; nothing else may be there."""
        return [json.loads(line) for line in self.out.splitlines()]

    def events_of(self, name: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == name]

    @property
    def error(self) -> str:
        """The one line on standard error."""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("polytoken: error: ")
        return lines[0].removeprefix("polytoken: error: ")


Runner = Callable[..., Outcome]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random model of three layers with a tokenizer and a chat template; 512 positions."""
    return str(write_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", seed=1).path)


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random hybrid with a draft head that is right part of the time."""
    return str(write_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5", acceptance=HISTORY_MATTERS).path)


@pytest.fixture(scope="session")
def headless(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A hybrid whose configuration declares a draft head that its files lack."""
    return str(write_checkpoint(tmp_path_factory.mktemp("headless"), "qwen3_5", layout=Layout(head="dropped")).path)


@pytest.fixture(scope="session")
def canvas(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A block-diffusion model of two layers with a canvas of 6."""
    config = {**TWO_LAYERS, "canvas_length": 6}
    return str(write_checkpoint(tmp_path_factory.mktemp("canvas"), "diffusion_gemma", config=config).path)


@pytest.fixture(scope="session")
def export(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An export for the rolling canvas: two layers, a canvas of 8, confident."""
    config = {"text_config": {**modilify_config("b")["text_config"], **TWO_LAYERS}, "latent_num_layers": 1}
    return str(write_modilify(tmp_path_factory.mktemp("export"), shape="b", weights="echo", config=config).path)


@pytest.fixture
def polytoken(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Runner]:
    """Runs a command line and gives its status and output; pulled models are looked for in an empty folder."""
    monkeypatch.setenv("POLYTOKEN_STORE", str(tmp_path / "store"))
    log = logging.getLogger("polytoken")
    before = log.handlers, log.propagate, warnings.showwarning

    def run(*arguments: str, stdin: str | bytes = b"") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        status = main(list(arguments))
        out, err = capsys.readouterr()
        return Outcome(status, out, err)

    yield run
    log.handlers, log.propagate, warnings.showwarning = before
