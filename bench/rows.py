"""Measure the cost of n-gram tables: bytes sent and time per step, if all rows are updated or only those with a gradient.

    python bench/rows.py                          the laptop preset on two ranks
    python bench/rows.py --ranks 4 --rounds 2     more ranks than cores: bytes are valid, times are not

Bytes are counted as rank 0 sends them, minus those of a model without the tables. "needed" is computed from the tokens
of the steps, independently of what was sent: gradients of rows that other ranks own, and new values of this rank's rows
for all other ranks. Ranks also send one bit per row that says whether they read it.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import statistics
from typing import Any, Sequence

import numpy as np
import torch
from torch import Tensor

from common import machine, next_steps, on_ranks, positive, ratios, run, spread, table, take_turns, train_gpt

WITHOUT, ALL, TOUCHED = "no tables", "all rows", "rows with a gradient"
VARIANTS = {WITHOUT: {"ngrams": ()}, ALL: {"lazy_tables": False}, TOUCHED: {"lazy_tables": True}}


class Counting(train_gpt.Comm):
    """Counts the bytes that this rank sends: [bits of rows, gradients and parameters]."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(rank, ranks)
        self.bytes = [0, 0]

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Any:
        for other, x in enumerate(sent):
            if other != self.rank:
                self.bytes[x.is_floating_point()] += x.nbytes
        return super().exchange(sent, received)


def tables(worker: train_gpt.Worker) -> list[train_gpt.RowBucket]:
    return [bucket for bucket in worker.optimizer.buckets if isinstance(bucket, train_gpt.RowBucket)]


def rows_read(worker: train_gpt.Worker, batch: list[np.ndarray]) -> list[list[int]]:
    """Return the rows of each bucket of tables that a step's tokens read."""
    read = worker.model.rows_read(torch.from_numpy(np.stack(batch)[:, :-1].astype(np.int32)))
    return [[int(row) for slot in bucket.slots for row in read[slot.param].unique() + bucket.first_row(slot)]
            for bucket in tables(worker)]


def needed_bytes(worker: train_gpt.Worker, everyones: list[list[list[int]]]) -> int:
    """Compute the bytes that rank 0 must send in a step, given the rows that each rank reads."""
    needed = 0
    for bucket, (mine, *others) in zip(tables(worker), zip(*everyones)):
        owned = range(len(bucket.param_shard))
        wanted = sum(row in owned for row in set().union(mine, *others)) * len(others)
        needed += (wanted + sum(row not in owned for row in mine)) * bucket.rows[0].nbytes
    return needed


def measure(rank: int, ranks: int, flags: list[str], rounds: int) -> tuple[dict, dict, float]:
    """Measure the variants, per step -> (seconds in each round, mean bytes sent as in Counting, bytes needed)."""
    _, base = train_gpt.parse_config(flags, "laptop")
    shards = train_gpt.find_shards(base.train_files, base.train_shards)
    workers = {name: train_gpt.Worker(dataclasses.replace(base, **changes), Counting(rank, ranks), torch.device("cpu"), shards)
                for name, changes in VARIANTS.items()}
    turns = {name: next_steps(worker, base.adam_every) for name, worker in workers.items()}
    sent, read = {name: [] for name in workers}, []
    lazy, step = workers[TOUCHED], workers[TOUCHED].step

    def noted(plan: train_gpt.Plan, batch: list[np.ndarray]) -> list[Tensor]:
        read.append(batch)
        return step(plan, batch)
    lazy.step = noted

    def counted(name: str) -> None:
        workers[name].comm.bytes = [0, 0]
        turns[name]()
        sent[name].append(workers[name].comm.bytes)

    times = take_turns({name: functools.partial(counted, name) for name in turns}, rounds, 1, barrier=torch.distributed.barrier)
    # without the warm-up round
    steps = [*zip(*lazy.comm.all_gather_json([rows_read(lazy, batch) for batch in read[base.adam_every:]]))]
    return ({name: [t / base.adam_every for t in times[name]] for name in workers},
            {name: (np.mean(counts[1:], 0) / base.adam_every).tolist() for name, counts in sent.items()},
            statistics.mean(needed_bytes(lazy, everyones) for everyones in steps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--flags", default="", help="flags of train_gpt.py, as one string")
    args = parser.parse_args()
    times, sent, needed = on_ranks(args.ranks, measure, shlex.split(args.flags), args.rounds)
    rows = []
    for name, (which, rest) in sent.items():
        total = rest - sent[WITHOUT][1]
        wanted = needed if name == TOUCHED else total
        share = f"{(total + which) / wanted:.3f}" if wanted else ""
        rows.append([name, f"{wanted / 1e6:.2f}", f"{which / 1e6:.3f}", share,
                     spread([1000 * t for t in times[name]], 0), spread(ratios(times[name], times[ALL]))])
    print(machine())
    print(table([f"rank 0 of {args.ranks}", "MB needed", "MB, which rows", "sent / needed", "ms a step", f"ratio to all rows (n = {args.rounds})"],
                rows))


if __name__ == "__main__":
    run(main)
