"""Rank 0 of N of a run, on the GPU that computes nothing; page.py starts it and tells of what it wrote.

    python rank0.py FOLDER RANKS STEPS FLAG ...     the folder of train_gpt.py, whose flags they are

The other ranks are not there: NCCL's stubs send nothing, and what ranks say to one another is rank 0's own word. The
warm-up runs twice: the second time nothing is compiled, and each kernel's cost is taken down (the census). Then come
the first validation, the steps that are timed, and two in which the origin of each allocation is kept. Then it stops;
what the log does not tell is its last line, as JSON.
"""

import collections
import contextlib
import ctypes
import dataclasses
import json
import linecache
import math
import os
import re
import sys
import time
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

gpu = ctypes.CDLL("libcuda.so.1")


def mark(kind, name="", *numbers):
    """A line of the launch log, beside those that device.c writes."""
    gpu.dry_gpu_mark(kind.encode(), "\t".join([name, *(str(int(number)) for number in numbers)]).encode())


class Done(Exception):
    """Enough steps."""


# ---- what a kernel reads and writes

SPECIAL = {"exp": 1, "exp2": 1, "log": 1, "log2": 1, "rsqrt": 1, "sqrt": 1, "tanh": 2, "sigmoid": 2,
           "online_softmax_combine": 2}


def bytes_of(tensors):
    return sum(min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) for x in tensors
               if x.is_cuda and x.layout == torch.strided)


def cost_of(kernel, named, meta):
    """A Triton kernel's (bytes, special functions, FLOPs in fp8, FLOPs in bf16), from its arguments by name.

    What it says of itself by Triton's `launch_metadata`, which Inductor's copy of a kernel of the script lacks; else
    Inductor's count of its bytes, but at most the size of its arguments: what is read by several indices it counts several
    times. A second loop over a row reads it again. Special functions are counted in the source, in its loops if it has
    some, once per element.
    """
    if metadata := getattr(sys.modules["train_gpt"], kernel.__name__, kernel).launch_metadata:
        said = metadata((1, 1, 1), None, named)
        return said.get("bytes", 0), 0, said.get("flops8", 0), said.get("flops16", 0)
    sizes = {name: bytes_of([x]) for name, x in named.items() if isinstance(x, torch.Tensor)}
    loops = [re.split(r"\n    (?=\S)", loop)[0] for loop in re.split(r"\n    for .*:", kernel.src)[1:]]
    again = collections.Counter(name for loop in loops for name in set(re.findall(r"tl\.load\((\w+) \+ \(.*r0_", loop)))
    most = sum(size * (1 + name.startswith("in_out")) for name, size in sizes.items())
    moved = min((meta.get("kernel_num_gb") or math.inf) * 1e9, most)
    # Inductor counts an argument that may be written in place twice, even where this kernel only reads it
    moved -= sum(size for name, size in sizes.items() if name.startswith("in_out") and f"tl.store({name}" not in kernel.src)
    elements = math.prod(map(int, re.findall(r"^    (?:[xyz]|r\d_)numel = (\d+)$", kernel.src, re.M)))
    special = sum(SPECIAL.get(name, 0) for name in re.findall(r"\.(\w+)\(", "".join(loops) or kernel.src))
    return moved + sum((times - 1) * sizes.get(name, 0) for name, times in again.items()), special * elements, 0, 0


class Operators(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls):  # else compiled code would not be taken
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out, name = op(*args, **(kwargs or {})), op._opname
        given, made = ([x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)] for tree in ((args, kwargs), out))
        read, written = bytes_of(given), bytes_of(made)
        if name in ("copy_", "fill_", "zero_"):  # what is overwritten is not read
            read -= bytes_of(given[:1])
        if name in ("embedding", "index", "gather", "index_select"):  # as many rows as come out
            read = min(read, written)
        mark("OP", name, read + written)
        return out


run_tuner, run_kernel = CachingAutotuner.run, JITFunction.run


