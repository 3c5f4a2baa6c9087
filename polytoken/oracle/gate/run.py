"""Running the gate: every check over the matrix, a receipt for each case, and one verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from polytoken.assembly import EngineOptions
from polytoken.checkpoint.progress import Progress, silent
from polytoken.errors import UsageError
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.gate.company import AGAIN, check_company, check_seeds
from polytoken.oracle.gate.fixed import FixedShape
from polytoken.oracle.gate.greedy import check_greedy, check_host_choice, check_rows
from polytoken.oracle.gate.law import check_law
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome
from polytoken.oracle.gate.running import answer, ask
from polytoken.oracle.gate.state import check_final_state, check_restore, check_snapshots
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.run import write_loaded, write_start
from polytoken.oracle.subject import Subject, examine

Tell = Callable[[Outcome], None]


@dataclass
class GateResult:
    """All outcomes, and what they come to."""

    outcomes: list[Outcome] = field(default_factory=list)
    cost: dict[str, float] | None = None

    @property
    def failed(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.verdict == "different"]

    @property
    def near_ties(self) -> int:
        return sum(outcome.verdict == "near tie" for outcome in self.outcomes)

    @property
    def unrepeated(self) -> int:
        """Requests that alone did not give the same answer twice."""
        return sum(outcome.check == AGAIN and outcome.verdict != "identical" for outcome in self.outcomes)

    @property
    def verdict(self) -> Literal["identical", "same law", "different"]:
        if self.failed:
            return "different"
        return "same law" if self.near_ties else "identical"


def run_gate(
    options: EngineOptions,
    matrix: Matrix,
    receipts: Receipts,
    *,
    tell: Tell = lambda outcome: None,
    progress: Progress = silent,
) -> GateResult:
    """Load the model and hold it to every promise; outcomes are told as they come.

    Raises:
        MismatchError: `gate_failed`, after the last receipt.
        PolytokenError: what is wrong with the options or the checkpoint.
    """
    with receipts.ended():
        options = replace(options, lane="auto")
        write_start(receipts, mode="gate", lane="mtp" if matrix.depths else "ar", options=options)
        receipts.enter("loading")

        def act(subject: Subject) -> GateResult:
            write_loaded(receipts, subject)
            receipts.enter("decode")
            return examine_gate(subject, matrix, receipts, tell=tell)

        result = examine(options, act, progress=progress, stop=receipts.stop)
        if result.failed:
            first = result.failed[0]
            raise MismatchError(
                f"{first.check}: {dict(first.case)} ({dict(first.detail)}); {len(result.failed)} of "
                f"{len(result.outcomes)} cases differ",
                code="gate_failed",
                field=first.check,
            )
    return result


def examine_gate(
    subject: Subject, matrix: Matrix, receipts: Receipts, *, tell: Tell = lambda outcome: None
) -> GateResult:
    """All checks on a loaded model. Bits are promised on the CPU, with products that promise them."""
    if subject.is_canvas:
        raise UsageError("the gate holds the ar and mtp lanes; this is a block-diffusion model", field="--model")
    if getattr(subject.model, "draft_head", None) is None:
        matrix = replace(matrix, depths=(), fixed=False)
    exact = promises_bits(subject)
    result = GateResult()
    for outcome in _timed(_checks(subject, matrix, exact=exact)):
        result.outcomes.append(outcome)
        receipts.write(
            "gate_check",
            check=outcome.check,
            case=dict(outcome.case),
            verdict=outcome.verdict,
            detail=dict(outcome.detail),
            seconds=outcome.seconds,
        )
        tell(outcome)
    if matrix.fixed and matrix.depths:
        result.cost = measure_cost(subject, matrix)
        receipts.write("gate_cost", **result.cost)
    receipts.write(
        "gate_end",
        verdict=result.verdict,
        checks=len(result.outcomes),
        failed=len(result.failed),
        near_ties=result.near_ties,
        repeats_alone=not result.unrepeated,
        bits_promised=exact,
    )
    return result


def promises_bits(subject: Subject) -> bool:
    """Whether a row's numbers depend on that row alone here: on the CPU with exact products."""
    about = subject.about
    return bool(about["device"] == "cpu" and about["products"]["kind"] == "exact" and about["dtype"] == "float32")


def measure_cost(subject: Subject, matrix: Matrix) -> dict[str, float]:
    """Seconds per token of plain greedy decoding, free and in the fixed-shape mode, each after a first run."""
    rows = max(matrix.depths) + 1
    _, ids = matrix.prompt_ids(subject)[-1]
    seconds = {}
    for name, model in (("free", subject.model), ("fixed", FixedShape(subject.model, rows))):
        lane = replace(subject, model=model).ar_lane()
        for _ in range(2):
            start = time.perf_counter()
            answer(lane, ask("short", ids, 2))
            short = time.perf_counter() - start
            start = time.perf_counter()
            answer(lane, ask("long", ids, 2 + matrix.new_tokens))
            seconds[name] = max(time.perf_counter() - start - short, 1e-9) / matrix.new_tokens
    free, fixed = seconds["free"], seconds["fixed"]
    return {"rows": rows, "seconds_free": free, "seconds_fixed": fixed, "ratio": fixed / free}


def _checks(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    yield from check_host_choice(subject, matrix)
    yield from check_rows(subject, matrix, exact=exact)
    yield from check_greedy(subject, matrix, exact=exact)
    if matrix.fixed:
        yield from check_greedy(subject, matrix, exact=exact, fixed=True)
    if matrix.depths:
        yield from check_final_state(subject, matrix, exact=exact)
    yield from check_snapshots(subject, matrix, exact=exact)
    yield from check_restore(subject, matrix, exact=exact)
    yield from check_company(subject, matrix, exact=exact)
    yield from check_seeds(subject, matrix, exact=exact)
    yield from check_law(subject, matrix, exact=exact)


def _timed(outcomes: Iterator[Outcome]) -> Iterator[Outcome]:
    start = time.perf_counter()
    for outcome in outcomes:
        now = time.perf_counter()
        yield replace(outcome, seconds=now - start)
        start = time.perf_counter()
