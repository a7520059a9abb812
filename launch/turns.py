"""Compare the steps of an idea and of its base: are they the same work, and which is faster?

race.py calls measure(), which starts both sides, each as its ranks: this file with a socket, the
side's program and its flags, in the side's folder. A side is its own program, but in place of
training it lists the operations of a step of each stage with the shapes of their tensors, and then
takes steps on command. The sides alternate, A B, B A: other programs slow both alike. A side that
waits blocks in its socket, and uses no core and no GPU.

Sides whose operations agree do the same work: their runs take times in the ratio of their steps.
The turns still have to agree with that, since neither waiting nor numpy is an operation.
"""

import collections
import contextlib
import hashlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time

MIN_TURNS = 8
WARM_TURNS = 2  # left out
WIDTH = 0.005  # of the ratio's interval, when it suffices
BUDGET_S = 20  # for that width
WIDE = 0.03  # suffices for the same work; an interval of other work that is wider gets
LONG_S = 160
DOUBT = 0.001  # p of turns that contradict the same work
LARGE = 0.005  # a smaller contradiction comes from the machine
START_S = 600  # for a side to start and compile


# The race's part


class SideFailed(Exception):
    """A side ended, or did not answer."""


class SideProcess:
    """A side's ranks, alive until the end of a `with` block."""

    def __init__(self, words, ranks, **how):
        self.home = tempfile.TemporaryDirectory()
        path = os.path.join(self.home.name, "socket")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen(ranks)
        self.listener.settimeout(0.1)
        self.output = tempfile.TemporaryFile("w+", errors="replace")
        self.ranks = ranks
        self.files = []
        words = [path if word == "SOCKET" else word for word in words]
        words.append(f"--log_dir={self.home.name}")
        self.process = subprocess.Popen(
            words, stdout=self.output, stderr=self.output, start_new_session=True, **how
        )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.home.cleanup()

    def describe(self):
        """Wait until all ranks have started. Return what each says of its steps."""
        until = time.monotonic() + START_S
        while len(self.files) < self.ranks:
            with contextlib.suppress(TimeoutError):
                connection, _ = self.listener.accept()
                connection.settimeout(START_S)
                self.files.append(connection.makefile("rw"))
            if self.process.poll() is not None or time.monotonic() > until:
                raise SideFailed(self.reason())
        return sorted(self.answers(), key=lambda told: told["rank"])

    def step(self, stage):
        """Take the steps of a turn. Return their seconds on the slowest rank."""
        try:
            for file in self.files:
                print(stage, file=file, flush=True)
        except OSError:
            raise SideFailed(self.reason()) from None
        return max(self.answers())

    def answers(self):
        try:
            return [json.loads(file.readline()) for file in self.files]
        except (OSError, ValueError):
            raise SideFailed(self.reason()) from None

    def reason(self):
        self.output.seek(0)
        lines = self.output.read().strip().splitlines() or ["it wrote nothing"]
        return next((line for line in reversed(lines) if "rror" in line), lines[-1])


def measure(idea, base, say):
    """Return what the two sides' steps show, as race.jsonl keeps it.

    idea, base: functions of a first word, "work" or "time", that give a SideProcess; say: called
    with a message. Raise SideFailed if a side cannot step by itself."""
    try:
        return alternate(idea("work"), base("work"))
    except SideFailed as reason:
        say(f"the operations of a step cannot be listed ({reason}); times alone")
        return alternate(idea("time"), base("time"))


