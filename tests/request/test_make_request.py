"""The Python way in refuses what a record refuses, with the same codes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from polytoken.api import make_request
from polytoken.engine import Engine
from polytoken.errors import RequestError
from polytoken.request import Request, SamplingParams

ENGINE = cast(Engine, SimpleNamespace(sampling=SamplingParams(temperature=0.5)))


def make(**options: Any) -> Request:
    return make_request(ENGINE, **({"prompt": "p"} | options))


def test_a_plain_string_is_one_stop_and_none_is_the_default() -> None:
    assert make(stop="END").stop == ("END",)
    assert make(stop=None).stop == make().stop == ()
    assert make(stop=["a", "b"]).stop == ("a", "b")


def test_sampling_as_a_mapping_keeps_what_the_checkpoint_recommends() -> None:
    assert make(sampling={"top_k": 3}).sampling == SamplingParams(temperature=0.5, top_k=3)
    assert make(raw=True).raw_prompt == "p"
    assert make(prompt=None, token_ids=[1, 2]).token_ids == (1, 2)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"stop": [""]}, "bad_stop"),
        ({"stop": [3]}, "bad_stop"),
        ({"stop": 3}, "bad_stop"),
        ({"sampling": {"heat": 1}}, "bad_sampling"),
        ({"sampling": 3}, "bad_sampling"),
        ({"prompt": 3, "raw": True}, "bad_prompt"),
        ({"prompt": 3}, "bad_prompt"),
        ({"prompt": "\ud800"}, "bad_prompt"),
        ({"prompt": "\ud800", "raw": True}, "bad_prompt"),
        ({"prompt": None, "messages": []}, "bad_messages"),
        ({"prompt": None, "messages": "hello"}, "bad_messages"),
        ({"prompt": None, "token_ids": ["a"]}, "bad_prompt"),
        ({"prompt": None, "messages": 3}, "bad_messages"),
        ({"prompt": None, "token_ids": 3}, "bad_prompt"),
        ({"prompt": None, "token_ids": [-1]}, "bad_prompt"),
        ({"think": "no"}, "bad_think"),
        ({"request_id": ""}, "bad_request_id"),
        ({"request_id": "\ud800"}, "bad_request_id"),
        ({"request_id": 3}, "bad_request_id"),
    ],
)
def test_the_codes_of_a_record(options: dict[str, Any], code: str) -> None:
    with pytest.raises(RequestError) as caught:
        make(**options)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("stop", "END", "bad_stop"),
        ("stop", ("",), "bad_stop"),
        ("sampling", {}, "bad_sampling"),
        ("think", 1, "bad_think"),
        ("request_id", "\udfff", "bad_request_id"),
    ],
)
def test_a_request_checks_its_own_fields(name: str, value: object, code: str) -> None:
    fields: dict[str, Any] = {"request_id": "a", "raw_prompt": "p", "max_new_tokens": 3, name: value}
    with pytest.raises(RequestError) as caught:
        Request(**fields)
    assert caught.value.code == code
