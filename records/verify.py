"""Judge a record by the rules of the speedrun. Each rule that a program can check gets a verdict.

    python records/verify.py RECORD...                 RECORD: a folder of logs, or logs
    python records/verify.py RECORD --vs OTHER         also: is it faster on the same hardware? (Or one race with both)
    python records/verify.py RECORD --source HASH --vs RECORD --vs-source HASH     two versions whose logs share a folder
    python records/verify.py RECORD --data DIR         also hash the shards, rebuild the batches, search for leaks
    python records/verify.py RECORD --rerun MODEL...   also evaluate saved models, ideally one of each run: examine.py
    python records/verify.py RECORD --replay SEED      also run one run again, as its log describes it
    python records/verify.py RECORD --diff             also print how the source differs from the other side's, or from
                                                       this checkout's
    python records/verify.py RECORD -v                 also print each rule with its reason

--rerun and --replay run the source in the logs: use a container. docs/racing.md describes the page,
the independent evidence for what a log states, what no rule sees, the exit status and --json.
"""

import argparse
import ast
import contextlib
import difflib
import functools
import hashlib
import itertools
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter, namedtuple
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

import examine
import leaks
import logs
import pages
import stats
from leaks import (
    FAIL,
    NUMBER,
    PASS,
    ROOT,
    SHA256,
    STOPPED,
    UNKNOWN,
    Broken,
    CannotJudge,
    checkable,
    is_number,
    join_findings,
    judged,
    require,
    shards_of,
)
from logs import plural
from manifest import MANIFEST, SHORT, base_letter, declaration, manifest_in, race_of

INCOMPLETE = "incomplete"  # all rules together: nothing fails, and some rule could not be checked
VERDICTS = PASS, UNKNOWN, FAIL  # in the order of the page
# of claims, which are no rules
OF_CLAIMS = {PASS: "shown", FAIL: "not shown", UNKNOWN: "not judged"}
ALPHA = stats.ALPHA
LOSS, FASTER = CLAIMS = "mean loss below target, p < 0.01", "faster than the other side, p < 0.01"
ACCOUNTS = "every run is accounted for"
SWITCHES = "no compiler flags in the source"
CLOCK = "the clock is honest"
COPIES = "other seeds give other states"
VAL_TOKENS = "exactly the stated validation tokens"
ACCOUNTS_OTHER = "every run of the other side is accounted for"
INSPECT = "inspect this"  # a rule may be broken: a reader decides
AGAIN = "the source gives the run again"
NO_TARGET = "no target"
UNDESCRIBED = "the log does not describe its run (it is not one of this project's)"
# The public speedrun's medium track, recognized by its target loss, allows one compiler switch
# (says its README)
MEDIUM_LOSS = 2.92
MEDIUM_WITHIN = 0.05
# the public speedrun's rule; other data sets are validated on as a whole
FINEWEB_VAL_TOKENS = 10_485_760
# allowed difference of the wall clock and the sum of all named spans; honest runs have 0.0007
UNNAMED_S = 0.02
# those of train_gpt.py
SPANS = {"joining", "setup", "compile", "hashing", "warmup", "validation", "saving", "checkpoint"}
# parts of a gain in training that a side spends more off its clock: to inspect; broken
MOVED = 0.1
MOVED_MOST = 0.5
# part of the training time that counts as the gain of a side that does not train faster
WITHOUT_GAIN = 0.2
# p above which noise may explain it: at ALPHA one honest race in a hundred would break the rule
BY_CHANCE = 1e-4
CLOCKS_S = 2  # times of day have a resolution of one second
STOPS = 2  # runs of a side that may have been stopped; more allow a selection by chance

# Variables of the compiler; not those of the launcher, the allocator, cache folders and logging.
# Variables that change Python or a library count too, except harmless ones that container images
# set. LD_LIBRARY_PATH may name only system folders: no log records the contents of others.
# Variables that name a place or a version switch nothing by themselves
COMPILERS = (
    r"(?!TORCHELASTIC|TORCH_NCCL|TORCH_CPP_LOG_LEVEL|PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF"
    r"|(?:TORCHINDUCTOR|TRITON)_CACHE_DIR\b)(?:TORCH|PYTORCH|TRITON|INDUCTOR)[A-Z0-9]*_[A-Z0-9_]+"
)
_VARIABLE = re.compile(rf"{COMPILERS}=.*|(?:PYTHON|LD_)\w*=.*", re.S)
_INNOCUOUS = re.compile(
    r"PYTHON(?:UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|IOENCODING|UTF8|FAULTHANDLER|NOUSERSITE|SAFEPATH|STARTUP|_VERSION"
    r"|_SHA256|_PIP_VERSION|_SETUPTOOLS_VERSION|_GET_PIP_\w+)=.*"
    r"|PYTHONPATH=|PYTHONWARNINGS=[^.]*|(?:TORCH|TRITON)_HOME=.*|PYTORCH_VERSION=.*"
    r"|TORCH_(?:EXTENSIONS_DIR|LOGS|DISTRIBUTED_DEBUG|SHOW_CPP_STACKTRACES|CUDA_ARCH_LIST)=.*"
    r"|LD_LIBRARY_PATH=(?!.*/\.\.)(?:(?:/usr/local/(?:cuda(?:-[\d.]+)?|nvidia)|(?:/usr)?/lib(?:32|64)?)"
    r"(?:/[^:]*)?(?::|$)|:)*"
)
_PLACE = re.compile(
    r"(?:LD_(?!PRELOAD|AUDIT)\w*|\w+_(?:PATH|DIR|ROOT|PREFIX|VERSION|NUMBER))=.*", re.S
)
# Statements that set a compiler switch; the limit of recompilations is none
_SETTING = re.compile(
    r"\b_inductor\b|\b_(?:dynamo|functorch)\b[\w. ]*\b(?:config\b(?!\.recompile_limit\b)|import"
    r" \*)|\bcompiler\.config\b|triton\.knobs"
    r"|_TorchCompile|\bcompile\(.*\b(?:mode|options)="
    rf"|environb?\[b?['\"]{COMPILERS}['\"]\] \|?=(?!=)"
    rf"|\b(?:setdefault|putenv)\(b?['\"]{COMPILERS}|environ.*['\"( ]{COMPILERS}(?:['\"]:|=)",
    re.S,
)
_MEDIUM = re.compile(r": torch\._inductor\.config\.coordinate_descent_tuning = True$")
# Values of a config that a race sets for each run
OF_EACH_RUN = re.compile("seed|run_id|log_dir|race.*")
# Public packages that such scripts import. Any other module is code that the log does not contain
_PACKAGES = set(
    "torch torchvision torchao triton numpy scipy matplotlib pandas numba tiktoken tokenizers"
    " transformers datasets safetensors huggingface_hub kernels flash_attn"
    " flash_attn_interface flash_attn_3 xformers einops tqdm rich requests yaml wandb psutil"
    " pynvml nvtx cuda cutlass packaging dotenv".split()
)


# nats: seen 5e-5 between two generations of one processor; seeds differ by 1.4e-3 (sd)
ANOTHER_MACHINE = 5e-4


