"""One window of one row: draft, verify, accept, commit."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polytoken.errors import NonFiniteError
from polytoken.events import TokenLogprob
from polytoken.lanes.mtp.draft import Clock, Cue, Draft, Kept
from polytoken.lanes.mtp.row import Cycle, LastWindow, MtpRow
from polytoken.lanes.mtp.steps import Steps, submit
from polytoken.lanes.mtp.way_back import remember
from polytoken.models.base import CausalModel, Hidden
from polytoken.sampling.acceptance import Verdict, accept_greedy, accept_window
from polytoken.sampling.choose import top_logprobs
from polytoken.sampling.law import Distribution, Logits, finite_peak, shape
from polytoken.sampling.sampler import TokenSampler, device_greedy

Window = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Outcome:
    """A finished window: its record, and the log-probabilities of what it emitted if they were asked for."""

    cycle: Cycle
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True, eq=False)
class _Verified:
    """A window on its way through the trunk; everything is lazy.

    Attributes:
        window: int32 [1, 1 + d].
        hidden: [1, 1 + d, ...].
        logits: float32 [1 + d, V].
    """

    draft: Draft
    window: mx.array
    hidden: Hidden
    logits: mx.array

    @property
    def drafts(self) -> mx.array:
        """int32 [d], -1 for a draft that came of numbers that are not finite."""
        x, trusted = self.window[0, 1:], self.draft.trusted
        return x if trusted is None else mx.where(trusted, x, -1)

    def arrays(self) -> list[mx.array]:
        """The hidden rows, which the drafter reads in the next window."""
        hidden = self.hidden
        return [array for array in (hidden.post, hidden.pre, hidden.wide) if array is not None]


@dataclass(frozen=True, eq=False)
class _Examined:
    """What the host found in the verified rows."""

    drafts: Window
    verdict: Verdict
    logprobs: tuple[TokenLogprob, ...] | None
    waited: float
    worked: float


def run_cycle(row: MtpRow, *, clock: Clock) -> Steps[Outcome]:
    """One window after the row's pending primary x_0; the row is left at x_0 .. x_a with the next primary pending.

    Shapes: the window is [1, 1 + d]; row j of the verified logits [1 + d, V] gives p_{j+1}, the law behind x_j.
    """
    primary, state = row.pending, row.state
    assert primary is not None and row.room > 0
    requested = row.policy.depth
    cue = Cue(primary, len(row.tokens), requested, row.room, row.sampler, clock)

    draft = yield from row.drafter.propose(cue)  # x_1 .. x_d ~ q_1 .. q_d
    d = draft.count

    window = mx.array([[primary]], dtype=mx.int32)
    if draft.ids is not None:
        window = mx.concatenate([window, draft.ids], axis=1)
    before = remember(state) if row.may_be_cut else None
    with state.capturing() if d else nullcontext():
        hidden = row.followed.trunk.forward(window, state)
    verified = _Verified(draft, window, hidden, row.followed.project(hidden.post.squeeze(0)))  # p_1 .. p_{d+1}

    examine = _on_host if row.sampler.needs_host else _on_device
    found = yield from examine(row, verified, clock=clock)
    a = found.verdict.accepted

    kept, route = keep_rows(row.followed.trunk, row, window, hidden, a + 1)
    row.drafter.commit(Kept(draft, (primary, *found.drafts[:a]), kept))
    if before is not None:
        row.latest = LastWindow(before, (primary, *found.drafts[:a]))
    if route != "all_rows":
        mx.async_eval(state.arrays())  # what the next window starts from, while the host goes on

    emitted = found.drafts[:a] + (() if found.verdict.token is None else (found.verdict.token,))
    row.tokens += emitted
    row.pending = found.verdict.token
    reason = stop_reason(row, emitted[-1])
    cycle = Cycle(
        step=row.tally.cycles,
        primary=primary,
        source=draft.source,
        requested_depth=requested,
        drafts=found.drafts,
        accepted=a,
        accept_probabilities=found.verdict.probabilities,
        token=found.verdict.token,
        origin=found.verdict.origin,
        stop_reason=reason,
        stop_origin=None if reason is None else found.verdict.origin or "accepted_draft",
        verify_width=1 + d,
        commit_route=route,
        draft_seconds=draft.seconds,
        verify_seconds=found.waited,
        accept_seconds=found.worked,
    )
    row.tally.add(cycle)
    return Outcome(cycle, found.logprobs)


def _on_device(row: MtpRow, verified: _Verified, *, clock: Clock) -> Steps[_Examined]:
    """Greedy acceptance from the device's argmax of every row: drafts and choices come in one read."""
    draft, logits = verified.draft, verified.logits
    d = draft.count
    ids, ok = device_greedy(logits)
    choices = mx.where(ok, ids, -1)
    seen = mx.concatenate([verified.drafts, choices])
    yield from submit(seen, *verified.arrays())
    before = clock()
    read = np.array(seen).tolist()
    waited = clock() - before
    x, truth = tuple(read[:d]), read[d:]
    verdict = accept_greedy(x, truth, room=row.room, stop_ids=row.stop_ids)
    for j in range(min(verdict.accepted + 1, d + 1)):
        if truth[j] < 0:
            finite_peak(np.array(logits[j]))  # raises with a census of the row
            raise NonFiniteError(f"no logit can be trusted at output position {len(row.tokens) + j}")
    check_drafts(x, draft.source)
    for token_id in x[: verdict.accepted]:
        row.sampler.observe(token_id)
    if verdict.token is not None:
        row.sampler.observe(verdict.token)
    return _Examined(x, verdict, None, waited, clock() - before - waited)


