"""Read run logs: every form that the speedrun community has written since 2024, and this project's
own.

A PATH is a log (also .gz), an archive of logs (.tar, .tar.xz, .tar.gz) or a folder, which is
searched except for names that begin with a dot. The files of a record's logs.tar.xz have the paths
that they would have beside it, those of any other archive paths like `logs.tar/RUN.txt`. The reader
does not guess and drops nothing silently: a run is used, or its file is listed with the reason.

Rules
- Only lines after the last separator (100 `=`) count. The text before it may be a script that quotes a log.
- The source is the last text before that separator that is Python, with Python texts right before it; without any, the
  first text. Lines above it (arguments, the log's path) and nvidia-smi's text are no part of it.
- GPUs, versions, seed and validation data are those of the JSON line, or what a public script prints outside its source.
- A step counter that decreases begins another run in the same file. A line that several ranks print counts once.
- A run is complete if its last validation is at the step that it states as its total. llm.c's form states no total: its
  completeness is unknown (None), unless training lines follow the last validation.
- The loss is `val_loss` (llm.c: `tel`) and the time is `train_time`, both from the last validation line.
- After a line {"resumed": ...} the earlier lines of later steps are dropped, and the decreasing counter begins no other
  run. Run.disqualified states why such a run counts for no record.

Requires only the standard library.
"""

import argparse
import collections
import functools
import gzip
import hashlib
import io
import json
import lzma
import math
import os
import re
import shlex
import signal
import sys
import tarfile
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

SEPARATOR = b"=" * 100
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
MAX_FILE_MIB = 16  # uncompressed; the longest public log has 1.5
MAX_ARCHIVE_MIB = 256  # all its files, uncompressed
HOME = Path(__file__).resolve().parent.parent / "logs"
# `latest` is the newest of one of these there
RACE = "race-*/race.jsonl"
RUN = "*.txt"
MODEL = "*.pt"
# of a record: all logs contain the same source, so they compress well together
ARCHIVE = "logs.tar.xz"
# above each file of a source of several files
FILE_LINE = re.compile(r"^# file: ([\w.-]+\.py)\n", re.M)
MAX_NOTES = 20  # on one run
MAX_DEPTH = 50  # nesting of a JSON line; functions that walk it later need no guard
MAX_MESSAGE = 300  # characters on stderr
# Suffixes of files that are never logs, though they may quote log lines
DOCUMENTS = set(
    ".md .markdown .rst .py .ipynb .json .jsonl .csv .tsv .html .pdf .yaml .yml .toml .sh .png .jpg"
    " .svg".split()
)

# Config values that do not change what is trained
INCIDENTAL = set(
    "seed run_id log_dir save_model sample_tokens train_loss_every timeout_s race save_every"
    " keep_checkpoints resume".split()
)

# Kinds of rejection. UNREADABLE concerns the input; the others are facts about a run or file.
UNREADABLE = "unreadable"
NOT_A_LOG = "not a log"
INCOMPLETE = "incomplete"
NOT_FINITE = "not finite"

_SEPARATOR_LINE = re.compile(rb"^%b(?:\n|\Z)" % SEPARATOR, re.M)
_RELEVANT = re.compile(rb'step:|step +\d+/\d+ *\||s:\d|\{"run_id"|\{"end"|\{"resumed"|error:')
_STEP = re.compile(rb"(?:step|s):(\d{1,18})(?:/(\d{1,18}))? (.*)")
# `step  25/1840 | time: 1,530ms | val loss: 4`
_SPACED_STEP = re.compile(rb"step:? *(\d{1,18})/(\d{1,18}) *[|,](.*)")
_SPELLINGS = [
    (re.compile(pattern), spelling)
    for pattern, spelling in (
        (rb"(?<=\d),(?=\d{3})", b""),
        (rb"[|,] ", b" "),
        (rb"\b(train|val)[ _]loss: *", rb"\1_loss:"),
        (rb"\b(?:train_)?time: *", b"train_time:"),
        (rb"\bstep[ _]avg: *", b"step_avg:"),
    )
]
_NUMBER = re.compile(r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf(?:inity)?)", re.I)
_GPU_ROW = re.compile(
    rb"^\|\s+(\d+)\s+([^|]*?)\s*(?:\b(?:On|Off|N/A)\s*)?\|\s+[0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.",
    re.M,
)
_GPU_NAME = re.compile(
    rb"(?:\bon |\b(?:device(?:_name)?|series|gpu(?: ?\[?\d+\]?)?) *[=:] *)"
    rb"((?:NVIDIA|AMD|Tesla|GeForce|Quadro|Instinct)\b[\w -]*?)(?= +with\b| *[(,;|]| *$)",
    re.M | re.I,
)
_TORCH = re.compile(rb"\b(?:py)?torch(?:[ _]version)?[ :=]+v?(\d+\.\d+[\w.+]*)", re.I)
_ENVIRONMENT = re.compile(
    rb"NVIDIA-SMI|^Running (?:Python|PyTorch)|^\|\s+\d+\s+[^|]*\|\s+[0-9A-Fa-f]{8}:", re.M | re.I
)
_DRIVER = re.compile(rb"Driver Version: *(\d[\d.]*)")
_WORLD_SIZE = re.compile(
    rb"\b(?:world[_ ]size|num_gpus|nproc_per_node|ranks)['\"]?(?: *[=:] *| +)(\d{1,18})(?!\d)", re.I
)
_SEED = re.compile(
    rb"\b(?:random_|train_|torch_)?seed['\"]?(?: *[=:] *| +)(\d{1,18})(?![\d.])", re.I
)
_VAL_TOKENS = re.compile(
    rb"^\W*val(?:idation)?\b(?!_batch).*?\btokens['\"]?[ :=]+(\d[\d,]{3,18})|^\W*val_tokens['\"]?["
    rb" :=]+(\d[\d,]{3,18})",
    re.M | re.I,
)
# A script, the lines that may stand above it in the same text, and the settings that these state
_CODE = re.compile(rb"^(?:import [\w.]+|from [\w.]+ import |def \w+\(|class \w+|@\w)", re.M)
_ABOVE = re.compile(
    rb"\A(?:\n*(?!(?:try|else|class)\b)(?:\S+\.(?:txt|log)|[A-Z]\w*\(.*\)|[ \w]+:(?: .*)?)\n)*"
)
_LAST_LINE = re.compile(rb"(?s:.*)^(?:step:\d|s:\d|peak memory|\{\"end).*\n", re.M)  # of a log
_SETTING = re.compile(r"\b(\w+)['\"]?[=:] *([^\s,;()]+)")
_NO_SETTING = re.compile(
    "seed|rank|run_?id|name|path|dir$|file|log|date|time|host|port|uuid|id$|device", re.I
)
_TRAINING = {"trl", "train_loss", "train_time"}
_COMMON_FIELDS = {"val_loss", "tel", "train_time", "step_avg"}
_STATED = _TRAINING | _COMMON_FIELDS


