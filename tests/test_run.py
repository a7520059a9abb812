"""Whole runs, as a user starts them: the log, the verdict, determinism, and every way in which a
run can go wrong."""

import dataclasses
import errno
import functools
import gc
import gzip
import hashlib
import json
import os
import re
import resource
import signal
import struct
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import sample
import train_gpt
from conftest import (
    TINY,
    TORCHRUN,
    Script,
    as_flags,
    forked,
    some_documents,
    write_corpus,
    write_shard,
)

ROOT = Path(train_gpt.__file__).parent


BEFORE_MAIN_S = 0.5  # imports, for example


def flags(folder, corpus, **changes):
    """Of a run even smaller than TINY: four layers, two micro-batches."""
    values = {
        **TINY,
        "layers": "- S0M LM M",
        "backout_layer": 2,
        "micro_batches": 2,
        **corpus,
        "log_dir": str(folder / "logs"),
        "target_val_loss": 3.0,
        **changes,
    }
    return ["--preset", "speedrun", *as_flags(values)]


class Done(NamedTuple):
    """What became of a rank."""

    status: int
    out: str
    err: str


def _rank(argv, environment, setup, out, err):
    """One rank in a process of its own, as `python train_gpt.py` would be, but for the import of
    torch."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.environ.update(environment)
    signal.signal(signal.SIGUSR1, train_gpt.signals.handle)
    if setup is not None:
        setup(int(environment["RANK"]))
    sys.exit(train_gpt.main(train_gpt.PRESETS, argv))


def launch(folder, *argvs, setup=None, timeout=600, **environment):
    """A rank for each list of flags, as torchrun starts them, each prepared by setup(rank) -> the
    Done of each. Like torchrun it holds the store, and ends the others when one has failed."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=600)
    )
    ranks = len(argvs)
    processes = []
    files = []
    for rank, argv in enumerate(argvs):
        of_rank = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "TORCHELASTIC_RESTART_COUNT": 0,
            "OMP_NUM_THREADS": 1,
            **environment,
        }
        files.append([folder / f"{name}-{rank}-{time.monotonic_ns()}" for name in ("out", "err")])
        of_rank = {key: str(v) for key, v in of_rank.items()}
        processes.append(forked(_rank, argv, of_rank, setup, *map(str, files[-1]), daemon=True))
    end = time.monotonic() + timeout
    failed = None
    while any(process.exitcode is None for process in processes):
        assert time.monotonic() < end, "the ranks do not end: " + " ".join(
            err.read_text() for _, err in files
        )
        if failed is None and any(process.exitcode for process in processes):
            failed = time.monotonic()
            for process in processes:
                process.terminate()
        if failed is not None and time.monotonic() > failed + 300:
            for process in processes:
                process.kill()
        time.sleep(0.02)
    return [
        Done(process.exitcode, out.read_text(), err.read_text())
        for process, (out, err) in zip(processes, files)
    ]


def one_rank(folder, argv, setup=None, **environment):
    return launch(folder, argv, setup=setup, **environment)[0]


def read_log(path):
    """(source, environment, JSON at the start, step lines, JSON at the end, last line)"""
    source, environment, rest = path.read_text().split("\n" + "=" * 100 + "\n")
    start, *steps, end, last = rest.splitlines()
    return source, environment, json.loads(start), steps, json.loads(end)["end"], last


def run_here(argv, capsys, presets=train_gpt.PRESETS):
    """(exit status, stdout, stderr) of one rank in this process."""
    gc.freeze()  # the run before unfroze all
    status = train_gpt.main(presets, argv)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """One finished run: (folder, flags of its corpus, what it printed, its log)."""
    folder = tmp_path_factory.mktemp("one")
    corpus = write_corpus(folder, train=(9000,))
    run = Script(
        [
            str(ROOT / "train_gpt.py"),
            *flags(folder, corpus, run_id="one", save_model="true", check_grads="true"),
        ],
        {**os.environ, "OMP_NUM_THREADS": "1"},
        functools.partial(time.sleep, BEFORE_MAIN_S),
        folder / "out",
        folder / "err",
    )
    printed, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    return folder, corpus, printed, folder / "logs" / "one.txt"


