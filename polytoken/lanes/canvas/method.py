"""The two halves of a denoise as a policy sees them: around the network, and around the step's one reading.

A step goes begin -> layers -> prepare -> read -> finish, and the next step's `begin` starts with what the last one left
to do. Everything up to the reading is lazy and submitted; `finish` works on host numbers alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from polytoken.errors import NonFiniteError
from polytoken.lanes.base import Commit
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.lanes.canvas.rows import CanvasRow
from polytoken.lanes.canvas.watch import FrameArrays
from polytoken.models.canvas import CanvasModel, CanvasOutput, CanvasPass
from polytoken.request import Request

RowT = TypeVar("RowT", bound=CanvasRow)
_FLAGS = 3  # finite, ends (a jump, or a canvas that is settled), length; ids follow


@dataclass(frozen=True)
class Reading:
    """What the host learns of a denoise.

    Attributes:
        flag: whether it was a jump (rolling policy), or whether the canvas is settled (block policy).
        token_ids: what is committed if anything is, in order.
    """

    flag: bool
    token_ids: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Verdict:
    """A denoise that has been submitted and not been read.

    Attributes:
        packed: int32 [3 + C]: finite, flag, length, then ids in logical order. One array, so that one transfer tells
            everything.
        frame: what a spectator wants to see besides, None while nobody watches.
    """

    packed: mx.array
    frame: FrameArrays | None = None

    @classmethod
    def pack(
        cls, *, finite: mx.array, flag: mx.array, length: mx.array, ids: mx.array, frame: FrameArrays | None
    ) -> Verdict:
        """From finite bool [], flag bool [1], length int32 [1] and ids int32 [1, C]."""
        head = [finite[None], flag, length]
        return cls(mx.concatenate([*(item.astype(mx.int32) for item in head), ids.reshape(-1).astype(mx.int32)]), frame)

    def arrays(self) -> list[mx.array]:
        return [self.packed, *(() if self.frame is None else self.frame.arrays())]

    def read(self) -> Reading:
        """The host's numbers; waits unless `arrays` have been evaluated. Raises NonFiniteError."""
        numbers = np.array(self.packed).tolist()
        finite, flag, length = numbers[:_FLAGS]
        if not finite:
            raise NonFiniteError("the denoiser gave NaN or infinity, so no id of this canvas can be trusted")
        return Reading(bool(flag), tuple(numbers[_FLAGS : _FLAGS + length]))


class CanvasMethod(ABC, Generic[RowT]):
    """How a canvas becomes output. Holds no state of a row.

    Attributes:
        name: as `CanvasSettings.policy` has it.
        watched: whether frames are wanted.
    """

    name: str
    watched: bool = False

    def __init__(self, model: CanvasModel) -> None:
        self.model = model

    @property
    @abstractmethod
    def stop_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""

    @abstractmethod
    def make_row(self, request: Request, prefill: CanvasPrefill) -> RowT:
        """A row that has yet to be prefilled."""

    @abstractmethod
    def start(self, row: RowT) -> None:
        """Lay the first canvas; the prompt is encoded."""

    @abstractmethod
    def settle(self, row: RowT) -> None:
        """Submit what the last step left to do: remember and encode what it committed, lay the next canvas.

        It is left to here, the beginning of the next step, because a commit leaves the lane by being returned: the ids
        are on their way to the reader before the first operation of this is built, and a row that ended meanwhile (a
        stop string, a cancel) never pays for it. The next denoise needs all of it and the device runs it while the
        host builds that denoise, so nothing is lost by waiting.
        """

    @abstractmethod
    def begin(self, row: RowT) -> CanvasPass:
        """The denoise of the row's canvas, before the first layer."""

    @abstractmethod
    def prepare(self, row: RowT, output: CanvasOutput) -> Verdict:
        """Statistics, observation and decision, submitted; nothing is waited for."""

    @abstractmethod
    def finish(self, row: RowT, reading: Reading) -> Commit:
        """Count the step and say what it committed."""

    @abstractmethod
    def report(self) -> Mapping[str, Any]:
        """The settings in force, for `runtime_loaded`."""


def run_layers(model: CanvasModel, passes: Sequence[CanvasPass]) -> list[CanvasOutput]:
    """All layers of several denoises, layer by layer and row by row.

    Every row keeps products of its own, so its numbers cannot depend on its company. Submitting after each layer bounds
    what is in flight: one layer's activations per row.
    """
    for index in range(model.num_layers):
        for work in passes:
            model.run_layer(index, work)
        mx.async_eval([work.hidden for work in passes])
    return [model.finish(work) for work in passes]
