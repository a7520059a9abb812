"""Time runs one after another on this machine: of one version, or of two or more in turn.

    ./run.sh -n 5 --vs HEAD~1        five pairs: this checkout against another revision, the base
    ./run.sh -n 5 --vs "--muon_lr 0.03" --vs "--sync step"     five runs: two ideas and the base
    ./run.sh -n 5 --vs ../modded-nanogpt --cmd "torchrun …"    another project's script
    .venv/bin/python launch/race.py -n 5 --ranks 2 -- --num_steps 300     as run.sh calls it

Flags of all sides stand behind `--`.

docs/racing.md says what runs when. Run i has seed N + i on all sides (N: --seed among the flags, or
0). The number of runs and the deciding test are declared before the first run, so nobody can stop
at a convenient moment. turns.py first compares the steps of each idea with the base's. After the
base's first three runs come those of the short base, unless an earlier race in logs/ has them.

logs/race-ID/ contains the logs of both sides and:
  race.jsonl   the declaration, with the source and config of each side, and a line before and
               after each run
  RUNID.pt     its model, only with --save_model true: verify.py --rerun needs it
  race.png     a plot of the rounds that all sides have done, redrawn after each round

A failed run shows its output and stops the race, since the failure would probably repeat; --resume
repeats the run with its seed. Of several ideas the others go on, and an idea that can no longer
win leaves: see LEAVES. --confirm and --at race again, in folders of their own.

race.jsonl is locked while this program lives, or the launcher of a run. Another project's script
has its own seeds; the newest log in logs/*.txt of its folder is copied here. `python -I` starts
runs, without PYTHON* variables: neither PYTHONPATH nor sitecustomize nor user packages change
their clocks. Packages installed beside torch still could.

Exit status: 0 an idea is better (with --confirm: confirmed), or nothing was to be judged (a trial,
one run, or one version without a target); 1 it is not; 2 a run failed, or the race cannot be run or
judged; 130 interrupted. --json: docs/racing.md.
"""

import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # it requests a checkpoint; races repeat whole runs instead
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)

sys.path += [
    str(Path(__file__).resolve().parent.parent),
    str(Path(__file__).resolve().parent.parent / "records"),
]

import argparse
import ast
import contextlib
import fcntl
import glob
import hashlib
import importlib
import itertools
import json
import math
import os
import re
import shlex
import shutil
import string
import subprocess
import tempfile
import time
import uuid
from datetime import datetime, timezone

import logs
import picture
import same_loss
import start
import stats
import turns
import verify
from logs import UserError, require
from manifest import MANIFEST, SHORT, Manifest, base_letter
from stats import SCRIPT

ROOT = Path(__file__).resolve().parent.parent
OWN_FLAGS = ("--run_id", "--log_dir", "--resume", "--race")
NO_MODEL = "--save_model=false"  # 64 MB a run; a later --save_model true counts
DEFAULT_N = 5  # runs of each side
PATIENCE_S = 30  # until a run that ignores an interrupt is killed
UNCOUNTED = "uncounted"  # subfolder for the log of the first run while it runs
RULE_BROKEN = "rule broken"  # verdict of a race whose winner breaks one
NOT_CONFIRMED = "not confirmed"
LOOK_S = 0.02  # between two looks at a run
ALONE = [sys.executable, "-I"]  # ignores PYTHON* variables and user packages
FEWEST = 3  # runs of each side, of several ideas
# one-sided p, after a round from the third on, at which an idea that is slower leaves a race of
# several: one in 200 a round leaves that would not have lost
LEAVES = 0.005
# of a side, what a race that follows has too; CHECK says the rest anew
DECLARED_OF_SIDES = ("revision", "flags", "name", "source_sha256")

# Before any run: the script checks its flags, opens its data, and says what sides must have in
# common
CHECK = """
import importlib.metadata, json, os, platform, re, sys
sys.path.insert(0, "")
import train_gpt as t
ranks, *flags = sys.argv[1:]
TORCH = importlib.metadata.version("torch")
MODEL = platform.processor()
if os.path.exists("/proc/cpuinfo"):
    MODEL = re.findall("model name.*: (.*)", open("/proc/cpuinfo").read())[:1]
named = [part for word in flags for part in word.split("=", 1)]
program = t
more = [t.PRESETS] if hasattr(t, "source_files") else []  # older revisions have one program
preset = named[named.index("--preset") + 1] if "--preset" in named[:-1] else ""
if more and preset and preset not in t.PRESETS and os.path.exists("frontier.py"):
    import frontier as program
    more = [program.PRESETS]
try:
    gpus = getattr(t, "count_gpus", int)()  # older revisions lack it, and init_from
    usual = "speedrun" if gpus else "laptop"
    preset, config = t.parse_config([*flags, "--race=ID:1:1:"], usual, *more)
    t.check_config(config, int(ranks))
    train = t.find_shards(config.train_files, config.train_shards)
    val = t.find_shards(config.val_files)
    if hasattr(program, "gpt2_token_bytes") and train[0].encoding[0] == t.GPT2_VOCAB:
        ends = [end for stage in t.stages_of(config) for end in (stage.first, stage.last)]
        if any(end["prefix_weight"] for end in ends):
            program.gpt2_token_bytes(train[0].path.parent)
    if getattr(config, "init_from", ""):
        open(config.init_from).close()
    # as the log of a run shows it; older revisions leave paths as they are
    described = getattr(t, "without_folders", str)(json.dumps(t.describe_config(config)["config"]))
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) or ""
        here = file.startswith(os.getcwd() + "/") and not file.startswith(sys.prefix + "/")
        name = name.split(".")[0]
        if here and name not in ("train_gpt", "frontier"):
            sys.exit(f"it imports {name}, a file of this folder that neither a run finds nor its "
                     f"log holds; put the code into {program.__name__}.py")
except (t.RunError, OSError) as error:
    sys.exit(str(error))
print(json.dumps({
    "program": program.__name__ + ".py",
    "config": {"preset": preset, **json.loads(described)},
    "target": config.target_val_loss,
    "validation": [config.val_len, config.val_tokens, *((s.path.name, s.tokens) for s in val)],
    "skipped": getattr(config, "val_skip", None),
    "steps": config.num_steps,
    "machine": [TORCH, t.nvidia_smi("name,driver_version") if gpus else MODEL],
    "data": [(s.path.name, s.path.stat().st_mtime_ns, s.tokens) for s in train],
}))
"""


