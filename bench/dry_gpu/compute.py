"""Run train_gpt.py on an emulated GPU, which computes on the CPU, and compare it with the CPU's own path.

    bench/dry_gpu/run --compute -- FLAG ...               train_gpt.py's main; --ranks N, --poison and --shuffle as below
    bench/dry_gpu/run --compare                           three float32 steps of each preset, reduced in size
    bench/dry_gpu/run --compare speedrun --dtype bfloat16 --steps 6 --ranks 2
    bench/dry_gpu/run --compare laptop --poison --shuffle the same bits if memory starts as NaN, without torch's caching
                                                          allocator, and if programs run in random order
    bench/dry_gpu/run --compare speedrun --fault NAME     with a fault of faults.py in train_gpt.py; must fail

The GPU path is the real one: compiled for CUDA by Inductor, collectives through NCCL's process group. ATen operators are
the CPU's (aten.py), Triton kernels run in Triton's interpreter (interpreter.py), NCCL sends through a shared file
(device.c). The CPU path is uncompiled, on one rank, and starts each cycle of Adam from the GPU's state. Differences are
norms, relative to the norm of the CPU's tensor. Limits: in float32 those below; in bf16 twice the difference that the
CPU's bf16 has, both against the CPU's float32. Exit status: 0 within the limits, 1 above or not the same bits.
"""

import argparse
import hashlib
import importlib.util
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from page import ROOT, environment_of, write_shards

COMMON = ("--val_tokens", "512", "--val_len", "512", "--val_every", "0", "--target_val_loss", "0", "--train_shards", "0",
          "--num_steps", "6", "--warmup_steps", "0", "--train_loss_every", "1")
REDUCED = {  # two stages in three steps; windows cross block borders
    "speedrun": ("--layers", "- S0M LM SM+0", "--backout_layer", "1", "--model_dim", "128", "--num_heads", "1",
                 "--micro_batches", "2", "--micro_batch_tokens", "256", "--max_document_tokens", "100",
                 "--final_window", "8",
                 "--stages", "Stage(until=2, long_window=3), Stage(long_window=7), Stage(extra_steps=1, long_window=7)"),
    "frontier": ("--layers", "PM S0M P1M LM+0 cS1M cL1M", "--backout_layer", "2", "--model_dim", "128", "--num_heads",
                 "2", "--head_dim", "64", "--muon_qk_heads", "1", "--ngrams", "2:65536:128", "--micro_batches", "2",
                 "--stages", "Stage(until=2, micro_batch_tokens=128, max_document_tokens=60, long_window=3, "
                 "peak_lr_factor=1, loss_weights=Ramp((1, .5, .25), (1, .5, 0))), Stage(until=4, micro_batch_tokens=256, "
                 "max_document_tokens=100, long_window=7, peak_lr_factor=1.5, loss_weights=(1, .5)), Stage("
                 "micro_batch_tokens=256, max_document_tokens=100, long_window=11, peak_lr_factor=1.7, loss_weights=(1,)), "
                 "Stage(extra_steps=1, micro_batch_tokens=256, max_document_tokens=100, long_window=13, "
                 "peak_lr_factor=.15, loss_weights=(1,))"),
    "laptop": ("--ngrams", "2:4096:64 3:8192:64", "--micro_batch_tokens", "256"),
}
LIMITS = {"median": 1e-5, "largest": 1e-3}


# ---- one rank

