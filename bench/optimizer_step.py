"""Time the optimizer step on many tensors: one flat bucket, and torch's Adam as a loop, foreach
and fused.

    python bench/optimizer_step.py

Our four variants:
    rule          the update alone, on one bucket of all tensors
    step          gpt_speedrun's Optimizer.step on one rank, with its checks
    hooks + step  also the hooks' pass that adds each gradient into its slot; torch's optimizers do not need it
    clip + step   with clipping by the global norm; its peers clip by torch's clip_grad_norm_
All variants are interleaved, so that none finds its tensors in the cache.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from typing import Callable

import torch

from common import (
    EPS,
    PLAN,
    adam_optimizer,
    machine,
    positive,
    ratios,
    run,
    spread,
    table,
    take_turns,
    train_gpt,
)

PEERS = {"loop": dict(foreach=False), "foreach": dict(foreach=True), "fused": dict(fused=True)}
OURS = ("rule", "step", "hooks + step", "clip + step")
CLIP = ", clipping"  # suffix of the names of peers that clip
LR = 1e-3
CLIP_NORM = 1.0


class Variants:
    """All variants on equal tensors and gradients. steps: name -> step; prepare: name -> untimed
    call before it."""

    def __init__(self, count: int, numel: int):
        draw = torch.Generator().manual_seed(0)
        values, grads = (torch.randn(count, numel, generator=draw) for _ in range(2))
        self.params: dict[str, list[torch.nn.Parameter]] = {}
        self.steps: dict[str, Callable] = {}
        self.prepare: dict[str, Callable] = {}
        for (name, how), clip in itertools.product(PEERS.items(), ("", CLIP)):
            self.params[name + clip] = params = [torch.nn.Parameter(x.clone()) for x in values]
            for param, grad in zip(params, grads):
                param.grad = grad.clone()
            # AdamW without weight decay is Adam
            optimizer = torch.optim.AdamW(params, lr=LR, eps=EPS, weight_decay=0.0, **how)
            self.steps[name + clip] = (
                functools.partial(self.clip_and_step, params, optimizer) if clip else optimizer.step
            )
        for name in OURS:
            self.add_ours(
                name, torch.nn.ParameterList(values.clone().unbind()), grads.clone().unbind()
            )

    @staticmethod
    def clip_and_step(params: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        torch.nn.utils.clip_grad_norm_(params, CLIP_NORM)
        optimizer.step()

    def add_ours(
        self, name: str, model: torch.nn.ParameterList, grads: tuple[torch.Tensor, ...]
    ) -> None:
        self.params[name] = list(model)
        clip_norm = CLIP_NORM if name == "clip + step" else 0.0
        optimizer = adam_optimizer(
            model, train_gpt.Comm(), LR, bucket_mb=float("inf"), clip_norm=clip_norm
        )
        (bucket,) = optimizer.buckets

        @torch.no_grad()  # as in a hook
        def add() -> None:
            optimizer.prepare_for_backward(0)
            for slot in bucket.slots:
                slot.param.grad = grads[int(slot.name)]
                bucket.add_grad(slot, 1.0)

        @torch.no_grad()
        def rule() -> None:
            bucket.updates += 1
            bucket.rule.update(
                bucket.param_shard,
                bucket.grad_shard,
                bucket.state,
                bucket.rule.hyper(PLAN, bucket.updates),
            )

        def add_and_step() -> None:
            add()
            optimizer.step()

        self.steps[name] = {"rule": rule, "hooks + step": add_and_step}.get(name, optimizer.step)
        if name in ("step", "clip + step"):
            self.prepare[name] = add
        elif name == "rule":
            add()

    def check_equal(self) -> None:
        for name, params in self.params.items():
            other = "loop" + CLIP * (name == "clip + step" or name.endswith(CLIP))
            furthest = max(
                float((a - b).detach().abs().max()) for a, b in zip(params, self.params[other])
            )
            if not furthest <= 1e-5:
                raise train_gpt.RunError(
                    f"{name} differs from torch's loop by {furthest:.1e} after the same steps; one "
                    "of them is wrong, so the times are invalid"
                )


def shape(text: str) -> tuple[int, int]:
    count, _, numel = text.partition("x")
    if not (count.isdecimal() and numel.isdecimal() and int(count) and int(numel)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a shape; write TENSORSxELEMENTS, such as 200x256"
        )
    return int(count), int(numel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--shapes",
        type=shape,
        nargs="+",
        default=[(200, 256), (1000, 256), (50, 100_000)],
        metavar="NxELEMENTS",
    )
    parser.add_argument(
        "--threads", nargs="+", type=positive, default=sorted({1, torch.get_num_threads()})
    )
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
                rows.append(
                    [
                        f"{count} x {numel:,}",
                        threads,
                        name,
                        args.rounds,
                        spread(ms, 3),
                        *(
                            spread(
                                ratios(times[peer + CLIP * (name == "clip + step")], times[name])
                            )
                            for peer in PEERS
                        ),
                    ]
                )
    print(f"{machine()}\n")
    print(
        table(
            [
                "tensors",
                "threads",
                "ours",
                "n",
                "ms: median (quartiles)",
                *(f"× {peer}'s speed" for peer in PEERS),
            ],
            rows,
        )
    )


if __name__ == "__main__":
    run(main)
