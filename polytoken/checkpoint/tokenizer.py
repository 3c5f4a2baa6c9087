"""The checkpoint's tokenizer: text to ids and back, chat template, and the ids that end an answer.

A thin frozen face over transformers' fast tokenizer. Encoding and decoding go straight to the `tokenizers` object, so
that nothing tidies the text on the way back and no limit cuts it on the way in.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from polytoken.checkpoint.config import CONFIG, read_generation, read_json_object
from polytoken.errors import CheckpointError

TOKENIZER: Final = "tokenizer.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
TEMPLATE: Final = "chat_template.jinja"
_INCLUDE: Final = re.compile(r"\s*\{%-?\s*(include|extends|import)\b[^%]*%\}\s*")
_TOKEN_KEYS: Final = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
LONG_CHARACTERS: Final = 4_000  # of longer texts, `encode` would stop every other thread for as long as it takes
# What of a rebuilt tokenizer must equal tokenizer.json; the post-processor may differ (begin-token settings).
_PARTS: Final = ("normalizer", "pre_tokenizer", "decoder")


@dataclass(frozen=True)
class Tokenizer:
    """Text to ids and back.

    Attributes:
        eos_ids: ids that end an answer, in the order generation_config.json, config.json, its text_config, the
            tokenizer's own; each once.
        bos_id, pad_id: None when the checkpoint has none.
        vocab_size: number of ids including added tokens (the network may have more rows).
        special_ids: control tokens, which `decode(..., skip_special_tokens=True)` leaves out.
        chat_template: Jinja text, or None.
        identity: SHA-256 over tokenizer.json and the template.
    """

    eos_ids: tuple[int, ...]
    bos_id: int | None
    pad_id: int | None
    vocab_size: int
    special_ids: frozenset[int]
    chat_template: str | None
    identity: str
    fast: Any = field(repr=False, compare=False)
    backend: Any = field(repr=False, compare=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of `text`; control tokens written out in it are recognised.

        `add_special_tokens` lets the tokenizer put its begin token in front where it does that; text that a chat
        template rendered carries its own and must be encoded with False.
        """
        if len(text) > LONG_CHARACTERS:
            (made,) = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            made = self.backend.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = made.ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `ids`, untouched by any tidying of spaces."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token(self, index: int) -> str | None:
        """The vocabulary's own spelling of one id, or None outside the vocabulary."""
        piece: str | None = self.backend.id_to_token(index)
        return piece

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> list[int]:
        """Ids of the rendered conversation; keyword arguments go to the template as they are.

        Raises:
            CheckpointError: `no_chat_template`.
        """
        return self.encode(self.render_chat_template(messages, **kwargs), add_special_tokens=False)

    def render_chat_template(self, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
        """Text of the rendered conversation. Jinja's own errors pass through.

        Raises:
            CheckpointError: `no_chat_template`.
        """
        if self.chat_template is None:
            raise CheckpointError("this checkpoint has no chat template", code="no_chat_template", field=TEMPLATE)
        text: str = self.fast.apply_chat_template(list(messages), tokenize=False, **kwargs)
        return text


def ids_of(value: Any, where: str) -> tuple[int, ...]:
    """An id, a list of ids or null, as configs write end-of-text ids.

    Raises:
        CheckpointError: `bad_config` for anything else.
    """
    items = value if isinstance(value, list) else [] if value is None else [value]
    if any(type(item) is not int or item < 0 for item in items):
        raise CheckpointError(f"{where} is {value!r}, not a token id or a list of them", code="bad_config", field=where)
    return tuple(items)


def _quietly_import() -> Any:
    """transformers, without its advice about missing frameworks."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers  # noqa: PLC0415  (two seconds that `inspect` and `models` need not pay)

    return transformers


def _sections(backend: Any) -> list[bytes | None]:
    """The named parts in the library's own serial form (the vocabulary, which is large, is not among them)."""
    parts = [getattr(backend, name) for name in _PARTS]
    return [None if part is None else part.__getstate__() for part in parts]


def _brief(fault: Exception) -> str:
    """An error of another library in one short line."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())[:160]}"


def _token_text(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: text, or an object with `content`."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _rebuild(directory: Path, settings: Mapping[str, Any]) -> Any:
    """A fast tokenizer from tokenizer.json itself, with the special tokens of tokenizer_config.json."""
    transformers = _quietly_import()
    tokens = {key: text for key in _TOKEN_KEYS if (text := _token_text(settings.get(key))) is not None}
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(directory / TOKENIZER), **tokens)


def _load_fast(directory: Path, settings: Mapping[str, Any]) -> Any:
    """transformers' tokenizer for the folder, held against tokenizer.json."""
    import tokenizers  # noqa: PLC0415

    path = directory / TOKENIZER
    reference = None
    if path.exists():
        try:
            reference = tokenizers.Tokenizer.from_file(str(path))
        except Exception as fault:  # the library raises bare Exception
            raise CheckpointError(
                f"{path} cannot be read ({_brief(fault)})", code="bad_tokenizer", field=TOKENIZER
            ) from None
    transformers = _quietly_import()
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        fast = transformers.AutoTokenizer.from_pretrained(
            str(directory), trust_remote_code=False, local_files_only=True
        )
    except Exception as fault:
        # An unknown tokenizer class, code of its own, a config the library does not know: tokenizer.json is enough.
        if reference is None:
            raise CheckpointError(
                f"no tokenizer can be built from {directory} ({_brief(fault)}); it needs a {TOKENIZER}",
                code="bad_tokenizer",
                field=TOKENIZER,
            ) from None
        fast = None
    finally:
        transformers.logging.set_verbosity(verbosity)
    backend = getattr(fast, "backend_tokenizer", None)
    if reference is not None and (backend is None or _sections(backend) != _sections(reference)):
        fast = _rebuild(directory, settings)
    elif backend is None:
        raise CheckpointError(
            f"{directory} has a slow tokenizer only; it needs a {TOKENIZER}", code="bad_tokenizer", field=TOKENIZER
        )
    return fast


def _template(directory: Path, settings: Mapping[str, Any]) -> Any:
    """The chat template: the file beside the tokenizer before the entry in its config."""
    path = directory / TEMPLATE
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named templates
        template = {item["name"]: item["template"] for item in template if isinstance(item, Mapping)}
    if template is None and (directory / "chat_template.json").is_file():
        template = read_json_object(directory / "chat_template.json").get("chat_template")
    if isinstance(template, str) and _INCLUDE.fullmatch(template):
        raise CheckpointError(
            f"the chat template only refers to another file, and {path} is missing; fetch it",
            code="missing_file",
            field=TEMPLATE,
        )
    return template


def _first(*values: Any) -> int | None:
    return next((value for value in values if type(value) is int and value >= 0), None)


def _unique(groups: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(index for group in groups for index in group))


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of the checkpoint in `directory`; never runs its code, never asks the network.

    Raises:
        CheckpointError: `bad_tokenizer`, `bad_config`, `missing_file` (a template that refers to an absent file).
    """
    settings = read_json_object(directory / TOKENIZER_CONFIG) if (directory / TOKENIZER_CONFIG).exists() else {}
    config = read_json_object(directory / CONFIG) if (directory / CONFIG).exists() else {}
    nested = config.get("text_config")
    text_config = nested if isinstance(nested, dict) else {}
    generation = read_generation(directory)
    template = _template(directory, settings)
    fast = _load_fast(directory, settings)
    fast.chat_template = template
    backend = fast.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    own_eos = fast.eos_token_id
    eos_ids = _unique(
        [
            ids_of(generation.get("eos_token_id"), "generation_config.json: eos_token_id"),
            ids_of(config.get("eos_token_id"), "config.json: eos_token_id"),
            ids_of(text_config.get("eos_token_id"), "config.json: text_config.eos_token_id"),
            () if own_eos is None else (own_eos,),
        ]
    )
    special = {index for index, token in backend.get_added_tokens_decoder().items() if token.special}
    text = template.get("default") if isinstance(template, dict) else template
    digest = hashlib.sha256()
    path = directory / TOKENIZER
    digest.update(path.read_bytes() if path.exists() else backend.to_str().encode())
    digest.update(b"\0" + json.dumps(template, sort_keys=True).encode())
    return Tokenizer(
        eos_ids=eos_ids,
        bos_id=_first(fast.bos_token_id, generation.get("bos_token_id"), config.get("bos_token_id")),
        pad_id=_first(fast.pad_token_id, generation.get("pad_token_id"), config.get("pad_token_id")),
        vocab_size=backend.get_vocab_size(with_added_tokens=True),
        special_ids=frozenset(special | set(fast.all_special_ids)),
        chat_template=text if isinstance(text, str) else None,
        identity=digest.hexdigest(),
        fast=fast,
        backend=backend,
    )