class Validation(NamedTuple):
    """A validation line. time_ms is None if the line states none; extras holds all other fields."""

    step: int
    loss: float
    time_ms: float | None
    extras: dict


class Step(NamedTuple):
    """A line with train_time. average (ms), train_loss and grad_norm are None if the line states
    none.

    others: {name: number} of what stands behind train_loss, such as grad_norm (of the loss summed
    over a micro-batch's tokens) and an idea's own numbers."""

    step: int
    time_ms: float
    average: float | None
    train_loss: float | None
    validation: bool
    others: dict = {}


@dataclass(frozen=True)
class Run:
    """A run. If it cannot be used: reason says why and kind is one of those above; index_in_file
    is None for a file.

    start, end and resumed are this project's JSON lines. complete is None if the form states no
    total. clock_falls: the steps at which train_time decreased; once, early, is the community's
    reset after warm-up. settings: what stands above a public source."""

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
    card: str | None = None
    torch: str | None = None
    driver: str | None = None
    cpu: str | None = None  # and threads: of a run on CPUs
    threads: str | None = None
    seed: int | None = None
    validated_on: str | None = None
    complete: bool | None = None
    clock_falls: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    start: dict | None = None
    end: dict | None = None
    resumed: tuple[dict, ...] = ()
    steps: list[Step] = field(default_factory=list)
    source: str | None = None
    settings: dict = field(default_factory=dict)

    @property
    def disqualified(self):
        """Why the run counts for no record, or None."""
        if self.resumed:
            at = ", ".join(str(resumed.get("from_step")) for resumed in self.resumed[:5])
            return (
                f"resumed at step {at}: it had ended before, and its clock may lack the lost time"
            )
        if (self.start or {}).get("init_from"):
            return "begun from saved parameters (init_from), not from its seed"
        return None

    @functools.cached_property
    def contradiction(self):
        """What in the end line contradicts the other lines, or None."""
        for key, seen, most in (
            ("final_val_loss", self.final_loss, 0.501 * 10 ** -(self.loss_decimals or 0)),
            ("train_time_ms", self.train_time_ms, 1),
            ("steps", self.last_step, 0),
        ):
            stated = (self.end or {}).get(key)
            if type(stated) in (int, float) and (seen is None or not abs(stated - seen) <= most):
                return f"its end states {key} {stated}, its lines {seen}"
        return None

    @property
    def exact_loss(self):
        """The final loss, without rounding if the log states it: rounded differences are often
        equal."""
        exact = (self.end or {}).get("final_val_loss")
        return exact if isinstance(exact, float) else self.final_loss

    @property
    def loss_text(self):
        return f"{self.final_loss:.{self.loss_decimals}f}"

    @property
    def script(self):
        """The source as its file has it: the log adds a line end. "" without one."""
        return (self.source or "").removesuffix("\n")

    @property
    def figures(self):
        """The SHA-256 of its step lines, which a race writes down."""
        told = [step[:5] for step in self.steps], [line[:3] for line in self.validations]
        return hashlib.sha256(json.dumps(told).encode()).hexdigest()

    @property
    def over(self):
        """Whether the log states that the run has ended."""
        return bool(self.end or self.complete or "error:" in self.reason)


@dataclass(frozen=True)
class Duplicate:
    """A file or a run already read under original_path, which is not counted again."""

    path: str
    original_path: str
    reason: str


@dataclass
class Logs:
    """The result of read(), in the order of the paths."""

    runs: list[Run] = field(default_factory=list)
    rejected: list[Run] = field(default_factory=list)
    duplicates: list[Duplicate] = field(default_factory=list)


def read(paths):
    """Read logs and folders of logs. Problems with a path or its contents do not raise: see
    Logs.rejected."""
    logs = Logs()
    seen_contents = {}
    for path in files_in(paths, logs.rejected):
        runs, rejected, digest = read_file(path)
        if digest in seen_contents:
            logs.duplicates.append(Duplicate(path, seen_contents[digest], "byte-identical"))
            continue
        if digest:
            seen_contents[digest] = path
        logs.runs += runs
        logs.rejected += rejected
    kept, same = without_copies(logs.runs + logs.rejected)
    logs.runs, logs.rejected = (
        [run for run in kept if bool(run.reason) == rejected] for rejected in (False, True)
    )
    logs.duplicates += same
    return logs


