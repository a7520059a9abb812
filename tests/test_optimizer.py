"""Update rules, buckets, gradient sync and saved state, compared with plain rules in float64 and
with one process."""

import contextlib
import dataclasses
import gc
import math
import types
import weakref

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import frontier
import gpt_speedrun
import reference
import train_gpt
from conftest import TINY, some_documents
from gpt_speedrun import engine

BOS = 63
ONCE = engine.Adam(lr=0.01, beta1=0.65, beta2=0.95, eps=1e-8, every=1)
FULL = engine.Plan(lr_factor=1.0, momentum=0.95)
WIDE, TALL = (engine.NorMuon(0.03, 1.2, 0.95, torch.float32, wide=wide) for wide in (True, False))


@dataclasses.dataclass(frozen=True)
class Descent:
    """Gradient descent without state. Unlike Adam and NorMuon it depends on the scale of
    gradients."""

    lr: float = 0.001
    every: int = 1

    def unit(self, spec):
        return ()

    def init_state(self, shard):
        return {}

    def hyper(self, plan, t):
        return {"lr": self.lr * plan.lr_factor}

    @staticmethod
    def update(param, grad, state, hyper):
        param.sub_(hyper["lr"] * grad)


@dataclasses.dataclass(frozen=True)
class Langevin(Descent):
    """Stochastic gradient Langevin dynamics. rows and lazy: as in Adam."""

    seed: int = 3
    rows: bool = False
    lazy: bool = True
    own: bool = False  # numbers of its own

    def unit(self, spec):
        return tuple(spec.param.shape[1:]) if self.rows else ()

    def hyper(self, plan, t):
        return {"lr": self.lr, **({} if self.own else {"noise": self.seed})}

    @staticmethod
    def update(param, grad, state, hyper):
        param.sub_(hyper["lr"] * grad).add_(
            hyper["noise"] if "noise" in hyper else torch.randn(param.shape)
        )


class Recorder(engine.Comm):
    """Records which collectives are started and waited for."""

    def __init__(self, rank=0, ranks=1):
        super().__init__(rank, ranks)
        self.events = []

    def _note(self, handle, kind, tensor):
        recorder = self
        what = (kind, tensor.data_ptr())
        self.events.append(("start", *what))

        class Noted:
            def wait(self):
                recorder.events.append(("wait", *what))
                handle.wait()

        return Noted()

    def reduce_scatter(self, shard, full, buffer):
        return self._note(super().reduce_scatter(shard, full, buffer), "reduce", full)

    def all_gather(self, full, shard):
        return self._note(super().all_gather(full, shard), "gather", full)

    def kinds(self):
        return [event[:2] for event in self.events]


