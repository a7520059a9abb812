"""Train any nn.Module by the sharded NorMuon and Adam of the speedrun: call make_optimizer(model).

engine.py is train_gpt.py, which trains one model by one loop. Other models and loops also need a
table of rules by parameter names, torch.optim's interface, and checks of their use.
docs/gradient-sync.md of the repository explains all.
"""

from __future__ import annotations

import collections.abc
import contextlib
import copy
import dataclasses
import functools
import glob
import itertools
import math
import os
import re
import sys
import warnings
import weakref
from fnmatch import fnmatchcase
from typing import Any, Callable, Iterator, NamedTuple, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

from . import engine
from .engine import (
    Adam,
    Bucket,
    Comm,
    Config,
    DistributedOptimizer,
    NorMuon,
    ParamSpec,
    Plan,
    RowBucket,
    RunError,
    Slot,
    Tensors,
    agree,
    env_int,
    finish_spec,
    memory_of,
    named_tensors,
    option,
    out_of_range,
)


class UsageError(RunError):
    """An error in the use of this package. Its text says where the uses are described."""

    def __str__(self) -> str:
        return f"{super().__str__()}. {PAGE}"


PAGE = (
    "See docs/gradient-sync.md#as-in-torchoptim-and-ddp and, for accelerate, Trainer and Lightning,"
    " #with-frameworks there"
)


def require(condition: Any, message: str) -> None:
    if not condition:
        raise UsageError(message)


@dataclasses.dataclass(frozen=True)
class SyncSettings(engine.SyncSettings):
    """How ranks exchange gradients and parameters; find_unused_parameters is as in DDP."""

    find_unused_parameters: bool = option(
        False, "allow parameters without a gradient, which stay unchanged"
    )


# --------------------------------------------------------------------------------------------------
# assignment


class Assignment(NamedTuple):
    """A pattern of parameter names and the rule of these parameters; see ParamSpec for the rest."""

    pattern: str
    rule: Adam | NorMuon
    unit: tuple[int, int] | None = None
    scale: float = 1.0
    first_step: int = 0


def make_optimizer(
    model: nn.Module,
    table: Sequence[Assignment] = (),
    bucket_mb: float = Config.bucket_mb,
    settings: SyncSettings = SyncSettings(),
    muon_lr: float = NorMuon.lr,
    adam_lr: float = Adam.lr,
    process_group: Any = None,
) -> Optimizer:
    """Build a model's optimizer.

    table: replaces lines of default_assignments. process_group: its ranks; None: all.
    """
    require(
        isinstance(model, nn.Module),
        f"make_optimizer got a {type(model).__name__}; give it the model itself, "
        "since rules are chosen by parameter names and kinds of modules",
    )
    require(
        not isinstance(model, torch.jit.ScriptModule),
        "the model is a ScriptModule; give the module it is made of",
    )
    ranks = 0, 1
    if dist.is_initialized():
        ranks = dist.get_rank(process_group), dist.get_world_size(process_group)
    require(
        ranks[0] >= 0,
        "this rank is not in process_group; call make_optimizer on the group's ranks only",
    )
    check_model(model, ranks[1])
    specs = assign(model, default_assignments(model, table, muon_lr, adam_lr))
    require(
        specs,
        "every parameter of this model is frozen; set requires_grad on the ones to be trained",
    )
    buckets = fill_buckets(specs, bucket_mb * 2**20, *ranks)
    return Optimizer(
        buckets, Comm(*ranks, specs[0].param.device, group=process_group), settings, model
    )


def fill_buckets(
    specs: Sequence[ParamSpec], bucket_bytes: float, rank: int, ranks: int
) -> list[Bucket]:
    """Check parameters and rules, and fill buckets. RunError if no bucket can take one."""
    for spec in reversed(specs):  # as buckets are filled
        check_spec(spec)
        require(
            spec.param.device == specs[0].param.device,
            f"{spec.name} is on {spec.param.device}, {specs[0].name} "
            f"is on {specs[0].param.device}; move the model to one device first",
        )
    return engine.fill_buckets(specs, bucket_bytes, rank, ranks)


def assign(model: nn.Module, table: Sequence[Assignment]) -> list[ParamSpec]:
    """Assign each parameter that is not frozen its rule by name. RunError unless one line does."""
    specs = []
    unclear = collections.defaultdict(list)  # names by what is unclear
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        lines = [line for line in table if fnmatchcase(name, line.pattern)]
        require(
            len(lines) == 1,
            f"{name}: {len(lines)} lines of the table match it ({', '.join(x[0] for x in lines)}),"
            " but one must;"
            f" {'narrow the pattern of the others' if lines else 'add a line for it'}",
        )
        spec = ParamSpec(name, param, *lines[0][1:])
        what = what_is_unclear(spec, owner_of(model, name))
        if what:
            unclear[what].append(name)
        else:
            specs.append(finish_spec(spec))
    parts = []
    for what, names in unclear.items():
        x = re.sub(r"(?<![^.])\d+(?![^.])", "*", names[0])  # for all blocks of a model
        matched = [name for name, _ in model.named_parameters() if fnmatchcase(name, x)]
        parts.append(
            f"{', '.join(names)} {what.replace('NAME', repr(x if names == matched else names[0]))}"
        )
    require(not parts, "; ".join(parts))
    return specs


def owner_of(model: nn.Module, name: str) -> nn.Module:
    """Return the module that has the parameter, also under a parametrization."""
    owner, _, parametrized = f".{name}".partition(".parametrizations.")
    return model.get_submodule(owner[1:] if parametrized else name.rpartition(".")[0])


# torch's layers whose matrices are known, [out, in]
MATRICES = nn.Linear | nn.modules.conv._ConvNd | nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention


