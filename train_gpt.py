"""A GPT speedrun: train a GPT of GPT-2 small's size to a loss of 3.28 on FineWeb, fast.

    ./run.sh                                    set up, fetch the data and train, on any machine
    torchrun --nproc_per_node=8 train_gpt.py    train on eight GPUs, with data already fetched
    python train_gpt.py --preset laptop         train on one rank; --help lists every flag

This file is the whole experiment, and its source opens the log of every run. A racer reads from the
top to the section training; the later ones say how ranks, GPUs and files do what it asks for. To
learn how a GPT is trained, begin with the model: docs/learn.md has an order and a glossary.

Ideas for the presets speedrun, bench_gpu, bench and laptop go into this file; ideas for the public
head, record 92, into frontier.py; what other people's models need, into gpt_speedrun/. Both import
this file. On the optimizer: docs/gradient-sync.md.

    section         contents                                              to start, search for
    config          every value that decides a run; presets; flags        class Config, PRESETS
    schedule        stages; everything that depends on the step           def plan_of, lr_factor
    data            shards, document packing, a stream that preloads      class Stream
    model           attention, MLP, blocks, the forward pass, the loss    class GPT, def trunk
    update rules    how a parameter and its state change                  class Adam:, class NorMuon
    training        a run, its loop, the step of a rank, validation       class TrainingLoop, Worker
    gradient sync   the optimizer step, gradients in backward, buckets    DistributedOptimizer,
                    (memory), collectives, tables, saved state            Reducer, Bucket, Comm
    assignment      parameter kind -> update rule and multipliers         def specs_of
    masks, kernels  attention, MLP and loss on CPUs and GPUs              def attend
    log and clock   the log file, the output, the training clock          class Log
    checkpoint      save and resume                                       def save_checkpoint
    machine, main   set-up, signals, failures                             def main
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

IMPORTED = time.perf_counter()


def die_with_launcher() -> None:
    """Have the kernel send SIGUSR2 to this rank when its launcher dies (Linux); see Signals."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGUSR2)  # 1: PR_SET_PDEATHSIG
        launcher = os.environ.get("LAUNCHER_PID", os.getppid())
        if not os.path.exists(f"/proc/{launcher}"):  # it died before prctl
            os._exit(1)


# Programs that import this file to start a run, such as frontier.py, set STARTS_A_RUN. Before the
# other imports, which take seconds
if __name__ == "__main__" or getattr(sys.modules["__main__"], "STARTS_A_RUN", False):
    if sys.platform == "win32":
        sys.exit("train_gpt.py: error: a run needs Linux or macOS; on Windows use WSL")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    # asks for a checkpoint, and there is nothing to save yet
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_launcher()
    # batches and row exchanges vary in size; with growing segments, none needs a cudaMalloc on the
    # clock
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import argparse
import ast
import base64
import collections
import difflib
import errno
import gc
import glob
import hashlib
import importlib
import importlib.metadata
import inspect
import json
import math
import platform
import re
import socket
import subprocess
import threading
import traceback
import unicodedata
import uuid
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as NoAnswer
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import (
    MISSING,
    Field,
    dataclass,
    field,
    fields,
    is_dataclass,
    make_dataclass,
    replace,
)
from datetime import datetime, timedelta, timezone
from functools import cached_property, lru_cache, partial
from itertools import accumulate, chain, groupby, pairwise
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, NamedTuple, NoReturn, Sequence

try:
    import numpy as np
    import torch
except ModuleNotFoundError as error:
    sys.exit(
        f"{sys.argv[0]}: error: {error}; run .venv/bin/python {sys.argv[0]} (./run.sh --setup"
        " creates .venv)"
    )
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # it comes with torch's GPU builds
    triton = None

ROOT = Path(__file__).resolve().parent

Tensors = dict[str, Tensor]  # by name
Values = dict[str, Any]
Pair = tuple[Tensor, Tensor]
frozen = dataclass(frozen=True)


class RunError(Exception):
    """An error that the user can fix: what was seen, what was expected and what to do."""


def require(condition: Any, message: str) -> None:
    if not condition:
        raise RunError(message)


# --------------------------------------------------------------------------------------------------
# config


def option(
    default: Any,
    meaning: str,
    choices: tuple[str, ...] = (),
    min: float | None = 0,
    max: float = math.inf,
    exclusive_max: float = math.inf,
    free: bool = False,
    needs: str = "",
) -> Any:
    """Declare a config field: default, meaning, limits. A number must be from `min` on.

    free: a resumed run may change it. It decides how the run is computed; at most roundings depend
    on it. needs: fields of which one must be set, or the field has no effect.
    """
    return field(default=default, metadata=locals())  # all of these by their names


positive = partial(option, min=None)  # a number above 0
free_option = partial(option, free=True)  # a resumed run may change it


@frozen
class StageValues:
    """Values that a stage may set. A stage that does not set one uses the flag of the same name.

    To schedule another number, add a field of type float. It becomes a flag and a value of stages.
    Read it in Head.forward, as context.scheduled in layers, or as plan.scheduled in update rules.
    """

    micro_batches: int = positive(
        8, "micro-batches per step over all ranks; ranks take equal shares"
    )
    micro_batch_tokens: int = positive(
        2048 * 16, "tokens per forward and backward pass: one packed sequence"
    )
    max_document_tokens: int = option(
        2048, "longest training document; a batch then has many documents", min=2
    )
    long_window: int = positive(
        3, "long attention window in blocks; the short window is half of it, rounded down"
    )
    peak_lr_factor: float = option(1.0, "factor on every learning rate before the cooldown")


@frozen
class Ramp:
    """A float that changes linearly from `first`, at a stage's begin, to `last`, at its end."""

    first: float
    last: float


def show_row(row: Any) -> str:
    """Show a row as it is written on the command line, without fields at their default."""
    values = ((f, getattr(row, f.name)) for f in fields(row))
    shown = (
        repr(v) if f.default is MISSING else f"{f.name}={v!r}" for f, v in values if v != f.default
    )
    return f"{type(row).__name__}({', '.join(shown)})"


def stage_type(values: type[StageValues]) -> type:
    """Create the class of a stage's row: its end, and the fields of `values` (None: the flag's).

    until: where the stage ends, as a fraction of the scheduled steps (at most 1) or as a step
    (above 1). extra_steps: instead, the number of steps after the schedule. The scheduled steps are
    num_steps minus all extra_steps.
    """
    return make_dataclass(
        "Stage",
        [
            ("until", "float", 1.0),
            ("extra_steps", "int", option(0, "length")),
            *((f.name, f.type, field(default=None, metadata=f.metadata)) for f in fields(values)),
        ],
        frozen=True,
        repr=False,
        namespace={"__repr__": show_row, "__module__": values.__module__},
    )


Stage = stage_type(StageValues)


@frozen
class AdamGroup:
    """How Adam updates one kind of parameters. None: the value of adam_beta1 or adam_beta2."""

    kind: str
    lr_mul: float = option(1.0, "times adam_lr")
    beta1: float | None = option(None, "None: adam_beta1", exclusive_max=1)
    beta2: float | None = option(None, "None: adam_beta2", exclusive_max=1)
    weight_decay: float = option(0.0, "cautious, times the squared learning rate of the kind")
    __repr__ = show_row

    def rule(self, config: Config) -> Adam:
        """Create the kind's update rule; specs_of applies lr_mul."""
        return Adam(
            config.adam_lr,
            config.adam_beta1 if self.beta1 is None else self.beta1,
            config.adam_beta2 if self.beta2 is None else self.beta2,
            config.adam_eps,
            config.adam_every,
            self.weight_decay,
            rows=self.kind == "ngram_embeds",
            lazy=config.lazy_tables,
        )


@frozen
class MuonGroup:
    """How NorMuon updates one kind of matrices."""

    kind: str
    lr_mul: float = option(1.0, "times muon_lr")
    __repr__ = show_row

    def rule(self, config: Config) -> NorMuon:
        return NorMuon(
            config.muon_lr, config.muon_weight_decay, config.muon_beta2, config.torch_dtype
        )


@frozen
class Ngrams:
    """An n-gram embedding table [rows, width]. A hash assigns n-grams to rows."""

    n: int = option(MISSING, "tokens of an n-gram", min=2, max=9)
    rows: int = positive(MISSING, "rows")
    width: int = positive(MISSING, "entries of a row")
    __repr__ = show_row


# One row per kind of parameters. The model names the kind where it creates a parameter:
# parameter(init, kind). For another update rule, write a class of rows whose method `rule` creates
# it
PARAM_GROUPS = (
    AdamGroup("embed", lr_mul=75.0),  # embeddings start at unit scale and must move far
    AdamGroup("value_embeds", lr_mul=75.0),
    # most rows get few gradients and must move far with each
    AdamGroup("ngram_embeds", lr_mul=25.0),
    AdamGroup("head"),
    # mixing weights: faster than the head, slower than embeddings
    AdamGroup("scalars", lr_mul=5.0),
    AdamGroup("doc_copy"),
    MuonGroup("gates"),
    MuonGroup("smear_gate"),
    MuonGroup("attn"),
    MuonGroup("mlp_fc", lr_mul=2.0),  # the MLP's first matrix learns faster
    MuonGroup("mlp_proj"),
)


@frozen
class SyncSettings:
    """How ranks exchange gradients and parameters.

    clip_norm changes results. world_size_invariant fixes every order of summation: gradients of
    micro-batches are kept ("pending") until the launch, and are summed as a binary tree over
    micro-batches, then over ranks. check_grads may stop the run. All other settings change only
    time and memory.
    """

    sync: str = free_option(
        "hook", "start reduce-scatters in backward, or in the step", ("hook", "step")
    )
    update_order: str = free_option(
        "launch", "order of updates: of launches, or of the forward", ("launch", "forward")
    )
    overlap_param_gather: bool = free_option(
        False, "overlap all-gathers with the next forward, part by part"
    )
    check_grads: bool = free_option(
        False, "stop before a step with a non-finite gradient (synchronizes the GPU)"
    )
    clip_norm: float = option(
        0.0,
        "largest norm of a step's gradients (0: no clipping); see grad_norm in a log. "
        "train_gpt.py sums its loss over tokens, so norms are far above 1",
    )
    world_size_invariant: bool = option(
        False, "same bytes on any number of ranks: tree sums, one thread, no batching"
    )


GATE_DIM = 12  # channels of the residual stream that gates read


@frozen
class Config(SyncSettings, StageValues):
    """Every value that decides a run. The defaults are record 44 of the public speedrun.

    Attributes of its class name the classes of rows, the kinds of parameters, the model and the
    worker. frontier.py defines another one.
    """

    # that fields may hold; the first is the class of `stages`
    row_types = Stage, Ramp, AdamGroup, MuonGroup, Ngrams
    base_groups = PARAM_GROUPS
    model_type = property(lambda self: GPT)
    worker_type = property(lambda self: Worker)
    help_groups = {}  # further entries of HELP_GROUPS
    # a log states them beside train_loss where they are not 0
    logged_stage_values = ()

    seed: int = option(0, "seed of the initialization and of the document order", max=2**63 - 1)
    target_val_loss: float = option(3.28, "target validation loss in nats per token (0: none)")

    # data
    train_files: str = free_option("data/fineweb10B/fineweb_train_*.bin", "training shards")
    val_files: str = free_option("data/fineweb10B/fineweb_val_*.bin", "validation shards")
    train_shards: int = option(9, "training shards to read, in order of their names (0: all)")
    epochs: int = positive(1, "passes over the training shards; the race allows one")
    long_documents: str = option(
        "cut", "cut documents at max_document_tokens, or split them", ("cut", "split")
    )
    shuffle: bool = option(
        False, "shuffle the documents of each shard by the seed (FineWeb is shuffled already)"
    )
    even_order: bool = option(
        False,
        "shuffle with low discrepancy, which lowers the variance of short runs",
        needs="shuffle",
    )
    val_tokens: int = option(10_485_760, "validation tokens, from the start of the split (0: all)")
    val_skip: int = option(
        0, "validation tokens before them, left out: a race that confirms reads others"
    )
    val_len: int = positive(4 * 64 * 1024, "tokens per validation sequence")
    val_every: int = option(250, "steps between validations (0: only at the end)")

    # model
    layers: str = option(
        "- S1M S2M SM LM SM SM+5 M+4 SM+3 S0M+2 S1M+1 L2M",
        "one word per layer (read Block and Attention first): S or L (attention with the short or"
        " long window), a digit (value table), M (MLP), +N (skip connection from layer N); -"
        " (nothing)",
    )
    ngrams: tuple[Ngrams, ...] = option((), "n-gram embedding tables, Ngrams(N, ROWS, WIDTH) each")
    ngram_reset: int = option(
        0,
        "zero the n-gram tables every N steps, counted back from the last step (0: never); "
        "with N = the steps of an epoch no table sees a text twice",
        needs="ngrams",
    )
    doc_copy: bool = option(False, "predict that the document repeats itself; see DocCopy")
    model_dim: int = option(768, "width of the residual stream", min=GATE_DIM)
    num_heads: int = positive(6, "attention heads")
    backout_layer: int = option(8, "layer whose output is partly subtracted before the head")
    logit_cap: float = positive(30.0, "logits = logit_cap * sigmoid(x / 7.5)")
    # Adam's moments have the dtype of their parameter, as in the record. The record rounds
    # NorMuon's gates, their moments, and its normalization after polar to bf16; this file keeps
    # them in float32, which costs nothing. Matrices and their gradients are sent in bf16, as in
    # records from 57 on; see NorMuon.init_state
    dtype: str = option(
        "bfloat16", "dtype of activations and parameters, but for scalars", ("bfloat16", "float32")
    )
    fp8_head: bool = option(
        True, "compute the head in fp8 during training; off on GPUs without fp8"
    )
    # x is normed, so its entries are at most sqrt(model_dim); a gradient of the summed cross
    # entropy is within 1
    fp8_x_scale: float = positive(
        math.sqrt(768) / 448,
        "the head's input is divided by it in fp8, of at most 448",
        needs="fp8_head",
    )
    fp8_weight_scale: float = positive(
        2.0**-9, "the head's weights are divided by it in fp8: as above", needs="fp8_head"
    )
    fp8_grad_scale: float = positive(
        1 / 448, "the logits' gradient is divided by it in fp8, at most 57,344", needs="fp8_head"
    )

    # schedule
    num_steps: int = positive(
        2245, "training steps; with fewer, extra_steps and muon_momentum_rise, _fall shrink, too"
    )
    stages: tuple[Stage, ...] = option(
        (
            Stage(until=1 / 3, long_window=3),
            Stage(until=2 / 3, long_window=7),
            Stage(long_window=11),
            Stage(extra_steps=40, long_window=13),
        ),
        "such as Stage(until=1/3, long_window=3), Stage(peak_lr_factor=Ramp(1, 2)),"
        " Stage(extra_steps=40). until: end (up to 1: fraction of the scheduled steps; above 1:"
        " step); extra_steps: length after the schedule",
    )
    cooldown: float = option(
        0.5, "fraction of the scheduled steps in which the learning rate falls", max=1
    )
    lr_floor: float = option(
        0.1, "learning-rate factor at the end of the cooldown", max=1, needs="cooldown"
    )
    window_block: int = positive(128, "tokens per block of attention windows")
    final_window: int = positive(
        20, "long window of the last validation, in blocks; the rotary is not stretched for it"
    )

    # optimizers
    param_groups: tuple[AdamGroup | MuonGroup, ...] = option(
        (),
        'rows for single kinds of parameters, such as AdamGroup("head", lr_mul=0.5, beta1=0.5), '
        'MuonGroup("attn"); each replaces the row of that kind in PARAM_GROUPS or in the preset',
    )
    adam_lr: float = option(0.008, "Adam's learning rate before lr_mul of param_groups")
    adam_beta1: float = option(
        0.65, "first moment's decay; a token's gradients are far apart", exclusive_max=1
    )
    adam_beta2: float = option(0.95, "decay of the second moment", exclusive_max=1)
    adam_eps: float = positive(1e-8, "added to the denominator, so that 0 / 0 is 0")
    adam_every: int = positive(2, "steps per Adam update, which uses the sum of their gradients")
    lazy_tables: bool = option(
        False,
        "update only the n-gram rows that a step uses, and send only their new values",
        needs="ngrams",
    )
    muon_lr: float = option(0.03, "NorMuon's learning rate: the size of an orthogonal update")
    muon_weight_decay: float = option(
        1.2,
        "cautious weight decay: an update that moves a weight towards 0 subtracts "
        "this * (muon_lr * lr_factor) ** 2 * lr_mul of it, too",
    )
    muon_momentum: float = option(
        0.95, "NorMuon's momentum between warm-up and cooldown", exclusive_max=1
    )
    muon_momentum_low: float = option(
        0.85,
        "NorMuon's momentum at step 0 and at num_steps",
        exclusive_max=1,
        needs="muon_momentum_rise muon_momentum_fall",
    )
    muon_momentum_rise: int = option(300, "steps of the momentum warm-up")
    muon_momentum_fall: int = option(50, "steps of the momentum cooldown")
    muon_beta2: float = option(0.95, "decay of NorMuon's second moment", exclusive_max=1)

    # gradient sync (see also SyncSettings). This bucket holds 16 of the record's largest matrices
    # in bf16, two per rank
    bucket_mb: float = free_option(
        72.0, "MiB of parameters per bucket (0: one bucket per parameter)"
    )
    grad_reduce_in_fp32: bool = option(
        False, "accumulate and send the gradients of bf16 parameters in float32"
    )
    bf16_compress: bool = option(False, "send gradients in bf16")

    # machine
    micro_batch_splits: int = positive(
        1, "parts that each micro-batch is split into, to save GPU memory"
    )
    compile: str = free_option(
        "auto", "torch.compile for blocks, head and rules; auto: on GPUs", ("auto", "on", "off")
    )
    # flash is FlashAttention 3 on Hopper where it is installed, else torch's own
    attention: str = free_option(
        "auto",
        "flash: FlashAttention; masked: SDPA; auto: flash on GPUs in bf16, else masked",
        ("auto", "flash", "masked"),
    )
    kernels: str = free_option(
        "auto",
        "Triton kernels, on: of MLP and loss; loss: of the loss only; auto: on for GPUs "
        "with TMA, loss for others",
        ("auto", "on", "loss", "off"),
    )
    warmup_steps: int = free_option(
        30, "untimed warm-up steps over all stages; the state is restored after them"
    )
    timeout_s: int = free_option(
        300, "seconds until a collective fails if a rank does not join it", min=1, max=10**6
    )
    profile: str = free_option("", "A:B writes a Chrome trace of steps A to B per rank")

    # log and saved files
    log_dir: str = free_option("logs", "folder of logs, checkpoints and models")
    run_id: str = free_option("", "name of the log (empty: from the time and the launch)")
    train_loss_every: int = option(10, "steps between training losses in the log")
    save_every: int = free_option(
        0, "steps between checkpoints, off the clock (0: only on SIGTERM and SIGUSR1)"
    )
    keep_checkpoints: int = free_option(2, "checkpoints to keep until the run has finished", min=1)
    resume: str = free_option("", "checkpoint or log to resume from, or latest")
    init_from: str = option(
        "", "saved model or checkpoint to start from; such a run cannot be a record"
    )
    save_model: bool = free_option(False, "save the trained model for sample.py and verify.py")
    race: str = option("", "set by launch/race.py: ID:RUN:DECLARED_N:SIDE")

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def head_dim(self) -> int:
        return self.model_dim // self.num_heads

    def parse_layers(self) -> tuple[Layer, ...]:
        """Parse `layers`: `S1M+5` -> Layer("S", 1, True, skip_from=5). RunError on another word."""
        require(self.layers.split(), "layers is empty; give at least one layer")

        def parse(word: str) -> Layer:
            parts = re.fullmatch(r"-|(?=[^+])(?:([SL])(\d?))?(M?)(?:\+(\d+))?", word)
            require(
                parts,
                f"layers: {word!r} is not a layer; write S or L, optionally with a digit, M and +N,"
                " such as S1M+0; or M; or -",
            )
            window, table, mlp, skip = parts.groups()
            return Layer(
                window, int(table) if table else None, bool(mlp), int(skip) if skip else None
            )

        return tuple(map(parse, self.layers.split()))

    def saved_layers(self) -> set[int]:
        """Return the layers whose outputs later layers or the head read."""
        return {layer.skip_from for layer in self.parse_layers()} - {None} | {self.backout_layer}

    def shortened(self, num_steps: int) -> Values:
        """Scale all numbers of steps to a run of fewer steps. A longer run keeps them."""

        def scaled(steps: int) -> int:
            return steps * min(num_steps, self.num_steps) // self.num_steps

        return {
            "stages": tuple(
                replace(stage, extra_steps=scaled(stage.extra_steps))
                for stage in self.stages
                if scaled(stage.extra_steps) or not stage.extra_steps
            ),
            **{
                name: min(steps := getattr(self, name), max(1, scaled(steps)))
                for name in ("muon_momentum_rise", "muon_momentum_fall")
            },
        }


PRESETS = {
    # saves 0.7 simulated ms a step (dry_gpu)
    "speedrun": Config(overlap_param_gather=True, update_order="forward"),
    # A small run for two CPU cores on the bytes of Python's standard library. LOG.md says what each
    # value gains
    "laptop": Config(
        target_val_loss=1.40,
        train_files="data/stdlib/stdlib_train_*.bin",
        val_files="data/stdlib/stdlib_val_*.bin",
        train_shards=0,
        max_document_tokens=257,
        long_documents="split",
        shuffle=True,
        even_order=True,
        micro_batch_tokens=1024,
        micro_batches=2,
        val_tokens=0,
        val_len=1024,
        val_every=0,
        layers="S0M",
        model_dim=64,
        num_heads=2,
        backout_layer=0,
        lazy_tables=True,
        doc_copy=True,
        dtype="float32",
        fp8_head=False,
        ngrams=(
            Ngrams(2, 16384, 64),
            Ngrams(3, 32768, 64),
            Ngrams(4, 65536, 64),
            Ngrams(6, 65536, 64),
            Ngrams(8, 65536, 64),
        ),
        num_steps=36,
        stages=(Stage(long_window=2),),
        window_block=32,
        final_window=2,
        lr_floor=0.3,
        param_groups=(AdamGroup("ngram_embeds", lr_mul=10.0), AdamGroup("doc_copy", lr_mul=10.0)),
        adam_every=1,
        adam_lr=0.03,
        adam_beta1=0.5,
        adam_beta2=0.9,
        muon_lr=0.04,
        muon_momentum_rise=7,
        muon_momentum_fall=3,
        check_grads=True,
        warmup_steps=4,
        train_loss_every=1,
        save_model=True,
    ),
}
# Test benches: is an idea likely to help the speedrun? bench/known_ideas.py scores them. A small
# transformer for two CPU cores, which takes from laptop what it does not name, and three tenths of
# speedrun's steps for one GPU
PRESETS["bench"] = replace(
    PRESETS["laptop"],
    target_val_loss=0.0,
    max_document_tokens=513,
    val_tokens=128 * 1024,
    layers="S0M LM SM+0 L0M",
    model_dim=128,
    backout_layer=2,
    ngrams=(),
    lazy_tables=False,
    doc_copy=False,
    num_steps=200,
    stages=(Stage(until=1 / 2, long_window=4), Stage(long_window=8)),
    final_window=8,
    lr_floor=0.0,  # with 0.1 the differences of pairs of runs spread more than three times as far
    param_groups=(),
    adam_lr=0.008,
    adam_beta1=0.65,
    adam_beta2=0.95,
    muon_lr=0.03,
    muon_momentum_rise=27,
    muon_momentum_fall=5,
    save_model=False,
)
PRESETS["bench_gpu"] = replace(
    PRESETS["speedrun"],
    target_val_loss=0.0,
    num_steps=670,
    **PRESETS["speedrun"].shortened(670),
)

# Titles of --help. A title covers the fields from its key to the next key, in the order of the
# fields
HELP_GROUPS = {
    "seed": "the run",
    "train_files": "data",
    "layers": "model",
    "num_steps": "schedule",
    "micro_batches": "values that stages may set",
    "param_groups": "optimizers",
    "sync": "gradient sync",
    "bucket_mb": "gradient sync",
    "micro_batch_splits": "machine",
    "log_dir": "log and saved files",
}

EXAMPLES = {
    "int": "a whole number such as 3",
    "float": "a number such as .5",
    "bool": "true or false",
    "rows": (
        "a list of rows such as Stage(until=1/3, long_window=3) or AdamGroup('head', lr_mul=.5)"
    ),
}


def parse_value(
    text: str, kind: str = "rows", row_types: tuple[type, ...] = Config.row_types
) -> Any:
    """Parse a flag's text by the type of its field.

    `rows`: such as `Stage(until=1/3, long_window=3), Stage()`. Only row_types, numbers, fractions,
    strings, tuples, true and false are allowed. ArgumentTypeError on others.
    """
    names = {row.__name__: row for row in row_types}

    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | float() | str()):
                return node.value
            case ast.Name(id="true" | "false"):
                return node.id == "true"
            case ast.Tuple() | ast.List():
                return tuple(map(value, node.elts))
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp(op=ast.Div()):
                return value(node.left) / value(node.right)
            case ast.Call(func=ast.Name(id=name)) if name in names:
                known = [f.name for f in fields(names[name])]
                for unknown in {k.arg for k in node.keywords if k.arg} - {*known}:
                    raise ValueError(f"{name} has no {unknown!r}, only {', '.join(known)}")
                return names[name](
                    *map(value, node.args), **{k.arg: value(k.value) for k in node.keywords}
                )
        raise ValueError(
            f"{ast.unparse(node)!r} is neither a number, a string, a tuple nor one of"
            f" {', '.join(names)}"
        )

    try:
        v = value(ast.parse(f"({text})", mode="eval").body)
        if kind == "rows":
            return v if isinstance(v, tuple) else (v,)
        if kind == "float" and type(v) is int:
            v = float(v)
        if type(v).__name__ != kind:
            raise ValueError(f"{v!r} has another type")
        return v
    except (SyntaxError, ValueError, TypeError, ArithmeticError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not {EXAMPLES[kind]}: {getattr(error, 'msg', error)}"
        ) from None


def holds_rows(f: Field) -> bool:
    return f.type.startswith("tuple[")


class Parser(argparse.ArgumentParser):
    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Accept dashes for the underscores in names of flags."""
        words = [
            re.sub("(?<=^--)[^=]+", lambda name: name[0].replace("-", "_"), word)
            for word in (sys.argv[1:] if args is None else args)
        ]
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """Print one line; the usage would list every flag."""
        unknown = re.search("unrecognized arguments: (--[^ =]+)", message)
        near = difflib.get_close_matches(
            unknown[1] if unknown else "", self._option_string_actions, 1, 0.7
        )
        meant = f"; did you mean {near[0]}?" if near else ";"
        self.exit(2, f"{self.prog}: error: {message}{meant} {self.prog} --help lists the flags\n")


def make_parser(presets: dict[str, Config]) -> argparse.ArgumentParser:
    config_type = type(usual := next(iter(presets.values())))
    program = source_files(usual)[0].name
    parser = Parser(
        prog=program,
        description=__doc__.split("\n\n")[0],
        allow_abbrev=False,
        usage=f"{program} [--preset NAME] [--flag VALUE ...]",
        epilog=(
            f"Every flag is a field of the config. Brackets show {[*presets][0]}'s value, and other"
            " presets' that differ. Relative paths start at the script's folder."
        ),
    )
    parser.add_argument(
        "--preset",
        choices=presets,
        help="base of the values below (default: laptop without a GPU, else the first)",
    )
    titles = HELP_GROUPS | config_type.help_groups
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(titles.values())}
    for f in fields(config_type):
        if f.name in titles:
            group = groups[titles[f.name]]
        aliases = ["--exact"] if f.name == "world_size_invariant" else []
        choices = f.metadata["choices"] or None
        kind = "rows" if holds_rows(f) else f.type
        group.add_argument(
            f"--{f.name}",
            *aliases,
            choices=choices,
            metavar=None if choices else kind.upper(),
            type=(
                str
                if kind == "str"
                else partial(parse_value, kind=kind, row_types=config_type.row_types)
            ),
            help=(f.metadata["meaning"] + preset_values(f, presets)).replace("%", "%%"),
        )
    return parser


def preset_values(f: Field, presets: dict[str, Config]) -> str:
    """Show the first preset's value of a field, and others that differ; not of long fields."""
    if f.name in ("stages", "param_groups"):
        return ""
    usual, *others = (
        (
            f"{v:.4g}"
            if isinstance(v, float)
            else ",".join(map(str, v))
            if isinstance(v, tuple)
            else str(v) or "empty"
        )
        for v in (getattr(preset, f.name) for preset in presets.values())
    )
    differ = (f"{name}: {value}" for name, value in zip([*presets][1:], others) if value != usual)
    return f" ({'; '.join([usual, *differ])})"


