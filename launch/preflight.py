"""Choose the flags with which a run works on this machine: check each part once, and fit the
micro-batches to memory.

    .venv/bin/python launch/preflight.py [--ranks N] [flags of the program]

Each part of a run (attention, each group of layers, the head, the update rules, the collectives) is
computed at its full shapes, and compared with a plain version: float32, uncompiled. If a part fails
on one rank, all ranks disable it by the part's fallback flag, and the check starts again. On GPUs
`micro_batch_splits` doubles until a step fits in memory. The last line is a JSON object with the
flags that a run must take, such as {"attention": "masked"}.

Exit status: 0, 1 if a part fails and no flag avoids it or if a run does not fit, 130 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys


def interrupted(*_):
    os.write(2, b"preflight.py: interrupted\n" * (os.environ.get("RANK", "0") == "0"))
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # the launcher blocks it until here

import argparse
import contextlib
import dataclasses
import functools
import gc
import itertools
import json
import math
import shutil
import sysconfig
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, NamedTuple, Sequence

import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
# python -I leaves out the script's folder
sys.path += [str(ROOT), str(ROOT / "launch"), str(ROOT / "records")]

import logs  # noqa: E402
from ranks import program_of, start as start_ranks  # noqa: E402
import train_gpt as T  # noqa: E402

# Parts


class Part(NamedTuple):
    """A part of a run. compute(False) computes it as the run does, compute(True) by the plain
    version.

    how: the way in which the run computes it. allowed: the largest norm of the difference of the
    two results, relative to the norm of the plain one. fallback: the flag, and its value, that
    avoids this way."""

    name: str
    how: str
    compute: Callable[[bool], Sequence[Tensor]]
    allowed: float
    fallback: tuple[str, Any] | None = None


# Two to four times the differences of bf16 and fp8, uncompiled, on a CPU. polar on the gates' few
# entries: over 0.25. Layers in fp8, forward and backward: 0.18 from 128 tokens on a CPU
ALLOWED = {torch.bfloat16: 0.06, torch.float32: 1e-4}
ALLOWED_IN_FP8 = 0.1
ALLOWED_LAYERS_IN_FP8 = 0.25
ALLOWED_POLAR = 0.06
ALLOWED_POLAR_OF_GATES = 0.9
# tokens of a micro-batch, from its start: the plain version of all would need more memory than a
# GPU has
COMPARED = 16384
LAMBDAS = "scalars", "resid_lambdas", "post_lambdas", "gate_scale"  # scalars of the layers


def way_of(worker):
    """Return how, and the fallback, of parts that are compiled if anything is."""
    return ("compiled", ("compile", "off")) if worker.compiled else ("uncompiled", None)


def program_module(config):
    """Return the module that defines the config's model, train_gpt or frontier."""
    return sys.modules[config.model_type.__module__]


