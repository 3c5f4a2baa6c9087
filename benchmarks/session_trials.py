"""Hundreds of random conversations, every turn held against a cold run bit for bit.

    python benchmarks/session_trials.py [--conversations 220] [--seed 1]

Turns, edits of the history, repetitions, cancelled requests, stop strings among accepted drafts, forks, snapshots and
strangers' prompts, in banks of four sizes (0 among them, and two that evict all the time), on AR, MTP and canvas. After
each step: logits, hidden rows, states, head histories, latents and tokens equal those of a run that stores nothing; all
bytes are exact and within the limit; no bit of anything stored, named snapshots among it, has changed. The tests do the
same with fewer. Exits with a traceback at the first wrong bit.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import mlx.core as mx

from polytoken.kernels import products

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path[:0] = [str(TESTS / name) for name in ("reference", "mtp", "canvas_lane", "sessions")]

from session_talks import CANVAS_KINDS, EVERY_KIND, Talks, play, random_step  # noqa: E402

LIMITS = (1 << 28, 150_000, 400_000, 1 << 28, 0, 1 << 28)
SHOWN = ("hits", "near_hits", "live_hits", "reused_tokens", "evictions", "superseded", "thinned", "refusals")


def converse(kind: str, seed: int) -> Counter[str]:
    """One random conversation of several sessions; what was done, and what the bank counted."""
    draws = random.Random(f"{kind} {seed}")
    talks = Talks(kind, LIMITS[seed % len(LIMITS)], mark_bytes=draws.choice((None, 100_000)))
    counts: Counter[str] = Counter(conversations=1)
    for _ in range(draws.randrange(4, 13)):
        step = random_step(draws)
        play(talks, step)
        counts["steps"] += 1
        counts["turns"] += step[0] in ("turn", "edit", "again", "stranger")
    statistics = talks.bank.statistics()
    counts.update({name: getattr(statistics, name) for name in SHOWN})
    done = talks.lane.statistics()
    counts.update({name: done.get(name, 0) for name in ("rejected_drafts", "accepted_drafts")})
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=220)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    mx.set_default_device(mx.cpu)
    products.enable("exact")
    start, kinds = time.monotonic(), (*EVERY_KIND, *CANVAS_KINDS)
    total: Counter[str] = Counter()
    for number, kind in enumerate(kinds):
        counts: Counter[str] = Counter()
        for trial in range(arguments.conversations // len(kinds) + (number < arguments.conversations % len(kinds))):
            counts.update(converse(kind, arguments.seed * 1000 + trial))
        total.update(counts)
        print(f"{kind}: {', '.join(f'{count} {name}' for name, count in counts.items() if count)}", flush=True)
    print(f"all: {', '.join(f'{count} {name}' for name, count in total.items())}; every bit as cold")
    print(f"{time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
