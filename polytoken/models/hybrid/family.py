"""From the tensors of a hybrid checkpoint to the network's, and what can be said about its draft head."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from polytoken.models.draft import SETTINGS_KEY, DraftSettings
from polytoken.models.family import Config, Family
from polytoken.models.hybrid import norms
from polytoken.models.hybrid.config import HEAD_FILE, declared_layers
from polytoken.models.hybrid.experts import stack_experts, widen_experts
from polytoken.models.hybrid.head import HybridHead
from polytoken.models.hybrid.model import HybridModel

MTP: Final = "mtp."
_VISION: Final = ("vision_tower.", "visual.", "model.visual.", "model.vision_tower.")
_NESTED_HEAD: Final = re.compile(r"(?:model\.|language_model\.)+mtp\.")
_BARE_HEAD: Final = re.compile(r"(?:fc|pre_fc_norm_embedding|pre_fc_norm_hidden|norm|layers\.\d+)\.")


@dataclass(frozen=True)
class HeadReport:
    """What a checkpoint's config and tensor names say about its draft head.

    Attributes:
        usable: whether drafting with it will work.
        note: one sentence.
        settings: which rows it reads; None without a usable head.
    """

    usable: bool
    note: str
    settings: DraftSettings | None = None


@dataclass(frozen=True)
class HybridFamily(Family):
    """A family whose checkpoints may carry a draft head.

    Attributes:
        make_head: the head's network with uninitialised weights, for a normalised config.
    """

    make_head: Callable[[Config], nn.Module]

    def describe_head(
        self, config: Config, shapes: Mapping[str, tuple[int, ...]], metadata: Mapping[str, str] | None = None
    ) -> HeadReport:
        """Judge the head by the checkpoint's tensor names and shapes alone.

        `metadata` is the header of mtp.safetensors, None where there is no such file.
        """
        text = self.text_config({**config, HEAD_FILE: metadata})
        # Stand-ins of the right shape, never evaluated, go through the same renaming as weights do.
        blanks = {name: mx.zeros(shape) for name, shape in shapes.items()}
        head = {name for name in arrange(blanks, text, prefix="") if name.startswith(MTP)}
        obstacle = unusable(text)
        if not head or obstacle:
            return HeadReport(False, obstacle or missing_note(text))
        expected = {f"{MTP}{name}" for name, _ in tree_flatten(self.make_head(text).parameters())}
        packed = {name for name in head if name.endswith((".scales", ".biases"))}
        absent, extra = sorted(expected - head), sorted(head - expected - packed)
        if absent or extra:
            first = f"{absent[0]} is missing" if absent else f"{extra[0]} has no place in it"
            return HeadReport(False, f"the draft head cannot be used: {first}")
        settings = read_settings(text, metadata)
        return HeadReport(True, present_note(settings, from_file=metadata is not None), settings)


def arrange(weights: dict[str, mx.array], text: Config, *, prefix: str) -> dict[str, mx.array]:
    """Tensors under the network's names and in its layouts, norms as they are; images' tensors dropped.

    `prefix` stands before `model.` and `lm_head.` in the network. A head that cannot be driven is dropped as well.
    """
    named: dict[str, mx.array] = {}
    for name, array in weights.items():
        if name.startswith(_VISION):
            continue
        new = _NESTED_HEAD.sub(MTP, name)
        if text.get(HEAD_FILE) is not None and _BARE_HEAD.match(new):
            new = MTP + new  # a file that holds nothing but the head may leave its prefix out
        if not new.startswith(MTP):
            new = new.replace("model.language_model.", "language_model.model.", 1)
            new = prefix + new.removeprefix("language_model.")
        elif unusable(text):
            continue
        if new.endswith(".conv1d.weight") and array.shape[-1] != 1:
            array = mx.moveaxis(array, 2, 1)  # noqa: PLW2901
        named[new] = array
    return stack_experts(named, experts=int(text.get("num_experts") or 0))


def rename_hybrid(weights: dict[str, mx.array], text: Config, *, prefix: str) -> dict[str, mx.array]:
    """`arrange`, with one added to the norms of raw parts, which is then verified.

    Trunk, and a head beside it: raw if a convolution has its kernel last, as releases do. A head in a file of its own
    has no convolution: raw if the file's header says that it comes from PyTorch, else as the sizes of its norms say.

    Raises:
        CheckpointError: `norm_convention`, `missing_tensors`.
    """
    raw = any(name.endswith(".conv1d.weight") and array.shape[-1] != 1 for name, array in weights.items())
    why = f"its convolutions are laid out as in a {'release' if raw else 'conversion'}"
    arranged = arrange(weights, text, prefix=prefix)
    trunk = {name: array for name, array in arranged.items() if not name.startswith(MTP)}
    head = {name: array for name, array in arranged.items() if name.startswith(MTP)}
    trunk = norms.add_one(trunk) if raw else trunk
    norms.check(trunk, part="trunk", why=why)
    metadata = text.get(HEAD_FILE)
    if metadata is not None:
        sizes = norms.measure(head)
        raw = metadata.get("format") == "pt" or (sizes is not None and sizes.zero_centred)
        why = f"mtp.safetensors was taken for a {'release' if raw else 'conversion'}'s"
    head = norms.add_one(head) if raw else head
    norms.check(head, part="draft head", why=why)
    return {**trunk, **head}


def unusable(text: Config) -> str:
    """Why a head that the config describes cannot be driven here; "" if nothing speaks against it."""
    layers = declared_layers(text)
    if layers > 1:
        return f"the draft head has {layers} layers, and only heads of one layer can be used: it is left out"
    if text.get("mtp_use_dedicated_embeddings"):
        return "the draft head has embeddings of its own, which cannot be used: it is left out"
    return ""


def missing_note(text: Config) -> str:
    """What to say when no head's tensors are there."""
    if not declared_layers(text):
        return "the checkpoint has no draft head"
    return (
        "config.json declares a draft head, but the files hold no mtp.* tensors: a conversion dropped them; put the "
        "release's mtp.* tensors into mtp.safetensors beside the weights to draft with it"
    )


