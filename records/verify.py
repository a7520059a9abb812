"""Judges a record by the rules of the speedrun: every rule a program can check is a pass, a fail, or not checkable.

The first line is the verdict; what holds, what no log shows and which flag would, and what is broken follow in at most
20; then each rule with its reason. The claim (loss, faster) stands apart from the rules. A public log is judged by the
rules of its day, which nvidia-smi wrote into it: a later rule that it does not keep is a remark.

    python records/verify.py RECORD...                 RECORD: a folder of logs, or logs
    python records/verify.py RECORD --vs OTHER         and is it faster on the same hardware? (a race holds both sides)
    python records/verify.py RECORD --data DIR         hashes the shards in DIR, packs its batches anew, seeks
                                                       validation text in training
    python records/verify.py RECORD --rerun MODEL...   evaluates saved models again, one of each run at best: examine.py
    python records/verify.py RECORD --diff             and prints how the source differs from its parent: the other
                                                       side's, or this checkout's train_gpt.py
    --json  for programs; its verdict is pass, fail, or incomplete: nothing fails, and not all could be checked

Exit status: 0 nothing fails (what could not be checked is listed), 1 a rule is broken or the claim not shown, 2 it
cannot be judged: no input, or logs that describe nothing of their runs.

A log is what a run says of itself. race.py's own times stand against its clock, --data against its digests, --rerun
against its losses; a forgery in which all agrees shows only where the run is run again, and the last line says how.
"""

import logs

logs.end_at_ctrl_c(__name__)  # scipy takes seconds to import

import argparse
import ast
import codecs
import difflib
import functools
import hashlib
import io
import itertools
import json
import math
import os
import re
import shlex
import sys
import tokenize
from collections import Counter, defaultdict
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np
import scipy.ndimage
import scipy.stats

import examine
import leaks
import pages
import stats
from leaks import (FAIL, NUMBER, PASS, ROOT, SHA256, UNKNOWN, Broken, demand, is_number, judged, several, shards_of)
from stats import CannotJudge

INCOMPLETE, REMARK = "incomplete", "remark"  # of all rules together; of a rule that came after the run
VERDICTS = PASS, REMARK, UNKNOWN, FAIL  # in the order of the page
ALPHA = 0.01
LOSS, FASTER = CLAIMS = "mean loss below target, p < 0.01", "faster than the other side, p < 0.01"
ACCOUNTS, SWITCHES = "every run is accounted for", "no compiler flags in the source"
# The days on which the public speedrun's README got these rules; others are as old as it, or need a log of ours
HOLDS_FROM = {LOSS: "2024-12-04", ACCOUNTS: "2024-12-04", SWITCHES: "2025-02-02"}
GPT2_VOCAB = range(50257, 51200)  # rows of its embedding, filled up
# The public track of larger models, known by the loss that it is to reach, may set one switch: its README says so
MEDIUM_LOSS, MEDIUM_WITHIN = 2.92, 0.05
FINEWEB_VAL_TOKENS = 10_485_760  # the public speedrun's rule; other data is validated on as a whole
UNNAMED_S = 0.02  # of the wall clock: what a run may spend under no name; honest ones spend 0.0007
# The race's own times of the lines: how late one may be seen, for one stretch between validations and for all together
STAMP_S, STAMP_MOST_S = 0.1, 0.3
HOST_AHEAD = 5  # steps that the host enqueues before it waits for a GPU: their lines state when that was
# From the launch of a run to the start of its own wall clock, and after that one's end: at most so long, less for a
# short run, where it could hide as much as the run itself; how far the sides' medians may differ in it
STARTING_S, STARTING_LEAST_S, STARTING_PART = 60, 20, 0.2
SIDES_S, SIDES_PART = 3, 0.01
SETTING_UP = "warmup", "joining", "setup", "compile", "preflight"  # spans before the first step
SLOWER_PART = 1.5  # of what a side's training takes longer than the other's: what its validation and warm-up may
SETTING_UP_S = 0.5  # how much longer the record's side may set up, as it does where its model is larger
CLOCKS_S = 2  # times of day are stated in whole seconds
PAUSE_S = 10  # by which the time between two runs may exceed the race's median
LAST_LINES = 10  # whose training losses are compared where a run was stopped
STOPS = 2  # runs of a side that may have been stopped; one that is slow is told from chance by its repeat alone
STALL, NEIGHBOURS = 0.2, 20  # of the median of its neighbours: a busy machine makes steps uneven, but not so short
TELLING_LINES, ALIKE_LINES = 8, 30  # fewer times agree by chance, and fewer losses tell nothing
# Correlations of what two seeds made: honest losses have 0.5 at most where there are 100, and of so few that their
# errors are large up to 0.7. They are compared up to so many lines apart, or a fourth of them
ALIKE, ALIKE_ERRORS, ALIKE_OF_FEW, APART = 0.6, 5, 0.9, 50
# Nats below ln(vocabulary) that rounding may bring to an untrained model; and a head of small random weights, which may
# be the embedding too and so know a little of the tokens that it reads: 0.075 were seen
KNOWS_NOTHING, KNOWS_LITTLE = 0.005, 0.3

# Variables: the compiler's; the launcher's, the allocator's, places of caches and how much is said are not meant. What
# changes Python or a library is meant, but for what is known to change neither, as images of containers set it.
# Libraries are taken from the system's places: no log tells what another one holds
COMPILERS = (r"(?!TORCHELASTIC|TORCH_NCCL|TORCH_CPP_LOG_LEVEL|PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF"
             r"|(?:TORCHINDUCTOR|TRITON)_CACHE_DIR\b)(?:TORCH|PYTORCH|TRITON|INDUCTOR)[A-Z0-9]*_[A-Z0-9_]+")
_VARIABLE = re.compile(rf"{COMPILERS}=.*|(?:PYTHON|LD_)\w*=.*", re.S)
_INNOCUOUS = re.compile(
    r"PYTHON(?:UNBUFFERED|DONTWRITEBYTECODE|HASHSEED|IOENCODING|UTF8|FAULTHANDLER|NOUSERSITE|SAFEPATH|_VERSION|_SHA256"
    r"|_PIP_VERSION|_SETUPTOOLS_VERSION|_GET_PIP_\w+)=.*"
    r"|PYTHONPATH=|PYTHONWARNINGS=[^.]*|(?:TORCH|TRITON)_HOME=.*|PYTORCH_VERSION=.*"
    r"|TORCH_(?:EXTENSIONS_DIR|LOGS|DISTRIBUTED_DEBUG|SHOW_CPP_STACKTRACES|CUDA_ARCH_LIST)=.*"
    r"|LD_LIBRARY_PATH=(?!.*/\.\.)(?:(?:/usr/local/(?:cuda(?:-[\d.]+)?|nvidia)|(?:/usr)?/lib(?:32|64)?)"
    r"(?:/[^:]*)?(?::|$)|:)*")
# Statements that set a compiler's switch, and those that a reader should look at: the ways of hiding one have no end
_SETTING = re.compile(
    r"\b_inductor\b|\b_(?:dynamo|functorch)\b[\w. ]*\b(?:config\b|import \*)|\bcompiler\.config\b|triton\.knobs"
    r"|_TorchCompile|\bcompile\(.*\b(?:mode|options)=" rf"|environb?\[b?['\"]{COMPILERS}['\"]\] \|?=(?!=)"
    rf"|\b(?:setdefault|putenv)\(b?['\"]{COMPILERS}|environ.*['\"( ]{COMPILERS}(?:['\"]:|=)", re.S)
_MEDIUM = re.compile(r": torch\._inductor\.config\.coordinate_descent_tuning = True$")
_LOOK = re.compile(
    r"(?<![\w.])(?:exec|eval|compile|globals|vars|__import__|setattr|delattr|attrgetter)\("
    r"|\b(?:ctypes|marshal|runpy|pickle|codecs|base64|importlib|subprocess|mock|gc)\b"
    r"|\bos\.(?:exec|spawn|system|popen|putenv|posix)|sys\.(?:modules|path\b|set\w+)"
    r"|__(?:dict|globals|builtins|getattribute|subclasses|loader|spec|code|class)__|getattr\((?:torch|os|sys|time)\b"
    r"|\benviron\b(?!\.get\()|\b(?:time\.\w+|\w*perf_counter\w*|\w*monotonic\w*) = |torch\.\w+ = ", re.S)
_LAYER = re.compile(r"-|(?=[^+])(?:c?(?P<window>[SLP])(?P<table>\d?))?(?P<mlp>M?)(?:\+\d+)?")  # parse_layers' grammar
DATA_FLAGS = {"preset", "train_files", "train_shards"}
_FILES = re.compile(r"^-{10,}\n# (\S+\.py)\n-{10,}\n", re.M)  # between files that a log holds behind one another
MOST_CHARACTERS = 1 << 20  # of a source: its tree takes a thousand times the memory
# What a public index distributes and runs of this kind import. Any other module is code that the log does not hold
_PACKAGES = {"torch", "torchvision", "torchao", "triton", "numpy", "scipy", "matplotlib", "pandas", "numba", "tiktoken",
             "tokenizers", "transformers", "datasets", "safetensors", "huggingface_hub", "kernels", "flash_attn",
             "flash_attn_interface", "flash_attn_3", "xformers", "einops", "tqdm", "rich", "requests", "yaml", "wandb",
             "psutil", "pynvml", "nvtx", "cuda", "cutlass", "packaging", "dotenv"}


