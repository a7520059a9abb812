"""The values of records 44, 89 and 92, typed from descriptions of their programs, and what the
presets `speedrun`, `frontier89` and `frontier` give for each step, parameter and layer."""

import re
from types import SimpleNamespace

import pytest
import torch

import frontier
import train_gpt
from frontier import gates_of

PRESETS = frontier.PRESETS | {"speedrun": train_gpt.PRESETS["speedrun"]}
GPT2 = train_gpt.Encoding(50257, 50256)


@pytest.fixture(scope="module", params=PRESETS)
def preset(request):
    return request.param


@pytest.fixture(scope="module")
def config(preset):
    return PRESETS[preset]


@pytest.fixture(scope="module")
def model(config):
    """The model at its full size, without memory."""
    with torch.device("meta"):
        return train_gpt.build_model(config, GPT2)


# values that are the same at every step

VALUES = dict(
    clip_norm=0.0,
    world_size_invariant=False,
    seed=0,
    target_val_loss=3.28,
    train_shards=9,
    epochs=1,
    long_documents="cut",
    shuffle=False,
    even_order=False,
    val_tokens=10_485_760,
    val_skip=0,
    val_len=262_144,
    val_every=250,
    ngrams=(),
    ngram_reset=0,
    doc_copy=False,
    model_dim=768,
    num_heads=6,
    backout_layer=8,
    logit_cap=30.0,
    dtype="bfloat16",
    fp8_head=True,
    fp8_x_scale=27.712812921102035 / 448,
    fp8_weight_scale=1 / 512,
    fp8_grad_scale=1 / 448,
    window_block=128,
    adam_every=2,
    lazy_tables=False,
    grad_reduce_in_fp32=False,
    bf16_compress=False,
    micro_batch_splits=1,
    train_loss_every=10,
    init_from="",
    race="",
)
VALUES_89 = VALUES | dict(
    ngrams=((2, 377_280, 768),),
    backout_layer=7,
    logit_cap=23.0,
    logit_shift=5.0,
    fp8_x_scale=100 / 448,
    fp8_weight_scale=1.6 / 448,
    fp8_grad_scale=0.75 / 448,
    fp8_mlp=True,
    fp8_qkv=False,
    fp8_logits=False,
    softmax_scale=0.1,
    narrow_softmax_scale=0.13,
    mudd_groups=0,
    ngram_hash="record89",
    normalized_ids=False,
    token_gates=(0, 4),
    output_init=1.0,
    head_init=0.005,
    value_init=0.01,
    resid_lambda_init=1.1,
    log_q_share=0.0,
)
VALUES_92 = VALUES_89 | dict(
    ngrams=((2, 5_287_680, 768), (3, 5_287_680, 768)),  # the record's have 42,301,440 rows each
    val_every=0,
    fp8_weight_scale=2 / 448,
    fp8_grad_scale=0.09375 / 448,
    fp8_qkv=True,
    fp8_logits=True,
    softmax_scale=0.085,
    mudd_groups=12,
    ngram_hash="record92",
    lazy_tables=True,
)
# the other tests compare what these decide
DECIDE = """layers stages tails param_groups num_steps cooldown lr_floor final_window adam_lr
adam_beta1 adam_beta2 adam_eps muon_lr muon_weight_decay muon_momentum muon_momentum_low
muon_momentum_rise muon_momentum_fall muon_beta2 muon_qk_heads mlp_dim untie_at""".split()


def test_values_are_the_record_s(preset, config):
    expected = {"speedrun": VALUES, "frontier89": VALUES_89, "frontier": VALUES_92}[preset]
    of_stages = [f.name for f in train_gpt.stage_fields(config)]
    names = {*train_gpt.fixed_fields(config)} - {*DECIDE, *of_stages}
    values = {name: getattr(config, name) for name in names}
    values["ngrams"] = tuple((table.n, table.rows, table.width) for table in config.ngrams)
    assert names == {*expected}
    for name, value in expected.items():
        assert values[name] == (pytest.approx(value) if isinstance(value, float) else value), name


