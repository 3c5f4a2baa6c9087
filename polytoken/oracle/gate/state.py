"""States: what generation, restores and snapshots leave is what the same tokens give from nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.digests import fingerprint
from polytoken.oracle.fingerprint import fetch
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


def check_restore(subject: Subject, matrix: Matrix) -> Iterator[Outcome]:
    """A warm prompt gives a cold one's bits: exactly the same, extended, and again after its borrower went on."""
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
                yield _hold_restore(case, warm, cold, text, matrix.new_tokens)


def _hold_restore(case: dict[str, str], warm: Lane[Any], cold: Lane[Any], ids: Ids, count: int) -> Outcome:
    request = ask("restore", ids, count)
    rows = {name: _prefilled(lane, request, ids) for name, lane in (("warm", warm), ("cold", cold))}
    found = fetch({name: row.prefill.logits for name, row in rows.items()})
    restored = rows["warm"].cached_tokens
    mine, theirs = answer(warm, request).tokens, answer(cold, request).tokens
    a, b = found["warm"], found["cold"]
    assert a is not None and b is not None
    same_row = fingerprint(a) == fingerprint(b)
    place = first_parting(mine, theirs)
    return equal(
        "restored = cold",
        case,
        same_row and place is None,
        restored=restored,
        prompt_row=same_row,
        largest=float(abs(a - b).max()),
        position=place,
    )


def _prefilled(lane: Lane[Any], request: Request, ids: Ids) -> Any:
    row = lane.open(request, ids)
    while not lane.prefill_step(row):
        pass
    return row


def check_snapshots(subject: Subject, matrix: Matrix) -> Iterator[Outcome]:
    """A snapshot is not changed by who goes on from it, and gives the bits of the state it was taken of."""
    head = subject.head if matrix.depths else None
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
        kept, same = before == after, fingerprint(found["live"]) == fingerprint(found["borrower"])
        yield equal("snapshot stays and restores", {"prompt": prompt}, kept and same, snapshot_kept=kept, same_row=same)
