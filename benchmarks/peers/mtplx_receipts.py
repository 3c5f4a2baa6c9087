"""Receipts of mtplx on a checkpoint, for `polytoken oracle compare`: run it in mtplx's own environment.

    PYTHONPATH=. python benchmarks/peers/mtplx_receipts.py --checkpoint FOLDER --mode decode > mtplx.jsonl

Greedy, on the CPU, with the `stock` verify core (see mtplx_mtp.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import mtplx_mtp
import numpy as np
from transformers import AutoTokenizer

from polytoken.oracle.adapters.engine import MODES, ReferenceEngine, chat_ids, stop_ids, write_reference
from polytoken.oracle.digests import Values
from polytoken.oracle.prompts import first_prompt
from polytoken.oracle.receipt import Receipts


class MtplxEngine(ReferenceEngine):
    """mtplx's runtime: its trunk forward over its own caches."""

    def __init__(self, checkpoint: Path) -> None:
        self.name = f"mtplx {version('mtplx')} on mlx {version('mlx')}"
        self.dtype, self.device = "float32", "cpu"
        self._tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self._runtime: Any = mtplx_mtp.Engine(checkpoint, "stock", "capture_commit").runtime
        config = json.loads((checkpoint / "config.json").read_text())
        self.max_positions = int(config.get("text_config", config)["max_position_embeddings"])
        self.eos_ids = stop_ids(checkpoint, self._tokenizer)
        self._cache: Any = None

    def encode(self, prompt: str) -> list[int]:
        return chat_ids(self._tokenizer, prompt)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))

    def begin(self) -> None:
        self._cache = self._runtime.make_cache()

    def forward(self, ids: Sequence[int]) -> Values:
        logits, _ = self._runtime.forward_ar(mx.array([list(ids)]), cache=self._cache, return_hidden=True)
        return np.array(logits[0].astype(mx.float32))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--mode", choices=MODES, default="forward")
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--max-new-tokens", type=int)
    options = parser.parse_args()

    def out(line: str) -> None:
        sys.stdout.write(line)

    write_reference(
        lambda: MtplxEngine(options.checkpoint),
        Receipts(out, out),
        checkpoint=options.checkpoint,
        mode=options.mode,
        prompt=first_prompt(options.readme),
        limit=options.max_new_tokens,
    )


if __name__ == "__main__":
    main()
