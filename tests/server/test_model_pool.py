"""Several models: loaded when asked for, unloaded when another needs the place, never while in use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import Script, scripted_engine

from polytoken.assembly import EngineOptions
from polytoken.engine import Engine
from polytoken.server.errors import ApiError
from polytoken.server.pool import ModelPool


def test_the_model_that_was_idle_longest_goes(tmp_path: Path) -> None:
    opened: list[str] = []

    def open_engine(options: EngineOptions) -> Engine:
        opened.append(options.model)
        return scripted_engine(tmp_path / options.model, Script())

    async def run() -> None:
        pool = ModelPool({name: EngineOptions(model=name) for name in "abc"}, open_engine, max_loaded=2)
        async with pool.use(None) as first:
            assert first.name == "a"
        async with pool.use("b"):  # noqa: SIM117  (the second one must find the first in use)
            async with pool.use("c"):  # b is in use, so a goes
                assert set(pool.loaded) == {"b", "c"}
                with pytest.raises(ApiError) as refused:
                    async with pool.use("a"):
                        pass
                assert (refused.value.status, refused.value.code) == (503, "models_busy")
        await asyncio.gather(*(_touch(pool, "a") for _ in range(5)))
        assert opened == ["a", "b", "c", "a"]  # five callers, one load
        with pytest.raises(ApiError) as unknown:
            await _touch(pool, "d")
        assert unknown.value.status == 404
        await pool.close()
        assert not pool.loaded

    asyncio.run(run())


def test_a_model_that_does_not_fit_is_refused_after_the_others_went(tmp_path: Path) -> None:
    big = tmp_path / "big"
    big.mkdir()
    (big / "model.safetensors").write_bytes(b"x" * 1000)

    async def run() -> None:
        options = {"small": EngineOptions(model="small"), "big": EngineOptions(model=str(big))}
        pool = ModelPool(
            options, lambda wanted: scripted_engine(tmp_path / "s", Script()), max_loaded=2, available=lambda: 100
        )
        await _touch(pool, "small")
        with pytest.raises(ApiError) as refused:
            await _touch(pool, "big")
        assert (refused.value.status, refused.value.code) == (507, "insufficient_memory")
        assert not pool.loaded

    asyncio.run(run())


async def _touch(pool: ModelPool, name: str) -> None:
    async with pool.use(name):
        await asyncio.sleep(0)
