"""Putting the rooms together on the owner thread: options and a checkpoint in, a lane that an engine can run out."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from polytoken import __version__
from polytoken.backend import DEVICES, check_products, enable_products, select_device
from polytoken.engine import Label, LoadedLane, SchedulerLimits
from polytoken.errors import UsageError
from polytoken.events import RuntimeLoaded
from polytoken.kernels.products import ProductsReport
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.request import Request, SamplingParams

if TYPE_CHECKING:
    from polytoken.cache.bank import StateBank
    from polytoken.cache.disk.tier import DiskTier
    from polytoken.cache.identity import StateIdentity
    from polytoken.checkpoint import Runtime
    from polytoken.checkpoint.progress import Progress
    from polytoken.lanes.base import Lane
    from polytoken.text.stream import TextStream

Warn = Callable[[str], None]
SESSION_DISK_MIB: Final = 4096
CLOSE_SECONDS: Final = 10.0
"""How long the end of an engine waits for states to reach the session folder."""
log_warning: Final[Warn] = logging.getLogger(__name__).warning
LANES = ("auto", "ar", "mtp", "canvas")
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Everything an engine can be told. Every field has an effect that `runtime_loaded` reports.

    Attributes:
        model: folder, hub id, GGUF file or catalogue name.
        lane: `ar`, `mtp`, `canvas`, or `auto` for what suits the checkpoint: canvas for a block-diffusion model, mtp
            where there is a usable draft head, else ar.
        dtype: of weights and arithmetic: `auto` (float32 on the CPU, as stored on a GPU), `float32`, `bfloat16`, ...
        dequantise: unpack quantised weights at load; None means on the CPU when memory allows.
        products: what multiplies float32 matrices on the CPU: `exact`, `stock`, or the path of a BLAS library.
        threads: most threads that one product may use.
        device: `auto`, `cpu` or `gpu`.
        revision: branch, tag or commit of a hub id.
        offline: never use the network.
        store: folder of pulled models, None for the user's cache folder.
        batch_size: rows prefilling or decoding at once.
        prefill_chunk_size: prompt tokens per prefill forward, and per turn of the scheduler.
        prefix_cache_mib: MiB for reusable prompt states; 0 turns reuse off.
        session_cache_mib: most of them that one session may hold, None for all.
        prefix_reuse: `exact`: states are gone on from only where that changes no bit of what a cold run gives;
            `close`: from everywhere, also where a device rounds chunks of other lengths differently.
        session_dir: folder in which reusable prompt states and sessions outlive the process; None keeps them in memory.
        session_disk_mib: MiB that all files in that folder may take together; None for 4096.
        max_queue_size: requests that may wait.
        token_events: whether `token` events are sent to those who do not say.
        mtp: how the mtp lane speculates.
        draft_model: a second model that drafts, named as `model` is; for the drafters that want one.
        canvas: how the canvas lane denoises.

    Raises:
        UsageError: naming the flag of the field at fault.
    """

    model: str
    lane: str = "auto"
    dtype: str = "auto"
    dequantise: bool | None = None
    products: str = "exact"
    threads: int = 1
    device: str = "auto"
    revision: str | None = None
    offline: bool = False
    store: Path | None = None
    batch_size: int = 4
    prefill_chunk_size: int = 256
    prefix_cache_mib: int = 512
    session_cache_mib: int | None = None
    prefix_reuse: str = "exact"
    session_dir: Path | None = None
    session_disk_mib: int | None = None
    max_queue_size: int = 128
    token_events: bool = True
    mtp: MtpSettings = field(default_factory=MtpSettings)
    draft_model: str | None = None
    canvas: CanvasSettings = field(default_factory=CanvasSettings)

    def __post_init__(self) -> None:
        if self.lane not in LANES:
            raise UsageError(f"--lane must be one of {', '.join(LANES)}, not {self.lane!r}", field="--lane")
        if self.device not in DEVICES:
            raise UsageError(f"--device must be one of {', '.join(DEVICES)}, not {self.device!r}", field="--device")
        check_products(self.products)
        if self.prefix_cache_mib < 0:
            raise UsageError("--prefix-cache-mib must be 0 (off) or more", field="--prefix-cache-mib")
        self._check_session_dir()
        self._check_reuse()
        if self.draft_model is not None and self.mtp.network != "model":
            raise UsageError("--draft-model needs --drafter model or lookup+model", field="--draft-model")
        self.limits()  # checks the rest

    def _check_reuse(self) -> None:
        if self.session_cache_mib is not None:
            if self.session_cache_mib < 1:
                raise UsageError("--session-cache-mib must be 1 or more", field="--session-cache-mib")
            if self.prefix_cache_mib == 0:
                raise UsageError("--session-cache-mib needs --prefix-cache-mib above 0", field="--session-cache-mib")
        if self.prefix_reuse not in ("exact", "close"):
            raise UsageError(
                f"--prefix-reuse must be exact or close, not {self.prefix_reuse!r}", field="--prefix-reuse"
            )

    def _check_session_dir(self) -> None:
        if self.session_disk_mib is not None and self.session_disk_mib < 1:
            raise UsageError("--session-disk-mib must be 1 or more", field="--session-disk-mib")
        if self.session_dir is None:
            if self.session_disk_mib is not None:
                raise UsageError("--session-disk-mib needs --session-dir", field="--session-disk-mib")
            return
        if self.prefix_cache_mib == 0:
            raise UsageError("--session-dir needs --prefix-cache-mib above 0", field="--session-dir")
        if self.session_dir.exists() and not self.session_dir.is_dir():
            raise UsageError(f"--session-dir: {self.session_dir} is no folder", field="--session-dir")

    def limits(self) -> SchedulerLimits:
        """The scheduler's share of the options."""
        return SchedulerLimits(
            max_rows=self.batch_size, max_pending=self.max_queue_size, prefill_budget=self.prefill_chunk_size
        )

    def settings(self) -> dict[str, Any]:
        """The options as JSON, for `runtime_loaded`."""
        folders = {"store": self.store, "session_dir": self.session_dir}
        return {**asdict(self), **{name: None if path is None else str(path) for name, path in folders.items()}}


