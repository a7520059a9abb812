"""The simulated GPU: its log, the model of times and the page, on small logs; whole runs if
dry_gpu/setup was run."""

import importlib.machinery
import importlib.util
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from conftest import DRY_GPU_HOME as HOME

DRY = Path(__file__).resolve().parent.parent / "dry_gpu"
sys.path.insert(0, str(DRY))
simulate, page = map(importlib.import_module, ("simulate", "page"))
sys.path.remove(str(DRY))

RATES = simulate.Rates(
    10, 1e9, 1e12, 2e12, 1e11, 1e9, 4e11, 5e11, 1e8, kernel_s=1e-6, collective_s=1e-5, gap_s=0
)


def events(*lines):
    """Parse lines `stream kind name numbers...` -> events. `-` stands for an empty name."""
    return simulate.parse_log(
        "\t".join("" if word == "-" else word for word in line.split()) + "\n" for line in lines
    )


def test_parsed_lines_of_the_log():
    kernel, cost = events("a0 TRITON triton_poi 4 1 1 128 0", "0 COST - 10 0 0 0")
    assert kernel == ("a0", "TRITON", "triton_poi", [4, 1, 1, 128, 0])
    assert cost == ("0", "COST", "", [10, 0, 0, 0])


def test_a_repeated_phase_returns_its_last_events():
    log = events(
        "0 PHASE training",
        "0 SYNC a",
        "0 PHASE validation",
        "0 SYNC b",
        "0 PHASE training",
        "0 SYNC c",
    )
    assert [e.name for e in simulate.phase(log, "training")] == ["training", "c"]
    assert simulate.phase(log, "census") == []


