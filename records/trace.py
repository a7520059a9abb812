#!/usr/bin/env python3
"""How much of the communication hides behind compute: the figures of torch.profiler traces, per step and in all.

    python records/trace.py rank0.json.gz                       one rank
    python records/trace.py rank*.json.gz                       several ranks: each, then one table of all
    python records/trace.py before.json.gz --vs after.json.gz   two versions, each one rank or several, side by side
    ... --json                                                  the same figures for programs

Needs numpy. Reads .json and .json.gz as a stream and keeps rows of numbers, so that a trace of gigabytes needs time
(some 20 MB of JSON a second) but a fraction of its size in memory. Exit status: 0 the figures are printed, 2 the input
cannot be judged (stderr says why).

Definitions
    GPU op         ph X, cat kernel, gpu_memcpy or gpu_memset. A kernel with "nccl" in its name communicates, every
                   other kernel computes; copies and fills only keep the GPU from being idle.
    launch         the cuda_runtime or cuda_driver event with the op's args.correlation. An op without one was enqueued
                   before recording began: an orphan, which is counted, named and left out of everything else.
    step           ProfilerStep#N. An op belongs to the step that contains its launch: the GPU runs far behind.
    busy           length of the union of intervals. overlap = |comm ∩ compute|, exposed = |comm| - overlap,
                   idle = span - |all ops|, where the span runs from the first op's start to the last op's end. "In
                   all" takes the ops of all steps at once, so its span holds the gaps between steps too. Each GPU
                   on its own, then summed: a kernel of one GPU hides no communication of another.
    B              first nccl:*reduce_scatter* annotation - start of the first Optimizer.step#*; where torch recorded
                   none, of the first range `step` beside a range `backward`. Negative: launched before the optimizer.
    D              start of the first reduce-scatter kernel - end of the last non-communication op launched off the
                   main thread, which is autograd's work. Negative: communication began during backward. The main
                   thread is the one that carries the ProfilerStep marks.
    from backward  reduce-scatter kernels launched off the main thread.

A trace without GPU ops (CPU and gloo) tells when the host launched. Taken are the ranges `launch ...`, `wait ...`,
`backward` and `step` where the program has them, else torch's own: c10d::* and gloo:* for launches, the stretch of
autograd's functions for backward, Optimizer.step#* for the step. `after backward end` below zero says how long before
the end of backward the first hook had launched.
"""

import argparse
import gzip
import io
import itertools
import json
import os
import re
import sys
import zlib
from array import array
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from decimal import Decimal
from typing import NamedTuple

import numpy as np

import logs
import pages

# Reading ------------------------------------------------------------------------------------------------------------

CHUNK = 1 << 20  # characters read at a time: large beside an event, small beside a trace
LONGEST_VALUE = 1 << 26  # characters; without a limit a damaged file would be read to its end again and again


class Unjudgeable(Exception):
    """The input gives no figures. The message is the line that the user sees."""


BACKSLASH = re.compile(r"\\(.)", re.DOTALL)
BARE = re.compile(r"(?<=[:,\[])(\s*)-?(?:nan|inf|N/A)(?=\s*[,}\]])", re.IGNORECASE)


def mended(text):
    """JSON without what profilers are known to have written wrong: unescaped backslashes, bare nan, inf and N/A."""
    text = BACKSLASH.sub(lambda found: found[0] if found[1] in '"\\/bfnrtu' else "\\" + found[0], text)
    return BARE.sub(r"\1null", text)


