"""Reads run logs: every form the speedrun community has written since 2024, and this project's own.

    python records/logs.py PATH...            one line for every run and file: used, rejected, or a duplicate, and why
    python records/logs.py --json PATH...     the same for programs
    python records/logs.py --follow LOG [--to tensorboard:DIR | --to wandb:PROJECT]
                                              a line of JSON for each step as the log gets it, until the run ends or was
                                              killed: for whatever draws metrics, and off the run's clock

A PATH is a log (.gz too) or a folder, which is searched with its subfolders, linked ones too (those that begin with a
dot are left out). Nothing is guessed and nothing is dropped without a word: a run is used, or its file is named with
the reason (of several files beside the logs that end in, say, .json, their number).

What counts as a run:
- Only lines after the last separator, a line of exactly 100 `=`. What stands before may be a script that quotes a log.
- The source is the first text that ends at a separator; files that open with a separator hold it after that one.
  Its SHA-256 is taken with line ends as \\n, so that a copy that went through Windows keeps its hash.
- A step counter that falls back begins another run in the same file. Each run is judged on its own.
- A run is complete if its last validation is at the step that it stated as its total. llm.c's form states no total:
  there completeness cannot be known (None), unless training lines follow the last validation.
- Its loss is `val_loss` (llm.c: `tel`) and its time is `train_time`, both of the last validation line.
- A line {"resumed": ...} says that a killed run goes on from a checkpoint: what it had written of later steps is
  dropped, and the counter that falls back there begins no other run. Such runs, and those that began from saved
  parameters, are read, and Run.disqualified says why they count for no record.

This file needs nothing but the standard library.
"""

import argparse
import fcntl
import gzip
import hashlib
import io
import json
import math
import os
import re
import signal
import stat
import sys
import time
import zlib
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import NamedTuple

SEPARATOR, UTF_16 = b"=" * 100, (b"\xff\xfe", b"\xfe\xff")
MOST_MIB = 16  # of a log, unpacked; the longest of the public speedrun has 1.5
MOST_RUNS, MOST_LINES = 10_000, 100_000  # runs, and validation lines, in one file, Steps of one run, and
MOST_NOTES = 20  # notes on one run: they bound the memory that a hostile file can take
MOST_KEPT = 100  # files
MOST_SOURCE = 1 << 20  # bytes of a source that is kept; a longer one has a digest only
LONGEST_LINE = 300  # characters of a message on stderr
DEEPEST = 50  # lists and objects within each other in a line of JSON: whoever walks them later needs no guard
DOCUMENTS = {".md", ".markdown", ".rst", ".py", ".ipynb", ".json", ".jsonl", ".csv", ".tsv", ".html", ".pdf",
             ".yaml", ".yml", ".toml", ".sh", ".png", ".jpg", ".svg"}  # they may quote a log's lines, and are none

# Why something was not used. Every other rejection is a fact about a run; UNREADABLE is one about the input.
UNREADABLE, NOT_A_LOG, INCOMPLETE, NOT_FINITE = "unreadable", "not a log", "incomplete", "not finite"

_SEPARATED = re.compile(rb"^%b(?:\n|\Z)" % SEPARATOR, re.M)
_KNOWN = re.compile(rb'step:|step +\d+/\d+ *\||s:\d|\{"run_id"|\{"end"|\{"resumed"|error:')
_STEP = re.compile(rb"(?:step|s):(\d{1,18})(?:/(\d{1,18}))? (.*)")
_SPACED = re.compile(rb"step:? *(\d{1,18})/(\d{1,18}) *[|,](.*)")  # `step  25/1840 | time: 1,530ms | val loss: 4.1`
_SPELLINGS = [(re.compile(pattern), spelling) for pattern, spelling in (
    (rb"(?<=\d),(?=\d{3})", b""), (rb"[|,] ", b" "), (rb"\b(train|val)[ _]loss: *", rb"\1_loss:"),
    (rb"\b(?:train_)?time: *", b"train_time:"), (rb"\bstep[ _]avg: *", b"step_avg:"))]
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.I)
_GPU_ROW = re.compile(rb"^\|\s+(\d+)\s+[^|]*\|\s+[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.", re.M)
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"
_DAY = re.compile(rb"^[A-Z][a-z]{2} ([A-Z][a-z]{2}) +(\d{1,2}) [\d:]{8} (20\d\d)\b", re.M)  # nvidia-smi's head
_WORLD_SIZE = re.compile(rb"\bworld_size['\"]?(?: *[=:] *| +)(\d{1,18})(?!\d)")
_TRAINING, _USUAL = {"trl", "train_loss", "train_time"}, {"val_loss", "tel", "train_time", "step_avg"}
_SOME = rb"\d{1,15}(?:\.\d{1,15})?"
# The lines that this project's script writes after the last separator, each kind under a letter
_OWN_LINE = re.compile(
    rb"""(?P<d>\{"run_id":\ .*\}) | (?P<r>\{"resumed":\ .*\}) | (?P<e>\{"end":\ .*\}) | (?P<x>error:\ .*)
    |(?P<p>peak\ memory\ allocated:\ \d+\ MiB\ reserved:\ \d+\ MiB)
    |(?P<s>step:\d{1,15}/(?P<total>\d{1,18})\ (?:val_loss:%b\ )?train_time:\d{1,15}ms\ step_avg:%bms
    (?:\ train_loss:%b)?)""" % (_SOME, _SOME, _SOME), re.X)


