"""Times runs one after another on this machine: one version, or two in turn.

    python records/race.py -n 10                      ten runs of train_gpt.py as it lies here
    python records/race.py -n 5 --vs HEAD~1           five pairs: this checkout (side a) and another revision (side b)
    python records/race.py -n 5 --vs "--sync step"    five pairs: the same script; side a, the one with the idea, has
                                                      these flags too
    python records/race.py -n 5 --vs "--flag x" --vs "--other y"      a ladder: five runs of each idea and of the base
    python records/race.py -n 5 --vs ../modded-nanogpt --cmd "torchrun --nproc_per_node=8 train_gpt.py"
                                                      side b: another project's script, started so in its folder
    python records/race.py --until-decided --max-n 12 --vs HEAD~1     pairs until the claim is decided, 12 at most
    python records/race.py -n 5 --ranks 8 -- --preset laptop --num_steps 300      flags for both sides
    python records/race.py --resume logs/race-ID/race.jsonl                       goes on where a race stopped (with
                                                      another project's script: and the same --vs and --cmd)

The pairs run a b, b a, a b, ...: a machine that warms up, or grows busier, takes the same from both sides; in a b, a b
it would take more from b. Run i has the seed BASE + i on both sides (BASE: --seed among the flags, or 0). The most
runs, the test that decides (--test) and whether looks may end the race are declared before the first run, so nobody can
stop when the figures please: --until-decided looks after every pair, by bounds that keep alpha (stats.bounds).

logs/race-ID/ gets the logs of both sides; race.jsonl, which names every run before it starts and after it ends, those
that failed too; RUNID.steps.json, [step, seconds] of each step line as it reached the log, by the clock of this process
since it started the run; RUNID.pt, its model in 16 bits, for verify.py --rerun (--save_model true among the flags keeps
it whole, false keeps none); race.png, drawn anew after each run. A run that fails stops the race, as what breaks once
mostly breaks again; --resume repeats it with its seed. While any run of a race lives its race.jsonl is locked.

Another project's script has seeds of its own, and knows nothing of the race. What its command wrote last in logs/*.txt
of its folder is the run's log; a copy lies beside the others, and race.jsonl says of which run it is.

Runs are started by `python -I` and without PYTHON* variables, so that no PYTHONPATH, sitecustomize of a folder or user
site changes their clocks; what is installed beside torch itself still could.

Exit status: 0 all runs are done, 1 one failed, 2 the race cannot be run so, 130 interrupted.
"""

import signal

if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # it asks runs for a checkpoint, and a race repeats its runs whole

import logs

logs.end_at_ctrl_c(__name__)  # scipy takes seconds to import

import argparse
import contextlib
import ctypes
import fcntl
import functools
import glob
import hashlib
import json
import math
import os
import re
import shlex
import shutil
import string
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path

import ladder
import stats
from stats import MANIFEST, SCRIPT, Manifest, order

ROOT = Path(__file__).resolve().parent.parent
OWN_FLAGS = ("--run_id", "--log_dir", "--resume", "--race")
PATIENCE_S = 30  # until a run that was told to stop is killed
LOOK_S = 0.02  # between two looks at a run's log
PROCESS = uuid.uuid4().hex[:12]  # of this race: a resumed one is another, and what passed between is no gap in a race
MOST_LOGS = 50  # earlier ones that are read to foresee how long a race takes
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)  # found now: a child must not load libraries before it execs
ALONE = [sys.executable, "-I"]  # neither PYTHON* variables nor the user's packages
STEP = re.compile(rb"(?:step|s):(\d{1,18})[/ ]")

# Before any run: the script itself knows best what it refuses, and what it would save
CHECK = ("import json, sys; sys.path.insert(0, ''); import train_gpt as t; ranks, *flags = sys.argv[1:]\n"
         "try: preset, config = t.parse_config([*flags, '--race=ID:1:1:'], 'laptop'); "
         "t.check_config(config, int(ranks))\n"
         "except t.RunError as error: sys.exit(str(error))\n"
         "print(json.dumps({'preset': preset, 'steps': config.num_steps, 'small_model':\n"
         "    hasattr(config, 'save_model') and not any(f.startswith('--save_model') for f in flags)}))")
