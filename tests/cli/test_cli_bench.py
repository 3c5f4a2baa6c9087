"""`polytoken bench` on a tiny model: that it runs and reports, not how fast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Runner  # type: ignore[import-not-found]
from short_probes import shorten_probes  # type: ignore[import-not-found]


def test_a_report(polytoken: Runner, tiny: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_probes(monkeypatch.setattr)
    path = tmp_path / "report.json"
    size = ("--prompt-tokens", "20", "--new-tokens", "4", "--rounds", "1")
    outcome = polytoken("bench", "--model", tiny, *size, "--json", "--output", str(path))
    assert outcome.status == 0
    report = json.loads(outcome.out)
    assert json.loads(path.read_text()) == report
    assert (report["prompt_tokens"], report["new_tokens"], report["rounds"]) == (20, 4, 1)
    assert [row["name"] for row in report["measurements"]] == ["polytoken"]
    assert report["measurements"][0]["decode_tokens_per_second"] > 0
    table = polytoken("bench", "--model", tiny, *size, "--against", "mlx-lm", "--peer-products", "same")
    assert table.status == 0
    assert "mlx-lm" in table.out
    assert "byte floor" in table.out
    runs = [line for line in table.err.splitlines() if ": run " in line]
    assert [line.rpartition(": ")[2] for line in runs] == [f"run {n} of 4" for n in (1, 2, 3, 4)]
    assert "measuring mlx-lm, same products" in runs[1]
