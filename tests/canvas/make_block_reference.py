"""Make `block_reference.npz`: what the sampler in `transformers` does with a scripted denoiser and noise from tables.

    pip install '.[cpu,reference]'
    python tests/canvas/make_block_reference.py

Not part of the test run. The denoiser and the tables come from `block_script`, which the test uses too; only what the
reference decided is kept. Its own `_denoising_step`, acceptance, renoise, temperature and early stop run here, with
`torch.randint` and `torch.multinomial` reading the tables: ids are drawn by the Gumbel maximum over uniforms.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from block_script import CASES, FIXTURE, Script
from transformers.models.diffusion_gemma import generation_diffusion_gemma as reference


class Sampler(reference.DiffusionGemmaGenerationMixin):
    """The mixin on a network that is a function of the canvas."""

    def __init__(self, script: Script) -> None:
        self.config = SimpleNamespace(
            canvas_length=script.C, text_config=SimpleNamespace(vocab_size=script.V), get_text_config=None
        )
        table = SimpleNamespace(weight=torch.zeros(1))
        self.model = SimpleNamespace(decoder=SimpleNamespace(embed_tokens=table))


def run(script: Script) -> dict[str, np.ndarray]:
    """The canvases of one case: argmax canvas and next canvas of every step, and the steps each block took."""
    policy = script.policy
    settings: Any = reference.DiffusionGemmaGenerationConfig(
        max_denoising_steps=policy.max_denoising_steps,
        sampler_config=reference.EntropyBoundSamplerConfig(entropy_bound=policy.entropy_bound),
        t_min=policy.t_min,
        t_max=policy.t_max,
        stability_threshold=policy.stability_threshold,
        confidence_threshold=policy.confidence_threshold,
    )
    model = Sampler(script)
    sampler = model._prepare_sampler(settings)
    stopping = model._prepare_diffusion_stopping_criteria(settings)
    warpers = model._prepare_logits_processor(settings)
    draws = 0

    def randint(**_: Any) -> torch.Tensor:
        nonlocal draws
        draws += 1
        return torch.from_numpy(script.canvases[draws - 1][None].astype(np.int64))

    def multinomial(probs: torch.Tensor, num_samples: int = 1) -> torch.Tensor:
        u = torch.from_numpy(script.uniforms(draws).astype(np.float64)).clip(1.17549435e-38, 1.0 - 2.0**-23)
        return (probs.double().log() - (-u.log()).log()).argmax(-1, keepdim=True)

    torch.randint, torch.multinomial = randint, multinomial  # type: ignore[assignment]
    found: dict[str, list[Any]] = {"argmax": [], "canvas": [], "steps": []}
    for block in range(script.blocks):
        stopping.reset()
        canvas = sampler.initialize_canvas(1, torch.device("cpu"))
        argmax, finished = canvas, torch.zeros(1, dtype=torch.bool)
        for step in range(policy.max_denoising_steps, 0, -1):

            def decoder(decoder_input_ids: torch.Tensor, block: int = block, step: int = step, **_: Any) -> Any:
                logits = script.logits(decoder_input_ids[0].numpy(), block=block, step=step)
                return SimpleNamespace(logits=torch.from_numpy(logits)[None])

            canvas, argmax, _, finished = model._denoising_step(
                decoder_forward=decoder,
                current_canvas=canvas,
                argmax_canvas=argmax,
                input_ids=None,
                decoder_position_ids=None,
                self_conditioning_logits=None,
                mask_mapping={},
                cache=None,
                finished_denoising=finished,
                cur_step=step,
                sampler=sampler,
                logits_processor=warpers,
                diffusion_stopping_criteria=stopping,
            )
            found["argmax"].append(argmax[0].numpy())
            found["canvas"].append(canvas[0].numpy())
            if bool(finished.all()):
                break
        found["steps"].append(policy.max_denoising_steps - step + 1)
    return {name: np.array(values, np.int32) for name, values in found.items()}


def main() -> None:
    """Write the fixture."""
    arrays = {f"{script.name}_{key}": value for script in CASES for key, value in run(script).items()}
    for script in CASES:
        print(script.name, "steps", arrays[f"{script.name}_steps"].tolist())
    np.savez_compressed(Path(__file__).with_name(FIXTURE), **arrays)


if __name__ == "__main__":
    main()
