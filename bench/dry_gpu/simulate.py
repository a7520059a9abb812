"""Launch logs of the GPU that computes nothing: read, counted, and played by a roofline over streams and events.

Nothing here is measured: a kernel takes the longest of what its bytes, its FLOPs and its special functions take at the rates below;
kernels of a stream follow one another, and an event is over when what was launched before it is.
"""

import collections
import math
from typing import Any, Iterable, NamedTuple


class Event(NamedTuple):
    """A line of the log; of a mark, words are what it says."""

    ms: float
    thread: str
    stream: str
    kind: str
    name: str
    words: list[Any]


def parse_log(lines: Iterable[str]) -> list[Event]:
    events = []
    for number, line in enumerate(lines, 1):
        ms, thread, stream, kind, *words = line.rstrip("\n").split("\t")
        if kind == "MARK":
            kind, *words = words
            events.append(Event(float(ms), thread, stream, kind, words[0] if words else "", words))
        else:
            events.append(Event(float(ms), thread, stream, kind, words[0], list(map(int, words[1:]))))
    return events


class Rates(NamedTuple):
    """Of one GPU, a second. sm_90: what record 44's trace of 8 H100 reached, which is 0.71 of the data sheet's FLOPs and 0.9 of its
    bytes; `special` from its log-softmax kernel. sm_89: the same shares of an RTX 4090's sheet; the link is PCIe 4.0."""

    units: int  # multiprocessors
    bytes: float
    bf16: float
    fp8: float
    fp32: float
    special: float  # exponentials, logarithms, roots and their like
    flash: float  # attention's FLOPs, of all pairs in blocks that are looked at, on top of its bytes: FlashAttention 3
    flex: float  # likewise, FlexAttention: assumed to reach 0.55 of that
    link: float  # NCCL's bytes
    kernel_s: float = 2e-6  # no kernel takes less
    collective_s: float = 15e-6  # no collective takes less


RATES = {90: Rates(132, 3.0e12, 705e12, 1384e12, 47e12, 2.1e12, 450e12, 250e12, 340e9),
         89: Rates(128, 0.9e12, 117e12, 234e12, 58e12, 2.9e12, 75e12, 42e12, 22e9)}
# Measured on 8 H100: ms a step and launches by class in the trace of steps 10-13 of the record's run (windows 384 and 128)
RECORD = {"products in bf16": (21.81, 259), "products in fp8": (5.49, 3), "attention": (5.63, 60), "Triton: loss": (8.01, 7),
          "Triton: rest": (13.60, 266), "eager": (1.51, 136), "copies and fills": (0.96, 207), "collectives": (4.75, 15),
          "a step": (60.66, 953)}
RECORD_STEP_MS = 61.3  # the mean of its five logs, all windows


class Cost(NamedTuple):
    kind: str  # a class of RECORD
    name: str
    seconds: float


def product_seconds(m: int, n: int, k: int, batch: int, width: int, flops: float, rates: Rates) -> float:
    """A multiprocessor takes tiles of 128 x 256, and of 1024 of k where that is longer; they come in waves."""
    tiles = math.ceil(m / 128) * math.ceil(n / 256) * batch * math.ceil(k / 1024)
    used = tiles / (math.ceil(tiles / rates.units) * rates.units)
    return max(2 * m * n * k * batch / flops / used, (m * k + k * n + m * n) * width * batch / rates.bytes)