def model_parts(worker):
    """Yield attention, each group of layers, and the head: with gradients, on a micro-batch of
    noise.

    The plain version computes its first COMPARED tokens. No loss depends on the others: equal
    gradients."""
    c = worker.config
    model = worker.model
    device = worker.device
    plan = T.plan_of(c, c.num_steps - 1)
    for name, p in model.named_parameters():  # a zero would hide the parameters behind it
        p.data.fill_(0.5) if p.dim() < 2 or name in LAMBDAS else p.data.normal_(0, 0.02)
    with device:
        # with small n-gram tables, which no part reads
        as_plain = dataclasses.replace(
            c,
            dtype="float32",
            fp8_head=False,
            ngrams=tuple(dataclasses.replace(table, rows=2) for table in c.ngrams),
        )
        plain = T.build_model(as_plain, worker.stream.shards[0].encoding)
        # documents of twice the long window on average: most tokens have a window's border, not a
        # document's, before them
        text = torch.where(
            torch.rand(max(T.micro_batch_lengths(c))) * plan.windows.long < 0.5, model.bos_id, 0
        )
        targets = torch.randint(len(model.embed.weight), text.shape)
        targets[COMPARED:] = -1
        shape = (len(text), c.model_dim)
        dtype = model.embed.weight.dtype
        noise = iter(lambda: T.norm(torch.randn(shape, device=device)).to(dtype), None)
        x, x0, values, bigrams, grad = itertools.islice(noise, 5)
        grad[COMPARED:] = 0
    state = {name: y for name, y in model.state_dict().items() if not name.startswith("ngrams.")}
    plain.load_state_dict(state, strict=False)
    plain.reach = T.longest_window(c)
    plain.loss_tokens = 1024
    # neither float32 logits nor a block's activations are saved for backward
    for module in (plain.lm_head, *plain.blocks):
        module.forward = functools.partial(
            torch.utils.checkpoint.checkpoint, module.forward, use_reentrant=False
        )
    for m in (model, plain):
        m.apply_schedule(plan)
    T.count_documents(model, text.cpu().numpy())
    masks = {m: m.masks(y, plan.windows) for m, y in ((model, text), (plain, text[:COMPARED]))}

    def attention(window, m, *qkv):
        q, k, v = (y.view(len(y), c.num_heads, -1) for y in qkv)
        return T.attend(q * model.rotary.scale, k, v, masks[m][window])

    def group(i, m, *inputs):
        found = dict(zip(reads(i), inputs))
        context = m.context(*(found[name] for name in ("x0", "bigrams") if name in found), masks[m])
        outputs, tables = (
            {key[1]: y for key, y in found.items() if key[0] == kind} for kind in ("saved", "table")
        )
        return m.groups[i](
            found["x"], context, outputs, tables, *([found.get("gates")] if of_frontier else [])
        )[0]

    of_frontier = hasattr(model, "token_gates")

    @functools.cache
    def reads(i):
        """Return what group i reads, by name: noise. Saved outputs and rows of value tables are
        named by pairs."""
        numbers = model.groups[i].numbers
        gates = model.groups[i].token_gates if of_frontier else ()
        tables = {layer.value_table for layer in model.layers[: numbers.stop]} - {None}
        return {
            "x": x,
            "x0": x0,
            **({"bigrams": bigrams} if of_frontier else {}),
            **{
                ("saved", n): next(noise)
                for n in sorted(c.saved_layers())
                if n < numbers.start and numbers.start
            },
            **{("table", n): next(noise) for n in sorted(tables)},
            **(
                {"gates": next(noise)[:, : sum(gates[0].sizes.values())]}
                if gates and numbers.start
                else {}
            ),
        }

    def head(m, x):
        return m.loss(x, targets[: len(x)])[0]

    def part(
        name,
        way,
        function,
        inputs,
        *learned,
        allowed_in_fp8=ALLOWED_IN_FP8,
    ):
        def compute(by_plain):
            m = model
            leaves = inputs
            kernels = contextlib.nullcontext()
            if by_plain:
                m = plain
                leaves = [y[:COMPARED].float() for y in inputs]
                kernels = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
            leaves = [y.detach().requires_grad_() for y in leaves]
            with kernels:
                out = function(m, *leaves)
                leaves += [p for name, p in m.named_parameters() if name.startswith(learned)]
                out_grad = grad[: len(out)].to(out.dtype).view_as(out) if out.dim() else None
                # a lone MLP does not use all of them
                grads = torch.autograd.grad(out, leaves, out_grad, allow_unused=True)
            of_tokens = [x if x is None else x[:COMPARED] for x in grads[: len(inputs)]]
            out = out.detach()[:COMPARED] if out.dim() else out.detach()
            return [out, *(x for x in (*of_tokens, *grads[len(inputs) :]) if x is not None)]

        return Part(
            name,
            way[0],
            compute,
            allowed_in_fp8 if way[0].startswith("fp8") else ALLOWED[x.dtype],
            way[1],
        )

    way = (
        "FlashAttention" if isinstance(masks[model]["L"], T.DocumentTable) else "masks in pieces",
        None if model.reach and not model.flash else ("attention", "masked"),
    )
    for window in "LS":  # groups read P's
        yield part(
            f"attention {window}", way, functools.partial(attention, window), (x, x0, values)
        )
    for i, one in enumerate(model.groups):
        modules = [m for block in one.blocks for m in block.modules()]
        kernels = any(getattr(m, "kernels", False) for m in modules)
        way = (
            (f"{way_of(worker)[0]}, with kernels", ("kernels", "loss"))
            if kernels
            else way_of(worker)
        )
        in_fp8 = {type(m).__name__ for m in modules if getattr(m, "fp8", False)}
        if in_fp8:
            way = "fp8", ("fp8_mlp" if "MLP" in in_fp8 else "fp8_qkv", False)
        # the gradients of biases and scalars nearly cancel: in fp8 little is left of them
        read = {id(p) for p in one.parameters() if p.dim() > 1 or not in_fp8}
        learned = [name for name, p in model.named_parameters() if id(p) in read]
        yield part(
            f"layers {one.numbers.start} to {one.numbers.stop - 1}",
            way,
            functools.partial(group, i),
            [*reads(i).values()],
            *(() if in_fp8 else LAMBDAS),
            *learned,
            allowed_in_fp8=ALLOWED_LAYERS_IN_FP8,
        )
    way = ("fp8", ("fp8_head", False)) if model.lm_head.fp8 else way_of(worker)
    way = (f"{way[0]}, with kernels", ("kernels", "off")) if model.lm_head.kernels else way
    yield part("head", way, head, (x,), "lm_head.")


