"""bench/dry_gpu/run: rank 0 of N of a run on a GPU that computes nothing, and one page about it.

    bench/dry_gpu/setup                                        once
    bench/dry_gpu/run -- --preset speedrun                     rank 0 of 8 on 80 GB of sm_90
    bench/dry_gpu/run --ranks 1 --memory 24 --arch 89 -- --preset speedrun --micro_batch_tokens 8192
    bench/dry_gpu/run --against HEAD~3 -- --preset speedrun    that revision and the working tree, side by side
    bench/dry_gpu/run --cold -- --preset speedrun              with nothing compiled before, and with all
    bench/dry_gpu/run --trace FILE -- --preset speedrun        what a profiler's trace on a GPU has, class by class, beside it
    bench/dry_gpu/run --cards                                  speedrun on 1 to 8 cards of 80, 48 and 24 GB: a table

TORCHINDUCTOR_COMPILE_THREADS says how many processes compile (else 1).
Shards are made of random tokens, in documents about as long as FineWeb's (assumed: lognormal, median 400, mean 700).
What is called simulated is computed by simulate.py; host times are of this machine. A kernel that does not compile ends
the run with what Triton says. Exit status: 0 the page is printed, 1 the run failed, 2 it does not fit the card.
"""

import argparse
import collections
import gzip
import io
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np

from simulate import RATES, RECORD, RECORD_MS, costs, mean_costs, measured, parse_log, phase, simulate

ROOT = Path(__file__).resolve().parent.parent.parent


def small_vocabulary(flags):
    """Of bytes, as the laptop preset has it, which validates on all there is."""
    return any("laptop" in flag for flag in flags)


def write_shards(folder, vocab):
    """One shard under many names, since a plan reads more tokens than are worth making."""
    folder.mkdir(exist_ok=True)
    draw = np.random.default_rng(0)
    for name, tokens, copies in (("train", 5_000_000, 120), ("val", 10_485_761 if vocab > 257 else 262_145, 1)):
        if (folder / f"random_{name}_{copies - 1:06}.bin").exists():
            continue
        stream = draw.integers(0, vocab - 1, tokens).astype("<u2")
        begins = np.cumsum(draw.lognormal(np.log(400), 1.06, tokens // 300).astype(int) + 1)
        stream[[0, *begins[begins < tokens]]] = vocab - 1
        header = np.zeros(256, "<i4")
        header[:5] = 20240520, 1, tokens, vocab, vocab - 1
        (folder / f"{name}.bin").write_bytes(header.tobytes() + stream.tobytes())
        for i in range(copies):
            link = folder / f"random_{name}_{i:06}.bin"
            link.unlink(missing_ok=True)  # of a run that was ended here
            link.symlink_to(f"{name}.bin")


def dry_run(args, home, revision="", cold=False):
    """Run rank 0 of a revision's scripts, or the working tree's -> (events of the launch log, facts)."""
    folder, work = ROOT, Path(tempfile.mkdtemp(prefix="run-", dir=home))
    if revision:
        archive = subprocess.run(["git", "archive", revision, "--", "*.py"], cwd=ROOT, capture_output=True)
        if archive.returncode:
            sys.exit(f"run: error: --against {revision}: {archive.stderr.decode().strip()}; name one of this checkout")
        folder = work / "scripts"
        tarfile.open(fileobj=io.BytesIO(archive.stdout)).extractall(folder, filter="data")
    vocab = 257 if small_vocabulary(args.flags) else 50257
    shards = home / f"shards-{vocab}"
    write_shards(shards, vocab)
    command = [sys.executable, Path(__file__).with_name("rank0.py"), folder, str(args.ranks), str(args.steps),
               "--train_files", f"{shards}/random_train_*.bin", "--val_files", f"{shards}/random_val_*.bin",
               "--train_shards", "0", "--log_dir", work / "logs",
               "--val_every", "250", *args.flags]  # whose first, at step 0, is looked at
    caches = work if cold else home
    settings = {
        "LD_LIBRARY_PATH": home / "lib", "TRITON_LIBCUDA_PATH": home / "lib", "TRITON_CACHE_DIR": caches / "triton",
        "TORCHINDUCTOR_CACHE_DIR": caches / "inductor", "OMP_NUM_THREADS": 1,
        "LOCAL_WORLD_SIZE": 1,  # the others take no memory here
        "TORCHINDUCTOR_BENCHMARK_KERNEL": 1,  # makes Inductor count a kernel's bytes
        "TORCH_NCCL_ENABLE_MONITORING": 0, "DRY_GPU_LOG": work / "launches.log", "DRY_GPU_ARCH": args.arch,
        "DRY_GPU_MEMORY": int(0.99 * args.memory * 2 ** 30)}  # 80 GB of an H100 are 79.2 GiB
    environment = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | os.environ  # which may say more
    environment |= {name: str(setting) for name, setting in settings.items()}
    with open(work / "out.txt", "w") as out:
        status = subprocess.call(command, stdout=out, stderr=out, env=environment)
    if status:
        last = (work / "out.txt").read_text().splitlines()[-20:]
        sys.exit("\n".join([*last, f"run: error: rank 0 ended with status {status}; all that it said: {work}/out.txt"]))
    events = parse_log(open(work / "launches.log"))
    shutil.rmtree(work)
    return events, json.loads(next(e.name for e in events if e.kind == "FACTS"))


# ---- the page

KINDS = {"TRITON": "Triton", "GEMM": "products", "KERNEL": "eager", "COPY": "copies", "FILL": "fills",
         "NCCL": "collectives"}


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *rows))


