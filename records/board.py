"""Record folders from races, their pages, and the leaderboard, for reading as Markdown and in a browser.

    python records/board.py add logs/race-ID records/DATE_NAME "what was tried"     a record of a race
    python records/board.py                                                         all pages anew

The first copies a race's logs and manifest into a new folder, as the runs wrote them but for what names a folder or the
host of this machine. Both then write, from the folders alone, each record's README.md (its first line keeps the title),
the leaderboard in records/README.md, and records/index.html: one file with everything in it, for any browser, without
server or network. A plot.png that is not there is drawn; remove one to have it drawn anew.

Every verdict is that of records/stats.py and records/verify.py, called as anyone would. The pages' words stand in
records/templates/. Needs jinja2, which torch brings.

Exit status: 0 written, 2 it cannot be.
"""

from __future__ import annotations

import logs

logs.end_at_ctrl_c(__name__)  # scipy takes seconds to import

import argparse
import contextlib
import difflib
import hashlib
import io
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pages
import stats
import verify
from stats import MANIFEST, STAMPS, CannotJudge

HERE = Path(__file__).resolve().parent
PLOT, PAGE = "plot.png", "index.html"
LADDER = "ladder.png"  # ladder.py's: such a folder has its page already
DRAWN = ("name", "title", "date", "track", "target", "below", "broken", "confidence", "difference", "interval")
DRAWN_SIDE = ("label", "runs", "loss_interval", "time_interval")  # what the page's script is given of each
POINTS = 100  # of a curve of training losses: more than a screen shows
LONGEST_DIFF = 60  # lines
LONGEST_LABEL = 20  # characters of a value that names a side
CONTEXT = 1  # lines around each difference
# What differs between any two runs, the race's own notes, and of the first host what the run states of itself
INCIDENTAL = re.compile(r"(?:config\.|hosts\.\d+\.)?(?:run_id|started|seed|race|launch|log_dir|source_sha256|git\.|"
                        r"environment\.TORCHELASTIC_)|hosts\.0\.(?!ranks)")
SEPARATOR = logs.SEPARATOR.decode()
# A path from the root, of two folders at least, that is no part of a longer word or of an address
ROOTED = re.compile(r"(?:file://|(?<![\w./~*-]))/(?!/)(?:[^\s\"'<>|:,;/\\]+/)+([^\s\"'<>|:,;/\\]*)")


# What a record holds

def judge(tool: ModuleType, words: list[str], *more: str) -> tuple[int, dict]:
    """What stats or verify says with --json about a record, by these words of a command: exit status and the JSON."""
    said, root = io.StringIO(), f"{HERE.parent}{os.sep}"
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(io.StringIO()):
        status = tool.main([root + words[0], *words[1:], *more, "--json"])
    return status, json.loads(said.getvalue().replace(json.dumps(root)[1:-1], ""))  # which a page must not name


def digest_of(source: str | None, stated: str | None) -> str | None:
    """SHA-256 of the source's file, as `git show REVISION:train_gpt.py | sha256sum` has it."""
    if source is None:
        return stated
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (source, source + "\n")]
    return stated if stated in digests else digests[0]


def training_curve(steps: list[logs.Step]) -> list[tuple[int, float, float]]:
    """(step, seconds, training loss) of a run's steps, thinned to means over as many steps as make POINTS of them."""
    points = [(step.step, step.time_ms / 1000, step.train_loss) for step in steps if step.train_loss is not None]
    width = math.ceil(len(points) / POINTS) or 1
    groups = [points[i:i + width] for i in range(0, len(points), width)]
    return [(group[-1][0], round(group[-1][1], 3), round(sum(loss for *_, loss in group) / len(group), 4))
            for group in groups]


def flat(value: object, name: str = "") -> dict[str, str]:
    """The leaves of nested dicts, and of a run's list of hosts, as text, each under a name like `hardware.device`."""
    if name == "hosts" and isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {key: text for inner, leaf in value.items()
                for key, text in flat(leaf, f"{name}.{inner}".strip(".")).items()}
    return {name: value if isinstance(value, str) else json.dumps(value)}


