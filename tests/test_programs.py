"""Random small models, trained in random ways by make_optimizer at 1 to 3 ranks, compared with
plain torch in one process.

A program is drawn from its number: a model (tied, frozen, unused, sparse, reused, nested parameters
of 0 to 5 dimensions, a running mean, a resized buffer), how it is trained (accumulation, clipping,
schedulers, closures, edited groups, dropped batches, reads and writes after step), settings of the
mechanism, and a save and a load at another number of ranks. Everything is float64, so a difference
is a fault and no rounding.
"""

import contextlib
import copy
import dataclasses
import functools
import random
from unittest import mock

import pytest
import torch
from torch import nn

import gpt_speedrun
from test_sync import Hostile

WIDTH = 4


@dataclasses.dataclass(frozen=True)
class Momentum:
    """What torch.optim.SGD computes: linear in gradients, so it shows every wrong factor, and with
    a state."""

    lr: float = 0.05
    momentum: float = 0.8
    weight_decay: float = 0.0
    every: int = 1
    warm: bool = False  # a learning rate that depends on the number of the parameter's updates

    def unit(self, spec):
        return ()

    def init_state(self, shard):
        return {"m": torch.zeros_like(shard)}

    def hyper(self, plan, t):
        return {
            "lr": self.lr * warmth(t, self.warm),
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
        }

    @staticmethod
    def update(param, grad, state, hyper):
        state["m"].mul_(hyper["momentum"]).add_(grad + hyper["weight_decay"] * param)
        param.sub_(hyper["lr"] * state["m"])


def warmth(t, warm):
    return 1 - 0.5**t if warm else 1.0


class WarmSGD(torch.optim.SGD):
    """The same in plain torch. Like torch's, it leaves out a parameter without a gradient."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                state["t"] = state.get("t", 0) + 1
                state["m"] = (
                    state.get("m", 0) * group["momentum"] + p.grad + group["weight_decay"] * p
                )
                p.sub_(group["lr"] * warmth(state["t"], True) * state["m"])


class Leaf(nn.Module):
    """A parameter of any shape that scales its input; `read` is not called through a hook."""

    def __init__(self, *shape):
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))

    def forward(self, h):
        return self.read(h)

    def read(self, h):
        return torch.tanh(
            h * (self.p * torch.linspace(-1, 1, self.p.numel()).reshape(self.p.shape)).sum()
            + self.p.mean()
        )


class Mean(nn.Module):
    """Normalizes by a running mean, as BatchNorm does in evaluation, and updates it in training."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, h):
        if self.training:
            self.mean.lerp_(h.detach(), 0.3)
            self.count.add_(1)
        return h - 0.5 * self.mean


