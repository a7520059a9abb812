"""Judges a ladder: ideas raced in turn against one base, each with the same seeds.

    python records/race.py -n 5 --vs "--exclude_self true" --vs "--untie_at 0.67" -- --preset laptop     races one
    python records/ladder.py logs/race-ID                               its table
    python records/ladder.py logs/race-ID --record records/DATE_ladder  likewise, and keeps it: page, picture and logs

Of each idea: what it changes in the final validation loss and in the time, as means over the seeds of the difference to
the base's run with the same seed, with 95 % confidence intervals by Student's t; and the two-sided p of the losses, as
it is and by Holm's correction for that many ideas (Scandinavian Journal of Statistics 6, 1979). An idea is kept where
its loss is lower at a corrected p below 0.05. Give an idea that costs time fewer steps (--num_steps): losses then
compare at equal time.

Exit status: 0 judged, 2 there is nothing to judge.
"""

import logs

logs.end_at_ctrl_c(__name__)  # scipy takes seconds to import

import argparse
import io
import math
import shlex
import sys
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import scipy.stats

import pages
import picture
import stats

LEVEL = 0.05
ARCHIVE, PICTURE = "logs.tar.xz", "ladder.png"  # all logs hold the same source: packed together they are small


def read(folder):
    """(the race's declaration, {side: {seed: (final loss, seconds)}}). stats.CannotJudge where a run is missing."""
    manifest = stats.Manifest.read(folder / stats.MANIFEST)
    done, sides = manifest.done(), manifest.race["sides"]
    missing = sum((run, side) not in done for side in sides for run in range(1, manifest.race["n"] + 1))
    if len(sides) < 3 or manifest.race["n"] < 3:
        raise stats.CannotJudge(f"{folder}: a race of {len(sides)} sides, {manifest.race['n']} runs of each; a ladder "
                                "has a base and two ideas at least, and three runs of each; of two sides stats.py "
                                "--side a tells more")
    if missing:
        raise stats.CannotJudge(f"{folder}: {missing} runs are not done; go on with race.py --resume "
                                f"{folder / stats.MANIFEST}")
    found = {}
    for (run, side), attempt in done.items():
        runs, rejected, _ = logs.read_file(str(folder / f"{attempt['run_id']}.txt"))
        if len(runs) != 1 or not runs[0].train_time_ms:
            why = f": {rejected[0].reason}" if rejected else ""
            raise stats.CannotJudge(f"{attempt['run_id']}.txt holds no whole run{why}; restore the logs of the race")
        loss = (runs[0].end or {}).get("final_val_loss", runs[0].final_loss)  # in full: rounded ones differ alike
        found.setdefault(side, {})[run] = loss, runs[0].train_time_ms / 1000
    return manifest.race, found


def holm(values):
    """Holm's corrected p of each of several p."""
    order, left = np.argsort(values), np.arange(len(values), 0, -1)
    corrected = np.empty(len(values))
    corrected[order] = np.maximum.accumulate(np.minimum(1, left * np.asarray(values)[order]))
    return corrected.tolist()


def paired(ours, base):
    """(mean difference, its interval's half width at 95 %, two-sided p) of n pairs."""
    difference = ours - base
    error = scipy.stats.sem(difference)
    p = scipy.stats.ttest_rel(ours, base).pvalue if error else float(difference.mean() == 0)
    return difference.mean(), scipy.stats.t.ppf(0.975, len(difference) - 1) * error, p


def judge(race, found):
    """The base's figures, and a row of each idea, the largest gain first."""
    ideas = {side: stats.own_flags(race, side) for side in race["sides"]}
    base = min(ideas, key=ideas.get)  # that without any
    seeds = sorted(found[base])
    figures = {side: np.transpose([runs[seed] for seed in seeds]) for side, runs in found.items()}
    base_losses, base_seconds = figures.pop(base)
    rows = []
    for side, (losses, seconds) in figures.items():
        loss, time = paired(losses, base_losses), paired(np.log(seconds), np.log(base_seconds))
        rows.append({"idea": ideas[side], "loss": loss[0], "loss_ci": loss[1], "p": loss[2], "time": math.exp(time[0]),
                     "time_ci": math.exp(time[0]) * math.sinh(time[1]), "sd": (losses - base_losses).std(ddof=1)})
    for row, corrected in zip(rows, holm([row["p"] for row in rows])):
        row |= {"holm": corrected, "kept": bool(corrected < LEVEL and row["loss"] < 0)}
    return {"flags": shlex.join(race["sides"][base]["flags"]), "n": len(seeds), "losses": base_losses,
            "seconds": base_seconds, "rows": sorted(rows, key=lambda row: row["loss"])}


def table(found, title=None):
    """Markdown; with a title the whole page of a record."""
    sd, loss = float(np.median([row["sd"] for row in found["rows"]])), stats.summary(found["losses"])
    try:
        wanted = stats.runs_needed(sd, 0.01 * loss["mean"], LEVEL / 2, 0.8) if sd else 2
    except stats.CannotJudge:
        wanted = f"more than {stats.MOST_RUNS:,}"
    return pages.show("ladder.md.jinja", **found, title=title, loss=loss, time=stats.summary(found["seconds"]), sd=sd,
                      wanted=wanted, level=LEVEL, picture=PICTURE, archive=ARCHIVE)


def draw(found, path):
    """Each idea's difference in loss with its interval."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = found["rows"][::-1]
    with matplotlib.rc_context(picture.STYLE):
        figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
    for at, row in enumerate(rows):
        color = "#1b6ac9" if row["kept"] else "#8a8a8a" if row["holm"] >= LEVEL else "#c0392b"
        axes.errorbar(row["loss"], at, xerr=row["loss_ci"], fmt="o", color=color, capsize=4)
    axes.axvline(0, color="#333333", lw=1)
    axes.set_yticks(range(len(rows)), [textwrap.shorten(row["idea"], 60, placeholder=" …") for row in rows])
    axes.set_xlabel("change of the final validation loss, nats (95 %)")
    figure.suptitle(f"{found['n']} seeds against one base; blue: lower, red: higher, at p < {LEVEL:g} by Holm's "
                    "correction", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def keep(folder, record, found, title):
    """The record's folder: README.md, picture, and race.jsonl and the logs packed together."""
    import board
    with board.new_folder(record):
        draw(found, record / PICTURE)
        with tarfile.open(record / ARCHIVE, "w:xz") as archive:
            for path in (folder / stats.MANIFEST, *sorted(folder.glob("*.txt"))):
                text, packed = board.published(path).encode(), tarfile.TarInfo(path.name)
                packed.size = len(text)
                archive.addfile(packed, io.BytesIO(text))
        (record / "README.md").write_text(f"{table(found, title)}\n", encoding="utf-8")
        if record.absolute().parent == board.HERE:
            board.write_pages()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("race", type=Path, help="the folder of a race with several --vs")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="keep it there")
    parser.add_argument("--title", default="A ladder", help="of the record's page")
    options = parser.parse_args(arguments)
    try:
        found = judge(*read(options.race))
        print(table(found))
        if options.record:
            keep(options.race, options.record, found, options.title)
            print(f"\nkept in {options.record}")
    except (stats.CannotJudge, OSError) as reason:
        print(stats.brief(f"ladder.py: error: {reason}"), file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    logs.run_main(main)
