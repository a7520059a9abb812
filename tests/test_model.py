"""The model compared with a second implementation of record 44; masks, rotary, loss, the fp8 head;
training step by step."""

import copy
import dataclasses
import functools
import math
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F

# imported before PlainFlashAttention replaces operators that it needs
import torch.utils.flop_counter

import frontier
import reference
import train_gpt
from conftest import logits_of, some_documents, write_shard
from test_sync import Hostile
from train_gpt import AdamGroup, MuonGroup, Ramp, Stage

VOCAB = 64
BOS = 63
ENCODING = train_gpt.Encoding(VOCAB, BOS)


def shaken(config, seed=0):
    """A model without zero parameters, so that every path carries something."""
    return shake(train_gpt.build_model(config, ENCODING), seed)


@torch.no_grad()
def shake(model, seed=0):
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        p.add_(
            torch.randn_like(p)
            * (
                0.1
                if name in ("scalars", "resid_lambdas", "post_lambdas", "gate_scale")
                else 0.3 * (p.shape or (1,))[-1] ** -0.5
            )
        )
    return model


def tokens_of(seed, count):
    stream = torch.from_numpy(some_documents(seed, count + 1).astype("int64"))
    return stream[:-1], stream[1:]


def in_float64(model):
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def compare(model, loss, plain, expected, tied=False):
    """Compare a loss and its gradients with those of a second implementation, whose parameters are
    `plain`."""
    loss.backward()
    expected.backward()
    exact = loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12 if exact else 1e-6)
    for name, p in model.named_parameters():
        if tied and name == "embed.weight":
            assert p.grad is plain[name].grad is None
            continue
        wanted = plain[name].grad
        assert (p.grad.to_dense() - wanted).norm() <= (1e-12 if exact else 1e-5) * wanted.norm(), (
            name
        )
        assert wanted.norm() > 0, f"{name} does not matter to the loss, so nothing was compared"


def repeats_of(x):
    """By its definition: what DocCopy finds at each token of a list, (place of the candidate,
    kind) or None."""
    found = []
    for t in range(len(x)):
        begin = max([0] + [i for i in range(t + 1) if x[i] == BOS])
        found.append(None)
        for i, n in enumerate(train_gpt.DocCopy.LENGTHS):
            ends = [
                j for j in range(begin + n - 1, t) if x[j - n + 1 : j + 1] == x[t - n + 1 : t + 1]
            ]
            if ends:
                found[t] = ends[-1] + 1, 3 * i + min(len(ends), 3)
    return found


@pytest.mark.parametrize("count, symbols", [(1, 1), (20, 2), (300, 12), (200, 2)])
def test_doc_copy_is_its_definition(count, symbols):
    """Embeddings are unit vectors of positions and the gains numbers of kinds, so that its output
    shows both."""
    x = torch.randint(BOS + 1 - symbols, BOS + 1 - (count == 200), (count,))
    copy = train_gpt.DocCopy(count)
    copy.gains.data = torch.arange(1.0, 31)
    expected = torch.zeros(count, count)
    for t, found in enumerate(repeats_of(x.tolist())):
        if found:
            expected[t, found[0]] = found[1]
    assert torch.equal(copy(torch.eye(count), x, BOS), expected)
    copy.gains.data.zero_()
    copy.rows.data = torch.arange(1.0, 31)[:, None].repeat(1, count)
    assert torch.equal(copy(torch.eye(count), x, BOS)[:, 0], expected.sum(1))


def test_doc_copy_is_added_before_the_head(tiny):
    """With large gains the head's input is the candidate's embedding and row; without a candidate,
    the plain model's."""
    x = torch.randint(BOS - 6, BOS + 1, (40,), generator=torch.Generator().manual_seed(0))
    plain = shaken(tiny)
    model = shaken(dataclasses.replace(tiny, doc_copy=True))
    model.load_state_dict(plain.state_dict(), strict=False)
    model.doc_copy.gains.data.fill_(1e6)
    model.doc_copy.rows.data.zero_()
    before, y = (m.trunk(x, train_gpt.Windows(12, 4)) for m in (plain, model))
    found = repeats_of(x.tolist())
    e = train_gpt.norm(model.embed(x) + 10 * model.lm_head.weight[x])
    expected = torch.stack([e[f[0]] if f else before[t] for t, f in enumerate(found)])
    assert {*map(bool, found)} == {False, True} and torch.allclose(y, expected, atol=1e-4)


