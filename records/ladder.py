"""Judge a ladder: ideas raced in turn against one base, each with the same seeds, in one race or on several days.

    python records/race.py -n 5 --vs "--sublayer_scales true" --vs "--untie_at 0.67" -- --preset laptop     race two ideas
    python records/ladder.py logs/race-ID logs/race-OTHER               print the table of these races
    python records/ladder.py logs/race-ID --record records/DATE_ladder  also keep it: page, plot and logs
    python records/ladder.py logs/race-ID --equal-time                  also print the command of a race at equal time

The table has the change in final validation loss and in time of each idea: the mean over seeds of the difference to the
base's run with the same seed, with 95 % confidence intervals (Student's t). p is two-sided, uncorrected and with Holm's
correction (Scandinavian Journal of Statistics 6, 1979) for all ideas of all races. The bases must have the same config,
source and data.

An idea is kept if its loss is lower at a corrected p below 0.05 and its time's 95 % interval ends near the base's time
or below. An idea with a lower loss that takes longer is called slower: it may be no gain at equal time. --equal-time
prints a race on new seeds in which each idea has as many steps as fit into the base's time. If the interval neither
ends near the base's time nor lies above it, the time is unknown: race again on a quieter machine.

Exit status: 0 judged, 2 nothing to judge.
"""

import logs

logs.end_at_ctrl_c(__name__)  # scipy takes seconds to import

import argparse
import io
import math
import re
import shlex
import tarfile
import textwrap
from pathlib import Path

import numpy as np
import scipy.stats

import board
import pages
import picture
import stats

LEVEL = 0.05
NO_LONGER = 1.1  # times the base's time: an interval that ends below it shows no cost
ARCHIVE, PICTURE = "logs.tar.xz", "ladder.png"  # all logs contain the same source, so they compress well together
VALIDATION = "val data", "val_tokens", "val_len"  # keys of facts_of
COLORS = {"lower": "#1b6ac9", "slower": "#d97706", "higher": "#c0392b"}


def read(folder):
    """Return (declaration, {(run, side): logs.Run}) of a race. Raise CannotJudge if a run is missing."""
    manifest = stats.Manifest.read(folder / stats.MANIFEST)
    race, done, runs = manifest.race, manifest.done(), {}
    sides, n = race["sides"], race["n"]
    stats.require(len(sides) > 1 and n > 2, f"{folder}: a race of {stats.plural(len(sides), 'side')}, "
                  f"{stats.plural(n, 'run')} of each; a ladder has a base, an idea or more, and three runs of each")
    versions = {(side["revision"], side.get("folder")) for side in sides.values()}
    stats.require(len(versions) == 1 and not race["until_decided"], f"{folder}: a race of versions, or one that "
                  "ends when it is decided; a ladder's ideas are flags, its n is fixed; stats.py --side a judges this")
    missing = sum((run, side) not in done for side in sides for run in range(1, n + 1))
    stats.require(not missing, f"{folder}: {stats.plural(missing, 'run')} missing; resume with race.py --resume "
                  f"{folder / stats.MANIFEST}")
    for which, attempt in done.items():
        found, rejected, _ = logs.read_file(str(folder / f"{attempt['run_id']}.txt"))
        why = f": {rejected[0].reason}" if rejected else ""
        stats.require(len(found) == 1 and found[0].train_time_ms,
                      f"{attempt['run_id']}.txt holds no complete run{why}; restore the logs of the race")
        runs[which] = found[0]
    return race, runs


def figures_of(run):
    """Return (final loss, seconds). The loss is not rounded: rounded differences would often be equal."""
    return (run.end or {}).get("final_val_loss", run.final_loss), run.train_time_ms / 1000


