"""DiffusionGemma: block diffusion on Gemma 4, conditioned on its own previous distribution."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.family import Config, Family
from polytoken.models.gemma4.config import flatten, parse
from polytoken.models.gemma4.model import LogitConditioned
from polytoken.models.gemma4.network import CanvasNetwork
from polytoken.models.gemma4.tensors import rename as rename_tensors


def normalise(config: Config) -> Config:
    flat = flatten(config)
    parse(flat, latent=False)
    return flat


def make(config: Config) -> nn.Module:
    return CanvasNetwork(parse(config, latent=False))


def rename(weights: dict[str, mx.array], config: Config) -> dict[str, mx.array]:
    return rename_tensors(weights, parse(config, latent=False))


def wrap(network: nn.Module, config: Config) -> Any:
    return LogitConditioned(network, parse(config, latent=False))


FAMILY = Family("diffusion_gemma", ("diffusion_gemma",), normalise, make, rename, wrap)