def load_lane(options: EngineOptions, progress: Progress, warn: Warn = log_warning) -> LoadedLane:
    """Load the checkpoint and make its lane. Called once, on the thread that owns MLX from then on.

    `warn` is told in one line what goes wrong later without failing anything; on any thread.
    """
    try:
        return _load_lane(options, progress, warn)
    except BaseException:
        _release_device()  # the thread ends now
        raise


def _load_lane(options: EngineOptions, progress: Progress, warn: Warn) -> LoadedLane:
    start = time.perf_counter()
    device = select_device(options.device)
    products = enable_products(device, options.products, threads=options.threads)
    # Imported here: what needs MLX, on the thread that owns it.
    from polytoken.text.answer import open_answer  # noqa: PLC0415
    from polytoken.text.histories import Histories  # noqa: PLC0415
    from polytoken.text.prompt import prompt_ids  # noqa: PLC0415

    runtime = _load_runtime(options.model, options, progress)
    numerics = f"{device}/{runtime.dtype}/{products.kind}/{products.form}"
    tier = _open_tier(runtime, options, warn)
    try:
        lane = _choose_lane(runtime, options, numerics=numerics, progress=progress, tier=tier)
    except BaseException:
        if tier is not None:
            tier.close(0)
        raise
    tokenizer, stop_ids = runtime.tokenizer, frozenset(lane.eos_ids)
    histories = Histories(tokenizer, lane.bank.sessions.committed, refused=lane.refused_ids)

    def open_text(request: Request, prompt: Sequence[int]) -> TextStream:
        ends = frozenset() if request.ignore_eos else stop_ids
        return open_answer(tokenizer, request, prompt, stop_ids=ends, on_end=histories.watch(request))

    def encode(request: Request) -> Sequence[int]:
        if request.session is None or request.messages is None:
            return prompt_ids(tokenizer, request)
        return histories.encode(request)

    return LoadedLane(
        lane=lane,
        encode=encode,
        open_text=open_text,
        label=Label(str(runtime.checkpoint), runtime.step),
        loaded=_describe(runtime, lane, options, device=device, products=products, started=start),
        sampling=lane.sampling if lane.name == "canvas" else recommended_sampling(runtime.generation),
        release=_release_device if tier is None else _closing(tier, lane.bank),
        rows_per_step=lane.capacity if lane.name == "canvas" else None,
        tokenizer=tokenizer,
        histories=histories,
    )


