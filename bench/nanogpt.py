"""Time nanoGPT's quick start for CPUs and the laptop preset to about the same validation loss, interleaved.

    python bench/nanogpt.py --nanogpt PATH_OF_A_CLONE --text input.txt

input.txt is tinyshakespeare or another text. Both train on the first 90 % and validate on the last 10 %. Losses are in
nats per character; in ASCII text these are nats per byte. nanoGPT runs as its README describes, and samples its
validation loss on 240 random sequences of 64 characters; ours covers all of the last 10 %. Training time excludes start,
warm-up and validation; for nanoGPT it is the sum of the printed iteration times, except iterations that evaluate. Total
time is that of the process.
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

from common import ROOT, machine, positive, ratios, run, spread, table, train_gpt

QUICK_START = ("config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1 --block_size=64 "
               "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --lr_decay_iters={0} --max_iters={0} --dropout=0.0")


def output(words: list[str], folder: Path, **environment: str) -> str:
    """Run Python in a folder and return what it prints. Raise RunError with the last of it if it fails."""
    done = subprocess.run([sys.executable, *words], cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env={**os.environ, **environment})
    if done.returncode:
        raise train_gpt.RunError(f"{shlex.join(words)} in {folder} failed with status {done.returncode}: {done.stdout[-1000:]}")
    return done.stdout


def nanogpt(clone: Path, steps: int) -> tuple[float, float]:
    """Run nanoGPT -> (last validation loss, seconds of training)."""
    shown = output(["train.py", *QUICK_START.format(steps).split()], clone)
    losses = dict(re.findall(r"^step (\d+): train loss [\d.]+, val loss ([\d.]+)", shown, re.M))
    times = re.findall(r"^iter (\d+): loss [\d.]+, time ([\d.]+)ms", shown, re.M)
    if not losses or not times:
        raise train_gpt.RunError(f"{clone}/train.py printed no losses or times in the expected format: {shown[-500:]}")
    return float([*losses.values()][-1]), sum(float(ms) for step, ms in times if step not in losses) / 1000


def ours(shards: Path, flags: list[str], ranks: int) -> tuple[float, float]:
    """Run the laptop preset -> (validation loss, seconds of training)."""
    shown = output([str(ROOT / "records/launch.py"), f"--nproc_per_node={ranks}", str(ROOT / "train_gpt.py"), "--preset", "laptop",
                    "--train_files", f"{shards}/*_train_*.bin", "--val_files", f"{shards}/*_val_*.bin", "--log_dir",
                    str(shards / "logs"), *flags], ROOT, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    loss, milliseconds = re.findall(r"val_loss:([\d.]+) train_time:(\d+)ms", shown)[-1]
    return float(loss), int(milliseconds) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--nanogpt", type=Path, required=True, metavar="CLONE")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--nanogpt_steps", type=positive, default=2000)
    parser.add_argument("--flags", default="--num_steps 36 --target_val_loss 1.88", help="flags of train_gpt.py, as one string (%(default)s)")
    args = parser.parse_args()
    for path, what in ((args.nanogpt / "train.py", "a clone of nanoGPT"), (args.text, "a text")):
        if not path.is_file():
            raise train_gpt.RunError(f"{path} does not exist; give {what}")
    with tempfile.TemporaryDirectory() as home:
        clone, shards = Path(home, "nanoGPT"), Path(home, "shards")
        shutil.copytree(args.nanogpt, clone, ignore=shutil.ignore_patterns(".git"))
        shutil.copy(args.text, clone / "data/shakespeare_char/input.txt")
        output(["data/shakespeare_char/prepare.py"], clone)
        output([str(ROOT / "data/text.py"), str(args.text.resolve()), "--out", str(shards), "--encoding", "bytes", "--val-fraction",
                "0.1"], ROOT)
        found: dict[str, list[tuple[float, ...]]] = {"nanoGPT": [], "laptop": []}
        for turn in range(args.rounds):
            for name in sorted(found, reverse=turn % 2 == 1):
                start = time.perf_counter()
                loss, seconds = (nanogpt(clone, args.nanogpt_steps) if name == "nanoGPT" else
                                 ours(shards, shlex.split(args.flags), args.ranks))
                found[name].append((loss, seconds, time.perf_counter() - start))
                print(f"{name}: loss {loss}, {seconds:.1f} s of training, {found[name][-1][2]:.1f} s in all", file=sys.stderr)
    columns = {name: list(zip(*rows)) for name, rows in found.items()}
    print(machine())
    print(table(["", "val loss", "s of training", "s in all", f"training, times as fast (n = {args.rounds})", "in all, times as fast"],
                [[name, spread(losses, 4), spread(training, 1), spread(whole, 1),
                  *(spread(ratios(columns["nanoGPT"][i], columns[name][i]), 1) for i in (1, 2))]
                 for name, (losses, training, whole) in columns.items()]))


if __name__ == "__main__":
    run(main)