# Versions


def git(*arguments):
    """Return the output of git, empty if it fails without a word. Raise UserError with git's
    words."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            encoding="utf-8",
            errors="replace",
        )
    except OSError as error:
        raise UserError(f"git: {error.strerror}; install it") from None
    require(not done.returncode or not done.stderr, f"git: {' '.join(done.stderr.split())}")
    return done.stdout.strip()


def code_in(text, file, preset):
    """Return what a program does, without comments, docstrings and the presets that do not run; the
    text itself if it is no Python."""
    import train_gpt

    try:
        statements = ast.parse(text).body
    except SyntaxError:
        return text
    lines = text.splitlines()
    of_presets = [
        "\n".join(lines[x.lineno - 1 : x.end_lineno])
        for x in statements
        if lines[x.lineno - 1].startswith("PRESETS")
    ]
    names = {**vars(importlib.import_module(Path(file).stem))}
    try:
        exec("\n".join(of_presets), names)
    except Exception:  # they use what only the edit defines
        return train_gpt.code_of(text)
    for segment in of_presets:
        text = text.replace(segment, "")
    return train_gpt.code_of(text), names["PRESETS"].get(preset)


def codes_of(files, preset, revision=None):
    """Return the code of each file in a revision, or in this checkout; "" for a file that is
    missing."""
    if revision:
        blobs = [git("rev-parse", "--verify", "--quiet", f"{revision}:{file}") for file in files]
        texts = [blob and git("cat-file", "blob", blob) for blob in blobs]
    else:
        texts = [(ROOT / file).read_text(encoding="utf-8") for file in files]
    return [text and code_in(text, file, preset) for file, text in zip(files, texts)]


def describe_sides(ideas, cmd, flags, name=None):
    """Return {side: {"revision", "flags"}}; revision None is this checkout, whose script may be
    edited.

    A single side is "". The last of several is the base. A side with a "folder" is another
    project's; its flags are the whole command. "name" is what the user typed; flags say it
    themselves."""
    import train_gpt  # here: importing torch takes seconds, and --help and refusals need none
    from ranks import program_of, values_of

    files = [
        path.name for path in train_gpt.source_files(next(iter(program_of(flags).PRESETS.values())))
    ]
    ours = {"revision": None, "flags": flags}
    here = {**ours, "name": name or "this checkout"}
    if not ideas:
        return {"": here}
    if cmd is not None:
        return {"a": here, "b": {"revision": None, "flags": split_flags(cmd), "folder": ideas[0]}}
    if all(idea.startswith("-") for idea in ideas):
        sides = [
            {**ours, "flags": flags_of(flags, start.spelled(split_flags(idea)))}
            for idea in [*ideas, ""]
        ]
        sides[-1] |= {"name": name} if name else {}
        return dict(zip(string.ascii_lowercase, sides))
    preset = values_of(flags).get("--preset", "speedrun")
    sides = {"this checkout": (codes_of(files, preset), here)}
    for vs in ideas:
        require(
            not vs.startswith("-"),
            "--vs names flags and a revision; give flags alone, or revisions alone, and flags "
            "for all sides behind them",
        )
        revision = git("rev-parse", "--verify", "--quiet", f"{vs}^{{commit}}")
        require(
            revision,
            f"--vs {vs!r} is no revision that git knows here; name a commit, branch or tag; or"
            " flags; or, with --cmd, a folder",
        )
        codes = codes_of(files, preset, revision)
        require(codes[-1], f"revision {vs} has no {SCRIPT}; name a later one")
        sides[vs] = codes, {**ours, "revision": revision, "name": vs}
    checkout, *others = (codes for codes, _ in sides.values())
    if len(ideas) > 1 and checkout in others:
        del sides["this checkout"]
    for one, other in itertools.combinations(sides, 2):
        require(
            sides[one][0] != sides[other][0],
            f"{one} and {other} have the same code in {' and '.join(files)}, so there is nothing to"
            f" race: comments, docstrings and presets other than {preset} change no run; edit what"
            " runs (do not commit the edit), or name an earlier revision, such as HEAD~1",
        )
    return dict(zip(string.ascii_lowercase, (side for _, side in sides.values())))


def flags_of(flags, own):
    """Return the flags of a side: those of all, without their preset if it has its own, then its
    own."""
    import train_gpt

    if "--preset" in flags and any(re.match("--preset(=|$)", word) for word in own):
        at = flags.index("--preset")
        flags = flags[:at] + flags[at + 2 :]
    start.read_flags(flags + own, train_gpt.count_gpus())
    return flags + own


def split_flags(text):
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(
            f"{text!r} cannot be split into words ({error}); close its quotes"
        ) from None


def check_flags(flags):
    """Return (seed or None, flags without it), with paths that are right on all sides.

    A revision's worktree has this checkout's data, and other paths relative to this checkout become
    absolute."""
    seed = None
    kept = []
    words = iter(flags)
    for word in words:
        name, given, value = word.partition("=")
        require(name not in OWN_FLAGS, f"the race sets {name}; leave it out")
        if name not in ("--seed", "--train_files", "--val_files", "--init_from"):
            kept.append(word)
            continue
        value = value if given else next(words, "")
        if name == "--seed":
            require(
                value.isdecimal(),
                f"--seed is {value!r}; give a whole number: run i gets the seed that many + i",
            )
            seed = int(value)
        else:
            root = str(ROOT) if name == "--init_from" else glob.escape(str(ROOT))
            path = os.path.normpath(os.path.join(root, value))
            kept += [
                name,
                path.removeprefix(f"{root}/") if path.startswith(f"{root}/data/") else path,
            ]
    return seed, kept


@contextlib.contextmanager
def folders(sides):
    """Yield {side: folder of its script}. Another revision gets a temporary worktree with this
    checkout's data."""
    home = Path(tempfile.mkdtemp(prefix="race-"))
    found = {}
    try:
        for side, version in sides.items():
            found[side] = (ROOT / version.get("folder", "")).resolve()
            revision = version["revision"]
            if revision:
                found[side] = home / revision[:12]
                # without the user's hooks: they prepare folders that somebody works in
                add = f"-c core.hooksPath={os.devnull} worktree add --detach"
                git(*add.split(), str(found[side]), revision)
                # shards, and what the script reads beside them
                for file in (ROOT / "data").glob("*/*"):
                    link = found[side] / file.relative_to(ROOT)
                    # a link to the folder would show up in git status
                    link.parent.mkdir(parents=True, exist_ok=True)
                    link.symlink_to(file)
        yield found
    finally:
        for side, folder in found.items():
            if sides[side]["revision"]:
                with contextlib.suppress(UserError):  # it was not added
                    git("worktree", "remove", "-ff", str(folder))
        shutil.rmtree(home, ignore_errors=True)