class Finding(NamedTuple):
    rule: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Evidence:
    """A run that logs.py has read."""

    run: logs.Run

    @property
    def name(self):
        return logs.printable(os.path.basename(self.run.path))

    @property
    def ours(self):
        """Whether the log describes its run. Such a log must hold everything that this project's
        logs hold."""
        return self.run.start is not None

    @functools.cached_property
    def race(self):
        return race_of(self.run)

    def get(self, where, kind=object):
        """Return the value at a path like `end.state_hash.before_warmup`.

        Raise CannotJudge if the log has no description, Broken if the value is missing or of
        another type."""
        checkable(self.ours, UNDESCRIBED)
        found = {"start": self.run.start, "end": self.run.end}
        for key in where.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        require(
            found is not None
            and isinstance(found, kind)
            and (kind not in (int, NUMBER) or is_number(found)),
            f"the log's {where} is {json.dumps(found)[:60]}; every run of this project's script"
            " states it",
        )
        return found

    def digest(self, where):
        found = self.get(where, str)
        require(
            SHA256.fullmatch(found), f"the log's {where} is {found[:20]!r}, which is no SHA-256"
        )
        return found

    def require_stated(self, source, *pairs, name=""):
        """Raise Broken unless the log holds these (where, value) pairs. source: where the values
        come from."""
        for where, wanted in pairs:
            stated = self.get(where, type(wanted))
            require(stated == wanted, f"{name}{where} is {stated}; by {source} it is {wanted}")


def moment(text):
    """Return the seconds since 1970 of an ISO time, or None."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        return datetime.fromisoformat(text).timestamp()


# Rules for each run: a check takes Evidence and returns a reason to believe; it raises Broken or
# CannotJudge otherwise


def check_log(e):
    run = e.run
    stated = e.get("start.source_sha256", str)
    require(not run.contradiction, run.contradiction)
    seen = hashlib.sha256(run.script.encode("utf-8", "surrogateescape")).hexdigest()
    require(
        seen == stated,
        f"the source in the log has SHA-256 {seen[:8]}..., its description states {stated[:8]}...",
    )
    e.require_stated(
        "the rest of the log",
        ("end.steps", e.get("start.planned.steps", int)),
        ("end.train_tokens", e.get("start.planned.train_tokens", int)),
        ("start.seed", e.get("start.config.seed")),
    )
    e.digest("end.final_state_hash")
    return "its lines, its description and the hash of its source agree"


def check_beginning(e):
    """Check that the run began from its seed, and not from a checkpoint or saved parameters."""
    e.get("start.seed", int)
    require(not e.run.disqualified, f"{e.run.disqualified}; such runs count for no record")
    return "neither resumed nor begun from saved parameters; --rerun recomputes its initial weights"


def check_shards(e):
    """Check that each shard has a digest and is read once, for training or for validation."""
    lists = shards_of(e)
    for key in ("sha256", "name"):
        both = {shard[key] for shard in lists["train"]} & {shard[key] for shard in lists["val"]}
        require(not both, f"{', '.join(sorted(both))[:80]} is both training and validation data")
    distinct = len({shard["sha256"] for shard in lists["train"]})
    require(
        distinct == len(lists["train"]),
        f"its {plural(len(lists['train']), 'training shard')} have {distinct} "
        "distinct digests: one is read twice, and a record reads each once",
    )
    epochs = e.get("start.config", dict).get("epochs", 1)
    require(
        epochs == 1,
        f"its training shards are read {epochs} times (--epochs), and a record reads each once",
    )
    e.digest("end.train_digest")
    train = plural(len(lists["train"]), "training shard")
    val = plural(len(lists["val"]), "validation shard")
    return f"{train}, {val}, each with its SHA-256, none in both"


def is_fineweb(e):
    """Return whether the public speedrun's rules apply, by the preset or the names of the
    validation shards."""
    try:
        shards = shards_of(e)["val"]
    except Broken:
        raise CannotJudge("the shards are not stated in full") from None
    return e.run.start.get("preset") == "speedrun" or all(
        shard["name"].startswith("fineweb_val_") for shard in shards
    )


def check_val_tokens(e):
    """Check the number of validation tokens: the public rule's, or all of the validation shards. A
    trial claims no loss."""
    counted = e.get("end.val_tokens", int)
    wanted = (
        FINEWEB_VAL_TOKENS
        if is_fineweb(e)
        else sum(shard["tokens"] for shard in shards_of(e)["val"]) - 1
    )
    checkable(
        counted >= wanted or logs.target_of(e.run),
        f"{NO_TARGET}: {counted:,} of {wanted:,} tokens were scored",
    )
    require(counted == wanted, f"{counted:,} tokens were scored, and the rule is {wanted:,}")
    return f"{counted:,} tokens were scored"


# statements that set a switch; unknown modules
Scanned = namedtuple("Scanned", "findings foreign imports_torch")


@functools.lru_cache(maxsize=64)
def scan(source):
    """Return a source Scanned. Raise SyntaxError if Python cannot parse it."""
    findings = []
    modules = set()
    try:
        for node in ast.walk(ast.parse(source)):
            is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
            if is_docstring or not isinstance(node, ast.stmt):
                continue  # expressions are part of a statement
            parts = [
                child
                for child in ast.iter_child_nodes(node)
                if isinstance(child, (ast.expr, ast.withitem))
            ]
            shown = " ".join(map(ast.unparse, parts if hasattr(node, "body") else [node]))
            if _SETTING.search(shown):
                findings.append(f"line {node.lineno}: {' '.join(shown.split())[:80]}")
            paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            paths += (
                ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
            )
            modules |= {path.split(".")[0] or "a module beside it" for path in paths}
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from None
    files = logs.files_of(source)
    # one file cannot import itself
    held = {name.removesuffix(".py") for name in files if len(files) > 1}
    return Scanned(
        findings, sorted(modules - sys.stdlib_module_names - _PACKAGES - held), "torch" in modules
    )


@functools.lru_cache(maxsize=64)
def difference(parent, source):
    return list(
        difflib.unified_diff(
            parent.splitlines(), source.splitlines(), "parent", "source", lineterm="", n=1
        )
    )


def lines_changed(parent, source):
    return plural(sum(line[0] in "+-" for line in difference(parent, source)[2:]), "line")


def check_source(e):
    """Check that the source sets no compiler switch."""
    failed = Broken if e.ours else CannotJudge
    what = "the source in the log"
    logs.require(e.run.source, "the log holds no source", failed)
    try:
        found = scan(e.run.source)
    except SyntaxError as error:
        raise failed(
            f"{what} is not Python that this version can parse ({str(error)[:80]})"
        ) from None
    medium = not e.ours and abs(e.run.final_loss - MEDIUM_LOSS) < MEDIUM_WITHIN
    findings = [text for text in found.findings if not (medium and _MEDIUM.search(text))]
    require(not findings, join_findings(findings))
    doubts = (
        [f"imports {', '.join(found.foreign)}, whose code the log does not contain"]
        if found.foreign
        else []
    )
    doubts += [] if found.imports_torch else ["does not import torch: it is not the script"]
    logs.require(not doubts, f"{what} {'; '.join(doubts)}", failed)
    text = "no statement sets a compiler switch openly"
    text += f", except {found.findings[0]}, which this track allows" if found.findings else ""
    return text


def compare_source(e, theirs):
    """Return how the source differs from this checkout's script. theirs: the other side's, if it
    differs.

    No rule's reason says this: the page of a record must not change with the checkout."""
    source = e.run.script
    program = leaks.program_of(e.run.script)
    checkout = leaks.source_of_checkout(program)
    if not e.ours and source != checkout:
        return ""
    return f"Source of {e.name}: " + (
        f"identical to this checkout's {program}."
        if source == checkout
        else (
            f"differs from this checkout's {program} in "
            f"{lines_changed(checkout, source)}{'' if theirs else ' (--diff)'}."
        )
    )