class Operations(TorchDispatchMode):
    """Records the names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket._qualified_op_name.split("::")[1])
        return func(*args, **(kwargs or {}))


def chain(widths=(6, 5, 7, 4), seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(a, b) for a, b in zip(widths, widths[1:])))


def specs_with(model, rule=ONCE):
    return [engine.ParamSpec(name, p, rule) for name, p in model.named_parameters()]


def optimizer_of(model, comm=None, bucket_bytes=0.0, rule=ONCE, grad_scale=1.0, **changes):
    """An optimizer with one rule for every parameter of the model. changes: SyncSettings."""
    comm = comm or engine.Comm()
    buckets = gpt_speedrun.fill_buckets(
        specs_with(model, rule), bucket_bytes, comm.rank, comm.ranks
    )
    return gpt_speedrun.Optimizer(
        buckets, comm, gpt_speedrun.SyncSettings(**changes), model, grad_scale
    )


def bucket_of(params, rule=ONCE, rank=0, ranks=1, grad_dtype=None, **spec):
    """Build one bucket of parameters by name."""
    return engine.Bucket(
        "b",
        [engine.ParamSpec(n, p, rule, **spec) for n, p in params.items()],
        rank,
        ranks,
        grad_dtype,
    )


# rules


def test_adam_is_torch_s_where_eps_is_tiny():
    draw = torch.Generator().manual_seed(0)
    p = torch.randn(1000, generator=draw)
    rule = dataclasses.replace(ONCE, eps=1e-20)
    state = rule.init_state(p)
    theirs = nn.Parameter(p.clone())
    judge = torch.optim.AdamW([theirs], lr=0.007, betas=(0.65, 0.95), eps=1e-20, weight_decay=0)
    for t in range(1, 6):
        theirs.grad = torch.randn(1000, generator=draw)
        rule.update(p, theirs.grad, state, rule.hyper(engine.Plan(lr_factor=0.7), t))
        judge.step()
        assert torch.allclose(p, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "rule,shape",
    [(ONCE, (40,)), (WIDE, (2, 3, 7)), (TALL, (2, 7, 3))],
    ids=["adam", "wide", "tall"],
)
def test_a_compiled_rule_is_the_same_rule(rule, shape):
    """Adam has two forms, one for the compiler. Here it is traced but not compiled, which would
    take seconds."""
    draw = torch.Generator().manual_seed(0)
    first = torch.randn(shape, generator=draw)
    results = []
    for update in (rule.update, torch.compile(rule.update, backend="eager", dynamic=False)):
        p = first.clone()
        state = rule.init_state(first)
        for t in (1, 2, 3):
            g = torch.randn(shape, generator=torch.Generator().manual_seed(t))
            hyper = {
                **rule.hyper(engine.Plan(lr_factor=0.5, momentum=0.9), t),
                "scale": torch.full((len(p), 1, 1), 2.0),
            }
            if isinstance(rule, engine.Adam):
                hyper["eps"] = 0.3
            update(p, g, state, hyper)
        results.append([p, *state.values()])
    for plain, traced in zip(*results):
        assert torch.allclose(plain, traced, rtol=1e-5, atol=1e-6) and plain.abs().max() > 0
    assert not torch.equal(results[0][0], first)


@pytest.mark.parametrize(
    "shape,matrices,k",
    [((8, 32), 1, 2.0), ((8, 32), 4, 1.0), ((32, 8), 1, 1.0), ((6, 12), 1, 1.0), ((1, 12), 1, 1.0)],
)
def test_normuon_is_the_record_s_written_plainly(shape, matrices, k):
    torch.manual_seed(2)
    param = nn.Parameter(torch.randn(shape))
    plain = reference.NorMuon(param.detach().double(), matrices, k)
    rule = WIDE if shape[1] > shape[0] else TALL
    scale = k * math.sqrt(max(1, shape[0] / shape[1]))
    bucket = bucket_of({"p": param}, rule, unit=(shape[0], shape[1] // matrices), scale=scale)
    optimizer = gpt_speedrun.Optimizer(
        [bucket], engine.Comm(), gpt_speedrun.SyncSettings(), nn.ParameterDict({"p": param})
    )
    for step in range(4):
        g = torch.randn(shape)
        optimizer.prepare_for_backward(step)
        (param * g).sum().backward()
        optimizer.step(engine.Plan(lr_factor=0.7, momentum=0.9))
        plain.step(g.double(), f=0.7, momentum=0.9)
        assert torch.allclose(param.double(), plain.p, rtol=1e-4, atol=1e-5)


def test_a_matrix_in_bf16_loses_no_update():
    """Updates below bf16's resolution add up in its rest; the model reads the rounded sum.
    Compared with float32."""
    draw = torch.Generator().manual_seed(0)
    rule = dataclasses.replace(TALL, lr=1e-5)
    ours = torch.randn(2, 8, 6, generator=draw).bfloat16()
    plain = ours.float()
    states = [rule.init_state(x) for x in (ours, plain)]
    hyper = {
        **rule.hyper(FULL, 1),
        "scale": torch.ones(2, 1, 1),
    }
    for _ in range(6):
        grad = torch.randn(ours.shape, generator=draw).bfloat16()
        before = plain.clone()
        for x, state in zip((ours, plain), states):
            rule.update(x, grad.to(x.dtype), state, hyper)
        assert (plain - before).abs().max() < 2e-5 and torch.equal(ours, plain.bfloat16())
        assert torch.equal(ours + states[0]["rest"], plain) and "rest" not in states[1]


# buckets


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    ranks=st.integers(1, 8),
    rank=st.data(),
)
def test_shards_are_equal_and_cover_every_parameter_once(sizes, ranks, rank):
    params = [nn.Parameter(torch.arange(float(n)) + 1000 * i) for i, n in enumerate(sizes)]
    before = [p.detach().clone() for p in params]
    at = rank.draw(st.integers(0, ranks - 1))
    bucket = bucket_of({str(i): p for i, p in enumerate(params)}, rank=at, ranks=ranks)
    assert (
        len(bucket.param_data) == ranks * bucket.shard_numel
        and bucket.shard_numel % bucket.SHARD_ALIGNMENT == 0
    )
    assert (
        bucket.param_shard.data_ptr() == bucket.param_data.data_ptr() + at * bucket.shard_numel * 4
    )
    taken = torch.zeros(len(bucket.param_data))
    for slot, p, old in zip(bucket.slots, params, before):
        assert torch.equal(p, old), "values do not change when a parameter moves into its bucket"
        assert p.data_ptr() == bucket.param_data.data_ptr() + slot.offset * 4
        assert slot.grad.data_ptr() == bucket.grad_data.data_ptr() + slot.offset * 4
        taken[slot.offset : slot.offset + p.numel()] += 1
    assert taken.max() == 1 and taken.sum() == sum(sizes)


def test_buckets_fill_from_the_last_layer_and_keep_kinds_apart(tiny):
    config = dataclasses.replace(tiny, dtype="bfloat16")
    model = train_gpt.build_model(config, train_gpt.Encoding(64, BOS))
    specs = train_gpt.specs_of(config, model)
    sizes = {}
    for limit in (0, 20_000, 1e12):
        buckets = train_gpt.fill_buckets(specs, limit, 0, 2)
        names = [slot.name for bucket in buckets for slot in bucket.slots]
        assert sorted(names) == sorted(name for name, _ in model.named_parameters())
        for bucket in buckets:
            assert len({slot.param.dtype for slot in bucket.slots}) == 1
            layers = [
                int(slot.name.split(".")[1])
                for slot in bucket.slots
                if slot.name.startswith("blocks")
            ]
            assert layers == sorted(layers, reverse=True)
        sizes[limit] = len(buckets)
    assert sizes[0] == len(specs) > sizes[20_000] > sizes[1e12]
    late = [spec._replace(first_step=3) if spec.name == "scalars" else spec for spec in specs]
    assert len(train_gpt.fill_buckets(late, 1e12, 0, 2)) == sizes[1e12], (
        "scalars have their own dtype and learning rate in any case"
    )
    late = [
        spec._replace(first_step=3) if spec.name == "value_embeds.0.weight" else spec
        for spec in specs
    ]
    assert len(train_gpt.fill_buckets(late, 1e12, 0, 2)) == sizes[1e12] + 1, (
        "another first step needs another bucket"
    )


@pytest.mark.parametrize("factor", [1.0, 1 / 3])
def test_fp32_gradients_of_bf16_parameters_lose_no_bits(factor):
    p = nn.Parameter(torch.zeros(64, dtype=torch.bfloat16))
    grads = torch.randn(256, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    errors = {}
    for dtype in (torch.bfloat16, torch.float32):
        bucket = bucket_of({"p": p}, grad_dtype=dtype)
        for g in grads:
            p.grad = g.clone()
            bucket.add_grad(bucket.slots[0], factor)
        assert bucket.grad_data.dtype == dtype
        errors[dtype] = (
            (bucket.slots[0].grad.double() - factor * grads.double().sum(0)).abs().max().item()
        )
    assert errors[torch.float32] < 1e-4 < 0.01 < errors[torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_adam_of_bf16_computes_in_float32_and_rounds_once(dtype):
    """The moments have the parameter's dtype, or float32."""
    draw = torch.Generator().manual_seed(0)
    p, g = (torch.randn(500, generator=draw).bfloat16() for _ in range(2))
    rule = dataclasses.replace(ONCE, fp32_moments=dtype == torch.float32)
    state = rule.init_state(p)
    kept = g.clone()
    assert {x.dtype for x in state.values()} == {dtype}
    for t in (1, 2):
        p32, g32, m32, v32 = (x.float() for x in (p, g, state["m"], state["v"]))
        m32 = 0.65 * m32 + 0.35 * g32
        v32 = 0.95 * v32 + 0.05 * g32 * g32
        p32 = p32 - 0.01 * math.sqrt(1 - 0.95**t) / (1 - 0.65**t) * m32 / (v32.sqrt() + 1e-8)
        rule.update(p, g, state, rule.hyper(FULL, t))
        for ours, plain in ((p, p32), (state["m"], m32), (state["v"], v32)):
            rounding = 2**-8 if ours.dtype == torch.bfloat16 else 1e-6
            assert torch.allclose(ours.float(), plain, rtol=rounding, atol=1e-30)
            same = ours == plain.bfloat16()
            assert ours.dtype == torch.float32 or same.float().mean() > 0.99
    assert torch.equal(g, kept)


def test_a_transposed_gradient_lands_right():
    p = nn.Parameter(torch.zeros(3, 5))
    bucket = bucket_of({"p": p})
    g = torch.randn(5, 3)
    for _ in range(2):
        p.grad = g.T
        bucket.add_grad(bucket.slots[0], 1.0)
    assert torch.equal(bucket.slots[0].grad, 2 * g.T)


# hooks, order, errors


def test_launches_happen_in_backward_and_waits_after_it():
    model = chain((4,) * 6)
    comm = Recorder()
    optimizer = optimizer_of(model, comm)
    x = torch.randn(2, 4)
    for step in range(2):
        comm.events.clear()
        optimizer.prepare_for_backward(step)
        model(x).sum().backward()
        in_backward = comm.kinds()
        comm.events.append(("returned", "backward"))
        optimizer.step(FULL)
    assert in_backward == [("start", "reduce")] * len(optimizer.buckets)
    after = comm.events[comm.events.index(("returned", "backward")) + 1 :]
    order = [event[2] for event in comm.events if event[:2] == ("start", "reduce")]
    assert [event[2] for event in after if event[:2] == ("wait", "reduce")] == order
    assert sum(event[:2] == ("wait", "gather") for event in after) == len(optimizer.buckets)
    in_turn = [event[:2] for event in after][: 2 * len(optimizer.buckets)]
    assert in_turn == [("wait", "reduce"), ("start", "gather")] * len(optimizer.buckets), (
        "each bucket is waited for just before its update"
    )
    last_layer = {
        bucket.grad_data.data_ptr()
        for bucket in optimizer.buckets
        if bucket.slots[0].name.startswith("4.")
    }
    assert order[0] in last_layer


