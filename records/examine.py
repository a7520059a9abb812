"""Examines a saved model: the source in its log, run in a process of its own, gives logits; the rest is computed here.

Rules on a model; records/verify.py calls them for --rerun. What the source could do to its judge it does to a process
that is given tokens and returns logits: losses, hashes and comparisons are made from those and from the saved bytes.
That process begins without PYTHON* and LD_* variables and knows no target of the last token. Where Linux has Landlock
it writes to its own folder alone. What the source reads from disk (a table of answers, say) only its reader can see.
Where later tokens are changed is drawn anew each time: a model that looks ahead at few places may pass once.
"""

import contextlib
import ctypes
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

from leaks import (NUMBER, PASS, ROOT, UNKNOWN, Broken, demand, find_shards, judged, open_shard, ran_out, several,
                   trainer)
from stats import CannotJudge

SAVED, INITIAL, LOSS, ORDER, CAUSAL = RULES = (
    "the saved model is the log's", "initial weights come from the seed", "independent validation loss",
    "a sequence's loss is its own", "later tokens do not reach earlier logits")
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}  # of a mean loss, between machines
HALF_TOLERANCE = 1e-4  # of one recomputed from parameters saved in 16 bits, which moves it by under 1e-5
SKETCH = 4096  # about so many parameters of a matrix tell two models apart
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a logit, within one machine
PROBE_TOKENS, PROBES = 1024, 12
SCORED_AGAIN, CHANGED_LATER = 16, 32  # sequences
BLOCK = 128  # of FlexAttention: where a mistaken block mask leaks
ROWS, MOST_COLUMNS = 64, 1 << 20  # logits of so many tokens are handed over at a time; of so many words at most
LONGEST_ANSWER = 1 << 20  # bytes of JSON
PATIENCE_S = 900  # for one answer: the first compiles
STARTING_S = 10  # about what a process needs until its first answer, of which a model gets three or four
# What train_gpt.py may fit to a machine, by the words of `changes` that say so; what is auto it may choose
FITTED = {"has no fp8": ("fp8_head",), "FlashAttention 3 wants": ("attention",),
          "too little memory for micro-batches": ("micro_batch_tokens", "micro_batches", "stages"),
          **{f"failed: --{name} ": (name,) for name in ("fp8_head", "attention", "kernels", "compile")}}
