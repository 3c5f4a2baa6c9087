"""Names to folders: what is on disk never asks the network, and the hub's cache is judged by what it lacks (H07)."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from checkpoint_writers import gguf_model, read_arrays
from huggingface_hub import errors
from hypothesis import given
from hypothesis import strategies as st

from polytoken.checkpoint import resolve as resolve_module
from polytoken.checkpoint.resolve import Resolved, looks_like_path, resolve
from polytoken.checkpoint.store import CheckpointStore
from polytoken.errors import CheckpointError
from polytoken.testkit.tiny import write_checkpoint

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "cache")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any question to the hub fails the test unless it sets an answer itself."""
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))


def refusal(model: str | Path, home: CheckpointStore, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        resolve(model, store=home, **options)
    assert "\n" not in str(caught.value)
    return caught.value


# Disk


@pytest.mark.parametrize("spelling", ["absolute", "relative", "hub-like", "path"])
def test_h07_a_folder_never_touches_the_network(
    home: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    folder = write_checkpoint(tmp_path / "org" / "name", "llama").path
    monkeypatch.chdir(tmp_path)
    model = {"absolute": str(folder), "relative": "./org/name", "hub-like": "org/name", "path": folder}[spelling]
    found = resolve(model, store=home)
    assert found.directory.resolve() == folder and (found.kind, found.name) == ("directory", "name")


@pytest.mark.parametrize(
    "model",
    [
        "./x",
        "../x",
        "/x/y",
        "~/x",
        "~",
        "x/",
        "a/b/c",
        "C:\\x",
        "C:/x",
        "x\\y",
        "m.gguf",
        "org/m.gguf",
        ".",
        "w.safetensors",
    ],
)
def test_h07_what_looks_like_a_path_is_never_asked_for(
    home: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    assert looks_like_path(model)
    assert refusal(model, home).code in ("missing_path", "not_a_checkpoint")


@pytest.mark.parametrize("model", ["org/name", "org/name.v2", "smollm2-135m", "a", "org/name@main"])
def test_what_does_not_look_like_a_path(model: str) -> None:
    assert not looks_like_path(model)


def test_a_path_object_is_a_path(home: CheckpointStore) -> None:
    assert refusal(Path("org/name"), home).code == "missing_path"


def test_folder_without_config_and_file_of_another_kind(home: CheckpointStore, tmp_path: Path) -> None:
    assert refusal(tmp_path, home).code == "not_a_checkpoint"
    (tmp_path / "x.bin").write_text("")
    assert refusal(tmp_path / "x.bin", home).code == "not_a_checkpoint"


def test_gguf_file_is_converted_and_reused(home: CheckpointStore, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "tiny", "llama", config={"vocab_size": 320}).path
    raw = gguf_model(json.loads((path / "config.json").read_text()), read_arrays(path / "model.safetensors"))
    (tmp_path / "m.gguf").write_bytes(raw)
    found = resolve(str(tmp_path / "m.gguf"), store=home)
    assert found.kind == "gguf" and found.name == "m" and resolve(tmp_path / "m.gguf", store=home) == found
    assert resolve(found.directory.name, store=home).directory == found.directory


# Catalogue


def test_catalogue_name_not_pulled_names_the_command(home: CheckpointStore) -> None:
    fault = refusal("smollm2-135m", home)
    assert fault.code == "not_pulled" and "polytoken pull smollm2-135m" in str(fault)


@pytest.mark.parametrize("model", ["smollm2-135", "gpt", "a b", "org/na me", "org/..", "-x/y", "org/a--b"])
def test_unknown_names(home: CheckpointStore, model: str) -> None:
    fault = refusal(model, home)
    assert fault.code == "unknown_model" and "smollm2-135m" in str(fault)


def test_no_name(home: CheckpointStore) -> None:
    assert refusal(" ", home).code == "unknown_model"


@given(st.text(max_size=30).filter(lambda text: "\0" not in text))
def test_any_text_gives_a_sentence(text: str) -> None:
    assert isinstance(looks_like_path(text), bool)


# Hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with one complete snapshot of org/name; the real client reads it, the network is absent."""
    cache = tmp_path / "hub"
    repo = cache / "models--org--name"
    write_checkpoint(repo / "snapshots" / COMMIT, "llama", shards=2)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "blobs").mkdir()
    real = huggingface_hub._snapshot_download.snapshot_download
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: real(*a, **k, cache_dir=cache))
    return repo / "snapshots" / COMMIT


def answers(monkeypatch: pytest.MonkeyPatch, what: Callable[[], Any]) -> None:
    """What the hub says when asked about the repository."""
    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", lambda *a, **k: what())


def http_error(kind: type[Exception]) -> Exception:
    fault = kind.__new__(kind)
    Exception.__init__(fault, "said no")
    return fault


def raise_(fault: Exception) -> None:
    raise fault


@pytest.mark.parametrize("model", ["org/name", "org/name@main", f"org/name@{COMMIT}"])
def test_h07_offline_and_cached(home: CheckpointStore, hub: Path, model: str) -> None:
    found = resolve(model, store=home, offline=True)
    assert found == Resolved(directory=hub, name="name", kind="hub", revision=COMMIT)


def test_h07_the_hubs_own_switch_counts(home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert resolve("org/name", store=home).directory == hub


def test_h07_a_cached_commit_needs_no_question(home: CheckpointStore, hub: Path) -> None:
    assert resolve("org/name", store=home, revision=COMMIT).revision == COMMIT


@pytest.mark.parametrize("name", ["config.json", "model-00002-of-00002.safetensors"])
def test_h07_offline_and_incomplete_names_the_file(home: CheckpointStore, hub: Path, name: str) -> None:
    (hub / name).unlink()
    fault = refusal("org/name", home, offline=True)
    assert fault.code == "missing_file" and fault.field == name and name in str(fault)


def test_h07_offline_and_truncated_names_the_file(home: CheckpointStore, hub: Path) -> None:
    name = "model-00001-of-00002.safetensors"
    (hub / name).write_bytes((hub / name).read_bytes()[:-1])
    fault = refusal("org/name", home, offline=True)
    assert fault.code == "truncated_file" and fault.field == name


def test_h07_offline_and_not_cached(home: CheckpointStore, hub: Path) -> None:
    for model in ("org/other", "org/name@dev"):
        fault = refusal(model, home, offline=True)
        assert fault.code == "not_cached" and model in str(fault)


def test_h07_no_answer_falls_back_to_the_cache_in_time(
    home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    answers(monkeypatch, lambda: release.wait(60))
    monkeypatch.setattr(resolve_module, "PROBE_TIMEOUT_S", 0.2)
    begin = time.monotonic()
    assert resolve("org/name", store=home).directory == hub
    fault = refusal("org/other", home)
    assert fault.code == "no_network" and time.monotonic() - begin < 10
    release.set()


def test_h07_no_route_and_not_cached(home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda: raise_(OSError("no route")))
    fault = refusal("org/other", home)
    assert fault.code == "no_network" and "no route" in str(fault)


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.RepositoryNotFoundError, "unknown_model"),
        (errors.RevisionNotFoundError, "bad_revision"),
        (errors.GatedRepoError, "hub_refused"),
    ],
)
def test_what_the_hub_refuses(home: CheckpointStore, monkeypatch: pytest.MonkeyPatch, kind: Any, code: str) -> None:
    answers(monkeypatch, lambda: raise_(http_error(kind)))
    assert refusal("org/name", home).code == code


