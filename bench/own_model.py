"""Train five small models by make_optimizer, by torch.optim.Muon with AdamW, and by AdamW:
validation loss and time.

    .venv/bin/python bench/own_model.py               # all runs: 38 minutes on two busy cores
    .venv/bin/python bench/own_model.py --steps 4 --seeds 1 --models mlp

Tasks: the next byte of the source of Python's standard library (lstm, gpt); which letter a picture
shows (mlp, vit, conv). Each optimizer trains at its default learning rates times 1/3, 1 and 3, and
on by factors of 3 while the best is an end; rates are constant. Ranks share a global batch, so on 2
ranks only the defaults and the best factor run. Each run is appended to a file of JSON lines as it
ends; a second start makes only the missing ones.
"""

import argparse
import functools
import json
import statistics
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn, optim

from common import ROOT, gpt_speedrun, machine, on_ranks, positive, run, spread, table, take_turns

BATCH = {"picture": 64, "text": 16}  # of all ranks
TOKENS = 64
PIXELS = 16
WIDTH = 64
FACTORS = (1 / 3, 1.0, 3.0)

# tasks

# columns of A to Z in the common font of 5 x 7 pixels; the lowest bit is the top row
FONT = """7E1111117E 7F49494936 3E41414122 7F4141221C 7F49494941 7F09090901 3E4149497A 7F0808087F
00417F4100 2040413F01 7F08142241 7F40404040 7F020C027F 7F0408107F 3E4141413E 7F09090906 3E4151215E
7F09192946 4649494931 01017F0101 3F4040403F 1F2040201F 3F4038403F 6314081463 0708700807 6151494543
""".split()


@functools.cache
def letters():
    """-> [26, 1, 9, 9], with a margin."""
    columns = torch.tensor([[*bytes.fromhex(letter)] for letter in FONT])
    return F.pad((columns[:, None] >> torch.arange(7)[:, None] & 1).float(), (2, 2, 1, 1))[:, None]


def pictures(count, seed):
    """Draw letters turned by up to 22 degrees, sheared, 8 to 14 pixels high, over a weak other
    letter and noise.

    -> [count, 1, 16, 16], the letters' numbers [count]
    """
    draw = torch.Generator().manual_seed(seed)
    uniform = lambda low, high: low + (high - low) * torch.rand(count, generator=draw)  # noqa: E731

    def drawn(which, far):
        angle = uniform(-torch.pi / 8, torch.pi / 8)
        shear = uniform(-0.2, 0.2)
        zoom = 2 / uniform(0.9, 1.6)
        turn = torch.stack([angle.cos(), -angle.sin() + shear, angle.sin(), angle.cos()], -1).view(
            -1, 2, 2
        )
        moves = torch.stack([uniform(-far, far), uniform(-far, far)], -1)
        places = F.affine_grid(
            torch.cat([zoom[:, None, None] * turn, moves[:, :, None]], -1),
            [count, 1, PIXELS, PIXELS],
            align_corners=False,
        )
        return F.grid_sample(letters()[which], places, align_corners=False)

    which, other = torch.randint(26, (2, count), generator=draw)
    image = drawn(which, 0.3) + 0.3 * drawn(other, 1.5)
    return image + 0.2 * torch.randn(image.shape, generator=draw), which


@functools.cache
def text():
    """Read the library's modules as bytes -> training, validation: every tenth module."""
    modules = [
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    ]
    held_out = b"".join(modules[::10])
    return [
        torch.frombuffer(bytearray(part), dtype=torch.uint8).long()
        for part in (b"".join(x for i, x in enumerate(modules) if i % 10), held_out)
    ]


def windows(count, seed):
    """-> inputs [count, TOKENS] and targets. Seeds below 0 draw from the validation text."""
    part = text()[seed < 0]
    at = torch.randint(
        len(part) - TOKENS, (count, 1), generator=torch.Generator().manual_seed(abs(seed))
    )
    x = part[at + torch.arange(TOKENS + 1)]
    return x[:, :-1], x[:, 1:]


# models, each with layers of torch only; the last layer is the head


