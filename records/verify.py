"""Judges a record by the rules of the speedrun: every rule a program can check is a pass, a fail, or not checkable.

    python records/verify.py RECORD...                 RECORD: a folder of logs, or logs
    python records/verify.py RECORD --vs OTHER         and is it faster on the same hardware? (a race holds both sides)
    python records/verify.py RECORD --data DIR         hashes the shards in DIR; is validation text in training?
    python records/verify.py RECORD --rerun MODEL.pt   evaluates a saved model again, in a process of its own
    --json  for programs

Exit status: 0 nothing fails (what could not be checked is listed), 1 a rule is broken, 2 the input cannot be judged.

A log is what a run says of itself: an honest run passes, a careless or clumsily edited one does not. --rerun believes
only the saved parameters and the source in the log, and it RUNS THAT SOURCE: read it first, as you would before any
program of a stranger's. What a source does to the process that judges it, only its reader can see.
"""

import argparse
import ast
import functools
import gzip
import hashlib
import importlib.util
import json
import math
import multiprocessing
import os
import re
import sys
import tempfile
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

import logs
import stats

ROOT = Path(__file__).resolve().parent.parent
MANIFEST = "race.jsonl"  # which race.py writes beside its logs
PASS, FAIL, UNKNOWN = "pass", "fail", "not checkable"
SHOWN = 3  # findings of one rule that are spelled out
FINEWEB_VAL_TOKENS = 10_485_760  # the public speedrun's rule; other data is validated on as a whole
UNNAMED_S, UNNAMED_PART = 0.5, 0.02  # of the wall clock: what a run may spend under no name
STARTING_S = 60  # from the start of a process to that of its own wall clock
STALL = 0.02  # of a median step: a busy machine makes steps uneven, but not so uneven
FINGERPRINT = 32  # tokens; shorter documents occur twice by chance
HEADER_BYTES = 1024


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
    lines: list  # (step, train_time in ms or None, step_avg in ms or None, whether it is a validation line)

    @property
    def name(self):
        return logs.printable(os.path.basename(self.run.path))

    @property
    def ours(self):
        """Whether the log describes itself. One that does must hold all that ours hold."""
        return self.run.start is not None

    @property
    def race_side(self):
        race = stats.race_of(self.run)
        return race.side if race else ""

    def get(self, where, kind=object):
        """The entry at a path like `end.state_hash.before_warmup`. NotCheckable or Broken if none of this type is."""
        if not self.ours:
            raise NotCheckable("the log holds no description of its run (its form is not this project's)")
        found = {"start": self.run.start, "end": self.run.end or {}}
        for key in where.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        truth_for_number = isinstance(found, bool) and kind not in (bool, object)
        endless = isinstance(found, float) and not math.isfinite(found)
        if found is None or not isinstance(found, kind) or truth_for_number or endless:
            raise Broken(f"the log's {where} is {json.dumps(found)[:60]}; every run of this project's script states it")
        return found


NUMBER = (int, float)
_STEP = re.compile(r"step:(\d{1,18})/\d+ (?:.* )?train_time:(\d+)ms(?: step_avg:([\d.]+|nan)ms)?")


def read_evidence(run, alone):
    """Reads a run's file again, for what logs.py does not keep. alone: the file holds no other run."""
    opener = gzip.open if Path(run.path).suffix == ".gz" else open
    with opener(run.path, "rt", encoding="utf-8", errors="surrogateescape") as file:
        parts = re.split(rf"^{'=' * 100}$", file.read(), flags=re.M)
    texts = [part.removeprefix("\n") for part in parts]
    source = next((text for text in texts[:-1] if text.strip()), None)
    lines = []
    for match in map(_STEP.match, texts[-1].splitlines() if alone else ()):
        if match:
            average = float(match[3]) if match[3] and match[3] != "nan" else None
            lines.append((int(match[1]), int(match[2]), average, "val_loss:" in match[0]))
    return Evidence(run, source.removesuffix("\n") if source and run.start else source, lines)


# The source: what sets a compiler's switches

_SETTINGS = re.compile(r"(?:.*\.)?_inductor(?:\..*)?|(?:.*\.)?_(?:dynamo|functorch)(?:\.(?:.*\.)?config\b.*|\.\*)?"
                       r"|torch\.(?:compiler|\*)\.config\b.*")
