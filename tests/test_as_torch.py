"""make_optimizer in other people's models: as torch.optim and DDP do, or refused in one line.
docs/gradient-sync.md has the table."""

import contextlib
import copy
import gc
import io
import re
import subprocess
import sys
import time
import warnings
import weakref
from datetime import timedelta
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpt_speedrun
import test_frameworks
import test_optimizer
import test_programs
import test_sync
from gpt_speedrun import Adam, Assignment, NorMuon, RunError, SyncSettings, make_optimizer
from test_optimizer import chain
from test_sync import Hostile

X = torch.ones(2, 6)


def train(model, optimizer, steps=1, x=X):
    for _ in range(steps):
        model(x).square().sum().backward()
        optimizer.step()


ELSEWHERE = """
import signal, sys, warnings
import torch, torch.distributed as dist, torch.utils.weak
before = [*warnings.filters]
sys.modules |= {"fcntl": None, "resource": None}
for name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM"):
    delattr(signal, name)
sys.path.insert(0, sys.argv[1])
import gpt_speedrun
assert warnings.filters == before
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8), torch.nn.Linear(8, 4))
optimizer = gpt_speedrun.make_optimizer(model)
optimizer.comm.point_to_point = False  # as on GPUs
for bucket in optimizer.buckets:
    bucket.receive_buffer = None
model(torch.ones(2, 8)).sum().backward()
optimizer.step()
"""


def test_the_optimizer_needs_nothing_that_windows_lacks_and_changes_no_warning_filter():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ELSEWHERE, Path(gpt_speedrun.__file__).parent.parent],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def in_a_new_group(comm, function, *arguments):
    """Return a rank's result or its error. Messages under way then belong to a process group that
    nobody uses again."""
    store = dist.distributed_c10d._get_default_store()
    try:
        return function(comm, *arguments)
    except Exception as error:
        return error
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        store = dist.PrefixStore(f"after {function.__name__} {arguments}", store)
        dist.init_process_group(
            "gloo",
            store=store,
            rank=comm.rank,
            world_size=comm.ranks,
            timeout=timedelta(seconds=600),
        )


def assert_all_refused(outcomes, says):
    for error in outcomes:
        assert (
            isinstance(error, RunError) and re.search(says, str(error)) and "\n" not in str(error)
        ), error


# prepare_for_backward


@pytest.mark.parametrize(
    "arguments",
    [
        (-1,),
        (torch.ones(()),),
        (0, 0, 0),
        (0, 0, 1, "loss"),
        (0, 0, 1, torch.ones(())),
    ],
    ids=str,
)
def test_what_cannot_be_prepared_is_refused(arguments):
    with pytest.raises(RunError, match="give it the loss that backward starts from"):
        make_optimizer(chain()).prepare_for_backward(*arguments)


# overlapping gathers


