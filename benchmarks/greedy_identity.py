"""Greedy ids of the AR lane against mlx-lm's own loop: same weights, same products, ten prompts of up to 600 tokens.

    python benchmarks/greedy_identity.py --model smollm2-135m --json FILE

Exit status 3 when any id differs.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

import polytoken
from polytoken.bench.machine import describe_machine
from polytoken.bench.peer import run_mlx_lm
from polytoken.engine import LoadedLane
from polytoken.errors import EXIT_MISMATCH
from polytoken.request import SamplingParams

SENTENCE = "The river rose in spring, and the town moved its market to the hill behind the old mill. "
PROMPTS = {
    "fact": "What is the capital of France?",
    "list": "List five fruits, one per line.",
    "python": "Write a Python function that returns the n-th Fibonacci number, with a docstring.",
    "arithmetic": "What is 17 + 25? Show the steps.",
    "story": "Write the beginning of a story about a lighthouse keeper who finds a message in a bottle.",
    "unicode": "Explain the words naïve, Größe, 東京 and 😀 in one sentence each.",
    "rewrite": "Rewrite this in the past tense: I walk to the shop, buy bread and come home.",
    "summary": "Summarise in two sentences: " + SENTENCE * 12,
    "long": "Answer at the end. " + SENTENCE * 22 + "Where did the market go?",
    "longest": "Continue the text. " + SENTENCE * 27,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    with polytoken.load(options.model, lane="ar", prefix_cache_mib=0) as engine:
        for name, prompt in PROMPTS.items():
            request = polytoken.make_request(
                engine, prompt, max_new_tokens=options.new_tokens, sampling=SamplingParams(), ignore_eos=True
            )
            ours = engine.generate(request)

            def peer(lane: LoadedLane) -> tuple[int, ...]:
                ids = lane.encode(request)  # noqa: B023  (called at once)
                network = lane.lane.model.network
                return run_mlx_lm(network, ids, new_tokens=options.new_tokens, prefill_chunk=2048).token_ids

            theirs = engine.call(peer)
            agreed = next((i for i, (a, b) in enumerate(zip(ours.token_ids, theirs, strict=True)) if a != b), None)
            rows.append({"prompt": name, "prompt_tokens": ours.prompt_tokens, "first_difference": agreed})
            print(f"{name:12} {ours.prompt_tokens:4} tokens  {'equal' if agreed is None else f'differs at {agreed}'}")
        machine = engine.call(lambda _: describe_machine())
        loaded = engine.loaded
    report = {
        "machine": asdict(machine),
        "model": loaded.extra["model"],
        "identity": loaded.extra["identity"],
        "products": loaded.extra["products"],
        "new_tokens": options.new_tokens,
        "rows": rows,
    }
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["first_difference"] is None for row in rows) else EXIT_MISMATCH


if __name__ == "__main__":
    sys.exit(main())