def settings_of(e):
    """Return the variables as NAME=value that may change the compiler, Python or a library."""
    settings = [
        f"{name}={value}" for name, value in sorted(e.get("start.environment", dict).items())
    ]
    return [
        text for text in settings if _VARIABLE.fullmatch(text) and not _INNOCUOUS.fullmatch(text)
    ]


def check_environment(e, others=()):
    """Check that no environment variable changes the compiler, Python or a library on one side
    alone."""
    found = settings_of(e)
    switches = [text for text in found if not _PLACE.fullmatch(text)]
    require(not switches, f"started with {', '.join(switches)[:160]}; a record is run without")
    alike = others and all(settings_of(other) == found for other in others)
    checkable(
        alike or not found,
        f"started with {', '.join(found)[:160]}: no log records what is there; start both sides "
        "with the same, or without",
    )
    return (
        f"{', '.join(found)[:160]} on both sides"
        if found
        else "no variable changes the compiler, Python or its libraries"
    )


def check_clock(e):
    """Check that train_time rises, at every step."""
    timed = e.run.steps
    falls = e.run.clock_falls
    # community scripts reset the clock after their first steps
    require(
        not falls or len(falls) == 1 and falls[0] <= 11 and not e.ours,
        f"train_time falls at step {logs.some(map(str, falls))}",
    )
    checkable(len(timed) > 1, "fewer than two lines with train_time")
    if e.ours:
        steps = [line.step for line in timed if not line.validation]
        wanted = next((i for i, step in enumerate(steps, 1) if step != i), len(steps) + 1)
        require(
            wanted > e.run.stated_steps == len(steps),
            f"of {e.run.stated_steps} steps {len(steps)} have a line; step {wanted} is missing or"
            " out of order",
        )
    return f"train_time rises on {len(timed)} lines"


def attempt_of(e, races):
    """Return what its race wrote about a run when it ended, or {}."""
    found = races.get(e.race.race_id) if e.race and e.ours else None
    return found.attempts.get(str(e.run.start.get("run_id")), {}) if found else {}


def spans_of(e):
    """Return {name: seconds} of the spans off the clock that are numbers; check_outside requires
    that all are."""
    return {name: s for name, s in e.get("end.seconds_outside_clock", dict).items() if is_number(s)}


def check_outside(e):
    """Check that training and the named spans add up to the wall clock."""
    wall = e.get("end.wall_seconds", NUMBER)
    trained = e.get("end.train_time_ms", NUMBER) / 1000
    spans = e.get("end.seconds_outside_clock", dict)
    require(
        all(is_number(seconds) and seconds > -0.05 for seconds in spans.values()),
        f"spans outside the clock are no seconds: {json.dumps(spans)[:100]}",
    )
    named = sum(spans.values())
    unnamed = wall - trained - named
    require(
        abs(unnamed) <= UNNAMED_S,
        f"wall clock {wall:.2f} s, training {trained:.2f} s, named outside {named:.2f} "
        f"s: {unnamed:+.2f} s are unaccounted for, and {UNNAMED_S} s are allowed",
    )
    strange = {name: seconds for name, seconds in spans.items() if name not in SPANS}
    require(
        sum(strange.values()) <= UNNAMED_S,
        f"off the clock it names {join_findings(map(logs.printable, strange))}, for"
        f" {sum(strange.values()):.2f} s, which train_gpt.py does not; work of an idea's own"
        " belongs on the clock",
    )
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
    return (
        f"of {wall:.1f} s: training {trained:.1f}, {shown}, unaccounted for"
        f" {round(unnamed, 4) + 0:.4f}"
    )


def check_same(e, where, what_follows, what):
    before, after = (e.digest(f"{where}.{when}{what_follows}") for when in ("before", "after"))
    require(
        before == after,
        f"{what} changes the state: its hash is {before[:8]}... before and {after[:8]}... after",
    )
    return f"state hash {before[:8]}... before and after"


def check_validation(e):
    """Check that the parameters' checksum stayed the same at each validation. Older logs have
    hashes at the last one."""
    end = e.run.end or {}
    text = ""
    if "validation_hash" in end:
        text = check_same(e, "end.validation_hash", "", "validation")
        changed = end.get("changed_by_validation")
    else:
        e.digest("end.model_hash")
        changed = e.get("end.changed_by_validation", int)
    require(
        changed in (0, None),
        f"{changed} of {plural(len(e.run.validations), 'validation')} changed the parameters",
    )
    return (
        text
        if changed is None
        else f"{text}{', and ' * bool(text)}the same parameters at each validation"
    )


def check_compiles(e):
    compiled = e.get("end.compiles_after_warmup", int)
    require(not compiled, f"compiled after the warm-up: {plural(compiled, 'graph')}")
    return "nothing was compiled after the warm-up"


def of_all(found, wanted):
    """Combine the (name, verdict, reason) of the runs that were examined. wanted: how many there
    are."""
    broken = [f"{name}: {reason}" for name, verdict, reason in found if verdict == FAIL]
    unknown = sorted(
        (reason for _, verdict, reason in found if verdict == UNKNOWN),
        key=lambda reason: STOPPED not in reason,
    )
    some = f"{len(found)} of {plural(wanted, 'run')} examined; " if len(found) < wanted else ""
    require(not broken, some + join_findings(broken))
    checkable(
        not unknown, f"{some}{len(unknown)} of {plural(len(found), 'run')}: {''.join(unknown[:1])}"
    )
    checkable(not some, f"{some}none fails; the first: {found[0][2]}")
    return found[0][2] if wanted == 1 else f"{wanted} of {wanted} runs; the first: {found[0][2]}"


# Rules for all runs together


