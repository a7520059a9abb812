"""launch/race.py: order, seeds, declaration, worktree, failure, Ctrl-C and resumption, with a
script that trains nothing; and one run of the real script through the launcher."""

import contextlib
import errno
import fcntl
import functools
import importlib.util
import json
import math
import multiprocessing
import os
import shlex
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import scipy.stats

from conftest import (
    TINY,
    Script,
    as_flags,
    some_documents,
    wait_until,
    write_corpus,
    write_gpt2_tokens,
    write_shard,
)

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "records"))
import examine  # noqa: E402
import export  # noqa: E402
import history  # noqa: E402
import logs  # noqa: E402
import pages  # noqa: E402
import picture  # noqa: E402
import race  # noqa: E402
import stats  # noqa: E402
import train_gpt  # noqa: E402
import verify  # noqa: E402
from test_records_verify import forked  # noqa: E402, F401 (a fixture)

# most races here draw nothing and check no rules
DRAW = race.draw
BROKEN_RULES = race.broken_rules

# Takes train_gpt.py's flags of a race and two of its own, and writes its log. SPEED stands for what
# a version changes.
SCRIPT = """
import argparse, hashlib, json, math, os, signal, sys, time, types
from pathlib import Path
SPEED = 100
class RunError(Exception): pass
class Config(argparse.Namespace):
    target_val_loss, compile, train_shards, train_files, val_files, val_len, val_tokens = None, "off", 0, "train", "val", 8, 0
def find_shards(pattern, limit=0):
    found = sorted(Path(__file__).parent.glob(f"data/toy/toy_{pattern}_*.bin"))
    if not found: raise RunError(f"no shard matches {pattern}")
    return [types.SimpleNamespace(path=path, tokens=path.stat().st_size, encoding=(256, 0)) for path in found]
def parse_config(argv, preset):
    p = argparse.ArgumentParser("train_gpt.py", allow_abbrev=False)
    for name in ("run_id", "log_dir", "race", "mood", "save_model"): p.add_argument("--" + name, default="")
    for name in ("seed", "slower", "worse", "val_skip"): p.add_argument("--" + name, type=int, default=0)
    p.add_argument("--num_steps", type=int, default=20)
    p.add_argument("--val_tokens", type=int, default=argparse.SUPPRESS)
    for name in ("val_files", "compile"): p.add_argument("--" + name, default=argparse.SUPPRESS)
    for name in ("val_len", "target_val_loss"): p.add_argument("--" + name, type=float, default=argparse.SUPPRESS)
    return preset, p.parse_args(argv, Config())
def describe_config(c):
    return {"config": vars(c)}
def check_config(c, ranks):
    if c.slower < 0: raise RunError(f"slower is {c.slower}; give 0 or more")
def main(argv):
    preset, c = parse_config(argv, "laptop")
    here = Path(__file__).parent
    if not all((here / f"data/toy/{name}").read_bytes() for name in ("toy_train_000001.bin", "beside.it")): sys.exit("no data")
    source = Path(__file__).read_text()
    race = dict(zip(("race_id", "run", "declared_n", "side"), c.race.split(":")))
    race.update(run=int(race["run"]), declared_n=int(race["declared_n"]))
    c.mood *= race["run"] > 0  # the first run, which does not count, has none
    start = {"run_id": c.run_id, "seed": c.seed, "config": vars(c) | {"log_dir": "logs"}, "ranks": 1, "preset": preset,
             "hardware": {"cores": os.cpu_count()},
             "source_sha256": hashlib.sha256(source.encode()).hexdigest(),
             "caches": [os.environ[f"{name}_CACHE_DIR"] for name in ("TORCHINDUCTOR", "TRITON")] * (c.compile == "on"),
             "race": race, "isolated": sys.flags.isolated}
    ms = (SPEED + c.slower) * c.num_steps // 20 + c.seed * (3 if c.mood == "jittery" and race["side"] == "b" else 1)
    with open(Path(c.log_dir) / f"{c.run_id}.txt", "x") as log:
        print(source, "=" * 100, "python", "=" * 100, json.dumps(start), sep="\\n", file=log, flush=True)
        if (c.mood == "sleepy" or Path("asleep").exists()) and not Path("awake").exists(): time.sleep(3600)
        if c.mood == "stubborn":
            for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
            Path("deaf").touch(); time.sleep(3600)
        if c.compile == "on" and race["side"] == "b" and race["run"] == 0:
            print("step:1/4 train_time:1ms step_avg:1.00ms", file=log, flush=True); time.sleep(3600)
        if c.mood == "fail on 2" and race["run"] == 2 and not Path("awake").exists(): sys.exit(3)
        last = f"step:{c.num_steps}/{c.num_steps}"
        print(f"{last} train_time:{ms}ms step_avg:{ms}.00ms", file=log)
        # the base loses 0.25 nats per unit of ln(time)
        loss = 3.2 + c.seed / 1000 + c.worse * (10 + c.seed % 3) / 1000
        if c.num_steps != 20: loss -= 0.25 * math.log(c.num_steps / 20) + c.seed % 3 / 1e4
        print(f"{last} val_loss:{loss:.4f} train_time:{ms}ms step_avg:{ms}.00ms", file=log)
        print(json.dumps({"end": {"final_val_loss": loss, "steps": c.num_steps, "train_time_ms": ms, "wall_seconds": 1500}}), file=log)
    if c.mood == "fail at the end": sys.exit(3)
    if c.mood == "sleepy at the end": time.sleep(3600)
if __name__ == "__main__": main(sys.argv[1:])
"""


# Another project's, which takes no flag of ours and names its log itself
THEIRS = """
import sys, time, uuid
from pathlib import Path
mood = sys.argv[1] if len(sys.argv) > 1 else ""
runs = len(list(Path("logs").glob("*-*.txt")))
if mood == "fails": sys.exit("theirs: no such GPU")
if mood == "no log": sys.exit()
with open(f"logs/{uuid.uuid4()}.txt", "w") as log:
    print(open(__file__).read(), "=" * 100, "Running PyTorch, world_size: 1", "=" * 100, sep="\\n", file=log, flush=True)
    if mood == "no steps": sys.exit("theirs: out of memory")
    if mood == "sleepy" and not Path("awake").exists(): time.sleep(3600)
    for step, loss in enumerate((10.8258, 3.25 + runs / 1000)):
        ms = step * (300 + 2 * runs)
        print(f"step:{step}/1 val_loss:{loss:.4f} train_time:{ms}ms step_avg:{ms / max(step, 1):.2f}ms", file=log, flush=True)
    print("peak memory allocated: 31 MiB reserved: 40 MiB", file=log)
"""


