"""From a client's sampling fields to the engine's requests."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final
from urllib.parse import quote

from polytoken.errors import PolytokenError
from polytoken.request import Request, RequestDefaults, SamplingParams, derive_seed, parse_sampling, parse_stop
from polytoken.server.errors import SHOWN, bad_request, from_engine, unsupported
from polytoken.server.pool import Model
from polytoken.server.prompt import Prompt
from polytoken.server.records import Record, Sampled

_SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
)
_LAW: Final = ("temperature", "top_p", "top_k", "min_p")  # of drawing: a canvas has one of its own
_CHAT_ALONE: Final = ("n", "messages", "logprobs", "top_logprobs", "polytoken")
_SEED_BITS: Final = 53  # of drawn seeds: every reader of JSON gives them back exactly
MAX_SESSION_NAME: Final = 200  # characters
SESSION_HEADERS: Final = ("x-session-id", "x-polytoken-session-id")


def new_id(prefix: str) -> str:
    """A fresh id such as chatcmpl-..."""
    return prefix + secrets.token_hex(12)


def answer_headers(answer_id: str, body: Sampled, model: Model) -> dict[str, str]:
    """Headers of a good answer: its id, and which members of the body had no effect."""
    idle = [name for name in _LAW if model.lane == "canvas" and getattr(body, name) is not None]
    ignored = ",".join(quote(name[:SHOWN], safe="") for name in sorted([*body.ignored(), *idle])[:20])
    return {"x-request-id": answer_id, **({"x-polytoken-ignored": ignored} if ignored else {})}


def handed_on(body: Record) -> dict[str, Any]:
    """What other endpoints give to the chat as it stands: the members that their own form does not have.

    Raises:
        ApiError: 400 for one whose effect their answers cannot show.
    """
    extra = dict(body.model_extra or {})
    for name in _CHAT_ALONE:
        if extra.get(name) and not (name == "n" and extra[name] == 1):
            raise unsupported(f"{name} is not supported here; chat completions have it", param=name)
    return extra


def sampling_of(model: Model, body: Sampled, *, logprobs: int | None) -> SamplingParams:
    """What the client asks for, over what the checkpoint recommends.

    Raises:
        ApiError: 400, naming the field.
    """
    given = {name: getattr(body, name) for name in _SAMPLING}
    if given["temperature"] is not None:
        given["temperature"] = float(given["temperature"])
    try:
        wanted = parse_sampling({**given, "logprobs": logprobs}, model.engine.sampling)
        if model.lane != "canvas":
            return wanted
        # Clients send a temperature with everything. Here it has no effect, as `answer_headers` says.
        return replace(wanted, **{name: getattr(model.engine.sampling, name) for name in _LAW})
    except PolytokenError as error:
        raise from_engine(error) from None


def requests_of(
    model: Model,
    body: Sampled,
    prompts: Sequence[Prompt],
    *,
    answer_id: str,
    limit: int | None,
    cap: int | None,
    logprobs: int | None,
    session: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> list[Request]:
    """One request for every choice of every prompt. Choice 0 has the client's seed, so `n` does not change it.

    Args:
        answer_id: the engine's ids of the requests begin with it.
        limit: most new tokens that the client wants.
        cap: most that the server gives.
        session: name of the conversation, whose state is kept for its next turn.
        extra: further fields of `Request`.

    Raises:
        ApiError: 400, naming the field.
    """
    sampling = sampling_of(model, body, logprobs=logprobs)
    seed = secrets.randbits(_SEED_BITS) if body.seed is None else body.seed
    wanted = RequestDefaults.max_new_tokens if limit is None else limit
    try:
        stop = parse_stop(body.stop, ())
        return [
            Request(
                request_id=f"{answer_id}-{place * (body.n or 1) + choice}",
                **_source(prompt, session if body.n in (None, 1) else None),
                max_new_tokens=wanted if cap is None else min(wanted, cap),
                limit_is_default=True,  # a limit beyond the context means: as far as it goes
                max_denoising_steps=body.max_denoising_steps,
                seed=seed if choice == 0 else derive_seed(seed, f"choice {choice}"),
                sampling=sampling,
                stop=stop,
                **(extra or {}),
            )
            for place, prompt in enumerate(prompts)
            for choice in range(body.n or 1)
        ]
    except PolytokenError as error:
        raise from_engine(error) from None


def _source(prompt: Prompt, session: str | None) -> dict[str, Any]:
    """What the prompt is made from: the turns of a session, so that it goes on from committed ids, else ids."""
    if session is None or prompt.turns is None:
        return {"token_ids": prompt.ids, "session": session}
    return {"messages": prompt.turns, "session": session}


def session_of(headers: Mapping[str, str], metadata: Mapping[str, Any] | None) -> str | None:
    """The conversation's name: by header, else by the call's metadata; None for none, or when asked to go without.

    Raises:
        ApiError: 400 `bad_session`, a name that is none.
    """
    given: dict[str, Any] = {name: headers.get(name) for name in SESSION_HEADERS}
    given |= {f"metadata.{name}": (metadata or {}).get(name) for name in ("session_id", "chat_id", "conversation_id")}
    for place, item in given.items():
        if item is None or (isinstance(item, str) and not item.strip()):
            continue
        if not isinstance(item, (str, int)) or isinstance(item, bool) or len(str(item)) > MAX_SESSION_NAME:
            text = f"{place} must be a text of at most {MAX_SESSION_NAME} characters"  # cut, two would be one
            raise bad_request(text, param=place, code="bad_session")
        name = str(item).strip()
        return None if name in ("bypass", "stateless", "off") else name
    return None


def check_choices(body: Sampled, most: int) -> None:
    """Refuse more choices than the server gives.

    Raises:
        ApiError: 400.
    """
    if body.n is not None and body.n > most:
        raise bad_request(f"n must be at most {most}, not {body.n}", param="n")
