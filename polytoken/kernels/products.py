"""What stands behind MLX's fp32 products on the CPU: exact fixed-order products, MLX's own, or a BLAS by path.

MLX's Linux wheels send fp32 `matmul`, `addmm` and attention to three imported BLAS symbols. The compiled extension
`_products` puts products there that sum over the inner index in one fixed order, so that a row's numbers depend on
nothing but that row, and that run far faster than the wheel's own. Everything works without the extension; only the
speed and the exactness are lost, and the report says so.
"""

from __future__ import annotations

import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Final

from polytoken.errors import UsageError

LIBRARY: Final = "libmlx.so"

FUSED: Final = (
    "Every element of an fp32 product on the CPU is one sum over the inner index, from first to last, by fused "
    "multiply-add: it does not depend on other rows or columns, batch, layout, threads, or zeros around the inner "
    "index."
)
APART: Final = (
    "Every element of an fp32 product on the CPU is one sum over the inner index, from first to last, each product "
    "rounded before it is added: it does not depend on other rows or columns, batch, layout, threads, or zeros around "
    "the inner index, but its bits differ from those of machines with fused multiply-add."
)
NONE: Final = "None: an element of an fp32 product on the CPU may change with the number of rows computed beside it."
ELSEWHERE: Final = "None stated: fp32 products do not go through an imported CPU library here."


@dataclass(frozen=True)
class ProductsReport:
    """What stands behind MLX's fp32 products on the CPU.

    Attributes:
        kind: "exact", "stock" (MLX's own), "library" (a BLAS named by the user) or "not_needed" (this MLX imports no
            CPU products: macOS, or a build without them).
        form: instruction set of the exact products ("avx512", "avx2", "neon", "portable"), None for other kinds.
        threads: most threads that one product may use.
        library: the BLAS in use when kind is "library".
        symbols: MLX's imported symbols that were redirected.
        exactness: one plain sentence about what may be relied on.
        reason: why kind is not "exact" although exact was asked for.
    """

    kind: str
    form: str | None = None
    threads: int = 1
    library: str | None = None
    symbols: tuple[str, ...] = ()
    exactness: str = NONE
    reason: str | None = None


_STOCK: Final = ProductsReport(kind="stock")
_report = _STOCK
_warned = False


def enable(kind: str = "exact", *, threads: int = 1) -> ProductsReport:
    """Put products behind MLX's fp32 operations on the CPU, at any time, for the whole process.

    Args:
        kind: "exact", "stock" (what MLX came with), or the path or soname of a BLAS library with the C interface.
        threads: most threads one product may use; bits of exact products do not depend on it.

    Returns:
        What stands there now. Asking for "exact" where it cannot be had warns once and leaves MLX's own products.

    Raises:
        UsageError: `threads` is out of range, or the library cannot be used.
    """
    global _report  # noqa: PLW0603  the slots are process-wide, so what fills them is too
    if not 1 <= threads <= 64:
        raise UsageError(f"threads must be from 1 to 64, not {threads}", field="threads")
    if sys.platform == "darwin":
        # MLX calls the system's framework directly there
        if kind not in ("exact", "stock"):
            raise UsageError("a BLAS library can stand behind MLX's products on Linux only", field="products")
        _report = ProductsReport(kind="not_needed", exactness=ELSEWHERE)
    elif kind == "exact":
        _report = _enable_exact(threads)
    elif kind == "stock":
        _report = _enable_stock()
    else:
        _report = _enable_library(kind, threads)
    return _report


def report() -> ProductsReport:
    """What stands behind MLX's fp32 products on the CPU now."""
    return _report


def extension() -> ModuleType:
    """The compiled extension; ImportError where it was not built."""
    return import_module("polytoken.kernels._products")


def _enable_exact(threads: int) -> ProductsReport:
    try:
        products = extension()
    except ImportError as error:
        return _refuse(f"the compiled extension is not there ({error})")
    _load_mlx()
    products.set_threads(threads)
    try:
        symbols = products.redirect(LIBRARY)
    except LookupError as error:
        return ProductsReport(kind="not_needed", exactness=ELSEWHERE, reason=str(error))
    except OSError as error:
        return _refuse(str(error))
    if "cblas_sgemm" not in symbols:
        products.restore()
        return _refuse(f"of MLX's fp32 products only {', '.join(symbols)} could be redirected")
    return ProductsReport(
        kind="exact",
        form=products.form(),
        threads=threads,
        symbols=symbols,
        exactness=FUSED if products.fused() else APART,
    )


def _enable_stock() -> ProductsReport:
    with suppress(ImportError):  # without the extension nothing was ever redirected
        extension().restore()
    return _STOCK


def _enable_library(path: str, threads: int) -> ProductsReport:
    try:
        products = extension()
    except ImportError as error:
        raise UsageError(
            f"cannot put {path} behind MLX's products: the compiled extension is not there ({error})", field="products"
        ) from error
    _load_mlx()
    try:
        symbols = products.redirect_to_library(LIBRARY, path, threads)
    except (OSError, LookupError) as error:
        raise UsageError(f"cannot put {path} behind MLX's products: {error}", field="products") from error
    return ProductsReport(kind="library", threads=threads, library=path, symbols=symbols)


def _refuse(reason: str) -> ProductsReport:
    global _warned  # noqa: PLW0603
    if not _warned:
        _warned = True
        warnings.warn(f"MLX keeps its own CPU products, slow and not exact: {reason}", RuntimeWarning, stacklevel=4)
    return replace(_STOCK, reason=reason)


def _load_mlx() -> None:
    """The slots exist once MLX's library is loaded."""
    import mlx.core  # noqa: F401, PLC0415