def by_inductor(tuner, *args, **kwargs):
    named = dict(zip(tuner.fn.arg_names, args)) | tuner.triton_meta["constants"]
    mark("COST", "", *cost_of(tuner.fn, named, tuner.inductor_meta))
    return run_tuner(tuner, *args, **kwargs)


def by_hand(kernel, *args, **kwargs):
    mark("COST", "", *cost_of(kernel, dict(zip(kernel.arg_names, args)) | kwargs, {}))
    return run_kernel(kernel, *args, **kwargs)


@contextlib.contextmanager
def census():
    """While it lasts the log tells costs: before a Triton kernel its own, after an operator that operator's bytes."""
    with Operators(), patch.object(CachingAutotuner, "run", by_inductor), patch.object(JITFunction, "run", by_hand):
        yield


def attention_flops(batch, windows, model, layers):
    """Of a layer's forward, in the mean of layers and micro-batches, over all pairs in the blocks that are looked at."""
    block, pairs = 128, []
    for tokens in batch:
        documents = np.cumsum(np.asarray(tokens)[:-1] == model.bos_id).reshape(-1, block)
        at = np.arange(len(documents))
        back = (at[:, None] - at) * block
        seen = (back >= 0) & (documents[:, -1] >= documents[:, :1])
        pairs += [(seen & (back - block + 1 <= windows["LS".index(layer[0])])).sum() * block ** 2
                  for layer in layers.split() if layer[0] in "LS"]
    return 4 * model.embed.weight.shape[1] * np.mean(pairs)


# ---- memory

def origin(block, source):
    """Where memory was asked for: the line of train_gpt.py, and the tensor where a compiled graph made it."""
    tensor = where = ""
    for frame in block.get("frames") or ():
        if "inductor" in frame["filename"] and not tensor:
            line = linecache.getline(frame["filename"], frame["line"])
            shape = re.search(r"empty_strided_\w+\((\([\d, ]*\)).*?torch\.(\w+)", line)
            tensor = f"{shape[1]} {shape[2]} of " if shape else ""
        if frame["filename"] == source:
            where = f"{frame['name']}, line {frame['line']}"
            break
    return tensor + (where or "autograd, outside compiled graphs")


