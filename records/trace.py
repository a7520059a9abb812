#!/usr/bin/env python3
"""Measure how much communication overlaps with compute, per step and in total, from torch.profiler
traces.

    python records/trace.py rank0.json.gz                       one rank
    python records/trace.py rank*.json.gz                       several ranks: a table for each and one for all
    python records/trace.py before.json.gz --vs after.json.gz   compare two versions, each of one rank or several
    ... --json                                                  print the same figures as JSON
    ... --picture FILE.png                                      draw a step of the first rank of each version

Reads .json and .json.gz of NVIDIA GPUs, and of CPUs. A trace of 10 MB takes 0.6 s and 90 MiB. Exit
status: 0 the figures are printed, 2 the input cannot be used (stderr states why).

Definitions
    GPU op         An event with ph X and cat kernel, gpu_memcpy or gpu_memset. A kernel with "nccl" in its name is
                   communication, every other kernel is compute. Copies and fills count only as not idle.
    launch         The cuda_runtime or cuda_driver event with the op's args.correlation. An op without a launch was
                   enqueued before recording began. Such orphans are counted, named and excluded from all figures.
    step           A ProfilerStep#N mark. An op belongs to the step that contains its launch, since the GPU runs far
                   behind the host.
    busy           Length of the union of intervals. overlap = |comm ∩ compute|, exposed = |comm| - overlap,
                   idle = span - |all ops|. The span runs from the start of the first op to the end of the last; in the
                   total it includes the gaps between steps. Each GPU is measured by itself, then GPUs are summed.
    B              Start of the first nccl:*reduce_scatter* annotation - start of the first Optimizer.step#*, or, where
                   torch recorded none, of the first range `step` in a trace with a range `backward`. Negative:
                   launched before the optimizer step.
    D              Start of the first reduce-scatter kernel - end of the last other op launched outside the main thread
                   (the one with the ProfilerStep marks), which is autograd's work. Negative: during backward.
    from backward  Reduce-scatter kernels launched outside the main thread.

A trace without GPU ops (CPU and gloo) shows when the host launched, by the ranges `launch ...`,
`wait ...`, `backward` and `step`, or else by torch's own events: c10d::* and gloo:* for launches,
the span of autograd's functions for backward, Optimizer.step#* for the step. `after backward end`
is the first launch relative to the end of backward."""

import argparse
import contextlib
import gzip
import itertools
import json
import os
import re
import sys
import textwrap
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import numpy as np

import logs
import pages
from logs import UserError, require

# Reading
# --------------------------------------------------------------------------------------------------


class Span(NamedTuple):
    """A host event. Times are integer nanoseconds: µs since 1970 in a float would lose the
    fraction."""

    start: int
    end: int
    name: str


class Op(NamedTuple):
    """A GPU op. kind is "compute", "memory" or a collective; thread is the launching one, None for
    the main thread."""

    start: int
    end: int
    name: str
    kind: str
    device: str
    thread: object
    launched: int = 0


NOWHERE = -1  # the step of an event outside all steps
MAX_TIME = 1 << 62  # ns, the year 2116: the sum of a time and a duration fits in 64 bits

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
HOST_CATEGORIES = {"cpu_op", "user_annotation"}
STEP_MARK = re.compile(r"ProfilerStep#(\d{1,18})")
HOST_NAMES = re.compile(
    r"ProfilerStep#\d+|Optimizer\.step#|nccl:|gloo:|c10d::|autograd::engine::evaluate_function"
    r"|(?:launch|wait|update|gather) |(forward|backward|step)$"
)
COLLECTIVES = {
    "reducescatter": "reduce-scatter",
    "allgather": "all-gather",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "send": "send-recv",
    "recv": "send-recv",
}  # matched in this order
LOCAL_KINDS = ("compute", "memory")
KINDS = [*LOCAL_KINDS, *dict.fromkeys(COLLECTIVES.values()), "other"]


def collective(name):
    """Return the kind of 'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(…)' or
    'nccl:_reduce_scatter_base'."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for key, kind in COLLECTIVES.items() if key in letters), "other")


def members(value):
    """Return value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def nanoseconds(microseconds):
    """Convert a JSON number of µs (an int, or the text of a fraction) to exact ns. ValueError if
    it is not a time."""
    with contextlib.suppress(ArithmeticError):
        value = Decimal(microseconds if type(microseconds) in (int, str) else "none")
        if (
            value.is_finite()
            and value.adjusted() < 18
            and abs(time := round(value.scaleb(3))) < MAX_TIME
        ):
            return time
    raise ValueError


