"""What to measure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from polytoken.assembly import EngineOptions
from polytoken.backend import check_products
from polytoken.errors import UsageError

PEERS = ("mlx-lm",)


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What to measure.

    Attributes:
        engine: the engine's options; prefix reuse is switched off for the run.
        against: `mlx-lm` or None.
        peer_products: what stands behind the peer's float32 products on the CPU, one variant each: `same` (as ours),
            `stock` (what MLX came with), or the path of a BLAS library.
        depths: depths of the mtp lane, one variant each; empty for that of the engine's options.
        prompt_tokens, new_tokens: size of the work.
        rounds: timed rounds, after one warm-up.
    """

    engine: EngineOptions
    against: str | None = None
    peer_products: tuple[str, ...] = ("same", "stock")
    depths: tuple[int, ...] = ()
    prompt_tokens: int = 512
    new_tokens: int = 128
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.against is not None and self.against not in PEERS:
            raise UsageError(f"--against must be one of {', '.join(PEERS)}, not {self.against!r}", field="--against")
        for kind in self.peer_products:
            check_products(kind, flag="--peer-products", words=("same", "stock"))
        for name, least in (("prompt_tokens", 2), ("new_tokens", 2), ("rounds", 1)):
            if getattr(self, name) < least:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least {least}", field=flag)
        self._check_depths()

    def loading(self) -> EngineOptions:
        """The options that the engine is loaded with."""
        mtp = self.engine.mtp if not self.depths else replace(self.engine.mtp, depth=max(self.depths))
        return replace(self.engine, prefix_cache_mib=0, mtp=mtp)

    def check_lane(self, lane: str) -> None:
        """Refuse what the lane that was loaded cannot be asked for."""
        if self.depths and lane != "mtp":
            raise UsageError(f"--depths belongs to the mtp lane; this is {lane}", field="--depths")
        if self.against is not None and lane == "canvas":
            raise UsageError(f"--against: {self.against} has no canvas models", field="--against")

    def _check_depths(self) -> None:
        flag, mtp = "--depths", self.engine.mtp
        if not self.depths:
            return
        for depth in self.depths:
            replace(mtp, depth=depth)  # checks it
        if len(set(self.depths)) < len(self.depths):
            raise UsageError(f"{flag} names a depth twice", field=flag)
        if mtp.network is None:
            raise UsageError(f"{flag} has no effect with --drafter {mtp.drafter}", field=flag)
        if mtp.policy == "cost" and len(self.depths) > 1:
            raise UsageError(f"{flag} takes one depth with --depth-policy cost, which chooses below it", field=flag)