def test_log_holds_the_whole_experiment(one):
    folder, corpus, printed, path = one
    source, environment, start, steps, end, last = read_log(path)
    assert (
        hashlib.sha256((source + "\n").encode()).hexdigest() == start["source_sha256"]
        or hashlib.sha256(source.encode()).hexdigest() == start["source_sha256"]
    )
    assert f"{os.cpu_count()} cores" in environment
    assert start["run_id"] == "one" and start["preset"] == "speedrun" and start["ranks"] == 1
    assert start["config"]["model_dim"] == 32 and set(start["config"]) == {
        f.name for f in dataclasses.fields(train_gpt.Config)
    }
    shard = folder / "toy_train_000001.bin"
    assert start["shards"]["train"] == [
        {
            "name": shard.name,
            "tokens": 9000,
            "bytes": shard.stat().st_size,
            "sha256": hashlib.sha256(shard.read_bytes()).hexdigest(),
        }
    ]
    trained = [line for line in steps if "val_loss" not in line]
    assert len(trained) == 12
    for i, line in enumerate(trained, 1):
        assert re.fullmatch(
            rf"step:{i}/12 train_time:\d+ms step_avg:\d+\.\d\dms train_loss:\d\.\d{{4}}"
            r" grad_norm:[\d.]+",
            line,
        ), line
    validated = [line for line in steps if "val_loss" in line]
    assert [line.split(" ")[0] for line in validated] == [
        "step:0/12",
        "step:5/12",
        "step:10/12",
        "step:12/12",
    ]
    for line in validated:
        assert re.fullmatch(
            r"step:\d+/12 val_loss:\d\.\d{4} train_time:\d+ms step_avg:\d+\.\d\dms", line
        ) and (line in printed) == (":12/" not in line)
    times = [int(re.search(r"train_time:(\d+)ms", line)[1]) for line in steps]
    assert times == sorted(times)
    assert re.fullmatch(r"peak memory allocated: \d+ MiB reserved: \d+ MiB", last)
    assert (
        f"val_loss:{end['final_val_loss']:.4f}" in validated[-1]
        and end["steps"] == 12
        and end["train_tokens"] == 12 * 96
    )
    assert (
        start["vocab_size"] == 64
        and end["val_tokens"] == 999
        and end["compiles_after_warmup"] == end["resumed"] == 0
    )
    assert (
        end["state_hash"]["before_warmup"]
        == end["state_hash"]["after_warmup"]
        != end["final_state_hash"]
    )
    assert end["changed_by_validation"] == 0 and re.fullmatch("[0-9a-f]{64}", end["model_hash"])
    assert {"setup", "warmup", "compile", "validation"} <= set(end["seconds_outside_clock"])
    assert end["seconds_outside_clock"]["joining"] > BEFORE_MAIN_S, "the process began earlier"
    assert end["train_time_ms"] / 1000 + sum(
        end["seconds_outside_clock"].values()
    ) == pytest.approx(end["wall_seconds"], abs=1.0)
    assert end["reached"] == (end["final_val_loss"] <= 3.0)
    assert str(path) in printed
    assert all(float(line.rpartition(":")[2]) > 0 for line in steps[2:] if "train_loss" in line)


def losses_of(path, kind):
    return [
        float(re.search(rf"{kind}_loss:([\d.]+)", line)[1])
        for line in read_log(path)[3]
        if f"{kind}_loss" in line
    ]


def test_the_loss_falls_from_the_logarithm_of_the_vocabulary(one):
    """ln 128: the head begins at zero. What is logged of training is the mean per token, as in
    validation."""
    for kind in ("val", "train"):
        losses = losses_of(one[3], kind)
        assert losses[0] == pytest.approx(4.852, abs=0.001) and losses[-1] < losses[0] - 0.5, kind


def test_the_digest_is_that_of_the_tokens_packed_anew(one):
    tokens = some_documents(1, 9000).tolist()
    at = 0
    total = 0
    for step in range(12):
        for place in range(2):
            held = []
            while len(held) < 49:
                end = tokens.index(63, at + 1)
                held += tokens[at:end][:40]
                at = end
            text = struct.pack("<QQ", step, place) + np.array(held[:49], dtype="<u2").tobytes()
            total += int(hashlib.sha256(text).hexdigest(), 16)
    assert read_log(one[3])[4]["train_digest"] == f"{total % 2**256:064x}"


