"""Time to the first token of a short turn behind histories of several lengths, against a cold prompt of the longest.

The network is a mid-size hybrid with random weights (about 35 million parameters), whose values do not change the
speed. One layer in four is full attention, as in the released hybrids: what it computes for a new token grows with the
history, and nothing else does. Each history is a conversation's first turn; after it, turns of a few new tokens are
timed one after the other, from the request to its first token, and the parts of a turn each on their own.

    python benchmarks/warm_ttft.py --json results.json
    python benchmarks/warm_ttft.py --histories 256,1024 --rounds 2     # a quick look
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx

from polytoken.backend import enable_products, select_device
from polytoken.bench.machine import describe_machine
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.lanes.ar import ArLane
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.models.base import CausalModel
from polytoken.request import Request
from polytoken.testkit.tiny import write_checkpoint

LAYERS = 8
CONFIG: dict[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 2,
    "full_attention_interval": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "vocab_size": 8192,
    "max_position_embeddings": 65536,
}
MOST_BYTES = 2 << 30


def load_model() -> CausalModel:
    with tempfile.TemporaryDirectory() as folder:
        path = write_checkpoint(folder, "qwen3_5", config=CONFIG, tokenizer=False).path
        return load_runtime(path).model


def open_lane(model: CausalModel, *, speculate: bool, chunk: int) -> Any:
    identity = StateIdentity(checkpoint="random", lane="ar", grid=chunk, free=True)
    common: dict[str, Any] = {"prefill_chunk": chunk, "eos_ids": (), "max_positions": 65536}
    if not speculate:
        return ArLane(model, StateBank(MOST_BYTES, identity=identity), **common)
    settings = MtpSettings()
    bank = StateBank(MOST_BYTES, identity=identify(identity, settings, model))
    return MtpLane(model, bank, settings=settings, **common)


class Conversation:
    """One session of a lane.

    Attributes:
        text: everything said so far.
        steps: seconds of the parts of the latest turn up to its first token.
    """

    def __init__(self, lane: Any, name: str) -> None:
        self.lane, self.name = lane, name
        self.text: tuple[int, ...] = ()
        self.steps: dict[str, float] = {}
        self._turns = 0

    def say(self, more: Sequence[int], *, answer: int = 4) -> float:
        """Seconds from the request to its first token; the turn is finished after that."""
        self._turns += 1
        started = time.perf_counter()
        prompt = (*self.text, *more)
        request = Request(
            request_id=f"{self.name}-{self._turns}",
            token_ids=prompt,
            max_new_tokens=answer,
            ignore_eos=True,
            session=self.name,
        )
        asked = time.perf_counter()
        row = self.lane.open(request, prompt)
        opened = time.perf_counter()
        while not self.lane.prefill_step(row):
            pass
        filled = time.perf_counter()
        ids = self._step(row)
        first = time.perf_counter()
        self.steps = {
            "request": asked - started,
            "find_and_restore": opened - asked,
            "prefill": filled - opened,
            "first_step": first - filled,
        }
        while len(ids) < answer:
            ids += self._step(row)
        self.lane.remember(row, ids)
        self.lane.close(row, keep=True)
        self.text = (*prompt, *ids)
        return first - started

    def _step(self, row: Any) -> tuple[int, ...]:
        (commit,) = self.lane.step([row])
        if isinstance(commit, Exception):
            raise commit
        return commit.token_ids


def words(count: int, seed: int) -> list[int]:
    return [(index * 7919 + seed * 104729) % 8000 for index in range(count)]


def measure(
    model: CausalModel, histories: Sequence[int], *, rounds: int, suffix: int, chunk: int, speculate: bool
) -> dict[str, Any]:
    """Median warm times by history, and the cold time of the longest history."""
    lane = open_lane(model, speculate=speculate, chunk=chunk)
    talks: dict[int, Conversation] = {}
    cold: dict[int, float] = {}
    for length in histories:
        talks[length] = Conversation(lane, f"h{length}")
        cold[length] = talks[length].say(words(length, seed=length))
    warm: dict[int, list[float]] = {length: [] for length in histories}
    parts: dict[int, list[dict[str, float]]] = {length: [] for length in histories}
    for lap in range(rounds + 1):
        for length, talk in talks.items():  # in turns, so that a busy moment of the machine meets all alike
            seconds = talk.say(words(suffix, seed=lap))
            if lap:
                warm[length].append(seconds)
                parts[length].append(talk.steps)
    counts = lane.statistics()
    return {
        "lane": lane.name,
        "cold_seconds": cold,
        "warm_seconds": {length: statistics.median(values) for length, values in warm.items()},
        "warm_seconds_all": warm,
        "parts": {
            length: {name: statistics.median(step[name] for step in steps) for name in steps[0]}
            for length, steps in parts.items()
        },
        "counts": {name: value for name, value in counts.items() if name.startswith(("prefix_cache", "ends", "rest"))},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", default="2048,8192,16384", help="tokens of history, comma-separated")
    parser.add_argument("--suffix", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--prefill-chunk", type=int, default=256)
    parser.add_argument("--lane", choices=("ar", "mtp"), action="append")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    histories = [int(item) for item in options.histories.split(",")]
    device = select_device("auto")
    products = enable_products(device, "exact", threads=1)
    model = load_model()
    report: dict[str, Any] = {
        "machine": asdict(describe_machine()),
        "products": asdict(products),
        "options": {**vars(options), "json": None},
        "weight_bytes": model.weight_bytes_per_forward,
        "lanes": [],
    }
    for name in options.lane or ("ar", "mtp"):
        found = measure(
            model,
            histories,
            rounds=options.rounds,
            suffix=options.suffix,
            chunk=options.prefill_chunk,
            speculate=name == "mtp",
        )
        report["lanes"].append(found)
        warm, cold = found["warm_seconds"], found["cold_seconds"]
        for length in histories:
            shown = ", ".join(f"{part} {seconds * 1e3:.1f}" for part, seconds in found["parts"][length].items())
            print(f"{name} {length:6d} tokens: cold {cold[length]:.3f} s, warm {warm[length] * 1e3:.1f} ms ({shown})")
        spread = max(warm.values()) / min(warm.values()) - 1
        print(f"{name} flat within {spread:.1%}; {cold[histories[-1]] / warm[histories[-1]]:.0f} times below cold")
        mx.clear_cache()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
