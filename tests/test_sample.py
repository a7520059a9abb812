"""sample.py: logits of the model itself, sampling, printable text, error messages, quiet ends."""

import dataclasses
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

import logs
import sample
import train_gpt
from conftest import (
    TINY,
    logits_of,
    some_documents,
    tiny_frontier,
    wait_until,
    write_gpt2_tokens,
)
from train_gpt import Encoding, RunError, Windows

BYTES = Encoding(257, 256)


def shaken(config, encoding=BYTES):
    """A model without zero parameters, so that every path carries something."""
    model = train_gpt.build_model(config, encoding).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(
                torch.randn_like(p)
                * (
                    0.1
                    if "lambda" in p.kind or p.kind == "scalars" or not p.dim()
                    else 0.3 * p.shape[-1] ** -0.5
                )
            )
    return model


def save(path, config, encoding=BYTES):
    """Write what save_model would write."""
    train_gpt.save_file(
        path,
        {
            "program": train_gpt.source_files(config)[0].name,
            "config": train_gpt.json_of(config),
            "step": config.num_steps,
            **encoding._asdict(),
            "state": {name: p.detach() for name, p in shaken(config, encoding).named_parameters()},
        },
    )
    return path


def a_text(tokens=100):
    """Short documents, a long one, and again short ones."""
    text = [256 if token == 63 else token for token in some_documents(5, tokens).tolist()]
    return [7, 8] + text[:30] + [256] + [token % 200 for token in text[30:70]] + text[70:]


@pytest.mark.parametrize(
    "config",
    [
        train_gpt.Config(**TINY),
        train_gpt.Config(
            **TINY | dict(ngrams=(train_gpt.Ngrams(2, 40, 8), train_gpt.Ngrams(4, 70, 32)))
        ),
        tiny_frontier(),
        tiny_frontier(untie_at=1.0),
        tiny_frontier(
            ngrams=(train_gpt.Ngrams(2, 40, 32), train_gpt.Ngrams(3, 30, 8)), ngram_hash="record92"
        ),
    ],
    ids=[
        "record 44",
        "n-grams that share few rows",
        "record 89",
        "record 89, still tied",
        "tables of record 92",
    ],
)
def test_logits_are_those_of_the_model(config, tmp_path):
    """At every ninth length of a text, for a saved model that is read again; blocks of windows
    have four tokens."""
    config = dataclasses.replace(config, val_len=256)
    train_gpt.check_config(config, 1)
    trained = sample.load_model(save(tmp_path / "m.pt", config))
    text = a_text()
    original = shaken(config)
    plan = train_gpt.plan_of(config, config.num_steps)
    model = trained.model
    original.apply_schedule(plan)
    assert type(model) is config.model_type and not model.training and len(model.rotary.windows) > 1
    assert getattr(model, "tied", False) == (getattr(config, "untie_at", 0) == 1)
    expected = logits_of(original, torch.tensor(text), plan.windows).detach().numpy()
    for end in range(1, len(text) + 1, 9):
        np.testing.assert_allclose(
            sample.next_logits(trained, text[:end]), expected[end - 1], rtol=0, atol=1e-4
        )
    assert expected.std(0).mean() > 0.1, "all tokens have the same logits, so nothing was compared"


class Biased(train_gpt.GPT):
    """A model with one more learned parameter, which sample.py does not know."""

    def __init__(self, config, encoding):
        super().__init__(config, encoding)
        self.mix = train_gpt.parameter(torch.zeros(config.model_dim), "scalars")

    def trunk(self, tokens, windows):
        return super().trunk(tokens, windows).cumsum(0) * self.mix  # reads all earlier tokens