class Scanner:
    """Pulls JSON values one by one out of a text stream, so that only the value at hand is in memory.

    Fractions come as their text, for exact times."""

    SPACE = re.compile(r"[ \t\r\n\ufeff]*")

    def __init__(self, stream):
        self.stream, self.text, self.at, self.passed = stream, "", 0, 0
        self.decode = json.JSONDecoder(strict=False, parse_float=str, parse_constant=str).raw_decode

    def go_on_with(self, text):
        """Take this for the text that is not yet parsed."""
        self.passed += self.at
        self.text, self.at = text, 0

    def more(self):
        """Read on; False at the end of the stream."""
        if len(self.text) - self.at > LONGEST_VALUE:
            raise ValueError(f"no value ends within {LONGEST_VALUE} characters")
        chunk = self.stream.read(CHUNK)
        self.go_on_with(self.text[self.at:] + chunk)
        return bool(chunk)

    def peek(self):
        """The next character that is no space, not taken; "" at the end of the stream."""
        while True:
            self.at = self.SPACE.match(self.text, self.at).end()
            if self.at < len(self.text) or not self.more():
                return self.text[self.at:self.at + 1]

    def value(self):
        """The next value. ValueError if none comes."""
        self.peek()
        while True:
            try:
                value, end = self.decode(self.text, self.at)
            except ValueError as error:
                at, rest = self.passed + getattr(error, "pos", self.at), self.text[self.at:]
                if (repaired := mended(rest)) != rest:
                    self.go_on_with(repaired)
                elif not self.more():
                    raise ValueError(f"{getattr(error, 'msg', error)} at character {at}") from None
            else:
                if end < len(self.text) or not self.more():  # a number that ends the text may go on in the next chunk
                    self.at = end
                    return value

    def values(self, closing):
        """Yield the values of the list, or the keys of the object, that opens here, and step behind its end."""
        self.at += 1
        while (character := self.peek()) != closing:
            if character == ",":
                self.at += 1
            else:
                yield self.value()
        self.at += 1

    def trace(self, header):
        """Yield the events of a Chrome trace: a list, or an object's traceEvents (its other keys go into `header`)."""
        opening, listed = self.peek(), False
        if opening == "[":
            yield from self.values("]")
        elif opening == "{":
            for key in self.values("}"):
                if not isinstance(key, str) or self.peek() != ":":
                    raise ValueError(f"no string and ':' for a key at character {self.passed + self.at}")
                self.at += 1
                if key == "traceEvents" and self.peek() == "[":
                    yield from self.values("]")
                    listed = True
                else:
                    header[key] = self.value()
            if not listed:
                raise ValueError('an object without a list "traceEvents"')
        else:
            raise ValueError(f"opens with {opening!r}, not with a brace or bracket" if opening else "empty or blank")
        if extra := self.peek():  # reading to the end also makes gzip check its sum
            raise ValueError(f"{extra!r} follows the end at character {self.passed + self.at}")


class Span(NamedTuple):
    """A host event. Times in integer nanoseconds: µs since 1970 in a float would lose the fraction."""
    start: int
    end: int
    name: str


def rows_of(*columns):
    """The type of rows of 64-bit numbers; names, threads and devices are places in the Trace's list of values."""
    return np.dtype([(column, "i8") for column in columns])


LAUNCH = rows_of("start", "correlation", "thread")
OP = rows_of("start", "end", "name", "kind", "device", "correlation", "thread", "step")  # both of its launch
MAIN = -1  # the thread of what the main one launched; the others' launches are autograd's work
NOWHERE, ORPHANED = -1, -2  # the step of what lies in none; and of what has no launch
FOREVER = 1 << 62  # ns, the year 2116: a time and a duration before it add up within 64 bits

GPU_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}
LAUNCH_CATEGORIES = {"cuda_runtime", "cuda_driver"}
HOST_CATEGORIES = {"cpu_op", "user_annotation"}
OLD_CATEGORIES = {"Kernel": "kernel", "Memcpy": "gpu_memcpy", "Memset": "gpu_memset", "Runtime": "cuda_runtime",
                  "Operator": "cpu_op"}  # torch before 1.12
STEP_MARK = re.compile(r"ProfilerStep#(\d{1,18})")
HOST_NAMES = re.compile(r"ProfilerStep#\d+|Optimizer\.step#|nccl:|gloo:|c10d::|autograd::engine::evaluate_function"
                        r"|launch |wait |(backward|step)$")
COLLECTIVES = {"reducescatter": "reduce-scatter", "allgather": "all-gather", "allreduce": "all-reduce",
               "alltoall": "all-to-all", "broadcast": "broadcast", "reduce": "reduce", "send": "send-recv",
               "recv": "send-recv"}  # tried in this order
