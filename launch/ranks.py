"""Start the ranks of one run on this machine, as torchrun --standalone does, but reachable from loopback only.

    python launch/ranks.py --nproc_per_node=2 [torchrun's flags] train_gpt.py [its flags]

torchrun's stores listen on every address of the machine; here the store, gloo and NCCL use loopback alone. Each restart
(--max_restarts) gets a new store. The ranks find this process's id in LAUNCHER_PID. The agent's own report is not
printed: a rank that fails prints its reason; this program says if a signal killed it.

Exit status: 0, or that of the first rank that failed; 128 + the signal that ended it or this program (Ctrl-C: 130).
"""

import os
import signal
import sys

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # asks for a checkpoint, and there is no rank yet

import contextlib
import glob
import itertools
import logging
import socket
import subprocess
import tempfile
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

HERE = "127.0.0.1"
FORWARDED = "SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT"  # to the ranks, which have half a minute to end


class Loopback(StaticTCPRendezvous):
    """A rendezvous of one agent, with a new store for each attempt."""

    def __init__(self, parameters):
        super().__init__(HERE, 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)
        self.store = None  # in this process; all ranks are its clients

    def get_backend(self):
        return "loopback"

    def next_rendezvous(self):
        if self.store:
            print("ranks.py: a rank failed; all ranks start again", file=sys.stderr, flush=True)
        listener = socket.create_server((HERE, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HERE, port))


def program_of(flags):
    """Return the module whose PRESETS has the preset that the flags name, or that wrote the checkpoint to resume."""
    import frontier
    import train_gpt
    words = [part for word in flags for part in word.split("=", 1)]
    given = dict(itertools.pairwise(words))  # the last one of a flag counts
    if "--resume" in given and "--preset" not in given:
        run = train_gpt.Config(resume=given["--resume"], log_dir=given.get("--log_dir", train_gpt.Config.log_dir))
        with contextlib.suppress(train_gpt.RunError, OSError):  # train_gpt.py says what is wrong with the checkpoint
            saved = train_gpt.load_file(train_gpt.find_run(run)[1], check=False)
            return frontier if saved.get("program") == "frontier.py" else train_gpt
    return frontier if given.get("--preset") in frontier.PRESETS else train_gpt


def ask_for_checkpoint(*_):
    """Pass SIGUSR1 on to the ranks, also on an image without procps."""
    lists = glob.glob("/proc/self/task/*/children")
    for child in (child for path in lists for child in Path(path).read_text().split()):
        os.kill(int(child), signal.SIGUSR1)
    if not lists:  # macOS
        subprocess.call(["pkill", "-USR1", "-P", str(os.getpid())])


def start(words):
    """Run the ranks that torchrun's words describe, until they end. Return the exit status."""
    rendezvous_handler_registry.register("loopback", Loopback)
    loopback = socket.if_indextoname(1)  # lo, on macOS lo0
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise every socket warns of a rank that died
    os.environ["LAUNCHER_PID"] = str(os.getpid())
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGUSR1, ask_for_checkpoint)  # torch's agent would end the ranks
    heeded = ",".join(name for name in FORWARDED  # nohup ignores SIGHUP, and torch's agent would heed it
                      if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN)
    folder = tempfile.TemporaryDirectory(prefix="ranks-")  # torch's agent would leave its own behind
    try:
        run(parse_args(["--rdzv_backend=loopback", f"--local_addr={HERE}", f"--signals_to_handle={heeded}",
                        f"--log_dir={folder.name}", *words]))
        return 0
    except SignalException as received:
        return 128 + received.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # the agent ended the others because of it
        if failure.exitcode >= 0:
            return failure.exitcode
        hint = "; perhaps memory ran out" if failure.exitcode == -signal.SIGKILL else ""
        print(f"ranks.py: error: rank {rank} was killed by {failure.signal_name()}{hint}", file=sys.stderr)
        return 128 - failure.exitcode
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        folder.cleanup()


if __name__ == "__main__":
    sys.exit(start(sys.argv[1:]))
