"""Rank 0 of N of a run, on the GPU that computes nothing; `run` starts it, and page.py tells of what it wrote.

    python rank0.py REQUEST.json       {"folder": of train_gpt.py, "ranks", "steps", "flags", "facts": the file to write}

The other ranks are not there: NCCL's stubs send nothing, and what ranks say to one another is rank 0's own word. The warm-up
runs twice, which compiles nothing the second time; there each kernel's bytes are taken down. Then come the first validation,
the steps that are timed, and as many as lie between two of Adam's with each allocation's origin. Then it stops.
"""

import collections
import contextlib
import ctypes
import inspect
import json
import linecache
import os
import re
import sys
import time

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

gpu = ctypes.CDLL("libcuda.so.1")


def mark(*words):
    gpu.dry_gpu_mark("\t".join(map(str, words)).encode())


class Done(Exception):
    """Enough steps."""


# ---- what a kernel reads and writes

SPECIAL = {"exp": 1, "exp2": 1, "log": 1, "log2": 1, "rsqrt": 1, "sqrt": 1, "tanh": 2, "sigmoid": 2, "online_softmax_combine": 2}


def size_of(x):
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes()) if x.is_cuda else 0


def cost_of(kernel, args, meta):
    """A Triton kernel's (bytes, special functions, FLOPs in fp8, in bf16). What it says of itself by Triton's `launch_metadata`
    goes first, then Inductor's count of its bytes, then the size of its arguments. A loop more over a row reads it again."""
    named = dict(zip(kernel.arg_names, args))
    if said := getattr(kernel, "launch_metadata", None):
        said = said((1, 1, 1), None, named)
        return said.get("bytes", 0), 0, said.get("flops8", 0), said.get("flops16", 0) or said.get("flops", 0)
    sizes = {name: size_of(x) for name, x in named.items() if isinstance(x, torch.Tensor)}
    moved = (meta.get("kernel_num_gb") or 0) * 1e9 or sum(sizes.values())
    numels = [number for name, number in re.findall(r"^ +(\w+numel) = (\d+)$", kernel.src, re.M) if name != "rnumel"]
    elements = 1
    for number in numels:
        elements *= int(number)
    loops = re.split(r"^    for .*:$", kernel.src, flags=re.M)[1:]
    loops = [re.match(r"(\n(        .*)?)*", loop)[0] for loop in loops]
    passes = collections.Counter(name for loop in loops for name in set(re.findall(r"tl\.load\((\w+) \+ \([^)]*r0_", loop)))
    moved += sum((times - 1) * sizes.get(name, 0) for name, times in passes.items())
    special = sum(SPECIAL.get(name, 0) for name in re.findall(r"\.(\w+)\(", "".join(loops) or kernel.src))
    return moved, special * elements, 0, 0


class Census(TorchDispatchMode):
    """While it lasts, the cost of every kernel goes to the launch log: before a Triton kernel, after an operator's."""

    @classmethod
    def ignore_compile_internals(cls):  # else compiled code would not be taken
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        given, name = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)], op._opname
        made = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]
        read, written = sum(map(size_of, given)), sum(map(size_of, made))
        if name in ("copy_", "fill_", "zero_"):  # what is overwritten is not read
            read -= size_of(given[0])
        if name in ("embedding", "index", "gather", "index_select"):  # as many rows as come out
            read = min(read, written)
        mark("OP", name, read + written)
        return out

    def __enter__(self):
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner
        from triton.runtime.jit import JITFunction
        self.plain = [(CachingAutotuner, CachingAutotuner.run), (JITFunction, JITFunction.run)]

        def by_inductor(tuner, *args, **kwargs):
            mark("COST", *cost_of(tuner.fn, args, tuner.inductor_meta))
            return self.plain[0][1](tuner, *args, **kwargs)

        def by_hand(kernel, *args, **kwargs):
            mark("COST", *cost_of(kernel, [*args, *(kwargs.get(name) for name in kernel.arg_names[len(args):])], {}))
            return self.plain[1][1](kernel, *args, **kwargs)
        CachingAutotuner.run, JITFunction.run = by_inductor, by_hand
        return super().__enter__()

    def __exit__(self, *error):
        for cls, run in self.plain:
            cls.run = run
        return super().__exit__(*error)


