"""Digests and descriptions of float32 values on the host, which every receipt is made with. Needs numpy only."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from polytoken.errors import NonFiniteError

Values = npt.NDArray[np.float32]
Fingerprint = dict[str, Any]

TOP: Final = 8  # likeliest ids that are written beside every row of logits


def check_finite(name: str, values: Values) -> Values:
    """The values as little-endian float32. Raises NonFiniteError naming the array that holds NaN or infinity."""
    wrong = int(values.size - np.isfinite(values).sum())
    if wrong:
        raise NonFiniteError(f"{name}: {wrong} of {values.size} values are NaN or infinite", field=name)
    return values.astype("<f4", copy=False)


def fingerprint(values: Values | None) -> Fingerprint | None:
    """`{"shape": [...], "sha256": hex}`; None stays None."""
    if values is None:
        return None
    return {"shape": list(values.shape), "sha256": digest(values)}


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
