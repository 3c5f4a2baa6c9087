"""A tiny byte-level tokenizer in a release's files: 256 bytes, a few merges, the family's special tokens, fillers.

Every id of the model's vocabulary decodes to something, since a random network samples any of them. Bytes above 0x7F
are tokens of their own, so that characters broken across tokens happen all the time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from polytoken.testkit.container import write_json
from polytoken.testkit.templates import CHATML, CHATML_THINKING, GEMMA3, GEMMA4

# Whole characters (é, ö, the two halves of an emoji's four bytes) and a few frequent English pairs.
_MERGES = ("t h", "i n", "e r", "a n", "o n", "e n", "th e", "in g", "an d", "Ã ©", "Ã ¶", "ð Ł", "ĺ Ģ", "Ġ a", "Ġ the")


@dataclass(frozen=True)
class TokenizerStyle:
    """What distinguishes one family's tokenizer from another's.

    Attributes:
        special: special token -> id.
        fixed: ordinary token -> id that the family pins (Gemma's newline).
        bos, eos, pad: their texts.
        template: the chat template.
        turn_end: the mark that ends a turn, where that is another token than eos.
        template_file: whether the template lies in chat_template.jinja or inside tokenizer_config.json; both are met.
    """

    special: Mapping[str, int]
    bos: str | None
    eos: str
    pad: str
    template: str
    turn_end: str | None = None
    template_file: bool = False
    fixed: Mapping[str, int] | None = None

    @property
    def eos_ids(self) -> int | list[int]:
        """As a configuration has it: one id, or a list if the family also stops at the end of a turn."""
        eos = self.special[self.eos]
        return eos if self.turn_end is None else [eos, self.special[self.turn_end]]

    @property
    def bos_id(self) -> int | None:
        return None if self.bos is None else self.special[self.bos]

    @property
    def pad_id(self) -> int:
        return self.special[self.pad]


StyleName = Literal["llama", "qwen", "gemma3", "gemma4"]

STYLES: dict[StyleName, TokenizerStyle] = {
    "llama": TokenizerStyle(
        special={"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2},
        bos="<|im_start|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
        template=CHATML,
    ),
    # A Qwen release has its special tokens after the text; here that is right after the bytes and merges.
    "qwen": TokenizerStyle(
        special={
            token: 256 + len(_MERGES) + i
            for i, token in enumerate(
                ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>")
            )
        },
        bos=None,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        template=CHATML_THINKING,
    ),
    "gemma3": TokenizerStyle(
        special={"<pad>": 0, "<eos>": 1, "<bos>": 2, "<unk>": 3, "<start_of_turn>": 105, "<end_of_turn>": 106},
        fixed={"Ċ": 107},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        template=GEMMA3,
        turn_end="<end_of_turn>",
        template_file=True,
    ),
    "gemma4": TokenizerStyle(
        special={
            "<pad>": 0,
            "<eos>": 1,
            "<bos>": 2,
            "<unk>": 3,
            "<|think|>": 98,
            "<|channel>": 100,
            "<channel|>": 101,
            "<|turn>": 105,
            "<turn|>": 106,
        },
        fixed={"Ċ": 107},
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        template=GEMMA4,
        turn_end="<turn|>",
        template_file=True,
    ),
}

# Marks that text carries rather than controls: a release declares them as added but not special, so they stay visible.
_VISIBLE = frozenset({"<think>", "</think>", "<tool_call>", "</tool_call>"})


def smallest_vocabulary(style: StyleName) -> int:
    """The least vocabulary that holds the bytes, the merges and the special tokens."""
    return 256 + len(_MERGES) + len(STYLES[style].special)


def write_tokenizer(directory: Path, style: StyleName, *, vocab_size: int) -> None:
    """tokenizer.json, tokenizer_config.json and, where the family has it so, chat_template.jinja."""
    kind = STYLES[style]
    write_json(directory / "tokenizer.json", tokenizer_record(style, vocab_size=vocab_size))
    config: dict[str, object] = {
        "add_bos_token": False,
        "bos_token": kind.bos,
        "clean_up_tokenization_spaces": False,
        "eos_token": kind.eos,
        "model_max_length": 512,
        "pad_token": kind.pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if kind.template_file:
        (directory / "chat_template.jinja").write_text(kind.template, encoding="utf-8")
    else:
        config["chat_template"] = kind.template
    write_json(directory / "tokenizer_config.json", config)


def tokenizer_record(style: StyleName, *, vocab_size: int) -> dict[str, object]:
    """The content of tokenizer.json: byte-level BPE whose ids are exactly 0 .. vocab_size - 1."""
    kind = STYLES[style]
    if vocab_size < smallest_vocabulary(style):
        raise ValueError(f"a {style} tokenizer needs {smallest_vocabulary(style)} ids, got {vocab_size}")
    pinned = dict(kind.fixed or {})
    taken = {*kind.special.values(), *pinned.values()}
    free = iter(i for i in range(vocab_size) if i not in taken)
    text = [*_byte_alphabet(), *(merge.replace(" ", "") for merge in _MERGES)]
    vocab = {token: pinned.get(token, -1) for token in text}
    vocab = {token: next(free) if i < 0 else i for token, i in vocab.items()}
    # Special tokens stand in the model's vocabulary too, as in SmolLM2's and Gemma's files: the library heeds an added
    # token's "id" only if the model knows it, else it counts. Fillers are ordinary tokens that no text produces.
    vocab |= kind.special
    vocab |= {f"<|extra_{i}|>": i for i in free}
    added = [
        {
            "id": i,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": token not in _VISIBLE,
        }
        for token, i in sorted(kind.special.items(), key=lambda pair: pair[1])
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda pair: pair[1])),
            "merges": [merge.split(" ") for merge in _MERGES],
        },
    }


def _byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, in the order of the bytes.

    Printable Latin-1 stands for itself; the other 68 bytes are shifted to U+0100 and up.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(shifted)) for byte in range(256)]
