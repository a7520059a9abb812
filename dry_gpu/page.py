"""Run rank 0 of N on the simulated GPU and print a page about the run: kernels, launches, memory,
estimated times.

    dry_gpu/setup                                        once
    dry_gpu/run -- --preset speedrun                     rank 0 of 8, GPUs with 80 GB, sm_90
    dry_gpu/run --ranks 1 --memory 24 --arch 89 -- --preset speedrun --micro_batch_tokens 8192
    dry_gpu/run --against HEAD~3 -- --preset speedrun    compare a revision with the working tree
    dry_gpu/run --cold -- --preset speedrun              compare empty compile caches with full ones
    dry_gpu/run --trace FILE -- --preset speedrun        compare with a real GPU's trace, by class
    dry_gpu/run --program LOG                            a public record's program, beside its times
    dry_gpu/run --program CLONE/train_gpt.py -- --preset frontier
                                                         theirs and ours side by side, by class
    dry_gpu/run --records CLONE                          bench/results/simulated-gpu.md: each record
                                                         beside its preset
    dry_gpu/run --compute --help                         a simulated GPU that also computes

Figures marked "simulated" come from the model in simulate.py; host times are measured on this
machine: the least is that of an idle core, without the driver's own time. The shards are random
tokens, in documents about as long as FineWeb's (assumed: lognormal, median 400, mean 700 tokens).
TORCHINDUCTOR_COMPILE_THREADS sets the number of compile processes (default 1). A kernel that does
not compile stops the run with Triton's message. Exit status: 0 the page is printed, 1 the run
failed, 2 it does not fit the GPU's memory.
"""

import argparse
import collections
import gzip
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("records", "launch")]
import logs
import race
from simulate import (
    CLASSES,
    RATES,
    Step,
    costs,
    mean_costs,
    measured,
    parse_log,
    phase,
    rates_of,
    simulate,
    weigh,
)

ROOT = Path(__file__).resolve().parent.parent


def small_vocabulary(flags):
    """Return whether the preset is laptop, whose tokens are bytes."""
    return any("laptop" in flag for flag in flags)


