"""The block policy: DiffusionGemma's own way, canvas after canvas.

Within a canvas nothing is final before the canvas is: every denoise accepts slots anew, and what is committed in the
end is the argmax canvas, which may differ from anything accepted before. So ids stream canvas by canvas. Slots are in
logical order throughout: the ring stands still at 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import mlx.core as mx

from polytoken.lanes.base import Commit
from polytoken.lanes.canvas.block import BlockPolicy, BlockState, BlockStep, accepted_slots, advance_block, start_block
from polytoken.lanes.canvas.keys import KeyedNoise
from polytoken.lanes.canvas.method import CanvasMethod, Reading, Verdict
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.lanes.canvas.rolling import MakeNoise, seen_ids
from polytoken.lanes.canvas.rows import CanvasRow
from polytoken.lanes.canvas.stops import EndIds
from polytoken.lanes.canvas.watch import FrameArrays
from polytoken.models.canvas import CanvasModel, CanvasOutput, CanvasPass, SoftPart, SoftSum
from polytoken.request import Request
from polytoken.sampling.vocabulary import Chunk, VocabularyRule, VocabularyStatistics, vocabulary_statistics


@dataclass(kw_only=True, eq=False)
class BlockRow(CanvasRow):
    """A row under the block policy.

    Attributes:
        policy: the settings, with the request's own number of denoises.
        rule: how its ids are drawn, temperature aside.
        block: the canvas under way; None before the prompt is encoded.
        signal: [1, C, H], the last denoise's distribution as the next one is told of it; None at a canvas's first.
        settled: ids of a canvas that is final, until `settle` has encoded them.
    """

    policy: BlockPolicy
    rule: VocabularyRule
    block: BlockState | None = None
    signal: mx.array | None = None
    settled: tuple[int, ...] | None = None

    def release(self) -> None:
        self.block = self.signal = self.settled = None
        super().release()


class BlockMethod(CanvasMethod[BlockRow]):
    """The block policy over a model that is conditioned on its own previous distribution.

    Args:
        model: the network.
        policy: the sampler's settings. A request's `max_denoising_steps` replaces theirs: it is the length of the
            schedule, per canvas, as everybody who runs this model knows it, and no limit on the answer.
        rule: of the vocabulary sweep; temperature and truncation are the policy's, the penalty is the request's.
        ends: special ids.
        make_noise: random numbers of a request with this seed.
    """

    name = "block"

    def __init__(
        self,
        model: CanvasModel,
        policy: BlockPolicy,
        rule: VocabularyRule,
        ends: EndIds,
        *,
        make_noise: MakeNoise | None = None,
    ) -> None:
        super().__init__(model)
        self.policy, self.rule, self.ends = policy, rule, ends
        self._make_noise = make_noise or (lambda seed: KeyedNoise(seed, model.canvas_length, model.vocab_size))
        # The model carries it through untouched, so one serves every row and every denoise.
        self._latent = model.make_latent()
        self._head = mx.zeros((1,), mx.int32)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return self.ends.stops

    def make_row(self, request: Request, prefill: CanvasPrefill) -> BlockRow:
        penalty = request.sampling.repetition_penalty
        steps = request.max_denoising_steps or self.policy.max_denoising_steps
        return BlockRow(
            request=request,
            prefill=prefill,
            noise=self._make_noise(request.seed),
            stop_ids=() if request.ignore_eos else self.ends.stops,
            seen=seen_ids(prefill.ids, penalty, ends=self.ends, vocab_size=self.model.vocab_size),
            policy=replace(self.policy, max_denoising_steps=steps),
            rule=replace(self.rule, repetition_penalty=penalty),
        )

    def start(self, row: BlockRow) -> None:
        self._lay_canvas(row, draw=0)

    # -- one denoise, in order -------------------------------------------------------------------------------------

    def begin(self, row: BlockRow) -> CanvasPass:
        return self.model.begin(_block(row).canvas, row.cache, latent=self._latent, head=self._head, signal=row.signal)

    def prepare(self, row: BlockRow, output: CanvasOutput) -> Verdict:
        before = _block(row)
        drawn = vocabulary_statistics(
            output.heavy_hidden,
            self.model.project,
            row.policy.rule(row.rule, before.step),
            vocab_size=self.model.vocab_size,
            noise=row.noise.step(before.draw),
            seen=None if row.seen is None else row.seen.mask,
            fold=self._gather,
        )
        step = advance_block(row.policy, before, drawn, row.noise, remaining=row.remaining, stop_ids=row.stop_ids)
        row.block, row.signal = step.state, self.model.soft_signal(drawn.folded)
        frame = self._frame(row, before, drawn, step) if self.watched else None
        verdict = Verdict.pack(finite=drawn.finite, flag=step.settled, length=step.length, ids=step.argmax, frame=frame)
        mx.async_eval(*verdict.arrays(), step.state.canvas, step.state.history, row.signal)
        return verdict

    def finish(self, row: BlockRow, reading: Reading) -> Commit:
        row.steps += 1
        proposed = min(self.model.canvas_length, row.remaining)
        if not reading.flag:
            return Commit(token_ids=(), proposed=proposed, forwards=1, detail=_detail(0))
        ids = reading.token_ids
        row.take(ids)
        reason = self._stop_reason(row, ids)
        row.settled = None if reason is not None else ids
        return Commit(token_ids=ids, stop_reason=reason, proposed=proposed, forwards=1, detail=_detail(1))

    def settle(self, row: BlockRow) -> None:
        if row.settled is None:
            return
        # A canvas that is cut short ends its row, so this one is whole; nothing behind an end ever gets here.
        self.model.encode(mx.array([row.settled], mx.int32), row.cache)
        mx.async_eval(row.cache.arrays())
        row.settled = None
        self._lay_canvas(row, draw=_block(row).draw)

    # ----------------------------------------------------------------------------------------------------------------

    def report(self) -> Mapping[str, Any]:
        return asdict(self.policy)

    def _gather(self, total: SoftSum | None, chunk: Chunk) -> SoftSum:
        """The next denoise's signal comes of the same sweep."""
        return self.model.soft_add(total, SoftPart(chunk.start, chunk.stop, chunk.peak, chunk.shares, chunk.total))

    def _lay_canvas(self, row: BlockRow, *, draw: int) -> None:
        row.block, row.signal = start_block(row.policy, row.noise, draw=draw), None
        mx.async_eval(row.block.canvas, row.block.history)

    def _stop_reason(self, row: BlockRow, ids: tuple[int, ...]) -> str | None:
        if ids[-1] in row.stop_ids:
            return "turn_end" if ids[-1] == self.ends.turn_end else "eos"
        return "max_new_tokens" if row.remaining == 0 else None

    def _frame(self, row: BlockRow, before: BlockState, drawn: VocabularyStatistics, step: BlockStep) -> FrameArrays:
        age = row.policy.max_denoising_steps - before.step + 1
        return FrameArrays(
            token_ids=step.argmax,
            confidence=drawn.greedy_confidence,
            entropy=drawn.entropy,
            age=mx.full(step.argmax.shape, age, mx.int32),
            likely=accepted_slots(drawn.entropy, row.policy.entropy_bound),
        )


def _detail(canvases: int) -> dict[str, int]:
    return {"jump_count": 0, "state_shift_count": canvases, "canvas_count": canvases}


def _block(row: BlockRow) -> BlockState:
    assert row.block is not None, "a row is stepped after its prompt is encoded"
    return row.block