def rule_parts(worker):
    """Yield each update rule on each shape of a shard; of a large table on rows from its first to
    its last."""
    optimizer = worker.optimizer
    plan = T.plan_of(worker.config, 0)

    @torch.no_grad()
    def update(bucket, rows, noise, by_plain):
        held = {"param": bucket.param_shard, "grad": bucket.grad_shard, **bucket.state}
        begun = dict(zip(held, noise))
        rest = begun.get("rest", 0)
        bucket.updates = 1
        if by_plain:
            held = {
                name: x.to(torch.float32, copy=True) for name, x in begun.items() if name != "rest"
            }
            held["param"] += rest
            hyper = {**bucket.hyper(plan), "dtype": torch.float32, "scale": bucket.scale}
            bucket.rule.update(held["param"], held["grad"], held, hyper)
            # a step of a small learning rate is no longer than bf16's rounding of the parameter
            if "rest" not in begun:
                held["param"] = held["param"].to(bucket.param_shard.dtype).float()
        else:
            for name, y in begun.items():
                held[name][slice(None) if name == "grad" else rows] = y
            optimizer.update(bucket, plan)
            held = {name: x[rows] for name, x in held.items() if name != "grad"}
        param = held["param"].float() + (0 if by_plain else held.get("rest", 0))
        return [
            param - begun["param"].float() - rest,
            *(held[name] for name in bucket.state if name != "rest"),
        ]

    for bucket in {
        (type(b.rule), b.param_shard.shape, b.param_data.dtype): b for b in optimizer.buckets
    }.values():
        rows = slice(None)
        if isinstance(bucket, T.RowBucket):
            count = len(bucket.param_shard)
            some = torch.linspace(
                0,
                count - 1,
                min(count, MAX_ROWS) if bucket.rule.lazy else count,
                dtype=torch.float64,
            )
            rows = bucket.grad_indices = some.long().to(worker.device)
            bucket.grad_shard = torch.empty_like(
                bucket.param_shard[rows], dtype=bucket.grad_data.dtype
            )
        noise = [torch.randn_like(x) / 50 for x in (bucket.param_shard[rows], bucket.grad_shard)]
        noise += [torch.rand_like(x[rows]) / 1000 for x in bucket.state.values()]
        allowed = ALLOWED[bucket.param_data.dtype]
        if isinstance(bucket.rule, T.NorMuon) and bucket.rule.polar_dtype != torch.float32:
            allowed = (
                ALLOWED_POLAR if min(bucket.param_shard.shape[1:]) >= 64 else ALLOWED_POLAR_OF_GATES
            )
        yield Part(
            f"{type(bucket.rule).__name__} {list(bucket.param_shard.shape)}",
            way_of(worker)[0],
            functools.partial(update, bucket, rows, noise),
            allowed,
            way_of(worker)[1],
        )