class Finding(NamedTuple):
    rule: str
    verdict: str
    reason: str


@dataclass(frozen=True)
class Evidence:
    """One run as logs.py read it."""
    run: logs.Run

    @property
    def name(self):
        return logs.printable(os.path.basename(self.run.path))

    @property
    def ours(self):
        """Whether the log describes itself. One that does must hold all that ours hold."""
        return self.run.start is not None

    @functools.cached_property
    def race(self):
        return stats.race_of(self.run)

    def get(self, where, kind=object):
        """The entry at a path like `end.state_hash.before_warmup`. CannotJudge or Broken if none of this type is."""
        if not self.ours:
            raise CannotJudge("the log holds no description of its run (its form is not this project's)")
        found = {"start": self.run.start, "end": self.run.end}
        for key in where.split("."):
            found = found.get(key) if isinstance(found, dict) else None
        demand(found is not None and isinstance(found, kind) and (kind not in (int, NUMBER) or is_number(found)),
               f"the log's {where} is {json.dumps(found)[:60]}; every run of this project's script states it")
        return found

    def digest(self, where):
        found = self.get(where, str)
        demand(SHA256.fullmatch(found), f"the log's {where} is {found[:20]!r}, no SHA-256")
        return found

    def train_digest(self):
        return self.digest("end.train_digest" if "train_digest" in (self.run.end or {}) else "end.train_sha256")

    def must_state(self, by, *pairs, name=""):
        """Broken unless at each where of (where, wanted) the log says what is wanted, by whom it is."""
        for where, wanted in pairs:
            stated = self.get(where, type(wanted))
            demand(stated == wanted, f"{name}{where} is {stated}, by {by} it is {wanted}")

    def planned(self):
        """(steps, tokens of all steps): where each step has as many, the config alone tells."""
        if "planned" in self.run.start:
            return self.get("start.planned.steps", int), self.get("start.planned.train_tokens", int)
        steps = self.get("start.config.num_steps", int)
        return steps, steps * self.get("start.config.batch_tokens", int)

    def flagged_race(self):
        """Which run of which race its flags say it is, in the words of start.race; None if of none."""
        config = self.get("start.config", dict)
        values = [config.get(key) for key in ("race_id", "race_run", "race_runs", "race_side")]  # the older words
        if "race" in config:
            words = re.fullmatch(r"([^:]*):(\d{1,14}):(\d{1,14}):([^:]*)", self.get("start.config.race", str))
            values = [words[1], int(words[2]), int(words[3]), words[4]] if words else [config["race"]]
        return dict(zip(("race_id", "run", "declared_n", "side"), values)) if values[0] else None


def moment(text):
    """Seconds since 1970 of a time in ISO form, or None."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


# Rules for each run: Evidence -> what shows that it is kept; Broken or CannotJudge otherwise

def check_log(e):
    run, stated, kinds = e.run, e.get("start.source_sha256", str), "[srxo]" if e.run.resumed else "s"
    good = re.match(f"d?{kinds}*(?:ep?)?(?:(?<=p)xo*)?", run.shape).end()
    demand(run.separators == 2, f"{run.separators} separators divide it, and the script writes 2")
    demand(re.fullmatch(f"d{kinds}+ep(?:xo*)?", run.shape), f"line {good + 1} after the last separator is none that "
           f"the script writes there{f' ({run.odd})' if run.odd else ''}")
    demand((run.source or "").strip(), "it holds no source")
    seen = hashlib.sha256(run.source.removesuffix("\n").encode("utf-8", "surrogateescape")).hexdigest()  # as its file
    demand(seen == stated, f"the source in the log has SHA-256 {seen[:8]}..., its description states {stated[:8]}...")
    loss, decimals = e.get("end.final_val_loss", NUMBER), run.loss_decimals
    demand(abs(loss - run.final_loss) <= 0.501 * 10 ** -decimals,
           f"its end states final_val_loss {loss}, its last validation line {run.final_loss:.{decimals}f}")
    (steps, tokens), raced, run_id = e.planned(), e.flagged_race(), e.get("start.run_id", str)
    demand(steps == run.stated_steps and run.start.get("race") == raced,
           f"its plan has {steps} steps, its lines {run.stated_steps}; start.race is "
           f"{json.dumps(run.start.get('race'))[:120]}, by its flags {json.dumps(raced)[:120]}")
    e.must_state("the rest of the log", *[("end.resumed", len(run.resumed))] * ("planned" in run.start),
                 ("end.steps", steps), ("start.seed", e.get("start.config.seed")), ("end.train_tokens", tokens),
                 ("end.target_val_loss", e.get("start.target_val_loss")),
                 ("end.reached", loss <= e.get("end.target_val_loss", NUMBER)),
                 ("start.target_val_loss", e.get("start.config.target_val_loss")),
                 ("start.config.run_id", run_id if raced else e.get("start.config.run_id")))
    e.digest("end.final_state_hash")
    every = e.get("start.config", dict).get("train_loss_every")  # which older logs lack
    for line in run.steps if is_number(every) else ():
        has, wants = line.train_loss is not None, every > 0 and not line.validation and line.step % every == 0
        demand(has == wants, f"step {line.step} states {'a' if has else 'no'} train_loss; by train_loss_every {every} "
               f"it states {'one' if wants else 'none'}")
    demand(moment(e.get("start.started", str)), f"it started at {e.get('start.started')[:40]!r}, which is no time")
    return "its lines, its description and the hash of its source agree"


def embedding_rows(e):
    """Rows of the embedding, filled up: what the number of parameters leaves for it, the head and the value tables. A
    log older than tables of n-grams has none."""
    layers, width = e.get("start.config.layers", str), e.get("start.config.model_dim", int)
    words = [_LAYER.fullmatch(word) for word in layers.split()]
    if None in words:
        raise CannotJudge(f"start.config.layers is {layers[:40]!r}, no layers of {stats.SCRIPT}: what its parameters "
                          "are cannot be told")
    tables = 2 + len({word["table"] for word in words} - {None, ""})
    matrices = sum(4 * bool(word["window"]) + 8 * bool(word["mlp"]) for word in words)
    ngrams = re.findall(r"\d:(\d{1,12}):(\d{1,12})", str(e.get("start.config", dict).get("ngrams", "")))
    rest = e.get("start.parameters", int) - matrices * width ** 2 - sum(int(rows) * int(wide) for rows, wide in ngrams)
    return int(rest / max(1, tables * width))


def check_beginning(e):
    """A head of zeros gives each token the same probability, whatever is below it."""
    e.get("start.seed", int)
    demand(not e.run.disqualified, f"{e.run.disqualified}; such runs count for no record")
    first = [e.run.validations[0].loss] if e.run.validations[0].step == 0 else []
    config = e.get("start.config", dict)
    weighted = "loss_weights" in str(config.get("stages")) or config.get("loss_weights", [1]) != [1]
    if not weighted:  # else it is another sum
        first += [step.train_loss for step in e.run.steps if step.step == 1 and step.train_loss is not None]
    if not first:
        raise CannotJudge("no line states a loss before the first step")
    nothing = math.log(max(1, embedding_rows(e) // 128 * 128))
    less = KNOWS_LITTLE if config.get("head_init") else KNOWS_NOTHING
    demand(min(first) >= nothing - less, f"its loss before the first step is {min(first):.4f}, and a model that knows "
           f"nothing has {nothing:.4f}: it began with trained weights")
    more = "" if max(first) < nothing + KNOWS_NOTHING else f" and more than the {nothing:.4f} of a head of zeros"
    return f"in one piece from its seed; its loss before the first step is {first[0]:.4f}, that of no knowledge{more}"


def check_shards(e):
    lists = shards_of(e)
    for key in ("sha256", "name"):
        both = {shard[key] for shard in lists["train"]} & {shard[key] for shard in lists["val"]}
        demand(not both, f"{', '.join(sorted(both))[:80]} is both training and validation data")
    distinct = len({shard["sha256"] for shard in lists["train"]})
    demand(distinct == len(lists["train"]), f"its {len(lists['train'])} training shards have {distinct} digests: one "
           "is read twice, and a record reads each once")
    epochs = e.get("start.config", dict).get("epochs", 1)
    demand(epochs == 1, f"its training shards are read {epochs} times (--epochs), and a record reads each once")
    e.train_digest()
    return f"{len(lists['train'])} training, {len(lists['val'])} validation shards, each with its SHA-256, none in both"


def is_fineweb(e):
    """Whether the public speedrun's rules hold: by the preset, by the shards' names, or, since files can be renamed,
    by a vocabulary of GPT-2's size, which the number of parameters gives away, and as many tokens as they ask for."""
    try:
        shards = shards_of(e)["val"]
    except Broken:
        raise CannotJudge("the shards are not stated in full") from None
    if e.run.start.get("preset") == "speedrun" or all(shard["name"].startswith("fineweb_val_") for shard in shards):
        return True
    return embedding_rows(e) in GPT2_VOCAB and sum(shard["tokens"] for shard in shards) > FINEWEB_VAL_TOKENS


