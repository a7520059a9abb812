"""Run a preset on an emulated GPU, which computes on the CPU, and compare it with the CPU's own
path.

    dry_gpu/run --compute -- FLAG ...               a run; --ranks N, --poison, --shuffle: see below
    dry_gpu/run --compare                           three float32 steps of each preset, reduced
    dry_gpu/run --compare speedrun --dtype bfloat16 --steps 6 --ranks 2
    dry_gpu/run --compare masks                     attention, at windows around borders of blocks
    dry_gpu/run --order                             uses of memory on two streams without an order,
                                                    and which waits are needed
    dry_gpu/run --order --full --ranks 8 -- --preset speedrun
                                                    the same at full size, on the simulated GPU
    dry_gpu/run --compare laptop --poison --shuffle the same bits if memory starts as NaN, without
                                                    torch's caching allocator, and if programs run
                                                    in random order
    dry_gpu/run --compare speedrun --fault NAME     with a fault of faults.py; must fail

The GPU path is the real one: compiled for CUDA by Inductor, collectives through NCCL's process
group. ATen operators are the CPU's (aten.py), Triton kernels run in Triton's interpreter
(interpreter.py), NCCL sends through a shared file (device.c). The CPU path is uncompiled, on one
rank, and starts each cycle of Adam from the GPU's state. Differences are norms, relative to the
norm of the CPU's tensor. Limits: in float32 those below; in bf16 twice the difference that the
CPU's bf16 has, both against the CPU's float32. Exit status: 0 within the limits, 1 above or not the
same bits.
"""

import argparse
import collections
import hashlib
import importlib.util
import math
import os
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import order
from faults import FAULTS, plant
from page import ROOT, environment_of, small_vocabulary, write_shards
from simulate import parse_log

sys.path[:0] = str(ROOT), str(ROOT / "launch")

COMMON = (
    "--val_tokens",
    "512",
    "--val_len",
    "512",
    "--val_every",
    "0",
    "--target_val_loss",
    "0",
    "--train_shards",
    "0",
    "--num_steps",
    "6",
    "--warmup_steps",
    "0",
    "--train_loss_every",
    "1",
)
LAYERS_92 = """
    Layer("paired", narrow="qk", adds="x0 ngrams"),
    Layer("short", narrow="qkv", value_table=0, xsa=true, adds="x0 ngrams"),
    Layer("removed", adds="x0 ngrams"),
    Layer("long", xsa=true, gated=true, skip_from=0),
    Layer("short", narrow="qkv", value_table=1, reads_backout=true, mlp=2),
    Layer("long", value_table=2, gated=true, reads_backout=true)"""
LAYERS_89 = """
    Layer("paired", adds="x0 ngrams"),
    Layer("short", value_table=0, xsa=true, adds="x0 ngrams"),
    Layer("paired", value_table=1, adds="x0 ngrams"),
    Layer("long", xsa=true, gated=true, adds="x0 ngrams", skip_from=0),
    Layer("short", value_table=1, reads_backout=true, adds="x0 ngrams"),
    Layer("long", value_table=1, gated=true, dc=true, reads_backout=true)"""
