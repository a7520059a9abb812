"""Tests of records/trace.py on traces built event by event, whose figures can be computed by hand."""

import gzip
import json
import math
import re
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

SCRIPT = Path(__file__).parent.parent / "records" / "trace.py"
sys.path.insert(0, str(SCRIPT.parent))
import trace  # noqa: E402

MAIN = 100
AUTOGRAD = 200
OTHER = 300
NCCL = "ncclDevKernel_{}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE = map(
    NCCL.format, ("ReduceScatter", "AllGather", "AllReduce")
)


class Builder:
    """Events in µs. `op` is a GPU op, with its launch on the host unless `launched` is None."""

    def __init__(self):
        self.events = []
        self.correlation = 0

    def host(self, name, start, end, tid=MAIN, cat="user_annotation"):
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 1,
                "tid": tid,
                "ts": start,
                "dur": end - start,
            }
        )
        return self

    def op(
        self,
        name,
        start,
        end,
        launched,
        tid=MAIN,
        cat="kernel",
        launch_cat="cuda_runtime",
        device=0,
        stream=7,
    ):
        self.correlation += 1
        arguments = {"correlation": self.correlation, "device": device, "stream": stream}
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": 0,
                "tid": stream,
                "ts": start,
                "dur": end - start,
                "args": arguments,
            }
        )
        if launched is not None:
            self.events.append(
                {
                    "ph": "X",
                    "cat": launch_cat,
                    "name": "cudaLaunchKernel",
                    "pid": 1,
                    "tid": tid,
                    "ts": launched,
                    "dur": 1,
                    "args": {"correlation": self.correlation},
                }
            )
        return self

    def write(self, path, **header):
        text = json.dumps(
            {"schemaVersion": 1, **header, "traceEvents": self.events, "traceName": "x"}
        )
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path


def two_steps():
    """Step 5 launches its reduce-scatter in backward, step 6 in the optimizer. The GPU lags by a
    step. One orphan."""
    build = Builder()
    build.host("ProfilerStep#5", 0, 1000).host("ProfilerStep#6", 1000, 2000)
    # the GPU's own marks are ignored
    build.host("ProfilerStep#5", 900, 1900, tid=7, cat="gpu_user_annotation")
    build.host("Optimizer.step#Adam.step", 600, 900).host("Optimizer.step#Adam.step", 1600, 1900)
    build.host("nccl:_reduce_scatter_base", 500, 510, tid=AUTOGRAD).host(
        "nccl:_reduce_scatter_base", 1650, 1660
    )
    build.host("nccl:_reduce_scatter_base", 100, 110, cat="gpu_user_annotation")
    build.host("nccl:_all_gather_base", 450, 455)
    build.op(REDUCE_SCATTER, 50, 60, None, stream=9)
    # step 5 runs at 1100 ... 1900: compute 1100-1500 (two kernels that overlap), then comm
    # 1400-1700, copy 1850-1900
    build.op("gemm", 1100, 1400, 100).op(
        "gemm", 1300, 1500, 400, tid=AUTOGRAD, launch_cat="cuda_driver"
    )
    build.op(REDUCE_SCATTER, 1400, 1600, 505, tid=AUTOGRAD, stream=9).op(
        ALL_GATHER, 1600, 1700, 700, stream=9
    )
    build.op("Memcpy HtoD", 1850, 1900, 800, cat="gpu_memcpy")
    # step 6 runs at 2100 ... 2500: nothing overlaps
    build.op("gemm", 2100, 2200, 1100, tid=AUTOGRAD).op(REDUCE_SCATTER, 2250, 2450, 1655, stream=9)
    build.op("Memset", 2450, 2500, 1700, cat="gpu_memset")
    return build


def analysed(build, tmp_path):
    return trace.analyse(trace.read(str(build.write(tmp_path / "built.json"))))


# The figures
# --------------------------------------------------------------------------------------------------


def test_the_order_of_events_does_not_matter(tmp_path):
    build = two_steps()
    expected = analysed(build, tmp_path)
    build.events.reverse()
    assert analysed(build, tmp_path) == expected
    build.events.sort(key=lambda event: str(event))
    assert analysed(build, tmp_path) == expected