def check_val_tokens(e):
    counted = e.get("end.val_tokens", int)
    wanted = FINEWEB_VAL_TOKENS if is_fineweb(e) else sum(shard["tokens"] for shard in shards_of(e)["val"]) - 1
    demand(counted == wanted, f"{counted:,} tokens were scored, and the rule is {wanted:,}")
    return f"{counted:,} tokens were scored"


class Scanned(NamedTuple):
    """Statements that set a switch, {line: statement} to look at, modules that neither log nor index holds."""
    findings: list
    look: dict
    foreign: list
    imports_torch: bool


def other_encoding(text):
    """What else than UTF-8 Python takes a file for; None if it is that. A log may have put empty lines before it."""
    raw = text.encode("utf-8", "surrogateescape")
    try:
        name = codecs.lookup(tokenize.detect_encoding(io.BytesIO(raw.lstrip()).readline)[0]).name
    except SyntaxError:
        name = "no text that Python reads"
    return None if name in ("utf-8", "utf-8-sig") and raw.decode("utf-8", "replace") == text else name


@functools.lru_cache(maxsize=64)
def scan(source):
    """Scanned of a source, which may be several files. SyntaxError if it is no Python that can be read."""
    if len(source) > MOST_CHARACTERS:
        raise SyntaxError(f"{len(source):,} characters, and {MOST_CHARACTERS:,} at most are scanned")
    findings, look, modules, before = [], defaultdict(str), set(), 0
    first, *others = _FILES.split(source)
    for text in (first, *others[1::2]):
        if encoding := other_encoding(text):
            return Scanned([f"from line {before + 1} on it is not UTF-8 but {encoding}, so what Python reads is not "
                            "what stands here"], {}, [], True)
        try:
            for node in ast.walk(ast.parse(text)):
                says_nothing = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)  # a docstring
                if says_nothing or not isinstance(node, ast.stmt):
                    continue  # what is no statement is a part of one
                parts = [child for child in ast.iter_child_nodes(node) if isinstance(child, (ast.expr, ast.withitem))]
                shown = " ".join(map(ast.unparse, parts if hasattr(node, "body") else [node]))
                if _SETTING.search(shown):
                    findings.append(f"line {before + node.lineno}: {' '.join(shown.split())[:80]}")
                elif _LOOK.search(shown):
                    look[before + node.lineno] += shown
                paths = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                paths += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
                modules |= {path.split(".")[0] or "a module beside it" for path in paths}
        except (ValueError, RecursionError, MemoryError) as error:
            raise SyntaxError(f"{type(error).__name__}: {error}") from None
        before += text.count("\n") + 3
    held = sys.stdlib_module_names | _PACKAGES | {name.removesuffix(".py") for name in others[::2]}
    return Scanned(findings, dict(sorted(look.items())), sorted(modules - held), "torch" in modules)


@functools.lru_cache(maxsize=64)
def difference(parent, source):
    return list(difflib.unified_diff(parent.splitlines(), source.splitlines(), "parent", "source", lineterm="", n=1))


def check_source(e, theirs):
    """theirs: the other side's source, or None."""
    failed = Broken if e.ours else CannotJudge
    if not e.run.source:
        raise failed("the log holds no source")
    what = "what stands in the log for the source"
    try:
        found = scan(e.run.source)
    except SyntaxError as error:
        raise failed(f"{what} is no Python that this one can read ({str(error)[:80]})") from None
    medium = not e.ours and abs(e.run.final_loss - MEDIUM_LOSS) < MEDIUM_WITHIN
    findings = [text for text in found.findings if not (medium and _MEDIUM.search(text))]
    demand(not findings, several(findings))
    doubts = [f"imports {', '.join(found.foreign)}, whose code the log does not hold"] * bool(found.foreign)
    doubts += ["does not import torch: it is not the script"] * (not found.imports_torch)
    if doubts:
        raise failed(f"{what} {'; '.join(doubts)}")
    text = "nothing in the source sets a compiler's switch in plain words"
    text += f", but for {found.findings[0]}, which this track may" if found.findings else ""
    ours = scan((ROOT / stats.SCRIPT).read_text(encoding="utf-8")).look.values()
    new = [line for line, shown in found.look.items() if shown not in ours]
    if found.look:
        lines = [f"{line} (new)" for line in new] + [str(line) for line in found.look if line not in new]
        text += f"; look at its lines {', '.join(lines[:12])}{' ...' if len(lines) > 12 else ''}"
        text += f"; new: not in this checkout's {stats.SCRIPT}" if new else ""
    if theirs and e.ours:
        changed = len([line for line in difference(theirs, e.run.source.removesuffix("\n")) if line[0] in "+-"][2:])
        text += f"; {changed} lines differ from the other side's (--diff)" if changed else "; it is the other side's"
    return text


def check_environment(e):
    settings = [f"{name}={value}" for name, value in sorted(e.get("start.environment", dict).items())]
    found = [text for text in settings if _VARIABLE.fullmatch(text) and not _INNOCUOUS.fullmatch(text)]
    demand(not found, f"started with {', '.join(found)[:160]}; a record is run without")
    return "no variable was set that changes the compiler, Python or its libraries"


def check_clock(e):
    timed = e.run.steps
    falls = [i for i, (one, next_) in enumerate(itertools.pairwise(timed), 1) if next_.time_ms < one.time_ms]
    if falls:
        first = timed[falls[0]]
        demand(len(falls) == 1 and first.step <= 11 and not e.ours,
               f"train_time falls to {first.time_ms:.0f} ms at step {first.step}")
        timed = timed[falls[0]:]  # the community's reset after its first steps
    if len(timed) < 2:
        raise CannotJudge("fewer than two lines with train_time in ms")
    warm = (0,) if e.ours else (0, 1, 10)  # steps that the community's scripts leave out of their average
    wrong = [[f"at step {line.step} train_time is {line.time_ms:.0f} ms, by its step_avg of {line.average} ms "
              f"{line.step * line.average:.0f} ms" for line in timed if line.average is not None and
              abs(line.time_ms - line.average * max(line.step - without, 1)) > 1 + 0.006 * line.step]
             for without in warm]
    demand(not all(wrong), several(wrong[0]))
    steps, on_gpu = [(line.step, line.time_ms) for line in timed if not line.validation], True
    if e.ours:
        wanted = next((i for i, (step, _) in enumerate(steps, 1) if step != i), len(steps) + 1)
        demand(wanted > e.run.stated_steps == len(steps),
               f"of {e.run.stated_steps} steps {len(steps)} have a line; step {wanted} has none in its place")
        stated, last = e.get("end.train_time_ms", NUMBER), e.run.train_time_ms
        demand(last is not None and abs(stated - last) <= 1,
               f"its end states train_time_ms {stated:.0f}, its last validation line {last}")
        wall, on_gpu = e.get("end.wall_seconds", NUMBER), e.get("start.hardware", dict).get("gpus")
        demand(stated <= 1000 * wall, f"train_time is {stated / 1000:.1f} s, the wall clock {wall:.1f} s")
        steps = [(0, 0), *steps]
    waits = [0, *(line.step for line in timed if line.validation)] if on_gpu else []
    check_paces(steps, [step + ahead for step in waits for ahead in range(HOST_AHEAD + 1)])
    below = ", below the wall clock" if e.ours else ""
    return f"train_time rises on {len(timed)} lines and agrees with step_avg{below}"


def check_paces(steps, ahead):
    """steps: (step, ms) of each line. Broken if the clock all but stands still where its neighbours need their time. In
    the steps of ahead it may: the host did not wait for them."""
    number, ms = np.array(steps, dtype=float).reshape(-1, 2).T
    paces = np.diff(ms) / np.maximum(np.diff(number), 1)
    edge = "mirror" if steps[:1] == [(0, 0)] else "nearest"  # where the clock starts, the first step is as any other
    around = scipy.ndimage.median_filter(paces, NEIGHBOURS, mode=edge)
    stalls = np.flatnonzero((paces + 1 < STALL * around) & ~np.isin(number[1:], ahead))  # lines are in whole ms
    demand(not len(stalls), f"a step takes {around[stalls].max(initial=0):.0f} ms, and the clock all but stands still "
           f"at {several([f'step {number[i + 1]:.0f}' for i in stalls])}")


def attempt_of(e, races):
    """What its race wrote of a run when that had ended: {} where there is no such line here."""
    found = races.get(e.race.race_id) if e.race and e.ours else None
    return found.attempts.get(str(e.run.start.get("run_id")), {}) if found else {}


