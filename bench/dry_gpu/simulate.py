"""Launch logs of the GPU that computes nothing (device.c says what stands in them), played by a roofline over streams.

A kernel takes the longest of what its bytes, FLOPs and special functions take at the rates below; those of a stream
follow one another; an event is over when all is that its stream was given before it. Nothing of this is measured.
"""

import collections
import dataclasses
import math
import re
from typing import Any, Callable, Iterable, NamedTuple


class Event(NamedTuple):
    stream: str
    kind: str
    name: str
    numbers: list[int]


def parse_log(lines: Iterable[str]) -> list[Event]:
    fields = (line.rstrip("\n").split("\t") for line in lines)
    return [Event(stream, kind, name, list(map(int, numbers))) for stream, kind, name, *numbers in fields]


def phase(events: list[Event], name: str) -> list[Event]:
    """The events of a phase: of its last stretch, if there are several."""
    begins = [i for i, e in enumerate(events) if e.kind == "PHASE"] + [len(events)]
    found = [events[a:b] for a, b in zip(begins, begins[1:]) if events[a].name == name]
    return found[-1] if found else []


class Rates(NamedTuple):
    """Of one GPU, a second.

    sm_90: what record 44's trace on 8 H100 shows, 0.71 of the data sheet's FLOPs and 0.9 of its bytes; `special` by its
    log-softmax kernel. Attention's FLOPs are on top of its bytes; FlexAttention is assumed to reach 0.55 of the trace's
    FlashAttention 3, and a product in Triton 0.8 of the trace's. sm_89: the same shares of an RTX 4090's data sheet, over PCIe 4.0.
    """

    multiprocessors: int
    bytes: float
    bf16: float
    fp8: float
    fp32: float
    special: float
    flash: float
    flex: float
    link: float  # NCCL's bytes
    kernel_s: float = 2e-6  # the least that a kernel takes
    collective_s: float = 15e-6  # and a collective, beside its bytes
    triton: float = 0.8  # of the FLOPs of NVIDIA's products


RATES = {90: Rates(132, 3.0e12, 705e12, 1384e12, 47e12, 2.1e12, 450e12, 250e12, 340e9),
         89: Rates(128, 0.9e12, 117e12, 234e12, 58e12, 2.9e12, 75e12, 42e12, 22e9)}

# Measured: ms and launches a step by class, in the trace of steps 10 to 13 of record 44 on 8 H100 (windows 384 and 128)
RECORD = {"products": (21.81, 259), "products in fp8": (5.49, 3), "attention": (5.63, 60),
          "Triton, loss": (8.01, 7), "Triton, rest": (13.60, 266), "eager": (1.51, 136),
          "copies and fills": (0.96, 207), "collectives": (4.75, 15)}
RECORD_MS = {"windows 384 128": 60.3, "windows 896 384": 61.0, "windows 1408 640": 61.5, "windows 1664 768": 62.0,
             "mean": 61.3}  # by its five logs


def product_seconds(m: int, n: int, k: int, batch: int, width: int, flops: float, rates: Rates) -> float:
    """Waves of tiles of 128 x 128, and of 256 of k where that is longer, one to a multiprocessor."""
    tiles = math.ceil(m / 128) * math.ceil(n / 128) * math.ceil(k / 256) * batch
    idle = math.ceil(tiles / rates.multiprocessors) * rates.multiprocessors / tiles
    return max(2 * m * n * k * batch / flops * idle, (m * k + k * n + m * n) * width * batch / rates.bytes)


def is_loss(name: str) -> bool:
    """A softmax, or exponentials of a sigmoid; later words of a name are of what was fused in behind it."""
    return "softmax" in name or "loss" in name[:25] or bool(re.search("_exp_.*_sigmoid_", name))


MEASURED = (("collectives", "nccl"), ("attention", "flash|flex_attention"), ("Triton, loss", "triton.*scaled_mm"),
            ("Triton, rest", "triton"), ("products in fp8", r"nvjet_\w*q|e4m3|e5m2"),
            ("products", "nvjet|gemm|cutlass|splitK|relu_squared|XXT_kernel|ba_plus_cAA"), ("eager", ""))


