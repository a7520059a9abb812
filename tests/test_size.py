"""What the project weighs, in tokens of Python: lines are free, and so no code is packed. A commit
that raises a figure says in its message what left."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    hasattr(tokenize, "FSTRING_START"), reason="from Python 3.12 on an f-string is several tokens"
)
ROOT = Path(__file__).resolve().parent.parent
TOKENS = {
    "train_gpt.py": 38_900,
    "frontier.py": 15_100,
    "gpt_speedrun/__init__.py": 7_200,
    "records/*.py launch/*.py but records/*_model.py": 68_560,
    "records/*_model.py": 5_100,
    "tests/*.py": 201_130,
}
TOKENS_PER_LINE = {"train_gpt.py": 11, "frontier.py": 11, "gpt_speedrun/*.py": 11, "*/*.py": 12}
LAYOUT = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.COMMENT,
}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def files_of(patterns):
    """Return the files of glob patterns, without those of the patterns behind `but`."""
    found, left_out = (
        {path for pattern in part.split() for path in ROOT.glob(pattern)}
        for part in f"{patterns} but ".split(" but ")[:2]
    )
    return sorted(found - left_out)


def docstring_lines(source):
    """Return the numbers of the lines that docstrings take."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def code_tokens(path):
    """Return the tokens of a program without its comments, docstrings and layout."""
    source = path.read_text("utf-8")
    skipped = docstring_lines(source)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token for token in tokens if token.type not in LAYOUT and token.start[0] not in skipped]


@pytest.mark.parametrize("patterns", TOKENS)
def test_weight_is_within_its_limit(patterns):
    weight = sum(len(code_tokens(path)) for path in files_of(patterns))
    assert 0 < weight <= TOKENS[patterns]


@pytest.mark.parametrize("pattern", TOKENS_PER_LINE)
def test_no_program_is_packed(pattern):
    for path in files_of(pattern):
        tokens = code_tokens(path)
        lines = {token.start[0] for token in tokens}
        assert len(tokens) <= TOKENS_PER_LINE[pattern] * len(lines), path


def test_a_line_of_the_rooms_fits_100_columns():
    for path in files_of("train_gpt.py frontier.py gpt_speedrun/*.py"):
        lines = path.read_text("utf-8").splitlines()
        assert max(map(len, lines)) <= 100, path