PASSED_ON = ("PATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # of the environment


# The process that runs the log's source

def load(source_path, model_path):
    """(its module, model, windows of the last validation, what was saved beside it).

    What is asked of the source: load_model(path, device), Windows, and a model with trunk(tokens, windows) and
    lm_head.logits; for the initial weights config_of, Trainer, Comm, Shard and Encoding."""
    import torch
    spec = importlib.util.spec_from_file_location("judged", source_path)
    module = sys.modules["judged"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    model, saved = module.load_model(model_path, "cuda" if torch.cuda.is_available() else "cpu")
    return module, model, module.Windows(*saved["windows"]), saved


def beginning(module, config, saved):
    """The state hash of a run of this config before its first step, and the digests of its buffers at its end. Of its
    data the state holds how many tokens were read: none."""
    import torch
    nothing = module.Shard(Path("none"), 0, module.Encoding(saved["vocab_size"], saved["bos_id"]))
    config = module.config_of({**config, "compile": "off", "init_from": ""})
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = module.Trainer(config, module.Comm(), device, [nothing])
    first = trainer.state_hash()
    trainer.model.rotary.follow(tuple(saved["rotary_windows"]))
    return {"hash": first, "buffers": {name: digest_of(x) for name, x in trainer.model.named_buffers()}}


def bound_memory():
    """Makes an allocation that this machine cannot hold an error, where the system would kill the process."""
    try:
        free = re.search(r"MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text())
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:
        return
    import torch
    if free and not torch.cuda.is_available():  # CUDA reserves more addresses than there is memory
        limit = used + 1024 * int(free[1])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def landlock():
    """The version of Linux's Landlock (since 5.13) here; below 1 where there is none."""
    return ctypes.CDLL(None).syscall(444, None, 0, 1) if sys.platform == "linux" else 0


def bound_writing():
    """Leaves this process its folder and devices to write to, nothing else, where there is Landlock."""
    create, add, restrict, no_new_privileges = 444, 445, 446, 38  # calls of all architectures; the last one is prctl's
    version = landlock()
    if version < 1:
        return
    kernel = ctypes.CDLL(None)
    rights = 0x1FF2 | 0x4000 * (version > 2)  # write, remove, make; truncate
    rules = kernel.syscall(create, struct.pack("Q", rights), 8, 0)
    for path in (".", "/dev"):
        kernel.syscall(add, rules, 1, struct.pack("=Qi", rights, os.open(path, os.O_PATH)), 0)
    kernel.prctl(no_new_privileges, 1, 0, 0, 0)
    kernel.syscall(restrict, rules, 0)


def serve(source_path, model_path, descriptor):
    """Answers a config with the state that a run of it begins in, and tokens with their logits, ROWS at a time: what is
    said is JSON, and the numbers follow as they lie in memory."""
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
        rest = -len(tokens) % BLOCK if device.type == "cuda" else 0  # whole blocks, which on GPUs it must have
        padded = torch.tensor(tokens + rest * [saved["bos_id"]], dtype=torch.int32, device=device)
        with torch.no_grad():
            for part in model.trunk(padded, windows)[:len(tokens)].split(ROWS):
                logits = model.lm_head.logits(part).float().cpu().numpy()
                answer(rows=len(logits))
                connection.send_bytes(logits)

    bound_memory()
    bound_writing()
    loaded = attempt(load, source_path, model_path)
    if loaded:
        module, model, windows, saved = loaded
        answer(loaded=True)
        with contextlib.suppress(EOFError):
            while question := json.loads(connection.recv_bytes()):
                if isinstance(question, list):
                    attempt(send_logits, question)
                else:
                    attempt(lambda: answer(**beginning(module, question, saved)))


# The judge

def read_model(path, device="cpu"):
    """What train_gpt.py saved: config, run_id, vocab_size, bos_id, windows, and parameters by name under `state`."""
    import torch
    return torch.load(path, weights_only=True, map_location=device)


def sketch(path):
    """Some parameters of each matrix, float32 [n]: two models from other seeds have them uncorrelated."""
    import torch
    matrices = [x.flatten() for x in read_model(path)["state"].values() if x.dim() > 1]
    return torch.cat([x[::-(-len(x) // SKETCH)].float() for x in matrices]).numpy()


def halve(path):
    """Rewrites a saved model with its parameters in 16 bits: half as large, and the loss tells as much."""
    import torch
    saved = read_model(path)
    state = {name: x.half() if x.dtype == torch.float32 and x.half().isfinite().all() else x  # not beyond 65504
             for name, x in saved["state"].items()}
    trainer().save_file(Path(path), {**saved, "state": state})


def start(folder, *arguments):
    code = (f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import examine; "
            f"examine.serve(*{arguments!r})")
    environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    environment |= {"HOME": str(folder), "TMPDIR": str(folder)}  # where compilers keep what they make
    return subprocess.Popen([sys.executable, "-I", "-c", code], cwd=folder, env=environment,
                            pass_fds=arguments[-1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@contextlib.contextmanager
def witness_of(source, model_path):
    """A Witness, whose process ends with the block."""
    ours, theirs = socket.socketpair()
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", PATIENCE_S, 0))
    with tempfile.TemporaryDirectory() as folder, Connection(ours.detach()) as connection:
        path = Path(folder, "judged.py")
        path.write_text(source, encoding="utf-8", errors="surrogateescape")
        with theirs:
            process = start(folder, str(path), os.path.abspath(model_path), theirs.fileno())
        try:
            witness = Witness(connection)
            witness.answer(loaded=bool)
            yield witness
        finally:
            process.kill()
            process.wait()


@dataclass
class Witness:
    """A process that runs a source. It is asked for logits and believed in nothing else."""
    connection: Connection

    def exchange(self, action, *arguments):
        try:
            return action(*arguments)
        except (EOFError, OSError):
            raise Broken("the process that runs the log's source died, or gives no answer") from None

    def ask(self, question):
        self.exchange(self.connection.send_bytes, json.dumps(question).encode())

    def answer(self, **kinds):
        message = self.exchange(self.connection.recv_bytes, LONGEST_ANSWER)
        found = json.loads(message)
        if found.get("memory"):
            raise MemoryError(str(found.get("error"))[:150])
        if "error" in found:
            why = " ".join(str(found["error"]).split())[:150]
            raise Broken(f"the log's source cannot load or run the model ({why})")
        demand(all(isinstance(found.get(key), kind) for key, kind in kinds.items()),
               f"the log's source answers {message[:60]!r}")
        return found

    def beginning(self, config):
        self.ask(config)
        return self.answer(hash=str, buffers=dict)

    def logits(self, tokens):
        """Yields float32 [some of T, padded vocabulary] until there is a row for each token."""
        import torch
        self.ask(tokens.tolist())
        for begin in range(0, len(tokens), ROWS):
            rows = self.answer(rows=int)["rows"]
            message = bytearray(self.exchange(self.connection.recv_bytes, 4 * ROWS * MOST_COLUMNS))
            demand(rows == min(ROWS, len(tokens) - begin), f"its logits of {len(tokens)} tokens come in {rows} rows")
            logits = np.frombuffer(message, np.float32).reshape(rows, -1)
            yield torch.from_numpy(logits).to("cuda" if torch.cuda.is_available() else "cpu")


def digest_of(tensor):
    import torch
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()


class Examination:
    """The model of a run e, and the questions put to it. stream: the validation tokens, uint16."""

    def __init__(self, e, model_path, saved, stream, witness):
        self.e, self.model_path, self.saved, self.stream, self.witness = e, model_path, saved, stream, witness
        self.stated, self.config = e.get("start.config", dict), json.loads(json.dumps(saved["config"]))
        self.source, self.scored, self.dtype = source_of(e), e.get("end.val_tokens", int), self.config["dtype"]
        self.bos, self.losses, self.draw = saved["bos_id"], [], np.random.default_rng()  # that no source can foresee
        self.halved = any(str(x.dtype) == "torch.float16" for x in saved["state"].values())

    def check_saved(self):
        """The saved file holds no buffers; whatever digests the source gives for its own, parameters with another hash
        do not get the log's."""
        differ = sorted(key for key in {*self.stated, *self.config} - fitted(self.e.run)
                        if self.config.get(key) not in ("auto", self.stated.get(key)))
        demand(not differ, f"its config is not the log's: {several(differ)}")
        if self.halved:
            raise CannotJudge("its parameters are saved in 16 bits, of which the log has no hash: the loss tells")
        digests = {name: digest_of(x) for name, x in self.saved["state"].items()}
        every = sorted({**self.witness.beginning(self.stated)["buffers"], **digests}.items())
        seen = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in every).encode()).hexdigest()
        self.compare("its parameters have hash", seen, self.e.digest("end.validation_hash.after"))
        return "its config is the log's, and its parameters are those of the last validation"

    def compare(self, what, seen, wanted, so=""):
        """The rotary's tables, which hashes cover, have other last bits where a GPU made them."""
        if seen != wanted and self.made_elsewhere():
            raise CannotJudge("the hash is not the log's, which covers tables of cos and sin that were made on a "
                              f"{self.made_elsewhere()}: check it on one")
        demand(seen == wanted, f"{what} {seen[:8]}..., the log states {wanted[:8]}...{so}")

    def made_elsewhere(self):
        """What the run was on, GPU or CPU, where this is the other."""
        import torch
        on_gpu = bool(self.e.get("start.hardware", dict).get("gpus"))
        return ("GPU" if on_gpu else "CPU") if on_gpu != torch.cuda.is_available() else None

    def check_initial(self):
        """This checkout's script is asked first: one that brings its weights along would vouch for them."""
        ours, seed = (ROOT / "train_gpt.py").read_text(encoding="utf-8"), self.config["seed"]
        wanted, seen = self.e.digest("end.state_hash.before_warmup"), None
        if ours != self.source:
            with contextlib.suppress(Broken), witness_of(ours, self.model_path) as other:  # it may not take this config
                seen = other.beginning(self.stated)["hash"]
        text = f"the initial state hash {wanted[:8]}... is that of seed {seed}"
        if seen != wanted:
            seen = self.witness.beginning(self.stated)["hash"]
            self.compare(f"seed {seed} gives the initial state hash", seen, wanted, ": it began with other weights")
            if ours != self.source:
                raise CannotJudge(f"{text} by the log's own source alone, and not by this checkout's train_gpt.py: "
                                  "see where they differ (--diff)")
        return text

    def surprises(self, witness, tokens, targets):
        """-log p(target) at each place, float64 [T], from the logits alone."""
        import torch
        parts, wanted = [], torch.from_numpy(targets.astype(np.int64))
        for logits in witness.logits(tokens):
            mine, wanted = wanted[:len(logits)].to(logits.device), wanted[len(logits):]
            parts.append((logits.logsumexp(1) - logits.gather(1, mine[:, None])[:, 0]).double().cpu())
        return torch.cat(parts)

    def sequence(self, number):
        """(tokens, targets) of a validation sequence."""
        begin = number * self.config["val_len"]
        piece = self.stream[begin:min(begin + self.config["val_len"], self.scored) + 1]
        return piece[:-1], piece[1:]

    def check_loss(self):
        demand(0 < self.scored < len(self.stream),
               f"{self.scored:,} tokens are said to be scored, and the shards hold {len(self.stream):,}")
        numbers = range(-(-self.scored // self.config["val_len"]))
        self.losses = [self.surprises(self.witness, *self.sequence(number)) for number in numbers]
        loss = sum(float(losses.sum()) for losses in self.losses) / self.scored
        stated = self.e.get("end.final_val_loss", NUMBER)
        text = f"{loss:.5f} over {self.scored:,} tokens, the log states {stated:.5f}"
        tolerance = TOLERANCE[self.dtype] if self.made_elsewhere() or not self.halved else HALF_TOLERANCE
        demand(abs(loss - stated) <= tolerance, f"{text}: more than {tolerance} apart")
        return text

    def check_order(self):
        """Another process, which has seen no sequence yet, scores some from last to first."""
        some = np.sort(self.numbers(SCORED_AGAIN))[::-1]
        with witness_of(self.source, self.model_path) as witness:
            for number in map(int, some):
                mean = float(self.surprises(witness, *self.sequence(number)).mean())
                before = float(self.losses[number].mean())
                demand(abs(mean - before) <= TOLERANCE[self.dtype], f"sequence {number} has a loss of {before:.5f} "
                       f"after those before it, and of {mean:.5f} after others")
        return f"{len(some)} of {len(self.losses)} sequences, scored from last to first by another process"

    def numbers(self, most):
        """Those of some sequences that were scored, of all where there are no more, in random order."""
        if not self.losses:
            raise CannotJudge("the loss was not evaluated (above is why)")
        return self.draw.permutation(len(self.losses))[:most]

    def check_causality(self):
        """Of a few documents all logits; and of some sequences the losses that count: another process, which has seen
        none of them, gets each with other tokens from some place on. What it would have to look ahead at, or to
        remember, it does not hold, and it cannot know that it is probed until it has passed that place."""
        import torch
        length = min(PROBE_TOKENS, self.config["val_len"], len(self.stream))
        begin, edges = self.draw.integers(len(self.stream) - length + 1), np.arange(BLOCK, length, BLOCK)
        tokens = self.stream[begin:begin + length].copy()
        joins = np.array([0, BLOCK, BLOCK - 1, 2 * BLOCK + 1, *self.draw.integers(1, length, 1 + length // 100)])
        tokens[joins[joins < length]] = self.bos  # documents that end here and there, and on the edges of blocks
        joins = np.flatnonzero(tokens == self.bos)
        places = {"the edge of a block": np.concatenate([edges, edges - 1]),
                  "a document join": self.draw.permutation(np.concatenate([joins, joins + 1]))[:2 * PROBES],
                  "a random place": self.draw.integers(1, length, PROBES)}

        def logits(tokens):
            return torch.cat(list(self.witness.logits(tokens)))

        asked, some = self.change_later(tokens, logits(tokens), places, logits, "logit"), self.numbers(CHANGED_LATER)
        with witness_of(self.source, self.model_path) as witness:
            for number in map(int, some):
                tokens, targets = self.sequence(number)
                places = self.draw.integers(1, max(2, len(tokens)), -(-CHANGED_LATER // len(some)))
                self.change_later(tokens, self.losses[number], {f"in sequence {number}": places},
                                  lambda later: self.surprises(witness, later, targets), "token's loss")
        return (f"other tokens from {asked} places on (random, edges of blocks, document joins) leave all earlier "
                f"logits, and in {len(some)} of {len(self.losses)} sequences the losses before some place")

    def change_later(self, tokens, base, places, answer, what):
        """Broken if other tokens from one of the places, {their kind: offsets}, on change an earlier answer than it is
        in base; else how many there are."""
        words = self.saved["vocab_size"]
        probes = [(at, kind) for kind, offsets in places.items() for at in np.unique(offsets).tolist()
                  if 0 < at < len(tokens)]
        for at, kind in probes:
            changed = np.append(tokens[:at], self.draw.integers(0, words, len(tokens) - at))
            changed[at] = self.bos if tokens[at] != self.bos else (self.bos + 1) % words
            difference = float((answer(changed)[:at] - base[:at]).abs().max())
            demand(difference <= LOGIT_TOLERANCE[self.dtype],
                   f"other tokens from {at} on ({kind}) change an earlier {what} by {difference:.2g}")
        return len(probes)


def fitted(run):
    """The flags of a run that its script fitted to the machine, by the words of its log."""
    said = "\n".join(map(str, run.start.get("changes") or ()))
    return {name for words, names in FITTED.items() if words in said for name in names}


def source_of(e):
    return (e.run.source or "").removesuffix("\n")


def seconds_needed(e):
    """About how long check_model takes, where a token takes as long as in the log's validations; a guess."""
    config, tokens, calls = e.get("start.config", dict), e.get("end.val_tokens", int), max(1, len(e.run.validations))
    longest = config["val_len"]
    asked = tokens + (SCORED_AGAIN + CHANGED_LATER) * longest + 5 * PROBES * min(PROBE_TOKENS, longest)
    validation = e.get("end.seconds_outside_clock.validation", NUMBER) * e.get("start.ranks", int)
    return 4 * STARTING_S + asked / tokens * validation / calls


def check_model(e, model_path, folder, only=RULES):
    """{rule: (verdict, reason)} for the run e, whose model this is. folder: of the shards; None: where the log says."""
    def all_rules():
        where = folder or os.path.dirname(ROOT / e.get("start.config.val_files", str))
        shards = [open_shard(path) for path in find_shards(e, "val", where)]
        saved = read_model(model_path)
        demand((saved["vocab_size"], saved["bos_id"]) == shards[0][1], "its vocabulary and BOS are "
               f"{saved['vocab_size']}, {saved['bos_id']}, those of the shards {tuple(shards[0][1])}")
        with witness_of(source_of(e), model_path) as witness:
            asked = Examination(e, model_path, saved, np.concatenate([tokens for tokens, _ in shards]), witness)
            checks = asked.check_saved, asked.check_initial, asked.check_loss, asked.check_order, asked.check_causality
            return {rule: judged(check) for rule, check in zip(RULES, checks) if rule in only}
    verdict, found = judged(all_rules)
    if verdict == PASS:
        return found
    rest = dict.fromkeys(RULES, (UNKNOWN, "the model could not be evaluated (above is why)"))
    return {**rest, SAVED: (verdict, found)}