class Reads(nn.Module):
    """Reads parameters in ways that no forward hook of the model and its children sees."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.scale = nn.Parameter(torch.ones(6))
        self.inner = nn.Sequential(nn.Sequential(nn.Linear(6, 6)))
        self.head = nn.Linear(6, 3)
        self.parts = nn.ModuleDict({"lstm": nn.LSTM(6, 6)})  # it keeps a list of its parameters

    def forward(self, x):
        return self.method(x)

    def method(self, x):
        return (
            nn.functional.linear(self.inner[0][0](self.recur(x)), self.head.weight, self.head.bias)
            * self.scale[:3]
        )

    def recur(self, x):
        return self.parts["lstm"](x)[0]


def read(model, optimizer, how):
    """Return what a way of reading or writing after step() sees."""
    with torch.no_grad():
        if how == "clamp":
            for p in model.parameters():
                p.clamp_(-0.1, 0.1)
        if how == "load":
            model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()})
        return {
            "functional": lambda: [nn.functional.linear(torch.ones(6), model.head.weight)],
            "inner": lambda: [model.inner[0](X)],
            "method": lambda: [model.method(X)],
            "lstm": lambda: [model.recur(X)],
            "state_dict": lambda: [*model.state_dict().values()],
            "get_parameter": lambda: [model.get_parameter("inner.0.0.bias")],
            "copy": lambda: list(copy.deepcopy(model).parameters()),
            "vector": lambda: [nn.utils.parameters_to_vector(model.parameters())],
        }.get(how, lambda: list(model.parameters()))()


def reads(comm, how):
    results = []
    for overlap in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpt_speedrun, "Comm", Hostile)
            model = Reads()
            optimizer = make_optimizer(
                model, bucket_mb=0, settings=SyncSettings(overlap_param_gather=overlap)
            )
            train(model, optimizer)
            seen = [x.detach().clone() for x in read(model, optimizer, how)]
            optimizer.finish_all_gathers()
            results.append([*seen, *(p.detach().clone() for p in model.parameters())])
    return results


def all_reads(comm, *ways):
    return {how: reads(comm, how) for how in ways}


def test_every_read_from_the_model_waits_for_its_gather(on_ranks):
    ways = "functional inner method state_dict parameters get_parameter copy vector clamp load"
    ways = [*ways.split(), "lstm"]
    for of_rank in on_ranks(2, all_reads, *ways):
        for how, (with_overlap, without) in of_rank.items():
            assert all(torch.equal(a, b) for a, b in zip(with_overlap, without, strict=True)), how


def test_a_write_to_parameters_kept_from_before_step_is_found():
    model = chain()
    optimizer = make_optimizer(model, settings=SyncSettings(overlap_param_gather=True))
    kept = list(model.parameters())
    train(model, optimizer)
    with torch.no_grad():
        kept[-1].clamp_(0, 1)
    with pytest.raises(RunError, match=r"2.bias was changed after step\(\).*finish_all_gathers"):
        model(X)


@pytest.mark.slow
def test_a_compiled_model_overlaps_in_whole_graphs():
    """One graph waits for gathers, one does not: what waits breaks no graph."""
    import torch._dynamo as dynamo

    model = chain()
    twin = chain()
    optimizer = make_optimizer(model, settings=SyncSettings(overlap_param_gather=True))
    dynamo.reset()
    dynamo.utils.counters.clear()
    train(torch.compile(model, backend="eager"), optimizer, 3)
    assert (
        dynamo.utils.counters["stats"]["unique_graphs"] <= 2
        and not dynamo.utils.counters["graph_break"]
    )
    train(twin, make_optimizer(twin), 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters()))


# calls that differ between ranks


def on_rank_0_only(comm, what):
    torch.manual_seed(0)
    # equal sizes, which a mixture would not crash on
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    optimizer = make_optimizer(model, [Assignment("*", Adam())])
    state = optimizer.state_dict()
    train(model, optimizer, 2)
    if comm.rank == 0:
        if what == "model":
            model.load_state_dict({name: x + 1 for name, x in model.state_dict().items()})
        elif what == "no_sync":
            with optimizer.no_sync():
                model(X).sum().backward()
        else:
            getattr(optimizer, what)(*[state] * (what == "load_state_dict"))
    train(model, optimizer, 2)


@pytest.mark.parametrize(
    "what,says",
    [
        (
            "state_dict",
            r"calls differ: rank 1 has called step\(\); rank 0 has state_dict\(\)",
        ),
        (
            "load_state_dict",
            r"calls differ: rank 1 has called step\(\); rank 0 has load_state_dict\(\)",
        ),
        ("state_hash", r"rank 0 has state_dict\(\)"),
        ("check_replicas", r"rank 1 has called step\(\); rank 0 has check_replicas\(\)"),
        ("model", r"parameters differ: rank 1 has \d.weight"),
        ("no_sync", r"rank 1 has backwards 1; rank 0 has 2\. .* no_sync\(\)"),
    ],
)
def test_a_call_on_one_rank_only_is_an_error_of_all(on_ranks, what, says):
    assert_all_refused(on_ranks(2, in_a_new_group, on_rank_0_only, what), says)


def in_another_order(comm):
    models = [chain(), chain()]
    optimizers = [make_optimizer(model) for model in models]
    for i in (0, 1, comm.rank, 1 - comm.rank):
        train(models[i], optimizers[i])


def test_steps_of_two_optimizers_in_another_order_are_an_error_of_all(on_ranks):
    assert_all_refused(
        on_ranks(2, in_a_new_group, in_another_order),
        r"rank 1 has optimizer (\d+); rank 0 has (?!\1)",
    )


def initialized_apart(comm):
    model = chain()
    optimizer = make_optimizer(model)
    with torch.no_grad():
        model[0].weight.add_(comm.rank)
    train(model, optimizer)


def loaded_apart(comm):
    optimizer = make_optimizer(chain())
    optimizer.load_state_dict(
        {
            name: x + comm.rank * name.endswith("weight")
            for name, x in optimizer.state_dict().items()
        }
    )


def initialized_later(comm):
    """All ranks write as often, but other values."""
    model = chain()
    optimizer = make_optimizer(model)
    train(model, optimizer, 3)
    torch.manual_seed(comm.rank)
    model.apply(lambda m: nn.init.normal_(m.weight) if isinstance(m, nn.Linear) else None)
    train(model, optimizer)


@pytest.mark.parametrize("how", [initialized_apart, loaded_apart, initialized_later])
def test_parameters_that_differ_between_ranks_are_named(on_ranks, how):
    assert_all_refused(
        on_ranks(2, in_a_new_group, how),
        "parameters differ: rank 1 has .*weight .*on all ranks alike",
    )


def written_and_sent(comm):
    """Rank 0 loads, and the user's own broadcast gives it to the others: no ranks differ."""
    model = chain()
    optimizer = make_optimizer(model)
    for _ in range(2):
        train(model, optimizer)
        if comm.rank == 0:
            model.load_state_dict({name: x * 0.5 for name, x in model.state_dict().items()})
        for p in model.parameters():
            dist.broadcast(p.data, 0)
    train(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


def test_replicas_that_a_user_keeps_equal_train_on(on_ranks):
    first, second = on_ranks(2, written_and_sent)
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def raises_on_rank_1(comm, seconds):
    model = chain()
    optimizer = make_optimizer(model)
    train(model, optimizer)
    if comm.rank == 1:
        dist.destroy_process_group()
        raise ValueError("mine")
    time.sleep(seconds)
    train(model, optimizer)


@pytest.mark.parametrize("seconds", [0, 1])
def test_a_rank_that_raises_is_named_by_the_others(on_ranks, seconds):
    """Rank 0's message is on its way when its peer goes, or starts after that."""
    zero, one = on_ranks(2, in_a_new_group, raises_on_rank_1, seconds)
    assert re.match(
        r"rank 1 has ended, hangs or makes another call \([^\n/]*\); its own output says why$",
        str(zero),
    ) and "mine" in str(one)


# memory


def odd_memories(comm, *whats):
    return [odd_memory(comm, what) for what in whats]


def odd_memory(comm, what):
    base = torch.full((8, 8), float(comm.rank))
    model = chain()
    make = {
        "slice": lambda: base[:, :4],
        "strided": lambda: base[:, ::2],
        "transposed": lambda: base[:, 1:3].T,
        "expanded": lambda: base[0, :2].expand(5, 2),
        "scalar": lambda: base[0, 0].expand(3, 3),
        "fp8": lambda: base.to(torch.float8_e4m3fn),
        "complex": lambda: base.cfloat()[:, 1],
        "bool": lambda: (base > 0)[:, :3],
        "windows": lambda: base[0].unfold(0, 3, 1),
    }[what]
    model.register_buffer("x", make())
    model.frozen = (
        nn.Parameter(make(), requires_grad=False)
        if what in ("slice", "strided", "transposed")
        else None
    )
    mine = torch.zeros(8, 8, dtype=torch.bool)
    if model.x.untyped_storage().data_ptr() == base.untyped_storage().data_ptr():
        mine.as_strided(model.x.shape, model.x.stride(), model.x.storage_offset())[
            tuple(slice(None if s else 1) for s in model.x.stride())
        ] = True
    make_optimizer(model)
    tensors = [x for x in (model.x, model.frozen) if x is not None]
    return all((x.cfloat() == 0).all() for x in tensors), (base[~mine] == comm.rank).all().item()


def test_buffers_of_any_memory_get_rank_0_s_values_and_nothing_beside_is_written(on_ranks):
    whats = "slice strided transposed expanded scalar fp8 complex bool windows".split()
    for of_rank in on_ranks(2, odd_memories, *whats):
        assert dict(zip(whats, of_rank)) == dict.fromkeys(whats, (True, True))


def tied_by_data(model):
    model[1].weight.data = model[0].weight.data


def buffer_of_a_weight(model):
    model.register_buffer("alias", model[0].weight.data)


def slices_that_overlap(model):
    fused = torch.randn(9, 6)
    model[0].weight = nn.Parameter(fused[:6])
    model[1].weight = nn.Parameter(fused[3:])


def of_a_frozen_one(model):
    model.frozen = nn.Parameter(model[0].bias.data.view(2, 3), requires_grad=False)


def of_another_dtype(model):
    model.register_buffer("bits", model[0].weight.data.view(torch.int16)[2])


def transposed(model):
    model[1].weight = nn.Parameter(model[0].weight.data.t())


@pytest.mark.parametrize(
    "share",
    [
        tied_by_data,
        buffer_of_a_weight,
        slices_that_overlap,
        of_a_frozen_one,
        of_another_dtype,
        transposed,
    ],
)
def test_shared_memory_is_refused(share):
    model = chain((6, 6, 6))
    share(model)
    with pytest.raises(
        RunError,
        match=r"share memory, .* tie modules by one Parameter \(a.weight = b.weight\), or clone",
    ):
        make_optimizer(model)


@pytest.mark.parametrize(
    "share",
    [
        lambda fused: (fused[:6], fused[6:]),
        lambda fused: (fused.T.reshape(6, 12)[:, ::2], fused.T.reshape(6, 12)[:, 1::2]),
    ],
)
def test_slices_that_share_no_element_and_tied_parameters_train(share):
    """So does a model whose parameters lie in an earlier optimizer's bucket, and torch's
    spectral_norm."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    model[0].weight, model[1].weight = map(nn.Parameter, share(torch.randn(12, 6)))
    model[2].weight = model[1].weight
    nn.utils.spectral_norm(model[0])
    train(model, make_optimizer(model))
    train(model, make_optimizer(model))


@pytest.mark.parametrize("call", ["step", "load_state_dict"])
def test_a_graph_older_than_an_update_is_refused_as_by_torch(call):
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = make_optimizer(model)
    first = model(X).mean()
    second = model(X).square().mean()
    first.backward()
    (
        optimizer.load_state_dict(optimizer.state_dict())
        if call == "load_state_dict"
        else optimizer.step()
    )
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()


def test_a_model_that_is_deleted_is_freed():
    """With every kind of hook; also the optimizer of a model that gets another one."""
    for overlap in (False, True):
        model = chain()
        optimizer = make_optimizer(model, settings=SyncSettings(overlap_param_gather=overlap))
        train(model, optimizer)
        old = weakref.ref(optimizer.buckets[0])
        optimizer = make_optimizer(model)
        gc.collect()
        assert old() is None
        train(model, optimizer)
        refs = [weakref.ref(x) for x in (model, model[0].weight, optimizer)]
        del model, optimizer
        gc.collect()
        assert not any(ref() is not None for ref in refs)


def test_a_model_whose_optimizer_was_deleted_keeps_its_gradients():
    model = chain()
    optimizer = make_optimizer(model)
    del optimizer
    gc.collect()
    model(X).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_hook_set_before_sees_gradients_and_one_set_later_is_refused():
    model = chain()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    optimizer = make_optimizer(model)
    model[1].weight.register_hook(seen.append)
    with optimizer.no_sync():
        model(X).square().sum().backward()
    train(model, optimizer)
    assert len(seen) == 4 and all(x.any() for x in seen)
    # of one micro-batch each, where torch's hook sees the sum so far
    assert torch.equal(seen[1], seen[3])
    model[1].weight.register_post_accumulate_grad_hook(lambda p: None)
    with pytest.raises(RunError, match="1.weight was given a post-accumulate hook after"):
        train(model, optimizer)


# buffers


def normed():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 2))


class Averaged(nn.Module):
    """Writes buffers in ways that autograd does not count: by .data, as codebooks are averaged,
    and as a new tensor."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("flag", torch.tensor(False))

    def forward(self, x):
        self.mean.data.lerp_(x.detach().mean(0), 0.5)
        self.flag = self.flag.logical_not()
        return x


def statistics(comm):
    results = []
    for model, again in (
        (normed(), normed()),
        (nn.Sequential(Averaged(), chain()), nn.Sequential(Averaged(), chain())),
    ):
        optimizer = make_optimizer(model)
        train(
            model,
            optimizer,
            3,
            torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank)) + 5 * comm.rank,
        )
        make_optimizer(again).load_state_dict(optimizer.state_dict())
        results += [(x.clone(), y) for x, y in zip(model.buffers(), again.buffers(), strict=True)]
    return results


