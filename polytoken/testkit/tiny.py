"""Complete tiny checkpoints in the layout of a release: configuration, weights, tokenizer, chat template.

    checkpoint = write_checkpoint(directory, "qwen3", shape="b", seed=3, dtype="bfloat16", shards=2)

Nothing is downloaded and nothing random is stored: the same call writes the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from polytoken.testkit.acceptance import Acceptance, tune_acceptance
from polytoken.testkit.container import FloatType, StoredTensor, write_json, write_model, write_safetensors
from polytoken.testkit.dense import SHAPES as DENSE
from polytoken.testkit.dense import dense_table
from polytoken.testkit.diffusion import SAMPLER, diffusion_table, spell_per_layer
from polytoken.testkit.diffusion import SHAPES as DIFFUSION
from polytoken.testkit.hybrid import SHAPES as HYBRID
from polytoken.testkit.hybrid import hybrid_table
from polytoken.testkit.layouts import ExpertLayout, Layout, arrange_experts, convert_to_mlx
from polytoken.testkit.packing import pack, store_plain
from polytoken.testkit.tokenizer import STYLES, StyleName, write_tokenizer
from polytoken.testkit.weights import Floats, TensorSpec, draw_all

Family = Literal["llama", "qwen2", "qwen3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_next", "diffusion_gemma"]
Config = dict[str, Any]


@dataclass(frozen=True)
class TinyCheckpoint:
    """A checkpoint that `write_checkpoint` wrote.

    Attributes:
        path: its directory.
        family: as asked for.
        config: the content of config.json.
        seed: the seed of its weights.
    """

    path: Path
    family: Family
    config: Mapping[str, Any]
    seed: int

    @property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        text: Mapping[str, Any] = self.config.get("text_config", self.config)
        return text


@dataclass(frozen=True)
class _Family:
    """How one family is written.

    Attributes:
        shapes: named configurations.
        table: tensor names and shapes of the release, experts fused.
        style: of the tokenizer.
        experts: how the release stores experts.
        converts: whether mlx-lm's tree has other names than the release.
        generation: what generation_config.json holds beside the token ids.
    """

    shapes: Mapping[str, Config]
    table: Callable[[Config], dict[str, TensorSpec]]
    style: StyleName
    experts: ExpertLayout = "fused"
    converts: bool = False
    generation: Config = field(default_factory=lambda: {"do_sample": False})


_FAMILIES: dict[Family, _Family] = {
    "llama": _Family(DENSE["llama"], dense_table, "llama"),
    "qwen2": _Family(DENSE["qwen2"], dense_table, "qwen"),
    "qwen3": _Family(DENSE["qwen3"], dense_table, "qwen"),
    "gemma3_text": _Family(DENSE["gemma3_text"], dense_table, "gemma3"),
    "qwen3_5": _Family(HYBRID["qwen3_5"], hybrid_table, "qwen", converts=True),
    "qwen3_5_moe": _Family(HYBRID["qwen3_5_moe"], hybrid_table, "qwen", converts=True),
    "qwen3_next": _Family(HYBRID["qwen3_next"], hybrid_table, "qwen", experts="numbered", converts=True),
    "diffusion_gemma": _Family(DIFFUSION["diffusion_gemma"], diffusion_table, "gemma4", generation=SAMPLER),
}

FAMILIES: tuple[Family, ...] = tuple(_FAMILIES)
CAUSAL_FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "gemma3_text")
HEAD_FAMILIES: tuple[Family, ...] = ("qwen3_5", "qwen3_5_moe", "qwen3_next")


def shapes(family: Family) -> tuple[str, ...]:
    """The names of a family's shapes."""
    return tuple(_FAMILIES[family].shapes)


