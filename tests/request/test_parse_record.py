"""Records: every error condition of the protocol in its order, what null means, and seeds."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import RequestError
from polytoken.request import (
    MAX_STOP_STRINGS,
    Request,
    RequestDefaults,
    SamplingParams,
    derive_seed,
    parse_record,
)

DEFAULTS = RequestDefaults()
LONE = "\ud800"  # half of a surrogate pair: JSON can spell it, UTF-8 cannot
NOT_INTEGERS = [True, False, 1.0, 1.5, math.nan, math.inf, "1", [1], {}]
NOT_LIMITS = [*NOT_INTEGERS, 0, -1, -(10**30)]


def parse(**fields: Any) -> Request:
    return parse_record({"request_id": "a", "prompt": "p"} | fields, DEFAULTS)


def refusal(record: object) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_record(record, DEFAULTS)
    error = caught.value
    # Whatever was wrong, the error must be able to leave the program as one line of UTF-8 JSON.
    json.dumps([str(error), error.code, error.field], ensure_ascii=False).encode()
    assert "\n" not in str(error)
    return error


def code_of(**fields: Any) -> str:
    return refusal({"request_id": "a", "prompt": "p"} | fields).code


# Each check with values that fail it, in the order in which the protocol tests them.
MESSAGE = {"role": "user", "content": "x"}
GOOD_INPUTS: list[dict[str, Any]] = [{"prompt": "p"}, {"prompt": ""}, {"messages": [MESSAGE]}]
BAD_INPUTS: list[tuple[str, dict[str, Any]]] = [
    ("prompt_xor_messages", {}),
    ("prompt_xor_messages", {"prompt": "p", "messages": [MESSAGE]}),
    ("prompt_xor_messages", {"prompt": "p", "messages": None}),
    ("prompt_xor_messages", {"prompt": None, "messages": [MESSAGE]}),
    ("prompt_xor_messages", {"prompt": 3, "messages": 3}),
    *[("bad_prompt", {"prompt": value}) for value in (None, 3, True, ["p"], {}, LONE, "a" + LONE)],
    *[("bad_messages", {"messages": value}) for value in (None, [], {}, "x", 3, True, MESSAGE)],
    *[
        ("bad_messages", {"messages": [MESSAGE, value]})
        for value in (None, "x", [], {}, {"role": "user"}, {"content": "x"})
    ],
]
FIELDS: list[tuple[str, list[Any], list[Any]]] = [
    ("think", [True, False], [None, 0, 1, "true", "false", 1.0, []]),
    ("seed", [None, 0, -5, 2**64, 10**400], [True, False, 1.0, math.nan, "42", [], {}]),
    ("max_new_tokens", [None, 1, 10**30], NOT_LIMITS),
    ("max_denoising_steps", [None, 1, 10**30], NOT_LIMITS),
    ("sampling", [None, {}, {"temperature": 1}], [3, [], "x", True, {"x": 1}, {"temperature": -1}, {"top_k": True}]),
    (
        "stop",
        [None, [], "x", ["x", "y"]],
        ["", 3, True, {}, [""], [3], ["x"] * (MAX_STOP_STRINGS + 1), LONE, ["x", LONE]],
    ),
]
CODES = {"think": "bad_think", "seed": "bad_seed", "sampling": "bad_sampling", "stop": "bad_stop"}
BAD_IDS: list[Any] = [None, "", "   ", "\t\n", 3, True, ["a"], {}, LONE]


@st.composite
def records(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """A record, and the (code, field) of each check it fails, in the protocol's order."""
    record: dict[str, Any] = {}
    faults: list[tuple[str, str]] = []

    def broken() -> bool:
        return draw(st.integers(0, 3)) == 0

    if broken():
        names = draw(st.lists(st.sampled_from(["top_k", "zz", "Prompt", "request_id ", ""]), min_size=1, unique=True))
        record |= dict.fromkeys(names)
        faults.append(("unknown_field", min(names)))
    if broken():
        faults.append(("bad_request_id", "request_id"))
        if draw(st.booleans()):
            record["request_id"] = draw(st.sampled_from(BAD_IDS))
    else:
        record["request_id"] = draw(st.sampled_from(["a", " a ", "0", "\0", "日本", "😀"]))
    if broken():
        code, given_ = draw(st.sampled_from(BAD_INPUTS))
        field = "messages" if code == "bad_messages" else "prompt"
        if code == "bad_messages" and isinstance(given_["messages"], list) and given_["messages"]:
            field = "messages[1]"
        faults.append((code, field))
        record |= given_
    else:
        record |= draw(st.sampled_from(GOOD_INPUTS))
    for name, good, bad in FIELDS:
        if broken():
            record[name] = draw(st.sampled_from(bad))
            faults.append((CODES.get(name, "bad_limit"), name))
        elif draw(st.booleans()):
            record[name] = draw(st.sampled_from(good))
    order = draw(st.permutations(list(record)))  # the order of keys in the line must not matter
    return {key: record[key] for key in order}, faults


