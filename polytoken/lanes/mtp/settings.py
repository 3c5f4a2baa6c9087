"""How the MTP lane is told to speculate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal, get_args

from polytoken.errors import UsageError

DrafterName = Literal["head", "lookup", "model", "lookup+head", "lookup+model"]
PolicyName = Literal["fixed", "streak", "cost"]

MAX_DEPTH: Final = 16
MAX_COPY: Final = 64


@dataclass(frozen=True, kw_only=True)
class LookupSettings:
    """How drafts are copied from a row's own text.

    Attributes:
        gram: ids that must agree before anything is copied.
        longest: most ids copied at once.
    """

    gram: int = 6
    longest: int = 24

    def __post_init__(self) -> None:
        _check("--lookup-gram", self.gram, 1, 32)
        _check("--lookup-longest", self.longest, 1, MAX_COPY)


@dataclass(frozen=True, kw_only=True)
class MtpSettings:
    """Settings of the lane.

    Attributes:
        depth: drafts per window, or the most that the policy may choose.
        policy: `fixed`; `streak` goes up after full acceptance and down after early rejection; `cost` measures time and
            acceptance and chooses, no drafts at all included. What `cost` chooses depends on the clock: the law of the
            output does not, but a seed gives the same text only with the other two (or with greedy decoding).
        drafter: `head`, `lookup` or `model`, or one of `lookup+head` and `lookup+model`, which copy where they can.
        history_window: prompt tokens that the head's history is built from, counted from the prompt's end; None for
            all. A prompt longer than the window reuses banked prefixes only up to where its window begins.
        lookup: how drafts are copied.
    """

    depth: int = 3
    policy: PolicyName = "fixed"
    drafter: DrafterName = "head"
    history_window: int | None = None
    lookup: LookupSettings = field(default_factory=LookupSettings)

    def __post_init__(self) -> None:
        _check("--depth", self.depth, 1, MAX_DEPTH)
        _choice("--depth-policy", self.policy, get_args(PolicyName))
        _choice("--drafter", self.drafter, get_args(DrafterName))
        if self.history_window is not None:
            _check("--history-window", self.history_window, 1, None)

    @property
    def copies(self) -> bool:
        """Whether drafts are copied from the text."""
        return "lookup" in self.drafter

    @property
    def network(self) -> Literal["head", "model"] | None:
        """What drafts when nothing is copied."""
        last = self.drafter.rpartition("+")[2]
        return "head" if last == "head" else "model" if last == "model" else None


def _check(flag: str, value: object, low: int, high: int | None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= low and (high is None or value <= high)
    if not ok:
        bound = f"from {low} to {high}" if high is not None else f"of at least {low}"
        raise UsageError(f"{flag} must be an integer {bound}, not {value!r}", field=flag)


def _choice(flag: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{flag} must be one of {', '.join(allowed)}, not {value!r}", field=flag)
