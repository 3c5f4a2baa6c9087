"""What the API is: an OpenAPI document for programs, and a page for people, from one table."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from polytoken import __version__
from polytoken.server.admin_sessions import ForkRequest, SnapshotRequest
from polytoken.server.messages import CountRequest, MessagesRequest
from polytoken.server.records import ChatRequest, CompletionRequest
from polytoken.server.responses import ResponsesRequest

ADMIN: Final = "Administration"
_OPENAI, _ANTHROPIC, _SERVER = "OpenAI's clients", "Anthropic's clients", "The server itself"
_INTRODUCTIONS: Final = {
    _OPENAI: "With stream: true the answer is a stream of server-sent events that ends with [DONE].",
    _ANTHROPIC: "Errors have Anthropic's form here, OpenAI's everywhere else.",
    _SERVER: "Without a key: /health and what describes the server.",
    ADMIN: "With an admin key if one is set, else the API key; without any key from the server's own machine only.",
}


@dataclass(frozen=True)
class Operation:
    """One endpoint.

    Attributes:
        group: the heading it stands under.
        body: record of its JSON body.
        query: names of query parameters, with what they mean.
        statuses: of errors that it has beside the common ones.
    """

    method: str
    path: str
    group: str
    summary: str
    body: type[BaseModel] | None = None
    query: tuple[tuple[str, str], ...] = ()
    statuses: tuple[int, ...] = ()
    media: str = "application/json"

    @property
    def names(self) -> list[str]:
        """Parameters in the path."""
        return [part.partition("}")[0] for part in self.path.split("{")[1:]]


_MODEL: Final = (("model", "a model in memory; without it all are looked through"),)
_GENERATES: Final = (404, 429, 503, 504, 507)
OPERATIONS: Final = (
    Operation("post", "/v1/chat/completions", _OPENAI, "Answer a conversation.", ChatRequest, statuses=_GENERATES),
    Operation("post", "/v1/completions", _OPENAI, "Go on from a text.", CompletionRequest, statuses=_GENERATES),
    Operation("post", "/v1/responses", _OPENAI, "Answer, by id if wanted.", ResponsesRequest, statuses=_GENERATES),
    Operation("get", "/v1/models", _OPENAI, "The models that are offered."),
    Operation("get", "/v1/models/{name}", _OPENAI, "One of them.", statuses=(404,)),
    Operation("post", "/v1/messages", _ANTHROPIC, "Answer a conversation.", MessagesRequest, statuses=_GENERATES),
    Operation("post", "/v1/messages/count_tokens", _ANTHROPIC, "Count a prompt's tokens.", CountRequest,
              statuses=(404, 503, 507)),
    Operation("get", "/health", _SERVER, "Whether it serves, and its effective settings.", statuses=(503,)),
    Operation("get", "/metrics", _SERVER, "Counts and times, for Prometheus.", media="text/plain"),
    Operation("get", "/admin/requests", ADMIN, "Every open call, with its tokens so far."),
    Operation("post", "/admin/requests/{id}/cancel", ADMIN,
              "End a call (its x-request-id) within one step; its client is told.", statuses=(404,)),
    Operation("get", "/admin/statistics", ADMIN, "What the lanes say of themselves: cache, sessions, speculation."),
    Operation("get", "/admin/models", ADMIN, "Every model that is offered, what is in memory, and what each takes."),
    Operation("post", "/admin/models/{name}/load", ADMIN, "Load a model now; others may have to go.",
              statuses=(404, 503, 507)),
    Operation("post", "/admin/models/{name}/unload", ADMIN, "Take an idle model out of memory.", statuses=(404, 409)),
    Operation("post", "/admin/models/{name}/reload", ADMIN,
              "Load a model anew, after its files changed; the old one serves meanwhile.",
              statuses=(404, 409, 503, 507)),
    Operation("get", "/admin/sessions", ADMIN, "Sessions, the most recently used first.", None, _MODEL, (404,)),
    Operation("delete", "/admin/sessions", ADMIN, "Forget all sessions, snapshots and stored states.", None, _MODEL,
              (404,)),
    Operation("get", "/admin/sessions/{name}", ADMIN, "One session: numbers, messages where known, and its text.",
              None, _MODEL, (404,)),
    Operation("delete", "/admin/sessions/{name}", ADMIN, "Forget a session and what only it stored.", None, _MODEL,
              (404,)),
    Operation("post", "/admin/sessions/{name}/fork", ADMIN, "Begin a session where another, or a snapshot, stands.",
              ForkRequest, _MODEL, (404, 409)),
    Operation("post", "/admin/sessions/{name}/snapshot", ADMIN, "Give what a session has come to a name that stays.",
              SnapshotRequest, _MODEL, (404,)),
    Operation("post", "/admin/sessions/{name}/restore", ADMIN, "Put a session, new or not, to where a snapshot stands.",
              SnapshotRequest, _MODEL, (404,)),
    Operation("get", "/admin/snapshots", ADMIN, "Named snapshots, the oldest first.", None, _MODEL, (404,)),
    Operation("delete", "/admin/snapshots/{name}", ADMIN, "Forget a snapshot and what only it kept.", None, _MODEL,
              (404,)),
)  # fmt: skip
_ERRORS: Final = {
    400: "Something in the call is wrong; `param` names it.",
    401: "The key is missing or not valid here.",
    403: "Not from this origin, host or machine.",
    404: "There is none of this name.",
    409: "It exists, or is in use.",
    413: "The body is too large.",
    415: "The body is no JSON.",
    429: "Too many calls; `Retry-After` says when.",
    503: "Busy or shutting down; `Retry-After` says when.",
    504: "It took too long.",
    507: "The model does not fit in memory.",
}


def describe() -> dict[str, Any]:
    """The OpenAPI document."""
    bodies: Any = [(body, "validation") for body in dict.fromkeys(op.body for op in OPERATIONS if op.body is not None)]
    _, schemas = models_json_schema(bodies, ref_template="#/components/schemas/{model}")
    paths: dict[str, Any] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "polytoken", "version": __version__},
        "tags": [{"name": name, "description": text} for name, text in _INTRODUCTIONS.items()],
        "paths": paths,
        "components": {
            "schemas": {**schemas["$defs"], "Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"x-api-key": []}],
    }


_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string", "description": "One line for people."},
                "type": {"type": "string"},
                "code": {"type": ["string", "null"], "description": "A stable name for programs."},
                "param": {"type": ["string", "null"], "description": "The field at fault."},
            },
        }
    },
}


def _operation(operation: Operation) -> dict[str, Any]:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    common = (400, 401, 403, 429) + ((413, 415) if operation.body is not None else ())
    answers: dict[str, Any] = {"200": {"description": "The answer.", "content": {operation.media: {}}}}
    for status in sorted({*common, *operation.statuses}):
        answers[str(status)] = {"description": _ERRORS[status], "content": error}
    record: dict[str, Any] = {"summary": operation.summary, "tags": [operation.group], "responses": answers}
    word = {"type": "string", "minLength": 1}
    parameters = [{"name": name, "in": "path", "required": True, "schema": word} for name in operation.names]
    parameters += [
        {"name": name, "in": "query", "required": False, "description": text, "schema": word}
        for name, text in operation.query
    ]
    if parameters:
        record["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": f"#/components/schemas/{operation.body.__name__}"}
        record["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return record


# -- for people ----------------------------------------------------------------------------------------------------


def page() -> str:
    """The same as HTML: every endpoint, what it takes, and a call to paste. It loads nothing but our own style."""
    record = describe()
    parts = []
    for group, introduction in _INTRODUCTIONS.items():
        parts.append(f"<h2>{escape(group)}</h2><p>{escape(introduction)}</p>")
        parts += [_section(operation, record) for operation in OPERATIONS if operation.group == group]
    return _PAGE.format(version=escape(__version__), body="".join(parts))


def _section(operation: Operation, record: dict[str, Any]) -> str:
    body = ""
    if operation.body is not None:
        schema = record["components"]["schemas"][operation.body.__name__]
        rows = "".join(
            _row(name, field, name in schema.get("required", ())) for name, field in schema["properties"].items()
        )
        body = f"<div class=wide><table><tr><th>Field<th>Type and meaning</tr>{rows}</table></div>"
    query = "".join(f"<p>Query: <code>{name}</code>, {escape(text)}.</p>" for name, text in operation.query)
    errors = ", ".join(status for status in record["paths"][operation.path][operation.method]["responses"])
    return (
        f"<details id='{operation.method}{escape(operation.path)}'><summary><b class={operation.method}>"
        f"{operation.method.upper()}</b> <code>{escape(operation.path)}</code> <span>{escape(operation.summary)}</span>"
        f"</summary>{query}{body}<p>Statuses: {errors}.</p><pre tabindex=0>{escape(_call(operation))}</pre></details>"
    )


def _row(name: str, field: dict[str, Any], required: bool) -> str:
    star = " <em>required</em>" if required else ""
    return (
        f"<tr><td><code>{escape(name)}</code>{star}<td>{escape(_type(field))} "
        f"<span>{escape(field.get('description', ''))}</span></tr>"
    )


def _type(field: dict[str, Any]) -> str:
    """A schema in few words; null, which everywhere means that a field was not given, is left out."""
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    if "const" in field or "enum" in field:
        return " | ".join(repr(value) for value in field.get("enum", [field.get("const")]))
    options = field.get("anyOf") or field.get("oneOf")
    if options:
        return " | ".join(dict.fromkeys(_type(option) for option in options if option.get("type") != "null"))
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}))}"
    return str(field.get("type", "any"))


_EXAMPLES: Final = {
    "/v1/chat/completions": '{"messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/completions": '{"prompt": "Once upon a time", "max_tokens": 32}',
    "/v1/responses": '{"input": "Hello"}',
    "/v1/messages": '{"model": "NAME", "max_tokens": 64, "messages": [{"role": "user", "content": "Hello"}]}',
    "/v1/messages/count_tokens": '{"model": "NAME", "messages": [{"role": "user", "content": "Hello"}]}',
    "/admin/sessions/{name}/fork": '{"to": "NEW"}',
    "/admin/sessions/{name}/snapshot": '{"snapshot": "SNAPSHOT"}',
    "/admin/sessions/{name}/restore": '{"snapshot": "SNAPSHOT"}',
}


def _call(operation: Operation) -> str:
    path = operation.path.replace("{name}", "NAME").replace("{id}", "ID")
    words = ["curl"]
    if operation.method == "delete" or (operation.method == "post" and operation.body is None):
        words.append(f"-X {operation.method.upper()}")
    words.append(f"$URL{path}")
    if operation.path in _EXAMPLES:
        words += ["-H 'Content-Type: application/json'", f"-d '{_EXAMPLES[operation.path]}'"]
    return " ".join(words)


_PAGE: Final = """<!doctype html><html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>polytoken API</title>
<link rel="icon" href="/static/icon.svg" type="image/svg+xml"><link rel="stylesheet" href="/static/docs.css"></head>
<body><main><h1>polytoken {version}: the API</h1>
<p><a href="/">Chat page</a> &middot; <a href="/openapi.json">OpenAPI document</a></p>
<p>A server with a key wants <code>Authorization: Bearer KEY</code> or <code>x-api-key: KEY</code>. Null means that a
field was not given. Fields without effect are named in the header <code>x-polytoken-ignored</code>.</p>
{body}</main></body></html>
"""
