"""What is accepted as a canvas checkpoint, in which spellings, and what is refused with which code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from canvas_networks import encoded, head_of, largest, logits_of, random_canvas, same

from polytoken.checkpoint import load_runtime
from polytoken.errors import CheckpointError
from polytoken.models import family_for
from polytoken.models.canvas import CanvasModel
from polytoken.testkit.layouts import Layout
from polytoken.testkit.modilify import modilify_config, write_modilify
from polytoken.testkit.tiny import write_checkpoint

SCALAR = "model.encoder.language_model.layers.3.layer_scalar"
Weights = dict[str, mx.array]


def logits(model: CanvasModel) -> mx.array:
    output = model.denoise(random_canvas(model), encoded(model, 17), latent=model.make_latent(), head=head_of(0))
    return logits_of(model, output)


def rewrite(directory: Path, change: Callable[[Weights], None]) -> None:
    """Change the tensors of a checkpoint in place; a manifest would then no longer fit and goes."""
    path = directory / "model.safetensors"
    weights = dict(mx.load(str(path)))
    mx.eval(weights)
    change(weights)
    mx.save_safetensors(str(path), weights, metadata={"format": "pt"})
    (directory / "export_manifest.json").unlink(missing_ok=True)


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_runtime(directory)
    assert "\n" not in str(caught.value)
    return caught.value


def drop(name: str) -> Callable[[Weights], None]:
    def change(weights: Weights) -> None:
        del weights[name]

    return change


def put(name: str, array: mx.array) -> Callable[[Weights], None]:
    return lambda weights: weights.update({name: array})


def test_spellings_of_one_checkpoint_give_the_same_bits(tmp_path: Path) -> None:
    layouts = {
        "release": Layout(),
        "per_layer": Layout(geometry="per_layer"),
        "converted": Layout(experts="fused_weight"),
        "both": Layout(experts="fused_weight", geometry="per_layer"),
    }
    results = {}
    for name, layout in layouts.items():
        write_checkpoint(tmp_path / name, "diffusion_gemma", seed=5, layout=layout, shards=2)
        results[name] = logits(load_runtime(tmp_path / name).model)
    assert all(same(result, results["release"]) for result in results.values())


@pytest.mark.parametrize("head", ["repeated", "other"])
def test_tied_copies_and_images_are_left_out(tmp_path: Path, head: str) -> None:
    write_checkpoint(tmp_path, "diffusion_gemma", seed=5)
    before = logits(load_runtime(tmp_path).model)

    def add(weights: Weights) -> None:
        embedding = weights["model.decoder.embed_tokens.weight"]
        weights["model.encoder.language_model.embed_tokens.weight"] = embedding + 0
        weights["model.encoder.language_model.layers.0.mlp.up_proj.weight"] = mx.zeros((3, 3))
        weights["model.decoder.layers.0.self_attn.rotary_emb.inv_freq"] = mx.zeros((8,))
        weights["lm_head.weight"] = embedding + (0 if head == "repeated" else 1)

    rewrite(tmp_path, add)
    if head == "repeated":
        assert same(logits(load_runtime(tmp_path).model), before)
    else:
        assert refusal(tmp_path).code == "tied_head_differs"


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (drop(SCALAR), "missing_tensors", SCALAR),
        (drop("model.decoder.layers.1.router.per_expert_scale"), "missing_tensors", "router.per_expert_scale"),
        (drop("model.decoder.self_conditioning.pre_norm.weight"), "missing_tensors", "self_conditioning"),
        (put("model.decoder.layers.2.self_attn.v_proj.weight", mx.zeros((32, 64))), "leftover_tensors", "v_proj"),
        (put("model.decoder.layers.0.extra.weight", mx.zeros((2,))), "leftover_tensors", "layers.0.extra"),
        (put(SCALAR, mx.ones((2,))), "shape_mismatch", SCALAR),
        (put("model.decoder.layers.0.experts.down_proj", mx.zeros((8, 64, 31))), "shape_mismatch", "down_proj"),
    ],
)
def test_base_tensors_are_taken_strictly(
    tmp_path: Path, change: Callable[[Weights], None], code: str, names: str
) -> None:
    write_checkpoint(tmp_path, "diffusion_gemma")
    rewrite(tmp_path, change)
    fault = refusal(tmp_path)
    assert fault.code == code and names in str(fault)


LATENT = "latent_deliberation."


@pytest.mark.parametrize(
    ("change", "code", "names"),
    [
        (drop(f"{LATENT}blocks.1.local_attention.in_proj_bias"), "missing_tensors", "local_attention"),
        (drop(f"{LATENT}commit.writer.a_log"), "missing_tensors", "a_log"),
        (put(f"{LATENT}heavy_projection.weight", mx.zeros((32, 64))), "leftover_tensors", "heavy_projection"),
        (put(f"{LATENT}observe.pool.score", mx.zeros((31,))), "shape_mismatch", "observe.pool.score"),
        (put(f"{LATENT}working_memory_bus.readers.2.gate", mx.zeros((1,))), "leftover_tensors", "readers.2.gate"),
    ],
)
def test_latent_tensors_are_taken_strictly(
    tmp_path: Path, change: Callable[[Weights], None], code: str, names: str
) -> None:
    write_modilify(tmp_path)
    rewrite(tmp_path, change)
    fault = refusal(tmp_path)
    assert fault.code == code and names in str(fault)


def test_split_attention_inputs_equal_packed_ones(tmp_path: Path) -> None:
    write_modilify(tmp_path, seed=8)
    before = logits(load_runtime(tmp_path).model)

    def split(weights: Weights) -> None:
        for name in [name for name in weights if ".in_proj_" in name]:
            stem, _, leaf = name.partition("in_proj_")
            for part, third in zip(("query", "key", "value"), mx.split(weights.pop(name), 3), strict=True):
                weights[f"{stem}{part}.{leaf}"] = third

    rewrite(tmp_path, split)
    assert same(logits(load_runtime(tmp_path).model), before)


def test_export_says_its_step_and_is_held_to_its_manifest(tmp_path: Path) -> None:
    write_modilify(tmp_path)
    runtime = load_runtime(tmp_path)
    assert runtime.step == 1234 and runtime.model.conditioning == "latent"
    path = tmp_path / "export_manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "schema": 24}))
    assert refusal(tmp_path).code == "bad_manifest"
    manifest["files"]["model.safetensors"]["bytes"] += 1
    path.write_text(json.dumps(manifest))
    assert refusal(tmp_path).code == "damaged_file"


TEXT, TOP = "text_config", ""


def changed(config: dict[str, Any], level: str, key: str, value: Any) -> dict[str, Any]:
    config = json.loads(json.dumps(config))
    place = config[level] if level else config
    if value is None:
        place.pop(key)
    else:
        place[key] = value
    return config


@pytest.mark.parametrize(
    ("level", "key", "value", "code"),
    [
        (TOP, "canvas_length", None, "bad_config"),
        (TOP, "canvas_length", 0, "bad_config"),
        (TOP, "canvas_length", True, "bad_config"),
        (TOP, "canvas_length", 513, "bad_config"),
        (TOP, "latent_dim", None, "bad_config"),
        (TOP, "latent_dim", 30, "bad_config"),
        (TOP, "latent_memory_slots", 0, "bad_config"),
        (TOP, "latent_num_layers", -1, "bad_config"),
        (TOP, "latent_local_attention_window", 0, "bad_config"),
        (TOP, "latent_bus_readers", 3, "bad_config"),
        (TOP, "commit_failure_budget", None, "bad_config"),
        (TOP, "commit_failure_budget", 0.0, "bad_config"),
        (TOP, "commit_failure_budget", float("inf"), "bad_config"),
        (TOP, "commit_confidence_power", 0, "bad_config"),
        (TOP, "commit_entropy_weight", -0.1, "bad_config"),
        (TOP, "commit_entropy_weight", "1", "bad_config"),
        (TOP, "commit_target_confidence", 1.0, "bad_config"),
        (TOP, "commit_min_p", 0.0, "bad_config"),
        (TOP, "commit_top_k", 0, "bad_config"),
        (TOP, "denoise_temperature", 0.0, "bad_config"),
        (TOP, "eos_token_id", None, "bad_config"),
        (TOP, "eos_token_id", [1, 512], "bad_config"),
        (TOP, "turn_end_token_id", None, "bad_config"),
        (TOP, "state_schema_version", 24, "unknown_schema"),
        (TOP, "state_schema_version", None, "unknown_schema"),
        (TOP, "text_config", None, "bad_config"),
        (TEXT, "final_logit_softcapping", None, "bad_config"),
        (TEXT, "vocab_size", None, "bad_config"),
        (TEXT, "max_position_embeddings", None, "bad_config"),
        (TEXT, "num_hidden_layers", 5, "bad_config"),
        (TEXT, "layer_types", ["full_attention"] * 5 + ["sliding_attention"], "bad_config"),
        (TEXT, "layer_types", ["other"] * 6, "bad_config"),
        (TEXT, "top_k_experts", 9, "bad_config"),
        (TEXT, "num_key_value_heads", 3, "bad_config"),
        (TEXT, "per_layer_config", {"6": {"head_dim": 32}}, "bad_config"),
        (TEXT, "per_layer_config", {"2": {"sliding_window": 4}}, "unsupported_config"),
        (TEXT, "use_bidirectional_attention", "all", "unsupported_config"),
        (TEXT, "tie_word_embeddings", False, "unsupported_config"),
        (TOP, "tie_word_embeddings", False, "unsupported_config"),
        (TEXT, "hidden_activation", "silu", "unsupported_config"),
        (TEXT, "attention_bias", True, "unsupported_config"),
        (TEXT, "num_kv_shared_layers", 2, "unsupported_config"),
        (TEXT, "rope_parameters", {"full_attention": {"rope_theta": 1e6}}, "bad_config"),
        (
            TEXT,
            "rope_parameters",
            {"full_attention": {"rope_theta": 1e6, "rope_type": "yarn"}, "sliding_attention": {"rope_theta": 1e4}},
            "unsupported_config",
        ),
    ],
)
def test_config_is_checked_before_anything_is_read(level: str, key: str, value: Any, code: str) -> None:
    config = changed(modilify_config(), level, key, value)
    with pytest.raises(CheckpointError) as caught:
        family_for(config).text_config(config)
    assert caught.value.code == code
    assert key in str(caught.value)


def test_target_needs_a_budget_of_at_most_one() -> None:
    config = {**modilify_config(), "commit_failure_budget": 1.5}
    family_for(config).text_config(config)
    with pytest.raises(CheckpointError, match="target"):
        family_for(config).text_config({**config, "commit_target_confidence": 0.9})


def test_absent_bounds_differ_from_null_ones(tmp_path: Path) -> None:
    absent = load_runtime(write_modilify(tmp_path / "absent").path).model.commit
    assert (absent.sample_top_k, absent.sample_min_p) == (40, 0.05)
    assert (absent.failure_top_k, absent.failure_min_p) == (None, None)
    nulls = {"commit_top_k": None, "commit_min_p": None}
    null = load_runtime(write_modilify(tmp_path / "null", config=nulls).path).model.commit
    assert (null.sample_top_k, null.sample_min_p) == (None, None)
    given = {"commit_top_k": 7, "commit_min_p": 0.1, "commit_target_confidence": 0.8}
    set_ = load_runtime(write_modilify(tmp_path / "set", config=given).path).model.commit
    assert (set_.sample_top_k, set_.failure_top_k, set_.failure_min_p, set_.target_confidence) == (7, 7, 0.1, 0.8)


@pytest.mark.parametrize("family", ["diffusion_gemma", "modilify_mk2"])
def test_packed_weights_stay_packed_or_are_widened(tmp_path: Path, family: str) -> None:
    if family == "diffusion_gemma":
        write_checkpoint(tmp_path, "diffusion_gemma", bits=8, layout=Layout(experts="fused_weight"), seed=6)
    else:
        write_modilify(tmp_path, bits=8, seed=6)
    packed = load_runtime(tmp_path, dequantise=False)
    wide = load_runtime(tmp_path, dequantise=True)
    assert packed.quantisation is not None and wide.quantisation is None
    assert packed.weight_bytes < 0.6 * wide.weight_bytes
    ours, theirs = packed.model, wide.model
    assert largest(logits(ours), logits(theirs)) < 5e-3
    flat = mx.random.normal((3, ours.hidden_size), key=mx.random.key(0))
    assert largest(ours.project(flat, 100, 170), theirs.project(flat, 100, 170)) < 1e-3
    ids = mx.array([[3, 99, 200]])
    assert largest(ours.embed(ids), theirs.embed(ids)) < 1e-5
    heavy = flat[None]
    soft = [model.soft_embedding(heavy, temperature=0.8, chunk=70) for model in (ours, theirs)]
    assert largest(*soft) < 1e-3


def test_half_precision_keeps_state_and_logits_in_fp32(tmp_path: Path) -> None:
    write_modilify(tmp_path, seed=6)
    model = load_runtime(tmp_path, dtype="bfloat16").model
    output = model.denoise(random_canvas(model), encoded(model, 9), latent=model.make_latent(), head=head_of(0))
    assert output.heavy_hidden.dtype == output.working_state.dtype == mx.bfloat16
    assert output.next_latent_state.token_latents.dtype == mx.float32
    assert logits_of(model, output).dtype == mx.float32
    after = model.observe(
        output.next_latent_state, output, valid=mx.ones((1, model.canvas_length), mx.bool_), head=head_of(0)
    )
    assert after.gdn2.working.dtype == after.token_latents.dtype == mx.float32
    wide = logits(load_runtime(tmp_path, dtype="float32").model)
    # A random network's routing flips now and then; what is left must still be the same network.
    assert np.corrcoef(np.array(logits(model)).ravel(), np.array(wide).ravel())[0, 1] > 0.9
