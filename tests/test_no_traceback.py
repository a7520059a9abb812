"""No input of a program ends in a traceback: logs, manifests and traces, edited at random or with
odd values in their JSON."""

import contextlib
import io
import json
import random
import re
import shutil
import subprocess
import sys
import trace
from pathlib import Path

import board
import export
import picture
import pytest
import race
import stats
import verify
from test_records_stats import declare, log, raced
from test_records_trace import two_steps
from test_records_verify import data, honest, train  # noqa: F401 (fixtures)

ODD = [
    None,
    "x",
    [],
    {},
    -1,
    1e400,
    [1],
    True,
    10**400,
    {"extra": 5},
    "\ud800",
    "a\0b",
    "../x",
    "",
    0,
    10**15,
    0.5,
    float("nan"),
    [[]] * 9,
    {"a": []},
]
LINES = [
    "{",
    "[" * 100_000,
    '{"a": ' * 100_000,
    '{"run_id": 5}',
    "9" * 5000,
    '{"race": null}',
    "\0",
    '"\\ud800"',
    "step:",
    "step:5/20 ",
    "s:1 tel:",
    "\r",
    '{"end": 3}',
    '{"end": {"final_val_loss": "x"}}',
    '{"resumed": {}}',
    "step:3/20 train_time:s",
    "step:4/20 val_loss:nan train_time:9ms",
    "step:3 train_time:3ms",
    "error:",
    "é",
    "step_avg:1.2.3ms",
    '{"run_id": "x", "config": ' + "[" * 900 + "]" * 900 + "}",
]
NUMBERS = ["nan", "9" * 400, "1.2.3", "-1", "1e400", "", ".", "0"]


def cut(draw, lines):
    return "\n".join(lines)[: draw.randrange(1 + len("\n".join(lines)))]


def flip(draw, lines):
    text = [*"\n".join(lines)]
    for at in draw.choices(range(len(text)), k=9):
        text[at] = chr(draw.randrange(1, 256))
    return "".join(text)


def near_the_end(draw, lines):
    """Draw the number of a line behind the source of a log."""
    return draw.randrange(max(0, len(lines) - 60), len(lines))


def move_line(draw, lines):
    one, other = (near_the_end(draw, lines) for _ in range(2))
    return "\n".join([*lines[:one], *[lines[one]] * draw.randrange(3), *lines[other:]])


def insert_lines(draw, lines):
    for line in LINES[draw.randrange(2) :: 2]:
        lines.insert(near_the_end(draw, lines), line)
    return "\n".join(lines)


def change_number(draw, lines):
    text = "\n".join(lines)
    numbers = [*re.finditer(r"\d[\d.]*", text)]
    found = draw.choice(numbers)
    return text[: found.start()] + draw.choice(NUMBERS) + text[found.end() :]


def places(value, path=()):
    for key, inner in (
        value.items()
        if isinstance(value, dict)
        else enumerate(value[:3])
        if isinstance(value, list)
        else ()
    ):
        yield (*path, key)
        yield from places(inner, (*path, key))


def change_value(draw, lines):
    """Give a place in the JSON of a line an odd value."""
    at = draw.choice([i for i, line in enumerate(lines) if line[:1] in tuple("{[")])
    value = json.loads(lines[at])
    *way, last = draw.choice([*places(value)])
    holder = value
    for key in way:
        holder = holder[key]
    holder[last] = draw.choice(ODD)
    return "\n".join([*lines[:at], json.dumps(value), *lines[at + 1 :]])