def facts_of(race, run):
    """Return {name: value} of what the bases must have in common, with digests of the data instead of paths."""
    shards = (run.start or {}).get("shards") or {}
    facts = {"source": str(run.source_sha256)[:12], "ranks": race["ranks"], **stats.config_of(run),
             **{f"{split} data": [shard["sha256"][:12] for shard in of_split] for split, of_split in shards.items()}}
    return {name: fact for name, fact in facts.items() if name not in ("train_files", "val_files")}


def holm(values):
    """Return the p-values with Holm's correction."""
    order, left = np.argsort(values), np.arange(len(values), 0, -1)
    corrected = np.empty(len(values))
    corrected[order] = np.maximum.accumulate(np.minimum(1, left * np.asarray(values)[order]))
    return corrected.tolist()


def paired(ours, base):
    """Return (mean difference, half width of its 95 % interval, two-sided p) of pairs."""
    difference = ours - base
    error = scipy.stats.sem(difference)
    p = scipy.stats.ttest_rel(ours, base).pvalue if error else float(difference.mean() == 0)
    return difference.mean(), scipy.stats.t.ppf(0.975, len(difference) - 1) * error, p


def judge(races):
    """Return the bases' figures and a row for each idea, largest gain first. races: results of read."""
    bases, rows, first = [], [], None
    for number, (race, runs) in enumerate(races, 1):
        stats.require(all(race["id"] != base["id"] for base in bases), f"race {race['id']} is given twice")
        ideas = {side: stats.own_flags(race, side) for side in race["sides"]}
        base = min(ideas, key=ideas.get)  # the side without flags of its own
        n, facts = race["n"], facts_of(race, runs[1, base])
        figures = {side: np.transpose([figures_of(runs[run, side]) for run in range(1, n + 1)]) for side in ideas}
        one, wanted = first = first or (race["id"], facts)
        differ = [f"{name}: {wanted.get(name)} and {facts.get(name)}" for name in {**wanted, **facts}
                  if wanted.get(name) != facts.get(name)]
        stats.require(not differ, f"the bases of races {one} and {race['id']} differ in {'; '.join(differ[:3])}"
                      f"{f'; and {len(differ) - 3} more' if len(differ) > 3 else ''}: judge each race by itself")
        base_losses, base_seconds = figures.pop(base)
        bases.append({"id": race["id"], "n": n, "ranks": race["ranks"], "seed": race["seed"],
                      "loss": stats.summary(base_losses),
                      "time": stats.summary(base_seconds), "flags": shlex.join(race["sides"][base]["flags"])})
        for side, (losses, seconds) in figures.items():
            its = facts_of(race, runs[1, side])
            stats.require(all(its.get(name) == facts.get(name) for name in VALIDATION), f"{ideas[side]}: an idea must "
                          "be validated on the same data as its base; race it without that flag")
            loss, loss_ci, p = paired(losses, base_losses)
            log, log_ci, _ = paired(np.log(seconds), np.log(base_seconds))
            rows.append({"idea": ideas[side], "race": number, "steps": runs[1, side].last_step,
                         "loss": loss, "loss_ci": loss_ci, "p": p, "time": math.exp(log),
                         "time_from": math.exp(log - log_ci), "time_to": math.exp(log + log_ci),
                         "pace": "slower" if log > log_ci else "faster" if log < -log_ci else "",
                         "sd": (losses - base_losses).std(ddof=1)})
    for row, corrected in zip(rows, holm([row["p"] for row in rows])):
        lower = corrected < LEVEL and row["loss"] < 0
        kept = "yes" if row["time_to"] < NO_LONGER else "time unknown"
        row |= {"holm": corrected, "kept": "no" if not lower else row["pace"] if row["pace"] == "slower" else kept}
    return {"bases": bases, "rows": sorted(rows, key=lambda row: row["loss"])}


