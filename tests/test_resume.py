"""A run that is stopped in any way, and goes on, ends with the bytes of one that nothing
disturbed."""

import fcntl
import functools
import gc
import hashlib
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import sample
import train_gpt
from conftest import TINY, as_flags, some_documents, write_corpus, write_shard

ROOT = Path(train_gpt.__file__).parent
SMALL = {
    **TINY,
    "layers": "S0M L1",
    "ngrams": (train_gpt.Ngrams(2, 40, 8), train_gpt.Ngrams(3, 30, 16)),
    "lazy_tables": "true",
    "model_dim": 16,
    "backout_layer": 0,
    "micro_batches": 4,
    "micro_batch_tokens": 16,
    "max_document_tokens": 12,
    "val_len": 48,
    "num_steps": 8,
    "val_every": 5,
    "warmup_steps": 0,
    "stages": (
        "Stage(until=1/2, long_window=2), Stage(long_window=4), Stage(extra_steps=2, long_window=6)"
    ),
    "muon_momentum_rise": 3,
    "bucket_mb": 0.004,
    "save_every": 2,
}
# ranks that 4 micro-batches do not suit
SEVERAL = {"micro_batches": 12, "stages": "Stage(long_window=2)"}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), train=(6000, 200_000), val=100)


def flags_of(folder, corpus, run_id, **changes):
    values = {**SMALL, **corpus, "log_dir": str(folder), "run_id": run_id, **changes}
    return ["--preset", "speedrun", *as_flags(values)]


@pytest.fixture
def flags(tmp_path, corpus):
    """flags(run_id, ...) -> those of a small run whose log is in the test's folder."""
    return functools.partial(flags_of, tmp_path, corpus)


def end_of(path):
    """The verdict in a log."""
    lines = re.findall(r'^\{"end".*$', path.read_text(), re.M)
    assert len(lines) == 1, path.read_text().splitlines()[-1]
    return json.loads(lines[0])["end"]


def resumed_lines(path):
    return [
        json.loads(line)["resumed"]
        for line in re.findall(r'^\{"resumed".*$', path.read_text(), re.M)
    ]


def steps_saved(folder):
    return sorted(
        int(re.search(r"step(\d+)\.ckpt$", path.name)[1]) for path in folder.glob("*.ckpt")
    )


class Killed(Exception):
    """Planted: the end of a process that says nothing more."""


def train(comm, argv, kill_at=-1, presets=train_gpt.PRESETS):
    """What main does, in a group of ranks that lives on: a run that goes to its end, or is stopped
    in the midst of a step."""
    preset, config = train_gpt.parse_config(argv, [*presets][-1], presets)
    train_gpt.check_config(config, comm.ranks)
    run_id, _ = train_gpt.find_run(config)
    log = train_gpt.Log(config, comm.rank, run_id)
    worker = config.worker_type
    step = worker.step

    def mortal_step(self, plan, batch):
        if (
            plan.step == kill_at and signal.getsignal(signal.SIGTERM) == train_gpt.signals.handle
        ):  # not in the warm-up
            self.optimizer.finish_all_gathers()  # what is on its way would meet the next run's
            raise Killed
        return step(self, plan, batch)

    worker.step = mortal_step
    kind = train_gpt.CompressedComm if config.bf16_compress else train_gpt.Comm
    threads = torch.get_num_threads()
    try:
        train_gpt.TrainingLoop(
            config,
            preset,
            kind(comm.rank, comm.ranks),
            torch.device("cpu"),
            log,
            time.perf_counter(),
        ).run()
    except Killed:
        pass
    finally:
        worker.step = step
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        torch.set_num_threads(threads)
        if log.file is not None:
            log.file.close()


# the bytes of an undisturbed run

# the batch and the longest document change before steps 3 and 5; documents are split, so that a
# shard's pieces change
TABLE = {
    "stages": (
        "Stage(3, 0, 4, 16, 12, 2), Stage(5, 0, 2, 16, 5, 4), Stage(1, 0, 8, 16, 9, 4), Stage(1, 1)"
    ),
    "micro_batches": 8,
    "max_document_tokens": 9,
    "long_window": 6,
    "long_documents": "split",
    "shuffle": "true",
    "warmup_steps": 2,
}


