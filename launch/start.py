"""Start a run, a race or a preflight check: the program that ./run.sh becomes.

It chooses the preset, the data, the number of ranks and of threads; on GPUs also the flags with
which every part of a run works and a step fits in memory (launch/preflight.py; .cache/preflight
keeps its answer). Then it starts the ranks in this process, or becomes launch/race.py. Only the
standard library is imported at first: --help works without .venv.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import traceback
import zlib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path += [str(ROOT), str(ROOT / "launch"), str(ROOT / "records")]

import logs  # noqa: E402
from logs import UserError, require  # noqa: E402

CACHE = ROOT / ".cache" / "preflight"
PYTHON = sys.executable
# found now: a forked child must not load libraries
PRCTL = getattr(ctypes.CDLL(None), "prctl", None)
COMMANDS = """\
Train one model, or race two versions. The first call fills .venv with packages.

  ./run.sh                       one run, with the preset for this machine
  ./run.sh --trial               the same in 20 steps, to see that all works
  ./run.sh --text FILE FOLDER    train on your own text, and print a sample
  ./run.sh -n 5 --vs HEAD        five pairs of runs: this checkout against HEAD
  ./run.sh --resume latest       continue the run that stopped last
  ./run.sh stats latest          judge the last race; also: verify, picture,
                                 history, board, sample, watch"""
REST = """\
All other flags set values of the run, such as --num_steps 300, --seed 7;
--help-all lists them, with --preset frontier those of frontier."""
TOOLS = {
    "sample": "sample.py",
    "watch": "launch/watch.py",
    **{
        name: f"records/{name}.py"
        for name in ("stats", "verify", "history", "picture", "export", "board", "trace")
    },
}
TRIAL = 0.6  # a run of fewer of the preset's steps cannot reach its target
# of --trial: of training, and of validation (up to 16 ranks share them evenly)
TRIAL_STEPS = 20
TRIAL_SEQUENCES = 16
# A small text is repeated up to TEXT_STEPS or MAX_EPOCHS, but at least to MIN_STEPS: fewer learn
# too little, more learn it by heart (LOG.md)
MIN_STEPS = 40
TEXT_STEPS = 135
MAX_EPOCHS = 8
# version of Python to whose library the target of `laptop` belongs: the losses of others differ by
# up to 0.04
LIBRARY = "3.11"
MIN_TOKENS = 64  # of a micro-batch, if a text does not fill one of the preset's
# of what a run without a GPU has in memory: 13 times laptop's, a sixth of speedrun's
MAX_CPU_SIZE = 2**28
# a byte's loss has sd 2 nats, so the mean of fewer is off by 0.02 or more
MAX_VAL_TOKENS = 2**18
MIN_VAL_TOKENS = 10_000
# Fields of the config that no part of a run depends on: the preflight answer does not change with
# them
UNCHECKED = {
    "seed",
    "target_val_loss",
    "val_every",
    "train_loss_every",
    "log_dir",
    "run_id",
    "save_every",
    "keep_checkpoints",
    "save_model",
    "race",
    "profile",
    "warmup_steps",
    "timeout_s",
}


def say(line):
    print(f"run.sh: {line}", file=sys.stderr, flush=True)


# The command


class Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; --help lists the options")


def make_parser():
    parser = Parser(
        prog="run.sh",
        usage="./run.sh [options] [flags of train_gpt.py]",
        description=COMMANDS,
        epilog=REST,
        add_help=False,
        allow_abbrev=False,
        formatter_class=functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=22, width=80
        ),
    )
    add = parser.add_argument_group("runs").add_argument
    add(
        "--preset",
        metavar="NAME",
        help=(
            "without a GPU laptop (the default) or bench; with one speedrun (the default),"
            " bench_gpu, frontier, frontier89"
        ),
    )
    add(
        "--text",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATH",
        help="files or folders of text",
    )
    add("--val-fraction", metavar="X", help="with --text: part of each text for validation (0.1)")
    add("--field", metavar="NAME", help="with --text: field of JSON lines with the text (text)")
    add(
        "--resume",
        metavar="RUN",
        help=(
            "latest: what stopped last, a run or a race; or a log, a checkpoint, the "
            "folder of a race"
        ),
    )
    add("--init_from", metavar="MODEL", help="start with the parameters of a saved model")
    add(
        "--trial",
        action="store_true",
        help="a short run or race: 20 steps, short validation, no target",
    )
    add(
        "--preflight",
        action="store_true",
        help="check each part of a run, print a table, start no run",
    )
    add_race_options(parser.add_argument_group("races").add_argument)
    add = parser.add_argument_group("other").add_argument
    add("--setup", action="store_true", help="only create .venv")
    add("-h", "--help", action="store_true", help="print this text")
    add("--help-all", action="store_true", help="print this text and all flags of train_gpt.py")
    return parser


def add_race_options(add):
    """Add the options of a race to a parser, race.py's or this one; a value that is not given is
    None."""
    add(
        "-n",
        type=int,
        metavar="N",
        help="runs of each version, declared before the first (default: 5)",
    )
    add(
        "--vs",
        action="append",
        default=[],
        metavar="WHAT",
        help=(
            "a git revision; or flags for the side with the "
            "idea; repeat it for several; or a folder (with --cmd)"
        ),
    )
    add(
        "--name", metavar="WORDS", help="name of this checkout in the race (default: this checkout)"
    )
    add("--cmd", help="what starts another project's script in the folder that --vs names")
    add("--until-decided", action="store_true", help="stop as soon as the claim is decided")
    add(
        "--max-n", type=int, metavar="N", help="with --until-decided: the most runs of each version"
    )
    add(
        "--confirm",
        action="store_true",
        help="race a win again on new seeds, for exit status 0",
    )
    add(
        "--at",
        action="append",
        default=[],
        metavar="FLAGS",
        help="race also with these flags on all sides; repeatable",
    )
    add("-v", action="store_true", help="print all that each run prints")
    add("--alpha", type=float, metavar="P", help="level of each of the claim's tests (0.01)")
    add("--json", action="store_true", help="print the verdict as JSON, on the last line of stdout")


def join_versions(words):
    """Write each `--vs FLAGS` as one word: argparse would take flags that follow for its own."""
    words = list(words)
    for name in ("--vs", "--at"):
        while name in words[:-1]:
            at = words.index(name)
            words[at : at + 2] = [f"{name}={words[at + 1]}"]
    return words


def spelled(words, own=()):
    """Write each --flag as its program does: with dashes if it is in `own`, else with underscores
    as train_gpt.py."""

    def spell(word):
        name, equals, value = word.partition("=")
        dashes = f"--{name[2:].replace('_', '-')}"
        underscores = f"--{name[2:].replace('-', '_')}"
        return (dashes if dashes in own else underscores) + equals + value

    return [spell(word) if re.match(r"--\w", word) else word for word in words]


def words_of(options, *names):
    """Return the words of the named options that the user gave."""
    words = []
    for name in names:
        value = getattr(options, name)
        if value is not None:
            dashes = "-" if name == "n" else "--"
            words += [dashes + name.replace("_", "-"), str(value)]
    return words


def parse(words):
    """Return (options, the race's words, flags for train_gpt.py), with paths as seen from the
    user's folder."""
    parser = make_parser()
    options, flags = parser.parse_known_args(
        spelled(join_versions(words), parser._option_string_actions)
    )
    race = words_of(options, "n", "cmd", "max_n", "alpha", "name")
    for version in options.vs:
        race += ["--vs", version]
    for flags_elsewhere in options.at:
        race += ["--at", flags_elsewhere]
    race += ["--until-decided"] * options.until_decided + ["--confirm"] * options.confirm
    if race:
        race += ["--trial"] * options.trial + ["-v"] * options.v
    race += ["--json"] * options.json
    starts = (options.vs, options.cmd, options.until_decided, options.resume, options.max_n)
    require(
        not race or any(starts) or options.n is not None,
        f"{' '.join(race)}: only a race has this, "
        "and nothing here starts one; add -n N or --vs WHAT",
    )
    if options.resume == "latest" and "--log_dir" not in " ".join(flags):
        options.resume = latest_race() or "latest"
    options.text = [*map(os.path.abspath, options.text)]
    for name in ("resume", "init_from"):
        path = getattr(options, name)
        if path and os.path.exists(path):
            setattr(options, name, os.path.abspath(path))
    if options.init_from is not None:
        flags += ["--init_from", options.init_from]
    if options.text and not options.preset:
        options.preset = "laptop"
    if options.preset:
        flags = ["--preset", options.preset, *flags]
    of_text = words_of(options, "val_fraction", "field")
    require(options.text or not of_text, f"{' '.join(of_text[:1])} needs --text")
    if options.resume is None:
        return options, race, flags
    require(options.resume, "--resume is empty; name a log, a checkpoint or a race, or latest")
    require(not options.text, "--resume continues with the text of its run; leave out --text")
    if options.resume.endswith(".jsonl") or os.path.isdir(options.resume):
        require(not flags, f"--resume continues a race as it began; leave out {' '.join(flags)}")
        return options, ["--resume", options.resume, *race, *["-v"] * (options.v and not race)], []
    require(
        not race,
        f"--resume continues one run; leave out {' '.join(race)}, or name the folder of a race",
    )
    return options, [], ["--resume", options.resume, *flags]


def latest_race():
    """Return the folder of the newest race, if runs of it are left and no checkpoint in logs/ is
    newer; else None."""
    from manifest import Manifest

    stopped = [*ROOT.glob("logs/race-*/race.jsonl"), *ROOT.glob("logs/*.ckpt")]
    newest = max(stopped, key=os.path.getmtime, default=Path())
    if newest.suffix != ".jsonl":
        return None
    manifest = Manifest.read(newest)
    if not manifest.missing():
        return None
    say(f"latest: {newest.parent.relative_to(ROOT)}")
    return str(newest.parent)


# Programs that this one starts before the ranks


def interrupted(*_, kept="nothing was started"):
    os.write(2, f"run.sh: interrupted; {kept}\n".encode())
    os._exit(130)


def end_with_parent(number=signal.SIGTERM):
    """Make the system send this process a signal when its parent ends. Linux only."""
    if PRCTL:
        PRCTL(1, number)  # PR_SET_PDEATHSIG


def prepare_child():
    """Prepare a forked child: this process passes Ctrl-C on, also when it ends; the child answers
    as soon as it can."""
    os.setpgrp()
    end_with_parent(signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])


