"""The rolling policy: one canvas that loses a committed prefix and grows a fresh tail, over and over.

The methods follow one denoise in the order in which it happens. C canvas slots; arrays lie in physical order unless
they are called logical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from polytoken.lanes.base import Commit
from polytoken.lanes.canvas.keys import KeyedNoise, NoiseSource
from polytoken.lanes.canvas.method import CanvasMethod, Reading, Verdict
from polytoken.lanes.canvas.policy import CommitPolicy, Selection, commit_reasons, failure_rate, select_commit
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.lanes.canvas.ring import pad_exposed, to_logical, valid_slots
from polytoken.lanes.canvas.rows import CanvasRow
from polytoken.lanes.canvas.seen import SeenIds
from polytoken.lanes.canvas.state import RollingState, collect_arrays
from polytoken.lanes.canvas.stops import EndIds, stop_reason
from polytoken.lanes.canvas.watch import FrameArrays
from polytoken.models.canvas import CanvasModel, CanvasOutput, CanvasPass
from polytoken.models.latent.state import LatentState
from polytoken.request import Request
from polytoken.sampling.vocabulary import VocabularyRule, VocabularyStatistics, vocabulary_statistics

MakeNoise = Callable[[int], NoiseSource]
"""seed -> the noise of one request."""


@dataclass(frozen=True, eq=False)
class Denoised:
    """A denoise whose consequences are still to be drawn.

    Attributes:
        output: of the network.
        proposal: int32 [1, C], the ids drawn.
        latent: the state after observation.
        selection: what the policy decided.
        remaining: output that was still to come before it.
        token_ids: what was committed; None until the host has read it.
    """

    output: CanvasOutput
    proposal: mx.array
    latent: LatentState
    selection: Selection
    remaining: int
    token_ids: tuple[int, ...] | None = None


@dataclass(kw_only=True, eq=False)
class RollingRow(CanvasRow):
    """A row under the rolling policy.

    Attributes:
        rule: how its ids are drawn.
        max_denoising_steps: denoises after which it ends, None for no limit.
        state: canvas, latent state and head; None before the prompt is encoded.
        denoised: the last denoise, until `settle` has carried it into `state`.
    """

    rule: VocabularyRule
    max_denoising_steps: int | None
    state: RollingState | None = None
    denoised: Denoised | None = None

    def release(self) -> None:
        self.state = self.denoised = None
        super().release()


class RollingMethod(CanvasMethod[RollingRow]):
    """The rolling policy over any canvas model; one without deliberation gets a latent state that stays silent.

    Args:
        model: the network.
        policy: when a prefix is committed.
        rule: how ids are drawn; the penalty is each request's own.
        ends: special ids.
        max_denoising_steps: for requests that name none.
        make_noise: random numbers of a request with this seed.
    """

    name = "rolling"

    def __init__(
        self,
        model: CanvasModel,
        policy: CommitPolicy,
        rule: VocabularyRule,
        ends: EndIds,
        *,
        max_denoising_steps: int | None = None,
        make_noise: MakeNoise | None = None,
    ) -> None:
        super().__init__(model)
        self.policy, self.rule, self.ends = policy, rule, ends
        self.max_denoising_steps = max_denoising_steps
        self._make_noise = make_noise or (lambda seed: KeyedNoise(seed, model.canvas_length, model.vocab_size))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.ends.stops

    def make_row(self, request: Request, prefill: CanvasPrefill) -> RollingRow:
        penalty = request.sampling.repetition_penalty
        return RollingRow(
            request=request,
            prefill=prefill,
            noise=self._make_noise(request.seed),
            stop_ids=() if request.ignore_eos else self.ends.stops,
            seen=seen_ids(prefill.ids, penalty, ends=self.ends, vocab_size=self.model.vocab_size),
            rule=replace(self.rule, repetition_penalty=penalty),
            max_denoising_steps=request.max_denoising_steps or self.max_denoising_steps,
        )

    def start(self, row: RollingRow) -> None:
        row.state = RollingState.initial(
            row.noise.canvas(0),
            self.model.make_latent(),
            max_new_tokens=row.request.max_new_tokens,
            pad_id=self.ends.pad,
        )
        mx.async_eval(collect_arrays(row.state))

    # -- one denoise, in order -------------------------------------------------------------------------------------

    def begin(self, row: RollingRow) -> CanvasPass:
        state = _state(row)
        return self.model.begin(state.canvas, row.cache, latent=state.latent, head=state.head)

    def prepare(self, row: RollingRow, output: CanvasOutput) -> Verdict:
        state, C = _state(row), self.model.canvas_length
        drawn = vocabulary_statistics(
            output.heavy_hidden,
            self.model.project,
            row.rule,
            vocab_size=self.model.vocab_size,
            noise=row.noise.step(row.steps),
            seen=None if row.seen is None else row.seen.mask,
        )
        remaining = mx.array([row.remaining], mx.int32)
        latent = self.model.observe(
            _with_statistics(output.next_latent_state, drawn, state),
            output,
            valid=valid_slots(state.head, remaining, C),
            head=state.head,
        )
        selection, risk = self._select(state, drawn, remaining, row)
        row.denoised = Denoised(output, drawn.sampled, latent, selection, row.remaining)
        frame = self._frame(state, drawn, latent, selection, risk) if self.watched else None
        verdict = Verdict.pack(
            finite=drawn.finite, flag=selection.jumped, length=selection.lengths, ids=selection.ids, frame=frame
        )
        clocks = (selection.ponder_steps, selection.stagnation_steps)
        later = (drawn.sampled, *clocks, *collect_arrays(latent), output.heavy_hidden, output.working_state)
        mx.async_eval(*verdict.arrays(), *later)
        return verdict

    def finish(self, row: RollingRow, reading: Reading) -> Commit:
        assert row.denoised is not None
        ids = reading.token_ids
        proposed = min(self.model.canvas_length, row.remaining)
        row.take(ids)
        row.steps += 1
        reason = stop_reason(
            ids,
            stop_ids=row.stop_ids,
            turn_end=self.ends.turn_end,
            generated=row.generated,
            max_new_tokens=row.request.max_new_tokens,
            steps=row.steps,
            max_denoising_steps=row.max_denoising_steps,
            max_ponder_steps=self.policy.max_ponder_steps,
        )
        # A row that ends has no next denoise, so nothing of this one is worth carrying over.
        row.denoised = None if reason is not None else replace(row.denoised, token_ids=ids)
        return Commit(
            token_ids=ids,
            stop_reason=reason,
            proposed=proposed,
            forwards=1,
            detail={"jump_count": int(reading.flag), "state_shift_count": int(bool(ids))},
        )

    def settle(self, row: RollingRow) -> None:
        done, state = row.denoised, _state(row)
        if done is None:
            return
        assert done.token_ids is not None
        latent = replace(
            done.latent, ponder_steps=done.selection.ponder_steps, stagnation_steps=done.selection.stagnation_steps
        )
        following = RollingState(done.proposal, latent, state.head)
        if done.token_ids:
            following = self._carry_over(row, done, following)
        row.state, row.denoised = following, None
        mx.async_eval(collect_arrays(following))

    def _carry_over(self, row: RollingRow, done: Denoised, state: RollingState) -> RollingState:
        """The state after a commit: remembered, encoded, and the ring moved on."""
        assert done.token_ids is not None
        block = mx.array([done.token_ids], mx.int32)
        lengths = mx.array([len(done.token_ids)], mx.int32)
        memory, _ = self.model.commit_write(
            state.latent.memory_slots,
            done.output,
            token_embeddings=self.model.embed(block),
            lengths=lengths,
            prefix_lengths=mx.array([row.cache.offset], mx.int32),  # before the append
            reasons=commit_reasons(lengths, done.selection.jumped, done.selection.ids, row.stop_ids),
            head=state.head,
        )
        latent = replace(state.latent, memory_slots=memory, gdn2=replace(state.latent.gdn2, persistent=memory))
        self.model.encode(block, row.cache)
        mx.async_eval(row.cache.arrays())
        moved = replace(state, latent=latent).advance_ring(
            lengths, row.noise.canvas(row.steps), entropy_fill_value=math.log(self.model.vocab_size)
        )
        left = mx.array([done.remaining - len(done.token_ids)], mx.int32)
        canvas = pad_exposed(moved.canvas, moved.head, lengths=lengths, remaining=left, pad_id=self.ends.pad)
        return replace(moved, canvas=canvas)

    # ----------------------------------------------------------------------------------------------------------------

    def report(self) -> Mapping[str, Any]:
        return {
            "commit_failure_budget": self.policy.failure_budget,
            "commit_target_confidence": self.policy.target_confidence,
            "commit_top_k": self.policy.top_k,
            "commit_min_p": self.policy.min_p,
            "commit_entropy_weight": self.policy.entropy_weight,
            "commit_confidence_power": self.policy.confidence_power,
            "sample_top_k": self.rule.top_k,
            "sample_min_p": self.rule.min_p,
            "denoise_temperature": self.rule.temperature,
            "max_denoising_steps": self.max_denoising_steps,
            "jump_on_no_progress_after": self.policy.stagnation_threshold,
            "max_ponder_steps": self.policy.max_ponder_steps,
            "min_trajectory_progress": self.policy.min_progress,
        }

    def _select(
        self, state: RollingState, drawn: VocabularyStatistics, remaining: mx.array, row: RollingRow
    ) -> tuple[Selection, mx.array]:
        """The decision, and the failure rates [1, C] (logical) of the ids drawn."""

        def risk(confidence: mx.array, entropy: mx.array) -> mx.array:
            return to_logical(failure_rate(confidence, entropy, self.policy), state.head)

        f_new = risk(drawn.confidence, drawn.entropy)
        selection = select_commit(
            self.policy,
            sampled=to_logical(drawn.sampled, state.head),
            f_new=f_new,
            f_old=risk(state.latent.confidence, state.latent.entropy),
            greedy=to_logical(drawn.greedy, state.head),
            f_greedy=risk(drawn.greedy_confidence, drawn.entropy),
            ponder_steps=state.latent.ponder_steps,
            stagnation_steps=state.latent.stagnation_steps,
            active=mx.ones((1,), mx.bool_),
            remaining=remaining,
            stop_ids=row.stop_ids,
        )
        return selection, f_new

    def _frame(
        self,
        state: RollingState,
        drawn: VocabularyStatistics,
        latent: LatentState,
        selection: Selection,
        risk: mx.array,
    ) -> FrameArrays:
        return FrameArrays(
            token_ids=selection.ids,
            confidence=to_logical(
                mx.where(selection.jumped[:, None], drawn.greedy_confidence, drawn.confidence), state.head
            ),
            entropy=to_logical(drawn.entropy, state.head),
            age=to_logical(latent.age, state.head),
            likely=risk < self.policy.failure_budget,
        )


def seen_ids(ids: tuple[int, ...], penalty: float, *, ends: EndIds, vocab_size: int) -> SeenIds | None:
    """The ids of a prompt for a repetition penalty, or None when the penalty is 1 and changes nothing."""
    return None if penalty == 1.0 else SeenIds(ids, excluded=ends.excluded, vocab_size=vocab_size)


def _with_statistics(latent: LatentState, drawn: VocabularyStatistics, before: RollingState) -> LatentState:
    """The core's next state with what this denoise said about every slot, and how that differs from before."""
    old = before.latent
    return replace(
        latent,
        confidence=drawn.confidence,
        entropy=drawn.entropy,
        age=old.age + 1,
        token_changed=(drawn.sampled != before.canvas).astype(mx.float32),
        confidence_delta=drawn.confidence - old.confidence,
        entropy_delta=drawn.entropy - old.entropy,
    )


def _state(row: RollingRow) -> RollingState:
    assert row.state is not None, "a row is stepped after its prompt is encoded"
    return row.state
