"""Gradient sync under hostile networks, and every mechanism of the documents that the project grew from.

Which test shows what (A: hooks of the record, B: contiguous gradient buffers, C: readiness counters and overlap,
D: contiguous parameters, E: a reducer's rules; then what goes beyond them, and bad input). Tests lie here, in
test_optimizer.py or in test_run.py; test_the_table_names_what_there_is reads this.

    A1 launch in a hook         test_launches_happen_in_backward_and_waits_after_it
    A2 a hook never waits       test_backward_ends_though_the_network_never_answers, mutant WaitsInHook
    A3 step order               test_launches_happen_in_backward_and_waits_after_it,
                                test_forward_walk_updates_the_first_layers_first
    A4 deterministic groups     test_ranks_group_the_same_way
    A5 sync once a step         test_only_the_armed_micro_batch_sends, test_adam_updates_every_second_step_on_the_sum_of_both
    A6 sharded state, averages  test_memory_is_that_of_values_gradients_and_a_share_of_the_state,
                                test_ranks_1_2_4_train_the_same_model
    A7 gathers all waited for   test_nothing_is_read_before_it_has_come_on_two_ranks, mutant GathersUnwaited
    A8 missing gradient         test_a_parameter_without_a_gradient_is_an_error_with_its_name_and_count
    A9 the rules                test_adam_is_torch_s, test_normuon_is_the_record_s_written_plainly,
                                test_every_matrix_of_torch_s_muon_has_the_same_directions
    A10 warm-up restores        test_snapshot_and_restore_put_everything_back, test_log_holds_the_whole_experiment,
                                test_nothing_is_compiled_after_warm_up
    A11 before and after        bench/slow_link.py, bench/variants.py, test_profile_has_a_range_for_every_phase
    B1 variants, one loss       bench/whole_step.py (a buffer a parameter: bank_mb 0),
                                test_sync_and_bank_size_change_no_byte
    B2 a bank per dtype         test_banks_fill_from_the_last_layer_and_keep_kinds_apart
    B3 main gradients, fp32     test_shards_are_equal_and_cover_every_parameter_once,
                                test_fp32_gradients_of_bf16_parameters_lose_no_bits,
                                test_the_first_of_fp32_gradients_is_not_rounded_to_bf16
    B4 equal shards             test_shards_are_equal_and_cover_every_parameter_once
    B5 add and drop             test_gradients_move_into_their_slots_and_nothing_stays_behind
    B6 memory                   test_memory_is_that_of_values_gradients_and_a_share_of_the_state,
                                test_one_gradient_is_alive_beside_the_banks
    B7 the final gradient       test_hook_sees_the_final_gradient
    C1 count                    test_a_bank_launches_when_all_of_it_has_come_in_any_order, mutant LastParameterOnly
    C2 no order assumed         test_random_graphs
    C3 tied                     test_a_tied_parameter_is_ready_once_after_all_its_uses
    C4 no host sync in a hook   test_a_hook_does_one_operation_a_gradient, mutant HeavyHook
    C5 finalize first           test_a_step_before_backward_is_an_error, mutant StepsEarly
    C6 sizes                    test_sync_and_bank_size_change_no_byte
    C7 overlap measured         records/trace.py, of the ranges that test_profile_has_a_range_for_every_phase finds
    C8 ranges                   test_profile_has_a_range_for_every_phase
    C9 pitfalls                 test_mutants_are_caught
    C10 backward needs none     test_backward_ends_though_the_network_never_answers
    C11 clip after finalize     test_clip_is_by_the_norm_over_all_ranks
    C12 several in flight       test_several_collectives_are_in_flight
    D1 values unchanged         test_shards_are_equal_and_cover_every_parameter_once
    D2 any in-place optimizer   test_any_optimizer_of_torch_works_on_the_flat_view
    D3 shapes refused           test_a_rule_of_matrices_refuses_the_flat_view
    D4 views checked            test_a_parameter_moved_out_of_its_bank_is_found, test_a_replaced_parameter_is_named
    D5 speed on small tensors   bench/optimizer_step.py
    E1 one hook, removable      test_building_twice_fires_once_and_hooks_can_be_removed
    E2 fixed order, agreed      test_a_bank_that_is_ready_early_waits_for_its_turn, test_a_swapped_order_is_caught
    E3 twice                    test_a_parameter_ready_twice_is_an_error_with_its_name
    E4 unused                   test_unused_parameters,
                                test_a_parameter_used_now_and_then_keeps_its_moments_when_it_is_not
    E5 static graph             test_a_graph_that_changes_is_an_error
    E6 rank 0's order           test_the_order_is_rank_0_s_arrival
    E7 no_sync                  test_only_the_armed_micro_batch_sends
    E8 communication hook       test_compressed_gradients
    E9 refused or left out      test_frozen_and_sparse, test_mixed_devices_are_refused
    E10 layout                  test_a_transposed_gradient_lands_right
    exact mode                  test_exact_mode_gives_the_same_bytes_at_any_number_of_ranks,
                                test_an_exact_run_prints_the_same_losses_at_any_number_of_ranks
    zero copies                 test_a_hook_does_one_operation_a_gradient, bench/passes.py
    launch-plan check           test_a_swapped_order_is_caught, test_ranks_whose_models_differ_all_get_an_error
    lazy gather                 test_a_lazy_gather_is_waited_for_where_the_forward_reads_it,
                                test_the_whole_model_reads_nothing_before_it_has_come
    in no bank, in two          test_a_parameter_in_no_bank_or_in_two_is_named
    two dtypes in a bank        test_a_bank_of_two_dtypes_is_refused
    second backward             test_a_gradient_for_a_launched_bank_is_an_error
    not finite                  test_a_gradient_that_is_not_finite_stops_every_rank_before_the_step,
                                test_a_run_ends_with_the_name_of_a_gradient_that_is_not_finite
"""