def costs(events: list[Event], rates: Rates, ranks: int, attention_dim: int) -> dict[int, Cost]:
    """What each event of the GPU takes, by its place in the list, from the census's marks."""
    said: dict[str, list[float]] = {}  # by thread: the cost of the Triton kernel that comes
    waiting: dict[str, list[int]] = collections.defaultdict(list)  # by thread: kernels of an operator that is not over
    pairs, out = 0.0, {}

    def least(seconds):
        return max(rates.kernel_s, seconds)

    for i, e in enumerate(events):
        if e.kind == "STEP" and len(e.words) > 3:
            pairs = float(e.words[3])
        elif e.kind == "COST":
            said[e.thread] = list(map(float, e.words))
        elif e.kind == "OP":
            for j in (kernels := waiting.pop(e.thread, [])):
                if out[j].kind == "eager":
                    out[j] = out[j]._replace(name=e.name, seconds=least(float(e.words[1]) / len(kernels) / rates.bytes))
        elif e.kind in ("TRITON", "KERNEL") and ("flex_attention" in e.name and "tem" in e.name or "flash_" in e.name):
            backward = 2.5 if "backward" in e.name.lower() or "bwd" in e.name.lower() else 1
            rate = rates.flex if "flex" in e.name else rates.flash
            moved = said.pop(e.thread, (0,))[0]
            out[i] = Cost("attention", e.name, least(moved / rates.bytes + backward * 4 * pairs * attention_dim / rate))
        elif e.kind == "TRITON":
            moved, special, fp8, bf16 = said.pop(e.thread, (0, 0, 0, 0))
            kind = "Triton: loss" if "softmax" in e.name or "loss_forward_s" in e.name else "Triton: rest"
            out[i] = Cost(kind, e.name, least(max(moved / rates.bytes, special / rates.special, fp8 / rates.fp8, bf16 / rates.bf16)))
        elif e.kind == "KERNEL":
            out[i] = Cost("eager", e.name, rates.kernel_s)
            waiting[e.thread].append(i)
        elif e.kind == "GEMM":
            flops, width = {"fp8": (rates.fp8, 1), "bf16": (rates.bf16, 2), "fp16": (rates.bf16, 2)}.get(e.name, (rates.fp32, 4))
            shape = " x ".join(map(str, e.words))
            out[i] = Cost(f"products in {'fp8' if e.name == 'fp8' else 'bf16'}", f"{e.name} {shape}",
                          least(product_seconds(*e.words, width, flops, rates)))
        elif e.kind in ("COPY", "FILL"):
            out[i] = Cost("copies and fills", e.name, least((1 + (e.kind == "COPY")) * e.words[0] / rates.bytes))
        elif e.kind == "NCCL":
            sent = e.words[0] * (ranks - 1) / ranks * (2 if e.name == "all-reduce" else 1)
            out[i] = Cost("collectives", e.name, rates.collective_s + sent / rates.link)
    return out


class Step(NamedTuple):
    step: int
    windows: str
    ms: float
    waiting_ms: float  # the main stream's, for collectives
    busy: dict[str, tuple[float, int]]  # ms and launches by class
    names: dict[str, tuple[float, int]]  # and by kernel


def simulate(events: list[Event], cost: dict[int, Cost]) -> list[Step]:
    """Play the streams. A step lasts from where the main stream meets its mark to where it meets the next one's."""
    at: dict[str, float] = collections.defaultdict(float)  # by stream: when it is done with what it was given
    over: dict[int, float] = {}  # by event
    steps: list[Step] = []
    begun, busy, names = None, {}, {}
    for i, e in enumerate(events):
        if e.kind in ("STEP", "PHASE"):
            if begun is not None:
                ms = 1e3 * ((at["0"] if e.kind == "STEP" else ended) - began)
                compute = sum(v[0] for k, v in busy.items() if k != "collectives")
                steps.append(Step(int(begun.words[0]), " ".join(begun.words[1:3]), ms, ms - compute, busy, names))
            begun, began, busy, names = e if e.kind == "STEP" else None, at["0"], {}, {}
        elif e.kind == "END":
            ended = at["0"]
        elif e.kind == "EVENT":
            over[e.words[0]] = at[e.stream]
        elif e.kind == "WAIT":
            at[e.stream] = max(at[e.stream], over.get(e.words[0], 0.0))
        elif i in cost:
            kind, name, seconds = cost[i]
            at[e.stream] += seconds
            for table, key in ((busy, kind), (names, f"{kind}: {name}")):
                ms, count = table.get(key, (0.0, 0))
                table[key] = ms + 1e3 * seconds, count + 1
    return steps


def phase(events: list[Event], name: str) -> list[Event]:
    """The events of a phase, up to the next one's mark and with it."""
    out, inside = [], False
    for e in events:
        if e.kind == "PHASE":
            if inside:
                out.append(e)
            inside = e.name == name
        elif inside:
            out.append(e)
    return out