def test_a_revision_is_this_repository_s_in_a_hook_of_another(tmp_path, monkeypatch):
    """--against takes the scripts of a revision here, whatever GIT_DIR a hook has set."""

    def git(*words):
        subprocess.run(["git", "-C", tmp_path / words[0], *words[1:]], check=True)

    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.py").write_text(name)
        git(name, "init", "-q")
        git(name, "add", ".")
        git(name, "-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "x")
    monkeypatch.setattr(page, "ROOT", tmp_path / "ours")
    monkeypatch.setattr(page, "write_shards", lambda *_: None)
    monkeypatch.setattr(
        page, "execute", lambda args, home, work, command, cold: (command[1] / "x.py").read_text()
    )
    for name, value in (("DIR", ".git"), ("WORK_TREE", "."), ("INDEX_FILE", ".git/index")):
        monkeypatch.setenv(f"GIT_{name}", str(tmp_path / "theirs" / value))
    args = Namespace(flags=["--preset", "laptop"], ranks=1, steps=1)
    assert page.dry_run(args, tmp_path, "HEAD") == "ours"


@pytest.mark.parametrize(
    "lines, kind, seconds",
    [
        (
            ("0 COST - 5000000 0 0 0", "0 TRITON triton_red_fused_add 4 1 1 128 0"),
            "Triton, other",
            5e-3,
        ),
        (
            (
                "0 COST - 5000000 7000000 0 0",
                "0 TRITON triton_red_fused__log_softmax_add 4 1 1 128 0",
            ),
            simulate.LOSS,
            7e-3,
        ),
        (("0 COST - 0 0 0 3000000000", "0 TRITON relu_squared 4 1 1 128 0"), "matmuls", 3e-3 / 0.8),
        (("0 COST - 5000000 0 0 3000000000", "0 TRITON relu_squared 4 1 1 128 0"), "matmuls", 5e-3),
        (
            ("0 COST - 0 0 4000000000 0", "0 TRITON fp8_product 4 1 1 128 0"),
            "matmuls in fp8",
            2e-3 / 0.64,
        ),
        (("0 TRITON triton_poi_fused_add 4 1 1 128 0",), "Triton, other", 0),
        (("0 COPY x 1000000",), "copies and fills", 2e-3),
        (("0 FILL x 1000000",), "copies and fills", 1e-3),
        (("0 NCCL all-gather 4000000",), "collectives", 0.75 * 4e-2),
        (("0 NCCL all-reduce 4000000",), "collectives", 1.5 * 4e-2),
        (("0 NCCL exchange 4000000",), "collectives", 4e-2),
        (
            (
                "0 STEP 384_128 5 2000000000",
                "0 KERNEL flash_fwd_kernel 4 1 1 128 0",
                "0 OP _flash_attention_forward 1000000",
            ),
            "attention",
            1e-3 + 5e-3,
        ),
        (
            (
                "0 ATTENTION - 4000000000",
                "0 KERNEL flash_bwd_dq_dk_dv_loop_kernel 4 1 1 128 0",
                "0 OP flash_backward 1000000",
            ),
            "attention",
            1e-3 + 2e-2,
        ),
        (
            ("0 COST - 5000000 7000000 0 0", "0 TRITON ce_fwd_bwd_kernel 4 1 1 128 0"),
            simulate.LOSS,
            7e-3,
        ),
    ],
)
def test_cost_of_an_event(lines, kind, seconds):
    log = events(*lines)
    (cost,) = simulate.costs(log, RATES, ranks=4).values()
    latency = RATES.collective_s if kind == "collectives" else RATES.kernel_s
    assert cost.kind == kind and cost.seconds == pytest.approx(latency + seconds)


def test_kernels_of_an_operator_share_its_bytes():
    log = events(
        "0 KERNEL a 1 1 1 1 0",
        "0 KERNEL b 1 1 1 1 0",
        "0 OP sort 4000000",
        "0 KERNEL c 1 1 1 1 0",
        "0 OP add 1000000",
        "0 KERNEL d 1 1 1 1 0",
    )
    assert simulate.costs(log, RATES, 1) == {
        0: ("eager", "sort", 2.001e-3),
        1: ("eager", "sort", 2.001e-3),
        3: ("eager", "add", 1.001e-3),
        5: ("eager", "d", 1e-6),
    }


def test_a_matmul_runs_in_waves_of_tiles():
    """Ten tiles fill the ten multiprocessors; an eleventh tile doubles the time."""
    full = simulate.matmul_seconds(1280, 128, 256, 1, 2, 1e12, RATES)
    assert full == pytest.approx(
        max(2 * 1280 * 128 * 256 / 1e12, (1280 * 256 + 256 * 128 + 1280 * 128) * 2 / 1e9)
    )
    wide = RATES._replace(bytes=1e15)
    assert simulate.matmul_seconds(1408, 128, 256, 1, 2, 1e12, wide) == pytest.approx(
        2 * simulate.matmul_seconds(1280, 128, 256, 1, 2, 1e12, wide)
    )


STEP = (
    "0 STEP 384_128 {} 0",
    "0 COST - 3000000 0 0 0",
    "0 TRITON k 1 1 1 1 0",  # 3 ms
    # 7.51 ms, starts after 3 ms
    "0 EVENT e 16",
    "5 WAIT e 16",
    "5 NCCL reduce-scatter 1000000 16",
    "5 EVENT e 32",
    "0 COST - 2000000 0 0 0",
    "0 TRITON l 1 1 1 1 0",  # 2 ms, at the same time
    # waits 5.51 ms, then runs 1 ms
    "0 WAIT e 32",
    "0 COST - 1000000 0 0 0",
    "0 TRITON m 1 1 1 1 0",
    "0 END -",
)


def two_steps():
    return [line.format(number) for number in (0, 1) for line in STEP]


def test_streams_run_in_parallel_and_wait_for_events():
    log = events("0 PHASE census", *two_steps(), "0 COPY x 9000000")
    cost = simulate.costs(log, RATES._replace(kernel_s=0), 4)
    steps = simulate.simulate(log, cost, gap_s=0)
    assert [step.ms for step in steps] == pytest.approx([11.51, 11.51]) and steps[
        0
    ].windows == "384_128"
    assert steps[1].waiting_ms == pytest.approx(5.51)
    # after each kernel: k, the reduce-scatter and m delay the end
    apart = simulate.simulate(log, cost, gap_s=1e-3)
    assert [step.ms for step in apart] == pytest.approx([14.51, 14.51]) and apart[
        0
    ].gaps_ms == pytest.approx(3)
    kinds = simulate.mean_costs(steps, [1, 1], lambda cost: cost.kind)
    assert kinds == {
        "Triton, other": (pytest.approx(6), 3),
        "collectives": (pytest.approx(7.51), 1),
    }
    assert simulate.mean_costs(steps, [1, 1], lambda cost: cost.name)["k"] == (pytest.approx(3), 1)


def test_no_kernel_starts_before_its_launch():
    """Two kernels of 1 ms, each launched after 2 ms; before the second the host waits for the
    first's event."""
    kernel = "0 COST - 1000000 0 0 0", "0 TRITON k 1 1 1 1 0"
    for between, ends in ((), 5), (("0 EVENT e 32", "20 SYNC cudaEventSynchronize"), 6):
        log = events("0 PHASE census", "0 STEP 384_128 0 0", *kernel, *between, *kernel, "0 END -")
        cost = simulate.costs(log, RATES._replace(kernel_s=0), 4)
        (step,) = simulate.simulate(log, cost, gap_s=0, launch_s=2e-3)
        assert step.ms == pytest.approx(ends)


@pytest.mark.parametrize("communicator, ends", [(16, 20.02), (32, 10.01)])
def test_collectives_of_one_communicator_run_in_order_between_streams(communicator, ends):
    """A gather of 10.01 ms runs on its own stream. An all-reduce on the main stream runs after it,
    unless it is another's."""
    log = events(
        "0 PHASE census",
        "0 STEP 384_128 0 0",
        "5 NCCL exchange 1000000 16",
        f"0 NCCL exchange 1000000 {communicator}",
        "0 END -",
    )
    (step,) = simulate.simulate(log, simulate.costs(log, RATES, 4), gap_s=0)
    assert step.ms == pytest.approx(ends) and step.waiting_ms == pytest.approx(ends - 10.01)


def test_flash_attention_2_is_slower_on_hopper_alone():
    three = simulate.rates_of(90, 3)
    two = simulate.rates_of(90, 2)
    assert (three.flash / two.flash, three.flash_backward / two.flash_backward) == pytest.approx(
        (2.0, 1.75)
    )
    assert simulate.rates_of(89, 2) == simulate.rates_of(89, 3) == simulate.RATES[89]


def test_only_kernels_that_the_steps_launched_are_measured():
    """Kernel names are those of record 44's trace. A kernel that was launched before the first
    step does not count."""
    kernels = [
        ("nvjet_tst_192x192_64x3_2x1_v_bz_coopB_NNN", "matmuls"),
        ("nvjet_qrtst_128x160_128x5_TNT", "matmuls in fp8"),
        (
            "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<...",
            "attention",
        ),
        ("XXT_kernel", "matmuls"),
        ("triton_red_fused__log_softmax_div_mul", simulate.LOSS),
        ("triton_poi_fused__scaled_mm__to_copy_clone", simulate.LOSS),
        ("triton_per_fused__flash_attn_backward_mul_sum", "Triton, other"),
        ("ncclDevKernel_AllGather_RING_LL", "collectives"),
        ("void at::native::vectorized_elementwise_kernel<8, ...", "eager"),
        ("relu_squared_kernel", "matmuls"),
    ]
    steps = [
        {"cat": "user_annotation", "name": f"ProfilerStep#{i}", "ts": 100 * i, "dur": 100}
        for i in (1, 2)
    ]
    launches = [
        {
            "cat": "cuda_runtime",
            "name": "cudaLaunchKernel",
            "ts": ts,
            "dur": 1,
            "args": {"correlation": i},
        }
        for i, ts in enumerate([*range(101, 111), 50, 299])
    ]
    # on the main stream, 3 µs apart; before the copy a wait of 600 µs
    ran = [
        {
            "cat": "kernel",
            "name": name,
            "ts": 500 + 2003 * i,
            "dur": 2000,
            "args": {"correlation": i, "stream": 7},
        }
        for i, (name, _) in enumerate(kernels)
    ]
    ran += [
        {
            "cat": "kernel",
            "name": "early",
            "ts": 101,
            "dur": 9000,
            "args": {"correlation": 10, "stream": 9},
        },
        {
            "cat": "gpu_memcpy",
            "name": "Memcpy DtoD",
            "ts": 500 + 2003 * 9 + 2600,
            "dur": 4000,
            "args": {"correlation": 11, "stream": 7},
        },
    ]
    expected = {
        kind: (
            sum(kind == other for _, other in kernels) * 1.0,
            sum(kind == other for _, other in kernels) / 2,
        )
        for _, kind in kernels
    }
    kinds, gaps, waits = simulate.measured(
        {"traceEvents": [*steps, *launches, *ran, {"ph": "M", "name": "process_name"}]}
    )
    assert kinds == {**expected, "copies and fills": (2.0, 0.5)}
    assert gaps == pytest.approx(9 * 3e-3 / 2) and waits == pytest.approx(0.3)  # per step
    assert {*expected, "copies and fills"} == {*simulate.CLASSES}


def test_a_mean_follows_the_plan():
    """Two even steps share the weight of a stage's even half; a stage that the plan lacks does not
    count."""
    steps = [
        simulate.Step(windows, number, 0.0, ms)
        for windows, number, ms in (
            ("384 128", 0, 1.0),
            ("384 128", 2, 3.0),
            ("384 128", 5, 10.0),
            ("896 384", 6, 20.0),
            ("640 128", 8, 99.0),
        )
    ]
    weights = simulate.weigh(steps, {"384 128": 30, "896 384": 10})
    assert weights == [7.5, 7.5, 15, 10, 0]
    assert page.step_rows(steps[:4], weights[:4]) == {
        "ms per step, windows 384 128": "2.0; 10.0; 6.0",
        "ms per step, windows 896 384": "20.0; 20.0",
        page.MEAN: "9.2; 10.0; 9.5",
    }


def a_public_log(folder, name, ms, source="import torch", kernels="import triton"):
    """Write a log in the form of the public records': source, kernels under a title, times of four
    steps."""
    rule = "-" * 40
    clock = 0
    lines = ["step:0/4 val_loss:10.8258 train_time:0ms step_avg:0.03ms"]
    for step, taken in enumerate(ms, 1):
        clock += taken
        lines.append(f"step:{step}/4 train_time:{clock}ms step_avg:{clock / step:.2f}ms")
    lines.append(f"step:4/4 val_loss:3.2754 train_time:{clock}ms step_avg:{clock / 4:.2f}ms")
    head = [
        source,
        rule,
        "# triton_kernels.py",
        rule,
        kernels,
        "",
        "=" * 100,
        "Running Python 3.12.7",
        "=" * 100,
    ]
    (folder / name).write_text("\n".join([*head, *lines, ""]))
    return folder / name


def test_a_public_log_holds_a_program_and_measured_times(tmp_path):
    log = a_public_log(tmp_path, "a.txt", (60, 20, 30, 50))
    (
        a_public_log(tmp_path, "b.txt", (40, 20, 30, 50)),
        a_public_log(tmp_path, "c.txt", (9, 9, 9, 9), "import numpy"),
    )
    source, digest, runs = page.read_program(log)
    assert page.sources_of(source) == {
        "train_gpt.py": "import torch",
        "triton_kernels.py": "import triton\n\n",
    }
    assert len(digest) == 64 and [Path(run.path).name for run in runs] == [
        "a.txt",
        "b.txt",
    ], "c.txt is another program"
    steps = page.measured_steps(runs, {"384 128": 2, "896 384": 2}, None)
    assert page.step_rows(steps, [1] * 8) == {
        "ms per step, windows 384 128": "50.0; 20.0; 35.0",
        "ms per step, windows 896 384": "30.0; 50.0; 40.0",
        page.MEAN: "40.0; 35.0; 37.5",
    }
    assert page.with_error(
        {page.MEAN: "40.0; 35.0; 37.5", "x": "1.0"}, {page.MEAN: "1.0; 2.0; 36.0"}
    ) == {page.MEAN: "40.0; 35.0; 37.5 (simulated -4.0%)", "x": "1.0"}
    scaled = page.measured_steps(runs, {"384 128": 2, "896 384": 2}, 75)
    assert sum(step.ms for step in scaled) / 8 == pytest.approx(75), (
        "each log has the published mean"
    )


def test_a_file_without_a_source_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("step:1/2 train_time:9ms step_avg:9.00ms\n")
    with pytest.raises(SystemExit, match="notes.txt: not a log that begins with its source"):
        page.read_program(tmp_path / "notes.txt")


def test_the_difference_of_two_columns():
    ours = {
        "— eager: ms, launches": "3.70, 400",
        page.MEAN: "1.0; 2.5; 1.8",
        "graphs": "3",
        "— eager": "8",
    }
    theirs = {
        "— eager: ms, launches": "0.66, 100",
        page.MEAN: "1.5; 2.5; 2.0",
        "graphs": "4",
        "— eager": "9",
    }
    assert page.difference(ours, theirs) == {
        "— eager: ms, launches": "+3.04, +300",
        page.MEAN: "-0.5, +0, -0.2",
    }


FACTS = {
    "graphs": 2,
    "late": 1,
    "breaks": {"a call of print": 3},
    "compile": 4.2,
    "warm_up": 9.0,
    "phase": "training",
    "host": [[0, 20.0, 10.0], [2, 18.0, 12.0], [1, 22.0, 15.0]],
    "plan": {"384_128": 5},
    "memory": {
        "training": {
            "peak": 3 << 30,
            "reserved": 4 << 30,
            "tensors": [[2 << 30, 7, "forward, line 9"]],
        }
    },
}


def a_log():
    module = "0 MODULE k 64 8 1024"
    return events(
        "0 PHASE warm-up",
        module,
        "0 PHASE census",
        *two_steps(),
        "0 PHASE training",
        *two_steps(),
        "0 SYNC cudaStreamSynchronize",
        "0 SYNC cudaStreamSynchronize",
        "0 ALLOC cudaMalloc 2048 4096",
        "0 STEP 384_128 2 0",
    )


def test_the_page(monkeypatch):
    monkeypatch.setitem(page.RATES, 90, RATES)
    rows, notes = page.page(
        a_log(),
        FACTS,
        Namespace(arch=90, flash=3, ranks=4, steps=2, trace=None),
        "this",
        FACTS["plan"],
    )
    assert rows["Triton kernels loaded; with spills"] == "1; k, 8 B"
    assert rows["graphs; breaks; compiled after warm-up"] == "2; 3; 1"
    assert (
        rows["launches per step"] == "4"
        and rows["— Triton"] == "3"
        and rows["— collectives"] == "1"
    )
    assert rows["host waits for GPU in timed steps"] == "2 cudaStreamSynchronize"
    assert rows["allocations in timed steps"] == "cudaMalloc of 2,048 B"
    assert rows["collectives of step 1, MB"] == "1: reduce-scatter 1"
    assert (
        rows["host ms, CPU of all threads, the least of 3 steps of the first stage: even; odd"]
        == "10.0; 15.0"
    )
    assert (
        rows["host ms, wall time, the least of 3 steps of the first stage: even; odd"]
        == "18.0; 22.0"
    )
    assert rows["peak MiB in training; reserved"] == "3,072; 4,096"
    assert rows[page.MEAN] == rows["ms per step, windows 384_128"] == "11.5; 11.5; 11.5"
    assert rows["launches per simulated step"] == "4.0; 4.0; 4.0"
    assert (
        rows["— Triton, other: ms, launches"] == "6.00, 3"
        and rows["— main stream waits: ms"] == "5.5; 5.5; 5.5"
    )
    assert any("2,048 in 7 × forward, line 9" in note for note in notes)
    assert any("a call of print" in note for note in notes)


def test_the_page_of_a_run_that_does_not_fit():
    facts = {
        **FACTS,
        "out of memory": "CUDA out of memory. Tried to allocate 3.00 GiB",
        "phase": "warm-up",
        "host": [],
    }
    log = events("0 PHASE warm-up", "0 OOM cudaMalloc 9 9")
    rows, notes = page.page(
        log, facts, Namespace(arch=89, flash=2, ranks=1, steps=2, trace=None), "this", {}
    )
    assert (
        "does not fit the GPU's memory (phase: warm-up)" in notes[0]
        and "Tried to allocate 3.00 GiB" in notes[0]
    )
    assert "launches per step" not in rows


def test_without_a_compiler_setup_says_so_in_one_line(tmp_path):
    done = subprocess.run(
        ["/bin/bash", DRY / "setup"],
        env={"PATH": str(tmp_path), "HOME": str(tmp_path)},
        text=True,
        capture_output=True,
    )
    assert (
        done.returncode == 1 and done.stderr == "setup: error: no gcc; install gcc and binutils\n"
    )


SMALL = (
    "--preset",
    "laptop",
    "--layers",
    "S0M L0M",
    "--val_tokens",
    "2048",
    "--backout_layer",
    "1",
    "--micro_batch_tokens",
    "1024",
)


@pytest.fixture(scope="module")
def dry():
    """Run dry_gpu/run with flags; by default for a small GPT that compiles in seconds."""
    if not (HOME / "lib" / "libdrygpu.so").exists():
        pytest.skip(f"the simulated GPU is not set up in {HOME}; run dry_gpu/setup")

    def call(*flags, of_script=SMALL):
        return subprocess.run(
            [DRY / "run", "--steps", "2", *flags, "--", *of_script],
            capture_output=True,
            text=True,
            timeout=600,
        )

    return call


def rows_of(done):
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in done.stdout.splitlines()
        if line[:1] == "|"
    ]
    return {row[0]: row[1:] for row in cells}