def parse_config(
    argv: Sequence[str], default_preset: str, presets: dict[str, Config] = PRESETS
) -> tuple[str, Config]:
    """Parse flags into the preset's name and the config.

    A resumed run has the config of its checkpoint; only fields that are `free` may differ. Raise
    SystemExit on an unknown or ill-typed flag, RunError if there is no checkpoint to resume from.
    """
    flags = {
        name: v for name, v in vars(make_parser(presets).parse_args(argv)).items() if v is not None
    }
    preset = flags.pop("preset", default_preset if default_preset in presets else [*presets][0])
    base = presets[preset]
    base = replace(base, **base.shortened(max(1, flags.get("num_steps", base.num_steps))))
    if "param_groups" in flags:
        # later rows replace earlier ones
        flags["param_groups"] = (*base.param_groups, *flags["param_groups"])
    config = replace(base, **flags)
    preset_changes = {f.name for f in fields(base) if getattr(base, f.name) != f.default}
    changed_flags = [name for name, v in flags.items() if v != getattr(base, name)]
    without_effect = [
        *flags_without_effect(config, changed_flags),
        *flags_without_effect(base, preset_changes - flags.keys()),
    ]
    require(not without_effect, "; ".join(without_effect))
    if not config.resume:
        return preset, config
    path = Path(find_run(config)[1])
    fixed_flags = sorted(flags.keys() & fixed_fields(config))
    require(
        not fixed_flags,
        f"--resume continues {path}; leave out --{', --'.join(fixed_flags)}, which would make it"
        " another run",
    )
    saved = load_file(path, check=False)  # its checksum is verified when the state is loaded
    program = source_files(config)[0].name
    try:
        saved_program = saved.get("program", program)
        require(
            saved_program == program,
            f"--resume continues {path}, a run of {saved_program}; start {saved_program} in place"
            f" of {program}",
        )
        flags.update(run_id=saved["run_id"], log_dir=str(path.parent), resume=str(path))
        return saved["preset"], replace(config_of(saved["config"], type(config)), **flags)
    except (AttributeError, KeyError, TypeError) as error:
        raise RunError(
            f"{path}: not a checkpoint of this version of {program} ({error}); name another one, or"
            " resume with the version whose source opens its log"
        ) from error


def flags_without_effect(c: Config, names: Iterable[str]) -> Iterator[str]:
    """Say which of these fields change nothing. A field that is off, as by default, is left out."""
    in_stages = [f.name for f in stage_fields(c)]
    for f in (f for f in fields(c) if f.name in names and (getattr(c, f.name) or f.default)):
        needs = f.metadata["needs"].split()
        if needs and not any(getattr(c, name) for name in needs):
            yield f"--{f.name} has no effect without --{' or --'.join(needs)}"
        if f.name in in_stages and None not in [getattr(stage, f.name, None) for stage in c.stages]:
            yield (
                f"--{f.name} has no effect, because every stage sets that value; change it in"
                f" --stages '{', '.join(map(repr, c.stages))}'"
            )
        if f.name.startswith("adam_beta") and None not in [
            getattr(group, f.name[5:], 0) for group in groups_by_kind(c).values()
        ]:
            yield f"--{f.name} has no effect, because every row of --param_groups sets it"


def fixed_fields(config: Config) -> list[str]:
    """Return the names of the fields that a resumed run may not change."""
    return [f.name for f in fields(config) if not f.metadata["free"]]


def stage_fields(config: Config) -> list[Field]:
    """Return the fields that stages may set."""
    of_row = {f.name for f in fields(config.row_types[0])}
    return [f for f in fields(config) if f.name in of_row]


def source_files(config: Config) -> list[Path]:
    """Return the files of the config's classes: the program that runs it, then what it imports."""
    return [*dict.fromkeys(Path(inspect.getfile(base)) for base in type(config).__mro__[:-1])]


def json_of(config: Config) -> Values:
    """Return the JSON form of a config. Rows are text, as on the command line."""
    return {
        name: ", ".join(map(repr, v)) if isinstance(v, tuple) else v
        for name, v in vars(config).items()
    }


def config_of(values: Values, config_type: type[Config] = Config) -> Config:
    """Rebuild a config from its JSON form. TypeError if another version of this script wrote it."""
    row_fields = {f.name for f in fields(config_type) if holds_rows(f)}
    try:
        return config_type(
            **{
                name: parse_value(v, row_types=config_type.row_types) if name in row_fields else v
                for name, v in values.items()
            }
        )
    except argparse.ArgumentTypeError as error:
        raise TypeError(str(error)) from None


class Layer(NamedTuple):
    """The contents of one layer; see Config.layers."""

    window: str | None  # of its attention: S, L, or None for no attention
    value_table: int | None
    mlp: bool
    skip_from: int | None = None


MIN_GROUP_LAYERS = 4


def layer_groups(config: Config, apart: Sequence[int] = ()) -> list[range]:
    """Cut the layers into the groups that are compiled together.

    A group of at least MIN_GROUP_LAYERS ends where an output is saved anyway, and any group before
    a layer of `apart`.
    """
    count = len(config.parse_layers())
    saved = config.saved_layers()
    begins = [0]
    for i in range(1, count):
        large = min(i - begins[-1], count - i) >= MIN_GROUP_LAYERS
        if i in apart or i - 1 in saved and large:
            begins.append(i)
    return [range(*ends) for ends in pairwise([*begins, count])]


def groups_by_kind(config: Config) -> dict[str, AdamGroup | MuonGroup]:
    """Map each kind of parameters to its row; those of config.param_groups replace the preset's."""
    return {group.kind: group for group in (*config.base_groups, *config.param_groups)}


# Checks of values are here, in Config.parse_layers and in stages_of. find_shards and resolve_auto
# compare with data and GPUs


def check_config(config: Config, ranks: int) -> None:
    """Raise a RunError that lists all values that are impossible, also for this number of ranks."""
    wrong = [
        message for f in fields(config) if (message := out_of_range(f, getattr(config, f.name)))
    ]
    require(not wrong, "; ".join(wrong))  # the conditions need possible numbers
    wrong = [message for holds, message in config.conditions(ranks) if not holds]
    require(not wrong, "; ".join(wrong))


def conditions(c: Config, ranks: int) -> Iterator[tuple[Any, str]]:
    """Yield each condition on several values, with its message. RunError on an invalid row."""
    layers = c.parse_layers()
    value_tables = {layer.value_table for layer in layers} - {None}
    kinds = [group.kind for group in c.base_groups]
    unknown = ", ".join(repr(row.kind) for row in c.param_groups if row.kind not in kinds)
    profile = re.fullmatch(r"(\d+):(\d+)", c.profile)
    yield from (
        (
            c.model_dim % (4 * c.num_heads) == 0,
            f"model_dim is {c.model_dim}; give a multiple of 4 * num_heads, {4 * c.num_heads}",
        ),
        (
            c.val_tokens % c.val_len == 0,
            f"val_tokens is {c.val_tokens}; give a multiple of val_len, {c.val_len}, or 0",
        ),
        (
            "/" not in c.run_id and c.run_id not in (".", ".."),
            f"run_id is {c.run_id!r}; give a file name without '/'",
        ),
        (
            not c.profile or profile and int(profile[1]) <= int(profile[2]) < c.num_steps,
            f"profile is {c.profile!r}; "
            f"give the first and the last step, such as 10:13, below num_steps {c.num_steps}",
        ),
        (
            re.fullmatch(r"([^:]+:\d+:\d+:[^:]*)?", c.race),
            f"race is {c.race!r}; only launch/race.py sets it",
        ),
        (
            c.attention != "flash" or c.dtype == "bfloat16",
            "attention flash needs dtype bfloat16; use --attention auto",
        ),
        (
            not (
                c.world_size_invariant
                and (c.bf16_compress or c.clip_norm or c.attention == "flash")
            ),
            "world_size_invariant excludes bf16_compress, clip_norm and attention flash, whose"
            " sums depend on the number of ranks or on timing; leave out one of them",
        ),
        (
            not c.grad_reduce_in_fp32 or c.dtype == "bfloat16",
            "grad_reduce_in_fp32 has no effect without --dtype bfloat16; leave it out",
        ),
        (
            c.backout_layer < len(layers),
            f"backout_layer is {c.backout_layer}; layers has 0 to {len(layers) - 1}",
        ),
        (
            value_tables == {*range(len(value_tables))},
            f"layers: value tables {value_tables}; number them from 0",
        ),
        (not unknown, f"param_groups: unknown kinds {unknown}; the kinds are {', '.join(kinds)}"),
    )
    for i, layer in enumerate(layers):
        yield (
            layer.skip_from is None or layer.skip_from < i,
            f"layers: layer {i} has a skip connection from layer "
            f"{layer.skip_from}; it must come from an earlier layer",
        )
    for row in c.stages:
        tokens = row.micro_batch_tokens or c.micro_batch_tokens
        yield (
            tokens % c.micro_batch_splits == 0,
            f"stages: {row!r}: micro_batch_splits is {c.micro_batch_splits}; it "
            f"must divide micro_batch_tokens, {tokens}",
        )
    for table in c.ngrams:
        yield (
            table.width <= c.model_dim,
            f"ngrams: {table} is wider than model_dim, {c.model_dim}; give at most that",
        )
    for stage in stages_of(c):
        n = stage.first["micro_batches"]
        where = f"the stage from step {stage.begin} on has {n} micro-batches"
        of_stage = (
            (
                ranks > 0 and n % ranks == 0,
                f"{where}, which {ranks} ranks cannot share evenly; start "
                f"{usable_ranks(c, ranks)} ranks (--nproc_per_node), or change --micro_batches",
            ),
            (
                not c.world_size_invariant or n & (n - 1) == 0 and ranks & (ranks - 1) == 0,
                "world_size_invariant sums a "
                f"batch as a binary tree, and {where} on {ranks} ranks; make both powers of two",
            ),
        )
        yield from of_stage
        if not all(holds for holds, _ in of_stage):
            return  # most mistakes are the same in every stage


Config.conditions = conditions  # a method, which frontier.py extends


def out_of_range(f: Field, v: Any) -> str:
    """Say how a value violates its field's declaration; empty if it does not."""
    if (choices := f.metadata.get("choices")) and v not in choices:
        return f"{f.name} is {v!r}; it must be one of {', '.join(map(repr, choices))}"
    if holds_rows(f):
        for row in v:
            if type(row).__name__ not in f.type:
                return f"{f.name}: {row!r} is not a row of it; its type is {f.type}"
            for of_row in fields(row) if is_dataclass(row) else ():
                x = getattr(row, of_row.name)
                ends = (x.first, x.last) if isinstance(x, Ramp) and of_row.type == "float" else (x,)
                for wrong in (out_of_range(of_row, end) for end in ends if end is not None):
                    if wrong:
                        return f"{f.name}: {row}: {wrong}"
        return ""
    if f.type.removesuffix(" | None") not in ("int", "float") or not f.metadata:
        return ""
    low, high, below = (f.metadata[name] for name in ("min", "max", "exclusive_max"))
    if (
        isinstance(v, int if f.type == "int" else int | float)
        and math.isfinite(v)
        and (v > 0 if low is None else v >= low)
        and v <= high
        and v < below
    ):
        return ""
    wanted = ["a whole number" if f.type == "int" else "a number"]
    wanted += ["above 0"] if low is None else [f"from {low:g} on"] if low > -math.inf else []
    wanted += [
        f"{words} {bound:g}"
        for words, bound in (("at most", high), ("below", below))
        if bound < math.inf
    ]
    return f"{f.name} is {v!r}; it must be {', '.join(wanted)}"


# --------------------------------------------------------------------------------------------------
# schedule


class Windows(NamedTuple):
    """Attention windows in tokens."""

    long: int
    short: int


@frozen
class Plan:
    """Everything that depends on the step, for one step."""

    step: int = 0
    micro_batches: int = 0
    micro_batch_tokens: int = 0
    max_document_tokens: int = 0
    lr_factor: float = 1.0  # on every learning rate
    momentum: float = Config.muon_momentum  # NorMuon's
    windows: Windows = Windows(0, 0)  # also those of a validation before this step
    # long windows in tokens up to now; the rotary is stretched to each
    rotary_windows: tuple[int, ...] = ()
    resets_ngrams: bool = False  # before this step
    # all stage values that are no integers
    scheduled: dict[str, float] = field(default_factory=dict)
    values: Values = field(default_factory=dict)  # all stage values


def plan_of(config: Config, step: int) -> Plan:
    """Compute the plan of a step. The plan of step num_steps is that of the last validation."""
    stages = stages_of(config)
    at = max(i for i, stage in enumerate(stages) if stage.begin <= step)
    stage = stages[at]
    done = min(1.0, (step - stage.begin) / (stage.end - stage.begin))
    # integers stay
    now = {
        name: first if first == stage.last[name] else first + done * (stage.last[name] - first)
        for name, first in stage.first.items()
    }
    rotary = [
        key * config.window_block
        for key, _ in groupby(s.first["long_window"] for s in stages[: at + 1])
    ]
    longest = config.final_window if step == config.num_steps else now["long_window"]
    resets_ngrams = False
    if config.ngram_reset and 0 < step < config.num_steps:
        resets_ngrams = (config.num_steps - step) % config.ngram_reset == 0
    return Plan(
        step=step,
        micro_batches=now["micro_batches"],
        micro_batch_tokens=now["micro_batch_tokens"],
        max_document_tokens=now["max_document_tokens"],
        lr_factor=lr_factor(config, step, now["peak_lr_factor"]),
        momentum=momentum_at(config, step),
        windows=Windows(
            longest * config.window_block, now["long_window"] // 2 * config.window_block
        ),
        rotary_windows=tuple(rotary),
        resets_ngrams=resets_ngrams,
        scheduled={f.name: float(now[f.name]) for f in stage_fields(config) if f.type == "float"},
        values=now,
    )


def lr_factor(config: Config, step: int, peak: float) -> float:
    """Compute the learning-rate factor: `peak`, in the cooldown linear from it to lr_floor.

    The factor jumps where a new stage has another peak.
    """
    scheduled = scheduled_steps(config)
    # below 1 as in the record, which never quite reaches lr_floor
    done = min(0.9999, step / scheduled)
    left = min(1.0, (1 - done) / config.cooldown) if config.cooldown else 1.0
    return peak * left + (1 - left) * config.lr_floor


def momentum_at(config: Config, step: int) -> float:
    """Compute the momentum of NorMuon: linear warm-up and cooldown at the ends of all steps."""
    fall_from = config.num_steps - config.muon_momentum_fall
    height = 1.0
    if step < config.muon_momentum_rise:
        height = step / config.muon_momentum_rise
    elif step > fall_from:
        height = 1 - (step - fall_from) / config.muon_momentum_fall
    return config.muon_momentum_low + height * (config.muon_momentum - config.muon_momentum_low)


class StageSteps(NamedTuple):
    """Steps [begin, end) of a stage, with its StageValues at both ends; only a Ramp's differ."""

    begin: int
    end: int
    first: Values
    last: Values


@lru_cache(maxsize=16)
def stages_of(config: Config) -> tuple[StageSteps, ...]:
    """Compute steps and values of each stage that has a step. RunError on an invalid one."""
    stages = []
    begin = 0
    scheduled = scheduled_steps(config)
    for row in config.stages:
        where = f"stages: {row!r}"
        until = row.until
        extra = row.extra_steps
        if extra:
            require(
                begin >= scheduled and until == 1,
                f"{where} begins at step {begin}, and the schedule ends at step "
                f"{scheduled}; let only the last stages have extra_steps, and no until",
            )
            end = begin + extra
        else:
            require(
                isinstance(until, int | float)
                and 0 < until < math.inf
                and (until <= 1 or until == int(until)),
                f"{where} has until={until!r}; give a fraction of the scheduled steps, or a whole"
                " step above 1",
            )
            # until=1/3 is not exactly a third
            end = math.ceil(round(until if until > 1 else until * scheduled, 6))
            require(
                begin <= end <= scheduled,
                f"{where} ends at step {end}; let it end in {begin} to {scheduled}",
            )
        if end > begin:
            stages.append(StageSteps(begin, end, *values_of(row, config)))
        begin = end
    require(
        begin == config.num_steps,
        f"stages end at step {begin}, and num_steps is {config.num_steps}; end one at until=1",
    )
    return tuple(stages)


def values_of(row: Stage, config: Config) -> tuple[Values, Values]:
    """Return a stage's StageValues at its first step and at its end, micro-batches after splits."""
    first = {}
    last = {}
    for name in (f.name for f in stage_fields(config)):
        v = getattr(config, name) if getattr(row, name) is None else getattr(row, name)
        first[name], last[name] = (v.first, v.last) if isinstance(v, Ramp) else (v, v)
    for values in (first, last):
        values["micro_batches"] *= config.micro_batch_splits
        values["micro_batch_tokens"] //= config.micro_batch_splits
    return first, last


def scheduled_steps(config: Config) -> int:
    """Count the steps of the run without extra_steps. Raise RunError if none is left."""
    scheduled = config.num_steps - sum(stage.extra_steps for stage in config.stages)
    require(
        scheduled > 0,
        f"stages: the extra steps leave {scheduled} of num_steps {config.num_steps}; give fewer",
    )
    return scheduled


def longest_window(config: Config) -> int:
    """Return the longest attention window of the run, in tokens."""
    return (
        max(config.final_window, *(stage.first["long_window"] for stage in stages_of(config)))
        * config.window_block
    )


def tokens_of_steps(config: Config, steps: int) -> int:
    """Count the tokens that the first `steps` steps train on."""
    return sum(
        (min(steps, s.end) - s.begin) * s.first["micro_batches"] * s.first["micro_batch_tokens"]
        for s in stages_of(config)
        if s.begin < steps
    )


def micro_batch_lengths(config: Config) -> set[int]:
    """Return the lengths of micro-batches in all stages, in tokens."""
    return {stage.first["micro_batch_tokens"] for stage in stages_of(config)}


def usable_ranks(config: Config, most: int) -> int:
    """Return the most ranks, up to `most`, that can share every stage's micro-batches evenly."""
    shared = math.gcd(*(stage.first["micro_batches"] for stage in stages_of(config)))
    return max(ranks for ranks in range(1, max(1, most) + 1) if shared % ranks == 0)


# --------------------------------------------------------------------------------------------------
# data


class Stream:
    """Batches of packed documents for one rank. A thread loads the next shard in advance.

    Each rank packs the whole batch and takes the r-th of equal consecutive parts, so any number of
    ranks reads the same tokens. A batch lies within one shard: when documents run out, the batch
    begins again in the next shard. Each epoch reads all shards, in a new order of documents if they
    are shuffled.

    digest identifies what was read: the sum modulo 2**256 of SHA-256(step, index in the step,
    tokens), 8 bytes each for the first two, over this rank's micro-batches. The sum over ranks does
    not depend on their number. A resumed run continues it.
    """

    def __init__(self, shards: list[Shard], config: Config, rank: int = 0, ranks: int = 1):
        self.shards = shards * config.epochs
        self.config = config
        self.rank = rank
        self.ranks = ranks
        self.split = config.long_documents == "split"
        self.longest = max(stage.first["max_document_tokens"] for stage in stages_of(config))
        self.loader = ThreadPoolExecutor(1, thread_name_prefix="load-shard")
        self.loaded = {}  # futures of Documents
        self.limit = lru_cache(maxsize=1)(self._limit)
        self.position = Position()
        self.digest = 0

    def _load(self, index: int) -> Documents:
        """Load all documents of a shard, in the order of the run.

        Pieces of a split document are shuffled separately.
        """
        c = self.config
        shard = self.shards[index]
        documents = index_documents(load_tokens(shard), shard.encoding.bos_id)
        require(
            len(documents.starts),
            f"{shard.path}: no BOS ({shard.encoding.bos_id}), so no document begins; "
            "create it again with a script of data/, or write its BOS id into header word 4",
        )
        if self.split:
            documents, _ = limit_documents(documents, self.longest, split=True)
        if c.shuffle:
            random = np.random.default_rng([c.seed, index])
            count = len(documents.starts)
            order = (
                even_order(count, random.random()) if c.even_order else random.permutation(count)
            )
            documents = Documents(
                documents.tokens, documents.starts[order], documents.lengths[order]
            )
        return documents

    def _limit(self, index: int, longest: int) -> tuple[Documents, np.ndarray, np.ndarray]:
        """Limit a shard's documents to `longest` tokens.

        Return the pieces, their offsets (see pack), and for each piece the index of its document.

        Start to load the next shard; drop all others.
        """
        require(
            index < len(self.shards),
            f"the training data ran out: {self.description()}, but documents of at most {longest}"
            f" tokens do not fill {self.config.num_steps} steps; add shards, or lower --num_steps",
        )
        wanted = [i for i in (index, index + 1) if i < len(self.shards)]
        self.loaded = {i: self.loaded.get(i) or self.loader.submit(self._load, i) for i in wanted}
        documents, document_of_piece = limit_documents(
            self.loaded[index].result(), longest, self.split
        )
        return documents, np.append(0, np.cumsum(documents.lengths)), document_of_piece

    def _advance(self, plan: Plan) -> tuple[Documents, list[tuple[int, int, int]]]:
        """Choose the documents of the next batch, and advance. RunError if the data run out."""
        index, document, before = self.position
        longest = plan.max_document_tokens
        if document and before != longest:  # the limit has changed: pieces are numbered anew
            document_of_piece = self.limit(index, before)[2]
            # of the first document that no batch has read from
            unread = document_of_piece[document - 1] + 1
            document = int(np.searchsorted(self.limit(index, longest)[2], unread))
        while True:
            documents, offsets, _ = self.limit(index, longest)
            taken = pack(offsets, document, plan.micro_batches, plan.micro_batch_tokens)
            if taken is not None:
                break
            index += 1
            document = 0
        self.position = Position(index, taken[-1][1] + 1, longest)
        return documents, taken

    def next_batch(self, plan: Plan) -> list[np.ndarray]:
        """Return this rank's micro-batches of a step, each uint16 [micro_batch_tokens + 1].

        Raise RunError if the data run out.
        """
        documents, taken = self._advance(plan)
        share = len(taken) // self.ranks
        batch = []
        for place in range(self.rank * share, (self.rank + 1) * share):
            micro_batch = fill_micro_batch(documents, self.shards[0].encoding.bos_id, *taken[place])
            batch.append(micro_batch)
            where = plan.step.to_bytes(8, "little") + place.to_bytes(8, "little")
            self.digest = (self.digest + int(sha256_of(where + micro_batch.tobytes()), 16)) % 2**256
        return batch

    def check_enough(self) -> None:
        """Raise RunError if the data cannot suffice. With at most two shards the check is exact."""
        c = self.config
        needed = tokens_of_steps(c, c.num_steps)
        require(
            sum(shard.tokens for shard in self.shards) >= needed,
            f"{self.description()}, and {c.num_steps} steps "
            f"read at least {needed}; add shards, or lower --num_steps",
        )
        if len(self.shards) <= 2 * c.epochs:
            position = self.position
            for step in range(c.num_steps):
                self._advance(plan_of(c, step))
            self.position = position

    def description(self) -> str:
        times = f", read {self.config.epochs} times," * (self.config.epochs > 1)
        return (
            f"{len(self.shards) // self.config.epochs} shard(s) like {self.shards[0].path}{times}"
            f" hold {sum(shard.tokens for shard in self.shards)} tokens"
        )

    def close(self) -> None:
        self.loader.shutdown(wait=False, cancel_futures=True)


class Position(NamedTuple):
    """Start of the next batch: shard, and next unread document among those cut to `longest`."""

    shard: int = 0
    document: int = 0
    longest: int = 0


def fill_micro_batch(
    documents: Documents, bos_id: int, first_document: int, last_document: int, last_tokens: int
) -> np.ndarray:
    """Concatenate the documents of one micro-batch, uint16 [tokens + 1].

    Every document begins with BOS; in later pieces of a split document, BOS replaces the first
    token.
    """
    lengths = documents.lengths[first_document : last_document + 1].copy()
    lengths[-1] = last_tokens
    starts = documents.starts[first_document : last_document + 1]
    micro_batch = np.concatenate(
        [documents.tokens[begin : begin + n] for begin, n in zip(starts, lengths)]
    )
    micro_batch[np.cumsum(lengths) - lengths] = bos_id
    return micro_batch


def pack(
    offsets: np.ndarray, first_document: int, count: int, tokens: int
) -> list[tuple[int, int, int]] | None:
    """Choose documents for `count` micro-batches of tokens + 1 tokens each, from the first one on.

    offsets [documents + 1] are the cumulative lengths of the documents, from 0 on. Return (first
    document, last document, tokens of the last that fit) of each micro-batch, or None if the
    documents run out.
    """
    taken = []
    for _ in range(count):
        full = int(offsets[first_document]) + tokens + 1
        last_document = int(np.searchsorted(offsets, full)) - 1
        if last_document == len(offsets) - 1:
            return None
        taken.append((first_document, last_document, full - int(offsets[last_document])))
        first_document = last_document + 1
    return taken


class Documents(NamedTuple):
    """Positions of one shard's documents, in the order in which they are read."""

    tokens: np.ndarray  # uint16 [tokens]
    starts: np.ndarray  # int64 [documents]
    lengths: np.ndarray  # int64 [documents]


def index_documents(tokens: np.ndarray, bos_id: int) -> Documents:
    """Find the documents; each begins with BOS. Tokens before the first BOS are left out."""
    starts = np.flatnonzero(tokens == bos_id)
    return Documents(tokens, starts, np.diff(starts, append=len(tokens)))


def limit_documents(
    documents: Documents, longest: int, split: bool
) -> tuple[Documents, np.ndarray]:
    """Limit documents to `longest` tokens: drop the others or, with `split`, make documents.

    Return the pieces, and for each the index of its document, int64 [pieces].
    """
    tokens, starts, lengths = documents
    pieces = -(-lengths // longest) if split else np.ones_like(lengths)
    document_of_piece = np.repeat(np.arange(len(starts)), pieces)
    begins = (
        np.arange(len(document_of_piece)) - (np.cumsum(pieces) - pieces)[document_of_piece]
    ) * longest
    return (
        Documents(
            tokens,
            starts[document_of_piece] + begins,
            np.minimum(lengths[document_of_piece] - begins, longest),
        ),
        document_of_piece,
    )


GOLDEN_RATIO = (5**0.5 - 1) / 2


def even_order(count: int, begin: float) -> np.ndarray:
    """Permute 0 .. count - 1 with low discrepancy, int64 [count]: any stretch samples evenly.

    `begin`, from 0 to 1, is the phase. The order is that of the multiples of the golden ratio
    modulo 1, which are spread evenly (Knuth, The Art of Computer Programming 3, 6.4).
    """
    return ((np.arange(count) * GOLDEN_RATIO + begin) % 1).argsort()


def validation_sequences(
    shards: list[Shard], tokens: int, length: int, skip: int = 0
) -> np.ndarray:
    """Cut `tokens` predictions (0: all) after `skip` into sequences, int32 [sequences, length + 1].

    With tokens = 0 the last sequence is padded with -1, which the loss ignores.
    """
    wanted = skip + tokens + 1 if tokens else sum(shard.tokens for shard in shards)
    end = max(skip + 2, wanted)
    begins = accumulate((shard.tokens for shard in shards), initial=0)
    held = [load_tokens(shard) for shard, begin in zip(shards, begins) if begin < end]
    stream = np.concatenate(held)[:end].astype(np.int32)
    require(
        len(stream) >= end,
        f"validation needs {end} tokens, and {len(shards)} shard(s) like"
        f" {shards[0].path} hold {len(stream)}; fetch the whole split, or lower --val_tokens (a"
        " multiple of --val_len; 0: all) or --val_skip",
    )
    stream = stream[skip:]
    require(
        (stream == shards[0].encoding.bos_id).any(),
        f"{shards[0].path}: no BOS begins a document; create it again",
    )
    padded = np.pad(stream, (0, -(len(stream) - 1) % length), constant_values=-1)
    return np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]


SAMPLES = 5
SAMPLE_TOKENS = 128


