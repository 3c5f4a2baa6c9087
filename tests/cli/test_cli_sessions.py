"""`--session-dir` and `polytoken sessions`: warm after a restart, listed, shown, cleared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Outcome, Runner  # type: ignore[import-not-found]


def ask(polytoken: Runner, model: str, folder: Path, *sessions: str, text: str = "hello there, " * 12) -> Outcome:
    lines = [
        json.dumps({"request_id": f"r{i}", "prompt": text + name, "session": name}) for i, name in enumerate(sessions)
    ]
    outcome = polytoken(
        "generate", "--model", model, "--requests-jsonl", "-", "--max-new-tokens", "6", "--prefill-chunk-size", "16",
        "--ignore-eos", "--session-dir", str(folder), "--batch-size", "1", stdin="\n".join(lines),
    )  # fmt: skip
    assert outcome.status == 0, outcome.err
    return outcome


def results(outcome: Outcome) -> list[dict[str, Any]]:
    return outcome.events_of("generation_result")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "states"


@pytest.mark.parametrize("kind", ["tiny", "hybrid"])
def test_a_second_process_is_warm_and_says_the_same(
    polytoken: Runner, folder: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    (first,) = results(ask(polytoken, model, folder, "a"))
    (second,) = results(ask(polytoken, model, folder, "a"))
    assert first["prefix_cache_tokens"] == 0
    assert second["prefix_cache_tokens"] >= first["prompt_tokens"] - 1
    assert second["token_ids"] == first["token_ids"]


def test_names_cannot_steer_a_terminal(polytoken: Runner, tiny: str, folder: Path) -> None:
    """A name may be any text, perhaps a stranger's: it is shown on one line, and found by what it is."""
    wild = "a\nb\x1b[31m[bold]\u202e"
    ask(polytoken, tiny, folder, wild, "tame")
    listed = polytoken("sessions", "list", "--session-dir", str(folder))
    names = [row.split("  ")[0] for row in listed.out.splitlines()]
    assert names == ["name", "tame", r"a\nb\x1b[31m[bold]\u202e"]
    shown = polytoken("sessions", "show", wild, "--session-dir", str(folder))
    assert shown.status == 0 and shown.out.isascii() and "\x1b" not in shown.out
    missing = polytoken("sessions", "show", "\x1b[2J", "--session-dir", str(folder))
    assert missing.status == 2 and missing.err.startswith(r"polytoken: error: there is no session '\x1b[2J'")


def test_sessions_are_listed_shown_and_cleared(polytoken: Runner, tiny: str, folder: Path) -> None:
    done = results(ask(polytoken, tiny, folder, "first", "second one"))
    report = json.loads(polytoken("sessions", "list", "--session-dir", str(folder), "--json").out)
    assert [each["name"] for each in report["sessions"]] == ["second one", "first"]
    for each, result in zip(report["sessions"], reversed(done), strict=True):
        assert each["tokens"] == result["prompt_tokens"] + result["generated_tokens"]
        assert each["stored_tokens"] == each["tokens"]
        assert each["bytes"] > each["shared_bytes"] > 0
    assert report["bytes"] >= sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    listed = polytoken("sessions", "list", "--session-dir", str(folder))
    head, *rows = listed.out.splitlines()
    assert head.split() == ["name", "kind", "model", "tokens", "stored", "size", "last", "used"]
    assert [row.split()[0] for row in rows] == ["second", "first"]
    assert "records" in listed.err

    shown = polytoken("sessions", "show", "first", "--session-dir", str(folder))
    fields = dict(line.split(maxsplit=1) for line in shown.out.splitlines() if not line.startswith("last used"))
    assert fields["name"] == "first"
    assert {"checkpoint", "code", "packages", "machine", "grid", "numerics", "template_hash"} <= fields.keys()
    (one,) = json.loads(polytoken("sessions", "show", "first", "--session-dir", str(folder), "--json").out)
    assert one == report["sessions"][1]

    assert "--yes" in polytoken("sessions", "clear", "first", "--session-dir", str(folder)).error
    cleared = polytoken("sessions", "clear", "first", "--session-dir", str(folder), "--yes")
    assert (cleared.status, cleared.out) == (0, "")
    assert "1 session deleted" in cleared.err
    left = json.loads(polytoken("sessions", "list", "--session-dir", str(folder), "--json").out)
    assert [each["name"] for each in left["sessions"]] == ["second one"]
    assert left["sessions"][0]["stored_tokens"] == left["sessions"][0]["tokens"]  # it keeps what it shared
    assert left["sessions"][0]["shared_bytes"] == 0

    cleared = polytoken("sessions", "clear", "--all", "--session-dir", str(folder), "--yes")
    assert "1 session deleted" in cleared.err
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["lock"]
    assert "nothing to clear" in polytoken("sessions", "clear", "--all", "--session-dir", str(folder), "--yes").err
    assert "no named sessions" in polytoken("sessions", "list", "--session-dir", str(folder)).err


