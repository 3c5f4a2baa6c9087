"""Reference arrays of diffusion_gemma: encoder, decoder, and the whole block sampler with its noise given.

For each prompt P, with C canvas slots: `P_ids` [1, S]; `P_canvas` [1, C], random ids; `P_conditioning` float16 [C, V],
random logits; `P_encoder` [S, H], the encoder's post-norm rows; `P_logits` [C, V] of a first denoise over the prompt,
and `P_logits_conditioned` [C, V] of one that is self-conditioned; of the long prompt and some layers L also `P_keys_L`,
`P_values_L` [heads, N, d], keys rotated, N being S or for sliding layers min(S, window - 1), the rows that a denoise
may see. Then the canvas is encoded as committed tokens: `P_block2_keys_L`, `P_block2_values_L`, and `P_block2_logits`
[C, V] of a denoise of the reversed canvas after it.

For each setting L of the block sampler: `L_settings`, a JSON text; `L_ids` [1, S]; `L_noise` [n, C], the random ids in
the order they are drawn (the first canvas of a block, then one row per denoise); `L_uniforms` [m, C], one row per
denoise; `L_sequence`, the new tokens (whole blocks, padded after an end); `L_blocks`, the number of denoises of each
block; and [denoises, C] each `L_argmax`, the argmax canvas, `L_sampled`, `L_accepted` and `L_next`, the canvas of the
next denoise.

For each of twenty prompts I besides, one block under `many_settings`, in which most settle early: `many_I_ids`,
`many_I_noise`, `many_I_uniforms`, `many_I_sequence` and `many_I_blocks`, the number of denoises until the canvas
settled.

A sample is, slot by slot, the least id whose cumulative probability exceeds the uniform number (all in id order).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import DiffusionGemmaForBlockDiffusion
from transformers.models.diffusion_gemma import generation_diffusion_gemma as generation

Arrays = dict[str, np.ndarray]

MODEL_CLASS = DiffusionGemmaForBlockDiffusion


@dataclass(frozen=True)
class Setting:
    """One run of the block sampler."""

    prompt: str
    max_new_tokens: int
    max_denoising_steps: int
    entropy_bound: float
    stability_threshold: int
    confidence_threshold: float
    t_min: float = 0.4
    t_max: float = 0.8
    eos_token_id: int | None = None
    pad_token_id: int | None = None


SETTINGS = {
    # Few slots accepted at a time; a block ends when its argmax canvas is the same twice.
    "tight": Setting("long", 48, 12, 0.1, 1, 100.0),
    # Many accepted, more stability wanted, another schedule.
    "loose": Setting("short", 48, 10, 6.0, 2, 100.0, t_min=0.1, t_max=0.9),
    # The mean entropy decides as well, so that all steps are used unless the canvas is sure.
    "unsure": Setting("short", 32, 4, 1.0, 1, 0.005),
}
# How many prompts are run for their number of denoises, and what is kept of each run.
MANY = 20
MANY_SETTING = Setting("", 0, 20, 6.0, 1, 100.0, t_min=0.1, t_max=0.9)
MANY_KEPT = ("ids", "noise", "uniforms", "sequence", "blocks")
# A run of "tight" again, in which this new token ends the text inside a block.
ENDING = ("ending", "tight", 5)


def prompt_arrays(model: Any, ids: torch.Tensor, generator: np.random.Generator, *, keep_cache: bool) -> Arrays:
    """Encoder and decoder on one prompt, with keys and values if asked for."""
    config = model.config
    slots, vocab, length = config.canvas_length, config.text_config.vocab_size, ids.shape[1]
    canvas = torch.tensor(generator.integers(0, vocab, (1, slots)))
    conditioning = torch.tensor(generator.normal(size=(1, slots, vocab)) * 2, dtype=torch.float16)
    out = model(input_ids=ids, decoder_input_ids=canvas)
    cache = out.cache
    arrays = {
        "ids": ids.numpy().astype(np.int32),
        "canvas": canvas.numpy().astype(np.int32),
        "conditioning": conditioning[0].numpy(),
        "encoder": model.model.encoder.language_model(input_ids=ids).last_hidden_state[0].numpy(),
        "logits": out.logits[0].numpy(),
    }
    if keep_cache:
        arrays.update(cache_arrays(config, cache, length=length))
    conditioned = model(cache=cache, decoder_input_ids=canvas, self_conditioning_logits=conditioning.float())
    arrays["logits_conditioned"] = conditioned.logits[0].numpy()
    positions = torch.arange(length, length + slots)[None]
    model.model.encoder(input_ids=canvas, cache=cache, position_ids=positions, attention_mask=None)
    if keep_cache:
        later = cache_arrays(config, cache, length=length + slots)
        arrays.update({f"block2_{name}": array for name, array in later.items()})
    second = model(cache=cache, decoder_input_ids=canvas.flip(1), decoder_position_ids=positions + slots)
    arrays["block2_logits"] = second.logits[0].numpy()
    return arrays


def cache_arrays(config: Any, cache: Any, *, length: int) -> Arrays:
    """Keys and values of the first layer of either kind and of the last layer."""
    text = config.text_config
    kinds = text.layer_types
    chosen = {kinds.index("sliding_attention"), kinds.index("full_attention"), len(kinds) - 1}
    arrays = {}
    for layer in sorted(chosen):
        rows = min(length, text.sliding_window - 1) if kinds[layer] == "sliding_attention" else length
        for name, tensor in (("keys", cache.layers[layer].keys), ("values", cache.layers[layer].values)):
            arrays[f"{name}_{layer}"] = tensor[0, :, -rows:].numpy().copy()
    return arrays


class Recorder:
    """Noise from tables in place of the random generator, and a record of every denoise."""

    def __init__(self, generator: np.random.Generator, *, slots: int, vocab: int, rows: int) -> None:
        self.noise = generator.integers(0, vocab, (rows, slots))
        self.uniforms = generator.random((rows, slots))
        self.drawn = 0
        self.argmax: list[list[int]] = []
        self.next: list[list[int]] = []
        self.sampled: list[list[int]] = []
        self.accepted: list[list[bool]] = []
        self.blocks: list[int] = []

    def randint(self, low: int = 0, high: int = 0, size: tuple[int, int] = (1, 1), **_: Any) -> torch.Tensor:
        row = self.noise[self.drawn]
        self.drawn += 1
        return torch.tensor(row[None])

    def multinomial(self, probabilities: torch.Tensor, num_samples: int = 1) -> torch.Tensor:
        uniforms = torch.tensor(self.uniforms[len(self.sampled)])[:, None]
        cumulative = probabilities.double().cumsum(-1)
        ids = (cumulative <= uniforms).sum(-1, keepdim=True).clamp(max=probabilities.shape[-1] - 1)
        self.sampled.append(ids[:, 0].tolist())
        return ids

    @contextmanager
    def watch(self, model: Any) -> Iterator[None]:
        step = model._denoising_step

        def recorded(**kwargs: Any) -> Any:
            out = step(**kwargs)
            if kwargs["self_conditioning_logits"] is None:
                self.blocks.append(0)
            self.blocks[-1] += 1
            self.next.append(out[0][0].tolist())
            self.argmax.append(out[1][0].tolist())
            self.accepted.append(kwargs["sampler"].accepted_token_mask[0].tolist())
            return out

        with (
            patch.object(torch, "randint", self.randint),
            patch.object(torch, "multinomial", self.multinomial),
            patch.object(model, "_denoising_step", recorded),
        ):
            yield


def loop_arrays(model: Any, ids: torch.Tensor, setting: Setting, *, seed: int) -> Arrays:
    """One run of transformers' own loop."""
    config = model.config
    slots = config.canvas_length
    blocks = -(-setting.max_new_tokens // slots)
    generator = np.random.Generator(np.random.Philox(key=[seed, 2]))
    recorder = Recorder(
        generator, slots=slots, vocab=config.text_config.vocab_size, rows=blocks * (setting.max_denoising_steps + 1)
    )
    options = {name: value for name, value in asdict(setting).items() if name not in ("prompt", "entropy_bound")}
    # An explicit None is not heard: the checkpoint's own end token would be used.
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = None
    with recorder.watch(model):
        out = model.generate(
            ids, sampler_config=generation.EntropyBoundSamplerConfig(entropy_bound=setting.entropy_bound), **options
        )
    return {
        "settings": np.array(json.dumps(asdict(setting))),
        "ids": ids.numpy().astype(np.int32),
        "noise": recorder.noise[: recorder.drawn].astype(np.int32),
        "uniforms": recorder.uniforms[: len(recorder.sampled)],
        "sequence": out.sequences[0, ids.shape[1] :].numpy().astype(np.int32),
        "blocks": np.array(recorder.blocks, dtype=np.int32),
        "argmax": np.array(recorder.argmax, dtype=np.int32),
        "next": np.array(recorder.next, dtype=np.int32),
        "sampled": np.array(recorder.sampled, dtype=np.int32),
        "accepted": np.array(recorder.accepted),
    }
