"""Structured output: which ids may come next, so that an answer is what a schema, an expression or a tool call allows.

A `Grammar` is compiled once and belongs to a request; `open` gives the running state of one row. The state is told
every id that is observed, and can go back: a drafted token is masked at its own place, and a rejected one leaves no
trace. What the model writes inside a block of reasoning is free; the grammar begins right behind the closing tag.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from polytoken.errors import BackendError, RequestError

Mask = npt.NDArray[np.bool_]
# White space between the parts of JSON is bounded: a model that likes blanks would otherwise write them for ever.
JSON_OPTIONS: Final = {"whitespace_pattern": r"[ \n]{0,16}"}
ANY_OBJECT: Final = {"type": "object"}


@dataclass(frozen=True, eq=False)
class Grammar:
    """A compiled grammar over one tokenizer.

    Attributes:
        text: for llguidance; empty where only the reasoning is limited.
        tokenizer: llguidance's own.
        vocab_size: length V of the masks, the network's rows.
        eos_ids: ids that may end a complete answer.
        reasoning: how a block of reasoning is written, None where there can be none.
        budget: most tokens of reasoning, None for no limit.
    """

    text: str
    tokenizer: Any
    vocab_size: int
    eos_ids: frozenset[int]
    reasoning: ReasoningMarks | None = None
    budget: int | None = None

    def open(self) -> Constraint:
        """The state of a row that has no output yet."""
        return Constraint(self)


@dataclass(frozen=True)
class ReasoningMarks:
    """Ids of the tags around reasoning.

    Attributes:
        opening: None where the model must not open a block itself, and where the tag is no single id.
        closing: ids of the closing tag.
        opened: whether the prompt ends inside the block.
    """

    opening: int | None
    closing: tuple[int, ...]
    opened: bool


class Constraint:
    """What one row may say next."""

    def __init__(self, grammar: Grammar) -> None:
        self._grammar = grammar
        self._marks = grammar.reasoning
        self._matcher = _matcher(grammar) if grammar.text else None
        self._ids: list[int] = []
        self._begin = 0  # how many ids came before the grammar began, once it has
        self._inside = self._marks is not None and self._marks.opened
        self._end: int | None = None  # how many ids there were with the one that ended the answer

    def allowed(self) -> Mask | None:
        """Bool [V] of the ids that may come next; None for all."""
        if self._end is not None:
            return None
        if self._inside:
            return self._inside_mask()
        if self._matcher is None:
            return None
        mask = self._answer_mask()
        if not self._ids and self._marks is not None and self._marks.opening is not None:
            mask[self._marks.opening] = True
        return mask

    def observe(self, token_id: int) -> None:
        """Take note of an id that follows."""
        self._ids.append(token_id)
        marks = self._marks
        if self._inside:
            assert marks is not None
            if tuple(self._ids[-len(marks.closing) :]) == marks.closing:
                self._inside, self._begin = False, len(self._ids)
        elif self._end is not None:
            return  # drafts behind the end, which nobody will keep
        elif len(self._ids) == 1 and marks is not None and token_id == marks.opening:
            self._inside = True
        elif token_id in self._grammar.eos_ids:
            self._end = len(self._ids)
        elif self._matcher is not None and not self._matcher.consume_token(token_id):
            raise RequestError(f"id {token_id} breaks the grammar", code="bad_grammar")

    def mark(self) -> int:
        """A place to go back to."""
        return len(self._ids)

    def rollback(self, mark: int) -> None:
        """Forget what was observed since that mark."""
        if mark == len(self._ids):
            return
        ids = self._ids[:mark]
        if self._inside or self._begin > mark:  # the boundary itself goes: the ids before it are few and cheap
            if self._matcher is not None:
                self._matcher.reset()
            self._begin, self._end, self._ids = 0, None, []
            self._inside = self._marks is not None and self._marks.opened
            for token_id in ids:
                self.observe(token_id)
            return
        taken = (len(self._ids) if self._end is None else self._end - 1) - mark
        if taken > 0 and self._matcher is not None and not self._matcher.rollback(taken):
            raise RequestError("the grammar cannot go back", code="bad_grammar")
        self._ids = ids
        if self._end is not None and self._end > mark:
            self._end = None

    def _inside_mask(self) -> Mask | None:
        marks, budget = self._marks, self._grammar.budget
        assert marks is not None
        if budget is None or len(self._ids) < budget:
            return None
        done = 0  # how much of the closing tag is there already
        for length in range(len(marks.closing) - 1, 0, -1):
            if tuple(self._ids[-length:]) == marks.closing[:length]:
                done = length
                break
        mask = np.zeros(self._grammar.vocab_size, np.bool_)
        mask[marks.closing[done]] = True
        return mask

    def _answer_mask(self) -> Mask:
        grammar = self._grammar
        assert self._matcher is not None
        mask = np.zeros(grammar.vocab_size, np.bool_)
        ends = list(grammar.eos_ids)
        if self._matcher.is_stopped():
            mask[ends] = True
            return mask
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little")[: grammar.vocab_size].astype(np.bool_)
        mask[: allowed.size] = allowed
        mask[ends] = self._matcher.is_accepting()
        if not mask.any():
            raise RequestError("the grammar has no way on", code="bad_grammar")
        return mask


def json_grammar(schema: Mapping[str, Any] | bool | None = None) -> str:
    """The grammar of a JSON text that satisfies a schema; any object without one.

    Raises:
        RequestError: `bad_schema`: no schema, or one with keywords that are not supported.
    """
    library = _library()
    wanted = ANY_OBJECT if schema is None or schema is True else schema
    if not isinstance(wanted, Mapping):
        raise RequestError("the schema must be a JSON object", code="bad_schema", field="response_format")
    try:
        text: str = library.LLMatcher.grammar_from_json_schema(json.dumps(wanted), overrides=JSON_OPTIONS)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"the schema cannot be used: {error}", code="bad_schema", field="response_format") from None
    return text


def regex_grammar(expression: str) -> str:
    """The grammar of a text that matches an expression as a whole. Errors come when it is compiled."""
    text: str = _library().LLMatcher.grammar_from_regex(expression)
    return text


def calls_grammar(
    tools: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    several: bool,
    tags: tuple[str, str] = ("<tool_call>", "</tool_call>"),
    bare: bool = False,
) -> str:
    """The grammar of one or more calls of these tools.

    Args:
        several: whether more than one call may be made.
        tags: around a call.
        bare: Gemma's form `call:name{...}` between the tags, with the arguments as JSON; else a JSON object with name
            and arguments, as Hermes and Qwen write it.
    """
    opening, closing = _tag(tokenizer, tags[0]), _tag(tokenizer, tags[1])
    rules = ["start: call" + ("+" if several else ""), "call: " + " | ".join(f"c{i}" for i in range(len(tools)))]
    options = json.dumps(JSON_OPTIONS)[1:-1]
    for index, tool in enumerate(tools):
        function = tool["function"]
        schema = function.get("parameters") or ANY_OBJECT
        body = json.dumps({"x-guidance": json.loads("{" + options + "}"), **schema})
        if bare:
            rules.append(f"c{index}: {opening} {json.dumps('call:' + function['name'])} a{index} {closing}")
        else:
            name = json.dumps(json.dumps(function["name"], ensure_ascii=False), ensure_ascii=False)[1:-1]
            rules.append(
                f'c{index}: {opening} "\\n{{\\"name\\": {name}, \\"arguments\\": " a{index} "}}\\n" {closing} /\\n?/'
            )
        rules.append(f"a{index}: %json {body}")
    return "\n".join(rules)


def _tag(tokenizer: Any, tag: str) -> str:
    """A tag in the grammar's words: a token of its own is no text to llguidance."""
    ids = tokenizer.encode(tag, add_special_tokens=False)
    return f"<[{ids[0]}]>" if len(ids) == 1 else json.dumps(tag)


