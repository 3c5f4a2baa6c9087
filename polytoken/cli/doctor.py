"""`polytoken doctor`: what this installation runs on, what that is worth, and how to mend what is broken."""

from __future__ import annotations

from typing import Any

import typer

from polytoken.cli import options as flags
from polytoken.cli.output import say, write_json
from polytoken.cli.tables import print_fields, size_text
from polytoken.errors import EXIT_FAILURE


def doctor(
    *,
    json: flags.Json = False,
    products: flags.Products = "exact",
    threads: flags.Threads = 1,
    device: flags.Device = "auto",
    store: flags.Store = None,
) -> None:
    """Report on machine, MLX, products and models; exit 1 if something is broken."""
    from polytoken.cli.diagnosis import diagnose  # noqa: PLC0415

    report = diagnose(store, products=products, threads=threads, device=device)
    if json:
        write_json(report)
    else:
        print_fields(_fields(report))
        for kind in ("warnings", "problems"):
            for item in report[kind]:
                say("warning" if kind == "warnings" else "error", f"{item['what']}; {item['fix']}")
    if report["problems"]:
        raise typer.Exit(EXIT_FAILURE)


def _fields(report: dict[str, Any]) -> list[tuple[str, str]]:
    machine, mlx, products, checks = report["machine"], report["mlx"], report["products"], report["self_check"]
    fields = [
        ("polytoken", report["polytoken"]),
        ("python", report["python"]),
        ("machine", f"{machine['platform']}, {machine['processor']}, {machine['cores']} cores"),
        ("instructions", ", ".join(machine["features"]) or "unknown"),
        ("memory", size_text(machine["memory_bytes"]) + _available(machine["available_bytes"])),
        ("C compiler", machine["compiler"] or "none"),
        ("versions", ", ".join(f"{name} {version or 'missing'}" for name, version in report["versions"].items())),
    ]
    if mlx is not None:
        fields += [("devices", ", ".join(mlx["devices"])), ("in use", f"{mlx['device']}, {mlx['dtype']}")]
        if mlx["fused_blocks"] is not None:
            why = mlx["fused_blocks"]["reason"]
            fields.append(("fused blocks", "in use" if why is None else f"not in use: {why}"))
    if products is not None:
        form = f" ({products['form']})" if products["form"] else ""
        library = f" {products['library']}" if products["library"] else ""
        symbols = f", in place of {', '.join(products['symbols'])}" if products["symbols"] else ""
        fields.append(("products", f"{products['kind']}{form}{library}, {products['threads']} thread(s){symbols}"))
        fields.append(("exactness", products["exactness"]))
        if products["reason"]:
            fields.append(("why not exact", products["reason"]))
    if checks is not None:
        rows = ", ".join(map(str, checks["rows"]))
        equal = "bit-equal" if checks["bit_equal"] else "NOT bit-equal"
        fields += [
            ("self-check", f"{equal} for {rows} rows; largest relative error {checks['relative_error']:.1e}"),
            ("speed", f"{checks['gflops']:.0f} GFLOP/s, read {checks['read_gb_per_second']:.1f} GB/s"
             f" ({checks['read_method']})"),
        ]  # fmt: skip
    store = report["store"]
    if store is None:
        return fields
    names = ", ".join(f"{record['name']} ({record['state']})" for record in store["models"])
    return [*fields, ("store", store["folder"]), ("models", names or "none")]


def _available(count: int | None) -> str:
    return "" if count is None else f", {size_text(count)} available"
