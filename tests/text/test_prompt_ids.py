"""Prompt ids: the reference tokenizer's own, on every path, or an error that says what to do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers_for_tests import WrappedTokenizer, byte_fallback, byte_level, byte_level_with_bos

from polytoken.errors import RequestError
from polytoken.request import Request
from polytoken.text.prompt import chat_ids, encoding_ids, normalise_messages, prompt_ids

USER = ({"role": "user", "content": "Hello there"},)
BOS_TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}[assistant]"


def request(**kwargs: Any) -> Request:
    return Request(request_id="r", max_new_tokens=1, **kwargs)


def refused(call: Any, *args: Any, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


class Scripted(WrappedTokenizer):
    """A real tokenizer whose template call is replaced."""

    def __init__(self, call: Any) -> None:
        super().__init__(byte_level().inner)
        self.apply_chat_template = call  # type: ignore[method-assign]


@pytest.mark.parametrize("think", [True, False])
def test_chat_ids_are_the_reference_ids(think: bool) -> None:
    tokenizer = byte_level()
    expected = tokenizer.inner.apply_chat_template(
        list(USER), tokenize=True, add_generation_prompt=True, enable_thinking=think, return_dict=False
    )
    assert prompt_ids(tokenizer, request(messages=USER, think=think)) == tuple(expected)
    assert tokenizer.inner.decode(expected).endswith("<think>\n") is think


def test_begin_token_is_never_doubled() -> None:
    tokenizer = byte_level_with_bos(template=BOS_TEMPLATE)
    bos = tokenizer.bos_id
    chat = prompt_ids(tokenizer, request(messages=USER))
    assert chat.count(bos) == 1
    assert chat == tuple(tokenizer.inner.apply_chat_template(list(USER), tokenize=True, return_dict=False))
    raw = prompt_ids(tokenizer, request(raw_prompt="Hello there"))
    assert raw == tuple(tokenizer.inner.encode("Hello there"))
    assert raw.count(bos) == 1
    # Text that was rendered elsewhere spells the token already.
    assert prompt_ids(tokenizer, request(raw_prompt="<s>Hello there")) == raw
    # Someone who spells it twice wants it twice; one in the middle is none of our business.
    assert prompt_ids(tokenizer, request(raw_prompt="<s><s>Hello there")) == (bos, *raw)
    middle = prompt_ids(tokenizer, request(raw_prompt="Hello<s> there"))
    assert middle == tuple(tokenizer.inner.encode("Hello<s> there"))


def test_raw_text_without_automatic_tokens_keeps_what_it_spells() -> None:
    tokenizer = byte_level()
    assert prompt_ids(tokenizer, request(raw_prompt="<s><s>a"))[:2] == (tokenizer.bos_id,) * 2
    fallback = byte_fallback()
    assert prompt_ids(fallback, request(raw_prompt="Hi")) == tuple(fallback.inner.encode("Hi"))


def test_null_and_parts_equal_plain_text() -> None:
    tokenizer = byte_level()
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}

    def history(empty: object, text: object) -> tuple[dict[str, Any], ...]:
        return (
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": empty, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "1"},
        )

    plain = chat_ids(tokenizer, history("", "ab"), think=False)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat_ids(tokenizer, history(None, parts), think=False) == plain
    assert chat_ids(tokenizer, history([], tuple(parts)), think=False) == plain
    without = [{k: v for k, v in m.items() if k != "content" or m["role"] != "assistant"} for m in history("", "ab")]
    assert chat_ids(tokenizer, without, think=False) == plain
    kept = normalise_messages(history(None, parts))
    assert kept[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert kept[3]["tool_call_id"] == "1"


def test_messages_are_not_changed() -> None:
    message = {"role": "user", "content": None, "name": "x"}
    normalise_messages([message])
    assert message == {"role": "user", "content": None, "name": "x"}


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "[1]", "'image_url'"),
        ({"role": "user", "content": [{"text": "a"}]}, "[0]", "None"),
        ({"role": "user", "content": ["a"]}, "[0]", "'str'"),
        ({"role": "user", "content": [{"type": "text", "text": 3}]}, "[0]", "no text"),
        ({"role": "user", "content": 3}, "content", "int"),
        ({"role": "user", "content": {"type": "text"}}, "content", "dict"),
        ({"role": "user", "content": "a\ud800"}, "content", "surrogate"),
        ({"role": "user", "content": [{"type": "text", "text": "\udfff"}]}, "[0]", "surrogate"),
        ({"role": "user"}, "messages[1]", "content"),
        ({"role": None, "content": "a"}, "messages[1]", "role"),
        ({"content": "a"}, "messages[1]", "role"),
        ("user: hi", "messages[1]", "role"),
    ],
)
def test_bad_messages_name_the_place(message: Any, field: str, words: str) -> None:
    error = refused(normalise_messages, [USER[0], message])
    assert error.code == "bad_messages"
    assert error.field is not None
    assert error.field.startswith("messages[1]")
    assert error.field.endswith(field)
    assert words in str(error)


def test_a_surrogate_where_no_one_looks_fails_only_the_request() -> None:
    template = "{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    error = refused(chat_ids, byte_level(template=template), [{**USER[0], "name": "\ud800"}], think=False)
    assert error.code == "bad_template"


def test_no_template_says_how_to_go_on() -> None:
    error = refused(prompt_ids, byte_level(template=None), request(messages=USER))
    assert error.code == "bad_template"
    assert "raw prompt" in str(error)


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('Only user\nand assistant roles!') }}", "Only user and assistant roles!"),
        ("{{ messages[0].nothing.deeper }}", "nothing"),
        ("{% for %}", "Expected"),
        ("{{ 1 / 0 }}", "division"),
        ("{{ 'a' + 1 }}", "str"),
        ("{{ ('x' * 5000) | no_such_filter }}", "no_such_filter"),
    ],
)
def test_a_failing_template_is_the_requests_error(template: str, words: str) -> None:
    error = refused(prompt_ids, byte_level(template=template), request(messages=USER))
    assert error.code == "bad_template"
    assert words in str(error)
    assert len(str(error)) < 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% include '%s' %}",
        "{{ open('%s').read() }}",
        "{{ messages.append(messages[0]) }}",
    ],
)
def test_a_template_cannot_reach_files(template: str, tmp_path: Any) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    source = template.replace("%s", str(secret))
    assert refused(prompt_ids, byte_level(template=source), request(messages=USER)).code == "bad_template"


def test_an_empty_rendering_is_an_empty_prompt() -> None:
    assert refused(prompt_ids, byte_level(template="{# nothing #}"), request(messages=USER)).code == "bad_prompt"


def test_older_template_calls_are_retried_without_the_new_words() -> None:
    def older(messages: Any, tokenize: bool = False, add_generation_prompt: bool = False) -> list[int]:
        assert tokenize
        assert add_generation_prompt
        return [1, 2, 3]

    assert prompt_ids(Scripted(older), request(messages=USER)) == (1, 2, 3)

    def always_ids(messages: Any, *, add_generation_prompt: bool, enable_thinking: bool) -> list[int]:
        return [int(enable_thinking)]

    for think in (True, False):
        assert prompt_ids(Scripted(always_ids), request(messages=USER, think=think)) == (int(think),)

    def broken(messages: Any, **kwargs: Any) -> Any:
        raise TypeError("always\nthis")

    error = refused(prompt_ids, Scripted(broken), request(messages=USER))
    assert error.code == "bad_template"
    assert "always this" in str(error)


def test_errors_of_our_own_pass_unchanged() -> None:
    mine = RequestError("mine", code="too_long")

    def call(messages: Any, **kwargs: Any) -> Any:
        raise mine

    assert refused(prompt_ids, Scripted(call), request(messages=USER)) is mine


@pytest.mark.parametrize(
    "encoding",
    [
        [1, 2],
        (1, 2),
        {"input_ids": [1, 2]},
        {"input_ids": [[1, 2]], "attention_mask": [[1, 1]]},
        SimpleNamespace(input_ids=(1, 2)),
        SimpleNamespace(input_ids=np.array([[1, 2]])),
        [[1, 2]],
        ([1, 2],),
        np.array([1, 2], dtype=np.uint32),
        np.array([[1, 2]]),
        [np.array([1, 2])],
        [np.int64(1), np.int32(2)],
    ],
)
def test_accepted_encodings(encoding: Any) -> None:
    ids = encoding_ids(encoding)
    assert ids == (1, 2)
    assert all(type(item) is int for item in ids)


@pytest.mark.parametrize(
    "encoding",
    [
        None,
        "text",
        b"\x01\x02",
        7,
        np.array(7),
        {"ids": [1]},
        {1, 2},
        [1, True],
        [True],
        [1.0, 2.0],
        np.array([1.5, 2.0]),
        np.array([True, False]),
        [1, None],
        ["1", "2"],
        [1, -2],
        [[1], [2]],
        [[[1, 2]]],
        iter([1, 2]),
    ],
)
def test_refused_encodings(encoding: Any) -> None:
    assert refused(encoding_ids, encoding).code == "bad_template"


@pytest.mark.parametrize("encoding", [[], (), [[]], {"input_ids": []}, np.array([], dtype=np.int64)])
def test_empty_encodings(encoding: Any) -> None:
    assert refused(encoding_ids, encoding).code == "bad_prompt"


def test_given_ids() -> None:
    tokenizer = byte_level()
    last = tokenizer.vocab_size - 1
    assert prompt_ids(tokenizer, request(token_ids=(0, 5, last))) == (0, 5, last)
    for bad in ((1, last + 1), (1, 1 << 70)):
        error = refused(prompt_ids, tokenizer, request(token_ids=bad))
        assert (error.code, error.field) == ("bad_prompt", "token_ids[1]")
    for never in ((1, -1), (1, True), (1, 2.0), (1, None)):  # no request can be made of these
        assert refused(request, token_ids=never).code == "bad_prompt"
    assert refused(prompt_ids, tokenizer, request(token_ids=())).code == "bad_prompt"


def test_bad_raw_text() -> None:
    assert refused(prompt_ids, byte_level(), request(raw_prompt="")).code == "bad_prompt"
    assert refused(request, raw_prompt="a\ud800b").code == "bad_prompt"
    bos = byte_level_with_bos()
    assert prompt_ids(bos, request(raw_prompt="")) == (bos.bos_id,)


def test_no_messages() -> None:
    assert refused(prompt_ids, byte_level(), request(messages=())).code == "bad_messages"


def test_thousands_of_messages() -> None:
    turns = tuple({"role": "user" if i % 2 == 0 else "assistant", "content": f"turn {i}"} for i in range(4000))
    tokenizer = byte_level()
    ids = prompt_ids(tokenizer, request(messages=turns))
    assert ids.count(tokenizer.inner.convert_tokens_to_ids("<|im_end|>")) == 4000
