"""mlx-vlm's side of `canvas_against_mlx_vlm.py`: its own generator, with a text port that does nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from lines import runner_parser, serve
from products import choose_products

# Before the imports below: mlx_vlm makes a stream on the default device when it is imported.
mx.set_default_device(mx.cpu)

from mlx_vlm.generate.diffusion import stream_diffusion_generate  # noqa: E402
from mlx_vlm.utils import load_model  # noqa: E402
from mlx_vlm.version import __version__  # noqa: E402


class NeverStop:
    """The stopping rule of a run whose length is fixed."""

    def add_eos_token_ids(self, ids: Any) -> None: ...

    def __call__(self, token: int) -> bool:
        return False


class NoText:
    """Tokenizer, processor and detokenizer of ids that stand for nothing and never stop."""

    last_segment = ""

    def __init__(self) -> None:
        self.detokenizer = self
        self.stopping_criteria = NeverStop()

    def __copy__(self) -> NoText:
        return self

    def reset(self) -> None: ...

    def add_token(self, token: int, **_: Any) -> None: ...

    def finalize(self) -> None: ...


class Engine:
    def __init__(self, checkpoint: Path, products: str, chunk: int, temperature: float) -> None:
        self.products = choose_products(products)
        self.model = load_model(checkpoint)
        self.text = NoText()
        self.chunk = chunk
        self.temperature = temperature

    def about(self) -> dict[str, Any]:
        return {"products": self.products, "mlx": mx.__version__, "version": __version__}

    def run(self, prompt: Sequence[int], canvases: int, steps: int, seed: int) -> dict[str, Any]:
        """Seconds of prefill and of all denoises, from the first to the last."""
        mx.random.seed(seed)
        before = time.perf_counter()
        last = None
        tokens = 0
        for result in stream_diffusion_generate(
            self.model,
            self.text,
            self.text,
            mx.array([prompt], mx.int32),
            None,
            None,
            max_tokens=canvases * self.model.config.canvas_length,
            skip_special_token_ids=[],
            temperature=self.temperature,
            max_denoising_steps=steps,
            diffusion_full_canvas=True,
            diffusion_sampler="entropy-bound",
            prefill_step_size=self.chunk,
        ):
            last = result
            tokens = result.generation_tokens
        after = time.perf_counter()
        assert last is not None
        prefill = last.prompt_tokens / last.prompt_tps
        return {
            "prefill": prefill,
            "decode": after - before - prefill,
            "steps": last.diffusion_denoising_steps,
            "tokens": tokens,
        }

    def logits(self, prompt: Sequence[int], canvas: Sequence[int], path: str) -> None:
        """Logits [C, V] of a first denoise, to compare the networks."""
        cache = self.model.make_cache()
        cache = self.model.diffusion_prefill_cache(mx.array([prompt], mx.int32), cache=cache)
        ids = mx.array([canvas], mx.int32)
        masks = self.model.diffusion_decoder_masks(ids, cache)
        np.save(path, np.array(self.model.diffusion_decoder_logits(ids, cache=cache, decoder_attention_mask=masks)[0]))


def main() -> None:
    parser = runner_parser(__doc__, products="stock")
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    engine = Engine(options.checkpoint, options.products, options.chunk, options.temperature)
    serve({"about": engine.about, "run": engine.run, "logits": engine.logits})


if __name__ == "__main__":
    main()
