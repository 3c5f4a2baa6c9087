"""The script that measures what the canary costs: it runs, and its summary is right."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "canary_overhead.py"


def test_the_overhead_is_measured_paired_and_written_with_its_spread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("canary_overhead", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found = script.summarise([0.9, 1.0, 1.1, 1.2, 1.3, 1.0, 1.05, 1.1])
    assert found["median_ratio"] == pytest.approx(1.075) and found["rounds"] == 8
    assert found["interval_95"][0] <= found["quartiles"][0] < found["quartiles"][1] <= found["interval_95"][1]
    file = tmp_path / "overhead.json"
    monkeypatch.setattr(
        sys, "argv", ["canary_overhead.py", "--tiny", "--rounds", "4", "--tokens", "40", "--json", str(file)]
    )
    assert script.main() == 0
    record = json.loads(file.read_text())
    assert len(record["ratios"]) == 4 and record["threads"] == "compiled" and record["machine"]["command"]
    assert record["probes"] >= 1 and record["probe_ms"]["median"] < 2000
    assert "times as long with the canary" in capsys.readouterr().out
