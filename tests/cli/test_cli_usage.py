"""A command line that cannot be honoured: one line that names the flag, exit 2, and no model loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import Runner  # type: ignore[import-not-found]

from polytoken.cli.app import app

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
FLAGS = [
    (verb, flag)
    for verb, command in COMMANDS.items()
    for parameter in command.params
    for flag in (*parameter.opts, *parameter.secondary_opts)
    if flag.startswith("--") and flag != "--help"
]


@pytest.mark.parametrize(("verb", "flag"), FLAGS)
def test_a_mistyped_flag_is_told_with_the_nearest_one(polytoken: Runner, verb: str, flag: str) -> None:
    typo = flag[:3] + flag[4:]
    outcome = polytoken(verb, typo, "1")
    assert outcome.status == 2
    assert outcome.error == f"no such option {typo}; did you mean {flag}?"
    assert outcome.out == ""


BAD_VALUES = [
    ("--max-new-tokens", "0"),
    ("--max-new-tokens", "many"),
    ("--seed", "1.5"),
    ("--think", "maybe"),
    ("--temperature", "-1"),
    ("--temperature", "nan"),
    ("--temperature", "inf"),
    ("--temperature", "warm"),
    ("--top-k", "-1"),
    ("--top-p", "1.1"),
    ("--min-p", "-0.1"),
    ("--repetition-penalty", "0"),
    ("--presence-penalty", "3"),
    ("--frequency-penalty", "-3"),
    ("--logit-bias", "5"),
    ("--logit-bias", "x=1"),
    ("--logit-bias", "5=101"),
    ("--logit-bias", "-5=1"),
    ("--stop", ""),
    ("--lane", "warp"),
    ("--device", "tpu"),
    ("--threads", "0"),
    ("--batch-size", "0"),
    ("--prefill-chunk-size", "0"),
    ("--prefix-cache-mib", "-1"),
    ("--session-cache-mib", "0"),
    ("--prefix-reuse", "some"),
    ("--max-queue-size", "0"),
]


@pytest.mark.parametrize(("flag", "value"), BAD_VALUES)
def test_a_bad_value_is_told_with_its_flag(polytoken: Runner, flag: str, value: str) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--prompt", "x", flag, value)
    assert outcome.status == 2
    assert flag in outcome.error
    assert outcome.out == ""


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--dtype", "int3"), ("--threads", "1000"), ("--products", "/no/such/library.so"), ("--revision", "main")],
)
def test_a_value_that_only_loading_can_judge(polytoken: Runner, tiny: str, flag: str, value: str) -> None:
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x", flag, value)
    assert outcome.status == 2
    assert flag in outcome.error


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ([], "--prompt"),
        (["--prompt", "x", "--requests-jsonl", "-"], "--requests-jsonl"),
        (["--prompt", "x", "--messages", "-"], "--messages"),
        (["--requests-jsonl", "-", "--stream"], "--stream"),
        (["--prompt", "x", "--json", "--stream"], "--stream"),
        (["--messages", "-", "--raw"], "--raw"),
        (["--requests-jsonl", "-", "--raw"], "--raw"),
        (["--prompt", "x", "--logprobs", "2"], "--logprobs"),
        (["--prompt", "x", "--json", "--logprobs", "21"], "--logprobs"),
        (["--prompt", "x", "--temperature"], "--temperature"),
    ],
)
def test_flags_that_cannot_both_have_an_effect(polytoken: Runner, arguments: list[str], names: str) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", *arguments)
    assert outcome.status == 2
    assert names in outcome.error


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        (["--against", "someone"], "--against"),
        (["--peer-products", "stock"], "--peer-products"),
        (["--prompt-tokens", "1"], "--prompt-tokens"),
        (["--new-tokens", "1"], "--new-tokens"),
        (["--rounds", "0"], "--rounds"),
        (["--depths", "1,x"], "--depths"),
        (["--depths", "1,0"], "--depth"),
        (["--depths", "2", "--lane", "ar"], "--depths"),
        (["--lane", "ar", "--policy", "block"], "--policy"),
    ],
)
def test_a_benchmark_that_cannot_be_made(polytoken: Runner, arguments: list[str], names: str) -> None:
    outcome = polytoken("bench", "--model", "no-such-model", *arguments)
    assert outcome.status == 2
    assert names in outcome.error


def test_what_is_missing_is_named(polytoken: Runner) -> None:
    assert polytoken("generate", "--prompt", "x").error == "--model is required; see `polytoken generate --help`"
    assert "NAME is required" in polytoken("pull").error
    assert "generate" in polytoken("generat").error  # the nearest verb


def test_the_empty_command_line_gets_the_help(polytoken: Runner) -> None:
    outcome = polytoken()
    assert outcome.status == 2
    assert outcome.err == ""
    assert "generate" in outcome.out


@pytest.mark.parametrize("verb", ["", *COMMANDS])
def test_help_of_every_verb(polytoken: Runner, verb: str) -> None:
    outcome = polytoken(*verb.split(), "--help")
    assert outcome.status == 0
    assert "Usage: polytoken" in outcome.out


@pytest.mark.parametrize(
    ("content", "reason"), [(b"{", "not JSON"), (b"[]", "messages"), (b"\xff", "not JSON"), (b'["x"]', "messages")]
)
def test_bad_messages(polytoken: Runner, tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "messages.json"
    path.write_bytes(content)
    outcome = polytoken("generate", "--model", "no-such-model", "--messages", str(path))
    assert outcome.status == 2
    assert outcome.error.startswith("--messages: ")
    assert reason in outcome.error


def test_messages_that_cannot_be_read(polytoken: Runner, tmp_path: Path) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--messages", str(tmp_path / "absent"))
    assert outcome.status == 2
    assert outcome.error.startswith("--messages: cannot read ")


def test_a_prompt_that_is_no_text(polytoken: Runner) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--prompt", "-", stdin=b"\xff")
    assert outcome.status == 2
    assert outcome.error.startswith("--prompt: ")


def test_an_unknown_model(polytoken: Runner, tmp_path: Path) -> None:
    for name in ("no-such-model", str(tmp_path), str(tmp_path / "absent"), "smollm2-135m"):
        outcome = polytoken("generate", "--model", name, "--prompt", "x")
        assert outcome.status == 2
        assert name in outcome.error
