"""Statistics and samples over a large vocabulary, for all positions of a canvas, without ever holding [C, V].

The vocabulary is swept in chunks of ids. Of each chunk only running quantities survive: the peak, the moments that give
log Z and entropy, the greedy id, and the best k candidates. All of them merge exactly and in one order (score
descending, then id ascending), so the result does not depend on the chunk size, up to the rounding of the logits.

R is the number of positions (C of one row's canvas), V the vocabulary, w the width of a chunk, k the candidates kept.
For raw logits z the scores are s = penalised(z) / T. Confidence and entropy refer to the full softmax of s; only the
draw is truncated to the k best ids and, among them, to p >= min_p * p_max.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, Final, Protocol

import mlx.core as mx

from polytoken.errors import UsageError

Project = Callable[[mx.array, int, int], mx.array]
"""(flat [R, H], start, stop) -> logits [R, stop - start] of the ids from start to stop, the softcap applied."""

Fold = Callable[[Any, "Chunk"], Any]
"""(total | None, chunk) -> total, a dataclass of arrays; None begins."""

_U_LOW: Final = 1.17549435e-38  # uniforms are kept off 0 and 1, where the Gumbel value is infinite
_U_HIGH: Final = 1.0 - 1.19209290e-7
_LAST: Final = 2**31 - 1


class VocabularyNoise(Protocol):
    """The uniforms in [0, 1) that one sweep uses."""

    def candidates(self, k: int) -> mx.array:
        """float32 [R, k], laid over the kept candidates in ascending order of id."""
        ...

    def span(self, start: int, stop: int) -> mx.array:
        """float32 [R, stop - start] for the ids from start to stop, when nothing is truncated."""
        ...


@dataclass(frozen=True, kw_only=True)
class VocabularyRule:
    """How ids are drawn.

    Attributes:
        top_k: candidates kept; None or 0 samples the full vocabulary, and then min_p is not looked at.
        min_p: candidates with less than this share of the largest probability are dropped; None or 0 keeps all.
        temperature: scores are logits divided by it, above 0.
        repetition_penalty: logits of ids seen are divided by it when positive, multiplied when negative; 1 is none.
        chunk: ids per chunk of the sweep.
    """

    top_k: int | None = 40
    min_p: float | None = 0.05
    temperature: float = 1.0
    repetition_penalty: float = 1.0
    chunk: int = 4096

    def __post_init__(self) -> None:
        for name, value in (("denoise_temperature", self.temperature), ("repetition_penalty", self.repetition_penalty)):
            if not (math.isfinite(value) and value > 0.0):
                raise UsageError(f"{name} must be a finite number above 0, not {value!r}", field=name)
        if self.top_k is not None and self.top_k < 0:
            raise UsageError(f"commit_top_k must not be negative, not {self.top_k!r}", field="commit_top_k")
        if self.min_p is not None and not 0.0 <= self.min_p < 1.0:
            raise UsageError(f"commit_min_p must be at least 0 and below 1, not {self.min_p!r}", field="commit_min_p")
        if self.chunk < 1:
            raise UsageError(f"vocab_chunk_size must be at least 1, not {self.chunk!r}", field="vocab_chunk_size")


@dataclass(frozen=True, eq=False)
class VocabularyStatistics:
    """What one sweep says about each position; everything is lazy.

    Attributes:
        sampled: int32 [1, C], ids drawn.
        confidence: float32 [1, C], probability of the drawn id under the full softmax.
        entropy: float32 [1, C], nats of the full softmax.
        greedy: int32 [1, C], most likely ids, the lowest on ties.
        greedy_confidence: float32 [1, C].
        finite: bool [], False when any position held NaN or infinity and nothing here can be trusted. To be read
            together with whatever the step reads anyway.
        folded: the last total of the caller's fold, None without one.
    """

    sampled: mx.array
    confidence: mx.array
    entropy: mx.array
    greedy: mx.array
    greedy_confidence: mx.array
    finite: mx.array
    folded: Any = None


def vocabulary_statistics(
    hidden: mx.array,
    project: Project,
    rule: VocabularyRule,
    *,
    vocab_size: int,
    noise: VocabularyNoise,
    seen: mx.array | None = None,
    fold: Fold | None = None,
) -> VocabularyStatistics:
    """Sweep the vocabulary once. Work is submitted chunk by chunk and nothing is waited for.

    Args:
        hidden: [1, C, H], the rows that `project` reads.
        project: the output head.
        rule: how ids are drawn.
        vocab_size: V.
        noise: the uniforms; `candidates` is asked once, or `span` once per chunk.
        seen: bool [V], ids that the repetition penalty applies to; None for none.
        fold: is given every chunk, to gather something else from them in the same sweep.
    """
    flat = hidden.reshape(-1, hidden.shape[-1])
    truncated = bool(rule.top_k)
    moments: _Moments | None = None
    best: _Candidates | None = None
    folded: Any = None
    for start in range(0, vocab_size, rule.chunk):
        stop = min(start + rule.chunk, vocab_size)
        s = _scores(project(flat, start, stop), rule, None if seen is None else seen[start:stop])
        swept = _sweep(s, start)
        moments = _absorb(moments, swept)
        if truncated:
            best = _keep(best, s, start, min(rule.top_k or 0, vocab_size))
        else:
            best = _race(best, s, start, noise.span(start, stop))
        if fold is not None:
            folded = fold(folded, swept)
        # Without this the graph of the last chunk would keep every chunk's scores alive.
        mx.async_eval(*_arrays(moments), *_arrays(best), *_arrays(folded))
    assert moments is not None and best is not None
    chosen, score = _draw(best, moments.peak, rule, noise) if truncated else (best.ids[:, 0], best.scores[:, 0])
    return _conclude(moments, chosen, score, flat, folded)


@dataclass(frozen=True, eq=False)
class Chunk:
    """The scores of the ids from `start` to `stop`, and what has been worked out of them.

    Attributes:
        scores: float32 [R, stop - start].
        greedy: int32 [R], the best id.
        peak: float32 [R], its score.
        shares: float32 [R, stop - start], exp(score - peak): the one costly function of every score, for everybody.
        total: float32 [R], their sum.
    """

    start: int
    stop: int
    scores: mx.array
    greedy: mx.array
    peak: mx.array
    shares: mx.array
    total: mx.array


@dataclass(frozen=True, eq=False)
class _Moments:
    """Running quantities [R] of the ids swept so far, all relative to the peak, so that nothing overflows.

    `total` = sum of exp(s - peak); `weighted` = sum of exp(s - peak) (s - peak).
    """

    peak: mx.array
    greedy: mx.array
    total: mx.array
    weighted: mx.array


@dataclass(frozen=True, eq=False)
class _Candidates:
    """Ids [R, m] in ascending order along each row, with their scores; `keys` [R, 1] is the Gumbel race's best."""

    scores: mx.array
    ids: mx.array
    keys: mx.array | None = None