@pytest.mark.parametrize("kind", ["tiny", "canvas", "export"])
def test_a_conversation_of_chat_comes_back_warm_and_goes_with_its_session(
    polytoken: Runner, folder: Path, kind: str, request: pytest.FixtureRequest
) -> None:
    """On ar, and on the canvas lane without and with latent deliberation."""
    model = request.getfixturevalue(kind)

    def talk(line: str) -> Outcome:
        return polytoken(
            "chat", "--model", model, "--session", "mine", "--session-dir", str(folder), "--max-new-tokens", "5",
            "--prefill-chunk-size", "8", "--verbose", stdin=line + "\n",
        )  # fmt: skip

    assert talk("hello there").status == 0
    second = talk("and then?")
    assert second.status == 0
    assert "2 messages resumed" in second.err
    assert " cached" in second.err
    report = json.loads(polytoken("sessions", "list", "--session-dir", str(folder), "--json").out)
    assert report["conversations"] == ["mine"]
    assert [each["name"] for each in report["sessions"]] == ["mine"]
    assert "mine" in polytoken("sessions", "list", "--session-dir", str(folder)).err
    assert "1 session deleted" in polytoken("sessions", "clear", "mine", "--session-dir", str(folder), "--yes").err
    assert not list(folder.rglob("*.json"))


def test_what_cannot_be_is_told_in_one_line(
    polytoken: Runner, tiny: str, canvas: str, folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    for words, told in (
        (["sessions", "list"], "--session-dir is required"),
        (["sessions", "list", "--session-dir", str(folder)], "there is no folder"),
        (["sessions", "show", "a", "--session-dir", str(file)], "is no folder"),
        (["sessions", "show", "a", "--session-dir", str(tmp_path)], "there is no session 'a'"),
        (["sessions", "clear", "a", "--session-dir", str(tmp_path), "--yes"], "there is no session 'a'"),
        (["sessions", "clear", "--session-dir", str(tmp_path)], "name one session, or give --all"),
        (["sessions", "clear", "a", "--all", "--session-dir", str(tmp_path)], "name one session, or give --all"),
        (["generate", "--model", tiny, "--prompt", "x", "--session-dir", str(file)], "is no folder"),
        (["generate", "--model", tiny, "--prompt", "x", "--session-disk-mib", "5"], "needs --session-dir"),
        (
            ["generate", "--model", tiny, "--prompt", "x", "--session-dir", str(folder), "--prefix-cache-mib", "0"],
            "needs --prefix-cache-mib",
        ),
        (
            ["chat", "--model", tiny, "--session-cache-mib", "5", "--prefix-cache-mib", "0"],
            "--session-cache-mib needs --prefix-cache-mib",
        ),
        (["generate", "--model", canvas, "--prompt", "x", "--prefix-reuse", "close"], "canvas lane goes on from whole"),
    ):
        outcome = polytoken(*words)
        assert outcome.status == 2, words
        assert told in outcome.error, words
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_one_warning(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    outcome = ask(polytoken, tiny, tmp_path / "file" / "below", "a")
    assert len(results(outcome)) == 1
    warnings = [line for line in outcome.err.splitlines() if "warning" in line]
    assert len(warnings) == 1 and "--session-dir" in warnings[0] and "nothing is saved" in warnings[0]


def test_e08_what_a_state_depends_on_changed_in_turn(polytoken: Runner, tiny: str, hybrid: str, folder: Path) -> None:
    """E08: other weights, another chunk grid or dtype: a miss each time, and the old model's states stay its own."""
    ask(polytoken, tiny, folder, "a")
    (other,) = results(ask(polytoken, hybrid, folder, "a"))
    assert other["prefix_cache_tokens"] == 0
    for words in (["--dtype", "bfloat16"], ["--prefill-chunk-size", "32"], ["--products", "stock"]):
        outcome = polytoken(
            "generate", "--model", tiny, "--prompt", "hello there, " * 12 + "a", "--json", "--max-new-tokens", "1",
            *(words if "--prefill-chunk-size" in words else [*words, "--prefill-chunk-size", "16"]),
            "--session-dir", str(folder),
        )  # fmt: skip
        (started,) = outcome.events_of("request_started")
        assert started["prefix_cache_tokens"] == 0, words
    (again,) = results(ask(polytoken, tiny, folder, "a"))
    assert again["prefix_cache_tokens"] > 0
    report = json.loads(polytoken("sessions", "list", "--session-dir", str(folder), "--json").out)
    assert [each["name"] for each in report["sessions"]] == ["a", "a"]  # of two models
