"""The kept arrays: they belong to the checkpoints that the testkit writes today, and agree with themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from reference_cases import CAUSAL_CASES, DIFFUSION_CASES, FIXTURES, HYBRID_CASES, PROMPTS, TUNINGS, Case

CASES = (*CAUSAL_CASES, *HYBRID_CASES, *DIFFUSION_CASES)


def named(cases: tuple[Case, ...]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


@named(CASES)
def test_arrays_were_made_for_these_weights(case: Case) -> None:
    assert str(case.arrays()["checkpoint"]) == case.digest(), "run tests/reference/make_reference.py again"


@pytest.mark.parametrize("family", sorted({case.family for case in CASES}))
def test_files_are_small_and_say_what_made_them(family: str) -> None:
    path = FIXTURES / f"{family}.npz"
    assert path.stat().st_size < 600_000
    with np.load(path) as file:
        assert {"torch", "transformers", "numpy"} <= json.loads(str(file["versions"])).keys()


@named((*CAUSAL_CASES, *HYBRID_CASES))
@pytest.mark.parametrize("prompt", PROMPTS)
def test_logits_have_a_row_per_id(case: Case, prompt: str) -> None:
    arrays = case.arrays()
    rows = arrays[f"{prompt}_ids"].shape[1]
    assert arrays[f"{prompt}_logits"].shape[0] == rows
    assert np.isfinite(arrays[f"{prompt}_logits"]).all()


@named(HYBRID_CASES)
@pytest.mark.parametrize("tuning", TUNINGS)
def test_rounds_add_up_to_the_tokens(case: Case, tuning: str) -> None:
    arrays = case.arrays()
    wanted = len(arrays[f"{tuning}_tokens"]) - 1  # the first token comes from the prompt
    for depth in range(1, 6):
        drafted, accepted = arrays[f"{tuning}_depth_{depth}"].T
        assert (accepted <= drafted).all() and (drafted <= depth).all()
        assert 0 < accepted.sum() < drafted.sum()
        # Each round gains its accepted drafts and one more token, which the last round may not want any more.
        assert accepted.sum() + len(drafted) in (wanted, wanted + 1)


@named(DIFFUSION_CASES)
def test_a_block_draws_one_canvas_and_a_row_per_denoise(case: Case) -> None:
    arrays = case.arrays()
    for name in ("tight", "loose", "unsure", "ending"):
        settings = json.loads(str(arrays[f"{name}_settings"]))
        blocks, argmax = arrays[f"{name}_blocks"], arrays[f"{name}_argmax"]
        assert len(arrays[f"{name}_noise"]) == len(blocks) + blocks.sum()
        assert len(argmax) == len(arrays[f"{name}_uniforms"]) == blocks.sum()
        assert blocks.max() <= settings["max_denoising_steps"]
        last = argmax[blocks.cumsum() - 1].ravel()
        sequence = arrays[f"{name}_sequence"]
        if settings["eos_token_id"] is None:
            assert np.array_equal(sequence, last)
        else:
            stop = int(np.argmax(last == settings["eos_token_id"])) + 1
            assert np.array_equal(sequence[:stop], last[:stop])
            assert (sequence[stop:] == settings["pad_token_id"]).all() and stop < len(sequence)
        accepted = arrays[f"{name}_accepted"]
        assert (accepted.sum(1) >= 1).all()
        assert np.array_equal(arrays[f"{name}_next"][accepted], arrays[f"{name}_sampled"][accepted])
