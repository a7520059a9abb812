"""Ranks that are stopped by signals, failures, full disks or the end of their launcher: each says
why, and the run can go on."""

import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train_gpt
from conftest import TORCHRUN, forked, wait_until
from test_resume import (
    SEVERAL,
    corpus,
    damage,
    end_of,
    flags,
    here,
    resumed_lines,
    steps_saved,
    train,
)  # noqa: F401 (fixtures)

ROOT = Path(train_gpt.__file__).parent


def _rank(rank, ranks, port, argv, plant, output):
    for descriptor in (1, 2):
        os.dup2(os.open(f"{output}.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    _main(argv, plant)


def _main(argv, plant):
    """As the script itself begins, after what the test plants."""
    torch.set_num_threads(1)
    # torch sends it to forked ranks when their launcher dies; torchrun forks none
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGUSR1, train_gpt.signals.handle)
    for number in train_gpt.Signals.STOPS:
        signal.signal(number, signal.SIG_DFL)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        train_gpt.die_with_launcher()
    exec(plant, {"rank": int(os.environ["RANK"]), "train_gpt": train_gpt})
    sys.stdout.flush()
    sys.exit(train_gpt.main(train_gpt.PRESETS, argv))


def in_step(fault):
    """Source that plants a fault in each training step, before what it computes."""
    return f"""
import os, random, resource, signal, sys, threading, time
step_of = train_gpt.Worker.step
def faulty(self, plan, batch):
    step = plan.step
    {fault}
    return step_of(self, plan, batch)
train_gpt.Worker.step = faulty
"""


class Group:
    """Processes that are the ranks of one run. outputs: what each wrote, when all have ended."""

    def __init__(self, ranks, argv, plant, output):
        # as torchrun's agent holds it
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.names = [f"{output}.{rank}" for rank in range(ranks)]
        for name in self.names:
            Path(name).unlink(missing_ok=True)
        self.processes = [
            forked(_rank, rank, ranks, self.store.port, argv, plant, output)
            for rank in range(ranks)
        ]

    def wait(self, seconds=600):
        """The exit status of each rank; those that outlast the test's patience are killed (-9)."""
        until = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, until - time.monotonic()))
        self.kill()
        self.outputs = [Path(name).read_text() for name in self.names]
        return [process.exitcode for process in self.processes]

    def kill(self):
        for process in self.processes:
            process.kill()
            process.join()


@pytest.fixture
def group(tmp_path):
    groups = []

    def start(ranks, argv, plant=""):
        groups.append(Group(ranks, argv, plant, tmp_path / "output"))
        return groups[-1]

    yield start
    for started in groups:
        started.kill()


def test_a_signal_on_one_rank_makes_all_save_at_one_step(flags, group, on_ranks, tmp_path):
    """SIGUSR1 in step 3 of rank 1: all save before step 8 and go on; SIGHUP in step 13: all save
    before step 18 and end, although no loss is logged before: a launcher kills half a minute after
    it told."""
    changes = dict(num_steps=24, save_every=0, val_every=0, train_loss_every=0, num_heads=2)
    plant = in_step(
        "if rank == 1 and step in (3, 13): os.kill(os.getpid(), signal.SIGUSR1 if step == 3 else"
        " signal.SIGHUP)"
    )
    told = group(2, flags("told", **changes), plant)
    assert told.wait() == [1, 1]
    assert steps_saved(tmp_path) == [8, 18]
    log = tmp_path / "told.txt"
    # by one, for both
    said = re.findall(r"^train_gpt.py: .*", told.outputs[0] + told.outputs[1], re.M)
    assert (
        len(said) == 1
        and f"terminated before step 18; --resume {log} continues from there" in said[0]
    ), said
    assert "Traceback" not in told.outputs[0] + told.outputs[1]
    assert "terminated before step 18" in log.read_text().splitlines()[-1]
    on_ranks(2, train, ["--resume", str(log)])
    on_ranks(2, train, flags("whole", **changes))
    assert end_of(log)["final_state_hash"] == end_of(tmp_path / "whole.txt")["final_state_hash"]