def test_sync_step_launches_nothing_in_backward():
    model = chain()
    comm = Recorder()
    optimizer = optimizer_of(model, comm, sync="step")
    for step in range(2):
        optimizer.prepare_for_backward(step)
        comm.events.clear()
        model(torch.randn(2, 6)).sum().backward()
        assert not comm.events
        optimizer.step(FULL)
        assert comm.kinds().count(("start", "reduce")) == len(optimizer.buckets)


def test_a_bucket_that_is_ready_early_waits_for_its_turn():
    comm = Recorder()
    params = nn.ParameterDict({name: nn.Parameter(torch.zeros(3)) for name in ("first", "second")})
    optimizer = optimizer_of(params, comm)
    order = optimizer.reducer.launch_orders[2] = optimizer.buckets[::-1]
    optimizer.prepare_for_backward(0)
    params["second"].sum().backward()
    assert not comm.events
    params["first"].sum().backward()
    assert [event[2] for event in comm.events] == [bucket.grad_data.data_ptr() for bucket in order]


def test_a_tied_parameter_is_ready_once_after_all_its_uses():
    p = nn.Parameter(torch.ones(3))
    q = nn.Parameter(torch.ones(3))
    comm = Recorder()
    optimizer = optimizer_of(nn.ParameterDict({"p": p, "q": q}), comm)
    for step in range(2):
        optimizer.prepare_for_backward(step)
        ((p * q).sum() + (p * p).sum()).backward()
        optimizer.step(FULL)
    assert comm.kinds().count(("start", "reduce")) == 4


def test_building_twice_fires_once_and_hooks_can_be_removed():
    """Removing the first optimizer's hooks later keeps those of the second."""
    model = chain()
    first = optimizer_of(model)
    second = optimizer_of(model)
    # the first optimizer's hooks would raise: its backward was not prepared
    steps_of(model, second, 1, True)
    first.remove_hooks()
    steps_of(model, second, 1, False)
    assert second.buckets[0].updates == 2
    second.remove_hooks()
    model(torch.ones(2, 6)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("sync", ["hook", "step"])
def test_a_step_before_backward_or_a_backward_before_the_step_is_an_error(sync):
    model = chain()
    optimizer = optimizer_of(model, sync=sync)
    with pytest.raises(engine.RunError, match="prepare_for_backward"):
        optimizer.step(FULL)
    optimizer.prepare_for_backward(0)
    with pytest.raises(engine.RunError, match="0 of 1"):
        optimizer.step(FULL)
    for step in (0, 1):
        if step:
            optimizer.prepare_for_backward(step)
        model(torch.ones(1, 6)).sum().backward()
        with pytest.raises(engine.RunError, match=r"^all 1 micro-batches.*call step\(\)"):
            optimizer.prepare_for_backward(step + 1)
        optimizer.step(FULL)
    with pytest.raises(engine.RunError, match="prepare_for_backward"):
        optimizer.step(FULL)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda model: setattr(model[0].weight, "data", torch.zeros(5, 6)),
        lambda model: model.to(torch.float64),
    ],
)
def test_a_parameter_moved_out_of_its_bucket_is_found(break_it):
    model = chain()
    optimizer = optimizer_of(model)
    break_it(model)
    optimizer.prepare_for_backward(0)
    dtype = model[1].weight.dtype
    with pytest.raises(
        engine.RunError,
        match="other memory, by .data, .* a cast or a library",
    ):
        model(torch.randn(2, 6, dtype=dtype)).sum().backward()
        optimizer.step(FULL)


def test_every_parameter_is_assigned_exactly_once(tiny):
    model = train_gpt.build_model(tiny, train_gpt.Encoding(64, BOS))
    assert [spec.name for spec in train_gpt.specs_of(tiny, model)] == [
        name for name, _ in model.named_parameters()
    ]
    model.scalars.kind = "mix"
    with pytest.raises(
        train_gpt.RunError,
        match="scalars: PARAM_GROUPS has no row for kind 'mix'; .* embed, .*mlp_proj",
    ):
        train_gpt.specs_of(tiny, model)


def test_every_parameter_is_matched_by_one_line_of_a_table():
    table = [
        gpt_speedrun.Assignment("*.bias", ONCE),
        gpt_speedrun.Assignment("*.weight", TALL, scale=2.0, first_step=5),
    ]
    specs = {spec.name: spec for spec in gpt_speedrun.assign(chain(), table)}
    assert len(specs) == 6 and specs["0.weight"].first_step == 5 and specs["0.weight"].scale == 2.0
    with pytest.raises(engine.RunError, match="0.weight: 0 lines .*add a line"):
        gpt_speedrun.assign(chain(), table[:1])
    with pytest.raises(engine.RunError, match=r"0.weight: 2 lines .*\(\*.weight, 0.\*\).* narrow"):
        gpt_speedrun.assign(chain(), [*table, gpt_speedrun.Assignment("0.*", ONCE)])


# as one of torch's optimizers


def steps_of(model, optimizer, steps, prepared):
    """Run three summed backwards per step, prepared or in the manner of a torch optimizer."""
    for step in range(steps):
        for i in range(3):
            loss = model(torch.full((2, 6), 1.0 + step + i)).square().sum()
            if prepared:
                optimizer.prepare_for_backward(step, i, 3)
                loss.backward()
            else:
                with optimizer.no_sync() if i < 2 else contextlib.nullcontext():
                    (loss / 3).backward()
        optimizer.step(FULL)
        if not prepared:
            optimizer.zero_grad()


def scaled_step(comm):
    """Run a step of descent from zero, with grad_scale 3 and three backwards. Return the
    parameter."""
    p = nn.Parameter(torch.zeros(5))
    optimizer = optimizer_of(nn.ParameterDict({"p": p}), comm, rule=Descent(1.0), grad_scale=3.0)
    for gradient in (1.0, 10.0, 100.0):
        with optimizer.no_sync() if gradient < 100 else contextlib.nullcontext():
            (p * gradient * (1 + comm.rank)).sum().backward()
    optimizer.step(FULL)
    return p.detach().clone()


@pytest.mark.parametrize("ranks", [1, 2])
def test_grad_scale_multiplies_gradients_in_no_sync_too(on_ranks, ranks):
    """Gradients are summed over the backwards and averaged over the ranks."""
    for p in on_ranks(ranks, scaled_step):
        assert torch.allclose(p, torch.full((5,), -3 * 111.0 * (1 + ranks) / 2), rtol=1e-6, atol=0)


