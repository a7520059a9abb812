"""Triton kernels compared with the plain code that defines them, in Triton's interpreter, and only in float32.

On a GPU the kernels read and write bf16. The interpreter holds bf16 as raw 16-bit integers and multiplies those, so
these tests say nothing about loads, stores and products in bf16. They cover tiles, indices and formulas; for bf16 one
test gives the kernel bf16 values held in float32, which leaves out only how the kernel itself rounds.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import train_gpt

DRY_GPU = Path(os.environ.get("DRY_GPU_HOME") or
               Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dry-gpu")


@pytest.fixture(scope="module")
def interpret():
    """interpret(code) runs code in a process with Triton's interpreter -> the JSON that it prints."""
    python, libraries = sys.executable, ""
    if not importlib.util.find_spec("triton"):
        python, libraries = DRY_GPU / "venv" / "bin" / "python", DRY_GPU / "lib"
        if not python.exists():
            pytest.skip(f"no triton; it comes with torch's GPU builds, and dry_gpu/setup installs it into {DRY_GPU}")

    def run(code):
        done = subprocess.run([python, "-c", "import json, sys, torch, train_gpt as T\n" + code], capture_output=True, text=True,
                              cwd=train_gpt.ROOT, env=os.environ | {"TRITON_INTERPRET": "1", "LD_LIBRARY_PATH": str(libraries)})
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    return run


def test_relu_squared_and_its_derivative(interpret):
    """Several tiles in each direction, for one program, for several, and for more programs than tiles."""
    gaps = interpret("""
a, b, found = torch.randn(256, 192), torch.randn(192, 512), []
for programs in (1, 3, 9):
    h = T.relu_squared(a, b)
    found.append((T.relu_squared_by_triton(a, b, None, programs) - h).abs().max().item() / h.max().item())
    found.append((T.relu_squared_by_triton(a, b, h, programs) - T.relu_squared(a, b, h)).abs().max().item() / h.max().item())
    turned = T.relu_squared_by_triton(a.T.contiguous().T, b.T.contiguous().T, None, programs)
    found.append((turned - h).abs().max().item() / h.max().item())
print(json.dumps(found))
""")
    assert len(gaps) == 9 and max(gaps) < 1e-5, gaps


def test_relu_squared_of_bf16_values_held_in_float32(interpret):
    """It differs from the plain code in bf16 by the rounding of that code's result, one part in 256, or of two results."""
    gaps = interpret("""
a, b = torch.randn(256, 192).bfloat16(), torch.randn(192, 512).bfloat16()
h = T.relu_squared(a, b)
plain = h, T.relu_squared(a, b, h)
kernel = [T.relu_squared_by_triton(a.float(), b.float(), x, 3) for x in (None, h.float())]
print(json.dumps([((x - y.float()).norm() / y.float().norm()).item() for x, y in zip(kernel, plain)]))
""")
    assert len(gaps) == 2 and 0 < min(gaps) and max(gaps) < 2 / 256, gaps


def test_relu_squared_in_fp8_up_to_the_rounding(interpret):
    """The factors, and the maximum, which may only rise; with one program and with several."""
    gaps = interpret("""
a, b, found = torch.randn(256, 192), torch.randn(512, 192).T, []
scale, h_scale = torch.tensor(0.5), torch.tensor(0.3)
h = T.relu_squared(a, b) / 4
for programs, before in ((1, 0.0), (3, 0.0), (9, 1e6)):
    h_max = torch.tensor(before)
    ours = T.relu_squared_by_triton(a, b, None, programs, scale, h_scale, h_max)
    plain = h, h / h_scale, h.max().clamp_min(before)
    found += [((x - y).abs().max() / y.max()).item() for x, y in zip((*ours, h_max), plain)]
print(json.dumps(found))
""")
    assert len(gaps) == 9 and max(gaps) < 1e-5, gaps


GRADIENTS = """
mlp = T.MLP(T.Config(model_dim=64, dtype="float32"))
x, grad = torch.randn(128, 64), torch.randn(128, 64)
mlp.proj.data.normal_()
def both():
    for mlp.kernels in (False, True):
        y = mlp(leaf := x.clone().requires_grad_())
        yield [y, *torch.autograd.grad(y, [leaf, mlp.fc, mlp.proj], grad)]
found = [((x - y).norm() / x.norm()).item() for x, y in zip(*both())]
"""