KINDS = ["compute", "memory", *dict.fromkeys(COLLECTIVES.values()), "other"]  # behind memory: communication
COMPUTE, MEMORY, REDUCE_SCATTER = (KINDS.index(kind) for kind in ("compute", "memory", "reduce-scatter"))


def collective(name):
    """'ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(…)' or 'nccl:_reduce_scatter_base' → 'reduce-scatter'."""
    letters = re.sub("[^a-z]", "", name.lower())
    return next((kind for key, kind in COLLECTIVES.items() if key in letters), "other")


def kind_of(category, name, arguments):
    """What a GPU op does: compute, memory, or the collective that a communication kernel carries out."""
    if category != "kernel":
        return "memory"
    if "nccl" not in name:
        return "compute"
    kind = collective(name)
    return kind if kind != "other" else collective(str(arguments.get("Collective name")))


def members(value):
    """An object's; none of what is no object."""
    return value if isinstance(value, dict) else {}


def nanoseconds(microseconds):
    """Exact integer ns of a JSON number of µs (int, or a fraction's text). ValueError if it is no sensible time."""
    try:
        value = Decimal(microseconds if type(microseconds) in (int, str) else "none")
        if value.is_finite() and value.adjusted() < 18 and abs(time := round(value.scaleb(3))) < FOREVER:
            return time
    except ArithmeticError:
        pass
    raise ValueError


@dataclass
class Trace:
    path: str
    rank: object = None  # from the file, if it says
    world_size: object = None
    gpu: str = ""
    steps: dict = field(default_factory=dict)  # N → its marks, [Span]
    host: dict = field(default_factory=lambda: defaultdict(list))  # N → the other host events that count, by start
    ops: np.ndarray = None  # [OP], launched inside a step
    outside: np.ndarray = None  # [OP], launched in no step
    orphans: np.ndarray = None  # [OP], without thread and step
    values: list = field(default_factory=list)  # what the numbers in the rows stand for
    broken: int = 0  # events that matter but lack what they need


def read_events(path, header):
    """Yield the events of a trace file; raises Unjudgeable with what is wrong with the file."""
    try:
        with io.TextIOWrapper(logs.open_unpacked(path), encoding="utf-8", errors="replace") as stream:
            yield from Scanner(stream).trace(header)
    except (EOFError, zlib.error, gzip.BadGzipFile, ValueError, RecursionError) as error:
        raise Unjudgeable(f"{path}: damaged, cut short or no complete Chrome trace ({error}); record it again with "
                          "torch.profiler's export_chrome_trace, or copy it again whole") from None
    except OSError as error:
        why = error.strerror or error
        raise Unjudgeable(f"{path}: {why}; name a torch.profiler trace, .json or .json.gz") from None