def test_zero_grad_in_place_of_step_drops_a_batch():
    models = chain(), chain()
    for model, spoilt in zip(models, (True, False)):
        optimizer = optimizer_of(model)
        for step in range(3):
            if spoilt:
                with optimizer.no_sync():
                    model(torch.full((2, 6), 9.0)).sum().backward()
                if step:
                    model(torch.full((2, 6), math.nan)).sum().backward()  # launched
                optimizer.zero_grad()
            model(torch.ones(2, 6)).square().sum().backward()
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(*(model.parameters() for model in models)))


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.norm(self.qkv(x)))


MUON = engine.NorMuon()
SPLIT = gpt_speedrun.Assignment("qkv.weight", MUON, unit=(4, 4))


def used(optimizer, model, *calls):
    """Do what each call says. A tuple prepares a backward; qkv is a gradient of qkv.weight alone."""
    for call in calls:
        if call == "step":
            optimizer.step()
        elif call == "closure":
            optimizer.step(lambda: used(optimizer, model, "backward", "backward"))
        else:
            if isinstance(call, tuple):
                optimizer.prepare_for_backward(*call)
            with (
                optimizer.no_sync()
                if str(call).startswith("in no_sync")
                else contextlib.nullcontext()
            ):
                given = [
                    p
                    for name, p in model.named_parameters()
                    if call == "all but qkv.bias" and name != "qkv.bias"
                ]
                loss = (
                    model.qkv.weight.sum()
                    if str(call).endswith("qkv")
                    else model(torch.ones(1, 4)).sum()
                )
                (sum(p.sum() for p in given) if given else loss).backward(
                    create_graph="graph" in call
                )


def refused(says, *calls, table=(SPLIT,)):
    model = Fused()
    with pytest.raises(engine.RunError, match=says) as raised:
        used(gpt_speedrun.make_optimizer(model, table), model, *calls)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "table,says",
    [
        (
            (),
            r"qkv.weight \[12, 4\] may hold several matrices.* unit=\(4, 4\)\); if it is one"
            r" matrix, with unit=\(12, 4\)",
        ),
        (
            [SPLIT, gpt_speedrun.Assignment("norm.*", MUON)],
            r"norm.weight has shape \(12,\).* NorMuon updates whole matrices.* Adam",
        ),
        ([SPLIT._replace(unit=(5, 4))], r"qkv.weight has shape \(12, 4\) and unit \(5, 4\)"),
        (
            [SPLIT, gpt_speedrun.Assignment("*", engine.Adam())],
            r"qkv.weight: 2 lines .*\(qkv.weight, \*\).* narrow the pattern",
        ),
        (
            [SPLIT._replace(pattern="blocks.*")],
            r"blocks.\* matches no parameter that is not frozen",
        ),
    ],
    ids=str,
)
def test_a_wrong_table_is_answered_with_the_cure(table, says):
    refused(says, table=table)


@pytest.mark.parametrize(
    "calls,says",
    [
        (["step"], r"step\(\) after 0 .* run the last backward outside"),
        (["backward", "step", "step"], r"step\(\) after 0 "),
        (["backward", "backward"], r"twice in one backward; .*no_sync\(\)"),
        (["backward", "step", "backward", "backward"], r"launched; call step\(\) .* no_sync\(\)"),
        (["in no_sync", "step"], r"last backward outside no_sync\(\)"),
        (["closure"], r"twice in one backward"),
        (["backward", "closure"], r"launched; call step\(\)|twice in one backward"),
    ],
    ids=str,
)
def test_a_wrong_use_is_answered_with_the_cure(calls, says):
    refused(says, *calls)


@pytest.mark.parametrize(
    "calls,says",
    [
        ([(0, 0, 2), (0, 1, 3)], "micro-batch 1 of step 0 .*"),
        ([(0, 0, 2), (0, 0, 2)], "micro-batch 1 of step 0 is next"),
        ([(0, 0, 2), (1, 0, 2)], "micro-batch 1 of step 0 is next"),
        ([(0, 1, 2)], "micro-batch 0 of step 0 is next"),
        ([(0, 0, 3), (0, 1, 3), "step"], "2 of 3"),
        ([(0, 0, 1), (0, 1, 2)], r"step\(\)"),
    ],
    ids=str,
)
def test_micro_batches_are_counted(calls, says):
    """With one micro-batch more or fewer the mean would be wrong; the error comes where it
    happens."""
    refused(says, *calls)


@pytest.mark.parametrize("calls", [[(0, 0, 1)], [(0, 0, 2), (0, 1, 2)]], ids=str)
def test_a_parameter_ready_twice_is_an_error_with_its_name(calls):
    """In every micro-batch: two backwards in one micro-batch would count twice."""
    refused("^qkv.weight got its gradient twice", *calls, "qkv")


def test_a_parameter_without_a_gradient_is_an_error_with_its_name_and_count():
    refused(r"4 of 5 .* not qkv\.bias; use", "all but qkv.bias", "step")
    refused(
        r"0 of 5 .* not head\.bias, head\.weight, norm\.bias, norm\.weight, qkv\.bias; use",
        "qkv",
        "step",
    )


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize(
    "calls", [["in no_sync", "in no_sync graph"], ["in no_sync", "graph"], ["graph"]], ids=str
)
def test_a_gradient_with_a_graph_is_refused(calls):
    """Also where it would be added to an earlier one, which torch allows."""
    refused("got a gradient with a graph .* without create_graph=True", *calls)


def test_invariant_mode_counts_the_gradients_in_no_sync():
    model = Fused()
    optimizer = gpt_speedrun.make_optimizer(
        model, [SPLIT], settings=gpt_speedrun.SyncSettings(world_size_invariant=True)
    )
    with pytest.raises(engine.RunError, match="got a gradient in 1 of 2 micro-batches"):
        used(optimizer, model, "in no_sync qkv", "backward", "step")


def test_parameters_on_two_devices_are_refused():
    params = nn.ParameterDict(
        {
            "first": nn.Parameter(torch.zeros(2)),
            "second": nn.Parameter(torch.zeros(2, device="meta")),
        }
    )
    with pytest.raises(
        engine.RunError,
        match="second is on meta, first is on cpu; move the model to one device first",
    ):
        gpt_speedrun.make_optimizer(params)


@pytest.mark.parametrize(
    "arguments,says",
    [
        (lambda model: [model.parameters()], "got a generator; give it the model itself"),
        (lambda model: [nn.ReLU()], "every parameter of this model is frozen; set requires_grad"),
        (
            lambda model: [model, [gpt_speedrun.Assignment("*", engine.Adam)]],
            "Adam.> is not an update rule",
        ),
    ],
)
def test_what_is_no_model_and_no_rule_is_named(arguments, says):
    with pytest.raises(engine.RunError, match=says):
        gpt_speedrun.make_optimizer(*arguments(Fused()))


@pytest.mark.parametrize("build", [gpt_speedrun.make_optimizer, optimizer_of])
def test_ranks_without_a_process_group_are_refused(monkeypatch, build):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        engine.RunError,
        match=r"WORLD_SIZE .* is 2, but no process group .* call init_process_group\(\) first",
    ):
        build(chain())
    monkeypatch.setenv("WORLD_SIZE", "1")
    build(chain())


def test_an_optimizer_of_a_model_that_computes_nothing():
    """One rank needs no values from the device, so `meta` shows sizes before memory is taken."""
    with torch.device("meta"):
        model = torch.nn.Linear(8, 4)
    optimizer = gpt_speedrun.make_optimizer(model)
    assert sum(len(bucket.slots) for bucket in optimizer.buckets) == 2


