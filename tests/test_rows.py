"""Tables of which a step reads few rows: the computation, the messages, and their order."""

import dataclasses
import math

import pytest
import torch
from torch import nn

import reference
import train_gpt
from gpt_speedrun import Adam, Comm, ParamSpec, RowBucket, RunError, fill_buckets
from test_optimizer import FULL, optimizer_of
from test_sync import Hostile

LAZY = Adam(lr=0.1, beta1=0.65, beta2=0.95, eps=1e-3, rows=True)
# of two tables in one bucket: of two ranks the first owns some of the second
SIZES = (7, 12)
WIDTH = 4


def tables(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleList(
        nn.Embedding(size, WIDTH, sparse=True, dtype=torch.float64) for size in SIZES
    )


def rows_of(step, rank, micro_batch, micro_batches=2):
    """Draw the rows of both tables that a micro-batch reads, independent of the number of ranks.
    Some repeat, some never occur."""
    draw = torch.Generator().manual_seed(100 * step + rank * micro_batches + micro_batch)
    return [torch.randint(size // 2 + step % 3, (3, 2), generator=draw) for size in SIZES]


def loss_of(model, rows):
    """The gradient differs for any two rows, and for one row at two places."""
    return sum(
        (
            (table(some) + 0.3) ** 2
            * torch.arange(1.0, 1 + some.numel() * WIDTH).view(*some.shape, WIDTH)
        ).sum()
        for table, some in zip(model, rows)
    )


def train(
    comm, steps=4, micro_batches=2, announce=True, every=1, network=Comm, changes={}, lazy=True
):
    """Train some steps. Return the optimizer's state, and what this rank sent in the last step."""
    model = tables()
    comm = Counting(comm.rank, comm.ranks) if network is Comm else network(comm.rank, comm.ranks)
    optimizer = optimizer_of(
        model, comm, 1e9, dataclasses.replace(LAZY, every=every, lazy=lazy), **changes
    )
    for step in range(steps):
        comm.sent = []
        batch = [rows_of(step, comm.rank, i, micro_batches) for i in range(micro_batches)]
        if announce:
            optimizer.announce_rows(
                step, {table.weight: torch.stack(some) for table, some in zip(model, zip(*batch))}
            )
        for i, rows in enumerate(batch):
            loss = loss_of(model, rows)
            optimizer.prepare_for_backward(step, i, micro_batches)
            loss.backward()
        optimizer.step(FULL)
    optimizer.finish_all_gathers()
    sent = list(getattr(comm, "sent", ()))
    return optimizer.state_dict(), sent


class Counting(Comm):
    """Records how many elements it sends to other ranks."""

    def exchange(self, sent, received):
        # not Reducer.start_call's
        self.sent += [[x.numel() for rank, x in enumerate(sent) if rank != self.rank]] * (
            sent[0].dtype != torch.int64
        )
        return super().exchange(sent, received)


def by_hand(ranks, every=1, clip=float("inf"), lazy=True):
    """Four steps by hand: dense gradients of all ranks' micro-batches, clipped to a norm, and Adam
    row by row."""
    model = tables()
    plain = [[reference.Adam(row.detach().clone()) for row in table.weight] for table in model]
    counts = [[0] * size for size in SIZES]
    for step in range(4):
        for rank in range(ranks):
            for i in range(2):
                (loss_of(model, rows_of(step, rank, i)) / (2 * ranks)).backward()
        if (step + 1) % every:
            continue
        norm = sum(table.weight.grad.to_dense().square().sum().item() for table in model) ** 0.5
        for table, rows, touched in zip(model, plain, counts):
            grad = table.weight.grad.to_dense() * min(1, clip / norm)
            table.weight.grad = None
            for number, row in enumerate(rows):
                # updates of the whole table, whichever rows they met
                row.t = (step + 1) // every - 1
                if grad[number].any() or not lazy:
                    row.step(grad[number], lr=0.1, eps=1e-3)
                    touched[number] += 1
                table.weight.data[number] = row.p
    return plain, counts


@pytest.mark.parametrize(
    "ranks,announce,every,lazy",
    [(1, True, 1, True), (3, True, 1, False), (3, False, 2, True), (1, False, 2, False)],
)
def test_rows_with_a_gradient_are_updated_and_no_others_unless_the_rule_is_dense(
    on_ranks, ranks, announce, every, lazy
):
    """Tables and moments on every rank equal a second implementation."""
    plain, counts = by_hand(ranks, every, lazy=lazy)
    often = {count for touched in counts for count in touched}
    assert {0, 4 // every} < often if lazy else often == {4 // every}, (
        "some rows always, some never, some sometimes"
    )
    for state, _ in on_ranks(ranks, train, 4, 2, announce, every, Comm, {}, lazy):
        for i, rows in enumerate(plain):
            for key, kept in (("", "p"), ("/m", "m"), ("/v", "v")):
                theirs = torch.stack([getattr(row, kept) for row in rows])
                torch.testing.assert_close(
                    state[f"{i}.weight{key}"].view_as(theirs), theirs, rtol=1e-12, atol=1e-14
                )


@pytest.mark.parametrize("ranks", [1, 2])
def test_clipping_is_by_the_norm_of_all_rows(on_ranks, ranks):
    """The first step is clipped more than the last; otherwise Adam would not depend on clipping."""
    plain = by_hand(ranks, clip=30.0)[0]
    free = by_hand(ranks)[0]
    assert not torch.allclose(plain[0][0].p, free[0][0].p)
    for state, _ in on_ranks(ranks, train, 4, 2, True, 1, Comm, {"clip_norm": 30.0}):
        for i, rows in enumerate(plain):
            theirs = torch.stack([row.p for row in rows])
            torch.testing.assert_close(
                state[f"{i}.weight"].view_as(theirs), theirs, rtol=1e-9, atol=1e-12
            )


@pytest.mark.parametrize(
    "changes",
    [
        {"sync": "step"},
        {"update_order": "forward"},
        {"check_grads": True},
        {"find_unused_parameters": True},
        {"world_size_invariant": True},
        {"clip_norm": 1e9},
    ],
    ids=str,
)
def test_no_setting_changes_what_is_computed(on_ranks, changes):
    plain, _ = on_ranks(2, train)[0]
    for state, _ in on_ranks(2, train, 4, 2, True, 1, Hostile, changes):
        for name, x in plain.items():
            torch.testing.assert_close(state[name], x, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("every,lazy", [(1, False), (2, True)])
def test_invariant_mode_gives_the_same_bytes_at_any_number_of_ranks(on_ranks, every, lazy):
    """Also between two updates, and with other micro-batches per rank. A plain sum must give other
    bytes."""

    def hashes(invariant, steps):
        changes = {"world_size_invariant": invariant}
        return {
            train_gpt.hash_of(
                [
                    *on_ranks(ranks, train, steps, 8 // ranks, True, every, Comm, changes, lazy)[0][
                        0
                    ].items()
                ]
            )
            for ranks in (1, 4)
        }

    assert len(hashes(True, 3)) == len(hashes(True, 4)) == 1 < len(hashes(False, 4))


def test_only_rows_are_sent(on_ranks):
    """Ranks send a bit per row, gradients to the rows' owners, and new rows to all."""
    read = [
        torch.stack(
            [
                torch.cat([a.flatten(), b.flatten() + SIZES[0]])
                for a, b in (rows_of(3, rank, i) for i in range(2))
            ]
        ).unique()
        for rank in range(2)
    ]
    border = -(-sum(SIZES) // 2)  # between the rows of the first rank and those of the second
    union = torch.cat(read).unique()
    for rank, (_, sent) in enumerate(on_ranks(2, train)):
        mine = union < border if rank == 0 else union >= border
        others = read[rank] >= border if rank == 0 else read[rank] < border
        assert sent == [
            [math.ceil(2 * border / 8)],
            [WIDTH * int(others.sum())],
            [WIDTH * int(mine.sum())],
        ]
        assert len(union) < sum(SIZES) * 0.8


def as_torch_s(comm):
    """Train as with a torch optimizer: nothing is prepared or announced; two backwards per step,
    the first in no_sync."""
    model = tables()
    optimizer = optimizer_of(model, comm, 1e9, LAZY)
    for step in range(4):
        with optimizer.no_sync():
            (loss_of(model, rows_of(step, comm.rank, 0)) / 2).backward()
        (loss_of(model, rows_of(step, comm.rank, 1)) / 2).backward()
        optimizer.step()
    optimizer.finish_all_gathers()
    return optimizer.state_dict()


def test_rows_are_those_of_a_loop_as_torch_has_it(on_ranks):
    plain, _ = on_ranks(2, train)[0]
    for state in on_ranks(2, as_torch_s):
        for name, x in plain.items():
            torch.testing.assert_close(state[name], x, rtol=1e-12, atol=1e-14)


def one_reads_nothing(comm):
    """Train with a table that rank 1 does not read, and find_unused_parameters."""
    model = tables()
    optimizer = optimizer_of(model, comm, 1e9, LAZY, find_unused_parameters=True)
    for step in range(2):
        loss = model[0](torch.tensor([1, 2 + step])).sum() + (
            model[1](torch.tensor([5])).sum() if comm.rank == 0 else 0
        )
        optimizer.prepare_for_backward(step, loss=loss)
        loss.backward()
        optimizer.step(FULL)
    return train_gpt.hash_of([*optimizer.named_state()]), model[1].weight.detach()[4:6].clone()


def test_a_table_that_one_rank_does_not_read(on_ranks):
    hashes, rows = zip(*on_ranks(2, one_reads_nothing))
    assert (
        len(set(hashes)) == 1
        and torch.equal(rows[0][0], tables()[1].weight[4])
        and not torch.equal(rows[0][1], tables()[1].weight[5])
    )


def rows_that_sum_to_zero(comm, invariant):
    """Update all rows; then row 1 has a gradient whose elements sum to 0, and two gradients of row
    2 cancel out: of two micro-batches on one rank, else of two ranks. Return the states before and
    after."""
    model = tables()
    optimizer = optimizer_of(model, comm, 1e9, LAZY, world_size_invariant=invariant)
    micro_batches = 2 // comm.ranks
    states = []
    signs = torch.tensor([1.0, -1.0, 2.0, -2.0])
    for step in range(2):
        for i in range(micro_batches):
            sign = (-1) ** (comm.rank * micro_batches + i) if step else 1
            optimizer.prepare_for_backward(step, i, micro_batches)
            one, two = model[0](torch.tensor([1, 2]))
            (
                (one * signs).sum() + (two * signs).sum() * sign + model[1](torch.tensor([3])).sum()
            ).backward()
        optimizer.step(FULL)
        states.append(optimizer.state_dict())
    return states


@pytest.mark.parametrize("invariant", [True, False])
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_is_updated_unless_every_element_of_its_sum_is_zero(on_ranks, ranks, invariant):
    for before, after in on_ranks(ranks, rows_that_sum_to_zero, invariant):
        for key in ("", "/m", "/v"):
            old, new = (state[f"0.weight{key}"].view(-1, WIDTH) for state in (before, after))
            assert (old[1] != new[1]).all() and torch.equal(old[2], new[2]), key


def dropped(comm, when):
    """Announce rows, perhaps send them, and drop them; later steps must not change."""
    results = []
    for drops in (True, False):
        model = tables()
        optimizer = optimizer_of(model, comm, 1e9, LAZY)
        first = optimizer.state_dict()
        if drops:
            rows = rows_of(9, comm.rank, 0)
            optimizer.announce_rows(0, dict(zip((table.weight for table in model), rows)))
            loss = loss_of(model, rows)
            if when != "announced":
                optimizer.prepare_for_backward(0)
            if when == "sent":
                loss.backward()
                optimizer.reducer.launch_rest()
            optimizer.load_state_dict(first)
        for step in range(2):
            rows = rows_of(step, comm.rank, 0)
            optimizer.announce_rows(step, dict(zip((table.weight for table in model), rows)))
            loss = loss_of(model, rows)
            optimizer.prepare_for_backward(step)
            loss.backward()
            optimizer.step(FULL)
        results.append(train_gpt.hash_of([*optimizer.named_state()]))
    return results


@pytest.mark.parametrize("when", ["announced", "prepared", "sent"])
def test_what_was_under_way_is_dropped_with_a_loaded_state(on_ranks, when):
    results = on_ranks(2, dropped, when)
    assert len({x for result in results for x in result}) == 1


def test_a_state_fits_tables_that_are_updated_row_by_row_and_others():
    lazy, dense = (
        optimizer_of(tables(seed), rule=dataclasses.replace(LAZY, rows=rows))
        for seed, rows in ((0, True), (1, False))
    )
    dense.load_state_dict(lazy.state_dict())
    assert train_gpt.hash_of([*dense.named_state()]) == train_gpt.hash_of(
        [*lazy.named_state()]
    ) and isinstance(lazy.buckets[0], RowBucket)


def backward_of(sparse=True, announced=()):
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=sparse)
    optimizer = optimizer_of(table, rule=LAZY)
    for rows in announced:
        optimizer.announce_rows(0, {table.weight: torch.tensor(rows).long()})
    optimizer.prepare_for_backward(0)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step(FULL)
    return table


def not_finite(comm, table, row):
    model = tables()
    optimizer = optimizer_of(model, comm, 1e9, LAZY, check_grads=True)
    optimizer.prepare_for_backward(0)
    read = [torch.tensor([0, 6]), torch.tensor([0, 11])]
    weights = [torch.ones(2, 1), torch.ones(2, 1)]
    weights[table][row] = float("inf")
    sum(
        (table(rows) * weight).sum() for table, rows, weight in zip(model, read, weights)
    ).backward()
    try:
        optimizer.step(FULL)
    except RunError as error:
        return str(error)


@pytest.mark.parametrize("table,row", [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_gradient_that_is_not_finite_is_named_by_its_table(on_ranks, table, row):
    """In the first and the last rows of each table, on both ranks."""
    for message in on_ranks(2, not_finite, table, row):
        assert message.startswith(f"gradients of step 0 are not finite: {table}.weight;")


@pytest.mark.parametrize(
    "given,says",
    [
        (
            dict(sparse=False),
            r"weight got a dense gradient, but its rule needs a sparse one; create the table by"
            r" nn.Embedding\(\.\.\., sparse=True\)",
        ),
        (
            dict(announced=[[1, 2]]),
            "weight: rows got a gradient that were not announced; in every step announce all"
            " rows that it reads",
        ),
        (dict(announced=[[]]), "rows got a gradient that were not announced"),
        (dict(announced=[[1, 4], [1]]), "rows of weight were announced twice in one step"),
    ],
)
def test_a_wrong_use_is_answered_with_the_cure(given, says):
    with pytest.raises(RunError, match=says):
        backward_of(**given)


@pytest.mark.parametrize("read", [None, [2, 3]])
def test_after_an_error_zero_grad_begins_anew(read):
    """After a forward that failed after its announcement, and after a gradient of rows that were
    not announced."""
    torch.manual_seed(0)
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optimizer_of(table, rule=LAZY)
    optimizer.announce_rows(0, {table.weight: torch.tensor([1, 4])})
    if read:
        optimizer.prepare_for_backward(0)
        table(torch.tensor(read)).sum().backward()
        with pytest.raises(RunError, match="not announced"):
            optimizer.step(FULL)
    optimizer.zero_grad()
    optimizer.announce_rows(0, {table.weight: torch.tensor([1, 4])})
    optimizer.prepare_for_backward(0)
    table(torch.tensor([1, 4])).sum().backward()
    optimizer.step(FULL)
    assert torch.equal(table.weight, backward_of().weight)


def test_gradients_that_wait_take_no_more_memory_than_a_gradient_of_all_rows():
    table = nn.Embedding(5, 3, sparse=True)
    optimizer = optimizer_of(table, rule=dataclasses.replace(LAZY, every=4))
    for step in range(3):
        optimizer.prepare_for_backward(step)
        table(torch.tensor([step, 1, 1, 0])).sum().backward()
        assert sum(x._nnz() for x in optimizer.buckets[0].slots[0].pending_grads) <= 5
        optimizer.step(FULL)


def test_only_tables_have_rows():
    with pytest.raises(
        RunError,
        match=(
            r"scale has shape \(3,\), but Adam with `rows` updates tables \[rows, width\]; use Adam"
            r" without `rows`"
        ),
    ):
        fill_buckets([ParamSpec("scale", nn.Parameter(torch.zeros(3)), LAZY)], 0, 0, 1)


def test_more_rows_may_be_announced_than_are_read():
    few, many = (backward_of(announced=[rows]) for rows in ([1, 4], [4, 3, 1, 1]))
    assert torch.equal(few.weight, many.weight)
