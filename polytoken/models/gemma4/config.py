"""config.json of the canvas families, checked and typed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from polytoken.errors import CheckpointError
from polytoken.models.canvas import CanvasTokens, CommitSettings
from polytoken.models.family import Config, require, require_keys

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
STATE_SCHEMA: Final = 25
_TEXT_KEYS: Final = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "num_experts",
    "top_k_experts",
    "moe_intermediate_size",
    "sliding_window",
    "max_position_embeddings",
    "final_logit_softcapping",
    "layer_types",
)


@dataclass(frozen=True)
class Rope:
    """Rotary positions of one layer type: base, and the share of the frequency pairs that rotate."""

    theta: float
    share: float


@dataclass(frozen=True)
class LayerShape:
    """Head width and number of key-value heads of one layer."""

    head_dim: int
    kv_heads: int


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent deliberation.

    Attributes:
        dim, slots, heads, blocks: D, M, A, N.
        window: local attention sees |j - j'| < window.
        readers: full layers, from the first, that each memory bus writes into.
    """

    dim: int
    slots: int
    heads: int
    blocks: int
    window: int
    readers: int


@dataclass(frozen=True)
class CanvasConfig:
    """All that the networks need to know; `layers` has one shape per layer, beside its type in `layer_types`."""

    vocab_size: int
    hidden_size: int
    heads: int
    layer_types: tuple[str, ...]
    layers: tuple[LayerShape, ...]
    intermediate_size: int
    num_experts: int
    top_k_experts: int
    moe_intermediate_size: int
    sliding_window: int
    max_positions: int
    eps: float
    softcap: float
    rope: Mapping[str, Rope]
    canvas_length: int
    latent: LatentShape | None
    commit: CommitSettings
    tokens: CanvasTokens


def flatten(config: Config) -> Config:
    """One level of keys: the text network's beside the wrapper's own, which win where both speak of ids and type."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise CheckpointError("config.json lacks text_config", code="bad_config", field="text_config")
    outer = {key: value for key, value in config.items() if key != "text_config"}
    kept = {key: value for key, value in text.items() if outer.get(key) is None}
    tied = all(part.get("tie_word_embeddings") is not False for part in (outer, text))
    return {**outer, **kept, "tie_word_embeddings": tied}


def parse(config: Config, *, latent: bool) -> CanvasConfig:
    """The typed form of a flattened config; `latent` says whether the family has deliberation and commit settings.

    Raises:
        CheckpointError: `bad_config` for a value that is missing or out of range, `unsupported_config` for a setting
            that the network does not honour, `unknown_schema` for a state schema of another version.
    """
    require_keys(config, *_TEXT_KEYS, "canvas_length")
    _refuse_unsupported(config)
    types = _layer_types(config)
    shapes = _shapes(config, types)
    hidden = _count(config, "hidden_size")
    experts, top = _count(config, "num_experts"), _count(config, "top_k_experts")
    if top > experts:
        raise _bad("top_k_experts", f"top_k_experts is {top}, but there are only {experts} experts")
    positions, canvas = _count(config, "max_position_embeddings"), _count(config, "canvas_length")
    if canvas > positions:
        raise _bad("canvas_length", f"canvas_length {canvas} is more than the {positions} positions of the model")
    return CanvasConfig(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        heads=_count(config, "num_attention_heads"),
        layer_types=types,
        layers=shapes,
        intermediate_size=_count(config, "intermediate_size"),
        num_experts=experts,
        top_k_experts=top,
        moe_intermediate_size=_count(config, "moe_intermediate_size"),
        sliding_window=_count(config, "sliding_window"),
        max_positions=positions,
        eps=_number(config, "rms_norm_eps", default=1e-6, above=0.0),
        softcap=_number(config, "final_logit_softcapping", above=0.0),
        rope=_ropes(config),
        canvas_length=canvas,
        latent=_latent(config, full_layers=types.count(FULL)) if latent else None,
        commit=_commit(config, strict=latent),
        tokens=_tokens(config, strict=latent),
    )


def _bad(field: str, message: str) -> CheckpointError:
    return CheckpointError(f"config.json: {message}", code="bad_config", field=field)


def _count(config: Config, name: str, *, default: int | None = None) -> int:
    """A positive integer."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
        raise _bad(name, f"{name} must be a positive integer, not {value!r}")
    return value


