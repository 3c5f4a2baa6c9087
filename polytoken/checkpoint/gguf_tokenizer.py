"""Build tokenizer.json and tokenizer_config.json from a GGUF's `tokenizer.ggml.*` metadata (byte-level BPE only)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from polytoken.errors import CheckpointError

_CONTROL, _USER_DEFINED = 3, 4  # token types that are matched whole, before the merges

# Splits of the text before the merges, as the models' own tokenizers define them: which characters may share a token.
_QWEN2_SPLIT: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_SPLIT: Final = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(pattern: str) -> Callable[[], Any]:
    def build() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    return build


@dataclass(frozen=True)
class _Recipe:
    """What the name in `tokenizer.ggml.pre` stands for."""

    pre_tokenizer: Callable[[], Any]
    nfc: bool = False
    whole_words_first: bool = False  # a word that is a token is taken without consulting the merges
    adds_bos: bool = False  # when the file does not say


_RECIPES: Final[Mapping[str, _Recipe]] = {
    "smollm": _Recipe(_smollm),
    "gpt-2": _Recipe(_gpt2),
    "qwen2": _Recipe(_split(_QWEN2_SPLIT), nfc=True),
    "llama-bpe": _Recipe(_split(_LLAMA3_SPLIT), whole_words_first=True, adds_bos=True),
}


def _refuse(message: str, field: str) -> CheckpointError:
    return CheckpointError(message, code="unsupported_gguf", field=field)


def _token_id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    """The id stored under `tokenizer.ggml.<key>_token_id`, or None when the file names none."""
    field = f"tokenizer.ggml.{key}_token_id"
    value = metadata.get(field)
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(
            f"{field} is {value!r}, outside the vocabulary of {vocab_size} tokens", code="bad_gguf", field=field
        )
    return value


@dataclass(frozen=True)
class GGUFTokenizer:
    """The two files' contents and the ids that config.json and generation_config.json repeat."""

    tokenizer_json: str
    tokenizer_config: dict[str, Any]
    vocab_size: int
    bos_id: int | None
    eos_ids: tuple[int, ...]
    pad_id: int | None


def build_tokenizer(metadata: Mapping[str, Any], *, max_positions: int) -> GGUFTokenizer:
    """Turn GGUF tokenizer metadata into the texts of a normal fast tokenizer.

    Raises:
        CheckpointError: `unsupported_gguf` for a tokenizer model or pre-tokenizer that is not known by name (a guess
            would tokenize almost right, which is worse than a refusal); `bad_gguf` for contradictory lists.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise _refuse(f"tokenizer model {model!r} is not supported; byte-level BPE ('gpt2') is", "tokenizer.ggml.model")
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _RECIPES:
        raise _refuse(
            f"pre-tokenizer {pre!r} is not supported; known are {', '.join(sorted(_RECIPES))}", "tokenizer.ggml.pre"
        )
    recipe = _RECIPES[pre]
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(tokens, list) or not isinstance(merges, list) or not isinstance(types, list):
        raise CheckpointError(
            "the file lacks tokenizer.ggml.tokens, merges or token_type", code="bad_gguf", field="tokenizer.ggml"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ")) for merge in merges]
    if len(vocab) != len(tokens) or len(types) != len(tokens) or any(len(pair) != 2 for pair in pairs):
        raise CheckpointError(
            "the tokenizer lists contradict each other (a token twice, a type missing or a malformed merge)",
            code="bad_gguf",
            field="tokenizer.ggml",
        )
    ids = {key: _token_id(metadata, key, len(tokens)) for key in ("bos", "eos", "eot", "eom", "padding", "unknown")}

    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=recipe.whole_words_first))
    if recipe.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = recipe.pre_tokenizer()
    tokenizer.decoder = decoders.ByteLevel()
    # One call each, in id order: the ids exist already, so adding only marks the token as matched whole.
    for token, kind in zip(tokens, types, strict=True):
        if kind == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif kind == _USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos_id = ids["bos"]
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", recipe.adds_bos):
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
        )

    names = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "unknown": "unk_token"}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
    }
    for key, name in names.items():
        index = ids[key]
        if index is not None:
            config[name] = tokens[index]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str) and template:
        config["chat_template"] = template
    eos_ids = tuple(dict.fromkeys(index for key in ("eos", "eot", "eom") if (index := ids[key]) is not None))
    return GGUFTokenizer(
        tokenizer_json=tokenizer.to_str(pretty=False),
        tokenizer_config=config,
        vocab_size=len(tokens),
        bos_id=bos_id,
        eos_ids=eos_ids,
        pad_id=ids["padding"],
    )