@dataclass
class Trace:
    path: str
    rank: object = None  # from the file, if stated
    world_size: object = None
    gpu: str = ""
    steps: dict = field(default_factory=dict)  # N → its marks, [Span]
    # N → other host events used, [Span] by start
    host: dict = field(default_factory=lambda: defaultdict(list))
    # N → [Op] launched inside the step
    ops: dict = field(default_factory=lambda: defaultdict(list))
    outside: list = field(default_factory=list)  # [Op] launched in no step
    orphans: list = field(default_factory=list)  # [Op] without a launch
    broken: int = 0  # relevant events without a usable name, time or duration

    def all_ops(self):
        return [op for number in self.steps for op in self.ops[number]]


def load(path):
    """Return (events, other keys) of a Chrome trace file. Fractions stay text, for exact times."""
    try:
        with logs.open_unpacked(path) as file:
            text = file.read().decode("utf-8-sig", "replace")
        content = json.loads(text, strict=False, parse_float=str, parse_constant=str)
        events = content.pop("traceEvents", None) if isinstance(content, dict) else content
        if not isinstance(events, list):
            raise ValueError('neither a list of events nor an object with a list "traceEvents"')
        return events, members(content)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise UserError(
            f"{path}: not a complete Chrome trace ({error}); record it again with torch.profiler's "
            "export_chrome_trace, or copy the whole file again"
        ) from None
    except OSError as error:
        raise UserError(
            f"{path}: {error.strerror or error}; name a torch.profiler trace, .json or .json.gz"
        ) from None


def read(path):
    """Read a trace file and assign every GPU op to its launch and its step."""
    events, header = load(path)
    # marked: (thread, mark)
    trace = Trace(path)
    host = []
    marks = defaultdict(list)
    marked = []
    ops = []  # (correlation, Op without its thread)
    launches = {}  # correlation → (start, thread)
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = str(event.get("cat"))
        name = event.get("name")
        arguments = members(event.get("args"))
        on_gpu = category in GPU_CATEGORIES
        is_launch = category in LAUNCH_CATEGORIES
        on_host = category in HOST_CATEGORIES and HOST_NAMES.match(str(name))
        correlation = arguments.get("correlation")
        if not isinstance(correlation, int) or correlation <= 0:  # 0: unknown
            correlation = None
        if not (on_gpu or on_host or is_launch and correlation is not None):
            continue
        try:
            start = nanoseconds(event.get("ts"))
            duration = nanoseconds(event.get("dur"))
            if duration < 0 or not isinstance(name, str):
                raise ValueError
        except ValueError:
            trace.broken += 1
            continue
        end = start + duration
        thread = (str(event.get("pid")), str(event.get("tid")))
        if is_launch:
            # a runtime call and the driver call inside it may share a number: the outer one, which
            # starts first, counts
            if correlation not in launches or start < launches[correlation][0]:
                launches[correlation] = start, thread
        elif on_gpu:
            kind = "memory" if category != "kernel" else "compute"
            device = str(arguments.get("device", thread[0]))
            if category == "kernel" and "nccl" in name.lower():
                kinds = map(collective, (name, str(arguments.get("Collective name"))))
                kind = next((kind for kind in kinds if kind != "other"), "other")
            ops.append((correlation, Op(start, end, sys.intern(name), kind, device, None)))
        elif mark := STEP_MARK.fullmatch(name):
            marks[int(mark[1])].append(Span(start, end, name))
            marked.append((thread, marks[int(mark[1])][-1]))
        else:
            host.append(Span(start, end, sys.intern(name)))

    main_threads = {thread for thread, _ in marked}
    ranks = {pid for pid, _ in main_threads} | {
        launches[correlation][1][0] for correlation, _ in ops if correlation in launches
    }
    twice = [
        thread
        for thread, group in itertools.groupby(sorted(marked), lambda mark: mark[0])
        for a, b in itertools.pairwise(group)
        if b[1].start < a[1].end
    ]
    if main_threads and len(ranks) > 1 or twice:
        whose = (
            f"processes {', '.join(sorted(ranks)[:4])}"
            if len(ranks) > 1
            else "steps that overlap on one thread"
        )
        raise UserError(
            f"{path}: holds several ranks ({whose}), whose launches cannot be told apart; give the"
            " file of each rank"
        )
    trace.steps = {step: sorted(marks[step]) for step in sorted(marks)}
    host.sort()
    for span, step in zip(host, steps_at([span.start for span in host], trace.steps)):
        trace.host[step].append(span)
    linked = [(op, *launches[correlation]) for correlation, op in ops if correlation in launches]
    trace.orphans = [op for correlation, op in ops if correlation not in launches]
    for (op, start, thread), step in zip(
        linked, steps_at([start for _, start, _ in linked], trace.steps)
    ):
        op = op._replace(thread=None if thread in main_threads else thread, launched=start)
        (trace.outside if step == NOWHERE else trace.ops[step]).append(op)
    distributed = members(header.get("distributedInfo"))
    devices = header.get("deviceProperties")
    trace.rank = distributed.get("rank")
    trace.world_size = distributed.get("world_size")
    if isinstance(devices, list) and devices:
        trace.gpu = str(members(devices[0]).get("name", ""))
    return trace


