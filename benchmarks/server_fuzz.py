"""Fuzz a running server from its own description: schemathesis must find no 5xx.

polytoken serve --model smollm2-135m --max-new-tokens 4
python benchmarks/server_fuzz.py --url http://127.0.0.1:8000
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Run schemathesis and return its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--examples", type=int, default=50, help="of each endpoint")
    chosen = parser.parse_args(arguments)
    program = Path(sys.executable).with_name("schemathesis")
    command = [str(program), "run", f"{chosen.url}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", str(chosen.examples), "--phases", "fuzzing", "--request-timeout", "60"]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
