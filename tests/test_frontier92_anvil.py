"""ANVIL, DocCopy and normalized ids, the mechanisms of public record 92: each against plain loops
in float64."""

import dataclasses
import hashlib
import math

import numpy as np
import pytest
import torch

import frontier
import sample
import train_gpt
from conftest import write_gpt2_tokens, write_shard
from frontier import AdamGroup, MuonGroup
from test_frontier import (
    bigram_rows_by_hand,
    flags,
    sign_rows_by_hand,
    small,
)  # noqa: F401, a fixture
from test_resume import corpus, end_of, train  # noqa: F401, a fixture

PRESET = frontier.PRESETS["frontier89"]


def close(ours, right, tolerance=1e-12):
    ours, right = (np.asarray(x, dtype=np.float64) for x in (ours, right))
    assert ours.shape == right.shape and np.abs(ours - right).max() <= tolerance * max(
        1, np.abs(right).max()
    )


# ANVIL


STEPS = (
    (3.923798038567, -6.095026865488, 3.905234618423),
    (3.278126713798, -3.328923386476, 0.989127286973),
    (3.505298394150, -5.137358782410, 1.968325560615),
    (2.815058591845, -3.685181239622, 1.417196497642),
    (2.245503932403, -2.443826979899, 0.963091710461),
    (2.256537145403, -2.166840097229, 0.929501253245),
)
OUTCOMES = {
    0.0001: 0.06425,
    0.001: 0.584541,
    0.002: 0.908822,
    0.003: 0.995067,
    0.01: 1.000267,
    0.1: 0.9996,
    0.5: 1.00015,
    1 / 1.05: 1.000401,
}
FROM = 60
LAST = 100
FACTORS = {"qk": 1.0, "vo": 1.0, "fc": 1.91485, "proj": 3.82971}
# stored; and as matrices, with the axis of the means:
SHAPES = {"qk": (12, 24), "vo": (24, 12), "fc": (12, 20), "proj": (12, 20)}
MATRICES = {"qk": (4, 12, 0), "vo": (12, 12, 1), "fc": (12, 20, 0), "proj": (12, 20, 0)}
BANKS = dataclasses.replace(
    PRESET,
    num_steps=1194,
    cooldown=0.8,
    lr_floor=0.3,
    muon_momentum=0.93,
    muon_momentum_rise=240,
    muon_weight_decay=2.25,
    dtype="float64",
    bucket_mb=0.004,
    stages=(frontier.Stage(), frontier.Stage(extra_steps=20)),
    param_groups=(
        MuonGroup("attn", anvil_from=FROM),
        MuonGroup("mlp_fc", 1.91485, anvil_from=FROM),
        MuonGroup("mlp_proj", 3.82971, anvil_from=FROM),
    ),
)


def test_six_polar_steps_map_singular_values_as_published():
    values = torch.tensor([*OUTCOMES], dtype=torch.float64)
    matrix = torch.diag(values)
    mapped = train_gpt.polar(
        matrix[None], torch.float64, frontier.ANVIL_STEPS, (1 - 1e-6) / matrix.norm().item()
    )[0]
    assert mapped.diagonal().tolist() == pytest.approx([*OUTCOMES.values()], abs=6e-7)
    assert (
        frontier.ANVIL_STEPS == STEPS
        and train_gpt.polar(matrix[None], torch.float64)[0, 0, 0] != mapped[0, 0]
    )


def test_a_gradient_of_rank_1_gives_an_orthogonal_update(monkeypatch):
    """Its singular value after the division is the largest that the six steps can take."""
    updates = []
    monkeypatch.setattr(train_gpt.NorMuon, "move", lambda param, update, *_: updates.append(update))
    random = torch.Generator().manual_seed(0)
    hyper = {"fast": 0.85, "share": 0.4385, "momentum": 0.9, "dtype": torch.float32}
    for shape in (16, 32), (32, 32), (24, 96), (128, 64):
        for scale in 1e-3, 1.0, 1.3, 1.7:
            column, row = (torch.randn(8, n, 1, generator=random) for n in shape)
            grad = scale * column @ row.mT
            state = {name: torch.zeros_like(grad) for name in ("m", "slow")}
            frontier.Anvil.update(torch.zeros_like(grad), grad, state, hyper)
    largest = [torch.linalg.matrix_norm(update, 2).max().item() for update in updates]
    assert len(largest) == 16 and max(largest) < 1.02