def test_ctrl_c_that_one_rank_hears_first_is_no_error_of_it(flags, group, tmp_path):
    plant = in_step("if rank == 1 and step == 5: raise KeyboardInterrupt")
    told = group(2, flags("told", num_steps=400, val_every=0), plant)
    told.wait()
    said = re.findall(r"^train_gpt.py: .*", told.outputs[0] + told.outputs[1], re.M)
    assert len(said) == 1 and said[0].startswith("train_gpt.py: rank 1: interrupted"), said
    assert (tmp_path / "told.txt").read_text().splitlines()[-1] == "error: rank 1: interrupted"


def test_an_interrupt_that_a_second_signal_meets_is_an_interrupt():
    error = SystemError("<built-in function monotonic> returned a result with an exception set")
    error.__cause__ = KeyboardInterrupt()  # as Python sets it
    assert train_gpt.describe_error(error, train_gpt.Config()) == train_gpt.INTERRUPTED


class Failing:
    def __init__(self, text):
        self.text = text

    def wait(self):
        raise RuntimeError(self.text)


@pytest.mark.parametrize(
    "text, says",
    [
        ("", "rank 3 has ended, hangs or makes another call (RuntimeError)"),
        (
            "\n[gloo/pair.cc:1] Connection closed by peer [::1]:5. More\nlines",
            "call (Connection closed by peer [::1]:5)",
        ),
    ],
)
def test_an_error_of_a_message_names_the_rank_with_and_without_a_text(text, says):
    with pytest.raises(RuntimeError) as error:
        train_gpt.HandleGroup(Failing(text), peers=[3]).wait()
    assert says in str(error.value)
    assert (
        "another rank did not answer" in train_gpt.describe_error(error.value, train_gpt.Config())
    ) == bool(text)


@pytest.mark.parametrize(
    "error, lost",
    [
        (
            RuntimeError(
                "[/x/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
                " operation to complete"
            ),
            True,
        ),
        (RuntimeError("Application timeout caused pair closure"), True),
        (dist.DistStoreError("wait timeout after 3000ms"), True),
        (
            dist.DistBackendError(
                "NCCL error in: x, remote process exited\nLast error:\nsocketPoll"
            ),
            True,
        ),
        (RuntimeError("my loss needs a socket and a timeout"), False),
        (ValueError("timed out"), False),
        (AttributeError("'Worker' has no attribute 'timeout'"), False),
        (dist.DistBackendError("NCCL error in: x, invalid usage"), False),
    ],
)
def test_only_torch_s_communication_says_that_a_rank_is_lost(error, lost):
    assert (
        train_gpt.is_lost(error)
        == lost
        == bool(train_gpt.describe_error(error, train_gpt.Config()))
    )


def test_a_failure_about_a_file_whose_name_is_no_utf_8_reaches_all_ranks():
    message = os.fsdecode(b"r\xe9sum\xe9.txt") + ": not UTF-8"
    assert train_gpt.first_failure(dist.HashStore(), 0, message, False) == f"rank 0: {message}"


