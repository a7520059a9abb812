"""Write a saved model for use without this project: what export.py --to safetensors does.

The plain model file is cut from the source that the model was trained with. Kept are the functions
and methods that ran, when the source was imported or in a forward pass of one sequence, and the
classes and constants that these mention, as they stand there; training, gradient sync and kernels
of GPUs are left out. plain_model.py is its end. Before the folder gets its name, a process without
this project loads it and must compute the logits of the original.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

import logs

FORM = "safetensors"
FILE = "modeling_gpt_speedrun"
TAIL = Path(__file__).with_name("plain_model.py")
TOLERANCE = 1e-6  # of logits, times the largest if it is above 1
ROWS = 8  # one in so many rows of logits is compared
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
IMPORTS = (ast.Import, ast.ImportFrom)


class DoesNotFit(logs.UserError):
    """The model cannot be written as a plain file; the message says why."""


# What the forward pass reads


@lru_cache(maxsize=None)
def words_in(node):
    """Return the names that code mentions: alone, behind a dot, or in quotes."""
    words = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            words.add(part.id)
        elif isinstance(part, ast.Attribute):
            words.add(part.attr)
        elif isinstance(part, ast.Constant):
            words.add(part.value)
    return words


def first_line(node):
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


class Source:
    """A file of the source. executed: (file, first line) of the functions that ran."""

    def __init__(self, path, executed):
        self.name = path.stem
        text = path.read_text("utf-8")
        self.lines = text.split("\n")
        self.body = ast.parse(text).body
        self.ran = {line for file, line in executed if file == str(path)}


class Cut:
    """What of the sources stays, those that are imported first.

    words: all names that kept code mentions. live: classes of objects that the model holds.
    """

    def __init__(self, sources):
        self.sources = {source.name: source for source in sources}
        self.words = {"trunk", "lm_head", "logits", "forward"}
        self.live = set()

    def stays(self, source, statement):
        """Return whether a function or an assignment stays."""
        if isinstance(statement, FUNCTIONS):
            called = statement.name in self.words or statement.name.startswith("__")
            return called and first_line(statement) in source.ran
        bases = getattr(statement, "targets", [getattr(statement, "target", None)])
        # TABLE[key] = value belongs to the table; another class's forward did not run
        bases = [base.value if isinstance(base, ast.Subscript) else base for base in bases]
        return any(base and words_in(base) <= self.words - {"forward"} for base in bases)

    def members(self, source, statement):
        """Return the parts of a class that stay. Those of a row have an order, and all stay."""
        runtime = getattr(sys.modules[source.name], statement.name)
        row = issubclass(runtime, tuple)
        return [
            member
            for member in statement.body
            if row and isinstance(member, ast.AnnAssign) or self.stays(source, member)
        ]

    def parts(self, source, statement):
        """Return the pieces of a statement that stay: of a class its head and members."""
        if not isinstance(statement, ast.ClassDef):
            return [statement] if self.stays(source, statement) else []
        members = self.members(source, statement)
        live = getattr(sys.modules[source.name], statement.name) in self.live
        if statement.name not in self.words or not (members or live):
            return []
        return [*statement.bases, *statement.decorator_list, *members]

    def grow(self):
        """Note all names that kept code mentions."""
        for source in self.sources.values():
            for statement in source.body:
                self.words.update(*map(words_in, self.parts(source, statement)))

    # The text

    def imports(self):
        """Return the lines that import what kept code mentions. A source names this file itself."""
        lines = {"from __future__ import annotations"}
        nodes = [
            node
            for source in self.sources.values()
            for statement in source.body
            for node in (ast.walk(statement) if isinstance(statement, ast.Try) else [statement])
            if isinstance(node, IMPORTS)
        ]
        for node, alias in [(node, alias) for node in nodes for alias in node.names]:
            name = alias.asname or alias.name.partition(".")[0]
            package = (getattr(node, "module", "") or alias.name).partition(".")[0]
            whole = isinstance(node, ast.Import)
            if name not in self.words or package in self.sources and not whole:
                continue
            if package in self.sources:
                lines |= {"import sys", f"{name} = sys.modules[__name__]"}
                continue
            logs.require(
                package == "torch" or package in sys.stdlib_module_names,
                f"its forward pass uses {name} of the package {package}, and a plain model file may"
                " import torch alone; compute it in torch, or in the constructor",
                DoesNotFit,
            )
            one = ast.Import([alias]) if whole else ast.ImportFrom(node.module, [alias], 0)
            lines.add(ast.unparse(one))
        return sorted(lines)

    def text_of(self, source, statement):
        """Return a statement as the source has it, with the comment above it, without what goes."""
        first = first_line(statement)
        while re.match("#(?! ---)", source.lines[first - 2]):
            first -= 1
        gone = set()
        if isinstance(statement, ast.ClassDef):
            members = self.members(source, statement)
            end = first_line(statement.body[0]) - 1
            for member in statement.body:
                if member not in members and not isinstance(member, ast.Expr):
                    gone.update(range(end + 1, member.end_lineno + 1))
                end = member.end_lineno
        lines = range(first, statement.end_lineno + 1)
        text = "\n".join(source.lines[line - 1] for line in lines if line not in gone)
        return f"{text}\n    pass" if text.endswith(":") else text

    def text(self):
        """Return the plain model file without its end."""
        kept = []
        gone = set()
        for source in self.sources.values():
            for statement in source.body:
                if self.parts(source, statement):
                    kept.append(self.text_of(source, statement))
                else:
                    gone.add(getattr(statement, "name", None))
        tree = ast.parse("\n".join(kept))
        named = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        opening = self.imports()
        if gone & named:
            opening.append(f"{' = '.join(sorted(gone & named))} = None  # of training, or of GPUs")
        return "\n\n\n".join(["\n".join(opening), *kept])


# What the model holds


class Description:
    """The model as config.json has it: modules, values that kept code reads, shapes of tensors."""

    def __init__(self, model, cut):
        self.cut = cut
        self.tensors = dict([*model.named_parameters(), *model.named_buffers()])
        parts = [*self.tensors.items(), *model.named_modules()]
        self.names = {id(part): name for name, part in parts}

    def name_of(self, thing, where):
        """Return the name of a class or function in the plain file."""
        name = f"{thing.__module__}.{thing.__qualname__}"
        if name.startswith("torch."):
            return name
        logs.require(
            thing.__module__ in self.cut.sources and thing.__qualname__.isidentifier(),
            f"{where} is {name}, which config.json cannot hold; define it at the top of a file, or"
            " use tensors",
            DoesNotFit,
        )
        self.cut.words.add(thing.__qualname__)
        self.cut.live.update(getattr(thing, "__mro__", ()))
        return thing.__qualname__

    def encode(self, value, where):
        """Return a value as plain_model.decode reads it."""
        import torch

        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor) and id(value) not in self.names:
            self.names[id(value)] = f"{where}_"
            self.tensors[f"{where}_"] = value
        if id(value) in self.names:
            return {"part": self.names[id(value)]}
        if kind is range:
            return {"range": [value.start, value.stop, value.step]}
        if kind in (list, tuple, set, frozenset, dict):
            items = value.items() if kind is dict else value
            items = [self.encode(one, f"{where}_{i}") for i, one in enumerate(items)]
            return items if kind is list else {kind.__name__: items}
        if isinstance(value, torch.dtype):
            return {"name": str(value)}
        if inspect.isfunction(value) or inspect.isclass(value):
            return {"name": self.name_of(value, where)}
        name = self.name_of(kind, where)
        row = isinstance(value, tuple)
        fields = value._asdict() if row else vars(value)
        return {
            name: {
                field: self.encode(one, f"{where}_{field}")
                for field, one in fields.items()
                if row or field in self.cut.words
            }
        }

    def describe(self, module, path=""):
        """Return the description of a module and of those in it; plain_model.build reads it."""
        import torch

        def inner(name):
            return f"{path}.{name}".lstrip(".")

        kind = type(module)
        usual = vars(torch.nn.Module())
        # attributes that torch's own code may read
        all_read = sum(base.__module__.startswith("torch.") for base in kind.__mro__) > 1
        values = {
            name: value
            for name, value in vars(module).items()
            if name not in usual and (all_read or name in self.cut.words)
        }
        # None, or stored under another name
        held = module._parameters | module._buffers | module._modules
        values |= {name: x for name, x in held.items() if self.names.get(id(x)) != inner(name)}
        description = {
            "class": self.name_of(kind, path or "the model"),
            "values": {name: self.encode(value, inner(name)) for name, value in values.items()},
            "modules": {
                name: self.describe(part, inner(name))
                for name, part in module._modules.items()
                if name not in values
            },
            "parameters": {},
            "buffers": {},
        }
        for name, x in self.tensors.items():
            owner, _, last = name.rpartition(".")
            if owner == path:
                which = "parameters" if isinstance(x, torch.nn.Parameter) else "buffers"
                description[which][last] = [str(x.dtype).removeprefix("torch."), *x.shape]
        return description


# Writing and checking


def rebuild(program, saved):
    """Return what a saved model is: (model in float32 on the CPU, its windows, the longest sequence
    that its rotary tables allow)."""
    engine = getattr(program, "train_gpt", program)
    config = engine.config_of(saved["config"], program.Config)
    config = dataclasses.replace(config, dtype="float32")
    model = engine.build_model(config, engine.Encoding(saved["vocab_size"], saved["bos_id"]))
    engine.load_parameters(model, saved)
    plan = engine.plan_of(config, saved["step"])
    model.apply_schedule(plan)
    longest = max(config.val_len, *engine.micro_batch_lengths(config))
    return model.eval(), plan.windows, longest


def sequences(vocab_size, bos_id, window, longest):
    """Return token sequences that reach what a forward pass may distinguish: one token, with and
    without a BOS at the start, two documents, repeats, more than a window."""
    import torch

    generator = torch.Generator().manual_seed(0)
    long = window * 3 // 2 + 100
    found = []
    for length, begins in ((1, [0]), (1, []), (40, []), (200, [0, 100]), (long, [0, 70])):
        length = min(length, longest)
        tokens = torch.randint(0, vocab_size, (length,), generator=generator)
        tokens[length - length // 3 :] = tokens[: length // 3].clone()  # repeats
        tokens[tokens == bos_id] = (bos_id + 1) % vocab_size
        tokens[[begin for begin in begins if begin < length]] = bos_id
        found.append(tokens)
    return found


def answers_of(model, windows, found, vocab_size):
    """Compute {name: tensor}: token sequences, and rows of their logits."""
    answers = {}
    for i, tokens in enumerate(found):
        logits = model.lm_head.logits(model.trunk(tokens, windows))
        logs.require(
            logits.isfinite().all(), "its logits are not finite: its training diverged", DoesNotFit
        )
        answers[f"tokens{i}"] = tokens
        answers[f"logits{i}"] = logits[::ROWS, :vocab_size].clone()
    return answers


def check_loss(model, windows, tokens):
    """Raise DoesNotFit unless the loss that the run states is that of the logits."""
    import torch

    logits = model.lm_head.logits(model.trunk(tokens[:-1], windows))
    ours = torch.nn.functional.cross_entropy(logits, tokens[1:], reduction="sum").item()
    stated = model(tokens[:-1], tokens[1:], windows)[1].item()
    logs.require(
        abs(stated - ours) <= 1e-4 * max(1.0, abs(stated)),
        f"its loss of a sequence is {stated:.4f}, and that of its logits {ours:.4f}: what its"
        " head's forward computes, lm_head.logits must compute, too",
        DoesNotFit,
    )


def cut_of(model, windows, cut):
    """Cut the source to what the model needs; return (what config.json holds, tensors by name)."""
    known = None
    while known != (known := (len(cut.words), len(cut.live))):
        description = Description(model, cut)
        content = {
            "windows": description.encode(windows, "windows"),
            "model": description.describe(model),
        }
        cut.grow()
    return content, description.tensors


def as_stored(x):
    """Return a copy of a tensor, in bfloat16 where that loses nothing."""
    narrow = x.detach().bfloat16() if x.is_floating_point() else x
    return (narrow if narrow.to(x.dtype).equal(x) else x.detach()).clone().contiguous()


README = """\
# {run_id}: a language model with {vocab_size} tokens
Trained by {program} of gpt-speedrun to step {step}; the run's config is in config.json, under `run`.
- With torch and safetensors: `import {file}; model = {file}.load()`, then `model(tokens)`: [B, T] -> logits.
- With transformers: `AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True)`.
- Tokenizer: {tokenizer}. Token {bos_token_id} begins each document, also the first of a sequence.
- A sequence has at most {max_position_embeddings} tokens; attention sees the last {window} of the document.
- There is no KV cache, and the rows of a batch are computed one after another, in float32.
- {file}.py is cut from the source that trained the model ({whence}).
- Its logits of {sequences} sequences differ from the original's by {difference:.1g} at most, relative to
  the largest: computed when this folder was written, by a process without that source.