def steps_at(times, steps):
    """Return N of the step whose mark contains each time, or NOWHERE. Of several marks the last to
    begin counts."""
    times = np.array(times, "i8")
    found = np.full(len(times), NOWHERE)
    for mark, step in sorted((mark, step) for step, marks in steps.items() for mark in marks):
        found[(mark.start <= times) & (times < mark.end)] = step
    return found.tolist()


# Figures
# --------------------------------------------------------------------------------------------------


def union(*groups):
    """Return the union of the intervals in lists of Span or Op as disjoint intervals in order: i8
    [n, 2], ns."""
    times = np.array([item[:2] for group in groups for item in group], "i8").reshape(-1, 2)
    start, end = times[np.argsort(times[:, 0])].T
    reach = np.maximum.accumulate(end)
    gap = start[1:] > reach[:-1]  # before the next interval begins
    return np.column_stack(
        [np.append(start[:1], start[1:][gap]), np.append(reach[:-1][gap], reach[-1:])]
    )


def busy(*groups):
    """Return the length in ns of the union of the intervals."""
    return int(np.diff(union(*groups)).sum())


def overlap(some, others):
    """Return the length in ns of the intersection of two unions of intervals."""
    return busy(some) + busy(others) - busy(some, others)


def outside(some, others):
    """Return the part of a union of intervals that no interval of `others` covers: [(start, end)]
    in order."""
    gaps = np.concatenate([[-MAX_TIME], union(others).ravel(), [MAX_TIME]]).reshape(-1, 2)
    return [
        (max(a, c), min(b, d)) for a, b in union(some) for c, d in gaps if max(a, c) < min(b, d)
    ]


def milliseconds(nanoseconds):
    return nanoseconds / 1e6


def of_kind(ops, *kinds):
    return [op for op in ops if op.kind in kinds]


def communication(ops):
    return of_kind(ops, *KINDS[len(LOCAL_KINDS) :])


def gpu_figures(ops):
    """Return busy times in ms, measured on each GPU and then summed, and counts of ops."""
    sums = Counter(
        dict.fromkeys(("span", "busy", "compute", "comm", "overlap", "exposed", "idle"), 0)
    )
    for device in {op.device for op in ops}:
        group = [op for op in ops if op.device == device]
        compute = of_kind(group, "compute")
        comm = communication(group)
        sums.update(
            span=max(op.end for op in group) - min(op.start for op in group),
            busy=busy(group),
            compute=busy(compute),
            comm=busy(comm),
            overlap=overlap(comm, compute),
        )
    sums.update(exposed=sums["comm"] - sums["overlap"], idle=sums["span"] - sums["busy"])
    kinds = Counter(op.kind for op in communication(ops))
    return {
        **{f"{key}_ms": milliseconds(time) for key, time in sums.items()},
        "gpu_ops": len(ops),
        "comm_kernels": dict(sorted(kinds.items())),
        "reduce_scatters_from_backward": sum(
            op.thread is not None for op in of_kind(ops, "reduce-scatter")
        ),
    }


def named(host, *prefixes):
    return [span for span in host if span.name.startswith(prefixes)]


def first_start(spans):
    return min((span.start for span in spans), default=None)


def apart(time, other):
    """Return time - other in ms, or None if either is None."""
    return None if time is None or other is None else milliseconds(time - other)


def optimizer_steps(host):
    """Return torch's optimizer-step annotations, or else the ranges `step` of a trace with ranges
    `backward`.

    A range `step` that contains a backward is a whole training step, not the optimizer's."""
    backward = [span.start for span in host if span.name == "backward"]
    return named(host, "Optimizer.step#") or [
        span
        for span in host
        if span.name == "step"
        and backward
        and not any(span.start <= start < span.end for start in backward)
    ]


