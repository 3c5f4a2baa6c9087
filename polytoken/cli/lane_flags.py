"""Flags of single lanes: what they say, and the refusal of those that the lane at work would pass over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from polytoken.cli.output import drop_unset, lane_reason
from polytoken.errors import UsageError

if TYPE_CHECKING:
    from polytoken.events import RuntimeLoaded
    from polytoken.lanes.canvas.settings import CanvasSettings
    from polytoken.lanes.mtp.settings import MtpSettings

_MTP: Final = "Lane mtp"
_CANVAS: Final = "Lane canvas"


def _option(panel: str, text: str, **words: Any) -> Any:
    """An option whose default is not to be given."""
    return typer.Option(help=text, show_default=False, rich_help_panel=panel, **words)


# -- mtp ---------------------------------------------------------------------------------------------------------------

Depth = Annotated[int | None, _option(_MTP, "Drafts per window, or the most that the policy may choose (default: 3).")]
DepthPolicy = Annotated[str | None, _option(_MTP, "fixed, streak or cost: who chooses the depth (default: fixed).")]
Drafter = Annotated[
    str | None, _option(_MTP, "head, lookup, model, lookup+head or lookup+model: who drafts (default: head).")
]
DraftModel = Annotated[str | None, _option(_MTP, "The second model of --drafter model, named as --model is.")]
HistoryWindow = Annotated[
    int | None, _option(_MTP, "Last prompt tokens that the head's history is built from (default: all).")
]
LookupGram = Annotated[int | None, _option(_MTP, "Tokens that must agree before any are copied (default: 6).")]
LookupLongest = Annotated[int | None, _option(_MTP, "Most tokens copied at once (default: 24).")]

# -- canvas ------------------------------------------------------------------------------------------------------------

Policy = Annotated[
    str | None, _option(_CANVAS, "auto, rolling or block: how a canvas becomes text (default: the checkpoint's own).")
]
CanvasLength = Annotated[int | None, _option(_CANVAS, "Tokens denoised together (default: the checkpoint's).")]
PipelineDepth = Annotated[
    int | None, _option(_CANVAS, "Rows whose layers run side by side; 1 needs the least memory (default: 2).")
]
MaxBatchTokens = Annotated[
    int | None, _option(_CANVAS, "Canvas positions of one step over all requests (default: 1024).")
]
VocabChunkSize = Annotated[int | None, _option(_CANVAS, "Tokens per sweep of the output head (default: 4096).")]
MaxDenoisingSteps = Annotated[
    int | None,
    _option(_CANVAS, "Denoises of an answer (rolling) or of a canvas (block), for requests that name no number."),
]
CommitFailureBudget = Annotated[
    float | None,
    _option(_CANVAS, "Rolling: summed risk that a commit stays below, above 0 (default: the checkpoint's)."),
]
CommitTopK = Annotated[int | None, _option(_CANVAS, "Rolling: likeliest tokens that are drawn from and judged.")]
CommitMinP = Annotated[
    float | None, _option(_CANVAS, "Rolling: least share of the best token's probability, between 0 and 1.")
]
CommitTargetConfidence = Annotated[
    float | None, _option(_CANVAS, "Rolling: tokens below this confidence are never committed, except by a jump.")
]

_MTP_FLAGS: Final = frozenset(
    {"depth", "depth_policy", "drafter", "draft_model", "history_window", "lookup_gram", "lookup_longest"}
)
_SAMPLING_ON_CANVAS: Final = frozenset({"repetition_penalty"})


@dataclass(frozen=True, kw_only=True)
class LaneFlags:
    """The flags of single lanes as they were given, each under its name; None for one that was not."""

    depth: int | None = None
    depth_policy: str | None = None
    drafter: str | None = None
    draft_model: str | None = None
    history_window: int | None = None
    lookup_gram: int | None = None
    lookup_longest: int | None = None
    policy: str | None = None
    canvas_length: int | None = None
    pipeline_depth: int | None = None
    max_batch_tokens: int | None = None
    vocab_chunk_size: int | None = None
    max_denoising_steps: int | None = None
    commit_failure_budget: float | None = None
    commit_top_k: int | None = None
    commit_min_p: float | None = None
    commit_target_confidence: float | None = None

    @property
    def given(self) -> Mapping[str, Any]:
        """Name and value of every flag that was given."""
        return {item.name: value for item in fields(self) if (value := getattr(self, item.name)) is not None}

    def engine_options(self, lane: str) -> dict[str, Any]:
        """The members of `EngineOptions` that these flags are about, for a `--lane` of this name.

        Raises:
            UsageError: a value is wrong, or no checkpoint could make a flag have an effect.
        """
        owners: dict[str, str] = {}
        for name in self.given:
            owners.setdefault(owner_of(name), name)
        if len(owners) > 1:
            one, other = owners.values()
            raise UsageError(
                f"{flag_of(one)} ({owner_of(one)} lane) excludes {flag_of(other)} ({owner_of(other)} lane)",
                field=flag_of(one),
            )
        if lane != "auto":
            self.check(lane, "--lane says so")
        return {"mtp": self._mtp(), "draft_model": self.draft_model, "canvas": self._canvas()}

    def check(self, lane: str, why: str) -> None:
        """Refuse a flag of another lane than the one at work."""
        for name in self.given:
            if owner_of(name) != lane:
                flag = flag_of(name)
                raise UsageError(f"{flag} belongs to the {owner_of(name)} lane; this is {lane} ({why})", field=flag)

    def check_loaded(self, loaded: RuntimeLoaded, sampling: Iterable[str] = ()) -> None:
        """Refuse what the lane that was chosen passes over: flags of others, and sampling members it has no use for."""
        self.check(loaded.lane, lane_reason(loaded))
        for name in sampling if loaded.lane == "canvas" else ():
            if name not in _SAMPLING_ON_CANVAS:
                flag = flag_of(name)
                raise UsageError(
                    f"{flag} has no effect on the canvas lane, whose policy draws by a law of its own", field=flag
                )

    def _mtp(self) -> MtpSettings:
        from polytoken.lanes.mtp.settings import LookupSettings, MtpSettings  # noqa: PLC0415

        lookup = LookupSettings(**drop_unset({"gram": self.lookup_gram, "longest": self.lookup_longest}))
        named = {"policy": self.depth_policy, "drafter": self.drafter}
        settings = MtpSettings(
            lookup=lookup, history_window=self.history_window, **drop_unset({"depth": self.depth, **named})
        )
        copies = "copies have lengths of their own" if settings.network is None else ""
        no_head = "" if settings.network == "head" else "only a head has such a history"
        no_copies = "" if settings.copies else "it copies nothing; lookup, lookup+head and lookup+model do"
        for name, idle in (
            ("depth", copies),
            ("depth_policy", copies),
            ("history_window", no_head),
            ("lookup_gram", no_copies),
            ("lookup_longest", no_copies),
        ):
            if idle and name in self.given:
                flag = flag_of(name)
                raise UsageError(f"{flag} has no effect with --drafter {settings.drafter}: {idle}", field=flag)
        if settings.network == "model" and self.draft_model is None:
            raise UsageError(f"--drafter {settings.drafter} needs --draft-model", field="--draft-model")
        return settings

    def _canvas(self) -> CanvasSettings:
        from polytoken.lanes.canvas.settings import CanvasSettings  # noqa: PLC0415

        renamed = {"vocab_chunk_size": "vocab_chunk"}
        return CanvasSettings(
            **{renamed.get(name, name): value for name, value in self.given.items() if owner_of(name) == "canvas"}
        )


def owner_of(name: str) -> str:
    """The lane that a flag belongs to."""
    return "mtp" if name in _MTP_FLAGS else "canvas"


def flag_of(name: str) -> str:
    """A flag as it is typed."""
    return "--" + name.replace("_", "-")