class UserError(Exception):
    """The message says what was seen and what to do."""


def require(condition, message, error=UserError):
    """Raise the error with this message unless the condition holds."""
    if not condition:
        raise error(message)


# path → (digest, runs, rejected), since board.py lets stats.py and verify.py read the same logs
_cache = {}


class _Refused(Exception):
    """(kind, reason): the file cannot be read as a log."""


def read_file(path):
    """Read one file. Return (runs, rejected, digest of its contents or None if it was not read)."""
    stem, suffix = os.path.splitext(os.path.basename(path).lower().removesuffix(".gz"))
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise _Refused(UNREADABLE, "not a regular file; name a log file or a folder")
        if suffix in DOCUMENTS or stem == "readme":
            raise _Refused(NOT_A_LOG, "a document by its name; rename it to .txt if it is a log")
        with open_unpacked(path) as file:
            content = file.read((MAX_FILE_MIB << 20) + 1)
        if is_archive(path):
            raise _Refused(
                UNREADABLE,
                f"an archive that is broken, empty, or of more than {MAX_ARCHIVE_MIB} MiB; copy "
                "it again from its origin, or unpack it",
            )
        digest = hashlib.sha256(content).digest()
        if _cache.get(path, (None,))[0] != digest:
            _cache[path] = digest, *_parse(path, content)
        return *_cache[path][1:], digest
    except _Refused as refused:
        kind, reason = refused.args
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        kind = UNREADABLE
        reason = f"broken gzip file ({error}); copy it again from its origin"
    except OSError as error:
        kind = UNREADABLE
        reason = f"cannot be read ({error.strerror or error}); check the path and its permissions"
    return [], [_rejected(path, kind, reason)], None


def _rejected(path, kind, reason):
    return Run(path, reason=f"{kind}: {reason}", kind=kind)


# Files, on disk or in an archive


def is_archive(path):
    return str(path).endswith((".tar", ".tar.xz", ".tar.gz"))


def members(archive):
    """Return {name: bytes} of the files in an archive, sorted; {} if it cannot be read.

    Links are left out. Of a file that is too long for a log, only the beginning is kept."""
    try:
        state = os.stat(archive)
        return (
            _members(os.fspath(archive), state.st_mtime_ns, state.st_size)
            if os.path.isfile(archive)
            else {}
        )
    except (OSError, ValueError, tarfile.TarError, EOFError, zlib.error, lzma.LZMAError):
        return {}


@functools.lru_cache(4)
def _members(archive, *_):
    found = {}
    left = MAX_ARCHIVE_MIB << 20
    with tarfile.open(archive) as packed:
        for member in filter(tarfile.TarInfo.isfile, packed):
            left -= member.size
            if left < 0:
                return {}
            parts = [part for part in Path(member.name).parts if part not in ("/", "..")]
            found["/".join(parts)] = packed.extractfile(member).read((MAX_FILE_MIB << 20) + 1)
    return dict(sorted(found.items()))


def pack(files, path):
    """Write {name: bytes} into a .tar.xz without owner and date: the same files give the same
    archive.

    Raise OSError if they are too long to be read again."""
    with tarfile.open(path, "w:xz") as archive:
        for name, content in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    if members(path) != files:
        os.remove(path)
        raise OSError(
            f"{path}: a file has more than {MAX_FILE_MIB} MiB, or all have more than"
            f" {MAX_ARCHIVE_MIB} MiB"
        )


def _packed(path):
    """Return the bytes of a file in an archive, or None if the path is on disk or nowhere."""
    if os.path.lexists(path):
        return None
    home = next((folder for folder in Path(path).parents if os.path.lexists(folder)), Path())
    archive = home / ARCHIVE if os.path.isdir(home) else home
    return (
        members(archive).get(Path(path).relative_to(home).as_posix())
        if is_archive(archive)
        else None
    )


def exists(path):
    """Return whether there is such a file, on disk or in an archive."""
    return os.path.isfile(path) or _packed(path) is not None


def open_file(path):
    """Open a file, on disk or in an archive, for reading bytes."""
    packed = _packed(path)
    return open(path, "rb") if packed is None else io.BufferedReader(io.BytesIO(packed))


def open_unpacked(path):
    """Open a file like open_file. gzip is recognized by its first bytes, not by the file name."""
    file = open_file(path)
    return gzip.GzipFile(fileobj=file) if file.peek(2)[:2] == b"\x1f\x8b" else file


def listing(path):
    """Return the path of each file in an archive, or [path] if it is none. A file on disk keeps
    its own path."""
    home = os.path.dirname(path) if os.path.basename(path) == ARCHIVE else path
    beside = {name: os.path.join(home, name) for name in members(path)} if is_archive(path) else {}
    return [
        os.path.join(path, name) if os.path.lexists(place) else place
        for name, place in beside.items()
    ] or [path]


