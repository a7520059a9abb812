"""Times runs one after another on this machine: one version, or two in turn.

    python records/race.py -n 10                      ten runs of train_gpt.py as it lies here
    python records/race.py -n 5 --vs HEAD~1           five pairs: this checkout (side a) and another revision (side b)
    python records/race.py -n 5 --vs "--sync step"    five pairs: the same script, side b with further flags
    python records/race.py -n 5 --ranks 8 -- --preset laptop --num_steps 100      flags for both sides
    python records/race.py --resume logs/race-ID/race.jsonl                       goes on where a race stopped

The pairs run a b, b a, a b, ...: a machine that warms up, or grows busier, takes the same from both sides; in a b, a b
it would take more from b. Run i has the seed BASE + i on both sides (BASE: --seed among the flags, or 0). n is declared
before the first run and stands in every log, so nobody can stop when the figures please. logs/race-ID/ gets the logs of
both sides, and race.jsonl, which names every run before it starts and after it ends, those that failed too. A run that
fails stops the race, as what breaks once mostly breaks again; --resume repeats it with its seed.

Exit status: 0 all runs are done, 1 one failed, 2 the race cannot be run so, 130 interrupted.
"""

import argparse
import contextlib
import glob
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from datetime import datetime, timezone
from pathlib import Path

import logs
import stats

ROOT = Path(__file__).resolve().parent.parent
SCRIPT, MANIFEST = "train_gpt.py", "race.jsonl"
OWN_FLAGS = ("--run_id", "--log_dir", "--race_id", "--race_run", "--race_runs", "--race_side")
PATIENCE_S = 30  # until a run that was told to stop is killed

# Before any run: the script itself knows best what it refuses
CHECK = ("import sys, train_gpt as t; ranks, *flags = sys.argv[1:]\n"
         "try: t.check_config(t.parse_config(flags, 'laptop')[1], int(ranks))\n"
         "except t.RunError as error: sys.exit(str(error))")


class CannotRace(Exception):
    """The race cannot be run so; the message says what was seen and what to do."""


# Versions

