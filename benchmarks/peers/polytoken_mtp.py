"""Our side of `mtp_against_mtplx.py`: the MTP lane, one greedy row, with the time of every window."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from lines import runner_parser, serve
from ours import commits, open_row, schedule
from products import choose_products

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane, identify
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.request import Request


class Engine:
    def __init__(self, checkpoint: Path, products: str, chunk: int) -> None:
        mx.set_default_device(mx.cpu)
        self.products = choose_products(products)
        self.runtime = load_runtime(checkpoint, dtype="float32")
        self.chunk = chunk
        self.identity = StateIdentity(checkpoint="random", lane="ar", grid=chunk)

    def about(self) -> dict[str, Any]:
        return {"products": self.products, "parameters": self.runtime.parameters, "mlx": mx.__version__}

    def run(self, prompt: Sequence[int], count: int, depth: int, scheduled: bool = False) -> dict[str, Any]:
        """Ids, counts, and seconds between the ends of consecutive windows.

        Depth 0 is the AR lane. `scheduled` runs the scheduler, with its events, around the lane, as an engine does.
        """
        lane = self._lane(depth)
        request = Request(request_id="r", token_ids=tuple(prompt), max_new_tokens=count, ignore_eos=True)
        stamps: list[float] = []
        if scheduled:
            # The first turn prefills and commits the first token.
            result = schedule(
                lane,
                request,
                prefill_budget=self.chunk,
                token_events=True,
                after_turn=lambda: stamps.append(time.perf_counter()),
            )
            return _answer(lane, list(result.token_ids), stamps)
        row = open_row(lane, request, prompt)
        tokens: list[int] = []
        for commit in commits(lane, row):
            stamps.append(time.perf_counter())
            tokens += commit.token_ids
        return _answer(lane, tokens, stamps)

    def bare(self, prompt: Sequence[int], cycles: int, depth: int) -> list[float]:
        """Seconds of the network's part of a cycle alone: `depth` chained head forwards and one of depth + 1 rows."""
        model, head = self.runtime.model, self.runtime.model.draft_head
        state, history, seconds = model.make_cache(), head.make_cache(), []
        hidden = model.forward(mx.array([prompt], mx.int32), state)
        token = mx.argmax(model.project(hidden.post[:, -1:]), axis=-1).astype(mx.int32)
        rows = head.take(hidden)
        mx.eval(token, rows)
        for _ in range(cycles):
            before = time.perf_counter()
            ids, h = [token], rows[:, -1:]
            for _ in range(depth):
                logits, h = head.draft(h, ids[-1], history)
                ids.append(mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32))
            hidden = model.forward(mx.concatenate(ids, axis=1), state)
            choices = mx.argmax(model.project(hidden.post), axis=-1).astype(mx.int32)
            token, rows = choices[:, -1:], head.take(hidden)
            mx.eval(choices, rows)
            seconds.append(time.perf_counter() - before)
        return seconds

    def _lane(self, depth: int) -> Lane[Any]:
        model, limit = self.runtime.model, self.runtime.max_positions
        if depth == 0:
            bank = StateBank(0, identity=self.identity)
            return ArLane(model, bank, prefill_chunk=self.chunk, eos_ids=(), max_positions=limit)
        settings = MtpSettings(depth=depth)
        bank = StateBank(0, identity=identify(self.identity, settings, model))
        return MtpLane(model, bank, prefill_chunk=self.chunk, eos_ids=(), max_positions=limit, settings=settings)


def _answer(lane: Lane[Any], tokens: list[int], stamps: list[float]) -> dict[str, Any]:
    counts = dict(lane.statistics())
    return {
        "tokens": tokens,
        "accepted": counts.get("accepted_drafts", 0),
        "drafted": counts.get("drafted_tokens", 0),
        "verifies": counts.get("cycles", len(tokens) - 1),
        "seconds": [after - before for before, after in pairwise(stamps)],
    }


def main() -> None:
    parser = runner_parser(__doc__, products="exact")
    parser.add_argument("--chunk", type=int, default=256)
    options = parser.parse_args()
    engine = Engine(options.checkpoint, options.products, options.chunk)
    serve({"about": engine.about, "run": engine.run, "bare": engine.bare})


if __name__ == "__main__":
    main()
