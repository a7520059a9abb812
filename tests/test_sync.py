"""Gradient sync under hostile networks, and the requirements of the mechanism with the tests that
show each.

A: hooks of the record; B: contiguous gradient buffers; C: readiness counters and overlap; D:
contiguous parameters; E: a reducer's rules; then further properties and bad input. The tests are
here, in test_optimizer.py, test_resume.py or test_run.py.

    A1 launch in a hook         test_launches_happen_in_backward_and_waits_after_it
    A2 a hook never waits       test_backward_ends_though_the_network_never_answers,
                                test_launches_happen_in_backward_and_waits_after_it
    A3 step order               test_launches_happen_in_backward_and_waits_after_it,
                                test_update_order_forward_updates_the_first_layers_first
    A4 deterministic groups     test_ranks_that_differ_all_get_an_error_that_names_the_difference
    A5 sync once a step         test_random_programs_train_as_with_torch
    A6 sharded state, averages  test_preflight.py,
                                test_random_programs_train_as_with_torch
    A7 gathers all waited for   test_nothing_is_read_before_it_has_come
    A8 missing gradient         test_a_parameter_without_a_gradient_is_an_error_with_its_name_and_count
    A9 the rules                test_parameter_groups_train_as_a_plain_second_training_does, test_adam_is_torch_s_where_eps_is_tiny,
                                test_normuon_is_the_record_s_written_plainly, test_a_compiled_rule_is_the_same_rule
    A10 warm-up restores        test_state_put_back_after_warm_up_leaves_nothing_of_it, test_log_holds_the_whole_experiment,
                                test_nothing_is_compiled_after_warm_up
    A11 before and after        test_profile_has_a_range_for_every_phase
    B1 variants, one loss       bench/whole_step.py (a buffer a parameter: bucket_mb 0), test_settings_reach_a_whole_run
    B2 a bucket per dtype       test_buckets_fill_from_the_last_layer_and_keep_kinds_apart
    B3 main gradients, fp32     test_shards_are_equal_and_cover_every_parameter_once,
                                test_fp32_gradients_of_bf16_parameters_lose_no_bits
    B4 equal shards             test_shards_are_equal_and_cover_every_parameter_once
    B5 add and drop             test_random_programs_train_as_with_torch
    B6 memory                   test_preflight.py,
                                test_earlier_gradients_are_freed_when_one_arrives
    C1 count, C2 in any order   test_a_bucket_is_launched_at_its_last_gradient
    C3 tied                     test_a_tied_parameter_is_ready_once_after_all_its_uses
    C4 no host sync in a hook   test_a_hook_runs_one_operator_per_gradient
    C5 finalize first           test_a_step_before_backward_or_a_backward_before_the_step_is_an_error
    C6 sizes                    test_random_programs_train_as_with_torch
    C7 overlap measured         records/trace.py, of the ranges that test_profile_has_a_range_for_every_phase finds
    C8 ranges                   test_profile_has_a_range_for_every_phase
    C10 backward needs none     test_backward_ends_though_the_network_never_answers
    C11 clip after finalize     test_clip_by_norms_of_rows_is_clip_by_the_norm,
                                test_a_norm_above_the_limit_becomes_the_limit_and_no_other_changes
    C12 several in flight       test_several_collectives_are_in_flight
    D1 values unchanged         test_shards_are_equal_and_cover_every_parameter_once
    D2 any in-place rule        test_random_programs_train_as_with_torch
    D3 shapes refused           test_a_wrong_use_is_answered_with_the_cure
    D4 views checked            test_a_parameter_moved_out_of_its_bucket_is_found, test_a_replaced_parameter_is_named
    D5 speed on small tensors   bench/own_model.py
    E1 one hook, removable      test_building_twice_fires_once_and_hooks_can_be_removed
    E2 fixed order, agreed      test_a_bucket_that_is_ready_early_waits_for_its_turn,
                                test_ranks_that_differ_all_get_an_error_that_names_the_difference
    E3 twice                    test_a_parameter_ready_twice_is_an_error_with_its_name
    E4 unused                   test_unused_parameters, test_overlap_goes_on_though_a_parameter_is_unused
    E5 static graph             test_a_graph_that_changes_is_an_error
    E6 rank 0's order           test_the_order_is_rank_0_s_arrival
    E7 no_sync                  test_random_programs_train_as_with_torch, test_grad_scale_multiplies_gradients_in_no_sync_too
    E8 communication hook       test_compressed_gradients_are_sums_of_bf16_of_every_rank, test_settings_reach_a_whole_run
    E9 refused or left out      test_parameters_on_two_devices_are_refused
    E10 layout                  test_a_transposed_gradient_lands_right
    invariant mode              test_invariant_mode_gives_the_same_bytes_at_any_number_of_ranks,
                                test_exact_runs_go_on_at_any_number_of_ranks_in_the_midst_of_a_cycle
    state                       test_state_is_the_same_at_any_number_of_ranks_and_bucket_size,
                                test_a_state_waits_for_the_gathers_that_are_under_way,
                                test_a_state_that_does_not_fit_is_refused_by_name
    late parameters             test_a_parameter_may_begin_to_take_part_at_a_step,
                                test_the_tied_stage_has_its_own_launch_order
    micro-batches counted       test_micro_batches_are_counted, test_a_wrong_use_is_answered_with_the_cure
    one pass, nothing allocated test_a_hook_runs_one_operator_per_gradient, test_receive_buffers_are_kept
    launch order checked        test_the_order_is_rank_0_s_arrival
    a GPU's collectives         test_collectives_and_messages_compute_the_same
    nothing pickled             test_ranks_send_each_other_no_pickles, test_json_comes_from_every_rank_as_it_was
    gather overlaps forward     test_a_gather_is_waited_for_where_the_forward_reads_it,
                                test_the_whole_model_reads_nothing_before_it_has_come
    in no bucket                test_a_parameter_in_no_bucket_is_named,
                                test_a_parameter_that_begins_to_learn_later_is_named
    two devices                 test_parameters_on_two_devices_are_refused
    second backward             test_a_wrong_use_is_answered_with_the_cure
    one model at the start      test_random_programs_train_as_with_torch
    not finite                  test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step,
                                test_a_run_ends_with_the_name_of_a_gradient_that_is_not_finite
"""