class ByHand:
    """A second implementation of n-gram tables: a dictionary of vectors by tuples of tokens, with
    the hash in Python's integers and the table's signs."""

    def __init__(self, table, weight):
        self.table = table
        self.weight = weight
        self.known = {}

    def vector(self, ngram):
        if ngram not in self.known:
            number = 0
            for token in ngram:
                number = ((number ^ token) * 2_654_435) % 2**40
                number ^= number >> 21
            rows = self.table.num_embeddings
            signs = self.table.signs[number // rows % 8192].double()
            self.known[ngram] = self.weight[number % rows] * signs
        return self.known[ngram]

    def vectors(self, x):
        """The vector at every position; tokens before a document are BOS."""
        found = []
        for t in range(len(x)):
            begin = max([0] + [i for i in range(t + 1) if x[i] == BOS])
            ngram = [x[i] if i >= begin else BOS for i in range(t, t - self.table.n, -1)]
            found.append(self.vector(tuple(ngram)))
        return torch.stack(found)


def test_loss_and_gradients_are_those_of_the_record_and_of_n_gram_tables(tiny):
    """For tables as wide as the residual stream and narrower, with collisions."""
    config = dataclasses.replace(
        tiny,
        ngrams=(
            train_gpt.Ngrams(2, 50, 32),
            train_gpt.Ngrams(2, 50, 8),
            train_gpt.Ngrams(3, 40, 32),
            train_gpt.Ngrams(4, 17, 3),
        ),
    )
    model = shaken(config)
    x, y = tokens_of(5, 48)
    assert (x == BOS).sum() > 2
    plain = in_float64(model)
    added = torch.zeros(48, 32, dtype=torch.float64)
    for i, table in enumerate(model.ngrams):
        vectors = ByHand(table, plain[f"ngrams.{i}.weight"]).vectors(x.tolist())
        added = added + F.pad(vectors, (0, 32 - vectors.shape[1]))
    expected = reference.loss(
        plain, x.tolist(), y.tolist(), 12, 4, BOS, config.num_heads, added=added
    )
    compare(model, model(x, y, train_gpt.Windows(12, 4))[0], plain, expected)


def initial_values(model):
    """-> a line a parameter: its values, or their spread if there are many."""
    lines = []
    for name, p in model.named_parameters():
        shown = f"std {p.std().item():.1g}, at most {p.abs().max().item():.2g}"
        if len(p.unique()) < 9:
            shown = p.flatten().tolist() if p.numel() < 200 else p.unique().tolist()
            shown = [round(value, 4) for value in shown]
        lines.append(f"{name} {[*p.shape]}: {shown}\n")
    return lines


def test_initial_values_are_those_of_the_record(tiny, golden):
    config = dataclasses.replace(tiny, model_dim=64)
    golden("initial_speedrun", "".join(initial_values(train_gpt.build_model(config, ENCODING))))


def dense_mask(docs, window):
    """bool [T, T]: token q sees token k."""
    back = torch.arange(len(docs))[:, None] - torch.arange(len(docs))
    return (back >= 0) & (back <= window) & (docs[:, None] == docs)


def dense_attention(q, k, v, docs, window):
    """The definition of attention, over all pairs of tokens [T, H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~dense_mask(docs, window), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


class PlainFlashAttention:
    """Replaces torch's two FlashAttention operators by plain code, as documented, and counts the
    calls."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(train_gpt, "flash_3", None)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", self.forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", self.backward)

    def weights(
        self,
        q,
        k,
        starts,
        ends,
        longest,
        dropout,
        causal,
        scale,
        window_size_left,
        window_size_right,
    ):
        """[documents] of (where it lies, weights [H, T, T], log sums [H, T])"""
        assert starts is ends and starts.dtype == torch.int32 and not dropout and not causal
        assert scale == 1.0 and window_size_right == 0 and starts[0] == 0 and starts[-1] == len(q)
        assert longest == starts.diff().max() and (starts.diff()[1:] > 0).all(), (
            "empty ones would cost time"
        )
        self.calls += 1
        for begin, end in zip(starts.tolist(), starts[1:].tolist()):
            at = torch.arange(end - begin)
            back = at[:, None] - at
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end])
            scores = scores.masked_fill((back < 0) | (back > window_size_left), -math.inf)
            yield slice(begin, end), scores.softmax(-1), scores.logsumexp(-1)

    def forward(
        self, q, k, v, starts, ends, longest, longest_keys, dropout, causal, debug, **further
    ):
        assert longest == longest_keys
        out = torch.empty_like(q)
        log_sums = q.new_empty(q.size(1), len(q), dtype=torch.float32)
        for at, weights, log_sum in self.weights(
            q, k, starts, ends, longest, dropout, causal, **further
        ):
            out[at] = torch.einsum("hqk,khd->qhd", weights, v[at])
            log_sums[:, at] = log_sum.float()
        return out, log_sums, None, None, None

    def backward(
        self,
        grad,
        q,
        k,
        v,
        out,
        log_sums,
        starts,
        ends,
        longest,
        longest_keys,
        dropout,
        causal,
        *dropout_state,
        **further,
    ):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for at, weights, log_sum in self.weights(
            q, k, starts, ends, longest, dropout, causal, **further
        ):
            assert torch.equal(log_sums[:, at], log_sum.float())
            of_weights = torch.einsum("qhd,khd->hqk", grad[at], v[at])
            of_scores = weights * (of_weights - (grad[at] * out[at]).sum(-1).T[..., None])
            grads[0][at] = torch.einsum("hqk,khd->qhd", of_scores, k[at])
            grads[1][at] = torch.einsum("hqk,qhd->khd", of_scores, q[at])
            grads[2][at] = torch.einsum("hqk,qhd->khd", weights, grad[at])
        return grads


