"""Small real tokenizers, trained on the spot, behind the interface that the text layer expects."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

CORPUS = (
    "The quick brown fox jumps over the lazy dog. It isn't late; we've time, haven't we? No! ",
    "def main(argv):\n\treturn {'key': [1, 2, 3]}  # comment\r\n\n    if x < 10 and y >= 20:\n        pass\n",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Größe, façade, naïve, œuvre. ",
    "नमस्ते दुनिया, यह एक परीक्षण है। 你好，世界。今天天气很好。 こんにちは世界 ",  # noqa: RUF001
    "مرحبا بالعالم שלום עולם Привет мир 😀 👩‍👩‍👧‍👦 ",
)
SPECIALS = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and enable_thinking %}{{ '<think>\\n' }}{% endif %}{% endif %}"
)


class WrappedTokenizer:
    """A transformers tokenizer with the attributes of the text layer's port."""

    def __init__(self, inner: PreTrainedTokenizerFast) -> None:
        self.inner = inner
        self.bos_id: int | None = inner.bos_token_id
        self.vocab_size = len(inner)
        self.special_ids = frozenset(inner.all_special_ids)
        self.chat_template: str | None = inner.chat_template

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return list(self.inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return str(self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def apply_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> Any:
        return self.inner.apply_chat_template(messages, **kwargs)

    def render_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> str:
        return str(self.inner.apply_chat_template(messages, tokenize=False, **kwargs))


def wrap(backend: Backend, *, template: str | None = TEMPLATE, **kwargs: Any) -> WrappedTokenizer:
    inner = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=template, **kwargs
    )
    # `<extra>` is special to the decoder and unknown to `all_special_ids`; `<tool>` is added and not special.
    inner.add_tokens([AddedToken("<extra>", special=True, normalized=False)])
    inner.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return WrappedTokenizer(inner)


def _bos_processor(backend: Backend) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )


@cache
def byte_level_backend() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=list(SPECIALS),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@cache
def byte_level(*, template: str | None = TEMPLATE) -> WrappedTokenizer:
    """Byte-level BPE without automatic special tokens (GPT-2, Qwen, SmolLM2)."""
    return wrap(byte_level_backend(), template=template)


@cache
def byte_level_with_bos(*, template: str | None = TEMPLATE) -> WrappedTokenizer:
    """Byte-level BPE that puts a begin token in front of raw text (Llama 3)."""
    backend = Backend.from_str(byte_level_backend().to_str())
    backend.post_processor = _bos_processor(backend)
    return wrap(backend, template=template)


@cache
def byte_fallback() -> WrappedTokenizer:
    """Sentencepiece-like BPE: `▁` for spaces, byte tokens for the unknown, a leading space stripped (Llama 2)."""
    trained = Backend(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split(Regex("▁?[^▁]+|▁"), "isolated")
    latin = [text for text in CORPUS if text.isascii() or "ž" in text]
    trained.train_from_iterator(latin, trainers.BpeTrainer(vocab_size=400, show_progress=False))
    vocab, merges = _bpe_parts(trained)
    names = ["<unk>", *SPECIALS, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += sorted((name for name in vocab if name not in names), key=vocab.__getitem__)
    backend = Backend(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", *SPECIALS])
    backend.post_processor = _bos_processor(backend)
    return wrap(backend, unk_token="<unk>")


@cache
def metaspace() -> WrappedTokenizer:
    """Unigram with a Metaspace decoder and no bytes at all: unknown characters are lost (T5)."""
    backend = Backend(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=[*SPECIALS, "<unk>"], unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend, unk_token="<unk>")


@cache
def word_piece() -> WrappedTokenizer:
    """WordPiece with the clean-up of spaces before punctuation: its decode takes text back (BERT)."""
    backend = Backend(models.WordPiece(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=300, special_tokens=[*SPECIALS, "<unk>"], show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return wrap(backend, unk_token="<unk>", clean_up_tokenization_spaces=True)


def _bpe_parts(trained: Backend) -> tuple[dict[str, int], list[tuple[str, str]]]:
    import json  # noqa: PLC0415

    model = json.loads(trained.to_str())["model"]
    return model["vocab"], [(left, right) for left, right in model["merges"]]