@pytest.mark.parametrize(
    "settings",
    [
        {
            "world_size_invariant": "true",
            "overlap_param_gather": "true",
            "save_every": 5,
            **TABLE,
        },
        *(
            pytest.param(settings, marks=pytest.mark.slow)
            for settings in (
                {"save_every": 3},
                {"overlap_param_gather": "true", "update_order": "forward", "bucket_mb": 0},
                {"sync": "step", "update_order": "forward"},
                {"check_grads": "true"},
                {"clip_norm": 0.05, "bucket_mb": 1},
                {
                    "grad_reduce_in_fp32": "true",
                    "dtype": "bfloat16",
                    "overlap_param_gather": "true",
                },
                {"bf16_compress": "true"},
            )
        ),
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_killed_run_ends_with_the_bytes_of_one_that_was_not(settings, flags, on_ranks, tmp_path):
    """On two ranks, under every setting of the engine; across a table's changes; and steps of a
    cycle of Adam's that no checkpoint can hold."""
    saved = {3: [4, 6], 4: [4], 5: [5]}[settings.get("save_every", 4)]
    kill_and_resume(flags, on_ranks, tmp_path, {"save_every": 4, **settings}, saved)


def kill_and_resume(flags, on_ranks, tmp_path, settings, steps, presets=train_gpt.PRESETS):
    """Stop a run of two ranks in step 7, when it has checkpoints before `steps`, resume it and
    compare it with a whole one."""
    on_ranks(2, train, flags("whole", **settings), -1, presets)
    on_ranks(2, train, flags("killed", **settings), 7, presets)
    *_, saved = steps
    assert steps_saved(tmp_path) == steps
    on_ranks(2, train, ["--resume", "latest", "--log_dir", str(tmp_path)], -1, presets)
    whole = end_of(tmp_path / "whole.txt")
    resumed = end_of(tmp_path / "killed.txt")
    for key in ("final_state_hash", "train_digest", "final_val_loss", "model_hash", "train_tokens"):
        assert whole[key] == resumed[key], key
    assert (whole["resumed"], resumed["resumed"]) == (0, 1)
    (line,) = resumed_lines(tmp_path / "killed.txt")
    assert (
        line["from_step"] == saved
        and line["lost_steps"] == 7 - saved
        and line["ranks"] == 2
        and line["lost_seconds"] > 0
    )
    assert line["checkpoint"] == f"killed.step{saved:06}.ckpt"
    source = train_gpt.source_of([*presets.values()][0])
    assert line["source_sha256"] == hashlib.sha256(source.encode()).hexdigest()
    assert not list(tmp_path.glob("*.ckpt*")), "a run that ended well keeps none"
    lines = (tmp_path / "killed.txt").read_text().splitlines()
    after = lines[next(i for i, line in enumerate(lines) if line.startswith('{"resumed"')) :]
    losses = [
        [
            re.sub(r" train_time\S+ step_avg\S+", "", line)
            for line in run
            if line.startswith("step:")
        ]
        for run in (after, (tmp_path / "whole.txt").read_text().splitlines())
    ]
    assert losses[0] == losses[1][-len(losses[0]) :] and losses[0][0].startswith(
        ("step:5/", "step:7/")
    )
    times = [
        int(re.search(r"train_time:(\d+)", line)[1]) for line in after if line.startswith("step:")
    ]
    before = [
        int(re.search(r"train_time:(\d+)", line)[1])
        for line in lines
        if line.startswith(f"step:{saved}/")
    ]
    assert times == sorted(times) and times[0] >= before[0], (
        "the clock goes on from the checkpoint's"
    )


def resumed_with_another(comm, argv):
    """Resume where rank 1 reads another checkpoint -> the error."""
    load_file = train_gpt.load_file
    train_gpt.load_file = lambda path, **check: {
        **load_file(path, **check),
        "digest": "0123" if comm.rank else "4567",
    }
    try:
        train(comm, argv)
    except train_gpt.RunError as error:
        return str(error)
    finally:
        train_gpt.load_file = load_file


def test_hosts_that_resume_from_different_checkpoints_all_say_so(flags, on_ranks, tmp_path):
    on_ranks(2, train, flags("copied"), 5)
    for error in on_ranks(
        2,
        resumed_with_another,
        ["--resume", str(tmp_path / "copied.step000004.ckpt"), "--log_dir", str(tmp_path)],
    ):
        assert (
            error
            == "the ranks' checkpoints differ: rank 1 has the digest 0123; rank 0 has 4567. Give"
            " every host the same copied.step000004.ckpt"
        )


def train_idea(comm, argv, kill_at=-1, buffers=True):
    """train() of an idea with random numbers in its forward, and MLPs that subtract a running mean,
    which they keep in a buffer."""
    loss = train_gpt.GPT.loss
    init = train_gpt.MLP.__init__
    forward = train_gpt.MLP.forward

    def with_dropout(self, x, *rest):
        dropped = F.dropout(x, 0.3, self.training)
        assert self.training != torch.equal(dropped, x)
        return loss(self, dropped, *rest)

    def with_buffer(self, config, hidden):
        init(self, config, hidden)
        self.register_buffer("mean", torch.zeros(1, config.model_dim))

    def centred(self, x):
        if self.training:
            self.mean.lerp_(x.detach().float().mean(0, keepdim=True) + 1, 0.1)
        return forward(self, x - self.mean)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_gpt.GPT, "loss", with_dropout)
        if buffers:
            patch.setattr(train_gpt.MLP, "__init__", with_buffer)
            patch.setattr(train_gpt.MLP, "forward", centred)
        if kill_at == "load":
            return sample.load_model(argv)[0].state_dict()
        train(comm, argv, kill_at)


def test_random_numbers_and_a_buffer_of_the_model_do_not_depend_on_warm_up_and_resume(
    flags, on_ranks, tmp_path
):
    on_ranks(2, train_idea, flags("whole", save_model="true", warmup_steps=3))
    on_ranks(2, train_idea, flags("killed", warmup_steps=2), 7)
    on_ranks(2, train_idea, ["--resume", str(tmp_path / "killed.txt")])
    whole = end_of(tmp_path / "whole.txt")
    resumed = end_of(tmp_path / "killed.txt")
    assert whole["state_hash"]["before_warmup"] == whole["state_hash"]["after_warmup"]
    assert (
        whole["final_state_hash"] == resumed["final_state_hash"]
        and len(resumed_lines(tmp_path / "killed.txt")) == 1
    )
    (model,) = on_ranks(1, train_idea, tmp_path / "whole.pt", "load")
    saved = train_gpt.load_file(tmp_path / "whole.pt")["state"]
    names = [name for name in saved if name.endswith(".mean")]
    assert names and all(
        torch.equal(model[name], saved[name]) and saved[name].abs().min() > 0 for name in names
    )


def test_random_numbers_in_a_forward_do_not_depend_on_ranks(flags, on_ranks, tmp_path):
    for ranks in 1, 2:
        argv = flags(f"{ranks}", world_size_invariant="true", val_every=0)
        on_ranks(ranks, train_idea, argv, -1, False)
    one, two = (end_of(tmp_path / f"{ranks}.txt")["final_state_hash"] for ranks in (1, 2))
    assert one == two


def test_an_exact_run_refuses_a_buffer_that_follows_one_rank(flags):
    with pytest.raises(train_gpt.RunError, match="mlp.mean.* follows rank 0.*persistent=False"):
        train_idea(train_gpt.Comm(), flags("exact", world_size_invariant="true"))


@pytest.mark.slow
def test_exact_runs_go_on_at_any_number_of_ranks_in_the_midst_of_a_cycle(flags, on_ranks, tmp_path):
    goes_on_at_any_number_of_ranks(
        flags, on_ranks, tmp_path, dict(layers="S0M LM+0 L1M", backout_layer=1, doc_copy="true")
    )


def train_losses(path):
    return dict(re.findall(r"^(step:\d+)/.* (train_loss:\S+)", path.read_text(), re.M))


EACH = (2, 3, 1), (4, 5, 3), (8, 7, 5), (1, -1, 7)


def goes_on_at_any_number_of_ranks(
    flags, on_ranks, tmp_path, changes, presets=train_gpt.PRESETS, lives=EACH
):
    """1 rank, and then those of each of `lives` (ranks, step in which it is stopped, step that is
    saved then), between two steps of Adam's."""
    exact = (
        dict(
            world_size_invariant="true",
            save_every=1,
            num_steps=9,
            micro_batches=8,
            val_every=0,
            ngram_reset=3,
            param_groups='AdamGroup("gates", beta1=.9)',
        )
        | changes
    )
    on_ranks(1, train, flags("whole", **exact), -1, presets)
    on_ranks(1, train, flags("killed", **exact), 1, presets)
    for ranks, kill_at, saved in lives:
        assert steps_saved(tmp_path)[-1] == saved
        again = ["--resume", str(tmp_path / "killed.txt"), "--bucket_mb", str(0.002 * ranks)]
        on_ranks(ranks, train, again, kill_at, presets)
    whole = end_of(tmp_path / "whole.txt")
    resumed = end_of(tmp_path / "killed.txt")
    assert (
        whole["final_state_hash"] == resumed["final_state_hash"]
        and whole["train_digest"] == resumed["train_digest"]
    )
    assert [line["ranks"] for line in resumed_lines(tmp_path / "killed.txt")] == [
        ranks for ranks, *_ in lives
    ]
    losses = train_losses(tmp_path / "whole.txt")
    assert train_losses(tmp_path / "killed.txt") == losses and len(losses) == 9


def test_a_clock_that_goes_on_adds_what_it_named_before():
    first, second = (
        train_gpt.Clock(torch.device("cpu"), time.perf_counter() - 1) for _ in range(2)
    )
    for clock in (first, second):
        with clock.off("setup"):
            time.sleep(0.01)
    with first.off("warmup"):
        first.elapsed = 7.0
    own = dict(second.outside)
    saved = first.state()
    second.load_state(saved)
    assert second.elapsed == 7.0 and second.outside.keys() == {
        "joining",
        "setup",
        "warmup",
        "compile",
    }
    for name, seconds in second.outside.items():
        assert seconds == saved["outside"][name] + own.get(name, 0), name
    assert second.state()["wall"] > 2, "the life before counts"


# in this process: one rank


def here(argv, capsys, kill_at=None):
    """(exit status, stdout, stderr) of one rank in this process, perhaps stopped in a step."""
    with pytest.MonkeyPatch.context() as patch:
        if kill_at is not None:
            step = train_gpt.Worker.step

            def mortal_step(self, plan, batch):
                if plan.step == kill_at:
                    raise train_gpt.RunError("killed")
                return step(self, plan, batch)

            patch.setattr(train_gpt.Worker, "step", mortal_step)
        gc.freeze()  # the run before unfroze all
        status = train_gpt.main(train_gpt.PRESETS, argv)
    printed = capsys.readouterr()
    return status, printed.out, printed.err


@pytest.fixture(scope="module")
def killed_once(tmp_path_factory, corpus):
    folder = tmp_path_factory.mktemp("killed")
    train(train_gpt.Comm(), flags_of(folder, corpus, "killed"), 5)
    assert steps_saved(folder) == [2, 4]
    return folder


@pytest.fixture
def killed(killed_once, tmp_path):
    """The log of a run that was stopped in step 5, with checkpoints before the steps 2 and 4."""
    shutil.copytree(killed_once, tmp_path, dirs_exist_ok=True)
    return tmp_path / "killed.txt"


def test_the_last_so_many_are_kept_and_none_of_a_past_that_was_given_up(flags, capsys, tmp_path):
    """Killed at once: else the next one would take a step whose lines the log has given up."""
    here(flags("some", save_every=1, adam_every=1, keep_checkpoints=3), capsys, kill_at=6)
    assert steps_saved(tmp_path) == [4, 5, 6]
    here(["--resume", str(tmp_path / "some.step000004.ckpt")], capsys, kill_at=4)
    assert steps_saved(tmp_path) == [4]
    latest = ["--resume", "latest", "--log_dir", str(tmp_path)]
    here([*latest, "--keep_checkpoints", "1"], capsys, kill_at=5)
    assert steps_saved(tmp_path) == [5] and not list(tmp_path.glob("*.given_up"))
    assert [
        (line["from_step"], line["lost_steps"]) for line in resumed_lines(tmp_path / "some.txt")
    ] == [(4, 2), (4, 0)]


def test_a_checkpoint_waits_until_the_worker_can_save(flags, capsys, tmp_path, monkeypatch):
    """Those due before the steps 2, 4 and 6 come before 3 and 7: an idea cannot save in between."""
    asked = []
    monkeypatch.setattr(
        train_gpt.Worker, "can_save", lambda self, step: asked.append(step) or step % 4 == 3
    )
    here(
        flags("some", save_every=2, adam_every=1, keep_checkpoints=9, val_every=0),
        capsys,
        kill_at=7,
    )
    assert steps_saved(tmp_path) == [3, 7] and asked == [2, 3, 4, 5, 6, 7]
    assert here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)[0] == 0
    assert resumed_lines(tmp_path / "some.txt")[0]["from_step"] == 7


