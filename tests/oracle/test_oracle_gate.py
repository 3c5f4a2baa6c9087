"""The gate on a tiny hybrid: everything holds, and each planted fault is caught by the check that is about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from oracle_runs import undescribed

from polytoken.assembly import EngineOptions
from polytoken.cache.state import DecodingState, Snapshot
from polytoken.cli import main
from polytoken.errors import UsageError
from polytoken.lanes.mtp import cycle
from polytoken.lanes.mtp.draft import Kept
from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.models.base import Hidden
from polytoken.models.hybrid import attention
from polytoken.models.hybrid.model import HybridModel
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.gate.company import CHECK, check_company, check_seeds
from polytoken.oracle.gate.greedy import check_greedy, check_rows
from polytoken.oracle.gate.law import check_law, law_of
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome
from polytoken.oracle.gate.run import run_gate
from polytoken.oracle.gate.state import check_final_state, check_restore, check_snapshots
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.schema import violations
from polytoken.oracle.subject import Subject, examine
from polytoken.request import SamplingParams
from polytoken.sampling import law, sampler
from polytoken.sampling.draws import Purpose

SMALL = Matrix(depths=(2,), contexts=(20,), prompts=1, new_tokens=8, seeds=6)
Check = Callable[[Subject], Iterator[Outcome]]


def hold(model: str, check: Check) -> list[Outcome]:
    """The outcomes of one check on a loaded model."""
    return examine(EngineOptions(model=model, prefill_chunk_size=16), lambda subject: list(check(subject)))


def verdicts(outcomes: list[Outcome]) -> set[str]:
    return {outcome.verdict for outcome in outcomes}


def test_all_that_is_promised_holds_and_the_receipt_says_so(hybrid: str) -> None:
    records: list[dict[str, Any]] = []
    receipts = Receipts(lambda line: records.append(json.loads(line)), lambda line: None)
    matrix = replace(SMALL, fixed=True)
    result = run_gate(EngineOptions(model=hybrid, prefill_chunk_size=16), matrix, receipts)
    assert result.verdict == "identical", result.failed
    assert violations(records) == [] and undescribed(records) == set()
    checks = {record["check"] for record in records if record["event"] == "gate_check"}
    assert checks >= {"greedy AR = MTP", "greedy AR = MTP, fixed shape", "sampled law", "restored = cold"}
    assert checks >= {"alone = in company", "seed gives one answer", "final state = fresh prefill"}
    assert checks >= {"row of a window = single row", "snapshot stays and restores"}
    (cost,) = (record for record in records if record["event"] == "gate_cost")
    assert cost["rows"] == 3 and cost["ratio"] > 0
    restored = [r["detail"]["restored"] for r in records if r.get("check") == "restored = cold"]
    assert max(restored) >= 16  # something was restored, or the check says nothing


def test_a_model_without_a_head_is_held_to_the_rest(dense: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "oracle",
        "gate",
        "--model",
        dense,
        "--contexts",
        "9",
        "--prompts",
        "1",
        "--new-tokens",
        "4",
        "--seeds",
        "2",
    ]
    assert main(words) == 0
    table = capsys.readouterr()
    assert "greedy AR = MTP" not in table.out and "restored = cold" in table.out
    assert "identical: " in table.err


def skew_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: every draft is accepted. Greedy decoding shows nothing of it."""
    accept = cycle.accept_window

    def skewed(drafts: Any, p: Any, *, uniform: Any, **rest: Any) -> Any:
        return accept(drafts, p, uniform=lambda why, j: 0.0 if why is Purpose.ACCEPT else uniform(why, j), **rest)

    monkeypatch.setattr(cycle, "accept_window", skewed)