def differences(sides: list[list[dict]]) -> list[tuple[str, ...]]:
    """(name, value on each side) of what all runs of a side state alike and the sides state differently.

    sides: the description that each run's log opens with, by side."""
    leaves = [[flat(start) for start in starts] for starts in sides]
    names = dict.fromkeys(name for side in leaves for run in side for name in run)
    rows = []
    for name in names:
        values = [{run.get(name) for run in side} for side in leaves]
        if not INCIDENTAL.match(name) and all(len(found) == 1 for found in values):
            row = ["-" if value is None else value for (value,) in values]
            if len(set(row)) > 1:
                rows.append((name.removeprefix("config."), *row))
    return rows


def short_diff(before: str, after: str, names: tuple[str, str]) -> list[str]:
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=CONTEXT)]
    more = len(lines) - LONGEST_DIFF
    return lines if more <= 0 else [*lines[:LONGEST_DIFF], f"… and {more} lines more"]


def interval(values: list[float | None], alpha: float) -> tuple[float, float, float] | None:
    """(mean, low, high) with confidence 1 - 2 alpha by the t distribution; None where a value lacks."""
    if None in values:
        return None
    mean = sum(values) / len(values)
    return mean, *(stats.mean_interval(values, alpha) or (mean, mean))


def tests_in(report: object, where: tuple[str, ...] = ()) -> list[dict]:
    """Every test in a report of stats.py, wherever it stands: a dict with a `p` and the name of its `test`, and under
    `also` its other p-values by name."""
    if not isinstance(report, dict):
        return []
    also = {key[2:].replace("_", " "): p for key, p in report.items() if key.startswith("p_") and p is not None}
    found = [{"of": " ".join(where), "also": also, **report}] if "p" in report and "test" in report else []
    return found + [test for key, value in report.items() for test in tests_in(value, (*where, key))]


def seconds(ms: float | None) -> float | None:
    return None if ms is None else ms / 1000


def describe_side(name: str, runs: list[logs.Run], folder: Path, declared: dict, alpha: float) -> dict:
    """declared: what the race's manifest says of the side, or {}."""
    said = flat(runs[0].start or {})
    source = runs[0].source and runs[0].source.removesuffix("\n")
    told = [{"file": Path(run.path).relative_to(folder).as_posix(), "seed": flat(run.start or {}).get("seed"),
             "loss": f"{run.final_loss:.{run.loss_decimals}f}", "seconds": seconds(run.train_time_ms),
             "val": [(v.step, seconds(v.time_ms), v.loss) for v in run.validations],
             "train": training_curve(run.steps)} for run in runs]
    return {"name": name, "runs": told, "said": said, "source": source,
            "sha256": digest_of(source, said.get("source_sha256")),
            "flags": declared and shlex.join(declared["flags"]),
            "where": f"{said.get('ranks', '?')} rank(s) on {said.get('hardware.device', 'unknown hardware')}",
            "loss_interval": interval([run.final_loss for run in runs], alpha),
            "time_interval": interval([run["seconds"] for run in told], alpha)}