def source_hash(version, folder):
    """Return the SHA-256 of the program's source, or of the files that another project's command
    names."""
    if "folder" not in version:
        source = logs.source_in(folder, version.get("program", SCRIPT))
        return hashlib.sha256(source.encode()).hexdigest()
    paths = [folder / word for word in version["flags"] if len(word) < 256]
    source = b"".join(path.read_bytes() for path in paths if path.is_file())
    return hashlib.sha256(source).hexdigest()


def check_sides(race, where):
    """Raise UserError unless each side has the source that the race began with, its script accepts
    flags and data, and the sides can be compared."""
    for side, name in logs.side_names(race).items():
        version = race["sides"][side]
        script = f"{SCRIPT}{' of ' + name if side else ''}"
        (check_command if "folder" in version else check_script)(
            version, where[side], script, race["ranks"]
        )
        seen = source_hash(version, where[side])
        require(
            version.setdefault("source_sha256", seen) == seen,
            f"{script} has changed since the race began; "
            f"restore it (SHA-256 {version['source_sha256'][:8]}...), or race again",
        )
    ours = [version for version in race["sides"].values() if "folder" not in version]
    different = {json.dumps([version["source_sha256"], version["config"]]) for version in ours}
    require(
        len(different) == len(ours),
        "two sides have the same source and the same config, so there is nothing to race between "
        "them; give a flag another value than the base has",
    )
    for name, flags in (
        ("validation", "--val_files, --val_len and --val_tokens"),
        ("target", "--target_val_loss"),
    ):
        found = {json.dumps(version[name]) for version in ours}
        require(
            len(found) == 1 or name == "target" and len(ours) > 2,
            f"the sides differ in their {name}, so no verdict could compare them:"
            f" {logs.some(sorted(found), 2, ' and ')}; give {flags} outside --vs, for all sides",
        )


def check_script(version, folder, script, ranks):
    done = subprocess.run(
        [*ALONE, "-c", CHECK, str(ranks), NO_MODEL, *version["flags"]],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
    )
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"{script} rejects its flags or data: {why}")
    version.update(json.loads(done.stdout.splitlines()[-1]))


def check_command(version, folder, *_):
    """Check the folder of another project's script, and the program that starts it."""
    require(
        folder.is_dir(),
        f"--vs {folder} is no folder; with --cmd it names another project's, relative to {ROOT}",
    )
    program = " ".join(version["flags"][:1])
    where = f"in {folder}" if "/" in program else "on the PATH"
    require(
        shutil.which(folder / program if "/" in program else program),
        f"--cmd: there is no program {program!r} {where}; name one, or a shell: bash -c '...'",
    )


# The race


def command(ranks, program):
    return [*ALONE, str(ROOT / "launch" / "ranks.py"), str(ranks), program]


def environment(**more):
    """Return the variables of a run and of git: neither Python's nor those by which git's hooks
    name a repository. All sides compile into this checkout, since worktrees go with their race."""
    caches = {
        f"{name}_CACHE_DIR": str(ROOT / ".cache" / name.lower())
        for name in ("TORCHINDUCTOR", "TRITON")
    }
    usual = {
        name: value
        for name, value in os.environ.items()
        if not re.match("PYTHON|GIT_(?!CONFIG)", name)
    }
    return {**caches, **usual, **more}


def lock_race(path):
    """Lock a race's file for this process and its children. Raise UserError if the race still
    runs."""
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        name = os.path.relpath(path.parent, ROOT)
        raise UserError(
            f"two races at a time spoil each other's figures, and {name}, or a run of it, is still"
            f" running; wait, or stop it: `fuser {path}` lists its processes"
        ) from None
    except OSError:
        pass  # a file system without locks, such as some network file systems
    return file


def drop_undeclared(path):
    """Remove the folder of a race whose declaration could not be written."""
    if path.exists() and b"\n" not in path.read_bytes():
        shutil.rmtree(path.parent)


@contextlib.contextmanager
def interrupts_deferred():
    """Yield a list to which interrupts are appended instead of raising, so that a run's start and
    end are written."""
    noted = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    usual = {number: handler for number in numbers if callable(handler := signal.getsignal(number))}
    try:
        for number in usual:
            signal.signal(number, lambda *_: noted.append(True))
        yield noted
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)


def settle(manifest):
    """Write the status, according to its log, of each run whose end was not written because
    race.py died."""
    for run_id, attempt in list(manifest.attempts.items()):
        log = manifest.path.parent / f"{run_id}.txt"
        if attempt["status"] == "started":
            status = "done" if complete_log(log) else "lost"
            manifest.write({**attempt, "status": status, "logged": log.exists()})


def complete_log(path):
    """Return the run of a complete log, or None."""
    runs, _, _ = logs.read_file(str(path))
    return runs[0] if len(runs) == 1 and runs[0].complete else None


def logs_of(folder):
    """Return {(modification time, log)} of another project's folder."""
    return {(path.stat().st_mtime_ns, path) for path in (folder / "logs").glob("*.txt")}


def take_log(folder, before, log):
    """Copy the newest log that a command wrote to the race. Return an error message, or None."""
    _, newest = max(logs_of(folder) - before, default=(0, None))
    if not newest:
        return f"it wrote no log to {folder / 'logs'}/*.txt"
    shutil.copyfile(newest, log)
    if not complete_log(log):
        why = logs.last_run(str(log)).reason or "it does not state its number of steps"
        return f"its log {newest} holds no complete run: {why}"


def base_of(race):
    return race["sides"][base_letter(race)]