def test_the_saved_model_gives_the_logged_loss_again(one):
    folder, corpus, _, path = one
    model, _, windows = sample.load_model(path.with_suffix(".pt"))
    end = read_log(path)[4]
    sequences = train_gpt.validation_sequences(train_gpt.find_shards(corpus["val_files"]), 0, 64)
    loss, tokens = train_gpt.validate(
        model, sequences, windows, train_gpt.Comm(), torch.device("cpu")
    )
    assert loss == pytest.approx(end["final_val_loss"], rel=1e-6) and tokens == end["val_tokens"]
    assert train_gpt.load_file(path.with_suffix(".pt"))["step"] == 12
    with pytest.raises(train_gpt.RunError, match="is a log; name a model"):
        sample.load_model(path)


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param((TORCHRUN, "--standalone", "--nproc_per_node=2"), marks=pytest.mark.slow),
        (ROOT / "launch" / "ranks.py", 2),
    ],
)
def test_two_ranks_read_the_same_tokens_and_reach_the_same_loss(one, tmp_path, script, launcher):
    """Two steps are profiled, and gathers go on when the profile ends, which once crashed ranks
    that torchrun started at their very end."""
    run = script(
        *launcher,
        ROOT / "train_gpt.py",
        OMP_NUM_THREADS="1",
        *flags(
            tmp_path,
            one[1],
            run_id="two",
            val_every=0,
            profile="3:4",
            overlap_param_gather="true",
        ),
    )
    _, errors = run.communicate(timeout=600)
    assert run.returncode == 0, errors
    alone = read_log(one[3])[4]
    _, _, start, _, two, _ = read_log(tmp_path / "logs" / "two.txt")
    assert two["train_digest"] == alone["train_digest"] and two["val_tokens"] == alone["val_tokens"]
    assert two["final_val_loss"] == pytest.approx(alone["final_val_loss"], rel=1e-2)
    assert losses_of(tmp_path / "logs" / "two.txt", "train")[:4] == pytest.approx(
        losses_of(one[3], "train")[:4], abs=1e-3
    )
    assert (
        two["state_hash"]["before_warmup"]
        == two["state_hash"]["after_warmup"]
        == alone["state_hash"]["before_warmup"]
    )
    assert [host["ranks"] for host in start["hosts"]] == [[0, 1]]
    traces = sorted((tmp_path / "logs").glob("*.json.gz"))
    assert [path.name.partition(".")[0] for path in traces] == ["two-rank0", "two-rank1"]
    for path in traces:
        names = {event.get("name") for event in json.loads(gzip.open(path).read())["traceEvents"]}
        assert {"ProfilerStep#3", "ProfilerStep#4", "forward", "backward", "step"} <= names
        assert any(str(name).startswith("launch ") for name in names)


