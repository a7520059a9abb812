"""Every import of another package is declared: of a run in requirements.txt, of the tests in
either file."""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"gpt_speedrun", "data", "launch", "records", "dry_gpu", "bench", "tests"}
# Not for everybody: triton comes with torch's CUDA build, records/export.py names the package of a
# dashboard that is not installed, and data/text.py one of two that unpack zstd (compression is
# Python 3.14's own). pip itself gets setuptools for setup.py.
# safetensors, transformers and lm-eval are for exported models.
OPTIONAL = {"triton", "wandb", "tensorboard", "compression", "zstandard", "setuptools"}
OPTIONAL |= {"safetensors", "transformers", "lm_eval"}
WITHIN = {"tiktoken_ext": "tiktoken"}  # import → package with another name


def declared(path):
    return {
        re.match(r"[\w-]+", line).group().lower()
        for line in path.read_text().splitlines()
        if line and line[0] != "#"
    }


def imported(paths):
    """Return {package: file} of the imports from outside the project and the standard library."""
    own = {path.stem for path in sources()} | FOLDERS
    found = {}
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text())):
            modules = (
                [name.name for name in node.names]
                if isinstance(node, ast.Import)
                else [node.module]
                if isinstance(node, ast.ImportFrom) and not node.level
                else []
            )
            found |= {module.partition(".")[0]: path for module in modules}
    return {
        WITHIN.get(name, name): path
        for name, path in found.items()
        if name not in own | sys.stdlib_module_names
    }


def sources():
    return [
        *ROOT.glob("*.py"),
        *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
    ]


def test_each_import_is_declared_and_each_declared_package_imported():
    tests = [path for path in sources() if (ROOT / "tests") in path.parents]
    run = declared(ROOT / "requirements.txt")
    of_tests = declared(ROOT / "tests/requirements.txt")
    needed = imported(set(sources()) - set(tests))
    assert set(needed) - OPTIONAL == run, needed
    assert not run & of_tests
    further = imported(tests)
    assert set(further) - run - OPTIONAL <= of_tests, further