REDUCED = {  # two stages in three steps; windows cross block borders
    "speedrun": (
        "--layers",
        "- S0M LM SM+0",
        "--backout_layer",
        "1",
        "--model_dim",
        "128",
        "--num_heads",
        "1",
        "--micro_batches",
        "2",
        "--micro_batch_tokens",
        "256",
        "--max_document_tokens",
        "100",
        "--final_window",
        "8",
        "--stages",
        "Stage(until=2, long_window=3), Stage(long_window=7), Stage(extra_steps=1, long_window=7)",
    ),
    "frontier": (
        "--layers",
        LAYERS_92,
        "--token_gates",
        "0,3",
        "--backout_layer",
        "2",
        "--model_dim",
        "128",
        "--mlp_dim",
        "384",
        "--mudd_groups",
        "4",
        "--num_heads",
        "2",
        "--muon_qk_heads",
        "1",
        "--ngrams",
        "Ngrams(2, 3000, 128), Ngrams(3, 3000, 128)",
        "--micro_batches",
        "2",
        "--param_groups",
        'AdamGroup("value_embeds", 70, .75, .95, .025, slow_from=4, by_rows=true),'
        ' MuonGroup("attn", anvil_from=2), AdamGroup("ngram_embeds", 70, 0, .95, .025,'
        ' slow_from=4, row_moment=true), MuonGroup("mlp_proj", 4, anvil_from=2)',
        "--tails",
        'Tail("head embed", 4, 2, 1, .5, blend=.65), Tail("qk mlp", 4, rate=.5)',
        "--stages",
        "Stage(until=2, micro_batch_tokens=128, max_document_tokens=60, long_window=3,"
        " peak_lr_factor=1, candidates=256, second_token_weight=.5,"
        " third_token_weight=Ramp(.25, 0), prefix_weight=.25), Stage(until=4,"
        " micro_batch_tokens=256, max_document_tokens=100, long_window=7, peak_lr_factor=1.5,"
        " candidates=320, second_token_weight=.5), Stage(micro_batch_tokens=256,"
        " max_document_tokens=100, attended_tokens=40, long_window=11, peak_lr_factor=1.7),"
        " Stage(extra_steps=1, micro_batch_tokens=256, max_document_tokens=100, long_window=13,"
        " peak_lr_factor=.3)",
    ),
    "frontier89": (
        "--layers",
        LAYERS_89,
        "--token_gates",
        "0,3",
        "--backout_layer",
        "2",
        "--model_dim",
        "128",
        "--num_heads",
        "2",
        "--muon_qk_heads",
        "1",
        "--ngrams",
        "Ngrams(2, 3000, 128)",
        "--micro_batches",
        "2",
        "--stages",
        "Stage(until=2, micro_batch_tokens=128, max_document_tokens=60, long_window=3,"
        " peak_lr_factor=1, second_token_weight=.5, third_token_weight=Ramp(.25, 0),"
        " prefix_weight=.25), Stage(until=4, micro_batch_tokens=256, max_document_tokens=100,"
        " long_window=7, peak_lr_factor=1.5, second_token_weight=.5),"
        " Stage(micro_batch_tokens=256, max_document_tokens=100, long_window=11,"
        " peak_lr_factor=1.7), Stage(extra_steps=1, micro_batch_tokens=256,"
        " max_document_tokens=100, long_window=13, peak_lr_factor=.15)",
    ),
    "laptop": (
        "--ngrams",
        "Ngrams(2, 4096, 64), Ngrams(3, 8192, 64)",
        "--micro_batch_tokens",
        "256",
    ),
}
LIMITS = {
    ("loss", "median"): 1e-5,
    ("gradients", "median"): 1e-5,
    ("gradients", "largest"): 1e-4,
    # Muon's polar factor enlarges rounding errors
    ("updates", "median"): 1e-5,
    ("updates", "largest"): 1e-2,
}
PROGRAMS = "train_gpt", "frontier"  # in the order of their imports
# (window, documents); blocks have 128 tokens
MASKS = (1, 1), (128, 1), (129, 1), (200, 5), (254, 1), (255, 1)


# ---- one rank


def load(folder):
    """Import the programs in a folder -> {name: module}; faulty copies under names of their own,
    beside the originals."""
    originals = programs = {name: importlib.import_module(name) for name in PROGRAMS}
    if Path(folder) != ROOT:
        programs = {}
        for name in PROGRAMS:
            spec = importlib.util.spec_from_file_location(
                f"faulty_{name}", Path(folder, f"{name}.py")
            )
            module = programs[name] = importlib.util.module_from_spec(spec)
            sys.modules.update({spec.name: module, name: module})  # frontier imports train_gpt
            spec.loader.exec_module(module)
        sys.modules.update(originals)
    return programs


def presets_of(programs, flags):
    from ranks import program_of

    return programs[program_of(flags).__name__].PRESETS


def rank_and_ranks():
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def become_gpu():
    import aten
    import interpreter
    import torch

    aten.install()
    interpreter.install()
    # CPUs lack the operator; masks then go into plain products
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    # otherwise the limit only leaves code uncompiled, silently
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def whole(state):
    """Add the rest of each matrix in bf16 to it; see NorMuon.init_state."""
    return {
        name: x + state.get(f"{name}/rest", 0)
        for name, x in state.items()
        if not name.endswith("/rest")
    }