COUNTED = """
import sys; sys.path[:0] = [{dry!r}, {root!r}]
import frontier, numpy as np, torch, rank0, program, train_gpt as T
from types import SimpleNamespace as Namespace
x, y = torch.ones(2, 1024, 512, device="cuda").unbind()  # 2 MiB each
rows, at = torch.ones(16, 512, device="cuda"), torch.arange(16, device="cuda")
q = torch.ones(1, 128, 1, 64, device="cuda", dtype=torch.bfloat16)
out, log_sums, *_ = flash = torch.ops.aten._flash_attention_forward(q, q, q, None, None, 128, 128, 0.0, True, False)
square = torch.compile(lambda x: (x * x).sum(0))
square(x)
with rank0.census():
    torch.mul(x, 2, out=y)
    x.add(y)
    x.add(y.view(512, 1024).t())
    x.index_add_(0, at, rows)
    torch.ops.aten._flash_attention_backward(q, q, q, q, out, log_sums, None, None, 128, 128, 0.0, True, *flash[2:4])
    square(x)
table = frontier.NgramTable(frontier.Config(), T.Ngrams(2, 100, 64)).cuda()
tokens = torch.arange(64, device="cuda")
rank0.mark("PHASE", "no waits")
table.row_and_sign(tokens)
T.to_device(torch.tensor((1.0, 0.5)), tokens.device)
rank0.mark("PHASE", "end")
rank0.gpu.dry_gpu_flush()
assert [*program.sample(["a"] * 7 + ["b"] * 9)] == [0, 1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 14]
tokens = np.arange(257) % 128 == 0  # two documents of 128 tokens, the size of a block
model = Namespace(bos_id=1, embed=Namespace(weight=x), layers=[Namespace(window=window) for window in ("L", None, "P")])
windows = Namespace(long=255, short=127)
print(rank0.attention_flops([tokens], windows, model))
model.layers = [Namespace(window="L", narrow="qkv")]
print(rank0.attention_flops([tokens], windows, model))
"""


