"""K01: the gate where one row and several round apart, as on a GPU: near ties are told as such, and nothing else is."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from polytoken.assembly import EngineOptions
from polytoken.cache.state import DecodingState, Snapshot
from polytoken.cli import oracle_gate
from polytoken.models.base import CausalModel, Hidden
from polytoken.models.draft import DraftingModel
from polytoken.oracle.gate import company
from polytoken.oracle.gate import run as gate
from polytoken.oracle.gate.company import AGAIN, SEEDS, check_company, check_seeds
from polytoken.oracle.gate.greedy import check_greedy, check_rows
from polytoken.oracle.gate.law import check_law
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome
from polytoken.oracle.gate.run import GateResult, examine_gate
from polytoken.oracle.gate.running import Answer
from polytoken.oracle.gate.state import check_restore
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.schema import violations
from polytoken.oracle.subject import Subject, examine
from polytoken.request import Request

SMALL = Matrix(depths=(2,), contexts=(20,), prompts=1, new_tokens=8, seeds=6)


def hold(model: str, check: Callable[[Subject], Iterator[Outcome]]) -> list[Outcome]:
    """The outcomes of one check on a loaded model."""
    return examine(EngineOptions(model=model, prefill_chunk_size=16), lambda subject: list(check(subject)))


def verdicts(outcomes: list[Outcome]) -> set[str]:
    return {outcome.verdict for outcome in outcomes}


class RoundsApart(DraftingModel):
    """A model whose forwards of several rows round apart from those of one."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self.vocab_size, self.hidden_size = model.vocab_size, model.hidden_size
        self.weight_bytes_per_forward = model.weight_bytes_per_forward
        self.draft_head = getattr(model, "draft_head", None)

    def make_cache(self) -> DecodingState:
        return self._model.make_cache()

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        hidden = self._model.forward(ids, cache, keep=keep)
        return hidden if ids.shape[1] > 1 else Hidden(hidden.post * (1 + 2e-6), hidden.pre)

    def project(self, hidden: mx.array) -> mx.array:
        return self._model.project(hidden)


class Twins(RoundsApart):
    """A model that can hardly decide: every odd id is its even neighbour's twin, behind it for one row by the half of a
    gap, and before it for several."""

    def __init__(self, model: CausalModel, gap: float) -> None:
        super().__init__(model)
        self._gap = gap

    def forward(self, ids: mx.array, cache: DecodingState, *, keep: int | None = None) -> Hidden:
        return self._model.forward(ids, cache, keep=keep)

    def project(self, hidden: mx.array) -> mx.array:
        even = self._model.project(hidden)[..., ::2]
        half = self._gap / 2 if hidden.shape[-2] > 1 else -self._gap / 2
        return mx.stack([even, even + half], axis=-1).reshape(*even.shape[:-1], -1)


class Flipped(Twins):
    """The same, with the order of twins as the test wants it, whatever the rows."""

    def flip(self) -> None:
        self._gap = -self._gap

    def project(self, hidden: mx.array) -> mx.array:
        even = self._model.project(hidden)[..., ::2]
        return mx.stack([even, even + self._gap / 2], axis=-1).reshape(*even.shape[:-1], -1)


def test_rows_that_round_apart_are_near_ties_where_no_bits_are_promised_and_failures_where_they_are(
    hybrid: str,
) -> None:
    def rows(subject: Subject, *, exact: bool) -> Iterator[Outcome]:
        return check_rows(replace(subject, model=RoundsApart(subject.model)), SMALL, exact=exact)

    (loose,) = hold(hybrid, lambda subject: rows(subject, exact=False))
    (strict,) = hold(hybrid, lambda subject: rows(subject, exact=True))
    assert (loose.verdict, strict.verdict) == ("near tie", "different")
    assert 0 < max(loose.detail["largest"]) < 1e-3 and len(loose.detail["largest"]) == 3
    # The fixed-shape mode runs single rows as windows: identity is back.
    fixed = hold(
        hybrid,
        lambda subject: check_greedy(replace(subject, model=RoundsApart(subject.model)), SMALL, exact=True, fixed=True),
    )
    assert verdicts(fixed) == {"identical"}


