"""Which request gets the device next: admission, prefill budget, round robin, isolation of failures, cancellation.

Pure bookkeeping over a lane's rows. One `turn` is the unit: it computes at most `prefill_budget` prompt tokens and then
steps at most `capacity` rows once. Nothing here knows MLX, threads or text; all calls come from one thread.
"""

from __future__ import annotations

import logging
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polytoken.engine.job import Job, Label, Sink, TextPort
from polytoken.engine.limits import FLAGS, SchedulerLimits
from polytoken.engine.metrics import Totals
from polytoken.engine.outcomes import duplicate, interrupted
from polytoken.errors import CancelledError, PolytokenError, UsageError
from polytoken.events import FirstDenoise, InferenceSummary, RequestRejected
from polytoken.lanes.base import Commit, Lane
from polytoken.request import Request

_LOG = logging.getLogger(__name__)


class Scheduler:
    """Takes requests through pending, prefilling and active to their one last event.

    Args:
        encode: prompt ids of a request; a RequestError refuses it.
        open_text: a fresh text port for a request and its prompt ids.
        emit: takes every event that has no sink of its own. Neither it nor a sink may raise.
        label: which weights results are reported for.
        token_events: default for requests that do not say.
        clock: monotonic seconds, on the scale of `Request.created`.
        log: takes the traceback of an unexpected failure; the event itself carries one line only.
    """

    def __init__(
        self,
        lane: Lane[Any],
        limits: SchedulerLimits,
        *,
        encode: Callable[[Request], Sequence[int]],
        open_text: Callable[[Request, Sequence[int]], TextPort],
        emit: Sink,
        label: Label,
        token_events: bool = True,
        clock: Callable[[], float] = time.perf_counter,
        log: Callable[[str], None] = _LOG.error,
    ) -> None:
        self.lane, self.limits, self.label = lane, limits, label
        self._encode, self._open_text, self._emit = encode, open_text, emit
        self._token_events, self._clock, self._log = token_events, clock, log
        self._pending: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._active: deque[Job] = deque()
        self._live: dict[str, Job] = {}  # every job that has not ended, by id
        self._ended: deque[str] = deque()  # ids in the order in which they ended, when these are bounded
        self._taken: set[str] = set()
        self._turning = False
        self._refusal: PolytokenError | None = None  # set while requests are failed on arrival
        self.begin_run()

    # -- what callers do ------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """Start new totals, and accept requests again after an interrupt."""
        self._refusal = None
        self.totals = self.open_totals()

    def open_totals(self) -> Totals:
        """Totals that begin now, to be named with the requests that count in them."""
        return Totals(self._clock(), denoising=self.lane.name == "canvas")

    def offer(
        self,
        request: Request,
        *,
        sink: Sink | None = None,
        token_events: bool | None = None,
        totals: Totals | None = None,
    ) -> bool:
        """Take a request over; False, with nothing done, while no more may wait.

        A taken id is refused by a `request_error` to this request's own sink. Without `totals` it counts in `totals`
        of the scheduler.
        """
        if not self.has_room:
            return False
        job = Job(
            request=request,
            sink=sink or self._emit,
            totals=self.totals if totals is None else totals,
            token_events=self._token_events if token_events is None else token_events,
            denoising=self.lane.name == "canvas",
        )
        if request.request_id in self._taken:
            self.reject(duplicate(request), sink=job.sink, totals=job.totals)
            return True
        self._taken.add(request.request_id)
        self._live[request.request_id] = job
        self._pending.append(job)
        if self._refusal is not None:
            self._doom(self._refusal, [job])
        return True

    def reject(self, rejected: RequestRejected, *, sink: Sink | None = None, totals: Totals | None = None) -> None:
        """Count and report a line that never became a request. Its id is not taken."""
        (self.totals if totals is None else totals).rejected += 1
        (sink or self._emit)(rejected)

    def cancel(self, request_id: str) -> bool:
        """End a request as failed with code `cancelled`; False when none of this id is open.

        Outside a turn it has ended on return, inside one (from a sink) it ends with that turn, unless it ends by
        itself first.
        """
        job = self._live.get(request_id)
        if job is not None:
            self._doom(CancelledError("the request was cancelled"), [job])
        return job is not None

    def interrupt(self) -> None:
        """Fail every open request, and every further one until `begin_run`, with code `interrupted`."""
        self.totals.interrupted = True
        self.abandon(interrupted())

    def abandon(self, reason: PolytokenError) -> None:
        """Fail every open request, and every further one until `begin_run`, for this reason."""
        self._refusal = reason
        self._doom(reason, list(self._live.values()))

    def fail(self, reason: PolytokenError, which: Callable[[Sink], bool]) -> None:
        """Fail the open requests whose sinks are of this kind, and nothing else."""
        self._doom(reason, [job for job in self._live.values() if which(job.sink)])

    def summary(self, totals: Totals | None = None) -> InferenceSummary:
        """Wait for the device, and report these totals, or those of `begin_run`."""
        totals = self.totals if totals is None else totals
        before = self._clock()
        self.lane.settle()
        now = self._clock()
        totals.decode_seconds += now - before
        return totals.summary(now, self._statistics())

    @property
    def has_room(self) -> bool:
        """True when one more request may wait."""
        return len(self._pending) < self.limits.max_pending

    @property
    def idle(self) -> bool:
        """True when there is nothing to do until the next offer."""
        return not self._live

    # -- one turn -------------------------------------------------------------------------------------------------

    def turn(self) -> None:
        """Prefill within the budget, step the rows whose turn it is once, and end what was cancelled meanwhile."""
        self._turning = True
        try:
            self._prefill()
            if self._active:
                self._step()
        finally:
            self._turning = False
        self._sweep()

    def _prefill(self) -> None:
        budget = self.limits.prefill_budget
        had_active = bool(self._active)
        while budget > 0:
            overtaken = max(self._prefilling, key=lambda job: job.overtaken, default=None)
            if overtaken is not None and overtaken.overtaken >= self.limits.max_rows:
                # More than a lap of the ring went to others: without this, newcomers could starve a long prompt.
                self._prefilling.remove(overtaken)
                self._prefilling.appendleft(overtaken)
            elif self._pending and len(self._active) + len(self._prefilling) < self.limits.max_rows:
                job = self._pending.popleft()
                try:
                    self._open(job)
                except Exception as error:
                    self._reject(job, error)
                    continue
                self._prefilling.appendleft(job)  # in front: a short newcomer is served promptly
            if not self._prefilling:
                break
            job = self._prefilling.popleft()
            try:
                cost = self.lane.prefill_cost(job.row)
                if budget < cost <= self.limits.prefill_budget:
                    self._prefilling.appendleft(job)  # chunks are never cut to fit, or results would depend on traffic
                    break
                budget -= min(cost, budget)
                job.overtaken = 0
                for other in self._prefilling:
                    other.overtaken += 1
                ready = self._prefill_once(job, cost)
            except Exception as error:
                self._reject(job, error)
                continue
            (self._active if ready else self._prefilling).append(job)
            if ready and not had_active:
                break  # the first step as early as possible

    def _open(self, job: Job) -> None:
        ids = self._encode(job.request)
        job.history_miss = getattr(ids, "history_miss", None)
        job.text = self._open_text(job.request, ids)
        job.row = self.lane.open(job.request, ids)
        job.request = job.row.request  # the lane may have fitted a default limit to its positions

    def _prefill_once(self, job: Job, cost: int) -> bool:
        if cost > self.limits.prefill_budget:
            raise UsageError(
                f"the lane wants to prefill {cost} tokens at once, but a turn may prefill {self.limits.prefill_budget}",
                code="prefill_budget",
                field=FLAGS["prefill_budget"],
            )
        before = self._clock()
        ready = self.lane.prefill_step(job.row)
        now = self._clock()
        job.prefill_seconds += now - before
        if ready:
            job.active_at = now
            started = job.started()
            assert job.row is not None
            job.totals.count_prompt(job.row)
            job.sink(started)
        elif cost == 0:
            raise RuntimeError("a prefill step that cost nothing left the row unfinished")  # it would never end
        return ready

    def _step(self) -> None:
        for totals, held in Counter(job.totals for job in (*self._active, *self._prefilling)).items():
            totals.peak_active = max(totals.peak_active, held)
        cohort = [self._active.popleft() for _ in range(min(self.limits.capacity, len(self._active)))]
        before = self._clock()
        commits: Sequence[Commit | Exception]
        try:
            commits = self.lane.step([job.row for job in cohort])
            if len(commits) != len(cohort):
                raise RuntimeError(f"the lane gave {len(commits)} results for {len(cohort)} rows")
        except Exception as error:
            commits = [error] * len(cohort)
        now = self._clock()
        for totals in {job.totals for job in cohort}:
            totals.decode_seconds += now - before
        for job, commit in zip(cohort, commits, strict=True):
            if isinstance(commit, Exception):
                self._fail(job, commit)
                continue
            try:
                self._apply(job, commit, now)
            except Exception as error:
                self._fail(job, error)
                continue
            if job.stop_reason is None:
                self._active.append(job)
            else:
                self._finish(job)

    def _apply(self, job: Job, commit: Commit, now: float) -> None:
        first = job.steps == 0
        forwards, generated = job.forwards, len(job.ids)
        token = job.take(commit, now)
        job.totals.row_steps += 1
        job.totals.forwards += job.forwards - forwards
        job.totals.generated_tokens += len(job.ids) - generated
        if first and job.denoising:
            job.sink(FirstDenoise(request_id=job.request.request_id, ttfd_seconds=now - job.request.created))
        if token is not None:
            job.sink(token)

    # -- the four ways to end: finished, failed, rejected, doomed ---------------------------------------------------

    def _finish(self, job: Job) -> None:
        result = job.finished(self._clock(), lane=self.lane.name, label=self.label, statistics=self._statistics())
        if job.request.session is not None:
            self._remember(job)
        self._release(job, keep=True)
        job.totals.finished += 1
        job.sink(result)

    def _remember(self, job: Job) -> None:
        try:
            self.lane.remember(job.row, tuple(job.ids))
        except Exception:
            self._log(traceback.format_exc())  # the answer is right all the same, and the next turn starts colder

    def _fail(self, job: Job, error: Exception) -> None:
        self._release(job, keep=False)
        job.totals.failed += 1
        code, text, _ = self._describe(error)
        job.sink(job.failed(code, text))

    def _reject(self, job: Job, error: Exception) -> None:
        self._release(job, keep=False)
        job.totals.rejected += 1
        code, text, name = self._describe(error)
        request = job.request
        job.sink(
            RequestRejected(line=request.line, request_id=request.request_id, code=code, field_name=name, error=text)
        )

    def _doom(self, error: PolytokenError, jobs: Sequence[Job]) -> None:
        for job in jobs:
            job.doom = job.doom or error
        if not self._turning:
            self._sweep()

    def _sweep(self) -> None:
        doomed = [job for job in self._live.values() if job.doom is not None]
        for job in doomed:
            for place in (self._pending, self._prefilling, self._active):
                if job in place:
                    place.remove(job)
            assert job.doom is not None
            self._fail(job, job.doom)

    def _release(self, job: Job, *, keep: bool) -> None:
        """Forget the job and close its row: the one place where rows are closed, once each."""
        request_id = job.request.request_id
        if self._live.get(request_id) is job:
            del self._live[request_id]
            if self.limits.remembered_ids is not None:
                self._ended.append(request_id)
                if len(self._ended) > self.limits.remembered_ids:
                    self._taken.discard(self._ended.popleft())
        row, job.row = job.row, None
        if row is not None:
            try:
                self.lane.close(row, keep=keep)
            except Exception:
                self._log(traceback.format_exc())  # what the request produced is right all the same

    def _describe(self, error: Exception) -> tuple[str, str, str | None]:
        if not isinstance(error, PolytokenError):
            self._log("".join(traceback.format_exception(error)))
        seen: BaseException | None = error
        while seen is not None:  # a traceback keeps the frames' arrays alive, until some later garbage collection
            seen.__traceback__ = None
            seen = seen.__cause__ or seen.__context__
        if isinstance(error, PolytokenError):
            return error.code, str(error), error.field
        text = " ".join(str(error).split())
        return "internal", f"{type(error).__name__}: {text}" if text else type(error).__name__, None

    def _statistics(self) -> Mapping[str, Any]:
        try:
            return self.lane.statistics()
        except Exception:
            self._log(traceback.format_exc())
            return {}