def test_a_new_parameter_of_the_model_changes_the_text(tiny, tmp_path, monkeypatch, capsys):
    def greedy(path):
        model, _, windows = sample.load_model(path)
        tokens = [256, *b"def "]
        for _ in range(20):
            tokens.append(int(logits_of(model, torch.tensor(tokens), windows)[-1, :257].argmax()))
        assert (
            sample.main([str(path), "--prompt", "def ", "--tokens", "20", "--temperature", "0"])
            == 0
        )
        assert (text := capsys.readouterr().out) == "".join(shown(tokens[1:])) + "\n"
        return text

    plain = greedy(save(tmp_path / "plain.pt", tiny))
    monkeypatch.setattr(train_gpt, "GPT", Biased)
    assert greedy(save(tmp_path / "biased.pt", tiny)) != plain


def test_a_bf16_model_with_an_fp8_head_is_computed_in_float32(tiny, tmp_path):
    config = dataclasses.replace(tiny, dtype="bfloat16", fp8_head=True, val_len=256)
    trained = sample.load_model(save(tmp_path / "m.pt", config))
    original = shaken(config)
    text = a_text()
    plan = train_gpt.plan_of(config, config.num_steps)
    exact = shaken(dataclasses.replace(config, dtype="float32"))
    train_gpt.load_parameters(exact, {"state": dict(original.named_parameters())})
    logits = sample.next_logits(trained, text)
    assert logits.dtype == np.float32
    for one, gap in (exact, 1e-4), (original, 0.5):
        one.apply_schedule(plan)
        np.testing.assert_allclose(
            logits, logits_of(one, torch.tensor(text), plan.windows)[-1].detach(), rtol=0, atol=gap
        )


@pytest.mark.parametrize(
    "short",
    [
        train_gpt.Config(
            **TINY
            | dict(
                layers="SM SM", backout_layer=0, ngrams=(train_gpt.Ngrams(2, 40, 8),), val_len=48
            )
        ),
        tiny_frontier(layers="P0inM SM", backout_layer=0, token_gates=(0,), val_len=48),
    ],
    ids=["record 44", "record 89"],
)
def test_a_text_may_be_longer_than_the_model_s_longest_sequence(short):
    """Where the windows reach less far than that, the logits are those of the whole text."""
    longer = shaken(dataclasses.replace(short, val_len=512))
    text = a_text(300)
    windows = Windows(4, 4)
    assert sample.longest_context(short) == 48
    expected = logits_of(longer, torch.tensor(text), windows)[-1].detach()
    logits = sample.next_logits(sample.Trained(shaken(short), short, windows), text)
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "encoding, prompt, begins",
    [(BYTES, "", [10]), (BYTES, "ab", [97, 98]), (Encoding(64, 63), "", [])],
)
def test_a_text_of_bytes_begins_a_line(
    tiny, tmp_path, monkeypatch, capsys, encoding, prompt, begins
):
    """A document of training may be a piece that begins inside a word."""
    seen = []
    monkeypatch.setattr(
        sample,
        "next_logits",
        lambda trained, tokens: seen.append([*tokens]) or np.zeros(384, np.float32),
    )
    assert (
        sample.main(
            [
                str(save(tmp_path / "m.pt", tiny, encoding)),
                "--prompt",
                prompt,
                "--tokens",
                "2",
                "--temperature",
                "0",
            ]
        )
        == 0
    )
    assert (
        seen[0] == [encoding.bos_id, *begins] and capsys.readouterr().out == f"{prompt}\\x00\\x00\n"
    )


def test_draw():
    logits = np.float32([1.0, 3.0, 2.0, -50.0])
    generator = np.random.default_rng(0)
    assert {sample.draw(logits, 0, 0, generator) for _ in range(5)} == {1}
    assert {sample.draw(logits, 1e-308, 0, generator) for _ in range(5)} == {1}
    assert {sample.draw(logits, 5.0, 2, generator) for _ in range(50)} == {1, 2}
    assert {sample.draw(logits, math.inf, 10, generator) for _ in range(100)} == {0, 1, 2, 3}
    counts = (
        np.bincount([sample.draw(logits, 0.5, 0, generator) for _ in range(2000)], minlength=4)
        / 2000
    )
    np.testing.assert_allclose(counts, scipy.special.softmax(logits / 0.5), rtol=0, atol=0.04)