def describe(folder: Path) -> dict:
    """Everything the pages say of a record. Raises CannotJudge where stats.py has no verdict."""
    words = [f"records/{folder.name}"]
    runs = {(Path(run.path).relative_to(HERE.parent).as_posix(), run.index_in_file): run
            for run in logs.read([str(folder)]).runs}
    if "b" in {((run.start or {}).get("race") or {}).get("side") for run in runs.values()}:
        words += ["--side", "a"]
    status, report = judge(stats, words, *([] if (folder / PLOT).exists() else ["--plot", str(folder / PLOT)]))
    if status not in (0, 1):
        raise CannotJudge(f"{words[0]}: {report.get('reason', 'no reason was given')}; `python records/stats.py "
                          f"{' '.join(words)}` tells more")
    _, verified = judge(verify, words)
    found = verified.get("rules") or [{"rule": "the rules can be checked", "verdict": "not checkable",
                                       "reason": verified.get("reason", "no reason was given")}]
    claims = [rule for rule in found if rule["rule"] in verify.CLAIMS]
    rules = sorted((rule for rule in found if rule not in claims), reverse=True,
                   key=lambda rule: verify.VERDICTS.index(rule["verdict"]))
    alpha, by_side = report["alpha"], {}
    for one in report["runs"]:
        by_side.setdefault(one["set"].removeprefix("the "), []).append(runs[one["path"], one["index_in_file"]])
    manifest = stats.manifest_in(folder)
    declared = manifest.race["sides"] if manifest else {}
    sides = [describe_side(name, runs, folder, declared.get(name.removeprefix("side "), {}), alpha)
             for name, runs in by_side.items()]
    starts = [[run.start or {} for run in runs] for runs in by_side.values()]
    differ = differences(starts)
    for i, side in enumerate(sides):
        telling = [f"{name} {row[i]}" for name, *row in differ
                   if "." not in name and max(map(len, row)) <= LONGEST_LABEL]
        side["label"] = side["name"] + (f": {', '.join(telling)}" if 0 < len(telling) < 4 else "")
    diff = []
    if len(sides) > 1 and None not in (sides[0]["source"], sides[1]["source"]):
        diff = short_diff(sides[1]["source"], sides[0]["source"], (sides[1]["name"], sides[0]["name"]))
    started = max((str(start["started"]) for start in starts[0] if "started" in start), default=folder.name[:10])
    compared, loss = report["comparison"] or {}, report["loss"]
    return {"name": folder.name, "title": title_of(folder), "words": words, "report": report, "sides": sides,
            "differ": differ, "diff": diff, "tests": tests_in(report), "started": started, "date": started[:10],
            "track": f"{sides[0]['said'].get('preset', 'unknown preset')}, {sides[0]['where']}, "
                     f"target {loss['target']:g}",
            "target": loss["target"], "below": loss["significant"], "confidence": 100 * (1 - 2 * alpha),
            "difference": compared.get("difference"), "interval": compared.get("interval"),
            "broken": sum(rule["verdict"] == "fail" for rule in rules), "claims": claims, "rules": rules,
            "decimals": 1 + max(len(run["loss"].partition(".")[2]) for run in sides[0]["runs"]),
            "decided": compared.get(compared.get("decides", ""), compared), "unseen": verified.get("unseen")}


def title_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# Pages

def only(found: dict, keys: tuple[str, ...]) -> dict:
    return {key: found[key] for key in keys}


def write_pages() -> list[dict]:
    """What describe says of each record, the newest first. Raises CannotJudge before anything is written where a record
    gives no verdict."""
    found = sorted((path.parent for path in HERE.glob("*/README.md")), reverse=True)
    ladders = [{"name": folder.name, "title": title_of(folder)} for folder in found if (folder / LADDER).exists()]
    folders = [folder for folder in found if not (folder / LADDER).exists()]
    if not folders:
        raise CannotJudge(f"no record lies in {HERE}; make one by `board.py add`")
    records = sorted(map(describe, folders), key=lambda record: record["started"], reverse=True)
    texts = {HERE / record["name"] / "README.md": pages.render("record.md.jinja", record=record) for record in records}
    texts[HERE / "README.md"] = pages.render("board.md.jinja", records=records, ladders=ladders)
    texts[HERE / PAGE] = pages.render("board.html.jinja", records=records, drawn=[
        only(record, DRAWN) | {"sides": [only(side, DRAWN_SIDE) for side in record["sides"]]} for record in records])
    for path, text in texts.items():
        check_public(path, text)
    for path, text in texts.items():
        path.write_bytes(text.encode("utf-8", "backslashreplace"))
    return records


# Publishing

