"""Trunk and draft head of the hybrid families against `transformers`, from kept arrays."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from hybrid_models import load_model
from mlx_lm.utils import load_model as load_library_model
from reference_cases import HYBRID_CASES, PROMPTS, TUNINGS, Case

from polytoken.kernels import blocks
from polytoken.models.draft import DraftHead, DraftingModel

TRUNK_TOLERANCE = 2e-5  # logits of about five
HIDDEN_TOLERANCE = 5e-5  # rows of about eight, before the final norm of about twenty
HEAD_TOLERANCE = 5e-6


@pytest.fixture(scope="module", params=HYBRID_CASES, ids=lambda case: case.name)
def case(request: pytest.FixtureRequest) -> Case:
    return request.param


@pytest.fixture(scope="module")
def model(case: Case, tmp_path_factory: pytest.TempPathFactory) -> DraftingModel:
    return load_model(case.write(tmp_path_factory.mktemp(case.name)).path)


def head_of(model: DraftingModel) -> DraftHead:
    assert model.draft_head is not None, model.draft_head_note
    return model.draft_head


def difference(array: mx.array, reference: np.ndarray) -> float:
    assert array.shape[0] == 1 and array.shape[1:] == reference.shape
    return float(np.abs(np.array(array)[0] - reference).max())


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_trunk_equals_transformers_and_chunks_change_no_bit(case: Case, model: DraftingModel, prompt: str) -> None:
    arrays = case.arrays()
    ids = mx.array(arrays[f"{prompt}_ids"])
    results = []
    for chunk in (1000, 1, 3, 7):
        state = model.make_cache()
        parts = [model.forward(ids[:, at : at + chunk], state) for at in range(0, ids.shape[1], chunk)]
        pre = mx.concatenate([part.pre for part in parts], axis=1)
        post = mx.concatenate([part.post for part in parts], axis=1)
        results.append([np.array(array) for array in (model.project(post), post, pre)])
        assert state.offset == ids.shape[1]
    logits, post, pre = results[0]
    assert logits.dtype == np.float32
    assert np.abs(logits[0] - arrays[f"{prompt}_logits"]).max() < TRUNK_TOLERANCE
    assert np.abs(post[0] - arrays[f"{prompt}_post"]).max() < HIDDEN_TOLERANCE
    assert np.abs(pre[0] - arrays[f"{prompt}_pre"]).max() < HIDDEN_TOLERANCE
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_the_trunk_is_the_librarys_own_bit_for_bit(
    case: Case, model: DraftingModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network, cache and loading against our driver, layers and loading, with MLX's own attention in both."""
    if case.name == "qwen3_next-b":
        pytest.skip("the library does not take the rotary settings that transformers writes")
    network, _ = load_library_model(case.write(tmp_path).path)
    ids = mx.array(case.arrays()["short_ids"])
    theirs = network(ids, cache=network.make_cache())
    fused = model.project(model.forward(ids, model.make_cache()).post)
    mx.eval(fused)
    monkeypatch.setattr(blocks, "extension", lambda: None)
    assert mx.array_equal(theirs, model.project(model.forward(ids, model.make_cache()).post)).item()
    assert mx.abs(theirs - fused).max().item() < TRUNK_TOLERANCE


@pytest.mark.parametrize("keep", [0, 1, 4, 1000])
def test_keep_returns_the_last_rows_only(case: Case, model: DraftingModel, keep: int) -> None:
    ids = mx.array(case.arrays()["long_ids"])
    kept_state, whole_state = model.make_cache(), model.make_cache()
    kept, whole = model.forward(ids, kept_state, keep=keep), model.forward(ids, whole_state)
    rows = min(keep, ids.shape[1])
    for some, every in ((kept.post, whole.post), (kept.pre, whole.pre)):
        assert some.shape == (1, rows, model.hidden_size)
        assert mx.array_equal(some, every[:, ids.shape[1] - rows :]).item()
    assert all(mx.array_equal(a, b).item() for a, b in zip(kept_state.arrays(), whole_state.arrays(), strict=True))


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_head_equals_transformers(case: Case, model: DraftingModel, prompt: str) -> None:
    """Over transformers' own hidden rows: the pairs of the prompt, then three chained drafts."""
    arrays = case.arrays()
    head = head_of(model)
    history = head.make_cache()
    post, ids = mx.array(arrays[f"{prompt}_post"])[None], mx.array(arrays[f"{prompt}_ids"])
    logits, hidden = head.draft(post[:, :-1], ids[:, 1:], history)
    assert history.offset == ids.shape[1] - 1
    assert logits.dtype == mx.float32
    assert difference(logits, arrays[f"{prompt}_head_logits"]) < HEAD_TOLERANCE
    assert difference(hidden, arrays[f"{prompt}_head_hidden"]) < HEAD_TOLERANCE
    chain, row = arrays[f"{prompt}_chain_ids"], post[:, -1:]
    for step in range(3):
        logits, row = head.draft(row, mx.array([[int(chain[step])]]), history)
        assert difference(logits, arrays[f"{prompt}_chain_logits"][step : step + 1]) < HEAD_TOLERANCE
        assert difference(row, arrays[f"{prompt}_chain_hidden"][step : step + 1]) < HEAD_TOLERANCE
        assert int(logits[0, 0].argmax().item()) == chain[step + 1]


