"""Several models: loaded when asked for, unloaded when another needs the place, never while in use."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scripted import Script, scripted_engine

from polytoken.assembly import EngineOptions
from polytoken.engine import Engine
from polytoken.errors import CheckpointError, EngineError
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


@pytest.mark.parametrize("room", [True, False])
def test_a_reload_serves_on_and_a_broken_checkpoint_takes_nothing_down(tmp_path: Path, room: bool) -> None:
    """With room for both the old model stays until the new one is there; without, only an idle one goes first."""
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    broken = False

    def open_engine(options: EngineOptions) -> Engine:
        if broken:
            raise CheckpointError("the weights are cut short", code="truncated")
        return scripted_engine(tmp_path / "s", Script())

    async def run() -> None:
        nonlocal broken
        free = 10_000
        pool = ModelPool({"m": EngineOptions(model=str(tmp_path))}, open_engine, available=lambda: free)
        async with pool.use("m") as old:
            free = 10_000 if room else 0
            if room:
                await pool.reload("m")
                assert pool.loaded["m"] is not old
                old.engine.call(lambda loaded: None)  # still there for the request that has it
            else:
                with pytest.raises(ApiError) as busy:
                    await pool.reload("m")
                assert (busy.value.status, busy.value.code) == (409, "model_in_use")
        kept, broken = pool.loaded["m"], True
        free = 10_000
        with pytest.raises(ApiError) as refused:
            await pool.reload("m")
        assert refused.value.code == "truncated"
        assert pool.loaded["m"] is kept
        await pool.close()
        for engine in (old.engine, kept.engine):
            with pytest.raises(EngineError):
                engine.call(lambda loaded: None)

    asyncio.run(run())


async def _touch(pool: ModelPool, name: str) -> None:
    async with pool.use(name):
        await asyncio.sleep(0)
