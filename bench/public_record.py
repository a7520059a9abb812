"""Compare train_gpt.py with the program of a public record: both train the same small model on the same tokens.

    python bench/public_record.py LOG

LOG is a log of the public speedrun (KellerJordan/modded-nanogpt, records/track_1_short). The preset `speedrun` claims to
be record 44 (2025-10-31_AdamSyncGradientHook), `frontier` claims to be record 80 (2026-04-08_PairedHeadMuon, split_qk*).
The log begins with the source of the record's program, which this script runs on one rank and a CPU. **The source can do
anything on this machine, so trust its author first.** These parts are replaced:

- CUDA by the CPU, and bf16 by float32
- kernels by plain PyTorch with the same result
- collectives by copies, and nvidia-smi by nothing
- sizes of the model, sequences, windows, documents and schedule by smaller ones
- in record 80, float32 matrices stored as two halves by float32, and hashed token pairs by one row per pair

Both programs start from the record's initial parameters and validate after each step. The script prints the validation
losses of each step, and how much the final parameters differ, relative to their change in training. Exit status: 0 the
programs agree, 1 they do not agree or cannot be compared.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import types
import unittest.mock
from pathlib import Path
from typing import Any, Callable, NamedTuple

import numpy as np
import torch
import torch._dynamo  # before a mock replaces Triton: this import looks for Triton
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common import run, table, train_gpt

ENCODING = train_gpt.Encoding(64, 63)
TOKENS = 128  # of the shortest micro-batch
VAL_LEN, VAL_TOKENS = 512, 4096
BLOCK = 8  # tokens; the unit of the windows
LOSS_TOLERANCE = 3e-5  # nats
PARAM_TOLERANCE = 1e-2  # relative to a parameter's change; the polar factor amplifies rounding errors


# records

def convert_44(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters of record 44 to the names and layout of train_gpt.py."""
    renamed = {"attn.qkvo_w": "attn.qkvo", "attn.attn_gate.weight": "attn.gate", "c_fc": "fc", "c_proj": "proj",
               "smear_gate.weight": "smear_gate"}
    ours = {}
    for name, x in theirs.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        ours[name] = x
    skips, others = theirs["scalars"].split([12, len(theirs["scalars"]) - 12])  # the record uses five of its twelve skips
    return {**ours, "scalars": torch.cat([skips[:5], others[:50]])}


