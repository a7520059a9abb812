"""Tail averages and sampled softmax of frontier.py, compared with plain loops written from the
description of record 92."""

import dataclasses
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import frontier
import train_gpt
from frontier import Stage, Tail
from test_frontier import small, worker_of
from test_model import ENCODING, make_trainer, shake, tokens_of
from test_resume import corpus  # noqa: F401, a fixture
from test_sync import Hostile

# with few classes each draw would go once around the permutation
LARGER = train_gpt.Encoding(600, 599)
PREFIXES = [-1 if token % 3 else token // 2 for token in range(600)]
LAYERS = dict(
    layers="S0xM P1M LxgM+0 SM cL2M",
    backout_layer=2,
    token_gates=(0, 2),
    num_heads=2,
    muon_qk_heads=1,
)


def kind_of(name):
    """The kind of a parameter in ROWS."""
    parts = name.split(".")
    return {"lm_head": "head", "embed": "embed", "value_embeds": "value_embeds"}.get(parts[0]) or {
        "qk": "qk",
        "vo": "vo",
        "fc": "mlp",
        "proj": "mlp",
    }.get(parts[-1])


# tail averages


STEPS = 24
ROWS = (
    Tail("head embed", 18, 2, 1, 0.3, last_rate=0.17, blend=0.65),
    Tail("vo mlp", 13, 4, 3, 4 / 53),
    Tail("value_embeds", 11, 4, 1, 0.11, keep_norm=False),
    Tail("qk", 17, 4, 2, 0.09, final_steps=2, blend=0.55),
    Tail("vo mlp", 17, 4, 2, 0.09, final_steps=2, blend=0.3493),
)
TICKS = (
    [6, 7, 9, 11, 13, 15, 17, 19, 21, 23],
    [11, 15, 19, 23],
    [13, 17, 21],
    [7, 10, 14, 18, 22, 23],
    [7, 10, 14, 18, 22, 23],
)


def test_averages_of_bf16_weights_are_in_float32(tmp_path):
    """Each weight equals s after step s. A step of bf16 is 1/16 there."""
    row = dataclasses.replace(ROWS[1], keep_norm=False)
    config = small(**LAYERS, tails=(row,), num_steps=STEPS, train_files=str(tmp_path / "train.bin"))
    make_trainer(tmp_path, config)  # writes the file
    tails = worker_of(dataclasses.replace(config, dtype="bfloat16")).tails
    wanted = TICKS[1][0]
    for step in TICKS[1]:
        wanted += row.rate * (step - wanted)
        for _, weights in tails.parts(0):
            weights.fill_(step)
        tails.move(step)
    for average, _ in tails.parts(0):
        assert average.unique().tolist() == pytest.approx([wanted], abs=1e-5)
    tails.apply()
    for _, weights in tails.parts(0):
        assert weights.unique().tolist() == pytest.approx([wanted], abs=1 / 32)


def train_and_look(comm, folder, config):
    """Train in float64 -> all weights after each step, the saved state of each step, the weights
    after the training."""
    folder = folder / str(comm.rank)
    folder.mkdir(exist_ok=True)
    worker = make_trainer(folder, config, comm)
    weights = []
    states = []
    take = lambda: {
        name: p.detach().clone().numpy()
        for name, p in worker.model.named_parameters()
        if kind_of(name)
    }
    for step in range(config.num_steps):
        plan = train_gpt.plan_of(config, step)
        worker.step(plan, worker.stream.next_batch(plan))
        worker.optimizer.finish_all_gathers()
        weights.append(take())
        if step % 4 == 3:
            states.append(
                (
                    step,
                    {
                        name: x.numpy()
                        for name, x in worker.optimizer.state_dict().items()
                        if "/tail" in name
                    },
                )
            )
    worker.after_training()
    return weights, states, take()


def test_trained_weights_are_averaged_as_in_plain_loops(on_ranks, tmp_path):
    """24 steps; until step 16, in the midst of all averages, head and embedding are one matrix."""
    config = small(
        **LAYERS,
        tails=ROWS,
        num_steps=STEPS,
        micro_batches=2,
        micro_batch_tokens=16,
        max_document_tokens=14,
        stages=(Stage(),),
        untie_at=0.6,
    )
    untied = frontier.first_untied_step(config)
    assert untied == 16
    for weights, states, final in on_ranks(2, train_and_look, tmp_path, config):
        after = [
            {**w, "embed.weight": w["lm_head.weight"] if s < untied - 1 else w["embed.weight"]}
            for s, w in enumerate(weights)
        ]
        after[untied - 1] = {
            **weights[untied - 1],
            "embed.weight": weights[untied - 1]["lm_head.weight"],
        }
        names = {
            kind: [name for name in final if kind_of(name) == kind] for kind in map(kind_of, final)
        }
        assert (
            len(states) == STEPS // 4
            and config.overlap_param_gather
            and {len(of) for of in names.values()} >= {1, 3, 5, 10}
        )
        averages = [{} for _ in ROWS]
        known = dict(states)
        for step in range(STEPS):
            for i, row in enumerate(ROWS):
                for name in (name for kind in row.kinds.split() for name in names[kind]):
                    if step == TICKS[i][0]:
                        averages[i][name] = after[step][name]
                    elif step in TICKS[i]:
                        rate = row.last_rate if row.last_rate and step == STEPS - 1 else row.rate
                        averages[i][name] = averages[i][name] + rate * (
                            after[step][name] - averages[i][name]
                        )
                    if step in known and averages[i] and (name != "embed.weight" or step >= untied):
                        assert (
                            np.abs(known[step][f"{name}/tail{i}"] - averages[i][name].ravel()).max()
                            < 1e-12
                        ), (step, name)
        wanted = dict(after[-1])
        before = after[-1]
        for i, row in enumerate(ROWS):
            for name, average in averages[i].items():
                wanted[name] = wanted[name] + row.blend * (average - wanted[name])
        for kind in ("head", "embed", "qk", "vo", "mlp"):
            norm = [
                math.sqrt(sum(float((x[name] ** 2).sum()) for name in names[kind]))
                for x in (before, wanted)
            ]
            assert abs(norm[0] / norm[1] - 1) > 1e-8
            wanted |= {name: wanted[name] * norm[0] / norm[1] for name in names[kind]}
        for name, p in final.items():
            assert (
                np.abs(p - before[name]).max() > 1e-9 and np.abs(p - wanted[name]).max() < 1e-12
            ), name


@pytest.mark.parametrize(
    "changes, says",
    [
        *(
            (
                {"tails": (tail,)},
                f'{tail}: give kinds as a text such as "qk vo", and a phase below the period',
            )
            for tail in (Tail("qk", 3, 2, 2), Tail(3, 3))
        ),
        (
            {"tails": (Tail("qk", 3, rate=1.5),)},
            "rate is 1.5; it must be a number, above 0, at most 1",
        ),
        ({"tails": (Stage(),)}, "is not a row of it"),
        ({"candidates": 40}, "candidates is 40; products in fp8 need a multiple of 16"),
        (
            {"stages": (Stage(candidates=-16),)},
            "candidates is -16; it must be a whole number, from 0 on",
        ),
    ],
    ids=str,
)
def test_impossible_values_are_refused(changes, says):
    with pytest.raises(train_gpt.RunError) as error:
        small(**changes)
    assert says in str(error.value)


@pytest.mark.parametrize(
    "changes, says",
    [
        ({"tails": (Tail("head qkv", 3),)}, "of the kinds head, qkv one has no parameter"),
        (
            {"tails": (Tail("attn", 3), Tail("vo", 3))},
            "of the kinds attn, vo one has no parameter, or two have the same",
        ),
        ({"candidates": 144}, "candidates is 144; the head has only 128 classes"),
    ],
    ids=str,
)
def test_what_the_model_does_not_have_is_refused(changes, says, corpus):  # noqa: F811
    with pytest.raises(train_gpt.RunError, match=says):
        worker_of(small(**changes, **corpus))


# candidates


class Draws:
    """The candidates of a head of n classes, by the description: sets and loops."""

    def __init__(self, classes, micro_batches=8):
        self.classes = classes
        self.offsets = [classes * m // micro_batches for m in range(micro_batches)]

    def sweep(self, m, count):
        return [20011 * (self.offsets[m] + j) % self.classes for j in range(count)]

    def draw(self, m, targets, number):
        targets = {*targets}
        need = number - len(targets)
        if not need:
            return sorted(targets)
        count = min(self.classes, math.floor(1.7 * need) + 256)
        found = [c for c in self.sweep(m, count) if c not in targets]
        self.offsets[m] = (self.offsets[m] + count) % self.classes
        if len(found) < need:
            free = [c for c in range(self.classes) if c not in targets]
            found = free[:: max(1, len(free) // need)]
        return sorted(targets | {*found[:need]})


def drawer(classes, number, micro_batches=8, ranks=1, rank=0):
    config = small(micro_batches=micro_batches, stages=(Stage(candidates=number),))
    model = SimpleNamespace(
        lm_head=SimpleNamespace(weight=torch.empty(classes, 1)),
        prefixes=torch.empty(0),
        candidates=[],
    )
    return frontier.Candidates(config, model, train_gpt.Comm())


def test_candidates_of_the_record():
    ours = drawer(50304, 10240)
    plain = Draws(50304)
    assert plain.sweep(0, 8) == [0, 20011, 40022, 9729, 29740, 49751, 19458, 39469] and plain.sweep(
        1, 4
    ) == [18864, 38875, 8582, 28593]
    assert ours.offsets.tolist() == plain.offsets and ours.offsets[1] == 6288
    found, offset = ours.draw_one(np.arange(5000, 10000), 10240, 0)
    assert (
        offset == 9164
        and len(found) == 10240
        and found.tolist() == plain.draw(0, range(5000, 10000), 10240)
    )
    assert {*range(5000, 10000), 0, 20011, 40022, 29740} < {*found} and (np.diff(found) > 0).all()
    for share in 10240, 10239, 0:  # nothing is needed: nothing is drawn
        found, offset = ours.draw_one(np.arange(share), 10240, 77)
        assert len(found) == 10240 and (offset == 77) == (share == 10240)
    assert ours.draw_one(np.arange(10241), 10240, 77) == (None, 77), "all classes"
    ours.draw(10240, [np.arange(20000)] + 7 * [np.arange(100)])
    assert ours.used.tolist() == [50304] + 7 * [10240], "the log states their mean"


@pytest.mark.parametrize(
    "classes, number, targets", [(50304, 14336, 4000), (2048, 1200, 800), (128, 112, 20)]
)
def test_candidates_are_those_of_plain_loops(classes, number, targets):
    """20 steps of 8 micro-batches of uint16 tokens. In the second case often too few of the drawn
    ones are no targets."""
    ours = drawer(classes, number)
    plain = Draws(classes)
    random = np.random.default_rng(5)
    for _ in range(20 if classes < 50000 else 4):
        batch = [(random.random(targets) ** 2 * classes).astype(np.uint16) for _ in range(8)]
        if number == 1200:  # a stretch of the permutation
            batch = [
                np.array([20011 * (offset + k) % classes for k in range(targets)]).astype(np.uint16)
                for offset in plain.offsets
            ]
        ours.draw(number, batch)
        found = [x.tolist() for x in ours.model.candidates]
        assert (
            found == [plain.draw(m, x[1:].tolist(), number) for m, x in enumerate(batch)]
            and ours.offsets.tolist() == plain.offsets
        )


def loss_of_candidates(
    x, weight, targets, candidates, weights, cap=23.0, shift=5.0, log_q_share=0.0
):
    """Compute (objective, cross entropy, gradients of x and weight) from dense logits, token by
    token, in float64."""
    used = len({*targets})
    ratio = (len(weight) - used) / max(1, len(candidates) - used)
    further = [0 if j in targets else log_q_share * math.log(ratio) for j in range(len(weight))]
    logits = x @ weight.T
    c = [*candidates]
    s = 1 / (1 + np.exp(-(logits + shift) / 7.5))
    dlogits = np.zeros_like(logits)
    objective = 0.0
    entropy = 0.0
    for t in range(len(x)):
        wanted = [(w, targets[t + k]) for k, w in enumerate(weights[:3]) if w and t + k < len(x)]
        if weights[3] and PREFIXES[targets[t]] in c:
            wanted.append((weights[3], PREFIXES[targets[t]]))
        z = cap * s[t] + further
        lse = math.log(sum(math.exp(z[j]) for j in c))
        objective += sum(w * (lse - z[y]) for w, y in wanted)
        entropy += lse - z[targets[t]]
        dlogits[t, c] = sum(w for w, _ in wanted) * np.exp(z[c] - lse)
        for w, y in wanted:
            dlogits[t, y] -= w
        dlogits[t] *= cap / 7.5 * s[t] * (1 - s[t])
    return objective, entropy, dlogits @ weight, dlogits.T @ x


@pytest.mark.parametrize("log_q_share", [0.0, 0.5])
@pytest.mark.parametrize("weights", [(1, 0, 0, 0), (1, 0.5, 0.25, 0.25)], ids=str)
def test_loss_and_gradients_are_those_of_a_softmax_over_the_candidates(weights, log_q_share):
    """With all classes as candidates they are those without; also where the loss is computed in
    pieces. log_q_share raises the logits of candidates that are no target."""
    config = small(**LAYERS, log_q_share=log_q_share)
    model = shake(train_gpt.build_model(config, ENCODING)).double()
    model.prefixes[:64] = torch.tensor(PREFIXES[:64])
    _, targets = tokens_of(5, 40)
    model.further_weights = dict(
        zip(("second_token_weight", "third_token_weight", "prefix_weight"), weights[1:])
    )
    x0 = torch.randn(40, 32, dtype=torch.float64)
    weight = model.lm_head.weight
    chosen = sorted({*targets.tolist()} | {*range(1, 128, 3)})
    dropped = [
        PREFIXES[y] for y in targets.tolist() if PREFIXES[y] >= 0 and PREFIXES[y] not in chosen
    ]
    assert len(dropped) > 0 and len(chosen) < 90, "some prefixes are no candidates"

    def compute(candidates, pieces=40):
        model.loss_tokens = pieces
        model.candidates = candidates
        weight.grad = None
        x = x0.clone().requires_grad_()
        objective, entropy = model.loss(x, targets)
        objective.backward()
        assert not model.candidates
        return objective.item(), entropy.item(), x.grad.numpy(), weight.grad.numpy()

    plain = weight.detach().numpy()
    everything = compute([torch.arange(128)])
    expected = loss_of_candidates(
        x0.numpy(), plain, targets.tolist(), chosen, weights, log_q_share=log_q_share
    )
    for pieces in 40, 16:
        got = compute([torch.tensor(chosen)], pieces)
        assert got[:2] == pytest.approx(expected[:2], rel=1e-12)
        assert all(np.abs(a - b).max() < 1e-12 for a, b in zip(got[2:], expected[2:]))
    assert not np.delete(got[3], chosen, 0).any() and np.abs(everything[3]).min(1).max() > 0
    assert all(
        np.abs(a - b).max() < 1e-12 * max(1, np.abs(b).max())
        for a, b in zip(everything, compute([]))
    )
    model.eval()
    model.candidates = [torch.tensor(chosen)]
    assert (
        model.loss(x0, targets)[0].item() == pytest.approx(everything[1], rel=1e-12)
        and len(model.candidates) == 1
    )


def losses_of_a_training(comm, folder, config):
    """Train in float64 -> (cross entropies by micro-batch, those of plain loops) of each step; the
    state before the last step."""
    folder = folder / str(comm.rank)
    folder.mkdir(exist_ok=True)
    worker = make_trainer(folder, config, comm, LARGER)
    plain = Draws(640, config.micro_batches)
    result = []
    worker.model.prefixes[:600] = torch.tensor(PREFIXES)
    loss = worker.model.loss

    def compared(x, targets):
        m = comm.rank * (config.micro_batches // comm.ranks) + len(result[-1])
        number = numbers[len(result) - 1]
        weights = worker.model.further_weights
        chosen = plain.draw(m, targets.tolist(), number) if number else range(640)
        result[-1].append(
            loss_of_candidates(
                x.detach().numpy(),
                worker.model.lm_head.weight.detach().numpy(),
                targets.tolist(),
                chosen,
                (
                    1,
                    weights["second_token_weight"],
                    weights["third_token_weight"],
                    weights["prefix_weight"],
                ),
            )[1]
        )
        return loss(x, targets)

    worker.model.loss = compared
    numbers = [64] * 8 + [0] * 4 + [96] * 8 + [0] * 2
    found = []
    for step in range(config.num_steps):
        plan = train_gpt.plan_of(config, step)
        result.append([])
        found.append([x.item() for x in worker.step(plan, worker.stream.next_batch(plan))])
    return (
        found,
        result,
        worker.candidates.offsets.tolist(),
        plain.offsets,
        worker.optimizer.state_dict()["lm_head.weight/offsets"].tolist(),
    )


def test_a_training_s_losses_are_over_the_candidates(on_ranks, tmp_path):
    """22 steps in stages with 64, all, 96 and all classes; further targets; untied in the midst."""
    stages = (
        Stage(8, candidates=64, second_token_weight=0.5, prefix_weight=0.25),
        Stage(12),
        Stage(candidates=96, third_token_weight=0.5),
        Stage(extra_steps=2),
    )
    config = small(
        **LAYERS,
        num_steps=22,
        micro_batches=4,
        micro_batch_tokens=16,
        max_document_tokens=14,
        stages=stages,
        untie_at=0.6,
        overlap_param_gather=False,
        adam_lr=0.001,
    )
    outcomes = on_ranks(2, losses_of_a_training, tmp_path, config)
    for rank, (found, expected, offsets, plain, saved) in enumerate(outcomes):
        mine = slice(2 * rank, 2 * rank + 2)
        assert np.abs(np.array(found) - expected).max() < 1e-12 * np.max(expected)
        assert offsets[mine] == plain[mine] != Draws(640, 4).offsets[mine]
        assert offsets == saved == outcomes[0][2]


def test_the_head_s_gather_has_ended_before_its_rows_are_read(tmp_path):
    """Hostile parameters are NaN until a gather is waited for; here the head is not tied."""
    config = small(
        **LAYERS,
        num_steps=3,
        stages=(Stage(candidates=64),),
        untie_at=0.0,
        overlap_param_gather=True,
        adam_every=1,
    )
    worker = make_trainer(tmp_path, config, Hostile())
    for step in range(3):
        plan = train_gpt.plan_of(config, step)
        assert torch.stack(worker.step(plan, worker.stream.next_batch(plan))).isfinite().all(), step


def test_without_averages_and_candidates_a_run_keeps_no_state_of_them(corpus):  # noqa: F811
    worker = worker_of(small(**LAYERS, **corpus))
    assert not any("/tail" in name or "offsets" in name for name in worker.optimizer.state_dict())
