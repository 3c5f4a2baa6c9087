"""The `quantization` block of a config: which modules are packed, how, and which methods are refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from polytoken.errors import CheckpointError

# mode -> (allowed bits, allowed group sizes), as MLX's own packing defines them.
MODES: Final[Mapping[str, tuple[frozenset[int], frozenset[int]]]] = {
    "affine": (frozenset({2, 3, 4, 5, 6, 8}), frozenset({32, 64, 128})),
    "mxfp4": (frozenset({4}), frozenset({32})),
    "mxfp8": (frozenset({8}), frozenset({32})),
    "nvfp4": (frozenset({4}), frozenset({16})),
}
_OWN_KEYS: Final = frozenset({"group_size", "bits", "mode", "quant_method"})


@dataclass(frozen=True)
class Packing:
    """How one module's weight is packed: `bits` per weight, one scale per `group_size` inputs, MLX `mode`."""

    group_size: int
    bits: int
    mode: str

    def as_kwargs(self) -> dict[str, Any]:
        """As MLX's quantise and dequantise calls take it."""
        return {"group_size": self.group_size, "bits": self.bits, "mode": self.mode}


@dataclass(frozen=True)
class Quantisation:
    """A whole checkpoint's packing: the default and the exceptions by module path (None: stored plain)."""

    default: Packing
    overrides: Mapping[str, Packing | None]

    def of(self, path: str) -> Packing | None:
        """The packing of the module at `path`; None when the block says that it is plain.

        Overrides may spell the path with the prefix of a multimodal wrapper, which the network's own names lack.
        """
        if path in self.overrides:
            return self.overrides[path]
        return next((value for key, value in self.overrides.items() if key.endswith(f".{path}")), self.default)

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> Quantisation | None:
        """Read the block of a config, or None for plain weights.

        Raises:
            CheckpointError: `unsupported_quantization`, naming the method, or the value at fault.
        """
        text = config.get("text_config")
        places = [config, text if isinstance(text, Mapping) else {}]
        block = next(
            (place[key] for place in places for key in ("quantization", "quantization_config") if place.get(key)),
            None,
        )
        if block is None:
            return None
        if not isinstance(block, Mapping):
            raise _refuse(f"quantization is {block!r}, not an object", "quantization")
        method = block.get("quant_method")
        if method not in (None, "mlx") or "group_size" not in block or "bits" not in block:
            what = f"quantization method {method!r}" if method else "a quantization block without group_size and bits"
            raise _refuse(f"{what} is not supported; convert the checkpoint to MLX's own packing", "quantization")
        default = _packing(block, "quantization")
        overrides: dict[str, Packing | None] = {}
        for path, value in block.items():
            if path in _OWN_KEYS:
                continue
            if value is False or value is None:
                overrides[path] = None
            elif value is True:
                overrides[path] = default
            elif isinstance(value, Mapping):
                overrides[path] = _packing({**default.as_kwargs(), **value}, f"quantization.{path}")
            # Anything else is a remark some converter left (a version, a method's name), not a module.
        return Quantisation(default=default, overrides=overrides)


def _refuse(message: str, field: str) -> CheckpointError:
    return CheckpointError(message, code="unsupported_quantization", field=field)


def _packing(block: Mapping[str, Any], field: str) -> Packing:
    mode, bits, group = block.get("mode", "affine"), block.get("bits"), block.get("group_size")
    if mode not in MODES:
        raise _refuse(f"quantization mode {mode!r} is not supported; known are {', '.join(MODES)}", f"{field}.mode")
    allowed_bits, allowed_groups = MODES[mode]
    if isinstance(bits, bool) or bits not in allowed_bits:
        raise _refuse(f"{mode} with {bits!r} bits is not supported", f"{field}.bits")
    if isinstance(group, bool) or group not in allowed_groups:
        raise _refuse(f"{mode} with groups of {group!r} is not supported", f"{field}.group_size")
    return Packing(group_size=int(group), bits=int(bits), mode=str(mode))


def describe_quantisation(quantisation: Quantisation | None) -> str | None:
    """One human phrase ("4-bit affine, group 32; 1 module at 8-bit"), or None for plain weights."""
    if quantisation is None:
        return None
    default = quantisation.default
    text = f"{default.bits}-bit {default.mode}, group {default.group_size}"
    counts = Counter(
        "plain" if packing is None else f"{packing.bits}-bit"
        for packing in quantisation.overrides.values()
        if packing != default
    )
    for what, count in sorted(counts.items()):
        text += f"; {count} module{'s' if count > 1 else ''} at {what}" if what != "plain" else f"; {count} plain"
    return text
