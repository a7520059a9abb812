"""List the races of this clone, the newest last: what was tried, and what it showed.

    ./run.sh history            a line for each idea of each race in logs/
    ./run.sh history --json     an array of objects

A program that starts anew learns here what was tried. A race that has not ended, or that an older
revision ran, has no verdict here; ./run.sh stats FOLDER judges it.
"""

import argparse
import os

import logs
from logs import UserError
from manifest import MANIFEST, Manifest


def rows_of(manifest):
    """Return a dict for each idea of a race, or one for a race of one version."""
    race = manifest.race
    answer = race.get("answer", {})
    ideas = {idea["name"]: idea for idea in answer.get("ideas", [])}
    *names, base = logs.side_names(race).values()
    about = {
        "race": race["id"],
        "folder": os.path.relpath(manifest.path.parent),
        "base": base,
        "head": race.get("head"),
        "at": race.get("elsewhere"),
        "confirms": race.get("confirms"),
    }
    rows = []
    for name in names or [base]:
        found = ideas.get(name, {})
        same_loss = found.get("to_same_loss")
        rows.append(
            {
                "idea": name,
                "verdict": found.get("verdict", answer.get("verdict", "no verdict")),
                "best": answer.get("best") == name,
                "ratio": same_loss and same_loss["ratio"],
                "low": same_loss and same_loss["low"],
                "high": same_loss and same_loss["high"],
                **about,
            }
        )
    return rows


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    options = parser.parse_args(arguments)
    rows = []
    for path in sorted(logs.HOME.glob(f"race-*/{MANIFEST}")):
        try:
            rows += rows_of(Manifest.read(path))
        except UserError as reason:
            logs.refuse("history.py", reason)
    if options.json:
        print(logs.show_json(rows))
        return 0
    table = [["idea", "verdict", "time to the base's loss", "base", "head", "folder"]]
    for row in rows:
        ratio = (
            f"{row['ratio']:.3f} ({row['low']:.3f} to {row['high']:.3f})" if row["ratio"] else "-"
        )
        idea = row["idea"] + (f", at {row['at']}" if row["at"] else "")
        table.append([idea, row["verdict"], ratio, row["base"], row["head"] or "-", row["folder"]])
    print(logs.columns(table) if rows else "no race in logs/ yet")
    return 0


if __name__ == "__main__":
    logs.run_main(main)