def write_shards(folder, vocab):
    """Write shards of random tokens, about as many different ones in a sequence as in English
    text. The training file has many names, because runs read more tokens."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for name, tokens, copies in (
        ("train", 5_000_000, 120),
        ("val", 10_485_761 if vocab > 257 else 262_145, 1),
    ):
        if (folder / f"random_{name}_{copies - 1:06}.bin").exists():
            continue
        stream = (
            (vocab - 1) ** draw.random(tokens) ** 1.5
            if vocab > 257
            else draw.integers(0, vocab - 1, tokens)
        )
        stream = stream.astype("<u2")
        starts = np.cumsum(draw.lognormal(np.log(400), 1.06, tokens // 300).astype(int) + 1)
        stream[[0, *starts[starts < tokens]]] = vocab - 1
        header = np.zeros(256, "<i4")
        header[:5] = 20240520, 1, tokens, vocab, vocab - 1
        (folder / f"{name}.bin").write_bytes(header.tobytes() + stream.tobytes())
        for i in range(copies):
            link = folder / f"random_{name}_{i:06}.bin"
            link.unlink(missing_ok=True)  # from a run that was interrupted here
            link.symlink_to(f"{name}.bin")


def environment_of(home, caches, **settings):
    """Return the environment of a process on the simulated GPU. settings: further variables."""
    common = {
        "LD_LIBRARY_PATH": home / "lib",
        "TRITON_LIBCUDA_PATH": home / "lib",
        "TRITON_CACHE_DIR": caches / "triton",
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
        "OMP_NUM_THREADS": 1,
        "TORCH_NCCL_ENABLE_MONITORING": 0,
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # as train_gpt.py sets it
        "LOCAL_WORLD_SIZE": 1,
    }  # only this rank uses this machine's memory
    defaults = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ  # os.environ may override them
    return defaults | {name: str(setting) for name, setting in (common | settings).items()}


def execute(args, home, work, command, cold=False, **settings):
    """Run rank 0 by a command -> (events of the launch log, facts). work: a temporary folder,
    which is removed."""
    environment = environment_of(
        home,
        work if cold else home,
        TORCHINDUCTOR_BENCHMARK_KERNEL=1,  # Inductor then counts the bytes of kernels
        DRY_GPU_LOG=work / "launches.log",
        DRY_GPU_ARCH=args.arch,
        # 80 GB of an H100 are 79.2 GiB
        DRY_GPU_MEMORY=int(0.99 * args.memory * 2**30),
        **settings,
    )
    with open(work / "out.txt", "w") as out:
        status = subprocess.call(
            [sys.executable, *command], stdout=out, stderr=out, env=environment
        )
    if status:
        last = (work / "out.txt").read_text().splitlines()[-20:]
        sys.exit(
            "\n".join(
                [
                    *last,
                    f"run: error: rank 0 ended with status {status}; its output is in"
                    f" {work}/out.txt",
                ]
            )
        )
    events = parse_log(open(work / "launches.log"))
    shutil.rmtree(work)
    return events, json.loads(next(e.name for e in events if e.kind == "FACTS"))


def dry_run(args, home, revision="", cold=False):
    """Run rank 0 of a revision, or of the working tree -> (events of the launch log, facts)."""
    folder = ROOT
    work = Path(tempfile.mkdtemp(prefix="run-", dir=home))
    if revision:
        archive = subprocess.run(
            ["git", "archive", revision, "--", "*.py"],
            cwd=ROOT,
            env=race.environment(),
            capture_output=True,
        )
        if archive.returncode:
            sys.exit(
                f"run: error: --against {revision}: {archive.stderr.decode().strip()}; choose a"
                " revision of this repository"
            )
        folder = work / "scripts"
        tarfile.open(fileobj=io.BytesIO(archive.stdout)).extractall(folder, filter="data")
    vocab = 257 if small_vocabulary(args.flags) else 50257
    shards = home / f"shards-{vocab}"
    write_shards(shards, vocab)
    command = [
        Path(__file__).with_name("rank0.py"),
        folder,
        str(args.ranks),
        str(args.steps),
        "--train_files",
        f"{shards}/random_train_*.bin",
        "--val_files",
        f"{shards}/random_val_*.bin",
        "--train_shards",
        "0",
        "--log_dir",
        work / "logs",
        "--val_every",
        "250",
        *args.flags,
    ]  # only the validation at step 0 is run
    return execute(args, home, work, command, cold)


# ---- public programs

# Published: {start of the source's SHA-256: (program, ms per step)}: of record 44 the mean of its
# five logs, whose machine the rates are from; of the others the minutes in the repository's table
# of records by the number of steps
PUBLISHED = {
    "04d0d24b": ("record 44", 61.3),
    "d67b87fd": ("record 80", 57.0),
    "5afd951e": ("record 89, merged", 57.4),
}


# paths in a clone
RECORDS = {
    "speedrun": ["records/**/2025-10-31_AdamSyncGradientHook/0c17cdfd*.txt"],
    "frontier89": ["records/**/2026-04-08_PairedHeadMuon/logs/split_qk0-1480.txt", "train_gpt.py"],
}


def read_program(file):
    """Return (source, its SHA-256, runs) of a public program. runs: a log and those beside it with
    the same source."""
    if not file.is_file():
        sys.exit(f"run: error: {file}: no such file; choose a public log, or a train_gpt.py")
    if file.suffix == ".py":
        source = file.read_text()
        return source, hashlib.sha256(source.encode()).hexdigest(), []
    found = logs.read_file(file)[0]
    if not (found and found[0].source):
        sys.exit(
            f"run: error: --program {file}: not a log that begins with its source; choose one, or a"
            " .py file"
        )
    beside = [run for path in sorted(file.parent.glob("*.txt")) for run in logs.read_file(path)[0]]
    return (
        found[0].source,
        found[0].source_sha256,
        [run for run in beside if run.source_sha256 == found[0].source_sha256 and run.complete],
    )


def sources_of(source):
    """Return {file name: its text} of the source in a public log, in which kernels follow under a
    title each."""
    parts = re.split(r"\n-{40}\n# (\w+\.py)\n-{40}\n", source)
    return {"train_gpt.py": parts[0], **dict(zip(parts[1::2], parts[2::2]))}


def run_program(args, home, file, source):
    """Run rank 0 of a public program with the kernels beside it or its log -> (events, facts)."""
    work = Path(tempfile.mkdtemp(prefix="run-", dir=home))
    folder = work / "program"
    folder.mkdir()
    for path in file.parent.glob("*.py"):
        shutil.copy(path, folder)
    for name, text in sources_of(source).items():
        (folder / name).write_text(text)
    shards = home / "shards-50257"
    data = work / "data" / "fineweb10B"
    write_shards(shards, 50257)
    data.mkdir(parents=True)
    for kind in ("train", "val"):
        for shard in shards.glob(f"random_{kind}_*.bin"):
            (data / shard.name.replace("random", "fineweb")).symlink_to(shard)
    command = ["-c", "import program; program.main()", folder, str(args.ranks)]
    return execute(args, home, work, command, DATA_PATH=work, PYTHONPATH=Path(__file__).parent)


def measured_steps(runs, plan, mean):
    """Return the steps of logged runs of a plan {windows: steps}. mean: published, to which the
    times are scaled."""
    windows = [windows for windows, count in plan.items() for _ in range(count)]
    steps = []
    for run in runs:
        ends = [step.time_ms for step in run.steps if not step.validation]
        times = np.diff(ends, prepend=0.0) * (mean / (ends[-1] / len(ends)) if mean else 1)
        steps += [
            Step(label, number, 0.0, ms)
            for number, (label, ms) in enumerate(zip(windows, times, strict=True))
        ]
    return steps


# ---- the page

KINDS = {
    "TRITON": "Triton",
    "GEMM": "matmuls",
    "KERNEL": "eager",
    "COPY": "copies",
    "FILL": "fills",
    "NCCL": "collectives",
}


def table(head, rows):
    return "\n".join(
        "| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *rows)
    )


def count_repeats(words):
    """Format words with the count of consecutive equal ones: a a b -> `2 a, b`."""
    repeats = [(word, len(list(run))) for word, run in itertools.groupby(words)]
    return ", ".join(f"{n} {word}" if n > 1 else word for word, n in repeats) or "none"


def launch_rows(events, steps):
    """Return {label: figure} of the compiled kernels and of the launches in timed steps."""
    kernels = {(e.name, *e.numbers) for e in events if e.kind == "MODULE"}
    spills = sorted(f"{name}, {stack} B" for name, _, stack, _ in kernels if stack)
    shared = max((e.numbers[4] for e in events if e.kind == "TRITON"), default=0)
    rows = {
        "Triton kernels loaded; with spills": f"{len(kernels)}; {count_repeats(spills)}",
        "max registers; max shared memory": (
            f"{max((k[1] for k in kernels), default=0)}; {shared / 1024:.0f} KiB"
        ),
    }
    train = phase(events, "training")
    starts = [i for i, e in enumerate(train) if e.kind == "STEP"][: steps + 1]
    if len(starts) < 3:
        return rows
    timed = train[starts[0] : starts[-1]]
    steps = len(starts) - 1
    count = collections.Counter(e.kind for e in timed)
    rows["launches per step"] = f"{sum(count[kind] for kind in KINDS) / steps:.0f}"
    for kind, name in KINDS.items():
        rows[f"— {name}"] = f"{count[kind] / steps:.0f}"
    rows["host waits for GPU in timed steps"] = count_repeats(
        sorted(e.name for e in timed if e.kind == "SYNC")
    )
    rows["allocations in timed steps"] = count_repeats(
        f"{e.name} of {e.numbers[0]:,} B" for e in timed if e.kind in ("ALLOC", "FREE", "OOM")
    )
    for begin, end in itertools.pairwise(starts[-3:]):
        sent = [e for e in train[begin:end] if e.kind == "NCCL"]
        rows[f"collectives of step {train[begin].numbers[0]}, MB"] = (
            f"{sum(e.numbers[0] for e in sent) / 1e6:,.0f}: "
            + count_repeats(f"{e.name} {e.numbers[0] / 1e6:.3g}" for e in sent)
        )
    return rows


def kernel_rows(events):
    """Return (name, registers, bytes of spills, KiB of shared memory) of each Triton kernel that
    was loaded."""
    shared = {e.name: e.numbers[4] / 1024 for e in events if e.kind == "TRITON"}
    kernels = {(e.name, *e.numbers[:2]) for e in events if e.kind == "MODULE"}
    return [
        (*kernel, f"{shared[kernel[0]]:.0f}" if kernel[0] in shared else "")
        for kernel in sorted(kernels)
    ]


def class_rows(kinds):
    return {
        f"— {kind}: ms, launches": f"{ms:.2f}, {count:.0f}" for kind, (ms, count) in kinds.items()
    }


MEAN = "ms per step: even; odd; mean"
GAPS = "— gaps between kernels of the main stream: ms"
WAITS = "— main stream waits: ms"


def by_parity(figures, steps, weights):
    """Return the weighted means of a figure over even steps, odd steps and all."""
    odd = np.array([step.number % 2 for step in steps])
    parts = [np.array(weights) * part for part in (1 - odd, odd, 1)]
    return "; ".join(f"{np.average(figures, weights=part):.1f}" for part in parts if part.any())


def step_rows(steps, weights):
    """Return {label: ms} by windows, and of the whole plan."""
    ms = [step.ms for step in steps]
    windows = np.array([step.windows for step in steps])
    return {
        f"ms per step, windows {label}": by_parity(
            ms, steps, np.array(weights) * (windows == label)
        )
        for label in dict.fromkeys(windows.tolist())
    } | {MEAN: by_parity(ms, steps, weights)}


def simulated_rows(steps, plan):
    """Return {label: figure} of the simulated steps. plan: {windows: number of steps}, the weights
    of all means."""
    if not steps:
        return {}
    weights = weigh(steps, plan)
    classes = dict.fromkeys(CLASSES, (0, 0)) | mean_costs(steps, weights, lambda cost: cost.kind)
    return {
        **step_rows(steps, weights),
        **class_rows(classes),
        GAPS: by_parity([step.gaps_ms for step in steps], steps, weights),
        WAITS: by_parity([step.waiting_ms for step in steps], steps, weights),
        "launches per simulated step": by_parity(
            [len(step.costs) for step in steps], steps, weights
        ),
    }


# µs that the host takes for a launch, assumed
HOST_US = 5, 10, 20


def host_rows(census, cost, rates, plan):
    """Return the mean ms of a step for hosts of several speeds."""
    means = []
    for us in HOST_US:
        steps = [step for step in simulate(census, cost, rates.gap_s, us * 1e-6) if step.windows]
        weights = weigh(steps, plan)
        means.append(sum(step.ms * w for step, w in zip(steps, weights)) / sum(weights))
    label = "; ".join(map(str, HOST_US))
    return {f"mean, the host takes {label} µs a launch": "; ".join(f"{ms:.1f}" for ms in means)}


def page(events, facts, args, title, plan):
    """Return ({label: figure}, paragraphs) of one run. plan: see simulated_rows. --trace: only its
    windows."""
    census = phase(events, "census")
    rates = rates_of(args.arch, args.flash)
    cost = costs(census, rates, args.ranks)
    steps = [step for step in simulate(census, cost, rates.gap_s) if step.windows]
    if args.trace:
        steps = [step for step in steps if step.windows == steps[0].windows]
    breaks = sum(facts["breaks"].values())
    rows = {
        "graphs; breaks; compiled after warm-up": f"{facts['graphs']}; {breaks}; {facts['late']}",
        "compile time; warm-up time; warm-up CPU time": "; ".join(
            f"{facts.get(name, 0):.0f} s" for name in ("compile", "warm_up", "warm_up_cpu")
        ),
        "micro-batches per step × tokens; rows of n-gram tables": facts.get("batch", "none"),
    }
    rows |= launch_rows(events, args.steps)
    for name, at in (("CPU of all threads", 2), ("wall time", 1)):
        least = [
            min(step[at] for step in facts["host"] if step[0] % 2 == odd)
            for odd in (0, 1)
            if any(step[0] % 2 == odd for step in facts["host"])
        ]
        rows[
            f"host ms, {name}, the least of {len(facts['host'])} steps of the first stage:"
            " even; odd"
        ] = "; ".join(f"{ms:.1f}" for ms in least)
    for name, held in facts["memory"].items():
        rows[f"peak MiB in {name}; reserved"] = (
            f"{held['peak'] >> 20:,}; {held['reserved'] >> 20:,}"
        )
    rows |= simulated_rows(steps, plan)
    if steps:
        rows |= host_rows(census, cost, rates, plan)
    notes = []
    if "out of memory" in facts:
        notes.append(
            f"**The run does not fit the GPU's memory (phase: {facts['phase']}).**"
            f" {facts['out of memory']}"
        )
    notes += [
        f"Graph break, {n} times: {reason.splitlines()[0]}" for reason, n in facts["breaks"].items()
    ]
    for name, held in facts["memory"].items():
        tensors = [
            (size / 2**20, n, where)
            for size, n, where in held["tensors"]
            if size > held["peak"] / 50
        ]
        notes.append(
            f"Tensors at the peak of {name}, MiB: "
            + "; ".join(f"{size:,.0f} in {n} × {where}" for size, n, where in tensors)
        )
    kernels = mean_costs(steps, weigh(steps, plan), lambda cost: f"{cost.kind}: {cost.name}")
    longest = sorted(kernels.items(), key=lambda item: -item[1][0])
    notes.append(
        "Simulated ms per step by kernel: "
        + "; ".join(f"{ms:.2f} {name[:100]}" for name, (ms, _) in longest[:16])
    )
    notes.append(
        "Eager operators among them, ms and launches: "
        + "; ".join(
            f"{name.removeprefix('eager: ')} {ms:.2f} in {n:.0f}"
            for name, (ms, n) in longest
            if name.startswith("eager: ") and round(n)
        )
    )
    return rows, [f"{title}. {note}" for note in notes]


def read_trace(file):
    """Return {label: figure} per step of a profiler's trace. Exit: no trace."""
    try:
        kinds, gaps, waits = measured(json.load(gzip.open(file)))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"run: error: --trace {file}: {error!r}; choose a profiler's trace (json.gz)")
    step = sum(ms for kind, (ms, _) in kinds.items() if kind != "collectives") + gaps + waits
    return {MEAN: f"{step:.1f}", **class_rows(kinds), GAPS: f"{gaps:.1f}", WAITS: f"{waits:.1f}"}