# Not the compiler's switches: variables of the launcher, the collectives and the allocator, and where caches lie
_VARIABLE = re.compile(r"(?!TORCHELASTIC|TORCH_NCCL|PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF|"
                       r"(?:TORCHINDUCTOR|TRITON)_CACHE_DIR$)"
                       r"(?:TORCH|PYTORCH|TRITON|INDUCTOR)[A-Z0-9_]*")
_READING = {"os.getenv", *(f"os.environ.{method}" for method in ("get", "items", "keys", "values", "copy"))}
_SETTING = re.compile(r"os\.(?:environ(?:\..*)?|putenv)")


class Scan(ast.NodeVisitor):
    """Finds what sets or hides a compiler's switch, or the environment by another way than os.environ["NAME"] = ...

    Follows names through imports, assignments, getattr and import_module; what it cannot follow is `?`. Any touch of
    the settings counts, reading too: a run has no business there."""

    def __init__(self, tree):
        self.findings = {}  # by line
        self.names = {name: name for name in ("getattr", "exec", "eval", "compile", "vars", "__import__")}
        before = None
        while before != self.names:  # an alias may be used above the line that makes it
            before = dict(self.names)
            for node in ast.walk(tree):
                self.bind(node)
        self.visit(tree)

    def bind(self, node):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            self.names.update({name: bound for _, name, bound in imported(node)})
        elif isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = zip(target.elts, node.value.elts) if isinstance(target, ast.Tuple) and \
                    isinstance(node.value, ast.Tuple) else [(target, node.value)]
                for pair in pairs:
                    self.bind_name(*pair)
        elif isinstance(node, (ast.AnnAssign, ast.NamedExpr)) and node.value:
            self.bind_name(node.target, node.value)

    def bind_name(self, target, value):
        if isinstance(target, ast.Name) and target.id not in self.names and not self.path(value).startswith("?"):
            self.names[target.id] = self.path(value)

    def path(self, node):
        """Dotted path of an expression, like `torch.compile`."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, "?")
        if isinstance(node, ast.Attribute):
            return f"{self.path(node.value)}.{node.attr}"
        if isinstance(node, ast.NamedExpr):
            return self.path(node.value)
        if isinstance(node, ast.Subscript):
            holder, key = node.value, text_of(node.slice) or "*"
            if self.path(holder) == "sys.modules":
                return key
            if isinstance(holder, ast.Call) and self.path(holder.func) == "vars" and holder.args:
                return f"{self.path(holder.args[0])}.{key}"
            if isinstance(holder, ast.Attribute) and holder.attr == "__dict__":
                return f"{self.path(holder.value)}.{key}"
        if isinstance(node, ast.Call) and node.args:
            called = self.path(node.func)
            if called == "getattr" and len(node.args) > 1:
                return f"{self.path(node.args[0])}.{text_of(node.args[1]) or '*'}"
            if called in ("importlib.import_module", "__import__"):
                return text_of(node.args[0]) or "?"
        return "?"

    def found(self, node, what):
        self.findings.setdefault(node.lineno, f"line {node.lineno} {what}: {' '.join(ast.unparse(node).split())[:80]}")

    def visit(self, node):
        path = self.path(node) if isinstance(node, ast.expr) else "?"
        if _SETTINGS.fullmatch(path) or (_SETTINGS.fullmatch(text_of(node) or "")):
            self.found(node, "touches the compiler's settings")
        elif _SETTING.fullmatch(path) and path not in _READING:
            self.found(node, "changes the environment, or hands it on")
        elif isinstance(node, ast.Attribute):  # what it is an attribute of is judged by the whole path
            while isinstance(node, ast.Attribute):
                node = node.value
            if not isinstance(node, ast.Name):
                self.visit(node)
        else:
            super().visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Compare(self, node):
        for part in (node.left, *node.comparators):  # `"torch._dynamo" in sys.modules`, `"NAME" in os.environ`
            if not text_of(part) and self.path(part) != "os.environ":
                self.visit(part)

    def visit_Import(self, node):
        for path, _, _ in imported(node):
            if _SETTINGS.fullmatch(path) and path not in ("torch._dynamo", "torch._functorch"):
                self.found(node, "imports the compiler's settings")

    visit_ImportFrom = visit_Import

    def visit_Subscript(self, node):
        if self.path(node.value) == "os.environ":
            name = text_of(node.slice)
            if not isinstance(node.ctx, ast.Load) and (name is None or _VARIABLE.fullmatch(name)):
                self.found(node, "sets a compiler's environment variable, or one whose name cannot be read")
        else:
            self.generic_visit(node)

    def visit_Call(self, node):
        called, keywords = self.path(node.func), {keyword.arg for keyword in node.keywords}
        first = text_of(node.args[0]) if node.args else None
        compiles = called == "torch.compile" or "torch.compile" in map(self.path, node.args)
        if keywords & {"mode", "options"} and (compiles or called.startswith("?") and called.endswith(".compile")):
            self.found(node, "compiles with a mode or options")
        elif compiles and None in keywords:
            self.found(node, "compiles with arguments that cannot be read")
        elif called in ("exec", "eval", "compile"):
            self.found(node, "runs text that cannot be scanned")
        elif called in ("importlib.import_module", "__import__") and first is None:
            self.found(node, "imports a module whose name cannot be read")
        elif called == "os.environ.setdefault" and first and not _VARIABLE.fullmatch(first):
            return
        self.generic_visit(node)

    def visit_Dict(self, node):
        if any(_VARIABLE.fullmatch(text_of(key) or "") for key in node.keys):
            self.found(node, "names a compiler's environment variable")
        self.generic_visit(node)


def imported(node):
    """(what an import statement brings, the name it gets, what that name stands for), as dotted paths."""
    if isinstance(node, ast.ImportFrom):
        brought = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        return [(path, name, path) for path, name in brought]
    tops = [alias.name.split(".")[0] for alias in node.names]  # `import a.b` names a, `import a.b as c` names a.b
    return [(alias.name, alias.asname or top, alias.name if alias.asname else top)
            for alias, top in zip(node.names, tops)]


def text_of(node):
    """The string that an expression of constants makes, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
    elif isinstance(node, ast.JoinedStr):
        parts = [text_of(value.value if isinstance(value, ast.FormattedValue) else value) for value in node.values]
    else:
        return None
    return None if None in parts else "".join(parts)