def git(*arguments):
    """What git prints, or None where it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def describe_sides(vs, flags):
    """{side: {"revision", "flags"}}; a revision of None is this checkout. A lone side has no name, as in the logs."""
    if vs is None:
        return {"": {"revision": None, "flags": flags}}
    if vs.startswith("-"):
        return {"a": {"revision": None, "flags": flags}, "b": {"revision": None, "flags": flags + split_flags(vs)}}
    revision = git("rev-parse", "--verify", "--quiet", f"{vs}^{{commit}}")
    if revision is None:
        raise CannotRace(f"--vs {vs!r} is no revision that git knows here; name a commit, branch or tag; or flags")
    if git("cat-file", "-e", f"{revision}:{SCRIPT}") is None:
        raise CannotRace(f"revision {vs} has no {SCRIPT}; name a later one")
    return {"a": {"revision": None, "flags": flags}, "b": {"revision": revision, "flags": flags}}


def split_flags(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise CannotRace(f"--vs {text!r} cannot be split into flags ({error}); close its quotes") from None


def check_flags(flags):
    """Flags with the seed taken out, as (seed or None, flags), and data paths as seen from this checkout."""
    seed, kept, words = None, [], iter(flags)
    for word in words:
        name, given, value = word.partition("=")
        if name in OWN_FLAGS:
            raise CannotRace(f"{name} is the race's to set; leave it out")
        if name not in ("--seed", "--train_files", "--val_files"):
            kept.append(word)
            continue
        value = value if given else next(words, "")
        if name != "--seed":
            kept += [name, value if os.path.isabs(value) else os.path.join(glob.escape(str(ROOT)), value)]
        elif value.isdecimal():
            seed = int(value)
        else:
            raise CannotRace(f"--seed is {value!r}; give a whole number: run i gets the seed that many + i")
    return seed, kept


@contextlib.contextmanager
def folders(sides):
    """{side: folder of its script}. Another revision gets a worktree for the while, with the data of this one."""
    home = Path(tempfile.mkdtemp(prefix="race-"))
    try:
        found = {}
        for side, version in sides.items():
            found[side] = ROOT
            if version["revision"]:
                found[side] = home / version["revision"][:12]
                if git("worktree", "add", "--detach", str(found[side]), version["revision"]) is None:
                    raise CannotRace(f"git cannot make a worktree of {version['revision'][:12]} in {home}; free "
                                     "space, or set TMPDIR")
                for shard in (ROOT / "data").glob("*/*.bin"):
                    link = found[side] / shard.relative_to(ROOT)
                    link.parent.mkdir(parents=True, exist_ok=True)  # a folder, not a link: git ignores only folders
                    link.symlink_to(shard)
        yield found
    finally:
        shutil.rmtree(home, ignore_errors=True)
        git("worktree", "prune")


def source_hash(folder):
    return hashlib.sha256((folder / SCRIPT).read_bytes()).hexdigest()


def check_sides(race, where):
    """Raises CannotRace unless each side has the source that the race began with, and its script takes its flags."""
    for side, version in race["sides"].items():
        seen = source_hash(where[side])
        if version.setdefault("source_sha256", seen) != seen:
            raise CannotRace(f"{SCRIPT} has changed since the race began; restore it (SHA-256 "
                             f"{version['source_sha256'][:8]}...), or race anew")
        done = subprocess.run([sys.executable, "-c", CHECK, str(race["ranks"]), *version["flags"]], cwd=where[side],
                              capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise CannotRace(f"{SCRIPT}{' of side ' + side if side else ''} refuses its flags: {why}")


# The race

def order(n, sides):
    """(run, side) in the order of the race: a b, b a, a b, ..."""
    names = list(sides)
    return [(run, side) for run in range(1, n + 1) for side in (names if run % 2 else names[::-1])]


def command(ranks):
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", SCRIPT]


class Manifest:
    """race.jsonl: what the race is, then a line before and one after each run, on the disk when write returns."""

    def __init__(self, path):
        self.path, self.race, self.attempts = path, None, {}  # attempts by run_id: its lines put together

    def write(self, event):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self.take(event)

    def take(self, event):
        if "race" in event:
            self.race = event["race"]
        else:
            self.attempts.setdefault(event["run_id"], {}).update(event)

    @classmethod
    def read(cls, path):
        """The manifest on the disk; a last line that was cut off, as by a power failure, is cut away there too."""
        manifest = cls(Path(path).resolve())
        try:
            text = manifest.path.read_bytes()
        except OSError as error:
            raise CannotRace(f"{path}: {error.strerror}; name the {MANIFEST} of the race") from None
        whole = text[:text.rfind(b"\n") + 1]
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                manifest.take(check_event(logs.parse_json(line), first=number == 1))
            except ValueError as error:
                raise CannotRace(f"{path}: line {number} is none of a race's ({error}); restore it, or name the "
                                 f"{MANIFEST} of a race") from None
        if manifest.race is None:
            raise CannotRace(f"{path}: no line says what the race is; name the {MANIFEST} of a race")
        if whole != text:
            say(f"{path}: the last line ends in the middle, and is left out")
            os.truncate(manifest.path, len(whole))
        return manifest

    def done(self):
        return {(a["run"], a["side"]): a for a in self.attempts.values() if a["status"] == "done"}

    def settle(self):
        """Gives each run that never ended, because the race itself died, the status that its log shows."""
        for run_id, attempt in list(self.attempts.items()):
            log = self.path.parent / f"{run_id}.txt"
            if attempt["status"] == "started":
                status = "done" if complete_log(log) else "lost"
                self.write({**attempt, "status": status, "logged": log.exists()})


RACE_KEYS = {"id": str, "sides": dict, "ranks": int, "n": int, "seed": int, "order": list}
RUN_KEYS = {"run_id": str, "run": int, "side": str, "status": str}


def check_event(event, first):
    """A line of the manifest as it is. ValueError if it is neither the description, which comes first, nor a run's."""
    inner, keys = (event.get("race"), RACE_KEYS) if first and isinstance(event, dict) else (event, RUN_KEYS)
    for key, kind in keys.items():
        if not isinstance(inner, dict) or not isinstance(inner.get(key), kind):
            raise ValueError(f"its {key} is missing, or no {kind.__name__}")
    sides = inner["sides"] if first else {}
    if first and not (sides and all(isinstance(version, dict) and isinstance(version.get("revision", 0), str | None)
                                    and are_words(version.get("flags")) for version in sides.values())):
        raise ValueError("a side needs a revision and flags")
    if first and not (are_words(inner["order"]) and len(inner["order"]) == inner["n"] * len(sides)):
        raise ValueError("its order wants one word for each of its n runs a side")
    return event


