"""Polytoken: LLM inference on MLX that commits several tokens per forward pass and can prove it did so rightly."""

from __future__ import annotations

__version__ = "0.1.0"
