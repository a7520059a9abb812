"""What the project weighs, in tokens of Python: lines are free. A commit that raises a figure says
in its message what left."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOKENS = {
    "train_gpt.py": 38_888,
    "frontier.py": 14_273,
    "gpt_speedrun/__init__.py": 7_528,
    "records/*.py launch/*.py launch/cluster/*.py": 68_766,
    "tests/*.py": 222_600,
}
LAYOUT = {tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstring_lines(source):
    """Return the numbers of the lines that docstrings take."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            docstring = node.body[0]
            lines.update(range(docstring.lineno, docstring.end_lineno + 1))
    return lines


def code_tokens(source):
    """Return the tokens of a program without its comments, docstrings and layout."""
    skipped_lines = docstring_lines(source)
    skipped_types = LAYOUT | {tokenize.COMMENT}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        token
        for token in tokens
        if token.type not in skipped_types and token.start[0] not in skipped_lines
    ]


@pytest.mark.parametrize("patterns", TOKENS)
def test_weight_is_within_its_limit(patterns):
    files = [path for pattern in patterns.split() for path in ROOT.glob(pattern)]
    weight = sum(len(code_tokens(path.read_text("utf-8"))) for path in files)
    assert 0 < weight <= TOKENS[patterns]
