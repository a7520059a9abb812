"""Examines a saved model: the source in its log, run in a process of its own, gives logits; the rest is computed here.

Rules on a model; records/verify.py calls them for --rerun. What the source could do to its judge it does to a process
that is given tokens and returns logits: losses, hashes and comparisons are made from those and from the saved bytes.
That process begins without PYTHON* and LD_* variables and knows no target of the last token. What the source reads from
the disk there (a table of answers, say) only its reader can see.
"""

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
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from leaks import ROOT, UNKNOWN, Broken, NotCheckable, find_shards, judged, open_shard, ran_out, several

SAVED, INITIAL, LOSS, ORDER, CAUSAL = RULES = (
    "the saved model is the log's", "initial weights come from the seed", "independent validation loss",
    "a sequence's loss is its own", "later tokens do not reach earlier logits")
TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-3}  # of a mean loss, between machines
HALF_TOLERANCE = 2e-3  # of one that is recomputed from parameters saved in 16 bits
LOGIT_TOLERANCE = {"float32": 1e-4, "bfloat16": 1e-2}  # of a logit, within one machine
PROBE_TOKENS, PROBES, FAR_PROBES = 1024, 12, 6
SCORED_AGAIN = 16  # sequences
BLOCK = 128  # of FlexAttention: where a mistaken block mask leaks
ROWS, MOST_COLUMNS = 64, 1 << 20  # logits of so many tokens are handed over at a time; of so many words at most
LONGEST_ANSWER = 1 << 20  # bytes of JSON
PATIENCE_S = 900  # for one answer: the first compiles
STARTING_S = 10  # about what a process needs until its first answer, of which a model gets two or three
FITTED = ("micro_batch_tokens", "micro_batches", "stages", "fp8_head")  # train_gpt.py may fit these to a GPU
PASSED_ON = ("PATH", "HOME", "TMPDIR", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")  # of the environment


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


def halve(path):
    """Rewrites a saved model with its parameters in 16 bits: half as large, and the loss tells as much."""
    import torch
    sys.path.append(str(ROOT))
    import train_gpt
    saved = read_model(path)
    state = {name: x.half() if x.dtype == torch.float32 and x.half().isfinite().all() else x  # not beyond 65504
             for name, x in saved["state"].items()}
    train_gpt.save_file(Path(path), {**saved, "state": state})


class Witness:
    """A process that runs a source. It is asked for logits and believed in nothing else."""

    def __init__(self, source, model_path):
        self.folder = tempfile.TemporaryDirectory()
        path = Path(self.folder.name, "judged.py")
        path.write_text(source, encoding="utf-8", errors="surrogateescape")
        ours, theirs = socket.socketpair()
        for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", PATIENCE_S, 0))
        with theirs:
            self.process = self.start(str(path), os.path.abspath(model_path), theirs.fileno())
        self.connection = Connection(ours.detach())
        try:
            self.answer(loaded=bool)
        except BaseException:
            self.close()
            raise

    def start(self, *arguments):
        code = (f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import examine; "
                f"examine.serve(*{arguments!r})")
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return subprocess.Popen([sys.executable, "-I", "-c", code], cwd=self.folder.name, env=environment,
                                pass_fds=arguments[-1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.connection.close()
        self.folder.cleanup()

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
        if not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
            raise Broken(f"the log's source answers {message[:60]!r}")
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
            if rows != min(ROWS, len(tokens) - begin):
                raise Broken(f"its logits of {len(tokens)} tokens come in {rows} rows")
            logits = np.frombuffer(message, np.float32).reshape(rows, -1)
            yield torch.from_numpy(logits).to("cuda" if torch.cuda.is_available() else "cpu")


def digest_of(tensor):
    import torch
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()


class Examination:
    """A model, and the questions put to it. stream: the validation tokens, uint16. stated: what the log says."""

    def __init__(self, source, model_path, saved, stream, stated):
        self.source, self.model_path, self.saved, self.stream, self.stated = source, model_path, saved, stream, stated
        self.config, self.bos, self.sums = json.loads(json.dumps(saved["config"])), saved["bos_id"], []
        self.draw, self.dtype, self.scored = np.random.default_rng(0), self.config["dtype"], stated["val_tokens"]
        self.halved = any(str(x.dtype) == "torch.float16" for x in saved["state"].values())
        self.length = min(self.config["val_len"], len(stream) - 1)
        self.witness = Witness(source, model_path)

    def check_saved(self):
        """The saved file holds no buffers; whatever digests the source gives for its own, parameters with another hash
        do not get the log's."""
        stated = self.stated["config"]
        free = FITTED if self.stated.get("changes") else ()
        differ = sorted(key for key in {*stated, *self.config} - {*free} if stated.get(key) != self.config.get(key))
        if differ:
            raise Broken(f"its config is not the log's: {several(differ)}")
        if self.halved:
            raise NotCheckable("its parameters are saved in 16 bits, of which the log has no hash: the loss tells")
        digests = {name: digest_of(x) for name, x in self.saved["state"].items()}
        every = sorted({**self.witness.beginning(stated)["buffers"], **digests}.items())
        seen = hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in every).encode()).hexdigest()
        if seen != self.stated["state_hash"]:
            self.same_kind_of_machine()
            raise Broken(f"its parameters have hash {seen[:8]}..., the log states {self.stated['state_hash'][:8]}...")
        return "its config is the log's, and its parameters are those of the last validation"

    def same_kind_of_machine(self):
        """The rotary's tables, which hashes cover, have other last bits where a GPU made them."""
        import torch
        on_gpu = self.stated.get("on_gpu", False)
        if on_gpu != torch.cuda.is_available():
            raise NotCheckable("the hash is not the log's, which covers tables of cos and sin that were made on a "
                               f"{'GPU' if on_gpu else 'CPU'}: check it on one")

    def check_initial(self):
        """This checkout's script is asked first: one that brings its weights along would vouch for them."""
        wanted, ours, seen = self.stated["initial_hash"], (ROOT / "train_gpt.py").read_text(encoding="utf-8"), None
        text = f"the initial state hash {wanted[:8]}... is that of seed {self.config['seed']}"
        if ours != self.source:
            with contextlib.suppress(Broken), Witness(ours, self.model_path) as other:  # it may not take this config
                seen = other.beginning(self.stated["config"])["hash"]
            if seen == wanted:
                return text
        seen = self.witness.beginning(self.stated["config"])["hash"]
        if seen != wanted:
            self.same_kind_of_machine()
            raise Broken(f"seed {self.config['seed']} gives the initial state hash {seen[:8]}..., the log states "
                         f"{wanted[:8]}...: it began with other weights")
        if ours != self.source:
            raise NotCheckable(f"{text} by the log's own source alone, and not by this checkout's train_gpt.py: see "
                               "where they differ (--diff)")
        return text

    def surprises(self, witness, tokens, targets):
        """-log p(target) at each place, float64 [T], from the logits alone."""
        import torch
        parts, wanted = [], torch.from_numpy(targets.astype(np.int64))
        for logits in witness.logits(tokens):
            mine, wanted = wanted[:len(logits)].to(logits.device), wanted[len(logits):]
            parts.append((logits.logsumexp(1) - logits.gather(1, mine[:, None])[:, 0]).double().cpu())
        return torch.cat(parts)

    def score(self, witness, sequence):
        """(sum of the surprises, their number) of a validation sequence, which has a number."""
        begin = sequence * self.config["val_len"]
        piece = self.stream[begin:min(begin + self.config["val_len"], self.scored) + 1]
        return float(self.surprises(witness, piece[:-1], piece[1:]).sum()), len(piece) - 1

    def check_loss(self):
        if not 0 < self.scored < len(self.stream):
            raise Broken(f"{self.scored:,} tokens are said to be scored, and the shards hold {len(self.stream):,}")
        sequences = range(-(-self.scored // self.config["val_len"]))
        self.sums = [self.score(self.witness, sequence) for sequence in sequences]
        loss = sum(total for total, _ in self.sums) / self.scored
        text = f"{loss:.5f} over {self.scored:,} tokens, the log states {self.stated['loss']:.5f}"
        tolerance = HALF_TOLERANCE if self.halved else TOLERANCE[self.dtype]
        if not abs(loss - self.stated["loss"]) <= tolerance:
            raise Broken(f"{text}: more than {tolerance} apart")
        return text

    def check_order(self):
        """Another process, which has seen no sequence yet, scores some from last to first."""
        if not self.sums:
            raise NotCheckable("the loss was not evaluated (above is why)")
        some = np.sort(self.draw.permutation(len(self.sums))[:SCORED_AGAIN])[::-1]
        with Witness(self.source, self.model_path) as witness:
            for sequence in map(int, some):
                (total, count), (before, _) = self.score(witness, sequence), self.sums[sequence]
                if not abs(total - before) <= TOLERANCE[self.dtype] * count:
                    raise Broken(f"sequence {sequence} has a loss of {before / count:.5f} after those before it, and "
                                 f"of {total / count:.5f} after others")
        return f"{len(some)} of {len(self.sums)} sequences, scored from last to first by another process"

    def probe(self):
        """(documents of the validation data, cut so that they end here and there and on the edges of blocks; places of
        their BOS)."""
        length = min(PROBE_TOKENS, self.config["val_len"])
        tokens = self.stream[:length].copy()
        joins = {0, BLOCK, BLOCK - 1, 2 * BLOCK + 1, *self.draw.integers(1, length, 1 + length // 100)}
        tokens[[at for at in joins if at < length]] = self.bos
        return tokens, np.flatnonzero(tokens == self.bos)

    def check_causality(self):
        import torch
        probe, joins = self.probe()
        length, edges = len(probe), np.arange(BLOCK, len(probe), BLOCK)
        places = {"a random place": self.draw.integers(1, length, PROBES),
                  "the edge of a block": np.concatenate([edges, edges - 1]),
                  "a document join": self.draw.permutation(np.concatenate([joins, joins + 1]))[:2 * PROBES]}
        probes = [(at, kind) for kind, offsets in places.items() for at in np.unique(offsets).tolist()
                  if 0 < at < length]
        self.change_later(probe, probes, lambda tokens: torch.cat(list(self.witness.logits(tokens))), "logit")
        far = []
        if self.length > length:  # at the length of validation, where not the logits fit but the surprises
            tokens, targets = self.stream[:self.length], self.stream[1:self.length + 1]
            kind = f"in a sequence of {self.length:,}"
            far = [(at, kind) for at in self.draw.integers(1, self.length, FAR_PROBES).tolist()]
            try:
                self.change_later(tokens, far, lambda later: self.surprises(self.witness, later, targets),
                                  "token's loss")
            except MemoryError:
                raise NotCheckable(f"no leak in {length:,} tokens; for the {self.length:,} of a validation sequence "
                                   "memory ran out: check it where there is more") from None
        return (f"other tokens from {len(probes) + len(far)} places on (random, edges of blocks, document joins) leave "
                "all earlier logits")

    def change_later(self, tokens, places, answer, what):
        """Broken if other tokens from one of the places on change an earlier answer. places: [(offset, its kind)]."""
        base = answer(tokens)
        for at, kind in places:
            changed = np.append(tokens[:at], self.draw.integers(0, self.saved["vocab_size"], len(tokens) - at))
            changed[at] = self.bos if tokens[at] != self.bos else (self.bos + 1) % self.saved["vocab_size"]
            difference = float((answer(changed)[:at] - base[:at]).abs().max())
            if not difference <= LOGIT_TOLERANCE[self.dtype]:
                raise Broken(f"other tokens from {at} on ({kind}) change an earlier {what} by {difference:.2g}")


def examine(source, model_path, val_paths, stated, only=RULES):
    """{rule: (verdict, reason)} of a saved model and the source of its log.

    stated: what the log says: loss, val_tokens, state_hash, initial_hash, config, changes, on_gpu. Broken if the source
    cannot load it."""
    saved = read_model(model_path)
    shards = [open_shard(path) for path in val_paths]
    stream = np.concatenate([tokens for tokens, _, _ in shards])
    if (saved["vocab_size"], saved["bos_id"]) != tuple(shards[0][1:]):
        raise Broken(f"its vocabulary and BOS are {saved['vocab_size']}, {saved['bos_id']}, those of the shards "
                     f"{shards[0][1:]}")
    asked = Examination(source, model_path, saved, stream, stated)
    checks = asked.check_saved, asked.check_initial, asked.check_loss, asked.check_order, asked.check_causality
    with asked.witness:
        return {rule: judged(check) for rule, check in zip(RULES, checks) if rule in only}


def seconds_needed(e):
    """About how long check_model takes, where a token takes as long as in the log's validations; a guess."""
    config, tokens, calls = e.get("start.config", dict), e.get("end.val_tokens", int), max(1, len(e.run.validations))
    longest = config["val_len"]
    asked = tokens + (SCORED_AGAIN + 1 + FAR_PROBES) * longest + 5 * PROBES * min(PROBE_TOKENS, longest)
    validation = e.get("end.seconds_outside_clock.validation", (int, float)) * e.get("start.ranks", int)
    return 3 * STARTING_S + asked / tokens * validation / calls


def check_model(e, model_path, shards, folder):
    """{rule: (verdict, reason)} for the run e, whose model this is. folder: of the shards; None: where the log says."""
    def all_rules():
        where = folder or os.path.dirname(ROOT / e.get("start.config.val_files", str))
        stated = {"loss": e.get("end.final_val_loss", (int, float)), "val_tokens": e.get("end.val_tokens", int),
                  "state_hash": e.digest("end.validation_hash.after"), "config": e.get("start.config", dict),
                  "changes": e.run.start.get("changes"), "on_gpu": bool(e.get("start.hardware", dict).get("gpus")),
                  "initial_hash": e.digest("end.state_hash.before_warmup")}
        paths = find_shards({"val": shards["val"]}, where)["val"]
        return examine((e.run.source or "").removesuffix("\n"), model_path, paths, stated)
    verdict, found = judged(all_rules)
    if isinstance(found, dict):
        return found
    rest = dict.fromkeys(RULES, (UNKNOWN, "the model could not be evaluated (above is why)"))
    return {**rest, SAVED: (verdict, found)}