def check_accounts(runs, found, races):
    """Check that all declared runs are here, of one experiment, and that the manifest shows no
    other attempts."""
    remarks = []
    unknown = []
    for which, of_side in stats.grouped(runs, lambda e: e.race and e.race[:2]).items():
        race_id, name = which or (None, "")
        declared = races[race_id].race if race_id in races else {}
        side = stats.Side(
            f"side {name}" if name else "the set",
            [e.run for e in of_side],
            found.rejected,
            declared,
        )
        try:
            stats.check_none_diverged(side)
            stats.check_complete(side)
            stats.check_one_experiment(side)
        except stats.Mixed as reason:
            require(which is None, reason.seen)
            unknown.append(
                f"the logs do not say which runs are the record ({reason.seen}): choose with"
                " --source, or name the logs of one experiment"
            )
        except CannotJudge as reason:
            raise Broken(str(reason)) from None
        require(
            len(shards_read(of_side)) < 2,
            f"the runs of {side.label} did not all read the same data",
        )
        if which is None:
            unknown.append("no number of runs was declared: some may be missing")
        elif not declared:
            unknown.append(
                f"there is no {MANIFEST} of race {race_id}: other attempts cannot be seen"
            )
        remarks += [f"{side.label}: {plural(len(of_side), 'run')}, as declared"] * (
            which is not None
        )
    remarks += [
        f"{logs.printable(os.path.basename(item.path))}: {item.reason}"
        for item in found.rejected
        if item.kind in (logs.INCOMPLETE, logs.NOT_FINITE)
    ]
    homes = {str(manifest.path.parent) for manifest in races.values()}
    strangers = {
        str(e.run.start.get("run_id"))
        for e in runs
        if e.ours
        and not attempt_of(e, races)
        and (
            e.race
            and e.race.race_id in races
            or os.path.dirname(os.path.realpath(e.run.path)) in homes
        )
    }
    require(
        not strangers,
        f"not started by this race, by its {MANIFEST}: {join_findings(sorted(strangers))}",
    )
    # the log of another project has no run_id: its name has
    here = {
        str((item.start or {}).get("run_id", Path(item.path).stem)): item
        for item in [*found.rejected, *found.runs]
    }
    for race_id, manifest in races.items():
        of_race = [e for e in runs if e.race and e.race.race_id == race_id]
        if of_race:
            check_attempts(manifest, here, remarks, unknown)
            check_declared(manifest, of_race)
    checkable(not unknown, "; ".join([*dict.fromkeys(unknown), *remarks]))
    return "; ".join(remarks)


def shards_read(runs):
    """Return {stated shards: a run that read them} of this project's runs."""
    return {json.dumps(e.run.start.get("shards"), sort_keys=True): e for e in runs if e.ours}


def check_attempts(manifest, here, remarks, unknown):
    """Check the attempts in the manifest: was a run stopped or left out?

    race.py writes a line before it starts a run and one after. here: {run_id: Run of logs.py}. Adds
    to remarks, and to unknown what cannot be checked."""
    declared = manifest.race
    stopped = Counter()
    for attempt in manifest.attempts.values():
        status = attempt["status"]
        run_id = attempt["run_id"]
        what = f"run {attempt['run']}{attempt['side']}, {run_id}"
        log = here.get(run_id)
        if not attempt["run"]:  # the first run, which warms the machine up; its log is not kept
            continue
        if status == "done":
            require(log, f"{what}, was started (done), and its log is not here")
            require(
                attempt.get("figures") in (None, log.figures),
                f"{what}: its lines are not those that the race saw, by their "
                f"SHA-256 in {MANIFEST}; restore the log",
            )
            continue
        remarks.append(f"{what}: {status}")
        stopped[attempt["side"]] += status in ("interrupted", "failed") and bool(log)
        if not log:
            require(
                not attempt.get("logged"),
                f"{what}, was started ({status}), and its log is not here",
            )
            if status not in ("failed", "interrupted"):  # nobody saw how it ended
                unknown.append(f"{what}, was started and left no log: how it ended cannot be seen")
    unknown += [
        f"{count} runs of {logs.side_names(declared)[side]} were stopped and repeated: with so"
        " many, chance alone finds a faster one"
        for side, count in stopped.items()
        if side != SHORT and count > STOPS
    ]


def check_measured(case, races):
    """Check the short base and the times by turns, by which a race's verdict is known."""
    remarks = []
    unknown = []
    for race_id, manifest in races.items():
        race = manifest.race
        short = race.get("short_base", {})
        if short.get("race") == race_id:
            check_short_base(race, [*map(Evidence, case.whole.found.runs)])
            remarks.append(f"the short base has the losses of {len(short['losses'])} pairs of runs")
        elif short:
            unknown.append(f"the short base is of race {short['race']}, whose logs are elsewhere")
        for side in race.get("turns", {}):
            sides = [
                [e.run for e in case.whole.runs if e.race and e.race[:2] == (race_id, letter)]
                for letter in (side, base_letter(race))
            ]
            if min(map(len, sides)) < 2 or any(run.train_time_ms is None for run in sum(sides, [])):
                continue
            ours, theirs = (np.log([run.train_time_ms for run in runs]) for runs in sides)
            rho = stats.speed_of(race, stats.Side(f"side {side}", [])).log_ratio
            p = stats.welch_t(ours - rho, theirs).pvalue
            seen = math.exp(ours.mean() - theirs.mean())
            said = f"side {side}: {math.exp(rho):.3f} of the time by turns, {seen:.3f} by the runs"
            if p < BY_CHANCE:
                unknown.append(f"{said} (p = {p:.1g}): {INSPECT}")
            else:
                remarks.append(said)
    checkable(not unknown, "; ".join(unknown + remarks))
    return "; ".join(remarks)


def check_short_base(race, runs):
    """Require the losses that a race.jsonl states for its short base in the logs."""
    short = race["short_base"]
    base = base_letter(race)
    for seed, losses in short["losses"].items():
        for side, steps, stated in zip(
            (base, SHORT), (short["base_steps"], short["steps"]), losses
        ):
            found = [
                e.run
                for e in runs
                if e.race
                and e.race[:2] == (race["id"], side)
                and str(e.run.start.get("seed")) == seed
            ]
            seen = [run.exact_loss for run in found]
            require(
                seen == [stated] and found[0].last_step == steps,
                f"{MANIFEST} states a loss of {stated} of the base in {steps} steps with seed"
                f" {seed}, and the logs have {seen}",
            )
            require(
                found[0].start.get("source_sha256") == race["sides"][base].get("source_sha256"),
                f"the run of the short base with seed {seed} has another source than the base",
            )


def declared_config(e, races):
    """Return the config that a run's race declared for its side; {} without one."""
    race = races[e.race.race_id].race if e.race and e.race.race_id in races else {"sides": {}}
    return race["sides"].get(e.race and e.race.side, {}).get("config", {})


def check_declared(manifest, runs):
    """Check that each run has the number, seed, source and config that its race declared and wrote
    down."""
    declared = manifest.race
    for e in sorted(runs, key=lambda e: not e.ours):  # logs of other projects cannot be checked
        attempt = manifest.attempts[e.get("start.run_id", str)]
        side = declared["sides"][attempt["side"]]  # its order names no other
        e.require_stated(
            MANIFEST,
            ("start.ranks", declared["ranks"]),
            ("start.race.declared_n", declared["n"]),
            ("start.seed", declared["seed"] + attempt["run"]),
            ("start.source_sha256", side.get("source_sha256")),
            name=f"{e.name}: its ",
        )
        stated = {"preset": e.run.start.get("preset"), **e.get("start.config", dict)}
        wanted = side.get("config", stated)  # races before 2026-11-28 declared flags alone
        for name in sorted({*wanted, *stated}):
            require(
                OF_EACH_RUN.fullmatch(name)
                or examine.agree(name, wanted.get(name), stated.get(name)),
                f"{e.name}: its race declared {name} {json.dumps(wanted.get(name))[:60]}, and its"
                f" log's config has {json.dumps(stated.get(name))[:60]}",
            )


