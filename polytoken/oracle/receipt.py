"""Writing and reading receipts: JSON lines, the first of which says who speaks, the last how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TextIO

from polytoken.errors import EXIT_INTERRUPTED, PolytokenError, UsageError

SCHEMA: Final = 1  # version of the receipts; raised when a field changes its meaning or leaves
_INFINITE: Final = float("inf")
Record = dict[str, Any]
Write = Callable[[str], None]


class Receipts:
    """The two streams of one run: receipts on the one, progress on the other.

    Args:
        out: takes receipts, a line at a time.
        progress: takes progress records, a line at a time.
        file: also takes receipts; opened by the caller.
        descriptor: behind `progress`, for last words that cannot wait for the interpreter; None where there is none.

    Attributes:
        phase: `startup`, `loading`, `prefill`, `decode` or `finishing`: what the engine is doing now.
        records: how many receipts were written.
        on_phase: is told of every phase that is entered.
    """

    def __init__(
        self, out: Write, progress: Write, *, file: TextIO | None = None, descriptor: int | None = None
    ) -> None:
        self._out, self._progress, self._file, self.descriptor = out, progress, file, descriptor
        self.phase = "startup"
        self.on_phase: Callable[[str], None] | None = None
        self.records = 0
        self._stopped = False
        self._since = time.monotonic()
        self._seconds: dict[str, float] = {}

    def stop(self) -> None:
        """Make whoever writes or notes something next, on whatever thread, give up: nobody waits for it any more."""
        self._stopped = True

    def _check(self) -> None:
        if self._stopped:
            raise PolytokenError("the run was told to stop", code="interrupted")

    def enter(self, phase: str) -> None:
        """Note that this is being done from now on."""
        self._check()
        now = time.monotonic()
        self._seconds[self.phase] = self._seconds.get(self.phase, 0.0) + now - self._since
        self.phase, self._since = phase, now
        if self.on_phase is not None:
            self.on_phase(phase)

    def write(self, event: str, **fields: Any) -> None:
        """One receipt."""
        self._check()
        line = encode(event, fields)
        self._out(line)
        if self._file is not None:
            self._file.write(line)
            self._file.flush()
        self.records += 1

    def note(self, event: str, **fields: Any) -> None:
        """One record of progress."""
        self._check()
        self.tell(event, **fields)

    def tell(self, event: str, **fields: Any) -> None:
        """One record of progress of who watches the run, which a stop does not end."""
        self._progress(encode(event, fields))

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Around the work: the last receipt tells how it ended, also by a failure or a signal, which goes on."""
        try:
            yield
        except PolytokenError as failure:
            self.end(failure)
            raise
        except KeyboardInterrupt as interrupt:
            stopped = PolytokenError("ended by a signal", code="interrupted")
            stopped.exit_status = getattr(interrupt, "exit_status", EXIT_INTERRUPTED)
            self.end(stopped)
            raise
        except Exception as defect:
            self.end(PolytokenError(f"{type(defect).__name__}: {defect}"))
            raise
        self.end()

    def end(self, failure: PolytokenError | None = None) -> None:
        """The last receipt: how it ended, and how long each phase took."""
        self._stopped = False  # the work has ended
        self.enter("finishing")
        fault = None if failure is None else {"code": failure.code, "field": failure.field, "error": str(failure)}
        status = 0 if failure is None else failure.exit_status
        self.write(
            "receipt_end",
            records=self.records,
            exit_status=status,
            failure=fault,
            phase_seconds=self._seconds,
        )


def encode(event: str, fields: Mapping[str, Any]) -> str:
    """One line of strict JSON; a float that is not finite is a defect and raises ValueError."""
    return json.dumps({"event": event, **fields}, ensure_ascii=False, allow_nan=False) + "\n"


def read_receipts(path: Path, *, flag: str | None = None, cut_off: bool = False) -> list[Record]:
    """The records of a receipt: every line that begins with a brace, whatever its length.

    Args:
        flag: that named the file; None for an argument without one.
        cut_off: whether a last line without its end is left out, as of a writer that was killed.

    Raises:
        UsageError: the file cannot be read, or such a line is not a JSON object with an `event`.
    """
    try:
        # Lines end with a line feed alone: JSON may hold other characters that end lines elsewhere.
        # Some shells mark a redirected text with a byte order mark.
        with path.open(encoding="utf-8-sig", newline="\n") as lines:
            return list(_parse(lines, name=str(path), flag=flag, cut_off=cut_off))
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise _refuse(f"cannot read {str(path)!r}: {reason}", flag) from None


def _parse(lines: Iterable[str], *, name: str, flag: str | None, cut_off: bool) -> Iterator[Record]:
    """Records from lines; lines that begin with no brace are somebody's plain text and are passed over."""
    for number, line in enumerate(lines, start=1):
        if not line.startswith("{"):
            continue
        try:
            record = json.loads(line, parse_constant=_no_number, parse_float=_finite)
        except (ValueError, RecursionError) as error:
            if cut_off and isinstance(error, json.JSONDecodeError) and not line.endswith("\n"):
                return
            raise _refuse(f"{name}, line {number} is not JSON: {error}", flag) from None
        if not isinstance(record.get("event"), str):
            raise _refuse(f"{name}, line {number} has no event", flag)
        yield record


def _finite(word: str) -> float:
    value = float(word)
    return value if abs(value) < _INFINITE else _no_number(word)


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")


def _refuse(text: str, flag: str | None) -> UsageError:
    return UsageError(text if flag is None else f"{flag}: {text}", field=flag)


def start_fields(
    *, engine: str, mode: str, lane: str, model: str, environment: Mapping[str, Any], settings: Mapping[str, Any]
) -> Record:
    """The fields of `receipt_start`, the first record of every receipt, whoever writes it.

    Args:
        engine: name and version of the engine.
        mode: what was run, as `oracle run` calls it.
        lane: `ar`, `mtp` or `canvas`.
        model: as it was named.
        environment: see `describe_environment`.
        settings: the engine's own.
    """
    return {
        "schema": SCHEMA,
        "engine": engine,
        "mode": mode,
        "lane": lane,
        "model": model,
        "environment": dict(environment),
        "settings": dict(settings),
    }
