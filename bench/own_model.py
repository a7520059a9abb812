"""A model of your own: a GRU on this project's optimizer, beside DDP with torch.optim.Muon and AdamW, in turn.

    python bench/own_model.py
"""

from __future__ import annotations

import argparse
import time
from typing import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import machine, on_ranks, positive, run, some_text, table, train_gpt


class GRU(nn.Module):
    def __init__(self, vocab: int, dim: int):
        super().__init__()
        self.embed, self.gru, self.up = nn.Embedding(vocab, dim), nn.GRU(dim, dim, batch_first=True), nn.Linear(dim, dim)
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """inputs, targets [B, T] -> the mean cross entropy."""
        x = self.embed(inputs)
        x = x + self.up(self.gru(x)[0])
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def ours(model: nn.Module) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    return model, [train_gpt.make_optimizer(model, muon_lr=MUON_LR, adam_lr=ADAM_LR)]


def theirs(model: nn.Module) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    inside = [p for name, p in model.named_parameters() if p.dim() == 2 and not name.startswith(("embed", "head"))]
    rest = [p for p in model.parameters() if all(p is not other for other in inside)]
    return DistributedDataParallel(model), [torch.optim.Muon(inside, lr=MUON_LR, weight_decay=0.1),
                                            torch.optim.AdamW(rest, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0)]


MUON_LR, ADAM_LR = 0.02, 0.003


def race(rank: int, ranks: int, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """(loss of the last step, ms a step) of both, which take turns step by step on the same batches."""
    sides: dict[str, tuple] = {}
    for name, build in (("ours", ours), ("DDP, Muon and AdamW", theirs)):
        torch.manual_seed(0)
        sides[name] = build(GRU(args.vocab, args.dim))
    losses, seconds = dict.fromkeys(sides, 0.0), dict.fromkeys(sides, 0.0)
    for step in range(args.steps):
        for name in list(sides)[::1 if step % 2 else -1]:
            model, optimizers = sides[name]
            began = time.perf_counter()
            loss = model(*some_text(args.vocab, args.batch, args.tokens, rank, step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses[name], seconds[name] = loss.item(), seconds[name] + time.perf_counter() - began
    return {name: (losses[name], 1e3 * seconds[name] / args.steps) for name in sides}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name, default in (("ranks", 2), ("vocab", 256), ("dim", 128), ("batch", 16), ("tokens", 64), ("steps", 100)):
        parser.add_argument(f"--{name}", type=positive, default=default)
    args = parser.parse_args()
    found = on_ranks(args.ranks, race, args)
    print(f"{machine()}; {args.ranks} ranks, {args.steps} steps\n")
    print(table(["optimizer", "last loss", "ms a step"], [[n, f"{loss:.4f}", f"{ms:.1f}"] for n, (loss, ms) in found.items()]))


if __name__ == "__main__":
    run(main)
