"""Write record folders from races, their pages, and the leaderboard.

    python records/board.py add latest NAME "what was tried"     make a record of the last race, records/DATE_NAME
    python records/board.py                                      show the leaderboard
    python records/board.py write                                judge all records again, and write all pages

`add` packs a race's logs and manifest into logs.tar.xz of a new folder. It refuses files that name
this machine or its folders. If the race breaks a rule, it asks first. `add` and `write` write, from
the folders alone, each record's README.md (its first line keeps the title) and the leaderboard
records/README.md. A missing plot.png is drawn; remove one to draw it again.

Exit status: 0 written or shown, 2 not possible (stderr states why).
"""

import argparse
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import socket
import sys
from datetime import date
from pathlib import Path
from urllib.parse import quote

import leaks
import logs
import pages
import stats
import verify
from logs import UserError, require
from manifest import MANIFEST, race_of

HERE = Path(__file__).resolve().parent
PLOT = "plot.png"
MAX_DIFF_LINES = 60
UNKNOWN = "unknown hardware"  # records on it have no rank


# Contents of a record


def judge_runs(folder):
    """Return the report of stats.py. UserError if runs do not compare."""
    options = stats.parse([str(folder)])
    try:
        return stats.judge(stats.choose_sides(options), options)
    except UserError as reason:
        raise UserError(
            f"{reason}; run `.venv/bin/python records/stats.py {folder}` for details"
        ) from None


def judge_rules(folder):
    """Return verify.py's findings, and where the paragraph is on what no rule sees."""
    options = verify.parse([str(folder)])
    case = verify.read_case(options)
    return [finding._asdict() for finding in verify.verify(options, case)], verify.unseen(case)


def differences(sides):
    """Return (name, value of each side) of the config values that differ between the first runs of
    sides."""
    configs = [logs.config_of(side.runs[0]) for side in sides]
    rows = []
    for name in dict.fromkeys(name for config in configs for name in config):
        values = [config.get(name, "-") for config in configs]
        texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
        if len({*texts}) > 1:
            rows.append((name, *texts))
    return rows


def short_diff(before, after, names):
    changed = verify.difference(before, after)[2:]
    lines = [f"--- {names[0]}", f"+++ {names[1]}", *changed] if changed else []
    more = len(lines) - MAX_DIFF_LINES
    return (
        lines if more <= 0 else [*lines[:MAX_DIFF_LINES], f"… and {logs.plural(more, 'more line')}"]
    )


def describe_side(side, folder):
    """Return what the pages show of a side."""
    runs = side.runs
    letter = side.name.removeprefix("side ")
    start = runs[0].start or {}
    ranks = logs.plural(runs[0].gpus, "rank") if runs[0].gpus else "unknown ranks"
    card = " and ".join(sorted({run.card or UNKNOWN for run in runs}))
    source = runs[0].source and runs[0].script
    declared = side.declared.get("sides", {}).get(letter)
    numbers = [race.run if (race := race_of(run)) else str(i) for i, run in enumerate(runs, 1)]
    shown = {}
    for number, run in zip(numbers, runs):
        shown[number] = {
            "link": f"{logs.ARCHIVE}#{quote(Path(run.path).relative_to(folder).as_posix())}",
            "loss": run.loss_text,
            "seed": (run.start or {}).get("seed"),
            "time": run.train_time_ms and run.train_time_ms / 1000,
        }
    return {
        "label": side.label,
        "runs": shown,
        "preset": start.get("preset", "unknown preset"),
        "git": start.get("git") or {},
        "source": source,
        "sha256": (
            start.get("source_sha256") or source and hashlib.sha256(source.encode()).hexdigest()
        ),
        "flags": declared and shlex.join(declared["flags"]),
        "where": f"{ranks} on {card}",
    }


