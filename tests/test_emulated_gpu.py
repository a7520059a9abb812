"""The emulated GPU: the interpreter's repairs, the order check on small logs, whole comparisons with the CPU path."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

DRY = Path(__file__).resolve().parent.parent / "bench" / "dry_gpu"
sys.path.insert(0, str(DRY))
order, simulate = importlib.import_module("order"), importlib.import_module("simulate")
sys.path.remove(str(DRY))

HOME = Path(os.environ.get("DRY_GPU_HOME") or
            Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dry-gpu")


def parse(*lines):
    return simulate.parse_log("\t".join(line.split()) + "\n" for line in lines)


WRITE, READ = "0 USE kernel 4096 8192 1", "5 USE reader 8000 9000 0"


@pytest.mark.parametrize("between, unordered", [
    ((), 1),
    (("0 EVENT e 16", "5 WAIT w 16"), 0),
    (("0 EVENT e 16", "7 WAIT w 16"), 1),  # another stream waits
    (("5 WAIT w 16", "0 EVENT e 16"), 1),  # waits before the event
    (("0 EVENT e 16", "7 WAIT w 16", "7 EVENT e 32", "5 WAIT w 32"), 0),
    (("0 SYNC cudaStreamSynchronize",), 0),
    (("7 SYNC cudaStreamSynchronize",), 1),
    (("0 EVENT e 16", "10 SYNC cudaEventSynchronize"), 0),
    (("0 SYNC cudaDeviceSynchronize",), 0),
])
def test_order_of_uses(between, unordered):
    count, found = order.check(parse(WRITE, *between, READ))
    assert count == 2 and found.total() == unordered
    assert unordered == 0 or [*found] == ["kernel (writes) and reader (reads)"]


def test_reads_and_distant_ranges_need_no_order():
    assert not order.check(parse("0 USE a 4096 8192 0", READ))[1]
    assert not order.check(parse("0 USE a 4096 8000 1", READ))[1]


def test_waits_whose_removal_is_not_noticed():
    log = parse(WRITE, "0 EVENT e 16", "5 WAIT w 16", "5 WAIT w 16", READ, "5 EVENT e 32", "0 WAIT w 32")
    assert order.unnoticed_waits(log) == (3, [2, 3, 6])  # either of the first two suffices; nothing follows the last
    assert order.redundant_waits(log) == [3]


@pytest.fixture(scope="module")
def emulated():
    """emulated(*flags) runs bench/dry_gpu/run; emulated(code=...) runs code with the interpreter installed, as I."""
    library = HOME / "lib" / "libdrygpu.so"
    if not library.exists() or b"dry_gpu_use" not in library.read_bytes():
        pytest.skip(f"the emulated GPU is not set up in {HOME}, or by an older revision; run bench/dry_gpu/setup")

    def call(*flags, code=""):
        command, env = [DRY / "run", *flags], {**os.environ}
        if code:
            command = [HOME / "venv/bin/python", "-c", f"import sys; sys.path.insert(0, {str(DRY)!r}); import compute\n"
                       "compute.become_gpu()\nimport interpreter as I, torch, triton.language as tl\n" + code]
            env |= {"LD_LIBRARY_PATH": str(HOME / "lib"), "DRY_GPU_COMPUTE": "1", "DRY_GPU_POISON": "1"}
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    return call


def passes(done):
    assert done.returncode == 0, done.stdout + done.stderr


def test_roundings_of_bf16_and_fp8(emulated):
    passes(emulated(code="""
x = torch.randn(20000) * 10.0 ** torch.randint(-6, 3, (20000,))
x = torch.cat([x, torch.tensor([0.0, -0.0, 1.998, 0.9999, 448, 460, float("inf"), float("nan")])])
for kind, (dtype, bits) in I.NARROW.items():
    top = torch.finfo(dtype).max
    right = (x if kind == tl.bfloat16 else x.clamp(-top, top)).to(dtype).float()
    found = torch.from_numpy(I.widen(I.narrow(x.numpy(), kind)))
    assert torch.equal(found.nan_to_num(9), right.nan_to_num(9)), kind
"""))


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
    passes(emulated(code=KERNELS.replace("sys.argv[1]", repr(str(tmp_path))) + """