import dataclasses
import gzip
import itertools
import json
import math
import random
import re
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import gpt_speedrun
import train_gpt
from conftest import some_documents
from gpt_speedrun import Comm, Optimizer, RunError, SyncSettings, fill_buckets
from gpt_speedrun.engine import CompressedComm, ParamSpec, factor_tensor, tree_sum
from test_optimizer import (
    FULL,
    ONCE,
    Descent,
    Operations,
    Recorder,
    chain,
    mixed_steps,
    mixture,
    optimizer_of,
    specs_with,
    train_steps,
)
from test_run import flags, one, read_log, run_here  # noqa: F401  (fixtures)

# networks


class Hostile(Comm):
    """Reads its input only when waited for, and until then fills its output with NaN.

    Writing after the launch raises an error. Reading before the wait gives NaN.
    """

    def hand_over(self, handle):
        return handle

    def reduce_scatter(self, shard, full, buffer):
        kept = full.clone()
        shard.fill_(math.nan)
        writes = full._version  # all views of a buffer count their writes together
        comm = self

        class Later:
            def wait(self):
                if full._version != writes:
                    raise AssertionError("a buffer was written between its launch and its wait")
                full.copy_(kept)
                Comm.reduce_scatter(comm, shard, full, buffer).wait()

        return self.hand_over(Later())

    def all_gather(self, full, shard):
        mine = shard.clone()
        full.fill_(math.nan)
        comm = self

        class Later:
            def wait(self):
                shard.copy_(mine)
                Comm.all_gather(comm, full, shard).wait()

        return self.hand_over(Later())


class Reordering(Hostile):
    """Completes other collectives first when one is waited for, in a random order that all ranks
    share."""

    def __init__(self, rank=0, ranks=1):
        super().__init__(rank, ranks)
        self.open = []
        self.draw = random.Random(0)

    def hand_over(self, handle):
        comm = self
        comm.open.append(handle)

        class Shuffled:
            def wait(self):
                while handle in comm.open:
                    comm.open.pop(comm.draw.randrange(len(comm.open))).wait()

        return Shuffled()


class Failing(Comm):
    """The n-th exchange fails when waited for, like a broken connection."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def exchange(self, sent, received):
        self.at -= 1
        broken = mock.Mock(wait=mock.Mock(side_effect=RuntimeError("closed by peer")))
        return train_gpt.HandleGroup(*[broken] * (self.at == 0))


class Collectives(Comm):
    """Uses the backend's reduce-scatter and all-gather instead of messages, as on GPUs."""

    def __init__(self, rank=0, ranks=1):
        super().__init__(rank, ranks)
        self.point_to_point = False


def build(model, comm, rule=Descent(), bucket_bytes=0.0, **changes):
    """Build an optimizer that has the model."""
    buckets = fill_buckets(specs_with(model, rule), bucket_bytes, comm.rank, comm.ranks)
    return Optimizer(buckets, comm, SyncSettings(**changes), model)


def run_steps(engine, model, x, steps):
    for step in steps:
        engine.prepare_for_backward(step)
        model(x + step + engine.comm.rank).square().sum().backward()
        engine.step(FULL)


def flow(model, x, comm, **changes):
    """Train three steps of descent, on different data per rank. Return (optimizer, parameters)."""
    engine = build(model, comm, **changes)
    run_steps(engine, model, x, range(3))
    engine.finish_all_gathers()
    return engine, [p.detach().clone() for p in model.parameters()]


def plainly(x, ranks):
    """Do the same by torch on one rank."""
    model = chain()
    judge = torch.optim.SGD(model.parameters(), lr=Descent().lr)
    for step in range(3):
        judge.zero_grad()
        (sum(model(x + step + rank).square().sum() for rank in range(ranks)) / ranks).backward()
        judge.step()
    return [p.detach() for p in model.parameters()]


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))
VARIANTS = [
    {},
    {"sync": "step"},
    {"update_order": "forward"},
    {"overlap_param_gather": True},
    {"overlap_param_gather": True, "update_order": "forward"},
    {"world_size_invariant": True},
    {"check_grads": True},
    {"clip_norm": 1e9},
    {"find_unused_parameters": True},
]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


