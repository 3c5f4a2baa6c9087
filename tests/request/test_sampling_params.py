"""Sampling parameters: ranges, kinds of number, and how they are written in JSON."""

from __future__ import annotations

import math
from typing import Any

import pytest

from polytoken.errors import RequestError
from polytoken.request import MAX_LOGPROBS, SamplingParams, parse_logit_bias, parse_sampling, parse_stop

NEVER_NUMBERS = [True, False, "1", [], {}, math.nan, math.inf, -math.inf, 10**400, -(10**400), 10**5000]
RANGES: dict[str, tuple[list[Any], list[Any]]] = {
    "temperature": ([0, 0.0, 1e-300, 1, 2.5, 1e300], [-1e-9, -1]),
    "top_k": ([0, 1, 50, 2**31, 2**63 - 1, 10**30], [-1, 1.0, 1.5]),
    "top_p": ([0, 0.0, 1e-9, 0.95, 1, 1.0], [-0.1, 1.0001]),
    "min_p": ([0, 0.05, 1, 1.0], [-0.1, 1.0001]),
    "repetition_penalty": ([1e-300, 0.5, 1, 1.1, 1e300], [0, 0.0, -1]),
    "presence_penalty": ([-2, -2.0, 0, 2], [-2.01, 2.01]),
    "frequency_penalty": ([-2, -2.0, 0, 2], [-2.01, 2.01]),
    "logprobs": ([None, 0, 1, MAX_LOGPROBS], [-1, MAX_LOGPROBS + 1, 1.0]),
}
INTEGERS = {"top_k", "logprobs"}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_and_kinds(name: str) -> None:
    good, bad = RANGES[name]
    for value in good:
        assert getattr(SamplingParams(**{name: value}), name) == value
    for value in [*bad, *(value for value in NEVER_NUMBERS if not (name in INTEGERS and value in (10**400, 10**5000)))]:
        for build in (lambda v: SamplingParams(**{name: v}), lambda v: parse_sampling({name: v}, SamplingParams())):
            with pytest.raises(RequestError) as caught:
                build(value)
            assert caught.value.code == "bad_sampling" and caught.value.field == name
            assert len(str(caught.value)) < 200


def test_defaults_are_greedy_and_touch_nothing() -> None:
    assert SamplingParams().greedy and not SamplingParams().shapes_logits
    assert SamplingParams(temperature=1, top_k=1).greedy and SamplingParams(temperature=1, top_p=0).greedy
    assert not SamplingParams(temperature=1e-300).greedy
    assert SamplingParams(repetition_penalty=1.1).shapes_logits
    assert SamplingParams(presence_penalty=0.1).shapes_logits
    assert SamplingParams(frequency_penalty=-0.1).shapes_logits
    assert SamplingParams(logit_bias=((1, 0.0),)).shapes_logits


def test_null_members_keep_the_defaults() -> None:
    defaults = SamplingParams(temperature=0.6, top_k=20, logprobs=2)
    assert parse_sampling(None, defaults) == defaults
    assert parse_sampling(dict.fromkeys(RANGES), defaults) == defaults
    assert parse_sampling({"top_k": 0}, defaults) == SamplingParams(temperature=0.6, logprobs=2)


def test_unknown_members_are_named() -> None:
    with pytest.raises(RequestError, match="'temprature'") as caught:
        parse_sampling({"temprature": 1, "zz": 2}, SamplingParams())
    assert caught.value.field == "sampling.temprature"


def test_logit_bias_in_json() -> None:
    got = parse_sampling({"logit_bias": {"50": -100, "7": 2.5, "0": 0}}, SamplingParams()).logit_bias
    assert got == ((0, 0.0), (7, 2.5), (50, -100.0))
    assert parse_logit_bias({3: 1}) == ((3, 1.0),)
    assert parse_logit_bias({}) == ()


@pytest.mark.parametrize(
    "value",
    [
        None,
        [],
        [[1, 2.0]],
        "x",
        *[{key: 1} for key in ("", "a", "1.5", " 5", "5 ", "+5", "-5", "1_0", "007", "\u0665", "9" * 5000)],
        *[{key: 1} for key in (True, 1.5, None, -5, 10**5000)],
        *[{"5": value} for value in [*NEVER_NUMBERS, None, 100.5, -101]],
    ],
    ids=lambda value: str(type(value)),
)
def test_logit_bias_that_is_refused(value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        parse_logit_bias(value)
    assert caught.value.code == "bad_sampling" and caught.value.field == "logit_bias"
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("pair", [(-1, 0.0), (True, 0.0), (1.0, 0.0), (1, 101.0), (1, math.nan)])
def test_logit_bias_pairs_of_the_python_api(pair: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(logit_bias=(pair,))
    assert caught.value.field == "logit_bias"


def test_stop_forms() -> None:
    assert parse_stop(None, ("d",)) == ("d",)
    assert parse_stop("x", ()) == ("x",)
    assert parse_stop(["x", "x", "\n", "日本", " "], ()) == ("x", "x", "\n", "日本", " ")
    assert parse_stop(("x",), ()) == ("x",)
    assert parse_stop([], ("d",)) == ()
    for wrong in ("", b"x", [b"x"], 3, {"x": 1}, ["x", None]):
        with pytest.raises(RequestError) as caught:
            parse_stop(wrong, ())
        assert caught.value.code == "bad_stop"
