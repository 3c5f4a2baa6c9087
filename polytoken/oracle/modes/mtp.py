"""MTP: the lane's prefill with its head's history, and an answer to its natural end, window by window."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import numpy as np

from polytoken.lanes.mtp.head import HeadDrafter
from polytoken.lanes.mtp.lane import MtpLane, usable_head
from polytoken.lanes.mtp.row import Cycle, MtpRow
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.models.draft import DraftingModel
from polytoken.oracle.digests import describe_rows, fingerprint
from polytoken.oracle.fingerprint import fetch, fingerprints
from polytoken.oracle.modes.ar import sampling_fields
from polytoken.oracle.modes.serving import Served, make_oracle_request, prefill, serve
from polytoken.oracle.plan import PREFILL_WINDOWS
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject
from polytoken.request import SamplingParams


def run_mtp_prefill(subject: Subject, ids: Ids, receipts: Receipts) -> None:
    """The mode `mtp-prefill`: with the whole history and with a window of it, and the first draft on each."""
    for window in PREFILL_WINDOWS:
        lane = subject.mtp_lane(MtpSettings(history_window=window))
        request = make_oracle_request(ids, sampling=SamplingParams(), seed=0, limit=1, room=1)
        receipts.enter("prefill")
        start = time.perf_counter()
        row = lane.open(request, ids)
        prefill(lane, row, len(ids), receipts, progress="mtp_prefill_progress")
        seconds = time.perf_counter() - start
        drafter = head_drafter(row)
        hidden, logits, offset = last_row(row), row.prefill.logits, drafter.history.offset
        receipts.enter("decode")
        assert logits is not None
        token = int(np.array(mx.argmax(logits[0])))
        drafted, draft_hidden = subject.head.draft(hidden, mx.array([[token]], dtype=mx.int32), drafter.history)
        found = fetch({"logits": logits, "hidden": hidden, "draft_logits": drafted[0], "draft_hidden": draft_hidden})
        rows = found["draft_logits"]
        assert rows is not None
        receipts.write(
            "mtp_prefill_reference",
            token_ids=list(ids),
            window=window,
            chunk_size=subject.chunk,
            final_only=True,
            **{name: fingerprint(values) for name, values in found.items()},
            offset=offset,
            base=0 if window is None else max(len(ids) - 1 - window, 0),
            target_seconds=seconds,
            history_seconds=None,  # both are one graph here
            token=token,
            draft_offset=drafter.history.offset,
            **describe_rows(rows),
        )
    receipts.write("mtp_prefill_reference_end")


def generate_mtp(
    subject: Subject,
    ids: Ids,
    receipts: Receipts,
    *,
    sampling: SamplingParams,
    seed: int,
    limit: int | None,
    depth: int,
    suffix_cases: int,
) -> tuple[MtpLane, Served]:
    """The mode `mtp-generate`: the lane and the served request, whose state may be gone on from."""
    lane = subject.mtp_lane(MtpSettings(depth=depth))
    receipts.write(
        "mtp_generation_input",
        token_ids=list(ids),
        **sampling_fields(sampling, seed),
        depth=depth,
        stops=sorted(subject.eos_ids),
        history="committed",
        restored_suffix_cases=suffix_cases,
        chunk_size=subject.chunk,
        final_only=True,
    )
    served = serve(
        lane,
        make_oracle_request(ids, sampling=sampling, seed=seed, limit=limit, room=subject.max_positions - len(ids)),
        receipts,
        progress="mtp_prefill_progress",
        take=lambda new: receipts.note("mtp_tokens", ids=list(new)),
    )
    final = finish(lane, served)
    tally = served.row.tally
    receipts.write(
        "mtp_generation_end",
        tokens=served.tokens,
        top=served.top,
        text=subject.text(served.tokens),
        cycles=[cycle_fields(cycle) for cycle in served.row.cycles],
        raw_cycles=[raw_cycle(cycle) for cycle in served.row.cycles],
        finish_reason=served.finish_reason,
        stop_reason=served.reason,
        safe_to_commit=True,
        **fingerprints(**final),
        history_offset=head_drafter(served.row).history.offset,
        verify_calls=tally.cycles,
        accepted=tally.accepted_drafts,
        drafted=tally.drafted_tokens,
        forwards=served.forwards,
        elapsed_seconds=served.elapsed_seconds,
        prefill_seconds=served.prefill_seconds,
    )
    return lane, served


def finish(lane: MtpLane, served: Served) -> dict[str, mx.array]:
    """Bring the row's state to prompt and tokens; `logits` [1, V] and `hidden` [1, 1, W] of its last token."""
    lane.finish(served.row)
    hidden = last_row(served.row)
    model, rows = lane.model, hidden
    if usable_head(model).settings.base_hidden_variant == "pre":
        assert isinstance(model, DraftingModel)  # it has a head
        rows = model.post_norm(hidden)
    return {"logits": model.project(rows[:, -1]), "hidden": hidden}


def head_drafter(row: MtpRow) -> HeadDrafter:
    """The row's drafter, which is the network's head."""
    assert isinstance(row.drafter, HeadDrafter)
    return row.drafter


def last_row(row: MtpRow) -> mx.array:
    """The hidden row [1, 1, W] of the last token, with all committed pairs in the history."""
    return head_drafter(row).settle()[-1]


def cycle_fields(cycle: Cycle) -> dict[str, Any]:
    """A window in the words of the receipts."""
    fields: dict[str, Any] = {
        "primary": cycle.primary,
        "primary_already_emitted": True,
        "drafts": list(cycle.drafts),
        "accepted": cycle.accepted,
        "correction": cycle.token if cycle.origin == "correction" else None,
        "bonus": cycle.token if cycle.origin == "bonus" else None,
        "capture_committed": cycle.commit_route == "prefix",
    }
    if cycle.source == "lookup":
        fields["context_copy"] = {"drafts": len(cycle.drafts)}
    return fields


def raw_cycle(cycle: Cycle) -> dict[str, Any]:
    """Everything the lane recorded of a window."""
    names = (
        *("step", "source", "requested_depth", "origin", "stop_reason", "stop_origin", "verify_width", "commit_route"),
        *("draft_seconds", "verify_seconds", "accept_seconds"),
    )
    return {name: getattr(cycle, name) for name in names} | {"accept_probabilities": list(cycle.accept_probabilities)}