def test_counted_bytes_and_flops(dry, tmp_path):
    """Of eager operators, in MiB; of a compiled reduction; of attention as the mean of its layers.
    What may not wait."""
    code = COUNTED.format(dry=str(DRY), root=str(DRY.parent))
    done = subprocess.run(
        [HOME / "venv/bin/python", "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(HOME / "lib"),
            "TRITON_LIBCUDA_PATH": str(HOME / "lib"),
            "TORCHINDUCTOR_BENCHMARK_KERNEL": "1",
            "DRY_GPU_LOG": str(tmp_path / "log"),
        },
    )
    assert done.returncode == 0, done.stderr
    log = simulate.parse_log(open(tmp_path / "log"))
    assert not any(e.kind == "SYNC" for e in simulate.phase(log, "no waits"))
    counted = {e.name: [] for e in log if e.kind == "OP"}
    for e in log:
        if e.kind == "OP":
            counted[e.name].append(e.numbers[0] / 2**20)
    assert (
        counted["mul"] == [4]
        and counted["add"] == [6, 6 * 5]
        and counted["index_add_"] == [3 * 16 * 512 * 4 / 2**20]
    )
    # elements: 8 tensors in bf16, then dq in float32 written and read
    attention = 128 * 64 * 2**-20
    assert counted["_flash_attention_backward"] == [pytest.approx((16 + 8) * attention, rel=0.02)]
    read = [e.numbers[0] for e in log if e.kind == "COST"]
    assert 2 <= read[0] / 2**20 < 2.2
    # L: 2 blocks of 128 x 128 pairs. P: 512 positions of half the width, 4 blocks and those one
    # back in the document
    wide, narrow = map(float, done.stdout.split())
    assert wide == 4 * 512 * 128**2 * (2 + (4 + 2) / 2) / 2
    assert narrow == 4 * 256 * 128**2 * 2


