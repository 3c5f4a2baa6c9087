"""How close a request came to what the machine's memory allows, for the closing line of `--verbose`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polytoken.engine import Engine, LoadedLane
    from polytoken.events import GenerationResult


def floor_share(engine: Engine, result: GenerationResult) -> float | None:
    """The least time that decoding's reads take at this machine's measured bandwidth, over the time it took.

    Caches are left out. None for an answer too short to have a rate.
    """
    from polytoken.bench.floor import decode_seconds, least_bytes  # noqa: PLC0415
    from polytoken.bench.roofline import sustained_bandwidth  # noqa: PLC0415

    seconds = decode_seconds(result)
    if seconds is None:
        return None

    def floor(loaded: LoadedLane) -> float:  # on the thread that owns the device
        return least_bytes(loaded.lane, result) / (sustained_bandwidth().gb_per_second * 1e9)

    return engine.call(floor) / seconds
