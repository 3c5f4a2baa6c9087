"""`polytoken chat`: a conversation, streamed. Lines on standard input are turns, so it can be scripted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polytoken.cli import lane_flags
from polytoken.cli import options as flags
from polytoken.cli.chat_files import (
    conversation_file,
    conversations_folder,
    read_conversation,
    write_conversation,
)
from polytoken.cli.conversation import Conversation, Leave
from polytoken.cli.interrupts import Terminated
from polytoken.cli.loading import load_engine
from polytoken.cli.output import describe_result, describe_runtime, report_dropped_head
from polytoken.cli.streams import standard_input
from polytoken.cli.terminal import Screen, open_screen
from polytoken.errors import EXIT_FAILURE, EXIT_OK, PolytokenError, UsageError
from polytoken.events import GenerationFailed, GenerationResult, RequestRejected, RequestStarted, Token
from polytoken.request import RequestDefaults, SamplingParams

if TYPE_CHECKING:
    from polytoken.engine import Engine


def chat(
    *,
    model: flags.Model = flags.HERE,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System prompt.")] = None,
    max_new_tokens: flags.MaxNewTokens = None,
    stop: flags.Stop = None,
    think: flags.Think = "true",
    session: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Keep the conversation under this name, and go on with it if it exists (in --session-dir, else in the "
            "user's cache folder).",
            show_default=False,
        ),
    ] = None,
    reasoning: Annotated[
        bool | None,
        typer.Option(
            "--show-reasoning/--hide-reasoning",
            help="Whether the model's reasoning is shown (default: dimmed on a terminal, not at all on a pipe).",
            show_default=False,
        ),
    ] = None,
    verbose: flags.Verbose = False,
    seed: flags.Seed = 42,
    temperature: flags.Temperature = None,
    top_k: flags.TopK = None,
    top_p: flags.TopP = None,
    min_p: flags.MinP = None,
    repetition_penalty: flags.RepetitionPenalty = None,
    presence_penalty: flags.PresencePenalty = None,
    frequency_penalty: flags.FrequencyPenalty = None,
    logit_bias: flags.LogitBias = None,
    lane: flags.Lane = "auto",
    dtype: flags.Dtype = "auto",
    dequantise: flags.Dequantise = None,
    products: flags.Products = "exact",
    threads: flags.Threads = 1,
    device: flags.Device = "auto",
    revision: flags.Revision = None,
    offline: flags.Offline = False,
    store: flags.Store = None,
    prefill_chunk_size: flags.PrefillChunkSize = 64,
    prefix_cache_mib: flags.PrefixCacheMib = 512,
    session_cache_mib: flags.SessionCacheMib = None,
    prefix_reuse: flags.PrefixReuse = "exact",
    session_dir: flags.SessionDir = None,
    session_disk_mib: flags.SessionDiskMib = None,
    depth: lane_flags.Depth = None,
    depth_policy: lane_flags.DepthPolicy = None,
    drafter: lane_flags.Drafter = None,
    draft_model: lane_flags.DraftModel = None,
    history_window: lane_flags.HistoryWindow = None,
    lookup_gram: lane_flags.LookupGram = None,
    lookup_longest: lane_flags.LookupLongest = None,
    policy: lane_flags.Policy = None,
    canvas_length: lane_flags.CanvasLength = None,
    pipeline_depth: lane_flags.PipelineDepth = None,
    max_batch_tokens: lane_flags.MaxBatchTokens = None,
    vocab_chunk_size: lane_flags.VocabChunkSize = None,
    max_denoising_steps: lane_flags.MaxDenoisingSteps = None,
    commit_failure_budget: lane_flags.CommitFailureBudget = None,
    commit_top_k: lane_flags.CommitTopK = None,
    commit_min_p: lane_flags.CommitMinP = None,
    commit_target_confidence: lane_flags.CommitTargetConfidence = None,
) -> None:
    """Talk with a model. /help lists the commands."""
    # The history is sent again with every turn and reused in whole chunks: small ones leave less to compute again.
    members = flags.sampling_members(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty, frequency_penalty=frequency_penalty, logit_bias=logit_bias,
    )  # fmt: skip

    def defaults(recommended: SamplingParams) -> RequestDefaults:
        return flags.request_defaults(
            members, recommended=recommended, max_new_tokens=max_new_tokens, seed=seed,
            think=flags.parse_switch(think), stop=stop, ignore_eos=False,
        )  # fmt: skip

    special = lane_flags.LaneFlags(
        depth=depth, depth_policy=depth_policy, drafter=drafter, draft_model=draft_model,
        history_window=history_window, lookup_gram=lookup_gram, lookup_longest=lookup_longest, policy=policy,
        canvas_length=canvas_length, pipeline_depth=pipeline_depth, max_batch_tokens=max_batch_tokens,
        vocab_chunk_size=vocab_chunk_size, max_denoising_steps=max_denoising_steps,
        commit_failure_budget=commit_failure_budget, commit_top_k=commit_top_k, commit_min_p=commit_min_p,
        commit_target_confidence=commit_target_confidence,
    )  # fmt: skip

    defaults(SamplingParams())  # what is wrong is told before the model is loaded
    standard_input()
    flags.check_revision(model, revision)
    chosen_lane = special.engine_options(lane)
    conversation = _open_conversation(
        defaults(SamplingParams()), system=system, session=session, session_dir=session_dir
    )

    flags.require_backend()
    from polytoken.assembly import EngineOptions  # noqa: PLC0415

    engine_options = EngineOptions(
        model=model, lane=lane, dtype=dtype, dequantise=dequantise, products=products, threads=threads, device=device,
        revision=revision, offline=offline, store=store, batch_size=1, prefill_chunk_size=prefill_chunk_size,
        prefix_cache_mib=prefix_cache_mib, session_cache_mib=session_cache_mib, prefix_reuse=prefix_reuse,
        session_dir=session_dir, session_disk_mib=session_disk_mib, **chosen_lane,
    )  # fmt: skip
    with load_engine(engine_options, verbose=verbose) as engine:
        special.check_loaded(engine.loaded, members)
        flags.check_vocabulary(engine, members)
        report_dropped_head(engine.loaded)
        screen = open_screen(verbose=verbose, reasoning=reasoning)
        screen.note(describe_runtime(engine.loaded))
        conversation.defaults = defaults(engine.sampling)
        _resume(engine, conversation, screen)
        failed = _talk(engine, conversation, screen)
    raise typer.Exit(EXIT_FAILURE if failed else EXIT_OK)


def _talk(engine: Engine, conversation: Conversation, screen: Screen) -> bool:
    """Turn after turn until the user leaves; whether any turn failed."""
    failed = False
    while True:
        try:
            line = _read_turn(screen)
        except Terminated:
            raise
        except KeyboardInterrupt:  # at the prompt: the line is dropped, as in a shell
            screen.note("\n(Ctrl-D or /exit leaves)")
            continue
        if line is None:
            return failed
        if not line.strip():
            continue
        try:
            if line.strip() == "/retry":
                _answer_again(engine, conversation, conversation.last_question, screen)
            elif line.startswith("/"):
                screen.tell(conversation.command(line))
            else:
                conversation.tries = 0
                _answer(engine, conversation, line, screen)
            _keep(engine, conversation)
        except Leave:
            return failed
        except PolytokenError as error:
            failed = True
            hint = "; /reset forgets the conversation" if error.code == "too_long" else ""
            screen.complain(f"{error}{hint}")


def _read_turn(screen: Screen) -> str | None:
    """One turn; lines that end with a backslash go on."""
    lines: list[str] = []
    while True:
        line = screen.read_line(more=bool(lines))
        if line is None:
            return "\n".join(lines) if lines else None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _answer(engine: Engine, conversation: Conversation, question: str, screen: Screen) -> None:
    """Ask, show the answer as it comes, and keep the turn. Ctrl-C stops the answer and keeps what was said.

    Raises:
        PolytokenError: there is no answer; the turn is forgotten.
    """
    said: list[str] = []
    result: GenerationResult | None = None
    events = engine.stream(conversation.ask(question), token_events=True)
    try:
        for event in events:
            if isinstance(event, Token):
                screen.answer(event.reasoning_delta or "", reasoning=True)
                screen.answer(event.content_delta or "", reasoning=False)
                said.append(event.content_delta or "")
            elif isinstance(event, GenerationResult):
                result = event
            elif isinstance(event, RequestStarted) and event.history_miss and conversation.turns:
                screen.note(f"the history goes on from an earlier turn: {event.history_miss}")
            elif isinstance(event, (GenerationFailed, RequestRejected)):
                raise PolytokenError(event.error, code=event.code)
    except KeyboardInterrupt as interrupt:
        events.close()  # type: ignore[attr-defined]  # a generator: this cancels the request
        if isinstance(interrupt, Terminated):
            screen.end_answer()
            raise
    except PolytokenError:
        screen.end_answer()
        raise
    screen.end_answer()
    conversation.answered(question, "".join(said).strip())
    if result is None:
        screen.note("(stopped)")
        return
    conversation.totals.add(result)
    screen.note(describe_result(result, canvas_length=engine.loaded.extra.get("canvas_length")))


def _answer_again(engine: Engine, conversation: Conversation, question: str, screen: Screen) -> None:
    """Answer the last question once more; if that fails, the answer that was there stays."""
    before = conversation.turns[-2:]
    del conversation.turns[-2:]
    tries = conversation.tries = conversation.tries + 1
    try:
        _answer(engine, conversation, question, screen)
    except PolytokenError:
        conversation.turns += before
        raise
    conversation.tries = tries


def _resume(engine: Engine, conversation: Conversation, screen: Screen) -> None:
    """Go on with the conversation of this name, if there is one, and where it fits from its committed ids."""
    path = conversation.path
    if path is None or not path.exists():
        return
    saved = read_conversation(path)
    system = conversation.system
    conversation.resume(saved)
    if system is not None:  # the flag counts
        conversation.system = system
    screen.note(f"{len(saved.turns)} messages resumed from {path}")
    if saved.stream is None or saved.model != engine.loaded.extra.get("identity"):
        return
    from polytoken.text.committed import CommittedStream  # noqa: PLC0415

    try:
        stream = CommittedStream.from_record(saved.stream)
    except ValueError:
        return  # the words are what counts; their ids are made anew
    engine.call(lambda loaded: loaded.histories.put(conversation.session, stream))


def _keep(engine: Engine, conversation: Conversation) -> None:
    """Save a named conversation as it now stands."""
    if conversation.path is None:
        return
    stream = engine.call(lambda loaded: loaded.histories.get(conversation.session))
    model = str(engine.loaded.extra.get("identity") or "")
    saved = replace(conversation.saved(), model=model, stream=None if stream is None else stream.to_record())
    write_conversation(conversation.path, saved)


def _open_conversation(
    defaults: RequestDefaults, *, system: str | None, session: str | None, session_dir: Path | None
) -> Conversation:
    """A conversation, with a file of its own if it has a name."""
    conversation = Conversation(defaults, system=system, folder=conversations_folder(session_dir))
    if session is not None:
        conversation.session, conversation.path = session, conversation_file(session, session_dir)
        try:
            conversation.path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            folder = conversation.path.parent
            raise UsageError(f"--session: cannot make {folder}: {error.strerror or error}", field="--session") from None
    return conversation