MAX_ROWS = 2**14  # of a table that are updated
MAX_SENT = 2**22  # elements: every rank generates the data of all ranks


def transfer_parts(worker):
    """Yield the collectives, on the largest bucket or MAX_SENT elements a rank."""
    comm = worker.comm
    device = worker.device
    invariant = worker.config.world_size_invariant
    bucket = max(worker.optimizer.buckets, key=lambda bucket: bucket.grad_data.nbytes)
    shape = (comm.ranks, min(bucket.shard_numel, MAX_SENT))
    dtype = bucket.grad_data.dtype
    of_all_ranks = [
        torch.randn(shape, device=device, generator=torch.Generator(device).manual_seed(rank)).to(
            dtype
        )
        for rank in range(comm.ranks)
    ]

    def exchange(kind, by_plain):
        full = of_all_ranks[comm.rank].clone()
        mine = comm.rank
        if kind == "all-gather":
            if not by_plain:
                comm.all_gather(full.view(-1), full[mine]).wait()
            return [
                torch.stack([x[rank] for rank, x in enumerate(of_all_ranks)]) if by_plain else full
            ]
        if by_plain:
            total = sum(x.float() for x in of_all_ranks)
            return [total if kind == "all-reduce" else total[mine]]
        if kind == "all-reduce":
            return [comm.all_reduce(full)]
        comm.reduce_scatter(
            full[mine], full.view(-1), comm.receive_buffer(full.view(-1), invariant)
        ).wait()
        return [full[mine]]

    for kind in ("all-reduce", "reduce-scatter", "all-gather") if comm.ranks > 1 else ():
        yield Part(
            kind,
            f"{of_all_ranks[0].nbytes >> 10:,} KiB",
            functools.partial(exchange, kind),
            ALLOWED[comm.sent_dtype or dtype],
        )


# Checks


def attempt(part, plain, device):
    """Compute a part. Return (its result, "") or (None, the error)."""
    try:
        result = part.compute(plain)
        if device.type == "cuda":
            torch.cuda.synchronize()  # a kernel reports its failure late
        return result, ""
    except T.RunError:
        raise
    except Exception as error:  # from the compiler or a kernel, or out of memory
        return None, f": {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"


COLUMNS = ["part", "how", "difference", "allowed", "ms", "verdict"]


