"""What clients of OpenAI's endpoints send, as far as it is understood. Null always means: not given.

Fields that nothing here knows are kept in `model_extra`; the answer's header `x-polytoken-ignored` names them.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

FIRST_FAULT: Any = Field(fail_fast=True)  # only one is told, and a list may have very many
MAX_BIASES: Final = 20_000  # entries of logit_bias
ItemT = TypeVar("ItemT")
Prompts = Annotated[list[ItemT], FIRST_FAULT]


def _few(value: Any) -> Any:
    """Refuse too many before each is looked at."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} entries are taken, not {len(value)}")
    return value


class Record(BaseModel):
    """A checked JSON object: no coercion between types, unknown members kept aside."""

    model_config = ConfigDict(strict=True, extra="allow")

    def ignored(self) -> list[str]:
        """Names of the members that have no effect and no harmless meaning."""
        return sorted((self.model_extra or {}).keys() - WITHOUT_EFFECT)


# About the service, its billing or its storage, not about the answer.
WITHOUT_EFFECT = frozenset(
    {"user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "truncation"}
)


class StreamOptions(Record):
    """How a stream is to be."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Record):
    """What every generating endpoint takes; ranges are checked by the engine's own rules."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(_few), Field(max_length=MAX_BIASES)] | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FIRST_FAULT] | None = None
    n: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None
    max_denoising_steps: Annotated[int, Field(ge=1)] | None = Field(None, description="Canvas lane only.")

    @property
    def wants_usage(self) -> bool:
        """Whether a stream is to end with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class FunctionCall(Record):
    """A call as the assistant made it."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(Record):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Record):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[dict[str, Any]], FIRST_FAULT] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST_FAULT] | None = None
    reasoning_content: str | None = None


class Function(Record):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.:-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Record):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class JsonSchema(Record):
    """A schema that the answer must satisfy."""

    model_config = ConfigDict(strict=True, extra="allow", populate_by_name=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Record):
    """What the answer must be."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: str | None = None


class Extension(BaseModel):
    """What only this server knows of; a word that it does not know is refused."""

    model_config = ConfigDict(strict=True, extra="forbid")
    watch: bool | None = Field(None, description="Chunks with a member `polytoken`: progress, and a canvas settling.")


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], FIRST_FAULT] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    enable_thinking: bool | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    polytoken: Extension | None = None


class CompletionRequest(Sampled):
    """POST /v1/completions."""

    prompt: str | Prompts[str] | Prompts[int] | Prompts[Prompts[int]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: str | None = None
    response_format: ResponseFormat | None = None