def network_steps(comm, network, changes):
    return flow(chain(), X, network(comm.rank, comm.ranks), **changes)[1]


@pytest.mark.parametrize("network,ranks", [(Hostile, 1), (Reordering, 3)])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_nothing_is_read_before_it_has_come(on_ranks, changes, network, ranks):
    """Every setting computes the same as torch, with different data per rank: reads after waits,
    writes before launches."""
    for parameters in on_ranks(ranks, network_steps, network, changes):
        assert_close(parameters, plainly(X, ranks))


@pytest.mark.parametrize(
    "changes", [{}, {"world_size_invariant": True}, {"overlap_param_gather": True}], ids=str
)
def test_collectives_and_messages_compute_the_same(on_ranks, changes):
    for network in (Comm, Collectives):
        for parameters in on_ranks(3, network_steps, network, {**changes, "bucket_bytes": 200}):
            assert_close(parameters, plainly(X, 3))


def hostile_record(comm, changes, batches):
    return train_steps(Hostile(comm.rank, comm.ranks), changes, 2, batches)[1]


def test_the_whole_model_reads_nothing_before_it_has_come(on_ranks, batches):
    """The record's whole model, with scalars, gates and tables, under a hostile network."""
    few = batches[:, :2]
    plain = {state_hash for _, state_hash, *_ in on_ranks(2, train_steps, {}, 2, few)}
    for changes in ({"overlap_param_gather": True, "update_order": "forward"}, {"bucket_mb": 0.0}):
        assert set(on_ranks(2, hostile_record, changes, few)) == plain, changes


def test_backward_ends_though_the_network_never_answers():
    model = chain()
    optimizer = optimizer_of(model, Failing(1))
    optimizer.reducer.launch_orders[len(optimizer.buckets)] = optimizer.buckets
    optimizer.prepare_for_backward(0)
    model(X).sum().backward()
    assert optimizer.reducer.launches == len(optimizer.buckets)
    with pytest.raises(RuntimeError, match="closed by peer"):
        optimizer.step(FULL)


@pytest.mark.parametrize("at", range(1, 13))  # of six buckets: reduce-scatters, gathers
def test_a_failing_collective_is_an_error_of_the_step(at):
    with pytest.raises(RuntimeError, match="closed by peer"):
        flow(chain(), X, Failing(at))


def test_several_collectives_are_in_flight():
    comm = Recorder()
    flow(chain(), X, comm)
    under_way = list(itertools.accumulate(1 if kind == "start" else -1 for kind, *_ in comm.events))
    assert max(under_way) >= 2 and under_way[-1] == 0, "some collectives were never waited for"


class Counting(Comm):
    """Records the receive buffers, and where messages arrive."""

    def __init__(self, rank, ranks):
        super().__init__(rank, ranks)
        self.buffers = []
        self.arrivals = []

    def receive_buffer(self, full, invariant):
        self.buffers.append(super().receive_buffer(full, invariant))
        return self.buffers[-1]

    def exchange(self, sent, received):
        if received[0].dtype != torch.int64:  # of Reducer.start_call
            self.arrivals.append(
                [
                    received[rank].untyped_storage().data_ptr()
                    for rank in range(self.ranks)
                    if rank != self.rank
                ]
            )
        return super().exchange(sent, received)


def received_in(comm):
    """Train three steps with six buckets. Return (number of buffers, whether each message arrived
    in a buffer or in parameters)."""
    comm = Counting(comm.rank, comm.ranks)
    engine = flow(chain(), X, comm)[0]
    kept = {
        x.untyped_storage().data_ptr()
        for x in (*comm.buffers, *(bucket.param_data for bucket in engine.buckets))
    }
    return len(comm.buffers), [kept.issuperset(pointers) for pointers in comm.arrivals]


def test_the_group_of_cpu_tensors_has_the_run_s_timeout(monkeypatch):
    """Beside a GPU's group; by default gloo would wait for half an hour."""
    groups = []
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    monkeypatch.setattr(
        dist,
        "new_group",
        lambda ranks, timeout, backend, **_: groups.append((ranks, timeout, backend)),
    )
    Comm(0, 2, "cuda", timedelta(seconds=7)).cpu_group
    assert groups == [(None, timedelta(seconds=7), "gloo")]


def test_receive_buffers_are_kept(on_ranks):
    """One per bucket, allocated with the optimizer; launches allocate none."""
    assert on_ranks(2, received_in) == [(6, [True] * 6 * 2 * 3)] * 2


# the hook


def test_a_bucket_is_launched_at_its_last_gradient():
    """Whatever the order."""
    for order in itertools.permutations("abc"):
        params = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in "abc"})
        comm = Recorder()
        engine = build(params, comm, bucket_bytes=1e9)
        engine.reducer.launch_orders[len(engine.buckets)] = engine.buckets
        engine.prepare_for_backward(0)
        for name in order:
            assert not comm.events, f"launched before {name} of {order}"
            params[name].sum().backward()
        assert comm.kinds() == [("start", "reduce")]


