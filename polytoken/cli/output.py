"""What commands print: results on stdout, everything about them on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, Final

from polytoken.events import (
    Event,
    GenerationFailed,
    GenerationResult,
    InferenceSummary,
    RequestRejected,
    RuntimeLoaded,
    Token,
)

EXIT_PIPE: Final = 141  # the reader of our output left: what a shell reports for SIGPIPE
_MIB: Final = 1 << 20


class OutputClosed(Exception):  # noqa: N818  (no error)
    """Whoever read our output has gone."""


def say(kind: str, text: str) -> None:
    """One line on stderr, headed by the program's name and `kind` (error, warning, note)."""
    print(f"polytoken: {kind}: {text}", file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Text on stdout, at once."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise OutputClosed from None


def write_json(value: Any) -> None:
    """A report on stdout as indented JSON."""
    write(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2) + "\n")


class JsonLines:
    """Every event as one line of JSON on stdout, in UTF-8 whatever the locale says."""

    token_events = True

    def __init__(self) -> None:
        reconfigure = getattr(sys.stdout, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace", newline="\n")

    def __call__(self, event: Event) -> None:
        write(event.to_json() + "\n")


class PlainText:
    """The text of a single request on stdout, whole at its end or, with `stream`, as it comes."""

    def __init__(self, *, stream: bool) -> None:
        self.token_events = stream
        self._open_line = False

    def __call__(self, event: Event) -> None:
        if isinstance(event, Token):
            self._write(event.delta)
        elif isinstance(event, GenerationResult):
            self._end("" if self.token_events else event.text)
        elif isinstance(event, GenerationFailed):
            self._end("" if self.token_events else event.text or "")
            if event.code != "interrupted":
                say("error", event.error)
        elif isinstance(event, RequestRejected):
            say("error", event.error)

    def _write(self, text: str) -> None:
        if text:
            write(text)
            self._open_line = not text.endswith("\n")

    def _end(self, text: str) -> None:
        self._write(text)
        if self._open_line:
            self._write("\n")


def describe_runtime(loaded: RuntimeLoaded) -> str:
    """One line about the model in memory."""
    about, products = loaded.extra, loaded.extra.get("products", {})
    parts = [
        f"{about.get('model', loaded.checkpoint)}",
        f"{about.get('parameters', 0) / 1e6:.1f} M parameters in {about.get('weight_bytes', 0) / _MIB:.0f} MiB",
        f"{about.get('dtype')} on {about.get('device')}",
        f"lane {loaded.lane}",
    ]
    if about.get("device") == "cpu":
        form = f" ({products['form']}, {products.get('threads')} thread(s))" if products.get("form") else ""
        parts.append(f"{products.get('kind')} products{form}")
    return ", ".join([*parts, f"loaded in {loaded.load_seconds:.2f} s"])


def describe_result(result: GenerationResult, *, floor_share: float | None = None) -> str:
    """The closing line of one request: its speed in the numbers that can be compared."""
    rate = result.decode_tokens_per_second
    parts = [
        f"{result.generated_tokens} tokens in {result.elapsed_seconds:.2f} s ({result.stop_reason})",
        "too short for a rate" if rate is None else f"{rate:.1f} tokens/s",
        f"{result.tokens_per_forward:.2f} tokens/forward",
    ]
    if floor_share is not None:
        parts.append(f"{floor_share:.0%} of the byte floor")
    cached = f", {result.prefix_cache_tokens} cached" if result.prefix_cache_tokens else ""
    return ", ".join([*parts, f"prompt {result.prompt_tokens} tokens in {result.prefill_seconds:.2f} s{cached}"])


def describe_summary(summary: InferenceSummary) -> str:
    """The closing line of a run of many requests."""
    return (
        f"{summary.finished_requests} finished, {summary.failed_requests} failed, "
        f"{summary.rejected_requests} rejected; {summary.generated_tokens} tokens in {summary.elapsed_seconds:.2f} s, "
        f"{summary.generated_tokens_per_second:.1f} tokens/s, {summary.tokens_per_forward:.2f} tokens/forward, "
        f"{summary.prefix_cache_reused_tokens} prompt tokens reused"
    )


def drop_unset(record: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are not None."""
    return {name: value for name, value in record.items() if value is not None}