def version_of(race, side):
    """Return the version that a side runs; the short base is the base."""
    return race["sides"][base_letter(race) if side == SHORT else side]


def threads_of(race):
    """Return the variable that sets the threads of a race, also when it is resumed."""
    return {"OMP_NUM_THREADS": race["threads"]} if race.get("threads") else {}


def measure_turns(manifest, where, lock):
    """Compare the steps of each idea with the base's, unless the race has that. Return whether any
    was compared, which warms the machine up."""
    race = manifest.race
    *ideas, base = race["sides"]
    measured = False
    if race.get("trial") or "folder" in race["sides"][base]:
        return measured
    names = logs.side_names(race)

    def starter(side):
        version = race["sides"][side]

        def start_side(kind):
            program = str(ROOT / "launch" / "turns.py")
            words = [*command(race["ranks"], program), "SOCKET", kind]
            words += [version.get("program", SCRIPT), NO_MODEL, *version["flags"]]
            words += [f"--seed={race['seed'] + 1}", f"--race={race['id']}:0:{race['n']}:{side}"]
            return turns.SideProcess(
                words,
                race["ranks"],
                cwd=where[side],
                # a side that waits must not spin
                env=environment(**threads_of(race), OMP_WAIT_POLICY="PASSIVE"),
                pass_fds=[lock.fileno()],
                preexec_fn=start.end_with_parent,
            )

        return start_side

    for side in ideas:
        if side in race.get("turns", {}) or side in race.get("out", {}):
            continue
        try:
            found = turns.measure(starter(side), starter(base), say)
        except turns.SideFailed as reason:
            say(logs.brief(f"{names[side]}: no times by turns, so times of whole runs: {reason}"))
            continue
        measured = True
        manifest.write({"learned": {"turns": {side: found}}})
        speed = same_loss.Speed("", found["log_ratio"], found["variance"], found["df"])
        low, high = same_loss.interval_of(speed)
        say(
            f"{names[side]}: a step takes {math.exp(found['log_ratio']):.3f} of the base's time"
            f" ({low:.3f} to {high:.3f}, {found['turns']} turns, load {found['load']:.1f})"
            + ", the same work"
            * found["same_work"]
        )
    return measured


def key_of_base(race):
    """Return a digest of what decides the base's losses: source, config, data, ranks, machine."""
    base = base_of(race)
    names = ("source_sha256", "config", "validation", "data", "machine")
    facts = [race["ranks"], race.get("threads"), *(base.get(name) for name in names)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def kept_short_base(race):
    """Return the short base that an earlier race in logs/ has for this base, or None."""
    key = key_of_base(race)
    for path in sorted((ROOT / "logs").glob(f"race-*/{MANIFEST}"), reverse=True):
        with contextlib.suppress(UserError):
            found = Manifest.read(path).race.get("short_base")
            if found and found["key"] == key:
                return found
    return None


def short_runs(manifest):
    """Return the (run, side) of the short base's runs that a race has to do."""
    race = manifest.race
    base = base_of(race)
    if len(race["sides"]) < 2 or race.get("trial") or "folder" in base or "short_base" in race:
        return []
    runs = min(race["n"], same_loss.SHORT_SEEDS)
    if runs < 2 or short_steps(base) == base["steps"]:
        return []
    done = manifest.done(short=True)
    return [which for run in range(1, runs + 1) if (which := (run, SHORT)) not in done]


def short_steps(base):
    return round(same_loss.SHORT * base["steps"])


def learn_short_base(manifest):
    """Write the short base once its runs and the base's of the same seeds are done."""
    race = manifest.race
    done = {**manifest.done(), **manifest.done(short=True)}
    letter = base_letter(race)
    runs = range(1, min(race["n"], same_loss.SHORT_SEEDS) + 1)
    pairs = [(run, name) for run in runs for name in (letter, SHORT)]
    if "short_base" in race or not all(which in done for which in pairs):
        return

    def loss(which):
        return complete_log(manifest.path.parent / f"{done[which]['run_id']}.txt").exact_loss

    losses = {str(race["seed"] + run): [loss((run, letter)), loss((run, SHORT))] for run in runs}
    base = base_of(race)
    found = {"key": key_of_base(race), "race": race["id"], "losses": losses}
    found |= {"steps": short_steps(base), "base_steps": base["steps"]}
    manifest.write({"learned": {"short_base": found}})


def leave(manifest, side, reason, failed):
    """Let an idea leave the runs that remain."""
    manifest.write({"learned": {"out": {side: {"reason": reason, "failed": failed}}}})
    say(f"{logs.side_names(manifest.race)[side]} leaves: {logs.brief(reason)}")


def drop_losers(manifest):
    """Let ideas leave that are shown to be slower, in a race of several ideas."""
    race = manifest.race
    done = manifest.done()
    letter = base_letter(race)
    rounds = sum(side == letter for _, side in done)
    if len(race["sides"]) < 3 or not FEWEST <= rounds < race["n"] or "short_base" not in race:
        return
    *ideas, base = stats.choose_sides(stats.parse([str(manifest.path.parent)]))
    ideas = [idea for idea in ideas if len(idea.runs) == len(base.runs)]
    for idea, found in zip(ideas, stats.verdicts([(idea, base) for idea in ideas])):
        slower = found.answer and found.answer.ratio > 1 and found.answer.p / 2 < LEAVES
        if slower:
            reason = f"after round {rounds} it can no longer win: {found.sentence}"
            leave(manifest, idea.name.removeprefix("side "), reason, failed=False)


def run_once(manifest, folder, lock, run, side, interrupts, output=None):
    """Run once, with a line in the manifest before and after. Return done, failed or interrupted.
    output: a file."""
    race = manifest.race
    tries = sum(
        (attempt["run"], attempt["side"]) == (run, side) for attempt in manifest.attempts.values()
    )
    run_id = f"{race['id']}_{run:02}{side}" + (f"_again{tries}" if tries else "")
    seed = race["seed"] + run
    home = manifest.path.parent
    log = (home if run else home / UNCOUNTED) / f"{run_id}.txt"
    log.parent.mkdir(exist_ok=True)
    attempt = {
        "run": run,
        "side": side,
        "run_id": run_id,
        "seed": seed,
        "started_at": now(),
        "status": "started",
    }
    version = version_of(race, side)
    foreign = "folder" in version
    before = logs_of(folder)
    words = version["flags"]
    if not foreign:
        words = [
            *command(race["ranks"], version.get("program", SCRIPT)),
            NO_MODEL,
            *words,
            f"--seed={seed}",
            f"--run_id={run_id}",
            f"--log_dir={log.parent}",
            f"--race={race['id']}:{run}:{race['n']}:{side}",
        ]
    if side == SHORT:
        words.append(f"--num_steps={short_steps(version)}")
    manifest.write(attempt)
    began = time.monotonic()
    # in its own session: Ctrl-C reaches only race.py, which passes it on and records the result
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=environment(**threads_of(race)),
        start_new_session=True,
        pass_fds=[lock.fileno()],
        preexec_fn=start.end_with_parent,
        stdout=output,
        stderr=output,
    )
    while process.poll() is None and not interrupts:
        time.sleep(LOOK_S)
    interrupted = process.poll() is None
    if interrupted:
        stop(process, interrupts)
    seconds = time.monotonic() - began
    code = process.wait()
    if foreign and (wrong := take_log(folder, before, log)) and not interrupted:
        say(f"`{shlex.join(words)}` ended with exit status {code}, and {wrong}")
    # a complete log is a run, whatever its processes' exit status: it must not be repeated
    status = "done" if complete_log(log) else "interrupted" if interrupted else "failed"
    manifest.write(
        {
            **attempt,
            "ended_at": now(),
            "status": status,
            "exit": code,
            "seconds": seconds,
            "logged": log.exists(),
            "figures": logs.last_run(str(log)).figures,
        }
    )
    if not run and status != "failed":  # of a failed run, what it printed names the log
        shutil.rmtree(log.parent)
    return status