def convert_80(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters of record 80 to the names and layout of train_gpt.py."""
    heads, dim = theirs["attn_gate_bank"].size(1), theirs["embed.weight"].size(1)
    half = dim // heads // 2  # the record's rotary pairs entries 2j and 2j + 1 of a head, ours pairs j and half + j
    order = [*range(0, half, 2), *range(half, half + half // 2), *range(1, half, 2), *range(half + half // 2, 2 * half)]
    scalars = theirs["scalars"]
    ours = {"lm_head.weight": theirs["lm_head.weight"].T, "embed.weight": theirs["embed.weight"],
            "ngrams.0.weight": theirs["bigram_embed.weight"], "smear_gate": theirs["smear_gate.weight"],
            "skip_gates": theirs["skip_gate.weight"], "resid_lambdas": theirs["resid_lambdas"],
            "added_lambdas": torch.stack([theirs["x0_lambdas"], theirs["bigram_lambdas"], *theirs["post_lambdas"].T], 1),
            "scalars": torch.cat([scalars[24:25], scalars[:24]])}
    qk, vo = (theirs[name].view(10, 2 * dim, dim) for name in ("qk_bank", "vo_bank"))
    for i, layer in enumerate(layer for layer in range(11) if layer != 6):
        attn = f"blocks.{layer}.attn"
        ours[f"{attn}.qk"] = qk[i].view(-1, 2 * half, dim)[:, order].reshape(dim, 2 * dim)
        ours |= {f"{attn}.vo": vo[i], f"{attn}.gate": theirs["attn_gate_bank"][i]}
    for i, layer in enumerate((1, 2, 8, 9, 10)):
        ours[f"blocks.{layer}.attn.value_gate"] = theirs["ve_gate_bank"][i]
        ours[f"value_embeds.{i}.weight"] = theirs["value_embeds"].view(5, -1, dim)[i]
    for layer in range(11):
        for name, x in zip(("fc", "proj"), theirs["mlp_bank"][layer]):
            ours[f"blocks.{layer}.mlp.{name}"] = x.T
    return ours


class Record(NamedTuple):
    """How to run a record's program at small size.

    marks: strings that identify its source. shrink(globals of the program): set small sizes. edits: (pattern,
    replacement) in its source, for other sizes. convert: rename its parameters. flags: the same sizes for train_gpt.py.
    """

    marks: tuple[str, ...]
    heads: int
    head_dim: int
    shrink: Callable[[dict[str, Any]], None]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    flags: str
    edits: tuple[tuple[str, str], ...] = ()


def shrink_44(program: dict[str, Any]) -> None:
    args = program["args"]
    args.train_batch_size, args.train_max_seq_len, args.block_size = 8 * 2 * TOKENS, 64, BLOCK
    args.num_scheduled_iterations, args.num_extension_iterations, args.num_iterations = 14, 4, 18
    program.update({name: KERNELS[name] for name in ("XXT", "ba_plus_cAA")})


def shrink_80(program: dict[str, Any]) -> None:
    args = program["args"]
    args.num_scheduled_iterations, args.num_extension_iterations = 30, 4
    args.bigram_vocab_size = ENCODING.vocab_size ** 2
    program["get_bigram_hash"] = pair_rows
    program["NorMuonAndAdam"]._cautious_wd_and_update_inplace = staticmethod(update_in_float32)


RECORDS = {
    "44": Record(("_reduce_scatter_hooks", "num_scheduled_iterations: int = 2205 "), 2, 16, shrink_44, convert_44,
                 f"--preset speedrun --num_steps 18 --micro_batch_tokens {2 * TOKENS} --max_document_tokens 64 --stages "
                 "'Stage(until=1/3, long_window=3), Stage(until=2/3, long_window=7), Stage(long_window=11), "
                 "Stage(extra_steps=4, long_window=13)'"),
    "80": Record(("self.qk_bank", "num_scheduled_iterations: int = 1440 "), 6, 8, shrink_80, convert_80,
                 f"--preset frontier --num_steps 34 --ngrams 2:{ENCODING.vocab_size ** 2}:48 --stages "
                 f"'Stage(1/3, 0, 8, {TOKENS}, 28, 3, 1, Ramp((1, .5, .25), (1, .5, 0))), "
                 f"Stage(2/3, 0, 8, {2 * TOKENS}, 64, 7, 1.52, Ramp((1, .5), (1, 0))), "
                 f"Stage(1, 0, 8, {3 * TOKENS}, 64, 11, 1.73, (1,)), Stage(1, 4, 8, {3 * TOKENS}, 64, 13, .15, (1,))'",
                 ((r"(batch_size=\d+ \*) 2048 \* 8", rf"\g<1> {TOKENS}"), (r"(train_max_seq_len=\d+),", r"\g<1> // 32,"),
                  (r"(self\.block_size = )128", rf"\g<1>{BLOCK}"))),
}


# replacements of the GPU, its kernels and the network

def pair_rows(tokens: Tensor) -> Tensor:
    """Return the row of each token's pair with the previous one in its document, numbered like train_gpt.NgramTable."""
    before = F.pad(tokens[:-1].long(), (1, 0), value=ENCODING.bos_id)
    before = torch.where(tokens == ENCODING.bos_id, ENCODING.bos_id, before)
    return (tokens.long() * ENCODING.vocab_size + before).to(torch.int32)


def update_in_float32(halves: Tensor, mantissa: Tensor, grad: Tensor, decay: Tensor, lr: Tensor) -> None:
    param = halves.view(torch.float32)
    param.sub_(param * (grad * param >= 0) * decay * lr + grad * lr)


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, softmax_scale: float, window_size: tuple[int, int],
              **_: Any) -> Tensor:
    """Replace FlashAttention. q, k, v, result [T, heads, head_dim]; documents begin at cu_seqlens_q."""
    position = torch.arange(len(q))
    docs = torch.searchsorted(cu_seqlens_q.long(), position, right=True)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance <= window_size[0]) & (docs[:, None] == docs)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale).transpose(0, 1).contiguous()


