"""What a server can be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from polytoken.errors import UsageError

LOOPBACK: Final = frozenset({"127.0.0.1", "localhost", "::1"})
_ABOVE_ZERO: Final = ("max_body_mib", "request_timeout", "keep_alive", "max_loaded")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Limits and doors of one server. Every field has an effect that /health reports.

    Attributes:
        host, port: where it listens; port 0 takes a free one.
        api_keys: accepted keys, empty for none needed.
        admin_keys: keys for /admin, which open everything else too; empty for the accepted ones.
        cors_origins: web origins that may call from a browser, `*` for all; empty for none.
        allowed_hosts: names beside the loopback ones under which a loopback server may be called.
        max_body_mib: largest request body, in MiB.
        max_body_items: most texts, names of members, lists and objects of a body: what it costs to read and render.
        max_body_values: most members of a body's lists and objects, such as the ids of a prompt.
        max_context: most prompt tokens of a request, None for what the model has room for.
        max_new_tokens: most new tokens of a request, None for what the context has room for.
        max_choices: largest `n`.
        rate_limit: requests per minute and client, 0 for no limit.
        request_timeout: seconds after which a request that is still running is ended with an error.
        keep_alive: seconds of silence after which a stream gets a comment.
        drain_seconds: how long a shutdown waits for open streams before it fails them.
        max_loaded: models in memory at once.
        access_log: whether each request is logged.

    Raises:
        UsageError: naming the flag.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    admin_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    max_body_mib: float = 8.0
    max_body_items: int = 100_000
    max_body_values: int = 1_000_000
    max_context: int | None = None
    max_new_tokens: int | None = None
    max_choices: int = 16
    rate_limit: int = 0
    request_timeout: float = 600.0
    keep_alive: float = 5.0
    drain_seconds: float = 30.0
    max_loaded: int = 1
    access_log: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise UsageError(f"--port must be from 0 to 65535, not {self.port}", field="--port")
        for name in _ABOVE_ZERO:
            if not getattr(self, name) > 0:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be above 0", field=flag)
        for name in ("max_context", "max_new_tokens", "max_choices", "max_body_items", "max_body_values"):
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least 1", field=flag)
        if self.rate_limit < 0 or self.drain_seconds < 0:
            flag = "--rate-limit" if self.rate_limit < 0 else "--drain-seconds"
            raise UsageError(f"{flag} must be 0 or more", field=flag)
        for name in ("api_keys", "admin_keys"):
            if any(not key.strip() for key in getattr(self, name)):
                flag = "--" + name.replace("_", "-").removesuffix("s")
                raise UsageError(f"{flag} must not be blank", field=flag)

    def keys_for(self, path: str) -> tuple[str, ...]:
        """Keys that open this path; none: it needs no key."""
        if path.startswith("/admin"):
            return self.admin_keys or self.api_keys
        return self.api_keys and self.api_keys + self.admin_keys

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOOPBACK

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * (1 << 20))
