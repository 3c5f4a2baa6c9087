"""The engine: one thread that owns the device, and the ways in which other threads ask it for work.

The owner thread loads the model, runs the scheduler and frees everything again; no other thread ever touches an array.
Others leave requests and orders in its inbox and get events back, each request through a sink of its own.
"""

from __future__ import annotations

import atexit
import gc
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from types import TracebackType
from typing import Any, Final, TypeVar

from polytoken.engine.handle import Handle, Order, Submission, drop
from polytoken.engine.intake import Counted, Intake
from polytoken.engine.job import Sink
from polytoken.engine.limits import SchedulerLimits
from polytoken.engine.loaded import LoadedLane
from polytoken.engine.mailbox import Inbox, Outbox
from polytoken.engine.outcomes import duplicate, error_of, interrupted, is_last, stopped_on_error
from polytoken.engine.scheduler import Scheduler
from polytoken.engine.sessions import Conversations
from polytoken.errors import CancelledError, EngineError, PolytokenError, UsageError
from polytoken.events import (
    Event,
    GenerationFailed,
    GenerationResult,
    RequestRejected,
    RuntimeLoaded,
    is_failure,
)
from polytoken.request import Request, SamplingParams

T = TypeVar("T")
_LOG = logging.getLogger(__name__)
STALL_SECONDS: Final = 300.0  # an owner thread that finished no turn for this long is taken for stuck


