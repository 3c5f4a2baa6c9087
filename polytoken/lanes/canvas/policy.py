"""The rolling canvas: how long a prefix of the canvas may become permanent after a denoise.

Every position has a failure rate, the estimated risk that committing its id now is a mistake. A normal commit is the
longest prefix whose summed risk stays below a budget. When nothing fits for too long, a jump commits the greedy ids
under a much larger budget, so that decoding always ends. Pure functions over logical order; B rows, C positions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import mlx.core as mx

from polytoken.lanes.canvas.knobs import check_count, check_number, refusal
from polytoken.lanes.canvas.stops import is_stop
from polytoken.models.canvas import CommitSettings

_P_FLOOR: Final = 1e-6  # probabilities are kept this far from 0 and 1

# What the settings are called where a user writes them: in a checkpoint's config.json and generation_config.json.
_NAMES: Final = {
    "failure_budget": "commit_failure_budget",
    "entropy_weight": "commit_entropy_weight",
    "confidence_power": "commit_confidence_power",
    "top_k": "commit_top_k",
    "min_p": "commit_min_p",
    "target_confidence": "commit_target_confidence",
    "stagnation_threshold": "jump_on_no_progress_after",
    "min_progress": "min_trajectory_progress",
}
_GENERATION: Final = ("stagnation_threshold", "max_ponder_steps", "min_progress")


class CommitReason(IntEnum):
    """Why a prefix was committed, as the memory write is told. Learned per code: never renumber."""

    NOTHING = 0
    NORMAL = 1
    JUMP = 2
    TERMINAL = 3


@dataclass(frozen=True, kw_only=True)
class CommitPolicy:
    """Settings of the rolling policy.

    Attributes:
        failure_budget: a normal commit's summed failure stays strictly below this.
        jump_budget: the same for a jump; above 1, so that a jump always commits something.
        stagnation_threshold: jump after this many steps in a row without progress.
        max_ponder_steps: jump after this many steps without a commit.
        min_progress: mean fall of the failure rate that counts as progress.
        entropy_weight: how much entropy beyond that of a coin with the id's probability lowers the logit.
        confidence_power: the power taken of the resulting probability.
        top_k, min_p: the sampler's truncation, which bounds the entropy that can matter; None when it is off.
        target_confidence: ids below it never enter a normal commit; None for no such floor.
    """

    failure_budget: float = 0.2
    jump_budget: float = 2.0
    stagnation_threshold: int = 12
    max_ponder_steps: int = 64
    min_progress: float = 0.005
    entropy_weight: float = 1.0
    confidence_power: float = 2.0
    top_k: int | None = None
    min_p: float | None = None
    target_confidence: float | None = None

    def __post_init__(self) -> None:
        def number(field: str, **bounds: Any) -> None:
            check_number(_NAMES.get(field, field), getattr(self, field), **bounds)

        def count(field: str) -> None:
            check_count(_NAMES.get(field, field), getattr(self, field))

        number("failure_budget", low=0.0, open_low=True)
        number("jump_budget", low=1.0, open_low=True)
        count("stagnation_threshold")
        count("max_ponder_steps")
        number("min_progress")
        number("entropy_weight", low=0.0)
        number("confidence_power", low=0.0, open_low=True)
        if self.top_k is not None:
            count("top_k")
        for field in ("min_p", "target_confidence"):
            if getattr(self, field) is not None:
                number(field, low=0.0, high=1.0, open_low=True, open_high=True)
        if self.target_confidence is not None and self.failure_budget > 1.0:
            rule = "must be at most 1 when commit_target_confidence is set"
            raise refusal(_NAMES["failure_budget"], self.failure_budget, rule)

    @classmethod
    def from_settings(cls, commit: CommitSettings, generation: Mapping[str, Any]) -> CommitPolicy:
        """From what the checkpoint says about committing and its generation configuration (null or absent: default)."""
        clocks = {field: generation.get(_NAMES.get(field, field)) for field in _GENERATION}
        return cls(
            failure_budget=commit.failure_budget,
            entropy_weight=commit.entropy_weight,
            confidence_power=commit.confidence_power,
            top_k=commit.failure_top_k,
            min_p=commit.failure_min_p,
            target_confidence=commit.target_confidence,
            **{field: value for field, value in clocks.items() if value is not None},
        )


@dataclass(frozen=True, eq=False)
class Selection:
    """What one step commits, row by row.

    Attributes:
        normal_lengths: int32 [B], what fits the failure budget; 0 on inactive rows.
        lengths: int32 [B], what is committed.
        ids: int32 [B, C], logical: the ids whose first `lengths` are committed.
        jumped: bool [B].
        ponder_steps, stagnation_steps: int32 [B], the clocks afterwards.
    """

    normal_lengths: mx.array
    lengths: mx.array
    ids: mx.array
    jumped: mx.array
    ponder_steps: mx.array
    stagnation_steps: mx.array


def failure_rate(confidence: mx.array, entropy: mx.array, policy: CommitPolicy) -> mx.array:
    """Estimated risk of committing an id, in (0, 1), same shape as the arguments.

    Falls with the probability p, rises with the entropy H beyond h2(p), that of a coin with this probability:

        H_b = min(max(H, 0), log top_k, max(-log(min_p p), 0))      the entropy that the truncated draw can have
        q = sigmoid(logit p - entropy_weight max(H_b - h2(p), 0)) ^ confidence_power
        failure = 1 - q, but at least the budget where q < target_confidence
    """
    p = mx.clip(confidence.astype(mx.float32), _P_FLOOR, 1.0 - _P_FLOOR)
    log_p, log_not_p = mx.log(p), mx.log1p(-p)
    h2 = -p * log_p - (1.0 - p) * log_not_p
    H_b = mx.maximum(entropy.astype(mx.float32), 0.0)
    if policy.top_k is not None:
        H_b = mx.minimum(H_b, math.log(policy.top_k))
    if policy.min_p is not None:
        H_b = mx.minimum(H_b, mx.maximum(-(math.log(policy.min_p) + log_p), 0.0))
    excess = mx.maximum(H_b - h2, 0.0)
    q = mx.sigmoid(log_p - log_not_p - policy.entropy_weight * excess) ** policy.confidence_power
    q = mx.clip(q, _P_FLOOR, 1.0 - _P_FLOOR)
    failure = 1.0 - q
    if policy.target_confidence is not None:
        # The prefix rule is strict, so a failure of the whole budget keeps the position out of every normal commit.
        failure = mx.where(q < policy.target_confidence, mx.maximum(failure, policy.failure_budget), failure)
    return failure


def prefix_lengths(failure: mx.array, valid: mx.array, *, budget: float) -> mx.array:
    """int32 [B]: longest prefix of valid positions whose summed failure, itself included, is strictly below the budget.

    Args:
        failure: float32 [B, C]; clipped to [0, 1] here.
        valid: bool [B, C]; failures at other positions are not looked at.
        budget: above 0.
    """
    risk = mx.cumsum(mx.where(valid, mx.clip(failure, 0.0, 1.0), 0.0), axis=-1)
    fits = (valid & (risk < budget)).astype(mx.int32)
    return mx.sum(mx.cumprod(fits, axis=-1), axis=-1).astype(mx.int32)


def clip_at_stop(ids: mx.array, lengths: mx.array, stop_ids: Sequence[int]) -> mx.array:
    """int32 [B]: lengths cut just after the first stop id inside the prefix of ids int32 [B, C]."""
    C = ids.shape[1]
    position = mx.arange(C, dtype=mx.int32)[None, :]
    first = mx.min(mx.where(is_stop(ids, stop_ids), position, C), axis=-1)
    return mx.minimum(lengths, first + 1).astype(mx.int32)


def select_commit(
    policy: CommitPolicy,
    *,
    sampled: mx.array,
    f_new: mx.array,
    f_old: mx.array,
    greedy: mx.array,
    f_greedy: mx.array,
    ponder_steps: mx.array,
    stagnation_steps: mx.array,
    active: mx.array,
    remaining: mx.array,
    stop_ids: Sequence[int],
) -> Selection:
    """Decide what becomes permanent after one denoise.

    Args:
        policy: the settings.
        sampled, greedy: int32 [B, C] ids, logical.
        f_new, f_greedy: float32 [B, C], failure rates of these ids.
        f_old: float32 [B, C], failure rates of the step before.
        ponder_steps, stagnation_steps: int32 [B], the clocks before this step.
        active: bool [B]; other rows commit nothing and keep their clocks.
        remaining: int32 [B], output still to come.
        stop_ids: ids that end the output; may be empty.
    """
    C = sampled.shape[1]
    position = mx.arange(C, dtype=mx.int32)[None, :]
    valid = position < remaining[:, None]
    limit = mx.maximum(remaining, 0).astype(mx.int32)

    def allowed(ids: mx.array, failure: mx.array, budget: float) -> mx.array:
        length = mx.minimum(prefix_lengths(failure, valid, budget=budget), limit)
        return mx.where(active, clip_at_stop(ids, length, stop_ids), 0)

    n0 = allowed(sampled, f_new, policy.failure_budget)

    # Progress is measured up to the first position that does not fit: that is where the next commit is decided.
    frontier = mx.maximum(prefix_lengths(f_old, valid, budget=policy.failure_budget), n0) + 1
    ahead = valid & (position < frontier[:, None])
    seen = mx.sum(ahead.astype(mx.int32), axis=-1)
    progress = mx.sum(mx.where(ahead, f_old - f_new, 0.0), axis=-1) / mx.maximum(seen, 1)

    waiting = active & (n0 == 0)
    stalled = progress < policy.min_progress
    ponder = mx.where(waiting, ponder_steps + 1, ponder_steps)
    stagnation = mx.where(waiting, mx.where(stalled, stagnation_steps + 1, 0), stagnation_steps)

    jump = waiting & ((ponder >= policy.max_ponder_steps) | (stagnation >= policy.stagnation_threshold))
    lengths = mx.where(jump, allowed(greedy, f_greedy, policy.jump_budget), n0)
    committed = lengths > 0
    return Selection(
        normal_lengths=n0,
        lengths=lengths.astype(mx.int32),
        ids=mx.where(jump[:, None], greedy, sampled).astype(mx.int32),
        jumped=jump & committed,
        ponder_steps=mx.where(committed, 0, ponder).astype(mx.int32),
        stagnation_steps=mx.where(committed, 0, stagnation).astype(mx.int32),
    )


def commit_reasons(lengths: mx.array, jumped: mx.array, ids: mx.array, stop_ids: Sequence[int]) -> mx.array:
    """`CommitReason` codes int32 [B], from lengths [B], jump flags [B] and committed ids [B, C]."""
    last = mx.take_along_axis(ids, mx.maximum(lengths - 1, 0)[:, None], axis=1)
    terminal = is_stop(last, stop_ids)[:, 0]
    kind = mx.where(terminal, CommitReason.TERMINAL, mx.where(jumped, CommitReason.JUMP, CommitReason.NORMAL))
    return mx.where(lengths > 0, kind, CommitReason.NOTHING).astype(mx.int32)
