"""`polytoken bench` lane by lane on tiny models: figures that are finite and agree with one another, not how fast."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from short_probes import shorten_probes  # type: ignore[import-not-found]

from polytoken.assembly import EngineOptions
from polytoken.bench.options import BenchOptions
from polytoken.bench.peer import library_layers
from polytoken.bench.run import run_bench
from polytoken.errors import UsageError
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.testkit.acceptance import HISTORY_MATTERS
from polytoken.testkit.modilify import modilify_config, write_modilify
from polytoken.testkit.tiny import write_checkpoint

TWO_LAYERS = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
SIZE = {"prompt_tokens": 20, "new_tokens": 14, "rounds": 2}


@pytest.fixture(autouse=True)
def short_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_probes(monkeypatch.setattr)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints by the names of their families."""
    root = tmp_path_factory.mktemp("bench")
    write_checkpoint(root / "qwen3_5", "qwen3_5", acceptance=HISTORY_MATTERS)
    write_checkpoint(root / "qwen3_next", "qwen3_next", acceptance=HISTORY_MATTERS)
    write_checkpoint(root / "qwen3", "qwen3")
    write_checkpoint(root / "diffusion_gemma", "diffusion_gemma", config={**TWO_LAYERS, "canvas_length": 6})
    config = {"text_config": {**modilify_config("b")["text_config"], **TWO_LAYERS}, "latent_num_layers": 1}
    write_modilify(root / "modilify_mk2", shape="b", weights="echo", config=config)
    return root


def bench(
    path: Path, *, size: dict[str, int] | None = None, engine: dict[str, Any] | None = None, **options: Any
) -> Any:
    """The report as another program reads it; strict JSON, so everything is finite. The table can be printed."""
    made = BenchOptions(engine=EngineOptions(model=str(path), **(engine or {})), **(size or SIZE), **options)
    report = run_bench(made)
    report.print(Console(quiet=True))
    record = json.loads(report.to_json())
    assert record["floor"]["forwards_per_second"] > 0 and record["product_gflops"] > 0
    machine = record["machine"]  # K03: what a second person needs to repeat a figure
    assert machine["command"] and machine["date"].endswith("Z") and "commit" in machine
    assert {"polytoken", "mlx"} <= set(machine["versions"]) and machine["load_average"] is not None
    for row in record["measurements"]:
        rates = [row["prefill_tokens_per_second"], row["decode_tokens_per_second"], row["floor_share"]]
        assert all(math.isfinite(rate) and rate > 0 for rate in rates)
        low, high = row["decode_range"]
        assert low <= row["decode_tokens_per_second"] <= high
        assert row["floor_share"] < 1
        least, most = row["floor_share_range"]
        assert least <= row["floor_share"] <= most
        assert row["gb_per_second"] > 0
    return record


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_depths_beside_ar_and_the_peer(folder: Path, family: str) -> None:
    record = bench(folder / family, depths=(1, 3), against="mlx-lm", peer_products=("same",))
    assert record["lane"] == "mtp"
    one, three, plain, peer = record["measurements"]
    assert [row["name"] for row in (one, three, plain)] == ["mtp, depth 1", "mtp, depth 3", "ar"]
    assert [row["lane"] for row in record["measurements"]] == ["mtp", "mtp", "ar", "peer"]
    assert one["first_difference"] is three["first_difference"] is plain["first_difference"] is None
    assert peer["tokens_per_forward"] == plain["tokens_per_forward"] == 1.0
    for row, depth in ((one, 1), (three, 3)):
        windows, new = row["verify_calls"], SIZE["rounds"] * (SIZE["new_tokens"] - 1)
        assert row["accepted_drafts"] <= row["drafted_tokens"] <= depth * windows
        assert sum(row["drafted_by_depth"]) == row["drafted_tokens"]
        assert sum(row["accepted_by_depth"]) == row["accepted_drafts"]
        assert len(row["acceptance_by_depth"]) == depth
        assert row["acceptance"] == pytest.approx(row["accepted_drafts"] / row["drafted_tokens"])
        assert row["tokens_per_window"] == pytest.approx(new / windows)
        assert row["tokens_per_forward"] == pytest.approx(SIZE["new_tokens"] / (1 + windows / SIZE["rounds"]))
        ratio = row["decode_tokens_per_second"] / plain["decode_tokens_per_second"]
        assert row["against_ar"] == pytest.approx(ratio)