def test_a_hook_runs_one_operator_per_gradient():
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(1000)) for name in "pq"})
    engine = build(params, Comm(), bucket_bytes=1e9)
    (bucket,) = engine.reducer.launch_orders[len(engine.buckets)] = engine.buckets
    factor_tensor(0.5, torch.float32, torch.float32, bucket.grad_data.device)  # is made once
    for i in range(2):
        engine.prepare_for_backward(0, i, 2)
        with Operations() as operations:
            for slot in bucket.slots:
                slot.param.grad = torch.ones(1000)
                engine.reducer.register_grad_ready(bucket, slot)
        views = "view", "slice", "select", "unbind"  # of a launch: they touch no memory
        assert [name for name in operations.names if name not in ("ones", *views)] == 2 * [
            ["mul"],
            ["add_"],
        ][i]
    assert bucket.reduce_handle is not None


def test_earlier_gradients_are_freed_when_one_arrives():
    """Beside the buckets one layer is alive at most."""
    model = chain((64,) * 8)
    alive = []
    seen = []

    def count(p):
        alive.append(sum(size for storage, size in seen if not storage.expired()))
        seen.append((StorageWeakRef(p.grad.untyped_storage()), p.grad.nbytes))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(count)
    engine = build(model, Comm())
    for i in range(2):
        engine.prepare_for_backward(0, i, 2)
        model(torch.randn(2, 64)).sum().backward()
    assert len(alive) == 28 and max(alive) <= 64 * 65 * 4
    assert not any(not storage.expired() for storage, _ in seen)


# order


def arrivals(comm):
    """Backward completes gradients in a different order on each rank."""
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
    optimizer = optimizer_of(params, comm)
    optimizer.prepare_for_backward(0)
    for name in "bca" if comm.rank == 0 else "cab":
        params[name].sum().backward()
    optimizer.step(FULL)
    return [bucket.slots[0].name for bucket in optimizer.reducer.launch_order]


def test_the_order_is_rank_0_s_arrival(on_ranks):
    assert on_ranks(2, arrivals) == [["b", "c", "a"]] * 2


def test_update_order_forward_updates_the_first_layers_first():
    comm = Recorder()
    engine, _ = flow(chain(), X, comm, update_order="forward")
    gathers = [event[2] for event in comm.events if event[:2] == ("start", "gather")]
    order = engine.reducer.launch_order
    in_order = {bucket.param_data.data_ptr(): i for i, bucket in enumerate(order)}
    assert [in_order[pointer] for pointer in gathers[-len(order) :]] == list(range(len(order)))[
        ::-1
    ]
    assert order[-1].slots[0].name.startswith("0.")


def test_a_gather_is_waited_for_where_the_forward_reads_it():
    comm = Recorder()
    model = chain()
    engine = build(model, comm, overlap_param_gather=True)
    run_steps(engine, model, X, range(2))
    assert comm.kinds().count(("wait", "gather")) == len(engine.buckets), (
        "the second step's are in flight"
    )
    seen = []
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(
                lambda *_, name=name: seen.append(
                    (name, sum(bucket.gather_handle is not None for bucket in engine.buckets))
                )
            )
    model(X)
    assert seen == [
        ("0", 4),
        ("1", 2),
        ("2", 0),
    ], "each layer waits for its own two buckets, and for no other"


def test_a_gather_that_no_forward_read_is_waited_for_before_the_next_update():
    model = Branches()
    comm = Recorder()
    engine = build(model, comm, overlap_param_gather=True)
    for step in range(2):
        engine.prepare_for_backward(step)
        # no module's forward runs
        torch.stack([p.sum() for p in model.parameters()]).sum().backward()
        engine.step(FULL)
    for bucket in engine.buckets:
        kinds = [
            event
            for event, kind, where in comm.events
            if kind == "gather" and where == bucket.param_data.data_ptr()
        ]
        assert kinds == ["start", "wait", "start"]


