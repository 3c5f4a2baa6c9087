"""Many streams with random disconnects against a running server: survivors say what they say alone, nothing stays open.

polytoken serve --model smollm2-135m --max-queue-size 256
python benchmarks/server_soak.py --url http://127.0.0.1:8000 --streams 64 --minutes 5 --pid PID

With the process id of a server on this machine its threads, open files and resident memory are read before and after,
both times idle and after a round at full width has warmed it up.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PROMPTS = ("Count to ten.", "Name three rivers.", "Why is the sky blue?", "Write a haiku about rain.")
_TEXTS = ("reasoning_content", "content")


@dataclass
class Outcome:
    """What the run saw."""

    finished: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)
    still_open: int = 0
    leaks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    threads: int
    files: int
    resident: int  # bytes


def holdings(pid: int) -> Holdings:
    """Of a process of this machine, from /proc."""
    place = Path(f"/proc/{pid}")
    fields = dict(line.split(":", 1) for line in (place / "status").read_text().splitlines())
    resident = int(fields["VmRSS"].split()[0]) << 10
    return Holdings(int(fields["Threads"]), len(list((place / "fd").iterdir())), resident)


def leaks_of(before: Holdings, after: Holdings, *, growth: int) -> list[str]:
    """What an idle process holds more than it did, beside `growth` bytes of memory."""
    found = []
    if after.threads > before.threads:
        found.append(f"threads: {before.threads} -> {after.threads}")
    if after.files > before.files:
        found.append(f"open files: {before.files} -> {after.files}")
    if after.resident > before.resident + growth:
        found.append(f"resident MiB: {before.resident >> 20} -> {after.resident >> 20}")
    return found


def settled(pid: int, *, seconds: float = 15.0) -> Holdings:
    """What it holds once connections that were just left are closed: the least within some seconds."""
    least = holdings(pid)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.5)
        with contextlib.suppress(OSError):  # a file that closed while it was counted
            now = holdings(pid)
            least = Holdings(*(min(a, b) for a, b in zip(vars(least).values(), vars(now).values(), strict=True)))
    return least


def body(variant: int, tokens: int) -> dict[str, Any]:
    """One of a few requests, each with its own seed and sampling; greedy ones among them."""
    sampling = {"temperature": 0} if variant % 3 == 0 else {"temperature": 0.9, "top_p": 0.9, "seed": variant}
    prompt = PROMPTS[variant % len(PROMPTS)]
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens, "stream": True, **sampling}


def stream(host: str, port: int, record: dict[str, Any], *, leave_after: int | None = None) -> str | None:
    """The text of one stream; None when it was left early. Raises RuntimeError for an error inside it."""
    connection = http.client.HTTPConnection(host, port, timeout=300)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(record), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"status {answer.status}")
        parts: list[str] = []
        for count, line in enumerate(answer):
            if leave_after is not None and count >= leave_after:
                return None
            data = line.decode().strip().removeprefix("data: ")
            if data == "[DONE]":
                return "".join(parts)
            if not data.startswith("{"):
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                raise RuntimeError(chunk["error"]["code"])
            parts += [choice["delta"].get(name) or "" for choice in chunk["choices"] for name in _TEXTS]
        raise RuntimeError("the stream broke off")
    finally:
        connection.close()


def soak(url: str, *, streams: int, seconds: float, tokens: int, variants: int = 12, seed: int = 0) -> Outcome:
    """Keep so many streams open for so long, leaving about half of them at a random place."""
    place = urlsplit(url)
    host, port = str(place.hostname), int(place.port or 80)
    solo = {variant: stream(host, port, body(variant, tokens)) for variant in range(variants)}
    outcome, lock, end = Outcome(), threading.Lock(), time.monotonic() + seconds

    def work(number: int) -> None:
        rng = random.Random(seed * 1000 + number)
        while time.monotonic() < end:
            variant = rng.randrange(variants)
            leave = rng.randrange(3 * tokens) if rng.random() < 0.5 else None
            try:
                text = stream(host, port, body(variant, tokens), leave_after=leave)
            except RuntimeError as error:
                with lock:
                    if str(error) == "status 429":
                        outcome.refused += 1
                    else:
                        outcome.wrong.append(f"variant {variant}: {error}")
                continue
            with lock:
                outcome.left += text is None
                outcome.finished += text is not None
                if text is not None and text != solo[variant]:
                    outcome.wrong.append(f"variant {variant} differs from its solo run")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    deadline = time.monotonic() + 10
    while True:
        outcome.still_open = _health(host, port)["open_turns"]
        if not outcome.still_open or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    for variant, text in solo.items():  # a row that nobody closed would keep its place
        if stream(host, port, body(variant, tokens)) != text:
            outcome.wrong.append(f"variant {variant} differs alone after the run")
    return outcome


def _health(host: str, port: int) -> dict[str, Any]:
    connection = http.client.HTTPConnection(host, port, timeout=30)
    connection.request("GET", "/health")
    record: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print the outcome, and return 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pid", type=int, help="of the server, to watch for leaks")
    parser.add_argument("--growth-mib", type=int, default=64, help="of resident memory that is no leak")
    chosen = parser.parse_args(arguments)

    def run(seconds: float) -> Outcome:
        return soak(chosen.url, streams=chosen.streams, seconds=seconds, tokens=chosen.tokens)

    before = None
    if chosen.pid is not None:
        run(min(60.0, 15 * chosen.minutes))
        before = settled(chosen.pid)
    outcome = run(60 * chosen.minutes)
    if before is not None:
        after = settled(chosen.pid)
        outcome.leaks = leaks_of(before, after, growth=chosen.growth_mib << 20)
        print(before, after, sep="\n")
    print(outcome)
    return int(bool(outcome.wrong or outcome.leaks or outcome.still_open or not outcome.finished or not outcome.left))


if __name__ == "__main__":
    sys.exit(main())