def test_statistics_of_batch_norm_are_rank_0_s_and_saved(on_ranks):
    zero, one = on_ranks(2, statistics)
    assert int(zero[2][0]) == 3 and zero[0][0].any() and zero[3][0].any() and zero[4][0]
    for (a, saved_a), (b, saved_b) in zip(zero, one, strict=True):
        assert torch.equal(a, b) and torch.equal(a, saved_a) and torch.equal(b, saved_b)


def test_a_state_without_buffers_loads():
    """States of 2026-11-24 and before have none."""
    optimizer = make_optimizer(normed())
    optimizer.load_state_dict(
        {
            name: x
            for name, x in optimizer.state_dict().items()
            if "running" not in name and "num_" not in name
        }
    )


# groups and rules


def edited(**edits):
    model = chain((6, 6, 6, 6))
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group.update(edits)
    optimizer.param_groups[:] = [dict(group) for group in optimizer.param_groups]  # replaced
    train(model, optimizer, 2)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "edits",
    [{"lr": 0.001}, {"lr": torch.tensor(0.001)}, {"weight_decay": 5.0}, {"beta2": 0.5}],
    ids=str,
)
def test_numbers_of_an_edited_group_take_effect(edits):
    assert not torch.equal(edited(**edits), edited())


@pytest.mark.parametrize(
    "edits,says",
    [
        (
            {"betas": (0.1, 0.1)},
            r"Adam cannot use betas=\(0.1, 0.1\) of param_groups; a group can change beta1,"
            r" beta2, eps, lr",
        ),
        ({"momentum": 0.5}, "momentum=0.5 of"),
        ({"every": 2}, "every=2"),
        ({"fp32_moments": True}, "fp32_moments=True"),
        ({"nesterov": True}, "nesterov"),
        ({"lr": float("nan")}, "cannot use lr=nan"),
        ({"lr": -1.0}, "lr=-1.0; it must be from 0 on"),
        ({"params": []}, "param_groups has no .*bias"),
    ],
    ids=str,
)
def test_what_a_group_cannot_change_is_refused(edits, says):
    with pytest.raises(RunError, match=says):
        edited(**edits)