def gpu_leads(ops, host):
    """Return B and D of one step in ms, None where the step lacks one of the two events."""
    annotations = [span for span in named(host, "nccl:") if "reduce_scatter" in span.name]
    of_backward = [op.end for op in of_kind(ops, *LOCAL_KINDS) if op.thread is not None]
    return {
        "b_ms": apart(first_start(annotations), first_start(optimizer_steps(host))),
        "d_ms": apart(first_start(of_kind(ops, "reduce-scatter")), max(of_backward, default=None)),
    }


def backward_spans(host):
    """Return the ranges `backward`, or else one span from autograd's first function to its last."""
    functions = named(host, "autograd::engine::evaluate_function")
    whole = [functions[0]._replace(end=max(span.end for span in functions))] if functions else []
    return [span for span in host if span.name == "backward"] or whole


def gradient_launches(host):
    """Return where the host starts to send gradients: the program's ranges `launch ...`, or else
    torch's events."""
    recorded = (
        [
            span
            for span in named(host, prefix)
            if collective(span.name) in ("reduce-scatter", "all-reduce")
        ]
        for prefix in ("c10d::", "gloo:", "nccl:")
    )
    return named(host, "launch ") or next(filter(None, recorded), [])


def host_figures(host):
    """Return launches and exposed waits of one step, and the first launch relative to the last
    backward (the one whose gradients are sent) and to the optimizer step."""
    launches = gradient_launches(host)
    backward = backward_spans(host)
    waits = named(host, "wait ")
    first = first_start(launches)
    last = max(backward, default=None)
    return {
        "launches": len(launches),
        "launches_in_backward": (
            sum(
                any(span.start <= launch.start < span.end for span in backward)
                for launch in launches
            )
            if backward
            else None
        ),
        "wait_ms": milliseconds(sum(span.end - span.start for span in waits)) if waits else None,
        "launch_after_backward_start_ms": apart(first, last and last.start),
        "launch_after_backward_end_ms": apart(first, last and last.end),
        "launch_after_step_start_ms": apart(first, first_start(optimizer_steps(host))),
    }


def check(trace):
    """Raise UserError if the trace says nothing about communication. The message says how to
    record one that does."""
    inside = trace.all_ops()
    linked = len(inside) + len(trace.outside)
    gpu_ops = linked + len(trace.orphans)
    ranks = "record a run of two ranks or more"
    gpu_comm = communication([*inside, *trace.outside, *trace.orphans])
    host_comm = any(named(host, "launch ", "gloo:", "c10d::") for host in trace.host.values())
    for wrong, problem in (
        (
            not trace.steps,
            "no ProfilerStep#N mark; call the profiler's step() after every training step",
        ),
        (
            gpu_ops and not linked,
            f"none of its {gpu_ops} GPU ops has its launch in the trace; record with"
            " ProfilerActivity.CPU as well",
        ),
        (
            gpu_ops and not inside,
            f"none of its {gpu_ops} GPU ops was launched inside a step; record whole steps",
        ),
        (
            gpu_ops and not gpu_comm,
            f'no communication: none of its {gpu_ops} GPU ops is a kernel with "nccl" in its'
            f" name; {ranks}",
        ),
        (
            not gpu_ops and not host_comm,
            "no communication: neither GPU ops nor ranges `launch ...`, gloo:* or c10d::*;"
            f" {ranks}",
        ),
    ):
        require(not wrong, f"{trace.path}: {problem}")


def analyse(trace):
    """Return all figures of a trace, as --json prints them."""
    ops = trace.all_ops()
    on_host = not ops or any(named(host, "launch ") for host in trace.host.values())
    steps = []
    for number, marks in trace.steps.items():
        figures = {"step": number, "step_ms": milliseconds(busy(marks))}
        host = trace.host[number]
        if ops:
            figures |= gpu_figures(trace.ops[number]) | gpu_leads(trace.ops[number], host)
        if on_host:
            figures |= host_figures(host)
        steps.append(figures)
    total = {"steps": len(steps), "step_ms": sum(figures["step_ms"] for figures in steps)}
    if ops:
        total |= gpu_figures(ops)
    if on_host:
        for key in ("launches", "launches_in_backward", "wait_ms"):
            values = [figures[key] for figures in steps if figures[key] is not None]
            total[key] = sum(values) if values else None
    return {
        "trace": trace.path,
        "rank": trace.rank,
        "world_size": trace.world_size,
        "gpu": trace.gpu,
        "device": "gpu" if ops else "cpu",
        "steps": steps,
        "total": total,
        "orphans": {
            "gpu_ops": len(trace.orphans),
            "comm_kernels": len(communication(trace.orphans)),
            "names": dict(Counter(op.name for op in trace.orphans).most_common()),
        },
        "notes": notes(trace, ops, steps),
    }


