"""Examine a saved model: the source in its log computes the logits in a separate process; the rest
is computed here.

records/verify.py calls these rules for --rerun. The source is untrusted, and its process may read
and write all files of its user: run it in a container. The process gets tokens and returns logits;
losses, hashes and comparisons are computed here. It starts without PYTHON* and LD_* variables and
never sees the target of the last token. The places where later tokens are changed are random: a
model that looks ahead at fewer than 1 in 10 places may pass."""

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from leaks import (
    NUMBER,
    PASS,
    ROOT,
    UNKNOWN,
    Broken,
    CannotJudge,
    checkable,
    find_shards,
    join_findings,
    judged,
    open_shard,
    program_of,
    ran_out,
    require,
    source_of_checkout,
    write_files,
)
from logs import plural

SAVED, INITIAL, LOSS, ORDER, CAUSAL = RULES = (
    "the saved model is the log's",
    "initial weights come from the seed",
    "independent validation loss",
    "a sequence's loss depends on no other sequence",
    "later tokens do not reach earlier logits",
)
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}  # nats, of a mean loss between machines
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a logit, within one machine
PROBE_TOKENS = 1024
PROBES = 12
# sequences
SCORED_AGAIN = 16
CHANGED_LATER = 32
BLOCK = 128  # tokens in a block of FlexAttention: a wrong block mask leaks at its edges
# tokens whose logits are sent at a time; largest vocabulary
ROWS = 64
MOST_COLUMNS = 1 << 20
LONGEST_ANSWER = 1 << 20  # bytes of JSON
PATIENCE_S = 900  # timeout of one answer: the first one compiles
PASSED_ON = ("PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # environment variables


# The process that runs the source


def load(source_path, model_path):
    """Return (program, model, windows of the last validation, saved content) for a program and a
    saved model.

    The program must have Config, Worker, and a model with trunk(tokens, windows) and
    lm_head.logits; it, or the train_gpt.py that it imports, config_of, build_model, plan_of,
    Encoding, Comm and Shard."""
    import torch

    sys.path.insert(0, os.path.dirname(source_path))
    spec = importlib.util.spec_from_file_location("judged", source_path)
    module = sys.modules["judged"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    saved = read_model(model_path)
    engine = getattr(module, "train_gpt", module)
    config = engine.config_of(saved["config"], module.Config)
    model = engine.build_model(config, engine.Encoding(saved["vocab_size"], saved["bos_id"]))
    state = saved.pop("state")
    plan = engine.plan_of(config, saved["step"])
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(state[name])
    model = model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    model.apply_schedule(plan)
    return module, model, plan.windows, saved


def initial_state(module, config, saved, paths):
    """Return the state hash of a run before its first step, and the digests of its buffers at its
    end.

    paths: the training shards, or none where they are not on this machine; an idea may read them.
    """
    import torch

    engine = getattr(module, "train_gpt", module)
    # a run looks at them after this state, and they may be on another machine
    module.gpt2_token_bytes = lambda *_: []
    nothing = engine.Shard(
        Path("no-training-shard"), 0, engine.Encoding(saved["vocab_size"], saved["bos_id"])
    )
    config = engine.config_of({**config, "compile": "off", "init_from": ""}, module.Config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    worker = module.Worker(
        config,
        engine.Comm(),
        device,
        [engine.read_header(Path(path)) for path in paths] or [nothing],
    )
    first = engine.state_hash(worker)
    worker.model.apply_schedule(engine.plan_of(config, saved["step"]))
    return {
        "hash": first,
        "buffers": {name: digest_of(x) for name, x in worker.model.named_buffers()},
    }


def bound_memory():
    """Limit the address space, so that too large an allocation raises an error instead of killing
    the process."""
    try:
        free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    import torch

    if free and not torch.cuda.is_available():  # CUDA reserves more addresses than there is memory
        limit = used + 1024 * int(free[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def serve(source_path, model_path, descriptor):
    """Answer questions: a config with its initial state, tokens with their logits, ROWS at a time.

    Messages are JSON; numbers follow as raw bytes."""
    import torch

    connection = Connection(descriptor)

    def answer(**words):
        connection.send_bytes(json.dumps(words).encode())

    def attempt(action, *arguments):
        try:
            return action(*arguments)
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}", memory=ran_out(error))

    def send_logits(tokens):
        device = next(model.parameters()).device
        rest = -len(tokens) % BLOCK if device.type == "cuda" else 0  # GPUs need whole blocks
        padded = torch.tensor(tokens + rest * [saved["bos_id"]], dtype=torch.int32, device=device)
        with torch.no_grad():
            for part in model.trunk(padded, windows)[: len(tokens)].split(ROWS):
                logits = model.lm_head.logits(part).float().cpu().numpy()
                answer(rows=len(logits))
                connection.send_bytes(logits)

    bound_memory()
    loaded = attempt(load, source_path, model_path)
    if loaded:
        module, model, windows, saved = loaded
        answer(loaded=True)
        with contextlib.suppress(EOFError):
            while question := json.loads(connection.recv_bytes()):
                if isinstance(question, list):
                    attempt(send_logits, question)
                else:
                    attempt(lambda: answer(**initial_state(module, saved=saved, **question)))


# The judge


def read_model(path, device="cpu"):
    """Load a saved model: config, step, run_id, vocab_size, bos_id, and parameters by name under
    `state`."""
    import torch

    return torch.load(path, weights_only=True, map_location=device)


def start(folder, *arguments):
    """Start the process that serves these arguments, isolated, in a folder of its own."""
    code = (
        f"import sys; sys.path.append({os.path.dirname(__file__)!r}); import examine;"
        f" examine.serve(*{arguments!r})"
    )
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder)}  # compilers keep caches there
    return subprocess.Popen(
        [sys.executable, "-I", "-c", code],
        cwd=folder,
        env=environment,
        pass_fds=arguments[-1:],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def start_worker(source, model_path):
    """Yield a Worker; its process ends with the block."""
    ours, theirs = socket.socketpair()
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", PATIENCE_S, 0))
    with tempfile.TemporaryDirectory() as folder, Connection(ours.detach()) as connection:
        path = write_files(folder, source)
        with theirs:
            process = start(folder, str(path), os.path.abspath(model_path), theirs.fileno())
        try:
            worker = Worker(connection)
            worker.answer(loaded=bool)
            yield worker
        finally:
            process.kill()
            process.wait()


@dataclass
class Worker:
    """A process that runs an untrusted source. Only its logits are used."""

    connection: Connection

    def exchange(self, action, *arguments):
        try:
            return action(*arguments)
        except (EOFError, OSError):
            raise Broken("the process that runs the log's source died or does not answer") from None

    def ask(self, question):
        self.exchange(self.connection.send_bytes, json.dumps(question).encode())

    def answer(self, **kinds):
        message = self.exchange(self.connection.recv_bytes, LONGEST_ANSWER)
        found = json.loads(message)
        why = " ".join(str(found.get("error")).split())[:150]
        if found.get("memory"):
            raise MemoryError(why)
        require("error" not in found, f"the log's source cannot load or run the model ({why})")
        require(
            all(isinstance(found.get(key), kind) for key, kind in kinds.items()),
            f"the log's source answers {message[:60]!r}",
        )
        return found

    def initial_state(self, config, paths):
        self.ask({"config": config, "paths": list(map(str, paths))})
        try:
            return self.answer(hash=str, buffers=dict)
        except Broken as reason:
            raise (
                reason
                if paths
                else CannotJudge(
                    f"{reason}; the training shards are not here: name their folder with --data"
                )
            )

    def logits(self, tokens):
        """Yield float32 [rows, padded vocabulary] until each token has a row."""
        import torch

        self.ask(tokens.tolist())
        for begin in range(0, len(tokens), ROWS):
            rows = self.answer(rows=int)["rows"]
            message = bytearray(self.exchange(self.connection.recv_bytes, 4 * ROWS * MOST_COLUMNS))
            require(
                rows == min(ROWS, len(tokens) - begin),
                f"its logits of {len(tokens)} tokens come in {rows} rows",
            )
            logits = np.frombuffer(message, np.float32).reshape(rows, -1)
            yield torch.from_numpy(logits).to("cuda" if torch.cuda.is_available() else "cpu")


def digest_of(tensor):
    import torch

    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()


def hash_of(digests):
    """Return the script's hash_of for {name: digest of a tensor}."""
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


class Examination:
    """The rules on the model of a run e. stream: the validation tokens, uint16. paths: the
    training shards, if any."""

    def __init__(self, e, model_path, saved, stream, worker, paths):
        self.e = e
        self.model_path = model_path
        self.saved = saved
        self.stream = stream
        self.worker = worker
        self.paths = paths
        self.stated = e.get("start.config", dict)
        self.config = json.loads(json.dumps(saved["config"]))
        self.source = e.run.script
        self.scored = e.get("end.val_tokens", int)
        self.dtype = self.config["dtype"]
        # no source can predict it
        self.bos = saved["bos_id"]
        self.losses = []
        self.random = np.random.default_rng()

    def check_saved(self):
        """Compare the saved config and the hash of parameters and buffers with the log's.

        The source computes the buffers' digests; a false one cannot turn other parameters into the
        log's hash."""
        differ = sorted(
            key
            for key in {*self.stated, *self.config}
            if not agree(key, self.config.get(key), self.stated.get(key))
        )
        require(not differ, f"its config is not the log's: {join_findings(differ)}")
        digests = {name: digest_of(x) for name, x in self.saved["state"].items()}
        seen = hash_of({**self.worker.initial_state(self.stated, self.paths)["buffers"], **digests})
        # of older logs
        stated = (
            "end.validation_hash.after" if "validation_hash" in self.e.run.end else "end.model_hash"
        )
        self.compare("its parameters have hash", seen, self.e.digest(stated))
        return "its config is the log's, and its parameters are those of the last validation"

    def compare(self, what, seen, wanted, so=""):
        """Compare hashes, which cover the rotary tables: their last bits differ between GPU and
        CPU."""
        if seen != wanted and self.made_elsewhere():
            raise CannotJudge(
                "the hash is not the log's; it covers tables of cos and sin that were computed on"
                f" a {self.made_elsewhere()}: check it there"
            )
        require(seen == wanted, f"{what} {seen[:8]}..., the log states {wanted[:8]}...{so}")

    def made_elsewhere(self):
        """Return GPU or CPU, the device of the run, if this machine has the other; else None."""
        import torch

        on_gpu = bool(self.e.get("start.hardware", dict).get("gpus"))
        return ("GPU" if on_gpu else "CPU") if on_gpu != torch.cuda.is_available() else None

    def check_initial(self):
        """Recompute the initial weights, first with this checkout's script: the source could bring
        weights along."""
        ours = source_of_checkout(program_of(self.source))
        seed = self.config["seed"]
        wanted = self.e.digest("end.state_hash.before_warmup")
        seen = None
        if ours not in ("", self.source):
            # it may reject the config
            with (
                contextlib.suppress(Broken, CannotJudge),
                start_worker(ours, self.model_path) as other,
            ):
                seen = other.initial_state(self.stated, self.paths)["hash"]
        text = f"the initial state hash {wanted[:8]}... is that of seed {seed}"
        if seen != wanted:
            seen = self.worker.initial_state(self.stated, self.paths)["hash"]
            self.compare(
                f"seed {seed} gives the initial state hash",
                seen,
                wanted,
                ": it began with other weights",
            )
            checkable(
                ours == self.source,
                f"{text} by the log's own source alone, not by this checkout's: see the "
                "differences (--diff)",
            )
        return text

    def token_losses(self, worker, tokens, targets):
        """Compute -log p(target) at each position, float64 [T], from the logits."""
        import torch

        parts = []
        wanted = torch.from_numpy(targets.astype(np.int64))
        for logits in worker.logits(tokens):
            mine = wanted[: len(logits)].to(logits.device)
            wanted = wanted[len(logits) :]
            parts.append(
                (logits.logsumexp(1) - logits.gather(1, mine[:, None])[:, 0]).double().cpu()
            )
        return torch.cat(parts)

    def sequence(self, number):
        """Return (tokens, targets) of a validation sequence."""
        begin = number * self.config["val_len"]
        piece = self.stream[begin : min(begin + self.config["val_len"], self.scored) + 1]
        return piece[:-1], piece[1:]

    def check_loss(self):
        """Compute the validation loss and compare it with the log's."""
        numbers = range(-(-self.scored // self.config["val_len"]))
        self.losses = [self.token_losses(self.worker, *self.sequence(number)) for number in numbers]
        loss = sum(float(losses.sum()) for losses in self.losses) / self.scored
        stated = self.e.get("end.final_val_loss", NUMBER)
        text = f"{loss:.5f} over {self.scored:,} tokens, the log states {stated:.5f}"
        tolerance = TOLERANCE[self.dtype]
        require(abs(loss - stated) <= tolerance, f"{text}: they differ by more than {tolerance}")
        return text

    def check_order(self):
        """Score some sequences from last to first in a new process: losses must not depend on
        earlier sequences."""
        some = np.sort(self.numbers(SCORED_AGAIN))[::-1]
        with start_worker(self.source, self.model_path) as worker:
            for number in map(int, some):
                mean = float(self.token_losses(worker, *self.sequence(number)).mean())
                before = float(self.losses[number].mean())
                require(
                    abs(mean - before) <= TOLERANCE[self.dtype],
                    f"sequence {number} has a loss of {before:.5f} "
                    f"after those before it, and of {mean:.5f} after others",
                )
        return (
            f"{len(some)} of {plural(len(self.losses), 'sequence')}, scored from last to first by"
            " another process"
        )

    def numbers(self, most):
        """Return the numbers of some scored sequences (all if there are fewer) in random order."""
        checkable(self.losses, "the loss was not evaluated (see the reason above)")
        return self.random.permutation(len(self.losses))[:most]

    def check_causality(self):
        """Change later tokens and compare earlier logits; in some sequences, earlier losses.

        The losses come from a new process, which gets each sequence only with changed tokens from
        some place on: it remembers no answer, and knows of the probe only after the place has
        passed."""
        import torch

        length = min(PROBE_TOKENS, self.config["val_len"], len(self.stream))
        begin = self.random.integers(len(self.stream) - length + 1)
        edges = np.arange(BLOCK, length, BLOCK)
        tokens = self.stream[begin : begin + length].copy()
        joins = self.random.integers(1, length, 1 + length // 100)
        # documents end here and there
        tokens[joins] = self.bos
        joins = np.flatnonzero(tokens == self.bos)
        places = {
            "the edge of a block": np.concatenate([edges, edges - 1]),
            "a document join": self.random.permutation(np.concatenate([joins, joins + 1]))[
                : 2 * PROBES
            ],
            "a random place": self.random.integers(1, length, PROBES),
        }

        def logits(tokens):
            return torch.cat(list(self.worker.logits(tokens)))

        asked = self.change_later(tokens, logits(tokens), places, logits, "logit")
        some = self.numbers(CHANGED_LATER)
        with start_worker(self.source, self.model_path) as worker:
            for number in map(int, some):
                tokens, targets = self.sequence(number)
                places = self.random.integers(
                    1, max(2, len(tokens)), -(-CHANGED_LATER // len(some))
                )
                self.change_later(
                    tokens,
                    self.losses[number],
                    {f"in sequence {number}": places},
                    lambda later: self.token_losses(worker, later, targets),
                    "token's loss",
                )
        return (
            f"changed tokens after {asked} places (random, edges of blocks, document joins) leave"
            f" all earlier logits as they are, and in {len(some)} of"
            f" {plural(len(self.losses), 'sequence')} the earlier losses"
        )

    def change_later(self, tokens, base, places, answer, what):
        """Change the tokens from each place on; raise Broken if an earlier answer differs from
        base.

        places: {kind: offsets}. Return their number."""
        words = self.saved["vocab_size"]
        probes = [
            (at, kind)
            for kind, offsets in places.items()
            for at in np.unique(offsets).tolist()
            if 0 < at < len(tokens)
        ]
        for at, kind in probes:
            changed = np.append(tokens[:at], self.random.integers(0, words, len(tokens) - at))
            changed[at] = self.bos if tokens[at] != self.bos else (self.bos + 1) % words
            difference = float((answer(changed)[:at] - base[:at]).abs().max())
            require(
                difference <= LOGIT_TOLERANCE[self.dtype],
                f"changed tokens from {at} on ({kind}) change an earlier {what} by"
                f" {difference:.2g}",
            )
        return len(probes)


def agree(name, asked, stated):
    """Return whether the log of a run that was asked for a value may state the other.

    Its machine decides `auto`, and may lack fp8. A log leaves out the folders of this machine."""
    without = {"train_files", "val_files", "log_dir", "init_from", "resume"}
    return (
        asked in (stated, "auto")
        or name in ("fp8_head", "fp8_mlp")
        and (asked, stated) == (True, False)
        or name in without
        and str(asked).endswith(f"/{stated}")
    )


def check_model(e, model_path, folder, only=RULES):
    """Return {rule: (verdict, reason)} for run e and its model. folder: of the shards; None: where
    the log says."""

    def all_rules():
        where = folder or os.path.dirname(ROOT / e.get("start.config.val_files", str))
        shards = [open_shard(path) for path in find_shards(e, "val", where)]
        saved = read_model(model_path)
        paths = []
        with contextlib.suppress(CannotJudge):
            paths = [os.path.abspath(path) for path in find_shards(e, "train", where)]
        with start_worker(e.run.script, model_path) as worker:
            asked = Examination(
                e,
                model_path,
                saved,
                np.concatenate([tokens for tokens, _ in shards]),
                worker,
                paths,
            )
            checks = (
                asked.check_saved,
                asked.check_initial,
                asked.check_loss,
                asked.check_order,
                asked.check_causality,
            )
            return {rule: judged(check) for rule, check in zip(RULES, checks) if rule in only}

    verdict, found = judged(all_rules)
    rest = dict.fromkeys(
        RULES, (UNKNOWN, "the model could not be evaluated (see the reason above)")
    )
    return found if verdict == PASS else {**rest, SAVED: (verdict, found)}
