"""Faults in GPU-only code, each of which dry_gpu/run --compare or --order, or a test, must find.

.venv/bin/python dry_gpu/faults.py [NAME ...]     plant each in turn, print a table of what finds it
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Fault(NamedTuple):
    meaning: str
    old: str  # occurs once in the file; layout does not matter
    new: str
    flags: str  # of dry_gpu/run, or `pytest` and its arguments
    # the run's error, for a fault that ends it; any other error means that the run did not compare
    error: str = "$^"
    file: str = "train_gpt.py"


OF_KERNEL = "pytest tests/test_kernels.py -k in_fp8"
MLP_FP8 = "--compare frontier89 --dtype bfloat16 --steps 2"
# so that one step updates every parameter
BF16 = "--compare speedrun --dtype bfloat16 --steps 1 -- --adam_every 1"
RANKS = "--compare laptop --ranks 2 --steps 1"
FAULTS = {
    "kernel-column": Fault(
        "the MLP's kernel writes both halves of a tile to the first half",
        "out.store([row, column + i * HALF]",
        "out.store([row, column]",
        BF16,
    ),
    "kernel-inner": Fault(
        "the MLP's kernel omits the last tile of the inner dimension",
        "for k in range(0, K, TILE_K):",
        "for k in range(0, K - TILE_K, TILE_K):",
        BF16,
    ),
    "kernel-beyond": Fault(
        "the MLP's kernel starts one tile too low",
        "row = tile // columns * TILE_M",
        "row = tile // columns * TILE_M + TILE_M",
        BF16,
    ),
    "kernel-fp8-inner": Fault(
        "the MLP's kernel in fp8 multiplies each tile of the inner dimension by the first of the"
        " second factor",
        "b.load([column, k]).T",
        "b.load([column, 0]).T",
        MLP_FP8 + " -- --model_dim 256 --num_heads 4",  # two tiles
        file="frontier.py",
    ),
    "kernel-fp8-scale": Fault(
        "the MLP's kernel in fp8 divides by the scale of h what has another",
        "to_out = 1 / tl.load(out_scale)",
        "to_out = 1 / tl.load(h_scale)",
        OF_KERNEL,
        ".",
        file="frontier.py",
    ),
    "kernel-fp8-transpose": Fault(
        "the MLP's kernel in fp8 stores both halves of a transposed tile in the first",
        "out_T.store([column + i * HALF, row]",
        "out_T.store([column, row]",
        OF_KERNEL,
        ".",
        file="frontier.py",
    ),
    "kernel-fp8-max": Fault(
        "the MLP's kernel in fp8 finds no largest value, so that the first scales stay",
        "tl.atomic_max(out_max, largest)",
        "tl.atomic_max(out_max, 0.0)",
        OF_KERNEL,
        ".",
        file="frontier.py",
    ),
    "fp8-scale": Fault(
        "the gradient of the head's weight is scaled by another scale",
        "grad_scale, scales.x, False",
        "grad_scale, scales.weight, False",
        BF16,
    ),
    "loss-packing": Fault(
        "the loss's kernel swaps the chunks that share a register",
        "(pair << 16 if i // CHUNK % 2 == 0 else",
        "(pair << 16 if i // CHUNK % 2 == 1 else",
        BF16,
    ),
    "loss-targets": Fault(
        "the loss's kernel subtracts only the first row of targets from the gradient",
        "tl.load(targets + j * T + row) == target",
        "tl.load(targets + row) == target",
        "--compare frontier89 --steps 1",
    ),
    "fp8-range": Fault(
        "activations of the head fall below fp8's range",
        "scales.x).to(torch.float8_e4m3fn)",
        "scales.x * 4096).to(torch.float8_e4m3fn)",
        BF16,
    ),
    "flash-window": Fault(
        "FlashAttention's window is one token too short",
        "window_size_left=window, window_size_right=0)\n    return out",
        "window_size_left=window - 1, window_size_right=0)\n    return out",
        "--compare masks",
    ),
    "flash-starts": Fault(
        "FlashAttention's last document has no end",
        "starts = starts[: count + 1]\n    inputs = (q, k, v, starts",
        "starts = starts[:count]\n    inputs = (q, k, v, starts",
        "--compare masks",
        "documents from 0 to 0 are not all",
    ),
    "wrong-shard": Fault(
        "each rank updates another rank's shard",
        "self.param_data.chunk(ranks)[rank].view(-1, *unit)\n"
        "self.grad_shard = self.grad_data.chunk(ranks)[rank]",
        "self.param_data.chunk(ranks)[~rank].view(-1, *unit)\n        "
        "self.grad_shard = self.grad_data.chunk(ranks)[~rank]",
        RANKS,
    ),
    "wrong-rows": Fault(
        "the rows of the own shard are counted from another shard",
        "self.on_device(ones(bits_of_any, begin, end))",
        "self.on_device(begin + ones(bits_of_any, begin, end))",
        RANKS,
        "Expected Tensor with single nonzero value",
    ),
    "stale-number": Fault(
        "compiled rules keep the first value of each number",
        "lambda name, x: torch.full((), x, device=comm.device)",
        "lambda name, x, known={}: known.setdefault(name, torch.full((), x, device=comm.device))",
        "--compare laptop",
    ),
    "no-wait-reduce": Fault(
        "the update does not wait for the reduce-scatter",
        "bucket.reduce_handle.wait()",
        "pass",
        "--order",
    ),
    "no-wait-gather": Fault(
        "the forward does not wait for the all-gather",
        "bucket.gather_handle.wait()",
        "pass",
        "--order",
    ),
    "early-loss": Fault(
        "one rank copies the losses to the host before the step has computed them",
        "self.stream.wait_stream(torch.cuda.current_stream())",
        "pass",
        "--order",
    ),
    "blocking-sum": Fault(
        "the next forward waits for the sum of the losses, which runs after all gathers",
        "dist.all_reduce(x, group=self.group, async_op=True)",
        "dist.all_reduce(x, group=self.group) or HandleGroup()",
        "pytest tests/test_dry_gpu.py -k forward_does_not_wait_for_the_sum",
        "assert",
    ),
    "two-splits": Fault(
        "FlashAttention 3 splits the keys in two",
        "num_splits=1, return_attn_probs",
        "num_splits=2, return_attn_probs",
        "pytest tests/test_model.py -k right_documents_and_window",
        "num_splits is 2",
    ),
    "no-rest": Fault(
        "compiled updates of matrices in bf16 are rounded away",
        "return (x.to(torch.bfloat16).view(torch.int16).int() << 16).view(torch.float32)",
        "return x.to(torch.bfloat16).to(torch.float32)",
        "pytest tests/test_emulated_gpu.py -k keeps_the_rest",
        "no rest",
    ),
    "not-compared": Fault(
        "preflight lets a part pass whose plain version failed",
        '* (verdict != "ok")',
        '* (verdict == "failed")',
        "pytest tests/test_preflight.py -k plain_version_fails",
        "'NoneType' object has no attribute 'name'",
        file="launch/preflight.py",
    ),
}


def plant(fault, text):
    """Put the fault into its file's text. Raise AssertionError unless its place is there once,
    whatever the layout."""
    words = map(re.escape, re.findall(r"\w+|[^\w\s]", fault.old))
    # a formatter ends a list that takes several lines with a comma
    place = re.sub(r"(?<=\\s\*)(?=\\[\])}])", r",?\\s*", r"\s*".join(words))
    places = re.findall(place, text)
    assert len(places) == 1, f"{fault.file} has {len(places)} times {fault.old!r}, not once"
    return text.replace(places[0], fault.new)


def found_by_tests(fault):
    """Plant the fault in a copy of the project and run tests there -> (exit status, output)."""
    root = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(
            shutil.copytree(
                root,
                Path(folder, "copy"),
                ignore=shutil.ignore_patterns(".*", "logs", "*.bin", "records"),
            )
        )
        shutil.copytree(root / "records", copy / "records", ignore=shutil.ignore_patterns("20*"))
        file = copy / fault.file
        file.write_text(plant(fault, file.read_text()))
        done = subprocess.run(
            [sys.executable, "-m", *fault.flags.split(), "-q", "-n", "0"],
            cwd=copy,
            capture_output=True,
            text=True,
        )
    return done.returncode, done.stdout + done.stderr


def main():
    parser = argparse.ArgumentParser(description="Plant each fault in turn: " + ", ".join(FAULTS))
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        default="all",
        choices=["all", *FAULTS],
        help="only these",
    )
    run = Path(__file__).with_name("run")
    print("| fault | found by | difference |\n| --- | --- | --- |")
    missed = []
    names = parser.parse_args().names
    for name in FAULTS if "all" in names else names:
        fault = FAULTS[name]
        if fault.flags.startswith("pytest"):
            status, output = found_by_tests(fault)
        else:
            ours, dashes, script = fault.flags.partition(" -- ")
            command = [run, *ours.split(), "--fault", name, *dashes.split(), *script.split()]
            done = subprocess.run(command, capture_output=True, text=True)
            status = done.returncode
            output = done.stdout + done.stderr
        found = re.findall(
            f"above its limit: (.*)|^.*Error: ({fault.error}.*)|(unordered: [^0].*)", output, re.M
        )
        print(
            f"| {name}: {fault.meaning} | `{fault.flags}` |"
            f" {'; '.join(map(''.join, found[:2])) or 'none'} |",
            flush=True,
        )
        missed += [name] * (status == 0 or not found)
    if missed:
        sys.exit(f"faults.py: error: not found: {', '.join(missed)}")


if __name__ == "__main__":
    main()
