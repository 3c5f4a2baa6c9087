"""What the gate looks at: prompts, context lengths, depths, seeds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polytoken.errors import UsageError
from polytoken.oracle.plan import check_sampling
from polytoken.oracle.subject import Ids, Subject
from polytoken.request import SamplingParams

_TEXTS: Final = (
    "The lighthouse keeper counted the ships that passed before the storm. ",
    "def is_prime(n: int) -> bool:\n    return n > 1 and all(n % k for k in range(2, n))\n",
    "1 2 3 4 5 6 7 8 1 2 3 4 5 6 7 8 ",
)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """The cases of a gate.

    Attributes:
        depths: drafts per window; () skips everything about speculation.
        contexts: prompt lengths in tokens; the longest is cut to what the model and `new_tokens` allow.
        prompts: how many texts of those above.
        new_tokens: of every answer.
        seeds: draws of the sampled law.
        temperature, top_p, top_k: of the sampled law.
        fixed: whether to try the fixed-shape mode too.

    Raises:
        UsageError: a value that makes no gate.
    """

    depths: tuple[int, ...] = (1, 2, 3)
    contexts: tuple[int, ...] = (7, 64, 300)
    prompts: int = 2
    new_tokens: int = 32
    seeds: int = 24
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 20
    fixed: bool = False

    def __post_init__(self) -> None:
        for flag, values, least in (
            ("--depths", self.depths, 1),
            ("--contexts", self.contexts, 2),
            ("--prompts", (self.prompts,), 1),
            ("--new-tokens", (self.new_tokens,), 2),
            ("--seeds", (self.seeds,), 2),
        ):
            if any(value < least for value in values):
                raise UsageError(f"{flag} must be at least {least}", field=flag)
        if not self.contexts:
            raise UsageError("--contexts needs at least one length", field="--contexts")
        if self.prompts > len(_TEXTS):
            raise UsageError(f"--prompts: there are {len(_TEXTS)} texts", field="--prompts")

        check_sampling(self.temperature, top_p=self.top_p, top_k=self.top_k)

    @property
    def sampling(self) -> SamplingParams:
        """How the sampled law is drawn from."""
        return SamplingParams(self.temperature, top_p=self.top_p, top_k=self.top_k)

    def prompt_ids(self, subject: Subject) -> list[tuple[str, Ids]]:
        """Name and ids of every prompt, texts by context lengths."""
        most = subject.max_positions - self.new_tokens - max(self.depths, default=0) - 2
        lengths = sorted({min(length, most) for length in self.contexts})
        return [
            (f"text {number}, {length} tokens", _cut(subject, text, length))
            for number, text in enumerate(_TEXTS[: self.prompts], start=1)
            for length in lengths
        ]


def _cut(subject: Subject, text: str, length: int) -> Ids:
    """Exactly `length` ids of a repeated text."""
    ids = subject.tokenizer.encode(text, add_special_tokens=False)
    return subject.checked((ids * (length // len(ids) + 1))[:length])
