"""Greedy decoding: the MTP lane gives the AR lane's tokens, and the row of a window is the row of a single step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.lanes.ar import ArLane
from polytoken.lanes.base import Lane
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.models.base import CausalModel
from polytoken.oracle.compare.rows import Tie, Tolerance, examine_tie
from polytoken.oracle.digests import Values
from polytoken.oracle.fingerprint import fetch
from polytoken.oracle.gate.fixed import FixedShape
from polytoken.oracle.gate.matrix import Matrix
from polytoken.oracle.gate.outcome import Outcome, equal
from polytoken.oracle.gate.running import GREEDY, answer, ask, first_parting
from polytoken.oracle.subject import Ids, Subject

LISTED = 8  # likeliest ids that are looked at where two runs part


def check_greedy(subject: Subject, matrix: Matrix, *, exact: bool, fixed: bool = False) -> Iterator[Outcome]:
    """AR against MTP for every depth and prompt. With `fixed` both run in the fixed-shape mode."""
    name = "greedy AR = MTP, fixed shape" if fixed else "greedy AR = MTP"
    for prompt, ids in matrix.prompt_ids(subject):
        for depth in matrix.depths:
            used = replace(subject, model=FixedShape(subject.model, depth + 1)) if fixed else subject
            # Windows near the end are narrower: with room to spare, all that count have their full width.
            spare = depth + 1 if fixed else 0
            ar, mtp = used.ar_lane(), used.mtp_lane(MtpSettings(depth=depth))
            case = {"prompt": prompt, "depth": depth}
            yield _hold(
                name, case,
                ar=ar, mtp=mtp, ids=ids, count=matrix.new_tokens, spare=spare,
                dtype=str(subject.about["dtype"]), exact=exact,
            )  # fmt: skip


def _hold(
    name: str,
    case: Mapping[str, Any],
    *,
    ar: ArLane,
    mtp: MtpLane,
    ids: Ids,
    count: int,
    spare: int,
    dtype: str,
    exact: bool,
) -> Outcome:
    request = ask("gate", ids, count + spare)
    left, right = answer(ar, request).tokens[:count], answer(mtp, request).tokens[:count]
    place = first_parting(left, right)
    if place is None:
        return equal(name, case, True, tokens=len(left))
    tie = parting_tie((ar, mtp), ids, (left, right), place, tolerance=Tolerance.of(dtype), spare=spare)
    near = tie.near and not exact  # where bits are promised, rounding explains nothing
    return Outcome(check=name, case=case, verdict="near tie" if near else "different", detail=vars(tie))


def parting_tie(
    lanes: tuple[Lane[Any], Lane[Any]],
    ids: Ids,
    tokens: tuple[list[int], list[int]],
    place: int,
    *,
    tolerance: Tolerance,
    spare: int = 0,
) -> Tie:
    """Two greedy answers that part at a place: the same runs again, with the law at it."""
    listed = ask("gate again", ids, place + 1 + spare, sampling=replace(GREEDY, logprobs=LISTED))
    tops = tuple(answer(lane, listed).top(place) for lane in lanes)
    chosen = (tokens[0][place], tokens[1][place])
    return examine_tie("tokens", place, chosen, (tops[0], tops[1]), tolerance=tolerance, drawn=False)


def check_host_choice(subject: Subject, matrix: Matrix) -> Iterator[Outcome]:
    """The choice on the device, one token ahead, is the host's choice from the same row."""
    for prompt, ids in matrix.prompt_ids(subject)[:1]:
        device = answer(subject.ar_lane(), ask("device", ids, matrix.new_tokens)).tokens
        listed = replace(GREEDY, logprobs=1)
        host = answer(subject.ar_lane(), ask("host", ids, matrix.new_tokens, sampling=listed)).tokens
        place = first_parting(device, host)
        yield equal("choice on the device = on the host", {"prompt": prompt}, place is None, position=place)


def check_rows(subject: Subject, matrix: Matrix, *, exact: bool) -> Iterator[Outcome]:
    """K01: row i of a window against the i-th single step: bits, or how far apart, and the layers that differ."""
    model: CausalModel = subject.model
    width = max(matrix.depths, default=3) + 1
    tolerance = Tolerance.of(str(subject.about["dtype"]))
    for prompt, ids in matrix.prompt_ids(subject)[:1]:
        head, window = ids[:-1], [ids[-1], *ids[: width - 1]]
        single, wide = model.make_cache(), model.make_cache()
        for state in (single, wide):
            model.forward(mx.array([head], dtype=mx.int32), state, keep=0)
            mx.eval(state.arrays())
        rows = model.project(model.forward(mx.array([window], dtype=mx.int32), wide).post[0])
        steps = [model.project(model.forward(mx.array([[token]]), single).post[0]) for token in window]
        found = fetch({"wide": rows, "single": mx.concatenate(steps)})
        a, b = found["wide"], found["single"]
        assert a is not None and b is not None
        far = np.abs(a - b).max(axis=1)
        pairs = zip(single.snapshot().layers, wide.snapshot().layers, strict=True)
        differing = [i for i, (x, y) in enumerate(pairs) if _bits(x) != _bits(y)]
        kinds = sorted({f"{layer.kind}" for i, layer in enumerate(single.layers) if i in differing})
        same = not far.any() and not differing
        small = bool((far <= bounds(a, b, tolerance)).all()) and not exact
        yield Outcome(
            check="row of a window = single row",
            case={"prompt": prompt, "rows": width},
            verdict="identical" if same else "near tie" if small else "different",
            detail={"largest": far.tolist(), "layers_that_differ": differing, "kinds_that_differ": kinds},
        )


def bounds(a: Values, b: Values, tolerance: Tolerance) -> Values:
    """How far apart each of two rows [S, V] may be."""
    peak = np.maximum(np.abs(a).max(axis=1), np.abs(b).max(axis=1))
    bounds: Values = tolerance.absolute + tolerance.relative * peak
    return bounds


def _bits(layer: Any) -> list[bytes]:
    return [np.asarray(array.astype(mx.float32)).tobytes() for array in layer.arrays()]
