"""records/verify.py: logs of a real run pass; each rule catches a violation planted in the log or
in the script."""

import contextlib
import gzip
import hashlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train_gpt
from conftest import TINY, plant, some_documents, write_corpus, write_shard

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import board  # noqa: E402
import examine  # noqa: E402
import leaks  # noqa: E402
import logs  # noqa: E402
from manifest import order as order_of  # noqa: E402
import race as racing  # noqa: E402
import verify  # noqa: E402

# of the processes that run a judged source, which are many and short
os.environ.setdefault("OMP_NUM_THREADS", "1")
SOURCE = (ROOT / "train_gpt.py").read_text()
RULE = "=" * 100
UNNAMED = verify.UNNAMED_S
WHOLE = "the log is unaltered"
VAL_TOKENS = "exactly the stated validation tokens"
CLOCK = "the clock is honest"
SPANS = "all time outside the clock is named"
TRAINS = "validation does not train"
NO_LEAK = "no validation document in training"
REPLAY = "trained on the declared shards"
DATA = "the same data on both sides"
HARDWARE = "the same hardware on both sides"
IN_TURN = "the sides ran in turn"
OFF_CLOCK = "no more time off the clock than the other side"
LOSS = verify.LOSS
FASTER = verify.FASTER
ACCOUNTS = verify.ACCOUNTS
SWITCHES = verify.SWITCHES
COMPARED = [HARDWARE, IN_TURN, OFF_CLOCK, FASTER]


def planted(*edits):
    """Return the script's source with (old, new) edits, each of which must apply once."""
    source = SOURCE
    for old, new in edits:
        indentation = old[: len(old) - len(old.lstrip())]  # plant leaves it
        source = plant(source, old, new.removeprefix(indentation))
    return source


def load(source, path):
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="session")
def train(tmp_path_factory, data):
    """train(*edits, flag=...) -> the log of a real run of the edited script, with its model beside
    it."""

    def train(*edits, **flags):
        folder = tmp_path_factory.mktemp("run")
        module = load(planted(*edits), folder / f"{folder.name}_train_gpt.py")
        values = {
            **TINY,
            "preset": "laptop",
            "layers": "S0M S1M SM LM SM",
            "backout_layer": 3,
            "target_val_loss": 4.5,
            "val_len": 256,
            "shuffle": False,
            "train_files": data / "toy_train_*.bin",
            "val_files": data / "toy_val_*.bin",
            "log_dir": folder,
            "run_id": "r",
            "save_model": True,
            "race": "x:1:1:a",
            **flags,
        }
        status = module.main(
            module.PRESETS,
            [
                f"--{name}={str(v).lower() if isinstance(v, bool) else v}"
                for name, v in values.items()
            ],
        )
        assert status == 0
        log = Log(folder / "r.txt")
        named = log.end["train_time_ms"] / 1000 + sum(log.end["seconds_outside_clock"].values())
        if (
            UNNAMED < log.end["wall_seconds"] - named < 0.2
        ):  # the tests' machine was too busy: that is not their subject
            log.set("end.wall_seconds", named).write(folder / "r.txt")
        return folder / "r.txt"

    return train


@pytest.fixture(scope="session")
def honest(train):
    return train()


class Log:
    """The parts of a log, for editing: source, start and end as dicts, lines between them."""

    def __init__(self, path):
        self.source, self.environment, rest = path.read_text().split(RULE + "\n")
        first, *self.lines, last, self.memory = rest.splitlines()
        self.start = json.loads(first)
        self.end = json.loads(last)["end"]

    def set(self, where, to):
        *keys, last = where.split(".")
        holder = self.__dict__
        for key in keys:
            holder = holder[key]
        holder[last] = to
        return self

    def label(self, run, n, side="a", loss=None):
        """Turn the log consistently into another run of a race, with its own state and pace."""
        identity = {"race_id": "x", "run": run, "declared_n": n, "side": side}
        self.start.update(run_id=f"{run}{side}", seed=run, race=identity)
        self.start["config"].update(seed=run, run_id=f"{run}{side}", race=f"x:{run}:{n}:{side}")
        fresh, trained = (
            hashlib.sha256(text.encode()).hexdigest() for text in (f"{run}", f"{run}{side}")
        )
        self.end.update(
            state_hash={"before_warmup": fresh, "after_warmup": fresh},
            model_hash=trained,
            final_state_hash=trained[::-1],
        )
        spans = self.end["seconds_outside_clock"]
        spans.update(dict.fromkeys(spans, 0.4))  # whatever the tests' machine needed
        pace(self, lambda step, ms: step * (100 + 2 * run + (side == "b")))
        self.end["wall_seconds"] = 0.003 + self.end["train_time_ms"] / 1000 + sum(spans.values())
        # another seed, other losses, but not before the first step
        draw = np.random.default_rng(run)
        self.lines = [
            (
                re.sub(
                    r"(?<=train_loss:)\S+",
                    lambda found: f"{float(found[0]) + draw.normal() / 20:.4f}",
                    line,
                )
                if i > 2
                else line
            )
            for i, line in enumerate(self.lines)
        ]
        if loss is not None:
            before = self.end["final_val_loss"]
            self.lines[-1] = self.lines[-1].replace(
                f"val_loss:{before:.4f}", f"val_loss:{loss:.4f}"
            )
            self.end.update(final_val_loss=loss, reached=loss <= self.end["target_val_loss"])
        return self

    def write(self, path):
        lines = [json.dumps(self.start), *self.lines, json.dumps({"end": self.end}), self.memory]
        path.write_text(
            f"{self.source}{RULE}\n{self.environment}{RULE}\n" + "\n".join(lines) + "\n"
        )
        return path


@pytest.fixture
def race(honest, tmp_path):
    """race(n, sides, change) -> a folder with the logs of an honest race. change(log, run, side)
    edits a log."""

    def race(n=4, sides="a", change=lambda log, run, side: None):
        folder = tmp_path / "race"
        shutil.rmtree(folder, ignore_errors=True)  # another that the same test made
        folder.mkdir()
        order = order_of(n, sides)
        events = []
        clock = datetime(2025, 1, 1, tzinfo=timezone.utc)
        versions = {}
        for run, side in order:
            log = (
                Log(honest)
                .label(run, n, side, loss=4.0 + 0.01 * run)
                .set("start.started", clock.isoformat())
            )
            change(log, run, side)
            log.write(folder / f"{run}{side}.txt")
            versions.setdefault(
                side,
                {
                    "revision": None,
                    "flags": [],
                    "source_sha256": log.start["source_sha256"],
                    "config": {"preset": "laptop", **log.start["config"]},
                },
            )
            event = {
                "run": run,
                "side": side,
                "run_id": f"{run}{side}",
                "status": "started",
                "seed": run,
                "started_at": log.start["started"],
            }
            seconds = log.end["wall_seconds"] + 5
            clock += timedelta(seconds=math.ceil(seconds))
            events += [event, {**event, "status": "done", "logged": True, "seconds": seconds}]
            prolong(events[-1], 0)
        declared = {
            "id": "x",
            "n": n,
            "seed": 0,
            "ranks": 1,
            "sides": dict(sorted(versions.items())),
        }
        with manifest_of(folder) as lines:
            lines += [{"race": declared}, *events]
        return folder

    return race


@pytest.fixture
def faster(race):
    """faster(change) -> the folder of a race of four runs a side that side a wins. change(log,
    run, side) edits a log."""

    def faster(change=lambda log, run, side: None):
        def both(log, run, side):
            scale_clock(log, 2 + (side == "b") + 0.01 * run)
            change(log, run, side)

        return race(4, "ab", both)

    return faster


def public_log(path, lines, source="import torch", environment="env"):
    """Write a log in the form of the public speedrun."""
    path.write_text("\n".join([source, RULE, environment, RULE, *lines]) + "\n")


def public_lines(loss=lambda step: 4 - step / 20, pace=60):
    return [
        f"step:{s}/9 val_loss:{loss(s):.4f} train_time:{pace * s}ms step_avg:{pace}.00ms"
        for s in range(1, 10)
    ]


@contextlib.contextmanager
def manifest_of(folder):
    """Yield the lines of the folder's race.jsonl for editing."""
    path = folder / "race.jsonl"
    events = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    yield events
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def prolong(event, seconds):
    """Make the run of an event take longer."""
    event["seconds"] += seconds
    event["ended_at"] = (
        datetime.fromisoformat(event["started_at"]) + timedelta(seconds=event["seconds"])
    ).isoformat()


def with_attempt(folder, run, **how):
    """Insert an attempt at a run before the one that was done. how: its differences from that one."""
    with manifest_of(folder) as events:
        at = events.index(next(event for event in events if event.get("run_id") == f"{run}a"))
        started, ended = ({**event, "run_id": f"{run}a_first"} for event in events[at : at + 2])
        prolong(ended, how.get("seconds", ended["seconds"]) - ended["seconds"])
        events[at:at] = [started] if how.get("status") == "started" else [started, {**ended, **how}]


def strip(folder):
    """Remove every description of the runs from a race's folder."""
    for path in folder.glob("*a.txt"):
        path.write_text(
            "".join(line for line in path.read_text().splitlines(True) if not line.startswith('{"'))
        )
    (folder / "race.jsonl").unlink()


