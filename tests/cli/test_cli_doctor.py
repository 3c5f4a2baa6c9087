"""`polytoken doctor`: the facts, and what is broken."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from conftest import Runner  # type: ignore[import-not-found]

from polytoken.cli import diagnosis
from polytoken.kernels.products import ProductsReport


def test_the_report(polytoken: Runner) -> None:
    outcome = polytoken("doctor", "--json")
    assert outcome.status == 0
    report = json.loads(outcome.out)
    assert report["problems"] == []
    assert report["mlx"]["device"] in ("cpu", "gpu")
    assert report["versions"]["mlx"]
    assert report["self_check"]["relative_error"] < 1e-4
    assert report["self_check"]["gflops"] > 0
    assert report["self_check"]["read_gb_per_second"] > 0
    if report["products"]["kind"] == "exact":
        assert report["self_check"]["bit_equal"]
        assert report["products"]["exactness"]
    else:
        assert sys.platform == "darwin" or report["warnings"]


def test_every_part_is_in_the_text(polytoken: Runner) -> None:
    outcome = polytoken("doctor", "--threads", "2")
    for words in ("python", "devices", "products", "exactness", "self-check", "speed", "store", "2 thread(s)"):
        assert words in outcome.out


def test_products_on_request(polytoken: Runner) -> None:
    assert json.loads(polytoken("doctor", "--json", "--products", "stock").out)["products"]["kind"] in (
        "stock",
        "not_needed",
    )


def test_without_the_extension_it_works_and_says_so(polytoken: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = ProductsReport(kind="stock", reason="the compiled extension is not there")
    monkeypatch.setattr("polytoken.backend.enable_products", lambda *_args, **_words: stock)
    outcome = polytoken("doctor")
    assert outcome.status == 0
    assert "compiler" in outcome.err
    assert "the compiled extension is not there" in outcome.out


def test_broken_products_are_a_problem(polytoken: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = {"rows": [1, 2], "bit_equal": False, "relative_error": 1.0, "gflops": 1.0, "read_gb_per_second": 1.0,
              "read_method": "none"}  # fmt: skip
    monkeypatch.setattr(diagnosis, "_self_check", lambda: checks)
    outcome = polytoken("doctor")
    assert outcome.status == 1
    assert "--products stock" in outcome.err


def test_a_folder_that_cannot_be_written(polytoken: Runner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("os.access", lambda _path, mode: mode != os.W_OK)  # root, as tests may run, may write anywhere
    outcome = polytoken("doctor", "--store", str(tmp_path))
    assert outcome.status == 1
    assert "POLYTOKEN_STORE" in outcome.err
