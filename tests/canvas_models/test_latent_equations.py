"""Core, buses, observation and commit against the plain reference."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from canvas_networks import encoded, head_of, random_canvas, random_latent
from latent_reference import Reference, signed_log

from polytoken.checkpoint import load_runtime
from polytoken.models.canvas import CanvasOutput
from polytoken.models.gemma4.model import LatentConditioned
from polytoken.models.latent.state import LatentState
from polytoken.testkit.modilify import write_modilify

TOLERANCE = 2e-5
HEAD = 3
PREFIX = "latent_deliberation."


@dataclass(frozen=True)
class Scene:
    """A model, its plain twin, and one denoise; arrays without a row axis, in logical order."""

    model: LatentConditioned
    reference: Reference
    state: LatentState
    output: CanvasOutput

    def logical(self, array: mx.array) -> np.ndarray:
        return np.roll(np.array(array[0], np.float64), -HEAD, axis=0)


@pytest.fixture(scope="module", params=["a", "b"])
def scene(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    export = write_modilify(tmp_path_factory.mktemp("export"), shape=request.param, seed=11)
    model = load_runtime(export.path).model
    assert isinstance(model, LatentConditioned)
    return Scene(model, plain(export.path, export.config), random_latent(model, seed=5), denoise(model))


def plain(path: Path, config) -> Reference:
    weights = mx.load(str(path / "model.safetensors"))
    return Reference(
        {name.removeprefix(PREFIX): np.array(array) for name, array in weights.items() if name.startswith(PREFIX)},
        heads=config["latent_num_heads"],
        window=config["latent_local_attention_window"],
        max_positions=config["text_config"]["max_position_embeddings"],
    )


def denoise(model: LatentConditioned) -> CanvasOutput:
    return model.denoise(
        random_canvas(model), encoded(model, 14), latent=random_latent(model, seed=5), head=head_of(HEAD)
    )


def close(one: np.ndarray, other: np.ndarray) -> bool:
    assert one.shape == other.shape
    return bool(np.abs(one - other).max() < TOLERANCE)


def core_scalars(scene: Scene) -> np.ndarray:
    state, count = scene.state, scene.model.canvas_length
    ponder, stagnation = (math.log1p(array[0].item()) for array in (state.ponder_steps, state.stagnation_steps))
    names = ("confidence", "entropy", "age", "token_changed", "confidence_delta", "entropy_delta")
    rows = []
    for j, (p, h, age, moved, dp, dh) in enumerate(
        zip(*(scene.logical(getattr(state, n)) for n in names), strict=True)
    ):
        place = -1 + 2 * j / (count - 1)
        sure = p * math.exp(-max(h, 0))
        better = max(dp, 0) + math.log1p(max(-dh, 0))
        rows.append(
            [p, math.log1p(h), math.log1p(age), place, moved, dp, signed_log(dh), ponder, stagnation, sure, better]
        )
    return np.array(rows)


def test_core(scene: Scene) -> None:
    tokens, context = scene.reference.core(
        scene.logical(scene.output.token_embeddings),
        scene.logical(scene.state.token_latents),
        core_scalars(scene),
        np.array(scene.state.memory_slots[0], np.float64),
        np.array(scene.state.gdn2.working[0], np.float64),
    )
    assert close(scene.logical(scene.output.next_latent_state.token_latents), tokens)
    assert close(scene.logical(scene.output.working_state), context)


@pytest.mark.parametrize("nothing_valid_after", [1, 5, 100])
def test_observation(scene: Scene, nothing_valid_after: int) -> None:
    state = scene.state
    positions = np.arange(scene.model.canvas_length)
    valid = positions < nothing_valid_after
    after = scene.model.observe(state, scene.output, valid=mx.array(np.roll(valid, HEAD)[None]), head=head_of(HEAD))
    columns = [scene.logical(array) for array in (state.confidence, state.entropy, state.token_changed)]
    columns += [scene.logical(array) for array in (state.confidence_delta, state.entropy_delta, state.age)]
    scalars = np.stack(
        [
            columns[0],
            np.log1p(np.maximum(columns[1], 0)),
            columns[2],
            columns[3],
            np.array([signed_log(x) for x in columns[4]]),
            np.log1p(columns[5]),
        ],
        axis=-1,
    )
    tokens, working = scene.reference.observe(
        scene.logical(state.token_latents),
        scalars,
        heavy=scene.logical(scene.output.heavy_hidden),
        context=scene.logical(scene.output.working_state),
        working=np.array(state.gdn2.working[0], np.float64),
        valid=valid,
    )
    assert close(scene.logical(after.token_latents), tokens)
    assert close(np.array(after.gdn2.working[0]), working)


@pytest.mark.parametrize(("count", "reason", "scale"), [(1, 1, 1), (4, 3, 1), (8, 2, 1), (2, 0, 30)])
def test_commit(scene: Scene, count: int, reason: int, scale: int) -> None:
    memory = scale * scene.state.memory_slots
    embeddings = scene.model.embed(random_canvas(scene.model, seed=8)[:, :count])
    written, _ = scene.model.commit_write(
        memory,
        scene.output,
        token_embeddings=embeddings,
        lengths=mx.array([count], mx.int32),
        prefix_lengths=mx.array([14], mx.int32),
        reasons=mx.array([reason], mx.int32),
        head=head_of(HEAD),
    )
    wanted = scene.reference.commit(
        np.array(memory[0], np.float64),
        np.array(embeddings[0], np.float64),
        heavy=scene.logical(scene.output.heavy_hidden),
        context=scene.logical(scene.output.working_state),
        prefix=14,
        reason=reason,
    )
    assert close(np.array(written[0]), wanted)


def test_bus_reads(scene: Scene) -> None:
    latent, head = scene.model._latent, head_of(HEAD)
    count = scene.model.canvas_length
    hidden = 2 * mx.random.normal((1, count, scene.model.hidden_size), key=mx.random.key(6))
    context = mx.array(scene.logical(scene.output.working_state)[None].astype(np.float32))
    seen = latent.logical_seen(scene.state, head)
    seen_host = scene.logical(scene.state.age) > 0
    assert np.array_equal(np.array(seen[0]), seen_host)
    memory = scene.state.memory_slots
    rows = np.array(hidden[0], np.float64)
    for reader in range(latent.working_memory_bus.num_readers):
        ours = latent.working_memory_bus.read(hidden, reader, *latent.working_memory_bus.prepare_kv((context, seen)))
        everyone = np.ones(count, bool)
        theirs = scene.reference.read(
            "working_memory_bus",
            reader,
            rows,
            source=np.array(context[0]),
            keys=np.flatnonzero(seen_host),
            seen=everyone,
        )
        assert close(np.array(ours[0]), theirs)
        ours = latent.persistent_memory_bus.read(hidden, reader, *latent.persistent_memory_bus.prepare_kv(memory, seen))
        theirs = scene.reference.read(
            "persistent_memory_bus",
            reader,
            rows,
            source=np.array(memory[0]),
            keys=np.arange(memory.shape[1]),
            seen=seen_host,
        )
        assert close(np.array(ours[0]), theirs)