def read(path):
    """Read a trace file and link every GPU op to its launch and its step."""
    trace, header = Trace(path), {}
    place = defaultdict(itertools.count().__next__)  # value → its place in the order of arrival
    ops, launches = array("q"), array("q")  # rows of OP and LAUNCH, one after another
    marks, main_threads, host = defaultdict(list), set(), []
    for event in read_events(path, header):
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        category, name, arguments = str(event.get("cat")), event.get("name"), members(event.get("args"))
        category = OLD_CATEGORIES.get(category, category)
        on_gpu, is_launch = category in GPU_CATEGORIES, category in LAUNCH_CATEGORIES
        on_host = category in HOST_CATEGORIES and HOST_NAMES.match(str(name))
        correlation = arguments.get("correlation")
        if not isinstance(correlation, int) or not 0 <= correlation < FOREVER:
            correlation = -1
        if not (on_gpu or on_host or is_launch and correlation >= 0):
            continue
        try:
            start, duration = nanoseconds(event.get("ts")), nanoseconds(event.get("dur"))
            if duration < 0 or not isinstance(name, str):
                raise ValueError
        except ValueError:
            trace.broken += 1
            continue
        end, thread = start + duration, (str(event.get("pid")), str(event.get("tid")))
        if is_launch:
            launches.extend((start, correlation, place[thread]))
        elif on_gpu:
            kind, device = KINDS.index(kind_of(category, name, arguments)), str(arguments.get("device", thread[0]))
            ops.extend((start, end, place[name], kind, place[device], correlation, MAIN, ORPHANED))
        elif mark := STEP_MARK.fullmatch(name):
            marks[int(mark[1])].append(Span(start, end, name))
            main_threads.add(place[thread])
        else:
            host.append(Span(start, end, sys.intern(name)))

    trace.steps, trace.values = {step: sorted(marks[step]) for step in sorted(marks)}, list(place)
    host.sort()
    for span, step in zip(host, steps_at(np.array([span.start for span in host], "i8"), trace.steps).tolist()):
        trace.host[step].append(span)
    ops = np.frombuffer(ops, OP)
    link(ops, np.frombuffer(launches, LAUNCH), list(main_threads), trace.steps)
    trace.ops, trace.outside, trace.orphans = (ops[chosen] for chosen in (
        ops["step"] > NOWHERE, ops["step"] == NOWHERE, ops["step"] == ORPHANED))
    distributed, devices = members(header.get("distributedInfo")), header.get("deviceProperties")
    trace.rank, trace.world_size = distributed.get("rank"), distributed.get("world_size")
    if isinstance(devices, list) and devices:
        trace.gpu = str(members(devices[0]).get("name", ""))
    return trace


def link(ops, launches, main_threads, steps):
    """Give each GPU op the step and the thread of its launch."""
    # where a runtime call and the driver call inside it share a number, the outer one is the launch: it comes first
    launches = launches[np.lexsort((launches["start"], launches["correlation"]))]
    at = np.searchsorted(launches["correlation"], ops["correlation"])
    linked = np.append(launches["correlation"], FOREVER)[at] == ops["correlation"]
    launches = launches[at[linked]]
    ops["step"][linked] = steps_at(launches["start"], steps)
    ops["thread"][linked] = np.where(np.isin(launches["thread"], main_threads), MAIN, launches["thread"])


def steps_at(times, steps):
    """N of the step whose mark contains each of the times [n], or NOWHERE. Of several the last that began."""
    found = np.full(len(times), NOWHERE)
    for mark, step in sorted((mark, step) for step, marks in steps.items() for mark in marks):
        found[(mark.start <= times) & (times < mark.end)] = step
    return found


# Figures ------------------------------------------------------------------------------------------------------------

def busy(*groups):
    """Length of the union of intervals, in ns. A group: rows of OP, or [Span]."""
    pairs = [np.stack([group["start"], group["end"]], axis=1) if isinstance(group, np.ndarray) else
             np.array([span[:2] for span in group], "i8").reshape(-1, 2) for group in groups]
    times = np.concatenate(pairs)
    start, end = times[np.argsort(times[:, 0])].T
    reach = np.maximum.accumulate(end)  # what an interval adds begins where those before it reach
    return int(np.maximum(reach - np.maximum(start, np.append(start[:1], reach[:-1])), 0).sum())


def overlap(some, others):
    """Length of the intersection of two unions of intervals, in ns."""
    return busy(some) + busy(others) - busy(some, others)


def milliseconds(nanoseconds):
    return nanoseconds / 1e6


def communication(ops):
    return ops[ops["kind"] > MEMORY]


def gpu_figures(ops):
    """Busy times of GPU ops in ms, each GPU on its own and then summed; and what there is to count."""
    sums = Counter()
    for device in np.unique(ops["device"]):
        group = ops[ops["device"] == device]
        compute, comm = group[group["kind"] == COMPUTE], communication(group)
        sums.update(span=int(group["end"].max() - group["start"].min()), busy=busy(group), compute=busy(compute),
                    comm=busy(comm), overlap=overlap(comm, compute))
    sums.update(exposed=sums["comm"] - sums["overlap"], idle=sums["span"] - sums["busy"])
    times = ("span", "busy", "compute", "comm", "overlap", "exposed", "idle")
    kinds = Counter(KINDS[kind] for kind in communication(ops)["kind"].tolist())
    return {**{f"{key}_ms": milliseconds(sums[key]) for key in times},
            "gpu_ops": len(ops), "comm_kernels": dict(sorted(kinds.items())),
            "reduce_scatters_from_backward": int(np.sum((ops["kind"] == REDUCE_SCATTER) & (ops["thread"] != MAIN)))}