class Phases:
    """What the run is at, which the log is told; of each phase that is watched the peak of memory, and what made it."""

    def __init__(self, source):
        self.source, self.now, self.live, self.memory = source, "", None, {}

    def begin(self, phase, watched=False):
        self.end()
        self.now = phase
        mark("PHASE", phase)
        if watched:
            self.watch()

    def watch(self):
        """From here to the phase's end. It takes time."""
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=10 ** 7, clear_history=True)
        torch.cuda.reset_peak_memory_stats()
        self.live = {}
        for segment in torch.cuda.memory._snapshot()["segments"]:
            self.live |= {b["address"]: b for b in segment["blocks"] if b["state"] == "active_allocated"}

    def end(self, failed=False):
        """Where it was watched, replay it up to its highest sum; to its end if it failed."""
        if self.live is None:
            return
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        events = [e for e in trace if e["action"] in ("alloc", "free_completed")]
        held = np.cumsum([0] + [e["size"] if e["action"] == "alloc" else -e["size"] for e in events])
        for e in events[:len(events) if failed else held.argmax()]:
            self.live[e["addr"]] = e
            if e["action"] != "alloc":
                del self.live[e["addr"]]
        tensors = collections.defaultdict(list)
        for block in self.live.values():
            tensors[origin(block, self.source)].append(block["size"])
        self.memory[self.now] = {
            "peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "tensors": sorted(((sum(v), len(v), k) for k, v in tensors.items()), reverse=True)[:12]}
        torch.cuda.memory._record_memory_history(None)
        self.live = None


# ---- the run

def main(folder, ranks, steps, flags):
    sys.path.insert(0, folder)
    import train_gpt as T
    facts, times, phases, stats = {}, [], Phases(T.__file__), torch._dynamo.utils.counters["stats"]
    real_step, real_warm_up, real_validate = T.Trainer.step, T.Trainer.warm_up, T.validate

    class Alone(T.Comm):
        """What this rank tells the others, and what hosts send one another, is what it hears from them."""

        def all_gather_json(self, mine):
            return [json.loads(json.dumps(mine))] * ranks

        def exchange(self, sent, received):
            if sent[0].is_cuda:
                return super().exchange(sent, received)
            for mine, theirs in zip(sent, received):
                theirs.copy_(mine)
            return T.HandleGroup()

    def step(trainer, plan, batch):
        facts["batch"] = f"{len(batch)} × {len(batch[0]) - 1:,}"  # which may be fitted to the card
        if phases.now == "training":
            times.append((time.perf_counter(), time.process_time()))
            if len(times) == steps + 1:
                phases.watch()
            if len(times) == steps + 3:
                raise Done
        flops = attention_flops(batch, plan.windows, trainer.model, config.layers) if phases.now == "census" else 0
        mark("STEP", " ".join(map(str, plan.windows)), plan.step, flops)
        out = real_step(trainer, plan, batch)
        mark("END")
        return out

    def warm_up(trainer, *args):
        phases.begin("warm-up", watched=True)
        began, cpu = time.perf_counter(), sum(os.times()[:4])
        real_warm_up(trainer, *args)
        facts.update(warm_up=time.perf_counter() - began, warm_up_cpu=sum(os.times()[:4]) - cpu,
                     warmed_up=stats["unique_graphs"])
        phases.begin("census")
        with census():
            real_warm_up(trainer, *args)
        phases.begin("training")

    def validate(*args, **kwargs):
        if phases.now != "training":
            return real_validate(*args, **kwargs)
        phases.begin("validation", watched=True)
        out = real_validate(*args, **kwargs)
        phases.begin("training")
        return out

    T.Trainer.step, T.Trainer.warm_up, T.validate = step, warm_up, validate
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # what is left uncompiled shows nowhere else
    device = torch.device("cuda", 0)
    if ranks > 1:
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks, device_id=device)
    unchecked = ["--preflight", "off"] if hasattr(T, "preflight") else []  # which finds that nothing computes
    preset, config = T.parse_config([*unchecked, *flags], "speedrun")
    T.check_config(config, ranks)
    phases.begin("set-up", watched=True)
    try:
        if not hasattr(T, "fit_to_gpus"):  # older versions do this themselves
            sys.path.append(os.path.join(os.path.dirname(__file__), ".."))
            import preflight
            comm, shard = Alone(0, ranks, device), T.find_shards(config.train_files, config.train_shards)[0]
            fitted = preflight.fit_memory(T.resolve_auto(config, comm)[0], shard.encoding.vocab_size, comm)
            config = dataclasses.replace(config, micro_batch_splits=fitted.micro_batch_splits)
        T.run(config, preset, Alone(0, ranks, device), device, T.Log(config, 0, "dry"), time.perf_counter())
    except Done:
        pass
    except (torch.OutOfMemoryError, T.RunError) as error:
        if isinstance(error, T.RunError) and "MiB free" not in str(error):  # a refusal before anything is allocated
            raise
        facts["out of memory"] = str(error).split(". Of the")[0]
    phases.end(failed="out of memory" in facts)
    graphs, utils = stats["unique_graphs"], torch._dynamo.utils
    facts.update(
        phase=phases.now, memory=phases.memory, graphs=graphs, late=graphs - facts.get("warmed_up", graphs),
        breaks=dict(utils.counters["graph_break"]), compile=utils.calculate_time_spent().get("total_wall_time", 0),
        host=(1e3 * np.diff(times[:steps + 1], axis=0)).tolist(),
        plan=collections.Counter(  # how many steps of the plan have which windows
            " ".join(map(str, T.plan_of(config, step).windows)) for step in range(config.num_steps)))
    mark("FACTS", json.dumps(facts))
    gpu.dry_gpu_flush()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)  # threads of NCCL's group wait for what never comes
