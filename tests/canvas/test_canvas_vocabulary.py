"""Chunked statistics against a dense softmax, and the things that must not change them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np
import pytest
from canvas_reference import TableStep, candidates, entropy, gumbel, scores, softmax, support
from hypothesis import given, settings
from hypothesis import strategies as st

from polytoken.errors import RequestError, UsageError
from polytoken.lanes.canvas.keys import KeyedNoise
from polytoken.lanes.canvas.seen import SeenIds
from polytoken.sampling.vocabulary import Chunk, VocabularyRule, VocabularyStatistics, vocabulary_statistics

quick = settings(max_examples=25, deadline=None)


def sweep(
    logits: np.ndarray, rule: VocabularyRule, uniforms: np.ndarray, seen: np.ndarray | None = None
) -> VocabularyStatistics:
    """The sweep over logits [C, V] given as they are, so that every chunk size sees the same bits."""
    table = mx.array(logits)
    C, V = logits.shape
    return vocabulary_statistics(
        mx.ones((1, C, 2)),
        lambda flat, start, stop: table[:, start:stop],
        rule,
        vocab_size=V,
        noise=TableStep(uniforms),
        seen=None if seen is None else mx.array(seen),
    )


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits [C, V], coarse ones (ties everywhere) among them; uniforms [C, V]; seen ids [V]."""
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    C, V = draw(st.integers(1, 5)), draw(st.integers(1, 130))
    logits = rng.normal(0, draw(st.sampled_from([0.3, 3.0, 12.0])), (C, V)).astype(np.float32)
    if draw(st.booleans()):
        logits = np.round(logits).astype(np.float32)
    logits = np.clip(logits, -30, 30)
    return logits, rng.random((C, V), dtype=np.float32), rng.random(V) < 0.3


