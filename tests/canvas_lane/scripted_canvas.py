"""A canvas model that is a script: it wants a given id at every position of the text, and notes what it is told.

Its hidden rows are the logits themselves (H = V + 1, the prompt's first id being the last column). Its cache holds the
ids it was given as keys, so that a test can read what was encoded. It is sure of a position once the left neighbour
holds what is wanted, and so settles from left to right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.cache.layers import KVLayer
from polytoken.cache.state import DecodingState
from polytoken.lanes.canvas.lane import CanvasLane
from polytoken.lanes.canvas.opening import open_canvas_lane
from polytoken.lanes.canvas.ring import to_logical, to_physical
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.models.canvas import (
    CanvasModel,
    CanvasOutput,
    CanvasPass,
    CanvasTokens,
    CommitSettings,
    Cost,
    SoftPart,
    SoftSum,
)
from polytoken.models.latent.state import LatentState
from polytoken.request import Request

EOS, TURN_END, PAD, BOS, IMAGE = 1, 106, 0, 2, 99
SURE, UNSURE = 25.0, 2.0
PROMPT = 4  # ids in every prompt

Fault = Callable[[str, int], None]
"""(place, prompt's first id) -> nothing, or an exception. Places: begin, layer, sweep, observe, write, encode."""


@dataclass(eq=False)
class ScriptedPass(CanvasPass):
    cache: DecodingState = field(default=None)  # type: ignore[assignment]
    canvas: mx.array = field(default=None)  # type: ignore[assignment]
    latent: LatentState = field(default=None)  # type: ignore[assignment]
    head: mx.array = field(default=None)  # type: ignore[assignment]


class ScriptedCanvas(CanvasModel):
    """Wants `answers[first id of the prompt]`, then `tail` for ever.

    Args:
        answers: what to say, by the first id of the prompt; a prompt has PROMPT ids.
        C: canvas length.
        sure_from: denoises of one request after which it is sure of everything at once; None never.
        poison: (first id of the prompt, denoise counted from 1) whose hidden rows become NaN.
        fault: raises where a test wants it.
    """

    num_layers = 2
    max_positions = 8192
    memory_slots = latent_dim = 1
    weight_bytes_per_forward = 0

    def __init__(
        self,
        answers: dict[int, Sequence[int]],
        *,
        C: int = 16,
        V: int = 128,
        tail: int = 30,
        sure_from: int | None = None,
        poison: tuple[int, int] | None = None,
        fault: Fault = lambda place, first: None,
        conditioning: Any = "logits",
    ) -> None:
        self.answers, self.tail, self.sure_from, self.poison, self.fault = answers, tail, sure_from, poison, fault
        self.vocab_size, self.hidden_size = V, V + 1
        self.canvas_length = C
        self.conditioning = conditioning
        self.commit = CommitSettings(0.2, 1.0, 2.0, 40, 0.05, None, None, None, 1.0)
        self.tokens = CanvasTokens(eos=(EOS,), turn_end=TURN_END, pad=PAD, image=IMAGE)
        self.denoises: dict[int, int] = {}  # by the first id of the prompt

    def with_canvas(self, canvas_length: int) -> CanvasModel:
        raise NotImplementedError

    def make_cache(self) -> DecodingState:
        return DecodingState([KVLayer()])

    def make_latent(self) -> LatentState:
        return LatentState.empty(1, self.canvas_length, 1, 1, entropy=float(np.log(self.vocab_size)))

    def encode(self, ids: mx.array, cache: DecodingState) -> None:
        if cache.offset:
            self.fault("encode", encoded_ids(cache)[0])
        rows = ids.astype(mx.float32)[:, None, :, None]
        cache.layers[0].update_and_fetch(rows, rows)  # type: ignore[attr-defined]

    def embed(self, ids: mx.array) -> mx.array:
        return mx.broadcast_to(ids.astype(mx.float32)[..., None], (*ids.shape, self.hidden_size))

    def begin(
        self,
        canvas: mx.array,
        cache: DecodingState,
        *,
        latent: LatentState,
        head: mx.array,
        signal: mx.array | None = None,
    ) -> CanvasPass:
        first = encoded_ids(cache)[0]
        self.fault("begin", first)
        self.denoises[first] = self.denoises.get(first, 0) + 1
        return ScriptedPass(self._logits(first, canvas, cache, head), cache, canvas, latent, head)

    def run_layer(self, index: int, work: CanvasPass) -> None:
        assert isinstance(work, ScriptedPass)
        self.fault("layer", encoded_ids(work.cache)[0])

    def finish(self, work: CanvasPass) -> CanvasOutput:
        assert isinstance(work, ScriptedPass)
        heavy = to_physical(work.hidden, work.head)
        return CanvasOutput(heavy, mx.zeros_like(heavy), work.latent, heavy)

    def observe(self, latent: LatentState, output: CanvasOutput, *, valid: mx.array, head: mx.array) -> LatentState:
        self.fault("observe", owner(output.heavy_hidden))
        return latent

    def commit_write(self, memory: mx.array, output: CanvasOutput, **told: mx.array) -> tuple[mx.array, mx.array]:
        self.fault("write", owner(output.heavy_hidden))
        return memory + 1.0, mx.zeros((1,))

    def project(self, flat: mx.array, start: int, stop: int) -> mx.array:
        self.fault("sweep", owner(flat))
        return flat[:, start:stop]

    def soft_add(self, total: SoftSum | None, part: SoftPart) -> SoftSum:
        return SoftSum(part.top, part.total, mx.zeros((part.top.shape[0], self.hidden_size)))

    def soft_signal(self, total: SoftSum) -> mx.array:
        return total.rows[None]

    def denoise_cost(self, prefix: int) -> Cost:
        return Cost(0, 0, 0)

    def encode_cost(self, tokens: int, prefix: int) -> Cost:
        return Cost(0, 0, 0)

    def wanted(self, first: int, position: int) -> int:
        answer = self.answers[first]
        return answer[position] if position < len(answer) else self.tail

    def _logits(self, first: int, canvas: mx.array, cache: DecodingState, head: mx.array) -> mx.array:
        """[1, C, V + 1] logical; the last column says whose it is."""
        C, count = self.canvas_length, self.denoises[first]
        wanted = [self.wanted(first, cache.offset - PROMPT + j) for j in range(C)]
        held = np.array(to_logical(canvas, head))[0].tolist()
        out = np.zeros((1, C, self.hidden_size), np.float32)
        out[..., -1] = first
        settled = True
        for j in range(C):
            sure = settled or (self.sure_from is not None and count >= self.sure_from)
            out[0, j, wanted[j]] = SURE if sure else UNSURE
            settled = settled and held[j] == wanted[j]
        if self.poison == (first, count):
            out[0, C // 2] = np.nan
        return mx.array(out)


def ask(first: int, limit: int, **more: Any) -> Request:
    """A request whose prompt begins with `first`."""
    return Request(request_id=f"r{first}", token_ids=(first, 50, 51, 52), max_new_tokens=limit, seed=first, **more)


def owner(hidden: mx.array) -> int:
    """The first id of the prompt that hidden rows [..., V + 1] belong to."""
    return int(np.array(hidden).reshape(-1, hidden.shape[-1])[0, -1])


def encoded_ids(cache: DecodingState) -> list[int]:
    """The ids that a scripted model was given so far."""
    valid = cache.layers[0].valid()  # type: ignore[attr-defined]
    return [] if valid is None else [int(value) for value in np.array(valid[0]).reshape(-1)]


@dataclass(frozen=True)
class ScriptedRuntime:
    model: ScriptedCanvas
    generation: dict[str, Any] = field(default_factory=dict)
    eos_ids: tuple[int, ...] = ()
    max_positions: int = 8192

    @property
    def tokenizer(self) -> ScriptedRuntime:
        return self


def scripted_lane(
    model: ScriptedCanvas,
    settings: CanvasSettings | None = None,
    *,
    generation: dict[str, Any] | None = None,
    max_rows: int = 8,
) -> CanvasLane:
    """A lane over the script."""
    identity = StateIdentity(checkpoint="script", lane="canvas", grid=16)
    return open_canvas_lane(
        ScriptedRuntime(model, generation or {}),
        settings or CanvasSettings(),
        bank=StateBank(0, identity=identity),
        prefill_chunk=16,
        max_batch_rows=max_rows,
    )
