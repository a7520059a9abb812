"""Shared by the benchmarks: ranks on this machine, interleaved timings, tables, and a small
Transformer."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import statistics
import sys
import tempfile
import time
import warnings
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any, Callable, Iterable, Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, spawn
from torch.testing._internal.distributed.fake_pg import FakeStore

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import frontier  # noqa: E402, F401
import gpt_speedrun  # noqa: E402
import train_gpt  # noqa: E402

# flags and tables


def positive(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_model_flags(
    parser: argparse.ArgumentParser, layers: int, batch: int, bucket_mb: float, help_bucket: str
) -> None:
    """Add flags for the Transformer, its data and its buckets. The arguments are defaults that
    differ by benchmark."""
    parser.add_argument("--layers", type=positive, default=layers)
    parser.add_argument("--dim", type=positive, default=256)
    parser.add_argument("--vocab", type=positive, default=1024)
    parser.add_argument("--batch", type=positive, default=batch, help="sequences per rank and step")
    parser.add_argument("--tokens", type=positive, default=256, help="tokens per sequence")
    parser.add_argument("--bucket_mb", type=float, default=bucket_mb, help=help_bucket)


def machine() -> str:
    """Describe the machine and its load in one line."""
    load = os.getloadavg()[0]
    return (
        f"{train_gpt.cpu_name()}, {train_gpt.count_cores()} cores, torch {torch.__version__}, "
        f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC, load {load:.1f} when this was printed"
    )


def table_line(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Format a Markdown table."""
    return "\n".join(table_line(cells) for cells in (head, ["---"] * len(head), *rows))


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Format values as `median (first quartile–third quartile)`."""
    if len(values) < 2:
        return f"{values[0]:.{digits}f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}–{high:.{digits}f})"


def ratios(times: Sequence[float], base: Sequence[float]) -> list[float]:
    """Divide interleaved timings round by round: noise of the machine then affects both sides."""
    return [a / b for a, b in zip(times, base, strict=True)]


# timings


def nothing(*_: Any) -> None:
    pass


def take_turns(
    variants: dict[str, Callable[[], Any]],
    rounds: int,
    warm: int,
    barrier: Callable[[], Any] = nothing,
) -> dict[str, list[float]]:
    """Time the variants -> {name: seconds per round}. A round calls each variant once, in a random
    order.

    All ranks use the same order. warm: number of untimed rounds. barrier: called before and after
    each variant, so that the slowest rank counts.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    order = random.Random(0)
    for i in range(warm + rounds):
        for name in order.sample(list(variants), len(variants)):
            barrier()
            start = time.perf_counter()
            variants[name]()
            barrier()
            if i >= warm:
                times[name].append(time.perf_counter() - start)
    return times


# ranks


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def _rank_main(
    rank: int, ranks: int, port: int, result: Path, function: Callable, arguments: tuple
) -> None:
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own code
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the parent may have a handler
    torch.set_num_threads(max(1, train_gpt.count_cores() // ranks))
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=60))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    answer = function(rank, ranks, *arguments)
    if rank == 0:
        result.write_text(json.dumps(answer))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # skips destroying the group, because gloo may abort there


def on_ranks(ranks: int, function: Callable, *arguments: Any) -> Any:
    """Run function(rank, ranks, *arguments) in new processes of one gloo group. Return rank 0's
    result (through JSON).

    The processes share the cores. Raise RunError if one fails, and print its message to stderr.
    """
    global starting
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        starting = True
        processes = spawn(
            _rank_main,
            (ranks, free_port(), result, function, arguments),
            ranks,
            join=False,
            daemon=True,
        )
        starting = False
        try:
            if stopped:
                raise KeyboardInterrupt
            while not processes.join():
                pass
        except ProcessException as error:
            print(error, file=sys.stderr)
            raise train_gpt.RunError(
                f"{function.__name__}: rank {error.error_index} failed; its error is above"
            ) from None
        finally:
            for process in processes.processes:
                process.kill()
        return json.loads(result.read_text())


class FakeComm(train_gpt.Comm):
    """Rank 0 of torch's `fake` process group, whose collectives send nothing. Every rank "sends"
    this rank's JSON."""

    def __init__(self, ranks: int, device: torch.device | str = "cpu"):
        dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        super().__init__(0, ranks, device)

    def all_gather_json(self, mine: Any) -> list[Any]:
        return [json.loads(json.dumps(mine))] * self.ranks

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> train_gpt.HandleGroup:
        """Simulate messages: the other ranks read this rank's rows, with gradients of 0."""
        for mine, theirs in zip(sent, received):
            theirs.copy_(mine) if mine.shape == theirs.shape else theirs.zero_()
        return train_gpt.HandleGroup()


stopped: list[int] = []  # signals that asked this script to stop
starting = False  # processes: Python drops an exception that is raised in a hook of fork


def _stop(number: int, _: Any) -> None:
    stopped.append(number)
    if not starting:
        raise KeyboardInterrupt


def run(main: Callable[[], None]) -> None:
    """Run a script's main. Print errors that the user can fix in one line; SIGTERM is answered as
    Ctrl-C is."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    try:
        main()
    except (train_gpt.RunError, gpt_speedrun.RunError, KeyboardInterrupt) as error:
        sys.exit(f"error: {str(error) or 'interrupted'}")


# a Transformer


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(dim), nn.LayerNorm(dim)])
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> the same."""
        qkv = self.qkv(self.norms[0](x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    """A plain GPT whose modules every peer can wrap. forward returns the mean cross entropy."""

    def __init__(self, layers: int, dim: int, vocab_size: int, tokens: int):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim)
        self.position = nn.Embedding(tokens, dim)
        self.blocks = nn.ModuleList(Block(dim, max(1, dim // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab_size, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets [B, T] -> the mean cross entropy."""
        x = self.embed(inputs) + self.position(torch.arange(inputs.size(1)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def adam_optimizer(
    model: nn.Module, comm: train_gpt.Comm, lr: float, bucket_mb: float, **settings: Any
) -> gpt_speedrun.Optimizer:
    """Build our optimizer with Adam for every parameter. settings: fields of SyncSettings."""
    rule = gpt_speedrun.Adam(lr, 0.9, 0.999, EPS, every=1)
    specs = [gpt_speedrun.ParamSpec(name, param, rule) for name, param in model.named_parameters()]
    buckets = gpt_speedrun.fill_buckets(specs, bucket_mb * 2**20, comm.rank, comm.ranks)
    return gpt_speedrun.Optimizer(buckets, comm, gpt_speedrun.SyncSettings(**settings), model)


EPS = 1e-16  # negligible, because torch's Adam adds eps elsewhere
PLAN = gpt_speedrun.Plan()  # constant learning rate


def some_text(
    vocab_size: int, batch: int, tokens: int, rank: int, step: int
) -> tuple[Tensor, Tensor]:
    """Draw inputs and targets [batch, tokens] that a model can learn: three tokens can follow each
    token."""
    draw = torch.Generator().manual_seed(1000 * step + rank)
    steps = torch.randint(1, 4, (batch, tokens + 1), generator=draw)
    x = steps.cumsum(1) % vocab_size
    return x[:, :-1], x[:, 1:]