class PlainFlashAttention3(PlainFlashAttention):
    """A module with FlashAttention 3's interface, of its main branch and of the hub's build in
    August 2026."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setitem(sys.modules, "flash_attn_interface", self)
        monkeypatch.setattr(train_gpt, "flash_3", None)
        assert train_gpt.find_flash_3() == "" and train_gpt.flash_3 is self

    def flash_attn_varlen_func(
        self, *inputs, softmax_scale, causal, window_size, num_splits, return_attn_probs
    ):
        assert num_splits == 1, f"num_splits is {num_splits}: another kernel adds the parts up"
        assert causal and return_attn_probs and not torch.is_grad_enabled(), (
            "its own autograd function would run too"
        )
        left, right = window_size
        edges = {"window_size_left": left, "window_size_right": right}
        out, log_sums, *_ = self.forward(*inputs, 0.0, False, False, scale=softmax_scale, **edges)
        return out, log_sums

    def _flash_attn_backward(
        self,
        *inputs,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        dq,
        dk,
        dv,
        softmax_scale,
        is_causal,
        **edges,
    ):
        assert is_causal
        documents = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        grads = self.backward(*inputs, *documents, 0.0, False, scale=softmax_scale, **edges)
        for given, grad in zip((dq, dk, dv), grads):
            given.copy_(grad)


def document_table(docs, window, longest, count):
    """Build a mask from documents [T], numbered from 0 or 1 up to count - 1."""
    every = torch.arange(len(docs) // train_gpt.DOCUMENT_ROOM + 1, device=docs.device)
    return train_gpt.DocumentTable(
        torch.searchsorted(docs, every, out_int32=True), torch.tensor([window, longest, count])
    )


@pytest.mark.parametrize("flash", [PlainFlashAttention, PlainFlashAttention3])
@pytest.mark.parametrize("first, window", [(0, 0), (1, 1), (0, 100), (1, 1000)])
def test_flash_attention_is_called_with_the_right_documents_and_window(
    flash, first, window, monkeypatch
):
    """Compiled too: other windows and documents must not recompile. A sequence may start within a
    document."""
    plain = flash(monkeypatch)
    docs = first + (torch.arange(512)[:, None] >= torch.tensor([150, 151])).sum(1)
    count = 3 + first
    qkv = torch.randn(3, 512, 2, 16, dtype=torch.float64, requires_grad=True)
    expected = dense_attention(*qkv, docs, window)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), qkv)]
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(
        train_gpt.attend,
        dynamic=False,
        fullgraph=True,
        backend=lambda graph, _: graphs.append(graph) or graph,
    )
    for attend in train_gpt.attend, compiled:
        out = attend(*qkv.unbind(), document_table(docs, window, 361, count))
        ours = [out, *torch.autograd.grad(out.square().sum(), qkv)]
        for one, other in zip(ours, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-12)
    compiled(*qkv.unbind(), document_table(docs * 0 + 1, window + 1, 512, 2))
    assert plain.calls == 5 and len(graphs) == 1


def test_a_model_with_flash_attention_is_the_same_model(tiny, monkeypatch):
    config = dataclasses.replace(
        tiny, layers="SM S0M LM", backout_layer=1, micro_batch_tokens=512, num_heads=2, model_dim=16
    )
    assert_flash_is_the_same(shaken(config), monkeypatch)


def assert_flash_is_the_same(model, monkeypatch):
    """Losses and gradients with three attentions, two windows and several documents."""
    plain = PlainFlashAttention(monkeypatch)
    x, y = torch.randint(BOS, (2, 512))
    x[[0, 150, 380]] = BOS
    results = []
    for model.flash in False, True:
        train_gpt.count_documents(model, x.numpy())
        model.zero_grad()
        loss, _ = model(x, y, train_gpt.Windows(200, 90))
        loss.backward()
        results.append([loss, *(p.grad.to_dense() for p in model.parameters())])
    assert plain.calls == 6
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    model(x, y, train_gpt.Windows(200, 90))
    assert plain.calls == 6, "the documents of this sequence were not counted"
    x[:28] = BOS
    for last, calls in (
        (28, 9),
        (
            29,
            9,
        ),
    ):  # 31 and the start of the sequence fill the table; 32 fall back to masks
        x[last] = BOS
        train_gpt.count_documents(model, x.numpy())
        model(x, y, train_gpt.Windows(200, 90))
        assert plain.calls == calls


@pytest.mark.parametrize("tokens", [1, 15, 48, 55, 130])
@pytest.mark.parametrize("window", [0, 1, 9, 40, 100, 200])
def test_attention_with_masks_in_pieces_is_that_of_the_definition(tokens, window, monkeypatch):
    """One piece or several, complete or not, with as many earlier keys as the window needs, or
    more."""
    monkeypatch.setitem(train_gpt.MASK_PIECE, "cpu", 16)
    docs = (torch.rand(tokens) < 0.1).cumsum(0)
    qkv = torch.randn(3, tokens, 2, 8, dtype=torch.float64, requires_grad=True)
    expected = dense_attention(*qkv, docs, window)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), qkv)]
    for reach in {window, max(window, 72)}:
        mask = train_gpt.mask_in_pieces(docs, window, reach, torch.float64)
        piece = max(16, reach // 4)
        several = -(-tokens // piece), piece, reach + piece
        assert mask.shape == (several if reach + piece < tokens else (1, tokens, tokens))
        out = train_gpt.attend(*qkv.unbind(), mask)
        for ours, right in zip([out, *torch.autograd.grad(out.square().sum(), qkv)], expected):
            assert torch.allclose(ours, right, rtol=0, atol=1e-12)


def test_stretch_keeps_high_frequencies_and_lowers_low_ones():
    frequencies, scale = train_gpt.stretch(torch.tensor([1.0, 0.02, 1e-3, 0.0]), 0.1, 384, 896)
    assert frequencies[0] == 1.0, "more than 32 rotations in the old window"
    turns = 384 * 0.02 / (2 * math.pi)
    stays = (turns - 1) / 31
    assert frequencies[1].item() == pytest.approx(0.02 * (384 / 896 + stays * (1 - 384 / 896)))
    assert frequencies[2].item() == pytest.approx(1e-3 * 384 / 896) and frequencies[3] == 0
    assert scale == pytest.approx(0.1 * (0.2 * math.log(896 / 384) + 1))


@pytest.mark.parametrize("loss_tokens", [64, 24, 7])
def test_losses_are_those_by_hand(tiny, loss_tokens):
    """In pieces of any size. A target of -1 counts nothing."""
    x, y = tokens_of(11, 64)
    y = y.clone()  # tokens_of returns views of one stream
    y[20] = -1
    model = shaken(tiny)
    windows = train_gpt.Windows(16, 8)
    model.loss_tokens = loss_tokens
    logits = logits_of(model, x, windows).double().log_softmax(-1)
    objective, cross_entropy = model(x, y, windows)
    wanted = -sum(logits[t, y[t]] for t in range(64) if t != 20).item()
    assert (
        objective.item() == cross_entropy.item() == pytest.approx(wanted, rel=1e-6)
        and not cross_entropy.requires_grad
    )


def test_validation_is_the_mean_cross_entropy_of_the_next_token(tiny):
    """Without fp8, which is for training only."""
    config = dataclasses.replace(tiny, fp8_head=True, dtype="bfloat16")
    model = shaken(config)
    windows = train_gpt.Windows(16, 8)
    sequences = np.stack([some_documents(seed, 65).astype(np.int32) for seed in (1, 2, 3)])
    sequences[2, 40:] = -1
    loss, tokens = train_gpt.validate(
        model, sequences, windows, train_gpt.Comm(), torch.device("cpu")
    )
    assert model.training and tokens == 64 * 2 + 39
    model.lm_head.fp8 = False
    total = 0.0
    with torch.no_grad():
        for sequence, end in zip(sequences, (64, 64, 39)):
            x = torch.from_numpy(sequence[:-1]).clamp_min(0)
            y = torch.from_numpy(sequence[1:]).long()
            total += F.cross_entropy(
                logits_of(model, x, windows)[:end].double(), y[:end], reduction="sum"
            ).item()
    assert loss == pytest.approx(total / tokens, rel=1e-6)
    model.lm_head.fp8 = True
    in_fp8 = sum(
        model(torch.from_numpy(s[:-1]).clamp_min(0), torch.from_numpy(s[1:]).long(), windows)[
            1
        ].item()
        for s in sequences
    )
    assert abs(in_fp8 / tokens - loss) > 1e-5, (
        "fp8 makes no difference here, so nothing was compared"
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_head_is_near_the_bf16_head(device):
    if device == "cuda" and (
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)
    ):
        pytest.skip("no NVIDIA GPU with fp8")
    torch.manual_seed(0)
    x = train_gpt.norm(torch.randn(64, 256, device=device)).bfloat16().requires_grad_()
    weight = (torch.randn(128, 256, device=device) * 0.02).bfloat16().requires_grad_()
    grad = (torch.randn(64, 128, device=device) * 0.3).clamp(-1, 1).bfloat16()
    results = []
    scales = train_gpt.Head(train_gpt.Config(model_dim=256), 128).fp8_scales
    for product, *settings in ((F.linear,), (train_gpt.FP8Linear.apply, scales)):
        x.grad = weight.grad = None
        y = product(x, weight, *settings)
        y.backward(grad)
        results.append([t.detach().float() for t in (y, x.grad, weight.grad)])
    for plain, fp8 in zip(*results):
        error = ((plain - fp8).norm() / plain.norm()).item()
        assert 0 < error < 0.065, error  # rounding the gradient to e5m2 makes 0.06


@pytest.mark.parametrize(
    "config, x_scale, weight_scale, grad_scale",
    [
        (train_gpt.PRESETS["speedrun"], 768**0.5 / 448, 2**-9, 1 / 448),
        (frontier.PRESETS["frontier89"], 100 / 448, 1.6 / 448, 0.75 / 448),
    ],
    ids=["speedrun", "frontier"],
)
def test_the_fp8_head_has_the_scales_of_its_record(
    config, x_scale, weight_scale, grad_scale, monkeypatch
):
    """Each operand of the three products is a tensor divided by its scale, and rounded."""
    calls = []
    product = train_gpt.fp8_product
    monkeypatch.setattr(
        train_gpt,
        "fp8_product",
        lambda *args, **kwargs: calls.append(args) or product(*args, **kwargs),
    )
    torch.manual_seed(0)
    head = train_gpt.Head(dataclasses.replace(config, model_dim=64), 128)
    head.weight.data.normal_(0, 0.02)
    x = train_gpt.norm(torch.randn(32, 64)).bfloat16().requires_grad_()
    grad = (torch.rand(32, 128) - 0.5).bfloat16()
    head.uncapped_logits(x).backward(grad)
    scaled = {
        "x": (x, x_scale),
        "weight": (head.weight, weight_scale),
        "grad": (grad, grad_scale),
        "x.T": (x.T, x_scale),
        "weight.T": (head.weight.T, weight_scale),
        "grad.T": (grad.T, grad_scale),
    }
    for (a, b, *scales), names in zip(
        calls, (("x", "weight.T"), ("grad", "weight"), ("grad.T", "x")), strict=True
    ):
        for operand, scale, (tensor, expected) in zip(
            (a, b), scales[:2], (scaled[name] for name in names), strict=True
        ):
            assert scale == pytest.approx(expected, rel=1e-12)
            assert torch.equal(operand.float(), (tensor / scale).to(operand.dtype).float())


@pytest.mark.parametrize("program", [train_gpt, frontier])
def test_compiled_fp8_head_is_one_graph(program):
    """A graph break would keep the casts, the logits and the loss from fusing. Tracing needs no
    GPU."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = program.Head(program.Config(model_dim=64), 256)
    with torch.no_grad():
        head.weight.normal_(0, 0.02)
    x = train_gpt.norm(torch.randn(32, 64)).bfloat16().requires_grad_()
    y = torch.randint(0, 256, (2, 32))
    weights = torch.tensor([1.0, 0.5])
    y[1, -1] = -1
    given = (x, y, weights) if program is frontier else (x, y[1], {})
    results = []
    for forward in (
        torch.compile(head.forward, backend="aot_eager", dynamic=False, fullgraph=True),
        head.forward,
    ):
        loss, cross_entropy = forward(*given)
        results.append([*torch.autograd.grad(loss, (x, head.weight)), loss.detach(), cross_entropy])
    for traced, plain, error in zip(*results, (0.02, 0.02, 1e-5, 1e-5)):
        assert traced.norm() > 0 and (traced - plain).norm() < error * plain.norm()


