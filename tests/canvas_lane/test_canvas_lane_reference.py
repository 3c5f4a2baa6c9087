"""The whole loop of DiffusionGemma's sampler against `transformers`, with the noise of the reference."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.checkpoint.runtime import Runtime
from polytoken.lanes.canvas import blockwise
from polytoken.lanes.canvas.block import BlockPolicy
from polytoken.lanes.canvas.blockwise import BlockMethod
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.stops import EndIds
from polytoken.request import Request
from polytoken.sampling.vocabulary import Chunk, VocabularyRule, VocabularyStatistics, vocabulary_statistics

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "reference"))
from reference_cases import DIFFUSION_CASES, Case

LOOPS = ("tight", "loose", "unsure", "ending")
SWEEP = 37  # ids per chunk, so that the loop also goes through several


@dataclass
class TableNoise:
    """Canvases of noise in the order the reference drew them."""

    canvases: np.ndarray

    def canvas(self, step: int) -> mx.array:
        return mx.array(self.canvases[step][None])

    def step(self, step: int) -> Any:
        return self

    def span(self, start: int, stop: int) -> mx.array:
        return mx.full((self.canvases.shape[1], stop - start), 0.5)


class Uniforms:
    """The vocabulary sweep, with ids drawn as the reference drew them: the least id whose cumulative probability
    exceeds the step's uniform number."""

    def __init__(self, uniforms: np.ndarray) -> None:
        self.uniforms = uniforms
        self.sampled: list[list[int]] = []
        self.greedy: list[list[int]] = []

    def __call__(self, *arguments: Any, fold: Any, **keywords: Any) -> VocabularyStatistics:
        scores: list[np.ndarray] = []

        def both(total: Any, chunk: Chunk) -> Any:
            scores.append(np.array(chunk.scores))
            return fold(total, chunk)

        found = vocabulary_statistics(*arguments, fold=both, **keywords)
        s = np.concatenate(scores, axis=1).astype(np.float32)
        p = np.exp(s - s.max(axis=1, keepdims=True))
        p = (p / p.sum(axis=1, keepdims=True)).astype(np.float64)
        u = self.uniforms[len(self.sampled)][:, None]
        ids = np.minimum((p.cumsum(axis=1) <= u).sum(axis=1), s.shape[1] - 1).astype(np.int32)
        self.sampled.append(ids.tolist())
        self.greedy.append(np.array(found.greedy)[0].tolist())
        parts = {name: getattr(found, name) for name in found.__dataclass_fields__}
        return VocabularyStatistics(**{**parts, "sampled": mx.array(ids)[None]})


@pytest.fixture(scope="module", params=DIFFUSION_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def runtime(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Runtime:
    return load_runtime(case.write(tmp_path_factory.mktemp(case.name)).path)


@dataclass
class Loop:
    """One run of our lane with the reference's numbers: ids, denoises per block, canvases, and what ended it."""

    committed: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    canvases: list[list[int]] = field(default_factory=list)
    stop_reason: str | None = None


def named(arrays: dict[str, np.ndarray], loop: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(f"{loop}_"): value for key, value in arrays.items() if key.startswith(f"{loop}_")}


def run_loop(
    runtime: Runtime, arrays: dict[str, np.ndarray], setting: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[Loop, Uniforms]:
    names = ("max_denoising_steps", "entropy_bound", "t_min", "t_max", "stability_threshold", "confidence_threshold")
    policy = BlockPolicy(**{name: setting[name] for name in names}, settle_on="canvas")
    eos = setting["eos_token_id"]
    ends = EndIds(turn_end=None, stops=() if eos is None else (eos,), pad=0, excluded=frozenset())
    sweep = Uniforms(arrays["uniforms"])
    monkeypatch.setattr(blockwise, "vocabulary_statistics", sweep)
    method = BlockMethod(
        runtime.model, policy, VocabularyRule(chunk=SWEEP), ends, make_noise=lambda seed: TableNoise(arrays["noise"])
    )
    lane = CanvasLane(
        runtime.model,
        StateBank(0, identity=StateIdentity(checkpoint="reference", lane="canvas", grid=256)),
        method,
        prefill_chunk=256,
        max_positions=runtime.max_positions,
        max_batch_rows=1,
        max_batch_tokens=64,
    )
    ids = arrays["ids"][0].tolist()
    request = Request(request_id="r", token_ids=tuple(ids), max_new_tokens=setting["max_new_tokens"])
    row = lane.open(request, ids)
    while not lane.prefill_step(row):
        pass
    run, steps = Loop(), 0
    while run.stop_reason is None:
        (commit,) = lane.step([row])
        assert not isinstance(commit, Exception), commit
        run.canvases.append(np.array(row.block.canvas)[0].tolist())
        run.committed += commit.token_ids
        steps += 1
        if commit.token_ids:
            run.blocks.append(steps)
            steps = 0
        run.stop_reason = commit.stop_reason
    return run, sweep


@pytest.mark.parametrize("loop", LOOPS)
def test_the_whole_loop(case: Case, runtime: Runtime, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = named(case.arrays(), loop)
    setting = json.loads(str(arrays["settings"]))
    run, sweep = run_loop(runtime, arrays, setting, monkeypatch)
    assert run.blocks == arrays["blocks"].tolist()
    assert sweep.greedy == arrays["argmax"].tolist()
    assert sweep.sampled == arrays["sampled"].tolist()
    assert run.canvases == arrays["next"].tolist()
    wanted = arrays["sequence"].tolist()
    if (eos := setting["eos_token_id"]) is not None:
        wanted = wanted[: wanted.index(eos) + 1]  # the reference pads the rest of the canvas
        assert run.stop_reason == "eos"
    assert run.committed == wanted[: len(run.committed)]
    assert len(run.committed) == min(len(wanted), setting["max_new_tokens"])


def test_f09_twenty_prompts_settle_after_as_many_denoises_as_the_reference(
    case: Case, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router fed with the wrong rows keeps the adaptive stop from firing; here the counts are not near but equal."""
    arrays = case.arrays()
    setting = json.loads(str(arrays["many_settings"]))
    counts = []
    for index in range(20):
        wanted = named(arrays, f"many_{index}")
        run, _ = run_loop(runtime, wanted, setting, monkeypatch)
        assert run.blocks == wanted["blocks"].tolist()
        assert run.committed == wanted["sequence"].tolist()
        counts += run.blocks
    assert len(set(counts)) > 3 and min(counts) < setting["max_denoising_steps"]  # they did settle, each in its time