class Attention(nn.Module):
    def __init__(self, embed, length, classes, causal):
        super().__init__()
        self.embed = embed
        self.position = nn.Embedding(length, WIDTH)
        self.causal = causal
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(
                    WIDTH, 4, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
                )
                for _ in range(2)
            )
        )
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, classes)

    def forward(self, x):
        x = self.embed(x)
        x = x + self.position.weight
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1)) if self.causal else None
        for block in self.blocks:
            x = block(x, mask, is_causal=self.causal)
        return self.head(self.norm(x if self.causal else x.mean(1)))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.lstm = nn.LSTM(WIDTH, 128)
        self.head = nn.Linear(128, 256)

    def forward(self, x):
        return self.head(self.lstm(self.embed(x.T))[0]).transpose(0, 1)


def patches():
    return nn.Sequential(nn.Unfold(4, stride=4), nn.Flatten(2), Transposed(), nn.Linear(16, WIDTH))


class Transposed(nn.Module):
    def forward(self, x):
        return x.mT


def mlp():
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(PIXELS**2, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 256),
        nn.ReLU(),
        nn.Linear(256, 26),
    )


def conv():
    sizes = (1, 32, 64, 64)
    blocks = [
        layer
        for inside, out in zip(sizes, sizes[1:])
        for layer in (
            nn.Conv2d(inside, out, 3, padding=1),
            nn.GroupNorm(8, out),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
    ]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(256, 26))


MODELS = {
    "mlp": (mlp, "picture"),
    "vit": (lambda: Attention(patches(), 16, 26, False), "picture"),
    "conv": (conv, "picture"),
    "lstm": (Recurrent, "text"),
    "gpt": (lambda: Attention(nn.Embedding(256, WIDTH), TOKENS, 256, True), "text"),
}

# optimizers at their defaults


def ours(model, ranks):
    return model, [gpt_speedrun.make_optimizer(model)]


def muon(model, ranks):
    """Give Muon the matrices to which ours gives NorMuon, except kernels of convolutions, which it
    refuses."""
    lines = gpt_speedrun.default_assignments(model)
    names = {line.pattern for line in lines if isinstance(line.rule, gpt_speedrun.NorMuon)}
    inner = [p for name, p in model.named_parameters() if name in names and p.dim() == 2]
    rest = [p for name, p in model.named_parameters() if name not in names or p.dim() != 2]
    return wrapped(model, ranks), (
        [optim.Muon(inner), optim.AdamW(rest)] if inner else [optim.AdamW(rest)]
    )


def adamw(model, ranks):
    return wrapped(model, ranks), [optim.AdamW(model.parameters())]


def wrapped(model, ranks):
    return nn.parallel.DistributedDataParallel(model) if ranks > 1 else model


OPTIMIZERS = {"ours": ours, "Muon and AdamW": muon, "AdamW": adamw}

# runs


