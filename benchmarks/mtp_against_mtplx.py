"""The MTP lane against mtplx on the same tiny hybrid checkpoints: ids, acceptance counts, and the time of a cycle.

    python benchmarks/mtp_against_mtplx.py --peer-python PEER/bin/python --json FILE --markdown FILE

PEER holds `mtplx==2.12.2` with `mlx[cpu]==0.32.2`. By default a tiny and a mid-size checkpoint, both engines with equal
products, in less than six minutes; `--full` adds the other checkpoint, variants and laps. Greedy, one row, one thread,
float32. Every variant is a process of its own, kept warm; rounds alternate between them in both orders.

A cycle is everything from one verify forward to the next. `bare` is the network's part alone: as many head and trunk
forwards through the same engine's network, evaluated once per cycle and with nothing else. A cycle less its bare part
is the engine's own. Every cycle is timed in each of several laps over the same prompts and its best time is kept, since
what disturbs a busy machine only ever adds; figures are medians over cycles of these.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.comparison import Variant, choose, read_options, report, start
from peers.lines import Worker

from polytoken.testkit.acceptance import HISTORY_MATTERS, NEARLY_FREE, Acceptance
from polytoken.testkit.tiny import write_checkpoint

DEPTHS = (1, 2, 3)
MID = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "head_dim": 64,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "vocab_size": 8192,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 3,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint: how right its head is, changes to the tiny shape "a", tokens of a run, and prompts.

    `usual` cases are measured without `--full`.
    """

    acceptance: Acceptance
    config: Mapping[str, Any]
    count: int
    prompts: int
    usual: bool = True


CASES = {
    "A, head nearly independent of its history": Case(NEARLY_FREE, {}, 80, 5),
    "B, history matters": Case(HISTORY_MATTERS, {}, 80, 5, usual=False),
    "mid": Case(NEARLY_FREE, MID, 40, 2),
}


@dataclass(frozen=True)
class LaneVariant(Variant):
    """A variant, and how it is asked: through the lane alone or with the scheduler around it (ours only)."""

    scheduled: bool = False


VARIANTS = (
    LaneVariant("polytoken, exact", True, ("--products", "exact")),
    LaneVariant("polytoken, exact, with the scheduler", True, ("--products", "exact"), scheduled=True, usual=False),
    LaneVariant("polytoken, stock", True, ("--products", "stock")),
    LaneVariant("mtplx, capture_commit, stock", False, ("--products", "stock")),
    LaneVariant("mtplx, batched, stock", False, ("--products", "stock", "--strategy", "batched"), usual=False),
    LaneVariant("mtplx, capture_commit, exact", False, ("--products", "exact")),
)


def ask(worker: Worker, variant: LaneVariant, prompt: list[int], count: int, depth: int) -> dict[str, Any]:
    extra = {"scheduled": True} if variant.scheduled else {}
    answer: dict[str, Any] = worker.ask("run", prompt=prompt, count=count, depth=depth, **extra)
    return answer