def git(folder, *arguments):
    return subprocess.run(
        ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository with two versions of the script, the second checked out, in which race.py
    works."""
    repo = tmp_path / "repo"
    (repo / "data/toy").mkdir(parents=True)
    for name in "toy_train_000001.bin", "toy_val_000000.bin", "beside.it":
        (repo / "data/toy" / name).write_bytes(b"tokens")
    (repo / ".gitignore").write_text("/data/*/\n/logs/\n")
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "nothing yet")
    for speed in (200, 100):
        (repo / "train_gpt.py").write_text(SCRIPT.replace("SPEED = 100", f"SPEED = {speed}"))
        git(repo, "add", "-A")
        git(repo, "commit", "-qm", f"speed {speed}")
    monkeypatch.setattr(race, "ROOT", repo)
    monkeypatch.setattr(race, "command", lambda ranks, program: [*race.ALONE, program])
    monkeypatch.setattr(race, "PATIENCE_S", 10)
    monkeypatch.setattr(race, "draw", lambda *_: None)
    monkeypatch.setattr(race, "broken_rules", lambda *_: [])  # the stand-in's logs break some
    monkeypatch.setattr(race.turns, "measure", no_turns)
    # the stand-in has flags of its own
    monkeypatch.setattr(race.start, "read_flags", lambda *_: None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(race.tempfile, "tempdir", None)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield repo
    for number, handler in before.items():
        signal.signal(number, handler)
    assert len(git(repo, "worktree", "list").splitlines()) == 1 and not list(
        tmp_path.glob("race-*")
    )


def no_turns(*_):
    raise race.turns.SideFailed("the stand-in takes no steps")


def only_race(repo):
    (folder,) = (repo / "logs").iterdir()
    declared, *events = [
        json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()
    ]
    counted = [event for event in events if event.get("run") and event["side"] != "short"]
    return folder, declared["race"], counted


def starts(events):
    return [
        (event["run"], event["side"], event["seed"])
        for event in events
        if event["status"] == "started"
    ]


def interrupt_when(holds, number=signal.SIGINT, times=1):
    """Send this process a signal as soon as holds() is true, then every half second."""

    def interrupt():
        wait_until(holds)
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    threading.Thread(target=interrupt, daemon=True).start()


def test_one_version(repo):
    assert (
        race.parse(["--vs", "HEAD"]).n == 5
        and race.parse(["--until-decided", "--max-n", "8"]).n == 8
        and race.parse(["--resume", "x"]).n is None
    )
    assert race.main(["-n", "3"]) == 0
    folder, described, events = only_race(repo)
    assert described["n"] == 3 and starts(events) == [(1, "", 1), (2, "", 2), (3, "", 3)]
    runs = logs.read([str(folder)]).runs
    assert sorted(run.start["race"]["run"] for run in runs) == [1, 2, 3]
    assert {(run.start["race"]["declared_n"], run.start["race"]["side"]) for run in runs} == {
        (3, "")
    }
    uncounted = [json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()][1:3]
    assert [(event["run"], event["status"]) for event in uncounted] == [(0, "started"), (0, "done")]
    assert not list(folder.rglob("*_00.*")), "its log is gone"
    for name in ("notes.txt", "x_01.steps.json"):  # older races wrote the latter
        (folder / name).write_text("[]")
    beside = stats.gather("it", logs.read([str(folder)]), stats.parse([str(folder)])).left_out
    assert [Path(path).name for path, _ in beside] == ["notes.txt"]


def test_another_revision_runs_in_turn_from_a_worktree(repo, capsys):
    assert race.main(["-n", "3", "--vs", "HEAD"]) == 2, "A against A"
    assert "this checkout and HEAD have the same code in train_gpt.py" in capsys.readouterr().err
    assert race.main(["-n", "3", "--vs", "HEAD~1", "--", "--seed", "40"]) == 0
    folder, described, events = only_race(repo)
    ran = [f"{run}{side}" for run, side, _ in starts(events)]
    assert ran == "1a 1b 2b 2a 3a 3b".split()
    assert all(seed == 40 + run for run, _, seed in starts(events))
    runs = logs.read([str(folder)]).runs
    runs = [run for run in runs if run.start["race"]["side"] != "short"]
    times = {(run.start["race"]["side"], run.start["seed"]): run.train_time_ms for run in runs}
    assert times == {
        (side, seed): speed + seed
        for side, speed in (("a", 100), ("b", 200))
        for seed in (41, 42, 43)
    }
    assert all(
        "SPEED = 200" in Path(run.path).read_text()
        for run in runs
        if run.start["race"]["side"] == "b"
    )
    assert "this checkout reaches the base's loss in 0.58" in capsys.readouterr().out
    assert list(logs.side_names(described).values()) == ["this checkout", "HEAD~1"] and described[
        "sides"
    ]["b"]["revision"] == git(repo, "rev-parse", "HEAD~1")
    verdicts = {
        finding.rule: finding.verdict for finding in verify.verify(verify.parse([str(folder)]))
    }
    assert verdicts["every run is accounted for"] == "pass"
    assert verdicts["faster than the other side, p < 0.01"] == "pass"


def test_every_tool_takes_the_latest_race_and_names_its_sides_alike(repo, capsys, monkeypatch):
    monkeypatch.chdir(repo)
    monkeypatch.setattr(logs, "HOME", repo / "logs")
    assert [race.main(["-n", "3", "--vs", idea]) for idea in ("--worse 1", "--slower 7")] == [1, 1]
    folder = max(repo.glob("logs/*/race.jsonl"), key=os.path.getmtime).parent
    capsys.readouterr()
    for tool, status, *words in (
        (stats, 1),
        (verify, 1),
        (picture, 0),
        (export, 0, "--to", "csv", "--out", "out"),
    ):
        assert tool.main(["latest", *words]) == status
        assert capsys.readouterr().err.startswith(f"latest: logs/{folder.name}\n")
    assert sorted(pages.run_names(logs.read([folder]).runs)) == [
        f"{side}, run {run}" for side in ("--slower 7", "base") for run in (1, 2, 3)
    ]
    assert sorted(
        line.split(",")[1] for line in (repo / "out/runs.csv").read_text().splitlines()
    ) == ["--slower 7"] * 3 + ["base"] * 3 + ["side"]


def test_an_edit_that_changes_no_code_is_no_idea(repo, capsys):
    source = repo / "train_gpt.py"
    for text in (
        SCRIPT + "# a comment\n",
        '"""A docstring."""' + SCRIPT,
        SCRIPT.replace("SPEED = 100", "SPEED   =  100"),
        SCRIPT + 'PRESETS = {**PRESETS, "bench": None}\n',
    ):
        source.write_text(text)
        assert race.main(["-n", "2", "--vs", "HEAD"]) == 2 and not (repo / "logs").exists()
        assert "have the same code in train_gpt.py" in capsys.readouterr().err
    assert len(race.describe_sides(["HEAD"], None, ["--preset=bench"])) == 2
    with pytest.raises(race.UserError, match="have the same code"):
        race.describe_sides(["HEAD"], None, ["--preset=laptop"])


@pytest.mark.parametrize(
    "statement",
    ["my_idea = __import__('my_idea')", "import package.my_idea as my_idea"],
)
def test_an_idea_in_a_file_of_its_own_is_refused_before_a_run(repo, capsys, statement):
    (repo / "package").mkdir()
    for path in (repo / "my_idea.py", repo / "package/my_idea.py"):
        path.write_text("SPEED = 50\n")
    (repo / "train_gpt.py").write_text(
        SCRIPT.replace("SPEED = 100", f"{statement}; SPEED = my_idea.SPEED")
    )
    assert race.main(["-n", "2", "--vs", "HEAD"]) == 2 and not (repo / "logs").exists()
    name = "package" if "package" in statement else "my_idea"
    assert f"imports {name}, a file of this folder" in capsys.readouterr().err


def test_a_race_touches_no_worktree_but_its_own(repo):
    """Not one whose disk is away; and the user's hooks do not run in the race's."""
    away = repo.parent / "away"
    back = repo.parent / "back"
    git(repo, "worktree", "add", str(away))
    away.rename(back)
    hook = repo / ".git/hooks/post-checkout"
    hook.write_text("#!/bin/sh\nexit 2\n")
    hook.chmod(0o755)
    assert race.main(["-n", "2", "--vs", "HEAD~1"]) in (0, 1)
    back.rename(away)
    assert (
        git(away, "rev-parse", "--show-toplevel") == str(away)
        and len(git(repo, "worktree", "list").splitlines()) == 2
    )
    git(repo, "worktree", "remove", str(away))


def test_a_race_from_a_git_hook_is_of_this_checkout(repo, monkeypatch):
    other = repo.parent / "other"
    other.mkdir()
    git(other, "init", "-q")
    git(other, "commit", "-q", "--allow-empty", "-m", "other")
    (index := repo.parent / "index").write_bytes(before := (repo / ".git/index").read_bytes())
    with monkeypatch.context() as hook:
        for name, value in (
            ("DIR", other / ".git"),
            ("WORK_TREE", other),
            ("INDEX_FILE", index),
            ("COMMON_DIR", other / ".git"),
        ):
            hook.setenv(f"GIT_{name}", str(value))
        hook.setenv("GIT_CONFIG_COUNT", "0")  # names no repository
        assert race.main(["-n", "2", "--vs", "HEAD~1"]) in (0, 1)
        left = [name for name in race.environment() if name.startswith("GIT_")]
        assert "GIT_CONFIG_COUNT" in left and all(name.startswith("GIT_CONFIG") for name in left)
        assert train_gpt.output_of("git", "rev-parse", "--show-toplevel") == str(ROOT)
    assert (
        only_race(repo)[1]["sides"]["b"]["revision"] == git(repo, "rev-parse", "HEAD~1")
        and index.read_bytes() == before
    )


def test_a_race_says_what_git_says(repo, capsys):
    (repo / ".git").rename(repo / "git")
    assert (
        race.main(["-n", "2", "--vs", "HEAD"]) == 2
        and "git: fatal: not a git repository" in capsys.readouterr().err
    )
    assert race.main(["-n", "1"]) == 0
    (repo / "git").rename(repo / ".git")
    (repo / ".git/refs/heads/broken").write_text("no hash\n")
    assert race.main(["-n", "2", "--vs", "HEAD~1"]) in (0, 1)
    (repo / ".git/objects").rename(repo / "objects")
    assert (
        race.main(["-n", "2", "--vs", "HEAD~1"]) == 2 and "git: fatal: " in capsys.readouterr().err
    )
    (repo / "objects").rename(repo / ".git/objects")


def test_a_race_and_a_run_start_on_a_file_system_without_locks(repo, monkeypatch, tmp_path):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    assert race.main(["-n", "1"]) == 0
    log = train_gpt.Log(train_gpt.Config(log_dir=str(tmp_path)), 0, "x")
    log.open({}, "", None)
    log.write("step:1")
    assert (tmp_path / "x.txt").read_text().endswith("step:1\n")
    os.utime(tmp_path / "x.txt", (0, 0))
    assert not export.ended(tmp_path / "x.txt", logs.last_run(str(tmp_path / "x.txt"))), (
        "no lock tells that it was killed"
    )


@pytest.mark.parametrize("written", [b"", b'{"race": {"id'])
def test_a_race_that_cannot_be_declared_leaves_no_folder(repo, capsys, monkeypatch, written):
    def write(manifest, event):
        manifest.path.write_bytes(written)
        raise OSError(errno.ENOSPC, "No space left on device", str(manifest.path))

    monkeypatch.setattr(race.Manifest, "write", write)
    assert (
        race.main(["-n", "1"]) == 2
        and not [*(repo / "logs").iterdir()]
        and "No space left" in capsys.readouterr().err
    )


def test_a_second_race_in_a_checkout_is_refused(repo, capsys):
    first = repo / "logs/race-first/race.jsonl"
    first.parent.mkdir(parents=True)
    with race.lock_race(first):
        assert race.main(["-n", "1", "--json"]) == 2
        assert (
            "logs/race-first, or a run of it, is still running"
            in json.loads(capsys.readouterr().out.splitlines()[-1])["reason"]
        )
        assert [path.name for path in (repo / "logs").iterdir()] == ["race-first"]
    assert race.main(["-n", "1"]) == 0


def test_a_win_that_breaks_a_rule_is_none(repo, capsys, monkeypatch):
    """The stand-in's logs lack what honest logs have."""
    monkeypatch.setattr(race, "broken_rules", BROKEN_RULES)
    for idea, status, verdict in (("--worse -1", 1, "rule broken"), ("--worse 1", 1, "worse")):
        assert race.main(["-n", "3", "--json", "--vs", idea, "--", "--mood", "good"]) == status
        said = capsys.readouterr().out
        found = json.loads(said.splitlines()[-1])
        assert (found["status"], found["verdict"], found["best"]) == (status, verdict, None)
        assert found["rules"] and all(
            f"a rule is broken: {rule}" in said for rule in found["rules"]
        )


@pytest.mark.parametrize("edited", [True, False])
def test_several_revisions_are_compared_with_the_last(repo, capsys, edited):
    """This checkout too, if it is none of them. A branch keeps its name."""
    git(repo, "branch", "idea", "HEAD")
    if edited:
        (repo / "train_gpt.py").write_text(SCRIPT.replace("SPEED = 100", "SPEED = 50"))
    assert (
        race.main(
            ["-n", "3", "--trial", "--name", "half as long", "--vs", "idea", "--vs", "HEAD~1"]
        )
        == 0
    )
    folder, described, _ = only_race(repo)
    assert described["trial"]
    names = [*["half as long"] * edited, "idea", "HEAD~1"]
    assert list(logs.side_names(described).values()) == names
    times = {
        run.start["race"]["side"]: run.train_time_ms
        for run in logs.read([str(folder)]).runs
        if run.start["seed"] == 2
    }
    assert [times[side] for side in sorted(times)] == [*[52] * edited, 102, 202]
    shown = capsys.readouterr().out.rpartition("race: all runs are done")[2]
    for name in names:
        said = f"{name} is not judged: a trial shows that everything works" in shown
        assert said == (name != names[-1])


@pytest.fixture
def theirs(repo):
    """The folder of another project, with an earlier log."""
    folder = repo.parent / "theirs"
    (folder / "logs").mkdir(parents=True)
    (folder / "logs/before.txt").write_text(
        "step:1/1 val_loss:1.0000 train_time:5ms step_avg:5.00ms\n"
    )
    (folder / "their_gpt.py").write_text(THEIRS)
    return folder


def against(mood=""):
    return ["--vs", "../theirs", "--cmd", f"{shlex.quote(sys.executable)} their_gpt.py {mood}"]


def test_another_project_s_script_runs_in_turn_and_is_judged_by_the_same_figures(
    repo, theirs, capsys
):
    assert race.main(["-n", "3", *against(), "--", "--slower", "7"]) == 0
    folder, described, events = only_race(repo)
    assert [f"{run}{side}" for run, side, _ in starts(events)] == "1a 1b 2b 2a 3a 3b".split()
    own = {path.read_bytes() for path in (theirs / "logs").glob("*-*.txt")}
    assert len(own) == 3 and {path.read_bytes() for path in folder.glob("*b.txt")} == own
    shown = capsys.readouterr().out
    ours = [107 + seed for seed in (1, 2, 3)]
    test = scipy.stats.ttest_rel(
        [math.log(ms) for ms in ours], [math.log(ms) for ms in (300, 302, 304)], alternative="less"
    )
    assert (
        f"faster by the paired test of log time (p = {test.pvalue:.4g})" in shown
        and "The claim holds" in shown
    )
    for log in folder.glob("*a.txt"):
        log.write_text(log.read_text().replace('"wall_seconds": 1500', '"wall_seconds": 0.01'))
    verdicts = {
        finding.rule: finding.verdict for finding in verify.verify(verify.parse([str(folder)]))
    }
    assert verdicts["faster than the other side, p < 0.01"] == "pass"
    assert verdicts["the wall clock agrees with the race's"] != "fail"
    # theirs do not describe themselves
    assert verdicts["every run is accounted for"] == "not checkable"


@pytest.mark.parametrize(
    "mood, says",
    [
        ("'no log'", "ended with exit status 0, and it wrote no log to {theirs}/logs/*.txt"),
        ("'no steps'", "ended with exit status 1, and its log {theirs}/logs/"),
    ],
)
def test_another_project_s_script_that_leaves_no_run_stops_the_race(
    repo, theirs, capsys, mood, says
):
    assert race.main(["-n", "2", *against(mood)]) == 2
    assert [event["status"] for event in only_race(repo)[2]] == [
        "started",
        "done",
        "started",
        "failed",
    ]
    shown = capsys.readouterr().out
    assert (
        says.format(theirs=theirs) in shown
        and ("no step" in shown) == ("steps" in mood)
        and re.search("2/4  theirs +seed 1: failed; its output is above", shown)
    )


def test_another_project_s_script_is_interrupted_with_the_race_and_goes_on(repo, theirs, capsys):
    interrupt_when(lambda: list(theirs.glob("logs/*-*.txt")))
    assert race.main(["-n", "2", *against("sleepy")]) == 130
    folder, _, events = only_race(repo)
    assert events[-1]["status"] == "interrupted" and events[-1]["exit"] == -signal.SIGINT
    assert "interrupted; 1 of 4 runs are done" in capsys.readouterr().out
    (theirs / "awake").touch()
    resume = ["--resume", str(folder / "race.jsonl")]
    for words in (
        [],
        against("fails"),
        ["--vs", "..", *against("sleepy")[2:]],
    ):  # the file may be a stranger's
        assert race.main([*resume, *words]) == 2
        said = capsys.readouterr().err
        assert "this race runs another project's command; to allow it: " in said and said.endswith(
            "their_gpt.py sleepy'\n"
        ), said
    assert len(only_race(repo)[2]) == len(events)
    assert race.main([*resume, *against("sleepy")]) == 0
    assert [
        f"{run}{side}" for run, side, _ in starts(only_race(repo)[2])
    ] == "1a 1b 1b 2b 2a".split()
    (theirs / "their_gpt.py").write_text(THEIRS + "# faster")
    assert race.main([*resume, *against("sleepy")]) == 2
    assert "train_gpt.py of theirs has changed" in capsys.readouterr().err


def test_a_better_idea_is_confirmed_on_new_seeds_and_raced_elsewhere(repo, capsys, monkeypatch):
    """The short base is run once for a race and its confirmation; others have another base."""
    monkeypatch.setattr(logs, "HOME", repo / "logs")
    idea = "--worse -1 --slower 0"
    words = f"-n 3 --vs '{idea}' --confirm --at '--num_steps 40' --json -- --slower 10"
    assert race.main(shlex.split(words)) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    assert found["confirmation"]["shown"] and found["confirmation"]["steps"] == 20
    (there,) = found["elsewhere"]
    assert there["at"] == "--num_steps 40" and there["carries_over"] in ("holds", "grows", "fades")
    assert found["best"] == idea and out.count("/6  base, short ") == 6
    history.main(["--json"])
    rows = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in rows] == ["better"] * 3
    assert rows[1]["confirms"] == idea and rows[2]["at"] == "--num_steps 40"
    history.main([])
    assert f"{idea}, at --num_steps 40" in capsys.readouterr().out
    # a race that follows is resumed as a part of the first
    assert race.main(["--resume", there["folder"], "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["confirmation"]["shown"] and again["elsewhere"] == [there]


def test_a_win_is_confirmed_on_validation_tokens_that_no_race_has_read(repo, capsys):
    idea = "--worse -1 --slower 0"
    words = f"-n 3 --vs '{idea}' --confirm --json -- --slower 10 --val_tokens 1"
    assert race.main(shlex.split(words)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    folder = Path(found["confirmation"]["folder"])
    sides = race.Manifest.read(folder / "race.jsonl").race["sides"].values()
    assert [side["config"]["val_skip"] for side in sides] == [1, 1]


def test_a_win_that_new_seeds_do_not_show_is_none(repo, monkeypatch):
    monkeypatch.setattr(race.same_loss, "confirms", lambda *_: (False, "not again"))
    assert race.main(["-n", "3", "--vs", "--worse -1", "--confirm", "--", "--mood", "good"]) == 1


def test_of_several_ideas_one_that_fails_is_out_and_the_others_are_judged(repo, capsys):
    words = (
        "-n 3 --vs '--worse -1' --vs '--mood \"fail on 2\"' --vs '--worse 2' --json -- --slower 1"
    )
    assert race.main(shlex.split(words)) == 0
    out = capsys.readouterr().out
    found = json.loads(out.splitlines()[-1])
    verdicts = {idea["name"]: idea["verdict"] for idea in found["ideas"]}
    assert found["best"] == "--worse -1" and sorted(verdicts.values()) == [
        "better",
        "not judged",
        "worse",
    ]
    assert "leaves: its run with seed 2 failed" in out


def test_times_by_turns_and_the_same_work_of_the_real_script(tmp_path, monkeypatch):
    """Two sides of one rank: a rate changes no operation, fewer micro-batches do."""
    monkeypatch.setattr(race.turns, "BUDGET_S", 0.1)
    monkeypatch.setattr(race.turns, "LONG_S", 0.1)
    small = {
        "layers": "S0M LM",
        "backout_layer": 0,
        "micro_batches": 3,
        "warmup_steps": 0,
        "stages": "Stage(until=1/2, long_window=3), Stage(long_window=7)",
    }
    flags_of_all = as_flags({**TINY, **write_corpus(tmp_path, train=(9000,)), **small})

    class Fork(Script):
        """In place of subprocess.Popen: it imports no torch."""

        def __init__(self, words, env, **_):
            outputs = (tmp_path / f"{name}{words[-2]}" for name in ("out", "err"))
            super().__init__(words[len(race.ALONE) :], env, os.setsid, *outputs)

        def poll(self):
            return self.returncode

        def wait(self, seconds):
            self.process.join(seconds)
            if self.returncode is None:
                raise subprocess.TimeoutExpired(self.argv, seconds)

    class Side(race.turns.SideProcess):
        """Of several comparisons: the test ends it."""

        def __init__(self, flag):
            words = [*race.ALONE, str(ROOT / "launch" / "turns.py"), "SOCKET", "work"]
            words += ["train_gpt.py", *flags_of_all, flag]
            environment = {**race.environment(), "OMP_NUM_THREADS": "1"}
            with monkeypatch.context() as patch:
                if flag != "--seed=0":  # one is started as a race does
                    patch.setattr(subprocess, "Popen", Fork)
                super().__init__(words, 1, cwd=ROOT, env=environment)

        describe = functools.cache(race.turns.SideProcess.describe)

        def __exit__(self, *_):
            pass

    with contextlib.ExitStack() as ended:
        sides = [Side(flag) for flag in ("--muon_lr=0.03", "--seed=0", "--micro_batches=1")]
        for side in sides:
            ended.callback(super(Side, side).__exit__)
        rate, base, few = (lambda kind, side=side: side for side in sides)
        same = race.turns.measure(rate, base, print)
        other = race.turns.measure(few, base, print)
    assert same["same_operations"] and same["turns"] >= race.turns.MIN_TURNS
    assert not other["same_operations"] and other["log_ratio"] < 0
    assert all(side.process.returncode is not None for side in sides)


def test_sides_that_fail_are_asked_for_times_alone_and_say_why():
    def side(kind):
        fails = "import sys; sys.exit(f'error: no {sys.argv[1]}')"
        return race.turns.SideProcess([sys.executable, "-c", fails, kind], 1)

    said = []
    with pytest.raises(race.turns.SideFailed, match="error: no time"):
        race.turns.measure(side, side, said.append)
    assert len(said) == 1 and "(error: no work)" in said[0]


def test_holm_s_correction():
    """An example computed by hand."""
    assert stats.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert stats.holm([0.5, 0.9]) == [1.0, 1.0]


def test_a_failed_run_stops_the_race_and_is_repeated_with_its_seed(repo, capsys):
    assert race.main(["-n", "3", "--", "--mood", "fail on 2"]) == 2
    folder, _, events = only_race(repo)
    assert [event["status"] for event in events] == [
        "started",
        "done",
        "started",
        "failed",
    ] and events[-1]["exit"] == 3
    assert f"./run.sh --resume logs/{folder.name}\n" in capsys.readouterr().out
    whole = (repo / "train_gpt.py").read_text()
    (repo / "train_gpt.py").write_text(SCRIPT + "# faster\n")
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 2
    assert "has changed since the race began" in capsys.readouterr().err
    (repo / "train_gpt.py").write_text(whole)
    (repo / "awake").touch()
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 0
    assert starts(only_race(repo)[2]) == [(1, "", 1), (2, "", 2), (2, "", 2), (3, "", 3)]
    findings = {finding.rule: finding for finding in verify.verify(verify.parse([str(folder)]))}
    accounts = findings["every run is accounted for"]
    assert (
        accounts.verdict == "pass"
        and "run 2, " in accounts.reason
        and ": failed" in accounts.reason
    )


@pytest.mark.parametrize("at, kept", [("run_all", True), ("lock_race", False)])
def test_an_interrupt_between_runs_says_how_to_resume_a_race_that_is_declared(
    repo, capsys, monkeypatch, at, kept
):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(race, at, interrupt)
    assert race.main(["-n", "1"]) == 130
    manifests = [*repo.glob("logs/*/race.jsonl")]
    says = "race: interrupted before a run" + "".join(
        f". Continue with: ./run.sh --resume logs/{path.parent.name}" for path in manifests
    )
    assert capsys.readouterr().out.endswith(f"\n{says}\n") and len(manifests) == kept


def test_an_interrupted_race_keeps_what_is_done_and_goes_on(repo, capsys, monkeypatch):
    processes = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: processes.append(popen(*a, **k)) or processes[-1]
    )
    # not as under nohup, where a race goes on by right
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    interrupt_when(lambda: list(repo.glob("logs/*/*.txt")), signal.SIGHUP)
    assert race.main(["-n", "2", "--vs", "HEAD~1", "--", "--mood", "sleepy"]) == 130
    folder, _, events = only_race(repo)
    assert [event["status"] for event in events] == ["started", "interrupted"] and events[-1][
        "logged"
    ]
    assert "Continue with" in capsys.readouterr().out
    assert all(process.poll() is not None for process in processes)  # no run goes on by itself
    assert len(git(repo, "worktree", "list").splitlines()) == 1
    (repo / "awake").touch()
    # side b looks for `awake` in its own folder, which a new worktree lacks: let it not be sleepy
    manifest = (folder / "race.jsonl").read_text().replace('"sleepy"', '"lively"')
    (folder / "race.jsonl").write_text(manifest)
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 0
    assert [
        f"{run}{side}" for run, side, _ in starts(only_race(repo)[2])
    ] == "1a 1a 1b 2b 2a".split()
    assert sum("SPEED = 200" in path.read_text() for path in folder.glob("*b.txt")) == 2


@pytest.mark.parametrize("run, number", [(0, signal.SIGTERM), (1, signal.SIGINT)])
def test_an_interrupt_while_a_run_is_being_started_reaches_that_run(
    repo, capsys, monkeypatch, run, number
):
    processes = []
    popen = subprocess.Popen

    def start(words, **settings):
        processes.append(popen(words, **settings))
        if any(word.startswith("--race=") and word.split(":")[1] == str(run) for word in words):
            os.kill(os.getpid(), number)
        return processes[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    if run == 0:  # which has no mood, and may end before a busy machine interrupts it
        (repo / "asleep").touch()
    assert race.main(["-n", "1", "--", "--mood", "sleepy"]) == 130
    folder = only_race(repo)[0]
    events = [json.loads(line) for line in (folder / "race.jsonl").read_text().splitlines()[1:]]
    assert [(event["run"], event["status"]) for event in events] == [
        (0, "started"),
        (0, "done"),
    ] * run + [(run, "started"), (run, "interrupted")]
    assert "race: interrupted; 0 of 1 runs are done" in capsys.readouterr().out
    assert all(process.poll() is not None for process in processes) and not list(
        folder.rglob("*_00[ab]*")
    )


def test_a_second_interrupt_kills_a_run_that_heeds_none(repo, monkeypatch):
    monkeypatch.setattr(race, "PATIENCE_S", 100)
    interrupt_when((repo / "deaf").exists, times=2)
    assert race.main(["-n", "1", "--", "--mood", "stubborn"]) == 130
    assert [(event["status"], event.get("exit")) for event in only_race(repo)[2]] == [
        ("started", None),
        ("interrupted", -signal.SIGKILL),
    ]


def test_a_race_that_nohup_started_heeds_no_hangup(repo):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert race.main(["-n", "1"]) == 0 and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_run_with_a_whole_log_is_done_however_it_ended(repo, capsys, monkeypatch):
    assert race.main(["-n", "1", "--", "--mood", "fail at the end"]) == 0
    assert [(event["status"], event.get("exit")) for event in only_race(repo)[2]] == [
        ("started", None),
        ("done", 3),
    ]
    shutil.rmtree(repo / "logs")
    interrupt_when(lambda: [log for log in repo.glob("logs/*/*.txt") if '"end"' in log.read_text()])
    assert race.main(["-n", "2", "--", "--mood", "sleepy at the end"]) == 130
    folder, _, events = only_race(repo)
    assert [event["status"] for event in events] == ["started", "done"]
    assert "interrupted; 1 of 2 runs are done" in capsys.readouterr().out
    manifest = (folder / "race.jsonl").read_text().replace("sleepy at the end", "lively")
    (folder / "race.jsonl").write_text(manifest)
    # runs of two moods cannot be judged
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 2
    assert starts(only_race(repo)[2]) == [(1, "", 1), (2, "", 2)]


def test_a_run_of_a_side_that_the_race_has_not_is_not_shown(repo, capsys):
    """A manifest may come from elsewhere; verify.py reports that the line does not belong to the
    race."""
    assert race.main(["-n", "2"]) == 0
    path = only_race(repo)[0] / "race.jsonl"
    with open(path, "a") as file:
        file.write(json.dumps({**only_race(repo)[2][-1], "run_id": "x", "side": "c"}) + "\n")
    capsys.readouterr()
    assert race.main(["--resume", str(path)]) == 0
    shown = capsys.readouterr().out
    assert (
        re.search(r"^Loss of this checkout \(2 runs, target 3.28\)$", shown, re.M)
        and "side c" not in shown
    )


def test_a_race_that_died_is_settled_by_its_logs(repo, capsys):
    assert race.main(["-n", "2"]) == 0
    folder, _, events = only_race(repo)
    *lines, _ = (folder / "race.jsonl").read_text().splitlines()  # the last is the answer
    # run 2 was started, and the line that says how it ended was cut
    (folder / "race.jsonl").write_text("\n".join(lines)[:-20])
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 0
    assert "is incomplete and was dropped" in capsys.readouterr().out
    assert only_race(repo)[2][-1]["status"] == "done" and len(list(folder.glob("*.txt"))) == 2
    (folder / f"{events[-1]['run_id']}.txt").unlink()
    (folder / "race.jsonl").write_text("\n".join(lines[:-1]) + "\n")
    assert race.main(["--resume", str(folder / "race.jsonl")]) == 0
    assert [event["status"] for event in only_race(repo)[2][-3:]] == ["lost", "started", "done"]


def test_a_script_that_changes_during_the_race_stops_it(repo, capsys, monkeypatch):
    once = race.run_once

    def change_after(*arguments):
        status = once(*arguments)
        if starts(only_race(repo)[2]):  # after the first run, which does not count
            (repo / "train_gpt.py").write_text(SCRIPT + "# faster\n")
        return status

    monkeypatch.setattr(race, "run_once", change_after)
    assert race.main(["-n", "2"]) == 2
    assert (
        "was changed during the race" in capsys.readouterr().err
        and len(starts(only_race(repo)[2])) == 1
    )


def test_what_the_script_reads_is_opened_before_the_first_run(tmp_path, script):
    """Also GPT-2's tokens beside the shards, which frontier reads, and a saved model."""
    for split in "train", "val":
        write_shard(
            tmp_path / f"toy_{split}_000001.bin",
            some_documents(1, 9000, 50257, 50256),
            50257,
            50256,
        )
    (tmp_path / "copy").mkdir()
    for name in "train_gpt.py", "frontier.py":
        shutil.copy(ROOT / name, tmp_path / "copy")
    flags = ["--preset", "frontier", "--train_files", f"{tmp_path}/toy_train_*.bin"]
    flags += ["--val_files", f"{tmp_path}/toy_val_*.bin"]
    (tmp_path / "check.py").write_text(race.CHECK)

    def check(*more):
        there = functools.partial(os.chdir, tmp_path / "copy")
        checking = script(tmp_path / "check.py", 1, *flags, *more, prepare=there)
        return checking.communicate(timeout=600)

    assert re.search("gpt2.tiktoken.* is missing", check()[1])
    write_gpt2_tokens(tmp_path)
    side = json.loads(check()[0])
    assert (side["program"], side["target"]) == ("frontier.py", 3.28)
    assert side["validation"][2:] == [["toy_val_000001.bin", 9000]]
    assert re.search("No such file.*nowhere.pt", check("--init_from", "nowhere.pt")[1])


# What it prints: tests/golden/race.txt and race_refusals.txt

REFUSED = """-n 2 --vs nowhere
-n 2 --vs HEAD~2
-n 1 -- --nosuch 1
-n 1 -- --slower -3
-n 2 --vs "--slower -3"
-n 2 --vs "--mood 'x"
-n 2 --vs "--slower 1 --val_files nowhere"
-n 2 --vs "--val_len 9"
-n 3 --vs "--slower 1" --vs "--val_files train"
-n 2 --vs "--target_val_loss 3"
-n 1 -- --run_id x
-n 2 --vs --log_dir=x
-n 2 --vs "--seed 3"
-n 1 -- --seed x
-n 2 --vs ../nowhere --cmd ./run.sh
-n 2 --vs data --cmd ./run.sh
-n 2 --vs data --cmd "no_such_torchrun x.py"
-n 2 --vs data --cmd ""
-n 2 --vs data --cmd "python 'x"
--resume nowhere.jsonl
-n 2 --vs HEAD~1 --vs "--slower 1"
--until-decided --max-n 4 --vs "--slower 1" --vs "--slower 2"
-n 2 --vs "--slower 1" --vs "--slower 2"
-n 3 --vs "--slower 1" --vs "--seed 3"
-n 3 --vs "--slower 1" --vs "--slower -3"
-n 0
-n 1 x
-n 1 --resume x
--until-decided
-n 1 --cmd ./run.sh
--resume x --vs y
--max-n 3
-n 2 --max-n 3 --until-decided
--until-decided --max-n 3
-n 2 --alpha 0.6
-n 1 --vs HEAD~1
-n x
--nosuch
-n 2 --vs "--slower 0"
--field body"""


def test_words_that_are_refused_start_nothing(repo, capsys, golden, monkeypatch):
    monkeypatch.chdir(repo)
    monkeypatch.setattr(sys, "argv", ["race.py"])
    monkeypatch.setattr(logs, "MAX_MESSAGE", 9999)  # the path of a temporary folder may be long
    shown = []
    for line in REFUSED.splitlines():
        status = race.main(["--json", *shlex.split(line)])
        said = capsys.readouterr()
        error = said.err.splitlines()
        found = json.loads(said.out.splitlines()[-1])
        assert (found["status"], found["verdict"]) == (2, "not judged") and found[
            "reason"
        ] in error[-1], line
        assert (
            status == 2
            and error[-1].startswith("race.py: error: ")
            and not (repo / "logs").exists()
        ), line
        shown.append(f"{line}\n{error[-1]}\n")
    golden("race_refusals", "\n".join(shown))


def test_race_prints_what_its_golden_file_holds(repo, theirs, capsys, golden, monkeypatch):
    """Races of one version, of two and of several, until decided, with a run that fails."""
    monkeypatch.chdir(repo)
    shown = []
    for status, words in (
        (0, "-n 3"),
        (0, "-n 3 --vs HEAD~1 -- --slower 3"),
        (1, "-n 2 --vs '--slower 7'"),
        (1, "-n 4 --vs '--worse 2' --vs '--worse -1 --slower 10' -- --mood good"),
        (0, "--until-decided --max-n 6 --vs HEAD~1 -- --mood jittery"),
        (1, "--until-decided --max-n 9 --vs '--slower 30' --alpha 0.05 -- --slower 0"),
        (2, "-n 3 -- --mood 'fail on 2'"),
        (0, shlex.join(["-n", "3", *against()])),
    ):
        found = race.main(shlex.split(words))
        said = capsys.readouterr()
        assert found == status, (words, said)
        shown.append(f"$ race.py {words}\n{said.out}{said.err}exit status {found}\n")
        if "jittery" in words:
            folder, _, events = only_race(repo)
            assert race.main(["--resume", str(folder)]) == 0
            assert only_race(repo)[2] == events, "decided is decided"
            capsys.readouterr()
        shutil.rmtree(repo / "logs")
    golden(
        "race",
        "\n".join(shown),
        [
            (re.escape(str(repo.parent)), "TMP"),
            (re.escape(race.__file__), "RACE.PY"),
            (r"about \d+ \w+", "about SOME TIME"),
            (r"edited \(\w{4}\)", "edited (HASH)"),
            (r"[\w-]+_(?=\d\d\w?\.txt)", "RUN_"),
            (r"\d{4}-\d\d-\d\d_NAME", "DAY_NAME"),
        ],
    )


RACE = {
    "id": "x",
    "sides": {"": {"revision": None, "flags": []}},
    "ranks": 1,
    "n": 1,
    "seed": 0,
}
ONE = {"revision": None, "flags": []}


@pytest.mark.parametrize(
    "change",
    [
        {"id": 3},
        {"id": "../x"},
        {"id": "a:b"},
        {"sides": {}},
        {"sides": ["a"]},
        {"sides": {"": {"flags": []}}},
        {"n": "2"},
        {"n": 10**400},
        {"n": 10**15},
        {"seed": None},
        {"alpha": "x"},
        {"alpha": 0.9},
        {"test": "best"},
        *(
            {"sides": {"a": ONE | more}}
            for more in (
                {"folder": 5},
                {"name": 5},
                {"flags": [1]},
                {"revision": 5},
                {"revision": "abc123"},
                {"revision": "g" * 40},
                {"revision": ""},
            )
        ),
        {"event": {"run_id": "x", "run": 1, "side": ""}},
        {"event": {"run_id": "../x", "run": 1, "side": "", "status": "started"}},
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(tmp_path, capsys, change):
    """test_no_traceback.py reads manifests of any content."""
    events = [{"race": RACE}, change["event"]] if "event" in change else [{"race": RACE | change}]
    (tmp_path / "race.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    assert race.main(["--resume", str(tmp_path / "race.jsonl")]) == 2
    error = capsys.readouterr().err
    assert (
        error.count("\n") == 1
        and "race.jsonl" in error
        and "Error" not in error
        and len(error) <= 301
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [[], ["--vs", "HEAD~1"], ["--vs=--worse 1", "--vs=--slower 3"], against()],
    ids=["one version", "two", "a ladder", "another project"],
)
def test_the_picture_shows_the_rounds_that_all_sides_have_done(
    repo, theirs, monkeypatch, capsys, words
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(race, "draw", DRAW)
    shown = []
    pictures = []
    plot = stats.plot

    def draw(sides, found, path):
        plot(sides, found, path)
        shown.append([len(side.runs) for side in sides])
        pictures.append(Path(path).read_bytes())

    monkeypatch.setattr(stats, "plot", draw)
    assert race.main(["-n", "3", *words]) == ("--vs=--worse 1" in words)
    folder, described, events = only_race(repo)
    each = len(described["sides"])
    assert shown == [[done] * each for done in (1, 2, 3)]
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)
    assert len(set(pictures)) == 3
    assert (folder / "race.png").read_bytes() == pictures[-1] and not list(folder.glob(".*"))
    assert capsys.readouterr().out.count("race.png") == 1
    (folder / "race.png").unlink()
    assert picture.main([str(folder)]) == 0 and (folder / "race.png").read_bytes() == pictures[-1]


def test_a_picture_that_cannot_be_drawn_stops_no_race(repo, monkeypatch, capsys):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(race, "draw", DRAW)
    monkeypatch.setattr(stats, "plot", full)
    assert (
        race.main(["-n", "1"]) == 0
        and "no plot: [Errno 28] No space left" in capsys.readouterr().out
    )


# Races that a program reads


@pytest.mark.parametrize(
    "words, status, verdict, reason",
    [
        ("-n 2", 0, "claim holds", "mean loss < 3.28"),
        ("-n 1", 0, "not judged", "at least 2 runs"),
        ("-n 3 -- --mood 'fail on 2'", 2, "not judged", "seed 2: failed"),
        ("-n 2 -- --target_val_loss 0", 0, "not judged", "no target"),
        ("-n 3 --vs '--worse 1' --vs '--slower 3'", 1, "worse", "; --worse 1 reaches"),
    ],
)
def test_the_last_line_is_one_object_whatever_comes_of_a_race(
    repo, capfd, words, status, verdict, reason
):
    if "target" in words:
        text = SCRIPT.replace(
            '"preset": preset,', '"preset": preset, "target_val_loss": c.target_val_loss,'
        )
        (repo / "train_gpt.py").write_text(text)
    head, _, flags = words.partition(" -- ")
    found = race.main([*shlex.split(head), "--json", "--", *shlex.split(flags)])
    out = capfd.readouterr().out
    last = json.loads(out.splitlines()[-1], parse_constant=pytest.fail)
    assert (found, last["status"], last["verdict"], last["best"]) == (
        status,
        status,
        verdict,
        None,
    ) and reason in last["reason"]
    assert out.count("\n{") == (out[0] != "{") and {"folder", "sides", "ideas"} <= last.keys()
    if last["ideas"]:
        assert [side["role"] for side in last["sides"]] == ["idea", "idea", "base"] and last[
            "folder"
        ] == str(only_race(repo)[0])
        assert {"ratio": 1, "low": None, "high": None} in [idea["time"] for idea in last["ideas"]]


# Races that die


def start(*words):
    """Return the process of a race, a fork of this one."""
    process = multiprocessing.get_context("fork").Process(target=race.main, args=(words,))
    process.start()
    return process


def kill(process, repo):
    """Kill a race with SIGKILL; its folder for worktrees remains."""
    process.kill()
    process.join()
    for folder in repo.parent.glob("race-*"):
        folder.rmdir()


def running(repo):
    """Return the processes whose log is in this repository's race."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"train_gpt.py" in words and any(os.fsencode(repo) in word for word in words):
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("heeds", [True, False])
def test_a_run_that_is_stopped_leaves_no_process_of_its_group(monkeypatch, heeds):
    """Its launcher may end without its ranks. They heed the interrupt, or are killed."""
    monkeypatch.setattr(race, "PATIENCE_S", 60 if heeds else 0.1)
    code = "import signal, subprocess\n" + "signal.signal(signal.SIGINT, signal.SIG_IGN)\n" * (
        not heeds
    )
    code += "rank = subprocess.Popen(['sleep', '3600'])\nprint(flush=True)\nrank.wait()"
    run = subprocess.Popen(
        [sys.executable, "-c", code],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    run.stdout.readline()
    race.stop(run, [])
    run.communicate(timeout=600)  # the rank holds the pipe until it ends


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere no process is told of its parent's death"
)
def test_a_race_that_is_killed_leaves_no_run_behind(repo):
    process = start("-n", "2", "--", "--mood", "sleepy")
    wait_until(lambda: list(repo.glob("logs/*/*.txt")))
    assert running(repo)
    kill(process, repo)
    wait_until(lambda: not running(repo))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_race_is_not_resumed_beside_a_run_of_it_that_lives(repo, capsys, monkeypatch):
    """The run ignores signals. Its race.py is dead, but the lock is still held."""
    monkeypatch.setattr(logs, "MAX_MESSAGE", 9999)  # the path of a temporary folder may be long
    process = start("-n", "2", "--", "--mood", "stubborn")
    wait_until((repo / "deaf").exists)
    kill(process, repo)
    (manifest,) = repo.glob("logs/*/race.jsonl")
    before = manifest.read_bytes()
    assert len(running(repo)) == 1
    assert race.main(["--resume", str(manifest)]) == 2
    error = capsys.readouterr().err
    assert (
        f"is still running; wait, or stop it: `fuser {manifest}`" in error
        and error.count("\n") == 1
    )
    assert manifest.read_bytes() == before and len(running(repo)) == 1
    os.kill(running(repo)[0], signal.SIGKILL)
    with manifest.open() as file:
        # a process that ends has no command line some time before it frees its lock
        fcntl.flock(file, fcntl.LOCK_EX)
    manifest.write_text(manifest.read_text().replace("stubborn", "lively"))
    assert race.main(["--resume", str(manifest)]) == 0
    assert [event["status"] for event in only_race(repo)[2][:2]] == ["started", "lost"]


def test_a_race_goes_on_where_nobody_reads_it(repo, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does
    monkeypatch.setattr(sys, "stdout", os.fdopen(writer, "w"))
    with contextlib.suppress(BrokenPipeError):  # the verdict
        race.main(["-n", "2"])
    os.dup2(os.open(os.devnull, os.O_WRONLY), writer)  # for the rest in the file's buffer
    assert [event["status"] for event in only_race(repo)[2]] == ["started", "done"] * 2


def test_a_wish_for_a_checkpoint_ends_no_race(repo, tmp_path):
    """From the start on, including the slow import of scipy."""
    (tmp_path / "scipy.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print('alive', flush=True); os._exit(0)"
    )
    code = (
        f"import runpy, sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT / 'launch')!r}];"
        f" runpy.run_path({str(ROOT / 'launch/race.py')!r}, run_name='__main__')"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600).stdout
        == b"alive\n"
    )


def test_what_the_environment_says_to_python_does_not_reach_a_run(repo, monkeypatch, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert race.main(["-n", "1"]) == 0
    assert (
        logs.read([str(only_race(repo)[0])]).runs[0].start["isolated"] == 1
        and not (tmp_path / "seen").exists()
    )
    assert not [name for name in race.environment() if name.startswith("PYTHON")]


def test_data_paths_are_those_of_the_checkout():
    given = "--train_files x/../data/x/*.bin --val_files=/y/*.bin --seed=3 --init_from logs/m.pt"
    kept = "--train_files data/x/*.bin --val_files /y/*.bin --init_from".split()
    assert race.check_flags(given.split()) == (3, [*kept, str(ROOT / "logs/m.pt")])


@pytest.mark.slow
def test_the_real_script_through_the_launcher(tmp_path, monkeypatch, forked):  # noqa: F811
    """As run.sh does it, in its own checkout."""
    write_corpus(tmp_path, train=(9000,))
    for name in "train_gpt.py", "frontier.py":
        shutil.copy(ROOT / name, tmp_path)
    for folder in "launch", "records":
        shutil.copytree(
            ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("2*", "*.html")
        )
    (tmp_path / "changed").mkdir()  # what could change every clock
    seen = tmp_path / "seen"
    (tmp_path / "changed/sitecustomize.py").write_text(
        f"import sys; print(sys.orig_argv, file=open({str(seen)!r}, 'a'))"
    )
    values = {
        **TINY,
        "preset": "laptop",
        "num_steps": 4,
        "layers": "S0M SM LM",
        "backout_layer": 1,
        "train_files": "toy_train_*.bin",
        "val_files": "toy_val_*.bin",
    }
    flags = [
        f"--{name}={str(v).lower() if isinstance(v, bool) else v}" for name, v in values.items()
    ]
    done = subprocess.run(
        [sys.executable, "launch/race.py", "-n", "1", "--json", "--", *flags, "--save_model=true"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(tmp_path / "changed")},
    )
    assert done.returncode == json.loads(done.stdout.splitlines()[-1])["status"] == 0, (
        done.stdout + done.stderr
    )
    (folder,) = (tmp_path / "logs").iterdir()
    assert len(logs.read([str(folder)]).runs) == 1
    # by race.py alone
    assert not [
        line for line in seen.read_text().splitlines() if "torch" in line or "train_gpt" in line
    ]
    assert (folder / "race.png").exists() == bool(importlib.util.find_spec("matplotlib"))
    monkeypatch.setattr(verify, "UNNAMED_S", 0.2)  # the tests' machine may be busy
    findings = verify.verify(verify.parse([str(folder)]))
    assert not [finding for finding in findings if finding.verdict == "fail"]
    assert "pass" in {
        finding.verdict for finding in findings if finding.rule == "every run is accounted for"
    }
    models = verify.verify(
        verify.parse([str(folder), "--rerun", str(folder), "--data", str(tmp_path)])
    )[-len(examine.RULES) :]
    assert {finding.rule: finding.verdict for finding in models} == dict.fromkeys(
        examine.RULES, "pass"
    )
