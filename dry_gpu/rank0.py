"""Run rank 0 of N on the simulated GPU. page.py starts this script and reads the log.

    python rank0.py FOLDER RANKS STEPS FLAG ...

FOLDER contains train_gpt.py and all else; the flags are the run's.

The other ranks do not exist: NCCL's stubs send nothing, and rank 0 receives its own messages. The
phases: set-up; warm-up; census, steps from the middle of each stage, with the cost of each kernel
in the log; the first validation; timed training steps; two steps that record the origin of each
allocation. Facts that are not events are JSON in the log's last line.
"""

import collections
import contextlib
import ctypes
import dataclasses
import functools
import itertools
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
    """Write a line to the launch log of device.c."""
    gpu.dry_gpu_mark(
        kind.encode(), "\t".join([name, *(str(int(number)) for number in numbers)]).encode()
    )


class Done(Exception):
    """The last step is done."""


# ---- costs of kernels

SPECIAL = {
    "exp": 1,
    "exp2": 1,
    "log": 1,
    "log2": 1,
    "rsqrt": 1,
    "sqrt": 1,
    "tanh": 2,
    "sigmoid": 2,
    "online_softmax_combine": 2,
}


# times as long if the operands' strides differ in order: in record 44's trace 4.2 (an addition) to
# 5.6 (a copy)
TRANSPOSED = 5


def cost_of_product(grid, kernel, args):
    """Of relu_squared_kernel, and of relu_squared_in_fp8_kernel, which writes out twice."""
    m, n, k = (args[size] for size in "MNK")
    in_fp8 = "out_T" in args
    width = 1 if in_fp8 else 2
    return {
        "flops8" if in_fp8 else "flops16": 2 * m * n * k,
        "bytes": width * (m * k + k * n + m * n * (1 + in_fp8 + args["BACKWARD"])),
    }


def cost_of_loss(grid, kernel, args):
    """Of softcapped_loss_kernel: sigmoid, reciprocal and exp for each logit."""
    return {"bytes": args["x"].nbytes + args["grad"].nbytes, "special": 3 * args["x"].numel()}


# {kernel of a program: its cost, in the form of Triton's launch_metadata}
STATED = {
    "relu_squared_kernel": cost_of_product,
    "relu_squared_in_fp8_kernel": cost_of_product,
    "softcapped_loss_kernel": cost_of_loss,
}


def bytes_of(tensors):
    return sum(
        min(x.numel() * x.element_size(), x.untyped_storage().nbytes())
        for x in tensors
        if x.is_cuda and x.layout == torch.strided
    )


def cost_of(kernel, named, meta):
    """Return (bytes, special functions, FLOPs in fp8, FLOPs in bf16) of a Triton kernel with
    arguments `named`.

    STATED has the cost of hand-written kernels. For other kernels, the bytes are Inductor's count,
    which counts a tensor once per index that reads it, so at most the arguments' size. Rows that a
    second loop reads again come from a cache. Special functions are counted in the source, once per
    element: in its loops, or in all of it if there is none.
    """
    if metadata := STATED.get(kernel.__name__, kernel.launch_metadata):
        stated = metadata((1, 1, 1), None, named)
        return [stated.get(name, 0) for name in ("bytes", "special", "flops8", "flops16")]
    sizes = {name: bytes_of([x]) for name, x in named.items() if isinstance(x, torch.Tensor)}
    loops = [
        re.split(r"\n    (?=\S)", loop)[0] for loop in re.split(r"\n    for .*:", kernel.src)[1:]
    ]
    # Inductor counts an in-place argument twice, even if this kernel only reads it, or only writes
    # it
    once = sum(
        size
        for name, size in sizes.items()
        if name.startswith("in_out")
        and not (f"tl.load({name}" in kernel.src and f"tl.store({name}" in kernel.src)
    )
    most = sum(size * (1 + name.startswith("in_out")) for name, size in sizes.items())
    moved = min((meta.get("kernel_num_gb") or math.inf) * 1e9, most) - once
    elements = math.prod(
        map(int, re.findall(r"^    (?:[xyz]|r\d_)numel = (\d+)$", kernel.src, re.M))
    )
    special = sum(
        SPECIAL.get(name, 0) for name in re.findall(r"\.(\w+)\(", "".join(loops) or kernel.src)
    )
    return moved, special * elements, 0, 0