def or_latest(*kinds):
    """Return a type for argparse: a path, where `latest` is the newest of these kinds in logs/; a
    race is a folder."""

    def path(word):
        if word != "latest" or os.path.lexists(word):
            return word
        newest = max(
            (one for kind in kinds for one in HOME.glob(kind)), key=os.path.getmtime, default=None
        )
        require(
            newest,
            f"latest: no {' or '.join(kinds)} in {HOME}; ./run.sh --save_model true or a race makes"
            " one; or name a path",
            argparse.ArgumentTypeError,
        )
        newest = os.path.relpath(newest.parent if newest.match(RACE) else newest)
        print(f"latest: {newest}", file=sys.stderr, flush=True)
        return newest

    return path


def files_in(paths, rejected):
    """Yield the files of paths: of a folder or an archive all that it holds; problems are appended
    to `rejected`."""
    for path in map(os.fspath, paths):
        if not os.path.isdir(path):
            yield from listing(path)
            continue
        any_file = False
        problems = []
        for folder, subfolders, names in os.walk(path, onerror=problems.append):
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            rejected += [
                _rejected(
                    os.path.join(folder, name),
                    NOT_A_LOG,
                    "a link to a folder; name that folder too",
                )
                for name in subfolders
                if os.path.islink(os.path.join(folder, name))
            ]
            any_file = any_file or bool(names)
            yield from sorted(
                file for name in names for file in listing(os.path.join(folder, name))
            )
        rejected += [
            _rejected(
                problem.filename, UNREADABLE, f"folder ({problem.strerror}); check its permissions"
            )
            for problem in problems
        ]
        if not any_file and not problems:
            rejected.append(
                _rejected(
                    path, NOT_A_LOG, "a folder without files; name the folder that holds the logs"
                )
            )


def without_copies(runs):
    """Return (runs without repetitions, the repetitions as Duplicates); used runs are kept before
    rejected ones.

    A console capture, a summary or a truncated copy holds some or all lines of the same run's log.
    Two runs are the same if all lines of one after step 0 are in the other; the fuller one is kept.
    A single validation, which two runs may share by chance, is evidence only if it states a time and
    neither source nor run_id differs."""

    def may_be_one(run, other):  # as far as both state these
        ours, theirs = (
            (one.source_sha256, (one.start or {}).get("run_id")) for one in (run, other)
        )
        return all(None in pair or pair[0] == pair[1] for pair in zip(ours, theirs))

    validated = [{line[:3] for line in run.validations if line.step > 0} for run in runs]
    lines = [
        found | {step[:2] for step in run.steps if step.step > 0}
        for run, found in zip(runs, validated)
    ]
    order = sorted(
        range(len(runs)),
        key=lambda i: (
            bool(runs[i].reason),
            -len(lines[i]),
            runs[i].start is None,
            runs[i].source_sha256 is None,
        ),
    )
    originals = {}
    copies = {}
    by_line = {}
    for i in order:
        telling = len(lines[i]) > 1 or any(None not in line for line in lines[i])
        original = (
            next(
                (
                    j
                    for j in by_line.get(next(iter(lines[i])), ())
                    if lines[i] <= lines[j]
                    and (len(validated[i]) > 1 or may_be_one(runs[i], runs[j]))
                ),
                None,
            )
            if telling
            else None
        )
        if original is None:
            originals[i] = runs[i]
            for line in lines[i]:
                by_line.setdefault(line, []).append(i)
        else:
            what = "a part of" if lines[i] < lines[original] else "the same run as"
            copies[i] = Duplicate(
                runs[i].path,
                runs[original].path,
                f"{what} run {runs[original].index_in_file} there, line for line",
            )
    return [originals[i] for i in sorted(originals)], [copies[i] for i in sorted(copies)]


class _Notes(dict):
    """An ordered set of texts."""

    def add(self, text):
        if len(self) < MAX_NOTES:
            self[printable(text)] = None
        else:
            self["further notes of these kinds omitted"] = None


class _OpenRun:
    """A run while its lines are being read."""

    def __init__(self, start, seed):
        self.start = start
        self.seed = seed
        self.end = None
        self.error = None
        self.total = None  # bytes, as stated in the lines
        self.first_step = None
        self.last_step = None
        self.validations = []
        self.validation_fields = {}  # of the last validation
        self.trained_since = False  # training lines followed the last validation
        self.cut = False  # the last line was cut off
        self.clock = -math.inf
        self.clock_falls = []
        self.steps = []
        self.resumed = []
        self.notes = _Notes()
        self.recent = collections.deque(maxlen=64)  # step lines

    def resume(self, resumed):
        """Drop the lines of steps after the checkpoint, which are trained again. Return False if
        no step is stated."""
        at = resumed.get("from_step") if isinstance(resumed, dict) else None
        if not isinstance(at, int) or at < 0:
            return False
        self.resumed.append(resumed)
        self.recent.clear()
        self.validations = [validation for validation in self.validations if validation.step <= at]
        self.steps = [timed for timed in self.steps if timed.step <= at]
        self.clock_falls = [step for step in self.clock_falls if step <= at]
        self.clock = self.steps[-1].time_ms if self.steps else -math.inf
        self.last_step = at
        self.cut = False
        self.trained_since = not self.validations or self.validations[-1].step < at
        if self.error:
            self.notes.add(f"before the run was resumed: {self.error}")
            self.error = None
        return True