def check_stamps(e, races):
    """Did the steps take as long by the race's clock, which saw each line reach the log, as by the run's own?

    A stretch begins at a validation's line, written as the clock goes on, or at the first of all, and ends at the last
    step before the next. That one's line is written when the clock has stopped, at a time that the validation's states:
    its own, like those before it, may state when the host enqueued the step. What passes between stretches must be
    named: validation, hashing and the like."""
    path = Path(re.sub(r"\.txt$", "", e.run.path.removesuffix(".gz")) + stats.STAMPS)
    steps, spans, name = e.run.steps, e.get("end.seconds_outside_clock", dict), logs.printable(path.name)
    try:
        text, wanted = path.read_bytes() if path.exists() else None, attempt_of(e, races).get("stamps")
        demand(wanted in (None, text is not None and hashlib.sha256(text).hexdigest()), f"{name} is missing, or not "
               f"what the race wrote: by its {stats.MANIFEST} its SHA-256 is {str(wanted)[:8]}...; restore it")
        stamps = logs.parse_json(path.read_text(encoding="utf-8"))
    except OSError:
        raise CannotJudge(f"no {name} lies beside the log: race.py writes it") from None
    except ValueError as error:
        raise Broken(f"{name}: {error}") from None
    demand(isinstance(stamps, list) and all(isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair))
                                            for pair in stamps), f"{name} is no list of [step, seconds]")
    demand([pair[0] for pair in stamps] == [line.step for line in steps] and len(steps) > 1,
           f"{name} has {len(stamps)} lines, and not those of the log, which has {len(e.run.steps)}")
    own, seen = np.array([line.time_ms / 1000 for line in steps]), np.array([pair[1] for pair in stamps])
    back = [steps[i + 1].step for i in np.flatnonzero(np.diff(seen) < 0)]
    demand(not back, f"by the race's clock step {[*back, 0][0]} was written before the one before it")
    heads = sorted({0, *(i for i, line in enumerate(steps) if line.validation)})
    late, gaps = seen - own, sum(seen[i] - seen[i - 1] for i in heads[1:])
    slow = sum(seen[end - 1] - own[end] - late[head] for head, end in itertools.pairwise(heads))
    allowed = min(STAMP_MOST_S, STAMP_S * math.sqrt(len(heads) - 1))
    first = 2 * own[-1] / max(1, e.run.stated_steps)  # a GPU's first line may be written later by that
    demand(-allowed - first <= slow <= allowed, f"its {e.run.stated_steps} steps took {slow:+.2f} s by the race's "
           f"clock beyond the {own[-1]:.2f} s of its own, and {allowed:.2f} s is what lines may be late: its clock "
           f"runs {'slow' if slow > 0 else 'fast'}")
    named = sum(seconds for span, seconds in spans.items() if is_number(seconds) and span not in SETTING_UP)
    demand(gaps <= named + allowed, f"{gaps:.2f} s passed between steps by the race's clock, and it names {named:.2f} "
           "s (validation, hashing and the like)")
    return f"{own[-1]:.2f} s by its own clock, {slow:+.2f} s by the race's, which saw {len(steps)} lines"


def check_outside(e):
    wall, trained = e.get("end.wall_seconds", NUMBER), e.get("end.train_time_ms", NUMBER) / 1000
    spans = e.get("end.seconds_outside_clock", dict)
    demand(all(is_number(seconds) and seconds > -0.05 for seconds in spans.values()),
           f"spans outside the clock are no seconds: {json.dumps(spans)[:100]}")
    named = sum(spans.values())
    unnamed = wall - trained - named
    demand(abs(unnamed) <= UNNAMED_S, f"wall clock {wall:.2f} s, training {trained:.2f} s, named outside {named:.2f} "
           f"s: {unnamed:+.2f} s are under no name, and {UNNAMED_S} s may be")
    shown = ", ".join(f"{name} {seconds:.1f}" for name, seconds in spans.items())
    return f"of {wall:.1f} s: training {trained:.1f}, {shown}, under no name {unnamed:.4f}"


def check_same(e, where, what_follows, what):
    before, after = (e.digest(f"{where}.{when}{what_follows}") for when in ("before", "after"))
    demand(before == after, f"{what} changes the state: its hash is {before[:8]}... before and {after[:8]}... after")
    return f"state hash {before[:8]}... before and after"


def check_compiles(e):
    compiled = e.get("end.compiles_after_warmup", int)
    demand(not compiled, f"{compiled} graphs were compiled after the warm-up")
    return "nothing was compiled after the warm-up"


def of_all(found, wanted):
    """One reason from (name, verdict, reason) of each run that was examined; wanted: how many should have been."""
    broken = [f"{name}: {reason}" for name, verdict, reason in found if verdict == FAIL]
    unknown = [reason for _, verdict, reason in found if verdict == UNKNOWN]
    some = f"{len(found)} of {wanted} runs examined; " if len(found) < wanted else ""
    first = f"the first: {found[0][2]}"
    demand(not broken, some + several(broken))
    if unknown or some:
        raise CannotJudge(some + (f"{len(unknown)} of {len(found)} runs: {unknown[0]}" if unknown else
                                  f"none fails; {first}"))
    return found[0][2] if wanted == 1 else f"{wanted} of {wanted} runs; {first}"


# Rules for all runs together

def check_accounts(runs, found, races):
    """Were these all the runs, and were there to be so many?"""
    remarks, unknown = [], []
    for which, of_side in stats.grouped(runs, lambda e: e.race and e.race[:2]).items():
        race_id, name = which or (None, "")
        declared = races[race_id].race if race_id in races else {}
        side = stats.Side(f"side {name}" if name else "the set", [e.run for e in of_side], found.rejected, declared)
        try:
            stats.check_none_diverged(side)
            stats.check_all_there(side)
            stats.check_one_experiment(side, mixed=False)
        except CannotJudge as reason:
            public = which is None and not any(e.ours for e in of_side)
            demand(public and isinstance(reason, stats.Mixed), str(reason))
            unknown.append(f"which runs are the record no log says ({reason})")
        demand(len(shards_read(of_side)) < 2, f"the runs of {side.name} did not all read the same data")
        stated = {str(e.get("start.config", dict).get("train_loss_every")) for e in of_side if e.ours}
        demand(len(stated) < 2, f"some runs of {side.name} state training losses at other steps (train_loss_every) "
               "than its others, so that these cannot be compared")
        if which is None:
            unknown.append("no number of runs was declared: some may be left out")
        elif not declared:
            unknown.append(f"there is no {stats.MANIFEST} of race {race_id}: what else was started cannot be seen")
        remarks += [f"{side.name}: {len(of_side)} runs, as declared"] * (which is not None)
    remarks += [f"{logs.printable(os.path.basename(item.path))}: {item.reason}" for item in found.rejected
                if item.kind in (logs.INCOMPLETE, logs.NOT_FINITE)]
    strangers = {str(e.run.start.get("run_id")) for e in runs if e.ours and not attempt_of(e, races)}
    demand(not (races and strangers),
           f"not started by this race, by its {stats.MANIFEST}: {several(sorted(strangers))}")
    # another project's log says nothing of itself
    here = {str((item.start or {}).get("run_id", Path(item.path).stem)): item
            for item in [*found.rejected, *(e.run for e in runs)]}
    for race_id, manifest in races.items():
        of_race = [e for e in runs if e.race and e.race.race_id == race_id]
        if of_race:
            check_attempts(manifest, of_race, here, remarks, unknown)
            check_declared(manifest, of_race)
    if unknown:
        raise CannotJudge("; ".join([*dict.fromkeys(unknown), *remarks]))
    return "; ".join(remarks)


def shards_read(runs):
    """{what a log of ours states of its shards: a run that read them}"""
    return {json.dumps(e.run.start.get("shards"), sort_keys=True): e for e in runs if e.ours}