def notes(trace, ops, steps):
    """Return the lines that a reader needs before trusting the figures."""
    found = []
    if trace.outside:
        found.append(
            f"excluded: {logs.plural(len(trace.outside), 'GPU op')} launched between the steps "
            f"({len(communication(trace.outside))} of them communication)"
        )
    if trace.broken:
        found.append(
            f"excluded: {logs.plural(trace.broken, 'event')} without a usable name, time or"
            " duration"
        )
    devices = {op.device for op in ops}
    if len(devices) > 1:
        found.append(f"ops on {len(devices)} GPUs: times are measured on each and summed")
    if ops:
        others = {op.thread for op in ops} - {None}
        if len(others) > 1:
            found.append(
                f"{len(others)} threads other than the main one launched GPU ops; all count as"
                " autograd's"
            )
        for key, title, lacks in (
            ("b_ms", "B", "no reduce-scatter annotation or no optimizer step"),
            ("d_ms", "D", "no reduce-scatter kernel or no launch outside the main thread"),
        ):
            without = [str(figures["step"]) for figures in steps if figures[key] is None]
            if without:
                where = "every step" if len(without) == len(steps) else "step " + ", ".join(without)
                found.append(f"{where}: no {title} ({lacks})")
    return found


# Tables
# --------------------------------------------------------------------------------------------------

KERNELS = "comm_kernels "  # prefix of the figures that count kernels of one kind
GPU_TITLES = {
    "step_ms": "host step",
    "span_ms": "GPU span",
    "compute_ms": "compute",
    "comm_ms": "comm",
    "overlap_ms": "overlap",
    "exposed_ms": "exposed",
    "idle_ms": "GPU idle",
    "b_ms": "B",
    "d_ms": "D",
    **{KERNELS + kind: kind for kind in sorted(KINDS)},
    "reduce_scatters_from_backward": "from backward",
}
HOST_TITLES = {
    "step_ms": "host step",
    "launches": "launches",
    "launches_in_backward": "in backward",
    "launch_after_backward_start_ms": "after backward start",
    "launch_after_backward_end_ms": "after backward end",
    "launch_after_step_start_ms": "after step start",
    "wait_ms": "wait",
}
TITLES = GPU_TITLES | HOST_TITLES
SIGNED = {"b_ms", "d_ms", *(key for key in HOST_TITLES if key.startswith("launch_after"))}
# compared for each step
BY_STEP = ("exposed_ms", "b_ms", "d_ms", "launch_after_backward_end_ms", "wait_ms")


def flat(figures):
    """Return the figures with one key for each kind of kernel, 0 for absent kinds."""
    counts = figures.get("comm_kernels")
    spread = {} if counts is None else {KERNELS + kind: counts.get(kind, 0) for kind in KINDS}
    return {key: value for key, value in figures.items() if key != "comm_kernels"} | spread


def columns(flats):
    """Return {"gpu" or "cpu": keys} for the tables: the keys for which any of these flat figures
    has a value."""
    present = {
        key
        for figures in flats
        for key, value in figures.items()
        if value is not None and (value or not key.startswith(KERNELS))
    }
    if KERNELS + "reduce-scatter" not in present:
        present.discard("reduce_scatters_from_backward")
    return {
        device: [key for key in titles if key in present]
        for device, titles, telling in (
            ("gpu", GPU_TITLES, "span_ms"),
            ("cpu", HOST_TITLES, "launches"),
        )
        if telling in present
    }


def cell(key, value, signed=False):
    """Format a figure for a table. A mean of counts has one decimal."""
    if value is None:
        return "-"
    sign = "+" * (signed or key in SIGNED)
    digits = 3 if key.endswith("_ms") else int(value != int(value))
    return f"{value:{sign}.{digits}f}"


def table(rows):
    return "\n".join(logs.columns(rows, True))


