"""Zero-centred norms: raw checkpoints store w of `norm(x) (1 + w)`, the network wants 1 + w. Added once, and checked.

A norm with one too many or one too few loads fine and runs badly, and in a draft head shows only as drafts that are
never accepted. Raw files are told from converted ones by the convolutions (raw: [C, 1, K], converted: [C, K, 1]); the
sizes of the norms then have to agree with that.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import mlx.core as mx
import numpy as np

from polytoken.errors import CheckpointError

_BLOCK: Final = re.compile(r"\.layers\.\d+\.(input_layernorm|post_attention_layernorm)\.weight$")
_HEADS: Final = re.compile(r"\.layers\.\d+\.self_attn\.(q_norm|k_norm)\.weight$")
_OTHERS: Final = re.compile(r"^(language_model\.)?model\.norm\.weight$|^mtp\.(norm|pre_fc_norm_\w+)\.weight$")
_SAMPLED: Final = 16  # norms of each kind that are looked at


@dataclass(frozen=True)
class NormSizes:
    """Mean gains: of the norms before attention and feed-forward, and of those on query and key heads.

    Trained w have means below 0.5 in the first place, and in the second about 0.8 and below 1.25; random w about 0.
    """

    blocks: float
    heads: float

    @property
    def zero_centred(self) -> bool:
        """Whether one still has to be added."""
        return self.blocks < 0.5 and self.heads < 1.25

    @property
    def doubled(self) -> bool:
        """Whether one was added twice: together they are above what once added can come to, 1.5 and 2.25."""
        return self.blocks + self.heads > 3.75


def is_zero_centred(name: str) -> bool:
    """Whether the tensor is the weight of a zero-centred norm: all but the delta nets' output norms."""
    return any(pattern.search(name) for pattern in (_BLOCK, _HEADS, _OTHERS))


def measure(weights: Mapping[str, mx.array]) -> NormSizes | None:
    """Mean gains of a part of a network; None if it lacks one of the two kinds."""

    def mean(names: Iterable[str]) -> float | None:
        means = [weights[name].astype(mx.float32).mean() for name in names]
        return float(np.array(mx.stack(means).mean())) if means else None

    blocks = mean([name for name in weights if _BLOCK.search(name)][:_SAMPLED])
    heads = mean([name for name in weights if _HEADS.search(name)][:_SAMPLED])
    return None if blocks is None or heads is None else NormSizes(blocks, heads)


def add_one(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """The weights with zero-centred norms as the network wants them, in float32 so that no bit of w is lost."""
    return {n: w.astype(mx.float32) + 1.0 if is_zero_centred(n) else w for n, w in weights.items()}


def check(weights: Mapping[str, mx.array], *, part: str, why: str) -> None:
    """Refuse weights, as the network would get them, whose norms have one too many or one too few.

    Args:
        part: "trunk" or "draft head".
        why: how it was decided whether to add one.

    Raises:
        CheckpointError: `norm_convention`.
    """
    sizes = measure(weights)
    if sizes is None or not (sizes.doubled or sizes.zero_centred):
        return
    told = f"mean gains {sizes.blocks:.2f} before blocks and {sizes.heads:.2f} on query and key heads"
    what = "one was added to its norms twice" if sizes.doubled else "one was never added to its zero-centred norms"
    raise CheckpointError(
        f"the {part} looks as if {what} ({told}; {why}); convert the checkpoint again from the release",
        code="norm_convention",
        field=next(name for name in weights if _BLOCK.search(name)),
    )