def gradients_of(step):
    """The gradients of two micro-batches. Rows and columns 3 and 5 of vo never have one."""
    random = np.random.default_rng(step)
    grads = [{name: random.normal(size=shape) for name, shape in SHAPES.items()} for _ in range(2)]
    for grad in grads:
        grad["vo"][[3, 5]] = 0
    return grads


def first_weights():
    random = np.random.default_rng(10**6)
    return {name: random.normal(size=shape) for name, shape in SHAPES.items()}


def anvil_by_hand(momenta, rates):
    """The specification's four steps, one matrix at a time -> weights after each of the steps."""
    weights = first_weights()
    state = {}
    for step, (beta, f) in enumerate(zip(momenta, rates)):
        one, other = gradients_of(step)
        for name, whole in weights.items():
            rows, columns, axis = MATRICES[name]
            g_all = ((one[name] + other[name]) / 2).reshape(-1, rows, columns)
            new = []
            for i, p in enumerate(whole.reshape(-1, rows, columns)):
                g = g_all[i]
                fast, slow, second = state.get((name, i), (0 * g, 0 * g, 0.0))
                beta_fast, share = (beta, 1.0) if step < FROM else (0.85, 0.4385)
                fast = fast + (1 - beta_fast) * (g - fast)
                slow = slow + 0.02 * (g - slow)
                u = (1 - beta) * g + beta * (share * fast + (1 - share) * slow)
                x = u.T if rows > columns else u
                x = x / (1.05 * math.sqrt(np.trace(x @ x.T)) + 1e-6)
                for a, b, c in STEPS:
                    s = x @ x.T
                    x = a * x + (b * s + c * s @ s) @ x
                o = x.T if rows > columns else x
                second = 0.9 * second + 0.1 * (o * o).mean(axis, keepdims=True)
                scaled = o / np.sqrt(np.maximum(second, 1e-10))
                scaled *= math.sqrt((o * o).sum()) / math.sqrt((scaled * scaled).sum())
                rate = 0.023 * f * FACTORS[name]
                new.append(p - rate * scaled - rate * (2.25 * 0.023 * f) * p * (slow * p >= 0))
                state[name, i] = fast, slow, second
            weights[name] = np.stack(new).reshape(SHAPES[name])
    return weights


def banks(comm, steps, begin=0, state=None):
    """Train four banks in float64 by the gradients above -> their weights, and the optimizer's
    state."""
    model = torch.nn.Module()
    dim = 12
    weights = {name: torch.from_numpy(x) for name, x in first_weights().items()}
    for name, kind, unit in (
        ("qk", "attn", (4, dim)),
        ("vo", "attn", (dim, dim)),
        ("fc", "mlp_fc", None),
        ("proj", "mlp_proj", None),
    ):
        setattr(model, name, train_gpt.parameter(weights[name], kind, unit))
    optimizer = train_gpt.build_optimizer(BANKS, model, comm)
    if state is not None:
        optimizer.load_state_dict(state)
    for step in range(begin, steps):
        grads = gradients_of(step)[comm.rank :: comm.ranks]
        for i, grad in enumerate(grads):
            optimizer.prepare_for_backward(step, i, len(grads))
            sum(
                (p * torch.from_numpy(grad[name])).sum() for name, p in model.named_parameters()
            ).backward()
        optimizer.step(train_gpt.plan_of(BANKS, step))
    optimizer.finish_all_gathers()
    return {
        name: p.detach().numpy().copy() for name, p in model.named_parameters()
    }, optimizer.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