def test_times_of_this_century_keep_their_nanoseconds(tmp_path):
    """A float of µs since 1970 has a resolution of a quarter of a µs."""
    text = json.dumps({"traceEvents": two_steps().events})
    events = json.loads(text)["traceEvents"]
    for event in events:
        event["ts"] = f"<17592{event['ts'] + 10_000_000_000:011d}.123>"
    path = tmp_path / "late.json"
    path.write_text(
        json.dumps(events)
        .replace('"<', "")
        .replace('>"', "")
        .replace('"dur": 200', '"dur": 200.001')
    )
    loaded = trace.read(str(path))
    assert loaded.ops[5][0].start == 1759210000001100_123
    step = trace.analyse(loaded)[5]
    assert (step["comm"], step["exposed"], step["sent"]) == (0.3, 0.199999, -0.100001)


@pytest.mark.parametrize(
    "value", [None, True, [], {}, "soon", math.nan, math.inf, Decimal("1e99999"), 10**30]
)
def test_no_time(value):
    with pytest.raises(ValueError):
        trace.nanoseconds(value)


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10)), max_size=12).map(
    lambda pairs: [trace.Span(start, start + length, "") for start, length in pairs]
)


@given(spans, spans)
def test_busy_and_outside_count_each_instant_once(some, others):
    def instants(intervals):
        return {instant for span in intervals for instant in range(span.start, span.end)}

    assert trace.busy(some) == len(instants(some))
    assert instants(trace.Span(*part, "") for part in trace.outside(some, others)) == instants(
        some
    ) - instants(others)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10), st.integers(0, 5)), max_size=12),
    st.integers(-1, 51),
)
@example([(0, 10, 1), (2, 3, 2)], 5)  # the later mark ends here, the earlier one goes on
def test_steps_at_finds_a_mark_that_contains_the_time(marks, time):
    steps = {}
    for start, length, number in marks:
        steps.setdefault(number, []).append(trace.Span(start, start + length, ""))
    holders = {number for start, length, number in marks if start <= time < start + length}
    (found,) = trace.steps_at([time], steps)
    assert found in (holders or {trace.NOWHERE})


@pytest.mark.parametrize(
    "name, kind",
    [
        (REDUCE_SCATTER, "reduce-scatter"),
        ("ncclKernel_SendRecv_RING_SIMPLE", "send-recv"),
        ("ncclSymDevKernel_ReduceScatter_LD_RSxLD_AG", "reduce-scatter"),
        ("ncclDevKernel_Reduce_RING_LL_Sum_f32", "reduce"),
        ("ncclDevKernel_Generic", "other"),
    ],
)
def test_collective(name, kind):
    assert trace.collective(name) == kind


# Other people's traces
# ----------------------------------------------------------------------------------------------


def test_a_graph_launch_carries_many_kernels(tmp_path):
    build = Builder().host("ProfilerStep#1", 0, 100).host("ProfilerStep#2", 100, 200)
    build.op("gemm", 150, 160, 50).op(ALL_GATHER, 155, 170, None).op("gemm", 210, 220, None)
    for event in build.events:
        if "args" in event:
            event["args"]["correlation"] = 1
    found = analysed(build, tmp_path)
    assert (found[1]["span"], found[1]["compute"], found[2]["span"]) == (0.07, 0.02, 0)


def test_backward_ends_with_the_last_op_of_autograd_be_it_a_copy(tmp_path):
    build = Builder().host("ProfilerStep#1", 0, 100)
    build.op("Memcpy DtoD", 215, 225, 20, tid=AUTOGRAD, cat="gpu_memcpy").op(
        "gemm", 200, 210, 10, tid=AUTOGRAD
    )
    build.op(REDUCE_SCATTER, 230, 240, 25, tid=AUTOGRAD, stream=9).op("gemm", 228, 250, 60)
    assert analysed(build, tmp_path)[1]["sent"] == 0.005