@pytest.mark.parametrize(
    "model_dim, environment, threads",
    [(32, {}, 1), (256, {}, train_gpt.count_cores()), (32, {"OMP_NUM_THREADS": "3"}, None)],
)
def test_a_small_model_trains_on_one_thread(
    model_dim, environment, threads, one, tmp_path, capsys, monkeypatch
):
    """Unless the user says otherwise: on a busy machine each of two threads waits for the other."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    chosen = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(train_gpt, "TrainingLoop", mock.MagicMock())
    status, _, errors = run_here(flags(tmp_path, one[1], model_dim=model_dim), capsys)
    assert status == 0 and chosen == [threads] * (threads is not None), errors


def test_an_idea_has_places_around_each_step_and_around_training(
    one, tmp_path, capsys, monkeypatch
):
    seen = []
    places = ("before_step", "before_update", "after_step")
    for name in ("before_training", *places):
        monkeypatch.setattr(
            train_gpt.Worker,
            name,
            lambda self, plan=None, name=name: seen.append((name, plan and plan.step)),
        )
    monkeypatch.setattr(
        train_gpt.Worker, "after_training", lambda self: self.model.lm_head.weight.data.zero_()
    )
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="places", warmup_steps=2), capsys)
    assert status == 0, errors
    in_steps = [
        [(name, step) for step in steps for name in places]
        for steps in (range(2), range(TINY["num_steps"]))
    ]
    assert seen == [*in_steps[0], ("before_training", None), *in_steps[1]]
    end = read_log(tmp_path / "logs" / "places.txt")[4]
    assert end["final_val_loss"] == pytest.approx(np.log(128)), (
        "with a head of zeros all tokens are equally likely"
    )
    assert end["changed_by_validation"] == 0


@pytest.mark.slow
def test_nothing_is_compiled_after_warm_up(one, tmp_path, capsys, monkeypatch):
    """Every kind of block, window and step is met in the warm-up; a backend that compiles quickly
    serves to count graphs. Gathers that the next forward waits for compile nothing further: their
    hooks run outside of what is compiled."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    changes = dict(
        compile="on",
        stages=(
            "Stage(1/3, long_window=2), Stage(2/3, long_window=3), Stage(long_window=4),"
            " Stage(extra_steps=4, long_window=11)"
        ),
        warmup_steps=10,
        num_steps=14,
        # two of each kind
        bucket_mb=1000,
        val_len=96,
        layers="S0M S1M SM SM LM+3 LM+1 M M",
        backout_layer=4,
    )
    parts = 2 + 2  # layers 0 to 3 and 4 to 7; smear and head
    rules = 4 + 3  # NorMuon on four shapes of matrices, Adam on three kinds of bucket
    for name, lazy in (("compiled", "false"), ("overlapping", "true")):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        status, _, errors = run_here(
            flags(tmp_path, one[1], run_id=name, overlap_param_gather=lazy, **changes), capsys
        )
        assert status == 0, errors
        assert read_log(tmp_path / "logs" / f"{name}.txt")[4]["compiles_after_warmup"] == 0
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert graphs == 2 * parts + rules, "a graph serves four layers"
    status, _, errors = run_here(
        flags(tmp_path, one[1], run_id="plain", **{**changes, "compile": "off"}), capsys
    )
    assert status == 0, errors
    losses = [
        read_log(tmp_path / "logs" / f"{name}.txt")[4]["final_val_loss"]
        for name in ("compiled", "overlapping", "plain")
    ]
    assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-3)
    torch._dynamo.reset()
    cold = dict(
        compile="on",
        warmup_steps=0,
        num_steps=2,
        stages="Stage(long_window=3)",
        layers="- SM",
        backout_layer=1,
    )
    status, _, _ = run_here(flags(tmp_path, one[1], run_id="cold", **cold), capsys)
    assert status == 0 and read_log(tmp_path / "logs" / "cold.txt")[4]["compiles_after_warmup"] > 0


def test_a_collection_on_the_clock_does_not_look_through_what_there_was_before(
    one, tmp_path, capsys, monkeypatch
):
    frozen = []
    record = train_gpt.TrainLosses.record
    gc.unfreeze()  # what conftest.py froze

    def recorded(*values):
        frozen.append(gc.get_freeze_count())
        record(*values)

    monkeypatch.setattr(train_gpt.TrainLosses, "record", recorded)
    status, _, errors = run_here(
        flags(tmp_path, one[1], num_steps=3, stages="Stage(long_window=3)", run_id="frozen"), capsys
    )
    assert status == 0, errors
    assert len(frozen) == 6 and min(frozen[3:]) > 10_000 and gc.get_freeze_count() == 0


