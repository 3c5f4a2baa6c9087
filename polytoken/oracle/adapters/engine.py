"""What another engine has to offer so that the oracle can write its receipts: prompts to ids, and rows of logits.

To add one: subclass `ReferenceEngine` in a file of its own (four methods), and name it in `ENGINES`.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from polytoken.errors import UsageError
from polytoken.oracle.digests import TOP, Values, check_finite, fingerprint
from polytoken.oracle.environment import describe_environment
from polytoken.oracle.plain import forward_fields, write_greedy_steps
from polytoken.oracle.receipt import Receipts, start_fields
from polytoken.oracle.weights import weights_sha256

MODES: Final = ("forward", "decode", "ar")


class ReferenceEngine(ABC):
    """A loaded model of another engine. Greedy only: drawing is each engine's own.

    Attributes:
        name: engine and version.
        dtype, device: of its arithmetic.
        eos_ids: ids that end an answer.
        max_positions: longest sequence.
    """

    name: str
    dtype: str
    device: str
    eos_ids: frozenset[int]
    max_positions: int

    @abstractmethod
    def encode(self, prompt: str) -> list[int]:
        """Ids of one user turn in the checkpoint's chat template, with thinking on, up to where the answer begins."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The ids as text, special tokens kept."""

    @abstractmethod
    def begin(self) -> None:
        """Forget everything: the next forward begins a text."""

    @abstractmethod
    def forward(self, ids: Sequence[int]) -> Values:
        """Logits float32 [S, V] of S ids behind all those since `begin`, in one forward."""


Load = Callable[[Path], ReferenceEngine]


def load_engine(name: str, checkpoint: Path) -> ReferenceEngine:
    """An engine by its name.

    Raises:
        UsageError: unknown, or not installed.
    """
    if name not in ENGINES:
        raise UsageError(f"ENGINE must be one of {', '.join(ENGINES)}, not {name!r}")
    if not (checkpoint / "config.json").is_file():
        raise UsageError(f"--model: {str(checkpoint)!r} is no folder with a config.json", field="--model")
    try:
        return ENGINES[name](checkpoint)
    except ImportError as missing:
        raise UsageError(
            f"{name} is not installed here ({missing.name}); run this in an environment that has it",
            code="missing_extra",
        ) from None


def write_reference(
    load: Callable[[], ReferenceEngine],
    receipts: Receipts,
    *,
    checkpoint: Path,
    mode: str,
    prompt: str,
    limit: int | None,
) -> None:
    """Write another engine's receipts of a mode; the last one tells of a failure, which is raised again."""
    with receipts.ended():
        receipts.enter("loading")
        start = time.perf_counter()
        engine = load()
        seconds = time.perf_counter() - start
        _write_head(engine, receipts, checkpoint=checkpoint, mode=mode, prompt=prompt, seconds=seconds)
        _write_mode(engine, receipts, mode=mode, prompt=prompt, limit=limit)


def _write_head(
    engine: ReferenceEngine, receipts: Receipts, *, checkpoint: Path, mode: str, prompt: str, seconds: float
) -> None:
    fields = start_fields(
        engine=engine.name,
        mode=mode,
        lane="ar",
        model=str(checkpoint),
        environment=describe_environment(),
        settings={},
    )
    receipts.write("receipt_start", **fields)
    receipts.write("reference_prompt", text=prompt, sha256=hashlib.sha256(prompt.encode()).hexdigest())
    receipts.write(
        "reference_loaded",
        model=checkpoint.name,
        checkpoint_sha256=weights_sha256(checkpoint),
        dtype=engine.dtype,
        device=engine.device,
        max_positions=engine.max_positions,
        load_seconds=seconds,
    )


