"""Chat: three complete turns through the real lane and its bank, on its own or as a source run had them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from polytoken.lanes.ar import ArLane
from polytoken.lanes.mtp.lane import MtpLane
from polytoken.lanes.mtp.settings import MtpSettings
from polytoken.oracle.failures import MismatchError
from polytoken.oracle.fingerprint import fingerprints
from polytoken.oracle.modes.ar import final_logits, sampling_fields
from polytoken.oracle.modes.mtp import cycle_fields, finish, head_drafter
from polytoken.oracle.modes.serving import Served, TakeIds, make_oracle_request, serve
from polytoken.oracle.plan import TokenEvents
from polytoken.oracle.prompts import FOLLOW_UPS
from polytoken.oracle.receipt import Receipts
from polytoken.oracle.source import TURNS, SourceRun, require
from polytoken.oracle.subject import Ids, Subject
from polytoken.oracle.turns import Turns, split_answer
from polytoken.request import SamplingParams

PREFILL_SCOPE: Final = "prompt_forwards_with_head_history_and_banking"
SESSION: Final = "oracle-chat"
_MIB: Final = 1 << 20


@dataclass(eq=False)
class Chat:
    """One conversation.

    Args:
        prompt: the first user turn.
        sampling, seed, limit: of every turn; None for the natural end. A source has its own.
        depth: drafts per window; None for the AR lane.
    """

    subject: Subject
    receipts: Receipts
    prompt: str
    sampling: SamplingParams
    seed: int
    limit: int | None
    depth: int | None
    source: SourceRun | None = None
    token_events: TokenEvents = "full"
    lane: ArLane | MtpLane = field(init=False)

    def __post_init__(self) -> None:
        bank = self.subject.options.prefix_cache_mib * _MIB
        if self.depth is None:
            self.lane = self.subject.ar_lane(cache_bytes=bank)
        else:
            self.lane = self.subject.mtp_lane(MtpSettings(depth=self.depth), cache_bytes=bank)
        self._turns = Turns(self.subject)
        # Clients of a server name no session: their source knows prompts alone.
        self.session = SESSION if self.source is None else None

    def run(self) -> None:
        """All turns. Raises MismatchError: `source_mismatch`, `no_natural_end`."""
        self._write_config()
        if self.source is not None:
            self._warm_up(self.source)
        messages: list[dict[str, Any]] = [{"role": "user", "content": self.prompt}]
        ids = self._encode(messages)
        follow_ups = FOLLOW_UPS if self.source is None else self.source.prompts[1:]
        for step in range(TURNS):
            served = self._turn(step, ids)
            if step == TURNS - 1:
                break
            if self.source is None:
                behind = served.tokens[-1]
                ids = (*ids, *served.tokens, *self._turns.suffix(follow_ups[step], behind=behind))
            else:  # as the client wrote it, and the server encoded it
                messages += [self._answer(self.source, step, served), {"role": "user", "content": follow_ups[step]}]
                ids = self._encode(messages)
        self.receipts.write("chat_end", turns=TURNS)

    # ----------------------------------------------------------------------------------------------------------------

    def _turn(self, step: int, ids: Ids) -> Served:
        room = self.subject.max_positions - len(ids)
        limit = self.limit if self.source is None else self.source.limit(len(ids))
        served = serve(
            self.lane,
            make_oracle_request(
                ids,
                name=f"turn-{step}",
                sampling=self.sampling,
                seed=self.seed,
                limit=limit,
                room=room,
                session=self.session,
            ),
            self.receipts,
            progress="chat_prefill_progress",
            take=self._report("chat_tokens", step=step),
        )
        natural = served.finish_reason == "stop"
        own_draws = self.source is None or "text" in self.source.held
        if not natural and self.limit is None and own_draws:
            raise MismatchError(
                f"turn {step} did not end by itself within {len(served.tokens)} tokens", code="no_natural_end"
            )
        final: dict[str, Any] = {"hidden": None}
        if isinstance(self.lane, MtpLane):
            final |= finish(self.lane, served)
        else:
            final["logits"] = final_logits(self.subject.model, served)
        mtp = isinstance(self.lane, MtpLane)
        decoding = max(served.elapsed_seconds - served.prefill_seconds, 1e-9)
        self.receipts.write(
            "chat_turn",
            step=step,
            prompt_ids=list(ids),
            tokens=served.tokens,
            top=served.top,
            text=self.subject.text(served.tokens),
            finish_reason=served.finish_reason,
            safe_to_commit=True,
            cached_tokens=served.row.cached_tokens,
            cache_miss=served.row.cache_miss,
            boundaries=self._boundaries(ids),
            **fingerprints(**final),
            cycles=[cycle_fields(cycle) for cycle in served.row.cycles] if mtp else [],
            history_offset=head_drafter(served.row).history.offset if mtp else None,
            prefill_seconds=served.prefill_seconds,
            elapsed_seconds=served.elapsed_seconds,
            prefill_scope=PREFILL_SCOPE,
            mtp_history_seconds=None,  # one graph with the prompt's
            decode_seconds=decoding,
            decode_tps=len(served.tokens) / decoding,
            prompt_state_seconds=served.prefill_seconds,
            restore_seconds=None,  # within the prefill's
        )
        if self.session is not None:
            self.lane.remember(served.row, served.tokens)
        self.lane.close(served.row, keep=True)
        if self.source is not None:
            self._match(self.source, step, ids, served)
        return served

    def _match(self, source: SourceRun, step: int, ids: Ids, served: Served) -> None:
        reasoning, content = self._split(served)
        checks, differences = source.check_turn(
            step,
            prompt_tokens=len(ids),
            cached_tokens=served.row.cached_tokens,
            completion_tokens=self._completion_count(served),
            text=content if reasoning is None else f"{reasoning}</think>{content}",
        )
        self.receipts.write("chat_source_match", step=step, checks=checks, differences=differences)
        require(checks, f"turn {step + 1}", differences)

    def _warm_up(self, source: SourceRun) -> None:
        """What the source's server did before the first turn."""
        bootstrap = self._bootstrap(source) if source.bootstrap else ()
        ids = self._encode([{"role": "user", "content": source.warmup["prompt"]}])
        served = serve(
            self.lane,
            make_oracle_request(
                ids,
                name="warmup",
                sampling=self.sampling,
                seed=self.seed,
                limit=source.warmup["max_generated_tokens"],
                room=self.subject.max_positions - len(ids),
            ),
            self.receipts,
            progress="chat_prefill_progress",
            take=self._report("chat_warmup_tokens"),
        )
        cached = served.row.cached_tokens
        self.receipts.write(
            "chat_warmup",
            tokens=served.tokens,
            text=self.subject.text(served.tokens),
            finish_reason=served.finish_reason,
            bootstrap_ids=list(bootstrap),
            cached_tokens=cached,
        )
        self.lane.close(served.row, keep=True)
        expected = source.warmup_result
        told = expected.get("tokens", {}).get("cached")
        checks = {
            "cached_tokens": cached
            == (len(bootstrap) // self.subject.chunk * self.subject.chunk if told is None else told),
            "finish_reason": served.finish_reason == expected["finish_reason"],
            "completion_tokens": self._completion_count(served) == expected["completion_tokens"],
        }
        held = (*source.held, *(["finish_reason"] if "text" in source.held else []))
        require({name: holds for name, holds in checks.items() if name in held}, "the warm-up")

    def _bootstrap(self, source: SourceRun) -> Ids:
        """Encode and bank what the template writes before every first user turn; its ids."""
        first = self._encode([{"role": "user", "content": source.prompts[0]}])
        other = self._encode([{"role": "user", "content": source.warmup["prompt"]}])
        shared = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), 0)
        ids = first[:shared]
        if ids:
            request = make_oracle_request(ids, name="bootstrap", sampling=SamplingParams(), seed=0, limit=1, room=1)
            row: Any = self.lane.open(request, ids)
            while not self.lane.prefill_step(row):
                pass
            self.lane.close(row, keep=True)
        return ids

    def _write_config(self) -> None:
        self.receipts.write(
            "chat_config",
            mtp=self.depth is not None,
            turns=TURNS,
            token_events=self.token_events,
            **sampling_fields(self.sampling, self.seed),
            warmup=None if self.source is None else dict(self.source.warmup),
            depth=self.depth,
            stops=sorted(self.subject.eos_ids),
            lazy_kv=False,  # snapshots are copies of their own
            chunk_size=self.subject.chunk,
            sustained_prefill=True,
            final_only=True,
            fused_max=None,
            store_on_prefill=True,
            store_min_suffix=1,
            boundary_capture=True,
            boundary_tail=self.subject.chunk,
            boundary_max=None,
        )

    def _boundaries(self, ids: Ids) -> list[int]:
        """Lengths of this prompt's prefixes that a later prompt can be restored from."""
        lengths: set[int] = set()
        for entry in self.lane.bank.entries():
            ends = {*entry.marks, *([len(entry.ids)] if entry.restorable else [])}
            lengths |= {end for end in ends if end <= len(ids) and entry.ids[:end] == ids[:end]}
        return sorted(lengths)

    def _encode(self, messages: list[dict[str, Any]]) -> Ids:
        return self.subject.encode_chat(messages, think=self.source is None or self.source.think)

    def _answer(self, source: SourceRun, step: int, served: Served) -> dict[str, Any]:
        """The assistant's message, as the client of the source sends it back."""
        own = "text" in source.held
        return {"role": "assistant", "content": self._split(served)[1] if own else source.turns[step].content}

    def _split(self, served: Served) -> tuple[str | None, str]:
        return split_answer(self.subject.visible(served.tokens), opened=self._turns.opens_reasoning)

    def _completion_count(self, served: Served) -> int:
        """Tokens of an answer, as the source's server counts them."""
        if self.source is not None and self.source.counts_end:
            return len(served.tokens)
        return sum(token not in self.subject.eos_ids for token in served.tokens)

    def _report(self, event: str, **fields: Any) -> TakeIds:
        if self.token_events == "full":
            return lambda ids: self.receipts.note(event, ids=list(ids), **fields)
        return ProgressReport(
            lambda total: self.receipts.note("chat_decode_progress", scope=event, tokens=total, **fields)
        )


class ProgressReport:
    """Passes on a running total at most once a second, and only when tokens came."""

    def __init__(self, tell: Callable[[int], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._tell, self._clock = tell, clock
        self._total = 0
        self._last: float | None = None

    def __call__(self, ids: tuple[int, ...]) -> None:
        if not ids:
            return
        self._total += len(ids)
        now = self._clock()
        if self._last is None or now - self._last >= 1.0:
            self._last = now
            self._tell(self._total)
