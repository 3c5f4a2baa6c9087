"""Whether a row's numbers depend on how many rows stand beside it: operation by operation, and for whole networks.

    python benchmarks/row_invariance.py --json FILE
    python benchmarks/row_invariance.py --dtypes float32 --rows 2,4 --products stock

A window of k rows is computed at once and row by row, with the same kernels the engine uses. A cell says `equal` where
every bit agrees, else the largest difference as a share of the largest value, over all sizes and numbers of rows. This
is what speculative decoding rests on: it verifies k + 1 rows where plain decoding computes one. Exit status 3 when a
cell differs where equality is promised: float32 on the CPU with exact products.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.gated_delta import normalize_qk
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from polytoken.backend import enable_products, select_device
from polytoken.bench.machine import describe_machine
from polytoken.checkpoint import load_runtime
from polytoken.errors import EXIT_MISMATCH, PolytokenError
from polytoken.kernels.attention import attend
from polytoken.models.hybrid.delta import DeltaRows
from polytoken.models.hybrid.experts import WidenedSwitchLinear
from polytoken.request import SamplingParams
from polytoken.sampling.law import shape
from polytoken.testkit.tiny import write_checkpoint

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
PACKED = {"4-bit": 4, "8-bit": 8}
GROUP = 64
NETWORKS = ("llama", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_next")
PAST = 37  # positions before a window

Rows = Callable[[int, int], mx.array]
"""Rows lo..hi of an operation's result, computed in one call: [hi - lo, ...]."""


@dataclass(frozen=True)
class Finding:
    """One operation on one size for one number of rows.

    Attributes:
        largest: difference of two values; 0 for equal bits.
        relative: of the largest value.
        note: why it could not be tried.
    """

    operation: str
    dtype: str
    size: str
    rows: int
    equal: bool
    largest: float = 0.0
    relative: float = 0.0
    note: str | None = None


@dataclass(frozen=True)
class Operation:
    name: str
    size: str
    rows: Rows


def normal(dtype: mx.Dtype, *size: int, scale: float = 1.0) -> mx.array:
    return (mx.random.normal(size) * scale).astype(dtype)


def products(dtype: mx.Dtype, most: int) -> Iterator[Operation]:
    """x W^T as linear layers store their weights, and x W."""
    for out, inner in ((1024, 1024), (96, 1024), (640, 2560)):
        x = normal(dtype, most, inner)
        w, t = normal(dtype, out, inner, scale=inner**-0.5), normal(dtype, inner, out, scale=inner**-0.5)
        size = f"{inner} -> {out}"
        yield Operation("product x W^T", size, lambda lo, hi, x=x, w=w: x[lo:hi] @ w.T)
        yield Operation("product x W", size, lambda lo, hi, x=x, t=t: x[lo:hi] @ t)


def packed_products(bits: int, most: int) -> Iterator[Operation]:
    for out, inner in ((1024, 1024), (96, 1024), (640, 2560)):
        x = normal(mx.float32, most, inner)
        parts = mx.quantize(normal(mx.float32, out, inner, scale=inner**-0.5), group_size=GROUP, bits=bits)
        yield Operation(
            "product x W^T",
            f"{inner} -> {out}",
            lambda lo, hi, x=x, parts=parts: mx.quantized_matmul(
                x[lo:hi], *parts, transpose=True, group_size=GROUP, bits=bits
            ),
        )


def experts(layer: Any, dtype: mx.Dtype, most: int, inner: int) -> Operation:
    """Two of sixteen experts a row, chosen by the row."""
    x, chosen = normal(dtype, most, 1, 1, inner), mx.random.randint(0, 16, (most, 2)).astype(mx.uint32)
    return Operation("gathered experts", f"16 of {inner}", lambda lo, hi: layer(x[lo:hi], chosen[lo:hi]))


def plain_experts(dtype: mx.Dtype, most: int) -> Iterator[Operation]:
    for inner, out in ((512, 256), (1024, 512)):
        layer = SwitchLinear(inner, out, 16, bias=False)
        layer.weight = normal(dtype, 16, out, inner, scale=inner**-0.5)
        if dtype != mx.float32 and mx.default_device() == mx.Device(mx.cpu):
            layer.__class__ = WidenedSwitchLinear
        yield experts(layer, dtype, most, inner)


def packed_experts(bits: int, most: int) -> Iterator[Operation]:
    for inner, out in ((512, 256), (1024, 512)):
        layer = QuantizedSwitchLinear(inner, out, 16, bias=False, group_size=GROUP, bits=bits)
        yield experts(layer, mx.float32, most, inner)