def shown(data, after=()):
    return list(sample.show([*data, *after], sample.vocabulary_of(BYTES, ""), 256))


def test_bytes_of_a_character_are_held_back_and_what_a_terminal_obeys_is_spelled_out():
    assert shown("aé€".encode()) == ["a", "", "é", "", "", "€"]
    assert "".join(shown(b"\xc3", after=[256, 0x61])) == "\ufffd" + sample.BORDER + "a", (
        "a document ends within a character"
    )
    assert shown(b"a\xe2\x82") == ["a", "", ""], "the last character lacks a byte"
    assert (
        "".join(shown("\x1b[2J\r\x07\x00\u202e\x85\t\n".encode()))
        == "\\x1b[2J\\r\\x07\\x00\\u202e\\x85\t\n"
    )


@pytest.fixture
def saved(tiny, tmp_path):
    (tmp_path / "logs" / "race").mkdir(parents=True)
    return save(tmp_path / "logs" / "run.pt", tiny)


def test_without_a_path_the_latest_model_speaks_and_a_seed_decides(
    saved, tiny, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(logs, "HOME", tmp_path / "logs")
    monkeypatch.chdir(tmp_path)
    other = save(tmp_path / "logs" / "newer.pt", dataclasses.replace(tiny, seed=5))
    os.utime(other, (1, 1))
    (tmp_path / "logs" / "race" / "newest.pt").write_text("of a race, which may be of other data")

    def say(*flags):
        assert (
            sample.main(
                [*flags, "--tokens", "30", "--temperature", "1.5", "--top_k", "50", "--prompt", "ü"]
            )
            == 0
        )
        return capsys.readouterr()

    latest = say()
    assert (
        latest.err == "latest: logs/run.pt\n"
        and latest.out.startswith("ü")
        and latest.out == say(str(saved)).out
    )
    assert latest.out != say("--seed", "1").out
    os.utime(other)
    assert say().err == "latest: logs/newer.pt\n"


@pytest.mark.parametrize(
    "flags,status,words",
    [
        (["nowhere.pt"], 1, "nowhere.pt: No such file"),
        (["run.txt"], 1, "run.txt is a log; name a model, which ends in .pt"),
        (["."], 1, "Is a directory"),
        ([__file__], 1, "not a saved model"),
        ([], 2, "latest: no *.pt in"),
        (["--tokens", "-3"], 2, "-3 is not a number of at least 0"),
        (["--tokens", "many"], 2, "invalid int value"),
        *(
            (words.split(), 2, f"argument {words.split()[0]}")
            for words in ("--temperature -1", "--temperature nan", "--top_k -1", "--seed -1")
        ),
        (["--temprature", "1"], 2, "unrecognized arguments: --temprature"),
    ],
)
def test_each_wrong_use_is_answered_in_one_line(
    flags, status, words, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(logs, "HOME", tmp_path)
    try:
        assert sample.main(flags) == status
    except SystemExit as error:
        assert error.code == status
    printed = capsys.readouterr()
    assert (
        words in printed.err
        and printed.err.count("\n") == 1
        and printed.err.startswith("sample.py: error: ")
    )
    assert not printed.out


def nan(content):
    content["state"]["embed.weight"][:] = math.nan
    return content


@pytest.mark.parametrize(
    "write,change,words",
    [
        (
            train_gpt.save_file,
            lambda c: c | {"config": None},
            "does not describe a model of this version of train_gpt.py (AttributeError",
        ),
        (train_gpt.save_file, lambda c: c | {"config": {"layers": 5}}, "does not describe a model"),
        (
            train_gpt.save_file,
            lambda c: c | {"program": "other.py"},
            "does not describe a model of this version of other.py (KeyError",
        ),
        (
            train_gpt.save_file,
            lambda c: c | {"vocab_size": 100},
            "embed.weight is [128, 32] here and [384, 32] in the saved model",
        ),
        (train_gpt.save_file, nan, "the model's logits are not finite"),
        (
            lambda path, content: torch.save(content, path),
            nan,
            "its content does not match its digest",
        ),
    ],
)
def test_a_file_without_a_usable_model_is_answered_in_one_line(write, change, words, saved, capsys):
    write(saved, change(torch.load(saved, weights_only=True)))
    assert sample.main([str(saved)]) == 1
    printed = capsys.readouterr()
    assert (
        words in printed.err
        and printed.err.count("\n") == 1
        and printed.err.startswith("sample.py: error: ")
    )
    assert not printed.out


def test_a_prompt_that_the_vocabulary_lacks(tmp_path, tiny, capsys):
    few = Encoding(64, 63)
    path = save(tmp_path / "few.pt", tiny, few)
    assert sample.main([str(path), "--prompt", "12 + 3?"]) == 1
    assert "no token for b'?'" in capsys.readouterr().err, "63 is BOS"
    assert sample.main([str(path), "--prompt", "x"]) == 1
    assert "no token for b'x'" in capsys.readouterr().err
    assert sample.main([str(path), "--prompt", "12 + 3", "--tokens", "4"]) == 0
    with pytest.raises(RunError, match="character 1 is not valid UTF-8"):
        sample.encode_prompt("a\ud800", sample.vocabulary_of(BYTES, ""), BYTES)
    assert sample.encode_prompt("a\udcff", sample.vocabulary_of(BYTES, ""), BYTES) == [
        97,
        255,
    ], "a byte of the command line"
    with pytest.raises(RunError, match="has 1000 tokens"):
        sample.vocabulary_of(Encoding(1000, 999), "")


def test_gpt2s_vocabulary_lies_beside_the_shards_or_its_lack_is_named(tmp_path, monkeypatch):
    gpt2 = Encoding(50257, 50256)
    train_files = str(tmp_path / "x_train_*.bin")
    with pytest.raises(
        RunError,
        match=f"is missing; write it by .venv/bin/python data/gpt2.py {tmp_path} on a host with",
    ):
        sample.vocabulary_of(gpt2, train_files)
    (tmp_path / "gpt2.tiktoken").write_bytes(b"IQ== 0\n")
    with pytest.raises(RunError, match="is damaged; write it by"):
        sample.vocabulary_of(gpt2, train_files)
    write_gpt2_tokens(tmp_path)
    monkeypatch.setattr("socket.socket.connect", lambda *_: pytest.fail("the network was asked"))
    vocabulary = sample.vocabulary_of(gpt2, train_files)
    assert sample.encode_prompt("Hello world", vocabulary, gpt2) == [15496, 995]
    tokens = sample.encode_prompt("naïve 日本 🙂", vocabulary, gpt2)
    assert "".join(sample.show(tokens, vocabulary, 50256)) == "naïve 日本 🙂"
    assert "" in list(sample.show(tokens, vocabulary, 50256))[:-1], (
        "half of a character was not held back"
    )
    with pytest.raises(RunError, match="is not valid UTF-8"):
        sample.encode_prompt("a\udcff", vocabulary, gpt2)


def start(*flags):
    return subprocess.Popen(
        [sys.executable, sample.__file__, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_ctrl_c_and_a_reader_that_leaves_end_it_without_a_word(saved, script):
    speak = (str(saved), "--prompt", "x", "--tokens", "100000000")
    early = start("--help")
    maps = Path(f"/proc/{early.pid}/maps")
    while maps.exists() and early.poll() is None and "torch" not in maps.read_text():
        time.sleep(0.01)
    early.send_signal(signal.SIGINT)  # while torch is imported
    left = start(*speak)
    late = script(sample.__file__, *speak)
    wait_until(lambda: late.outputs[0].exists() and late.outputs[0].read_text())
    late.send_signal(signal.SIGINT)
    left.stdout.read(10)
    left.stdout.close()
    _, errors = late.communicate(timeout=600)
    assert late.returncode == 130 and not errors
    assert left.wait(600) == -signal.SIGPIPE and not left.stderr.read()
    if maps.parent.parent.exists():
        assert early.wait(600) == 130
    assert not early.stderr.read()
