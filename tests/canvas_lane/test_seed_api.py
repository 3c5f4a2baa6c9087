"""Load once, generate often: the one-caller interface, and results that read like dicts."""

from __future__ import annotations

import inspect
import json
from dataclasses import fields
from pathlib import Path

import pytest

from polytoken.api import generate, load_model
from polytoken.errors import RequestError, UsageError
from polytoken.events import GenerationResult
from polytoken.testkit.modilify import modilify_config, write_modilify

RESULT_FIELDS = {
    *("event", "request_id", "status", "checkpoint", "step", "thinking", "stop_reason", "prompt_tokens"),
    *("generated_tokens", "token_ids", "text", "denoise_steps", "jump_count", "state_shift_count"),
    *("tokens_per_forward", "queue_seconds", "prefill_seconds", "ttfd_seconds", "denoise_steps_per_second"),
    *("ttft_seconds", "elapsed_seconds", "prefix_cache_hits", "prefix_cache_reused_tokens"),
    *("mlx_active_memory_bytes", "mlx_peak_memory_bytes"),
}


def test_the_signatures_are_the_seed_s() -> None:
    load, ask = inspect.signature(load_model).parameters, inspect.signature(generate).parameters
    assert list(load) == ["model", "canvas_length"] and load["canvas_length"].default is None
    defaults = {name: item.default for name, item in ask.items() if item.default is not inspect.Parameter.empty}
    assert defaults == {
        "prompt": None,
        "messages": None,
        "max_new_tokens": 256,
        "max_denoising_steps": None,
        "seed": 42,
        "think": True,
    }


def test_a_result_reads_like_its_record() -> None:
    made = {item.name: "x" for item in fields(GenerationResult) if item.default is item.default_factory}
    made |= {"token_ids": (1, 2), "ttft_seconds": None, "text": "hi", "extra": {"denoise_steps": 3}}
    result = GenerationResult(**made)
    assert result["text"] == result.text == "hi" and result["denoise_steps"] == 3 and result["token_ids"] == [1, 2]
    assert result["ttft_seconds"] is None and result.get("nothing") is None and "jump_count" not in result
    assert dict(result) == result.to_dict() and len(result) == len(result.to_dict())
    assert json.loads(json.dumps(dict(result))) == json.loads(result.to_json())
    with pytest.raises(KeyError):
        result["nothing"]


def test_load_once_generate_often(tmp_path: Path) -> None:
    two = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
    config = {"text_config": {**modilify_config("b")["text_config"], **two}, "latent_num_layers": 1}
    export = write_modilify(tmp_path, shape="b", config=config).path
    with load_model(export, canvas_length=6) as runtime:
        assert runtime.loaded.to_dict()["canvas_length"] == 6
        result = generate(runtime, "hello", max_new_tokens=7)
        assert result.keys() >= RESULT_FIELDS
        assert result["status"] == "finished" and result["checkpoint"] == str(export) and result["step"] == 1234
        assert result["generated_tokens"] == len(result["token_ids"]) <= 7
        again = generate(runtime, messages=[{"role": "user", "content": "hello"}], max_new_tokens=7, seed=42)
        assert again["token_ids"] == result["token_ids"] and again["text"] == result.text
        assert generate(runtime, "hello", max_new_tokens=7, seed=-1)["token_ids"] != result["token_ids"]
        short = generate(runtime, "hello", max_denoising_steps=1)
        assert short["denoise_steps"] == 1
        for wrong in ({}, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}):
            with pytest.raises(RequestError) as caught:
                generate(runtime, **wrong)
            assert caught.value.code == "prompt_xor_messages"


def test_a_bad_length_is_one_line(tmp_path: Path) -> None:
    export = write_modilify(tmp_path, shape="b").path
    for length in (0, 100_000):
        with pytest.raises(UsageError, match="--canvas-length"):
            load_model(export, canvas_length=length)
