"""K01: one row and a window of rows, operation by operation, as `benchmarks/row_invariance.py` tables them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

from polytoken.errors import EXIT_MISMATCH

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "row_invariance.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("row_invariance", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


def test_K01_every_operation_and_network_gives_a_window_the_bits_of_single_rows(script: ModuleType) -> None:
    found = list(script.examine("float32", [4]))
    assert [finding for finding in found if not finding.equal] == []
    names = {finding.operation for finding in found}
    assert names >= {
        "product x W^T",
        "product x W",
        "attention",
        "delta rule",
        "gathered experts",
        "rotation",
        "rms norm",
    }
    assert names >= {"softmax", "sampled law", "network, llama", "network, qwen3_5", "network, qwen3_5_moe"}


def test_K01_packed_products_give_a_window_the_bits_of_single_rows(script: ModuleType) -> None:
    found = [
        script.compare(operation, "4-bit", 4)
        for make in (script.packed_products, script.packed_experts)
        for operation in make(4, 4)
    ]
    assert len(found) >= 4 and all(finding.equal for finding in found)


def test_rows_that_depend_on_their_number_are_seen_and_tabled(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    x = mx.random.normal((4, 8))
    apart = script.Operation("planted", "8", lambda lo, hi: x[lo:hi] * (1 + 1e-6 * (hi - lo > 1)))
    missing = script.Operation("missing", "8", lambda lo, hi: mx.fast.rms_norm(x[lo:hi], mx.ones((3,)), 1e-6))
    found, none = script.compare(apart, "float32", 4), script.compare(missing, "float32", 4)
    assert not found.equal and 0 < found.relative < 1e-5 and none.note
    monkeypatch.setattr(script, "examine", lambda dtype, rows: iter([found, none]))
    file = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["row_invariance.py", "--dtypes", "float32", "--json", str(file)])
    assert script.main() == EXIT_MISMATCH
    out, err = capsys.readouterr()
    assert "| planted | " in out and "e-0" in out and "| missing | not there |" in out and "planted" in err
    record = json.loads(file.read_text())
    assert record["promised"] == "float32" and record["machine"]["versions"]["mlx"] and len(record["findings"]) == 2
