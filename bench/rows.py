"""What tables of n-grams cost: all their rows in each update, or only those that have a gradient.

    python bench/rows.py                          the laptop preset on two ranks
    python bench/rows.py --ranks 4 --rounds 2     bytes are those of as many ranks, times those of an overfull machine

Bytes are counted where they leave a rank, over the steps of one cycle of Adam; a model without the tables is subtracted. "needed"
are, by the tokens of the steps, those of the rows' gradients that others own, and of new rows that others hold, whatever was sent;
beside them travels, a bit a row, which rows a rank reads.
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
VARIANTS = {WITHOUT: {"ngrams": ""}, ALL: {"lazy_tables": False}, TOUCHED: {"lazy_tables": True}}


class Counting(train_gpt.Comm):
    """Adds up what leaves this rank: [which rows are read, all else], in bytes."""

    def __init__(self, rank: int, ranks: int):
        super().__init__(rank, ranks)
        self.bytes = [0, 0]

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> Any:
        for other, x in enumerate(sent):
            if other != self.rank:
                self.bytes[x.is_floating_point()] += x.nbytes
        return super().exchange(sent, received)


def rows_read(trainer: train_gpt.Trainer, batch: list[np.ndarray]) -> list[int]:
    """Numbers of rows, in the tables' buckets, that a step's tokens read."""
    read = trainer.model.rows_read(torch.from_numpy(np.stack(batch)[:, :-1].astype(np.int32)))
    return [int(row) + 10 ** 9 * i for i, bucket in enumerate(trainer.optimizer.buckets) if isinstance(bucket, train_gpt.RowBucket)
            for place in bucket.params for row in read[place.param].unique() + bucket.first_row(place)]


def needed_bytes(trainer: train_gpt.Trainer, everyones: list[list[int]]) -> int:
    """What the first rank must send of a step, given the rows that each rank reads."""
    needed, first, anyones = 0, set(everyones[0]), set().union(*everyones)
    for i, bucket in enumerate(trainer.optimizer.buckets):
        if isinstance(bucket, train_gpt.RowBucket):
            owned = range(10 ** 9 * i, 10 ** 9 * i + len(bucket.param_shard))
            mine = sum(row in owned for row in anyones) * (len(everyones) - 1)
            others = sum(row // 10 ** 9 == i and row not in owned for row in first)
            needed += (mine + others) * bucket.rows[0].nbytes
    return needed


def measure(rank: int, ranks: int, flags: list[str], rounds: int) -> dict[str, tuple[list[float], list[list[float]]]]:
    """Of each variant the seconds of its turns, and of each turn the bytes [which rows, all else, needed of lazy tables], both
    by the step."""
    _, base = train_gpt.parse_config(flags, "laptop")
    shards = train_gpt.find_shards(base.train_files, base.train_shards)
    trainers = {name: train_gpt.Trainer(dataclasses.replace(base, **changes), Counting(rank, ranks), torch.device("cpu"), shards)
                for name, changes in VARIANTS.items()}
    turns = {name: next_steps(trainer, base.adam_every) for name, trainer in trainers.items()}
    sent, read = {name: [] for name in trainers}, []
    lazy, step = trainers[TOUCHED], trainers[TOUCHED].step

    def noted(plan: train_gpt.Plan, batch: list[np.ndarray]) -> list[Tensor]:
        read.append(batch)
        return step(plan, batch)
    lazy.step = noted

    def counted(name: str) -> None:
        trainers[name].comm.bytes = [0, 0]
        turns[name]()
        sent[name].append([count / base.adam_every for count in trainers[name].comm.bytes])

    times = take_turns({name: functools.partial(counted, name) for name in turns}, rounds, 1, meet=torch.distributed.barrier)
    steps = zip(*lazy.comm.all_json([rows_read(lazy, batch) for batch in read]))
    needed = [needed_bytes(lazy, everyones) for everyones in steps]
    for turn, counts in enumerate(sent[TOUCHED]):
        counts.append(statistics.mean(needed[turn * base.adam_every:(turn + 1) * base.adam_every]))
    return {name: ([t / base.adam_every for t in times[name]], sent[name][1:]) for name in trainers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=20)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--flags", default="", help="flags of train_gpt.py, in one string")
    args = parser.parse_args()
    found = on_ranks(args.ranks, measure, shlex.split(args.flags), args.rounds)
    which, rest = ({name: statistics.mean(x[kind] for x in sent) for name, (_, sent) in found.items()} for kind in (0, 1))
    rows = []
    for name, (times, sent) in found.items():
        travelled = rest[name] - rest[WITHOUT]
        needed = statistics.mean(x[2] for x in sent) if name == TOUCHED else travelled
        share = f"{(travelled + which[name]) / needed:.3f}" if needed else ""
        rows.append([name, f"{needed / 1e6:.2f}", f"{which[name] / 1e6:.3f}", share, spread([1000 * t for t in times], 0),
                     spread(ratios(times, found[ALL][0]))])
    print(machine())
    print(table([f"rank 0 of {args.ranks}", "MB needed", "MB, which rows", "sent / needed", "ms a step", f"ratio to all rows (n = {args.rounds})"],
                rows))


if __name__ == "__main__":
    run(main)
