"""Comparison: verdicts, the first difference, near ties, and receipts of three engines on one checkpoint."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from conftest import Run
from oracle_runs import run_plan, undescribed

from polytoken.cli import main
from polytoken.models.hybrid.model import HybridModel
from polytoken.oracle.adapters.engine import load_engine, write_reference
from polytoken.oracle.compare.report import html_report
from polytoken.oracle.compare.rows import Tolerance
from polytoken.oracle.compare.verdict import compare
from polytoken.oracle.receipt import Receipts, read_receipts
from polytoken.oracle.schema import violations
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import write_checkpoint

FIXTURES = Path(__file__).parent / "fixtures"
STEPS = 24
Records = list[dict[str, Any]]


@pytest.fixture(scope="module")
def plain_hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that transformers' receipt in the fixtures was made of."""
    return write_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_5", acceptance=HISTORY_MATTERS).path


@pytest.fixture(scope="module")
def plain_dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", seed=1).path


@pytest.fixture(scope="module")
def ours(plain_hybrid: Path) -> Records:
    return run_plan(str(plain_hybrid), mode="decode", max_new_tokens=STEPS).records


def theirs(checkpoint: Path, *, mode: str = "decode") -> Records:
    """mlx-lm's receipt."""
    records: Records = []
    receipts = Receipts(lambda line: records.append(json.loads(line)), lambda line: None)
    write_reference(
        lambda: load_engine("mlx-lm", checkpoint),
        receipts, checkpoint=checkpoint, mode=mode, prompt="ping", limit=STEPS,
    )  # fmt: skip
    return records


def fixture(name: str) -> Records:
    return read_receipts(FIXTURES / f"transformers-{name}.jsonl")


def test_a_receipt_is_identical_to_one_of_a_second_run_on_any_chunks(ours: Records, plain_hybrid: Path) -> None:
    again = run_plan(str(plain_hybrid), mode="decode", max_new_tokens=STEPS, chunk=256).records
    found = compare(ours, again)
    assert (found.verdict, found.exact, found.semantic) == ("identical", None, None)
    assert found.explain().startswith("identical: ")


@pytest.mark.parametrize("name", ["hybrid", "dense"])
def test_transformers_mlx_lm_and_ours_are_of_one_law(name: str, request: pytest.FixtureRequest) -> None:
    checkpoint: Path = request.getfixturevalue(f"plain_{name}")
    mine = run_plan(str(checkpoint), mode="decode", max_new_tokens=STEPS).records
    receipts = {"transformers": fixture(name), "mlx-lm": theirs(checkpoint)}
    for other, records in receipts.items():
        assert violations(records) == [] and undescribed(records) == set(), other
        found = compare(mine, records)
        assert found.verdict == "same law", (other, found.explain())
        assert found.notes == [], other  # the very same weight files
        assert found.largest_drift is not None and found.largest_drift.largest < 1e-3
        assert len(found.drifts) == len(mine[3]["argmax"]) + STEPS
        assert compare(mine, records, exact=True).verdict == "different"
        page = html_report(found, names=("ours", other))
        assert "<svg" in page and "same law" in page
    assert compare(receipts["transformers"], receipts["mlx-lm"]).verdict == "same law"


def test_greedy_answers_of_the_ar_lane_and_of_mlx_lm_agree(plain_dense: Path) -> None:
    mine = run_plan(str(plain_dense), mode="ar", temperature=0.0, max_new_tokens=STEPS).records
    found = compare(mine, theirs(plain_dense, mode="ar"))
    assert found.verdict == "same law", found.explain()