def named(host, *prefixes):
    return [span for span in host if span.name.startswith(prefixes)]


def first_start(spans):
    return min((span.start for span in spans), default=None)


def apart(time, other):
    """time - other in ms; None where there is no such moment."""
    return None if time is None or other is None else milliseconds(time - other)


def optimizer_steps(host):
    """What torch records, or else the ranges named step beside those named backward, as our own traces have them.

    A range that holds a backward is not the optimizer's step but the whole training step."""
    backward = [span.start for span in host if span.name == "backward"]
    return named(host, "Optimizer.step#") or [span for span in host if span.name == "step" and backward and
                                              not any(span.start <= start < span.end for start in backward)]


def gpu_leads(ops, host):
    """B and D of one step in ms; None where the step lacks one of the two moments."""
    annotations = [span for span in named(host, "nccl:") if "reduce_scatter" in span.name]
    of_backward = (ops["kind"] <= MEMORY) & (ops["thread"] != MAIN)
    return {"b_ms": apart(first_start(annotations), first_start(optimizer_steps(host))),
            "d_ms": apart(min(ops["start"][ops["kind"] == REDUCE_SCATTER].tolist(), default=None),
                          max(ops["end"][of_backward].tolist(), default=None))}


def backward_spans(host):
    """The ranges named backward; without them, the stretch from autograd's first function to its last."""
    functions = named(host, "autograd::engine::evaluate_function")
    stretch = [functions[0]._replace(end=max(span.end for span in functions))] if functions else []
    return [span for span in host if span.name == "backward"] or stretch


def gradient_launches(host):
    """Where the host starts to send gradients: the program's own ranges, or else what torch records."""
    recorded = ([span for span in named(host, prefix) if collective(span.name) in ("reduce-scatter", "all-reduce")]
                for prefix in ("c10d::", "gloo:", "nccl:"))
    return named(host, "launch ") or next(filter(None, recorded), [])


ADDING_UP = ("launches", "launches_in_backward", "wait_ms", "gloo_ms", "gloo_in_backward_ms")  # over steps


def host_figures(host):
    """Launches, exposed waits and what gloo's threads did in one step; and its first launch against the last backward
    (the one whose gradients are sent) and the optimizer's step."""
    launches, backward = gradient_launches(host), backward_spans(host)
    waits, gloo = named(host, "wait "), named(host, "gloo:")
    first, last = first_start(launches), max(backward, default=None)
    return {"launches": len(launches),
            "launches_in_backward": sum(any(span.start <= launch.start < span.end for span in backward)
                                        for launch in launches) if backward else None,
            "wait_ms": milliseconds(sum(span.end - span.start for span in waits)) if waits else None,
            "gloo_ms": milliseconds(busy(gloo)) if gloo else None,
            "gloo_in_backward_ms": milliseconds(overlap(gloo, backward)) if gloo and backward else None,
            "launch_after_backward_start_ms": apart(first, last and last.start),
            "launch_after_backward_end_ms": apart(first, last and last.end),
            "launch_after_step_start_ms": apart(first, first_start(optimizer_steps(host)))}