def alternate(*sides):
    """Let two SideProcesses step by turns until their ratio is known, or the budget is spent."""
    import numpy as np
    import scipy.stats
    import same_loss

    with contextlib.ExitStack() as held:
        for side in sides:
            held.enter_context(side)
        told = [side.describe() for side in sides]
        works, shares, steps = (
            [[rank[name] for rank in ranks] for ranks in told]
            for name in ("work", "shares", "steps")
        )
        same = None not in works[0] and works[0] == works[1]
        seconds = []
        began = time.monotonic()
        while True:
            order = (0, 1) if len(seconds) % 2 else (1, 0)
            turn = [0.0, 0.0]
            for stage in range(max(len(each[0]) for each in shares)):
                for at in order:
                    if stage < len(shares[at][0]):
                        turn[at] += shares[at][0][stage] * sides[at].step(stage)
            seconds.append(turn)
            if len(seconds) < WARM_TURNS + MIN_TURNS:
                continue
            speed = same_loss.speed_by_turns(np.array(seconds[WARM_TURNS:]), (1, 1))
            error = math.sqrt(speed.variance)
            doubt = abs(speed.log_ratio) > max(
                LARGE, error * scipy.stats.t.isf(DOUBT / 2, speed.df)
            )
            low, high = same_loss.interval_of(speed)
            agreed = same and not doubt
            enough = WIDE if agreed else WIDTH
            budget = LONG_S if high - low > WIDE and not agreed else BUDGET_S
            if high - low < enough or time.monotonic() - began > budget:
                break
    return {
        "same_work": bool(agreed),
        "same_operations": same,
        "steps": [ranks[0] for ranks in steps],
        "log_ratio": speed.log_ratio,
        "variance": speed.variance,
        "df": speed.df,
        "turns": len(seconds) - WARM_TURNS,
        "load": os.getloadavg()[0],
    }


# A side's part


def be_side(path, kind, program, flags):
    """Be a rank of a side's program that steps on command. kind: work, to list operations first;
    or time."""
    sys.argv = [program, *flags]
    sys.path.insert(0, os.getcwd())
    import importlib

    import torch
    import train_gpt
    from torch.utils._python_dispatch import TorchDispatchMode

    presets = importlib.import_module(program.removesuffix(".py")).PRESETS

    class Operations(TorchDispatchMode):
        """Count operations by their name and the shapes of their tensors."""

        def __init__(self):
            super().__init__()
            self.seen = collections.Counter()

        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            values = torch.utils._pytree.tree_leaves((args, kwargs))
            shapes = [
                (str(value.dtype), tuple(value.shape))
                for value in values
                if isinstance(value, torch.Tensor)
            ]
            self.seen[f"{operation} {shapes}"] += 1
            return operation(*args, **(kwargs or {}))

    class TrainingLoop(train_gpt.TrainingLoop):
        def run(self):
            self.warm_up()
            worker = self.worker
            config = self.config
            start = worker.stream.position
            stages = train_gpt.stages_of(config)
            cycle = config.adam_every
            firsts = [(stage.begin + stage.end) // 2 // cycle * cycle for stage in stages]

            def steps(stage):
                worker.stream.position = start
                worker.optimizer.reducer.drop_gradients()
                for step in range(firsts[stage], firsts[stage] + cycle):
                    plan = train_gpt.plan_of(config, step)
                    worker.step(plan, worker.stream.next_batch(plan))
                worker.optimizer.finish_all_gathers()
                if self.comm.device.type == "cuda":
                    torch.cuda.synchronize()

            worker.before_training()
            work = None
            if kind == "work":
                stance = torch.compiler.set_stance("force_eager")
                work = []
                for stage in range(len(stages)):
                    with stance, Operations() as operations:
                        steps(stage)
                    listed = json.dumps(sorted(operations.seen.items()))
                    work.append(hashlib.sha256(listed.encode()).hexdigest()[:16])
            shares = [(stage.end - stage.begin) / config.num_steps for stage in stages]
            told = {"rank": self.comm.rank, "work": work, "shares": shares}
            told["steps"] = config.num_steps
            connection = socket.socket(socket.AF_UNIX)
            connection.connect(path)
            with connection.makefile("rw") as file:
                print(json.dumps(told), file=file, flush=True)
                for line in file:
                    began = time.perf_counter()
                    steps(int(line))
                    print((time.perf_counter() - began) / cycle, file=file, flush=True)

    train_gpt.TrainingLoop = TrainingLoop
    sys.exit(train_gpt.main(presets, flags, train_gpt.process_start()))


if __name__ == "__main__":
    be_side(*sys.argv[1:4], sys.argv[4:])
