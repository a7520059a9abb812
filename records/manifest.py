"""race.jsonl, the manifest of a race: its declaration, then a line before and one after each run.
race.py writes it. What race.py learns of the sides besides their runs is in further lines, and
becomes part of the declaration: `turns`, `short_base`, `out`, `answer`."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import logs
from logs import UserError, require

MANIFEST = "race.jsonl"  # beside the logs
ALPHA = 0.01  # of a claim
MOST_RUNS = 10_000  # of a side
RACE_KEYS = {
    "id": str,
    "sides": dict,
    "ranks": int,
    "n": int,
    "seed": int,
    "alpha": float,
    "test": str,
    "until_decided": bool,
}
RACE_DEFAULTS = {"alpha": ALPHA, "test": "unpaired", "until_decided": False}
SHORT = "short"  # side of the runs of the base at fewer steps: see same_loss.py
RUN_KEYS = {"run_id": str, "run": int, "side": str, "status": str}


def order(n, sides):
    """Return (run, side) pairs in the order of a race: a b, b a, a b, ..."""
    names = list(sides)
    return [(run, side) for run in range(1, n + 1) for side in (names if run % 2 else names[::-1])]


def base_letter(race):
    """Return the side that is the base: the last."""
    return [*race["sides"]][-1]


class Manifest:
    """race.jsonl: the declaration, then a line before and one after each run. write() returns when
    it is on disk."""

    def __init__(self, path):
        self.path = path
        self.race = None
        self.cut = None
        self.attempts = {}  # by run_id, its events merged

    def write(self, event):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.take(event)

    def take(self, event):
        if "race" in event:
            self.race = event["race"]
        elif "learned" in event:
            for name, values in event["learned"].items():
                self.race.setdefault(name, {}).update(values)
        else:
            self.attempts.setdefault(event["run_id"], {}).update(event)

    @classmethod
    def read(cls, path):
        """Read a manifest. cut: the offset where an incomplete last line begins (after a power
        failure), or None."""
        manifest = cls(Path(path).resolve())
        try:
            text = logs.open_file(manifest.path).read()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}; name the {MANIFEST} of the race") from None
        whole = text[: text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                manifest.take(check_event(logs.parse_json(line), first=number == 1))
            except (ValueError, UserError) as error:
                raise UserError(
                    f"{path}: line {number} is no line of a race ({error}); restore it, or name the"
                    f" {MANIFEST} of a race"
                ) from None
        require(manifest.race, f"{path}: no line describes the race; name the {MANIFEST} of a race")
        manifest.cut = len(whole) if whole != text else None
        return manifest

    def done(self, short=False):
        """Return {(run, side): attempt} of the sides' runs, or of the short base's. The first run
        (number 0) does not count."""
        return {
            (a["run"], a["side"]): a
            for a in self.attempts.values()
            if a["status"] == "done" and a["run"] and (a["side"] == SHORT) == short
        }

    def missing(self):
        """Return the (run, side) of the declared order that are not done, of sides that are in."""
        out = self.race.get("out", {})
        done = self.done()
        return [
            which
            for which in order(self.race["n"], self.race["sides"])
            if which not in done and which[1] not in out
        ]


def check_event(event, first):
    """Check a line of the manifest. Raise UserError unless it is the declaration (the first line)
    or a run's."""

    def are_words(value):
        return isinstance(value, list) and all(isinstance(word, str) for word in value)

    if not first and isinstance(event, dict) and "learned" in event:
        learned = event["learned"]
        require(
            isinstance(learned, dict) and all(isinstance(one, dict) for one in learned.values()),
            "what it learned is no object of objects",
        )
        return event
    inner, keys = (
        (event.get("race"), RACE_KEYS) if first and isinstance(event, dict) else (event, RUN_KEYS)
    )
    if first and isinstance(inner, dict):
        event["race"] = inner = {**RACE_DEFAULTS, **inner}
    for key, kind in keys.items():
        require(
            isinstance(inner, dict) and isinstance(inner.get(key), kind),
            f"its {key} is no {kind.__name__}",
        )
    require(
        re.fullmatch(r"[\w.-]{1,100}", inner["id" if first else "run_id"]), "its id is no file name"
    )
    if not first:
        # only the first description is checked
        require("race" not in event, "the race is described a second time")
        return event
    for side in inner["sides"].values():
        require(
            isinstance(side, dict) and "revision" in side and are_words(side.get("flags")),
            "a side needs a revision and flags",
        )
        require(
            side["revision"] is None or re.fullmatch("[0-9a-f]{40,64}", str(side["revision"])),
            # git would take one that begins with - for an option
            "a side's revision is no full hash",
        )
        require(
            isinstance(side.get("folder", ""), str) and isinstance(side.get("name", ""), str),
            "a side's folder or name is no text",
        )
    require(inner["sides"] and 0 < inner["n"] <= MOST_RUNS, "it needs a side and a number of runs")
    require(0 < inner["alpha"] < 0.5, "its alpha is no number between 0 and 0.5")
    require(inner["test"] in ("paired", "unpaired"), "its test is neither paired nor unpaired")
    return event


def manifest_in(folder):
    """Return the Manifest in a folder, or None. Raise UserError if it cannot be read."""
    path = Path(folder) / MANIFEST
    return Manifest.read(path) if logs.exists(path) else None


def declaration(runs):
    """Return the declaration in race.jsonl if all runs belong to that race, else {}."""
    (folder, race_id), *others = {
        (os.path.dirname(run.path), race_of(run) and race_of(run).race_id) for run in runs
    }
    manifest = manifest_in(folder) if race_id and not others else None
    return manifest.race if manifest and manifest.race["id"] == race_id else {}


class Race(NamedTuple):
    """The race field of a log's start line."""

    race_id: str
    side: str
    run: str
    declared_n: object


def race_of(run):
    """Return the Race of a run or a rejected one, or None. For another project's script race.jsonl
    states it."""
    race = (run.start or {}).get("race")
    if not race and (manifest := manifest_in(os.path.dirname(run.path))):
        attempt = manifest.attempts.get(Path(run.path).stem)
        if attempt and "folder" in manifest.race["sides"].get(attempt["side"], {}):
            race = {"race_id": manifest.race["id"], "declared_n": manifest.race["n"], **attempt}
    if not isinstance(race, dict) or "race_id" not in race:
        return None
    return Race(
        str(race["race_id"]),
        str(race.get("side") or ""),
        str(race.get("run")),
        race.get("declared_n"),
    )


def side_of(run):
    """Return (race id, side), or None."""
    race = race_of(run)
    return race and race[:2]


def place_of(run):
    """Return (name of its side, the side, words on its number) of a run in a race's folder, else
    None."""
    home = os.path.dirname(run.path)
    for folder in (
        home,
        os.path.dirname(home),
    ):  # the first run, which does not count, is in a subfolder
        with contextlib.suppress(UserError):  # another's file
            race = race_of(run)
            manifest = manifest_in(folder)
            if (
                race
                and manifest
                and manifest.race["id"] == race.race_id
                and race.side in manifest.race["sides"]
            ):
                return (
                    logs.side_names(manifest.race)[race.side],
                    race.side,
                    "not counted" if race.run == "0" else f"run {race.run}",
                )
    return None