rules = st.builds(
    VocabularyRule,
    top_k=st.sampled_from([None, 0, 1, 2, 5, 40]),
    min_p=st.sampled_from([None, 0.0, 0.05, 0.5, 0.999]),
    temperature=st.sampled_from([1.0, 0.4, 1.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    chunk=st.sampled_from([1, 7, 64, 100, 4096]),
)


@quick
@given(problems(), rules)
def test_against_a_dense_softmax(problem: tuple[np.ndarray, np.ndarray, np.ndarray], rule: VocabularyRule) -> None:
    logits, uniforms, seen = problem
    got = sweep(logits, rule, uniforms, seen)
    C, V = logits.shape
    s = scores(logits, rule, seen)
    P = softmax(s)
    ids = np.array(got.sampled)[0]
    assert got.finite.item() is True
    np.testing.assert_allclose(np.array(got.entropy)[0], entropy(P), atol=1e-4)
    assert (np.array(got.entropy) > -1e-4).all() and (np.array(got.entropy) < math.log(V) + 1e-4).all()
    assert np.array(got.greedy)[0].tolist() == s.argmax(axis=-1).tolist()  # numpy too takes the lowest of ties
    np.testing.assert_allclose(np.array(got.greedy_confidence)[0], P.max(axis=-1), atol=1e-4)
    np.testing.assert_allclose(np.array(got.confidence)[0], P[np.arange(C), ids], atol=1e-4)
    assert (np.array(got.greedy_confidence) >= np.array(got.confidence)).all()
    for c in range(C):
        allowed, laid = support(s[c], rule), candidates(s[c], rule)
        assert ids[c] in allowed
        # The Gumbel maximum over the candidates, noise laid in the order of ids; near-ties of keys may fall either way.
        noise = dict(zip(laid, gumbel(uniforms[c, : len(laid)]), strict=True))
        keys = {i: float(s[c, i]) + noise[i] for i in allowed}
        assert keys[int(ids[c])] >= max(keys.values()) - 1e-4
        if rule.top_k == 1:
            assert ids[c] == np.array(got.greedy)[0, c]


@quick
@given(problems(), rules)
def test_chunk_size_changes_nothing(problem: tuple[np.ndarray, np.ndarray, np.ndarray], rule: VocabularyRule) -> None:
    logits, uniforms, seen = problem
    whole = sweep(logits, replace(rule, chunk=logits.shape[1]), uniforms, seen)
    for chunk in (1, 7, 64, 100):
        part = sweep(logits, replace(rule, chunk=chunk), uniforms, seen)
        assert part.sampled.tolist() == whole.sampled.tolist()
        assert part.greedy.tolist() == whole.greedy.tolist()
        for name in ("confidence", "entropy", "greedy_confidence"):
            np.testing.assert_allclose(getattr(part, name), getattr(whole, name), atol=1e-4)


@pytest.mark.parametrize("top_k", [40, None])
def test_chunk_size_changes_no_id_behind_a_real_product(top_k: int | None) -> None:
    V, C, H = 521, 16, 24
    noise = KeyedNoise(-5, C, V)
    keys = mx.random.split(mx.random.key(1), 16)
    for problem in range(8):
        hidden = mx.random.normal((1, C, H), key=keys[2 * problem])
        head = mx.random.normal((V, H), key=keys[2 * problem + 1])

        def run(chunk: int, hidden: mx.array = hidden, head: mx.array = head, step: int = problem) -> list[list[int]]:
            got = vocabulary_statistics(
                hidden,
                lambda flat, start, stop: 30 * mx.tanh(flat @ head[start:stop].T / 30),
                VocabularyRule(top_k=top_k, chunk=chunk),
                vocab_size=V,
                noise=noise.step(step),
            )
            return [got.sampled.tolist()[0], got.greedy.tolist()[0]]

        whole = run(V)
        assert all(run(chunk) == whole for chunk in (7, 64, 100))


@quick
@given(problems(), st.sampled_from([1.2, 2.0, 5.0]))
def test_a_penalty_lowers_seen_ids_and_spares_the_rest(
    problem: tuple[np.ndarray, np.ndarray, np.ndarray], rho: float
) -> None:
    logits, uniforms, seen = problem
    plain = sweep(logits, VocabularyRule(top_k=3), uniforms)
    one = sweep(logits, VocabularyRule(top_k=3, repetition_penalty=1.0), uniforms, seen)
    none = sweep(logits, VocabularyRule(top_k=3, repetition_penalty=rho), uniforms, np.zeros_like(seen))
    for other in (one, none):
        for name in ("sampled", "greedy", "confidence", "entropy"):
            assert mx.array_equal(getattr(other, name), getattr(plain, name))
    penalised = sweep(logits, VocabularyRule(top_k=3, repetition_penalty=rho), uniforms, seen)
    for before, after in zip(plain.greedy.tolist()[0], penalised.greedy.tolist()[0], strict=True):
        assert after == before or not seen[after] or seen[before]


def test_seen_ids_change_only_by_new_ids() -> None:
    ids = SeenIds([3, 5, 3], excluded=[5, 0], vocab_size=8)
    assert np.flatnonzero(np.array(ids.mask)).tolist() == [3]
    first = ids.mask
    ids.observe([3, 5, 0])
    assert ids.mask is first  # nothing new: nothing is computed
    ids.observe([7, 5])
    assert np.flatnonzero(np.array(ids.mask)).tolist() == [3, 7]
    assert np.flatnonzero(np.array(first)).tolist() == [3]  # what a submitted graph holds stays as it was
    for bad in (8, -1):
        with pytest.raises(RequestError, match=str(bad)):
            ids.observe([bad])


@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("top_k", [3, None])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0, 0), (2, 63), (1, 30)])
def test_a_number_that_is_none_is_noticed(chunk: int, top_k: int | None, bad: float, where: tuple[int, int]) -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 64)).astype(np.float32)
    uniforms = rng.random((3, 64), dtype=np.float32)
    rule = VocabularyRule(top_k=top_k, chunk=chunk)
    assert sweep(logits, rule, uniforms).finite.item() is True
    logits[where] = bad
    assert sweep(logits, rule, uniforms).finite.item() is False