import contextlib
import dataclasses
import gzip
import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import test_optimizer
import test_run
import train_gpt
from conftest import TINY, some_documents
from test_optimizer import BOS, FULL, ONCE, Recorder, adam_members, adam_optimizer, chain, train_steps
from test_run import flags, one, read_log, run_here, torchrun  # noqa: F401  (fixtures)
from train_gpt import BankOptimizer, Comm, RunError, SyncSettings


# networks


class Hostile(Comm):
    """Reads what it sends only when waited for, and until then holds poison where the answer will be.

    Whoever writes after the launch, or reads before the wait, gets caught: by an error, or by NaN in what it computes.
    """

    def hand_over(self, work):
        return work

    def _later(self, out, send, collective):
        kept = send.clone()
        out.fill_(math.nan)
        writes = send._version  # all views of a buffer count their writes together
        comm = self

        class Later:
            def wait(self):
                if send._version != writes:
                    raise AssertionError("a buffer was written between its launch and its wait")
                send.copy_(kept)
                collective(comm, out, send)
        return self.hand_over(Later())

    def reduce_scatter_exactly(self, shard, full):
        return self._later(shard, full, lambda comm, out, send: Comm.reduce_scatter_exactly(comm, out, send).wait())

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
    """Whoever waits for one collective may see others end first, in an order that is the same on all ranks."""

    def __init__(self, rank=0, ranks=1):
        super().__init__(rank, ranks)
        self.open, self.draw = [], random.Random(0)

    def hand_over(self, work):
        comm = self
        comm.open.append(work)

        class Shuffled:
            def wait(self):
                while work in comm.open:
                    comm.open.pop(comm.draw.randrange(len(comm.open))).wait()
        return Shuffled()


class Never(Comm):
    """Takes everything and never answers."""

    def reduce_scatter_exactly(self, shard, full):
        class Unanswered:
            def wait(self):
                raise TimeoutError("waited for a network that never answers")
        return Unanswered()


class Failing(Comm):
    """Its n-th reduce-scatter fails when waited for, as a broken connection does."""

    def __init__(self, rank=0, ranks=1, at=2):
        super().__init__(rank, ranks)
        self.at = at

    def reduce_scatter_exactly(self, shard, full):
        work = super().reduce_scatter_exactly(shard, full)
        self.at -= 1
        if self.at:
            return work

        class Broken:
            def wait(self):
                raise RuntimeError("connection closed by peer")
        return Broken()


def with_model(model, comm, optimizer=BankOptimizer, **changes):
    """An engine that knows its model, with a bank a parameter."""
    banks = train_gpt.fill_banks(adam_members(model), 0, comm.rank, comm.ranks)
    return optimizer(banks, comm, settings=SyncSettings(**changes), model=model)


def flow(model, x, comm=None, optimizer=BankOptimizer, steps=3, **changes):
    """Some steps of Adam through a network -> (the optimizer, the parameters)."""
    engine = with_model(model, comm or Comm(), optimizer, **changes)
    for step in range(steps):
        engine.arm(step)
        model(x + step).square().sum().backward()
        engine.step(FULL)
    engine.finish_gathers()
    return engine, [p.detach().clone() for p in model.parameters()]


def plainly(x, steps=3):
    """The same by torch alone."""
    model = chain()
    judge = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for step in range(steps):
        judge.zero_grad()
        model(x + step).square().sum().backward()
        judge.step()
    return list(model.parameters())


X = torch.randn(3, 6, generator=torch.Generator().manual_seed(4))
VARIANTS = [{}, {"sync": "step"}, {"walk": "forward"}, {"lazy_gather": True}, {"lazy_gather": True, "walk": "forward"}, {"exact": True},
            {"check_grads": True}, {"unused": True}]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("network", [Hostile, Reordering])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_nothing_is_read_before_it_has_come(changes, network):
    """Under a hostile network every variant computes what torch does: each wait comes before its use, each write before its launch."""
    assert_close(flow(chain(), X, network(), **changes)[1], plainly(X))