def check(trace):
    """Raise Unjudgeable, with what to do, where the trace cannot tell anything about communication."""
    linked = len(trace.ops) + len(trace.outside)
    gpu_ops, ranks = linked + len(trace.orphans), "record a run of two ranks or more"
    gpu_comm = any(len(communication(ops)) for ops in (trace.ops, trace.outside, trace.orphans))
    host_comm = any(named(host, "launch ", "gloo:", "c10d::") for host in trace.host.values())
    for wrong, problem in (
            (not trace.steps, "no ProfilerStep#N mark; call the profiler's step() after every training step"),
            (gpu_ops and not linked,
             f"none of its {gpu_ops} GPU ops has its launch in the trace; record with ProfilerActivity.CPU as well"),
            (gpu_ops and not len(trace.ops),
             f"none of its {gpu_ops} GPU ops was launched inside a step; record whole steps"),
            (gpu_ops and not gpu_comm,
             f'no communication, none of its {gpu_ops} GPU ops is a kernel with "nccl" in its name; {ranks}'),
            (not gpu_ops and not host_comm,
             f"no communication, neither GPU ops nor ranges `launch ...`, gloo:* or c10d::*; {ranks}")):
        if wrong:
            raise Unjudgeable(f"{trace.path}: {problem}")


def analyse(trace):
    """All figures of a trace, as --json prints them: a dict a step, the total, the orphans, the notes."""
    on_gpu = bool(len(trace.ops))
    on_host = not on_gpu or any(named(host, "launch ") for host in trace.host.values())
    steps = []
    for number, marks in trace.steps.items():
        figures = {"step": number, "step_ms": milliseconds(busy(marks))}
        ops, host = trace.ops[trace.ops["step"] == number], trace.host[number]
        if on_gpu:
            figures |= gpu_figures(ops) | gpu_leads(ops, host)
        if on_host:
            figures |= host_figures(host)
        steps.append(figures)
    total = {"steps": len(steps), "step_ms": sum(figures["step_ms"] for figures in steps)}
    if on_gpu:
        total |= gpu_figures(trace.ops)
    if on_host:
        for key in ADDING_UP:
            values = [figures[key] for figures in steps if figures[key] is not None]
            total[key] = sum(values) if values else None
    return {"trace": trace.path, "rank": trace.rank, "world_size": trace.world_size, "gpu": trace.gpu,
            "device": "gpu" if on_gpu else "cpu", "steps": steps, "total": total,
            "orphans": {"gpu_ops": len(trace.orphans),
                        "comm_kernels": len(communication(trace.orphans)),
                        "names": dict(Counter(trace.values[i] for i in trace.orphans["name"]).most_common())},
            "notes": notes(trace, steps)}


def notes(trace, steps):
    """What a reader must know to trust the figures, a line each."""
    found = []
    if len(trace.outside):
        found.append(f"{len(trace.outside)} GPU ops launched between the steps are left out "
                     f"({len(communication(trace.outside))} of them communication)")
    if trace.broken:
        found.append(f"{trace.broken} events without a usable name, time or duration are left out")
    devices = np.unique(trace.ops["device"])
    if len(devices) > 1:
        found.append(f"ops on {len(devices)} GPUs: times are computed for each and summed")
    if len(trace.ops):
        others = np.unique(trace.ops["thread"][trace.ops["thread"] != MAIN])
        if len(others) > 1:
            found.append(f"{len(others)} threads beside the main one launched GPU ops; all count as autograd's")
        for key, title, lacks in (("b_ms", "B", "no reduce-scatter annotation or no optimizer step"),
                                  ("d_ms", "D", "no reduce-scatter kernel or nothing launched off the main thread")):
            without = [str(figures["step"]) for figures in steps if figures[key] is None]
            if without:
                where = "every step" if len(without) == len(steps) else "step " + ", ".join(without)
                found.append(f"{where}: no {title} ({lacks})")
    return found


# Tables -------------------------------------------------------------------------------------------------------------

KERNELS = "comm_kernels "  # opens the names of the figures that count kernels of a kind
GPU_TITLES = {"step_ms": "host step", "span_ms": "GPU span", "compute_ms": "compute", "comm_ms": "comm",
              "overlap_ms": "overlap", "exposed_ms": "exposed", "idle_ms": "GPU idle", "b_ms": "B", "d_ms": "D",
              **{KERNELS + kind: kind for kind in sorted(KINDS)}, "reduce_scatters_from_backward": "from backward"}