def _arrays(record: Any) -> list[mx.array]:
    """The arrays of a dataclass, or none for None."""
    values = [] if record is None else [getattr(record, item.name) for item in fields(record)]
    return [value for value in values if value is not None]


def _scores(logits: mx.array, rule: VocabularyRule, seen: mx.array | None) -> mx.array:
    """Scores float32 [R, w] from logits [R, w]; seen bool [w]."""
    z = logits.astype(mx.float32)
    rho = rule.repetition_penalty
    if seen is not None and rho != 1.0:
        z = mx.where(seen[None, :], mx.where(z < 0.0, z * rho, z / rho), z)
    return z if rule.temperature == 1.0 else z / rule.temperature


def _sweep(s: mx.array, start: int) -> Chunk:
    """The scores [R, w] of the ids from `start`, with their peak and their shares of it."""
    peak = mx.max(s, axis=-1, keepdims=True)
    shares = mx.exp(s - peak)
    greedy = mx.argmax(s, axis=-1).astype(mx.int32) + start
    return Chunk(start, start + s.shape[1], s, greedy, peak[:, 0], shares, mx.sum(shares, axis=-1))


def _absorb(before: _Moments | None, chunk: Chunk) -> _Moments:
    """The moments with the next chunk added."""
    weighted = mx.sum(chunk.shares * (chunk.scores - chunk.peak[:, None]), axis=-1)
    moments = _Moments(chunk.peak, chunk.greedy, chunk.total, weighted)
    return moments if before is None else _merge(before, moments)