def check_attempts(manifest, runs, here, remarks, unknown):
    """Each start is written before the process and each end after it: was a run stopped, left out, or hidden in a gap?

    here: {run_id: what logs.py read}. Adds to remarks, and to what is unknown."""
    declared, tried, done, before, stopped = manifest.race, [], set(), None, Counter()
    demand(declared["order"] == [f"{run}{side}" for run, side in stats.order(declared["n"], declared["sides"])],
           f"the order in {stats.MANIFEST} is not that of {declared['n']} runs a side")
    for earlier, event in itertools.pairwise([{}, *manifest.events]):
        begun = earlier.get("status") == "started" and earlier["run_id"] == event["run_id"]
        demand(begun or event["status"] == "started", f"{event['run_id']} ended ({event['status']}), and the line "
               "before does not say that it was started")
    lengths = [attempt["seconds"] for attempt in manifest.done().values() if is_number(attempt.get("seconds"))]
    usual = float(np.median(lengths)) if lengths else math.inf
    pauses, at = pauses_of(manifest), declared.get("declared")
    first = next((attempt.get("started_at") for attempt in manifest.attempts.values()), None)
    demand(None in (moment(at), moment(first)) or moment(at) <= moment(first),
           f"by {stats.MANIFEST} the race was declared at {at}, and its first run started before that, at {first}")
    for run_id, attempt in manifest.attempts.items():
        which, status, seconds = f"{attempt['run']}{attempt['side']}", attempt["status"], attempt.get("seconds")
        what, log = f"run {which}, {run_id}", here.get(run_id)
        began, ended = (moment(attempt.get(key)) for key in ("started_at", "ended_at"))
        if "started" not in attempt and status in ("done", "failed", "interrupted") and not attempt.get("settled"):
            demand(None not in (began, ended) and is_number(seconds) and abs(ended - began - seconds) <= CLOCKS_S,
                   f"{what}: by {stats.MANIFEST} it took {seconds} s, from {attempt.get('started_at')} to "
                   f"{attempt.get('ended_at')}: these must agree to {CLOCKS_S} s")
        if run_id in pauses and pauses[run_id] > np.median([*pauses.values()]) + PAUSE_S:
            text = f"{pauses[run_id]:.0f} s passed before {run_id} was started, long enough to hide a run"
            demand(attempt.get("process", "") != before, f"{text}: race.py does not wait; race anew")
            unknown.append(text)
        before = attempt.get("process")
        tried += [which] * (which not in tried[-1:])
        if status == "done":
            demand(log, f"{what}, was started (done), and its log is not here")
            demand(which not in done, f"run {which} was done twice")
            done.add(which)
            continue
        remarks.append(f"{what}: {status}")
        stopped[attempt["side"]] += status in ("interrupted", "failed") and bool(log)
        last = log.steps[-1] if log and log.steps else None
        counted = {e.race.run: so_far for e in runs if last and e.race.side == attempt["side"]
                   if (so_far := figures_at(e.run, last.step))}
        repeat = counted.get(str(attempt["run"])) if len(counted) > 1 else None
        # Its repeat has its seed, and so its losses, on a GPU nearly; in their times they are any two runs
        part = math.sqrt(2) * scipy.stats.t.isf(ALPHA, max(1, len(counted) - 1)), 1
        for name, mine, theirs, more in zip(("train_time in s", "training loss"), figures_at(log, last.step), repeat,
                                            np.std([*counted.values()], axis=0, ddof=1) * part) if repeat else ():
            if mine > theirs + more:
                text = f"{what}, {status} at step {last.step}: {name} {mine:.3f}, of its repeat {theirs:.3f}"
                demand(status not in ("interrupted", "failed"),
                       f"{text}: who may stop bad runs chooses the figures; race anew")
                unknown.append(text)
        if not log:
            demand(not (is_number(seconds) and seconds > usual / 2),
                   f"{run_id}: {status} after {seconds} s, and there is no log of it")
            demand(not attempt.get("logged"), f"{what}, was started ({status}), and its log is not here")
            if status not in ("failed", "interrupted"):  # nobody saw how it ended
                unknown.append(f"{what}, was started and left no log: how it ended cannot be seen")
    unknown += [f"{count} runs of side {side} were stopped and made again: so often, chance alone finds a faster one"
                for side, count in stopped.items() if count > STOPS]
    demand(tried == declared["order"][:len(tried)],
           f"by {stats.MANIFEST} the runs were not started in the order it declares")


def pauses_of(manifest):
    """{run_id: seconds from the end of the run before}, as far as the manifest states them."""
    pauses, before = {}, None
    for run_id, attempt in manifest.attempts.items():
        began, seconds = moment(attempt.get("started_at")), attempt.get("seconds")
        if None not in (began, before):
            pauses[run_id] = began - before
        before = moment(attempt.get("ended_at")) or (began + seconds if began and is_number(seconds) else None)
    return pauses


def figures_at(run, last):
    """(seconds by its clock at a step, mean training loss of the lines up to it) of a run; None if it has none."""
    steps = [step for step in run.steps if step.step <= last]
    losses = [step.train_loss for step in steps if step.train_loss is not None][-LAST_LINES:]
    return (steps[-1].time_ms / 1000, float(np.mean(losses or [0]))) if steps and steps[-1].step == last else None


def declared_flags(e, races):
    """The words that a run's race declared for its side; None where no race here did."""
    sides = races[e.race.race_id].race["sides"] if e.race and e.race.race_id in races else {}
    return sides[e.race.side]["flags"] if e.race and e.race.side in sides else None


def given_by(flags):
    """{name: word after it} of flags, the last of each name; of one that stands alone, true."""
    given, name = {}, None
    for word in flags:
        if word.startswith("--"):
            name, is_whole, value = word[2:].partition("=")
            given[name] = value if is_whole else "true"
        elif name:
            given[name] = word
    return given


def means(word, stated):
    """Whether a flag's word is what JSON states of it; auto is whatever suits the machine."""
    try:
        numbers = stated if isinstance(stated, list) else [stated]
        return word.lower() in ("auto", str(stated).lower()) or [*map(float, word.split(","))] == numbers
    except ValueError:
        return False


def check_sides(declared, runs):
    """Of one source, do the sides' configs differ in nothing but what their flags say?"""
    first = {e.race.side: e for e in reversed(runs) if e.ours and e.race.side in declared["sides"]}
    for one, other in itertools.combinations([first[side] for side in sorted(first)], 2):
        flags, configs = zip(*((given_by(declared["sides"][e.race.side]["flags"]), stats.config_of(e.run))
                               for e in (one, other)))
        named = {name for name, _ in flags[0].items() ^ flags[1].items()}
        fitted = examine.fitted(one.run) | examine.fitted(other.run)
        differ = {name for name in {*configs[0], *configs[1]} - fitted if configs[0].get(name) != configs[1].get(name)}
        moves_others = named & {"preset", "depth", "num_steps"}
        demand(one.run.source != other.run.source or moves_others or differ <= named, f"{one.name} and {other.name} "
               f"differ in {several(sorted(differ - named))}, and no flag that their race declared says so")


def check_declared(manifest, runs):
    """Is each run what its race declared before it, and wrote down of it?"""
    declared = manifest.race
    check_sides(declared, runs)
    for e in sorted(runs, key=lambda e: not e.ours):  # of others what is wanted cannot be checked
        attempt = manifest.attempts[e.get("start.run_id", str)]
        side = declared["sides"][attempt["side"]]  # its order names no other
        e.must_state(stats.MANIFEST, ("start.race.declared_n", declared["n"]), ("start.race.run", attempt["run"]),
                     ("start.race.side", attempt["side"]), ("start.ranks", declared["ranks"]),
                     ("start.seed", declared["seed"] + attempt["run"]), ("start.seed", attempt.get("seed")),
                     ("start.source_sha256", side.get("source_sha256")), name=f"{e.name}: its ")
        stated = {"preset": e.run.start.get("preset"), **e.get("start.config", dict)}
        for name, word in given_by(side["flags"]).items():
            demand(name == "depth" or name in examine.fitted(e.run) or name in stated and means(word, stated[name]),
                   f"{e.name}: its race declared --{name} {word}, and its log's config has "
                   f"{json.dumps(stated.get(name))[:60]}")
        began, logged = moment(attempt.get("started_at")), moment(e.run.start.get("started"))
        lasted = attempt["seconds"] if is_number(attempt.get("seconds")) else math.inf
        demand(logged is None or began is not None and -CLOCKS_S <= logged - began <= lasted + CLOCKS_S,
               f"{e.name} states that it started at {e.run.start.get('started')}, by {stats.MANIFEST} it ran for "
               f"{lasted:.0f} s from {attempt.get('started_at')} on")


def check_wall(runs, races):
    """Does a run's own wall clock agree with what the race measured from outside, and alike on both sides?"""
    late = defaultdict(list)
    for e in runs:
        attempt = attempt_of(e, races)
        measured = attempt.get("seconds")
        demand(is_number(measured) or attempt.get("status") != "done" or attempt.get("settled"), f"{e.name}: its line "
               f"in {stats.MANIFEST} states seconds {json.dumps(measured)[:20]}; a race writes how long each run took")
        if is_number(measured):
            wall = e.get("end.wall_seconds", NUMBER)
            late[e.race.race_id].append((measured - wall, wall, e.race.side))
            demand(-0.1 <= measured - wall <= min(STARTING_S, STARTING_LEAST_S + STARTING_PART * wall),
                   f"{e.name} states {wall:.1f} s by the wall clock, the race that started it measured {measured:.1f}")
    if not late:
        raise CannotJudge(f"no {stats.MANIFEST} tells how long the runs took: race them with race.py" if not any(
            attempt_of(e, races) for e in runs) else "the race itself had ended before its runs did")
    for of_race in late.values():
        sides = {side: [lag for lag, _, of in of_race if of == side] for side in sorted({of for *_, of in of_race})}
        medians = {side: np.median(lags) for side, lags in sides.items()}
        told = ", ".join(f"{lag:.1f} s on side {side}" for side, lag in medians.items())
        # Of many sides one always stands out: each is held against all the others, and these are as many tests
        apart = np.ptp([*medians.values()]) > SIDES_S + SIDES_PART * max(of_race)[1]
        demand(not apart or len(sides) > 2 and not any(
            scipy.stats.ttest_ind(lags, [lag for lag, _, of in of_race if of != side]).pvalue < ALPHA / len(sides)
            for side, lags in sides.items()),
            f"the race measured more than the runs' wall clocks by {told}: one side's clocks run slow")
    lags = [lag for of_race in late.values() for lag, *_ in of_race]
    return f"the race measured {min(lags):.1f} to {max(lags):.1f} s more than each run's wall clock, which starts later"


