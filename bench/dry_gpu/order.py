"""Check the order of uses of GPU memory, by the happens-before relation of a launch log.

Two uses of one range on two streams, at least one of them a write, must be ordered: work of a stream runs in order, a
WAIT is after its EVENT and all that precedes it, and what the host launches is after what the host waited for. The
log's USE lines come from device.c (copies, collectives) and aten.log_use (operators, kernels). Queries of events do not order
anything: NCCL's watchdog queries too.
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


PAGE = 1 << 16  # bytes; uses are found by the pages that they touch


def check(events, skipped=-1, until=None):
    """Return (number of uses, Counter of unordered pairs) of a log. skipped: index of a WAIT to ignore.

    until: stop after this many unordered uses.
    """
    clocks = collections.defaultdict(dict)  # {stream: {stream: number of its uses that are done before the next use}}
    host, recorded, pages = {}, {}, collections.defaultdict(dict)
    count, found = 0, collections.Counter()

    def merge(into, other):
        for stream, time in other.items():
            into[stream] = max(into.get(stream, 0), time)

    for i, (stream, kind, name, numbers) in enumerate(events):
        clock = clocks[stream]
        if kind == "EVENT":
            merge(clock, host)
            recorded[numbers[0]] = dict(clock)
        elif kind == "WAIT" and i != skipped:
            merge(clock, recorded.get(numbers[0], {}))
        elif kind == "SYNC" and "Device" in name:
            for other in clocks.values():
                merge(host, other)
        elif kind == "SYNC":
            merge(host, recorded.get(int(stream, 16), {}) if "Event" in name else clock)
        elif kind == "USE":
            begin, end, written = numbers
            merge(clock, host)
            count, clock[stream] = count + 1, clock.get(stream, 0) + 1
            use = Use(name, stream, bool(written), begin, end, clock[stream])
            for page in range(begin // PAGE, (end - 1) // PAGE + 1):
                for key, other in pages[page].items():
                    if (other.stream != stream and (written or other.written)
                            and other.begin < end and begin < other.end
                            and other.time > clock.get(other.stream, 0)):
                        found[f"{other.name} ({'writes' if other.written else 'reads'}) and {name} "
                              f"({'writes' if written else 'reads'})"] += 1
                        if until and found.total() >= until:
                            return count, found
                pages[page][stream, begin, end, written] = use
    return count, found


def unnoticed_waits(events):
    """Return (number of waits, indices of those whose removal leaves no unordered uses)."""
    waits = [i for i, event in enumerate(events) if event.kind == "WAIT"]
    return len(waits), [i for i in waits if not check(events, skipped=i, until=1)[1]]


def redundant_waits(events):
    """Return the indices of waits that add nothing: their stream already waits for all uses before the event."""
    clocks, recorded, out = collections.defaultdict(dict), {}, []
    for i, (stream, kind, name, numbers) in enumerate(events):
        clock = clocks[stream]
        if kind == "USE":
            clock[stream] = clock.get(stream, 0) + 1
        elif kind == "EVENT":
            recorded[numbers[0]] = {**clock}
        elif kind == "WAIT":
            seen = recorded.get(numbers[0], {})
            if all(time <= clock.get(other, 0) for other, time in seen.items()):
                out.append(i)
            for other, time in seen.items():
                clock[other] = max(clock.get(other, 0), time)
    return out
