"""Compare whole training steps: buckets, torch's DDP, DDP with ZeroRedundancyOptimizer, and FSDP2;
Adam for all.

    .venv/bin/python bench/whole_step.py

Each peer runs with its fastest setting and with its default. All variants run in the same
processes, interleaved, so that ratios hold on a busy machine. Memory is measured in a new process
per variant: the peak resident set minus the resident set before the model was built.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from common import (
    EPS,
    Transformer,
    add_model_flags,
    adam_optimizer,
    gpt_speedrun,
    machine,
    on_ranks,
    positive,
    ratios,
    run,
    some_text,
    spread,
    table,
    take_turns,
    train_gpt,
)

LR = 1e-3
ADAM = dict(lr=LR, betas=(0.9, 0.999), eps=EPS)


def buckets(
    model: torch.nn.Module, best: bool, rank: int, ranks: int, args: argparse.Namespace
) -> tuple[torch.nn.Module, Any]:
    """best: point-to-point messages instead of gloo's own reduce-scatter and all-gather."""
    comm = train_gpt.Comm(rank, ranks)
    comm.point_to_point = best
    return model, adam_optimizer(model, comm, LR, args.bucket_mb)


def ddp(model: torch.nn.Module, best: bool, *_: Any) -> tuple[torch.nn.Module, Any]:
    return (
        DistributedDataParallel(model, gradient_as_bucket_view=best),
        torch.optim.Adam(model.parameters(), fused=True, **ADAM),
    )


def zero(model: torch.nn.Module, best: bool, *_: Any) -> tuple[torch.nn.Module, Any]:
    return (
        DistributedDataParallel(model, gradient_as_bucket_view=True),
        ZeroRedundancyOptimizer(
            model.parameters(), torch.optim.Adam, fused=True, parameters_as_bucket_view=best, **ADAM
        ),
    )


def fsdp(
    model: torch.nn.Module, best: bool, rank: int, ranks: int, *_: Any
) -> tuple[torch.nn.Module, Any]:
    mesh = init_device_mesh("cpu", (ranks,))
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=not best)
    return model, torch.optim.Adam(model.parameters(), fused=True, **ADAM)


# name: (function that makes model and optimizer, whether with the setting that is fastest here)
VARIANTS: dict[str, tuple[Callable, bool]] = {
    "buckets": (buckets, True),
    "buckets, gloo's own": (buckets, False),
    "DDP, gradients as views": (ddp, True),
    "DDP": (ddp, False),
    "DDP + ZeRO, parameters as views": (zero, True),
    "DDP + ZeRO": (zero, False),
    "FSDP2, not resharded": (fsdp, True),
    "FSDP2": (fsdp, False),
}


class Variant:
    def __init__(self, name: str, rank: int, ranks: int, args: argparse.Namespace):
        torch.manual_seed(0)
        self.args = args
        self.rank = rank
        self.losses = []
        make, best = VARIANTS[name]
        model = Transformer(args.layers, args.dim, args.vocab, args.tokens)
        self.model, self.optimizer = make(model, best, rank, ranks, args)

    def step(self) -> None:
        loss = self.model(
            *some_text(
                self.args.vocab, self.args.batch, self.args.tokens, self.rank, len(self.losses)
            )
        )
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def state_bytes(self) -> int:
        """Count the bytes of optimizer state on this rank."""
        if isinstance(self.optimizer, gpt_speedrun.Optimizer):
            state = [bucket.state for bucket in self.optimizer.buckets]
        else:
            # ZeRO wraps an optimizer
            state = getattr(self.optimizer, "optim", self.optimizer).state.values()
        tensors = [
            x.to_local() if hasattr(x, "to_local") else x
            for values in state
            for x in values.values()
        ]
        return sum(x.numel() * x.element_size() for x in tensors)


def timings(rank: int, ranks: int, args: argparse.Namespace) -> tuple[dict, dict, dict]:
    """Measure by variant -> (seconds of each step, losses of rank 0, bytes of optimizer state on
    rank 0)."""
    variants = {name: Variant(name, rank, ranks, args) for name in VARIANTS}
    times = take_turns(
        {name: variant.step for name, variant in variants.items()},
        args.rounds,
        args.warm,
        barrier=dist.barrier,
    )
    return (
        times,
        {name: variant.losses for name, variant in variants.items()},
        {name: variant.state_bytes() for name, variant in variants.items()},
    )


def resident_mib(which: str) -> float:
    """Read VmRSS (now) or VmHWM (peak) of this process; getrusage has the parent's peak, too."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith(which))


def peak_memory(rank: int, ranks: int, args: argparse.Namespace, name: str) -> float:
    """Measure the peak resident set of four steps, in MiB above that before the model was built."""
    dist.barrier()
    before = resident_mib("VmRSS")
    variant = Variant(name, rank, ranks, args)
    for _ in range(4):
        variant.step()
    return resident_mib("VmHWM") - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, default=2)
    add_model_flags(parser, 12, 1, 8.0, "MiB of parameters per bucket")
    parser.add_argument("--rounds", type=positive, default=40)
    parser.add_argument("--warm", type=int, default=4, help="untimed rounds before")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, default=True, help="also measure memory"
    )
    args = parser.parse_args()
    if not sys.platform.startswith("linux"):
        raise train_gpt.RunError(
            f"memory is read from /proc, which {sys.platform} does not have; run it on Linux"
        )
    times, losses, state = on_ranks(args.ranks, timings, args)
    memory = {
        name: on_ranks(args.ranks, peak_memory, args, name) for name in VARIANTS if args.memory
    }
    parameters = sum(
        p.numel() for p in Transformer(args.layers, args.dim, args.vocab, args.tokens).parameters()
    )
    rows = [
        [
            name,
            args.rounds,
            spread([1e3 * t for t in times[name]], 1),
            spread(ratios(times[name], times["buckets"]), 3),
            f"{memory[name]:.0f}" if args.memory else "",
            f"{state[name]:,}",
            f"{losses[name][0]:.5f}",
            f"{losses[name][-1]:.5f}",
        ]
        for name in VARIANTS
    ]
    print(
        f"{machine()}; {args.ranks} ranks on gloo, {parameters / 1e6:.1f} M parameters, "
        f"{args.batch} x {args.tokens} tokens per rank\n"
    )
    print(
        table(
            [
                "variant",
                "n",
                "ms a step",
                "times the buckets' step",
                "peak MiB per rank",
                "bytes of optimizer state per rank",
                "first loss",
                "last loss",
            ],
            rows,
        )
    )
    for name, mine in losses.items():
        if not max(abs(a - b) for a, b in zip(mine, losses["buckets"])) <= 0.02:
            raise train_gpt.RunError(
                f"the last loss is {mine[-1]:.4f} with {name} and {losses['buckets'][-1]:.4f} with "
                "buckets; one of them is wrong, so the times are invalid"
            )


if __name__ == "__main__":
    run(main)
