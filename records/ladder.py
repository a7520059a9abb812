"""Judge a ladder: ideas raced in turn against one base, each with the same seeds, in one race or on several days.

    python launch/race.py -n 5 --vs "--sublayer_scales true" --vs "--sync step" -- --preset laptop      race two ideas
    python records/ladder.py logs/race-ID logs/race-OTHER               print the table of these races, or of a record
    python records/ladder.py logs/race-ID --record records/DATE_ladder  also keep it, as board.py add does: page, plot and logs
    python records/ladder.py logs/race-ID --equal-time                  also print the command of a race at equal time

The table is that of stats.verdicts: the change in final validation loss and in time of each idea, over pairs of runs with
one seed, with Holm's correction for all ideas of all races. The bases must have the same config, source and data.

An idea is kept if its loss is lower at a corrected p below 0.05 and its time's 95 % interval ends near the base's time
or below. An idea with a lower loss that takes longer is called slower: it may be no gain at equal time. --equal-time
prints a race on new seeds in which each idea has as many steps as fit into the base's time. If the interval neither
ends near the base's time nor lies above it, the time is unknown: race again on a quieter machine.

Exit status: 0 judged, 2 nothing to judge.
"""

import argparse
import re
import shlex
from pathlib import Path

import board
import logs
import pages
import picture
import stats

FEWEST = 3  # runs of each side
NO_LONGER = 1.1  # times the base's time: an interval that ends below it shows no cost
PICTURE = "ladder.png"
VALIDATION = "val data", "val_tokens", "val_len"  # keys of facts_of
COLORS = {"lower": ("#1b6ac9", "lower"), "slower": ("#d97706", "lower, but takes longer"),
          "higher": ("#c0392b", "higher"),
          "unclear": ("#8a8a8a", f"no difference shown (p ≥ {stats.LEVEL:g} after Holm's correction)")}


def races_in(folder):
    """Return the folders of the races in a record's archive, for logs.open_file; any other folder as it is."""
    packed = [folder / name for name in logs.members(folder / logs.ARCHIVE)]
    return [path.parent for path in packed if path.name == stats.MANIFEST] or [folder]


def read(folder):
    """Return (declaration, {(run, side): logs.Run}) of a race. Raise CannotJudge if a run is missing."""
    manifest = stats.Manifest.read(folder / stats.MANIFEST)
    race, done, runs = manifest.race, manifest.done(), {}
    sides, n = race["sides"], race["n"]
    stats.require(len(sides) > 1 and n >= FEWEST, f"{folder}: a race of {logs.plural(len(sides), 'side')}, "
                  f"{logs.plural(n, 'run')} of each; a ladder has a base, an idea or more, and {FEWEST} runs of each")
    stats.require(not race["until_decided"] and all("folder" not in side for side in sides.values()), f"{folder}: a race "
                  "with another project, or one that ends when it is decided; stats.py judges this")
    missing = sum((run, side) not in done for side in sides for run in range(1, n + 1))
    stats.require(not missing, f"{folder}: {logs.plural(missing, 'run')} missing; resume with race.py --resume "
                  f"{folder / stats.MANIFEST}")
    for which, attempt in done.items():
        found, rejected, _ = logs.read_file(str(folder / f"{attempt['run_id']}.txt"))
        why = f": {rejected[0].reason}" if rejected else ""
        stats.require(len(found) == 1 and found[0].train_time_ms,
                      f"{attempt['run_id']}.txt holds no complete run{why}; restore the logs of the race")
        runs[which] = found[0]
    return race, runs


def facts_of(race, run):
    """Return {name: value} of what the bases must have in common, with digests of the data instead of paths."""
    shards = (run.start or {}).get("shards") or {}
    facts = {"source": str(run.source_sha256)[:12], "ranks": race["ranks"], **stats.config_of(run),
             **{f"{split} data": [shard["sha256"][:12] for shard in of_split] for split, of_split in shards.items()}}
    return {name: fact for name, fact in facts.items() if name not in ("train_files", "val_files")}


