"""Run rank 0 of N of a public record's own program on the simulated GPU. page.py starts this
script and reads the log.

    python -c "import program; program.main()" FOLDER RANKS

FOLDER contains train_gpt.py and its kernels, $DATA_PATH data/fineweb10B. The program is executed as
`__main__`, as it is, up to its warm-up of kernels. Its training loop then runs three times over a
sample of steps: warm-up, which compiles; census; and once on the host's clock. A sample has the
first two steps of each stage, which may untie the head and change the batch size, and four from the
stage's middle. Only these four count.

Replaced, because it cannot exist here: FlashAttention 3 of the `kernels` hub, by torch's
FlashAttention 2, counted at version 3's rate; CUDA source, which would be compiled at run time, by
a line in the log; all-to-all, by a reduce-scatter of as many bytes; tiktoken, by a tokenizer of
bytes; nvidia-smi. Validation is left out.
"""

import inspect
import itertools
import math
import os
import re
import subprocess
import sys
import time
import types
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist

from rank0 import STATED, Done, Phases, census, mark, visited_pairs, write_facts

BLOCK = 128  # tokens; the programs state windows in blocks


# ---- attention: FlashAttention 3 has the interface, torch's FlashAttention 2 the launches


def mark_attention(q, window):
    """Write the FLOPs of one attention to the log. A program that pairs heads lengthens the batch
    by a factor."""
    times = len(q) // len(BATCH.documents)
    pairs = visited_pairs(np.repeat(BATCH.documents, times), window)
    mark("ATTENTION", "", 4 * q.size(1) * q.size(2) * pairs)


@torch.library.custom_op("simulated::flash", mutates_args=())
def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    mark_attention(q, window)
    return torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        starts,
        starts,
        longest,
        longest,
        0.0,
        False,
        False,
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )[:2]


@torch.library.custom_op("simulated::flash_backward", mutates_args=())
def flash_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    log_sums: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    window: int,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    mark_attention(q, window)
    seed = q.new_empty(2, dtype=torch.uint64)
    return torch.ops.aten._flash_attention_backward(
        grad,
        q,
        k,
        v,
        out,
        log_sums,
        starts,
        starts,
        longest,
        longest,
        0.0,
        False,
        seed,
        seed,
        scale=scale,
        window_size_left=window,
        window_size_right=0,
    )


def keep_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3], *output, inputs[3])
    ctx.numbers = inputs[4:]


def backward_of_flash(ctx, grad, _):
    return (
        *flash_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers),
        None,
        None,
        None,
        None,
    )


flash.register_fake(
    lambda q, *_: (torch.empty_like(q), q.new_empty(q.size(1), q.size(0), dtype=torch.float32))
)
flash_backward.register_fake(lambda grad, q, k, v, *_: tuple(map(torch.empty_like, (q, k, v))))
flash.register_autograd(backward_of_flash, setup_context=keep_for_backward)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    softmax_scale,
    window_size,
):
    return flash(q, k, v, cu_seqlens_q, max_seqlen_q, window_size[0], softmax_scale)[0]


# ---- costs of the programs' kernels


def symmetric_product(grid, kernel, args):
    """Return the cost of a product whose result is symmetric. Tiles on and below the diagonal run
    in waves."""
    given = args["A_ptr"]
    result = args["C_ptr"]
    batch = given.size(0) if given.dim() == 3 else 1
    side = math.ceil(result.size(-1) / BLOCK)
    tiles = math.ceil(batch * side * (side + 1) / 2 / 132) * 132
    inner = given.numel() // batch // result.size(-1)
    return {"flops16": 2 * BLOCK**2 * inner * tiles, "bytes": given.nbytes + result.nbytes}


def relu_squared_product(grid, kernel, args):
    """Return the cost of a product with ReLU². Record 80's stores two results or reads one; later
    ones store one."""
    m, n, k = (args[name] for name in "MNK")
    fp8 = args.get("USE_FP8", False)
    more = args["EMIT_FP8"] + 2 * (not args["FORWARD"]) if "EMIT_FP8" in args else 2
    return {
        "flops8" if fp8 else "flops16": 2 * m * n * k,
        "bytes": (2 - fp8) * (m * k + k * n) + m * n * (2 + more),
    }


def composition(reads, adds):
    """Return the cost of a kernel of dynamic composition. Its programs of 16 queries read their
    window's keys from L2.

    reads, adds: tiles of keys or values that a program reads, or adds to, per head. Assumed: L2
    moves 5.5 TB/s, and an atomic addition is two accesses. FLOPs (13 to 19 G at 32,768 tokens) and
    exponentials (25 M) would take less.
    """

    def cost(grid, kernel, args):
        tiles = args["T"] // args["BLOCK_M"] * args["Q"].size(2)
        return {
            "bytes": 3.0 / 5.5 * 2 * args["BLOCK_K"] * args["BLOCK_D"] * tiles * (reads + 2 * adds)
        }

    return cost


