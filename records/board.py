"""Write record folders from races, their pages, and the leaderboard.

    python records/board.py add logs/race-ID records/DATE_NAME "what was tried"     make a record of a race, or of ladders
    python records/board.py                                                         judge all again, and write all pages
    python records/board.py pack records/DATE_NAME                                  pack logs that lie in a record's folder

`add` packs a race's logs and manifest into logs.tar.xz of a new folder. It refuses files that name this machine or its
folders. If the race breaks a rule, it asks first. All tools read the archive as if its files lay beside it. `pack` packs
files that do lie beside it, and removes them; the same files always give the same archive. `add`, `pack` and the plain
command write, from the folders alone, each record's README.md (its first line keeps the title) and the leaderboard
records/README.md. A missing plot.png is drawn; remove one to draw it again.

All verdicts come from records/stats.py and records/verify.py. The texts are in records/templates/. Requires jinja2,
which torch installs.

Exit status: 0 written, 2 not possible (stderr states why).
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import hashlib
import itertools
import json
import math
import os
import pickle
import re
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import leaks
import logs
import pages
import stats
import verify
from stats import MANIFEST, CannotJudge

HERE = Path(__file__).resolve().parent
PLOT, CACHE = "plot.png", ".cache/records"
LADDER = "ladder.png"  # written by ladder.py, with a page of its own
MAX_DIFF_LINES = 60
MAX_LABEL = 20  # characters of a value in a side's label
UNKNOWN = "unknown hardware"  # records on it have no rank
DIFF_CONTEXT = 1  # lines around each change
# Keys that differ between any two runs, the race's own fields, and the first host's copy of the run's fields
INCIDENTAL = re.compile(r"(?:config\.|hosts\.\d+\.)?(?:run_id|started|seed|race|launch|log_dir|source_sha256|git\.|"
                        r"environment\.TORCHELASTIC_)|hosts\.0\.(?!ranks)")


# Contents of a record

def judge_runs(folder: Path) -> dict:
    """Return the report of stats.py. Raise CannotJudge if the runs cannot be compared."""
    options = stats.parse([str(folder)])
    try:
        return stats.judge(stats.choose_sides(options), options)
    except CannotJudge as reason:
        raise CannotJudge(f"{reason}; run `.venv/bin/python records/stats.py {folder}` for details") from None


def judge_rules(folder: Path) -> tuple[list[dict], str]:
    """Return verify.py's findings, and where the paragraph is on what no rule sees."""
    options = verify.parse([str(folder)])
    try:
        case = verify.read_case(options)
        return [finding._asdict() for finding in verify.verify(options, case)], verify.unseen(case)
    except CannotJudge as reason:
        return [{"rule": "the rules can be checked", "verdict": "not checkable", "reason": str(reason)}], ""


def digest_of(source: str | None, stated: str | None) -> str | None:
    """Return the SHA-256 of the source file, as printed by `git show REVISION:train_gpt.py | sha256sum`."""
    if source is None:
        return stated
    digests = [hashlib.sha256(text.encode()).hexdigest() for text in (source, source + "\n")]
    return stated if stated in digests else digests[0]


def flat(value: object, name: str = "") -> dict[str, str]:
    """Flatten nested dicts, and a run's list of hosts, to texts under names like `hardware.device`."""
    if name == "hosts" and isinstance(value, list):
        value = dict(enumerate(value))
    if isinstance(value, dict):
        return {key: text for inner, leaf in value.items()
                for key, text in flat(leaf, f"{name}.{inner}".strip(".")).items()}
    return {name: value if isinstance(value, str) else json.dumps(value)}


def differences(sides: list[list[dict]]) -> list[tuple[str, ...]]:
    """Return (name, value of each side) of all values that are equal within each side and differ between sides.

    sides: the first JSON line of each run's log, by side."""
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
    lines = [*difflib.unified_diff(before.splitlines(), after.splitlines(), *names, lineterm="", n=DIFF_CONTEXT)]
    more = len(lines) - MAX_DIFF_LINES
    return lines if more <= 0 else [*lines[:MAX_DIFF_LINES], f"… and {logs.plural(more, 'more line')}"]


