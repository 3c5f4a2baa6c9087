"""Choosing MLX's device and products, and saying in one line what to install when MLX cannot run."""

from __future__ import annotations

import difflib
import os
import platform
import sys
from importlib import import_module
from importlib.util import find_spec

from polytoken.errors import BackendError, UsageError
from polytoken.kernels.products import ProductsReport, enable

DEVICES = ("auto", "cpu", "gpu")
PRODUCTS = ("exact", "stock")


def require_mlx() -> None:
    """Raise BackendError, naming the extra to install, unless MLX and a backend can be imported."""
    if find_spec("mlx") is None:
        raise BackendError(f"MLX is not installed; {_advice()}")
    try:
        import_module("mlx.core")
    except ImportError as error:
        raise BackendError(f"MLX has no backend here ({_first_line(error)}); {_advice()}") from error


def select_device(device: str) -> str:
    """Make `device` MLX's default for the calling thread and return its name, `cpu` or `gpu`.

    Raises:
        UsageError: an unknown name, or `gpu` where MLX finds none.
    """
    import mlx.core as mx  # noqa: PLC0415  (only after require_mlx)

    if device not in DEVICES:
        raise UsageError(f"--device must be one of {', '.join(DEVICES)}, not {device!r}", field="--device")
    has_gpu = mx.is_available(mx.gpu)
    if device == "gpu" and not has_gpu:
        raise UsageError(f"--device gpu: MLX finds no GPU here; {_gpu_advice()}", field="--device")
    chosen = "gpu" if has_gpu and device != "cpu" else "cpu"
    # MLX would run float32 products on matrix units with ten bits of mantissa, and say nothing. It reads this once,
    # at the first product; a user's own choice stays. Half-precision weights are not concerned.
    os.environ.setdefault("MLX_ENABLE_TF32", "0")
    mx.set_default_device(mx.gpu if chosen == "gpu" else mx.cpu)
    if chosen == "cpu":
        # Fused element-wise kernels would be compiled by g++ at run time: slow to start, no gain measured on the CPU.
        mx.disable_compile()
    else:
        mx.enable_compile()
    return chosen


def check_products(kind: str, *, flag: str = "--products", words: tuple[str, ...] = PRODUCTS) -> None:
    """Refuse a word that is neither one of these nor can be the path or name of a library.

    Raises:
        UsageError: naming `flag`, and the word that was probably meant.
    """
    if kind in words or "/" in kind or "." in kind:
        return
    close = difflib.get_close_matches(kind.lower(), words, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise UsageError(f"{flag} must be {', '.join(words)} or the path of a BLAS library, not {kind!r}{hint}", field=flag)


def enable_products(device: str, kind: str, *, threads: int) -> ProductsReport:
    """Put the chosen products behind MLX's CPU operations; on a GPU they are left as they are."""
    return enable(kind if device == "cpu" else "stock", threads=threads)


def _advice() -> str:
    if sys.platform == "darwin":
        native = platform.machine() == "arm64"
        return "pip install mlx" if native else "MLX needs a Mac with Apple silicon"
    return "install one of the extras: pip install 'polytoken[cpu]' (or [cuda12], [cuda13] with an NVIDIA GPU)"


def _gpu_advice() -> str:
    if sys.platform == "darwin":
        return "use --device cpu, or leave the flag out"
    return (
        "use --device cpu, or leave the flag out; with an NVIDIA GPU whose driver nvidia-smi reports, "
        "pip install 'polytoken[cuda12]' or 'polytoken[cuda13]'"
    )


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
