"""Judges a record by the rules of the speedrun: every rule a program can check is a pass, a fail, or not checkable.

    python records/verify.py RECORD...                 RECORD: a folder of logs, or logs
    python records/verify.py RECORD --vs OTHER         and is it faster on the same hardware? (a race holds both sides)
    python records/verify.py RECORD --data DIR         hashes the shards in DIR; is validation text in training?
    python records/verify.py RECORD --rerun MODEL.pt   evaluates a saved model again, in a process of its own
    --json  for programs; its verdict is pass, fail, or incomplete: nothing fails, and not all could be checked

Exit status: 0 nothing fails (what could not be checked is listed), 1 a rule is broken, 2 the input cannot be judged.

A log is what a run says of itself: an honest run passes, a careless or clumsily edited one does not. --rerun believes
only the saved parameters and the source in the log, and it RUNS THAT SOURCE: read it first, as you would before any
program of a stranger's. What a source does to the process that judges it, only its reader can see.
"""

import argparse
import gzip
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import resource
import sys
import tempfile
import zlib
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

import logs
import race
import scan
import stats

ROOT = Path(__file__).resolve().parent.parent
PASS, FAIL, UNKNOWN = "pass", "fail", "not checkable"
INCOMPLETE = "incomplete"  # of all rules together
SHOWN = 3  # findings of one rule that are spelled out
MOST_BYTES = 32 << 20  # of a log or a manifest, unpacked
GPT2_VOCAB = range(50257, 51200)  # rows of its embedding, filled up
FINEWEB_VAL_TOKENS = 10_485_760  # the public speedrun's rule; other data is validated on as a whole
UNNAMED_S, UNNAMED_PART = 0.25, 0.002  # of the wall clock: what a run may spend under no name
# From the launch of a run to the start of its own wall clock, and after that one's end: at most so long, less for a
# short run, where it could hide as much as the run itself; and how far the runs of one race may differ in it
STARTING_S, STARTING_LEAST_S, STARTING_PART = 60, 20, 0.2
STARTING_SPREAD_S, STARTING_SPREAD_PART = 15, 0.05
CLOCKS_S = 2  # times of day are stated in whole seconds
STALL, NEIGHBOURS = 0.2, 20  # of the median of its neighbours: a busy machine makes steps uneven, but not so short
TELLING_LINES = 8  # times of fewer lines can agree by chance
HEADER_BYTES, MAGIC = 1024, 20240520
# Validation text in training is sought by what so many tokens in a row hash to, in so many places at most
FINGERPRINT, MOST_PRINTS, LEAST_PRINTS = 32, 1 << 20, 8
CHUNK = 1 << 22
SHARED, UNBROKEN = 0.8, 0.5  # of a document's prints: with tokens changed; in a row, as where it was cut
COINCIDENCES = 1000  # in so many documents one may be: the web holds some pages twice

MODEL_RULES = ("the saved model is the log's", "independent validation loss", "a sequence's loss is its own",
               "later tokens do not reach earlier logits", "targets do not reach logits", "probabilities sum to 1",
               "evaluation leaves the model as it was")


class NotCheckable(Exception):
    """The evidence for a rule is not there; the message says which."""


class Broken(Exception):
    """A rule is broken; the message says by what."""


class CannotJudge(Exception):
    """The input allows no verdict at all."""


class Finding(NamedTuple):
    rule: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Evidence:
    """One run: what logs.py read, the source as the script's file held it, and its step lines."""
    run: logs.Run
    source: str | None
    lines: list  # (step, train_time in ms, step_avg in ms or None, whether it is a validation line)
    stray: str | None  # what in the file the script does not write

    @property
    def name(self):
        return logs.printable(os.path.basename(self.run.path))

    @property
    def ours(self):
        """Whether the log describes itself. One that does must hold all that ours hold."""
        return self.run.start is not None

    @property
    def race_side(self):
        found = stats.race_of(self.run)
        return found.side if found else ""

    def get(self, where, kind=object):
        """The entry at a path like `end.state_hash.before_warmup`. NotCheckable or Broken if none of this type is."""
        if not self.ours:
            raise NotCheckable("the log holds no description of its run (its form is not this project's)")
        found = {"start": self.run.start, "end": self.run.end or {}}
        for key in where.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        truth_for_number = isinstance(found, bool) and kind not in (bool, object)
        if found is None or not isinstance(found, kind) or truth_for_number or kind in (int, NUMBER) and \
                not is_number(found):
            raise Broken(f"the log's {where} is {json.dumps(found)[:60]}; every run of this project's script states it")
        return found

    def digest(self, where):
        found = self.get(where, str)
        if not _SHA256.fullmatch(found):
            raise Broken(f"the log's {where} is {found[:20]!r}, no SHA-256")
        return found


NUMBER = (int, float)
_SHA256 = re.compile("[0-9a-f]{64}")
_SOME = r"\d{1,15}(?:\.\d{1,15})?"  # a number that no arithmetic chokes on
_STEP = re.compile(rf"step:(\d{{1,15}})/\d+ (?:.* )?train_time:(\d{{1,15}})ms(?: step_avg:({_SOME}|nan)ms)?(?: |$)")
# The lines of our logs, a letter each: the description, steps, the end, the memory; an error that came after it
_OURS = {"d": r'\{"run_id": .*\}', "e": r'\{"end": .*\}', "x": "error: .*",
         "p": r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
         "s": rf"step:\d{{1,15}}/%s (?:val_loss:{_SOME} )?train_time:\d{{1,15}}ms step_avg:{_SOME}ms"
              rf"(?: train_loss:{_SOME})?"}


def is_number(x):
    return isinstance(x, NUMBER) and not isinstance(x, bool) and abs(x) < 1e15  # nan and inf are not


def read_text(path):
    """The text of a file, packed or not, with line ends as \\n. CannotJudge if it is more than any run writes."""
    try:
        with open(path, "rb") as file:
            zipped = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            raw = (gzip.GzipFile(fileobj=file) if zipped else file).read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CannotJudge(f"{logs.printable(path)}: cannot be read ({error}); copy it again") from None
    if len(raw) > MOST_BYTES:
        raise CannotJudge(f"{logs.printable(path)}: more than {MOST_BYTES >> 20} MiB, which no run writes; leave the "
                          "file out")
    return raw.decode("utf-8", "surrogateescape").replace("\r\n", "\n").replace("\r", "\n")


