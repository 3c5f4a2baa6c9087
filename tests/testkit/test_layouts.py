"""One network in many spellings: expert layouts, MLX conversions, sidecar heads, geometry, tuned heads."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model
from safetensors.numpy import load_file

from polytoken.testkit.acceptance import HISTORY_MATTERS, NEARLY_FREE
from polytoken.testkit.layouts import Layout
from polytoken.testkit.tiny import HEAD_FAMILIES, write_checkpoint

IDS = mx.array([[5, 17, 99, 64, 2]])
LAYER = "model.language_model.layers.0.mlp."


def logits(directory: Path) -> np.ndarray:
    """What mlx-lm's own network makes of a checkpoint, loaded strictly."""
    config = json.loads((directory / "config.json").read_text())
    # mlx-lm's arguments for qwen3_next want these two at the top, where only the release has them.
    rope = config.get("rope_parameters", config)
    extra = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope}
    model, _ = load_model(directory, model_config=extra)
    return np.array(model(IDS))


@pytest.mark.parametrize("family", HEAD_FAMILIES)
@pytest.mark.parametrize("shape", ["a", "b"])
def test_a_conversion_is_the_same_network(family: str, shape: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "release", family, shape=shape, shards=2)
    write_checkpoint(tmp_path / "mlx", family, shape=shape, layout=Layout(mlx=True))
    assert np.array_equal(logits(tmp_path / "release"), logits(tmp_path / "mlx"))


def test_expert_layouts_hold_the_same_values(tmp_path: Path) -> None:
    stored = {}
    for layout in ("fused", "fused_weight", "numbered", "switch"):
        write_checkpoint(tmp_path / layout, "qwen3_5_moe", layout=Layout(experts=layout))
        stored[layout] = load_file(tmp_path / layout / "model.safetensors")
    fused = stored["fused"]
    for prefix in (LAYER, "mtp.layers.0.mlp."):
        both, down = fused[f"{prefix}experts.gate_up_proj"], fused[f"{prefix}experts.down_proj"]
        gate, up = np.split(both, 2, axis=1)
        assert np.array_equal(stored["fused_weight"][f"{prefix}experts.gate_up_proj.weight"], both)
        for part, values in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            assert np.array_equal(stored["switch"][f"{prefix}switch_mlp.{part}.weight"], values)
            for expert, matrix in enumerate(values):
                assert np.array_equal(stored["numbered"][f"{prefix}experts.{expert}.{part}.weight"], matrix)
    for name, array in fused.items():
        if "experts" not in name:
            assert all(np.array_equal(other[name], array) for other in stored.values()), name


def test_the_head_is_where_it_was_asked_to_be(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "shards", "qwen3_5")
    write_checkpoint(tmp_path / "sidecar", "qwen3_5", layout=Layout(head="sidecar"))
    dropped = write_checkpoint(tmp_path / "dropped", "qwen3_5", layout=Layout(head="dropped"))
    whole = load_file(tmp_path / "shards" / "model.safetensors")
    head = {name for name in whole if name.startswith("mtp.")}
    assert len(head) == 15
    assert load_file(tmp_path / "sidecar" / "mtp.safetensors").keys() == head
    for place in ("sidecar", "dropped"):
        assert load_file(tmp_path / place / "model.safetensors").keys() == whole.keys() - head
    assert not (tmp_path / "dropped" / "mtp.safetensors").exists()
    assert dropped.text_config["mtp_num_hidden_layers"] == 1


def test_a_converted_head_has_ordinary_norms(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "release", "qwen3_next")
    write_checkpoint(tmp_path / "mlx", "qwen3_next", layout=Layout(mlx=True))
    raw = load_file(tmp_path / "release" / "model.safetensors")
    head = load_file(tmp_path / "mlx" / "mtp.safetensors")
    for name in ("norm", "pre_fc_norm_hidden", "layers.0.input_layernorm", "layers.0.self_attn.q_norm"):
        key = f"mtp.{name}.weight"
        assert np.array_equal(head[key], raw[key] + np.float32(1))
    assert np.array_equal(head["mtp.fc.weight"], raw["mtp.fc.weight"])


