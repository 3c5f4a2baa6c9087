"""The Python interface: load a model once, then ask it for answers.

import polytoken

with polytoken.load("smollm2-135m") as engine:
    print(polytoken.generate(engine, "What is the capital of France?").text)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polytoken.assembly import EngineOptions, Warn, load_lane, log_warning
from polytoken.backend import require_mlx
from polytoken.checkpoint.progress import Progress, silent
from polytoken.engine import Engine, LoadedLane, error_of
from polytoken.errors import RequestError
from polytoken.events import GenerationFailed, GenerationResult, RequestRejected, Token
from polytoken.lanes.base import PrefillObserver
from polytoken.lanes.canvas.settings import CanvasSettings
from polytoken.request import (
    Request,
    RequestDefaults,
    SamplingParams,
    derive_seed,
    parse_record,
    parse_sampling,
    parse_stop,
    parse_tools,
)

_counter = itertools.count(1)


def open_engine(options: EngineOptions, *, progress: Progress = silent, warn: Warn | None = None) -> Engine:
    """Load the model on the engine's own thread and return the engine, running.

    `warn` is told in one line, on any thread, of what goes wrong without failing anything; None logs it.

    Raises:
        PolytokenError: what is wrong with the options, the checkpoint or the backend.
    """
    require_mlx()
    engine = Engine(
        lambda: load_lane(options, progress, warn or log_warning), options.limits(), token_events=options.token_events
    )
    engine.start()
    return engine


def load(model: str | Path, **options: Any) -> Engine:
    """A running engine for a model; see `EngineOptions` for the keywords. Close it, or use it in a `with`."""
    return open_engine(EngineOptions(model=str(model), **options))


def load_model(model: str | Path, *, canvas_length: int | None = None) -> Engine:
    """An engine for a script that asks one question at a time: one row, no stored prompts, no token events.

    Args:
        model: what to load.
        canvas_length: ids denoised together, for a canvas model; None for what the checkpoint says.
    """
    canvas = CanvasSettings(
        canvas_length=canvas_length,
        pipeline_depth=1,
        repetition_penalty=1.0,
        max_batch_tokens=max(CanvasSettings.max_batch_tokens, canvas_length or 0),
    )
    return load(model, canvas=canvas, batch_size=1, prefix_cache_mib=0, token_events=False)


def make_request(
    engine: Engine,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    token_ids: Sequence[int] | None = None,
    raw: bool = False,
    max_new_tokens: int | None = None,
    max_denoising_steps: int | None = None,
    seed: int | None = None,
    think: bool = True,
    sampling: SamplingParams | Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = None,
    ignore_eos: bool = False,
    tools: Sequence[Mapping[str, Any]] | None = None,
    session: str | None = None,
    request_id: str | None = None,
) -> Request:
    """A request for this engine, from exactly one of `prompt`, `messages` and `token_ids`.

    Args:
        prompt: one user turn, or with `raw` text that is encoded as it stands.
        messages: chat turns with `role` and `content`.
        token_ids: prompt ids that are used as they stand.
        max_new_tokens: None for up to 8192, as far as the context has room.
        max_denoising_steps: of a canvas model; None for what the checkpoint says.
        seed: None derives one from the request id.
        think: whether the template is asked for a reasoning block.
        sampling: None for what the checkpoint recommends, also for what a mapping of single values leaves out.
        stop: one string or several.
        tools: what the model may call, in the form of the OpenAI API; the result's `tool_calls` are what it called.
        session: name of the conversation that this is the next turn of. Send all messages again, the answers as they
            were told: as long as they extend what the session has committed, only what is new is computed, also where
            the template would render old turns otherwise.
        request_id: None for a fresh one.

    Raises:
        RequestError: `prompt_xor_messages`, `bad_limit`, `bad_seed`, `bad_request_id`, `bad_prompt`,
            `bad_messages`, `bad_think`, `bad_sampling`, `bad_stop`.
    """
    if sum(item is not None for item in (prompt, messages, token_ids)) != 1:
        raise RequestError(
            "give exactly one of prompt, messages and token_ids", code="prompt_xor_messages", field="prompt"
        )
    defaults = RequestDefaults()
    request_id = f"python-{next(_counter)}" if request_id is None else request_id
    checked: dict[str, Any] = {"request_id": request_id}
    if messages is not None:
        checked["messages"] = _listed(messages, list)
    else:
        checked["prompt"] = prompt if token_ids is None else ""
    turns = parse_record(checked, defaults).messages  # the same checks and codes as for a record
    return Request(
        request_id=request_id,
        max_new_tokens=defaults.max_new_tokens if max_new_tokens is None else max_new_tokens,
        limit_is_default=max_new_tokens is None,
        max_denoising_steps=max_denoising_steps,
        messages=None if (raw and messages is None) or token_ids is not None else turns,
        raw_prompt=prompt if raw else None,
        token_ids=None if token_ids is None else _listed(token_ids, tuple),
        seed=derive_seed(defaults.seed, request_id) if seed is None else seed,
        think=think,
        sampling=sampling if isinstance(sampling, SamplingParams) else parse_sampling(sampling, engine.sampling),
        stop=parse_stop(stop, defaults.stop),
        ignore_eos=ignore_eos,
        tools=parse_tools(tools),
        session=session,
    )


def watch_prefill(engine: Engine, observer: PrefillObserver | None) -> None:
    """Have `observer(request_id, tokens_done, tokens_of_the_prompt)` told after every chunk of any prompt.

    It is called on the thread that computes and must be quick; None ends it. One that raises is dropped.
    """

    def put(loaded: LoadedLane) -> None:
        loaded.lane.prefill_observer = observer

    engine.call(put)


def _listed(value: Any, kind: type[list[Any]] | type[tuple[Any, ...]]) -> Any:
    """Any iterable as this kind; what is none stays as it is, for the checks to refuse."""
    return kind(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def generate(
    engine: Engine,
    prompt: str | None = None,
    *,
    messages: Sequence[Mapping[str, Any]] | None = None,
    max_new_tokens: int | None = 256,
    max_denoising_steps: int | None = None,
    seed: int | None = 42,
    think: bool = True,
    **request: Any,
) -> GenerationResult:
    """The whole answer to one request; the result reads like a record and like a dict.

    Args:
        engine: from `load` or `load_model`.
        request: further keywords of `make_request`, where all are explained.

    Raises:
        PolytokenError: what is wrong with the request, or what went wrong while it ran.
    """
    made = make_request(
        engine,
        prompt,
        messages=messages,
        max_new_tokens=max_new_tokens,
        max_denoising_steps=max_denoising_steps,
        seed=seed,
        think=think,
        **request,
    )
    return engine.generate(made)


def stream(
    engine: Engine,
    prompt: str | None = None,
    *,
    max_new_tokens: int | None = 256,
    seed: int | None = 42,
    **request: Any,
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Pairs (new text, new ids) as they are committed; keywords as in `generate`.

    Leaving the iterator early cancels the request. Raises PolytokenError if the request fails.
    """
    made = make_request(engine, prompt, max_new_tokens=max_new_tokens, seed=seed, **request)
    for event in engine.stream(made, token_events=True):
        if isinstance(event, Token):
            yield event.delta, event.token_ids
        elif isinstance(event, (GenerationFailed, RequestRejected)):
            raise error_of(event)


def chat(engine: Engine, messages: Sequence[Mapping[str, Any]], **request: Any) -> GenerationResult:
    """The next turn of a conversation; the same as `generate(engine, messages=...)`."""
    return generate(engine, messages=messages, **request)
