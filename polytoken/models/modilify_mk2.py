"""Modilify Mk2: a rolling canvas on Gemma 4, conditioned on latent deliberation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.family import Config, Family
from polytoken.models.gemma4.config import flatten, parse
from polytoken.models.gemma4.model import LatentConditioned
from polytoken.models.gemma4.network import CanvasNetwork
from polytoken.models.gemma4.tensors import rename as rename_tensors


def normalise(config: Config) -> Config:
    flat = flatten(config)
    parse(flat, latent=True)
    return flat


def make(config: Config) -> nn.Module:
    return CanvasNetwork(parse(config, latent=True))


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return rename_tensors(weights, parse(config, latent=True))


def wrap(network: nn.Module, config: Config) -> Any:
    return LatentConditioned(network, parse(config, latent=True))


FAMILY = Family("modilify_mk2", ("modilify_mk2",), normalise, make, rename, wrap)
