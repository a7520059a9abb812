"""Time one GPU as rank 0 of 8: a step without its communication, and the start until the first
step ends.

    .venv/bin/python bench/one_rank_of_8.py                    a GPU; without one it prints so
    .venv/bin/python bench/one_rank_of_8.py --preset laptop    any machine

torch's `fake` process group replaces the other 7 ranks. Its collectives cost nothing and send
nothing: this rank's shard of the gradients is not summed, and the other shards' parameters never
change. Times and memory are those of rank 0 in a run of 8; losses are meaningless. Documents are
random tokens of random lengths. The table has a row for each stage; the last row is the mean over
all steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common import ROOT, FakeComm, frontier, machine, positive, run, spread, table, train_gpt

sys.path.append(str(ROOT / "launch"))
import preflight  # noqa: E402

RANKS = 8


def write_shard(path: Path, tokens: int, vocab_size: int, mean_document: int) -> None:
    draw = np.random.default_rng(0)
    bos_id = vocab_size - 1
    stream = draw.integers(0, bos_id, tokens).astype("<u2")
    stream[draw.random(tokens) < 1 / mean_document] = bos_id
    stream[0] = bos_id
    header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
    header[:5] = train_gpt.MAGIC, train_gpt.VERSION, tokens, vocab_size, bos_id
    path.write_bytes(header.tobytes() + stream.tobytes())


def seconds_since_launch() -> float:
    """Return the seconds since this process was started, with imports."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    presets = {**train_gpt.PRESETS, **frontier.PRESETS}
    parser.add_argument("--preset", choices=presets, default="speedrun")
    parser.add_argument(
        "--rounds",
        type=positive,
        default=20,
        help="timed rounds per stage; a round has as many steps as the slowest update of Adam sums",
    )
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    if not gpu and args.preset != "laptop":
        print(
            f"skipped: the preset {args.preset} needs an NVIDIA GPU and torch finds none; --preset"
            " laptop runs here"
        )
        return
    device = torch.device("cuda" if gpu else "cpu")
    config = presets[args.preset]
    changes = []
    while train_gpt.usable_ranks(config, RANKS) < RANKS:
        config = dataclasses.replace(
            config,
            micro_batches=2 * config.micro_batches,
            micro_batch_tokens=config.micro_batch_tokens // 2,
        )
    vocab_size = 257 if args.preset == "laptop" else train_gpt.GPT2_VOCAB
    comm = FakeComm(RANKS, device)
    if gpu:
        config, changes = train_gpt.resolve_auto(config, comm)
        config = preflight.fit_memory(config, vocab_size, comm)
    config = dataclasses.replace(config, shuffle=False)
    with tempfile.TemporaryDirectory() as folder:
        stages = train_gpt.stages_of(config)
        slow = any(getattr(group, "slow_from", None) is not None for group in config.param_groups)
        cycle = config.adam_every * (1 + slow)
        turns = [
            [train_gpt.plan_of(config, -(-stage.begin // cycle) * cycle + i) for i in range(cycle)]
            for stage in stages
        ]
        tokens = sum(
            plan.micro_batches * plan.micro_batch_tokens for plans in turns for plan in plans
        )
        path = Path(folder) / "random_train_000001.bin"
        write_shard(
            path,
            2 * (args.rounds + 3) * tokens,
            vocab_size,
            mean_document=config.max_document_tokens // 3,
        )
        frontier.gpt2_token_bytes = lambda folder: []  # bytes decide no time
        worker = config.worker_type(config, comm, device, train_gpt.find_shards(str(path)))
        worker.step(turns[0][0], worker.stream.next_batch(turns[0][0]))
        finish(device)
        cold = seconds_since_launch()
        worker.optimizer.reducer.drop_gradients()  # of that step
        rows = []
        weighted = 0.0
        for stage, plans in zip(stages, turns):
            times = []
            tokens = plans[0].micro_batches * plans[0].micro_batch_tokens
            for turn in range(args.rounds + 2):
                batches = [worker.stream.next_batch(plan) for plan in plans]
                finish(device)
                start = time.perf_counter()
                for plan, batch in zip(plans, batches):
                    worker.step(plan, batch)
                finish(device)
                times.append(1e3 * (time.perf_counter() - start) / len(plans))
            times = times[2:]  # the first rounds of a stage compile and tune kernels
            median = float(np.median(times))
            weighted += median * (stage.end - stage.begin) / config.num_steps
            rows.append(
                [
                    f"{plans[0].windows.long} tokens",
                    len(times),
                    spread(times),
                    f"{1e3 * tokens / median:,.0f}",
                ]
            )
        mean = train_gpt.tokens_of_steps(config, config.num_steps) / config.num_steps
        rows.append(["mean of a run", "", f"{weighted:.2f}", f"{1e3 * mean / weighted:,.0f}"])
        worker.stream.close()
    allocated, reserved = train_gpt.peak_memory_mib(device)
    dist.destroy_process_group()
    where = torch.cuda.get_device_name() if gpu else "CPU"
    print(
        f"{machine()}; {where}; preset {args.preset}, rank 0 of {RANKS}, "
        f"{train_gpt.tokens_of_steps(config, 1) // RANKS:,} tokens per rank and first step"
        + "".join(f"; {change}" for change in changes)
        + "\n"
    )
    print(table(["longest window", "n", "ms a step", "tokens/s of 8 such ranks"], rows))
    print(
        f"\nlaunch to the end of the first step: {cold:.1f} s; compiling in all:"
        f" {train_gpt.compile_stats()[1]:.1f} s; peak memory: {allocated:,} MiB allocated,"
        f" {reserved:,} MiB reserved"
    )


if __name__ == "__main__":
    run(main)