def test_a_skewed_acceptance_is_caught_by_the_sampled_law(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    skew_acceptance(monkeypatch)
    matrix = replace(SMALL, seeds=12, new_tokens=12)
    outcomes = hold(hybrid, lambda subject: check_law(subject, matrix, exact=True))
    assert [(item.case["lane"], item.verdict) for item in outcomes] == [("ar", "identical"), ("mtp", "different")]
    assert verdicts(hold(hybrid, lambda subject: check_greedy(subject, SMALL, exact=True))) == {"identical"}


def shift_history(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: accepted tokens are paired with the row before theirs. Only drafts get worse, no token changes."""
    commit = HeadDrafter.commit

    def late(self: HeadDrafter, kept: Kept) -> None:
        commit(self, kept)
        if self._ids:
            assert self._rows is not None
            self._rows = mx.concatenate([self._rows[:, 1:], self._rows[:, -1:]], axis=1)

    monkeypatch.setattr(HeadDrafter, "commit", late)


def test_an_off_by_one_history_is_caught_by_the_final_state(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_history(monkeypatch)
    (outcome,) = hold(hybrid, lambda subject: check_final_state(subject, SMALL, exact=True))
    assert outcome.verdict == "different"
    assert (outcome.detail["trunk"], outcome.detail["history"]) == (True, False)
    assert verdicts(hold(hybrid, lambda subject: check_greedy(subject, SMALL, exact=True))) == {"identical"}


def poison_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: whoever restores a snapshot goes on in its memory."""
    restore = DecodingState.restore

    def shared(self: DecodingState, snapshot: Snapshot) -> None:
        restore(self, snapshot)
        for array in snapshot.arrays():
            array[...] = array + 1

    monkeypatch.setattr(DecodingState, "restore", shared)


def test_a_poisoned_snapshot_is_caught_with_its_name(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    poison_snapshots(monkeypatch)
    (outcome,) = hold(hybrid, lambda subject: check_snapshots(subject, SMALL, exact=False))
    assert outcome.verdict == "different" and outcome.detail["snapshot_kept"] is False


def test_a_wrong_restore_is_caught_where_it_is_borrowed(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a restored recurrent state is off by a little."""
    restore = DecodingState.restore

    def off(self: DecodingState, snapshot: Snapshot) -> None:
        restore(self, snapshot)
        layer: Any = self.layers[0]
        layer.slots = tuple(array + 0.5 for array in layer.slots)

    monkeypatch.setattr(DecodingState, "restore", off)
    outcomes = hold(hybrid, lambda subject: check_restore(subject, SMALL, exact=False))
    assert "different" in verdicts(outcomes)
    assert all(item.detail["restored"] > 0 for item in outcomes if item.verdict == "different")


def leak_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: a row's numbers depend on which row was forwarded before it."""
    forward = HybridModel.forward
    last: list[int] = [0]

    def leaking(self: HybridModel, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        hidden = forward(self, ids, cache, keep=keep)
        foreign = bool(last[0]) and last[0] != id(cache.layers[0]) and ids.shape[1] == 1
        last[0] = id(cache.layers[0])
        return Hidden(mx.roll(hidden.post, 1, axis=-1), hidden.pre) if foreign else hidden

    monkeypatch.setattr(HybridModel, "forward", leaking)


def test_a_leaked_neighbour_is_caught_by_company(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leak_neighbours(monkeypatch)
    matrix = replace(SMALL, depths=())
    outcomes = hold(hybrid, lambda subject: check_company(subject, matrix, exact=True))
    broken = [item for item in outcomes if item.verdict == "different"]
    assert all(item.check == CHECK and item.detail["repeats_alone"] for item in broken)  # alone nothing leaks
    assert broken and all(item.case["neighbours"] == 3 and item.detail["position"] is not None for item in broken)


def test_a_seed_that_does_not_bind_is_caught(hybrid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from polytoken.sampling.draws import Draws  # noqa: PLC0415

    uniform, calls = Draws.uniform, [0]

    def drifting(self: Draws, position: int, purpose: Purpose) -> float:
        calls[0] += 1
        return (uniform(self, position, purpose) + calls[0] * 0.137) % 1.0

    monkeypatch.setattr(Draws, "uniform", drifting)
    matrix = replace(SMALL, depths=())
    assert verdicts(hold(hybrid, lambda subject: check_seeds(subject, matrix, exact=True))) == {"different"}


def shift_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: the queries of a forward of few rows are rotated for the place behind theirs."""
    attend = attention.attend

    def late(queries: mx.array, keys: mx.array, values: mx.array, **rest: Any) -> mx.array:
        width = int(queries.shape[2])
        if 1 < width < 5 and int(keys.shape[2]) > width:
            queries = mx.fast.rope(queries, int(queries.shape[3]), traditional=False, base=10000.0, scale=1.0, offset=1)
        return attend(queries, keys, values, **rest)

    monkeypatch.setattr(attention, "attend", late)


def test_a_wrong_rotation_in_windows_is_located_in_the_layers_behind_it(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shift_windows(monkeypatch)
    (outcome,) = hold(hybrid, lambda subject: check_rows(subject, SMALL, exact=True))
    kinds = examine(
        EngineOptions(model=hybrid), lambda subject: [layer.kind for layer in subject.model.make_cache().layers]
    )
    first = kinds.index("kv")  # its own keys and values come before the rotation of its queries
    assert outcome.verdict == "different"
    assert outcome.detail["layers_that_differ"] == list(range(first + 1, len(kinds))) and max(outcome.detail["largest"])


def widen_top_k(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: one rank more than asked for, in the code that every lane draws from."""
    leading = law.leading
    monkeypatch.setattr(law, "leading", lambda values, count: leading(values, count + 1))


def test_a_law_that_is_wrong_in_every_lane_is_held_to_its_definition(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrix = replace(SMALL, depths=(), top_k=3, top_p=1.0)
    (right,) = hold(hybrid, lambda subject: check_law(subject, matrix, exact=True))
    assert right.verdict == "identical" and right.detail["shaping"] < 1e-12
    widen_top_k(monkeypatch)
    (wrong,) = hold(hybrid, lambda subject: check_law(subject, matrix, exact=False))
    assert wrong.verdict == "different" and wrong.detail["shaping"] > 1e-3


def test_a_lane_that_draws_from_one_rank_more_is_caught_by_its_draws(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = sampler.shape
    monkeypatch.setattr(sampler, "shape", lambda row, params: shape(row, replace(params, top_k=params.top_k + 1)))
    matrix = replace(SMALL, depths=(), top_k=3, top_p=1.0, temperature=4.0, seeds=12)
    (outcome,) = hold(hybrid, lambda subject: check_law(subject, matrix, exact=True))
    assert outcome.verdict == "different" and outcome.detail["impossible"] and outcome.detail["shaping"] < 1e-12


@pytest.mark.parametrize("top_k", [0, 1, 5, 40])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_the_definition_of_the_law_is_the_sampler_s(top_k: int, top_p: float) -> None:
    params = SamplingParams(temperature=0.7, top_p=top_p, top_k=top_k)
    for seed in range(8):
        row = np.random.default_rng(seed).normal(0, 3, 40).astype(np.float32).round(seed % 2)  # with and without ties
        mine, theirs = law_of(row, params), law.shape(row, params)
        assert mine.ids.tolist() == theirs.ids.tolist()
        assert np.abs(mine.probs - theirs.probs).max() < 1e-12


PLANTED = {
    "sampled law": skew_acceptance,
    "final state = fresh prefill": shift_history,
    "snapshot stays and restores": poison_snapshots,
    "alone = in company": leak_neighbours,
}


@pytest.mark.slow  # the whole gate for each; the tests above run the check that is about it
@pytest.mark.parametrize("check", PLANTED)
def test_the_whole_gate_fails_with_status_3_and_names_the_check(
    hybrid: str, check: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    PLANTED[check](monkeypatch)
    records: list[dict[str, Any]] = []
    receipts = Receipts(lambda line: records.append(json.loads(line)), lambda line: None)
    matrix = replace(SMALL, seeds=12, new_tokens=12)
    with pytest.raises(MismatchError) as caught:
        run_gate(EngineOptions(model=hybrid, prefill_chunk_size=16), matrix, receipts)
    assert (caught.value.code, caught.value.exit_status) == ("gate_failed", 3)
    failed = {record["check"] for record in records if record.get("verdict") == "different" and "check" in record}
    assert check in failed
    if check in ("sampled law", "final state = fresh prefill"):
        assert failed == {check}  # nobody else is blamed
    assert records[-1]["exit_status"] == 3 and violations(records) == []


@pytest.mark.parametrize(
    "bad", [{"depths": (0,)}, {"contexts": ()}, {"contexts": (1,)}, {"prompts": 9}, {"seeds": 1}, {"top_p": 9}]
)
def test_a_matrix_that_makes_no_gate_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Matrix(**bad)


def test_a_canvas_model_is_refused(canvas: str) -> None:
    receipts = Receipts(lambda line: None, lambda line: None)
    with pytest.raises(UsageError, match="block-diffusion"):
        run_gate(EngineOptions(model=canvas), Matrix(), receipts)


def test_the_table_has_columns_and_says_when_the_mtp_lane_was_not_held(
    dense: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--contexts", "7", "--prompts", "1", "--new-tokens", "4", "--seeds", "2"]
    assert main(["oracle", "gate", "--model", dense, *words]) == 0
    out, err = capsys.readouterr()
    assert "choice on the device = on the host  prompt" in out
    assert "greedy AR = MTP" not in out and "the mtp lane was not held" in err