@settings(max_examples=2 * settings.default.max_examples)
@given(records())
def test_the_first_failing_check_wins(case: tuple[dict[str, Any], list[tuple[str, str]]]) -> None:
    record, faults = case
    if not faults:
        assert parse_record(record, DEFAULTS).request_id == record["request_id"]
        return
    error = refusal(record)
    code, field = faults[0]
    assert error.code == code
    if code != "bad_sampling":  # which names the member
        assert error.field == field


@pytest.mark.parametrize("record", [None, [], [1], "x", 3, 1.5, True, math.nan])
def test_1_a_record_is_an_object(record: object) -> None:
    assert refusal(record).code == "bad_record"
    assert refusal({}).code == "bad_request_id"


def test_2_unknown_keys_are_reported_sorted() -> None:
    error = refusal({"zeta": 1, "alpha": 2, "request_id": "a", "prompt": "p"})
    assert error.field == "alpha" and str(error).index("alpha") < str(error).index("zeta")
    assert refusal({LONE: 1}).code == "unknown_field"
    assert len(str(refusal({"k" * 10**6: 1}))) < 1000
    for name in ("top_k", "temperature", "raw_prompt", "token_ids", "ignore_eos", "created", "limit_is_default"):
        assert code_of(**{name: 1}) == "unknown_field"


@pytest.mark.parametrize("value", BAD_IDS)
def test_3_request_id(value: Any) -> None:
    assert code_of(request_id=value) == "bad_request_id"
    assert refusal({"prompt": "p"}).code == "bad_request_id"
    assert parse(request_id="  x ").request_id == "  x "  # stored as it came


@pytest.mark.parametrize(("code", "fields"), BAD_INPUTS)
def test_4_to_7_prompt_and_messages(code: str, fields: dict[str, Any]) -> None:
    assert refusal({"request_id": "a"} | fields).code == code


def test_a_prompt_becomes_one_user_message() -> None:
    assert parse(prompt="").messages == ({"role": "user", "content": ""},)
    turns = [{"role": 3, "content": None, "name": "kept"}, MESSAGE]  # what is inside is the template's business
    assert parse_record({"request_id": "a", "messages": turns}, DEFAULTS).messages == tuple(turns)


@pytest.mark.parametrize(("name", "good", "bad"), FIELDS)
def test_8_to_11_and_ours_one_by_one(name: str, good: list[Any], bad: list[Any]) -> None:
    for value in good:
        parse(**{name: value})
    for value in bad:
        assert code_of(**{name: value}) == CODES.get(name, "bad_limit"), value


def test_null_and_absent_mean_the_default() -> None:
    defaults = RequestDefaults(
        max_new_tokens=7, max_denoising_steps=9, seed=5, think=False, sampling=SamplingParams(top_k=4), stop=("s",)
    )
    absent = parse_record({"request_id": "a", "prompt": "p"}, defaults)
    null = dict.fromkeys(["max_new_tokens", "max_denoising_steps", "seed", "sampling", "stop"])
    for request in (absent, parse_record({"request_id": "a", "prompt": "p"} | null, defaults)):
        assert (request.max_new_tokens, request.max_denoising_steps, request.think) == (7, 9, False)
        assert request.seed == derive_seed(5, "a")
        assert request.sampling == SamplingParams(top_k=4) and request.stop == ("s",)
        assert request.limit_is_default
    assert parse().max_denoising_steps is None  # no limit
    assert code_of(think=None) == "bad_think"
    assert not parse(max_new_tokens=5).limit_is_default