"""


def config_of(saved, longest, content):
    """Return what config.json holds, with the names that transformers reads."""
    return {
        "model_type": "gpt_speedrun",
        "architectures": ["PlainForCausalLM"],
        "auto_map": {
            "AutoConfig": f"{FILE}.PlainConfig",
            "AutoModelForCausalLM": f"{FILE}.PlainForCausalLM",
        },
        "dtype": "float32",
        "vocab_size": saved["vocab_size"],
        "bos_token_id": saved["bos_id"],
        "eos_token_id": saved["bos_id"],
        "tokenizer": {257: "bytes", 50257: "gpt2"}.get(saved["vocab_size"], "none"),
        "max_position_embeddings": longest,
        "use_cache": False,
        "tie_word_embeddings": False,
        "run": {key: saved[key] for key in ("run_id", "program", "step", "config")},
        **content,
    }


def check(folder, name, answers, rows):
    """Print how far the logits of a written folder are from the answers at most. This function
    runs alone, in a process without this project."""
    import importlib
    import sys

    sys.path.insert(0, folder)
    plain = importlib.import_module(name)
    answers = plain.load_file(answers)
    model = plain.load()
    found = []
    with plain.torch.inference_mode():
        for i in range(len(answers) // 2):
            wanted = answers[f"logits{i}"]
            got = model(answers[f"tokens{i}"][None])[0, :: int(rows)]
            found.append((got - wanted).abs().max() / wanted.abs().max().clamp_min(1))
    print(plain.torch.stack(found).max().item())  # nan, if one is


def checked(result, answers):
    """Return how far the logits of a folder are from the answers. Raise DoesNotFit if too far."""
    code = f"{inspect.getsource(check)}\ncheck(*__import__('sys').argv[1:])"
    run = subprocess.run(
        [sys.executable, "-I", "-B", "-c", code, result, FILE, answers, str(ROWS)],
        capture_output=True,
        text=True,
        cwd=result,
    )
    lines = run.stderr.strip().splitlines() or [""]
    logs.require(
        run.returncode == 0, f"the plain model file does not work: {lines[-1]}", DoesNotFit
    )
    difference = float(run.stdout)
    logs.require(
        difference <= TOLERANCE,
        f"the plain model file's logits differ by {difference:.2g}, relative to the largest",
        DoesNotFit,
    )
    return difference


def write(model_path, log, folder):
    """Write the folder of a saved model; return a line about it. log: "" if there is none."""
    import leaks  # here, with numpy: the front of an export to csv needs neither
    import torch

    saved = torch.load(model_path, map_location="cpu", weights_only=True, mmap=True)
    folder = Path(folder).absolute()
    in_log = logs.last_run(log).source if log else None
    source = in_log or logs.source_in(leaks.ROOT, saved["program"])
    whence = "in its log" if in_log else "this project's, since its log has none"
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        place = Path(temporary, "source")
        place.mkdir()
        leaks.write_files(place, source)
        os.symlink(leaks.ROOT / "data", place / "data")  # a model may read GPT-2's tokens there
        # those that are imported first are first in the file
        paths = [place / name for name in reversed(logs.files_of(source))]
        result = Path(temporary, "result")
        result.mkdir()
        with torch.no_grad():
            difference = write_files(result, saved, paths, whence)
        result.rename(folder)
    return (
        f"{folder} written: logits differ by {difference:.1g} at most from the original's;"
        f" source: {whence}"
    )


def write_files(result, saved, paths, whence):
    """Write the files of a model, whose source is in paths; return how far its logits are from the
    original's at most."""
    from safetensors.torch import save_file

    executed = set()

    def note(frame, *_):
        executed.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    sys.path.insert(0, str(paths[0].parent))
    sys.setprofile(note)
    program = importlib.import_module(paths[-1].stem)
    sys.setprofile(None)
    model, windows, longest = rebuild(program, saved)
    found = sequences(saved["vocab_size"], saved["bos_id"], windows.long, longest)
    sys.setprofile(note)
    answers = answers_of(model, windows, found, saved["vocab_size"])
    sys.setprofile(None)
    check_loss(model, windows, found[-2])
    cut = Cut([Source(path, executed) for path in paths])
    content, tensors = cut_of(model, windows, cut)
    config = config_of(saved, longest, content)
    title = f"The model of run {saved['run_id']}, cut from its source; see README.md."
    end = TAIL.read_text("utf-8").partition("\n# ---")[2]
    text = f'"""{title}"""\n\n{cut.text()}\n\n\n# ---{end}'
    (result / f"{FILE}.py").write_text(text, "utf-8")
    (result / "config.json").write_text(json.dumps(config, indent=1) + "\n", "utf-8")
    if config["tokenizer"] == "bytes":
        tokenizer = {
            "tokenizer_class": "ByteTokenizer",
            "auto_map": {"AutoTokenizer": [f"{FILE}.ByteTokenizer", None]},
        }
        (result / "tokenizer_config.json").write_text(json.dumps(tokenizer), "utf-8")
    weights = result / "model.safetensors"
    stored = {f"model.{name}": as_stored(x) for name, x in tensors.items()}
    save_file(stored, weights, metadata={"format": "pt"})
    shutil.copymode(result / "config.json", weights)
    reference = result.with_name("answers")
    save_file(answers, reference)
    difference = checked(result, reference)
    readme = README.format(
        **config,
        **config["run"],
        file=FILE,
        window=windows.long,
        whence=whence,
        sequences=len(found),
        difference=difference,
    )
    (result / "README.md").write_text(readme, "utf-8")
    return difference


