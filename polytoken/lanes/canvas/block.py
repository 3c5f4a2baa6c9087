"""DiffusionGemma's own sampler: canvas by canvas, denoise until the most likely ids stand still, then append them.

Each denoise of a canvas samples every slot at a temperature that falls with the step, accepts the least uncertain slots
and fills the others with fresh noise. What is committed at the end is not the sampled canvas but the argmax one, cut
at the first stop id and at the length the caller asked for. Pure functions; slots are in logical order throughout, B is
1, C the canvas length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import mlx.core as mx

from polytoken.lanes.canvas.keys import NoiseSource
from polytoken.lanes.canvas.knobs import check_count, check_number, refusal
from polytoken.lanes.canvas.stops import is_stop
from polytoken.sampling.vocabulary import VocabularyRule, VocabularyStatistics

_SAMPLER: Final = "EntropyBoundSamplerConfig"  # the one sampler that checkpoints name
_KEYS: Final = ("max_denoising_steps", "t_min", "t_max", "stability_threshold", "confidence_threshold")


@dataclass(frozen=True, kw_only=True)
class BlockPolicy:
    """Settings of the block sampler.

    Attributes:
        max_denoising_steps: denoises per canvas at most, N.
        entropy_bound: nats that the slots accepted before one may have together for that one to be accepted too.
        t_min, t_max: temperature at step 0 and step N of a countdown from N to 1.
        stability_threshold: earlier steps whose argmax canvas must equal this step's to stop early; 0 asks for none.
        confidence_threshold: mean entropy below which the canvas may stop early.
        settle_on: which slots must stand still and be confident: the "answer" (up to the first stop id and the length
            limit; work behind those would be thrown away), or the whole "canvas" as the reference has it.
    """

    max_denoising_steps: int = 48
    entropy_bound: float = 0.1
    t_min: float = 0.4
    t_max: float = 0.8
    stability_threshold: int = 1
    confidence_threshold: float = 0.005
    settle_on: Literal["answer", "canvas"] = "answer"

    def __post_init__(self) -> None:
        check_count("max_denoising_steps", self.max_denoising_steps)
        check_number("entropy_bound", self.entropy_bound, low=0.0, open_low=True)
        check_number("t_min", self.t_min, low=0.0)
        check_number("t_max", self.t_max, low=self.t_min)
        check_number("t_max", self.t_max, low=0.0, open_low=True)
        check_count("stability_threshold", self.stability_threshold, low=0)
        check_number("confidence_threshold", self.confidence_threshold, low=0.0, open_low=True)
        if self.settle_on not in ("answer", "canvas"):
            raise refusal("settle_on", self.settle_on, "must be answer or canvas")

    @classmethod
    def from_generation(cls, generation: Mapping[str, Any]) -> BlockPolicy:
        """From a checkpoint's generation configuration; null or absent keys keep the defaults."""
        found = {key: generation[key] for key in _KEYS if generation.get(key) is not None}
        sampler = generation.get("sampler_config") or {}
        if sampler.get("_cls_name", _SAMPLER) != _SAMPLER:
            raise refusal("sampler_config", sampler["_cls_name"], f"must be {_SAMPLER}")
        if sampler.get("entropy_bound") is not None:
            found["entropy_bound"] = sampler["entropy_bound"]
        return cls(**found)

    def temperature(self, step: int) -> float:
        """T of a step of the countdown from `max_denoising_steps` to 1."""
        return self.t_min + (self.t_max - self.t_min) * (step / self.max_denoising_steps)

    def rule(self, base: VocabularyRule, step: int) -> VocabularyRule:
        """How the sweep of a step draws: the full distribution at the step's temperature."""
        return replace(base, top_k=None, min_p=None, temperature=self.temperature(step))


@dataclass(frozen=True, eq=False)
class BlockState:
    """One canvas under way.

    Attributes:
        canvas: int32 [1, C], ids that the next denoise reads.
        history: int32 [1, K, C], argmax canvases of the last K = `stability_threshold` steps, -1 where there was none.
        step: steps left, counting the next one: N at first, 0 when none is left.
        draw: number of canvases of noise the request has drawn; the next step draws this one.
    """

    canvas: mx.array
    history: mx.array
    step: int
    draw: int