def transposed_add(grid, kernel, args):
    return {"bytes": args["src_ptr"].nbytes + 2 * args["dst_ptr"].nbytes}


STATED |= {
    "XXT_kernel": symmetric_product,
    "XTX_kernel": symmetric_product,
    "ba_plus_cAA_kernel": symmetric_product,
    "linear_relu_square_kernel": relu_squared_product,
    "_transpose_add_kernel": transposed_add,
    "_dc_postonly_corr_fwd_wsmall_cached_kernel": composition(2, 0),
    "_dc_postonly_corr_bwd_pre_wsmall_kernel": composition(2, 1),
    "_dc_postonly_corr_bwd_qk_wsmall_kernel": composition(1, 1),
}


class CudaSource:
    """A kernel in CUDA source. Its cost: its arguments' bytes and, for the loss, three special
    functions per logit."""

    def __init__(self, source, name, **_):
        self.name = name

    def set_shared_memory_config(self, size):
        pass

    def __call__(self, grid, block, args, shared_mem=0, stream=None):
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        special = 3 * tensors[0].numel() if self.name.startswith("ce_") else 0
        mark("COST", "", sum(x.nbytes for x in tensors), special, 0, 0)
        mark("TRITON", self.name, *grid, math.prod(block), shared_mem)


# ---- what else cannot exist here


class Sent:
    """An exchange on the CPU that is done."""

    def wait(self):
        pass

    def get_future(self):
        return self


