"""The optimizer's step on many tensors: one flat bank against torch's Adam tensor by tensor, foreach and fused.

    python bench/optimizer_step.py

Three variants are ours. `rule`: the update alone, on a bank of all tensors. `step`: BankOptimizer.step on one rank,
with its checks. `adds + step`: also the hooks' pass that moves each gradient into the bank, which torch's optimizers do
without. All take turns, so none finds its tensors in the cache.
"""

from __future__ import annotations

import argparse
from typing import Callable

import torch

from common import (VALUES, bank_optimizer, machine, positive, ratios, run, spread, table, take_turns,
                    train_gpt)

PEERS = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
OURS = ("rule", "step", "adds + step")
LR = 1e-3


class Variants:
    """All ways to step, on equal tensors and gradients: name -> function, and what goes before it untimed."""

    def __init__(self, count: int, numel: int):
        draw = torch.Generator().manual_seed(0)
        values, grads = (torch.randn(count, numel, generator=draw) for _ in range(2))
        self.params: dict[str, list[torch.nn.Parameter]] = {}
        self.steps: dict[str, Callable] = {}
        self.prepare: dict[str, Callable] = {}
        for name, how in PEERS.items():
            self.params[name] = [torch.nn.Parameter(x.clone()) for x in values]
            for param, grad in zip(self.params[name], grads):
                param.grad = grad.clone()
            # without decay AdamW is Adam
            self.steps[name] = torch.optim.AdamW(self.params[name], lr=LR, weight_decay=0.0, **how).step
        for name in OURS:
            self.add_ours(name, torch.nn.ParameterList(values.clone().unbind()), grads.clone().unbind())

    def add_ours(self, name: str, model: torch.nn.ParameterList, grads: tuple[torch.Tensor, ...]) -> None:
        self.params[name] = list(model)
        optimizer = bank_optimizer(model, train_gpt.Comm(), LR, bank_mb=float("inf"))
        bank, = optimizer.banks

        @torch.no_grad()  # as in a hook
        def add() -> None:
            optimizer.arm(0)
            for slot in bank.slots:
                slot.param.grad = grads[int(slot.name)]
                bank.add(slot, 1.0)

        def step() -> None:
            optimizer.step(VALUES)

        @torch.no_grad()
        def rule() -> None:
            bank.updates += 1
            bank.rule.function(*bank.rule.arguments(bank, VALUES))

        def add_and_step() -> None:
            add()
            step()

        self.steps[name] = {"rule": rule, "step": step, "adds + step": add_and_step}[name]
        if name == "step":
            self.prepare[name] = add
        elif name == "rule":
            add()

    def check_equal(self) -> None:
        for name, params in self.params.items():
            furthest = max(float((a - b).detach().abs().max()) for a, b in zip(params, self.params["loop"]))
            if not furthest <= 1e-5:
                raise train_gpt.RunError(f"{name} ends {furthest:.1e} from torch's loop after the same steps; one "
                                         "of them is wrong, and the times mean nothing")


def shape(text: str) -> tuple[int, int]:
    count, _, numel = text.partition("x")
    if not (count.isdecimal() and numel.isdecimal() and int(count) and int(numel)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write tensors and elements of each, like 200x256")
    return int(count), int(numel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--shapes", type=shape, nargs="+", default=[(200, 256), (1000, 256), (50, 100_000)],
                        metavar="NxELEMENTS")
    parser.add_argument("--threads", nargs="+", type=positive, default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--rounds", type=positive, default=60)
    args = parser.parse_args()
    rows = []
    for threads in args.threads:
        torch.set_num_threads(threads)
        for count, numel in args.shapes:
            variants = Variants(count, numel)
            times = take_turns(variants.steps, args.rounds, warm=3, prepare=variants.prepare)
            variants.check_equal()
            for name in OURS:
                ms = [1e3 * t for t in times[name]]
                rows.append([f"{count} x {numel:,}", threads, name, args.rounds, spread(ms, 3),
                             *(spread(ratios(times[peer], times[name])) for peer in PEERS)])
    print(f"{machine()}\n")
    print(table(["tensors", "threads", "ours", "n", "ms: median (quartiles)",
                 *(f"times faster than {peer}" for peer in PEERS)], rows))


if __name__ == "__main__":
    run(main)