def test_the_latest_checkpoint_is_that_of_the_last_step_whatever_the_clock_said(
    flags, capsys, tmp_path
):
    """Modification times in the future: the clock was set back, or another host wrote them."""
    here(flags("some", save_every=2, adam_every=1), capsys, kill_at=5)
    for path in tmp_path.glob("*.ckpt"):
        os.utime(path, (time.time() + 10_000,) * 2)
    here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys, kill_at=7)
    assert (
        steps_saved(tmp_path) == [4, 6]
        and resumed_lines(tmp_path / "some.txt")[-1]["from_step"] == 4
    )


def test_the_latest_of_two_runs_is_the_last_that_was_saved(flags, capsys, tmp_path):
    """Whatever was copied or touched since, and whatever is damaged."""
    for name in ("a", "b"):
        here(flags(name, save_every=2, adam_every=1), capsys, kill_at=3)
    os.utime(tmp_path / "a.step000002.ckpt", (time.time() + 10_000,) * 2)
    (tmp_path / "c.step000009.ckpt").write_bytes(b"damaged")
    here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys, kill_at=3)
    assert resumed_lines(tmp_path / "b.txt") and not resumed_lines(tmp_path / "a.txt")


def test_a_resume_hashes_its_checkpoint_once(killed, capsys, monkeypatch):
    hashed = []
    digest = train_gpt.digest_of
    monkeypatch.setattr(
        train_gpt, "digest_of", lambda content: hashed.append(content["step"]) or digest(content)
    )
    assert train_gpt.launch_id() == train_gpt.launch_id()
    for name in (killed, killed.with_name("killed.step000004.ckpt")):
        monkeypatch.setattr(train_gpt, "intact", set())
        here(["--resume", str(name)], capsys, kill_at=4)
    assert hashed == [4, 4] and len(resumed_lines(killed)) == 2


