#!/usr/bin/env python3
"""Measure, in torch.profiler traces, how long a GPU computes, communicates and idles in each step, and
how much communication overlaps with compute.

    python records/trace.py rank0.json.gz                       a table; of several ranks one for each
    python records/trace.py before.json.gz --vs after.json.gz   compare two versions
    ... --vs after.json.gz --picture FILE.png                   draw a step of each version

Reads .json and .json.gz of one NVIDIA GPU, and of CPUs. Exit status: 0 the figures are printed, 2 the
input cannot be used (stderr states why).

Definitions
    GPU op         An event with ph X and cat kernel, gpu_memcpy or gpu_memset. A kernel with "nccl" in its name is
                   communication, every other kernel is compute. Copies and fills count only as not idle.
    launch         The cuda_runtime or cuda_driver event with the op's args.correlation. An op without a launch was
                   enqueued before recording began; it is counted and excluded from all figures.
    step           A ProfilerStep#N mark. An op belongs to the step that contains its launch, since the GPU runs far
                   behind the host.
    compute, comm  Length of the union of intervals. overlap = |comm ∩ compute|, exposed = |comm| - overlap. span: from
                   the start of the first op to the end of the last, idle = span - |all ops|; in the total both
                   include the gaps between steps.
    sent           Start of the first kernel that sends gradients - end of the last other op launched outside the main
                   thread (the one with the ProfilerStep marks), which is autograd's work. Negative: during backward.

A trace without GPU ops (CPU and gloo) is read by the ranges `forward`, `backward` and `update ...` (compute),
`launch ...` and `gather ...` (communication, until the host has waited for it) and `wait ...` (exposed)."""

import argparse
import gzip
import json
import os
import re
import sys
import textwrap
import zlib
from collections import defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import numpy as np

import logs
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
    """A GPU op. kind is "compute", "memory" or a collective; in_main: the main thread launched it."""

    start: int
    end: int
    name: str
    kind: str
    in_main: bool = True
    launched: int = 0


