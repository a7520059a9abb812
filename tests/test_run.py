"""Whole runs, as a user starts them: the log, the verdict, determinism, and every way in which a run can go wrong."""

import dataclasses
import functools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import train_gpt
from conftest import TINY, some_documents, write_shard

ROOT = Path(train_gpt.__file__).parent


def flags(folder, corpus, **changes):
    values = {**TINY, **corpus, "log_dir": str(folder / "logs"), "target_val_loss": 3.0, **changes}
    return ["--preset", "speedrun", *(text for name, v in values.items() for text in (f"--{name}", str(v)))]


def torchrun(ranks, script, argv, **environment):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", str(script), *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def read_log(path):
    """(source, environment, JSON at the start, step lines, JSON at the end, last line)"""
    source, environment, rest = path.read_text().split("\n" + "=" * 100 + "\n")
    start, *steps, end, last = rest.splitlines()
    return source, environment, json.loads(start), steps, json.loads(end)["end"], last


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One finished run: (folder, flags of its corpus, what it printed, its log)."""
    folder = tmp_path_factory.mktemp("one")
    write_shard(folder / "toy_train_000001.bin", some_documents(1, 9000))
    write_shard(folder / "toy_val_000000.bin", some_documents(3, 1000))
    corpus = {"train_files": str(folder / "toy_train_*.bin"), "val_files": str(folder / "toy_val_*.bin")}
    command = [sys.executable, str(ROOT / "train_gpt.py"), *flags(folder, corpus, run_id="one", save_model="true", sample_tokens=20)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return folder, corpus, done.stdout, folder / "logs" / "one.txt"


def test_log_holds_the_whole_experiment(one):
    folder, corpus, printed, path = one
    source, environment, start, steps, end, last = read_log(path)
    assert source == (ROOT / "train_gpt.py").read_text().rstrip("\n") + "\n" or source + "\n" == (ROOT / "train_gpt.py").read_text()
    assert f"Running PyTorch {torch.__version__}" in environment
    assert start["run_id"] == "one" and start["preset"] == "speedrun" and start["ranks"] == 1
    assert start["config"]["model_dim"] == 32 and set(start["config"]) == {f.name for f in dataclasses.fields(train_gpt.Config)}
    shard = folder / "toy_train_000001.bin"
    assert start["shards"]["train"] == [{"name": shard.name, "tokens": 9000, "bytes": shard.stat().st_size,
                                         "sha256": train_gpt.file_sha256(shard)}]
    assert start["source_sha256"] == train_gpt.file_sha256(ROOT / "train_gpt.py") and start["hardware"]["cores"]
    trained = [line for line in steps if "val_loss" not in line]
    assert len(trained) == 12
    for i, line in enumerate(trained, 1):
        assert re.fullmatch(rf"step:{i}/12 train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d\.\d{{4}}", line), line
    validated = [line for line in steps if "val_loss" in line]
    assert [line.split(" ")[0] for line in validated] == ["step:0/12", "step:5/12", "step:10/12", "step:12/12"]
    for line in validated:
        assert re.fullmatch(r"step:\d+/12 val_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms", line) and line in printed
    times = [int(re.search(r"train_time:(\d+)ms", line)[1]) for line in steps]
    assert times == sorted(times)
    assert re.fullmatch(r"peak memory allocated: \d+ MiB reserved: \d+ MiB", last)
    assert f"val_loss:{end['final_val_loss']:.4f}" in validated[-1] and end["steps"] == 12 and end["train_tokens"] == 12 * 384
    assert end["val_tokens"] == 999 and end["compiles_after_warmup"] == 0
    assert end["state_hash"]["before_warmup"] == end["state_hash"]["after_warmup"] != end["final_state_hash"]
    assert end["validation_hash"]["before"] == end["validation_hash"]["after"]
    assert {"setup", "warmup", "compile", "validation"} <= set(end["seconds_outside_clock"])
    assert end["train_time_ms"] / 1000 + sum(end["seconds_outside_clock"].values()) == pytest.approx(end["wall_seconds"], abs=1.0)
    assert end["reached"] == (end["final_val_loss"] <= 3.0)
    assert ("target reached" if end["reached"] else "target missed") in printed and str(path) in printed
    assert f"preset speedrun: 1 rank(s) on {start['hardware']['device']}" in printed


def test_the_loss_falls(one):
    losses = [float(re.search(r"val_loss:([\d.]+)", line)[1]) for line in read_log(one[3])[3] if "val_loss" in line]
    assert losses[0] == pytest.approx(4.852, abs=0.001), "ln 128: the head begins at zero"
    assert losses[-1] < losses[0] - 0.5


def test_the_saved_model_gives_the_logged_loss_again(one):
    folder, corpus, _, path = one
    model, saved = train_gpt.load_model(path.with_suffix(".pt"))
    end = read_log(path)[4]
    sequences = train_gpt.validation_sequences(train_gpt.find_shards(corpus["val_files"]), 0, 64)
    loss, tokens = train_gpt.validate(model, sequences, train_gpt.Windows(*saved["windows"]), train_gpt.Comm(), torch.device("cpu"))
    assert loss == pytest.approx(end["final_val_loss"], rel=1e-6) and tokens == end["val_tokens"] and saved["step"] == 12
    with pytest.raises(train_gpt.RunError, match="holds no model"):
        train_gpt.load_model(path)


def test_two_ranks_read_the_same_tokens_and_reach_the_same_loss(one, tmp_path):
    folder, corpus, _, path = one
    done = torchrun(2, ROOT / "train_gpt.py", flags(tmp_path, corpus, run_id="two"))
    assert done.returncode == 0, done.stderr
    alone, two = read_log(path)[4], read_log(tmp_path / "logs" / "two.txt")[4]
    assert two["train_sha256"] == alone["train_sha256"] and two["val_tokens"] == alone["val_tokens"]
    assert two["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=1e-2)
    assert two["state_hash"]["before_warmup"] == two["state_hash"]["after_warmup"] == alone["state_hash"]["before_warmup"]
    again = torchrun(2, ROOT / "train_gpt.py", flags(tmp_path, corpus, run_id="again"))
    assert again.returncode == 0
    twice = read_log(tmp_path / "logs" / "again.txt")
    assert twice[4]["final_state_hash"] == two["final_state_hash"], "same seed, same ranks, other bytes"
    without_times = [[re.sub(r"train_time:\S+ step_avg:\S+", "", line) for line in read_log(tmp_path / "logs" / f"{name}.txt")[3]]
                     for name in ("two", "again")]
    assert without_times[0] == without_times[1]


def run_here(argv, capsys):
    """(exit status, stdout, stderr) of one rank in this process."""
    status = train_gpt.main(argv)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_another_seed_is_another_run(one, tmp_path, capsys):
    _, corpus, _, path = one
    status, _, _ = run_here(flags(tmp_path, corpus, run_id="seed", seed=1), capsys)
    assert status == 0 and read_log(tmp_path / "logs" / "seed.txt")[4]["final_state_hash"] != read_log(path)[4]["final_state_hash"]


def test_nothing_is_compiled_after_warm_up(one, tmp_path, capsys, monkeypatch):
    """Every kind of block, window and step is met in the warm-up; a backend that compiles quickly serves to count graphs."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    changes = dict(compile="on", windows="2 3 4", warmup_steps=10, num_steps=14, extension_steps=4, bank_mb=1000, val_len=96)
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="compiled", **changes), capsys)
    assert status == 0, errors
    end = read_log(tmp_path / "logs" / "compiled.txt")[4]
    assert end["compiles_after_warmup"] == 0
    parts = 3 + 2  # blocks with attention, with attention and a value table, with an MLP alone; the head; the skip
    rules = 4 + 3  # NorMuon on four shapes of matrices, Adam on three kinds of bank
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * parts + rules, "a graph serves every layer of its kind"
    status, _, _ = run_here(flags(tmp_path, one[1], run_id="cold", **{**changes, "warmup_steps": 0}), capsys)
    plain = run_here(flags(tmp_path, one[1], run_id="plain", **{**changes, "compile": "off"}), capsys)
    assert status == plain[0] == 0
    losses = [read_log(tmp_path / "logs" / f"{name}.txt")[4]["final_val_loss"] for name in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_a_lazy_gather_compiles_nothing_further(one, tmp_path, capsys, monkeypatch):
    """Its hooks wait outside of what is compiled: in it, every bank that has or has not come would be a variant."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    graphs = []
    for name, changes in (("eager-gather", {}), ("lazy-gather", {"lazy_gather": "true"})):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        changes.update(compile="on", bank_mb=1000, val_len=96, sample_tokens=5)
        status, _, errors = run_here(flags(tmp_path, one[1], run_id=name, **changes), capsys)
        assert status == 0, errors
        assert read_log(tmp_path / "logs" / f"{name}.txt")[4]["compiles_after_warmup"] == 0
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]


def test_compiles_after_warm_up_are_counted(one, tmp_path, capsys, monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    status, _, _ = run_here(flags(tmp_path, one[1], run_id="cold", compile="on", warmup_steps=0), capsys)
    assert status == 0 and read_log(tmp_path / "logs" / "cold.txt")[4]["compiles_after_warmup"] > 0


# what goes wrong


def test_an_existing_run_id_is_refused_and_its_log_left_alone(one, capsys):
    folder, corpus, _, path = one
    before = path.read_bytes()
    status, _, errors = run_here(flags(folder, corpus, run_id="one"), capsys)
    assert status == 1 and "run_id 'one' was used" in errors and path.read_bytes() == before


def test_a_log_folder_that_cannot_be_is_an_error(one, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "logs", tmp_path / "file"):
        status, _, errors = run_here(flags(tmp_path, one[1], log_dir=str(folder)), capsys)
        assert status == 1 and "cannot be written" in errors and "--log_dir" in errors


@pytest.mark.parametrize("room,left", [(1000, False), (len((ROOT / "train_gpt.py").read_bytes()) + 3300, True)])
def test_no_space_for_the_log(one, tmp_path, room, left):
    """A limit on the size of files stands for a full disk: at the opening nothing is left behind, later the lines stay."""
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py"), *flags(tmp_path, one[1], run_id="full")],
                          env={**os.environ, "OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True, timeout=120,
                          preexec_fn=lambda: (signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))))
    assert done.returncode == 1 and "cannot be written" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "logs" / "full.txt").exists() == left


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(one, tmp_path, capsys):
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="nan", adam_lr=1e38, val_every=0), capsys)
    log = (tmp_path / "logs" / "nan.txt").read_text()
    assert status == 1 and "training loss of step 3 is not finite" in errors
    assert "step:2/12" in log and log.splitlines()[-1].startswith("error: the training loss of step 3")


@pytest.mark.parametrize("changes,says", [
    ({"train_files": "nowhere/*.bin"}, "no shard matches"),
    ({"val_files": "nowhere/*.bin"}, "no shard matches"),
    ({"val_tokens": 64 * 100}, "validation needs 6401 tokens"),
    ({"num_steps": 4000}, "add shards"),
    ({"num_steps": 22}, "ran out"),
    ({"model_dim": 33}, "it must be model_dim, 33"),
])
def test_bad_input_is_an_error_before_anything_is_written(one, tmp_path, capsys, changes, says):
    status, _, errors = run_here(flags(tmp_path, one[1], **changes), capsys)
    assert status == 1 and says in errors and errors.startswith("train_gpt.py: rank 0: error: ") and not (tmp_path / "logs").exists()


def test_train_and_val_of_two_encodings_are_refused(one, tmp_path, capsys):
    write_shard(tmp_path / "v.bin", [256, 1, 2], vocab_size=257, bos_id=256)
    status, _, errors = run_here(flags(tmp_path, one[1], val_files=str(tmp_path / "v.bin")), capsys)
    assert status == 1 and "make both with one encoding" in errors


def test_three_ranks_are_refused_on_every_rank(one, tmp_path):
    done = torchrun(3, ROOT / "train_gpt.py", flags(tmp_path, one[1]))
    assert done.returncode != 0
    for rank in range(3):
        assert f"rank {rank}: error: 3 ranks; the batch is shared out evenly over 1, 2, 4 or 8" in done.stderr


def test_signs_of_another_launcher_are_an_error(one, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "two")
    status, _, errors = run_here(flags(tmp_path, one[1]), capsys)
    assert status == 1 and "WORLD_SIZE in the environment is 'two'" in errors and errors.count("\n") == 1
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    status, _, errors = run_here(flags(tmp_path, one[1]), capsys)
    assert status == 1 and "start them by torchrun" in errors and errors.count("\n") == 1


def test_no_space_for_a_trace(one, tmp_path):
    """/dev/full opens, and takes nothing: as a disk that fills up."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "full-rank0.json.gz").symlink_to("/dev/full")
    done = subprocess.run([sys.executable, str(ROOT / "train_gpt.py"), *flags(tmp_path, one[1], run_id="full", profile="3:3")],
                          env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "full-rank0.json.gz: cannot be written (No space left" in done.stderr
    assert "Traceback" not in done.stderr and not os.path.lexists(tmp_path / "logs" / "full-rank0.json.gz")


def test_rank_0_may_take_its_time_after_the_end_and_traces_bear_the_log_s_name(one, tmp_path):
    """Sampling takes longer than other ranks would wait for a collective."""
    changes = dict(timeout_s=5, sample_tokens=3, profile="3:4", run_id="")
    script = tmp_path / "slow.py"
    script.write_text(f"""
import sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
sample = train_gpt.sample
def slow(*arguments):
    time.sleep(8)
    return sample(*arguments)
train_gpt.sample = slow
sys.exit(train_gpt.main())
""")
    done = torchrun(2, script, flags(tmp_path, one[1], **changes))
    assert done.returncode == 0 and "the model says:" in done.stdout, done.stderr
    names = sorted(path.name for path in (tmp_path / "logs").iterdir())
    run_id = names[-1].removesuffix(".txt")
    assert names == [f"{run_id}-rank0.json.gz", f"{run_id}-rank1.json.gz", f"{run_id}.txt"]


FAULTS = {
    "raise": "raise train_gpt.RunError('the shard went away')",
    "bug": "raise ValueError('a mistake in the code')",
    "kill": "os.kill(os.getpid(), signal.SIGKILL)",
    "sleep": "time.sleep(100)",
}


@pytest.mark.parametrize("fault,heard", [("raise", "rank 1 failed: the shard went away"), ("bug", "rank 1 failed: ValueError"),
                                         ("kill", "(another rank did not answer|terminated)"),
                                         ("sleep", "another rank did not answer .*--timeout_s 6")])
def test_a_failure_of_one_rank_ends_all_and_says_why(one, tmp_path, fault, heard):
    """Rank 1 fails in its third step while rank 0 waits for it in a collective."""
    script = tmp_path / "faulty.py"
    script.write_text(f"""
import os, signal, sys, time
sys.path.insert(0, {str(ROOT)!r})
import train_gpt
step = train_gpt.Trainer.step
def faulty(self, number, batch):
    if os.environ["RANK"] == "1" and number == 7:
        {FAULTS[fault]}
    return step(self, number, batch)
train_gpt.Trainer.step = faulty
signal.signal(signal.SIGTERM, train_gpt.on_sigterm)
sys.exit(train_gpt.main())
""")
    began = time.monotonic()
    done = torchrun(2, script, flags(tmp_path, one[1], run_id="faulty", timeout_s=6 if fault == "sleep" else 60))
    assert done.returncode != 0 and time.monotonic() - began < 45
    log = (tmp_path / "logs" / "faulty.txt").read_text()
    assert "step:7/12" in log and "step:8/12" not in log
    assert re.search(f"rank 0: error: {heard}", done.stderr) and re.match(f"error: {heard}", log.splitlines()[-1])
    assert ("Traceback" in done.stderr.split("torch/distributed/elastic/")[0]) == (fault == "bug")
