"""What users mean when they type something else: the refusal names it, before anything is loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Runner  # type: ignore[import-not-found]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("remove", "rm"), ("delete", "rm"), ("list", "models"), ("ls", "models"), ("run", "generate"),
     ("download", "pull"), ("benhc", "bench"), ("Generate", "generate"), ("docter", "doctor"), ("chta", "chat")],
)  # fmt: skip
def test_another_word_for_a_verb(polytoken: Runner, typed: str, meant: str) -> None:
    outcome = polytoken(typed, "x")
    assert (outcome.status, outcome.error) == (2, f"no such command {typed}; did you mean {meant}?")


@pytest.mark.parametrize("typed", ["-model", "-m", "--max_new_tokens", "--Model=x"])
def test_another_form_of_a_flag(polytoken: Runner, typed: str) -> None:
    meant = "--max-new-tokens" if "max" in typed else "--model"
    assert polytoken("generate", typed, "x").error.endswith(f"did you mean {meant}?")


def test_a_prompt_in_a_file_goes_through_standard_input(polytoken: Runner) -> None:
    assert polytoken("generate", "--model", "m", "--prompt-file", "x").error.endswith("`--prompt - < FILE`")


def test_text_without_its_flag(polytoken: Runner) -> None:
    assert "--prompt" in polytoken("generate", "--model", "m", "hello").error


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--products", "Exact"), "did you mean exact?"),
        (("--device", "gpux"), "--device must be one of auto, cpu, gpu"),
        (("--revision", ""), "--revision is empty"),
    ],
)
def test_a_value_that_is_nearly_right(polytoken: Runner, flags: tuple[str, ...], told: str) -> None:
    outcome = polytoken("generate", "--model", "org/name", "--prompt", "x", *flags)
    assert outcome.status == 2 and told in outcome.error


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "/" + "y/" * 3000, "a/" + "b" * 400])
def test_a_name_that_no_file_system_has(polytoken: Runner, name: str) -> None:
    outcome = polytoken("generate", "--model", name, "--prompt", "x", "--offline")
    assert outcome.status == 2 and "internal" not in outcome.error


def test_an_empty_revision_behind_the_name(polytoken: Runner) -> None:
    assert "empty revision" in polytoken("inspect", "org/name@").error


def test_a_bias_outside_the_vocabulary_names_the_flag(polytoken: Runner, tiny: str) -> None:
    outcome = polytoken("generate", "--model", tiny, "--prompt", "x", "--logit-bias", "512=1")
    assert (outcome.status, outcome.error[:13]) == (2, "--logit-bias:")


def test_a_report_that_cannot_be_written_is_told_first(polytoken: Runner, tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent" / "report.json"):
        outcome = polytoken("bench", "--model", "no-such-model", "--output", str(path))
        assert outcome.status == 2 and outcome.error.startswith("--output: cannot write")
    polytoken("bench", "--model", "no-such-model", "--output", str(tmp_path / "report.json"))
    assert not (tmp_path / "report.json").exists()


@pytest.mark.parametrize("flag", ["--prefix-cache-mib", "--max-queue-size"])
@pytest.mark.parametrize("value", ["4.1GB", "0.1GiB", "1e3MB", "", "-1", "10 gb", "1.5"])
def test_g05_sizes_are_whole_numbers_or_refused(polytoken: Runner, flag: str, value: str) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--prompt", "x", flag, value)
    assert outcome.status == 2 and outcome.error.startswith(flag)


def test_requests_from_a_folder_are_refused_without_a_model(polytoken: Runner, tmp_path: Path) -> None:
    outcome = polytoken("generate", "--model", "no-such-model", "--requests-jsonl", str(tmp_path))
    assert outcome.status == 1 and [event["code"] for event in outcome.events] == ["unreadable_input"]


def test_a_hub_id_in_a_fresh_process(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "polytoken", "inspect", "org/name", "--offline"],
        capture_output=True, text=True, timeout=300, check=False, env={**os.environ, "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert finished.returncode == 2 and "not in the hub's cache" in finished.stderr
