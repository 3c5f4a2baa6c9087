"""The MTP lane: rows of prompts and windows behind the lane contract.

The first step of a row commits the token that its prompt leads to; every later one runs a window. Rows are interleaved
(`steps`), so a row's numbers are those of its solo run whoever comes and goes beside it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import mlx.core as mx
import numpy as np

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.state import DecodingState
from polytoken.errors import CacheError, NonFiniteError, UsageError
from polytoken.lanes.base import Commit, Lane
from polytoken.lanes.ends import END_COUNTS, bank_end, committing, go_back
from polytoken.lanes.limits import check_ids, fit_length, refuse_denoising_limit
from polytoken.lanes.mtp.cost import CostDepth, CostTable
from polytoken.lanes.mtp.cycle import Outcome, run_cycle, stop_reason
from polytoken.lanes.mtp.depth import DepthPolicy, FixedDepth, StreakDepth
from polytoken.lanes.mtp.draft import Clock, Draft, Drafter, Kept
from polytoken.lanes.mtp.draft_model import ModelDrafter, check_draft_model
from polytoken.lanes.mtp.following import FollowedModel
from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.lanes.mtp.lookup import LookupDrafter
from polytoken.lanes.mtp.row import MtpRow, Tally
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.lanes.mtp.steps import Steps, interleave, submit
from polytoken.lanes.mtp.way_back import return_to
from polytoken.lanes.prefill import COUNTS, Prefill
from polytoken.models.base import CausalModel
from polytoken.models.draft import DraftHead, DraftingModel
from polytoken.request import Request
from polytoken.sampling.law import finite_peak
from polytoken.sampling.sampler import TokenSampler, device_greedy

SUSPECT_DRAFTS: Final = 256  # first drafts after which a head that is hardly ever right is pointed out
SUSPECT_SHARE: Final = 0.05


class MtpLane(Lane[MtpRow]):
    """Speculative decoding over any `CausalModel`, with the output law of the AR lane.

    Args:
        model: the trunk.
        bank: store of prompt prefixes, whose identity is `identify(...)` of the AR lane's.
        prefill_chunk: tokens per prefill forward, the absolute grid that all prompts are encoded on.
        eos_ids: ids that end a text.
        turn_end_id: the end-of-turn id, reported as `turn_end` instead of `eos`; None when the model has none.
        max_positions: longest sequence (prompt + output) the model supports.
        settings: how to speculate.
        draft_model: the model behind the drafter `model`.
        record_cycles: whether rows keep a record of every window (receipts).
        clock: monotonic seconds.

    Raises:
        UsageError: `no_draft_head`, `draft_model`, or `no_way_back` for a network whose state cannot be taken back.
    """

    name = "mtp"
    execution = "row_interleaved_singleton"

    def __init__(
        self,
        model: CausalModel,
        bank: StateBank,
        *,
        prefill_chunk: int,
        eos_ids: Sequence[int],
        max_positions: int,
        turn_end_id: int | None = None,
        settings: MtpSettings | None = None,
        draft_model: CausalModel | None = None,
        record_cycles: bool = False,
        clock: Clock = time.perf_counter,
    ) -> None:
        self.model = model
        self.bank = bank
        self.prefill_chunk = prefill_chunk
        self.eos_ids = frozenset(eos_ids) | ({turn_end_id} if turn_end_id is not None else frozenset())
        self.turn_end_id = turn_end_id
        self.max_positions = max_positions
        self.settings = settings or MtpSettings()
        self.record_cycles = record_cycles
        self.tally = Tally()
        self.counts: Counter[str] = Counter(dict.fromkeys((*COUNTS, *END_COUNTS), 0))
        self._clock = clock
        self._head = usable_head(model) if self.settings.network == "head" else None
        self._draft_model = usable_draft_model(draft_model, model) if self.settings.network == "model" else None
        self._costs = CostTable(self.settings.depth)
        check_way_back(model)

    @property
    def draft_bytes(self) -> int:
        """Bytes of weights that one draft reads which is not copied; 0 where all are."""
        if self._head is not None:
            return self._head.weight_bytes_per_draft
        return 0 if self._draft_model is None else self._draft_model.weight_bytes_per_forward

    def open(self, request: Request, ids: Sequence[int]) -> MtpRow:
        refuse_denoising_limit(request, lane=self.name)
        check_ids(ids, vocab_size=self.model.vocab_size)
        request = fit_length(request, len(ids), max_positions=self.max_positions)
        sampler = TokenSampler(
            request.sampling,
            seed=request.seed,
            vocab_size=self.model.vocab_size,
            prompt_ids=tuple(ids),
            grammar=request.grammar,
        )
        ids = tuple(ids)
        first = self._first_history_token(len(ids))
        windowed = None if first is None else replace(self.bank.identity, history_policy="window")
        found = self.bank.find(ids[:first], need_tail=first is None, identity=windowed, session=request.session)
        live = found.live
        followed: FollowedModel = FollowedModel(self.model, self._make_drafter(first)) if live is None else live.owner
        return MtpRow(
            request=request,
            prefill=Prefill(
                followed,
                self.bank,
                ids,
                found=found,
                chunk=self.prefill_chunk,
                identity=windowed,
                bank_whole=first is None,
                session=request.session,
                counts=self.counts,
            ),
            followed=followed,
            sampler=sampler,
            drafter=followed.drafter,
            policy=self._make_policy(),
            stop_ids=frozenset() if request.ignore_eos else self.eos_ids,
            cycles=[] if self.record_cycles else None,
        )

    def prefill_cost(self, row: MtpRow) -> int:
        return row.prefill.cost

    def prefill_step(self, row: MtpRow) -> bool:
        ready = row.prefill.step()
        self.tell_prefill(row)
        if not ready:
            return False
        row.drafter.begin(row.prefill.ids)
        return True

    def step(self, rows: Sequence[MtpRow]) -> list[Commit | Exception]:
        before = self._clock()
        depths = [row.policy.depth for row in rows]
        running = [bool(row.tokens) for row in rows]
        outcomes = interleave([self._window(row) if row.tokens else self._first_token(row) for row in rows])
        elapsed = self._clock() - before
        self._teach(rows, outcomes, depths, running, elapsed)
        return [outcome if isinstance(outcome, Exception) else outcome[0] for outcome in outcomes]

    def close(self, row: MtpRow, *, keep: bool) -> None:
        row.prefill.release()
        row.pending = row.latest = None
        if not row.handed_over:
            row.followed.make_cache()

    def remember(self, row: MtpRow, ids: Sequence[int]) -> None:
        session = row.request.session
        assert session is not None
        text = (*row.prefill.ids, *ids)
        with committing(self.bank, session, text):
            self._bank_end(row, session, text)

    def _bank_end(self, row: MtpRow, session: str, text: tuple[int, ...]) -> None:
        kept = len(text) - row.prompt_tokens
        bankable = self.bank.identity.free and row.prefill.bank_whole
        if not (bankable and (kept == row.forwarded + row.owing or _cut(row, kept))):
            self.counts["ends_not_banked"] += 1
            return
        self.finish(row)
        row.drafter.level(len(text))
        row.prefill.cache.settle()
        row.handed_over = bank_end(self.bank, session, text, row.prefill.cache, counts=self.counts, owner=row.followed)

    def finish(self, row: MtpRow) -> DecodingState:
        """The row's state at exactly prompt and tokens, evaluated: a pending token is forwarded, once.

        With the drafter's state, which is brought to the same point.
        """
        if row.pending is not None:
            window = (row.pending,)
            hidden = row.followed.trunk.forward(mx.array([window], dtype=mx.int32), row.state)
            idle = Draft(row.drafter.name)
            row.drafter.commit(Kept(idle, window, hidden))
            row.pending = None
        mx.eval(row.state.arrays(), row.drafter.settle())
        return row.state

    def settle(self) -> None:
        mx.synchronize()

    def statistics(self) -> Mapping[str, Any]:
        tally = self.tally
        counts = {name: value for name, value in asdict(tally).items() if isinstance(value, int)}
        return {
            **self.bank.statistics().report(),
            **self.counts,
            **counts,
            **tally.by_depth(),
            "drafter": self.settings.drafter,
            "depth_policy": self.settings.policy,
            "draft_warning": self._warning(),
            "mlx_active_memory_bytes": mx.get_active_memory(),
            "mlx_peak_memory_bytes": mx.get_peak_memory(),
        }

    # -- steps of a row -----------------------------------------------------------------------------------------------

    def _first_token(self, row: MtpRow) -> Steps[tuple[Commit, Outcome | None]]:
        """The token that the prompt leads to: the first primary."""
        logits, logprob = row.prefill.logits, None
        assert logits is not None
        if row.sampler.needs_host:
            yield from submit(logits)
            choice = row.sampler.choose(np.array(logits[0], copy=False), position=0)
            token_id, logprob = choice.token_id, choice.logprob
        else:
            ids, ok = device_greedy(logits)
            chosen = mx.where(ok, ids, -1)
            yield from submit(chosen)
            token_id = int(np.array(chosen)[0])
            if token_id < 0:
                finite_peak(np.array(logits[0]))  # raises with a census of the row
                raise NonFiniteError("no logit can be trusted at output position 0")
        row.sampler.observe(token_id)
        row.prefill.logits = None
        row.tokens.append(token_id)
        row.pending = token_id
        reason = stop_reason(row, token_id)
        commit = Commit(
            token_ids=(token_id,),
            stop_reason=self._spell(reason, token_id),
            logprobs=None if logprob is None else (logprob,),
            proposed=1,
            forwards=1,
            detail={} if reason is None else {"stop_origin": "primary", "speculation": "off: one token was all"},
        )
        return commit, None

    def _window(self, row: MtpRow) -> Steps[tuple[Commit, Outcome | None]]:
        """The commit of one window."""
        outcome = yield from run_cycle(row, clock=self._clock)
        cycle = outcome.cycle
        self.tally.add(cycle)
        if row.cycles is not None:
            row.cycles.append(cycle)
        reason = row.policy.reason or ("" if row.tally.drafted_tokens else "there was nothing to copy")
        detail: dict[str, Any] = {
            "verify_calls": 1,
            "drafted_tokens": len(cycle.drafts),
            "accepted_drafts": cycle.accepted,
            "rejected_drafts": int(cycle.origin == "correction"),
            "correction_tokens": int(cycle.origin == "correction"),
            "bonus_tokens": int(cycle.origin == "bonus"),
            "forwards_again": int(cycle.commit_route == "forwarded_again"),
            "draft_seconds": cycle.draft_seconds,
            "verify_seconds": cycle.verify_seconds,
            "accept_seconds": cycle.accept_seconds,
            "speculation": f"off: {reason}" if reason else "on",
            **row.tally.by_depth(),
        }
        if self.settings.copies:
            copied = cycle.source == "lookup"
            detail["copied_tokens"] = len(cycle.drafts) if copied else 0
            detail["accepted_copies"] = cycle.accepted if copied else 0
        if cycle.stop_origin is not None:
            detail["stop_origin"] = cycle.stop_origin
        commit = Commit(
            token_ids=cycle.emitted,
            stop_reason=self._spell(cycle.stop_reason, cycle.emitted[-1]),
            logprobs=outcome.logprobs,
            proposed=1 + len(cycle.drafts),
            forwards=1 + (cycle.commit_route == "forwarded_again"),
            detail=detail,
        )
        return commit, outcome

    def _spell(self, reason: str | None, token_id: int) -> str | None:
        """The reason as events name it."""
        if reason != "stop_id":
            return reason
        return "turn_end" if token_id == self.turn_end_id else "eos"

    def _teach(
        self,
        rows: Sequence[MtpRow],
        outcomes: Sequence[tuple[Commit, Outcome | None] | Exception],
        depths: Sequence[int],
        running: Sequence[bool],
        elapsed: float,
    ) -> None:
        """Tell the policies what became of the windows. A row's time is its share of the step's, by known costs."""
        known = [self._costs.seconds[depth] for depth in depths]
        even = None in known  # a depth that nobody has measured yet
        weights = [(1.0 if even else seconds or 1.0) * on for seconds, on in zip(known, running, strict=True)]
        total = sum(weights)
        for row, outcome, weight in zip(rows, outcomes, weights, strict=True):
            if isinstance(outcome, Exception) or outcome[1] is None:
                continue
            cycle = outcome[1].cycle
            if cycle.source != "lookup":
                row.policy.observe(len(cycle.drafts), cycle.accepted, elapsed * weight / total)

    # -- parts of a row -----------------------------------------------------------------------------------------------

    def _first_history_token(self, n: int) -> int | None:
        """The first of n prompt tokens to get a history row, where the window cuts any; else None."""
        window = self.settings.history_window
        if self._head is None or window is None or n - 1 <= window:
            return None
        return n - window

    def _make_drafter(self, first: int | None) -> Drafter:
        drafter: Drafter | None = None
        if self._head is not None:
            drafter = HeadDrafter(self._head, first=first or 1, banked=first is None)
        elif self._draft_model is not None:
            drafter = ModelDrafter(self._draft_model)
        if drafter is None or self.settings.copies:
            drafter = LookupDrafter(self.settings.lookup, drafter)
        return drafter

    def _make_policy(self) -> DepthPolicy:
        if self.settings.network is None:
            return FixedDepth(0)  # copies have lengths of their own
        if self.settings.policy == "streak":
            return StreakDepth(self.settings.depth)
        if self.settings.policy == "cost":
            return CostDepth(self._costs)
        return FixedDepth(self.settings.depth)

    def _warning(self) -> str | None:
        """What to say of a head that is as good as never right, which nothing but these counts would show."""
        if self._head is None or not self.tally.drafted or self.tally.drafted[0] < SUSPECT_DRAFTS:
            return None
        share = self.tally.accepted[0] / self.tally.drafted[0]
        if share >= SUSPECT_SHARE:
            return None
        return f"only {share:.1%} of first drafts were accepted: the draft head may have been converted wrongly"


def _cut(row: MtpRow, kept: int) -> bool:
    """Leave the row's states at its first `kept` tokens, where a stop string ended in its latest window.

    False, with nothing done, for a place before that window.
    """
    beyond = row.forwarded - kept
    if beyond > 0:
        latest = row.latest
        if latest is None or beyond >= len(latest.kept):
            return False
        if not go_back(row.state, row.state.offset - beyond):
            return_to(row.state, latest.before, len(latest.kept))
            row.followed.trunk.forward(mx.array([latest.kept[:-beyond]], dtype=mx.int32), row.state, keep=0)
        row.drafter.take_back(beyond)
    row.pending = None
    return True


def usable_head(model: CausalModel) -> DraftHead:
    """The model's draft head.

    Raises:
        UsageError: `no_draft_head`.
    """
    head = model.draft_head if isinstance(model, DraftingModel) else None
    if head is None:
        note = model.draft_head_note if isinstance(model, DraftingModel) else ""
        raise UsageError(
            f"--lane mtp needs a draft head: {note or 'this family of models has none'}; "
            "--drafter lookup or --drafter model drafts without one, --lane ar does not draft",
            code="no_draft_head",
            field="--lane",
        )
    return head


def usable_draft_model(draft_model: CausalModel | None, trunk: CausalModel) -> CausalModel:
    """The draft model, checked.

    Raises:
        UsageError: `draft_model`.
    """
    if draft_model is None:
        raise UsageError("--drafter model needs --draft-model", code="draft_model", field="--draft-model")
    check_draft_model(draft_model, trunk)
    return draft_model


def check_way_back(model: CausalModel) -> None:
    """Refuse a network whose state cannot be taken back, before a request meets it. Builds a graph, computes nothing.

    Raises:
        UsageError: `no_way_back`.
    """
    state = model.make_cache()
    with state.capturing():
        model.forward(mx.array([[0, 0]], dtype=mx.int32), state)
    if not state.can_commit(0, 2):
        try:
            state.commit(0, 2)
        except CacheError as error:
            raise UsageError(
                f"--lane mtp cannot take drafts back in this network ({error}); use --lane ar",
                code="no_way_back",
                field="--lane",
            ) from error


def identify(base: StateIdentity, settings: MtpSettings, model: CausalModel, *, draft_model: str = "") -> StateIdentity:
    """The identity of banked states, from the AR lane's for the same checkpoint.

    With a head each state carries the head's history and the last hidden row, with a draft model that model's state
    (`draft_model` is its checkpoint's hash): other lanes cannot use those. Copies need no state, so that there the AR
    lane's states are the very same.
    """
    if settings.network is None:
        return base
    if settings.network == "model":
        return replace(base, lane="mtp", history_policy=f"model {draft_model}")
    head = usable_head(model)
    return replace(base, lane="mtp", hidden_variant=head.settings.base_hidden_variant, history_policy="committed")
