"""Expert weights: one layout, whichever of the four a checkpoint has them in, and half-width experts on the CPU.

fused          experts.gate_up_proj [E, 2I, H] (gate rows first), experts.down_proj [E, H, I]
fused, suffix  experts.gate_up_proj.weight, experts.down_proj.weight
numbered       experts.{e}.gate_proj.weight [I, H], .up_proj.weight, .down_proj.weight [H, I]
stacked        switch_mlp.gate_proj.weight [E, I, H], .up_proj.weight, .down_proj.weight [E, H, I]: the network's own
"""

# mypy: allow-subclassing-any
from __future__ import annotations

import re
from typing import Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.switch_layers import SwitchLinear

from polytoken.errors import CheckpointError

_FUSED: Final = re.compile(r"(.*\.mlp\.)experts\.(gate_up_proj|down_proj)(?:\.(weight|scales|biases))?")
_NUMBERED: Final = re.compile(r"(.*\.mlp\.)experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.(weight|scales|biases)")


def stack_experts(weights: dict[str, mx.array], *, experts: int) -> dict[str, mx.array]:
    """All expert weights under `switch_mlp`, lazily and each in memory of its own; other tensors as they are.

    Raises:
        CheckpointError: `missing_tensors` when numbered experts are not exactly 0 to `experts` - 1.
    """
    stacked: dict[str, mx.array] = {}
    numbered: dict[str, dict[int, mx.array]] = {}
    for name, array in weights.items():
        if match := _NUMBERED.fullmatch(name):
            stem, number, part, leaf = match.groups()
            numbered.setdefault(f"{stem}switch_mlp.{part}.{leaf}", {})[int(number)] = array
        elif match := _FUSED.fullmatch(name):
            stem, part, leaf = match.groups()
            leaf = leaf or "weight"
            if part == "down_proj":
                stacked[f"{stem}switch_mlp.down_proj.{leaf}"] = array
                continue
            half = array.shape[1] // 2
            stacked[f"{stem}switch_mlp.gate_proj.{leaf}"] = mx.contiguous(array[:, :half])
            stacked[f"{stem}switch_mlp.up_proj.{leaf}"] = mx.contiguous(array[:, half:])
        else:
            stacked[name] = array
    for name, parts in numbered.items():
        absent = sorted(set(range(experts)) - parts.keys())
        if absent or len(parts) != experts:
            what = f"expert {absent[0]} is missing" if absent else f"there are {len(parts)} experts"
            raise CheckpointError(
                f"{name}: {what}, and config.json says {experts} experts", code="missing_tensors", field=name
            )
        stacked[name] = mx.stack([parts[number] for number in range(experts)])
    return stacked


class WidenedSwitchLinear(SwitchLinear):
    """Half-width experts where MLX's gathered product knows float32 only, as on the CPU: widened as they are used."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        weight = self.weight
        if indices.size < weight.shape[0]:  # few rows: widen only the experts they chose
            weight = weight[indices.flatten()]
            indices = mx.arange(indices.size, dtype=mx.uint32).reshape(indices.shape)
        wide = weight.astype(mx.float32).swapaxes(-1, -2)
        return mx.gather_mm(x.astype(mx.float32), wide, rhs_indices=indices).astype(x.dtype)


def widen_experts(network: nn.Module) -> None:
    """Let plain experts of a loaded network run as `WidenedSwitchLinear` where they could not run otherwise."""
    if mx.default_device() != mx.Device(mx.cpu):
        return
    for _, module in network.named_modules():
        if type(module) is SwitchLinear and module.weight.dtype != mx.float32:
            module.__class__ = WidenedSwitchLinear
