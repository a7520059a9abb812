"""Compare a preset with the program of a public record: both train the same small model on the
same tokens.

    .venv/bin/python bench/public_record.py LOG_OR_PROGRAM

The preset `speedrun` of train_gpt.py claims to be record 44 of the public speedrun
(KellerJordan/modded-nanogpt), and `frontier89` of frontier.py record 89. LOG_OR_PROGRAM is a log
of record 44 (records/track_1_short/2025-10-31_AdamSyncGradientHook), which begins with the program's
source, or the train_gpt.py of a clone whose head is record 89 (commit f411b3d3). This script runs
the program on one rank and a CPU. **It can do anything on this machine, so trust its author
first.** These parts are replaced:

- CUDA by the CPU, and bf16 and float32 by float64, in which rounding hides no mistake - kernels by
plain PyTorch with the same result - collectives by copies, and nvidia-smi by nothing - sizes of the
model, sequences, windows, documents and n-gram table by smaller ones; the schedule by one with
fewer steps - GPT-2's vocabulary by 63 short strings of bytes - in record 89, matrices stored as two
halves by whole ones, and fp8 products by exact ones (its flag DISABLE_FP8)

Differences that remain, which the comparison does not show: initialization (the record draws the
signs of its n-gram table from a normal distribution, ours from a generator of its own), kernels,
bf16 and fp8, several ranks, and the ends of shards (on eight ranks both programs drop a whole step
there; on one rank theirs drops a micro-batch).

Ours runs with the preset itself, with the same divisors and the same steps left out: its stages,
windows and step counts are compared too.

Both programs start from the record's initial parameters and validate after each step. The script
prints the validation losses of each step, and how much the final parameters differ, relative to
their change in training. Exit status: 0 the programs agree, 1 they do not agree or cannot be
compared.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
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

from common import frontier, run, table, train_gpt

ENCODING = train_gpt.Encoding(64, 63)
# The bytes of each token but the last: a shuffled tree of strings, most of which begin with others
TOKEN_BYTES = [
    bytes(97 + int(digit) for digit in np.base_repr(11 * number % 63 + 1, 3))
    for number in range(63)
]
PAIR_ROWS = 1000  # of the n-gram table, shared by 4,096 pairs
VAL_LEN = 512
VAL_TOKENS = 4096
# Both programs divide their own sizes by these, and leave out as many steps of their own counts
FEWER_TOKENS = 128  # in a micro-batch
# documents and windows; the longest document is 16 blocks, the longest window in training 13
SHORTER = 16
# steps; 6 and 5 remain
LESS_MOMENTUM_RISE = 294
LESS_MOMENTUM_FALL = 45
LOSS_TOLERANCE = 1e-12  # nats
# relative to a parameter's change; the polar factor amplifies rounding errors
PARAM_TOLERANCE = 1e-10


# records


def convert_44(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters of record 44 to the names and layout of train_gpt.py."""
    renamed = {
        "attn.qkvo_w": "attn.qkvo",
        "attn.attn_gate.weight": "attn.gate",
        "c_fc": "fc",
        "c_proj": "proj",
        "smear_gate.weight": "smear_gate",
    }
    ours = {}
    for name, x in theirs.items():
        for old, new in renamed.items():
            name = name.replace(old, new)
        ours[name] = x
    # the record uses five of its twelve skips
    skips, others = theirs["scalars"].split([12, len(theirs["scalars"]) - 12])
    return {**ours, "scalars": torch.cat([skips[:5], others[:50]])}