def runs_of(words):
    """a a b -> `2 a, b`."""
    runs = [(word, len(list(run))) for word, run in itertools.groupby(words)]
    return ", ".join(f"{n} {word}" if n > 1 else word for word, n in runs) or "none"


def launch_rows(events, steps):
    """What was compiled, and what the timed steps launched: {what: figure}."""
    kernels = {(e.name, *e.numbers) for e in events if e.kind == "MODULE"}
    spills = sorted(f"{name}, {stack} B" for name, _, stack, _ in kernels if stack)
    shared = max((e.numbers[4] for e in events if e.kind == "TRITON"), default=0)
    rows = {"Triton kernels compiled and loaded; that spill": f"{len(kernels)}; {runs_of(spills)}",
            "most registers; most shared memory": f"{max((k[1] for k in kernels), default=0)}; {shared / 1024:.0f} KiB"}
    train = phase(events, "training")
    begins = [i for i, e in enumerate(train) if e.kind == "STEP"][:steps + 1]
    if len(begins) < 3:
        return rows
    clock, steps = train[begins[0]:begins[-1]], len(begins) - 1
    count = collections.Counter(e.kind for e in clock)
    rows["launches a step"] = f"{sum(count[kind] for kind in KINDS) / steps:.0f}"
    for kind, name in KINDS.items():
        rows[f"— {name}"] = f"{count[kind] / steps:.0f}"
    rows["on the clock, host waits for GPU"] = runs_of(sorted(e.name for e in clock if e.kind == "SYNC"))
    rows["on the clock, allocations"] = runs_of(
        f"{e.name} of {e.numbers[0]:,} B" for e in clock if e.kind in ("ALLOC", "FREE", "OOM"))
    for begin, end in itertools.pairwise(begins[-3:]):
        sent = [e for e in train[begin:end] if e.kind == "NCCL"]
        rows[f"collectives of step {train[begin].numbers[0]}, MB"] = (
            f"{sum(e.numbers[0] for e in sent) / 1e6:,.0f}: "
            + runs_of(f"{e.name} {e.numbers[0] / 1e6:.3g}" for e in sent))
    return rows