SUMMED_LOSSES = """
import os, sys; sys.path[:0] = [{dry!r}, {root!r}]
import torch, torch.distributed as dist, rank0, train_gpt as T
device = torch.device("cuda", 0)
torch.cuda.set_device(device)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=2, device_id=device)
config, comm, full = T.Config(), T.Comm(0, 2, device), torch.ones(1024, device=device)
losses = T.TrainLosses(config, comm, T.Clock(device, 0.0), None)
rank0.mark("PHASE", "step")
comm.all_gather(full, full[:512])
losses.record(T.plan_of(config, 0), [torch.ones((), device=device)] * 4)
full + 1
rank0.mark("PHASE", "end")
rank0.gpu.dry_gpu_flush()
os._exit(0)  # threads of the group would wait forever
"""


def test_the_forward_does_not_wait_for_the_sum_of_the_losses(dry, tmp_path):
    """The sum runs after the step's all-gathers. The main stream neither runs it nor waits for it
    or for its copy."""
    code = SUMMED_LOSSES.format(dry=str(DRY), root=str(DRY.parent))
    done = subprocess.run(
        [HOME / "venv/bin/python", "-c", code],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(HOME / "lib"),
            "TRITON_LIBCUDA_PATH": str(HOME / "lib"),
            "TORCH_NCCL_ENABLE_MONITORING": "0",
            "DRY_GPU_LOG": str(tmp_path / "log"),
        },
    )
    assert done.returncode == 0, done.stderr
    step = simulate.phase(simulate.parse_log(open(tmp_path / "log")), "step")
    gather, total = (
        next(e for e in step if e.kind == "NCCL" and e.name == name)
        for name in ("all-gather", "all-reduce")
    )
    copy = next(e for e in step if e.kind == "COPY" and "pinned" in e.name)
    main = next(e.stream for e in step if e.kind == "KERNEL")
    waits = {e.stream: e.numbers for e in step[step.index(total) :] if e.kind == "WAIT"}
    assert (
        len({main, gather.stream, copy.stream}) == 3
        and total.stream == gather.stream
        and [*waits] == [copy.stream]
    )
    assert not any(e.kind == "SYNC" for e in step), "the host waits"