# the plan of each step

# end of the stage, tokens of a micro-batch, longest document, part of a document that attention
# sees, short and long window, largest factor of rates, weights of further targets (the second, the
# third, the prefix), classes of the loss. Two numbers: linear; more: one after the other
STAGES = {
    "speedrun": (
        (735, 32768, 2048, 0, 128, 384, 1.0, 0, 0, 0, 0),
        (1470, 32768, 2048, 0, 384, 896, 1.0, 0, 0, 0, 0),
        (2205, 32768, 2048, 0, 640, 1408, 1.0, 0, 0, 0, 0),
        (2245, 32768, 2048, 0, 768, 1664, 1.0, 0, 0, 0, 0),
    ),
    "frontier89": (
        (423, 16384, 896, 0, 128, 384, 1.0, 0.5, (0.25, 0), 0.25, 0),
        (847, 32768, 2048, 0, 384, 896, 1.52, (0.5, 0), 0, (0.25, 0), 0),
        (1270, 49152, 2048, 0, 640, 1408, 1.73, 0, 0, 0, 0),
        (1285, 49152, 2048, 0, 768, 1664, 0.15, 0, 0, 0, 0),
    ),
    "frontier": (
        (320, 16384, 896, 0, 128, 384, 1.0, 0.5, (0.25, 0), 0.25, 10240),
        (681, 32768, 2048, 0, 384, 896, 1.52, (0.5, 0), 0, (0.2, 0.15, 0.1, 0.05), 10240),
        (1107, 49152, 3072, 2560, 640, 1408, 1.73, 0, 0, 0, (14336, 14336, 24576)),
        (1174, 40960, 3072, 2560, 640, 1408, 1.579267, 0, 0, 0, 0),
        (1194, 16384, 3072, 2560, 768, 1664, 0.3, 0, 0, 0, 0),
    ),
}
# rates: step where the cooldown begins, where it ends, its last share, factor at its end; momentum:
# steps of its rise, highest value, step where it falls, number of steps
SCHEDULES = {
    "speedrun": (1102.5, 2205, 0.9998, 0.1, 300, 0.95, 2195, 2245),
    "frontier89": (508, 1270, 1, 0.15, 300, 0.95, 1235, 1285),
    "frontier": (234, 1174, 1, 0.3, 240, 0.93, 1144, 1194),
}


def factor_at(preset, step, peak):
    begin, end, last, floor, *_ = SCHEDULES[preset]
    done = min(last, max(0, step - begin) / (end - begin))
    return peak * (1 - done) + floor * done


def momentum_at(preset, step):
    *_, rise, highest, fall, steps = SCHEDULES[preset]
    share = min(1, step / rise, (steps - step) / (steps - fall))
    return 0.85 + (highest - 0.85) * share