def stop(process, interrupts):
    """Interrupt a run with all its ranks; kill them after PATIENCE_S or at the next interrupt."""
    patient_until = time.monotonic() + PATIENCE_S
    heard = len(interrupts)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
        while (
            process.poll() is None and time.monotonic() < patient_until and len(interrupts) == heard
        ):
            time.sleep(LOOK_S)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def now():
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


def draw(manifest):
    """Replace race.png atomically. A plot that fails does not stop the race."""
    path = manifest.path.with_name(stats.PICTURE)
    try:
        picture.draw_race(manifest, path.with_name(".next.png"))
        path.with_name(".next.png").replace(path)
    except (UserError, ImportError, OSError) as reason:
        say(logs.brief(f"no plot: {reason}"))


def decided(manifest):
    """Return why a race that runs until it is decided is over, or None."""
    options = stats.parse(stats_arguments(manifest.path.parent, manifest.race))
    try:
        report = stats.judge(stats.choose_sides(options), options)
        require(report["verdict"] != stats.UNJUDGED, report["reason"])
        return report["reason"]
    except UserError as reason:
        if not isinstance(reason, stats.Undecided):
            say(logs.brief(f"cannot be judged yet: {reason}"))
    return None


def stats_arguments(folder, race):
    """Return the arguments for stats.py."""
    return [*map(str, sorted(folder.glob("*.txt"))), f"--alpha={race['alpha']}"]


def time_left(manifest, runs):
    """Estimate the duration of the remaining runs from those done."""
    took = [
        attempt["seconds"]
        for attempt in manifest.attempts.values()
        if attempt["status"] == "done" and "seconds" in attempt
    ]
    took = took[1:] or took  # the first may have warmed the machine up
    if not took:
        return f"{logs.plural(runs, 'run')} left"
    minutes = math.ceil(runs * sum(took) / len(took) / 60)
    duration = logs.plural(minutes, "minute") if minutes < 120 else f"{minutes / 60:.1f} hours"
    return f"{logs.plural(runs, 'run')} left, about {duration}"


def first_folder(manifest):
    """Return the folder of a race, or of the race from which this one follows."""
    folder = manifest.path.parent
    first = manifest.race.get("follows")
    return folder.with_name(f"race-{first}") if first else folder


def resume_command(manifest):
    words = ["./run.sh", "--resume", os.path.relpath(first_folder(manifest), ROOT)]
    for version in manifest.race["sides"].values():
        if "folder" in version:
            words += ["--vs", version["folder"], "--cmd", shlex.join(version["flags"])]
    return shlex.join(words)


def run_all(manifest, where, lock, verbose):
    """Run everything that is not done yet. Return the stats.answer."""
    race = manifest.race
    how = resume_command(manifest)
    names = {side: picture.shorten(name, 28) for side, name in logs.side_names(race).items()}
    each = len(race["sides"])
    if short_runs(manifest):
        names[SHORT] = f"{names[base_letter(race)]}, short"
    folder = manifest.path.parent
    home = os.path.relpath(folder, ROOT)
    total = each * race["n"]
    width = max(map(len, names.values()))
    todo = manifest.missing()
    warm = measure_turns(manifest, where, lock) if todo else True
    plan = [*([(0, todo[0][1])] if not warm else []), *todo]
    while plan:
        run, side = plan.pop(0)
        done = len(manifest.done())
        looks = race["until_decided"] and done >= 2 * each and done % each == 0
        if side != SHORT and looks and (reason := decided(manifest)):
            say(f"decided: {reason}")
            break
        if side in race.get("out", {}):
            continue
        number = f"{done + 1}/{total}" if run and side != SHORT else f"{'-' if run else 0}/{total}"
        which = (
            f"{number:>{2 * len(str(total)) + 1}}  {names[side]:{width}}  seed {race['seed'] + run}"
        )
        if verbose or sys.stdout.isatty():
            say(f"{which}  running; {time_left(manifest, len(plan) + 1)}", "", stay=not verbose)
        version = version_of(race, side)
        its_folder = where[base_letter(race) if side == SHORT else side]
        require(
            source_hash(version, its_folder) == version["source_sha256"],
            f"{version.get('program', SCRIPT)} was changed during the race; restore it"
            f" and resume with: {how}",
        )
        with (
            interrupts_deferred() as interrupts,
            tempfile.TemporaryFile("w+", errors="replace") as output,
        ):
            status = run_once(
                manifest, its_folder, lock, run, side, interrupts, None if verbose else output
            )
            if status == "failed" and not output.seek(0):
                say(output.read(), "")
        if status == "done":
            said = f"not counted; {time_left(manifest, len(plan))}"
            if run:
                done = {**manifest.done(), **manifest.done(short=True)}
                log = complete_log(folder / f"{done[run, side]['run_id']}.txt")
                said = f"loss {log.loss_text}"
                if log.train_time_ms:
                    said += f"  {log.train_time_ms / 1000:.2f} s"
            say(f"{which}  {said}", "")
            after_run(manifest, plan, run, side)
            if not interrupts:
                continue
        if status == "failed" and not interrupts and side in [*race["sides"]][:-1] and each > 2:
            last = logs.last_run(str(folder / f"{[*manifest.attempts][-1]}.txt")).reason
            leave(
                manifest,
                side,
                f"its run with seed {race['seed'] + run} failed: {last}",
                failed=True,
            )
            if len(race["out"]) < each - 1:
                continue
        reason = (
            f"{which.strip()}: failed; its output is above, its log in {home}. Correct the"
            " cause and race again, for the same run would fail again. Only if the machine was"
            f" to blame: {how}"
        )
        if interrupts or status == "interrupted":
            status = "interrupted"
            kept = f"{len(manifest.done())} of {total} runs are done and kept"
            reason = f"interrupted; {kept}. Continue with: {how}"
        say(reason)
        return logs.not_judged(reason, folder, 130 if status == "interrupted" else 2)
    say("all runs are done\n")
    found = judge(race, folder)
    if not (race.get("confirm") and found["best"]):  # else confirm() writes it
        manifest.write({"learned": {"answer": summary_of(found)}})
    say(f"picture: {home}/{stats.PICTURE}; to check the rules: ./run.sh verify latest")
    return found


