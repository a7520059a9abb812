"""The emulated GPU: the interpreter's repairs, the order check on small logs, whole comparisons
with the CPU path."""

import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import DRY_GPU_HOME as HOME
from conftest import free_port

DRY = Path(__file__).resolve().parent.parent / "dry_gpu"
sys.path.insert(0, str(DRY))
faults, order, simulate = map(importlib.import_module, ("faults", "order", "simulate"))
sys.path.remove(str(DRY))


def parse(*lines):
    return simulate.parse_log("\t".join(line.split()) + "\n" for line in lines)


WRITE = "0 USE kernel 4096 8192 1"
READ = "5 USE reader 8000 9000 0"


@pytest.mark.parametrize(
    "between, unordered",
    [
        ((), 1),
        (("0 EVENT e 16", "5 WAIT w 16"), 0),
        (("0 EVENT e 16", "7 WAIT w 16"), 1),  # another stream waits
        (("5 WAIT w 16", "0 EVENT e 16"), 1),  # waits before the event
        (("0 EVENT e 16", "7 WAIT w 16", "7 EVENT e 32", "5 WAIT w 32"), 0),
        (("0 SYNC cudaStreamSynchronize",), 0),
        (("7 SYNC cudaStreamSynchronize",), 1),
        (("0 EVENT e 16", "10 SYNC cudaEventSynchronize"), 0),
        (("0 SYNC cudaDeviceSynchronize",), 0),
    ],
)
def test_order_of_uses(between, unordered):
    count, found = order.check(parse(WRITE, *between, READ))
    assert count == 2 and found.total() == unordered
    assert unordered == 0 or [*found] == ["kernel (writes) and reader (reads)"]


def test_reads_and_distant_ranges_need_no_order():
    assert not order.check(parse("0 USE a 4096 8192 0", READ))[1]
    assert not order.check(parse("0 USE a 4096 8000 1", READ))[1]


@pytest.mark.parametrize(
    "lines, needed, others",
    [
        (
            (
                WRITE,
                "0 EVENT e 16",
                "5 WAIT w 16",
                "5 WAIT w 16",
                READ,
                "5 EVENT e 32",
                "0 WAIT w 32",
            ),
            [],
            {2: {3}, 3: {2}, 6: set()},
        ),  # either of the first two suffices; nothing follows the last
        ((WRITE, "0 EVENT e 16", "5 WAIT w 16", READ), [2], {}),
        (
            (WRITE, "0 EVENT e 16", "0 SYNC cudaStreamSynchronize", "5 WAIT w 16", READ),
            [],
            {3: {2}},
        ),
        (
            (
                WRITE,
                "0 EVENT e 16",
                "7 WAIT w 16",
                "7 EVENT e 32",
                "5 WAIT w 16",
                "5 WAIT w 32",
                READ,
            ),
            [],
            {2: {4}, 4: {5}, 5: {4}},
        ),
    ],
)
def test_which_waits_are_needed_and_what_covers_the_others(lines, needed, others):
    assert order.explain_waits(parse(*lines)) == (needed, others)


@pytest.fixture(scope="module")
def emulated():
    """emulated(*flags) runs dry_gpu/run; emulated(code=...) runs code with the interpreter
    installed, as I."""
    library = HOME / "lib" / "libdrygpu.so"
    if not library.exists() or b"dry_gpu_use" not in library.read_bytes():
        pytest.skip(
            f"the emulated GPU is not set up in {HOME}, or by an older revision; run dry_gpu/setup"
        )

    def call(*flags, code="", repaired=True, **settings):
        command = [DRY / "run", *flags]
        env = {**os.environ, **settings}
        if code:
            paths = f"import sys; sys.path[:0] = {str(DRY)!r}, {str(DRY.parent)!r}\n"
            install = (
                "import compute; compute.become_gpu()\nimport interpreter as I, torch,"
                " triton.language as tl\n"
            )
            command = [HOME / "venv/bin/python", "-c", paths + install * repaired + code]
            env |= {
                "LD_LIBRARY_PATH": str(HOME / "lib"),
                "DRY_GPU_COMPUTE": "1",
                "DRY_GPU_POISON": "1",
            }
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=1800)

    return call


def passes(done):
    assert done.returncode == 0, done.stdout + done.stderr