@functools.cache
def scan(source):
    """What in a source sets or hides a compiler's switch, a text each. Broken if it is no Python."""
    try:
        return list(Scan(ast.parse(source)).findings.values())
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Broken(f"the source in the log cannot be parsed ({type(error).__name__}: {error})") from None


# Rules for each run: Evidence -> what shows that it is kept; Broken or NotCheckable otherwise

def check_log(e):
    seen = hashlib.sha256((e.source or "").encode("utf-8", "surrogateescape")).hexdigest()
    stated = e.get("start.source_sha256", str)
    if seen != stated:
        raise Broken(f"the source in the log has SHA-256 {seen[:8]}..., its description states {stated[:8]}...")
    loss, decimals = e.get("end.final_val_loss", NUMBER), e.run.loss_decimals
    if not abs(loss - e.run.final_loss) <= 0.501 * 10 ** -decimals:
        raise Broken(f"its end states final_val_loss {loss}, its last validation line {e.run.final_loss:.{decimals}f}")
    steps = e.run.stated_steps
    pairs = [("end.steps", steps), ("start.config.num_steps", steps), ("start.seed", e.get("start.config.seed")),
             ("end.target_val_loss", e.get("start.target_val_loss")),
             ("end.reached", loss <= e.get("end.target_val_loss", NUMBER)),
             ("start.target_val_loss", e.get("start.config.target_val_loss")),
             ("end.train_tokens", steps * e.get("start.config.batch_tokens", int))]
    for where, wanted in pairs:
        if e.get(where, type(wanted)) != wanted:
            raise Broken(f"{where} is {e.get(where)}, by the rest of the log it is {wanted}")
    return "its lines, its description and the hash of its source agree"


def check_shards(e):
    lists = {split: e.get(f"start.shards.{split}", list) for split in ("train", "val")}
    for split, shards in lists.items():
        for shard in shards or [None]:
            if not isinstance(shard, dict) or not re.fullmatch("[0-9a-f]{64}", str(shard.get("sha256"))) or \
                    not isinstance(shard.get("tokens"), int) or not isinstance(shard.get("name"), str):
                raise Broken(f"a {split} shard is stated without name, tokens and SHA-256: {json.dumps(shard)[:80]}")
    for key in ("sha256", "name"):
        both = {shard[key] for shard in lists["train"]} & {shard[key] for shard in lists["val"]}
        if both:
            raise Broken(f"{', '.join(sorted(both))[:80]} is both training and validation data")
    if not re.fullmatch("[0-9a-f]{64}", e.get("end.train_sha256", str)):
        raise Broken("the digest of the tokens consumed is not a SHA-256")
    return f"{len(lists['train'])} training, {len(lists['val'])} validation shards, each with its SHA-256, none in both"


