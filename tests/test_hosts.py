"""Two hosts: two network namespaces with a cable between them, and torchrun in each."""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

import train_gpt
from conftest import forked, wait_until
from test_resume import corpus, end_of, flags, train  # noqa: F401 (fixtures)
from test_signals import _main, alive, calm_agent, in_step

ROOT = Path(train_gpt.__file__).parent
CABLE = "cable"
NAMES = ("host-a", "host-b")
ADDRESSES = ("10.78.0.1", "10.78.0.2")
PORT = 29_555


def ip(*words):
    return subprocess.run(["ip", *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def spaces():
    """Names of two network namespaces with a cable between them."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("two hosts are two network namespaces, which need root and `ip` (iproute2)")
    names = [f"test-{os.getpid()}-{side}" for side in "ab"]
    try:
        for name in names:
            if (made := ip("netns", "add", name)).returncode:
                pytest.skip(f"network namespaces are not allowed here: {made.stderr.strip()}")
        words = f"link add {CABLE} netns {names[0]} type veth peer name {CABLE} netns {names[1]}"
        ip(*words.split())
        for name, address in zip(names, ADDRESSES):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", CABLE)
            ip("-n", name, "link", "set", "lo", "up")
        plug(names, "up")
        yield names
    finally:
        for name in names:  # takes the cable along
            ip("netns", "del", name)


def plug(spaces, how):
    for space in spaces[: 2 if how == "up" else 1]:
        done = ip("-n", space, "link", "set", CABLE, how)
        assert not done.returncode, done.stderr


@pytest.fixture
def names(tmp_path):
    """A file like /etc/hosts, that hosts of a network may have."""
    (tmp_path / "names").write_text(
        "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES))
    )
    return tmp_path / "names"


def become_host(space, name, names):
    """This process moves to a host: its network, its name, and its file of names."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts = 0x00020000
    new_name = 0x04000000
    private = 0x44000
    bind = 0x1000

    def check(result):
        if result:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    with open(f"/run/netns/{space}") as file:
        check(libc.setns(file.fileno(), 0))
    check(libc.unshare(new_mounts | new_name))
    check(libc.mount(None, b"/", None, private, None))
    check(libc.mount(str(names).encode(), b"/etc/hosts", None, bind, None))
    socket.sethostname(name)


def _host(space, name, names, port, argv, plant, output):
    os.setsid()
    become_host(space, name, names)
    for descriptor in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    calm_agent()
    config = LaunchConfig(
        2,
        2,
        1,
        run_id="hosts",
        rdzv_backend="c10d",
        rdzv_endpoint=f"{NAMES[0]}:{port}",
        max_restarts=0,
        monitor_interval=0.02,
        start_method="fork",
    )
    elastic_launch(config, _main)(argv, plant)


@pytest.fixture
def two_hosts(spaces, names, tmp_path):
    """torchrun's launcher on each host, with one rank; start(flags of one, flags of the other,
    plant) -> the launchers."""
    started = []
    ports = iter(range(PORT + 1 + os.getpid() % 1000, 65_000))

    def start(one, other, plant=""):
        port = next(ports)
        started.extend(
            forked(_host, space, name, names, port, argv, plant, tmp_path / name)
            for space, name, argv in zip(spaces, NAMES, (one, other))
        )
        return started

    plug(spaces, "up")
    yield start
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()


def said(tmp_path, name):
    """The last words of a host's rank."""
    path = tmp_path / name
    return (
        "\n".join(re.findall(r"^train_gpt.py: .*", path.read_text(), re.M)) if path.exists() else ""
    )


WAIT_AT_3 = """
    while rank == 0 and step == 3 and not os.path.exists({go!r}): time.sleep(0.05)
"""


def test_a_cable_that_is_pulled_for_three_seconds_changes_nothing(
    spaces, two_hosts, flags, on_ranks, tmp_path
):
    log = tmp_path / "pulled.txt"
    go = tmp_path / "go"
    hosts = two_hosts(*[flags("pulled")] * 2, in_step(WAIT_AT_3.format(go=str(go))))
    wait_until(lambda: log.exists() and "\nstep:3/8" in log.read_text())
    plug(spaces, "down")
    go.touch()
    time.sleep(3)
    assert "\nstep:4/8" not in log.read_text(), "the cable was not needed"
    plug(spaces, "up")
    for host in hosts:
        host.join(600)
    assert [host.exitcode for host in hosts] == [0, 0], said(tmp_path, NAMES[0]) + said(
        tmp_path, NAMES[1]
    )
    on_ranks(2, train, flags("whole"))
    whole = end_of(tmp_path / "whole.txt")
    for key in ("final_state_hash", "train_digest"):
        assert end_of(log)[key] == whole[key], key
    start = json.loads(log.read_text().split("=" * 100 + "\n")[2].splitlines()[0])
    assert [host["ranks"] for host in start["hosts"]] == [[0], [1]]
    for host in start["hosts"]:
        assert host["source_sha256"] == start["source_sha256"]
        assert host["hardware"]["cores"] and host["versions"]["torch"]
    printed = "".join((tmp_path / name).read_text() for name in NAMES)
    assert "target" in printed and not said(tmp_path, NAMES[1])


def test_hosts_that_lose_each_other_end_and_say_so(spaces, two_hosts, flags, tmp_path):
    """Each is, for the other, the host that is lost: for one that with the store, for the other
    that without."""
    log = tmp_path / "lost.txt"
    go = tmp_path / "go"
    pids = [tmp_path / "pid0", tmp_path / "pid1"]
    note = f"import os\nopen({str(tmp_path / 'pid')!r} + str(rank), 'w').write(str(os.getpid()))\n"
    two_hosts(*[flags("lost", timeout_s=5)] * 2, note + in_step(WAIT_AT_3.format(go=str(go))))
    wait_until(lambda: log.exists() and "\nstep:3/8" in log.read_text())
    plug(spaces, "down")
    go.touch()
    began = time.monotonic()
    wait_until(lambda: not any(alive(int(pid.read_text())) for pid in pids))
    assert time.monotonic() - began < 200 and "another rank did not answer" in said(
        tmp_path, NAMES[0]
    ) + said(tmp_path, NAMES[1])
    assert log.read_text().splitlines()[-1].startswith("error: ")