# training, step by step


def make_trainer(folder, config, comm=train_gpt.Comm(), encoding=ENCODING):
    """A worker in float64 on a shard in this folder, without zero parameters."""
    write_shard(folder / "train.bin", some_documents(21, 6000, *encoding), *encoding)
    shards = train_gpt.find_shards(str(folder / "train.bin"))
    torch.set_default_dtype(torch.float64)
    try:
        worker = config.worker_type(
            dataclasses.replace(config, dtype="float64"), comm, torch.device("cpu"), shards
        )
    finally:
        torch.set_default_dtype(torch.float32)
    shake(worker.model)
    return worker


class PlainTraining:
    """The record's steps without buckets: a copy of the model computes logits, the loss is
    computed by hand; gradients are of the mean over micro-batches; Adam on the sum of two steps,
    eps before the bias correction; NorMuon by reference.py.

    groups: by the end of a parameter's name, (learning rate, beta1, beta2, decay) of Adam. muon: by
    the end of a name, the factor on the learning rate. units: by the end of a name, shape and axis
    of NorMuon's matrices."""

    def __init__(
        self,
        model,
        config,
        groups=None,
        muon=(("qkvo", 1.0), ("fc", 2.0), ("proj", 1.0), ("gate", 1.0)),
        units=(),
    ):
        self.c = config
        self.model = copy.deepcopy(model)
        for (
            module
        ) in self.model.modules():  # copied hooks would wait for the gathers of the other model
            module._forward_pre_hooks.clear()
        self.model.forward = lambda x, _, windows: logits_of(self.model, x, windows)
        self.p = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        factors = {
            "scalars": 5,
            "lm_head.weight": 1,
            "embed.weight": 75,
            **{f"value_embeds.{i}.weight": 75 for i in range(3)},
        }
        groups = groups or {
            name: (config.adam_lr * factor, 0.65, 0.95, 0) for name, factor in factors.items()
        }
        self.adam = {
            name: values for name in self.p for end, values in groups.items() if name.endswith(end)
        }
        self.moments = {
            name: [torch.zeros_like(self.p[name]) for _ in range(3)] for name in self.adam
        }
        self.muon = {
            name: reference.NorMuon(p, 4 if "qkvo" in name else 1, factor)
            for name, p in self.p.items()
            for end, factor in muon
            if name.endswith(end) and name not in self.adam
        }
        for end, (shape, by_column) in dict(units).items():
            self.muon |= {
                name: reference.NorMuon(
                    p, p.numel() // math.prod(shape), shape=shape, by_column=by_column
                )
                for name, p in self.p.items()
                if name.endswith(f".attn.{end}")
            }
        assert {*self.adam, *self.muon} == {*self.p}
        self.frequencies = train_gpt.rotary_frequencies(config.head_dim).double()
        self.scale = 0.1

    def step(self, step, micro_batches, long, short, momentum, factor=1.0, weights=(1.0,)):
        for p in self.p.values():
            p.requires_grad_().grad = None
        turned = torch.outer(torch.arange(2 * len(micro_batches[0])), self.frequencies)
        buffers = {
            "rotary.cos": turned.cos(),
            "rotary.sin": turned.sin(),
            "rotary.scale": torch.tensor(self.scale),
        }
        objectives = []
        entropies = []
        for tokens in micro_batches:
            x = torch.tensor(tokens[:-1])
            y = tokens[1:]
            h = torch.func.functional_call(
                self.model, {**self.p, **buffers}, (x, x, train_gpt.Windows(long, short))
            )
            logs = h.log_softmax(-1)
            ahead = [
                -sum(logs[t, y[t + k]] for t in range(len(y) - k)) for k in range(len(weights))
            ]
            objectives.append(sum(weight * loss for weight, loss in zip(weights, ahead)))
            entropies.append(ahead[0].item())
        (sum(objectives) / len(objectives)).backward()
        for name, p in self.p.items():
            p.requires_grad_(False)
            if p.grad is None:
                assert self.model.tied and name == "embed.weight"
                continue
            if name in self.muon:
                self.muon[name].step(p.grad, self.c.muon_lr, factor, momentum, self.c.muon_beta2)
                p = self.muon[name].p
            else:
                m, v, total = self.moments[name]
                total += p.grad
                if step % 2 == 1:
                    t = (step + 1) // 2
                    lr, beta1, beta2, decay = self.adam[name]
                    m.mul_(beta1).add_(total, alpha=1 - beta1)
                    v.mul_(beta2).add_(total.square(), alpha=1 - beta2)
                    change = (
                        lr
                        * factor
                        * math.sqrt(1 - beta2**t)
                        / (1 - beta1**t)
                        * m
                        / (v.sqrt() + self.c.adam_eps)
                    )
                    p = p - change - torch.where(change * p > 0, (lr * factor) ** 2 * decay * p, 0)
                    total.zero_()
            self.p[name] = p.detach()
        return entropies

    def train(self, worker, steps):
        """Train a worker and this. Compare the losses of each step, and return how far the
        parameters moved."""
        first = {name: p.clone() for name, p in self.p.items()}
        for step in range(steps):
            plan = train_gpt.plan_of(self.c, step)
            batch = worker.stream.next_batch(plan)
            losses = worker.step(plan, batch)
            expected = self.step(
                step, [one.tolist() for one in batch], *plan.windows, plan.momentum
            )
            assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4), step
        worker.optimizer.finish_all_gathers()
        for name, p in worker.model.named_parameters():
            assert (p - self.p[name]).norm() <= 1e-6 * (first[name] - self.p[name]).norm(), name