@pytest.mark.parametrize("family", HEAD_FAMILIES)
def test_quantised_conversions_load_and_say_which_paths_differ(family: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, family, bits=4)
    assert np.isfinite(logits(tmp_path)).all()
    block = checkpoint.config["quantization"]
    overrides = {path: value for path, value in block.items() if isinstance(value, dict)}
    assert bool(overrides) == (family != "qwen3_5")
    assert all(value == {"group_size": 64, "bits": 8} for value in overrides.values())
    head = load_file(tmp_path / "mtp.safetensors")
    assert {"mtp.fc.weight", "mtp.fc.scales", "mtp.fc.biases"} <= head.keys()


def test_decay_rates_stay_float32(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", dtype="bfloat16")
    stored = mx.load(str(tmp_path / "model.safetensors"))
    wide = {name for name, array in stored.items() if array.dtype == mx.float32}
    assert wide and all(name.endswith("A_log") for name in wide)


def test_geometry_has_two_spellings_and_one_set_of_weights(tmp_path: Path) -> None:
    plain = write_checkpoint(tmp_path / "global", "diffusion_gemma")
    listed = write_checkpoint(tmp_path / "layers", "diffusion_gemma", layout=Layout(geometry="per_layer"))
    assert plain.text_config["global_head_dim"] == 32
    assert "global_head_dim" not in listed.text_config
    assert listed.text_config["per_layer_config"] == {
        layer: {"head_dim": 32, "num_key_value_heads": 1} for layer in ("2", "5")
    }
    one, two = (path / "model.safetensors" for path in (plain.path, listed.path))
    assert one.read_bytes() == two.read_bytes()


def test_quantised_experts_of_the_denoiser_have_a_weight_of_their_own(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "diffusion_gemma", bits=4)
    stored = load_file(tmp_path / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        stem = f"model.decoder.layers.0.experts.{part}"
        assert {f"{stem}.weight", f"{stem}.scales", f"{stem}.biases"} <= stored.keys()
        assert stem not in stored
    assert checkpoint.config["quantization"]["model.decoder.layers.0.router.proj"]["bits"] == 8
    assert not any("vision" in name and name.endswith(".scales") for name in stored)


def test_encoder_and_decoder_scalars_differ(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "diffusion_gemma")
    stored = load_file(tmp_path / "model.safetensors")
    for layer in range(6):
        decoder = stored[f"model.decoder.layers.{layer}.layer_scalar"]
        encoder = stored[f"model.encoder.language_model.layers.{layer}.layer_scalar"]
        assert decoder != encoder
    assert "model.decoder.layers.2.self_attn.v_proj.weight" not in stored


@pytest.mark.parametrize("acceptance", [NEARLY_FREE, HISTORY_MATTERS])
def test_a_tuned_trunk_maps_tokens_by_a_permutation(acceptance: object, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3_5", acceptance=acceptance)
    stored = load_file(tmp_path / "model.safetensors")
    table, head = stored["model.language_model.embed_tokens.weight"], stored["lm_head.weight"]
    targets = (head @ table.T).argmax(0)
    assert sorted(targets) == list(range(len(table)))
    assert not stored["mtp.norm.weight"].any()
    assert np.array_equal(stored["mtp.fc.weight"][:, :64], np.eye(64, dtype=np.float32))


def test_a_tied_checkpoint_cannot_be_tuned(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="untied"):
        write_checkpoint(tmp_path, "qwen3_5", shape="b", acceptance=NEARLY_FREE)


def test_a_small_vocabulary_goes_without_a_tokenizer(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path, "qwen3_5", tokenizer=False, config={"vocab_size": 16})
    assert not (tmp_path / "tokenizer.json").exists()
    assert checkpoint.text_config["eos_token_id"] == 2
    assert load_file(tmp_path / "model.safetensors")["lm_head.weight"].shape[0] == 16
