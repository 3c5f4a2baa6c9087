"""Large memory pages for weights on the Linux CPU: fewer address translations while a product streams them."""

from __future__ import annotations

import ctypes
import sys

import mlx.core as mx
import numpy as np

_PAGE = 2 << 20
_MADV_HUGEPAGE = 14
_MADV_COLLAPSE = 25


def prefer_large_pages(array: mx.array) -> bool:
    """Ask the kernel to back an evaluated array by large pages, now. Whether it did; the values stay as they are.

    Only the whole large pages inside the array can be. A kernel that cannot or may not do it (before Linux 6.1, no free
    large page) leaves everything as it was.
    """
    if sys.platform != "linux":
        return False
    held = np.asarray(array.reshape(-1))
    start = -(-held.ctypes.data // _PAGE) * _PAGE
    length = (held.ctypes.data + held.nbytes - start) // _PAGE * _PAGE
    if length <= 0:
        return False
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    madvise(start, length, _MADV_HUGEPAGE)  # so that pages are not split again
    return bool(madvise(start, length, _MADV_COLLAPSE) == 0)