def are_words(value):
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def complete_log(path):
    """The run in a log that is whole, or None."""
    runs, _, _ = logs.read_file(str(path))
    return runs[0] if len(runs) == 1 and runs[0].complete and runs[0].end else None


def run_once(manifest, folder, run, side):
    """One timed run, noted before and after. Returns (its status: done, failed or interrupted; whether to stop)."""
    race = manifest.race
    tries = sum((attempt["run"], attempt["side"]) == (run, side) for attempt in manifest.attempts.values())
    run_id = f"{race['id']}_{run:02}{side}" + (f"_again{tries}" if tries else "")
    seed, log = race["seed"] + run, manifest.path.parent / f"{run_id}.txt"
    attempt = {"run": run, "side": side, "run_id": run_id, "seed": seed, "started": now(), "status": "started"}
    flags = {"seed": seed, "run_id": run_id, "log_dir": log.parent, "race_id": race["id"], "race_run": run,
             "race_runs": race["n"], "race_side": side}
    manifest.write(attempt)
    began, interrupted = time.monotonic(), False
    threads = {"OMP_NUM_THREADS": race["threads"]} if race.get("threads") else {}  # the same when the race is resumed
    environment = {**os.environ, **threads}
    words = [*command(race["ranks"]), *race["sides"][side]["flags"], *(f"--{name}={v}" for name, v in flags.items())]
    # a session of its own: Ctrl-C reaches the race alone, which passes it on and stays to write down what became of it
    process = subprocess.Popen(words, cwd=folder, env=environment, start_new_session=True)
    try:
        code = process.wait()
    except KeyboardInterrupt:
        interrupted = True
        code = stop(process)
    # a whole log is a run, however its processes ended: it must not be run again
    status = "done" if complete_log(log) else "interrupted" if interrupted else "failed"
    seconds = time.monotonic() - began
    manifest.write({**attempt, "status": status, "exit": code, "seconds": seconds, "logged": log.exists()})
    return status, interrupted or status != "done"


