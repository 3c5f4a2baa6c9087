"""What hybrid checkpoints come as: expert layouts, conversions, packed weights, heads in places, norms off by one."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hybrid_models import FAMILIES, bits, load_model, run, some_ids

from polytoken.checkpoint import load_runtime
from polytoken.checkpoint.files import read_table
from polytoken.checkpoint.inspect import inspect
from polytoken.errors import CheckpointError
from polytoken.models.draft import DraftingModel, DraftSettings
from polytoken.testkit.layouts import Layout
from polytoken.testkit.tiny import write_checkpoint

EXPERTS = ("fused", "fused_weight", "numbered", "switch")
IDS = some_ids(9)


def write(directory: Path, family, **options) -> Path:
    return write_checkpoint(directory, family, seed=5, **options).path


def outputs(model: DraftingModel) -> tuple[bytes, bytes]:
    """Bits of the trunk's logits, and of the head's over the trunk's rows."""
    hidden = run(model, model.make_cache(), IDS)
    head = model.draft_head
    assert head is not None, model.draft_head_note
    drafted, _ = head.draft(head.take(hidden)[:, :-1], mx.array([IDS[1:]]), head.make_cache())
    return bits(model.project(hidden.post)), bits(drafted)


def edit_config(path: Path, **changes) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def rewrite(file: Path, change, *, metadata: dict[str, str] | None = None) -> None:
    """The file's tensors through `change` (a dict to a dict); numbers and names only, so that nothing else moves."""
    arrays, before = mx.load(str(file), return_metadata=True)
    arrays = change({name: mx.array(np.array(array)) for name, array in arrays.items()})
    file.unlink()
    mx.save_safetensors(str(file), arrays, metadata=before if metadata is None else metadata)


def shift(amount: float, *, part: str):
    """Add to every zero-centred norm of the trunk or of the head."""

    def change(arrays):
        def wanted(name: str) -> bool:
            inner = name.endswith("norm.weight") and ".linear_attn." not in name
            return inner and name.startswith("mtp.") == (part == "head") and "visual" not in name

        def zero_centred(name: str) -> bool:
            return wanted(name) or (part == "head" and name.startswith("mtp.pre_fc_norm"))

        return {name: array + amount if zero_centred(name) else array for name, array in arrays.items()}

    return change


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_four_expert_layouts_are_one_network(family, tmp_path: Path) -> None:
    seen = set()
    for layout in EXPERTS:
        model = load_model(write(tmp_path / layout, family, layout=Layout(experts=layout), tokenizer=True))
        seen.add(outputs(model))
    assert len(seen) == 1