def check_parts(worker):
    """Check each part once, and restore the state. Return (a row per part with the worst rank's
    figures, the first failure, from which others may follow)."""
    parts = []
    mine = []
    rows = []
    failed = []
    saved = worker.optimizer.state_dict()
    buffers = [(x, x.clone()) for x in worker.model.buffers()]
    for part in itertools.chain(model_parts(worker), rule_parts(worker), transfer_parts(worker)):
        plain, plain_error = attempt(part, True, worker.device)
        used, why = attempt(part, False, worker.device)  # compiles, and tunes kernels
        began = time.perf_counter()
        if used is not None:
            used, why = attempt(part, False, worker.device)
        ms = 1000 * (time.perf_counter() - began)
        if used is None:
            difference = math.inf
        elif plain is None:
            difference = math.inf
            why = plain_error
        else:
            ratios = [
                ((x.float() - y.float()).norm() / y.float().norm()).item()
                for x, y in zip(used, plain, strict=True)
            ]
            # zeros are no result
            difference = max(ratio if math.isfinite(ratio) else math.inf for ratio in ratios)
        mine.append([difference, plain is not None, ms, why])
        parts.append(part._replace(compute=None))  # it holds its tensors
    for bucket in worker.optimizer.buckets:  # with the padding
        for x in (bucket.param_data, bucket.grad_data, *bucket.state.values()):
            x.zero_()
    worker.optimizer.load_state_dict(saved)
    worker.model.apply_schedule(T.plan_of(worker.config, 0))
    for x, old in buffers:
        x.copy_(old)
    for part, (difference, compared, ms, why) in zip(
        parts, map(max, zip(*worker.comm.all_gather_json(mine)))
    ):
        verdict = "ok" if difference <= part.allowed else "failed" if compared else "not compared"
        # no flag helps the plain version
        failed += [part if compared else part._replace(fallback=None)] * (verdict != "ok")
        rows.append(
            [
                part.name,
                part.how,
                f"{difference:.1e}" if compared else "-",
                f"{part.allowed:g}",
                f"{ms:.3f}",
                verdict + why,
            ]
        )
    return rows, failed[0] if failed else None


def choose_flags(
    config,
    comm,
    device,
    shards,
    say,
):
    """Return the flags that differ from config with which all parts work on all ranks and a step
    fits in memory.

    RunError if a part fails and no flag avoids it, or if no number of splits fits."""
    fallbacks = {}
    while True:
        wanted = dataclasses.replace(config, **fallbacks)
        changes = []
        chosen = dict(fallbacks)
        if device.type == "cuda":
            wanted, changes = T.resolve_auto(wanted, comm)
            wanted = fit_memory(wanted, shards[0].encoding.vocab_size, comm)
            if wanted.micro_batch_splits > config.micro_batch_splits:
                chosen["micro_batch_splits"] = wanted.micro_batch_splits
                changes.append(
                    f"memory: each micro-batch is computed in {wanted.micro_batch_splits} parts"
                )
            if wanted.ngrams != config.ngrams:
                chosen["ngrams"] = ", ".join(map(repr, wanted.ngrams))
                rows, usual = (sum(table.rows for table in c.ngrams) for c in (wanted, config))
                changes.append(
                    f"memory: n-gram tables of {rows:,} rows in all fit, not the preset's"
                    f" {usual:,}. That is another experiment: compare it only with runs of as many"
                    " rows, which --ngrams sets"
                )
        worker = T.Worker(wanted, comm, device, shards)
        for line in changes:
            say(line)
        rows, failed = check_parts(worker)
        worker.stream.close()
        say(logs.columns([COLUMNS, *rows]))
        if failed is None:
            return chosen
        T.require(
            failed.fallback,
            f"{failed.name}, {failed.how}, failed or was not compared (see the table), and no flag"
            " avoids it; repair this machine, use another one, or start without this check:"
            f" torchrun --nproc_per_node=N {T.source_files(config)[0].name}",
        )
        flag, value = failed.fallback
        fallbacks[flag] = value
        say(f"{failed.name}, {failed.how}, failed: --{flag} {str(value).lower()} instead")
        del worker  # free its memory for the next one
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


# Memory

USABLE_MEMORY = 0.85  # of the free memory; the allocator's gaps, NCCL and cuBLAS take the rest