def default_assignments(
    model: nn.Module,
    table: Sequence[Assignment] = (),
    muon_lr: float = NorMuon.lr,
    adam_lr: float = Adam.lr,
) -> list[Assignment]:
    """Add a line to the table for each parameter that it does not match.

    Matrices inside the model get NorMuon. Embeddings, the last matrix (the head), norms and vectors
    get Adam. Fused ones of torch's recurrent layers, attention and grouped convolutions are split.
    What may be several matrices or none gets no rule. Raise RunError for a line that is no
    Assignment, or that matches no parameter.
    """
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    lines = [Assignment(*line) for line in table]
    for line in lines:
        require(
            any(fnmatchcase(name, line.pattern) for name in learned),
            f"{line.pattern} matches no parameter that is not frozen; see model.named_parameters()",
        )
    embeddings = set()
    units = {}  # of fused matrices
    head = None
    for module in model.modules():
        matrices = [p for p in module.parameters(recurse=False) if p.dim() > 1]
        head = matrices[-1] if matrices else head  # a tied head is an embedding
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            embeddings.update(matrices)
        if isinstance(module, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention):
            height = getattr(module, "embed_dim", None) or module.hidden_size
            units |= {p: (height, p.shape[1]) for p in matrices if p.shape[0] > height}
    for name, p in learned.items():
        if any(fnmatchcase(name, line.pattern) for line in lines):
            continue
        module = owner_of(model, name)
        rule = None
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and p.dim() > 2:
            units[p] = (p.shape[0] // module.groups, p.shape[1:].numel())
        vector = p.dim() < 2 or not 1 < p.shape[0] < p.numel() or units.get(p, p.shape)[0] < 2
        if vector or p is head or p in embeddings or isinstance(module, nn.LayerNorm | nn.RMSNorm):
            rule = Adam(adam_lr)
        elif (
            isinstance(module, MATRICES) or p.dim() == 2 and re.search(r"weight$|lora", name, re.I)
        ):
            rule = NorMuon(muon_lr, polar_dtype=torch.bfloat16 if p.is_cuda else torch.float32)
        lines.append(Assignment(glob.escape(name), rule, units.get(p)))
    return lines


# --------------------------------------------------------------------------------------------------
# gradients


def uncompiled(function: Callable) -> Callable:
    """Have a function run as it is inside of a compiled one.

    The compiler is imported only if the program did so.
    """

    @functools.wraps(function)
    def call(*args: Any, **more: Any) -> Any:
        if "torch._dynamo" in sys.modules and not hasattr(function, "as_it_is"):
            function.as_it_is = torch._dynamo.disable(function)
        return getattr(function, "as_it_is", function)(*args, **more)

    return call


# parameter -> handle of its hook, weak reference to its reducer; an attribute of the parameter
# would be pickled
HOOKS = WeakIdKeyDictionary()


def clip(
    original: Callable, parameters: Sequence[nn.Parameter], max_norm: float, *args: Any
) -> None:
    """Do what the end of torch's clip_grad_norm_ does, and warn where it changes nothing."""
    reducers = [HOOKS[p][1]() for p in parameters if p in HOOKS and p.grad is None]
    if max_norm < math.inf and any(x and not x.settings.clip_norm for x in reducers):
        warnings.warn(
            "clip_grad_norm_ changes nothing, since .grad is None; make_optimizer(model, settings="
            f"SyncSettings(clip_norm=...)) clips. {PAGE}",
            stacklevel=4,
        )
    original(parameters, max_norm, *args)


clip_grad._clip_grads_with_norm_ = functools.partial(clip, clip_grad._clip_grads_with_norm_)

REDUCERS = weakref.WeakSet()  # all that exist


@uncompiled
def zero_grad(module: nn.Module, original: Callable, set_to_none: bool = True) -> None:
    """Do what a module's zero_grad() does, and drop the gradients in its buckets."""
    for reducer in [x for x in REDUCERS if x.in_step]:
        own = reducer.slots.keys() & {*module.parameters()}
        require(
            len(own) in (0, len(reducer.slots)),
            "zero_grad() of a part of the model cannot drop its gradients alone; call the"
            " optimizer's, which drops all, or build an optimizer for each part",
        )
        if own:
            reducer.optimizer().zero_grad()
    original(module, set_to_none)


nn.Module.zero_grad = functools.partialmethod(zero_grad, nn.Module.zero_grad)


class Reducer(engine.Reducer):
    """Without prepare_for_backward, the one backward outside of no_sync completes the step.

    Earlier ones run inside.
    """

    CURE = (
        "use each in the loss, or set find_unused_parameters; if they were frozen after the"
        " optimizer was built, build it again"
    )
    ONCE = (
        "run all but the last of a step in no_sync(), and a checkpoint inside of one with"
        " use_reentrant=False. To use another optimizer, call this one's"
        " remove_hooks()"
    )
    optimizer_ids = collections.defaultdict(itertools.count)  # by group

    def __init__(
        self, buckets: Sequence[Bucket], comm: Comm, settings: SyncSettings, grad_scale: float
    ):
        self.in_no_sync = False
        self.in_step = False  # a gradient or rows have come since the last step
        self.drops = 0  # calls of zero_grad() that dropped gradients
        # gradients that this step added in no_sync
        self.no_sync_grads = collections.Counter()
        self.optimizer_id = (
            next(self.optimizer_ids[getattr(comm.group, "group_name", "")]) if comm.ranks > 1 else 0
        )
        self.call = None  # handle of the exchange of `calls`
        self.compared = False  # step() is compared already
        self.unused = set()  # slots of parameters that no rank has used since their last update
        self.hooks = {}  # handles, by parameter
        self.optimizer = lambda: None  # weak reference
        super().__init__(buckets, comm, settings, grad_scale)
        REDUCERS.add(self)
        # to parameters: this optimizer's, and those before the last step
        self.known_writes = sum([p._version for p in self.slots])

    def set_hook(self, param: nn.Parameter) -> None:
        """Set the parameter's hook in place of an earlier optimizer's."""
        if param in HOOKS:
            HOOKS[param][0].remove()
        self.hooks[param] = super().set_hook(param)
        HOOKS[param] = self.hooks[param], weakref.ref(self)

    def announce_rows(self, step: int, indices: dict[nn.Parameter, Tensor]) -> None:
        self.in_step = True
        for bucket in self.buckets:
            require(
                getattr(bucket, "announcement", None) is None,
                f"rows of {bucket.slots[0].name} were announced "
                "twice in one step; announce the rows of all micro-batches at once",
            )
        super().announce_rows(step, indices)

    def prepare_for_backward(
        self,
        step: int | Tensor,
        micro_batch: int = 0,
        micro_batches: int = 1,
        loss: Tensor | None = None,
    ) -> None:
        """Do as the engine's. With a loss (alone: the last), do not wait for unused parameters."""
        if isinstance(step, Tensor):
            if self.in_no_sync:
                return
            step, loss = self.step, step
        if not (getattr(loss, "requires_grad", loss is None) and step >= 0 < micro_batches):
            raise UsageError(  # the text of a loss on a GPU would make the host wait
                f"prepare_for_backward got {step!r}, {micro_batch}, {micro_batches}, {loss!r}; give"
                " it the loss that backward starts from, or (step, micro_batch, micro_batches,"
                " loss)"
            )
        require(
            not self.micro_batches or self.micro_batch < self.micro_batches,
            f"all {self.micro_batches} micro-batches of step {self.step} were prepared; call"
            " step()",
        )
        super().prepare_for_backward(step, micro_batch, micro_batches)
        self.in_step = True  # so that zero_grad() drops this step if its backward fails
        if self.due and loss is not None and self.settings.find_unused_parameters:
            used = used_parameters(loss)
            for bucket in self.due:
                bucket.missing = {slot for slot in bucket.slots if slot.param in used}

    @uncompiled
    def register_grad_ready(self, bucket: Bucket, slot: Slot) -> None:
        if slot.param.grad is None:  # a Function returned None
            return
        require(
            bucket.reduce_handle is None,
            f"{slot.name} got a gradient after its bucket {bucket.name} was"
            f" launched; call step() before the next backward, or {self.ONCE}",
        )
        # if not begun, the engine refuses the gradient
        self.in_step = True
        begun = self.step >= bucket.first_step
        if slot.param.grad.requires_grad:
            slot.param.grad = None  # the buffer would hold the graphs of all steps
            raise UsageError(
                f"{slot.name} got a gradient with a graph of its own, which no rule uses; call"
                " backward() without create_graph=True"
            )
        if begun and not self.micro_batches:
            if self.in_no_sync:
                bucket.add_grad(slot, self.grad_scale / self.comm.ranks)
                self.no_sync_grads[slot] += 1
                return
            self.prepare_for_backward(self.step)
        require(
            not begun or slot in bucket.missing,
            f"{slot.name} got its gradient twice in one backward; prepare"
            f" each backward separately, with the loss that it starts from, or {self.ONCE}",
        )
        super().register_grad_ready(bucket, slot)

    def launch(self, bucket: Bucket) -> None:
        if not self.launches and self.call is None and not self.compared:
            self.start_call("step()")
        # with fewer the tree, and with it the sum, would depend on the ranks
        expected = self.backward_passes()
        for slot in bucket.slots if bucket.invariant else ():
            require(
                len(slot.pending_grads) >= expected,
                f"{slot.name} got a gradient in {len(slot.pending_grads)} of "
                f"{expected} micro-batches; use it in all, or omit world_size_invariant",
            )
        super().launch(bucket)

    def backward_passes(self) -> int:
        """Count this step's backward passes; in no_sync, the most gradients of a parameter."""
        return max(self.no_sync_grads.values(), default=0) + self.micro_batches

    def launch_rest(self) -> None:
        for bucket in self.buckets:
            check_views(bucket, self)
        require(
            0 < self.micro_batches <= self.micro_batch,
            f"step() after {self.micro_batch} of {self.micro_batches} micro-batches; run the last"
            " backward outside no_sync(), and prepare_for_backward before all or none",
        )
        for bucket in self.due:
            if self.settings.find_unused_parameters:
                bucket.missing.clear()
            self.check_complete(bucket)  # before the ranks compare their calls
        is_first_step = not self.launch_orders
        wrote_alike = self.check_call("step()")
        self.compared = True
        super().launch_rest()
        if is_first_step or not wrote_alike:
            self.optimizer().check_replicas()
        if self.settings.find_unused_parameters:
            used = {
                slot: slot not in bucket.needs_overwrite
                for bucket in self.due
                for slot in bucket.slots
            }
            counts = self.comm.all_reduce(
                torch.tensor([*used.values()], dtype=torch.float32, device=self.comm.device)
            )
            self.unused = {slot for slot, count in zip(used, counts.tolist()) if not count}

    def start_call(self, name: str) -> None:
        """Start to send all ranks a digest of this rank's call, before its first other message.

        Second number: a checksum of the parameters if the program wrote to one, else 0.
        """
        require(
            name == "step()" or not self.due or self.compared or self.comm.ranks == 1,
            f"{name} was called between backward and step(), while gradients are sent; call it"
            " after step(), or after zero_grad(), which drops them",
        )
        repeated = name == "step()" and self.launch_order
        if self.comm.ranks == 1 or repeated and not self.comm.point_to_point:
            return  # on a GPU the host would wait in every step
        self.own_call = {
            "called": name,
            "optimizer": self.optimizer_id,
            "zero_grad() of gradients": self.drops,
            "step": self.step,
            # with unused parameters they may differ
            "backwards": 0 if self.settings.find_unused_parameters else self.backward_passes(),
            "values in buffers": sum(x.numel() for x in self.optimizer().buffers().values()),
        }
        checksum = 0
        writes = sum([p._version for p in self.slots])
        if name == "step()" and writes != self.known_writes:
            self.known_writes = writes
            self.optimizer().finish_all_gathers()
            checksum = engine.checksum(*self.slots)
        digest = int(engine.sha256_of(repr(self.own_call).encode())[:15], 16)
        self.calls = torch.tensor([(digest, checksum)] * self.comm.ranks)
        self.call = self.comm.exchange([self.calls[self.comm.rank]] * self.comm.ranks, self.calls)

    def check_call(self, name: str) -> bool:
        """Raise RunError on all ranks if their calls differ. Return whether all wrote alike."""
        if self.call is None or name != "step()":
            self.start_call(name)
        if self.call is None:
            return True
        self.call.wait()
        self.call = None
        digests, checksums = self.calls.T.tolist()
        if len({*digests}) > 1:
            agree(
                self.comm,
                "calls",
                self.own_call,
                "Run as many backward passes, also in no_sync(), resize buffers alike, and make"
                " each call on all ranks or none, in one order",
            )
        return len({*checksums}) == 1

    def end_step(self) -> None:
        super().end_step()
        self.in_step = self.compared = False
        self.no_sync_grads.clear()

    def drop_gradients(self) -> None:
        if self.call is not None:  # its messages are under way
            self.check_call("step()")
        super().drop_gradients()


def used_parameters(loss: Tensor) -> set[nn.Parameter]:
    """Return the leaves of a loss's autograd graph: the parameters that will get a gradient."""
    seen = set()
    open_nodes = [loss.grad_fn]
    while open_nodes:
        node = open_nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            open_nodes += [further for further, _ in node.next_functions]
    return {getattr(node, "variable", None) for node in seen}


# --------------------------------------------------------------------------------------------------
# optimizer


class Optimizer(DistributedOptimizer, torch.optim.Optimizer):
    """The engine's optimizer as a torch optimizer: call `backward()` and `step()`.

    As in DDP, gradients are averaged over ranks, and summed over the backwards of a step; run all
    but the last of these in `no_sync()`. param_groups has one group for each rule and learning
    rate: set its "lr", or use a torch scheduler. Since .grad is always None, clip by
    settings.clip_norm. `state` is empty; state_dict() holds the moments.

    A saved state has the engine's names and, for each parameter, NAME/lr, NAME/initial_lr (a
    scheduler's), NAME/step, the number of the next step, and NAME/skipped, of updates of its
    bucket, if there are any.
    """

    reducer_class = Reducer

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Comm,
        settings: SyncSettings,
        model: nn.Module,
        grad_scale: float = 1.0,
    ):
        require(
            isinstance(settings, SyncSettings),
            f"settings is a {type(settings).__name__}, not SyncSettings(...)",
        )
        for f in dataclasses.fields(settings):
            wrong = out_of_range(f, getattr(settings, f.name))
            require(not wrong, wrong)
        require(
            not (
                settings.world_size_invariant
                and (settings.find_unused_parameters or settings.clip_norm)
            ),
            "world-size-invariant mode excludes find_unused_parameters and clip_norm, whose sums"
            " depend on ranks",
        )
        # not SLURM_NTASKS: a batch script has it too
        sizes = "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"
        name = next((name for name in sizes if name in os.environ), sizes[0])
        require(
            env_int(name, 1) <= 1 or comm.ranks > 1 or dist.is_initialized(),
            f"{name} in the environment is {os.environ.get(name)}, but no process group exists, so"
            " each rank would train alone; start by torchrun and call init_process_group() first,"
            " or set WORLD_SIZE=1 if each is to train alone",
        )
        self.model = model
        self.bucket_params = {slot.param for bucket in buckets for slot in bucket.slots}
        self.buffer_count = check_all_in_buckets(model, self.bucket_params)
        self.skipped = collections.Counter()  # updates, by slot
        self.forward_hooks = []  # handles
        self.versions = {}  # how often parameters whose gather runs were written
        groups = {}
        for bucket in buckets:
            kind = {"rule": type(bucket.rule).__name__, "lr": bucket.rule.lr}
            group = groups.setdefault(tuple(kind.values()), {**kind, "params": []})
            group["params"] += [slot.param for slot in bucket.slots]
        torch.optim.Optimizer.__init__(self, groups.values(), {})
        self.groups_seen = self.copy_groups()
        # otherwise different buckets would be summed with one another
        agree(
            comm,
            "models or settings",
            {
                "gradient scale": grad_scale,
                **vars(settings),
                **{
                    f"bucket {bucket.name}": (
                        f"of {bucket.param_data.dtype}, gradients of {bucket.grad_data.dtype},"
                        f" {bucket.rule},"
                        f" {[(slot.name, *slot.param.shape) for slot in bucket.slots]}"
                    )
                    for bucket in buckets
                },
            },
            "Build the same model from the same config on every rank",
        )
        super().__init__(buckets, comm, settings, model, grad_scale)
        self.reducer.optimizer = weakref.ref(self)
        give_storages(buckets)
        self.find_buffers()
        self.guarded = list(model.modules()) if settings.overlap_param_gather else []
        for module in self.guarded:
            module.__dict__["_parameters"] = AwaitedParameters(module._parameters, self)

    def replicate(self, model: nn.Module) -> None:
        """Give every rank the parameters of rank 0, frozen ones too, and its buffers."""
        for _, x in named_tensors(model):
            if is_plain(x):
                broadcast(self.comm, x.data)

    def wait_before(self, module: nn.Module, buckets: Sequence[Bucket]) -> None:
        """Do as the engine's. The hook keeps neither the optimizer nor its buckets alive."""
        me = weakref.ref(self)
        params = [bucket.slots[0].param for bucket in buckets]

        def wait(*_: Any) -> None:
            optimizer = me()
            if optimizer is not None:
                optimizer.wait_for(*params)

        self.forward_hooks.append(module.register_forward_pre_hook(ForwardHook(wait)))

    def __reduce_ex__(self, protocol: Any):
        raise UsageError(
            "an optimizer cannot be copied or pickled, since it has hooks on its model; copy the"
            " model, and save state_dict()"
        )

    @property
    def _step_supports_amp_scaling(self):
        raise UsageError(
            "GradScaler cannot be used: it reads .grad, which is None; train in bfloat16 without a"
            " scaler"
        )

    def add_param_group(self, group: dict[str, Any]) -> None:
        require(
            not hasattr(self, "reducer"),
            "buckets cannot take a further parameter; build the optimizer with all",
        )
        # torch's own method would import its compiler, which takes over a second
        self.param_groups.append(group)

    def refuse_hook(self, *_: Any, **more: Any) -> None:
        raise UsageError(
            "hooks of states are never called; edit what state_dict() returns, and what"
            " load_state_dict() is given"
        )

    register_state_dict_pre_hook = register_state_dict_post_hook = refuse_hook
    register_load_state_dict_pre_hook = register_load_state_dict_post_hook = refuse_hook

    def remove_hooks(self) -> None:
        """Remove the hooks: gradients stay in .grad again, unless a later optimizer set its own."""
        for hook in (*self.forward_hooks, *self.reducer.hooks.values()):
            hook.remove()
        self.finish_all_gathers()
        for module in self.guarded:
            if getattr(module._parameters, "optimizer", lambda: None)() is self:
                module.__dict__["_parameters"] = dict(module._parameters)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Only accumulate gradients: for all but the last backward, as many on each rank."""
        self.reducer.in_no_sync = True
        try:
            yield
        finally:
            self.reducer.in_no_sync = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of an unfinished step, on all ranks. Needless after step()."""
        if self.reducer.in_step:
            self.reducer.drops += 1
            self.reducer.drop_gradients()

    @uncompiled
    def step(self, closure: Callable[[], Any] | Plan | None = None) -> Any:
        """Update the parameters. closure: run first; it calls backward and returns the loss."""
        plan = closure if isinstance(closure, Plan) else Plan()
        with torch.enable_grad():
            loss = None if closure in (None, plan) else closure()
        count = check_all_in_buckets(self.model, self.bucket_params)
        if count != self.buffer_count:
            self.buffer_count = count
            self.find_buffers()
        if self.copy_groups() != self.groups_seen:
            self.apply_groups()
        super().step(plan)
        self.versions = {
            bucket: [slot.param._version for slot in bucket.slots]
            for bucket in self.buckets
            if bucket.gather_handle is not None
        }
        return loss

    def find_buffers(self) -> None:
        """Find the model's persistent buffers; their tensors may be replaced later."""
        self.buffers = engine.persistent_buffers(self.model, is_plain)

    def sync_buffers(self) -> None:
        broadcast(self.comm, *self.buffers().values())

    def update(self, bucket: Bucket, plan: Plan) -> None:
        """Do as the engine's, but keep unused parameters, their state and numbers of updates."""
        used = [slot for slot in bucket.slots if slot not in self.reducer.unused]
        self.skipped.update(self.reducer.unused.intersection(bucket.slots))
        parts = [bucket]
        if not self.skipped.keys().isdisjoint(bucket.slots):
            parts = [part_of(bucket, slot, self.skipped[slot]) for slot in used]
        for part in parts:
            if len(part.param_shard):
                super().update(part, plan)
        # the next line makes backward refuse a graph of the old values
        self.reducer.known_writes += len(used)
        torch.autograd.graph.increment_version([slot.param for slot in used])

    def finish_all_gathers(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Do as the engine's. Raise RunError if the program wrote to a parameter meanwhile."""
        require(
            not torch.jit.is_tracing(),
            "a traced module cannot wait for all-gathers; trace copy.deepcopy(model)",
        )
        waiting = [
            b for b in (self.buckets if buckets is None else buckets) if b.gather_handle is not None
        ]
        super().finish_all_gathers(waiting)
        for bucket in () if torch.compiler.is_compiling() else waiting:
            for slot, version in zip(bucket.slots, self.versions.get(bucket, ())):
                require(
                    slot.param._version == version,
                    f"{slot.name} was changed after step() and before its new value was there; call"
                    " optimizer.finish_all_gathers() first, or omit overlap_param_gather",
                )

    def group_of(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Map each parameter to its group in param_groups, whose groups may be replaced."""
        groups = {param: group for group in self.param_groups for param in group["params"]}
        missing = [slot.name for _, slot in self.reducer.slots.values() if slot.param not in groups]
        require(
            not missing,
            f"param_groups has no {', '.join(missing)} any more; put them back, and freeze by lr 0",
        )
        return groups

    SETTINGS_OF_TORCH = set(
        "betas eps weight_decay momentum nesterov dampening amsgrad maximize".split()
    )

    def apply_groups(self) -> None:
        """Give the rules the values in param_groups. RunError if one cannot be changed."""
        groups = self.group_of()
        for bucket in self.buckets:
            group = groups[bucket.slots[0].param]
            rule = bucket.rule
            common = {**group, "params": ()}
            apart = [
                slot.name for slot in bucket.slots if {**groups[slot.param], "params": ()} != common
            ]
            require(
                not apart,
                f"{', '.join(apart)} and {bucket.slots[0].name} share a bucket, but their groups in"
                " param_groups differ; give them one group, or build the optimizer by bucket_mb=0",
            )
            members = vars(rule)
            values = {
                key: x for key, x in members.items() if key != "every" and type(x) in (int, float)
            }
            for key in group.keys() & (members.keys() | self.SETTINGS_OF_TORCH):
                require(
                    key in values and math.isfinite(group[key]),
                    f"{type(rule).__name__} cannot use {key}={group[key]!r} of param_groups; a"
                    f" group can change {', '.join(sorted(values))}, to numbers",
                )
                values[key] = float(group[key])
            bucket.rule = dataclasses.replace(rule, **values)
            check_rule("param_groups", bucket.rule)
        self.groups_seen = self.copy_groups()

    def copy_groups(self) -> list[dict[str, Any]]:
        """Copy param_groups, so that an edit shows."""
        copies = []
        for group in self.param_groups:
            numbers = {key: x.tolist() if isinstance(x, Tensor) else x for key, x in group.items()}
            copies.append(numbers | {"params": [*map(id, group["params"])]})
        return copies

    def named_state(self) -> Iterator[tuple[str, Tensor]]:
        self.reducer.check_call("state_dict()")
        yield from super().named_state()

    def state_hash(self) -> str:
        """Compute the SHA-256 of the engine's state. Call it on all ranks."""
        return engine.hash_of([*self.named_state()])

    def state_dict(self) -> Tensors:
        self.find_buffers()
        state = super().state_dict()
        for param, group in self.group_of().items():
            slot = self.reducer.slots[param][1]
            state |= {
                f"{slot.name}/{key}": torch.tensor(float(group[key]), dtype=torch.float64)
                for key in ("lr", "initial_lr")
                if key in group
            }
            state[f"{slot.name}/step"] = torch.tensor(self.reducer.step)
            # of all parameters: torch.distributed.checkpoint loads what a new optimizer names
            if self.settings.find_unused_parameters or slot in self.skipped:
                state[f"{slot.name}/skipped"] = torch.tensor(self.skipped[slot])
        return state

    def load_state_dict(self, state: Tensors) -> None:
        """Load a state_dict, alike on all ranks; drop gradients. RunError if it does not fit."""
        items = state.items() if isinstance(state, collections.abc.Mapping) else [("it", state)]
        for name, x in items:
            require(
                isinstance(x, Tensor) and x.dim() < 2,
                f"the saved state does not fit: {name} is a {type(x).__name__}"
                f" {[*getattr(x, 'shape', ())]}, not a vector; load what state_dict() returned",
            )
        self.find_buffers()
        state = self.by_own_names(state)
        steps = []
        rates = {}
        skipped = collections.Counter()
        groups = self.group_of()
        for param, (_, slot) in self.reducer.slots.items():
            skipped[slot] = int(state.pop(f"{slot.name}/skipped", 0))
            steps.append(int(state.pop(f"{slot.name}/step", -1)))
            rates[param] = {
                key: float(state.pop(f"{slot.name}/{key}"))
                for key in ("lr", "initial_lr")
                if f"{slot.name}/{key}" in state
            }
        self.reducer.drop_gradients()
        self.reducer.check_call("load_state_dict()")
        super().load_state_dict(state)
        torch.autograd.graph.increment_version(list(self.reducer.slots))
        self.reducer.known_writes += len(self.reducer.slots)
        self.skipped = +skipped
        for param, values in rates.items():
            groups[param].update(values)
        if -1 in steps:  # states of older versions have no numbers of steps
            steps += [bucket.updates * bucket.rule.every for bucket in self.buckets]
        self.reducer.step = max(steps)
        self.check_replicas()

    def by_own_names(self, state: Tensors) -> Tensors:
        """Give a state this model's names. torch.compile(model) and DDP put words into names."""
        names = [*(slot.name for _, slot in self.reducer.slots.values()), *self.buffers()]
        words = re.compile(r"^module\.|\b_orig_mod\.")
        own_names = {words.sub("", name): name for name in names}
        renamed = {}
        for key, x in state.items():
            name, slash, member = key.partition("/")
            renamed[own_names.get(words.sub("", name), name) + slash + member] = x
        return renamed

    def check_replicas(self) -> None:
        """Raise RunError on all ranks unless they have the same parameters. Call it on all."""
        self.finish_all_gathers()
        self.reducer.check_call("check_replicas()")
        if self.comm.ranks > 1:
            agree(
                self.comm,
                "parameters",
                {
                    slot.name: f"with the checksum {engine.checksum(param)}"
                    for param, (_, slot) in self.reducer.slots.items()
                },
                "Change and load parameters after make_optimizer on all ranks alike",
            )


class AwaitedParameters(dict):
    """A module's dict of parameters. Reading one first waits for the all-gather of its bucket."""

    def __init__(self, params: dict[str, nn.Parameter | None], optimizer: DistributedOptimizer):
        super().__init__(params.items())
        self.optimizer = weakref.ref(optimizer)

    def __getitem__(self, name: str) -> nn.Parameter | None:
        param = super().__getitem__(name)
        optimizer = None if torch.compiler.is_compiling() else self.optimizer()
        if optimizer is not None:
            optimizer.wait_for(param)
        return param

    items = collections.abc.Mapping.items
    values = collections.abc.Mapping.values
    get = collections.abc.Mapping.get

    def __reduce__(self) -> tuple:  # a copy of the model has plain ones
        return dict, ([*self.items()],)


class ForwardHook(functools.partial):
    """A hook before a forward whose copy, in a copy of the model, returns its input."""

    def __reduce__(self) -> tuple:
        return getattr, ({}, "get")


def give_storages(buckets: Sequence[Bucket]) -> None:
    """Give each parameter its own storage: libraries that save take a common one for a tie."""
    for bucket in buckets:
        data = bucket.param_data
        for slot in bucket.slots:
            if not slot.param.is_meta:
                # torch.compile expects a storage at 16 bytes
                before = slot.offset % max(1, 16 // data.element_size())
                end = slot.offset + slot.param.numel()
                storage = torch.from_dlpack(data[slot.offset - before : end])
                slot.param.data = storage[before:].view(slot.param.shape)


def part_of(bucket: Bucket, slot: Slot, skipped: int) -> Bucket:
    """View this rank's part of one parameter as a bucket, with its own number of updates."""
    part = copy.copy(bucket)
    unit = bucket.param_shard[0].numel()
    begin, end = (
        min(max(x - bucket.shard_begin, 0), bucket.shard_numel)
        for x in (slot.offset, slot.offset + slot.param.numel())
    )
    rows = slice(begin // unit, end // unit)
    part.slots = [slot]
    part.updates = bucket.updates - skipped
    part.shard_begin = bucket.shard_begin + begin
    part.shard_numel = end - begin
    part.param_shard = bucket.param_shard[rows]
    part.state = {key: x[rows] for key, x in bucket.state.items()}
    part.scale = bucket.scale[rows]  # of matrices; other rules ignore it
    grad_rows = rows
    if isinstance(bucket, RowBucket) and bucket.rule.lazy:
        grad_rows = (bucket.grad_indices >= rows.start) & (bucket.grad_indices < rows.stop)
        part.grad_indices = bucket.grad_indices[grad_rows] - rows.start
    part.grad_shard = bucket.grad_shard[grad_rows]
    return part


def is_plain(x: Tensor | None) -> bool:
    """Whether a tensor has memory that can be sent: not made of others, sparse or quantized."""
    if x is None or x.is_quantized:
        return False
    return x.layout == torch.strided and not hasattr(x, "__tensor_flatten__")


def broadcast(comm: Comm, *tensors: Tensor) -> None:
    """Copy rank 0's tensors to all ranks in one message.

    They may have several dtypes, and be slices or expanded.
    """
    if comm.ranks > 1 and tensors:
        values = [memory_of(x) for x in tensors]
        in_bytes = [
            x.clone(memory_format=torch.contiguous_format)
            .view(-1)
            .view(torch.uint8)
            .to(comm.device)
            for x in values
        ]
        packed = torch.cat(in_bytes)
        comm.broadcast(packed)
        for x, part in zip(values, packed.split([*map(len, in_bytes)])):
            x.copy_(part.clone().view(x.dtype).view(x.shape))  # a clone is aligned


# --------------------------------------------------------------------------------------------------
# checks: refuse each use that would train wrongly


def check_model(model: nn.Module, ranks: int) -> None:
    """Raise RunError for parameters that are no plain tensors, or that share memory."""
    for name, module in model.named_modules():
        require(
            type(module).__name__ != "FullyShardedDataParallel",
            "the model is sharded by FSDP; build the "
            "optimizer of the plain model, which it shards itself",
        )
        require(
            ranks == 1 or getattr(module, "max_norm", None) is None,
            f"{name} has max_norm, by which each rank "
            "changes the rows that it reads; omit it, and clip the rows after step()",
        )
    holders = collections.defaultdict(list)  # storage -> (name, tensor) in it
    for name, x in named_tensors(model):
        require(
            is_plain(x) or not x.requires_grad,
            f"{name} is a {type(x).__name__}; build the optimizer of "
            "plain tensors, before FSDP2, tensor parallelism or quantization",
        )
        require(
            x.layout == torch.strided or not dist.is_initialized(),
            f"{name} has layout {x.layout}; make it dense, since all ranks get rank 0's",
        )
        if is_plain(x) and x.numel() and not x.is_meta:
            require(
                not (x.requires_grad and x.device.type == "cpu" and x.is_shared()),
                f"{name} is in memory shared with other processes, which would keep its old"
                " values; give copy.deepcopy(model), and send its state_dict() to them",
            )
            holders[x.untyped_storage().data_ptr()].append((name, x))
    for tensors in holders.values():
        # stands for the storage, and is never touched
        memory = np.empty(tensors[0][1].untyped_storage().nbytes(), np.uint8)
        placed = [
            (
                name,
                x.requires_grad,
                np.ndarray(
                    x.shape,
                    f"V{x.itemsize}",
                    memory,
                    x.storage_offset() * x.itemsize,
                    [stride * x.itemsize for stride in x.stride()],
                ),
            )
            for name, x in tensors
        ]
        for (name, learned, a), (other, other_learned, b) in itertools.combinations(placed, 2):
            require(
                not ((learned or other_learned) and np.shares_memory(a, b)),
                f"{name} and {other} share memory, which buckets would part; tie modules by one"
                " Parameter (a.weight = b.weight), or clone",
            )


def check_rule(name: str, rule: Any) -> None:
    """Raise RunError if a number of Adam or NorMuon is out of range. Others check their own."""
    require(
        isinstance(rule.every, int) and rule.every > 0,
        f"{name}: {type(rule).__name__} has every={rule.every!r}; "
        "it must be a whole number above 0",
    )
    for key, x in vars(rule).items() if isinstance(rule, Adam | NorMuon) else ():
        below = 1 if key.startswith("beta") else math.inf
        require(
            type(x) not in (int, float) or 0 <= x < below,
            f"{name}: {type(rule).__name__} has {key}={x!r}; it must be from 0 on, below {below}",
        )


# usual names of layers that hold several matrices: queries, keys and values, gates and what they
# multiply
FUSED = re.compile(
    r"qkv|(^|_|w)(qk|kv)($|_)|query_key|key_value|gate_?(and_)?up|up_?(and_)?gate|w1_?[23]|c_attn|"
    r"in_proj|fused|packed",
    re.I,
)


def what_is_unclear(spec: ParamSpec, module: nn.Module) -> str:
    """Say why a parameter needs a line: it may be no matrix, several, or [in, out]. "": no need."""
    shape = [*spec.param.shape]
    name = spec.name.partition(".parametrizations.")[0].removesuffix(".weight")
    if spec.rule is None:
        return (
            f"{shape} is not known to be one matrix. Give it a line: Assignment(NAME, NorMuon()) if"
            f" it is one, Assignment(NAME, NorMuon(), unit={tuple(shape[-2:])}) if it holds"
            " several, as of experts, Assignment(NAME, Adam()) if it is none, as positions"
        )
    if not isinstance(spec.rule, NorMuon) or spec.unit:
        return ""
    rows, columns = spec.rule.unit(spec)
    unknown_layer = (
        len(shape) == 2
        and rows != columns
        and not isinstance(module, MATRICES)
        and "lora" not in spec.name.lower()
    )
    if unknown_layer and (
        columns == 3 * rows
        or [columns] == [len(p) for p in module.parameters(recurse=False) if p.dim() == 1]
    ):
        return (
            f"{shape} of {type(module).__name__} seems to be [in, out]. If it is one matrix, give"
            f" it a line: Assignment(NAME, NorMuon(), unit=({rows}, {columns}),"
            f" scale={math.sqrt(columns / rows):.4g}); if it holds several side by side, as a fused"
            " query, key and value, put layers of nn.Linear in its place"
        )
    if not FUSED.search(name.rpartition(".")[2]) and (rows, columns) != (3 * columns, shape[1]):
        return ""
    return (
        f"{shape} may hold several matrices, as a fused query, key and value, or gate and up. If"
        " so, give it a line: Assignment(NAME, NorMuon(),"
        f" unit=({'rows of one' if rows % columns else columns}, {columns})); if it is one matrix,"
        f" with unit=({rows}, {columns})"
    )


def check_spec(spec: ParamSpec) -> None:
    """Raise RunError for a parameter or a rule that no bucket can take."""
    members = "lr", "every", "unit", "init_state", "hyper", "update"
    frozen = getattr(getattr(spec.rule, "__dataclass_params__", None), "frozen", False)
    require(
        frozen and not isinstance(spec.rule, type) and all(hasattr(spec.rule, x) for x in members),
        f"{spec.name}: {spec.rule!r} is not an update rule; write a frozen dataclass with"
        f" {', '.join(members)}, as Adam is",
    )
    check_rule(spec.name, spec.rule)
    require(
        spec.param.numel(),
        f"{spec.name} has shape {tuple(spec.param.shape)}, but a bucket needs parameters "
        "with elements; remove it from the model, or freeze it by requires_grad_(False)",
    )
    require(
        0 <= spec.scale < math.inf and spec.first_step >= 0,
        f"{spec.name} has scale {spec.scale} and "
        f"first_step {spec.first_step}; both must be from 0 on",
    )
    require(
        not (isinstance(spec.rule, Adam | NorMuon) and spec.param.is_complex()),
        f"{spec.name} is {spec.param.dtype}, which Adam and NorMuon cannot update; use"
        " torch.view_as_complex of a real one",
    )
    require(
        spec.scale == 1 or len(spec.rule.unit(spec)) == 2,
        f"{spec.name}: its scale is not 1, but {type(spec.rule).__name__} does not update matrices"
        " and ignores it; change the rule's lr instead",
    )


def check_views(bucket: Bucket, reducer: Reducer) -> None:
    """Raise RunError if a parameter is no longer a view of its bucket.

    Or if it has a hook that cannot see gradients.
    """
    start = bucket.param_data.data_ptr()
    size = bucket.param_data.element_size()
    for slot in bucket.slots:
        param = slot.param
        hook_ids = reversed(param._post_accumulate_grad_hooks or {})
        is_last_hook = next(hook_ids, 0) == reducer.hooks[param].id
        if is_last_hook and param.grad is None and param.data_ptr() == start + slot.offset * size:
            continue
        require(
            HOOKS[param][1]() in (reducer, None),
            f"{slot.name} belongs to a later optimizer, which gets its "
            "gradients; build one optimizer of a module that holds all that share it",
        )
        require(
            is_last_hook,
            f"{slot.name} was given a post-accumulate hook after the optimizer was built, and it"
            " sees .grad None; set it before, or use register_hook, which gets the gradient",
        )
        require(
            param.grad is None,
            f"{slot.name} has a .grad that came by no hook; leave the model out of DDP, since "
            "the optimizer averages gradients; call backward() instead of setting .grad; and save "
            "optimizer.state_dict() instead of calling get_optimizer_state_dict()",
        )
        raise UsageError(
            f"{slot.name} was given other memory, by .data, set_(), share_memory(), a move, a cast"
            " or a library; do so before the optimizer is built, and write into it by"
            " p.data.copy_(values)"
        )


def check_all_in_buckets(model: nn.Module, bucket_params: set[nn.Parameter]) -> int:
    """Raise RunError if a learned parameter is in no bucket. Return the number of buffers."""
    # every step calls this, and named_parameters takes longer
    modules = [model]
    buffers = 0
    for module in modules:  # with those that it adds
        modules += [child for child in module._modules.values() if child is not None]
        buffers += len(module._buffers)
        params = module._parameters.values()
        if not bucket_params.issuperset(p for p in params if p is not None and p.requires_grad):
            params = model.named_parameters()
            name = next(name for name, p in params if p.requires_grad and p not in bucket_params)
            raise UsageError(
                f"{name} is in no bucket and would never be updated; freeze it by"
                " requires_grad_(False), or build the optimizer after what adds or replaces it"
                " (load_state_dict(assign=True))"
            )
    return buffers