def check_val_tokens(e, wanted=None):
    try:
        check_shards(e)
    except Broken:
        raise NotCheckable("the shards are not stated in full") from None
    shards, counted = e.get("start.shards.val"), e.get("end.val_tokens", int)
    if wanted is None:
        fineweb = all(shard["name"].startswith("fineweb_val_") for shard in shards)
        wanted = FINEWEB_VAL_TOKENS if fineweb else sum(shard["tokens"] for shard in shards) - 1
    if counted != wanted:
        raise Broken(f"{counted:,} tokens were scored, and the rule is {wanted:,}")
    return f"{counted:,} tokens were scored"


def check_source(e):
    if e.source is None:
        raise NotCheckable("the log holds no source")
    if not re.search(r"^\s*(?:import|from)\s+torch\b", e.source, re.M):
        raise NotCheckable("what stands in the log for the source does not import torch: it is not the script")
    findings = scan(e.source)
    if findings:
        raise Broken(several(findings))
    return "nothing in the source sets a compiler's switch"


def check_environment(e):
    if not e.ours or "environment" not in e.run.start:
        raise NotCheckable("the log does not hold the environment that the run was started with")
    found = {name: v for name, v in e.get("start.environment", dict).items() if _VARIABLE.fullmatch(name)}
    if found:
        raise Broken(f"started with {', '.join(f'{name}={v}' for name, v in sorted(found.items()))[:120]}")
    return "no compiler's variable was set at the start"


def check_clock(e):
    timed = [(step, ms, average, val) for step, ms, average, val in e.lines]
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
    if e.ours:
        missing = set(range(1, e.run.stated_steps + 1)) - {step for step, _, _, val in timed if not val}
        if missing:
            raise Broken(f"{len(missing)} steps have no line, the first of them {min(missing)}")
        stated = e.get("end.train_time_ms", NUMBER)
        if abs(stated - timed[-1][1]) > 1:
            raise Broken(f"its end states train_time_ms {stated:.0f}, its last line {timed[-1][1]}")
        if stated > 1000 * e.get("end.wall_seconds", NUMBER):
            raise Broken(f"train_time is {stated / 1000:.1f} s, the wall clock {e.get('end.wall_seconds'):.1f} s")
    steps = [(step, ms) for step, ms, _, val in timed if not val]
    paces = [(step, (ms - before) / max(step - earlier, 1)) for (earlier, before), (step, ms) in zip(steps, steps[1:])]
    middle = np.median([pace for _, pace in paces]) if paces else 0
    stalls = [f"step {step}" for step, pace in paces if pace < STALL * middle]
    if stalls:
        raise Broken(f"a step takes {middle:.0f} ms, and the clock all but stands still at {several(stalls)}")
    below = ", below the wall clock" if e.ours else ""
    return f"train_time rises on {len(timed)} lines and agrees with step_avg{below}"


def check_outside(e, manifest):
    wall, trained = e.get("end.wall_seconds", NUMBER), e.get("end.train_time_ms", NUMBER) / 1000
    spans = e.get("end.seconds_outside_clock", dict)
    if not all(isinstance(seconds, NUMBER) and seconds > -0.05 for seconds in spans.values()):
        raise Broken(f"spans outside the clock are no seconds: {json.dumps(spans)[:100]}")
    unnamed = wall - trained - sum(spans.values())
    if not abs(unnamed) <= UNNAMED_S + UNNAMED_PART * wall:
        raise Broken(f"wall clock {wall:.1f} s, training {trained:.1f} s, named outside {sum(spans.values()):.1f} s: "
                     f"{unnamed:+.1f} s are under no name")
    run_id = e.get("start.run_id")
    measured = next((attempt.get("seconds") for attempt in manifest if attempt["run_id"] == run_id), None)
    if isinstance(measured, NUMBER) and not -0.1 <= measured - wall <= STARTING_S:
        raise Broken(f"the run states {wall:.1f} s by the wall clock, the race that started it measured {measured:.1f}")
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
    return f"of {wall:.1f} s: training {trained:.1f}, {shown}, under no name {unnamed:.1f}"