@dataclasses.dataclass(frozen=True)
class Keeps(Descent):
    """Keeps a state tensor with any name and shape."""

    key: str = "kept"
    shape: tuple | None = None

    def init_state(self, shard):
        return {
            self.key: torch.zeros_like(shard) if self.shape is None else torch.zeros(self.shape)
        }


@pytest.mark.parametrize(
    "rule, scale, says",
    [
        *(
            (
                Keeps(key=key),
                1.0,
                f"returned '{key}'.* a name other than updates, pending, lr, step",
            )
            for key in engine.Bucket.RESERVED
        ),
        (Keeps(shape=()), 1.0, r"returned 'kept' \[\]; each tensor needs 64 entries"),
        (Keeps(), 3.0, "p: its scale is not 1, but Keeps does not update matrices"),
        (
            dataclasses.make_dataclass("Thawed", [("lr", float, 1.0)])(),
            1.0,
            r"p: Thawed\(lr=1.0\) is not an update rule; write a frozen dataclass",
        ),
        (
            types.SimpleNamespace(lr=1.0),
            1.0,
            r"namespace\(lr=1.0\) is not an update rule; write a frozen dataclass with lr,"
            r" every, unit, init_state",
        ),
    ],
    ids=str,
)
def test_a_rule_that_cannot_be_one_is_refused(rule, scale, says):
    with pytest.raises(engine.RunError, match=says):
        gpt_speedrun.fill_buckets(
            [engine.ParamSpec("p", nn.Parameter(torch.zeros(5)), rule, scale=scale)], 0.0, 0, 1
        )


@pytest.mark.parametrize("shape", [(0,), (0, 4), (4, 0)])
@pytest.mark.parametrize(
    "table,says",
    [
        ((), r"but a bucket needs .* freeze it"),
        ([gpt_speedrun.Assignment("empty", engine.NorMuon())], "NorMuon updates whole matrices"),
    ],
)
def test_an_empty_parameter_is_refused(shape, table, says):
    model = chain()
    model.empty = nn.Parameter(torch.zeros(shape))
    with pytest.raises(engine.RunError, match=rf"empty has shape \({shape[0]},.*{says}"):
        gpt_speedrun.make_optimizer(model, table)
    model.empty.requires_grad_(False)
    gpt_speedrun.make_optimizer(model)


# ranks


def train_steps(comm, flags, steps, batches):
    """Train the tiny record on this rank's part of each batch. Return losses, state hash,
    parameters, launch order."""
    config = dataclasses.replace(train_gpt.Config(**TINY), **flags)
    model = train_gpt.build_model(config, train_gpt.Encoding(64, BOS))
    optimizer = train_gpt.build_optimizer(config, model, comm)
    losses = []
    for step in range(steps):
        losses += one_step(
            optimizer,
            model,
            train_gpt.plan_of(config, step),
            batches[step].chunk(comm.ranks)[comm.rank],
        )
    state_hash = engine.hash_of([*optimizer.named_state()])
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}
    return (
        losses,
        state_hash,
        parameters,
        [bucket.name for bucket in optimizer.reducer.launch_order],
    )


def one_step(optimizer, model, plan, micro_batches):
    losses = []
    model.apply_schedule(plan)
    for i, micro_batch in enumerate(micro_batches):
        objective, cross_entropy = model(micro_batch[:-1], micro_batch[1:], plan.windows)
        optimizer.prepare_for_backward(plan.step, i, len(micro_batches))
        objective.backward()
        losses.append(cross_entropy.item())
    optimizer.step(plan)
    return losses


@pytest.fixture(scope="module")
def batches():
    return torch.from_numpy(some_documents(9, 6 * 12 * 49).astype("int64")).view(6, 12, 49)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_model_of_train_gpt_is_freed_with_its_optimizer(overlap):
    """The preflight builds one after another on a GPU."""
    config = train_gpt.Config(**TINY | {"overlap_param_gather": overlap})
    model = train_gpt.build_model(config, train_gpt.Encoding(64, BOS))
    optimizer = train_gpt.build_optimizer(config, model, train_gpt.Comm())
    alive = [weakref.ref(bucket.param_data) for bucket in optimizer.buckets]
    del model, optimizer
    gc.collect()
    assert not any(memory() is not None for memory in alive)


def test_flags_of_the_config_reach_the_engine(batches):
    """With bf16 parameters. Each flag that changes the computation changes the bytes."""
    bf16 = {"dtype": "bfloat16"}
    few = batches[:, :2]
    plain, wide = (
        train_steps(train_gpt.Comm(), {**bf16, **flags}, 2, few)
        for flags in ({}, {"grad_reduce_in_fp32": True})
    )
    assert plain[1] != wide[1] and plain[0] == pytest.approx(wide[0], rel=1e-2)
    assert {p.dtype for p in plain[2].values()} == {torch.bfloat16, torch.float32}
    plain = train_steps(train_gpt.Comm(), {}, 2, few)
    assert train_steps(train_gpt.Comm(), {}, 2, few)[1] == plain[1]
    assert train_steps(train_gpt.Comm(), {"clip_norm": 1e-3}, 2, few)[1] != plain[1]
    assert train_steps(train_gpt.Comm(), {"micro_batch_splits": 2}, 2, few)[1] != plain[1]


def other_counts(comm):
    model = chain()
    optimizer = optimizer_of(model, comm)
    for i in range(2 + comm.rank):
        optimizer.prepare_for_backward(0, i, 2 + comm.rank)
        model(torch.ones(1, 6)).sum().backward()
    optimizer.step(FULL)


DIFFERENCES = {  # name: (how rank 1 differs, the error)
    "widths": (
        lambda comm: optimizer_of(chain((6, 5, 7 + comm.rank, 4)), comm),
        r"bucket .*4, 8\b.* 4, 7\b",
    ),
    "names": (
        lambda comm: optimizer_of(
            nn.ParameterDict({"ba"[comm.rank]: nn.Parameter(torch.zeros(4))}), comm
        ),
        "bucket .*a.*b",
    ),
    "settings": (
        lambda comm: optimizer_of(chain(), comm, world_size_invariant=bool(comm.rank)),
        "world_size_invariant True.*False",
    ),
    "scale": (
        lambda comm: optimizer_of(chain(), comm, grad_scale=1.0 + comm.rank),
        "gradient scale 2.*1",
    ),
    "rates": (
        lambda comm: optimizer_of(
            chain(), comm, rule=dataclasses.replace(ONCE, lr=0.1 + comm.rank)
        ),
        "bucket .*lr=1.1.*lr=0.1",
    ),
    "counts": (other_counts, "rank 1 has backwards 3; rank 0 has 2"),
}


def build_otherwise(comm, what):
    DIFFERENCES[what][0](comm)


@pytest.mark.parametrize("what", DIFFERENCES)
def test_ranks_that_differ_all_get_an_error_that_names_the_difference(_rank_pools, on_ranks, what):
    on_ranks(2, nothing)
    for kind, error in _rank_pools[2].outcomes(build_otherwise, what):
        assert kind == "error"
        with pytest.raises(engine.RunError, match=DIFFERENCES[what][1]):
            raise error


