"""The canvas lane: several rows denoise side by side, and each commits what its policy allows."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import mlx.core as mx

from polytoken.cache.bank import StateBank
from polytoken.errors import UsageError
from polytoken.lanes.base import Commit, Lane
from polytoken.lanes.canvas.method import CanvasMethod, Verdict, run_layers
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.lanes.canvas.rows import CanvasRow, check_sampling, refuse_image
from polytoken.lanes.canvas.watch import CanvasFrame, Observer
from polytoken.lanes.ends import committing
from polytoken.lanes.limits import check_ids, fit_length, refuse_grammar
from polytoken.models.canvas import CanvasModel, CanvasPass
from polytoken.request import Request, SamplingParams

T = TypeVar("T")
_LOG = logging.getLogger(__name__)


class CanvasLane(Lane[CanvasRow]):
    """Block diffusion over any `CanvasModel`, under either policy.

    Args:
        model: the network.
        bank: store of prompt prefixes; generated text is never stored. A limit of 0 bytes turns reuse off.
        method: the policy at work.
        prefill_chunk: tokens per prefill forward, the absolute grid that all prompts are encoded on.
        max_positions: longest sequence (prompt + output) the model supports.
        max_batch_rows, max_batch_tokens: rows, and canvas positions of all rows, of one step.
        pipeline_depth: rows whose layers run side by side.
        repetition_penalty: recommended to requests that name none.
    """

    name = "canvas"
    execution = "layer_interleaved_singleton"

    def __init__(
        self,
        model: CanvasModel,
        bank: StateBank,
        method: CanvasMethod[Any],
        *,
        prefill_chunk: int,
        max_positions: int,
        max_batch_rows: int,
        max_batch_tokens: int,
        pipeline_depth: int = 2,
        repetition_penalty: float = 1.0,
    ) -> None:
        self.model, self.bank, self.method = model, bank, method
        self.prefill_chunk = prefill_chunk
        self.max_positions = max_positions
        self.max_batch_rows, self.max_batch_tokens = max_batch_rows, max_batch_tokens
        self.pipeline_depth = pipeline_depth
        self.sampling = SamplingParams(repetition_penalty=repetition_penalty)
        self.eos_ids = frozenset(method.stop_ids)
        self.refused_ids = frozenset() if model.tokens.image is None else frozenset({model.tokens.image})
        self._observer: Observer | None = None
        self._denoises = 0  # rows stepped to the end of a step
        self._forwards = 0  # of the network over a canvas, wasted ones included
        self._max_inflight = 0

    @property
    def capacity(self) -> int:
        """Rows of one step."""
        return min(self.max_batch_rows, self.max_batch_tokens // self.model.canvas_length)

    @property
    def observer(self) -> Observer | None:
        """Who is shown every canvas after every denoise; nobody at first, and then it costs nothing."""
        return self._observer

    @observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        self.method.watched = observer is not None

    def report(self) -> Mapping[str, Any]:
        """This lane's part of `runtime_loaded`."""
        return {
            "canvas_length": self.model.canvas_length,
            "pipeline_depth": self.pipeline_depth,
            "max_batch_tokens": self.max_batch_tokens,
            "policy": self.method.name,
            **self.method.report(),
        }

    # -- the life of a row -----------------------------------------------------------------------------------------

    def open(self, request: Request, ids: Sequence[int]) -> CanvasRow:
        check_sampling(request.sampling)
        refuse_grammar(request, lane=self.name)
        check_ids(ids, vocab_size=self.model.vocab_size)
        refuse_image(ids, image=self.model.tokens.image)
        request = fit_length(request, len(ids), max_positions=self.max_positions)
        prefill = CanvasPrefill(self.model, self.bank, tuple(ids), chunk=self.prefill_chunk, session=request.session)
        row: CanvasRow = self.method.make_row(request, prefill)
        return row

    def prefill_cost(self, row: CanvasRow) -> int:
        return row.prefill.cost

    def prefill_step(self, row: CanvasRow) -> bool:
        ready = row.prefill.step()
        self.tell_prefill(row)
        if not ready:
            return False
        self.method.start(row)
        return True

    def step(self, rows: Sequence[CanvasRow]) -> list[Commit | Exception]:
        if len(rows) > self.capacity or len(set(map(id, rows))) < len(rows):
            raise UsageError(
                f"a step takes each row once and at most {self.capacity} rows "
                f"(--batch-size {self.max_batch_rows}, --max-batch-tokens {self.max_batch_tokens}), not {len(rows)}",
                code="bad_cohort",
                field="--max-batch-tokens",
            )
        outcomes: list[Commit | Exception] = []
        for start in range(0, len(rows), self.pipeline_depth):
            outcomes += self._step_group(rows[start : start + self.pipeline_depth])
        return outcomes

    def remember(self, row: CanvasRow, ids: Sequence[int]) -> None:
        # Only the stream: what was generated is encoded anew with the next prompt, on the grid.
        assert row.request.session is not None
        with committing(self.bank, row.request.session, (*row.prefill.ids, *ids)):
            pass

    def close(self, row: CanvasRow, *, keep: bool) -> None:
        row.release()

    def settle(self) -> None:
        mx.synchronize()

    def statistics(self) -> Mapping[str, Any]:
        return {
            **self.bank.statistics().report(),
            "active_row_denoises": self._denoises,
            "heavy_forward_count": self._forwards,
            "pipeline_depth": self.pipeline_depth,
            "max_inflight_denoises": self._max_inflight,
            "mlx_active_memory_bytes": mx.get_active_memory(),
            "mlx_peak_memory_bytes": mx.get_peak_memory(),
        }

    # -- one step of one group ---------------------------------------------------------------------------------------

    def _step_group(self, rows: Sequence[CanvasRow]) -> list[Commit | Exception]:
        """Denoise rows side by side. What goes wrong in a row's own part is that row's; the layers are everybody's."""
        begun = [_attempt(self._begin, row) for row in rows]
        passes = [work for work in begun if not isinstance(work, Exception)]
        try:
            outputs = iter(run_layers(self.model, passes))
            self._forwards += len(passes)
            self._max_inflight = max(self._max_inflight, len(passes))
            prepared = [
                work if isinstance(work, Exception) else _attempt(self.method.prepare, row, next(outputs))
                for row, work in zip(rows, begun, strict=True)
            ]
            # The one place where the host waits for the device.
            mx.eval([array for item in prepared if isinstance(item, Verdict) for array in item.arrays()])
        except Exception as fault:
            return [work if isinstance(work, Exception) else fault for work in begun]
        return [
            item if isinstance(item, Exception) else _attempt(self._finish, row, item)
            for row, item in zip(rows, prepared, strict=True)
        ]

    def _begin(self, row: CanvasRow) -> CanvasPass:
        self.method.settle(row)
        return self.method.begin(row)

    def _finish(self, row: CanvasRow, verdict: Verdict) -> Commit:
        before, remaining = row.generated, row.remaining
        commit = self.method.finish(row, verdict.read())
        self._denoises += 1
        if self._observer is not None and verdict.frame is not None:
            self._show(
                verdict.frame.frame(
                    request_id=row.request.request_id,
                    denoise_steps=row.steps,
                    generated_tokens=before,
                    committed=len(commit.token_ids),
                    remaining=remaining,
                )
            )
        return commit

    def _show(self, frame: CanvasFrame) -> None:
        assert self._observer is not None
        try:
            self._observer(frame)
        except Exception:
            # The spectator's fault must not become the request's.
            _LOG.error("the observer of the canvas failed and is dropped\n%s", traceback.format_exc())
            self.observer = None


def _attempt(action: Callable[..., T], *arguments: Any) -> T | Exception:
    """What the action returns, or the exception it raised, which concerns one row only."""
    try:
        return action(*arguments)
    except Exception as fault:
        return fault
