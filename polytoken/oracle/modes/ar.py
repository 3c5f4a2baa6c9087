"""AR: the lane's own prefill, then an answer to its natural end."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx

from polytoken.lanes.ar import ArRow
from polytoken.models.base import CausalModel
from polytoken.oracle.fingerprint import fingerprints
from polytoken.oracle.modes.serving import Served, make_oracle_request, serve
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.subject import Ids, Subject
from polytoken.request import SamplingParams


def run_ar(
    subject: Subject, ids: Ids, receipts: Receipts, *, sampling: SamplingParams, seed: int, limit: int | None
) -> None:
    """The mode `ar`."""
    request = make_oracle_request(ids, sampling=sampling, seed=seed, limit=limit, room=subject.max_positions - len(ids))
    _prefill_reference(subject, ids, receipts)
    served = serve(
        subject.ar_lane(),
        request,
        receipts,
        progress="ar_prefill_progress",
        take=lambda new: receipts.note("ar_token", ids=list(new)),
    )
    receipts.write(
        "ar_reference_end",
        tokens=served.tokens,
        top=served.top,
        text=subject.text(served.tokens),
        finish_reason=served.finish_reason,
        stop_reason=served.reason,
        stops=sorted(subject.eos_ids),
        **sampling_fields(sampling, seed),
        verify_calls=0,
        forwards=served.forwards,
        elapsed_seconds=served.elapsed_seconds,
        prompt_seconds=served.prefill_seconds,
        final_logits=fingerprints(final_logits=final_logits(subject.model, served))["final_logits"],
    )


def final_logits(model: CausalModel, served: Served) -> mx.array:
    """Logits [1, V] after the whole answer: its last token, which nobody needed, is forwarded."""
    row: ArRow = served.row
    total = [*row.prefill.ids, *served.tokens]
    pending = total[row.cache.offset :]
    hidden = model.forward(mx.array([pending], dtype=mx.int32), row.cache, keep=1)
    return model.project(hidden.post[:, -1])


def sampling_fields(sampling: SamplingParams, seed: int) -> dict[str, Any]:
    """How tokens are drawn, as receipts name it."""
    return {
        "seed": seed,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
    }


def _prefill_reference(subject: Subject, ids: Ids, receipts: Receipts) -> None:
    lane = subject.ar_lane()
    request = make_oracle_request(ids, sampling=SamplingParams(), seed=0, limit=1, room=1)
    receipts.enter("prefill")
    start = time.perf_counter()
    row = lane.open(request, ids)
    chunks = 1
    while not lane.prefill_step(row):
        chunks += 1
    receipts.write(
        "ar_prefill_reference",
        token_ids=list(ids),
        logits=fingerprints(logits=row.prefill.logits)["logits"],
        hidden=False,
        seconds=time.perf_counter() - start,
        chunks=chunks,
        chunk_size=subject.chunk,
        final_logits_only=True,
    )
