"""Write a checkpoint as a plain one, in one dtype and without packing, so that other programs compute with the very
numbers that this one holds in memory (comparisons, benchmarks against mlx-lm)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Final

import mlx.core as mx
from mlx.utils import tree_flatten

from polytoken.checkpoint.config import CONFIG, read_config
from polytoken.checkpoint.files import SINGLE
from polytoken.checkpoint.load import load_weights
from polytoken.checkpoint.progress import Progress, silent
from polytoken.checkpoint.runtime import claiming_family
from polytoken.errors import CheckpointError

_TEXTS: Final = (
    "generation_config.json",
    "tokenizer*",
    "*.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)


def write_plain(source: Path, out: Path, *, dtype: str = "float32", progress: Progress = silent) -> Path:
    """Write the checkpoint in `source` to the new folder `out`, unpacked and in `dtype`; returns `out`.

    Tensors bear the names of the family's network, tied heads are left out.

    Raises:
        CheckpointError: `path_exists` when `out` exists; whatever loading raises.
    """
    if out.exists():
        raise CheckpointError(f"{out} exists already; name a new folder", code="path_exists", field=str(out))
    config = read_config(source)
    family = claiming_family(config)
    loaded = load_weights(source, family=family, config=config, dtype=dtype, dequantise=True, progress=progress)
    out.mkdir(parents=True)
    weights = dict(tree_flatten(loaded.network.parameters()))
    mx.save_safetensors(str(out / SINGLE), weights, metadata={"format": "mlx"})
    for pattern in _TEXTS:
        for path in source.glob(pattern):
            shutil.copyfile(path, out / path.name)
    kept = {key: value for key, value in config.items() if not key.startswith("quantization")}
    (out / CONFIG).write_text(json.dumps({**kept, "torch_dtype": loaded.dtype}, indent=2) + "\n", encoding="utf-8")
    return out
