"""What the scripts that set our engine beside a peer's share: options, variants and their processes, the report."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from peers.lines import Worker

from polytoken.bench.machine import describe_machine


@dataclass(frozen=True)
class Variant:
    """A process to be measured.

    Attributes:
        name: in options and in the report.
        ours: whether this interpreter runs it, with our engine, or the peer's.
        arguments: for the runner script, besides the checkpoint.
        usual: whether it is measured without `--full`.
    """

    name: str
    ours: bool
    arguments: tuple[str, ...]
    usual: bool = True


AnyVariant = TypeVar("AnyVariant", bound=Variant)


def read_options(
    description: str | None, *, peer: str, cases: Sequence[str], usual: Sequence[str], rounds: tuple[int, int], log: str
) -> argparse.Namespace:
    """The command line of a comparison.

    Args:
        description: the script's docstring.
        peer: the other engine's package.
        cases: names of all checkpoints; `usual` those measured without `--full`.
        rounds: how many are counted, without and with `--full`.
        log: file, in the temporary folder, for what the engines print.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer-python", type=Path, required=True, help=f"interpreter that has {peer}")
    parser.add_argument("--case", action="append", choices=cases, help=f"default: {'; '.join(usual)}")
    parser.add_argument("--only", action="append", help="a variant's name; default: the usual ones")
    parser.add_argument("--full", action="store_true", help=f"all checkpoints and variants, {rounds[1]} rounds")
    parser.add_argument("--rounds", type=int, help=f"rounds after the one that warms up; default {rounds[0]}")
    parser.add_argument("--log", type=Path, default=Path(tempfile.gettempdir()) / log)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path, help="written with the tables only")
    options = parser.parse_args()
    options.case = options.case or (cases if options.full else usual)
    options.rounds = options.rounds or rounds[options.full]
    return options


def choose(variants: Sequence[AnyVariant], options: argparse.Namespace) -> list[AnyVariant]:
    """The variants that `--only` and `--full` ask for."""
    if options.only:
        return [variant for variant in variants if variant.name in options.only]
    return [variant for variant in variants if variant.usual or options.full]


def start(variant: Variant, options: argparse.Namespace, runner: str, checkpoint: Path) -> Worker:
    """The variant's process: `runner` is a script of this folder."""
    python = sys.executable if variant.ours else options.peer_python
    arguments = ("--checkpoint", str(checkpoint), *variant.arguments)
    return Worker(variant.name, python, runner, arguments, log=options.log)


def report(
    options: argparse.Namespace,
    measure: Callable[[str, Path], dict[str, Any]],
    table: Callable[[Sequence[Mapping[str, Any]]], str],
) -> None:
    """Measure each case, by its name and in an empty folder; print the tables, and write what the options ask for."""
    machine = asdict(describe_machine())  # before the runs: its load average is that of others
    cases = []
    for name in options.case:
        with tempfile.TemporaryDirectory() as folder:
            cases.append(measure(name, Path(folder)))
    text = table(cases)
    print(text)
    if options.markdown:
        options.markdown.write_text(text)
    if options.json:
        record = {"machine": machine, "rounds": options.rounds, "cases": cases}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