# ---- memory

def origin(block, source):
    """Where a block of memory was asked for: the line of train_gpt.py, and the tensor where a compiled graph made it."""
    where, tensor = "", ""
    for frame in block.get("frames") or ():
        if not tensor and "inductor" in frame["filename"]:
            shape = re.search(r"empty_strided_\w+\((\([\d, ]*\)).*?torch\.(\w+)", linecache.getline(frame["filename"], frame["line"]))
            tensor = f"{shape[1]} {shape[2]}" if shape else ""
        if frame["filename"] == source:
            where = f"{frame['name']}, line {frame['line']}"
            break
    return " of ".join(filter(None, (tensor, where))) or "autograd, outside compiled graphs"


class Memory:
    """Peaks by phase, and the tensors that lived at the peak."""

    def __init__(self, source):
        self.source, self.phases, self.phase = source, {}, ""

    def begin(self, phase):
        torch.cuda.memory._record_memory_history("all", stacks="python", max_entries=10 ** 7, clear_history=True)
        torch.cuda.reset_peak_memory_stats()
        self.phase, self.live = phase, {}
        for segment in torch.cuda.memory._snapshot()["segments"]:
            at = segment["address"]
            for block in segment["blocks"]:
                if block["state"] == "active_allocated":
                    self.live[at] = block
                at += block["size"]

    def end(self, failed=False):
        """The phase is over; its events are replayed up to their highest sum."""
        if not self.phase:
            return
        events = [e for trace in torch.cuda.memory._snapshot()["device_traces"] for e in trace
                  if e["action"] in ("alloc", "free_requested", "free_completed")]
        held = highest = sum(block["size"] for block in self.live.values())
        upto = 0
        for i, e in enumerate(events):
            held += {"alloc": e["size"], "free_completed": -e["size"]}.get(e["action"], 0)
            if held > highest:
                highest, upto = held, i + 1
        for e in events[:len(events) if failed else upto]:
            if e["action"] == "alloc":
                self.live[e["addr"]] = e
            elif e["action"] == "free_completed":
                self.live.pop(e["addr"], None)
        tensors = collections.defaultdict(lambda: [0, 0])
        for block in self.live.values():
            entry = tensors[origin(block, self.source)]
            entry[0] += block["size"]
            entry[1] += 1
        self.phases[self.phase] = {
            "peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved(),
            "tensors": sorted(([*v, k] for k, v in tensors.items()), reverse=True)[:12]}
        torch.cuda.memory._record_memory_history(None)
        self.phase = ""


# ---- the run