def regrouped(rates, **settings):
    """Train with a group for each parameter, and these learning rates in turn."""
    model = chain((6, 6, 6))
    optimizer = make_optimizer(model, [Assignment("*", Adam())], **settings)
    optimizer.param_groups[:] = [
        {**group, "params": [p], "lr": rate}
        for group in optimizer.param_groups
        for p, rate in zip(group["params"], rates)
    ]
    train(model, optimizer)
    return [p.detach().clone() for p in model.parameters()]


def test_groups_may_split_a_bucket_if_their_numbers_are_equal():
    assert all(map(torch.equal, regrouped([0.01] * 4), regrouped([0.01] * 4, bucket_mb=0)))
    with pytest.raises(
        RunError,
        match=(
            "1.weight.* and 1.bias share a bucket, but their groups in param_groups differ; .*"
            " bucket_mb=0"
        ),
    ):
        regrouped([0.01, 0.02, 0.02, 0.02])
    same = regrouped([0.01] * 4, bucket_mb=0)
    other = regrouped([0.01, 0.0, 0.01, 0.01], bucket_mb=0)
    assert [torch.equal(a, b) for a, b in zip(same, other)].count(False) == 1


def test_a_name_of_a_group_is_the_user_s():
    assert torch.equal(edited(name="all of it"), edited())


def of(**parts):
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, nn.Parameter(part) if isinstance(part, torch.Tensor) else part)
    model.head = nn.Linear(6, 6)
    return model


@pytest.mark.parametrize(
    "part",
    [
        torch.randn(8, 16, 32),
        torch.randn(4, 16, 8),
        nn.Bilinear(8, 8, 6),
        torch.randn(2, 4, 8, 8),
        torch.randn(32, 16),
        nn.ParameterList([torch.randn(8, 8)]),
    ],
    ids=["experts", "heads", "bilinear", "experts of layers", "positions", "list"],
)
def test_what_may_be_no_matrix_needs_a_line(part):
    with pytest.raises(
        RunError,
        match=(
            r"part.* is not known to be one matrix. Give it a line: .*unit=\(\d+,"
            r" \d+\)\).*Adam\(\)\)"
        ),
    ):
        make_optimizer(of(part=part))
    for rule, unit in ((NorMuon(), (8, 8)), (Adam(), None)):
        make_optimizer(
            of(part=part),
            [
                Assignment(
                    (
                        "part*"
                        if isinstance(part, nn.ParameterList)
                        else "part.weight"
                        if isinstance(part, nn.Module)
                        else "part"
                    ),
                    rule,
                    unit,
                )
            ],
        )


def rule_of(model, name):
    return next(
        (type(b.rule), b.param_shard.shape[1:])
        for b in make_optimizer(model).buckets
        for slot in b.slots
        if slot.name.endswith(name)
    )


def tied():
    layers = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20, bias=False))
    layers[1].weight = layers[0].weight
    return layers


@pytest.mark.parametrize(
    "part,rule,unit",
    [
        (nn.GRU(8, 6), NorMuon, (6, 8)),
        (nn.MultiheadAttention(8, 2), NorMuon, (8, 8)),
        (tied(), Adam, ()),
        (nn.Conv2d(16, 16, 3, groups=16), Adam, ()),
        (nn.Conv1d(8, 16, 3, groups=4), NorMuon, (4, 6)),
        (nn.Conv2d(4, 8, 3), NorMuon, (8, 36)),
        (nn.ConvTranspose1d(8, 4, 3, groups=2), NorMuon, (4, 6)),
        (nn.LayerNorm((3, 4, 5)), Adam, ()),
        (nn.RMSNorm((4, 5)), Adam, ()),
        (nn.Linear(4, 6), NorMuon, (6, 4)),
    ],
    ids=str,
)
def test_the_matrices_of_torch_s_layers_are_known(part, rule, unit):
    names = {nn.GRU: "weight_ih_l0", nn.MultiheadAttention: "in_proj_weight"}
    names[nn.Sequential] = "0.weight"
    assert rule_of(of(part=part), names.get(type(part), "part.weight")) == (rule, unit)


class InOut(nn.Module):
    """x @ weight + bias, weight [in, out], as GPT-2's Conv1D."""

    def __init__(self, inside, out, bias=True):
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(inside, out))
        self.bias = nn.Parameter(torch.zeros(out)) if bias else None


