"""Fingerprints of arrays: shape and SHA-256 of the values as little-endian float32, which must all be finite.

The cast makes bfloat16 and float16 exact, so that two engines that hold the same values in different types agree.
Everything that one receipt needs of the device is evaluated together: it is held up once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from polytoken.errors import NonFiniteError

Values = npt.NDArray[np.float32]
Fingerprint = dict[str, Any]

TOP: Final = 8  # likeliest ids that are written beside every row of logits


def fetch(arrays: Mapping[str, mx.array | None]) -> dict[str, Values | None]:
    """The arrays as little-endian float32 on the host, in C order, after one evaluation of all; None stays None.

    Raises:
        NonFiniteError: naming the array that holds NaN or infinity.
    """
    cast = {name: None if array is None else array.astype(mx.float32) for name, array in arrays.items()}
    mx.eval([array for array in cast.values() if array is not None])
    return {name: None if array is None else _checked(name, array) for name, array in cast.items()}


def fingerprint(values: Values | None) -> Fingerprint | None:
    """`{"shape": [...], "sha256": hex}` of values from `fetch`; None stays None."""
    if values is None:
        return None
    return {"shape": list(values.shape), "sha256": digest(values)}


def fingerprints(**arrays: mx.array | None) -> dict[str, Fingerprint | None]:
    """The fingerprint of each array under its name, for one evaluation of all."""
    return {name: fingerprint(values) for name, values in fetch(arrays).items()}


def digest(values: Values) -> str:
    """Hex SHA-256 of float32 values: little-endian, C order."""
    return hashlib.sha256(np.ascontiguousarray(values, dtype="<f4").tobytes()).hexdigest()


def row_digests(rows: Values) -> list[str]:
    """The digest of each row of [S, V]."""
    return [digest(row) for row in rows]


def describe_rows(rows: Values, *, top: int = TOP) -> dict[str, Any]:
    """What two engines can compare about rows of logits [S, V] whose last bits differ.

    `argmax` [S] (lowest id on ties), `top` [S][k] pairs (id, logit) from the largest down, `logsumexp` [S] in float64.
    """
    z = rows.astype(np.float64)
    k = min(top, z.shape[1])
    # Sorted by value, then by id, so that ties look the same everywhere.
    order = np.argsort(-z, axis=1, kind="stable")[:, :k]
    peak = z.max(axis=1)
    return {
        "argmax": [int(row[0]) for row in order],
        "top": [[[int(i), float(rows[s, i])] for i in order[s]] for s in range(len(z))],
        "logsumexp": (peak + np.log(np.exp(z - peak[:, None]).sum(axis=1))).tolist(),
    }


def _checked(name: str, array: mx.array) -> Values:
    values = np.asarray(array).astype("<f4", copy=False)
    wrong = int(values.size - np.isfinite(values).sum())
    if wrong:
        raise NonFiniteError(f"{name}: {wrong} of {values.size} values are NaN or infinite", field=name)
    return values