def test_run_ids_that_begin_one_another_share_no_checkpoint(flags, capsys, tmp_path):
    longer = ["a.step1", "a.step000002.ckpt", "[a]", "a "]
    for run_id in ("a", longer[-1]):
        here(flags(run_id), capsys, kill_at=5)
    for run_id in longer[:-1]:
        for step in (2, 4):
            (tmp_path / f"{run_id}.step{step:06}.ckpt").touch()
    for run_id in ("a", *longer):
        saved = [tmp_path / f"{run_id}.step{step:06}.ckpt" for step in (2, 4)]
        assert train_gpt.checkpoints(tmp_path, run_id) == saved
    saved = train_gpt.checkpoints(tmp_path, "a")
    assert len(saved) == 2 and here(["--resume", str(tmp_path / "a.txt")], capsys)[0] == 0
    assert {*train_gpt.checkpoints(tmp_path)} == {*tmp_path.glob("*.ckpt")} - {*saved}
    assert len([*tmp_path.glob("*.ckpt")]) == 2 * len(longer)
    here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys, kill_at=5)
    assert resumed_lines(tmp_path / f"{longer[-1]}.txt")[-1]["from_step"] == 4


@pytest.mark.parametrize("how", ["deleted", "moved"])
def test_a_log_that_is_deleted_in_the_run_is_an_error(flags, capsys, tmp_path, monkeypatch, how):
    logs = tmp_path / "logs"
    step = train_gpt.Worker.step

    def deleting_step(self, plan, batch):
        if plan.step == 3 and logs.exists():
            logs.rename(tmp_path / "away") if how == "moved" else shutil.rmtree(logs)
        return step(self, plan, batch)

    monkeypatch.setattr(train_gpt.Worker, "step", deleting_step)
    status, _, errors = here(flags("gone", log_dir=str(logs)), capsys)
    assert (
        status == 1
        and re.search(
            r"error: \S+gone.txt was deleted or moved while the run wrote it; start the run again",
            errors,
        )
        and errors.count("\n") == 1
    )


