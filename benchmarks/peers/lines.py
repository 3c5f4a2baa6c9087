"""A worker process that answers JSON lines, so that a benchmark can alternate between engines which share nothing.

Run by whatever Python holds an engine: only the standard library may be imported here.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

# One thread in every library that would otherwise take all cores.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


def runner_parser(description: str | None, *, products: str) -> argparse.ArgumentParser:
    """The options that every runner script has; `products` is the default."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--products", choices=("exact", "stock"), default=products)
    return parser


def serve(commands: Mapping[str, Callable[..., Any]]) -> None:
    """Answer `{"do": NAME, ...}` lines with one JSON line each until the input ends.

    Every runner answers `peak`, too (`peak_megabytes`). The answers have the original standard output for themselves:
    what an engine prints goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    commands = {"peak": peak_megabytes, **commands}
    for line in sys.stdin:
        order = json.loads(line)
        try:
            answer: dict[str, Any] = {"value": commands[order.pop("do")](**order)}
        except Exception:
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def peak_megabytes() -> float:
    """Most memory this process ever held, in 1e6 bytes.

    On Linux not from `ru_maxrss`, which a child starts with its parent's: the kernel's own mark begins at exec.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024 / 1e6
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class Worker:
    """A runner script in a process of its own.

    Args:
        name: of the variant it stands for.
        python: the interpreter that has the engine.
        script: a file of this folder.
        arguments: for the script.
        log: file for what the engine prints.
    """

    def __init__(self, name: str, python: Path | str, script: str, arguments: Sequence[str], *, log: Path) -> None:
        self.name = name
        with log.open("a") as stream:
            self._process = subprocess.Popen(
                [str(python), str(Path(__file__).parent / script), *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stream,
                text=True,
                env={**os.environ, **ONE_THREAD},
            )
        self._log = log

    def ask(self, command: str, **values: Any) -> Any:
        """What the runner's command returns.

        Raises:
            RuntimeError: with the runner's traceback, or when it is gone.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": command, **values}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"{self.name} ended; its last words are in {self._log}")
        answer = json.loads(line)
        if "error" in answer:
            raise RuntimeError(f"{self.name}: {answer['error']}")
        return answer["value"]

    def close(self) -> None:
        """End it and wait."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