def _number(
    config: Config,
    name: str,
    *,
    default: float | None = None,
    above: float | None = None,
    least: float | None = None,
) -> float:
    """A finite number, greater than `above` or not less than `least`."""
    value = config.get(name)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise _bad(name, f"{name} must be a finite number, not {value!r}")
    if (above is not None and value <= above) or (least is not None and value < least):
        bound = f"greater than {above}" if above is not None else f"at least {least}"
        raise _bad(name, f"{name} must be {bound}, not {value!r}")
    return float(value)


def _refuse_unsupported(config: Config) -> None:
    require(config, "hidden_activation", "gelu_pytorch_tanh", default="gelu_pytorch_tanh")
    require(config, "attention_bias", False, default=False)
    require(config, "tie_word_embeddings", True, default=True)
    require(config, "use_bidirectional_attention", None, False, "vision")
    require(config, "attention_k_eq_v", None, True)
    require(config, "enable_moe_block", None, True)
    require(config, "num_kv_shared_layers", None, 0)
    require(config, "hidden_size_per_layer_input", None, 0)
    require(config, "use_double_wide_mlp", None, False)


def _layer_types(config: Config) -> tuple[str, ...]:
    types = config["layer_types"]
    if not isinstance(types, list | tuple) or not all(kind in (FULL, SLIDING) for kind in types):
        raise _bad("layer_types", f"layer_types must list {FULL} and {SLIDING} only, not {types!r}")
    layers = _count(config, "num_hidden_layers")
    if len(types) != layers:
        raise _bad("layer_types", f"layer_types has {len(types)} entries, but num_hidden_layers is {layers}")
    if types[-1] != FULL:
        raise _bad("layer_types", f"layer_types must end with {FULL}, not {types[-1]}")
    return tuple(types)


def _shapes(config: Config, types: tuple[str, ...]) -> tuple[LayerShape, ...]:
    """Every layer's shape; full layers have one of their own, in either of two spellings."""
    sliding = {"head_dim": config["head_dim"], "num_key_value_heads": config["num_key_value_heads"]}
    full = {
        "head_dim": _either(config, "global_head_dim", "head_dim"),
        "num_key_value_heads": _either(config, "num_global_key_value_heads", "num_key_value_heads"),
    }
    records = [dict(full if kind == FULL else sliding) for kind in types]
    for key, changes in _per_layer(config).items():
        if not key.isdecimal() or int(key) >= len(types) or not isinstance(changes, Mapping):
            raise _bad("per_layer_config", f"per_layer_config has an entry {key!r} that is no layer")
        unknown = sorted(changes.keys() - full.keys())
        if unknown:
            raise CheckpointError(
                f"config.json: per_layer_config sets {', '.join(unknown)}, which is not supported",
                code="unsupported_config",
                field="per_layer_config",
            )
        records[int(key)].update(changes)
    shapes = []
    heads = _count(config, "num_attention_heads")
    for index, record in enumerate(records):
        shape = LayerShape(_count(record, "head_dim"), _count(record, "num_key_value_heads"))
        if heads % shape.kv_heads:
            raise _bad(
                "num_key_value_heads", f"num_key_value_heads {shape.kv_heads} of layer {index} does not divide {heads}"
            )
        if shape.head_dim % 2:
            raise _bad("head_dim", f"head_dim {shape.head_dim} of layer {index} is odd")
        shapes.append(shape)
    return tuple(shapes)


def _either(config: Config, name: str, fallback: str) -> Any:
    value = config.get(name)
    return config[fallback] if value is None else value


def _per_layer(config: Config) -> Mapping[str, Any]:
    value = config.get("per_layer_config") or {}
    if not isinstance(value, Mapping):
        raise _bad("per_layer_config", f"per_layer_config must be an object, not {value!r}")
    return value


