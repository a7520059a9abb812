"""Record folders from races, and the leaderboard from the folders.

    python records/board.py add logs/race-ID records/DATE_NAME "what the record shows"
    python records/board.py

The first copies a race's logs and manifest into a new folder and writes its README.md and plot.png by records/stats.py.
The copies are as the runs wrote them, but for what names a folder of the machine: the log's own, and torchrun's;
the second writes records/README.md anew from all folders. Every figure stands beside the command that makes it again.

Exit status: 0 written, 2 it cannot be.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from pathlib import Path

import logs
import stats

HERE = Path(__file__).resolve().parent
MANIFEST = "race.jsonl"


def judgement(folder: Path) -> tuple[list[str], dict]:
    """The words of the stats.py command that judges a record's folder, and its report. Raises stats.CannotJudge."""
    sides = {run.start["race"]["side"] for run in logs.read([str(folder)]).runs if run.start and run.start.get("race")}
    words = [f"records/{folder.name}", *(["--side", "a"] if "b" in sides else [])]
    return words, stats.judge(stats.parse([str(folder), *words[1:]]))


def write_record(folder: Path, title: str) -> None:
    words, report = judgement(folder)
    stats.plot(report, str(folder / "plot.png"))
    command = "python records/stats.py " + " ".join(words)
    sides = {side.name: side.runs for side in report["sides"]}
    lines = [f"# {title}", "", *stats.show_markdown(report)[:-4], "", "![losses and times](plot.png)", "",
             "## Made again by", "", "```", f"{command} --markdown            # this page's figures",
             f"{command} --plot plot.png       # the picture",
             f"python records/verify.py records/{folder.name}   # the rules", "```", ""]
    for name, runs in sides.items():
        start = runs[0].start or {}
        revision = (start.get("git") or {}).get("revision", "unknown")
        device = (start.get("hardware") or {}).get("device", "unknown hardware")
        lines.append(f"- {name}: {len(runs)} runs, revision `{revision}`, {start.get('ranks', '?')} rank(s) on {device}")
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_board() -> None:
    rows = []
    for folder in sorted((path for path in HERE.iterdir() if (path / "README.md").is_file()), reverse=True):
        title = (folder / "README.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        title = title.replace("|", "\\|")
        words, report = judgement(folder)
        loss, time, compared = report["loss"], report["time"], report["comparison"]
        runs = report["sides"][0].runs
        rows.append(f"| [{folder.name}]({folder.name}/) | {title} | {stats.show_mean_loss(loss, runs)} | "
                    f"{loss['target']:g} | {loss['p']:.2g} | {stats.show_time(time) if time else '-'} | {loss['n']} | "
                    f"{stats.show_ratio(compared) if compared else '-'} | {report['verdict']} | "
                    f"`python records/stats.py {' '.join(words)}` |")
    if not rows:
        raise stats.CannotJudge(f"no record lies in {HERE}; make one by `board.py add`")
    text = ["# Records", "", "Written by `python records/board.py` from the folders beside it; mean ± σ over runs.", "",
            "| record | what it shows | val loss | target | p | time | n | against the other side | verdict | made by |",
            "|---|---|---|---|---|---|---|---|---|---|", *rows]
    (HERE / "README.md").write_text("\n".join(text) + "\n", encoding="utf-8")


def public(log: str) -> str:
    """A log without what names a folder of the machine that wrote it: nobody else can use that, and it may tell a name."""
    lines = log.split("\n")
    for i, line in enumerate(lines):
        if line.startswith('{"run_id": '):
            start = logs.parse_json(line)
            if "log_dir" in start.get("config", {}):
                start["config"]["log_dir"] = "logs"
            start.get("environment", {}).pop("TORCHELASTIC_ERROR_FILE", None)
            lines[i] = json.dumps(start)
    return "\n".join(lines)


def add(race: Path, folder: Path, title: str) -> None:
    """Raises CannotJudge, and leaves nothing behind, where the race's logs give no verdict."""
    if not race.is_dir():
        raise stats.CannotJudge(f"{race} is no folder; name the folder of a race, like logs/race-ID")
    if folder.exists():
        raise stats.CannotJudge(f"{folder} exists; choose another name, or remove it")
    if folder.resolve().parent != HERE:
        raise stats.CannotJudge(f"{folder} is not in {HERE}; records lie there")
    folder.mkdir()
    try:
        for path in sorted(race.iterdir()):
            if path.suffix == ".txt":
                try:
                    log = public(path.read_text(encoding="utf-8"))
                except ValueError as error:
                    raise stats.CannotJudge(f"{path}: cannot be read as a log ({error}); copy it again, or take it out "
                                            "of the folder") from error
                (folder / path.name).write_text(log, encoding="utf-8")
            elif path.name == MANIFEST:
                shutil.copy2(path, folder)
        write_record(folder, title)
    except BaseException:
        shutil.rmtree(folder)
        raise


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
            add(options.race, options.folder, options.title)
        write_board()
    except (stats.CannotJudge, OSError) as reason:
        print(f"board.py: error: {reason}", file=sys.stderr)
        return 2
    print(f"written: {os.path.relpath(HERE / 'README.md')}")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
