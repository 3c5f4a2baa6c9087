"""Why a row ends, in order, and which ids are special."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from polytoken.lanes.canvas.stops import EndIds, is_stop, stop_reason
from polytoken.models.canvas import CanvasTokens

BASE: dict[str, Any] = {
    "stop_ids": (106, 1),
    "turn_end": 106,
    "generated": 3,
    "max_new_tokens": 10,
    "steps": 5,
    "max_denoising_steps": None,
    "max_ponder_steps": 64,
}
MODEL = CanvasTokens(eos=(1, 106), turn_end=106, pad=0, image=258880)


@pytest.mark.parametrize(
    ("block", "changes", "reason"),
    [
        ([], {}, None),
        ([7, 8], {}, None),
        ([7, 106], {"generated": 10, "steps": 640}, "turn_end"),
        ([7, 1], {"generated": 10, "steps": 640}, "eos"),
        ([1, 106], {}, "turn_end"),
        ([7], {"generated": 10, "steps": 640, "max_denoising_steps": 5}, "max_new_tokens"),
        ([], {"max_denoising_steps": 5}, "max_denoising_steps"),
        ([], {"max_denoising_steps": 5, "steps": 640}, "max_denoising_steps"),
        ([], {"max_denoising_steps": 6}, None),
        ([], {"steps": 640}, "episode_watchdog"),
        ([], {"steps": 639}, None),
        ([7, 1], {"stop_ids": ()}, None),  # the caller wants end tokens ignored
        ([1], {"turn_end": None}, "eos"),
    ],
)
def test_first_reason_that_holds(block: list[int], changes: dict[str, Any], reason: str | None) -> None:
    assert stop_reason(block, **{**BASE, **changes}) == reason


def test_generation_configuration_goes_first() -> None:
    ids = EndIds.from_config(MODEL, {"eos_token_id": [9, 8, 9], "turn_end_token_id": 8, "pad_token_id": [5, 6]})
    assert (ids.turn_end, ids.stops, ids.pad) == (8, (8, 9), 5)


@pytest.mark.parametrize("generation", [{}, {"eos_token_id": None, "turn_end_token_id": None, "pad_token_id": None}])
def test_null_falls_back_to_the_model(generation: dict[str, Any]) -> None:
    ids = EndIds.from_config(MODEL, generation)
    assert (ids.turn_end, ids.stops, ids.pad) == (106, (106, 1), 0)


def test_id_zero_is_an_id() -> None:
    model = CanvasTokens(eos=(1,), turn_end=None, pad=3, image=None)
    ids = EndIds.from_config(model, {"eos_token_id": 0, "pad_token_id": 0})
    assert (ids.turn_end, ids.stops, ids.pad) == (None, (0,), 0)


def test_ids_that_are_never_penalised() -> None:
    generation = {"bos_token_id": 2, "repetition_penalty_exclude_token_ids": [40, 41]}
    assert EndIds.from_config(MODEL, generation).excluded == {0, 1, 2, 40, 41, 106, 258880}


def test_is_stop() -> None:
    ids = mx.array([[5, 1, 106, 1]], mx.int32)
    assert is_stop(ids, (106, 1)).tolist() == [[False, True, True, True]]
    assert is_stop(ids, ()).tolist() == [[False] * 4]