def after_run(manifest, plan, run, side):
    """Look for a short base after the base's first run, or plan its runs; at the end of a round
    draw it, and let ideas leave."""
    race = manifest.race
    if not run:
        return
    letter = base_letter(race)
    if side == letter and (run, SHORT) in short_runs(manifest):
        kept = kept_short_base(race)
        if kept:
            manifest.write({"learned": {"short_base": kept}})
        else:
            plan.insert(0, (run, SHORT))
    learn_short_base(manifest)
    if not any(number == run for number, _ in plan):
        drop_losers(manifest)
        draw(manifest)


def summary_of(found):
    """Return what `history` shows of an answer."""
    names = ("verdict", "status", "best", "reason", "ideas")
    return {name: found[name] for name in names}


def broken_rules(race, folder, ideas):
    """Return which rules verify.py finds broken by the logs alone, on the sides of the better
    ideas or on the first."""
    better = [idea["name"] for idea in ideas if idea["verdict"] == stats.BETTER]
    sides = [side for side, name in logs.side_names(race).items() if name in better]
    broken = {}  # in order
    try:
        for side in sides or [*race["sides"]][:1]:
            for found in verify.verify(verify.parse([str(folder), f"--side={side}"])):
                if found.verdict == verify.FAIL and found.rule not in verify.CLAIMS:
                    broken[f"{found.rule}: {found.reason}"] = True
    except UserError as reason:
        say(f"the rules cannot be checked: {reason}")
        return []
    return [*broken]


def judge(race, folder):
    """Print the verdict of a race, and the command that keeps it as a record. Return the
    stats.answer."""
    each = len(race["sides"])
    silent = ["--json"] * (each == race["n"] == 1)  # its line says all
    found = stats.give(stats.parse([*stats_arguments(folder, race), *silent]))
    nothing = each == 1 and found["sides"] and not found["claim"]
    if silent or nothing or race.get("trial") and found["sides"]:
        found["status"] = 0  # nothing was to be judged
    names = logs.side_names(race)
    for side, why in race.get("out", {}).items():
        if why["failed"]:
            figures = dict.fromkeys(("to_same_loss", "loss", "time"))
            found["ideas"].append(
                {
                    "name": names[side],
                    "verdict": stats.NOT_JUDGED,
                    "reason": why["reason"],
                    **figures,
                }
            )
    broken = broken_rules(race, folder, found["ideas"])
    found["rules"] = broken
    for line in broken:
        say(f"a rule is broken: {line}")
    if broken and not found["status"]:
        found |= {"verdict": RULE_BROKEN, "status": 1, "best": None, "reason": "; ".join(broken)}
        for idea in found["ideas"]:
            if idea["verdict"] == stats.BETTER:
                idea["verdict"] = RULE_BROKEN
    base = base_of(race)
    named = "follows" not in race and found["best"]
    if named and base.get("config", {}).get("preset") == "laptop":
        vs = names[base_letter(race)] if base["revision"] else found["best"]
        say(
            "laptop is a demonstration. Does it hold for a transformer? ./run.sh -n 3 --vs"
            f" {shlex.quote(vs)} --preset bench"
        )
    if found["sides"] or found["status"] < 2:
        say(
            f"to keep this {'trial' if race.get('trial') else 'race'} as a record: ./run.sh board"
            ' add latest NAME "what was tried"'
        )
    return {**found, "folder": str(folder)}


# Races that follow from a race


def further_race(manifest, change, **declared):
    """Return the Manifest of a race that follows from another: the one in logs/ that was declared
    so, else a new one. change: called with its sides."""
    race = manifest.race
    for path in (ROOT / "logs").glob(f"race-*/{MANIFEST}"):
        with contextlib.suppress(UserError):
            found = Manifest.read(path)
            if found.race.get("follows") == race["id"] and declared.items() <= found.race.items():
                return found
    dropped = ("turns", "short_base", "out", "answer", "at", "confirm")
    kept = {name: value for name, value in race.items() if name not in dropped}
    sides = {
        side: {name: version[name] for name in DECLARED_OF_SIDES if name in version}
        for side, version in race["sides"].items()
    }
    change(sides)
    return declare({**kept, "sides": sides, "follows": race["id"], **declared})