# After a run, by a process that gives its memory back
HALVE = f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import examine; examine.halve(sys.argv[1])"
# In front of a rank, which torchrun gives no open file of its own: it holds the race's lock as long as it lives
HOLD = ("import fcntl, os, sys; lock = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(lock, fcntl.LOCK_SH)\n"
        "os.set_inheritable(lock, True); os.execv(sys.argv[2], sys.argv[2:])")


class CannotRace(Exception):
    """The race cannot be run so; the message says what was seen and what to do."""


demand = functools.partial(stats.demand, error=CannotRace)


# Versions

def git(*arguments):
    """What git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_sides(ideas, cmd, flags):
    """{side: {"revision", "flags"}}; a revision of None is this checkout. A lone side has no name, as in the logs. Of a
    ladder the last side is the base. A side with a "folder" is another project's; its flags are its whole command."""
    ours = {"revision": None, "flags": flags}
    if not ideas:
        return {"": ours}
    if cmd is not None:
        return {"a": ours, "b": {"revision": None, "flags": split_flags(cmd), "folder": ideas[0]}}
    if all(idea.startswith("-") for idea in ideas):
        return {side: {**ours, "flags": flags + split_flags(idea)}
                for side, idea in zip(string.ascii_lowercase, [*ideas, ""])}
    vs, *others = ideas
    demand(not others, "several --vs make a ladder of flags; race a revision by itself")
    revision = git("rev-parse", "--verify", "--quiet", f"{vs}^{{commit}}")
    demand(revision, f"--vs {vs!r} is no revision that git knows here; name a commit, branch or tag; or flags; or, "
           "with --cmd, a folder")
    demand(git("cat-file", "-e", f"{revision}:{SCRIPT}") is not None,
           f"revision {vs} has no {SCRIPT}; name a later one")
    return {"a": ours, "b": {**ours, "revision": revision}}