def hostile_steps(comm, network, changes):
    return flow(chain(), X, network(comm.rank, comm.ranks), **changes)[1]


@pytest.mark.parametrize("network", [Hostile, Reordering])
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_nothing_is_read_before_it_has_come_on_two_ranks(on_ranks, changes, network):
    for parameters in on_ranks(2, hostile_steps, network, changes):
        # both ranks have the same data and the engine sums over ranks: Adam does not see the factor of two
        assert_close(parameters, plainly(X))


def hostile_record(comm, changes, batches):
    return train_steps(Hostile(comm.rank, comm.ranks), changes, 3, batches)[1]


def plain_record(comm, batches):
    return train_steps(comm, {}, 3, batches)[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_whole_model_reads_nothing_before_it_has_come(on_ranks, batches, ranks):
    """Every parameter of the record's model, the scalars and gates and tables too, under a hostile network."""
    plain = set(on_ranks(ranks, plain_record, batches))
    for changes in ({}, {"lazy_gather": True}, {"lazy_gather": True, "walk": "forward"}, {"walk": "forward", "bank_mb": 0.0}):
        assert set(on_ranks(ranks, hostile_record, changes, batches)) == plain, changes


def test_backward_ends_though_the_network_never_answers():
    model = chain()
    optimizer = adam_optimizer(model, Never())
    optimizer.order = optimizer.banks
    optimizer.arm(0)
    model(X).sum().backward()
    assert optimizer.launches == len(optimizer.banks)
    with pytest.raises(TimeoutError):
        optimizer.step(FULL)


def test_a_failing_collective_is_an_error_of_the_step():
    with pytest.raises(RuntimeError, match="connection closed"):
        flow(chain(), X, Failing())


def in_flight(events):
    """The most collectives under way at once."""
    level = most = 0
    for kind, *_ in events:
        level += 1 if kind == "start" else -1
        most = max(most, level)
    return most


def test_several_collectives_are_in_flight():
    comm = Recorder()
    flow(chain(), X, comm)
    assert in_flight(comm.events) >= 2
    assert sum(kind == "start" for kind, *_ in comm.events) == sum(kind == "wait" for kind, *_ in comm.events), "some are never waited for"


# mutants: each of these checks must fail on one


class LastParameterOnly(BankOptimizer):
    def _register_grad(self, bank, slot):
        super()._register_grad(bank, slot)
        if self.order and slot is bank.slots[-1] and not bank.launched:
            self._launch(bank)


class WaitsInHook(BankOptimizer):
    def _launch(self, bank):
        super()._launch(bank)
        bank.work.wait()


class WritesAfterLaunch(BankOptimizer):
    def _launch(self, bank):
        super()._launch(bank)
        bank.slots[0].grad.add_(1.0)


class StepsEarly(BankOptimizer):
    def _wait(self, bank):
        pass


class GathersUnwaited(BankOptimizer):
    def finish_gathers(self, banks=None):
        pass


class HeavyHook(BankOptimizer):
    def _register_grad(self, bank, slot):
        if slot.param.grad.norm().item() >= 0:
            super()._register_grad(bank, slot)


def check_counting(optimizer):
    """Firing a bank's hooks in both orders, nothing is launched before the last."""
    for order in ("ab", "ba"):
        params = {name: nn.Parameter(torch.zeros(3)) for name in "ab"}
        comm = Recorder()
        bank = train_gpt.Bank("both", [train_gpt.Member(n, p, ONCE) for n, p in params.items()], 0, 1)
        engine = optimizer([bank], comm)
        engine.order = [bank]
        engine.arm(0)
        params[order[0]].sum().backward()
        assert not comm.events, "launched with one of two gradients"
        params[order[1]].sum().backward()
        assert comm.events


def check_no_wait_in_backward(optimizer):
    model, comm = chain(), Recorder()
    engine = optimizer(train_gpt.fill_banks(adam_members(model), 0, 0, 1), comm)
    engine.order = engine.banks
    engine.arm(0)
    model(X).sum().backward()
    assert not any(kind == "wait" for kind, *_ in comm.events), "a hook waits"


def check_hostile(optimizer):
    assert_close(flow(chain(), X, Hostile(), optimizer)[1], plainly(X))


class OperationsOn(TorchDispatchMode):
    """Counts the operations that read tensors of some shape, views and detaches left out."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name.split("::")[1])
        return func(*args, **(kwargs or {}))


def check_light_hook(optimizer):
    params = [nn.Parameter(torch.zeros(1000)) for _ in range(2)]
    bank = train_gpt.Bank("b", [train_gpt.Member(name, p, ONCE) for name, p in zip("pq", params)], 0, 1)
    engine = optimizer([bank], Comm())
    engine.order = [bank]
    for fresh in (True, False):
        bank.launched = False
        engine.arm(0)
        with OperationsOn() as operations:
            for slot in bank.slots:
                slot.param.grad = torch.ones(1000)
                engine._register_grad(bank, slot)
        assert bank.launched and [name for name in operations.names if name != "ones"] == 2 * ["mul" if fresh else "add_"]


MUTANTS = [(check_counting, LastParameterOnly), (check_no_wait_in_backward, WaitsInHook), (check_hostile, WritesAfterLaunch),
           (check_hostile, StepsEarly), (check_hostile, GathersUnwaited), (check_light_hook, HeavyHook)]


@pytest.mark.parametrize("check,mutant", MUTANTS, ids=lambda x: x.__name__)
def test_mutants_are_caught(check, mutant):
    check(BankOptimizer)
    with pytest.raises((AssertionError, RunError)):
        check(mutant)


def test_a_hook_does_one_operation_a_gradient():
    check_light_hook(BankOptimizer)


class SwapsOrderOnRankOne(BankOptimizer):
    def _agree_on_order(self):
        super()._agree_on_order()
        if self.comm.rank:
            self.order[0], self.order[1] = self.order[1], self.order[0]
            self.due = [bank for bank in self.order if bank.armed]


class SwapsUnseen(SwapsOrderOnRankOne):
    def _check_order(self):
        pass


def same_size_banks(comm, optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x = torch.randn(2, 8) + comm.rank
    return flow(model, x, comm, optimizer)[1]


def test_a_swapped_order_is_caught(on_ranks):
    """Two collectives of one size in another order on one rank: gloo sums the wrong tensors and says nothing, so ranks compare
    their orders before the first launch of that order. Without that, values tell."""
    with pytest.raises(RunError, match="rank 1 would launch the banks in the order"):
        on_ranks(2, same_size_banks, SwapsOrderOnRankOne)
    right, wrong = (on_ranks(2, same_size_banks, optimizer)[0] for optimizer in (BankOptimizer, SwapsUnseen))
    torch.manual_seed(0)
    twin = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    x = torch.randn(2, 8)
    judge = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for step in range(3):
        judge.zero_grad()
        (twin(x + step).square().sum() + twin(x + 1 + step).square().sum()).backward()
        judge.step()
    assert_close(right, twin.parameters())
    assert not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(wrong, twin.parameters()))


# order


def group_names(comm):
    generator = torch.Generator().manual_seed(7)
    shapes = torch.randint(1, 9, (20, 2), generator=generator).tolist()
    model = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes)
    return [[slot.name for slot in bank.slots] for bank in train_gpt.fill_banks(adam_members(model), 100, comm.rank, comm.ranks)]


def test_ranks_group_the_same_way(on_ranks):
    groups = on_ranks(4, group_names)
    assert all(group == groups[0] for group in groups) and len(groups[0]) > 3


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10 ** 6), bank_bytes=st.sampled_from([0, 100, 1e9]))
def test_random_graphs(seed, bank_bytes):
    """Leaves of a random graph, used in any number of places: the sums are torch's, whatever order the hooks fire in."""
    generator = torch.Generator().manual_seed(seed)
    params = nn.ParameterList(nn.Parameter(torch.randn(4, generator=generator)) for _ in range(6))
    twin = nn.ParameterList(nn.Parameter(p.detach().clone()) for p in params)

    def loss(leaves):
        draw = torch.Generator().manual_seed(seed + 1)
        nodes = list(leaves)
        for _ in range(12):
            i, j = torch.randint(len(nodes), (2,), generator=draw).tolist()
            nodes.append(torch.tanh(nodes[i] * nodes[j] + nodes[i]))
        return sum(node.sum() for node in nodes)
    optimizer = adam_optimizer(params, Hostile(), bank_bytes)
    judge = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for step in range(3):
        optimizer.arm(step)
        loss(params).backward()
        optimizer.step(FULL)
        judge.zero_grad()
        loss(twin).backward()
        judge.step()
    for a, b in zip(params, twin):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def arrivals(comm):
    """Each rank's gradients arrive in an order of its own."""
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(2)) for name in "abc"})
    optimizer = adam_optimizer(params, comm)
    optimizer.arm(0)
    for name in ("bca" if comm.rank == 0 else "cab"):
        params[name].sum().backward()
    optimizer.step(FULL)
    return [bank.slots[0].name for bank in optimizer.order]