def _write_mode(engine: ReferenceEngine, receipts: Receipts, *, mode: str, prompt: str, limit: int | None) -> None:
    ids = engine.encode(prompt)
    receipts.enter("prefill")
    engine.begin()
    start = time.perf_counter()
    rows = check_finite("logits", engine.forward(ids))
    seconds = time.perf_counter() - start
    if mode == "ar":
        receipts.write(
            "ar_prefill_reference",
            token_ids=ids,
            logits=fingerprint(rows[-1:]),
            hidden=False,
            seconds=seconds,
            chunks=None,
            chunk_size=None,
            final_logits_only=True,
        )
        return _answer(engine, receipts, ids, rows[-1], limit=limit, seconds=seconds)
    receipts.write(
        "forward_reference",
        **forward_fields(ids, rows),
        forward_seconds=seconds,
        mtp=False,
        prompt=prompt,
    )
    return _steps(engine, receipts, ids, rows[-1], limit=limit) if mode == "decode" else None


def _room(engine: ReferenceEngine, ids: Sequence[int], limit: int | None) -> int:
    room = engine.max_positions - len(ids)
    return room if limit is None else min(room, limit)


def _steps(engine: ReferenceEngine, receipts: Receipts, ids: list[int], row: Values, *, limit: int | None) -> None:
    """Greedy steps, with a receipt for each."""
    receipts.enter("decode")
    write_greedy_steps(
        receipts,
        lambda token: check_finite("logits", engine.forward([token])),
        int(row.argmax()),
        eos_ids=engine.eos_ids,
        room=_room(engine, ids, limit),
        text=engine.decode,
    )


def _answer(
    engine: ReferenceEngine, receipts: Receipts, ids: list[int], row: Values, *, limit: int | None, seconds: float
) -> None:
    """The greedy answer with the likeliest ids at every place."""
    receipts.enter("decode")
    start = time.perf_counter()
    room = _room(engine, ids, limit)
    made: list[int] = []
    top: list[list[list[float]]] = []
    while True:
        token = int(row.argmax())
        made.append(token)
        top.append(_log_probabilities(row))
        row = check_finite("logits", engine.forward([token]))[-1]
        if token in engine.eos_ids or len(made) >= room:
            break
    natural = made[-1] in engine.eos_ids
    receipts.write(
        "ar_reference_end",
        tokens=made,
        top=top,
        text=engine.decode(made),
        finish_reason="stop" if natural else "length",
        stops=sorted(engine.eos_ids),
        seed=0,
        temperature=0.0,
        top_p=0.95,
        top_k=20,
        elapsed_seconds=time.perf_counter() - start + seconds,
        prompt_seconds=seconds,
        final_logits=fingerprint(row[None]),
    )


def _log_probabilities(row: Values) -> list[list[float]]:
    z = row.astype(np.float64)
    peak = z.max()
    z = z - (peak + np.log(np.exp(z - peak).sum()))
    order = np.argsort(-z, kind="stable")[:TOP]
    return [[int(i), float(z[i])] for i in order]


def _load_transformers(checkpoint: Path) -> ReferenceEngine:
    from polytoken.oracle.adapters.transformers_engine import TransformersEngine  # noqa: PLC0415

    return TransformersEngine(checkpoint)


def _load_mlx_lm(checkpoint: Path) -> ReferenceEngine:
    from polytoken.oracle.adapters.mlx_lm_engine import MlxLmEngine  # noqa: PLC0415

    return MlxLmEngine(checkpoint)


ENGINES: Final[dict[str, Load]] = {"transformers": _load_transformers, "mlx-lm": _load_mlx_lm}


def chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Ids of one user turn from a transformers tokenizer."""
    turns = [{"role": "user", "content": prompt}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, enable_thinking=True, return_dict=False)
    return [int(token) for token in ids]


def stop_ids(checkpoint: Path, tokenizer: Any) -> frozenset[int]:
    """Ids that end an answer: of generation_config.json, else of config.json, else the tokenizer's own."""
    for name in ("generation_config.json", "config.json"):
        file = checkpoint / name
        value = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if value is not None:
            return frozenset(value if isinstance(value, list) else [value])
    return frozenset([tokenizer.eos_token_id])