class Resized(nn.Module):
    """A running mean that gets its size in the first forward, as observers of quantization do."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.zeros(0))

    def forward(self, h):
        if len(self.table) == 0:
            self.table = torch.ones(2, WIDTH, dtype=h.dtype).T
        if self.training:
            self.table.lerp_(h.detach().unsqueeze(1), 0.3)
        return h + self.table.mean(1)


def buffers_of(model):
    return [(module._buffers, key) for module in model.modules() for key in module._buffers]


class Model(nn.Module):
    def __init__(self, draw, sparse):
        super().__init__()
        self.parts = nn.ModuleList()
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice(["leaf", "leaf", "linear", "table", "nested", "mean"])
            part = {
                "leaf": lambda: Leaf(*(draw.randint(1, 3) for _ in range(draw.randint(0, 5)))),
                "linear": lambda: nn.Linear(WIDTH, WIDTH, bias=draw.random() < 0.5),
                "table": lambda: nn.Embedding(6, WIDTH, sparse=sparse),
                "mean": Mean,
                "nested": lambda: nn.ModuleDict(
                    {"a": nn.Sequential(nn.Linear(WIDTH, WIDTH), Leaf(2)), "b": Leaf(3, 2)}
                ),
            }[kind]()
            self.parts.append(part)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.sometimes = Leaf(2, 3)
        if draw.random() < 0.4:
            self.again = self.parts[0]  # reused
        if draw.random() < 0.4:
            self.tied = nn.Linear(WIDTH, WIDTH)
            self.parts.append(nn.Linear(WIDTH, WIDTH))
            self.tied.weight = self.parts[-1].weight
        if draw.random() < 0.4:
            self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.ways = [draw.randint(0, 2) for _ in range(16)]
        self.resized = Resized() if draw.random() < 0.4 else nn.Identity()

    def apply_part(self, part, h, way):
        if isinstance(part, Leaf):
            return part.read(h) if way else part(h)
        if isinstance(
            part, nn.Linear
        ):  # a functional call reads the weight without the layer's forward
            return torch.tanh(nn.functional.linear(h, part.weight, part.bias) if way else part(h))
        if isinstance(part, nn.Embedding):
            return h + part((h.detach() * 100).long() % 6).mean(0)
        if isinstance(part, nn.ModuleDict):
            for inner in (*part["a"], part["b"]):
                h = self.apply_part(inner, h, way)
            return h
        return part(h)

    def forward(self, x, sometimes):
        h = x
        for part, way in zip(
            (
                *self.parts,
                *(
                    getattr(self, name)
                    for name in ("again", "tied", "frozen")
                    if hasattr(self, name)
                ),
            ),
            self.ways,
        ):
            h = self.apply_part(part, h, way)
        h = self.resized(h * self.scale)
        return (self.sometimes(h) if sometimes else h).square().sum()


@dataclasses.dataclass
class Program:
    number: int

    def __post_init__(self):
        draw = random.Random(self.number)
        self.seed = draw.random()
        self.sparse = draw.random() < 0.5
        self.unused = draw.random() < 0.4
        self.every = draw.choice([1, 1, 2])
        self.prepared = draw.choice(["no", "loss", "steps"])
        self.accumulate = draw.random() < 0.6
        self.clip = draw.choice([0, 0, 0.05, 5.0]) if self.every == 1 else 0
        self.schedule = draw.random() < 0.4
        self.edit = draw.random() < 0.3
        self.drop = self.every == 1 and draw.random() < 0.3
        self.after = draw.choice(["nothing", "clamp", "state", "average", "load"])
        self.hostile = draw.random() < 0.5
        self.bucket_mb = draw.choice([0, 3e-5, 25])
        self.settings = dict(
            sync=draw.choice(["hook", "step"]),
            update_order=draw.choice(["launch", "forward"]),
            clip_norm=self.clip,
            overlap_param_gather=draw.random() < 0.6,
            find_unused_parameters=self.unused,
            check_grads=draw.random() < 0.2,
        )
        self.settings["world_size_invariant"] = (
            not self.clip and not self.unused and not self.hostile and draw.random() < 0.2
        )
        self.steps = draw.choice([2, 4])
        self.passes = [draw.randint(1, 3) if self.accumulate else 1 for _ in range(2 * self.steps)]
        self.closure = draw.random() < 0.4
        self.warm = draw.random() < 0.5
        # when the optional part is used
        self.used = draw.choice(["by chance", "late", "every second"])

    def model(self, sparse):
        torch.manual_seed(self.number)
        return Model(random.Random(self.seed), sparse).double()

    def batch(self, step, rank, micro_batch):
        """-> (input, whether the model's optional part is used)."""
        draw = random.Random(f"{self.number} {step} {rank} {micro_batch}")
        used = {"by chance": draw.random() < 0.4, "late": step > 0, "every second": step % 2 == 1}[
            self.used
        ]
        return (
            torch.tensor([draw.gauss(0, 1) for _ in range(WIDTH)], dtype=torch.float64),
            not self.unused or used,
        )

    def before_step(self, optimizer, step):
        if self.edit and step % 2:
            for group in optimizer.param_groups:
                group.update(
                    momentum=0.5, weight_decay=0.1, **({} if self.schedule else {"lr": 0.02})
                )

    def scheduler(self, optimizer, step):
        if self.schedule:
            return torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda t: 1 / (1 + t), last_epoch=step - 1
            )

    @torch.no_grad()
    def after_step(self, model, average):
        if self.after == "clamp":
            for p in model.parameters():
                p.clamp_(-0.7, 0.7)
        elif self.after == "state":
            for x in model.state_dict().values():
                average.append(x.double().sum())
        elif self.after == "average":
            average.append(sum(p.sum() for p in model.parameters()))
        elif self.after == "load":
            model.load_state_dict(
                {name: x * 1 for name, x in copy.deepcopy(model).state_dict().items()}
            )


