"""A GPT speedrun: train a GPT-2-small-sized model to a validation loss of 3.28 on FineWeb, as fast as it can.

    ./run.sh                                          set up, fetch the data, race: any machine, nothing else to know
    torchrun --nproc_per_node=8 train_gpt.py          the record's run, by hand
    python train_gpt.py --preset laptop --help        one rank; every value of the config is a flag

This file is the whole experiment: its source opens the log of every run that it makes. Read it from top to bottom:

    config         every value that decides a run, a reason beside each; two presets; flags made from the fields
    data           shards, the packing of documents, a stream that loads ahead
    model          what one rank computes; it does not know that there are others
    update rules   Adam and NorMuon: pure functions on one shard
    banks          parameters and gradients of one kind in one contiguous buffer each
    communication  Comm names the collectives; the optimizer launches, waits, updates, gathers
    assignment     which parameter is updated by which rule
    schedules      step -> number
    validation, log, checkpoint
    main           set-up, warm-up, the loop

One gradient's way: autograd makes it; the hook adds it into its slot of the bank; when all of the bank have come, the
bank's reduce-scatter starts while backward goes on; the step waits for it, updates this rank's shard with the bank's
rule, and starts the all-gather that puts the new values where the model reads them.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import functools
import glob
import hashlib
import itertools
import json
import math
import os
import platform
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Callable, Iterator, NamedTuple, NoReturn, Sequence

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

ROOT = Path(__file__).resolve().parent

class RunError(Exception):
    """Something the user can mend: the message says what was seen, what is wanted and what to do."""

# ------------------------------------------------------------------------------------------------------------------
# config

def value(default: Any, why: str, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"why": why, "choices": choices})

@dataclass(frozen=True)
class Config:
    """Every value that decides a run. The defaults are the preset `speedrun`: record 44, to the letter."""

    seed: int = value(0, "decides the initial parameters and, where documents are shuffled, their order")
    target_val_loss: float = value(3.28, "what the run is to reach, in nats a token")

    # data
    train_files: str = value("data/fineweb10B/fineweb_train_*.bin", "relative paths start at this script's folder")
    val_files: str = value("data/fineweb10B/fineweb_val_*.bin", "as above")
    train_shards: int = value(9, "shards to use, in the order of their names (0: all); nine are enough for the record")
    max_len: int = value(2048, "a training document ends here; keeps a batch from being one long document")
    long_documents: str = value("cut", "cut: skip what is beyond max_len. split: it makes further documents, each "
                                "opened by a BOS in place of its first token", ("cut", "split"))
    shuffle: bool = value(False, "documents of a shard in an order drawn from the seed (FineWeb is shuffled as it is)")
    batch_tokens: int = value(8 * 2048 * 16, "tokens a step, over all ranks")
    micro_tokens: int = value(2048 * 16, "tokens of one forward and backward: one packed sequence, a slot of the batch")
    val_tokens: int = value(10_485_760, "tokens to validate on, from the start of the split (0: the whole split)")
    val_len: int = value(4 * 64 * 1024, "tokens of one validation sequence")
    val_every: int = value(250, "steps between validations; there is one at the end in any case")

    # model
    layers: str = value("- S1M S2M SM LM SM SM M SM S0M S1M L2M", "a word a layer: S or L, attention with the short or "
                        "the long window; a digit, the value table mixed in; M, an MLP; -, nothing at all")
    model_dim: int = value(768, "width of the residual stream")
    num_heads: int = value(6, "attention heads")
    head_dim: int = value(128, "width of a head; num_heads * head_dim must be model_dim")
    gate_dim: int = value(12, "entries of the stream that open a head's gate and the smear gate")
    backout_layer: int = value(8, "the layer whose output is partly taken back before the head")
    dtype: str = value("bfloat16", "of embeddings, head, gates, activations, Adam's moments, NorMuon's products; "
                       "matrices are float32 (a CPU without bf16 units wants float32)", ("bfloat16", "float32"))
    fp8_head: bool = value(True, "the head's training product in fp8, on GPUs that have it")

    # schedules
    num_steps: int = value(2245, "steps in all, the extension included")
    extension_steps: int = value(40, "the last of them, at the longest training window and the lowest learning rate")
    cooldown: float = value(0.5, "fraction of the scheduled steps over which the learning rate falls")
    lr_floor: float = value(0.1, "what is left of it at the end, as a fraction")
    window_block: int = value(128, "tokens in a block; windows are counted in blocks")
    windows: str = value("3 7 11", "the long window in equal parts of the scheduled steps; the short one is half")
    extension_window: int = value(13, "the long window of the extension")
    final_window: int = value(20, "the long window of the last validation; the rotary is not stretched for it")

    # optimizers
    adam_lr: float = value(0.008, "base of the multipliers that follow")
    adam_beta1: float = value(0.65, "short memory: by a token's next gradient the last one is old")
    adam_beta2: float = value(0.95, "likewise")
    adam_eps: float = value(1e-8, "keeps a parameter without gradient where it is")
    adam_every: int = value(2, "Adam steps every so many steps, on the sum of their gradients")
    embed_lr_mul: float = value(75.0, "embeddings start at unit scale and must move far")
    scalar_lr_mul: float = value(5.0, "mixing weights: faster than the head, slower than embeddings")
    muon_lr: float = value(0.03, "size of an orthogonal update")
    muon_weight_decay: float = value(1.2, "times muon_lr, where it agrees with the update in sign")
    muon_momentum: float = value(0.95, "after its rise and before its fall")
    muon_momentum_low: float = value(0.85, "where it rises from and falls to")
    muon_momentum_rise: int = value(300, "steps of the rise")
    muon_momentum_fall: int = value(50, "steps of the fall, at the end of the run")
    muon_beta2: float = value(0.95, "memory of the second moment of the orthogonal update")
    fc_lr_mul: float = value(2.0, "the MLP's first matrix learns faster")

    # gradient sync
    sync: str = value("hook", "hook: reduce-scatter starts in backward. step: not before the step", ("hook", "step"))
    bank_mb: float = value(72.0, "MiB of parameters at which a bank is full (0: a bank a parameter); the default is 8 "
                           "of the record's largest matrices, one a rank")
    walk: str = value("launch", "order of the step over banks: as launched, or first layer on", ("launch", "forward"))
    lazy_gather: bool = value(False, "the next forward waits for new parameters, where it reads them")
    fp32_grads: bool = value(False, "sum and exchange the gradients of bf16 parameters in float32")
    compress_grads: bool = value(False, "send gradients in bf16")
    unused: bool = value(False, "parameters may go without gradient; what no rank used stays untouched")
    check_grads: bool = value(False, "stop before a step with a gradient that is not finite (a GPU waits for it)")
    clip_norm: float = value(0.0, "scale gradients down to this norm over all that update in a step (0: never)")
    exact: bool = value(False, "the same bytes at any number of ranks: fixed trees of sums, one thread, no batches")

    # machine
    compile: str = value("auto", "blocks, head and rules, each by itself. auto: on GPUs", ("auto", "on", "off"))
    warmup_steps: int = value(30, "before the clock: every window and kind of step once, then everything is put back")
    timeout_s: int = value(300, "seconds until a collective that others do not join is an error")
    profile: str = value("", "A:B writes a Chrome trace of the steps A to B beside the log, one a rank")

    # log and what comes after
    log_dir: str = value("logs", "relative paths start at this script's folder")
    run_id: str = value("", "name of the log (empty: the time and a random part)")
    train_loss_every: int = value(10, "steps between training losses in the log")
    save_model: bool = value(False, "keep the trained parameters beside the log, for evaluation by another process")
    sample_tokens: int = value(0, "tokens of text sampled from the trained model, outside the clock")
    race_id: str = value("", "set by the racing tool: which race this run belongs to")
    race_run: int = value(0, "set by the racing tool: number of this run within its race")
    race_runs: int = value(0, "set by the racing tool: runs declared before the first one")
    race_side: str = value("", "set by the racing tool: which of two versions this is")

    @property
    def slots(self) -> int:
        """Packed sequences in a batch: micro-batches of a step, over all ranks."""
        return self.batch_tokens // self.micro_tokens

PRESETS = {
    "speedrun": Config(),
    # the same code, small: bytes of the standard library on two CPU cores
    "laptop": Config(
        target_val_loss=1.40, train_files="data/stdlib/stdlib_train_*.bin", val_files="data/stdlib/stdlib_val_*.bin",
        train_shards=0, max_len=257, long_documents="split", shuffle=True, batch_tokens=8 * 256, micro_tokens=256,
        val_tokens=0, val_len=1024, val_every=160, layers="S0M S1M S0M L1M", model_dim=192, num_heads=3, head_dim=64,
        backout_layer=2, dtype="float32", fp8_head=False, num_steps=320, extension_steps=20, window_block=32,
        windows="4 8", extension_window=8, final_window=12, adam_every=2, muon_momentum_rise=60,
        muon_momentum_fall=20, bank_mb=1.0, check_grads=True, warmup_steps=4, train_loss_every=1, sample_tokens=300,
    ),
}

class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line instead of the usage, which would list every flag."""
        unknown = re.match(r"unrecognized arguments: (--[^ =]+)", message)
        near = difflib.get_close_matches(unknown[1], self._option_string_actions, 1) if unknown else []
        hint = f"did you mean {near[0]}? " if near else ""
        self.exit(2, f"train_gpt.py: error: {message}; {hint}--help lists every flag and what it takes\n")

def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="train_gpt.py", description=__doc__.split("\n\n")[0], allow_abbrev=False,
        usage="train_gpt.py [--preset NAME] [--flag VALUE ...]",
        epilog="Every flag is a field of the config; its default is the preset's.")
    parser.add_argument("--preset", choices=PRESETS, help="where the values below come from (default: speedrun on a "
                        "machine with a GPU, laptop elsewhere)")
    for f in dataclasses.fields(Config):
        defaults = " | ".join(dict.fromkeys(str(getattr(preset, f.name)) for preset in PRESETS.values()))
        kind = {"int": int, "float": float, "str": str, "bool": parse_bool}[f.type]
        choices, why = f.metadata["choices"] or None, f.metadata["why"]
        parser.add_argument(f"--{f.name}", type=kind, choices=choices, metavar=None if choices else f.type.upper(),
                            help=f"{why} ({defaults or 'empty'})")
    return parser

def parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a truth value: write true or false")
    return text.lower() == "true"

def parse_config(argv: Sequence[str], default_preset: str) -> tuple[str, Config]:
    """Flags -> the preset's name and the config. Leaves by SystemExit on a flag that is unknown or ill-typed."""
    given = {name: v for name, v in vars(make_parser().parse_args(argv)).items() if v is not None}
    preset = given.pop("preset", default_preset)
    return preset, dataclasses.replace(PRESETS[preset], **given)

def profiled_steps(config: Config) -> range:
    first, last = map(int, config.profile.split(":"))
    return range(first, last + 1)

class Layer(NamedTuple):
    """What is in one layer: the window of its attention (S, L or none), its value table, whether it has an MLP."""

    window: str | None
    value_table: int | None
    mlp: bool

def parse_layers(words: str) -> tuple[Layer, ...]:
    """`S1M` -> Layer("S", 1, True); see Config.layers. RunError on a word that is none."""
    def parse(word: str) -> Layer:
        rest = "" if word == "-" else word
        window, rest = (rest[0], rest[1:]) if rest[:1] in ("S", "L") else (None, rest)
        table, rest = (int(rest[0]), rest[1:]) if window and rest[:1].isdecimal() else (None, rest)
        if rest not in ("", "M"):
            raise RunError(f"layers: {word!r} is not a layer; write S or L, perhaps a digit, perhaps M; or M; or -")
        return Layer(window, table, rest == "M")
    return tuple(map(parse, words.split()))

