"""What tables of n-grams cost: all their rows in each update, or only those that have a gradient.

    python bench/rows.py                          the laptop preset on two ranks
    python bench/rows.py --ranks 4 --rounds 2     bytes are those of as many ranks, times those of an overfull machine

Bytes are counted where they leave a rank, over the steps of one cycle of Adam; a model without the tables is subtracted. "needed"
are those of the rows' gradients that others own, and of new rows that others hold; beside them travels, a bit
a row, which rows a rank reads.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import shlex
import statistics
from typing import Any, Sequence

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


def measure(rank: int, ranks: int, flags: list[str], rounds: int) -> dict[str, tuple[list[float], list[list[float]]]]:
    """Of each variant the seconds of its turns, and of each turn the bytes [which rows, all else], both by the step."""
    _, base = train_gpt.parse_config(flags, "laptop")
    shards = train_gpt.find_shards(base.train_files, base.train_shards)
    trainers = {name: train_gpt.Trainer(dataclasses.replace(base, **changes), Counting(rank, ranks), torch.device("cpu"), shards)
                for name, changes in VARIANTS.items()}
    turns = {name: next_steps(trainer, base.adam_every) for name, trainer in trainers.items()}
    sent = {name: [] for name in trainers}

    def counted(name: str) -> None:
        trainers[name].comm.bytes = [0, 0]
        turns[name]()
        sent[name].append([count / base.adam_every for count in trainers[name].comm.bytes])

    times = take_turns({name: functools.partial(counted, name) for name in turns}, rounds, 1, meet=torch.distributed.barrier)
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
    for name, (times, _) in found.items():
        needed = rest[name] - rest[WITHOUT]
        share = f"{(needed + which[name]) / needed:.3f}" if needed else ""
        rows.append([name, f"{needed / 1e6:.2f}", f"{which[name] / 1e6:.3f}", share, spread([1000 * t for t in times], 0),
                     spread(ratios(times, found[ALL][0]))])
    print(machine())
    print(table([f"rank 0 of {args.ranks}", "MB needed", "MB, which rows", "sent / needed", "ms a step", f"ratio to all rows (n = {args.rounds})"],
                rows))


if __name__ == "__main__":
    run(main)
