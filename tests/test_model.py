"""The model compared with a second implementation of record 44; masks, rotary, loss, the fp8 head; training step by step."""

import copy
import dataclasses
import functools
import importlib.util
import inspect
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils.flop_counter  # imported before PlainFlashAttention replaces operators that it needs

import reference
import train_gpt
from conftest import logits_of, some_documents, write_shard
from test_sync import Hostile
from train_gpt import AdamGroup, MuonGroup, Ramp, Stage

VOCAB, BOS = 64, 63
ENCODING = train_gpt.Encoding(VOCAB, BOS)


def shaken(config, seed=0):
    """A model without zero parameters, so that every path carries something."""
    return shake(train_gpt.build_model(config, ENCODING), seed)


@torch.no_grad()
def shake(model, seed=0):
    torch.manual_seed(seed)
    for name, p in model.named_parameters():
        p.add_(torch.randn_like(p) * (0.1 if name in ("scalars", "resid_lambdas", "post_lambdas", "gate_scale") else 0.3 * (p.shape or (1,))[-1] ** -0.5))
    return model


def tokens_of(seed, count):
    stream = torch.from_numpy(some_documents(seed, count + 1).astype("int64"))
    return stream[:-1], stream[1:]


def in_float64(model):
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


def compare(model, loss, plain, expected, tied=False):
    """Compare a loss and its gradients with those of a second implementation, whose parameters are `plain`."""
    loss.backward()
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        if tied and name == "embed.weight":
            assert p.grad is plain[name].grad is None
            continue
        wanted = plain[name].grad
        assert (p.grad.to_dense() - wanted).norm() <= 1e-5 * wanted.norm(), name
        assert wanted.norm() > 0, f"{name} does not matter to the loss, so nothing was compared"


@pytest.mark.parametrize("long,short", [(12, 4), (40, 20)])
def test_loss_and_gradients_are_those_of_the_record(tiny, long, short):
    model = shaken(tiny)
    x, y = tokens_of(5, 40)
    plain = in_float64(model)
    expected = reference.loss(plain, x.tolist(), y.tolist(), long, short, BOS, tiny.num_heads)
    compare(model, model(x, y, train_gpt.Windows(long, short))[0], plain, expected)


PAIRED = "- S1M P2M SM LM PM SM+5 M+4 SM+3 P0M+2 S1M+1 L2M"

