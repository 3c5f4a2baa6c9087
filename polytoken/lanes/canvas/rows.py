"""One request inside the canvas lane, and which requests the lane can serve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from polytoken.cache.state import DecodingState
from polytoken.errors import RequestError
from polytoken.lanes.canvas.keys import NoiseSource
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.lanes.canvas.seen import SeenIds
from polytoken.request import Request, SamplingParams

# The lane draws by the law its policy needs. A repetition penalty is part of that law, everything else is not.
_OTHER_LAWS: Final = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "logprobs",
)


@dataclass(kw_only=True, eq=False)
class CanvasRow:
    """What every policy keeps of a row; each adds its own state.

    Attributes:
        noise: the request's random numbers.
        stop_ids: ids that end the answer; empty when the request ignores them.
        seen: ids a repetition penalty applies to, None when there is no penalty.
        generated: ids committed so far.
        steps: denoises so far.
    """

    request: Request
    prefill: CanvasPrefill
    noise: NoiseSource
    stop_ids: tuple[int, ...]
    seen: SeenIds | None
    generated: int = 0
    steps: int = 0

    @property
    def cache(self) -> DecodingState:
        return self.prefill.cache

    @property
    def prompt_tokens(self) -> int:
        return len(self.prefill.ids)

    @property
    def cached_tokens(self) -> int:
        return self.prefill.cached_tokens

    @property
    def cache_miss(self) -> str | None:
        return self.prefill.miss

    @property
    def prefill_remaining(self) -> int:
        return self.prefill.remaining

    @property
    def remaining(self) -> int:
        """Output still to come."""
        return self.request.max_new_tokens - self.generated

    def take(self, ids: Sequence[int]) -> None:
        """Count ids as committed."""
        self.generated += len(ids)
        if self.seen is not None and ids:
            self.seen.observe(ids)

    def release(self) -> None:
        """Drop every array; the row is over."""
        self.seen = None
        self.prefill.release()


def check_sampling(sampling: SamplingParams) -> None:
    """Refuse what would otherwise be passed over in silence.

    Raises:
        RequestError: `unsupported`, naming the field.
    """
    usual = SamplingParams()
    for name in _OTHER_LAWS:
        if getattr(sampling, name) != getattr(usual, name):
            raise RequestError(
                f"the canvas lane does not support {name}: its policy draws by a law of its own",
                code="unsupported",
                field=f"sampling.{name}",
            )


def refuse_image(ids: Sequence[int], *, image: int | None) -> None:
    """Refuse a prompt with an id that stands for an image, which the encoder would take for text.

    Raises:
        RequestError: `bad_prompt`.
    """
    if image is not None and image in ids:
        raise RequestError(
            f"the prompt holds an image token (id {image}); this lane reads text only",
            code="bad_prompt",
            field="messages",
        )
