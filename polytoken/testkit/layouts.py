"""The same network in the layouts that checkpoints come in: experts, MLX conversions, heads in a file of their own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from polytoken.testkit.weights import Floats, Table

Weights = dict[str, Floats]

ExpertLayout = Literal[
    "fused",  # experts.gate_up_proj [E, 2I, H], gate rows first, and experts.down_proj [E, H, I]
    "fused_weight",  # the same with .weight appended, as some conversions write them
    "numbered",  # experts.{e}.{gate,up,down}_proj.weight
    "switch",  # switch_mlp.{gate,up,down}_proj.weight [E, out, in], mlx-lm's
]
HeadPlace = Literal[
    "shards",  # mtp.* among the other weights
    "sidecar",  # in mtp.safetensors
    "dropped",  # nowhere, although the configuration declares it: what careless conversions leave
]
Geometry = Literal[
    "global",  # full layers described by global_head_dim and num_global_key_value_heads
    "per_layer",  # by per_layer_config, layer by layer
]

_FUSED = re.compile(r"(?P<stem>.*experts\.)(?P<part>gate_up_proj|down_proj)")


@dataclass(frozen=True)
class Layout:
    """How the tensors of a checkpoint are spelled. The defaults are those of the family's release.

    Attributes:
        experts: None for the release's own.
        mlx: as mlx-lm's convert writes it: its tree of names, one added to zero-centred norms, convolution weights
            [C, K, 1], experts as "switch". The head then belongs in a sidecar.
        head: where a family with a draft head has it; None for "shards", or "sidecar" with `mlx`.
        geometry: how a family whose full layers differ in size says so.
    """

    experts: ExpertLayout | None = None
    mlx: bool = False
    head: HeadPlace | None = None
    geometry: Geometry = "global"


def arrange_experts(weights: Mapping[str, Floats], layout: ExpertLayout) -> Weights:
    """Rearrange fused experts. The order of the values of one expert changes nowhere."""
    arranged: Weights = {}
    for name, array in weights.items():
        match = _FUSED.fullmatch(name)
        if match is None or layout == "fused":
            arranged[name] = array
            continue
        if layout == "fused_weight":
            arranged[f"{name}.weight"] = array
            continue
        parts = {"down_proj": array}
        if match["part"] == "gate_up_proj":
            gate, up = np.split(array, 2, axis=1)
            parts = {"gate_proj": gate, "up_proj": up}
        for part, values in parts.items():
            if layout == "switch":
                arranged[f"{match['stem'].removesuffix('experts.')}switch_mlp.{part}.weight"] = values
            else:
                for expert, matrix in enumerate(values):
                    arranged[f"{match['stem']}{expert}.{part}.weight"] = matrix
    return arranged


def convert_to_mlx(weights: Mapping[str, Floats], table: Table) -> Weights:
    """Fused release weights of a hybrid as mlx-lm's convert would leave them, the head treated alike."""
    converted: Weights = {}
    wrapped = any(name.startswith("model.language_model.") for name in weights)
    for name, array in weights.items():
        if name.startswith("model.visual."):
            continue
        values = array
        if table[name].kind == "norm_zero_centred":
            values = (array + np.float32(1)).astype(np.float32)
        elif name.endswith("conv1d.weight"):
            values = np.moveaxis(array, 2, 1)
        new = name
        if wrapped and not name.startswith("mtp."):
            inner = name.replace("model.language_model.", "model.")
            new = f"language_model.{inner}"
        converted[new] = values
    return arrange_experts(converted, "switch")