def rowwise(dtype: mx.Dtype, most: int) -> Iterator[Operation]:
    """What looks at one row alone."""
    for width in (96, 1024):
        x, w = normal(dtype, most, width), normal(dtype, width)
        yield Operation("rms norm", str(width), lambda lo, hi, x=x, w=w: mx.fast.rms_norm(x[lo:hi], w, 1e-6))
        yield Operation("silu gate", str(width), lambda lo, hi, x=x: nn.silu(x[lo:hi]) * x[lo:hi])
    logits = normal(dtype, most, 32_000, scale=4.0)
    yield Operation("softmax", "32000", lambda lo, hi: mx.softmax(logits[lo:hi].astype(mx.float32), axis=-1))
    yield Operation("logsumexp", "32000", lambda lo, hi: mx.logsumexp(logits[lo:hi].astype(mx.float32), axis=-1))
    yield Operation("greedy choice", "32000", lambda lo, hi: mx.argmax(logits[lo:hi], axis=-1))
    yield Operation("sampled law", "32000", lambda lo, hi: laws(logits[lo:hi]))


def laws(logits: mx.array) -> mx.array:
    """Support and probabilities of each row as the lanes draw from them, padded to 40."""
    made = [shape(row, SamplingParams(0.8, top_p=0.95, top_k=20)) for row in np.array(logits.astype(mx.float32))]
    padded = [np.pad(np.concatenate([law.ids, law.probs]), (0, 40 - 2 * len(law.ids))) for law in made]
    return mx.array(np.stack(padded).astype(np.float32))


def positions(dtype: mx.Dtype, most: int) -> Iterator[Operation]:
    """Rotation and attention of the last rows of a text over a cache."""
    for heads, shared, width in ((8, 2, 64), (4, 4, 128), (16, 2, 256)):
        size = f"{heads}/{shared} heads of {width}"
        q = normal(dtype, 1, heads, most, width)
        yield Operation("rotation", size, rotation(q, width))
        for past in (PAST, 700):
            k, v = (normal(dtype, 1, shared, past + most, width) for _ in range(2))
            yield Operation("attention", f"{size}, {past} before", attention(q, k, v, past))


def rotation(q: mx.array, width: int) -> Rows:
    def rows(lo: int, hi: int) -> mx.array:
        turned = mx.fast.rope(q[:, :, lo:hi], width, traditional=False, base=1e6, scale=1.0, offset=PAST + lo)
        return turned[0].swapaxes(0, 1)

    return rows


def attention(q: mx.array, k: mx.array, v: mx.array, past: int) -> Rows:
    def rows(lo: int, hi: int) -> mx.array:
        seen = past + hi
        mask = "causal" if hi - lo > 1 else None
        scale = float(q.shape[-1]) ** -0.5
        return attend(q[:, :, lo:hi], k[:, :, :seen], v[:, :, :seen], scale=scale, mask=mask)[0]  # type: ignore[arg-type]

    return rows


def recurrent(dtype: mx.Dtype, most: int) -> Iterator[Operation]:
    """The gated delta rule with its convolution; rows before lo are run first, one by one or at once."""
    for heads, values, width in ((4, 8, 64), (8, 16, 128)):
        q, k = normalize_qk(
            normal(dtype, 1, most, heads, width), normal(dtype, 1, most, heads, width), inv_scale=width**-0.5, eps=1e-6
        )
        v, a, b = normal(dtype, 1, most, values, width), normal(dtype, 1, most, values), normal(dtype, 1, most, values)
        decay, bias = normal(mx.float32, values), normal(mx.float32, values)
        size = f"{heads}/{values} heads of {width}"
        yield Operation("delta rule", size, delta(q, k, v, a, b, decay, bias))
        channels = 2 * heads * width
        window, kernel = normal(dtype, 1, most + 3, channels), normal(dtype, channels, 4, 1)
        yield Operation(
            "causal convolution",
            f"{channels} channels",
            lambda lo, hi, u=window, w=kernel, c=channels: mx.conv1d(u[:, lo : hi + 3], w, groups=c)[0],
        )


def delta(q: Any, k: Any, v: Any, a: Any, b: Any, decay: mx.array, bias: mx.array) -> Rows:  # noqa: PLR0917
    states: dict[int, mx.array | None] = {0: None}

    def rows(lo: int, hi: int) -> mx.array:
        part = [array[:, lo:hi] for array in (q, k, v, a, b)]
        made = DeltaRows(mx.zeros((1, hi - lo, 1)), *part, decay, bias, use_kernel=True)
        y, after = made.run(states[lo], hi - lo)
        if hi - lo == 1:
            states[hi] = after[-1]
        return y[0]

    return rows


def compare(operation: Operation, dtype: str, rows: int) -> Finding:
    """All rows at once against one at a time."""
    case = {"operation": operation.name, "dtype": dtype, "size": operation.size, "rows": rows}
    try:
        wide = operation.rows(0, rows)
        single = mx.concatenate([operation.rows(i, i + 1) for i in range(rows)])
        mx.eval(wide, single)
    except (ValueError, RuntimeError, PolytokenError) as error:
        return Finding(**case, equal=False, note=str(error).splitlines()[0][:120])
    return judge(case, wide, single)