def open_state(comm, network):
    """Save and load while all-gathers are in flight."""
    model = chain()
    engine = build(model, network(comm.rank, comm.ranks), overlap_param_gather=True, rule=ONCE)
    first = engine.state_dict()
    run_steps(engine, model, X, range(2))
    state = engine.state_dict()
    run_steps(engine, model, X, range(2, 3))
    engine.load_state_dict(first)
    engine.finish_all_gathers()
    return state, all(torch.equal(p.flatten(), first[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_state_waits_for_the_gathers_that_are_under_way(on_ranks, ranks):
    plain = on_ranks(ranks, open_state, Comm)[0][0]
    for state, put_back in on_ranks(ranks, open_state, Hostile):
        assert put_back and all(torch.equal(x, plain[name]) for name, x in state.items())


# JSON between ranks


def all_json_of(comm):
    mine = {"rank": comm.rank, "text": 'ü"\\\n' * comm.rank, "list": [1.5, None, True][comm.rank :]}
    return comm.all_gather_json(mine), comm.all_gather_json([])


def test_json_comes_from_every_rank_as_it_was(on_ranks):
    expected = [
        {"rank": rank, "text": 'ü"\\\n' * rank, "list": [1.5, None, True][rank:]}
        for rank in range(3)
    ]
    assert on_ranks(3, all_json_of) == [(expected, [[], [], []])] * 3


def unpickled(comm):
    """Build, train, save, load and fail, while sending a Python object raises an error."""
    with mock.patch(
        "torch.distributed.distributed_c10d._object_to_tensor",
        side_effect=AssertionError("pickled"),
    ):
        optimizer, params = mixture(300.0, comm, check_grads=True, find_unused_parameters=True)
        mixed_steps(optimizer, params, range(2))
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.prepare_for_backward(3)
        sum(p.sum() for p in params.values()).mul(math.inf if comm.rank else 1.0).backward()
        try:
            optimizer.step(FULL)
        except RunError as error:
            return str(error)


def test_ranks_send_each_other_no_pickles(on_ranks):
    for message in on_ranks(2, unpickled):
        assert "not finite: four, halved, table, tall_0" in message


# accumulation, unused, frozen, replaced


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left = nn.Linear(3, 1)
        self.right = nn.Linear(3, 1)
        self.never = nn.Linear(3, 1)

    def forward(self, x, *names):
        return sum(getattr(self, name)(x) for name in names)


def branch_steps(comm, bucket_bytes, told):
    """Rank 0 uses the left branch, rank 1 the right one; no rank uses the third."""
    model = Branches()
    engine = build(model, comm, rule=ONCE, bucket_bytes=bucket_bytes, find_unused_parameters=True)
    for step in range(3):
        loss = model(torch.ones(2, 3) + comm.rank, "right" if comm.rank else "left").sum()
        engine.prepare_for_backward(step, loss=loss if told else None)
        loss.backward()
        engine.step(FULL)
    return {name: p.detach().clone() for name, p in model.named_parameters()}, engine.state_dict()


@pytest.mark.parametrize("bucket_bytes,told", [(1e9, False), (1e9, True), (0.0, True)])
def test_unused_parameters(on_ranks, bucket_bytes, told):
    results = on_ranks(2, branch_steps, bucket_bytes, told)
    twin = Branches()
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    judge = torch.optim.AdamW(
        twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0
    )
    for _ in range(3):
        judge.zero_grad()
        (
            (twin(torch.ones(2, 3), "left").sum() + twin(torch.ones(2, 3) + 1, "right").sum()) / 2
        ).backward()
        judge.step()
    for parameters, state in results:
        for name, p in twin.named_parameters():
            assert torch.allclose(parameters[name], p, atol=1e-6), name
            assert torch.equal(parameters[name], before[name]) == name.startswith("never"), name
        assert not state["never.weight/m"].any() and state["left.weight/m"].any()


def launched_in_backward(comm, told):
    """Use all branches in the first step; then not the one whose buckets are launched first."""
    model = Branches()
    engine = build(model, comm, find_unused_parameters=True)
    for step, names in enumerate(
        (("left", "right", "never"), ("right",) if comm.rank else ("left",))
    ):
        loss = model(torch.ones(2, 3), *names).sum()
        engine.prepare_for_backward(step, loss=loss if told else None)
        loss.backward()
        launches = engine.reducer.launches
        first = engine.reducer.due[0].slots[0].name
        engine.step(FULL)
    return (
        launches,
        first.split(".")[0],
        {name: p.detach().clone() for name, p in model.named_parameters()},
    )


def test_overlap_goes_on_though_a_parameter_is_unused(on_ranks):
    """Given the loss, unused parameters are known before backward, as in DDP. The result is the
    same without."""
    told, untold = (on_ranks(2, launched_in_backward, known) for known in (True, False))
    assert [result[:2] for result in told] == [(6, "never")] * 2 and [
        result[:2] for result in untold
    ] == [(0, "never")] * 2
    for name, p in told[0][2].items():
        assert torch.equal(p, untold[0][2][name]) and torch.equal(p, told[1][2][name])


def test_a_gradient_of_what_the_given_loss_does_not_use_is_an_error():
    model = Branches()
    engine = build(model, Comm(), find_unused_parameters=True)
    engine.prepare_for_backward(0, loss=model(torch.ones(2, 3), "left").sum())
    with pytest.raises(RunError, match="right.bias got its gradient"):
        model(torch.ones(2, 3), "right").sum().backward()


def test_a_graph_that_changes_is_an_error():
    model = Branches()
    del model.never
    optimizer = optimizer_of(model, bucket_bytes=1e9)
    optimizer.prepare_for_backward(0)
    model(torch.ones(1, 3), "left", "right").sum().backward()
    optimizer.step(FULL)
    optimizer.prepare_for_backward(1)
    model(torch.ones(1, 3), "left").sum().backward()
    with pytest.raises(
        RunError, match=r"2 of 4 .* not right\.bias, right\.weight.*or set find_unused_parameters"
    ):
        optimizer.step(FULL)


def replaced_on_both(comm, how, unused):
    model = chain()
    engine = build(model, comm, find_unused_parameters=unused)
    how(model)
    engine.prepare_for_backward(0)
    model(X).sum().backward()
    try:
        engine.step(FULL)
    except RunError as error:
        return str(error)


def by_hand(model):
    model[1].weight = nn.Parameter(torch.zeros(7, 5))


def by_loading(model):
    model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize("unused", [False, True])
@pytest.mark.parametrize("how,name", [(by_hand, "1.weight"), (by_loading, "0.weight")])
def test_a_replaced_parameter_is_named(on_ranks, how, name, unused):
    for message in on_ranks(2, replaced_on_both, how, unused):
        assert message.startswith(f"{name} is in no bucket") and "adds or replaces it" in message


def unfreeze(model):
    model.frozen.weight.requires_grad_(True)


def add_module(model):
    model.append(nn.Linear(4, 4))


def add_parameter(model):
    model[0].scale = nn.Parameter(torch.ones(5))


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize(
    "how,name", [(unfreeze, "frozen.weight"), (add_module, "4.weight"), (add_parameter, "0.scale")]
)
def test_a_parameter_that_begins_to_learn_later_is_named(how, name, steps):
    """At the next step, though no loss uses the parameter."""
    model = chain()
    model.add_module("frozen", nn.Linear(4, 4, bias=False).requires_grad_(False))
    engine = gpt_speedrun.make_optimizer(model)
    run_steps(engine, model, X, range(steps))
    how(model)
    with pytest.raises(
        RunError,
        match=rf"^{name} is in no bucket .* build the optimizer after what adds or replaces it",
    ):
        run_steps(engine, model, X, range(steps, steps + 1))


def test_a_parameter_in_no_bucket_is_named():
    model = chain()
    specs = specs_with(model)

    def engine(specs):
        return Optimizer(fill_buckets(specs, 0, 0, 1), Comm(), SyncSettings(), model)

    with pytest.raises(RunError, match=r"^2\.bias is in no bucket"):
        engine(specs[:-1])
    model[2].bias.requires_grad_(False)
    frozen = model[2].bias.clone()
    run_steps(engine(specs[:-1]), model, X, range(1))
    assert torch.equal(model[2].bias, frozen) and model[2].weight.grad is None


class Reader(nn.Module):
    """Lists and reads the parameters of a container that belongs to the model, as train_gpt.Group
    does."""

    def __init__(self, container):
        super().__init__()
        self.container = (container,)

    def parameters(self, recurse=True):
        return self.container[0].parameters()

    def forward(self, x):
        return x * self.container[0]["a"]


class Reading(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.second = Reader(self.scales)

    def forward(self, x):
        return self.second(self.first(x))


def test_what_a_part_of_the_model_lists_is_waited_for_with_that_part():
    model = Reading()
    engine = build(model, Comm(), overlap_param_gather=True)
    run_steps(engine, model, X, range(1))
    in_flight = []
    model.first.register_forward_hook(
        lambda *_: in_flight.extend(
            slot.name
            for bucket in engine.buckets
            if bucket.gather_handle is not None
            for slot in bucket.slots
        )
    )
    model(X)
    assert in_flight == ["scales.a"]


class Scaled(nn.Module):
    """Its own parameter, which its hook waits for first, is the last that the forward reads."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.first(x) * self.scale


def test_what_the_model_itself_waits_for_is_gathered_first():
    model = Scaled()
    comm = Recorder()
    engine = build(model, comm, overlap_param_gather=True, update_order="forward")
    run_steps(engine, model, X, range(2))
    names = {bucket.param_data.data_ptr(): bucket.slots[0].name for bucket in engine.buckets}
    gathers = [names[event[2]] for event in comm.events if event[:2] == ("start", "gather")]
    assert engine.reducer.launch_order[0].slots[0].name == "scale" == gathers[-3]


# clipping, finiteness, compression


@pytest.mark.parametrize("bucket_bytes", [0.0, 1e9])
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_invariant_mode_refuses_a_gradient_that_is_not_in_every_micro_batch(
    bucket_bytes, micro_batches
):
    """Also for a parameter that has its own bucket."""
    model = Branches()
    del model.never
    engine = build(model, Comm(), bucket_bytes=bucket_bytes, world_size_invariant=True)
    with pytest.raises(
        RunError, match=rf"right\.\w+ got a gradient in 1 of {micro_batches} micro-batches"
    ):
        for i in range(micro_batches):
            engine.prepare_for_backward(0, i, micro_batches)
            model(
                torch.ones(2, 3), *(("left", "right") if i == micro_batches - 1 else ("left",))
            ).sum().backward()
        engine.step(FULL)


@pytest.mark.parametrize("changes", [{"find_unused_parameters": True}, {"clip_norm": 1.0}])
def test_invariant_mode_refuses_what_it_cannot_keep(changes):
    with pytest.raises(RunError, match="world-size-invariant mode excludes"):
        flow(chain(), X, Comm(), world_size_invariant=True, **changes)


def compressed_step(comm, ranks):
    """Run one step of descent on different gradients per rank. Return parameters and dtypes of the
    receive buffers."""
    comm = CompressedComm(comm.rank, comm.ranks)
    p = nn.Parameter(torch.zeros(500))
    optimizer = optimizer_of(nn.ParameterDict({"p": p}), comm, rule=Descent(1.0))
    optimizer.prepare_for_backward(0)
    (p * gradient(comm.rank)).sum().backward()
    optimizer.step(FULL)
    return p.detach().clone(), {bucket.receive_buffer.dtype for bucket in optimizer.buckets}


def gradient(rank):
    return torch.randn(500, generator=torch.Generator().manual_seed(rank)) * 10**rank


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_compressed_gradients_are_sums_of_bf16_of_every_rank(on_ranks, ranks):
    """To the byte: each rank's share of the mean rounded to bf16, summed as a tree."""
    sent = [(gradient(rank) * torch.tensor(1 / ranks)).bfloat16() for rank in range(ranks)]
    for p, dtypes in on_ranks(ranks, compressed_step, ranks):
        assert torch.equal(p, -tree_sum(sent).float())
        assert dtypes == {torch.bfloat16}
        assert not torch.equal(p, -sum(gradient(rank) for rank in range(ranks)) / ranks)


def clipped_step(comm, norm, limit):
    """Run a step of descent from zero on gradients of this norm. Return the norm of the update."""
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(100)) for name in "ab"})
    optimizer = optimizer_of(params, comm, rule=Descent(1.0), clip_norm=limit)
    sum((p * norm / 200**0.5).sum() for p in params.values()).backward()
    optimizer.step(FULL)
    assert optimizer.grad_norm == pytest.approx(norm), "the norm before clipping, for the log"
    return torch.cat([p.detach() for p in params.values()]).norm().item()


@pytest.mark.parametrize("norm,limit", [(2.0, 3.0), (3.0, 2.0), (0.5, 0.4), (0.4, 0.5)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_norm_above_the_limit_becomes_the_limit_and_no_other_changes(
    on_ranks, ranks, norm, limit
):
    """On both sides of the limit and of 1: the square of 2 is above 3, and that of 0.5 is below
    0.4."""
    assert on_ranks(ranks, clipped_step, norm, limit) == pytest.approx(
        [min(norm, limit)] * ranks, rel=1e-5
    )


@dataclasses.dataclass(frozen=True)
class DescentOfMatrices(Descent):
    """Its unit is a matrix, so that shards have any number of elements."""

    def unit(self, spec):
        return tuple(spec.param.shape)


def clipped_gradients(comm, limit):
    """Run one step of descent from zero, on gradients from 1 to 1,000 in buckets of different
    sizes. Return the parameters."""
    shapes = [(3, 5), (70, 70), (9, 64), (9, 64)]
    params = nn.ParameterDict(
        {str(i): nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    )
    specs = [
        ParamSpec(n, p, (Descent if n == "1" else DescentOfMatrices)(1.0))
        for n, p in params.items()
    ]
    buckets = fill_buckets(specs, 1e9, comm.rank, comm.ranks)
    optimizer = Optimizer(buckets, comm, SyncSettings(clip_norm=limit), params)
    optimizer.prepare_for_backward(0)
    sum((p * big_gradient(i, p.shape)).sum() for i, p in enumerate(params.values())).backward()
    optimizer.step(FULL)
    return [p.detach().clone() for p in params.values()]


def big_gradient(i, shape):
    return 10.0**i * torch.randn(shape, generator=torch.Generator().manual_seed(i))


@pytest.mark.parametrize("ranks", [1, 2])
def test_clip_by_norms_of_rows_is_clip_by_the_norm(on_ranks, ranks):
    """Also if a shard is not a multiple of a row. Below the limit nothing changes."""
    for params in on_ranks(ranks, clipped_gradients, 1e9):
        grads = [big_gradient(i, p.shape) for i, p in enumerate(params)]
        assert all(torch.equal(p, -g) for p, g in zip(params, grads))
    norm = math.sqrt(sum(g.double().square().sum().item() for g in grads))
    for params in on_ranks(ranks, clipped_gradients, 7.0):
        assert all(
            torch.allclose(p, -g * (7.0 / norm), rtol=1e-6, atol=0) for p, g in zip(params, grads)
        )


@pytest.mark.parametrize(
    "changes", [{"check_grads": True}, {"clip_norm": 1.0}, {"find_unused_parameters": True}]
)
def test_a_step_with_nothing_to_update_checks_nothing(changes):
    optimizer = optimizer_of(chain(), rule=Descent(every=2), **changes)
    before = train_gpt.hash_of([*optimizer.named_state()])
    optimizer.prepare_for_backward(0)
    optimizer.step(FULL)
    assert train_gpt.hash_of([*optimizer.named_state()]) == before


def not_finite_on_one(comm):
    model = chain()
    engine = build(model, comm, bucket_bytes=1e9, check_grads=True)
    before = [p.detach().clone() for p in model.parameters()]
    engine.prepare_for_backward(0)
    loss = model(X).sum()
    if comm.rank:
        model[1].bias.register_hook(lambda g: g * math.inf)
    loss.backward()
    try:
        engine.step(FULL)
    except RunError as error:
        return str(error), all(torch.equal(a, b) for a, b in zip(before, model.parameters()))


def test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step(on_ranks):
    for message, untouched in on_ranks(2, not_finite_on_one):
        assert "step 0 are not finite: 1.bias;" in message and untouched


# world-size-invariant mode


@pytest.fixture(scope="module")
def batches():
    return torch.from_numpy(some_documents(11, 2 * 8 * 49).astype("int64")).view(2, 8, 49)


@pytest.mark.parametrize("numbers", [(1, 4), pytest.param((1, 8), marks=pytest.mark.slow)])
def test_invariant_mode_gives_the_same_bytes_at_any_number_of_ranks(on_ranks, batches, numbers):
    """With tables of n-grams row by row. At four ranks and more, since with two every order of
    summation is a + b. A plain sum must give other bytes."""
    exact = {
        "world_size_invariant": True,
        "ngrams": (train_gpt.Ngrams(2, 40, 8), train_gpt.Ngrams(3, 30, 8)),
        "lazy_tables": True,
        "adam_every": 1,  # or the head is 0 in both steps, and all other gradients are
    }
    results = {ranks: on_ranks(ranks, train_steps, exact, 2, batches) for ranks in numbers}
    assert len({result[1] for on_each in results.values() for result in on_each}) == 1
    losses = [
        sorted(loss for result in on_each for loss in result[0]) for on_each in results.values()
    ]
    assert all(of_ranks == losses[0] for of_ranks in losses)
    plain = {ranks: on_ranks(ranks, train_steps, {}, 2, batches)[0][1] for ranks in numbers}
    assert len(set(plain.values())) > 1


@given(heights=st.integers(0, 4), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_micro_batches_sum_as_a_binary_tree(heights, seed):
    leaves = torch.randn(2**heights, 5, generator=torch.Generator().manual_seed(seed))
    p = nn.Parameter(torch.zeros(5))
    (bucket,) = optimizer_of(nn.ParameterDict({"p": p}), world_size_invariant=True).buckets
    for leaf in leaves:
        p.grad = leaf.clone()
        bucket.add_grad(bucket.slots[0], 0.5)
    bucket.start_reduce_scatter(Comm())
    tree = 0.5 * leaves
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    assert torch.equal(bucket.slots[0].grad, tree[0])


# whole runs

SHORT = {
    "ngrams": (train_gpt.Ngrams(2, 40, 8),),
    "lazy_tables": "true",
    "micro_batches": 4,
    "num_steps": 6,
    "stages": "Stage(until=1/2, long_window=3), Stage(long_window=7)",
    "warmup_steps": 0,
    "val_every": 3,
    "muon_momentum_fall": 1,
}


def test_a_run_ends_with_the_name_of_a_gradient_that_is_not_finite(one, tmp_path, capsys):  # noqa: F811
    wrong = {**SHORT, "adam_lr": 1e38, "val_every": 0, "check_grads": "true"}
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="nan", **wrong), capsys)
    assert status != 0 and re.search(r"error: .*step \d are not finite: blocks", errors), errors
    assert re.search(
        r"^error: .*not finite", (tmp_path / "logs" / "nan.txt").read_text().splitlines()[-1]
    )


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
@pytest.mark.parametrize(
    "profile,steps", [("3:5", (3, 4, 5)), pytest.param("0:0", (0,), marks=pytest.mark.slow)]
)
def test_profile_has_a_range_for_every_phase(one, tmp_path, capsys, profile, steps):  # noqa: F811
    """Also if the first step of the run is traced."""
    status, printed, errors = run_here(
        flags(tmp_path, one[1], run_id="traced", profile=profile, **SHORT), capsys
    )
    (path,) = tmp_path.glob("logs/traced-rank0.*.pt.trace.json.gz")
    assert status == 0 and f"{tmp_path}/logs/traced-rank*.pt.trace.json.gz" in printed, errors
    events = [e for e in json.loads(gzip.open(path).read())["traceEvents"] if e.get("ph") == "X"]
    spans = {}
    for e in events:
        spans.setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert [name for name in sorted(spans) if name.startswith("ProfilerStep")] == [
        f"ProfilerStep#{step}" for step in steps
    ]
    assert len(spans["backward"]) == 4 * len(steps)
    launched = {name.split(" ", 1)[1] for name in spans if name.startswith("launch ")}
    for phase in ("wait", "update", "gather", "wait gather"):
        named = {name.removeprefix(phase + " ") for name in spans if name.startswith(phase + " ")}
        assert {name for name in named if not name.startswith("gather ")} == launched and launched
    launches = [
        span for name, times in spans.items() if name.startswith("launch ") for span in times
    ]
    waits = [
        begin
        for name, times in spans.items()
        if name.startswith("wait gather ")
        for begin, _ in times
    ]
    inside = [begin for begin in waits if any(a <= begin <= b for a, b in spans["forward"])]
    assert bool(inside) == (len(steps) > 1), (
        "a trace shows the overlap: only the last traced step waits for its gathers"
    )
    within = "backward" if steps[0] else "step"  # of the first step there is no order yet
    assert all(any(a <= begin and end <= b for a, b in spans[within]) for begin, end in launches)


def test_settings_reach_a_whole_run(one, tmp_path, capsys):  # noqa: F811
    """All settings that change no byte at once, and bf16_compress, which does."""
    harmless = {
        "overlap_param_gather": "true",
        "update_order": "forward",
        "check_grads": "true",
        "clip_norm": 1e9,
    }
    ends = []
    for i, changes in enumerate(({}, harmless, {"bf16_compress": "true"})):
        status, _, errors = run_here(
            flags(tmp_path, one[1], run_id=str(i), **SHORT, **changes), capsys
        )
        assert status == 0, errors
        ends.append(read_log(tmp_path / "logs" / f"{i}.txt")[4]["final_state_hash"])
    assert ends[0] == ends[1] != ends[2]