def measure(name: str, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    written = write_checkpoint(
        folder, "qwen3_5", seed=0, acceptance=case.acceptance, config=case.config, tokenizer=False
    )
    vocab = written.text_config["vocab_size"]
    variants = choose(VARIANTS, options)
    workers = [start(v, options, "polytoken_mtp.py" if v.ours else "mtplx_mtp.py", folder) for v in variants]
    pairs = list(zip(variants, workers, strict=True))
    about = {worker.name: worker.ask("about") for worker in workers}
    prompts = [np.random.default_rng(seed).integers(3, vocab, 20).tolist() for seed in range(case.prompts)]
    plain = [{v.name: ask(w, v, prompt, case.count, 0)["tokens"] for v, w in pairs} for prompt in prompts]
    depths = []
    for depth in DEPTHS:
        runs: dict[str, list[list[dict[str, Any]]]] = {variant.name: [] for variant in variants}
        bare: dict[str, list[list[float]]] = {variant.name: [] for variant in variants}
        for lap in range(options.rounds + 1):
            taken: dict[str, list[dict[str, Any]]] = {variant.name: [] for variant in variants}
            for place, prompt in enumerate(prompts):
                for variant, worker in pairs if (lap + place) % 2 else reversed(pairs):
                    taken[variant.name].append(ask(worker, variant, prompt, case.count, depth))
                    seconds = worker.ask("bare", prompt=prompt, cycles=case.count // 4, depth=depth)
                    if lap:
                        bare[variant.name].append(seconds[2:])
            if lap:  # the first lap warms up
                for variant in variants:
                    runs[variant.name].append(taken[variant.name])
        print(f"{name}: depth {depth} done", file=sys.stderr)
        depths.append({"depth": depth, "rows": [summarise(v, variants[0], plain, runs, bare) for v in variants]})
    for worker in workers:
        worker.close()
    return {
        "case": name,
        "parameters": about[variants[0].name].get("parameters"),
        "vocabulary": vocab,
        "tokens_per_run": case.count,
        "about": about,
        "depths": depths,
    }


def summarise(
    variant: Variant,
    ours: Variant,
    plain: Sequence[Mapping[str, list[int]]],
    runs: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]],
    bare: Mapping[str, Sequence[Sequence[float]]],
) -> dict[str, Any]:
    """Identity and counts over all prompts and laps, and times as the module says."""
    laps, reference = runs[variant.name], runs[ours.name][0]
    first = laps[0]
    same_ids = all(run["tokens"] == base["tokens"] for lap in laps for run, base in zip(lap, reference, strict=True))
    same_counts = all(
        (run["accepted"], run["drafted"]) == (base["accepted"], base["drafted"])
        for lap in laps
        for run, base in zip(lap, reference, strict=True)
    )
    # The first two cycles of a run warm its buffers up.
    best = [
        min(times)
        for place in range(len(first))
        for times in zip(*(lap[place]["seconds"][2:] for lap in laps), strict=True)
    ]
    network = [min(times) for times in zip(*bare[variant.name], strict=True)]
    everything = [seconds for lap in laps for run in lap for seconds in run["seconds"][2:]]
    cycle, forwards = statistics.median(best) * 1e3, statistics.median(network) * 1e3
    return {
        "variant": variant.name,
        "same_ids_as_ours": same_ids,
        "same_ids_as_plain": all(run["tokens"] == base[variant.name] for run, base in zip(first, plain, strict=True)),
        "same_counts_as_ours": same_counts,
        "accepted": sum(run["accepted"] for run in first),
        "drafted": sum(run["drafted"] for run in first),
        "tokens_per_verify": sum(len(run["tokens"]) - 1 for run in first) / sum(run["verifies"] for run in first),
        "cycles": len(best),
        "cycle_ms": cycle,
        "bare_ms": forwards,
        "own_ms": cycle - forwards,
        "all_laps_median_ms": statistics.median(everything) * 1e3,
        "all_laps_quartiles_ms": [float(np.quantile(everything, q)) * 1e3 for q in (0.25, 0.75)],
    }


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for case in cases:
        lines += [
            f"### {case['case']}: {case['parameters'] / 1e6:.2f}M parameters, vocabulary {case['vocabulary']}",
            "",
            "| depth | variant | same ids | same counts | accepted/drafted | tokens per verify | cycles | cycle, ms | "
            "bare, ms | own, ms | all laps: median (quartiles), ms |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for entry in case["depths"]:
            for row in entry["rows"]:
                low, high = row["all_laps_quartiles_ms"]
                ids = row["same_ids_as_ours"] and row["same_ids_as_plain"]
                lines.append(
                    f"| {entry['depth']} | {row['variant']} | {'yes' if ids else 'NO'} | "
                    f"{'yes' if row['same_counts_as_ours'] else 'NO'} | {row['accepted']}/{row['drafted']} | "
                    f"{row['tokens_per_verify']:.2f} | {row['cycles']} | {row['cycle_ms']:.2f} | {row['bare_ms']:.2f} "
                    f"| {row['own_ms']:.2f} | {row['all_laps_median_ms']:.2f} ({low:.2f} to {high:.2f}) |"
                )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = read_options(
        __doc__,
        peer="mtplx",
        cases=list(CASES),
        usual=[name for name, case in CASES.items() if case.usual],
        rounds=(3, 8),
        log="mtp_against_mtplx.log",
    )
    report(options, lambda name, folder: measure(name, CASES[name], options, folder), table)


if __name__ == "__main__":
    main()