@pytest.fixture
def samples(honest, tmp_path, monkeypatch):  # noqa: F811
    """Folders with an input of each kind. The file with the kind's suffix is the one to edit."""
    monkeypatch.chdir(tmp_path)
    for kind in ("own", "public", "llmc", "race", "trace"):
        (tmp_path / kind).mkdir()
    shutil.copy(honest, "own/x.txt")
    for i in range(2):
        (tmp_path / f"public/{i}.txt").write_text(log(3.27 + i / 999, 140 + i))
        (tmp_path / f"llmc/{i}.txt").write_text(f"s:0 tel:10.9{i}\ns:1 trl:9\ns:2 tel:3.2{i}\n")
    for i, content in enumerate(raced(3, "ab", shift=0.2)):
        (tmp_path / f"race/{i}.txt").write_text(content)
    manifest = declare("race", n=3, ranks=1)
    with open(f"{manifest}/race.jsonl", "a") as file:
        for number in (1, 2):
            event = {
                "run": number,
                "side": "a",
                "run_id": f"r{number}",
                "seed": number,
                "started_at": "2026-01-01T00:00:00+00:00",
            }
            file.write(
                "".join(
                    json.dumps({**event, **more}) + "\n"
                    for more in (
                        {"status": "started"},
                        {
                            "status": "done",
                            "ended_at": event["started_at"],
                            "seconds": 5,
                            "logged": True,
                        },
                    )
                )
            )
    two_steps().write(
        tmp_path / "trace/x.json",
        distributedInfo={"rank": 0, "world_size": 1},
        deviceProperties=[{"name": "x"}],
    )
    # a manifest that is still one starts nothing
    monkeypatch.setattr(race, "run_all", lambda *_: {"status": 0})
    monkeypatch.setattr(race, "folders", lambda sides: contextlib.nullcontext({}))
    monkeypatch.setattr(race, "check_sides", lambda *_: None)
    monkeypatch.setattr(board, "HERE", tmp_path)


FIGURES = [
    (stats, "{} --json"),
    (stats, "{}"),
    (verify, "{} --json"),
    (verify, "{}"),
    (export, "{} --to csv --out out"),
]
RACES = [*FIGURES[:4], (board, "add {} new x")]
INPUTS = {  # the file that is edited, programs and their words: {} is its folder
    "own/x.txt": [*FIGURES[2:4], (export, "own/x.txt --to csv --out out")],
    "public/0.txt": FIGURES[:4],
    "llmc/1.txt": FIGURES[:4],
    "race/2.txt": RACES,
    "race/race.jsonl": [*RACES, (race, "--resume {}/race.jsonl")],
    "trace/x.json": [(trace, "{}/x.json")],
    "public/1.txt": [(picture, "public/1.txt out.svg")],
}
EDITS = (cut, flip, move_line, insert_lines, change_number, change_value)


# by default each command reads one file of each edit
@pytest.mark.parametrize(
    "seeds", [range(7), pytest.param(range(7, 200), marks=pytest.mark.slow)], ids=["some", "many"]
)
@pytest.mark.parametrize("path", INPUTS)
def test_any_input_ends_in_a_status_and_a_line(samples, tmp_path, capsys, monkeypatch, path, seeds):
    whole = (tmp_path / path).read_text()
    for seed in seeds[: len(INPUTS[path])] if 0 in seeds else seeds:
        for edit in EDITS:
            if edit is change_value and "{" not in whole:
                continue
            edited = edit(random.Random(f"{seed} {path}"), whole.splitlines())
            (tmp_path / path).write_text(edited, errors="surrogatepass")
            module, words = INPUTS[path][seed % len(INPUTS[path])]
            # board.py asks whether to keep a race that breaks rules
            monkeypatch.setattr(sys, "stdin", io.StringIO("n\n"))
            told = f"{module.__name__} {words}, {edit.__name__}, seed {seed}"
            try:
                status = module.main(words.format(path.partition("/")[0]).split())
            except Exception as error:
                raise AssertionError(told) from error
            said = capsys.readouterr()
            assert status in (0, 1, 2), told
            assert "Error:" not in said.out and (
                said.err.count("\n") <= 1 or module in (board, verify)
            ), (told, said)


@pytest.mark.parametrize("tool", ["board", "history"])
def test_a_full_disk_under_stdout_is_a_line_and_a_status(tool):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, Path(board.__file__).with_name(f"{tool}.py")],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
