"""Run the tests of the optimizer, of training and of frameworks with several versions of torch, as
pip installs them, and print a table.

    .venv/bin/python bench/versions.py                   VERSIONS: all that pyproject.toml allows
    .venv/bin/python bench/versions.py 2.11.0 2.15.0     these

Each version gets an environment of its own in .cache/versions (5 GB each, kept), with the build
that pip installs by default. Exit status: 0 if no test failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

from common import ROOT, run, table, table_line, train_gpt

VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
TESTS = ("sync", "optimizer", "rows", "run", "resume", "frameworks")
FRAMEWORKS = ("accelerate", "transformers", "lightning", "torchao")


def install(version: str) -> Path:
    """Create the environment of a version, or complete it. Return its Python."""
    home = ROOT / ".cache" / "versions" / version
    python = home / "bin" / "python"
    if not (home / "bin" / "pip").exists():  # venv installs pip last
        subprocess.run([sys.executable, "-m", "venv", home], check=True)
    others = [
        line
        for name in ("requirements.txt", "tests/requirements.txt")
        for line in (ROOT / name).read_text().splitlines()
        if not line.startswith(("#", "torch=="))
    ]
    # === takes the default build where an index has a CPU build too; a file of constraints may
    # forbid new versions
    pip = subprocess.run(
        [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"torch==={version}",
            *FRAMEWORKS,
            *others,
        ],
        env={**os.environ, "PIP_CONSTRAINT": os.devnull},
        stderr=subprocess.PIPE,
        text=True,
    )
    train_gpt.require(
        pip.returncode == 0, f"pip cannot install torch {version}: {pip.stderr.strip()}"
    )
    return python


def test(python: Path) -> tuple[list[Any], list[str]]:
    """Run the tests -> (numbers of tests that passed, failed and were skipped, and seconds; names
    of those that failed)."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:  # killed processes leave files
        done = subprocess.run(
            [python, "-m", "pytest", *(f"tests/test_{name}.py" for name in TESTS)],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": folder},
            capture_output=True,
            text=True,
        )
    count = {
        what: int(n)
        for n, what in re.findall(r"(\d+) (\w+)", done.stdout.strip().rpartition("\n")[2])
    }
    train_gpt.require(
        "passed" in count, f"{python}: no test passed: {done.stdout[-500:]}{done.stderr[-500:]}"
    )
    failed = count.get("failed", 0) + count.get("errors", 0) + count.get("error", 0)
    return (
        [count["passed"], failed, count.get("skipped", 0), round(time.monotonic() - began)],
        re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.M),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "versions", nargs="*", default=VERSIONS, help="versions of torch (default: %(default)s)"
    )
    versions = parser.parse_args().versions
    names = []
    print(f"tests of {', '.join(TESTS)}, Python {platform.python_version()}, {date.today()}\n")
    print(table(["torch", "passed", "failed", "skipped", "seconds"], []), flush=True)
    for version in versions:
        cells, failed = test(install(version))
        print(table_line([version, *cells]), flush=True)
        names += [f"torch {version}: {name}" for name in failed]
    print(*names, sep="\n")
    sys.exit(bool(names))


if __name__ == "__main__":
    run(main)