def check_wall(runs, races):
    """Check each run's wall clock with the time that the race measured, which must exceed it."""
    lags = []
    for e in runs:
        measured = attempt_of(e, races).get("seconds")
        if is_number(measured):
            wall = e.get("end.wall_seconds", NUMBER)
            lags.append(measured - wall)
            require(
                lags[-1] >= -0.1,
                f"{e.name} states {wall:.1f} s by the wall clock, the race that started it "
                f"measured {measured:.1f}",
            )
    checkable(
        lags,
        (
            "the race itself had ended before its runs did"
            if any(attempt_of(e, races) for e in runs)
            else f"no {MANIFEST} tells how long the runs took: race them with race.py"
        ),
    )
    return (
        f"the race measured {min(lags):.1f} to {max(lags):.1f} s more than each run's wall clock,"
        " which starts later"
    )


def check_copies(runs):
    """Check that other seeds give other states."""
    seen = {}
    for e in runs:
        seed = e.get("start.seed", int)
        names = "final_state_hash", "state_hash", "validation_hash", "model_hash"
        hashes = json.dumps([e.run.end.get(name) for name in names])
        for digest in re.findall(f'"({SHA256.pattern})"', hashes):
            one, before = seen.setdefault(digest, (e, seed))
            require(
                before == seed,
                f"{one.name} and {e.name} have the same state hash {digest[:8]}, and the seeds"
                f" {before} and {seed}",
            )
    return f"no two seeds of {plural(len(runs), 'run')} share a state hash"


def claim(runs, others, target, names=("the set", "the --vs set")):
    """Return the report of stats.py, by the test that the race declared. target None: the logs'
    target."""
    alpha = declaration([e.run for e in runs]).get("alpha", ALPHA)
    require(
        alpha <= ALPHA,
        f"its race declared alpha {alpha:g}, and a record wants {ALPHA:g} at most; race again",
    )
    options = stats.parse(
        [".", f"--alpha={alpha!r}", *([f"--target={target!r}"] if target is not None else [])]
    )
    sides = [
        stats.gather(name, logs.Logs([e.run for e in side]), options)
        for name, side in zip(names, (runs, others))
        if side
    ]
    try:
        return stats.judge(sides, options)
    except stats.Mixed as reason:
        raise CannotJudge(
            f"{reason.seen}; name the logs of one experiment, or choose with --source and"
            " --vs-source"
        ) from None


def check_claimed(report, given):
    """Raise CannotJudge unless stats.py could judge the claim, and where it holds by another
    target than the logs declare."""
    checkable(report["verdict"] in (stats.HOLDS, stats.FAILS), report["reason"])
    checkable(
        given is None or not report["others"] or not report["loss"]["significant"],
        f"not the declared claim: {'; '.join(report['others'])}; p = {report['loss']['p']:.4g}",
    )


def check_loss(runs, given):
    """Check that the mean loss is below the target: on FineWeb 3.28 whatever the logs state."""
    trials = [
        reason for e in runs if e.ours and NO_TARGET in (reason := judged(check_val_tokens, e)[1])
    ]
    checkable(not trials, "".join(trials[:1]))
    fineweb = given is None and any(not e.ours or is_fineweb(e) for e in runs)
    report = claim(runs, [], stats.DEFAULT_TARGET if fineweb else given)
    check_claimed(report, given)
    loss = report["loss"]
    text = (
        f"mean {loss['mean']:.5f} of {plural(loss['n'], 'run')}, target {loss['target']:g}, p ="
        f" {loss['p']:.4g}"
    )
    require(loss["significant"], f"{text}: not below {report['alpha']:g}")
    return text


def check_faster(case):
    """Check that the record is faster. Clocks that only the runs themselves have read show no
    claim."""
    report = case.report
    runs = case.runs + case.others
    check_claimed(report, case.options.target)
    found = report["comparison"]
    (verdict,) = report["verdicts"]
    text = (
        f"{report['time']['mean']:.3f} s against {found['other']['mean']:.3f} s, ratio "
        f"{stats.show_contrast(verdict.time, '.4f')}, p = {found['p']:.4g} by the {found['test']}"
    )
    require(found["significant"], f"{text}: not below {report['alpha']:g}")
    alone = [e for e in runs if not is_number(attempt_of(e, case.races).get("seconds"))]
    if alone:
        text += (
            "; but by the clocks of the runs alone: no race confirms the times of "
            f"{len(alone)} of {plural(len(runs), 'run')}"
        )
    checkable(not any(e.ours for e in alone), text)
    return text


def check_again(e, data):
    """Run the source in a log again, with its ranks, threads and config, and compare state hash
    and loss."""
    config = {"preset": e.run.start.get("preset"), **logs.config_of(e.run)}
    if data:
        config |= {
            split: Path(data).resolve() / Path(config[split]).name
            for split in ("train_files", "val_files")
        }
    config = {
        name: ",".join(map(str, value)) if isinstance(value, list) else value
        for name, value in config.items()
    }
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": e.get("start.environment", dict).get("OMP_NUM_THREADS"),
    }
    environment = {name: value for name, value in environment.items() if value is not None}
    with tempfile.TemporaryDirectory() as folder:
        program = leaks.write_files(folder, e.run.script).name
        os.symlink(ROOT / "data", Path(folder, "data"))
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                str(ROOT / "launch" / "ranks.py"),
                str(e.get("start.ranks", int)),
                program,
                *logs.as_flags(config),
                f"--seed={e.get('start.seed', int)}",
                "--log_dir=logs",
                "--run_id=again",
            ],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        again = Evidence(logs.last_run(str(Path(folder, "logs", "again.txt"))))
    checkable(
        again.run.complete,
        f"it did not end ({again.run.reason}; {' '.join(done.stdout[-200:].split())}); "
        "--data names the shards",
    )
    (wanted, loss), (seen, its) = (
        (one.get("end.final_state_hash", str), one.get("end.final_val_loss", NUMBER))
        for one in (e, again)
    )
    if seen == wanted:
        return f"the same bytes: state hash {seen[:8]}..., loss {its:.6f}"
    read, stated = (
        [shard["sha256"][:8] for split in shards_of(one).values() for shard in split]
        for one in (again, e)
    )
    checkable(
        read == stated,
        f"it read shards whose SHA-256 begin with {logs.some(read)}, the log states"
        f" {logs.some(stated)}: not the run's data; fetch or create the shards as the run did, and"
        " name their folder with --data",
    )
    facts = [
        {**one.get("start.hardware", dict), **one.get("start.versions", dict)} for one in (e, again)
    ]
    differ = [
        name
        for name in ("device", "cpu", "cpu_id", "threads", "torch")
        if facts[0].get(name) is None or facts[0][name] != facts[1].get(name)
    ]
    text = (
        f"its state hash is {seen[:8]}..., the log states {wanted[:8]}...; loss {its:.6f} against"
        f" {loss:.6f}"
    )
    require(
        differ or facts[0].get("gpus"),
        f"{text}; on the same processor, threads and torch a run gives the same bytes",
    )
    why = f"other, or not logged: {', '.join(differ)}" if differ else "GPUs add in any order"
    require(
        abs(its - loss) <= ANOTHER_MACHINE,
        f"{text}: more than {ANOTHER_MACHINE:g} nats apart ({why})",
    )
    return f"{text}: within {ANOTHER_MACHINE:g} nats ({why}, so the bytes may differ)"