def call(words, kept, tee=False):
    """Run a program until it ends; exit if it fails. tee: print the lines of its output but the
    last, and return that.

    After Ctrl-C, which the program answers first, say what is kept."""

    def pass_on(*_):
        noted.append(True)
        if child:
            with contextlib.suppress(IndexError):  # once
                child.send_signal(unsent.pop())

    noted = []
    unsent = [signal.SIGINT]
    child = None
    line = ""
    signal.signal(signal.SIGINT, pass_on)
    child = subprocess.Popen(
        words,
        stdout=subprocess.PIPE if tee else None,
        text=True,
        errors="replace",
        preexec_fn=prepare_child,
    )
    with child:
        if noted:  # before there was a child
            pass_on()
        for following in child.stdout or ():
            print(line, end="", flush=True)
            line = following
    if noted or child.returncode in (130, -signal.SIGINT):
        interrupted(kept=kept)
    signal.signal(signal.SIGINT, interrupted)
    if child.returncode < 0:
        script = next(word for word in words if word.endswith(".py"))
        by = signal.Signals(-child.returncode).name
        say(f"error: {script} was killed by {by}")
    if child.returncode:
        print(line, end="", flush=True)
        sys.exit(2)
    return line


def become(words):
    """Replace this process by a program that unblocks Ctrl-C as soon as it can answer."""
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    os.execv(PYTHON, [PYTHON, *words])