class Side:
    """A worker on one device, with its gradients and its state after each step."""

    def __init__(self, programs, flags, comm, device):
        import torch

        self.T = T = programs["train_gpt"]
        self.comm = comm
        self.grads = {}
        presets = presets_of(programs, flags)
        config = T.parse_config(flags, [*presets][0], presets)[1]
        T.check_config(config, comm.ranks)
        self.config = T.resolve_auto(config, comm)[0] if device.type == "cuda" else config
        shards = T.find_shards(config.train_files, config.train_shards)
        self.worker = self.config.worker_type(self.config, comm, device, shards)
        self.worker.token_bytes = [b"%d" % token for token in range(shards[0].encoding.vocab_size)]
        self.worker.before_training()
        self.optimizer = self.worker.optimizer
        update = self.optimizer.update
        self.optimizer.update = lambda bucket, *rest: (
            self.keep_grads(bucket),
            update(bucket, *rest),
        )
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():  # the initial zeros would hide what is behind them
            for p in self.worker.model.parameters():
                noise = torch.randn(p.shape, generator=draw)
                p.copy_(noise * 0.05 if p.dim() > 1 else 0.5 + 0.1 * noise)

    def keep_grads(self, bucket):
        """Copy the gradients that a rule gets: all ranks' shards."""
        shard = bucket.param_shard.new_zeros(bucket.param_shard.shape, dtype=bucket.grad_data.dtype)
        rows = getattr(bucket, "grad_indices", slice(None))
        shard[rows] = bucket.grad_shard
        whole = shard.new_empty(self.comm.ranks * shard.numel())
        self.comm.all_gather(whole, shard.view(-1)).wait()
        for slot in bucket.slots:
            self.grads[slot.name] = bucket.view_of(slot, whole).to("cpu", copy=True).float()

    def state(self):
        return whole(
            {
                name: x.detach().to("cpu", copy=True).float()
                for name, x in self.optimizer.named_state()
            }
        )

    def step(self, step):
        """Train one step -> {"loss": tensor, "gradients": {name: tensor}, "updates": {name: what
        the step added}}."""
        plan = self.T.plan_of(self.config, step)
        before = self.state()
        self.grads.clear()
        losses = self.worker.step(plan, self.worker.stream.next_batch(plan))
        loss = self.comm.all_reduce(sum(losses))
        return {
            "loss": {"": loss.cpu()},
            "gradients": dict(self.grads),
            "updates": {name: x - before[name] for name, x in self.state().items()},
        }

    def validate(self):
        config = self.config
        shards = self.T.find_shards(config.val_files)
        sequences = self.T.validation_sequences(shards, config.val_tokens, config.val_len)
        return self.worker.validate(self.T.plan_of(config, config.num_steps), sequences)[0]


def differences(ours, reference):
    """Return {kind: (median, largest, its name)} of relative differences, without tensors that are
    zero in both."""
    out = {}
    for kind, tensors in reference.items():
        found = {
            name: ((ours[kind][name] - x).norm() / x.norm()).item()
            for name, x in tensors.items()
            if x.norm() or ours[kind][name].norm()
        }
        # NaN is the largest difference
        found = {name: x if x == x else math.inf for name, x in found.items()}
        largest = max(found, key=found.get)
        out[kind] = statistics.median(found.values()), found[largest], largest
    return out


def show(title, table):
    cells = (
        f"{kind} {median:.1e}" + (f", largest {largest:.1e} ({name})" if name else "")
        for kind, (median, largest, name) in table.items()
    )
    print(f"  {title}: " + "; ".join(cells), flush=True)


