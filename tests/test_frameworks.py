"""The examples of docs/gradient-sync.md, "With frameworks", train, save, and resume at another
number of ranks.

Each needs packages that no other test needs, and is skipped without them:
pip install accelerate transformers lightning torchao.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from conftest import TORCHRUN, free_port
from gpt_speedrun import Adam, Assignment, make_optimizer

ROOT = Path(__file__).resolve().parents[1]
SECTION = (
    (ROOT / "docs/gradient-sync.md")
    .read_text()
    .partition("### With frameworks")[2]
    .partition("\n## ")[0]
)
# what the page calls the reader's own: 8 steps of 8 examples in two epochs, the same at any number
# of ranks
BEGIN = """
import os, sys
from contextlib import nullcontext
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler
from gpt_speedrun import SyncSettings, make_optimizer

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}

torch.set_num_threads(1)
folder, result, accumulate, resume = *sys.argv[1:3], int(sys.argv[3]), (sys.argv[4:] or [None])[0]
rank, ranks, first_epoch, rate = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(resume is not None), lambda step: 1 - step / 8
torch.manual_seed(0)
model = plain = Model()
data = [{"x": torch.randn(8), "labels": torch.randint(4, ())} for _ in range(32)]
batch_size = 8 // ranks // accumulate
loader = DataLoader(data, batch_size)
sharded = DataLoader(data, batch_size, sampler=DistributedSampler(data, ranks, rank, shuffle=False))  # Lightning's own shuffles
"""
END = """
if rank == 0:
    torch.save({name: x.clone() for name, x in plain.state_dict().items()}, result)
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""
LIGHTNING = (
    "import lightning\nfrom lightning.pytorch.callbacks import ModelCheckpoint\nfrom"
    " lightning.pytorch.strategies import DDPStrategy\n"
)
PLAIN = (
    "import torch.distributed.checkpoint as dcp\ndist.init_process_group('gloo')\nloader ="
    " sharded\noptimizer = make_optimizer(model, settings=SyncSettings(clip_norm=0.1))\nscheduler ="
    " LambdaLR(optimizer, rate)\n"
)
# framework: (package, a word of its example, lines before it, the state after the first epoch)
FRAMEWORKS = {
    "checkpoint": ("torch", "dcp.load", PLAIN, "0"),
    "accelerate": ("accelerate", "Accelerator(", "from accelerate import Accelerator\n", "0"),
    "Trainer": (
        "transformers",
        "(Trainer)",
        "from transformers import Trainer, TrainingArguments\n",
        "checkpoint-4",
    ),
    "Lightning": ("lightning", "(DDPStrategy)", LIGHTNING + "loader = sharded\n", "epoch=0.ckpt"),
    "manual": ("lightning", "(Module)", LIGHTNING + "loader = sharded\n", "epoch=0.ckpt"),
    "Fabric": ("lightning", "lightning.Fabric", LIGHTNING, "0.ckpt"),
}


def example(name):
    """Return the example of a framework as a whole script."""

    def block(word):
        (found,) = (
            block
            for block in re.findall(r"^```python\n(.*?)^```$", SECTION, re.M | re.S)
            if word in block
        )
        return found

    text = block(FRAMEWORKS[name][1])
    if name == "manual":  # the other example, with this module
        text = (
            block("(DDPStrategy)")
            .replace("trainer = ", f"{text}\ntrainer = ")
            .replace("Module(model)", "Manual(model)")
        )
        text = text.replace(" accumulate_grad_batches=accumulate,", "")
    return BEGIN + FRAMEWORKS[name][2] + text + END


def train(script, ranks, *arguments):
    done = subprocess.run(
        [
            sys.executable,
            TORCHRUN,
            f"--nproc_per_node={ranks}",
            f"--master_port={free_port()}",
            script,
            *map(str, arguments),
        ],
        cwd=script.parent,
        capture_output=True,
        text=True,
        timeout=600,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "HF_HUB_OFFLINE": "1",
        },
    )
    return done


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """Parameters after an unbroken run on one rank, without a framework."""
    folder = tmp_path_factory.mktemp("unbroken")
    (folder / "script.py").write_text(example("checkpoint"))
    done = train(folder / "script.py", 1, folder / "states", folder / "result.pt", 1)
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "result.pt")


@pytest.mark.slow
@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_example_trains_and_resumes_at_another_number_of_ranks(name, unbroken, tmp_path):
    package, _, _, saved = FRAMEWORKS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    script = tmp_path / "script.py"
    script.write_text(example(name))
    for ranks, other in ((1, 2), (2, 1)):
        states = tmp_path / f"of_{ranks}"
        runs = (
            (ranks, states, tmp_path / f"{ranks}.pt", ranks),
            (
                other,
                f"{states}_resumed",
                tmp_path / f"{ranks}{other}.pt",
                1,
                states / saved,
            ),
        )
        for arguments in runs:
            done = train(script, *arguments)
            assert done.returncode == 0, done.stderr
            found = torch.load(arguments[2])
            assert found.keys() == unbroken.keys()
            for key, x in unbroken.items():
                torch.testing.assert_close(
                    found[key], x, rtol=0, atol=1e-5, msg=lambda text: f"{arguments}, {key}: {text}"
                )


@pytest.mark.slow
def test_a_layer_beside_weights_that_torchao_quantized_trains_as_by_torch():
    quantization = pytest.importorskip("torchao.quantization")

    def trained(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 4))
        model[0].requires_grad_(False)
        quantization.quantize_(model[0], quantization.Int8WeightOnlyConfig())
        optimizer = make(model)
        for _ in range(3):
            model(torch.ones(2, 64)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model[1].weight

    ours = trained(lambda model: make_optimizer(model, [Assignment("1.*", Adam(0.01, eps=1e-8))]))
    theirs = trained(lambda model: torch.optim.Adam(model[1].parameters(), 0.01, (0.9, 0.95)))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
