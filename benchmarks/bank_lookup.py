"""Time of a hit's lookup in a bank of many entries: conversations over one system prompt, with histories of their own.

Only the lookup is timed: `find` until it has the place and the parts of the state, which restoring then copies.

    python benchmarks/bank_lookup.py --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx

from polytoken.bench.machine import describe_machine
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.layers import KVLayer
from polytoken.cache.recurrent import RecurrentLayer
from polytoken.cache.state import DecodingState

GRID = 256
SYSTEM = 300  # tokens that all conversations begin with; they part in the middle of a block


def encode(state: DecodingState, rows: int) -> None:
    """Go on by made-up rows: the lookup reads none of them."""
    for layer in state.layers:
        if isinstance(layer, RecurrentLayer):
            layer.advance(rows, (mx.zeros((1, 16)),))
        else:
            layer.update_and_fetch(mx.zeros((1, 1, rows, 1)), mx.zeros((1, 1, rows, 1)))


def make_bank(conversations: int, tokens: int, *, hybrid: bool) -> tuple[StateBank, list[tuple[int, ...]]]:
    bank = StateBank(1 << 34, identity=StateIdentity(checkpoint="none", lane="ar", grid=GRID, free=True))
    texts = []
    for number in range(conversations):
        own = range(number * 7919, number * 7919 + tokens - SYSTEM)
        text = (*range(SYSTEM), *(1000 + token for token in own))
        state = DecodingState([KVLayer(), *([RecurrentLayer()] if hybrid else [])])
        for stop in [*range(GRID, tokens, GRID), tokens]:
            encode(state, stop - state.offset)
            bank.put(text[:stop], state, session=f"s{number}")
        texts.append(text)
    return bank, texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = {"machine": asdict(describe_machine()), "options": {**vars(options), "json": None}, "lookups": []}
    for hybrid in (False, True):
        bank, texts = make_bank(options.conversations, options.tokens, hybrid=hybrid)
        seconds = []
        for text in texts:
            prompt = (*text, 1, 2, 3)
            before = time.perf_counter()
            found = bank.find(prompt)
            seconds.append(time.perf_counter() - before)
            assert found.length == len(text), found.miss
        seconds.sort()
        row = {
            "network": "hybrid" if hybrid else "full attention",
            "runs_stored": len(bank),
            "median_ms": statistics.median(seconds) * 1e3,
            "p99_ms": seconds[int(0.99 * len(seconds))] * 1e3,
        }
        report["lookups"].append(row)
        print(
            ", ".join(f"{name} {value:.3f}" if isinstance(value, float) else f"{value}" for name, value in row.items())
        )
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