class Engine(Conversations):
    """Runs one lane on an owner thread. All methods may be called from any thread.

    Args:
        load: makes the lane; called once, on the owner thread.
        limits: how much may happen at once.
        token_events: whether `token` events are sent to those who do not say.
        stall_seconds: how long waiters bear an owner thread that finishes no turn, None for ever.
    """

    def __init__(
        self,
        load: Callable[[], LoadedLane],
        limits: SchedulerLimits | None = None,
        *,
        token_events: bool = True,
        stall_seconds: float | None = STALL_SECONDS,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.limits = limits or SchedulerLimits()
        self._load: Callable[[], LoadedLane] | None = load
        self._token_events, self._stall_seconds, self._clock = token_events, stall_seconds, clock
        self._inbox: Inbox[Order, Submission] = Inbox(max(2, self.limits.max_pending))
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None
        self._started: Future[tuple[RuntimeLoaded, SamplingParams, Any]] = Future()
        self._lane: LoadedLane | None = None  # touched by the owner thread only, like the next
        self._open: set[Handle] = set()  # offered to the scheduler and not done
        self._intake: Intake | None = None  # of the run in progress
        self._drain = False
        self._busy_since: float | None = None  # start of the owner's current turn, None while it waits

    # -- life --------------------------------------------------------------------------------------------------

    def start(self) -> RuntimeLoaded:
        """Load, wait for it, and return the event that tells about it. A second call returns the same.

        Raises what `load` raised, unchanged.
        """
        with self._lock:
            if self._thread is None:
                if self._inbox.is_shut:
                    raise EngineError("the engine is closed")
                self._thread = threading.Thread(target=self._own, name="polytoken-owner", daemon=True)
                self._thread.start()
        try:
            loaded = self._started.result()[0]
        except KeyboardInterrupt:
            self._inbox.shut(EngineError("the engine was interrupted while loading"))  # it ends when it has loaded
            raise
        atexit.unregister(self.close)
        atexit.register(self.close)  # a device thread that is killed at exit can crash the process
        return loaded

    @property
    def loaded(self) -> RuntimeLoaded:
        """The event of the loaded model. Waits for loading."""
        self._check_started()
        return self._started.result()[0]

    @property
    def sampling(self) -> SamplingParams:
        """What the checkpoint recommends for requests that name nothing. Waits for loading."""
        self._check_started()
        return self._started.result()[1]

    @property
    def tokenizer(self) -> Any:
        """The checkpoint's tokenizer, which any thread may use. Waits for loading."""
        self._check_started()
        return self._started.result()[2]

    def close(self, *, drain: bool = False) -> None:
        """End the engine: finish (`drain`) or fail what is open with code `engine_closed`, free everything, and join.

        May be called any number of times.
        """
        atexit.unregister(self.close)
        with self._lock:
            self._drain = drain
            intake, thread = self._intake, self._thread
        if intake is not None and not drain:
            intake.stop()
        self._inbox.shut(EngineError("the engine is closed"))
        if thread is None or thread is threading.current_thread():
            return
        while thread.is_alive():
            thread.join(self._stall_seconds)
            self._check_stall()

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- one request -------------------------------------------------------------------------------------------

    def submit(self, request: Request, sink: Sink, *, wait: bool = True, token_events: bool | None = None) -> Handle:
        """Queue a request; `sink` gets its events in order, on the owner thread, and must be quick.

        With `wait`, blocks while the queue is full.

        Raises:
            EngineError: `queue_full` without `wait`; `engine_closed`, `engine_stopped`.
        """
        self._check_started()
        handle = self._handle(request.request_id, sink)
        blocking = wait and threading.current_thread() is not self._thread  # the owner would wait for itself
        if not self._inbox.put(Submission(request, handle, token_events), wait=blocking):
            raise EngineError(f"{self._inbox.capacity} requests are waiting already", code="queue_full")
        return handle

    def stream(self, request: Request, *, token_events: bool | None = None) -> Iterator[Event]:
        """The request's events as they come. It is queued at the first `next`.

        Leaving the iterator early cancels the request within one step.
        """
        self._check_thread()
        outbox: Outbox[Event] = Outbox()
        handle = self.submit(request, outbox.put, token_events=token_events)
        try:
            while True:
                event = self._next(outbox)
                yield event
                if is_last(event):
                    return
        finally:
            handle.cancel()

    def generate(self, request: Request) -> GenerationResult:
        """The result of one request. Raises a PolytokenError with the event's code when there is none."""
        for event in self.stream(request, token_events=False):
            if isinstance(event, GenerationResult):
                return event
            if isinstance(event, (GenerationFailed, RequestRejected)):
                raise error_of(event)
        raise AssertionError("a stream ends with its last event")

    def cancel(self, request_id: str) -> bool:
        """End the request of this id as failed with code `cancelled`; False when none is open."""

        def act(scheduler: Scheduler) -> bool:
            queued = (item.handle for item in self._inbox.items() if item.handle.request_id == request_id)
            return scheduler.cancel(request_id) or any(self._withdraw(scheduler, handle) for handle in queued)

        return self._ask(act)

    # -- many requests -----------------------------------------------------------------------------------------

    def run(
        self,
        source: Iterable[Request | RequestRejected],
        *,
        continue_on_error: bool = True,
        token_events: bool | None = None,
    ) -> Iterator[Event]:
        """Serve everything `source` gives, and end with the summary. One run at a time.

        The source is read on a thread of its own, which blocks while the engine has no room. A failure ends the run
        when `continue_on_error` is false: the rest fails with code `stopped_on_error`. After `interrupt`, or a
        KeyboardInterrupt while waiting here, the rest fails with code `interrupted`; the KeyboardInterrupt goes on to
        the caller after the summary. Leaving the iterator early interrupts silently.
        """
        self._check_thread()
        outbox: Outbox[Event | Counted] = Outbox()

        def submit(item: Request | RequestRejected, intake: Intake) -> None:
            handle = self._handle(item.request_id or "", outbox.put, intake)
            handle.line = item.line
            self._inbox.put(Submission(item, handle, token_events, intake), wait=True)

        intake = Intake(source, submit, outbox=outbox)
        with self._lock:
            if self._intake is not None:
                raise UsageError("the engine is in a run already", code="busy")
            self._intake = intake
        complete = stopped = False
        key: KeyboardInterrupt | None = None
        try:
            intake.totals = self._ask(Scheduler.open_totals)
            intake.start()
            ended, items = 0, None
            while items is None or ended < items:
                try:
                    event = self._next(outbox)
                except KeyboardInterrupt as pressed:
                    if key is not None:
                        raise  # pressed again: no patience left
                    key = pressed
                    self._interrupt_run(intake)
                    continue
                if isinstance(event, Counted):
                    items = event.items
                    continue
                ended += is_last(event)
                yield event
                if is_failure(event) and not continue_on_error and not stopped:
                    stopped = True
                    self._end_reading(intake, lambda scheduler: self._fail_run(scheduler, intake, stopped_on_error()))
            complete = True
            summary = self._ask(lambda scheduler: scheduler.summary(intake.totals))
        finally:
            if not complete:
                self._end_reading(intake, lambda scheduler: self._leave_run(scheduler, intake))
            with self._lock:
                self._intake = None  # last: the next run's orders come behind those of this one
        yield summary
        if key is not None:
            raise key

    def _handle(self, request_id: str, sink: Sink, intake: Intake | None = None) -> Handle:
        def cancel(handle: Handle) -> None:
            self._order_quietly(lambda scheduler: self._withdraw(scheduler, handle))

        return Handle(request_id, sink, cancel=cancel, on_end=self._open.discard, intake=intake)

    def interrupt(self) -> None:
        """End the run if there is one, failing its requests with code `interrupted`; else fail every open request so.

        Does not wait. Any thread may call it, also the owner. It takes locks: a signal handler has a thread call it.
        """
        intake = self._intake
        if intake is None:
            self._order_quietly(self._clear)
        else:
            self._interrupt_run(intake)

    def _interrupt_run(self, intake: Intake) -> None:
        def act(scheduler: Scheduler) -> None:
            if intake.totals is not None:
                intake.totals.interrupted = True
            self._fail_run(scheduler, intake, interrupted())

        self._end_reading(intake, act)

    def _end_reading(self, intake: Intake, act: Callable[[Scheduler], None]) -> None:
        """Read nothing more for this run, and do this to what was read."""
        intake.stop()
        self._order_quietly(act)

    def _fail_run(self, scheduler: Scheduler, intake: Intake, reason: PolytokenError) -> None:
        """Fail what this run has open, has queued or still queues; the requests of others go on."""
        intake.refusal = intake.refusal or reason
        scheduler.fail(reason, lambda sink: isinstance(sink, Handle) and sink.intake is intake)
        for item in self._inbox.items():
            if item.intake is intake and self._inbox.remove(lambda other, item=item: other is item):  # type: ignore[misc]
                self._refuse(scheduler, item, reason)

    def _leave_run(self, scheduler: Scheduler, intake: Intake) -> None:
        intake.left = True
        self._fail_run(scheduler, intake, interrupted())

    def _refuse(self, scheduler: Scheduler, item: Submission, reason: PolytokenError) -> None:
        """Fail what never reached the scheduler."""
        if item.intake is not None and item.intake.left:
            return
        if isinstance(item.payload, RequestRejected):
            scheduler.reject(item.payload, sink=item.handle, totals=item.totals)
        else:
            (item.totals or scheduler.totals).failed += 1
            item.handle(item.handle.failed(reason))

    def _clear(self, scheduler: Scheduler) -> None:
        """Fail what is open and queued, then accept again."""
        scheduler.interrupt()
        self._admit(scheduler)
        scheduler.begin_run()

    # -- orders ------------------------------------------------------------------------------------------------

    def call(self, act: Callable[[LoadedLane], T]) -> T:
        """Run a function on the owner thread, between two turns, and return or raise what it does."""

        def on_lane(_: Scheduler) -> T:
            assert self._lane is not None
            return act(self._lane)

        return self._ask(on_lane)

    def _ask(self, act: Callable[[Scheduler], T]) -> T:
        self._check_thread()
        self._check_started()
        order = Order(act)
        self._inbox.order(order)
        while not wait([order.future], self._stall_seconds).done:
            if not order.future.running():
                self._check_stall()
        result: T = order.future.result()
        return result

    def _order_quietly(self, act: Callable[[Scheduler], Any]) -> None:
        """Leave an order without waiting; an engine that has ended has nothing left to order about."""
        try:
            self._inbox.order(Order(act))
        except EngineError:
            return

    def _next(self, outbox: Outbox[T]) -> T:
        self._check_thread()  # an iterator may have been started elsewhere
        while True:
            try:
                return outbox.get(self._stall_seconds)
            except TimeoutError:
                self._check_stall()

    def _check_thread(self) -> None:
        """Refuse what would wait for the owner thread on that thread itself, for ever."""
        if threading.current_thread() is self._thread:
            raise UsageError("this call waits for the owner thread and was made on it", code="wrong_thread")

    def _check_stall(self) -> None:
        since, patience = self._busy_since, self._stall_seconds
        if since is not None and patience is not None and time.monotonic() - since > patience:
            raise EngineError(f"the engine has not finished a turn for {patience:g} s", code="engine_stalled")

    def _check_started(self) -> None:
        if self._thread is None:
            raise EngineError("the engine was not started: call start(), or use it in a with statement")

    # -- the owner thread --------------------------------------------------------------------------------------

    def _own(self) -> None:
        scheduler: Scheduler | None = None
        end = EngineError("the engine was closed")
        try:
            scheduler = self._prepare()
            if scheduler is not None:
                self._work(scheduler)
        except BaseException as fault:
            _LOG.error("the owner thread stopped\n%s", traceback.format_exc())
            end = EngineError(f"the engine stopped: {type(fault).__name__}: {fault}", code="engine_stopped")
        self._end(scheduler, end)
        release = self._lane.release if self._lane is not None else None
        self._lane = scheduler = None
        gc.collect()
        if release is not None:
            release()

    def _prepare(self) -> Scheduler | None:
        """Load; None when that failed, and then the one who started knows why."""
        assert self._load is not None
        try:
            self._lane = lane = self._load()
            scheduler = Scheduler(
                lane.lane,
                self.limits if lane.rows_per_step is None else replace(self.limits, rows_per_step=lane.rows_per_step),
                encode=lane.encode,
                open_text=lane.open_text,
                emit=drop,
                label=lane.label,
                token_events=self._token_events,
                clock=self._clock,
                log=_LOG.error,
            )
        except BaseException as error:
            self._started.set_exception(error)
            return None
        finally:
            self._load = None  # it may hold what it loaded
        self._started.set_result((lane.loaded, lane.sampling, lane.tokenizer))
        return scheduler

    def _work(self, scheduler: Scheduler) -> None:
        while True:
            self._busy_since = None
            orders = self._inbox.take_orders(wait=scheduler.idle)
            self._busy_since = time.monotonic()
            for order in orders:
                order.run(scheduler)
            shut = self._inbox.is_shut
            if shut and not self._drain:
                return
            self._admit(scheduler)
            if not scheduler.idle:
                scheduler.turn()
            elif shut:
                return

    def _admit(self, scheduler: Scheduler) -> None:
        while scheduler.has_room:
            item = self._inbox.take_item()
            if item is None:
                return
            if item.intake is not None and item.intake.refusal is not None:
                self._refuse(scheduler, item, item.intake.refusal)  # posted while its run was ended
                continue
            if isinstance(item.payload, RequestRejected):
                scheduler.reject(item.payload, sink=item.handle, totals=item.totals)
                continue
            if item.intake is not None:
                if item.payload.request_id in item.intake.taken:
                    scheduler.reject(duplicate(item.payload), sink=item.handle, totals=item.totals)
                    continue
                item.intake.taken.add(item.payload.request_id)
            self._open.add(item.handle)
            scheduler.offer(item.payload, sink=item.handle, token_events=item.token_events, totals=item.totals)

    def _withdraw(self, scheduler: Scheduler, handle: Handle) -> bool:
        """End this one as cancelled, wherever it is; False when it has ended."""
        if handle.done:
            return False
        if handle in self._open:
            return scheduler.cancel(handle.request_id)
        removed = self._inbox.remove(lambda item: item.handle is handle)
        if removed:
            scheduler.totals.failed += 1  # one of a run is withdrawn by its run alone
            handle(handle.failed(CancelledError("the request was cancelled")))
        return removed

    def _end(self, scheduler: Scheduler | None, error: EngineError) -> None:
        """Give everyone who waits for this thread an answer."""
        self._inbox.shut(error)
        self._busy_since = None
        try:
            if scheduler is not None:
                scheduler.abandon(error)
        except BaseException:
            _LOG.error("closing the open rows failed\n%s", traceback.format_exc())
        for handle in list(self._open):
            handle(handle.failed(error))  # lost by the scheduler in the middle of a turn
        while (item := self._inbox.take_item()) is not None:
            item.handle(item.payload if isinstance(item.payload, RequestRejected) else item.handle.failed(error))
        for order in self._inbox.take_orders(wait=False):
            order.future.set_exception(error)