def at_equal_time(found):
    """Yield each race's command on new seeds, with the steps of each idea that fit into the base's time."""
    for number, base in enumerate(found["bases"], 1):
        words = ["-n", str(base["n"]), "--ranks", str(base["ranks"])]
        for row in found["rows"]:
            flags = re.sub(r"(^| )--num_steps[ =]\d+", "", row["idea"])
            if row["race"] == number:
                words += ["--vs", f"{flags} --num_steps {max(1, int(row['steps'] / row['time']))}".strip()]
        seed = ["--seed", str(base["seed"] + base["n"])]
        yield f".venv/bin/python records/race.py {shlex.join(words)} -- {base['flags']} {shlex.join(seed)}"


def table(found, title=None):
    """Return the table in Markdown; with a title the page of a record."""
    sd = float(np.median([row["sd"] for row in found["rows"]]))
    try:
        wanted = stats.runs_needed(sd, 0.01 * found["bases"][0]["loss"]["mean"], LEVEL / 2, 0.8) if sd else 2
    except stats.CannotJudge:
        wanted = f"more than {stats.MOST_RUNS:,}"
    return pages.show("ladder.md.jinja", **found, title=title, sd=sd, wanted=wanted, level=LEVEL, no_longer=NO_LONGER,
                      picture=PICTURE, archive=ARCHIVE)


def draw(found, path):
    """Plot each idea's difference in loss with its interval."""
    import matplotlib
    from matplotlib.figure import Figure

    rows = found["rows"][::-1]
    with matplotlib.rc_context(picture.STYLE):
        figure = Figure(figsize=(9, 1.2 + 0.36 * len(rows)), layout="constrained")
        axes = figure.subplots()
    for at, row in enumerate(rows):
        shown = "higher" if row["loss"] > 0 else "slower" if row["kept"] == "slower" else "lower"
        axes.errorbar(row["loss"], at, xerr=row["loss_ci"], fmt="o", capsize=4,
                      color=COLORS[shown] if row["holm"] < LEVEL else "#8a8a8a")
    axes.axvline(0, color="#333333", lw=1)
    axes.set_yticks(range(len(rows)), [textwrap.shorten(row["idea"], 60, placeholder=" …") for row in rows])
    axes.set_xlabel("change of the final validation loss, nats (95 %)")
    seeds = " or ".join(map(str, sorted({base["n"] for base in found["bases"]})))
    figure.suptitle(f"{seeds} seeds compared with one base; blue: lower, orange: lower, but slower, red: higher, at "
                    f"p < {LEVEL:g} by Holm's correction", fontsize=10, x=0.01, ha="left")
    figure.savefig(path, dpi=150)


def keep(folders, record, found, title):
    """Write the record's folder: README.md, plot, and the races' files in one archive (several races in subfolders)."""
    with board.new_folder(record):
        draw(found, record / PICTURE)
        with tarfile.open(record / ARCHIVE, "w:xz") as archive:
            for folder, base in zip(folders, found["bases"]):
                home = f"race-{base['id']}/" * (len(folders) > 1)
                for path in board.files_of(folder):
                    text, packed = board.published(path).encode(), tarfile.TarInfo(home + path.name)
                    packed.size = len(text)
                    archive.addfile(packed, io.BytesIO(text))
        (record / "README.md").write_text(f"{table(found, title)}\n", encoding="utf-8")
        if record.absolute().parent == board.HERE:
            board.write_pages()


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("races", type=Path, nargs="+", metavar="RACE", help="folder of a race whose --vs are flags")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write a record there")
    parser.add_argument("--equal-time", action="store_true", help="print the race of each idea in the base's time")
    parser.add_argument("--title", default="A ladder", help="title of the record's page")
    options = parser.parse_args(arguments)
    try:
        found = judge(map(read, options.races))
        print(table(found))
        if options.equal_time:
            print("\nEach idea in the base's time:", *at_equal_time(found), sep="\n")
        if options.record:
            keep(options.races, options.record, found, options.title)
            print(f"\nkept in {options.record}")
    except (stats.CannotJudge, OSError) as reason:
        return logs.refuse("ladder.py", reason)
    return 0


if __name__ == "__main__":
    logs.run_main(main)
