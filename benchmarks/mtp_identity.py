"""Greedy decoding with drafts against greedy decoding without: 50 prompts of 256 tokens at depths 1 to 5.

    python benchmarks/mtp_identity.py --json FILE
    python benchmarks/mtp_identity.py --model FOLDER --prompts 10 --json FILE

By default on tiny hybrids whose heads are right part of the time; `--model` takes a checkpoint with a draft head. A
difference is looked into: the gap of the two best logits at that place, and both choices as one single-row pass scores
them. It is a near-tie when the gap is below `--bound` (where a window's products round otherwise than single rows, as
on a GPU), else a fault. Exit status 3 when there is any fault, or any difference at all on the CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.backend import enable_products, select_device
from polytoken.bench.machine import describe_machine
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.errors import EXIT_MISMATCH
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.gate.running import answer_all, ask
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.tiny import write_checkpoint

TINY = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
CHUNK = 64
COHORT = 10  # requests that run side by side


@contextmanager
def checkpoint(name: str, *, tiny: bool) -> Iterator[Path]:
    if not tiny:
        yield Path(name)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_checkpoint(Path(folder), name, seed=0, acceptance=HISTORY_MATTERS, tokenizer=False)  # type: ignore[arg-type]
        yield Path(folder)


def run_all(lane: Lane[Any], prompts: Sequence[list[int]], count: int) -> list[list[int]]:
    tokens: list[list[int]] = []
    for start in range(0, len(prompts), COHORT):
        requests = [
            ask(str(start + place), prompt, count) for place, prompt in enumerate(prompts[start : start + COHORT])
        ]
        tokens += [made.tokens for made in answer_all(lane, requests)]
    return tokens


def look_into(model: Any, prompt: list[int], plain: list[int], other: list[int], *, bound: float) -> dict[str, Any]:
    """Where two runs part, and how far apart the choices are when single rows score them."""
    place = next(i for i, (a, b) in enumerate(zip(plain, other, strict=True)) if a != b)
    state = model.make_cache()
    logits = None
    for token in [*prompt, *plain[:place]]:
        logits = model.project(model.forward(mx.array([[token]], mx.int32), state).post[:, -1])
    row = np.array(logits)[0]
    best, second = np.sort(row)[-2:][::-1]
    gap = float(best - second)
    return {
        "place": place,
        "plain": plain[place],
        "with_drafts": other[place],
        "top_2_gap": gap,
        "scores": [float(row[plain[place]]), float(row[other[place]])],
        "verdict": "near-tie" if gap < bound else "fault",
    }


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    with checkpoint(name, tiny=options.model is None) as path:
        runtime = load_runtime(path, **({"dtype": "float32"} if options.model is None else {}))
    model, limit = runtime.model, runtime.max_positions
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, model.vocab_size, 1 + i % 40).tolist() for i in range(options.prompts)]
    base = StateIdentity(checkpoint="identity", lane="ar", grid=CHUNK)
    common: dict[str, Any] = {"prefill_chunk": CHUNK, "eos_ids": (), "max_positions": limit}
    plain = run_all(ArLane(model, StateBank(0, identity=base), **common), prompts, options.tokens)
    depths = []
    for depth in range(1, options.depth + 1):
        settings = MtpSettings(depth=depth)
        lane = MtpLane(model, StateBank(0, identity=identify(base, settings, model)), settings=settings, **common)
        before = time.perf_counter()
        tokens = run_all(lane, prompts, options.tokens)
        found = [
            {"prompt": index, **look_into(model, prompts[index], a, b, bound=options.bound)}
            for index, (a, b) in enumerate(zip(plain, tokens, strict=True))
            if a != b
        ]
        share = lane.tally.accepted_drafts / max(lane.tally.drafted_tokens, 1)
        print(f"{name}, depth {depth}: {len(found)} of {len(prompts)} differ; {share:.0%} of drafts accepted")
        for item in found:
            print(f"  {item}")
        depths.append(
            {
                "depth": depth,
                "differences": found,
                "drafted": lane.tally.drafted_tokens,
                "accepted": lane.tally.accepted_drafts,
                "seconds": time.perf_counter() - before,
            }
        )
    return {"model": name, "prompts": len(prompts), "tokens": options.tokens, "depths": depths}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="a checkpoint's folder; default: tiny random ones")
    parser.add_argument("--family", action="append", choices=TINY, help="of the tiny ones; default: all")
    parser.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--depth", type=int, default=5, help="all depths from 1 to this")
    parser.add_argument("--bound", type=float, default=1e-3, help="largest gap of a near-tie")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = select_device(options.device)
    products = enable_products(device, "exact", threads=1)
    rows = [measure(name, options) for name in ([options.model] if options.model else options.family or TINY)]
    report = {"machine": asdict(describe_machine()), "device": device, "products": asdict(products), "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    found = [item for row in rows for depth in row["depths"] for item in depth["differences"]]
    faults = [item for item in found if options.device == "cpu" or item["verdict"] == "fault"]
    return EXIT_MISMATCH if faults else 0


if __name__ == "__main__":
    sys.exit(main())
