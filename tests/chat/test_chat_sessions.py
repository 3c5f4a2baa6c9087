"""Chats that are kept under a name, over restarts of the command."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from polytoken.cli import main
from polytoken.cli.chat_files import SavedConversation, read_conversation, write_conversation
from polytoken.cli.conversation import Conversation
from polytoken.errors import UsageError
from polytoken.request import RequestDefaults
from polytoken.testkit.tiny import write_checkpoint

# Opens a block of reasoning, and strips it from every turn that is over.
TEMPLATE = (
    "{%- for m in messages -%}"
    "{{ '<|im_start|>' + m['role'] + '\\n' + m['content'].split('</think>')[-1].lstrip('\\n') + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n<think>\\n' }}{%- endif -%}"
)
PLAIN = TEMPLATE.replace("<think>\\n", "")


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny hybrid whose template opens and strips reasoning."""
    return written(tmp_path_factory.mktemp("thinker"), TEMPLATE)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same without reasoning."""
    return written(tmp_path_factory.mktemp("talker"), PLAIN)


def written(folder: Path, template: str) -> str:
    path = write_checkpoint(folder, "qwen3_5", seed=3).path
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return str(path)


@dataclass(frozen=True)
class Finished:
    """What one command left behind."""

    returncode: int
    stdout: str
    stderr: str


def command(model: str, *arguments: str) -> list[str]:
    return ["chat", "--model", model, "--max-new-tokens", "12", "--lane", "ar", "--verbose", *arguments]


def chat(model: str, *arguments: str, stdin: str, home: Path) -> Finished:
    """One chat in this process, which has paid for its imports; the model is loaded anew."""
    buffers = [io.BytesIO(text.encode()) for text in (stdin, "", "")]
    streams = [io.TextIOWrapper(buffer, "utf-8") for buffer in buffers]  # each closes its buffer when it is dropped
    log = logging.getLogger("polytoken")
    before = log.handlers, log.propagate, warnings.showwarning
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home))
        for name, stream in zip(("stdin", "stdout", "stderr"), streams, strict=True):
            patch.setattr(sys, name, stream)
        status = main(command(model, *arguments))
        sys.stdout.flush()
        sys.stderr.flush()
        out, err = (buffer.getvalue().decode() for buffer in buffers[1:])
    log.handlers, log.propagate, warnings.showwarning = before
    return Finished(status, out, err)


def chat_in_a_process(model: str, *arguments: str, stdin: str, home: Path) -> Finished:
    done = subprocess.run(
        [sys.executable, "-m", "polytoken", *command(model, *arguments)],
        input=stdin, capture_output=True, text=True, timeout=300, check=False,
        env={**os.environ, "XDG_CACHE_HOME": str(home)},
    )  # fmt: skip
    return Finished(done.returncode, done.stdout, done.stderr)


def cached(finished: Finished) -> list[int]:
    """Cached tokens of each turn, as the closing lines tell."""
    lines = [line for line in finished.stderr.splitlines() if "tokens/forward" in line]
    return [int(line.rsplit(", ", 1)[1].split()[0]) if line.endswith("cached") else 0 for line in lines]


def saved(path: Path) -> dict[str, Any]:
    record = json.loads(path.read_text())
    assert record["format"] == 2
    return dict(record)


def test_e15_a_chat_is_resumed_and_computes_only_what_is_new(thinker: str, tmp_path: Path) -> None:
    """Reasoning that the template strips stays in the cache, also over a restart: everything committed is reused."""
    folder = tmp_path / "states"
    ask = ("--session", "work", "--session-dir", str(folder))
    first = chat_in_a_process(thinker, *ask, stdin="hello\nagain\n", home=tmp_path)
    assert (first.returncode, "Traceback" in first.stderr) == (0, False), first.stderr
    file = folder / "conversations" / "work.json"
    record = saved(file)
    stops = [turn["stop"] for turn in record["stream"]["turns"]]
    assert len(stops) == 2
    assert cached(first) == [0, stops[0]]
    second = chat_in_a_process(thinker, *ask, stdin="and now?\n", home=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "4 messages resumed" in second.stderr
    assert cached(second) == [stops[1]]
    after = saved(file)
    assert after["stream"]["ids"][: stops[1]] == record["stream"]["ids"]
    assert [turn["role"] for turn in after["messages"]] == ["user", "assistant"] * 3


def test_a_resumed_chat_answers_as_one_that_went_on(talker: str, tmp_path: Path) -> None:
    """Two loads give, to the letter, what one load gives; without a session folder the words are kept alone."""
    whole = chat(talker, "--session", "one", stdin="hello\nmore\n", home=tmp_path)
    assert whole.returncode == 0, whole.stderr
    chat(talker, "--session", "two", stdin="hello\n", home=tmp_path)
    chat(talker, "--session", "two", stdin="more\n", home=tmp_path)
    folder = tmp_path / "polytoken" / "conversations"
    one, two = saved(folder / "one.json"), saved(folder / "two.json")
    assert one["messages"] == two["messages"]
    assert one["stream"]["ids"] == two["stream"]["ids"]
    assert sorted(path.name for path in folder.iterdir()) == ["one.json", "two.json"]
    listed = chat(talker, stdin="/sessions\n", home=tmp_path)
    assert listed.stdout.split() == ["two", "one"]


def test_undo_and_retry(talker: str, tmp_path: Path) -> None:
    script = "/undo\nhello\nmore\n/undo\n/retry\n/undo\n/undo\nlast\n"
    finished = chat(talker, "--session", "s", stdin=script, home=tmp_path)
    errors = [line for line in finished.stderr.splitlines() if "error" in line]
    assert finished.returncode == 1  # the two undos that found nothing
    assert len(errors) == 2, finished.stderr
    lines = finished.stdout.splitlines()
    assert [line for line in lines if line.startswith("took back")] == ["took back: more", "took back: hello"]
    record = saved(tmp_path / "polytoken" / "conversations" / "s.json")
    assert [turn["content"] for turn in record["messages"]][::2] == ["last"]


def test_a_name_that_could_leave_the_folder_is_refused(talker: str, tmp_path: Path) -> None:
    for name in ("../x", "", ".hidden", "a/b", "x" * 65):
        finished = chat(talker, "--session", name, stdin="hello\n", home=tmp_path)
        assert finished.returncode == 2
        assert "--session" in finished.stderr


def test_a_damaged_file_is_told_and_left_alone(talker: str, tmp_path: Path) -> None:
    file = tmp_path / "polytoken" / "conversations" / "s.json"
    file.parent.mkdir(parents=True)
    file.write_text('{"format": 2')
    finished = chat(talker, "--session", "s", stdin="hello\n", home=tmp_path)
    assert finished.returncode != 0
    assert "s.json" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert file.read_text() == '{"format": 2'


def test_reasoning_is_shown_or_hidden(thinker: str, tmp_path: Path) -> None:
    hidden = chat(thinker, stdin="hello\n", home=tmp_path)
    shown = chat(thinker, "--show-reasoning", stdin="hello\n", home=tmp_path)
    assert hidden.stdout.strip() == ""  # twelve random tokens close no block
    assert shown.stdout.strip() != ""


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    before = SavedConversation("s", [{"role": "user", "content": "a"}], "m", {"ids": [1]})
    write_conversation(path, before)
    assert read_conversation(path) == before

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left"):
        write_conversation(path, SavedConversation(None, []))
    assert read_conversation(path) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["c.json"]


def test_every_try_has_a_seed_of_its_own() -> None:
    conversation = Conversation(RequestDefaults(seed=7))
    assert conversation.ask("x").seed == 7
    conversation.tries = 2
    request = conversation.ask("x")
    assert (request.seed, request.session) == (9, "chat")