def check_config(config: Config, ranks: int) -> None:
    """RunError, with every finding, if the values are impossible by themselves or for this number of ranks."""
    c, wrong = config, []

    def want(holds: Any, message: str) -> None:
        if not holds:
            wrong.append(message)

    below_one = ("adam_beta1", "adam_beta2", "muon_beta2", "muon_momentum", "muon_momentum_low")
    zero_or_more = {"seed", "train_shards", "val_tokens", "val_every", "extension_steps", "cooldown", "lr_floor",
                    "adam_lr", "embed_lr_mul", "scalar_lr_mul", "muon_lr", "muon_weight_decay", "muon_momentum_rise",
                    "muon_momentum_fall", "fc_lr_mul", "backout_layer", "bank_mb", "clip_norm", "warmup_steps",
                    "train_loss_every", "sample_tokens", "race_run", "race_runs", *below_one}
    for f in dataclasses.fields(c):
        v = getattr(c, f.name)
        if f.type in ("int", "float"):
            least = "0 or more" if f.name in zero_or_more else "more than 0"
            want(math.isfinite(v) and (v > 0 or v == 0 and f.name in zero_or_more),
                 f"{f.name} is {v}; it must be {least}, and finite")
    for name in below_one:
        want(getattr(c, name) < 1, f"{name} is {getattr(c, name)}; it must be less than 1")
    for name in ("cooldown", "lr_floor"):
        want(getattr(c, name) <= 1, f"{name} is {getattr(c, name)}; it must be at most 1")
    for name, most in (("seed", 2 ** 63 - 1), ("timeout_s", 10 ** 6)):
        want(getattr(c, name) <= most, f"{name} is {getattr(c, name)}; it must be at most {most}")
    want(ranks in (1, 2, 4, 8), f"{ranks} ranks; the batch is shared out evenly over 1, 2, 4 or 8 (--nproc_per_node)")
    want(c.num_heads * c.head_dim == c.model_dim,
         f"num_heads * head_dim is {c.num_heads} * {c.head_dim}; it must be model_dim, {c.model_dim}")
    want(c.head_dim % 4 == 0, f"head_dim is {c.head_dim}; the rotary needs a multiple of 4")
    want(c.gate_dim <= c.model_dim, f"gate_dim is {c.gate_dim}; the stream has only {c.model_dim} entries: lower it")
    want(c.extension_steps < c.num_steps,
         f"extension_steps is {c.extension_steps} of num_steps {c.num_steps}; leave the schedule a step: lower it")
    want(c.micro_tokens < 1 or ranks < 1 or c.batch_tokens % (c.micro_tokens * ranks) == 0,
         f"batch_tokens {c.batch_tokens} is not a whole number of micro_tokens {c.micro_tokens} for each of {ranks} "
         f"ranks; make batch_tokens a multiple of {c.micro_tokens * ranks}")
    want(c.val_tokens % max(1, c.val_len) == 0, f"val_tokens {c.val_tokens} is not a multiple of val_len {c.val_len}")
    want(c.max_len >= 2, f"max_len is {c.max_len}; a document needs at least a BOS and a token")
    want("/" not in c.run_id and c.run_id not in (".", ".."), f"run_id is {c.run_id!r}; it names a file: leave out '/'")
    steps = profiled_steps(c) if re.fullmatch(r"\d+:\d+", c.profile) else ()
    want(not c.profile or steps and steps[-1] < c.num_steps,
         f"profile is {c.profile!r}; give the first and the last step, like 10:13, below num_steps {c.num_steps}")
    for name in ("compress_grads", "clip_norm", "unused"):
        want(not (c.exact and getattr(c, name)), f"exact and {name} {getattr(c, name)} exclude each other: its sums "
             f"depend on the number of ranks; leave out --exact or --{name}")
    want(not c.exact or c.micro_tokens < 1 or c.slots & (c.slots - 1) == 0, f"exact sums a batch as a binary tree; "
         f"batch_tokens {c.batch_tokens} has {c.batch_tokens / max(1, c.micro_tokens):g} slots of micro_tokens "
         f"{c.micro_tokens}: make it a power of two")
    words = c.windows.split()
    want(words and all(word.isdecimal() and int(word) > 0 for word in words),
         f"windows is {c.windows!r}; give numbers of blocks, like '3 7 11'")
    try:
        layers = parse_layers(c.layers)
        want(layers, "layers is empty; give at least one layer")
        want(c.backout_layer < len(layers), f"backout_layer is {c.backout_layer}; layers has 0 to {len(layers) - 1}")
        tables = {layer.value_table for layer in layers} - {None}
        want(tables == set(range(len(tables))), f"layers use the value tables {sorted(tables)}; number them from 0 on "
             "without a gap")
    except RunError as error:
        wrong.append(str(error))
    if wrong:
        raise RunError("; ".join(wrong))

# ------------------------------------------------------------------------------------------------------------------
# data

HEADER_INTS, MAGIC, VERSION = 256, 20240520, 1
GPT2_VOCAB, GPT2_BOS = 50257, 50256  # where a header says nothing of them

class Shard(NamedTuple):
    """A file of tokens: a header of 256 int32, then uint16 tokens, both little-endian."""

    path: Path
    tokens: int
    vocab_size: int
    bos_id: int

def read_header(path: Path) -> Shard:
    """Header words: 0 magic, 1 version, 2 tokens, 3 vocabulary, 4 BOS. RunError if the file is no whole shard."""
    try:
        with open(path, "rb") as file:
            words = file.read(HEADER_INTS * 4)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); fetch or make the data again") from error
    if len(words) < HEADER_INTS * 4:
        raise RunError(f"{path}: ends after {len(words)} bytes, within its header of {HEADER_INTS * 4}; delete it, "
                       "then fetch or make it again")
    header = np.frombuffer(words, dtype="<i4")
    if header[:2].tolist() != [MAGIC, VERSION]:
        raise RunError(f"{path}: begins with {header[:2].tolist()}, a shard with [{MAGIC}, {VERSION}]; make "
                       "it with a script of data/")
    tokens = int(header[2])
    if size != HEADER_INTS * 4 + 2 * tokens:
        raise RunError(f"{path}: {size} bytes, but its header promises {tokens} tokens, {HEADER_INTS * 4 + 2 * tokens} "
                       "bytes; delete it, then fetch or make it again")
    vocab_size, bos_id = header[3:5].tolist() if header[3] else (GPT2_VOCAB, GPT2_BOS)
    return Shard(path, tokens, vocab_size, bos_id)

def find_shards(pattern: str, limit: int = 0) -> list[Shard]:
    """The shards that match a glob pattern, by name, the first `limit` of them (0: all); all in one vocabulary."""
    paths = sorted(ROOT / path for path in glob.glob(pattern, root_dir=ROOT))  # an absolute one stays as it is
    if not paths:
        raise RunError(f"no shard matches {ROOT / pattern}; make some with data/stdlib.py, data/fineweb.py or "
                       "data/text.py, or name others with --train_files and --val_files")
    shards = [read_header(path) for path in paths[:limit or None]]
    for shard in shards:
        if shard[2:] != shards[0][2:]:
            raise RunError(f"{shard.path}: vocabulary and BOS are {shard[2:]}, those of {shards[0].path} are "
                           f"{shards[0][2:]}; shards of one run share one encoding")
    return shards

def load_tokens(shard: Shard) -> np.ndarray:
    """All tokens of a shard, uint16 [tokens]. RunError if one is outside the vocabulary."""
    try:
        tokens = np.fromfile(shard.path, dtype="<u2", offset=HEADER_INTS * 4)
    except OSError as error:
        raise RunError(f"{shard.path}: cannot be read ({error}); fetch or make the data again") from error
    if len(tokens) != shard.tokens:
        raise RunError(f"{shard.path}: held {shard.tokens} tokens when the run began and {len(tokens)} now; leave the "
                       "data alone while a run reads it")
    highest = int(tokens.max(initial=0))
    if highest >= shard.vocab_size:
        raise RunError(f"{shard.path}: token {highest} at position {tokens.argmax()}, but the vocabulary has "
                       f"{shard.vocab_size}; the shard is damaged or its header names another encoding: make it again")
    return tokens

class Documents(NamedTuple):
    """Where the documents of one shard lie, in the order in which they are read."""

    tokens: np.ndarray   # uint16 [tokens]
    starts: np.ndarray   # int64 [documents]
    lengths: np.ndarray  # int64 [documents], already cut at max_len