def describe(folder):
    """Return everything that the pages show of a record. Raise UserError if stats.py gives no
    report."""
    report = judge_runs(folder)
    found, unseen = judge_rules(folder)
    if not (folder / PLOT).exists():
        stats.plot(report["sides"], report["verdicts"], str(folder / PLOT))
    judged = report["sides"]
    declared = report["sides"][0].declared
    several = len(judged) > 2
    claims = [rule for rule in found if rule["rule"] in verify.CLAIMS]
    rules = sorted(
        (rule for rule in found if rule not in claims),
        reverse=True,
        key=lambda rule: verify.VERDICTS.index(rule["verdict"]),
    )
    if len(judged) == 1 and declared:
        judged = [stats.replace(judged[0], name="")]
    sides = [describe_side(side, folder) for side in judged]
    diff = []
    if len(sides) == 2 and None not in (sides[0]["source"], sides[1]["source"]):
        diff = short_diff(
            sides[1]["source"], sides[0]["source"], (sides[1]["label"], sides[0]["label"])
        )
    started = max(
        (str(run.start["started"]) for run in judged[0].runs if "started" in (run.start or {})),
        default=folder.name[:10],
    )
    loss = report["loss"]
    broken = sum(rule["verdict"] == "fail" for rule in rules)
    preset = sides[0]["preset"]
    trial = next(
        (
            rule["reason"]
            for rule in rules
            if rule["rule"] == verify.VAL_TOKENS and verify.NO_TARGET in rule["reason"]
        ),
        "",
    )
    return {
        "name": folder.name,
        "title": title_of(folder),
        "path": f"records/{folder.name}",
        "report": report,
        "several": several,
        "conclusion": several and stats.conclusion(report["verdicts"]),
        "sides": sides,
        "differ": [] if several else differences(judged),
        "diff": diff,
        "started": started,
        "date": started[:16].replace("T", " "),
        "claims": [] if several else claims,
        "rules": rules,
        "broken": broken,
        "unseen": unseen,
        "preset": preset,
        "good": bool(
            loss["significant"] and report["time"] and not broken and not judged[0].clock_reset
        ),
        "trial": trial and trial[trial.index(verify.NO_TARGET) :],
        "track": track_of(preset, sides[0]["where"], judged[0].runs[0], loss["target"]),
        "decimals": 1 + max(run.loss_decimals for run in judged[0].runs),
        "rows": rows_of(sides),
    }


def track_of(preset, where, run, target):
    """Return what the records of a leaderboard have in common."""
    facts = {
        "CPU": run.cpu,
        "threads": run.threads,
        "torch": run.torch,
        "driver": run.driver,
        "validated on": run.validated_on,
    }
    return ", ".join(
        [
            preset,
            where,
            *(f"{name} {fact}" for name, fact in facts.items() if fact),
            "no target" if target is None else f"target {target:g}",
        ]
    )


def rows_of(sides):
    """Return the runs side by side: a row's name, and one run (or None) of each side."""
    rows = []
    for number in dict.fromkeys(number for side in sides for number in side["runs"]):
        runs = [side["runs"].get(number) for side in sides]
        seed = next(run["seed"] for run in runs if run)
        rows.append({"name": f"run {number}" if seed is None else f"seed {seed}", "runs": runs})
    return rows


def title_of(folder):
    return (folder / "README.md").read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


# Pages


def refusal(record, other):
    """Return why stats.py does not compare two records, or None. Without their declarations runs
    may be of two machines."""
    try:
        stats.check_comparable(
            *(stats.replace(one["report"]["sides"][0], declared={}) for one in (record, other))
        )
    except UserError as reason:
        return reason


def leaderboards(records):
    """Return leaderboards of records of one preset that stats.py compares, by time. A record with
    a rank is good, of known hardware, and shares no run with another."""
    boards = []
    for record in sorted(
        records,
        key=lambda record: (
            record["report"]["time"]["mean"] if record["report"]["time"] else math.inf
        ),
    ):

        def unlike(row):
            return record["preset"] != row["record"]["preset"] or isinstance(
                refusal(record, row["record"]), stats.Mixed
            )

        rows = next((rows for rows in boards if not any(map(unlike, rows))), None)
        if rows is None:
            boards.append(rows := [])
        placed = [row["record"] for row in rows if row["rank"]]
        good = (
            record["good"]
            and UNKNOWN not in record["track"]
            and not any(refusal(record, other) for other in placed)
        )
        rows.append({"record": record, "rank": len(placed) + 1 if good else None})
    return [
        {"track": max((row["record"]["track"] for row in rows), key=len), "rows": rows}
        for rows in boards
    ]