def test_what_was_compiled_stays_in_the_checkout_unless_the_environment_says_otherwise(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    with pytest.raises(SystemExit):
        train_gpt.main(train_gpt.PRESETS, ["--no_such_flag"])
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(ROOT / ".cache" / "torchinductor")
    assert os.environ["TRITON_CACHE_DIR"] == "/elsewhere"


# what a run goes on from


def test_n_gram_tables_begin_anew_so_many_steps_before_the_end(one, tiny):
    """After a reset only the rows that the step reads are other than zero, in the tables and in
    Adam's state."""
    config = dataclasses.replace(
        tiny,
        **one[1],
        layers="S0M LM",
        backout_layer=0,
        ngrams=(train_gpt.Ngrams(2, 4096, 16), train_gpt.Ngrams(3, 4096, 8)),
        lazy_tables=True,
        adam_every=1,
        epochs=100,
        num_steps=7,
        ngram_reset=3,
    )
    assert [
        plan.step for step in range(7) if (plan := train_gpt.plan_of(config, step)).resets_ngrams
    ] == [1, 4]
    worker = train_gpt.Worker(
        config, train_gpt.Comm(), torch.device("cpu"), train_gpt.find_shards(config.train_files)
    )
    touched = {}
    for step in range(5):
        plan = train_gpt.plan_of(config, step)
        batch = worker.stream.next_batch(plan)
        worker.step(plan, batch)
        touched = {} if plan.resets_ngrams else touched
        tokens = torch.from_numpy(np.stack(batch)[:, :-1].astype(np.int32))
        for i, rows in enumerate(worker.model.rows_read(tokens).values()):
            touched.setdefault(i, set()).update(rows.flatten().tolist())
        worker.optimizer.finish_all_gathers()
        state = worker.optimizer.state_dict()
        for i, table in enumerate(worker.model.ngrams):
            for x in (
                table.weight,
                *(
                    value.view(table.weight.shape)
                    for name, value in state.items()
                    if name.startswith(f"ngrams.{i}.") and value.numel() == table.weight.numel()
                ),
            ):
                rows = {*x.detach().any(1).nonzero().flatten().tolist()}
                assert rows <= touched[i], (step, i)
                assert not step or len(rows) > len(touched[i]) / 2, (
                    "the head starts at zero, so step 0 has no gradients"
                )


class NoValues(TorchDispatchMode):
    """Fails where the host would wait for a GPU to have computed a value: by item(), bool(), or
    sizes that it computes."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op._opname not in (
            "_local_scalar_dense",
            "nonzero",
            "masked_select",
        ), "the host would wait for a GPU"
        return op(*args, **(kwargs or {}))


def test_a_step_reads_no_value_of_a_tensor(one, tiny, monkeypatch):
    """Not that of the loss for a message, for example, whose text no mode of dispatch sees."""
    monkeypatch.setattr(
        torch.Tensor, "__repr__", lambda x: pytest.fail("the host would wait for a GPU")
    )
    config = dataclasses.replace(
        tiny,
        **one[1],
        layers="- S0M LM M",
        backout_layer=2,
        micro_batches=2,
        check_grads=False,
        clip_norm=0.0,
    )
    worker = train_gpt.Worker(
        config, train_gpt.Comm(), torch.device("cpu"), train_gpt.find_shards(config.train_files)
    )
    for step in range(3):
        plan = train_gpt.plan_of(config, step)
        batch = worker.stream.next_batch(plan)
        with NoValues():
            worker.step(plan, batch)


def test_the_state_s_hash_covers_all_that_training_goes_on_from(one, tiny):
    config = dataclasses.replace(tiny, **one[1], layers="- S0M LM M", backout_layer=2)
    worker = train_gpt.Worker(
        config, train_gpt.Comm(), torch.device("cpu"), train_gpt.find_shards(config.train_files)
    )
    bucket = worker.optimizer.buckets[0]

    def count():
        bucket.updates += 1

    changes = {
        "nothing": lambda: None,
        "rotary": lambda: worker.model.rotary.set_windows((12, 28)),
        "tables": lambda: worker.model.rotary.cos[5].add_(1e-3),
        "parameter": lambda: bucket.slots[0].param.data.add_(1e-3),
        "state": lambda: bucket.state["v"].add_(1e-3),
        "updates": count,
        "position": lambda: setattr(worker.stream, "position", train_gpt.Position(0, 3, 40)),
        "digest": lambda: setattr(worker.stream, "digest", 7),
    }
    seen = [train_gpt.state_hash(worker)]
    for name, change in changes.items():
        change()
        seen.append(train_gpt.state_hash(worker))
        assert (seen[-1] == seen[-2]) == (name == "nothing"), name


def test_a_step_asks_the_file_system_nothing_on_the_clock(one, tmp_path, capsys, monkeypatch):
    clocks = []
    asked = []
    exists = Path.exists
    monkeypatch.setattr(
        train_gpt.Clock, "start", lambda self: clocks.append(self) or setattr(self, "running", True)
    )
    monkeypatch.setattr(
        Path,
        "exists",
        lambda path: asked.append(bool(clocks and clocks[0].running)) or exists(path),
    )
    assert (
        run_here(flags(tmp_path, one[1], run_id="asks"), capsys)[0] == 0
        and asked
        and not any(asked)
    )


def test_a_warm_up_that_leaves_something_behind_shows_in_the_log(
    one, tmp_path, capsys, monkeypatch
):
    warm_up = train_gpt.Worker.warm_up

    def forgetful(self, *args):
        warm_up(self, *args)
        self.stream.position = train_gpt.Position(0, 3, 40)

    monkeypatch.setattr(train_gpt.Worker, "warm_up", forgetful)
    status, _, _ = run_here(
        flags(tmp_path, one[1], run_id="behind", num_steps=4, stages="Stage(long_window=3)"), capsys
    )
    hashes = read_log(tmp_path / "logs" / "behind.txt")[4]["state_hash"]
    assert status == 0 and hashes["before_warmup"] != hashes["after_warmup"]


# what goes wrong


def limit_files(room, rank):
    """A limit on the size of files stands for a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))