@dataclass(frozen=True, eq=False)
class BlockStep:
    """What a denoise made of the canvas. The arrays are lazy; one evaluation of the three tells the host all it needs.

    Attributes:
        state: the canvas for the next step.
        argmax: int32 [1, C], most likely ids; of the last step the first `length` are the answer's.
        length: int32 [1], ids that would be committed if this were the last step.
        settled: bool [1], whether it is.
    """

    state: BlockState
    argmax: mx.array
    length: mx.array
    settled: mx.array


def start_block(policy: BlockPolicy, noise: NoiseSource, *, draw: int) -> BlockState:
    """A fresh canvas of noise; draw is 0 for a request's first canvas, then the last state's `draw`."""
    canvas = noise.canvas(draw).astype(mx.int32)
    history = mx.full((1, policy.stability_threshold, canvas.shape[1]), -1, mx.int32)
    return BlockState(canvas, history, policy.max_denoising_steps, draw + 1)


def advance_block(
    policy: BlockPolicy,
    state: BlockState,
    statistics: VocabularyStatistics,
    noise: NoiseSource,
    *,
    remaining: int,
    stop_ids: Sequence[int],
) -> BlockStep:
    """Take one denoise into account.

    Args:
        policy: the settings.
        state: before the denoise, with `step` > 0.
        statistics: of the decoder's output on `state.canvas`, swept by `policy.rule(..., state.step)` with the noise
            `noise.step(state.draw)`.
        noise: the request's noise.
        remaining: ids that the answer may still have, > 0.
        stop_ids: ids that end the answer; may be empty.
    """
    argmax, entropy = statistics.greedy, statistics.entropy
    accepted = accepted_slots(entropy, policy.entropy_bound)
    length = answer_length(argmax, remaining=remaining, stop_ids=stop_ids)
    C = argmax.shape[1]
    watched = mx.full((1,), C, mx.int32) if policy.settle_on == "canvas" else length
    settled = is_settled(policy, argmax, entropy, state.history, watched)
    step = state.step - 1
    following = BlockState(
        canvas=mx.where(accepted, statistics.sampled, noise.canvas(state.draw)).astype(mx.int32),
        history=mx.concatenate([state.history, argmax[:, None, :]], axis=1)[:, 1:],
        step=step,
        draw=state.draw + 1,
    )
    return BlockStep(following, argmax, length, settled | (step == 0))


def accepted_slots(entropy: mx.array, bound: float) -> mx.array:
    """bool [B, C]: slots, by ascending entropy, while the entropy of those before is at most the bound.

    The least uncertain slot is always accepted. Of slots with equal entropy [B, C] the left one goes first. (The sum of
    the slots before one bounds the mutual information within the accepted set: Ben-Hamu et al., arXiv:2505.24857.)
    """
    C = entropy.shape[1]
    e = mx.maximum(entropy, 0.0)  # rounding can leave a certain slot a trifle below zero
    own, other = e[:, :, None], e[:, None, :]
    place = mx.arange(C)
    # All pairs of slots: C is a few hundred, and no sort has to promise what it does with ties.
    goes_before = (other < own) | ((other == own) & (place[None, None, :] < place[None, :, None]))
    before = mx.sum(mx.where(goes_before, other, 0.0), axis=-1)
    return before <= bound


def answer_length(argmax: mx.array, *, remaining: int, stop_ids: Sequence[int]) -> mx.array:
    """int32 [B]: how many ids of the canvas int32 [B, C] belong to the answer: through the first stop id, no more than
    remain."""
    C = argmax.shape[1]
    place = mx.arange(C, dtype=mx.int32)[None, :]
    first = mx.min(mx.where(is_stop(argmax, stop_ids), place, C), axis=-1)
    return mx.minimum(first + 1, min(remaining, C)).astype(mx.int32)


def is_settled(
    policy: BlockPolicy, argmax: mx.array, entropy: mx.array, history: mx.array, watched: mx.array
) -> mx.array:
    """bool [B]: whether the first `watched` int32 [B] slots stand still and are confident.

    Args:
        policy: the thresholds.
        argmax: int32 [B, C] of this step.
        entropy: float32 [B, C] of this step.
        history: int32 [B, K, C] of the steps before; -1 equals no id.
        watched: int32 [B], > 0.
    """
    within = mx.arange(argmax.shape[1], dtype=mx.int32)[None, :] < watched[:, None]
    same = (history == argmax[:, None, :]) | ~within[:, None, :]
    stable = mx.all(same, axis=(1, 2))
    mean = mx.sum(mx.where(within, entropy, 0.0), axis=-1) / watched
    return stable & (mean < policy.confidence_threshold)