def compile_grammar(
    text: str,
    tokenizer: Any,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    reasoning: ReasoningMarks | None = None,
    budget: int | None = None,
) -> Grammar:
    """A grammar that is known to work with this tokenizer.

    Args:
        text: from one of the functions above.
        tokenizer: the checkpoint's, with transformers' fast one in `fast`.
        vocab_size: length of the network's rows; ids of the tokenizer beyond them are never allowed.

    Raises:
        RequestError: `bad_schema`.
        BackendError: llguidance is not installed.
    """
    if reasoning is not None and max(reasoning.closing, default=-1) >= vocab_size:
        reasoning = None  # the network can write no such block
    elif reasoning is not None and reasoning.opening is not None and reasoning.opening >= vocab_size:
        reasoning = replace(reasoning, opening=None)
    ends = frozenset(token_id for token_id in eos_ids if token_id < vocab_size)
    grammar = Grammar(text, _tokenizer(tokenizer, vocab_size), vocab_size, ends, reasoning, budget)
    if not text:
        return grammar
    failed, notes = _library().LLMatcher.validate_grammar_with_warnings(text, grammar.tokenizer)
    if failed:
        line = " ".join(str(notes[0] if notes else "it is not valid").split())[:300]
        raise RequestError(f"the grammar cannot be used: {line}", code="bad_schema", field="response_format")
    _matcher(grammar)
    return grammar


def _matcher(grammar: Grammar) -> Any:
    matcher = _library().LLMatcher(grammar.tokenizer, grammar.text)
    if matcher.is_error():
        line = matcher.get_error().strip().splitlines()[0][:300]
        raise RequestError(f"the grammar cannot be used: {line}", code="bad_schema", field="response_format")
    return matcher


_LOCK: Final = threading.Lock()
_TOKENIZERS: Final[weakref.WeakKeyDictionary[Any, tuple[int, Any]]] = weakref.WeakKeyDictionary()


def _tokenizer(tokenizer: Any, vocab_size: int) -> Any:
    """llguidance's form of a tokenizer, made once: it walks the whole vocabulary."""
    from llguidance.hf import from_tokenizer  # noqa: PLC0415

    with _LOCK:
        known = _TOKENIZERS.get(tokenizer.fast)
        if known is None or known[0] != vocab_size:
            length = max(vocab_size, len(tokenizer.fast))  # either may have more than the other
            made = from_tokenizer(tokenizer.fast, n_vocab=length, eos_token=list(tokenizer.eos_ids))
            known = _TOKENIZERS[tokenizer.fast] = (vocab_size, made)
        return known[1]


def _library() -> Any:
    try:
        import llguidance  # noqa: PLC0415
    except ImportError:
        raise BackendError(
            'structured output needs llguidance: pip install "polytoken[server]"', code="missing_llguidance"
        ) from None
    return llguidance