def check_same(e, before, after, what):
    hashes = [e.get(where, str) for where in (before, after)]
    if len(set(hashes)) > 1 or not all(hashes):
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


def for_each(rule, runs, check):
    """One Finding of a rule that every run must keep."""
    kept, broken, unknown = [], [], []
    for e in runs:
        try:
            kept.append(check(e))
        except Broken as reason:
            broken.append(f"{e.name}: {reason}")
        except NotCheckable as reason:
            unknown.append(str(reason))
    if broken:
        return Finding(rule, FAIL, several(broken))
    if unknown:
        return Finding(rule, UNKNOWN, f"{len(unknown)} of {len(runs)} runs: {unknown[0]}")
    return Finding(rule, PASS, kept[0] if len(runs) == 1 else f"{len(runs)} runs; the first: {kept[0]}")


# Rules for all runs together

def check_accounts(runs, found, manifest):
    """Were these all the runs, and were there to be so many?"""
    remarks = []
    by_side = defaultdict(list)
    for e in runs:
        by_side[stats.race_of(e.run) and stats.race_of(e.run)[:2]].append(e)
    for race, members in by_side.items():
        where = f"side {race[1]}: " if race and race[1] else ""
        if len({e.run.source_sha256 for e in members}) > 1:
            raise Broken(f"{where}the runs are of {len({e.run.source_sha256 for e in members})} sources")
        seeds = Counter(e.get("start.seed", int) for e in members if e.ours)
        if seeds and max(seeds.values()) > 1:
            raise Broken(f"{where}seed {max(seeds, key=seeds.get)} was used {max(seeds.values())} times")
        if race is None:
            continue
        declared = {e.get("start.race.declared_n", int) for e in members}
        numbers = sorted(e.get("start.race.run", int) for e in members)
        if len(declared) > 1 or numbers != list(range(1, max(declared) + 1)):
            raise Broken(f"{where}{' or '.join(map(str, declared))} runs were declared, and here are "
                         f"{', '.join(map(str, numbers[:20]))}")
        remarks.append(f"{where}{len(members)} runs, as declared")
    if len({json.dumps(e.run.start.get("shards"), sort_keys=True) for e in runs if e.ours}) > 1:
        raise Broken("the runs did not all read the same data")
    starts = [e.run.start for e in runs] + [item.start for item in found.rejected]
    here = {str(start.get("run_id")) for start in starts if start}
    for attempt in manifest:
        what = f"run {attempt.get('run')}{attempt.get('side')}, {attempt.get('run_id')}"
        if attempt.get("logged") and attempt.get("run_id") not in here:
            raise Broken(f"{what}, was started ({attempt.get('status')}), and its log is not here")
        if attempt.get("status") != "done":
            remarks.append(f"{what}: {attempt.get('status')}")
    strangers = {str(e.get("start.run_id")) for e in runs if e.ours} - {str(attempt["run_id"]) for attempt in manifest}
    if manifest and strangers:
        raise Broken(f"not started by this race, by its {MANIFEST}: {several(sorted(strangers))}")
    remarks += [f"{logs.printable(os.path.basename(item.path))}: {item.reason}" for item in found.rejected
                if item.kind in (logs.INCOMPLETE, logs.NOT_FINITE)]
    if None in by_side:
        raise NotCheckable("; ".join(["no number of runs was declared: some may be left out", *remarks]))
    return "; ".join(remarks + ([] if manifest else [f"there is no {MANIFEST} of the runs that were started"]))


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
    stated = {e.get("start.target_val_loss", NUMBER) for e in runs if e.ours and
              not e.get("start.shards.val", list)[0]["name"].startswith("fineweb_val_")}
    if len(stated) > 1:
        raise Broken(f"the logs state {len(stated)} targets: {', '.join(map(str, sorted(stated)))}")
    return float(stated.pop()) if stated else stats.DEFAULT_TARGET