def test_gradients_of_the_mlp(interpret):
    by_triton = "T.relu_squared = lambda a, b, h=None: T.relu_squared_by_triton(a, b, h, 2)\n"
    gaps = interpret(by_triton + GRADIENTS + "print(json.dumps(found))")
    assert len(gaps) == 4 and max(gaps) < 1e-5, gaps


def test_gradients_of_the_mlp_without_triton():
    exec(GRADIENTS, space := {"T": train_gpt, "torch": torch})
    assert len(space["found"]) == 4 and max(space["found"]) < 1e-5, space["found"]


@pytest.mark.parametrize("m, k, n, dtype, taken", [
    (256, 128, 512, torch.bfloat16, True), (256, 128, 512, torch.float32, False), (200, 128, 512, torch.bfloat16, False),
    (256, 100, 512, torch.bfloat16, False), (256, 128, 384, torch.bfloat16, False)])
def test_a_gpu_uses_the_kernel_if_the_sizes_are_multiples_of_the_tiles(monkeypatch, m, k, n, dtype, taken):
    launched = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: type("Gpu", (), {"multi_processor_count": 132}))
    monkeypatch.setattr(train_gpt, "relu_squared_by_triton", lambda a, b, h, programs: launched.append(programs) or a.new_empty(m, n))
    with FakeTensorMode():
        out = train_gpt.relu_squared(torch.empty(m, k, dtype=dtype, device="cuda"), torch.empty(k, n, dtype=dtype, device="cuda"))
    assert out.shape == (m, n) and launched == [132] * taken


LOSS = """
T.LOSS_CHUNK = 64
def both(V, n, cap, shift, factor):
    \"\"\"(objective, entropies, gradients of x and weight) of Head.forward's plain code, and of the kernel.\"\"\"
    head = T.Head(T.Config(model_dim=16, dtype="float32", fp8_head=False, logit_cap=cap, logit_shift=shift, head_init=3.0), V)
    x, weights = torch.randn(24, 16, requires_grad=True), torch.tensor([1.0, 0.5, 0.25][:n])
    targets = torch.randint(0, V, (n, 24))
    targets[:, 3], targets[0, 5], targets[:, -2:] = 7, V - 1, -1
    targets[-1, 9] = -1
    for loss, entropies in ((T.cross_entropies(head.uncapped_logits(x), targets, head.softcap),) * 2,
                            T.HeadLoss.apply(x, head.weight, targets, weights, head.softcap, None)):
        objective = (loss * weights).sum() if loss.dim() else loss
        yield objective, entropies, *torch.autograd.grad(factor * objective, (x, head.weight))
"""


def test_the_loss_of_the_kernel_is_the_plain_one(interpret):
    """For one to three rows of targets, some not counted and some equal, and a last chunk that is full, or not."""
    gaps = interpret(LOSS + """
found = [((x - y).norm() / x.norm()).item() for case in ((128, 1, 30.0, 0.0, 1.0), (300, 2, 23.0, 5.0, 3.0), (90, 3, 23.0, 5.0, -0.5))
         for x, y in zip(*both(*case))]
print(json.dumps(found))
""")
    assert len(gaps) == 12 and max(gaps) < 2e-6, gaps


def test_the_kernel_of_the_loss_in_bf16_holds_two_chunks_in_one_register(interpret):
    """Each gradient then has bf16's precision, half a part in 256; those of the targets are not packed."""
    gaps, targets_gap = interpret(LOSS + """
x, weights, targets = 5 * torch.randn(8, 200), torch.tensor([1.0, 0.5]), torch.randint(0, 200, (2, 8))
softcap = T.Softcap(23.0, 5.0, 7.5)
losses, grad = T.softcapped_loss(x, targets, weights, softcap, None)
packed = torch.full_like(grad, torch.nan)
T.softcapped_loss_kernel[(8,)](x, targets, weights, losses, packed, 8, 200, 2, *softcap, 1.0, 64, True)
gap = (packed - grad) / grad
print(json.dumps([gap.abs().max().item(), gap.gather(1, targets.T).abs().max().item()]))
""")
    assert 1e-4 < gaps <= 2 ** -8 and targets_gap == 0, (gaps, targets_gap)