def test_a_checkpoint_is_protected_as_a_whole(killed, capsys, tmp_path):
    """Its tensors and every value beside them."""
    latest = tmp_path / "killed.step000004.ckpt"
    saved = torch.load(latest, weights_only=True)
    for change in (
        {"config": {**saved["config"], "seed": 5}},
        {"step": 2},
        {"position": [0, 1, 12]},
        {"train_digest": "0"},
    ):
        torch.save({**saved, **change}, latest)
        status, _, errors = here(["--resume", str(latest)], capsys)
        assert (
            status == 1
            and "its content does not match its digest" in errors
            and errors.count("\n") == 1
        ), errors


def test_a_checkpoint_that_cannot_be_read_is_one_line(flags, killed, capsys, tmp_path):
    latest = tmp_path / "killed.step000004.ckpt"
    older = tmp_path / "killed.step000002.ckpt"
    good = latest.read_bytes()
    tensor = max(
        torch.load(latest, weights_only=True)["state"].values(),
        key=lambda x: x.abs().sum() * x.is_floating_point(),
    )
    place = good.index(tensor.numpy().tobytes())  # a changed bit in it
    other = torch.load(latest, weights_only=True)
    other["state"] = {name: x.repeat(2) for name, x in other["state"].items()}
    model = {
        key: v
        for key, v in torch.load(latest, weights_only=True).items()
        if key in ("config", "state", "run_id")
    }
    for content, says in (
        (good[:-100], "damaged"),
        (good[:place] + bytes([good[place] ^ 1]) + good[place + 1 :], "damaged"),
        (b"", "damaged"),
        (other, "the saved state does not fit"),
        (model, "not a checkpoint"),
        ({"state": {}, "tensors": 3}, "not a checkpoint"),
        (None, "cannot be read"),
    ):
        if isinstance(content, dict):
            train_gpt.save_file(latest, content)
        elif content is None:
            latest.unlink()
            latest.mkdir()
        else:
            latest.write_bytes(content)
        status, _, errors = here(["--resume", str(killed if content is None else latest)], capsys)
        assert status == 1 and says in errors and errors.count("\n") == 1, errors
        assert not resumed_lines(killed)
    latest.rmdir()
    status, _, errors = here(["--resume", str(older)], capsys)
    assert status == 0 and resumed_lines(killed)[0]["from_step"] == 2


