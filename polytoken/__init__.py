"""Polytoken: LLM inference on MLX that commits several tokens per forward pass and can prove it did so rightly.

The names below are loaded on first use, so that importing the package needs no MLX and takes no time.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polytoken.api import chat, generate, load, load_model, make_request, open_engine, stream, watch_prefill
    from polytoken.assembly import EngineOptions
    from polytoken.engine import Engine
    from polytoken.errors import PolytokenError
    from polytoken.request import Request, RequestDefaults, SamplingParams, parse_record

__version__ = "0.1.0"

_HOMES = {
    "EngineOptions": "polytoken.assembly",
    "chat": "polytoken.api",
    "generate": "polytoken.api",
    "load": "polytoken.api",
    "load_model": "polytoken.api",
    "make_request": "polytoken.api",
    "open_engine": "polytoken.api",
    "stream": "polytoken.api",
    "watch_prefill": "polytoken.api",
    "Engine": "polytoken.engine",
    "PolytokenError": "polytoken.errors",
    "Request": "polytoken.request",
    "RequestDefaults": "polytoken.request",
    "SamplingParams": "polytoken.request",
    "parse_record": "polytoken.request",
}

__all__ = [
    "Engine",
    "EngineOptions",
    "PolytokenError",
    "Request",
    "RequestDefaults",
    "SamplingParams",
    "chat",
    "generate",
    "load",
    "load_model",
    "make_request",
    "open_engine",
    "parse_record",
    "stream",
    "watch_prefill",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'polytoken' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