def describe_side(side: stats.Side, folder: Path) -> dict:
    """Return what the pages show of a side."""
    runs, letter = side.runs, side.name.removeprefix("side ")
    start = flat(runs[0].start or {})
    ranks = logs.plural(runs[0].gpus, "rank") if runs[0].gpus else "unknown ranks"
    card = " and ".join(sorted({run.card or UNKNOWN for run in runs}))
    source, declared = runs[0].source and runs[0].script, side.declared.get("sides", {}).get(letter)
    numbers = [race.run if (race := stats.race_of(run)) else str(i) for i, run in enumerate(runs, 1)]
    shown = {number: {"link": link_to(Path(run.path), folder), "seed": (run.start or {}).get("seed"),
                      "loss": f"{run.final_loss:.{run.loss_decimals}f}",
                      "time": run.train_time_ms and run.train_time_ms / 1000} for number, run in zip(numbers, runs)}
    return {"label": side.label, "runs": shown, "start": start, "source": source,
            "sha256": digest_of(source, start.get("source_sha256")),
            "flags": declared and shlex.join(declared["flags"]),
            "where": f"{ranks} on {card}"}


def link_to(log: Path, folder: Path) -> str:
    """Return the link from a record's page to a log, or to its archive with the log as fragment."""
    return f"{logs.ARCHIVE}#" * (not log.exists()) + quote(log.relative_to(folder).as_posix())


def describe(folder: Path) -> dict:
    """Return everything that the pages show of a record. Raise CannotJudge if stats.py gives no report."""
    report, (found, unseen) = judge_runs(folder), judge_rules(folder)
    if not (folder / PLOT).exists():
        stats.plot(report["sides"], report["verdicts"], str(folder / PLOT))
    claims = [rule for rule in found if rule["rule"] in verify.CLAIMS]
    rules = sorted((rule for rule in found if rule not in claims), reverse=True,
                   key=lambda rule: verify.VERDICTS.index(rule["verdict"]))
    judged, declared = report["sides"], report["sides"][0].declared
    differ = differences([[run.start or {} for run in side.runs] for side in judged])
    if len(judged) == 1 and declared:
        judged = [stats.replace(judged[0], name="")]
    for i, side in enumerate(judged):
        values = [f"{name} {row[i]}" for name, *row in differ if "." not in name and max(map(len, row)) <= MAX_LABEL]
        if not declared and 0 < len(values) < 4:  # no flags are known
            side.name += f": {', '.join(values)}"
    sides = [describe_side(side, folder) for side in judged]
    diff = []
    if len(sides) > 1 and None not in (sides[0]["source"], sides[1]["source"]):
        diff = short_diff(sides[1]["source"], sides[0]["source"], (sides[1]["label"], sides[0]["label"]))
    started = max((str(run.start["started"]) for run in judged[0].runs if "started" in (run.start or {})),
                  default=folder.name[:10])
    loss, broken = report["loss"], sum(rule["verdict"] == "fail" for rule in rules)
    trial = next((rule["reason"] for rule in rules if rule["rule"] == verify.VAL_TOKENS and verify.TRIAL in rule["reason"]), "")
    return {"name": folder.name, "title": title_of(folder), "path": f"records/{folder.name}", "report": report,
            "sides": sides, "differ": differ, "diff": diff, "started": started,
            "date": started[:16].replace("T", " "), "claims": claims, "rules": rules,
            "broken": broken, "good": bool(loss["significant"]) and not broken, "unseen": unseen,
            "trial": trial and trial[trial.index(verify.TRIAL):],
            "track": f"{sides[0]['start'].get('preset', 'unknown preset')}, {sides[0]['where']}, "
                     + ("no target" if loss["target"] is None else f"target {loss['target']:g}"),
            "decimals": 1 + max(run.loss_decimals for run in judged[0].runs), "rows": rows_of(sides)}


