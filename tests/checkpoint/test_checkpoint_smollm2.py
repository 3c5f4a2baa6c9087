"""The real model: what pull makes of it, its tokenizer on 200 texts, and a sentence out of it (B01, B05)."""

# ruff: noqa: RUF001  (strange characters are the point)

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten

from polytoken.checkpoint.inspect import inspect
from polytoken.checkpoint.manifest import check_files, read_manifest
from polytoken.checkpoint.plain import write_plain
from polytoken.checkpoint.runtime import Runtime, load_runtime
from polytoken.checkpoint.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.model

PIECES = (
    "Hello, world!", "  two  spaces ", "\ttab\t\ttabs", "line\nline\r\nline\r", " ", "\n\n\n", "a , b . c ? d !",
    "don't I'll we've", "12345 3.14159 1,000,000", "naïve café façade", "😀", "👨‍👩‍👧‍👦 family", "🇮🇳🇯🇵", "e\u0301 vs é",
    "नमस्ते दुनिया", "हिन्दी में क्ष", "你好，世界", "こんにちは、世界", "안녕하세요", "مرحبا بالعالم", "שלום",
    "def f(x):\n    return x ** 2\n", "if (a && b) { c[0] = '\\n'; }", "<div class=\"x\">&amp;</div>",
    "SELECT * FROM t WHERE a = 'b';", "{\"k\": [1, 2.5e-3, null]}", "https://example.org/a?b=c#d", "a_b-c.d/e\\f",
    "ΑΒΓ αβγ ∑∫√", "\u200b\u00a0\ufeff", "\x00\x01\x7f", "𝔘𝔫𝔦𝔠𝔬𝔡𝔢", "Ġ ▁ ## @@", "UPPER lower MiXeD",
    "ไทยไม่มีช่องว่าง", "O'Neill—“quoted” … end", "x" * 200, " " * 40, "\n \n  \n", "<|not_special|>",
)  # fmt: skip
TEXTS = [*PIECES, *(a + b for i, a in enumerate(PIECES) for b in PIECES[i + 1 : i + 6])]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return load_tokenizer(smollm2)


@pytest.fixture(scope="module")
def runtime(smollm2: Path) -> Runtime:
    return load_runtime(smollm2)


def test_there_are_200_texts() -> None:
    assert len(set(TEXTS)) >= 200


def test_b05_texts_come_back(tokenizer: Tokenizer) -> None:
    wrong = [text for text in TEXTS if tokenizer.decode(tokenizer.encode(text)) != text]
    assert wrong == []


def test_b01_begin_token_comes_once_where_the_template_writes_it(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    reference = tokenizer.fast.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    assert ids == reference and ids[0] == 1 and ids[1] != 1
    assert 1 not in tokenizer.encode("plain text")  # this tokenizer adds none of its own


def test_ids_known_of_this_model(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    assert tokenizer.eos_ids == (2,) and tokenizer.bos_id == 1 and tokenizer.vocab_size == 49_152
    assert tokenizer.special_ids == set(range(17))


def test_stored_files_are_as_the_manifest_says(smollm2: Path) -> None:
    manifest = read_manifest(smollm2)
    assert manifest is not None and manifest.tensor_count == 694 and manifest.parameters == 134_515_008
    check_files(smollm2, manifest, hashes=True)


def test_inspect(smollm2: Path) -> None:
    said = inspect("smollm2-135m")
    assert said.directory == str(smollm2) and said.supported and said.tied and said.chat_template
    assert (said.layers, said.hidden_size, said.heads, said.kv_heads, said.vocab_size) == (30, 576, 9, 3, 49_152)
    assert said.quantisation == "4-bit affine, group 32; 1 module at 8-bit" and said.positions == 8192


def test_plain_copy_gives_other_programs_the_same_numbers(smollm2: Path, runtime: Runtime, tmp_path: Path) -> None:
    out = write_plain(smollm2, tmp_path / "plain")
    network, _ = mlx_lm.utils.load_model(out)
    ids = mx.array([runtime.tokenizer.encode("The capital of France is")])
    ours = runtime.model.project(runtime.model.forward(ids, runtime.model.make_cache()).post)
    assert mx.allclose(network(ids), ours, atol=1e-4).item()
    stored = dict(tree_flatten(network.parameters()))
    mine = dict(tree_flatten(runtime.model.network.parameters()))
    assert stored.keys() == mine.keys() and all(mx.array_equal(stored[name], mine[name]).item() for name in mine)


def test_it_knows_the_capital_of_france(runtime: Runtime) -> None:
    ids = runtime.tokenizer.encode("The capital of France is")
    cache, answer, step = runtime.model.make_cache(), [], mx.array([ids])
    for _ in range(2):
        hidden = runtime.model.forward(step, cache, keep=1)
        token = int(mx.argmax(runtime.model.project(hidden.post)[0, -1]).item())
        answer.append(token)
        step = mx.array([[token]])
    assert runtime.tokenizer.decode(answer) == " Paris."
