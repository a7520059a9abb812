"""The model against record 44 written a second time, its mask, its rotary, its head in fp8."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention

import reference
import train_gpt
from conftest import some_documents

BOS = 63


def shaken(config, seed=0):
    """A model none of whose parameters is zero, so that every path carries something."""
    model = train_gpt.build_model(config, vocab_size=64, bos_id=BOS)
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.1 if name == "scalars" else 0.3 * p.shape[-1] ** -0.5))
    return model


def tokens_of(seed, count):
    stream = torch.from_numpy(some_documents(seed, count + 1).astype("int64"))
    return stream[:-1], stream[1:]


@pytest.mark.parametrize("long,short", [(12, 4), (40, 20)])
def test_loss_and_gradients_are_those_of_the_record(tiny, long, short):
    model = shaken(tiny)
    x, y = tokens_of(5, 40)
    loss = model(x, y, train_gpt.Windows(long, short))
    loss.backward()
    plain = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    expected = reference.loss(plain, x.tolist(), y.tolist(), long, short, BOS, tiny.num_heads)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    for name, p in model.named_parameters():
        wanted = plain[name].grad
        assert (p.grad - wanted).norm() <= 1e-5 * wanted.norm(), name
        assert wanted.norm() > 0, f"{name} does not matter to the loss, so nothing was compared"


def test_initial_values_are_those_of_the_record(tiny):
    model = train_gpt.build_model(dataclasses.replace(tiny, model_dim=64, head_dim=32), 1000, 999)
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
    assert p["scalars"].tolist() == [-1.5] * 6 + [1.0, 0.0] * 12 + [0.5] * 24 + [0.0, 0.5]
    assert "blocks.7.attn.qkvo" not in p and "blocks.0.mlp.fc" not in p and "blocks.7.mlp.fc" in p


def test_record_model_has_the_record_s_size():
    with torch.device("meta"):
        c = train_gpt.Config()
        model = train_gpt.GPT(vocab_size=50257, bos_id=50256, layers=train_gpt.parse_layers(c.layers), model_dim=768, num_heads=6,
                              gate_dim=12, backout_layer=8, max_tokens=128, loss_tokens=128, dtype=torch.bfloat16)
    matrices = sum(p.numel() for p in model.parameters() if p.dtype == torch.float32 and p.dim() == 2)
    assert matrices == 32 * 768 * 3072
    assert model.embed.weight.numel() == model.lm_head.weight.numel() == 50304 * 768 and len(model.value_embeds) == 3


def test_a_later_token_changes_no_earlier_logits(tiny):
    model = shaken(tiny).eval()
    x, _ = tokens_of(6, 64)
    windows = train_gpt.Windows(16, 8)
    before = model.logits(x, windows)
    for at in (1, 17, 40, 63):
        changed = x.clone()
        changed[at] = (changed[at] + 5) % 60
        after = model.logits(changed, windows)
        assert torch.equal(before[:at], after[:at]) and not torch.equal(before[at], after[at])


def test_attention_stays_inside_document_and_window():
    docs = torch.tensor([0, 0, 0, 0, 1, 1, 1, 2])
    mask = train_gpt.dense_mask(docs, window=2)
    for q in range(8):
        for k in range(8):
            assert mask[q, k].item() == (k <= q <= k + 2 and docs[q] == docs[k]), (q, k)


@pytest.mark.parametrize("window", [0, 1, 100, 128, 129, 300, 1000])
def test_flex_attention_sees_what_the_dense_mask_sees(window):
    """The block lists may only leave out what the predicate forbids, and call full only what it allows throughout."""
    generator = torch.Generator().manual_seed(window)
    docs = (torch.rand(512, generator=generator) < 0.005).cumsum(0)
    q, k, v = torch.randn(3, 512, 2, 16, generator=generator).unbind(0)
    blocks = train_gpt.block_mask(docs, window)
    by_blocks = train_gpt.attend(q, k, v, blocks)
    by_dense = train_gpt.attend(q, k, v, train_gpt.dense_mask(docs, window))
    assert torch.allclose(by_blocks, by_dense, atol=2e-5)
    dense = train_gpt.dense_mask(docs, window).view(4, 128, 4, 128).transpose(1, 2)
    for i in range(4):
        partial = set(blocks.kv_indices[0, 0, i, :blocks.kv_num_blocks[0, 0, i]].tolist())
        full = set(blocks.full_kv_indices[0, 0, i, :blocks.full_kv_num_blocks[0, 0, i]].tolist())
        assert full == {j for j in range(4) if dense[i, j].all()}
        assert partial >= {j for j in range(4) if dense[i, j].any()} - full and not partial & full


def test_rotary_turns_half_of_the_head_by_position():
    rotary = train_gpt.Rotary(16, 10, torch.float32)
    x = torch.randn(10, 2, 16)
    y = train_gpt.rotate(x, rotary.cos, rotary.sin)
    assert torch.allclose(y, reference.rotary(x, train_gpt.rotary_frequencies(16)), atol=1e-5)
    assert torch.equal(y[..., 4:8], x[..., 4:8]) and torch.equal(y[..., 12:], x[..., 12:])
    assert rotary.frequencies[0] == 1 and rotary.frequencies[3].item() == pytest.approx(1 / 1024)


def test_stretch_keeps_fast_turns_and_slows_slow_ones():
    frequencies, scale = train_gpt.stretch(torch.tensor([1.0, 0.02, 1e-3, 0.0]), 0.1, 384, 896)
    assert frequencies[0] == 1.0, "turns more than 32 times in the old window"
    turns = 384 * 0.02 / (2 * math.pi)
    stays = (turns - 1) / 31
    assert frequencies[1].item() == pytest.approx(0.02 * (384 / 896 + stays * (1 - 384 / 896)))
    assert frequencies[2].item() == pytest.approx(1e-3 * 384 / 896) and frequencies[3] == 0
    assert scale == pytest.approx(0.1 * (0.2 * math.log(896 / 384) + 1))


def test_loss_in_parts_is_the_loss(tiny):
    x, y = tokens_of(7, 64)
    y = torch.cat([y[:-3], torch.full((3,), -1)])
    model = shaken(tiny)
    windows = train_gpt.Windows(16, 8)
    model.loss_tokens = 64
    whole = model(x, y, windows)
    model.loss_tokens = 24
    assert model(x, y, windows).item() == pytest.approx(whole.item(), rel=1e-6)
    by_hand = F.cross_entropy(model.logits(x, windows)[:-3], y[:-3], reduction="sum")
    assert whole.item() == pytest.approx(by_hand.item(), rel=1e-6)


def test_fp8_head_is_near_the_bf16_head():
    torch.manual_seed(0)
    x = train_gpt.norm(torch.randn(64, 128)).bfloat16().requires_grad_()
    weight = (torch.randn(256, 128) * 0.02).bfloat16().requires_grad_()
    grad = (torch.randn(64, 256) * 0.3).clamp(-1, 1).bfloat16()
    results = []
    for product in (F.linear, train_gpt.FP8Linear.apply):
        x.grad = weight.grad = None
        y = product(x, weight)
        y.backward(grad)
        results.append([t.detach().float() for t in (y, x.grad, weight.grad)])
    for plain, fp8 in zip(*results):
        error = ((plain - fp8).norm() / plain.norm()).item()
        assert 0 < error < 0.06, error


def test_compiled_fp8_head_is_one_graph():
    """A break in it would keep the casts, the logits and the loss from fusing; no GPU is needed to trace it."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = train_gpt.Head(256, 64, torch.bfloat16, fp8=True)
    with torch.no_grad():
        head.weight.normal_(0, 0.02)
    x = train_gpt.norm(torch.randn(32, 64)).bfloat16().requires_grad_()
    y = torch.randint(0, 256, (32,))
    compiled = torch.compile(head.forward, backend="aot_eager", dynamic=False, fullgraph=True)
    compiled(x, y).backward()
    gradient, x.grad = x.grad, None
    head.forward(x, y).backward()
    assert gradient.norm() > 0 and torch.allclose(gradient, x.grad, atol=1e-2)