def nothing(comm):
    return comm.rank


# state


MIXED_SHAPES = {
    "table": (10, 7),
    "wide_0": (4, 12),
    "wide_1": (4, 12),
    "wide_2": (4, 12),
    "tall_0": (12, 4),
    "tall_1": (12, 4),
    "four": (6, 40),
    "vector": (37,),
    "halved": (9, 5),
}


def mixture(bucket_bytes, comm, **changes):
    """Build an optimizer with both rules: wide, tall and fused matrices, a bf16 parameter."""
    torch.manual_seed(5)
    params = nn.ParameterDict(
        {name: nn.Parameter(torch.randn(shape)) for name, shape in MIXED_SHAPES.items()}
    )
    params["halved"] = nn.Parameter(params["halved"].detach().bfloat16())
    adam = engine.Adam(lr=0.01, beta1=0.65, beta2=0.95, eps=0.1, every=2)
    rules = {"wide": WIDE, "tall": TALL, "four": WIDE}
    kinds = ((name, p, rules.get(name.split("_")[0], adam)) for name, p in params.items())
    specs = [
        engine.ParamSpec(
            name, p, rule, (6, 10) if name == "four" else None, 1.0 + i / 10 * (rule is not adam)
        )
        for i, (name, p, rule) in enumerate(kinds)
    ]
    buckets = gpt_speedrun.fill_buckets(specs, bucket_bytes, comm.rank, comm.ranks)
    return (
        gpt_speedrun.Optimizer(buckets, comm, gpt_speedrun.SyncSettings(**changes), params),
        params,
    )


def mixed_steps(optimizer, params, steps):
    """Train on gradients that depend on step and micro-batch only; each rank takes its part of
    four micro-batches."""
    comm = optimizer.comm
    share = 4 // comm.ranks
    for step in steps:
        for i in range(share):
            draw = torch.Generator().manual_seed(1000 * step + comm.rank * share + i)
            loss = sum(
                (p * torch.randn(p.shape, generator=draw).to(p.dtype)).sum()
                for p in params.values()
            )
            optimizer.prepare_for_backward(step, i, share, loss)
            loss.backward()
        optimizer.step(engine.Plan(lr_factor=0.9, momentum=0.9))


def mixed_run(comm, steps, bucket_bytes=0.0, state=None, **changes):
    optimizer, params = mixture(bucket_bytes, comm, **changes)
    if state is not None:
        optimizer.load_state_dict(state)
    mixed_steps(optimizer, params, steps)
    return (
        optimizer.state_dict(),
        engine.hash_of([*optimizer.named_state()]),
        {name: p.detach().clone() for name, p in params.items()},
    )


def noisy_run(comm, bucket_bytes, steps, state=None, **rule):
    """Train matrices, and a table of which each step reads three rows. Return the state."""
    model = nn.ModuleDict({"chain": chain(), "table": nn.Embedding(40, 3, sparse=True)})
    specs = [
        spec._replace(rule=Langevin(rows=spec.name == "table.weight", **rule))
        for spec in specs_with(model)
    ]
    optimizer = gpt_speedrun.Optimizer(
        engine.fill_buckets(specs, bucket_bytes, comm.rank, comm.ranks),
        comm,
        gpt_speedrun.SyncSettings(world_size_invariant=True),
        model,
    )
    if state:
        optimizer.load_state_dict(state)
    for _ in range(steps):
        torch.manual_seed(comm.rank)
        (
            model["chain"](torch.ones(2, 6)).sum() + model["table"](torch.tensor([1, 17, 38])).sum()
        ).backward()
        optimizer.step()
    return optimizer.state_dict()


def test_noise_of_a_rule_depends_on_seed_update_and_parameter_alone(on_ranks):
    whole, *_ = on_ranks(1, noisy_run, 1e9, 3)
    for ranks, bucket_bytes in ((2, 1e9), (4, 0.0), (3, 100.0)):
        half, *_ = on_ranks(ranks, noisy_run, bucket_bytes, 1)
        others = on_ranks(ranks, noisy_run, bucket_bytes, 2, half)
        assert all(
            torch.allclose(x, other[name], atol=1e-4)
            for other in others
            for name, x in whole.items()
        )
    noise = (
        torch.cat(
            [x for name, x in whole.items() if name.startswith("chain") and name.endswith("weight")]
        )
        / 3**0.5
    )
    assert 0.7 < noise.std() < 1.3
    changed = whole["table.weight"].view(40, 3) != on_ranks(1, noisy_run, 1e9, 0)[0][
        "table.weight"
    ].view(40, 3)
    assert changed.all(1).nonzero().flatten().tolist() == [1, 17, 38]
    with pytest.raises(engine.RunError, match="Langevin.update draws random numbers"):
        noisy_run(engine.Comm(), 0.0, 1, own=True)


def invariant_run(comm, steps, bucket_bytes, state=None):
    return mixed_run(comm, steps, bucket_bytes, state, world_size_invariant=True)


def assert_same_state(ours, theirs):
    assert sorted(ours) == sorted(theirs)
    for name, x in theirs.items():
        assert ours[name].dtype == x.dtype and torch.equal(ours[name], x), name


LAYOUTS = [(1, 300.0), (1, 1e9), (2, 0.0), (2, 300.0), (4, 0.0), (4, 1e9)]


def test_state_is_the_same_at_any_number_of_ranks_and_bucket_size(on_ranks):
    """World-size-invariant: the same bytes, also after three steps, when the first half of an Adam
    cycle is state."""
    state, state_hash, parameters = on_ranks(1, invariant_run, range(3), 0.0)[0]
    for ranks, bucket_bytes in LAYOUTS:
        for theirs, their_hash, _ in on_ranks(ranks, invariant_run, range(3), bucket_bytes):
            assert_same_state(theirs, state)
            assert their_hash == state_hash
    for name, shape in MIXED_SHAPES.items():
        adam = name in ("table", "vector", "halved")
        assert torch.equal(state[name].view(shape), parameters[name]) and len(
            state[f"{name}/m"]
        ) == math.prod(shape)
        assert len(state[f"{name}/v"]) == (math.prod(shape) if adam else max(shape)), (
            "second moment per unit's row or column"
        )
        assert int(state[f"{name}/updates"]) == (1 if adam else 3)
        assert (f"{name}/pending" in state) == adam
        assert all(state[key].any() for key in state if key.startswith(name))
    assert {state[f"halved{key}"].dtype for key in ("", "/m", "/v", "/pending")} == {torch.bfloat16}