def fit_memory(config, vocab_size, comm):
    """Return the config, changed so that a step fits on every GPU. RunError if it cannot.

    micro_batch_splits is doubled, and n-gram tables are halved if they are a preset's: others were
    chosen by hand."""
    invariant = config.world_size_invariant
    free = min(comm.all_gather_json(torch.cuda.mem_get_info()[0]))

    def lacking(config):
        return [
            needed > USABLE_MEMORY * free
            for needed in memory_needed(config, vocab_size, comm.ranks)
        ]

    def split(config):
        # the number of tokens in a product decides the order of its sums, so a run that must not
        # depend on it cannot split
        while (
            not invariant
            and lacking(config)[1]
            and all(n % (2 * T.TILE_M) == 0 for n in T.micro_batch_lengths(config))
        ):
            config = dataclasses.replace(config, micro_batch_splits=2 * config.micro_batch_splits)
        return config

    given = config
    fitted = first = split(config)
    while any(lacking(fitted)) and config.ngrams and all(table.rows > 3 for table in config.ngrams):
        config = dataclasses.replace(
            config, ngrams=tuple(dataclasses.replace(t, rows=t.rows // 2) for t in config.ngrams)
        )
        fitted = split(config)
    allowed = config is given or any(
        given.ngrams == preset.ngrams for preset in program_module(given).PRESETS.values()
    )
    if allowed and not any(lacking(fitted)):
        return fitted
    _, training, validation = memory_needed(first, vocab_size, comm.ranks)
    raise T.RunError(
        f"a GPU here has {free >> 20} MiB free; this run would allocate about {training >> 20} MiB"
        f" in training and {validation >> 20} MiB in validation; use more ranks, fewer rows of"
        " n-gram tables, smaller --micro_batch_tokens, a smaller --val_len or a smaller model"
    )


def memory_needed(config, vocab_size, ranks):
    """Estimate what a rank allocates, in bytes: (permanently, at the peak of training, at the peak
    of validation).

    Fitted to runs on dry_gpu with each setting of attention, kernels and compile."""
    c = config
    layers = config.parse_layers()
    size = config.torch_dtype.itemsize
    attentions = sum(bool(layer.window) for layer in layers)
    mlps = sum(layer.mlp for layer in layers)
    value_tables = len({layer.value_table for layer in layers} - {None})
    saved_outputs = len(c.saved_layers())
    matrices = (4 * attentions + 8 * mlps) * c.model_dim**2
    ngrams = sum(table.rows * table.width for table in c.ngrams)
    of_moment = (
        4 if any(getattr(group.rule(c), "fp32_moments", False) for group in c.base_groups) else size
    )
    row_moment, slow_from = (
        getattr(T.groups_by_kind(c)["ngram_embeds"], x, None) for x in ("row_moment", "slow_from")
    )
    # gradients that wait for an update, of tables with long cycles; those of a cycle of Adam's are
    # in the fitted terms
    tokens = (
        max(s.first["micro_batches"] * s.first["micro_batch_tokens"] for s in T.stages_of(c))
        * 2
        * c.adam_every
        // ranks
    )
    waiting = (
        sum(min(table.rows, tokens) * table.width for table in c.ngrams)
        if slow_from is not None
        else 0
    )
    entries = (2 + value_tables) * vocab_size * c.model_dim + ngrams
    # parameters, gradients but those of n-gram tables, and a rank's share of the moments: one in
    # float32 for a matrix, with its rest if it is in bf16, two for an entry
    gradients = entries - ngrams
    of_matrix = 8 if size == 2 else 4
    # two numbers a row are left out
    moments = 2 * of_moment * (entries - ngrams * bool(row_moment)) + of_matrix * matrices
    permanent = size * (2 * matrices + entries + gradients + waiting) + moments / ranks
    # bytes of a token
    width = c.model_dim * size
    logits = vocab_size * size
    lengths = T.micro_batch_lengths(c)
    eager = c.compile == "off"
    of_mlp = 14 if c.kernels in ("loss", "off") else 10
    if getattr(c, "fp8_mlp", False) and c.fp8_head:
        of_mlp = 9
    saved = ((9 if eager else 4) * attentions + of_mlp * mlps + 32) * width
    if c.kernels == "off":
        # fp8 also keeps their gradient, twice in e5m2
        saved += logits * ((2 if c.fp8_head else 1) + 6 * eager)
        of_loss = 0
    else:  # the gradient of all logits, and the logits of one call of the head
        saved += logits * (0.5 if c.fp8_head else 1)
        of_loss = min(lengths) * logits
    training = permanent + max(lengths) * saved + of_loss + 340 * 2**20
    trunk = c.val_len * (12 + 7 * eager + saved_outputs + value_tables) * width
    if c.attention == "masked":
        window = T.longest_window(c)
        paired = any(layer.window == "P" for layer in layers)
        trunk += (
            c.val_len
            * 1.2
            * (2 + 2 * paired)
            * (window + max(T.MASK_PIECE["cuda"], window // 4))
            * size
        )
    return (
        int(permanent),
        int(training),
        int(permanent + max(trunk, min(lengths) * 7 * logits * eager)),
    )


# The machine


def check_compiler(gpu):
    """RunError without the C or C++ compiler that torch.compile needs; it would fail only after
    minutes."""
    # Triton's and Inductor's
    variable, *usual = ("CC", "gcc", "clang") if gpu else ("CXX", "g++", "clang++")
    programs = [os.environ[variable]] if os.environ.get(variable) else usual
    T.require(
        any(map(shutil.which, programs)),
        f"compiling needs {' or '.join(programs)}, and this machine has none. Install gcc and g++ (on"
        " Debian build-essential), or leave out --compile on",
    )
    # Debian's own scheme means /usr/local
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    T.require(
        not gpu or header.exists(),
        f"compiling needs {header}, which is missing; install Python's headers (on "
        "Debian the package python3-dev)",
    )


# The program


def check(flags):
    """Run one rank of the check; rank 0 prints."""
    rank, ranks, local_rank = map(T.env_int, ("RANK", "WORLD_SIZE", "LOCAL_RANK"), (0, 1, 0))
    if ranks > 1:
        T.die_with_launcher()
    gpus = T.count_gpus()
    presets = program_of(flags).PRESETS
    _, config = T.parse_config(flags, "speedrun" if gpus else "laptop", presets)
    T.check_config(config, ranks)
    device = torch.device("cuda", local_rank) if gpus else torch.device("cpu")
    if gpus:
        T.require(
            local_rank < gpus, f"rank {rank} has no GPU: this machine has {gpus}; use fewer --ranks"
        )
        torch.cuda.set_device(device)
    if gpus or config.compile == "on":
        check_compiler(gpus > 0)
    if ranks > 1:
        T.join(config, rank, ranks, device)
    comm = (T.CompressedComm if config.bf16_compress else T.Comm)(
        rank, ranks, device, timedelta(seconds=config.timeout_s)
    )
    say = functools.partial(print, flush=True) if rank == 0 else lambda line: None
    say(
        json.dumps(
            choose_flags(
                config, comm, device, T.find_shards(config.train_files, config.train_shards), say
            )
        )
    )
    if ranks > 1:
        dist.destroy_process_group()


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        allow_abbrev=False,
        epilog=(
            "All other flags are those of train_gpt.py or, with --preset frontier, of frontier.py."
        ),
    )
    parser.add_argument(
        "--ranks", type=int, default=1, help="processes of the run (default: %(default)s)"
    )
    words = list(sys.argv[1:] if arguments is None else arguments)
    options, flags = parser.parse_known_args(words)
    for library in ("TORCHINDUCTOR", "TRITON"):  # the run reuses what is compiled here
        os.environ.setdefault(f"{library}_CACHE_DIR", str(ROOT / ".cache" / library.lower()))
    if options.ranks > 1 and "RANK" not in os.environ:
        return start_ranks(options.ranks, __file__, words)
    try:
        check(flags)
        return 0
    except (T.RunError, OSError) as error:
        rank = T.env_int("RANK", 0)
        ranks = T.env_int("WORLD_SIZE", 1)
        store = next(dist.rendezvous("env://", rank, ranks))[0] if ranks > 1 else None
        if T.first_failure(store, rank, str(error), lost=False) == f"rank {rank}: {error}":
            print(f"preflight.py: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
