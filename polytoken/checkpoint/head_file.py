"""A draft head in a file of its own: what its header says, and how its matrices are packed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx

from polytoken.checkpoint.files import TensorTable
from polytoken.checkpoint.quantisation import MODES, Packing
from polytoken.errors import CheckpointError

_HEAD: Final = "mtp."


def read_metadata(table: TensorTable) -> dict[str, str] | None:
    """The header metadata of mtp.safetensors, empty if it has none; None where there is no such file."""
    path = table.head_file
    if path is None:
        return None
    try:
        loaded: Any = mx.load(str(path), return_metadata=True)
    except RuntimeError as fault:
        raise CheckpointError(f"{path} cannot be read: {fault}", code="damaged_file", field=path.name) from None
    return {str(key): str(value) for key, value in loaded[1].items()}


def head_packings(weights: Mapping[str, mx.array], plain: Mapping[str, mx.array]) -> dict[str, Packing]:
    """Module path -> packing for every packed matrix of a head, from shapes alone.

    Heads are often packed apart from the trunk and more finely, and config.json then does not say how. `plain` holds
    the network's unpacked parameters, whose last axis tells how many inputs the packed columns stand for.

    Raises:
        CheckpointError: `quantization_mismatch` for shapes that no packing has.
    """
    packings: dict[str, Packing] = {}
    for name, scales in weights.items():
        path = name.removesuffix(".scales")
        weight, target = weights.get(f"{path}.weight"), plain.get(f"{path}.weight")
        if path == name or not name.startswith(_HEAD) or weight is None or target is None:
            continue
        inputs, columns, groups = target.shape[-1], weight.shape[-1], scales.shape[-1]
        group, bits = inputs // groups, columns * 32 // inputs
        mode = "affine" if f"{path}.biases" in weights else "nvfp4" if group == 16 else f"mxfp{bits}"
        allowed_bits, allowed_groups = MODES.get(mode, (frozenset(), frozenset()))
        exact = weight.dtype == mx.uint32 and group * groups == inputs and columns * 32 == bits * inputs
        exact = exact and weights.get(f"{path}.biases", scales).shape == scales.shape
        if not exact or bits not in allowed_bits or group not in allowed_groups:
            raise CheckpointError(
                f"{path}: weight {weight.shape} and scales {scales.shape} fit no packing of {inputs} inputs",
                code="quantization_mismatch",
                field=path,
            )
        packings[path] = Packing(group_size=group, bits=bits, mode=mode)
    return packings