def test_two_ranks_of_a_small_gpt(dry):
    done = dry("--ranks", "2", "--memory", "12", "--arch", "89")
    rows = rows_of(done)
    assert rows["graphs; breaks; compiled after warm-up"][0].endswith("; 0; 0")
    assert (
        int(rows["— Triton"][0]) > 10
        and int(rows["— collectives"][0]) > 2
        and "reduce-scatter" in done.stdout
    )
    assert float(rows[page.MEAN][0].split("; ")[-1]) > 0
    assert re.search(
        r"at the peak of training, MiB: \d+ in \d+ × \w+, train_gpt.py:\d+", done.stdout
    )


def test_a_small_speedrun_on_a_hopper_gpu(dry):
    """bf16, the head in fp8, the MLP's own kernel, and FlashAttention."""
    done = dry(
        "--kernels",
        of_script=(
            "--preset",
            "speedrun",
            "--layers",
            "- S0M LM SM+0",
            "--backout_layer",
            "1",
            "--micro_batch_tokens",
            "2048",
            "--val_tokens",
            "8192",
            "--val_len",
            "4096",
            "--attention",
            "flash",
            "--warmup_steps",
            "4",
            "--stages",
            "Stage(long_window=3), Stage(extra_steps=40, long_window=13)",
        ),
    )
    rows = rows_of(done)
    assert rows["graphs; breaks; compiled after warm-up"][0].endswith("; 0; 0")
    assert rows["— matmuls in fp8: ms, launches"][0].endswith(", 3") and rows[
        "— attention: ms, launches"
    ][0].endswith(", 12")
    registers, spilled, shared_kib = map(int, rows["relu_squared_kernel"])
    assert registers > 100 and not spilled and shared_kib > 150, (
        "the matmul has too few pipeline stages in shared memory"
    )
    # the validation, off the clock, has the plain loss's forward
    assert "softcapped_loss_kernel" in rows and not any(
        "softmax_backward" in name for name in rows
    ), "the loss is not fused"
    waits = rows["host waits for GPU in timed steps"][0]
    assert re.fullmatch(r"none|\d+ cudaEventSynchronize", waits), (
        "only for the sum of the losses, steps later"
    )
    assert "Eager operators among them, ms and launches: mul " in done.stdout