@pytest.mark.parametrize("times", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_ctrl_c_saves_and_a_second_one_ends_at_once(times, flags, elastic, tmp_path):
    """The terminal sends it to the launcher and to both ranks, and the launcher passes it on: that
    is no second one."""
    plant = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + in_step(
        "time.sleep(0.02)"
    )
    every = 1 if times == 1 else 20_000  # between updates of Adam nothing can be saved
    launcher = elastic(
        2,
        0,
        flags("told", num_steps=20_000, epochs=10_000, save_every=0, val_every=0, adam_every=every),
        plant,
    )
    log = tmp_path / "told.txt"
    wait_until(lambda: log.exists() and "\nstep:2/" in log.read_text())
    for press in range(times):
        time.sleep(1.5 * train_gpt.Signals.MOMENT_S * press)
        os.killpg(launcher.pid, signal.SIGINT)
    launcher.join(600)
    output = (tmp_path / "output").read_text()
    last = log.read_text().splitlines()[-1]
    assert output.count("saving a checkpoint, then stopping; Ctrl-C again ends at once") == 1
    (said,) = re.findall(r"^train_gpt.py: rank.*", output, re.M)  # by one, for both
    if times == 1:
        (step,) = steps_saved(tmp_path)
        assert (
            f"interrupted before step {step}; --resume {log} continues from there" in said
            and step < 1000
        )
        assert re.match(f"error: (rank [01]: )?interrupted before step {step}; ", last)
    else:
        kept = (
            f"; the log so far: {log}; there is no checkpoint to resume from, --save_every keeps"
            " some"
        )
        # which has no log
        assert said in (
            f"train_gpt.py: rank 0: interrupted{kept}",
            "train_gpt.py: rank 1: interrupted",
        )
        assert re.match("error: (rank [01]: )?interrupted$", last) and not steps_saved(tmp_path)


@pytest.mark.parametrize(
    "in_the_last, changes",
    [
        pytest.param(False, dict(num_steps=16), marks=pytest.mark.slow),
        (True, dict(num_steps=15, adam_every=2)),
    ],
)
def test_a_signal_in_a_validation_does_not_wait_for_its_end(
    in_the_last, changes, flags, group, on_ranks, tmp_path
):
    """Which may last longer than the half minute after which a launcher kills. One rank is told;
    both stop within four sequences, the last validation too, behind which gradients may wait for no
    update. What goes on validates there once."""
    changes = dict(changes, save_every=0, val_every=6, val_len=8)
    step = changes["num_steps"] if in_the_last else 12
    plant = f"""
import os, signal
validate, forward = train_gpt.TrainingLoop.validate, train_gpt.GPT.forward
def told(run, step):
    seen = []
    def slow(model, *args):
        seen.append(rank == 1 and not seen and os.kill(os.getpid(), signal.SIGTERM))
        train_gpt.require(len(seen) <= 4, "a fifth sequence begins")
        return forward(model, *args)
    train_gpt.GPT.forward = slow if step == {step} else forward
    return validate(run, step)
train_gpt.TrainingLoop.validate = told
"""
    told = group(2, flags("told", **changes), plant)
    assert told.wait() == [1, 1], told.outputs
    assert steps_saved(tmp_path) == [step]
    log = tmp_path / "told.txt"
    assert (
        f"terminated before step {step}; --resume {log} continues from there"
        in told.outputs[0] + told.outputs[1]
    )
    on_ranks(2, train, ["--resume", str(log)])
    on_ranks(2, train, flags("whole", **changes))
    assert end_of(log)["final_state_hash"] == end_of(tmp_path / "whole.txt")["final_state_hash"]
    validated = [
        re.findall(r"^(step:\S+ val_loss:\S+)", path.read_text(), re.M)
        for path in (log, tmp_path / "whole.txt")
    ]
    assert validated[0] == validated[1] and len(validated[0]) == 4


FAULTS = {
    "bug": (
        "raise ValueError('a mistake in the code')",
        "rank 1",
        "ValueError: a mistake in the code",
    ),
    "kill": ("os.kill(os.getpid(), signal.SIGKILL)", "rank [02]", "another rank did not answer"),
    "stop": (
        "os.kill(os.getpid(), signal.SIGSTOP)",
        "rank [02]",
        "another rank did not answer .*--timeout_s 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_of_one_rank_ends_all_and_one_says_why(fault, flags, group, tmp_path):
    """Rank 1 of three fails in its third step, where the others wait for it in a collective."""
    action, speaker, says = FAULTS[fault]
    failed = group(
        3,
        flags("failed", timeout_s=3 if fault == "stop" else 3600, **SEVERAL),
        in_step(f"if rank == 1 and step == 2: {action}"),
    )
    for process in failed.processes[::2]:
        process.join(600)
    statuses = failed.wait(0 if fault == "stop" else 600)
    assert statuses[::2] == [1, 1], statuses
    said = re.findall("^train_gpt.py: .*", "".join(failed.outputs), re.M)
    assert len(said) == 1 and re.match(f"train_gpt.py: {speaker}: error: {says}", said[0]), said
    log = (tmp_path / "failed.txt").read_text()
    assert (
        re.match(f"error: ({speaker}: )?{says}", log.splitlines()[-1])
        and "step:2/8" in log
        and "step:3/8" not in log
    )
    assert [("Traceback" in output) for output in failed.outputs] == [False, fault == "bug", False]


def test_a_checkpoint_is_whole_or_not_there(flags, group, capsys, tmp_path):
    """Killed while it writes the second: the first is whole, and what is half written is cleared
    by the run that goes on."""
    plant = """
import os, signal, torch
save = torch.save
def torn(content, file):
    save(content, file)
    if content["step"] == 4:
        file.truncate(1000)
        os.kill(os.getpid(), signal.SIGKILL)
torch.save = torn
"""
    assert group(1, flags("killed"), plant).wait() == [-signal.SIGKILL]
    assert (
        steps_saved(tmp_path) == [2]
        and (tmp_path / "killed.step000004.ckpt.partial").stat().st_size == 1000
    )
    here(["--resume", "latest", "--log_dir", str(tmp_path), "--save_every", "5"], capsys, kill_at=7)
    assert steps_saved(tmp_path) == [2, 6] and not list(tmp_path.glob("*.partial"))
    assert here(["--resume", "latest", "--log_dir", str(tmp_path)], capsys)[0] == 0
    assert here(flags("whole"), capsys)[0] == 0
    assert (
        end_of(tmp_path / "killed.txt")["final_state_hash"]
        == end_of(tmp_path / "whole.txt")["final_state_hash"]
    )
    assert not list(tmp_path.glob("*.ckpt*"))


@pytest.mark.parametrize("terminated", [False, True])
def test_no_room_for_a_checkpoint(terminated, flags, group, tmp_path):
    """A limit on the size of files stands for a full disk: training goes on and says so. Where it
    was to end, it says that there is nothing to go on from."""
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))"
    plant = in_step(f"{limit}; step == 1 and {terminated} and os.kill(os.getpid(), signal.SIGTERM)")
    full = group(1, flags("full", model_dim=96, save_every=0 if terminated else 4), plant)
    assert full.wait() == [int(terminated)], full.outputs
    full.outputs[0].index(
        "full.step000006.ckpt: cannot be written"
        if terminated
        else "no checkpoint: " + str(tmp_path / "full.step000004.ckpt") + ": cannot be written"
    )
    assert "continues from there" not in full.outputs[0] and "Traceback" not in full.outputs[0]
    assert not list(tmp_path.glob("*.ckpt*")) and (
        '\n{"end"' in (tmp_path / "full.txt").read_text()
    ) == (not terminated)


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(bytes) -> a folder on a disk of this size."""
    made = []

    def make(size):
        folder = tmp_path / f"disk{len(made)}"
        folder.mkdir()
        if subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        ).returncode:
            pytest.skip("a small disk is a tmpfs, which needs root")
        made.append(folder)
        return folder

    yield make
    for folder in made:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.parametrize("room", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_disk_with_room_for_one_or_two_checkpoints(room, small_disk, flags, capsys, tmp_path):
    """The oldest goes when the disk is full, but the last good one stays, and a damaged one and
    partial files go first."""
    every = dict(save_every=1, adam_every=1, keep_checkpoints=5, model_dim=64)
    here(flags("size", **every), capsys, kill_at=2)
    log, saved = (
        path.stat().st_size for path in (tmp_path / "size.txt", tmp_path / "size.step000002.ckpt")
    )
    disk = small_disk(log + 20_000 + int((room + 0.5) * saved))
    status, printed, _ = here(flags("killed", log_dir=disk, **every), capsys, kill_at=6)
    full = (
        f"no checkpoint: {disk}/killed.step000002.ckpt: cannot be written ([Errno 28] No space left"
        " on device); free space"
    )
    assert (
        status == 1
        and steps_saved(disk) == ([1] if room == 1 else [5, 6])
        and (full in printed) == (room == 1)
    ), printed
    if room == 2:
        damage(disk / "killed.step000006.ckpt", "flipped")
        (disk / "killed.step000004.ckpt.partial").write_bytes(bytes(saved // 2))
        here(["--resume", str(disk / "killed.txt"), "--save_every", "7"], capsys, kill_at=7)
        assert steps_saved(disk) == [5, 7] and not list(disk.glob("*.partial"))
    assert here(["--resume", str(disk / "killed.txt"), "--save_model", "true"], capsys)[0] == 0
    assert here(flags("whole", **every), capsys)[0] == 0
    assert (
        end_of(disk / "killed.txt")["final_state_hash"]
        == end_of(tmp_path / "whole.txt")["final_state_hash"]
    )


# torchrun


def calm_agent():
    """What torch's agent does for its log takes longer than what it does for ranks as small as
    ours."""
    # as launch/ranks.py does: torch imports its compiler to print a traceback
    logging.disable(logging.CRITICAL)
    # for a record that nobody keeps it reads the source of all callers
    dynamic_rendezvous.get_method_name = lambda: ""


def _elastic(ranks, restarts, argv, plant, output):
    os.setsid()
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    calm_agent()
    config = LaunchConfig(
        1,
        1,
        ranks,
        run_id=str(os.getpid()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=restarts,
        monitor_interval=0.02,
        start_method="fork",
        local_addr="localhost",
    )
    elastic_launch(config, _main)(argv, plant)


@pytest.fixture
def elastic(tmp_path):
    """torchrun's own launcher, whose ranks are forked from a process that has torch already."""
    started = []

    def start(*arguments):
        started.append(forked(_elastic, *arguments, tmp_path / "output"))
        return started[-1]

    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


@pytest.mark.slow
def test_twenty_kills_at_random_moments_change_no_byte(flags, elastic, on_ranks, tmp_path):
    """torchrun starts all ranks again; they go on from the latest checkpoint, at first from the
    beginning, in one log."""
    changes = dict(num_steps=52, val_every=20, micro_batches=2)
    plant = in_step("""
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    chance = random.Random(life)
    victim, at, delay = chance.randrange(2), 2 * life + chance.randrange(2), 0.04 * chance.random()
    if life < 20 and rank == victim and step >= (at if life else 0):
        threading.Timer(delay if life else 0, os.kill, (os.getpid(), signal.SIGKILL)).start()
""")
    process = elastic(2, 25, flags("killed", **changes), plant)
    process.join(600)
    assert process.exitcode == 0, (tmp_path / "output").read_text()[-3000:]
    on_ranks(2, train, flags("whole", **changes))
    killed = end_of(tmp_path / "killed.txt")
    whole = end_of(tmp_path / "whole.txt")
    assert (
        killed["final_state_hash"] == whole["final_state_hash"]
        and killed["train_digest"] == whole["train_digest"]
    )
    lines = resumed_lines(tmp_path / "killed.txt")
    assert killed["resumed"] == len(lines) == 20 and (
        lines[0]["from_step"],
        lines[0]["checkpoint"],
    ) == (0, None)
    for line in lines:
        assert set(line) == {
            "at",
            "from_step",
            "ranks",
            "checkpoint",
            "lost_steps",
            "lost_seconds",
            "source_sha256",
            "launch",
            "changes",
            "hosts",
            "damaged",
        }
        assert (
            line["checkpoint"] in (None, f"killed.step{line['from_step']:06}.ckpt")
            and 0 <= line["lost_seconds"] < 300
        )
    steps = [line["from_step"] for line in lines]
    assert steps == sorted(steps) and steps[-1] > 30 and not list(tmp_path.glob("*.ckpt*"))


def alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def kill_launcher(launcher, tmp_path, ranks, ready):
    """Kill it when ready(). Every rank ends."""
    pids = [tmp_path / f"pid{rank}" for rank in range(ranks)]
    wait_until(lambda: all(pid.exists() and pid.read_text() for pid in pids) and ready())
    os.kill(launcher.pid, signal.SIGKILL)
    wait_until(lambda: not any(alive(int(pid.read_text())) for pid in pids))


NOTE_PID = "import os, time\nopen({path!r} + str(rank), 'w').write(str(os.getpid()))\n"


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("hang", [False, True])
def test_ranks_whose_launcher_is_killed_save_and_end(
    ranks, hang, flags, elastic, on_ranks, tmp_path
):
    """They save like after SIGTERM, and the log has each step once; a rank that hangs in a step
    ends without."""
    # step 3 waits for the launcher's death, however long that takes on a busy machine
    waits = "while step == 2 and os.getppid() == launcher: time.sleep(0.02)"
    plant = NOTE_PID.format(path=str(tmp_path / "pid")) + "launcher = os.getppid()\n"
    plant += in_step("time.sleep(3600 if step > 1 else 0)" if hang else waits)
    plant += f"train_gpt.Signals.GRACE_S = {2 if hang else 600}"  # a busy machine saves slowly
    log = tmp_path / "orphan.txt"
    launcher = elastic(ranks, 0, flags("orphan", num_steps=24, save_every=0), plant)
    kill_launcher(
        launcher, tmp_path, ranks, lambda: log.exists() and "\nstep:2/" in log.read_text()
    )
    if not hang:
        (saved,) = steps_saved(tmp_path)
        assert (
            f"error: terminated before step {saved}; --resume {log.name} continues"
            in log.read_text().splitlines()[-1]
        )
        assert f"terminated before step {saved}" in (tmp_path / "output").read_text()
        on_ranks(ranks, train, ["--resume", str(log)])
        assert re.findall(r"^step:(\d+)/24 train_time", log.read_text(), re.M) == [
            str(step) for step in range(1, 25)
        ]


@pytest.mark.parametrize("where", ["train_gpt.dist.rendezvous", "train_gpt.Worker.warm_up"])
def test_ranks_whose_launcher_is_killed_before_training_end(where, flags, elastic, tmp_path):
    plant = (
        "import time\ndef slow(*_, **__):\n"
        f"    open({str(tmp_path / 'slow')!r}, 'w').close()\n    time.sleep(3600)\n{where} = slow\n"
    )
    launcher = elastic(2, 0, flags("orphan"), NOTE_PID.format(path=str(tmp_path / "pid")) + plant)
    kill_launcher(launcher, tmp_path, 2, (tmp_path / "slow").exists)


@pytest.mark.slow
def test_torchrun_by_hand(flags, script, tmp_path):
    """It starts the ranks again when one is killed; its own SIGTERM saves and ends."""
    torchrun = script(
        TORCHRUN,
        "--standalone",
        "--nproc_per_node=2",
        "--max-restarts=3",
        ROOT / "train_gpt.py",
        *flags("byhand", num_steps=600, save_every=10, val_every=0),
        OMP_NUM_THREADS="1",
    )
    log = tmp_path / "byhand.txt"
    wait_until(lambda: steps_saved(tmp_path))
    children = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    wait_until(lambda: re.search(r'^\{"resumed".*\nstep:', log.read_text(), re.M))
    torchrun.send_signal(signal.SIGTERM)
    printed = "".join(torchrun.communicate(timeout=600))
    assert torchrun.returncode != 0
    saved = steps_saved(tmp_path)[-1]
    ended = f"error: (rank [01]: )?terminated before step {saved}; --resume %s continues"
    assert re.match(ended % log.name, log.read_text().splitlines()[-1])
    assert re.search(f"train_gpt.py: rank [01]: {ended % log}", printed)
    (line,) = resumed_lines(log)
    assert line["checkpoint"] and line["from_step"] < saved
    assert f'File "{ROOT / "train_gpt.py"}"' not in printed, (
        "a traceback of a rank; torchrun's own says how it ended"
    )