def test_other_ways_to_draft(folder: Path) -> None:
    small = {**SIZE, "rounds": 1}
    copies = bench(folder / "qwen3", size=small, engine={"mtp": MtpSettings(drafter="lookup")})
    row = copies["measurements"][0]
    assert row["name"] == "mtp, lookup"
    assert row["copied_tokens"] == row["drafted_tokens"]
    model = {"mtp": MtpSettings(drafter="model"), "draft_model": str(folder / "qwen3_5")}
    record = bench(folder / "qwen3_5", size=small, engine=model, depths=(2,))
    row = record["measurements"][0]
    assert row["name"] == "mtp by model, depth 2"
    assert row["acceptance"] == 1.0


def test_ar_alone(folder: Path) -> None:
    record = bench(folder / "qwen3", size={**SIZE, "rounds": 1}, against="mlx-lm", peer_products=("same",))
    assert record["lane"] == "ar"
    assert [row["name"] for row in record["measurements"]] == ["polytoken", "mlx-lm, same products"]
    assert record["measurements"][1]["first_difference"] is None
    assert record["floor"]["flops"] is None


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("diffusion_gemma", {"max_denoising_steps": 3}),
        ("diffusion_gemma", {"policy": "rolling", "max_denoising_steps": 5}),
        ("modilify_mk2", {}),
        ("modilify_mk2", {"canvas_length": 5}),
    ],
)
def test_denoises(folder: Path, family: str, settings: dict[str, Any]) -> None:
    record = bench(folder / family, engine={"canvas": CanvasSettings(**settings)})
    assert record["lane"] == "canvas"
    (row,) = record["measurements"]
    assert row["canvas_length"] == settings.get("canvas_length", 6 if family == "diffusion_gemma" else 8)
    assert record["floor"]["flops"] > 0
    assert 0 < row["flop_floor_share"] < 1
    assert row["ttfd_seconds"] > 0
    assert row["ttft_seconds"] is None or row["ttft_seconds"] >= row["ttfd_seconds"]
    assert row["denoises_per_second"] > 0
    generated = round(row["tokens_per_forward"] * row["denoise_steps"])
    if row["stop_reason"] == "max_new_tokens":
        assert generated == SIZE["new_tokens"]
    if settings.get("max_denoising_steps") == 3:  # the block policy's schedule: 14 tokens are three canvases of 6
        assert row["denoise_steps"] <= 9
        assert row["steps_per_canvas"] == pytest.approx(row["denoise_steps"] / 3)
    elif generated:
        assert row["steps_per_canvas"] == pytest.approx(row["denoise_steps"] * row["canvas_length"] / generated)


@pytest.mark.parametrize(
    ("mtp", "depths", "names"),
    [
        (MtpSettings(), (0,), "--depth"),
        (MtpSettings(), (2, 2), "twice"),
        (MtpSettings(drafter="lookup"), (1,), "--drafter lookup"),
        (MtpSettings(policy="cost"), (1, 2), "--depth-policy cost"),
    ],
)
def test_depths_that_mean_nothing(mtp: MtpSettings, depths: tuple[int, ...], names: str) -> None:
    with pytest.raises(UsageError, match=names):
        BenchOptions(engine=EngineOptions(model="m", mtp=mtp), depths=depths)


def test_what_a_lane_cannot_be_asked_for(folder: Path) -> None:
    for family, options, names in (
        ("qwen3", {"depths": (2,)}, "--depths"),
        ("diffusion_gemma", {"against": "mlx-lm"}, "--against"),
    ):
        with pytest.raises(UsageError, match=names):
            run_bench(BenchOptions(engine=EngineOptions(model=str(folder / family)), **options))


def test_the_peer_leaves_the_network_as_it_was(folder: Path) -> None:
    from polytoken.checkpoint import load_runtime  # noqa: PLC0415

    network = load_runtime(folder / "qwen3_next").model.network
    before = [type(layer.linear_attn) for layer in network.layers if layer.is_linear]
    with pytest.raises(ZeroDivisionError), library_layers(network):
        kinds = {type(layer.linear_attn).__module__ for layer in network.layers if layer.is_linear}
        assert kinds == {"mlx_lm.models.qwen3_next"}
        raise ZeroDivisionError
    assert [type(layer.linear_attn) for layer in network.layers if layer.is_linear] == before
