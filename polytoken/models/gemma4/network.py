"""The module tree, named as the tensors of a checkpoint are."""

# mypy: allow-subclassing-any
from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn

from polytoken.models.gemma4.blocks import Layer, SelfConditioning
from polytoken.models.gemma4.config import CanvasConfig
from polytoken.models.latent.deliberation import LatentDeliberation


class LayerScalar(nn.Module):
    """The one thing an encoder layer does not share with the decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_scalar = mx.ones((1,))


class EncoderText(nn.Module):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.layers = [LayerScalar() for _ in config.layers]


class Encoder(nn.Module):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.language_model = EncoderText(config)


class Decoder(nn.Module):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Layer(config, index) for index in range(len(config.layers))]
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.eps)
        self.self_conditioning = SelfConditioning(config)


class Backbone(nn.Module):
    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)


class CanvasNetwork(nn.Module):
    """The whole network; `latent_deliberation` only where the config has it."""

    def __init__(self, config: CanvasConfig) -> None:
        super().__init__()
        self.model = Backbone(config)
        if config.latent is not None:
            self.latent_deliberation = LatentDeliberation(
                config.latent, hidden_size=config.hidden_size, max_positions=config.max_positions, eps=config.eps
            )

    def cast_predicate(self, name: str) -> bool:
        """Whether loading may change a parameter's dtype; logarithms of decay rates stay as stored."""
        return not name.endswith("a_log")