def damage(path, how):
    """Flip a bit in the midst of a file, or cut it."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content[: None if how == "flipped" else len(content) // 2])


@pytest.mark.parametrize("restart", [False, True])
def test_a_damaged_checkpoint_is_reported_and_goes_when_a_later_one_is_saved(
    restart, flags, capsys, tmp_path, monkeypatch
):
    """torchrun's restart takes an older one too. Until another is saved, the damaged file stays,
    set aside."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    here(flags("killed"), capsys, kill_at=5)
    damage(tmp_path / "killed.step000004.ckpt", "flipped")
    again = ["--resume", "latest", "--log_dir", str(tmp_path), "--save_every", "6"]
    if restart:
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
        again = flags("killed", save_every=6)
    for kill_at, saved, damaged in ((5, [2], 1), (7, [2, 6], 0)):
        _, printed, _ = here(again, capsys, kill_at=kill_at)
        assert re.search("^resuming from step 2$", printed, re.M), printed
        told = re.findall("killed.step000004.ckpt: .* does not match its digest", printed)
        assert len(told) == damaged
        assert steps_saved(tmp_path) == saved
        assert (tmp_path / "killed.step000004.ckpt.given_up").exists() == bool(damaged)
    for path in tmp_path.glob("*.ckpt"):
        damage(path, "cut")
    status, _, errors = here(again, capsys)
    assert (
        status == 1
        and "killed.step000006.ckpt: not a saved model" in errors
        and errors.count("\n") == 1
    )


def test_a_file_that_was_cut_anywhere_is_damaged(tmp_path):
    """torch raises an OSError for some lengths, which is none of opening the file."""
    path = tmp_path / "some.ckpt"
    train_gpt.save_file(path, {"state": {str(number): torch.arange(1000.0) for number in range(9)}})
    content = path.read_bytes()
    for length in range(0, len(content), 401):
        path.write_bytes(content[:length])
        assert "or damaged" in train_gpt.damage_of(path)


def test_an_interrupt_while_a_file_is_written_is_not_taken_for_a_full_disk(tmp_path, monkeypatch):
    """torch's writer answers it by an error about its file format."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train_gpt.torch.serialization, "_save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_gpt.save_file(tmp_path / "some.ckpt", {"state": {"x": torch.arange(1000.0)}})
    assert not list(tmp_path.iterdir())


class Obeyed:
    """What a pickle may hold: a call that loading makes."""

    def __reduce__(self):
        return os.mkdir, ("obeyed",)


def test_nothing_in_a_saved_file_is_executed(killed, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({"state": {}, "digest": "", "config": Obeyed()}, tmp_path / "killed.step000004.ckpt")
    assert "or damaged" in here(["--resume", str(tmp_path / "killed.step000004.ckpt")], capsys)[2]
    with pytest.raises(train_gpt.RunError, match="not a saved model"):
        sample.load_model(tmp_path / "killed.step000004.ckpt")
    assert not (tmp_path / "obeyed").exists()


def test_latest_is_of_the_run_that_this_launch_went_on_with(
    flags, killed, capsys, tmp_path, monkeypatch
):
    """torchrun starts the ranks again, and meanwhile another run has saved."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    here(["--resume", "latest", "--log_dir", str(tmp_path), "--save_every", "1"], capsys, kill_at=5)
    with monkeypatch.context() as another:
        another.setenv("TORCHELASTIC_RUN_ID", "another launch")
        here(flags("other"), capsys, kill_at=3)
    assert max(tmp_path.glob("*.ckpt"), key=lambda path: path.stat().st_mtime_ns).name.startswith(
        "other"
    )
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)[0] == 0
    assert len(resumed_lines(killed)) == 2 and end_of(killed)["resumed"] == 2


