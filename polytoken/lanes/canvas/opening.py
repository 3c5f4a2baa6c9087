"""From a loaded checkpoint and settings to a canvas lane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from polytoken.cache.bank import StateBank
from polytoken.errors import UsageError
from polytoken.lanes.canvas.block import BlockPolicy
from polytoken.lanes.canvas.blockwise import BlockMethod
from polytoken.lanes.canvas.knobs import refusal
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.method import CanvasMethod
from polytoken.lanes.canvas.policy import CommitPolicy
from polytoken.lanes.canvas.rolling import RollingMethod
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.canvas.stops import EndIds
from polytoken.models.canvas import CanvasModel
from polytoken.sampling.vocabulary import VocabularyRule


class EndKnowing(Protocol):
    """What is asked of a tokenizer."""

    @property
    def eos_ids(self) -> Sequence[int]: ...


class CanvasRuntime(Protocol):
    """What is asked of a loaded checkpoint (`polytoken.checkpoint.Runtime` has it)."""

    @property
    def model(self) -> Any: ...

    @property
    def tokenizer(self) -> EndKnowing: ...

    @property
    def generation(self) -> Mapping[str, Any]: ...

    @property
    def max_positions(self) -> int: ...


def is_canvas(runtime: CanvasRuntime) -> bool:
    """Whether the checkpoint is one that this lane runs, and no other lane does."""
    return isinstance(runtime.model, CanvasModel)


def open_canvas_lane(
    runtime: CanvasRuntime,
    settings: CanvasSettings,
    *,
    bank: StateBank,
    prefill_chunk: int,
    max_batch_rows: int,
) -> CanvasLane:
    """The lane that suits the checkpoint.

    Args:
        runtime: a checkpoint for which `is_canvas` holds.
        settings: what the user says.
        bank: made for a `StateIdentity` of lane "canvas" with `prefill_chunk` as its grid.
        prefill_chunk: prompt tokens per forward.
        max_batch_rows: rows of one step at most.

    Raises:
        UsageError: another kind of checkpoint, or a setting that this one cannot honour.
    """
    if not is_canvas(runtime):
        raise UsageError("--lane canvas: this checkpoint has no canvas decoder; it runs on the ar lane", field="--lane")
    model: CanvasModel = runtime.model
    wanted = settings.canvas_length
    settings.check_canvas(model.canvas_length if wanted is None else wanted, max_positions=runtime.max_positions)
    if wanted is not None and wanted != model.canvas_length:
        model = model.with_canvas(wanted)
    stored = runtime.generation.get("repetition_penalty")
    penalty = settings.repetition_penalty if settings.repetition_penalty is not None else stored
    return CanvasLane(
        model,
        bank,
        choose_method(runtime, model, settings),
        prefill_chunk=prefill_chunk,
        max_positions=runtime.max_positions,
        max_batch_rows=max_batch_rows,
        max_batch_tokens=settings.max_batch_tokens,
        pipeline_depth=settings.pipeline_depth,
        repetition_penalty=1.0 if penalty is None else float(penalty),
    )


def choose_method(runtime: CanvasRuntime, model: CanvasModel, settings: CanvasSettings) -> CanvasMethod[Any]:
    """The policy the settings name, or the one the checkpoint was made for."""
    native = "block" if model.conditioning == "logits" else "rolling"
    name = native if settings.policy == "auto" else settings.policy
    ends = end_ids(runtime, model)
    # A checkpoint's limit means what it means to the sampler the checkpoint was made for, and nothing to another.
    stored = runtime.generation.get("max_denoising_steps") if name == native else None
    steps = stored if settings.max_denoising_steps is None else settings.max_denoising_steps
    if name == "rolling":
        commit = settings.commit(model.commit)
        return RollingMethod(
            model,
            CommitPolicy.from_settings(commit, runtime.generation),
            VocabularyRule(
                top_k=commit.sample_top_k,
                min_p=commit.sample_min_p,
                temperature=commit.denoise_temperature,
                chunk=settings.vocab_chunk,
            ),
            ends,
            max_denoising_steps=steps,
        )
    settings.check_block()
    if native != "block":
        raise refusal("--policy", "block", "must be rolling for a checkpoint with latent deliberation")
    policy = BlockPolicy.from_generation({**runtime.generation, "max_denoising_steps": steps})
    return BlockMethod(model, policy, VocabularyRule(chunk=settings.vocab_chunk), ends)


def end_ids(runtime: CanvasRuntime, model: CanvasModel) -> EndIds:
    """The special ids; a checkpoint whose configurations name no end at all has the tokenizer's."""
    ends = EndIds.from_config(model.tokens, runtime.generation)
    if ends.stops:
        return ends
    return EndIds.from_config(model.tokens, {**runtime.generation, "eos_token_id": list(runtime.tokenizer.eos_ids)})
