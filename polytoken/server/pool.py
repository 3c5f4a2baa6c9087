"""The models that a server offers: loaded when first asked for, unloaded when another one needs their place."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from polytoken.assembly import EngineOptions
from polytoken.engine import Engine, LoadedLane
from polytoken.errors import PolytokenError
from polytoken.server.errors import ApiError, from_engine, shown
from polytoken.server.watch import Watchers

_LOG = logging.getLogger(__name__)
SPARE: Final = 1.15  # a model needs its weights and some more: caches, buffers
Files = frozenset[tuple[str, int, int]]


@dataclass(eq=False)
class Model:
    """A model in memory.

    Attributes:
        name: what clients call it.
        engine: running.
        users: open turns; a model in use is never unloaded.
        used: monotonic seconds of the latest use.
        watchers: of its requests.
        files: sizes and times of its files when it was loaded.
    """

    name: str
    engine: Engine
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    created: int = field(default_factory=lambda: int(time.time()))
    watchers: Watchers = field(default_factory=Watchers, repr=False)
    files: Files = field(init=False, repr=False)
    _rows: int | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.files = files_of(self.engine.loaded.checkpoint)

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def lane(self) -> str:
        return self.engine.loaded.lane

    @cached_property
    def fingerprint(self) -> str:
        """What a repeated answer depends on beside the request."""
        identity = str(self.engine.loaded.extra.get("identity", ""))
        return f"fp_{identity[:12]}" if identity else "fp_unknown"

    @property
    def max_positions(self) -> int:
        """Longest prompt and answer together, in tokens."""
        return int(self.engine.loaded.extra.get("max_positions") or (1 << 31))

    async def vocab_size(self) -> int:
        """Rows of the network's output, V, which may be more or fewer than the tokenizer's ids.

        Raises:
            PolytokenError: the engine takes nothing.
        """
        if self._rows is None:
            rows = await asyncio.to_thread(self.engine.call, _vocabulary)
            self._rows = self.tokenizer.vocab_size if rows is None else rows
        return self._rows

    @property
    def changed_on_disk(self) -> bool:
        """Whether its files are others than those it was loaded from."""
        return files_of(self.engine.loaded.checkpoint) != self.files

    def hold(self) -> None:
        """Keep it in memory until `release`."""
        self.users += 1
        self.used = time.monotonic()

    def release(self) -> None:
        self.users -= 1
        self.used = time.monotonic()


class ModelPool:
    """Models by name, at most `max_loaded` of them in memory.

    Args:
        options: what to load under each name; the first one serves requests that name none.
        open_engine: gives a running engine; called on a thread of its own.
        max_loaded: models in memory at once.
        available: bytes of memory that can be had; a model that does not fit beside the others makes them go.
    """

    def __init__(
        self,
        options: Mapping[str, EngineOptions],
        open_engine: Callable[[EngineOptions], Engine],
        *,
        max_loaded: int = 1,
        available: Callable[[], int] | None = None,
    ) -> None:
        self.options = dict(options)
        self.max_loaded = max_loaded
        self.loaded: dict[str, Model] = {}
        self.loads = self.unloads = 0
        self._open = open_engine
        self._available = available
        self._lock = asyncio.Lock()
        self._leaving: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.options)

    def adopt(self, name: str, engine: Engine) -> Model:
        """Take over an engine that runs already."""
        model = self.loaded[name] = Model(name, engine)
        return model

    @contextlib.asynccontextmanager
    async def use(self, name: str | None) -> AsyncIterator[Model]:
        """The model of this name, which stays in memory for the time of the block. Errors as in `_get`."""
        model = await self._get(name)
        try:
            yield model
        finally:
            model.release()

    async def _get(self, name: str | None) -> Model:
        """The model of this name, held once.

        Raises:
            ApiError: 404 for an unknown name, 503 when every place is in use, 507 for too little memory, or what is
                wrong with the checkpoint.
        """
        chosen = name or self.names[0]
        self.check_name(chosen)
        model = self.loaded.get(chosen)
        if model is None:
            async with self._lock:  # one load at a time
                model = self.loaded.get(chosen) or await self._load(chosen)
                model.hold()
                return model
        model.hold()
        return model

    async def _load(self, name: str) -> Model:
        options = self.options[name]
        while len(self.loaded) >= self.max_loaded:
            await self._unload_oldest(f"{name!r} needs its place")
        while self._available is not None and not self._fits(options):
            if not self.loaded:
                needed = needed_bytes(options)
                raise ApiError(
                    507,
                    f"the model {name!r} needs about {needed >> 20} MiB, and {self._available() >> 20} MiB are free",
                    code="insufficient_memory",
                    param="model",
                )
            await self._unload_oldest(f"{name!r} needs its memory")
        return self.adopt(name, await self._opened(options))

    def _fits(self, options: EngineOptions) -> bool:
        return self._available is None or needed_bytes(options) <= self._available()

    async def _opened(self, options: EngineOptions) -> Engine:
        try:
            engine = await asyncio.to_thread(self._open, options)
        except PolytokenError as error:
            raise from_engine(error) from None
        self.loads += 1
        return engine

    async def _unload_oldest(self, why: str) -> None:
        idle = [model for model in self.loaded.values() if model.users == 0]
        if not idle:
            raise ApiError(503, f"all models in memory are in use, and {why}", code="models_busy")
        oldest = min(idle, key=lambda model: model.used)
        _LOG.info("unloading %s: %s", oldest.name, why)
        await self.unload(oldest)

    def check_name(self, name: str) -> None:
        """Refuse a model that is not offered.

        Raises:
            ApiError: 404.
        """
        if name not in self.options:
            offered = ", ".join(self.names)
            text = f"the model {shown(name)} does not exist; offered: {offered}"
            raise ApiError(404, text, code="model_not_found", param="model")

    async def ready(self, name: str) -> None:
        """Have the model in memory. Errors as in `_get`."""
        async with self.use(name):
            pass

    async def unload_idle(self, name: str) -> None:
        """Take a model out of memory, if it is there.

        Raises:
            ApiError: 404 for an unknown name, 409 while it is in use.
        """
        self.check_name(name)
        async with self._lock:
            await self._unload_named(name)

    async def reload(self, name: str) -> None:
        """Load the model anew. Where there is memory for both, the old one serves until the new one is ready.

        Errors as in `unload_idle` and `_get`; the old one stays, unless it had to make room.
        """
        self.check_name(name)
        async with self._lock:
            old, options = self.loaded.get(name), self.options[name]
            if old is None or not self._fits(options):
                await self._unload_named(name)
                await self._load(name)
                return
            self.adopt(name, await self._opened(options))
            task = asyncio.create_task(self._retire(old))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _retire(self, model: Model) -> None:
        """Close a model that no new request can find, once nobody uses it."""
        while model.users:
            await asyncio.sleep(0.05)
        self.unloads += 1
        await asyncio.to_thread(model.engine.close, drain=True)

    async def _unload_named(self, name: str) -> None:
        model = self.loaded.get(name)
        if model is None:
            return
        if model.users:
            text = f"the model {name!r} is in use by {model.users} request{'s' * (model.users > 1)}"
            raise ApiError(409, text, code="model_in_use", param="model")
        await self.unload(model)

    async def unload(self, model: Model) -> None:
        """Take a model out of memory; its open requests are finished first."""
        del self.loaded[model.name]
        self.unloads += 1
        await asyncio.to_thread(model.engine.close, drain=True)

    async def close(self) -> None:
        """Take all out of memory; what is still open fails."""
        for model in list(self.loaded.values()):
            del self.loaded[model.name]
            await asyncio.to_thread(model.engine.close)
        await asyncio.gather(*self._leaving)


def _vocabulary(loaded: LoadedLane) -> int | None:
    rows: int | None = getattr(getattr(loaded.lane, "model", None), "vocab_size", None)
    return rows


def files_of(checkpoint: str) -> Files:
    """Name, bytes and time of change of a checkpoint's files; empty for what is no folder or file."""
    path = Path(checkpoint).expanduser()
    try:
        found = [file for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file()]
        return frozenset((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in found)
    except OSError:
        return frozenset()


def needed_bytes(options: EngineOptions) -> int:
    """About what a model takes in memory; 0 where that is not known before loading."""
    return int(weight_bytes(options.model) * SPARE)


def weight_bytes(model: str) -> int:
    """Bytes of the weight files of a folder or file; 0 where that is not known before loading."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.glob("*.safetensors")) if path.is_dir() else 0