def make_data(*words, tee=False):
    return call([PYTHON, *words], "complete shards stay", tee)


# Choices


def encode_text(paths, options):
    """Make shards of a user's text. Return flags that name them."""
    name = re.sub(r"[^A-Za-z0-9]", "_", Path(paths[0]).stem)
    # other paths, another folder
    out = f"data/own-{name}-{zlib.crc32(os.fsencode(chr(10).join(paths)))}"
    words = [*paths, "--out", out, "--encoding", "bytes", "--force", "--by-content", *options]
    # of each text: an earlier run may still need its own
    shards = make_data("data/text.py", *words, tee=True).strip()
    return ["--train_files", f"{shards}/*_train_*.bin", "--val_files", f"{shards}/*_val_*.bin"]


def choose(flags, text, trial):
    """Return (GPUs, ranks, preset, config, flags with the choices for this machine and these
    data)."""
    import torch
    import train_gpt

    gpus = train_gpt.count_gpus()
    require(
        gpus
        or torch.version.cuda
        or torch.version.hip
        or os.environ.get("CUDA_VISIBLE_DEVICES") == ""
        or not train_gpt.nvidia_smi("driver_version"),
        "this machine has an NVIDIA driver, but .venv holds torch's build for CPUs, installed on a"
        " machine without one. Remove it (rm -r .venv) and run this again, or train on the CPU:"
        " CUDA_VISIBLE_DEVICES= ./run.sh",
    )
    preset, config, presets = read_flags(flags, gpus)
    if trial:  # before the user's flags, which win
        shorter = {"num_steps": TRIAL_STEPS}
        if not text:  # which may be shorter
            shorter["val_tokens"] = TRIAL_SEQUENCES * config.val_len
        flags = logs.as_flags(shorter) + flags
        preset, config, _ = read_flags(flags, gpus)
    ranks = train_gpt.usable_ranks(config, gpus or 2)
    if ranks < (gpus or 2):
        say(
            f"{ranks} rank(s) instead of {gpus or 2}: ranks share the {config.micro_batches}"
            " micro-batches of a step evenly; --micro_batches changes their number"
        )
    train_gpt.check_config(config, ranks)  # once here, and not on each rank
    given = train_gpt.make_parser(presets).parse_args(flags)
    usual = presets[preset]
    chosen = fit_text(config, given) if text else {}
    python = "{}.{}".format(*sys.version_info)
    why = ""
    if text or config.resume or given.target_val_loss is not None:
        pass  # a resumed run keeps its own
    elif Path(config.train_files).name != Path(usual.train_files).name:
        why = "your own data"
    elif config.num_steps < TRIAL * usual.num_steps:
        why = f"a trial of {config.num_steps} of the preset's {usual.num_steps} steps"
    elif preset == "laptop" and python != LIBRARY:
        why = f"the text is the library of Python {python}, not of {LIBRARY}"
    if why and usual.target_val_loss:
        chosen = {"target_val_loss": 0}
        say(
            f"{why}: the preset's target {usual.target_val_loss} does not apply, and the run has"
            " none; --target_val_loss sets one"
        )
    if not config.resume and given.preset is None:  # the same on both sides of a race
        flags = ["--preset", preset, *flags]
    flags = flags + logs.as_flags(chosen)
    return gpus, ranks, preset, train_gpt.parse_config(flags, preset, presets)[1], flags


