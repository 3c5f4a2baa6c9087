"""States: what generation, restores and snapshots leave is what the same tokens give from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.compare.rows import Tolerance
from polytoken.oracle.digests import fingerprint
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.gate.greedy import bounds, parting_tie
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome, equal
from polytoken.oracle.gate.running import answer, ask, first_parting
from polytoken.oracle.live import LiveState
from polytoken.oracle.modes.mtp import head_drafter
from polytoken.oracle.subject import Ids, Subject
from polytoken.request import Request

_BANK = 1 << 28


def check_final_state(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """After an MTP answer, trunk and history are those of a fresh prefill of its text; without bits, their lengths."""
    for prompt, ids in matrix.prompt_ids(subject)[:2]:
        for depth in matrix.depths:
            lane = subject.mtp_lane(MtpSettings(depth=depth))
            item = answer(lane, ask("state", ids, matrix.new_tokens))
            state = lane.finish(item.row)
            history = head_drafter(item.row).history
            cold = LiveState.empty(subject.model, subject.head)
            cold.extend((*ids, *item.tokens), chunk=subject.chunk)
            assert cold.history is not None
            lengths = (state.offset, history.offset) == (cold.state.offset, cold.history.offset)
            trunk = state.snapshot().digest() == cold.state.snapshot().digest()
            pairs = lengths and history.snapshot().digest() == cold.history.snapshot().digest()
            holds = lengths and (not exact or (trunk and pairs))
            yield equal(
                "final state = fresh prefill",
                {"prompt": prompt, "depth": depth},
                holds,
                trunk=trunk,
                history=pairs,
                history_rows=history.offset,
                expected_rows=cold.history.offset,
            )


def check_restore(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """A warm prompt gives a cold one's bits: exactly the same, extended, and again after its borrower went on."""
    tolerance = Tolerance.of(str(subject.about["dtype"]))
    for prompt, ids in matrix.prompt_ids(subject):
        longer = (*ids, *ids[: max(len(ids) // 2, 1)])
        lanes: list[tuple[str, Lane[Any], Lane[Any]]] = [("ar", subject.ar_lane(cache_bytes=_BANK), subject.ar_lane())]
        if matrix.depths:
            settings = MtpSettings(depth=max(matrix.depths))
            lanes.append(("mtp", subject.mtp_lane(settings, cache_bytes=_BANK), subject.mtp_lane(settings)))
        for name, warm, cold in lanes:
            answer(warm, ask("first", ids, matrix.new_tokens))
            for borrower, text in (
                ("extended", longer),
                ("exact", ids),
                ("exact again", ids),
                ("extended again", longer),
            ):
                case = {"prompt": prompt, "lane": name, "borrower": borrower}
                yield _hold_restore(case, (warm, cold), text, matrix.new_tokens, None if exact else tolerance)


def _hold_restore(
    case: dict[str, str], lanes: tuple[Lane[Any], Lane[Any]], ids: Ids, count: int, tolerance: Tolerance | None
) -> Outcome:
    """The last row of a warm and a cold prompt, and what follows; None for a tolerance where bits are promised."""
    request = ask("restore", ids, count)
    warm, cold = (_prefilled(lane, request, ids) for lane in lanes)
    found = fetch({"warm": warm.prefill.logits, "cold": cold.prefill.logits})
    restored = warm.cached_tokens
    mine, theirs = (answer(lane, request).tokens for lane in lanes)
    a, b = found["warm"], found["cold"]
    assert a is not None and b is not None
    same_row = fingerprint(a) == fingerprint(b)
    place = first_parting(mine, theirs)
    detail = {"restored": restored, "prompt_row": same_row, "largest": float(abs(a - b).max()), "position": place}
    if same_row and place is None:
        return Outcome(check="restored = cold", case=case, verdict="identical", detail=detail)
    near = tolerance is not None and bool((abs(a - b).max(axis=1) <= bounds(a, b, tolerance)).all())
    if near and place is not None:
        assert tolerance is not None
        tie = parting_tie(lanes, ids, (mine, theirs), place, tolerance=tolerance)
        near, detail = tie.near, {**detail, **vars(tie)}
    return Outcome(check="restored = cold", case=case, verdict="near tie" if near else "different", detail=detail)


def _prefilled(lane: Lane[Any], request: Request, ids: Ids) -> Any:
    row = lane.open(request, ids)
    while not lane.prefill_step(row):
        pass
    return row


def check_snapshots(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """A snapshot is not changed by who goes on from it, and gives the bits of the state it was taken of."""
    head = subject.head if matrix.depths else None
    tolerance = Tolerance.of(str(subject.about["dtype"]))
    for prompt, ids in matrix.prompt_ids(subject)[:2]:
        live = LiveState.empty(subject.model, head)
        live.extend(ids, chunk=subject.chunk)
        snapshots = [snapshot for snapshot in live.snapshots() if snapshot is not None]
        before = [snapshot.digest() for snapshot in snapshots]
        borrower = LiveState.empty(subject.model, head)
        borrower.state.restore(snapshots[0])
        if borrower.history is not None:
            borrower.history.restore(snapshots[1])
        borrower.last = live.last
        suffix = ids[: max(len(ids) // 2, 1)]
        for state in (live, borrower):
            state.extend(suffix, chunk=subject.chunk)
        after = [snapshot.digest() for snapshot in snapshots]
        found = fetch({"live": live.logits(), "borrower": borrower.logits()})
        a, b = found["live"], found["borrower"]
        assert a is not None and b is not None
        kept, same = before == after, fingerprint(a) == fingerprint(b)
        near = not exact and bool((abs(a - b).max(axis=1) <= bounds(a, b, tolerance)).all())
        yield Outcome(
            check="snapshot stays and restores",
            case={"prompt": prompt},
            verdict="different" if not kept else "identical" if same else "near tie" if near else "different",
            detail={"snapshot_kept": kept, "same_row": same, "largest": float(abs(a - b).max())},
        )