def with_error(measured_rows, rows):
    """Return measured rows of ms with the error of the simulated mean in the same row."""

    def error(cell, simulated):
        return (
            f"{cell} (simulated"
            f" {float(simulated.split('; ')[-1]) / float(cell.split('; ')[-1]) - 1:+.1%})"
        )

    return {
        label: error(cell, rows[label]) if label in rows else cell
        for label, cell in measured_rows.items()
    }


def difference(ours, theirs):
    """Return the rows by class and the mean ms that both columns have, ours less theirs."""

    def less(*cells):
        ours, theirs = ([*map(float, re.findall(r"[\d.]+", cell))] for cell in cells)
        return ", ".join(f"{round(a - b, 2):+g}" for a, b in zip(ours[-len(theirs) :], theirs))

    return {
        label: less(ours[label], theirs[label])
        for label in ours
        if label in theirs and (label == MEAN or re.match("— .*: ms", label))
    }


def compare(args, home):
    """Run what args name and print the page, with columns for each run. Return the exit status."""
    runs, columns, plans = {}, {}, collections.defaultdict(lambda: runs["working tree"][1]["plan"])
    traced = read_trace(args.trace) if args.trace else {}
    for file in map(Path, args.program):
        source, digest, logged = read_program(file)
        name, mean = PUBLISHED.get(digest[:8], (file.stem[:24], None))
        runs[name] = run_program(args, home, file, source)
        plans[name] = runs[name][1]["plan"]
        steps = measured_steps(logged, plans[name], mean)
        steps = [step for step in steps if step.windows == steps[0].windows or not args.trace]
        columns |= {
            name: {},
            f"{name}, measured": (
                step_rows(steps, [1] * len(steps))
                if steps
                else {MEAN: f"{mean}"}
                if mean and not args.trace
                else {}
            ),
        }
    if args.flags or not args.program:
        runs |= {args.against: dry_run(args, home, args.against)} if args.against else {}
        runs |= {"empty compile caches": dry_run(args, home, cold=True)} if args.cold else {}
        runs["working tree"] = dry_run(args, home)
    pages = {
        title: page(events, facts, args, title, plans[title])
        for title, (events, facts) in runs.items()
    }
    columns |= {title: rows for title, (rows, _) in pages.items()}
    columns |= {
        f"{name}, measured": with_error(columns[f"{name}, measured"], columns[name])
        for name in runs
        if f"{name}, measured" in columns
    }
    if "working tree" in runs:
        columns |= {
            f"working tree − {name}": difference(columns["working tree"], columns[name])
            for name in runs
            if name in plans and name != "working tree"
        }
    labels = dict.fromkeys(label for rows in columns.values() for label in rows)
    if args.trace:
        first = next(iter(runs))
        columns |= {
            "the trace, measured": traced,
            f"{first} − the trace": difference(columns[first], traced),
        }
    print(
        f"Simulated, but for columns that say measured. Rank 0 of {args.ranks}, {args.memory:g} GB,"
        f" sm_{args.arch}, `{' '.join(args.flags)}`\n"
    )
    print(
        table(
            ["", *columns],
            ([label, *(rows.get(label, "") for rows in columns.values())] for label in labels),
        )
    )
    for _, notes in pages.values():
        print("\n" + "\n\n".join(notes))
    if args.kernels:
        kernels = kernel_rows([*runs.values()][-1][0])
        print("\n" + table(["kernel", "registers", "spills, B", "shared memory, KiB"], kernels))
    return 2 if any("out of memory" in facts for _, facts in runs.values()) else 0