class _Section:
    """The runs in a text without separators, and the lines before the first of them (environment)."""

    def __init__(self, text):
        self.runs = []
        self.notes = _Notes()
        self.environment = bytearray()
        self.seed = None
        for line in io.BytesIO(text):
            self.read_line(line.removesuffix(b"\n"), line.endswith(b"\n"))

    @property
    def run(self):
        return self.runs[-1] if self.runs else None

    def note(self, text):
        (self.run or self).notes.add(text)

    def read_line(self, line, ended):
        """Read a line. A last line without a line end is dropped if a part of it may be missing."""
        relevant = _RELEVANT.match(line)
        step = relevant and _step(line)
        begun = relevant or b"step:".startswith(line) or b"s:".startswith(line)
        if begun and not ended and not self.is_complete_line(line, step):
            if self.run:
                self.run.cut = True
            self.note(f"the last line is cut off and dropped: {_show(line)!r}")
        elif step:
            self.step_line(*step)
        elif relevant:
            self.other_line(line)
        else:
            stated = {int(seed) for seed in _SEED.findall(line)}
            self.seed = stated.pop() if len(stated) == 1 else self.seed
            if not self.runs:
                self.environment += line + b"\n"

    def is_complete_line(self, line, step):
        """Return whether a last line is complete, judged by the fields of the run's previous
        validation line."""
        if not step:
            return line.startswith(b"{") and line.endswith(b"}")
        fields = _fields(step[2])
        earlier = self.run.validation_fields if self.run else {}
        if not (fields and earlier.keys() <= fields.keys()):
            return False
        if b":" not in step[2].split()[-1]:
            return True  # a word follows the fields
        return _ending(fields) == _ending(earlier) if earlier else _ending(fields) in ("ms", "s")

    def step_line(self, step, total, rest):
        fields = _fields(rest)
        run = self.run
        loss_text = _loss_text(fields)
        validation = loss_text is not None
        if not fields or validation and _number(loss_text) is None:
            return self.note(f"not understood, skipped: {_show(rest)!r} at step {step}")
        if run and total is None and run.total:
            total = run.total  # a diagnostic line without a total
        repeated = validation and run and run.validations and run.validations[-1].step == step
        # several ranks print a line, perhaps after a line of a later step; before the first step
        # all runs are alike
        if (
            run
            and not run.start
            and run.last_step is not None
            and (0 < step == run.last_step - 1 or step == run.last_step)
            and (step, total, rest) in run.recent
        ):
            return run.notes.add("several ranks printed the same lines: each counts once")
        if run is None or run.last_step is not None and step < run.last_step:
            run = self.begin_run()
        elif repeated and run.resumed:
            run.validations.pop()  # the checkpoint was written before this validation
        elif (
            repeated
            and len(run.validations) == 1
            and not run.trained_since
            and (step > 0 or run.validations[0].loss != _number(loss_text))
        ):
            run = self.begin_run()  # a failed start followed by another, or a list of results
        elif repeated:
            run.notes.add(f"validated more than once at step {step}: the last one counts")
        run.recent.append((step, total, rest))
        if run.first_step is None:
            run.first_step = step
        run.total = total
        run.last_step = step
        time_ms = _time_ms(fields.get("train_time", ""))
        if time_ms is not None:
            again = run.steps and run.steps[-1].step == step
            whole_ms = fields["train_time"].removesuffix("ms").isdecimal()
            if time_ms < run.clock and not (
                not run.start and again and run.steps[-1].validation == validation
            ):  # ranks differ a little
                run.clock_falls.append(step)
            run.clock = time_ms
            if whole_ms if run.start else not (again and run.steps[-1].validation == validation):
                average, train_loss = (fields.get(name, "") for name in ("step_avg", "train_loss"))
                others = {
                    name: _finite(text) for name, text in fields.items() if name not in _STATED
                }
                run.steps.append(
                    Step(
                        step,
                        time_ms,
                        _time_ms(average),
                        _finite(train_loss),
                        validation,
                        others,
                    )
                )
        if validation:
            extras = {
                name: text if _number(text) is None else _number(text)
                for name, text in fields.items()
                if text and name not in _COMMON_FIELDS
            }
            run.validations.append(Validation(step, _number(loss_text), time_ms, extras))
            run.validation_fields = fields
            run.trained_since = False
        elif not run.validations or step != run.validations[-1].step or _TRAINING & fields.keys():
            # another line at a validation's step is a further metric of the same model
            run.trained_since = True

    def other_line(self, line):
        if line.startswith(b"error:"):
            if self.run:
                self.run.error = _show(line)
            else:
                self.note(_show(line))
        elif not line.startswith(b"{"):
            self.note(f"not understood, skipped: {_show(line)!r}")
        else:
            try:
                content = parse_json(line)
            except ValueError:
                return self.note(f"a JSON line that cannot be read, skipped: {_show(line)!r}")
            if "run_id" in content:
                self.begin_run(content)
            elif "resumed" in content:
                if not (self.run and self.run.resume(content["resumed"])):
                    self.note(f"a resumed line without a step, skipped: {_show(line)!r}")
            elif self.run and isinstance(content["end"], dict):
                self.run.end = content["end"]

    def begin_run(self, start=None):
        self.runs.append(_OpenRun(start, self.seed))
        return self.run


