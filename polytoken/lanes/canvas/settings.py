"""What a user may set about the canvas lane, checked under the names of the flags that set it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from polytoken.lanes.canvas.knobs import check_count, check_number, refusal

if TYPE_CHECKING:  # settings are checked before anything is imported that needs MLX
    from polytoken.models.canvas import CommitSettings

PolicyName = Literal["auto", "rolling", "block"]
POLICIES: Final = ("auto", "rolling", "block")

# Settings that only the rolling policy reads, and the flags that set them.
_ROLLING_ONLY: Final[Mapping[str, str]] = {
    "commit_failure_budget": "--commit-failure-budget",
    "commit_top_k": "--commit-top-k",
    "commit_min_p": "--commit-min-p",
    "commit_target_confidence": "--commit-target-confidence",
}


@dataclass(frozen=True, kw_only=True)
class CanvasSettings:
    """Settings of the canvas lane; None keeps what the checkpoint says.

    Attributes:
        canvas_length: C, ids denoised together.
        policy: how a canvas becomes output: "rolling" commits prefixes of a canvas that rolls on, "block" denoises
            canvas after canvas as DiffusionGemma's own sampler does; "auto" is what the checkpoint was made for.
        commit_failure_budget, commit_top_k, commit_min_p, commit_target_confidence: of the rolling policy.
        max_denoising_steps: for requests that name none. Of an answer under the rolling policy, where it ends the
            answer; of one canvas under the block policy, whose schedule it is.
        repetition_penalty: for requests that name none.
        vocab_chunk: ids per sweep of the output head.
        pipeline_depth: rows whose layers run side by side; 1 needs the least memory.
        max_batch_tokens: canvas positions of one step over all rows.
    """

    canvas_length: int | None = None
    policy: PolicyName = "auto"
    commit_failure_budget: float | None = None
    commit_top_k: int | None = None
    commit_min_p: float | None = None
    commit_target_confidence: float | None = None
    max_denoising_steps: int | None = None
    repetition_penalty: float | None = None
    vocab_chunk: int = 4096
    pipeline_depth: int = 2
    max_batch_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise refusal("--policy", self.policy, f"must be one of {', '.join(POLICIES)}")
        for flag, count in (
            ("--canvas-length", self.canvas_length),
            ("--commit-top-k", self.commit_top_k),
            ("--max-denoising-steps", self.max_denoising_steps),
        ):
            if count is not None:
                check_count(flag, count)
        check_count("--vocab-chunk-size", self.vocab_chunk)
        check_count("--pipeline-depth", self.pipeline_depth)
        check_count("--max-batch-tokens", self.max_batch_tokens)
        for flag, number in (
            ("--commit-failure-budget", self.commit_failure_budget),
            ("--repetition-penalty", self.repetition_penalty),
        ):
            if number is not None:
                check_number(flag, number, low=0.0, open_low=True)
        for flag, share in (
            ("--commit-min-p", self.commit_min_p),
            ("--commit-target-confidence", self.commit_target_confidence),
        ):
            if share is not None:
                check_number(flag, share, low=0.0, high=1.0, open_low=True, open_high=True)

    def check_block(self) -> None:
        """Refuse settings that the block policy would pass over."""
        for name, flag in _ROLLING_ONLY.items():
            if getattr(self, name) is not None:
                raise refusal(flag, getattr(self, name), "has no effect under the block policy; leave it out")

    def check_canvas(self, canvas_length: int, *, max_positions: int) -> None:
        """Refuse a canvas that the model or the batch has no room for."""
        if canvas_length > max_positions:
            raise refusal("--canvas-length", canvas_length, f"must be at most the model's {max_positions} positions")
        if self.max_batch_tokens < canvas_length:
            rule = f"must hold at least one canvas of {canvas_length} positions"
            raise refusal("--max-batch-tokens", self.max_batch_tokens, rule)

    def commit(self, stored: CommitSettings) -> CommitSettings:
        """The checkpoint's commit settings with these over them."""
        changes: dict[str, Any] = {
            "failure_budget": self.commit_failure_budget,
            "sample_top_k": self.commit_top_k,
            "failure_top_k": self.commit_top_k,
            "sample_min_p": self.commit_min_p,
            "failure_min_p": self.commit_min_p,
            "target_confidence": self.commit_target_confidence,
        }
        changed = replace(stored, **{name: value for name, value in changes.items() if value is not None})
        if changed.target_confidence is not None and changed.failure_budget > 1.0:
            flag = "--commit-failure-budget" if self.commit_failure_budget is not None else "--commit-target-confidence"
            value = self.commit_failure_budget if self.commit_failure_budget is not None else changed.target_confidence
            raise refusal(flag, value, "goes with a failure budget of at most 1 and a target confidence, or with none")
        return changed
