"""Record 89, as frontier.py has it: its config, its model compared with a second implementation,
its training and runs."""

import dataclasses
import functools
import inspect
import re
from pathlib import Path

import numpy as np
import pytest
import torch

import frontier
import reference
import train_gpt
from conftest import (
    TINY,
    as_flags,
    some_documents,
    with_layer_rows,
    write_gpt2_tokens,
    write_shard,
)
from frontier import AdamGroup, Layer, MuonGroup, Stage
from ranks import program_of
from test_model import (
    BOS,
    ENCODING,
    ROWS,
    SIX_STEPS,
    VOCAB,
    PlainTraining,
    assert_flash_is_the_same,
    compare,
    groups_by_hand,
    in_float64,
    initial_values,
    make_trainer,
    shake,
    shaken,
    tokens_of,
)
from test_resume import (
    corpus,
    goes_on_at_any_number_of_ranks,
    kill_and_resume,
    train,
)  # noqa: F401, a fixture
from test_run import read_log, run_here
from test_sync import Hostile
from train_gpt import Ngrams, Ramp

PRESET = frontier.PRESETS["frontier89"]
SMALL = {
    **TINY,
    "stages": (Stage(),),
    "num_heads": 4,
    "ngrams": (Ngrams(2, 50, 16),),
    "fp8_mlp": False,
}
WEIGHTS = {"second_token_weight": 0.5, "third_token_weight": 0.25, "prefix_weight": 0.25}
PREFIXES = [-1 if token % 3 else token // 2 for token in range(VOCAB)]
WINDOWS = train_gpt.Windows(12, 5)


def small(**changes):
    """The record's layers, with small dimensions."""
    config = dataclasses.replace(PRESET, **with_layer_rows(SMALL | changes))
    train_gpt.check_config(config, 1)
    return config


def worker_of(config, comm=None):
    shards = train_gpt.find_shards(config.train_files)
    return frontier.Worker(config, comm or train_gpt.Comm(), torch.device("cpu"), shards)


# config


IMPOSSIBLE = (
    {"layers": (Layer("wide"),)},
    {"layers": (Layer(narrow="v"),)},
    {"layers": (Layer(mlp=3),)},
    {"layers": "S0M xM LM"},
    {"layers": ()},
    {"layers": "S0M iM LM"},
    {"layers": "S0M SM LinM"},
    {"layers": "S0M S2M"},
    {"layers": "S0M SM M"},
    {"layers": "M S0M SM"},
    {"layers": "SM SM LM"},
    {"layers": "S0iM SM cSM LM"},
    {"layers": "S0M SM LM"},
    {"layers": "S0iM SM LM", "token_gates": (0, 1)},
    {"token_gates": (0, 9)},
    {"backout_layer": 2},
    {"param_groups": (AdamGroup("head", slow_from=4),), "untie_at": 0.4},
    {"layers": "S0M cSM LM"},
    *({"layers": f"S0M P{letter}M LM"} for letter in "xd"),
    {"layers": "S0M S+2 LM"},
    {"backout_layer": 3},
    *({"token_gates": begins} for begins in ((), (1, 2), (0, 3), (0, 1, 1), (0, -1), (0, 0.5))),
    {"num_heads": 1, "muon_qk_heads": 1},
    {"muon_qk_heads": 3},
    *(
        {"ngrams": tables}
        for tables in ((), (Ngrams(2, 1, 8),), (Ngrams(2, 50, 8), Ngrams(3, 50, 8)))
    ),
    {"ngrams": (Ngrams(2, 50, 8), Ngrams(3, 50, 8)), "ngram_hash": "record92"},
    {"ngrams": (Ngrams(4, 50, 8),), "ngram_hash": "record92"},
    {"param_groups": (AdamGroup("embed", slow_from=6),)},
    {"param_groups": (AdamGroup("embed", row_moment=True),)},
    {"param_groups": (AdamGroup("ngram_embeds", row_moment=True),)},
    {"param_groups": (AdamGroup("ngram_embeds", row_moment=True),), "lazy_tables": True},
    {"param_groups": (AdamGroup("ngram_embeds", by_rows=True),)},
    {"untie_at": 1.5},
    {"stages": (Stage(third_token_weight=Ramp(0.5, -1)),)},
    {"param_groups": (AdamGroup("xsa_lambdas"),)},
)


def test_impossible_values_are_refused_with_what_is_allowed(golden):
    """But for a few, which are possible."""
    lines = []
    for changes in IMPOSSIBLE:
        values = SMALL | {"layers": "S0iM SM LM", "backout_layer": 1, "token_gates": (0,)} | changes
        message = "possible"
        try:
            train_gpt.check_config(dataclasses.replace(PRESET, **with_layer_rows(values)), 1)
        except train_gpt.RunError as error:
            message = str(error)
        assert "\n" not in message
        lines.append(f"{changes}: {message}\n")
    golden("impossible_values_frontier", "".join(lines))


@pytest.mark.parametrize(
    "window, wide, narrow",
    [
        (384, 0.085, 0.13),
        (896, 0.099404, 0.158564),
        (1408, 0.108390, 0.174764),
        (1664, 0.112011, 0.181136),
    ],
)
def test_softmax_scales_of_record_92(window, wide, narrow):
    model = train_gpt.build_model(
        dataclasses.replace(
            frontier.PRESETS["frontier"],
            **TINY
            | {
                "stages": (Stage(),),
                "num_heads": 4,
                "ngrams": (Ngrams(2, 50, 16),),
                "window_block": 128,
                "mlp_dim": 88,
                "mudd_groups": 4,
            },
        ),
        ENCODING,
    )
    model.apply_schedule(
        train_gpt.Plan(rotary_windows=tuple(w for w in (384, 896, 1408, 1664) if w <= window))
    )
    assert (model.rotary.scale.item(), model.narrow_rotary.scale.item()) == pytest.approx(
        (wide, narrow), abs=6e-7
    )
    assert model.narrow_rotary.cos.shape[1] == model.rotary.cos.shape[1] // 2


@pytest.mark.parametrize(
    "scheduled, untied",
    [(1270, 848), (1440, 962), (1775, 1186), (1776, 1186), (1777, 1186), (1780, 1188)],
)
def test_the_embedding_is_untied_after_the_first_adam_update_at_or_after_two_thirds(
    scheduled, untied
):
    extra = PRESET.num_steps - train_gpt.scheduled_steps(PRESET)
    c = dataclasses.replace(PRESET, num_steps=scheduled + extra)
    assert frontier.first_untied_step(c) == untied
    always, never = (dataclasses.replace(c, untie_at=at) for at in (1.0, 0.0))
    assert frontier.first_untied_step(always) > scheduled and frontier.first_untied_step(never) == 0


# model


MODELS = {  # heads, further targets and the tied embedding are in all
    "the preset": dict(),
    "two networks of gates": dict(
        layers="S1xinM P2inM SxgdinM L0ginM M+2 LxM+1", backout_layer=1, token_gates=(0, 2)
    ),
    "one network": dict(
        layers="S1inM SinM L0inM+0 S2M", backout_layer=1, token_gates=(0,), num_heads=2
    ),
    "never tied": dict(layers="S0inM cLxgdinM PM", backout_layer=0, token_gates=(0,), untie_at=0.0),
    "record 92": dict(
        layers=reference.RECORD_92,
        mlp_dim=88,
        mudd_groups=4,
        backout_layer=7,
        softmax_scale=0.085,
        narrow_softmax_scale=0.2,
    ),
}


def scheduled_model(config, module=frontier):
    """A model without zero parameters, as it trains in the first step with all further targets."""
    model = shake(
        train_gpt.build_model(
            train_gpt.config_of(train_gpt.json_of(config), module.Config), ENCODING
        )
    )
    model.apply_schedule(train_gpt.Plan(scheduled=WEIGHTS))
    model.prefixes[:VOCAB] = torch.tensor(PREFIXES)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_a_second_implementation(name, monkeypatch):
    """Each parameter must matter."""
    monkeypatch.setattr(frontier, "DC_WINDOW", 7)
    config = small(**MODELS[name])
    model = scheduled_model(config)
    x, y = tokens_of(5, 26)
    if name == "record 92":  # exactly
        model.double()
        for rotary in (model.rotary, model.narrow_rotary):
            rotary.windows = None
            rotary.set_windows(())
        model.attended_tokens = 9
        monkeypatch.setattr(
            reference, "rms", lambda x: x / (x.square().mean(-1, keepdim=True) + 2.0**-52).sqrt()
        )
    plain = in_float64(model)
    tied = config.untie_at > 0
    as_read = plain | ({"embed.weight": plain["lm_head.weight"]} if tied else {})
    expected = reference.loss(
        as_read,
        x.tolist(),
        y.tolist(),
        *WINDOWS,
        BOS,
        config.num_heads,
        layers=MODELS[name].get("layers", reference.RECORD_89),
        backout_layer=config.backout_layer,
        scale=config.softmax_scale,
        narrow_scale=config.narrow_softmax_scale,
        longest=model.attended_tokens,
        softcap=(23.0, 5.0, 7.5),
        ahead=(1.0, 0.5, 0.25),
        gates_from=[*config.token_gates],
        dc_window=7,
        ngrams=torch.nn.functional.pad(
            bigrams_by_hand(model.ngrams[0], plain["ngrams.0.weight"], x.tolist()), (0, 16)
        ),
        prefixes=PREFIXES,
        prefix_weight=0.25,
    )
    compare(model, model(x, y, WINDOWS)[0], plain, expected, tied)


def test_layers_know_the_step_s_numbers_and_what_earlier_layers_share(monkeypatch):
    """The places for an idea that docs/racing.md names."""
    config = small(stages=(Stage(prefix_weight=0.25),))
    model = shaken(config)
    model.apply_schedule(train_gpt.plan_of(config, 0))
    before = frontier.Block.forward
    seen = []

    def forward(self, x, context, *inputs):
        context.shared[self.number] = x
        seen.append(([*context.shared], context.scheduled["prefix_weight"].item()))
        return before(self, x, context, *inputs)

    monkeypatch.setattr(frontier.Block, "forward", forward)
    model(*tokens_of(3, 32), WINDOWS)
    assert seen == [([*range(i + 1)], 0.25) for i in range(len(config.layers))]


@pytest.mark.parametrize("preset", ["frontier", "frontier89"])
def test_initial_values_and_groups_are_those_of_the_record(preset, golden):
    usual = frontier.PRESETS[preset]
    values = {**SMALL, "layers": usual.layers, "model_dim": 48, "num_heads": 6}
    if preset == "frontier":
        values |= {"mlp_dim": 132, "mudd_groups": 6}
    config = dataclasses.replace(usual, **values)
    model = train_gpt.build_model(config, ENCODING)
    lines = initial_values(model)
    for spec in train_gpt.specs_of(config, model):
        lines.append(f"{spec.name}: {spec.rule}, scale {spec.scale:.6g}\n")
    golden(f"initial_{preset}", "".join(lines))


def bigram_rows_by_hand(x, last):
    """A second implementation of record 89's hash: (36313 x_t XOR 27191 x_{t-1}) mod (rows - 1),
    in int32. The first token has the last row; the second token's row is computed with that row's
    number in place of x_0. Documents do not matter."""

    def as_int32(number):
        return (number + 2**31) % 2**32 - 2**31

    return [last] + [
        (as_int32(36313 * b) ^ as_int32(27191 * a)) % last for a, b in zip([last, *x[1:]], x[1:])
    ]


def sign_rows_by_hand(x):
    return [0] + [(a ^ b) % 8192 for a, b in zip(x, x[1:])]


def bigrams_by_hand(table, weight, x):
    return (
        weight[bigram_rows_by_hand(x, len(weight) - 1)] * table.signs.double()[sign_rows_by_hand(x)]
    )


def test_rows_of_the_bigram_table_are_the_record_s_at_its_own_size():
    """The second token's product exceeds int32. Several sequences at once, as Worker announces the
    rows of a step."""
    config = PRESET
    table = frontier.NgramTable(config, Ngrams(2, 377_280, 1))
    x = [50256, 17, 50255, 0, 40000]
    rows, signs = table.row_and_sign(torch.tensor([x, x[::-1]]))
    assert rows.tolist() == [bigram_rows_by_hand(each, 377_279) for each in (x, x[::-1])]
    assert (
        signs.tolist() == [sign_rows_by_hand(each) for each in (x, x[::-1])]
        and 27191 * 377_279 > 2**31
    )
    model = train_gpt.build_model(small(), ENCODING)
    ((weight, read),) = model.rows_read(tokens_of(3, 20)[0][None]).items()
    assert weight is model.ngrams[0].weight and read.tolist() == [
        bigram_rows_by_hand(tokens_of(3, 20)[0].tolist(), 49)
    ]


def test_the_prefix_of_a_token_is_the_longest_other_that_begins_it():
    model = train_gpt.build_model(small(), ENCODING)
    tokens = [
        b"the",
        b"t",
        b"a",
        b"there",
        b"th",
        b"thus",
        b"b",
        b"an",
        b"thereby",
    ]
    model.fill_prefixes(tokens)
    wanted = [
        max(
            (i for i, begin in enumerate(tokens) if begin != token and token.startswith(begin)),
            key=lambda i: len(tokens[i]),
            default=-1,
        )
        for token in tokens
    ]
    assert (
        wanted[0] == 4
        and model.prefixes[:9].tolist() == wanted
        and (model.prefixes[9:] == -1).all()
    )
    assert "prefixes" not in model.state_dict()


@pytest.mark.parametrize("layers", ["PinM S0inM LM", "PinM S0gdinM LM", "PqinM Sqv0inM LM"])
def test_a_model_with_flash_attention_is_the_same_model(layers, monkeypatch):
    """With paired heads, whose sequence is twice as long; d needs its own mask besides."""
    config = small(
        layers=layers,
        backout_layer=1,
        token_gates=(0,),
        micro_batch_tokens=512,
        num_heads=2,
        model_dim=16,
        untie_at=0.0,
    )
    assert_flash_is_the_same(shaken(config), monkeypatch)


@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_every_group_is_compiled(monkeypatch):
    """Beyond its recompile limit torch only warns, and computes without compilation. Tied and
    untied, by step."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = small()
    x, y = tokens_of(5, 26)
    model = scheduled_model(config)
    model.reach = train_gpt.longest_window(config)
    wanted = model(x, y, WINDOWS)[0].item()
    train_gpt.compile_parts(model)
    groups = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]
    assert [[*group.numbers] for group in model.groups] == groups[:1] + (
        [groups[1] + groups[2]] if len(model.groups) == 2 else groups[1:]
    )
    before = train_gpt.compile_stats()[0]
    assert model(x, y, WINDOWS)[0].item() == pytest.approx(wanted, rel=1e-5)
    model.apply_schedule(train_gpt.Plan(scheduled={name: 0.3 for name in WEIGHTS}))
    model(x, y, train_gpt.Windows(9, 4))
    assert train_gpt.compile_stats()[0] - before == len(model.groups) + 4, (
        "smear, rows of bigrams, mask of d, head"
    )
    torch._dynamo.reset()


# fp8


def rounded(x, mantissa_bits=3, smallest=-6, largest=448):
    """The nearest numbers of e4m3, even ones of two; or of e5m2, if its sizes are given."""
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0**smallest))) - mantissa_bits)
    return np.clip(np.rint(x / step) * step, -largest, largest)


def in_e5m2(x, scale):
    return scale * rounded(x / scale, 2, -14, 57344)


def in_e4m3(x, scale):
    return scale * rounded(x / scale)


@pytest.mark.parametrize("h_scale, grad_scale", [(1.0, 2.0**-6), (0.002, 2.0**-17)])
def test_fp8_mlp_is_its_definition(h_scale, grad_scale):
    """Forward in e4m3, backward in e5m2 too. With the small scales the largest values saturate."""
    torch.manual_seed(0)
    mlp = frontier.MLP(small(fp8_mlp=True, fp8_head=True))
    mlp.proj.data.normal_(0, 0.05)
    mlp.h_scale.fill_(h_scale)
    mlp.grad_scale.fill_(grad_scale)
    x = train_gpt.norm(torch.randn(48, 32)).requires_grad_()
    grad = torch.randn(48, 32)
    y = mlp(x)
    y.backward(grad)
    x64, fc, proj, grad64 = (t.detach().double().numpy() for t in (x, mlp.fc, mlp.proj, grad))
    # the root of 32 is at most 448 * 2 ** -6
    x8 = in_e4m3(x64, 2.0**-6)
    fc8 = in_e4m3(fc, 2.0**-7)
    proj8 = in_e4m3(proj, 2.0**-7)
    a = np.maximum(x8 @ fc8, 0)
    h8 = in_e4m3(a**2, h_scale)
    assert mlp.h_max.item() == pytest.approx((a**2).max(), rel=1e-6)
    grad8 = in_e5m2(grad64, 2.0**-6)
    grad_a = 2 * np.sqrt(h8) * (grad8 @ proj8)
    grad_a8 = in_e5m2(grad_a, grad_scale)
    assert mlp.grad_max.item() == pytest.approx(np.abs(grad_a).max(), rel=1e-5)
    if h_scale < 1:
        assert h8.max() < (a**2).max() and grad_a8.max() < grad_a.max()
    for ours, right in (
        (y, h8 @ proj8.T),
        (x.grad, grad_a8 @ fc8.T),
        (mlp.fc.grad, x8.T @ grad_a8),
        (mlp.proj.grad, grad8.T @ h8),
    ):
        # ties depend on the sums' order
        assert np.linalg.norm(ours.detach().numpy() - right) < 2e-3 * np.linalg.norm(right)


def test_fp8_mlp_s_gradients_are_near_the_plain_ones():
    torch.manual_seed(0)
    x = train_gpt.norm(torch.randn(256, 32))
    grad = torch.randn(256, 32)
    found = []
    for fp8 in (False, True):
        torch.manual_seed(1)
        mlp = frontier.MLP(small(fp8_mlp=fp8, fp8_head=fp8))
        mlp.proj.data.normal_(0, 0.05)
        for _ in range(2):  # the second has scales of the first
            leaf = x.clone().requires_grad_()
            grads = torch.autograd.grad(mlp(leaf), [leaf, mlp.fc, mlp.proj], grad)
            if fp8:
                scales = frontier.DelayedScales(mlp, train_gpt.Comm())
                scales.start_gather()
                scales.update()
        found.append(grads)
    for plain, in_fp8 in zip(*found):
        # e5m2 has two bits after the leading one: a rounding of 3.6 % in the mean of squares
        assert 0 < (in_fp8 - plain).norm() < 0.1 * plain.norm()


def test_fp8_mlp_is_for_training_only():
    in_fp8, plain = (shaken(small(fp8_mlp=fp8, fp8_head=fp8)) for fp8 in (True, False))
    x, y = tokens_of(3, 64)
    trained, evaluated = (
        [
            model.train(training)(x, y, train_gpt.Windows(16, 8))[1].item()
            for model in (in_fp8, plain)
        ]
        for training in (True, False)
    )
    assert (
        evaluated[0]
        == evaluated[1]
        == trained[1]
        != trained[0]
        == pytest.approx(trained[1], rel=0.01)
    )
    assert not any("h_" in name for name, _ in plain.named_buffers())


def test_an_edit_of_the_plain_mlp_is_not_hidden_by_fp8(monkeypatch):
    x = train_gpt.norm(torch.randn(48, 32))
    monkeypatch.setattr(inspect, "getsource", lambda _: "def edited(): pass")
    monkeypatch.setattr(train_gpt.MLP, "forward", lambda self, x: x + 1)
    assert torch.equal(frontier.MLP(small(fp8_mlp=True, fp8_head=True))(x), x + 1)


def test_without_kernels_the_fp8_mlp_takes_none(monkeypatch):
    """Also where a GPU could run one: --kernels loss, or a machine without Triton."""
    monkeypatch.setattr(frontier, "kernel_grid", lambda *_: (1, 256))
    mlp = frontier.MLP(small(fp8_mlp=True, fp8_head=True))
    mlp(torch.randn(48, 32)).sum().backward()


def largest_values(comm, config, steps):
    """Train -> for each step, of each MLP: [(largest h of a micro-batch of this rank, scale in the
    step)], and (largest gradient of this rank, scale); the states before and after a loaded one."""
    worker = worker_of(config, comm)
    shake(worker.model)
    found = []
    gradients = []
    mlps = [block.mlp for block in worker.model.blocks if block.mlp is not None]
    for i, mlp in enumerate(mlps):

        def record(mlp, inputs, i=i):
            x, fc = (t.detach().double().numpy() for t in (inputs[0], mlp.fc))
            h = np.square(np.maximum(in_e4m3(x, 2.0**-6) @ in_e4m3(fc, 2.0**-7), 0))
            found[-1][i].append((h.max(), mlp.h_scale.item()))

        mlp.register_forward_pre_hook(record)
    start_gather = worker.scales.start_gather

    def before_gather():
        gradients.append([(mlp.grad_max.item(), mlp.grad_scale.item()) for mlp in mlps])
        start_gather()

    worker.scales.start_gather = before_gather
    for step in range(steps):
        found.append([[] for _ in mlps])
        plan = train_gpt.plan_of(config, step)
        worker.step(plan, worker.stream.next_batch(plan))
        assert all(mlp.h_max == mlp.grad_max == 0 for mlp in mlps)
    state = worker.optimizer.state_dict()
    mlps[0].h_scale.fill_(3)
    worker.optimizer.load_state_dict(state)
    scales = {
        name: x.item() for name, x in state.items() if name.endswith(("/h_scale", "/grad_scale"))
    }
    return found, gradients, scales, mlps[0].h_scale.item()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_next_step_s_scales_are_by_the_largest_values_of_all_micro_batches_and_ranks(
    corpus, on_ranks, ranks
):  # noqa: F811
    config = small(
        layers="Sin S0inM M LM",
        backout_layer=2,
        token_gates=(0,),
        fp8_mlp=True,
        fp8_head=True,
        adam_every=1,
        untie_at=0.0,
        **corpus,
    )
    results = on_ranks(ranks, largest_values, config, 3)
    scales = [1.0] * 3
    for of_ranks in zip(*(found for found, *_ in results)):
        by_mlp = [[pair for rank in of_ranks for pair in rank[i]] for i in range(3)]
        assert all(len(pairs) == 8 for pairs in by_mlp)
        for pairs, scale in zip(by_mlp, scales):
            assert all(used == pytest.approx(scale, rel=1e-5) for _, used in pairs)
        scales = [1.8 / 448 * max(h for h, _ in pairs) for pairs in by_mlp]
    grad_scales = [2.0**-6] * 3
    for of_ranks in zip(*(gradients for _, gradients, *_ in results)):
        for i, pairs in enumerate(zip(*of_ranks)):
            assert all(used == pytest.approx(grad_scales[i], rel=1e-5) for _, used in pairs)
            grad_scales[i] = 1.8 / 57344 * max(largest for largest, _ in pairs)
    assert 0 < min(grad_scales)
    for *_, state, loaded in results:
        names = [f"blocks.{i}.mlp.proj/{of}_scale" for i in (1, 2, 3) for of in ("h", "grad")]
        assert [*state] == names
        expected = [scale for pair in zip(scales, grad_scales) for scale in pair]
        assert [*state.values()] == pytest.approx(expected, rel=1e-5) and loaded == state[names[0]]


# training, step by step


FURTHER_ROWS = (
    *(row for row in ROWS if row[0] != "doc_copy"),
    ("resid_lambdas", 4.0, 0.85, 0.9, 1e3),
    ("post_lambdas", 0.7, 0.6, 0.95, 2e3),
    ("mudd", 6.0, 0.7, 0.8, 4e3),
    ("mudd_biases", 3.0, 0.75, 0.85, 5e3),
    ("token_gates", 5.0, 0.65, 0.9, 3e3),
    ("token_gates_biases", 2.0, 0.8, 0.9, 6e3),
)
SHORT = dict(
    layers="S0xinM P1inM LxgdinM+0 SinM cL2M",
    backout_layer=2,
    token_gates=(0, 2),
    num_heads=2,
    muon_lr=0.03,
    muon_qk_heads=1,
)
UNITS = {"qk": ((16, 32), True), "vo": ((32, 32), False)}


def plain_training(worker, config, muon, rows=FURTHER_ROWS):
    """PlainTraining with a row for each kind."""
    by_hand = groups_by_hand(
        [row for row in rows if not row[0].startswith(("mudd", "token_gates"))]
    )
    by_kind = {row[0]: (0.001 * row[1], *row[2:]) for row in rows}
    by_hand |= {
        name: by_kind[p.kind]
        for name, p in worker.model.named_parameters()
        if p.kind.startswith(("mudd", "token_gates"))
    }
    return PlainTraining(worker.model, config, by_hand, muon, UNITS)


def test_groups_and_weights_of_targets_train_as_a_plain_second_training_does(tmp_path):
    """Six steps, three Adam updates: each kind by its own row, further targets by stage. Losses
    are cross entropies in any case."""
    stages = (
        Stage(until=2, second_token_weight=Ramp(0.5, 0.0)),
        Stage(until=3, third_token_weight=0.25),
        Stage(),
    )
    config = small(
        **SHORT,
        **SIX_STEPS,
        untie_at=0.0,
        stages=stages,
        param_groups=(
            *(AdamGroup(*row) for row in FURTHER_ROWS),
            MuonGroup("mlp_fc", lr_mul=1.5),
            MuonGroup("mlp_proj"),
        ),
    )
    worker = make_trainer(tmp_path, config)
    plain = plain_training(worker, config, (("fc", 1.5), ("proj", 1.0)))
    weights = iter([(1, 0.5), (1, 0.25), (1, 0, 0.25), (1,), (1,), (1,)])
    plain.step = lambda *args, step=plain.step: step(*args, weights=next(weights))
    plain.train(worker, 6)


@pytest.mark.parametrize("lazy", [False, True])
def test_untying_trains_as_a_plain_second_training_does(tmp_path, lazy):
    """Ten steps, tied until step 6. Lazy: until a gather is waited for, all parameters are NaN."""
    config = small(
        **SHORT,
        **SIX_STEPS | dict(num_steps=10),
        untie_at=0.41,
        overlap_param_gather=lazy,
        param_groups=(
            *(AdamGroup(*row) for row in FURTHER_ROWS if row[0] != "embed"),
            AdamGroup("embed", *FURTHER_ROWS[0][1:]),
            MuonGroup("mlp_proj", lr_mul=0.5),
        ),
    )
    worker = make_trainer(tmp_path, config, comm=Hostile() if lazy else train_gpt.Comm())
    rows = [row if row[0] != "embed" else ("embed", *FURTHER_ROWS[0][1:]) for row in FURTHER_ROWS]
    plain = plain_training(worker, config, (("fc", 2.0), ("proj", 0.5)), rows)
    plain.model.tied = True
    # at the start of each step's last forward: the parameters whose gathers are in flight
    waiting = []
    worker.model.register_forward_pre_hook(
        lambda *_: waiting.append(
            {
                slot.name
                for bucket in worker.optimizer.buckets
                if bucket.gather_handle is not None
                for slot in bucket.slots
            }
        )
    )
    in_step = plain.step
    before = worker.before_step

    def plain_step(step, *args):
        if lazy and 0 < step < 6:  # tied: the forward waits for the head, and only for it
            assert "blocks.1.mlp.fc" in waiting[-2] and "lm_head.weight" not in waiting[-2], step
        assert worker.model.tied == plain.model.tied == (step < 6), step
        return in_step(step, *args)

    def before_step(plan):
        if plan.step == 6:
            sequences = np.stack([some_documents(seed, 17).astype(np.int32) for seed in (1, 2)])
            # before this step it still reads the head's weights
            loss = worker.validate(plan, sequences)[0]
            worker.model.embed.weight.data.add_(1)
            assert worker.validate(plan, sequences)[0] == loss
            plain.p["embed.weight"] = plain.p["lm_head.weight"].clone()  # with its moments
            plain.moments["embed.weight"] = [x.clone() for x in plain.moments["lm_head.weight"]]
            plain.model.tied = False
        before(plan)

    plain.step = plain_step
    worker.before_step = before_step
    plain.train(worker, 10)
    assert not torch.equal(worker.model.embed.weight, worker.model.lm_head.weight)
    worker.model.apply_schedule(train_gpt.plan_of(config, 10))
    assert not worker.model.tied
    always = shaken(dataclasses.replace(config, untie_at=1.0))
    always.apply_schedule(train_gpt.plan_of(config, 10))
    assert always.tied, "the last validation is of the model that was trained"


# runs


@pytest.fixture
def flags(tmp_path, corpus):  # noqa: F811
    """flags(run_id, ...) -> those of a small run whose log is in the test's folder."""

    def make(run_id, **changes):
        values = {
            **TINY,
            "ngrams": "Ngrams(2, 40, 16)",
            "layers": "S0inM L1xgdM",
            "token_gates": (0,),
            "backout_layer": 0,
            "model_dim": 16,
            "micro_batches": 4,
            "micro_batch_tokens": 16,
            "max_document_tokens": 12,
            "val_len": 48,
            "num_steps": 8,
            "val_every": 5,
            "warmup_steps": 0,
            "muon_qk_heads": 1,
            "muon_momentum_rise": 3,
            "bucket_mb": 0.004,
            "fp8_mlp": "false",
            "stages": (
                "Stage(until=1/2, long_window=2, second_token_weight=.5), Stage(long_window=4),"
                " Stage(extra_steps=2, long_window=6)"
            ),
            **corpus,
            "log_dir": str(tmp_path),
            "run_id": run_id,
            **changes,
        }
        values["layers"] = reference.layer_rows(values["layers"])
        return ["--preset", values.pop("preset", "frontier89"), *as_flags(values)]

    return make


# all its mechanisms in a small model and eight steps or nine
RECORD_92 = dict(
    preset="frontier",
    layers="PqinM Sqv0xinM rin+0 cSqv1MM cL2gM",
    backout_layer=2,
    token_gates=(0, 2),
    mlp_dim=24,
    mudd_groups=4,
    num_heads=2,
    ngrams="Ngrams(2, 40, 16), Ngrams(3, 30, 16)",
    untie_at=0.7,
    doc_copy="true",
    fp8_mlp="true",
    fp8_head="true",
    param_groups=(
        'AdamGroup("value_embeds", 70, .75, .95, .025, slow_from=4, by_rows=true),'
        ' AdamGroup("ngram_embeds", 70, 0, .95, .025, slow_from=4, row_moment=true),'
        ' MuonGroup("attn", anvil_from=3), MuonGroup("mlp_fc", 2, anvil_from=3),'
        ' MuonGroup("mlp_proj", 4, anvil_from=3)'
    ),
    tails=(
        'Tail("head embed", 5, 2, 1, .3, last_rate=.2, blend=.65), Tail("vo mlp", 4, 1, 0, .5),'
        ' Tail("value_embeds", 5, 4, 3, .5, keep_norm=false), Tail("qk", 4, final_steps=2, rate=.4,'
        ' blend=.5), Tail("vo mlp", 4, 2, 1, .4, final_steps=2, blend=.3)'
    ),
    stages=(
        "Stage(until=1/2, long_window=2, second_token_weight=.5, candidates=32),"
        " Stage(long_window=4, attended_tokens=5, candidates=48), Stage(extra_steps=2,"
        " long_window=6)"
    ),
)


@pytest.fixture
def of_600_tokens(tmp_path):
    """Files of shards. With so many tokens candidates are drawn in part."""
    encoding = train_gpt.Encoding(600, 599)
    files = {}
    for split, tokens in ("train", 6000), ("val", 500):
        documents = some_documents(1, tokens, *encoding)
        files[f"{split}_files"] = write_shard(tmp_path / f"{split}.bin", documents, *encoding)
    return files


@pytest.mark.slow
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(
    flags, on_ranks, tmp_path, of_600_tokens
):
    """Resumed before the step that unties."""
    settings = {**RECORD_92, "warmup_steps": 6, "overlap_param_gather": "true", "save_every": 4}
    settings |= of_600_tokens
    kill_and_resume(flags, on_ranks, tmp_path, settings, [4], frontier.PRESETS)


def test_exact_runs_go_on_at_any_number_of_ranks_in_the_midst_of_a_cycle(
    flags, on_ranks, tmp_path, of_600_tokens
):
    """The first time after the step that unties."""
    lives = (4, 7, 1), (1, -1, 7)
    settings = {**RECORD_92, "overlap_param_gather": "true", **of_600_tokens}
    goes_on_at_any_number_of_ranks(flags, on_ranks, tmp_path, settings, frontier.PRESETS, lives)
    log = (tmp_path / "killed.txt").read_text()
    assert {*re.findall(r"^step:.* candidates:(\d+)", log, re.M)} == {"32", "48"}


def test_a_checkpoint_is_resumed_by_its_own_program(flags, on_ranks, tmp_path):
    """run.sh finds the program by the checkpoint; the other one names it."""
    on_ranks(1, train, flags("stopped", save_every=4), 6, frontier.PRESETS)
    resume = ["--resume", str(tmp_path / "stopped.txt")]
    assert (
        program_of(resume) is frontier
        and program_of(["--preset", "laptop"]) is program_of([]) is train_gpt
    )
    assert train_gpt.parse_config(resume, "frontier", frontier.PRESETS)[0] == "frontier89"
    with pytest.raises(
        train_gpt.RunError, match="a run of frontier.py; start frontier.py in place of train_gpt.py"
    ):
        train_gpt.parse_config(resume, "laptop")


@pytest.mark.parametrize(
    "changes",
    [
        {
            "stages": (
                "Stage(5, prefix_weight=Ramp(0.0, 0.25)), Stage(prefix_weight=Ramp(0.25, 0.0)),"
                " Stage(extra_steps=1, micro_batches=8)"
            )
        },
        {
            "stages": "Stage(3), Stage(long_window=5)",
            "num_steps": 9,
            "untie_at": 0.4,
            "adam_every": 3,
        },
    ],
    ids=str,
)
def test_the_warm_up_meets_every_kind_of_step(flags, capsys, monkeypatch, changes):
    """Also what a ramp computes from its second step on, and the step that unties."""
    before = frontier.Worker.before_step
    kinds = []

    def before_step(self, plan):
        tied = self.model.tied
        before(self, plan)
        kinds.append(
            (
                plan.micro_batches,
                plan.windows.long,
                plan.scheduled["prefix_weight"] > 0,
                tied,
                self.model.tied,
            )
        )

    monkeypatch.setattr(frontier.Worker, "before_step", before_step)
    status, _, errors = run_here(
        flags("kinds", val_every=0, warmup_steps=18, **changes), capsys, frontier.PRESETS
    )
    assert status == 0, errors
    assert {*kinds[:18]} == {*kinds[18:]} and len({*kinds}) > 1


def test_frontier_trains_on_gpt2_tokens_and_its_log_opens_with_both_programs(tmp_path, script):
    """From what data/fineweb.py writes: shards, and beside them the bytes of GPT-2's tokens."""
    values = {
        **TINY,
        "ngrams": "Ngrams(2, 500, 64)",
        "model_dim": 64,
        "mudd_groups": 4,
        "num_heads": 4,
        "num_steps": 2,
        "micro_batches": 2,
        "warmup_steps": 0,
        "fp8_mlp": "false",
        "stages": (Stage(long_window=7, prefix_weight=0.25), Stage(extra_steps=1, long_window=11)),
        "log_dir": tmp_path / "logs",
        "run_id": "f",
    }
    for split, tokens in (("train", 9000), ("val", 1000)):
        write_shard(
            tmp_path / f"toy_{split}_000001.bin",
            some_documents(1, tokens, 50257, 50256),
            50257,
            50256,
        )
        values[f"{split}_files"] = tmp_path / f"toy_{split}_*.bin"
    root = Path(frontier.__file__).parent
    words = [root / "frontier.py", *as_flags(values)]
    _, missing = script(*words).communicate(timeout=600)
    assert missing.count("\n") == 1 and f"data/gpt2.py {tmp_path}" in missing
    write_gpt2_tokens(tmp_path)
    run = script(*words)
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    source, _, start, _, end, _ = read_log(tmp_path / "logs" / "f.txt")
    assert end["steps"] == 2 and start["preset"] == "frontier"
    assert source == "".join(
        f"# file: {name}\n{(root / name).read_text()}" for name in ("frontier.py", "train_gpt.py")
    )
    assert start["source_sha256"] == train_gpt.sha256_of(source.encode())