def test_the_outer_of_two_calls_with_one_number_is_the_launch(tmp_path):
    """The runtime call begins inside the step; the driver call inside it begins after the mark's
    end."""
    build = Builder().host("ProfilerStep#1", 0, 100).op(ALL_REDUCE, 200, 210, 99)
    for late in (False, True):
        build.events.append(build.events[-1] | {"cat": "cuda_driver", "ts": 101 if late else 98})
        assert analysed(build, tmp_path)["total"]["comm"] == 0.01


def test_marks_on_several_threads_are_one_step(tmp_path):
    """A worker's mark is shorter: later events still belong to the step, and neither thread is
    autograd's."""
    build = Builder().host("ProfilerStep#1", 0, 100).host("ProfilerStep#1", 10, 40, tid=OTHER)
    build.op("gemm", 200, 210, 20, tid=OTHER).op("gemm", 210, 220, 30, tid=AUTOGRAD)
    build.op(REDUCE_SCATTER, 230, 240, 70, tid=OTHER)
    step = analysed(build, tmp_path)[1]
    assert (step["compute"], step["comm"], step["step"], step["sent"]) == (0.02, 0.01, 0.1, 0.01)


def test_launches_outside_all_steps_are_left_out_and_told(tmp_path):
    build = two_steps().op(ALL_GATHER, 3000, 3100, 2000)  # the end of a step is outside it
    loaded = trace.read(str(build.write(tmp_path / "t.json")))
    assert trace.analyse(loaded)["total"]["comm"] == 0.5
    assert [note.partition(" launched ")[2] for note in loaded.notes] == [
        "before recording began, 1 of them communication",
        "between steps, 1 of them communication",
    ]


def test_rows_that_only_look_like_kernels(tmp_path):
    """Triton's CPU events have kernel names; flow arrows have correlations."""
    build = two_steps()
    expected = analysed(build, tmp_path)
    build.host("triton_poi_fused_nccl_0", 0, 5000, cat="cpu_op").host(
        "nccl kernel", 0, 5000, cat="overhead"
    )
    build.events += [
        {"ph": "s", "cat": "ac2g", "id": 1, "ts": 0, "args": {"correlation": 1}},
        {"ph": "B", "cat": "kernel", "name": "gemm", "ts": 0},
        {"ph": "M"},
        {},
    ]
    assert analysed(build, tmp_path) == expected


# CPU
# --------------------------------------------------------------------------------------------------


def cpu_trace(launch_at=300):
    build = Builder().host("ProfilerStep#1", 0, 1000).host("ProfilerStep#2", 1000, 2000)
    for base in (0, 1000):
        # the first micro-batch
        build.host("forward", base, base + 50).host("backward", base + 50, base + 90)
        build.host("forward", base + 100, base + 200).host("backward", base + 200, base + 600)
        build.host("step", base + 610, base + 990)
        build.host("launch late", base + launch_at, base + launch_at + 5)
        build.host("launch early", base + 650, base + 655)
        build.host("wait late", base + 700, base + 730).host("wait early", base + 800, base + 870)
        build.host("update late", base + 730, base + 740).host(
            "gather late", base + 740, base + 750
        )
    return build


