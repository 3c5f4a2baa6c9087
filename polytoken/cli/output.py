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

_MIB: Final = 1 << 20


def say(kind: str, text: str) -> None:
    """One line on stderr, headed by the program's name and `kind` (error, warning, note)."""
    print(f"polytoken: {kind}: {text}", file=sys.stderr, flush=True)


def write(text: str) -> None:
    """Text on stdout, at once. Raises OutputClosed or OutputFailed."""
    sys.stdout.write(text)
    sys.stdout.flush()


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
        f"lane {loaded.lane} ({lane_reason(loaded)})",
    ]
    if loaded.lane == "mtp":
        parts.append(_describe_drafting(loaded))
    elif loaded.lane == "canvas":
        parts.append(f"{about.get('policy')} policy on a canvas of {about.get('canvas_length')}")
    if about.get("device") == "cpu":
        form = f" ({products['form']}, {products.get('threads')} thread(s))" if products.get("form") else ""
        parts.append(f"{products.get('kind')} products{form}")
    return ", ".join([*parts, f"loaded in {loaded.load_seconds:.2f} s"])


def _describe_drafting(loaded: RuntimeLoaded) -> str:
    about = loaded.extra
    if about.get("drafter") == "lookup":
        return "drafts by lookup"
    most = "" if about.get("depth_policy") == "fixed" else "up to "
    return f"drafts by {about.get('drafter')}, depth {most}{about.get('depth')} ({about.get('depth_policy')})"


def lane_reason(loaded: RuntimeLoaded) -> str:
    """Why this lane is at work."""
    if loaded.settings.get("lane", "auto") != "auto":
        return "--lane says so"
    if loaded.lane == "canvas":
        return "a block-diffusion checkpoint"
    if loaded.lane == "mtp":
        drafter = loaded.extra.get("drafter")
        return "the checkpoint has a draft head" if drafter == "head" else f"--drafter {drafter} asks for it"
    return str(loaded.extra.get("draft_head_note") or "no draft head in this family of models")


def report_dropped_head(loaded: RuntimeLoaded) -> None:
    """Say so where a model of a family that drafts decodes token by token unasked: that is never done in silence."""
    note = loaded.extra.get("draft_head_note")
    if loaded.lane == "ar" and note and loaded.settings.get("lane", "auto") == "auto":
        say("note", f"lane ar, one token per forward: {note}")


def describe_work(record: Mapping[str, Any], *, canvas_length: int | None = None) -> str:
    """What a lane did beyond one token per forward, from the record of a result or a summary; "" for lane ar.

    `canvas_length` is the loaded model's, for a canvas lane.
    """
    if record.get("denoise_steps"):
        return _describe_denoises(record, canvas_length)
    parts = []
    if drafted := record.get("drafted_tokens"):
        accepted = record["accepted_drafts"]
        shares = [a / d for a, d in zip(record["accepted_by_depth"], record["drafted_by_depth"], strict=True) if d]
        by_depth = f"; by depth {', '.join(f'{share:.0%}' for share in shares)}" if shares else ""
        parts.append(f"accepted {accepted} of {drafted} drafts ({accepted / drafted:.0%}{by_depth})")
        if copied := record.get("copied_tokens"):
            parts.append(f"{record['accepted_copies']} of {copied} copies among them")
    if str(record.get("speculation", "on")) != "on":
        parts.append(f"speculation {record['speculation']}")
    return ", ".join(parts)


def _describe_denoises(record: Mapping[str, Any], canvas_length: int | None) -> str:
    parts = [f"{record['denoise_steps']} denoise steps"]
    per_canvas = steps_per_canvas(record, canvas_length)
    if per_canvas is not None:
        parts.append(f"{per_canvas:.1f} steps/canvas")
    if rate := record.get("denoise_steps_per_second"):
        parts.append(f"{rate:.1f} denoises/s")
    if record.get("ttfd_seconds") is not None:
        parts.append(f"first after {record['ttfd_seconds']:.2f} s")
    return ", ".join(parts)


def steps_per_canvas(record: Mapping[str, Any], canvas_length: int | None) -> float | None:
    """Denoises per canvas; a canvas that rolls on counts as many as its length goes into the tokens."""
    if record.get("canvas_count"):
        return float(record["denoise_steps"] / record["canvas_count"])
    if canvas_length is None or not record.get("generated_tokens"):
        return None
    return float(record["denoise_steps"] * canvas_length / record["generated_tokens"])


def describe_result(
    result: GenerationResult, *, floor_share: float | None = None, canvas_length: int | None = None
) -> str:
    """The closing line of one request: its speed in the numbers that can be compared."""
    rate = result.decode_tokens_per_second
    parts = [
        f"{result.generated_tokens} tokens in {result.elapsed_seconds:.2f} s ({result.stop_reason})",
        "too short for a rate" if rate is None else f"{rate:.1f} tokens/s",
        f"{result.tokens_per_forward:.2f} tokens/forward",
    ]
    if work := describe_work(result, canvas_length=canvas_length):
        parts.append(work)
    if floor_share is not None:
        parts.append(f"{floor_share:.0%} of the byte floor")
    cached = f", {result.prefix_cache_tokens} cached" if result.prefix_cache_tokens else ""
    return ", ".join([*parts, f"prompt {result.prompt_tokens} tokens in {result.prefill_seconds:.2f} s{cached}"])


def describe_summary(summary: InferenceSummary) -> str:
    """The closing line of a run of many requests."""
    work = describe_work(summary.to_dict())
    if denoises := summary.extra.get("active_row_denoises"):
        work = f"{denoises} denoise steps, {denoises / max(summary.elapsed_seconds, 1e-9):.1f} denoises/s"
    return (
        f"{summary.finished_requests} finished, {summary.failed_requests} failed, "
        f"{summary.rejected_requests} rejected; {summary.generated_tokens} tokens in {summary.elapsed_seconds:.2f} s, "
        f"{summary.generated_tokens_per_second:.1f} tokens/s, {summary.tokens_per_forward:.2f} tokens/forward, "
        f"{f'{work}, ' if work else ''}{summary.prefix_cache_reused_tokens} prompt tokens reused"
    )


def drop_unset(record: Mapping[str, Any]) -> dict[str, Any]:
    """The members that are not None."""
    return {name: value for name, value in record.items() if value is not None}