def convert_89(theirs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert parameters of record 89 to the names and layout of frontier.py."""
    heads = theirs["ve_gate_bank"].size(1)
    dim = theirs["embed.weight"].size(1)
    # the record's rotary pairs entries 2j and 2j + 1 of a head, ours pairs j and half + j
    half = dim // heads // 2
    order = [
        *range(0, half, 2),
        *range(half, half + half // 2),
        *range(1, half, 2),
        *range(half + half // 2, 2 * half),
    ]
    scalars = theirs["scalars"]
    ours = {
        "lm_head.weight": theirs["lm_head.weight"].T,
        "embed.weight": theirs["embed.weight"],
        "ngrams.0.weight": theirs["bigram_embed.weight"],
        "smear_gate": theirs["smear_gate.weight"],
        "resid_lambdas": theirs["resid_lambdas"],
        "post_lambdas": theirs["post_lambdas"],
        "scalars": torch.cat([scalars[23:24], scalars[:23]]),
        "gate_scale": theirs["_mudd_gate_scale"],
    }
    qk, vo = (theirs[name].view(10, 2 * dim, dim) for name in ("qk_bank", "vo_bank"))
    for i, layer in enumerate(layer for layer in range(11) if layer != 6):
        attn = f"blocks.{layer}.attn"
        ours[f"{attn}.qk"] = qk[i].view(-1, 2 * half, dim)[:, order].reshape(dim, 2 * dim)
        ours[f"{attn}.vo"] = vo[i]
    for i, layer in enumerate((1, 2, 8, 9, 10)):
        if layer != 10:  # MUDD gates that layer's values
            ours[f"blocks.{layer}.attn.value_gate"] = theirs["ve_gate_bank"][i]
        ours[f"value_embeds.{i}.weight"] = theirs["value_embeds"].view(5, -1, dim)[i]
    for layer in range(11):
        for name, x in zip(("fc", "proj"), theirs["mlp_bank"][layer]):
            ours[f"blocks.{layer}.mlp.{name}"] = x.T
    networks = {
        "token_gates.0": ("mudd_gate", 0),
        "token_gates.1": ("mudd_gate", 1),
        "mudd.layer": ("mudd", 0),
        "mudd.head": ("mudd", 1),
    }
    for name, (kind, i) in networks.items():
        ours[f"{name}.hidden"] = theirs[f"{kind}_w1"][i]
        ours[f"{name}.out"] = theirs[f"{kind}_w2"][i, ORDER[name]]
        ours[f"{name}.bias"] = theirs[f"{kind}_b2"][i, ORDER[name]]
    return ours


# Where the record computes our token weights, in the order of gates_of and Mudd
ORDER = {
    # layers 0 to 3: x0 and, before the layers, n-grams; x0, n-grams and XSA of 1; x0 and n-grams of
    # 2; all of 3
    "token_gates.0": [18, 19, 20, 21, *range(0, 6), 22, 23, 24, 25, *range(6, 18)],
    # layers 4, 5, 6 (skip), 7, 8, 9, and 10 (gate, reading and writing weights of DC)
    "token_gates.1": [
        18,
        19,
        *range(0, 6),
        20,
        21,
        28,
        22,
        23,
        *range(6, 12),
        24,
        25,
        26,
        27,
        *range(12, 18),
        *range(29, 41),
    ],
    # values, residual, mix, x0, n-grams, value gates
    "mudd.layer": [0, 1, 2, 3, 4, 5, 8, 12, 9, 13, 10, 11, 6, 7],
    "mudd.head": [0, 4, 1, 2, 3],  # before the layers, layers 3, 7 and 9, first value table
}


class Record(NamedTuple):
    """How to run a record's program at small size.

    preset: which claims to be this record. marks: strings that identify its source. less_schedule,
    less_extension: steps to leave out. shrink(globals of the program): set small sizes. convert:
    rename its parameters. small: further values of our config. edits: (pattern, replacement) in its
    source, for other sizes.
    """

    preset: str
    marks: tuple[str, ...]
    heads: int
    head_dim: int
    less_schedule: int
    less_extension: int
    shrink: Callable[[dict[str, Any]], None]
    convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]
    small: dict[str, Any] = {}
    edits: tuple[tuple[str, str], ...] = ()


def shrink_44(program: dict[str, Any]) -> None:
    args = program["args"]
    args.train_batch_size //= FEWER_TOKENS
    args.train_max_seq_len //= SHORTER
    args.block_size //= SHORTER
    args.num_iterations -= RECORDS["44"].less_schedule + RECORDS["44"].less_extension
    program.update({name: KERNELS[name] for name in ("XXT", "ba_plus_cAA")})


def shrink_89(program: dict[str, Any]) -> None:
    program["args"].bigram_vocab_size = PAIR_ROWS
    program["TRAIN_MAX_NUM_DOCS"] = {
        tokens // FEWER_TOKENS: 128 for tokens in program["TRAIN_MAX_NUM_DOCS"]
    }
    program["NorMuonAndAdam"]._cautious_wd_and_update_inplace = staticmethod(update_whole)


RECORDS = {
    "44": Record(
        "speedrun",
        ("_reduce_scatter_hooks", "num_scheduled_iterations: int = 2205 "),
        2,
        16,
        2191,
        36,
        shrink_44,
        convert_44,
    ),
    "89": Record(
        "frontier89",
        ("self.mudd_gate_w1", "num_scheduled_iterations: int = 1270 "),
        6,
        8,
        1225,
        11,
        shrink_89,
        convert_89,
        {"fp8_mlp": False, "ngrams": (train_gpt.Ngrams(2, PAIR_ROWS, 6 * 8),)},
        (
            (r"(batch_size=\d+ \* 2048 \* 8)", rf"\g<1> // {FEWER_TOKENS}"),
            (r"(train_max_seq_len=\d+),", rf"\g<1> // {SHORTER},"),
            (r"(self\.block_size = 128)", rf"\g<1> // {SHORTER}"),
            (r"(bigram_dim: int =) 768", rf"\g<1> {6 * 8}"),
            (r"(window=112)", rf"\g<1> // {SHORTER}"),
        ),
    ),
}


# replacements of the GPU, its kernels and the network


def update_whole(
    quarters: Tensor, mantissa: Tensor, grad: Tensor, decay: Tensor, lr: Tensor
) -> None:
    param = quarters.view(torch.float64)
    param.sub_(param * (grad * param >= 0) * decay * lr + grad * lr)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    window_size: tuple[int, int],
    **_: Any,
) -> Tensor:
    """Replace FlashAttention. q, k, v, result [T, heads, head_dim]; documents begin at
    cu_seqlens_q."""
    position = torch.arange(len(q))
    docs = torch.searchsorted(cu_seqlens_q.long(), position, right=True)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance <= window_size[0]) & (docs[:, None] == docs)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return (
        F.scaled_dot_product_attention(q, k, v, visible, scale=softmax_scale)
        .transpose(0, 1)
        .contiguous()
    )


def mix_heads(
    y: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    weights: tuple[Tensor, Tensor],
    _: None,
    scaling: float,
    window: int,
    seq_lens: Tensor,
) -> Tensor:
    """Replace the kernel of layer 10: each head adds the values under one map, a sum of the heads'
    maps.

    q, k, v [1, T, heads, head_dim]; y and the result [T, heads, head_dim]; weights of reading and
    writing [1, T, heads].
    """
    q, k, v, read, write = (x[0] for x in (q, k, v, *weights))
    position = torch.arange(len(q))
    docs = torch.searchsorted(seq_lens.long(), position, right=True)
    distance = position[:, None] - position
    visible = (distance >= 0) & (distance < window) & (docs[:, None] == docs)
    maps = (
        (torch.einsum("thd,shd->hts", q, k) * scaling)
        .masked_fill(~visible, float("-inf"))
        .softmax(-1)
    )
    return y + write[..., None] * torch.einsum(
        "ts,shd->thd", torch.einsum("th,hts->ts", read, maps), v
    )


def softcapped_loss(
    x: Tensor,
    targets: Tensor,
    weights: Tensor,
    prefixes: Tensor,
    prefix_weight: Tensor,
    head: Tensor,
    *scales: float,
) -> Tensor:
    """Return the cross entropy of each position [T]: a sum over the targets 1, 2, … tokens ahead
    with these weights, and over the prefix of the next one, if there is any."""
    logs = (23 * torch.sigmoid((x @ head + 5) / 7.5)).log_softmax(-1)
    ahead = [F.pad(targets[k:], (0, k), value=-1) for k in range(len(weights))]
    rows = zip((*weights, prefix_weight), (*ahead, prefixes))
    return -sum(w * logs.gather(1, t.clamp_min(0)[:, None])[:, 0] * (t >= 0) for w, t in rows)


KERNELS = {
    "XXT": lambda a, out: out.copy_(a @ a.mT),
    "XTX": lambda a, out: out.copy_(a.mT @ a),
    "ba_plus_cAA": lambda a, alpha, beta, out: out.copy_(alpha * (a @ a.mT) + beta * a),
    "transpose_add": lambda a, out: out.add_(a.T),
    "transpose_copy": lambda a, out: out.copy_(a.T),
    "FusedLinearReLUSquareFunction": types.SimpleNamespace(
        apply=lambda x, fc, proj: (x @ fc.T).relu().square() @ proj
    ),
    "FusedSoftcappedCrossEntropy": types.SimpleNamespace(apply=softcapped_loss),
    # of fp8
    **dict.fromkeys(
        ("quantize_transpose_mlp_down_weights", "reduce_mlp_activation_scales"), lambda *_: None
    ),
}


class OnTheCpu(TorchFunctionMode):
    """Use the CPU for CUDA and float64 for other floats. Copy a tensor before it is assigned to a
    part of itself, as compiled code does."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.cuda:
            return args[0]
        if function in (Tensor.bfloat16, Tensor.float):
            return args[0].double()
        if function is Tensor.__setitem__ and isinstance(args[2], Tensor):
            args = (*args[:2], args[2].clone())
        return function(
            *map(self.replace, args),
            **{name: self.replace(x) for name, x in (kwargs or {}).items()},
        )

    @staticmethod
    def replace(x: Any) -> Any:
        if isinstance(x, torch.device) or isinstance(x, str) and x.startswith("cuda"):
            return "cpu"
        return torch.float64 if x is torch.bfloat16 or x is torch.float32 else x


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
    """Run the record's program in this process, which it changes. Write initial.pt, final.pt, and
    its log in logs/."""

    def build(
        vocab_size: int,
        num_layers: int,
        num_heads: int,
        head_dim: int,
        model_dim: int,
        max_seq_len: int,
    ) -> Any:
        dim = record.heads * record.head_dim
        kept["model"] = gpt(
            ENCODING.vocab_size, num_layers, record.heads, record.head_dim, dim, max_seq_len
        )
        return kept["model"]

    def prepare(program: dict[str, Any]) -> None:
        nonlocal gpt
        args = program["args"]
        gpt = program["GPT"]
        args.train_files = f"{home}/*_train_*.bin"
        args.val_files = f"{home}/*_val_*.bin"
        args.val_batch_size = 8 * VAL_LEN
        args.val_tokens = VAL_TOKENS
        args.val_loss_every = 1
        args.num_scheduled_iterations -= record.less_schedule
        args.num_extension_iterations -= record.less_extension
        record.shrink(program)
        program.update(GPT=build, BOS_ID=ENCODING.bos_id)

    def save(name: str) -> None:
        model = kept["model"]
        tensors = {name: x.detach().clone() for name, x in model.named_parameters()}
        torch.save(
            tensors
            | {"signs": x for name, x in model.named_buffers() if name == "bigram_sign_table"},
            home / name,
        )

    def compiled(function: Any = None, **_: Any) -> Any:
        if isinstance(function, torch.nn.Module):  # the model, after its initialization
            save("initial.pt")
        return (lambda function: function) if function is None else function

    kept: dict[str, Any] = {}
    gpt = None
    nothing = lambda *_, **__: 0
    empty = torch.empty
    empty_like = torch.empty_like
    alone = (
        "init_process_group",
        "destroy_process_group",
        "barrier",
        "broadcast",
        "reduce",
        "all_reduce",
    )
    vars(dist).update(
        dict.fromkeys(alone, nothing),
        reduce_scatter_tensor=collective,
        all_gather_into_tensor=collective,
        is_initialized=lambda: True,
        get_world_size=lambda: 1,
        get_rank=lambda: 0,
    )
    vars(torch.cuda).update(
        dict.fromkeys(
            ("set_device", "synchronize", "max_memory_allocated", "max_memory_reserved"), nothing
        ),
        is_available=lambda: True,
        get_device_properties=lambda device: types.SimpleNamespace(multi_processor_count=1),
        current_device=nothing,
    )
    torch.compile = compiled
    torch.empty = lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    torch.empty_like = lambda *args, pin_memory=False, **kwargs: empty_like(*args, **kwargs)
    flash = types.SimpleNamespace(
        flash_attn_interface=types.SimpleNamespace(flash_attn_varlen_func=attention)
    )
    vocabulary = types.SimpleNamespace(
        _mergeable_ranks={token: number for number, token in enumerate(TOKEN_BYTES)}
    )
    modules = {
        "kernels": {"get_kernel": lambda name, version=0: flash},
        "triton_kernels": KERNELS,
        "dc_triton_kernels": {"dc_attention_postonly_nodd_correction_add_base_triton": mix_heads},
        "tiktoken": {"get_encoding": lambda name: vocabulary},
        "triton": None,
        "triton.language": None,
    }
    for name, content in modules.items():
        sys.modules[name] = (
            types.SimpleNamespace(**content)
            if content
            else unittest.mock.MagicMock(__spec__=None, __version__="-")
        )
    for old, new in (
        (r"\nargs = Hyperparameters\(\)\n", r"\g<0>PREPARE(globals())\n"),
        (r"print0\(nvidia_smi\(\)\)", "pass"),
        (r"val_loss:\{val_loss:\.4f\}", "val_loss:{val_loss:.15f}"),
        (
            r"(muon_warmup_steps=\d+), (muon_cooldown_steps=\d+)",
            rf"\g<1> - {LESS_MOMENTUM_RISE}, \g<2> - {LESS_MOMENTUM_FALL}",
        ),
        *record.edits,
    ):
        source, count = re.subn(old, new, source)
        if not count:
            raise train_gpt.RunError(
                f"the record's program has no {old!r}; use one that --help names"
            )
    for name in (
        "program.py",
        "triton_kernels.py",
        "dc_triton_kernels.py",
    ):  # the program copies them into its log
        (home / name).write_text("")
    sys.argv = [str(home / "program.py")]
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    # its dataclasses look up their module
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    program.PREPARE = prepare
    with OnTheCpu():
        exec(compile(source, "the record's program", "exec"), vars(program))
    save("final.pt")


# comparison


def make_shards(home: Path) -> None:
    """Write shards in which the two previous tokens determine 80 % of the tokens. Many documents
    are longer than windows.

    The first training shard is longer than a run. At its end, both programs drop the incomplete
    batch. On one rank that is a step for train_gpt.py, but a micro-batch for the record's program.
    """
    random = np.random.default_rng(0)
    for name, tokens in (
        ("x_val_0.bin", 2 * VAL_TOKENS),
        ("x_train_0.bin", 400_000),
        ("x_train_1.bin", 10_000),
    ):
        content: list[int] = []
        while len(content) < tokens:
            content += [ENCODING.bos_id, int(random.integers(63))]
            for chance in random.random(int(random.integers(10, 400))):
                content.append(
                    int(random.integers(63))
                    if chance < 0.2
                    else (3 * content[-1] + content[-2]) % 63
                )
        header = np.zeros(train_gpt.HEADER_INTS, dtype="<i4")
        header[:5] = train_gpt.MAGIC, train_gpt.VERSION, len(content), *ENCODING
        (home / name).write_bytes(header.tobytes() + np.array(content, dtype="<u2").tobytes())


def small_preset(record: Record) -> train_gpt.Config:
    """Return the record's preset at the sizes at which the record's program runs."""
    preset = {**train_gpt.PRESETS, **frontier.PRESETS}[record.preset]
    stages = [
        dataclasses.replace(
            stage,
            extra_steps=max(0, stage.extra_steps - record.less_extension),
            micro_batch_tokens=stage.micro_batch_tokens
            and stage.micro_batch_tokens // FEWER_TOKENS,
            max_document_tokens=stage.max_document_tokens and stage.max_document_tokens // SHORTER,
        )
        for stage in preset.stages
    ]
    return dataclasses.replace(
        preset,
        stages=tuple(stages),
        num_steps=preset.num_steps - record.less_schedule - record.less_extension,
        micro_batch_tokens=preset.micro_batch_tokens // FEWER_TOKENS,
        window_block=preset.window_block // SHORTER,
        max_document_tokens=preset.max_document_tokens // SHORTER,
        muon_momentum_rise=preset.muon_momentum_rise - LESS_MOMENTUM_RISE,
        muon_momentum_fall=preset.muon_momentum_fall - LESS_MOMENTUM_FALL,
        num_heads=record.heads,
        model_dim=record.heads * record.head_dim,
        fp8_head=False,
        **record.small,
    )


def run_ours(
    record: Record, home: Path, initial: dict[str, Tensor], signs: Tensor | None
) -> tuple[list[float], dict[str, Tensor]]:
    """Return (validation losses before each step and after the last step, final parameters)."""
    config = small_preset(record)
    frontier.DC_WINDOW //= SHORTER
    shards = train_gpt.find_shards(f"{home}/*_train_*.bin")
    torch.set_default_dtype(torch.float64)
    with OnTheCpu():
        worker = config.worker_type(config, train_gpt.Comm(), torch.device("cpu"), shards)
        train_gpt.load_parameters(worker.model, {"state": initial})
        worker.token_bytes = TOKEN_BYTES
        worker.before_training()
        for table in worker.model.ngrams:
            table.signs.copy_(signs)
        sequences = train_gpt.validation_sequences(
            train_gpt.find_shards(f"{home}/*_val_*.bin"), VAL_TOKENS, VAL_LEN
        )
        losses = []
        for step in range(config.num_steps + 1):
            plan = train_gpt.plan_of(config, step)
            losses.append(worker.validate(plan, sequences)[0])
            if step < config.num_steps:
                worker.step(plan, worker.stream.next_batch(plan))
        worker.stream.close()
    return losses, dict(worker.model.named_parameters())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, metavar="LOG_OR_PROGRAM")
    # the process of the record's program
    parser.add_argument("--program-in", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    try:
        text = args.log.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise train_gpt.RunError(
            f"{args.log}: {error.strerror}; choose a log or a program of the public speedrun"
        ) from None
    source = re.split(r"\n(?:={80,}|-{40}\n# triton_kernels\.py)\n", text)[0]
    number = next(
        (
            number
            for number, record in RECORDS.items()
            if all(mark in source for mark in record.marks)
        ),
        None,
    )
    if number is None:
        raise train_gpt.RunError(
            f"{args.log}: does not begin with the program of record {' or '.join(RECORDS)}; get "
            "it from the public repository, see --help"
        )
    record = RECORDS[number]
    torch.set_num_threads(1)
    # subprocess.run then kills the record's program
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if args.program_in:
        return run_theirs(record, source, args.program_in)
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_shards(home)
        child = subprocess.run(
            [sys.executable, __file__, str(args.log.resolve()), "--program-in", folder],
            cwd=folder,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={
                "PATH": "",
                "RANK": "0",
                "WORLD_SIZE": "1",
                "LOCAL_RANK": "0",
                "DISABLE_FP8": "1",
                "TMPDIR": folder,
            },
        )  # compilers keep caches there
        if child.returncode:
            raise train_gpt.RunError(
                f"the record's program ended with status {child.returncode}; use one that --help "
                f"names. The end of its output: {child.stdout[-2000:]}"
            )
        losses = [
            float(loss)
            for loss in re.findall(r"^step:\d+/\d+ val_loss:([\d.]+)", child.stdout, re.M)
        ]
        initial, final = (torch.load(home / f"{name}.pt") for name in ("initial", "final"))
        signs = initial.pop("signs", None)
        initial = record.convert(initial)
        final = record.convert(final)
        our_losses, ours = run_ours(record, home, initial, signs)
    train_gpt.require(
        len(losses) == len(our_losses),
        f"record {number} trains {len(losses) - 1} steps here, and {record.preset}"
        f" {len(our_losses) - 1}; compare num_steps and stages of the preset with the record",
    )
    print(
        f"record {number}: its program and {record.preset}, float64, one CPU thread, torch"
        f" {torch.__version__}\n"
    )
    rows = [
        [step, f"{a:.7f}", f"{b:.7f}", f"{b - a:+.1e}"]
        for step, (a, b) in enumerate(zip(losses, our_losses))
    ]
    print(table(["steps", "record's validation loss", "ours", "difference"], rows), end="\n\n")
    relative: dict[str, list[float]] = {}
    with torch.no_grad():
        for name, x in final.items():
            change = (x - initial[name]).norm()
            difference = (x - ours[name].view_as(x)).norm()
            kind = re.sub(r"\.\d+\.", ".*.", name)
            relative.setdefault(kind, []).append(
                (difference / change).item() if change else float(difference > 0)
            )
    print(
        table(
            ["parameters", "count", "max difference, relative to the change"],
            [
                [name, len(differences), f"{max(differences):.1e}"]
                for name, differences in relative.items()
            ],
        )
    )
    worst_loss = max(abs(a - b) for a, b in zip(losses, our_losses))
    worst = max(map(max, relative.values()))
    agree = worst_loss <= LOSS_TOLERANCE and worst <= PARAM_TOLERANCE
    print(
        f"\nThe programs {'agree' if agree else 'DO NOT agree'}: losses differ by at most"
        f" {worst_loss:.1e} nats (tolerance {LOSS_TOLERANCE:g}), final parameters by {worst:.1e} of"
        f" their change (tolerance {PARAM_TOLERANCE:g})."
    )
    if not agree:
        sys.exit(1)


if __name__ == "__main__":
    run(main)