def confirm(manifest, found, verbose):
    """Race the best idea on new seeds, with the steps that bring it to the base's loss. Return the
    answer with what that shows."""
    race = manifest.race
    names = logs.side_names(race)
    letter = next(side for side, name in names.items() if name == found["best"])
    idea = next(idea for idea in found["ideas"] if idea["name"] == found["best"])
    rate, _ = stats.rate_of(race, None)
    version = race["sides"][letter]
    held_out = hold_out(version, base_of(race))
    steps = same_loss.steps_to_same_loss(version["steps"], idea["loss"]["difference"], rate)

    def change(sides):
        base = sides.pop(base_letter(race))
        chosen = sides[letter]
        sides.clear()
        sides["a"] = {**chosen, "flags": [*chosen["flags"], f"--num_steps={steps}"]}
        sides["a"]["name"] = f"{names[letter]} in {steps} steps"
        sides["b"] = {**base, "name": names[base_letter(race)]}
        if held_out:
            for one in sides.values():
                one["flags"] = [*one["flags"], f"--val_skip={held_out}"]

    seed = race["seed"] + race["n"]
    further = further_race(manifest, change, confirms=found["best"], seed=seed)
    where = f" and on the {held_out:,} validation tokens after those" if held_out else ""
    say(f"confirms {found['best']}: {steps} steps, on new seeds{where}")
    second = start_race(further, verbose)
    if second["status"] == 130:
        return second
    result = {
        "steps": steps,
        "folder": second["folder"],
        "shown": False,
        "reason": second["reason"],
    }
    if second["status"] < 2:
        result["shown"], result["reason"] = confirmed(further)
    said = "confirmed" if result["shown"] else NOT_CONFIRMED
    say(f"{found['best']}: {said}: {result['reason']}")
    found = {**found, "confirmation": result}
    if not result["shown"]:
        found |= {"verdict": NOT_CONFIRMED, "best": None, "reason": result["reason"]}
        idea["verdict"] = NOT_CONFIRMED
        found["status"] = second["status"] if second["status"] > 1 else 1
    manifest.write({"learned": {"answer": summary_of(found)}})
    return found


def hold_out(*sides):
    """Return how many validation tokens a confirming race leaves out and reads after them: those
    of the race; 0 where a script or its shards have none."""
    _, tokens, *shards = sides[0]["validation"]
    held = sum(shard[1] for shard in shards)
    knows = all(side["skipped"] == 0 for side in sides)
    return tokens if knows and 2 * tokens < held else 0


def confirmed(manifest):
    """Return (whether a race confirms its idea, why)."""
    idea, base = stats.in_turn(*stats.choose_sides(stats.parse([str(manifest.path.parent)])))
    (verdict,) = stats.verdicts([(idea, base)])
    if not verdict.answer:
        return False, verdict.why
    differences = [ours - theirs for ours, theirs in zip(idea.losses, base.losses)]
    rate, _ = stats.rate_of(manifest.race, None)
    speed = stats.speed_of(manifest.race, idea)
    if speed.how == same_loss.FROM_RUNS:
        ratio = verdict.time
        error = (math.log(ratio.high) - math.log(ratio.value)) / 2 if ratio.high else math.inf
        speed = same_loss.Speed(speed.how, math.log(ratio.value), error**2)
    return same_loss.confirms(verdict.answer, differences, rate, speed)


def race_elsewhere(manifest, found, verbose):
    """Race the same ideas with further flags on all sides, one race for each --at. Return the
    answer with a line for each."""
    race = manifest.race
    shared = len(os.path.commonprefix([side["flags"] for side in race["sides"].values()]))
    here = {idea["name"]: answer_of(idea) for idea in found["ideas"]}
    lines = []
    for words in race["at"]:

        def change(sides):
            for side, name in logs.side_names(race).items():
                flags = sides[side]["flags"]
                sides[side]["flags"] = [*flags[:shared], *split_flags(words), *flags[shared:]]
                sides[side]["name"] = name

        say(f"elsewhere: {words}")
        there = start_race(further_race(manifest, change, elsewhere=words), verbose)
        for idea in there["ideas"]:
            one = here.get(idea["name"])
            both = one and answer_of(idea)
            word = same_loss.carries_over(one, both) if both else "unknown"
            lines.append({**idea, "at": words, "carries_over": word, "folder": there["folder"]})
        if there["status"] == 130:
            return there
    for line in lines:
        say(f"{line['name']}, {line['at']}: {line['reason']}: {line['carries_over']}")
    return {**found, "elsewhere": lines}


def answer_of(idea):
    return idea["to_same_loss"] and same_loss.Answer(**idea["to_same_loss"])


def say(line, source="race: ", stay=False):
    """Print a line; with stay the next one replaces it on a terminal. A closed terminal does not
    stop the race."""
    with contextlib.suppress(OSError):
        terminal = sys.stdout.isatty()
        print(
            "\r\033[K" * terminal + source + line, end="" if stay and terminal else "\n", flush=True
        )


def new_race(options):
    """Return the Manifest of a new race, not yet written."""
    seed, flags = check_flags(options.flags)
    sides = describe_sides(options.vs, options.cmd, flags, options.name)
    fewest = min(len(sides), FEWEST)
    require(
        options.n >= fewest,
        f"-n is {options.n}, and {logs.plural(len(sides), 'side')} are judged from {fewest} runs of"
        f" each on; give -n {fewest} or more",
    )
    require(
        all(
            check_flags(side["flags"])[0] is None for side in sides.values() if "folder" not in side
        ),
        "--vs sets --seed, and all sides share theirs; give --seed once, outside --vs",
    )
    race = {
        "n": options.n,
        "until_decided": options.until_decided,
        "alpha": options.alpha,
        "test": "paired" if options.vs else "unpaired",
        "seed": seed or 0,
        "ranks": options.ranks,
        "sides": sides,
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "trial": options.trial,
        "leaves_below": LEAVES,
        "confirm": options.confirm,
        "at": options.at,
        "head": git("rev-parse", "--short", "HEAD") if (ROOT / ".git").exists() else None,
    }
    return declare(race)


def declare(race):
    """Return the Manifest of a race with a new id, not yet written."""
    race_id = f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:4]}"
    manifest = Manifest(ROOT / "logs" / f"race-{race_id}" / MANIFEST)
    manifest.race = {**race, "id": race_id, "declared": now()}
    return manifest


