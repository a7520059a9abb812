"""Triton kernels compared with the plain code that defines them, in Triton's interpreter, and only
in float32.

On a GPU the kernels read and write bf16. The interpreter holds bf16 as raw 16-bit integers and
multiplies those, so these tests say nothing about loads, stores and products in bf16. They cover
tiles, indices and formulas; for bf16 one test gives the kernel bf16 values held in float32, which
leaves out only how the kernel itself rounds.
"""

import importlib.util
import json
import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import train_gpt
from conftest import DRY_GPU_HOME as DRY_GPU

INTERPRETER = """
import json, os, sys, torch, train_gpt as T, frontier as R

def with_programs(programs, function, *args):
    '''function(*args) by the kernel with so many programs, or by the plain code with 0.'''
    T.kernel_grid = R.kernel_grid = lambda *_: (programs, 256 * bool(programs))
    return function(*args)

def gaps(ours, plain):
    return [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(ours, plain, strict=True)]

for line in sys.stdin:
    if os.fork() == 0:
        exec(json.loads(line))
        break
    status = os.wait()[1]
    if status:
        print(json.dumps(f"the code ended with {status}; see above"), flush=True)
"""


class WithTriton(NamedTuple):
    """A Python that has Triton, and the environment that it needs."""

    python: str
    environment: dict


@pytest.fixture(scope="module")
def with_triton():
    python = sys.executable
    libraries = ""
    if not importlib.util.find_spec("triton"):
        python = DRY_GPU / "venv" / "bin" / "python"
        libraries = DRY_GPU / "lib"
        if not python.exists():
            pytest.skip(
                "no triton; it comes with torch's GPU builds, and dry_gpu/setup installs it into"
                f" {DRY_GPU}"
            )
    return WithTriton(str(python), os.environ | {"LD_LIBRARY_PATH": str(libraries)})


