"""What a caller asks of the engine: sampling parameters, one request, and the strict parsing of a JSON record into one.

A record is checked in a fixed order, so that the same bad record always gives the same error code on every surface
(JSON lines, Python, server). Nothing here imports MLX or a tokenizer.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from polytoken.errors import RequestError

MAX_LOGPROBS: Final = 20  # alternatives a caller may ask for at each position
MAX_STOP_STRINGS: Final = 16
MAX_STOP_LENGTH: Final = 4096  # characters of one; each is looked through before the first token
PENALTY_LIMIT: Final = 2.0  # presence and frequency penalties lie in [-2, 2], as in the OpenAI API
BIAS_LIMIT: Final = 100.0


@dataclass(frozen=True)
class SamplingParams:
    """How one token is drawn from one row of logits. The defaults are greedy decoding.

    Attributes:
        temperature: 0 means greedy (argmax, lowest id on ties); otherwise logits are divided by it.
        top_k: keep the k most likely ids; 0, or at least the vocabulary size, keeps all.
        top_p: keep ids while the probability ranked before them is below this; 1 keeps all, 0 is greedy.
        min_p: keep ids with at least this share of the largest probability; 0 keeps all.
        repetition_penalty: over prompt and output ids, logits are divided (positive) or multiplied (negative) by it.
        presence_penalty: subtracted once from every id already in the output.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: pairs (id, value) added to the logits; at -100 an id is banned, also when decoding is greedy.
        logprobs: None for none, else the number of alternatives reported beside each chosen token.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, low=0.0)
        _integer("top_k", self.top_k, low=0)
        _number("top_p", self.top_p, low=0.0, high=1.0)
        _number("min_p", self.min_p, low=0.0, high=1.0)
        _number("repetition_penalty", self.repetition_penalty, low=0.0, open_low=True)
        _number("presence_penalty", self.presence_penalty, low=-PENALTY_LIMIT, high=PENALTY_LIMIT)
        _number("frequency_penalty", self.frequency_penalty, low=-PENALTY_LIMIT, high=PENALTY_LIMIT)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, low=0, high=MAX_LOGPROBS)
        for token_id, value in self.logit_bias:
            _integer("logit_bias", token_id, low=0)
            _number("logit_bias", value, low=-BIAS_LIMIT, high=BIAS_LIMIT)

    @property
    def greedy(self) -> bool:
        """True when no random number is needed to choose a token."""
        return self.temperature == 0.0 or self.top_k == 1 or self.top_p == 0.0

    @property
    def shapes_logits(self) -> bool:
        """True when logits are changed before the choice (penalties or bias)."""
        return bool(
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.logit_bias
        )