def read_flags(flags, gpus):
    """Return (preset, config, presets of its program). UserError if the flags are wrong or the run
    needs a GPU."""
    import train_gpt
    from ranks import program_of

    told = io.StringIO()
    try:
        presets = program_of(flags).PRESETS
        with contextlib.redirect_stderr(told):
            preset, config = train_gpt.parse_config(
                flags, "speedrun" if gpus else "laptop", presets
            )
    except train_gpt.RunError as error:
        raise UserError(error) from None
    except SystemExit:
        reason = told.getvalue().partition("error: ")[2].strip()
        raise UserError(re.sub(r"\S+ --help", "./run.sh --help-all", reason)) from None
    tokens = max(config.val_len, *train_gpt.micro_batch_lengths(config))
    tables = sum(table.rows * table.width for table in config.ngrams)
    require(
        gpus or 64 * tokens * config.model_dim + tables <= MAX_CPU_SIZE,
        f"{preset} is for GPUs: up to {tokens:,} tokens at once in {config.model_dim} channels,"
        f" n-gram tables of {tables:,} values. torch finds no GPU here; take --preset laptop, or a"
        " machine with an NVIDIA GPU and its driver",
    )
    return preset, config, presets


def fit_text(config, given):
    """Choose values by the size of a user's text, except those that the user gives; print the
    reasons."""
    import train_gpt

    config = dataclasses.replace(
        config, num_steps=given.num_steps or max(config.num_steps, TEXT_STEPS)
    )
    train = train_gpt.find_shards(config.train_files)
    val = train_gpt.find_shards(config.val_files)
    sizes = [shard.tokens for shard in train]

    def read(epochs):
        """Return (steps that the text fills, those of the first epoch, the stream after them)."""
        stream = train_gpt.Stream(train, dataclasses.replace(config, epochs=epochs))
        steps = 0
        first = 0
        with contextlib.suppress(train_gpt.RunError):  # the text ends
            while steps < config.num_steps and (
                stated or steps < max(MIN_STEPS, MAX_EPOCHS * first)
            ):
                stream.next_batch(train_gpt.plan_of(config, steps))
                steps += 1
                first += stream.position[0] < len(train)
        stream.close()
        return steps, first, stream

    stated = given.epochs or given.num_steps
    chosen = {}
    steps, _, stream = read(1)
    while not steps and given.micro_batch_tokens is None and config.micro_batch_tokens > MIN_TOKENS:
        chosen = {"micro_batch_tokens": config.micro_batch_tokens // 2}
        config = dataclasses.replace(config, **chosen)
        steps, _, stream = read(1)
    if 0 < steps < config.num_steps and given.epochs != 1:
        # whole sequences: attention then meets contexts as long as those of validation
        longer = {"max_document_tokens": given.max_document_tokens or config.micro_batch_tokens + 1}
        config = dataclasses.replace(config, **longer)
        # enough epochs: each fills a step at least
        steps, first, stream = read(stated or MIN_STEPS)
        chosen |= longer
        if config.ngrams and hasattr(config, "ngram_reset"):  # frontier cannot
            chosen["ngram_reset"] = first
    batch = train_gpt.tokens_of_steps(config, 1)
    about = f"{sum(sizes):,} training tokens"
    require(
        steps,
        f"the text's {about} are too few for a step: each of its {config.micro_batches}"
        f" micro-batches takes whole documents, of up to {config.max_document_tokens} tokens, until"
        f" it has more than {config.micro_batch_tokens}; give more text, or smaller"
        " --max_document_tokens, --micro_batches or --micro_batch_tokens",
    )
    at, document, _ = stream.position
    passes, shard = divmod(at, len(train))
    epochs = passes + 1
    part = document / len(stream.loaded[at].result().starts) if at in stream.loaded else 1
    passes += (sum(sizes[:shard]) + part * sizes[shard]) / sum(sizes)  # over the text
    whole = int(0.97 * steps / passes)
    chosen |= {"target_val_loss": 0, "num_steps": steps, "epochs": epochs}
    extent = "one epoch"
    if epochs > 1:
        extent = f"{passes:.1f} epochs"
        if "ngram_reset" in chosen and given.ngram_reset is None:
            extent += "; the n-gram tables are reset after each, so that they do not memorize it"
    elif whole > 1.05 * steps:
        extent = f"part of the text; nearly all of it takes --num_steps {whole}"
    say(f"text: {about} (bytes), {steps} steps of {batch:,}: {extent}")
    held = sum(shard.tokens for shard in val)
    if held > MAX_VAL_TOKENS:
        chosen["val_tokens"] = MAX_VAL_TOKENS // config.val_len * config.val_len
        say(
            f"text: validation on {chosen['val_tokens']:,} of {held:,} tokens, for speed;"
            " --val_tokens 0 uses all"
        )
    elif held <= config.val_tokens:
        chosen["val_tokens"] = 0
    if held < MIN_VAL_TOKENS:
        say(
            f"text: validation on only {held:,} tokens, so the validation loss means little; give"
            " more text, or a --val-fraction above 0.1"
        )
    return {name: value for name, value in chosen.items() if getattr(given, name) is None}


def preflight(config, flags, ranks, gpus, show_only):
    """Return the flags that a run must take on this machine; from the cache, if show_only is
    false."""
    import torch
    import train_gpt

    values = dataclasses.asdict(config)
    checked = {name: str(values[name]) for name in values if name not in UNCHECKED}
    # comments, docstrings and formatting need no new check
    sources = [
        train_gpt.code_of(Path(file).read_text(encoding="utf-8"))
        for file in (*train_gpt.source_files(config), Path(__file__).with_name("preflight.py"))
    ]
    key = {
        "source": hashlib.sha256("".join(sources).encode()).hexdigest(),
        "torch": torch.__version__,
        "ranks": ranks,
        "gpus": gpus and train_gpt.nvidia_smi("name,driver_version"),
        "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "config": checked,
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
    path = CACHE / f"{digest}.json"
    if path.exists() and not show_only:
        answer = json.loads(path.read_text())["flags"]
        note = " (checked before; --preflight checks again)"
    else:
        say(
            "preflight: checks each part of a run once; "
            "on GPUs this takes minutes while it compiles"
        )
        words = [PYTHON, "-I", "launch/preflight.py", f"--ranks={ranks}", *flags]
        answer = json.loads(call(words, "no run was started", tee=True))
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".tmp")
        partial.write_text(json.dumps({**key, "flags": answer}, indent=1) + "\n")
        partial.replace(path)
        note = " is needed on this machine" if answer else ""
    needed = logs.as_flags(answer)
    say(f"preflight: {shlex.join(needed) or 'all parts work'}{note}")
    return needed


# After a run


def longer_run(words, config, text):
    """Return the command of a longer run than the one that these words started, of one pass over
    the data at most."""
    trial = "--trial" in words
    counts = [factor * config.num_steps for factor in (4, 2)]
    steps = [count for count in counts if trial or lasts(config, count)]
    if not steps:
        more = "for a better model give more text: more steps on this one would learn it by heart"
        return more if text else ""
    command = shlex.join(["./run.sh", *words])
    kept = re.sub(r" --(trial|num[-_]steps[= ]\d+)(?= |$)", "", command)
    return f"a longer run: {kept}" + ("" if trial else f" --num_steps {steps[0]}")


def lasts(config, steps):
    """Return whether the data suffice for so many steps without repetition."""
    import train_gpt

    config = dataclasses.replace(config, num_steps=steps, epochs=1)
    with contextlib.suppress(train_gpt.RunError):
        shards = train_gpt.find_shards(config.train_files, config.train_shards)
        with contextlib.closing(train_gpt.Stream(shards, config)) as stream:
            stream.check_enough()
        return True
    return False


def replace_model(model):
    """Keep one model of those that nobody asked for: remove that of the run before, as it said.
    Return what to say."""
    note = ROOT / ".cache" / "replaceable"
    said = "the next run replaces this model; --save_model true keeps one"
    with contextlib.suppress(OSError):  # the user removed it
        before = os.fsdecode(note.read_bytes())
        if before != str(model):
            os.unlink(before)
            said += f"; removed: {before}"
    note.parent.mkdir(exist_ok=True)
    note.write_bytes(os.fsencode(model))
    return said


def written(folder):
    """Return the logs and models in a folder, each with the time of its last change."""
    return {
        (path, path.stat().st_mtime_ns)
        for path in Path(folder).resolve().glob("*")
        if path.suffix in (".txt", ".pt")
    }


def show_results(folder, before, longer, asked):
    """Print a sample of the new model, meanwhile draw the new log, and say what is next. A failure
    here does not matter."""
    import sample

    new = [path for path, _ in sorted(written(folder) - before, key=lambda found: found[1])]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda number, _: os._exit(128 + number))
    try:
        models = [path for path in new if path.suffix == ".pt"]
        logs = [path for path in new if path.suffix == ".txt"]
        ended = [log for log in logs if b'\n{"end": ' in log.read_bytes()]
        pictures = [
            subprocess.Popen(
                [PYTHON, "records/picture.py", log],
                stdout=subprocess.PIPE,
                preexec_fn=end_with_parent,
            )
            for log in ended[-1:]
        ]
        for model in models[-1:]:
            os.write(1, b"\nText that this model writes:\n\n")
            sys.stdout.reconfigure(errors="backslashreplace")  # for a terminal without UTF-8
            sample.main([str(model), "--tokens", "300"])
            sys.stdout.flush()
            notes = [longer, "" if asked else replace_model(model)]
            more = ["", 'more text: ./run.sh sample --prompt "..."', *filter(None, notes), ""]
            os.write(1, os.fsencode("\n".join(more)))
        for picture in pictures:
            os.write(1, picture.communicate()[0])
    except OSError:  # the reader or the files are gone
        pass