def index_documents(tokens: np.ndarray, bos_id: int, max_len: int, long_documents: str = "cut",
                    order: np.random.Generator | None = None) -> Documents:
    """Find the documents (each opens with BOS). What comes before the first BOS belongs to none and is left out."""
    starts = np.flatnonzero(tokens == bos_id)
    lengths = np.diff(starts, append=len(tokens))
    if long_documents == "split":
        pieces = -(-lengths // max_len)
        within = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        starts = np.repeat(starts, pieces) + within * max_len
        lengths = np.repeat(lengths, pieces) - within * max_len
    lengths = np.minimum(lengths, max_len)
    if order is not None:
        chosen = order.permutation(len(starts))
        starts, lengths = starts[chosen], lengths[chosen]
    return Documents(tokens, starts, lengths)

def pack(ends: np.ndarray, first: int, slots: int, slot_tokens: int) -> list[tuple[int, int, int]] | None:
    """Which documents fill a batch. Each slot takes documents one after another until it holds slot_tokens + 1.

    ends [documents]: running sum of the documents' lengths. first: the document to begin with.
    Returns for each slot (first document, last document, tokens of it that fit), or None if the documents run out.
    """
    taken = []
    for _ in range(slots):
        before = int(ends[first - 1]) if first else 0
        full = before + slot_tokens + 1
        last = int(np.searchsorted(ends, full))
        if last >= len(ends):
            return None
        taken.append((first, last, full - max(before, int(ends[last - 1]) if last else 0)))
        first = last + 1
    return taken

def fill_slot(documents: Documents, bos_id: int, first: int, last: int, last_tokens: int) -> np.ndarray:
    """The tokens of one slot, uint16 [slot_tokens + 1]. BOS opens every document, a later piece of a split one too."""
    lengths = documents.lengths[first:last + 1].copy()
    lengths[-1] = last_tokens
    starts = documents.starts[first:last + 1]
    slot = np.concatenate([documents.tokens[start:start + n] for start, n in zip(starts, lengths)])
    slot[np.cumsum(lengths) - lengths] = bos_id
    return slot

class Stream:
    """Batches of packed documents for one rank; the next shard is loaded and indexed in the background.

    A batch has `slots` packed sequences; rank r takes slots/ranks of them in a row, so what the ranks read together
    does not depend on how many they are. A batch that would run past a shard's last document begins anew at the next.
    """

    def __init__(self, shards: list[Shard], config: Config, rank: int = 0, ranks: int = 1):
        self.shards, self.config = shards, config
        self.mine = range(rank * config.slots // ranks, (rank + 1) * config.slots // ranks)
        self.loader = ThreadPoolExecutor(1, thread_name_prefix="load-shard")
        self.loaded: dict[int, Future[tuple[Documents, np.ndarray]]] = {}
        self.seek((0, 0))

    def _load(self, index: int) -> tuple[Documents, np.ndarray]:
        c, shard = self.config, self.shards[index]
        order = np.random.default_rng([c.seed, index]) if c.shuffle else None
        documents = index_documents(load_tokens(shard), shard.bos_id, c.max_len, c.long_documents, order)
        if not len(documents.starts):
            raise RunError(f"{shard.path}: no token is BOS ({shard.bos_id}), so no document begins; make it again with "
                           "a script of data/, or write its BOS id into header word 4")
        return documents, np.cumsum(documents.lengths)

    def _open(self, index: int) -> tuple[Documents, np.ndarray]:
        """Shard `index` as soon as it is loaded; starts loading the one after it, forgets the others."""
        if index >= len(self.shards):
            held = sum(shard.tokens for shard in self.shards)
            raise RunError(f"the training data ran out: {len(self.shards)} shard(s) like {self.shards[0].path} hold "
                           f"{held} tokens, and documents cut at {self.config.max_len} gave only {self.steps} batches "
                           f"of {self.config.batch_tokens}; add shards, or lower --num_steps")
        wanted = [i for i in (index, index + 1) if i < len(self.shards)]
        self.loaded = {i: self.loaded.get(i) or self.loader.submit(self._load, i) for i in wanted}
        return self.loaded[index].result()

    def position(self) -> tuple[int, int]:
        """(shard, document) at which the next batch begins."""
        return self.shard, self.document

    def seek(self, position: tuple[int, int]) -> None:
        self.shard, self.document = position
        self.steps = 0
        self.digests = [hashlib.sha256() for _ in self.mine]

    def _advance(self) -> tuple[Documents, list[tuple[int, int, int]]]:
        """What the next batch takes from which documents; the position moves behind it. RunError when the data ends."""
        documents, ends = self._open(self.shard)
        while (taken := pack(ends, self.document, self.config.slots, self.config.micro_tokens)) is None:
            self.shard, self.document = self.shard + 1, 0
            documents, ends = self._open(self.shard)
        self.document = taken[-1][1] + 1
        self.steps += 1
        return documents, taken

    def next_batch(self) -> list[np.ndarray]:
        """This rank's slots of the next batch, each uint16 [micro_tokens + 1]. RunError when the data ends."""
        documents, taken = self._advance()
        batch = [fill_slot(documents, self.shards[0].bos_id, *taken[slot]) for slot in self.mine]
        for digest, slot in zip(self.digests, batch):
            digest.update(slot)
        return batch

    def check_enough(self, steps: int) -> None:
        """RunError if it is known already that the data ends before so many steps: exactly, where all is loaded."""
        held, needed = sum(shard.tokens for shard in self.shards), steps * self.config.batch_tokens
        if held < needed:
            raise RunError(f"{len(self.shards)} shard(s) like {self.shards[0].path} hold {held} tokens; {steps} steps "
                           f"read at least {needed}: add shards, or lower --num_steps")
        if len(self.shards) <= 2:
            start = self.position()
            for _ in range(steps):
                self._advance()
            self.seek(start)

    def close(self) -> None:
        self.loader.shutdown(wait=False, cancel_futures=True)

def validation_sequences(shards: list[Shard], tokens: int, length: int) -> np.ndarray:
    """The first `tokens` predictions of the validation stream (0: all), int32 [sequences, length + 1], in its order.

    Only a whole split may end within a sequence: what is beyond its end is -1, which is no target.
    """
    wanted = tokens + 1 if tokens else sum(shard.tokens for shard in shards)
    held: list[np.ndarray] = []
    for shard in shards:
        if sum(map(len, held)) < wanted:
            held.append(load_tokens(shard))
    stream = np.concatenate(held)[:wanted].astype(np.int32)
    if len(stream) < max(wanted, 2):
        raise RunError(f"validation needs {max(wanted, 2)} tokens, {len(shards)} shard(s) like {shards[0].path} hold "
                       f"{len(stream)}; fetch the whole split, or lower --val_tokens (a multiple of --val_len; 0: all)")
    if not (stream == shards[0].bos_id).any():
        raise RunError(f"{shards[0].path}: no token is BOS ({shards[0].bos_id}), so no document begins: make it again")
    rows = -(-(len(stream) - 1) // length)
    padded = np.full(rows * length + 1, -1, dtype=np.int32)
    padded[:len(stream)] = stream
    return np.lib.stride_tricks.sliding_window_view(padded, length + 1)[::length]

# ------------------------------------------------------------------------------------------------------------------
# model

def norm(x: Tensor) -> Tensor:
    """RMS norm over the last dimension, without gain."""
    return F.rms_norm(x, (x.size(-1),))

def rotary_frequencies(head_dim: int) -> Tensor:
    """Radians a token, [head_dim / 2]: a quarter of the head turns, slower and slower, down to one in 1,024; another
    quarter stands still."""
    turning = (1 / 1024) ** torch.linspace(0, 1, head_dim // 4)
    return torch.cat([turning, torch.zeros(head_dim // 4)])

def stretch(frequencies: Tensor, scale: float, window: int, longer: int) -> tuple[Tensor, float]:
    """YaRN (arXiv:2309.00071): frequencies and softmax scale after the window, in tokens, grew to `longer`.

    What turned 32 times or more within the old window stays; what turned less than once is slowed in proportion.
    """
    turns = window * frequencies / (2 * math.pi)
    stays = ((turns - 1) / (32 - 1)).clamp(0, 1)
    slower = window / longer
    return frequencies * (slower + stays * (1 - slower)), scale * (0.2 * math.log(longer / window) + 1)

class Rotary(nn.Module):
    """Tables of cos and sin [tokens, head_dim / 2] and the softmax scale that goes with their frequencies."""

    FIRST_SCALE = 0.1

    def __init__(self, head_dim: int, tokens: int, dtype: torch.dtype):
        super().__init__()
        self.register_buffer("frequencies", rotary_frequencies(head_dim))
        self.register_buffer("scale", torch.tensor(self.FIRST_SCALE))
        self.register_buffer("cos", torch.empty(tokens, head_dim // 2, dtype=dtype), persistent=False)
        self.register_buffer("sin", torch.empty(tokens, head_dim // 2, dtype=dtype), persistent=False)
        self.tabulate()

    def tabulate(self) -> None:
        angles = torch.outer(torch.arange(len(self.cos), device=self.cos.device), self.frequencies)
        self.cos.copy_(angles.cos())
        self.sin.copy_(angles.sin())

    @torch.no_grad()
    def set(self, frequencies: Tensor, scale: float) -> None:
        """In place: a compiled block goes on reading the same tensors."""
        self.frequencies.copy_(frequencies)
        self.scale.fill_(scale)
        self.tabulate()

def rotate(x_THD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:len(x_THD), None], sin[:len(x_THD), None]
    x1, x2 = x_THD.chunk(2, dim=-1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)

MASK_BLOCK = 128  # of FlexAttention

def may_attend(docs: Tensor, window: Tensor | int) -> Callable[..., Tensor]:
    """The predicate: token q sees token k if k is not later, within the window, and of the same document."""
    def predicate(batch: Any, head: Any, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k <= window) & (docs[q] == docs[k])
    return predicate

def dense_mask(docs: Tensor, window: int) -> Tensor:
    """bool [T, T] of the predicate, for scaled_dot_product_attention."""
    at = torch.arange(len(docs), device=docs.device)
    return may_attend(docs, window)(None, None, at[:, None], at[None, :])

def block_mask(docs: Tensor, window: int) -> BlockMask:
    """The predicate for FlexAttention: blocks seen in full and those in part. docs [T], T a multiple of MASK_BLOCK.

    Works on the first and last document of each block alone (documents are in order), so it costs nothing like T².
    """
    first, last = docs.view(-1, MASK_BLOCK)[:, 0], docs.view(-1, MASK_BLOCK)[:, -1]
    at = torch.arange(len(first), device=docs.device)
    back = (at[:, None] - at[None, :]) * MASK_BLOCK  # from a query's block to a key's block
    some = (back >= 0) & (back - MASK_BLOCK + 1 <= window) & (last[None, :] >= first[:, None])
    every = (back > 0) & (back + MASK_BLOCK - 1 <= window) & (first[None, :] == last[:, None])
    def listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
        order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
        return blocks.sum(-1, dtype=torch.int32)[None, None], order.to(torch.int32)[None, None]

    # the window as a tensor: as a number it would be compiled in, and each new window compiled again
    predicate = may_attend(docs, torch.full((), window, device=docs.device))
    return BlockMask.from_kv_blocks(*listed(some & ~every), *listed(every), BLOCK_SIZE=MASK_BLOCK, mask_mod=predicate)

@functools.cache
def compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=False)  # uncompiled, it would build all T² scores

def attend(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Softmax attention [T, H, D] where the mask allows it. q comes with the softmax scale in it.

    FlexAttention on GPUs; it has no backward on CPUs, where a dense mask serves.
    """
    q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_THD, v_THD))
    if isinstance(mask, BlockMask):
        alone = q.is_cuda and not torch.compiler.is_compiling()  # within a compiled block it is compiled with that
        flex = compiled_flex_attention() if alone else flex_attention
        out = flex(q, k, v, block_mask=mask, scale=1.0)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)
    return out[0].transpose(0, 1)

def uniform(rows: int, columns: int, fan_in: int) -> Tensor:
    """Initial matrix, uniform with standard deviation 0.5 / sqrt(fan_in)."""
    bound = math.sqrt(3) * 0.5 / math.sqrt(fan_in)
    return torch.empty(rows, columns).uniform_(-bound, bound)

class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, gate_dim: int, dtype: torch.dtype):
        super().__init__()
        self.heads = heads
        # query, key, value and output matrices [dim, dim] behind one another in memory
        qkvo = uniform(4 * dim, dim, dim)
        qkvo[3 * dim:] = 0
        self.qkvo = nn.Parameter(qkvo.view(dim, 4 * dim))
        self.gate = nn.Parameter(torch.zeros(heads, gate_dim, dtype=dtype))

    def forward(self, x: Tensor, values: Tensor | None, value_mix: Tensor, rotary: tuple[Tensor, Tensor, Tensor],
                mask: Tensor | BlockMask) -> Tensor:
        """x, values [T, dim] -> [T, dim]. value_mix [2]: of the layer's own values and of the table's."""
        tokens, dim = x.shape
        cos, sin, scale = rotary
        qkvo = self.qkvo.view(4 * dim, dim).type_as(x)
        qkv = F.linear(x, qkvo[:3 * dim]).view(tokens, 3 * self.heads, -1)
        qk, v = qkv.split((2 * self.heads, self.heads), dim=1)
        q, k = rotate(norm(qk), cos, sin).chunk(2, dim=1)
        q = q * scale
        v = value_mix[0] * v if values is None else value_mix[0] * v + value_mix[1] * values.view_as(v)
        gate = torch.sigmoid(F.linear(x[:, :self.gate.size(1)], self.gate))
        y = attend(q, k, v, mask) * gate[..., None]
        return F.linear(y.reshape(tokens, dim), qkvo[3 * dim:])

class MLP(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.fc = nn.Parameter(uniform(dim, 4 * dim, dim))
        self.proj = nn.Parameter(torch.zeros(dim, 4 * dim))

    def forward(self, x: Tensor) -> Tensor:
        h = x @ self.fc.type_as(x)
        return F.linear(h.relu() * h, self.proj.type_as(x))  # relu squared; square() by itself is slow on CPUs

class Block(nn.Module):
    def __init__(self, layer: Layer, dim: int, heads: int, gate_dim: int, dtype: torch.dtype):
        super().__init__()
        self.attn = Attention(dim, heads, gate_dim, dtype) if layer.window else None
        self.mlp = MLP(dim) if layer.mlp else None

    def forward(self, x: Tensor, x0: Tensor, mix: Tensor, values: Tensor | None, value_mix: Tensor,
                rotary: tuple[Tensor, Tensor, Tensor], mask: Tensor | BlockMask | None) -> Tensor:
        """x, x0 [T, dim]: the stream and its beginning; mix [2]: how much of each goes in."""
        x = mix[0] * x + mix[1] * x0
        if self.attn is not None:
            x = x + self.attn(norm(x), values, value_mix, rotary, mask)
        if self.mlp is not None:
            x = x + self.mlp(norm(x))
        return x

# Fixed scales of the head's product in fp8. They and the product stand by themselves: as attributes of the class below
# they would break its compiled graph, and with it the fusion of the casts and the loss
FP8_WEIGHT_SCALE, FP8_GRAD_SCALE = 2.0 ** -9, 1 / 448

def fp8_product(a: Tensor, b: Tensor, scale_a: float, scale_b: float, fast: bool) -> Tensor:
    """a [m, k] row by row @ b [k, n] column by column -> bf16 [m, n], each times its scale."""
    scale_a, scale_b = torch.full((), scale_a, device=a.device), torch.full((), scale_b, device=a.device)
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16, use_fast_accum=fast)

class FP8Linear(torch.autograd.Function):
    """x [T, dim] @ weight [V, dim] transposed -> bf16 [T, V], the three products of forward and backward in fp8.

    For a normed x (rows of norm sqrt(dim)) and the gradient of a summed cross entropy (within ±1).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x_scale = math.sqrt(x.size(1)) / 448
        x8 = (x / ctx.x_scale).to(torch.float8_e4m3fn)
        weight8 = (weight / FP8_WEIGHT_SCALE).to(torch.float8_e4m3fn)
        ctx.save_for_backward(x8, weight8)
        return fp8_product(x8, weight8.T, ctx.x_scale, FP8_WEIGHT_SCALE, fast=True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, weight8 = ctx.saved_tensors
        grad8 = (grad / FP8_GRAD_SCALE).to(torch.float8_e5m2)
        by_column = weight8.T.contiguous().T, x8.T.contiguous().T
        grad_x = fp8_product(grad8, by_column[0], FP8_GRAD_SCALE, FP8_WEIGHT_SCALE, fast=False)
        return grad_x, fp8_product(grad8.T.contiguous(), by_column[1], FP8_GRAD_SCALE, ctx.x_scale, fast=False)

class Head(nn.Module):
    def __init__(self, vocab: int, dim: int, dtype: torch.dtype, fp8: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(vocab, dim, dtype=dtype))
        self.fp8 = fp8

    def logits(self, x: Tensor) -> Tensor:
        """[T, dim] -> float32 [T, V], held softly between 0 and 30."""
        x = FP8Linear.apply(x, self.weight) if self.fp8 and self.training else F.linear(x, self.weight)
        return 30 * torch.sigmoid(x.float() / 7.5)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy in nats, summed over the targets [T]; -1 is no target."""
        return F.cross_entropy(self.logits(x), targets, ignore_index=-1, reduction="sum")

def mix_in_saved(x: Tensor, weight: Tensor, saved: Tensor) -> Tensor:
    return x + torch.sigmoid(weight) * saved

class Windows(NamedTuple):
    """How many tokens back the layers with the long and with the short window see."""

    long: int
    short: int

class GPT(nn.Module):
    """The model of record 44, sizes as arguments. Works on one packed sequence [T] at a time.

    layers: see Layer. max_tokens: the longest sequence that it will be given. loss_tokens: the head's product and loss
    take so many tokens at once, which bounds the memory of the logits. The vocabulary is padded to a multiple of 128.
    """

    def __init__(self, *, vocab_size: int, bos_id: int, layers: Sequence[Layer], model_dim: int, num_heads: int,
                 gate_dim: int, backout_layer: int, max_tokens: int, loss_tokens: int, dtype: torch.dtype,
                 fp8_head: bool = False):
        super().__init__()
        self.bos_id, self.layers = bos_id, tuple(layers)
        self.backout_layer, self.loss_tokens = backout_layer, loss_tokens
        count, vocab = len(layers), -(-vocab_size // 128) * 128
        # the later half takes in what the earlier put out, last out first in; the last layer takes nothing
        self.skip_from = {i: count - 1 - i for i in range(-(-count // 2), count - 1)}
        self.read_again = {*self.skip_from.values(), backout_layer}
        tables = 1 + max((layer.value_table for layer in layers if layer.value_table is not None), default=-1)
        self.embed = nn.Embedding(vocab, model_dim, dtype=dtype)
        self.value_embeds = nn.ModuleList(nn.Embedding(vocab, model_dim, dtype=dtype) for _ in range(tables))
        self.smear_gate = nn.Parameter(torch.zeros(1, gate_dim, dtype=dtype))
        self.blocks = nn.ModuleList(Block(layer, model_dim, num_heads, gate_dim, dtype) for layer in layers)
        self.lm_head = Head(vocab, model_dim, dtype, fp8_head)
        self.scalar_sizes = [count // 2, 2 * count, 2 * count, 1, 1]  # skips, stream mixes, value mixes, smear, backout
        firsts = ([-1.5], [1.0, 0.0], [0.5, 0.5], [0.0], [0.5])
        self.scalars = nn.Parameter(torch.cat([torch.tensor(first).repeat(size // len(first))
                                               for first, size in zip(firsts, self.scalar_sizes)]))
        self.rotary = Rotary(model_dim // num_heads, max_tokens, dtype)
        self.mix_in_saved = mix_in_saved

    def masks(self, x: Tensor, windows: Windows) -> dict[str | None, Tensor | BlockMask | None]:
        docs = (x == self.bos_id).cumsum(0)
        make = block_mask if x.is_cuda else dense_mask
        return {"L": make(docs, windows.long), "S": make(docs, windows.short), None: None}

    def trunk(self, x: Tensor, windows: Windows) -> Tensor:
        """Tokens [T] -> normed stream before the head [T, dim]."""
        skips, mixes, value_mixes, smear, backout = self.scalars.split(self.scalar_sizes)
        mixes, value_mixes = mixes.view(-1, 2), value_mixes.view(-1, 2)
        masks = self.masks(x, windows)
        rotary = (self.rotary.cos, self.rotary.sin, self.rotary.scale)
        values = [table(x) for table in self.value_embeds]
        e = self.embed(x)
        opening = smear[0] * torch.sigmoid(F.linear(e[1:, :self.smear_gate.size(1)], self.smear_gate))
        e = torch.cat([e[:1], e[1:] + opening * e[:-1]])
        x0 = norm(e)
        x = x0.view_as(x0)  # an object of its own, as saved ones are: arguments that are one compile anew
        saved: dict[int, Tensor] = {}
        for i, (layer, block) in enumerate(zip(self.layers, self.blocks)):
            if i in self.skip_from:
                x = self.mix_in_saved(x, skips[i - min(self.skip_from)], saved[self.skip_from[i]])
            if layer != Layer(None, None, False):
                table = None if layer.value_table is None else values[layer.value_table]
                x = block(x, x0, mixes[i], table, value_mixes[i], rotary, masks[layer.window])
            if i in self.read_again:
                saved[i] = x.view_as(x)
        return norm(x - backout[0] * saved[self.backout_layer])

    def forward(self, inputs: Tensor, targets: Tensor, windows: Windows) -> Tensor:
        """inputs, targets [T] -> the sum of the targets' cross entropies, in nats; targets of -1 count nothing."""
        x = self.trunk(inputs, windows)
        parts = zip(x.split(self.loss_tokens), targets.split(self.loss_tokens))
        return torch.stack([self.lm_head(x_part, targets_part) for x_part, targets_part in parts]).sum()

    def logits(self, inputs: Tensor, windows: Windows) -> Tensor:
        """inputs [T] -> float32 [T, padded vocabulary]."""
        return self.lm_head.logits(self.trunk(inputs, windows))

    def compile_parts(self) -> None:
        """Compile each kind of block, the skip and the head by itself. Blocks of one kind share one compiled graph, and
        gradients leave backward block by block: compiled as a whole, all would appear at its end."""
        for part in (*self.blocks, self.lm_head):
            part.forward = torch.compile(part.forward, dynamic=False)
        self.mix_in_saved = torch.compile(self.mix_in_saved, dynamic=False)

# ------------------------------------------------------------------------------------------------------------------
# update rules

# (a, b, c) of the five steps of polar; from Polar Express (arXiv:2505.16932), computed for a safety factor of 1.02
POLAR_STEPS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)

def polar(u: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest matrices with singular values of about 1. u [n, rows, columns] -> the same shape, in dtype."""
    x = u.to(dtype)
    x = x.mT if u.size(-2) > u.size(-1) else x  # the products below are of rows with rows
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-6)
    for a, b, c in POLAR_STEPS:
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=b, alpha=c), x, beta=a)
    return x.mT if u.size(-2) > u.size(-1) else x

def normuon(p: Tensor, g: Tensor, m: Tensor, v: Tensor, scale: Tensor, lr: float, decay: float, momentum: float,
            beta2: float, dtype: torch.dtype) -> None:
    """NorMuon (arXiv:2510.05491) with cautious weight decay, in place on p, m and v.

    p, g, m [n, rows, columns]: parameters, gradients, momentum. v [n, 1, columns] or [n, rows, 1]: the second moment
    along the axis that is left. scale [n, 1, 1]: of each matrix's learning rate. dtype: what polar computes in.
    """
    m.copy_(momentum * m + (1 - momentum) * g)
    o = polar(momentum * m + (1 - momentum) * g, dtype).float()
    size = o.norm(dim=(-2, -1), keepdim=True)
    v.copy_(beta2 * v + (1 - beta2) * o.square().mean(-2 if v.size(-2) == 1 else -1, keepdim=True))
    o = o * v.clamp_min(1e-10).rsqrt()
    o = o * (size / o.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-10))
    o = o + torch.where(o * p >= 0, decay * p, 0)
    p.sub_(lr * scale * o)

def adam(p: Tensor, g: Tensor, m: Tensor, v: Tensor, lr: float, beta1: float, beta2: float, eps: float,
         t: float) -> None:
    """Adam (arXiv:1412.6980) with bias correction for the t-th update, in place on p, m, v, all [n]; float32 inside."""
    p32, g32, m32, v32 = (x.float() for x in (p, g, m, v))  # what is float32 is not copied
    if torch.compiler.is_compiling():  # becomes one kernel
        m32 = beta1 * m32 + (1 - beta1) * g32
        v32 = beta2 * v32 + (1 - beta2) * g32 * g32
        p32 = p32 - lr / (1 - beta1 ** t) * m32 / ((v32 / (1 - beta2 ** t)).sqrt() + eps)
    else:  # line by line it would go a dozen times through memory: 20 times slower on 5 million elements
        torch._fused_adam_([p32], [g32], [m32], [v32], [], [torch.full((), t, device=p.device)], lr=lr, beta1=beta1,
                           beta2=beta2, weight_decay=0.0, eps=eps, amsgrad=False, maximize=False)
    for x, x32 in ((p, p32), (m, m32), (v, v32)):
        x.copy_(x32)  # onto itself: nothing happens

class StepValues(NamedTuple):
    """What the schedules say about one step."""

    lr_factor: float
    momentum: float

@dataclass(frozen=True)
class Adam:
    """A rule of a bank. Its unit is an element: any equal parts of the bank may lie on the ranks."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    every: int  # it updates in every so-manieth step, on the sum of the gradients since the last update
    moment_dtype: torch.dtype
    function = staticmethod(adam)

    def unit(self, shape: torch.Size, parts: int) -> tuple[int, ...]:
        return ()

    def new_state(self, bank: Bank) -> dict[str, Tensor]:
        return {name: torch.zeros_like(bank.my_values, dtype=self.moment_dtype) for name in ("m", "v")}

    def arguments(self, bank: Bank, values: StepValues) -> tuple:
        return (bank.my_values, bank.my_grads, bank.state["m"], bank.state["v"], self.lr * values.lr_factor,
                self.beta1, self.beta2, self.eps, float(bank.updates))

@dataclass(frozen=True)
class NorMuon:
    """A rule of a bank. Its unit is a matrix, which lies whole on one rank."""

    lr: float
    weight_decay: float
    beta2: float
    polar_dtype: torch.dtype
    wide: bool  # the stored parameter is wider than tall: the second moment is one value a column, else one a row
    every: int = 1
    function = staticmethod(normuon)

    def unit(self, shape: torch.Size, parts: int) -> tuple[int, ...]:
        """One parameter is `parts` matrices behind one another in memory."""
        if len(shape) != 2 or shape[0] * shape[1] % (parts * shape[0]):
            raise RunError(f"NorMuon updates matrices; it was given a parameter of shape {tuple(shape)} in "
                           f"{parts} part(s)")
        return (shape[0], shape[1] // parts)

    def new_state(self, bank: Bank) -> dict[str, Tensor]:
        n, rows, columns = bank.my_values.shape
        second = (n, 1, columns) if self.wide else (n, rows, 1)
        return {"m": torch.zeros_like(bank.my_values, dtype=torch.float32),
                "v": torch.zeros(second, device=bank.my_values.device)}

    def arguments(self, bank: Bank, values: StepValues) -> tuple:
        lr, decay = self.lr * values.lr_factor, self.lr * self.weight_decay * values.lr_factor
        return (bank.my_values, bank.my_grads, bank.state["m"], bank.state["v"], bank.my_scales, lr, decay,
                values.momentum, self.beta2, self.polar_dtype)

# ------------------------------------------------------------------------------------------------------------------
# banks

class Member(NamedTuple):
    """A parameter, the rule that updates it, and how: as `parts` matrices, its learning rate times `scale`."""

    name: str
    param: nn.Parameter
    rule: Adam | NorMuon
    parts: int = 1
    scale: float = 1.0

@dataclass
class Slot:
    """One parameter's place in its bank."""

    name: str
    param: nn.Parameter
    offset: int            # of its first element in the bank
    grad: Tensor           # view of the bank's gradients, in the parameter's shape
    fresh: bool = True     # no gradient since the last update: the next one overwrites
    arrived: bool = False  # its gradient of this backward is in
    tree: list[tuple[int, Tensor]] = field(default_factory=list)  # exact mode: (height, sum) of micro-batches

@functools.cache
def factor_tensor(factor: float, dtype: torch.dtype) -> Tensor:
    """As torch.mul takes it soonest with gradients of dtype: a small one would take half as long again by a number."""
    return torch.tensor(factor, dtype=torch.promote_types(dtype, torch.float32))

class Bank:
    """Parameters with one rule and one dtype, in one contiguous buffer; their gradients in another.

    Both hold ranks equal shards of whole units. Building a bank copies the parameters in and makes each a view of it.
    """

    ALIGN = 64  # elements: parameters start where vector loads like it, and no shard ends within a vector

    def __init__(self, name: str, members: Sequence[Member], rank: int, ranks: int,
                 grad_dtype: torch.dtype | None = None):
        self.name, self.rule = name, members[0].rule
        first = members[0].param
        unit = self.rule.unit(first.shape, members[0].parts)
        self.granule = math.prod(unit) if unit else self.ALIGN
        counts = [-(-member.param.numel() // self.granule) for member in members]
        self.shard = -(-sum(counts) // ranks) * self.granule
        self.values = torch.zeros(ranks * self.shard, dtype=first.dtype, device=first.device)
        self.grads = torch.zeros_like(self.values, dtype=grad_dtype or first.dtype)
        self.slots = []
        for member, begin in zip(members, np.cumsum([0, *counts[:-1]]).tolist()):
            param, offset = member.param, begin * self.granule
            if (param.dtype, param.device) != (first.dtype, first.device):
                raise RunError(f"bank {name}: {member.name} is {param.dtype} on {param.device}, {members[0].name} is "
                               f"{first.dtype} on {first.device}; give each dtype a bank, and move the model before")
            here = slice(offset, offset + param.numel())
            self.values[here].copy_(param.detach().reshape(-1))
            param.data, param.grad = self.values[here].view(param.shape), None
            self.slots.append(Slot(member.name, param, offset, self.grads[here].view(param.shape)))
        self.begin = rank * self.shard
        mine = slice(self.begin, self.begin + self.shard)
        self.shard_values, self.shard_grads = self.values[mine], self.grads[mine]
        self.my_values, self.my_grads = (x.view(-1, *unit) for x in (self.shard_values, self.shard_grads))
        scales = [member.scale for member, count in zip(members, counts) for _ in range(count)]
        scales += [1.0] * (ranks * self.shard // self.granule - len(scales))
        per_rank = self.shard // self.granule
        self.my_scales = torch.tensor(scales[rank * per_rank:(rank + 1) * per_rank], device=first.device).view(-1, 1, 1)
        self.updates = 0
        self.state = self.rule.new_state(self)
        self.arrivals = 0  # of this backward's gradients
        self.armed = self.launched = False
        self.work = self.gathering = None    # of the reduce-scatter, of the all-gather
        self.pending: Tensor | None = None   # exact mode: the sum over the steps since the last update

    @property
    def complete(self) -> bool:
        return self.arrivals == len(self.slots)

    def add(self, slot: Slot, factor: float, exact: bool = False) -> None:
        """Move the parameter's new gradient, times factor, into its slot: one pass over it, then it is dropped."""
        grad, slot.param.grad = slot.param.grad, None
        if grad.is_sparse:
            raise RunError(f"{slot.name} has a sparse gradient; a bank holds dense ones: build it with sparse=False")
        if exact:  # as a binary tree: the sum over a power of two of micro-batches has the same bytes on any ranks
            height, total = 0, grad.to(slot.grad.dtype) * factor
            while slot.tree and slot.tree[-1][0] == height:
                height, total = height + 1, slot.tree.pop()[1] + total
            slot.tree.append((height, total))
        elif slot.fresh:
            # of a bf16 gradient the product would be bf16 too, wherever it goes
            torch.mul(grad.to(slot.grad.dtype), factor_tensor(factor, slot.grad.dtype), out=slot.grad)
        else:
            slot.grad.add_(grad, alpha=factor)
        slot.fresh = False
        if not slot.arrived:
            slot.arrived = True
            self.arrivals += 1

    def fell_trees(self) -> None:
        """Exact mode: the finished sums move into their slots. RunError if one was missing in a micro-batch: the tree's
        shape, and so its sum, would depend on the rank that it was on."""
        leaves = [sum(2 ** height for height, _ in slot.tree) for slot in self.slots]
        if min(leaves) < max(leaves):
            fewest = self.slots[leaves.index(min(leaves))].name
            raise RunError(f"exact mode: {fewest} got a gradient in {min(leaves)} of {max(leaves)} micro-batches; each "
                           "must take part in all, or leave out --exact")
        for slot in self.slots:
            slot.grad.copy_(functools.reduce(lambda later, earlier: earlier + later, [x for _, x in slot.tree[::-1]]))
            slot.tree.clear()

    def share_of(self, slot: Slot, x: Tensor) -> slice:
        """Where the slot's part lies in a tensor of this rank's shard, [shard] or with fewer values a unit."""
        ends = (slot.offset - self.begin, slot.offset + slot.param.numel() - self.begin)
        return slice(*(min(max(end, 0), self.shard) * x.numel() // self.shard for end in ends))

    def check_views(self) -> None:
        """RunError if a parameter is no longer the view of this bank that it was made."""
        start, size = self.values.data_ptr(), self.values.element_size()
        for slot in self.slots:
            if slot.param.dtype != self.values.dtype or slot.param.data_ptr() != start + slot.offset * size:
                raise RunError(f"{slot.name} was given other memory or another dtype ({slot.param.dtype}) after its "
                               f"bank {self.name} was built ({self.values.dtype}); move or cast the model before")

    def snapshot(self) -> tuple:
        return self.values.clone(), {key: x.clone() for key, x in self.state.items()}, self.updates

    def restore(self, snapshot: tuple) -> None:
        values, state, self.updates = snapshot
        self.values.copy_(values)
        for key, x in state.items():
            self.state[key].copy_(x)
        self.pending = None
        for slot in self.slots:
            slot.fresh = True
            slot.tree.clear()

def fill_banks(members: Sequence[Member], bank_bytes: float, rank: int, ranks: int,
               fp32_grads: bool = False) -> list[Bank]:
    """Group what can share a bank, of one rule, dtype and unit, from the last layer on, until bank_bytes are full."""
    open_groups: dict[Any, list[Member]] = {}
    groups: list[list[Member]] = []
    for member in reversed(members):
        key = (member.rule, member.param.dtype, member.rule.unit(member.param.shape, member.parts))
        if key not in open_groups:
            groups.append(open_groups.setdefault(key, []))
        open_groups[key].append(member)
        if sum(m.param.numel() * m.param.element_size() for m in open_groups[key]) >= bank_bytes:
            del open_groups[key]
    grad_dtype = torch.float32 if fp32_grads else None
    return [Bank(f"{i}-{type(group[0].rule).__name__.lower()}", group, rank, ranks, grad_dtype)
            for i, group in enumerate(groups)]

# ------------------------------------------------------------------------------------------------------------------
# communication

class Works:
    """Collectives and messages that are waited for together; of none, if nobody else is needed."""

    def __init__(self, *works: Any):
        self.works = works

    def wait(self) -> None:
        for work in self.works:
            work.wait()

def tree_sum(parts: Tensor, out: Tensor | None = None) -> Tensor:
    """[n, ...] -> the sum over n, as a binary tree of neighbours; in out, if that is given and n is more than one."""
    if len(parts) == 1:
        return parts[0]
    half = len(parts) // 2
    return torch.add(tree_sum(parts[:half]), tree_sum(parts[half:]), out=out)

class SumOfParts:
    """A reduce-scatter made of an all-to-all and a sum of what came."""

    def __init__(self, shard: Tensor, full: Tensor, ranks: int):
        self.shard, self.ranks, self.received = shard, ranks, torch.empty_like(full)
        self.work = dist.all_to_all_single(self.received, full, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        tree_sum(self.received.view(self.ranks, -1), out=self.shard)

class Comm:
    """The collectives that a run needs. Nothing else names one, so tests can put another network in its place.

    gloo reduces and scatters by an all-reduce of which it keeps a shard, and gathers into a copy. Made of messages, the
    two send half and copy nothing, which bench/whole_step.py times.
    """

    def __init__(self, rank: int = 0, ranks: int = 1):
        self.rank, self.ranks = rank, ranks
        self.others = [other for other in range(ranks) if other != rank]
        self.gloo = dist.is_initialized() and dist.get_backend() == "gloo"
        # torch 2.13 renamed them
        self._reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
        self._all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Any:
        """Start: shard, this rank's part of full [ranks * shard], <- the sum over ranks of that part."""
        if self.ranks == 1 or self.gloo:
            return self.reduce_scatter_exactly(shard, full)
        return self._reduce_scatter(shard, full, async_op=True)

    def reduce_scatter_exactly(self, shard: Tensor, full: Tensor) -> Any:
        """reduce_scatter that sums here, as a tree: on every network the same bytes."""
        return SumOfParts(shard, full, self.ranks) if self.ranks > 1 else Works()

    def all_gather(self, full: Tensor, shard: Tensor) -> Any:
        """Start: full [ranks * shard] <- every rank's shard. May be in place."""
        if self.ranks > 1 and not self.gloo:
            return self._all_gather(full, shard, async_op=True)
        parts = full.view(self.ranks, -1)
        if parts[self.rank].data_ptr() != shard.data_ptr():
            parts[self.rank].copy_(shard)
        return Works(*(dist.isend(shard, other) for other in self.others),
                     *(dist.irecv(parts[other], other) for other in self.others))

    def all_reduce(self, x: Tensor) -> Tensor:
        """x <- its sum over ranks."""
        if self.ranks > 1:
            dist.all_reduce(x)
        return x

    def broadcast(self, x: Tensor) -> None:
        """x <- that of rank 0."""
        if self.ranks > 1:
            dist.broadcast(x, 0)

    def all_objects(self, mine: Any) -> list[Any]:
        """What every rank has, in the order of ranks."""
        everyones = [mine] * self.ranks
        if self.ranks > 1:
            dist.all_gather_object(everyones, mine)
        return everyones

class CompressedComm(Comm):
    """Sends gradients in bf16, half the bytes of float32. A communication hook is a Comm that reduces its own way."""

    def reduce_scatter(self, shard: Tensor, full: Tensor) -> Any:
        small = full.bfloat16()
        mine = small.view(self.ranks, -1)[self.rank]
        work = super().reduce_scatter(mine, small)

        class Unpack:
            def wait(self) -> None:
                work.wait()
                shard.copy_(mine)
        return Unpack()

def outer_parts(model: nn.Module) -> Iterator[tuple[nn.Module, Iterator[nn.Parameter]]]:
    """The model with its own parameters, then its children (those of a list one by one) with all of theirs: where a
    hook runs before what is compiled, not in it. What only contains others, and never runs, counts as the model's."""
    parts = [part for child in model.children() for part in (child if isinstance(child, nn.ModuleList) else [child])]
    running = [part for part in parts if type(part).forward is not nn.Module.forward]
    yield model, itertools.chain(model.parameters(recurse=False), *(part.parameters() for part in parts
                                                                    if part not in running))
    for part in running:
        yield part, part.parameters()

@dataclass(frozen=True)
class SyncSettings:
    """How gradients and parameters travel. Each variant computes the same; exact fixes even the order of sums."""

    sync: str = "hook"          # hook: launch a bank from the hook that completes it; step: all when the step begins
    walk: str = "launch"        # the step's order over banks: launch order, or "forward", the first layers first
    lazy_gather: bool = False   # the next forward waits for each bank where it reads it, not the step
    unused: bool = False        # parameters may go without gradient; what no rank used stays untouched (Adam's bias
                                # correction counts the updates of the bank)
    exact: bool = False         # the same bytes at any number of ranks; not with unused, nor clip_norm
    check_grads: bool = False   # wait for all banks, stop before a step with a gradient that is not finite
    clip_norm: float = 0.0      # scale all gradients so that their norm over all ranks is at most this; 0: don't

class BankOptimizer:
    """Sums gradients into banks, exchanges them while backward goes on, updates one shard a rank, gathers parameters.

        for the last micro-batch of a step:  arm(step), then backward
        after it:                            step(values)

    grad_factor multiplies every gradient: it turns the sum over micro-batches and ranks into their mean. Banks are
    launched in one order, the same on every rank: that in which rank 0's first backward completed them.

    What a bank goes through            from                                   to
    slot.fresh: holds no gradient       its bank's update                      its next gradient
    slot.arrived, bank.arrivals         a gradient                             the next arm()
    bank.armed: may be launched         arm(), if it updates in this step      step()
    bank.launched: may not be written   its last gradient, in launch order     step()
    """

    def __init__(self, banks: Sequence[Bank], comm: Comm, grad_factor: float = 1.0,
                 settings: SyncSettings = SyncSettings(), compiled: bool = False, model: nn.Module | None = None):
        """model: whose modules wait for their banks before they run, which a lazy gather needs; and whose parameters
        are seen to be those of the banks, at once and before each step."""
        self.banks, self.comm, self.grad_factor, self.settings = list(banks), comm, grad_factor, settings
        self.order: list[Bank] | None = None
        self.completed: list[Bank] = []  # in the first backward, by their last gradient
        self.due: list[Bank] = []        # armed banks, in launch order
        self.launches = 0                # of them, since arm()
        self.armed_step = -1
        self.span: Callable[[str], Any] = lambda name: contextlib.nullcontext()  # what profiling puts its ranges in
        functions = {bank.rule.function for bank in banks}
        self.functions = {f: torch.compile(f, dynamic=False) if compiled else f for f in functions}
        # compiled code takes numbers as tensors, or it would be compiled again for each; of its own in each place
        as_tensor = functools.lru_cache(256)(lambda place, x: torch.full((), x, device=banks[0].values.device))
        self.number = as_tensor if compiled else lambda place, x: x
        self.home: dict[nn.Parameter, Bank] = {}
        # where the model holds each parameter: (the parameter, its name, the module's own table, the name in there)
        self.places = [(param, f"{prefix}.{key}".lstrip("."), module._parameters, key)
                       for prefix, module in (model.named_modules() if model is not None else ())
                       for key, param in module._parameters.items() if param is not None and param.requires_grad]
        self._find_homes(model)
        self._check_plans()
        self.forward_hooks = []
        for bank in banks:
            comm.broadcast(bank.values)
            for slot in bank.slots:
                self._hook(bank, slot)
        if settings.lazy_gather:
            for part, params in outer_parts(model):
                reads = list(dict.fromkeys(self.home[p] for p in params if p in self.home))
                self.forward_hooks.append(part.register_forward_pre_hook(
                    lambda part, inputs, reads=reads: self.finish_gathers(reads)))

    # a gradient arrives

    def _hook(self, bank: Bank, slot: Slot) -> None:
        self._unhook(slot)  # of an optimizer that was built before
        slot.param.bank_hook = slot.param.register_post_accumulate_grad_hook(lambda _: self._register_grad(bank, slot))

    @staticmethod
    def _unhook(slot: Slot) -> None:
        if hasattr(slot.param, "bank_hook"):
            slot.param.bank_hook.remove()
            del slot.param.bank_hook

    def remove_hooks(self) -> None:
        for bank in self.banks:
            for slot in bank.slots:
                self._unhook(slot)
        for hook in self.forward_hooks:
            hook.remove()

    def _register_grad(self, bank: Bank, slot: Slot) -> None:
        if bank.launched:
            raise RunError(f"{slot.name} got a gradient after its bank {bank.name} was launched; call step() "
                           "before the next backward")
        if bank.armed and slot.arrived:
            raise RunError(f"{slot.name} got its gradient twice in one armed micro-batch; arm() only before the last "
                           "backward of a step, and do not run a part of the model twice in backward")
        bank.add(slot, self.grad_factor, self.settings.exact)
        if self.order is None:
            if bank.complete and bank not in self.completed:
                self.completed.append(bank)
        elif bank.armed and self.settings.sync == "hook":  # a bank that is ready early waits for its turn
            while self.launches < len(self.due) and self.due[self.launches].complete:
                self._launch(self.due[self.launches])

    def _launch(self, bank: Bank) -> None:
        with self.span(f"launch {bank.name}"):
            if self.settings.exact:
                bank.fell_trees()
            reduce_scatter = self.comm.reduce_scatter_exactly if self.settings.exact else self.comm.reduce_scatter
            bank.work = reduce_scatter(bank.shard_grads, bank.grads)
            bank.launched = True
            self.launches += 1

    # a step

    def arm(self, step: int) -> None:
        """From here on gradients complete their banks: call before the backward of the last micro-batch of a step."""
        for bank in self.banks:
            if bank.launched:
                raise RunError(f"bank {bank.name} is launched already; call step() before arming the next one")
            bank.armed = self.settings.exact or self._updates_in(bank, step)
            bank.arrivals = 0
            for slot in bank.slots:
                slot.arrived = False
        self.armed_step = step
        self.due = [bank for bank in self.order or self.banks if bank.armed]
        self.launches = 0

    def _updates_in(self, bank: Bank, step: int) -> bool:
        return (step + 1) % bank.rule.every == 0

    @torch.no_grad()
    def step(self, values: StepValues) -> None:
        """Wait for each bank in turn, update this rank's shard, gather. Unless lazy, all parameters are then new."""
        if self.armed_step < 0:
            raise RunError("step() without arm(): arm it and run a backward first")
        for param, name, table, key in self.places:
            if table.get(key) is not param:
                raise RunError(f"{name} is another parameter than when the banks were built; build the optimizer after "
                               "what replaces parameters, such as load_state_dict(assign=True)")
        for bank in self.due:
            bank.check_views()
            if not bank.complete and not self.settings.unused:
                missing = ", ".join(slot.name for slot in bank.slots if not slot.arrived)
                raise RunError(f"bank {bank.name} was not launched: {bank.arrivals} of {len(bank.slots)} of its "
                               f"parameters got a gradient, not {missing}; each must take part in the armed backward, "
                               "unless unused parameters are allowed")
        if self.order is None:
            self._agree_on_order()
            self._check_order()
        for bank in self.due[self.launches:]:
            for slot in bank.slots:
                if slot.fresh:  # unused
                    slot.grad.zero_()
            self._launch(bank)
        untouched = self._find_untouched() if self.settings.unused else set()
        turns = self.due if self.settings.walk == "launch" else self.due[::-1]
        if self.settings.check_grads or self.settings.clip_norm:
            for bank in self.due:
                self._wait(bank)
            self._check_and_clip()
        for bank in turns:
            self._wait(bank)
            if self._updates_in(bank, self.armed_step):
                self._update(bank, values, untouched)
                with self.span(f"gather {bank.name}"):
                    bank.gathering = self.comm.all_gather(bank.values, bank.shard_values)
        for bank in self.due:
            bank.armed = bank.launched = False
            for slot in bank.slots:
                slot.fresh = slot.fresh or self._updates_in(bank, self.armed_step)
        self.due, self.armed_step = [], -1
        if not self.settings.lazy_gather:
            self.finish_gathers(turns)

    def _wait(self, bank: Bank) -> None:
        if bank.work is None:
            return
        with self.span(f"wait {bank.name}"):
            bank.work.wait()
            bank.work = None
            if bank.pending is not None:
                bank.shard_grads.add_(bank.pending)
            if self.settings.exact:  # every step of a cycle was exchanged
                bank.pending = None if self._updates_in(bank, self.armed_step) else bank.shard_grads.clone()

    def _update(self, bank: Bank, values: StepValues, untouched: set[str]) -> None:
        self.finish_gathers([bank])  # a lazy one that nothing has read since: what it sends must not change
        with self.span(f"update {bank.name}"):
            bank.updates += 1
            kept = [(x, bank.share_of(slot, x), x.view(-1)[bank.share_of(slot, x)].clone()) for slot in bank.slots
                    if slot.name in untouched for x in (bank.shard_values, *bank.state.values())]
            arguments = [self.number(i, a) if isinstance(a, float) else a
                         for i, a in enumerate(bank.rule.arguments(bank, values))]
            function = self.functions[bank.rule.function]
            if self.settings.exact and bank.my_values.dim() > 1:  # a batch may sum in another order than one matrix
                for i in range(len(bank.my_values)):
                    function(*(a[i:i + 1] if isinstance(a, Tensor) and a.dim() else a for a in arguments))
            else:
                function(*arguments)
            for x, where, old in kept:
                x.view(-1)[where] = old

    def finish_gathers(self, banks: Sequence[Bank] | None = None) -> None:
        """Wait until the parameters of these banks, or of all, are whole."""
        for bank in self.banks if banks is None else banks:
            if bank.gathering is not None:
                with self.span(f"wait gather {bank.name}"):
                    bank.gathering.wait()
                bank.gathering = None

    def _find_homes(self, model: nn.Module | None) -> None:
        """Each parameter's bank. RunError if a parameter is in two or in none, or settings exclude each other."""
        for bank in self.banks:
            for slot in bank.slots:
                if slot.param in self.home:
                    raise RunError(f"{slot.name} is in two banks or twice in one; put each parameter into one bank, "
                                   "once")
                if not slot.param.requires_grad:
                    raise RunError(f"{slot.name} is frozen, and its bank would wait for its gradient; leave it out")
                self.home[slot.param] = bank
        for param, name, _, _ in self.places:
            if param not in self.home:
                raise RunError(f"{name} is in no bank, and would never learn; put it into one, or freeze it by "
                               "requires_grad_(False)")
        s = self.settings
        if s.exact and (s.unused or s.clip_norm):
            raise RunError("exact mode excludes unused parameters and clipping: sums depend on the number of ranks")
        if s.lazy_gather and model is None:
            raise RunError("a lazy gather waits in the model's forward; give the optimizer the model")

    def _check_plans(self) -> None:
        """RunError on every rank if their banks differ, before any is sent: one would be summed with another."""
        plan = [f"settings {self.settings}, gradients times {self.grad_factor}, sent by {type(self.comm).__name__}"]
        for bank in self.banks:
            members = ", ".join(f"{slot.name} {list(slot.param.shape)}" for slot in bank.slots)
            kinds = f"{bank.values.dtype}, gradients of {bank.grads.dtype}, {bank.rule}"
            plan.append(f"bank {bank.name} of {kinds}: {members}")
        for rank, other in enumerate(plans := self.comm.all_objects(plan)):
            for first, here in itertools.zip_longest(plans[0], other, fillvalue="nothing"):
                if first != here:
                    raise RunError(f"the ranks' models differ: rank {rank} has {here}; rank 0 has {first}. Build the "
                                   "same model from the same config on every rank")

    def _agree_on_order(self) -> None:
        """Rank 0's order for all: first the banks that its backward completed, then those that it did not."""
        unseen = [bank for bank in self.banks if bank not in self.completed]
        mine = [self.banks.index(bank) for bank in self.completed + unseen]
        self.order = [self.banks[i] for i in self.comm.all_objects(mine)[0]]
        self.due = [bank for bank in self.order if bank.armed]

    def _check_order(self) -> None:
        """RunError on every rank if they would launch in different orders: sums of different banks, without a word."""
        orders = self.comm.all_objects([bank.name for bank in self.order])
        for rank, order in enumerate(orders):
            if order != orders[0]:
                raise RunError(f"rank {rank} would launch the banks in the order {', '.join(order)}; rank 0 in "
                               f"{', '.join(orders[0])}; let both come from one backward")

    def _find_untouched(self) -> set[str]:
        """Names of the parameters that no rank used since their last update."""
        slots = [slot for bank in self.due for slot in bank.slots]
        used = torch.tensor([float(not slot.fresh) for slot in slots], device=self.banks[0].values.device)
        return {slot.name for slot, count in zip(slots, self.comm.all_reduce(used).tolist()) if not count}

    def _check_and_clip(self) -> None:
        """RunError on every rank if a gradient is not finite on any; then scale all if their norm is too large."""
        squares = torch.stack([bank.shard_grads.double().square().sum() for bank in self.due])
        total = self.comm.all_reduce(squares.sum()).item()
        if not math.isfinite(total):
            bad = [slot.name for bank in self.due for slot in bank.slots
                   if not bank.shard_grads[bank.share_of(slot, bank.shard_grads)].isfinite().all()]
            named = sorted({name for names in self.comm.all_objects(bad) for name in names})
            raise RunError(f"gradients that step {self.armed_step} sums are not finite: {', '.join(named)}; the step "
                           "was not applied. Lower the learning rates, or look at the data of this step")
        norm = math.sqrt(total)
        if self.settings.clip_norm and norm > self.settings.clip_norm:
            for bank in self.due:
                bank.shard_grads.mul_(self.settings.clip_norm / norm)

    # its state

    def snapshot(self) -> list[tuple]:
        self.finish_gathers()
        return [bank.snapshot() for bank in self.banks]

    def restore(self, snapshot: list[tuple]) -> None:
        self.finish_gathers()
        for bank, saved in zip(self.banks, snapshot):
            bank.restore(saved)

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter and every tensor of its state, whole on every rank, whatever the number of ranks."""
        self.finish_gathers()
        for bank in self.banks:
            wholes = {"": bank.values}
            for key, mine in bank.state.items():
                whole = torch.empty(self.comm.ranks * mine.numel(), dtype=mine.dtype, device=mine.device)
                wholes["." + key] = whole
                self.comm.all_gather(whole, mine.reshape(-1)).wait()
            for slot in bank.slots:
                for key, whole in wholes.items():
                    ends = (slot.offset, slot.offset + slot.param.numel())
                    yield slot.name + key, whole[slice(*(end * len(whole) // len(bank.values) for end in ends))]

    def state_hash(self) -> str:
        """SHA-256 of all parameters, their state, and how often each was updated."""
        updates = repr(sorted((slot.name, bank.updates) for bank in self.banks for slot in bank.slots))
        return hash_of(sorted(self.named_state(), key=lambda item: item[0]), updates)

def hash_of(tensors: Sequence[tuple[str, Tensor]], further: str = "") -> str:
    """SHA-256 over names and bytes of tensors; several are hashed at a time."""
    def line(item: tuple[str, Tensor]) -> str:
        raw = item[1].detach().reshape(-1).view(torch.uint8).cpu().numpy()
        return f"{item[0]} {hashlib.sha256(raw).hexdigest()}\n"
    with ThreadPoolExecutor() as pool:
        return hashlib.sha256("".join([*pool.map(line, tensors), further]).encode()).hexdigest()

# ------------------------------------------------------------------------------------------------------------------
# assignment

class Assignment(NamedTuple):
    """Which parameters a rule updates, by a pattern of their names; see Member for parts and scale."""

    pattern: str
    rule: Callable[[nn.Parameter], Adam | NorMuon]
    parts: int = 1
    scale: float = 1.0

def assignments(config: Config) -> tuple[Assignment, ...]:
    """The table: every parameter of GPT matches exactly one line."""
    c, dtype = config, getattr(torch, config.dtype)

    def adam_rule(multiplier: float) -> Callable[[nn.Parameter], Adam]:
        return lambda p: Adam(c.adam_lr * multiplier, c.adam_beta1, c.adam_beta2, c.adam_eps, c.adam_every, dtype)

    def normuon_rule(p: nn.Parameter) -> NorMuon:
        return NorMuon(c.muon_lr, c.muon_weight_decay, c.muon_beta2, dtype, wide=p.shape[1] > p.shape[0])

    return (
        Assignment("embed.weight", adam_rule(c.embed_lr_mul)),
        Assignment("value_embeds.*.weight", adam_rule(c.embed_lr_mul)),
        Assignment("lm_head.weight", adam_rule(1.0)),
        Assignment("scalars", adam_rule(c.scalar_lr_mul)),
        Assignment("smear_gate", normuon_rule),
        Assignment("blocks.*.attn.gate", normuon_rule),
        Assignment("blocks.*.attn.qkvo", normuon_rule, parts=4),
        Assignment("blocks.*.mlp.fc", normuon_rule, scale=c.fc_lr_mul),
        Assignment("blocks.*.mlp.proj", normuon_rule),
    )

def assign(model: nn.Module, table: Sequence[Assignment]) -> list[Member]:
    """Each parameter that learns with its rule, in the model's order. RunError unless exactly one line matches each."""
    members = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        lines = [line for line in table if fnmatchcase(name, line.pattern)]
        if len(lines) != 1:
            raise RunError(f"{name}: {len(lines)} lines of the table of assignments match it "
                           f"({', '.join(line.pattern for line in lines) or 'none'}); one must")
        line, rule = lines[0], lines[0].rule(param)
        # a tall matrix moves more (Keller Jordan's Muon); shape as stored, not that of its parts
        tall = math.sqrt(max(1, param.shape[0] / param.shape[1])) if isinstance(rule, NorMuon) else 1.0
        members.append(Member(name, param, rule, line.parts, line.scale * tall))
    return members

def build_model(config: Config, vocab_size: int, bos_id: int) -> GPT:
    """The model of a config, with its initial parameters, on the CPU: the same for a seed on every machine."""
    torch.manual_seed(config.seed)
    return GPT(vocab_size=vocab_size, bos_id=bos_id, layers=parse_layers(config.layers), model_dim=config.model_dim,
               num_heads=config.num_heads, gate_dim=config.gate_dim, backout_layer=config.backout_layer,
               max_tokens=max(config.micro_tokens, config.val_len, SAMPLE_CONTEXT), loss_tokens=config.micro_tokens,
               dtype=getattr(torch, config.dtype), fp8_head=config.fp8_head)

def build_optimizer(config: Config, model: GPT, comm: Comm, compiled: bool = False,
                    grad_divisor: int = 0) -> BankOptimizer:
    """The optimizer of a config for a model that is on its device.

    grad_divisor: of the batch's summed gradient; 0: how many slots the batch has. Where micro-batches were made smaller
    it is what it was before, so that gradients keep their size.
    """
    members = assign(model, assignments(config))
    banks = fill_banks(members, config.bank_mb * 2 ** 20, comm.rank, comm.ranks, config.fp32_grads)
    settings = SyncSettings(**{f.name: getattr(config, f.name) for f in dataclasses.fields(SyncSettings)})
    return BankOptimizer(banks, comm, 1 / (grad_divisor or config.slots), settings, compiled, model)

# ------------------------------------------------------------------------------------------------------------------
# schedules

def step_values(config: Config, step: int) -> StepValues:
    """Learning-rate factor and momentum of one step."""
    c = config
    done = min(0.9999, step / (c.num_steps - c.extension_steps))  # the record's: never all the way to the floor
    left = min(1.0, (1 - done) / c.cooldown) if c.cooldown else 1.0
    fall_from = c.num_steps - c.muon_momentum_fall
    if step < c.muon_momentum_rise:
        height = step / c.muon_momentum_rise
    elif step > fall_from:
        height = 1 - (step - fall_from) / c.muon_momentum_fall
    else:
        height = 1.0
    momentum = c.muon_momentum_low + height * (c.muon_momentum - c.muon_momentum_low)
    return StepValues(left + (1 - left) * c.lr_floor, momentum)

def long_window(config: Config, step: int) -> int:
    """The long window, in blocks, of a training step and of a validation before it."""
    parts = [int(word) for word in config.windows.split()]
    scheduled = config.num_steps - config.extension_steps
    return parts[step * len(parts) // scheduled] if step < scheduled else config.extension_window

class WindowSchedule:
    """Stretches the rotary when a step's long window first differs from the one before."""

    def __init__(self, config: Config, rotary: Rotary):
        self.config, self.rotary = config, rotary
        self.restart()

    def restart(self) -> None:
        self.blocks, self.scale = long_window(self.config, 0), Rotary.FIRST_SCALE
        self.rotary.set(rotary_frequencies(2 * self.rotary.cos.size(1)), self.scale)

    def advance_to(self, step: int) -> Windows:
        """Those of a training step and of a validation before it; in the last one the long window alone is longer. The
        rotary is stretched on the way, so steps are asked for in their order."""
        c, blocks = self.config, long_window(self.config, step)
        if blocks != self.blocks:
            old, new = self.blocks * c.window_block, blocks * c.window_block
            frequencies, self.scale = stretch(self.rotary.frequencies, self.scale, old, new)
            self.rotary.set(frequencies, self.scale)
            self.blocks = blocks
        longest = c.final_window if step == c.num_steps else blocks
        return Windows(longest * c.window_block, blocks // 2 * c.window_block)

# ------------------------------------------------------------------------------------------------------------------
# validation, log, checkpoint

@torch.no_grad()
def validate(model: GPT, sequences: np.ndarray, windows: Windows, comm: Comm,
             device: torch.device) -> tuple[float, int]:
    """(mean loss in nats a token, tokens scored) over sequences int32 [n, length + 1], shared out over the ranks.

    Each sequence's loss has a place of its own, so the mean does not depend on the number of ranks.
    """
    model.eval()
    losses = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    for i in range(comm.rank, len(sequences), comm.ranks):
        inputs, targets = split_sequence(sequences[i], device)
        losses[i] = model(inputs.clamp_min(0), targets, windows)
    model.train()
    tokens = int((sequences[:, 1:] >= 0).sum())
    return comm.all_reduce(losses).sum().item() / tokens, tokens

def split_sequence(sequence: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """[T + 1] tokens -> inputs int32 [T], targets int64 [T] on the device, without waiting for it."""
    tokens = torch.from_numpy(sequence.astype(np.int32))
    if device.type == "cuda":
        tokens = tokens.pin_memory().to(device, non_blocking=True)
    return tokens[:-1], tokens[1:].long()

class TrainLosses:
    """Training losses, read without making the host wait for the device: a loss is there some steps after its step."""

    def __init__(self, config: Config, comm: Comm):
        self.config, self.comm = config, comm
        self.pending: list[tuple[int, float, Tensor, Any]] = []

    def record(self, step: int, train_time: float, losses: list[Tensor]) -> None:
        """losses: the summed loss of each of this rank's slots. Every so-manieth step's are averaged over all ranks."""
        c, own = self.config, torch.stack(losses).detach()
        slots = own.new_zeros(c.slots)
        slots[self.comm.rank * len(own):(self.comm.rank + 1) * len(own)] = own
        if self.is_logged(step):
            self.comm.all_reduce(slots)
        event = None
        if own.is_cuda:
            slots = torch.empty(slots.shape, dtype=slots.dtype, pin_memory=True).copy_(slots, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.pending.append((step, train_time, slots, event))

    def is_logged(self, step: int) -> bool:
        return self.config.train_loss_every > 0 and step % self.config.train_loss_every == 0

    def arrived(self, wait: bool = False) -> Iterator[tuple[int, float, float | None]]:
        """(step, its train time, mean loss in nats a token or None where not logged). RunError if not finite."""
        while self.pending and (wait or self.pending[0][-1] is None or self.pending[0][-1].query()):
            step, train_time, slots, event = self.pending.pop(0)
            if event is not None:
                event.synchronize()
            if not slots.isfinite().all():
                raise RunError(f"the training loss of step {step} is not finite; lower the learning rates, or look at "
                               "the data that it read. The log is kept")
            mean = slots.sum(dtype=torch.float64).item() / self.config.batch_tokens
            yield step, train_time, mean if self.is_logged(step) else None

class Clock:
    """Milliseconds of training. It stands still for what is outside; each such span is named and timed."""

    def __init__(self, device: torch.device):
        self.device, self.elapsed, self.since = device, 0.0, None
        self.outside: dict[str, float] = {}

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def start(self) -> None:
        self.since = self._now()

    def stop(self) -> None:
        self.elapsed += 1000 * (self._now() - self.since)
        self.since = None

    def read(self) -> float:
        """Without waiting for the device: what the host has seen of the time so far."""
        return self.elapsed + (1000 * (time.perf_counter() - self.since) if self.since is not None else 0.0)

    @contextlib.contextmanager
    def off(self, name: str) -> Iterator[None]:
        """Seconds within are counted under this name and not as training."""
        begin = self._now()
        yield
        self.outside[name] = self.outside.get(name, 0.0) + self._now() - begin

class Log:
    """The only file and the only voice of a run; rank 0's. Each line is in the file when write returns."""

    def __init__(self, config: Config, rank: int):
        self.config, self.rank, self.bar = config, rank, None
        self.run_id = config.run_id or f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{uuid.uuid4().hex[:8]}"
        self.file, self.last_line = None, 0.0
        self.shown_loss = ""  # the latest that is known

    @property
    def path(self) -> Path:
        return ROOT / self.config.log_dir / f"{self.run_id}.txt"

    def open(self, start: dict[str, Any], environment: str) -> None:
        """Rank 0 creates the file with the source, the environment and the run's description. RunError if it cannot."""
        try:
            with contextlib.suppress(FileExistsError):  # a file in its place shows in the next line
                self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "x", encoding="utf-8", buffering=1)
        except FileExistsError as error:
            raise RunError(f"{self.path} exists: run_id {self.run_id!r} was used; choose another --run_id, or delete "
                           "that log") from error
        except OSError as error:
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); mend that, or choose another "
                           "--log_dir") from error
        rule, source = "=" * 100, Path(__file__).read_text(encoding="utf-8")
        try:
            self.write(f"{source}\n{rule}\n{environment}\n{rule}\n{json.dumps(start)}")
        except RunError:
            self.path.unlink()
            raise

    def write(self, line: str) -> None:
        if self.file is None:
            return
        try:
            self.file.write(line + "\n")
            self.file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):
                self.file.close()
            self.file = None
            raise RunError(f"{self.path}: cannot be written ({error.strerror}); free space or choose another "
                           "--log_dir") from error

    def say(self, line: str) -> None:
        """To the terminal only."""
        if self.rank:
            return
        if self.bar is not None:
            self.bar.write(line)
        else:
            print(line, flush=True)

    def progress(self, step: int, loss: float | None, clock: Clock) -> None:
        """A bar on a terminal, gone after the last step; in a pipe a line every few seconds."""
        c = self.config
        if self.rank:
            return
        if loss is not None:
            self.shown_loss = f"loss {loss:.4f}  "
        per_step = clock.read() / step
        speed = f"{self.shown_loss}{c.batch_tokens / per_step * 1000:,.0f} tokens/s"
        if sys.stdout.isatty():
            if self.bar is None:
                from tqdm import tqdm
                self.bar = tqdm(total=c.num_steps, unit="step", file=sys.stdout, dynamic_ncols=True, leave=False)
            self.bar.set_postfix_str(speed, refresh=False)
            self.bar.update(step - self.bar.n)
            if step == c.num_steps:
                self.bar.close()
                self.bar = None
        elif time.monotonic() - self.last_line > 5:
            self.last_line = time.monotonic()
            self.say(f"step {step}/{c.num_steps}  {speed}  {per_step * (c.num_steps - step) / 1000:.0f} s left")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()
            self.bar = None
        if self.file:
            self.file.close()
            self.file = None

def save_model(path: Path, model: GPT, config: Config, run_id: str, step: int, windows: Windows,
               encoding: Shard) -> None:
    """For evaluation by another process: load_model(path) builds the same model. Written whole or not at all."""
    partial = path.with_suffix(".partial")
    try:
        torch.save({"config": dataclasses.asdict(config), "run_id": run_id, "step": step, "windows": list(windows),
                    "vocab_size": encoding.vocab_size, "bos_id": encoding.bos_id,
                    "model": {name: x.cpu() for name, x in model.state_dict().items()}}, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch tells a full disk in words of its own
        partial.unlink(missing_ok=True)
        raise RunError(f"{path}: the model cannot be written ({error}); free space or choose another --log_dir, and "
                       "run again: the log is whole, the model is lost") from error

def load_model(path: str | Path, device: str = "cpu") -> tuple[GPT, dict[str, Any]]:
    """A model that save_model wrote, in evaluation form, and the rest of what was saved with it."""
    try:
        saved = torch.load(path, map_location="cpu", weights_only=True)
        model = build_model(Config(**saved["config"]), saved["vocab_size"], saved["bos_id"])
        model.load_state_dict(saved.pop("model"))
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror}); name a .pt that --save_model left") from error
    except Exception as error:  # torch.load raises many kinds, and advises to trust the file
        raise RunError(f"{path}: holds no model of this version of train_gpt.py ({type(error).__name__}); name a .pt "
                       "that its --save_model left") from error
    model.rotary.tabulate()
    return model.to(device).eval(), saved

SAMPLE_CONTEXT = 2 * MASK_BLOCK

@torch.no_grad()
def sample(model: GPT, windows: Windows, tokens: int, vocab_size: int, seed: int,
           temperature: float = 0.8) -> list[int]:
    """Tokens drawn one by one from the model, which is given BOS and then the last SAMPLE_CONTEXT of what it said."""
    draw = np.random.default_rng(seed)
    said = [model.bos_id]
    model.eval()
    while len(said) <= tokens:
        known = said[-SAMPLE_CONTEXT:]
        # one length for all, or compiled blocks would be compiled for each; what follows does not reach what is known
        context = torch.tensor(known + [model.bos_id] * (SAMPLE_CONTEXT - len(known)), device=model.scalars.device)
        logits = model.logits(context, windows)[len(known) - 1, :vocab_size].double() / temperature
        chances = logits.softmax(0).cpu().numpy()
        said.append(int(draw.choice(vocab_size, p=chances / chances.sum())))
        if said[-1] == model.bos_id:
            break
    model.train()
    return said[1:]

def decode(tokens: Sequence[int], encoding: Shard) -> str:
    """Text of tokens: bytes where the vocabulary is that of bytes, else GPT-2's."""
    if encoding.vocab_size <= 257:
        return bytes(t for t in tokens if t < 256).decode("utf-8", errors="replace")
    try:
        import tiktoken
        return tiktoken.get_encoding("gpt2").decode([t for t in tokens if t < encoding.bos_id])
    except Exception as error:  # tiktoken fetches its vocabulary, which may fail in many ways
        return f"(no text: GPT-2's vocabulary could not be had: {error})"

# ------------------------------------------------------------------------------------------------------------------
# main

class Watch:
    """Tells every rank of a failure on one, also those in a collective: within seconds all have said why and left.

    Without it the others would learn of it by a time-out, or be killed without a word.
    """

    PERIOD_S, PATIENCE_S = 0.2, 5.0

    def __init__(self, store: dist.Store, rank: int, ranks: int, log: Log):
        self.store, self.rank, self.ranks, self.log = store, rank, ranks, log
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._watch, args=(store.clone(),), daemon=True)
        self.thread.start()

    def _watch(self, store: dist.Store) -> None:
        while not self.over.wait(self.PERIOD_S):
            try:
                failed = store.check(["failure"])
            except RuntimeError:  # the store's host is gone, and with it whoever could be told
                return
            if failed:
                complain(self.log, self.rank, store.get("failure").decode())
                store.set(f"heard-{self.rank}", "")
                os._exit(1)

    def tell(self, message: str) -> None:
        """Say it to the other ranks and wait, a little, until they have heard: when one has left, all are killed."""
        self.stop()
        self.store.set(f"heard-{self.rank}", "")
        self.store.set("failure", message)
        with contextlib.suppress(RuntimeError):
            self.store.wait([f"heard-{rank}" for rank in range(self.ranks)], timedelta(seconds=self.PATIENCE_S))

    def stop(self) -> None:
        self.over.set()
        self.thread.join()

def complain(log: Log | None, rank: int, message: str) -> None:
    kept = ""
    if log:
        if log.file:
            kept = f"; the log so far: {log.path}"
            with contextlib.suppress(RunError):
                log.write(f"error: {message}")
        log.close()
    print(f"train_gpt.py: rank {rank}: error: {message}{kept}", file=sys.stderr, flush=True)

def output_of(*command: str) -> str:
    """What a command prints, or nothing where it cannot be run."""
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""

def cpu_name() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()

def describe_machine(device: torch.device) -> tuple[dict[str, Any], str]:
    """(hardware, versions and the environment's switches for the JSON line, the free text above it)."""
    on_gpu, cpu, cores = device.type == "cuda", cpu_name(), os.cpu_count()
    rows = output_of("nvidia-smi", "--query-gpu=name,uuid,driver_version", "--format=csv,noheader").splitlines()
    gpus = [dict(zip(("name", "uuid", "driver"), row.split(", "))) for row in rows] if on_gpu else []
    name = torch.cuda.get_device_name() if on_gpu else cpu
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
                "triton": None}
    with contextlib.suppress(ImportError):
        import triton
        versions["triton"] = triton.__version__
    text = (f"Running Python {sys.version}\nRunning PyTorch {torch.__version__} compiled for CUDA "
            f"{torch.version.cuda}\nRunning Triton version {versions['triton']}\n")
    text += output_of("nvidia-smi") if on_gpu else f"{cpu}, {cores} cores, {platform.platform()}"
    prefixes = ("TORCH", "PYTORCH", "TRITON", "INDUCTOR", "NCCL", "CUDA_", "OMP_")
    environment = {key: setting for key, setting in sorted(os.environ.items()) if key.startswith(prefixes)}
    hardware = {"device": name, "gpus": gpus, "cpu": cpu, "cores": cores}
    return {"hardware": hardware, "versions": versions, "environment": environment}, text

def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()

def describe_shards(shards: list[Shard]) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(len(shards)) as pool:
        digests = pool.map(file_sha256, [shard.path for shard in shards])
        return [{"name": shard.path.name, "tokens": shard.tokens, "bytes": HEADER_INTS * 4 + 2 * shard.tokens,
                 "sha256": digest} for shard, digest in zip(shards, digests)]

def fit_to_gpus(config: Config, vocab_size: int, comm: Comm) -> tuple[Config, list[str]]:
    """The config without what one of the ranks' GPUs cannot do, the same on all ranks, and the changes in words."""
    gpus = comm.all_objects((torch.cuda.get_device_capability(), torch.cuda.mem_get_info()[0]))
    capability, free = (min(of_each) for of_each in zip(*gpus))
    changes, asked = [], config.micro_tokens
    if config.fp8_head and capability < (8, 9):
        config = dataclasses.replace(config, fp8_head=False)
        changes.append("this GPU has no fp8: the head's product stays in bf16")
    # how many tokens a product takes at once decides its sums, so exact mode cannot adapt
    while (not config.exact and config.micro_tokens % (2 * MASK_BLOCK) == 0
           and memory_needed(config, vocab_size, comm.ranks) > free):
        config = dataclasses.replace(config, micro_tokens=config.micro_tokens // 2)
    if config.micro_tokens < asked:
        changes.append(f"too little memory for micro-batches of {asked} tokens: {config.slots // comm.ranks} of "
                       f"{config.micro_tokens} a rank")
    return config, changes

def memory_needed(config: Config, vocab_size: int, ranks: int) -> int:
    """A generous guess at a rank's peak in bytes: parameters, gradients and this rank's share of their state, and what
    a micro-batch leaves for backward: logits several times over, and of each layer some thirty tensors of its width."""
    layers = parse_layers(config.layers)
    matrices = sum((4 if layer.window else 0) + (8 if layer.mlp else 0) for layer in layers) * config.model_dim ** 2
    tables = (2 + sum(layer.value_table is not None for layer in layers)) * vocab_size * config.model_dim
    fixed = (4 * matrices + 2 * tables) * (2 + 2 / ranks)
    return int(fixed + config.micro_tokens * (8 * vocab_size + 2 * 30 * len(layers) * config.model_dim))

def compile_stats() -> tuple[int, float]:
    """(graphs, seconds) of torch.compile in this process."""
    if "torch._dynamo" not in sys.modules:
        return 0, 0.0
    utils = torch._dynamo.utils
    return utils.counters["stats"]["unique_graphs"], utils.calculate_time_spent().get("total_wall_time", 0.0)

def peak_memory_mib(device: torch.device) -> tuple[int, int]:
    """(allocated, reserved) on a GPU; on a CPU the process's largest resident set, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() >> 20, torch.cuda.max_memory_reserved() >> 20
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) >> 20
    return resident, resident

class Trainer:
    """Model, optimizer, data and schedule of one rank, and the step that they make together."""

    def __init__(self, config: Config, comm: Comm, device: torch.device, train_shards: list[Shard],
                 grad_divisor: int = 0):
        """grad_divisor: see build_optimizer."""
        compiled = config.compile == "on" or (config.compile == "auto" and device.type == "cuda")
        self.config, self.comm, self.device = config, comm, device
        if config.exact:
            torch.set_num_threads(1)  # how a product is split over threads decides the order of its sums
        self.stream = Stream(train_shards, config, comm.rank, comm.ranks)
        self.model = build_model(config, train_shards[0].vocab_size, train_shards[0].bos_id).to(device)
        if compiled:
            self.model.compile_parts()
        self.optimizer = build_optimizer(config, self.model, comm, compiled, grad_divisor)
        self.windows = WindowSchedule(config, self.model.rotary)

    def step(self, step: int, batch: list[np.ndarray]) -> list[Tensor]:
        """One step on this rank's slots of the batch -> their summed losses, still on the device."""
        windows = self.windows.advance_to(step)
        losses = []
        for slot in batch:
            inputs, targets = split_sequence(slot, self.device)
            if len(losses) == len(batch) - 1:
                self.optimizer.arm(step)
            with self.optimizer.span("forward"):
                loss = self.model(inputs, targets, windows)
            with self.optimizer.span("backward"):
                loss.backward()
            losses.append(loss.detach())
        with self.optimizer.span("step"):
            self.optimizer.step(step_values(self.config, step))
        return losses

    def warm_up(self, val_sequence: np.ndarray) -> None:
        """Every window and kind of step, so that nothing is compiled or allocated on the clock; then all is reset."""
        c = self.config
        saved = self.optimizer.snapshot()
        changes = [step for step in range(c.num_steps) if not step or long_window(c, step) != long_window(c, step - 1)]
        batch = self.stream.next_batch()
        for i in range(c.warmup_steps):
            # from the first cycle of Adam's that begins with the new window, each of its steps in turn
            change = changes[i // c.adam_every % len(changes)]
            self.step(-(-change // c.adam_every) * c.adam_every + i % c.adam_every, batch)
        if c.warmup_steps:
            sequences = val_sequence[None].repeat(self.comm.ranks, 0)
            validate(self.model, sequences, self.windows.advance_to(c.num_steps), self.comm, self.device)
        self.optimizer.restore(saved)
        self.windows.restart()
        self.stream.seek((0, 0))

    def digest_of_tokens(self) -> str:
        """SHA-256 over what all ranks have read, slot by slot: the same for any number of ranks."""
        everyones = self.comm.all_objects([digest.digest() for digest in self.stream.digests])
        return hashlib.sha256(b"".join(digest for digests in everyones for digest in digests)).hexdigest()

class Profile:
    """A Chrome trace of some steps, with a range for each phase of each bank. Outside these steps it costs nothing."""

    def __init__(self, config: Config, optimizer: BankOptimizer, clock: Clock, log: Log):
        self.steps = profiled_steps(config) if config.profile else range(0)
        self.optimizer, self.plain_span, self.clock, self.log = optimizer, optimizer.span, clock, log
        device = clock.device
        kinds = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * (device.type == "cuda")
        self.profiler = torch.profiler.profile(activities=kinds) if self.steps else None

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        if step not in self.steps:
            yield
            return
        if step == self.steps[0]:
            self.profiler.start()
            self.optimizer.span = torch.profiler.record_function
        with torch.profiler.record_function(f"ProfilerStep#{step}"):
            yield
        if step == self.steps[-1]:
            self.clock.stop()
            with self.clock.off("profiling"):
                self.profiler.stop()
                self._export(self.log.path.with_name(f"{self.log.path.stem}-rank{self.log.rank}.json.gz"))
            self.optimizer.span = self.plain_span
            self.clock.start()

    def _export(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.profiler.export_chrome_trace(str(path))
        except OSError as error:
            path.unlink(missing_ok=True)
            raise RunError(f"{path}: cannot be written ({error.strerror}); free space or choose another --log_dir; the "
                           "trace is made in the system's folder for temporary files first") from error
        self.log.say(f"trace: {path}")

def run(config: Config, preset: str, comm: Comm, device: torch.device, log: Log, began: float) -> None:
    """The whole race, from the data to the verdict. began: when the process started, by time.perf_counter."""
    clock = Clock(device)
    clock.outside["joining"] = time.perf_counter() - began
    with clock.off("setup"):
        train_shards = find_shards(config.train_files, config.train_shards)
        val_shards = find_shards(config.val_files)
        encoding = train_shards[0]
        if val_shards[0][2:] != encoding[2:]:
            raise RunError(f"vocabulary and BOS of the training shards are {encoding[2:]}, of the validation shards "
                           f"{val_shards[0][2:]}; make both with one encoding")
        changes, grad_divisor = [], config.slots
        if device.type == "cuda":
            config, changes = fit_to_gpus(config, encoding.vocab_size, comm)
            if config.micro_tokens % MASK_BLOCK or config.val_len % MASK_BLOCK:
                raise RunError(f"micro_tokens {config.micro_tokens} and val_len {config.val_len} must be multiples of "
                               f"{MASK_BLOCK} on GPUs")
        val_sequences = validation_sequences(val_shards, config.val_tokens, config.val_len)
        trainer = Trainer(config, comm, device, train_shards, grad_divisor)
        trainer.stream.check_enough(config.num_steps)
        model, optimizer, windows = trainer.model, trainer.optimizer, trainer.windows
        parameters = sum(p.numel() for p in model.parameters())
        if comm.rank == 0:
            machine, environment = describe_machine(device)
            revision = output_of("git", "rev-parse", "HEAD")
            log.open({
                "run_id": log.run_id, "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "preset": preset,
                "config": dataclasses.asdict(config), "seed": config.seed, "changes": changes,
                "git": {"revision": revision, "clean": not output_of("git", "status", "--porcelain")} if revision
                else None,
                "source_sha256": file_sha256(Path(__file__)), "ranks": comm.ranks, **machine,
                "shards": {"train": describe_shards(train_shards), "val": describe_shards(val_shards)},
                "parameters": parameters, "target_val_loss": config.target_val_loss,
                "race": {"race_id": config.race_id, "run": config.race_run, "declared_n": config.race_runs,
                         "side": config.race_side} if config.race_id else None,
            }, environment)
            val_tokens = int((val_sequences[:, 1:] >= 0).sum())
            log.say(f"preset {preset}: {comm.ranks} rank(s) on {machine['hardware']['device']}, "
                    f"{parameters / 1e6:.1f} M parameters, {config.num_steps} steps of {config.batch_tokens:,} tokens, "
                    f"validation on {val_tokens:,}")
        for change in changes:
            log.say(change)
    with clock.off("hashing"):
        hash_before = optimizer.state_hash()
    log.say(f"warm-up: {config.warmup_steps} steps off the clock")
    compile_began = compile_stats()[1]
    with clock.off("warmup"):
        trainer.warm_up(val_sequences[0])
    compiles, compile_ended = compile_stats()
    clock.outside["compile"] = compile_ended - compile_began
    clock.outside["warmup"] -= clock.outside["compile"]
    with clock.off("hashing"):
        hash_after = optimizer.state_hash()
    losses, profile = TrainLosses(config, comm), Profile(config, optimizer, clock, log)

    def write_steps(wait: bool = False) -> None:
        for step, train_time, loss in losses.arrived(wait):
            shown = f"step:{step}/{config.num_steps} train_time:{train_time:.0f}ms step_avg:{train_time / step:.2f}ms"
            log.write(shown if loss is None else f"{shown} train_loss:{loss:.4f}")
            log.progress(step, loss, clock)

    clock.start()
    for step in range(config.num_steps + 1):
        last = step == config.num_steps
        if last or (config.val_every and step % config.val_every == 0):
            optimizer.finish_gathers()
            clock.stop()
            write_steps(wait=True)
            with clock.off("hashing"):
                val_hashes = {"before": hash_of(list(model.state_dict().items()))} if last else {}
            with clock.off("validation"):
                val_loss, val_tokens = validate(model, val_sequences, windows.advance_to(step), comm, device)
            if last:
                with clock.off("hashing"):
                    val_hashes["after"] = hash_of(list(model.state_dict().items()))
            line = (f"step:{step}/{config.num_steps} val_loss:{val_loss:.4f} train_time:{clock.elapsed:.0f}ms "
                    f"step_avg:{clock.elapsed / max(step, 1):.2f}ms")
            log.write(line)
            log.say(line)
            if not math.isfinite(val_loss):
                raise RunError(f"the validation loss before step {step} is {val_loss}; lower the learning rates. The "
                               "log is kept")
            if last:
                break
            clock.start()
        with profile.step(step):
            step_losses = trainer.step(step, trainer.stream.next_batch())
        losses.record(step + 1, clock.read(), step_losses)
        write_steps()
    compiles = compile_stats()[0] - compiles
    with clock.off("hashing"):
        final_hash, tokens_hash = optimizer.state_hash(), trainer.digest_of_tokens()
    allocated, reserved = peak_memory_mib(device)
    reached = val_loss <= config.target_val_loss
    wall_seconds = time.perf_counter() - began
    log.write(json.dumps({"end": {
        "final_val_loss": val_loss, "target_val_loss": config.target_val_loss, "reached": reached,
        "steps": config.num_steps, "train_tokens": config.num_steps * config.batch_tokens, "train_sha256": tokens_hash,
        "val_tokens": val_tokens, "train_time_ms": clock.elapsed, "wall_seconds": wall_seconds,
        "seconds_outside_clock": clock.outside, "compiles_after_warmup": compiles,
        "state_hash": {"before_warmup": hash_before, "after_warmup": hash_after},
        "validation_hash": val_hashes, "final_state_hash": final_hash, "peak_memory_mib": allocated}}))
    log.write(f"peak memory allocated: {allocated} MiB reserved: {reserved} MiB")
    log.say(f"\n{'target reached' if reached else 'target missed'}: validation loss {val_loss:.4f}, target "
            f"{config.target_val_loss:g}, after {clock.elapsed / 1000:.1f} s of training and {wall_seconds:.0f} s in "
            f"all\nlog: {log.path}")
    if comm.rank:
        return
    # the log is whole: what follows may fail or take its time, and nobody waits for it
    final_windows = windows.advance_to(config.num_steps)
    if config.save_model:
        save_model(log.path.with_suffix(".pt"), model, config, log.run_id, config.num_steps, final_windows, encoding)
    if config.sample_tokens:
        # compiled blocks would be compiled once more for the sample's length
        compiled = "torch._dynamo" in sys.modules  # or asking would import it
        with torch.compiler.set_stance("force_eager") if compiled else contextlib.nullcontext():
            said = sample(model, final_windows, config.sample_tokens, encoding.vocab_size, config.seed)
        log.say(f"\nthe model says:\n{decode(said, encoding)}")

# In what gloo and NCCL say when another rank is gone, or does not come
LOST = re.compile(r"timed? ?out|connection (was |is )?(closed|reset|refused)|broken pipe|socket", re.IGNORECASE)

def join(config: Config, rank: int, ranks: int, device: torch.device) -> dist.Store:
    """Form the process group. RunError if the others, or what they need to be found, are not there."""
    timeout, gpu = timedelta(seconds=config.timeout_s), device.type == "cuda"
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, ranks, timeout=timeout))
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=rank, world_size=ranks, timeout=timeout,
                                device_id=device if gpu else None)
    except (ValueError, RuntimeError) as error:
        raise RunError(f"the {ranks} ranks did not find each other ({str(error).splitlines()[0]}); start them by "
                       "torchrun --nproc_per_node, and see that all of them live") from error
    return store

def from_environment(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal():
        raise RunError(f"{name} in the environment is {text!r}; unset it, or start the ranks by torchrun")
    return int(text)

leaving = threading.Event()  # set when this rank has begun to end with an error

def on_sigterm(*_: Any) -> None:
    """An error like others, or nothing where one is being dealt with already."""
    if not leaving.is_set():
        raise RunError("terminated; torchrun does so when another rank has died, and says of which; else somebody "
                       "ended the run: start it again")

def main(argv: Sequence[str] | None = None) -> int:
    """One rank of a run, as torchrun started it, or the only one. Returns the exit status."""
    began = time.perf_counter()
    gpu = torch.cuda.is_available()
    preset, config = parse_config(sys.argv[1:] if argv is None else argv, "speedrun" if gpu else "laptop")
    rank, log, watch = 0, None, None
    try:
        rank, ranks, local_rank = (from_environment(*named) for named in
                                   (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0)))
        log = Log(config, rank)
        check_config(config, ranks)
        device = torch.device("cuda", local_rank) if gpu else torch.device("cpu")
        if gpu:
            gpus = torch.cuda.device_count()
            if local_rank >= gpus:
                raise RunError(f"rank {rank} has no GPU: this machine has {gpus}; lower --nproc_per_node")
            torch.cuda.set_device(device)
        if ranks > 1:
            watch = Watch(dist.PrefixStore("watch", join(config, rank, ranks, device)), rank, ranks, log)
        comm = (CompressedComm if config.compress_grads else Comm)(rank, ranks)
        log.run_id = comm.all_objects(log.run_id)[0]
        run(config, preset, comm, device, log, began)
        log.close()
        if watch:
            watch.stop()
            dist.destroy_process_group()
        return 0
    except (RunError, torch.OutOfMemoryError, KeyboardInterrupt) as error:
        leaving.set()
        interrupted = isinstance(error, KeyboardInterrupt)
        hint = "; lower --micro_tokens" if isinstance(error, torch.OutOfMemoryError) else ""
        message = "interrupted" if interrupted else f"{error}{hint}"
        complain(log, rank, message)
        if watch:
            watch.tell(f"rank {rank} failed: {message}")
        return 130 if interrupted else 1
    except Exception as error:
        leaving.set()
        message, lost = f"{type(error).__name__}: {error}", False
        if watch and isinstance(error, RuntimeError):  # often another rank's end, seen from here
            time.sleep(Watch.PATIENCE_S)               # its own word reaches us by the watch
            lost = LOST.search(message) is not None
        if lost:
            message = (f"another rank did not answer ({message.splitlines()[0]}); see what it said last. Nothing: it "
                       f"was killed (perhaps memory ran out), or it is slower than --timeout_s {config.timeout_s}")
        if watch:
            watch.tell(f"rank {rank} failed: {message}")
        complain(log, rank, message)
        if lost:
            return 1
        raise

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_sigterm)
    sys.exit(main())
