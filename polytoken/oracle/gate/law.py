"""The sampled law: whether the tokens a lane draws follow the law that the network's own rows give.

Every token y drawn behind a text x has the law p( . | x), whatever was drafted. With log-probabilities as the score,

    S = sum (log p(y) + H),  H = -sum p log p,  V = sum (sum p (log p)^2 - H^2)

is a sum of differences with mean 0 whose variance is V, so z = S / sqrt(V) is nearly normal. Beside it, the place
u of y in the ranking of p (smoothed by a uniform number) is uniform: its ten bins are held to a chi-square. A lane that
draws from the wrong law shows in one of the two. The coins of acceptance are looked at by themselves: over all drafts
examined, accepted - alpha has mean 0 and variance alpha (1 - alpha), which needs few draws to show a skewed coin.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import mlx.core as mx
import numpy as np

from polytoken.lanes.mtp.row import Cycle
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.models.base import CausalModel
from polytoken.oracle.compare.rows import Tolerance
from polytoken.oracle.digests import Values
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome
from polytoken.oracle.gate.running import answer, ask
from polytoken.oracle.subject import Ids, Subject
from polytoken.request import SamplingParams
from polytoken.sampling.law import Distribution, shape

BINS: Final = 10
MOST_Z: Final = 4.5  # a right lane passes it once in 150,000 gates
MOST_CHI_SQUARE: Final = 40.0  # of nine degrees of freedom: once in 130,000
MOST_EDGES: Final = 0.05  # share of draws just outside a support that rounding has moved
MOST_SHAPING: Final = 1e-9  # between two ways to compute one law in float64
_TINY: Final = 1e-9  # a support may change at its edge by rounding


@dataclass
class Evidence:
    """What was seen of one lane's draws.

    Attributes:
        tolerance: how far rounding may move a logit; None where bits are promised.
        shaping: largest distance (total variation) of the sampler's law of a row from that of `law_of`.
        impossible: run and position of draws outside the support.
        edges: draws outside it by no more than rounding explains.
    """

    rng: np.random.Generator
    tolerance: Tolerance | None = None
    score: float = 0.0
    variance: float = 0.0
    draws: int = 0
    shaping: float = 0.0
    impossible: list[tuple[int, int]] = field(default_factory=list)
    edges: int = 0
    bins: list[int] = field(default_factory=lambda: [0] * BINS)
    coins: float = 0.0
    coin_variance: float = 0.0

    def add(self, row: Values, law: Distribution, token: int, *, run: int, position: int) -> None:
        """One token, its row of logits and the law it should have."""
        p = law.probs
        logs = np.log(p)
        entropy = float(-(p * logs).sum())
        self.draws += 1
        mass = law.probability(token)
        if mass <= _TINY:
            edge = float(row[law.ids].min())
            if self.tolerance is not None and row[token] >= edge - 2 * self.tolerance.bound(edge, row[token]):
                self.edges += 1
            else:
                self.impossible.append((run, position))
            return
        self.score += float(np.log(mass)) + entropy
        self.variance += float((p * logs**2).sum()) - entropy**2
        before = float(p[(p > mass) | ((p == mass) & (law.ids < token))].sum())
        self.bins[min(int((before + self.rng.random() * mass) * BINS), BINS - 1)] += 1

    def add_coins(self, cycle: Cycle) -> None:
        """The drafts of a window that were examined: all that were accepted, and the one that was not."""
        for j, alpha in enumerate(cycle.accept_probabilities):
            self.coins += (j < cycle.accepted) - alpha
            self.coin_variance += alpha * (1 - alpha)

    @property
    def holds(self) -> bool:
        fair = abs(self.z) <= MOST_Z and abs(self.z_coins) <= MOST_Z
        few = self.edges <= MOST_EDGES * self.draws
        shaped = self.shaping <= MOST_SHAPING
        return shaped and fair and self.chi_square <= MOST_CHI_SQUARE and few and not self.impossible

    @property
    def z(self) -> float:
        return self.score / math.sqrt(max(self.variance, 1e-12))

    @property
    def z_coins(self) -> float:
        return self.coins / math.sqrt(max(self.coin_variance, 1e-12))

    @property
    def chi_square(self) -> float:
        expected = max(sum(self.bins), 1) / BINS
        return sum((count - expected) ** 2 / expected for count in self.bins)


def check_law(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """The law of the AR lane, and of the MTP lane at every depth."""
    tolerance = None if exact else Tolerance.of(str(subject.about["dtype"]))
    lanes: list[tuple[str, Any]] = [("ar", None), *(("mtp", depth) for depth in matrix.depths)]
    sampling = matrix.sampling
    for name, depth in lanes:
        lane = subject.ar_lane() if depth is None else subject.mtp_lane(MtpSettings(depth=depth))
        evidence = Evidence(np.random.default_rng(0), tolerance)
        prompts = sorted((ids for _, ids in matrix.prompt_ids(subject)), key=len)[: matrix.prompts]
        for run in range(matrix.seeds):
            ids = prompts[run % len(prompts)]
            item = answer(lane, ask(f"law {run}", ids, matrix.new_tokens, sampling=sampling, seed=1000 + run))
            drawn = item.tokens
            for position, row in enumerate(_rows(subject.model, ids, drawn)):
                law = law_of(row, sampling)
                evidence.shaping = max(evidence.shaping, distance(law, shape(row, sampling)))
                evidence.add(row, law, drawn[position], run=run, position=position)
            for cycle in getattr(item.row, "cycles", None) or ():
                evidence.add_coins(cycle)
        yield Outcome(
            check="sampled law",
            case={"lane": name, "depth": depth, "draws": evidence.draws},
            verdict="different" if not evidence.holds else "near tie" if evidence.edges else "identical",
            detail={
                "shaping": evidence.shaping,
                "z": evidence.z,
                "z_coins": evidence.z_coins,
                "chi_square": evidence.chi_square,
                "bins": evidence.bins,
                "impossible": evidence.impossible[:3],
                "edges": evidence.edges,
            },
        )


def _rows(model: CausalModel, ids: Ids, drawn: list[int]) -> Iterator[Values]:
    """The row of logits behind which every token was drawn, from one forward of the whole text."""
    text = mx.array([[*ids, *drawn[:-1]]], dtype=mx.int32)
    hidden = model.forward(text, model.make_cache(), keep=len(drawn))
    rows = fetch({"logits": model.project(hidden.post[0])})["logits"]
    assert rows is not None
    yield from rows


def law_of(row: Values, sampling: SamplingParams) -> Distribution:
    """The law of a row, read off its definition and not off the sampler, which may be what is wrong.

    All ids are ranked by logit, then id; the first `top_k` ranks are kept, and those before which there is less than
    `top_p` of the whole softmax.
    """
    z = row.astype(np.float64)
    weights = np.exp((z - z.max()) / sampling.temperature)
    order = np.lexsort((np.arange(z.size), -z))
    ranked = weights[order] / weights.sum()
    before = np.concatenate([[0.0], np.cumsum(ranked)[:-1]])
    kept = (before < sampling.top_p) | (sampling.top_p >= 1.0)
    kept &= (np.arange(z.size) < sampling.top_k) | (sampling.top_k == 0)
    kept[0] = True
    kept &= ranked > 0.0
    ids = np.sort(order[kept])
    return Distribution(ids.astype(np.int64), weights[ids] / weights[ids].sum(), z.size)


def distance(a: Distribution, b: Distribution) -> float:
    """Total variation."""
    return 0.5 * float(np.abs(a.dense() - b.dense()).sum())
