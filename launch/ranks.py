"""Start the ranks of one run on this machine, reachable from loopback only: launch/ranks.py 2
train_gpt.py [its flags]

Importing torch takes most of a rank's start. Without a GPU, ranks are therefore forks of this
process, which has torch but has computed nothing, so that torch has no threads yet; no module of
the project reaches them. CUDA does not work in a fork: ranks on GPUs are new processes. They find
the id of this process in LAUNCHER_PID. A rank that fails prints its reason; this program says if a
signal killed it.

Exit status: 0, or that of the first rank that failed; 128 + the signal that ended it or this
program (Ctrl-C: 130).
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a checkpoint, and there is no rank yet

import contextlib
import itertools
import multiprocessing
import socket
import types
from pathlib import Path

# before torch; otherwise every socket warns of a rank that died
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
ROOT = Path(__file__).resolve().parent.parent
# folders whose modules a rank must import itself
OWN = {str(ROOT / name) for name in ("", "data", "launch", "records")}
FORWARDED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT
GRACE_S = 30  # for the ranks to end
fork = multiprocessing.get_context("fork").Process


def values_of(flags):
    """Return {--name: value} of flags; the last one of a flag counts."""
    words = [part for word in flags for part in word.split("=", 1)]
    return dict(itertools.pairwise(words))


def program_of(flags):
    """Return the module whose PRESETS has the preset that the flags name, or that wrote the
    checkpoint to resume."""
    import frontier
    import train_gpt

    given = values_of(flags)
    if "--resume" in given and "--preset" not in given:
        run = train_gpt.Config(
            resume=given["--resume"], log_dir=given.get("--log_dir", train_gpt.Config.log_dir)
        )
        # train_gpt.py says what is wrong with the checkpoint
        with contextlib.suppress(train_gpt.RunError, OSError):
            saved = train_gpt.load_file(train_gpt.find_run(run)[1], check=False)
            return frontier if saved.get("program") == "frontier.py" else train_gpt
    preset = given.get("--preset", "laptop")
    names = [*train_gpt.PRESETS, *frontier.PRESETS]
    train_gpt.require(preset in names, f"--preset is {preset}; there are {', '.join(names)}")
    return frontier if preset in frontier.PRESETS else train_gpt


def start(ranks, program, flags):
    """Run a program as ranks 0 to ranks - 1 until they end. Return the exit status."""
    import torch
    from torch.distributed import TCPStore

    forks = sys.platform == "linux" and not torch.cuda.device_count()
    code = compile(Path(program).read_bytes(), os.path.abspath(program), "exec") if forks else None
    # lo, on macOS lo0
    listener = socket.create_server(("127.0.0.1", 0))
    loopback = socket.if_indextoname(1)
    host, port = listener.getsockname()
    pids = {}
    received = []
    failed = (0, 0)
    usual = dict(
        GLOO_SOCKET_IFNAME=loopback,
        NCCL_SOCKET_IFNAME=loopback,
        TORCH_NCCL_ASYNC_ERROR_HANDLING="1",
    )
    # as torchrun; OpenMP in a fork has read it
    usual |= {} if forks or ranks == 1 else {"OMP_NUM_THREADS": "1"}
    os.environ.update(
        usual
        | os.environ
        | dict(
            WORLD_SIZE=str(ranks),
            LOCAL_WORLD_SIZE=str(ranks),
            MASTER_ADDR=host,
            MASTER_PORT=str(port),
            LAUNCHER_PID=str(os.getpid()),
            TORCHELASTIC_RUN_ID="none",
            TORCHELASTIC_USE_AGENT_STORE="True",
        )
    )

    def send(number, *_):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def end_ranks(number, frame=None):
        received.extend([number] if frame else [])  # a signal came
        send(number)
        signal.signal(signal.SIGALRM, lambda *_: send(signal.SIGKILL))
        signal.alarm(GRACE_S)

    # nohup ignores SIGHUP
    heeded = [number for number in FORWARDED if signal.getsignal(number) != signal.SIG_IGN]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*heeded, signal.SIGUSR1])
    for rank in range(ranks):
        process = fork(target=be, args=(rank, heeded, mask, program, flags, code))
        process.start()
        pids[process.pid] = rank
    for number in (*heeded, signal.SIGUSR1):
        signal.signal(number, send if number == signal.SIGUSR1 else end_ranks)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    # after the forks, since it has a thread; in this process, so that it outlives rank 0
    store = TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    while pids:
        pid, status = os.wait()
        rank = pids.pop(pid)
        if status and not failed[1]:
            failed = rank, os.waitstatus_to_exitcode(status)
            received or end_ranks(signal.SIGTERM)
    signal.alarm(0)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    del store
    rank, status = failed
    if status < 0 and not received:
        hint = "; perhaps memory ran out" if status == -signal.SIGKILL else ""
        print(
            f"ranks.py: error: rank {rank} was killed by {signal.Signals(-status).name}{hint}",
            file=sys.stderr,
        )
    return 128 + received[0] if received else status if status >= 0 else 128 - status


def be(rank, heeded, mask, program, flags, code):
    """Make this fork the program, as `python -I -u` would start it: in place, with the torch that
    it has, or anew."""
    for number in (*heeded, signal.SIGALRM, signal.SIGUSR1):
        # until it can save
        signal.signal(number, signal.SIG_IGN if number == signal.SIGUSR1 else signal.SIG_DFL)
    os.closerange(3, 1 << 16)  # the listener, a race's lock
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if code is None:
        os.execv(sys.executable, [sys.executable, "-I", "-u", program, *flags])
    sys.path[:] = [folder for folder in sys.path if folder not in OWN]
    for name, module in [*sys.modules.items()]:
        if os.path.dirname(getattr(module, "__file__", None) or "") in OWN:
            del sys.modules[name]
    sys.argv = [program, *flags]
    sys.modules["__main__"] = (main := types.ModuleType("__main__"))
    main.__file__ = code.co_filename
    sys.stdout and sys.stdout.reconfigure(line_buffering=True)
    exec(code, main.__dict__)


if __name__ == "__main__":
    sys.exit(start(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