def test_sampled_text_is_decided_by_the_seed(tiny):
    model = shaken(dataclasses.replace(tiny, val_len=train_gpt.SAMPLE_CONTEXT))
    windows = train_gpt.Windows(16, 8)
    one, two = (train_gpt.sample(model, windows, 30, 64, seed=3) for _ in range(2))
    assert one == two and 0 < len(one) <= 30 and max(one) < 64
    assert one != train_gpt.sample(model, windows, 30, 64, seed=4)


# on a GPU


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here: fp8, FlexAttention's kernels and the compiled blocks are tested only where there is one")
    return torch.device("cuda")


@pytest.mark.gpu
def test_flex_attention_on_gpu_is_the_cpu_s_attention(gpu):
    docs = (torch.rand(1024) < 0.005).cumsum(0)
    q, k, v = torch.randn(3, 1024, 2, 64).unbind(0)
    cpu = train_gpt.attend(q, k, v, train_gpt.dense_mask(docs, 200))
    on_gpu = train_gpt.attend(q.to(gpu), k.to(gpu), v.to(gpu), train_gpt.block_mask(docs.to(gpu), 200))
    assert torch.allclose(cpu, on_gpu.cpu(), atol=5e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_gpu_gives_the_cpu_s_loss_and_gradients(gpu, tiny, compiled):
    config = dataclasses.replace(tiny, model_dim=128, num_heads=2, head_dim=64, micro_tokens=256, batch_tokens=2048)
    x, y = tokens_of(8, 256)
    windows = train_gpt.Windows(128, 64)
    cpu = shaken(config)
    loss = cpu(x, y, windows)
    loss.backward()
    model = shaken(config).to(gpu)
    if compiled:
        model.compile_parts()
    on_gpu = model(x.to(gpu), y.to(gpu), windows)
    on_gpu.backward()
    assert on_gpu.item() == pytest.approx(loss.item(), rel=1e-3)
    for (name, p), q in zip(cpu.named_parameters(), model.parameters()):
        assert (p.grad - q.grad.cpu()).norm() <= 2e-2 * p.grad.norm(), name


@pytest.mark.gpu
def test_fp8_head_on_gpu_is_near_bf16(gpu):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no fp8")
    torch.manual_seed(0)
    x = train_gpt.norm(torch.randn(256, 768, device=gpu)).bfloat16().requires_grad_()
    weight = (torch.randn(1024, 768, device=gpu) * 0.02).bfloat16().requires_grad_()
    grad = (torch.randn(256, 1024, device=gpu) * 0.3).clamp(-1, 1).bfloat16()
    results = []
    for product in (F.linear, train_gpt.FP8Linear.apply):
        x.grad = weight.grad = None
        y = product(x, weight)
        y.backward(grad)
        results.append([t.detach().float() for t in (y, x.grad, weight.grad)])
    for plain, fp8 in zip(*results):
        assert (plain - fp8).norm() < 0.06 * plain.norm()
