"""Estimate step times from a launch log of the simulated GPU, by a roofline model over streams and
events.

A kernel takes its latency and the longest of three times: its bytes, its FLOPs and its special
functions, at the rates below. Kernels of one stream run in order, with a gap between two, and so do
the collectives of one communicator, also between streams. An event completes after all earlier work
of its stream. Other ranks are never late, nor is the host unless it is given a time per launch. No
time is measured. device.c documents the log.
"""

import collections
import dataclasses
import itertools
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
    return [
        Event(stream, kind, name, list(map(int, numbers)))
        for stream, kind, name, *numbers in fields
    ]


def phase(events: list[Event], name: str) -> list[Event]:
    """Return the events of a phase. If the phase occurs several times, return those of the last
    time."""
    begins = [i for i, e in enumerate(events) if e.kind == "PHASE"] + [len(events)]
    found = [events[a:b] for a, b in zip(begins, begins[1:]) if events[a].name == name]
    return found[-1] if found else []


class Rates(NamedTuple):
    """Rates of one GPU, per second.

    sm_90: fitted to the trace beside record 44's logs, on 8 H100: 0.71 of the data sheet's FLOPs,
    0.9 of its bytes, `special` from the log-softmax kernel, `gap_s` the median on the main stream,
    `kernel_s` from kernels of a few bytes (2.0 to 3.1 µs). Attention takes the sum of the times for
    its FLOPs and its bytes, at the rate of the trace's FlashAttention 3; version 2 is slower by
    OF_FLASH_2. Assumed: a matmul in Triton reaches 0.8 of the trace's matmuls; 0.64 in fp8, since
    record 89 gains 0.75 ms per step by an fp8 product in its logs, where this model at 0.8 gives
    1.15. `link`: 0.26 ms for 77 MB and 0.49 for 151; medians in both traces there: gathers 0.24 and
    0.48, reduce-scatters 0.26 to 0.28 and 0.50. The other GPUs: the same fractions of their data
    sheets, RTX cards over PCIe (4.0, the RTX 5090 5.0). Their attention is version 2: 0.455 of the
    FLOPs, on 10.0, whose tensor cores it cannot use, Hopper's per multiprocessor.
    """

    multiprocessors: int
    bytes: float
    bf16: float
    fp8: float
    fp32: float
    special: float
    flash: float  # FLOPs of attention's forward
    flash_backward: float
    link: float  # bytes by NCCL
    kernel_s: float = 2.5e-6  # latency of a kernel, in seconds
    collective_s: float = 15e-6  # latency of a collective
    gap_s: float = 1.5e-6  # between two kernels of a stream
    triton: float = 0.8  # FLOPs of a matmul in Triton, relative to NVIDIA's
    triton_fp8: float = 0.64  # the same in fp8


RATES = {
    80: Rates(108, 1.8e12, 222e12, 222e12, 14e12, 1.34e12, 142e12, 142e12, 187e9),  # no fp8
    86: Rates(82, 0.84e12, 50e12, 50e12, 25e12, 1.26e12, 32e12, 32e12, 22e9),  # no fp8
    89: Rates(128, 0.9e12, 117e12, 234e12, 58e12, 2.9e12, 75e12, 75e12, 22e9),
    90: Rates(132, 3.0e12, 705e12, 1384e12, 47e12, 2.1e12, 450e12, 450e12, 280e9),
    100: Rates(148, 7.2e12, 1600e12, 3200e12, 57e12, 2.4e12, 252e12, 288e12, 560e9),
    120: Rates(170, 1.61e12, 149e12, 298e12, 74e12, 3.7e12, 95e12, 95e12, 44e9),
}
# on an H100 version 3 is 1.5 to 2.0 times as fast as version 2 in forward, 1.5 to 1.75 times in
# backward (arXiv:2407.08608)
OF_FLASH_2 = {"flash": 1 / 2.0, "flash_backward": 1 / 1.75}


def rates_of(arch: int, flash: int) -> Rates:
    """Return the rates of a GPU, on Hopper with FlashAttention 2 or 3, else with 2."""
    rates = RATES[arch]
    slower = OF_FLASH_2 if arch == 90 and flash == 2 else {}
    return rates._replace(**{name: share * getattr(rates, name) for name, share in slower.items()})


LOSS = "Triton, loss and fp8"
CLASSES = (
    "matmuls",
    "matmuls in fp8",
    "attention",
    LOSS,
    "Triton, other",
    "eager",
    "copies and fills",
    "collectives",
)