def test_a_second_start_takes_the_named_checkpoint_until_this_launch_has_gone_on_from_it(
    flags, killed, capsys, tmp_path, monkeypatch
):
    """The first start may have ended before it opened the log; what torchrun starts a third time
    goes on with the second's."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    name = "kept by another name.ckpt"
    (tmp_path / "killed.step000002.ckpt").rename(tmp_path / name)
    for restarts, kill_at, begins in ((1, 7, 2), (2, None, 6)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts))
        here(["--resume", str(tmp_path / name)], capsys, kill_at=kill_at)
        assert resumed_lines(killed)[-1]["from_step"] == begins
    assert end_of(killed)["resumed"] == 2


def test_a_second_start_does_not_take_what_another_launch_left(
    flags, capsys, tmp_path, monkeypatch
):
    """Of its first start, which the used run_id stopped, torchrun only knows that it failed."""
    assert here(flags("mine", save_model="true"), capsys)[0] == 0
    here(flags("open"), capsys, kill_at=5)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    for restarts in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
        for run_id in ("mine", "open"):
            status, _, errors = here(flags(run_id, seed=5), capsys)
            assert (
                status == 1 and f"run_id '{run_id}' was used" in errors and errors.count("\n") == 1
            )
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


def test_a_second_start_after_the_end_takes_no_other_run(
    flags, killed, capsys, tmp_path, monkeypatch
):
    """What torchrun started failed after its verdict: there is nothing left to do, and other runs
    are none of its own."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    checkpoint = tmp_path / "killed.step000004.ckpt"
    kept = checkpoint.read_bytes()
    assert here(["--resume", str(killed)], capsys)[0] == 0
    with monkeypatch.context() as another:
        another.setenv("TORCHELASTIC_RUN_ID", "another launch")
        here(flags("other"), capsys, kill_at=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    before = killed.read_bytes(), (tmp_path / "other.txt").read_bytes()
    status, _, errors = here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)
    assert status == 1 and "found no checkpoint" in errors and errors.count("\n") == 1
    checkpoint.write_bytes(kept)
    status, _, errors = here(["--resume", str(killed)], capsys)
    assert status == 1 and "run_id 'killed' was used" in errors
    assert (killed.read_bytes(), (tmp_path / "other.txt").read_bytes()) == before