def measured(trace: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Of a profiler's trace, as --profile of train_gpt.py leaves it: ms and launches of a step in the mean, by class. What
    the steps launched counts, whenever it ran. Of record 44's trace it makes RECORD, within 0.2 ms of each class."""
    events = trace["traceEvents"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")]
    begin, end = min(e["ts"] for e in steps), max(e["ts"] + e["dur"] for e in steps)
    launched = {e.get("args", {}).get("correlation") for e in events
                if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] < end}
    table: dict[str, tuple[float, float]] = {}
    for e in (e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")):
        if e["args"].get("correlation") in launched:
            kind = next(kind for kind, words in MEASURED if re.search(words, e["name"]))
            kind = "Triton, loss" if kind == "Triton, rest" and is_loss(e["name"]) else kind
            kind = kind if e["cat"] == "kernel" else "copies and fills"
            ms, launches = table.get(kind, (0, 0))
            table[kind] = ms + e["dur"] / 1e3 / len(steps), launches + 1 / len(steps)
    return table


class Cost(NamedTuple):
    kind: str  # a class of RECORD
    name: str
    seconds: float


NOTHING = [0, 0, 0, 0]  # bytes, special functions, FLOPs in fp8 and in bf16


def costs(events: list[Event], rates: Rates, ranks: int) -> dict[int, Cost]:
    """What each event takes on the device, by its place in the list. Of the lines that rank0.py adds, one before a Triton
    kernel tells its cost, one after eager kernels the bytes of their operator, which they share: one thread launches at a
    time, autograd's while the main one waits."""
    attention, said, eager, out = 0, NOTHING, [], {}
    for i, (_, what, name, numbers) in enumerate(events):
        kind, seconds = "", 0.0
        if what == "STEP":
            attention = numbers[1]
        elif what == "COST":
            said = numbers
        elif what == "OP":
            for j in eager:
                seconds = out[j].seconds * (out[j].kind == "attention") + numbers[0] / len(eager) / rates.bytes
                out[j] = out[j]._replace(name=name, seconds=max(rates.kernel_s, seconds))
            eager = []
        elif what in ("TRITON", "KERNEL"):
            (moved, special, fp8, bf16), said = said, NOTHING
            kind = "eager" if what == "KERNEL" else "Triton, loss" if is_loss(name) else "Triton, rest"
            kind = "products" if bf16 else "products in fp8" if fp8 else kind
            flops = (fp8 / rates.fp8 + bf16 / rates.bf16) / rates.triton
            seconds = max(moved / rates.bytes, special / rates.special, flops)
            if re.match("triton_tem.*flex_attention", name) or re.search("flash_[fb]wd|FlashAttn", name):
                kind, times = "attention", 2.5 if "backward" in name or "bwd" in name.lower() else 1
                times *= not re.search("dot_do|convert|process", name)  # FlashAttention's, before and after its products
                seconds += times * attention / (rates.flex if "flex" in name else rates.flash)
            if what == "KERNEL":
                eager.append(i)
        elif what == "GEMM":
            flops, width = {"fp8": (rates.fp8, 1), "fp32": (rates.fp32, 4)}.get(name, (rates.bf16, 2))
            kind = "products in fp8" if name == "fp8" else "products"
            name += " " + " x ".join(map(str, numbers))
            seconds = product_seconds(*numbers, width, flops, rates)
        elif what in ("COPY", "FILL"):
            kind, seconds = "copies and fills", numbers[0] * (1 + (what == "COPY")) / rates.bytes
        elif what == "NCCL":
            sent = numbers[0] * (ranks - 1) / ranks * (2 if name == "all-reduce" else 1)
            kind, seconds = "collectives", rates.collective_s + sent / rates.link
        if kind:
            out[i] = Cost(kind, name, max(rates.kernel_s, seconds))
    return out


@dataclasses.dataclass
class Step:
    windows: str
    began_s: float  # of the main stream's time
    ms: float = 0.0
    waiting_ms: float = 0.0  # of the main stream, for other streams
    costs: list[Cost] = dataclasses.field(default_factory=list)


def simulate(events: list[Event], cost: dict[int, Cost]) -> list[Step]:
    """Play the streams. A step lasts from where the main stream stands at its mark to where it stands at the next's."""
    at: dict[str, float] = collections.defaultdict(float)  # by stream: when it is done with what it was given
    over: dict[int, float] = {}  # by event
    steps: list[Step] = []
    inside, main = False, "0"
    for i, e in enumerate(events):
        if e.kind in ("STEP", "END"):
            if steps:  # what the loop does between steps belongs to the one before
                steps[-1].ms = 1e3 * (at[main] - steps[-1].began_s)
            if inside := e.kind == "STEP":
                steps.append(Step(e.name, at[main]))
        elif e.kind == "EVENT":
            over[e.numbers[0]] = at[e.stream]
        elif e.kind == "WAIT":
            until = max(at[e.stream], over.get(e.numbers[0], 0.0))
            if inside and e.stream == main:
                steps[-1].waiting_ms += 1e3 * (until - at[main])
            at[e.stream] = until
        elif i in cost:
            at[e.stream] += cost[i].seconds
            if inside:
                steps[-1].costs.append(cost[i])
    return steps


def mean_costs(steps: list[Step], key: Callable[[Cost], str]) -> dict[str, tuple[float, float]]:
    """Of a step in the mean, ms and launches by key."""
    table: dict[str, list[float]] = collections.defaultdict(list)
    for step in steps:
        for cost in step.costs:
            table[key(cost)].append(1e3 * cost.seconds)
    return {name: (sum(ms) / len(steps), len(ms) / len(steps)) for name, ms in table.items()}
