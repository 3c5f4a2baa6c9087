"""Read a checkpoint's JSON files, refusing whatever would have to run its code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from polytoken.errors import CheckpointError

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
# Keys by which a checkpoint asks its reader to run a Python file that lies beside it.
_CODE_KEYS: Final = ("auto_map", "model_file", "custom_pipelines", "trust_remote_code")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        CheckpointError: `missing_file`, or `bad_config` when it is unreadable, not JSON or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} is missing; give a complete checkpoint folder", code="missing_file", field=path.name
        ) from None
    except (OSError, ValueError, RecursionError) as fault:
        reason = f"line {fault.lineno}: {fault.msg}" if isinstance(fault, json.JSONDecodeError) else str(fault)
        raise CheckpointError(f"{path} is not valid JSON ({reason})", code="bad_config", field=path.name) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} holds a JSON {type(value).__name__} where an object is needed", code="bad_config", field=path.name
        )
    return value


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint folder.

    Raises:
        CheckpointError: `missing_file`, `bad_config` (also without `model_type`), `wants_remote_code`.
    """
    config = read_json_object(directory / CONFIG)
    nested = config.get("text_config")
    for part in (config, nested if isinstance(nested, dict) else {}):
        for key in _CODE_KEYS:
            if part.get(key):
                raise CheckpointError(
                    f"{directory / CONFIG} names code of its own ({key}); checkpoint code is never run: use a version "
                    "of the model in its library's own format",
                    code="wants_remote_code",
                    field=key,
                )
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise CheckpointError(
            f"{directory / CONFIG} lacks model_type; is this a model's config?", code="bad_config", field="model_type"
        )
    return config


def read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json, or an empty record when the checkpoint has none."""
    path = directory / GENERATION
    return read_json_object(path) if path.exists() else {}