@pytest.mark.parametrize(
    "part,name,says",
    [
        (InOut(8, 32), "fc", r"of InOut seems to be \[in, out\].*unit=\(8, 32\), scale=2\)"),
        (InOut(32, 8), "proj", r"unit=\(32, 8\), scale=0.5\)"),
        (
            InOut(8, 24, bias=False),
            "attn",
            r"side by side, as a fused query, key and value, put layers of nn.Linear",
        ),
        (nn.Linear(8, 32), "gate_up_proj", r"unit=\(8, 8\)\)"),
        (nn.Linear(8, 16), "to_kv", r"kv.weight \[16, 8\] may hold several"),
        (nn.Linear(8, 12), "wqkv", r"unit=\(rows of one, 8\)\)"),
        (nn.Linear(8, 4), "kv_proj", "several"),
        (nn.Linear(8, 32), "w13", "several"),
        (nn.Linear(8, 24), "x", r"unit=\(8, 8\)\); if it is one matrix, with unit=\(24, 8\)"),
        (nn.Conv2d(8, 24, 1), "y", "several"),
        (nn.Linear(8, 32), "fc", ""),
        (nn.Linear(24, 8), "fc", ""),
        (InOut(8, 8), "fc", ""),
        (nn.RNN(24, 8), "rnn", ""),
        (nn.Conv2d(1, 27, 3), "patches", ""),
    ],
    ids=str,
)
def test_what_may_hold_several_matrices_or_be_transposed_needs_a_line(part, name, says):
    model = of(**{name: part})
    with pytest.raises(RunError, match=says) if says else contextlib.nullcontext() as raised:
        make_optimizer(model)
    if says and "rows of one" not in str(raised.value):  # the line that it proposes is taken
        line = re.findall(
            r"Assignment\(('[^']*'), (NorMuon\(\), unit=\(.*?\)(?:, scale=[0-9.]+)?)\)",
            str(raised.value),
        )[0]
        make_optimizer(model, [eval(f"Assignment({line[0]}, {line[1]})")])


def test_all_parameters_that_need_a_line_are_named_at_once():
    """With a pattern for all blocks, if no other parameter matches it."""
    model = nn.Sequential(
        *(of(qkv=nn.Linear(6, 18), experts=torch.randn(2, 6, 6)) for _ in range(2))
    )
    with pytest.raises(RunError) as raised:
        make_optimizer(model)
    assert re.search(
        r"0.qkv.weight, 1.qkv.weight \[18, 6\] may .*Assignment\('\*.qkv.weight', NorMuon\(\),"
        r" unit=\(6, 6\)\).*; 0.experts, 1.experts \[2, 6, 6\] is not|"
        r"0.experts, 1.experts .*'\*.experts'.*; 0.qkv.weight, 1.qkv.weight",
        str(raised.value),
    ), raised.value
    assert "\n" not in str(raised.value)


def test_usual_names_of_matrices_are_known():
    """`weight` of a layer of one's own, also under a parametrization, and LoRA's two."""
    model = of(
        layer=of(weight=torch.randn(8, 6)),
        lora_A=torch.randn(2, 6),
        lora_B=torch.zeros(5, 2),
        conv=nn.Conv1d(4, 8, 3),
    )
    nn.utils.parametrizations.weight_norm(model.conv)
    assert {
        rule_of(model, name)[0]
        for name in ("layer.weight", "lora_A", "lora_B", "conv.parametrizations.weight.original1")
    } == {NorMuon}


# at build


def lazy():
    return nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 4))


def subclassed():
    """A tensor that is made of others, as those of FSDP2 and of quantization are."""

    class Quantized(torch.Tensor):
        def __tensor_flatten__(self):
            raise NotImplementedError

    model = chain()
    model[0].weight = nn.Parameter(model[0].weight.detach().as_subclass(Quantized))
    return model


@pytest.mark.parametrize(
    "arguments,says",
    [
        (lambda: dict(adam_lr=-1.0), "lr=-1.0"),
        (lambda: dict(muon_lr=float("nan")), "lr=nan"),
        (
            lambda: dict(table=[Assignment("*", Adam(beta1=1.5))]),
            "beta1=1.5; it must be from 0 on, below 1",
        ),
        (lambda: dict(table=[Assignment("*", Adam(every=0))]), "every=0"),
        (lambda: dict(settings=SyncSettings(clip_norm=-1)), "clip_norm is -1"),
        (lambda: dict(settings=SyncSettings(sync="hooks")), "sync is 'hooks'; .* 'hook', 'step'"),
        (lambda: dict(settings={"clip_norm": 1}), "settings is a dict"),
        (lambda: dict(model=torch.jit.script(chain())), "the model is a ScriptModule; give"),
        (lambda: dict(model=lazy()), "uninitialized parameter"),  # by torch
        (lambda: dict(model=subclassed()), "0.weight is a Quantized; build the"),
        (lambda: dict(model=chain().share_memory()), "0.weight is in memory shared with other"),
        (lambda: dict(table=[Assignment("*.weight", NorMuon(), scale=-1.0)]), "scale -1.0"),
        (lambda: dict(table=[Assignment("*", Adam(), first_step=-1)]), "first_step -1"),
        (
            lambda: dict(table=[Assignment("*.weight", NorMuon(), unit=(0, 0))]),
            r"unit \(0, 0\), but NorMuon updates whole matrices",
        ),
        (
            lambda: dict(
                model=nn.Sequential(
                    nn.Linear(6, 6, dtype=torch.cfloat), nn.Linear(6, 6, dtype=torch.cfloat)
                )
            ),
            "complex64, which .* cannot update",
        ),
    ],
)
def test_what_cannot_train_is_refused_when_built(arguments, says):
    with pytest.raises((RunError, ValueError), match=says):
        make_optimizer(**{"model": chain(), **arguments()})


def sharded(comm):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = chain()
    fully_shard(model, mesh=init_device_mesh("cpu", (comm.ranks,)))
    make_optimizer(model)


@pytest.mark.slow
def test_a_model_of_fsdp2_is_refused(on_ranks):
    assert_all_refused(
        on_ranks(2, in_a_new_group, sharded),
        "0.weight is a DTensor; build the optimizer of plain tensors",
    )