@dataclass(frozen=True, kw_only=True)
class Request:
    """One validated request, before the chat template.

    Exactly one of `messages`, `raw_prompt` and `token_ids` is set.

    Attributes:
        request_id: the caller's name for it, unique for the life of an engine.
        messages: chat turns for the template, each with at least `role` and `content`.
        raw_prompt: text that is encoded as it stands, without a template.
        token_ids: prompt ids that are used as they stand.
        max_new_tokens: hard cap on generated ids, > 0.
        max_denoising_steps: cap on denoise steps (canvas lane only), None for none.
        seed: any integer; the request's draws depend on it and on nothing else.
        think: whether the template is asked for a reasoning block.
        sampling: how tokens are drawn.
        stop: strings that end the text; the match itself is not part of it.
        tools: what the model may call, in the form of the OpenAI API; templates see them, and calls are told apart.
        session: name of the conversation it is a turn of, whose state is kept for the next turn; None for none.
        grammar: what the answer must be, from `polytoken.sampling.grammar.compile_grammar`; None for anything.
        ignore_eos: go on after end tokens (benchmarks), until `max_new_tokens`.
        limit_is_default: the caller named no limit, so `max_new_tokens` may shrink to what the context has room for.
        line: 1-based number of the input line it was read from, None for none; says nothing about what is asked.
        created: monotonic seconds when the request object was made.
    """

    request_id: str
    max_new_tokens: int
    messages: tuple[Mapping[str, Any], ...] | None = None
    raw_prompt: str | None = None
    token_ids: tuple[int, ...] | None = None
    max_denoising_steps: int | None = None
    seed: int = 0
    think: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()
    session: str | None = None
    grammar: Any = field(default=None, compare=False, repr=False)
    ignore_eos: bool = False
    limit_is_default: bool = False
    line: int | None = field(default=None, compare=False)
    created: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        given = [self.messages is not None, self.raw_prompt is not None, self.token_ids is not None]
        if sum(given) != 1:
            raise RequestError(
                "exactly one of messages, raw_prompt and token_ids must be given",
                code="prompt_xor_messages",
                field="messages",
            )
        if not _is_request_id(self.request_id):
            raise RequestError(_BAD_REQUEST_ID, code="bad_request_id", field="request_id")
        if self.raw_prompt is not None and not (isinstance(self.raw_prompt, str) and _is_unicode(self.raw_prompt)):
            raise RequestError("prompt must be a string of valid Unicode", code="bad_prompt", field="prompt")
        ids = self.token_ids
        if ids is not None and not (isinstance(ids, tuple) and _are_ids(ids)):
            raise RequestError("token_ids must be a tuple of integers of at least 0", code="bad_prompt", field="prompt")
        if not (self.session is None or _is_request_id(self.session)):
            raise RequestError(_BAD_SESSION, code="bad_session", field="session")
        if not isinstance(self.think, bool):
            raise RequestError("think must be true or false", code="bad_think", field="think")
        if not _is_integer(self.seed):
            raise RequestError("seed must be an integer", code="bad_seed", field="seed")
        for name in ("max_new_tokens", "max_denoising_steps"):
            value = getattr(self, name)
            if not (value is None and name == "max_denoising_steps") and (not _is_integer(value) or value <= 0):
                raise RequestError(f"{name} must be an integer above 0", code="bad_limit", field=name)
        if not isinstance(self.sampling, SamplingParams):
            raise RequestError("sampling must be SamplingParams", code="bad_sampling", field="sampling")
        if not isinstance(self.stop, tuple):
            raise RequestError("stop must be a tuple of strings", code="bad_stop", field="stop")
        parse_stop(self.stop, ())
        parse_tools(self.tools)


@dataclass(frozen=True, kw_only=True)
class RequestDefaults:
    """Values for what a record leaves out. `seed` is the base from which per-request seeds are derived."""

    max_new_tokens: int = 8192
    max_denoising_steps: int | None = None
    seed: int = 42
    think: bool = True
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    limit_is_default: bool = True  # False when the user chose max_new_tokens for the whole run


RECORD_FIELDS: Final = frozenset(
    {"request_id", "prompt", "messages", "max_new_tokens", "max_denoising_steps", "seed", "think"}
    | {"sampling", "stop", "session", "tools"}  # ours, beside the seven of the protocol
)
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,17}")
_BAD_REQUEST_ID: Final = "request_id must be a string of valid Unicode that is not blank"
_BAD_SESSION: Final = "session must be a string of valid Unicode that is not blank, or null"
_SHOWN_LIMIT: Final = 80
_SAMPLING_FIELDS: Final = frozenset(f.name for f in fields(SamplingParams))


def derive_seed(base: int, request_id: str) -> int:
    """Seed of a request that names none: 63 bits of SHA-256 over base, NUL, id; independent of arrival order."""
    digest = hashlib.sha256(f"{base}\0{request_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") & ((1 << 63) - 1)


