"""What whoever runs the server may do: sessions, snapshots, open requests, models in memory; and who may not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from scripted import Script, scripted_engine
from server_running import Running
from starlette.requests import Request as HttpRequest

import polytoken
from polytoken.assembly import EngineOptions
from polytoken.server.admin import admin_state
from polytoken.server.app import make_app
from polytoken.server.errors import ApiError
from polytoken.server.pool import ModelPool
from polytoken.server.settings import ServerSettings

CHAT = "/v1/chat/completions"
ROOM = "/admin/sessions"


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    def load(options: EngineOptions) -> Any:
        return polytoken.load(tiny_path, prefill_chunk_size=32)

    engines = {"a": polytoken.load(tiny_path, prefill_chunk_size=32), "b": polytoken.load(tiny_path)}
    with Running(engines, open_engine=load) as running:
        yield running


def say(server: Running, session: str, history: list[Any], model: str = "a") -> dict[str, Any]:
    """One turn, which is added to the history."""
    body = {"model": model, "messages": history, "max_tokens": 8, "temperature": 0, "enable_thinking": False}
    status, record, _ = server.request("POST", CHAT, body, headers={"x-session-id": session})
    assert status == 200, record
    history.append({"role": "assistant", "content": record["choices"][0]["message"]["content"]})
    return record["usage"]["prompt_tokens_details"]


def get(server: Running, path: str) -> tuple[int, Any]:
    return server.request("GET", path)[:2]


def delete(server: Running, path: str) -> tuple[int, Any]:
    return server.request("DELETE", path)[:2]


def names(server: Running, path: str = ROOM) -> list[str]:
    return [item["id"] for item in get(server, path)[1]["data"]]


# -- sessions and snapshots ----------------------------------------------------------------------------------------


def test_a_session_is_listed_shown_and_cleared(server: Running) -> None:
    history = [{"role": "user", "content": "The river   rose in spring."}]
    say(server, "talk/1", history)
    (listed,) = [item for item in get(server, ROOM)[1]["data"] if item["id"] == "talk/1"]
    assert (listed["model"], listed["title"], listed["busy"]) == ("a", "The river rose in spring.", False)
    assert listed["tokens"] > 8
    assert listed["bytes"] > 0

    status, shown = get(server, f"{ROOM}/talk%2F1")
    assert status == 200
    assert [message["content"] for message in shown["messages"]] == [message["content"] for message in history]
    assert "The river   rose in spring." in shown["text"]
    assert names(server, f"{ROOM}?model=b") == []

    status, record = delete(server, f"{ROOM}/talk/1")
    assert (status, record["deleted"]) == (200, True)
    assert "talk/1" not in names(server)
    for path in (f"{ROOM}/talk/1", f"{ROOM}/talk/1?model=a"):
        for answer in (get(server, path), delete(server, path)):
            assert answer[0] == 404
            assert answer[1]["error"]["code"] == "unknown_session"


def test_a_fork_goes_on_alone_and_warm(server: Running) -> None:
    history = [{"role": "user", "content": "Once there was a market by the water. " * 4}]
    say(server, "trunk", history)
    status, record = server.post(f"{ROOM}/trunk/fork", {"to": "branch"})
    assert (status, record["id"], record["from"]) == (200, "branch", "trunk")
    before = get(server, f"{ROOM}/trunk")[1]["tokens"]
    assert say(server, "branch", [*history, {"role": "user", "content": "And then?"}])["cached_tokens"] >= before - 1
    assert get(server, f"{ROOM}/trunk")[1]["tokens"] == before

    for path, body, wanted in (
        ("trunk/fork", {"to": "branch"}, (409, "session_exists")),
        ("nobody/fork", {"to": "x"}, (404, "unknown_session")),
        ("trunk/fork", {}, (400, "missing_field")),
        ("trunk/fork", {"to": ""}, (400, "invalid_value")),
    ):
        status, record = server.post(f"{ROOM}/{path}", body)
        assert (status, record["error"]["code"]) == wanted


def test_a_snapshot_stays_and_is_gone_back_to(server: Running) -> None:
    history = [{"role": "user", "content": "A question to come back to."}]
    say(server, "long", history)
    status, record = server.post(f"{ROOM}/long/snapshot", {"snapshot": "before"})
    assert status == 200
    say(server, "long", [*history, {"role": "user", "content": "More."}])
    assert get(server, f"{ROOM}/long")[1]["tokens"] > record["tokens"]
    assert names(server, "/admin/snapshots") == ["before"]

    status, back = server.post(f"{ROOM}/long/restore", {"snapshot": "before"})
    assert (status, back["tokens"]) == (200, record["tokens"])
    assert get(server, f"{ROOM}/long")[1]["tokens"] == record["tokens"]
    assert server.post(f"{ROOM}/other/restore", {"snapshot": "before"})[0] == 200  # also into a new one
    assert "other" in names(server)

    for answer in (
        server.post(f"{ROOM}/long/restore", {"snapshot": "never"}),
        delete(server, "/admin/snapshots/never"),
    ):
        assert (answer[0], answer[1]["error"]["code"]) == (404, "unknown_snapshot")
    assert server.post(f"{ROOM}/never/snapshot", {"snapshot": "x"})[0] == 404
    assert delete(server, "/admin/snapshots/before")[0] == 200
    assert names(server, "/admin/snapshots") == []


def test_a_name_of_two_models_needs_the_model(server: Running) -> None:
    for model in ("a", "b"):
        say(server, "both", [{"role": "user", "content": "hello"}], model)
    status, record = get(server, f"{ROOM}/both")
    assert (status, record["error"]["param"]) == (400, "model")
    assert get(server, f"{ROOM}/both?model=b")[1]["model"] == "b"
    assert get(server, f"{ROOM}/both?model=c")[1]["error"]["code"] == "model_not_found"


def test_everything_is_cleared_at_once(server: Running) -> None:
    say(server, "x", [{"role": "user", "content": "hello"}])
    say(server, "y", [{"role": "user", "content": "hello"}], "b")
    assert delete(server, f"{ROOM}?model=b")[0] == 200
    assert "x" in names(server)
    assert "y" not in names(server)
    assert delete(server, ROOM)[1]["deleted"] is True
    assert names(server) == []
    assert get(server, "/admin/models")[1]["data"][0]["cache_bytes"] == 0


def test_a_path_says_all_that_it_answers(server: Running) -> None:
    status, record, headers = server.request("PUT", ROOM)
    assert (status, headers["allow"]) == (405, "DELETE, GET, HEAD")
    assert "DELETE, GET, HEAD" in record["error"]["message"]


# -- models --------------------------------------------------------------------------------------------------------


def test_models_are_unloaded_loaded_and_loaded_anew(server: Running, tiny_path: Path) -> None:
    record = get(server, "/admin/models")[1]
    first, second = record["data"]
    assert first["weight_bytes"] > 0
    assert first["cache_limit_bytes"] == 512 << 20
    assert record["memory"]["available_bytes"] > 0
    assert (second["id"], second["loaded"], second["changed_on_disk"]) == ("b", True, False)

    assert server.post("/admin/models/b/unload", None)[1] == {"id": "b", "loaded": False}
    assert server.post("/admin/models/b/unload", None)[0] == 200  # it is gone, as was asked
    assert get(server, f"{ROOM}?model=b")[1]["error"]["code"] == "model_not_loaded"
    assert server.post("/admin/models/b/load", None)[1]["loaded"] is True

    (tiny_path / "note.txt").write_text("one more file")
    assert get(server, "/admin/models")[1]["data"][1]["changed_on_disk"] is True
    status, record = server.post("/admin/models/b/reload", None)
    assert (status, record["loaded"], record["changed_on_disk"]) == (200, True, False)
    for path in ("load", "unload", "reload"):
        status, record = server.post(f"/admin/models/c/{path}", None)
        assert (status, record["error"]["code"]) == (404, "model_not_found")


# -- requests ------------------------------------------------------------------------------------------------------


def test_an_open_request_is_listed_and_cancelled_and_its_model_stays(scripted: Running, script: Script) -> None:
    script.says, gate = lambda prompt: "word " * 400, script.held(20)
    body = {"messages": [{"role": "user", "content": "hello"}], "metadata": {"session_id": "s"}}
    got: list[Any] = []
    thread = threading.Thread(target=lambda: got.append(scripted.stream(CHAT, body)))
    thread.start()
    deadline = time.monotonic() + 60
    while not (opened := get(scripted, "/admin/requests")[1]["data"]) or not opened[0]["generated_tokens"]:
        assert time.monotonic() < deadline
    assert (opened[0]["session"], opened[0]["phase"], opened[0]["model"]) == ("s", "decode", "scripted")
    status, record = scripted.post("/admin/models/scripted/unload", None)
    assert (status, record["error"]["code"]) == (409, "model_in_use")
    status, record = scripted.post(f"/admin/requests/{opened[0]['id']}/cancel", None)
    assert (status, record["cancelled"]) == (200, True)
    gate.set()
    thread.join(60)
    assert got[0][-2]["error"]["code"] == "cancelled"
    assert got[0][-1] == "[DONE]"
    assert scripted.post(f"/admin/requests/{opened[0]['id']}/cancel", None)[0] == 404
    assert get(scripted, "/admin/requests")[1]["data"] == []


# -- who may -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("admin", [(), ("boss",)])
def test_a_key_is_wanted(tmp_path: Path, admin: tuple[str, ...]) -> None:
    with Running({"s": scripted_engine(tmp_path, Script())}, api_keys=("user",), admin_keys=admin) as server:

        def status(path: str, key: str | None) -> int:
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            return server.request("GET", path, headers=headers)[0]

        good = admin[0] if admin else "user"
        for path in ("/admin/models", "/admin/requests", "/admin/statistics"):
            assert status(path, None) == 401
            assert status(path, "wrong") == 401
            assert status(path, good) == 200
            assert status(path, "user") == (401 if admin else 200)
        assert server.request("DELETE", ROOM)[0] == 401
        assert status("/v1/models", good) == status("/v1/models", "user") == 200
        assert status("/v1/models", "wrong") == 401


@pytest.mark.parametrize(
    ("keys", "client", "refused"),
    [
        ({}, "192.0.2.7", True),
        ({}, "127.0.0.1", False),
        ({}, "::1", False),
        ({"admin_keys": ("k",)}, "192.0.2.7", False),  # its key was checked in front
    ],
)
def test_without_a_key_only_this_machine_may(keys: Any, client: str, refused: bool) -> None:
    async def run() -> None:
        options = {"m": EngineOptions(model="m")}
        app = make_app(ModelPool(options, lambda _: pytest.fail("loaded")), ServerSettings(host="0.0.0.0", **keys))
        scope = {"type": "http", "path": "/admin/models", "client": (client, 5), "headers": [], "app": app}
        try:
            admin_state(HttpRequest({**scope, "root_path": "", "scheme": "http", "server": ("h", 80)}))
        except ApiError as error:
            assert refused
            assert (error.status, error.code) == (403, "admin_needs_key")
        else:
            assert not refused

    asyncio.run(run())
