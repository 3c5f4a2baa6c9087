"""Make `tests/fixtures/*.npz`: what `transformers` computes on the tiny checkpoints, in fp32 on the CPU.

    pip install '.[cpu,reference]'
    python tests/reference/make_reference.py [family ...]

Not part of the test run: the arrays are kept in the repository and change only when a checkpoint or this file does.
The checkpoints themselves are not kept, `polytoken.testkit` writes them again from their seeds.

Arrays of a causal case, for each prompt P of "long" (40 ids) and "short" (9 ids): `P_ids` [1, S] and `P_logits` [S, V].
reference_hybrid.py says what the hybrid families have besides, reference_diffusion.py what diffusion_gemma has. Every
case also has `checkpoint`, the SHA-256 of its model.safetensors, and every file `versions`, a JSON text.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from reference_cases import CAUSAL_CASES, DIFFUSION_CASES, FIXTURES, HYBRID_CASES, TUNINGS, Case
from reference_diffusion import ENDING, MANY, MANY_KEPT, MANY_SETTING, MODEL_CLASS, SETTINGS, loop_arrays
from reference_diffusion import prompt_arrays as diffusion_prompt_arrays
from reference_hybrid import CLASSES as HYBRID_CLASSES
from reference_hybrid import Head, count_arrays, head_arrays
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from polytoken.testkit.tiny import TinyCheckpoint

Arrays = dict[str, np.ndarray]

LENGTHS = {"long": 40, "short": 9}
# One by one against all at once, within one implementation: more than rounding means a broken case.
INCREMENTAL_TOLERANCE = 2e-5
COUNTED_PROMPT = 20


def load(checkpoint: TinyCheckpoint, model_class: Any = AutoModelForCausalLM, *, attention: str = "eager") -> Any:
    """The checkpoint as transformers' own network; every tensor has to be used and no tensor may be missing."""
    model, info = model_class.from_pretrained(
        checkpoint.path, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    problems = {key: sorted(value) for key, value in info.items() if value}
    if problems:
        raise SystemExit(f"{checkpoint.family}: transformers did not take the checkpoint as it is: {problems}")
    return model.eval()


def load_sliding_llama(checkpoint: TinyCheckpoint) -> Any:
    """A llama with sliding layers. transformers' own llama has none, but qwen2 with zero biases is that network."""
    config = dict(checkpoint.config)
    config.update(model_type="qwen2", architectures=["Qwen2ForCausalLM"], use_sliding_window=True)
    donor = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32)
    model = Qwen2ForCausalLM._from_config(Qwen2Config(**config), attn_implementation="eager").float()
    missing, unexpected = model.load_state_dict(donor.state_dict(), strict=False)
    if unexpected or not all(name.endswith("_proj.bias") for name in missing):
        raise SystemExit(f"llama with sliding layers: missing {missing}, unexpected {unexpected}")
    with torch.no_grad():
        for name in missing:
            model.get_parameter(name).zero_()
    return model.eval()


def random_ids(case: Case, length: int, *, vocab_size: int) -> torch.Tensor:
    """[1, length] ids of the whole vocabulary, seeded by the case."""
    generator = np.random.Generator(np.random.Philox(key=[case.seed, length]))
    return torch.tensor(generator.integers(0, vocab_size, (1, length)))


def one_by_one(model: Any, ids: torch.Tensor, *, start: int) -> torch.Tensor:
    """Logits [1, S, V] from a prompt of `start` ids and then one id at a time through transformers' cache."""
    out = model(input_ids=ids[:, :start], use_cache=True)
    rows = [out.logits]
    for position in range(start, ids.shape[1]):
        step = ids[:, position : position + 1]
        out = model(input_ids=step, cache=out.cache if hasattr(out, "cache") else out.past_key_values, use_cache=True)
        rows.append(out.logits)
    return torch.cat(rows, 1)