@pytest.mark.parametrize(
    "room,left", [(1000, False), (len((ROOT / "train_gpt.py").read_bytes()) + 5000, True)]
)
def test_no_space_for_the_log(one, tmp_path, room, left):
    """At the opening nothing is left behind, later the lines stay."""
    done = one_rank(
        tmp_path, flags(tmp_path, one[1], run_id="full"), functools.partial(limit_files, room)
    )
    assert (
        done.status == 1
        and "(File too large); free space" in done.err
        and "Traceback" not in done.err
    )
    assert (tmp_path / "logs" / "full.txt").exists() == left


def test_a_loss_that_is_not_finite_stops_the_run_with_its_step(one, tmp_path, capsys):
    status, _, errors = run_here(
        flags(tmp_path, one[1], run_id="nan", adam_lr=1e38, val_every=0), capsys
    )
    log = (tmp_path / "logs" / "nan.txt").read_text()
    assert status == 1 and "training loss of step 3 is not finite" in errors
    assert "step:2/12" in log and log.splitlines()[-1].startswith(
        "error: the training loss of step 3"
    )


@pytest.mark.parametrize(
    "changes,says",
    [
        ({"train_files": "nowhere/*.bin"}, "no shard matches"),
        ({"val_files": "nowhere/*.bin"}, "no shard matches"),
        ({"val_tokens": 64 * 100}, "validation needs 6401 tokens"),
        ({"num_steps": 4000}, "add shards"),
        ({"num_steps": 85}, "ran out"),
        ({"model_dim": 33}, "model_dim is 33; give a multiple of 4 * num_heads, 8"),
        ({"stages": "Stage(until=1/2)"}, "stages end at step 6, and num_steps is 12"),
        ({"val_files": "HERE/other.bin"}, "make both with one encoding"),
        # it is not waited for
        ({"train_files": "HERE/pipe_*.bin"}, "pipe_1.bin: not a regular file; delete it"),
        *(
            (
                {"log_dir": f"HERE/other.bin{within}"},
                f"other.bin{within}: cannot be read or written",
            )
            for within in ("", "/logs")
        ),
    ],
)
def test_bad_input_is_an_error_before_anything_is_written(one, tmp_path, capsys, changes, says):
    write_shard(tmp_path / "other.bin", [256, 1, 2], vocab_size=257, bos_id=256)
    os.mkfifo(tmp_path / "pipe_1.bin")
    changes = {
        name: v.replace("HERE", str(tmp_path)) if isinstance(v, str) else v
        for name, v in changes.items()
    }
    status, _, errors = run_here(flags(tmp_path, one[1], **changes), capsys)
    assert (
        status == 1
        and says in errors
        and errors.startswith("train_gpt.py: rank 0: error: ")
        and errors.count("\n") == 1
    )
    assert not (tmp_path / "logs").exists()


