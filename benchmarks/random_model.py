"""AR decoding of a large network with random weights against mlx-lm on the same network, on any device.

No checkpoint is needed, so this runs where weights cannot be fetched. Speed does not depend on the weights' values.

    python benchmarks/random_model.py --preset 8b --json results.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from peers.ours import schedule

from polytoken.bench.machine import describe_machine
from polytoken.bench.peer import Sample, run_mlx_lm
from polytoken.bench.roofline import decode_floor, read_bandwidth
from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.lanes.ar import ArLane
from polytoken.models import qwen3
from polytoken.request import Request

PRESETS = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}
COMMON = {
    "model_type": "qwen3",
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}


def build(preset: str, dtype: mx.Dtype) -> tuple[Any, Any]:
    config = {**COMMON, **PRESETS[preset]}
    mx.random.seed(0)
    network = qwen3.FAMILY.build(config)
    network.update(tree_map(lambda array: array.astype(dtype), network.parameters()))
    mx.eval(network.parameters())
    return network, qwen3.FAMILY.adapt(network, config)


def run_ours(lane: ArLane, ids: Sequence[int], new_tokens: int) -> Sample:
    request = Request(request_id="r", max_new_tokens=new_tokens, token_ids=tuple(ids), ignore_eos=True)
    result = schedule(lane, request, prefill_budget=lane.prefill_chunk, token_events=False)
    assert result.ttft_seconds is not None and result.decode_tokens_per_second is not None
    return Sample(result.ttft_seconds, (new_tokens - 1) / result.decode_tokens_per_second, result.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=PRESETS, default="0.6b")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--prefill-chunk", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    network, model = build(options.preset, getattr(mx, options.dtype))
    identity = StateIdentity(checkpoint="random", lane="ar", grid=options.prefill_chunk)
    lane = ArLane(
        model, StateBank(0, identity=identity), prefill_chunk=options.prefill_chunk, eos_ids=(), max_positions=40960
    )
    ids = [(index * 7919 + 13) % 150000 for index in range(options.prompt_tokens)]
    runs = {
        "polytoken": lambda: run_ours(lane, ids, options.new_tokens),
        "mlx-lm": lambda: run_mlx_lm(network, ids, new_tokens=options.new_tokens, prefill_chunk=options.prefill_chunk),
    }
    samples: dict[str, list[Sample]] = {name: [] for name in runs}
    for lap in range(options.rounds + 1):
        for name, run in runs.items():
            sample = run()
            if lap:
                samples[name].append(sample)
    cache_bytes = 2 * COMMON["num_key_value_heads"] * COMMON["head_dim"] * PRESETS[options.preset]["num_hidden_layers"]
    cache_bytes *= getattr(mx, options.dtype).size * (options.prompt_tokens + options.new_tokens // 2)
    bandwidth = read_bandwidth()
    floor = decode_floor(model.weight_bytes_per_forward, cache_bytes, bandwidth)
    report: dict[str, Any] = {
        "machine": asdict(describe_machine()),
        "options": {**vars(options), "json": None},
        "weight_bytes": model.weight_bytes_per_forward,
        "bandwidth": asdict(bandwidth),
        "floor_tokens_per_second": 1 / floor,
        "same_tokens": samples["polytoken"][0].token_ids == samples["mlx-lm"][0].token_ids,
        "first_difference": next(
            (
                i
                for i, (a, b) in enumerate(
                    zip(samples["polytoken"][0].token_ids, samples["mlx-lm"][0].token_ids, strict=True)
                )
                if a != b
            ),
            None,
        ),
    }
    for name, taken in samples.items():
        decode = statistics.median((options.new_tokens - 1) / sample.decode_seconds for sample in taken)
        prefill = statistics.median(options.prompt_tokens / sample.prefill_seconds for sample in taken)
        report[name] = {
            "prefill_tokens_per_second": prefill,
            "decode_tokens_per_second": decode,
            "floor_share": decode * floor,
        }
    text = json.dumps(report, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n")


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"{time.perf_counter() - started:.1f} s")
