"""Denoise steps per second of DiffusionGemma's block sampler, ours against mlx-vlm's, on the CPU in float32.

    python benchmarks/canvas_against_mlx_vlm.py --peer-python PEER/bin/python --json FILE --markdown FILE

PEER holds `mlx-vlm==0.7.10` and `mlx[cpu]`. By default a tiny and a mid-size checkpoint, in less than six minutes;
`--full` adds a vocabulary of the real size and more rounds. Peak RSS is of the whole process, from its start. Every
variant is a process of its own, kept warm; rounds alternate between them in both orders. All denoise the same
checkpoint the same number of times: prompt, canvas and steps are equal, no canvas ends early, and the entropy-bound
sampler draws (mlx-vlm at temperature 1, which is what the model's own sampler does; its default of 0 takes the argmax
and so draws no noise, and is measured too). mlx-vlm leaves the last denoise of every canvas without statistics: with
few denoises a canvas that share is in its favour.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from peers.comparison import Variant, choose, read_options, report, start
from peers.lines import Worker

from polytoken.testkit.tiny import write_checkpoint

MID = {
    "canvas_length": 64,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "num_global_key_value_heads": 2,
    "global_head_dim": 64,
    "num_experts": 16,
    "top_k_experts": 4,
    "moe_intermediate_size": 192,
    "sliding_window": 64,
    "vocab_size": 16384,
    "max_position_embeddings": 2048,
}


@dataclass(frozen=True)
class Case:
    """One checkpoint and the work on it.

    Attributes:
        config: changes to the tiny shape "a".
        prompt, canvases, steps: tokens, canvases per run, denoises per canvas.
        usual: whether it is measured without `--full`.
    """

    config: Mapping[str, Any]
    prompt: int
    canvases: int
    steps: int
    usual: bool = True


CASES = {
    "tiny": Case({}, prompt=40, canvases=4, steps=48),
    "mid": Case(MID, prompt=128, canvases=2, steps=8),
    # A vocabulary of the real size, where the sweep over it is nearly everything.
    "wide": Case(
        {**MID, "hidden_size": 64, "num_hidden_layers": 4, "layer_types": MID["layer_types"][:4], "vocab_size": 262144},
        prompt=128,
        canvases=1,
        steps=8,
        usual=False,
    ),
}


VARIANTS = (
    Variant("polytoken, exact", True, ("--products", "exact")),
    Variant("polytoken, stock", True, ("--products", "stock")),
    Variant("mlx-vlm, stock", False, ("--products", "stock")),
    Variant("mlx-vlm, exact", False, ("--products", "exact")),
    Variant("mlx-vlm, stock, argmax", False, ("--products", "stock", "--temperature", "0")),
)


def write(case: Case, folder: Path) -> tuple[Path, Path]:
    """The checkpoint for us, and the same one as mlx-vlm wants it: no image tower, and no early end."""
    ours, theirs = folder / "ours", folder / "theirs"
    write_checkpoint(ours, "diffusion_gemma", seed=1, config=case.config, tokenizer=False)
    generation = json.loads((ours / "generation_config.json").read_text())
    # So low that no random network stops early; the check itself is made, as in a release.
    generation["confidence_threshold"] = 1e-9
    (ours / "generation_config.json").write_text(json.dumps(generation))
    theirs.mkdir()
    for file in ours.iterdir():
        if file.name != "config.json":
            (theirs / file.name).symlink_to(file)
    config = json.loads((ours / "config.json").read_text())
    config["vision_config"] = None  # left out it would be a default tower
    (theirs / "config.json").write_text(json.dumps(config))
    return ours, theirs


def compare_networks(workers: Sequence[Worker], prompt: list[int], canvas: list[int], folder: Path) -> dict[str, float]:
    """Largest difference of each variant's first logits from the first variant's."""
    found = {}
    for worker in workers:
        path = folder / "logits.npy"
        worker.ask("logits", prompt=prompt, canvas=canvas, path=str(path))
        found[worker.name] = np.load(path)
    base = found[workers[0].name]
    return {name: float(np.abs(values - base).max()) for name, values in found.items()}


def measure(name: str, case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ours, theirs = write(case, folder)
    config = json.loads((ours / "config.json").read_text())
    vocab, length = config["text_config"]["vocab_size"], config["canvas_length"]
    chosen = choose(VARIANTS, options)
    workers = [
        start(variant, options, "polytoken_canvas.py", ours)
        if variant.ours
        else start(variant, options, "mlx_vlm_canvas.py", theirs)
        for variant in chosen
    ]
    # Past the special ids, which an encoder reads as images.
    prompt = np.random.default_rng(0).integers(3, 270, case.prompt).tolist()
    canvas = np.random.default_rng(1).integers(0, vocab, length).tolist()
    about = {worker.name: worker.ask("about") for worker in workers}
    # Timed before the comparison, which holds whole arrays of logits and so would spoil the memory figures.
    samples: dict[str, list[dict[str, Any]]] = {worker.name: [] for worker in workers}
    for lap in range(options.rounds + 1):
        for worker in workers if lap % 2 else reversed(workers):
            sample = worker.ask("run", prompt=prompt, canvases=case.canvases, steps=case.steps, seed=lap)
            assert sample["steps"] == case.canvases * case.steps, (worker.name, sample)
            assert sample["tokens"] == case.canvases * length, (worker.name, sample)
            if lap:  # the first lap warms up
                samples[worker.name].append(sample)
            rate = sample["steps"] / sample["decode"]
            print(f"{name}: round {lap} of {options.rounds}, {worker.name}: {rate:.2f} denoises/s", file=sys.stderr)
    peaks = {worker.name: worker.ask("peak") for worker in workers}
    differences = compare_networks(workers, prompt, canvas, folder)
    for worker in workers:
        worker.close()
    rows = []
    for variant in chosen:
        rates = [sample["steps"] / sample["decode"] for sample in samples[variant.name]]
        prefills = [case.prompt / sample["prefill"] for sample in samples[variant.name]]
        rows.append(
            {
                "variant": variant.name,
                "denoises_per_second": statistics.median(rates),
                "range": [min(rates), max(rates)],
                "prefill_tokens_per_second": statistics.median(prefills),
                "peak_rss_mb": peaks[variant.name],
                "logits_from_ours": differences[variant.name],
                "about": about[variant.name],
            }
        )
    return {
        "case": name,
        "parameters": next(about[v.name]["parameters"] for v in chosen if v.ours),
        "vocabulary": vocab,
        "canvas_length": length,
        "prompt_tokens": case.prompt,
        "canvases": case.canvases,
        "steps_per_canvas": case.steps,
        "rows": rows,
    }


def table(cases: Sequence[Mapping[str, Any]]) -> str:
    lines = []
    for case in cases:
        lines += [
            f"### {case['case']}: {case['parameters'] / 1e6:.1f}M parameters, vocabulary {case['vocabulary']}, canvas "
            f"{case['canvas_length']}, prompt {case['prompt_tokens']}, {case['canvases']} x {case['steps_per_canvas']} "
            "denoises a round",
            "",
            "| variant | denoises/s (median) | smallest to largest round | prefill tok/s | peak RSS, MB | logits off |",
            "| --- | --- | --- | --- | --- | --- |",
        ]
        lines += [
            f"| {row['variant']} | {row['denoises_per_second']:.1f} | {row['range'][0]:.1f} to {row['range'][1]:.1f} | "
            f"{row['prefill_tokens_per_second']:.0f} | {row['peak_rss_mb']:.0f} | {row['logits_from_ours']:.1e} |"
            for row in case["rows"]
        ]
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    options = read_options(
        __doc__,
        peer="mlx-vlm",
        cases=list(CASES),
        usual=[name for name, case in CASES.items() if case.usual],
        rounds=(4, 7),
        log="canvas_against_mlx_vlm.log",
    )
    report(options, lambda name, folder: measure(name, CASES[name], options, folder), table)


if __name__ == "__main__":
    main()
