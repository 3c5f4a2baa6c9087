"""What must be equal before a stored state may be reused."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True)
class StateIdentity:
    """Everything besides the token ids that the bits of a decoding state depend on. Equal or not: no wildcards.

    Attributes:
        checkpoint: hash of weights, configuration and adapter.
        lane: name of the lane that encodes (`ar`, `mtp`, `canvas`).
        grid: tokens per prefill chunk; states are reused at its multiples and at whole prompts.
        numerics: compute dtype, products, storage of keys and values, version of the code that encodes.
        hidden_variant: which hidden rows are stored beside the state, None for none.
        template_hash: hash of tokenizer and chat template.
        history_policy: what a draft head's history holds, None without a head.
        free: whether how tokens are cut into forwards changes no bit, so that a state may be gone on from wherever it
            ends. If not, states are gone on from at the grid alone.
    """

    checkpoint: str
    lane: str
    grid: int
    numerics: str = ""
    hidden_variant: str | None = None
    template_hash: str | None = None
    history_policy: str | None = None
    free: bool = False

    def __post_init__(self) -> None:
        if self.grid < 1:
            raise ValueError(f"the chunk grid must be at least one token, not {self.grid}")

    def differing(self, other: StateIdentity) -> tuple[str, ...]:
        """Names of the fields in which the two differ."""
        return tuple(f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name))
