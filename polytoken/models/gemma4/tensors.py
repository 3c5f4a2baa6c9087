"""From the tensors of a checkpoint to the parameters of `CanvasNetwork`, which bear the release's names."""

from __future__ import annotations

import re

import mlx.core as mx

from polytoken.models.family import drop_rotary_tables
from polytoken.models.gemma4.config import CanvasConfig
from polytoken.models.latent.deliberation import LatentDeliberation, neutral_parameters

_IMAGES = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
_ENCODER = "model.encoder.language_model."
_LATENT = "latent_deliberation."
_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")
_PACKED_INPUT = re.compile(r"(latent_deliberation\..*attention\.)in_proj_(weight|bias)")


def rename(weights: dict[str, mx.array], config: CanvasConfig) -> dict[str, mx.array]:
    """The network's parameters; whatever has no place stays under its own name, for the loader to refuse.

    Left out: images, rotary tables, and what the encoder repeats of the decoder, all but its layer scalars. The head
    is left in, since the loader drops it only after seeing that it is the embedding. A checkpoint without a single
    tensor of latent deliberation gets neutral ones.
    """
    out: dict[str, mx.array] = {}
    for name, array in drop_rotary_tables(weights).items():
        if name.startswith(_IMAGES) or ".rotary_emb." in name:
            continue
        if name.startswith(_ENCODER) and not name.endswith(".layer_scalar"):
            continue
        experts, packed = _EXPERTS.fullmatch(name), _PACKED_INPUT.fullmatch(name)
        if experts is not None:
            out[f"{name}.weight"] = array
        elif packed is not None and array.shape[0] % 3 == 0:
            thirds = mx.split(array, 3, axis=0)
            out |= {
                f"{packed[1]}{part}.{packed[2]}": third
                for part, third in zip(("query", "key", "value"), thirds, strict=True)
            }
        else:
            out[name] = array
    if config.latent is not None and not any(name.startswith(_LATENT) for name in weights):
        module = LatentDeliberation(
            config.latent, hidden_size=config.hidden_size, max_positions=config.max_positions, eps=config.eps
        )
        out |= {f"{_LATENT}{name}": array for name, array in neutral_parameters(module).items()}
    return out