def _load_runtime(model: str, options: EngineOptions, progress: Progress) -> Runtime:
    from polytoken.checkpoint import CheckpointStore, load_runtime  # noqa: PLC0415

    return load_runtime(
        model,
        store=None if options.store is None else CheckpointStore(options.store),
        dtype=options.dtype,
        dequantise=options.dequantise,
        revision=options.revision,
        offline=options.offline,
        progress=progress,
    )


def _open_tier(runtime: Runtime, options: EngineOptions, warn: Warn) -> DiskTier | None:
    """The disk below the bank, where one was asked for."""
    if options.session_dir is None:
        return None
    from polytoken.cache.disk.environment import environment  # noqa: PLC0415
    from polytoken.cache.disk.store import DiskStore  # noqa: PLC0415
    from polytoken.cache.disk.tier import DiskTier  # noqa: PLC0415

    store = DiskStore(
        options.session_dir.expanduser(),
        limit_bytes=(options.session_disk_mib or SESSION_DISK_MIB) * _MIB,
        warn=lambda text: warn(f"--session-dir {text}"),
    )
    return DiskTier(store, environment=environment(), label=runtime.name, checkpoint=runtime.identity)


def _closing(tier: DiskTier, bank: StateBank) -> Callable[[], None]:
    """The end of an engine with a disk below its bank: what is not written yet is, for as long as the bank is there."""
    held = [bank]

    def release() -> None:
        tier.close(CLOSE_SECONDS)
        held.clear()
        gc.collect()
        _release_device()

    return release


def _choose_lane(
    runtime: Runtime, options: EngineOptions, *, numerics: str, progress: Progress, tier: DiskTier | None
) -> Any:
    """The lane that was asked for, or the one that suits the checkpoint."""
    from polytoken.cache.identity import StateIdentity  # noqa: PLC0415
    from polytoken.lanes.canvas.opening import is_canvas  # noqa: PLC0415

    name = options.lane
    if name == "auto":
        name = "canvas" if is_canvas(runtime) else "mtp" if _can_draft(runtime, options.mtp) else "ar"
    if is_canvas(runtime) and name != "canvas":
        raise UsageError(f"--lane {name}: this checkpoint is a block-diffusion model; use canvas", field="--lane")
    if name == "canvas" and options.prefix_reuse == "close":
        raise UsageError(
            "--prefix-reuse close: the canvas lane goes on from whole chunks alone; leave it out",
            field="--prefix-reuse",
        )
    identity = StateIdentity(
        checkpoint=runtime.identity,
        lane="canvas" if name == "canvas" else "ar",
        grid=options.prefill_chunk_size,
        numerics=numerics,
        template_hash=runtime.tokenizer.identity,
        free=name != "canvas" and (options.prefix_reuse == "close" or cuts_change_nothing(numerics)),
    )
    if name == "canvas":
        return _canvas_lane(runtime, options, identity, tier)
    if name == "mtp":
        return _mtp_lane(runtime, options, identity, progress=progress, tier=tier)
    return _ar_lane(runtime, options, identity, tier)


def cuts_change_nothing(numerics: str) -> bool:
    """Whether a token's numbers are the same however a text is cut into forwards: exact products in float32."""
    return numerics.startswith("cpu/float32/exact/")


def _can_draft(runtime: Runtime, settings: MtpSettings) -> bool:
    """Whether `auto` means speculation: a head is there, or the user named another way to draft."""
    return getattr(runtime.model, "draft_head", None) is not None or settings.drafter != MtpSettings.drafter


def _make_bank(options: EngineOptions, identity: StateIdentity, tier: DiskTier | None) -> StateBank:
    from polytoken.cache.bank import StateBank  # noqa: PLC0415

    session = options.session_cache_mib
    return StateBank(
        options.prefix_cache_mib * _MIB,
        identity=identity,
        session_limit_bytes=None if session is None else session * _MIB,
        tier=tier,
    )


