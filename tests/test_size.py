"""What the project weighs, in lines. A commit that raises a figure says in its message what left."""
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LINES = {"train_gpt.py": 4060, "frontier.py": 1350, "gpt_speedrun/__init__.py": 750, "records/*.py launch/*.py": 7380, "tests/*.py": 20430}


@pytest.mark.parametrize("files", LINES)
def test_weight_is_within_its_limit(files):
    found = [path for pattern in files.split() for path in ROOT.glob(pattern)]
    assert found and sum(path.read_text().count("\n") for path in found) <= LINES[files]
