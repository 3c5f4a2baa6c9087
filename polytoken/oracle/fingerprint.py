"""Fingerprints of arrays: shape and SHA-256 of the values as little-endian float32, which must all be finite.

The cast makes bfloat16 and float16 exact, so that two engines that hold the same values in different types agree.
Everything that one receipt needs of the device is evaluated together: it is held up once.
"""

from __future__ import annotations

from collections.abc import Mapping

import mlx.core as mx
import numpy as np

from polytoken.oracle.digests import Fingerprint, Values, check_finite, fingerprint


def fetch(arrays: Mapping[str, mx.array | None]) -> dict[str, Values | None]:
    """The arrays as little-endian float32 on the host, in C order, after one evaluation of all; None stays None.

    Raises:
        NonFiniteError: naming the array that holds NaN or infinity.
    """
    cast = {name: None if array is None else array.astype(mx.float32) for name, array in arrays.items()}
    mx.eval([array for array in cast.values() if array is not None])
    return {name: None if array is None else check_finite(name, np.asarray(array)) for name, array in cast.items()}


def fingerprints(**arrays: mx.array | None) -> dict[str, Fingerprint | None]:
    """The fingerprint of each array under its name, for one evaluation of all."""
    return {name: fingerprint(values) for name, values in fetch(arrays).items()}