XSA = "- S1xM S2xM SxM LxM SxM SxM+5 M+4 SxM+3 S0xM+2 S1xM+1 L2xM"
GATED = "S1xM P2M SxgdM L0gM M+2 LxM+1"  # with gates per token from layers 0 and 2
PREFIXES = [-1 if token % 3 else token // 2 for token in range(VOCAB)]

FURTHER = {  # mechanisms that record 44 lacks: (config values, arguments of reference.loss)
    "logits": (dict(logit_cap=23.0, logit_shift=5.0), dict(softcap=(23.0, 5.0, 7.5))),
    "value gates": (dict(value_gates=True), dict()),
    "XSA": (dict(layers=XSA), dict()),
    "attention reads the backout layer": (dict(layers="- S1M S2M SM LM SM SM+5 M+4 SM+3 cS0M+2 S1M+1 cL2M"), dict()),
    "paired heads": (dict(layers=PAIRED, value_gates=True, num_heads=4), dict()),
    "sublayer_scales": (dict(sublayer_scales=True), dict()),
    "tied": (dict(untie_at=1.0, head_init=0.01), dict()),
    "key_offset": (dict(key_offset=True), dict(offset=True)),
    "prefixes": (dict(), dict(prefix_weight=0.25, prefixes=PREFIXES)),
    "token gates": (dict(layers=GATED, backout_layer=1, sublayer_scales=True, token_gates=(0, 2)),
                    dict(gates_from=(0, 2), backout_layer=1, dc_window=7)),
    "token gates with n-grams": (dict(layers=GATED, backout_layer=1, sublayer_scales=True, token_gates=(0,), ngrams=(train_gpt.Ngrams(2, 50, 32),)),
                                 dict(gates_from=(0,), backout_layer=1, dc_window=7)),
    "MUDD": (dict(layers="S1M SM L0M+0 S2M", backout_layer=1, sublayer_scales=True, mudd=True), dict(backout_layer=1)),
    "MUDD without value tables": (dict(layers="SM SM LM+0 SM", backout_layer=1, sublayer_scales=True, mudd=True),
                                  dict(backout_layer=1)),
    "all of frontier": (dict({name: getattr(train_gpt.PRESETS["frontier"], name) for name in (
        "layers", "backout_layer", "value_gates", "sublayer_scales", "resid_lambda_init", "output_init", "head_init", "untie_at",
        "logit_cap", "logit_shift", "token_gates", "mudd", "key_offset", "muon_qk_heads", "ngram_hash")},
        ngrams=(train_gpt.Ngrams(2, 50, 32),), num_heads=4),
        dict(softcap=(23.0, 5.0, 7.5), backout_layer=7, ahead=(1.0, 0.5, 0.25), offset=True, gates_from=(0, 4),
             dc_window=7, prefix_weight=0.25, prefixes=PREFIXES)),
}


# slow: what "all of frontier" has too
@pytest.mark.parametrize("name", [name if name.startswith(("token gates", "MUDD", "all")) else pytest.param(name, marks=pytest.mark.slow)
                                  for name in FURTHER])
def test_later_mechanisms_are_those_of_a_second_implementation(tiny, name, monkeypatch):
    """Loss and gradients. Each mechanism must change the loss, and each parameter must matter."""
    changes, further = FURTHER[name]
    monkeypatch.setattr(train_gpt, "DC_WINDOW", 7)
    config = dataclasses.replace(tiny, **changes)
    train_gpt.check_config(config, 1)
    model = shaken(config)
    model.apply_schedule((), tied=bool(config.untie_at))
    x, y = tokens_of(5, 40)
    model.prefixes[:VOCAB] = torch.tensor(PREFIXES)
    loss, _ = model(x, y, train_gpt.Windows(12, 5), further.get("ahead", (1.0,)), further.get("prefix_weight", 0.0))
    plain = in_float64(model)
    as_read = {**plain, **({"embed.weight": plain["lm_head.weight"]} if config.untie_at else {})}
    if config.ngrams:
        by_hand = ByRecord if config.ngram_hash == "record" else ByHand
        further = {**further, "ngrams": by_hand(model.ngrams[0], plain["ngrams.0.weight"]).vectors(x.tolist())}
    expected = reference.loss(as_read, x.tolist(), y.tolist(), 12, 5, BOS, config.num_heads, layers=config.layers, **further)
    compare(model, loss, plain, expected, tied=bool(config.untie_at))
    if not config.ngrams and not config.sublayer_scales:  # record 44 without the mechanism
        record = reference.loss({name: p for name, p in plain.items() if not name.endswith(("value_gate", "xsa_lambda"))},
                                x.tolist(), y.tolist(), 12, 5, BOS, config.num_heads)
        assert abs(record.item() - loss.item()) > 5e-6 * loss.item(), "five times the tolerance above"


MISTAKES = {  # one line of train_gpt.py each
    "MUDD: sources of the last layer exchanged": ("saved[-1], saved[self.backout], x\n", "saved[self.backout], saved[-1], x\n"),
    "MUDD: weights of values and residual stream exchanged": ('"values": [0.0] * 3, "residual": [0.0] * 3',
                                                              '"residual": [0.0] * 3, "values": [0.0] * 3'),
    "MUDD: value gates of the halves exchanged": ('weights["value_gates"].repeat', 'weights["value_gates"].flip(1).repeat'),
    "MUDD: the last layer adds x0": ("context._replace(x0=outputs[-1])", "context"),
    "MUDD: the head reads the next value table": ("outputs, values.get(0))", "outputs, values.get(1))"),
    "gates: sigmoid on those of the heads": ('y * gates["gate"][..., None]', 'y * gates["gate"].sigmoid()[..., None]'),
    "gates: scale of MUDD in place of the learned one": ("compute(x, context.gate_scale)", "compute(x)"),
    "gates: the second network reads x0": ("gates = self.token_gates[0].compute(x,", "gates = self.token_gates[0].compute(context.x0,"),
    "gates: no sigmoid on the skip connection's weight": ("torch.sigmoid(context.skip_weights[self.skips[i]])",
                                                          "context.skip_weights[self.skips[i]]"),
    "gates: n-grams of layer 0 after its attention": ("(-1 if name == \"ngrams\" and i == first else i, name)", "(i, name)"),
    "DC: one token less": ("*[DC_WINDOW - 1] * 2", "*[DC_WINDOW - 2] * 2"),
    "DC: reading weights not normed": ("(heads,), eps=1e-6)", "(heads,), eps=1e6)"),
    "DC: reading and writing exchanged": ('gates["dc_read"], gates["dc_write"]', 'gates["dc_write"], gates["dc_read"]'),
    "DC: before the keys' offset": ("mix_heads(q * scale, k,", "mix_heads(q * scale, k.roll(-1, 0),"),
    "XSA: sigmoid": ("torch.tanh(xsa)[..., None]", "torch.sigmoid(xsa)[..., None]"),
    "XSA: of layers 1 and 3 exchanged": ('own = {name: gate for (number, name), gate in by_name.items() if number == i}',
                                         'own = {name: gate for (number, name), gate in by_name.items() if number == '
                                         '({1: 3, 3: 1}.get(i, i) if name == "xsa" else i)}'),
    "signs: one token late": ("hashes // table.num_embeddings % table.SIGNS)\n", "(hashes // table.num_embeddings % table.SIGNS).roll(1))\n"),
    "hash: the second token's row": ("before[..., 1:2].fill_(last)", ""),
    "hash: factors exchanged": ("36313 * tokens ^ 27191 * before", "27191 * tokens ^ 36313 * before"),
    "prefix: of the token after the next": ("self.prefixes[targets]]", "self.prefixes[targets.roll(-1)]]"),
    "prefix: half its weight": ("(*loss_weights, prefix_weight)", "(*loss_weights, prefix_weight / 2)"),
    "value gates: paired layers read only x": ("value_embeds[:, :inputs - inputs // 2]", "(x[:, inputs // 2:inputs] if self.paired "
                                               "else value_embeds[:, :inputs - inputs // 2])"),
}


def frontier_s_loss_and_gradients(module, config):
    """Compute with the model of another copy of train_gpt."""
    model = shake(module.build_model(module.config_of(train_gpt.json_of(config)), ENCODING))
    model.apply_schedule((), tied=True)
    model.prefixes[:VOCAB] = torch.tensor(PREFIXES)
    loss, _ = model(*tokens_of(5, 40), module.Windows(12, 5), (1.0, 0.5, 0.25), 0.25)
    loss.backward()
    return loss.item(), {name: p.grad.to_dense() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_in_frontier_s_mechanisms_show(tiny, name, monkeypatch, tmp_path):
    """The comparison above would see them: each changes the loss or a gradient by 20 times its tolerance."""
    (old, new), source = MISTAKES[name], Path(train_gpt.__file__).read_text()
    assert source.count(old) == 1, "the line has changed: plant the mistake anew"
    spec = importlib.util.spec_from_file_location(f"wrong_{[*MISTAKES].index(name)}", tmp_path / "wrong.py")
    (tmp_path / "wrong.py").write_text(source.replace(old, new))  # a file, as Triton reads the source of its kernels
    wrong = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, wrong)  # its dataclasses look up their module
    spec.loader.exec_module(wrong)
    for module in (train_gpt, wrong):
        monkeypatch.setattr(module, "DC_WINDOW", 7)
    config = dataclasses.replace(tiny, **FURTHER["all of frontier"][0])
    (loss, grads), (wrong_loss, wrong_grads) = (frontier_s_loss_and_gradients(module, config) for module in (train_gpt, wrong))
    assert abs(loss - wrong_loss) > 2e-5 * loss or any(
        (grad - wrong_grads[name]).norm() > 2e-4 * grad.norm() for name, grad in grads.items())


def test_initialization_of_later_mechanisms(tiny):
    changed = dataclasses.replace(tiny, resid_lambda_init=1.1, head_init=0.005, value_init=0.5, output_init=0.5, value_gates=True,
                                  layers=XSA)
    plain, model = (dict(train_gpt.build_model(config, ENCODING).named_parameters()) for config in (tiny, changed))
    dim = tiny.model_dim
    assert model["scalars"][5:29].tolist() == pytest.approx([1.1, 0.0] * 12)
    assert model["lm_head.weight"].std().item() == pytest.approx(0.005, rel=0.05)
    assert torch.equal(model["value_embeds.1.weight"], 0.5 * plain["value_embeds.1.weight"])
    for i in (1, 11):
        q, k, v, o = model[f"blocks.{i}.attn.qkvo"].view(4, dim, dim)
        assert torch.equal(q, plain["blocks.1.attn.qkvo"].view(4, dim, dim)[0]) or i > 1
        assert o.std().item() == pytest.approx(0.5 * v.std().item(), rel=0.1)
        assert not model[f"blocks.{i}.attn.value_gate"].any() and not model[f"blocks.{i}.attn.xsa_lambda"].any()
    assert "blocks.3.attn.value_gate" not in model, "that layer has no value table"
    scaled = dataclasses.replace(changed, sublayer_scales=True)
    model = dict(train_gpt.build_model(scaled, ENCODING).named_parameters())
    assert model["scalars"].tolist() == [-1.5] * 5 + [0.5, 1.0] * 12 + [0.0, 0.5]
    assert model["resid_lambdas"].flatten().tolist() == pytest.approx([1.1 ** 0.5] * 24)
    assert model["post_lambdas"].tolist() == [[1.0, 1.0]] * 12
    frontier = dataclasses.replace(small_frontier(), model_dim=48)
    model = train_gpt.build_model(frontier, ENCODING)
    scale = 1.1 ** 0.5
    for network, weights in (
            (model.token_gates[0], [0, .05, 0, .05] + [0] * 6 + [0, .05, 0, .05] + [0] * 6 + [.25] * 6),
            (model.token_gates[1], [0, .05] + [0] * 6 + [0, .05, .5, 0, .05] + [0] * 6 + [0, .05, 0, .05] + [.25] * 6 + [1] * 6 + [0] * 6),
            (model.mudd.layer, [0] * 6 + [scale, scale, 1, 1, 0, .05, 2, 2]), (model.mudd.head, [0, 0, -.5, 0, 0])):
        assert network.compute(torch.randn(3, 48))[2].tolist() == pytest.approx(weights), "the same for all tokens"
        assert network.hidden.shape == (64, 48) and 0.9 / 48 ** 0.5 < network.hidden.abs().max() <= 1 / 48 ** 0.5
    assert model.gate_scale.item() == pytest.approx(0.1)


def small_frontier():
    return dataclasses.replace(train_gpt.PRESETS["frontier"], dtype="float32", fp8_head=False, model_dim=96,
                               ngrams=(train_gpt.Ngrams(2, 50, 8),), stages=(Stage(long_window=3),), micro_batch_tokens=48, val_len=64)


class ByRecord:
    """A second implementation of record 89's table of pairs: row (36313 x_t XOR 27191 x_{t-1}) mod (rows - 1), times the signs
    in row (x_{t-1} XOR x_t) mod 8192. The first token has the last row and the first signs. The second token's row is computed
    with the last row's number in place of x_0. Documents do not matter."""

    def __init__(self, table, weight):
        self.table, self.weight = table, weight

    def vectors(self, x):
        last = len(self.weight) - 1
        return self.weight[self.rows(x, last)] * self.table.signs.double()[[0] + [(a ^ b) % 8192 for a, b in zip(x, x[1:])]]

    @staticmethod
    def rows(x, last):
        def as_int32(number):
            return (number + 2 ** 31) % 2 ** 32 - 2 ** 31
        return [last] + [(as_int32(36313 * b) ^ as_int32(27191 * a)) % last for a, b in zip([last, *x[1:]], x[1:])]


class ByHand:
    """A second implementation of n-gram tables: a dictionary of vectors by tuples of tokens, with the hash in Python's
    integers and the table's signs."""

    def __init__(self, table, weight):
        self.table, self.weight, self.known = table, weight, {}

    def vector(self, ngram):
        if ngram not in self.known:
            number = 0
            for token in ngram:
                number = ((number ^ token) * 2_654_435) % 2 ** 40
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


def test_the_record_s_hash_at_its_own_size(tiny):
    """The second token's product exceeds int32."""
    table = train_gpt.NgramTable(dataclasses.replace(tiny, ngram_hash="record"), train_gpt.Ngrams(2, 377_280, 1))
    x = [50256, 17, 50255, 0, 40000]
    number = table.record_hash(torch.tensor([x, x[::-1]], dtype=torch.int32))
    assert (number % 377_280).tolist() == [ByRecord.rows(x, 377_279), ByRecord.rows(x[::-1], 377_279)]
    assert (number[0] // 377_280).tolist() == [0, *((a ^ b) % 8192 for a, b in zip(x, x[1:]))]
    assert 27191 * 377_279 > 2 ** 31


def test_ngram_tables_are_those_of_a_second_implementation(tiny):
    """Loss and gradients for tables as wide as the residual stream and narrower, with collisions."""
    config = dataclasses.replace(tiny, ngrams=(train_gpt.Ngrams(2, 50, 32), train_gpt.Ngrams(2, 50, 8), train_gpt.Ngrams(3, 40, 32), train_gpt.Ngrams(4, 17, 3)))
    model = shaken(config)
    x, y = tokens_of(5, 60)
    assert (x == BOS).sum() > 2
    plain = in_float64(model)
    added = torch.zeros(60, 32, dtype=torch.float64)
    for i, table in enumerate(model.ngrams):
        vectors = ByHand(table, plain[f"ngrams.{i}.weight"]).vectors(x.tolist())
        added = added + F.pad(vectors, (0, 32 - vectors.shape[1]))
    expected = reference.loss(plain, x.tolist(), y.tolist(), 12, 4, BOS, config.num_heads, added=added)
    compare(model, model(x, y, train_gpt.Windows(12, 4))[0], plain, expected)


def test_ngram_tables_start_at_zero_and_change_no_other_initial_value(tiny):
    plain, model = (train_gpt.build_model(dataclasses.replace(tiny, ngrams=tables), train_gpt.Encoding(VOCAB, BOS))
                    for tables in ((), (train_gpt.Ngrams(2, 50, 8),)))
    for (name, p), (other, q) in zip(plain.named_parameters(), [item for item in model.named_parameters()
                                                               if not item[0].startswith("ngrams")], strict=True):
        assert name == other and torch.equal(p, q)
    assert not model.ngrams[0].weight.any() and model.ngrams[0].signs.unique().tolist() == [-1, 1]
    x, y = tokens_of(5, 40)
    assert torch.equal(plain(x, y, train_gpt.Windows(12, 4))[0], model(x, y, train_gpt.Windows(12, 4))[0])


def test_initial_values_are_those_of_the_record(tiny):
    model = train_gpt.build_model(dataclasses.replace(tiny, model_dim=64), train_gpt.Encoding(1000, 999))
    p = dict(model.named_parameters())
    assert p["embed.weight"].shape == (1024, 64), "the vocabulary is padded to a multiple of 128"
    assert p["embed.weight"].std().item() == pytest.approx(1, abs=0.02)
    bound = math.sqrt(3) * 0.5 / math.sqrt(64)
    for name in ("blocks.1.attn.qkvo", "blocks.1.mlp.fc"):
        learned = p[name].reshape(-1)[:3 * 64 * 64]
        assert learned.abs().max() <= bound and learned.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.03)
    for name, x in p.items():
        if name.endswith(("proj", "gate")) or name == "lm_head.weight":
            assert not x.any(), name
    assert not p["blocks.1.attn.qkvo"].view(4, 64, 64)[3].any()
    assert p["scalars"].tolist() == [-1.5] * 5 + [1.0, 0.0] * 12 + [0.5] * 24 + [0.0, 0.5]
    assert "blocks.7.attn.qkvo" not in p and "blocks.0.mlp.fc" not in p and "blocks.7.mlp.fc" in p


def test_record_model_has_the_record_s_size(monkeypatch):
    monkeypatch.setattr(torch.nn.Embedding, "reset_parameters", lambda self: None)  # random numbers take seconds
    monkeypatch.setattr(train_gpt, "uniform", lambda rows, columns, fan_in: torch.empty(rows, columns))
    monkeypatch.setattr(train_gpt, "Rotary", lambda *sizes: None)
    with torch.device("meta"):
        model = train_gpt.GPT(train_gpt.Config(), train_gpt.Encoding(50257, 50256))
    matrices = sum(p.numel() for name, p in model.named_parameters() if name.endswith(("qkvo", "mlp.fc", "mlp.proj")))
    assert matrices == 32 * 768 * 3072
    assert model.embed.weight.numel() == model.lm_head.weight.numel() == 50304 * 768 and len(model.value_embeds) == 3


def test_a_later_token_changes_no_earlier_logits(tiny):
    model = shaken(tiny).eval()
    x, _ = tokens_of(6, 64)
    windows = train_gpt.Windows(16, 8)
    before = logits_of(model, x, windows)
    for at in (1, 17, 40, 63):
        changed = x.clone()
        changed[at] = (changed[at] + 5) % 60
        after = logits_of(model, changed, windows)
        assert torch.equal(before[:at], after[:at]) and not torch.equal(before[at], after[at])


def dense_mask(docs, window):
    """bool [T, T]: token q sees token k."""
    back = torch.arange(len(docs))[:, None] - torch.arange(len(docs))
    return (back >= 0) & (back <= window) & (docs[:, None] == docs)


def dense_attention(q, k, v, docs, window):
    """The definition of attention, over all pairs of tokens [T, H, D]."""
    scores = torch.einsum("qhd,khd->hqk", q, k).masked_fill(~dense_mask(docs, window), -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


def test_attention_stays_inside_document_and_window(monkeypatch):
    monkeypatch.setitem(train_gpt.MASK_PIECE, "cpu", 4)
    docs = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    mask = train_gpt.mask_in_pieces(docs, 2, 2, torch.float32).exp()
    for q in range(8):
        for k in range(q // 4 * 4 - 2, q // 4 * 4 + 4):
            assert mask[q // 4, q % 4, k + 2 - q // 4 * 4].item() == (0 <= k <= q <= k + 2 and docs[q] == docs[k]), (q, k)


class PlainFlashAttention:
    """Replaces torch's two FlashAttention operators by plain code, as documented, and counts the calls."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setattr(train_gpt, "flash_3", None)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", self.forward)
        monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", self.backward)

    def weights(self, q, k, starts, ends, longest, dropout, causal, scale, window_size_left, window_size_right):
        """[documents] of (where it lies, weights [H, T, T], log sums [H, T])"""
        assert starts is ends and starts.dtype == torch.int32 and not dropout and not causal
        assert scale == 1.0 and window_size_right == 0 and starts[0] == 0 and starts[-1] == len(q)
        assert longest == starts.diff().max() and (starts.diff()[1:] > 0).all(), "empty ones would cost time"
        self.calls += 1
        for begin, end in zip(starts.tolist(), starts[1:].tolist()):
            at = torch.arange(end - begin)
            back = at[:, None] - at
            scores = torch.einsum("qhd,khd->hqk", q[begin:end], k[begin:end])
            scores = scores.masked_fill((back < 0) | (back > window_size_left), -math.inf)
            yield slice(begin, end), scores.softmax(-1), scores.logsumexp(-1)

    def forward(self, q, k, v, starts, ends, longest, longest_keys, dropout, causal, debug, **further):
        assert longest == longest_keys
        out, log_sums = torch.empty_like(q), q.new_empty(q.size(1), len(q), dtype=torch.float32)
        for at, weights, log_sum in self.weights(q, k, starts, ends, longest, dropout, causal, **further):
            out[at], log_sums[:, at] = torch.einsum("hqk,khd->qhd", weights, v[at]), log_sum.float()
        return out, log_sums, None, None, None

    def backward(self, grad, q, k, v, out, log_sums, starts, ends, longest, longest_keys, dropout, causal, *dropout_state,
                 **further):
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for at, weights, log_sum in self.weights(q, k, starts, ends, longest, dropout, causal, **further):
            assert torch.equal(log_sums[:, at], log_sum.float())
            of_weights = torch.einsum("qhd,khd->hqk", grad[at], v[at])
            of_scores = weights * (of_weights - (grad[at] * out[at]).sum(-1).T[..., None])
            grads[0][at] = torch.einsum("hqk,khd->qhd", of_scores, k[at])
            grads[1][at] = torch.einsum("hqk,qhd->khd", of_scores, q[at])
            grads[2][at] = torch.einsum("hqk,qhd->khd", weights, grad[at])
        return grads


class PlainFlashAttention3(PlainFlashAttention):
    """A module with FlashAttention 3's interface, of its main branch and of the hub's build in August 2026."""

    def __init__(self, monkeypatch):
        self.calls = 0
        monkeypatch.setitem(sys.modules, "flash_attn_interface", self)
        monkeypatch.setattr(train_gpt, "flash_3", None)
        assert train_gpt.find_flash_3() == "" and train_gpt.flash_3 is self

    def flash_attn_varlen_func(
            self, q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None,
            softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1),
            attention_chunk=0, softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
            return_attn_probs=False):
        assert num_splits == 1, f"num_splits is {num_splits}: the keys of a query are split, and a second kernel adds them up"
        assert causal and return_attn_probs and not torch.is_grad_enabled(), "its own autograd function would run too"
        assert {seqused_q, seqused_k, qv, q_descale, k_descale, v_descale, pack_gqa} == {None}
        assert not (attention_chunk or softcap or deterministic or sm_margin)
        out, log_sums, *_ = self.forward(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False, False, scale=softmax_scale,
            window_size_left=window_size[0], window_size_right=window_size[1])
        return out, log_sums

    def _flash_attn_backward(
            self, dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
            max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
            window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0):
        assert is_causal and sequed_q is sequed_k is None and not (softcap or deterministic or sm_margin)
        grads = self.backward(
            dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, False,
            scale=softmax_scale, window_size_left=window_size_left, window_size_right=window_size_right)
        for given, grad in zip((dq, dk, dv), grads):
            given.copy_(grad)


def document_table(docs, window, longest, count):
    """Build a mask from documents [T], numbered from 0 or 1 up to count - 1."""
    every = torch.arange(len(docs) // train_gpt.DOCUMENT_ROOM + 1, device=docs.device)
    return train_gpt.DocumentTable(torch.searchsorted(docs, every, out_int32=True), torch.tensor([window, longest, count]))


@pytest.mark.parametrize("flash", [PlainFlashAttention, PlainFlashAttention3])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("window", [0, 1, 100, 1000])
def test_flash_attention_is_called_with_the_right_documents_and_window(flash, first, window, monkeypatch):
    """Compiled too: other windows and documents must not recompile. A sequence may start within a document."""
    plain, docs = flash(monkeypatch), first + (torch.arange(512)[:, None] >= torch.tensor([150, 151])).sum(1)
    count = 3 + first
    qkv = torch.randn(3, 512, 2, 16, dtype=torch.float64, requires_grad=True)
    expected = dense_attention(*qkv, docs, window)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), qkv)]
    graphs = []
    torch._dynamo.reset()
    compiled = torch.compile(train_gpt.attend, dynamic=False, fullgraph=True,
                             backend=lambda graph, _: graphs.append(graph) or graph)
    for attend in train_gpt.attend, compiled:
        out = attend(*qkv.unbind(), document_table(docs, window, 361, count))
        ours = [out, *torch.autograd.grad(out.square().sum(), qkv)]
        for one, other in zip(ours, expected, strict=True):
            assert torch.allclose(one, other, atol=1e-12)
    compiled(*qkv.unbind(), document_table(docs * 0 + 1, window + 1, 512, 2))
    assert plain.calls == 5 and len(graphs) == 1


def test_a_model_with_flash_attention_is_the_same_model(tiny, monkeypatch):
    """Losses and gradients with paired heads, two windows and several documents."""
    config = dataclasses.replace(tiny, layers="PM S0M LM", backout_layer=1, micro_batch_tokens=512, num_heads=2, model_dim=16)
    model, plain = shaken(config), PlainFlashAttention(monkeypatch)
    x, y = torch.randint(BOS, (2, 512))
    x[[0, 150, 380]] = BOS
    results = []
    for model.flash in False, True:
        train_gpt.count_documents(model, x.numpy())
        model.zero_grad()
        loss, _ = model(x, y, train_gpt.Windows(200, 90))
        loss.backward()
        results.append([loss, *(p.grad for p in model.parameters())])
    assert plain.calls == 6
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    model(x, y, train_gpt.Windows(200, 90))
    assert plain.calls == 6, "the documents of this sequence were not counted"
    x[:28] = BOS
    for last, calls in (28, 9), (29, 9):  # 31 and the start of the sequence fill the table; 32 fall back to masks
        x[last] = BOS
        train_gpt.count_documents(model, x.numpy())
        model(x, y, train_gpt.Windows(200, 90))
        assert plain.calls == calls


@pytest.mark.parametrize("tokens", [1, 15, 48, 55, 130])
@pytest.mark.parametrize("window", [0, 1, 9, 40, 100, 200])
def test_attention_with_masks_in_pieces_is_that_of_the_definition(tokens, window, monkeypatch):
    """One piece or several, complete or not, with as many earlier keys as the window needs, or more."""
    monkeypatch.setitem(train_gpt.MASK_PIECE, "cpu", 16)
    docs = (torch.rand(tokens) < 0.1).cumsum(0)
    qkv = torch.randn(3, tokens, 2, 8, dtype=torch.float64, requires_grad=True)
    expected = dense_attention(*qkv, docs, window)
    expected = [expected, *torch.autograd.grad(expected.square().sum(), qkv)]
    for reach in {window, max(window, 72)}:
        mask, piece = train_gpt.mask_in_pieces(docs, window, reach, torch.float64), max(16, reach // 4)
        several = -(-tokens // piece), piece, reach + piece
        assert mask.shape == (several if reach + piece < tokens else (1, tokens, tokens))
        out = train_gpt.attend(*qkv.unbind(), mask)
        for ours, right in zip([out, *torch.autograd.grad(out.square().sum(), qkv)], expected):
            assert torch.allclose(ours, right, rtol=0, atol=1e-12)


def test_rotary_rotates_half_of_the_head_by_position(tiny):
    rotary = train_gpt.Rotary(tiny, 10)
    x = torch.randn(10, 2, 16)
    y = train_gpt.rotate(x, rotary.cos[:, None], rotary.sin[:, None])
    assert torch.allclose(y, reference.rotary(x, train_gpt.rotary_frequencies(16)), atol=1e-5)
    assert torch.equal(y[..., 4:8], x[..., 4:8]) and torch.equal(y[..., 12:], x[..., 12:])
    assert rotary.init_frequencies[0] == 1 and rotary.init_frequencies[3].item() == pytest.approx(1 / 1024)


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
    """The objective and the cross entropy, in pieces of any size: targets of -1 and beyond the sequence count nothing."""
    x, y = tokens_of(11, 64)
    y = y.clone()  # tokens_of returns views of one stream
    y[20] = -1
    model, windows = shaken(tiny), train_gpt.Windows(16, 8)
    model.loss_tokens = loss_tokens
    logits = logits_of(model, x, windows).double().log_softmax(-1)
    ahead = [-sum(logits[t, y[t + k]] for t in range(64 - k) if t + k != 20).item() for k in range(3)]
    for weights in (1.0,), (1.0, 0.0), (1.0, 0.5, 0.25), (0.3, 2.0):
        objective, cross_entropy = model(x, y, windows, weights)
        assert objective.item() == pytest.approx(sum(w * loss for w, loss in zip(weights, ahead)), rel=1e-6)
        assert cross_entropy.item() == pytest.approx(ahead[0], rel=1e-6) and not cross_entropy.requires_grad


def test_validation_is_the_mean_cross_entropy_of_the_next_token(tiny):
    """Whatever the weights of the objective are; without fp8, which is for training only."""
    config = dataclasses.replace(tiny, fp8_head=True, dtype="bfloat16", loss_weights=(1.0, 1.0))
    model, windows = shaken(config), train_gpt.Windows(16, 8)
    sequences = np.stack([some_documents(seed, 65).astype(np.int32) for seed in (1, 2, 3)])
    sequences[2, 40:] = -1
    loss, tokens = train_gpt.validate(model, sequences, windows, train_gpt.Comm(), torch.device("cpu"))
    assert model.training and tokens == 64 * 2 + 39
    model.lm_head.fp8, total = False, 0.0
    with torch.no_grad():
        for sequence, end in zip(sequences, (64, 64, 39)):
            x, y = torch.from_numpy(sequence[:-1]).clamp_min(0), torch.from_numpy(sequence[1:]).long()
            total += F.cross_entropy(logits_of(model, x, windows)[:end].double(), y[:end], reduction="sum").item()
    assert loss == pytest.approx(total / tokens, rel=1e-6)
    model.lm_head.fp8 = True
    in_fp8 = sum(model(torch.from_numpy(s[:-1]).clamp_min(0), torch.from_numpy(s[1:]).long(), windows)[1].item() for s in sequences)
    assert abs(in_fp8 / tokens - loss) > 1e-5, "fp8 makes no difference here, so nothing was compared"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fp8_head_is_near_the_bf16_head(device):
    if device == "cuda" and (not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9)):
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


@pytest.mark.parametrize("preset, x_scale, weight_scale, grad_scale", [
    ("speedrun", 768 ** 0.5 / 448, 2 ** -9, 1 / 448), ("frontier", 100 / 448, 1.6 / 448, 0.75 / 448)])
def test_the_fp8_head_has_the_scales_of_its_record(preset, x_scale, weight_scale, grad_scale, monkeypatch):
    """Each operand of the three products is a tensor divided by its scale, and rounded."""
    calls, product = [], train_gpt.fp8_product
    monkeypatch.setattr(train_gpt, "fp8_product", lambda *args, **kwargs: calls.append(args) or product(*args, **kwargs))
    torch.manual_seed(0)
    head = train_gpt.Head(dataclasses.replace(train_gpt.PRESETS[preset], model_dim=64, head_init=0.02), 128)
    x, grad = train_gpt.norm(torch.randn(32, 64)).bfloat16().requires_grad_(), (torch.rand(32, 128) - 0.5).bfloat16()
    head.uncapped_logits(x).backward(grad)
    scaled = {"x": (x, x_scale), "weight": (head.weight, weight_scale), "grad": (grad, grad_scale),
              "x.T": (x.T, x_scale), "weight.T": (head.weight.T, weight_scale), "grad.T": (grad.T, grad_scale)}
    for (a, b, *scales), names in zip(calls, (("x", "weight.T"), ("grad", "weight"), ("grad.T", "x")), strict=True):
        for operand, scale, (tensor, expected) in zip((a, b), scales, (scaled[name] for name in names), strict=True):
            assert scale == pytest.approx(expected, rel=1e-12)
            assert torch.equal(operand.float(), (tensor / scale).to(operand.dtype).float())


def rounded_to_e4m3(x):
    """A second implementation of the rounding to e4m3, half to even, in float64: three bits after the leading one."""
    step = 2.0 ** (np.floor(np.log2(np.maximum(np.abs(x), 2.0 ** -6))) - 3)
    return np.clip(np.rint(x / step) * step, -448, 448)


def in_e4m3(x):
    scale = np.abs(x).max() / 448
    return scale * rounded_to_e4m3(x / scale)


def test_the_label_smoothing_of_the_head_s_comment_gives_padding_nothing():
    """The comment's own code, on a vocabulary of 257 that is padded to 384."""
    code = re.search(r"leave out the padding:(.*?ignore_index=-1\))", inspect.getsource(train_gpt.Head.forward), re.S)[1]
    model = train_gpt.build_model(dataclasses.replace(train_gpt.PRESETS["laptop"], head_init=0.1, ngrams=()), train_gpt.Encoding(257, 256))
    head, targets = model.lm_head, torch.tensor([[3, 256, -1, 70]])
    x = head.uncapped_logits(torch.randn(4, 64))
    loss = eval(code.replace("#", "").strip(), {"F": F, "self": head, "x": x, "targets": targets})
    logs = head.softcap(x.detach()[:, :257]).log_softmax(1)
    assert loss.item() == pytest.approx(sum(-0.9 * logs[i, t].item() - 0.1 * logs[i].mean().item() for i, t in ((0, 3), (1, 256), (3, 70))))
    loss.backward()
    assert not head.weight.grad[257:].any() and head.weight.grad[:257].any() and len(head.weight) == 384


@pytest.mark.parametrize("h_scale", [1.0, 0.002])
def test_fp8_mlp_is_its_definition(tiny, h_scale):
    """Forward in e4m3, where h saturates with the small scale; backward with unrounded operands."""
    torch.manual_seed(0)
    mlp = train_gpt.MLP(dataclasses.replace(tiny, fp8_mlp=True))
    mlp.proj.data.normal_(0, 0.05)
    mlp.h_scale.fill_(h_scale)
    x = train_gpt.norm(torch.randn(48, 32)).requires_grad_()
    grad = torch.randn(48, 32)
    y = mlp(x)
    y.backward(grad)
    x64, fc, proj, grad64 = (t.detach().double().numpy() for t in (x, mlp.fc, mlp.proj, grad))
    a = np.maximum(in_e4m3(x64) @ in_e4m3(fc), 0)
    h8 = h_scale * rounded_to_e4m3(a ** 2 / h_scale)
    assert mlp.h_max.item() == pytest.approx((a ** 2).max(), rel=1e-6) and (h_scale == 1 or h8.max() < (a ** 2).max())
    grad_a = 2 * a * (grad64 @ proj)
    for ours, right in ((y, h8 @ in_e4m3(proj).T), (x.grad, grad_a @ fc.T), (mlp.fc.grad, x64.T @ grad_a), (mlp.proj.grad, grad64.T @ a ** 2)):
        assert np.linalg.norm(ours.detach().numpy() - right) < 1e-3 * np.linalg.norm(right)  # ties depend on the sums' order


def test_fp8_mlp_is_for_training_only(tiny):
    in_fp8, plain = (shaken(dataclasses.replace(tiny, fp8_mlp=fp8)) for fp8 in (True, False))
    x, y = tokens_of(3, 64)
    trained, evaluated = ([model.train(training)(x, y, train_gpt.Windows(16, 8))[1].item() for model in (in_fp8, plain)]
                          for training in (True, False))
    assert evaluated[0] == evaluated[1] == trained[1] != trained[0] == pytest.approx(trained[1], rel=0.01)
    assert not any("h_" in name for name, _ in plain.named_buffers())


def largest_h(comm, config, steps):
    """Train -> for each step, each MLP's (largest h of this rank, scale in the step); the states before and after a loaded one."""
    worker = train_gpt.Worker(config, comm, torch.device("cpu"), train_gpt.find_shards(config.train_files))
    shake(worker.model)
    found, mlps = [], [block.mlp for block in worker.model.blocks if block.mlp is not None]
    for i, mlp in enumerate(mlps):
        mlp.register_forward_pre_hook(lambda mlp, inputs, i=i: found[-1][i].append((
            np.square(np.maximum(in_e4m3(inputs[0].detach().double().numpy()) @ in_e4m3(mlp.fc.detach().double().numpy()), 0)).max(),
            mlp.h_scale.item())))
    for step in range(steps):
        found.append([[] for _ in mlps])
        plan = train_gpt.plan_of(config, step)
        worker.step(plan, worker.stream.next_batch(plan))
        assert all(mlp.h_max == 0 for mlp in mlps)
    state = worker.optimizer.state_dict()
    mlps[0].h_max.fill_(3)
    worker.optimizer.load_state_dict(state)
    assert mlps[0].h_max == 0
    return found, {name: x.item() for name, x in state.items() if name.endswith("/h_scale")}, mlps[0].h_scale.item()


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_next_step_s_scale_is_by_the_largest_h_of_all_micro_batches_and_ranks(tiny, corpus, on_ranks, ranks):
    config = dataclasses.replace(tiny, layers="- S0M LM M", backout_layer=2, fp8_mlp=True, adam_every=1, **corpus)
    results = on_ranks(ranks, largest_h, config, 3)
    scales = [1.0] * 3
    for of_ranks in zip(*(found for found, _, _ in results)):
        by_mlp = [[pair for rank in of_ranks for pair in rank[i]] for i in range(3)]
        assert all(len(pairs) == 8 for pairs in by_mlp)
        for pairs, scale in zip(by_mlp, scales):
            assert all(used == pytest.approx(scale, rel=1e-5) for _, used in pairs)
        scales = [1.8 / 448 * max(h for h, _ in pairs) for pairs in by_mlp]
    for _, state, loaded in results:
        assert [*state] == [f"blocks.{i}.mlp.proj/h_scale" for i in (1, 2, 3)]
        assert [*state.values()] == pytest.approx(scales, rel=1e-5) and loaded == state["blocks.1.mlp.proj/h_scale"]


def test_a_model_that_is_not_in_fp8_loads_a_state_with_scales(tiny, corpus):
    """A run may be resumed on GPUs without fp8."""
    of_fp8, plain = (train_gpt.Worker(dataclasses.replace(tiny, fp8_mlp=fp8, **corpus), train_gpt.Comm(), torch.device("cpu"),
                                       train_gpt.find_shards(corpus["train_files"])) for fp8 in (True, False))
    plain.optimizer.load_state_dict(of_fp8.optimizer.state_dict())
    assert all(torch.equal(x, of_fp8.model.get_parameter(name)) for name, x in plain.model.named_parameters())


def test_compiled_fp8_head_is_one_graph(tiny):
    """A graph break would keep the casts, the logits and the loss from fusing. Tracing needs no GPU."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = train_gpt.Head(dataclasses.replace(tiny, model_dim=64, dtype="bfloat16", fp8_head=True), 256)
    with torch.no_grad():
        head.weight.normal_(0, 0.02)
    x = train_gpt.norm(torch.randn(32, 64)).bfloat16().requires_grad_()
    y, weights = torch.randint(0, 256, (2, 32)), torch.tensor([1.0, 0.5])
    y[1, -1] = -1
    loss, cross_entropy = torch.compile(head.forward, backend="aot_eager", dynamic=False, fullgraph=True)(x, y, weights)
    loss.backward()
    gradients = [p.grad for p in (x, head.weight)]
    x.grad = head.weight.grad = None
    plain, plain_cross_entropy = head.forward(x, y, weights)
    plain.backward()
    assert loss.item() == pytest.approx(plain.item(), rel=1e-5)
    assert cross_entropy.item() == pytest.approx(plain_cross_entropy.item(), rel=1e-5)
    for gradient, p in zip(gradients, (x, head.weight)):
        assert gradient.norm() > 0 and (gradient - p.grad).norm() < 0.02 * p.grad.norm()


# training, step by step


def make_trainer(folder, config, comm=train_gpt.Comm()):
    """A worker in float64 on a shard in this folder, without zero parameters."""
    write_shard(folder / "train.bin", some_documents(21, 6000))
    shards = train_gpt.find_shards(str(folder / "train.bin"))
    torch.set_default_dtype(torch.float64)
    try:
        worker = train_gpt.Worker(dataclasses.replace(config, dtype="float64"), comm, torch.device("cpu"), shards)
    finally:
        torch.set_default_dtype(torch.float32)
    shake(worker.model)
    return worker


class PlainTraining:
    """The record's steps without buckets: a copy of the model computes logits, the loss is computed by hand; gradients
    are of the mean over micro-batches; Adam on the sum of two steps, eps before the bias correction; NorMuon by reference.py.

    groups: by the end of a parameter's name, (learning rate, beta1, beta2, decay) of Adam. muon: by the end of a name, the
    factor on the learning rate. units: by the end of a name, shape and axis of NorMuon's matrices."""

    def __init__(self, model, config, groups=None, muon=(("qkvo", 1.0), ("fc", 2.0), ("proj", 1.0), ("gate", 1.0)), units=()):
        self.c, self.model = config, copy.deepcopy(model)
        for module in self.model.modules():  # copied hooks would wait for the gathers of the other model
            module._forward_pre_hooks.clear()
        self.model.forward = lambda x, _, windows: logits_of(self.model, x, windows)
        self.p = {name: p.detach().double().clone() for name, p in model.named_parameters()}
        factors = {"scalars": 5, "lm_head.weight": 1, "embed.weight": 1 if config.untie_at else 75,
                   **{f"value_embeds.{i}.weight": 75 for i in range(3)}}
        decay = next((group.weight_decay for group in config.param_groups if group.kind == "head"), 0)
        groups = groups or {name: (config.adam_lr * factor, 0.65, 0.95, 0 if name == "scalars" else decay)
                            for name, factor in factors.items()}
        self.adam = {name: values for name in self.p for end, values in groups.items() if name.endswith(end)}
        self.moments = {name: [torch.zeros_like(self.p[name]) for _ in range(3)] for name in self.adam}
        self.muon = {name: reference.NorMuon(p, 4 if "qkvo" in name else 1, factor) for name, p in self.p.items()
                     for end, factor in muon if name.endswith(end) and name not in self.adam}
        for end, (shape, by_column) in dict(units).items():
            self.muon |= {name: reference.NorMuon(p, p.numel() // math.prod(shape), shape=shape, by_column=by_column)
                          for name, p in self.p.items() if name.endswith(f".attn.{end}")}
        assert {*self.adam, *self.muon} == {*self.p}
        self.frequencies, self.scale = train_gpt.rotary_frequencies(config.head_dim).double(), 0.1

    def step(self, step, micro_batches, long, short, momentum, factor=1.0, weights=(1.0,)):
        for p in self.p.values():
            p.requires_grad_().grad = None
        turned = torch.outer(torch.arange(len(micro_batches[0]) - 1), self.frequencies)
        buffers = {"rotary.cos": turned.cos(), "rotary.sin": turned.sin(), "rotary.scale": torch.tensor(self.scale)}
        objectives, entropies = [], []
        for tokens in micro_batches:
            x, y = torch.tensor(tokens[:-1]), tokens[1:]
            h = torch.func.functional_call(self.model, {**self.p, **buffers}, (x, x, train_gpt.Windows(long, short)))
            logs = h.log_softmax(-1)
            ahead = [-sum(logs[t, y[t + k]] for t in range(len(y) - k)) for k in range(len(weights))]
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
                    t, (lr, beta1, beta2, decay) = (step + 1) // 2, self.adam[name]
                    m.mul_(beta1).add_(total, alpha=1 - beta1)
                    v.mul_(beta2).add_(total.square(), alpha=1 - beta2)
                    change = lr * factor * math.sqrt(1 - beta2 ** t) / (1 - beta1 ** t) * m / (v.sqrt() + self.c.adam_eps)
                    p = p - change - torch.where(change * p > 0, (lr * factor) ** 2 * decay * p, 0)
                    total.zero_()
            self.p[name] = p.detach()
        return entropies

    def untie(self):
        """Start the embedding from the head, with its moments."""
        self.p["embed.weight"] = self.p["lm_head.weight"].clone()
        self.moments["embed.weight"] = [x.clone() for x in self.moments["lm_head.weight"]]
        self.model.tied = False


SCHEDULES = {  # (stages, values of each of six steps)
    "batch size": ((Stage(until=2, micro_batches=1), Stage(micro_batches=3)), lambda s: {"count": 1 if s < 2 else 3}),
    "sequence length": ((Stage(until=3, max_document_tokens=6), Stage(max_document_tokens=14)),
                        lambda s: {"longest": 6 if s < 3 else 14}),
    "loss weights": ((Stage(until=2, loss_weights=Ramp((1.0, 0.5), (1.0, 0.0))), Stage(loss_weights=(1.0, 0.25))),
                     lambda s: {"weights": (1, (0.5, 0.25)[s]) if s < 2 else (1, 0.25)}),
    "windows and rate": ((Stage(until=3, long_window=2, peak_lr_factor=Ramp(0.5, 1.0)),
                          Stage(extra_steps=3, long_window=5, peak_lr_factor=2.0)),
                         lambda s: {"long": 8 if s < 3 else 20, "short": 4 if s < 3 else 8, "peak": 0.5 + s / 6 if s < 3 else 2.0}),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_stages_train_as_a_plain_second_training_does(tmp_path, tiny, schedule):
    """Six steps, three Adam updates, across a change of stage: batches by a plain packing, losses and updates by hand.

    The worker returns the cross entropy, whatever the objective weighs."""
    stages, has = SCHEDULES[schedule]
    config = dataclasses.replace(tiny, stages=stages, num_steps=6, micro_batches=2, micro_batch_tokens=16, max_document_tokens=14,
                                 cooldown=0.0, adam_lr=0.001, adam_eps=1e-3)
    train_gpt.check_config(config, 1)
    worker = make_trainer(tmp_path, config)
    plain = PlainTraining(worker.model, config)
    stream = some_documents(21, 6000).tolist()
    pointer = 0
    for step in range(6):
        wanted = {"count": 2, "longest": 14, "weights": (1.0,), "long": 12, "short": 4, "peak": 1.0, **has(step)}
        batch = []
        for _ in range(wanted["count"]):
            held = []
            while len(held) < 17:  # documents from BOS to BOS; each is cut at the longest, the last one to fit
                end = next(i for i in range(pointer + 1, len(stream)) if stream[i] == BOS)
                held += stream[pointer:end][:wanted["longest"]]
                pointer = end
            batch.append(held[:17])
        if step == 3 and schedule == "windows and rate":
            plain.frequencies, plain.scale = train_gpt.stretch(plain.frequencies, plain.scale, 8, 20)
        momentum = 0.85 + 0.1 * step / 4 if step < 4 else 0.95 - 0.1 * (step - 4) / 2
        plan = train_gpt.plan_of(config, step)
        read = worker.stream.next_batch(plan)
        assert [one.tolist() for one in read] == batch, step
        losses = worker.step(plan, read)
        expected = plain.step(step, batch, wanted["long"], wanted["short"], momentum, wanted["peak"], wanted["weights"])
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4), step
    for name, p in worker.model.named_parameters():
        assert (p - plain.p[name]).norm() <= 1e-4 * plain.p[name].norm(), name


@pytest.mark.parametrize("lazy", [False, True])
def test_untying_decay_and_rates_train_as_a_plain_second_training_does(tmp_path, tiny, lazy):
    """Ten steps, tied until step 6. Lazy: until a gather is waited for, all parameters are NaN."""
    config = dataclasses.replace(
        tiny, stages=(Stage(long_window=3),), num_steps=10, micro_batches=2, micro_batch_tokens=16, max_document_tokens=14,
        cooldown=0.0, adam_lr=0.001, adam_eps=1e-3, untie_at=0.41, head_init=0.01,
        param_groups=(AdamGroup("head", weight_decay=2e4), AdamGroup("value_embeds", 75.0, weight_decay=2e4), MuonGroup("mlp_proj", lr_mul=4.0), MuonGroup("attn", lr_mul=0.5)), overlap_param_gather=lazy)
    train_gpt.check_config(config, 1)
    worker = make_trainer(tmp_path, config, comm=Hostile() if lazy else train_gpt.Comm())
    plain = PlainTraining(worker.model, config, muon=(("qkvo", 0.5), ("fc", 2.0), ("proj", 4.0), ("gate", 1.0)))
    plain.model.tied = True
    waiting = []  # at the start of each step's last forward: the parameters whose gathers are in flight
    worker.model.register_forward_pre_hook(lambda *_: waiting.append({
        slot.name for bucket in worker.optimizer.buckets if bucket.gather_handle is not None for slot in bucket.slots}))
    assert [train_gpt.plan_of(config, step).tied for step in (0, 5, 6, 7, 10)] == [True, True, True, False, False]
    for step in range(10):
        plan = train_gpt.plan_of(config, step)
        batch = worker.stream.next_batch(plan)
        if step == 6:
            sequences = np.stack(batch)  # a validation before this step still reads the head's weights
            loss = worker.validate(plan, sequences)[0]
            worker.model.embed.weight.data.add_(1)
            assert worker.validate(plan, sequences)[0] == loss
            plain.untie()
        losses = worker.step(plan, batch)
        expected = plain.step(step, [one.tolist() for one in batch], *plan.windows, plan.momentum)
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4), step
        if lazy and 0 < step < 6:  # tied: the forward waits for the head, and only for it
            assert "blocks.1.mlp.fc" in waiting[-2] and "lm_head.weight" not in waiting[-2], step
    worker.optimizer.finish_all_gathers()
    for name, p in worker.model.named_parameters():
        assert (p - plain.p[name]).norm() <= 1e-4 * plain.p[name].norm(), name
    assert not torch.equal(worker.model.embed.weight, worker.model.lm_head.weight)
    always_tied = dataclasses.replace(config, untie_at=1.0)
    assert train_gpt.plan_of(always_tied, 10).tied, "the last validation is of the model that was trained"
    train_gpt.load_parameters(worker.model, {"state": worker.optimizer.state_dict(), "tied": True})
    assert torch.equal(worker.model.embed.weight, worker.model.lm_head.weight)


def test_parameter_groups_train_as_a_plain_second_training_does(tmp_path, tiny):
    """Six steps, three Adam updates, with rates and decays large enough to show: each kind by its own row."""
    rows = ("head", 1.0, 0.5, 0.9, 9e4), ("embed", 3.0, 0.6, 0.8, 5e4), ("value_embeds", 7.0, 0.75, 0.95, 2e4), (
        "ngram_embeds", 5.0, 0.7, 0.85, 3e4), ("scalars", 2.0, 0.9, 0.99, 1e4), ("xsa_lambdas", 1.5, 0.8, 0.7, 4e4), (
        "gates", 0.5, 0.9, 0.98, 6e4), ("smear_gate", 0.2, 0.4, 0.6, 8e4), ("resid_lambdas", 4.0, 0.85, 0.9, 1e3), (
        "post_lambdas", 0.7, 0.6, 0.95, 2e3), ("mudd", 6.0, 0.7, 0.8, 4e3), ("mudd_biases", 3.0, 0.75, 0.85, 5e3)
    config = dataclasses.replace(
        tiny, stages=(Stage(long_window=3),), num_steps=6, micro_batches=2, micro_batch_tokens=16, max_document_tokens=14,
        cooldown=0.0, adam_lr=0.001, adam_eps=1e-3, ngrams=(train_gpt.Ngrams(2, 50, 8),), layers=XSA, value_gates=True,
        key_offset=True, mudd=True, sublayer_scales=True, muon_qk_heads=1, muon_beta2=0.9,
        param_groups=(*(AdamGroup(*row) for row in rows), MuonGroup("mlp_fc", lr_mul=1.5)))
    train_gpt.check_config(config, 1)
    worker = make_trainer(tmp_path, config)
    by_hand = {
        "lm_head.weight": (0.001, 0.5, 0.9, 9e4), "embed.weight": (0.003, 0.6, 0.8, 5e4), "scalars": (0.002, 0.9, 0.99, 1e4),
        "ngrams.0.weight": (0.005, 0.7, 0.85, 3e4), "smear_gate": (0.0002, 0.4, 0.6, 8e4), "xsa_lambda": (0.0015, 0.8, 0.7, 4e4),
        "resid_lambdas": (0.004, 0.85, 0.9, 1e3), "post_lambdas": (0.0007, 0.6, 0.95, 2e3),
        **{f"mudd.{place}.{name}": (0.006, 0.7, 0.8, 4e3) for place in ("layer", "head") for name in ("hidden", "out")},
        **{f"mudd.{place}.bias": (0.003, 0.75, 0.85, 5e3) for place in ("layer", "head")},
        **{f"value_embeds.{i}.weight": (0.007, 0.75, 0.95, 2e4) for i in range(3)},
        **{f"attn.{gate}": (0.0005, 0.9, 0.98, 6e4) for gate in ("gate", "value_gate")}}
    plain = PlainTraining(worker.model, config, by_hand, (("fc", 1.5), ("proj", 1.0)),
                          {"qk": ((16, 32), True), "vo": ((32, 32), False)})
    first = {name: p.clone() for name, p in plain.p.items()}
    for step in range(6):
        plan = train_gpt.plan_of(config, step)
        batch = worker.stream.next_batch(plan)
        losses = worker.step(plan, batch)
        expected = plain.step(step, [one.tolist() for one in batch], *plan.windows, plan.momentum)
        assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4), step
    for name, p in worker.model.named_parameters():
        assert (p - plain.p[name]).norm() <= 1e-6 * (first[name] - plain.p[name]).norm(), name


def test_frontier_s_plan_is_that_of_the_record():
    """By stage: end, tokens per step, longest document, windows in blocks, loss weights, learning-rate factors."""
    c, at = train_gpt.PRESETS["frontier"], {}
    for step in range(c.num_steps):
        plan = train_gpt.plan_of(c, step)
        key = (plan.micro_batches * plan.micro_batch_tokens, plan.max_document_tokens, *(w // 128 for w in plan.windows))
        at.setdefault(key, []).append(plan)
    assert [(plans[-1].step + 1, *key) for key, plans in at.items()] == [
        (423, 131_072, 896, 3, 1), (847, 262_144, 2048, 7, 3), (1270, 393_216, 2048, 11, 5), (1285, 393_216, 2048, 13, 6)]
    first, second, third, further = at.values()
    assert [plans[0].loss_weights for plans in at.values()] == [(1, 0.5, 0.25), (1, 0.5), (1,), (1,)]
    assert first[211].loss_weights == pytest.approx((1, 0.5, 0.25 * (1 - 211 / 423)))
    assert second[-1].loss_weights == pytest.approx((1, 0.5 / 424))
    assert {plan.prefix_weight for plan in first} == {0.25} and {plan.prefix_weight for plan in (*third, *further)} == {0}
    assert [plan.prefix_weight for plan in second] == pytest.approx([0.25 * (1 - i / 424) for i in range(424)])
    assert first[0].lr_factor == 1 and second[0].lr_factor == 1.52 and {plan.lr_factor for plan in further} == {0.15}
    left = (1270 - 1000) / (0.6 * 1270)  # share of the cooldown left at step 1000
    assert third[1000 - 847].lr_factor == pytest.approx(1.73 * left + (1 - left) * 0.15)
    assert [plans[0].tied for plans in at.values()] == [True, True, True, False] and third[1].unties, "after a cycle of Adam"
    assert train_gpt.plan_of(c, 1285).windows.long == 20 * 128
    assert (c.muon_lr, c.muon_beta2, c.muon_qk_heads) == (0.023, 0.9, 2)
    assert (c.head_init, c.value_init, c.output_init, c.resid_lambda_init) == (0.005, 0.01, 1, 1.1)
    assert (c.logit_cap, c.logit_shift, c.adam_every, c.adam_lr) == (23, 5, 2, 0.008)
    assert c.ngrams == (train_gpt.Ngrams(2, 50304 * 15 // 2, 768),) and c.key_offset and c.value_gates
    assert (c.fp8_x_scale, c.fp8_weight_scale, c.fp8_grad_scale) == (100 / 448, 1.6 / 448, 0.75 / 448)


@pytest.mark.parametrize("scheduled, first_untied", [(1270, 848), (1440, 962), (1775, 1186), (1776, 1186), (1777, 1186), (1780, 1188)])
def test_the_embedding_is_untied_after_the_first_adam_update_at_or_after_two_thirds(scheduled, first_untied):
    c = train_gpt.PRESETS["frontier"]
    extra = c.num_steps - train_gpt.scheduled_steps(c)
    c = dataclasses.replace(c, num_steps=scheduled + extra)
    plans = [train_gpt.plan_of(c, step) for step in range(first_untied - 4, first_untied + 4)]
    assert [plan.unties for plan in plans].index(True) == 4 and sum(plan.unties for plan in plans) == 1
    assert [plan.tied for plan in plans] == [True] * 5 + [False] * 3


SMALL_NETWORK = ("hidden", 1), ("out", 1), ("bias", 0)  # and their decays


def test_frontier_s_groups_are_those_of_the_record():
    """Adam: (learning rate over adam_lr, betas, decay over 0.005); NorMuon: factor on muon_lr; as in the record's table."""
    wanted = {
        "lm_head.weight": (1, 0.5, 0.95, 150), "embed.weight": (1, 0.5, 0.95, 150), "value_embeds.0.weight": (75, 0.75, 0.95, 5),
        "value_embeds.4.weight": (75, 0.75, 0.95, 5), "ngrams.0.weight": (75, 0.75, 0.95, 5), "scalars": (5, 0.9, 0.99, 0),
        "resid_lambdas": (5, 0.9, 0.95, 0), "post_lambdas": (1, 0.9, 0.95, 0), "blocks.1.attn.value_gate": (1, 0.9, 0.99, 1),
        "smear_gate": (0.01, 0.9, 0.99, 0), "gate_scale": (0.1, 0.9, 0.99, 0),
        **{f"token_gates.{i}.{name}": (0.1, 0.9, 0.99, decay) for i in (0, 1) for name, decay in SMALL_NETWORK},
        **{f"mudd.{place}.{name}": (0.25, 0.9, 0.99, decay) for place in ("layer", "head") for name, decay in SMALL_NETWORK}}
    muon = {"blocks.1.mlp.fc": 2, "blocks.1.mlp.proj": 4, "blocks.1.attn.qk": 1, "blocks.1.attn.vo": 1}
    config = small_frontier()
    specs = {spec.name: spec for spec in train_gpt.specs_of(config, train_gpt.build_model(config, ENCODING))}
    for name, values in wanted.items():
        rule = specs[name].rule
        assert (rule.lr / 0.008, rule.beta1, rule.beta2, rule.weight_decay / 0.005) == pytest.approx(values), name
        assert (rule.eps, rule.every, rule.fp32_moments) == (1e-10, 2, True), name
    assert {name for name in specs if name not in wanted} == {name for name in specs if ".attn." in name or ".mlp." in name or (
        "value_embeds" in name)} - wanted.keys()
    for name, factor in muon.items():
        rows, columns = specs[name].rule.unit(specs[name])
        assert specs[name].scale == pytest.approx(factor * max(1, rows / columns) ** 0.5), name
        assert specs[name].rule.lr == 0.023 and specs[name].rule.beta2 == 0.9


def test_every_group_is_compiled(tiny, monkeypatch):
    """Beyond its recompile limit torch only warns, and computes without compilation."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    monkeypatch.setattr(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    config = dataclasses.replace(tiny, layers="M S SM S0 S0M L LM L1 L1M P PM P0M", backout_layer=3, key_offset=True)
    model, (x, y) = shaken(config), tokens_of(5, 40)
    model.reach = train_gpt.longest_window(config)
    wanted = model(x, y, train_gpt.Windows(12, 5))[0].item()
    model.compile_parts()
    before = train_gpt.compile_stats()[0]
    assert model(x, y, train_gpt.Windows(12, 5))[0].item() == pytest.approx(wanted, rel=1e-5)
    assert train_gpt.compile_stats()[0] - before == 2 + 2, "layers 0 to 3, whose output is saved, and the others; head and smear"
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
    """Gradients are averaged over micro-batches; the average must not shrink when micro-batches are split."""
    seen = []
    for count, tokens, splits in (4, 16, 1), (2, 32, 2):
        config = dataclasses.replace(tiny, micro_batches=count, micro_batch_tokens=tokens, micro_batch_splits=splits)
        worker = make_trainer(tmp_path, config)
        worker.optimizer.step = lambda plan: None
        plan = train_gpt.plan_of(config, 0)
        losses = worker.step(plan, worker.stream.next_batch(plan))
        seen.append((losses, {slot.name: slot.grad.clone() for bucket in worker.optimizer.buckets for slot in bucket.slots}))
    assert seen[0][0] == seen[1][0] and len(seen[0][0]) == 4
    for name, grad in seen[0][1].items():
        assert grad.norm() > 0 and torch.allclose(seen[1][1][name], 2 * grad, rtol=1e-12), name


@pytest.mark.parametrize("loss_weight", [1.0, 1e-7])
def test_the_first_adam_step_is_the_record_s_formula(tmp_path, tiny, loss_weight):
    """p - lr * sqrt(1 - beta2) / (1 - beta1) * m / (sqrt(v) + eps), on the sum of two steps. torch adds eps elsewhere, which
    matters where gradients are small, as for the record's head, which starts at zero."""
    config = dataclasses.replace(tiny, micro_batches=2, micro_batch_tokens=16, loss_weights=(loss_weight,))
    worker = make_trainer(tmp_path, config)
    before = {name: p.detach().clone() for name, p in worker.model.named_parameters()}
    total = {}
    step, slots = worker.optimizer.step, [slot for bucket in worker.optimizer.buckets for slot in bucket.slots]

    def note_and_step(plan):  # after the second step the buckets hold the sum of both
        total.update({slot.name: slot.grad.clone() for slot in slots})
        step(plan)

    worker.optimizer.step = note_and_step
    for number in (0, 1):
        plan = train_gpt.plan_of(config, number)
        worker.step(plan, worker.stream.next_batch(plan))
    for name, multiplier in (("value_embeds.1.weight", 75), ("embed.weight", 75), ("lm_head.weight", 1), ("scalars", 5)):
        g, p = total[name], dict(worker.model.named_parameters())[name]
        m, v = (1 - 0.65) * g, (1 - 0.95) * g.square()
        moved = 0.008 * multiplier * math.sqrt(1 - 0.95) / (1 - 0.65) * m / (v.sqrt() + 1e-8)
        other = 0.008 * multiplier / (1 - 0.65) * m / ((v / (1 - 0.95)).sqrt() + 1e-8)
        assert (p - (before[name] - moved)).norm() <= 1e-9 * moved.norm(), name
        if loss_weight < 1:
            assert (moved - other).norm() > 1e-2 * moved.norm(), name


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
    results = [dense_attention(*qkv, docs, 200),
               train_gpt.attend(*on_gpu.unbind(), document_table(docs.to(gpu), 200, 722, 4)).float().cpu()]
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
        model.compile_parts()
    on_gpu, _ = model(x.to(gpu), y.to(gpu), windows)
    on_gpu.backward()
    assert on_gpu.item() == pytest.approx(loss.item(), rel=1e-3)
    for (name, p), q in zip(cpu.named_parameters(), model.parameters()):
        assert (p.grad - q.grad.cpu()).norm() <= 2e-2 * p.grad.norm(), name