@pytest.mark.parametrize(
    "variables,refused",
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_SIZE": "4"}, True),
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "2", "WORLD_SIZE": "1"}, False),
    ],
    ids=str,
)
def test_tasks_of_srun_and_mpirun_without_a_process_group_are_refused(
    monkeypatch, variables, refused
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with (
        pytest.raises(RunError, match="would train alone; start by torchrun .* WORLD_SIZE=1")
        if refused
        else contextlib.nullcontext()
    ):
        make_optimizer(chain())


def test_copies_and_pickles_of_the_optimizer_and_a_scaler_are_refused():
    model = chain()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu")
    for copied in (copy.deepcopy, copy.copy, lambda x: torch.save(x, io.BytesIO())):
        with pytest.raises(
            RunError, match=r"copied or pickled.* copy the model, and save state_dict\(\)"
        ):
            copied(optimizer)
    scaler.scale(model(X).sum()).backward()
    with pytest.raises(RunError, match="GradScaler cannot be used.* train in bfloat16"):
        scaler.step(optimizer)
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)


# states


@pytest.mark.parametrize("last_epoch", [2, -1])
def test_a_scheduler_resumes_after_load(last_epoch):
    def half(optimizer, last=-1):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: 0.5**t, last)

    ours = make_optimizer(chain((6, 6)), adam_lr=0.01)
    theirs = torch.optim.AdamW(chain((6, 6)).parameters(), lr=0.01)
    for optimizer in (ours, theirs):
        schedule = half(optimizer)
        for _ in range(3):
            optimizer._opt_called = True  # the scheduler would warn that step() was not called
            schedule.step()
    new = (
        make_optimizer(chain((6, 6)), adam_lr=0.01),
        torch.optim.AdamW(chain((6, 6)).parameters(), lr=0.01),
    )
    for optimizer, old in zip(new, (ours, theirs)):
        optimizer.load_state_dict(old.state_dict())
    a, b = (half(optimizer, last_epoch) for optimizer in new)
    assert (
        a.base_lrs == b.base_lrs == [0.01]
        and new[0].param_groups[0]["lr"] == new[1].param_groups[0]["lr"]
    )


def test_a_refused_state_changes_nothing():
    model = chain()
    optimizer = make_optimizer(model, bucket_mb=0)
    train(model, optimizer)
    before = optimizer.state_hash()
    state = optimizer.state_dict()
    optimizer.param_groups[0]["lr"] = 0.125
    rate = state["2.bias/lr"]
    for spoil in (
        lambda s: s.update({name: x + 1 for name, x in s.items()} | {"0.weight/m": torch.zeros(3)}),
        lambda s: s.update(further=torch.zeros(3)),
    ):
        spoilt = dict(state)
        spoil(spoilt)
        with pytest.raises(RunError, match="does not fit"):
            optimizer.load_state_dict(spoilt)
        assert optimizer.state_hash() == before and optimizer.param_groups[0]["lr"] == 0.125 != rate
    with pytest.raises(
        RunError, match=r"it is a list \[\], not a vector; load what state_dict\(\) returned"
    ):
        optimizer.load_state_dict([state])


def test_states_of_wrapped_models_load_into_plain_ones_and_back():
    """torch.compile of the model or of a part, and DDP, put words into names. A part may be called
    `module`."""

    class Wrapped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.module = model

    plain = make_optimizer(chain())
    whole = make_optimizer(torch.compile(chain(), backend="eager"))
    part = chain()
    part[1] = torch.compile(part[1], backend="eager")
    for a in (plain, whole, make_optimizer(part), make_optimizer(Wrapped(chain(seed=1)))):
        for b in (plain, whole):
            a.load_state_dict(b.state_dict())
            b.load_state_dict(a.state_dict())


def test_each_parameter_has_a_storage_of_its_own():
    """So torch.save of one layer writes that layer, and libraries that take a common storage for
    ties save every parameter."""
    model = nn.Sequential(
        *(nn.Linear(30, 30) for _ in range(10)),
        nn.Linear(5, 3).bfloat16(),
        nn.Linear(3, 3).bfloat16(),
    )
    model[1].weight = model[0].weight
    train(
        model[:10],
        optimizer := make_optimizer(model, settings=SyncSettings(find_unused_parameters=True)),
        x=torch.ones(2, 30),
    )
    storages = [x.untyped_storage() for x in model.parameters()]
    assert (
        len({(x.data_ptr(), len(x)) for x in storages})
        == len(storages)
        == len([slot for b in optimizer.buckets for slot in b.slots])
    )
    assert all(x.data_ptr() % 16 == 0 for x in storages), "torch.compile takes it for granted"


# what frameworks and other libraries do


def test_a_closure_has_gradients_and_backwards():
    model = chain()
    optimizer = make_optimizer(model)
    with torch.no_grad():
        optimizer.step(lambda: model(X).sum().backward())
    with pytest.raises(TypeError, match="not callable"):
        optimizer.step(1)
    with pytest.raises(RunError, match=r"step\(\) after 0 of 0"):
        optimizer.step(lambda: model(X).sum())


def test_a_gradient_set_by_hand_is_refused():
    """As torch.distributed.checkpoint's get_optimizer_state_dict does."""
    model = chain()
    optimizer = make_optimizer(model)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    with pytest.raises(
        RunError,
        match=r"0.weight has a .grad that came by no hook; .* save optimizer.state_dict\(\)",
    ):
        optimizer.step()


def test_clipping_by_torch_warns_that_it_changes_nothing():
    model = chain()
    optimizer = make_optimizer(model)
    model(X).sum().backward()
    with pytest.warns(
        UserWarning, match=r"clip_grad_norm_ changes nothing.*=SyncSettings\(clip_norm="
    ) as caught:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        optimizer.remove_hooks()
        model(X).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert sum(p.grad.square().sum() for p in model.parameters()) < 1.1e-6