class Validation(NamedTuple):
    """One validation line; time_ms is None where the line states none, extras holds its further fields."""
    step: int
    loss: float
    time_ms: float | None
    extras: dict


class Step(NamedTuple):
    """A line with train_time in whole ms; average (in ms) and train_loss are None where it states none."""
    step: int
    time_ms: float
    average: float | None
    train_loss: float | None
    validation: bool


@dataclass(frozen=True)
class Run:
    """A run; or one, or a file (index_in_file None), that cannot be used: then reason says why, kind is of those above.

    index_in_file counts from 1; start and end are this project's JSON lines, if any. complete is None where the form
    states no total. clock_falls holds the steps at which train_time was less than before: once, early, is the
    community's reset after warm-up. resumed holds what each {"resumed": ...} line says.
    What a table of runs need not show has no place in the JSON either: source is the text as its digest takes it, shape
    a letter for each line that this project's script wrote (see _OWN_LINE; o: none of its), odd the first line of
    none, separators how many the file has, day that of nvidia-smi's table, like 2024-10-18."""
    path: str
    index_in_file: int | None = None
    reason: str = ""
    kind: str = ""
    source_sha256: str | None = None
    stated_steps: int | None = None
    validations: tuple[Validation, ...] = ()
    last_step: int | None = None
    final_loss: float | None = None
    loss_decimals: int | None = None
    train_time_ms: float | None = None
    gpus: int | None = None
    complete: bool | None = None
    clock_falls: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    start: dict | None = None
    end: dict | None = None
    resumed: tuple[dict, ...] = field(default=(), repr=False)
    steps: list[Step] = field(default_factory=list, repr=False)
    source: str | None = field(default=None, repr=False)
    shape: str = field(default="", repr=False)
    odd: str | None = field(default=None, repr=False)
    separators: int = field(default=0, repr=False)
    day: str | None = field(default=None, repr=False)

    @property
    def disqualified(self):
        """Why the run counts for no record whatever its figures are, or None."""
        if self.resumed:
            at = ", ".join(str(resumed.get("from_step")) for resumed in self.resumed[:5])
            return f"resumed at step {at}: it had ended before, and what it may have lost is not on its clock"
        if (self.start or {}).get("init_from"):
            return "begun from saved parameters (init_from), and not from its seed"
        return None

    @property
    def over(self):
        """Whether its log says that no further line will come."""
        return bool(self.end or self.complete or "error:" in self.reason)


@dataclass(frozen=True)
class Duplicate:
    """A file (index_in_file None) or a run that was met before, under original_path, and is not counted again."""
    path: str
    index_in_file: int | None
    original_path: str
    reason: str


@dataclass
class Logs:
    """All that a reading found, in the order of the paths."""
    runs: list[Run] = field(default_factory=list)
    rejected: list[Run] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)


def read(paths):
    """Reads logs and folders of logs.

    Never raises for what stands in or is wrong with a path: see Logs.rejected."""
    logs, seen_files, seen_contents = Logs(), {}, {}
    for path in _files(paths, logs.rejected):
        identity = os.path.realpath(path)
        if identity in seen_files:
            logs.duplicates.append(Duplicate(path, None, seen_files[identity], "the same file, named twice"))
            continue
        seen_files[identity] = path
        runs, rejected, digest = read_file(path)
        if digest in seen_contents:
            logs.duplicates.append(Duplicate(path, None, seen_contents[digest], "byte-identical"))
            continue
        if digest:
            seen_contents[digest] = path
        logs.runs += runs
        logs.rejected += rejected
    logs.runs, same = without_copies(logs.runs)
    logs.rejected, same_rejected = without_copies(logs.rejected)
    logs.duplicates += same + same_rejected
    return logs