def matmul_seconds(
    m: int, n: int, k: int, batch: int, width: int, flops: float, rates: Rates
) -> float:
    """Return the time of a matmul. Tiles of 128 x 128 x 256 (m, n, k) run in waves, one tile per
    multiprocessor."""
    tiles = math.ceil(m / 128) * math.ceil(n / 128) * math.ceil(k / 256) * batch
    idle = math.ceil(tiles / rates.multiprocessors) * rates.multiprocessors / tiles
    return max(
        2 * m * n * k * batch / flops * idle, (m * k + k * n + m * n) * width * batch / rates.bytes
    )


def is_loss(name: str) -> bool:
    """Return whether a kernel is part of the loss or casts to fp8. Its name lists the operators
    that are fused into it."""
    return bool(
        re.search(
            "^ce_fwd|^_transpose_copy|^.{0,25}loss|log_softmax|_entropy_|_exp_.*_sigmoid_|"
            "scaled_mm",
            name,
        )
    )


ATTENTION = "flash_[fb]wd|flash::"
CLASS_PATTERNS = (
    ("collectives", "nccl"),
    ("attention", ATTENTION),
    ("Triton, other", "triton"),
    ("matmuls in fp8", r"nvjet_\w*q|e4m3|e5m2|relu_squared_in_fp8"),
    ("matmuls", "nvjet|gemm|cutlass|splitK|relu_squared|XXT_kernel|ba_plus_cAA"),
    ("eager", ""),
)


def measured(trace: dict[str, Any]) -> tuple[dict[str, tuple[float, float]], float, float]:
    """Return ({class: (ms, launches)}, ms of gaps, ms of waits) per step of a trace by
    `train_gpt.py --profile`.

    Kernels count if a step launched them, even if they ran after it. Gaps and waits are the times
    between two kernels of the main stream, which has the most: up to 5 µs, and above.
    """
    events = trace["traceEvents"]
    steps = [
        e
        for e in events
        if e.get("cat") == "user_annotation" and e["name"].startswith("ProfilerStep")
    ]
    begin = min(e["ts"] for e in steps)
    end = max(e["ts"] + e["dur"] for e in steps)
    launched = {
        e.get("args", {}).get("correlation")
        for e in events
        if e.get("cat") in ("cuda_runtime", "cuda_driver") and begin <= e["ts"] < end
    }
    ran = [
        e
        for e in events
        if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
        and e["args"].get("correlation") in launched
    ]
    table: dict[str, tuple[float, float]] = {}
    for e in ran:
        kind = next(kind for kind, pattern in CLASS_PATTERNS if re.search(pattern, e["name"]))
        kind = LOSS if kind == "Triton, other" and is_loss(e["name"]) else kind
        kind = kind if e["cat"] == "kernel" else "copies and fills"
        ms, launches = table.get(kind, (0, 0))
        table[kind] = ms + e["dur"] / 1e3 / len(steps), launches + 1 / len(steps)
    main = collections.Counter(e["args"].get("stream") for e in ran).most_common(1)[0][0]
    times = sorted((e["ts"], e["ts"] + e["dur"]) for e in ran if e["args"].get("stream") == main)
    between = [(b[0] - a[1]) / 1e3 / len(steps) for a, b in itertools.pairwise(times)]
    gaps = sum(ms for ms in between if ms * len(steps) <= 5e-3)
    return table, gaps, sum(between) - gaps


class Cost(NamedTuple):
    kind: str  # one of CLASSES
    name: str
    seconds: float


NO_COST = [0, 0, 0, 0]  # bytes, special functions, FLOPs in fp8, FLOPs in bf16


def costs(events: list[Event], rates: Rates, ranks: int) -> dict[int, Cost]:
    """Return {index in events: its cost on the device}.

    rank0.py adds lines to the log: COST, before a Triton kernel, and OP, with an operator's bytes,
    after its eager kernels. The kernels of an operator share its bytes equally. Lines of several
    threads do not mix, because one thread launches at a time: autograd's, while the main thread
    waits.
    """
    attention = 0
    stated = NO_COST
    eager = []
    out = {}
    others = (ranks - 1) / ranks
    for i, (_, what, name, numbers) in enumerate(events):
        kind = ""
        seconds = 0.0
        latency = rates.kernel_s
        if what in ("STEP", "ATTENTION"):
            attention = numbers[-1]
        elif what == "COST":
            stated = numbers
        elif what == "OP":
            for j in eager:
                out[j] = out[j]._replace(
                    name=name, seconds=out[j].seconds + numbers[0] / len(eager) / rates.bytes
                )
            eager = []
        elif what in ("TRITON", "KERNEL"):
            moved, special, fp8, bf16 = stated
            stated = NO_COST
            kind = "eager" if what == "KERNEL" else LOSS if is_loss(name) else "Triton, other"
            kind = "matmuls" if bf16 else "matmuls in fp8" if fp8 else kind
            flops = fp8 / rates.fp8 / rates.triton_fp8 + bf16 / rates.bf16 / rates.triton
            seconds = max(moved / rates.bytes, special / rates.special, flops)
            if re.search(ATTENTION, name):
                kind = "attention"
                per_flop = 2.5 / rates.flash_backward if "bwd" in name.lower() else 1 / rates.flash
                # those without matmuls
                seconds += per_flop * attention * (not re.search("dot_do|convert|process", name))
            if what == "KERNEL":
                eager.append(i)
        elif what == "GEMM":
            flops, width = {"fp8": (rates.fp8, 1), "fp32": (rates.fp32, 4)}.get(
                name, (rates.bf16, 2)
            )
            kind = "matmuls in fp8" if name == "fp8" else "matmuls"
            name += " " + " x ".join(map(str, numbers))
            seconds = matmul_seconds(*numbers, width, flops, rates)
        elif what in ("COPY", "FILL"):
            kind = "copies and fills"
            seconds = numbers[0] * (1 + (what == "COPY")) / rates.bytes
        elif what == "NCCL":
            sent = numbers[0] * {"exchange": 1, "all-reduce": 2 * others}.get(name, others)
            kind = "collectives"
            seconds = sent / rates.link
            latency = rates.collective_s
        if kind:
            out[i] = Cost(kind, name, latency + seconds)
    return out


