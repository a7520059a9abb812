"""Measure overlap on a slow link between two simulated hosts: launch in backward, launch in the
step, and DDP.

    sudo python bench/slow_link.py

Each host is a network namespace with one rank. A veth pair connects them, slowed by tc's token
bucket filter. Both are removed at the end, also after an error or Ctrl-C. Two lower bounds:
`compute alone` is a step whose collectives do nothing, `communication alone` is a step's
collectives without compute. Each rank is bound to one core, which gloo's threads share with
backward. The bytes sent are the link's own count.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import subprocess
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from common import (
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
    table_line,
    take_turns,
    train_gpt,
)

LINK = "wire"  # the interface's name within each host
ADDRESSES = ("10.77.0.1", "10.77.0.2")
LR = 1e-3
FLOORS = ("compute alone", "communication alone")
CLONE_NEWNET = 0x40000000  # os.CLONE_NEWNET and os.setns exist since Python 3.12


# the hosts


def command(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise train_gpt.RunError(
            f"`{' '.join(words)}` failed: {done.stderr.strip() or done.returncode}"
        )


def why_not() -> str:
    """Return why namespaces cannot be created here, or nothing."""
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"{tool} was not found; install iproute2"
    if os.geteuid() != 0:
        return "network namespaces need root; run it with sudo"
    name = f"probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], capture_output=True)
    if made.returncode:
        return (
            f"network namespaces are not allowed here ({made.stderr.strip()}); run it outside of a"
            " container"
        )
    return ""


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Create two namespaces with a link between them; yield their names."""
    hosts = [f"bench-{os.getpid()}-{side}" for side in "ab"]
    try:
        for host in hosts:
            command("ip", "netns", "add", host)
        command(
            "ip",
            "link",
            "add",
            LINK,
            "netns",
            hosts[0],
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            hosts[1],
        )
        for host, address in zip(hosts, ADDRESSES):
            command("ip", "-n", host, "addr", "add", f"{address}/24", "dev", LINK)
            command("ip", "-n", host, "link", "set", LINK, "up")
            command("ip", "-n", host, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:  # removes the link too
            subprocess.run(["ip", "netns", "del", host], capture_output=True)


def slow_down(hosts: list[str], mbit: int) -> None:
    """Limit the link in both directions."""
    for host in hosts:
        command(
            "tc",
            "-n",
            host,
            "qdisc",
            "replace",
            "dev",
            LINK,
            "root",
            "tbf",
            "rate",
            f"{mbit}mbit",
            "burst",
            "256kb",
            "latency",
            "100ms",
        )


def enter(hosts: list[str], rank: int) -> None:
    """Move this thread and the threads that it will start (gloo's too) into a namespace and onto
    one core."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    with open(f"/run/netns/{hosts[rank]}") as host:
        if ctypes.CDLL(None, use_errno=True).setns(host.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {hosts[rank]}")
    os.environ["GLOO_SOCKET_IFNAME"] = LINK


# a rank


class NoComm(train_gpt.Comm):
    """Sends nothing, so that a step is compute alone."""

    def reduce_scatter(
        self, shard: torch.Tensor, full: torch.Tensor, buffer: torch.Tensor | None
    ) -> Any:
        return train_gpt.HandleGroup()

    def all_gather(self, full: torch.Tensor, shard: torch.Tensor) -> Any:
        return train_gpt.HandleGroup()


class Rank:
    """All variants in one process. steps: name -> one step."""

    def __init__(self, rank: int, args: argparse.Namespace):
        self.args = args
        self.rank = rank
        self.losses = {}
        comm = train_gpt.Comm(rank, 2)
        overlapping = self.buckets(comm, overlap_param_gather=True, update_order="forward")
        self.finish = overlapping[1].finish_all_gathers
        trained = {
            "sync=hook": self.buckets(comm),
            "sync=hook, gathers overlap": overlapping,
            "sync=step": self.buckets(comm, sync="step"),
            "DDP": self.ddp(),
            FLOORS[0]: self.buckets(NoComm(rank, 2)),
        }
        self.steps = {name: self.training(name, *pair) for name, pair in trained.items()}
        self.steps[FLOORS[1]] = self.communication(comm)

    def model(self) -> Transformer:
        torch.manual_seed(0)
        return Transformer(self.args.layers, self.args.dim, self.args.vocab, self.args.tokens)

    def buckets(
        self, comm: train_gpt.Comm, **settings: Any
    ) -> tuple[Transformer, gpt_speedrun.Optimizer]:
        model = self.model()
        return model, adam_optimizer(model, comm, LR, self.args.bucket_mb, **settings)

    def ddp(self) -> tuple[DistributedDataParallel, torch.optim.Adam]:
        model = DistributedDataParallel(
            self.model(), gradient_as_bucket_view=True, bucket_cap_mb=self.args.bucket_mb
        )
        return model, torch.optim.Adam(model.parameters(), lr=LR, fused=True)

    def training(
        self, name: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer
    ) -> Callable[[], None]:
        losses = self.losses[name] = []

        def step() -> None:
            loss = model(
                *some_text(
                    self.args.vocab, self.args.batch, self.args.tokens, self.rank, len(losses)
                )
            )
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()

        return step

    def communication(self, comm: train_gpt.Comm) -> Callable[[], None]:
        _, optimizer = self.buckets(comm)

        def step() -> None:
            buckets = optimizer.buckets
            for handles in (
                [
                    comm.reduce_scatter(
                        bucket.grad_shard.view(-1), bucket.grad_data, bucket.receive_buffer
                    )
                    for bucket in buckets
                ],
                [
                    comm.all_gather(bucket.param_data, bucket.param_shard.view(-1))
                    for bucket in buckets
                ],
            ):
                for handle in handles:
                    handle.wait()

        return step

    def time(self) -> dict[str, Any]:
        """Measure seconds per step by variant and round, and the bytes of a step.

        A round runs several steps of a variant and times all but the first: an all-gather that
        overlaps ends in the next step, so each timed step includes one.
        """

        def first(name: str) -> None:
            self.finish()
            dist.barrier()
            self.steps[name]()

        def further(name: str) -> None:
            for _ in range(self.args.steps):
                self.steps[name]()

        times = take_turns(
            {name: partial(further, name) for name in self.steps},
            self.args.rounds,
            warm=1,
            prepare={name: partial(first, name) for name in self.steps},
        )
        sent = {}
        for name in self.steps:
            self.finish()
            dist.barrier()
            before = sent_bytes()
            self.steps[name]()
            self.finish()
            sent[name] = sent_bytes() - before
        a_step = {name: [t / self.args.steps for t in row] for name, row in times.items()}
        return {"times": a_step, "sent": sent, "losses": self.losses}


def sent_bytes() -> int:
    counts = next(
        line
        for line in Path("/proc/net/dev").read_text().splitlines()
        if line.strip().startswith(f"{LINK}:")
    )
    return int(counts.split()[9])


def measure(rank: int, ranks: int, args: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    return Rank(rank, args).time()


def rows_of(mbit: int, result: dict[str, Any]) -> Iterator[list[Any]]:
    times = result["times"]
    floor = [max(floors) for floors in zip(*(times[name] for name in FLOORS))]
    for name, mine in times.items():
        is_floor = name in FLOORS
        yield [
            mbit,
            name,
            len(mine),
            spread([1e3 * t for t in mine], 0),
            f"{result['sent'][name] / 1e6:.1f}",
            "" if is_floor else spread(ratios(mine, floor)),
            "" if is_floor else spread(ratios(mine, times["DDP"])),
        ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--mbit",
        type=positive,
        nargs="+",
        default=[1000, 500, 200],
        help="rate of the link in each direction",
    )
    add_model_flags(parser, 6, 16, 0.5, "MiB of parameters per bucket; also of DDP's buckets")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--steps", type=positive, default=3, help="timed steps per round")
    args = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return
    print(f"{machine()}; {args.batch} x {args.tokens} tokens a rank\n")
    head = [
        "Mbit/s",
        "variant",
        "n",
        "ms a step",
        "MB sent a step",
        "times the lower bound",
        "times DDP",
    ]
    print(table(head, []), flush=True)
    with two_hosts() as hosts:
        for mbit in args.mbit:
            slow_down(hosts, mbit)
            result = on_ranks(2, measure, args, address=ADDRESSES[0], before=partial(enter, hosts))
            for row in rows_of(mbit, result):
                print(table_line(row), flush=True)
            lasts = {
                name: losses[-1] for name, losses in result["losses"].items() if name not in FLOORS
            }
            if max(lasts.values()) - min(lasts.values()) > 0.02:
                raise train_gpt.RunError(
                    f"the variants end at different losses: {lasts}; their times are invalid"
                )


if __name__ == "__main__":
    run(main)