def _ar_lane(runtime: Runtime, options: EngineOptions, identity: StateIdentity, tier: DiskTier | None) -> Lane[Any]:
    from polytoken.lanes.ar import ArLane  # noqa: PLC0415

    return ArLane(
        runtime.model,
        _make_bank(options, identity, tier),
        prefill_chunk=options.prefill_chunk_size,
        eos_ids=runtime.tokenizer.eos_ids,
        turn_end_id=_turn_end_id(runtime),
        max_positions=runtime.max_positions,
    )


def _mtp_lane(
    runtime: Runtime, options: EngineOptions, identity: StateIdentity, *, progress: Progress, tier: DiskTier | None
) -> Lane[Any]:
    from polytoken.lanes.mtp.lane import MtpLane, identify  # noqa: PLC0415

    drafting = None if options.draft_model is None else _load_runtime(options.draft_model, options, progress)
    draft_hash = "" if drafting is None else drafting.identity
    identity = identify(identity, options.mtp, runtime.model, draft_model=draft_hash)
    return MtpLane(
        runtime.model,
        _make_bank(options, identity, tier),
        prefill_chunk=options.prefill_chunk_size,
        eos_ids=runtime.tokenizer.eos_ids,
        turn_end_id=_turn_end_id(runtime),
        max_positions=runtime.max_positions,
        settings=options.mtp,
        draft_model=None if drafting is None else drafting.model,
    )


def _canvas_lane(runtime: Runtime, options: EngineOptions, identity: StateIdentity, tier: DiskTier | None) -> Lane[Any]:
    from polytoken.lanes.canvas.opening import open_canvas_lane  # noqa: PLC0415

    return open_canvas_lane(
        runtime,
        options.canvas,
        bank=_make_bank(options, identity, tier),
        prefill_chunk=options.prefill_chunk_size,
        max_batch_rows=options.batch_size,
    )


def _turn_end_id(runtime: Runtime) -> int | None:
    value = runtime.generation.get("turn_end_token_id", runtime.config.get("turn_end_token_id"))
    return value if isinstance(value, int) else None


def _describe(
    runtime: Runtime,
    lane: Any,
    options: EngineOptions,
    *,
    device: str,
    products: ProductsReport,
    started: float,
) -> RuntimeLoaded:
    extra: dict[str, Any] = {
        "model": runtime.name,
        "revision": runtime.revision,
        "identity": runtime.identity,
        "device": device,
        "dtype": runtime.dtype,
        "quantisation": runtime.quantisation,
        "stored_quantisation": runtime.stored_quantisation,
        "parameters": runtime.parameters,
        "weight_bytes": runtime.weight_bytes,
        "max_positions": runtime.max_positions,
        "products": asdict(products),
        "draft_head_note": getattr(runtime.model, "draft_head_note", None) or None,
    }
    if lane.name == "canvas":
        extra |= lane.report()
    elif lane.name == "mtp":
        extra |= {"depth": options.mtp.depth, "drafter": options.mtp.drafter, "depth_policy": options.mtp.policy}
    return RuntimeLoaded(
        engine=f"polytoken {__version__}",
        checkpoint=str(runtime.checkpoint),
        step=runtime.step,
        restored_trainable_tensors=runtime.tensor_count,
        backend="mlx",
        lane=lane.name,
        execution=lane.execution,
        load_seconds=time.perf_counter() - started,
        extra=extra,
        settings=options.settings(),
    )


def _release_device() -> None:
    """Last act on the owner thread: wait for work in flight, give memory back, and end the thread's streams.

    A stream that is still alive when its thread has gone can abort the process at exit.
    """
    import mlx.core as mx  # noqa: PLC0415

    mx.synchronize()
    mx.clear_cache()
    mx.clear_streams()


def recommended_sampling(generation: Mapping[str, Any]) -> SamplingParams:
    """The sampling a checkpoint's generation_config.json asks for: greedy unless it says `do_sample`."""
    if generation.get("do_sample") is not True:
        return SamplingParams()
    names: Sequence[str] = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    return replace(SamplingParams(temperature=1.0), **given)
