"""Time nanoGPT's quick start for CPUs and the laptop preset to about the same validation loss,
interleaved.

    .venv/bin/python bench/nanogpt.py --nanogpt CLONE --text input.txt [--picture FILE]

input.txt is tinyshakespeare or another text. Both train on the first 90 % and validate on the last
10 %. Losses are in nats per character; in ASCII text these are nats per byte. nanoGPT runs as its
README describes, and samples its validation loss on 240 random sequences of 64 characters; ours
covers all of the last 10 %. A third side trains ours without its n-gram tables, to show what they
contribute. Training time excludes start, warm-up and validation; for nanoGPT it is the sum of the
printed iteration times, except iterations that evaluate. Total time is that of the process.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from common import ROOT, machine, positive, ratios, run, spread, table, train_gpt

QUICK_START = (
    "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1"
    " --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters={0}"
    " --max_iters={0} --dropout=0.0"
)


def output(words: list[str], folder: Path, **environment: str) -> str:
    """Run Python in a folder and return what it prints. Raise RunError with the last of it if it
    fails."""
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, **environment},
    )
    if done.returncode:
        raise train_gpt.RunError(
            f"{shlex.join(words)} in {folder} failed with status {done.returncode}:"
            f" {done.stdout[-1000:]}"
        )
    return done.stdout


def nanogpt(clone: Path, steps: int) -> list[tuple[float, float]]:
    """Run nanoGPT -> [(seconds of training, validation loss)] of its validations."""
    shown = output(["train.py", *QUICK_START.format(steps).split()], clone)
    losses = {
        int(step): float(loss)
        for step, loss in re.findall(
            r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", shown, re.M
        )
    }
    times = {
        int(step): float(ms) / 1000
        for step, ms in re.findall(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", shown, re.M)
    }
    if not losses or not times:
        raise train_gpt.RunError(
            f"{clone}/train.py printed no losses or times in the expected format: {shown[-500:]}"
        )
    return [
        (sum(s for i, s in times.items() if i < step and i not in losses), loss)
        for step, loss in losses.items()
    ]


def ours(shards: Path, flags: list[str], ranks: int) -> list[tuple[float, float]]:
    """Run the laptop preset -> [(seconds of training, validation loss)] of its validations."""
    output(
        [
            str(ROOT / "launch/ranks.py"),
            str(ranks),
            str(ROOT / "train_gpt.py"),
            "--preset",
            "laptop",
            "--train_files",
            f"{shards}/*_train_*.bin",
            "--val_files",
            f"{shards}/*_val_*.bin",
            "--log_dir",
            str(shards / "logs"),
            *flags,
        ],
        ROOT,
        OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"),
    )
    log = max((shards / "logs").glob("*.txt"), key=os.path.getmtime).read_text()
    return [
        (int(ms) / 1000, float(loss))
        for loss, ms in re.findall(r"^step:.* val_loss:([\d.]+) train_time:(\d+)ms", log, re.M)
    ]


def draw(found: dict[str, list[list[tuple[float, float]]]], path: Path) -> None:
    """Draw validation loss over seconds of training: the curves of all rounds of each program, and
    the medians of their ends."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.9), layout="constrained")
    ends = {
        name: [median(end) for end in zip(*(curve[-1] for curve in curves))]
        for name, curves in found.items()
    }
    for (name, curves), color in zip(found.items(), ("#c2410c", "#1d4ed8", "#0f7d86")):
        # the first point is before the first step
        curves = [curve[1:] or curve for curve in curves]
        for curve in curves:
            axes.plot(*zip(*curve), "o-", color=color, markersize=3, lw=1, alpha=0.6)
        seconds, loss = ends[name]
        lowest = ends[name] == min(ends.values(), key=lambda end: end[1])
        axes.annotate(
            f"{name}: {loss:.3f} after {seconds:.1f} s",
            ends[name] if lowest else curves[0][0],
            (0, -16 if lowest else 9),
            textcoords="offset points",
            ha="center" if lowest else "left",
            color=color,
            fontweight="bold",
        )
    axes.set(
        xscale="log",
        xlabel=(
            f"seconds of training (logarithmic); n = {len(curves)} alternating runs of each,"
            " medians"
        ),
        ylabel="validation loss, nats per character",
    )
    axes.xaxis.set_major_formatter("{x:g}")
    axes.margins(0.08, 0.2)
    axes.spines[["top", "right"]].set_visible(False)
    (slow, _), (fast, _), _ = ends.values()
    axes.set_title(
        f"A lower loss in {fast:.1f} s than nanoGPT's CPU quick start in {slow:.1f} s, on the same"
        " two cores",
        loc="left",
        fontsize=11,
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="CLONE")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--nanogpt_steps", type=positive, default=2000)
    parser.add_argument(
        "--flags",
        default="--num_steps 24 --target_val_loss 1.88",
        help="flags of train_gpt.py, as one string (%(default)s)",
    )
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the curves")
    args = parser.parse_args()
    for path, what in ((args.nanogpt / "train.py", "a clone of nanoGPT"), (args.text, "a text")):
        if not path.is_file():
            raise train_gpt.RunError(f"{path} does not exist; give {what}")
    with tempfile.TemporaryDirectory() as home:
        clone = Path(home, "nanoGPT")
        shards = Path(home, "shards")
        shutil.copytree(args.nanogpt, clone, ignore=shutil.ignore_patterns(".git"))
        shutil.copy(args.text, clone / "data/shakespeare_char/input.txt")
        output(["data/shakespeare_char/prepare.py"], clone)
        output(
            [
                str(ROOT / "data/text.py"),
                str(args.text.resolve()),
                "--out",
                str(shards),
                "--encoding",
                "bytes",
                "--val-fraction",
                "0.1",
            ],
            ROOT,
        )
        flags = shlex.split(args.flags)
        sides = {
            "nanoGPT": lambda: nanogpt(clone, args.nanogpt_steps),
            "train_gpt.py": lambda: ours(shards, flags, args.ranks),
            "without n-gram tables": lambda: ours(shards, [*flags, "--ngrams", ""], args.ranks),
        }
        curves: dict[str, list[list[tuple[float, float]]]] = {name: [] for name in sides}
        whole: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(args.rounds):
            for name in sorted(sides, reverse=turn % 2 == 1):
                start = time.perf_counter()
                curves[name].append(sides[name]())
                whole[name].append(time.perf_counter() - start)
                print(
                    f"{name}: {curves[name][-1]}, {whole[name][-1]:.1f} s in all",
                    file=sys.stderr,
                    flush=True,
                )
    if args.picture:
        draw(curves, args.picture)
    training, losses = (
        {name: [curve[-1][at] for curve in of_name] for name, of_name in curves.items()}
        for at in (0, 1)
    )
    print(machine())
    print(
        table(
            [
                "",
                "val loss",
                "s of training",
                "s in all",
                f"training, times as fast (n = {args.rounds})",
                "in all, times as fast",
            ],
            [
                [
                    name,
                    spread(losses[name], 4),
                    spread(training[name], 1),
                    spread(whole[name], 1),
                    *(
                        spread(ratios(times["nanoGPT"], times[name]), 1)
                        for times in (training, whole)
                    ),
                ]
                for name in sides
            ],
        )
    )


if __name__ == "__main__":
    run(main)