def check_alike(runs, facts_of):
    """Return the facts of the first run. Raise Broken unless every run has the same."""
    found = ((e.name, facts_of(e)) for e in runs)
    one, wanted = next(found)
    for other, facts in found:
        differ = [
            f"{key}: {str(wanted.get(key))[:80]} and {str(facts.get(key))[:80]}"
            for key in sorted({*wanted, *facts})
            if wanted.get(key) != facts.get(key)
        ]
        require(not differ, f"{one} and {other} differ in {'; '.join(differ)[:200]}")
    return wanted


def check_data(runs, others, races):
    """Check that all runs are validated on the same tokens. Other training data count where the
    race declared them."""

    def digests(e, split):
        return [shard["sha256"] for shard in shards_of(e)[split]]

    def differ(e, name):
        return declared_config(runs[0], races).get(name) != declared_config(e, races).get(name)

    found = check_alike(
        runs + others,
        lambda e: {
            "end.val_tokens": e.get("end.val_tokens", int),
            "val_len": e.get("start.config.val_len", int),
            "the validation shards' SHA-256": digests(e, "val"),
        },
    )
    first = digests(runs[0], "train")
    declared = set()
    for e in others:
        its = digests(e, "train")
        fewer = differ(e, "train_shards") and all(one == other for one, other in zip(first, its))
        checkable(
            its == first or fewer or differ(e, "train_files"),
            f"{INSPECT}: {runs[0].name} and {e.name} trained on shards with different digests, and"
            " their race declared the same train_files and train_shards",
        )
        declared |= {
            name for name in ("train_files", "train_shards") if its != first and differ(e, name)
        }
    return (
        f"{found['end.val_tokens']:,} validation tokens of the same shards, in sequences of"
        f" {found['val_len']:,}; "
        f"{f'other training shards, as {sorted(declared)} declare' if declared else 'the same training shards'}"
    )


def check_hardware(runs, others):
    """Check that all runs had the same hardware, versions and switches. Sides may load different
    shared libraries."""
    for side in runs, others:  # its flags and source decide what is loaded
        stated = {e.get("start.versions", dict).get("libraries"): e.name for e in side if e.race}
        require(
            len(stated) < 2,
            f"{' and '.join([*stated.values()][:2])} had loaded different shared libraries, or "
            "one of them does not state their digest",
        )

    def facts(e):
        versions = {
            name: version
            for name, version in e.get("start.versions", dict).items()
            if name != "libraries"
        }
        switches = {
            name: value
            for name, value in e.get("start.environment", dict).items()
            if not re.match("TORCHELASTIC_|.*_CACHE_DIR$", name)
        }  # these name the run and the checkout
        return {
            "ranks": e.get("start.ranks", int),
            **e.get("start.hardware", dict),
            **versions,
            **switches,
            "hosts": [
                {key: host.get(key) for key in ("ranks", "hardware", "versions")}
                for host in e.run.start.get("hosts") or ()
                if isinstance(host, dict)
            ],
        }

    wanted = check_alike(runs + others, facts)
    return (
        f"{wanted.get('device')}, and the same ids, driver, versions and switches (clock rates are"
        " not logged)"
    )


def check_interleaved(runs, others, races):
    """Check that the sides ran in turn, one run after another. A race's manifest has their order."""
    order = []
    ladder = len({e.race and e.race.side for e in others}) > 1
    places = {
        run_id: place for found in races.values() for place, run_id in enumerate(found.attempts)
    }
    for side, e in [*(("a", e) for e in runs), *(("b", e) for e in others)]:
        side = e.race.side if ladder and e.race else side
        began = moment(e.get("start.started", str))
        require(began, f"{e.name} states no time at which it started")
        before = sum(spans_of(e).get(name, 0) for name in ("joining", "setup"))
        attempt = attempt_of(e, races)
        seen = moment(attempt.get("started_at")) or -math.inf  # by the race, on the same clock
        place = (
            places[attempt["run_id"]] if abs(began - seen) < (attempt.get("seconds") or 0) else None
        )
        order.append(
            (place, began, side, e.name, began + e.get("end.wall_seconds", NUMBER) - before)
        )
    known = len(races) == 1 and all(place is not None for place, *_ in order)
    order.sort(key=lambda run: run[0 if known else 1])
    early = [
        f"{other} started {ended - began:.0f} s before {one} ended"
        for (*_, one, ended), (_, began, _, other, _) in itertools.pairwise(order)
        if began + CLOCKS_S < ended
    ]
    sides = "".join(side for _, _, side, *_ in order)
    each = len(set(sides))
    require(
        all(len(set(sides[turn : turn + each])) == each for turn in range(0, len(sides), each)),
        f"in the order of their start the runs are {sides[:60]}: not in turn",
    )
    stepped = known and len(early) == 1
    require(stepped or not early, f"{join_findings(early)}: they took time from each other")
    checkable(
        not early,
        f"{INSPECT}: {join_findings(early)}, by a clock that was set back, or they took time from"
        " each other",
    )
    return f"started as {sides[:60]}, one after another"


def check_spans(runs, others):
    """Check that the record's side moved no work off its clock: a part of its gain in training at
    most.

    Without a gain in time work off the clock may have bought a lower loss; then a part of the
    training time counts. A slower model validates more slowly, in proportion. Validation counts by
    the call. Compiling takes what the code needs, so more of it is for a reader to judge."""
    checkable(min(len(runs), len(others)) > 1, "fewer than two runs on a side")
    calls = np.mean([len(e.run.validations) for e in others])

    def seconds(e):
        spans = spans_of(e)
        compiling, validation = (spans.pop(name, 0) for name in ("compile", "validation"))
        return (
            e.get("end.train_time_ms", NUMBER) / 1000,
            compiling,
            sum(spans.values()) + validation * calls / max(1, len(e.run.validations)),
        )

    def more(mine, theirs, by, level=ALPHA):
        """Return whether the first is more than the second, by so many seconds and with p below
        the level."""
        return mine.mean() - theirs.mean() > by and (
            np.ptp(mine) == np.ptp(theirs) == 0 or stats.welch_t_less(theirs, mine).pvalue < level
        )

    (trained, compiled, off), (their_trained, their_compiled, their_off) = (
        np.transpose([seconds(e) for e in side]) for side in (runs, others)
    )
    gain = their_trained.mean() - trained.mean()
    text = (
        f"{off.mean():.2f} s against {their_off.mean():.2f} s, compiling {compiled.mean():.2f}"
        f" against {their_compiled.mean():.2f} s; its training takes {max(0, gain):.2f} s less"
    )
    asked = f"off its clock the record's side spends more: {text}; what else is done there?"
    worth = gain if more(their_trained, trained, 0) else WITHOUT_GAIN * their_trained.mean()
    expected = their_off * max(1, trained.mean() / their_trained.mean())
    require(not more(off, expected, UNNAMED_S + MOVED_MOST * worth, BY_CHANCE), asked)
    checkable(
        not more(off, expected, UNNAMED_S + MOVED * worth)
        and (gain <= 0 or not more(compiled, their_compiled, UNNAMED_S + MOVED * worth)),
        f"{INSPECT}: {asked}",
    )
    return text