def _ropes(config: Config) -> dict[str, Rope]:
    defaults = {SLIDING: Rope(10_000.0, 1.0), FULL: Rope(1_000_000.0, 0.25)}
    records = config.get("rope_parameters")
    if records is None:
        return defaults
    ropes = {}
    for kind, default in defaults.items():
        record = records.get(kind) if isinstance(records, Mapping) else None
        if not isinstance(record, Mapping):
            raise _bad("rope_parameters", f"rope_parameters must hold a record for {SLIDING} and one for {FULL}")
        rope_type = record.get("rope_type", "default")
        share = _number(dict(record), "partial_rotary_factor", default=1.0, above=0.0)
        whole = rope_type == "default" and share == 1.0
        if not (whole or (rope_type == "proportional" and share <= 1.0)) or record.get("factor", 1.0) != 1.0:
            raise CheckpointError(
                f"config.json: rope_parameters {dict(record)!r} of {kind} are not supported",
                code="unsupported_config",
                field="rope_parameters",
            )
        ropes[kind] = Rope(_number(dict(record), "rope_theta", default=default.theta, above=0.0), share)
    return ropes


def _latent(config: Config, *, full_layers: int) -> LatentShape:
    require_keys(config, "latent_dim", "latent_memory_slots")
    schema = config.get("state_schema_version")
    if schema != STATE_SCHEMA:
        raise CheckpointError(
            f"config.json: state_schema_version is {schema!r}; this version of polytoken reads {STATE_SCHEMA}",
            code="unknown_schema",
            field="state_schema_version",
        )
    dim, heads = _count(config, "latent_dim"), _count(config, "latent_num_heads", default=16)
    if dim % heads:
        raise _bad("latent_num_heads", f"{heads} latent heads do not divide latent_dim {dim}")
    readers = config.get("latent_bus_readers")
    readers = full_layers if readers is None else readers
    if isinstance(readers, bool) or not isinstance(readers, int) or not 0 <= readers <= full_layers:
        raise _bad("latent_bus_readers", f"latent_bus_readers must be 0 to {full_layers}, not {readers!r}")
    return LatentShape(
        dim=dim,
        slots=_count(config, "latent_memory_slots"),
        heads=heads,
        blocks=_count(config, "latent_num_layers", default=4),
        window=_count(config, "latent_local_attention_window", default=128),
        readers=readers,
    )


def _commit(config: Config, *, strict: bool) -> CommitSettings:
    if strict:
        require_keys(config, "commit_entropy_weight", "commit_confidence_power", "commit_failure_budget")
    budget = _number(config, "commit_failure_budget", default=0.2, above=0.0)
    target = _fraction(config, "commit_target_confidence")
    if target is not None and budget > 1.0:
        raise _bad("commit_failure_budget", f"a failure budget of {budget} is above 1 although a target is set")
    top_k = None if config.get("commit_top_k") is None else _count(config, "commit_top_k")
    min_p = _fraction(config, "commit_min_p")
    return CommitSettings(
        failure_budget=budget,
        entropy_weight=_number(config, "commit_entropy_weight", default=1.0, least=0.0),
        confidence_power=_number(config, "commit_confidence_power", default=2.0, above=0.0),
        sample_top_k=top_k if "commit_top_k" in config else 40,
        sample_min_p=min_p if "commit_min_p" in config else 0.05,
        failure_top_k=top_k,
        failure_min_p=min_p,
        target_confidence=target,
        denoise_temperature=_number(config, "denoise_temperature", default=1.0, above=0.0),
    )


def _fraction(config: Config, name: str) -> float | None:
    """A number strictly between 0 and 1, or None."""
    if config.get(name) is None:
        return None
    value = _number(config, name, above=0.0)
    if value >= 1.0:
        raise _bad(name, f"{name} must be less than 1, not {value!r}")
    return value


def _tokens(config: Config, *, strict: bool) -> CanvasTokens:
    if strict:
        require_keys(config, "eos_token_id", "turn_end_token_id")
    eos = config.get("eos_token_id")
    ids = list(eos) if isinstance(eos, list | tuple) else [] if eos is None else [eos]
    pad = config.get("pad_token_id")
    if isinstance(pad, list | tuple):
        pad = pad[0] if pad else None
    turn_end, image = config.get("turn_end_token_id"), config.get("image_token_id")
    vocabulary = _count(config, "vocab_size")
    for name, value in (
        *(("eos_token_id", value) for value in ids),
        ("pad_token_id", 0 if pad is None else pad),
        ("turn_end_token_id", 0 if turn_end is None else turn_end),
    ):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocabulary:
            raise _bad(name, f"{name} {value!r} is no id of a vocabulary of {vocabulary}")
    return CanvasTokens(eos=tuple(ids), turn_end=turn_end, pad=0 if pad is None else pad, image=image)
