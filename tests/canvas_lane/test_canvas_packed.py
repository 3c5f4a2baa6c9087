"""Packed (quantised) canvas checkpoints on the lane: the CPU runs them, and company changes nothing there either."""

from __future__ import annotations

from pathlib import Path

import pytest
from canvas_serving import SETTINGS, mixed_requests, open_lane, serve

from polytoken.checkpoint import load_runtime
from polytoken.testkit.modilify import write_modilify
from polytoken.testkit.tiny import write_checkpoint


@pytest.mark.parametrize(("kind", "bits"), [pytest.param("modilify", 4, marks=pytest.mark.slow), ("block", 8)])
def test_packed_weights_serve_alone_and_in_company(tmp_path: Path, kind: str, bits: int) -> None:
    if kind == "modilify":
        write_modilify(tmp_path, bits=bits, seed=6)
    else:
        write_checkpoint(tmp_path, "diffusion_gemma", bits=bits, seed=6)
    runtime = load_runtime(tmp_path, dequantise=False)
    assert runtime.quantisation is not None
    requests = mixed_requests(runtime.model.vocab_size)[1:3]
    alone = {}
    for request in requests:
        alone |= serve(open_lane(runtime, SETTINGS[kind], max_rows=1), [request]).ids
    assert serve(open_lane(runtime, SETTINGS[kind]), requests).ids == alone
    assert all(len(ids) == request.max_new_tokens for request, ids in zip(requests, alone.values(), strict=True))
