"""The formulas of the canvas lane written out densely in float64, position by position, and noise from tables."""

from __future__ import annotations

import math
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from polytoken.lanes.canvas.policy import CommitPolicy
from polytoken.sampling.vocabulary import VocabularyRule


def scores(logits: np.ndarray, rule: VocabularyRule, seen: np.ndarray | None) -> np.ndarray:
    """float32 [C, V], in the lane's own precision, so that ties stay ties."""
    z = logits.astype(np.float32)
    rho = np.float32(rule.repetition_penalty)
    if seen is not None and rho != 1:
        z = np.where(seen[None, :], np.where(z < 0, z * rho, z / rho), z)
    return (z / np.float32(rule.temperature)).astype(np.float32)


def softmax(s: np.ndarray) -> np.ndarray:
    s = s.astype(np.float64)
    e = np.exp(s - s.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def entropy(P: np.ndarray) -> np.ndarray:
    return -np.sum(np.where(P > 0, P * np.log(np.maximum(P, 1e-300)), 0.0), axis=-1)


def support(s: np.ndarray, rule: VocabularyRule) -> list[int]:
    """Ids of one position [V] that may be drawn, ascending."""
    ranking = sorted(range(len(s)), key=lambda i: (-s[i], i))
    if not rule.top_k:
        return sorted(ranking)
    kept = ranking[: rule.top_k]
    if rule.min_p:
        floor = np.float32(s[ranking[0]] + np.float32(math.log(rule.min_p)))
        kept = [i for i in kept if s[i] >= floor]
    return sorted(kept)


def candidates(s: np.ndarray, rule: VocabularyRule) -> list[int]:
    """The top-k of one position [V], ascending by id: what noise is laid over."""
    ranking = sorted(range(len(s)), key=lambda i: (-s[i], i))
    return sorted(ranking[: rule.top_k] if rule.top_k else ranking)


def gumbel(u: np.ndarray) -> np.ndarray:
    return -np.log(-np.log(np.clip(u.astype(np.float64), 1.17549435e-38, 1.0 - 2.0**-23)))


def truncated_law(s: np.ndarray, rule: VocabularyRule) -> np.ndarray:
    """[V], the renormalised truncation of one position."""
    P = softmax(s)
    law = np.zeros_like(P)
    ids = support(s, rule)
    law[ids] = P[ids] / P[ids].sum()
    return law


def failure(p: float, H: float, policy: CommitPolicy) -> float:
    p = min(max(p, 1e-6), 1 - 1e-6)
    H_b = max(H, 0.0)
    if policy.top_k is not None:
        H_b = min(H_b, math.log(policy.top_k))
    if policy.min_p is not None:
        H_b = min(H_b, max(-math.log(policy.min_p * p), 0.0))
    h2 = -p * math.log(p) - (1 - p) * math.log(1 - p)
    x = math.log(p / (1 - p)) - policy.entropy_weight * max(H_b - h2, 0.0)
    sigma = 1 / (1 + math.exp(-x)) if x > -700 else 0.0
    q = min(max(sigma**policy.confidence_power, 1e-6), 1 - 1e-6)
    f = 1 - q
    if policy.target_confidence is not None and q < policy.target_confidence:
        f = max(f, policy.failure_budget)
    return f


def prefix(f: np.ndarray, valid: np.ndarray, budget: float) -> int:
    total, n = np.float32(0), 0
    for rate, ok in zip(f, valid, strict=True):
        total = np.float32(total + np.float32(min(max(rate, 0.0), 1.0)))
        if not ok or not total < budget:
            break
        n += 1
    return n


def stop_clip(ids: np.ndarray, n: int, stops: tuple[int, ...]) -> int:
    for j in range(n):
        if ids[j] in stops:
            return j + 1
    return n


@dataclass
class Choice:
    normal: int
    length: int
    ids: list[int]
    jumped: bool
    ponder: int
    stagnation: int


def select(
    policy: CommitPolicy,
    *,
    sampled: np.ndarray,
    f_new: np.ndarray,
    f_old: np.ndarray,
    greedy: np.ndarray,
    f_greedy: np.ndarray,
    ponder: int,
    stagnation: int,
    active: bool,
    remaining: int,
    stops: tuple[int, ...],
) -> Choice:
    """One row, all arrays [C]."""
    if not active:
        return Choice(0, 0, [], False, ponder, stagnation)
    valid = np.arange(len(sampled)) < remaining
    n0 = stop_clip(sampled, min(prefix(f_new, valid, policy.failure_budget), max(remaining, 0)), stops)
    frontier = min(max(prefix(f_old, valid, policy.failure_budget), n0) + 1, int(valid.sum()))
    gains = [float(f_old[j]) - float(f_new[j]) for j in range(frontier)]
    progress = sum(gains) / len(gains) if gains else 0.0
    if n0:
        return Choice(n0, n0, [int(i) for i in sampled[:n0]], False, 0, 0)
    ponder += 1
    stagnation = 0 if progress >= policy.min_progress else stagnation + 1
    if ponder >= policy.max_ponder_steps or stagnation >= policy.stagnation_threshold:
        n = stop_clip(greedy, min(prefix(f_greedy, valid, policy.jump_budget), max(remaining, 0)), stops)
        if n:
            return Choice(0, n, [int(i) for i in greedy[:n]], True, 0, 0)
    return Choice(0, 0, [], False, ponder, stagnation)


@dataclass
class TableStep:
    """Uniforms [C, V] of one denoise step."""

    table: np.ndarray

    def candidates(self, k: int) -> mx.array:
        return mx.array(self.table[:, :k])

    def span(self, start: int, stop: int) -> mx.array:
        return mx.array(self.table[:, start:stop])


@dataclass
class TableNoise:
    """Canvases [n, C] and uniforms [n, C, V]."""

    canvases: np.ndarray
    uniforms: np.ndarray

    def canvas(self, step: int) -> mx.array:
        return mx.array(self.canvases[step][None].astype(np.int32))

    def step(self, step: int) -> TableStep:
        return TableStep(self.uniforms[step])