SOURCES = "only traces of NVIDIA GPUs or CPUs by torch.profiler of torch 1.13 or newer are read"
NOWHERE = -1  # the step of an event outside all steps
MAX_TIME = 1 << 62  # ns, the year 2116: the sum of a time and a duration fits in 64 bits

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
HOST_CATEGORIES = {"cpu_op", "user_annotation"}
STEP_MARK = re.compile(r"ProfilerStep#(\d{1,18})")
HOST_NAMES = re.compile(
    r"ProfilerStep#\d+|Optimizer\.step#|(?:launch|wait|update|gather) |(forward|backward|step)$"
)
# categories, or a category and a name, of other profilers: AMD's, Intel's, and before torch 1.13
FOREIGN = re.compile(
    r"(Kernel|Memcpy|Memset|Runtime|Operator) |(hip|roc|xpu|mtia|privateuse1)_|cuda_\w+ (hip|roc)"
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
    """Return the kind of 'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(…)'."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for key, kind in COLLECTIVES.items() if key in letters), "other")


def members(value):
    """Return value if it is a JSON object, else an empty one."""
    return value if isinstance(value, dict) else {}


def nanoseconds(microseconds):
    """Convert a JSON number of µs, an int or a Decimal, to exact ns. ValueError if it is not a time."""
    if type(microseconds) not in (int, Decimal) or not -MAX_TIME < 1000 * microseconds < MAX_TIME:
        raise ValueError
    return round(1000 * microseconds)


@dataclass
class Trace:
    path: str
    steps: dict = field(default_factory=dict)  # N → its marks, [Span]
    # N → other host events used, [Span] by start
    host: dict = field(default_factory=lambda: defaultdict(list))
    # N → [Op] launched inside the step
    ops: dict = field(default_factory=lambda: defaultdict(list))
    on_gpu: bool = False
    notes: list = field(default_factory=list)


def load(path):
    """Return the events of a Chrome trace file. Fractions become Decimal, for exact times."""
    try:
        with logs.open_unpacked(path) as file:
            text = file.read().decode("utf-8-sig", "replace")
        content = json.loads(text, strict=False, parse_float=Decimal)
        events = content.get("traceEvents") if isinstance(content, dict) else content
        if not isinstance(events, list):
            raise ValueError('neither a list of events nor an object with a list "traceEvents"')
        return events
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
    """Read a trace file and assign every GPU op to its launch and its step. UserError if there are no
    steps, or none of its ops is in one."""
    trace = Trace(path)
    host = []
    marks = defaultdict(list)
    main_threads = set()
    ops = []  # (correlation, Op without its thread)
    launches = {}  # correlation → (start, thread)
    devices = set()
    for event in load(path):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category = str(event.get("cat"))
        name = str(event.get("name"))
        arguments = members(event.get("args"))
        require(not FOREIGN.match(f"{category} {name}"), f"{path}: {SOURCES}; found {category!r}")
        is_launch = category in LAUNCH_CATEGORIES
        on_host = category in HOST_CATEGORIES and HOST_NAMES.match(name)
        correlation = arguments.get("correlation")
        if not (category in GPU_CATEGORIES or on_host or is_launch):
            continue
        try:
            start = nanoseconds(event.get("ts"))
            end = start + nanoseconds(event.get("dur"))
            require(start <= end, "", ValueError)
        except ValueError:
            raise UserError(
                f"{path}: {name[:80]} has no time or duration; record it again"
            ) from None
        thread = (str(event.get("pid")), str(event.get("tid")))
        if is_launch:
            # a runtime call and the driver call inside it may share a number: the outer one, which
            # starts first, counts; 0: unknown
            if correlation and start < launches.get(correlation, (MAX_TIME,))[0]:
                launches[correlation] = start, thread
        elif on_host:
            span = Span(start, end, sys.intern(name))
            if mark := STEP_MARK.fullmatch(name):
                marks[int(mark[1])].append(span)
                main_threads.add(thread)
            else:
                host.append(span)
        else:
            kind = "memory" if category != "kernel" else "compute"
            devices.add(str(arguments.get("device", thread[0])))
            if category == "kernel" and "nccl" in name.lower():
                kinds = map(collective, (name, str(arguments.get("Collective name"))))
                kind = next((kind for kind in kinds if kind != "other"), "other")
            ops.append((correlation, Op(start, end, sys.intern(name), kind)))

    processes = {pid for pid, _ in main_threads} | {thread[0] for _, thread in launches.values()}
    require(
        marks,
        f"{path}: no ProfilerStep#N mark; call the profiler's step() after every step; {SOURCES}",
    )
    for found, what in ((processes, "processes"), (devices, "GPUs")):
        require(
            len(found) < 2,
            f"{path}: holds several ranks ({what} {logs.some(sorted(found))}), whose ops cannot be"
            " told apart; give the file of each rank",
        )
    trace.steps = {step: sorted(marks[step]) for step in sorted(marks)}
    host.sort()
    for span, step in zip(host, steps_at([span.start for span in host], trace.steps)):
        trace.host[step].append(span)
    linked = [(op, *launches[correlation]) for correlation, op in ops if correlation in launches]
    for (op, start, thread), step in zip(
        linked, steps_at([start for _, start, _ in linked], trace.steps)
    ):
        trace.ops[step].append(op._replace(in_main=thread in main_threads, launched=start))
    trace.on_gpu = any(trace.ops[step] for step in trace.steps)
    without = [op for correlation, op in ops if correlation not in launches]
    for left, why in ((without, "before recording began"), (trace.ops[NOWHERE], "between steps")):
        if left:
            trace.notes.append(
                f"excluded: {logs.plural(len(left), 'GPU op')} launched {why},"
                f" {len(communication(left))} of them communication"
            )
    require(
        trace.on_gpu or not ops,
        f"{path}: none of its {len(ops)} GPU ops was launched inside a step; record whole steps, with"
        " ProfilerActivity.CPU as well",
    )
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


BACKWARD = "end of backward"
SENT = "first gradients sent"
STEP = "optimizer step"


class Lanes(NamedTuple):
    """A step: compute, communication and copies, what of the communication is exposed [(start, end)],
    and {event: time or None}."""

    compute: list
    comm: list
    memory: list
    exposed: list
    events: dict


def lanes(trace, number):
    """Return the Lanes of a step. STEP of a GPU is the first op that the optimizer launched."""
    host = trace.host[number]
    begun = first_start(optimizer_steps(host))
    if trace.on_gpu:
        ops = trace.ops[number]
        local = of_kind(ops, *LOCAL_KINDS)
        compute = of_kind(ops, "compute")
        comm = communication(ops)
        late = [op for op in local if begun is not None and op.in_main and op.launched >= begun]
        events = {
            BACKWARD: max((op.end for op in local if not op.in_main), default=None),
            SENT: first_start(of_kind(comm, "reduce-scatter", "all-reduce")),
            STEP: first_start(late),
        }
        return Lanes(compute, comm, of_kind(ops, "memory"), outside(comm, compute), events)
    backward = named(host, "backward")
    waits = named(host, "wait ")
    launches = named(host, "launch ")
    ends = {span.name: span.end for span in waits}
    last = max(mark.end for mark in trace.steps[number])
    comm = [
        Op(span.start, ends.get(f"wait {span.name.partition(' ')[2]}", last), span.name, kind)
        for kind, spans in (("reduce-scatter", launches), ("all-gather", named(host, "gather ")))
        for span in spans
    ]
    events = {
        BACKWARD: max((span.end for span in backward), default=None),
        SENT: first_start(launches),
        STEP: begun,
    }
    compute = [*named(host, "forward"), *backward, *named(host, "update ")]
    return Lanes(compute, comm, [], [span[:2] for span in waits], events)


def figures(step_ns, compute, comm, memory, exposed):
    """Return the figures of a table, in ms."""
    times = union(compute, comm, memory).ravel()
    span = int(np.ptp(times)) if len(times) else 0
    shown = sum(end - start for start, end in exposed)
    found = {
        "step": step_ns,
        "span": span,
        "compute": busy(compute),
        "comm": busy(comm),
        "overlap": busy(comm) - shown,
        "exposed": shown,
        "idle": span - busy(compute, comm, memory),
    }
    return {name: milliseconds(time) for name, time in found.items()}


def analyse(trace):
    """Return {step's number or "total": figures}. The total adds the steps."""
    found = {}
    steps = [lanes(trace, number) for number in trace.steps]
    lengths = [busy(marks) for marks in trace.steps.values()]
    for number, length, step in zip(trace.steps, lengths, steps):
        lead = apart(step.events[SENT], step.events[BACKWARD])
        found[number] = {**figures(length, *step[:4]), "sent": lead}
    whole = [sum(parts, []) for parts in zip(*(step[:4] for step in steps))]
    return {**found, "total": {**figures(sum(lengths), *whole), "sent": None}}


# Tables
# --------------------------------------------------------------------------------------------------

LEGEND = "sent: the first gradients, relative to the end of backward; negative: earlier."


def cell(name, value, signed=False):
    sign = "+" * (signed or name == "sent")
    return "-" if value is None else f"{value:{sign}.3f}"


def show(trace):
    """Return the printed text of a trace."""
    found = analyse(trace)
    rows = [["ms", *found["total"]]]
    for number, values in found.items():
        name = number if number == "total" else f"step {number}"
        rows.append([name, *(cell(key, value) for key, value in values.items())])
    title = f"{logs.printable(os.path.basename(trace.path))}, {'GPU' if trace.on_gpu else 'CPU'}"
    return "\n".join([title, logs.columns(rows, True), *trace.notes, LEGEND])


def pair_steps(traces):
    """Return the pairs of steps of two traces: by number, or in order if none is common."""
    a, b = traces
    return [(n, n) for n in a.steps if n in b.steps] or [*zip(a.steps, b.steps)]


def compare(traces):
    """Return the printed text of two traces."""
    a, b = traces
    require(
        a.on_gpu == b.on_gpu,
        f"{a.path} and {b.path}: one is of a GPU, one of a CPU; compare traces of the same device",
    )
    found = [analyse(trace) for trace in traces]
    rows = [["ms", "step", "a", "b", "b - a", ""]]
    for key in found[0]["total"]:
        for pair in [*pair_steps(traces), ("total", "total")]:
            left, right = (values[step][key] for values, step in zip(found, pair))
            more = None if None in (left, right) else right - left
            part = f"{more / left:+.1%}" if more is not None and left and key != "sent" else ""
            name = " | ".join(dict.fromkeys(map(str, pair)))
            cells = [cell(key, left), cell(key, right), cell(key, more, True)]
            rows.append([key, name, *cells, part])
    notes = [f"{letter}: {trace.path}" for letter, trace in zip("ab", traces)]
    notes += [f"{trace.path}: {note}" for trace in traces for note in trace.notes]
    return "\n".join([*map(logs.printable, notes), logs.columns(rows, True), LEGEND])


# Picture
# --------------------------------------------------------------------------------------------------


def draw(traces, path):
    """Draw a step of two Traces: the first that sent gradients during backward in one of them only,
    or the first."""
    import picture  # first: it answers for the environment
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    def bars(items, zero=0):
        return [(milliseconds(item[0] - zero), milliseconds(item[1] - item[0])) for item in items]

    def exposed(trace, *steps):
        values = [found[trace][step]["exposed"] for step in steps]
        return f"{sum(values) / len(values):.2f} ms"

    def side(lead):
        return "-" if lead is None else "before" if lead < 0 else "after"

    found = [analyse(trace) for trace in traces]
    leads = {
        pair: [values[step]["sent"] for values, step in zip(found, pair)]
        for pair in pair_steps(traces)
    }
    differ = (pair for pair, lead in leads.items() if {*map(side, lead)} == {"before", "after"})
    numbers = next(differ, [*leads][0])
    steps = [lanes(trace, number) for trace, number in zip(traces, numbers)]
    zeros = [next((time for time in step.events.values() if time is not None), 0) for step in steps]
    sent = [
        "-" if lead is None else f"{abs(lead):.3f} ms {side(lead)} the end of backward"
        for lead in leads[numbers]
    ]
    means = [exposed(i, *trace.steps) for i, trace in enumerate(traces)]
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
        for i, (trace, number, zero, step, row) in enumerate(
            zip(traces, numbers, zeros, steps, rows)
        ):
            lane = [
                ("exposed communication", step.exposed, (-0.5, 2), "#f4b9b3"),
                ("compute", step.compute, (0.6, 0.8), picture.COLORS[0]),
                *(
                    (kind, of_kind(step.comm, kind), (-0.4, 0.8), picture.COLORS[1 + i % 5])
                    for i, kind in enumerate(KINDS[2:])
                ),
            ]
            for axes, view in zip(row, views):
                for label, items, height, color in lane:
                    if items:
                        axes.broken_barh(
                            bars(items, zero), height, color=color, label=label, linewidth=0.3
                        )
                for (label, time), style in zip(step.events.items(), (":", "v", "--")):
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
                    f"{'ab'[i]}: {os.path.basename(trace.path).partition('.')[0]}, step {number}"
                )
            )
            row[-1].set_title(f"exposed: {exposed(i, number)}", fontweight="normal", loc="right")
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
    parser.add_argument("--vs", metavar="TRACE", help="b, compared with the first trace, a")
    parser.add_argument("--picture", metavar="FILE", help="draw a step of a and b, .png or .svg")
    options = parser.parse_args(arguments)
    if options.picture and not options.vs:
        parser.error("--picture draws two versions: name the trace of the second after --vs")
    if options.vs and len(options.traces) > 1:
        parser.error("--vs compares two traces: name one of each version, of the same rank")
    try:
        traces = [read(path) for path in (*options.traces, *filter(None, [options.vs]))]
        texts = [compare(traces)] if options.vs else map(show, traces)
        text = "\n\n".join(texts)
        if options.picture:
            draw(traces, options.picture)
    except (UserError, OSError, ValueError) as problem:
        return logs.refuse("trace.py", problem)
    print(text)
    return 0


if __name__ == "__main__":
    logs.run_main(main)
