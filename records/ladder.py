"""Judge a ladder: ideas raced in turn against one base, each with the same seeds, in one race or
on several days.

    python launch/race.py -n 5 --vs "--muon_lr 0.05" --vs "--sync step" -- --preset laptop      race two ideas
    python records/ladder.py logs/race-ID logs/race-OTHER         print one table of these races, or of records of them

The table is that of stats.verdicts: the change in final validation loss and in time of each idea,
over pairs of runs with one seed, with Holm's correction for all ideas of all races. The bases must
have the same config, source and data.

stats.RULE, below the table, says when an idea is better. Exit status and --json: docs/racing.md.
"""

import argparse
import shlex
from pathlib import Path

import logs
import pages
import stats
from logs import UserError, require
from manifest import MANIFEST, Manifest

FEWEST = 3  # runs of each side
VALIDATION = "val data", "val_tokens", "val_len"  # keys of facts_of


def read(folder):
    """Return (declaration, {(run, side): logs.Run}) of a race. Raise UserError if a run is
    missing."""
    manifest = Manifest.read(folder / MANIFEST)
    race = manifest.race
    done = manifest.done()
    runs = {}
    sides = race["sides"]
    n = race["n"]
    require(
        len(sides) > 1 and n >= FEWEST,
        f"{folder}: a race of {logs.plural(len(sides), 'side')}, {logs.plural(n, 'run')} of each; a"
        f" ladder has a base, an idea or more, and {FEWEST} runs of each",
    )
    require(
        not race["until_decided"] and all("folder" not in side for side in sides.values()),
        f"{folder}: a race "
        "with another project, or one that ends when it is decided; stats.py judges this",
    )
    missing = sum((run, side) not in done for side in sides for run in range(1, n + 1))
    require(
        not missing,
        f"{folder}: {logs.plural(missing, 'run')} missing; resume with race.py --resume "
        f"{folder / MANIFEST}",
    )
    for which, attempt in done.items():
        found, rejected, _ = logs.read_file(str(folder / f"{attempt['run_id']}.txt"))
        why = f": {rejected[0].reason}" if rejected else ""
        require(
            len(found) == 1 and found[0].train_time_ms,
            f"{attempt['run_id']}.txt holds no complete run{why}; restore the logs of the race",
        )
        runs[which] = found[0]
    return race, runs


def facts_of(race, run):
    """Return {name: value} of what the bases must have in common, with digests of the data instead
    of paths."""
    shards = (run.start or {}).get("shards") or {}
    facts = {
        "source": str(run.source_sha256)[:12],
        "ranks": race["ranks"],
        **stats.config_of(run),
        **{
            f"{split} data": [shard["sha256"][:12] for shard in of_split]
            for split, of_split in shards.items()
        },
    }
    return {name: fact for name, fact in facts.items() if name not in ("train_files", "val_files")}


def judge(races):
    """Return the bases and a row for each idea, by race, the largest gain first. races: results of
    read."""
    bases = []
    rows = []
    pairs = []
    first = None
    for number, (race, runs) in enumerate(races, 1):
        require(
            all(race["id"] != base["id"] for base in bases), f"race {race['id']} is given twice"
        )
        n = race["n"]
        names = logs.side_names(race)
        sides = {
            side: stats.Side(
                f"side {side}", [runs[run, side] for run in range(1, n + 1)], declared=race
            )
            for side in names
        }
        *ideas, base = names
        facts = facts_of(race, runs[1, base])
        one, wanted = first = first or (race["id"], facts)
        differ = [
            f"{name}: {wanted.get(name)} and {facts.get(name)}"
            for name in {**wanted, **facts}
            if wanted.get(name) != facts.get(name)
        ]
        require(
            not differ,
            f"the bases of races {one} and {race['id']} differ in {logs.some(differ, 3, '; ')}:"
            " judge each race by itself",
        )
        bases.append(
            {
                "id": race["id"],
                "n": n,
                "side": sides[base],
                "flags": shlex.join(race["sides"][base]["flags"]),
            }
        )
        for side in ideas:
            its = facts_of(race, runs[1, side])
            require(
                all(its.get(name) == facts.get(name) for name in VALIDATION),
                f"{names[side]}: an idea must "
                "be validated on the same data as its base; race it without that flag",
            )
            pairs.append((sides[side], sides[base]))
            rows.append({"race": number, "side": sides[side]})
    for row, verdict in zip(rows, stats.verdicts(pairs)):
        row["verdict"] = verdict
    return {
        "bases": bases,
        "rows": sorted(rows, key=lambda row: (row["race"], row["verdict"].loss.value)),
    }


def report(found):
    """Return what one ladder has shown, in the form of stats.judge, without a claim."""
    rows = found["rows"]
    base = found["bases"][0]["side"]
    verdicts = [row["verdict"] for row in rows]
    return {
        "sides": [*(row["side"] for row in rows), base],
        "verdicts": verdicts,
        "alpha": stats.LEVEL,
        "warnings": [],
        "left_out": [],
        "loss": {**dict.fromkeys(("target", "p", "significant")), **stats.summary(base.losses)},
        "time": stats.summary(base.seconds),
        "verdict": stats.conclusion(verdicts),
        "reason": stats.RULE,
    }


def table(found):
    """Return the table as text: the bases, the Verdicts of the ideas, and the rule that they
    follow."""
    said = [
        f"Base of race {base['id']}: {base['flags']}; {base['n']} seeds, loss "
        f"{stats.show_mean(stats.summary(base['side'].losses), 'nats')}, time "
        f"{stats.show_mean(stats.summary(base['side'].seconds))} (mean ± sd)"
        for base in found["bases"]
    ]
    shown = stats.show_verdicts([row["verdict"] for row in found["rows"]])
    return "\n\n".join([*map(pages.wrap, said), shown, pages.wrap(stats.RULE)])


def give(folders, silent=False):
    """Judge races, print the table unless silent, and return the stats.answer."""
    try:
        found = judge(map(read, folders))
        said = table(found)
    except (UserError, OSError) as reason:
        logs.refuse("ladder.py", reason)
        return stats.not_judged(reason)
    answer = stats.answer(
        [row["side"] for row in found["rows"]],
        [base["side"] for base in found["bases"]],
        [row["verdict"] for row in found["rows"]],
    )
    if not silent:
        print(said, f"\n{stats.last_line(answer)}", sep="\n", flush=True)
    return answer


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0],
        allow_abbrev=False,
        epilog="Exit status: 0 an idea is better, 1 none is, 2 not judged.",
    )
    parser.add_argument(
        "races",
        type=logs.or_latest(logs.RACE),
        nargs="+",
        metavar="RACE",
        help="folder of a race whose --vs are flags, or of its record",
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON instead")
    options = parser.parse_args(arguments)
    found = give([*map(Path, options.races)], options.json)
    if options.json:
        print(logs.show_json(found))
    return found["status"]


if __name__ == "__main__":
    logs.run_main(main)