def parse_record(record: object, defaults: RequestDefaults) -> Request:
    """Turn one JSON value into a request, or raise the first error in the protocol's order.

    Raises:
        RequestError: with code `bad_record`, `unknown_field`, `bad_request_id`, `prompt_xor_messages`, `bad_prompt`,
            `bad_messages`, `bad_think`, `bad_seed`, `bad_limit`, `bad_sampling`, `bad_stop`, `bad_session`
            or `bad_tools`.
    """
    if not isinstance(record, Mapping):
        raise RequestError(f"a request must be a JSON object, not {_json_type(record)}", code="bad_record", field=None)
    unknown = sorted(str(key) for key in record if key not in RECORD_FIELDS)
    if unknown:
        allowed = ", ".join(sorted(RECORD_FIELDS))
        raise RequestError(
            f"unknown field {', '.join(map(_shown, unknown))}; allowed: {allowed}",
            code="unknown_field",
            field=_printable(unknown[0]),
        )
    request_id = record.get("request_id")
    if not _is_request_id(request_id):
        raise RequestError(_BAD_REQUEST_ID, code="bad_request_id", field="request_id")
    assert isinstance(request_id, str)
    messages = _parse_messages(record)
    think = record.get("think", defaults.think)
    if not isinstance(think, bool):
        raise RequestError("think must be true or false", code="bad_think", field="think")
    seed = record.get("seed")
    if seed is not None and not _is_integer(seed):
        raise RequestError("seed must be an integer or null", code="bad_seed", field="seed")
    max_new_tokens = _limit(record, "max_new_tokens", defaults.max_new_tokens)
    assert max_new_tokens is not None
    return Request(
        request_id=request_id,
        messages=messages,
        max_new_tokens=max_new_tokens,
        max_denoising_steps=_limit(record, "max_denoising_steps", defaults.max_denoising_steps),
        seed=derive_seed(defaults.seed, request_id) if seed is None else seed,
        think=think,
        sampling=parse_sampling(record.get("sampling"), defaults.sampling),
        stop=parse_stop(record.get("stop"), defaults.stop),
        session=record.get("session"),
        tools=parse_tools(record.get("tools")),
        ignore_eos=defaults.ignore_eos,
        limit_is_default=record.get("max_new_tokens") is None and defaults.limit_is_default,
    )


def parse_sampling(value: object, defaults: SamplingParams) -> SamplingParams:
    """Sampling parameters from a JSON object whose missing or null members keep the defaults."""
    if value is None:
        return defaults
    if not isinstance(value, Mapping):
        raise RequestError("sampling must be a JSON object", code="bad_sampling", field="sampling")
    unknown = sorted(str(key) for key in value if key not in _SAMPLING_FIELDS)
    if unknown:
        raise RequestError(
            f"unknown sampling field {', '.join(map(_shown, unknown))}; allowed: {', '.join(sorted(_SAMPLING_FIELDS))}",
            code="bad_sampling",
            field=f"sampling.{_printable(unknown[0])}",
        )
    given = {name: item for name, item in value.items() if item is not None}
    if "logit_bias" in given:
        given["logit_bias"] = parse_logit_bias(given["logit_bias"])
    return replace(defaults, **given)


def parse_logit_bias(value: object) -> tuple[tuple[int, float], ...]:
    """Bias pairs sorted by id, from a JSON object of id text to number (the OpenAI form)."""
    if not isinstance(value, Mapping):
        raise RequestError(
            "logit_bias must be an object of token id to number", code="bad_sampling", field="logit_bias"
        )
    pairs: dict[int, float] = {}
    for key, bias in value.items():
        # Plain decimal and nothing else int() would take (blanks, signs, "007", "1_0"): so no two keys name one id.
        text = _shown(key) if _is_integer(key) else key
        if not isinstance(text, str) or _TOKEN_ID.fullmatch(text) is None:
            raise RequestError(
                f"logit_bias key {_shown(key)} is not a token id", code="bad_sampling", field="logit_bias"
            )
        _number("logit_bias", bias, low=-BIAS_LIMIT, high=BIAS_LIMIT)
        pairs[int(text)] = float(bias)
    return tuple(sorted(pairs.items()))


