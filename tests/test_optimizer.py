"""Update rules, banks and the sync of gradients, against torch's Adam, a plain NorMuon, and one process alone."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import reference
import train_gpt
from conftest import TINY, some_documents

BOS = 63
ONCE = train_gpt.Adam(lr=0.01, beta1=0.65, beta2=0.95, eps=1e-8, every=1, moment_dtype=torch.float32)
FULL = train_gpt.StepValues(lr_factor=1.0, momentum=0.95)


class Recorder(train_gpt.Comm):
    """Writes down what is started and what is waited for.

    Like all stand-ins here it replaces reduce_scatter_exactly, to which every reduction comes on gloo and alone.
    """

    def __init__(self, rank=0, ranks=1):
        super().__init__(rank, ranks)
        self.events = []

    def _note(self, work, kind, tensor):
        recorder, what = self, (kind, tensor.data_ptr())
        self.events.append(("start", *what))

        class Noted:
            def wait(self):
                recorder.events.append(("wait", *what))
                work.wait()
        return Noted()

    def reduce_scatter_exactly(self, shard, full):
        return self._note(super().reduce_scatter_exactly(shard, full), "reduce", full)

    def all_gather(self, full, shard):
        return self._note(super().all_gather(full, shard), "gather", full)

    def kinds(self):
        return [event[:2] for event in self.events]


def chain(widths=(6, 5, 7, 4), seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def adam_members(model, rule=ONCE):
    return [train_gpt.Member(name, p, rule) for name, p in model.named_parameters()]


def adam_optimizer(model, comm=None, bank_bytes=0.0, rule=ONCE, **settings):
    comm = comm or train_gpt.Comm()
    banks = train_gpt.fill_banks(adam_members(model, rule), bank_bytes, comm.rank, comm.ranks)
    return train_gpt.BankOptimizer(banks, comm, **settings)


# rules


def test_adam_is_torch_s():
    torch.manual_seed(0)
    theirs = nn.Parameter(torch.randn(1000))
    p, m, v = theirs.detach().clone(), torch.zeros(1000), torch.zeros(1000)
    judge = torch.optim.AdamW([theirs], lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    for t in range(1, 6):
        theirs.grad = torch.randn(1000)
        train_gpt.adam(p, theirs.grad, m, v, 0.01, 0.65, 0.95, 1e-8, float(t))
        judge.step()
        assert torch.allclose(p, theirs, rtol=1e-5, atol=1e-6)


def test_adam_leaves_alone_what_never_had_a_gradient():
    p = torch.ones(4)
    train_gpt.adam(p, torch.tensor([0.0, 1, 0, 2]), torch.zeros(4), torch.zeros(4), 0.1, 0.9, 0.99, 1e-8, 1.0)
    assert p[0] == p[2] == 1 and p[1] != 1 and p[3] != 1


@pytest.mark.parametrize("shape", [(8, 24), (24, 8), (8, 8), (1, 6)])
def test_polar_gives_singular_values_near_one_and_keeps_directions(shape):
    torch.manual_seed(1)
    u = torch.randn(3, *shape)
    o = train_gpt.polar(u, torch.float32)
    singular = torch.linalg.svdvals(o)
    assert (singular > 0.6).all() and (singular < 1.3).all()
    a, _, b = torch.linalg.svd(u, full_matrices=False)
    assert ((a @ b) * o).sum((1, 2)).div((a @ b).norm(dim=(1, 2)) * o.norm(dim=(1, 2))).min() > 0.95


@pytest.mark.parametrize("shape,parts,k", [((8, 32), 1, 2.0), ((8, 32), 4, 1.0), ((32, 8), 1, 1.0), ((6, 12), 1, 1.0), ((1, 12), 1, 1.0)])
def test_normuon_is_the_record_s_written_plainly(shape, parts, k):
    torch.manual_seed(2)
    param = nn.Parameter(torch.randn(shape))
    plain = reference.NorMuon(param.detach().double(), parts, k)
    rule = train_gpt.NorMuon(0.03, 1.2, 0.95, torch.float32, wide=shape[1] > shape[0])
    scale = k * math.sqrt(max(1, shape[0] / shape[1]))
    optimizer = train_gpt.BankOptimizer([train_gpt.Bank("only", [train_gpt.Member("p", param, rule, parts, scale)], 0, 1)], train_gpt.Comm())
    for step in range(4):
        g = torch.randn(shape)
        optimizer.arm(step)
        (param * g).sum().backward()
        optimizer.step(train_gpt.StepValues(0.7, 0.9))
        plain.step(g.double(), f=0.7, momentum=0.9)
        assert torch.allclose(param.double(), plain.p, rtol=1e-4, atol=1e-5)


def test_every_matrix_of_torch_s_muon_has_the_same_directions():
    """torch.optim.Muon orthogonalizes with other coefficients; without NorMuon's second moment the directions agree."""
    torch.manual_seed(3)
    g = torch.randn(16, 32)
    theirs = nn.Parameter(torch.zeros(16, 32))
    theirs.grad = g.clone()
    torch.optim.Muon([theirs], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, ns_steps=8).step()
    ours = train_gpt.polar(g[None], torch.float32)[0]
    assert torch.cosine_similarity(ours.flatten(), -theirs.detach().flatten(), dim=0) > 0.98


