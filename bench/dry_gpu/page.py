"""bench/dry_gpu/run: rank 0 of N of a run on a GPU that computes nothing, and one page about it.

    bench/dry_gpu/setup                                             once
    bench/dry_gpu/run -- --preset speedrun                          rank 0 of 8 on 80 GB of sm_90
    bench/dry_gpu/run --ranks 1 --memory 24 --arch 89 -- --preset speedrun --layers "- S1M L2M"
    bench/dry_gpu/run --against HEAD~3 -- --preset speedrun         two revisions side by side

Shards are made of random tokens, in documents as long as FineWeb's (assumed: lognormal, median 400, mean 700). Everything that is a
time on the device is simulated: see simulate.py. Exit status: 0, 1 the run failed, 2 the run does not fit the card (the page says why).
"""

import argparse
import collections
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

from simulate import RATES, RECORD, RECORD_STEP_MS, costs, parse_log, phase, simulate

ROOT = Path(__file__).resolve().parent.parent.parent
GIB = 2 ** 30
CONTEXT = 0.99  # of a card's nominal memory is there


# ---- the run


def write_shards(folder, vocab):
    """Links under many names to one shard: enough tokens for the longest plan, few to read."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for name, tokens, copies in (("train", 5_000_000, 120), ("val", 10_485_761, 1)):
        if (folder / f"random_{name}_{copies - 1:06}.bin").exists():
            continue
        stream = draw.integers(0, vocab - 1, tokens).astype("<u2")
        stream[np.minimum(np.cumsum(draw.lognormal(np.log(400), 1.06, tokens // 300).astype(int) + 1), tokens - 1)] = vocab - 1
        stream[0] = vocab - 1
        header = np.zeros(256, "<i4")
        header[:5] = 20240520, 1, tokens, vocab, vocab - 1
        (folder / f"{name}.bin").write_bytes(header.tobytes() + stream.tobytes())
        for i in range(copies):
            (folder / f"random_{name}_{i:06}.bin").symlink_to(folder / f"{name}.bin")


def source_of(revision, home):
    """The folder of a revision's scripts; the working tree's for none."""
    if not revision:
        return ROOT
    tar = subprocess.run(["git", "archive", revision, "--", "*.py"], cwd=ROOT, capture_output=True)
    if tar.returncode:
        sys.exit(f"run: error: --against {revision}: {tar.stderr.decode().strip()}; name a revision that has train_gpt.py")
    folder = home / "against" / revision.replace("/", "_")
    tarfile.open(fileobj=io.BytesIO(tar.stdout)).extractall(folder, filter="data")
    return folder


def dry_run(args, revision, home):
    """Run rank 0 -> (events of the launch log, facts)."""
    work = home / ("work-against" if revision else "work")
    subprocess.run(["rm", "-rf", work], check=True)
    work.mkdir(parents=True)
    write_shards(shards := home / f"shards-{args.vocab}", args.vocab)
    flags = ["--train_files", f"{shards}/random_train_*.bin", "--val_files", f"{shards}/random_val_*.bin", "--train_shards", "0",
             "--log_dir", str(work / "logs"), *args.flags]
    request = {"folder": str(source_of(revision, home)), "ranks": args.ranks, "steps": args.steps, "flags": flags,
               "facts": str(work / "facts.json")}
    (work / "request.json").write_text(json.dumps(request))
    environment = {
        **os.environ, "LD_LIBRARY_PATH": str(home / "lib"), "TRITON_LIBCUDA_PATH": str(home / "lib"),
        "TRITON_CACHE_DIR": str(home / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_BENCHMARK_KERNEL": "1", "TORCH_NCCL_ENABLE_MONITORING": "0",
        "OMP_NUM_THREADS": "1", "DRY_GPU_LOG": str(work / "launches.log"), "DRY_GPU_ARCH": str(args.arch),
        "DRY_GPU_MEMORY": str(int(args.memory * CONTEXT * GIB))}
    with open(work / "out.txt", "w") as out:
        status = subprocess.call([sys.executable, Path(__file__).with_name("rank0.py"), work / "request.json"], env=environment,
                                 stdout=out, stderr=subprocess.STDOUT)
    if status or not (work / "facts.json").exists():
        last = (work / "out.txt").read_text().strip().splitlines()[-25:]
        sys.exit("\n".join([*last, f"run: error: the run of {revision or 'the working tree'} ended with {status}; all it said: "
                            f"{work / 'out.txt'}"]))
    return parse_log(open(work / "launches.log")), json.loads((work / "facts.json").read_text())


# ---- the page


def table(head, rows):
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in (head, ["---"] * len(head), *rows))


def counted(words):
    """a a b -> `2 a, b`, in order."""
    runs = []
    for word in words:
        if runs and runs[-1][1] == word:
            runs[-1][0] += 1
        else:
            runs.append([1, word])
    return ", ".join(f"{n} {word}" if n > 1 else word for n, word in runs) or "none"


def clocked(events, steps):
    """The events of the timed steps: of whole steps, after the first validation."""
    marks = [i for i, e in enumerate(events) if e.kind == "STEP"]
    return events[marks[0]:marks[min(steps, len(marks) - 1)]] if marks else []


def rows_of(events, facts, args):
    """The page's lines for one revision: {what: figure}."""
    rows, rates = {}, RATES[args.arch]
    loaded = {(e.name, *e.words): e for e in events if e.kind == "MODULE"}
    spilled = [f"{name} ({local} B)" for name, _, local, _ in loaded if local]
    shared = max((e.words[4] for e in events if e.kind == "TRITON"), default=0)
    rows["kernels compiled"] = f"{len(loaded)}; spill: {len(spilled)}" + (f": {', '.join(spilled[:4])}" if spilled else "")
    rows["most registers; shared memory of a launch"] = f"{max((k[1] for k in loaded), default=0)}; {shared / 1024:.0f} KiB"
    rows["graphs; breaks; after warm-up"] = f"{facts['graphs']}; {sum(facts['breaks'].values())}; {facts['late']}"
    rows["compiling; warm-up, here"] = f"{facts['compile']:.0f} s; {facts.get('warm-up seconds', 0):.0f} s"
    train = clocked(phase(events, "training"), args.steps)
    steps = sum(e.kind == "STEP" for e in train) or 1
    kinds = collections.Counter(e.kind for e in train)
    names = {"TRITON": "Triton", "GEMM": "products", "KERNEL": "eager", "COPY": "copies", "FILL": "fills", "NCCL": "collectives"}
    rows["launches a step"] = f"{sum(kinds[k] for k in names) / steps:.0f}: " + ", ".join(
        f"{kinds[k] / steps:.0f} {name}" for k, name in names.items() if kinds[k])
    rows["host waits for the GPU, on the clock"] = counted(e.name for e in train if e.kind == "SYNC")
    rows["allocations on the clock"] = counted(f"{e.name} {e.words[0] / 2 ** 20:.0f} MiB" for e in train if e.kind in ("ALLOC", "FREE"))
    ends = [i for i, e in enumerate(train) if e.kind == "STEP"]
    for title, part in (("even step", train[ends[-2]:ends[-1]] if len(ends) > 1 else []), ("odd step", train[ends[-1]:] if ends else [])):
        sent = [e for e in part if e.kind == "NCCL"]
        rows[f"collectives, {title}"] = f"{sum(e.words[0] for e in sent) / 1e6:.0f} MB: " + counted(
            f"{e.name.replace('reduce-scatter', 'rs').replace('all-gather', 'ag')} {e.words[0] / 1e6:.3g}" for e in sent)
    if facts["host"]:
        rows["host ms a step, here"] = f"{statistics.median(facts['host']):.1f} (n = {len(facts['host'])})"
    for name, held in facts["memory"].items():
        rows[f"peak MiB in {name}; reserved"] = f"{held['peak'] >> 20:,}; {held['reserved'] >> 20:,}"
    census = phase(events, "census")
    by_windows = collections.defaultdict(list)
    for step in simulate(census, costs(census, rates, args.ranks, facts["attention"][0])):
        by_windows[step.windows].append(step)
    for windows, steps in by_windows.items():
        rows[f"simulated ms a step, windows {windows}"] = f"{statistics.mean(s.ms for s in steps):.2f}"
    weights = {w: facts.get("plan", {}).get(w, 0 if facts.get("plan") else 1) for w in by_windows}
    if sum(weights.values()):
        mean = sum(weights[w] * statistics.mean(s.ms for s in steps) for w, steps in by_windows.items()) / sum(weights.values())
        rows["simulated ms a step, the plan's mean"] = f"{mean:.2f}"
    first = next(iter(by_windows.values()), [])
    for kind in RECORD:
        if kind != "a step" and first:
            ms, count = (statistics.mean(s.busy.get(kind, (0, 0))[j] for s in first) for j in (0, 1))
            rows[f"simulated ms, {kind} (launches)"] = f"{ms:.2f} ({count:.0f})"
    if first:
        rows["simulated ms, main stream waits for collectives"] = f"{statistics.mean(s.waiting_ms for s in first):.2f}"
    return rows, first