def compare(source, dtype, steps, flags):
    """Compare one preset on this rank's emulated GPU with the CPU -> whether all differences are
    within the limits."""
    become_gpu()
    import torch

    programs = load(source)
    originals = load(ROOT)
    narrow = dtype != "float32"
    T = programs["train_gpt"]
    rank, ranks = rank_and_ranks()
    device = torch.device("cuda", 0)
    cpu = torch.device("cpu")
    if ranks > 1:
        torch.cuda.set_device(device)
        T.join(T.Config(), rank, ranks, device)
    in_float32 = "--dtype", "float32", "--fp8_head", "False"
    plain = "--compile", "off", "--attention", "masked"
    ours = Side(
        programs, [*flags, *(() if narrow else in_float32)], T.Comm(rank, ranks, device), device
    )
    alone = originals["train_gpt"].Comm(0, 1, cpu)
    references = (
        {"float32": Side(originals, [*flags, *in_float32, *plain], alone, cpu)} if not rank else {}
    )
    if narrow and not rank:
        references["bfloat16"] = Side(originals, [*flags, *plain], alone, cpu)
    digest = hashlib.sha256()
    worst = {}
    allowed = {}
    for step in range(steps):
        if not ours.optimizer.between_updates:  # otherwise gradients that wait would be lost
            state = ours.optimizer.state_dict()
            # of fp8
            exact = {
                name: x
                for name, x in whole(state).items()
                if not name.endswith(("/h_scale", "/grad_scale"))
            }
            for kind, reference in references.items():
                reference.optimizer.load_state_dict(state if kind == dtype else exact)
        found = ours.step(step)
        for name, x in sorted(
            (f"{kind} {name}", x) for kind, xs in found.items() for name, x in xs.items()
        ):
            digest.update(name.encode() + x.numpy().tobytes())
        if rank:
            continue
        expected = {kind: reference.step(step) for kind, reference in references.items()}
        table = differences(found, expected["float32"])
        show(f"step {step}", table)
        for kind, (median, largest, name) in table.items():
            worst[kind, "median"] = max(worst.get((kind, "median"), 0), median)
            worst[kind, "largest"] = max(worst.get((kind, "largest"), 0), largest)
        if narrow:
            table = differences(expected["bfloat16"], expected["float32"])
            show(f"step {step}, CPU's bf16", table)
            for kind, (median, largest, _) in table.items():
                allowed[kind, "median"] = max(allowed.get((kind, "median"), 0), 2 * median)
                if kind == "gradients":
                    allowed[kind, "largest"] = max(allowed.get((kind, "largest"), 0), 2 * largest)
    loss = ours.validate()
    if rank:
        return True
    print(f"  validation loss {loss:.7f}; bits {digest.hexdigest()[:16]}", flush=True)
    return within(worst, allowed or LIMITS)


def within(worst, limits):
    """Print the differences above their limits -> whether there are none."""
    above = [
        f"{' '.join(key)} {worst[key]:.1e}, allowed {limit:.1e}"
        for key, limit in limits.items()
        if worst[key] > limit
    ]
    for line in above:
        print(f"  above its limit: {line}")
    return not above


def compare_masks(source):
    """Compare FlashAttention with masks in pieces on the CPU, forward and backward, in float32."""
    become_gpu()
    import torch
    import train_gpt as R

    T = load(source)["train_gpt"]
    worst = {}
    tokens = 384
    draw = torch.Generator().manual_seed(1)
    for window, documents in MASKS:
        starts = torch.randperm(tokens - 1, generator=draw)[: documents - 1] + 1
        docs = torch.zeros(tokens, dtype=torch.int64).index_fill_(0, starts, 1).cumsum(0)
        q, k, v, grad = torch.randn(4, tokens, 1, 64, generator=draw)
        q = q * 0.1

        def attend(module, mask, device):
            leaves = [x.to(device).requires_grad_() for x in (q, k, v)]
            y = module.attend(*leaves, mask)
            return [x.cpu() for x in (y.detach(), *torch.autograd.grad(y, leaves, grad.to(device)))]

        expected = attend(R, R.mask_in_pieces(docs, window, tokens, torch.float32), "cpu")
        starts = torch.searchsorted(docs, torch.arange(documents + 1), out_int32=True)
        mask = T.DocumentTable(
            starts.cuda(), torch.tensor([window, int(docs.bincount().max()), documents])
        )
        gaps = [
            ((x - y).norm() / y.norm()).item() for x, y in zip(attend(T, mask, "cuda"), expected)
        ]
        worst[f"window {window},", f"documents: {documents}"] = max(
            gap if gap == gap else math.inf for gap in gaps
        )
    print(f"  flash: largest {max(worst.values()):.1e}")
    return within(worst, dict.fromkeys(worst, 1e-5))


def train(source, steps, flags):
    """Train without looking at the results, as in a run, so that the log has only the run's own
    waits."""
    become_gpu()
    import torch

    programs = load(source)
    rank, ranks = rank_and_ranks()
    device = torch.device("cuda", 0)
    T = programs["train_gpt"]
    torch.cuda.set_device(device)
    if ranks > 1:
        T.join(T.Config(), rank, ranks, device)
    comm = T.Comm(rank, ranks, device)
    side = Side(programs, flags, comm, device)
    # it copies them on a stream of its own
    losses = T.TrainLosses(side.config, comm, T.Clock(device, 0.0), None)
    for step in range(steps):
        plan = T.plan_of(side.config, step)
        losses.record(plan, side.worker.step(plan, side.worker.stream.next_batch(plan)))
    side.validate()
    import aten

    aten.gpu.dry_gpu_flush()
    return True