@pytest.fixture
def judge(capsys):
    """judge(argument, ...) -> (exit status, {rule: (verdict, reason)})"""

    def judge(*arguments):
        capsys.readouterr()
        status = verify.main([*map(str, arguments), "--json"])
        report = json.loads(capsys.readouterr().out)
        found = {rule["rule"]: (rule["verdict"], rule["reason"]) for rule in report["rules"]}
        words = {word: verdict for verdict, word in verify.OF_CLAIMS.items()}
        return status, found | {
            claim["claim"]: (words[claim["verdict"]], claim["reason"]) for claim in report["claims"]
        }

    return judge


def fails_only(outcome, rule, *words):
    """Require that these rules fail and no others, and that the first one's reason has these
    words."""
    status, rules = outcome
    wanted = [rule] if isinstance(rule, str) else list(rule)
    failed = {name: reason for name, (verdict, reason) in rules.items() if verdict == "fail"}
    assert status == 1 and list(failed) == wanted, failed
    for word in words:
        assert word in failed[wanted[0]]


def says(rules, rule, verdict, *words):
    """Require a rule's verdict and words of its reason."""
    found, reason = rules[rule]
    assert found == verdict and all(word in reason for word in words), reason


# Honest logs


def test_an_honest_race_passes(race, judge, data):
    status, rules = judge(race(), "--data", data)
    assert rules[REPLAY][0] == "pass" and status == 0, [
        (rule, reason) for rule, (verdict, reason) in rules.items() if verdict == "fail"
    ]
    unknown = {rule for rule, (verdict, _) in rules.items() if verdict == "not checkable"}
    assert unknown == {DATA, *COMPARED, *examine.RULES}  # which ask for --vs and --rerun
    assert {verdict for verdict, _ in rules.values()} == {"pass", "not checkable"}