def lists_of(facts, first, title):
    """Below the table: the tensors of each peak, and the kernels that take longest."""
    out = []
    if "out of memory" in facts:
        out.append(f"**{title} does not fit this card: out of memory in {facts['out of memory'][0]}.** {facts['out of memory'][1]}")
    for name, held in facts["memory"].items():
        if name != "set-up" or "out of memory" in facts:
            out.append(f"{title}, the peak in {name}, MiB: " + "; ".join(
                f"{size / 2 ** 20:,.0f} in {n} of {where}" for size, n, where in held["tensors"][:8] if size >> 20))
    longest = collections.Counter()
    for step in first:
        for name, (ms, _) in step.names.items():
            longest[name] += ms / len(first)
    if longest:
        out.append(f"{title}, simulated ms of the longest: " + "; ".join(f"{ms:.2f} {name[:90]}" for name, ms in longest.most_common(14)))
    if facts["breaks"]:
        out.append(f"{title}, graph breaks: " + "; ".join(f"{n} {why}" for why, n in facts["breaks"].items()))
    return out


def main():
    parser = argparse.ArgumentParser(prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8, help="of which rank 0 runs (8)")
    parser.add_argument("--memory", type=float, default=80, help="GB of the card (80)")
    parser.add_argument("--arch", type=int, choices=RATES, default=90, help="compute capability (90)")
    parser.add_argument("--steps", type=int, default=8, help="whose launches are counted and whose host time is taken (8)")
    parser.add_argument("--vocab", type=int, help="of the shards (50257; 257 for the preset laptop)")
    parser.add_argument("--against", default="", metavar="REVISION", help="run this revision's train_gpt.py too")
    parser.add_argument("flags", nargs="*", help="of train_gpt.py, after --")
    args = parser.parse_args()
    args.vocab = args.vocab or (257 if "laptop" in args.flags else 50257)
    home, pages = Path(os.environ["DRY_GPU_HOME"]), []
    for revision in [args.against] * bool(args.against) + [""]:
        events, facts = dry_run(args, revision, home)
        rows, first = rows_of(events, facts, args)
        pages.append((revision or "working tree", rows, lists_of(facts, first, revision or "working tree"), facts))
    record = {f"simulated ms, {k} (launches)": f"{ms:.2f} ({n})" for k, (ms, n) in RECORD.items()} | {
        "simulated ms a step, the plan's mean": RECORD_STEP_MS, "simulated ms a step, windows 384 128": RECORD["a step"][0],
        "launches a step": RECORD["a step"][1]} if args.arch == 90 and args.vocab == 50257 else {}
    print(f"Simulated, nothing of it measured on a device: rank 0 of {args.ranks}, {args.memory:g} GB, sm_{args.arch}, "
          f"`{' '.join(args.flags)}`\n")
    head = ["", *(page[0] for page in pages)] + ["the record's trace"] * bool(record)
    labels = dict.fromkeys(label for page in pages for label in page[1])
    print(table(head, [[label, *(page[1].get(label, "") for page in pages), *([record.get(label, "")] if record else [])]
                       for label in labels]))
    for page in pages:
        print("\n" + "\n\n".join(page[2]))
    return 2 if any("out of memory" in page[3] for page in pages) else 0


if __name__ == "__main__":
    sys.exit(main())