def main():
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=8, help="number of ranks (8)")
    parser.add_argument("--memory", type=float, default=80, help="GB of memory per GPU (80)")
    parser.add_argument(
        "--arch",
        type=int,
        choices=RATES,
        default=90,
        help="80: A100, 86: RTX 3090, 89: RTX 4090, 90: H100, 100: B200, 120: RTX 5090 (90)",
    )
    parser.add_argument(
        "--flash",
        type=int,
        choices=(2, 3),
        default=3,
        help=(
            "version of FlashAttention that Hopper's rates are of; the launches are version 2's (3)"
        ),
    )
    parser.add_argument(
        "--steps", type=int, default=24, help="steps to count, and to time on the host (24)"
    )
    parser.add_argument(
        "--against",
        default="",
        metavar="REVISION",
        help="also run this revision; those without frontier.py are not supported",
    )
    parser.add_argument(
        "--cold", action="store_true", help="first run once with empty compile caches"
    )
    parser.add_argument(
        "--kernels", action="store_true", help="also print a table of the last run's Triton kernels"
    )
    parser.add_argument(
        "--program",
        action="append",
        default=[],
        metavar="FILE",
        help=(
            "also run the program of a public log, or a train_gpt.py with the kernels beside it;"
            " without flags, only this. May be repeated"
        ),
    )
    parser.add_argument(
        "--records",
        metavar="CLONE",
        help=(
            "print only the presets beside the public programs that "
            "they follow, in a clone of the records' repository"
        ),
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help=(
            "compare the first windows by class with a trace of `train_gpt.py "
            "--profile` on a GPU (json.gz), or of --program's record"
        ),
    )
    parser.add_argument("flags", nargs="*", help="flags of the run, after --")
    args = parser.parse_args()
    home = Path(os.environ["DRY_GPU_HOME"])
    if args.records:
        for preset, patterns in RECORDS.items():
            args.program = [
                next(Path(args.records).glob(pattern), Path(args.records, pattern))
                for pattern in patterns
            ]
            args.flags = ["--preset", preset, "--attention", "flash"]
            compare(args, home)
        return 0
    return compare(args, home)


if __name__ == "__main__":
    sys.exit(main())