def test_a_claim_that_is_not_shown_breaks_no_rule(faster, capsys):
    """The README's own win has a loss above its target. A program filters cheats by the exit
    status."""
    folder = faster(lambda log, run, side: log.label(run, 4, side, loss=4.46 + 0.02 * run))
    capsys.readouterr()
    verify.main([str(folder), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["status"], found["verdict"]) == (0, "incomplete")
    assert {claim["claim"]: claim["verdict"] for claim in found["claims"]}[LOSS] == "not shown"


def test_a_rule_whose_own_code_stops_accuses_nobody_and_passes_nobody(race, judge, monkeypatch):
    def stop(*_):
        raise ZeroDivisionError("of the rule")

    folder = race()
    for check in "check_compiles", "check_accounts", "check_loss":  # of a run, of all, of the claim
        with monkeypatch.context() as planted:
            planted.setattr(verify, check, stop)
            status, rules = judge(folder)
        stopped = [
            rule
            for rule, (_, reason) in rules.items()
            if "ZeroDivisionError: of the rule" in reason
        ]
        assert status == 2 and len(stopped) == 1 and rules[stopped[0]][0] == "not checkable"
    first = [("a", "not checkable", "no package"), ("b", "not checkable", leaks.STOPPED)]
    # another reason does not hide it
    assert leaks.STOPPED in leaks.judged(verify.of_all, first, 2)[1]


def scale_clock(log, factor):
    """Slow a run down consistently: lines, end and wall clock."""
    pace(log, lambda step, ms: ms * factor)


def pace(log, time_of):
    before = log.end["train_time_ms"]
    shift_clock(log, time_of)
    log.end["wall_seconds"] += (log.end["train_time_ms"] - before) / 1000


def steady(path):
    """Give all steps of a real run the same time, since the test machine may have been busy."""
    log = Log(path)
    pace(log, lambda step, ms: 100 * step)
    return log.write(path)


def shift_clock(log, time_of):
    """Give each line the train_time time_of(step, old) with its step_avg, and the end the last
    one."""
    for i, line in enumerate(log.lines):
        words = dict(word.split(":") for word in line.split())
        step = int(words["step"].split("/")[0])
        ms = time_of(step, int(words["train_time"][:-2]))
        words.update(train_time=f"{ms:.0f}ms", step_avg=f"{ms / max(step, 1):.2f}ms")
        log.lines[i] = " ".join(f"{key}:{value}" for key, value in words.items())
    log.end["train_time_ms"] = float(words["train_time"][:-2])


# Edited logs and races: which rule finds what. tests/golden/verify_*.txt hold the reasons


def alone(change):
    return lambda race, faster: race(1, change=lambda log, run, side: change(log))


def runs(change, **which):
    return lambda race, faster: race(change=lambda log, run, side: change(log, run), **which)


def sides(change):
    """Edit logs of a race that side a wins."""
    return lambda race, faster: faster(change)


def base(change):
    return sides(lambda log, run, side: side == "b" and change(log))


def folder(change, *arguments):
    """Edit the folder of an honest race of four runs."""

    def make(race, faster):
        made = race(*arguments)
        change(made)
        return made

    return make


def manifest(change, *arguments):
    def edit(made):
        with manifest_of(made) as events:
            change(events)

    return folder(edit, *arguments)


def last_time(to):
    return lambda log: edit_line(log, -1, f"{log.end['train_time_ms']:.0f}ms", to)


def set_source(log, source):
    """Set another source together with its hash."""
    log.source = source
    log.start["source_sha256"] = hashlib.sha256(source[:-1].encode()).hexdigest()


def edit_line(log, at, old, new):
    assert old in log.lines[at]
    log.lines[at] = log.lines[at].replace(old, new)


def as_on_both_sides(key):
    return lambda log: log.start["shards"]["train"][1].update(
        {key: log.start["shards"]["val"][0][key]}
    )


def put(where, value):
    return lambda log: log.set(where, value)


def variables(**values):
    return lambda log: log.start["environment"].update(values)


OF_CONTAINERS = {
    **dict.fromkeys(
        (
            "PYTHONUNBUFFERED PYTHON_VERSION PYTHON_SHA256 PYTHONWARNINGS PYTHONSTARTUP TORCH_HOME"
            " TORCH_EXTENSIONS_DIR TORCH_LOGS TORCH_DISTRIBUTED_DEBUG TORCH_SHOW_CPP_STACKTRACES"
            " TORCH_CUDA_ARCH_LIST PYTORCH_VERSION TRITON_HOME"
        ).split(),
        "ignore",
    ),
    "PYTHONPATH": "",
    "LD_LIBRARY_PATH": (
        "/usr/local/cuda/lib64:/usr/local/cuda-12.4/lib64:/usr/local/nvidia/lib:/lib64:/usr/lib/x86_64-linux-gnu"
    ),
}
LOG_EDITS = {
    "the last line's loss": lambda log: edit_line(log, -1, "loss:4.01", "loss:3.90"),
    "the source": lambda log: log.set("source", log.source.replace("adam_lr", "adam_LR")),
    "the seed": put("start.seed", 77),
    "a digest left out": lambda log: log.start["shards"]["train"][0].pop("sha256"),
    "a shard under two names": lambda log: log.start["shards"]["train"].append(
        {**log.start["shards"]["train"][0], "name": "x"}
    ),
    "shards read twice": put("start.config.epochs", 2),
    "warm-up that trains": put("end.state_hash.after_warmup", "0" * 64),
    "compiling late": put("end.compiles_after_warmup", 2),
    "training in validation": put("end.changed_by_validation", 1),
    "training in an older log": put("end.validation_hash", {"before": "1" * 64, "after": "0" * 64}),
    "a hash left out": lambda log: log.end.pop("model_hash"),
    "a launch with flags": put(
        "start.environment",
        {"TORCHINDUCTOR_X": "1", "TORCHELASTIC_X": "1", "TORCH_CPP_LOG_LEVEL": "x"},
    ),
    "a short count": put("end.val_tokens", 512),
    "a step cut out": lambda log: log.lines.pop(4),
    "a step that is there twice": lambda log: log.lines.insert(4, log.lines[4]),
    "a last time in seconds": last_time("1.000s"),
    "a last time that falls": last_time("1000ms"),
    "a time of 400 digits": lambda log: edit_line(log, 3, "train_time:", "train_time:" + "9" * 400),
    "no source": lambda log: set_source(log, ""),
    "another source": lambda log: set_source(log, "import os\n\n"),
    "a module beside it": lambda log: set_source(log, "import helper\n" + log.source),
    "no environment": lambda log: log.start.pop("environment"),
    "a plan of more steps": put("start.planned.steps", 13),
    "saved weights": put("start.init_from", {"path": "m.pt", "sha256": "0" * 64}),
    "a name on both sides of the split": as_on_both_sides("name"),
    "a digest on both sides": as_on_both_sides("sha256"),
    "a setting": lambda log: set_source(
        log, "torch._inductor.config.max_autotune = True\n" + log.source
    ),
    "a clock that is reset": lambda log: pace(log, lambda step, ms: 100 * (step % 9)),
    "a clock that outruns the wall": lambda log: shift_clock(log, lambda step, ms: 60000 * step),
    "a hash that is none": put("end.final_state_hash", "x"),
    "the end's time": lambda log: log.set("end.train_time_ms", log.end["train_time_ms"] - 90),
    "a nameless span": lambda log: log.set("end.wall_seconds", log.end["wall_seconds"] + 0.06),
    "a negative span": put("end.seconds_outside_clock.setup", -1.0),
    **{
        name: variables(**dict([name.split("=")]))
        for name in (
            "PYTHONPATH=/opt/x LD_PRELOAD=/opt/clock.so PYTORCH_JIT=0 PYTHON_JIT=1"
            " PYTHONWARNINGS=ignore::clock.Slow TRITON_INTERPRET=1 TORCH_COMPILE_DISABLE=1"
            " LD_LIBRARY_PATH=/opt/evil LD_LIBRARY_PATH=/usr/lib:/home/me/lib"
            " LD_LIBRARY_PATH=/usr/lib/../../tmp LD_LIBRARY_PATH=/usr/lib:/lib_of_mine"
            " LD_LIBRARY_PATH=/usr/local/cudas/lib LD_RUN_PATH=/opt/conda/lib"
            " PYTORCH_BUILD_VERSION=2.9 TRITON_PTXAS_PATH=/usr/bin/ptxas"
        ).split()
    },
    "variables of containers": variables(**OF_CONTAINERS),
}
MANIFEST_EDITS = {
    "fewer runs were declared": lambda e: e[0]["race"].update(n=3, order=["1a", "2a", "3a"]),
    "another seed": lambda e: e[0]["race"].update(seed=7),
    "another source": lambda e: e[0]["race"]["sides"]["a"].update(source_sha256="0" * 64),
    "a run from elsewhere": lambda e: e.__delitem__(slice(-2, None)),
    "a duration below the run's": lambda e: prolong(e[4], -6),
    "a race that ended before its runs did": lambda e: [
        event.update(seconds=None, settled=event["started_at"]) for event in e[2::2]
    ],
    **{
        f"declared {config}": lambda e, config=config: e[0]["race"]["sides"]["a"]["config"].update(
            config
        )
        for config in (
            {"muon_lr": 0.05},
            {"stages": "Stage(until=1, my_idea=2)"},
            {"loss_weights": [1, 0.5]},
            {"no_field": 3},
            {"compile": "on"},
            {"dtype": None},
            {"compile": "auto"},
            {"attention": "auto"},
            {"run_id": "x", "seed": 9},
        )
    },
}


def diverge(made):
    with_attempt(made, 2, status="failed")
    log = Log(made / "2a.txt").set("start.run_id", "2a_first")
    log.lines = [
        line.replace(f"val_loss:{log.end['final_val_loss']:.4f}", "val_loss:nan")
        for line in log.lines
    ]
    log.write(made / "2a_first.txt")


def fail_and_keep_the_log(made):
    with_attempt(made, 2, status="failed", seconds=1)
    log = (made / "2a.txt").read_text().replace('"run_id": "2a"', '"run_id": "2a_first"')
    (made / "2a_first.txt").write_text(log.split("step:1/12 train_time")[0])


def see(made):
    """Note the figures of each run, as a race does."""
    found = {run.start["run_id"]: run.figures for run in logs.read([made]).runs}
    with manifest_of(made) as events:
        for event in events[2::2]:
            event["figures"] = found[event["run_id"]]


def stop_and_repeat(times):
    """Add attempts that were stopped by hand after step 8."""

    def stop(made):
        for run in range(1, times + 1):
            name = f"{run}a_first"
            with_attempt(made, run, status="interrupted", exit=130, seconds=2)
            log = (
                Log(made / f"{run}a.txt").set("start.run_id", name).set("start.config.run_id", name)
            )
            text = log.write(made / f"{name}.txt").read_text()
            (made / f"{name}.txt").write_text(text.split("step:9/12 ")[0] + "error: interrupted\n")

    return stop


def resume(log):
    """Edit a log as if its run had been killed after step 8 and resumed from step 6."""
    at = next(i for i, line in enumerate(log.lines) if line.startswith("step:8/"))
    again = {
        "resumed": {
            "at": "2025-01-01T00:00:20+00:00",
            "from_step": 6,
            "ranks": 1,
            "checkpoint": "c",
            "lost_steps": 2,
            "lost_seconds": 1.0,
            "source_sha256": log.start["source_sha256"],
        }
    }
    back = next(i for i, line in enumerate(log.lines) if line.startswith("step:7/"))
    log.lines[at + 1 : at + 1] = [
        "step:9/12 train_ti",
        "error: terminated",
        json.dumps(again),
        *log.lines[back : at + 1],
    ]
    log.end["resumed"] = 1


RACE_EDITS = {
    "one seed": runs(lambda log, run: log.set("start.seed", 5).set("start.config.seed", 5)),
    "other data": runs(
        lambda log, run: log.start["shards"]["train"][0].update(sha256=f"{run:064}")
    ),
    "other numbers declared": runs(
        lambda log, run: log.set("start.race.declared_n", 3 + run).set(
            "start.config.race", f"x:{run}:{3 + run}:a"
        )
    ),
    "two sources": runs(lambda log, run: run == 3 and set_source(log, "x = 1\n" + log.source)),
    "one state": runs(
        lambda log, run: log.set(
            "end.state_hash", {"before_warmup": "a" * 64, "after_warmup": "a" * 64}
        )
    ),
    "a name that is none": runs(lambda log, run: run == 2 and log.set("start.run_id", [])),
    "resumed": runs(lambda log, run: run == 2 and resume(log)),
    "a loss not surely below the target": runs(
        lambda log, run: log.label(run, 4, loss=4.46 + 0.02 * run)
    ),
    "fineweb by its name": runs(
        lambda log, run: log.start["shards"]["val"][0].update(name="fineweb_val_000000.bin")
    ),
    "fineweb by the preset": runs(lambda log, run: log.set("start.preset", "speedrun")),
    "a log removed": folder(lambda made: (made / "2a.txt").unlink()),
    "a log of a failed run removed": folder(
        lambda made: with_attempt(made, 2, status="failed", seconds=1)
    ),
    "a log of a failed run kept": folder(fail_and_keep_the_log),
    "a diverged run": folder(diverge),
    **{
        f"{status} after {seconds} s without a log": folder(
            lambda made, status=status, seconds=seconds: with_attempt(
                made, 2, status=status, logged=False, seconds=seconds
            )
        )
        for status, seconds in (("lost", 1), ("started", 1), ("failed", 1))
    },
    **{f"stopped and repeated {times} times": folder(stop_and_repeat(times)) for times in (2, 3)},
    "lines that the race did not see": folder(
        lambda made: (see(made), Log(made / "2a.txt").label(2, 4, loss=3.9).write(made / "2a.txt"))
    ),
    "lines that the race saw": folder(see),
    "blank lines of an editor": folder(
        lambda made: [path.write_text(path.read_text() + "\n\n") for path in made.glob("*.txt")]
    ),
    **{
        f"alpha {alpha}, looks {looks}": manifest(
            lambda events, alpha=alpha, looks=looks: events[0]["race"].update(
                alpha=alpha, until_decided=looks
            ),
            6,
        )
        for alpha, looks in ((0.05, False), (0.05, True), (0.01, False), (0.001, True))
    },
}


def other_data(config, left):
    def other(log):
        log.start["config"] |= config
        first, *rest = log.start["shards"]["train"]
        log.start["shards"]["train"] = (
            [first] if left == 1 else [{**first, "sha256": "5e" * 32}, *rest]
        )

    return base(other)


def with_libraries(other, silent=""):
    return sides(
        lambda log, run, side: log.set(
            "start.versions.libraries",
            None if silent and silent in f"{run}{side}" else str(int(other(run, side))) * 64,
        )
    )


def on_hosts(cpus):
    """Hosts of sides with these processors, and with variables that name a launch."""
    return sides(
        lambda log, run, side: log.set(
            "start.hosts",
            [
                {
                    "ranks": [0, 1],
                    "hardware": {"cpu": cpus[side == "b"]},
                    "versions": {},
                    "environment": {"TORCHELASTIC_ERROR_FILE": f"file of {run}{side}"},
                    "source_sha256": 64 * side,
                }
            ],
        ).set("start.environment", {"TRITON_CACHE_DIR": f"checkout of side {side}"})
    )


def hidden(seconds, mine, others, name="validation", twice=False):
    """Side a trains for some seconds and side b for 12, with these seconds off the clock. twice:
    side a validates as often again."""

    def hide(log, run, side):
        scale_clock(log, (seconds if side == "a" else 12) + 0.01 * run)
        log.end["seconds_outside_clock"][name] = (mine if side == "a" else others) + 0.001 * run
        log.end["wall_seconds"] = (
            sum(log.end["seconds_outside_clock"].values()) + log.end["train_time_ms"] / 1000
        )
        if side == "a" and twice:
            for step in (2, 3, 7, 8)[: sum("val_loss" in line for line in log.lines)]:
                at = next(i for i, line in enumerate(log.lines) if line.startswith(f"step:{step}/"))
                log.lines.insert(
                    at + 1,
                    log.lines[at]
                    .partition(" train_loss")[0]
                    .replace(" train_time", " val_loss:4.5000 train_time"),
                )

    return lambda race, faster: race(4, "ab", hide)


def move(log, seconds, name):
    """Move seconds of training off the clock."""
    scale_clock(log, 1 - 1000 * seconds / log.end["train_time_ms"])
    log.end["seconds_outside_clock"][name] = seconds
    log.end["wall_seconds"] += seconds


def modules(log, *_):
    log.start["environment"].update(
        LD_LIBRARY_PATH="/apps/cuda/lib64",
        PYTORCH_BUILD_VERSION="2.9",
        TRITON_PTXAS_PATH="/apps/ptxas",
    )


def late(made):
    log = Log(made / "2a.txt")
    log.set("start.started", "2026-01-01T00:00:00+00:00").write(made / "2a.txt")


def three_sides(log, run, side):
    scale_clock(log, 2 + 0.1 * "abc".index(side) + 0.01 * run)


SIDE_EDITS = {
    "another GPU": base(put("start.hardware.device", "another GPU")),
    "other validation shards": base(
        lambda log: log.start["shards"]["val"][0].update(sha256="5e" * 32)
    ),
    "another length of validation": base(put("start.config.val_len", 128)),
    "fewer validation tokens": base(
        lambda log: log.set("end.val_tokens", 99).start["shards"]["val"][0].update(tokens=100)
    ),
    "another torch": base(put("start.versions.torch", "9.9")),
    "another number of threads": base(put("start.environment.OMP_NUM_THREADS", "7")),
    "one side after the other": base(
        lambda log: log.set("start.started", log.start["started"].replace("2025", "2026"))
    ),
    "both at once": base(
        lambda log: log.set(
            "start.started",
            (datetime.fromisoformat(log.start["started"]) - timedelta(seconds=9)).isoformat(),
        )
    ),
    "not faster": lambda race, faster: race(
        4, "ab", lambda log, run, side: scale_clock(log, 1 + 0.01 * run + 0.005 * (side == "b"))
    ),
    "other training data": other_data({}, 1),
    "fewer shards": other_data({"train_shards": 1}, 1),
    "fewer shards, others": other_data({"train_shards": 2}, 2),
    "other files": other_data({"train_files": "x/*.bin"}, 2),
    "libraries of a side": with_libraries(lambda run, side: side == "b"),
    "libraries of a run": with_libraries(lambda run, side: run == 2),
    "libraries that a side does not state": with_libraries(lambda run, side: False, "b"),
    "libraries that a run does not state": with_libraries(lambda run, side: False, "3"),
    "hosts of one kind": on_hosts("xx"),
    "hosts of two kinds": on_hosts("xy"),
    "a ladder in turn": lambda race, faster: race(4, "abc", three_sides),
    "a ladder with a late run": folder(late, 4, "abc", three_sides),
    **{
        f"{name}, {mine} s instead of {others} s": hidden(10, mine, others, name)
        for name, mine, others in (
            ("validation", 1.1, 1.0),
            ("validation", 1.6, 1.0),
            ("validation", 2.5, 1.0),
            ("setup", 1.9, 1.0),
            ("compile", 2.0, 0.0),
        )
    },
    "a slower model off the clock": hidden(13, 1.2, 1.0),
    **{
        f"{mine} s instead of 1 s, no faster": hidden(12, mine, 1.0, "setup")
        for mine in (1.1, 1.5, 3.0)
    },
    "training under a name of its own": sides(
        lambda log, run, side: side == "a" and move(log, 0.5, "my idea")
    ),
    "training under many names": sides(
        lambda log, run, side: side == "a" and [move(log, 0.015, f"x{i}") for i in range(9)]
    ),
    "a log of its own off the clock": sides(
        lambda log, run, side: side == "a" and move(log, 0.01, "plot")
    ),
    "a module system on both sides": sides(modules),
    "a module system on one side": base(modules),
    "a switch on both sides": sides(
        lambda log, run, side: log.start["environment"].update(TORCHINDUCTOR_X="1")
    ),
    "more validations": hidden(10, 2.0, 1.0, twice=True),
}
UNEDITED = folder(lambda made: None)
EDITS = {  # by kind: a race, and edited ones by what is done
    "logs": (alone(lambda log: None), {name: alone(LOG_EDITS[name]) for name in LOG_EDITS}),
    "races": (UNEDITED, RACE_EDITS),
    "sides": (sides(lambda *_: None), SIDE_EDITS),
    "manifests": (UNEDITED, {name: manifest(MANIFEST_EDITS[name]) for name in MANIFEST_EDITS}),
}


@pytest.mark.parametrize("kind", EDITS)
def test_an_edit_is_found_by_its_rules_and_by_no_others(race, faster, judge, honest, golden, kind):
    """The golden file holds the exit status, and each rule whose verdict is not that of the
    unedited race."""
    unedited, edits = EDITS[kind]
    _, usual = judge(unedited(race, faster))
    shown = []
    for name, make in edits.items():
        status, rules = judge(make(race, faster))
        shown.append(f"{name}: exit status {status}")
        for rule, (verdict, reason) in rules.items():
            if verdict != usual.get(rule, ("",))[0]:
                shown.append(f"{name}: {verdict}: {rule}: {reason}")
    golden(
        f"verify_{kind}",
        "\n".join(shown) + "\n",
        [(re.escape(Log(honest).start["hardware"]["device"]), "MACHINE")],
    )


def test_a_fair_race_hardly_ever_breaks_the_rule_on_time_off_the_clock():
    """The base's runs and faster ones whose time off the clock has the same distribution. At p <
    0.01 five of 1,000 failed."""
    draw = np.random.default_rng(0)
    verdicts = []
    for _ in range(1000):
        train = 10 + draw.normal(0, 0.1, (2, 5))
        off = 1 + draw.normal(0, 0.3, (2, 5))
        sides = [
            [fake_run(10 * s - 0.3 * (side == 0), t) for s, t in zip(train[side] / 10, off[side])]
            for side in (0, 1)
        ]
        verdicts.append(leaks.judged(verify.check_spans, *sides)[0])
    assert verdicts.count("fail") <= 1 and verdicts.count("not checkable") < 40


def fake_run(trained, off):
    end = {"train_time_ms": 1000 * trained, "seconds_outside_clock": {"setup": off}}
    return verify.Evidence(logs.Run("x", start={}, end=end, validations=(None,)))


def test_a_script_with_a_slow_clock_is_caught(train, judge):
    step = "            losses = worker.step("
    log = train(
        ("self.elapsed += 1000 *", "self.elapsed += 500 *"),
        ("self.elapsed + 1000 *", "self.elapsed + 500 *"),
        (step, "            time.sleep(0.1)\n" + step),
        num_steps=4,
    )
    status, rules = judge(log)
    assert status == 1 and "unaccounted for" in rules[SPANS][1]


# Selected runs


def test_the_manifest_is_found_beside_the_logs(race, judge, tmp_path):
    folder = race()
    with_attempt(folder, 2)
    for named in ([tmp_path], sorted(folder.glob("*.txt"))):
        fails_only(judge(*named), ACCOUNTS, "2a_first", "its log is not here")
    (folder / "2a.txt").unlink()
    (folder / "race.jsonl").unlink()
    (folder / "1a.txt").unlink()
    declared_anew = [
        Log(folder / f"{old}a.txt").label(new, 2, loss=4.0 + 0.01 * new)
        for new, old in ((1, 3), (2, 4))
    ]
    for new, log in enumerate(declared_anew, 1):
        log.write(folder / f"{new + 2}a.txt")
    says(judge(folder)[1], ACCOUNTS, "not checkable", "there is no race.jsonl")


def two_races(race, tmp_path):
    """Return the folders of an honest race and of a slower one, the other side."""
    folder = race(4, "a").rename(tmp_path / "new")
    other = tmp_path / "old"

    def slower(log, run, side):
        scale_clock(log, 2 + 0.01 * run)
        log.set("end.final_state_hash", log.end["final_state_hash"][::-1])
        log.set("start.started", log.start["started"].replace("T00", "T01"))

    race(4, "a", slower).rename(other)
    return folder, other


def test_the_other_side_must_be_honest_too(race, judge, tmp_path):
    folder, other = two_races(race, tmp_path)
    status, rules = judge(folder, "--vs", other)
    others = "every run of the other side is accounted for"
    failed = {rule for rule, (verdict, _) in rules.items() if verdict == "fail"}
    # aaaabbbb: not in turn
    assert failed == {IN_TURN} and rules[others][0] == rules[FASTER][0] == "pass"
    (other / "1a.txt").rename(tmp_path / "1a.txt")
    assert judge(folder, "--vs", other)[1][others][0] == "fail"
    edited = Log(tmp_path / "1a.txt")
    edited.end["train_time_ms"] += 60
    edited.write(other / "1a.txt")
    says(judge(folder, "--vs", other)[1], WHOLE, "fail", "1a.txt: its end states train_time_ms")
    (tmp_path / "1a.txt").rename(other / "1a.txt")
    for path in (folder, other):
        (path / "race.jsonl").unlink()
    says(
        judge(folder, "--vs", other)[1],
        FASTER,
        "not checkable",
        "by the clocks of the runs alone: no race confirms the times of 8 of 8 runs",
    )
    edited.set("start.config.val_len", 128).write(other / "1a.txt")
    assert judge(folder, "--vs", other)[1][DATA][0] == "fail"


# The data


def leaks_found(honest, folder):
    """Return (verdict, reason) of the search for validation text in a folder's shards, which the
    log states."""
    log = Log(honest)
    for split in ("train", "val"):
        (path,) = folder.glob(f"toy_{split}_*.bin")
        tokens = len(examine.open_shard(path)[0])
        log.start["shards"][split] = [
            {
                "name": path.name,
                "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
                "tokens": tokens,
            }
        ]
    (e,) = verify.read_runs(
        [log.set("end.val_tokens", tokens - 1).write(folder / "l.txt")], None
    ).runs
    return leaks.judged(leaks.check_leaks, e, folder)


@pytest.mark.parametrize(
    "steal",
    [
        # one token changed
        lambda body: np.where(np.arange(len(body)) == len(body) // 2, (body + 1) % 63, body),
        lambda body: body[: len(body) * 2 // 3],
    ],
)
def test_validation_documents_in_training_are_caught(honest, tmp_path, steal):
    val = some_documents(3, 1000)
    starts = np.append(np.flatnonzero(val == 63), len(val))
    longest = int(np.diff(starts).argmax())
    # a longer one, and no BOS in it
    val = np.insert(val, starts[longest] + 1, some_documents(9, 200) % 63)
    stolen = steal(val[starts[longest] + 1 : starts[longest + 1] + 200])
    train_tokens = some_documents(1, 6000)
    train_tokens[2001 : 2001 + len(stolen)] = stolen  # without its BOS, inside another document
    write_shard(tmp_path / "toy_train_000001.bin", train_tokens)
    write_shard(tmp_path / "toy_val_000000.bin", val)
    verdict, reason = leaks_found(honest, tmp_path)
    assert verdict == "fail" and f"of document {longest} is in" in reason and "token 2001" in reason


def test_other_shards_accuse_no_log(race, judge, data, tmp_path):
    shards = shutil.copytree(data, tmp_path / "shards")
    path = shards / "toy_train_000002.bin"
    folder = race()
    path.write_bytes(path.read_bytes()[:-2] + b"\1\0")
    status, rules = judge(folder, "--data", shards)
    assert status == 0
    for rule in NO_LEAK, REPLAY:
        words = "toy_train_000002.bin has SHA-256", "not the run's data"
        says(rules, rule, "not checkable", *words)
    says(judge(folder, "--data", tmp_path)[1], NO_LEAK, "not checkable", "No such file")


# The source

SETTINGS = [
    "torch._inductor.config.max_autotune = True",
    "import torch._inductor.config as c; c.x = 1",
    "from torch._inductor import config; config.x = 1",
    "from torch import _inductor as i",
    "setattr(torch._inductor.config, 'x', 1)",
    "c = torch._dynamo.config; c.x = 1",
    "from torch._dynamo import *",
    "with torch._dynamo.config.patch({'x': 1}): pass",
    "from unittest import mock; mock.patch('torch._inductor.config.x', 1)",
    "torch.compiler.config.x = 1",
    "import triton; triton.knobs.autotuning.x = 1",
    "torch.compile(f, mode='max-autotune')",
    "torch.compile(f,\n    dynamic=False,\n    options={})",
    "@torch.compile(mode='x')\ndef f(): pass",
    "model.compile(mode='max-autotune')",
    "os.environ['TORCHINDUCTOR_MAX_AUTOTUNE'] = '1'",
    "os.environ.setdefault('TORCHDYNAMO_X', '1')",
    "os.environ.update(TORCHINDUCTOR_X='1')",
    "os.environ |= {'TORCHINDUCTOR_X': '1'}",
    "os.putenv('TORCH_X', '1')",
    "x = 1\n\n\nif x:\n    torch._inductor.config.x = 1",
]
HARMLESS = [
    "torch.compile(f, dynamic=False)",
    "@torch.compile(dynamic=False, fullgraph=True)\ndef f(): pass",
    "class C:\n    compile: str = 'on'\n    def f(self): return self.x",
    "torch._dynamo.utils.counters['stats']",
    "torch._dynamo.reset()",
    "os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
    "os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'",
    "os.environ.get('TORCH_X')",
    "'torch._inductor.config.x = 1'",
    "x = 1  # torch._inductor.config.x = 1",
    "self.config.x = 1; config.lr = 3; dtype = getattr(torch_dtypes, config.dtype)",
    "import re; re.compile('x', flags=1); model.eval()",
]
IMPORTS = "import os, sys, torch\n"


@pytest.mark.parametrize("line", SETTINGS)
def test_a_compiler_setting_in_the_source_is_found(line):
    assert verify.scan(IMPORTS + line).findings


@pytest.mark.parametrize("line", HARMLESS)
def test_a_harmless_line_is_not_taken_for_a_setting(line):
    assert verify.scan(IMPORTS + line).findings == []


@pytest.mark.parametrize(
    "line, module",
    [
        ("import helper", "helper"),
        ("from helper.inner import x", "helper"),
        ("from . import helper", "a module beside it"),
        ("import numpy, triton, tiktoken, huggingface_hub, tqdm, scipy, matplotlib, ctypes", None),
    ],
)
def test_a_module_that_the_log_does_not_hold_is_named(line, module):
    assert verify.scan(IMPORTS + line).foreign == ([] if module is None else [module])


@pytest.mark.parametrize(
    "source",
    [
        "x" + ".__dict__['a']" * 90,
        "-" * 5000 + "1",
        "\n".join(f"import m{i} as a" for i in range(5000)) + "\na" * 5000,
        "a = a.b\n" * 20000,
        "'x' + " * 900 + "'x'",
    ],
)
def test_a_source_cannot_exhaust_its_reader(source):
    """Each takes less than a second of a usual machine."""
    began = time.process_time()
    try:
        verify.scan(source)
    except SyntaxError:
        pass
    assert time.process_time() - began < 30


# The model again


class Forked:
    """The process of a Worker, forked to save the seconds of importing torch."""

    def __init__(self, folder, *arguments):
        self.pid = os.fork()
        if not self.pid:
            try:
                os.chdir(folder)
                examine.serve(*arguments)
            finally:
                os._exit(0)

    def kill(self):
        os.kill(self.pid, signal.SIGKILL)

    def wait(self):
        os.waitpid(self.pid, 0)


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(examine, "start", Forked)


@pytest.fixture
def rerun(honest, data, forked, tmp_path):
    return examined(honest, data, tmp_path)


@pytest.fixture
def rerun_apart(honest, data, tmp_path):
    """The same with the real Worker process."""
    return examined(honest, data, tmp_path)


def examined(honest, data, folder):
    """rerun(*edits, only=rules) -> {rule: (verdict, reason)} for the honest run's model and a
    source with these edits."""

    def rerun(*edits, only=examine.RULES, log=honest, model=None, **changed):
        stated = Log(log).set("source", planted(*edits) + "\n")
        for where, value in changed.items():
            stated.set(where.replace("__", "."), value)
        (e,) = verify.read_runs([stated.write(folder / "examined.txt")], None).runs
        return examine.check_model(e, model or log.with_suffix(".pt"), data, only)

    return rerun


@pytest.mark.slow
def test_an_honest_model_passes_in_a_process_of_its_own(honest, data, script):
    judging = script(
        ROOT / "records/verify.py",
        honest,
        "--rerun",
        honest.with_suffix(".pt"),
        "--data",
        data,
        "--json",
        PATH="",
    )
    out, errors = judging.communicate(timeout=600)
    assert judging.returncode == 0, out + errors
    report = json.loads(out)
    rules = {rule["rule"]: rule["verdict"] for rule in report["rules"]}
    assert {rules[rule] for rule in examine.RULES} == {"pass"} and "models of 1 of 1 run" in report[
        "said"
    ]


@pytest.mark.parametrize(
    "saved, stated, differ",
    [("auto", "flash", ""), ("masked", "flash", "attention")],
)
def test_a_saved_model_has_the_config_of_its_log_but_for_what_the_machine_chose(
    saved, stated, differ
):
    examination = examine.Examination.__new__(examine.Examination)
    examination.stated = {"attention": stated}
    examination.config = {"attention": saved}
    examination.saved = {"state": {}}
    examination.e = SimpleNamespace(
        run=SimpleNamespace(end={}), digest=lambda where: examine.hash_of({})
    )
    examination.worker = SimpleNamespace(initial_state=lambda *_: {"buffers": {}})
    examination.paths = []
    verdict, reason = leaks.judged(examination.check_saved)
    assert (verdict, differ in reason) == ("fail" if differ else "pass", True), reason


EMBED = "        x0 = self.smear(e, self.smear_gate, smear_weight[0])\n"


def in_embedding(plant):
    """An edit that runs these lines between the embedding e [T, dim] and the smear gate."""
    return EMBED, plant + EMBED


MODEL_PLANTS = {
    "every token sees the next": (
        in_embedding("        e = e + 0.1 * torch.roll(e, -1, 0)\n"),
        "earlier logit",
    ),
    "a leak at the edges of blocks": (
        in_embedding(
            "        at = torch.arange(127, len(e) - 1, 128)\n"
            "        e = e.index_add(0, at, 0.1 * e[at + 1])\n"
        ),
        "edge of a block",
    ),
    "a leak at document joins": (
        in_embedding(
            "        at = (tokens[1:] == self.bos_id).nonzero()[:, 0]\n        at = at[at < len(e)"
            " - 2]\n        e = e.index_add(0, at, 0.1 * e[at + 2])\n"
        ),
        "earlier logit",
    ),
}


@pytest.mark.parametrize("plant", MODEL_PLANTS)
def test_a_model_that_sees_later_tokens_is_caught(rerun, plant):
    edit, word = MODEL_PLANTS[plant]
    says(rerun(edit, only=[examine.CAUSAL]), examine.CAUSAL, "fail", word)


def test_what_a_model_remembers_of_earlier_sequences_is_caught(rerun):
    """In a plain attribute, which is not part of its state, and in its parameters."""
    remember = (
        "        self.last = getattr(self, 'last', 0) * 0.9 + e.mean(0)\n        e = e + 0.3 *"
        " self.last\n"
    )
    learn = "        self.lm_head.weight.data[tokens] += 1e-2\n"
    for plant in (remember, learn):
        only = [examine.LOSS, examine.ORDER]
        says(rerun(in_embedding(plant), only=only), examine.ORDER, "fail", "after those before it")


@pytest.mark.slow
def test_a_leak_far_behind_the_probe_is_caught(rerun, monkeypatch):
    """In sequences longer than the probe the losses reveal the leak."""
    monkeypatch.setattr(examine, "PROBE_TOKENS", 64)
    far = (
        "        if len(e) > 200:\n            e = torch.cat([e[:150], e[150:] + 0.1 *"
        " torch.roll(e[150:], -1, 0)])\n"
    )
    says(
        rerun(in_embedding(far), only=[examine.LOSS, examine.CAUSAL]),
        examine.CAUSAL,
        "fail",
        "in sequence ",
    )
    assert rerun(only=[examine.LOSS, examine.CAUSAL])[examine.CAUSAL][0] == "pass"


@pytest.mark.parametrize(
    "when",
    [
        "tokens[1:9].tolist() != {first}",  # but in the text that a probe might begin with
        "self.calls <= {sequences}",  # but where the loss is known already
    ],
)
def test_a_model_that_looks_ahead_where_it_foresees_no_probe_is_caught(
    rerun, data, monkeypatch, when
):
    monkeypatch.setattr(examine, "PROBES", 2)
    text = examine.open_shard(next(data.glob("toy_val_*.bin")))[0]
    when = when.format(first=text[1:9].tolist(), sequences=len(text) // 256 + 1)
    ahead = (
        f"        self.calls = getattr(self, 'calls', 0) + 1\n        if {when}:\n            e ="
        " torch.cat([e[:16], e[16:] + 0.5 * torch.roll(e[16:], -1, 0)])\n"
    )
    rules = rerun(in_embedding(ahead), only=[examine.LOSS, examine.ORDER, examine.CAUSAL])
    assert rules[examine.ORDER][0] == "pass" and rules[examine.CAUSAL][0] == "fail"
    assert "calls" not in when or re.search(
        "in sequence [0-3]\\) change an earlier token's loss", rules[examine.CAUSAL][1]
    )


@pytest.mark.parametrize(
    "error", ["MemoryError()", 'RuntimeError("DefaultCPUAllocator: can\'t allocate memory")']
)
def test_memory_that_runs_out_is_no_verdict(rerun, monkeypatch, error):
    monkeypatch.setattr(examine, "PROBE_TOKENS", 64)
    rules = rerun(
        in_embedding(f"        if len(e) > 200: raise {error}\n"),
        only=[examine.LOSS, examine.CAUSAL],
    )
    for (verdict, reason), word in zip(
        rules.values(), ("out of memory", "the loss was not evaluated (see the reason above)")
    ):
        assert verdict == "not checkable" and word in reason


def test_an_allocation_beyond_the_memory_is_an_error():
    pid = os.fork()
    if not pid:
        try:
            examine.bound_memory()
            limited = (
                torch.cuda.is_available()
                or examine.resource.getrlimit(examine.resource.RLIMIT_AS)[0] > 0
            )
            torch.zeros(1 << 50)
        except Exception as error:
            # where there is no limit it is -1
            os._exit(0 if limited and examine.ran_out(error) else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.slow
def test_a_model_in_bfloat16_passes_and_an_edited_one_does_not(train, rerun, tmp_path):
    log = train(dtype="bfloat16", num_steps=4)
    assert {verdict for verdict, _ in rerun(log=log).values()} == {"pass"}
    with_one_value_edited(rerun, log, tmp_path)


def test_a_loss_that_is_not_the_models_is_caught(rerun, honest):
    loss = Log(honest).end["final_val_loss"] * 0.9999
    rules = rerun(end__final_val_loss=loss, only=[examine.SAVED, examine.LOSS])
    assert [rule for rule, (verdict, _) in rules.items() if verdict == "fail"] == [examine.LOSS]


def with_one_value_edited(rerun, log, folder):
    saved = examine.read_model(log.with_suffix(".pt"))
    saved["state"]["lm_head.weight"][3, 5] += 1
    train_gpt.save_file(folder / "saved.pt", saved)
    says(
        rerun(log=log, model=folder / "saved.pt", only=[examine.SAVED]),
        examine.SAVED,
        "fail",
        "have hash",
    )


def test_a_single_value_of_a_saved_model_that_is_not_the_logs_is_caught(rerun, honest, tmp_path):
    with_one_value_edited(rerun, honest, tmp_path)


TRAIN_IN_VALIDATION = (
    "        _, losses[i] = model(inputs.clamp_min(0), targets, windows)\n",
    "        _, losses[i] = model(inputs.clamp_min(0), targets, windows)\n"
    "        model.lm_head.weight[targets.clamp_min(0)] += 1e-3\n",
)


def test_training_in_validation_is_caught(train, judge, rerun):
    sums = ('"changed_by_validation": loop.changed_by_validation', '"changed_by_validation": 0')
    forged = steady(train(TRAIN_IN_VALIDATION, sums, warmup_steps=0, num_steps=4))
    assert judge(forged)[0] == 0  # the log alone cannot show it
    assert rerun(log=forged, only=[examine.LOSS])[examine.LOSS][0] == "fail"


def test_training_in_a_validation_before_the_last_is_caught(train, judge):
    """In the trained parameters, whose last validation is honest."""
    sometimes = TRAIN_IN_VALIDATION[1].replace(
        "        model.lm_head", "        if trains: model.lm_head"
    )
    first = (
        "    model.eval()\n    losses =",
        "    validate.calls = getattr(validate, 'calls', 0) + 1\n"
        "    trains = validate.calls == 1\n    model.eval()\n    losses =",
    )
    log = steady(
        train((TRAIN_IN_VALIDATION[0], sometimes), first, warmup_steps=0, val_every=2, num_steps=4)
    )
    fails_only(judge(log), TRAINS, "1 of 3 validations changed the parameters")


def test_a_source_that_cannot_load_the_model_fails(honest, data, tmp_path, forked):
    log = Log(honest)
    log.source = "import torch\n"
    (e,) = verify.read_runs([log.write(tmp_path / "l.txt")], None).runs
    (verdict, reason), *others = examine.check_model(e, honest.with_suffix(".pt"), data).values()
    assert verdict == "fail" and "cannot load or run the model" in reason
    assert {verdict for verdict, _ in others} == {"not checkable"}


def test_a_source_that_gives_no_answer_is_not_waited_for(rerun, monkeypatch):
    monkeypatch.setattr(examine, "PATIENCE_S", 1)
    says(
        rerun(("ROOT = Path(", "time.sleep(3600)\nROOT = Path(")),
        examine.SAVED,
        "fail",
        "does not answer",
    )


def test_a_model_of_no_log_here_is_no_input(race, judge, honest):
    assert judge(race(), "--rerun", honest.with_suffix(".pt"))[0] == 2


# The twelve cheats, each as somebody would do it


def test_cheat_3_one_model_of_many(race, tmp_path, judge, monkeypatch):
    """Two good models are given, none for the other runs."""
    folder = race()
    passes = dict.fromkeys(examine.RULES, ("pass", "as stated"))
    monkeypatch.setattr(examine, "check_model", lambda *_, **more: passes)
    for run in (1, 2):
        torch.save({"run_id": f"{run}a", "state": {}, "config": {}}, tmp_path / f"{run}.pt")
    status, rules = judge(folder, "--rerun", tmp_path, "--data", tmp_path)
    assert status == 0 and {rules[rule][0] for rule in examine.RULES} == {"not checkable"}
    assert rules[examine.LOSS][1].startswith("2 of 4 runs examined; none fails; the first: ")


def test_cheat_4_other_weights_at_the_start(train, rerun):
    """From elsewhere, or from a source that brings them along."""
    seeded = "    torch.manual_seed(config.seed)\n    return config.model_type("
    built = (seeded, seeded.replace("seed)", "seed + 7)"))
    log = train(built, num_steps=4)
    says(
        rerun(log=log, only=[examine.INITIAL]), examine.INITIAL, "fail", "began with other weights"
    )
    says(
        rerun(built, log=log, only=[examine.INITIAL]),
        examine.INITIAL,
        "not checkable",
        "by the log's own source alone",
    )
    other = (seeded, "    \n" + seeded)
    assert rerun(other, only=[examine.INITIAL])[examine.INITIAL][0] == "pass"


def test_cheat_5_trained_on_validation(train, judge, data, tmp_path):
    """The run reads the validation shard, and its log declares the training shards."""
    forged = (
        "        self.stream = Stream(train_shards,",
        "        self.stream = Stream([read_header(Path(str(s.path).replace('train_000001',"
        " 'val_000000'))) for s in train_shards[:1]],",
    )
    log = steady(train(forged, num_steps=4, micro_batches=2))
    fails_only(judge(log, "--data", data), REPLAY, "trained on something else")


def test_a_source_that_packs_in_its_own_way_is_replayed_where_it_is(
    train, judge, data, monkeypatch, tmp_path
):
    """Documents by length: from this checkout it cannot be told, from its own it can."""
    end = "        return documents\n\n    def _limit"
    sorts = (
        "        order = np.argsort(documents.lengths, kind='stable')\n        documents ="
        " Documents(documents.tokens, documents.starts[order], documents.lengths[order])\n"
    )
    packs = (end, sorts + end)
    log = steady(train(packs, num_steps=4))
    status, rules = judge(log, "--data", data)
    says(
        rules,
        REPLAY,
        "not checkable",
        "the sections `schedule` and `data` of the source in the log",
        "--replay",
    )
    assert status == 0
    own = load(planted(packs), tmp_path / "own_train_gpt.py")
    monkeypatch.setattr(leaks, "source_of_checkout", lambda program="": planted(packs))
    monkeypatch.setattr(leaks, "trainer", lambda program="": own)
    assert judge(log, "--data", data)[1][REPLAY][0] == "pass"


def test_config_fields_that_batches_do_not_need_are_not_read(honest, judge, data, tmp_path):
    """Those of an idea that this checkout does not have, and a list of rows that it cannot read."""
    log = (
        Log(honest)
        .set("start.config.my_idea", 0.5)
        .set("start.config.param_groups", "LionGroup('head')")
    )
    says(judge(log.write(tmp_path / "l.txt"), "--data", data)[1], REPLAY, "pass")
    log.set("start.config.stages", "Stage(until=1, my_idea=2)").write(tmp_path / "l.txt")
    says(judge(tmp_path / "l.txt", "--data", data)[1], REPLAY, "not checkable", "has no 'my_idea'")


def test_cheat_8_a_source_that_patches_its_judge(rerun):
    """It patches all it can reach: the judge's modules, functions of torch and hashlib, and its
    output."""
    patch = (
        "import hashlib as h, builtins\nfor name in ('verify', 'examine', 'leaks'):\n    m ="
        " sys.modules.get(name)\n    if m: m.judged = lambda *a: ('pass', 'trust me'); m.Broken ="
        " type('B', (Exception,), {})\n    if m and hasattr(m, 'Examination'):"
        " m.Examination.check_loss = lambda *a: 'trust me'\ntorch.Tensor.logsumexp = lambda x, *a,"
        " **k: x.gather(1, x.argmax(1)[:, None])[:, 0]\nbuiltins.abs = lambda x:"
        " 0\nprint('{\"rows\": 1}', flush=True)\n"
    )
    rules = rerun(
        ("ROOT = Path(", patch + "ROOT = Path("),
        end__final_val_loss=3.0,
        end__model_hash="0" * 64,
        only=[examine.SAVED, examine.LOSS],
    )
    assert [verdict for verdict, _ in rules.values()] == ["fail", "fail"]


def test_cheat_9_the_judges_own_processes_do_not_see_them(rerun_apart, tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import os; os._exit(3)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert rerun_apart(only=[examine.LOSS])[examine.LOSS][0] == "pass"


# What the race wrote down, the page, and the run again


@pytest.fixture
def replay(honest, tmp_path, capsys, monkeypatch):
    """replay(change) -> (exit status, verdict, reason) of --replay for a log, where the run gives
    the honest log again."""

    def run(words, cwd, env, **_):
        assert "torch.distributed.run" not in words, (
            "torchrun listens on all addresses, for a stranger's source"
        )
        given = train_gpt.parse_config(words[words.index("train_gpt.py") + 1 :], "speedrun")[1]
        Path(cwd, "logs").mkdir()
        shutil.copy(honest, Path(cwd, "logs", "again.txt"))
        started.append((Path(cwd, "train_gpt.py").read_text(), given, env))
        return SimpleNamespace(stdout="Error: no data")

    started = []
    monkeypatch.setattr(verify.subprocess, "run", run)

    def replay(change=lambda log: None, seed=None):
        log = Log(honest)
        change(log)
        log.write(tmp_path / "l.txt")
        capsys.readouterr()
        status = verify.main(
            [
                str(tmp_path / "l.txt"),
                "--replay",
                str(log.start["seed"] if seed is None else seed),
                "--json",
            ]
        )
        rules = {
            rule["rule"]: rule for rule in json.loads(capsys.readouterr().out).get("rules", ())
        }
        return status, *(rules[verify.AGAIN][key] for key in ("verdict", "reason") if rules)

    replay.started = started
    return replay


def test_a_run_again_has_the_logs_source_settings_and_threads(replay, honest):
    status, verdict, reason = replay(
        lambda log: log.start["environment"].update(OMP_NUM_THREADS="3")
    )
    ((source, config, environment),) = replay.started
    log = Log(honest)
    assert (
        verdict == "pass" and "the same bytes" in reason and environment["OMP_NUM_THREADS"] == "3"
    )
    assert source + "\n" == log.source
    # rows of param_groups are added to the preset's
    stated = train_gpt.config_of(log.start["config"])
    assert {name for name, value in vars(config).items() if getattr(stated, name) != value} <= {
        *logs.INCIDENTAL,
        "param_groups",
    } and config.seed == stated.seed
    assert replay(seed=77) == (2,)


@pytest.mark.parametrize(
    "loss, changed, verdict, word",
    [
        (
            0,
            ("start.hardware.x", 1),
            "fail",
            "on the same processor, threads and torch a run gives the same bytes",
        ),
        (
            0.0001,
            ("start.hardware.cpu_id", "a processor that nobody has"),
            "pass",
            "within 0.0005 nats (other, or not logged: cpu_id, so the bytes may differ)",
        ),
        (
            0.01,
            ("start.hardware.cpu_id", "a processor that nobody has"),
            "fail",
            "more than 0.0005 nats apart",
        ),
        (
            0.01,
            ("start.shards.val", [{"name": "x", "sha256": "5" * 64, "tokens": 9}]),
            "not checkable",
            "the log states",
        ),
    ],
)
def test_other_bytes_accuse_nobody_on_another_processor_or_of_other_data(
    replay, loss, changed, verdict, word
):
    _, found, reason = replay(
        lambda log: (
            log.set("end.final_state_hash", "0" * 64)
            .set("end.final_val_loss", log.end["final_val_loss"] + loss)
            .set(*changed)
        )
    )
    assert found == verdict and word in reason, reason


def test_other_bytes_accuse_nobody_if_no_log_states_its_processor(replay, honest, monkeypatch):
    last_run = logs.last_run  # older scripts state only a name, which several generations share
    monkeypatch.setattr(
        verify.logs,
        "last_run",
        lambda path: (run := last_run(path)).start["hardware"].pop("cpu_id") and run,
    )
    assert (
        replay(
            lambda log: (
                log.start["hardware"].pop("cpu_id") and log.set("end.final_state_hash", "0" * 64)
            )
        )[1]
        == "pass"
    )


def test_a_run_again_that_does_not_end_is_no_verdict(replay, monkeypatch):
    monkeypatch.setattr(
        verify.logs, "last_run", lambda path: logs.Run(path, reason="not a log: an empty file")
    )
    assert (
        replay()[1] == "not checkable"
        and "it did not end (not a log: an empty file; Error: no data)" in replay()[2]
    )


@pytest.mark.slow
def test_a_run_again_gives_the_same_bytes(honest, data, capsys):
    assert (
        verify.main(
            [str(honest), "--replay", str(Log(honest).start["seed"]), "--data", str(data), "--json"]
        )
        == 0
    )
    (found,) = [
        rule
        for rule in json.loads(capsys.readouterr().out)["rules"]
        if rule["rule"] == verify.AGAIN
    ]
    assert found["verdict"] == "pass" and "the same bytes" in found["reason"]


# The reviewer's page: tests/golden/verify_pages.txt


def spoil(log, run, side):
    log.set("end.compiles_after_warmup", 2).set("end.state_hash.after_warmup", "0" * 64).set(
        "end.val_tokens", 512
    )
    log.set("end.changed_by_validation", 1).set("start.environment", {"TORCHINDUCTOR_X": "y" * 300})


def make_trial(log, run):
    log.set("start.target_val_loss", 0).set("start.config.target_val_loss", 0).set(
        "end.target_val_loss", 0
    )
    log.set("end.reached", False).set("end.val_tokens", 512).set(
        "start.preset", "speedrun" if run > 4 else "laptop"
    )


def public(race, faster):
    """Two sources in one folder, as in those of the public speedrun, which also hold the
    baseline's logs."""
    made = race(1)
    for path in made.iterdir():
        path.unlink()
    for i, (pace, source) in enumerate(
        [
            (60, "import torch"),
            (61, "import torch"),
            (50, "import torch, math"),
            (52, "import torch, math"),
        ]
    ):
        public_log(
            made / f"{i}.txt",
            public_lines(lambda step: 3.27 + (9 - step) / 9 + i / 1000, pace),
            source,
        )
    return made


def other_source(log, run, side):
    if side == "a":
        set_source(log, log.source.replace("adam_lr", "adam_LR", 1))


FIRST, SECOND = (
    hashlib.sha256(source.encode()).hexdigest()[:8]
    for source in ("import torch\n", "import torch, math\n")
)
PAGES = [  # exit status, folder `race`, further words
    (0, lambda race, faster: race(), ""),
    (0, lambda race, faster: faster(), ""),
    (1, sides(spoil), ""),
    (0, SIDE_EDITS["not faster"], ""),
    (0, runs(make_trial), ""),
    (2, folder(strip), "--target 4.5"),
    (2, public, ""),
    (2, public, "--source abc"),
    (2, public, f"--source {SECOND} --vs race --vs-source {FIRST}"),
    (0, lambda race, faster: race(2, "ab", other_source), "--diff"),
    (
        1,
        lambda race, faster: [race(2, "ab", other_source) / f"{run}a.txt" for run in (1, 2)],
        "--diff",
    ),
    (0, RACE_EDITS["a loss not surely below the target"], "--target 4.2"),
    (0, RACE_EDITS["a loss not surely below the target"], "--target 5"),
    (
        1,
        alone(
            lambda log: log.set("start.environment", {"TORCH_X": "\ud800\x1b[2J"}).set(
                "start.run_id", "\udcff"
            )
        ),
        "",
    ),
]


def test_pages_of_races_and_public_logs_are_short_and_end_with_what_fails(
    race, faster, honest, capsys, golden, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    shown = []
    wrong = []
    for number, (status, make, words) in enumerate(PAGES):
        made = make(race, faster)
        named = [
            str(path.relative_to(tmp_path)) for path in (made if isinstance(made, list) else [made])
        ]
        capsys.readouterr()
        if (found := verify.main([*named, *words.split(), *["-v"] * (number == 0)])) != status:
            wrong.append((number, found))
        said = capsys.readouterr()
        shown.append(
            f"$ verify.py {' '.join(named)} {words}\n{said.out}exit status {found}\n{said.err}"
        )
        if not said.out:
            continue
        lines = said.out.splitlines()
        summary = lines[: lines.index("")]
        rest = lines[lines.index("Each rule:") :] if number == 0 else []
        verdicts = [
            line.partition(":")[0]
            for line in rest
            if line.startswith(("pass:", "FAIL:", "not checkable:"))
        ]
        assert "--diff" in words or max(map(len, lines)) <= 120
        assert len(summary) <= 40 and "…" not in "".join(summary).replace(" … ", "")
        assert verdicts == sorted(verdicts, key=["pass", "not checkable", "FAIL"].index)
    assert not wrong
    golden(
        "verify_pages",
        "\n".join(shown),
        [(re.escape(Log(honest).start["hardware"]["device"]), "MACHINE")],
    )


def test_runs_of_several_experiments_break_no_rule_of_their_own(race, honest, tmp_path, judge):
    """As in logs/: a race, and single runs beside its folder."""
    race(3)
    for seed in (8, 9):
        log = (
            Log(honest)
            .label(seed, 1, "a", loss=4.0 + 0.01 * seed)
            .set("start.race", None)
            .set("start.config.race", "")
        )
        log.set("start.run_id", f"single{seed}").set("start.config.adam_lr", seed / 1000).write(
            tmp_path / f"single{seed}.txt"
        )
    _, rules = judge(tmp_path)
    says(
        rules,
        ACCOUNTS,
        "not checkable",
        "whose adam_lr differs",
        "choose with --source, or name the logs of one",
    )


def test_public_logs_of_two_sources_break_no_rule(tmp_path, judge):
    """Folders of the public speedrun also hold the baseline's logs, and no log says which are
    which."""
    for name, source in (("a", "import torch"), ("b", "import torch"), ("c", "import torch, math")):
        public_log(tmp_path / f"{name}.txt", public_lines(pace=ord(name)), source)
    status, rules = judge(tmp_path)
    assert status == 2
    says(
        rules,
        ACCOUNTS,
        "not checkable",
        "the logs do not say which runs are the record (the set holds runs of 2 sources",
    )
    (tmp_path / "c.txt").write_text(
        (tmp_path / "a.txt").read_text().replace("val_loss:3.5500", "val_loss:nan")
    )
    assert judge(tmp_path)[1][ACCOUNTS][0] == "fail"  # whatever the logs leave open


@pytest.mark.parametrize(
    "loss, more, verdict",
    [
        (2.9193, "", "pass"),
        (3.2793, "", "fail"),
        (2.9193, "torch._inductor.config.max_autotune = True", "fail"),
        (2.9193, "torch._inductor.config.coordinate_descent_tuning = True or f()", "fail"),
    ],
)
def test_the_public_track_of_larger_models_may_set_one_switch(tmp_path, judge, loss, more, verdict):
    """The public README: "`coordinate_descent_tuning` is allowed for GPT-2 Medium track (a.k.a.
    2.92 track)"."""
    source = (
        f"import torch\ntorch._inductor.config.coordinate_descent_tuning = True  # allowed\n{more}"
    )
    public_log(tmp_path / "0.txt", public_lines(lambda step: loss + 9 - step), source)
    assert judge(tmp_path)[1][SWITCHES][0] == verdict


# Honest runs that failed


def test_a_clock_that_is_reset_after_the_first_step_is_honest(tmp_path, judge):
    lines = ["step:0/9 val_loss:9.0000 train_time:285ms step_avg:nanms"] + [
        f"step:{s}/9 train_loss:4.1 train_time:{60 * s}ms step_avg:60.00ms" for s in range(1, 10)
    ]
    (tmp_path / "0.txt").write_text(
        "\n".join([*lines, lines[-1].replace("train_loss", "val_loss")]) + "\n"
    )
    assert judge(tmp_path)[1][CLOCK][0] == "pass"


# Input


@pytest.mark.parametrize(
    "make, word",
    [
        (lambda folder: folder / "nowhere", "cannot be read"),
        (lambda folder: folder, "no run to judge"),
        (lambda folder: (folder / "x.txt").write_bytes(b"\0\1\2") and folder / "x.txt", "binary"),
    ],
)
def test_input_that_cannot_be_judged(tmp_path, capsys, make, word):
    assert verify.main([str(make(tmp_path))]) == 2
    error = capsys.readouterr().err
    assert word in error and error.count("\n") == 1


def test_a_script_that_cannot_be_imported_breaks_no_rule(tmp_path, monkeypatch, capsys):
    """A racer edits train_gpt.py, and writes the pages meanwhile."""
    (tmp_path / "train_gpt.py").write_text("import torch\nx = half_an_idea\n")
    record = shutil.copytree(
        ROOT / "records" / "2026-11-28_tinyshakespeare_24",
        tmp_path / "records" / "2026-11-28_tinyshakespeare_24",
    )
    page = (record / "README.md").read_bytes()
    monkeypatch.setattr(board, "HERE", tmp_path / "records")
    monkeypatch.setattr(leaks, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "train_gpt")
    with pytest.raises(SystemExit) as end:
        board.main(["write"])
    said = capsys.readouterr()
    assert (record / "README.md").read_bytes() == page and end.value.code == 2 and not said.out
    assert (
        "train_gpt.py cannot be imported (NameError: name 'half_an_idea' is not defined)"
        in said.err
        and said.err.count("\n") == 1
    )


def test_gzip_goes_by_its_first_bytes(race, judge):
    folder = race()
    (folder / "1a.txt").rename(folder / "1a.txt.gz")  # plain
    (folder / "2a.txt").write_bytes(gzip.compress((folder / "2a.txt").read_bytes()))
    assert judge(folder)[0] == 0


def test_billions_are_not_counted_out(honest, tmp_path, judge):
    log = Log(honest).set("start.planned.steps", 10**12).set("start.race.declared_n", 10**12)
    log.lines = [line.replace("/12 ", f"/{10**12} ") for line in log.lines]
    step, loss, time_ms, _ = log.lines[-1].split()
    log.lines[-1] = f"step:{10**12}/{10**12} {loss} {time_ms} step_avg:0.00ms"
    status, rules = judge(log.write(tmp_path / "l.txt"))
    assert rules[CLOCK][0] == rules[ACCOUNTS][0] == "fail" and "have a line" in rules[CLOCK][1]
