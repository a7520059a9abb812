"""Starts the ranks of one run on this machine, as torchrun --standalone does, but open to no other machine.

    python records/launch.py --nproc_per_node=2 [torchrun's flags] train_gpt.py [its flags]
    python records/launch.py --sample_from logs --nproc_per_node=2 train_gpt.py     and lets the model speak that the run saved
    python records/launch.py --fit [flags of train_gpt.py]     prints what this machine would start: GPUs, ranks, preset, whether
                                                       the data are the user's own, folder of the log

torchrun's stores listen on every address of the machine; here the store, gloo and NCCL are found on loopback alone. Each
restart (--max_restarts) gets a store of its own, so nothing of the attempt that failed is left in it. The agent's own
report is not printed: the rank that failed has said why, unless a signal killed it, and then this says so.

Exit status: 0, or that of the first rank that failed; 128 + the signal that ended it or this (Ctrl-C: 130).
"""

import os
import signal
import sys


def interrupted(*_):
    """Ctrl-C before there are ranks: without the traceback of an import."""
    os.write(2, b"launch.py: interrupted before a rank was started; nothing to keep\n")
    os._exit(130)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL if "--fit" in sys.argv[:2] else interrupted)

import logging
import socket
import subprocess
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (RendezvousHandler, RendezvousInfo, RendezvousStoreInfo,
                                                  rendezvous_handler_registry)
from torch.distributed.run import parse_args, run

ROOT = Path(__file__).resolve().parent.parent
HERE = "127.0.0.1"
TOLD = "SIGINT,SIGTERM,SIGHUP,SIGQUIT"  # passed on to the ranks, which have half a minute to end


class Loopback(RendezvousHandler):
    """The agents of one machine are one agent: nothing to negotiate, a store per attempt and no more."""

    use_agent_store = True  # this process hosts the store; all ranks are clients

    def __init__(self, parameters):
        self.run_id, self.store = parameters.run_id, None

    def next_rendezvous(self):
        if self.store:
            print("launch.py: a rank failed; all are started again", file=sys.stderr, flush=True)
        listener = socket.create_server((HERE, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HERE, port))

    def get_backend(self):
        return "loopback"

    def get_run_id(self):
        return self.run_id

    def is_closed(self):
        return False

    def set_closed(self):
        pass

    def num_nodes_waiting(self):
        return 0

    def shutdown(self):
        return True


def fit(flags):
    sys.path.insert(0, str(ROOT))
    import train_gpt
    try:
        gpus = train_gpt.count_gpus()
        preset, config = train_gpt.parse_config(flags, "speedrun" if gpus else "laptop")
        ranks = train_gpt.usable_ranks(config, gpus or 2)
    except (train_gpt.RunError, OSError) as error:
        sys.exit(f"train_gpt.py: error: {error}")
    print(gpus, ranks, preset, config.train_files != train_gpt.PRESETS[preset].train_files, config.log_dir)


def models(folder):
    return {(path, path.stat().st_mtime_ns) for path in Path(folder).glob("*.pt")} if folder else set()


def sample(saved):
    """The run is whole, so its status stands whatever becomes of this."""
    try:
        os.write(1, b"\n")
    except OSError:  # nobody reads any more
        return
    subprocess.call([sys.executable, ROOT / "sample.py", saved, "--tokens", "300"])


def main(words):
    if words[:1] == ["--fit"]:
        return fit(words[1:])
    folder = None
    if words[:1] == ["--sample_from"]:
        _, folder, *words = words
    rendezvous_handler_registry.register("loopback", Loopback)
    loopback = socket.if_indextoname(1)  # lo, on macOS lo0
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # when a rank has died the others' sockets warn of it at length
    logging.disable(logging.CRITICAL)
    # a notice to save is the ranks' alone: torch's agent would end them with it
    signal.signal(signal.SIGUSR1, lambda *_: subprocess.call(["pkill", "-USR1", "-P", str(os.getpid())]))
    before = models(folder)
    try:
        run(parse_args(["--rdzv_backend=loopback", f"--local_addr={HERE}", f"--signals_to_handle={TOLD}", *words]))
        if new := models(folder) - before:
            sample(max(new, key=lambda model: model[1])[0])
        return 0
    except SignalException as told:
        return 128 + told.sigval
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()  # later ones: ranks that were ended because of it
        if failure.exitcode >= 0:
            return failure.exitcode
        hint = "; perhaps memory ran out" if failure.exitcode == -signal.SIGKILL else ""
        print(f"launch.py: error: rank {rank} was killed by {failure.signal_name()}{hint}", file=sys.stderr)
        return 128 - failure.exitcode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