def read_evidence(run, in_file):
    """Reads a run's file again, for what logs.py does not keep. in_file: how many runs the file holds."""
    parts = re.split(rf"^{'=' * 100}$", read_text(run.path), flags=re.M)
    texts = [part.removeprefix("\n") for part in parts]
    before = texts[:-1] if run.start is None else texts[:1]  # the community's may open with a separator
    source = next((text for text in before if text.strip()), None)
    written, lines = texts[-1].removesuffix("\n").split("\n"), []
    for match in map(_STEP.match, written if in_file == 1 else ()):
        if match:
            average = float(match[3]) if match[3] and match[3] != "nan" else None
            lines.append((int(match[1]), int(match[2]), average, "val_loss:" in match[0]))
    stray = None
    if run.start is not None:
        forms = {kind: re.compile(form.replace("%s", str(run.stated_steps))) for kind, form in _OURS.items()}
        kinds = "".join(next((kind for kind, form in forms.items() if form.fullmatch(line)), "o") for line in written)
        good = re.match("d?s*(?:ep?)?(?:(?<=p)xo*)?", kinds).end()
        if in_file > 1:
            stray = f"its file holds {in_file} runs, and a run of this project's script has a file of its own"
        elif len(parts) != 3:
            stray = f"{len(parts) - 1} separators divide it, and the script writes 2"
        elif not re.fullmatch("ds+ep(?:xo*)?", kinds):
            line = written[good] if good < len(written) else "it ends too early"
            stray = f"line {good + 1} after the last separator is none that the script writes there: {line[:80]!r}"
    return Evidence(run, source.removesuffix("\n") if source and run.start else source, lines, stray)


# Rules for each run: Evidence -> what shows that it is kept; Broken or NotCheckable otherwise

def check_log(e):
    stated = e.get("start.source_sha256", str)
    if e.stray or e.source is None:
        raise Broken(e.stray or "it holds no source")
    seen = hashlib.sha256(e.source.encode("utf-8", "surrogateescape")).hexdigest()
    if seen != stated:
        raise Broken(f"the source in the log has SHA-256 {seen[:8]}..., its description states {stated[:8]}...")
    loss, decimals = e.get("end.final_val_loss", NUMBER), e.run.loss_decimals
    if not abs(loss - e.run.final_loss) <= 0.501 * 10 ** -decimals:
        raise Broken(f"its end states final_val_loss {loss}, its last validation line {e.run.final_loss:.{decimals}f}")
    steps, race_id = e.run.stated_steps, e.get("start.config.race_id", str)
    pairs = [("end.steps", steps), ("start.config.num_steps", steps), ("start.seed", e.get("start.config.seed")),
             ("end.target_val_loss", e.get("start.target_val_loss")),
             ("end.reached", loss <= e.get("end.target_val_loss", NUMBER)),
             ("start.target_val_loss", e.get("start.config.target_val_loss")),
             ("end.train_tokens", steps * e.get("start.config.batch_tokens", int)),
             ("start.config.run_id", e.get("start.run_id", str) if race_id else e.get("start.config.run_id"))]
    pairs += [(f"start.race.{key}", e.get(f"start.config.{flag}")) for key, flag in (
        ("race_id", "race_id"), ("run", "race_run"), ("declared_n", "race_runs"), ("side", "race_side"))
        if race_id or e.run.start.get("race") is not None]
    for where, wanted in pairs:
        if e.get(where, type(wanted)) != wanted:
            raise Broken(f"{where} is {e.get(where)}, by the rest of the log it is {wanted}")
    e.digest("end.final_state_hash")
    if moment(e.get("start.started", str)) is None:
        raise Broken(f"it started at {e.get('start.started')[:40]!r}, which is no time")
    return "its lines, its description and the hash of its source agree"


def moment(text):
    """Seconds since 1970 of a time in ISO form, or None."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def shards_of(e):
    """{split: its shards}, each with what the log must state of it."""
    lists = {split: e.get(f"start.shards.{split}", list) for split in ("train", "val")}
    for split, shards in lists.items():
        for shard in shards or [None]:
            if not isinstance(shard, dict) or not _SHA256.fullmatch(str(shard.get("sha256"))) or \
                    not isinstance(shard.get("name"), str) or not is_number(shard.get("tokens")):
                raise Broken(f"a {split} shard is stated without name, tokens and SHA-256: {json.dumps(shard)[:80]}")
    return lists


def check_shards(e):
    lists = shards_of(e)
    for key in ("sha256", "name"):
        both = {shard[key] for shard in lists["train"]} & {shard[key] for shard in lists["val"]}
        if both:
            raise Broken(f"{', '.join(sorted(both))[:80]} is both training and validation data")
    e.digest("end.train_sha256")
    return f"{len(lists['train'])} training, {len(lists['val'])} validation shards, each with its SHA-256, none in both"


def is_fineweb(e):
    """Whether the public speedrun's rules hold: by the preset, by the shards' names, or, since files can be renamed,
    by a vocabulary of GPT-2's size, which the number of parameters gives away, and as many tokens as they ask for."""
    try:
        shards = shards_of(e)["val"]
    except Broken:
        raise NotCheckable("the shards are not stated in full") from None
    if e.run.start.get("preset") == "speedrun" or all(shard["name"].startswith("fineweb_val_") for shard in shards):
        return True
    layers, width = e.get("start.config.layers", str), e.get("start.config.model_dim", int)
    tables = 2 + len(set(re.findall(r"\d", layers)))  # embedding, head, value tables
    matrices = 4 * len(re.findall("[SL]", layers)) + 8 * layers.count("M")
    rows = (e.get("start.parameters", int) - matrices * width ** 2) / max(1, tables * width)
    return int(rows) in GPT2_VOCAB and sum(shard["tokens"] for shard in shards) > FINEWEB_VAL_TOKENS


def check_val_tokens(e, wanted=None):
    counted, fineweb = e.get("end.val_tokens", int), is_fineweb(e)
    if wanted is None:
        wanted = FINEWEB_VAL_TOKENS if fineweb else sum(shard["tokens"] for shard in shards_of(e)["val"]) - 1
    if counted != wanted:
        raise Broken(f"{counted:,} tokens were scored, and the rule is {wanted:,}")
    return f"{counted:,} tokens were scored"


def check_source(e):
    if e.source is None:
        raise (Broken if e.ours else NotCheckable)("the log holds no source")
    try:
        found = scan.scan(e.source)
    except SyntaxError as error:
        if not e.ours and "import torch" not in e.source:
            raise NotCheckable("what stands in the log for the source is no Python") from None
        raise Broken(f"the source in the log cannot be parsed ({str(error)[:80]})") from None
    if found.findings:
        raise Broken(several(found.findings))
    doubts = [f"imports {', '.join(found.foreign)}, whose code the log does not hold"] if found.foreign else []
    if not found.imports_torch:
        doubts.append("does not import torch: it is not the script")
    if doubts:
        raise (Broken if e.ours else NotCheckable)(f"what stands in the log for the source {'; '.join(doubts)}")
    return "nothing in the source sets a compiler's switch"


def check_environment(e):
    found = {name: value for name, value in e.get("start.environment", dict).items() if scan.VARIABLE.fullmatch(name)}
    if found:
        raise Broken(f"started with {', '.join(f'{name}={v}' for name, v in sorted(found.items()))[:120]}")
    return "no compiler's variable was set at the start"