def census(source, ranks, flags):
    """Run rank 0 at full size on the simulated GPU, whose census then writes USE lines of
    operators and kernels.

    A kernel uses the whole of its arguments, and writes those that Inductor does not call inputs.
    """
    import aten
    import rank0
    import torch

    dispatch = rank0.Operators.__torch_dispatch__

    def operator(mode, op, types, args=(), kwargs=None):
        out = dispatch(mode, op, types, args, kwargs)
        if op.namespace != "c10d" and not aten.returns_view(
            op
        ):  # device.c writes those of collectives
            named = {a.name: x for a, x in zip(op._schema.arguments, args)} | (kwargs or {})
            aten.log_uses(op, named | {"": out})
        return out

    def triton(run, function_of):
        def launch(kernel, *args, **kwargs):
            function = function_of(kernel)
            for name, x in (dict(zip(function.arg_names, args)) | kwargs).items():
                x = getattr(x, "base", x)  # of a descriptor
                if isinstance(x, torch.Tensor):
                    aten.log_use(function.__name__, *aten.extent(x), not name.startswith("in_ptr"))
            return run(kernel, *args, **kwargs)

        return launch

    rank0.Operators.__torch_dispatch__ = operator
    rank0.run_inductor_kernel = triton(rank0.run_inductor_kernel, lambda tuner: tuner.fn)
    rank0.run_triton_kernel = triton(rank0.run_triton_kernel, lambda kernel: kernel)
    rank0.main(source, ranks, 1, list(flags))
    return True


def check_order(path, full):
    """Print the unordered uses in a log and, unless it is one of full size, why some waits are not
    needed."""
    events = parse_log(open(path))
    uses, found = order.check(events)
    print(
        f"  {uses:,} uses of memory on {len({e.stream for e in events if e.kind == 'USE'})}"
        f" streams; unordered: {found.total()}"
    )
    for pair, count in found.most_common(5):
        print(f"    {count} × {pair}")
    if not found and not full:
        needed, others = order.explain_waits(events)
        kinds = {"WAIT": "an earlier wait", "SYNC": "the host's earlier wait"}

        def reason(wait, covers):
            if not covers:
                return "no later use needs it"
            if min(covers) > wait:
                return "a later wait covers it"
            return f"{' and '.join(sorted({kinds[events[i].kind] for i in covers}))} covers it"

        reasons = collections.Counter(reason(*item) for item in others.items())
        print(
            f"  {len(needed) + len(others)} waits: {len(needed)} needed, without each of which a"
            " use is unordered; "
            + "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
        )
    return not found


# ---- the command


def start_ranks(ranks, command, log="", **settings):
    """Run a command once per rank on the emulated GPU -> (exit status of all, output of rank 0).
    log: rank 0's."""
    home = Path(os.environ["DRY_GPU_HOME"])
    with tempfile.TemporaryDirectory(prefix="compute-", dir=home) as work:
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        everyone = environment_of(
            home,
            home,
            DRY_GPU_COMPUTE=1,
            DRY_GPU_ARCH=90,
            DRY_GPU_SHARED=f"{work}/messages",
            **settings,
        )
        if ranks > 1:
            everyone |= {
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": str(port),
            }
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, *map(str, command)],
                text=True,
                stdout=None if rank else subprocess.PIPE,
                env=everyone
                | {
                    "RANK": str(rank),
                    "DRY_GPU_LOG": log if log and not rank else os.devnull,
                },
            )
            for rank in range(ranks)
        ]
        lines = []
        for line in processes[0].stdout:
            print(line, end="", flush=True)
            lines.append(line)
        status = processes[0].wait()
        if status:  # the others would wait for it forever
            for process in processes[1:]:
                process.kill()
        return max(abs(process.wait()) for process in processes), "".join(lines)


def planted(name, folder):
    """Write copies of the programs, one with a fault -> their folder."""
    fault = FAULTS[name]
    texts = {f"{program}.py": (ROOT / f"{program}.py").read_text() for program in PROGRAMS}
    texts[fault.file] = plant(fault, texts[fault.file])
    for file, text in texts.items():
        Path(folder, file).write_text(text)
    return folder