def test_roundings_of_bf16_and_fp8(emulated):
    passes(
        emulated(
            code="""
x = torch.randn(20000) * 10.0 ** torch.randint(-6, 3, (20000,))
x = torch.cat([x, torch.tensor([0.0, -0.0, 1.998, 0.9999, 448, 460, float("inf"), float("nan")])])
for kind, (dtype, bits) in I.NARROW.items():
    top = torch.finfo(dtype).max
    right = (x if kind == tl.bfloat16 else x.clamp(-top, top)).to(dtype).float()
    found = torch.from_numpy(I.widen(I.narrow(x.numpy(), kind)))
    assert torch.equal(found.nan_to_num(9), right.nan_to_num(9)), kind
"""
        )
    )


def test_upstream_reproducers_without_and_with_the_repairs(emulated, tmp_path):
    found = re.findall(
        r"```python\n(.*?# seen: (.*?); expected: (.*?)\n)```",
        (DRY / "UPSTREAM.md").read_text(),
        re.S,
    )
    assert len(found) == 6
    for number, (code, *_) in enumerate(found):
        (tmp_path / f"{number}-False.py").write_text(code)
        # with the repairs a compiled kernel can be interpreted, and needs no copy
        (tmp_path / f"{number}-True.py").write_text(
            code.replace("InterpretedFunction(kernel)", "JITFunction(kernel)")
        )

    def run(repaired):
        return emulated(
            repaired=repaired,
            code=f"""
import runpy, triton
triton.knobs.runtime.interpret = {not repaired}
for number in range({len(found)}):
    try:
        runpy.run_path(f"{tmp_path}/{{number}}-{repaired}.py")
    except Exception as error:
        print(error)
""",
        ).stdout.splitlines()

    for (_, seen, expected), without, repaired in zip(found, run(False), run(True), strict=True):
        assert seen in without and repaired == expected


KERNELS = '''
import importlib.util
open(path := sys.argv[1] + "/kernels.py", "w").write("""
import triton, triton.language as tl
from triton.language.extra import libdevice

@triton.jit
def square(x):
    return x * x

@triton.jit
def product(a, b, out, beyond: tl.constexpr):
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    y = tl.dot(tl.load(a + at), tl.load(b + at))
    tl.store(out + at + beyond, square(libdevice.sqrt(libdevice.abs(y))))
""")
spec = importlib.util.spec_from_file_location("kernels", path)
spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
'''


def test_dot_in_bf16_extern_functions_and_nested_kernels(emulated, tmp_path):
    passes(
        emulated(
            code=KERNELS.replace("sys.argv[1]", repr(str(tmp_path)))
            + """
a, b = torch.randn(2, 16, 16, device="cuda", dtype=torch.bfloat16)
module.product[(1,)](a, b, out := torch.empty(16, 16, device="cuda"), 0)
torch.testing.assert_close(out, (a.float() @ b.float()).abs())
"""
        )
    )


def test_an_access_outside_of_the_arguments_is_an_error(emulated, tmp_path):
    done = emulated(
        code=KERNELS.replace("sys.argv[1]", repr(str(tmp_path)))
        + """
a = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
module.product[(1,)](a, a, torch.empty(16, 16, device="cuda"), 1)
"""
    )
    assert done.returncode and "IndexError: product writes" in done.stderr, done.stderr


def test_the_mlp_kernel_in_bf16(emulated):
    passes(
        emulated(
            code="""
import train_gpt as T
for m, k, n in ((128, 64, 256), (256, 192, 512)):
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16()
    y = a.float() @ b.float()
    for programs in (1, 3):
        T.kernel_grid = lambda *_: (programs, 256)
        h = T.relu_squared(a, b)
        g = T.relu_squared(a, b, h)
        for found, right in ((h, y.relu() * y), (g, 2 * y * h.float().sqrt())):
            assert (found.float() - right).norm() / right.norm() < 5e-3
"""
        )
    )