def test_signs_of_another_launcher_are_an_error(one, tmp_path, capsys, monkeypatch):
    for world, says in (
        ("two", "WORLD_SIZE in the environment is 'two'"),
        ("2", "start them by torchrun"),
        ("3", "the stage from step 0 on has 2 micro-batches, which 3 ranks cannot share"),
    ):
        monkeypatch.setenv("WORLD_SIZE", world)
        monkeypatch.delenv("MASTER_ADDR", raising=False)
        status, _, errors = run_here(flags(tmp_path, one[1]), capsys)
        assert status == 1 and says in errors and errors.count("\n") == 1


def lose_stdout(way, rank):
    if way == "gone":
        reader, writer = os.pipe()
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
    else:  # as Python does where it was closed before the start
        os.close(1)
        sys.stdout = None


@pytest.mark.parametrize("way", ["gone", "closed"])
def test_a_run_goes_on_without_a_terminal(one, tmp_path, way):
    done = one_rank(
        tmp_path, flags(tmp_path, one[1], run_id=way), functools.partial(lose_stdout, way)
    )
    assert done.status == 0 and done.err == "", done
    assert (
        read_log(tmp_path / "logs" / f"{way}.txt")[4]["final_state_hash"]
        == read_log(one[3])[4]["final_state_hash"]
    )


def test_few_open_files_are_one_line(one, tmp_path, capsys, monkeypatch):
    def too_many(shard):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(shard.path))

    monkeypatch.setattr(train_gpt, "load_tokens", too_many)
    status, _, errors = run_here(flags(tmp_path, one[1], run_id="files"), capsys)
    assert (
        status == 1
        and "Too many open files" in errors
        and "ulimit -n" in errors
        and errors.count("\n") == 1
    )


def save_slowly(rank):
    save = train_gpt.save_file
    train_gpt.save_file = lambda path, content: (time.sleep(4), save(path, content))


def test_rank_0_may_take_its_time_to_save_the_model(one, tmp_path):
    """Longer than other ranks would wait for a collective."""
    ranks = launch(
        tmp_path,
        *[flags(tmp_path, one[1], timeout_s=3, save_model="true", run_id="")] * 2,
        setup=save_slowly,
    )
    assert [rank.status for rank in ranks] == [0, 0], ranks
    assert "\nmodel: " in ranks[0].out and not ranks[1].out
    assert [path.suffix for path in sorted((tmp_path / "logs").iterdir())] == [".pt", ".txt"]


def signal_while_the_model_is_saved(number, rank):
    save = torch.save

    def signalled(content, file):
        save(content, file)
        file.flush()
        if "position" not in content:  # the model, no checkpoint
            os.kill(os.getpid(), number)

    torch.save = signalled


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_while_the_model_is_saved_loses_nothing(one, tmp_path, number):
    """SIGTERM lets the run finish. After SIGKILL the log has no end, and the run resumes from its
    checkpoint."""
    log = tmp_path / "logs" / "saved.txt"
    argv = flags(tmp_path, one[1], run_id="saved", save_model="true", save_every=8)
    done = one_rank(tmp_path, argv, functools.partial(signal_while_the_model_is_saved, number))
    assert done.status == (0 if number == signal.SIGTERM else -signal.SIGKILL), done
    if number == signal.SIGKILL:
        assert '\n{"end"' not in log.read_text()
        assert one_rank(tmp_path, ["--resume", str(log)]).status == 0
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["saved.pt", "saved.txt"]
    assert (
        sample.load_model(log.with_suffix(".pt"))
        and train_gpt.load_file(log.with_suffix(".pt"))["run_id"] == "saved"
    )
    (end,) = re.findall(r'^\{"end": (.*)}$', log.read_text(), re.M)
    assert json.loads(end)["final_state_hash"] == read_log(one[3])[4]["final_state_hash"]


# ranks that differ


def said_once(ranks):
    """Return what one of the ranks says of the error of all: rank 0, unless a busy machine delays
    it."""
    assert [rank.status for rank in ranks] == [1, 1]
    (said,) = (rank.err for rank in ranks if rank.err)
    assert re.match("train_gpt.py: rank [01]: error: ", said) and said.count("\n") == 1
    return said