def test_a_state_between_updates_is_known_and_one_at_an_update_goes_on_to_the_byte():
    """By default no state holds the first half of an Adam cycle; a state after the second half
    resumes exactly."""
    comm = engine.Comm()
    optimizer, params = mixture(300.0, comm)
    assert not optimizer.between_updates
    mixed_steps(optimizer, params, [0])
    assert optimizer.between_updates
    with pytest.raises(
        engine.RunError,
        match=r"before step 1, between two updates .*waiting gradients.* after an update",
    ):
        optimizer.state_dict()
    with optimizer.no_sync():
        sum(p.sum() for p in params.values()).backward()
    optimizer.zero_grad()
    assert not optimizer.between_updates, "all gradients are dropped"
    mixed_steps(optimizer, params, [1])
    assert not optimizer.between_updates and not any(
        "pending" in name for name in optimizer.state_dict()
    )
    end = mixed_run(comm, range(2, 4), 1e9, optimizer.state_dict())[0]
    mixed_steps(optimizer, params, [2, 3])
    assert_same_state(end, optimizer.state_dict())
    invariant, params = mixture(300.0, comm, world_size_invariant=True)
    mixed_steps(invariant, params, [0])
    assert not invariant.between_updates


def state_of_one_user(comm):
    """Only rank 0 uses the parameter, so only its gradient waits."""
    p = nn.Parameter(torch.zeros(3))
    q = nn.Parameter(torch.zeros(3))
    optimizer = optimizer_of(
        nn.ParameterDict({"p": p, "q": q}),
        comm,
        rule=dataclasses.replace(ONCE, every=2),
        find_unused_parameters=True,
    )
    optimizer.prepare_for_backward(0)
    if comm.rank == 0:
        (p + q).sum().backward()
    optimizer.step(FULL)
    optimizer.state_dict()


def test_all_ranks_know_that_a_gradient_of_one_rank_waits(_rank_pools, on_ranks):
    on_ranks(2, nothing)
    for kind, error in _rank_pools[2].outcomes(state_of_one_user):
        assert kind == "error" and "between two updates" in str(error)


def test_pending_sums_of_an_invariant_run_count_once_in_a_plain_run():
    comm = engine.Comm()
    whole = mixed_run(comm, range(6))[0]
    state = mixed_run(comm, range(3), world_size_invariant=True)[0]
    for name, x in mixed_run(comm, range(3, 6), 0.0, state)[0].items():
        assert torch.allclose(
            x.float(),
            whole[name].float(),
            rtol=1e-4,
            atol=0.02 if name.startswith("halved") else 1e-5,
        ), name


@pytest.mark.parametrize("invariant", [False, True])
def test_state_put_back_after_warm_up_leaves_nothing_of_it(invariant):
    """Drops gradients of half a cycle, of a step that failed and of an unfinished one."""
    optimizer, params = mixture(
        300.0, engine.Comm(), check_grads=True, world_size_invariant=invariant
    )
    saved = optimizer.state_dict()
    fresh = engine.hash_of([*optimizer.named_state()])
    mixed_steps(optimizer, params, range(3))
    trained = engine.hash_of([*optimizer.named_state()])
    optimizer.load_state_dict(saved)
    assert engine.hash_of([*optimizer.named_state()]) == fresh != trained
    optimizer.prepare_for_backward(0)
    sum(p.sum() for p in params.values()).mul(math.nan).backward()
    with pytest.raises(engine.RunError, match="not finite"):
        optimizer.step(FULL)
    optimizer.load_state_dict(saved)
    optimizer.prepare_for_backward(0, 0, 2)
    sum(p.sum() for p in params.values()).backward()  # a first micro-batch, never followed
    optimizer.load_state_dict(saved)
    mixed_steps(optimizer, params, range(3))
    assert engine.hash_of([*optimizer.named_state()]) == trained


def test_a_state_is_the_caller_s_own():
    optimizer, params = mixture(0.0, engine.Comm())
    state = optimizer.state_dict()
    kept = {name: x.clone() for name, x in state.items()}
    mixed_steps(optimizer, params, range(2))
    assert_same_state(state, kept)