# The whole


def run_once(config, ranks, flags, longer):
    """Start the ranks as a race does: neither PYTHON* variables nor a module beside the script
    changes them."""
    import train_gpt
    from ranks import start as start_ranks

    for name in [*os.environ]:
        if name.startswith("PYTHON"):
            del os.environ[name]
    say(f"starting {ranks} rank(s)")
    before = written(config.log_dir)
    began = time.time()
    # a run outlives the reader, and a rank's connection may break
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    status = start_ranks(ranks, train_gpt.source_files(config)[0].name, flags)
    if status == 0:
        asked = any(word.startswith(("--save_model", "--train_files")) for word in flags)
        show_results(config.log_dir, before, longer, asked)
    elif status == 130 and any(
        path.stat().st_mtime >= began for path in Path(config.log_dir).glob("*.ckpt")
    ):
        elsewhere = config.log_dir != type(config).log_dir
        folder = f" --log_dir {config.log_dir}" if elsewhere else ""
        say(f"to continue: ./run.sh --resume latest{folder}")
    return status


def check_imports():
    """Raise UserError if the program has imported a module beside it: no rank finds it, and no log
    holds it."""
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) or ""
        require(
            not file.startswith(f"{ROOT}/")
            or file.startswith((sys.prefix, f"{ROOT}/launch/", f"{ROOT}/records/"))
            or name in ("train_gpt", "frontier"),
            f"the program imports {name}, a file of this folder that neither a run finds nor its"
            " log holds; put the code into train_gpt.py, or into frontier.py for its presets",
        )