def test_the_order_is_rank_0_s_arrival(on_ranks):
    assert on_ranks(2, arrivals) == [["b", "c", "a"]] * 2


def test_forward_walk_updates_the_first_layers_first():
    comm = Recorder()
    model = chain()
    engine, _ = flow(model, X, comm, walk="forward")
    gathers = [event[2] for event in comm.events if event[:2] == ("start", "gather")]
    in_order = {bank.values.data_ptr(): i for i, bank in enumerate(engine.order)}
    assert [in_order[pointer] for pointer in gathers[-len(engine.banks):]] == list(range(len(engine.banks)))[::-1]
    assert engine.order[-1].slots[0].name.startswith("0.")


def test_a_lazy_gather_is_waited_for_where_the_forward_reads_it():
    comm, model = Recorder(), chain()
    engine = with_model(model, comm, lazy_gather=True)
    for step in range(2):
        engine.arm(step)
        model(X).sum().backward()
        engine.step(FULL)
    assert sum(event[:2] == ("wait", "gather") for event in comm.events) == len(engine.banks), "the second step's are still open"
    seen = []
    for name, module in model.named_modules():
        if name:
            module.register_forward_hook(lambda *_, name=name: seen.append((name, sum(bank.gathering is not None for bank in engine.banks))))
    model(X)
    assert seen == [("0", 4), ("1", 2), ("2", 0)], "each layer waits for its own two banks, and for no other"
    with pytest.raises(RunError, match="give the optimizer the model"):
        BankOptimizer(train_gpt.fill_banks(adam_members(chain()), 0, 0, 1), Comm(), settings=SyncSettings(lazy_gather=True))