@pytest.mark.parametrize(
    "spoil,says",
    [
        (lambda state: state.pop("four/m"), "four/m is missing"),
        (lambda state: state.pop("table"), "table is missing"),
        (lambda state: state.update({"tall_0": torch.zeros(5)}), "tall_0 has 5 values"),
        (lambda state: state.update({"four/v": torch.zeros(240)}), "four/v"),
        (lambda state: state.update({"table/m": torch.zeros(90)}), "table/m"),
        (lambda state: state.update({"wide_1/updates": torch.tensor(7)}), "wide_1"),
        (lambda state: state.update({"further": torch.zeros(3)}), "further"),
        *(
            (
                lambda state, name=name: state.update({name: None}),
                f"{name} is a NoneType .*load what",
            )
            for name in ("table", "table/m", "table/updates", "table/lr", "table/step")
        ),
        *(
            (
                lambda state, x=x: state.update({"table": x.T}),
                r"table is a Tensor \[7, 10\], not a vector",
            )
            for x in (torch.zeros(10, 7), torch.zeros(7, 10).T.contiguous())
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused_by_name(spoil, says):
    optimizer, _ = mixture(1e9, engine.Comm())
    state = optimizer.state_dict()
    spoil(state)
    with pytest.raises(engine.RunError, match=f"does not fit.*{says}"):
        optimizer.load_state_dict(state)


def late_steps(comm, steps=range(4)):
    """Three buckets of one parameter, `late` from step 2. Return launch orders, launches in
    backward, error, parameters, updates."""
    params = nn.ParameterDict(
        {name: nn.Parameter(torch.zeros(3, dtype=torch.float64)) for name in ("a", "b", "late")}
    )
    specs = [
        engine.ParamSpec(name, p, ONCE, first_step=2 if name == "late" else 0)
        for name, p in params.items()
    ]
    buckets = gpt_speedrun.fill_buckets(specs, 0, comm.rank, comm.ranks)
    optimizer = gpt_speedrun.Optimizer(buckets, comm, gpt_speedrun.SyncSettings(), params)
    orders = []
    launches = []
    error = ""
    for step in steps:
        optimizer.prepare_for_backward(step)
        arrivals = ["b", "a"] if step < 2 else ["late", "b", "a"]
        for name in arrivals if comm.rank == 0 else arrivals[::-1]:
            (params[name] * (1.0 + step + comm.rank)).sum().backward()
        if step == 1:
            try:
                params["late"].sum().backward()
            except engine.RunError as caught:
                error = str(caught)
                params["late"].grad = None
        launches.append(optimizer.reducer.launches)
        optimizer.step(FULL)
        orders.append([bucket.slots[0].name for bucket in optimizer.reducer.launch_order])
    updates = optimizer.state_dict()["late/updates"]
    return (
        orders,
        launches,
        error,
        {name: p.detach().clone() for name, p in params.items()},
        updates,
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_parameter_may_begin_to_take_part_at_a_step(on_ranks, ranks):
    """Before the step its gradient is an error. After it the order is learned again, launches
    overlap, and t starts at 1."""
    plain = {name: reference.Adam(torch.zeros(3, dtype=torch.float64)) for name in ("a", "late")}
    for step in range(4):
        for name in ("a", "late") if step >= 2 else ("a",):
            plain[name].step(
                torch.full((3,), 1.0 + step + (ranks - 1) / 2, dtype=torch.float64), lr=0.01
            )
    for orders, launches, error, params, updates in on_ranks(ranks, late_steps):
        assert orders == [["b", "a"]] * 2 + [["late", "b", "a"]] * 2 and launches == [0, 2, 0, 3]
        assert "late" in error and "before step 2" in error
        assert all(torch.allclose(params[name], plain[name].p, rtol=1e-12) for name in plain)
        assert updates == 2


def test_each_number_of_buckets_that_take_part_has_its_order(on_ranks):
    """After a warm-up with both kinds of step."""
    for _, launches, *_ in on_ranks(2, late_steps, (0, 2, 0, 1, 2, 3)):
        assert launches == [0, 0, 2, 2, 3, 3]


def tied_launches(comm, warm_up, batches):
    """Warm up, return to step 0, and train two tied steps.

    -> names of the Adam buckets of step 1 launched before the head's gradient is complete, launch
    order.
    """
    config = frontier.Config(
        **TINY
        | dict(
            layers=reference.layer_rows("S0inM LinM SM"),
            backout_layer=1,
            token_gates=(0,),
            ngrams=(train_gpt.Ngrams(2, 50, 8),),
            fp8_mlp=False,
            stages=(frontier.Stage(),),
        )
    )
    model = train_gpt.build_model(config, train_gpt.Encoding(64, BOS))
    optimizer = train_gpt.build_optimizer(config, model, comm)
    launched = []
    saved = optimizer.state_dict()
    reducer = optimizer.reducer
    model.lm_head.weight.register_hook(
        lambda g: launched.append(
            [
                bucket.name
                for bucket in reducer.due[: reducer.launches]
                if isinstance(bucket.rule, train_gpt.Adam)
            ]
        )
    )
    for i, step in enumerate((*warm_up, 0, 1)):
        if i == len(warm_up):
            optimizer.load_state_dict(saved)
        mine = batches[step % 2].chunk(comm.ranks)[comm.rank]
        optimizer.announce_rows(step, model.rows_read(mine[:, :-1]))
        one_step(optimizer, model, train_gpt.plan_of(config, step), mine)
        assert model.tied == (step <= 10)
    return launched[-1], [bucket.name for bucket in reducer.launch_order]


def test_the_tied_stage_has_its_own_launch_order(on_ranks, batches):
    """The tied head is complete last, since the embedding reads it: after a warm-up that ends
    untied, Adam's other buckets must not wait for it. Every rank uses the order of a run without
    warm-up."""
    plain = on_ranks(2, tied_launches, (), batches[:, :4])
    for warm_up in ((11,), (0, 1, 11)):
        results = on_ranks(2, tied_launches, warm_up, batches[:, :4])
        assert all(launched for launched, _ in results), (
            "no Adam bucket is launched before the end of backward"
        )
        assert all(order == plain[0][1] for _, order in results), "another order"


def test_a_parameter_is_copied_with_its_state():
    optimizer, params = mixture(0.0, engine.Comm())
    mixed_steps(optimizer, params, [0, 1])
    frontier.copy_parameter(optimizer, "wide_0", "wide_1")
    state = optimizer.state_dict()
    for key in ("", "/m", "/v"):
        first, second, third = (state[f"wide_{i}{key}"] for i in range(3))
        assert torch.equal(first, second) and not torch.equal(first, third)


def test_a_checksum_sees_order_signs_and_what_a_sum_of_32_bits_wraps():
    ones = torch.ones(512)
    rows = torch.arange(24.0).view(4, 6)
    for x, other in (
        (ones, 2 * ones),
        (ones, torch.cat([-ones[:256], ones[256:]])),
        (rows, rows[[1, 0, 2, 3]]),
        (rows.bfloat16()[:, :5], rows.bfloat16()[:, 1:]),
        (torch.cat([ones] * 1200), torch.cat([*[ones] * 1199, -ones])),
    ):
        assert train_gpt.checksum(x) == train_gpt.checksum(x.clone()) != train_gpt.checksum(other)
    assert train_gpt.checksum(ones, rows) != train_gpt.checksum(rows, ones)


@pytest.mark.parametrize(
    "shape, unit",
    [
        ((12, 12), (1, 12)),
        ((64, 12), (1, 12)),
        ((8, 12), (8, 1)),
        ((8, 12), (1, 12)),
        ((12, 3), (12, 1)),
        ((4, 4), (1, 1)),
    ],
)
def test_a_unit_may_be_one_row_or_one_column(shape, unit):
    spec = engine.finish_spec(
        engine.ParamSpec("w", nn.Parameter(torch.randn(shape)), engine.NorMuon(), unit)
    )
    [bucket] = engine.fill_buckets([spec], 0, 0, 1)
    bucket.grad_data.normal_()
    before = bucket.param_data.clone()
    moments = bucket.state["v"].shape
    bucket.update(engine.NorMuon.update, bucket.hyper(engine.Plan()))
    assert (
        bucket.state["v"].shape == moments
        and not torch.equal(bucket.param_data, before)
        and bucket.param_data.isfinite().all()
    )


@pytest.mark.parametrize("unit", [(3,), (2, 3)])
def test_invariant_mode_updates_one_unit_at_a_time(unit):
    rule = types.SimpleNamespace(every=1, unit=lambda spec: unit, init_state=lambda shard: {})
    bucket = bucket_of({"p": nn.Parameter(torch.zeros(4, 3))}, rule)
    bucket.invariant = True
    shapes = []
    bucket.update(lambda param, *_: shapes.append(param.shape), {})
    assert shapes == [(1, *unit)] * (12 // math.prod(unit))


@dataclasses.dataclass(frozen=True)
class Third:
    """A rule with updates_in and without every."""

    lr: float = 0.1
    unit = lambda self, spec: ()
    updates_in = lambda self, step: step % 3 == 2
    init_state = lambda self, shard: {}
    hyper = lambda self, plan, t: {}

    @staticmethod
    def update(param, grad, state, hyper):
        param.sub_(0.1 * grad)


def test_a_rule_may_state_its_updates_without_a_period():
    model = nn.Linear(2, 1, bias=False)
    buckets = engine.fill_buckets([engine.ParamSpec("weight", model.weight, Third())], 0, 0, 1)
    optimizer = train_gpt.DistributedOptimizer(
        buckets, engine.Comm(), train_gpt.SyncSettings(), model
    )
    optimizer.load_state_dict(optimizer.state_dict())
    for step in range(3):
        before = model.weight.detach().clone()
        optimizer.prepare_for_backward(step)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert torch.equal(before, model.weight) == (step < 2)


def test_waiting_for_a_frozen_parameter_is_nothing():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False))
    specs = [engine.ParamSpec(name, p, engine.Adam()) for name, p in model[0].named_parameters()]
    optimizer = train_gpt.DistributedOptimizer(
        engine.fill_buckets(specs, 0, 0, 1), engine.Comm(), train_gpt.SyncSettings(), model
    )
    optimizer.wait_for(model[0].weight, model[1].weight)


def test_cores_are_those_that_the_process_may_use(monkeypatch, tmp_path):
    quota = "max 100000"
    read = train_gpt.Path.read_text
    monkeypatch.setattr(train_gpt.os, "sched_getaffinity", lambda pid: {0, 2, 5})
    monkeypatch.setattr(
        train_gpt.Path,
        "read_text",
        lambda path, *more: quota if "cgroup" in str(path) else read(path, *more),
    )
    assert train_gpt.count_cores() == 3
    quota = "150000 100000"
    assert train_gpt.count_cores() == 2