def _parse(path, content):
    """Return (runs, rejected) of a file's content."""
    for wrong, kind, what in (
        (not content, NOT_A_LOG, "an empty file"),
        (content[:2] in UTF_16, UNREADABLE, "UTF-16 text; convert it to UTF-8"),
        (b"\0" in content[:4096], NOT_A_LOG, "a binary file"),
        (len(content) > MAX_FILE_MIB << 20, NOT_A_LOG, f"more than {MAX_FILE_MIB} MiB"),
    ):
        if wrong:
            raise _Refused(kind, what)
    *before, last = _SEPARATOR_LINE.split(content.replace(b"\r\n", b"\n").replace(b"\r", b"\n"))
    scripts = [i for i, text in enumerate(before) if _CODE.search(text)]
    first = next((i for i, text in enumerate(before) if text.strip()), None)
    if (
        not scripts
        and first is not None
        and not (
            _ENVIRONMENT.search(before[first]) or _ABOVE.match(before[first])[0] == before[first]
        )
    ):
        scripts = [first]  # a script of a kind that nobody has seen
    end = scripts[-1] + 1 if scripts else 0
    place = next((i + 1 for i in reversed(range(end)) if i not in scripts), 0)
    source = (SEPARATOR + b"\n").join(before[place:end])
    earlier = []
    if (
        scripts and scripts[0] < place
    ):  # logs that were appended to one file: their last lines precede this script
        written = _LAST_LINE.match(source)
        earlier = [*before[:place], written[0] if written else b""]
        source = source[written.end() if written else 0 :]
        before = before[place:]
        end = end - place
        place = 0
    above = _ABOVE.match(source)[0]
    source = source[len(above) :] or None
    digest = source and hashlib.sha256(source).hexdigest()
    above = b"".join([*(text for text in before[:place] if not _ENVIRONMENT.search(text)), above])
    settings = {
        name: value
        for name, value in _SETTING.findall(above.decode("utf-8", "replace"))
        if not _NO_SETTING.search(name)
    }
    *quoted, part = map(_Section, (*before[:place], above, *before[end:], last))
    if not part.runs:
        after = " after the last separator" if before else ""
        found = Run(path, kind=NOT_A_LOG)
        why = f"{NOT_A_LOG}: no line 'step:N/TOTAL val_loss:X' or 's:N tel:X'{after}"
        if source and b"import torch" in source:
            why = (
                "incomplete: a script and its environment, but no step line: the run stopped before"
                " its first step"
            )
            found = Run(path, 1, kind=INCOMPLETE, source_sha256=digest)
        return [], [replace(found, reason="; ".join([why, *part.notes]))]
    if count := sum(
        len(run.validations) for one in [*quoted, *map(_Section, earlier)] for run in one.runs
    ):
        part.notes.add(f"{count} validation lines before the last separator do not count")
    environment = b"".join(one.environment for one in (*quoted, part))
    stated = next((one.seed for one in reversed(quoted) if one.seed is not None), None)
    text = sys.intern(source.decode("utf-8", "surrogateescape")) if source else None
    found = [
        _judge(
            run,
            part.notes,
            path=path,
            index_in_file=index,
            source_sha256=digest,
            settings=settings,
            source=text if run.start is None or place == 0 and not above and not earlier else None,
            **_machine(run, environment),
            seed=(run.start or {}).get("seed", stated if run.seed is None else run.seed),
        )
        for index, run in enumerate(part.runs, 1)
    ]
    return [run for run in found if not run.reason], [run for run in found if run.reason]


def _judge(run, notes, **facts):
    """Return the Run, used or rejected for a reason. facts: its fields that concern the file."""
    total = int(run.total) if run.total else None
    notes = [*notes, *run.notes]
    last = run.validations[-1] if run.validations else None
    # train_gpt.py writes both lines; a resumed race repeats such a run
    unended = run.start is not None and run.end is None
    found = Run(
        **facts,
        stated_steps=total,
        validations=tuple(run.validations),
        last_step=run.last_step,
        complete=None if total is None else bool(last) and last.step == total and not unended,
        start=run.start,
        end=run.end,
        clock_falls=tuple(run.clock_falls),
        resumed=tuple(run.resumed),
        steps=run.steps,
    )
    of_total = "" if total is None else f" of {total}"
    kind = INCOMPLETE
    why = None
    bad = next((v for v in run.validations if not math.isfinite(v.loss)), None)
    if bad:
        kind = NOT_FINITE
        why = f"val_loss is {bad.loss} at step {bad.step}{of_total}"
    elif last is None:
        reached = f"step {run.last_step}{of_total}" if run.last_step is not None else "no step"
        why = f"incomplete: no validation line; it reached {reached}"
    elif total is not None and last.step != total:
        why = f"incomplete: the last validation is at step {last.step}{of_total}"
        if run.last_step != last.step:
            why += f", training lines go on to step {run.last_step}"
    elif total is not None and run.last_step > total:
        why = (
            f"its lines go on to step {run.last_step}{of_total}: training went on after the last"
            " validation"
        )
    elif unended:
        why = "incomplete: no end line follows the last validation"
    elif total is None and run.trained_since:
        why = (
            f"incomplete: training lines go on to step {run.last_step} after the last validation at"
            f" step {last.step}"
        )
    elif total is None and run.cut:
        why = f"incomplete: a line that is cut off follows the last validation at step {last.step}"
    elif total is None and last.step == 0:
        why = "incomplete: the only validation is at step 0, before any training"
    if why:
        return replace(
            found, reason="; ".join([why, *filter(None, [run.error]), *notes]), kind=kind
        )

    if found.disqualified:
        notes.insert(0, f"{found.disqualified}; it counts for no record")
    if total is None:
        notes.append("this form states no total: whether the run is complete cannot be known")
    if last.time_ms is None:
        notes.append("the last validation line states no train_time")
    if run.clock_falls:
        notes.append(
            f"train_time decreases at step {', '.join(map(str, run.clock_falls[:5]))}"
            + (f" and at {len(run.clock_falls) - 5} more" if len(run.clock_falls) > 5 else "")
        )
    first, *later = [validation.step for validation in run.validations]
    # earlier validations are missing
    resumed = len(later) > 1 and first == run.first_step > later[0] - first
    if run.first_step > 1 and (found.index_in_file > 1 or resumed):
        notes.append(f"begins at step {run.first_step}")
    other_losses = [key for key in last.extras if key.startswith("val") and key.endswith("loss")]
    if other_losses:
        notes.append(f"also logs {', '.join(other_losses)}; the loss is val_loss")
    decimals = len(re.match(r"[^.]*\.?(\d*)", _loss_text(run.validation_fields))[1])
    return replace(
        found,
        final_loss=last.loss,
        loss_decimals=decimals,
        train_time_ms=last.time_ms,
        notes=tuple(notes),
    )


