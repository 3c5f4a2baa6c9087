"""What the server adds to the engine at one stream: tokens per second, and time to the first byte.

python benchmarks/server_overhead.py --model smollm2-135m --rounds 15

One process holds the engine and the server over it; the client is another one, so that its work is not counted as the
server's. Rounds alternate between the engine's own stream, read in the server's process, and the same request over
HTTP; both are greedy and give the same text. Told are medians over rounds, paired, and all rounds with --json.

- rate: tokens after the first, over the seconds from the first to the last.
- first: seconds from the call to the first text.
- cpu: seconds of processor time in the server's process, over all its threads, of one answer.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

PROMPT = [{"role": "user", "content": "Tell me about the rivers of Europe, one after another."}]


@dataclass(frozen=True)
class Round:
    """One answer: when its text came, as its reader saw it."""

    first: float
    rate: float
    tokens: int
    text: str
    cpu: float = 0.0


def client(line: Connection, port: int, body: dict[str, Any]) -> None:
    """The other process: answers every number on the line with a round over HTTP, on a connection that stands."""
    record = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    while line.recv():
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        link.connect()
        start = time.perf_counter()
        link.request("POST", "/v1/chat/completions", record, {"Content-Type": "application/json"})
        answer = link.getresponse()
        assert answer.status == 200, answer.read()
        lines: list[tuple[float, bytes]] = []
        while raw := answer.readline():
            lines.append((time.perf_counter(), raw))
        link.close()
        line.send((start, lines))


def over_http(line: Connection) -> Round:
    """One answer through the other process, whose clock is this one's. Read after its end, so as not to slow it."""
    before = time.process_time()
    line.send(1)
    start, lines = line.recv()
    cpu = time.process_time() - before
    chunks = [(at, json.loads(raw[6:])) for at, raw in lines if raw.startswith(b"data: {")]
    parts = [
        (at, part) for at, chunk in chunks for choice in chunk["choices"] if (part := choice["delta"].get("content"))
    ]
    total = chunks[-1][1]["usage"]["completion_tokens"]
    times = [at for at, _ in parts]
    seconds = times[-1] - times[0]
    return Round(times[0] - start, (total - 1) / seconds, total, "".join(part for _, part in parts), cpu)


def in_engine(engine: Any, tokens: int) -> Round:
    """The same request through the engine's own stream."""
    from polytoken.api import make_request  # noqa: PLC0415

    before, start = time.process_time(), time.perf_counter()
    times: list[float] = []
    parts: list[str] = []
    count = 0
    request = make_request(engine, messages=PROMPT, max_new_tokens=tokens, sampling={"temperature": 0.0})
    for event in engine.stream(request):
        if getattr(event, "delta", None):
            times.append(time.perf_counter())
            parts.append(event.delta)
            count = event.generated_tokens
    seconds = times[-1] - times[0]
    return Round(times[0] - start, (count - 1) / seconds, count, "".join(parts), time.process_time() - before)


async def measure(engine: Any, *, rounds: int, tokens: int) -> list[tuple[Round, Round]]:
    """Pairs of rounds, engine and server, each first in turn; one unmeasured pair comes before."""
    import uvicorn  # noqa: PLC0415

    from polytoken.assembly import EngineOptions  # noqa: PLC0415
    from polytoken.server.app import make_app  # noqa: PLC0415
    from polytoken.server.pool import ModelPool  # noqa: PLC0415
    from polytoken.server.run import open_socket  # noqa: PLC0415
    from polytoken.server.settings import ServerSettings  # noqa: PLC0415

    settings = ServerSettings(port=0)
    door = open_socket(settings)
    pool = ModelPool({"model": EngineOptions(model="model")}, lambda _: engine)
    pool.adopt("model", engine)
    server = uvicorn.Server(uvicorn.Config(make_app(pool, settings), log_config=None, access_log=False))
    running = asyncio.create_task(server.serve(sockets=[door]))
    ours, theirs = multiprocessing.Pipe()
    body = {"model": "model", "messages": PROMPT, "max_tokens": tokens, "temperature": 0}
    port = door.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(target=client, args=(theirs, port, body), daemon=True)
    other.start()
    theirs.close()  # should it die, the line ends

    def work() -> list[tuple[Round, Round]]:
        pairs = []
        for number in range(rounds + 1):
            if number % 2:
                served, alone = over_http(ours), in_engine(engine, tokens)
            else:
                alone, served = in_engine(engine, tokens), over_http(ours)
            assert served.text == alone.text, "the server's text is not the engine's"
            pairs.append((alone, served))
        ours.send(0)
        return pairs[1:]

    pairs = await asyncio.to_thread(work)
    server.should_exit = True
    await running
    return pairs


def report(pairs: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    """Medians over pairs."""
    return {
        "rounds": len(pairs),
        "tokens": pairs[0][0].tokens,
        "engine_tokens_per_second": statistics.median(alone.rate for alone, _ in pairs),
        "server_tokens_per_second": statistics.median(served.rate for _, served in pairs),
        "overhead_percent": statistics.median(100 * (1 - served.rate / alone.rate) for alone, served in pairs),
        "engine_first_ms": statistics.median(1000 * alone.first for alone, _ in pairs),
        "server_first_ms": statistics.median(1000 * served.first for _, served in pairs),
        "first_byte_added_ms": statistics.median(1000 * (served.first - alone.first) for alone, served in pairs),
        "cpu_added_us_per_token": statistics.median(1e6 * (s.cpu - a.cpu) / s.tokens for a, s in pairs),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the report, and return 0 when it keeps the limits."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--most-percent", type=float, default=3.0, help="of overhead in tokens per second")
    parser.add_argument("--most-ms", type=float, default=20.0, help="added to the first byte")
    parser.add_argument("--json", action="store_true", help="also print every round")
    chosen = parser.parse_args(arguments)
    import polytoken  # noqa: PLC0415

    with polytoken.load(chosen.model, prefill_chunk_size=64) as engine:
        pairs = asyncio.run(measure(engine, rounds=chosen.rounds, tokens=chosen.tokens))
    told = report(pairs)
    if chosen.json:
        told["pairs"] = [[{**asdict(one), "text": None} for one in pair] for pair in pairs]
    print(json.dumps(told, indent=None if chosen.json else 2))
    return int(told["overhead_percent"] > chosen.most_percent or told["first_byte_added_ms"] > chosen.most_ms)


if __name__ == "__main__":
    sys.exit(main())
