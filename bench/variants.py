"""Compare settings of gradient sync: sync, bucket sizes, update order, overlapping all-gathers, world-size invariance.

    python bench/variants.py                      the laptop preset on two ranks
    python bench/variants.py --rounds 3 --flags "--model_dim 64 --num_heads 1"

Each variant trains its own model. All run in the same processes, interleaved. All must end with the same bytes, except
world_size_invariant, which sums in another order.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex

import torch

from common import machine, next_steps, on_ranks, positive, ratios, run, spread, table, take_turns, train_gpt

VARIANTS = {
    "as the preset has it": {},
    "sync=step": {"sync": "step"},
    "a bucket per parameter": {"bucket_mb": 0.0},
    "buckets of 0.25 MiB": {"bucket_mb": 0.25},
    "buckets of 1 MiB": {"bucket_mb": 1.0},
    "buckets of 4 MiB": {"bucket_mb": 4.0},
    "update_order=forward": {"update_order": "forward"},
    "gathers overlap": {"overlap_param_gather": True},
    "gathers overlap, update_order=forward": {"overlap_param_gather": True, "update_order": "forward"},
    "gradients not checked": {"check_grads": False},
    "world_size_invariant": {"world_size_invariant": True},
}
STEPS_A_TURN = 2  # so that each round has an Adam update, also with adam_every 2


def measure(rank: int, ranks: int, flags: list[str], rounds: int) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Measure each variant's seconds per round and its final state hash."""
    _, base = train_gpt.parse_config(flags, "laptop")
    comm = train_gpt.Comm(rank, ranks)
    shards = train_gpt.find_shards(base.train_files, base.train_shards)
    workers = {name: train_gpt.Worker(dataclasses.replace(base, **changes), comm, torch.device("cpu"), shards)
                for name, changes in VARIANTS.items()}
    turns = {name: next_steps(worker, STEPS_A_TURN) for name, worker in workers.items()}
    times = take_turns(turns, rounds, 1, barrier=torch.distributed.barrier)
    return times, {name: worker.optimizer.state_hash() for name, worker in workers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=positive, default=15)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--flags", default="", help="flags of train_gpt.py, as one string")
    args = parser.parse_args()
    times, hashes = on_ranks(args.ranks, measure, shlex.split(args.flags), args.rounds)
    base = next(iter(times))
    print(machine())
    print(table(["variant", "ms a step", f"ratio to the preset (n = {args.rounds})"],
                [[name, spread([1000 * t / STEPS_A_TURN for t in seconds], 0), spread(ratios(seconds, times[base]))]
                 for name, seconds in times.items()]))
    different = [name for name in hashes if hashes[name] != hashes[base] and name != "world_size_invariant"]
    if different:
        raise train_gpt.RunError(f"{', '.join(different)}: the final state differs from the preset's; the times are invalid")


if __name__ == "__main__":
    run(main)