def by_engine(comm, program, phase, state):
    """Run one half of a program -> (state, parameters and buffers, what was read after steps)."""
    p = program
    average = []
    model = p.model(p.sparse)
    if comm.rank:  # the optimizer must broadcast rank 0's
        with torch.no_grad():
            for x in (*model.parameters(), *model.buffers()):
                x.add_(comm.rank)
    with (
        mock.patch.object(gpt_speedrun, "Comm", Hostile) if p.hostile else contextlib.nullcontext()
    ):
        optimizer = gpt_speedrun.make_optimizer(
            model,
            [gpt_speedrun.Assignment("*", Momentum(every=p.every, warm=p.warm))],
            p.bucket_mb,
            gpt_speedrun.SyncSettings(**p.settings),
        )
    if state is not None:
        model.eval()(*p.batch(0, 0, 0))  # gives buffers their sizes
        model.train()
        optimizer.load_state_dict(state)
    first = phase * p.steps
    scheduler = p.scheduler(optimizer, first)
    for step in range(first, first + p.steps):
        p.before_step(optimizer, step)
        if p.drop:
            with optimizer.no_sync():
                model.eval()(*p.batch(step, 9, 9)).backward()
            optimizer.zero_grad()
            model.train()

        def backward(i):
            loss = model(*p.batch(step, comm.rank, i))
            if p.prepared == "steps":
                optimizer.prepare_for_backward(step, i, passes, loss)
            with (
                optimizer.no_sync()
                if i + 1 < passes and p.prepared != "steps"
                else contextlib.nullcontext()
            ):
                if p.prepared == "loss":
                    optimizer.prepare_for_backward(loss)
                loss.backward()
            return loss

        for i in range((passes := p.passes[step]) - p.closure):
            backward(i)
        assert (
            optimizer.step(functools.partial(backward, passes - 1) if p.closure else None)
            is not None
        ) == p.closure
        if scheduler:
            scheduler.step()
        p.after_step(model, average)
    saved = optimizer.state_dict()
    result = [x.detach().clone() for x in (*model.parameters(), *model.buffers())]
    optimizer.remove_hooks()
    return saved, result, average