def replace_missing(ranks):
    start = dist.init_process_group
    run = subprocess.run
    # torch 2.13 wraps both to warn that they are deprecated, and compiles the wrappers, which torch
    # 2.10 called
    reduce_scatter, gather = (
        torch._dynamo.disable(inspect.unwrap(collective))
        for collective in (dist.reduce_scatter_tensor, dist.all_gather_into_tensor)
    )

    @torch._dynamo.disable
    def all_to_all_single(output, input, *splits, async_op=False, **more):
        if not input.is_cuda:
            output.copy_(input)
            return Sent()
        rows = max(1, input.numel() // ranks)
        return reduce_scatter(
            input.new_empty(rows), input.new_empty(rows * ranks), async_op=async_op
        )

    def init_process_group(*_, **settings):
        start(
            "nccl",
            store=dist.HashStore(),
            rank=0,
            world_size=ranks,
            device_id=torch.device("cuda", 0),
        )

    def run_nothing(command, *args, **settings):
        missing = command[:1] == ["nvidia-smi"]
        return types.SimpleNamespace(stdout="") if missing else run(command, *args, **settings)

    hub = types.ModuleType("kernels")
    hubs_flash = types.SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    hub.get_kernel = lambda *_, **more: types.SimpleNamespace(flash_attn_interface=hubs_flash)
    tokenizer = types.ModuleType("tiktoken")
    tokenizer.get_encoding = lambda name: types.SimpleNamespace(
        _mergeable_ranks={bytes([i]): i for i in range(256)}
    )
    sys.modules |= {"kernels": hub, "tiktoken": tokenizer}
    dist.all_to_all_single = all_to_all_single
    dist.init_process_group = init_process_group
    dist.barrier = lambda: None
    dist.reduce_scatter_tensor = reduce_scatter
    dist.all_gather_into_tensor = gather
    subprocess.run = run_nothing
    torch.cuda._compile_kernel = CudaSource
    # Inductor prints the constants of a graph, and repr loops over values != 0. Here any number of
    # values may be != 0
    torch._tensor_str._tensor_str = lambda x, indent: "..."
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_RANK": "0"}


# ---- the run


class Batches:
    """A program's loader of batches. It keeps each token's document, for the cost of attention."""

    documents = np.zeros(0)

    def __init__(self, loader):
        self.loader = loader
        self.opened = False

    def send(self, sizes):
        if sizes is not None and not self.opened:
            next(self.loader)
        self.opened = True
        # {address on the GPU: the same values on the CPU}
        sent = {}
        send_to = torch.Tensor.to

        def to(x, *args, **more):
            out = send_to(x, *args, **more)
            if out.is_cuda:
                sent[out.data_ptr()] = x
            return out

        with patch.object(torch.Tensor, "to", to):
            inputs, _, starts, *_ = batch = self.loader.send(sizes)
        BATCH.documents = np.searchsorted(
            sent[starts.data_ptr()].numpy(), np.arange(len(inputs)), side="right"
        )
        return batch

    def __next__(self):
        return self.send(None)


BATCH = Batches(None)


def split_source(source):
    """Return (set-up, training loop) of a program's source, with its line numbers. Exit: not such
    a source."""
    parts = re.split(r"(?m)^# +(?:Warmup kernels|Training and validation) +#$", source)
    loop, found = re.subn(
        r"(?m)^for step in range\(train_steps \+ 1\):", "for step in sampled_steps():", parts[-1]
    )
    if len(parts) != 3 or found != 1:
        sys.exit(
            "error: the program lacks sections `Warmup kernels` and `Training and validation`, or"
            " the latter's `for step in range(train_steps + 1):`; choose one of records 44 to 89"
        )
    return parts[0], "\n" * (source.count("\n") - loop.count("\n")) + loop


def windows_by_step(main):
    """Return the windows of each step in tokens, long and short."""
    if schedule := main.get("training_schedule"):
        pairs = [schedule.lookup(step)[0].window_sizes for step in range(schedule.total_steps)]
    else:
        pairs = [main["get_ws"](step) for step in range(main["args"].num_iterations)]
    return [f"{long * BLOCK} {short * BLOCK}" for short, long in pairs]


def sample(windows, counted=4):
    """Return {step: windows, or "" if it does not count}: per stage its first two steps and some
    from its middle."""
    steps = {}
    for label, stage in itertools.groupby(range(len(windows)), windows.__getitem__):
        first, *_, last = stage
        middle = (first + last) // 2
        # an update in every second step then finds the gradients of the step before
        middle -= (middle - first) % 2
        steps |= {first: "", first + 1: ""} | dict.fromkeys(
            range(middle, min(middle + counted, last + 1)), label
        )
    return steps


def main():
    folder = sys.argv[1]
    ranks = int(sys.argv[2])
    facts = {}
    times = []
    stats = torch._dynamo.utils.counters["stats"]
    path = os.path.join(folder, "train_gpt.py")
    phases = Phases(path)
    set_up, training = split_source(open(path).read())
    replace_missing(ranks)
    sys.path.insert(0, folder)
    sys.argv = [path]
    os.chdir(os.environ["DATA_PATH"])  # for its logs
    program = sys.modules["__main__"] = types.ModuleType("__main__")
    names = program.__dict__
    names["__file__"] = path
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    # as in torch 2.10: their kernels want fp32 numbers
    torch._inductor.config._use_fp64_for_unbacked_floats = False
    phases.begin("set-up", watched=True)
    exec(compile(set_up, path, "exec"), names)
    if kernels := sys.modules.get("triton_kernels"):
        # torch 2.13 does not trace that a module's global is set
        kernels._dummy_f32 = torch.zeros(1, device="cuda:0")
    load = names["distributed_data_generator"]
    windows = windows_by_step(names)
    names["distributed_data_generator"] = lambda *args, **more: Batches(load(*args, **more))
    names["args"].val_loss_every = 0
    chosen = {}

    def sampled_steps():
        for step, label in chosen.items():
            if label == windows[0]:  # the first stage, as of our script
                times.append((step, time.perf_counter(), time.process_time()))
            mark("STEP", label, step, 0)
            yield step
            mark("END")
        raise Done

    names["sampled_steps"] = sampled_steps
    loop = compile(training, path, "exec")
    for phase in ("warm-up", "census", "training"):
        phases.begin(phase, watched=phase == "warm-up")
        chosen = sample(windows, 24 if phase == "training" else 4)
        for part in (
            (names.get("training_manager"), names.get("optimizer2"), names["model"].yarn)
            if times
            else ()
        ):
            part and part.reset()
        names["model"].zero_grad(set_to_none=True)
        times.clear()
        start = time.perf_counter()
        cpu = sum(os.times()[:4])
        try:
            if phase == "census":
                with census():
                    exec(loop, names)
            else:
                exec(loop, names)
        except Done:
            pass
        if phase == "warm-up":
            facts.update(
                warm_up=time.perf_counter() - start,
                warm_up_cpu=sum(os.times()[:4]) - cpu,
                warmed_up=stats["unique_graphs"],
            )
    phases.end()
    facts["batch"] = "1 × the stage's; its own"
    facts["plan"] = {label: len(list(stage)) for label, stage in itertools.groupby(windows)}
    write_facts(facts, phases, times)

    sys.stdout.flush()
    os._exit(0)  # threads of NCCL's group would wait forever