def split_flags(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CannotRace(f"{text!r} cannot be split into words ({error}); close its quotes") from None


def check_flags(flags):
    """Flags with the seed taken out, as (seed or None, flags), and data paths as seen from this checkout."""
    seed, kept, words = None, [], iter(flags)
    for word in words:
        name, given, value = word.partition("=")
        demand(name not in OWN_FLAGS, f"{name} is the race's to set; leave it out")
        if name not in ("--seed", "--train_files", "--val_files"):
            kept.append(word)
            continue
        value = value if given else next(words, "")
        if name == "--seed":
            demand(value.isdecimal(), f"--seed is {value!r}; give a whole number: run i gets the seed that many + i")
            seed = int(value)
        else:
            kept += [name, os.path.join(glob.escape(str(ROOT)), value)]  # an absolute one stays
    return seed, kept


@contextlib.contextmanager
def folders(sides):
    """{side: folder of its script}. Another revision gets a worktree for the while, with the data of this one."""
    home = Path(tempfile.mkdtemp(prefix="race-"))
    try:
        found = {}
        for side, version in sides.items():
            found[side] = (ROOT / version.get("folder", "")).resolve()
            if version["revision"]:
                found[side] = home / version["revision"][:12]
                demand(git("worktree", "add", "--detach", str(found[side]), version["revision"]) is not None,
                       f"git cannot make a worktree of {version['revision'][:12]} in {home}; free space, or set TMPDIR")
                for shard in (ROOT / "data").glob("*/*.bin"):
                    link = found[side] / shard.relative_to(ROOT)
                    link.parent.mkdir(parents=True, exist_ok=True)  # a folder, not a link: git ignores only folders
                    link.symlink_to(shard)
        yield found
    finally:
        shutil.rmtree(home, ignore_errors=True)
        git("worktree", "prune")


def source_hash(version, folder):
    """Of the script; of another project's, of the files that its command names."""
    words = version["flags"] if "folder" in version else [SCRIPT]
    files = [folder / word for word in words if len(word) < 256 and (folder / word).is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def check_sides(race, where):
    """Raises CannotRace unless each side has the source that the race began with, and its script can be started so."""
    for side, version in race["sides"].items():
        script = f"{SCRIPT}{' of side ' + side if side else ''}"
        (check_command if "folder" in version else check_script)(version, where[side], script, race["ranks"])
        seen = source_hash(version, where[side])
        demand(version.setdefault("source_sha256", seen) == seen, f"{script} has changed since the race began; restore "
               f"it (SHA-256 {version['source_sha256'][:8]}...), or race anew")


def check_script(version, folder, script, ranks):
    done = subprocess.run([*ALONE, "-c", CHECK, str(ranks), *version["flags"]], cwd=folder, env=environment(),
                          capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CannotRace(f"{script} refuses its flags: {why}")
    version.update(json.loads(done.stdout.splitlines()[-1]))


def check_command(version, folder, *_):
    """Of another project's script: its folder, and the program that starts it."""
    demand(folder.is_dir(), f"--vs {folder} is no folder; with --cmd it names another project's, as seen from {ROOT}")
    program = " ".join(version["flags"][:1])
    where = f"in {folder}" if "/" in program else "on the PATH"
    demand(shutil.which(folder / program if "/" in program else program),
           f"--cmd: there is no program {program!r} {where}; name one, or a shell: bash -c '...'")


# The race

def command(ranks, lock):
    return [*ALONE, str(ROOT / "records" / "launch.py"), f"--nproc_per_node={ranks}", "--no-python", *ALONE,
            "-c", HOLD, str(lock), *ALONE, "-u", SCRIPT]


def environment(**more):
    return {**{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}, **more}


def hold(path):
    """The race's file, locked for this process and all that inherit it. CannotRace if a run of the race still lives.

    Alone to come in, shared to stay: the ranks lock it for themselves, and may live longer than who started them."""
    file = open(path, "a+b")  # NFS locks only what is open for both
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CannotRace(f"this race, or a run of it, is still going on; wait, or end it: `fuser {path}` names its "
                         "processes") from None
    return file


def end_with_parent():
    """In the child: a race that is killed leaves no run behind. Elsewhere than on Linux the lock alone must do."""
    if PRCTL:
        PRCTL(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextlib.contextmanager
def interrupts_noted():
    """What would interrupt only makes this list longer within: a run that starts or ends is not lost by it."""
    noted, numbers = [], (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    usual = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    try:
        for number in usual:
            signal.signal(number, lambda *_: noted.append(True))
        yield noted
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def settle(manifest):
    """Gives each run that never ended, because the race itself died, the status that its log shows."""
    for run_id, attempt in list(manifest.attempts.items()):
        log = manifest.path.parent / f"{run_id}.txt"
        if attempt["status"] == "started":
            status = "done" if complete_log(log) else "lost"
            manifest.write({**attempt, "status": status, "logged": log.exists(), "settled": now()})


class Stamps:
    """When each step line of a run reached its log: [step, seconds since the run's process was started]."""

    def __init__(self, log):
        self.log, self.began, self.file, self.rest, self.steps = log, time.monotonic(), None, b"", []

    def look(self):
        if self.file is None:
            with contextlib.suppress(OSError):
                self.file = open(self.log, "rb")
        seconds = round(time.monotonic() - self.began, 4)
        *lines, self.rest = (self.rest + (self.file.read() if self.file else b"")).split(b"\n")
        for line in lines:
            found = STEP.match(line)
            if line == logs.SEPARATOR:
                self.steps.clear()  # what stood before it was source
            elif found:
                self.steps.append([int(found[1]), seconds])

    def write(self):
        """The file beside the log; returns its SHA-256, or None where there is no log."""
        self.look()
        if self.file:
            self.file.close()
            text = (json.dumps(self.steps) + "\n").encode()
            self.log.with_suffix(stats.STAMPS).write_bytes(text)
            return hashlib.sha256(text).hexdigest()


def complete_log(path):
    """The run in a log that is whole, or None. Another project's log has neither start nor end line."""
    runs, _, _ = logs.read_file(str(path))
    return runs[0] if len(runs) == 1 and runs[0].complete and (runs[0].end or not runs[0].start) else None


def logs_of(folder):
    """The logs of another project's folder, each with the time when it was written last."""
    return {(path, path.stat().st_mtime_ns) for path in (folder / "logs").glob("*.txt")}


def take_log(folder, before, log):
    """Copies what a command wrote last of such logs to the race. Returns what is wrong with it, or None."""
    new = logs_of(folder) - before
    if not new:
        return f"it left no log in {folder / 'logs'}/*.txt"
    newest = max(new, key=lambda found: found[1])[0]
    shutil.copyfile(newest, log)
    if not complete_log(log):
        _, rejected, _ = logs.read_file(str(log))
        why = rejected[0].reason if rejected else "not one that states its total"
        return f"its log {newest} holds no whole run: {why}"


def run_once(manifest, folder, lock, run, side, interrupts):
    """One timed run, noted before and after. Returns its status: done, failed or interrupted."""
    race = manifest.race
    tries = sum((attempt["run"], attempt["side"]) == (run, side) for attempt in manifest.attempts.values())
    run_id = f"{race['id']}_{run:02}{side}" + (f"_again{tries}" if tries else "")
    seed, log = race["seed"] + run, manifest.path.parent / f"{run_id}.txt"
    attempt = {"run": run, "side": side, "run_id": run_id, "seed": seed, "started_at": now(), "process": PROCESS,
               "status": "started"}
    version = race["sides"][side]
    foreign, before, words = "folder" in version, logs_of(folder), version["flags"]
    if not foreign:
        words = [*command(race["ranks"], manifest.path), *words, f"--seed={seed}", f"--run_id={run_id}",
                 f"--log_dir={log.parent}", f"--race={race['id']}:{run}:{race['n']}:{side}"]
        words += ["--save_model=true"] * version["small_model"]
    manifest.write(attempt)
    threads = {"OMP_NUM_THREADS": race["threads"]} if race.get("threads") else {}  # the same when the race is resumed
    stamps = Stamps(log)
    # a session of its own: Ctrl-C reaches the race alone, which passes it on, and stays to note what became of it
    process = subprocess.Popen(words, cwd=folder, env=environment(**threads), start_new_session=True,
                               pass_fds=[lock.fileno()], preexec_fn=end_with_parent)
    while process.poll() is None and not interrupts:
        stamps.look()
        time.sleep(LOOK_S)
    interrupted = process.poll() is None
    if interrupted:
        stop(process, interrupts)
    stamped = stamps.write()
    seconds, code = time.monotonic() - stamps.began, process.wait()
    if foreign and (wrong := take_log(folder, before, log)) and not interrupted:
        say(f"`{shlex.join(words)}` of side {side} ended with exit status {code}, and {wrong}")
    # a whole log is a run, however its processes ended: it must not be run again
    status = "done" if complete_log(log) else "interrupted" if interrupted else "failed"
    manifest.write({**attempt, "ended_at": now(), "status": status, "exit": code, "seconds": seconds,
                    "logged": log.exists(), "stamps": stamped})
    if version.get("small_model") and (model := log.with_suffix(".pt")).exists():
        halved = subprocess.run([*ALONE, "-c", HALVE, str(model)], env=environment(), capture_output=True, text=True)
        if halved.returncode:
            say(f"{model.name} stays as large as it is: {(halved.stderr.splitlines() or ['no reason given'])[-1]}")
    return status


def stop(process, interrupts):
    """Interrupts a run with all its ranks, and kills what does not heed it, at once when interrupted again."""
    patient_until, heard = time.monotonic() + PATIENCE_S, len(interrupts)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        while process.poll() is None and time.monotonic() < patient_until and len(interrupts) == heard:
            time.sleep(LOOK_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def now():
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def so_far(manifest):
    """The report of the runs that are done, or None; of a ladder ladder.py makes one, when all are."""
    if len(manifest.race["sides"]) > 2:
        return None
    done, sides = manifest.done(), []
    for name in manifest.race["sides"]:
        runs = [complete_log(manifest.path.parent / f"{done[run, side]['run_id']}.txt")
                for run, side in sorted(done) if side == name]
        if any(runs):
            sides.append(stats.Side(f"side {name}" if name else "runs", [run for run in runs if run],
                                    declared=manifest.race))
    return stats.so_far(sides, manifest.race["alpha"]) if sides else None


def estimate(report, unknown):
    """The figures so far in a line: train_time and loss of each side with their intervals, and the difference; or what
    is said where there are none."""
    parts = []
    for side in report["sides"] if report else ():
        shown = []
        for values, unit in [(side.seconds, "s")] * (not side.untimed) + [(side.losses, "loss")]:
            ends = stats.mean_interval(values, report["alpha"])
            interval = f" [{ends[0]:.4f} … {ends[1]:.4f}]" if ends else ""
            shown.append(stats.show_mean(stats.summary(values), unit) + interval)
        parts.append(f"{side.name.removeprefix('side ')}: {', '.join(shown)} ({len(side.runs)})")
    if compared := report and report["comparison"]:
        low, high = compared["interval"]
        parts.append(f"a - b: {compared['difference']:+.4f} s [{low:+.4f} … {high:+.4f}], a is "
                     f"{stats.show_ratio(compared)}")
    return "; ".join(parts) or unknown


def draw(manifest, report):
    """race.png, whole at every moment. A picture that cannot be drawn stops no race."""
    path = manifest.path.with_name(stats.PICTURE)
    try:
        stats.plot(report, str(path.with_name(".next.png")))
        path.with_name(".next.png").replace(path)
    except (stats.CannotJudge, ImportError, OSError) as reason:
        say(logs.brief(f"no picture: {reason}"))


def decided(manifest):
    """Why a race that runs until it is decided is over, or None."""
    options = stats.parse(judging(manifest))
    try:
        return stats.judge(stats.choose_sides(options), options)["reason"]
    except stats.Undecided:
        return None
    except stats.CannotJudge as reason:
        say(logs.brief(f"not to be judged yet: {reason}"))
    return None


def judging(manifest):
    """The words for stats.py."""
    race = manifest.race
    return [*map(str, sorted(manifest.path.parent.glob("*.txt"))), f"--alpha={race['alpha']}",
            *(["--side", "a"] if "a" in race["sides"] else [])]


def left(manifest, runs):
    """How long so many runs will take, by the mean of those that are done; before the first by an earlier run."""
    took, like = [attempt["seconds"] for attempt in manifest.done().values() if "seconds" in attempt], ""
    if not took and (earlier := foresee(manifest.race)):
        took, like = [earlier.end["wall_seconds"]], f", if each takes as long as {os.path.basename(earlier.path)} did"
    if not took:
        return f"{runs} runs left, how long is known after the first"
    minutes = math.ceil(runs * sum(took) / len(took) / 60)
    return f"{runs} runs left, about {minutes // 60}:{minutes % 60:02} h{like}"


def foresee(race):
    """The latest whole run in logs/ with the preset, steps, ranks and cores of this race, or None."""
    side, *others = race["sides"].values()
    if any("folder" in other for other in others):  # another project's takes a time of its own
        return None
    wanted = [side["preset"], side["steps"], race["ranks"], os.cpu_count()]
    for log in sorted((ROOT / "logs").rglob("*.txt"), key=lambda path: path.name, reverse=True)[:MOST_LOGS]:
        run = complete_log(log)
        if run and "wall_seconds" in (run.end or {}) and wanted == [
                run.start["preset"], run.stated_steps, run.start["ranks"], run.start["hardware"].get("cores")]:
            return run


def again(manifest):
    """The command that goes on with a race."""
    words = [sys.executable, __file__, "--resume", str(manifest.path)]
    for version in manifest.race["sides"].values():
        if "folder" in version:
            words += ["--vs", version["folder"], "--cmd", shlex.join(version["flags"])]
    return shlex.join(words)


def check_resumed(manifest, vs, words):
    """CannotRace unless the command that a race runs besides ours, which may be a stranger's, is named again."""
    theirs = [version for version in manifest.race["sides"].values() if "folder" in version]
    demand(theirs or not words, f"{manifest.path} has no side of another project; leave out --vs and --cmd")
    demand(not theirs or (vs, words) == ([theirs[0]["folder"]], theirs[0]["flags"]),
           f"this race runs a command of its own; if you want that: {again(manifest)}")


def run_all(manifest, where, lock):
    """Runs what is not done yet. Returns the exit status."""
    race, how = manifest.race, again(manifest)
    looks, each = race["until_decided"], len(race["sides"])
    todo = [which for which in order(race["n"], race["sides"]) if which not in manifest.done()]
    report, unknown = so_far(manifest), "judged when all are done" if each > 2 else "no run yet"
    for i, (run, side) in enumerate(todo):
        done = len(manifest.done())
        if looks and done >= 2 * each and done % each == 0 and (reason := decided(manifest)):
            say(f"decided: {reason}")
            break
        say(f"run {run} of {'at most ' * looks}{race['n']}{' side ' + side if side else ''}, seed "
            f"{race['seed'] + run}; {estimate(report, unknown)}; {left(manifest, len(todo) - i)}")
        demand(source_hash(race["sides"][side], where[side]) == race["sides"][side]["source_sha256"],
               f"{SCRIPT} was changed during the race; restore it and go on with: {how}")
        with interrupts_noted() as interrupts:
            status = run_once(manifest, where[side], lock, run, side, interrupts)
        report = so_far(manifest)
        if report:
            draw(manifest, report)
        if interrupts or status != "done":
            what = {"done": "is done, and the race interrupted", "interrupted": "was interrupted",
                    "failed": "failed (above is why)"}[status]
            say(f"run {run}{side} {what}; {len(manifest.done())} of {race['n'] * len(race['sides'])} runs are done and "
                f"kept. Go on with: {how}")
            return 1 if status == "failed" else 130
    say(f"all runs are done: {estimate(report, unknown)}; logs: {manifest.path.parent}\n")
    if len(race["sides"]) > 2:
        ladder.main([str(manifest.path.parent)])
    else:
        stats.main(judging(manifest))
    return 0


def say(line):
    with contextlib.suppress(OSError):  # a terminal that went away ends no race
        print(f"race: {line}", flush=True)


def new_race(options):
    """The Manifest of a race that begins, not yet on the disk."""
    seed, flags = check_flags(options.flags)
    sides = describe_sides(options.vs, options.cmd, flags)
    demand(all(check_flags(side["flags"])[0] is None for side in sides.values() if "folder" not in side),
           "--vs sets --seed, and all sides share theirs; give --seed once, behind --")
    race_id = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:4]}"
    manifest = Manifest(ROOT / "logs" / f"race-{race_id}" / MANIFEST)
    manifest.race = {"id": race_id, "n": options.n, "until_decided": options.until_decided, "alpha": options.alpha,
                     "test": options.test if options.vs else "unpaired", "seed": seed or 0, "ranks": options.ranks,
                     "sides": sides, "threads": os.environ.get("OMP_NUM_THREADS"), "declared": now(),
                     "revision": git("rev-parse", "HEAD"),
                     "order": [f"{run}{side}" for run, side in order(options.n, sides)]}
    return manifest


def parse(arguments):
    parser = argparse.ArgumentParser(description="Times runs: one version, or two in turn.", allow_abbrev=False,
                                     epilog="Exit status: 0 all done, 1 one failed, 2 cannot be run, 130 interrupted.")
    add = parser.add_argument
    add("-n", type=int, metavar="N", help="runs (of each side), declared before the first")
    add("--vs", metavar="VERSION", action="append", default=[], help="race against a git revision; or further flags; "
        "flags several times: a ladder of ideas against one base; or, with --cmd, a folder")
    add("--cmd", metavar="COMMAND", help="what starts the script of another project in the folder that --vs names")
    add("--until-decided", action="store_true", help="look after every run, or pair, and stop when the claim holds or "
        "has no chance left")
    add("--max-n", type=int, metavar="N", help="for --until-decided: runs (of each side) at most")
    add("--test", choices=("paired", "unpaired"), default="paired", help="what judges times with --vs: the paired test "
        "on log time, for a machine that drifts (default), or Welch's")
    add("--alpha", type=float, default=0.01, help="level of the verdict (default: %(default)s)")
    add("--ranks", type=int, default=1, help="processes of a run (default: 1; run.sh knows what fits)")
    add("--resume", metavar="MANIFEST", help="go on with a race that stopped")
    add("flags", nargs="*", metavar="-- FLAGS", help=f"flags of {SCRIPT}, for both sides")
    words, flags = list(arguments), []
    if "--" in words:
        words, flags = words[:words.index("--")], words[words.index("--") + 1:]
    while "--vs" in words[:-1]:  # argparse would take the flags that follow for its own
        at = words.index("--vs")
        words[at:at + 2] = [f"--vs={words[at + 1]}"]
    options = parser.parse_args(words)
    if options.flags:
        parser.error(f"{options.flags[0]!r} stands alone; write flags for {SCRIPT} behind --")
    if options.resume and (options.n or options.vs and not options.cmd or options.max_n or options.until_decided
                           or flags):
        parser.error("--resume takes everything from the manifest, but for another project's --vs and --cmd; leave the "
                     "rest out")
    if options.cmd and len(options.vs) != 1:
        parser.error(f"--cmd wants one --vs, the folder that it is run in, and --vs is given {len(options.vs)} times")
    if len(options.vs) > 25 or options.until_decided and len(options.vs) > 1:
        parser.error(f"--vs is given {len(options.vs)} times; a ladder has 25 ideas at most, and no --until-decided")
    if options.until_decided != bool(options.max_n) or options.until_decided and options.n:
        parser.error("--until-decided wants --max-n N, and no -n")
    if options.until_decided and options.max_n < 2 or not 0 < options.alpha < 0.5:
        parser.error(f"--max-n is {options.max_n} and --alpha {options.alpha}; give at least 2, and less than 0.5")
    options.n = options.max_n or options.n
    if not options.resume and (options.n or 0) < 1:
        parser.error(f"-n is {options.n}; say how many runs, at least 1")
    options.flags = flags
    return options


def main(arguments=None):
    options = parse(sys.argv[1:] if arguments is None else arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):  # to be told to end is to be interrupted
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup has it
            signal.signal(number, signal.default_int_handler)
    try:
        with contextlib.ExitStack() as held:
            if options.resume:
                path = Path(options.resume).resolve()
                demand(path.is_file(), f"{path}: there is no such file; name the {MANIFEST} of the race")
                lock = held.enter_context(hold(path))  # before it is read: its last line may still be being written
                manifest = Manifest.read(path)
                if manifest.cut is not None:
                    say(f"{path}: the last line ends in the middle, and is left out")
                    os.truncate(path, manifest.cut)
                check_resumed(manifest, options.vs, split_flags(options.cmd or ""))
                settle(manifest)
            else:
                manifest = new_race(options)
            race = manifest.race
            where = held.enter_context(folders(race["sides"]))
            check_sides(race, where)
            if not options.resume:
                manifest.path.parent.mkdir(parents=True)
                lock = held.enter_context(hold(manifest.path))
                manifest.write({"race": race})
            turns = f" a side, {' '.join(race['order'][:6])} ...," if len(race["sides"]) > 1 else ","
            say(f"{race['id']}: {'at most ' * race['until_decided']}{race['n']} runs{turns} {race['ranks']} "
                f"rank(s), seeds {race['seed'] + 1} to {race['seed'] + race['n']}; declared in {manifest.path}")
            return run_all(manifest, where, lock)
    except (CannotRace, stats.CannotJudge, OSError) as reason:
        if isinstance(reason, OSError):
            reason = f"{reason.filename or 'a file'}: {reason.strerror}; free space or permit it"
        return logs.refuse("race.py", reason)
    except KeyboardInterrupt:
        print("race.py: interrupted before a run", file=sys.stderr)
        return 130


if __name__ == "__main__":
    logs.run_main(main)