SIX_STEPS = dict(
    num_steps=6,
    micro_batches=2,
    micro_batch_tokens=16,
    max_document_tokens=14,
    cooldown=0.0,
    adam_lr=0.001,
    adam_eps=1e-3,
)


def test_stages_train_as_a_plain_second_training_does(tmp_path, tiny):
    """Six steps, three Adam updates, across a change of batch size, sequence length, windows and
    rate within a cycle of Adam: batches by a plain packing, losses and updates by hand."""
    short = Stage(
        until=3,
        micro_batches=1,
        max_document_tokens=6,
        long_window=2,
        peak_lr_factor=Ramp(0.5, 1.0),
    )
    long = Stage(extra_steps=3, micro_batches=3, long_window=5, peak_lr_factor=2.0)
    config = dataclasses.replace(tiny, **SIX_STEPS, stages=(short, long))
    train_gpt.check_config(config, 1)
    worker = make_trainer(tmp_path, config)
    plain = PlainTraining(worker.model, config)
    stream = some_documents(21, 6000).tolist()
    pointer = 0
    for step in range(6):
        stretched = step >= 3
        batch = []
        for _ in range(3 if stretched else 1):
            held = []
            # documents from BOS to BOS; each is cut at the longest, the last one to fit
            while len(held) < 17:
                end = next(i for i in range(pointer + 1, len(stream)) if stream[i] == BOS)
                held += stream[pointer:end][: 14 if stretched else 6]
                pointer = end
            batch.append(held[:17])
        if step == 3:
            plain.frequencies, plain.scale = train_gpt.stretch(
                plain.frequencies, plain.scale, 8, 20
            )
        momentum = 0.85 + 0.1 * step / 4 if step < 4 else 0.95 - 0.1 * (step - 4) / 2
        plan = train_gpt.plan_of(config, step)
        read = worker.stream.next_batch(plan)
        assert [one.tolist() for one in read] == batch, step
        losses = worker.step(plan, read)
        windows, rate = ((20, 8), 2.0) if stretched else ((8, 4), 0.5 + step / 6)
        expected = plain.step(step, batch, *windows, momentum, rate)
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4), step
    for name, p in worker.model.named_parameters():
        assert (p - plain.p[name]).norm() <= 1e-4 * plain.p[name].norm(), name