def test_the_later_of_two_optimizers_of_a_parameter_is_named():
    encoder = nn.Linear(6, 6)
    first, second = (nn.Sequential(encoder, nn.Linear(6, n)) for n in (1, 2))
    older = make_optimizer(first)
    newer = make_optimizer(second)
    train(second, newer)
    for call in (lambda: train(first, older), older.step):
        with pytest.raises(
            RunError,
            match=(
                r"0.(weight|bias) belongs to a later optimizer, .* build one optimizer of a module"
                r" that holds all"
            ),
        ):
            call()
    theirs = torch.optim.SGD(second.parameters(), lr=0.1)
    with pytest.raises(RunError, match=r"call this one's remove_hooks\(\)"):
        train(second, theirs, 2)


def delayed(model):
    """Build an optimizer whose gathers fill parameters with NaN until they are waited for."""
    with mock.patch.object(gpt_speedrun, "Comm", Hostile):
        return make_optimizer(model, settings=SyncSettings(overlap_param_gather=True))


def test_a_copy_of_an_overlapping_model_waits_for_nothing_and_a_trace_is_refused():
    model = chain()
    train(model, optimizer := delayed(model))
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(X), model(X)) and type(twin._parameters) is dict
        assert torch.equal(torch.jit.trace(twin, X)(X), model(X))
    with pytest.raises(
        RunError, match=r"a traced module cannot wait for all-gathers; trace copy.deepcopy\(model\)"
    ):
        torch.jit.trace(model, X)
    train(model, optimizer)


def test_what_reads_or_writes_beside_the_model_waits_for_all_gathers_itself():
    """Code traced or compiled before, and averages that are swapped in by kept references."""
    model = chain()
    traced = torch.jit.trace(model, X)
    kept = list(model.parameters())
    optimizer = delayed(model)
    train(model, optimizer)
    optimizer.finish_all_gathers()
    for p in kept:
        p.data.copy_(p.data * 0.5)
    assert torch.equal(traced(X), model(X)) and model(X).isfinite().all()


def test_every_way_to_read_the_dict_of_parameters_waits():
    for read in (
        lambda x: x["weight"],
        lambda x: x.get("weight"),
        lambda x: [*x.values()][0],
        lambda x: dict(x.items())["weight"],
    ):
        model = chain()
        train(model, optimizer := delayed(model))
        assert (
            optimizer.buckets
            and read(model[0]._parameters).isfinite().all()
            and model[0]._parameters.get("none", 3) == 3
        )


@pytest.mark.slow
def test_a_compiled_step_is_the_same_step():
    results = []
    for wrap in (lambda f: f, torch.compile):
        model = chain()
        optimizer = make_optimizer(model)

        def whole():
            model(X).square().sum().backward()
            optimizer.step()

        step = wrap(whole)
        for _ in range(3):
            step()
        results.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results))


# several ranks


def dropped_on_one(comm, how):
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    optimizer = make_optimizer(model)
    for step in range(4):
        with optimizer.no_sync() if how == "no_sync" else contextlib.nullcontext():
            model(X).square().sum().backward()
        if step == 2 and comm.rank == 0:
            optimizer.zero_grad()
            continue
        if how == "no_sync":
            model(X).square().sum().backward()
        optimizer.step()
    optimizer.state_dict()


@pytest.mark.parametrize("how", ["no_sync", "backward"])
def test_zero_grad_on_one_rank_is_an_error_of_all(on_ranks, how):
    assert_all_refused(
        on_ranks(2, in_a_new_group, dropped_on_one, how),
        r"rank 1 has zero_grad\(\) of gradients 0; rank 0 has 1|"
        "rank [01] has ended, hangs or makes another call",
    )


def between(comm, call, settings):
    """Call in the second step between backward and step()."""
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3)))
    optimizer = make_optimizer(model, settings=settings)
    train(model, optimizer, 2)
    model(X).square().sum().backward()
    getattr(optimizer, call)()


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("call", ["state_dict", "state_hash", "check_replicas"])
def test_a_state_between_backward_and_step_is_refused(on_ranks, call, unused):
    settings = SyncSettings(find_unused_parameters=unused)
    errors = on_ranks(2, in_a_new_group, between, call, settings)
    assert_all_refused(errors, r"\(\) was called between backward and step\(\)")


def saved_after_zero_grad(comm):
    model = chain()
    optimizer = make_optimizer(model)
    train(model, optimizer, 2)
    model(X).square().sum().backward()
    optimizer.zero_grad()
    first = optimizer.state_hash()
    train(model, optimizer)
    return first


def test_a_state_after_zero_grad_between_backward_and_step_is_saved(on_ranks):
    first, second = on_ranks(2, saved_after_zero_grad)
    assert first == second


@pytest.mark.parametrize("in_no_sync", [True, False])
def test_a_model_s_zero_grad_drops_gradients(in_no_sync):
    weights = []
    for batches in (0, 1):
        model = chain()
        optimizer = make_optimizer(model)
        for _ in range(batches):
            with optimizer.no_sync() if in_no_sync else contextlib.nullcontext():
                model(3 * X).square().sum().backward()
            nn.Sequential(model).zero_grad()
        train(model, optimizer)
        weights.append(model[0].weight)
    assert torch.equal(*weights)
    model(X).sum().backward()
    with pytest.raises(RunError, match=r"zero_grad\(\) of a part of the model cannot"):
        model[0].zero_grad()
    nn.Linear(2, 2).zero_grad()


def test_hooks_of_states_are_refused():
    optimizer = make_optimizer(chain())
    for name in product(["state_dict", "load_state_dict"], ["pre", "post"]):
        with pytest.raises(RunError, match="hooks of states are never called"):
            getattr(optimizer, f"register_{'_'.join(name)}_hook")(print)