# banks


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6), ranks=st.integers(1, 8), rank=st.data())
def test_shards_are_equal_and_cover_every_parameter_once(sizes, ranks, rank):
    params = [nn.Parameter(torch.arange(float(n)) + 1000 * i) for i, n in enumerate(sizes)]
    before = [p.detach().clone() for p in params]
    at = rank.draw(st.integers(0, ranks - 1))
    bank = train_gpt.Bank("b", [train_gpt.Member(str(i), p, ONCE) for i, p in enumerate(params)], at, ranks)
    assert len(bank.values) == ranks * bank.shard and bank.shard % bank.ALIGN == 0
    assert bank.my_values.data_ptr() == bank.values.data_ptr() + at * bank.shard * 4
    taken = torch.zeros(len(bank.values))
    for slot, p, old in zip(bank.slots, params, before):
        assert torch.equal(p, old), "values do not change when a parameter moves into its bank"
        assert p.data_ptr() == bank.values.data_ptr() + slot.offset * 4
        assert slot.grad.data_ptr() == bank.grads.data_ptr() + slot.offset * 4
        taken[slot.offset:slot.offset + p.numel()] += 1
    assert taken.max() == 1 and taken.sum() == sum(sizes)


@settings(max_examples=30, deadline=None)
@given(count=st.integers(1, 13), ranks=st.integers(1, 8))
def test_a_matrix_lies_whole_on_one_rank(count, ranks):
    rule = train_gpt.NorMuon(0.03, 1.2, 0.95, torch.float32, wide=True)
    params = [nn.Parameter(torch.full((3, 7), float(i + 1))) for i in range(count)]
    seen = []
    for rank in range(ranks):
        bank = train_gpt.Bank("b", [train_gpt.Member(str(i), p, rule) for i, p in enumerate(params)], rank, ranks)
        assert bank.my_values.shape == (-(-count // ranks), 3, 7)
        seen += [m.unique().item() for m in bank.my_values]
    assert [x for x in seen if x] == [i + 1 for i in range(count)], "padding is zero, and comes last"


def test_banks_fill_from_the_last_layer_and_keep_kinds_apart(tiny):
    model = train_gpt.build_model(dataclasses.replace(tiny, dtype="bfloat16"), 64, BOS)
    members = train_gpt.assign(model, train_gpt.assignments(dataclasses.replace(tiny, dtype="bfloat16")))
    sizes = {}
    for limit in (0, 20_000, 1e12):
        banks = train_gpt.fill_banks(members, limit, 0, 2)
        names = [slot.name for bank in banks for slot in bank.slots]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        for bank in banks:
            assert len({slot.param.dtype for slot in bank.slots}) == 1
            layers = [int(slot.name.split(".")[1]) for slot in bank.slots if slot.name.startswith("blocks")]
            assert layers == sorted(layers, reverse=True)
        sizes[limit] = len(banks)
    assert sizes[0] == len(members) > sizes[20_000] > sizes[1e12]


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_fp32_gradients_of_bf16_parameters_lose_no_bits(factor):
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    grads = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        bank = train_gpt.Bank("b", [train_gpt.Member("p", p, ONCE)], 0, 1, dtype)
        for g in grads:
            p.grad = g.clone()
            bank.add(bank.slots[0], factor)
        assert bank.grads.dtype == dtype
        errors[dtype] = (bank.slots[0].grad.double() - factor * grads.double().sum(0)).abs().max().item()
    assert errors[torch.float32] < 1e-4 < 0.01 < errors[torch.bfloat16]


def test_the_first_of_fp32_gradients_is_not_rounded_to_bf16():
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    bank = train_gpt.Bank("b", [train_gpt.Member("p", p, ONCE)], 0, 1, torch.float32)
    p.grad = torch.randn(64).bfloat16()
    expected = p.grad.double() / 3
    bank.add(bank.slots[0], 1 / 3)
    assert (bank.slots[0].grad.double() - expected).abs().max() < 1e-6


def test_adam_of_bf16_computes_in_float32_and_rounds_once():
    draw = torch.Generator().manual_seed(0)
    kept = [torch.randn(500, generator=draw).bfloat16() for _ in range(2)] + [torch.zeros(500).bfloat16() for _ in range(2)]
    p, g, m, v = (x.clone() for x in kept)
    for t in (1.0, 2.0):
        p32, g32, m32, v32 = (x.float() for x in (p, g, m, v))
        m32, v32 = 0.65 * m32 + 0.35 * g32, 0.95 * v32 + 0.05 * g32 * g32
        p32 = p32 - 0.01 / (1 - 0.65 ** t) * m32 / ((v32 / (1 - 0.95 ** t)).sqrt() + 1e-8)
        train_gpt.adam(p, g, m, v, 0.01, 0.65, 0.95, 1e-8, t)
        for ours, plain in ((p, p32), (m, m32), (v, v32)):
            same = ours == plain.bfloat16()
            assert same.float().mean() > 0.99 and torch.allclose(ours.float(), plain, rtol=2 ** -8, atol=1e-30)
    assert torch.equal(g, kept[1])


def test_gradients_move_into_their_slots_and_nothing_stays_behind():
    model = chain()
    optimizer = adam_optimizer(model, bank_bytes=1e9, grad_factor=0.5)
    x = torch.randn(3, 6)
    model(x).square().sum().backward()
    model(2 * x).square().sum().backward()
    twin = chain()
    (twin(x).square().sum() + twin(2 * x).square().sum()).backward()
    for p, q, in zip(model.parameters(), twin.parameters()):
        slot = next(slot for bank in optimizer.banks for slot in bank.slots if slot.param is p)
        assert p.grad is None
        assert torch.allclose(slot.grad, 0.5 * q.grad, rtol=1e-5, atol=1e-6)


def test_a_transposed_gradient_lands_right():
    p = nn.Parameter(torch.zeros(3, 5))
    bank = train_gpt.Bank("b", [train_gpt.Member("p", p, ONCE)], 0, 1)
    g = torch.randn(5, 3)
    for fresh in (True, False):
        p.grad = g.T
        bank.add(bank.slots[0], 1.0)
    assert torch.equal(bank.slots[0].grad, 2 * g.T)


def test_memory_is_that_of_values_gradients_and_a_share_of_the_state(tiny):
    for ranks in (1, 2, 4):
        model = train_gpt.build_model(tiny, 64, BOS)
        members = train_gpt.assign(model, train_gpt.assignments(tiny))
        numel = sum(p.numel() for p in model.parameters())
        banks = train_gpt.fill_banks(members, 1e12, 0, ranks)
        held = sum(bank.values.numel() for bank in banks)
        state = sum(x.numel() for bank in banks for x in bank.state.values())
        assert numel <= held == sum(bank.grads.numel() for bank in banks) < 1.1 * numel
        assert state <= 2 * held / ranks


# hooks, order, errors


def test_launches_happen_in_backward_and_waits_after_it():
    model, comm = chain((4,) * 6), Recorder()
    optimizer = adam_optimizer(model, comm)
    x = torch.randn(2, 4)
    for step in range(2):
        comm.events.clear()
        optimizer.arm(step)
        model(x).sum().backward()
        in_backward = comm.kinds()
        comm.events.append(("returned", "backward"))
        optimizer.step(FULL)
    assert in_backward == [("start", "reduce")] * len(optimizer.banks)
    after = comm.events[comm.events.index(("returned", "backward")) + 1:]
    order = [event[2] for event in comm.events if event[:2] == ("start", "reduce")]
    assert [event[2] for event in after if event[:2] == ("wait", "reduce")] == order
    assert sum(event[:2] == ("wait", "gather") for event in after) == len(optimizer.banks)
    in_turn = [event[:2] for event in after][:2 * len(optimizer.banks)]
    assert in_turn == [("wait", "reduce"), ("start", "gather")] * len(optimizer.banks), "each is waited for just before its use"
    assert order[0] in {bank.grads.data_ptr() for bank in optimizer.banks if bank.slots[0].name.startswith("4.")}, "last layer first"


def test_sync_step_launches_nothing_in_backward():
    model, comm = chain(), Recorder()
    optimizer = adam_optimizer(model, comm, settings=train_gpt.SyncSettings(sync="step"))
    for step in range(2):
        optimizer.arm(step)
        comm.events.clear()
        model(torch.randn(2, 6)).sum().backward()
        assert not comm.events
        optimizer.step(FULL)
        assert comm.kinds().count(("start", "reduce")) == len(optimizer.banks)


def test_a_bank_launches_when_all_of_it_has_come_in_any_order():
    """Readiness is counted: firing the hooks in any order launches at the last one, whichever that is."""
    names = ["a", "b", "c", "d"]
    for seed in range(8):
        params = {name: nn.Parameter(torch.zeros(3)) for name in names}
        comm = Recorder()
        bank = train_gpt.Bank("b", [train_gpt.Member(n, p, ONCE) for n, p in params.items()], 0, 1)
        optimizer = train_gpt.BankOptimizer([bank], comm)
        optimizer.order = [bank]
        optimizer.arm(0)
        shuffled = [names[i] for i in torch.randperm(4, generator=torch.Generator().manual_seed(seed))]
        for name in shuffled:
            assert not comm.events, f"launched before {name} of {shuffled}"
            params[name].sum().backward()
        assert comm.kinds() == [("start", "reduce")]


def test_a_bank_that_is_ready_early_waits_for_its_turn():
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    comm = Recorder()
    banks = [train_gpt.Bank(n, [train_gpt.Member(n, p, ONCE)], 0, 1) for n, p in (("first", first), ("second", second))]
    optimizer = train_gpt.BankOptimizer(banks, comm)
    optimizer.order = banks
    optimizer.arm(0)
    second.sum().backward()
    assert not comm.events
    first.sum().backward()
    assert [event[2] for event in comm.events] == [bank.grads.data_ptr() for bank in banks]


def test_a_tied_parameter_is_ready_once_after_all_its_uses():
    p, q = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    comm = Recorder()
    optimizer = adam_optimizer(nn.ParameterDict({"p": p, "q": q}), comm)
    for step in range(2):
        optimizer.arm(step)
        ((p * q).sum() + (p * p).sum()).backward()
        optimizer.step(FULL)
    assert comm.kinds().count(("start", "reduce")) == 4


def test_hook_sees_the_final_gradient():
    """A user's own register_hook changes the gradient before it is accumulated; the bank must hold the changed one."""
    model = chain((3, 3))
    model[0].weight.register_hook(lambda g: 3 * g)
    optimizer = adam_optimizer(model)
    twin = chain((3, 3))
    x = torch.randn(2, 3)
    model(x).sum().backward()
    twin(x).sum().backward()
    slot = next(slot for bank in optimizer.banks for slot in bank.slots if slot.name == "0.weight")
    assert torch.allclose(slot.grad, 3 * twin[0].weight.grad)


def test_building_twice_fires_once_and_hooks_can_be_removed():
    model = chain()
    adam_optimizer(model)
    optimizer = adam_optimizer(model, grad_factor=1.0)
    model(torch.ones(1, 6)).sum().backward()
    assert all(slot.arrived for bank in optimizer.banks for slot in bank.slots)
    optimizer.remove_hooks()
    model(torch.ones(1, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_a_parameter_without_a_gradient_is_an_error_with_its_name_and_count():
    model = chain()
    optimizer = adam_optimizer(model, bank_bytes=1e9)
    optimizer.arm(0)
    model[:2](torch.randn(2, 6)).sum().backward()
    with pytest.raises(train_gpt.RunError, match=r"4 of 6 .* not 2\.bias, 2\.weight"):
        optimizer.step(FULL)


def test_a_step_before_backward_is_an_error():
    optimizer = adam_optimizer(chain())
    with pytest.raises(train_gpt.RunError, match="arm"):
        optimizer.step(FULL)
    optimizer.arm(0)
    with pytest.raises(train_gpt.RunError, match="0 of 1"):
        optimizer.step(FULL)
    sum(p.sum() for bank in optimizer.banks for p in [bank.slots[0].param]).backward()
    optimizer.step(FULL)
    with pytest.raises(train_gpt.RunError, match="arm"):
        optimizer.step(FULL)


def test_a_gradient_for_a_launched_bank_is_an_error():
    model = chain()
    optimizer = adam_optimizer(model)
    x = torch.randn(2, 6)
    optimizer.arm(0)
    model(x).sum().backward()
    optimizer.step(FULL)
    optimizer.arm(1)
    model(x).sum().backward()
    with pytest.raises(train_gpt.RunError, match="after its bank .* was launched"):
        model(x).sum().backward()
    with pytest.raises(train_gpt.RunError, match="launched already"):
        optimizer.arm(2)


def test_a_parameter_ready_twice_is_an_error_with_its_name():
    a, b = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    bank = train_gpt.Bank("b", [train_gpt.Member("a", a, ONCE), train_gpt.Member("b", b, ONCE)], 0, 1)
    optimizer = train_gpt.BankOptimizer([bank], train_gpt.Comm())
    optimizer.arm(0)
    a.sum().backward()
    with pytest.raises(train_gpt.RunError, match="^a got its gradient twice"):
        a.sum().backward()


@pytest.mark.parametrize("break_it", [
    lambda model: setattr(model[0].weight, "data", torch.zeros(5, 6)),
    lambda model: model.to(torch.float64),
])
def test_a_parameter_moved_out_of_its_bank_is_found(break_it):
    model = chain()
    optimizer = adam_optimizer(model)
    break_it(model)
    optimizer.arm(0)
    dtype = model[1].weight.dtype
    with pytest.raises(train_gpt.RunError, match="other memory or another dtype"):
        model(torch.randn(2, 6, dtype=dtype)).sum().backward()
        optimizer.step(FULL)


def test_every_parameter_is_assigned_exactly_once(tiny):
    model = train_gpt.build_model(tiny, 64, BOS)
    table = train_gpt.assignments(tiny)
    assert len(train_gpt.assign(model, table)) == len(list(model.parameters()))
    with pytest.raises(train_gpt.RunError, match="scalars: 0 lines"):
        train_gpt.assign(model, [line for line in table if line.pattern != "scalars"])
    with pytest.raises(train_gpt.RunError, match="scalars: 2 lines"):
        train_gpt.assign(model, [*table, train_gpt.Assignment("scal*", table[0].rule)])


def test_a_bank_of_two_dtypes_is_refused():
    members = [train_gpt.Member("a", nn.Parameter(torch.zeros(2)), ONCE),
               train_gpt.Member("b", nn.Parameter(torch.zeros(2, dtype=torch.bfloat16)), ONCE)]
    with pytest.raises(train_gpt.RunError, match="b is torch.bfloat16"):
        train_gpt.Bank("mixed", members, 0, 1)


def test_adam_updates_every_second_step_on_the_sum_of_both():
    rule = dataclasses.replace(ONCE, every=2)
    p = nn.Parameter(torch.zeros(5))
    optimizer = adam_optimizer(nn.ParameterList([p]), rule=rule)
    twin = nn.Parameter(torch.zeros(5))
    judge = torch.optim.AdamW([twin], lr=0.01, betas=(0.65, 0.95), eps=1e-8, weight_decay=0)
    grads = torch.randn(4, 5)
    for step, g in enumerate(grads):
        optimizer.arm(step)
        (p * g).sum().backward()
        before = p.detach().clone()
        optimizer.step(FULL)
        assert torch.equal(p, before) == (step % 2 == 0)
        if step % 2:
            twin.grad = grads[step - 1] + g
            judge.step()
            assert torch.allclose(p, twin, atol=1e-6)


# ranks


def train_steps(comm, flags, steps, batches):
    """A few steps of the tiny record on this rank's part of each batch -> losses, the state's hash, the parameters."""
    config = dataclasses.replace(train_gpt.Config(**TINY), **flags)
    model = train_gpt.build_model(config, 64, BOS)
    optimizer = train_gpt.build_optimizer(config, model, comm)
    windows = train_gpt.WindowSchedule(config, model.rotary)
    losses = []
    for step in range(steps):
        mine = batches[step].chunk(comm.ranks)[comm.rank]
        for i, slot in enumerate(mine):
            if i == len(mine) - 1:
                optimizer.arm(step)
            loss = model(slot[:-1], slot[1:], windows.advance_to(step))
            loss.backward()
            losses.append(loss.item())
        optimizer.step(train_gpt.step_values(config, step))
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return losses, optimizer.state_hash(), parameters, [bank.name for bank in optimizer.order]


@pytest.fixture(scope="module")
def batches():
    return torch.from_numpy(some_documents(9, 6 * 8 * 49).astype("int64")).view(6, 8, 49)


def test_ranks_1_2_4_train_the_same_model(on_ranks, batches):
    alone = on_ranks(1, train_steps, {}, 4, batches)[0]
    for ranks in (2, 4):
        results = on_ranks(ranks, train_steps, {}, 4, batches)
        together = [loss for result in zip(*(r[0] for r in results)) for loss in result]
        assert sorted(together) == pytest.approx(sorted(alone[0]), rel=1e-4)
        assert len({result[1] for result in results}) == 1, "state differs between ranks"
        for name, p in results[0][2].items():
            assert torch.allclose(p, alone[2][name], rtol=2e-3, atol=2e-4), name
            for other in results[1:]:
                assert torch.equal(p, other[2][name])
        assert len({tuple(result[3]) for result in results}) == 1, "launch order differs between ranks"


def test_sync_and_bank_size_change_no_byte(on_ranks, batches):
    hashes = {on_ranks(2, train_steps, flags, 4, batches)[0][1] for flags in
              ({}, {"sync": "step"}, {"bank_mb": 0.0}, {"bank_mb": 1000.0})}
    assert len(hashes) == 1


def test_flags_of_the_config_reach_the_engine(batches):
    """bf16 parameters; what each flag changes is in the bytes."""
    bf16 = {"dtype": "bfloat16"}
    plain, wide = (train_steps(train_gpt.Comm(), {**bf16, **flags}, 2, batches) for flags in ({}, {"fp32_grads": True}))
    assert plain[1] != wide[1] and plain[0] == pytest.approx(wide[0], rel=1e-2)
    assert {p.dtype for p in plain[2].values()} == {torch.bfloat16, torch.float32}
    plain = train_steps(train_gpt.Comm(), {}, 2, batches)
    assert train_steps(train_gpt.Comm(), {"unused": True, "check_grads": True}, 2, batches)[1] == plain[1]
    assert train_steps(train_gpt.Comm(), {"clip_norm": 1e-3}, 2, batches)[1] != plain[1]


def test_one_rank_twice_gives_the_same_bytes(batches):
    assert train_steps(train_gpt.Comm(), {}, 3, batches)[1] == train_steps(train_gpt.Comm(), {}, 3, batches)[1]


def test_one_step_is_the_reference_s(batches):
    """One step of the tiny record from gradients in float64: NorMuon on step 0; Adam on step 1, with both steps' gradients."""
    config = train_gpt.Config(**TINY)
    model = train_gpt.build_model(config, 64, BOS)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * p.shape[-1] ** -0.5 * torch.randn_like(p))
    optimizer = train_gpt.build_optimizer(config, model, train_gpt.Comm())
    windows = train_gpt.WindowSchedule(config, model.rotary)
    sums = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in model.named_parameters()}
    for step in range(2):
        before = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
        for i, slot in enumerate(batches[step]):
            if i == 7:
                optimizer.arm(step)
            model(slot[:-1], slot[1:], windows.advance_to(step)).backward()
        long, short = windows.advance_to(step)
        loss = sum(reference.loss(before, slot[:-1].tolist(), slot[1:].tolist(), long, short, BOS, 2) for slot in batches[step]) / 8
        loss.backward()
        optimizer.step(train_gpt.step_values(config, step))
        if step == 0:
            p = dict(model.named_parameters())
            for name in ("blocks.3.attn.qkvo", "blocks.3.mlp.fc", "blocks.3.mlp.proj", "blocks.3.attn.gate", "smear_gate"):
                plain = reference.NorMuon(before[name].detach(), 4 if "qkvo" in name else 1, 2.0 if "fc" in name else 1.0)
                plain.step(before[name].grad, momentum=config.muon_momentum_low)
                assert (p[name] - plain.p).norm() <= 1e-4 * plain.p.norm(), name
            assert torch.equal(p["embed.weight"].double(), before["embed.weight"]), "Adam waits for its second step"
        for name in sums:
            sums[name] += before[name].grad
    for name, multiplier in (("embed.weight", 75), ("value_embeds.1.weight", 75), ("lm_head.weight", 1), ("scalars", 5)):
        twin = nn.Parameter(before[name].detach().clone())
        twin.grad = sums[name]
        torch.optim.AdamW([twin], lr=0.008 * multiplier, betas=(0.65, 0.95), eps=1e-8, weight_decay=0).step()
        p = dict(model.named_parameters())[name].detach().double()
        sure = sums[name].abs() > 1e-5 * sums[name].abs().max()  # near zero the sign of a gradient is rounding
        assert (p - twin)[sure].norm() <= 1e-4 * twin[sure].norm(), name


def of_another_seed(comm):
    model = chain(seed=comm.rank)
    adam_optimizer(model, comm)
    return [p.detach().clone() for p in model.parameters()]


def test_all_ranks_begin_with_the_parameters_of_rank_0(on_ranks):
    for parameters in on_ranks(2, of_another_seed):
        assert all(torch.equal(p, q) for p, q in zip(parameters, chain(seed=0).parameters()))


def other_widths(comm):
    adam_optimizer(chain((6, 5, 7 + comm.rank, 4)), comm)


def other_names(comm):
    adam_optimizer(nn.ParameterDict({("a" if comm.rank else "b"): nn.Parameter(torch.zeros(4))}), comm)


def other_settings(comm):
    adam_optimizer(chain(), comm, settings=train_gpt.SyncSettings(exact=bool(comm.rank)))


@pytest.mark.parametrize("build", [other_widths, other_names, other_settings])
def test_ranks_whose_models_differ_all_get_an_error(_rank_pools, on_ranks, build):
    on_ranks(2, nothing)
    outcomes = _rank_pools[2].outcomes(build)
    assert [kind for kind, _ in outcomes] == ["error", "error"]
    assert all("models differ" in str(error) for _, error in outcomes)


def nothing(comm):
    return comm.rank


def test_snapshot_and_restore_put_everything_back(batches):
    config = train_gpt.Config(**TINY)
    model = train_gpt.build_model(config, 64, BOS)
    optimizer = train_gpt.build_optimizer(config, model, train_gpt.Comm())
    windows = train_gpt.WindowSchedule(config, model.rotary)

    def go(steps):
        for step in range(steps):
            optimizer.arm(step)
            model(batches[step][0][:-1], batches[step][0][1:], windows.advance_to(step)).backward()
            optimizer.step(train_gpt.step_values(config, step))
        return optimizer.state_hash()
    fresh, saved = optimizer.state_hash(), optimizer.snapshot()
    trained = go(3)
    optimizer.restore(saved)
    windows.restart()
    assert optimizer.state_hash() == fresh != trained
    assert go(3) == trained, "the gradients of a step without Adam were left in its banks"