def test_anvil_is_its_specification_across_the_step_that_blends(on_ranks, ranks):
    """Resumed in between. Weights without gradients decay in every step."""
    plans = [train_gpt.plan_of(BANKS, step) for step in range(LAST)]
    right = anvil_by_hand(
        [0.85 + 0.08 * min(1, step / 240) for step in range(LAST)],
        [plan.lr_factor for plan in plans],
    )
    (_, state), *_ = on_ranks(ranks, banks, FROM + 4)
    for ours, _ in on_ranks(ranks, banks, LAST, FROM + 4, state):
        for name in SHAPES:
            close(ours[name], right[name])
    decay = math.prod(1 - 0.023 * 2.25 * 0.023 * plan.lr_factor**2 for plan in plans)
    close(right["vo"][[3, 5]], decay * first_weights()["vo"][[3, 5]])


# DocCopy


BOS = 63
VOCAB = 64
LENGTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


def candidates_by_hand(tokens, ids, bos):
    """The definition: for each token and length the latest earlier match and their number; the
    longest length wins."""
    begin = 0
    begins = []
    for t, token in enumerate(tokens):
        begin = t if token == bos else begin
        begins.append(begin)
    found = []
    for t in range(len(tokens)):
        found.append((-1, 0))
        for i, n in enumerate(LENGTHS):
            context = ids[t - n + 1 : t + 1]
            ends = (
                [j for j in range(begins[t] + n - 1, t) if ids[j - n + 1 : j + 1] == context]
                if t - n + 1 >= begins[t]
                else []
            )
            if ends:
                found[-1] = tokens[ends[-1] + 1], 3 * i + min(len(ends), 3)
    return found


def find(tokens, ids=None, bos=BOS, by=frontier.DocCopy.find):
    candidates, kinds = by(
        torch.tensor(tokens, dtype=torch.int32),
        torch.tensor(tokens if ids is None else ids, dtype=torch.int32),
        bos,
    )
    return [
        (token if kind else -1, kind) for token, kind in zip(candidates.tolist(), kinds.tolist())
    ]


def some_text(seed, tokens, symbols, bos=BOS):
    """Random symbols with copies of what came before, and a BOS now and then."""
    random = np.random.default_rng(seed)
    text = []
    while len(text) < tokens:
        begin, length = (int(x) for x in random.integers(0, (max(1, len(text)), 45)))
        text += (
            text[begin : begin + length]
            if random.random() < 0.15
            else [bos]
            if random.random() < 0.02
            else []
        )
        text.append(int(random.integers(symbols)))
    return text[:tokens]


def test_candidates_are_those_of_the_published_examples():
    assert find([BOS, 5, 6, 7, 5, 6, 7, 5, 6, 8, BOS, 5, 6]) == [
        *zip(
            (-1, -1, -1, -1, 6, 7, 5, 6, 7, -1, -1, -1, -1),
            (0, 0, 0, 0, 1, 4, 7, 10, 10, 0, 0, 0, 0),
        )
    ]
    assert find([BOS, 5, 9, 5, 8, 5, 7, 5])[-1] == (7, 3)
    assert find([5]) == [(-1, 0)] and find([BOS]) == [(-1, 0)]