def test_a_wrong_norm_is_located_at_the_first_row(
    ours: Records, plain_hybrid: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: the vocabulary is read from rows before the final norm."""
    forward = HybridModel.forward

    def unnormed(self: HybridModel, ids: mx.array, cache: Any, *, keep: int | None = None) -> Any:
        hidden = forward(self, ids, cache, keep=keep)
        return type(hidden)(post=hidden.pre, pre=hidden.pre)

    monkeypatch.setattr(HybridModel, "forward", unnormed)
    broken = run_plan(str(plain_hybrid), mode="decode", max_new_tokens=STEPS).records
    found = compare(fixture("hybrid"), broken)
    assert found.verdict == "different"
    assert found.drifts[0].where == "forward_reference" and not found.drifts[0].within
    assert compare(fixture("hybrid"), ours).verdict == "same law"


def test_the_first_difference_is_named_by_record_and_field(ours: Records) -> None:
    changed = copy.deepcopy(ours)
    step = next(record for record in changed if record["event"] == "decode_reference" and record["step"] == 3)
    step["row_sha256"] = "0" * 64
    found = compare(ours, changed)
    assert found.verdict == "same law" and found.exact is not None
    assert (found.exact.event, found.exact.field) == ("decode_reference step 3", "row_sha256")
    changed[-2]["text"] += "!"
    found = compare(ours, changed)
    assert found.verdict == "different" and found.semantic is not None
    assert (found.semantic.event, found.semantic.field) == ("decode_reference_end", "text")


def shifted(records: Records, step: int, gap: float) -> Records:
    """The same run, had the best two logits of a step been `gap` apart the other way round, and what then follows."""
    changed = copy.deepcopy(records)
    steps = [record for record in changed if record["event"] == "decode_reference"]
    row = steps[step - 1]
    (first, a), (second, _) = row["top"][:2]
    row["top"][:2] = [[second, a], [first, a - gap]]
    row["argmax"] = second
    for record in steps[step:]:
        record["token_id"] = (record["token_id"] + 1) % 300
    return changed


def test_a_choice_that_rounding_explains_is_a_near_tie_and_ends_the_comparison(ours: Records) -> None:
    """K01: where one row and k rows round apart, the first divergent token is judged by margin and rank."""
    close = copy.deepcopy(ours)
    steps = [record for record in close if record["event"] == "decode_reference"]
    steps[4]["top"][1][1] = steps[4]["top"][0][1] - 1e-4  # a gap within the tolerance
    found = compare(close, shifted(close, 5, 1e-4))
    assert found.verdict == "same law", found.explain()
    (tie,) = found.ties
    assert tie.near and (tie.left_rank, tie.right_rank) == (2, 2)
    assert found.skipped > 0 and found.semantic is None
    wide = compare(ours, shifted(ours, 5, 1.0))
    assert wide.verdict == "different" and not wide.ties[0].near
    assert wide.ties[0].left_margin is not None and wide.ties[0].left_margin > 0.01


def test_tolerances_are_those_of_the_coarser_type() -> None:
    assert Tolerance.of("float32", "float32").absolute < Tolerance.of("float32", "bfloat16").absolute
    assert Tolerance.of("float16", "bfloat16") == Tolerance.of("bfloat16")


def test_the_command_says_it_in_one_line_and_by_its_status(
    ours: Records, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    left, right, page = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "report.html"
    left.write_text("plain text of another program\n" + "".join(json.dumps(record) + "\n" for record in ours))
    words = ["oracle", "compare", str(left), str(FIXTURES / "transformers-hybrid.jsonl")]
    assert main([*words, "--check", "--html", str(page)]) == 0
    assert capsys.readouterr().out.startswith("same law: ")
    assert "<svg" in page.read_text()
    assert main([*words, "--mode", "exact"]) == 3
    capsys.readouterr()
    assert main([*words, "--tolerance", "1e-9", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["verdict"] == "different"
    right.write_text('{"event": "forward_reference", "token_ids": [1], "argmax": [2]}\n')
    assert main(["oracle", "compare", str(left), str(right), "--check"]) == 2
    assert "no valid receipt" in capsys.readouterr().err


def test_a_head_of_a_run_is_another_receipt(ours: Records) -> None:
    assert compare(ours, [*ours[:-4], *ours[-2:]]).verdict == "different"


@pytest.mark.model
def test_smollm2_is_of_one_law_with_mlx_lm(smollm2: Path) -> None:
    mine = run_plan(str(smollm2), mode="decode", max_new_tokens=1, chunk=256).records
    records: Records = []
    receipts = Receipts(lambda line: records.append(json.loads(line)), lambda line: None)
    write_reference(
        lambda: load_engine("mlx-lm", smollm2),
        receipts, checkpoint=smollm2, mode="decode", prompt="ping", limit=1,
    )  # fmt: skip
    found = compare(mine, records)
    assert found.verdict == "same law", found.explain()


@pytest.mark.model
def test_smollm2_runs_the_modes_of_a_model_without_a_head(run: Run, smollm2: Path, tmp_path: Path) -> None:
    readme = tmp_path / "readme.txt"
    readme.write_text("Ships.\n")
    for plan in ({"mode": "ar", "max_new_tokens": 4}, {"mode": "ar", "chat": True, "readme": readme}):
        extra = {"max_new_tokens": 4} if "chat" in plan else {}
        assert violations(run(str(smollm2), chunk=64, **plan, **extra).records) == []