def tables(named):
    """Return {"gpu" or "cpu": table} from [(row name, flat figures)]."""
    return {
        device: table(
            [
                ["ms", *(TITLES[key] for key in keys)],
                *(
                    [name, *(cell(key, figures.get(key)) for key in keys)]
                    for name, figures in named
                ),
            ]
        )
        for device, keys in columns([figures for _, figures in named]).items()
    }


def show(analyses, others, comparison):
    """Return the printed text: a table for each trace and one for all, or the comparison of two
    sets."""

    def of_steps(analysis):
        steps = [(f"step {figures['step']}", flat(figures)) for figures in analysis["steps"]]
        return [*steps, ("total", flat(analysis["total"]))]

    of_all = []
    rows = {}
    if others:
        rows = side_by_side(comparison, len(analyses), len(others))
    elif len(analyses) > 1 and len({analysis["device"] for analysis in analyses}) == 1:
        of_all = [
            (os.path.basename(analysis["trace"]), flat(analysis["total"])) for analysis in analyses
        ]
        of_all.append(("mean", mean([figures for _, figures in of_all])))
    return pages.show(
        "trace.txt.jinja",
        sets=(analyses, others),
        of_all=of_all,
        of_steps=of_steps,
        tables=tables,
        table=table,
        comparison=comparison,
        **rows,
    )


# Comparison of two sets
# --------------------------------------------------------------------------------------------


def mean(flats):
    """Return the mean of every figure over the flats that have it, None if none has."""
    found = {
        key: [figures[key] for figures in flats if figures.get(key) is not None]
        for key in itertools.chain(*flats)
    }
    return {key: sum(values) / len(values) if values else None for key, values in found.items()}


def set_means(analyses):
    """Return the means over the ranks of a set: (total, {N: figures})."""
    by_step = defaultdict(list)
    for analysis in analyses:
        for figures in analysis["steps"]:
            by_step[figures["step"]].append(flat(figures))
    return mean([flat(analysis["total"]) for analysis in analyses]), {
        n: mean(by_step[n]) for n in sorted(by_step)
    }


def compared(left, right):
    """Return {key: {"a", "b", "difference"}} of two flat figures."""
    pairs = {
        key: (left.get(key), right.get(key))
        for key in itertools.chain(*columns([left, right]).values())
    }
    return {
        key: {"a": a, "b": b, "difference": None if None in (a, b) else b - a}
        for key, (a, b) in pairs.items()
    }


def compare(left, right):
    """Compare the means over the ranks of two sets. Steps are paired by number, or in order if
    none is common."""
    device = left[0]["device"]
    for analysis in (*left, *right):
        require(
            analysis["device"] == device,
            f"{analysis['trace']}: a {analysis['device'].upper()} trace, but "
            f"{left[0]['trace']} is a {device.upper()} trace; compare traces of the same device",
        )
    total_a, steps_a = set_means(left)
    total_b, steps_b = set_means(right)
    common = [(n, n) for n in steps_a if n in steps_b]
    pairs = common or list(zip(steps_a, steps_b))
    found = [] if common else ["the sets have no common step number: steps are paired in order"]
    if len(steps_a) != len(steps_b):
        found.append(
            f"a has {logs.plural(len(steps_a), 'step')}, b has {len(steps_b)}: compare the steps,"
            " not the totals"
        )
    return {
        "a": [analysis["trace"] for analysis in left],
        "b": [analysis["trace"] for analysis in right],
        "total": compared(total_a, total_b),
        "steps": [{"a_step": a, "b_step": b, **compared(steps_a[a], steps_b[b])} for a, b in pairs],
        "notes": found,
    }


def side_by_side(comparison, *ranks):
    """Return the rows of both tables of a comparison, and the devices whose figures they show."""
    total = comparison["total"]
    steps = comparison["steps"]
    over = f", mean of {ranks[0]} and {ranks[1]} ranks" if sum(ranks) > 2 else ""
    totals = [(f"total{over}", "a", "b", "b - a", "")]
    for key, pair in total.items():
        a, b, difference = pair.values()
        totals.append(
            (
                TITLES[key] + ", ms" * key.endswith("_ms"),
                cell(key, a),
                cell(key, b),
                cell(key, difference, signed=True),
                f"{difference / a:+.1%}" if a and difference is not None else "",
            )
        )
    shown = [key for key in BY_STEP if any(key in step for step in steps)]
    by_step = [
        ["step, ms", *(f"{TITLES[key]} {side}" for key in shown for side in ("a", "b", "b - a"))]
    ]
    for step in steps:
        name = " | ".join(dict.fromkeys((str(step["a_step"]), str(step["b_step"]))))
        pairs = [(key, step.get(key, {})) for key in shown]
        by_step.append(
            [
                name,
                *(
                    cell(key, pair.get(side), signed=side == "difference")
                    for key, pair in pairs
                    for side in ("a", "b", "difference")
                ),
            ]
        )
    return {"totals": totals, "by_step": by_step, "devices": columns([total])}


