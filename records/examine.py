"""Examines a saved model: the source in its log, run in a process of its own, gives logits; the rest is computed here.

Rules on a model; records/verify.py calls them for --rerun. What the source could do to its judge it does to a process
that is given tokens and returns logits: losses, hashes and comparisons are made from those and from the saved bytes.
That process begins without PYTHON* and LD_* variables and knows no target of the last token. What the source reads from
the disk there (a table of answers, say) only its reader can see.
"""

import hashlib
import importlib.util
import json
import os
import re
import resource
import select
import subprocess
import sys
import tempfile
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
ROWS = 512  # logits of so many tokens are handed over at a time
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
    """The state hash of a run of this config before its first step, and the digests of its buffers at its end. Of its data
    the state holds how many tokens were read: none."""
    import torch
    nothing = module.Shard(Path("none"), 0, module.Encoding(saved["vocab_size"], saved["bos_id"]))
    config = module.config_of({**config, "compile": "off", "init_from": ""})
    trainer = module.Trainer(config, module.Comm(), torch.device("cuda" if torch.cuda.is_available() else "cpu"), [nothing])
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


def serve(source_path, model_path, shared_path):
    """Answers a line of JSON on stdin with one or more on stdout; tokens and logits are in a file that both sides map."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the source prints is no answer

    def answer(**words):
        print(json.dumps(words), file=answers, flush=True)
    try:
        import torch
        bound_memory()
        module, model, windows, saved = load(source_path, model_path)
        device = next(model.parameters()).device
        with torch.no_grad():
            columns = model.lm_head.logits(model.trunk(torch.zeros(BLOCK, dtype=torch.int32, device=device), windows))
        answer(columns=columns.size(1))
    except Exception as error:
        return answer(error=f"{type(error).__name__}: {error}", memory=ran_out(error))
    for line in sys.stdin:
        try:
            count = json.loads(line)
            if isinstance(count, dict):
                answer(**beginning(module, count, saved))
                continue
            rest = -count % BLOCK if device.type == "cuda" else 0  # whole blocks, which on GPUs it must have
            shared = np.memmap(shared_path, dtype=np.int32, mode="r+")
            tokens = np.append(shared[:count], np.full(rest, saved["bos_id"], np.int32))
            with torch.no_grad():
                trunk = model.trunk(torch.from_numpy(tokens).to(device), windows)[:count]
                for part in trunk.split(ROWS):
                    logits = model.lm_head.logits(part).float().cpu().numpy()
                    shared.view(np.float32)[:logits.size] = logits.reshape(-1)
                    answer(rows=len(logits))
                    sys.stdin.readline()  # they were read
        except Exception as error:
            answer(error=f"{type(error).__name__}: {error}", memory=ran_out(error))


# The judge

def read_model(path, device="cpu"):
    """What train_gpt.py saved: config, run_id, vocab_size, bos_id, windows, and the parameters by name under `state`."""
    import torch
    return torch.load(path, weights_only=True, map_location=device)


class Witness:
    """A process that runs a source. It is asked for logits and believed in nothing else."""

    def __init__(self, source, model_path, most_tokens):
        self.folder = tempfile.TemporaryDirectory()
        where = Path(self.folder.name)
        (where / "judged.py").write_text(source, encoding="utf-8", errors="surrogateescape")
        self.shared = where / "shared"
        self.shared.write_bytes(bytes(4 * most_tokens))
        self.process = self.start(where, [str(where / "judged.py"), os.path.abspath(model_path), str(self.shared)])
        self.rest = b""
        try:
            self.columns = self.answer(columns=int)["columns"]
            if not 0 < self.columns <= 1 << 20:
                raise Broken(f"its logits have {self.columns} columns")
            with open(self.shared, "r+b") as file:
                file.truncate(4 * max(most_tokens, ROWS * self.columns))
        except BaseException:
            self.close()
            raise

    def start(self, where, paths):
        code = (f"import sys; sys.path.append({str(Path(__file__).parent)!r}); import examine; "
                f"examine.serve(*{paths!r})")
        environment = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
        return subprocess.Popen([sys.executable, "-I", "-c", code], cwd=where, env=environment, bufsize=0,
                                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()
        self.folder.cleanup()

    def answer(self, **kinds):
        while b"\n" not in self.rest:
            ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
            block = os.read(self.process.stdout.fileno(), 1 << 16) if ready else b""
            if not block or len(self.rest) > 1 << 16:
                raise Broken("the process that runs the log's source died, or gives no answer")
            self.rest += block
        line, _, self.rest = self.rest.partition(b"\n")
        found = json.loads(line)
        if found.get("memory"):
            raise MemoryError(str(found.get("error"))[:150])
        if "error" in found:
            raise Broken(f"the log's source cannot load or run the model ({' '.join(str(found['error']).split())[:150]})")
        if not all(isinstance(found.get(key), kind) for key, kind in kinds.items()):
            raise Broken(f"the log's source answers {line[:60]!r}")
        return found

    def ask(self, question):
        try:
            self.process.stdin.write(json.dumps(question).encode() + b"\n")
        except BrokenPipeError:
            raise Broken("the process that runs the log's source died") from None

    def beginning(self, config):
        self.ask(config)
        return self.answer(hash=str, buffers=dict)

    def logits(self, tokens):
        """Yields float32 [some of T, padded vocabulary] until there is a row for each token."""
        import torch
        np.memmap(self.shared, dtype=np.int32, mode="r+")[:len(tokens)] = tokens
        self.ask(len(tokens))
        seen = 0
        while seen < len(tokens):
            rows = self.answer(rows=int)["rows"]
            if rows != min(ROWS, len(tokens) - seen):
                raise Broken(f"its logits of {len(tokens)} tokens come in {rows} rows")
            logits = np.memmap(self.shared, dtype=np.float32, mode="r", shape=(rows, self.columns))
            yield torch.from_numpy(np.array(logits)).to("cuda" if torch.cuda.is_available() else "cpu")
            self.ask("read")
            seen += rows


def digest_of(tensor):
    import torch
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).cpu().numpy()).hexdigest()


def hash_of(digests):
    """The form that a log's hash of a model has, from the digests of its tensors."""
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in sorted(digests.items())).encode()).hexdigest()