def test_given_values_win_over_defaults() -> None:
    request = parse(max_new_tokens=3, max_denoising_steps=4, seed=0, think=False, stop="x", sampling={"top_p": 0.5})
    assert (request.max_new_tokens, request.max_denoising_steps, request.seed, request.think) == (3, 4, 0, False)
    assert request.stop == ("x",) and request.sampling.top_p == 0.5
    defaults = RequestDefaults(stop=("s",), sampling=SamplingParams(temperature=0.5, top_k=3))
    record = {"request_id": "a", "prompt": "p", "stop": [], "sampling": {"temperature": 0, "top_k": None}}
    request = parse_record(record, defaults)
    assert request.stop == () and request.sampling == SamplingParams(temperature=0, top_k=3)


def test_json_text_of_every_kind() -> None:
    line = '{"request_id": "a", "prompt": "p", "max_new_tokens": 5, "seed": %s, "sampling": {"temperature": %s}}'
    assert parse_record(json.loads(line % ("-7", "1e0")), DEFAULTS).seed == -7
    assert parse_record(json.loads(line % ("9" * 4000, "0")), DEFAULTS).seed == int("9" * 4000)
    for number in ("NaN", "Infinity", "-Infinity", "1e999", "9" * 400, '"1"', "true"):
        assert refusal(json.loads(line % ("1", number))).code == "bad_sampling"
    for number in ("1e3", "NaN", "1.0"):
        assert refusal(json.loads(line % (number, "1"))).code == "bad_seed"
    assert refusal(json.loads('{"request_id": "\\ud800", "prompt": "p"}')).code == "bad_request_id"
    assert parse_record(json.loads('{"request_id": "\\ud83d\\ude00", "prompt": "p"}'), DEFAULTS).request_id == "😀"


@pytest.mark.parametrize(
    ("base", "request_id", "seed"),
    [(42, "a", 6356741843985375812), (42, "b", 1861844296939347955), (0, "req-1", 7556865369367389459)],
)
def test_seed_golden_values(base: int, request_id: str, seed: int) -> None:
    assert derive_seed(base, request_id) == seed
    record = {"request_id": request_id, "prompt": "p"}
    assert parse_record(record, RequestDefaults(seed=base)).seed == seed


@settings(max_examples=100, deadline=None)
@given(st.integers(), st.text(min_size=1, alphabet=st.characters(exclude_categories=("Cs",))))
def test_derived_seeds_are_63_bits_of_sha_256(base: int, request_id: str) -> None:
    digest = hashlib.sha256(str(base).encode() + b"\0" + request_id.encode("utf-8")).digest()
    assert derive_seed(base, request_id) == int.from_bytes(digest[:8], "big") % 2**63


@pytest.mark.parametrize(
    "given_",
    [
        {},
        {"messages": (MESSAGE,), "raw_prompt": "x"},
        {"raw_prompt": "x", "token_ids": (1,)},
        {"messages": (MESSAGE,), "raw_prompt": "x", "token_ids": (1,)},
    ],
)
def test_a_request_has_exactly_one_prompt(given_: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        Request(request_id="a", max_new_tokens=1, **given_)
    assert caught.value.code == "prompt_xor_messages"
    Request(request_id="a", max_new_tokens=1, raw_prompt="")
    Request(request_id="a", max_new_tokens=1, token_ids=())


def test_tools_are_those_of_the_openai_api() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    assert parse(tools=[tool]).tools == (tool,)
    assert parse(tools=None).tools == parse(tools=[]).tools == parse().tools == ()
    for bad in ("look", {"name": "look"}, [None], [{}], [{"function": {"name": ""}}], 3, True):
        assert code_of(tools=bad) == "bad_tools"