class Operators(TorchDispatchMode):
    """Write the bytes of each eager operator to the log."""

    @classmethod
    def ignore_compile_internals(cls):  # otherwise compiled code would run eagerly
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op._opname
        inputs, outputs = (
            [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for tree in ((args, kwargs), out)
        )
        read = bytes_of(inputs)
        written = bytes_of(outputs)
        overwritten = (
            inputs[:1] if name in ("copy_", "fill_", "zero_") else [(kwargs or {}).get("out")]
        )
        read -= bytes_of(x for x in overwritten if x is not None)
        if name in ("index_add_", "index_put_"):  # only the rows of the source are read and written
            read = written = bytes_of(inputs[-1:]) * 3 // 2
        if name in (
            "embedding",
            "index",
            "gather",
            "index_select",
        ):  # only the selected rows are read
            read = min(read, written)
        if re.search(
            "flash.*backward", name
        ):  # its kernels also write and read the sum of dq, in float32
            written += 8 * inputs[0].numel()  # dq has the size of dout
        by_columns = {
            x.stride(-1) > x.stride(-2)
            for x in (*inputs, *outputs)
            if outputs == [out] and x.shape == out.shape and x.dim() > 1 and x.stride(-2)
        }
        mark("OP", name, (read + written) * (TRANSPOSED if len(by_columns) == 2 else 1))
        return out


run_tuner = CachingAutotuner.run
run_kernel = JITFunction.run


def run_inductor_kernel(tuner, *args, **kwargs):
    named = dict(zip(tuner.fn.arg_names, args)) | tuner.triton_meta["constants"]
    mark("COST", "", *cost_of(tuner.fn, named, tuner.inductor_meta))
    return run_tuner(tuner, *args, **kwargs)


def run_triton_kernel(kernel, *args, **kwargs):
    mark("COST", "", *cost_of(kernel, dict(zip(kernel.arg_names, args)) | kwargs, {}))
    return run_kernel(kernel, *args, **kwargs)


@contextlib.contextmanager
def census():
    """Write costs to the log: COST before each Triton kernel, OP after each eager operator."""
    with (
        Operators(),
        patch.object(CachingAutotuner, "run", run_inductor_kernel),
        patch.object(JITFunction, "run", run_triton_kernel),
    ):
        yield


def visited_pairs(documents, window, block=128):
    """Return the pairs of tokens in the blocks that attention visits. documents: each token's
    document."""
    first = documents[::block]
    last = documents[block - 1 :: block]
    at = np.arange(len(first))
    back = (at[:, None] - at) * block
    return (
        int(((back >= 0) & (last >= first[:, None]) & (back - block + 1 <= window)).sum())
        * block**2
    )


def attention_flops(batch, windows, model):
    """Return the FLOPs of attention's forward, mean over layers and micro-batches. Visited blocks
    count in full."""

    def flops(tokens, layer):
        window = layer.window
        # of a token
        documents = np.cumsum(np.asarray(tokens)[:-1] == model.bos_id)
        positions = 1 + (window == "P")
        pairs = visited_pairs(
            np.repeat(documents, positions), windows.long if window == "L" else windows.short
        )
        # heads with narrow values are half as wide; narrow queries and keys are padded
        halves = 1 + (getattr(layer, "narrow", "") == "qkv")
        return 4 * model.embed.weight.shape[1] / halves / positions * pairs

    return np.mean(
        [flops(tokens, layer) for tokens in batch for layer in model.layers if layer.window]
    )


# ---- memory


def origin(block, sources):
    """Return the line of a run's sources that allocated a block, and the tensor's shape and dtype
    if a graph did."""
    tensor = where = ""
    for frame in block.get("frames") or ():
        if "inductor" in frame["filename"] and not tensor:
            line = linecache.getline(frame["filename"], frame["line"])
            shape = re.search(r"empty_strided_\w+\((\([\d, ]*\)).*?torch\.(\w+)", line)
            tensor = f"{shape[1]} {shape[2]} of " if shape else ""
        if frame["filename"] in sources:
            where = f"{frame['name']}, {os.path.basename(frame['filename'])}:{frame['line']}"
            break
    return tensor + (where or "autograd, outside compiled graphs")


class Phases:
    """The current phase of the run, written to the log, and the memory peak of each watched phase
    with its tensors."""

    def __init__(self, sources):
        self.sources = sources
        self.now = ""
        self.live = None
        self.memory = {}

    def begin(self, phase, watched=False):
        self.end()
        self.now = phase
        mark("PHASE", phase)
        if watched:
            self.watch()

    def watch(self):
        """Record allocations until the phase ends. This slows the run down."""
        torch.cuda.memory._record_memory_history(
            "all", stacks="python", max_entries=10**7, clear_history=True
        )
        torch.cuda.reset_peak_memory_stats()
        self.live = {}
        for segment in torch.cuda.memory._snapshot()["segments"]:
            self.live |= {
                b["address"]: b for b in segment["blocks"] if b["state"] == "active_allocated"
            }

    def end(self, failed=False):
        """End the phase. If it was watched, replay its allocations up to the peak (if it failed,
        up to the end)."""
        if self.live is None:
            return
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
        events = [e for e in trace if e["action"] in ("alloc", "free_completed")]
        held = np.cumsum(
            [0] + [e["size"] if e["action"] == "alloc" else -e["size"] for e in events]
        )
        for e in events[: len(events) if failed else held.argmax()]:
            self.live[e["addr"]] = e
            if e["action"] != "alloc":
                del self.live[e["addr"]]
        tensors = collections.defaultdict(list)
        for block in self.live.values():
            tensors[origin(block, self.sources)].append(block["size"])
        self.memory[self.now] = {
            "peak": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
            "tensors": sorted(((sum(v), len(v), k) for k, v in tensors.items()), reverse=True)[:12],
        }
        torch.cuda.memory._record_memory_history(None)
        self.live = None


# ---- the run


def alone(T, ranks, device):
    """Start NCCL for rank 0 of N -> its Comm. It has no peers, and receives its own messages."""

    class Alone(T.Comm):
        def all_gather_json(self, mine):
            return [json.loads(json.dumps(mine))] * ranks

        def exchange(self, sent, received):
            if sent[0].is_cuda:
                return super().exchange(sent, received)
            for mine, theirs in zip(sent, received):
                theirs.copy_(mine)
            return T.HandleGroup()

    if ranks > 1:
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=dist.HashStore(), rank=0, world_size=ranks, device_id=device
        )
    return Alone(0, ranks, device)


