"""Checkpoints whose draft head is right a chosen part of the time.

A random head is never right, so accepting is never tested with it. Here the next token is nearly a fixed permutation of
the last one: the output head favours perm(token), and every residual branch is scaled by alpha, which is how often the
branches overrule that. The draft head computes the same permutation from the token it is given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from polytoken.testkit.weights import Floats, TensorSpec, draw

Weights = dict[str, Floats]

_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
_NEUTRAL = (
    "model.norm.weight",
    "model.language_model.norm.weight",
    "mtp.norm.weight",
    "mtp.pre_fc_norm_embedding.weight",
)


@dataclass(frozen=True)
class Acceptance:
    """How right the draft head is.

    Attributes:
        alpha: scale of the residual branches. About 0.6 lets every draft be accepted, 1.5 about two thirds at depth 1,
            2.5 about a quarter.
        hidden: scale of the hidden state's part in the head's fusion.
        head_attention: scale of the head's attention output.
    """

    alpha: float
    hidden: float = 0.15
    head_attention: float = 1.0


# With NEARLY_FREE the head hardly looks at what came before, so any history policy gives the same counts. With
# HISTORY_MATTERS it does, which tells the policies apart.
NEARLY_FREE = Acceptance(alpha=1.5)
HISTORY_MATTERS = Acceptance(alpha=1.5, hidden=1.0, head_attention=8.0)


def tune_acceptance(weights: Weights, acceptance: Acceptance, *, seed: int) -> Weights:
    """Release weights with fused experts, changed so that the head is accepted about as `acceptance` says.

    The output head must be a tensor of its own (an untied checkpoint).
    """
    tuned = dict(weights)
    embedding = next(array for name, array in weights.items() if name.endswith("embed_tokens.weight"))
    vocab, hidden = embedding.shape
    # fsum is exact, hence the same on every machine; a vectorised sum of squares is not.
    lengths = [math.sqrt(math.fsum(float(value) ** 2 for value in row)) for row in embedding]
    units = embedding.astype(np.float64) / np.array(lengths)[:, None]
    order = np.argsort(draw("permutation", TensorSpec((vocab,), "dt_bias"), seed=seed), kind="stable")
    head = np.empty_like(embedding)
    head[order] = (4.0 * units).astype(np.float32)
    tuned["lm_head.weight"] = head
    for name, array in weights.items():
        if name.endswith(_RESIDUAL):
            scale = acceptance.alpha
            if name == "mtp.layers.0.self_attn.o_proj.weight":
                scale *= acceptance.head_attention
            tuned[name] = array * np.float32(scale)
        elif name in _NEUTRAL:
            tuned[name] = np.zeros_like(array)
    mixing = draw("mtp.fc.hidden", TensorSpec((hidden, hidden)), seed=seed) * np.float32(acceptance.hidden)
    tuned["mtp.fc.weight"] = np.concatenate([np.eye(hidden, dtype=np.float32), mixing], axis=1)
    return tuned