class Examination:
    """A model, and the questions that are put to it. stream: the validation tokens, uint16. stated: what the log says."""

    def __init__(self, source, model_path, saved, stream, stated):
        self.source, self.model_path, self.saved, self.stream, self.stated = source, model_path, saved, stream, stated
        self.config, self.bos, self.sums = json.loads(json.dumps(saved["config"])), saved["bos_id"], []
        self.draw = np.random.default_rng(0)
        self.halved = any(x.element_size() == 2 for x in saved["state"].values()) and \
            self.config["dtype"] == "float32"
        self.tolerance = HALF_TOLERANCE if self.halved else TOLERANCE[self.config["dtype"]]
        self.logit_tolerance = LOGIT_TOLERANCE[self.config["dtype"]]
        self.scored = stated["val_tokens"]
        self.length = min(self.config["val_len"], len(stream) - 1)

    def witness(self, source=None):
        return Witness(source or self.source, self.model_path, max(self.length, PROBE_TOKENS))

    def check_saved(self, witness):
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
        seen = hash_of({**witness.beginning(stated)["buffers"], **digests})
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

    def check_initial(self, witness):
        """This checkout's script is asked first: one that brings its weights along would vouch for them."""
        wanted, ours = self.stated["initial_hash"], (ROOT / "train_gpt.py").read_text(encoding="utf-8")
        text = f"the initial state hash {wanted[:8]}... is that of seed {self.config['seed']}"
        if ours == self.source:
            seen = witness.beginning(self.stated["config"])["hash"]
        else:
            try:
                with self.witness(ours) as other:
                    seen = other.beginning(self.stated["config"])["hash"]
            except Broken:  # it may not take this config
                seen = None
            if seen != wanted and (seen := witness.beginning(self.stated["config"])["hash"]) == wanted:
                raise NotCheckable(f"{text} by the log's own source alone, and not by this checkout's train_gpt.py: see "
                                   "where they differ (--diff)")
        if seen != wanted:
            self.same_kind_of_machine()
            raise Broken(f"seed {self.config['seed']} gives the initial state hash {seen[:8]}..., the log states "
                         f"{wanted[:8]}...: it began with other weights")
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

    def check_loss(self, witness):
        if not 0 < self.scored < len(self.stream):
            raise Broken(f"{self.scored:,} tokens are said to be scored, and the shards hold {len(self.stream):,}")
        self.sums = [self.score(witness, sequence) for sequence in range(-(-self.scored // self.config["val_len"]))]
        loss = sum(total for total, _ in self.sums) / self.scored
        text = f"{loss:.5f} over {self.scored:,} tokens, the log states {self.stated['loss']:.5f}"
        if not abs(loss - self.stated["loss"]) <= self.tolerance:
            raise Broken(f"{text}: more than {self.tolerance} apart")
        return text

    def check_order(self):
        """Another process, which has seen no sequence yet, scores some from last to first."""
        if not self.sums:
            raise NotCheckable("the loss was not evaluated (above is why)")
        some = np.sort(self.draw.permutation(len(self.sums))[:SCORED_AGAIN])[::-1]
        with self.witness() as witness:
            for sequence in map(int, some):
                (total, count), (before, _) = self.score(witness, sequence), self.sums[sequence]
                if not abs(total - before) <= TOLERANCE[self.config["dtype"]] * count:
                    raise Broken(f"sequence {sequence} has a loss of {before / count:.5f} after those before it, and of "
                                 f"{total / count:.5f} after others")
        return f"{len(some)} of {len(self.sums)} sequences, scored from last to first by another process"

    def probe(self):
        """Documents of the validation data, cut so that they end here and there and on the edges of blocks."""
        length = min(PROBE_TOKENS, self.config["val_len"])
        tokens = self.stream[:length].copy()
        joins = {0, BLOCK, BLOCK - 1, 2 * BLOCK + 1, *self.draw.integers(1, length, 1 + length // 100)}
        tokens[[at for at in joins if at < length]] = self.bos
        return tokens

    def check_causality(self, witness):
        import torch
        probe, vocab_size = self.probe(), self.saved["vocab_size"]
        base, length = torch.cat(list(witness.logits(probe))), len(probe)
        joins, edges = np.flatnonzero(probe == self.bos), np.arange(BLOCK, length, BLOCK)
        places = {"a random place": self.draw.integers(1, length, PROBES),
                  "the edge of a block": np.concatenate([edges, edges - 1]),
                  "a document join": self.draw.permutation(np.concatenate([joins, joins + 1]))[:2 * PROBES]}
        asked = 0
        for kind, offsets in places.items():
            for at in sorted({int(at) for at in offsets if 0 < at < length}):
                changed = probe.copy()
                changed[at:] = self.draw.integers(0, vocab_size, length - at)
                changed[at] = self.bos if probe[at] != self.bos else (self.bos + 1) % vocab_size
                logits = torch.cat(list(witness.logits(changed)))
                difference = float((logits[:at] - base[:at]).abs().max())
                asked += 1
                if not difference <= self.logit_tolerance:
                    raise Broken(f"other tokens from {at} on ({kind}) change an earlier logit by {difference:.2g}")
        if self.length > length:  # at the length of validation, where not the logits fit but the surprises
            tokens, targets = self.stream[:self.length], self.stream[1:self.length + 1]
            try:
                base = self.surprises(witness, tokens, targets)
                for at in map(int, self.draw.integers(1, self.length, FAR_PROBES)):
                    changed = np.append(tokens[:at], self.draw.integers(0, vocab_size, self.length - at))
                    difference = float((self.surprises(witness, changed, targets)[:at] - base[:at]).abs().max())
                    asked += 1
                    if not difference <= self.logit_tolerance:
                        raise Broken(f"other tokens from {at} on change an earlier one's loss by {difference:.2g} in a "
                                     f"sequence of {self.length:,}")
            except MemoryError:
                raise NotCheckable(f"no leak in {length:,} tokens; for the {self.length:,} of a validation sequence "
                                   "memory ran out: check it where there is more") from None
        return f"other tokens from {asked} places on (random, edges of blocks, document joins) leave all earlier logits"


def examine(source, model_path, val_paths, stated, only=RULES):
    """{rule: (verdict, reason)} of a saved model and the source of its log.

    stated: what the log says: loss, val_tokens, state_hash, initial_hash, config, changes, on_gpu. Broken if the source cannot load it."""
    saved = read_model(model_path)
    shards = [open_shard(path) for path in val_paths]
    stream = np.concatenate([tokens for tokens, _, _ in shards])
    if (saved["vocab_size"], saved["bos_id"]) != tuple(shards[0][1:]):
        raise Broken(f"its vocabulary and BOS are {saved['vocab_size']}, {saved['bos_id']}, the shards' {shards[0][1:]}")
    asked = Examination(source, model_path, saved, stream, stated)
    with asked.witness() as witness:
        checks = dict(zip(RULES, (lambda: asked.check_saved(witness), lambda: asked.check_initial(witness),
                                  lambda: asked.check_loss(witness), asked.check_order,
                                  lambda: asked.check_causality(witness))))
        return {rule: judged(check) for rule, check in checks.items() if rule in only}


def seconds_needed(e):
    """About how long check_model takes, where a token takes as long as in the log's validations; a guess."""
    config, tokens, calls = e.get("start.config", dict), e.get("end.val_tokens", int), max(1, len(e.run.validations))
    asked = tokens + (SCORED_AGAIN + 1 + FAR_PROBES) * config["val_len"] + 5 * PROBES * min(PROBE_TOKENS, config["val_len"])
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