def check_clock(e):
    timed = e.lines
    if e.ours and e.run.clock_falls:
        raise Broken(f"train_time falls at step {e.run.clock_falls[0]}")
    if len(timed) < 2:
        raise NotCheckable("fewer than two lines with train_time in ms" if len(timed) else
                           "no line with train_time in ms that is this run's alone")
    for (_, before, *_), (step, ms, *_) in zip(timed, timed[1:]):
        if ms < before:
            raise Broken(f"train_time falls from {before} to {ms} ms at step {step}")
    warm = (0,) if e.ours else (0, 1, 10)  # steps that the community's scripts leave out of their average
    wrong = [[line for line in timed if line[2] is not None and abs(line[1] - line[2] * max(line[0] - left_out, 1)) >
              1 + 0.006 * line[0]] for left_out in warm]
    if all(wrong):
        step, ms, average, _ = wrong[0][0]
        raise Broken(f"at step {step} train_time is {ms} ms, by its step_avg of {average} ms {step * average:.0f} ms")
    steps = [(step, ms) for step, ms, _, val in timed if not val]
    if e.ours:
        wanted = next((i for i, (step, _) in enumerate(steps, 1) if step != i), len(steps) + 1)
        if wanted <= e.run.stated_steps or len(steps) != e.run.stated_steps:
            raise Broken(f"of {e.run.stated_steps} steps {len(steps)} have a line; step {wanted} has none in its place")
        stated, last = e.get("end.train_time_ms", NUMBER), e.run.train_time_ms
        if last is None or abs(stated - last) > 1:
            raise Broken(f"its end states train_time_ms {stated:.0f}, its last validation line {last}")
        if stated > 1000 * e.get("end.wall_seconds", NUMBER):
            raise Broken(f"train_time is {stated / 1000:.1f} s, the wall clock {e.get('end.wall_seconds'):.1f} s")
    check_paces(steps)
    below = ", below the wall clock" if e.ours else ""
    return f"train_time rises on {len(timed)} lines and agrees with step_avg{below}"