# Picture
# --------------------------------------------------------------------------------------------------

BACKWARD = "end of backward"
SENT = "first gradients sent"
STEP = "optimizer step"


def lanes(trace, number):
    """Return what is drawn of a step: compute, communication [Op], what of it is exposed [(start,
    end)], {event: time or None}.

    Of a GPU trace: the first GPU; STEP is the first op that the optimizer launched. On a CPU a
    bucket is in flight until the host has waited for it."""
    ops = trace.ops[number]
    host = trace.host[number]
    begun = first_start(optimizer_steps(host))
    if ops:
        device = min(op.device for op in ops)
        ops = [op for op in ops if op.device == device]
        local = of_kind(ops, *LOCAL_KINDS)
        compute = of_kind(ops, "compute")
        comm = communication(ops)
        return (
            compute,
            comm,
            outside(comm, compute),
            {
                BACKWARD: max((op.end for op in local if op.thread is not None), default=None),
                SENT: first_start(of_kind(comm, "reduce-scatter", "all-reduce")),
                STEP: first_start(
                    op
                    for op in local
                    if begun is not None and op.thread is None and op.launched >= begun
                ),
            },
        )
    backward = backward_spans(host)
    waits = named(host, "wait ")
    ends = {span.name: span.end for span in waits}
    last = max(mark.end for mark in trace.steps[number])
    flights = [
        (span.start, ends.get(f"wait {span.name.removeprefix('launch ')}", last), span.name, kind)
        for kind, prefix in (("reduce-scatter", "launch "), ("all-gather", "gather "))
        for span in named(host, prefix)
    ]
    comm = [
        Op(*one, "cpu", None)
        for one in flights or [(*span, collective(span.name)) for span in named(host, "gloo:")]
    ]
    compute = [*named(host, "forward"), *backward, *named(host, "update ")]
    return (
        compute,
        comm,
        [span[:2] for span in waits] or outside(comm, compute),
        {
            BACKWARD: max((span.end for span in backward), default=None),
            SENT: first_start(gradient_launches(host)),
            STEP: begun,
        },
    )