# Together


class RunSet(NamedTuple):
    """The Evidence of all runs in some folders, the result of logs.read, and {race id: manifest}."""

    runs: list = []
    found: logs.Logs | None = None
    races: dict = {}


def read_runs(paths, source):
    """Read logs and folders into a RunSet; source: how the hash of the runs' source begins, or
    None.

    Raise CannotJudge without a run, or if a file cannot be read."""
    found = logs.read(paths)
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    reasons = join_findings(
        [f"{item.path}: {item.reason}" for item in unreadable or found.rejected]
    )
    checkable(
        found.runs and not unreadable,
        f"no run to judge ({reasons or 'nothing was found'}); name a folder of logs, or logs",
    )
    folders = [path for path in paths if os.path.isdir(path)] + [
        os.path.dirname(run.path) or "." for run in found.runs
    ]
    runs = [
        Evidence(run)
        for run in found.runs
        if (run.source_sha256 or "").startswith((source or "").lower())
        and not (race_of(run) and race_of(run).side == SHORT)
    ]
    there = [
        f"{digest:.8} ({plural(count, 'run')})"
        for digest, count in Counter(run.source_sha256 or "none" for run in found.runs).items()
    ]
    checkable(
        runs,
        f"no run has a source whose hash begins with {source}; there are {join_findings(there)}",
    )
    manifests = filter(
        None, map(manifest_in, sorted({os.path.realpath(folder) for folder in folders}))
    )
    races = {manifest.race["id"]: manifest for manifest in manifests}
    return RunSet(runs, found, races)


def find_models(paths, runs):
    """Return {run_id: (Evidence, file of the model)}. Raise CannotJudge for a file that is no
    model of these runs."""
    files = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.glob("*.pt")) if path.is_dir() else [path])
    ]
    checkable(
        files, f"{logs.printable(paths[0])}: holds no .pt; name models that --save_model true wrote"
    )
    by_id = {e.run.start.get("run_id"): e for e in runs if e.ours}
    models = {}
    for path in files:
        try:
            run_id = examine.read_model(path, "meta")["run_id"]
        except Exception as error:
            raise CannotJudge(
                f"{path}: not a model that train_gpt.py saved ({type(error).__name__}); run it with"
                " --save_model true"
            ) from None
        checkable(
            run_id in by_id, f"{path} is of run {run_id}, whose log is not given; name that log too"
        )
        models[run_id] = by_id[run_id], path
    return models


@dataclass
class Case:
    """The input: the record's RunSet and that of --vs, the runs of the two sides, and models of
    runs."""

    options: argparse.Namespace
    whole: RunSet
    apart: RunSet
    runs: list
    others: list
    models: dict

    @property
    def races(self):
        return {**self.whole.races, **self.apart.races}

    @functools.cached_property
    def report(self):
        """The report of stats.py on both sides. Raise CannotJudge or Broken where they do not
        compare."""
        raced = [
            f"side {side[-1].race.side}"
            for side in (self.runs, self.others)
            if side and side[-1].race
        ]
        names = raced if len(raced) == 2 else stats.names_of_sets(self.options)
        # of a ladder, its base
        last = max((e.race.side for e in self.others if e.race), default=None)
        return claim(
            self.runs,
            [e for e in self.others if not e.race or e.race.side == last],
            self.options.target,
            names,
        )

    @property
    def theirs(self):
        """The other side's source if it differs from the record's, else None."""
        return next(
            (
                e.run.script
                for e in self.others
                if e.run.script not in ("", self.runs[0].run.script)
            ),
            None,
        )


def read_case(options):
    """Read the Case that options name. Raise CannotJudge if there is none."""
    whole = read_runs(options.record, options.source)
    apart = read_runs(options.vs, options.vs_source) if options.vs else RunSet()
    runs = whole.runs
    others = apart.runs
    sides = sorted({e.race.side for e in runs if e.race} - {""})
    if not options.vs and len(sides) > 1:
        runs = [e for e in whole.runs if e.race and e.race.side == options.side]
        others = [e for e in whole.runs if e not in runs]
        checkable(
            runs,
            f"--side {options.side}: the race has the sides {', '.join(sides)}; name one of them",
        )
    models = find_models(options.rerun, whole.runs) if options.rerun else {}
    return Case(options, whole, apart, runs, others, models)


def verify(options, case=None):
    """Return all Findings in the order of the rules. Raise CannotJudge if the input allows none."""
    case = case or read_case(options)
    runs = case.runs
    others = case.others
    races = case.races
    data = options.data
    findings = []
    # the runs whose times are compared
    everyone = case.whole.runs
    timed = case.whole.runs + case.apart.runs
    distinct = [*shards_read(everyone).values(), *[e for e in everyone if not e.ours][:1]]
    no_data = "" if data else "name the shards' folder with --data"
    no_others = "" if others else "name the logs of the other side with --vs, or race both sides"

    def each(rule, of, check, lacks=""):
        together(
            rule, lambda: of_all([(e.name, *judged(check, e)) for e in of], len(of)), lacks=lacks
        )

    def together(rule, check, *arguments, lacks=""):
        verdict, reason = (UNKNOWN, lacks) if lacks else judged(check, *arguments)
        findings.append(Finding(rule, verdict, reason))

    each("the log is unaltered", timed, check_log)
    each("one run from its seed", timed, check_beginning)
    each("data stated with digests", everyone, check_shards)
    each(VAL_TOKENS, everyone, check_val_tokens)
    each(SWITCHES, everyone, check_source)
    each(
        "nothing in the environment changes the run",
        timed,
        lambda e: check_environment(e, runs + others if others else ()),
    )
    each(CLOCK, timed, check_clock)
    each("all time outside the clock is named", timed, check_outside)
    together("the wall clock agrees with the race's", check_wall, timed, races)
    each(
        "warm-up does not train",
        everyone,
        lambda e: check_same(e, "end.state_hash", "_warmup", "the warm-up"),
    )
    each("nothing is compiled on the clock", everyone, check_compiles)
    each("validation does not train", everyone, check_validation)
    together(ACCOUNTS, check_accounts, *case.whole)
    if any("turns" in manifest.race for manifest in races.values()):
        together("what the race measured agrees with its runs", check_measured, case, races)
    together(COPIES, check_copies, timed)
    together(LOSS, check_loss, runs, options.target)
    if case.apart.runs:
        together(ACCOUNTS_OTHER, check_accounts, *case.apart)
    together("the same data on both sides", check_data, runs, others, races, lacks=no_others)
    together("the same hardware on both sides", check_hardware, runs, others, lacks=no_others)
    together("the sides ran in turn", check_interleaved, runs, others, races, lacks=no_others)
    together(
        "no more time off the clock than the other side", check_spans, runs, others, lacks=no_others
    )
    together(FASTER, check_faster, case, lacks=no_others)
    each(
        "no validation document in training",
        distinct,
        lambda e: leaks.check_leaks(e, data),
        no_data,
    )
    each("trained on the declared shards", everyone, lambda e: leaks.check_replay(e, data), no_data)
    found = examine_all(case)
    for rule in examine.RULES:
        together(
            rule,
            of_all,
            [(name, *rules[rule]) for name, rules in found],
            len(everyone),
            lacks=(
                ""
                if found
                else (
                    f"0 of {plural(len(everyone), 'run')} examined: name a model of each with"
                    " --rerun"
                )
            ),
        )
    return findings