def _machine(run, environment):
    """Return the fields of Run on GPUs, versions and validation data: of the JSON lines, or what a
    script prints."""
    start = run.start or {}
    rows = _GPU_ROW.findall(environment)

    def inside(of, *keys):
        for key in keys:
            of = of.get(key) if isinstance(of, dict) else None
        return of

    def all_of(pattern):
        return (
            " and ".join(
                sorted(
                    {
                        name.decode("utf-8", "replace").strip()
                        for name in pattern.findall(environment)
                    }
                )
            )
            or None
        )

    world = _WORLD_SIZE.search(environment)
    gpus = start.get("ranks")
    if not isinstance(gpus, int):
        gpus = int(world[1]) if world else len({number for number, _ in rows}) or None
    names = {name.decode("utf-8", "replace") for _, name in rows}
    drivers = inside(start, "hardware", "gpus")
    val_tokens = _VAL_TOKENS.search(environment)
    val_tokens = val_tokens and (val_tokens[1] or val_tokens[2]).decode().replace(",", "")
    shards = inside(start, "shards", "val")
    digests = [str(inside(shard, "sha256")) for shard in shards] if isinstance(shards, list) else []
    if run.start:
        val_tokens = inside(run.end, "val_tokens") or inside(start, "config", "val_tokens")
    val_len = inside(start, "config", "val_len")
    on_cpus = inside(start, "hardware", "gpus") == []
    data = (
        f"{val_tokens} tokens{' of ' * bool(digests)}{' '.join(digest[:8] for digest in digests)}"
        f"{f' in sequences of {val_len}' if val_len else ''}"
    )
    threads = inside(start, "hardware", "threads") or inside(
        start, "environment", "OMP_NUM_THREADS"
    )
    return {
        "gpus": gpus,
        "card": (
            inside(start, "hardware", "device") or " and ".join(sorted(names)) or all_of(_GPU_NAME)
        ),
        "cpu": str(cpu) if on_cpus and (cpu := inside(start, "hardware", "cpu_id")) else None,
        "threads": str(threads) if on_cpus and threads else None,
        "torch": inside(start, "versions", "torch") or all_of(_TORCH),
        "validated_on": data if val_tokens or digests else None,
        "driver": (
            inside(drivers[0], "driver")
            if isinstance(drivers, list) and drivers
            else all_of(_DRIVER)
        ),
    }


def _step(line):
    """Return (step, total or None, the fields in the common spelling) of a step line of any form,
    else None."""
    if common := _STEP.match(line):
        return int(common[1]), common[2], common[3]
    if spaced := _SPACED_STEP.match(line):
        rest = spaced[3]
        for pattern, spelling in _SPELLINGS:
            rest = pattern.sub(spelling, rest)
        return int(spaced[1]), spaced[2], rest
    return None


def _fields(rest):
    """Return the `key:value` words of a line as a dict of str, without other words; {} if a key
    occurs twice."""
    pairs = [
        word.decode("utf-8", "replace").partition(":")[::2] for word in rest.split() if b":" in word
    ]
    fields = dict(pairs)
    return fields if len(fields) == len(pairs) else {}


def _loss_text(fields):
    return fields.get("val_loss", fields.get("tel"))


def _ending(fields):
    """Return the unit of the last field, or the number of its decimals."""
    *_, text = fields.values()
    return next((unit for unit in ("ms", "s") if text.endswith(unit)), len(text.partition(".")[2]))


def _number(text):
    return float(text) if _NUMBER.fullmatch(text) else None


def _finite(text, scale=1):
    """Return the number times scale, or None if the text is not a finite number."""
    number = _number(text)
    return None if number is None or not math.isfinite(number * scale) else round(number * scale, 6)


def _time_ms(text):
    """Return the milliseconds of a text like 24.082s or 24082ms, else None."""
    unit, scale = ("ms", 1) if text.endswith("ms") else ("s", 1000)
    return _finite(text.removesuffix(unit), scale) if text.endswith(unit) else None


def _show(text):
    text = b"none" if text is None else text
    return printable(text[:80].decode("utf-8", "replace")) + ("..." if len(text) > 80 else "")


def parse_json(line):
    """Parse an untrusted line of JSON. Integers of 19 digits or more become floats, possibly inf.

    ValueError if it is not JSON or is nested deeper than MAX_DEPTH."""

    def fits(value, depth):
        inner = (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        return depth > 0 and all(fits(item, depth - 1) for item in inner)

    try:
        content = json.loads(
            line, parse_int=lambda digits: int(digits) if len(digits) < 19 else float(digits)
        )
        if fits(content, MAX_DEPTH):
            return content
    except RecursionError:
        pass
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def show_json(value):
    """Return strict JSON on one line: named tuples become objects, nan and inf become null."""

    def plain(value):
        value = value._asdict() if hasattr(value, "_asdict") else value
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [plain(item) for item in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), allow_nan=False)