def check_hardware(runs, others):
    described = {}
    for e in runs + others:
        facts = {"ranks": e.get("start.ranks", int), **e.get("start.hardware", dict), **e.get("start.versions", dict)}
        described.setdefault(json.dumps(facts, sort_keys=True), (e, facts))
    if len(described) > 1:
        (one, facts), (other, theirs) = list(described.values())[:2]
        differ = [f"{key}: {facts.get(key)} and {theirs.get(key)}" for key in sorted(facts.keys() | theirs.keys())
                  if facts.get(key) != theirs.get(key)]
        raise Broken(f"{one.name} and {other.name} differ in {'; '.join(differ)[:200]}")
    _, facts = next(iter(described.values()))
    return f"{facts.get('device')}, and the same ids, driver and versions (clock rates are not logged)"


def check_interleaved(runs, others):
    order = sorted((e.get("start.started", str), side) for side, es in (("a", runs), ("b", others)) for e in es)
    sides = "".join(side for _, side in order)
    if len(runs) != len(others) or any(a == b for a, b in zip(sides[::2], sides[1::2])):
        raise Broken(f"in the order of their start the runs are {sides[:60]}: not in pairs")
    return f"started as {sides[:60]}"


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

def read_tokens(path):
    """(uint16 [tokens], vocabulary, BOS) of a shard."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    return np.fromfile(path, dtype="<u2", offset=HEADER_BYTES), int(header[3]) or 50257, int(header[4]) or 50256


def find_shard(shard, folder):
    """The file of a shard that a log states. NotCheckable if it is not there, Broken if it holds something else."""
    path = Path(folder) / os.path.basename(shard["name"])
    try:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest() if sys.version_info >= (3, 11) else \
                hashlib.sha256(file.read()).hexdigest()
    except OSError as error:
        raise NotCheckable(f"{path}: {error.strerror}; name the folder of the shards with --data") from None
    if digest != shard["sha256"]:
        raise Broken(f"{path} has SHA-256 {digest[:8]}..., the log states {shard['sha256'][:8]}...")
    return path


def check_data(e, folder):
    check_shards(e)
    paths = {split: [find_shard(shard, folder) for shard in shards] for split, shards in e.get("start.shards").items()}
    documents, short = defaultdict(list), 0
    for path in paths["val"]:
        tokens, _, bos = read_tokens(path)
        for i, body in enumerate(np.split(tokens, np.flatnonzero(tokens == bos))[1:]):
            if len(body) > FINGERPRINT:
                documents[int(fingerprints(body[1:FINGERPRINT + 1])[0])].append((f"{path.name} document {i}", body[1:]))
            else:
                short += 1
    heads = np.sort(np.fromiter(documents, dtype=np.uint64, count=len(documents)))
    shared = {}
    for path in paths["train"] if len(heads) else ():
        tokens, _, _ = read_tokens(path)
        for begin in range(0, len(tokens), 1 << 22):
            prints = fingerprints(tokens[begin:begin + (1 << 22) + FINGERPRINT - 1])
            for at in np.flatnonzero(heads[np.searchsorted(heads[:-1], prints)] == prints):
                for name, body in documents[int(prints[at])]:
                    if np.array_equal(tokens[begin + at:begin + at + len(body)], body):
                        shared.setdefault(name, f"{name} is in {path.name} at token {begin + at}")
    if shared:
        raise Broken(f"{len(shared)} validation documents are in the training data; {next(iter(shared.values()))}")
    return (f"the shards are those of the log; none of {sum(map(len, documents.values()))} validation documents is in "
            f"training ({short} of fewer than {FINGERPRINT} tokens were not sought)")


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
PROBE_TOKENS, PROBES = 1024, 12
BLOCK = 128  # of FlexAttention: where a mistaken block mask leaks


def rerun(source, model_path, shard_paths, stated):
    """Loads a saved model with the source of its log and tests both. stated: what the log says of them.

    Returns {rule: (verdict, reason)}. What the evaluation needs of the source: load_model(path, device), Windows, and a
    model with forward(inputs, targets, windows) -> summed loss, logits(inputs, windows), trunk and lm_head.logits."""
    import torch
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "judged.py"
        path.write_text(source, encoding="utf-8", errors="surrogateescape")
        spec = importlib.util.spec_from_file_location("judged", path)
        module = sys.modules["judged"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    model, saved = module.load_model(model_path, device)
    shards = [read_tokens(path) for path in shard_paths]
    examiner = Examiner(model, module.Windows(*saved["windows"]), np.concatenate([tokens for tokens, _, _ in shards]),
                        *shards[0][1:], saved["config"])
    verdicts, before = {}, examiner.state()
    tensors = torch.load(model_path, weights_only=True, map_location="cpu")["model"]
    verdicts["the saved model is the log's"] = judged(lambda: check_saved(tensors, saved["config"], stated))
    verdicts["independent validation loss"] = judged(lambda: examiner.check_loss(stated))
    verdicts["later tokens do not reach earlier logits"] = judged(examiner.check_causality)
    verdicts["targets do not reach logits"] = judged(examiner.check_targets)
    verdicts["probabilities sum to 1"] = judged(examiner.check_probabilities)
    verdicts["evaluation leaves the model as it was"] = judged(lambda: examiner.check_state(before))
    return verdicts


def judged(check):
    """(verdict, reason) of a check. What a stranger's model raises is a finding too."""
    try:
        return PASS, check()
    except NotCheckable as reason:
        return UNKNOWN, str(reason)
    except Exception as reason:
        return FAIL, str(reason) if isinstance(reason, Broken) else f"{type(reason).__name__}: {reason}"


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

    def __init__(self, model, windows, stream, vocab_size, bos, config):
        self.model, self.windows, self.stream, self.vocab_size, self.bos = model, windows, stream, vocab_size, bos
        self.config, self.device = config, model.scalars.device
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

    def losses_by_hand(self, tokens, targets):
        """Sum of -log p(target). The head goes over parts of the sequence, or a long one's logits would not fit."""
        import torch
        total = 0.0
        with torch.no_grad():
            for x, wanted in zip(self.model.trunk(self.tensor(tokens), self.windows)[:len(tokens)].split(4096),
                                 torch.from_numpy(targets.astype(np.int64)).to(self.device).split(4096)):
                logits = self.model.lm_head.logits(x).float()
                total += float((logits.logsumexp(1) - logits.gather(1, wanted[:, None])[:, 0]).double().sum())
        return total

    def check_loss(self, stated):
        scored, length = stated["val_tokens"], self.config["val_len"]
        if len(self.stream) < scored + 1:
            raise Broken(f"{scored:,} tokens are said to be scored, and the shards hold {len(self.stream):,}")
        inputs, targets = self.stream[:scored], self.stream[1:scored + 1]
        total = sum(self.losses_by_hand(inputs[at:at + length], targets[at:at + length])
                    for at in range(0, scored, length))
        loss, tolerance = total / scored, TOLERANCE[self.config["dtype"]]
        text = f"{loss:.5f} over {scored:,} tokens, the log states {stated['loss']:.5f}"
        if not abs(loss - stated["loss"]) <= tolerance:
            raise Broken(f"{text}: more than {tolerance} apart")
        return text

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
        return f"other tokens from {asked} places on (random, edges of blocks, document joins) leave all earlier logits"

    def check_targets(self):
        truth = np.append(self.probe[1:], self.bos)
        random = self.draw.integers(0, self.vocab_size, len(truth))
        others = [truth, random, np.full(len(truth), random[0])]
        base = self.logits(self.probe)
        surprise = -base.log_softmax(1)
        for targets in others:
            seen = self.forward(self.probe, targets)
            wanted = float(surprise.gather(1, self.tensor(targets)[:len(truth), None].long()).sum())
            if not abs(seen - wanted) <= self.tolerance * len(truth):
                raise Broken(f"forward's mean loss is {seen / len(truth):.5f}, the logits' {wanted / len(truth):.5f}")
            by_parts = self.losses_by_hand(self.probe, targets)
            if not abs(by_parts - wanted) <= self.tolerance * len(truth):
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
    rule = "the model evaluated again"
    try:
        check_shards(e)
        folder = folder or os.path.dirname(ROOT / e.get("start.config.val_files", str))
        paths = [find_shard(shard, folder) for shard in e.get("start.shards.val")]
        stated = {"loss": e.get("end.final_val_loss", NUMBER), "val_tokens": e.get("end.val_tokens", int),
                  "state_hash": e.get("end.validation_hash.after", str), "config": e.get("start.config", dict)}
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            verdicts = pool.submit(rerun, e.source or "", os.path.abspath(model_path), paths, stated).result()
    except NotCheckable as reason:
        return [Finding(rule, UNKNOWN, str(reason))]
    except BrokenProcessPool:
        return [Finding(rule, FAIL, "the process that ran the log's source died")]
    except Exception as error:  # whatever a stranger's source raises
        return [Finding(rule, FAIL, str(error) if isinstance(error, Broken) else
                        f"the log's source cannot load the model ({type(error).__name__}: {error})"[:300])]
    return [Finding(rule, *verdict) for rule, verdict in verdicts.items()]