def by_torch(program, ranks_of_phases):
    """Run a program by torch.optim.SGD in one process; every rank's data in turn -> the same of
    each half."""
    p = program
    results = []
    model = p.model(False)
    optimizer = (WarmSGD if p.warm else torch.optim.SGD)(
        [x for x in model.parameters() if x.requires_grad],
        lr=Momentum.lr,
        momentum=Momentum.momentum,
    )
    scheduler = p.scheduler(optimizer, 0)
    buffers = buffers_of(model)
    for phase, ranks in enumerate(ranks_of_phases):
        average = []
        if phase:  # a state holds the learning rates, and a rule's own numbers are those of the new program
            for group in optimizer.param_groups:
                group.update(momentum=Momentum.momentum, weight_decay=0.0)
        for step in range(phase * p.steps, (phase + 1) * p.steps):
            p.before_step(optimizer, step)
            if step % p.every == 0:
                optimizer.zero_grad()
            before = [held[key].clone() for held, key in buffers]
            of_rank_0 = None
            for rank in range(ranks):
                for i in range(p.passes[step]):
                    loss = model(*p.batch(step, rank, i))
                    (loss / ranks / (p.passes[step] if p.prepared == "steps" else 1)).backward()
                of_rank_0 = of_rank_0 or [held[key].clone() for held, key in buffers]
                for (held, key), old in zip(buffers, before):
                    held[key] = old.clone()
            for (held, key), new in zip(buffers, of_rank_0):
                held[key] = new
            if p.clip:
                grads = [x.grad for x in model.parameters() if x.grad is not None]
                norm = torch.stack([g.square().sum() for g in grads]).sum().sqrt().item()
                for g in grads if norm > p.clip else ():
                    g.mul_(p.clip / norm)
            if (step + 1) % p.every == 0:
                optimizer.step()
            if scheduler:
                scheduler.step()
            p.after_step(model, average)
        results.append(
            ([x.detach().clone() for x in (*model.parameters(), *model.buffers())], average)
        )
    return results


def many(comm, jobs):
    """Run half a program for each of jobs (number, phase, state) -> results."""
    results = []
    for number, phase, state in jobs:
        try:
            results.append(by_engine(comm, Program(number), phase, state))
        except Exception as error:
            if comm.ranks > 1:
                torch.distributed.destroy_process_group()  # or the other ranks would wait
            raise RuntimeError(
                f"program {number} at {comm.ranks} ranks, half {phase}, rank {comm.rank}"
            ) from error
    return results


def plan_of_ranks(number, ranks):
    return ranks, random.Random(number).choice([n for n in (1, 2, 3) if n != ranks])


def wrong_programs(on_ranks, numbers):
    """Run programs at 1, 2 and 3 ranks, and from their saved states at another number of ranks ->
    what differs from torch."""
    runs = [(number, ranks) for number in numbers for ranks in (1, 2, 3)]
    runs = [
        run
        for run in runs
        if not (3 in plan_of_ranks(*run) and Program(run[0]).settings["world_size_invariant"])
    ]
    wrong = []
    states = {}
    right = {run: by_torch(Program(run[0]), plan_of_ranks(*run)) for run in runs}
    for phase in (0, 1):
        for world in (1, 2, 3):
            here = [
                run
                for run in runs
                if plan_of_ranks(*run)[phase] == world and (phase == 0 or run in states)
            ]
            outcomes = on_ranks(
                world,
                many,
                [(number, phase, states.get((number, ranks))) for number, ranks in here],
            )
            for i, run in enumerate(here):
                expected, average = right[run][phase]
                for rank, of_rank in enumerate(outcomes):
                    state, result, seen = of_rank[i]
                    off = [
                        (x - y).abs().max().item()
                        for x, y in zip((*result, *seen), (*expected, *average), strict=True)
                    ]
                    if not max(off) < 1e-9:
                        wrong.append(
                            (
                                run,
                                phase,
                                rank,
                                f"differs by {max(off):.2g} in {sum(not x < 1e-9 for x in off)}"
                                f" of {len(off)} values",
                            )
                        )
                        break
                    states[run] = state
    return wrong


# 780: the same bytes at any number of ranks; 1456: a part that begins late, and no_sync
PROGRAMS = [0, 1, 2, 3, 4, 7, 780, 1456]


@pytest.mark.parametrize("numbers", [PROGRAMS, pytest.param(range(8, 48), marks=pytest.mark.slow)])
def test_random_programs_train_as_with_torch(on_ranks, numbers):
    wrong = wrong_programs(on_ranks, numbers)
    assert not wrong, "\n".join(
        f"program {run[0]} at {run[1]} ranks, half {phase}, rank {rank}: {what}\n "
        f" {vars(Program(run[0]))}"
        for run, phase, rank, what in wrong[:5]
    )