@pytest.mark.parametrize("seed", range(4))
def test_candidates_are_those_of_the_definition(seed):
    """Texts of 12 symbols and 300 tokens, with another token's identity for every third symbol;
    contexts of every length occur."""
    text = [63 if token == 63 else 10 * token for token in some_text(seed, 300, 12)]
    ids = [token // 30 if token < 120 else token for token in text]
    for compared in text, ids:
        right = candidates_by_hand(text, compared, BOS)
        assert find(text, compared, BOS) == right
    kinds = {
        kind
        for seed in range(4)
        for _, kind in candidates_by_hand(*[some_text(seed, 300, 12)] * 2, BOS)
    }
    assert {(kind - 1) // 3 for kind in kinds - {0}} == {*range(10)} and 0 in kinds


def test_the_search_is_one_graph():
    text = some_text(3, 150, 8)
    torch._dynamo.reset()
    assert find(
        text,
        by=torch.compile(frontier.DocCopy.find, backend="aot_eager", dynamic=False, fullgraph=True),
    ) == find(text)


COPYING = dict(
    doc_copy=True,
    layers="S0M LxM",
    backout_layer=0,
    token_gates=(0,),
    num_heads=2,
    muon_qk_heads=1,
    model_dim=16,
    num_steps=24,
    cooldown=0.5,
    ngrams=(train_gpt.Ngrams(2, 40, 16),),
    micro_batches=2,
    micro_batch_tokens=48,
    max_document_tokens=40,
    adam_eps=1e-10,
    muon_lr=1e-12,
    muon_weight_decay=0,
    untie_at=1.0,
    bucket_mb=0.003,
    param_groups=(
        *(
            dataclasses.replace(row, lr_mul=0.0)
            for row in frontier.PARAM_GROUPS
            if isinstance(row, AdamGroup) and row.kind not in ("doc_copy", "embed", "head")
        ),
        AdamGroup("head", 1.0, 0.5, 0.95),
        AdamGroup("embed", 1.0, 0.5, 0.95),
    ),
)


def copying_worker(folder, comm, changes):
    """A worker in float64. Only DocCopy, head and embedding learn; no parameter is zero."""
    config = small(**{**COPYING, **changes})
    torch.set_default_dtype(torch.float64)
    try:
        worker = frontier.Worker(
            dataclasses.replace(config, dtype="float64"),
            comm,
            torch.device("cpu"),
            train_gpt.find_shards(str(folder / "train.bin")),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(5)
    for p in worker.model.parameters():
        p.data.add_(torch.randn(p.shape, dtype=p.dtype) / 10)
    return worker


def copying_by_hand(model, p, tokens):
    """x0, and what is added before the final norm, in plain loops over tokens. p: the parameters
    by name."""
    embed = p["lm_head.weight"] if model.tied else p["embed.weight"]
    e = [embed[token] for token in tokens]
    added = []
    for t, (candidate, kind) in enumerate(candidates_by_hand(tokens, tokens, BOS)):
        zero = torch.zeros_like(e[t])
        added.append(
            p["doc_copy.gains"][kind - 1] * embed[candidate] + p["doc_copy.rows"][kind - 1]
            if kind
            else zero
        )
    x0 = []
    for t, x in enumerate(e):
        if t:
            x = (
                x
                + p["scalars"][-1]
                / (1 + torch.exp(-(p["smear_gate"][0] * e[t][:12]).sum()))
                * e[t - 1]
            )
        x = x + p["doc_copy.weights"][0] * added[t]
        x0.append(x / torch.sqrt((x * x).mean() + torch.finfo(torch.float64).eps))
    return torch.stack(x0), p["doc_copy.weights"][1] * torch.stack(added)


def gradients_by_hand(worker, model, parameters, batches):
    """The mean gradient over all micro-batches, with a model of the same layers but without
    DocCopy."""
    p = {name: x.clone().requires_grad_() for name, x in parameters.items()}
    for name, x in model.named_parameters():
        x.data.copy_(parameters[name])
    objective = 0.0
    for tokens in batches:
        x = [int(token) for token in tokens[:-1]]
        y = torch.from_numpy(tokens[1:].astype(np.int64))
        x0, added = copying_by_hand(worker.model, p, x)
        bigrams = (
            p["ngrams.0.weight"][bigram_rows_by_hand(x, 39)]
            * model.ngrams[0].signs[sign_rows_by_hand(x)]
        )
        model.embed_tokens = lambda tokens: (x0, bigrams, None)
        model.mudd.head_input = lambda *args: frontier.Mudd.head_input(model.mudd, *args) + added
        plain = {name: x for name, x in p.items() if not name.startswith("doc_copy")}
        objective = (
            objective
            + torch.func.functional_call(
                model, plain, (torch.tensor(x), y, train_gpt.Windows(12, 4))
            )[0]
        )
    (objective / len(batches)).backward()
    return {name: torch.zeros_like(x) if x.grad is None else x.grad for name, x in p.items()}


def train_copying(comm, folder, steps, changes):
    """Train -> the learned parameters and, on rank 0, those of a plain second training."""
    worker = copying_worker(folder, comm, changes)
    c = worker.config
    names = [
        "doc_copy.gains",
        "doc_copy.rows",
        "doc_copy.weights",
        "lm_head.weight",
        "embed.weight",
    ]
    parameters = {name: x.detach().clone() for name, x in worker.model.named_parameters()}
    torch.set_default_dtype(torch.float64)
    plain = train_gpt.build_model(
        dataclasses.replace(c, doc_copy=False), train_gpt.Encoding(VOCAB, BOS)
    )
    torch.set_default_dtype(torch.float32)
    moments = {name: [0.0, 0.0] for name in names}
    sums = dict.fromkeys(names, 0.0)
    # of all ranks
    everything = train_gpt.Stream(train_gpt.find_shards(str(folder / "train.bin")), c)
    for step in range(steps):
        plan = train_gpt.plan_of(c, step)
        plan = dataclasses.replace(plan, windows=train_gpt.Windows(12, 4))
        worker.step(plan, worker.stream.next_batch(plan))
        plain.apply_schedule(plan)
        grads = gradients_by_hand(worker, plain, parameters, everything.next_batch(plan))
        for name in names:
            sums[name] = sums[name] + grads[name]
            if step % 2 == 0:
                continue
            g = sums[name]
            t = (step + 1) // 2
            beta1, beta2 = (0.9, 0.99) if name.startswith("doc_copy") else (0.5, 0.95)
            m, v = moments[name]
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            moments[name] = [m, v]
            sums[name] = 0.0
            parameters[name] = parameters[name] - 0.008 * plan.lr_factor * math.sqrt(
                1 - beta2**t
            ) / (1 - beta1**t) * m / (v.sqrt() + 1e-10)
        for name, x in worker.model.named_parameters():  # what moves otherwise
            if name not in names:
                parameters[name] = x.detach().clone()
    worker.optimizer.finish_all_gathers()
    return {
        name: (
            dict(worker.model.named_parameters())[name].detach().numpy(),
            parameters[name].numpy(),
        )
        for name in names
    }


@pytest.mark.parametrize("ranks, untie_at", [(1, 1.0), (2, 0.0)])
def test_doc_copy_trains_as_a_plain_second_training_does(on_ranks, tmp_path, ranks, untie_at):
    """22 steps of two micro-batches, with the embedding tied to the head or not."""
    write_shard(tmp_path / "train.bin", [BOS, *some_text(1, 30000, 9)], VOCAB, BOS)
    for found in on_ranks(ranks, train_copying, tmp_path, 22, {"untie_at": untie_at}):
        for name, (ours, right) in found.items():
            # Adam turns a relative error of 1e-15 of a gradient, as another order of a sum has,
            # into 1e-12
            close(ours, right, 1e-10)


# normalized ids


DIGEST = "79fb57ac259495ba36f1afb9b0d5da35f3048b5067fa59c101d5a3c1ed15c2a2"


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A folder with GPT-2's tokens and shards of repeated ones, and the tokens."""
    folder = tmp_path_factory.mktemp("gpt2")
    write_gpt2_tokens(folder)
    tokens = frontier.gpt2_token_bytes(folder)
    words = [
        tokens.index(word)
        for word in (
            b" The",
            b"the",
            b" THE",
            b"The",
            b" a",
            b"A",
            b"\n",
            b"\n\n",
            b" cat",
            b"Cat",
            b" don",
            b".",
        )
    ]
    for split, count in (("train", 3000), ("val", 200)):
        text = some_text(len(split), count, len(words), 50256)
        write_shard(
            folder / f"toy_{split}_000001.bin",
            [50256, *(token if token == 50256 else words[token] for token in text)],
            50257,
            50256,
        )
    return folder, tokens


def test_normalized_ids_are_those_of_the_published_digest(gpt2, monkeypatch):
    _, tokens = gpt2
    ids = frontier.normalized_ids(tokens)
    assert hashlib.sha256(np.array([*ids, 50256], dtype="<i4").tobytes()).hexdigest() == DIGEST
    assert (len({*ids, 50256}), sum(i != number for i, number in enumerate(ids))) == (32980, 17277)
    number = tokens.index
    assert (
        ids[number(b" The")]
        == ids[number(b"THE")]
        == ids[number("thé".encode()[:1] + b"he")]
        == min(number(word) for word in (b"the", b" the", b"The", b" The", b"THE", b" THE"))
    )
    assert ids[number(b"\xc3")] == number(b"\xc3") and ids[number(b"\n\n")] == ids[
        number(b" ")
    ] == min(number(b" "), number(b"\n"), number(b"\t"))
    monkeypatch.setattr("unicodedata.normalize", lambda form, text: text)
    with pytest.raises(train_gpt.RunError, match="Unicode .* gives other normalized_ids"):
        frontier.normalized_ids(tokens)


def test_n_grams_and_candidates_are_compared_by_normalized_ids_alone(gpt2):
    """Embedding, targets and candidates keep the tokens. Other encodings have no normalized ids."""
    folder, tokens = gpt2
    config = small(normalized_ids=True, doc_copy=True, train_files=str(folder / "toy_train_*.bin"))
    model = train_gpt.build_model(config, train_gpt.Encoding(50257, 50256))
    ids = [*frontier.normalized_ids(tokens), 50256]
    x = train_gpt.load_tokens(train_gpt.find_shards(config.train_files)[0])[:300].astype(np.int32)
    normal = [ids[token] for token in x]
    x = torch.from_numpy(x)
    ((rows, signs),) = model.ngram_rows(x)
    assert (
        rows.tolist()
        == model.rows_read(x)[model.ngrams[0].weight].tolist()
        == bigram_rows_by_hand(normal, 49)
        != bigram_rows_by_hand(x.tolist(), 49)
    )
    assert signs.tolist() == sign_rows_by_hand(normal) and model.normalized(
        torch.tensor([50256, 50300])
    ).tolist() == [50256, 50300]
    read = []
    model.embed.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].tolist()))
    model.embed_tokens(x)
    right = candidates_by_hand(x.tolist(), normal, 50256)
    assert read[0][:300] == x.tolist() and right != candidates_by_hand(
        x.tolist(), x.tolist(), 50256
    )
    assert all(token == candidate for token, (candidate, kind) in zip(read[0][300:], right) if kind)
    others = train_gpt.build_model(config, train_gpt.Encoding(257, 256))
    assert others.normalized(x) is x and not any(
        "ids" in name for name, _ in others.named_buffers()
    )