def parse(arguments):
    parser = start.Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    start.add_race_options(add)
    add("--ranks", type=int, default=1, help="processes of a run (run.sh knows what fits)")
    add("--trial", action="store_true", help="declare a trial; no flags follow from it")
    add("--resume", metavar="MANIFEST")
    add("flags", nargs="*", metavar="-- FLAGS", help="for all sides")
    words = list(arguments)
    flags = []
    if "--" in words:
        words, flags = words[: words.index("--")], words[words.index("--") + 1 :]
    options = parser.parse_args(start.join_versions(words))
    ideas = len(options.vs)
    until = options.until_decided
    if options.alpha is None:
        options.alpha = 0.01
    require(
        not options.flags,
        f"{' '.join(options.flags)!r} is unexpected; write flags for {SCRIPT} behind --",
    )
    further = options.confirm, options.at
    declared = options.n, options.max_n, until, flags, ideas and not options.cmd, *further
    require(
        not (options.resume and any(declared)),
        "--resume takes all but another project's --vs and --cmd from the manifest; leave the"
        " rest out",
    )
    require(
        not options.cmd or ideas == 1,
        f"--cmd needs one --vs, the folder to run it in, and --vs is given {ideas} times",
    )
    require(
        ideas <= (1 if until else 25),
        f"--vs is given {ideas} times; a race has 25 ideas at most, with --until-decided one",
    )
    require(
        until == bool(options.max_n) and not (until and options.n),
        "--until-decided needs --max-n N, and no -n",
    )
    require(
        (not until or options.max_n >= 4) and 0 < options.alpha < 0.5,
        # no bootstrap decides on 3 losses
        f"--max-n is {options.max_n} and --alpha {options.alpha}; give at least 4, and less than"
        " 0.5",
    )
    require(
        ideas and not (options.cmd or until or options.trial) or not any(further),
        "--confirm and --at race an idea again; they need --vs, and neither --cmd, --until-decided"
        " nor --trial",
    )
    options.n = options.max_n or options.n
    if options.n is None and not options.resume:
        options.n = DEFAULT_N
    require(
        options.resume or options.n > 0, f"-n is {options.n}; give the number of runs, at least 1"
    )
    options.flags = flags
    return options


def run(options):
    """Declare a race, or resume one, and run it with those that follow. Return the stats.answer."""
    for number in (signal.SIGTERM, signal.SIGHUP):  # handled like Ctrl-C
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, signal.default_int_handler)
    manifest = None
    try:
        if options.resume:
            path = Path(options.resume).resolve()
            path = path / MANIFEST if path.is_dir() else path
            require(
                path.is_file(), f"{path}: there is no such file; name the {MANIFEST} of the race"
            )
            manifest = Manifest(first_folder(Manifest.read(path)) / MANIFEST)
        else:
            # importing torch takes seconds
            say("checks the flags and data of each side …", stay=True)
            manifest = new_race(options)
        found = start_race(manifest, options.v, options)
        race = manifest.race
        if race.get("confirm") and found["best"]:
            found = confirm(manifest, found, options.v)
        if race.get("at") and found["status"] < 2:
            found = race_elsewhere(manifest, found, options.v)
        return found
    except KeyboardInterrupt:
        reason = "interrupted before a run"
        if manifest and manifest.path.exists():
            reason += f". Continue with: {resume_command(manifest)}"
        say(reason)
        return logs.not_judged(reason, status=130)


def read_again(manifest, options):
    """Read the file of a race that is resumed, which this process has locked."""
    path = manifest.path
    manifest.__dict__.update(Manifest.read(path).__dict__)
    if manifest.cut is not None:
        say(f"{path}: the last line is incomplete and was dropped")
        os.truncate(path, manifest.cut)
    named = (options.vs, split_flags(options.cmd or "")) if options else None
    # the manifest may come from elsewhere
    for version in manifest.race["sides"].values():
        require(
            "folder" not in version or named == ([version.get("folder")], version["flags"]),
            f"this race runs another project's command; to allow it: {resume_command(manifest)}",
        )
    settle(manifest)


def start_race(manifest, verbose, options=None):
    """Run a race that is declared, in its file or only in memory. Return the stats.answer."""
    with contextlib.ExitStack() as held:
        resumed = manifest.path.exists()
        if resumed:
            # before reading: a last line may still be written
            lock = held.enter_context(lock_race(manifest.path))
            read_again(manifest, options)
        race = manifest.race
        where = held.enter_context(folders(race["sides"]))
        check_sides(race, where)
        require(
            not race["until_decided"]
            or all(side.get("target") != 0 for side in race["sides"].values()),
            "--until-decided decides by a target loss, and these runs have none; give"
            " --target_val_loss",
        )
        if not resumed:
            manifest.path.parent.mkdir(parents=True)
            held.callback(drop_undeclared, manifest.path)
            lock = held.enter_context(lock_race(manifest.path))
        for other in {*(ROOT / "logs").glob(logs.RACE)} - {manifest.path}:
            lock_race(other).close()
        if not resumed:
            manifest.write({"race": race})
        *ideas, base = logs.side_names(race).values()
        whom = base
        turn = "on"
        if ideas:
            whom = f"{', '.join(ideas)} against {base}"
            how = "every second round backwards" if ideas[1:] else "idea, base, base, idea"
            turn = f"of each, in turn: {how}, …;"
        runs = "at most " * race["until_decided"] + logs.plural(race["n"], "run")
        ranks = logs.plural(race["ranks"], "rank")
        seeds = f"{race['seed'] + 1} to {race['seed'] + race['n']}"
        home = os.path.relpath(manifest.path.parent, ROOT)
        say(f"{whom}: {runs} {turn} {ranks}, seeds {seeds}, in {home}")
        return run_all(manifest, where, lock, verbose)


def main(arguments=None):
    words = sys.argv[1:] if arguments is None else arguments
    try:
        found = run(parse(words))
    except (UserError, OSError) as reason:
        if isinstance(reason, OSError):
            file = reason.filename or "a file"
            reason = f"{file}: {reason.strerror}; free space or set its permissions"
        found = logs.not_judged(reason, status=logs.refuse("race.py", reason))
    if "--json" in itertools.takewhile("--".__ne__, words):  # also if the words are wrong
        print(logs.show_json(found), flush=True)
    return found["status"]


if __name__ == "__main__":
    logs.run_main(main)