def load(path):
    """Import the train_gpt.py at `path`; a faulty copy under a name of its own, beside the original."""
    import train_gpt
    if Path(path).parent == ROOT:
        return train_gpt
    spec = importlib.util.spec_from_file_location("faulty_train_gpt", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def become_gpu():
    import aten
    import interpreter
    import torch
    aten.install()
    interpreter.install()
    torch._dynamo.config.fail_on_recompile_limit_hit = True  # otherwise the limit only leaves code uncompiled, silently


class Side:
    """A trainer on one device, with its gradients and its state after each step."""

    def __init__(self, T, flags, comm, device):
        import torch
        self.T, self.comm, self.grads = T, comm, {}
        config = T.parse_config(flags, "speedrun")[1]
        T.check_config(config, comm.ranks)
        self.config = T.resolve_auto(config, comm)[0] if device.type == "cuda" else config
        shards = T.find_shards(config.train_files, config.train_shards)
        self.trainer = T.Trainer(self.config, comm, device, shards)
        self.optimizer = self.trainer.optimizer
        update = self.optimizer.update
        self.optimizer.update = lambda bucket, *rest: (self.keep_grads(bucket), update(bucket, *rest))
        draw = torch.Generator().manual_seed(1)
        with torch.no_grad():  # the initial zeros would hide what is behind them
            for p in self.trainer.model.parameters():
                noise = torch.randn(p.shape, generator=draw)
                p.copy_(noise * 0.05 if p.dim() > 1 else 0.5 + 0.1 * noise)

    def keep_grads(self, bucket):
        """Copy the gradients that a rule gets: all ranks' shards."""
        shard = bucket.param_shard.new_zeros(bucket.param_shard.shape, dtype=bucket.grad_data.dtype)
        rows = getattr(bucket, "grad_rows", slice(None))
        shard[rows] = bucket.grad_shard
        whole = shard.new_empty(self.comm.ranks * shard.numel())
        self.comm.all_gather(whole, shard.view(-1)).wait()
        for slot in bucket.slots:
            self.grads[slot.name] = bucket.view_of(slot, whole).to("cpu", copy=True).float()

    def state(self):
        return {name: x.detach().to("cpu", copy=True).float() for name, x in self.optimizer.named_state()}

    def step(self, step):
        """Train one step -> {"loss": tensor, "gradients": {name: tensor}, "updates": {name: what the step added}}."""
        plan, before = self.T.plan_of(self.config, step), self.state()
        self.grads.clear()
        losses = self.trainer.step(plan, self.trainer.stream.next_batch(plan))
        loss = self.comm.all_reduce(sum(losses))
        return {"loss": {"": loss.cpu()}, "gradients": dict(self.grads), "updates": {
            name: x - before[name] for name, x in self.state().items()}}

    def validate(self):
        config = self.config
        shards = self.T.find_shards(config.val_files)
        sequences = self.T.validation_sequences(shards, config.val_tokens, config.val_len)
        return self.trainer.validate(self.T.plan_of(config, config.num_steps), sequences)[0]


def differences(ours, reference):
    """Return {kind: (median, largest, its name)} of relative differences; tensors that are zero in both are left out."""
    out = {}
    for kind, tensors in reference.items():
        found = {name: ((ours[kind][name] - x).norm() / x.norm()).item() for name, x in tensors.items()
                 if x.norm() or ours[kind][name].norm()}
        largest = max(found, key=lambda name: (found[name] != found[name], found[name]))  # NaN is the largest
        out[kind] = statistics.median(found.values()), found[largest], largest
    return out


def show(title, table):
    cells = (f"{kind} {median:.1e}" + (f", largest {largest:.1e} ({name})" if name else "")
             for kind, (median, largest, name) in table.items())
    print(f"  {title}: " + "; ".join(cells), flush=True)


def compare(source, dtype, steps, flags):
    """Compare one preset on this rank's emulated GPU with the CPU -> whether all differences are within the limits."""
    become_gpu()
    import torch
    import train_gpt as R
    T, narrow = load(source), dtype != "float32"
    rank, ranks = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    device, cpu = torch.device("cuda", 0), torch.device("cpu")
    if ranks > 1:
        torch.cuda.set_device(device)
        T.join(T.Config(), rank, ranks, device)
    in_float32 = "--dtype", "float32", "--fp8_head", "False"
    ours = Side(T, [*flags, *(() if narrow else in_float32)], T.Comm(rank, ranks, device), device)
    alone = R.Comm(0, 1, cpu)
    references = {"float32": Side(R, [*flags, *in_float32, "--compile", "off"], alone, cpu)} if not rank else {}
    if narrow and not rank:
        references["bfloat16"] = Side(R, [*flags, "--compile", "off"], alone, cpu)
    digest, worst, allowed = hashlib.sha256(), {}, {}
    for step in range(steps):
        if not ours.optimizer.between_updates:  # otherwise gradients that wait would be lost
            state = ours.optimizer.state_dict()
            for reference in references.values():
                reference.optimizer.load_state_dict(state)
        found = ours.step(step)
        for name, x in sorted((f"{kind} {name}", x) for kind, xs in found.items() for name, x in xs.items()):
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
            for kind, (median, _, _) in table.items():
                allowed[kind, "median"] = max(allowed.get((kind, "median"), 0), 2 * median)
    loss = ours.validate()
    if rank:
        return True
    print(f"  validation loss {loss:.7f}; bits {digest.hexdigest()[:16]}", flush=True)
    allowed = allowed or {key: LIMITS[key[1]] for key in worst}
    above = [f"{kind}, {which}: {worst[kind, which]:.1e}, allowed {limit:.1e}" for (kind, which), limit in allowed.items()
             if not worst[kind, which] <= limit]
    for line in above:
        print(f"  above its limit: {line}")
    return not above


# ---- the command

def start_ranks(ranks, command, **settings):
    """Run a command once per rank on the emulated GPU -> (exit status of all, output of rank 0)."""
    home = Path(os.environ["DRY_GPU_HOME"])
    with tempfile.TemporaryDirectory(prefix="compute-", dir=home) as work, socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
        server.close()
        everyone = environment_of(home, home, DRY_GPU_COMPUTE=1, DRY_GPU_ARCH=90, DRY_GPU_SHARED=f"{work}/messages",
                                  **settings)
        if ranks > 1:
            everyone |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        processes = [subprocess.Popen(
            [sys.executable, __file__, *command], env=everyone | ({"RANK": str(rank)} if ranks > 1 else {}), text=True,
            stdout=subprocess.PIPE if not rank else None) for rank in range(ranks)]
        lines = []
        for line in processes[0].stdout:
            print(line, end="", flush=True)
            lines.append(line)
        return max(abs(process.wait()) for process in processes), "".join(lines)


def planted(name, folder):
    """Write a copy of train_gpt.py with a fault -> its path."""
    from faults import FAULTS
    fault, text = FAULTS[name], (ROOT / "train_gpt.py").read_text()
    assert text.count(fault.old) == 1, f"{name}: train_gpt.py has {text.count(fault.old)} times {fault.old!r}, not once"
    (path := Path(folder, "train_gpt.py")).write_text(text.replace(fault.old, fault.new))
    return path


def main():
    parser = argparse.ArgumentParser(prog="run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compute", action="store_true", help="run train_gpt.py's main")
    parser.add_argument("--compare", nargs="*", choices=REDUCED, metavar="PRESET", help="compare with the CPU (all presets)")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks (1)")
    parser.add_argument("--steps", type=int, default=3, help="steps to compare (3)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="of --compare (float32)")
    parser.add_argument("--poison", action="store_true", help="memory starts as NaN, and is never reused")
    parser.add_argument("--shuffle", action="store_true", help="run a kernel's programs in random order")
    parser.add_argument("--fault", default="", help="plant a fault of faults.py")
    parser.add_argument("flags", nargs="*", help="flags of train_gpt.py, after --")
    args = parser.parse_args()
    changes = {"DRY_GPU_POISON": 1, "PYTORCH_NO_CUDA_MEMORY_CACHING": 1} if args.poison else {}
    changes |= {"DRY_GPU_SHUFFLE": 1} if args.shuffle else {}
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        source = planted(args.fault, folder) if args.fault else ROOT / "train_gpt.py"
        if args.compute:
            return start_ranks(args.ranks, ["main", source, *args.flags], **changes)[0]
        home, good = Path(os.environ["DRY_GPU_HOME"]), True
        write_shards(shards := home / "shards-257", 257)
        for preset in args.compare or REDUCED:
            dtype = "float32" if preset == "laptop" else args.dtype
            flags = ["--preset", preset, "--train_files", f"{shards}/random_train_*.bin", "--val_files",
                     f"{shards}/random_val_*.bin", *COMMON, *REDUCED[preset], *args.flags]
            outputs = []
            for settings in ({}, changes) if changes else ({},):
                how = f"; {', '.join(settings)}" if settings else ""
                print(f"{preset}, {dtype}, ranks: {args.ranks}{how}", flush=True)
                status, output = start_ranks(
                    args.ranks, ["compare", source, dtype, str(args.steps), *flags], **settings)
                good, outputs = good and not status, [*outputs, output]
            if len(set(outputs)) > 1:
                good = False
                print("  not the same bits")
        return not good


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1] == "main":
        become_gpu()
        sys.exit(load(sys.argv[2]).main(sys.argv[3:]))
    elif sys.argv[1] == "compare":
        status = 1
        try:
            status = not compare(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5:])
        finally:
            sys.stdout.flush()
            if int(os.environ.get("WORLD_SIZE", 1)) > 1 and sys.exc_info()[0] is None:
                os._exit(status)  # threads of NCCL's group would wait forever
        sys.exit(status)
    sys.exit(main())
