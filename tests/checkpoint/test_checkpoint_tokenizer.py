"""Tokenizers: the parts of tokenizer.json survive loading, ids that end an answer, templates (B01, B05, H06)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import tokenizers
from checkpoint_writers import byte_tokens, edit_json, tokenizer_metadata
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.checkpoint.gguf_tokenizer import build_tokenizer
from polytoken.checkpoint.tokenizer import LONG_CHARACTERS, Tokenizer, load_tokenizer
from polytoken.errors import CheckpointError
from polytoken.testkit.tiny import write_checkpoint

HELLO = [{"role": "user", "content": "hello"}]


def write(directory: Path, *, adds_bos: bool = False, pre: str = "smollm", **settings: Any) -> Path:
    """A folder with the two tokenizer files and a config."""
    directory.mkdir(exist_ok=True)
    metadata = {**tokenizer_metadata(pre=pre), "tokenizer.ggml.add_bos_token": adds_bos}
    built = build_tokenizer(metadata, max_positions=64)
    (directory / "tokenizer.json").write_text(built.tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps({**built.tokenizer_config, **settings}))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return directory


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write(tmp_path_factory.mktemp("shared")))


def refusal(directory: Path) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    return caught.value


# Round trip


@given(st.text(max_size=60))
@settings(deadline=None, max_examples=150)
def test_b05_any_text_comes_back(shared: Tokenizer, text: str) -> None:
    clean = text.encode("utf-8", "ignore").decode()
    assert shared.decode(shared.encode(clean)) == clean


@pytest.mark.parametrize("tidy", [True, False])
def test_b05_spaces_before_punctuation_stay(tmp_path: Path, tidy: bool) -> None:
    text = "a , b . c ? I 'm  here\t\r\n !"
    tokenizer = load_tokenizer(write(tmp_path, clean_up_tokenization_spaces=tidy))
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("part", ["pre_tokenizer", "decoder", "normalizer"])
def test_a_part_the_library_rebuilt_wrongly_is_taken_from_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    folder = write(tmp_path, pre="qwen2")
    import transformers  # noqa: PLC0415

    real = transformers.AutoTokenizer.from_pretrained

    def wrong(*args: Any, **options: Any) -> Any:
        fast = real(*args, **options)
        fresh = {
            "pre_tokenizer": tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
            "decoder": tokenizers.decoders.Fuse(),
            "normalizer": tokenizers.normalizers.NFD(),
        }[part]
        setattr(fast.backend_tokenizer, part, fresh)
        return fast

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", wrong)
    tokenizer = load_tokenizer(folder)
    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "नमस्ते दुनिया abc 123"
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.decode(tokenizer.encode(text)) == text and tokenizer.eos_ids == (2,)


def test_settings_for_training_do_not_cut_or_pad(folder: Path) -> None:
    edit_json(
        folder / "tokenizer.json",
        truncation={"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        padding={
            "strategy": {"Fixed": 8},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 2,
            "pad_type_id": 0,
            "pad_token": "<|c|>",
        },
    )
    tokenizer = load_tokenizer(folder)
    assert len(tokenizer.encode("abcdef")) == 6 and len(tokenizer.encode("a" * 200)) == 200


def test_loading_and_long_text_print_nothing(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.encode("a" * 500)
    tokenizer.apply_chat_template([{"role": "user", "content": "a" * 500}])
    out, err = capfd.readouterr()
    assert out == "" and err == ""


# Begin token


@pytest.mark.parametrize("adds_bos", [True, False])
def test_b01_begin_token_comes_once_on_every_path(tmp_path: Path, adds_bos: bool) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] }}<|c|>{% endfor %}"
    tokenizer = load_tokenizer(write(tmp_path, adds_bos=adds_bos, chat_template=template))
    messages = [{"role": "user", "content": "the end"}]
    ids = tokenizer.apply_chat_template(messages)
    assert tokenizer.bos_id == 1 and ids.count(1) == 1 and ids[0] == 1
    reference = tokenizer.fast.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert ids == reference
    assert tokenizer.encode("the end").count(1) == int(adds_bos)
    assert tokenizer.encode("the end", add_special_tokens=False).count(1) == 0


@settings(max_examples=20, deadline=None)
@given(text=st.text(min_size=1, max_size=40), adds=st.booleans())
def test_a_long_text_has_the_ids_of_its_words(shared: Tokenizer, text: str, adds: bool) -> None:
    """Long texts take another way through the library, which lets other threads run."""
    long = f"<|im_start|> {text} and" * (1 + LONG_CHARACTERS // len(text))
    assert len(long) > LONG_CHARACTERS
    assert shared.encode(long, add_special_tokens=adds) == shared.backend.encode(long, add_special_tokens=adds).ids


def test_control_tokens_in_text_are_ids_and_can_be_left_out(shared: Tokenizer) -> None:
    ids = shared.encode("<|b|>hi<|c|>")
    assert ids[0] == 1 and ids[-1] == 2 and shared.special_ids == {0, 1, 2}
    assert shared.decode(ids) == "<|b|>hi<|c|>" and shared.decode(ids, skip_special_tokens=True) == "hi"
    assert shared.token(1) == "<|b|>" and shared.token(10**6) is None


# Ids that end an answer


def test_eos_ids_are_a_union_in_a_stated_order(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    edit_json(folder / "config.json", eos_token_id=[5, 9], text_config={"eos_token_id": 11})
    assert load_tokenizer(folder).eos_ids == (7, 5, 9, 11, 2)


@pytest.mark.parametrize("value", ["x", -1, 1.5, True, [None], {"a": 1}])
def test_eos_ids_that_are_no_ids(folder: Path, value: Any) -> None:
    edit_json(folder / "config.json", eos_token_id=value)
    fault = refusal(folder)
    assert fault.code == "bad_config" and "eos_token_id" in str(fault)


def test_no_begin_or_pad_token(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", bos_token=None, pad_token=None)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id is None and tokenizer.pad_id is None


# Templates


def test_template_file_comes_before_the_entry(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("file")
    edit_json(folder / "tokenizer_config.json", chat_template="{% include 'chat_template.jinja' %}")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "file" and tokenizer.render_chat_template(HELLO) == "file"


def test_template_that_only_refers_to_an_absent_file(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template="{%- include 'chat_template.jinja' -%}\n")
    assert refusal(folder).field == "chat_template.jinja"


def test_named_templates_and_none(folder: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.chat_template == "plain" and tokenizer.render_chat_template(HELLO) == "plain"
    edit_json(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(folder).apply_chat_template(HELLO)
    assert caught.value.code == "no_chat_template"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch MARKER') }}",
        "{% include 'MARKER' %}{{ messages.clear() }}",
        "{{ messages.append(1) }}",
    ],
)
def test_h06_templates_run_in_a_sandbox(folder: Path, template: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    edit_json(folder / "tokenizer_config.json", chat_template="x" + template.replace("MARKER", str(marker)))
    with pytest.raises((jinja2.TemplateError, TypeError)):
        load_tokenizer(folder).render_chat_template([{"role": "user", "content": "x"}])
    assert not marker.exists()


# Checkpoints that transformers cannot or must not load


@pytest.mark.parametrize("where", ["tokenizer", "both"])
def test_h06_tokenizer_code_never_runs(folder: Path, where: str, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').write('ran')\nclass Evil: pass\n")
    edit_json(
        folder / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["evil.Evil", "evil.Evil"]},
        tokenizer_class="Evil",
    )
    if where == "both":
        edit_json(folder / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.Evil"})
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode("the x")) == "the x" and not marker.exists()
    assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1


def test_unknown_class_falls_back_to_the_file(folder: Path) -> None:
    edit_json(folder / "tokenizer_config.json", tokenizer_class="NoSuchTokenizer", bos_token={"content": "<|b|>"})
    edit_json(folder / "config.json", model_type="no-such-model")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.bos_id == 1 and tokenizer.decode(tokenizer.encode("é")) == "é"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]"])
def test_broken_tokenizer_file(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    assert refusal(folder).code == "bad_tokenizer"


def test_no_tokenizer_at_all(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert refusal(tmp_path).code == "bad_tokenizer"


def test_identity_follows_content_and_template(tmp_path: Path) -> None:
    first = load_tokenizer(write(tmp_path / "a")).identity
    assert load_tokenizer(write(tmp_path / "b")).identity == first
    assert load_tokenizer(write(tmp_path / "b", chat_template="x")).identity != first
    assert load_tokenizer(write(tmp_path / "b", adds_bos=True)).identity != first


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_every_familys_tokenizer(tmp_path: Path, family: Any) -> None:
    path = write_checkpoint(tmp_path, family).path
    tokenizer = load_tokenizer(path)
    reference = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    text = "the naïve 😀 café\n\tx = 12"
    assert tokenizer.encode(text) == reference.encode(text).ids
    assert tokenizer.vocab_size == reference.get_vocab_size() and tokenizer.eos_ids and tokenizer.chat_template
    assert len(byte_tokens()) == 256
