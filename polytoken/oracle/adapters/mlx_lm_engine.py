"""mlx-lm as a reference engine: its own networks, caches and arithmetic on the same checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from transformers import AutoTokenizer

from polytoken.oracle.adapters.engine import ReferenceEngine, chat_ids, stop_ids
from polytoken.oracle.digests import Values


class MlxLmEngine(ReferenceEngine):
    """A model of mlx-lm, on MLX's default device, in the type its weights are stored in."""

    def __init__(self, checkpoint: Path) -> None:
        self.name = f"mlx-lm {version('mlx-lm')} on mlx {version('mlx')}"
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._model, _ = load_model(checkpoint, lazy=False, model_config=_changes(checkpoint))
        arrays = [array for _, array in tree_flatten(self._model.parameters())]
        floats = [array.dtype for array in arrays if mx.issubdtype(array.dtype, mx.floating)]
        self.dtype = str(max(set(floats), key=floats.count)).removeprefix("mlx.core.")
        self.device = "gpu" if mx.default_device() == mx.gpu else "cpu"
        config = json.loads((checkpoint / "config.json").read_text())
        self.max_positions = int(config.get("text_config", config)["max_position_embeddings"])
        self.eos_ids = stop_ids(checkpoint, self._tokenizer)
        self._cache: Any = None

    def encode(self, prompt: str) -> list[int]:
        return chat_ids(self._tokenizer, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def begin(self) -> None:
        self._cache = make_prompt_cache(self._model)

    def forward(self, ids: Sequence[int]) -> Values:
        logits = self._model(mx.array([list(ids)]), cache=self._cache)[0].astype(mx.float32)
        return np.array(logits)


def _changes(checkpoint: Path) -> dict[str, Any]:
    """What mlx-lm expects at the top of a config and transformers 5 writes into `rope_parameters`."""
    config = json.loads((checkpoint / "config.json").read_text())
    text = config.get("text_config", config)
    rope = text.get("rope_parameters") or {}
    found = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope and name not in text}
    if not found:
        return {}
    return {"text_config": {**text, **found}} if "text_config" in config else found