def main(request):
    sys.path.insert(0, request["folder"])
    import train_gpt as T
    ranks, wanted, facts = request["ranks"], ("parse_config", "check_config", "run", "validate", "Comm", "Log", "Trainer"), {}
    missing = [name for name in wanted if not hasattr(T, name)]
    missing += [f"Trainer.{name}" for name in ("step", "warm_up") if not hasattr(getattr(T, "Trainer", None), name)]
    said = [name for name in ("all_json", "all_objects") if hasattr(getattr(T, "Comm", None), name)]
    if missing or not said:
        sys.exit(f"{T.__file__} has no {', '.join(missing) or 'Comm.all_json'}, by which the dry run holds it; mend "
                 "bench/dry_gpu/rank0.py, or name a revision that has it")

    def fitting(function, *args):  # older revisions take fewer
        return function(*args[:len(inspect.signature(function).parameters)])

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=ranks, device_id=device)
        setattr(T.Comm, said[0], lambda self, mine: [json.loads(json.dumps(mine))] * self.ranks)
    memory, steps, times = Memory(T.__file__), {"done": 0}, []
    real_step, real_warm_up, real_validate = T.Trainer.step, T.Trainer.warm_up, T.validate

    def step(trainer, plan, batch):
        number = getattr(plan, "step", plan)
        if facts.get("warm"):
            if not memory.phase and steps["done"] >= request["steps"]:
                memory.begin("training")
            if steps["done"] >= request["steps"] + 2:
                raise Done
            steps["done"] += 1
            times.append(time.perf_counter())
        windows = getattr(plan, "windows", None) or getattr(trainer.model, "windows", None)
        mark("STEP", number, *(windows or ()), *(pairs(batch, windows, trainer) if windows and steps.get("census") else ()))
        out = real_step(trainer, plan, batch)
        mark("END", number)
        return out

    def pairs(batch, windows, trainer):
        """Pairs of blocks of 128 tokens that attention looks at, summed over the step, in the mean of the layers."""
        import numpy as np
        bos, block = trainer.model.bos_id, 128
        words = [word[0] for word in config.layers.split() if word[0] in "SL"]
        total = 0.0
        for tokens in batch:
            documents = np.cumsum(np.asarray(tokens)[:-1] == bos).reshape(-1, block)
            at = np.arange(len(documents))
            back = (at[:, None] - at[None]) * block
            same = documents[None, :, -1] >= documents[:, None, 0]
            for word in words:
                reach = windows[0 if word == "L" else 1]
                total += ((back >= 0) & (back - block + 1 <= reach) & same).sum() / len(words)
        return (total * block ** 2,)

    def warm_up(trainer, *args):
        memory.end()
        memory.begin("warm-up")
        began = time.perf_counter()
        mark("PHASE", "warm-up")
        real_warm_up(trainer, *args)
        memory.end()
        facts["warm-up seconds"] = time.perf_counter() - began
        mark("PHASE", "census")
        steps["census"] = True
        with Census():
            real_warm_up(trainer, *args)
        steps["census"], facts["warm"] = False, graphs()
        mark("PHASE", "training")

    def validate(*args, **kwargs):
        if not facts.get("warm"):
            return real_validate(*args, **kwargs)
        memory.begin("validation")
        mark("PHASE", "validation")
        out = real_validate(*args, **kwargs)
        mark("PHASE", "training")
        memory.end()
        return out

    def graphs():
        return torch._dynamo.utils.counters["stats"]["unique_graphs"]

    T.Trainer.step, T.Trainer.warm_up, T.validate = step, warm_up, validate
    preset, config = T.parse_config(request["flags"], "speedrun")
    T.check_config(config, ranks)
    memory.begin("set-up")
    began = time.perf_counter()
    try:
        fitting(T.run, config, preset, fitting(T.Comm, 0, ranks, device), device, fitting(T.Log, config, 0, "dry"), began)
    except Done:
        pass
    except torch.OutOfMemoryError as error:
        facts["out of memory"] = [memory.phase, str(error).split(". Of the")[0]]
    memory.end(failed="out of memory" in facts)
    utils = torch._dynamo.utils
    facts.update(
        memory=memory.phases, host=[1e3 * (b - a) for a, b in zip(times, times[1:])][:request["steps"]],
        graphs=graphs(), late=graphs() - facts.pop("warm", graphs()), compile=utils.calculate_time_spent().get("total_wall_time", 0),
        breaks={str(k).splitlines()[0]: v for k, v in utils.counters["graph_break"].items()},
        attention=[config.num_heads * config.head_dim], pid=os.getpid())
    with contextlib.suppress(AttributeError):  # how many steps of the plan have which windows
        facts["plan"] = collections.Counter(" ".join(map(str, T.plan_of(config, s).windows)) for s in range(config.num_steps))
    with open(request["facts"], "w") as file:
        json.dump(facts, file)
    gpu.dry_gpu_flush()


if __name__ == "__main__":
    main(json.load(open(sys.argv[1])))
    sys.stdout.flush()
    os._exit(0)  # threads of NCCL's group wait for what never comes
