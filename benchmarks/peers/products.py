"""What stands behind MLX's float32 products, chosen in any engine's process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any


def choose_products(kind: str) -> dict[str, Any]:
    """Put `stock` (MLX's own) or `exact` (ours) products in place, and describe them.

    A peer's Python finds our package behind its own: nothing of it is imported but the products.

    Raises:
        RuntimeError: exact products were asked for and cannot be had.
    """
    if kind == "stock":
        return {"kind": "stock"}
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    from dataclasses import asdict  # noqa: PLC0415

    from polytoken.kernels import products  # noqa: PLC0415

    report = products.enable(kind)
    if report.kind not in (kind, "not_needed"):
        raise RuntimeError(f"no {kind} products: {report.reason}")
    return asdict(report)