def test_append_leaves_what_draft_leaves_and_any_split_is_the_same(case: Case, model: DraftingModel) -> None:
    arrays = case.arrays()
    head = head_of(model)
    post, ids = mx.array(arrays["long_post"])[None, :-1], mx.array(arrays["long_ids"])[:, 1:]
    drafted, appended = head.make_cache(), head.make_cache()
    every, rows = head.draft(post, ids, drafted)
    for at in range(0, ids.shape[1] - 1, 5):
        stop = min(at + 5, ids.shape[1] - 1)
        head.append(post[:, at:stop], ids[:, at:stop], appended)
    last, row = head.draft(post[:, -1:], ids[:, -1:], appended, keep=1)
    assert mx.array_equal(last, every[:, -1:]).item() and mx.array_equal(row, rows[:, -1:]).item()
    pairs = zip(drafted.layers, appended.layers, strict=True)
    assert all(mx.array_equal(a, b).item() for x, y in pairs for a, b in zip(x.valid(), y.valid(), strict=True))
    fresh = head.make_cache()
    kept, rows_kept = head.draft(post, ids, fresh, keep=2)  # history and draft in one forward
    assert mx.array_equal(kept, every[:, -2:]).item() and mx.array_equal(rows_kept, rows[:, -2:]).item()


@pytest.mark.parametrize("tuning", TUNINGS)
def test_counts_of_accepted_drafts_are_exact(case: Case, tuning: str, tmp_path) -> None:
    """A plain greedy cycle over the contracts alone: draft, verify, commit, rebuild the true rows."""
    model = load_model(case.write_tuned(tmp_path, tuning).path)
    head, arrays = head_of(model), case.arrays()
    prompt, tokens = arrays[f"{tuning}_prompt"].tolist(), arrays[f"{tuning}_tokens"].tolist()
    for depth in (1, 3, 5):
        produced, rounds = speculate(model, head, prompt, count=len(tokens), depth=depth)
        assert produced == tokens
        assert rounds == arrays[f"{tuning}_depth_{depth}"].tolist()


def greedy(logits: mx.array) -> list[int]:
    return logits[0].argmax(axis=-1).tolist()


def speculate(
    model: DraftingModel, head: DraftHead, prompt: list[int], *, count: int, depth: int
) -> tuple[list[int], list[list[int]]]:
    """Greedy tokens, and drafted and accepted numbers of each round."""
    state, history = model.make_cache(), head.make_cache()
    hidden = model.forward(mx.array([prompt]), state)
    tokens, rounds = greedy(model.project(hidden.post[:, -1:])), []
    rows = head.take(hidden)
    head.append(rows[:, :-1], mx.array([prompt[1:]]), history)
    row = rows[:, -1:]  # true row of the last fed token, not yet paired
    while len(tokens) < count:
        wanted = min(depth, count - len(tokens))
        window, chained = [tokens[-1]], row
        for _ in range(wanted):
            logits, chained = head.draft(chained, mx.array([window[-1:]]), history)
            window += greedy(logits)
        history.commit(1, wanted)  # the first row was true
        with state.capturing():
            hidden = model.forward(mx.array([window]), state)
        truth = greedy(model.project(hidden.post))
        accepted = 0
        while accepted < wanted and window[accepted + 1] == truth[accepted]:
            accepted += 1
        state.commit(accepted + 1, wanted + 1)
        rows = head.take(hidden)
        if accepted:
            head.append(rows[:, :accepted], mx.array([window[1 : accepted + 1]]), history)
        row = rows[:, accepted : accepted + 1]
        tokens += truth[: accepted + 1]
        rounds.append([wanted, accepted])
        assert history.offset == state.offset - 1
    return tokens[:count], rounds