def softcapped_loss(x: Tensor, targets: Tensor, weights: Tensor, head: Tensor, *scales: float) -> Tensor:
    """Return the cross entropy of each position [T]: a sum over the targets 1, 2, … tokens ahead with these weights."""
    logs = (23 * torch.sigmoid((x @ head + 5) / 7.5)).log_softmax(-1)
    ahead = [F.pad(targets[k:], (0, k)) for k in range(len(weights))]
    exists = [torch.arange(len(x)) < len(x) - k for k in range(len(weights))]
    return -sum(w * logs.gather(1, t[:, None])[:, 0] * mask for w, t, mask in zip(weights, ahead, exists))


KERNELS = {
    "XXT": lambda a, out: out.copy_(a @ a.mT),
    "XTX": lambda a, out: out.copy_(a.mT @ a),
    "ba_plus_cAA": lambda a, alpha, beta, out: out.copy_(alpha * (a @ a.mT) + beta * a),
    "transpose_add": lambda a, out: out.add_(a.T),
    "transpose_copy": lambda a, out: out.copy_(a.T),
    "FusedLinearReLUSquareFunction": types.SimpleNamespace(apply=lambda x, fc, proj: (x @ fc.T).relu().square() @ proj),
    "FusedSoftcappedCrossEntropy": types.SimpleNamespace(apply=softcapped_loss),
}


