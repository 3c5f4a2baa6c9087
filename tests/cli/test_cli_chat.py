"""Conversations: commands, history, and a chat through a pipe."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from conftest import Runner  # type: ignore[import-not-found]

from polytoken.cli.conversation import Conversation, Leave
from polytoken.errors import UsageError
from polytoken.request import RequestDefaults


@pytest.fixture
def conversation() -> Conversation:
    return Conversation(RequestDefaults(seed=7))


def test_history_is_sent_again(conversation: Conversation) -> None:
    conversation.command("/system Be brief.")
    conversation.answered("one", "1")
    request = conversation.ask("two")
    assert request.messages is not None
    assert [(turn["role"], turn["content"]) for turn in request.messages] == [
        ("system", "Be brief."),
        ("user", "one"),
        ("assistant", "1"),
        ("user", "two"),
    ]
    assert request.seed == 7
    assert conversation.ask("two").request_id != request.request_id
    conversation.command("/reset")
    assert conversation.ask("three").messages == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "three"},
    )
    conversation.command("/system")
    assert conversation.ask("four").messages == ({"role": "user", "content": "four"},)


def test_settings_change_the_next_request(conversation: Conversation) -> None:
    conversation.command("/seed -3")
    conversation.command("/temperature 0.5")
    request = conversation.ask("x")
    assert (request.seed, request.sampling.temperature) == (-3, 0.5)


def test_a_saved_conversation_is_loaded_again(conversation: Conversation, tmp_path: Path) -> None:
    conversation.command("/system Grüße")
    conversation.answered("a", "b")
    path = tmp_path / "with a blank.json"
    conversation.command(f"/save {path}")
    other = Conversation(RequestDefaults())
    other.command(f"/load {path}")
    assert (other.system, other.turns) == (conversation.system, conversation.turns)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": 2}', '{"format": 1, "messages": [1]}', '{"format": 1}'])
def test_a_file_that_is_no_conversation_changes_nothing(
    conversation: Conversation, tmp_path: Path, content: str
) -> None:
    conversation.answered("a", "b")
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(UsageError, match=r"other\.json"):
        conversation.command(f"/load {path}")
    assert len(conversation.turns) == 2


@pytest.mark.parametrize(
    "line",
    ["/nothing", "/seed", "/seed x", "/temperature", "/temperature -1", "/temperature nan", "/save", "/load",
     "/load /no/such/file", "/save /no/such/folder/file"],
)  # fmt: skip
def test_a_command_that_cannot_be_done(conversation: Conversation, line: str) -> None:
    before = conversation.defaults
    with pytest.raises(UsageError):
        conversation.command(line)
    assert conversation.defaults == before


def test_leaving(conversation: Conversation) -> None:
    with pytest.raises(Leave):
        conversation.command("/exit")


def test_a_chat_through_a_pipe(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    script = f"hello\nand \\\nmore\n\n/save {path}\n/stats\n/exit\nnever asked\n"
    ask = ("chat", "--model", tiny, "--max-new-tokens", "8", "--system", "S", "--prefill-chunk-size", "16", "--verbose")
    outcome = polytoken(*ask, stdin=script)
    assert outcome.status == 0
    record = json.loads(path.read_text())
    assert record["system"] == "S"
    assert [turn["content"] for turn in record["messages"]][::2] == ["hello", "and \nmore"]
    assert [turn["role"] for turn in record["messages"]] == ["user", "assistant"] * 2
    assert "2 turns, 16 tokens" in outcome.out
    assert "cached" in outcome.err  # the second turn reused the first one's prompt
    assert outcome.out.count("\n") >= 2


def test_what_commands_say_is_output_on_a_pipe_too(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    path = tmp_path / "chat.json"
    script = f"/system Be brief.\n/seed 3\n/temperature 0.5\n/save {path}\n/load {path}\n/stats\n/reset\n/help\n"
    outcome = polytoken("chat", "--model", tiny, stdin=script)
    assert (outcome.status, outcome.err) == (0, "")
    told = outcome.out.splitlines()
    assert told[:3] == ["system prompt set", "seed 3", "temperature 0.5"]
    assert "saved" in told[3]
    assert "loaded" in told[4]
    assert told[5].startswith("0 turns")
    assert told[6] == "conversation cleared"
    assert told[7].startswith("/system")


def test_a_chat_goes_on_after_an_error_and_tells(polytoken: Runner, tiny: str) -> None:
    outcome = polytoken("chat", "--model", tiny, "--max-new-tokens", "4", stdin="/nothing\n" + "x" * 600 + "\nhi\n")
    assert outcome.status == 1
    errors = outcome.err.splitlines()
    assert len(errors) == 2
    assert "/help" in errors[0]
    assert "/reset" in errors[1]
    assert outcome.out.strip()


def test_the_same_words_as_generate(polytoken: Runner, tiny: str) -> None:
    generated = polytoken("generate", "--model", tiny, "--prompt", "hello", "--max-new-tokens", "12")
    chatted = polytoken("chat", "--model", tiny, "--max-new-tokens", "12", stdin="hello\n")
    assert chatted.out.strip() == generated.out.strip()