def test_an_infinite_hidden_row_does_not_hide_behind_the_softcap() -> None:
    hidden = mx.array([[[1.0, 2.0], [math.inf, 1.0]]])
    got = vocabulary_statistics(
        hidden,
        lambda flat, start, stop: mx.tanh(flat @ mx.ones((2, stop - start))),
        VocabularyRule(top_k=2),
        vocab_size=10,
        noise=KeyedNoise(0, 2, 10).step(0),
    )
    assert got.finite.item() is False


def test_no_array_of_canvas_times_vocabulary_and_no_wait(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    if device != "cpu":
        pytest.skip("bytes are compared exactly, and a GPU's libraries keep workspace of their own")
    V, C, H, chunk = 65536, 16, 4, 512
    head, hidden = mx.ones((V, H)) * 0.1, mx.ones((1, C, H))
    noise = KeyedNoise(0, C, V).step(0)
    mx.eval(head, hidden)
    widths: list[int] = []
    submitted = 0
    submit, evaluate = mx.async_eval, mx.eval

    def counting(*arrays: mx.array) -> None:
        nonlocal submitted
        submitted += 1
        assert all(array.size <= C * 40 for array in arrays)
        submit(*arrays)
        evaluate(*arrays)  # the test waits, so that the peak below is that of one chunk

    def refuse(*_: object) -> None:
        raise AssertionError("the sweep waited for the device")

    monkeypatch.setattr(mx, "async_eval", counting)
    monkeypatch.setattr(mx, "eval", refuse)
    mx.reset_peak_memory()
    start_bytes = mx.get_active_memory()

    def project(flat: mx.array, start: int, stop: int) -> mx.array:
        widths.append(stop - start)
        return flat @ head[start:stop].T

    got = vocabulary_statistics(hidden, project, VocabularyRule(chunk=chunk), vocab_size=V, noise=noise)
    evaluate(got.sampled)
    assert submitted == V // chunk and max(widths) == chunk
    assert mx.get_peak_memory() - start_bytes < C * V * 4 / 4


@dataclass(frozen=True)
class Total:
    """What the fold below gathers."""

    total: mx.array


def test_a_fold_sees_every_score_once() -> None:
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(3, 50)).astype(np.float32)

    def fold(before: Total | None, chunk: Chunk) -> Total:
        part = chunk.scores @ mx.arange(chunk.start, chunk.stop, dtype=mx.float32)
        restored = mx.log(chunk.shares) + chunk.peak[:, None]
        assert mx.allclose(restored, chunk.scores, atol=1e-4) and mx.allclose(chunk.shares.sum(axis=-1), chunk.total)
        return Total(part if before is None else before.total + part)

    table = mx.array(logits)
    got = vocabulary_statistics(
        mx.ones((1, 3, 2)),
        lambda flat, start, stop: table[:, start:stop],
        VocabularyRule(temperature=0.5, chunk=7),
        vocab_size=50,
        noise=KeyedNoise(0, 3, 50).step(0),
        fold=fold,
    )
    np.testing.assert_allclose(np.array(got.folded.total), (logits / 0.5) @ np.arange(50), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({"temperature": 0.0}, "denoise_temperature"),
        ({"repetition_penalty": math.inf}, "repetition_penalty"),
        ({"top_k": -1}, "commit_top_k"),
        ({"min_p": 1.0}, "commit_min_p"),
        ({"chunk": 0}, "vocab_chunk_size"),
    ],
)
def test_a_bad_setting_is_named(setting: dict[str, float], name: str) -> None:
    with pytest.raises(UsageError, match=name) as caught:
        VocabularyRule(**setting)  # type: ignore[arg-type]
    assert caught.value.field == name