_kept = {}  # by path, the digest of its content and what that holds: a page's tools read the same logs in turn


class _Refused(Exception):
    """(kind, reason): the file is none that is read."""


def read_file(path):
    """Reads one file -> (runs, rejected, digest of the contents or None where there are none to compare)."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower().removesuffix(".gz"))
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _Refused(UNREADABLE, "not a regular file; name a log file or a folder")
        if suffix in DOCUMENTS or stem == "readme":
            what = f"a {suffix} file" if suffix in DOCUMENTS else "a README"
            raise _Refused(NOT_A_LOG, f"{what}; rename it to .txt if it is a run's log")
        with open_unpacked(path) as file:
            content = file.read((MOST_MIB << 20) + 1)
        digest = hashlib.sha256(content).digest()
        if _kept.get(path, (None,))[0] != digest:
            if len(_kept) == MOST_KEPT:
                del _kept[next(iter(_kept))]  # the oldest
            _kept[path] = digest, *_parse(path, content)
        return *_kept[path][1:], digest
    except _Refused as refused:
        kind, reason = refused.args
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        kind, reason = UNREADABLE, f"broken gzip file ({error}); copy it again from where it was made"
    except OSError as error:
        kind, reason = UNREADABLE, f"cannot be read ({error.strerror or error}); check the path and its rights"
    return [], [_rejected(path, kind, reason)], None


def _rejected(path, kind, reason):
    return Run(path, reason=f"{kind}: {reason}", kind=kind)


def open_unpacked(path):
    """The bytes of a file, unpacked if the first of them say gzip, whatever its name says."""
    file = open(path, "rb")
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def _files(paths, rejected):
    for path in map(os.fspath, paths):
        if not os.path.isdir(path):
            yield path
            continue
        any_file, problems = False, []
        searched = set(map(str, Path(os.path.realpath(path)).parents))
        for folder, subfolders, names in os.walk(path, onerror=problems.append, followlinks=True):
            here = os.path.realpath(folder)
            if here in searched:
                rejected.append(_rejected(folder, NOT_A_LOG, "a folder that is searched under another name, or that "
                                          "holds the one that was named; leave out the link to it"))
                subfolders.clear()
                continue
            searched.add(here)
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            any_file = any_file or bool(names)
            yield from (os.path.join(folder, name) for name in sorted(names))
        rejected += [_rejected(problem.filename, UNREADABLE, f"folder ({problem.strerror}); check its rights")
                     for problem in problems]
        if not any_file and not problems:
            rejected.append(_rejected(path, NOT_A_LOG, "a folder without files; name the folder that holds the logs"))


def without_copies(runs):
    """Runs, used or rejected ones, met once each, and the others as duplicates.

    A console capture or a summary holds the same run's lines as its log, or some of them: two runs are one if they
    end in the same validation line and one has no validation that the other has not. The fuller one stays. Before the
    first step all runs are alike, so such a line is no evidence. A lone one after it, which two runs can share by
    chance, is evidence if it states a time, unless source or run_id tell the two apart."""
    lines = [{validation[:3] for validation in run.validations} for run in runs]
    originals, copies, by_ending = {}, {}, {}
    for i in sorted(range(len(runs)), key=lambda i: (-len(lines[i]), runs[i].source_sha256 is None, i)):
        ending = runs[i].validations[-1][:3] if lines[i] else None
        trained = [line for line in lines[i] if line[0] > 0]
        original = None
        if len(trained) > 1 or trained and ending[2] is not None:
            original = next((j for j in by_ending.get(ending, ()) if lines[i] <= lines[j]
                             and (len(trained) > 1 or _may_be_one(runs[i], runs[j]))), None)
        if original is None:
            originals[i] = runs[i]
            by_ending.setdefault(ending, []).append(i)
        else:
            copies[i] = Duplicate(runs[i].path, runs[i].index_in_file, runs[original].path,
                                  f"the same run as run {runs[original].index_in_file} there, line for line")
    return [originals[i] for i in sorted(originals)], [copies[i] for i in sorted(copies)]


def _may_be_one(run, other):
    """Whether two runs agree in source and run_id, where both state them."""
    pairs = zip(*((one.source_sha256, (one.start or {}).get("run_id")) for one in (run, other)))
    return all(mine is None or theirs is None or mine == theirs for mine, theirs in pairs)


class _Notes(dict):
    """Texts in order, each once."""

    def add(self, text):
        if len(self) < MOST_NOTES:
            self[printable(text)] = None
        else:
            self["and more notes of these kinds"] = None


class _OpenRun:
    """A run whose lines are still being read."""

    def __init__(self, start=None):
        self.start, self.end = start, None
        self.stated = None  # the total as it stands in the lines
        self.first_step = self.last_step = None
        self.validations, self.validation_fields = [], {}  # the fields are the last one's
        self.trained_on = False  # training lines followed the last validation
        self.cut = False  # the last line was cut off
        self.clock, self.clock_falls = -math.inf, []
        self.notes, self.error = _Notes(), None
        self.steps, self.resumed = [], []

    def resume(self, resumed):
        """Goes back to a checkpoint: what was written of later steps was trained again. False if it states no step."""
        at = resumed.get("from_step") if isinstance(resumed, dict) else None
        if not isinstance(at, int) or at < 0:
            return False
        self.resumed.append(resumed)
        self.validations = [validation for validation in self.validations if validation.step <= at]
        self.steps = [timed for timed in self.steps if timed.step <= at]
        self.clock_falls = [step for step in self.clock_falls if step <= at]
        self.clock = self.steps[-1].time_ms if self.steps else -math.inf
        self.last_step, self.cut = at, False
        self.trained_on = not self.validations or self.validations[-1].step < at
        if self.error:
            self.notes.add(f"before it was resumed: {self.error}")
            self.error = None
        return True


class _Part:
    """The runs in a text without separators, and what stands before the first of them."""

    def __init__(self, text):
        self.runs, self.notes, self.environment, self.validations = [], _Notes(), bytearray(), 0
        for line in io.BytesIO(text):
            self.take(line.removesuffix(b"\n"), line.endswith(b"\n"))

    @property
    def run(self):
        return self.runs[-1] if self.runs else None

    def note(self, text):
        (self.run or self).notes.add(text)

    def take(self, line, ended):
        """Takes a line; one that no line end ended only if nothing can be missing from it."""
        known = _KNOWN.match(line)
        step = known and _step(line)
        begun = known or b"step:".startswith(line) or b"s:".startswith(line)
        if begun and not ended and not self.is_whole(line, step):
            if self.run:
                self.run.cut = True
            self.note(f"the last line is cut off and dropped: {_show(line)!r}")
        elif step:
            self.step_line(*step)
        elif known:
            self.other_line(line)
        elif not self.runs:
            self.environment += line + b"\n"

    def is_whole(self, line, step):
        """Whether a last line can be taken for whole, by the fields of the run's last validation line."""
        if not step:
            return line.startswith(b"{") and line.endswith(b"}")
        fields, earlier = _fields(step[2]), self.run.validation_fields if self.run else {}
        if not (fields and earlier.keys() <= fields.keys()):
            return False
        if b":" not in step[2].split()[-1]:
            return True  # a word after the fields
        return _ending(fields) == _ending(earlier) if earlier else _ending(fields) in ("ms", "s")

    def step_line(self, step, total, rest):
        fields, run = _fields(rest), self.run
        loss_text = _loss_text(fields)
        validation = loss_text is not None
        if not fields or validation and _number(loss_text) is None:
            return self.note(f"not understood, left out: {_show(rest)!r} at step {step}")
        if run and total is None and run.stated:
            total = run.stated  # a diagnostic of its own form
        repeated = validation and run and run.validations and run.validations[-1].step == step
        if run is None or run.last_step is not None and step < run.last_step:
            run = self.begin_run()
        elif repeated and run.resumed:
            run.validations.pop()  # the checkpoint was made before it
        elif repeated and len(run.validations) == 1 and not run.trained_on:
            run = self.begin_run()  # a start that came to nothing and another, or a list of results
        elif repeated:
            run.notes.add(f"validated more than once at step {step}: the last one counts")
        if run.first_step is None:
            run.first_step, run.stated = step, total
        if total != run.stated:
            run.notes.add(f"the stated total changed from {_show(run.stated)} to {_show(total)} at step {step}")
            run.stated = total
        run.last_step = step
        time_ms = _time_ms(fields.get("train_time", ""))
        if time_ms is not None:
            if time_ms < run.clock:
                run.clock_falls.append(step)
            run.clock = time_ms
            if fields["train_time"].removesuffix("ms").isdecimal() and len(run.steps) < MOST_LINES:
                run.steps.append(Step(step, time_ms, _time_ms(fields.get("step_avg", "")),
                                      _finite(fields.get("train_loss", "")), validation))
        if validation:
            extras = {name: text if _number(text) is None else _number(text) for name, text in fields.items()
                      if text and name not in _USUAL}
            run.validations.append(Validation(step, _number(loss_text), time_ms, extras))
            run.validation_fields, run.trained_on = fields, False
            self.validations += 1
            if self.validations > MOST_LINES:
                raise _Refused(NOT_A_LOG, f"more than {MOST_LINES:,} validation lines")
        elif not run.validations or step != run.validations[-1].step or _TRAINING & fields.keys():
            run.trained_on = True  # any other line beside a validation is another metric of the same model

    def other_line(self, line):
        if line.startswith(b"error:"):
            if self.run:
                self.run.error = _show(line)
            else:
                self.note(_show(line))
        elif line.startswith(b"{"):
            try:
                content = parse_json(line)
            except ValueError:
                return self.note(f"a JSON line that cannot be read, left out: {_show(line)!r}")
            if "run_id" in content:
                self.begin_run(content)
            elif "resumed" in content:
                if not (self.run and self.run.resume(content["resumed"])):
                    self.note(f"says that it was resumed, and not where: {_show(line)!r}")
            elif self.run and isinstance(content["end"], dict):
                self.run.end = content["end"]
        else:
            self.note(f"not understood, left out: {_show(line)!r}")

    def begin_run(self, start=None):
        if len(self.runs) >= MOST_RUNS:
            raise _Refused(NOT_A_LOG, f"more than {MOST_RUNS:,} runs")
        self.runs.append(_OpenRun(start))
        return self.run