class GivesNone(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2, None


def test_a_function_that_gives_no_gradient_leaves_its_parameter_unused():
    for unused in (True, False):
        model = chain()
        before = model[2].weight.detach().clone()
        settings = SyncSettings(find_unused_parameters=unused)
        optimizer = make_optimizer(model, settings=settings)
        y = model[2].bias + GivesNone.apply(model[1](model[0](X))[:, :4], model[2].weight)
        y.square().sum().backward()
        says = r"got a gradient, not 2.weight; use each in the loss"
        with contextlib.nullcontext() if unused else pytest.raises(RunError, match=says):
            optimizer.step()
        assert torch.equal(model[2].weight, before)


def test_a_layer_frozen_later_is_named_with_the_cure():
    model = chain()
    optimizer = make_optimizer(model)
    train(model, optimizer)
    model[1].requires_grad_(False)
    with pytest.raises(
        RunError, match="not 1.(weight|bias).* frozen after the optimizer was built"
    ):
        train(model, optimizer)


def test_a_reentrant_checkpoint_with_unused_parameters_is_named():
    model = chain()
    optimizer = make_optimizer(model, settings=SyncSettings(find_unused_parameters=True))
    x = X.clone().requires_grad_()
    y = checkpoint(model[0], x, use_reentrant=True)
    optimizer.prepare_for_backward(loss := model[1](y).square().sum())
    with pytest.raises(RunError, match="0.(weight|bias) got .* checkpoint .* use_reentrant=False"):
        loss.backward()


def resized_apart(comm):
    model = Growing()
    optimizer = make_optimizer(model)
    for step in range(3):
        model(torch.ones(2 + step * comm.rank, 6)).sum().backward()
        optimizer.step()


def test_buffers_that_ranks_resize_otherwise_are_an_error_of_all(on_ranks):
    assert_all_refused(
        on_ranks(2, in_a_new_group, resized_apart),
        r"rank 1 has values in buffers 30; rank 0 has 24\..* resize buffers alike",
    )


class Growing(nn.Module):
    """A cache that grows with the batch, and a buffer that the first forward registers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 2)
        self.register_buffer("table", torch.zeros(1, 6))

    def forward(self, x):
        if len(x) > len(self.table):
            self.table = torch.arange(6.0 * len(x)).view(6, -1).T
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(2, 6).T)
        self.mean.lerp_(x.detach().mean(0).unsqueeze(1), 0.5)
        return self.b(self.a(x - self.mean.mean(1)) + 0.01 * self.table[: len(x)])


def grown(comm):
    """-> whether a model that made a forward resumes exactly; the error of one that did not."""
    model = Growing()
    again = Growing()
    optimizer = make_optimizer(model)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
    train(model, optimizer, 3, x)
    other = make_optimizer(again)
    state = optimizer.state_dict()
    try:
        other.load_state_dict(state)
    except RunError as error:
        refused = str(error)
    again(x)
    other.load_state_dict(state)
    train(again, other, 1, x)
    train(model, optimizer, 1, x)
    return refused, all(
        torch.equal(a, b)
        for a, b in zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_buffers_that_grow_or_come_later_are_saved(on_ranks, ranks):
    for refused, same in on_ranks(ranks, grown):
        assert same and re.search(
            r"this model has no mean, table of that size; .* If a forward resizes or registers"
            r" buffers, run one before",
            refused,
        )


def of_some_ranks(comm):
    group = dist.new_group([1, 2])
    alone = dist.new_group([0])
    model = chain(seed=comm.rank)
    optimizer = make_optimizer(model, process_group=group if comm.rank else alone)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank))
    train(model, optimizer, 3, x)
    again = chain()
    make_optimizer(again, process_group=group if comm.rank else alone).load_state_dict(
        optimizer.state_dict()
    )
    refused = None
    if comm.rank == 0:
        with pytest.raises(RunError, match="this rank is not in process_group"):
            make_optimizer(chain(), process_group=group)
    return [p.detach().clone() for p in again.parameters()], refused


def of_two_ranks(comm):
    model = chain(seed=1)
    train(
        model,
        make_optimizer(model),
        3,
        torch.randn(4, 6, generator=torch.Generator().manual_seed(comm.rank + 1)),
    )
    return [p.detach().clone() for p in model.parameters()]


def test_a_process_group_of_some_ranks_trains_as_that_many_ranks(on_ranks):
    zero, one, two = (params for params, _ in on_ranks(3, of_some_ranks))
    for a, b, c in zip(one, two, on_ranks(2, of_two_ranks)[0]):
        assert torch.equal(a, b) and torch.equal(a, c)
    assert not torch.equal(zero[0], one[0])


def frozen_of_others(comm):
    """A frozen tensor made of others, as quantized ones are, and torch's own quantized one."""

    class Made(torch.Tensor):
        def __tensor_flatten__(self):
            raise NotImplementedError

    model = chain()
    model.base = nn.Parameter(
        torch.full((3,), float(comm.rank)).as_subclass(Made), requires_grad=False
    )
    model.register_buffer(
        "int8", torch.quantize_per_tensor(torch.ones(3) * comm.rank, 0.1, 0, torch.qint8)
    )
    optimizer = make_optimizer(model)
    train(model, optimizer)
    return model.base.sum().item() / 3, optimizer.state_dict().keys() & {"base", "int8"}


def test_frozen_tensors_made_of_others_are_left_alone(on_ranks):
    assert on_ranks(2, frozen_of_others) == [(0.0, set()), (1.0, set())]


def with_max_norm(comm):
    make_optimizer(nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 4)))


def test_what_ranks_cannot_keep_equal_is_refused(on_ranks):
    assert_all_refused(
        on_ranks(2, in_a_new_group, with_max_norm), "0 has max_norm, by which each rank changes"
    )


def test_the_table_in_the_docs_names_existing_tests():
    text = (Path(__file__).parents[1] / "docs" / "gradient-sync.md").read_text()
    rows = [row for row in text.splitlines() if re.match(r"\| .* \| (yes|no|partly) \|", row)]
    names = [re.findall(r"`(test_\w+)`", row) for row in rows]
    known = {
        **vars(test_optimizer),
        **vars(test_sync),
        **vars(test_programs),
        **vars(test_frameworks),
        **globals(),
    }
    assert len(rows) > 25 and all(names), [row for row, found in zip(rows, names) if not found]
    assert not {name for found in names for name in found} - known.keys()