def test_a_lazy_gather_that_no_forward_read_is_waited_for_before_the_next_update():
    model, comm = Branches(), Recorder()
    engine = with_model(model, comm, lazy_gather=True, unused=True)
    for step in range(2):
        engine.arm(step)
        torch.stack([p.sum() for p in model.parameters()]).sum().backward()  # no module's forward runs
        engine.step(FULL)
    for bank in engine.banks:
        kinds = [event for event, kind, where in comm.events if kind == "gather" and where == bank.values.data_ptr()]
        assert kinds == ["start", "wait", "start"]


# accumulation, unused, frozen, replaced


def test_only_the_armed_micro_batch_sends():
    """What others call no_sync: backwards before arm() accumulate and send nothing; together they are one big batch."""
    model, twin, comm = chain(), chain(), Recorder()
    optimizer = adam_optimizer(model, comm)
    judge = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for step in range(3):
        comm.events.clear()
        for micro in range(3):
            if micro == 2:
                assert not comm.events
                optimizer.arm(step)
            model(X + micro).square().sum().backward()
        optimizer.step(FULL)
        assert comm.kinds().count(("start", "reduce")) == len(optimizer.banks)
        judge.zero_grad()
        sum(twin(X + micro).square().sum() for micro in range(3)).backward()
        judge.step()
    assert_close(model.parameters(), twin.parameters())


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.left, self.right, self.never = nn.Linear(3, 1), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x, left):
        return (self.left if left else self.right)(x)


def branch_steps(comm):
    """Rank 0 alone takes the left branch; nobody takes the third."""
    model = Branches()
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model), 1e9, comm.rank, comm.ranks), comm,
                           settings=SyncSettings(unused=True))
    for step in range(3):
        engine.arm(step)
        model(torch.ones(2, 3) + comm.rank, left=comm.rank == 0).sum().backward()
        engine.step(FULL)
    state = {name: x.clone() for name, x in engine.named_state()}
    return {name: p.detach().clone() for name, p in model.named_parameters()}, state


def test_unused_parameters(on_ranks):
    results = on_ranks(2, branch_steps)
    twin = Branches()
    before = {name: p.detach().clone() for name, p in twin.named_parameters()}
    judge = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for _ in range(3):
        judge.zero_grad()
        (twin(torch.ones(2, 3), True).sum() + twin(torch.ones(2, 3) + 1, False).sum()).backward()
        judge.step()
    for parameters, state in results:
        for name, p in twin.named_parameters():
            assert torch.allclose(parameters[name], p, atol=1e-6), name
            assert torch.equal(parameters[name], before[name]) == name.startswith("never"), name
        assert not state["never.weight.m"].any() and state["left.weight.m"].any()


def test_a_parameter_used_now_and_then_keeps_its_moments_when_it_is_not():
    """What nobody used is left as it was: no decay of its moments, no step by its momentum."""
    model = Branches()
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model), 1e9, 0, 1), Comm(), settings=SyncSettings(unused=True))
    states = []
    for step, left in enumerate((True, False)):
        engine.arm(step)
        model(torch.ones(2, 3), left).sum().backward()
        engine.step(FULL)
        states.append({name: x.clone() for name, x in engine.named_state()})
    for key in ("left.weight", "left.weight.m", "left.weight.v"):
        assert torch.equal(states[0][key], states[1][key]), key
    assert not torch.equal(states[0]["right.weight"], states[1]["right.weight"])


def test_a_graph_that_changes_is_an_error():
    model = Branches()
    del model.never
    optimizer = adam_optimizer(model, bank_bytes=1e9)
    both = lambda: (model(torch.ones(1, 3), True) + model(torch.ones(1, 3), False)).sum()  # noqa: E731
    optimizer.arm(0)
    both().backward()
    optimizer.step(FULL)
    optimizer.arm(1)
    model(torch.ones(1, 3), True).sum().backward()
    with pytest.raises(RunError, match=r"2 of 4 .* not right\.bias, right\.weight.*unless unused"):
        optimizer.step(FULL)