def test_ranks_of_other_flags_are_an_error_that_names_the_flag(one, tmp_path):
    ranks = launch(tmp_path, flags(tmp_path, one[1], seed=5), flags(tmp_path, one[1], seed=6))
    assert "rank 1 has seed 6; rank 0 has 5. Start every rank with the same flags" in said_once(
        ranks
    )
    assert not (tmp_path / "logs").exists()


def other_source(rank):
    if rank == 1:
        source_of = train_gpt.source_of
        train_gpt.source_of = lambda config: source_of(config) + "# edited"


def test_ranks_of_another_source_are_an_error(one, tmp_path):
    ranks = launch(tmp_path, *[flags(tmp_path, one[1])] * 2, setup=other_source)
    said = said_once(ranks)
    edited = hashlib.sha256(((ROOT / "train_gpt.py").read_text() + "# edited").encode()).hexdigest()
    assert (
        f"rank 1 has source_sha256 {edited}; rank 0 has " in said
        and "Give every host the same checkout" in said
    )
    assert not (tmp_path / "logs").exists()


def digests_of_host(comm, folder):
    files = str(folder / f"host{comm.rank}" / "t_*.bin")
    config = train_gpt.Config(train_files=files, val_files=files, train_shards=0)
    with pytest.raises(train_gpt.RunError) as error:
        train_gpt.find_data(config, comm)
    return str(error.value)


@pytest.mark.parametrize("difference", ["content", "missing", "name"])
def test_hosts_of_other_data_are_an_error_that_names_the_shard(on_ranks, tmp_path, difference):
    """Each of two ranks is a host with a folder of its own."""
    for host in (0, 1):
        (tmp_path / f"host{host}").mkdir()
        for i in range(2):
            write_shard(tmp_path / f"host{host}" / f"t_{i}.bin", some_documents(i, 3000))
    shard = tmp_path / "host1" / "t_1.bin"
    named = "t_1.bin"
    if difference == "content":
        write_shard(shard, some_documents(9, 3000))
    elif difference == "missing":
        shard.unlink()
    else:
        shard.rename(shard.with_name("t_2.bin"))
        named = "t_1.bin, t_2.bin"
    for said in on_ranks(2, digests_of_host, tmp_path):
        assert f"shard {named} differs between hosts" in said


def described(comm):
    """What the log says of the hosts where each rank has one of its own."""
    machine = {
        "source_sha256": "s",
        "versions": {"torch": "2"},
        "hardware": {"cpu": f"a CPU of {comm.rank % 2}"},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.socket, "gethostname", lambda: f"host {comm.rank % 2}")
        return [
            (host["ranks"], host["hardware"]["cpu"])
            for host in train_gpt.describe_hosts(comm, machine)
        ]


def other_program(comm, name):
    """Compare hosts, when rank 1 has another version of python, torch or a package, or lacks it."""
    version = train_gpt.importlib.metadata.version

    def other(package):
        if package != name:
            return version(package)
        if package == "numpy":
            return "1.0"
        raise train_gpt.importlib.metadata.PackageNotFoundError

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank:
            patch.setattr(train_gpt.importlib.metadata, "version", other)
            if name == "python":
                patch.setattr(train_gpt.platform, "python_version", lambda: "9.9")
            if name == "torch":
                patch.setattr(train_gpt.torch, "__version__", "9.9")
        with pytest.raises(train_gpt.RunError) as error:
            described(comm)
        return str(error.value)


@pytest.mark.parametrize(
    "name, says",
    [
        ("python", "python 9.9; rank 0 has 3"),
        ("torch", "torch 9.9; rank 0 has 2"),
        ("numpy", "numpy 1.0; rank 0 has 2"),
        ("tqdm", "tqdm nothing; rank 0 has 4"),
    ],
)
def test_hosts_with_other_programs_are_named(name, says, on_ranks):
    for said in on_ranks(2, other_program, name):
        assert f"the ranks' programs differ: rank 1 has {says}" in said


def test_each_host_is_described_by_a_rank_of_its_own(on_ranks):
    assert on_ranks(4, described) == [[([0, 2], "a CPU of 0"), ([1, 3], "a CPU of 1")]] * 4
