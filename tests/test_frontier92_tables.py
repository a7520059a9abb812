"""Record 92's n-gram and value tables: hashes, the moment per row, the slower cadence, gradients
by rows."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn

import frontier
import train_gpt
from frontier import AdamGroup, Ngrams
from test_frontier import PRESET, flags, small  # noqa: F401, a fixture
from test_model import tokens_of
from test_resume import (
    corpus,
    train,
)  # noqa: F401, a fixture

# hashes

TOKENS = [50256, 464, 2068, 7586, 21831, 50256, 464, 2068]
ROWS = {  # by the rows of both tables, numbered one after the other
    84_602_880: (
        [42301439, 30057605, 36955973, 25891877, 38010350, 25053104, 38325375, 36955973],
        [84602879, 84602879, 79010554, 60889994, 59548946, 67212682, 42344831, 79010554],
    ),
    10_575_360: (
        [5287679, 1337368, 5229906, 4741210, 996688, 3902605, 1311839, 5229906],
        [10575359, 10575359, 10270370, 8013197, 6672170, 9048493, 5330749, 10270370],
    ),
    2_000: (
        [999, 777, 748, 274, 574, 448, 5, 748],
        [1999, 1999, 1720, 1161, 1119, 1272, 1426, 1720],
    ),
}
SIGNS = [0, 3392, 2524, 1506, 6399, 4845, 3392, 2524], [0, 0, 6652, 794, 191, 2311, 791, 6652]
# of rows, of signs
FACTORS = {2: ((36313, 27191), (48271, 30011)), 3: ((17351, 60961, 45259), (58699, 39779, 26801))}


def table_of(n, rows):
    table = frontier.NgramTable(small(ngram_hash="record92"), Ngrams(n, 2, 1))
    table.num_embeddings = rows  # without the memory of them
    return table


def as_int32(number):
    return (number + 2**31) % 2**32 - 2**31


def rows_and_signs_by_hand(x, n, rows):
    found = []
    for t in range(len(x)):
        if t < n - 1:
            found.append((rows - 1, 0))
            continue
        window = [x[t - k] for k in range(n)]
        of_row = 0
        of_sign = 0
        for k, (row_factor, sign_factor) in enumerate(zip(*FACTORS[n])):
            of_row ^= as_int32(row_factor * (rows - 1 if (n, t, k) == (2, 1, 1) else window[k]))
            of_sign ^= sign_factor * window[k]
        found.append((of_row % (rows - 1), of_sign & 8191))
    return [[*column] for column in zip(*found)]


@pytest.mark.parametrize("total", ROWS)
def test_rows_and_signs_are_the_record_s(total):
    for n, first, rows, signs in zip((2, 3), (0, total // 2), ROWS[total], SIGNS):
        ours = table_of(n, total // 2).row_and_sign(torch.tensor([TOKENS, TOKENS[::-1]]))
        assert [ours[0][0].add(first).tolist(), ours[1][0].tolist()] == [rows, signs]
        assert [x[1].tolist() for x in ours] == rows_and_signs_by_hand(TOKENS[::-1], n, total // 2)
        many = np.random.default_rng(n).integers(50257, size=500)
        assert [
            x.tolist() for x in table_of(n, total // 2).row_and_sign(torch.from_numpy(many))
        ] == rows_and_signs_by_hand(many.tolist(), n, total // 2)
        short = table_of(n, total // 2).row_and_sign(torch.tensor([5]))
        assert [x.tolist() for x in short] == [
            [total // 2 - 1],
            [0],
        ], "sample.py may begin with one token"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_embedding_is_the_signed_sum_of_both_tables_rounded_once(dtype):
    """A narrow table is added to the first entries."""
    config = small(
        ngrams=(Ngrams(2, 50, 32), Ngrams(3, 41, 24)), ngram_hash="record92", dtype=dtype
    )
    model = train_gpt.build_model(config, train_gpt.Encoding(64, 63))
    x, _ = tokens_of(3, 40)
    wanted = np.zeros((40, 32))
    for table in model.ngrams:
        table.weight.data.normal_()
        rows, signs = rows_and_signs_by_hand(x.tolist(), table.n, len(table.weight))
        wanted[:, : table.embedding_dim] += (
            (table.weight[rows] * table.signs[signs]).detach().double().numpy()
        )
    ours = model.embed_tokens(x)[1]
    assert torch.equal(ours, torch.from_numpy(wanted).float().to(config.torch_dtype))
    assert [*map(len, model.rows_read(x[None]).values())] == [1, 1] and {
        p.kind for p in model.rows_read(x)
    } == {"ngram_embeds"}


# updates


# two n-gram tables and a value table; two steps wait in the end
SIZES = (600, 400, 50)
WIDTH = 16
STEPS = 102
SLOW = 60
MICRO_BATCHES = 4


class Tables(nn.Module):
    def __init__(self, by_rows):
        super().__init__()
        kinds = ("ngram_embeds", True), ("ngram_embeds", True), ("value_embeds", by_rows)
        self.tables = nn.ModuleList(
            nn.Embedding(size, WIDTH, sparse=sparse) for size, (_, sparse) in zip(SIZES, kinds)
        )
        for number, (table, (kind, _)) in enumerate(zip(self.tables, kinds)):
            draw = torch.Generator().manual_seed(number)
            table.weight = train_gpt.parameter(
                torch.randn(table.weight.shape, generator=draw, dtype=torch.float64) / 10, kind
            )


def reads(step, micro_batch):
    """Draw, for each table, the rows that a micro-batch reads and their gradients. A fifth of the
    gradients is 0."""
    rng = np.random.default_rng([step, micro_batch])
    found = [
        (rng.integers(size // (1 + step // 10 % 3), size=5), rng.normal(size=(5, WIDTH)))
        for size in SIZES
    ]
    for _, grads in found:
        grads[rng.random(5) < 0.2] = 0
    return found


def lr_factor(step):
    return 1 if step < 50 else 1.5 - step / 100


def config_of(by_rows, exact):
    groups = (
        AdamGroup("ngram_embeds", 70.0, 0.0, 0.95, 0.025, slow_from=SLOW, row_moment=True),
        AdamGroup("value_embeds", 70.0, 0.75, 0.95, 0.025, slow_from=SLOW, by_rows=by_rows),
    )
    return dataclasses.replace(
        PRESET, param_groups=groups, lazy_tables=True, world_size_invariant=exact, bucket_mb=1.0
    )


def train_tables(comm, by_rows, exact=False, steps=STEPS, state=None, begin=0, kept_at=()):
    """Train -> states before the steps of kept_at, and at last the parameters and the state."""
    model = Tables(by_rows)
    states = {}
    optimizer = train_gpt.build_optimizer(config_of(by_rows, exact), model, comm)
    if state:
        optimizer.load_state_dict(state)
    for step in range(begin, steps):
        if step in kept_at:
            states[step] = optimizer.state_dict()
        own = [
            reads(step, comm.rank * MICRO_BATCHES // comm.ranks + i)
            for i in range(MICRO_BATCHES // comm.ranks)
        ]
        read = zip(model.tables, zip(*([rows for rows, _ in one] for one in own)))
        optimizer.announce_rows(
            step, {table.weight: torch.from_numpy(np.stack(rows)) for table, rows in read}
        )
        for i, one in enumerate(own):
            loss = sum(
                (table(torch.from_numpy(rows)) * torch.from_numpy(grads)).sum()
                for table, (rows, grads) in zip(model.tables, one)
            )
            optimizer.prepare_for_backward(step, i, len(own))
            loss.backward()
        optimizer.step(train_gpt.Plan(step, lr_factor=lr_factor(step)))
    optimizer.finish_all_gathers()
    return (
        states,
        [p.detach().clone() for p in model.parameters()],
        {name: x.clone() for name, x in optimizer.named_state()},
    )


def by_hand(steps=STEPS):
    """Sums over the steps of a cycle and dense moments that decay in every update -> parameters; a
    moment for each row."""
    tables = [p.detach().tolist() for p in Tables(False).parameters()]
    moments = [[0.0] * size for size in SIZES[:2]]
    of_values = [[[0.0, 0.0] for _ in range(WIDTH)] for _ in range(SIZES[2])]
    sums = [[[0.0] * WIDTH for _ in range(size)] for size in SIZES]
    events = 0
    for step in range(steps):
        for micro_batch in range(MICRO_BATCHES):
            for total, (rows, grads) in zip(sums, reads(step, micro_batch)):
                for row, grad in zip(rows, grads):
                    for j in range(WIDTH):
                        total[row][j] += grad[j] / MICRO_BATCHES
        fast = step < SLOW
        if (step + 1) % (2 if fast else 4):
            continue
        events += 1
        lr, beta1, beta2, w = (
            0.008 * 70 * lr_factor(step),
            *((0.75, 0.95, 5) if fast else (0.5625, 0.9025, 10)),
        )
        decay = lr * lr * 0.005 * w
        for table, total, moment in zip(tables, sums, moments):
            for row, p in enumerate(table):
                moment[row] *= beta2
                moment[row] += (1 - beta2) * sum(g * g for g in total[row]) / WIDTH
                for j in range(WIDTH) if any(total[row]) else ():
                    u = (
                        total[row][j]
                        / (math.sqrt(moment[row]) + 1e-10)
                        * lr
                        * math.sqrt(1 - beta2**events)
                    )
                    p[j] -= u + (p[j] * decay if u * p[j] > 0 else 0)
        for row, p in enumerate(tables[2]):
            for j, (m, v) in enumerate(of_values[row]):
                g = sums[2][row][j]
                m = beta1 * m + (1 - beta1) * g
                v = beta2 * v + (1 - beta2) * g * g
                u = (
                    lr
                    * math.sqrt(1 - beta2**events)
                    / (1 - beta1**events)
                    * m
                    / (math.sqrt(v) + 1e-10)
                )
                p[j] = p[j] - u - (p[j] * decay if u * p[j] > 0 else 0)
                of_values[row][j] = [m, v]
        sums = [[[0.0] * WIDTH for _ in range(size)] for size in SIZES]
    return [torch.tensor(x, dtype=torch.float64) for x in tables], [
        torch.tensor(x, dtype=torch.float64) for x in moments
    ]


@pytest.fixture(scope="module")
def expected():
    return by_hand()


@pytest.mark.parametrize("ranks, by_rows", [(1, False), (1, True), (2, True)])
def test_tables_train_as_plain_loops_do(on_ranks, expected, ranks, by_rows):
    """Forty updates across the change of the cadence, of rows that are read often, seldom and
    never. Moments of rows that an update leaves out are those of the loops after their decay since
    `last`."""
    tables, moments = expected
    last_event = STEPS - STEPS % 4 - 1
    begun = [*Tables(False).parameters()]
    assert any(torch.equal(*rows) for rows in zip(tables[0], begun[0])), (
        "a row without any gradient keeps its values"
    )
    for _, params, state in on_ranks(ranks, train_tables, by_rows):
        for ours, right in zip(params, tables, strict=True):
            assert (ours - right).abs().max() < 1e-12 * right.abs().max()
        for i, right in enumerate(moments):
            v = state[f"tables.{i}.weight/v"].view(-1)
            last = state[f"tables.{i}.weight/last"].view(-1)
            assert v.shape == last.shape == (SIZES[i],) and len(last.unique()) > 5
            assert (v * 0.95 ** ((last_event - last) / 2) - right).abs().max() < 1e-12 * right.max()
        assert state["tables.0.weight/updates"] == 40 and "tables.0.weight/m" not in state


def test_exact_training_is_the_same_to_the_byte_and_so_is_a_resumed_one(on_ranks, expected):
    """Saved within a cycle of four steps, with the gradients that wait, and continued by another
    number of ranks."""
    wholes = [
        on_ranks(ranks, train_tables, True, True, STEPS, None, 0, (70,))[0] for ranks in (1, 2)
    ]
    resumed = on_ranks(2, train_tables, True, True, STEPS, wholes[0][0][70], 70)[0]
    assert len({train_gpt.hash_of([*state.items()]) for _, _, state in (*wholes, resumed)}) == 1
    assert any(name.endswith("/pending") for name in wholes[0][2]), "the run ends within a cycle"
    assert max((ours - right).abs().max() for ours, right in zip(wholes[0][1], expected[0])) < 1e-12


# runs

TABLES = {
    "ngrams": "Ngrams(2, 40, 16), Ngrams(3, 30, 16)",
    "ngram_hash": "record92",
    "lazy_tables": "true",
}
SLOWLY = TABLES | {
    "param_groups": (
        'AdamGroup("ngram_embeds", 70., 0., .95, .025, slow_from=4, row_moment=true), '
        'AdamGroup("value_embeds", 70., .75, .95, .025, slow_from=4, by_rows=true)'
    )
}


def test_the_warm_up_makes_a_slow_update(flags, on_ranks, monkeypatch):  # noqa: F811
    events = []
    step = train_gpt.DistributedOptimizer.step

    def noted(self, plan):
        before = {bucket: bucket.updates for bucket in self.buckets}
        step(self, plan)
        events.append(
            (
                plan.step,
                {bucket.slots[0].param.kind for bucket, n in before.items() if bucket.updates > n},
            )
        )

    monkeypatch.setattr(train_gpt.DistributedOptimizer, "step", noted)
    changes = SLOWLY | {
        "param_groups": SLOWLY["param_groups"].replace("slow_from=4", "slow_from=8")
    }
    changes |= {"num_steps": 18, "warmup_steps": 10, "untie_at": 0}
    on_ranks(1, train, flags("warm", **changes), -1, frontier.PRESETS)
    of_tables = [step for step, kinds in events if {"ngram_embeds", "value_embeds"} <= kinds]
    assert of_tables[-6:] == [1, 3, 5, 7, 11, 15] and 11 in of_tables[:-6]
