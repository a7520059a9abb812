"""Count memory passes: how often a step reads and writes gradients and parameters, with buckets and with stack-and-copy.

    python bench/passes.py

Bytes are counted, not timed: those of every operator's arguments that hold gradients or parameters, in any buffer, from
the arrival of the gradients to the new parameters. One pass is as many bytes as the model has gradients (or parameters).
A collective is one read of its input and one write of its output. This process is rank 0 of --ranks in torch's `fake`
process group, whose collectives send nothing. Moments are not counted: both variants read and write a rank's share once.

stack-and-copy is the public record's former method: stack the gradients of one shape, reduce-scatter the stack, update
this rank's part, all-gather into another stack, and copy that back to the parameters.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from common import PLAN, FakeComm, Transformer, adam_optimizer, machine, positive, run, table, train_gpt

LR = 1e-3
ONLY_WRITE = ("aten::copy_", "aten::zero_", "aten::fill_")  # in-place operators that do not read their output
READ_NOTHING = ("aten::detach", "aten::empty_like", "aten::zeros_like")
NOT_CHANGED = {"aten::_fused_adam_": "grads"}  # the schema marks it as written, for a scaling that is off here
COLLECTIVES = ("c10d::_reduce_scatter_base_", "c10d::_allgather_base_")  # read input_tensor, write output_tensor


class Passes(TorchDispatchMode):
    """Counts bytes in count[kind, "read" or "written"]; kind is "gradients" or "parameters"."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: dict[int, str] = {}
        self.kept: list[Tensor] = []  # alive, so that no address is used twice
        self.count: Counter[tuple[str, str]] = Counter()

    def watch(self, kind: str, *tensors: Tensor) -> None:
        for x in tensors:
            self.kept.append(x)
            self.kinds[x.untyped_storage().data_ptr()] = kind

    def note(self, how: str, argument: Any) -> None:
        for x in tree_leaves(argument):
            if isinstance(x, Tensor) and (kind := self.kinds.get(x.untyped_storage().data_ptr())):
                self.count[kind, how] += x.numel() * x.element_size()

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        schema = function._schema
        given = dict(zip((a.name for a in schema.arguments), args)) | (kwargs or {})
        out = function(*args, **(kwargs or {}))
        name = schema.name
        if name in COLLECTIVES:
            self.note("written", given["output_tensor"])
            self.note("read", given["input_tensor"])
        elif name.startswith("c10d"):
            raise train_gpt.RunError(f"{name} is not in COLLECTIVES, so its bytes would not be counted; add it")
        elif name == "aten::copy_" and args[0].data_ptr() == args[1].data_ptr():
            pass  # a copy to itself, which torch skips
        elif not function.is_view and name not in READ_NOTHING:
            for argument in schema.arguments:
                marked = argument.alias_info is not None and argument.alias_info.is_write
                writes = marked and argument.name != NOT_CHANGED.get(name)
                if writes:
                    self.note("written", given.get(argument.name))
                if not writes or not (argument.name == "out" or name in ONLY_WRITE):
                    self.note("read", given.get(argument.name))
        return out


def model_and_grads(args: argparse.Namespace) -> tuple[Transformer, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Transformer(args.layers, args.dim, args.vocab, 64)
    return model, {name: torch.randn_like(param) for name, param in model.named_parameters()}


def buckets(args: argparse.Namespace, comm: FakeComm, passes: Passes) -> Callable[[], None]:
    model, grads = model_and_grads(args)
    optimizer = adam_optimizer(model, comm, LR, args.bucket_mb)
    for bucket in optimizer.buckets:
        passes.watch("parameters", bucket.param_data)
        passes.watch("gradients", bucket.grad_data)
    passes.watch("gradients", *grads.values())

    def step() -> None:
        optimizer.prepare_for_backward(0)
        for bucket in optimizer.buckets:
            for slot in bucket.slots:
                slot.param.grad = grads[slot.name]
                bucket.add_grad(slot, optimizer.reducer.factor)
        optimizer.step()
    return step


def stack_and_copy(args: argparse.Namespace, comm: FakeComm, passes: Passes) -> Callable[[], None]:
    model, grads = model_and_grads(args)
    groups: dict[torch.Size, list[str]] = {}
    params = dict(model.named_parameters())
    for name, param in params.items():
        groups.setdefault(param.shape, []).append(name)
    passes.watch("parameters", *params.values())
    passes.watch("gradients", *grads.values())
    moments: dict[torch.Size, dict[str, Tensor]] = {}

    def stacked(kind: str, tensors: list[Tensor], padded: int) -> Tensor:
        stack = torch.empty(padded, *tensors[0].shape)
        passes.watch(kind, stack)
        return torch.stack(tensors + [torch.zeros_like(tensors[0])] * (padded - len(tensors)), out=stack)

    def step() -> None:
        for shape, names in groups.items():
            padded = -(-len(names) // args.ranks) * args.ranks
            mine = slice(0, padded // args.ranks)  # of rank 0
            grad = stacked("gradients", [grads[name] for name in names], padded)
            shard_grad = torch.empty_like(grad[mine])
            passes.watch("gradients", shard_grad)
            comm.reduce_scatter(shard_grad, grad, None).wait()
            shard = stacked("parameters", [params[name].detach() for name in names[mine]], padded // args.ranks)
            rule = train_gpt.Adam(LR, 0.9, 0.999, 1e-8, every=1)
            state = moments.setdefault(shape, rule.init_state(shard.view(-1)))
            rule.update(shard.view(-1), shard_grad.view(-1), state, rule.hyper(PLAN, 1))
            gathered = torch.empty_like(grad)
            passes.watch("parameters", gathered)
            comm.all_gather(gathered, shard).wait()
            for name, new in zip(names, gathered):
                params[name].copy_(new)
    return step


def count(make: Callable[..., Callable[[], None]], args: argparse.Namespace, comm: FakeComm) -> dict[tuple[str, str], float]:
    """Count the passes of the second step; the first one sets the launch order."""
    passes = Passes()
    with torch.no_grad():
        step = make(args, comm, passes)
        step()
        with passes:
            step()
    size = sum(p.numel() * p.element_size() for p in model_and_grads(args)[0].parameters())
    return {key: nbytes / size for key, nbytes in passes.count.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=positive, default=8)
    parser.add_argument("--layers", type=positive, default=12)
    parser.add_argument("--dim", type=positive, default=256)
    parser.add_argument("--vocab", type=positive, default=1024)
    parser.add_argument("--bucket_mb", type=float, default=8.0)
    args = parser.parse_args()
    comm = FakeComm(args.ranks)
    columns = [(kind, how) for kind in ("gradients", "parameters") for how in ("read", "written")]
    rows = []
    for name, make in (("buckets", buckets), ("stack-and-copy", stack_and_copy)):
        counted = count(make, args, comm)
        passes = [counted[column] for column in columns]
        rows.append([name, *(f"{x:.2f}" for x in passes), f"{sum(passes):.2f}"])
    dist.destroy_process_group()
    print(f"{machine()}; rank 0 of {args.ranks}\n")
    print(table(["passes a step", *(" ".join(column) for column in columns), "all"], rows))


if __name__ == "__main__":
    run(main)
