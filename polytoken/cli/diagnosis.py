"""The facts behind `polytoken doctor`, as JSON values."""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polytoken import __version__
from polytoken.errors import PolytokenError
from polytoken.host import first_processor, installed_version, processor_name

if TYPE_CHECKING:
    from polytoken.checkpoint import CheckpointStore
    from polytoken.kernels.products import ProductsReport

PACKAGES: Final = (
    "mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-lm", "transformers", "tokenizers",
    "huggingface_hub", "safetensors", "numpy", "jinja2", "typer", "rich",
)  # fmt: skip
_REQUIRED: Final = frozenset(PACKAGES) - {name for name in PACKAGES if name.startswith("mlx-") and name != "mlx-lm"}
_FEATURES: Final = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_tile", "asimd", "bf16")
_ROWS: Final = (1, 2, 3, 5, 8, 64)  # row counts whose products must agree bit for bit
_CHECK_SECONDS: Final = 0.3

Finding = dict[str, str]


def diagnose(store: Path | None, *, products: str, threads: int, device: str) -> dict[str, Any]:
    """Everything `doctor` reports; `problems` keep it from working, `warnings` make it worse than it could be."""
    problems: list[Finding] = []
    cautions: list[Finding] = []
    mlx, active, checks = None, None, None
    try:
        mlx, active, checks = _diagnose_mlx(products=products, threads=threads, device=device)
    except PolytokenError as error:
        problems.append({"what": str(error), "fix": "then run `polytoken doctor` again"})
    if active is not None and active.kind == "stock" and products == "exact":
        fix = "install a C compiler and Python's headers, then install the package again"
        cautions.append({"what": "CPU products are slow and not exact", "fix": fix})
    if checks is not None and active is not None:
        problems += _judge(checks, exact=active.kind == "exact")
    models = available = None
    try:  # nothing of this can be known without MLX
        from polytoken.checkpoint.memory import available_bytes  # noqa: PLC0415
        from polytoken.cli.options import open_store  # noqa: PLC0415

        models, available = _store(open_store(store), problems), available_bytes()
    except ImportError as error:
        if mlx is not None:
            problems.append({"what": f"a part cannot be imported ({error})", "fix": "install the package again"})
    versions = {name: installed_version(name) for name in PACKAGES}
    missing = [name for name in PACKAGES if name in _REQUIRED and versions[name] is None]
    if missing:
        problems.append(
            {"what": f"missing packages: {', '.join(missing)}", "fix": "install the package again with pip"}
        )
    return {
        "polytoken": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "machine": {**_machine(), "available_bytes": available},
        "versions": {name: found for name, found in versions.items() if found is not None or name in _REQUIRED},
        "mlx": mlx,
        "products": None if active is None else {**asdict(active), "symbols": list(active.symbols)},
        "self_check": checks,
        "store": models,
        "warnings": cautions,
        "problems": problems,
    }


def _diagnose_mlx(*, products: str, threads: int, device: str) -> tuple[dict[str, Any], ProductsReport, dict[str, Any]]:
    from polytoken.backend import enable_products, require_mlx, select_device  # noqa: PLC0415

    require_mlx()
    chosen = select_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the report says it
        active = enable_products(chosen, products, threads=threads)
    import mlx.core as mx  # noqa: PLC0415

    from polytoken.kernels import blocks  # noqa: PLC0415

    devices = [name for name, kind in (("cpu", mx.cpu), ("gpu", mx.gpu)) if mx.is_available(kind)]
    mlx = {
        "version": installed_version("mlx"),
        "devices": devices,
        "device": chosen,
        "dtype": "float32 by default" if chosen == "cpu" else "dtype as stored by default",
        "fused_blocks": asdict(blocks.report()) if chosen == "cpu" else None,
    }
    return mlx, active, _self_check()


def _self_check() -> dict[str, Any]:
    """About a second of products: the same rows computed beside different numbers of others, and speed."""
    import mlx.core as mx  # noqa: PLC0415

    from polytoken.bench.roofline import best_seconds, read_bandwidth  # noqa: PLC0415

    outer, inner, columns = max(_ROWS), 1000, 515  # no multiples of a register or a tile
    rows = mx.random.normal((outer, inner), key=mx.random.key(1))
    weights = mx.random.normal((columns, inner), key=mx.random.key(2))
    whole = rows @ weights.T
    equal = all(bool(mx.array_equal(rows[:count] @ weights.T, whole[:count])) for count in _ROWS)
    first = (rows[0] * weights).sum(axis=1)  # an independent way to the same numbers
    error = float(mx.abs(whole[0] - first).max() / mx.abs(first).max())
    size = 512
    square = mx.random.normal((size, size), key=mx.random.key(3))
    seconds = best_seconds(lambda: square @ square.T, seconds=_CHECK_SECONDS)
    bandwidth = read_bandwidth(seconds=_CHECK_SECONDS)
    return {
        "rows": list(_ROWS),
        "bit_equal": equal,
        "relative_error": error,
        "gflops": 2 * size**3 / seconds / 1e9,
        "read_gb_per_second": bandwidth.gb_per_second,
        "read_method": bandwidth.method,
    }


def _judge(checks: dict[str, Any], *, exact: bool) -> list[Finding]:
    problems = []
    if exact and not checks["bit_equal"]:
        what = "products that should be exact change with the number of rows"
        problems.append({"what": what, "fix": "use --products stock and report this machine"})
    if not math.isfinite(checks["relative_error"]) or checks["relative_error"] > 1e-4:
        problems.append({"what": "products are wrong", "fix": "use --products stock and report this machine"})
    return problems


def _store(store: CheckpointStore, problems: list[Finding]) -> dict[str, Any]:
    folder = store.root
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        fix = "make it writable, or choose another with --store or POLYTOKEN_STORE"
        problems.append({"what": f"the model folder {folder} cannot be written", "fix": fix})
    models = []
    try:
        models = [record.as_json() for record in store.list(hashes=True)]
    except OSError as error:
        problems.append({"what": f"the model folder {folder} cannot be read ({error.strerror})",
                         "fix": "choose another with --store or POLYTOKEN_STORE"})  # fmt: skip
    for record in models:
        if record["state"] == "broken":
            fix = f"`polytoken rm {record['name']}` takes it away"
            problems.append({"what": f"model {record['name']} is broken: {record['note']}", "fix": fix})
    return {"folder": str(folder), "models": models}


def _machine() -> dict[str, Any]:
    facts = first_processor()
    return {
        "platform": platform.platform(terse=True),
        "processor": processor_name(),
        "architecture": platform.machine(),
        "cores": os.cpu_count() or 1,
        "features": [name for name in _FEATURES if name in (facts.get("flags") or facts.get("Features", "")).split()],
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "compiler": next((path for path in map(shutil.which, ("cc", "gcc", "clang")) if path), None),
    }
