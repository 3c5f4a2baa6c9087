"""Load once, generate often: the Python interface of a script that runs one model for one caller.

import polytoken

runtime = polytoken.load_model("path/to/model")
result = polytoken.generate(runtime, "Why is the sky blue?", seed=7)
print(result["text"], result["tokens_per_forward"])

A runtime is an engine that serves one request at a time, keeps no prompts and sends no token events. Several threads
may share it: it has a thread of its own, and they wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polytoken.api import load, make_request
from polytoken.engine import Engine
from polytoken.events import GenerationResult
from polytoken.lanes.canvas.settings import CanvasSettings


def load_model(model: str | Path, *, canvas_length: int | None = None) -> Engine:
    """A runtime for a folder, hub id or catalogue name; close it, or use it in a `with`.

    Args:
        model: what to load.
        canvas_length: ids denoised together, for a canvas model; None for what the checkpoint says.

    Raises:
        PolytokenError: what is wrong with the checkpoint or the length.
    """
    canvas = CanvasSettings(
        canvas_length=canvas_length,
        pipeline_depth=1,
        repetition_penalty=1.0,
        max_batch_tokens=max(CanvasSettings.max_batch_tokens, canvas_length or 0),
    )
    return load(model, canvas=canvas, batch_size=1, prefix_cache_mib=0, token_events=False)


def generate(
    runtime: Engine,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    max_new_tokens: int | None = 256,
    max_denoising_steps: int | None = None,
    seed: int | None = 42,
    think: bool = True,
    **request: Any,
) -> GenerationResult:
    """The whole answer to one request, from exactly one of `prompt` and `messages`; the result reads like a dict.

    Args:
        runtime: an engine, from `load_model` or `load`.
        prompt: one user turn.
        messages: chat turns with `role` and `content`.
        max_new_tokens: cap on new tokens; None for up to 8192, as far as the context has room.
        max_denoising_steps: cap on denoises, of the answer under the rolling policy and of each canvas under the block
            policy; None for what the checkpoint says.
        seed: of every draw; None derives one from the request id.
        think: whether the template is asked for a reasoning block.
        request: further keywords of `polytoken.make_request`.

    Raises:
        PolytokenError: what is wrong with the request, or what went wrong while it ran.
    """
    made = make_request(
        runtime, prompt, messages=messages, max_new_tokens=max_new_tokens, seed=seed, think=think, **request
    )
    return runtime.generate(replace(made, max_denoising_steps=max_denoising_steps))