def write_pages():
    """Write all pages. Raise UserError, before anything is written, if a record gives no verdict."""
    folders = sorted((path.parent for path in HERE.glob("*/README.md")), reverse=True)
    require(folders, f"no records in {HERE}; make one with `board.py add`")
    records = sorted(map(describe, folders), key=lambda record: record["started"], reverse=True)
    texts = {
        HERE / record["name"] / "README.md": pages.render("record.md.jinja", record=record)
        for record in records
    }
    ladders = [record for record in records if record["several"]]
    boards = leaderboards([record for record in records if not record["several"]])
    texts[HERE / "README.md"] = pages.render(
        "board.md.jinja", newest=records[0], ladders=ladders, boards=boards
    )
    texts = {path: text.replace(f"{HERE.parent}{os.sep}", "") for path, text in texts.items()}
    for path, text in texts.items():
        check_private(path, text)
    for path, text in texts.items():
        path.write_bytes(text.encode("utf-8", "backslashreplace"))


# Publishing


def check_private(path, text):
    """Raise UserError if a text names this checkout's folder, the user's home folder or this
    machine.

    A machine whose name is also a word of the script, like `laptop`, reveals nothing."""
    names = {str(HERE.parent), os.path.expanduser("~"), socket.gethostname().partition(".")[0]}
    for name in names - {"", "/", "/root", "localhost"}:
        at = re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text)
        if at and name not in leaks.source_of_checkout():
            line = text.count("\n", 0, at.start()) + 1
            raise UserError(
                f"{path.name}, line {line}, names this machine or one of its folders ({name}); "
                "race again, with data in data/, or remove the name from the race's files"
            )


def files_of(race):
    """Return a race's files to publish: the manifest and the logs."""
    return sorted(path for path in race.iterdir() if path.name == MANIFEST or path.suffix == ".txt")


def published(path):
    """Return the text of a race's file. Raise UserError if it is not text or names this machine."""
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise UserError(
            f"{path}: cannot be read as a log ({error}); copy it again, or remove it from the "
            "folder"
        ) from error
    check_private(path, text)
    return text


def add(race, folder, title):
    """Make a record of a race. Raise UserError, without a trace, if there is no verdict or nobody
    wants the page."""
    require(
        race.is_dir() and any(path.suffix == ".txt" for path in files_of(race)),
        f"{race} holds no logs of a race; name a folder like logs/race-ID",
    )
    require(folder.resolve().parent == HERE, f"{folder} is not in {HERE}; name a new folder there")
    require(not folder.exists(), f"{folder} exists; choose another name, or remove it")
    folder.mkdir(parents=True)
    # it takes 15 s
    print("board.py: packs the logs, judges them and checks the rules …", flush=True)
    try:
        logs.pack(
            {path.name: published(path).encode() for path in files_of(race)}, folder / logs.ARCHIVE
        )
        judge_runs(race.resolve())  # a refusal names this folder: the new one will be gone
        (folder / "README.md").write_text(f"# {' '.join(title.split())}\n", encoding="utf-8")
        record = describe(folder)
        for rule in record["rules"]:
            if rule["verdict"] == "fail":
                said = f"board.py: this race breaks a rule: {rule['rule']}: {rule['reason']}"
                print(pages.wrap(said), file=sys.stderr)
        if record["broken"]:
            print(
                "board.py: write a page that says so? [y/N] ", end="", file=sys.stderr, flush=True
            )
            require(
                sys.stdin.readline().strip().lower() in ("y", "yes"),
                "the race breaks a rule, and nothing was written; race again, or answer y",
            )
        write_pages()
    except BaseException:
        shutil.rmtree(folder)
        raise


def new_folder(word):
    """Return the folder of a new record; a NAME gets the date."""
    return (
        HERE / f"{date.today()}_{word}" if re.fullmatch(r"(?!\d{4}-)[\w.-]+", word) else Path(word)
    )


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command")
    adding = commands.add_parser("add", help="make a record folder from a race")
    adding.add_argument(
        "race",
        type=logs.or_latest(logs.RACE),
        help="the folder of a race, like logs/race-ID; or latest",
    )
    adding.add_argument(
        "folder", type=new_folder, help="a new folder like records/DATE_NAME, or NAME for today's"
    )
    adding.add_argument("title", help="what was tried, in a sentence")
    commands.add_parser("write", help="judge all records again, and write all pages")
    options = parser.parse_args(arguments)
    try:
        if not options.command:
            print((HERE / "README.md").read_text(encoding="utf-8"), end="")
            return 0
        leaks.trainer()  # if it cannot be imported, this says so
        if options.command == "add":
            add(Path(options.race), options.folder.absolute(), options.title)
        else:
            write_pages()
    except (UserError, OSError) as reason:
        return logs.refuse("board.py", reason)
    page = (options.folder if options.command == "add" else HERE) / "README.md"
    print(f"written: {os.path.relpath(page)} and the other pages")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