def test_a_trace_of_the_installed_torch(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    weight = torch.ones(8, 8, requires_grad=True)

    def launch(parameter):
        with record_function("launch bank"):
            parameter.grad = None

    weight.register_post_accumulate_grad_hook(launch)
    once = schedule(wait=0, warmup=1, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=once) as profiler:
        for _ in range(3):
            with record_function("backward"):
                (weight @ weight).sum().backward()
            with record_function("step"), record_function("wait bank"):
                pass
            profiler.step()
    path = tmp_path / "torch.json.gz"
    profiler.export_chrome_trace(str(path))
    found = trace.analyse(trace.read(str(path)))
    assert [*found] == [1, 2, "total"]
    for step in (found[1], found[2]):
        assert step["compute"] > 0 > step["sent"] and step["exposed"] > 0


# What is printed
# --------------------------------------------------------------------------------------------------


def moved(build, microseconds):
    """Lengthen the reduce-scatter of step 6, and so the exposed time."""
    for event in build.events:
        if event["name"] == REDUCE_SCATTER and event["ts"] == 2250:
            event["dur"] += microseconds
    return build


def lacking(change):
    """Return two_steps with change(event) in each event, None for unchanged; a list stands for
    several events."""
    build = two_steps()
    build.events = [one for event in build.events for one in change(event) or [event]]
    return build


def test_a_gpu_whose_clock_lies_behind_the_hosts_has_the_same_figures(tmp_path):
    early = lacking(
        lambda event: (
            event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset")
            and event.update(ts=event["ts"] - 1e6)
        )
    )
    assert analysed(early, tmp_path) == analysed(two_steps(), tmp_path)


# What it prints: tests/golden/trace.txt
# --------------------------------------------------------------------------------


def only(*events):
    """A step and these GPU ops (name, start, end, launched)."""
    build = Builder().host("ProfilerStep#1", 0, 100)
    for event in events:
        build.op(*event)
    return build


def change_arguments(**arguments):
    return lacking(lambda event: "args" in event and event["args"].update(arguments) and None)


def both_ranges():
    return (
        two_steps()
        .host("backward", 300, 590)
        .host("launch bank", 495, 511, tid=AUTOGRAD)
        .host("wait bank", 650, 660)
    )


@pytest.mark.parametrize(
    "build",
    [
        two_steps().host("hipLaunchKernel", 1, 2, cat="cuda_runtime"),
        two_steps().host("hipLaunchKernel", 1, 2, cat="hip_runtime"),
        two_steps().host("urEnqueueKernelLaunch", 1, 2, cat="xpu_runtime"),
        two_steps().host("cudaLaunchKernel", 1, 2, cat="Runtime"),
        two_steps().host("gemm", 1, 2, cat="Kernel"),
        Builder().host("aten::mm", 1, 2, cat=None),
    ],
)
def test_traces_of_other_gpus_and_old_profilers_are_refused(build, tmp_path):
    with pytest.raises(trace.UserError, match="only traces of NVIDIA GPUs .* torch 1.13 or newer"):
        analysed(build, tmp_path)


BAD_FILES = [
    b"",
    b"  \n",
    bytes(range(256)) * 9,
    b"hello",
    b'{"a": 1}',
    b'{"traceEvents": 5}',
    b"17",
    b'{"traceEvents": []}',
    b'{"traceEvents": [{"ph": "X"}, {"ph',
    b'{"traceEvents": [{"ph": "X"}]',
    b'{"traceEvents": []}{"traceEvents": []}',
    b'{"traceEvents": [' + b"[" * 200_000,
    gzip.compress(b'{"traceEvents": [' + b"1," * 5000, mtime=0)[:-20],
    gzip.compress(b'{"traceEvents": []}', mtime=0)[:-8] + b"12345678",
    b"\x1f\x8bhello",
    b'[{"ts": ' + b"9" * 9999 + b"}]",
]
CASES = [  # exit status, words, contents of a.json, b.json and c.json, or builders of them
    *((2, "a.json", content) for content in BAD_FILES),
    (2, "missing.json"),
    (2, "."),
    (2, "a.json x", two_steps()),
    *(
        (2, "a.json", build)
        for build in (
            Builder().op(ALL_REDUCE, 0, 5, 1),
            only((ALL_REDUCE, 0, 5, None)),
            only((ALL_REDUCE, 0, 5, 500)),
            change_arguments(correlation=None),
            change_arguments(correlation=0),
            lacking(lambda event: event.pop("dur") and None),
            only(("gemm", 0, 5, 1)).op("gemm", 0, 5, 2, device=1),
            lacking(
                lambda event: (
                    [{**event, "pid": 99}]
                    if "Launch" in event["name"] and event["ts"] > 1500
                    else None
                )
            ),
        )
    ),
    (0, "a.json", only(("gemm", 0, 5, 1))),
    (0, "a.json", only()),
    (0, "a.json", two_steps()),
    (0, "a.json", cpu_trace()),
    (0, "a.json", both_ranges()),
    (0, "a.json b.json", two_steps(), cpu_trace()),
    (2, "a.json --vs b.json", cpu_trace(), two_steps()),
    (0, "a.json --vs b.json", moved(two_steps(), 300), two_steps()),
    (0, "a.json --vs b.json", cpu_trace(), cpu_trace(700)),
    (
        0,
        "a.json --vs b.json",
        two_steps(),
        lacking(
            lambda event: (
                event["name"].startswith("ProfilerStep")
                and event.update(name=event["name"].replace("#", "#1"))
            )
        ),
    ),
]


def test_trace_prints_what_its_golden_file_holds(tmp_path, capsys, monkeypatch, golden):
    shown = []
    wrong = []
    for number, (status, words, *contents) in enumerate(CASES):
        (tmp_path / str(number)).mkdir()
        monkeypatch.chdir(tmp_path / str(number))
        for name, content in zip("abc", contents):
            if isinstance(content, bytes):
                Path(f"{name}.json").write_bytes(content)
            else:
                content.write(Path(f"{name}.json"))
        found = trace.main(words.split())
        said = capsys.readouterr()
        if found != status or (status and (said.out or said.err.count("\n") != 1)):
            wrong.append((number, words, found, said))
        shown.append(f"$ trace.py {words}\n{said.out}{said.err}exit status {found}\n")
    assert not wrong
    # of this Python's decoders
    golden(
        "trace", "\n".join(shown), [(r"trace \((?!neither).*\); record", "trace (REASON); record")]
    )


# The picture
# --------------------------------------------------------------------------------------------------


def lead(events):
    return [
        trace.apart(events[event], events[trace.BACKWARD]) for event in (trace.SENT, trace.STEP)
    ]


def test_the_lanes_of_a_step_are_what_the_table_counts(tmp_path):
    loaded = trace.read(str(two_steps().op("gemm", 1700, 1750, 650).write(tmp_path / "t.json")))
    step = trace.lanes(loaded, 5)
    assert sum(end - start for start, end in step.exposed) == 200_000
    assert len(step.compute) == 3 and len(step.comm) == 2
    # the reduce-scatter, and the first op that the optimizer launched
    assert lead(step.events) == [-0.1, 0.2]
    step = trace.lanes(trace.read(str(cpu_trace().write(tmp_path / "t.json"))), 2)
    assert step.exposed == [(1700_000, 1730_000), (1800_000, 1870_000)]
    assert lead(step.events) == [-0.3, 0.01]


@pytest.mark.parametrize(
    "build, other, says",
    [
        (
            two_steps,
            lambda: moved(two_steps(), 100),
            (
                "a: a, step 5",
                "b: b, step 5",
                "0.100 ms before the end of backward",
                "0.20 ms, b 0.25 ms per step",
                "reduce-scatter",
                "all-gather",
                "whole step, ms from the end of backward",
            ),
        ),
        (
            cpu_trace,
            lambda: cpu_trace(700),
            (
                "exposed: 0.10 ms",
                "a sends the first gradients 0.300 ms before",
                "b 0.050 ms after",
                "optimizer step",
            ),
        ),
    ],
)
def test_two_versions_in_one_picture(tmp_path, build, other, says):
    paths = [
        str(made().write(tmp_path / f"{name}.json")) for name, made in (("a", build), ("b", other))
    ]
    assert trace.main([paths[0], "--vs", paths[1], "--picture", str(tmp_path / "x.svg")]) == 0
    drawn = " ".join(re.findall(r">([^<>]+)</text>", (tmp_path / "x.svg").read_text()))
    for said in (
        *says,
        "compute",
        "communication",
        "exposed communication",
        "first gradients sent",
    ):
        assert said in drawn, said


def test_a_picture_needs_two_versions_and_a_folder(tmp_path, capsys):
    path = str(two_steps().write(tmp_path / "t.json"))
    with pytest.raises(SystemExit):
        trace.main([path, "--picture", "x.png"])
    with pytest.raises(SystemExit):
        trace.main([path, path, "--vs", path])
    assert "after --vs" in capsys.readouterr().err
    assert trace.main([path, "--vs", path, "--picture", str(tmp_path / "none/x.png")]) == 2
    assert "No such file" in capsys.readouterr().err
