"""Settings, and how a checkpoint and settings become a lane."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from canvas_serving import SETTINGS, open_lane, serve
from scripted_canvas import ScriptedCanvas, ScriptedRuntime, ask, scripted_lane

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.checkpoint.runtime import Runtime
from polytoken.errors import UsageError
from polytoken.lanes.canvas.opening import is_canvas, open_canvas_lane
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.request import Request
from polytoken.testkit.tiny import write_checkpoint


@pytest.mark.parametrize(
    ("setting", "flag"),
    [
        ({"canvas_length": 0}, "--canvas-length"),
        ({"canvas_length": True}, "--canvas-length"),
        ({"policy": "other"}, "--policy"),
        ({"commit_failure_budget": 0.0}, "--commit-failure-budget"),
        ({"commit_failure_budget": float("nan")}, "--commit-failure-budget"),
        ({"commit_top_k": 0}, "--commit-top-k"),
        ({"commit_min_p": 0.0}, "--commit-min-p"),
        ({"commit_min_p": 1.0}, "--commit-min-p"),
        ({"commit_target_confidence": 1.0}, "--commit-target-confidence"),
        ({"max_denoising_steps": -1}, "--max-denoising-steps"),
        ({"repetition_penalty": 0.0}, "--repetition-penalty"),
        ({"repetition_penalty": float("inf")}, "--repetition-penalty"),
        ({"vocab_chunk": 0}, "--vocab-chunk-size"),
        ({"pipeline_depth": 0}, "--pipeline-depth"),
        ({"max_batch_tokens": 0}, "--max-batch-tokens"),
    ],
)
def test_a_bad_setting_names_its_flag(setting: dict[str, Any], flag: str) -> None:
    with pytest.raises(UsageError, match=flag) as caught:
        CanvasSettings(**setting)
    assert caught.value.field == flag and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "flag"),
    [
        (CanvasSettings(policy="rolling", max_batch_tokens=5), "--max-batch-tokens"),
        (CanvasSettings(canvas_length=513), "--canvas-length"),
        (CanvasSettings(commit_failure_budget=0.1), "--commit-failure-budget"),  # which the block policy has not
        (CanvasSettings(commit_top_k=4), "--commit-top-k"),
        (CanvasSettings(policy="rolling", commit_failure_budget=1.5, commit_target_confidence=0.9), "--commit"),
    ],
)
def test_settings_that_this_checkpoint_cannot_honour(diffusion: Runtime, settings: CanvasSettings, flag: str) -> None:
    with pytest.raises(UsageError, match=flag):
        open_lane(diffusion, settings)


def test_the_block_policy_needs_its_own_kind_of_checkpoint(modilify: Runtime) -> None:
    with pytest.raises(UsageError, match="--policy"):
        open_lane(modilify, CanvasSettings(policy="block"))


def test_settings_can_be_checked_without_mlx() -> None:
    code = "import sys, polytoken.lanes.canvas.settings; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_causal_checkpoint_is_no_canvas(tmp_path: Any) -> None:
    runtime = load_runtime(write_checkpoint(tmp_path, "llama").path)
    assert not is_canvas(runtime)
    bank = StateBank(0, identity=StateIdentity(checkpoint="x", lane="canvas", grid=8))
    with pytest.raises(UsageError, match="--lane canvas"):
        open_canvas_lane(runtime, CanvasSettings(), bank=bank, prefill_chunk=8, max_batch_rows=1)


def test_what_suits_the_checkpoint(modilify: Runtime, diffusion: Runtime) -> None:
    assert is_canvas(modilify) and is_canvas(diffusion)
    rolling, block = open_lane(modilify, CanvasSettings()), open_lane(diffusion, CanvasSettings())
    assert rolling.method.name == "rolling" and block.method.name == "block"
    assert {"canvas_length": 8, "pipeline_depth": 2, "policy": "rolling"}.items() <= rolling.report().items()
    unset = {"commit_failure_budget": 0.2, "commit_target_confidence": None, "commit_top_k": None, "commit_min_p": None}
    assert unset.items() <= rolling.report().items()
    assert {"sample_top_k": 40, "sample_min_p": 0.05}.items() <= rolling.report().items()
    assert block.report()["max_denoising_steps"] == 48 and block.report()["canvas_length"] == 6
    assert rolling.name == "canvas" and rolling.execution == "layer_interleaved_singleton"


def test_knobs_reach_sampler_and_failure_rate(modilify: Runtime) -> None:
    settings = CanvasSettings(
        commit_failure_budget=0.5, commit_top_k=7, commit_min_p=0.2, commit_target_confidence=0.6, max_denoising_steps=5
    )
    report = open_lane(modilify, settings).report()
    assert {
        "commit_failure_budget": 0.5,
        "commit_top_k": 7,
        "commit_min_p": 0.2,
        "commit_target_confidence": 0.6,
        "sample_top_k": 7,
        "sample_min_p": 0.2,
        "max_denoising_steps": 5,
    }.items() <= report.items()


def test_a_checkpoint_s_limit_is_its_own_sampler_s(diffusion: Runtime, modilify: Runtime) -> None:
    """48 denoises a canvas must not become 48 denoises an answer when the other policy runs the checkpoint."""
    assert open_lane(diffusion, CanvasSettings(policy="rolling")).report()["max_denoising_steps"] is None
    limited = replace(modilify, generation={**modilify.generation, "max_denoising_steps": 3})
    assert open_lane(limited, CanvasSettings()).report()["max_denoising_steps"] == 3


@pytest.mark.parametrize("kind", ["modilify", "block"])
@pytest.mark.parametrize("length", [3, 17])
def test_another_canvas_length(kind: str, length: int, runtimes: dict[str, Runtime]) -> None:
    lane = open_lane(runtimes[kind], replace(SETTINGS[kind], canvas_length=length))
    assert lane.report()["canvas_length"] == lane.model.canvas_length == length
    assert runtimes[kind].model.canvas_length != length
    asked = Request(request_id="r", token_ids=(5, 6, 7), max_new_tokens=8, ignore_eos=True)
    assert serve(lane, [asked]).result("r").generated_tokens == 8


def test_the_penalty_is_recommended_and_a_request_has_the_last_word(modilify: Runtime) -> None:
    stored = replace(modilify, generation={**modilify.generation, "repetition_penalty": 1.1})
    assert open_lane(modilify, CanvasSettings()).sampling.repetition_penalty == 1.0
    assert open_lane(stored, CanvasSettings()).sampling.repetition_penalty == 1.1
    lane = open_lane(stored, CanvasSettings(repetition_penalty=1.4))
    assert lane.sampling.repetition_penalty == 1.4
    plain = lane.open(Request(request_id="r", token_ids=(5,), max_new_tokens=4), [5])
    assert plain.seen is None
    asked = lane.open(Request(request_id="s", token_ids=(5,), max_new_tokens=4, sampling=lane.sampling), [5])
    assert asked.seen is not None and asked.seen.mask[5].item()


def test_ends_come_from_the_tokenizer_when_no_configuration_names_any() -> None:
    model = ScriptedCanvas({5: [40, 41, 77]})
    model.tokens = replace(model.tokens, eos=(), turn_end=None)
    assert scripted_lane(model).eos_ids == frozenset()
    bank = StateBank(0, identity=StateIdentity(checkpoint="x", lane="canvas", grid=16))
    lane = open_canvas_lane(
        ScriptedRuntime(model, eos_ids=(77,)), CanvasSettings(), bank=bank, prefill_chunk=16, max_batch_rows=1
    )
    assert lane.eos_ids == frozenset({77})
    assert serve(lane, [ask(5, 20)]).result("r5").stop_reason == "eos"
