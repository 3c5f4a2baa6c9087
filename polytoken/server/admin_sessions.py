"""Endpoints for whoever runs the server: sessions and named snapshots of the models in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pydantic import Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from polytoken.errors import PolytokenError
from polytoken.server.admin import admin_state
from polytoken.server.body import read_record
from polytoken.server.errors import ApiError, bad_request, from_engine, shown
from polytoken.server.pool import Model
from polytoken.server.records import Record
from polytoken.server.state import ServerState
from polytoken.server.stream import JsonResponse

if TYPE_CHECKING:
    from polytoken.cache.answers import SessionReport
    from polytoken.engine import LoadedLane

T = TypeVar("T")
_TITLE: Final = 80  # characters of a session's first question that a list shows


class ForkRequest(Record):
    """POST /admin/sessions/{name}/fork."""

    to: str = Field(min_length=1, max_length=200, description="Name of the new session.")


class SnapshotRequest(Record):
    """POST /admin/sessions/{name}/snapshot and /admin/sessions/{name}/restore."""

    snapshot: str = Field(min_length=1, max_length=200, description="Name of the snapshot.")


# -- sessions ------------------------------------------------------------------------------------------------------


async def sessions(request: HttpRequest) -> Response:
    """Sessions of the models in memory, the most recently used first."""
    state = admin_state(request)
    data = []
    for model in _models(state, request):
        busy = _busy(state, model)
        for report, title in reversed(await _ask(model, _list)):
            data.append({**_record(model, report, busy), "title": title})
    return JsonResponse({"object": "list", "data": data})


async def session(request: HttpRequest) -> Response:
    """One session: its numbers, its messages where they are known, and the text of all its committed tokens."""
    state = admin_state(request)
    name = request.path_params["name"]
    model = await _holder(state, request, name)
    report, messages, ids = await _ask(model, lambda loaded: _show(loaded, name))
    text = await asyncio.to_thread(model.tokenizer.decode, ids, skip_special_tokens=False)
    return JsonResponse({**_record(model, report, _busy(state, model)), "messages": messages, "text": text})


async def clear(request: HttpRequest) -> Response:
    """Forget a session and the states that only it stored."""
    state = admin_state(request)
    name = request.path_params["name"]
    model = await _holder(state, request, name)
    dropped = await _ask_engine(lambda: model.engine.clear(name))
    return JsonResponse({"id": name, "model": model.name, "deleted": True, "dropped_states": dropped})


async def clear_all(request: HttpRequest) -> Response:
    """Forget all sessions, all snapshots and every stored state of the models in memory."""
    state = admin_state(request)
    dropped = 0
    for model in _models(state, request):
        dropped += await _ask_engine(model.engine.clear)
    return JsonResponse({"deleted": True, "dropped_states": dropped})


async def fork(request: HttpRequest) -> Response:
    """Begin a session where another one, or a snapshot, stands; they share memory until they part."""
    state = admin_state(request)
    body = await read_record(request, ForkRequest, state.settings)
    name = request.path_params["name"]
    model = await _holder(state, request, name, snapshots=True)
    tokens = await _ask_engine(lambda: model.engine.fork(name, body.to))
    return JsonResponse({"id": body.to, "model": model.name, "from": name, "tokens": tokens})


async def snapshot(request: HttpRequest) -> Response:
    """Give what a session has come to a name, under which it stays; an older snapshot of the name is replaced."""
    state = admin_state(request)
    body = await read_record(request, SnapshotRequest, state.settings)
    name = request.path_params["name"]
    model = await _holder(state, request, name)
    tokens = await _ask_engine(lambda: model.engine.snapshot(body.snapshot, name))
    return JsonResponse({"id": body.snapshot, "model": model.name, "from": name, "tokens": tokens})


async def restore(request: HttpRequest) -> Response:
    """Put a session, new or not, to where a snapshot stands."""
    state = admin_state(request)
    body = await read_record(request, SnapshotRequest, state.settings)
    name = request.path_params["name"]
    model = await _holder(state, request, body.snapshot, sessions=False, snapshots=True)
    tokens = await _ask_engine(lambda: model.engine.restore(body.snapshot, name))
    return JsonResponse({"id": name, "model": model.name, "from": body.snapshot, "tokens": tokens})


# -- snapshots -----------------------------------------------------------------------------------------------------


async def snapshots(request: HttpRequest) -> Response:
    """Named snapshots of the models in memory, the oldest first."""
    state = admin_state(request)
    data = []
    for model in _models(state, request):
        data += [_record(model, report, ()) for report in await _ask_engine(model.engine.snapshots)]
    return JsonResponse({"object": "list", "data": data})


async def drop_snapshot(request: HttpRequest) -> Response:
    """Forget a snapshot and what only it kept."""
    state = admin_state(request)
    name = request.path_params["name"]
    model = await _holder(state, request, name, sessions=False, snapshots=True)
    await _ask_engine(lambda: model.engine.drop_snapshot(name))
    return JsonResponse({"id": name, "model": model.name, "deleted": True})


# -- which model, and what it says ---------------------------------------------------------------------------------


def _models(state: ServerState, request: HttpRequest) -> list[Model]:
    """The loaded model that the query names, or all of them.

    Raises:
        ApiError: 404.
    """
    name = request.query_params.get("model")
    if name is None:
        return list(state.pool.loaded.values())
    state.pool.check_name(name)
    model = state.pool.loaded.get(name)
    if model is None:
        raise ApiError(404, f"the model {name!r} is not in memory", code="model_not_loaded", param="model")
    return [model]


async def _holder(
    state: ServerState, request: HttpRequest, name: str, *, sessions: bool = True, snapshots: bool = False
) -> Model:
    """The model that has a session or snapshot of this name.

    Raises:
        ApiError: 404 for none, 400 for several.
    """

    def known(loaded: LoadedLane) -> bool:
        book = loaded.lane.bank.sessions
        return (sessions and book.get(name) is not None) or (snapshots and name in book.snapshots)

    found = [model for model in _models(state, request) if await _ask(model, known)]
    if not found:
        kind = "session" if sessions else "snapshot"
        raise ApiError(404, f"there is no {kind} {shown(name)} in memory", code=f"unknown_{kind}", param=kind)
    if len(found) > 1:
        names = ", ".join(model.name for model in found)
        raise bad_request(f"{name!r} is known to several models ({names}): say ?model=", param="model")
    return found[0]


def _list(loaded: LoadedLane) -> list[tuple[SessionReport, str | None]]:
    from polytoken.cache.branches import report_sessions  # noqa: PLC0415  (needs MLX)

    return [(report, _title(_messages(loaded, report.name) or ())) for report in report_sessions(loaded.lane.bank)]


def _show(loaded: LoadedLane, name: str) -> tuple[SessionReport, list[dict[str, Any]] | None, tuple[int, ...]]:
    from polytoken.cache.branches import report_sessions  # noqa: PLC0415

    bank = loaded.lane.bank
    report = next((report for report in report_sessions(bank) if report.name == name), None)
    if report is None:  # cleared since it was looked for
        raise ApiError(404, f"there is no session {shown(name)} in memory", code="unknown_session", param="session")
    return report, _messages(loaded, name), bank.sessions.committed(name) or ()


def _messages(loaded: LoadedLane, name: str) -> list[dict[str, Any]] | None:
    """What the session's tokens stand for; None where only they are known, as after a restart."""
    stream = None if loaded.histories is None else loaded.histories.get(name)
    return None if stream is None else [dict(message) for message in stream.messages]