def not_judged(reason, folder=None, status=2):
    """Return stats.answer() without a verdict. status: the exit status."""
    return {
        "verdict": "not judged",
        "reason": str(reason),
        "status": status,
        "folder": str(folder) if folder else None,
        "best": None,
        "sides": [],
        "ideas": [],
    }


def printable(text):
    """Escape line breaks and terminal control characters (as \\x1b) in a path or a text from a
    log."""
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in os.fspath(text)
    )


def brief(text):
    """Return a message as one line for stderr. A long one loses its middle, since the advice
    stands at the end."""
    text = printable(text)
    half = MAX_MESSAGE // 2
    if len(text) <= MAX_MESSAGE:
        return text
    # whole words, if there are any
    before = text[:half]
    after = text[5 - half :]
    return f"{before.rpartition(' ')[0] or before} ... {after.partition(' ')[2] or after}"


def refuse(tool, reason):
    """Print why a tool stops without a result; return its exit status."""
    print(brief(f"{tool}: error: {reason}"), file=sys.stderr)
    return 2


def last_run(path):
    """Return the last run of a file, used or rejected, or the Run that states why there is none."""
    runs, rejected, _ = read_file(path)
    return max((*runs, *rejected), key=lambda run: run.index_in_file or 0)


def is_beside(item):
    """Return whether a rejected file lies beside the logs: by its name it is none."""
    suffix = os.path.splitext(item.path)[1]
    return item.kind == NOT_A_LOG and suffix not in ("", ".gz", ".txt", ".log")


def files_of(source):
    """Return {file name: text} of a source. The first file is the program; a source of one file is
    train_gpt.py."""
    before, *parts = FILE_LINE.split(source)
    return {"train_gpt.py": source} if before or not parts else dict(zip(parts[::2], parts[1::2]))


def source_in(folder, program):
    """Return the source of a program in a folder as its log has it: with train_gpt.py, which it
    imports."""
    texts = {
        name: Path(folder, name).read_text(encoding="utf-8")
        for name in dict.fromkeys((program, "train_gpt.py"))
    }
    return (
        texts[program]
        if len(texts) == 1
        else "".join(f"# file: {name}\n{text}" for name, text in texts.items())
    )


def plural(count, noun):
    """Return the count with its noun: `1 run`, `2 runs`, `2 batches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def as_flags(values):
    """Return the flags of a run, a word each, that set these values."""
    texts = {
        name: str(value).lower() if isinstance(value, bool) else value
        for name, value in values.items()
    }
    return [f"--{name}={text}" for name, text in texts.items()]


def some(texts, most=4, between=", "):
    """Join texts for a message; only the first ones are spelled out."""
    texts = list(texts)
    return between.join(texts[:most]) + (
        f" and {len(texts) - most} more" if len(texts) > most else ""
    )


def config_of(run):
    """Return the config values of a log that change what is trained, or the settings above a
    public source."""
    config = (run.start or {}).get("config", run.settings)
    return {
        key: value
        for key, value in (config.items() if isinstance(config, dict) else ())
        if key not in INCIDENTAL and not key.startswith("race_")
    }


def target_of(run):
    """Return the target that a run states, or None; 0 means that it has none."""
    target = (run.start or {}).get("target_val_loss")
    return target if type(target) in (int, float) and math.isfinite(target) and target else None


def side_names(race):
    """Return {side: name} of a race's declaration: a side's flags, declared name, revision or
    folder; else "base"."""
    sides = race["sides"]
    shared = len(os.path.commonprefix([side["flags"] for side in sides.values()]))
    versions = len(sides) == 1 or any(
        side["revision"] or "folder" in side for side in sides.values()
    )
    *_, last = sides.values()
    plain = (
        "this checkout" if versions else "without these flags" if last["flags"][shared:] else "base"
    )

    def name(side):
        if "name" in side:
            return side["name"]
        if "folder" in side:
            return os.path.basename(os.path.normpath(side["folder"]))
        if side["revision"]:
            return f"revision {side['revision'][:8]}"
        return plain if versions else shlex.join(side["flags"][shared:]) or plain

    return {side: name(described) for side, described in sides.items()}


def columns(rows, of_numbers=False):
    """Return a table with aligned columns. of_numbers: right-align all except the first."""
    turned = [list(map(printable, column)) for column in zip(*rows)]
    justify = [str.ljust, *[str.rjust if of_numbers else str.ljust] * len(turned)]
    aligned = [
        [just(cell, max(map(len, column))) for cell in column]
        for just, column in zip(justify, turned)
    ]
    return "\n".join("  ".join(row).rstrip() for row in zip(*aligned))


def run_main(main):
    """Call main() and exit with its status. A closed pipe (`| head`) gives 141, as SIGPIPE would,
    since the verdict may be lost; Ctrl-C gives no traceback."""
    for stream in (sys.stdout, sys.stderr):
        # a path or a log may hold what the terminal cannot show
        stream.reconfigure(errors="backslashreplace")
    try:
        # run.sh starts race.py with SIGINT blocked
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        status = main()
        sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
        if not isinstance(error, BrokenPipeError):  # a full disk
            status = refuse("stdout", f"{error}; the verdict may be lost")
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        status = 130
    sys.exit(status)