def write_facts(facts, phases, times):
    """Write the log's last line. times: (number, wall, CPU of all threads in seconds) at the start
    of timed steps in order."""
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    utils = torch._dynamo.utils
    facts = facts | dict(
        phase=phases.now,
        memory=phases.memory,
        graphs=graphs,
        late=graphs - facts.get("warmed_up", graphs),
        breaks=dict(utils.counters["graph_break"]),
        compile=utils.calculate_time_spent().get("total_wall_time", 0),
        host=[
            (number, 1e3 * (wall - begun), 1e3 * (cpu - used))  # of steps whose next one follows
            for (number, begun, used), (following, wall, cpu) in itertools.pairwise(times)
            if following == number + 1
        ],
    )
    mark("FACTS", json.dumps(facts))
    gpu.dry_gpu_flush()


def main(folder, ranks, steps, flags):
    sys.path[:0] = folder, os.path.join(folder, "launch")
    import frontier
    import preflight
    import train_gpt as T
    from ranks import program_of

    presets = program_of(flags).PRESETS
    preset, config = T.parse_config(flags, [*presets][0], presets)
    facts = {}
    times = []
    counted = set()
    stats = torch._dynamo.utils.counters["stats"]
    phases = Phases([*map(str, T.source_files(config))])
    real_step = T.Worker.step
    real_warm_up = T.Worker.warm_up
    real_validate = T.validate
    real_item = torch.Tensor.item

    @functools.cache
    def losses():
        return T.TrainLosses(config, comm, T.Clock(device, 0.0), None)

    def step(worker, plan, batch):
        # fit_memory may have changed both
        facts["batch"] = (
            f"{len(batch)} × {len(batch[0]) - 1:,}; "
            f"{sum(table.rows for table in worker.config.ngrams):,}"
        )
        if phases.now == "training":
            times.append((plan.step, time.perf_counter(), time.process_time()))
            if len(times) == steps + 1:
                phases.watch()
            if len(times) == steps + 3:
                raise Done
        flops = attention_flops(batch, plan.windows, worker.model) if phases.now == "census" else 0
        counts = phases.now != "census" or plan.step in counted
        mark("STEP", " ".join(map(str, plan.windows)) * counts, plan.step, flops)
        out = real_step(worker, plan, batch)
        if phases.now == "census":
            losses().record(plan, out)
        mark("END")
        return out

    def warm_up(worker, first, *args):
        phases.begin("warm-up", watched=True)
        start = time.perf_counter()
        cpu = sum(os.times()[:4])
        real_warm_up(worker, first, *args)
        facts.update(
            warm_up=time.perf_counter() - start,
            warm_up_cpu=sum(os.times()[:4]) - cpu,
            warmed_up=stats["unique_graphs"],
        )
        phases.begin("census")
        with census():
            run_middles(worker, first)
        phases.begin("training")

    def run_middles(worker, first):
        """Run two cycles of Adam in the middle of each stage. The second counts: it waits for the
        first one's gathers."""
        saved = worker.optimizer.state_dict()
        position = worker.stream.position
        digest = worker.stream.digest
        slow = any(
            getattr(bucket.rule, "slow_from", None) is not None
            for bucket in worker.optimizer.buckets
        )
        cycle = config.adam_every * (1 + slow)
        for stage in T.stages_of(config):
            middle = (stage.begin + stage.end) // (2 * cycle) * cycle
            counted.update(range(middle, middle + cycle))
            for at in range(middle - cycle, middle + cycle):
                plan = T.plan_of(config, at)
                worker.step(plan, worker.stream.next_batch(plan))
        worker.optimizer.load_state_dict(saved)
        worker.model.apply_schedule(first)
        worker.stream.position = position
        worker.stream.digest = digest

    def validate(*args, **kwargs):
        if phases.now != "training":
            return real_validate(*args, **kwargs)
        phases.begin("validation", watched=True)
        out = real_validate(*args, **kwargs)
        phases.begin("training")
        return out

    def item(x):
        value = real_item(x)  # the host waits for it
        # a norm that nothing computed may be no number
        return 1.0 if x.is_cuda and x.is_floating_point() else value

    T.Worker.step = step
    T.Worker.warm_up = warm_up
    T.validate = validate
    torch.Tensor.item = item
    # bytes decide no time
    frontier.gpt2_token_bytes = lambda folder: [
        bytes([number % 256]) for number in range(T.GPT2_VOCAB - 1)
    ]
    # otherwise the limit only leaves code uncompiled, silently
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    device = torch.device("cuda", 0)
    comm = alone(T, ranks, device)
    T.check_config(config, ranks)
    phases.begin("set-up", watched=True)
    try:
        shard = T.find_shards(config.train_files, config.train_shards)[0]
        fitted = preflight.fit_memory(
            T.resolve_auto(config, comm)[0], shard.encoding.vocab_size, comm
        )
        config = dataclasses.replace(
            config, micro_batch_splits=fitted.micro_batch_splits, ngrams=fitted.ngrams
        )
        T.TrainingLoop(
            config, preset, comm, device, T.Log(config, 0, "dry"), time.perf_counter()
        ).run()
    except Done:
        pass
    except (torch.OutOfMemoryError, T.RunError) as error:
        if isinstance(error, T.RunError) and "MiB free" not in str(
            error
        ):  # fit_memory's error says MiB free
            raise
        facts["out of memory"] = str(error).split(". Of the")[0]
    phases.end(failed="out of memory" in facts)
    facts["plan"] = collections.Counter(  # {windows: steps of the plan}
        " ".join(map(str, T.plan_of(config, step).windows)) for step in range(config.num_steps)
    )
    write_facts(facts, phases, times[: steps + 1])


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    sys.stdout.flush()
    os._exit(0)  # threads of NCCL's group would wait forever