def check_apart(train: list[Shard], val: list[Shard], sequences: np.ndarray) -> None:
    """Raise RunError if the training shards hold a validation shard or the validation text.

    They hold it if they contain all samples, each from within a document. A sample that recurs in
    the validation text, such as a licence, shows nothing. With other text the search ends after the
    first sample.
    """
    same = {shard.sha256 for shard in train} & {shard.sha256 for shard in val}
    text = sequences[:, :-1].ravel()
    pieces = text[: len(text) // SAMPLE_TOKENS * SAMPLE_TOKENS].reshape(-1, SAMPLE_TOKENS)
    pieces = pieces[((pieces >= 0) & (pieces != val[0].encoding.bos_id)).all(1)]  # -1: padding
    samples = [piece.astype("<u2").tobytes() for piece in pieces[:: len(pieces) // SAMPLES + 1]]
    whole = text.astype("<u2").tobytes()
    samples = [sample for sample in samples if whole.count(sample) == 1]
    contained = samples and all(
        any(sample in shard.path.read_bytes() for shard in train) for sample in samples
    )
    require(
        not same and not contained,
        f"the training shards, such as {train[0].path}, contain the validation text of "
        f"{val[0].path}; name other files with --train_files or --val_files",
    )


class Shard(NamedTuple):
    """A file of tokens: a header of 256 int32, then uint16 tokens, both little-endian."""

    path: Path
    tokens: int
    encoding: Encoding
    sha256: str = ""  # of the file when the run began; empty if unknown


class Encoding(NamedTuple):
    vocab_size: int
    bos_id: int


HEADER_INTS = 256
MAGIC = 20240520
VERSION = 1
# for headers without an encoding
GPT2_VOCAB = 50257
GPT2_BOS = 50256


BYTES_VOCAB = 257  # bytes and BOS


def count_bytes(shard: Shard, targets: np.ndarray) -> int:
    """Count the bytes of text that targets of a shard (-1: none) stand for.

    Return 0 if the tokens of its vocabulary are unknown: data/ writes GPT-2's beside its shards.
    """
    path = shard.path.with_name("gpt2.tiktoken")
    lengths = np.zeros(shard.encoding.vocab_size + 1, int)  # the last is that of -1
    if shard.encoding.vocab_size == BYTES_VOCAB:
        lengths[: BYTES_VOCAB - 1] = 1
    elif shard.encoding.vocab_size == GPT2_VOCAB and path.is_file():
        words = [line.split()[0] for line in path.read_bytes().splitlines()]
        lengths[: len(words)] = [len(base64.b64decode(word)) for word in words]
    return int(lengths[targets].sum())


def find_shards(pattern: str, limit: int = 0) -> list[Shard]:
    """Find the shards that match a glob pattern, by name; the first `limit` of them (0: all).

    Raise RunError if there are none, or if their encodings differ.
    """
    # an absolute pattern is possible too
    paths = sorted(ROOT / path for path in glob.glob(pattern, root_dir=ROOT))
    require(
        paths,
        f"no shard matches {ROOT / pattern}; create shards with data/fineweb.py, data/stdlib.py or "
        "data/text.py, or name others with --train_files and --val_files",
    )
    shards = [read_header(path) for path in paths[: limit or None]]
    for shard in shards:
        require(
            shard.encoding == shards[0].encoding,
            f"{shard.path} has {shard.encoding}, and {shards[0].path} has "
            f"{shards[0].encoding}; use shards of one encoding",
        )
    return shards


def read_header(path: Path) -> Shard:
    """Read a shard's header. Its words: 0 magic, 1 version, 2 tokens, 3 vocabulary size, 4 BOS id.

    Raise RunError if the file is not a complete shard.
    """
    require(path.is_file(), f"{path}: not a regular file; delete it")  # opening a pipe would block
    with open(path, "rb") as file:  # np.fromfile would treat a read error as the end of the file
        words = file.read(HEADER_INTS * 4)
        size = os.fstat(file.fileno()).st_size
    magic, version, tokens, *encoding = np.frombuffer(
        words.ljust(HEADER_INTS * 4, b"\0"), dtype="<i4"
    )[:5].tolist()
    encoding = Encoding(*(encoding if encoding[0] else (GPT2_VOCAB, GPT2_BOS)))
    expected = HEADER_INTS * 4 + 2 * tokens
    require(
        (magic, version, size) == (MAGIC, VERSION, expected)
        and 0 <= encoding.bos_id < encoding.vocab_size <= 2**16,  # tokens are uint16
        f"{path}: not a complete shard: {size} bytes that begin with {[magic, version, tokens]},"
        f" {encoding}; a shard begins with {[MAGIC, VERSION]} and has {expected} bytes. Delete it,"
        " then fetch or create it again",
    )
    return Shard(path, tokens, encoding)


def load_tokens(shard: Shard) -> np.ndarray:
    """Read all tokens of a shard, uint16 [tokens].

    Raise RunError if a token is outside the vocabulary, or if the file has changed since the run
    began.
    """
    raw = shard.path.read_bytes()
    same = len(raw) == HEADER_INTS * 4 + 2 * shard.tokens and (
        not shard.sha256 or shard.sha256 == sha256_of(raw)
    )
    require(same, f"{shard.path}: the file has changed since the run began; start the run again")
    tokens = np.frombuffer(raw, dtype="<u2", offset=HEADER_INTS * 4)
    highest = int(tokens.max(initial=0))
    require(
        highest < shard.encoding.vocab_size,
        f"{shard.path}: token {highest}, but the vocabulary has "
        f"{shard.encoding.vocab_size} tokens; create the shard again",
    )
    return tokens


def sha256_of(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


# --------------------------------------------------------------------------------------------------
# model

# Wholes come before parts: GPT.forward and GPT.trunk first, small functions last. Masks and kernels
# have a section of their own. Tensor names may end in their shape: T tokens, H heads, D entries of
# a head


def compiled(function: Callable) -> Callable:
    """Mark a method that compile_parts compiles."""
    function.compiles = True
    return function


def compile_static(function: Callable) -> Callable:
    """Compile a function anew for each sequence length, group of layers or size of bucket."""
    # beyond torch's limit of eight it would run uncompiled, and 2.11 has no argument for the limit
    # of one function
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(function, dynamic=False)


class GPT(nn.Module):
    """The model of record 44, with n-gram tables and DocCopy where the config asks for them.

    Processes one packed sequence [T] at a time. The vocabulary is padded to a multiple of 128.
    """

    def __init__(self, config: Config, encoding: Encoding):
        super().__init__()
        c = config
        self.bos_id = encoding.bos_id
        self.layers = config.parse_layers()
        lengths = micro_batch_lengths(c)
        # tokens per call of the head: one size for one graph, and less memory
        self.loss_tokens = min(lengths)
        count = len(self.layers)
        vocab = -(-encoding.vocab_size // 128) * 128
        dtype = c.torch_dtype
        self.embed = embedding(vocab, c.model_dim, "embed", dtype)
        self.value_embeds = nn.ModuleList(
            embedding(vocab, c.model_dim, "value_embeds", dtype)
            for _ in {layer.value_table for layer in self.layers} - {None}
        )
        self.ngrams = nn.ModuleList(NgramTable(c, table) for table in c.ngrams)
        self.doc_copy = DocCopy(c.model_dim) if c.doc_copy else None
        self.smear_gate = parameter(torch.zeros(1, GATE_DIM, dtype=dtype), "smear_gate")
        self.blocks = nn.ModuleList(
            Block(c, layer, number) for number, layer in enumerate(self.layers)
        )
        self.lm_head = Head(c, vocab, encoding.vocab_size)
        self.groups = nn.ModuleList(Group(self, c, numbers) for numbers in layer_groups(c))
        # all scalar weights are one parameter: of skip connections, of x and x0 in each block, of
        # values and value table in each block, of smear, of backout
        self.skips = [i for i, layer in enumerate(self.layers) if layer.skip_from is not None]
        init = [-1.5] * len(self.skips) + [1.0, 0.0] * count + [0.5, 0.5] * count + [0.0, 0.5]
        self.scalars = parameter(torch.tensor(init), "scalars")
        self.scalar_sizes = len(self.skips), 2 * count, 2 * count, 1, 1
        self.rotary = Rotary(rotary_frequencies(c.head_dim), max(c.val_len, *lengths), dtype)
        self.scheduled = {}  # of this step, see apply_schedule
        # above 0: mask_in_pieces gives each mask the shape of a window of `reach` tokens, for one
        # graph
        self.reach = 0
        # counted: of the next sequence, by count_documents
        self.flash = False
        self.counted = None

    def forward(self, inputs: Tensor, targets: Tensor, windows: Windows) -> Pair:
        """inputs, targets [T] -> (objective, cross entropy) in nats, summed; see Head.forward.

        Targets of -1 are not counted.
        """
        return self.loss(self.trunk(inputs, windows), targets)

    def trunk(self, tokens: Tensor, windows: Windows) -> Tensor:
        """Tokens [T] -> the normed residual stream before the head [T, dim]."""
        x0, copied = self.embed_tokens(tokens)
        context = self.context(x0, self.masks(tokens, windows), copied)
        # a new object: with x0 itself torch.compile would build a further graph
        x = context.x0.view_as(context.x0)
        saved = {}  # outputs of the layers that later layers read
        # looked up just before the first group that reads them, so that their gradients can be sent
        # after that group
        values = {}
        for group in self.groups:
            for table in group.tables:
                if table not in values:
                    values[table] = self.value_embeds[table](tokens)
            x, outputs = group(x, context, saved, values)
            saved |= outputs
        return x

    def masks(self, tokens: Tensor, windows: Windows) -> Masks:
        """Build the mask of each kind of attention, by its letter in `layers`, for tokens [T]."""
        # it is valid for one sequence
        counted = self.counted
        self.counted = None
        docs = None if counted else self.begins(tokens).cumsum(0)

        def make(window: int) -> Mask:
            if not counted:
                return mask_in_pieces(docs, window, self.reach or window, self.embed.weight.dtype)
            starts, longest, count = counted
            return DocumentTable(starts, torch.tensor([window, longest, count]))

        return {"L": make(windows.long), "S": make(windows.short), None: None}

    # of documents, to which attention is confined; also on the host
    def begins(self, tokens: Tensor) -> Tensor:
        return tokens == self.bos_id

    def embed_tokens(self, tokens: Tensor) -> tuple[Tensor, Tensor | float]:
        """Tokens [T] -> x0, the stream before layer 0 [T, dim]; DocCopy's addition to the last."""
        smear_weight = self.scalars.split(self.scalar_sizes)[3]
        e = self.embed(tokens)
        x0 = self.smear(e, self.smear_gate, smear_weight[0])
        for table, rows in zip(self.ngrams, self.ngram_rows(tokens) if self.ngrams else ()):
            # a narrow table: the first entries
            x0 = x0 + F.pad(table(*rows), (0, x0.size(1) - table.embedding_dim))
        # Add 10 times the head's row: it points at the token's logit from the start. The head
        # starts at 0 and stays small, hence 10
        return x0, (
            self.doc_copy(e + 10 * self.lm_head.weight[tokens], tokens, self.bos_id)
            if self.doc_copy
            else 0.0
        )

    # A graph of its own: uncompiled it is 20 small kernels, and launching each takes longer than
    # running it
    @staticmethod
    @compiled
    def smear(e: Tensor, gate: Tensor, weight: Tensor, further: Tensor | None = None) -> Tensor:
        """Add to embeddings [T, dim] a gated share of the token before, `further`; then norm."""
        opening = weight * torch.sigmoid(F.linear(e[1:, : gate.size(1)], gate))
        x = torch.cat([e[:1], e[1:] + opening * e[:-1]])
        return norm(x if further is None else x + further)

    @compiled
    def ngram_rows(self, tokens: Tensor) -> list[Pair]:
        """Return the rows of each table and of its signs, of the n-grams that end at tokens [T]."""
        return [
            (hashes % table.num_embeddings, hashes // table.num_embeddings % table.SIGNS)
            for table, hashes in zip(self.ngrams, self.ngram_hashes(tokens))
        ]

    def ngram_hashes(self, tokens: Tensor) -> list[Tensor]:
        """Hash the n-grams that end at tokens [..., T] -> int64 [..., T] for each table."""
        token = tokens.long()
        in_document = torch.ones_like(tokens, dtype=torch.bool)
        last_tokens = []
        for _ in range(max(table.n for table in self.ngrams)):
            last_tokens.append(torch.where(in_document, token, self.bos_id))
            in_document = in_document & (token != self.bos_id)
            token = F.pad(token[..., :-1], (1, 0), value=self.bos_id)
        hashes = [torch.zeros_like(token)]
        for token in last_tokens:
            hashes.append(NgramTable.hash(hashes[-1] ^ token))
        return [hashes[table.n] for table in self.ngrams]

    def context(self, x0: Tensor, masks: Masks, copied: Tensor | float = 0.0) -> Context:
        # unbound at once: backward of many single selections would pad each gradient with zeros and
        # add them up
        skips, mixes, value_mixes, _, backout = self.scalars.split(self.scalar_sizes)
        return Context(
            x0,
            copied,
            (self.rotary.cos, self.rotary.sin, self.rotary.scale),
            masks,
            dict(zip(self.skips, skips.unbind())),
            mixes.view(-1, 2).unbind(),
            value_mixes.view(-1, 2).unbind(),
            backout[0],
            self.scheduled,
            {},
        )

    def loss(self, x: Tensor, targets: Tensor) -> Pair:
        """Compute the losses of `forward` from the normed residual stream [T, dim]."""
        pieces = zip(x.split(self.loss_tokens), targets.split(self.loss_tokens))
        losses = [self.lm_head(*piece, self.scheduled) for piece in pieces]
        return tuple(torch.stack(terms).sum() for terms in zip(*losses))

    def rows_read(self, tokens: Tensor) -> dict[nn.Parameter, Tensor]:
        """Find the rows of each n-gram table that a forward of these tokens [..., T] reads."""
        return {
            table.weight: hashes % table.num_embeddings
            for table, hashes in zip(self.ngrams, self.ngram_hashes(tokens))
        }

    def apply_schedule(self, plan: Plan) -> None:
        """Set the state of the model that depends on the step."""
        self.rotary.set_windows(plan.rotary_windows)
        numbers = to_device(torch.tensor([*plan.scheduled.values()]), self.embed.weight.device)
        # tensors: a new number compiles nothing anew
        self.scheduled = dict(zip(plan.scheduled, numbers.unbind()))


class Context(NamedTuple):
    """Inputs that all layers of one forward share.

    x0: [T, dim]. rotary: cosines, sines, softmax scale. scheduled: numbers of this step, see
    StageValues. shared: tensors that a layer hands to later layers, a place for an idea. masks: see
    GPT.masks. skip_weights: of skip connections, by layer. mixes, value_mixes: two weights of each
    layer. backout: weight of the backout layer's output. copied: see DocCopy.
    """

    x0: Tensor
    copied: Tensor | float
    rotary: tuple[Tensor, Tensor, Tensor]
    masks: Masks
    skip_weights: dict[int, Tensor]
    mixes: Sequence[Tensor]
    value_mixes: Sequence[Tensor]
    backout: Tensor
    scheduled: Tensors
    shared: Tensors


class Group(nn.Module):
    """Consecutive layers that are compiled together; the last also prepares the head's input.

    Gradients leave backward group by group. Blocks are in a tuple, so that nn.Module does not
    register them twice.
    """

    def __init__(self, model: GPT, config: Config, numbers: range):
        super().__init__()
        self.numbers = numbers
        self.last = numbers.stop == len(model.layers)
        self.backout = config.backout_layer
        self.blocks = tuple(model.blocks[i] for i in numbers)
        self.tables = sorted({block.layer.value_table for block in self.blocks} - {None})
        self.saves = config.saved_layers() - ({*numbers} if self.last else set())

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return chain(*(block.parameters() for block in self.blocks))

    @compiled
    def forward(
        self, x: Tensor, context: Context, saved: dict[int, Tensor], values: dict[int, Tensor]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Map the residual stream x [T, dim] to the next group's, or to the head's normed input.

        saved: outputs of earlier layers. values: rows of the value tables. Return also outputs of
        this group to save.
        """
        outputs = dict(saved)
        for i, block in zip(self.numbers, self.blocks):
            if (source := block.layer.skip_from) is not None:
                x = x + torch.sigmoid(context.skip_weights[i]) * outputs[source]
            if block.layer.window or block.layer.mlp:
                x = block.forward(x, context, values.get(block.layer.value_table))
            outputs[i] = x
        if self.last:
            x = norm(x - context.backout * outputs[self.backout] + context.copied)
        return x, {i: output for i, output in outputs.items() if i in self.saves and i not in saved}


class Block(nn.Module):
    """A layer: attention and MLP, if it has them, add their output to the residual stream."""

    def __init__(self, config: Config, layer: Layer, number: int):
        super().__init__()
        self.config = config
        self.layer = layer
        self.number = number
        self.attn = Attention(config, layer, number) if layer.window else None
        self.mlp = MLP(config, 4 * config.model_dim) if layer.mlp else None

    def forward(self, x: Tensor, context: Context, value_embeds: Tensor | None) -> Tensor:
        """Map the residual stream x [T, dim] to the next layer's."""
        mix = context.mixes[self.number]
        x = mix[0] * x + mix[1] * context.x0
        if self.attn is not None:
            x = x + self.attn(norm(x), value_embeds, context)
        if self.mlp is not None:
            x = x + self.mlp(norm(x))
        return x


class Attention(nn.Module):
    """Causal attention with a gate per head and token.

    Weights: qkvo [dim, 4 dim], gate [heads, GATE_DIM].
    """

    def __init__(self, config: Config, layer: Layer, number: int):
        super().__init__()
        dim = config.model_dim
        self.layer = layer
        self.number = number
        self.heads = config.num_heads
        # The query, key, value and output matrices [dim, dim], one after another in memory; outputs
        # begin at 0. Their shape [dim, 4 dim] makes finish_spec choose second moments per column
        qkvo = uniform(4 * dim, dim, dim)
        qkvo[3 * dim :] = 0  # a product with 0 could be -0
        self.qkvo = parameter(qkvo.to(config.torch_dtype).view(dim, 4 * dim), "attn", (dim, dim))
        gate = torch.zeros(config.num_heads, GATE_DIM, dtype=config.torch_dtype)
        self.gate = parameter(gate, "gates", tuple(gate.shape))

    def forward(self, x: Tensor, value_embeds: Tensor | None, context: Context) -> Tensor:
        """x, value_embeds [T, dim] -> [T, dim]."""
        tokens, dim = x.shape
        value_mix = context.value_mixes[self.number]
        cos, sin, scale = context.rotary
        qkv_weight, o_weight = self.qkvo.view(4 * dim, dim).split((3 * dim, dim))
        qkv = F.linear(x, qkv_weight).view(tokens, 3 * self.heads, -1)
        qk, v = qkv.split((2 * self.heads, self.heads), dim=1)
        q, k = rotate(norm(qk), cos[:tokens, None], sin[:tokens, None]).chunk(2, dim=1)
        v = value_mix[0] * v
        if value_embeds is not None:
            v = v + value_mix[1] * value_embeds.view_as(v)
        y = attend(q * scale, k, v, context.masks[self.layer.window])
        y = y * torch.sigmoid(F.linear(x[:, :GATE_DIM], self.gate))[..., None]
        return F.linear(y.reshape(tokens, dim), o_weight)


class MLP(nn.Module):
    """x [T, dim] -> relu(x @ fc) ** 2 @ proj.T; fc, proj [dim, hidden]. kernels: PLAIN_FORMS."""

    def __init__(self, config: Config, hidden: int):
        super().__init__()
        dim = config.model_dim
        dtype = config.torch_dtype
        self.fc = parameter(uniform(dim, hidden, dim).to(dtype), "mlp_fc")
        self.proj = parameter(torch.zeros(dim, hidden, dtype=dtype), "mlp_proj")
        self.kernels = False

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels:
            return ReluSquaredMLP.apply(x, self.fc, self.proj)
        h = x @ self.fc
        return F.linear(h.relu() * h, self.proj)  # relu squared; square() is slow on CPUs


class Head(nn.Module):
    """Map the normed residual stream to logits and the loss.

    weight [V, dim]: of `classes` tokens, then padding.
    """

    def __init__(self, config: Config, vocab: int, classes: int | None = None):
        super().__init__()
        self.classes = classes or vocab
        self.weight = parameter(
            torch.zeros(vocab, config.model_dim, dtype=config.torch_dtype), "head"
        )
        self.fp8 = config.fp8_head
        self.softcap = Softcap(config.logit_cap)
        self.kernels = False
        self.fp8_scales = FP8Scales(
            config.fp8_x_scale, config.fp8_weight_scale, config.fp8_grad_scale
        )

    def uncapped_logits(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """x [T, dim] -> logits before the soft cap [T, V]. weight [V, dim]: in place of its own."""
        in_fp8 = self.fp8 and self.training
        weight = self.weight if weight is None else weight
        return FP8Linear.apply(x, weight, self.fp8_scales) if in_fp8 else F.linear(x, weight)

    def logits(self, x: Tensor) -> Tensor:
        """x [T, dim] -> float32 [T, V]."""
        return self.softcap(self.uncapped_logits(x))

    @compiled
    def forward(self, x: Tensor, targets: Tensor, scheduled: Tensors) -> Pair:
        """Compute (objective, which training minimizes; cross entropy), in nats, summed.

        x [T, dim]; targets [T], -1 is not counted; scheduled: numbers of this step, see
        StageValues.
        """
        # an edit of this method turns the kernel off: see PLAIN_FORMS
        if self.kernels and self.training:
            scales = self.fp8_scales if self.fp8 else None
            one = x.new_ones(1, dtype=torch.float32)
            objective, entropies = HeadLoss.apply(
                x, self.weight, targets[None], one, self.softcap, scales
            )
            return objective, entropies[0]
        # From here on x are logits, before the soft cap [T, V]: use the residual stream above this
        # line
        x = self.uncapped_logits(x)
        objective = cross_entropy = F.cross_entropy(
            self.softcap(x), targets, ignore_index=-1, reduction="sum"
        )
        # Add a further loss term here, in plain PyTorch; autograd and torch.compile do the rest.
        # Sum it over tokens, as the cross entropy. A z-loss:
        #     objective = objective + 1e-4 * self.softcap(x).logsumexp(1).square().sum()
        # A term over classes must leave out the padding:
        #     F.cross_entropy(self.softcap(x[:, :self.classes]), targets, label_smoothing=0.1,
        #                     reduction="sum", ignore_index=-1)
        return objective, cross_entropy.detach()


class Softcap(NamedTuple):
    """Bound logits softly between 0 and cap, in float32."""

    cap: float
    shift: float = 0.0
    softness: float = 7.5

    def __call__(self, x: Tensor) -> Tensor:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.cap * torch.sigmoid((x + self.shift if self.shift else x) / self.softness)


class NgramTable(nn.Embedding):
    """An embedding of the n tokens that end at each position.

    Tokens of an earlier document are read as BOS. A hash assigns rows, and signs, so that n-grams
    in one row interfere with mean 0 (arXiv:0902.2206).
    """

    # of the hash; its products stay below 2 ** 63
    SIGNS = 8192
    BITS = 40
    FACTOR = 2_654_435

    def __init__(self, config: Config, ngrams: Ngrams):
        # takes no memory yet: may be many GB
        weight = torch.zeros(ngrams.rows, ngrams.width, dtype=config.torch_dtype)
        # sparse: a micro-batch reads few of the rows
        super().__init__(*weight.shape, sparse=True, _weight=weight)
        self.weight = parameter(weight, "ngram_embeds")
        self.n = ngrams.n
        # the same signs on every device, also under `with device:`
        bits = torch.randint(
            0,
            2,
            (self.SIGNS, ngrams.width),
            generator=torch.Generator().manual_seed(0),
            device="cpu",
        )
        self.register_buffer("signs", (2 * bits - 1).to(weight), persistent=False)

    def forward(self, rows: Tensor, signs: Tensor) -> Tensor:
        """Rows of the table and of its signs [T], see GPT.ngram_rows -> [T, width]."""
        return super().forward(rows) * self.signs.index_select(0, signs)

    @classmethod
    def hash(cls, number: Tensor) -> Tensor:
        number = number * cls.FACTOR % 2**cls.BITS
        return number ^ (number >> 21)


class DocCopy(nn.Module):
    """Add the token that followed the latest earlier occurrence of the context in the document.

    A context is the last n tokens, for the longest n of LENGTHS that has one; 1, 2 and more have
    weights of their own.
    """

    LENGTHS = 1, 2, 3, 4, 6, 8, 12, 16, 24, 32

    def __init__(self, dim: int):
        super().__init__()
        # with 0 runs depend less on the seed
        self.gains = parameter(torch.zeros(3 * len(self.LENGTHS)), "doc_copy")
        self.rows = parameter(torch.zeros(3 * len(self.LENGTHS), dim), "doc_copy")

    @compiled
    def forward(self, e: Tensor, tokens: Tensor, bos_id: int) -> Tensor:
        """Tokens [T], their embeddings [T, dim] -> [T, dim]."""
        places, kinds = self.find(tokens, tokens == bos_id)
        return self.weigh(e[places], kinds)

    @classmethod
    def find(cls, ids: Tensor, begins: Tensor) -> Pair:
        """ids [T] to compare, begins [T] of documents -> places to copy from, kinds (0: none)."""
        at = torch.arange(len(ids), device=ids.device)
        longest = cls.LENGTHS[-1]
        # each document has numbers of its own, so that contexts match only within one; 0 stands
        # before the first token
        hashes = {1: F.pad((begins.cumsum(0) << 32) + ids + 1, (longest, 0))}
        # the hash of n tokens is made of those of its two halves, which are in LENGTHS
        for n in cls.LENGTHS[1:]:
            shift = n // 2
            factor = 0x9E3779B97F4A7C15**shift % 2**63
            hashes[n] = hashes[n - shift].roll(shift) * factor + hashes[shift]
        keys, order = torch.stack([*hashes.values()])[:, longest:].sort(dim=1, stable=True)
        # equal contexts are neighbours, in order of position
        repeats = F.pad(keys[:, 1:] == keys[:, :-1], (1, 0))
        earlier = at - torch.where(repeats, 0, at).cummax(1).values
        # from 1 on; 0: no repeat
        kinds = 3 * torch.arange(len(keys), device=at.device)[:, None] + earlier.clamp_max(3)
        # a longer context has a larger kind: one number of kind and place, so that the maximum
        # chooses both
        candidates = torch.where(repeats, kinds << 32 | order.roll(1, 1) + 1, 0)
        best = torch.zeros_like(candidates).scatter(1, order, candidates).amax(0)
        return best & 0xFFFFFFFF, best >> 32

    def weigh(self, e: Tensor, kinds: Tensor) -> Tensor:
        # as products: the gradient of a selection would add up T rows one after another
        chosen = (kinds[:, None] == torch.arange(1, len(self.gains) + 1, device=e.device)).type_as(
            self.gains
        )
        return ((chosen @ self.gains)[:, None] * e + chosen @ self.rows).type_as(e)


class Rotary(nn.Module):
    """Rotary tables cos and sin [tokens, frequencies], and the softmax scale that fits them."""

    def __init__(self, frequencies: Tensor, tokens: int, dtype: torch.dtype, scale: float = 0.1):
        super().__init__()
        self.register_buffer("init_frequencies", frequencies, persistent=False)
        self.init_scale = scale
        self.register_buffer("scale", torch.tensor(scale), persistent=False)
        for name in "cos", "sin":
            table = torch.empty(tokens, len(frequencies), dtype=dtype)
            self.register_buffer(name, table, persistent=False)
        self.windows = None
        self.set_windows(())

    @torch.no_grad()
    def set_windows(self, windows: tuple[int, ...]) -> None:
        """Compute the tables for a sequence of long windows, in tokens; see stretch.

        Each call starts from the initial frequencies, so that the tables depend on `windows` alone.
        It writes in place, because compiled blocks keep these tensors.
        """
        if windows == self.windows:
            return
        self.windows = windows
        frequencies = self.init_frequencies
        scale = self.init_scale
        for window, longer in pairwise(windows):
            frequencies, scale = stretch(frequencies, scale, window, longer)
        angles = torch.outer(torch.arange(len(self.cos), device=self.cos.device), frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())
        self.scale.fill_(scale)


def rotary_frequencies(head_dim: int) -> Tensor:
    """Compute the initial frequencies in radians per token, [head_dim / 2].

    The first half falls geometrically from 1 to 1/1024. The second half is 0: those entries are not
    rotated.
    """
    rotated = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
    return torch.cat([rotated, torch.zeros(head_dim // 4)])


def stretch(frequencies: Tensor, scale: float, window: int, longer: int) -> tuple[Tensor, float]:
    """Adapt frequencies and softmax scale to a window of `longer` tokens: YaRN, arXiv:2309.00071.

    Frequencies with 32 or more rotations per old window are kept. Those with less than one are
    divided by the growth.
    """
    rotations = window * frequencies / (2 * math.pi)
    kept_share = ((rotations - 1) / (32 - 1)).clamp(0, 1)
    shrink = window / longer
    return frequencies * (shrink + kept_share * (1 - shrink)), scale * (
        0.2 * math.log(longer / window) + 1
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary position embeddings to x [..., D]. cos, sin [..., D / 2]."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def norm(x: Tensor) -> Tensor:
    """Apply RMS norm over the last dimension, without gain."""
    return F.rms_norm(x, (x.size(-1),))


def parameter(init: Tensor, kind: str, unit: tuple[int, int] | None = None) -> nn.Parameter:
    """Create a parameter of a kind of PARAM_GROUPS. unit, attribute first_step: see ParamSpec."""
    param = nn.Parameter(init)
    param.kind = kind
    param.unit = unit
    param.first_step = 0
    return param


def embedding(rows: int, width: int, kind: str, dtype: torch.dtype) -> nn.Embedding:
    """Create an embedding table of a kind, initialized from the standard normal distribution."""
    table = nn.Embedding(rows, width, dtype=dtype)
    table.weight = parameter(table.weight.data, kind)
    return table


def uniform(rows: int, columns: int, fan_in: int) -> Tensor:
    """Draw an initial matrix, uniform with standard deviation 0.5 / sqrt(fan_in)."""
    bound = math.sqrt(3) * 0.5 / math.sqrt(fan_in)
    return torch.empty(rows, columns).uniform_(-bound, bound)


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Copy from the CPU without waiting for the copy."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype to compute in: float32, or float64 for a float64 tensor."""
    return torch.promote_types(x.dtype, torch.float32)


def compile_parts(model: nn.Module) -> None:
    """Compile each method marked with @compiled by itself.

    Gradients leave backward group by group. If the whole model were compiled, all would appear at
    its end.
    """
    for module in model.modules():
        for name in dir(type(module)):
            if getattr(getattr(type(module), name), "compiles", False):
                setattr(module, name, compile_static(getattr(module, name)))


# --------------------------------------------------------------------------------------------------
# update rules

# A rule is a frozen dataclass that sees only this rank's shard of a bucket. Its members:
#     lr, every; or updates_in(step)
#         learning rate; steps between updates, which use summed gradients
#     unit(spec)
#         the smallest piece that is not divided among ranks: () for an element, (rows, columns) for
#         a matrix
#     init_state(shard)
#         tensors such as moments, with one entry per unit
#     hyper(plan, t)
#         numbers of the t-th update. If "noise" holds a seed, update gets normal random numbers of
#         param's shape in its place, the same on any number of ranks. Bucket.update adds "scale",
#         see ParamSpec
#     update(param, grad, state, hyper)
#         changes param and state in place

# (a, b, c) of the five steps of polar; from Polar Express (arXiv:2505.16932), computed for a safety
# factor of 1.02
POLAR_STEPS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def polar(
    u: Tensor, dtype: torch.dtype, steps: Sequence[tuple] = POLAR_STEPS, safety: float = 1.02
) -> Tensor:
    """Orthogonalize matrices [n, rows, columns]: set all singular values to about 1; in dtype."""
    x = u.to(dtype)
    tall = u.size(-2) > u.size(-1)
    # x @ x.mT below is then the smaller of the two products
    x = x.mT if tall else x
    x = x / (safety * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in steps:
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


@frozen
class Adam:
    """Adam (arXiv:1412.6980). Its unit is an element.

    The defaults are common ones; the record's are in Config.
    """

    lr: float = 3e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    # steps between updates; an update uses the sum of the gradients since the last one
    every: int = 1
    weight_decay: float = 0.0  # cautious: see update
    fp32_moments: bool = False
    rows: bool = False  # gradients of tables are sent by rows; the unit is a row
    lazy: bool = True  # with `rows`: rows without a gradient keep their values and moments

    def unit(self, spec: ParamSpec) -> tuple[int, ...]:
        require(
            not self.rows or spec.param.dim() == 2,
            f"{spec.name} has shape {tuple(spec.param.shape)}, but Adam "
            "with `rows` updates tables [rows, width]; use Adam without `rows`",
        )
        return tuple(spec.param.shape[1:]) if self.rows else ()

    def init_state(self, shard: Tensor) -> Tensors:
        """Create both moments of a shard [n] or [rows, width], in its dtype or in float32."""
        dtype = wide_dtype(shard) if self.fp32_moments else shard.dtype
        return {key: torch.zeros_like(shard, dtype=dtype) for key in ("m", "v")}

    def hyper(self, plan: Plan, t: int) -> Values:
        lr = self.lr * plan.lr_factor
        hyper = {
            "lr": lr,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "t": float(t),
        }
        if self.weight_decay:
            hyper["decay"] = lr * lr * self.weight_decay
        return hyper

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Tensors, hyper: Values) -> None:
        """Update param [n] and its state in place; compute in float32.

        As in the record, eps is added before the bias correction:
            p -= lr * sqrt(1 - beta2^t) / (1 - beta1^t) * m / (sqrt(v) + eps)
        Cautious weight decay follows: p -= decay * p, only where the update moved p towards zero.
        """
        lr, beta1, beta2, eps, t = (hyper[key] for key in ("lr", "beta1", "beta2", "eps", "t"))
        p, g, m, v = (x.to(wide_dtype(x)) for x in (param, grad, state["m"], state["v"]))
        correction = (1 - beta2**t) ** 0.5
        before = p.clone() if "decay" in hyper else p
        if torch.compiler.is_compiling():  # the compiler fuses these lines into one kernel
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            p = p - lr * correction / (1 - beta1**t) * m / (v.sqrt() + eps)
        else:
            # without the compiler the lines above are a dozen passes over memory: 20 times slower
            # than this one on 5 million elements
            torch._fused_adam_(
                [p],
                [g],
                [m],
                [v],
                [],
                [torch.full((), t, device=p.device)],
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=0.0,
                eps=eps / correction,
                amsgrad=False,
                maximize=False,
            )
        if "decay" in hyper:
            p = p - torch.where((before - p) * before > 0, hyper["decay"] * before, 0)
        for x, new in ((param, p), (state["m"], m), (state["v"], v)):
            x.copy_(new)  # a no-op where new is x


@frozen
class NorMuon:
    """NorMuon (arXiv:2510.05491) with cautious weight decay. Its unit is a matrix."""

    lr: float = Config.muon_lr
    weight_decay: float = Config.muon_weight_decay
    beta2: float = Config.muon_beta2
    polar_dtype: torch.dtype = torch.float32
    # finish_spec sets it from the parameter's shape: one second moment per column, else per row
    wide: bool = False
    every: int = 1

    def unit(self, spec: ParamSpec) -> tuple[int, ...]:
        """Return the spec's unit or the parameter as one matrix: [out, rest] for a convolution."""
        shape = tuple(spec.param.shape)
        unit = spec.unit
        if (
            len(shape) < 2
            or 0 in shape
            or unit
            and (len(unit) != 2 or min(unit) < 1 or spec.param.numel() % math.prod(unit))
        ):
            raise RunError(
                f"{spec.name} has shape {shape} and unit {unit}, but NorMuon updates whole"
                " matrices; use an elementwise rule such as Adam, or a unit (rows, columns) that"
                " divides the parameter"
            )
        return unit or (shape[0], math.prod(shape[1:]))

    def init_state(self, shard: Tensor) -> Tensors:
        """Create momentum of [n, rows, columns], and second moments per column or row, in float32.

        For a shard in bf16 also create `rest`, its remainder in float32: bf16 alone would round
        most updates away.
        """
        dtype = wide_dtype(shard)
        second = shard[:, :1] if self.wide else shard[:, :, :1]
        state = {
            "m": torch.zeros_like(shard, dtype=dtype),
            "v": torch.zeros_like(second, dtype=dtype),
        }
        if shard.dtype == torch.bfloat16:
            state["rest"] = torch.zeros_like(shard, dtype=dtype)
        return state

    def hyper(self, plan: Plan, t: int) -> Values:
        return {
            "lr": self.lr * plan.lr_factor,
            "decay": self.lr * self.weight_decay * plan.lr_factor,
            "momentum": plan.momentum,
            "beta2": self.beta2,
            "dtype": self.polar_dtype,
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Tensors, hyper: Values) -> None:
        """Update param [n, rows, columns] and its state in place.

        hyper: dtype of polar, scale [n, 1, 1] of rates.
        """
        m = state["m"]
        momentum = hyper["momentum"]
        grad = grad.to(m.dtype)
        m.copy_(momentum * m + (1 - momentum) * grad)
        nesterov = momentum * m + (1 - momentum) * grad
        NorMuon.move(param, polar(nesterov, hyper["dtype"]).to(m.dtype), state, hyper)

    @staticmethod
    def move(
        param: Tensor, update: Tensor, state: Tensors, hyper: Values, sign: Tensor | None = None
    ):
        """Subtract orthogonal matrices, whose rows (or columns) are first scaled by v.

        A matrix keeps its norm. Weights decay where `sign` (None: the update) has theirs.
        """
        v = state["v"]
        beta2 = hyper["beta2"]
        p = param + state["rest"] if "rest" in state else param
        norm = update.norm(dim=(-2, -1), keepdim=True)
        of_columns = v.shape == update[:, :1].shape
        mean_square = update.square().mean(-2 if of_columns else -1, keepdim=True)
        v.copy_(beta2 * v + (1 - beta2) * mean_square)
        update = update * v.clamp_min(1e-10).rsqrt()
        update = update * (norm / update.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
        decays = (update if sign is None else sign) * p >= 0
        update = update + torch.where(decays, hyper["decay"] * p, 0)
        p.sub_(hyper["lr"] * hyper["scale"] * update)
        if "rest" in state:
            param.copy_(p)
            state["rest"].copy_(p - rounded(p))


def rounded(x: Tensor) -> Tensor:
    """Round float32 values to bf16. Compiled code would drop two casts, to bf16 and back."""
    return (x.to(torch.bfloat16).view(torch.int16).int() << 16).view(torch.float32)


# --------------------------------------------------------------------------------------------------
# training


class TrainingLoop:
    """A run around a Worker: set-up, warm-up, all steps, validations, checkpoints, the log."""

    def __init__(
        self, config: Config, preset: str, comm: Comm, device: torch.device, log: Log, began: float
    ):
        """began: see Clock."""
        self.requested = config
        self.preset = preset
        self.comm = comm
        self.log = log
        self.clock = Clock(device, began)
        self.from_step = 0
        self.changed_by_validation = 0
        changes = []
        with self.clock.off("setup"):
            self.shards = find_data(config, comm)
            if device.type == "cuda":
                config, changes = resolve_auto(config, comm)
            require(
                device.type == "cuda" or config.attention in ("auto", "masked"),
                f"attention {config.attention} "
                "needs a GPU, and this machine has none; use --attention auto",
            )
            self.config = config
            self.losses = TrainLosses(config, comm, self.clock, log)
            self.val_sequences = validation_sequences(
                self.shards["val"], config.val_tokens, config.val_len, config.val_skip
            )
            if comm.rank == 0:
                check_apart(self.shards["train"], self.shards["val"], self.val_sequences)
            self.worker = config.worker_type(config, comm, device, self.shards["train"])
            self.worker.stream.check_enough()
            resumed = resume(self)
            start_log(self, resumed, changes)

    def run(self) -> None:
        self.warm_up()
        with nullcontext() if self.config.race else signals.caught():
            self.train()
            finish(self, *self.validate(self.config.num_steps))

    def warm_up(self) -> None:
        with self.clock.off("hashing"):
            before = state_hash(self.worker)
        self.log.say(f"warm-up: {self.config.warmup_steps} steps off the clock")
        with self.clock.off("warmup"):
            self.worker.warm_up(
                plan_of(self.config, self.from_step), self.val_sequences[0], self.losses.record
            )
        # a request to save that came in the warm-up is sent again
        self.losses.pending = []
        self.losses.sent = 0
        self.compiles = compile_stats()[0]
        with self.clock.off("hashing"):
            self.state_hashes = {"before_warmup": before, "after_warmup": state_hash(self.worker)}

    def train(self) -> None:
        """Run all steps.

        A checkpoint or a validation with a step's number comes before that step.
        """
        c = self.config
        worker = self.worker
        save_due = False
        profiler = profiler_of(self) if c.profile else None
        if profiler:
            profiler.start()
        # wait for the slowest rank, or its hash would delay this rank's first step
        with self.clock.off("hashing"):
            self.comm.all_reduce(torch.zeros((), device=self.comm.device))
        self.clock.start()
        worker.before_training()
        for step in range(self.from_step, c.num_steps):
            self.losses.write(step)
            if (
                step in self.losses.save_at
                or c.save_every
                and step % c.save_every == 0
                and step > self.from_step
            ):
                save_due = True
            if save_due and worker.can_save(step):
                save_checkpoint(self, step)
                save_due = False
            if c.val_every and not step % c.val_every:
                self.validate(step)
            plan = plan_of(c, step)
            losses = worker.step(plan, worker.stream.next_batch(plan))
            self.losses.record(plan, losses, worker.optimizer.grad_norm)
            if profiler:
                # torch 2.13 crashes at exit on a profiler that ends later
                if step == int(c.profile.split(":")[1]):
                    worker.optimizer.finish_all_gathers()
                profiler.step()
        worker.optimizer.finish_all_gathers()
        # a run resumed at num_steps has already run after_training
        if self.from_step < c.num_steps:
            worker.after_training()
        self.clock.stop()
        self.losses.write(c.num_steps, wait=True)
        if profiler:
            profiler.stop()

    def validate(self, step: int) -> tuple[float, int]:
        """Validate off the clock -> (loss, tokens). RunError if the loss is not finite.

        SIGTERM stops a validation where a checkpoint can be saved: a launcher may not wait for its
        end.
        """
        self.worker.optimizer.finish_all_gathers()  # they belong to the steps before
        can_save = step == self.config.num_steps or self.worker.can_save(step)
        with self.clock.off("validation"):
            self.losses.write(step, wait=True)
            before = checksum(*self.worker.model.parameters())
            result = self.worker.validate(
                plan_of(self.config, step), self.val_sequences, lambda: can_save and signals.stop
            )
            if result:
                times = show_times(self.clock.elapsed, step)
                line = f"step:{step}/{self.config.num_steps} val_loss:{result[0]:.4f} {times}"
                self.log.write(line)
                if step < self.config.num_steps:  # the result states the last one
                    self.log.say(line)
            self.changed_by_validation += checksum(*self.worker.model.parameters()) != before
        if not result:
            save_checkpoint(self, step, stop=True)
        require(
            math.isfinite(result[0]),
            f"the validation loss before step {step} is {result[0]}; lower the learning rates",
        )
        return result


class Worker:
    """What one rank trains: model, optimizer, stream, and the step. For a run: TrainingLoop."""

    def __init__(self, config: Config, comm: Comm, device: torch.device, train_shards: list[Shard]):
        gpu = device.type == "cuda"
        self.config = config
        self.comm = comm
        self.device = device
        self.compiled = config.compile == "on" or (config.compile == "auto" and gpu)
        if config.world_size_invariant:
            # the split of a product over threads decides the order of its sums
            torch.set_num_threads(1)
        self.stream = Stream(train_shards, config, comm.rank, comm.ranks)
        self.model = build_model(config, train_shards[0].encoding).to(device)
        if config.init_from and not config.resume:
            load_parameters(self.model, load_file(ROOT / config.init_from))
        if config.attention == "masked" or self.compiled:  # compiled code needs masks of one shape
            self.model.reach = longest_window(config)
        self.model.flash = config.attention == "flash"
        self.model.lm_head.kernels = gpu and config.kernels in ("on", "loss")
        for module in self.model.modules():
            if isinstance(module, MLP):
                module.kernels = config.kernels == "on"
        if self.compiled:
            compile_parts(self.model)
        self.optimizer = build_optimizer(config, self.model, comm, self.compiled)
        self.model.apply_schedule(plan_of(config, 0))

    def step(self, plan: Plan, batch: list[np.ndarray]) -> list[Tensor]:
        """Train on this rank's micro-batches -> the summed cross entropy of each, on the device."""
        model = self.model
        optimizer = self.optimizer
        cross_entropies = []
        model.apply_schedule(plan)
        self.before_step(plan)
        if plan.resets_ngrams:
            optimizer.finish_all_gathers()
            for bucket in optimizer.buckets:
                if isinstance(bucket, RowBucket):  # its count of updates goes on
                    for x in (bucket.param_data, *bucket.state.values()):
                        x.zero_()
        if model.ngrams:
            row_indices = model.rows_read(
                torch.from_numpy(np.stack(batch)[:, :-1].astype(np.int32))
            )
            optimizer.announce_rows(plan.step, row_indices)
        for i, micro_batch in enumerate(batch):
            inputs, targets = split_sequence(micro_batch, self.device)
            count_documents(model, micro_batch[:-1])
            # so that random numbers of a forward, such as a dropout's, do not depend on warm-up,
            # resumes and ranks
            seed = np.random.SeedSequence(
                (self.config.seed, plan.step, self.comm.rank * len(batch) + i)
            )
            torch.manual_seed(int(seed.generate_state(1, np.uint64)[0]))
            with optimizer.reducer.span("forward"):
                objective, cross_entropy = model(inputs, targets, plan.windows)
            optimizer.prepare_for_backward(plan.step, i, len(batch))
            with optimizer.reducer.span("backward"):
                objective.backward()
                cross_entropies.append(cross_entropy)
        self.before_update(plan)
        with optimizer.reducer.span("step"):
            optimizer.step(plan)
        self.after_step(plan)
        return cross_entropies

    # Places for an idea. What they compute counts as training, and must be the same on all ranks

    def before_training(self) -> None:
        """Runs once, on the clock, before the first step, also of a resumed run."""

    def before_step(self, plan: Plan) -> None:
        """Runs before each step's first forward, and in the warm-up."""
        # DocCopy reads the head's weights before the head's own forward would wait for them
        if self.config.doc_copy:
            self.optimizer.wait_for(self.model.lm_head.weight)

    def before_update(self, plan: Plan) -> None:
        """Runs after each step's last backward, before the optimizer step, and in the warm-up."""

    def after_step(self, plan: Plan) -> None:
        """Runs after each optimizer step, and in the warm-up.

        Before you read or change parameters, wait for them: self.optimizer.finish_all_gathers().
        Parameters, the rules' state (see NorMuon.init_state) and tensors in self.optimizer.further
        are restored after the warm-up and kept by checkpoints; other state that you create here is
        neither.
        """

    def can_save(self, step: int) -> bool:
        """Return whether the state before a step can be saved; saves wait until it can."""
        return not self.optimizer.between_updates

    def after_training(self) -> None:
        """Runs once, after the last step, before the last validation. All parameters are there."""

    def validate(
        self, plan: Plan, sequences: np.ndarray, stop: Callable[[], bool] = lambda: False
    ) -> tuple[float, int] | None:
        self.optimizer.finish_all_gathers()
        self.model.apply_schedule(plan)
        return validate(self.model, sequences, plan.windows, self.comm, self.device, stop)

    def warm_up(
        self,
        next_plan: Plan,
        val_sequence: np.ndarray,
        record: Callable[[Plan, list[Tensor]], None],
    ) -> None:
        """Run every kind of step off the clock, to compile and allocate. Restore the state.

        next_plan: of the step after it. record: called after each step, as in training.
        """
        c = self.config
        saved = self.optimizer.state_dict()
        position = self.stream.position
        digest = self.stream.digest
        begins = [
            *dict.fromkeys(step // c.adam_every * c.adam_every for step in self.kinds_of_steps())
        ]
        batches = {}
        for i in range(c.warmup_steps):
            step = begins[i // c.adam_every % len(begins)] + i % c.adam_every
            plan = plan_of(c, step)
            if i % c.adam_every == 0:
                # a slower rule's of another part of the run
                self.optimizer.reducer.drop_gradients()
            # by step, since the steps of an Adam cycle may belong to different stages
            if step not in batches:
                self.stream.position = position
                batches[step] = self.stream.next_batch(plan)
            record(plan, self.step(plan, batches[step]))
        if c.warmup_steps:
            self.validate(plan_of(c, c.num_steps), val_sequence[None].repeat(self.comm.ranks, 0))
        self.optimizer.load_state_dict(saved)
        self.model.apply_schedule(next_plan)
        self.stream.position = position
        self.stream.digest = digest
        gc.collect()  # compilation leaves cycles that hold GPU memory
        gc.freeze()  # later collections, on the clock, skip what exists now

    def kinds_of_steps(self) -> list[int]:
        """Return a step of each stage and, where a ramp has left a 0, its second."""
        stages = stages_of(self.config)
        seconds = [
            stage.begin + 1
            for stage in stages
            if stage.first != stage.last and stage.begin + 1 < stage.end
        ]
        return [stage.begin for stage in stages] + seconds


@torch.no_grad()
def validate(
    model: GPT,
    sequences: np.ndarray,
    windows: Windows,
    comm: Comm,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[float, int] | None:
    """Compute (mean loss in nats per token, tokens scored) over sequences int32 [n, length + 1].

    The ranks share the sequences. Each sequence's loss has a slot of its own, so that the mean does
    not depend on the number of ranks. Before every fourth sequence the ranks ask whether to `stop`
    early; all of them then return None.
    """
    model.eval()
    losses = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    for turn, begin in enumerate(range(0, len(sequences), comm.ranks)):
        if turn % 4 == 0 and comm.all_reduce(losses.new_full((), stop())):
            model.train()
            return None
        if (i := begin + comm.rank) < len(sequences):
            inputs, targets = split_sequence(sequences[i], device)
            count_documents(model, sequences[i, :-1])
            _, losses[i] = model(inputs.clamp_min(0), targets, windows)
    model.train()
    tokens = int((sequences[:, 1:] >= 0).sum())
    return comm.all_reduce(losses).sum().item() / tokens, tokens


class PendingLosses(NamedTuple):
    """The losses of one step, on their way to the host."""

    plan: Plan
    train_time: float
    grad_norm: float | None
    summed: Tensor  # of each micro-batch, then the requests to save
    copied: Any  # the CUDA event after the copy to the host; None on CPUs
    on_device: Tensor  # kept until then, or its memory would be used again before it is read

    def arrived(self) -> bool:
        return self.copied is None or self.copied.query()


class TrainLosses:
    """Sum training losses over ranks, and read them up to LAG steps later.

    So the host does not wait for a GPU. The same message carries each rank's requests to save. LAG
    steps later all ranks know them, and save before the same step.
    """

    LAG = 4

    def __init__(self, config: Config, comm: Comm, clock: Clock, log: Log):
        self.config = config
        self.comm = comm
        self.clock = clock
        self.log = log
        self.sent = 0
        self.save_at = {}  # all ranks save before these steps; True: and stop
        self.pending = []
        self.stream = torch.cuda.Stream() if clock.device.type == "cuda" else None

    def record(self, plan: Plan, losses: list[Tensor], grad_norm: float | None = None) -> None:
        """Start the sum over ranks of each micro-batch's loss and of new requests to save."""
        local = torch.stack(losses).detach()
        summed = local.new_zeros(plan.micro_batches + 1)
        summed[:-1].view(self.comm.ranks, -1)[self.comm.rank] = local
        received = signals.received
        if received > self.sent:  # rarely: copying a number to a GPU makes the host wait
            summed[-1] = received - self.sent
            self.sent = received
        handle = self.comm.start_all_reduce(summed)
        on_device = summed
        event = None
        # It ends after the step's all-gathers, so the main stream does not wait for it, but a
        # stream of its own. That waits for the losses too: one rank has no all-reduce, which would
        if local.is_cuda:
            self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            handle.wait()
            if local.is_cuda:
                summed = torch.empty(on_device.shape, dtype=on_device.dtype, pin_memory=True)
                summed.copy_(on_device, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
        train_time = self.clock.read()
        self.pending.append(PendingLosses(plan, train_time, grad_norm, summed, event, on_device))

    def write(self, step: int, wait: bool = False) -> None:
        """Log the losses that have arrived before a step. RunError on a loss that is not finite."""
        while self.pending and (
            wait or self.pending[0].plan.step < step - self.LAG or self.pending[0].arrived()
        ):
            plan, train_time, grad_norm, summed, event, _ = self.pending.pop(0)
            done = plan.step + 1
            if event is not None:
                event.synchronize()
            require(
                summed.isfinite().all(),
                f"the training loss of step {done} is not finite; lower the learning rate",
            )
            if summed[-1]:
                self.save_at[done + self.LAG] = summed[-1].item() >= Signals.STOP
            loss = None
            line = f"step:{done}/{self.config.num_steps} {show_times(train_time, done)}"
            every = self.config.train_loss_every
            if every and not done % every:  # in nats per token
                loss = summed[:-1].sum(dtype=torch.float64).item() / (
                    plan.micro_batches * plan.micro_batch_tokens
                )
                line += f" train_loss:{loss:.4f}"
                if grad_norm is not None:
                    line += f" grad_norm:{grad_norm:.4g}"
                for name in self.config.logged_stage_values:
                    if plan.values[name]:
                        line += f" {name}:{plan.values[name]}"
            self.log.write(line, off_clock=wait)
            self.log.progress(done, loss, self.clock, tokens_of_steps(self.config, done))


def split_sequence(sequence: np.ndarray, device: torch.device) -> Pair:
    """Move [T + 1] tokens to the device, without waiting -> inputs int32 [T], targets int64 [T]."""
    tokens = to_device(torch.from_numpy(sequence.astype(np.int32)), device)
    return tokens[:-1], tokens[1:].long()


def count_documents(model: GPT, tokens: np.ndarray) -> None:
    """Find, on the host, the documents of the sequence that forward takes next.

    FlashAttention needs their bounds there. Without them, or with more documents than a
    DocumentTable has room for, attention uses mask_in_pieces.
    """
    if model.flash:
        # padding is -1, read as 0
        begins = model.begins(torch.from_numpy(tokens.clip(0))).numpy().nonzero()[0]
        count = len(begins) + 1
        room = len(tokens) // DOCUMENT_ROOM
        model.counted = None
        if count <= room:
            starts = np.pad(
                begins.astype(np.int32), (1, room - count + 1), constant_values=(0, len(tokens))
            )
            longest = int(np.diff(starts).max())
            starts = to_device(torch.from_numpy(starts), model.embed.weight.device)
            model.counted = starts, longest, count


# --------------------------------------------------------------------------------------------------
# gradient sync

# Who calls whom: in backward a hook calls Reducer.register_grad_ready, which calls Bucket.add_grad
# and, for a complete bucket, Reducer.launch and with it Bucket.start_reduce_scatter. Then
# DistributedOptimizer.step does for each bucket: Reducer.wait, Bucket.update by the rule,
# Bucket.start_all_gather; at the end finish_all_gathers, or the next forward does it. Bucket is
# memory, Comm sends, Reducer decides when. RowBucket is for tables; skip it at first.


class DistributedOptimizer:
    """Update this rank's shard of each bucket, and all-gather the new parameters.

    before each backward:   prepare_for_backward(step, micro_batch, micro_batches)
    after the last one:     step(plan), by the gradients' mean over micro-batches and ranks
    """

    reducer_class = None  # None: Reducer

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Comm,
        settings: SyncSettings,
        model: nn.Module,
        grad_scale: float = 1.0,
        compile_updates: bool = False,
    ):
        """model: must hold the buckets' parameters. grad_scale: see Reducer."""
        self.buckets = list(buckets)
        self.comm = comm
        self.settings = settings
        self.buffers = persistent_buffers(model)
        # more of the saved state, by name; all ranks must compute it alike
        self.further = {}
        self.replicate(model)
        self.reducer = (self.reducer_class or Reducer)(buckets, comm, settings, grad_scale)
        self.prepare_for_backward = self.reducer.prepare_for_backward
        self.announce_rows = self.reducer.announce_rows
        # of the last step, before clipping; check_grads and clip_norm compute it
        self.grad_norm = None
        updates = {type(bucket.rule).update for bucket in buckets if compile_updates}
        self.compiled_updates = {update: compile_static(update) for update in updates}
        # Compiled code gets numbers as tensors. Each name has a tensor of its own, because equal
        # inputs would become one
        self.number_tensor = lru_cache(256)(lambda name, x: torch.full((), x, device=comm.device))
        # the model's hook waits for these, before any layer's hook
        self.buckets_of_model = []
        if settings.overlap_param_gather:
            for module, params in outer_modules(model):
                read_buckets = self.buckets_of(params)
                self.wait_before(module, read_buckets)
                if module is model:
                    self.buckets_of_model = read_buckets

    @torch.no_grad()
    def step(self, plan: Plan = Plan()) -> None:
        """Wait for each bucket's reduce-scatter, update this rank's shard, start its all-gather."""
        reducer = self.reducer
        # finish those that no forward waited for, or other ranks could not send their next messages
        self.finish_all_gathers()
        reducer.launch_rest()
        if self.settings.check_grads or self.settings.clip_norm:
            for bucket in reducer.due:
                reducer.wait(bucket)
            self.grad_norm = check_and_clip(
                reducer.due, self.comm, self.settings.clip_norm, reducer.step
            )
        buckets = reducer.due
        # `due` has the order of backward; the model itself reads before its layers
        if self.settings.update_order == "forward":
            buckets = sorted(buckets[::-1], key=lambda bucket: bucket not in self.buckets_of_model)
        for bucket in buckets:
            reducer.wait(bucket)
            if bucket.updates_in(reducer.step):
                with reducer.span(f"update {bucket.name}"):
                    bucket.needs_overwrite.update(bucket.slots)
                    bucket.updates += 1
                    self.update(bucket, plan)
                with reducer.span(f"gather {bucket.name}"):
                    bucket.start_all_gather(self.comm)
        reducer.end_step()
        reducer.step += 1
        reducer.dropped = False
        if not self.settings.overlap_param_gather:  # otherwise the next forward waits
            self.finish_all_gathers(buckets)
        self.sync_buffers()

    def update(self, bucket: Bucket, plan: Plan) -> None:
        """Update this rank's shard by the bucket's rule."""
        hyper = bucket.hyper(plan)
        update = type(bucket.rule).update
        if bucket.may_compile and update in self.compiled_updates:
            update = self.compiled_updates[update]
            hyper = {
                key: self.number_tensor(key, x) if isinstance(x, float) else x
                for key, x in hyper.items()
            }
        invariant = self.settings.world_size_invariant
        random = torch.cuda if bucket.param_data.is_cuda else torch
        random_state = random.get_rng_state() if invariant else None
        bucket.update(update, hyper)
        require(
            not invariant or torch.equal(random_state, random.get_rng_state()),
            f"{type(bucket.rule).__name__}.update draws random numbers, which depend on the number"
            ' of ranks; let hyper return a seed as "noise" and use the numbers that update gets'
            " there, or omit world_size_invariant",
        )

    def finish_all_gathers(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Wait until the parameters of these buckets (None: all) have their new values."""
        for bucket in self.buckets if buckets is None else buckets:
            if bucket.gather_handle is not None:
                with self.reducer.span(f"wait gather {bucket.name}"):
                    bucket.gather_handle.wait()
                bucket.gather_handle = None

    def wait_for(self, *params: nn.Parameter) -> None:
        """Wait for these parameters' new values, before code outside their module reads them."""
        self.finish_all_gathers(self.buckets_of(params))

    def buckets_of(self, params: Iterable[nn.Parameter]) -> list[Bucket]:
        slots = self.reducer.slots
        return list(dict.fromkeys(slots[param][0] for param in params if param in slots))

    def sync_buffers(self) -> None:
        """Send rank 0's buffers to all ranks, as DDP does."""
        for x in self.buffers().values():
            self.comm.broadcast(x)

    def replicate(self, model: nn.Module) -> None:
        """Give every rank the parameters and the buffers of rank 0."""
        for x in (*(bucket.param_data for bucket in self.buckets), *model.buffers()):
            self.comm.broadcast(x.data)

    def wait_before(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Have the module's forward wait for the all-gathers of these buckets."""
        module.register_forward_pre_hook(lambda *_: self.finish_all_gathers(buckets))

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor of the saved state, whole on every rank. Call it on all ranks."""
        self.finish_all_gathers()
        for bucket in self.buckets:
            yield from gather_state(bucket, self.comm).items()
        yield from ((name, x.reshape(-1)) for name, x in (self.further | self.buffers()).items())

    def state_dict(self) -> Tensors:
        """Copy named_state to the CPU; call it on all ranks. RunError between a rule's updates."""
        require(
            not self.between_updates,
            f"state_dict() was called before step {self.reducer.step}, between two updates of a"
            " rule with `every` above 1: no state holds waiting gradients; call it after an"
            " update",
        )
        return {name: x.detach().to("cpu", copy=True) for name, x in self.named_state()}

    def load_state_dict(self, state: Tensors) -> None:
        """Load a state_dict, the same on all ranks, and drop unused gradients.

        Change nothing if it does not fit.
        """
        unused = dict(state)
        bucket_states = [take_state(bucket, unused) for bucket in self.buckets]
        buffers = self.further | self.buffers()
        # states of older versions have no buffers
        loaded = [x for x in buffers if x in unused and unused[x].numel() == buffers[x].numel()]
        names = ", ".join(sorted(unused.keys() - loaded))
        require(
            not names,
            f"the saved state does not fit: this model has no {names} of that size; load one of the"
            " same model. If a forward resizes or registers buffers, run one before",
        )
        self.finish_all_gathers()
        self.reducer.drop_gradients()
        for bucket, saved in zip(self.buckets, bucket_states):
            write_state(bucket, saved, self.comm)
        for name in loaded:
            buffers[name].copy_(unused[name].view_as(buffers[name]))

    @property
    def between_updates(self) -> bool:
        """Whether gradients wait for an update and no saved state has them; same on all ranks."""
        # world-size-invariant mode's state has them, as NAME/pending
        if self.settings.world_size_invariant or self.reducer.dropped:
            return False
        previous = self.reducer.step - 1
        return any(
            previous >= bucket.first_step and not bucket.updates_in(previous)
            for bucket in self.buckets
        )


def check_and_clip(buckets: Sequence[Bucket], comm: Comm, clip_norm: float, step: int) -> float:
    """Clip all gradients by their norm, and return it. RunError, on all ranks, if not finite."""
    squares = []  # float32 norms of short chunks, squared and summed in float64: fast and accurate
    for bucket in buckets:
        shard = bucket.grad_shard
        chunks = shard.view(-1, math.gcd(shard.numel(), Bucket.SHARD_ALIGNMENT))
        norms = torch.linalg.vector_norm(chunks, dim=1, dtype=wide_dtype(shard))
        squares.append(norms.double().square().sum())
    total = comm.all_reduce(torch.stack(squares).sum()).item() if squares else 0.0
    if not math.isfinite(total):
        bad = comm.all_gather_json([name for bucket in buckets for name in bucket.nonfinite()])
        names = ", ".join(sorted({*chain(*bad)})) or "only their norm overflows"
        raise RunError(
            f"gradients of step {step} are not finite: {names}; the step was not applied. Lower the"
            " learning rates, or check the data of this step"
        )
    total_norm = math.sqrt(total)
    if clip_norm and total_norm > clip_norm:
        for bucket in buckets:
            bucket.grad_shard.mul_(clip_norm / total_norm)
    return total_norm


def outer_modules(model: nn.Module) -> Iterator[tuple[nn.Module, Iterator[nn.Parameter]]]:
    """Yield modules whose forward hooks run outside of compiled code, with the parameters read.

    These are the model and its children that have a forward; a ModuleList's children one by one.
    The model reads its direct parameters, and all that none of these children lists.
    """
    children = []
    for child in model.children():
        children.extend(child if isinstance(child, nn.ModuleList) else [child])
    layers = [child for child in children if type(child).forward is not nn.Module.forward]
    layer_params = {param for layer in layers for param in layer.parameters()}
    others = (param for param in model.parameters() if param not in layer_params)
    yield model, chain(model.parameters(recurse=False), others)
    for layer in layers:
        yield layer, layer.parameters()


def persistent_buffers(
    model: nn.Module, holds: Callable = torch.is_tensor
) -> Callable[[], Tensors]:
    """Return a function that finds the model's persistent buffers of which `holds` is true."""
    # a module may replace its buffer
    places = [
        (f"{name}.{key}".removeprefix("."), module._buffers, key)
        for name, module in model.named_modules()
        for key in module._buffers
        if key not in module._non_persistent_buffers_set
    ]
    return lambda: {
        name: memory_of(x) for name, buffers, key in places if holds(x := buffers.get(key))
    }


def memory_of(x: Tensor) -> Tensor:
    """View each element of an expanded tensor once."""
    return x[tuple(slice(None if stride else 1) for stride in x.stride())]


class Reducer:
    """Add gradients into slots by hooks, and launch a bucket's reduce-scatter when it is complete.

    All ranks launch buckets in one order: the order in which rank 0's backward completed them. Each
    set of buckets that take part has its own order, learned in its first step: a tied head is
    complete last, an untied one first. A bucket that is complete early waits for its turn.

    state                                     set by                           cleared by
    slot in needs_overwrite: no gradient yet  the bucket's update              register_grad_ready
    slot in missing: gradient expected        prepare_for_backward             register_grad_ready
    bucket in due: to be launched             prepare_for_backward             end_step
    bucket.reduce_handle: do not write        launch                           wait
    bucket.gather_handle: do not read         DistributedOptimizer.step        finish_all_gathers
    """

    CURE = "use each in the loss"  # of check_complete's error
    # a place for an idea that skips layers: count a missing gradient as zeros
    allow_missing = False
    launches = 0  # how many of `due` are launched
    step = 0  # the current step or, between steps, the next one
    micro_batch = 0
    micro_batches = 0
    factor = 1.0
    dropped = True  # no step has ended since all gradients were dropped

    def __init__(
        self, buckets: Sequence[Bucket], comm: Comm, settings: SyncSettings, grad_scale: float
    ):
        """grad_scale: factor on every gradient, on top of the mean over micro-batches and ranks."""
        self.buckets = list(buckets)
        self.comm = comm
        self.settings = settings
        self.grad_scale = grad_scale
        # learned, by the number of buckets that take part
        self.launch_orders = {}
        self.launch_order = []  # of this step's buckets; empty until it is learned
        # while the order is learned: buckets by their last gradient
        self.completed = []
        # buckets that the prepared backward completes, in launch order
        self.due = []
        # profiling sets it to name ranges
        self.span = lambda name: nullcontext()
        for bucket in buckets:
            bucket.invariant = settings.world_size_invariant
            bucket.receive_buffer = comm.receive_buffer(bucket.grad_data, bucket.invariant)
        self.slots = {slot.param: (bucket, slot) for bucket in buckets for slot in bucket.slots}
        for param in self.slots:
            self.set_hook(param)

    def set_hook(self, param: nn.Parameter) -> Any:
        weak_self = weakref.ref(self)  # a tensor's hook keeps what it refers to, also in a cycle

        def hook(param: nn.Parameter) -> None:
            reducer = weak_self()
            if reducer:
                reducer.register_grad_ready(*reducer.slots[param])

        return param.register_post_accumulate_grad_hook(hook)

    def announce_rows(self, step: int, indices: dict[nn.Parameter, Tensor]) -> None:
        """Announce, before a step's first forward, which rows of tables this rank will read in it.

        indices: int tensors of any shape on the CPU. If all ranks omit the call, they wait for one
        another at launch.
        """
        for bucket in self.buckets:
            if isinstance(bucket, RowBucket):
                row_indices = [
                    indices[slot.param].flatten().long() + bucket.first_row(slot)
                    for slot in bucket.slots
                ]
                bucket.announce(self.comm, row_indices, self.reduces_in(bucket, step))

    def reduces_in(self, bucket: Bucket, step: int) -> bool:
        if self.settings.world_size_invariant:  # sums over ranks first, then over steps
            return step >= bucket.first_step
        return bucket.updates_in(step)

    def prepare_for_backward(self, step: int, micro_batch: int = 0, micro_batches: int = 1) -> None:
        """Prepare for a micro-batch's backward; that of a step's last one launches buckets."""
        expected = (self.step, self.micro_batch) if self.micro_batches else (step, 0)
        if (step, micro_batch) != expected or micro_batch and micro_batches != self.micro_batches:
            raise RunError(
                f"micro-batch {micro_batch} of {micro_batches} of step {step} was prepared, but"
                f" micro-batch {expected[1]} of step {expected[0]} is next; prepare each once, and"
                " then call step()"
            )
        self.step = step
        self.micro_batch = micro_batch + 1
        self.micro_batches = micro_batches
        self.factor = self.grad_scale / (micro_batches * self.comm.ranks)
        bucket_count = sum(step >= bucket.first_step for bucket in self.buckets)
        self.launch_order = self.launch_orders.get(bucket_count, [])
        self.completed = []
        self.launches = 0
        self.due = []
        if self.micro_batch == micro_batches:
            buckets = self.launch_order or self.buckets
            self.due = [bucket for bucket in buckets if self.reduces_in(bucket, step)]
        for bucket in self.buckets:
            bucket.missing.update(bucket.slots)

    def register_grad_ready(self, bucket: Bucket, slot: Slot) -> None:
        """Add a parameter's new gradient into its slot, and launch complete buckets in order."""
        if self.step < bucket.first_step:
            raise RunError(
                f"{slot.name} got a gradient in step {self.step}, before step {bucket.first_step},"
                " its first; do not use the parameter before it"
            )
        bucket.add_grad(slot, self.factor)
        if not self.launch_order:
            if not bucket.missing:
                self.completed.append(bucket)
        elif self.settings.sync == "hook":
            while self.launches < len(self.due) and not self.due[self.launches].missing:
                self.launch(self.due[self.launches])

    def launch(self, bucket: Bucket) -> None:
        """Start the bucket's reduce-scatter."""
        with self.span(f"launch {bucket.name}"):
            bucket.start_reduce_scatter(self.comm)
            self.launches += 1

    def launch_rest(self) -> None:
        """Launch the buckets that backward did not. RunError if a gradient is missing."""
        for bucket in self.due:
            self.check_complete(bucket)
        if not self.launch_order:
            self.set_launch_order()
        for bucket in self.due[self.launches :]:
            self.launch(bucket)

    def check_complete(self, bucket: Bucket) -> None:
        """Raise RunError if a parameter of the bucket got no gradient in this step."""
        if bucket.missing and not self.allow_missing:
            missing = [slot.name for slot in bucket.slots if slot in bucket.missing]
            raise RunError(
                f"bucket {bucket.name} was not launched: {len(bucket.slots) - len(missing)} of "
                f"{len(bucket.slots)} of its parameters got a gradient, not {', '.join(missing)}; "
                f"{self.CURE}"
            )

    def set_launch_order(self) -> None:
        """Broadcast rank 0's order: the buckets that its backward completed, then the others."""
        others = [b for b in self.buckets if self.step >= b.first_step and b not in self.completed]
        order = [self.buckets.index(b) for b in self.completed + others]
        self.launch_order = [self.buckets[i] for i in self.comm.all_gather_json(order)[0]]
        self.launch_orders[len(order)] = self.launch_order
        self.due.sort(key=self.launch_order.index)

    def wait(self, bucket: Bucket) -> None:
        """Wait for the bucket's reduce-scatter."""
        if bucket.reduce_handle is not None:
            with self.span(f"wait {bucket.name}"):
                bucket.reduce_handle.wait()
                bucket.reduce_handle = None
                bucket.carry_over(bucket.updates_in(self.step))

    def end_step(self) -> None:
        self.due = []
        self.micro_batch = 0
        self.micro_batches = 0

    def drop_gradients(self) -> None:
        """Drop all gradients that no update has used, including those in flight."""
        for bucket in self.due:
            self.wait(bucket)
        self.end_step()
        self.dropped = True
        for bucket in self.buckets:
            bucket.drop_gradients()


def fill_buckets(
    specs: Sequence[ParamSpec],
    bucket_bytes: float,
    rank: int,
    ranks: int,
    grad_reduce_in_fp32: bool = False,
) -> list[Bucket]:
    """Group parameters with equal rule, dtype, unit and first step, starting at the last layer."""
    open_groups = {}
    groups = []
    for spec in reversed(specs):
        key = (spec.rule, spec.param.dtype, spec.rule.unit(spec), spec.first_step)
        group = open_groups.setdefault(key, [])
        if not group:
            groups.append(group)
        group.append(spec)
        if sum(s.param.nbytes for s in group) >= bucket_bytes:
            del open_groups[key]
    grad_dtype = torch.float32 if grad_reduce_in_fp32 else None
    buckets = []
    for i, group in enumerate(groups):
        rule = group[0].rule
        bucket_type = RowBucket if getattr(rule, "rows", False) else Bucket
        name = f"{i}-{type(rule).__name__.lower()}"
        buckets.append(bucket_type(name, group, rank, ranks, grad_dtype))
    return buckets


@dataclass(eq=False)
class Slot:
    """One parameter's part of a bucket."""

    name: str
    param: nn.Parameter
    offset: int  # of the first element in the bucket
    grad: Tensor  # view of the bucket's gradient buffer, in the parameter's shape
    # gradients to be summed at launch, not yet in `grad`
    pending_grads: list[Tensor] = field(default_factory=list)


class Bucket:
    """Parameters with one rule and dtype in a contiguous buffer, and their gradients in another.

    Both buffers hold one shard of whole units for each rank, all shards of equal size. The
    constructor copies the parameters into the buffer and makes each a view of it, so that an
    all-gather writes where the model reads.
    """

    SHARD_ALIGNMENT = 64  # elements: aligns parameters and shards for vector loads
    # names in a saved state that are not a rule's own tensors
    RESERVED = "updates", "pending", "lr", "step", "skipped"
    grad_device: str | None = None  # of the gradient buffer; None: the parameters' device
    may_compile = True  # the update, if the run is compiled
    updates = 0  # so far
    invariant = False  # SyncSettings.world_size_invariant
    elementwise = False  # the rule treats the elements of a unit one by one
    receive_buffer: Tensor | None = None  # see Comm.receive_buffer
    reduce_handle = None  # of the reduce-scatter in flight
    gather_handle = None  # of the all-gather in flight

    def __init__(
        self,
        name: str,
        specs: Sequence[ParamSpec],
        rank: int,
        ranks: int,
        grad_dtype: torch.dtype | None = None,
    ):
        first = specs[0]
        dtype = first.param.dtype
        device = first.param.device
        self.name = name
        self.rule = first.rule
        self.first_step = first.first_step
        unit = self.rule.unit(first)
        unit_numel = math.prod(unit) if unit else self.SHARD_ALIGNMENT
        # units of each parameter; the other units of the buffer are padding
        counts = [-(-spec.param.numel() // unit_numel) for spec in specs]
        per_rank = -(-sum(counts) // ranks)
        self.shard_numel = per_rank * unit_numel
        self.shard_begin = rank * self.shard_numel
        self.param_data = torch.zeros(ranks * self.shard_numel, dtype=dtype, device=device)
        self.grad_data = torch.zeros_like(
            self.param_data, dtype=grad_dtype or dtype, device=self.grad_device
        )
        scale = torch.ones(ranks * per_rank, 1, 1, dtype=wide_dtype(self.param_data))
        self.slots = []
        for spec, begin, count in zip(specs, accumulate(counts, initial=0), counts):
            param = spec.param
            offset = begin * unit_numel
            place = slice(offset, offset + param.numel())
            self.param_data[place].copy_(param.detach().reshape(-1))
            param.data = self.param_data[place].view(param.shape)
            param.grad = None
            grad = self.grad_data[place].view(param.shape)
            self.slots.append(Slot(spec.name, param, offset, grad))
            scale[begin : begin + count] = spec.scale
        # of this shard's units
        self.scale = scale.chunk(ranks)[rank].to(device, copy=True)
        self.param_shard = self.param_data.chunk(ranks)[rank].view(-1, *unit)
        self.grad_shard = self.grad_data.chunk(ranks)[rank].view(-1, *unit)
        self.state = self.rule.init_state(self.param_shard)
        for key, x in self.state.items():
            require(
                x.shape[:1] == self.param_shard.shape[:1] and key not in self.RESERVED,
                f"{type(self.rule).__name__}.init_state returned {key!r} {list(x.shape)}; each"
                f" tensor needs {len(self.param_shard)} entries, one per unit of the shard, and a"
                f" name other than {', '.join(self.RESERVED)}",
            )
        self.needs_overwrite = set(self.slots)  # slots without a gradient since the last update
        # slots that still wait for this backward's gradient
        self.missing = set(self.slots)

    def updates_in(self, step: int) -> bool:
        if step < self.first_step:
            return False
        if hasattr(self.rule, "updates_in"):
            return self.rule.updates_in(step)
        return (step + 1) % self.rule.every == 0

    def add_grad(self, slot: Slot, factor: float) -> None:
        """Add the parameter's new gradient times factor into its slot; set param.grad to None."""
        grad = slot.param.grad
        slot.param.grad = None
        self.accumulate(slot, grad, factor)
        self.needs_overwrite.discard(slot)
        self.missing.discard(slot)

    def accumulate(self, slot: Slot, grad: Tensor, factor: float) -> None:
        """Add a gradient in one pass over memory; the first one since an update overwrites."""
        total = slot.grad
        overwrite = slot in self.needs_overwrite
        if self.invariant:
            slot.pending_grads.append(grad.to_dense().to(total.dtype) * factor)
        elif grad.is_sparse:  # into the rows that it has
            if overwrite:
                total.zero_()
            total.index_add_(0, grad._indices()[0], grad._values().to(total.dtype), alpha=factor)
        elif overwrite:
            multiplier = factor_tensor(factor, grad.dtype, total.dtype, total.device)
            torch.mul(grad, multiplier, out=total)
        else:
            total.add_(grad, alpha=factor)

    def start_reduce_scatter(self, comm: Comm) -> None:
        """Start the sum over ranks. After reduce_handle.wait() grad_shard holds it.

        The other shards of grad_data then hold nothing of use.
        """
        for slot in self.slots:
            if slot.pending_grads:  # in world-size-invariant mode
                slot.grad.copy_(tree_sum(slot.pending_grads))
                slot.pending_grads.clear()
            elif self.invariant or slot in self.needs_overwrite:  # unused parameters
                slot.grad.zero_()
        self.reduce_handle = comm.reduce_scatter(
            self.grad_shard.view(-1), self.grad_data, self.receive_buffer
        )

    def carry_over(self, updates: bool) -> None:
        """Add earlier steps' gradients, and keep the sum if this step does not update.

        Only world-size-invariant mode has steps that sum and do not update.
        """
        if "pending" in self.state:
            self.grad_shard.add_(self.state.pop("pending"))
        if not updates:
            self.state["pending"] = self.grad_shard.clone()

    def hyper(self, plan: Plan) -> Values:
        """Compute the rule's hyperparameters; noise depends on seed, update and name only."""
        hyper = self.rule.hyper(plan, self.updates)
        if "noise" in hyper:
            seed = hyper["noise"]
            hyper["noise"] = torch.zeros_like(self.param_shard, dtype=torch.float32)
            for slot in self.slots:
                part = self.view_of(slot, hyper["noise"], True)
                digest = sha256_of(f"{seed} {self.updates} {slot.name}".encode())
                random = torch.Generator(part.device).manual_seed(int(digest[:15], 16))
                noise = torch.randn(slot.param.numel(), generator=random, device=part.device)
                part.copy_(noise[max(0, self.shard_begin - slot.offset) :][: len(part)])
        return hyper

    def update(self, update: Callable[..., None], hyper: Values) -> None:
        """Update this rank's shard.

        In world-size-invariant mode one unit at a time: a batch may be summed in another order.
        """
        size = len(self.param_shard)
        if self.invariant and self.param_shard.dim() > 1 and not self.elementwise:
            size = 1
        for begin in range(0, len(self.param_shard), size):
            part = slice(begin, begin + size)
            part_hyper = {**hyper, "scale": self.scale[part]}
            if "noise" in hyper:
                part_hyper["noise"] = hyper["noise"][part]
            state = {key: x[part] for key, x in self.state.items()}
            update(self.param_shard[part], self.grad_shard[part], state, part_hyper)

    def start_all_gather(self, comm: Comm) -> None:
        """Start to write every rank's updated shard into param_data, where the model reads it."""
        self.gather_handle = comm.all_gather(self.param_data, self.param_shard.view(-1))

    def nonfinite(self) -> list[str]:
        """Name parameters with a non-finite gradient: summed in this rank's shard, else local."""
        return [slot.name for slot in self.slots if not slot.grad.isfinite().all()]

    def drop_gradients(self) -> None:
        """Drop all gradients that no update has used."""
        self.state.pop("pending", None)
        self.needs_overwrite.update(self.slots)
        for slot in self.slots:
            slot.pending_grads.clear()

    def view_of(self, slot: Slot, x: Tensor, of_shard: bool = False) -> Tensor:
        """View a parameter's part of a tensor x over all shards, or over this rank's.

        x may have fewer values per unit than the parameters.
        """
        numel = self.shard_numel if of_shard else len(self.param_data)
        begin = slot.offset - (self.shard_begin if of_shard else 0)
        ends = (begin, begin + slot.param.numel())
        return x.view(-1)[slice(*(max(end, 0) * x.numel() // numel for end in ends))]


@lru_cache(maxsize=256)
def factor_tensor(
    factor: float, dtype: torch.dtype, out_dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return the factor as a tensor, with which a small torch.mul(..., out=x) is 1.5 times as fast.

    dtype: of the gradient. out_dtype: of the product.
    """
    if dtype != out_dtype:  # shape [1] makes torch.mul compute in the wider dtype, in the same pass
        return torch.tensor([factor], dtype=out_dtype, device=device)
    return torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))


def tree_sum(terms: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Sum n tensors as a binary tree of neighbours; into `out` if it is given and n > 1."""
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return torch.add(tree_sum(terms[:half]), tree_sum(terms[half:]), out=out)


class Comm:
    """The collectives of a run. No other code calls them, so a test can replace the network.

    gloo's own reduce-scatter is an all-reduce that keeps a shard, and its all-gather copies. With
    gloo both are made of point-to-point messages instead, which send half as much and copy nothing
    (timed by bench/whole_step.py).
    """

    sent_dtype: torch.dtype | None = None  # of gradients; None: their own

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        device: torch.device | str = "cpu",
        timeout: timedelta | None = None,
        group: Any = None,
    ):
        """timeout: of collectives of CPU tensors beside a GPU's; None: 30 minutes.

        group: None: all ranks.
        """
        self.rank = rank
        self.ranks = ranks
        self.device = device
        self.timeout = timeout
        self.group = group
        self.point_to_point = ranks == 1 or dist.get_backend(group) == "gloo"

    def receive_buffer(self, full: Tensor, invariant: bool) -> Tensor | None:
        """Allocate memory for reduce_scatter's messages; None if it sends none.

        full: [ranks * shard].
        """
        # once: allocating it for each launch would cost as much as the sum
        if self.point_to_point or invariant:
            return full.new_empty(self.ranks - 1, len(full) // self.ranks, dtype=self.sent_dtype)
        return None

    def reduce_scatter(self, shard: Tensor, full: Tensor, buffer: Tensor | None) -> Any:
        """Start to sum this rank's part of full [ranks * shard] over ranks into shard.

        With a buffer the sum is a tree.
        """
        if buffer is None:
            reduce = inspect.unwrap(dist.reduce_scatter_tensor)  # torch 2.13's wrapper warns
            return reduce(shard, full, group=self.group, async_op=True)
        shards = full.view(self.ranks, -1)
        received = [*buffer[: self.rank], shards[self.rank], *buffer[self.rank :]]
        return HandleGroup(
            self.exchange(shards, received), then=lambda: tree_sum(received, out=shard)
        )

    def all_gather(self, full: Tensor, shard: Tensor) -> Any:
        """Start to write every rank's shard, which may be a view of full, into full."""
        if not self.point_to_point:
            gather = inspect.unwrap(dist.all_gather_into_tensor)
            return gather(full, shard, group=self.group, async_op=True)
        shards = full.view(self.ranks, -1)
        shards[self.rank].copy_(shard)  # a no-op if shard is a view of full
        return self.exchange([shard] * self.ranks, shards)

    @cached_property
    def cpu_group(self) -> Any:
        """The process group for CPU tensors.

        With a GPU's backend all ranks must first use it at the same time.
        """
        if dist.get_backend(self.group) == "gloo":
            return self.group
        ranks = self.group and dist.get_process_group_ranks(self.group)
        return dist.new_group(
            ranks, self.timeout, "gloo", use_local_synchronization=ranks is not None
        )

    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> HandleGroup:
        """Start to send sent[i] to rank i and to receive received[i] from it; not empty tensors."""
        group = self.cpu_group if self.ranks > 1 and not sent[0].is_cuda else self.group
        # messages of int64 have a tag of their own, so that a subclass can send them between these
        tag = 4404 + (sent[0].dtype == torch.int64)
        world = dist.get_process_group_ranks(self.group) if self.group else range(self.ranks)
        messages = []
        for transfer, tensors in ((dist.isend, sent), (dist.irecv, received)):
            for peer in range(self.ranks):
                if peer != self.rank and tensors[peer].numel():
                    messages.append((transfer, tensors[peer], world[peer], group, tag))
        if messages and sent[0].is_cuda:  # NCCL needs a batch, which costs gloo time
            handles = dist.batch_isend_irecv([dist.P2POp(*m) for m in messages])
        else:
            handles = []
            for transfer, *message in messages:
                with name_peer(f"rank {message[1]}"):
                    handles.append(transfer(*message))
        return HandleGroup(*handles, peers=[m[2] for m in messages])

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum x over ranks in place, and return it."""
        if self.ranks > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def start_all_reduce(self, x: Tensor) -> Any:
        """Start to sum x over ranks in place. On GPUs only the stream of handle.wait() waits."""
        if self.ranks == 1:
            return HandleGroup()
        return dist.all_reduce(x, group=self.group, async_op=True)

    def broadcast(self, x: Tensor) -> None:
        """Copy rank 0's tensor to all ranks."""
        if self.ranks > 1:
            memory = memory_of(x)
            sent = memory.contiguous()  # a buffer may be transposed
            # gloo lacks some dtypes
            dist.broadcast(sent.view(-1).view(torch.uint8), group=self.group, group_src=0)
            memory.copy_(sent)

    def all_gather_json(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks.

        JSON, unlike pickle, executes nothing on arrival.
        """
        message = json.dumps(value)
        if self.ranks == 1:  # the device may be `meta`, which holds no values
            return [json.loads(message)]
        text = torch.tensor(list(message.encode()), dtype=torch.uint8, device=self.device)
        one_hot = F.one_hot(torch.tensor(self.rank), self.ranks).to(self.device)
        sizes = self.all_reduce(one_hot * len(text)).tolist()
        texts = text.new_zeros(self.ranks, max(sizes))
        texts[self.rank, : len(text)] = text
        return [
            json.loads(bytes(x[:size])) for x, size in zip(self.all_reduce(texts).tolist(), sizes)
        ]


class CompressedComm(Comm):
    """Send gradients in bf16: half the bytes of float32.

    Other communication hooks are subclasses like this one.
    """

    sent_dtype = torch.bfloat16

    def reduce_scatter(self, shard: Tensor, full: Tensor, buffer: Tensor | None) -> Any:
        small = full.to(self.sent_dtype)
        small_shard = small.view(self.ranks, -1)[self.rank]
        handle = super().reduce_scatter(small_shard, small, buffer)
        return HandleGroup(handle, then=lambda: shard.copy_(small_shard))


class HandleGroup:
    """Wait together for handles of collectives or messages; then call `then`.

    peers: the rank that each message is from or to. If it fails, the error names the rank.
    """

    def __init__(
        self, *handles: Any, then: Callable[[], Any] = lambda: None, peers: Sequence[int] = ()
    ):
        self.handles = handles
        self.then = then
        self.peers = peers

    def wait(self) -> Any:
        for i, handle in enumerate(self.handles):
            with name_peer(f"rank {self.peers[i]}" if i < len(self.peers) else "another rank"):
                handle.wait()
        return self.then()


@contextmanager
def name_peer(peer: str) -> Iterator[None]:
    """Add the other rank's number to the error of a send or a receive."""
    try:
        yield
    except RuntimeError as error:
        cause = first_line(error).rpartition("] ")[2]  # without gloo's file and line
        raise RuntimeError(
            f"{peer} has ended, hangs or makes another call ({cause.split('. ')[0]}); its own"
            " output says why"
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, or its kind if it has no text."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def agree(comm: Comm, subject: str, values: Values, cure: str) -> None:
    """Raise RunError on every rank unless all have the same values; it names the difference."""
    values_by_rank = comm.all_gather_json(values)
    expected = values_by_rank[0]
    for rank, seen in enumerate(values_by_rank):
        for key in {**expected, **seen}:
            value = seen.get(key, "nothing")
            value_of_0 = expected.get(key, "nothing")
            require(
                value == value_of_0,
                f"the ranks' {subject} differ: rank {rank} has {key} {value}; rank 0 has"
                f" {value_of_0}. {cure}",
            )


class RowBucket(Bucket):
    """Tables of which a step reads few rows; ranks send the gradients of these only (Adam.rows).

    message               from and to              sent
    a bit per row: read?  each rank to all         before the forward (announce), or at launch
    gradients of rows     each rank to the owner   at launch, after the last gradient
    new values of rows    the owner to all         after the update

    The rows of all tables of the bucket have consecutive indices. All rows are updated and gathered
    if the rule is not lazy, or if world-size-invariant mode sums several steps.
    """

    # the gradient buffer takes no memory; only gradients of rows that were read do
    grad_device = "meta"
    elementwise = True

    def __init__(self, *args: Any):
        super().__init__(*args)
        # otherwise the number of rows differs from step to step
        self.may_compile = not self.rule.lazy
        # [rows of all ranks, width]
        self.all_rows = self.param_data.view(-1, *self.param_shard.shape[1:])
        # n rows of this shard, whose first row has index 0, and their summed gradients [n, width]
        self.grad_indices = torch.empty(0).long()
        self.grad_shard = self.param_shard[:0].to(self.grad_data.dtype)
        # 1: this rank has announced the row
        self.announced = torch.zeros(len(self.all_rows), dtype=torch.uint8)
        # handle of the exchange of read_bits, every rank's announced as bits
        self.announcement = None

    def first_row(self, slot: Slot) -> int:
        return slot.offset // self.all_rows.size(1)

    def accumulate(self, slot: Slot, grad: Tensor, factor: float) -> None:
        """Keep a sparse gradient until launch.

        Merge duplicate rows if they would need more memory than all rows.
        """
        if not grad.is_sparse:
            raise RunError(
                f"{slot.name} got a dense gradient, but its rule needs a sparse one; create the"
                " table by nn.Embedding(..., sparse=True), or use Adam without `rows`"
            )
        slot.pending_grads.append(grad.to(self.grad_data.dtype) * factor)
        if not self.invariant and sum(x._nnz() for x in slot.pending_grads) > len(slot.param):
            slot.pending_grads = [tree_sum(slot.pending_grads).coalesce()]

    def announce(self, comm: Comm, indices: Iterable[Tensor], complete: bool) -> None:
        """Mark rows as read by this rank.

        complete: the next launch sends their gradients, so tell all ranks now.
        """
        for x in indices:
            self.announced.index_fill_(0, x.cpu(), 1)
        if complete:
            bits = torch.from_numpy(np.packbits(self.announced.numpy()))
            self.read_bits = bits.repeat(comm.ranks, 1)
            # sent from there, since they must stay in memory until they have arrived
            self.announcement = comm.exchange(
                [self.read_bits[comm.rank]] * comm.ranks, self.read_bits
            )

    def finish_announcement(self) -> None:
        """Wait for the announcement, if one is in flight, and clear announced for the next step."""
        if self.announcement is not None:
            self.announcement.wait()
        self.announcement = None
        self.announced.zero_()

    def on_device(self, indices: np.ndarray) -> Tensor:
        return to_device(torch.from_numpy(indices), self.all_rows.device)

    def count_by_owner(self, indices: np.ndarray) -> list[int]:
        """Count sorted indices of rows by the rank that updates them."""
        bounds = range(0, len(self.all_rows) + 1, len(self.param_shard))
        return np.diff(np.searchsorted(indices, bounds)).tolist()

    def scatter_add(self, known: Tensor, grads: Iterable[Pair]) -> Tensor:
        """Sum pairs (indices, gradients) into [n, width], for n sorted indices `known`.

        Raise RunError for other indices.
        """
        sums = torch.zeros(
            len(known), self.all_rows.size(1), dtype=self.grad_data.dtype, device=known.device
        )
        for indices, values in grads:
            at = torch.searchsorted(known, indices)
            all_known = (F.pad(known, (0, 1), value=-1)[at] == indices).all()
            if known.is_cuda:
                torch._assert_async(all_known)  # does not make the host wait
            elif not all_known:
                raise RunError(
                    f"{', '.join(slot.name for slot in self.slots)}: rows got a gradient that were"
                    " not announced; in every step announce all rows that it reads, or announce"
                    " none"
                )
            sums.index_add_(0, at, values.to(sums.dtype))
        return sums

    def start_reduce_scatter(self, comm: Comm) -> None:
        """Start to send gradients of rows to their owners; reduce_handle.wait() sums them up."""
        grads = self.row_grads()
        if self.announcement is None:
            self.announce(comm, [indices for indices, _ in grads], complete=True)
        self.finish_announcement()
        bits_by_rank = self.read_bits.numpy()
        bits_of_any = np.bitwise_or.reduce(bits_by_rank)
        self.read_by_any = ones(bits_of_any)
        # this rank's sums, for the rows of all owners
        sent_rows = ones(bits_by_rank[comm.rank])
        sums = self.scatter_add(self.on_device(sent_rows), grads)
        del grads  # they need much memory
        for slot in self.slots:
            slot.pending_grads.clear()
        sent = sums.to(comm.sent_dtype or sums.dtype).split(self.count_by_owner(sent_rows))
        # all ranks' sums, for the rows of this shard, whose first row has index 0
        begin = comm.rank * len(self.param_shard)
        end = begin + len(self.param_shard)
        rows_by_rank = [ones(bits, begin, end) for bits in bits_by_rank]
        counts = [len(rows) for rows in rows_by_rank]
        values = sums.new_empty((sum(counts), sums.size(1)), dtype=sent[0].dtype)
        received = values.split(counts)
        received[comm.rank].copy_(sent[comm.rank])
        value_rows = self.on_device(np.concatenate(rows_by_rank))
        shard_rows = self.on_device(ones(bits_of_any, begin, end))

        def sum_over_ranks() -> None:
            terms = [(value_rows, values)]
            if self.invariant:  # a tree over ranks
                terms = zip(value_rows.split(counts), received)
            self.grad_shard = tree_sum([self.scatter_add(shard_rows, [term]) for term in terms])
            self.grad_indices = shard_rows

        self.reduce_handle = HandleGroup(comm.exchange(sent, received), then=sum_over_ranks)

    def row_grads(self) -> list[Pair]:
        """Return pending gradients: (indices of rows in the bucket, which may repeat; values)."""
        grads = []
        for slot in self.slots:
            pending = slot.pending_grads
            if self.invariant:
                pending = [tree_sum([x.coalesce() for x in pending])]
            for x in pending:
                grads.append((x._indices()[0] + self.first_row(slot), x._values()))
        return grads

    def carry_over(self, updates: bool) -> None:
        """Do the same as Bucket.carry_over.

        A rule that is not lazy, and a sum over several steps, need all rows.
        """
        if not (updates and self.rule.lazy) or "pending" in self.state:
            grads = torch.zeros_like(self.param_shard, dtype=self.grad_data.dtype)
            grads[self.grad_indices] = self.grad_shard
            self.grad_indices = torch.arange(len(grads), device=grads.device)
            self.grad_shard = grads
            self.read_by_any = None
        super().carry_over(updates)

    def update(self, update: Callable[..., None], hyper: Values) -> None:
        """Update all rows, or those that have a gradient other than zero."""
        if not self.rule.lazy:
            return super().update(update, hyper)
        wholes = [self.param_shard, *self.state.values()]
        # in pieces, to save memory
        for indices, grad in zip(self.grad_indices.split(2**16), self.grad_shard.split(2**16)):
            # on CPUs 5 times as fast as whole[...]
            olds = [whole.index_select(0, indices) for whole in wholes]
            param, *state = (old.clone() for old in olds)
            noise = {"noise": hyper["noise"][indices]} if "noise" in hyper else {}
            update(param, grad, dict(zip(self.state, state)), hyper | noise)
            has_grad = grad.abs().amax(1, keepdim=True) != 0
            for whole, old, new in zip(wholes, olds, (param, *state)):
                whole[indices] = torch.where(has_grad, new, old)

    def start_all_gather(self, comm: Comm) -> None:
        """Start to send the rows that any rank read; all rows after a sum over several steps."""
        if self.read_by_any is None or comm.ranks == 1:
            return super().start_all_gather(comm)
        indices = self.on_device(self.read_by_any)
        new = self.all_rows.index_select(0, indices)
        received = new.split(self.count_by_owner(self.read_by_any))

        def write() -> None:
            self.all_rows[indices] = new

        messages = comm.exchange([received[comm.rank]] * comm.ranks, received)
        self.gather_handle = HandleGroup(messages, then=write)

    def nonfinite(self) -> list[str]:
        bad_rows = self.grad_indices[~self.grad_shard.isfinite().all(1)]
        bad_rows += self.shard_begin // self.all_rows.size(1)
        names = []
        for slot in self.slots:
            row_in_slot = bad_rows - self.first_row(slot)
            if ((row_in_slot >= 0) & (row_in_slot < len(slot.param))).any():
                names.append(slot.name)
        return names

    def drop_gradients(self) -> None:
        self.finish_announcement()
        super().drop_gradients()


def ones(bits: np.ndarray, begin: int = 0, end: int = 2**62) -> np.ndarray:
    """Find the ones from begin to end in packed bits uint8 [n], most of them 0.

    Return their sorted indices, less begin.
    """
    bytes_with_ones = begin // 8 + np.flatnonzero(bits[begin // 8 : -(-end // 8)].astype(bool))
    at = np.flatnonzero(np.unpackbits(bits[bytes_with_ones]).view(bool))
    indices = 8 * bytes_with_ones[at // 8] + at % 8
    return indices[slice(*np.searchsorted(indices, (begin, end)))] - begin


# A saved state has each tensor whole, with a name and a size that depend on neither ranks nor
# buckets:
#     NAME            a parameter
#     NAME/KEY        a tensor of its rule, such as a moment
#     NAME/updates    number of updates so far
#     NAME/pending    gradients of earlier steps that wait for an update (world-size-invariant mode)
#     NAME            a persistent buffer, such as a running mean, or a tensor of optimizer.further


def gather_state(bucket: Bucket, comm: Comm) -> Tensors:
    """All-gather one bucket's state. Call it on all ranks."""
    wholes = {"": bucket.param_data}
    for key, shard in bucket.state.items():
        wholes[f"/{key}"] = shard.new_empty(comm.ranks * shard.numel())
        comm.all_gather(wholes[f"/{key}"], shard.reshape(-1)).wait()
    state = {
        slot.name + key: bucket.view_of(slot, x)
        for slot in bucket.slots
        for key, x in wholes.items()
    }
    return state | {f"{slot.name}/updates": torch.tensor(bucket.updates) for slot in bucket.slots}


def take_state(bucket: Bucket, state: Tensors) -> Tensors:
    """Remove one bucket's tensors from `state` and return them. RunError if they do not fit."""
    shards = {"": bucket.param_shard, **{f"/{key}": x for key, x in bucket.state.items()}}
    shards.pop("/pending", None)
    if f"{bucket.slots[0].name}/pending" in state:
        shards["/pending"] = bucket.param_shard
    sizes = {}
    for slot in bucket.slots:
        for key, x in shards.items():
            sizes[slot.name + key] = slot.param.numel() * x.numel() // bucket.shard_numel
        sizes[f"{slot.name}/updates"] = 1
    for name, size in sizes.items():
        seen = f"has {state[name].numel()} values, not {size}" if name in state else "is missing"
        require(
            name in state and state[name].numel() == size,
            f"the saved state does not fit: {name} {seen}; load one of the same model and rules",
        )
    taken = {name: state.pop(name) for name in sizes}
    updates = {slot.name: int(taken[f"{slot.name}/updates"]) for slot in bucket.slots}
    require(
        len({*updates.values()}) == 1,
        "the saved state does not fit: parameters of one bucket have different "
        f"numbers of updates: {updates}; load a state of the same model and the same rules",
    )
    return taken


def write_state(bucket: Bucket, saved: Tensors, comm: Comm) -> None:
    """Write the tensors that take_state returned to the bucket."""
    name = bucket.slots[0].name
    bucket.updates = int(saved[f"{name}/updates"])
    if f"{name}/pending" in saved:
        bucket.state["pending"] = torch.zeros_like(bucket.param_shard, dtype=bucket.grad_data.dtype)
    for slot in bucket.slots:
        bucket.view_of(slot, bucket.param_data).copy_(saved[slot.name].view(-1))
    for key, shard in bucket.state.items():
        whole = shard.new_zeros(comm.ranks, shard.numel())
        for slot in bucket.slots:
            bucket.view_of(slot, whole).copy_(saved[f"{slot.name}/{key}"].view(-1))
        shard.view(-1).copy_(whole[comm.rank])


# --------------------------------------------------------------------------------------------------
# assignment


class ParamSpec(NamedTuple):
    """A parameter, its update rule, and how the rule treats the parameter.

    unit: shape of the matrices that the parameter stores one after another, such as (d, d) for
    torch's fused query, key and value [3d, d]. scale: factor on a matrix's learning rate.
    first_step: first step with a gradient.
    """

    name: str
    param: nn.Parameter
    rule: Adam | NorMuon
    unit: tuple[int, int] | None = None
    scale: float = 1.0
    first_step: int = 0


def build_model(config: Config, encoding: Encoding) -> GPT:
    """Build the model of a config on the CPU, with the same initialization on every machine."""
    torch.manual_seed(config.seed)
    return config.model_type(config, encoding)


def build_optimizer(
    config: Config, model: GPT, comm: Comm, compile_updates: bool = False
) -> DistributedOptimizer:
    """Build the optimizer of a config. The model must be on its device."""
    specs = specs_of(config, model)
    state = persistent_buffers(model)()
    require(
        not (config.world_size_invariant and state),
        f"the buffer {', '.join(state)} follows rank 0's data, so world_size_invariant excludes it;"
        " register a constant with persistent=False, or omit --exact",
    )
    buckets = fill_buckets(
        specs, config.bucket_mb * 2**20, comm.rank, comm.ranks, config.grad_reduce_in_fp32
    )
    # Reducer divides by the number of backward passes. Splits add passes, but the loss is a sum
    # over tokens
    grad_scale = float(config.micro_batch_splits)
    return DistributedOptimizer(buckets, comm, config, model, grad_scale, compile_updates)


def specs_of(config: Config, model: GPT) -> list[ParamSpec]:
    """Assign every parameter that is not frozen its kind's update rule, in the model's order."""
    groups = groups_by_kind(config)
    specs = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        kind = getattr(param, "kind", None)
        require(
            kind in groups,
            f"{name}: PARAM_GROUPS has no row for kind {kind!r}; add one, or create the parameter "
            f"by parameter(init, kind) with one of {', '.join(groups)}",
        )
        rule = groups[kind].rule(config)
        scale = groups[kind].lr_mul
        if not isinstance(rule, NorMuon):  # NorMuon applies lr_mul by spec.scale
            rule = replace(rule, lr=rule.lr * scale)
            scale = 1.0
        specs.append(finish_spec(ParamSpec(name, param, rule, param.unit, scale, param.first_step)))
    return specs


def finish_spec(spec: ParamSpec) -> ParamSpec:
    """Complete NorMuon's settings from the matrix's shape."""
    if not isinstance(spec.rule, NorMuon):
        return spec
    param = spec.param
    rows, columns = spec.rule.unit(spec)
    return spec._replace(
        rule=replace(spec.rule, wide=param.numel() > param.shape[0] ** 2),
        # as in Keller Jordan's Muon
        scale=spec.scale * math.sqrt(max(1, rows / columns)),
    )


# --------------------------------------------------------------------------------------------------
# masks and kernels


def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: Mask) -> Tensor:
    """Compute softmax attention [T, H, D of v] where the mask allows it.

    q must contain the softmax scale. The mask selects the implementation: FlashAttention (GPUs
    only) or scaled_dot_product_attention.
    """
    if isinstance(mask, DocumentTable):
        return flash_attention(q_THD, k_THD, v_THD, *mask)[0]
    k, v = (seen_by_pieces(x, mask).mT for x in (k_THD, v_THD))
    out = F.scaled_dot_product_attention(cut_in_pieces(q_THD, mask), k, v, mask[:, None], scale=1.0)
    return out.transpose(1, 2).flatten(0, 1)[: len(q_THD)]


def cut_in_pieces(x: Tensor, mask: Tensor) -> Tensor:
    """Cut x [T, H, ...] into the pieces of a mask: [pieces, H, piece, ...]."""
    pieces, piece, _ = mask.shape
    padded = F.pad(x, (0, 0) * (x.dim() - 1) + (0, pieces * piece - len(x)))
    return padded.view(pieces, piece, *x.shape[1:]).transpose(1, 2)


def seen_by_pieces(x: Tensor, mask: Tensor) -> Tensor:
    """Cut x [T, ...] into what the pieces of a mask see: [pieces, ..., keys]."""
    pieces, piece, keys = mask.shape
    return F.pad(x, (0, 0) * (x.dim() - 1) + (keys - piece, pieces * piece - len(x))).unfold(
        0, keys, piece
    )


# Least queries per piece. Smaller pieces compute fewer masked keys; larger ones keep GPUs busy
MASK_PIECE = {"cuda": 1024, "cpu": 64}


def mask_in_pieces(
    docs: Tensor, window: int, reach: int, dtype: torch.dtype, piece: int = 0
) -> Tensor:
    """Build the mask of scaled_dot_product_attention.

    A token sees its window within its document. Queries are cut into pieces; each piece sees its
    own keys and `reach` earlier ones. Returns 0 or -inf [pieces, piece, reach + piece]: one shape
    for all windows up to reach. A short sequence is one piece. Padding queries of the last piece
    see one another.
    """
    piece = piece or max(MASK_PIECE[docs.device.type], reach // 4)
    if reach + piece >= len(docs):
        piece = len(docs)
        reach = 0
    docs = F.pad(docs, (0, -len(docs) % piece), value=-1)
    # -2: before the first token
    of_keys = F.pad(docs, (reach, 0), value=-2).unfold(0, reach + piece, piece)[:, None]
    keys = torch.arange(-reach, piece, device=docs.device)  # of a piece whose first query is 0
    back = keys[reach:, None] - keys
    seen = (back >= 0) & (back <= window) & (docs.view(-1, piece, 1) == of_keys)
    return torch.where(seen, torch.zeros((), dtype=dtype, device=docs.device), -math.inf)


class DocumentTable(NamedTuple):
    """The mask of FlashAttention.

    starts: where documents begin, then the sequence's end, int32 [room + 1], one shape for any
    number of documents. numbers: window, longest document, number of documents, int64 [3], on the
    CPU because the host reads them.
    """

    starts: Tensor
    numbers: Tensor


DOCUMENT_ROOM = 16  # a sequence of T tokens has room for T / DOCUMENT_ROOM documents in its table

Mask = Tensor | DocumentTable
Masks = dict[str | None, Mask | None]

flash_3 = None  # the module with FlashAttention 3's interface, once find_flash_3 has loaded it


def find_flash_3() -> str:
    """Load FlashAttention 3 -> why there is none; empty if there is one.

    It is an installed wheel, or the build that public records take from the Hugging Face hub.
    """
    global flash_3
    reasons = []
    for package in ("flash_attn_interface", "kernels"):
        try:
            module = importlib.import_module(package)
            if package == "kernels":
                module = module.get_kernel("kernels-community/flash-attn3", version=1)
                module = module.flash_attn_interface
            # flash_attention's operators call both
            module.flash_attn_varlen_func, module._flash_attn_backward
            flash_3 = module
            return ""
        except Exception as error:  # packages with binaries may raise anything
            reasons.append(f"{package}: {first_line(error)[:200]}")
    return "; ".join(reasons)


# a copy of this file under another name registers its own operators
OPERATORS = "of_" + re.sub(r"\W", "_", __name__)


@torch.library.custom_op(f"{OPERATORS}::flash_attention", mutates_args=())
def flash_attention(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, numbers: Tensor) -> Pair:
    """Compute attention [T, H, D] within documents, and log-sum-exps [H, T]. See DocumentTable.

    Attention with mask_in_pieces defines the result. torch's varlen_attn would recompile for each
    new `numbers`.
    """
    window, longest, count = numbers.tolist()
    starts = starts[: count + 1]
    inputs = (q, k, v, starts, starts, longest, longest)
    if flash_3:  # by its own heuristics it would split the keys, and add the parts up in float32
        with torch.no_grad():
            return flash_3.flash_attn_varlen_func(
                *inputs,
                softmax_scale=1.0,
                causal=True,
                window_size=(window, 0),
                num_splits=1,
                return_attn_probs=True,
            )
    out, log_sums, *_ = torch.ops.aten._flash_attention_forward(
        *inputs,
        0.0,
        False,
        False,
        scale=1.0,
        window_size_left=window,
        window_size_right=0,
    )
    return out, log_sums


@torch.library.custom_op(f"{OPERATORS}::flash_attention_backward", mutates_args=())
def flash_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    numbers: Tensor,
    out: Tensor,
    log_sums: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    window, longest, count = numbers.tolist()
    starts = starts[: count + 1]
    inputs = (grad, q, k, v, out, log_sums)
    if flash_3:
        dq, dk, dv = map(torch.empty_like, (q, k, v))
        flash_3._flash_attn_backward(
            *inputs,
            cu_seqlens_q=starts,
            cu_seqlens_k=starts,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            dq=dq,
            dk=dk,
            dv=dv,
            softmax_scale=1.0,
            is_causal=True,
            window_size_left=window,
            window_size_right=0,
        )
        return dq, dk, dv
    dropout_state = q.new_empty(2, dtype=torch.uint64)
    return torch.ops.aten._flash_attention_backward(
        *inputs,
        *(starts, starts, longest, longest, 0.0, False, dropout_state, dropout_state),
        scale=1.0,
        window_size_left=window,
        window_size_right=0,
    )


flash_attention.register_fake(
    lambda q, k, v, starts, numbers: (
        torch.empty_like(q),
        q.new_empty(q.size(1), q.size(0), dtype=torch.float32),
    )
)
flash_attention_backward.register_fake(
    lambda grad, q, k, v, *_: (torch.empty_like(q), torch.empty_like(k), torch.empty_like(v))
)
flash_attention.register_autograd(
    lambda ctx, grad, _: (*flash_attention_backward(grad, *ctx.saved_tensors), None, None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, *output),
)


class ReluSquaredMLP(torch.autograd.Function):
    """MLP.forward by relu_squared. Saves only the squared activations for backward."""

    @staticmethod
    def forward(ctx, x: Tensor, fc: Tensor, proj: Tensor) -> Tensor:
        h = relu_squared(x, fc)
        ctx.save_for_backward(x, fc, proj, h)
        return F.linear(h, proj)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, ...]:
        x, fc, proj, h = ctx.saved_tensors
        grad_y = relu_squared(grad, proj, h)
        return F.linear(grad_y, fc), x.T @ grad_y, grad.T @ h


def relu_squared(a: Tensor, b: Tensor, h: Tensor | None = None) -> Tensor:
    """Compute relu(a @ b) ** 2 or, if its result h is given, its backward (a @ b) * 2 sqrt(h).

    a: [m, k]. b: [k, n].
    """
    programs, tile_n = kernel_grid(a, b, a.dtype)
    if not tile_n:
        y = a @ b
        return y.relu() * y if h is None else 2 * y * h.sqrt()
    m, k = a.shape
    n = b.size(1)
    half = [TILE_M, tile_n // 2]
    out = a.new_empty(m, n)
    tiles = (
        (a, [TILE_M, TILE_K]),
        (b, [TILE_K, tile_n]),
        (out if h is None else h, half),
        (out, half),
    )
    relu_squared_kernel[(programs,)](
        *(TensorDescriptor.from_tensor(x.contiguous(), tile) for x, tile in tiles),
        *(m, n, k, TILE_M, tile_n, TILE_K, programs, h is not None),
        num_warps=8,
        num_stages=3,
    )
    return out


# Tile sizes of the MLP's product, with three stages in shared memory. Of its columns: the bytes per
# block that Triton's compiler takes, the most of capabilities 9.0 and 10.0, and those of 12.0
TILE_M = 128
TILE_K = 64
TILE_N = (256, 213_056), (128, 98_336)


def tile_columns(gpu: Any, itemsize: int = 2) -> int:
    """Return the columns of the largest tile that a block of a GPU holds; 0 without TMA."""
    for columns, needed in TILE_N:
        spills = columns == 256 and itemsize == 1 and gpu.major == 10  # 1 KB per thread
        if gpu.major > 8 and needed <= gpu.shared_memory_per_block_optin and not spills:
            return columns
    return 0


def kernel_grid(a: Tensor, b: Tensor, dtype: torch.dtype) -> tuple[int, int]:
    """Return the kernel's programs for a @ b, one per multiprocessor, and a tile's columns.

    No columns if a size or the GPU is unfit.
    """
    fits = not (len(a) % TILE_M or b.size(1) % 256 or len(b) * a.itemsize % (2 * TILE_K))
    if not (a.is_cuda and dtype == torch.bfloat16 and fits):
        return 0, 0
    gpu = torch.cuda.get_device_properties(a.device)
    return gpu.multi_processor_count, tile_columns(gpu, a.itemsize)


if triton is not None:

    @triton.jit
    def relu_squared_kernel(
        a,
        b,
        h,
        out,
        M,
        N,
        K,
        TILE_M: tl.constexpr,
        TILE_N: tl.constexpr,
        TILE_K: tl.constexpr,
        PROGRAMS: tl.constexpr,
        BACKWARD: tl.constexpr,
    ):
        """Start a program's next tile while it stores the last one, in two halves."""
        HALF: tl.constexpr = TILE_N // 2
        columns = N // TILE_N
        for tile in tl.range(tl.program_id(0), M // TILE_M * columns, PROGRAMS, flatten=True):
            row = tile // columns * TILE_M
            column = tile % columns * TILE_N
            y = tl.zeros((TILE_M, TILE_N), tl.float32)
            for k in range(0, K, TILE_K):
                y = tl.dot(a.load([row, k]), b.load([k, column]), y)
            halves = y.reshape(TILE_M, 2, HALF).permute(0, 2, 1).split()
            for i in tl.static_range(2):
                y = halves[i]
                if BACKWARD:
                    y = 2 * y * tl.sqrt(h.load([row, column + i * HALF]).to(tl.float32))
                else:
                    y = tl.maximum(y, 0) * y
                out.store([row, column + i * HALF], y.to(out.dtype))


class HeadLoss(torch.autograd.Function):
    """Head.forward by softcapped_loss: x [T, dim], weight [V, dim] -> (objective, entropies [n]).

    scales: for fp8. Forward keeps the logits' gradient in place of the logits. Backward multiplies
    it by the objective's gradient.
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        weights: Tensor,
        softcap: Softcap,
        scales: FP8Scales | None,
    ) -> Pair:
        ctx.scales = scales
        if scales is None:
            losses, grad = softcapped_loss(F.linear(x, weight), targets, weights, softcap)
        else:
            x, weight, logits = fp8_linear(x, weight, scales)
            losses, grad = softcapped_loss(logits, targets, weights, softcap, scales.grad)
        ctx.save_for_backward(x, weight, grad)
        entropies = losses.sum(1)
        ctx.mark_non_differentiable(entropies)
        return (entropies * weights).sum(), entropies

    @staticmethod
    def backward(ctx, grad_objective: Tensor, _) -> tuple[Tensor | None, ...]:
        x, weight, grad = ctx.saved_tensors
        scales = ctx.scales
        if scales is None:
            grads = grad_objective * (grad @ weight), grad_objective * (grad.T @ x)
        else:
            grads = fp8_gradients(grad, grad_objective * scales.grad, x, weight, scales)
        return *grads, None, None, None, None


def softcapped_loss(
    x: Tensor, targets: Tensor, weights: Tensor, softcap: Softcap, grad_scale: float | None = None
) -> Pair:
    """Compute cross entropies and the gradient of their weighted sum; read logits x [T, V] once.

    targets [n, T], -1 is not counted; weights [n]. Return (float32 [n, T], the gradient [T, V]): in
    x's dtype or, with a grad_scale, divided by it and in e5m2.
    """
    losses = torch.empty(targets.shape, dtype=torch.float32, device=x.device)
    grad = torch.empty_like(x, dtype=None if grad_scale is None else torch.float8_e5m2)
    softcapped_loss_kernel[(len(x),)](
        *(x, targets.contiguous(), weights, losses, grad, len(x), x.size(1), len(targets)),
        *(*softcap, grad_scale or 1.0, LOSS_CHUNK, x.dtype != torch.float32),
        num_warps=32,
    )
    return losses, grad


LOSS_CHUNK = 2048  # logits that softcapped_loss_kernel loads at once: two for each of 1,024 threads

if triton is not None:

    @triton.jit
    def softcap_and_exp(x, CAP: tl.constexpr, SHIFT: tl.constexpr, SOFTNESS: tl.constexpr):
        """s = sigmoid((x + SHIFT) / SOFTNESS) and exp(CAP * s - CAP): three special functions."""
        LOG2_E: tl.constexpr = 1.4426950408889634
        s = 1 / (1 + tl.exp2(x * (-LOG2_E / SOFTNESS) - SHIFT * LOG2_E / SOFTNESS))
        return s, tl.exp2(s * (CAP * LOG2_E) - CAP * LOG2_E)

    @triton.jit
    def softcapped_loss_kernel(
        x,
        targets,
        weights,
        losses,
        grad,
        T,
        V: tl.constexpr,
        N: tl.constexpr,
        CAP: tl.constexpr,
        SHIFT: tl.constexpr,
        SOFTNESS: tl.constexpr,
        SCALE: tl.constexpr,
        CHUNK: tl.constexpr,
        PACK: tl.constexpr,
    ):
        """Keep in registers, one program per row, what the gradient needs until the sum is known.

        PACK: hold it in bf16, two chunks in one register. A row of 50,304 logits fills half of the
        64 registers.
        """
        at = tl.arange(0, CHUNK)
        row = tl.program_id(0)
        x += row.to(tl.int64) * V
        grad += row.to(tl.int64) * V
        total = tl.zeros((CHUNK,), tl.float32)
        held = ()  # exp(z - CAP) * s * (1 - s)
        for i in tl.static_range(0, V, CHUNK):
            logits = (
                tl.load(x + i + at, i + at < V, other=0.0) if i + CHUNK > V else tl.load(x + i + at)
            )
            s, e = softcap_and_exp(logits.to(tl.float32), CAP, SHIFT, SOFTNESS)
            e = tl.where(i + at < V, e, 0) if i + CHUNK > V else e
            total += e
            part = e * s * (1 - s)
            if PACK:
                # rounds to bf16; part is not negative
                bits = part.to(tl.int32, bitcast=True) + 0x8000
                if i // CHUNK % 2 == 0:
                    held = held + (bits >> 16,)
                else:
                    held = held[:-1] + (held[-1] | (bits & -0x10000),)
            else:
                held = held + (part,)
        total = tl.sum(total, 0)
        weight_sum = 0.0
        for k in tl.static_range(N):
            weight_sum += tl.where(tl.load(targets + k * T + row) >= 0, tl.load(weights + k), 0)
        factor = CAP / (SOFTNESS * SCALE)
        for i in tl.static_range(0, V, CHUNK):
            if PACK:
                pair = held[i // CHUNK // 2]
                part = (pair << 16 if i // CHUNK % 2 == 0 else pair & -0x10000).to(
                    tl.float32, bitcast=True
                )
            else:
                part = held[i // CHUNK]
            part = (part * (factor * weight_sum / total)).to(grad.dtype.element_ty)
            if i + CHUNK > V:
                tl.store(grad + i + at, part, i + at < V)
            else:
                tl.store(grad + i + at, part)
        tl.debug_barrier()  # the targets' gradients overwrite
        for k in tl.static_range(N):
            target = tl.load(targets + k * T + row)
            s, e = softcap_and_exp(
                tl.load(x + tl.maximum(target, 0)).to(tl.float32), CAP, SHIFT, SOFTNESS
            )
            tl.store(losses + k * T + row, tl.where(target >= 0, tl.log(total) + CAP - CAP * s, 0))
            target_weight = 0.0
            for j in tl.static_range(N):
                target_weight += tl.where(
                    tl.load(targets + j * T + row) == target, tl.load(weights + j), 0
                )
            part = factor * (weight_sum * e / total - target_weight) * s * (1 - s)
            tl.store(grad + tl.maximum(target, 0), part.to(grad.dtype.element_ty), target >= 0)


class FP8Linear(torch.autograd.Function):
    """x [T, dim] @ weight [V, dim] transposed -> bf16 [T, V]; all products are in fp8."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, scales: FP8Scales) -> Tensor:
        ctx.scales = scales
        *operands, y = fp8_linear(x, weight, scales)
        ctx.save_for_backward(*operands)
        return y.bfloat16()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        scales = ctx.scales
        grad8 = (grad / scales.grad).to(torch.float8_e5m2)
        return *fp8_gradients(grad8, scales.grad, *ctx.saved_tensors, scales), None


def fp8_linear(x: Tensor, weight: Tensor, scales: FP8Scales) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and weight in e4m3, and their product."""
    x = (x / scales.x).to(torch.float8_e4m3fn)
    weight = (weight / scales.weight).to(torch.float8_e4m3fn)
    return x, weight, fp8_product(x, weight.T, scales.x, scales.weight, True, scales.out)


def fp8_gradients(
    grad8: Tensor, grad_scale: float | Tensor, x8: Tensor, weight8: Tensor, scales: FP8Scales
) -> Pair:
    """Compute the gradients of x and weight from the product's, grad8 [T, V] times grad_scale."""
    # fast sums would make gradients not finite, the public records say
    grad_x = fp8_product(grad8, weight8.T.contiguous().T, grad_scale, scales.weight, False)
    grad8_T = grad8.T.contiguous()
    return grad_x, fp8_product(grad8_T, x8.T.contiguous().T, grad_scale, scales.x, False)


# Keep it a function of the module: a method would break the compiled graph, and the fusion of casts
# and loss
def fp8_product(
    a: Tensor,
    b: Tensor,
    scale_a: float | Tensor,
    scale_b: float | Tensor,
    fast: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Multiply a [m, k], row-major, by b [k, n], column-major, each times its scale -> [m, n]."""
    scale_a, scale_b = (
        x if isinstance(x, Tensor) else torch.full((), x, device=a.device)
        for x in (scale_a, scale_b)
    )
    return torch._scaled_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=fast
    )


class FP8Scales(NamedTuple):
    """Fixed scales of the head's fp8 products. A tensor is divided by its scale, then rounded."""

    x: float
    weight: float
    grad: float
    out: torch.dtype = torch.bfloat16  # of the product


# --------------------------------------------------------------------------------------------------
# log and clock


class Clock:
    """The training clock, in milliseconds. It stops for everything outside training.

    Each span outside has a name and begins where the last span or training ended, so that all time
    has a name.
    """

    def __init__(self, device: torch.device, began: float):
        """began: start of the process, by time.perf_counter."""
        self.device = device
        self.began = began
        self.elapsed = 0.0
        self.running = False
        self.last = time.perf_counter()  # end of the last span
        self.outside = collections.Counter(joining=self.last - began)  # seconds by name

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.running = True

    def stop(self) -> None:
        begin = self.last
        self.last = self._now()
        self.running = False
        self.elapsed += 1000 * (self.last - begin)

    def read(self) -> float:
        """Read the host's time without waiting for the device."""
        return self.elapsed + 1000 * (time.perf_counter() - self.last) * self.running

    @contextmanager
    def off(self, name: str) -> Iterator[None]:
        """Stop the clock and count the seconds under this name, torch.compile's as `compile`."""
        running = self.running
        if running:
            self.stop()
        begin = self.last
        compile_begin = compile_stats()[1]
        yield
        self.last = self._now()
        compile_seconds = compile_stats()[1] - compile_begin
        self.outside.update({name: self.last - begin - compile_seconds, "compile": compile_seconds})
        self.running = running

    def state(self) -> Values:
        return {
            "elapsed": self.elapsed,
            "outside": dict(self.outside),
            "wall": self.last - self.began,
        }

    def load_state(self, state: Values) -> None:
        """Continue from a checkpoint; time after it was lost and does not count."""
        self.elapsed = state["elapsed"]
        self.began -= state["wall"]
        self.outside.update(state["outside"])


def compile_stats() -> tuple[int, float]:
    """(graphs, seconds) of torch.compile in this process."""
    utils = sys.modules.get("torch._dynamo.utils")
    if not utils:
        return 0, 0.0
    seconds = utils.calculate_time_spent().get("total_wall_time", 0.0)
    return utils.counters["stats"]["unique_graphs"], seconds


def show_times(elapsed: float, step: int) -> str:
    """Show milliseconds in total and per step, for a line of the log."""
    return f"train_time:{elapsed:.0f}ms step_avg:{elapsed / step if step else 0:.2f}ms"


def printable(text: str) -> str:
    """Escape control characters of a text from files or other machines; not newlines and tabs."""
    return "".join(
        c if c in "\n\t" or unicodedata.category(c)[0] != "C" else repr(c)[1:-1] for c in text
    )


# This folder, or the folders of another path, unless the system has it or a word or URL contains it
FOLDERS = re.compile(
    rf"{re.escape(str(ROOT))}/(?=[\w.*])|"
    r"""(?<![\w./~*-])/(?!/|usr/|lib\w*/)(?:[^\s"'<>|:,;/\\]+/)+(?=[\w.*])"""
)


def without_folders(text: str) -> str:
    """Leave this machine's folders out of a text, since logs are published.

    Paths in this folder stay relative.
    """
    return FOLDERS.sub("", text)


class Log:
    """A run's log file and what it prints.

    Only rank 0 writes; each line is in the file when write returns.
    """

    SEPARATOR = "=" * 100
    file = None
    last_line = 0.0  # when it was printed
    resumes = 0
    loss = ""  # the newest training loss, as it is printed

    def __init__(self, config: Config, rank: int, run_id: str):
        self.config = config
        self.rank = rank
        self.run_id = run_id
        self.mute = rank > 0 or sys.stdout is None

    @property
    def path(self) -> Path:
        return ROOT / self.config.log_dir / f"{self.run_id}.txt"

    def open(self, description: Values, environment: str, resumed: Values | None) -> None:
        """Create the log of a new run, or continue that of a resumed or restarted one.

        resumed: None for a new run; without a checkpoint torchrun has restarted one that had none.
        """
        # here, and resource below: Windows has neither, and other programs need only the optimizer
        import fcntl

        self.path.parent.mkdir(parents=True, exist_ok=True)
        run_exists = (
            f"{self.path} exists, so run_id {self.run_id!r} was used. Choose another --run_id,"
            " or --resume it"
        )
        mode = "a+" if resumed else "x+"
        try:
            file = open(self.path, mode, encoding="utf-8", errors="replace", newline="")
        except FileExistsError:
            raise RunError(run_exists) from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{self.path}: another process trains this run; wait for it or stop it"
            ) from None
        except OSError as error:  # such as some network file systems
            self.say(
                f"{self.path} cannot be locked ({error.strerror}); do not resume it twice at a time"
            )
        file.seek(0)
        written = file.read()
        head = re.search(rf"\n{self.SEPARATOR}\n(\{{.*)\n", written)
        if head:
            description = json.loads(head[1])
            ended = '\n{"end"' in written
            restarted = is_of_this_launch(self.path)
            require(not ended and (resumed["checkpoint"] or restarted), run_exists)
        else:  # new, deleted, or stopped while its head was written
            file.truncate(0)
            texts = environment, json.dumps(description, ensure_ascii=False)
            parts = source_of(self.config), *map(without_folders, texts)
            try:
                print(*parts, sep=f"\n{self.SEPARATOR}\n", file=file, flush=True)
            except OSError:
                self.path.unlink()  # the run did not start
                raise
        self.file = file
        if resumed and (head or resumed["checkpoint"]):
            self.write_resumption(written, description["started"], resumed)

    def write_resumption(self, written: str, started: str, resumed: Values) -> None:
        """Add to what was written that the run continues, and what it lost since it was saved.

        Without a checkpoint it has lost all since it started.
        """
        life = time.time() - datetime.fromisoformat(started).timestamp()
        steps = re.findall(r"^step:(\d+)/", written.rpartition('\n{"resumed"')[2], re.M)
        lost_steps = max(0, int((steps or [0])[-1]) - resumed["from_step"])
        resumed = {"lost_seconds": life, **resumed, "lost_steps": lost_steps}
        if written[-1:] not in ("", "\n"):
            self.write("")
        self.write(without_folders(json.dumps({"resumed": resumed})))
        self.resumes = written.count('\n{"resumed"') + 1

    def write(self, line: str, off_clock: bool = True) -> None:
        if self.file is not None:
            self.file.write(line + "\n")
            self.file.flush()
            if off_clock and not self.path.exists():
                self.file = None  # nobody could read what follows
                raise RunError(
                    f"{self.path} was deleted or moved while the run wrote it; start the run again,"
                    " and leave its log alone until it ends"
                )

    def say(self, line: str, stay: bool = False) -> None:
        """Print to the terminal, if it is open. stay: the next line replaces this one."""
        if not self.mute:
            try:
                erase = "\r\033[K" * sys.stdout.isatty()
                print(erase + printable(line) + "\033[A" * stay, flush=True)
            except OSError:
                self.mute = True
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def progress(self, step: int, loss: float | None, clock: Clock, tokens: int) -> None:
        """Print a line that stays in place on a terminal; in a pipe print one every few seconds."""
        if self.mute:
            return
        self.loss = self.loss if loss is None else f"loss {loss:.4f}  "
        terminal = sys.stdout.isatty()
        total = self.config.num_steps
        if step == total or time.monotonic() - self.last_line > (0.2 if terminal else 5):
            self.last_line = time.monotonic()
            speed = 1000 * tokens / clock.read()
            left = f"{clock.read() / step * (total - step) / 1000:.0f} s left"
            coming = left if step < total else "validation …"
            line = f"step {step}/{total}  {self.loss}{speed:,.0f} tokens/s  {coming}"
            self.say(line, stay=terminal)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


def start_log(loop: TrainingLoop, resumed: Values | None, changes: list[str]) -> None:
    """Open the log with a description of the run. changes: of the config, for this machine."""
    c = loop.config
    comm = loop.comm
    log = loop.log
    worker = loop.worker
    machine, environment = describe_machine(c, worker.device)
    hosts = describe_hosts(comm, machine)
    if comm.rank:
        return
    params = sum(p.numel() for p in worker.model.parameters())
    started = datetime.now(timezone.utc).isoformat(timespec="seconds")
    now = {"changes": changes, "ranks": comm.ranks, "hosts": hosts, "launch": launch_id()}
    description = {
        "run_id": log.run_id,
        "preset": loop.preset,
        **describe_config(c),
        "started": started,
        **machine,
        **now,
        "parameters": params,
        "vocab_size": loop.shards["train"][0].encoding.vocab_size,
        "shards": {
            split: [
                {
                    "name": shard.path.name,
                    "tokens": shard.tokens,
                    "bytes": HEADER_INTS * 4 + 2 * shard.tokens,
                    "sha256": shard.sha256,
                }
                for shard in shards
            ]
            for split, shards in loop.shards.items()
        },
    }
    paths = checkpoints(log.path.parent, log.run_id)
    given_up = [path for path in paths if step_of(path) > loop.from_step]
    damages = [*filter(None, map(damage_of, given_up))]
    if resumed:
        resumed = {
            "at": started,
            **resumed,
            "damaged": damages,
            "source_sha256": machine["source_sha256"],
            **now,
        }
    log.open(description, environment, resumed)
    for path in given_up:  # a later resume must not take what this one gives up
        path.replace(f"{path}.given_up")
    log.say(
        f"preset {loop.preset}: {comm.ranks} rank(s) on {machine['hardware']['device']},"
        f" {params / 1e6:.1f} M parameters, {c.num_steps} steps on"
        f" {tokens_of_steps(c, c.num_steps):,} tokens, validation on"
        f" {(loop.val_sequences[:, 1:] >= 0).sum():,} tokens"
    )
    for line in (*changes, *damages):
        log.say(line)
    if resumed:
        log.say(f"resuming from step {loop.from_step}")


def finish(loop: TrainingLoop, loss: float, val_tokens: int) -> None:
    """Rank 0: save the model, then write the result."""
    c = loop.config
    clock = loop.clock
    worker = loop.worker
    log = loop.log
    saved_as = ""
    compiles = compile_stats()[0] - loop.compiles
    with clock.off("hashing"):
        final_hash = state_hash(worker)
        digest = all_digest(worker)
        if worker.comm.rank:
            return
        model_hash = hash_of(named_tensors(worker.model))
    # before the log's end: until then the run can be resumed
    if c.save_model:
        with clock.off("saving"):
            saved_as = f"\nmodel: {save_model(loop)}"
    allocated, reserved = peak_memory_mib(worker.device)
    val_bytes = count_bytes(loop.shards["val"][0], loop.val_sequences[:, 1:])
    bits = loss * val_tokens / math.log(2) / val_bytes if val_bytes else None
    reached = loss <= c.target_val_loss
    wall_seconds = clock.state()["wall"]
    result = {
        "final_val_loss": loss,
        "target_val_loss": c.target_val_loss,
        "reached": reached,
        "steps": c.num_steps,
        "train_tokens": tokens_of_steps(c, c.num_steps),
        "train_digest": digest,
        "val_tokens": val_tokens,
        "bits_per_byte": bits,
        "train_time_ms": clock.elapsed,
        "wall_seconds": wall_seconds,
        "seconds_outside_clock": clock.outside,
        "compiles_after_warmup": compiles,
        "state_hash": loop.state_hashes,
        "final_state_hash": final_hash,
        "model_hash": model_hash,
        "changed_by_validation": loop.changed_by_validation,
        "peak_memory_mib": allocated,
        "resumed": log.resumes,
    }
    log.write(json.dumps({"end": result}))
    log.write(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
    verdict = ""
    target = ""
    in_bits = f" ({bits:.4f} bits per byte)" if bits else ""
    if c.target_val_loss:
        verdict = f"target {'reached' if reached else 'missed'}: "
        target = f" target {c.target_val_loss:g},"
    remove_files(spare_files(loop, keep=0))
    log.say(
        f"\n{verdict}validation loss {loss:.4f}{in_bits},{target} after"
        f" {clock.elapsed / 1000:.1f} s of training and {wall_seconds:.0f} s in all{saved_as}"
        f"\nlog: {log.path}"
    )


def profiler_of(loop: TrainingLoop) -> Any:
    """Return a profiler that writes a Chrome trace beside the log; its step() follows each step."""
    begin, end = map(int, loop.config.profile.split(":"))
    log = loop.log
    log.say(
        f"trace of steps {loop.config.profile}:"
        f" {log.path.parent / log.path.stem}-rank*.pt.trace.json.gz"
    )
    # a range for each phase of each bucket
    loop.worker.optimizer.reducer.span = torch.profiler.record_function
    schedule = torch.profiler.schedule(
        wait=max(0, begin - 1), warmup=min(1, begin), active=end + 1 - begin, repeat=1
    )
    write = torch.profiler.tensorboard_trace_handler(
        str(log.path.parent), f"{log.path.stem}-rank{log.rank}", use_gzip=True
    )
    profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profiler.step_num = loop.from_step
    profiler.current_action = profiler.schedule(loop.from_step)
    return profiler


def output_of(*command: str) -> str:
    """Return the output of a command; empty if it cannot run."""
    # without a git hook's variables, which name its repository
    env = {key: value for key, value in os.environ.items() if not re.match("GIT_(?!CONFIG)", key)}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, timeout=30, env=env
        )
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def nvidia_smi(columns: str) -> list[str]:
    """Query nvidia-smi -> a line per GPU, none if it cannot run."""
    return output_of("nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader").splitlines()


def cpu_name(*keys: str) -> str:
    """Return these fields of /proc/cpuinfo; by default the name, which generations may share."""
    with suppress(OSError, KeyError):
        first_cpu = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
        values = dict(re.findall(r"^([\w ]+?)\s*: (.+)$", first_cpu, re.M))
        return "/".join(values[key].strip() for key in keys or ("model name",))
    return platform.processor() or platform.machine()


def source_of(config: Config) -> str:
    """Return the source of the program; of several files each below a line that names it."""
    sources = {path.name: path.read_text(encoding="utf-8") for path in source_files(config)}
    if len(sources) == 1:
        return "".join(sources.values())
    return "".join(f"# file: {name}\n{text}" for name, text in sources.items())


def describe_machine(config: Config, device: torch.device) -> tuple[Values, str]:
    """Return (values for the JSON line, the free text above it)."""
    on_gpu = device.type == "cuda"
    cpu = cpu_name()
    cores = os.cpu_count()
    gpus = [
        dict(zip(("name", "uuid", "driver"), row.split(", ")))
        for row in nvidia_smi("name,uuid,driver_version")
    ]
    text = output_of("nvidia-smi") if on_gpu else f"{cpu}, {cores} cores, {platform.platform()}"
    prefixes = tuple("TORCH PYTORCH TRITON INDUCTOR NCCL GLOO CUDA_ OMP_ PYTHON LD_".split())
    return {
        "hardware": {
            "device": torch.cuda.get_device_name() if on_gpu else cpu,
            "gpus": gpus if on_gpu else [],
            "cpu": cpu,
            "cpu_id": cpu_name("cpu family", "model", "stepping"),
            "cores": cores,
            "threads": torch.get_num_threads(),
        },
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "triton": triton and triton.__version__,
        },
        "environment": {
            key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)
        },
        "source_sha256": sha256_of(source_of(config).encode()),
    }, text


def describe_hosts(comm: Comm, machine: Values) -> list[Values]:
    """Describe each host's ranks and machine. RunError if source or packages differ."""
    agree(
        comm,
        "programs",
        {
            "source_sha256": machine["source_sha256"],
            "python": platform.python_version(),
            **package_versions(),
        },
        "Give every host the same checkout and packages (./run.sh --setup)",
    )
    hosts = {}
    machines = comm.all_gather_json([socket.gethostname(), machine])
    for rank, (name, machine) in enumerate(machines):
        host = hosts.setdefault(f"{name} {machine['hardware']}", {"ranks": [], **machine})
        host["ranks"].append(rank)
    return list(hosts.values())


def package_versions() -> dict[str, str]:
    """Return the versions of torch and, if requirements.txt is here, of its installed packages."""
    pins = ROOT / "requirements.txt"
    versions = {}
    for name in re.findall(r"^([\w-]+)==", pins.read_text(), re.M) if pins.exists() else ():
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {**versions, "torch": torch.__version__}  # with the kind of build


def describe_config(config: Config) -> Values:
    """Describe what the run will do and what it starts from, for its log."""
    git = init_from = race = None
    revision = output_of("git", "rev-parse", "HEAD")
    if revision:
        git = {"revision": revision, "clean": not output_of("git", "status", "--porcelain")}
    if config.init_from:
        sha256 = None if config.resume else file_sha256(ROOT / config.init_from)
        init_from = {"path": config.init_from, "sha256": sha256}
    if config.race:
        race_id, run, declared_n, side = config.race.split(":")
        race = {"race_id": race_id, "run": int(run), "declared_n": int(declared_n), "side": side}
    return {
        "config": json_of(config),
        "seed": config.seed,
        "target_val_loss": config.target_val_loss,
        "planned": {
            "steps": config.num_steps,
            "train_tokens": tokens_of_steps(config, config.num_steps),
        },
        "git": git,
        "init_from": init_from,
        "race": race,
    }


def file_sha256(path: str | Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) on a GPU; on a CPU the largest resident set of the process, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit >> 20
    return resident, resident


# --------------------------------------------------------------------------------------------------
# checkpoint and resume


def named_tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def hash_of(tensors: Sequence[tuple[str, Tensor]]) -> str:
    """Hash the names and bytes of tensors, in the order of their names; several at a time."""

    def line(item: tuple[str, Tensor]) -> str:
        name, x = item
        return f"{name} {sha256_of(x.detach().reshape(-1).view(torch.uint8).cpu().numpy())}\n"

    with ThreadPoolExecutor() as pool:
        lines = pool.map(line, sorted(tensors, key=lambda item: item[0]))
        return sha256_of("".join(lines).encode())


def checksum(*tensors: Tensor) -> int:
    """Hash the bits of tensors and their order: 60 bits, and three times as fast as hash_of.

    Each 32-bit word of a piece has a random factor of 62 bits. The sum of the products wraps modulo
    2 ** 64, where words that differ by a multiple of 2 ** 31, as signs do, still have 33 bits of
    their factors: pieces that differ have equal sums with a probability of about 2 ** -33.
    """
    factors = checksum_factors(tensors[0].device)
    sums = []
    for x in tensors:
        for piece in x.detach().reshape(-1).view(torch.uint8).split(4 * len(factors)):
            words = F.pad(piece, (0, -len(piece) % 4)).view(torch.int32)
            sums.append((words * factors[: len(words)]).sum())
    return int(sha256_of(torch.stack(sums).cpu().numpy())[:15], 16)


@lru_cache
def checksum_factors(device: torch.device) -> Tensor:
    random = torch.Generator("cpu").manual_seed(0)  # the same on all ranks
    # fits a CPU's caches
    return torch.randint(2**62, (2**18,), generator=random, device="cpu").to(device)


def all_digest(worker: Worker) -> str:
    """Return the digest of all that the ranks have read, the same for any number of ranks."""
    digests = worker.comm.all_gather_json(f"{worker.stream.digest:x}")
    return f"{sum(int(digest, 16) for digest in digests) % 2**256:064x}"


def state_hash(worker: Worker) -> str:
    """Hash, on rank 0, all that training continues from: model, rules' state, place in the data."""
    content = [
        *worker.optimizer.named_state(),  # all ranks send their part
        *worker.model.named_buffers(),
        ("stream", torch.tensor(worker.stream.position)),
        ("digest", torch.tensor(list(all_digest(worker).encode()))),
    ]
    return "" if worker.comm.rank else hash_of(content)


def digest_of(content: Values) -> str:
    """Hash a saved file's tensors, under `state`, and the JSON form of its other values."""
    values = {name: v for name, v in content.items() if name not in ("state", "digest")}
    text = hash_of(list(content["state"].items())) + json.dumps(values, sort_keys=True)
    return sha256_of(text.encode())


def save_file(path: Path, content: Values) -> None:
    """Write a file whole or not at all, with a digest of its content. RunError if it fails."""
    content = {**content, "digest": digest_of(content)}
    partial_path = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial_path, "wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    except (OSError, RuntimeError) as error:
        # torch replaces a full disk's error, and an interrupt, by one about its file format
        cause = error.__context__ or error
        if isinstance(cause, KeyboardInterrupt):
            raise cause
        if not isinstance(cause, OSError):
            cause = error
        raise RunError(
            f"{path}: cannot be written ({cause}); free space or choose another --log_dir"
        ) from cause
    finally:
        with suppress(OSError):
            partial_path.unlink()


# (path, time of its last change) of files whose digest was verified
intact = set()


def load_file(path: str | Path, check: bool = True) -> Values:
    """Read what save_file wrote; nothing in it is executed. RunError if it is damaged.

    check=False skips the digest.
    """
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        version = os.path.abspath(path), os.stat(path).st_mtime_ns
        if check and version not in intact:
            if digest_of(saved) != saved["digest"]:
                raise ValueError("its content does not match its digest")
            intact.add(version)
        return saved
    except Exception as error:  # torch.load raises many kinds, and advises to trust the file
        if isinstance(error, OSError) and error.filename:  # it cannot be opened
            raise
        why = error if type(error) is ValueError else type(error).__name__
        raise RunError(
            f"{path}: not a saved model or checkpoint of this version of train_gpt.py, or damaged"
            f" ({why}); name another"
        ) from error


@torch.no_grad()
def load_parameters(model: GPT, saved: Values) -> None:
    """Copy a saved model's or checkpoint's parameters into a model. RunError if they do not fit."""
    params = dict(model.named_parameters())
    tensors = {**params, **persistent_buffers(model)()}
    unknown = [name for name in saved["state"] if "/" not in name and name not in tensors]
    require(
        not unknown,
        f"the saved model also has {', '.join(unknown)}; give this model the --layers, --ngrams"
        " of it",
    )
    for name, tensor in tensors.items():
        x = saved["state"].get(name)
        if x is None and name not in params:  # states of older versions have no buffers
            continue
        require(
            # checkpoints hold them flat
            x is not None and x.shape in (tensor.shape, (tensor.numel(),)),
            f"{name} is {list(tensor.shape)} here and"
            f" {'missing' if x is None else list(x.shape)} in the saved model. Use the same"
            " --layers, --model_dim, --ngrams and vocabulary, and the revision in its log",
        )
        tensor.copy_(x.view(tensor.shape))


# run id, step, what became of the checkpoint
CHECKPOINT = re.compile(r"(.+)\.step(\d+)\.ckpt(\.partial|\.given_up|)")


def step_of(checkpoint: Path) -> int:
    return int(CHECKPOINT.fullmatch(checkpoint.name)[2])


def checkpoints(folder: Path, run_id: str = "", suffix: str = "") -> list[Path]:
    """List the checkpoints of a run (of all) by step; another clock may have set their times."""
    paths = []
    for path in folder.glob("*.ckpt*"):
        parts = CHECKPOINT.fullmatch(path.name)
        if parts and parts[1] == (run_id or parts[1]) and parts[3] == suffix:
            paths.append(path)
    return sorted(paths, key=step_of)


def spare_files(loop: TrainingLoop, keep: int) -> list[Path]:
    """List the files that the run does not need, least needed first.

    Partial files of killed processes; checkpoints later than the one that was resumed; all but the
    latest `keep`.
    """
    run = loop.log.path.parent, loop.log.run_id
    return [
        *checkpoints(*run, ".partial"),
        loop.log.path.with_suffix(".pt.partial"),
        *checkpoints(*run, ".given_up"),
        *checkpoints(*run)[: -keep or None],
    ]


def remove_files(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def save_in_room(loop: TrainingLoop, path: Path, content: Values) -> None:
    """Save a file. While the disk is full, delete a file that the run can spare.

    The latest checkpoint stays.
    """
    spare = spare_files(loop, keep=1)
    while True:
        try:
            return save_file(path, content)
        except RunError as error:
            number = getattr(error.__cause__, "errno", None)
            if not spare or number not in (errno.ENOSPC, errno.EDQUOT):
                raise
            remove_files([spare.pop(0)])


def find_run(config: Config) -> tuple[str, str]:
    """Find (run id, checkpoint to resume from). No checkpoint: the run starts at step 0."""
    path = Path(config.resume)
    path = path if path.exists() else ROOT / path
    folder = path.parent
    if config.resume in ("", "latest"):
        folder = ROOT / config.log_dir
    logs = [log for log in folder.glob("*.txt") if restarts() and is_of_this_launch(log)]
    if logs:  # torchrun has restarted the ranks: they continue their run
        run_id = max(logs, key=os.path.getmtime).stem
    elif not config.resume:
        return config.run_id or f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{launch_id()}", ""
    elif config.resume == "latest":
        newest = max(checkpoints(folder), key=saved_at, default=Path())
        run_id = config.run_id or newest.name.rpartition(".step")[0]
    else:
        require(
            path.exists(), f"--resume {config.resume}: no such file; name a .ckpt, a log or latest"
        )
        if path.suffix == ".ckpt" and path.is_file():
            return config.run_id, str(path.resolve())
        run_id = path.stem
    paths = checkpoints(folder, run_id) if run_id else []
    require(
        paths or not config.resume,
        f"--resume {config.resume}: found no checkpoint in {folder}. Name a .ckpt, or "
        "the log of a run that left one (--save_every). A run that has finished keeps none",
    )
    return run_id, str(latest_intact(paths).resolve()) if paths else ""


def saved_at(checkpoint: Path) -> float:
    """Return when a checkpoint was saved, by its content: it may be a copy. 0 if unreadable."""
    with suppress(RunError):
        return load_file(checkpoint, check=False)["saved_at"]
    return 0.0


def latest_intact(paths: list[Path]) -> Path:
    """Return the last of these checkpoints that is not damaged. RunError if all are."""
    damages = []
    for path in reversed(paths):
        damage = damage_of(path)
        if not damage:
            return path
        damages.append(damage)
    raise RunError(f"{'; '.join(damages)}. No checkpoint of the run is intact; start it again")


def damage_of(path: Path) -> str:
    """Say how a saved file is damaged; empty if it is not."""
    try:
        load_file(path)
        return ""
    except RunError as error:
        return str(error).removesuffix("; name another")


def save_checkpoint(loop: TrainingLoop, step: int, stop: bool = False) -> None:
    """Save all ranks' state before a step; then stop if a signal asked for it.

    The file is the same for any number of ranks. Without room for it training continues.
    """
    worker = loop.worker
    log = loop.log
    path = log.path.with_name(f"{log.run_id}.step{step:06}.ckpt")
    stop = stop or any(stops for asked, stops in loop.losses.save_at.items() if asked <= step)
    with loop.clock.off("checkpoint"):
        loop.losses.write(step, wait=True)
        digest = all_digest(worker)
        state = {}
        for name, x in worker.optimizer.named_state():  # all ranks gather it, rank 0 keeps it
            if loop.comm.rank == 0:
                state[name] = x.detach().to("cpu", copy=True)
        if loop.comm.rank == 0:
            content = {
                **describe_model(loop, step),
                "state": state,
                "position": list(worker.stream.position),
                "train_digest": digest,
                "preset": loop.preset,
                "clock": loop.clock.state(),
                "saved_at": time.time(),
                "data": digests_of(loop.shards),
            }
            try:
                save_in_room(loop, path, content)
            except RunError as error:
                log.say(f"no checkpoint: {error}")
                if stop:
                    raise
            else:
                remove_files(spare_files(loop, loop.config.keep_checkpoints))
    if stop:
        # a rank that leaves earlier would end rank 0 while it writes
        loop.comm.all_gather_json("saved")
        what = "terminated" if signals.again_from == math.inf else INTERRUPTED
        raise RunError(f"{what} before step {step}; --resume {log.path} continues from there")


def save_model(loop: TrainingLoop) -> Path:
    """Save the trained parameters and persistent buffers beside the log."""
    path = loop.log.path.with_suffix(".pt")
    model = loop.worker.model
    tensors = {**dict(model.named_parameters()), **persistent_buffers(model)()}
    state = {name: x.detach().cpu() for name, x in tensors.items()}
    save_in_room(loop, path, {**describe_model(loop, loop.config.num_steps), "state": state})
    return path


def describe_model(loop: TrainingLoop, step: int) -> Values:
    """Describe what rebuilds the model before a step, on any machine."""
    return {
        "run_id": loop.log.run_id,
        "program": source_files(loop.config)[0].name,
        "config": json_of(loop.requested),
        "step": step,
        **loop.shards["train"][0].encoding._asdict(),
    }


def digests_of(shards: dict[str, list[Shard]]) -> list[str]:
    return [shard.sha256 for split in shards.values() for shard in split]


def resume(loop: TrainingLoop) -> Values | None:
    """Load the config's checkpoint -> what the log says about it; None for a new run."""
    path = loop.config.resume
    worker = loop.worker
    if not path:
        return {"from_step": 0, "checkpoint": None} if restarts() else None
    saved = load_file(path)
    # --resume took the config from this checkpoint; after a restart by torchrun flags made it
    config = config_of(saved["config"], type(loop.config))
    differ = [
        name
        for name in fixed_fields(config)
        if getattr(loop.requested, name) != getattr(config, name)
    ]
    require(
        not differ,
        f"{path} belongs to a run with another {', '.join(differ)}. Delete it, or give this run its"
        " own --run_id and torchrun its own --rdzv_id",
    )
    require(
        saved["data"] == digests_of(loop.shards), f"the shards are not those of {path}; name those"
    )
    agree(
        loop.comm,
        "checkpoints",
        {"the digest": saved["digest"]},
        f"Give every host the same {Path(path).name}",
    )
    worker.optimizer.load_state_dict(saved["state"])
    worker.stream.position = Position(*saved["position"])
    # the digest is a sum over ranks: rank 0 holds the past
    worker.stream.digest = int(saved["train_digest"], 16) if loop.comm.rank == 0 else 0
    loop.clock.load_state(saved["clock"])
    loop.from_step = saved["step"]
    return {
        "from_step": loop.from_step,
        "checkpoint": Path(path).name,
        "lost_seconds": max(0.0, time.time() - saved["saved_at"]),
    }


# --------------------------------------------------------------------------------------------------
# machine and main


def env_int(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    require(
        text.isdecimal(),
        f"{name} in the environment is {text!r}; unset it, or start the ranks by torchrun",
    )
    return int(text)


def restarts() -> int:
    """Count how often torchrun has restarted the ranks of this launch."""
    return env_int("TORCHELASTIC_RESTART_COUNT", 0)


def count_gpus() -> int:
    """Count the GPUs that torch can use. RunError if the driver shows some that it cannot use."""
    seen = torch.cuda.device_count()
    require(
        not seen or torch.cuda.is_available(),
        f"torch {torch.__version__}, built for CUDA {torch.version.cuda}, cannot use the {seen}"
        " GPU(s) of this machine: update the driver, install torch's build for an older CUDA as the"
        " README says, or train on the CPU: CUDA_VISIBLE_DEVICES= ./run.sh",
    )
    return seen


def count_cores() -> int:
    """Count the cores that this process may use; Slurm or a container may give it few."""
    cores = os.cpu_count() or 1
    # not Linux; or "max 100000", without a quota
    with suppress(AttributeError, OSError, ValueError):
        cores = len(os.sched_getaffinity(0))
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        cores = min(cores, -(-quota // period))
    return cores


def cpu_threads(config: Config, local_ranks: int) -> int:
    """Choose the threads of a rank on a CPU.

    A small model gets one: two save a fifth of the time on a quiet machine, but on a busy one each
    waits for the other tens of thousands of times.
    """
    return 1 if config.model_dim <= 128 else max(1, count_cores() // local_ranks)


def resolve_auto(config: Config, comm: Comm) -> tuple[Config, list[str]]:
    """Resolve what depends on the GPUs, alike on all ranks -> the config, what it changed."""
    lengths = (*sorted(micro_batch_lengths(config)), config.val_len)
    require(
        not any(n % TILE_M for n in lengths),
        f"micro-batches and val_len have {', '.join(map(str, lengths))} "
        f"tokens; on GPUs they must be multiples of {TILE_M}",
    )
    global flash_3
    local_capability = torch.cuda.get_device_capability()
    changes = []
    capability = min(comm.all_gather_json(local_capability))
    columns = min(comm.all_gather_json(tile_columns(torch.cuda.get_device_properties())))
    if config.fp8_head and capability < [8, 9]:
        config = replace(config, fp8_head=False)
        changes.append("this GPU has no fp8: products stay in bf16")
    plain_forms = sys.modules[config.model_type.__module__].PLAIN_FORMS
    edited = [kernel for kernel, form in plain_forms.items() if is_edited(*form)]
    for kernel in edited:
        effect = "it is computed as written, without its kernel, and more slowly"
        flag = config.attention if kernel == "attention" else config.kernels
        if flag in ("flash", "on", kernel):
            effect = (
                "--kernels or --attention asks for the kernel, which ignores the edit; leave that"
                " flag out"
            )
        changes.append(f"the plain form of {kernel} was edited: {effect}")
    if config.attention == "auto":
        fits = (
            capability >= [8, 0]
            and config.dtype == "bfloat16"
            and not config.world_size_invariant
            and "attention" not in edited
        )
        config = replace(config, attention="flash" if fits else "masked")
    why = find_flash_3() if config.attention == "flash" and local_capability[0] == 9 else ""
    why = max(comm.all_gather_json(why))
    if why:
        flash_3 = None  # on all ranks
        changes.append(
            f"FlashAttention 3 is not used ({why}): using torch's own version; see docs/gpus.md"
        )
    if config.kernels == "auto":
        kernels = "on"
        if triton is None or "loss" in edited:
            kernels = "off"
        elif not columns or "MLP" in edited:
            kernels = "loss"
        config = replace(config, kernels=kernels)
    return config, changes


# Plain PyTorch code that GPU kernels repeat, and the start of that code's SHA-256. A kernel would
# ignore an edit of the plain code, and a race of the edit would measure nothing: where the digest
# differs, resolve_auto runs the plain code. If you change a kernel too, write the new digest, which
# tests/test_config.py prints
PLAIN_FORMS = {
    "MLP": ((MLP.forward,), "23bd82f3"),
    "loss": ((Head.forward, Head.uncapped_logits, Softcap.__call__), "626dfba7"),
    "attention": ((attend, cut_in_pieces, seen_by_pieces, mask_in_pieces), "cf6298f3"),
}


def is_edited(forms: Sequence[Callable], digest: str) -> bool:
    """Find out whether plain code differs from what was written with its kernel."""
    code = "".join(code_of(inspect.getsource(form)) for form in forms)
    return sha256_of(code.encode())[:8] != digest


def code_of(source: str) -> str:
    """Return the code of Python source, without comments, docstrings and formatting."""

    def plain(x: Any) -> Any:  # ast.unparse and ast.dump differ between versions of Python
        if isinstance(x, list):
            return [
                plain(y)
                for y in x
                if not isinstance(y, ast.Expr) or not isinstance(y.value, ast.Constant)
            ]
        if isinstance(x, ast.AST):
            return type(x).__name__, [
                (name, plain(v)) for name, v in ast.iter_fields(x) if v not in (None, [])
            ]
        return x

    # a method is indented
    return repr(plain(ast.parse(f"if 1:\n{source}" if source.startswith(" ") else source)))


def with_digests(shards: list[Shard], comm: Comm, local_rank: int) -> list[Shard]:
    """Add the shards' SHA-256, which a rank of each host computes. RunError if hosts differ."""
    paths = [shard.path for shard in shards if local_rank == 0]
    with ThreadPoolExecutor() as pool:
        local_digests = dict(zip((path.name for path in paths), pool.map(file_sha256, paths)))
    digests, *others = filter(None, comm.all_gather_json(local_digests))
    for other in others:
        differ = sorted({name for name, _ in digests.items() ^ other.items()})
        require(
            not differ,
            f"shard {', '.join(differ)} differs between hosts; give every host the same data",
        )
    return [shard._replace(sha256=digests[shard.path.name]) for shard in shards]


def find_data(config: Config, comm: Comm) -> dict[str, list[Shard]]:
    """Find the training and validation shards, the same on all ranks and in one encoding."""
    train = find_shards(config.train_files, config.train_shards)
    val = find_shards(config.val_files)
    require(
        train[0].encoding == val[0].encoding,
        f"the training shards have {train[0].encoding}, the validation "
        f"shards {val[0].encoding}; make both with one encoding",
    )
    local_rank = env_int("LOCAL_RANK", 0)
    return {
        "train": with_digests(train, comm, local_rank),
        "val": with_digests(val, comm, local_rank),
    }


class Signals:
    """Save a checkpoint on SIGUSR1; save one and stop on Ctrl-C, SIGTERM, SIGHUP and SIGUSR2.

    SIGUSR2 says that the launcher has died. A second Ctrl-C ends the run at once. Before training,
    and in a race, which repeats whole runs, they end the process, even if it waits for others.
    """

    STOPS = tuple(
        number
        for number in signal.Signals
        if number.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2")
    )
    STOP = 1024  # what a stop adds to `received`; SIGUSR1 adds 1

    # for the last checkpoint when the launcher is gone, as torchrun gives; then a hanging rank ends
    GRACE_S = 30
    # torchrun forwards a Ctrl-C that the terminal has already sent to the ranks; ignore that copy
    MOMENT_S = 1

    received = 0
    stop = False
    again_from = math.inf

    def handle(self, number: int, _) -> None:
        if number == signal.SIGUSR1:
            self.received += 1
        elif not self.stop:
            self.stop = True
            self.received += self.STOP
            if number == signal.SIGINT:
                self.again_from = time.monotonic() + self.MOMENT_S
                if os.environ.get("RANK", "0") == "0":
                    os.write(
                        2,
                        b"\ntrain_gpt.py: saving a checkpoint, then stopping; Ctrl-C again ends at"
                        b" once\n",
                    )
        elif time.monotonic() > self.again_from:  # torchrun makes a SIGTERM of the second
            self.again_from = math.inf
            raise KeyboardInterrupt
        if number == signal.SIGUSR2:
            signal.alarm(self.GRACE_S)  # its default action ends the process

    @contextmanager
    def caught(self) -> Iterator[None]:
        """Handle STOPS until the run is written. nohup's ignored SIGHUP stays ignored."""
        before = {number: signal.getsignal(number) for number in self.STOPS}
        for number, action in before.items():
            if action is not signal.SIG_IGN:
                signal.signal(number, self.handle)
        yield  # after an error they stay handled: fail() reports it first
        for number, action in before.items():
            signal.signal(number, action)


signals = Signals()

PROCESS = uuid.uuid4().hex


def launch_id() -> str:
    """Name this launch, alike after torchrun's restarts. Without torchrun it is a process."""
    launch = os.environ.get("TORCHELASTIC_RUN_ID", PROCESS)
    return sha256_of(f"{launch} {os.getppid() if launch == 'none' else ''}".encode())[:8]


def is_of_this_launch(log: Path) -> bool:
    """Whether this launch has written to a log."""
    return f'"launch": "{launch_id()}"' in log.read_text(encoding="utf-8", errors="replace")


# what gloo and NCCL say when another rank is gone or does not come
LOST = re.compile(
    r"timed? ?out|connection (was |is )?(closed|reset|refused)|broken pipe|socket|closed by peer",
    re.I,
)


def is_lost(error: BaseException) -> bool:
    """Return whether a message or collective, not a racer's code, says that a rank is gone."""
    of_gloo = type(error) is RuntimeError and re.match(
        r"\[\S*gloo/|Application timeout|.*rank.* has ended", str(error)
    )
    return bool((of_gloo or isinstance(error, dist.DistError)) and LOST.search(str(error)))


def join(config: Config, rank: int, ranks: int, device: torch.device) -> dist.Store:
    """Form the process group -> its store. RunError if the other ranks cannot be reached."""
    timeout = timedelta(seconds=config.timeout_s)
    gpu = device.type == "cuda"
    # ahead of matrix products
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True) if gpu else None
    if gpu:
        options._timeout = timeout  # or torch warns that it is overridden
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timeout))
        # torchrun keeps its store when it restarts the ranks, with what they wrote before
        store = dist.PrefixStore(f"life-{restarts()}", store)
        dist.init_process_group(
            "nccl" if gpu else "gloo",
            store=store,
            rank=rank,
            world_size=ranks,
            timeout=timeout,
            device_id=device if gpu else None,
            pg_options=options,
        )
    except (ValueError, RuntimeError) as error:
        raise RunError(
            f"the {ranks} ranks did not find each other ({first_line(error)}); start them by "
            "torchrun --nproc_per_node, and check that all of them are alive"
        ) from error
    return store


INTERRUPTED = "interrupted"


def describe_error(error: BaseException, config: Config) -> str:
    """Say in one line what was seen and what to do; empty for a bug, which needs its traceback."""
    if isinstance(error, RunError):
        return str(error)
    # torch may run a second signal's handler with the first one's exception set; Python makes a
    # SystemError of that
    if isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, torch.OutOfMemoryError):
        return (
            f"{first_line(error)}; raise --micro_batch_splits, or start by ./run.sh, which"
            " chooses it"
        )
    if isinstance(error, OSError) and error.errno:
        cure = "mend that, or name another file"
        if error.errno in (errno.ENOSPC, errno.EFBIG):
            cure = "free space or choose another --log_dir"
        elif error.errno == errno.EMFILE:
            cure = "raise the limit on open files (ulimit -n 1024)"
        return (
            f"{error.filename or config.log_dir}: cannot be read or written ({error.strerror});"
            f" {cure}"
        )
    if is_lost(error):
        return (
            f"another rank did not answer ({first_line(error)}). It was killed (perhaps out of"
            f" memory), or it is slower than --timeout_s {config.timeout_s}"
        )
    return ""


def first_failure(store: dist.Store | None, rank: int, message: str, lost: bool) -> str:
    """Return the failure that the ranks report: the first that one of them stored.

    Empty: the launcher stops this rank because another one ended. lost: this rank saw only that
    another one is gone, and waits for its reason.
    """
    failure = f"rank {rank}: {message}"
    with suppress(RuntimeError):  # the store went with its host or launcher
        until = time.monotonic() + 5  # under load a question to the store takes long
        while lost and store and time.monotonic() < until:
            if store.check(["failure"]):
                return store.get("failure").decode(errors="surrogateescape")
            if signals.stop:
                return ""
            time.sleep(0.1)
        if rank:  # ranks that see the same error let rank 0 report it
            time.sleep(0.5)
        if store:
            sent = failure.encode(errors="surrogateescape")  # a file's name may be no UTF-8
            return store.compare_set("failure", "", sent).decode(errors="surrogateescape")
    return "" if signals.stop and lost else failure


def fail(
    error: BaseException, config: Config, rank: int, log: Log | None, store: dist.Store | None
) -> int:
    """Report a rank's failure to the log, other ranks and, if first, stderr -> the exit status."""
    lost = store is not None and is_lost(error)
    signals.again_from = math.inf
    if store and threading.current_thread() is threading.main_thread():
        for number in Signals.STOPS:  # the launcher sends SIGTERM when the first rank ends
            signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signals.handle)
    message = describe_error(error, config)
    status = 130 if message.startswith(INTERRUPTED) else 1
    if not message:
        traceback.print_exception(error)
        message = f"{type(error).__name__}: {error}"
    failure = f"rank {rank}: {message}"
    reported = failure
    with suppress(NoAnswer):  # a store on a lost host does not answer
        reported = ThreadPoolExecutor(1).submit(first_failure, store, rank, message, lost).result(8)
    is_first = reported == failure
    advice = ""
    if log is not None and log.file is not None:
        with suppress(OSError, RunError):
            line = message if is_first else reported or message
            log.write(without_folders(f"error: {line}"))
            advice = f"; the log so far: {log.path}"
        # of a full disk; Python 3.13 reports a file that is still open at the end
        with suppress(OSError):
            log.close()
        if "--resume" not in message:
            if checkpoints(log.path.parent, log.path.stem):
                advice += f"; --resume {log.path} continues from its last checkpoint"
            else:
                advice += "; there is no checkpoint to resume from, --save_every keeps some"
    with suppress(OSError):
        if is_first:
            label = "error: " * (status != 130)
            line = f"rank {rank}: {label}{printable(message)}{advice}"
            print(f"{source_files(config)[0].name}: {line}", file=sys.stderr, flush=True)
            if os.environ.get("TORCHELASTIC_ERROR_FILE"):  # what torchrun reports
                from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                get_error_handler().record_exception(error)
    if store is not None:  # leaving the process group in order would wait for ranks that are gone
        os._exit(status)
    return status


def process_start() -> float:
    """Return when this process started, by time.perf_counter; if unknown, when this file did."""
    try:
        # since the machine's start
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):  # not Linux
        return IMPORTED
    return time.perf_counter() - age


def main(presets: dict[str, Config], argv: Sequence[str], began: float | None = None) -> int:
    """Run one rank, as torchrun started it, or the only one; return the exit status.

    presets: of one class of configs, which names all that a run is built from; the first is for
    GPUs. began: see Clock.
    """
    began = began or time.perf_counter()
    rank = 0
    log = None
    store = None
    config = next(iter(presets.values()))
    try:
        rank, ranks, local_rank = map(env_int, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), (0, 1, 0))
        # the next run and all ranks use what they compile
        for library in ("TORCHINDUCTOR", "TRITON"):
            os.environ.setdefault(f"{library}_CACHE_DIR", str(ROOT / ".cache" / library.lower()))
        gpus = count_gpus()
        preset, config = parse_config(argv, "speedrun" if gpus else "laptop", presets)
        check_config(config, ranks)
        run_id, checkpoint = find_run(config)
        log = Log(config, rank, run_id)
        device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
        # torch reads others, such as 2,1
        if not gpus and os.environ.get("OMP_NUM_THREADS", "").strip() in ("", "0"):
            torch.set_num_threads(cpu_threads(config, env_int("LOCAL_WORLD_SIZE", 1)))
        if gpus:
            require(
                local_rank < gpus,
                f"rank {rank} has no GPU: this machine has {gpus}; lower --nproc_per_node",
            )
            torch.cuda.set_device(device)
            # without it, autograd's thread may have no CUDA context yet (pytorch issue 124565)
            torch.empty(1, device=device, requires_grad=True).backward()
        if ranks > 1:
            store = join(config, rank, ranks, device)
        comm_type = CompressedComm if config.bf16_compress else Comm
        comm = comm_type(rank, ranks, device, timedelta(seconds=config.timeout_s))
        log.run_id, checkpoint = comm.all_gather_json([run_id, checkpoint])[0]  # rank 0's
        config = replace(config, resume=config.resume or checkpoint)
        agree(
            comm,
            "configs",
            {key: str(v) for key, v in json_of(config).items()},
            "Start every rank with the same flags, and give every host the same checkpoints",
        )
        TrainingLoop(config, preset, comm, device, log, began).run()
        log.close()
        if ranks > 1:
            dist.destroy_process_group()
        return 0
    except SystemExit:  # the parser's
        raise
    except BaseException as error:
        return fail(error, config, rank, log, store)
    finally:
        gc.unfreeze()


def start(presets: dict[str, Config]) -> NoReturn:
    """Be the program: run main on the process's own arguments, then exit.

    A module beside the program is refused, for the log would lack its source.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGUSR1, signals.handle)
    if sys.stdout is not None:
        # a path may have letters that the terminal lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    for name, module in sys.modules.items():
        file = getattr(module, "__file__", None) or ""
        known = sys.prefix in file or name in ("__main__", "__mp_main__", __name__)
        if file.startswith(f"{ROOT}/") and not known:
            sys.exit(
                f"{sys.argv[0]}: error: it imports {name}, a file beside it, and the log would not"
                f" hold {file}; put the code into {sys.argv[0]}"
            )
    sys.exit(main(presets, sys.argv[1:], process_start()))


if __name__ == "__main__":
    start(PRESETS)
