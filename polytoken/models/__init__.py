"""Networks: maths and tensor names, one file per family, behind the contract of `base`."""

from __future__ import annotations

from typing import Any

from polytoken.errors import CheckpointError
from polytoken.models import diffusion_gemma, gemma3, llama, modilify_mk2, qwen2, qwen3, qwen3_5, qwen3_next
from polytoken.models.family import Family

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen3.FAMILY,
    gemma3.FAMILY,
    diffusion_gemma.FAMILY,
    modilify_mk2.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.MOE,
    qwen3_next.FAMILY,
)


def family_for(config: dict[str, Any]) -> Family:
    """The family of a checkpoint's config, by its `model_type`.

    Raises:
        CheckpointError: `bad_config` without a `model_type`, `unknown_model_type` for one that no family claims.
    """
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError("config.json lacks model_type", code="bad_config", field="model_type")
    for family in FAMILIES:
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(name for family in FAMILIES for name in family.model_types))
    raise CheckpointError(
        f"config.json: model_type {model_type!r} is not supported; supported: {known}",
        code="unknown_model_type",
        field="model_type",
    )