def test_the_mlp_kernel_in_fp8(emulated):
    """Forward and backward: the result divided by its scale and rounded once, up to ties that the
    order of sums decides; the largest value has no rounding."""
    passes(
        emulated(
            code="""
import frontier as T
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
for m, k, n in ((128, 128, 256), (256, 384, 512)):
    a_scale, b_scale = 2**-4, 2**-7
    a8 = T.to_fp8(torch.randn(m, k).bfloat16(), a_scale, E4M3)
    b8 = T.to_fp8(torch.randn(n, k).bfloat16(), b_scale, E4M3)
    y = a8.float() @ b8.float().T * (a_scale * b_scale)
    h = y.relu() * y
    h_scale = h.max() / 600
    h8 = T.to_fp8(h, h_scale, E4M3)
    grad8 = T.to_fp8(torch.randn(m, k), 2**-6, E5M2)
    g = 2 * (grad8.float() @ b8.float().T * (2**-6 * b_scale)) * (h8.float() * h_scale).sqrt()
    for programs in (1, 3):
        T.kernel_grid = lambda *_: (programs, 256)
        for a, scale, right, out_scale, kind, more in (
            (a8, a_scale * b_scale, h, h_scale, E4M3, ()),
            (grad8, 2**-6 * b_scale, g, g.abs().max() / 70000, E5M2, (h8.cuda(), h_scale.cuda())),
        ):
            scales = [x.cuda() for x in (out_scale, torch.zeros(()))]
            out, out_T = T.relu_squared_in_fp8(
                a.cuda(), b8.cuda().T, scale, *scales, torch.bfloat16, True, *more)
            assert out.dtype == out_T.dtype == kind
            assert torch.equal(out.cpu().float().T, out_T.cpu().float())
            rounded = T.to_fp8(right, out_scale, kind)
            assert rounded.float().abs().max() == torch.finfo(kind).max
            assert (out.cpu().float() != rounded.float()).float().mean() < 1e-3
            assert abs(scales[1].item() / right.abs().max().item() - 1) < 1e-6
"""
        )
    )


def test_a_compiled_update_keeps_the_rest_of_a_matrix_in_bf16(emulated):
    """Inductor drops a cast to bf16 and back, which would leave no rest. Uncompiled, it is at most
    half a unit of bf16."""
    passes(
        emulated(
            code="""
import train_gpt as T
rule = T.NorMuon(lr=1e-3, wide=True)
param, grad = torch.randn(2, 1, 16, 32, device="cuda").bfloat16().unbind()
begun, state = param.float(), rule.init_state(param)
hyper = {**rule.hyper(T.Plan(), 1), "scale": torch.ones(1, 1, 1, device="cuda")}
torch.compile(rule.update, dynamic=False)(param, grad, state, hyper)
alone, state_alone = begun.clone(), rule.init_state(begun)
rule.update(alone, grad.float(), state_alone, hyper)
assert 0 < state["rest"].abs().amax() <= 2 ** -8 * param.float().abs().amax(), "no rest"
torch.testing.assert_close(param + state["rest"] - begun, alone - begun, rtol=1e-3, atol=1e-6)
""",
            TORCHINDUCTOR_CACHE_DIR=str(HOME / "inductor"),
            TRITON_CACHE_DIR=str(HOME / "triton"),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TRITON_LIBCUDA_PATH=str(HOME / "lib"),
            OMP_NUM_THREADS="1",
        )
    )


def test_poisoned_memory_starts_as_nan(emulated):
    passes(emulated(code="assert torch.empty(1000, device='cuda').isnan().all()"))


def test_uses_of_operators_in_the_log(emulated, tmp_path):
    done = emulated(
        code="""
import aten
x = torch.ones(1000, device="cuda")
y = x.add(1)
y.cpu()
aten.gpu.dry_gpu_flush()
print(x.data_ptr(), y.data_ptr())
""",
        DRY_GPU_USES="1",
        DRY_GPU_LOG=str(tmp_path / "log"),
    )
    passes(done)
    x, y = map(int, done.stdout.split())
    uses = [
        (e.name, *e.numbers) for e in simulate.parse_log(open(tmp_path / "log")) if e.kind == "USE"
    ]
    assert uses[-3:] == [
        ("aten::add", x, x + 4000, 0),
        ("aten::add", y, y + 4000, 1),
        ("aten::copy_", y, y + 4000, 0),
    ]


def test_masks_at_the_borders_of_blocks(emulated):
    passes(emulated("--compare", "masks"))


def test_two_ranks_poisoned_and_shuffled(emulated):
    """Rows of lazy tables are sent and received, so this needs all of the emulated NCCL."""
    passes(emulated("--compare", "laptop", "--steps", "2", "--ranks", "2", "--poison", "--shuffle"))