def gated(model: str, gap: float, records: list[dict[str, Any]]) -> GateResult:
    """The whole gate on a model that hardly decides."""
    receipts = Receipts(lambda line: records.append(json.loads(line)), lambda line: None)
    matrix = replace(SMALL, fixed=True)
    return examine(
        EngineOptions(model=model, prefill_chunk_size=16),
        lambda subject: examine_gate(replace(subject, model=Twins(subject.model, gap)), matrix, receipts),
    )


def test_near_ties_of_a_model_that_hardly_decides_are_told_by_margin_and_rank(hybrid: str) -> None:
    def greedy(subject: Subject, *, fixed: bool) -> Iterator[Outcome]:
        return check_greedy(replace(subject, model=Twins(subject.model, 1e-3)), SMALL, exact=False, fixed=fixed)

    (parted,) = hold(hybrid, lambda subject: greedy(subject, fixed=False))
    assert parted.verdict == "near tie"
    ids = parted.detail["left"], parted.detail["right"]
    assert ids[1] == ids[0] + 1 and ids[0] % 2 == 0 and parted.detail["position"] >= 1
    assert parted.detail["left_margin"] == pytest.approx(5e-4, rel=0.1)
    assert parted.detail["right_margin"] == pytest.approx(5e-4, rel=0.1)
    assert (parted.detail["left_rank"], parted.detail["right_rank"]) == (2, 2)
    assert verdicts(hold(hybrid, lambda subject: greedy(subject, fixed=True))) == {"identical"}


@pytest.mark.slow  # the whole gate, of which the test above looks at one check
def test_a_model_that_hardly_decides_is_of_one_law_with_its_near_ties_told(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "promises_bits", lambda subject: False)
    records: list[dict[str, Any]] = []
    result = gated(hybrid, 1e-3, records)
    assert result.verdict == "same law", result.failed
    greedy = [item for item in result.outcomes if item.check == "greedy AR = MTP"]
    assert greedy and verdicts(greedy) == {"near tie"}
    fixed = [item for item in result.outcomes if item.check == "greedy AR = MTP, fixed shape"]
    assert fixed and verdicts(fixed) == {"identical"} and result.cost is not None
    end = records[-1]
    assert end["verdict"] == "same law" and end["near_ties"] == result.near_ties and not end["bits_promised"]
    faults = [fault for fault in violations(records) if "receipt_start" not in fault and "receipt_end" not in fault]
    assert faults == []


def test_a_choice_that_rounding_does_not_explain_fails_on_any_device(hybrid: str) -> None:
    outcomes = hold(
        hybrid, lambda subject: check_greedy(replace(subject, model=Twins(subject.model, 0.5)), SMALL, exact=False)
    )
    assert verdicts(outcomes) == {"different"}
    assert all(item.detail["left_margin"] == pytest.approx(0.25, rel=0.01) for item in outcomes)