def draw(traces, comparison, path):
    """Draw a step of two Traces: the first that launched before the optimizer step in one of them
    only, or the first."""
    import picture  # first: it answers for the environment
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    def bars(items, zero=0):
        return [(milliseconds(item[0] - zero), milliseconds(item[1] - item[0])) for item in items]

    def exposed(*steps):
        return f"{sum(length for _, _, intervals, _ in steps for _, length in bars(intervals)) / len(steps):.2f} ms"

    leads = [
        (pair, pair.get("b_ms", pair.get("launch_after_step_start_ms", {})))
        for pair in comparison["steps"]
    ]
    pair = next(
        (
            pair
            for pair, lead in leads
            if lead.get("difference") is not None and (lead["a"] < 0) != (lead["b"] < 0)
        ),
        leads[0][0],
    )
    numbers = (pair["a_step"], pair["b_step"])
    sent = []
    steps = [lanes(trace, number) for trace, number in zip(traces, numbers)]
    zeros = [
        next((time for time in events.values() if time is not None), 0) for *_, events in steps
    ]
    for *_, events in steps:
        lead = apart(events[SENT], events[BACKWARD])
        sent.append(
            "-"
            if lead is None
            else f"{abs(lead):.3f} ms {'before' if lead < 0 else 'after'} the end of backward"
        )
    means = [exposed(*(lanes(trace, number) for number in trace.steps)) for trace in traces]
    title = (
        f"a sends the first gradients {sent[0]}, b {sent[1]}; exposed communication: a {means[0]},"
        f" b {means[1]} per step"
    )
    every, comm = (
        [
            bar
            for step, zero in zip(steps, zeros)
            for items in step[first:2]
            for bar in bars(items, zero)
        ]
        for first in (0, 1)
    )
    views = [(min(bar)[0], max(map(sum, bar))) for bar in (every, comm or every)]
    (start, end), (late, comm_end) = views
    edge = 0.02 * (end - start)
    views = [(start - edge, end + edge), (late - 0.1 * (comm_end - late), end)]
    views = views[: 2 if end - views[1][0] < 0.5 * (end - start) else 1]
    with rc_context(picture.STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(12, 4.4), layout="constrained")
        rows = figure.subplots(
            2, len(views), squeeze=False, sharex="col", width_ratios=(1, 2)[: len(views)]
        )
        for letter, trace, number, zero, step, row in zip(
            "ab", traces, numbers, zeros, steps, rows
        ):
            compute, comm, shaded, events = step
            lane = [
                ("exposed communication", shaded, (-0.5, 2), "#f4b9b3"),
                ("compute", compute, (0.6, 0.8), picture.COLORS[0]),
                *(
                    (kind, of_kind(comm, kind), (-0.4, 0.8), picture.COLORS[1 + i % 5])
                    for i, kind in enumerate(KINDS[2:])
                ),
            ]
            for axes, view in zip(row, views):
                for label, items, height, color in lane:
                    if items:
                        axes.broken_barh(
                            bars(items, zero), height, color=color, label=label, linewidth=0.3
                        )
                for (label, time), style in zip(events.items(), (":", "v", "--")):
                    if time is not None:
                        axes.plot(
                            [milliseconds(time - zero)] * 2,
                            (0.5, 0.5) if style == "v" else (-0.5, 1.5),
                            style,
                            color="black",
                            label=label,
                        )
                axes.set(
                    xlim=view,
                    ylim=(-0.5, 1.5),
                    yticks=(0, 1),
                    yticklabels=("communication", "compute") if axes is row[0] else (),
                )
            row[0].set_title(
                logs.printable(
                    f"{letter}: {os.path.basename(trace.path).partition('.')[0]}, step {number}"
                )
            )
            row[-1].set_title(f"exposed: {exposed(step)}", fontweight="normal", loc="right")
        for axes, what in zip(rows[-1], ("whole step", "its communication")):
            axes.set_xlabel(f"{what}, ms from the end of backward")
        figure.legend(
            *axes.get_legend_handles_labels(),
            loc="outside lower left",
            ncols=9,
            frameon=False,
            fontsize=9,
        )
        figure.suptitle("\n".join(textwrap.wrap(title, 112)), x=0.01, ha="left", fontweight="bold")
        figure.savefig(path, dpi=110)


# Command line
# --------------------------------------------------------------------------------------------------


def read_set(paths, problems):
    """Return the analyses of the usable files; append the messages of the others to `problems`.

    A recording given twice counts once, and its analysis notes the other path: no two ranks mark
    the same steps at the same nanoseconds."""
    found = {}
    for path in paths:
        try:
            trace = read(path)
            check(trace)
        except UserError as problem:
            problems.append(str(problem))
            continue
        recording = repr((trace.rank, trace.steps))
        if recording in found:
            found[recording]["notes"].append(f"{path} is the same recording: counted once")
        else:
            found[recording] = analyse(trace)
    return list(found.values())


def main(arguments=None):
    opening = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(
        description=opening[0],
        epilog=opening[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "traces",
        nargs="+",
        metavar="TRACE",
        type=logs.or_latest("*.trace.json.gz"),
        help="profiler trace of a rank, .json or .json.gz",
    )
    parser.add_argument(
        "--vs", nargs="+", metavar="TRACE", default=[], help="set b, compared with the first set, a"
    )
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    parser.add_argument(
        "--picture", metavar="FILE", help="draw a step of the first trace of each set, .png or .svg"
    )
    options = parser.parse_args(arguments)
    if options.picture and not options.vs:
        parser.error("--picture draws two versions: name the traces of the second after --vs")
    problems = []
    analyses = read_set(options.traces, problems)
    others = read_set(options.vs, problems)
    try:
        several = f"{len(problems)} files cannot be used: " if len(problems) > 1 else ""
        require(not problems, several + "; ".join(problems))
        comparison = compare(analyses, others) if others else None
        if options.picture:
            draw(
                [read(paths[0]) for paths in (options.traces, options.vs)],
                comparison,
                options.picture,
            )
    except (UserError, OSError, ValueError) as problem:
        return logs.refuse("trace.py", problem)
    if options.json:
        print(json.dumps({"traces": analyses, "vs": others, "comparison": comparison}, indent=1))
    else:
        print(show(analyses, others, comparison))
    return 0


if __name__ == "__main__":
    logs.run_main(main)
