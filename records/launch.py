"""Starts the ranks of one run on this machine, as torchrun --standalone does, but open to no other machine.

    python records/launch.py --nproc_per_node=2 [torchrun's flags] train_gpt.py [its flags]
    python records/launch.py --then logs --nproc_per_node=2 train_gpt.py    and draws the log, lets the model speak that
                                    the run saved, and keeps the latest five models of that folder
    python records/launch.py --fit [flags of train_gpt.py]    prints what this machine would start: GPUs, ranks, preset,
                                    whether the data are the user's own, folder of the log
    python records/launch.py --fit_text [flags]    likewise, and a second line: flags that fit the size of a user's text

torchrun's stores listen on every address of the machine; here the store, gloo and NCCL are found on loopback alone.
Each restart (--max_restarts) gets a store of its own, so nothing of the attempt that failed is left in it. The agent's
own report is not printed: the rank that failed has said why, unless a signal killed it, and then this says so.

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
    signal.signal(signal.SIGINT, signal.SIG_DFL if sys.argv[1:2] and sys.argv[1].startswith("--fit") else interrupted)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])  # run.sh blocks it until here
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # a checkpoint is wanted, and there is no rank to tell

import contextlib
import dataclasses
import logging
import socket
import subprocess
from pathlib import Path

from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.run import parse_args, run

ROOT = Path(__file__).resolve().parent.parent
HERE = "127.0.0.1"
MOST_MODELS = 5  # of 64 MB each
LEAST_STEPS = 40  # to which a small text is read again: fewer learn too little, more learn it by heart (LOG.md)
LEAST_TOKENS = 64  # of a micro-batch, where a text does not fill one of the preset's
MOST_VAL_TOKENS = 2 ** 18
TOLD = "SIGINT,SIGTERM,SIGHUP,SIGQUIT"  # passed on to the ranks, which have half a minute to end


class Loopback(StaticTCPRendezvous):
    """The agents of one machine are one agent: nothing to negotiate, a store per attempt and no more."""

    def __init__(self, parameters):
        super().__init__(HERE, 0, rank=0, world_size=1, run_id=parameters.run_id, timeout=0)
        self.store = None  # in this process; all ranks are its clients

    def get_backend(self):
        return "loopback"

    def next_rendezvous(self):
        if self.store:
            print("launch.py: a rank failed; all are started again", file=sys.stderr, flush=True)
        listener = socket.create_server((HERE, 0))
        port = listener.getsockname()[1]
        self.store = TCPStore(HERE, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
        return RendezvousInfo(self.store, 0, 1, RendezvousStoreInfo(HERE, port))


def fit(flags, text):
    sys.path.insert(0, str(ROOT))
    import train_gpt
    try:
        gpus = train_gpt.count_gpus()
        preset, config = train_gpt.parse_config(flags, "speedrun" if gpus else "laptop")
        ranks = train_gpt.usable_ranks(config, gpus or 2)
        train_gpt.check_config(config, ranks)  # here once, and not by each rank
        given, usual = train_gpt.make_parser().parse_args(flags), train_gpt.PRESETS[preset]
        chosen = fit_text(train_gpt, config, given) if text else {}
        if not text and Path(config.train_files).name != Path(usual.train_files).name and given.target_val_loss is None:
            chosen = {"target_val_loss": 0}
            say(f"data of your own: no loss is judged, since {usual.target_val_loss} is of others; --target_val_loss "
                "sets one")
    except (train_gpt.RunError, OSError) as error:
        sys.exit(f"train_gpt.py: error: {error}")
    print(gpus, ranks, preset, config.train_files != usual.train_files, config.log_dir)
    print(*(word for name, value in chosen.items() for word in (f"--{name}", value)))


def fit_text(train_gpt, config, given):
    """What fits the size of a user's text, by name, but for what the user has given; the reasons go to stderr."""
    train, val = train_gpt.find_shards(config.train_files), train_gpt.find_shards(config.val_files)
    sizes = [shard.tokens for shard in train]

    def read(epochs, wanted):
        """(steps that the text fills, at most so many, the stream behind them)"""
        stream, steps = train_gpt.Stream(train, dataclasses.replace(config, epochs=epochs)), 0
        with contextlib.suppress(train_gpt.RunError):  # the text ends
            while steps < wanted:
                stream.next_batch(train_gpt.plan_of(config, steps))
                steps += 1
        stream.close()
        return steps, stream

    epochs, chosen = given.epochs or (10 ** 4 if given.num_steps else 1), {}
    steps, stream = read(epochs, config.num_steps)
    while not steps and given.micro_batch_tokens is None and config.micro_batch_tokens > LEAST_TOKENS:
        chosen = {"micro_batch_tokens": config.micro_batch_tokens // 2}
        config = dataclasses.replace(config, **chosen)
        steps, stream = read(epochs, config.num_steps)
    if 0 < steps < LEAST_STEPS and given.epochs is None and given.num_steps is None:
        steps, stream = read(LEAST_STEPS, LEAST_STEPS)
    batch, about = train_gpt.tokens_of_steps(config, 1), f"{sum(sizes):,} tokens to train on"
    if not steps:
        raise train_gpt.RunError(f"the text has {about}, and a step reads {batch:,}: give more text, or less of "
                                 "--micro_batches or --micro_batch_tokens")
    at, document, _ = stream.position
    epochs, part = at // len(train) + 1, document / len(stream.loaded[at].result().starts) if at in stream.loaded else 1
    whole = int(0.97 * steps * sum(sizes) / (sum(sizes[:at]) + part * sizes[at % len(train)]))
    chosen |= {"target_val_loss": 0, "num_steps": steps, "epochs": epochs}
    say(f"text: in bytes; of GPT-2's {train_gpt.GPT2_VOCAB:,} tokens, some 4 bytes each, one would come about "
        f"{sum(sizes) / 4 / train_gpt.GPT2_VOCAB:.2g} times, and the head for them be most of a step's work")
    say(f"text: {about}, read by {steps} steps of {batch:,} " + (
        f"in {epochs} epochs; more of them would learn it by heart" if epochs > 1 else
        f"in part; nearly all of it takes --num_steps {whole}" if whole > 1.05 * steps else "once"))
    if (held := sum(shard.tokens for shard in val)) > MOST_VAL_TOKENS:
        chosen["val_tokens"] = MOST_VAL_TOKENS // config.val_len * config.val_len
        say(f"text: validation on {chosen['val_tokens']:,} of {held:,} tokens, to take seconds; --val_tokens 0 takes "
            "all")
    return {name: value for name, value in chosen.items() if getattr(given, name) is None}


def say(line):
    print(f"run.sh: {line}", file=sys.stderr)


def written(folder):
    """The logs and models in a folder, each with the time when it was written last."""
    return {(path, path.stat().st_mtime_ns) for path in Path(folder).resolve().glob("*")
            if path.suffix in (".txt", ".pt")}


def follow(folder, before):
    """A picture of the run, a text by its model. The run is whole, so its status stands whatever becomes of this."""
    new = [path for path, _ in sorted(written(folder) - before, key=lambda found: found[1])]
    try:
        for log in [path for path in new if path.suffix == ".txt" and b'\n{"end": ' in path.read_bytes()][-1:]:
            subprocess.call([sys.executable, ROOT / "records" / "picture.py", log])
        for model in [path for path in new if path.suffix == ".pt"][-1:]:
            os.write(1, b"\n")
            subprocess.call([sys.executable, ROOT / "sample.py", model, "--tokens", "300"])
            remove_old_models(folder)
    except OSError:  # nobody reads any more, or the files are gone
        pass


def remove_old_models(folder):
    """But for the latest MOST_MODELS. A file that is no run's, whose log beside it would open with its name, stays."""
    models = [path for path in Path(folder).glob("*.pt") if (log := path.with_suffix(".txt")).exists()
              and b'\n{"run_id": "%b"' % os.fsencode(path.stem) in log.read_bytes()]
    for old in sorted(models, key=lambda path: path.stat().st_mtime_ns)[:-MOST_MODELS]:
        old.unlink()
        print(f"removed: {old}, a model older than the latest {MOST_MODELS}; one with another name stays", flush=True)


def main(words):
    if words[:1] in (["--fit"], ["--fit_text"]):
        return fit(words[1:], words[0] == "--fit_text")
    folder = None
    if words[:1] == ["--then"]:
        _, folder, *words = words
    rendezvous_handler_registry.register("loopback", Loopback)
    loopback = socket.if_indextoname(1)  # lo, on macOS lo0
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", loopback)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else all sockets warn of a rank that died
    logging.disable(logging.CRITICAL)
    # a notice to save is the ranks' alone: torch's agent would end them with it
    signal.signal(signal.SIGUSR1, lambda *_: subprocess.call(["pkill", "-USR1", "-P", str(os.getpid())]))
    before = written(folder) if folder else set()
    try:
        run(parse_args(["--rdzv_backend=loopback", f"--local_addr={HERE}", f"--signals_to_handle={TOLD}", *words]))
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # again: what follows, picture and text, inherits this
        if folder:
            follow(folder, before)
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