def test_frozen_and_sparse(tiny):
    model = train_gpt.build_model(tiny, 64, BOS)
    model.embed.weight.requires_grad_(False)
    names = {member.name for member in train_gpt.assign(model, train_gpt.assignments(tiny))}
    assert "embed.weight" not in names and len(names) == len(list(model.parameters())) - 1
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = adam_optimizer(table)
    with pytest.raises(RunError, match="weight has a sparse gradient"):
        table(torch.tensor([1, 2])).sum().backward()
    assert optimizer.banks


def test_mixed_devices_are_refused():
    members = [train_gpt.Member("a", nn.Parameter(torch.zeros(2)), ONCE), train_gpt.Member("b", nn.Parameter(torch.zeros(2, device="meta")), ONCE)]
    with pytest.raises(RunError, match="b is torch.float32 on meta"):
        train_gpt.Bank("mixed", members, 0, 1)


def replaced_on_both(comm, how, unused):
    model = chain()
    engine = with_model(model, comm, unused=unused)
    how(model)
    engine.arm(0)
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
        assert message.startswith(f"{name} is another parameter than when the banks were built")


def test_a_parameter_in_no_bank_or_in_two_is_named():
    model = chain()
    members = adam_members(model)
    with pytest.raises(RunError, match=r"^2\.bias is in no bank"):
        BankOptimizer(train_gpt.fill_banks(members[:-1], 0, 0, 1), Comm(), model=model)
    with pytest.raises(RunError, match=r"^0\.weight is in two banks"):
        BankOptimizer(train_gpt.fill_banks([*members, members[0]], 0, 0, 1), Comm())
    model[2].bias.requires_grad_(False)
    with pytest.raises(RunError, match=r"^2\.bias is frozen"):
        BankOptimizer(train_gpt.fill_banks(members, 0, 0, 1), Comm())
    engine = BankOptimizer(train_gpt.fill_banks(members[:-1], 0, 0, 1), Comm(), model=model)
    frozen = model[2].bias.clone()
    engine.arm(0)
    model(X).sum().backward()
    engine.step(FULL)
    assert torch.equal(model[2].bias, frozen) and model[2].weight.grad is None