def _title(messages: Iterable[dict[str, Any]]) -> str | None:
    first = next((message for message in messages if message.get("role") == "user"), None)
    text = "" if first is None else " ".join(str(first.get("content") or "").split())
    return text[:_TITLE] or None


def _record(model: Model, report: SessionReport, busy: Iterable[str]) -> dict[str, Any]:
    return {
        "id": report.name,
        "model": model.name,
        "tokens": report.tokens,
        "turns": report.turns,
        "bytes": report.nbytes,
        "restorable_tokens": report.restorable,
        "live": report.live,
        "busy": report.name in busy,
        "idle_seconds": report.idle_seconds,
    }


def _busy(state: ServerState, model: Model) -> set[str]:
    """Sessions of which a turn is in progress."""
    members = (member for turn, other in state.turns.items() if other is model for member in turn.members)
    return {member.request.session for member in members if member.request.session is not None}


async def _ask(model: Model, act: Callable[[LoadedLane], T]) -> T:
    return await _ask_engine(lambda: model.engine.call(act))


async def _ask_engine(act: Callable[[], T]) -> T:
    """What the engine answers, awaited beside the loop.

    Raises:
        ApiError: its refusal.
    """
    try:
        return await asyncio.to_thread(act)
    except PolytokenError as error:
        raise from_engine(error) from None