@pytest.fixture(scope="module")
def interpret(with_triton):
    """interpret(code) runs code in Triton's interpreter, in a fork of one process that has torch
    -> the JSON that it prints."""
    interpreter = subprocess.Popen(
        [with_triton.python, "-c", INTERPRETER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=train_gpt.ROOT,
        env=with_triton.environment | {"TRITON_INTERPRET": "1"},
    )

    def run(code):
        interpreter.stdin.write(json.dumps(code) + "\n")
        interpreter.stdin.flush()
        found = json.loads(interpreter.stdout.readline())
        assert isinstance(found, list), found
        return found

    yield run
    interpreter.stdin.close()
    interpreter.wait()


def test_relu_squared_and_its_derivative(interpret):
    """Several tiles in each direction, for one program, for several, and for more programs than
    tiles."""
    found = interpret("""
a, b, found = torch.randn(256, 192), torch.randn(192, 512), []
h = with_programs(0, T.relu_squared, a, b)
plain = h, with_programs(0, T.relu_squared, a, b, h), h
for programs in (1, 3, 9):
    found += gaps([with_programs(programs, T.relu_squared, *args) for args in (
        (a, b), (a, b, h), (a.T.contiguous().T, b.T.contiguous().T))], plain)
print(json.dumps(found))
""")
    assert len(found) == 9 and max(found) < 1e-5, found


def test_relu_squared_of_bf16_values_held_in_float32(interpret):
    """It differs from the plain code in bf16 by the rounding of that code's result, one part in
    256, or of two results."""
    found = interpret("""
a, b = torch.randn(256, 192).bfloat16(), torch.randn(192, 512).bfloat16()
h = with_programs(0, T.relu_squared, a, b)
plain = h, with_programs(0, T.relu_squared, a, b, h)
kernel = [with_programs(3, T.relu_squared, a.float(), b.float(), x) for x in (None, h.float())]
print(json.dumps([((x - y.float()).norm() / y.float().norm()).item() for x, y in zip(kernel, plain)]))
""")
    assert len(found) == 2 and 0 < min(found) and max(found) < 2 / 256, found


def test_relu_squared_in_fp8_up_to_the_rounding(interpret):
    """Forward and backward: the factors, the transpose, and the maximum, which may only rise; with
    one program and with several. The interpreter loses the carry of what rounds up to a power of
    two; the emulated GPU has none of that."""
    found = interpret("""
a, b, found = torch.randn(256, 192), torch.randn(512, 192).T, []
scale, h_scale, out_scale = 0.5, torch.tensor(0.3), torch.tensor(0.004)
forward = with_programs(0, T.relu_squared, a, b) / 4
h = R.to_fp8(forward, h_scale, torch.float8_e4m3fn)
backward = with_programs(0, T.relu_squared, a, b, h.float() * h_scale) / 2
for plain, of, kind, more in (
    (forward, h_scale, torch.float8_e4m3fn, ()),
    (backward, out_scale, torch.float8_e5m2, (h, h_scale)),
):
    right = R.to_fp8(plain, of, kind)
    for programs, before in ((1, 0.0), (3, 0.0), (9, 1e6)):
        largest = torch.tensor(before)
        out, out_T = with_programs(
            programs, R.relu_squared_in_fp8, a, b, scale, of, largest, torch.float32, True, *more
        )
        assert out.dtype == out_T.dtype == kind and torch.equal(out.T.float(), out_T.float())
        found += [(out.float() != right.float()).float().mean().item()]
        found += gaps([largest], [plain.abs().max().clamp_min(before)])
print(json.dumps(found))
""")
    assert len(found) == 12 and max(found[::2]) < 0.03 and max(found[1::2]) < 1e-5, found


GRADIENTS = """
mlp = T.MLP(T.Config(model_dim=64, dtype="float32"), 256)
x, grad = torch.randn(128, 64), torch.randn(128, 64)
mlp.proj.data.normal_()
def both():
    for mlp.kernels in (False, True):
        y = mlp(leaf := x.clone().requires_grad_())
        yield [y, *torch.autograd.grad(y, [leaf, mlp.fc, mlp.proj], grad)]
found = [((x - y).norm() / x.norm()).item() for x, y in zip(*both())]
"""


def test_gradients_of_the_mlp(interpret):
    found = interpret(
        "T.kernel_grid = lambda *_: (2, 256)\n" + GRADIENTS + "print(json.dumps(found))"
    )
    assert len(found) == 4 and max(found) < 1e-5, found


def test_gradients_of_the_mlp_without_triton():
    exec(GRADIENTS, space := {"T": train_gpt, "torch": torch})
    assert len(space["found"]) == 4 and max(space["found"]) < 1e-5, space["found"]


@pytest.mark.parametrize(
    "m, k, n, dtype, taken",
    [
        (256, 128, 512, torch.bfloat16, True),
        (256, 128, 512, torch.float32, False),
        (200, 128, 512, torch.bfloat16, False),
        (256, 100, 512, torch.bfloat16, False),
        (256, 128, 384, torch.bfloat16, False),
        (256, 64, 512, torch.bfloat16, True),
        (256, 128, 512, torch.float8_e4m3fn, True),
        (256, 64, 512, torch.float8_e4m3fn, False),
    ],
)
def test_a_gpu_uses_the_kernel_if_the_sizes_are_multiples_of_the_tiles(
    monkeypatch, m, k, n, dtype, taken
):
    """In fp8 twice as many entries of the inner dimension are as many bytes. The result is then in
    bf16."""
    gpu = type(
        "Gpu",
        (),
        {"multi_processor_count": 132, "shared_memory_per_block_optin": 227 << 10, "major": 9},
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    with FakeTensorMode():
        a = torch.empty(m, k, dtype=dtype, device="cuda")
        b = torch.empty(k, n, dtype=dtype, device="cuda")
        out = dtype if dtype.itemsize > 1 else torch.bfloat16
        assert train_gpt.kernel_grid(a, b, out) == (132 * taken, 256 * taken)


LOSS = """
T.LOSS_CHUNK = 64
def both(V, n, cap, shift, factor):
    \"\"\"(objective, entropy, gradients of x and weight) of Head.forward's plain code, and of the kernel.\"\"\"
    settings = dict(model_dim=16, dtype="float32", fp8_head=False, logit_cap=cap)
    head = R.Head(R.Config(**settings, logit_shift=shift), V) if n else T.Head(T.Config(**settings), V)
    head.weight.data = 3 * torch.randn(V, 16)
    x, weights = torch.randn(24, 16, requires_grad=True), torch.tensor([1.0, 0.5, 0.25][:n])
    targets = torch.randint(0, V, (n or 1, 24))
    targets[:, 3], targets[0, 5], targets[:, -2:] = 7, V - 1, -1
    targets[-1, 9] = -1
    for head.kernels in (False, True):
        objective, entropy = head(x, targets, weights) if n else head(x, targets[0], {})
        yield objective, entropy, *torch.autograd.grad(factor * objective, (x, head.weight))
"""


def test_the_loss_of_the_kernel_is_the_plain_one(interpret):
    """Of the head of train_gpt.py, and of frontier.py's for one to three rows of targets.

    Some targets are not counted, some equal, and a last chunk is full, or not.
    """
    found = interpret(
        LOSS
        + """
cases = ((128, 0, 30.0, 0.0, 1.0), (128, 1, 30.0, 0.0, 1.0), (300, 2, 23.0, 5.0, 3.0), (90, 3, 23.0, 5.0, -0.5))
print(json.dumps([((x - y).norm() / x.norm()).item() for case in cases for x, y in zip(*both(*case))]))
"""
    )
    assert len(found) == 16 and max(found) < 2e-6, found


def test_the_kernel_of_the_loss_in_bf16_holds_two_chunks_in_one_register(interpret):
    """Each gradient then has bf16's precision, half a part in 256; those of the targets are not
    packed."""
    found, targets_gap = interpret(
        LOSS
        + """
x, weights, targets = 5 * torch.randn(8, 200), torch.tensor([1.0, 0.5]), torch.randint(0, 200, (2, 8))
softcap = T.Softcap(23.0, 5.0, 7.5)
losses, grad = T.softcapped_loss(x, targets, weights, softcap, None)
packed = torch.full_like(grad, torch.nan)
T.softcapped_loss_kernel[(8,)](x, targets, weights, losses, packed, 8, 200, 2, *softcap, 1.0, 64, True)
gap = (packed - grad) / grad
print(json.dumps([gap.abs().max().item(), gap.gather(1, targets.T).abs().max().item()]))
"""
    )
    assert 1e-4 < found <= 2**-8 and targets_gap == 0, (found, targets_gap)


# Largest shared memory of a block, in KiB, by CUDA's programming guide
SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
COMPILE = r"""
import json, pathlib, re, subprocess, sys, tempfile, torch, triton
import train_gpt as T, frontier as R
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

arch, shared = map(int, sys.argv[1:])
gpu = type("Gpu", (), {"major": arch // 10, "shared_memory_per_block_optin": shared})
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int64: "i64"}
TYPES |= {torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5"}
CUOBJDUMP = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
found = {}

def type_of(value):
    if isinstance(value, T.TensorDescriptor):
        return f"tensordesc<{TYPES[value.base.dtype]}{value.block_shape}>".replace(" ", "")
    return f"*{TYPES[value.dtype]}" if isinstance(value, torch.Tensor) else "i32"

class Compiler:
    '''Stands for a kernel: a launch compiles it for the architecture.'''

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **options):
        signature = {}
        constants = {}
        hints = {}
        for i, (parameter, value) in enumerate(zip(self.kernel.params, args, strict=True)):
            name = parameter.name
            if parameter.is_constexpr:
                signature[name] = "constexpr"
                constants[name] = value
                continue
            signature[name] = type_of(value)
            if signature[name][0] == "*" or signature[name] == "i32" and value % 16 == 0:
                hints[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, hints)
        binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(binary.asm["cubin"])
            file.flush()
            usage = subprocess.check_output([CUOBJDUMP, "-res-usage", file.name], text=True)
        stack = int(re.search(r"STACK:(\d+)", usage)[1])
        found[f"{len(found)} {self.kernel.__name__}"] = stack, binary.metadata.shared

for module in (T, R):
    for name, kernel in vars(module).copy().items():
        if name.endswith("_kernel"):
            setattr(module, name, Compiler(kernel))
T.kernel_grid = R.kernel_grid = lambda a, *_: (132, T.tile_columns(gpu, a.itemsize))
logits = torch.empty(1024, 50304, dtype=torch.bfloat16)
targets = torch.zeros(3, 1024, dtype=torch.int64)
kinds = (torch.bfloat16, None), (torch.bfloat16, 1.0), (torch.float8_e4m3fn, 1.0)
for kind, scale in kinds[: 3 if arch >= 89 else 1]:  # without fp8, the head in fp8, its logits too
    T.softcapped_loss(logits.to(kind), targets, torch.ones(3), T.Softcap(30.0), scale)
if arch >= 90:
    a = torch.empty(1024, 768, dtype=torch.bfloat16)
    b = torch.empty(768, 3072, dtype=torch.bfloat16)
    T.relu_squared(a, b, T.relu_squared(a, b))
    a8, b8 = (x.to(torch.float8_e4m3fn) for x in (a, b.T))
    args = b8.T, 1.0, *torch.ones(2), torch.bfloat16, True
    h8, _ = R.relu_squared_in_fp8(a8, *args)
    grad8 = a8.to(torch.float8_e5m2)
    R.relu_squared_in_fp8(grad8, *args, h8, torch.ones(()))
print(json.dumps(found))
"""


@pytest.mark.parametrize("arch", SHARED_KIB)
def test_kernels_compile_for_each_architecture_without_spills_and_fit_a_block(arch, with_triton):
    """Triton and its ptxas compile what a launch asks for; no GPU is needed."""
    shared = SHARED_KIB[arch] << 10
    done = subprocess.run(
        [with_triton.python, "-c", COMPILE, str(arch), str(shared)],
        capture_output=True,
        text=True,
        cwd=train_gpt.ROOT,
        env=with_triton.environment,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert len(found) == {80: 1, 86: 1, 89: 3}.get(arch, 7)
    for name, (spilled, used) in found.items():
        assert spilled == 0 and used <= shared, (name, spilled, used)