class Containers(nn.Module):
    """Whose parameters lie in containers that never run themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(2)
        self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})
        self.layers = nn.ModuleDict({"b": nn.Linear(3, 2)})

    def forward(self, x):
        return self.layers["b"](x * self.scales["a"])


def test_what_lies_in_containers_is_waited_for_with_the_model():
    x = torch.randn(4, 3)
    assert_close(*(flow(Containers(), x, comm, lazy_gather=True)[1] for comm in (Hostile(), Comm())))


def test_hooks_of_a_lazy_gather_can_be_removed():
    model = chain()
    engine = with_model(model, Comm(), lazy_gather=True)
    assert all(part._forward_pre_hooks for part in model)
    engine.remove_hooks()
    assert not any(part._forward_pre_hooks for part in model.modules())


@pytest.mark.parametrize("changes", [{"unused": True}, {"clip_norm": 1.0}])
def test_exact_mode_refuses_what_it_cannot_keep(changes):
    with pytest.raises(RunError, match="exact mode excludes"):
        flow(chain(), X, exact=True, **changes)


def test_exact_mode_refuses_a_gradient_that_is_not_in_every_micro_batch():
    model = Branches()
    del model.never
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model), 1e9, 0, 1), Comm(), settings=SyncSettings(exact=True))
    model(torch.ones(2, 3), True).sum().backward()
    engine.arm(0)
    (model(torch.ones(2, 3), True) + model(torch.ones(2, 3), False)).sum().backward()
    with pytest.raises(RunError, match=r"right\.\w+ got a gradient in 1 of 2 micro-batches"):
        engine.step(FULL)


# hooks of communication, clipping, finiteness


def compressed_steps(comm):
    return flow(chain(), X, train_gpt.CompressedComm(comm.rank, comm.ranks))[1]


def test_compressed_gradients(on_ranks):
    """Sent in bf16, summed in bf16: near the plain result, not equal to it."""
    for parameters in on_ranks(2, compressed_steps):
        exactly = True
        for a, b in zip(parameters, plainly(X)):
            assert torch.allclose(a, b, atol=2e-3)
            exactly &= torch.equal(a, b)
        assert not exactly


def clipped_steps(comm, limit):
    model = chain()
    banks = train_gpt.fill_banks([train_gpt.Member(n, p, dataclasses.replace(ONCE, eps=1.0)) for n, p in model.named_parameters()], 0, comm.rank, comm.ranks)
    engine = BankOptimizer(banks, comm, 1 / comm.ranks, SyncSettings(clip_norm=limit))
    for step in range(2):
        engine.arm(step)
        model(X + comm.rank).square().sum().backward()
        engine.step(FULL)
    return [p.detach().clone() for p in model.parameters()]


def test_clip_is_by_the_norm_over_all_ranks(on_ranks):
    twin = chain()
    judge = torch.optim.AdamW(twin.parameters(), lr=0.01, betas=(0.65, 0.95), eps=1.0, weight_decay=0)
    for _ in range(2):
        judge.zero_grad()
        ((twin(X).square().sum() + twin(X + 1).square().sum()) / 2).backward()
        assert nn.utils.clip_grad_norm_(twin.parameters(), 0.5) > 0.5
        judge.step()
    for parameters in on_ranks(2, clipped_steps, 0.5):
        assert_close(parameters, twin.parameters())


def not_finite_on_one(comm):
    model = chain()
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model), 0, comm.rank, comm.ranks), comm, settings=SyncSettings(check_grads=True))
    before = [p.detach().clone() for p in model.parameters()]
    engine.arm(0)
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
        assert "that step 0 sums are not finite: 1.bias;" in message and untouched


# exact mode


def exact_steps(comm, batches, steps):
    return train_steps(comm, {"exact": True}, steps, batches)


@pytest.fixture(scope="module")
def batches():
    return torch.from_numpy(some_documents(11, 10 * 8 * 49).astype("int64")).view(10, 8, 49)


def test_exact_mode_gives_the_same_bytes_at_any_number_of_ranks(on_ranks, batches):
    """Four ranks, since with two every order of summation is a + b; a plain sum gives other bytes, or there were nothing to show."""
    results = {ranks: on_ranks(ranks, exact_steps, batches, 10) for ranks in (1, 2, 4, 8)}
    assert len({result[1] for on_each in results.values() for result in on_each}) == 1
    losses = [sorted(loss for result in on_each for loss in result[0]) for on_each in results.values()]
    assert all(of_ranks == losses[0] for of_ranks in losses)
    plain = {ranks: on_ranks(ranks, train_steps, {}, 4, batches)[0][1] for ranks in (1, 2, 4)}
    assert len(set(plain.values())) > 1


def test_an_exact_run_prints_the_same_losses_at_any_number_of_ranks(one, tmp_path, capsys):  # noqa: F811
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="one", exact="true"), capsys)
    assert status == 0, errors
    done = torchrun(4, Path(train_gpt.__file__), flags(tmp_path, one[1], run_id="four", exact="true"))
    assert done.returncode == 0, done.stderr
    logs = [read_log(tmp_path / "logs" / f"{name}.txt") for name in ("one", "four")]
    lines = [[re.sub(r" (train_time|step_avg):\S+", "", line) for line in log[3]] for log in logs]
    assert lines[0] == lines[1] and len(lines[0]) > 12
    assert logs[0][4]["final_state_hash"] == logs[1][4]["final_state_hash"] and logs[1][2]["ranks"] == 4


def test_a_run_ends_with_the_name_of_a_gradient_that_is_not_finite(one, tmp_path):  # noqa: F811
    done = torchrun(2, Path(train_gpt.__file__), flags(tmp_path, one[1], run_id="nan", adam_lr=1e38, val_every=0, check_grads="true"))
    assert done.returncode != 0
    for rank in range(2):
        assert re.search(rf"rank {rank}: error: .*gradients that step \d sums are not finite: blocks", done.stderr), done.stderr
    assert (tmp_path / "logs" / "nan.txt").read_text().splitlines()[-1].startswith("error: gradients that step")


@given(heights=st.integers(0, 4), seed=st.integers(0, 1000))
@settings(max_examples=30, deadline=None)
def test_micro_batches_sum_as_a_binary_tree(heights, seed):
    leaves = torch.randn(2 ** heights, 5, generator=torch.Generator().manual_seed(seed))
    p = nn.Parameter(torch.zeros(5))
    bank = train_gpt.Bank("b", [train_gpt.Member("p", p, ONCE)], 0, 1)
    for leaf in leaves:
        p.grad = leaf.clone()
        bank.add(bank.slots[0], 1.0, exact=True)
    bank.fell_trees()
    tree = leaves
    while len(tree) > 1:
        tree = tree[0::2] + tree[1::2]
    assert torch.equal(bank.slots[0].grad, tree[0])


# memory, flat views, profiling


def test_one_gradient_is_alive_beside_the_banks():
    """Peak memory of backward is the banks and one gradient at a time: each is dropped when it has been added."""
    model = chain((4,) * 8)
    adam_optimizer(model)
    alive = []
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda _: alive.append(sum(q.grad is not None for q in model.parameters())))
    model(torch.randn(2, 4)).sum().backward()
    assert len(alive) == 14 and max(alive) <= 1


@dataclasses.dataclass(frozen=True)
class FlatTorch:
    """A rule of any torch optimizer that works in place: it is given the shard as one flat parameter."""

    optimizer: type
    options: tuple = ()
    every: int = 1
    function = staticmethod(lambda inner: inner.step())

    def unit(self, shape, parts):
        return ()

    def new_state(self, bank):
        self.__dict__["inner"] = self.optimizer([nn.Parameter(bank.my_values)], **dict(self.options))
        self.inner.param_groups[0]["params"][0].grad = bank.my_grads
        return {}

    def arguments(self, bank, values):
        return (self.inner,)


@pytest.mark.parametrize("optimizer,options", [(torch.optim.Adam, {"lr": 0.01}), (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
                                               (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9})])
def test_any_optimizer_of_torch_works_on_the_flat_view(optimizer, options):
    model, twin = chain(), chain()
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model, FlatTorch(optimizer, tuple(options.items()))), 1e9, 0, 1), Comm())
    judge = optimizer(twin.parameters(), **options)
    for step in range(3):
        engine.arm(step)
        model(X + step).square().sum().backward()
        engine.step(FULL)
        judge.zero_grad()
        twin(X + step).square().sum().backward()
        judge.step()
    assert_close(model.parameters(), twin.parameters())


def test_a_rule_of_matrices_refuses_the_flat_view():
    rule = train_gpt.NorMuon(0.03, 1.2, 0.95, torch.float32, wide=True)
    with pytest.raises(RunError, match=r"NorMuon updates matrices; it was given a parameter of shape \(12,\)"):
        train_gpt.Bank("flat", [train_gpt.Member("flat", nn.Parameter(torch.zeros(12)), rule)], 0, 1)


@pytest.mark.parametrize("sync", ["hook", "step"])
def test_profile_has_a_range_for_every_phase(one, tmp_path, capsys, sync):  # noqa: F811
    status, printed, errors = run_here(flags(tmp_path, one[1], run_id="traced", profile="3:5", sync=sync), capsys)
    path = tmp_path / "logs" / "traced-rank0.json.gz"
    assert status == 0 and str(path) in printed, errors
    events = [e for e in json.loads(gzip.open(path).read())["traceEvents"] if e.get("ph") == "X"]
    spans = {}
    for e in events:
        spans.setdefault(e["name"], []).append((e["ts"], e["ts"] + e["dur"]))
    assert [name for name in sorted(spans) if name.startswith("ProfilerStep")] == [f"ProfilerStep#{step}" for step in (3, 4, 5)]
    launched = {name.split(" ", 1)[1] for name in spans if name.startswith("launch ")}
    for phase in ("wait", "update", "gather", "wait gather"):
        named = {name.removeprefix(phase + " ") for name in spans if name.startswith(phase + " ")}
        assert {name for name in named if not name.startswith("gather ")} == launched and launched
    launches = [span for name, times in spans.items() if name.startswith("launch ") for span in times]
    assert all(any(a <= begin and end <= b for a, b in spans[{"hook": "backward", "step": "step"}[sync]]) for begin, end in launches)
    plain = read_log(one[3])[4]["final_state_hash"]
    assert read_log(tmp_path / "logs" / "traced.txt")[4]["final_state_hash"] == plain, "profiling changed what is computed"


@pytest.mark.parametrize("changes", [{"lazy_gather": "true"}, {"walk": "forward"}, {"lazy_gather": "true", "walk": "forward"},
                                     {"check_grads": "true"}, {"clip_norm": 1e9}, {"sync": "step"}, {"unused": "true"}], ids=str)
def test_variants_of_a_whole_run_end_in_the_same_bytes(one, tmp_path, capsys, changes):  # noqa: F811
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="variant", **changes), capsys)
    assert status == 0, errors
    assert read_log(tmp_path / "logs" / "variant.txt")[4]["final_state_hash"] == read_log(one[3])[4]["final_state_hash"]


def test_a_gradient_of_the_first_of_two_steps_counts_where_the_second_has_none():
    """Adam every second step, unused allowed: what was used in either step is updated with what it got."""
    model = Branches()
    engine = BankOptimizer(train_gpt.fill_banks(adam_members(model, dataclasses.replace(ONCE, every=2)), 1e9, 0, 1), Comm(),
                           settings=SyncSettings(unused=True))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step, left in enumerate((True, False)):
        engine.arm(step)
        model(torch.ones(2, 3), left).sum().backward()
        engine.step(FULL)
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) == name.startswith("never"), name


def test_the_table_names_what_there_is():
    words = set(re.findall(r"(?:test_|bench/|records/)\w+(?:\.py)?", __doc__)) | set(re.findall(r"mutant (\w+)", __doc__))
    known = {*vars(test_optimizer), *vars(test_run), *globals()}
    root = Path(train_gpt.__file__).parent
    missing = {word for word in words if not (word in known or (root / word).exists() or (root / "tests" / word).exists())}
    assert not missing and len(words) > 50
