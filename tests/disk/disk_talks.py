"""Conversations over a bank with a disk below it, and processes that end and start again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from session_talks import CHUNK, Talks

from polytoken.cache.disk.store import DiskStore
from polytoken.cache.disk.tier import DiskTier


class DiskTalks:
    """`Talks` that can be restarted: the bank is lost, the folder stays. Every turn is checked against a cold one.

    Attributes:
        talks: of the process that runs now.
        tier: its disk tier.
    """

    def __init__(
        self, root: Path, kind: str, *, memory: int = 1 << 28, disk: int = 1 << 28, environment: str = "here"
    ) -> None:
        self._root, self._kind, self._memory, self._disk = root, kind, memory, disk
        self.environment = environment
        self._start({})

    def _start(self, texts: dict[str, tuple[int, ...]]) -> None:
        store = DiskStore(self._root, limit_bytes=self._disk)
        environment: dict[str, Any] = {"code": self.environment}
        self.tier = DiskTier(store, environment=environment, label="tiny", checkpoint=self._kind)
        self.talks = Talks(self._kind, self._memory, tier=self.tier)
        self.talks.texts.update(texts)

    def restart(self) -> None:
        """End the process in good order and start another."""
        self.close()
        self._start(dict(self.talks.texts))

    def close(self) -> None:
        assert self.tier.close(30) == 0


def restore_often(root: Path, kind: str, *, history: int, restores: int, count: int) -> list[int]:
    """Restart again and again, each time with a prompt that parts from the stored history anywhere.

    Returns how many tokens each prompt got from the disk; that all bits are those of cold runs is checked on the way.
    """
    draws = random.Random(kind)
    run = DiskTalks(root, kind)
    run.talks.say("a", tuple(draws.randrange(10, 14) for _ in range(history)), count=count)
    cached = []
    for trial in range(restores):
        run.restart()
        whole = run.talks.texts["a"]
        keep = len(whole) if trial == 0 else draws.randrange(1, len(whole))
        more = tuple(draws.randrange(10, 14) for _ in range(draws.randrange(1, 6)))
        cached.append(run.talks.say(None, (*whole[:keep], *more), count=count).cached_tokens)
    assert cached[0] == len(run.talks.texts["a"])
    assert any(position % CHUNK for position in cached[1:])
    assert run.tier.store.statistics().refused == {}
    run.close()
    return cached