a, b = torch.randn(2, 16, 16, device="cuda", dtype=torch.bfloat16)
module.product[(1,)](a, b, out := torch.empty(16, 16, device="cuda"), 0)
torch.testing.assert_close(out, (a.float() @ b.float()).abs())
"""))


def test_an_access_outside_of_the_arguments_is_an_error(emulated, tmp_path):
    done = emulated(code=KERNELS.replace("sys.argv[1]", repr(str(tmp_path))) + """
a = torch.randn(16, 16, device="cuda", dtype=torch.bfloat16)
module.product[(1,)](a, a, torch.empty(16, 16, device="cuda"), 1)
""")
    assert done.returncode and "IndexError: product writes" in done.stderr, done.stderr


def test_the_mlp_kernel_in_bf16(emulated):
    passes(emulated(code="""
import train_gpt as T
for m, k, n in ((128, 64, 256), (256, 192, 512)):
    a, b = torch.randn(m, k, device="cuda").bfloat16(), torch.randn(k, n, device="cuda").bfloat16()
    y = a.float() @ b.float()
    for programs in (1, 3):
        h = T.relu_squared_by_triton(a, b, None, programs)
        g = T.relu_squared_by_triton(a, b, h, programs)
        for found, right in ((h, y.relu() * y), (g, 2 * y * h.float().sqrt())):
            assert (found.float() - right).norm() / right.norm() < 5e-3
""".replace("import train_gpt", f"sys.path.insert(0, {str(DRY.parent.parent)!r}); import train_gpt")))


def test_the_mlp_kernel_in_fp8(emulated):
    """h8 is h / h_scale rounded once, up to ties that the order of sums decides; the largest h has no rounding."""
    passes(emulated(code="""
import train_gpt as T
for m, k, n in ((128, 128, 256), (256, 384, 512)):
    a8, a_scale = T.to_e4m3(torch.randn(m, k).bfloat16())
    b8, b_scale = T.to_e4m3(torch.randn(n, k).bfloat16())
    y = (a8.float() @ b8.float().T * (a_scale * b_scale)).relu()
    for programs in (1, 3):
        scales = [x.cuda() for x in (a_scale * b_scale, y.square().max() / 600, torch.zeros(()))]
        h, h8 = T.relu_squared_by_triton(a8.cuda(), b8.cuda().T, None, programs, *scales)
        assert h.dtype == torch.bfloat16 and h8.dtype == torch.float8_e4m3fn
        assert (h.cpu().float() - y * y).norm() / (y * y).norm() < 3e-3
        right = (y * y / scales[1].cpu()).to(torch.float8_e4m3fn)
        assert right.float().max() == 448
        assert (h8.cpu().float() != right.float()).float().mean() < 1e-3
        assert abs(scales[2].item() / y.square().max().item() - 1) < 1e-6
""".replace("import train_gpt", f"sys.path.insert(0, {str(DRY.parent.parent)!r}); import train_gpt")))


def test_poisoned_memory_starts_as_nan(emulated):
    passes(emulated(code="assert torch.empty(1000, device='cuda').isnan().all()"))


def test_masks_at_the_borders_of_blocks(emulated):
    passes(emulated("--compare", "masks"))


def test_two_steps_of_every_preset(emulated):
    passes(emulated("--compare", "--steps", "2"))


def test_two_ranks_poisoned_and_shuffled(emulated):
    passes(emulated("--compare", "laptop", "--steps", "2", "--ranks", "2", "--poison", "--shuffle"))


def test_uses_of_memory_are_ordered(emulated):
    done = emulated("--order")
    assert done.returncode == 0 and "unordered: 0" in done.stdout, done.stdout + done.stderr


def test_a_missing_wait_is_found(emulated):
    done = emulated("--order", "--fault", "no-wait-gather")
    assert done.returncode == 1 and "(writes) and" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("preset, fault", [("masks", "full-blocks"), ("laptop", "wrong-shard")])
def test_a_planted_fault_fails(emulated, preset, fault):
    done = emulated("--compare", preset, "--steps", "1", "--ranks", "2", "--fault", fault)
    assert done.returncode == 1 and "above its limit" in done.stdout, done.stdout + done.stderr