def kernel_rows(events):
    """Each Triton kernel that was compiled and loaded: name, registers, bytes it spills, KiB of shared memory."""
    shared = {e.name: e.numbers[4] / 1024 for e in events if e.kind == "TRITON"}
    kernels = {(e.name, *e.numbers[:2]) for e in events if e.kind == "MODULE"}
    return [(*kernel, f"{shared[kernel[0]]:.0f}" if kernel[0] in shared else "") for kernel in sorted(kernels)]


MEAN = "simulated ms a step, mean"


def class_rows(kinds):
    return {f"— {kind}: ms, launches": f"{ms:.2f}, {count:.0f}" for kind, (ms, count) in kinds.items()}


def simulated_rows(groups, first, plan):
    """{what: figure} of the census's steps, grouped by their windows; of classes, those of the first group. plan: {windows:
    their steps}, of the working tree for every revision, or the means would not compare."""
    means = {windows: statistics.mean(step.ms for step in steps) for windows, steps in groups.items()}
    rows = {f"simulated ms a step, windows {windows}": f"{mean:.1f}" for windows, mean in means.items()}
    weights = [plan.get(windows, 0) for windows in means]
    if any(weights):
        rows[MEAN] = f"{np.average([*means.values()], weights=weights):.1f}"
    if first:
        rows |= class_rows(dict.fromkeys(RECORD, (0, 0)) | mean_costs(first, lambda cost: cost.kind))
        rows["— main stream waits for others"] = f"{statistics.mean(step.waiting_ms for step in first):.2f}"
    return rows


def page(events, facts, args, title, plan):
    """({what: figure}, paragraphs) of one revision. plan: see simulated_rows."""
    census = phase(events, "census")
    groups = collections.defaultdict(list)
    for step in simulate(census, costs(census, RATES[args.arch], args.ranks)):
        groups[step.windows].append(step)
    first = next(iter(groups.values()), [])
    breaks = sum(facts["breaks"].values())
    rows = {"graphs; breaks; compiled after warm-up": f"{facts['graphs']}; {breaks}; {facts['late']}",
            "compiling; warm-up in all; its CPU time": "; ".join(
                f"{facts.get(name, 0):.0f} s" for name in ("compile", "warm_up", "warm_up_cpu")),
            "micro-batches of a step, tokens": facts.get("batch", "none")}
    rows |= launch_rows(events, args.steps)
    if facts["host"]:
        wall, cpu = zip(*facts["host"])
        rows["host ms a step: wall; CPU of all threads"] = (
            f"{statistics.median(wall):.0f} (least {min(wall):.0f}); {statistics.median(cpu):.0f}")
    for name, held in facts["memory"].items():
        rows[f"peak MiB in {name}; reserved"] = f"{held['peak'] >> 20:,}; {held['reserved'] >> 20:,}"
    rows |= simulated_rows(groups, first, plan)
    notes = []
    if "out of memory" in facts:
        notes.append(f"**It does not fit, as {facts['phase']} shows.** {facts['out of memory']}")
    notes += [f"Graph break, {n} times: {why}" for why, n in facts["breaks"].items()]
    for name, held in facts["memory"].items():
        tensors = [(size / 2 ** 20, n, where) for size, n, where in held["tensors"] if size > held["peak"] / 50]
        notes.append(f"What makes the peak in {name}, MiB: " + "; ".join(
            f"{size:,.0f} in {n} × {where}" for size, n, where in tensors))
    longest = sorted(mean_costs(first, lambda cost: f"{cost.kind}: {cost.name}").items(), key=lambda item: -item[1][0])
    notes.append(f"Simulated ms a step, windows {first[0].windows if first else 'none'}: " + "; ".join(
        f"{ms:.2f} {name[:100]}" for name, (ms, _) in longest[:16]))
    notes.append("Of which eager operators, ms and launches: " + "; ".join(
        f"{name.removeprefix('eager: ')} {ms:.2f} in {n:.0f}" for name, (ms, n) in longest
        if name.startswith("eager: ") and round(n)))
    return rows, [f"{title}. {note}" for note in notes]


