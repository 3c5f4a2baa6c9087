"""Running the application: socket, signals, drain, banner."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from polytoken.errors import UsageError
from polytoken.server.app import make_app
from polytoken.server.connection import uvicorn_config
from polytoken.server.pool import ModelPool
from polytoken.server.settings import ServerSettings
from polytoken.server.state import ServerState

BACKLOG = 2048
Announce = Callable[[str], None]


class _Server(uvicorn.Server):
    """uvicorn without its own signal handling, which would close the door before streams have ended."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def open_socket(settings: ServerSettings) -> socket.socket:
    """The listening socket.

    Raises:
        UsageError: the address is taken or not ours.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((settings.host, settings.port))
        door.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        door.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"cannot listen on {settings.host} port {settings.port}: {reason}; --port 0 takes a free one",
            code="cannot_listen",
            field="--port",
        ) from None
    return door


def base_url(settings: ServerSettings, port: int) -> str:
    """Where clients find the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(settings.host, settings.host)
    return f"http://{f'[{host}]' if ':' in host and not host.startswith('[') else host}:{port}"


def outside_url(port: int) -> str | None:
    """Where other machines find a server that listens everywhere; None where there is no way out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: it only says which of our addresses would be used
        except OSError:
            return None
        return f"http://{probe.getsockname()[0]}:{port}"


async def serve(
    door: socket.socket, settings: ServerSettings, make_pool: Callable[[], ModelPool], announce: Announce
) -> None:
    """Serve until SIGINT, SIGTERM or the end of the terminal (SIGHUP), then drain.

    Open streams finish within the settings' time, or are failed.

    A second signal ends at once.

    Args:
        door: listening.
        make_pool: called on the loop.
        announce: gets the base URL once requests are answered.
    """
    app = make_app(make_pool(), settings)
    state: ServerState = app.state.server
    server = _Server(uvicorn_config(app))
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []

    async def leave() -> None:
        await state.drain()
        server.should_exit = True

    def on_signal() -> None:
        if leaving:
            server.should_exit = server.force_exit = True
            return
        leaving.append(loop.create_task(leave()))

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # what nohup started stays
            loop.add_signal_handler(number, on_signal)
    running = loop.create_task(server.serve(sockets=[door]))
    while not server.started and not running.done():
        await asyncio.sleep(0.01)
    if not running.done():
        announce(base_url(settings, door.getsockname()[1]))
    await running
