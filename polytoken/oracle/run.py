"""One run of the oracle: load, run the mode of the plan, and write how it ended, whatever happens."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

from polytoken import __version__
from polytoken.assembly import EngineOptions
from polytoken.backend import require_mlx
from polytoken.checkpoint.progress import Progress, silent
from polytoken.errors import UsageError
from polytoken.oracle.canary.probe import choose_probe
from polytoken.oracle.canary.watch import Canary
from polytoken.oracle.environment import describe_environment
from polytoken.oracle.modes.ar import run_ar
from polytoken.oracle.modes.canvas import run_canvas
from polytoken.oracle.modes.chat import Chat
from polytoken.oracle.modes.forward import run_decode, run_forward
from polytoken.oracle.modes.mtp import generate_mtp, run_mtp_prefill
from polytoken.oracle.modes.mtp_round import run_round
from polytoken.oracle.modes.serving import LOGPROBS
from polytoken.oracle.modes.suffixes import run_suffixes
from polytoken.oracle.plan import Plan
from polytoken.oracle.prompts import first_prompt, suffix_prompts
from polytoken.oracle.receipt import Receipts, start_fields
from polytoken.oracle.source import SourceRun, read_source
from polytoken.oracle.subject import Ids, Subject, examine
from polytoken.oracle.weights import weights_sha256
from polytoken.request import SamplingParams

ENGINE = f"polytoken {__version__}"


def run_oracle(plan: Plan, options: EngineOptions, receipts: Receipts, *, progress: Progress = silent) -> None:
    """Run the plan. The last receipt tells of a failure, which is raised again.

    Raises:
        PolytokenError: with the exit status of its kind: 2 usage, 3 mismatch, 4 non-finite.
    """
    canary_on = plan.canary != "off"
    mtp = plan.lane == "mtp"
    source = None if plan.source_run is None else read_source(plan.source_run, mtp=mtp, canary=canary_on)
    prompt = first_prompt(plan.readme)
    suffixes = () if plan.restored_suffixes is None else suffix_prompts(plan.restored_suffixes)
    options = replace(options, lane=plan.lane)
    if source is not None:
        options = replace(options, prefill_chunk_size=source.prefill_chunk)
        if prompt != source.prompts[0]:
            raise UsageError("--readme: the prompt differs from the source's first", field="--readme")
    probe = choose_probe(plan.canary, plan.canary_library, device=_device(options.device))
    with nullcontext() if probe is None else closing(probe), Canary(probe, receipts), receipts.ended():
        write_start(receipts, mode="chat" if plan.chat else plan.mode, lane=plan.lane, options=options)
        _write_prompt(receipts, prompt, source)
        receipts.enter("loading")
        receipts.note("reference_loading", model=options.model)

        def act(subject: Subject) -> None:
            write_loaded(receipts, subject)
            think = source is None or source.think
            ids = subject.encode_chat([{"role": "user", "content": prompt}], think=think)
            receipts.note("reference_encoded", token_ids=list(ids))
            _run_mode(plan, subject, ids, receipts, prompt=prompt, source=source, suffixes=suffixes)

        with _named_by_mode(plan):
            examine(options, act, progress=progress, stop=receipts.stop)


@contextmanager
def _named_by_mode(plan: Plan) -> Iterator[None]:
    """A lane that the checkpoint has not is told by the mode that was asked for: there is no --lane here."""
    try:
        yield
    except UsageError as error:
        if error.field != "--lane":
            raise
        flag = None if plan.mode == "forward" else f"--{plan.mode}"
        others = "--canvas runs it"
        if plan.lane == "canvas" or error.code == "no_draft_head":
            others = "--ar and --decode run it"
        why = str(error).partition(";")[0].replace("--lane ", "the lane ", 1)
        raise UsageError(f"{flag or 'a plain forward'}: {why}; {others}", code=error.code, field=flag) from None


def write_start(receipts: Receipts, *, mode: str, lane: str, options: EngineOptions) -> None:
    """The first receipt."""
    receipts.write(
        "receipt_start",
        **start_fields(
            engine=ENGINE,
            mode=mode,
            lane=lane,
            model=options.model,
            environment=describe_environment(),
            settings=options.settings(),
        ),
    )


def write_loaded(receipts: Receipts, subject: Subject) -> None:
    """What was loaded: the names of the weights and of the arithmetic."""
    about = subject.about
    names = ("identity", "revision", "device", "dtype", "quantisation", "parameters", "weight_bytes", "max_positions")
    receipts.write(
        "reference_loaded",
        model=about["model"],
        checkpoint_sha256=weights_sha256(subject.checkpoint),
        tokenizer=subject.tokenizer.identity,
        **{name: about[name] for name in names},
        products=about["products"],
        chunk_size=subject.chunk,
        load_seconds=subject.loaded.loaded.load_seconds,
    )


def _write_prompt(receipts: Receipts, prompt: str, source: SourceRun | None) -> None:
    if source is not None:
        receipts.write(
            "reference_request_policy",
            sustained_prefill=True,
            final_logits_only=True,
            prefill_chunk=source.prefill_chunk,
        )
    receipts.write("reference_prompt", text=prompt, sha256=hashlib.sha256(prompt.encode()).hexdigest())


def _run_mode(
    plan: Plan,
    subject: Subject,
    ids: Ids,
    receipts: Receipts,
    *,
    prompt: str,
    source: SourceRun | None,
    suffixes: tuple[str, ...],
) -> None:
    limit = plan.max_new_tokens
    if plan.server_defaults:
        overrides = {"settings": subject.options.settings(), "sampling": _shown(subject.recommended)}
        receipts.write("reference_environment", overrides=overrides)
    if plan.mode == "forward":
        run_forward(subject, ids, receipts, prompt=prompt)
    elif plan.mode == "decode":
        run_decode(subject, ids, receipts, prompt=prompt, limit=limit)
    elif plan.mode == "mtp":
        run_round(subject, ids, receipts, prompt=prompt)
    elif plan.mode == "mtp-prefill":
        run_mtp_prefill(subject, ids, receipts)
    else:
        sampling, seed = _sampling(plan, subject, source)
        if plan.mode == "canvas":
            run_canvas(subject, ids, receipts, seed=seed, limit=limit)
        elif plan.chat:
            depth = plan.drafts if plan.lane == "mtp" else None
            Chat(subject, receipts, prompt, sampling, seed, limit, depth, source, plan.token_events).run()
        elif plan.mode == "ar":
            run_ar(subject, ids, receipts, sampling=sampling, seed=seed, limit=limit)
        else:
            lane, served = generate_mtp(
                subject, ids, receipts,
                sampling=sampling, seed=seed, limit=limit, depth=plan.drafts, suffix_cases=len(suffixes),
            )  # fmt: skip
            if suffixes:
                restore = plan.snapshot_restore
                run_suffixes(subject, ids, lane, served, receipts, prompts=suffixes, snapshot_restore=restore)


def _sampling(plan: Plan, subject: Subject, source: SourceRun | None) -> tuple[SamplingParams, int]:
    """How tokens are drawn, and the seed: the source's, the server's, or the plan's."""
    chosen, seed = subject.recommended if plan.server_defaults else plan.sampling, plan.seed or 0
    if source is not None:
        chosen, seed = source.sampling, source.seed
    return replace(chosen, logprobs=LOGPROBS), seed


def _shown(sampling: SamplingParams) -> dict[str, Any]:
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")}


def _device(wanted: str) -> str:
    """Where the engine will run, before it is loaded."""
    require_mlx()
    import mlx.core as mx  # noqa: PLC0415

    return "gpu" if wanted != "cpu" and mx.is_available(mx.gpu) else "cpu"