def _parse(path, content):
    """-> (runs, rejected)"""
    for is_so, kind, what in ((not content, NOT_A_LOG, "an empty file"),
                              (content[:2] in UTF_16, UNREADABLE, "UTF-16 text; convert it to UTF-8"),
                              (b"\0" in content[:4096], NOT_A_LOG, "a binary file"),
                              (len(content) > MOST_MIB << 20, NOT_A_LOG, f"more than {MOST_MIB} MiB")):
        if is_so:
            raise _Refused(kind, what)
    *before, last = _SEPARATED.split(content.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    place = next((i for i, text in enumerate(before) if text.strip()), None)
    source, between = (None, before) if place is None else (before[place], before[place + 1:])
    digest = source and hashlib.sha256(source).hexdigest()
    *quoted, part = map(_Part, (*between, last))
    if not part.runs and source and b"import torch" in source:
        why = "incomplete: a script and its environment, but no step line: it stopped before its first step"
        return [], [Run(path, 1, "; ".join([why, *part.notes]), INCOMPLETE, digest)]
    if not part.runs:
        why = f"no line 'step:N/TOTAL val_loss:X' or 's:N tel:X'{' after the last separator' if source else ''}"
        return [], [_rejected(path, NOT_A_LOG, "; ".join([why, *part.notes]))]
    if count := sum(one.validations for one in quoted):
        part.notes.add(f"{count} validation lines before the last separator do not count")
    environment = b"".join(one.environment for one in (*quoted, part))
    text = sys.intern(source.decode("utf-8", "surrogateescape")) if source and len(source) <= MOST_SOURCE else None
    shape, odd = _shape(last)
    found = [_judge(run, part.notes, path=path, index_in_file=index, source_sha256=digest, gpus=_gpus(run, environment),
                    source=text if run.start is None or place == 0 else None, shape=shape, odd=odd,
                    separators=len(before), day=_day(environment)) for index, run in enumerate(part.runs, 1)]
    return [run for run in found if not run.reason], [run for run in found if run.reason]


def _shape(text):
    """(a letter for each line that this project's script writes after the last separator, o for one that is none or
    states another total; the first of these); ("", None) if it is not this script's."""
    shape, odd, total = [], None, None
    ours = text.startswith(b'{"run_id"')
    for line in text.removesuffix(b"\n").split(b"\n") if ours else ():
        match = _OWN_LINE.fullmatch(line)
        total = total or match and match["total"]
        shape.append(match.lastgroup if match and match["total"] in (None, total) else "o")
        if shape[-1] == "o" and not odd:
            odd = f"line {len(shape)} after the last separator: {_show(line)!r}"
    return "".join(shape), odd


def _judge(run, notes, **facts):
    """The Run that was read, of whose file and place the facts are; used, or rejected for a reason."""
    total = int(run.stated) if run.stated else None
    notes = [*notes, *run.notes]
    last = run.validations[-1] if run.validations else None
    found = Run(**facts, stated_steps=total, validations=tuple(run.validations), last_step=run.last_step,
                complete=None if total is None else bool(last) and last.step == total, start=run.start, end=run.end,
                clock_falls=tuple(run.clock_falls), resumed=tuple(run.resumed), steps=run.steps)
    of_total = "" if total is None else f" of {total}"
    kind, why = INCOMPLETE, None
    bad = next((v for v in run.validations if not math.isfinite(v.loss)), None)
    if bad:
        kind, why = NOT_FINITE, f"val_loss is {bad.loss} at step {bad.step}{of_total}"
    elif last is None:
        reached = f"step {run.last_step}{of_total}" if run.last_step is not None else "no step"
        why = f"incomplete: no validation line; it reached {reached}"
    elif total is not None and last.step != total:
        why = f"incomplete: the last validation is at step {last.step}{of_total}"
        if run.last_step != last.step:
            why += f", training lines go on to step {run.last_step}"
    elif total is None and run.trained_on:
        why = f"incomplete: training lines go on to step {run.last_step} after the last validation at step {last.step}"
    elif total is None and run.cut:
        why = f"incomplete: a line that is cut off follows the last validation at step {last.step}"
    elif total is None and last.step == 0:
        why = "incomplete: the only validation is at step 0, before any training"
    if why:
        return replace(found, reason="; ".join([why, *filter(None, [run.error]), *notes]), kind=kind)

    if found.disqualified:
        notes.insert(0, f"{found.disqualified}; it counts for no record")
    if total is None:
        notes.append("this form states no total: whether the run is complete cannot be known")
    if last.time_ms is None:
        notes.append("the last validation line states no train_time")
    if run.clock_falls:
        notes.append(f"train_time falls back at step {', '.join(map(str, run.clock_falls[:5]))}"
                     + (f" and {len(run.clock_falls) - 5} more" if len(run.clock_falls) > 5 else ""))
    first, *later = [validation.step for validation in run.validations]
    resumed = len(later) > 1 and first == run.first_step > later[0] - first  # it skipped earlier validations
    if run.first_step > 1 and (found.index_in_file > 1 or resumed):
        notes.append(f"begins at step {run.first_step}")
    other_losses = [key for key in last.extras if key.startswith("val") and key.endswith("loss")]
    if other_losses:
        notes.append(f"also logs {', '.join(other_losses)}; the loss is val_loss")
    if run.start and not run.end:
        notes.append("its end line is missing: the run stopped after the last validation")
    decimals = len(re.match(r"[^.]*\.?(\d*)", _loss_text(run.validation_fields))[1])
    final = (run.end or {}).get("final_val_loss")
    if isinstance(final, (int, float)) and not abs(final - last.loss) <= 0.51 * 10 ** -decimals:
        notes.append(f"its end line states final_val_loss {final}, its last validation {last.loss}")
    return replace(found, final_loss=last.loss, loss_decimals=decimals, train_time_ms=last.time_ms, notes=tuple(notes))


def _day(environment):
    if found := _DAY.search(environment):
        month, day, year = map(bytes.decode, found.groups())
        return f"{year}-{_MONTHS.index(month) // 3 + 1:02}-{int(day):02}" if month in _MONTHS else None


def _gpus(run, environment):
    """GPUs that the run used, as far as the log tells: its ranks, its world_size, or the rows of nvidia-smi."""
    if run.start and isinstance(run.start.get("ranks"), int):
        return run.start["ranks"]
    world = _WORLD_SIZE.search(environment)
    return int(world[1]) if world else len(set(_GPU_ROW.findall(environment))) or None


def _step(line):
    """(step, total or None, the fields in the common spelling) of a step line of any form, or None"""
    if common := _STEP.match(line):
        return int(common[1]), common[2], common[3]
    if spaced := _SPACED.match(line):
        rest = spaced[3]
        for pattern, spelling in _SPELLINGS:
            rest = pattern.sub(spelling, rest)
        return int(spaced[1]), spaced[2], rest
    return None


def _fields(rest):
    """`key:value` words of a line as a dict of str; {} if a key comes twice. Words without a colon are left out."""
    pairs = [word.decode("utf-8", "replace").partition(":")[::2] for word in rest.split() if b":" in word]
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else {}


def _loss_text(fields):
    return fields.get("val_loss", fields.get("tel"))


def _ending(fields):
    """What the last field ends in: its unit, or the number of its decimals."""
    *_, text = fields.values()
    return next((unit for unit in ("ms", "s") if text.endswith(unit)), len(text.partition(".")[2]))


def _number(text):
    return float(text) if _NUMBER.fullmatch(text) else None


def _finite(text, scale=1):
    """The number that a text is, times scale; None if it is none that is finite."""
    number = _number(text)
    return None if number is None or not math.isfinite(number * scale) else round(number * scale, 6)


def _time_ms(text):
    """The milliseconds that a text like 24.082s or 24082ms states, or None."""
    unit, scale = ("ms", 1) if text.endswith("ms") else ("s", 1000)
    return _finite(text.removesuffix(unit), scale) if text.endswith(unit) else None


def _show(text):
    text = b"none" if text is None else text
    return printable(text[:80].decode("utf-8", "replace")) + ("..." if len(text) > 80 else "")


def parse_json(line):
    """A line of JSON from outside, in which a number of more digits than any of ours is a float, maybe inf.

    ValueError if it cannot be read, or is nested deeper than DEEPEST."""
    def fits(value, depth):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return depth > 0 and all(fits(item, depth - 1) for item in inner)
    try:
        content = json.loads(line, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits))
        if fits(content, DEEPEST):
            return content
    except RecursionError:
        pass
    raise ValueError(f"lists or objects more than {DEEPEST} deep")