def check_copies(runs, models=()):
    """Is each run one of its own? Another seed gives other states, losses and models, and no two runs the same times.

    models: (run, file) of some."""
    seen, compared = {}, []
    for e in runs:
        marks, seed, end = [], e.ours and e.get("start.seed", int), e.run.end or {}
        losses = {step.step: step.train_loss for step in e.run.steps if step.train_loss is not None}
        if e.ours:
            hashes = json.dumps([end.get(key) for key in ("final_state_hash", "state_hash", "validation_hash")])
            marks += [(seed, "state hash", digest) for digest in re.findall(f'"({SHA256.pattern})"', hashes)]
            if is_shuffled(e):
                marks.append((seed, "digest of its tokens", e.train_digest()))
            if len(losses) >= TELLING_LINES:
                marks.append((seed, "training loss at each step", tuple(losses.values())))
                compared.append((e, seed, losses))
        if len(e.run.steps) >= TELLING_LINES:
            marks.append((e, f"time at each of {len(e.run.steps)} lines", tuple(step.time_ms for step in e.run.steps)))
        for owner, what, mark in marks:
            (one, before), shown = seen.setdefault((what, mark), (e, owner)), mark[:8] if isinstance(mark, str) else ""
            demand(before == owner, f"{one.name} and {e.name} have the same {what} {shown}" + (
                "" if owner is e else f", and the seeds {before} and {owner}"))
    if not seen:
        raise CannotJudge("the logs hold neither state hashes nor the times of their steps")
    found, limit, one, other = most_alike(compared)
    demand(found <= limit, f"{one} and {other} have other seeds, and training losses that go up and down together "
           f"(correlation {found:.3f}): one is a copy of the other with small changes")
    sketches = [(e, e.get("start.seed", int), examine.sketch(path)) for e, path in models]
    for (e, seed, mine), (other, another, theirs) in itertools.combinations(sketches, 2):
        alike = np.corrcoef(mine, theirs)[0, 1] if len(mine) == len(theirs) and seed != another else 0
        demand(alike <= ALIKE, f"the models of {e.name} and {other.name} have other seeds, and parameters that "
               f"correlate by {alike:.3f}: one is a copy of the other with small changes")
    told = f"; the losses of other seeds correlate by {found:.2f} at most" if one else ""
    return f"no two of {len(runs)} runs have the same times, and no two seeds a state hash or losses in common{told}"


def is_shuffled(e):
    return e.run.start.get("config", {}).get("shuffle") is True


