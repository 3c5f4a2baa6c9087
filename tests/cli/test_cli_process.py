"""What only a process of its own can show: imports, closed pipes, a missing backend, no tracebacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import pytest

COMMAND = [sys.executable, "-m", "polytoken"]
HEAVY = ("mlx", "mlx_lm", "numpy", "transformers", "huggingface_hub", "tokenizers")


def python(code: str, **words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, **words
    )


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys; from polytoken.cli import main; status = main(['generate', '--help']); "
        "main(['generate', '--modle']); "
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr); sys.exit(status)"
    )
    finished = python(code)
    assert finished.returncode == 0
    assert finished.stderr.splitlines()[-1] == "[]"


HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == {name!r} or name.startswith({name!r} + "."):
            raise ImportError({reason!r})
sys.meta_path.insert(0, Hide())
from polytoken.cli import main
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate", "--model", "m", "--prompt", "x"],
        ["chat", "--model", "m"],
        ["pull", "smollm2-135m"],
        ["inspect", "m"],
        ["models"],
    ],
)
def test_without_a_backend_the_extra_is_named(arguments: list[str]) -> None:
    # What MLX says on Linux when it is installed without a backend.
    reason = "libmlx.so: cannot open shared object file: No such file or directory"
    finished = python(HIDE.format(name="mlx.core", reason=reason, arguments=arguments))
    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert reason in finished.stderr
    assert "pip install" in finished.stderr


def test_doctor_works_without_a_backend() -> None:
    examined = python(HIDE.format(name="mlx.core", reason="none", arguments=["doctor"]))
    assert examined.returncode == 1
    assert "pip install" in examined.stderr
    assert "C compiler" in examined.stdout


def test_a_defect_is_one_line_unless_it_is_looked_for() -> None:
    code = (
        "import sys, polytoken.cli.diagnosis as d\n"
        "def fail(*a, **k): raise ZeroDivisionError('inside')\n"
        "d.diagnose = fail\n"
        "from polytoken.cli import main\n"
        "sys.exit(main(sys.argv[1:] + ['doctor']))"
    )
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert plain.returncode == 1
    assert "Traceback" not in plain.stderr
    assert "ZeroDivisionError: inside" in plain.stderr
    debug = subprocess.run(
        [sys.executable, "-c", code, "--debug"], capture_output=True, text=True, timeout=300, check=False
    )
    assert debug.returncode == 1
    assert "Traceback" in debug.stderr


def start(tiny: str, *arguments: str, **words: Any) -> subprocess.Popen[str]:
    command = [*COMMAND, "generate", "--model", tiny, "--ignore-eos", *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, encoding="utf-8", **words)


def read_until(stream: IO[str], event: str) -> list[dict[str, Any]]:
    seen = []
    for line in stream:
        seen.append(json.loads(line))
        if seen[-1]["event"] == event:
            return seen
    raise AssertionError(f"no {event} before the end: {seen}")


def test_a_closed_pipe_ends_quietly(tiny: str) -> None:
    process = start(tiny, "--requests-jsonl", "-")
    assert process.stdin is not None
    assert process.stdout is not None
    for number in range(4):
        process.stdin.write(json.dumps({"request_id": f"r{number}", "prompt": "x", "max_new_tokens": 400}) + "\n")
    process.stdin.flush()
    read_until(process.stdout, "token")
    process.stdout.close()
    assert process.wait(300) == 141
    assert process.stderr is not None
    assert process.stderr.read() == ""


def test_events_are_utf8_whatever_the_locale(tiny: str) -> None:
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    record = json.dumps({"request_id": "größe", "prompt": "x", "max_new_tokens": 2}, ensure_ascii=False) + "\n"
    finished = subprocess.run(
        [*COMMAND, "generate", "--model", tiny, "--requests-jsonl", "-"],
        input=record.encode(), capture_output=True, timeout=300, check=False, env=environment,
    )  # fmt: skip
    assert finished.returncode == 0
    assert '"request_id": "größe"'.encode() in finished.stdout


def test_a_failed_load_ends_cleanly(tmp_path: Path) -> None:
    command = [*COMMAND, "generate", "--model", str(tmp_path), "--prompt", "x"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (finished.returncode, len(finished.stderr.splitlines())) == (2, 1)


@pytest.mark.parametrize(
    ("raised", "status", "told"),
    [
        ("exec('raise KeyboardInterrupt')", 130, "polytoken: note: interrupted\n"),
        ("signal.raise_signal(signal.SIGTERM)", 143, "polytoken: note: terminated\n"),
    ],
    ids=["within an exec", "made an ImportError"],
)
def test_an_interrupt_that_a_library_changed_ends_as_any_other(
    raised: str, status: int, told: str, tmp_path: Path
) -> None:
    """By a status, not by the signal that Python takes after an `exec`; and not as a broken installation."""
    code = (
        "import signal, sys, polytoken.cli.diagnosis as d\n"
        "def fail(*a, **k):\n"
        "    try:\n"
        f"        {raised}\n"
        "    except KeyboardInterrupt as fault:\n"
        "        if type(fault) is KeyboardInterrupt: raise\n"
        "        raise ImportError('initialisation failed') from fault\n"
        "d.diagnose = fail\n"
        "from polytoken.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    (tmp_path / "interrupted.py").write_text(code)  # only a module that is run with -m meets it
    finished = subprocess.run(
        [sys.executable, "-m", "interrupted"], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
    )
    assert (finished.returncode, finished.stderr) == (status, told)