ROWS = (  # kind, and learning rate, betas and decay of Adam: large enough to show in six steps
    ("head", 1.0, 0.5, 0.9, 9e4),
    ("embed", 3.0, 0.6, 0.8, 5e4),
    ("value_embeds", 7.0, 0.75, 0.95, 2e4),
    ("ngram_embeds", 5.0, 0.7, 0.85, 3e4),
    ("scalars", 2.0, 0.9, 0.99, 1e4),
    ("doc_copy", 1.5, 0.8, 0.7, 4e4),
    ("gates", 0.5, 0.9, 0.98, 6e4),
    ("smear_gate", 0.2, 0.4, 0.6, 8e4),
)
PLACES = {
    "head": "lm_head.weight",
    "embed": "embed.weight",
    "value_embeds": "value_embeds.*.weight",
    "gates": "gate",
    "ngram_embeds": "ngrams.0.weight",
}  # the end of a name, where it is not the kind


def groups_by_hand(rows, places=PLACES):
    """Return the `groups` of PlainTraining for rows of AdamGroup."""
    return {
        place: (0.001 * factor, *others)
        for kind, factor, *others in rows
        for place in (
            [f"value_embeds.{i}.weight" for i in range(3)]
            if kind == "value_embeds"
            else (
                ["doc_copy.gains", "doc_copy.rows"]
                if kind == "doc_copy"
                else [places.get(kind, kind)]
            )
        )
    }