def main():
    parser = argparse.ArgumentParser(
        prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compute", action="store_true", help="a run")
    parser.add_argument(
        "--compare",
        nargs="*",
        choices=(*REDUCED, "masks"),
        metavar="PRESET",
        help="compare with the CPU (default: all presets; masks: only attention)",
    )
    parser.add_argument(
        "--order",
        action="store_true",
        help="check the order of uses of memory, one and two ranks of speedrun",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="of --order: rank 0 of --ranks at full size, on the simulated GPU",
    )
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks (1)")
    parser.add_argument("--steps", type=int, default=3, help="steps to compare (3)")
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16"],
        default="float32",
        help="of --compare (float32; laptop always)",
    )
    parser.add_argument(
        "--poison", action="store_true", help="memory starts as NaN, and is never reused"
    )
    parser.add_argument(
        "--shuffle", action="store_true", help="run a kernel's programs in random order"
    )
    parser.add_argument(
        "--fault", choices=FAULTS, metavar="FAULT", help="plant a fault of faults.py"
    )
    parser.add_argument("flags", nargs="*", help="flags of the run, after --")
    args = parser.parse_args()
    changes = {"DRY_GPU_POISON": 1, "PYTORCH_NO_CUDA_MEMORY_CACHING": 1} if args.poison else {}
    changes |= {"DRY_GPU_SHUFFLE": 1} if args.shuffle else {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        source = planted(args.fault, folder) if args.fault else ROOT
        if args.compute:
            return start_ranks(args.ranks, ["main", source, *args.flags], **changes)[0]
        home = Path(os.environ["DRY_GPU_HOME"])
        good = True
        write_shards(shards := home / "shards-257", 257)
        files = (
            "--train_files",
            f"{shards}/random_train_*.bin",
            "--val_files",
            f"{shards}/random_val_*.bin",
        )
        if args.order:
            log = f"{folder}/log"
            if args.full:
                print(
                    f"rank 0 of {args.ranks} on the simulated GPU; order of the uses of memory",
                    flush=True,
                )
                vocab = 257 if small_vocabulary(args.flags) else 50257
                write_shards(shards := home / f"shards-{vocab}", vocab)
                flags = [
                    "--train_files",
                    f"{shards}/random_train_*.bin",
                    "--val_files",
                    f"{shards}/random_val_*.bin",
                    "--train_shards",
                    "0",
                    "--log_dir",
                    folder,
                    "--val_every",
                    "250",
                    *args.flags,
                ]
                env = environment_of(
                    home,
                    home,
                    TORCHINDUCTOR_BENCHMARK_KERNEL=1,
                    DRY_GPU_LOG=log,
                    DRY_GPU_ARCH=90,
                    DRY_GPU_USES=1,
                )
                done = subprocess.run(
                    [sys.executable, __file__, "census", source, str(args.ranks), *flags],
                    env=env,
                    stdout=subprocess.DEVNULL,
                )
                return done.returncode or not check_order(log, full=True)
            flags = ["--preset", "speedrun", *files, *COMMON, *REDUCED["speedrun"], *args.flags]
            for ranks in (1, 2):  # one rank sends nothing, so no collective orders its streams
                print(
                    f"speedrun, bfloat16, ranks: {ranks}; order of the uses of memory", flush=True
                )
                status, _ = start_ranks(
                    ranks, ["train", source, args.steps, *flags], log, DRY_GPU_USES=1
                )
                good &= not status and check_order(log, full=False)
            return not good
        for preset in args.compare or REDUCED:
            if preset == "masks":
                print("attention", flush=True)
                good &= not start_ranks(1, ["masks", source])[0]
                continue
            dtype = "float32" if preset == "laptop" else args.dtype
            flags = ["--preset", preset, *files, *COMMON, *REDUCED[preset], *args.flags]
            outputs = []
            for settings in ({}, changes) if changes else ({},):
                how = f"; {', '.join(settings)}" if settings else ""
                print(f"{preset}, {dtype}, ranks: {args.ranks}{how}", flush=True)
                status, output = start_ranks(
                    args.ranks, ["compare", source, dtype, args.steps, *flags], **settings
                )
                good = good and not status
                outputs = [*outputs, output]
            if len(set(outputs)) > 1:
                good = False
                print("  not the same bits")
        print("within the limits" if good else "NOT within the limits")
        return not good


def main_of_rank(what, source, *rest):
    """Do one rank's part of a command -> exit status."""
    if what == "main":
        become_gpu()
        programs = load(source)
        return programs["train_gpt"].main(presets_of(programs, rest), rest)
    if what == "masks":
        return not compare_masks(source)
    if what == "census":
        return not census(source, int(rest[0]), rest[1:])
    if what == "train":
        return not train(source, int(rest[0]), rest[1:])
    return not compare(source, rest[0], int(rest[1]), rest[2:])


if __name__ == "__main__":
    if sys.argv[1].startswith("--"):
        sys.exit(main())
    status = main_of_rank(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(int(status))  # threads of NCCL's group would wait forever
