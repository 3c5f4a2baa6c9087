"""Our side of `canvas_against_mlx_vlm.py`: the canvas lane, one row, stepped to the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from lines import runner_parser, serve
from ours import commits, open_row
from products import choose_products

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.lanes.canvas.opening import open_canvas_lane
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.request import Request


class Engine:
    def __init__(self, checkpoint: Path, products: str, chunk: int) -> None:
        mx.set_default_device(mx.cpu)
        self.products = choose_products(products)
        self.runtime = load_runtime(checkpoint, dtype="float32")
        self.chunk = chunk
        self.lane = open_canvas_lane(
            self.runtime,
            CanvasSettings(),
            bank=StateBank(0, identity=StateIdentity(checkpoint="random", lane="canvas", grid=chunk)),
            prefill_chunk=chunk,
            max_batch_rows=1,
        )

    def about(self) -> dict[str, Any]:
        return {
            "products": self.products,
            "parameters": self.runtime.parameters,
            "mlx": mx.__version__,
            "policy": dict(self.lane.method.report()),
        }

    def run(self, prompt: Sequence[int], canvases: int, steps: int, seed: int) -> dict[str, Any]:
        """Seconds of prefill and of all denoises, from the first to the last."""
        request = Request(
            request_id="r",
            token_ids=tuple(prompt),
            max_new_tokens=canvases * self.lane.model.canvas_length,
            max_denoising_steps=steps,
            seed=seed,
            ignore_eos=True,
        )
        before = time.perf_counter()
        row = open_row(self.lane, request, prompt)
        encoded = time.perf_counter()
        tokens = sum(len(commit.token_ids) for commit in commits(self.lane, row))
        after = time.perf_counter()
        done = row.steps
        self.lane.close(row, keep=False)
        return {"prefill": encoded - before, "decode": after - encoded, "steps": done, "tokens": tokens}

    def logits(self, prompt: Sequence[int], canvas: Sequence[int], path: str) -> None:
        """Logits [C, V] of a first denoise, to compare the networks."""
        model = self.lane.model
        cache = model.make_cache()
        for start in range(0, len(prompt), self.chunk):
            model.encode(mx.array([prompt[start : start + self.chunk]], mx.int32), cache)
        work = model.begin(
            mx.array([canvas], mx.int32), cache, latent=model.make_latent(), head=mx.zeros((1,), mx.int32)
        )
        for index in range(model.num_layers):
            model.run_layer(index, work)
        hidden = model.finish(work).heavy_hidden[0]
        np.save(path, np.array(model.project(hidden, 0, model.vocab_size)))


def main() -> None:
    parser = runner_parser(__doc__, products="exact")
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    engine = Engine(options.checkpoint, options.products, options.chunk)
    serve({"about": engine.about, "run": engine.run, "logits": engine.logits})


if __name__ == "__main__":
    main()