PUBLIC_PROGRAM = """
import os, sys
os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
import torch, torch.distributed as dist
import program
from kernels import get_kernel
import tiktoken

dist.init_process_group(backend="cuda:nccl,cpu:gloo", device_id=torch.device("cuda", int(os.environ["LOCAL_RANK"])))
dist.barrier()
flash = get_kernel("kernels-community/flash-attn3", version=1).flash_attn_interface
count = torch.cuda._compile_kernel("extern C", "count_kernel", compute_capability="90")

class Yarn:
    def reset(self): pass

class GPT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(50304, 128), torch.nn.Linear(128, 384, bias=False)
        self.yarn = Yarn()
    def forward(self, tokens, starts, window):
        q, k, v = self.qkv(self.embed(tokens)).bfloat16().view(len(tokens), 3, 2, 64).unbind(1)
        return flash.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=512, max_seqlen_k=512, causal=True,
            softmax_scale=0.1, window_size=(window, 0)).float().square().mean()

class args:
    num_iterations, val_loss_every = 20, 10

def get_ws(step):
    return (1, 2) if step < 10 else (2, 4)

def distributed_data_generator():
    while True:
        starts = torch.tensor([0, 300, 1024, 1024])
        yield torch.arange(1024, dtype=torch.int32).cuda(), None, starts.to(device="cuda", dtype=torch.int32)

model = GPT().cuda()
optimizer2 = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer2.reset = lambda: None
model = torch.compile(model, dynamic=False, fullgraph=True)
########################################
#            Warmup kernels            #
########################################
raise RuntimeError("the warm-up is left out")
########################################
#        Training and validation       #
########################################
train_loader = distributed_data_generator()
train_steps = args.num_iterations
for step in range(train_steps + 1):
    if args.val_loss_every > 0 and step % args.val_loss_every == 0:
        raise RuntimeError("validation is left out")
    inputs, targets, starts = next(train_loader)
    assert torch.tensor(program.BATCH.documents).bincount().tolist() == [0, 300, 724]  # otherwise attention costs more
    model(inputs, starts, get_ws(step)[1] * 128).backward()
    grad = model.qkv.weight.grad
    rows = torch.empty_like(grad)
    dist.all_to_all_single(rows, grad, async_op=True).get_future().wait()
    if step % 2:
        count((8, 1, 1), (128, 1, 1), (rows, grad))
        optimizer2.step()
"""