def test_a_restore_that_rounds_apart_is_a_near_tie_where_no_bits_are_promised(
    hybrid: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored prompt lies otherwise in memory, for which a GPU's library may choose another kernel."""
    restore = DecodingState.restore

    def off(self: DecodingState, snapshot: Snapshot) -> None:
        restore(self, snapshot)
        layer: Any = self.layers[0]
        layer.slots = tuple(array * (1 + 1e-6) for array in layer.slots)

    monkeypatch.setattr(DecodingState, "restore", off)
    for exact, verdict in ((False, "near tie"), (True, "different")):
        outcomes = hold(hybrid, lambda subject, exact=exact: check_restore(subject, SMALL, exact=exact))  # type: ignore[misc]
        assert verdicts(outcomes) - {"identical"} == {verdict}
        assert all(item.detail["largest"] < 2e-3 for item in outcomes)


@pytest.mark.parametrize(
    ("gap", "exact", "verdict"), [(1e-3, False, "near tie"), (1e-3, True, "different"), (3.0, False, "different")]
)
def test_a_draw_just_outside_a_support_that_rounding_moves_is_a_near_tie(
    hybrid: str, gap: float, exact: bool, verdict: str
) -> None:
    matrix = replace(SMALL, depths=(), top_p=1.0, top_k=15, seeds=8, new_tokens=16)
    (outcome,) = hold(
        hybrid, lambda subject: check_law(replace(subject, model=Twins(subject.model, gap)), matrix, exact=exact)
    )
    assert outcome.verdict == verdict, outcome.detail
    assert bool(outcome.detail["edges"]) == (verdict == "near tie")


@pytest.mark.parametrize(("gap", "verdict"), [(1e-3, "near tie"), (0.5, "different")])
def test_a_run_that_does_not_repeat_every_bit_is_told_from_a_neighbour(
    hybrid: str, monkeypatch: pytest.MonkeyPatch, gap: float, verdict: str
) -> None:
    """MLX on CUDA may round one run otherwise than the next, alone too."""
    alone, twins = company.answer, []

    def otherwise(lane: Any, request: Request) -> Answer:
        twins[0].flip()
        try:
            return alone(lane, request)
        finally:
            twins[0].flip()

    monkeypatch.setattr(company, "answer", otherwise)

    def check(subject: Subject) -> Iterator[Outcome]:
        twins.append(Flipped(subject.model, gap))
        return check_company(replace(subject, model=twins[0]), replace(SMALL, depths=()), exact=False)

    outcomes = hold(hybrid, check)
    assert verdicts(outcomes) - {"identical"} == {verdict}
    assert all("left_margin" in item.detail for item in outcomes if item.verdict == verdict)


@pytest.mark.parametrize(
    ("gap", "exact", "verdict"), [(1e-3, False, "near tie"), (1e-3, True, "different"), (0.5, False, "different")]
)
def test_a_request_that_does_not_repeat_alone_is_told_in_table_and_receipt(
    hybrid: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    gap: float,
    exact: bool,
    verdict: str,
) -> None:
    """Every second run alone rounds otherwise, as MLX on CUDA may."""
    alone, twins, runs = company.answer, [], [0]

    def otherwise(lane: Any, request: Request) -> Answer:
        runs[0] += 1
        flips = 2 if runs[0] % 2 else 1
        for _ in range(flips):
            twins[0].flip()
        try:
            return alone(lane, request)
        finally:
            for _ in range(flips):
                twins[0].flip()

    monkeypatch.setattr(company, "answer", otherwise)

    def check(subject: Subject) -> Iterator[Outcome]:
        twins.append(Flipped(subject.model, gap))
        twin, matrix = replace(subject, model=twins[0]), replace(SMALL, depths=())
        yield from check_company(twin, matrix, exact=exact)
        yield from check_seeds(twin, matrix, exact=exact)

    outcomes = hold(hybrid, check)
    again = [item for item in outcomes if item.check == AGAIN]
    assert {item.verdict for item in again} - {"identical"} == {verdict}
    for item in outcomes:
        if item.check != SEEDS:
            assert item.detail["repeats_alone"] == (repeated(again, item) == "identical")
    seeds = next(item for item in outcomes if item.check == SEEDS)
    assert seeds.verdict in ("identical", verdict)
    result = GateResult(outcomes)
    assert result.unrepeated == sum(item.verdict != "identical" for item in again) > 0
    oracle_gate._tell(next(item for item in again if item.verdict != "identical"))
    assert "  does not repeat alone" in capsys.readouterr().out


def repeated(again: list[Outcome], item: Outcome) -> str:
    """The verdict about the same request alone."""
    return next(each.verdict for each in again if each.case["request"] == item.case["request"])