def known(folder: Path) -> dict:
    """Return describe(folder), kept in .cache/ until a file of the record or of the judges changes."""
    seen, kept = hashlib.sha256(title_of(folder).encode()), HERE.parent / CACHE / folder.name
    for path in sorted([*folder.iterdir(), *Path(__file__).parent.glob("*.py")]):
        if path.name not in ("README.md", PLOT):
            seen.update(path.name.encode() + hashlib.sha256(path.read_bytes()).digest())
    try:
        digest, record = pickle.loads(kept.read_bytes())
    except Exception:  # there is none, or another version wrote it
        digest = None
    if digest != seen.digest() or not (folder / PLOT).exists():
        record = describe(folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(pickle.dumps((seen.digest(), record)))
    return record


def rows_of(sides: list[dict]) -> list[dict]:
    """Return the runs side by side: a row's name, and one run (or None) of each side."""
    numbers = dict.fromkeys(number for side in sides for number in side["runs"])
    found = [[side["runs"].get(number) for side in sides] for number in numbers]
    names = [next(f"run {number}" if run["seed"] is None else f"seed {run['seed']}" for run in runs if run)
             for number, runs in zip(numbers, found)]
    return [{"name": name, "runs": runs} for name, runs in zip(names, found)]


def title_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# Pages

def leaderboards(records: list[dict]) -> list[dict]:
    """Return a leaderboard for each preset, machine and target: its records by time. Good ones on known hardware have a rank."""
    tracks = {}
    for record in records:
        tracks.setdefault(record["track"], []).append(record)
    found = []
    for track, own in tracks.items():
        own.sort(key=lambda record: record["report"]["time"]["mean"] if record["report"]["time"] else math.inf)
        ranks = itertools.count(1)
        rows = [{"record": record, "rank": next(ranks) if record["good"] and UNKNOWN not in track else None}
                for record in own]
        found.append({"track": track, "rows": rows})
    return found


def write_pages() -> None:
    """Write all pages. Raise CannotJudge, before anything is written, if a record gives no verdict."""
    found = sorted((path.parent for path in HERE.glob("*/README.md")), reverse=True)
    ladders = [{"name": folder.name, "title": title_of(folder)} for folder in found if (folder / LADDER).exists()]
    folders = [folder for folder in found if not (folder / LADDER).exists()]
    if not folders:
        raise CannotJudge(f"no records in {HERE}; make one with `board.py add`")
    records = sorted(map(known, folders), key=lambda record: record["started"], reverse=True)
    texts = {HERE / record["name"] / "README.md": pages.render("record.md.jinja", record=record) for record in records}
    texts[HERE / "README.md"] = pages.render("board.md.jinja", records=records, ladders=ladders,
                                            boards=leaderboards(records))
    texts = {path: text.replace(f"{HERE.parent}{os.sep}", "") for path, text in texts.items()}
    for path, text in texts.items():
        check_private(path, text)
    for path, text in texts.items():
        path.write_bytes(text.encode("utf-8", "backslashreplace"))


# Publishing

def check_private(path: Path, text: str) -> None:
    """Raise CannotJudge if a text names this checkout's folder, the user's home folder or this machine.

    A machine whose name is also a word of the script, like `laptop`, reveals nothing."""
    names = {str(HERE.parent), os.path.expanduser("~"), socket.gethostname().partition(".")[0]}
    for name in names - {"", "/", "/root", "localhost"}:
        at = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
        if at and name not in leaks.source_of_checkout():
            line = text.count("\n", 0, at.start()) + 1
            raise CannotJudge(f"{path.name}, line {line}, names this machine or one of its folders ({name}); "
                              "race again, with data in data/, or remove the name from the race's files")


def files_of(race: Path) -> list[Path]:
    """Return a race's files to publish: the manifest and the logs."""
    return sorted(path for path in race.iterdir() if path.name == MANIFEST or path.suffix == ".txt")


def published(path: Path) -> str:
    """Return the text of a race's file. Raise CannotJudge if it is not text or names this machine."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CannotJudge(f"{path}: cannot be read as a log ({error}); copy it again, or remove it from the "
                          "folder") from error
    check_private(path, text)
    return text


def pack(folder: Path) -> None:
    """Put the files of a race that lie in a record's folder into an archive. Raise CannotJudge if there are none."""
    files, archive = files_of(folder), folder / logs.ARCHIVE
    if not files or archive.exists() or not (folder / "README.md").exists():
        raise CannotJudge(f"{folder} is no record with unpacked logs and no {logs.ARCHIVE}")
    logs.pack({path.name: path.read_bytes() for path in files}, archive)
    for path in files:
        path.unlink()
    write_pages()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it if the code that fills it fails."""
    if folder.exists():
        raise CannotJudge(f"{folder} exists; choose another name, or remove it")
    folder.mkdir(parents=True)
    try:
        yield
    except BaseException:
        shutil.rmtree(folder)
        raise


def add(races: list[Path], folder: Path, title: str) -> None:
    """Make a record of a race, or of ladders. Raise CannotJudge, without a trace, on no verdict, or if nobody wants the page of a
    race that breaks a rule."""
    for race in races:
        if not race.is_dir():
            raise CannotJudge(f"{race} is not a folder; name the folder of a race, like logs/race-ID")
        if not any(path.suffix == ".txt" for path in files_of(race)):
            raise CannotJudge(f"{race} holds no logs of a race; name a folder like logs/race-ID")
    if folder.resolve().parent != HERE:
        raise CannotJudge(f"{folder} is not in {HERE}; name a new folder there")
    manifest = stats.manifest_in(races[0])
    if len(races) > 1 or manifest and len(manifest.race["sides"]) > 2:
        import ladder  # which imports this module
        return ladder.keep(races, folder, ladder.judge(map(ladder.read, races)), title)
    with new_folder(folder):
        logs.pack({path.name: published(path).encode() for path in files_of(races[0])}, folder / logs.ARCHIVE)
        judge_runs(races[0].resolve())  # a refusal names this folder: the new one will be gone
        (folder / "README.md").write_text(f"# {' '.join(title.split())}\n", encoding="utf-8")
        record = known(folder)
        if record["broken"]:
            confirm([f"{rule['rule']}: {rule['reason']}" for rule in record["rules"] if rule["verdict"] == "fail"])
        write_pages()


def confirm(broken: list[str]) -> None:
    """Ask whether a page is to say that these rules are broken. Raise CannotJudge unless the answer is yes."""
    for rule in broken:
        print(pages.wrap(f"board.py: this race breaks a rule: {rule}"), file=sys.stderr)
    print("board.py: write a page that says so? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise CannotJudge("the race breaks a rule, and nothing was written; race again, or answer y")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="make a record folder from a race, or from ladders")
    adding.add_argument("races", type=Path, nargs="+", metavar="race", help="the folder of a race, like logs/race-ID")
    adding.add_argument("folder", type=Path, help="a new folder, like records/DATE_NAME")
    adding.add_argument("title", help="what was tried, in a sentence")
    packing = commands.add_parser("pack", help=f"put the logs in a record's folder into {logs.ARCHIVE}")
    packing.add_argument("folder", type=Path, help="a record, like records/DATE_NAME")
    options = parser.parse_args(arguments)
    leaks.trainer()  # if it cannot be imported, this says so
    try:
        if options.command == "add":
            add(options.races, options.folder.absolute(), options.title)
        elif options.command == "pack":
            pack(options.folder.absolute())
        else:
            shutil.rmtree(HERE.parent / CACHE, ignore_errors=True)  # judge all again
            write_pages()
    except (CannotJudge, OSError) as reason:
        return logs.refuse("board.py", reason)
    page = (options.folder if options.command else HERE) / "README.md"
    print(f"written: {os.path.relpath(page)} and the other pages")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
