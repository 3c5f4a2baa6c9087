"""E08: states of a checkpoint that has changed under its name are a miss, and it is told that there are such."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import polytoken
from polytoken.cache.disk import environment
from polytoken.events import RequestStarted
from polytoken.request import Request
from polytoken.testkit.tiny import write_checkpoint


def ask(model: Path, folder: Path) -> tuple[int, str | None, int]:
    """Tokens of the prompt that come from the folder, why not more, and how many records there are of no use."""
    request = Request(request_id="r", token_ids=tuple(range(20, 60)), max_new_tokens=2, session="s", ignore_eos=True)
    with polytoken.load(model, lane="ar", device="cpu", prefill_chunk_size=8, session_dir=folder) as engine:
        (started,) = [event for event in engine.stream(request) if isinstance(event, RequestStarted)]
        summary = list(engine.run([]))[-1]
    return started.prefix_cache_tokens, started.prefix_cache_miss, summary.extra["disk_records_of_others"]


def set_member(path: Path, name: str, value: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), name: value}))


def other_weights(model: Path) -> None:
    write_checkpoint(model, "qwen3", seed=9)


def other_rotation(model: Path) -> None:
    set_member(model / "config.json", "rope_theta", 5000.0)
    set_member(model / "config.json", "rope_parameters", {"rope_type": "default", "rope_theta": 5000.0})


def other_template(model: Path) -> None:
    set_member(model / "tokenizer_config.json", "chat_template", "{{ messages[0]['content'] }}")


def other_tokenizer(model: Path) -> None:
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    set_member(model / "tokenizer.json", "normalizer", {"type": "NFC"} if not tokenizer.get("normalizer") else None)


@pytest.mark.parametrize("change", [other_weights, other_rotation, other_template, other_tokenizer])
def test_e08_a_checkpoint_changed_under_its_name_is_a_miss(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """E08: with the reason, and a count that says that the folder holds states of another."""
    model, folder = write_checkpoint(tmp_path / "model", "qwen3", seed=1).path, tmp_path / "states"
    assert ask(model, folder) == (0, "cold at token 0", 0)
    assert ask(model, folder)[0] == 40
    change(model)
    cached, reason, others = ask(model, folder)
    assert (cached, reason) == (0, "cold at token 0") and others > 0


def test_e08_states_of_another_version_of_the_code_are_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """E08: or of its packages, or another processor."""
    model, folder = write_checkpoint(tmp_path / "model", "qwen3", seed=1).path, tmp_path / "states"
    ask(model, folder)
    for part in ("_packages", "_machine"):
        with monkeypatch.context() as patch:
            patch.setattr(environment, part, lambda: "other")
            cached, _, others = ask(model, folder)
            assert cached == 0 and others > 0
    with monkeypatch.context() as patch:
        patch.setattr(environment, "_code", lambda package: "other")
        assert ask(model, folder)[0] == 0
    assert ask(model, folder)[0] == 40