# Together

def read_manifest(paths):
    """What race.py wrote down in the folders of these paths: the last word on each run that was started."""
    attempts = {}
    for folder in dict.fromkeys(path if os.path.isdir(path) else os.path.dirname(path) or "." for path in paths):
        try:
            text = (Path(folder) / MANIFEST).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        for line in text.splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                raise CannotJudge(f"{Path(folder) / MANIFEST}: no JSON: {line[:60]!r}; restore the file") from None
            if isinstance(event, dict) and event.get("run_id"):
                attempts.setdefault(str(event["run_id"]), {}).update(event)
    return list(attempts.values())


def read_runs(paths):
    """(Evidence of each run, what logs.read found). CannotJudge if there is none, or a file cannot be read."""
    found = logs.read(paths)
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    if unreadable or not found.runs:
        reasons = several([f"{logs.printable(item.path)}: {item.reason}" for item in unreadable or found.rejected])
        raise CannotJudge(f"no run to judge ({reasons or 'nothing was found'}); name a folder of logs, or logs")
    counts = Counter(run.path for run in found.runs)
    return [read_evidence(run, counts[run.path] == 1) for run in found.runs], found


def verify(options):
    """All Findings, in the order of the table. CannotJudge if the input allows none."""
    everyone, found = read_runs(options.record)
    manifest = read_manifest(options.record)
    sides = sorted({e.race_side for e in everyone} - {""})
    runs, others = everyone, read_runs(options.vs)[0] if options.vs else []
    if len(sides) > 1 and not options.vs:
        runs = [e for e in everyone if e.race_side == options.side]
        others = [e for e in everyone if e.race_side != options.side]
        if not runs:
            raise CannotJudge(f"--side {options.side}: the race has the sides {', '.join(sides)}; name one of them")

    def together(rule, check, *arguments):
        return Finding(rule, *judged(lambda: check(*arguments)))

    findings = [
        for_each("the log is unaltered", everyone, check_log),
        for_each("data stated with digests", everyone, check_shards),
        for_each("exactly the stated validation tokens", everyone, lambda e: check_val_tokens(e, options.val_tokens)),
        for_each("no compiler flags in the source", everyone, check_source),
        for_each("no compiler flags in the environment", everyone, check_environment),
        for_each("the clock is honest", everyone, check_clock),
        for_each("all time outside the clock is named", everyone, lambda e: check_outside(e, manifest)),
        for_each("warm-up does not train", everyone, lambda e: check_same(
            e, "end.state_hash.before_warmup", "end.state_hash.after_warmup", "the warm-up")),
        for_each("nothing is compiled on the clock", everyone, check_compiles),
        for_each("validation does not train", everyone, lambda e: check_same(
            e, "end.validation_hash.before", "end.validation_hash.after", "validation")),
        together("every run is accounted for", check_accounts, everyone, found, manifest),
        together("mean loss below target, p < 0.01", lambda: check_loss(runs, choose_target(runs, options.target))),
    ]
    if others:
        findings += [together("the same hardware on both sides", check_hardware, runs, others),
                     together("the sides ran in turn", check_interleaved, runs, others),
                     together("faster than the other side, p < 0.01", check_faster, runs, others)]
    if options.data:
        distinct = {json.dumps(e.run.start.get("shards"), sort_keys=True) if e.ours else "": e for e in everyone}
        findings.append(for_each("no validation document in training", list(distinct.values()),
                                 lambda e: check_data(e, options.data)))
    if options.rerun:
        findings += check_rerun(options.rerun, everyone, options.data)
    return findings


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
        verdict = FAIL if counts[FAIL] else PASS
        print(json.dumps({"verdict": verdict, "rules": [finding._asdict() for finding in findings]}, indent=1))
    else:
        rows = [("FAIL" if f.verdict == FAIL else f.verdict, f.rule, f.reason) for f in findings]
        print("\n".join(logs.columns(rows)))
        print(f"\n{counts[PASS]} rules pass, {counts[FAIL]} fail, {counts[UNKNOWN]} could not be checked")
    return 1 if counts[FAIL] else 0


if __name__ == "__main__":
    logs.run_main(main)