def present_note(settings: DraftSettings, *, from_file: bool) -> str:
    return f"draft head of one layer in {'mtp.safetensors' if from_file else 'the weight files'}; it {settings}"


def read_settings(text: Config, metadata: Mapping[str, str] | None) -> DraftSettings:
    return DraftSettings.read(metadata, text.get(SETTINGS_KEY))


class HeadSlot:
    """What a hybrid network adds to the library's: room for the head that a checkpoint turns out to have."""

    head_metadata: Mapping[str, str] | None = None

    def attach_head(self, names: Iterable[str], metadata: Mapping[str, str] | None) -> None:
        """Called by loading with the renamed tensors' names, before they are compared with the network's own."""
        # A plain dict would be taken for parameters.
        self.head_metadata = None if metadata is None else MappingProxyType(dict(metadata))
        if any(name.startswith(MTP) for name in names):
            self.mtp = self.make_head()

    def make_head(self) -> nn.Module:
        raise NotImplementedError


def wrap_hybrid(network: Any, text_network: nn.Module, text: Config) -> HybridModel:
    """The loaded network, and its head if it has one, behind the lanes' contracts."""
    model = HybridModel(text_network, tied=text["tie_word_embeddings"])
    _level_norms(network, text_network)
    widen_experts(network)
    if not hasattr(network, "mtp"):
        model.attach(None, unusable(text) or missing_note(text))
        return model
    settings = read_settings(text, network.head_metadata)
    note = present_note(settings, from_file=network.head_metadata is not None)
    model.attach(HybridHead(network.mtp, model, settings), note)
    return model


def _level_norms(network: nn.Module, text_network: Any) -> None:
    """Norms that `add_one` widened back to the dtype that the rest runs in, or they would widen every activation."""
    embedding = text_network.model.embed_tokens
    dtype = (embedding.scales if hasattr(embedding, "scales") else embedding.weight).dtype
    wide = [
        (name, array.astype(dtype))
        for name, array in tree_flatten(network.parameters())
        if norms.is_zero_centred(name) and array.dtype != dtype
    ]
    if wide:
        network.load_weights(wide, strict=False)
