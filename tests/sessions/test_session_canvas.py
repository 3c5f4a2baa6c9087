"""Canvas prompts from stored prefixes, in sessions and without: the encoder's states are those of a cold run."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import lru_cache

from hypothesis import given, settings
from hypothesis import strategies as st
from session_talks import CHUNK, state_bits

from polytoken.cache.bank import StateBank
from polytoken.cache.identity import StateIdentity
from polytoken.checkpoint import load_runtime
from polytoken.lanes.canvas.prefill import CanvasPrefill
from polytoken.models.canvas import CanvasModel
from polytoken.testkit.tiny import write_checkpoint

IDENTITY = StateIdentity(checkpoint="tiny", lane="canvas", grid=CHUNK)


@lru_cache
def model() -> CanvasModel:
    with tempfile.TemporaryDirectory() as folder:
        config = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "canvas_length": 6}
        made = write_checkpoint(folder, "diffusion_gemma", config=config)
        network = load_runtime(made.path).model
    assert isinstance(network, CanvasModel)
    return network


def encode(bank: StateBank, ids: Sequence[int], session: str | None = None) -> CanvasPrefill:
    filling = CanvasPrefill(model(), bank, tuple(ids), chunk=CHUNK, session=session)
    while not filling.step():
        pass
    return filling


turns = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", None]), st.floats(0, 1), st.lists(st.integers(10, 12), min_size=1, max_size=20)
    ),
    min_size=2,
    max_size=6,
)


@given(turns=turns, limit=st.sampled_from([0, 60_000, 200_000, 1 << 28]))
@settings(max_examples=25, deadline=None)
def test_random_canvas_prompts_give_the_states_of_cold_ones(turns, limit: int) -> None:
    """Prompts that go on, go back to the middle and say something else, or come again, under any budget."""
    bank = StateBank(limit, identity=IDENTITY)
    texts: dict[str | None, tuple[int, ...]] = {}
    kept: dict[int, tuple[object, list[bytes]]] = {}
    for session, share, more in turns:
        text = texts.get(session, (1, 2, 3))
        text = (*text[: round(share * len(text))], *more)
        warm, cold = encode(bank, text, session), encode(StateBank(0, identity=IDENTITY), text)
        assert state_bits(warm.cache) == state_bits(cold.cache)
        again = encode(bank, text, session)
        assert state_bits(again.cache) == state_bits(cold.cache)
        assert limit < (1 << 28) or (again.miss is None and again.cached_tokens == len(text))
        assert bank.nbytes <= limit
        texts[session] = text
        for node in bank._tree:
            for array in node.arrays():
                known, digest = kept.setdefault(id(array), (array, bytes(memoryview(array))))
                assert known is array and bytes(memoryview(array)) == digest