def test_parameter_groups_train_as_a_plain_second_training_does(tmp_path, tiny):
    """Six steps, three Adam updates: each kind by its own row."""
    config = dataclasses.replace(
        tiny,
        stages=(Stage(long_window=3),),
        **SIX_STEPS,
        ngrams=(train_gpt.Ngrams(2, 50, 8),),
        doc_copy=True,
        muon_beta2=0.9,
        param_groups=(
            *(AdamGroup(*row) for row in ROWS),
            MuonGroup("mlp_fc", lr_mul=1.5),
            MuonGroup("attn", lr_mul=0.5),
        ),
    )
    train_gpt.check_config(config, 1)
    worker = make_trainer(tmp_path, config)
    plain = PlainTraining(
        worker.model, config, groups_by_hand(ROWS), (("qkvo", 0.5), ("fc", 1.5), ("proj", 1.0))
    )
    plain.train(worker, 6)


# places for an idea


@dataclasses.dataclass(frozen=True)
class IdeaValues(train_gpt.StageValues):
    """Of an idea: a further number that stages may set."""

    z_weight: "float" = train_gpt.option(0.0, "weight of a z-loss", min=0)


IdeaStage = train_gpt.stage_type(IdeaValues)


@dataclasses.dataclass(frozen=True)
class IdeaConfig(train_gpt.Config, IdeaValues):
    row_types = IdeaStage, *train_gpt.Config.row_types[1:]


def test_a_scheduled_number_reaches_head_and_layers_as_a_tensor_and_compiles_nothing_anew(
    tmp_path, tiny, monkeypatch
):
    """A stage's value and a ramp's, in the objective and in a layer's output. JSON keeps the
    stages."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    stages = IdeaStage(until=3, z_weight=Ramp(0.6, 0.0)), IdeaStage(until=4), IdeaStage(z_weight=2)
    values = {f.name: getattr(tiny, f.name) for f in dataclasses.fields(tiny)}
    config = IdeaConfig(
        **{
            **values,
            "stages": stages,
            "z_weight": 0.125,
            "num_steps": 6,
            "layers": "S0M LM",
            "backout_layer": 0,
            "compile": "on",
            "micro_batches": 1,
            "micro_batch_tokens": 16,
        }
    )
    train_gpt.check_config(config, 1)
    assert train_gpt.config_of(train_gpt.json_of(config), IdeaConfig) == config
    assert "--z_weight" in train_gpt.make_parser({"idea": config}).format_help()
    forward = train_gpt.Head.forward
    block = train_gpt.Block.forward

    @train_gpt.compiled
    def with_z_loss(self, x, targets, scheduled):
        objective, cross_entropy = forward(self, x, targets, scheduled)
        return (
            objective + scheduled["z_weight"] * self.logits(x).logsumexp(1).square().sum(),
            cross_entropy,
        )

    monkeypatch.setattr(train_gpt.Head, "forward", with_z_loss)
    monkeypatch.setattr(
        train_gpt.Block,
        "forward",
        lambda self, x, context, values: (
            block(self, x, context, values) * (1 + context.scheduled["z_weight"])
        ),
    )
    write_shard(tmp_path / "train.bin", some_documents(21, 6000))
    worker = config.worker_type(
        config,
        train_gpt.Comm(),
        torch.device("cpu"),
        train_gpt.find_shards(str(tmp_path / "train.bin")),
    )
    shake(worker.model)
    x, y = tokens_of(5, 16)
    graphs = []
    for step, wanted in enumerate((0.6, 0.4, 0.2, 0.125, 2, 2)):
        plan = train_gpt.plan_of(config, step)
        worker.model.apply_schedule(plan)
        scheduled = worker.model.scheduled
        assert scheduled["z_weight"].shape == () and scheduled["z_weight"].item() == pytest.approx(
            wanted
        )
        objective, cross_entropy = worker.model(x, y, train_gpt.Windows(12, 4))
        h = worker.model.trunk(x, train_gpt.Windows(12, 4))
        z_loss = worker.model.lm_head.logits(h).logsumexp(1).square().sum().item()
        assert objective.item() - cross_entropy.item() == pytest.approx(
            wanted * z_loss, rel=1e-4
        ), step
        graphs.append((train_gpt.compile_stats()[0], round(cross_entropy.item(), 3)))
    assert len({count for count, _ in graphs}) == 1 and len({loss for _, loss in graphs}) == 5, (
        "the layers read it too"
    )
    torch._dynamo.reset()


def test_a_tensor_that_a_layer_leaves_reaches_a_later_group_with_its_gradient(tiny, monkeypatch):
    """Compared with a model whose layers are one group and share the tensor by a variable."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    config = dataclasses.replace(tiny, layers="S0M SM M LM SM M LM M", backout_layer=3)
    x, y = tokens_of(5, 40)
    block = train_gpt.Block.forward
    place = {}
    results = []

    def sharing(left):
        def forward(self, x, context, value_embeds):
            x = block(self, x, context, value_embeds)
            kept = left(context)
            if self.number == 1:
                kept["x"] = x.sin()
            return x + kept["x"] * x if self.number in (2, 6) else x

        return forward

    for least, left in ((99, lambda context: place), (4, lambda context: context.shared)):
        monkeypatch.setattr(train_gpt, "MIN_GROUP_LAYERS", least)
        monkeypatch.setattr(train_gpt.Block, "forward", sharing(left))
        model = shaken(config)
        if least == 4:
            train_gpt.compile_parts(model)
        assert len(model.groups) == (1 if least == 99 else 2)
        for _ in range(2):  # a second forward starts with nothing left
            model.zero_grad()
            loss, _ = model(x, y, train_gpt.Windows(12, 4))
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    for ours, plain in zip(*results, strict=True):
        assert (ours - plain).norm() <= 1e-5 * plain.norm() and plain.norm() > 0
    torch._dynamo.reset()


