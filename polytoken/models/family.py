"""A model family: how a checkpoint's config and tensor names become a network and a `CausalModel`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.errors import CheckpointError
from polytoken.models.base import CausalModel

Config = dict[str, Any]


@dataclass(frozen=True)
class Family:
    """One family of networks. Every method takes the checkpoint's config.json as it stands.

    Attributes:
        name: the family's name in reports.
        model_types: values of `model_type` in config.json that belong to it.
        normalise: the part of config.json that describes the text network, checked and in one spelling; raises
            CheckpointError(`unsupported_config`) for a setting this family's network does not honour.
        make: the network with uninitialised weights, for a normalised config.
        rename: checkpoint tensors (name -> array) to the network's names and layouts; drops what is known to be
            derivable or foreign (rotary tables, vision towers) and nothing else.
        wrap: the loaded network behind the contract that lanes use.
    """

    name: str
    model_types: tuple[str, ...]
    normalise: Callable[[Config], Config]
    make: Callable[[Config], nn.Module]
    rename: Callable[[dict[str, mx.array], Config], dict[str, mx.array]]
    wrap: Callable[[nn.Module, Config], CausalModel]

    def text_config(self, config: Config) -> Config:
        """The text network's settings in one spelling; a copy, so the caller's config stays as it was."""
        return self.normalise(dict(config))

    def build(self, config: Config) -> nn.Module:
        return self.make(self.text_config(config))

    def sanitize(self, weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
        return self.rename(weights, self.text_config(config))

    def adapt(self, network: nn.Module, config: Config) -> CausalModel:
        return self.wrap(network, self.text_config(config))


def flatten_rope(config: Config) -> Config:
    """Spell rotary settings the old way: newer configs nest `rope_theta` and scaling under `rope_parameters`."""
    nested = config.get("rope_parameters")
    if not isinstance(nested, Mapping) or "rope_theta" not in nested:
        return config
    config = dict(config)
    config.setdefault("rope_theta", nested["rope_theta"])
    if config.get("rope_scaling") is None and nested.get("rope_type", "default") != "default":
        config["rope_scaling"] = dict(nested)
    return config


def require(config: Config, name: str, *allowed: Any, default: Any = None) -> None:
    """Refuse a setting that the network would silently ignore."""
    value = config.get(name, default)
    if value not in allowed:
        raise CheckpointError(
            f"config.json: {name} is {value!r}; this family supports {', '.join(repr(item) for item in allowed)} only",
            code="unsupported_config",
            field=name,
        )


def require_keys(config: Config, *names: str) -> None:
    """Refuse a config that lacks a value without which no network can be built."""
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}", code="bad_config", field=missing[0])


def require_rope(config: Config, *types: str) -> None:
    """Refuse a rotary scaling the network does not implement."""
    scaling = config.get("rope_scaling")
    if scaling is None:
        return
    kind = scaling.get("rope_type", scaling.get("type", "default")) if isinstance(scaling, Mapping) else scaling
    if kind not in types:
        raise CheckpointError(
            f"config.json: rope_scaling type {kind!r} is not supported; known: {', '.join(types)}",
            code="unsupported_config",
            field="rope_scaling",
        )


def drop_rotary_tables(weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """Leave out precomputed rotary frequencies, which old exports carry beside the weights."""
    return {name: array for name, array in weights.items() if not name.endswith("rotary_emb.inv_freq")}
