"""What the text layer needs of a tokenizer; `polytoken.checkpoint.tokenizer` offers it, and so can a test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """A tokenizer that belongs to one checkpoint. Equal calls give equal results for its whole life."""

    @property
    def bos_id(self) -> int | None: ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: a valid id lies in [0, vocab_size)."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `decode` leaves out under `skip_special_tokens`."""
        ...

    @property
    def chat_template(self) -> str | None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> Any: ...

    def render_chat_template(self, messages: Sequence[Any], **kwargs: Any) -> str:
        """The text whose ids `apply_chat_template` gives."""
        ...