@dataclasses.dataclass
class Step:
    windows: str
    number: int
    start_s: float  # on the main stream
    ms: float = 0.0
    waiting_ms: float = 0.0  # the main stream waits for other streams
    gaps_ms: float = 0.0  # between kernels of the main stream
    costs: list[Cost] = dataclasses.field(default_factory=list)


def simulate(
    events: list[Event], cost: dict[int, Cost], gap_s: float, launch_s: float = 0.0
) -> list[Step]:
    """Simulate the streams, with a gap after each kernel. A step lasts on the main stream from its
    STEP line to the next one.

    launch_s: what the host takes for a launch; no kernel starts before its own. Where the host
    waits for the GPU, later launches do too.
    """
    host = 0.0
    # {stream: when its work so far is done}
    time: dict[str, float] = collections.defaultdict(float)
    done: dict[int, float] = {}  # {event: when it completes}
    # {communicator: when its collectives so far are done}
    free: dict[int, float] = collections.defaultdict(float)
    steps: list[Step] = []
    inside = False
    main = "0"

    def wait(until: float) -> None:
        if inside and e.stream == main:
            steps[-1].waiting_ms += 1e3 * max(0.0, until - time[main])
        time[e.stream] = max(time[e.stream], until)

    for i, e in enumerate(events):
        if e.kind in ("STEP", "END"):
            if steps:  # work between two steps counts for the first
                steps[-1].ms = 1e3 * (time[main] - steps[-1].start_s)
            if inside := e.kind == "STEP":
                steps.append(Step(e.name, e.numbers[0], time[main]))
        elif e.kind == "EVENT":
            done[e.numbers[0]] = time[e.stream]
        elif e.kind == "WAIT":
            wait(done.get(e.numbers[0], 0.0))
        elif e.kind == "SYNC":  # of an event, or of a stream
            host = max(host, done.get(int(e.stream, 16), time.get(e.stream, 0.0)))
        elif i in cost:
            host += launch_s
            wait(host)
            if e.kind == "NCCL":
                wait(free[e.numbers[1]])
            time[e.stream] += cost[i].seconds + gap_s
            if e.kind == "NCCL":
                free[e.numbers[1]] = time[e.stream]
            if inside:
                steps[-1].costs.append(cost[i])
                steps[-1].gaps_ms += 1e3 * gap_s * (e.stream == main)
    return steps


def weigh(steps: list[Step], plan: dict[str, int]) -> list[float]:
    """Return the weight of each step in a mean over the plan {windows: steps}. Half of a stage's
    steps are even."""
    alike = collections.Counter((step.windows, step.number % 2) for step in steps)
    halves = collections.Counter(windows for windows, _ in alike)
    weights = [
        plan.get(step.windows, 0) / halves[step.windows] / alike[step.windows, step.number % 2]
        for step in steps
    ]
    return weights if any(weights) else [1.0] * len(steps)


def mean_costs(
    steps: list[Step], weights: list[float], key: Callable[[Cost], str]
) -> dict[str, tuple[float, float]]:
    """Return {key: (ms, launches)} per step, as weighted means over the steps."""
    table: dict[str, tuple[float, float]] = collections.defaultdict(lambda: (0.0, 0.0))
    for step, weight in zip(steps, weights):
        for cost in step.costs:
            ms, launches = table[key(cost)]
            table[key(cost)] = (
                ms + 1e3 * cost.seconds * weight / sum(weights),
                launches + weight / sum(weights),
            )
    return dict(table)