# runs


ANVIL = ", ".join(f'MuonGroup("{kind}", anvil_from=5)' for kind in ("attn", "mlp_fc", "mlp_proj"))


def test_a_saved_model_is_the_one_that_was_validated(gpt2, flags, on_ranks, tmp_path):  # noqa: F811
    """On GPT-2's tokens, with normalized ids: sample.py computes the loss of the log."""
    folder, _ = gpt2
    on_ranks(
        1,
        train,
        flags(
            "run",
            train_files=folder / "toy_train_*.bin",
            val_files=folder / "toy_val_*.bin",
            normalized_ids="true",
            doc_copy="true",
            num_steps=4,
            stages="Stage(long_window=2)",
            val_every=0,
            save_model="true",
            dtype="float32",
            param_groups=ANVIL + ', AdamGroup("doc_copy", 20)',
        ),
        -1,
        frontier.PRESETS,
    )
    trained = sample.load_model(tmp_path / "run.pt")
    assert trained.config.normalized_ids and trained.model.doc_copy.gains.abs().max() > 0.1
    sequences = train_gpt.validation_sequences(
        train_gpt.find_shards(trained.config.val_files),
        trained.config.val_tokens,
        trained.config.val_len,
    )
    validated = lambda: train_gpt.validate(
        trained.model, sequences, trained.windows, train_gpt.Comm(), torch.device("cpu")
    )[0]
    assert validated() == pytest.approx(end_of(tmp_path / "run.txt")["final_val_loss"], rel=1e-6)
    text = sequences[0, :-1].copy()
    trained = trained._replace(model=trained.model.eval())
    logits = trained.model.lm_head.logits(
        trained.model.trunk(torch.from_numpy(text), trained.windows)
    )
    close(sample.next_logits(trained, text[:20].tolist()), logits[19].detach(), 1e-5)
    trained.model.host_token_classes = None
    assert validated() != pytest.approx(end_of(tmp_path / "run.txt")["final_val_loss"], rel=1e-6), (
        "the ids matter"
    )