@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_a_missing_expert_is_named(family, tmp_path: Path) -> None:
    path = write(tmp_path, family, layout=Layout(experts="numbered"))
    rewrite(
        path / "model.safetensors",
        lambda arrays: {n: a for n, a in arrays.items() if not n.endswith("mtp.layers.0.mlp.experts.3.up_proj.weight")},
    )
    with pytest.raises(CheckpointError, match="expert 3 is missing"):
        load_runtime(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_conversions_and_heads_in_files_of_their_own_are_the_same_network(family, tmp_path: Path) -> None:
    release = load_model(write(tmp_path / "release", family))
    reference = outputs(release)
    assert "weight files" in release.draft_head_note
    for name, layout in {
        "raw head aside": Layout(head="sidecar"),
        "converted, head aside": Layout(mlx=True),
        "converted, head inside": Layout(mlx=True, head="shards"),
    }.items():
        model = load_model(write(tmp_path / name, family, layout=layout))
        pairs = zip(outputs(model), reference, strict=True)
        close = [np.frombuffer(a, "<f4") - np.frombuffer(b, "<f4") for a, b in pairs]
        assert max(float(np.abs(part).max()) for part in close) < 2e-5, name  # w + 1 was rounded when it was stored
        assert ("mtp.safetensors" in model.draft_head_note) == (layout.head != "shards")
    aside = tmp_path / "raw head aside"
    assert outputs(load_model(aside)) == reference
    # A raw head beside a converted trunk, whatever its header says; and without the prefix in its names.
    mixed = write(tmp_path / "mixed", family, layout=Layout(mlx=True, head="dropped"))
    converted = outputs(load_model(tmp_path / "converted, head aside"))
    for metadata in ({"format": "pt"}, {"format": "mlx"}, {}):
        (mixed / "mtp.safetensors").write_bytes((aside / "mtp.safetensors").read_bytes())
        rewrite(mixed / "mtp.safetensors", lambda arrays: arrays, metadata=metadata)
        assert outputs(load_model(mixed)) == converted
    rewrite(mixed / "mtp.safetensors", lambda arrays: {n.removeprefix("mtp."): a for n, a in arrays.items()})
    assert outputs(load_model(mixed)) == converted and inspect(mixed).draft_head_usable


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("part", ["trunk", "head"])
@pytest.mark.parametrize("converted", [False, True])
def test_norms_off_by_one_are_refused(family, part: str, converted: bool, tmp_path: Path) -> None:
    layout = Layout(mlx=converted, head="shards")
    for amount, what in ((1.0, "twice"), (-1.0, "never")):
        path = write(tmp_path / what, family, layout=layout)
        rewrite(path / "model.safetensors", shift(amount, part=part))
        words = "draft head" if part == "head" else "trunk"
        with pytest.raises(CheckpointError, match=f"{words} looks as if one was .*{what}") as caught:
            load_runtime(path)
        assert caught.value.code == "norm_convention"


def test_a_doubled_head_in_its_own_file_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5", layout=Layout(mlx=True))
    rewrite(path / "mtp.safetensors", shift(1.0, part="head"))
    with pytest.raises(CheckpointError, match="draft head looks as if one was added to its norms twice"):
        load_runtime(path)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_head_is_said(family, tmp_path: Path) -> None:
    path = write(tmp_path, family, shape="b", layout=Layout(head="dropped"))
    model = load_model(path)
    assert model.draft_head is None
    assert "declares a draft head" in model.draft_head_note and "mtp.safetensors" in model.draft_head_note
    report = inspect(path)
    assert report.supported and report.mtp == "declared but absent"
    assert report.draft_head == model.draft_head_note
    assert report.draft_head_usable is False and report.draft_head_reads is None


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_a_forward_leave_out_the_head_and_experts_not_chosen(family, tmp_path: Path) -> None:
    with_head, without = load_model(write(tmp_path / "a", family)), tmp_path / "b"
    assert load_model(write(without, family, layout=Layout(head="dropped"))).draft_head is None
    reads = with_head.weight_bytes_per_forward
    assert reads == load_model(without).weight_bytes_per_forward
    table = read_table(without)
    text = {n: t for n, t in table.tensors.items() if "visual" not in n}
    embedding = next(t for n, t in text.items() if n.endswith("embed_tokens.weight"))
    experts = sum(t.nbytes for n, t in text.items() if ".experts." in n)
    chosen = experts * 2 // 8
    assert reads == sum(t.nbytes for t in text.values()) - embedding.nbytes + 64 * 4 - experts + chosen
    assert inspect(without).kv_bytes_per_token == {"float32": 2 * 2 * 32 * 4, "float16": 2 * 2 * 32 * 2}


def test_no_head_and_none_declared(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_next", layout=Layout(head="dropped"))
    model = load_model(path)
    assert model.draft_head is None and model.draft_head_note == "the checkpoint has no draft head"
    assert inspect(path).draft_head_usable is False


@pytest.mark.parametrize("family", FAMILIES)
def test_inspect_says_what_the_head_wants(family, tmp_path: Path) -> None:
    for name, layout in {"in": Layout(), "aside": Layout(mlx=True)}.items():
        path = write(tmp_path / name, family, layout=layout)
        report = inspect(path)
        assert report.supported and report.draft_head_usable and report.draft_head_reads == "post"
        assert report.draft_head == load_model(path).draft_head_note
    edit_config(path, mtp_contract={"base_hidden_variant": "pre_norm"})
    assert inspect(path).draft_head_reads == "pre"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_has_every_parameter_and_none_extra(family, tmp_path: Path) -> None:
    path = write(tmp_path, family)
    file = path / "model.safetensors"
    rewrite(file, lambda arrays: {n: a for n, a in arrays.items() if n != "mtp.fc.weight"})
    assert inspect(path).draft_head == "the draft head cannot be used: mtp.fc.weight is missing"
    with pytest.raises(CheckpointError, match=r"missing: mtp\.fc\.weight") as caught:
        load_runtime(path)
    assert caught.value.code == "missing_tensors"
    rewrite(file, lambda arrays: {**arrays, "mtp.fc.weight": mx.ones((64, 128)), "mtp.gate.weight": mx.ones((2, 2))})
    assert "mtp.gate.weight has no place" in inspect(path).draft_head
    with pytest.raises(CheckpointError, match=r"no place in this network: mtp\.gate\.weight"):
        load_runtime(path)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("bits_stored", [4, 8])
def test_quantised_checkpoints_run_packed_and_unpacked_alike(family, bits_stored: int, tmp_path: Path) -> None:
    path = write(tmp_path, family, bits=bits_stored)
    packed, plain = load_model(path, dequantise=False), load_model(path, dequantise=True)
    for a, b in zip(outputs(packed), outputs(plain), strict=True):
        assert np.abs(np.frombuffer(a, "<f4") - np.frombuffer(b, "<f4")).max() < 2e-4
    assert packed.weight_bytes_per_forward < 0.6 * plain.weight_bytes_per_forward
    head = packed.draft_head
    assert head is not None and head.weight_bytes_per_draft < 0.6 * plain.draft_head.weight_bytes_per_draft


def test_a_head_packed_otherwise_than_the_trunk_is_read_by_its_shapes(tmp_path: Path) -> None:
    """Trunk plain or in four bits, head in eight: no block of the config says so."""
    eight = write(tmp_path / "eight", "qwen3_5", bits=8)
    reference = outputs(load_model(eight, dequantise=False))[1]
    four = write(tmp_path / "four", "qwen3_5", bits=4)
    (four / "mtp.safetensors").write_bytes((eight / "mtp.safetensors").read_bytes())
    plain = write(tmp_path / "plain", "qwen3_5", layout=Layout(mlx=True))
    (plain / "mtp.safetensors").write_bytes((eight / "mtp.safetensors").read_bytes())
    rows = mx.random.normal((1, 5, 64), key=mx.random.key(1))
    drafts = []
    for path in (eight, four, plain):
        head = load_model(path, dequantise=False).draft_head
        assert head is not None
        _, hidden = head.draft(rows, mx.zeros((1, 5), mx.int32), head.make_cache())
        drafts.append(hidden)
    assert reference and all(np.isfinite(np.array(hidden)).all() for hidden in drafts)
    fc = [load_model(path, dequantise=False).draft_head._network.fc for path in (eight, four, plain)]
    assert {layer.bits for layer in fc} == {8}
    assert all(mx.array_equal(layer.weight, fc[0].weight).item() for layer in fc)


def test_a_head_packed_in_no_known_way_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5", bits=4)
    rewrite(
        path / "mtp.safetensors",
        lambda arrays: {n: a[:, :1] if n == "mtp.fc.scales" else a for n, a in arrays.items()},
    )
    with pytest.raises(CheckpointError, match=r"mtp\.fc.* fit no packing") as caught:
        load_runtime(path)
    assert caught.value.code == "quantization_mismatch"


def test_heads_that_cannot_be_driven_are_left_out_and_said(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5", config={"mtp_use_dedicated_embeddings": True})
    assert "embeddings of its own" in load_model(path).draft_head_note
    path = write(tmp_path / "two", "qwen3_5", config={"mtp_num_hidden_layers": 2})
    model = load_model(path)
    assert model.draft_head is None and "2 layers" in model.draft_head_note
    assert inspect(path).draft_head == model.draft_head_note


def test_two_heads_are_one_too_many(tmp_path: Path) -> None:
    path = write(tmp_path / "in", "qwen3_5")
    aside = write(tmp_path / "aside", "qwen3_5", layout=Layout(head="sidecar"))
    (path / "mtp.safetensors").write_bytes((aside / "mtp.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="keep one"):
        load_runtime(path)


def test_a_stray_head_file_means_nothing_to_other_families(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "llama", "llama").path
    aside = write(tmp_path / "aside", "qwen3_5", layout=Layout(head="sidecar"))
    (path / "mtp.safetensors").write_bytes((aside / "mtp.safetensors").read_bytes())
    assert load_runtime(path).tensor_count == 29


def test_half_width_norms_keep_every_bit_of_w(tmp_path: Path) -> None:
    """bfloat16 holds a small w far more finely than 1 + w; widened first, nothing of it is lost."""
    path = write(tmp_path, "qwen3_5", dtype="bfloat16")
    stored = mx.load(str(path / "model.safetensors"))["model.language_model.norm.weight"]
    model = load_model(path)
    gain = model._trunk.norm.weight
    assert gain.dtype == mx.float32 and mx.array_equal(gain, 1 + stored.astype(mx.float32)).item()
    for dtype in ("bfloat16", "stored"):
        narrow = load_model(path, dtype=dtype)
        assert narrow._trunk.norm.weight.dtype == mx.bfloat16
        assert run(narrow, narrow.make_cache(), IDS).post.dtype == mx.bfloat16


def test_settings_of_the_head_come_from_the_checkpoint(tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5")
    seen = {outputs(load_model(path))[1]}
    for contract in (
        {"base_hidden_variant": "pre"},
        {"concat_order": "hidden_embedding"},
        {"base_hidden_variant": "pre", "hidden_variant": "pre_norm", "mtp_position_mode": "cache"},
    ):
        edit_config(path, mtp_contract=contract)
        model = load_model(path)
        assert model.draft_head is not None and model.draft_head.settings == DraftSettings.read(contract)
        seen.add(outputs(model)[1])
    assert len(seen) == 3  # how it chains does not show in the first draft
    hidden = run(model, model.make_cache(), IDS)
    head = model.draft_head
    first = head.draft(head.take(hidden)[:, :-1], mx.array([IDS[1:]]), head.make_cache())
    normed = head._network.norm(first[1])
    assert bits(model.project(normed)) == bits(first[0])  # chained rows are those before the norm
    edit_config(path, mtp_contract={"hidden_variant": "fc"})
    with pytest.raises(CheckpointError, match="hidden_variant"):
        load_runtime(path)


@pytest.mark.parametrize(
    "field, value",
    [
        ("hidden_act", "gelu"),
        ("attn_output_gate", False),
        ("output_gate_type", "sigmoid"),
        ("mamba_ssm_dtype", "bfloat16"),
        ("layer_types", ["full_attention", "linear_attention", "linear_attention", "full_attention"]),
        ("linear_num_value_heads", 3),
        ("num_experts", 4),
    ],
)
def test_settings_that_the_network_would_ignore_are_refused(field: str, value, tmp_path: Path) -> None:
    path = write(tmp_path, "qwen3_5")
    config = json.loads((path / "config.json").read_text())
    config["text_config"][field] = value
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=field) as caught:
        load_runtime(path)
    assert caught.value.code == "unsupported_config"


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_text_only_export_is_the_same_network(family, tmp_path: Path) -> None:
    """Everything at the top level, `model.` before the names, no image tower; rotary settings spelled flat."""
    release = write(tmp_path / "release", family)
    reference = outputs(load_model(release))
    config = json.loads((release / "config.json").read_text())
    text = {**config["text_config"], "model_type": f"{family}_text"}
    rope = text.pop("rope_parameters")
    text |= {"rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"]}
    (release / "config.json").write_text(json.dumps(text))
    rewrite(
        release / "model.safetensors",
        lambda arrays: {
            n.replace("model.language_model.", "model."): a for n, a in arrays.items() if "visual" not in n
        },
    )
    assert outputs(load_model(release)) == reference
