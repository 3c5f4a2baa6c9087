"""`polytoken serve` as a process: banner, free port, taken port, signals."""

from __future__ import annotations

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polytoken.cli import serve as serve_module
from polytoken.cli.serve import name_models
from polytoken.errors import BackendError, UsageError


class Served:
    """A running `polytoken serve --port 0`."""

    def __init__(self, *arguments: str, prefix: tuple[str, ...] = ()) -> None:
        command = [*prefix, sys.executable, "-m", "polytoken", "serve", "--port", "0", *arguments]
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup themselves
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        signal.signal(signal.SIGHUP, before)
        assert self.process.stdout is not None
        self.banner: list[str] = []
        for line in self.process.stdout:
            self.banner.append(line)
            if line.startswith("  model"):
                break
        found = re.search(r"http://127\.0\.0\.1:(\d+)", "".join(self.banner))
        assert found is not None, self.process.communicate()[1]
        self.port = int(found[1])

    def request(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.request(method, path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=120)
        return self.process.returncode, err


@pytest.fixture
def served(tiny_path: Path) -> Iterator[Served]:
    server = Served("--model", f"small={tiny_path}", "--drain-seconds", "10", "--lane", "ar")
    yield server
    server.process.kill()
    server.process.communicate()


def test_the_banner_can_be_pasted_and_a_term_drains(served: Served, tiny_path: Path) -> None:
    """G04: a second server on the port fails with a message; SIGTERM ends streams cleanly, with status 0."""
    banner = "".join(served.banner)
    assert f"OPENAI_BASE_URL=http://127.0.0.1:{served.port}/v1" in banner
    assert f"ANTHROPIC_BASE_URL=http://127.0.0.1:{served.port} " in banner
    status, record = served.request("GET", "/health")
    assert (status, record["models"]["small"]["lane"]) == (200, "ar")
    assert record["settings"]["drain_seconds"] == 10  # G06: effective settings can be seen

    start = next(number for number, line in enumerate(served.banner) if line.startswith("    curl "))
    call = "".join(served.banner[start : start + 2]).replace('"messages"', '"max_tokens": 4, "messages"')
    told = subprocess.run(call, shell=True, capture_output=True, text=True, timeout=300, check=True)
    assert json.loads(told.stdout)["object"] == "chat.completion"

    command = [sys.executable, "-m", "polytoken", "serve", "--port", str(served.port), "--model", str(tiny_path)]
    second = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert second.returncode == 2
    assert f"port {served.port}" in second.stderr

    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "stream": True, "logit_bias": {}}
    got: list[Any] = []

    def ask() -> bool:
        """Whether the answer was seen being written: a random model may say few words."""
        nonlocal thread
        got.clear()
        thread = threading.Thread(target=lambda: got.append(served.request("POST", "/v1/chat/completions", body)))
        thread.start()
        while thread.is_alive():
            if served.request("GET", "/health")[1]["open_turns"]:
                return True
        return False

    thread: threading.Thread
    assert any(ask() for _ in range(20))
    status, err = served.end()
    thread.join()
    assert status == 0, err
    assert got[0][0] == 200
    assert got[0][1].endswith("data: [DONE]\n\n")
    assert '"finish_reason":"length"' in got[0][1] or '"finish_reason":"stop"' in got[0][1]
    assert "POST /v1/chat/completions 200" in err
    assert re.search(
        r" chatcmpl-\w+ small finished: prompt \d+ \(\d+ cached\), \d+ new, first after [\d.]+s, [\d.]+s\n", err
    )


@pytest.mark.parametrize("ignored", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_end_of_the_terminal_drains_unless_it_was_to_be_ignored(tiny_path: Path, ignored: bool) -> None:
    """As with SIGTERM, and `nohup` stays in force."""
    server = Served("--model", str(tiny_path), prefix=("nohup",) if ignored else ())
    try:
        server.process.send_signal(signal.SIGHUP)
        if ignored:
            time.sleep(0.5)
            assert server.request("GET", "/health")[0] == 200
            assert server.end(signal.SIGINT)[0] == 0
        else:
            assert server.process.wait(120) == 0
    finally:
        server.process.kill()
        server.process.communicate()


def test_all_files_of_the_package_are_installed() -> None:
    """A page, kernel or table that the build leaves out is missed only by those who install it."""
    root = Path(__file__).parents[2]
    patterns = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["polytoken"]
    package = root / "polytoken"
    kept = {file for pattern in patterns for file in package.glob(pattern)}
    built = {".py", ".pyc", ".so"}
    left = [file for file in package.rglob("*") if file.is_file() and file.suffix not in built and file not in kept]
    assert left == []


def test_what_is_missing_is_named_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_module, "_NEEDED", ("starlette", "no_such_package"))
    with pytest.raises(
        BackendError, match=r'serve needs no_such_package: pip install "polytoken\[server\]"'
    ) as missing:
        serve_module._check_installed()
    assert missing.value.code == "missing_server"


def test_a_session_outlives_the_server_in_its_folder(tiny_path: Path, tmp_path: Path) -> None:
    history: list[Any] = [{"role": "user", "content": "The river rose in spring and the town moved its market."}]
    cached = []
    for _ in range(2):
        server = Served("--model", f"m={tiny_path}", "--session-dir", str(tmp_path), "--session-disk-mib", "64")
        try:
            body = {"messages": history, "max_tokens": 8, "temperature": 0, "metadata": {"session_id": "s"}}
            status, record = server.request("POST", "/v1/chat/completions", body)
            assert status == 200, record
            assert server.end()[0] == 0
        finally:
            server.process.kill()
            server.process.communicate()
        cached.append(record["usage"]["prompt_tokens_details"]["cached_tokens"])
        told = record["choices"][0]["message"]["content"]
        history += [{"role": "assistant", "content": told}, {"role": "user", "content": "And then?"}]
    assert cached[0] == 0 < cached[1]


def test_models_have_names() -> None:
    assert name_models(["a=/x/y", "org/model", "smollm2-135m"]) == {
        "a": "/x/y", "model": "org/model", "smollm2-135m": "smollm2-135m",
    }  # fmt: skip
    with pytest.raises(UsageError, match="two models are called 'm'"):
        name_models(["x/m", "y/m"])
