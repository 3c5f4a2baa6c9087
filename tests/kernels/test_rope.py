"""One rotary table for all layers: the same bits as each layer's own rotation."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx_lm.models.rope_utils import initialize_rope

from polytoken.kernels.rope import SharedRope, share_rope

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


class Block:
    """Stands for an attention block: all that matters is its rotation."""

    def __init__(self, rope: Any) -> None:
        self.rope = rope


@pytest.fixture(autouse=True)
def on_the_cpu() -> Any:
    device = mx.default_device()
    mx.set_default_device(mx.cpu)
    yield
    mx.set_default_device(device)


def make(scaling: dict[str, Any] | None = None, base: float = 1e5) -> Any:
    return initialize_rope(64, base, False, scaling, 512)


@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, LLAMA3])
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_bits_are_those_of_the_layers_own_rotation(scaling: Any, dtype: mx.Dtype) -> None:
    block = Block(make(scaling))
    own = block.rope
    share_rope([block], dims=64)
    assert isinstance(block.rope, SharedRope)
    for heads, rows, offset in ((9, 1, 0), (3, 1, 299), (9, 7, 5), (1, 33, 100), (9, 1, 300), (9, 2, 300)):
        x = mx.random.normal((1, heads, rows, 64)).astype(dtype)
        assert mx.array_equal(block.rope(x, offset=offset), own(x, offset=offset))


def test_equal_rotations_share_and_others_do_not() -> None:
    blocks = [Block(make()), Block(make()), Block(make(base=1e4)), Block(make(LLAMA3)), Block(make(LLAMA3))]
    share_rope(blocks, dims=64)
    ropes = [block.rope for block in blocks]
    assert ropes[0] is ropes[1]
    assert ropes[3] is ropes[4]
    assert len({id(rope) for rope in ropes}) == 3


@pytest.mark.parametrize(
    "rope",
    [nn.RoPE(64, traditional=True), nn.RoPE(32), make(YARN)],
    ids=["interleaved", "partial", "scales before it rotates"],
)
def test_rotations_of_another_kind_stay(rope: Any) -> None:
    block = Block(rope)
    share_rope([block], dims=64)
    assert block.rope is rope