def test_a_public_program(dry, tmp_path):
    """Attention, CUDA source, the tokenizer and the hub are replaced; stages, even and odd steps
    are told apart."""
    (tmp_path / "train_gpt.py").write_text(PUBLIC_PROGRAM)
    rows = rows_of(dry("--program", tmp_path / "train_gpt.py", of_script=()))
    assert (
        rows[""][0] == "train_gpt"
        and rows["graphs; breaks; compiled after warm-up"][0] == "2; 0; 0"
    )
    assert {"ms per step, windows 256 128", "ms per step, windows 512 256"} < {*rows}
    assert rows["— attention: ms, launches"][0].endswith(", 4")
    assert rows["— collectives: ms, launches"][0].endswith(", 1")
    even, odd, _ = map(float, rows["launches per simulated step"][0].split("; "))
    assert odd > even


def test_a_run_that_does_not_fit_prints_a_page(dry):
    done = dry("--ranks", "1", "--memory", "0.53")
    assert (
        done.returncode == 2
        and "does not fit the GPU's memory (phase: set-up)" in done.stdout
        and "MiB free" in done.stdout
    ), done.stdout + done.stderr


FIRST_GPU = DRY.parent / "bench" / "first_gpu"


def test_first_gpu_continues_and_names_the_first_failure(tmp_path, monkeypatch, capsys):
    """Measured beside simulated; a part that has run is not run again."""
    loader = importlib.machinery.SourceFileLoader("first_gpu", str(FIRST_GPU))
    first_gpu = importlib.util.module_from_spec(
        importlib.util.spec_from_loader("first_gpu", loader)
    )
    loader.exec_module(first_gpu)
    ran = []

    def good(call):
        ran.append("good")
        return {"x: ms": 2.0}

    parts = {
        "good": good,
        "bad": lambda call: call.run("bad", "-c", "raise ValueError('seen 3')"),
        "worse": lambda call: {}["no key"] if ran else ran[0],
    }
    known = tmp_path / "simulated.json"
    known.write_text('{"0": {"2": {"x: ms": 1.0}, "3": {}}}')
    (
        monkeypatch.setattr(first_gpu, "PARTS", parts),
        monkeypatch.setattr(first_gpu, "SIMULATED", known),
    )

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["first_gpu", "--out", str(tmp_path), *flags])
        return first_gpu.main(), capsys.readouterr().out

    status, output = call("--minutes", "0")
    assert status == 1 and not ran and output.endswith("left: good, bad, worse; call again\n")
    for _ in range(2):
        status, output = call()
        assert (
            status == 1
            and ran == ["good"]
            and "| x: ms | 2.0 | 1.0 | -50.0% |" in output
            and "| worse | failed: KeyError('no key') |" in output
        )
        assert output.endswith(
            "first failure: bad: failed: exit status 1: ValueError: seen 3; see"
            f" {tmp_path}/bad.txt\n"
        )
    assert call("--only", "good")[0] == 0 and ran == ["good"] * 2


def test_first_gpu_on_the_simulated_gpu(dry, tmp_path):
    done = subprocess.run(
        [sys.executable, FIRST_GPU, "--dry", "--only", "attention", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "DRY_GPU_HOME": str(HOME)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (
        "| attention | ran |" in done.stdout
        and "| attention, window 1664, backward: ms | 0.01 |" in done.stdout
    )
    assert "FlashAttention's version | 2 |" in done.stdout