def stage_at(preset, step):
    """-> the stage's row with the values of this step."""
    begin = 0
    for row in STAGES[preset]:
        end = row[0]
        if step < end or row is STAGES[preset][-1]:
            break
        begin = end

    def now(value):
        if not isinstance(value, tuple):
            return value
        done = (step - begin) / (end - begin)
        if len(value) == 2:
            return value[0] + (value[1] - value[0]) * done
        return value[len(value) * (step - begin) // (end - begin)]

    return [now(value) for value in row]


def test_the_plan_is_the_record_s_at_every_step(preset, config):
    steps = SCHEDULES[preset][-1]
    assert config.num_steps == steps
    seen = []
    for step in range(steps + 1):
        plan = train_gpt.plan_of(config, step)
        _, tokens, documents, attended, short, long, peak, *weights, classes = stage_at(
            preset, step
        )
        if long not in seen:
            seen.append(long)
        assert plan.rotary_windows == tuple(seen), step
        assert plan.windows == (2560 if step == steps else long, short), step
        assert plan.lr_factor == pytest.approx(factor_at(preset, step, peak), rel=1e-6), step
        assert plan.momentum == pytest.approx(momentum_at(preset, step)), step
        assert (plan.micro_batches, plan.micro_batch_tokens) == (8, tokens), step
        assert plan.max_document_tokens == documents and not plan.resets_ngrams, step
        if preset != "speedrun":
            found = [plan.scheduled[f"{name}_weight"] for name in FURTHER]
            assert step == steps or found == pytest.approx(weights, abs=1e-12), step
            assert plan.values["attended_tokens"] == attended, step
            assert plan.values["candidates"] == classes, step
    assert {*plan.scheduled} == (
        {"peak_lr_factor"} | ({f"{name}_weight" for name in FURTHER if preset != "speedrun"})
    )
    published = {"speedrun": 588.5e6, "frontier89": 338.8e6, "frontier": 328.7e6}[preset]
    assert train_gpt.tokens_of_steps(config, steps) == pytest.approx(published, abs=5e4)


FURTHER = "second_token", "third_token", "prefix"


# updates

# names of parameters, factor of the rate, decays of the moments, factor of the weight decay: Adam
ADAM = {
    "speedrun": (
        ("embed.*|value_embeds.*", 75, 0.65, 0.95, 0),
        ("lm_head.*", 1, 0.65, 0.95, 0),
        ("scalars", 5, 0.65, 0.95, 0),
    ),
    "frontier89": (
        ("scalars", 5, 0.9, 0.99, 0),
        ("smear_gate", 0.01, 0.9, 0.99, 0),
        (r"blocks\.\d+\.attn\.value_gate", 1, 0.9, 0.99, 1),
        ("lm_head.*|embed.*", 1, 0.5, 0.95, 150),
        ("value_embeds.*|ngrams.*", 75, 0.75, 0.95, 5),
        ("post_lambdas", 1, 0.9, 0.95, 0),
        ("resid_lambdas", 5, 0.9, 0.95, 0),
        (r"mudd\..*bias", 0.25, 0.9, 0.99, 0),
        (r"mudd\..*", 0.25, 0.9, 0.99, 1),
        (r"token_gates\..*bias|gate_scale", 0.1, 0.9, 0.99, 0),
        (r"token_gates\..*", 0.1, 0.9, 0.99, 1),
    ),
}
ADAM["frontier"] = (
    ("value_embeds.*", 70, 0.75, 0.95, 5),
    ("ngrams.*", 70, 0, 0.95, 5),
    *ADAM["frontier89"],
)
# names, factor of the rate, shape of what is orthogonalized, whether its second moments are per
# column: NorMuon, and from step 514 of record 92 on ANVIL
MUON = {
    "speedrun": (
        (".*qkvo", 1, (768, 768), True),
        (".*fc", 2, (768, 3072), True),
        (".*proj", 1, (768, 3072), True),
        (r"blocks\.\d+\.attn\.gate", 1, (6, 12), True),
        ("smear_gate", 1, (1, 12), True),
    ),
    "frontier89": (
        (".*qk", 1, (256, 768), True),
        (".*vo", 1, (768, 768), False),
        (".*fc", 2, (768, 3072), True),
        (".*proj", 4, (768, 3072), True),
    ),
    "frontier": (
        (".*qk", 1, (256, 768), True),
        (".*vo", 1, (768, 768), False),
        (".*fc", 1.914854, (768, 2816), True),
        (".*proj", 3.829708, (768, 2816), True),
    ),
}
MUON_RATE = {"speedrun": 0.03, "frontier89": 0.023, "frontier": 0.023}
MUON_DECAY = {"speedrun": 1.2, "frontier89": 1.2, "frontier": 2.25}
MUON_BETA2 = {"speedrun": 0.95, "frontier89": 0.9, "frontier": 0.9}
FIRST_STEP_OF_EMBED = {"speedrun": 0, "frontier89": 848, "frontier": 1176}
TABLES = "ngrams.*|value_embeds.*"


def row_of(rows, name):
    return next((row for row in rows if re.fullmatch(row[0], name)), None)


def updates_in(preset, name, step):
    """Whether the record updates a parameter in a step."""
    if name == "embed.weight" and step < FIRST_STEP_OF_EMBED[preset]:
        return False
    if row_of(MUON[preset], name):
        return True
    if preset == "frontier" and step >= 336 and re.fullmatch(TABLES, name):
        return step % 4 == 3
    return step % 2 == 1


def expected_hyper(preset, name, step):
    factor = factor_at(preset, step, stage_at(preset, step)[6])
    momentum = momentum_at(preset, step)
    if row_of(MUON[preset], name):
        rate = MUON_RATE[preset] * factor
        of_muon = {"lr": rate, "decay": rate * MUON_DECAY[preset], "momentum": momentum}
        of_muon |= {"beta2": MUON_BETA2[preset]}
        blended = {"fast": 0.85, "share": 0.4385} if step >= 514 else {"fast": momentum, "share": 1}
        return of_muon | (blended if preset == "frontier" else {})
    _, multiplier, beta1, beta2, decay = row_of(ADAM[preset], name)
    of_rows = {}
    if preset == "frontier" and name.startswith("ngrams"):  # 0.95 in two steps, also from 336 on
        of_rows = {"step": step, "cycle": 2, "beta2_of_cycle": 0.95}
    if preset == "frontier" and step >= 336 and re.fullmatch(TABLES, name):
        beta1, beta2, decay = beta1**2, 0.9025, 10
    rate = 0.008 * multiplier * factor
    of_adam = {"lr": rate, "beta1": beta1, "beta2": beta2, "t": 7.0} | of_rows
    of_adam["eps"] = 1e-8 if preset == "speedrun" else 1e-10
    return of_adam | ({"decay": rate * rate * 0.005 * decay} if decay else {})


def test_each_parameter_is_updated_as_the_record_does_at_every_step(preset, config, model):
    specs = train_gpt.specs_of(config, model)
    distinct = {}  # by what decides an update; parameters of a kind have the same
    for spec in specs:
        rule = spec.rule
        row = row_of(MUON[preset], spec.name)
        assert spec.first_step == (
            FIRST_STEP_OF_EMBED[preset] if spec.name == "embed.weight" else 0
        )
        if row:
            _, multiplier, matrix, wide = row
            assert type(rule) is (frontier.Anvil if preset == "frontier" else train_gpt.NorMuon)
            assert (rule.unit(spec), rule.wide) == (matrix, wide), spec.name
            assert spec.scale == pytest.approx(multiplier, rel=1e-6), spec.name
        else:
            sends_rows = spec.name.startswith("ngrams")
            by_row = sends_rows and preset == "frontier"
            assert rule.fp32_moments == (preset != "speedrun") and rule.rows == sends_rows
            assert isinstance(rule, frontier.RowAdam) == by_row and spec.scale == 1
            assert rule.lazy == by_row or not sends_rows, spec.name
        row = row or row_of(ADAM[preset], spec.name)
        distinct[rule, row, spec.first_step] = spec
    for spec in distinct.values():
        bucket = SimpleNamespace(rule=spec.rule, first_step=spec.first_step)
        for step in range(config.num_steps):
            updates = train_gpt.Bucket.updates_in(bucket, step)
            assert updates == updates_in(preset, spec.name, step), (spec.name, step)
            if updates:
                hyper = spec.rule.hyper(train_gpt.plan_of(config, step), 7)
                assert hyper.pop("dtype", torch.bfloat16) == torch.bfloat16
                expected = expected_hyper(preset, spec.name, step)
                assert hyper == pytest.approx(expected, rel=1e-6, abs=1e-15), (spec.name, step)


# layers

# attention, width of queries and keys, width of values, value table, further parts of attention,
# what the stream adds, width of the MLP (twice: two of them), skip connection
LAYERS = {
    "speedrun": """
        -      -   -   - -         -     -    -
        S      128 128 1 gate      x0    3072 -
        S      128 128 2 gate      x0    3072 -
        S      128 128 - gate      x0    3072 -
        L      128 128 - gate      x0    3072 -
        S      128 128 - gate      x0    3072 -
        S      128 128 - gate      x0    3072 5
        -      -   -   - -         x0    3072 4
        S      128 128 - gate      x0    3072 3
        S      128 128 0 gate      x0    3072 2
        S      128 128 1 gate      x0    3072 1
        L      128 128 2 gate      x0    3072 -""",
    "frontier89": """
        paired 128 128 - -         x0+ngrams 3072 -
        short  128 128 0 xsa       x0+ngrams 3072 -
        paired 128 128 1 -         x0+ngrams 3072 -
        long   128 128 - xsa+gate  x0+ngrams 3072 -
        short  128 128 - xsa       x0+ngrams 3072 -
        paired 128 128 - -         x0+ngrams 3072 -
        none   -   -   - -         -         3072 3
        short  128 128 - xsa       x0+ngrams 3072 -
        short  128 128 2 backout   x0+ngrams 3072 -
        paired 128 128 3 backout   x0+ngrams 3072 -
        long   128 128 4 gate+dc+backout -   3072 -""",
    "frontier": """
        paired  64 128 - -         x0+ngrams 2816 -
        short   64  64 0 xsa       x0+ngrams 2816 -
        paired  64 128 1 -         x0        2816 -
        long   128 128 - xsa+gate  -         2816 -
        removed -  -   - -         x0+ngrams 2816 -
        paired  64 128 - -         x0+ngrams 2816 -
        none    -  -   - -         -         2816 3
        removed -  -   - -         x0        -    -
        short   64  64 2 backout   -         2816+2816 -
        removed -  -   - -         ngrams    2816 -
        long   128 128 3 gate+backout -      2816 -""",
}


def shown(parts):
    return "+".join(map(str, parts)) or "-"


def layer_words(block):
    """Describe a layer of the model by the words of LAYERS."""
    layer = block.layer
    attn = block.attn
    mlps = [mlp for mlp in (block.mlp, getattr(block, "second_mlp", None)) if mlp is not None]
    widths = shown(mlp.fc.shape[1] for mlp in mlps)
    table = "-" if layer.value_table is None else layer.value_table
    skip = "-" if layer.skip_from is None else layer.skip_from
    if isinstance(layer, train_gpt.Layer):
        matrix = 768 // 6 if attn is not None else "-"
        gate = "gate" if attn is not None and attn.gate.shape == (6, 12) else "-"
        adds = "x0" if layer.window or layer.mlp else "-"
        return [layer.window or "-", matrix, matrix, table, gate, adds, widths, skip]
    names = {"xsa": "xsa", "gated": "gate", "dc": "dc", "reads_backout": "backout"}
    parts = shown(word for name, word in names.items() if getattr(layer, name))
    dims = ("-", "-") if attn is None else (attn.qk_dim, attn.v_dim)
    adds = shown(layer.adds.split())
    return [layer.attention, *dims, table, parts, adds, widths, skip]


def test_the_layers_are_the_record_s(preset, model):
    expected = [line.split() for line in LAYERS[preset].strip().splitlines()]
    assert [[*map(str, layer_words(block))] for block in model.blocks] == expected
    tables = {"speedrun": 3, "frontier89": 5, "frontier": 4}[preset]
    assert [tuple(table.weight.shape) for table in model.value_embeds] == [(50304, 768)] * tables
    assert tuple(model.lm_head.weight.shape) == tuple(model.embed.weight.shape) == (50304, 768)
    if preset == "speedrun":
        assert sum(p.numel() for p in model.parameters()) == 268_665_619


# how often each initial value is among the token gates of the first layers, and of those from 4 on
GATES = {
    "frontier89": ({0: 16, 0.05: 4, 0.25: 6}, {0: 12 + 5 + 6, 0.05: 5, 0.25: 6, 0.5: 1, 1: 6}),
    "frontier": ({0: 15, 0.05: 2, 0.25: 6}, {0: 3, 0.05: 3, 0.25: 6, 0.5: 1}),
}


@pytest.mark.parametrize("preset", GATES)
def test_the_token_gates_begin_as_the_record_s(preset):
    for layers, expected in zip((range(4), range(4, 11)), GATES[preset]):
        gates = sum(gates_of(PRESETS[preset], layers).values(), [])
        assert {value: gates.count(value) for value in gates} == expected


# averages

# steps after which they move, rate, rate after the last step, share at the end, whether norms stay
ODD = {896, *range(897, 1194, 2)}
EACH_FOURTH = {897, *range(901, 1194, 4), 1192}
TAILS = (
    ("head embed", ODD, 1 - (297 / 299) ** 2, 0.00668896, 0.65, True),
    ("vo mlp", {*range(945, 1194, 4)}, 4 / 53, 4 / 53, 1, True),
    ("value_embeds", {*range(947, 1192, 4)}, 4 / 53, 4 / 53, 1, False),
    ("qk", EACH_FOURTH, 2 / 75, 2 / 75, 0.55, True),
    ("vo mlp", EACH_FOURTH, 2 / 75, 2 / 75, 0.3493, True),
)


def test_the_averages_are_record_92_s():
    tails = PRESETS["frontier"].tails
    assert PRESETS["frontier89"].tails == ()
    assert [len(row[1]) for row in TAILS] == [150, 63, 62, 76, 76]
    averages = [torch.zeros((), dtype=torch.float64) for _ in tails]
    weight = torch.ones((), dtype=torch.float64)
    stand_in = SimpleNamespace(
        tails=tails, steps=1194, parts=lambda i: [(averages[i].fill_(0), weight)]
    )
    moved = [{} for _ in tails]
    for step in range(1194):
        torch._foreach_zero_(averages)
        frontier.TailAverages.move(stand_in, step)
        for i, average in enumerate(averages):
            if average:
                moved[i][step] = average.item()
    for tail, rates, row in zip(tails, moved, TAILS, strict=True):
        kinds, steps, rate, last_rate, blend, keep_norm = row
        assert (tail.kinds, tail.keep_norm) == (kinds, keep_norm)
        assert tail.blend == pytest.approx(blend) and {*rates} == steps
        first, *others = sorted(steps)
        expected = {first: 1.0} | {step: rate for step in others}
        if 1193 in steps:
            expected[1193] = last_rate
        assert rates == pytest.approx(expected, rel=1e-5)


def test_half_of_the_steps_halves_every_number_of_steps_of_record_92():
    whole = PRESETS["frontier"]
    name = "frontier"
    half = train_gpt.parse_config(["--num_steps", "597"], name, frontier.PRESETS)[1]
    for tail, last_steps, row in zip(half.tails, (149, 124, 123, 148, 148), TAILS, strict=True):
        _, _, rate, last_rate, blend, _ = row
        assert tail.last_steps == last_steps and tail.blend == pytest.approx(blend)
        found = tail.rate, tail.rate if tail.last_rate is None else tail.last_rate
        assert found == pytest.approx([1 - (1 - r) ** 2 for r in (rate, last_rate)], rel=1e-5)
    groups = train_gpt.groups_by_kind(half)
    assert {kind: groups[kind].slow_from for kind in ("value_embeds", "ngram_embeds")} == {
        "value_embeds": 168,
        "ngram_embeds": 168,
    }
    assert {groups[kind].anvil_from for kind in ("attn", "mlp_fc", "mlp_proj")} == {257}
    assert (half.muon_momentum_rise, half.muon_momentum_fall) == (120, 25)
    assert [stage.end for stage in train_gpt.stages_of(half)][-2:] == [587, 597]
    longer = train_gpt.parse_config(["--num_steps", "2388"], name, frontier.PRESETS)[1]
    for field in "tails", "param_groups", "stages", "muon_momentum_rise", "muon_momentum_fall":
        assert getattr(longer, field) == getattr(whole, field), field