def causal_arrays(case: Case) -> Arrays:
    """Ids and logits of the two prompts."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = case.write(Path(directory))
        model = load_sliding_llama(checkpoint) if case.shape == "sliding" else load(checkpoint)
    return prompt_arrays(case, checkpoint, model)


def hybrid_arrays(case: Case) -> Arrays:
    """Trunk and head on the two prompts, then the counts of the tuned checkpoints."""
    model_class = HYBRID_CLASSES[case.family]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = case.write(Path(directory))
        trunk = load(checkpoint, model_class)
        head = Head(trunk)
    arrays = prompt_arrays(case, checkpoint, trunk)
    for prompt in LENGTHS:
        ids = torch.tensor(arrays[f"{prompt}_ids"]).long()
        logits = torch.tensor(arrays[f"{prompt}_logits"])[None]
        for name, array in head_arrays(trunk, head, ids, logits).items():
            arrays[f"{prompt}_{name}"] = array
    for tuning in TUNINGS:
        with tempfile.TemporaryDirectory() as directory:
            trunk = load(case.write_tuned(Path(directory), tuning), model_class)
            head = Head(trunk)
        ids = random_ids(case, COUNTED_PROMPT, vocab_size=checkpoint.text_config["vocab_size"])
        counted = count_arrays(trunk, head, ids)
        arrays.update({f"{tuning}_{name}": array for name, array in counted.items()})
        shares = [f"{a}/{d}" for d, a in (counted[f"depth_{depth}"].sum(0) for depth in (1, 2, 3))]
        print(f"{case.name} {tuning}: accepted/drafted at depth 1 to 3 {shares}")
    return arrays


def diffusion_arrays(case: Case) -> Arrays:
    """Encoder and decoder on the two prompts, then the block sampler's runs."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = case.write(Path(directory))
        model = load(checkpoint, MODEL_CLASS)
        # Rounds otherwise than the eager form: tokens that differ between the two would be no reference.
        other = load(checkpoint, MODEL_CLASS, attention="sdpa")
    vocab = checkpoint.text_config["vocab_size"]
    prompts = {prompt: random_ids(case, length, vocab_size=vocab) for prompt, length in LENGTHS.items()}
    arrays: Arrays = {}
    for prompt, ids in prompts.items():
        generator = np.random.Generator(np.random.Philox(key=[case.seed, 1]))
        made = diffusion_prompt_arrays(model, ids, generator, keep_cache=prompt == "long")
        arrays.update({f"{prompt}_{name}": array for name, array in made.items()})
        change = np.abs(made["logits_conditioned"] - made["logits"]).max()
        print(f"{case.name} {prompt}: largest {np.abs(made['logits']).max():.2f}, conditioning changes {change:.2f}")
    settings = dict(SETTINGS)
    name, base, index = ENDING
    first = loop_arrays(model, prompts[settings[base].prompt], settings[base], seed=case.seed)
    settings[name] = replace(settings[base], eos_token_id=int(first["sequence"][index]), pad_token_id=0)
    for name, setting in settings.items():
        made, again = (loop_arrays(m, prompts[setting.prompt], setting, seed=case.seed) for m in (model, other))
        unlike = [key for key, array in made.items() if not np.array_equal(array, again[key])]
        print(f"{case.name} {name}: denoises {made['blocks'].tolist()}, accepted {made['accepted'].sum(1).tolist()}")
        print(f"  {made['sequence'].tolist()}")
        if unlike:
            raise SystemExit(f"{case.name} {name}: {unlike} hang on rounding; take another seed")
        arrays.update({f"{name}_{key}": array for key, array in made.items()})
    arrays.update(many_arrays(case, model, other))
    return arrays


def many_arrays(case: Case, model: Any, other: Any) -> Arrays:
    """Twenty prompts of ids that mean nothing special, one block each. One that hangs on rounding is passed over."""
    setting = replace(MANY_SETTING, max_new_tokens=model.config.canvas_length)
    arrays: Arrays = {"many_settings": np.array(json.dumps(asdict(setting)))}
    kept = passed = 0
    steps = []
    while kept < MANY:
        seed = case.seed + 100 + kept + passed
        ids = np.random.Generator(np.random.Philox(key=[seed, 3])).integers(3, 270, (1, 3 + seed % 29))
        made, again = (loop_arrays(m, torch.tensor(ids), setting, seed=seed) for m in (model, other))
        if any(not np.array_equal(made[key], again[key]) for key in made):
            passed += 1
            continue
        arrays.update({f"many_{kept}_{key}": made[key] for key in MANY_KEPT})
        steps += made["blocks"].tolist()
        kept += 1
    print(f"{case.name} many: {passed} passed over, denoises {steps}")
    return arrays


def prompt_arrays(case: Case, checkpoint: TinyCheckpoint, model: Any) -> Arrays:
    """Ids and full-sequence logits of the two prompts, after checking them against the one-by-one run."""
    arrays: Arrays = {}
    for prompt, length in LENGTHS.items():
        ids = random_ids(case, length, vocab_size=checkpoint.text_config["vocab_size"])
        logits = model(input_ids=ids, use_cache=False).logits
        difference = (one_by_one(model, ids, start=5) - logits).abs().max().item()
        print(f"{case.name} {prompt}: largest {logits.abs().max().item():.2f}, one by one differs {difference:.1e}")
        if difference > INCREMENTAL_TOLERANCE:
            raise SystemExit(f"{case.name}: transformers disagrees with itself by {difference}")
        arrays[f"{prompt}_ids"] = ids.numpy().astype(np.int32)
        arrays[f"{prompt}_logits"] = logits[0].numpy()
    return arrays


def versions() -> str:
    """What the arrays were made with."""
    return json.dumps({"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__})


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the reference arrays of the tests.")
    makers = {
        **dict.fromkeys(CAUSAL_CASES, causal_arrays),
        **dict.fromkeys(HYBRID_CASES, hybrid_arrays),
        **dict.fromkeys(DIFFUSION_CASES, diffusion_arrays),
    }
    families = list(dict.fromkeys(case.family for case in makers))
    parser.add_argument("families", nargs="*", choices=[*families, []], help="default: all")
    chosen = parser.parse_args().families or families
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for family in chosen:
        arrays: Arrays = {"versions": np.array(versions())}
        for case, make in makers.items():
            if case.family == family:
                made = {**make(case), "checkpoint": np.array(case.digest())}
                arrays.update({f"{case.shape}/{name}": array for name, array in made.items()})
        path = FIXTURES / f"{family}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} KB")


if __name__ == "__main__":
    main()