def parse_stop(value: object, default: tuple[str, ...]) -> tuple[str, ...]:
    """Stop strings from a string, a list of strings, or null for the default."""
    if value is None:
        return default
    items = [value] if isinstance(value, str) else value
    if (
        not isinstance(items, Sequence)
        or len(items) > MAX_STOP_STRINGS
        or not all(isinstance(item, str) and 0 < len(item) <= MAX_STOP_LENGTH and _is_unicode(item) for item in items)
    ):
        raise RequestError(
            f"stop must be a string or a list of at most {MAX_STOP_STRINGS} strings of valid Unicode, none empty "
            f"or longer than {MAX_STOP_LENGTH} characters",
            code="bad_stop",
            field="stop",
        )
    return tuple(items)


def parse_tools(value: object) -> tuple[Mapping[str, Any], ...]:
    """Tools from a list of `{"type": "function", "function": {"name": ..., "parameters": {...}}}`, or null for none."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise RequestError("tools must be a list", code="bad_tools", field="tools")
    for index, tool in enumerate(value):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
            raise RequestError(
                f"tools[{index}] must be an object with a function that has a name",
                code="bad_tools",
                field=f"tools[{index}]",
            )
    return tuple(value)


def _parse_messages(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    # Presence of the key counts, also with a null value: a caller who wrote both made a mistake.
    if ("prompt" in record) == ("messages" in record):
        raise RequestError("give exactly one of prompt and messages", code="prompt_xor_messages", field="prompt")
    if "prompt" in record:
        prompt = record["prompt"]
        if not isinstance(prompt, str) or not _is_unicode(prompt):
            raise RequestError("prompt must be a string of valid Unicode", code="bad_prompt", field="prompt")
        return ({"role": "user", "content": prompt},)
    messages = record["messages"]
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages must be a list that is not empty", code="bad_messages", field="messages")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or "role" not in message or "content" not in message:
            raise RequestError(
                f"messages[{index}] must be an object with role and content",
                code="bad_messages",
                field=f"messages[{index}]",
            )
    return tuple(messages)


def _limit(record: Mapping[str, Any], name: str, default: int | None) -> int | None:
    value = record.get(name)
    if value is None:
        return default
    if not _is_integer(value) or value <= 0:
        raise RequestError(f"{name} must be an integer above 0", code="bad_limit", field=name)
    return int(value)


def _is_request_id(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and _is_unicode(value)


def _is_unicode(text: str) -> bool:
    """False for a string with a lone surrogate, which JSON can spell but UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _printable(text: str) -> str:
    """The text with lone surrogates escaped, fit for a record that leaves the engine as UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def _shown(value: object) -> str:
    """How a message quotes an offending value: its repr, cut to a length that fits a line."""
    try:
        text = repr(value)
    except ValueError:  # an integer with more digits than Python will print
        return "an integer of thousands of digits"
    return text if len(text) <= _SHOWN_LIMIT else f"{text[:_SHOWN_LIMIT]}..."


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _are_ids(items: tuple[object, ...]) -> bool:
    """Whether all are integers of at least 0; a long history is looked at in every turn, so plain ones go fast."""
    if set(map(type, items)) <= {int}:
        return min(items, default=0) >= 0  # type: ignore[type-var, operator]
    return all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items)


def _integer(name: str, value: object, *, low: int, high: int | None = None) -> None:
    bound = f"from {low} to {high}" if high is not None else f"of at least {low}"
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        raise RequestError(f"{name} must be an integer {bound}, not {_shown(value)}", code="bad_sampling", field=name)


def _number(name: str, value: object, *, low: float, high: float | None = None, open_low: bool = False) -> None:
    try:
        ok = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        ok = False
    if ok:
        assert isinstance(value, (int, float))
        ok = (value > low if open_low else value >= low) and (high is None or value <= high)
    if not ok:
        least = f"above {low:g}" if open_low else f"at least {low:g}"
        bound = least if high is None else f"from {low:g} to {high:g}"
        raise RequestError(
            f"{name} must be a finite number {bound}, not {_shown(value)}", code="bad_sampling", field=name
        )


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), type(value).__name__)