def check_paces(steps):
    """steps: (step, ms) of each line. Broken if the clock all but stands still where its neighbours need their time."""
    number, ms = np.array(steps, dtype=float).reshape(-1, 2).T
    paces = np.diff(ms) / np.maximum(np.diff(number), 1)
    if not len(paces):
        return
    width = min(NEIGHBOURS, len(paces))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(paces, width), axis=1)
    around = medians[np.clip(np.arange(len(paces)) - width // 2, 0, len(medians) - 1)]
    stalls = np.flatnonzero(paces + 1 < STALL * around)  # lines are in whole ms
    if len(stalls):
        found = [f"step {number[i + 1]:.0f}" for i in stalls]
        raise Broken(f"a step takes {around[stalls[0]]:.0f} ms, and the clock all but stands still at {several(found)}")


def check_outside(e):
    wall, trained = e.get("end.wall_seconds", NUMBER), e.get("end.train_time_ms", NUMBER) / 1000
    spans = e.get("end.seconds_outside_clock", dict)
    if not all(is_number(seconds) and seconds > -0.05 for seconds in spans.values()):
        raise Broken(f"spans outside the clock are no seconds: {json.dumps(spans)[:100]}")
    unnamed = wall - trained - sum(spans.values())
    if not abs(unnamed) <= UNNAMED_S + UNNAMED_PART * wall:
        raise Broken(f"wall clock {wall:.1f} s, training {trained:.1f} s, named outside {sum(spans.values()):.1f} s: "
                     f"{unnamed:+.1f} s are under no name")
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
    long = [name for name, seconds in spans.items() if seconds > trained]
    remark = f"; LONGER THAN TRAINING: {', '.join(long)}, see why" if long else ""
    return f"of {wall:.1f} s: training {trained:.1f}, {shown}, under no name {unnamed:.1f}{remark}"


def check_same(e, before, after, what):
    hashes = [e.digest(where) for where in (before, after)]
    if len(set(hashes)) > 1:
        raise Broken(f"{what} changes the state: its hash is {hashes[0][:8]}... before and {hashes[1][:8]}... after")
    return f"state hash {hashes[0][:8]}... before and after"


def check_compiles(e):
    compiled = e.get("end.compiles_after_warmup", int)
    if compiled:
        raise Broken(f"{compiled} graphs were compiled after the warm-up")
    return "nothing was compiled after the warm-up"


def several(findings):
    more = f"; and {len(findings) - SHOWN} more" if len(findings) > SHOWN else ""
    return "; ".join(findings[:SHOWN]) + more


def judged(check, *arguments):
    """(verdict, reason) of a check. Whatever a stranger's log or model makes it raise is a finding too."""
    try:
        return PASS, check(*arguments)
    except NotCheckable as reason:
        return UNKNOWN, str(reason)
    except Broken as reason:
        return FAIL, str(reason)
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        return (UNKNOWN, f"memory ran out: check it where there is more ({text})") if ran_out(error) else (FAIL, text)


def ran_out(error):
    """Whether an error is one of memory, of which torch has kinds of its own."""
    return isinstance(error, MemoryError) or "OutOfMemory" in type(error).__name__ or "allocate memory" in str(error)


def for_each(rule, runs, check):
    """One Finding of a rule that every run must keep."""
    found = [(e, *judged(check, e)) for e in runs]
    broken = [f"{e.name}: {reason}" for e, verdict, reason in found if verdict == FAIL]
    unknown = [reason for _, verdict, reason in found if verdict == UNKNOWN]
    if broken:
        return Finding(rule, FAIL, several(broken))
    if unknown:
        return Finding(rule, UNKNOWN, f"{len(unknown)} of {len(runs)} runs: {unknown[0]}")
    return Finding(rule, PASS, found[0][2] if len(runs) == 1 else f"{len(runs)} runs; the first: {found[0][2]}")


# Rules for all runs together

def check_accounts(runs, found, races):
    """Were these all the runs, and were there to be so many?"""
    remarks, unknown, members = [], [], defaultdict(list)
    for e in runs:
        members[stats.race_of(e.run) and stats.race_of(e.run)[:2]].append(e)
    for which, of_side in members.items():
        where = f"side {which[1]}: " if which and which[1] else ""
        if len({e.run.source_sha256 for e in of_side}) > 1:
            raise Broken(f"{where}the runs are of {len({e.run.source_sha256 for e in of_side})} sources")
        seeds = Counter(e.get("start.seed", int) for e in of_side if e.ours)
        if seeds and max(seeds.values()) > 1:
            raise Broken(f"{where}seed {max(seeds, key=seeds.get)} was used {max(seeds.values())} times")
        if which is None:
            continue
        declared = {e.get("start.race.declared_n", int) for e in of_side}
        numbers = sorted(e.get("start.race.run", int) for e in of_side)
        if declared != {len(numbers)} or numbers != list(range(1, len(numbers) + 1)):
            raise Broken(f"{where}{' or '.join(map(str, sorted(declared)))} runs were declared, and here are "
                         f"{', '.join(map(str, numbers[:20]))}")
        remarks.append(f"{where}{len(of_side)} runs, as declared")
    if len({json.dumps(e.run.start.get("shards"), sort_keys=True) for e in runs if e.ours}) > 1:
        raise Broken("the runs did not all read the same data")
    sources = {e.run.source_sha256 for e in runs}
    for item in found.rejected:
        name = logs.printable(os.path.basename(item.path))
        if item.kind == logs.NOT_FINITE and item.source_sha256 in sources:
            raise Broken(f"{name}, of the same source, speaks against the record: {item.reason}")
        if item.kind in (logs.INCOMPLETE, logs.NOT_FINITE):
            remarks.append(f"{name}: {item.reason}")
    by_race = defaultdict(list)
    for e in runs:
        if stats.race_of(e.run):
            by_race[stats.race_of(e.run).race_id].append(e)
    started = {run_id for one in races.values() for run_id in one.attempts}
    strangers = {str(e.run.start.get("run_id")) for e in runs if e.ours} - started
    if races and strangers:
        raise Broken(f"not started by this race, by its {race.MANIFEST}: {several(sorted(strangers))}")
    here = {str(item.start.get("run_id")) for item in [*(e.run for e in runs), *found.rejected] if item.start}
    for race_id, of_race in by_race.items():
        if race_id in races:
            said, doubts = check_race(races[race_id], of_race, here)
            remarks, unknown = remarks + said, unknown + doubts
        else:
            unknown.append(f"there is no {race.MANIFEST} of race {race_id}: what else was started cannot be seen")
    if None in members:
        unknown.append("no number of runs was declared: some may be left out")
    if unknown:
        raise NotCheckable("; ".join([*unknown, *remarks]))
    return "; ".join(remarks)


def check_race(manifest, runs, here):
    """Compares a manifest with the runs of its race -> (remarks, what cannot be known). here: run_ids with a log."""
    declared, order = manifest.race, manifest.race["order"]
    if len(order) != declared["n"] * len(declared["sides"]) or \
            order != [f"{run}{side}" for run, side in race.order(declared["n"], declared["sides"])]:
        raise Broken(f"the order in {race.MANIFEST} is not that of {declared['n']} runs a side")
    remarks, unknown, tried, done = [], [], [], set()
    for run_id, attempt in manifest.attempts.items():
        which, status = f"{attempt['run']}{attempt['side']}", attempt["status"]
        what = f"run {which}, {run_id}"
        if not tried or tried[-1] != which:
            tried.append(which)
        if (status == "done" or attempt.get("logged")) and run_id not in here:
            raise Broken(f"{what}, was started ({status}), and its log is not here")
        if status == "done" and which in done:
            raise Broken(f"run {which} was done twice")
        if status == "done":
            done.add(which)
            continue
        remarks.append(f"{what}: {status}")
        if run_id not in here and status not in ("failed", "interrupted"):  # nobody saw how it ended
            unknown.append(f"{what}, was started and left no log: how it ended cannot be seen")
    if tried != order[:len(tried)]:
        raise Broken(f"by {race.MANIFEST} the runs were not started in the order it declares")
    for e in runs:
        attempt = manifest.attempts.get(e.get("start.run_id", str))
        if attempt is None:
            raise Broken(f"{e.name} is of another race than its {race.MANIFEST}")
        side = declared["sides"].get(attempt["side"])
        if side is None:
            raise Broken(f"{e.name} is of side {attempt['side']!r}, which the race has not")
        pairs = [("start.race.declared_n", declared["n"]), ("start.race.run", attempt["run"]),
                 ("start.race.side", attempt["side"]), ("start.ranks", declared["ranks"]),
                 ("start.seed", declared["seed"] + attempt["run"]), ("start.seed", attempt.get("seed")),
                 ("start.source_sha256", side.get("source_sha256"))]
        for where, wanted in pairs:
            if e.get(where) != wanted:
                raise Broken(f"{e.name}: its {where} is {e.get(where)}, by {race.MANIFEST} it is {wanted}")
        began, logged = moment(attempt.get("started")), moment(e.run.start.get("started"))
        lasted = attempt["seconds"] if is_number(attempt.get("seconds")) else math.inf
        if logged is not None and (began is None or not -CLOCKS_S <= logged - began <= lasted + CLOCKS_S):
            raise Broken(f"{e.name} states that it started at {e.get('start.started')}, by {race.MANIFEST} it ran for "
                         f"{lasted:.0f} s from {attempt.get('started')} on")
    return remarks, unknown


def check_wall(runs, races):
    """Does a run's own wall clock agree with what the race measured from outside?"""
    late = defaultdict(list)
    for e in runs:
        found = races.get(stats.race_of(e.run).race_id) if stats.race_of(e.run) else None
        measured = found.attempts.get(e.run.start.get("run_id"), {}).get("seconds") if found else None
        if is_number(measured):
            wall = e.get("end.wall_seconds", NUMBER)
            late[found.race["id"]].append((measured - wall, wall, e.name))
            if not -0.1 <= measured - wall <= min(STARTING_S, STARTING_LEAST_S + STARTING_PART * wall):
                raise Broken(f"{e.name} states {wall:.1f} s by the wall clock, the race that started it measured "
                             f"{measured:.1f}")
    if not late:
        raise NotCheckable(f"no {race.MANIFEST} tells how long the runs took: race them with race.py")
    for of_race in late.values():
        (least, _, one), (most, wall, other) = min(of_race), max(of_race)
        if most - least > STARTING_SPREAD_S + STARTING_SPREAD_PART * wall:
            raise Broken(f"the race measured {least:.1f} s more than the wall clock of {one}, and {most:.1f} s more "
                         f"than that of {other}")
    lags = [lag for of_race in late.values() for lag, _, _ in of_race]
    return f"the race measured {min(lags):.1f} to {max(lags):.1f} s more than each run's wall clock, which starts later"


def check_copies(runs):
    """Is each run one of its own? Another seed gives another state, and no two runs take the same time at each step."""
    seen = {}
    for e in runs:
        if e.ours:
            for state in set(state_hashes(e)):
                other, seed = seen.setdefault(state, (e, e.get("start.seed", int)))
                if seed != e.get("start.seed"):
                    raise Broken(f"{other.name} and {e.name} have the seeds {seed} and {e.get('start.seed')}, and the "
                                 f"same state hash {state[:8]}...")
        times = tuple(ms for _, ms, *_ in e.lines)
        if len(times) >= TELLING_LINES:
            other, _ = seen.setdefault(times, (e, None))
            if other is not e:
                raise Broken(f"{other.name} and {e.name} have the same time at each of {len(times)} lines")
    if not seen:
        raise NotCheckable("the logs hold neither state hashes nor the times of their steps")
    return f"no two of {len(runs)} runs have the same times, and no two seeds a state hash in common"


def state_hashes(e):
    """Those that the log states; that it must, other rules say."""
    stated = [e.run.end.get("final_state_hash")] if e.run.end else []
    for holder in ("state_hash", "validation_hash"):
        found = (e.run.end or {}).get(holder)
        stated += found.values() if isinstance(found, dict) else []
    return [state for state in stated if isinstance(state, str) and _SHA256.fullmatch(state)]


def check_loss(runs, target):
    paths = [os.path.abspath(e.run.path) for e in runs]
    try:
        loss = stats.judge(stats.parse([*paths, f"--target={target!r}"]))["loss"]
    except stats.CannotJudge as reason:
        raise NotCheckable(str(reason)) from None
    text = f"mean {loss['mean']:.5f} of {loss['n']} runs, target {target:g}, p = {loss['p']:.4g}"
    if not loss["significant"]:
        raise Broken(f"{text}: not below 0.01")
    return text


def choose_target(runs, given):
    """The target of a rule, which is not for the log to choose where the data is FineWeb's."""
    if given is not None:
        return given
    stated = {e.get("start.target_val_loss", NUMBER) for e in runs if e.ours and not is_fineweb(e)}
    if len(stated) > 1:
        raise Broken(f"the logs state {len(stated)} targets: {', '.join(map(str, sorted(stated)))}")
    return float(stated.pop()) if stated else stats.DEFAULT_TARGET


def check_hardware(runs, others):
    described = {}
    for e in runs + others:
        switches = {name: value for name, value in e.get("start.environment", dict).items()
                    if not name.startswith("TORCHELASTIC_")}  # of which some name the run
        facts = {"ranks": e.get("start.ranks", int), **e.get("start.hardware", dict), **e.get("start.versions", dict),
                 **switches}
        described.setdefault(json.dumps(facts, sort_keys=True), (e, facts))
    if len(described) > 1:
        (one, facts), (other, theirs) = list(described.values())[:2]
        differ = [f"{key}: {facts.get(key)} and {theirs.get(key)}" for key in sorted(facts.keys() | theirs.keys())
                  if facts.get(key) != theirs.get(key)]
        raise Broken(f"{one.name} and {other.name} differ in {'; '.join(differ)[:200]}")
    _, facts = next(iter(described.values()))
    return f"{facts.get('device')}, and the same ids, driver, versions and switches (clock rates are not logged)"


def check_interleaved(runs, others):
    order = []
    for side, es in (("a", runs), ("b", others)):
        for e in es:
            began, spans = moment(e.get("start.started", str)), e.get("end.seconds_outside_clock", dict)
            if began is None:
                raise Broken(f"{e.name} states no time at which it started")
            before = sum(spans[name] for name in ("joining", "setup") if is_number(spans.get(name)))
            order.append((began, side, e.name, began + e.get("end.wall_seconds", NUMBER) - before))
    order.sort()
    for (_, _, one, ended), (began, _, other, _) in zip(order, order[1:]):
        if began + CLOCKS_S < ended:
            raise Broken(f"{other} started {ended - began:.0f} s before {one} ended: they took time from each other")
    sides = "".join(side for _, side, *_ in order)
    if len(runs) != len(others) or any(a == b for a, b in zip(sides[::2], sides[1::2])):
        raise Broken(f"in the order of their start the runs are {sides[:60]}: not in pairs")
    return f"started as {sides[:60]}, one after another"


def check_faster(runs, others):
    seconds = [[e.run.train_time_ms for e in side] for side in (runs, others)]
    if None in seconds[0] + seconds[1]:
        raise NotCheckable("a log states no train_time")
    try:
        found = stats.compare_times(*(np.array(side) / 1000 for side in seconds), alpha=0.01)
    except stats.CannotJudge as reason:
        raise NotCheckable(str(reason)) from None
    means = " s against ".join(f"{np.mean(side) / 1000:.3f}" for side in seconds)
    text = f"{means} s: {stats.show_ratio(found)}, p = {found['p']:.4g}"
    if not found["p"] < 0.01:
        raise Broken(f"{text}: not below 0.01")
    return text


# The data itself

def open_shard(path):
    """(uint16 [tokens], not yet read; vocabulary, BOS) of a shard. Broken if it is none."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    size = os.path.getsize(path)
    if len(header) < HEADER_BYTES // 4 or header[0] != MAGIC or size != HEADER_BYTES + 2 * int(header[2]) or \
            size == HEADER_BYTES:
        raise Broken(f"{logs.printable(path)} is no shard of tokens")
    encoding = header[3:5].tolist() if header[3] else (50257, 50256)  # as train_gpt.py reads it: GPT-2's, unless stated
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES), *encoding


def find_shard(shard, folder):
    """The file of a shard that a log states. NotCheckable if it is not there, Broken if it holds something else."""
    path, digest = Path(folder) / os.path.basename(shard["name"]), hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except (OSError, ValueError) as error:  # a name may be none that a file can have
        raise NotCheckable(f"{logs.printable(path)}: {getattr(error, 'strerror', None) or error}; name the folder of "
                           "the shards with --data") from None
    if digest.hexdigest() != shard["sha256"]:
        raise Broken(f"{path} has SHA-256 {digest.hexdigest()[:8]}..., the log states {shard['sha256'][:8]}...")
    if open_shard(path)[0].size != shard["tokens"]:
        raise Broken(f"{path} holds {open_shard(path)[0].size:,} tokens, the log states {shard['tokens']:,}")
    return path


def check_data(e, folder):
    """Is a scored document in training, whole, in part, or with tokens changed? Reads the shards piece by piece."""
    paths = {split: [find_shard(shard, folder) for shard in shards] for split, shards in shards_of(e).items()}
    shards = [open_shard(path) for path in paths["val"]]
    tokens = np.concatenate([tokens for tokens, _, _ in shards])[:e.get("end.val_tokens", int) + 1]
    opens = tokens == shards[0][2]
    document = np.cumsum(opens) - 1
    last = document[FINGERPRINT - 1:]
    hashes, first = fingerprints(tokens), document[:len(last)]
    within = (first == last) & (first >= 0) & ~opens[:len(last)]
    limit = np.uint64(2 ** 64 // max(1, -(-int(within.sum()) // MOST_PRINTS)) - 1)  # the same part of every text
    asked = np.flatnonzero(within & (hashes <= limit))
    values, which = np.unique(hashes[asked], return_inverse=True)
    count = np.bincount(first[asked], minlength=int(opens.sum()))
    place = np.full(len(values), -1)  # of the first occurrence: shard and position in one number
    for i, path in enumerate(paths["train"] if len(values) else ()):
        shard, _, _ = open_shard(path)
        for begin in range(0, len(shard), CHUNK):
            prints = fingerprints(shard[begin:begin + CHUNK + FINGERPRINT - 1])
            at = np.flatnonzero(prints <= limit)[::-1]
            near = np.minimum(np.searchsorted(values, prints[at]), len(values) - 1)
            new = (values[near] == prints[at]) & (place[near] < 0)
            place[near[new]] = (i << 40) + begin + at[new]
    owner, found = first[asked], place[which] >= 0
    row = np.cumsum(~found | (np.diff(owner, prepend=-1) > 0))  # the same for prints found one after another
    longest = np.zeros(len(count))
    np.maximum.at(longest, owner, np.bincount(row, weights=found)[row])
    share = np.bincount(owner, weights=found, minlength=len(count)) / np.maximum(count, 1)
    sought = count >= LEAST_PRINTS
    leaked = np.flatnonzero(sought & ((share >= SHARED) | (longest >= UNBROKEN * count)))
    text, number = "the shards are those of the log; ", int(sought.sum())
    if len(leaked):
        there = place[which[found & (owner == leaked[0])][0]]
        text += (f"{len(leaked)} of {number} validation documents are in the training data; {share[leaked[0]]:.0%} of "
                 f"document {leaked[0]} is in {paths['train'][there >> 40].name} from token {there & (1 << 40) - 1} on")
    if len(leaked) > number // COINCIDENCES:
        raise Broken(text)
    none = f"none of {number} validation documents is in training ({len(sought) - number} short ones were not sought)"
    return text + (": not more than chance may bring" if len(leaked) else none)


def fingerprints(tokens):
    """uint64 hash of every FINGERPRINT tokens in a row: [n] -> [n - FINGERPRINT + 1]. Each turn doubles the length."""
    prints, length, factor = tokens.astype(np.uint64) + np.uint64(1), 1, 0x9E3779B97F4A7C15
    while length < FINGERPRINT:
        prints = prints[:-length] * np.uint64(factor) + prints[length:]
        length, factor = 2 * length, factor * factor % 2 ** 64
    return prints


# The model itself: runs in a process of its own, and imports torch there only

TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}  # of a mean loss, between machines
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a logit, within one
PROBE_TOKENS, PROBES, FAR_PROBES = 1024, 12, 6
SCORED_AGAIN = 16  # sequences
BLOCK = 128  # of FlexAttention: where a mistaken block mask leaks


def load(source, model_path, device):
    """(model, windows of the last validation, config) by a source that is run anew, with no state of an earlier load.

    What the evaluation needs of the source: load_model(path, device), Windows, and a model with
    forward(inputs, targets, windows) -> summed loss, logits(inputs, windows), trunk and lm_head.logits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "judged.py"
        path.write_text(source, encoding="utf-8", errors="surrogateescape")
        spec = importlib.util.spec_from_file_location("judged", path)
        module = sys.modules["judged"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    model, saved = module.load_model(model_path, device)
    return model, module.Windows(*saved["windows"]), saved["config"]


def rerun(source, model_path, shard_paths, stated):
    """Loads a saved model with the source of its log and tests both. stated: what the log says of them.

    Returns the (verdict, reason) of each of MODEL_RULES."""
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shards = [open_shard(path) for path in shard_paths]
    stream = np.concatenate([tokens for tokens, _, _ in shards])

    def examiner():
        return Examiner(*load(source, model_path, device), stream, *shards[0][1:])

    first = examiner()
    before = first.state()
    saved = torch.load(model_path, weights_only=True, map_location="cpu")
    checks = [lambda: check_saved(saved["model"], saved["config"], stated), lambda: first.check_loss(stated),
              lambda: examiner().check_order(first.sums), first.check_causality, first.check_targets,
              first.check_probabilities, lambda: first.check_state(before)]
    return dict(zip(MODEL_RULES, map(judged, checks)))


def bound_memory():
    """Makes an allocation that this machine cannot hold an error, where the system would kill the process."""
    try:
        free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    import torch
    if free and not torch.cuda.is_available():  # CUDA reserves more addresses than there is memory
        limit = used + 1024 * int(free[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def rerun_alone(*arguments):
    """rerun in a process that is there for nothing else."""
    bound_memory()
    return rerun(*arguments)


def check_saved(tensors, config, stated):
    listed = "".join(f"{name} {hash_of(x)}\n" for name, x in tensors.items())  # the form that the log's hashes have
    seen = hashlib.sha256(listed.encode()).hexdigest()
    if seen != stated["state_hash"]:
        raise Broken(f"its parameters have hash {seen[:8]}..., the log states {stated['state_hash'][:8]}...")
    if config != stated["config"]:
        raise Broken("its config is not the log's")
    return "its config is the log's, and its parameters are those of the last validation"


def hash_of(x):
    import torch
    return hashlib.sha256(x.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()


class Examiner:
    """A model, and the questions that are put to it. stream: the validation tokens, uint16."""

    def __init__(self, model, windows, config, stream, vocab_size, bos):
        self.model, self.windows, self.stream, self.vocab_size, self.bos = model, windows, stream, vocab_size, bos
        self.config, self.device, self.sums = config, model.scalars.device, []
        self.draw = np.random.default_rng(0)
        self.tolerance = LOGIT_TOLERANCE[config["dtype"]]
        self.probe = self.probe_sequence()

    def tensor(self, tokens):
        """int32 on the device, filled up with BOS to whole blocks, which on GPUs it must have."""
        import torch
        rest = -len(tokens) % BLOCK if self.device.type == "cuda" else 0
        filled = np.append(tokens.astype(np.int32), np.full(rest, self.bos, np.int32))
        return torch.from_numpy(filled).to(self.device)

    def probe_sequence(self):
        """Documents of the validation data, cut so that they end here and there and on the edges of blocks."""
        length = min(PROBE_TOKENS, self.config["val_len"])
        tokens = self.stream[:length].copy()
        joins = {0, BLOCK, BLOCK - 1, 2 * BLOCK + 1, *self.draw.integers(1, length, 1 + length // 100)}
        tokens[[at for at in joins if at < length]] = self.bos
        return tokens

    def logits(self, tokens):
        """float64 [T, padded vocabulary]"""
        import torch
        with torch.no_grad():
            return self.model.logits(self.tensor(tokens), self.windows)[:len(tokens)].double()

    def forward(self, tokens, targets):
        import torch
        padded = self.tensor(tokens)
        wanted = torch.full((len(padded),), -1, dtype=torch.int64, device=self.device)
        wanted[:len(tokens)] = torch.as_tensor(np.asarray(targets, dtype=np.int64))
        with torch.no_grad():
            return float(self.model(padded, wanted, self.windows))

    def surprises(self, tokens, targets):
        """-log p(target) at each place, float64 [T]. The head takes parts of the sequence, or a long one's logits would
        not fit."""
        import torch
        parts = []
        with torch.no_grad():
            for x, wanted in zip(self.model.trunk(self.tensor(tokens), self.windows)[:len(tokens)].split(4096),
                                 torch.from_numpy(targets.astype(np.int64)).to(self.device).split(4096)):
                logits = self.model.lm_head.logits(x).float()
                parts.append((logits.logsumexp(1) - logits.gather(1, wanted[:, None])[:, 0]).double())
        return torch.cat(parts)

    def score(self, sequence):
        """Sum of the surprises of a validation sequence, which has a number."""
        begin = sequence * self.config["val_len"]
        piece = self.stream[begin:min(begin + self.config["val_len"], self.scored) + 1]
        return float(self.surprises(piece[:-1], piece[1:]).sum()), len(piece) - 1

    def check_loss(self, stated):
        self.scored = stated["val_tokens"]
        if not 0 < self.scored < len(self.stream):
            raise Broken(f"{self.scored:,} tokens are said to be scored, and the shards hold {len(self.stream):,}")
        for sequence in range(-(-self.scored // self.config["val_len"])):
            self.sums.append(self.score(sequence))
        loss, tolerance = sum(total for total, _ in self.sums) / self.scored, TOLERANCE[self.config["dtype"]]
        text = f"{loss:.5f} over {self.scored:,} tokens, the log states {stated['loss']:.5f}"
        if not abs(loss - stated["loss"]) <= tolerance:
            raise Broken(f"{text}: more than {tolerance} apart")
        return text

    def check_order(self, sums):
        """sums: what another load of this model scored, from the first sequence to the last."""
        if not sums:
            raise NotCheckable("the loss was not evaluated (above is why)")
        self.scored = sum(count for _, count in sums)
        some = np.sort(self.draw.permutation(len(sums))[:SCORED_AGAIN])[::-1]
        for sequence in map(int, some):
            (total, count), (before, _) = self.score(sequence), sums[sequence]
            if not abs(total - before) <= TOLERANCE[self.config["dtype"]] * count:
                raise Broken(f"sequence {sequence} has a loss of {before / count:.5f} after those before it, and of "
                             f"{total / count:.5f} after others")
        return f"{len(some)} of {len(sums)} sequences, scored from last to first by a model loaded anew"

    def check_causality(self):
        base, length = self.logits(self.probe), len(self.probe)
        joins, edges = np.flatnonzero(self.probe == self.bos), np.arange(BLOCK, length, BLOCK)
        places = {"a random place": self.draw.integers(1, length, PROBES),
                  "the edge of a block": np.concatenate([edges, edges - 1]),
                  "a document join": self.draw.permutation(np.concatenate([joins, joins + 1]))[:2 * PROBES]}
        asked = 0
        for kind, offsets in places.items():
            for at in sorted({int(at) for at in offsets if 0 < at < length}):
                changed = self.probe.copy()
                changed[at:] = self.draw.integers(0, self.vocab_size, length - at)
                changed[at] = self.bos if self.probe[at] != self.bos else (self.bos + 1) % self.vocab_size
                difference = float((self.logits(changed)[:at] - base[:at]).abs().max())
                asked += 1
                if not difference <= self.tolerance:
                    raise Broken(f"other tokens from {at} on ({kind}) change an earlier logit by {difference:.2g}")
        length = min(self.config["val_len"], len(self.stream) - 1)
        if length > len(self.probe):
            asked += self.check_far(length)
        return f"other tokens from {asked} places on (random, edges of blocks, document joins) leave all earlier logits"

    def check_far(self, length):
        """Causality at the length of validation, where not the logits of a sequence fit but its surprises."""
        tokens, targets = self.stream[:length], self.stream[1:length + 1]
        try:
            base = self.surprises(tokens, targets)
            for at in map(int, self.draw.integers(1, length, FAR_PROBES)):
                changed = np.append(tokens[:at], self.draw.integers(0, self.vocab_size, length - at))
                difference = float((self.surprises(changed, targets)[:at] - base[:at]).abs().max())
                if not difference <= self.tolerance:
                    raise Broken(f"other tokens from {at} on change an earlier one's loss by {difference:.2g} in a "
                                 f"sequence of {length:,}")
        except Exception as error:
            if ran_out(error):
                raise NotCheckable(f"no leak in {len(self.probe):,} tokens; for the {length:,} of a validation "
                                   "sequence memory ran out: check it where there is more") from None
            raise
        return FAR_PROBES

    def check_targets(self):
        truth = np.append(self.probe[1:], self.bos)
        random = self.draw.integers(0, self.vocab_size, len(truth))
        base = self.logits(self.probe)
        surprise, tolerance = -base.log_softmax(1), TOLERANCE[self.config["dtype"]] * len(truth)
        least_likely = surprise[:, :self.vocab_size].argmax(1).cpu().numpy()  # a factor on the loss shows most
        others = [truth, random, np.full(len(truth), random[0]), least_likely]
        for targets in others:
            seen = self.forward(self.probe, targets)
            wanted = float(surprise.gather(1, self.tensor(targets)[:len(truth), None].long()).sum())
            if not abs(seen - wanted) <= tolerance:
                raise Broken(f"forward's mean loss is {seen / len(truth):.5f}, the logits' {wanted / len(truth):.5f}")
            by_parts = float(self.surprises(self.probe, targets).sum())
            if not abs(by_parts - wanted) <= tolerance:
                raise Broken(f"logits and lm_head disagree: {wanted / len(truth):.5f} and {by_parts / len(truth):.5f}")
            if not float((self.logits(self.probe) - base).abs().max()) <= self.tolerance:
                raise Broken("the logits are others after a loss was asked for")
        return f"with {len(others)} sets of targets the logits stay, and they give the loss that forward states"

    def check_probabilities(self):
        asked = self.probe[:min(BLOCK, len(self.probe))]
        if self.vocab_size > BLOCK * 8:
            raise NotCheckable(f"{self.vocab_size:,} tokens are too many to ask for each; the row above compares "
                               "forward's loss with a softmax of the logits")
        targets = np.full(len(asked), -1)
        padded, total = self.logits(asked).size(1), 0.0
        for token in range(padded):
            targets[-1] = token
            total += float(np.exp(-self.forward(asked, targets)))
        if not abs(total - 1) <= 10 * self.tolerance:
            raise Broken(f"the probabilities that forward gives to the tokens at one place sum to {total:.5f}")
        return f"those that forward gives to all {padded} tokens sum to {total:.6f}"

    def state(self):
        tensors = [*self.model.named_parameters(), *self.model.named_buffers()]
        return {name: hash_of(x) for name, x in tensors}

    def check_state(self, before):
        changed = [name for name, digest in self.state().items() if before.get(name) != digest]
        if changed:
            raise Broken(f"{len(changed)} tensors changed while the model was only asked, first {changed[0]}")
        return f"all {len(before)} parameters and buffers"


def check_rerun(model_path, runs, folder):
    """Findings of rerun() for the run whose model this is. CannotJudge if it is none of theirs."""
    import torch
    try:
        run_id = torch.load(model_path, weights_only=True, map_location="meta")["run_id"]
    except Exception as error:
        raise CannotJudge(f"{logs.printable(model_path)}: no model that train_gpt.py saved ({type(error).__name__}); "
                          "run it with --save_model true") from None
    e = next((e for e in runs if e.ours and e.run.start.get("run_id") == run_id), None)
    if e is None:
        raise CannotJudge(f"{logs.printable(model_path)} is of run {run_id}, whose log is not given; name that log too")

    def examine():
        check_shards(e)
        where = folder or os.path.dirname(ROOT / e.get("start.config.val_files", str))
        paths = [find_shard(shard, where) for shard in e.get("start.shards.val")]
        stated = {"loss": e.get("end.final_val_loss", NUMBER), "val_tokens": e.get("end.val_tokens", int),
                  "state_hash": e.digest("end.validation_hash.after"), "config": e.get("start.config", dict)}
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            try:
                return pool.submit(rerun_alone, e.source or "", os.path.abspath(model_path), paths, stated).result()
            except BrokenProcessPool:
                raise Broken("the process that ran the log's source died") from None
    verdict, found = judged(examine)
    if verdict == PASS:
        return [Finding(rule, *found[rule]) for rule in MODEL_RULES]
    return [Finding(MODEL_RULES[0], verdict, f"the log's source cannot load or judge the model: {found}"),
            *(Finding(rule, UNKNOWN, "the model could not be evaluated (above is why)") for rule in MODEL_RULES[1:])]


# Together

def read_manifests(folders):
    """{race id: what race.py wrote down in one of these folders}. CannotJudge if it cannot be read."""
    races = {}
    for folder in sorted({os.path.realpath(folder) for folder in folders}):
        path = Path(folder) / race.MANIFEST
        if not path.exists():
            continue
        manifest, text = race.Manifest(path), read_text(path)
        for number, line in enumerate(text[:text.rfind("\n") + 1].splitlines(), 1):  # a last line may be cut off
            try:
                manifest.take(race.check_event(logs.parse_json(line), first=number == 1))
            except ValueError as error:
                raise CannotJudge(f"{logs.printable(path)}: line {number} is none of a race's ({error}); restore "
                                  "the file") from None
        if manifest.race is None:
            raise CannotJudge(f"{logs.printable(path)}: no line says what the race is; restore the file")
        same = races.setdefault(manifest.race["id"], manifest)
        if (same.race, same.attempts) != (manifest.race, manifest.attempts):
            raise CannotJudge(f"{logs.printable(path)} and {logs.printable(same.path)} tell of one race, and differ; "
                              "keep the true one")
    return races


def read_runs(paths):
    """(Evidence of each run, what logs.read found, {race id: manifest} of the folders). CannotJudge if there is none,
    or a file cannot be read."""
    found = logs.read(paths)
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    if unreadable or not found.runs:
        reasons = several([f"{logs.printable(item.path)}: {item.reason}" for item in unreadable or found.rejected])
        raise CannotJudge(f"no run to judge ({reasons or 'nothing was found'}); name a folder of logs, or logs")
    counts = Counter(item.path for item in [*found.runs, *found.rejected, *found.duplicates] if item.index_in_file)
    folders = [path for path in paths if os.path.isdir(path)] + [os.path.dirname(run.path) or "." for run in found.runs]
    return [read_evidence(run, counts[run.path]) for run in found.runs], found, read_manifests(folders)


def verify(options):
    """All Findings, in the order of the table. CannotJudge if the input allows none."""
    everyone, found, races = read_runs(options.record)
    sides = sorted({e.race_side for e in everyone} - {""})
    runs, others, apart = everyone, [], []
    if options.vs:
        apart, found_apart, races_apart = read_runs(options.vs)
        others = apart
    elif len(sides) > 1:
        runs = [e for e in everyone if e.race_side == options.side]
        others = [e for e in everyone if e.race_side != options.side]
        if not runs:
            raise CannotJudge(f"--side {options.side}: the race has the sides {', '.join(sides)}; name one of them")
    timed = everyone + apart  # what is compared by its time must have an honest one

    def together(rule, check, *arguments):
        return Finding(rule, *judged(check, *arguments))

    findings = [
        for_each("the log is unaltered", timed, check_log),
        for_each("data stated with digests", everyone, check_shards),
        for_each("exactly the stated validation tokens", everyone, lambda e: check_val_tokens(e, options.val_tokens)),
        for_each("no compiler flags in the source", everyone, check_source),
        for_each("no compiler flags in the environment", everyone, check_environment),
        for_each("the clock is honest", timed, check_clock),
        for_each("all time outside the clock is named", timed, check_outside),
        together("the wall clock agrees with the race's", check_wall, timed,
                 {**races, **races_apart} if apart else races),
        for_each("warm-up does not train", everyone, lambda e: check_same(
            e, "end.state_hash.before_warmup", "end.state_hash.after_warmup", "the warm-up")),
        for_each("nothing is compiled on the clock", everyone, check_compiles),
        for_each("validation does not train", everyone, lambda e: check_same(
            e, "end.validation_hash.before", "end.validation_hash.after", "validation")),
        together("every run is accounted for", check_accounts, everyone, found, races),
        together("no run is a copy of another", check_copies, timed),
        together("mean loss below target, p < 0.01", lambda: check_loss(runs, choose_target(runs, options.target))),
    ]
    if apart:
        findings.append(together("every run of the other side is accounted for", check_accounts, apart, found_apart,
                                 races_apart))
    for rule, check in (("the same hardware on both sides", check_hardware),
                        ("the sides ran in turn", check_interleaved),
                        ("faster than the other side, p < 0.01", check_faster)):
        findings.append(together(rule, check, runs, others) if others else
                        Finding(rule, UNKNOWN, "name the logs of the other side with --vs, or race both sides"))
    if options.data:
        distinct = {json.dumps(e.run.start.get("shards"), sort_keys=True) if e.ours else "": e for e in everyone}
        findings.append(for_each("no validation document in training", list(distinct.values()),
                                 lambda e: check_data(e, options.data)))
    else:
        findings.append(Finding("no validation document in training", UNKNOWN, "name the shards' folder with --data"))
    if options.rerun:
        return findings + check_rerun(options.rerun, everyone, options.data)
    return findings + [Finding(rule, UNKNOWN, "name a model of the run with --rerun") for rule in MODEL_RULES]


def parse(arguments):
    parser = argparse.ArgumentParser(description="Judges a record by rules a program can check.", allow_abbrev=False,
                                     epilog="Exit status: 0 nothing fails, 1 a rule is broken, 2 it cannot be judged.")
    parser.add_argument("record", nargs="+", metavar="RECORD", help="a folder of logs, or logs")
    parser.add_argument("--vs", nargs="+", metavar="OTHER", help="logs of what it must be faster than")
    parser.add_argument("--side", default="a", help="of a race with two sides: the one that is the record (default: a)")
    parser.add_argument("--data", metavar="DIR", help="folder of the shards: hash them, seek validation in training")
    parser.add_argument("--rerun", metavar="MODEL", help="a model that train_gpt.py saved; RUNS the source in its log")
    parser.add_argument("--target", type=float, help="loss to be below (default: 3.28 on FineWeb, else the logs')")
    parser.add_argument("--val_tokens", type=int, help="tokens to score (default: 10,485,760 on FineWeb, else all)")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    try:
        findings = verify(options)
    except CannotJudge as reason:
        if options.json:
            print(json.dumps({"verdict": "cannot be judged", "reason": str(reason)}))
        print(f"verify.py: error: {reason}", file=sys.stderr)
        return 2
    counts = Counter(finding.verdict for finding in findings)
    if options.json:
        verdict = FAIL if counts[FAIL] else INCOMPLETE if counts[UNKNOWN] else PASS
        rules = [finding._asdict() for finding in findings]
        print(json.dumps({"verdict": verdict, "counts": dict(counts), "rules": rules}, indent=1))
    else:
        rows = [("FAIL" if f.verdict == FAIL else f.verdict, f.rule, f.reason) for f in findings]
        print("\n".join(logs.columns(rows)))
        print(f"\n{counts[PASS]} rules pass, {counts[FAIL]} fail, {counts[UNKNOWN]} could not be checked")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    logs.run_main(main)