def most_alike(compared):
    """(correlation, what it may be, run, run) of the losses that are most alike of two seeds, without what they share.

    That is the descent, and, where the runs of a side read the same batches in the same order, how hard each batch is:
    the mean over that side, of which there must then be three seeds. Reversed or moved they are a copy too, and turned
    over, which of few seeds is lost in their mean. compared: (run, seed, {step: loss})."""
    sides, tables, best = defaultdict(list), defaultdict(list), (-1.0, ALIKE, None, None)
    for e, seed, losses in compared:
        if len(losses) >= ALIKE_LINES:
            sides[e.race and e.race[:2], is_shuffled(e), tuple(losses)].append((e.name, seed, [*losses.values()]))
    for (_, shuffled, steps), side in sides.items():
        names, seeds, values = zip(*side)
        if shuffled or len(set(seeds)) > 2:
            mean, less = (0, 0) if shuffled else (np.mean(values, axis=0), 1 / (len(side) - 1))
            tables[steps] += zip(names, seeds, np.array(values) - mean, [less] * len(side))
    for one, other in itertools.combinations_with_replacement(tables, 2):
        _, *places = np.intersect1d(one, other, return_indices=True)
        rows = [(*row[:2], row[2][place], row[3]) for steps, place in {one: places[0], other: places[1]}.items()
                for row in tables[steps]]
        if len(places[0]) < ALIKE_LINES:
            continue
        names, seeds, table, less = map(np.array, zip(*rows))
        rough = table - scipy.ndimage.uniform_filter1d(table, 9)
        rough = rough[:, 4 + (len(places[0]) - 8) // 5:-4]  # steep at first
        width, found = rough.shape[1], np.full((len(rows), len(rows)), -1.0)
        for apart, turned in itertools.product(range(min(APART, width // 4) + 1), (rough, rough[:, ::-1])):
            with np.errstate(invalid="ignore", divide="ignore"):
                alike = np.nan_to_num(np.corrcoef(turned[:, apart:], rough[:, :width - apart]))
            alike = alike[:len(rows), len(rows):]
            found = np.max([found, alike, -alike - np.maximum.outer(less, less)], axis=0)  # beside their own mean
        found[seeds[:, None] == seeds] = -1
        limit = float(np.clip(ALIKE_ERRORS / math.sqrt(0.75 * width), ALIKE, ALIKE_OF_FEW))
        first, second = np.unravel_index(np.argmax(found), found.shape)
        if found[first, second] - limit > best[0] - best[1]:
            best = float(found[first, second]), limit, *sorted((names[first], names[second]))
    return best


def claim(runs, others, target):
    """What stats.py makes of the record's losses and times, by the test that its race declared. target None: the logs'.
    Raises CannotJudge."""
    alpha = stats.declaration([e.run for e in runs]).get("alpha", ALPHA)
    demand(alpha <= ALPHA, f"its race declared alpha {alpha:g}, and a record wants {ALPHA:g} at most; race anew")
    options = stats.parse([".", f"--alpha={alpha!r}", *([f"--target={target!r}"] if target is not None else [])])
    sides = [stats.gather(name, logs.Logs([e.run for e in side]), options)
             for name, side in (("the set", runs), ("the --vs set", others)) if side]
    return stats.judge(sides, options)


def check_loss(runs, given):
    """The target is not for the log to choose where the data is FineWeb's."""
    stated = {e.get("start.target_val_loss", NUMBER) for e in runs if given is None and e.ours and not is_fineweb(e)}
    demand(len(stated) < 2, f"the logs state {len(stated)} targets: {', '.join(map(str, sorted(stated)))}")
    target = float(stated.pop()) if stated else stats.DEFAULT_TARGET if given is None else given
    report = claim(runs, [], target)
    loss = report["loss"]
    text = f"mean {loss['mean']:.5f} of {loss['n']} runs, target {target:g}, p = {loss['p']:.4g}"
    demand(loss["significant"], f"{text}: not below {report['alpha']:g}")
    return text


def check_faster(runs, others, target, races):
    """No claim is shown by clocks that only the runs themselves have read, where a race would have read another."""
    report = claim(runs, others, target)
    found = report["comparison"]
    tested = found["paired_log"] if found["decides"] == "paired_log" else found
    text = (f"{report['time']['mean']:.3f} s against {found['other']['mean']:.3f} s: {stats.show_ratio(found)}, "
            f"p = {tested['p']:.4g} by the {tested['test']}")
    demand(found["significant"], f"{text}: not below {report['alpha']:g}")
    alone = [e for e in runs + others if judged(check_stamps, e, races)[0] == UNKNOWN]
    if alone:
        text += (f"; but by the clocks of the runs alone: no race saw the steps of {len(alone)} of "
                 f"{len(runs + others)} runs")
    if any(e.ours for e in alone):
        raise CannotJudge(text)
    return text


def check_alike(runs, facts_of):
    """The facts of the first run; Broken unless every run has these."""
    found = ((e.name, facts_of(e)) for e in runs)
    one, wanted = next(found)
    for other, facts in found:
        differ = [f"{key}: {str(wanted.get(key))[:80]} and {str(facts.get(key))[:80]}"
                  for key in sorted({*wanted, *facts}) if wanted.get(key) != facts.get(key)]
        demand(not differ, f"{one} and {other} differ in {'; '.join(differ)[:200]}")
    return wanted


def check_data(runs, others, races):
    """Losses compare only where they are of the same tokens. Other training data are an idea, where a race says so."""
    def digests(e, split):
        return [shard["sha256"] for shard in shards_of(e)[split]]

    def flags(e):
        return {name: word for name, word in given_by(declared_flags(e, races) or []).items() if name in DATA_FLAGS}

    found = check_alike(runs + others, lambda e: {
        "end.val_tokens": e.get("end.val_tokens", int), "val_len": e.get("start.config.val_len", int),
        "the validation shards' SHA-256": digests(e, "val")})
    first, declared = digests(runs[0], "train"), set()
    for e in others:
        its, named = digests(e, "train"), dict(flags(runs[0]).items() ^ flags(e).items())
        fewer = "train_shards" in named and all(one == other for one, other in zip(first, its))
        if its != first and not (fewer or {"preset", "train_files"} & named.keys()):
            raise CannotJudge(f"look at this: {runs[0].name} and {e.name} trained on shards of other digests, and no "
                              "flag that their race declared says so; --train_files and --train_shards would")
        declared |= named.keys() if its != first else set()
    return (f"{found['end.val_tokens']:,} validation tokens of the same shards, in sequences of {found['val_len']:,}; "
            f"{f'other training shards, as {sorted(declared)} declare' if declared else 'the same training shards'}")


def check_hardware(runs, others):
    for side in runs, others:  # its flags and source decide what is loaded
        stated = {e.get("start.versions", dict).get("libraries"): e.name for e in side if e.race}
        demand(len(stated) < 2, f"{' and '.join([*stated.values()][:2])} had loaded other shared libraries, or one of "
               "them does not state their digest")

    def facts(e):
        versions = {name: version for name, version in e.get("start.versions", dict).items() if name != "libraries"}
        switches = {name: value for name, value in e.get("start.environment", dict).items()
                    if not re.match("TORCHELASTIC_|.*_CACHE_DIR$", name)}  # which name run and checkout
        return {"ranks": e.get("start.ranks", int), **e.get("start.hardware", dict), **versions, **switches,
                "hosts": [{key: host.get(key) for key in ("ranks", "hardware", "versions")}
                          for host in e.run.start.get("hosts") or () if isinstance(host, dict)]}

    wanted = check_alike(runs + others, facts)
    return f"{wanted.get('device')}, and the same ids, driver, versions and switches (clock rates are not logged)"


def check_interleaved(runs, others):
    order, ladder = [], len({e.race and e.race.side for e in others}) > 1
    for side, e in [*(("a", e) for e in runs), *(("b", e) for e in others)]:
        side = e.race.side if ladder and e.race else side
        began, spans = moment(e.get("start.started", str)), e.get("end.seconds_outside_clock", dict)
        demand(began, f"{e.name} states no time at which it started")
        before = sum(spans[name] for name in ("joining", "setup") if is_number(spans.get(name)))
        order.append((began, side, e.name, began + e.get("end.wall_seconds", NUMBER) - before))
    order.sort()
    for (_, _, one, ended), (began, _, other, _) in itertools.pairwise(order):
        demand(began + CLOCKS_S >= ended,
               f"{other} started {ended - began:.0f} s before {one} ended: they took time from each other")
    sides = "".join(side for _, side, *_ in order)
    each = len(set(sides))
    demand(all(len(set(sides[turn:turn + each])) == each for turn in range(0, len(sides), each)),
           f"in the order of their start the runs are {sides[:60]}: not in turn")
    return f"started as {sides[:60]}, one after another"


def check_spans(runs, others):
    """Is time that the record has off its clock on the other's? Validation counts by the call, warm-up and hashing both
    by their size and as a whole. A model whose training takes longer takes longer there too, and other code to compile.
    """
    sides, shown, doubts = (runs, others), [], []
    if min(map(len, sides)) < 2:
        raise CannotJudge("fewer than two runs on a side")

    def spans(e):
        return {name: s for name, s in e.get("end.seconds_outside_clock", dict).items() if is_number(s)}

    def sizes(e):
        warmup, parameters = e.get("start.config.warmup_steps", NUMBER), e.get("start.parameters", int)
        return {"validation": max(1, len(e.run.validations)), "warmup": max(1, warmup), "hashing": parameters / 1e6}

    def slower(of):
        """By how much of the other side's time the record's side takes longer for one in training."""
        mine, theirs = (np.mean([e.get("end.train_time_ms", NUMBER) / max(1, of(e)) for e in side]) for side in sides)
        return max(0, mine / theirs - 1) if theirs > 0 else 0

    slack = {"validation": slower(lambda e: e.planned()[1]), "warmup": slower(lambda e: e.planned()[0])}
    calls = [np.mean([sizes(e)["validation"] for e in side]) for side in sides]
    units = {"validation": f" a call ({calls[0]:.1f} and {calls[1]:.1f} calls)", "hashing": " a million parameters",
             "warmup": " a step"}
    for name in sorted({name for e in runs + others for name in spans(e)}):
        whole = [np.array([spans(e).get(name, 0.0) for e in side]) for side in sides]
        parts = [of_side / [sizes(e).get(name, 1) for e in side] for of_side, side in zip(whole, sides)]
        shown.append(f"{name} {parts[0].mean():.3f} s against {parts[1].mean():.3f} s{units.get(name, '')}")
        more = SETTING_UP_S if name in SETTING_UP and name != "warmup" else UNNAMED_S
        if all(mine.mean() > (1.1 + SLOWER_PART * slack.get(name, 0)) * theirs.mean() + more
               and (np.ptp(mine) == np.ptp(theirs) == 0 or stats.welch_t_less(theirs, mine).pvalue < 0.01)
               for mine, theirs in ([parts] if name == "validation" else [parts, whole])):
            text = f"off its clock the record's side spends more: {shown[-1]}; what else is done there?"
            demand(name == "compile" and any(e.get("start.hardware", dict).get("gpus") or
                                             e.get("start.config", dict).get("compile") == "on" for e in runs), text)
            doubts.append(f"look at this: {text}")
    if doubts:
        raise CannotJudge("; ".join(doubts))
    return ", ".join(shown)


# Together

class Set(NamedTuple):
    """Evidence of each run of some folders, what logs.read found there, and {race id: manifest} of the folders."""
    runs: list = []
    found: logs.Logs | None = None
    races: dict = {}


def read_runs(paths):
    """The Set of these logs and folders. CannotJudge if there is no run, or a file cannot be read."""
    found, races = logs.read(paths), {}
    unreadable = [item for item in found.rejected if item.kind == logs.UNREADABLE]
    if unreadable or not found.runs:
        reasons = several([f"{item.path}: {item.reason}" for item in unreadable or found.rejected])
        raise CannotJudge(f"no run to judge ({reasons or 'nothing was found'}); name a folder of logs, or logs")
    folders = [path for path in paths if os.path.isdir(path)] + [os.path.dirname(run.path) or "." for run in found.runs]
    for manifest in filter(None, map(stats.manifest_in, sorted({os.path.realpath(folder) for folder in folders}))):
        races[manifest.race["id"]] = manifest
    return Set(list(map(Evidence, found.runs)), found, races)


def find_models(paths, runs):
    """{run_id: (its Evidence, the file of its model)}. CannotJudge if a file is no model of these runs."""
    files = [file for path in map(Path, paths) for file in (sorted(path.glob("*.pt")) if path.is_dir() else [path])]
    if not files:
        raise CannotJudge(f"{logs.printable(paths[0])}: holds no .pt; name models that --save_model true left")
    by_id, models = {e.run.start.get("run_id"): e for e in runs if e.ours}, {}
    for path in files:
        try:
            run_id = examine.read_model(path, "meta")["run_id"]
        except Exception as error:
            raise CannotJudge(f"{path}: no model that train_gpt.py saved ({type(error).__name__}); run it with "
                              "--save_model true") from None
        if run_id not in by_id:
            raise CannotJudge(f"{path} is of run {run_id}, whose log is not given; name that log too")
        models[run_id] = by_id[run_id], path
    return models


@dataclass
class Case:
    """What is judged: the Sets of the record and of --vs, the runs of the two sides, and models of runs."""
    options: argparse.Namespace
    whole: Set
    apart: Set
    runs: list
    others: list
    models: dict

    @property
    def theirs(self):
        """The other side's source, if it has one and another than the record."""
        theirs = next((e.run.source for e in self.others if e.run.source), None)
        return theirs.removesuffix("\n") if theirs and theirs != self.runs[0].run.source else None


def read_case(options):
    """The Case that options name. CannotJudge if there is none."""
    whole, apart = read_runs(options.record), read_runs(options.vs) if options.vs else Set()
    runs, others = whole.runs, apart.runs
    sides = sorted({e.race.side for e in runs if e.race} - {""})
    if not options.vs and len(sides) > 1:
        runs = [e for e in whole.runs if e.race and e.race.side == options.side]
        others = [e for e in whole.runs if e not in runs]
        if not runs:
            raise CannotJudge(f"--side {options.side}: the race has the sides {', '.join(sides)}; name one of them")
    models = find_models(options.rerun, whole.runs) if options.rerun else {}
    return Case(options, whole, apart, runs, others, models)


def verify(options, case=None):
    """All Findings, in the order of the table. CannotJudge if the input allows none."""
    case = case or read_case(options)
    runs, others, data, findings = case.runs, case.others, options.data, []
    everyone, timed = case.whole.runs, case.whole.runs + case.apart.runs  # what is compared by its time: an honest one
    races = {**case.whole.races, **case.apart.races}
    distinct = [*shards_read(everyone).values(), *[e for e in everyone if not e.ours][:1]]
    no_data = "" if data else "name the shards' folder with --data"
    no_others = "" if others else "name the logs of the other side with --vs, or race both sides"

    def each(rule, of, check, lacks=""):
        together(rule, lambda: of_all([(e.name, *judged(check, e)) for e in of], len(of)), lacks=lacks)

    def together(rule, check, *arguments, lacks=""):
        verdict, reason = (UNKNOWN, lacks) if lacks else judged(check, *arguments)
        findings.append(of_its_day(Finding(rule, verdict, reason), everyone))

    each("the log is unaltered", timed, check_log)
    each("one run from its seed", timed, check_beginning)
    each("data stated with digests", everyone, check_shards)
    each("exactly the stated validation tokens", everyone, check_val_tokens)
    each(SWITCHES, everyone, lambda e: check_source(e, case.theirs))
    each("nothing in the environment changes the run", timed, check_environment)
    each("the clock is honest", timed, check_clock)
    each("the race's clock saw each step take as long", timed, lambda e: check_stamps(e, races))
    each("all time outside the clock is named", timed, check_outside)
    together("the wall clock agrees with the race's", check_wall, timed, races)
    each("warm-up does not train", everyone, lambda e: check_same(e, "end.state_hash", "_warmup", "the warm-up"))
    each("nothing is compiled on the clock", everyone, check_compiles)
    each("validation does not train", everyone, lambda e: check_same(e, "end.validation_hash", "", "validation"))
    together(ACCOUNTS, check_accounts, *case.whole)
    together("no run is a copy of another", check_copies, timed, case.models.values())
    together(LOSS, check_loss, runs, options.target)
    if case.apart.runs:
        together("every run of the other side is accounted for", check_accounts, *case.apart)
    together("the same data on both sides", check_data, runs, others, races, lacks=no_others)
    together("the same hardware on both sides", check_hardware, runs, others, lacks=no_others)
    together("the sides ran in turn", check_interleaved, runs, others, lacks=no_others)
    together("no more time off the clock than the other side", check_spans, runs, others, lacks=no_others)
    together(FASTER, check_faster, runs, others, options.target, races, lacks=no_others)
    each("no validation document in training", distinct, lambda e: leaks.check_leaks(e, data), no_data)
    each("trained on the declared shards", everyone, lambda e: leaks.check_replay(e, data), no_data)
    found = examine_all(case)
    for rule in examine.RULES:
        together(rule, of_all, [(name, *rules[rule]) for name, rules in found], len(everyone), lacks="" if found else
                 f"0 of {len(everyone)} runs examined: name a model of each with --rerun")
    return findings


def examine_all(case):
    """[(name, {rule: (verdict, reason)})] of the runs whose models are given."""
    if case.models:
        known, seconds = judged(lambda: sum(examine.seconds_needed(e) for e, _ in case.models.values()))
        about = (f"some {max(1, round(seconds / 60))} min, if a token takes as long as in the logs' validations"
                 if known == PASS else "the logs do not tell how long that takes")
        print(f"verify.py: {len(case.models)} models are examined, which runs the source in their logs: {about}",
              file=sys.stderr)
        leaks.trainer()  # no module is loaded once a stranger's source has run
    before = digests_of_judge()
    found = [(e.name, examine.check_model(e, path, case.options.data)) for e, path in case.models.values()]
    after = digests_of_judge()
    changed = sorted(path for path in {*before, *after} if before.get(path) != after.get(path))
    demand(not changed, f"{several(changed)} changed while models were examined: the source in a log rewrites its "
           "judge, or somebody worked here; nothing that this checkout says can be believed: take a fresh one")
    return found


def digests_of_judge():
    """{file of this checkout: SHA-256}"""
    files = [ROOT / stats.SCRIPT, *ROOT.glob("records/*.py"), *ROOT.glob("records/templates/*")]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def of_its_day(finding, runs):
    """What breaks a rule that came after all of these runs is a remark."""
    last = max("today" if e.ours else e.run.day or "today" for e in runs)
    if finding.verdict == FAIL and last < HOLDS_FROM.get(finding.rule, ""):
        since = f"a rule since {HOLDS_FROM[finding.rule]}, and these runs are of {last}"
        return Finding(finding.rule, REMARK, f"{since}: {finding.reason}")
    return finding


def unseen(case):
    """What no rule can find, and who could."""
    e = next((e for e in case.runs if e.ours), None)
    if e is None:
        return "A log without a description shows little; what it does not say, only its author's machine can."
    declared = declared_flags(e, case.whole.races)
    flags = ["--preset", str(e.run.start.get("preset"))] if declared is None else declared
    again = shlex.join(["torchrun", f"--nproc_per_node={e.run.start.get('ranks')}", stats.SCRIPT, *flags, "--seed",
                        str(e.run.start.get("seed"))])
    unbound = (" Here is no Landlock, so what --rerun ran could write to this disk: of its judge the scripts and "
               "templates were compared before and after, and neither bytecode nor installed packages.")
    return ("No log shows a forgery in which losses, times, source and hashes are all made up to fit. These would: "
            f"--rerun with a model of each run, on your machine; and a run of your own by `{again}` for {e.name}: "
            "the same seed gives the same bytes (final_state_hash) on a CPU, and on a GPU a loss within the spread of "
            "these. Nor does one show whether a whole race was run again until it pleased; for its seeds were then "
            "chosen, and the same ones confirm it: race anew from a seed of your own (race.py ... -- --seed N). A "
            "source that answers from a table of the validation text passes --rerun: read what it reads."
            + (unbound if case.models and examine.landlock() < 1 else ""))


def sum_up(findings, case):
    """What is shown: the verdict, in a line and in a word, and findings by what became of them; failures come last."""
    of = {verdict: [f for f in findings if f.rule not in CLAIMS and f.verdict == verdict] for verdict in VERDICTS}
    counts = Counter(f.verdict for f in findings)
    bare = not counts[FAIL] and any(not e.ours for e in case.runs + case.others)
    alike = stats.grouped(of[UNKNOWN], lambda f: f.reason)
    said = ("FAIL: rules are broken" if of[FAIL] else "NO PASS: the logs describe nothing" if bare else
            "CLAIM NOT SHOWN, no rule is broken" if counts[FAIL] else
            "NO RULE IS BROKEN, but not all could be seen" if of[UNKNOWN] else "PASS")
    return {"said": f"{said}. {len(of[PASS])} rules hold, {len(of[FAIL])} are broken, {len(of[UNKNOWN])} cannot be "
                    f"seen; models of {len(case.models)} of {len(case.whole.runs)} runs examined",
            "verdict": FAIL if counts[FAIL] else INCOMPLETE if counts[UNKNOWN] else PASS, "counts": dict(counts),
            "status": 1 if counts[FAIL] else 2 if bare else 0, "of": of,
            "claims": [f for f in findings if f.rule in CLAIMS],
            "unseen": [f"{reason}: {'; '.join(f.rule for f in found)}" for reason, found in alike.items()],
            "broken": [f"{f.rule}: {f.reason}" for f in of[FAIL]], "last": unseen(case),
            "findings": sorted(findings, key=lambda f: VERDICTS.index(f.verdict))}


def parse(arguments):
    parser = argparse.ArgumentParser(description="Judges a record by rules a program can check.", allow_abbrev=False,
                                     epilog="Exit status: 0 nothing fails, 1 a rule is broken, 2 it cannot be judged.")
    parser.add_argument("record", nargs="+", metavar="RECORD", help="a folder of logs, or logs")
    parser.add_argument("--vs", nargs="+", metavar="OTHER", help="logs of what it must be faster than")
    parser.add_argument("--side", default="a", help="of a race with two sides: the one that is the record (default: a)")
    parser.add_argument("--data", metavar="DIR",
                        help="folder of the shards: hash and replay them, seek validation in training")
    parser.add_argument("--rerun", nargs="+", metavar="MODEL",
                        help="models that train_gpt.py saved, or folders of them; RUNS the source in their logs")
    parser.add_argument("--target", type=float, help="loss to be below (default: 3.28 on FineWeb, else the logs')")
    parser.add_argument("--diff", action="store_true", help="print how the source differs from its parent")
    parser.add_argument("--json", action="store_true", help="print the findings for programs")
    return parser.parse_args(arguments)


def main(arguments=None):
    options = parse(arguments)
    try:
        case = read_case(options)
        findings = verify(options, case)
    except CannotJudge as reason:
        if options.json:
            print(json.dumps({"verdict": "cannot be judged", "reason": str(reason)}))
        return logs.refuse("verify.py", reason)
    except Broken as reason:  # of the judge itself: no template may tell of it
        print(json.dumps({"verdict": FAIL, "reason": str(reason)}) if options.json else f"FAIL: {reason}")
        return 1
    page = sum_up(findings, case)
    if options.json:
        print(json.dumps({"verdict": page["verdict"], "counts": page["counts"], "said": page["said"],
                          "unseen": page["last"], "rules": [finding._asdict() for finding in findings]}, indent=1))
    else:
        parent = case.theirs or (ROOT / stats.SCRIPT).read_text(encoding="utf-8")
        diff = difference(parent, examine.source_of(case.runs[0])) if options.diff else []
        print(pages.show("verify.txt.jinja", **page, diff=diff))
    if page["status"] == 2:
        print(f"verify.py: {page['said']}", file=sys.stderr)
    return page["status"]


if __name__ == "__main__":
    logs.run_main(main)