class OnTheCpu(TorchFunctionMode):
    """Use the CPU for CUDA and float32 for bf16. Copy a tensor before it is assigned to a part of itself, as compiled
    code does."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (Tensor.bfloat16, Tensor.cuda):
            return args[0].float() if function is Tensor.bfloat16 else args[0]
        if function is Tensor.__setitem__ and isinstance(args[2], Tensor):
            args = (*args[:2], args[2].clone())
        return function(*map(self.replace, args), **{name: self.replace(x) for name, x in (kwargs or {}).items()})

    @staticmethod
    def replace(x: Any) -> Any:
        if isinstance(x, torch.device) or isinstance(x, str) and x.startswith("cuda"):
            return "cpu"
        return torch.float32 if x is torch.bfloat16 else x


class Done:
    """The handle of a collective of one rank."""

    def wait(self) -> None:
        pass

    def get_future(self) -> torch.futures.Future:
        future = torch.futures.Future()
        future.set_result(None)
        return future


def collective(out: Tensor, source: Tensor, *_: Any, **__: Any) -> Done:
    out.copy_(source)
    return Done()


def run_theirs(record: Record, source: str, home: Path) -> None:
    """Run the record's program in this process, which it changes. Write initial.pt, final.pt, and its log in logs/."""
    def build(vocab_size: int, num_layers: int, num_heads: int, head_dim: int, model_dim: int, max_seq_len: int) -> Any:
        dim = record.heads * record.head_dim
        kept["model"] = gpt(ENCODING.vocab_size, num_layers, record.heads, record.head_dim, dim, max_seq_len)
        return kept["model"]

    def prepare(program: dict[str, Any]) -> None:
        nonlocal gpt
        args, gpt = program["args"], program["GPT"]
        args.train_files, args.val_files = f"{home}/*_train_*.bin", f"{home}/*_val_*.bin"
        args.val_batch_size, args.val_tokens, args.val_loss_every = 8 * VAL_LEN, VAL_TOKENS, 1
        record.shrink(program)
        program.update(GPT=build, BOS_ID=ENCODING.bos_id)

    def save(name: str) -> None:
        torch.save({name: p.detach().clone() for name, p in kept["model"].named_parameters()}, home / name)

    def compiled(function: Any = None, **_: Any) -> Any:
        if isinstance(function, torch.nn.Module):  # the model, after its initialization
            save("initial.pt")
        return (lambda function: function) if function is None else function

    kept: dict[str, Any] = {}
    gpt, nothing, empty, empty_like = None, lambda *_, **__: 0, torch.empty, torch.empty_like
    alone = ("init_process_group", "destroy_process_group", "barrier", "broadcast", "reduce", "all_reduce")
    vars(dist).update(dict.fromkeys(alone, nothing), reduce_scatter_tensor=collective, all_gather_into_tensor=collective,
                      is_initialized=lambda: True, get_world_size=lambda: 1, get_rank=lambda: 0)
    vars(torch.cuda).update(dict.fromkeys(("set_device", "synchronize", "max_memory_allocated", "max_memory_reserved"), nothing),
                            is_available=lambda: True)
    torch.compile = compiled
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.empty_like = lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs)
    flash = types.SimpleNamespace(flash_attn_interface=types.SimpleNamespace(flash_attn_varlen_func=attention))
    modules = {"kernels": {"get_kernel": lambda name: flash}, "triton_kernels": KERNELS, "triton": None, "triton.language": None}
    for name, content in modules.items():
        sys.modules[name] = types.SimpleNamespace(**content) if content else unittest.mock.MagicMock(__spec__=None, __version__="-")
    for old, new in ((r"\nargs = Hyperparameters\(\)\n", r"\g<0>PREPARE(globals())\n"), (r"print0\(nvidia_smi\(\)\)", "pass"),
                     (r"val_loss:\{val_loss:\.4f\}", "val_loss:{val_loss:.9f}"), *record.edits):
        source, count = re.subn(old, new, source)
        if not count:
            raise train_gpt.RunError(f"the record's program has no {old!r}; use a log that --help names")
    for name in ("program.py", "triton_kernels.py"):  # the program copies them into its log
        (home / name).write_text("")
    sys.argv = [str(home / "program.py")]
    torch.manual_seed(0)
    program = sys.modules["__main__"] = types.ModuleType("__main__")  # its dataclasses look up their module
    program.PREPARE = prepare
    with OnTheCpu():
        exec(compile(source, "the record's program", "exec"), vars(program))
    save("final.pt")


# comparison

def make_shards(home: Path) -> None:
    """Write shards in which the two previous tokens determine 80 % of the tokens.

    The first training shard is longer than a run. At its end, both programs drop the incomplete batch. On one rank that
    is a step for train_gpt.py, but a micro-batch for the record's program.
    """
    random = np.random.default_rng(0)
    for name, tokens in (("x_val_0.bin", 2 * VAL_TOKENS), ("x_train_0.bin", 400_000), ("x_train_1.bin", 10_000)):
        content: list[int] = []
        while len(content) < tokens:
            content += [ENCODING.bos_id, int(random.integers(63))]
            for chance in random.random(int(random.integers(10, 150))):
                content.append(int(random.integers(63)) if chance < 0.2 else (3 * content[-1] + content[-2]) % 63)
        header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
        header[:5] = train_gpt.MAGIC, train_gpt.VERSION, len(content), *ENCODING
        (home / name).write_bytes(header.tobytes() + np.array(content, dtype="<u2").tobytes())