def public(text: str) -> str:
    """A log or a manifest without what names a folder or the host of the machine that wrote it: nobody else can use
    that, and it may tell a name. Of a rooted path stays its last part. A log's source stays as it is."""
    source, separator, rest = text.partition(SEPARATOR + "\n")
    if not separator:
        source, rest = "", text
    rest = ROOTED.sub(lambda path: path[1] or "folder", rest)
    for name in telling_names(source):
        rest = re.sub(whole(name), "host", rest)
    return source + separator + rest


def whole(word: str) -> str:
    return rf"(?<![\w.-]){re.escape(word)}(?![\w-])"


def host_names() -> list[str]:
    """This machine's name and the first part of it, the longer first."""
    name = socket.gethostname()
    return [name for name in dict.fromkeys((name, name.partition(".")[0])) if name and not name.startswith("localhost")]


def telling_names(source: str) -> list[str]:
    """The host's names, but for one like `laptop` that is a word of the source as well, or, as a manifest has none, of
    this checkout's script: it says nothing of a machine."""
    words = source + (Path(__file__).resolve().parent.parent / stats.SCRIPT).read_text(encoding="utf-8")
    return [name for name in host_names() if not re.search(whole(name), words)]


def check_public(path: Path, text: str) -> None:
    """Raises CannotJudge if a text that is to be published names this machine or a folder of its user or of ours."""
    home, source = os.path.expanduser("~"), text.partition(SEPARATOR + "\n")[0]
    private = [*telling_names(source), str(HERE.parent), *([home] if home.count("/") > 1 else [])]
    for word in private:
        if at := re.search(whole(word), text):
            line = text.count("\n", 0, at.start()) + 1
            raise CannotJudge(f"{path.name}, line {line}, names this machine or a folder of it ({word}); take it out "
                              "of the race's files")


def files_of(race: Path) -> list[Path]:
    """What is published of a race's folder: the manifest, the logs, and when each of their lines was seen."""
    return sorted(path for path in race.iterdir() if path.name == MANIFEST or path.name.endswith((".txt", STAMPS)))


def published(path: Path) -> str:
    """The text of a race's file as it is published. Raises CannotJudge where it is none, or would tell too much."""
    try:
        text = public(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CannotJudge(f"{path}: cannot be read as a log ({error}); copy it again, or take it out of the "
                          "folder") from error
    check_public(path, text)
    return text


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """A folder that is gone again where what fills it fails."""
    if folder.exists():
        raise CannotJudge(f"{folder} exists; choose another name, or remove it")
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        raise


def add(race: Path, folder: Path, title: str) -> list[str]:
    """The rules that it breaks. Raises CannotJudge, and leaves nothing behind, where its logs give no verdict."""
    if not race.is_dir():
        raise CannotJudge(f"{race} is no folder; name the folder of a race, like logs/race-ID")
    if folder.resolve().parent != HERE:
        raise CannotJudge(f"{folder} is not in {HERE}; records lie there")
    with new_folder(folder):
        for path in files_of(race):
            (folder / path.name).write_text(published(path), encoding="utf-8")
        (folder / "README.md").write_text(f"# {' '.join(title.split())}\n", encoding="utf-8")
        (record,) = (record for record in write_pages() if record["name"] == folder.name)
    return [f"{rule['rule']}: {rule['reason']}" for rule in record["rules"] if rule["verdict"] == "fail"]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="make a record's folder from a race")
    adding.add_argument("race", type=Path)
    adding.add_argument("folder", type=Path)
    adding.add_argument("title")
    options = parser.parse_args(arguments)
    try:
        if options.command == "add":
            for broken in add(options.race, options.folder.absolute(), options.title):
                print(logs.brief(f"board.py: warning: this race breaks a rule, and its page says so: {broken}"),
                      file=sys.stderr)
        else:
            write_pages()
    except (CannotJudge, OSError) as reason:
        return logs.refuse("board.py", reason)
    print(f"written: {os.path.relpath(HERE / 'README.md')}, {os.path.relpath(HERE / PAGE)} and each record's README.md")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