def _on_host(row: MtpRow, verified: _Verified, *, clock: Clock) -> Steps[_Examined]:
    """Acceptance from the laws of the rows, shaped one after the other and only as far as drafts are accepted."""
    x = verified.drafts
    yield from submit(verified.logits, x, *verified.arrays())
    before = clock()
    rows = np.array(verified.logits, copy=False)
    drafts = tuple(np.array(x).tolist())
    waited = clock() - before
    check_drafts(drafts, verified.draft.source)

    sampler, position = row.sampler, len(row.tokens)
    greedy, draws = sampler.params.greedy, sampler.draws
    target = _Target(sampler, rows, drafts)
    verdict = accept_window(
        drafts,
        target.law,
        q=verified.draft.laws,
        uniform=lambda purpose, j: 0.0 if greedy else draws.uniform(position + j, purpose),
        room=row.room,
        stop_ids=row.stop_ids,
    )
    emitted = drafts[: verdict.accepted] + (() if verdict.token is None else (verdict.token,))
    target.conclude(emitted)
    asked = sampler.params.logprobs
    logprobs = None
    if asked is not None:
        logprobs = tuple(top_logprobs(z, token, asked) for z, token in zip(target.adjusted, emitted, strict=False))
    return _Examined(drafts, verdict, logprobs, waited, clock() - before - waited)


@dataclass(eq=False)
class _Target:
    """The target's laws behind a window's drafts. Each counts the tokens before it and the drafts accepted so far.

    Attributes:
        rows: float32 [1 + d, V], as the network gave them.
        adjusted: the rows asked for, after penalties and bias.
    """

    sampler: TokenSampler
    rows: npt.NDArray[np.float32]
    drafts: Window
    adjusted: list[Logits] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._mark = self.sampler.mark()

    def law(self, j: int) -> Distribution:
        """p_{j+1}."""
        if j > 0:
            self.sampler.observe(self.drafts[j - 1])
        self.adjusted.append(self.sampler.adjusted(self.rows[j]))
        return shape(self.adjusted[-1], self.sampler.params)

    def conclude(self, emitted: Window) -> None:
        """Count what was emitted, and nothing else: rejected drafts leave no trace."""
        self.sampler.rollback(self._mark)
        for token_id in emitted:
            self.sampler.observe(token_id)


def check_drafts(drafts: Window, source: str) -> None:
    """Raise NonFiniteError for a drafter whose numbers are not finite: no text shows it, and it is broken."""
    if -1 in drafts:
        raise NonFiniteError(f"the logits of the drafter ({source}) are not finite", field="logits")


def keep_rows(trunk: CausalModel, row: MtpRow, window: mx.array, hidden: Hidden, m: int) -> tuple[Hidden, str]:
    """Make the trunk's state that of the window's first m rows; their hidden rows, and the way it was done.

    A layer that cannot go back within a window can go back over all of it: the rows that stay are then run again.
    """
    w = int(window.shape[1])
    if row.state.can_commit(m, w):
        row.state.commit(m, w)
        return hidden.rows(0, m), "all_rows" if m == w else "prefix"
    row.state.commit(0, w)
    return trunk.forward(window[:, :m], row.state), "forwarded_again"


def stop_reason(row: MtpRow, token_id: int) -> str | None:
    """Why the row ends with this token, its latest."""
    if token_id in row.stop_ids:
        return "stop_id"
    return "max_new_tokens" if row.room <= 0 else None
