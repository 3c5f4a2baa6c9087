"""mtplx's side of `mtp_against_mtplx.py`: its own generation functions, with the time of every round.

mtplx is made for Macs. Here it runs on the CPU with the `stock` verify core and committed history: the core that it
serves with by default gives wrong tokens on a CPU, without an error.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from collections.abc import Sequence
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
from lines import runner_parser, serve
from products import choose_products


def stand_in_for_libsystem() -> None:
    """Give the three functions of macOS that mtplx looks up at import: a clock, its scale, and a refusal."""
    if sys.platform == "darwin":
        return
    load = ctypes.CDLL

    class Function:
        """A Python function that takes the attributes of a foreign one."""

        argtypes = restype = None

        def __init__(self, call: Any) -> None:
            self.call = call

        def __call__(self, *arguments: Any) -> Any:
            return self.call(*arguments)

    def one_to_one(reference: Any) -> int:
        scale = reference._obj
        scale.numer = scale.denom = 1
        return 0

    class LibSystem:
        mach_timebase_info = Function(one_to_one)
        mach_continuous_time = Function(time.monotonic_ns)
        sysctlbyname = Function(lambda *_: -1)

    def find(name: Any = None, *arguments: Any, **options: Any) -> Any:
        return LibSystem() if "libSystem" in str(name) else load(name, *arguments, **options)

    ctypes.CDLL = find  # type: ignore[assignment, misc]


# Both before the imports below: mlx-lm makes a stream on the default device when it is imported, and mtplx looks for
# macOS's functions.
mx.set_default_device(mx.cpu)
stand_in_for_libsystem()

from mlx_lm.utils import load_model  # noqa: E402
from mtplx.generation import generate_ar, generate_mtpk  # noqa: E402
from mtplx.mtp_patch import MTPContract, inject_mtp_support  # noqa: E402
from mtplx.runtime import MTPLXRuntime  # noqa: E402
from mtplx.sampling import SamplerConfig  # noqa: E402


class NoText:
    """A tokenizer of ids that stand for nothing."""

    eos_token_ids: frozenset[int] = frozenset()

    def decode(self, ids: Any, **_: Any) -> str:
        return ""


class Engine:
    def __init__(self, checkpoint: Path, products: str, strategy: str) -> None:
        self.products = choose_products(products)
        self.strategy = strategy
        config = json.loads((checkpoint / "config.json").read_text())
        model, _ = load_model(checkpoint)
        contract = MTPContract()
        if not inject_mtp_support(model, checkpoint, config, contract):
            raise RuntimeError("mtplx found no draft head")
        self.runtime = MTPLXRuntime(model, NoText(), checkpoint, True, contract)
        self.stamps: list[float] = []
        self.width = 0
        for name in ("forward_ar", "forward_ar_capture"):
            setattr(self.runtime, name, self._stamped(getattr(self.runtime, name)))

    def about(self) -> dict[str, Any]:
        names = ("mtplx", "mlx", "mlx-lm", "transformers", "numpy")
        return {
            "products": self.products,
            "mlx": mx.__version__,
            "verify_strategy": self.strategy,
            "versions": {name: version(name) for name in names},
        }

    def run(self, prompt: Sequence[int], count: int, depth: int) -> dict[str, Any]:
        """Ids, counts, and seconds between consecutive verify forwards; depth 0 is plain decoding, token by token.

        A round hands its tokens on in parts, so rounds are told apart by their one forward of depth + 1 rows.
        """
        stamps = self.stamps = []
        self.width = depth + 1
        usual: dict[str, Any] = {
            "max_tokens": count,
            "sampler": SamplerConfig(temperature=0.0, top_p=1.0, top_k=0),
            "stop_token_ids": {-1},
        }
        if depth == 0:
            output = generate_ar(self.runtime, list(prompt), **usual)
        else:
            output = generate_mtpk(
                self.runtime,
                list(prompt),
                speculative_depth=depth,
                mtp_history_policy="committed",
                verify_core="stock",
                verify_strategy=self.strategy,
                **usual,
            )
        stats = output.stats
        return {
            "tokens": [int(token) for token in output.tokens],
            "accepted": stats.accepted_drafts,
            "drafted": stats.drafted_tokens,
            "verifies": stats.verify_calls,
            "seconds": [after - before for before, after in pairwise(stamps)],
        }

    def bare(self, prompt: Sequence[int], cycles: int, depth: int) -> list[float]:
        """Seconds of the network's part of a cycle alone: `depth` chained head forwards and one of depth + 1 rows."""
        runtime, seconds = self.runtime, []
        cache, history = runtime.make_cache(), runtime.make_mtp_cache()
        logits, hidden = runtime.forward_ar(mx.array([prompt]), cache=cache, return_hidden=True)
        token = mx.argmax(logits[:, -1:], axis=-1)
        mx.eval(token, hidden)
        for _ in range(cycles):
            before = time.perf_counter()
            ids, h = [token], hidden[:, -1:]
            for _ in range(depth):
                logits, h = runtime.draft_mtp(h, ids[-1], mtp_cache=history, return_hidden=True)
                ids.append(mx.argmax(logits[:, -1:], axis=-1))
            logits, hidden = runtime.forward_ar(mx.concatenate(ids, axis=1), cache=cache, return_hidden=True)
            choices = mx.argmax(logits, axis=-1)
            token = choices[:, -1:]
            mx.eval(choices, hidden)
            seconds.append(time.perf_counter() - before)
        return seconds

    def _stamped(self, forward: Any) -> Any:
        """The runtime's forward, which notes when one as wide as a verify window begins."""

        def call(ids: Any, *arguments: Any, **options: Any) -> Any:
            if ids.shape[-1] == self.width:
                self.stamps.append(time.perf_counter())
            return forward(ids, *arguments, **options)

        return call


def main() -> None:
    parser = runner_parser(__doc__, products="stock")
    parser.add_argument("--strategy", default="capture_commit")
    options = parser.parse_args()
    engine = Engine(options.checkpoint, options.products, options.strategy)
    serve({"about": engine.about, "run": engine.run, "bare": engine.bare})


if __name__ == "__main__":
    main()