def reason_of(error):
    """Return what an error says: a line, but for an edit that cannot be imported its place."""
    cause = error
    while cause.__cause__:
        cause = cause.__cause__
    if isinstance(cause, (ImportError, OSError)) and re.search(r"\.so\b", str(cause)):
        return (
            f"a library cannot be loaded: {cause}. LD_LIBRARY_PATH is"
            f" {os.environ.get('LD_LIBRARY_PATH')!r}; unset it and try again"
        )
    if isinstance(cause, ModuleNotFoundError):
        return (
            f"{cause}; a run finds what is installed in .venv, and nothing by PYTHONPATH: install"
            " it there, or put the code into the program"
        )
    names = "OSError", "RunError", "UserError"
    if any(kind.__name__ in names for kind in type(error).__mro__):
        return str(error)
    return traceback.format_exc(-1).strip()


def main(words):
    """Do what the words say. Return the exit status: 2, with --json after an object, if nothing
    can be started."""
    try:
        return begin(words)
    except SystemExit as ended:
        if not ended.code:
            raise
        reason = "a program failed that ./run.sh started first; it says why on stderr"
    except Exception as error:  # also from an edit, when it is imported
        reason = reason_of(error)
        say(f"error: {reason}")
    if "--json" in words:
        print(logs.show_json(logs.not_judged(reason)), flush=True)
    return 2