def examine_all(case):
    """Return [(name, {rule: (verdict, reason)})] of the runs whose models are given."""
    if case.models:
        print(
            f"verify.py: examining {plural(len(case.models), 'model')}, which runs the source in"
            " their logs and takes minutes; if somebody else wrote it, run it in a container",
            file=sys.stderr,
        )
    return [
        (e.name, examine.check_model(e, path, case.options.data))
        for e, path in case.models.values()
    ]


def unseen(case):
    """Return the last line: where the paragraph is on what no rule sees, and the command that runs
    a run again."""
    said = 'What no rule sees, and how to find it: docs/racing.md, "What no rule sees".'
    e = case.runs[0]
    if not e.ours:
        return said
    return (
        f"{said} To run {e.name} again: `.venv/bin/python records/verify.py"
        f" {shlex.quote(case.options.record[0])} --replay {e.run.start.get('seed')}`"
    )


def sum_up(findings, case):
    """Return the content of the page: the verdict, and the findings by verdict with failures last."""
    claims = [f for f in findings if f.rule in CLAIMS]
    findings = sorted(
        (f for f in findings if f not in claims), key=lambda f: VERDICTS.index(f.verdict)
    )
    of = {verdict: [f for f in findings if f.verdict == verdict] for verdict in VERDICTS}
    unchecked = of[UNKNOWN]
    broken = len(of[FAIL])
    trial = any(f.rule == VAL_TOKENS and NO_TARGET in f.reason for f in of[UNKNOWN])
    unjudged = any(not e.ours for e in case.runs + case.others) or any(
        STOPPED in f.reason for f in claims + findings
    )
    head = "NO RULE IS BROKEN" if of[UNKNOWN] else "PASS"
    if broken:
        head = f"FAIL: {plural(broken, 'rule')} {'is' if broken == 1 else 'are'} broken"
    elif trial:
        head = "NO TARGET: no rule is broken"
    said = f"{head}{';' if ':' in head else ':'} {len(of[PASS])} hold"
    if unchecked:
        said += f", {len(unchecked)} {'was' if len(unchecked) == 1 else 'were'} not checked"
    if case.models:
        said += f"; models of {len(case.models)} of {plural(len(case.whole.runs), 'run')}"
    parsed, source = judged(compare_source, case.runs[0], case.theirs)
    compared, report = judged(lambda: case.report)
    return {
        "said": said,
        "verdict": FAIL if broken else INCOMPLETE if of[UNKNOWN] else PASS,
        "counts": {verdict: len(found) for verdict, found in of.items()},
        "status": 1 if broken else 2 if unjudged else 0,
        "claims": [
            {"claim": f.rule, "verdict": OF_CLAIMS[f.verdict], "reason": f.reason} for f in claims
        ],
        "inspect": [f"{f.rule}: {f.reason}" for f in of[UNKNOWN] if INSPECT in f.reason],
        "verdicts": (
            [f"{one.name}, compared with {one.base}: {one.sentence}" for one in report["verdicts"]]
            if compared == PASS
            else []
        ),
        "source": source if parsed == PASS else "",
        "last": unseen(case),
        "broken": [f"{f.rule}: {f.reason}" for f in of[FAIL]],
        "unseen": [
            f"{'; '.join(f.rule for f in found)}: {reason}"
            for reason, found in stats.grouped(unchecked, lambda f: f.reason).items()
        ],
        "findings": findings,
    }


def answer(page):
    """Return what --json prints of the content of a page."""
    return {
        **{
            name: page[name]
            for name in ("verdict", "status", "counts", "said", "claims", "inspect", "source")
        },
        "unseen": page["last"],
        "rules": page["findings"],
    }


def not_judged(reason):
    return {
        "verdict": stats.NOT_JUDGED,
        "status": 2,
        "said": f"not judged: {reason}",
        "claims": [],
        "inspect": [],
        "rules": [],
    }


def parse(arguments):
    parser = argparse.ArgumentParser(
        description="Judge a record by the rules of the speedrun.",
        allow_abbrev=False,
        epilog="Exit status: 0 no rule is broken, whatever the claim; 1 a rule is broken; "
        "2 it cannot be judged.",
    )
    add = parser.add_argument
    add(
        "record",
        nargs="+",
        metavar="RECORD",
        type=logs.or_latest(logs.RACE),
        help="a folder of logs, or logs; or latest, the last race",
    )
    add("--vs", nargs="+", metavar="OTHER", help="logs of the version to beat")
    add(
        "--source",
        metavar="HASH",
        help="judge only runs whose source has a SHA-256 with this beginning",
    )
    add("--vs-source", metavar="HASH", help="the same for --vs")
    add(
        "--side",
        default="a",
        help="letter of the record's side in its race (default: a, the first idea)",
    )
    add(
        "--data",
        metavar="DIR",
        help="folder of the shards: hash and replay them, search training for validation text",
    )
    add(
        "--rerun",
        nargs="+",
        metavar="MODEL",
        help="saved models; RUNS the source in their logs: use a container",
    )
    add(
        "--replay",
        type=int,
        metavar="SEED",
        help="train this seed again; RUNS the source in its log: use a container",
    )
    add(
        "--target", type=float, help="target loss (default: 3.28 on FineWeb, else the logs' target)"
    )
    add(
        "--diff",
        action="store_true",
        help="print the differences between the source and its parent",
    )
    add("-v", "--verbose", action="store_true", help="print each rule with its reason")
    add("--json", action="store_true", help="print one line of JSON instead")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    try:
        case = read_case(options)
        findings = verify(options, case)
        if options.replay is not None:
            ours = [e for e in (*case.runs, *case.whole.runs) if e.ours]
            again = next((e for e in ours if e.run.start.get("seed") == options.replay), None)
            checkable(
                again,
                f"--replay {options.replay}: no log states this seed; name one of "
                f"{join_findings([str(e.run.seed) for e in case.whole.runs])}",
            )
            print(
                f"verify.py: running {again.name} again, by the source in it; if somebody else"
                " wrote that, do it in a container ...",
                file=sys.stderr,
                flush=True,
            )
            findings.append(Finding(AGAIN, *judged(check_again, again, options.data)))
    except CannotJudge as reason:
        if options.json:
            print(logs.show_json(not_judged(reason)))
        return logs.refuse("verify.py", reason)
    page = sum_up(findings, case)
    if options.json:
        print(logs.show_json(answer(page)))
    else:
        parent = case.theirs or leaks.source_of_checkout()
        diff = difference(parent, case.runs[0].run.script) if options.diff else []
        print(pages.show("verify.txt.jinja", **page, diff=diff, verbose=options.verbose))
    if page["status"] == 2:
        print(f"verify.py: {page['said']}", file=sys.stderr)
    return page["status"]


if __name__ == "__main__":
    logs.run_main(main)