def test_exact_mode_computes_with_one_thread(tmp_path, tiny):
    """The number of threads decides the order in which a product is summed."""
    torch.set_num_threads(2)
    try:
        make_trainer(tmp_path, tiny)
        assert torch.get_num_threads() == 2
        make_trainer(tmp_path, dataclasses.replace(tiny, world_size_invariant=True))
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_split_micro_batches_scale_the_gradients_and_not_the_losses(tmp_path, tiny):
    """Gradients are averaged over micro-batches; the average must not shrink when micro-batches
    are split."""
    seen = []
    for count, tokens, splits in (4, 16, 1), (2, 32, 2):
        config = dataclasses.replace(
            tiny, micro_batches=count, micro_batch_tokens=tokens, micro_batch_splits=splits
        )
        worker = make_trainer(tmp_path, config)
        worker.optimizer.step = lambda plan: None
        plan = train_gpt.plan_of(config, 0)
        losses = worker.step(plan, worker.stream.next_batch(plan))
        seen.append(
            (
                losses,
                {
                    slot.name: slot.grad.clone()
                    for bucket in worker.optimizer.buckets
                    for slot in bucket.slots
                },
            )
        )
    assert seen[0][0] == seen[1][0] and len(seen[0][0]) == 4
    for name, grad in seen[0][1].items():
        assert grad.norm() > 0 and torch.allclose(seen[1][1][name], 2 * grad, rtol=1e-12), name


# on a GPU


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU: FlashAttention and the compiled blocks need one")
    return torch.device("cuda")


@pytest.mark.gpu
def test_flash_attention_on_gpu_is_the_cpu_s_attention(gpu):
    """Version 3 if it is installed, otherwise torch's own."""
    train_gpt.find_flash_3()
    docs = (torch.arange(1024)[:, None] >= torch.tensor([0, 300, 302])).sum(1)
    qkv = torch.randn(3, 1024, 2, 64).bfloat16().float().requires_grad_()
    on_gpu = qkv.detach().to(gpu, torch.bfloat16).requires_grad_()
    results = [
        dense_attention(*qkv, docs, 200),
        train_gpt.attend(*on_gpu.unbind(), document_table(docs.to(gpu), 200, 722, 4)).float().cpu(),
    ]
    for out, x in zip(results, (qkv, on_gpu)):
        out.square().sum().backward()
    for exact, x in zip((results[0], *qkv.grad), (results[1], *on_gpu.grad.float().cpu())):
        assert (x - exact).norm() <= 0.02 * exact.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_gives_the_cpu_s_loss_and_gradients(gpu, tiny, compiled):
    config = dataclasses.replace(tiny, model_dim=128, num_heads=2, micro_batch_tokens=256)
    x, y = tokens_of(8, 256)
    windows = train_gpt.Windows(128, 64)
    cpu = shaken(config)
    loss, _ = cpu(x, y, windows)
    loss.backward()
    model = shaken(config).to(gpu)
    if compiled:
        train_gpt.compile_parts(model)
    on_gpu, _ = model(x.to(gpu), y.to(gpu), windows)
    on_gpu.backward()
    assert on_gpu.item() == pytest.approx(loss.item(), rel=1e-3)
    for (name, p), q in zip(cpu.named_parameters(), model.parameters()):
        assert (p.grad - q.grad.cpu()).norm() <= 2e-2 * p.grad.norm(), name


def test_the_head_s_rows_are_copied_only_after_their_gather(tmp_path):
    """Hostile parameters are NaN until a gather is waited for, and DocCopy reads the head before
    the head runs."""
    config = dataclasses.replace(
        train_gpt.PRESETS["laptop"],
        micro_batch_tokens=64,
        max_document_tokens=32,
        val_len=64,
        ngrams=(),
        model_dim=16,
        window_block=8,
        num_steps=3,
        overlap_param_gather=True,
        update_order="forward",
    )
    worker = make_trainer(tmp_path, config, Hostile())
    for step in range(3):
        plan = train_gpt.plan_of(config, step)
        assert torch.stack(worker.step(plan, worker.stream.next_batch(plan))).isfinite().all(), step