def run_ours(record: Record, home: Path, initial: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """Return (validation losses before each step and after the last step, final parameters)."""
    sizes = (f"--num_heads {record.heads} --head_dim {record.head_dim} --model_dim {record.heads * record.head_dim} --fp8_head false "
             f"--dtype float32 --window_block {BLOCK} --muon_momentum_rise 300 --muon_momentum_fall 50")
    _, config = train_gpt.parse_config(shlex.split(f"{record.flags} {sizes}"), "speedrun")
    shards = train_gpt.find_shards(f"{home}/*_train_*.bin")
    trainer = train_gpt.Trainer(config, train_gpt.Comm(), torch.device("cpu"), shards)
    train_gpt.load_parameters(trainer.model, {"state": initial})
    sequences = train_gpt.validation_sequences(train_gpt.find_shards(f"{home}/*_val_*.bin"), VAL_TOKENS, VAL_LEN)
    losses = []
    for step in range(config.num_steps + 1):
        plan = train_gpt.plan_of(config, step)
        losses.append(trainer.validate(plan, sequences)[0])
        if step < config.num_steps:
            trainer.step(plan, trainer.stream.next_batch(plan))
    trainer.stream.close()
    return losses, dict(trainer.model.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("log", type=Path)
    parser.add_argument("--program-in", type=Path, help=argparse.SUPPRESS)  # the process of the record's program
    args = parser.parse_args()
    try:
        text = args.log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise train_gpt.RunError(f"{args.log}: {error.strerror}; choose a log of the public speedrun") from None
    source = re.split(r"\n(?:={80,}|-{40}\n# triton_kernels\.py)\n", text)[0]
    number = next((number for number, record in RECORDS.items() if all(mark in source for mark in record.marks)), None)
    if number is None:
        raise train_gpt.RunError(f"{args.log}: does not begin with the program of record {' or '.join(RECORDS)}; get "
                                 "a log from the public repository, see --help")
    record = RECORDS[number]
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # subprocess.run then kills the record's program
    if args.program_in:
        return run_theirs(record, source, args.program_in)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_shards(home)
        child = subprocess.run([sys.executable, __file__, str(args.log.resolve()), "--program-in", folder], cwd=folder,
                               text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               env={"PATH": "", "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "DISABLE_FP8": "1"})
        if child.returncode:
            raise train_gpt.RunError(f"the record's program ended with status {child.returncode}; use a log that --help "
                                     f"names. The end of its output: {child.stdout[-2000:]}")
        losses = [float(loss) for loss in re.findall(r"^step:\d+/\d+ val_loss:([\d.]+)", child.stdout, re.M)]
        initial, final = (record.convert(torch.load(home / f"{name}.pt")) for name in ("initial", "final"))
        our_losses, ours = run_ours(record, home, initial)
    print(f"record {number}: its program and train_gpt.py, float32, one CPU thread, torch {torch.__version__}\n")
    rows = [[step, f"{a:.7f}", f"{b:.7f}", f"{b - a:+.1e}"] for step, (a, b) in enumerate(zip(losses, our_losses, strict=True))]
    print(table(["steps", "record's validation loss", "ours", "difference"], rows), end="\n\n")
    relative: dict[str, list[float]] = {}
    with torch.no_grad():
        for name, x in final.items():
            change = (x - initial[name]).norm()
            difference = (x - ours[name].view_as(x)).norm()
            kind = re.sub(r"\.\d+\.", ".*.", name)
            relative.setdefault(kind, []).append((difference / change).item() if change else float(difference > 0))
    print(table(["parameters", "count", "max difference, relative to the change"],
                [[name, len(differences), f"{max(differences):.1e}"] for name, differences in relative.items()]))
    worst_loss = max(abs(a - b) for a, b in zip(losses, our_losses))
    worst = max(map(max, relative.values()))
    agree = worst_loss <= LOSS_TOLERANCE and worst <= PARAM_TOLERANCE
    print(f"\nThe programs {'agree' if agree else 'DO NOT agree'}: losses differ by at most {worst_loss:.1e} nats "
          f"(tolerance {LOSS_TOLERANCE:g}), final parameters by {worst:.1e} of their change (tolerance {PARAM_TOLERANCE:g}).")
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
