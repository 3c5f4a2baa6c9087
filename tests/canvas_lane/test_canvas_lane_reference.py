"""The whole loop of DiffusionGemma's sampler against `transformers`, with the noise of the reference."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
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
from polytoken.sampling.vocabulary import VocabularyRule, VocabularyStatistics, vocabulary_statistics

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

        def both(total: Any, s: mx.array, start: int, stop: int) -> Any:
            scores.append(np.array(s))
            return fold(total, s, start, stop)

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


@pytest.mark.parametrize("loop", LOOPS)
def test_the_whole_loop(case: Case, runtime: Runtime, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {key.removeprefix(f"{loop}_"): value for key, value in case.arrays().items() if key.startswith(f"{loop}_")}
    setting = json.loads(str(arrays["settings"]))
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
    request = Request(request_id=loop, token_ids=tuple(ids), max_new_tokens=setting["max_new_tokens"])
    row = lane.open(request, ids)
    while not lane.prefill_step(row):
        pass
    canvases, committed, blocks, steps = [], [], [], 0
    while True:
        (commit,) = lane.step([row])
        assert not isinstance(commit, Exception), commit
        canvases.append(np.array(row.block.canvas)[0].tolist())
        committed += commit.token_ids
        steps += 1
        if commit.token_ids:
            blocks.append(steps)
            steps = 0
        if commit.stop_reason is not None:
            break

    assert blocks == arrays["blocks"].tolist()
    assert sweep.greedy == arrays["argmax"].tolist()
    assert sweep.sampled == arrays["sampled"].tolist()
    assert canvases == arrays["next"].tolist()
    wanted = arrays["sequence"].tolist()
    if eos is not None:
        wanted = wanted[: wanted.index(eos) + 1]  # the reference pads the rest of the canvas
        assert commit.stop_reason == "eos"
    assert committed == wanted[: len(committed)] and len(committed) == min(len(wanted), setting["max_new_tokens"])
