"""Resolve the lock files anew from pyproject.toml, with nothing but pip: run `make lock` on Linux.

Each file pins with `==` only: where a package comes from is the business of the user's own pip configuration.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
BACKENDS = ("cpu", "cuda12", "cuda13")
# What to build with: `build-system.requires`, which pip does not put into a resolve of the project.
BUILD = ("setuptools>=77", "wheel", "nanobind==3.1.0")


def resolve(python: Path, requirements: Sequence[str]) -> dict[str, str]:
    """Name to version of everything that an empty environment would get for the requirements."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
    command += ["--ignore-installed", "--only-binary=:all:", "--report", "-", *requirements]
    report = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    records = [item["metadata"] for item in json.loads(report)["install"]]
    return {record["name"]: record["version"] for record in records}


def write(name: str, pins: dict[str, str], purpose: str) -> None:
    """One lock file, sorted, with its purpose in the first line."""
    lines = [f"# Made by `make lock`; do not edit. {purpose}"]
    lines += [f"{package}=={version}" for package, version in sorted(pins.items(), key=lambda pin: pin[0].lower())]
    (HERE / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(pins)} packages")


def without(pins: dict[str, str], *others: dict[str, str]) -> dict[str, str]:
    """The pins that none of the others has."""
    return {package: version for package, version in pins.items() if not any(package in other for other in others)}


def main() -> None:
    """Resolve in a new environment with this interpreter, which should be the oldest that is supported."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder) / "bin" / "python"
        runtime = resolve(python, PROJECT["dependencies"])
        build = without(resolve(python, BUILD), runtime)
        write("build.lock", build, "What building the project itself needs.")
        write("runtime.lock", runtime, "What the package needs everywhere, MLX backend aside.")
        server = resolve(python, [*PROJECT["dependencies"], *EXTRAS["server"]])
        write("server.lock", without(server, runtime, build), "What the server needs beside runtime.lock.")
        dev = resolve(python, [*PROJECT["dependencies"], *EXTRAS["server"], *EXTRAS["dev"]])
        write("dev.lock", without(dev, runtime, build), "What tests and checks need beside runtime.lock.")
        for backend in BACKENDS:
            pins = without(resolve(python, EXTRAS[backend]), runtime)
            what = "CPU" if backend == "cpu" else f"NVIDIA driver for CUDA {backend.removeprefix('cuda')}"
            write(f"backend-{backend}.lock", pins, f"MLX backend: Linux, {what}.")
        # pip follows the markers of the machine it runs on, so the Metal part cannot be resolved from Linux.
        write("backend-darwin.lock", {"mlx-metal": runtime["mlx"]}, "MLX backend: macOS.")


if __name__ == "__main__":
    sys.exit(main())