def test_a_second_start_writes_a_head_anew_that_was_cut(
    flags, killed, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    (tmp_path / "cut.txt").write_text(killed.read_text()[:5000])
    assert here(flags("cut"), capsys)[0] == 0 and end_of(tmp_path / "cut.txt")["resumed"] == 0


def test_a_second_start_goes_on_with_the_same_run_alone(flags, capsys, tmp_path, monkeypatch):
    """A launch's name is the user's, who may give it to another run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a launch")
    here(flags("a"), capsys, kill_at=5)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    status, _, errors = here(flags("a", seed=5, muon_lr=0.01), capsys)
    assert (
        status == 1
        and "a.step000004.ckpt belongs to a run with another seed, muon_lr. Delete it, or give"
        in errors
    )
    assert (
        here(flags("a"), capsys)[0] == 0 and resumed_lines(tmp_path / "a.txt")[0]["from_step"] == 4
    )


def test_there_is_nothing_to_resume(flags, killed, capsys, tmp_path):
    model = tmp_path / "model.pt"
    for named in ("nowhere", str(tmp_path / "killed.step000003.ckpt"), str(model)):
        status, _, errors = here(["--resume", named], capsys)
        assert (
            status == 1 and f"--resume {named}: no such file" in errors and errors.count("\n") == 1
        )
    train_gpt.save_file(model, {"state": {}})
    assert "found no checkpoint" in here(["--resume", str(model)], capsys)[2]
    assert here(["--resume", str(killed)], capsys)[0] == 0
    assert "A run that has finished keeps none" in here(["--resume", str(killed)], capsys)[2]


def test_latest_is_that_of_the_named_run(flags, killed, capsys, tmp_path):
    here(flags("other"), capsys, kill_at=3)
    assert (
        here(["--resume", "latest", "--log_dir", str(tmp_path), "--run_id", "killed"], capsys)[0]
        == 0
    )
    assert end_of(killed)["resumed"] == 1 and steps_saved(tmp_path) == [2]


def test_what_would_make_it_another_run_is_refused_by_name(flags, killed, capsys, corpus, tmp_path):
    before = killed.read_bytes()
    status, _, errors = here(
        ["--resume", str(killed), "--seed", "3", "--num_steps", "9", "--bucket_mb", "1"], capsys
    )
    assert (
        status == 1
        and "leave out --num_steps, --seed, which would make it another run" in errors
        and "bucket_mb" not in errors
    )
    status, _, errors = here(["--resume", str(killed), "--init_from", "model.pt"], capsys)
    assert status == 1 and "leave out --init_from, which" in errors
    other = write_shard(tmp_path / "other_000001.bin", some_documents(5, 6000))
    for name in ("train_files", "val_files"):
        status, _, errors = here(["--resume", str(killed), f"--{name}", str(other)], capsys)
        assert status == 1 and "the shards are not those" in errors and errors.count("\n") == 1
    assert killed.read_bytes() == before


def test_one_process_at_a_time_trains_a_run(killed, capsys):
    before = killed.read_bytes()
    with open(killed) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        status, _, errors = here(["--resume", str(killed)], capsys)
    assert status == 1 and "another process trains this run" in errors and errors.count("\n") == 1
    assert killed.read_bytes() == before
    assert here(["--resume", str(killed)], capsys)[0] == 0


def test_a_torn_last_line_is_ended_and_a_lost_log_begun_anew(flags, killed, capsys, tmp_path):
    killed.write_bytes(killed.read_bytes().removesuffix(b"error: killed\n")[:-7])
    torn = killed.read_text().splitlines()[-1]
    here(["--resume", str(killed)], capsys, kill_at=4)
    here(["--resume", str(killed)], capsys, kill_at=4)
    assert f'\n{torn}\n{{"resumed": ' in killed.read_text() and [
        line["lost_steps"] for line in resumed_lines(killed)
    ] == [1, 0]
    killed.unlink()
    assert here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)[0] == 0
    source, _, rest = killed.read_text().split("\n" + "=" * 100 + "\n")
    start, resumed, *_ = rest.splitlines()
    assert source == (ROOT / "train_gpt.py").read_text() and json.loads(start)["run_id"] == "killed"
    assert json.loads(resumed)["resumed"]["from_step"] == 4 and end_of(killed)["resumed"] == 1


@pytest.mark.parametrize(
    "changes, says",
    [
        (
            dict(ngrams=(train_gpt.Ngrams(2, 32, 4),)),
            r"ngrams.0.weight is \[32, 4\] here and \[16, 8\] in the saved model",
        ),
        (
            dict(ngrams=(), lazy_tables="false"),
            "the saved model also has ngrams.0.weight; give this model the --layers, --ngrams",
        ),
    ],
)
def test_a_run_begins_with_a_model_of_its_own_shape_alone(flags, capsys, tmp_path, changes, says):
    assert (
        here(flags("first", save_model="true", ngrams=(train_gpt.Ngrams(2, 16, 8),)), capsys)[0]
        == 0
    )
    status, _, errors = here(flags("tuned", init_from=tmp_path / "first.pt", **changes), capsys)
    assert status == 1 and re.search(says, errors) and errors.count("\n") == 1, errors


def test_a_run_begins_with_a_saved_model_s_parameters(flags, capsys, tmp_path):
    assert here(flags("first", save_model="true"), capsys)[0] == 0
    model = tmp_path / "first.pt"
    tuned = dict(init_from=model, num_steps=6)
    here(flags("tuned", **tuned), capsys, kill_at=5)
    started = json.loads(
        (tmp_path / "tuned.txt").read_text().split("=" * 100 + "\n")[2].splitlines()[0]
    )
    assert started["init_from"] == {
        "path": Path(model).name,
        "sha256": train_gpt.file_sha256(model),
    }
    opening = float(
        re.search(r"^step:0/6 val_loss:(\S+)", (tmp_path / "tuned.txt").read_text(), re.M)[1]
    )
    assert opening < end_of(tmp_path / "first.txt")["final_val_loss"] + 0.1, (
        "the head of a new model begins at zero"
    )
    model.unlink()
    assert here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)[0] == 0, (
        "the model was needed at the start only"
    )
    status, _, errors = here(flags("missing", init_from=model), capsys)
    assert status == 1 and str(model) in errors and errors.count("\n") == 1


def start_of_clock(comm, argv):
    """When a rank has hashed its state and begins to train, and when its training clock starts.
    Rank 1 is slower by 1 s."""
    times = {}
    begin = train_gpt.TrainingLoop.train
    start = train_gpt.Clock.start

    def late(loop):
        time.sleep(comm.rank)
        times["hashed"] = time.perf_counter()
        begin(loop)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(train_gpt.TrainingLoop, "train", late)
        patched.setattr(
            train_gpt.Clock,
            "start",
            lambda clock: times.update(started=time.perf_counter()) or start(clock),
        )
        train(comm, argv)
    return times["hashed"], times["started"]


def test_the_clock_starts_when_the_slowest_rank_has_hashed(flags, on_ranks):
    """Otherwise the first step of the others, which the result is of, would wait for it."""
    (_, started), (hashed, _) = on_ranks(2, start_of_clock, flags("skew", num_steps=4))
    assert started > hashed