def fit(args, home):
    """A row of what --cards prints: what of the preset fits, and how long it would take."""
    events, facts = dry_run(args, home)
    rows, _ = page(events, facts, args, "", facts["plan"])
    card = f"{args.memory:g} GB, sm_{args.arch}"
    if "out of memory" in facts:
        return card, args.ranks, facts["out of memory"], "", "", ""
    peak, mean = max(held["peak"] for held in facts["memory"].values()), float(rows[MEAN])
    return (card, args.ranks, facts["batch"], f"{peak / 2 ** 30:.1f}", f"{mean:.0f}",
            f"{mean * sum(facts['plan'].values()) / 6e4:.1f}")


def main():
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of which this is rank 0 (8)")
    parser.add_argument("--memory", type=float, default=80, help="GB of the card (80)")
    parser.add_argument("--arch", type=int, choices=RATES, default=90, help="90: an H100, 89: an RTX 4090 (90)")
    parser.add_argument("--steps", type=int, default=8, help="that are counted, and timed on the host (8)")
    parser.add_argument("--against", default="", metavar="REVISION", help="run its scripts too")
    parser.add_argument("--cold", action="store_true", help="run once more, before, with empty caches of compiled code")
    parser.add_argument("--cards", action="store_true", help="print only what of speedrun fits on which cards")
    parser.add_argument("--kernels", action="store_true", help="and a row for each Triton kernel of the working tree")
    parser.add_argument("--trace", metavar="FILE", help="of --profile on a GPU (json.gz): its classes in a column")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, after --")
    args = parser.parse_args()
    home = Path(os.environ["DRY_GPU_HOME"])
    if args.cards:
        print("Simulated, nothing measured on a device: the preset speedrun\n\n" + table(
            ["each GPU", "GPUs", "micro-batches of a step, per GPU", "peak GiB", "ms a step", "minutes for its steps"], []))
        args.steps, args.flags = 2, ["--preset", "speedrun", "--warmup_steps", "8"]  # one of each kind, in each stage
        for (args.memory, args.arch), args.ranks in itertools.product(((80, 90), (48, 89), (24, 89)), (8, 4, 2, 1)):
            print("| " + " | ".join(map(str, fit(args, home))) + " |", flush=True)
        return 0
    runs = {args.against: dry_run(args, home, args.against)} if args.against else {}
    runs |= {"nothing compiled before": dry_run(args, home, cold=True)} if args.cold else {}
    runs["working tree"] = dry_run(args, home)
    plan = runs["working tree"][1]["plan"]
    pages = {title: page(events, facts, args, title, plan) for title, (events, facts) in runs.items()}
    columns = {title: rows for title, (rows, _) in pages.items()}
    labels = dict.fromkeys(label for rows in columns.values() for label in rows)
    if args.trace:
        columns[f"measured: {Path(args.trace).name}"] = class_rows(measured(json.load(gzip.open(args.trace))))
    if not small_vocabulary(args.flags):
        columns["record 44, measured on 8 H100"] = {
            "launches a step": sum(n for _, n in RECORD.values()),
            **{f"— {kind}: ms, launches": f"{ms}, {n}" for kind, (ms, n) in RECORD.items()},
            **{f"simulated ms a step, {windows}": ms for windows, ms in RECORD_MS.items()}}
    print(f"Simulated, nothing measured on a device: rank 0 of {args.ranks}, {args.memory:g} GB, sm_{args.arch}, "
          f"`{' '.join(args.flags)}`\n")
    print(table(["", *columns], ([label, *(rows.get(label, "") for rows in columns.values())] for label in labels)))
    for _, notes in pages.values():
        print("\n" + "\n\n".join(notes))
    if args.kernels:
        kernels = kernel_rows(runs["working tree"][0])
        print("\n" + table(["kernel", "registers", "spills, B", "shared memory, KiB"], kernels))
    return 2 if any("out of memory" in facts for _, facts in runs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