def begin(words):
    from ranks import program_of

    if words[:1] and words[0] in TOOLS:
        become([ROOT / TOOLS[words[0]], *words[1:]])
    options, race, flags = parse(words)
    os.chdir(ROOT)
    if options.help or options.help_all:
        make_parser().print_help()
        if options.help_all:
            print(flush=True)
            os.execv(PYTHON, [PYTHON, program_of(flags).__name__ + ".py", "--help"])
        return 0
    if race[:1] == ["--resume"]:
        become(["launch/race.py", *race])
    import train_gpt

    if options.text:
        flags = encode_text(options.text, words_of(options, "val_fraction", "field")) + flags
    gpus, ranks, preset, config, flags = choose(flags, options.text, options.trial)
    check_imports()
    if not gpus and (race or options.preflight):
        # for new processes; a fork of this one chooses as many itself
        os.environ.setdefault("OMP_NUM_THREADS", str(train_gpt.cpu_threads(config, ranks)))
    usual = program_of(flags).PRESETS[preset].train_files
    if config.train_files == usual:
        make_data(*["data/stdlib.py"] if "stdlib" in usual else ["data/fineweb.py", "9"])
    # a run that is resumed keeps the flags that it began with
    if options.preflight or gpus and not config.resume:
        flags += preflight(config, flags, ranks, gpus, options.preflight)
    if options.preflight:
        return 0
    if race:
        become(["launch/race.py", *race, "--ranks", str(ranks), "--", *flags])
    longer = "" if config.resume else longer_run(words, config, options.text)
    return run_once(config, ranks, flags, longer)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # run.sh blocks it until here
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a checkpoint, and there is no rank yet
    # end without a traceback when the reader of the output is gone
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    sys.exit(main(sys.argv[1:]))
