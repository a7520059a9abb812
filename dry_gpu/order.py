"""Check the order of uses of GPU memory, by the happens-before relation of a launch log.

Two uses of one range on two streams, at least one of them a write, must be ordered: work of a
stream runs in order, a WAIT is after its EVENT and all that precedes it, and what the host launches
is after what the host waited for. The log's USE lines come from device.c (copies, collectives) and
aten.log_use (operators, kernels). Queries of events do not order anything: NCCL's watchdog queries
too.
"""

import collections
from typing import NamedTuple


class Use(NamedTuple):
    name: str
    stream: str
    written: bool
    begin: int
    end: int
    time: int  # number of the use on its stream


PAGE = 1 << 20  # bytes; uses are found by the pages that they touch


class Clocks:
    """Which uses are done before the next one of each stream: {stream: {stream: how many of its
    uses}}."""

    def __init__(self):
        self.streams = collections.defaultdict(dict)
        self.host = {}
        self.recorded = {}
        # {stream or "": {stream: index of the event that told it}}
        self.sources = collections.defaultdict(dict)

    def learn(self, who, other, source):
        """Merge another clock into a stream's, or into the host's, which is named ""."""
        clock = self.streams[who] if who else self.host
        for stream, time in other.items():
            if time > clock.get(stream, 0):
                clock[stream] = time
                self.sources[who][stream] = source(stream) if callable(source) else source

    def replay(self, i, event):
        """Follow an event, with index i -> the clock of its stream before a USE."""
        stream, kind, name, numbers = event
        if kind in ("EVENT", "WAIT", "USE"):  # the host launches it
            self.learn(stream, self.host, self.sources[""].get)
        clock = self.streams[stream]
        if kind == "EVENT":
            self.recorded[numbers[0]] = dict(clock)
        elif kind == "WAIT":
            self.learn(stream, self.recorded.get(numbers[0], {}), i)
        elif kind == "SYNC" and "Device" in name:
            for other in [*self.streams.values()]:
                self.learn("", other, i)
        elif kind == "SYNC":
            self.learn("", self.recorded.get(int(stream, 16), {}) if "Event" in name else clock, i)
        elif kind == "USE":
            clock[stream] = clock.get(stream, 0) + 1
        return clock


def check(events, skipped=(), until=None):
    """Return (number of uses, Counter of unordered pairs) of a log. skipped: indices of events to
    ignore.

    until: stop after this many unordered uses.
    """
    clocks = Clocks()
    pages = collections.defaultdict(dict)
    found = collections.Counter()
    count = 0
    for i, event in enumerate(events):
        if i in skipped:
            continue
        clock = clocks.replay(i, event)
        if event.kind != "USE":
            continue
        begin, end, written = event.numbers
        count = count + 1
        use = Use(event.name, event.stream, bool(written), begin, end, clock[event.stream])
        for page in range(begin // PAGE, (end - 1) // PAGE + 1):
            for other in pages[page].values():
                if (
                    other.stream != use.stream
                    and (written or other.written)
                    and other.begin < end
                    and begin < other.end
                    and other.time > clock.get(other.stream, 0)
                ):
                    found[
                        f"{other.name} ({'writes' if other.written else 'reads'}) and {use.name} "
                        f"({'writes' if written else 'reads'})"
                    ] += 1
                    if until and found.total() >= until:
                        return count, found
            pages[page][use.stream, begin, end, written] = use
    return count, found


def explain_waits(events):
    """Return (indices of waits whose removal leaves an unordered use, {index of another wait: why
    none is left}).

    A reason is the indices of the events that cover the wait: earlier ones told its stream all that
    it tells, or a later wait does before a use needs it. Without any, no later use needs it.
    """
    clocks = Clocks()
    covers = {}
    for i, event in enumerate(events):
        if event.kind == "WAIT":
            clocks.learn(event.stream, clocks.host, clocks.sources[""].get)
            told = clocks.recorded.get(event.numbers[0], {})
            clock = clocks.streams[event.stream]
            if all(time <= clock.get(other, 0) for other, time in told.items()):
                covers[i] = {
                    clocks.sources[event.stream][other] for other in told if other != event.stream
                }
        clocks.replay(i, event)
    waits = [i for i, event in enumerate(events) if event.kind == "WAIT"]
    needed = [i for i in waits if check(events, {i}, until=1)[1]]
    others = {i: covers.get(i) for i in waits if i not in needed}
    for i, cover in others.items():
        if cover is None:
            others[i] = {j for j in others if j > i and check(events, {i, j}, until=1)[1]}
    return needed, others