def judge(races):
    """Return the bases' figures and a row for each idea, largest gain first. races: results of read."""
    bases, rows, pairs, first = [], [], [], None
    for number, (race, runs) in enumerate(races, 1):
        stats.require(all(race["id"] != base["id"] for base in bases), f"race {race['id']} is given twice")
        n, names = race["n"], logs.side_names(race)
        sides = {side: stats.Side(f"side {side}", [runs[run, side] for run in range(1, n + 1)], declared=race)
                 for side in names}
        *ideas, base = names
        facts = facts_of(race, runs[1, base])
        one, wanted = first = first or (race["id"], facts)
        differ = [f"{name}: {wanted.get(name)} and {facts.get(name)}" for name in {**wanted, **facts}
                  if wanted.get(name) != facts.get(name)]
        stats.require(not differ, f"the bases of races {one} and {race['id']} differ in {logs.some(differ, 3, '; ')}: judge "
                      "each race by itself")
        bases.append({"id": race["id"], "n": n, "ranks": race["ranks"], "seed": race["seed"],
                      "versions": any(side["revision"] for side in race["sides"].values()),
                      "loss": stats.summary(sides[base].losses), "time": stats.summary(sides[base].seconds),
                      "flags": shlex.join(race["sides"][base]["flags"])})
        for side in ideas:
            its = facts_of(race, runs[1, side])
            stats.require(all(its.get(name) == facts.get(name) for name in VALIDATION), f"{names[side]}: an idea must "
                          "be validated on the same data as its base; race it without that flag")
            pairs.append((sides[side], sides[base]))
            rows.append({"race": number, "steps": runs[1, side].last_step})
    for row, verdict in zip(rows, stats.verdicts(pairs)):
        time, lower = verdict.time, verdict.loss.shown and verdict.loss.value < 0
        kept = "slower" if time.low and time.low > 1 else "yes" if (time.high or time.value) < NO_LONGER else "time unknown"
        row |= {"verdict": verdict, "kept": kept if lower else "no"}
    return {"bases": bases, "rows": sorted(rows, key=lambda row: row["verdict"].loss.value)}


def at_equal_time(found):
    """Yield each race's command on new seeds, with the steps of each idea that fit into the base's time."""
    for number, base in enumerate(found["bases"], 1):
        stats.require(not base["versions"], f"race {base['id']} is one of versions: give each its --num_steps by hand")
        words = ["-n", str(base["n"]), "--ranks", str(base["ranks"])]
        for row in found["rows"]:
            flags = re.sub(r"(^| )--num_steps[ =]\d+", "", row["verdict"].name)
            if row["race"] == number:
                words += ["--vs", f"{flags} --num_steps {max(1, int(row['steps'] / row['verdict'].time.value))}".strip()]
        seed = ["--seed", str(base["seed"] + base["n"])]
        yield f".venv/bin/python launch/race.py {shlex.join(words)} -- {base['flags']} {shlex.join(seed)}"


def table(found, title=None):
    """Return the table in Markdown; with a title the page of a record."""
    return pages.show("ladder.md.jinja", **found, title=title, level=stats.LEVEL, no_longer=NO_LONGER,
                      contrast=stats.show_contrast, picture=PICTURE, archive=logs.ARCHIVE)


def short(name):
    """Return an idea's flags as a short name: `key_offset` for `--key_offset true`."""
    return picture.shorten(re.sub(r"(^| )--| true\b", r"\1", name).strip(), 48)


def conclusion(rows):
    """Return what a ladder has shown, as the title of its plot."""
    found = {color: [short(row["verdict"].name) for row in rows if color_of(row) == color] for color in COLORS}
    lower = found["lower"] + found["slower"]
    if lower:
        said = f"{len(lower)} of {logs.plural(len(rows), 'idea')} lower{'s' * (len(lower) == 1)} the loss"
        said += f": {', '.join(lower)}" * (len(lower) < 4)
    else:
        said = f"None of {logs.plural(len(rows), 'idea')} is shown to lower the loss"
    if found["higher"]:
        said += f"; {len(found['higher'])} raise{'s' * (len(found['higher']) == 1)} it"
    return said


def color_of(row):
    if not row["verdict"].loss.shown:
        return "unclear"
    return "higher" if row["verdict"].loss.value > 0 else "slower" if row["kept"] == "slower" else "lower"


def draw(found, path):
    """Plot each idea's differences in loss and in time with their intervals."""
    rows = found["rows"]
    seeds = " or ".join(map(str, sorted({base["n"] for base in found["bases"]})))
    shown = {color_of(row) for row in rows}
    verdicts = [stats.replace(row["verdict"], name=short(row["verdict"].name)) for row in rows]
    parts = stats.differences(verdicts, [COLORS[color_of(row)][0] for row in rows])
    picture.draw_differences(f"{conclusion(rows)} ({seeds} seeds)", parts, {
        words: color for name, (color, words) in COLORS.items() if name in shown}, path)


def keep(folders, record, found, title):
    """Write the record's folder: README.md, plot, and the races' files in one archive (several races in subfolders)."""
    with board.new_folder(record):
        draw(found, record / PICTURE)
        homes = [f"race-{base['id']}/" * (len(folders) > 1) for base in found["bases"]]
        logs.pack({home + path.name: board.published(path).encode() for folder, home in zip(folders, homes)
                   for path in board.files_of(folder)}, record / logs.ARCHIVE)
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
        found = judge(read(race) for folder in options.races for race in races_in(folder))
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