HOST_TITLES = {"step_ms": "host step", "launches": "launches", "launches_in_backward": "in backward",
               "launch_after_backward_start_ms": "after backward start",
               "launch_after_backward_end_ms": "after backward end", "launch_after_step_start_ms": "after step start",
               "wait_ms": "wait", "gloo_ms": "gloo busy", "gloo_in_backward_ms": "gloo in backward"}
TITLES = GPU_TITLES | HOST_TITLES
SIGNED = {"b_ms", "d_ms", *(key for key in HOST_TITLES if key.startswith("launch_after"))}
BY_STEP = ("exposed_ms", "b_ms", "d_ms", "launch_after_backward_end_ms", "wait_ms")  # what two sets show of each step


def flat(figures):
    """Figures with the kernel counts by kind spread out: one number a key, 0 of the kinds that there are not."""
    counts = figures.get("comm_kernels")
    spread = {} if counts is None else {KERNELS + kind: counts.get(kind, 0) for kind in KINDS}
    return {key: value for key, value in figures.items() if key != "comm_kernels"} | spread


def columns(flats):
    """The keys for which one of these flat figures has a value: {"gpu" or "cpu": keys} of each table."""
    present = {key for figures in flats for key, value in figures.items()
               if value is not None and (value or not key.startswith(KERNELS))}
    if KERNELS + "reduce-scatter" not in present:
        present.discard("reduce_scatters_from_backward")
    return {device: [key for key in titles if key in present] for device, titles, telling in
            (("gpu", GPU_TITLES, "span_ms"), ("cpu", HOST_TITLES, "launches")) if telling in present}


def cell(key, value, signed=False):
    """A figure as a table shows it; a mean of counts has a decimal."""
    if value is None:
        return "-"
    sign, digits = "+" * (signed or key in SIGNED), 3 if key.endswith("_ms") else int(value != int(value))
    return f"{value:{sign}.{digits}f}"


def table(rows):
    return "\n".join(logs.columns(rows, True))


def tables(named):
    """{"gpu" or "cpu": text} of a table for each group of columns, from [(name of the row, flat figures)]."""
    return {device: table([["ms", *(TITLES[key] for key in keys)],
                           *([name, *(cell(key, figures.get(key)) for key in keys)] for name, figures in named)])
            for device, keys in columns([figures for _, figures in named]).items()}


def show(analyses, others, comparison):
    """A table of steps for each trace and one of all where there are several; or two sets side by side."""
    def of_steps(analysis):
        steps = [(f"step {figures['step']}", flat(figures)) for figures in analysis["steps"]]
        return [*steps, ("in all", flat(analysis["total"]))]

    of_all, beside = [], {}
    if others:
        beside = side_by_side(comparison, len(analyses), len(others))
    elif len(analyses) > 1 and len({analysis["device"] for analysis in analyses}) == 1:
        of_all = [(os.path.basename(analysis["trace"]), flat(analysis["total"])) for analysis in analyses]
        of_all.append(("mean", mean([figures for _, figures in of_all])))
    return pages.show("trace.txt.jinja", sets=(analyses, others), of_all=of_all, of_steps=of_steps, tables=tables,
                      table=table, comparison=comparison, **beside)


# Two sets side by side ----------------------------------------------------------------------------------------------

def mean(flats):
    """The mean of every numeric figure over those that have it, None if none has."""
    result = {}
    for key in dict.fromkeys(key for figures in flats for key in figures):
        values = [figures[key] for figures in flats if figures.get(key) is not None]
        result[key] = sum(values) / len(values) if values else None
    return result


def set_means(analyses):
    """Means over the ranks of a set: (total, {N: figures})."""
    by_step = defaultdict(list)
    for analysis in analyses:
        for figures in analysis["steps"]:
            by_step[figures["step"]].append(flat(figures))
    return mean([flat(analysis["total"]) for analysis in analyses]), {n: mean(by_step[n]) for n in sorted(by_step)}