def judge(case: dict[str, Any], wide: mx.array, single: mx.array) -> Finding:
    a, b = (np.asarray(array.astype(mx.float32)) for array in (wide, single))
    assert a.shape == b.shape, (case, a.shape, b.shape)
    largest = float(np.abs(a.astype(np.float64) - b).max())
    peak = float(max(np.abs(a).max(), 1e-30))
    return Finding(**case, equal=a.tobytes() == b.tobytes(), largest=largest, relative=largest / peak)


def networks(dtype: str, rows: list[int]) -> Iterator[Finding]:
    """Logits and states of tiny networks: a window against steps, from the same past."""
    bits, stored = PACKED.get(dtype), "float32" if dtype in PACKED else dtype
    for family in NETWORKS:
        with tempfile.TemporaryDirectory() as folder:
            made = write_checkpoint(Path(folder), family, dtype=stored, bits=bits)  # type: ignore[arg-type]
            model: Any = load_runtime(made.path, dtype=stored).model
        text = [int(i) for i in np.random.default_rng(0).integers(3, model.vocab_size, PAST + max(rows))]
        for k in rows:
            yield network(model, text[: PAST + k], {"operation": f"network, {family}", "dtype": dtype}, k)


def network(model: Any, text: list[int], names: dict[str, str], k: int) -> Finding:
    """The last k ids of a text in one forward and in k of them."""
    wide, single = model.make_cache(), model.make_cache()
    for state in (wide, single):
        model.forward(mx.array([text[:-k]]), state, keep=0)
        mx.eval(state.arrays())
    at_once = model.project(model.forward(mx.array([text[-k:]]), wide).post[0])
    steps = [model.project(model.forward(mx.array([[i]]), single).post[0]) for i in text[-k:]]
    found = judge({**names, "size": "tiny", "rows": k}, at_once, mx.concatenate(steps))
    return replace(found, equal=found.equal and wide.snapshot().digest() == single.snapshot().digest())


def examine(dtype: str, rows: list[int]) -> Iterator[Finding]:
    """Everything in one type of weights; packed weights meet float32 activations."""
    most = max(rows)
    if dtype in PACKED:
        makers = [packed_products(PACKED[dtype], most), packed_experts(PACKED[dtype], most)]
    else:
        kind = DTYPES[dtype]
        makers = [make(kind, most) for make in (products, plain_experts, rowwise, positions, recurrent)]
    for maker in makers:
        for operation in maker:
            for k in rows:
                yield compare(operation, dtype, k)
    yield from networks(dtype, rows)


def cell(findings: list[Finding]) -> str:
    """What a table says of one operation in one type."""
    if not findings:
        return ""
    if any(finding.note for finding in findings):
        return "not there"
    worst = max(findings, key=lambda finding: finding.relative)
    if all(finding.equal for finding in findings):
        return "equal"
    return f"{worst.relative:.0e}" if worst.relative else "states"


def table(findings: list[Finding], dtypes: list[str]) -> str:
    """Markdown: operations by types."""
    lines = ["| operation | " + " | ".join(dtypes) + " |", "|---" * (len(dtypes) + 1) + "|"]
    for name in dict.fromkeys(finding.operation for finding in findings):
        cells = [cell([f for f in findings if f.operation == name and f.dtype == dtype]) for dtype in dtypes]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtypes", default=",".join((*DTYPES, *PACKED)), help="of the weights (default: all)")
    parser.add_argument("--rows", default="2,3,4,6,16", help="rows of a window (default 2,3,4,6,16)")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--products", default="exact", help="on the CPU: exact or stock")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    dtypes, rows = options.dtypes.split(","), [int(word) for word in options.rows.split(",")]
    if unknown := [dtype for dtype in dtypes if dtype not in {**DTYPES, **PACKED}]:
        parser.error(f"--dtypes: {unknown[0]!r} is none of {', '.join({**DTYPES, **PACKED})}")
    device = select_device(options.device)
    report = enable_products(device, options.products, threads=1)
    mx.random.seed(0)
    findings = [finding for dtype in dtypes for finding in examine(dtype, rows)]
    print(table(findings, dtypes))
    promised = device == "cpu" and report.kind == "exact"
    broken = [finding for finding in findings if finding.dtype == "float32" and not finding.equal and not finding.note]
    if options.json is not None:
        record: dict[str, Any] = {
            "machine": asdict(describe_machine()),
            "products": asdict(report),
            "promised": "float32" if promised else None,
            "findings": [asdict(finding) for finding in findings],
        }
        lines = ",\n  ".join(json.dumps(finding) for finding in record.pop("findings"))
        head = json.dumps(record, indent=1).removesuffix("\n}")
        options.json.write_text(f'{head},\n "findings": [\n  {lines}\n ]\n}}\n')
    if promised and broken:
        first = broken[0]
        print(f"{len(broken)} cells that are promised equal differ: {first}", file=sys.stderr)
        return EXIT_MISMATCH
    return 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except PolytokenError as error:
        sys.exit(f"{Path(__file__).name}: {error}")