def built(name, optimizer, factor, seed, rank, ranks):
    """-> a function that makes a step, one that measures the validation loss."""
    torch.manual_seed(seed)
    make, task = MODELS[name]
    data = {"picture": pictures, "text": windows}[task]
    batch = BATCH[task]
    model, optimizers = OPTIMIZERS[optimizer](make(), ranks)
    for group in (group for each in optimizers for group in each.param_groups):
        group["lr"] *= factor

    def loss_of(inputs, targets):
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())

    def step(i):
        inputs, targets = (
            x[rank * batch // ranks : (rank + 1) * batch // ranks]
            for x in data(batch, 1 + 100_000 * seed + i)
        )
        loss_of(inputs, targets).backward()
        for each in optimizers:
            each.step()
            each.zero_grad()

    @torch.no_grad()
    def validate():
        return loss_of(*data({"picture": 2048, "text": 512}[task], -1)).item()

    return step, validate


def train(rank, ranks, jobs, steps, results):
    torch.set_num_threads(1)
    for name, optimizer, factor, seed in jobs:
        began = time.perf_counter()
        step, validate = built(name, optimizer, factor, seed, rank, ranks)
        for i in range(steps):
            step(i)
        line = dict(
            model=name,
            optimizer=optimizer,
            factor=factor,
            seed=seed,
            ranks=ranks,
            steps=steps,
            loss=validate(),
            seconds=round(time.perf_counter() - began, 2),
        )
        if rank == 0:
            with open(results, "a") as file:
                file.write(json.dumps(line) + "\n")


def times(rank, ranks, models, rounds):
    """-> {model: {optimizer: ms of each step}}, the optimizers interleaved."""
    torch.set_num_threads(1)
    found = {}
    for name in models:
        steps = {
            x: functools.partial(built(name, x, 1.0, 0, rank, ranks)[0], 0) for x in OPTIMIZERS
        }
        taken = take_turns(steps, rounds, 3, dist.barrier)
        found[name] = {x: [1e3 * seconds for seconds in each] for x, each in taken.items()}
    return found


class Results:
    """The file of finished runs."""

    def __init__(self, path, models, seeds, steps):
        self.path = path
        self.models = models
        self.seeds = range(seeds)
        self.steps = steps

    def losses(self):
        """-> {(model, optimizer, ranks): {factor: losses by seed}}"""
        found = {}
        for line in map(
            json.loads, self.path.read_text().splitlines() if self.path.exists() else []
        ):
            if line["steps"] == self.steps and line["seed"] in self.seeds:
                runs = found.setdefault((line["model"], line["optimizer"], line["ranks"]), {})
                runs.setdefault(line["factor"], {})[line["seed"]] = line["loss"]
        return found

    def complete(self, ranks, factors):
        """Make the runs that are missing. factors(model, optimizer): those wanted."""
        done = self.losses()
        jobs = [
            (name, optimizer, factor, seed)
            for name in self.models
            for optimizer in OPTIMIZERS
            for factor in factors(name, optimizer)
            for seed in self.seeds
            if seed not in done.get((name, optimizer, ranks), {}).get(factor, {})
        ]
        if jobs:
            on_ranks(ranks, train, jobs, self.steps, str(self.path))
        return bool(jobs)

    def best(self, name, optimizer):
        runs = self.losses()[name, optimizer, 1]
        return min(runs, key=lambda factor: mean(runs[factor]))

    def further(self, name, optimizer):
        """-> the factor beyond the best one, if that is an end."""
        tried = self.losses()[name, optimizer, 1]
        best = self.best(name, optimizer)
        return [best * 3] if best == max(tried) else [best / 3] if best == min(tried) else []


def mean(losses):
    # a run that diverged is the worst
    values = [loss if loss == loss else float("inf") for loss in losses.values()]
    return statistics.mean(values)


def cell(losses):
    deviation = f" ± {statistics.stdev(losses.values()):.3f}" if len(losses) > 1 else ""
    return f"{mean(losses):.3f}{deviation}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=[*MODELS], help="default: all"
    )
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--seeds", type=positive, default=3)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "logs/own-model.jsonl", help="default: %(default)s"
    )
    args = parser.parse_args()
    args.results.parent.mkdir(parents=True, exist_ok=True)
    results = Results(args.results, args.models, args.seeds, args.steps)
    results.complete(1, lambda *_: FACTORS)
    while results.complete(1, results.further):
        pass
    results.complete(2, lambda *which: sorted({1.0, results.best(*which)}))
    found = results.losses()
    timed = {ranks: on_ranks(ranks, times, args.models, 40) for ranks in (1, 2)}
    rows = []
    for name in args.models:
        for optimizer in OPTIMIZERS:
            best = results.best(name, optimizer)
            rows.append(
                [
                    name,
                    optimizer,
                    cell(found[name, optimizer, 1][1.0]),
                    cell(found[name, optimizer, 2][1.0]),
                    cell(found[name, optimizer, 1][best]),
                    cell(found[name, optimizer, 2][best]),
                    f"{best:.3g}",
                    *(spread(timed[ranks][name][optimizer], 1) for ranks in (1, 2)),
                ]
            )
    print(
        table(
            [
                "model",
                "optimizer",
                "loss, defaults",
                "2 ranks",
                "loss, best rates",
                "2 ranks",
                "best factor",
                "ms a step",
                "2 ranks",
            ],
            rows,
        )
    )
    print(f"{args.steps} steps, {args.seeds} seeds: mean ± standard deviation; {machine()}")


if __name__ == "__main__":
    run(main)