def compared(left, right):
    """{key: {"a", "b", "difference"}} of two flat figures."""
    result = {}
    for key in itertools.chain(*columns([left, right]).values()):
        a, b = left.get(key), right.get(key)
        result[key] = {"a": a, "b": b, "difference": None if None in (a, b) else b - a}
    return result


def compare(left, right):
    """Two sets of analyses: means over ranks, b - a. Steps pair up by number, or in order if no number is common."""
    device = left[0]["device"]
    for analysis in (*left, *right):
        if analysis["device"] != device:
            raise Unjudgeable(f"{analysis['trace']}: a {analysis['device'].upper()} trace beside {left[0]['trace']}, a "
                              f"{device.upper()} trace; compare traces of one kind")
    (total_a, steps_a), (total_b, steps_b) = set_means(left), set_means(right)
    common = [(n, n) for n in steps_a if n in steps_b]
    pairs = common or list(zip(steps_a, steps_b))
    found = []
    if not common:
        found.append("the sets have no step number in common: steps are paired in order")
    if len(steps_a) != len(steps_b):
        found.append(f"a has {len(steps_a)} steps, b has {len(steps_b)}: totals do not compare, steps do")
    return {"a": [analysis["trace"] for analysis in left], "b": [analysis["trace"] for analysis in right],
            "total": compared(total_a, total_b),
            "steps": [{"a_step": a, "b_step": b, **compared(steps_a[a], steps_b[b])} for a, b in pairs], "notes": found}


def side_by_side(comparison, *ranks):
    """The rows of both tables of a comparison, and the devices whose figures they show."""
    total, steps = comparison["total"], comparison["steps"]
    over = f", mean of {ranks[0]} and {ranks[1]} ranks" if sum(ranks) > 2 else ""
    in_all = [(f"in all{over}", "a", "b", "b - a", "")]
    for key, pair in total.items():
        a, b, difference = pair.values()
        in_all.append((TITLES[key] + ", ms" * key.endswith("_ms"), cell(key, a), cell(key, b),
                       cell(key, difference, signed=True),
                       f"{difference / a:+.1%}" if a and difference is not None else ""))
    shown = [key for key in BY_STEP if any(key in step for step in steps)]
    by_step = [["step, ms", *(f"{TITLES[key]} {side}" for key in shown for side in ("a", "b", "b - a"))]]
    for step in steps:
        name = " | ".join(dict.fromkeys((str(step["a_step"]), str(step["b_step"]))))
        pairs = [(key, step.get(key, {})) for key in shown]
        by_step.append([name, *(cell(key, pair.get(side), signed=side == "difference")
                                for key, pair in pairs for side in ("a", "b", "difference"))])
    return {"in_all": in_all, "by_step": by_step, "devices": columns([total])}


# Command line -------------------------------------------------------------------------------------------------------

def read_set(paths, problems):
    """The analyses of the files that can be judged; the others' messages go into `problems`.

    A recording that is there twice, be it packed or under another name, counts once, and its analysis notes the other
    path: no two ranks mark the same steps at the same nanoseconds."""
    found = {}
    for path in paths:
        try:
            trace = read(path)
            check(trace)
        except Unjudgeable as problem:
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
    parser = argparse.ArgumentParser(description=opening[0], epilog=opening[2],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", metavar="TRACE", help="profiler trace, .json or .json.gz, one a rank")
    parser.add_argument("--vs", nargs="+", metavar="TRACE", default=[], help="set b, to compare with the first, a")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON")
    options = parser.parse_args(arguments)
    problems = []
    analyses, others = read_set(options.traces, problems), read_set(options.vs, problems)
    try:
        if problems:
            several = f"{len(problems)} files cannot be judged: " if len(problems) > 1 else ""
            raise Unjudgeable(several + "; ".join(problems))
        comparison = compare(analyses, others) if others else None
    except Unjudgeable as problem:
        return logs.refuse("trace.py", problem)
    if options.json:
        print(json.dumps({"traces": analyses, "vs": others, "comparison": comparison}, indent=1))
    else:
        print(show(analyses, others, comparison))
    return 0


if __name__ == "__main__":
    logs.run_main(main)