# The front, and the process that it starts


def model_and_log(path):
    """Return (saved model, its log or ""), of which a path names one."""
    place = Path(path)
    os.stat(path)
    if place.suffix in (".pt", ".ckpt"):
        log = place.with_name(place.name.partition(".step")[0].removesuffix(".pt") + ".txt")
        return str(place), str(log) if log.exists() else ""
    model = place.with_suffix(".pt")
    logs.require(
        place.suffix == ".txt" and model.exists(),
        f"{path}: no saved model {model} beside it; name a model, or train with --save_model true",
    )
    return str(model), str(place)


def start(parser, paths, folders):
    """Write a folder with a model in a process of its own: it runs the source in the log."""
    if len(paths) != 1 or len(folders) != 1:
        parser.error(f"--to {FORM}: give one RUN and one FOLDER: RUN --to {FORM} FOLDER")
    [folder] = folders
    try:
        model, log = model_and_log(logs.or_latest(logs.MODEL)(paths[0]))
        logs.require(
            not os.path.lexists(folder), f"{folder}: is there already; name a folder that is not"
        )
        logs.require(
            os.path.isdir(os.path.dirname(os.path.abspath(folder))),
            f"{folder}: its parent is no folder; make it first",
        )
    except (OSError, argparse.ArgumentTypeError, logs.UserError) as error:
        return logs.refuse("export.py", error)
    code = (
        f"import sys; sys.path.append({os.path.dirname(__file__)!r}); import export_model, logs;"
        " logs.run_main(lambda: export_model.main(sys.argv[1:]))"
    )
    return subprocess.call([sys.executable, "-I", "-c", code, model, log, folder])


def main(arguments):
    model_path, log, folder = arguments
    try:
        print(write(model_path, log, folder))
        return 0
    except ImportError as error:
        return logs.refuse(
            "export.py",
            f"--to safetensors: {error}; install it: .venv/bin/pip install safetensors",
        )
    except DoesNotFit as error:
        return logs.refuse("export.py", f"{model_path} cannot be a plain file: {error}")
    except Exception as error:  # of a source that this project has not seen
        return logs.refuse("export.py", f"{model_path}: {type(error).__name__}: {error}")
