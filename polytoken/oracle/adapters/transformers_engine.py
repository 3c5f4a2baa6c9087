"""transformers on torch as a reference engine: float32 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from polytoken.errors import CheckpointError
from polytoken.oracle.adapters.engine import ReferenceEngine, chat_ids, stop_ids
from polytoken.oracle.digests import Values


class TransformersEngine(ReferenceEngine):
    """A causal model of transformers, strictly loaded.

    Raises:
        CheckpointError: weights that the class it chose lacks.
    """

    def __init__(self, checkpoint: Path) -> None:
        self.name = f"transformers {transformers.__version__} on torch {torch.__version__}"
        self.dtype, self.device = "float32", "cpu"
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self._model = _load(checkpoint)
        config = getattr(self._model.config, "text_config", self._model.config)
        self.max_positions = int(config.max_position_embeddings)
        self.eos_ids = stop_ids(checkpoint, self._tokenizer)
        self._cache: Any = None

    def encode(self, prompt: str) -> list[int]:
        return chat_ids(self._tokenizer, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def begin(self) -> None:
        self._cache = None

    def forward(self, ids: Sequence[int]) -> Values:
        with torch.no_grad():
            out = self._model(torch.tensor([list(ids)]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        return np.asarray(out.logits[0].float().numpy(), dtype=np.float32)


def _load(checkpoint: Path) -> Any:
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, output_loading_info=True
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise CheckpointError(f"transformers finds no weights for {missing[0]}", code="missing_tensors")
    return model.eval()
