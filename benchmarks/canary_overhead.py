"""What the canary costs decoding: blocks of tokens with and without it, alternating within one process.

    python benchmarks/canary_overhead.py --model smollm2-135m --json FILE
    python benchmarks/canary_overhead.py --model FOLDER --probe mlx
    python benchmarks/canary_overhead.py --tiny             # a tiny hybrid, nothing to fetch

`--probe native` compiles the shipped library with `cc`: the one for NVIDIA GPUs where MLX has a GPU, else the
reference. Every round opens the same request and decodes two blocks, one of them probed; which comes first alternates.
The figure is the median over the rounds of seconds with / seconds without, with its quartiles and the 95 % interval of
the median; beside it the same of processor time, which a busy machine moves less. Run it on an idle machine: the
receipt says how busy it was.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import closing
from dataclasses import asdict
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from polytoken.assembly import EngineOptions
from polytoken.bench.machine import describe_machine
from polytoken.oracle.canary.probe import MlxProbe, NativeProbe, Probe
from polytoken.oracle.canary.watch import Canary
from polytoken.oracle.gate.running import ask
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Subject, examine
from polytoken.testkit.tiny import write_checkpoint

LONG = {"max_position_embeddings": 1 << 16}  # room for blocks of any length
WARM = 4  # tokens before the first block of a round


def compiled(folder: Path, source: str) -> Path:
    """The shipped library, built here."""
    compiler = shutil.which("cc")
    if compiler is None:
        sys.exit("--probe native needs a C compiler (cc), or --library FILE")
    path, library = Path(str(files("polytoken.oracle.canary"))) / "native" / source, folder / "canary.so"
    command = [compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(path), "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


def make_probe(name: str, library: Path | None, folder: Path) -> Probe:
    device = "gpu" if mx.default_device() == mx.gpu else "cpu"
    if name == "mlx":
        return MlxProbe(device)
    return NativeProbe(library or compiled(folder, "canary_cuda.c" if device == "gpu" else "canary.c"))


class Spent(NamedTuple):
    """Seconds of a block by the clock, and of processor time over all threads of this process, the canary's too."""

    clock: float
    processor: float


class Blocks:
    """Decoding in blocks, with the canary around those that are probed."""

    def __init__(self, subject: Subject, probe: Probe, tokens: int) -> None:
        self._subject, self._probe, self._tokens = subject, probe, tokens
        self._ids = subject.encode_chat([{"role": "user", "content": "Tell me a long story about the sea."}])
        self._lane = subject.ar_lane()
        self.threads: str | None = None
        self.samples: list[dict[str, Any]] = []

    def round(self, *, probed_first: bool) -> tuple[Spent, Spent]:
        """What the probed block and the other one took."""
        request = ask("overhead", self._ids, WARM + 2 * self._tokens + 1)
        row: Any = self._lane.open(request, self._ids)
        while not self._lane.prefill_step(row):
            pass
        self._decode(row, WARM)
        spent = {probed: self._block(row, probed=probed) for probed in (probed_first, not probed_first)}
        self._lane.close(row, keep=False)
        return spent[True], spent[False]

    def _block(self, row: Any, *, probed: bool) -> Spent:
        if not probed:
            return self._decode(row, self._tokens)
        receipts = Receipts(self._take, self._take, descriptor=2)
        with Canary(self._probe, receipts) as canary:
            spent = self._decode(row, self._tokens)
        self.threads = canary.kind
        return spent

    def _decode(self, row: Any, tokens: int) -> Spent:
        start, busy = time.perf_counter(), time.process_time()
        for _ in range(tokens):
            (commit,) = self._lane.step([row])
            if isinstance(commit, Exception):
                raise commit
        return Spent(time.perf_counter() - start, time.process_time() - busy)

    def _take(self, line: str) -> None:
        self.samples += json.loads(line).get("samples", [])


def measure(blocks: Blocks, rounds: int) -> tuple[list[float], list[float]]:
    """The ratios of every round by the clock and in processor time, after one that warms up."""
    ratios: list[float] = []
    processor: list[float] = []
    for number in range(rounds + 1):
        probed, free = blocks.round(probed_first=number % 2 == 0)
        if number == 0:
            blocks.samples.clear()
            continue
        ratios.append(probed.clock / free.clock)
        processor.append(probed.processor / free.processor)
        print(
            f"round {number}: {probed.clock:.3f} s with, {free.clock:.3f} s without, {ratios[-1]:.4f}; "
            f"processor time {processor[-1]:.4f}",
            file=sys.stderr,
        )
    return ratios, processor


def summarise(ratios: list[float]) -> dict[str, Any]:
    """Median, quartiles, and the order statistics that hold the true median 19 times in 20."""
    ordered = sorted(ratios)
    reach = 0.98 * len(ordered) ** 0.5
    low, high = int(len(ordered) / 2 - reach), int(len(ordered) / 2 + reach + 0.5)
    quarters = statistics.quantiles(ordered, n=4)
    return {
        "median_ratio": statistics.median(ordered),
        "quartiles": [quarters[0], quarters[2]],
        "interval_95": [ordered[max(low, 0)], ordered[min(high, len(ordered) - 1)]],
        "rounds": len(ordered),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tiny", action="store_true", help="a tiny hybrid instead of --model")
    parser.add_argument("--probe", choices=["native", "mlx"], default="native")
    parser.add_argument("--library", type=Path, help="the native probe's library, instead of the shipped one")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64, help="of a block: let it last a second or more (default 64)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if options.rounds < 4 or options.tokens < 1:
        parser.error("--rounds must be at least 4, --tokens at least 1")
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = str(write_checkpoint(folder / "tiny", "qwen3_5", config=LONG).path) if options.tiny else options.model

        def work(subject: Subject) -> dict[str, Any]:
            with closing(make_probe(options.probe, options.library, folder)) as probe:
                blocks = Blocks(subject, probe, options.tokens)
                ratios, processor = measure(blocks, options.rounds)
                done = sorted(sample["completed_ms"] for sample in blocks.samples)
                return {
                    **summarise(ratios),
                    "processor_time": summarise(processor),
                    "probe": probe.name,
                    "threads": blocks.threads,
                    "probes": len(done),
                    "probe_ms": {"median": statistics.median(done), "most": done[-1]} if done else None,
                    "ratios": ratios,
                    "processor_ratios": processor,
                }

        found = examine(EngineOptions(model=model, batch_size=1), work)
    record = {
        "machine": asdict(machine),
        "model": "tiny qwen3_5" if options.tiny else model,
        "tokens": options.tokens,
        **found,
    }
    low, high = found["interval_95"]
    print(
        f"decoding takes {found['median_ratio']:.4f} times as long with the canary (95 % within {low:.4f}..{high:.4f})"
    )
    busy = found["processor_time"]
    low, high = busy["interval_95"]
    print(f"and {busy['median_ratio']:.4f} times the processor time (95 % within {low:.4f}..{high:.4f})")
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