def write_checkpoint(
    directory: str | Path,
    family: Family,
    *,
    seed: int = 0,
    shape: str = "a",
    dtype: FloatType = "float32",
    shards: int = 1,
    bits: int | None = None,
    group_size: int = 32,
    layout: Layout | None = None,
    acceptance: Acceptance | None = None,
    tokenizer: bool = True,
    config: Mapping[str, Any] | None = None,
) -> TinyCheckpoint:
    """Write a checkpoint of `family` into `directory` (made if missing) and say what it is.

    Args:
        directory: where the files go.
        family: one of FAMILIES.
        seed: of the weights.
        shape: one of `shapes(family)`; "a" has the sizes that quantise (multiples of 32), "b" has others.
        dtype: how floats are stored.
        shards: number of weight files; more than one come with an index.
        bits: 2, 3, 4, 6 or 8 to quantise every matrix in groups of `group_size` as MLX conversions do; None not to.
            Families whose conversion has other names than the release are then written converted.
        group_size: columns that share a scale and a bias.
        layout: spelling of the tensors; the release's by default.
        acceptance: for the families with a draft head, how often it should be right (see `acceptance`).
        tokenizer: whether to write one. Without it the vocabulary may be smaller than the bytes need; the token ids are
            then bos 1, eos 2, pad 0.
        config: keys of config.json to replace, such as num_key_value_heads or tie_word_embeddings, those of the
            language model in `text_config` where the family has one; the weights follow.
    """
    kind = _FAMILIES[family]
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    ids = _token_ids(kind.style, tokenizer=tokenizer)
    chosen = layout or Layout()
    if bits is not None and kind.converts:
        chosen = replace(chosen, mlx=True)
    elif bits is not None and chosen.experts is None:
        chosen = replace(chosen, experts="fused_weight")  # a packed tensor has .weight, .scales and .biases
    record = _override(kind.shapes[shape], {**ids, "torch_dtype": dtype, **(config or {})})
    weights = _release_weights(kind, record, seed=seed, acceptance=acceptance)
    main, sidecar = _arrange(kind, weights, chosen, table=kind.table(record))
    if chosen.geometry == "per_layer":
        record = spell_per_layer(record)

    tensors = {name: store_plain(name, array, dtype) for name, array in main.items()}
    aside = {name: store_plain(name, array, dtype) for name, array in sidecar.items()}
    if bits is not None:
        packed, packed_aside = (pack(part, bits=bits, group_size=group_size, dtype=dtype) for part in (main, sidecar))
        tensors, aside = packed.tensors, packed_aside.tensors
        # MLX conversions write the block twice: under their own name and under the one that transformers reads.
        record["quantization"] = record["quantization_config"] = {**packed.record, **packed_aside.record}
    origin = "mlx" if bits is not None or chosen.mlx else "pt"
    _write(path, tensors, aside, shards=shards, origin=origin)
    write_json(path / "config.json", record)
    write_json(path / "generation_config.json", {**ids, **kind.generation})
    if tokenizer:
        write_tokenizer(path, kind.style, vocab_size=record.get("text_config", record)["vocab_size"])
    return TinyCheckpoint(path, family, record, seed)


def _write(
    path: Path, tensors: dict[str, StoredTensor], aside: dict[str, StoredTensor], *, shards: int, origin: str
) -> None:
    write_model(path, tensors, shards=shards, origin=origin)
    if aside:
        write_safetensors(path / "mtp.safetensors", aside, origin=origin)


def _release_weights(kind: _Family, record: Config, *, seed: int, acceptance: Acceptance | None) -> dict[str, Floats]:
    """The release's tensors with fused experts."""
    weights = draw_all(kind.table(record), seed=seed)
    if acceptance is None:
        return weights
    if "mtp.fc.weight" not in weights or "lm_head.weight" not in weights:
        raise ValueError("acceptance needs a family with a draft head and an untied output head")
    return tune_acceptance(weights, acceptance, seed=seed)


def _arrange(
    kind: _Family, weights: dict[str, Floats], layout: Layout, *, table: dict[str, TensorSpec]
) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """The tensors of model.safetensors and those of mtp.safetensors, spelled as `layout` says."""
    if layout.mlx and kind.converts:
        if layout.experts not in (None, "switch"):
            raise ValueError(f"a conversion has its experts as 'switch', not {layout.experts!r}")
        spelled = convert_to_mlx(weights, table)
    else:
        spelled = arrange_experts(weights, layout.experts or kind.experts)
    place = layout.head or ("sidecar" if layout.mlx else "shards")
    if place == "shards":
        return spelled, {}
    main = {name: array for name, array in spelled.items() if not name.startswith("mtp.")}
    head = {name: array for name, array in spelled.items() if name.startswith("mtp.")}
    return main, head if place == "sidecar" else {}


def _override(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with some keys replaced, each at the level where it lives; shared keys at both."""
    if "text_config" not in config:
        return {**config, **changes}
    text = dict(config["text_config"])
    top = dict(config)
    for key, value in changes.items():
        if key in top or key == "torch_dtype":
            top[key] = value
        if key not in top or key in text:
            text[key] = value
    return {**top, "text_config": text}


def _token_ids(style: StyleName, *, tokenizer: bool) -> Config:
    if not tokenizer:
        return {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    kind = STYLES[style]
    return {"bos_token_id": kind.bos_id, "eos_token_id": kind.eos_ids, "pad_token_id": kind.pad_id}