def test_online_fetches_the_named_revision_with_our_patterns(
    home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, lambda: None)
    seen: dict[str, Any] = {}

    def download(repo: str, **options: Any) -> str:
        seen.update(options, repo=repo)
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve("org/name@v1", store=home).revision == COMMIT
    assert seen["repo"] == "org/name" and seen["revision"] == "v1" and not seen["local_files_only"]
    assert set(seen["allow_patterns"]) == {"*.json", "*.safetensors", "*.jinja", "tokenizer*"}


def test_download_reports_bytes_and_draws_nothing(
    home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    answers(monkeypatch, lambda: None)

    def download(repo: str, *, tqdm_class: Any, **options: Any) -> str:
        files = tqdm_class(total=3, desc="Fetching 3 files")
        written = tqdm_class(desc="Reconstructing (incomplete total...)", total=0, initial=0, unit="B", unit_scale=True)
        written.total = 10
        for count in (4, 6):
            written.update(count)
        files.update(3)
        files.close()
        written.close()
        return str(hub)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    calls: list[tuple[str, int, int, str]] = []
    resolve("org/name", store=home, progress=lambda *call: calls.append(call))
    assert calls == [("download", 4, 10, "bytes"), ("download", 10, 10, "bytes")]
    assert capfd.readouterr() == ("", "")


def test_h07_what_the_client_itself_finds_missing_is_named(
    home: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = errors.IncompleteSnapshotError("1 file is missing (tokenizer.json)", snapshot_path="x")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: raise_(fault))
    said = refusal("org/name", home, offline=True)
    assert said.code == "missing_file" and "tokenizer.json" in str(said)


def test_a_download_that_breaks_off(home: CheckpointStore, hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, lambda: None)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: raise_(OSError("reset\nby peer")))
    assert refusal("org/name", home).code == "no_network"


def test_contradicting_revisions(home: CheckpointStore) -> None:
    assert refusal("org/name@a", home, revision="b").code == "bad_revision"
    assert refusal("org/name@", home).code == "bad_revision"


def test_a_repository_without_usable_weights(home: CheckpointStore, hub: Path) -> None:
    for path in hub.glob("*.safetensors*"):
        path.unlink()
    assert refusal("org/name", home, offline=True).code == "missing_file"
    shutil.rmtree(hub)
    assert refusal("org/name", home, offline=True).code == "not_cached"