def _merge(a: _Moments, b: _Moments) -> _Moments:
    """Moments of a and b together, where every id of a is below every id of b."""
    peak = mx.maximum(a.peak, b.peak)
    down_a, down_b = a.peak - peak, b.peak - peak  # at most 0
    scale_a, scale_b = mx.exp(down_a), mx.exp(down_b)
    return _Moments(
        peak=peak,
        greedy=mx.where(b.peak > a.peak, b.greedy, a.greedy),  # strictly: the lowest id wins a tie
        total=a.total * scale_a + b.total * scale_b,
        weighted=(a.weighted + a.total * down_a) * scale_a + (b.weighted + b.total * down_b) * scale_b,
    )


def _keep(before: _Candidates | None, s: mx.array, start: int, k: int) -> _Candidates:
    """The first k ranks (by score descending, then id ascending) of what was kept and the next chunk's scores [R, w].

    Scores that tie at the cut are common with half-precision logits, and which of them a partition returns is not
    defined. So the cut is found first, and then the lowest ids among its ties are taken.
    """
    m = 0 if before is None else before.ids.shape[1]
    pool = s if before is None else mx.concatenate([before.scores, s], axis=-1)
    R, n = pool.shape
    place = mx.broadcast_to(mx.arange(n, dtype=mx.int32)[None, :], (R, n))
    if n > k:
        cut = mx.partition(pool, n - k, axis=-1)[:, n - k : n - k + 1]
        rank = mx.where(pool > cut, -1, mx.where(pool == cut, place, _LAST))
        place = mx.sort(mx.argpartition(rank, k - 1, axis=-1)[:, :k], axis=-1).astype(mx.int32)
        pool = mx.take_along_axis(pool, place, axis=-1)
    ids = place + (start - m)
    if before is not None:
        kept = mx.take_along_axis(before.ids, mx.minimum(place, m - 1), axis=-1)
        ids = mx.where(place < m, kept, ids)
    return _Candidates(pool, ids)


def _draw(best: _Candidates, peak: mx.array, rule: VocabularyRule, noise: VocabularyNoise) -> tuple[mx.array, mx.array]:
    """Ids and scores [R] drawn from the renormalised truncation, by the Gumbel maximum."""
    eligible = best.scores
    if rule.min_p:
        eligible = mx.where(eligible >= (peak + math.log(rule.min_p))[:, None], eligible, -mx.inf)
    key = eligible + _gumbel(noise.candidates(best.ids.shape[1]))
    winner = mx.argmax(key, axis=-1)[:, None]
    return (
        mx.take_along_axis(best.ids, winner, axis=-1)[:, 0],
        mx.take_along_axis(best.scores, winner, axis=-1)[:, 0],
    )


def _race(before: _Candidates | None, s: mx.array, start: int, uniforms: mx.array) -> _Candidates:
    """The winner so far of the Gumbel race over the full vocabulary, with the next chunk's scores [R, w] entered."""
    key = s + _gumbel(uniforms)
    winner = mx.argmax(key, axis=-1)[:, None]
    keys = mx.take_along_axis(key, winner, axis=-1)
    scores = mx.take_along_axis(s, winner, axis=-1)
    ids = winner.astype(mx.int32) + start
    if before is None:
        return _Candidates(scores, ids, keys)
    assert before.keys is not None
    better = keys > before.keys
    return _Candidates(
        mx.where(better, scores, before.scores), mx.where(better, ids, before.ids), mx.maximum(keys, before.keys)
    )


def _gumbel(uniforms: mx.array) -> mx.array:
    """Gumbel values of uniforms, finite for every one of them."""
    return -mx.log(-mx.log(mx.clip(uniforms, _U_LOW, _U_HIGH)))


def _conclude(
    moments: _Moments, chosen: mx.array, score: mx.array, flat: mx.array, folded: Any
) -> VocabularyStatistics:
    """From running quantities to what a position is told by."""
    log_total = mx.log(moments.total)
    log_Z = moments.peak + log_total
    row = (1, flat.shape[0])
    # A NaN or infinite score makes its weighted sum NaN; an infinite hidden row could hide behind a softcap.
    finite = mx.all(mx.isfinite(moments.total + moments.weighted)) & mx.all(mx.isfinite(flat))
    return VocabularyStatistics(
        sampled=chosen.astype(mx.int32).reshape(row),
        confidence=mx.clip(mx.exp(score - log_Z), 0.0, 1.0).reshape(row),
        entropy=(log_total - moments.weighted / moments.total).reshape(row),
        greedy=moments.greedy.reshape(row),
        greedy_confidence=mx.clip(mx.exp(moments.peak - log_Z), 0.0, 1.0).reshape(row),
        finite=finite,
        folded=folded,
    )