def show_json(value):
    """value as JSON that any program takes: dataclasses and named tuples as objects, null for nan and inf."""
    def plain(value):
        if is_dataclass(value):
            value = {field.name: getattr(value, field.name) for field in fields(value) if field.repr}
        value = value._asdict() if hasattr(value, "_asdict") else value
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value
    return json.dumps(plain(value), indent=1, allow_nan=False)


def printable(text):
    """A path, or text from a log, on one line and without what would steer a terminal: those characters as \\x1b."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in os.fspath(text))


def brief(text):
    """A message as one line for stderr; what is too long loses its middle, since what to do stands last."""
    text, half = printable(text), LONGEST_LINE // 2
    return text if len(text) <= LONGEST_LINE else f"{text[:half]} ... {text[5 - half:]}"


def refuse(tool, reason):
    """Says why a tool ends with nothing done; returns its exit status."""
    print(brief(f"{tool}: error: {reason}"), file=sys.stderr)
    return 2


def last_run(path):
    """The last run of a file, used or rejected; where it has none, the Run that says why."""
    runs, rejected, _ = read_file(path)
    return max((*runs, *rejected), key=lambda run: run.index_in_file or 0)


def follow(path, period_s=1.0, silent_s=60):
    """Yields {step, train_time_ms, train_loss, val_loss} of each step of a log, the losses that it states, until the
    run has ended or broken off. What a resumed run trains again comes again. OSError if there is no such file;
    TimeoutError if it is silent for that long, and no process holds its lock, as our runs do: the run was killed."""
    told = resumes = 0
    while True:
        run = last_run(path)
        if again := run.resumed[resumes:]:
            at = min(resumed["from_step"] for resumed in again)
            resumes, told = len(run.resumed), min(told, sum(step.step <= at for step in run.steps))
        losses = {validation.step: validation.loss for validation in run.validations}
        for step in run.steps[told:]:
            line = {"step": step.step, "train_time_ms": step.time_ms, "train_loss": step.train_loss,
                    "val_loss": losses.get(step.step) if step.validation else None}
            yield {name: value for name, value in line.items() if value is not None}
            told += 1
        if run.over:
            return
        silent = time.time() - os.stat(path).st_mtime
        if silent > silent_s and not is_locked(path):
            what = ("no end, and no process writes it: the run was killed" if run.index_in_file else
                    f"no run in it ({run.reason})")
            raise TimeoutError(f"no line for {silent:.0f} s, and {what}")
        time.sleep(period_s)


def is_locked(path):
    with open(path, "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def sink(where, name):
    """A function of a step's values: prints a line of JSON, or hands them to a board of the user's, under this name."""
    board, _, place = where.partition(":")
    if board == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(str(Path(place or "logs/tensorboard") / name))

        def write(line):
            for key in line.keys() - {"step"}:
                writer.add_scalar(key, line[key], line["step"])
            writer.flush()
        return write
    if board == "wandb":
        import wandb
        run = wandb.init(project=place or None, name=name)
        run.define_metric("*", step_metric="step")  # its own steps never go back, as those of a resumed run do
        return run.log
    return lambda line: print(json.dumps(line), flush=True)


def outcomes(logs):
    """Rows (path, run, outcome, steps, loss, seconds, GPUs, source, remark) as text, one for each run and file."""
    rows = []
    for run in logs.runs:
        steps = str(run.last_step) if run.stated_steps is None else f"{run.last_step}/{run.stated_steps}"
        seconds = "-" if run.train_time_ms is None else f"{run.train_time_ms / 1000:.3f}"
        loss = f"{run.final_loss:.{run.loss_decimals}f}"
        outcome = "no record" if run.disqualified else "used"
        rows.append((run.path, str(run.index_in_file), outcome, steps, loss, seconds, str(run.gpus or "-"),
                     (run.source_sha256 or "-")[:8], "; ".join(run.notes)))
    alike = {}  # what a race leaves beside its logs takes a row for each kind of file
    for item in logs.rejected:
        stem, suffix = os.path.splitext(item.path)
        beside = item.kind == NOT_A_LOG and suffix not in ("", ".gz", ".txt", ".log")
        shown = os.path.join(os.path.dirname(stem), f"*{suffix}") if beside else item.path
        alike.setdefault((shown, item.index_in_file, item.reason), []).append(item)
    others = [(shown, index, "rejected", f"{len(items)} files, each {why}") if len(items) > 1 else
              (items[0].path, index, "rejected", why) for (shown, index, why), items in alike.items()]
    others += [(item.path, item.index_in_file, "duplicate", f"{item.reason}: {item.original_path}")
               for item in logs.duplicates]
    rows += [(path, str(index or "-"), what, *"-----", why) for path, index, what, why in others]
    return sorted(rows)


def columns(rows, of_numbers=False):
    """Rows of text as lines, each column as wide as its widest cell; of_numbers: flush right, but for the first."""
    turned = [list(map(printable, column)) for column in zip(*rows)]
    justify = [str.ljust, *[str.rjust if of_numbers else str.ljust] * len(turned)]
    aligned = [[just(cell, max(map(len, column))) for cell in column] for just, column in zip(justify, turned)]
    return ["  ".join(row).rstrip() for row in zip(*aligned)]


def main(arguments=None):
    parser = argparse.ArgumentParser(description="Lists every run log and what became of it.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a log, a .gz of one, or a folder of them")
    parser.add_argument("--json", action="store_true", help="print all that was read, for programs")
    parser.add_argument("--follow", action="store_true", help="print one log's steps as JSON lines, to the run's end")
    parser.add_argument("--to", default="", metavar="BOARD", help="of --follow: tensorboard:DIR or wandb:PROJECT, "
                        "where that package is installed")
    options = parser.parse_args(arguments)
    if options.to.partition(":")[0] not in ("", "tensorboard", "wandb") or options.to and not options.follow:
        parser.error("--to is for --follow: tensorboard:DIR or wandb:PROJECT")
    if options.follow and len(options.paths) > 1:
        parser.error(f"--follow is of one log, not of {len(options.paths)}")
    if options.follow:
        try:
            os.stat(options.paths[0])  # before a board opens for it
            take = sink(options.to, Path(options.paths[0]).stem)
            for line in follow(options.paths[0]):
                take(line)
        except ImportError as error:
            return refuse("logs.py", f"--to {options.to}: {error}; install it, or leave out --to")
        except OSError as error:
            why = f"{error.strerror}; name the log of a run" if error.strerror else error
            return refuse("logs.py", f"{options.paths[0]}: {why}")
        return 0
    logs = read(options.paths)
    if options.json:
        print(show_json(logs))
    else:
        header = ("file", "run", "outcome", "steps", "val_loss", "seconds", "GPUs", "source", "remark")
        print("\n".join(columns([header, *outcomes(logs)])))
        print(f"{len(logs.runs)} runs used, {len(logs.rejected)} rejected, {len(logs.duplicates)} duplicates")
    unreadable = any(item.kind == UNREADABLE for item in logs.rejected)
    return 0 if logs.runs and not unreadable else 2


def end_at_ctrl_c(name):
    """Makes Ctrl-C the end of a tool that still imports, without a traceback, until run_main. name: its __name__."""
    def end(*_):
        os.write(2, b"interrupted\n")
        os._exit(130)
    if name == "__main__":
        signal.signal(signal.SIGINT, end)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # run.sh blocks it until here


def run_main(main):
    """Calls main() and exits with its status; a reader that goes away (`| head`) is no error, Ctrl-C no traceback."""
    if callable(signal.getsignal(signal.SIGINT)):  # end_at_ctrl_c's
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a path or a log may hold what the terminal cannot show
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)


if __name__ == "__main__":
    run_main(main)