def stop(process):
    """Interrupts a run with all its ranks, and kills what does not heed it. Returns the exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        try:
            process.wait(PATIENCE_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def now():
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def estimate(manifest):
    """The figures so far in a line: train_time of each side, and their difference."""
    seconds = {side: {} for side in manifest.race["sides"]}
    for (run, side), attempt in manifest.done().items():
        found = complete_log(manifest.path.parent / f"{attempt['run_id']}.txt")
        if found and found.train_time_ms is not None:
            seconds[side][run] = found.train_time_ms / 1000
    parts = [f"{side + ': ' if side else ''}{stats.show_time(stats.summary(list(times.values())))} ({len(times)})"
             for side, times in seconds.items() if times]
    if len(seconds) == 2 and min(map(len, seconds.values())) > 1:
        a, b = seconds.values()
        with contextlib.suppress(stats.CannotJudge):
            found = stats.compare_times(list(a.values()), list(b.values()), 0.01)
            parts.append(f"a - b: {found['difference']:+.4f} s, a is {stats.show_ratio(found)}")
    return ", ".join(parts) or "no run yet"


def left(manifest, runs):
    """How long so many runs will take, by the mean of those that are done."""
    took = [attempt["seconds"] for attempt in manifest.done().values() if "seconds" in attempt]
    return f"{runs * sum(took) / len(took) / 60:.1f} min left" if took else "time left not known yet"


def run_all(manifest, where):
    """Runs what is not done yet. Returns the exit status."""
    race, how = manifest.race, f"{sys.executable} {__file__} --resume {manifest.path}"
    todo = [which for which in order(race["n"], race["sides"]) if which not in manifest.done()]
    for i, (run, side) in enumerate(todo):
        say(f"run {run} of {race['n']}{' side ' + side if side else ''}, seed {race['seed'] + run}; "
            f"{estimate(manifest)}; {left(manifest, len(todo) - i)}")
        if source_hash(where[side]) != race["sides"][side]["source_sha256"]:
            raise CannotRace(f"{SCRIPT} was changed during the race; restore it and go on with: {how}")
        status, stopped = run_once(manifest, where[side], run, side)
        if stopped:
            what = {"done": "is done, and the race interrupted", "interrupted": "was interrupted",
                    "failed": "failed (above is why)"}[status]
            say(f"run {run}{side} {what}; {len(manifest.done())} of {race['n'] * len(race['sides'])} runs are done and "
                f"kept. Go on with: {how}")
            return 1 if status == "failed" else 130
    say(f"all runs are done: {estimate(manifest)}; logs: {manifest.path.parent}\n")
    paths = map(str, sorted(manifest.path.parent.glob("*.txt")))
    stats.main([*paths, *(["--side", "a"] if "a" in race["sides"] else [])])
    return 0


def say(line):
    print(f"race: {line}", flush=True)


def new_race(options):
    """The Manifest of a race that begins, not yet on the disk."""
    seed, flags = check_flags(options.flags)
    sides = describe_sides(options.vs, flags)
    if check_flags(split_flags(options.vs) if (options.vs or "").startswith("-") else [])[0] is not None:
        raise CannotRace("--vs sets --seed, and both sides of a pair share theirs; give --seed once, behind --")
    race_id = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:4]}"
    manifest = Manifest(ROOT / "logs" / f"race-{race_id}" / MANIFEST)
    manifest.race = {"id": race_id, "n": options.n, "seed": seed or 0, "ranks": options.ranks, "sides": sides,
                     "threads": os.environ.get("OMP_NUM_THREADS"), "declared": now(),
                     "revision": git("rev-parse", "HEAD"),
                     "order": [f"{run}{side}" for run, side in order(options.n, sides)]}
    return manifest


def parse(arguments):
    parser = argparse.ArgumentParser(description="Times runs: one version, or two in turn.", allow_abbrev=False,
                                     epilog="Exit status: 0 all done, 1 one failed, 2 cannot be run, 130 interrupted.")
    parser.add_argument("-n", type=int, metavar="N", help="runs (of each side), declared before the first")
    parser.add_argument("--vs", metavar="REV_OR_FLAGS", help="race against a git revision, or further flags")
    parser.add_argument("--ranks", type=int, default=1, help="processes of a run (default: 1; run.sh knows what fits)")
    parser.add_argument("--resume", metavar="MANIFEST", help="go on with a race that stopped")
    parser.add_argument("flags", nargs="*", metavar="-- FLAGS", help=f"flags of {SCRIPT}, for both sides")
    words, flags = list(arguments), []
    if "--" in words:
        words, flags = words[:words.index("--")], words[words.index("--") + 1:]
    if "--vs" in words[:-1]:  # argparse would take the flags that follow for its own
        at = words.index("--vs")
        words[at:at + 2] = [f"--vs={words[at + 1]}"]
    options = parser.parse_args(words)
    if options.flags:
        parser.error(f"{options.flags[0]!r} stands alone; write flags for {SCRIPT} behind --")
    if options.resume and (options.n or options.vs or flags):
        parser.error("--resume takes everything from the manifest; leave the rest out")
    if not options.resume and (options.n or 0) < 1:
        parser.error(f"-n is {options.n}; say how many runs, at least 1")
    options.flags = flags
    return options


def main(arguments=None):
    options = parse(sys.argv[1:] if arguments is None else arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # to be told to end is to be interrupted
    try:
        manifest = Manifest.read(options.resume) if options.resume else new_race(options)
        race = manifest.race
        with folders(race["sides"]) as where:
            check_sides(race, where)
            if options.resume:
                manifest.settle()
            else:
                manifest.path.parent.mkdir(parents=True)
                manifest.write({"race": race})
            turns = f" a side, {' '.join(race['order'][:6])} ...," if len(race["sides"]) > 1 else ","
            say(f"{race['id']}: {race['n']} runs{turns} {race['ranks']} rank(s), seeds {race['seed'] + 1} to "
                f"{race['seed'] + race['n']}; declared in {manifest.path}")
            return run_all(manifest, where)
    except CannotRace as reason:
        print(f"race.py: error: {reason}", file=sys.stderr)
        return 2
    except OSError as error:
        where = error.filename or "a file"
        print(f"race.py: error: {where}: {error.strerror}; free space or permit it", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("race.py: interrupted before a run", file=sys.stderr)
        return 130


if __name__ == "__main__":
    logs.run_main(main)