def test_broadcast_send_and_receive(emulated, tmp_path):
    code = """
import os, torch.distributed as dist
rank = int(os.environ["RANK"])
torch.cuda.set_device(0)
dist.init_process_group("nccl", rank=rank, world_size=2, device_id=torch.device("cuda", 0))
for dtype in torch.float32, torch.bfloat16, torch.int64:
    first, second = (torch.arange(10 * r, 10 * r + 7, device="cuda").to(dtype) for r in range(2))
    mine, others = (first, second) if rank == 0 else (second, first)
    for root, right in enumerate((first, second)):
        dist.broadcast(x := mine.clone(), root)
        assert torch.equal(x, right), (rank, root, x)
    x = torch.empty_like(mine)
    both = dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, x, 1 - rank)
    for message in dist.batch_isend_irecv([*both]):
        message.wait()
    assert torch.equal(x, others), (rank, x)
    (dist.send if rank else dist.recv)(x, 1 - rank)  # back to where it came from
    assert torch.equal(x, mine if rank == 0 else others), (rank, x)
print("all arrived", flush=True)
os._exit(0)  # threads of the group would wait forever
"""
    settings = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(free_port()),
        "DRY_GPU_SHARED": str(tmp_path / "messages"),
    }
    with ThreadPoolExecutor() as pool:
        for done in pool.map(lambda rank: emulated(code=code, RANK=rank, **settings), "01"):
            assert "all arrived" in done.stdout, done.stderr


def test_resume_ends_with_the_bytes_of_an_uninterrupted_run(emulated, tmp_path):
    """A run of main(), stopped after its second checkpoint. Attention would take a minute of CPU
    time to compile."""
    passes(
        emulated(
            code=f"""
import compute, os, re, train_gpt as T
from pathlib import Path
compute.write_shards(shards := Path({str(HOME)!r}) / "shards-257", 257)
flags = ["--preset", "laptop", *compute.COMMON, *compute.REDUCED["laptop"], "--save_every", "1", "--log_dir",
         {str(tmp_path)!r}, "--train_files", f"{{shards}}/random_train_*.bin", "--val_files",
         f"{{shards}}/random_val_*.bin", "--num_steps", "3",
         "--layers", "M M"]
step = T.Worker.step

def interrupted(worker, plan, batch):
    if plan.step == 2:
        raise T.RunError("planted")
    return step(worker, plan, batch)

assert T.main(T.PRESETS, [*flags, "--run_id", "whole"]) == 0
T.Worker.step = interrupted
assert T.main(T.PRESETS, [*flags, "--run_id", "stopped"]) == 1
T.Worker.step = step
assert T.main(T.PRESETS, ["--resume", {str(tmp_path / "stopped.txt")!r}]) == 0
whole, resumed = (re.search('"final_state_hash": "(.*?)"', Path({str(tmp_path)!r}, name).read_text())[1]
                  for name in ("whole.txt", "stopped.txt"))
assert whole == resumed
os._exit(0)
""",
            TORCHINDUCTOR_CACHE_DIR=str(HOME / "inductor"),
            TRITON_CACHE_DIR=str(HOME / "triton"),
            TORCHINDUCTOR_COMPILE_THREADS="1",
            TRITON_LIBCUDA_PATH=str(HOME / "lib"),
            OMP_NUM_THREADS="1",
        )
    )


def test_uses_of_memory_are_ordered(emulated):
    done = emulated("--order")
    # one rank, two ranks
    assert done.returncode == 0 and done.stdout.count("unordered: 0") == 2, (
        done.stdout + done.stderr
    )


def test_each_planted_fault_has_its_place():
    """A fault whose line was edited shows nothing; this test needs no simulated GPU, so it runs
    everywhere."""
    for name, fault in faults.FAULTS.items():
        text = (DRY.parent / fault.file).read_text()
        assert faults.plant(fault, text) != text, name


@pytest.mark.parametrize(
    "name",
    ["kernel-column", "fp8-scale", "flash-window", "wrong-shard", "no-wait-gather", "early-loss"],
)
def test_a_planted_fault_is_found(emulated, name):
    done = subprocess.run(
        [HOME / "venv/bin/python", DRY / "faults.py", name], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
