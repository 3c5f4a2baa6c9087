"""The probes of `polytoken bench`, cut to moments: for tests of what a report says, not of how fast a machine is."""

from __future__ import annotations

from collections.abc import Callable

from polytoken.bench import roofline, run


def shorten_probes(put: Callable[[object, str, object], None] = setattr) -> None:
    """Shorten the real probes; `put` may be monkeypatch's setattr, which takes it back."""
    put(roofline, "_CPU_BYTES", 4 << 20)
    put(roofline, "_BURST_SECONDS", 0.005)
    put(roofline, "_BESIDE_SECONDS", 0.005)
    put(run, "_PRODUCT_SIZE", 128)
    put(run, "_PRODUCT_SECONDS", 0.005)
