"""Write a saved model for use without this project: what export.py --to safetensors does.

The plain model file is cut from the source that the model was trained with. Kept are the classes,
methods and functions that the forward pass of one sequence needs, as they stand there; training,
gradient sync and kernels of GPUs are left out. plain_model.py is its end. Before the folder gets
its name, a process without this project loads it and must compute the logits of the original.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import importlib
import inspect
import itertools
import json
import os
import shutil
import subprocess
import symtable
import sys
import tempfile
from functools import cached_property, lru_cache, reduce
from pathlib import Path

import logs

FILE = "modeling_gpt_speedrun"
TAIL = Path(__file__).with_name("plain_model.py")
TOLERANCE = 1e-6  # of logits, times the largest if it is above 1
# of a class: with the constructor its object is not made, and a text of it is not needed
UNUSED = ("__init__", "__repr__", "__post_init__")
ROWS = 64  # of logits per sequence that the check compares, or up to twice as many
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
LOSS_OF = 3  # number of the sequence whose loss is compared
BLOCKS = (*FUNCTIONS, ast.ClassDef)


class DoesNotFit(logs.UserError):
    """The model cannot be written as a plain file; the message says why."""


# What the forward pass reads


def bound(statement):
    """Return the names that a statement of a module binds, also below an `if` or a `try`."""
    if isinstance(statement, BLOCKS):
        return {statement.name}
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return {alias.asname or alias.name.partition(".")[0] for alias in statement.names}
    names = set()
    if isinstance(statement, ast.Name) and isinstance(statement.ctx, ast.Store):
        names.add(statement.id)
    if isinstance(statement, (ast.Subscript, ast.Attribute)) and not isinstance(
        statement.ctx, ast.Load
    ):
        base = statement.value
        names |= {base.id} if isinstance(base, ast.Name) else set()
    return names.union(*map(bound, ast.iter_child_nodes(statement)))


def import_of(statement, name):
    """Return the import of a name that a statement is, or that is in a `try`, or None."""
    for node in ast.walk(statement) if isinstance(statement, ast.Try) else [statement]:
        if isinstance(node, (ast.Import, ast.ImportFrom)) and name in bound(node):
            return node
    return None


class WithoutAnnotations(ast.NodeTransformer):
    def visit_arg(self, node):
        node.annotation = None
        return node

    def visit_FunctionDef(self, node):
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node):
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)


@lru_cache(maxsize=None)
def reads(node):
    """Return the global names that a statement reads, and attributes: all names that it mentions
    behind a dot or in quotes."""
    node = WithoutAnnotations().visit(copy.deepcopy(node))
    names = set()
    scopes = [symtable.symtable(ast.unparse(node), "", "exec")]
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in scope.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or scope is scopes[0]):
                names.add(symbol.get_name())
    attributes = set()
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute):
            attributes.add(part.attr)
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            attributes |= {part.value} if part.value.isidentifier() else set()
    return names, attributes


def names_of_annotations(node):
    """Return the names that only annotations of a statement mention."""
    parts = []
    for part in ast.walk(node):
        parts += [getattr(part, "annotation", None), getattr(part, "returns", None)]
    return {
        name.id
        for part in parts
        if isinstance(part, ast.AST)
        for name in ast.walk(part)
        if isinstance(name, ast.Name)
    }


class Source:
    """A file of the source: its statements by the names that they bind."""

    def __init__(self, path):
        self.name = path.stem
        self.path = str(path)
        self.bytes = path.read_bytes()
        self.tree = ast.parse(self.bytes)
        starts = itertools.accumulate(map(len, self.bytes.splitlines(True)), initial=0)
        self.starts = [*starts]
        self.statements = {}
        for statement in self.tree.body:
            for name in bound(statement):
                self.statements.setdefault(name, []).append(statement)

    @cached_property
    def module(self):
        return sys.modules[self.name]

    def place(self, line, column=0):
        """Return the offset in bytes of a place that ast names."""
        return self.starts[line - 1] + column

    def span(self, node):
        """Return where a node begins and ends."""
        return (
            self.place(node.lineno, node.col_offset),
            self.place(node.end_lineno, node.end_col_offset),
        )


def first_line(node):
    return min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])


class Cut:
    """What of the source stays.

    executed: (file, first line) of the functions that ran in a forward pass. live: classes of
    objects that the model holds. attributes: all names that kept code reads as attributes.
    """

    def __init__(self, sources, executed):
        self.sources = {source.name: source for source in sources}
        self.executed = executed
        self.live = set()
        self.attributes = set()
        self.kept = {}  # statement: its source
        self.scanned = set()
        self.imports = {}  # name: (module, name there or "")
        self.stubs = {}  # name: its source
        self.annotations = set()
        # of a name that two files define, the program's stays as it is
        self.taken = dict.fromkeys(set().union(*map(bound, ast.parse(TAIL.read_bytes()).body)))
        for source in reversed(sources):
            for name in source.statements:
                if self.resolve(source, name)[0] is source:
                    self.taken.setdefault(name, source)

    def ran(self, source, function):
        return (source.path, first_line(function)) in self.executed

    def resolve(self, source, name):
        """Return (source, name) of the file that defines a name; source None: not of the files."""
        for statement in source.statements.get(name, ()):
            found = import_of(statement, name)
            if isinstance(found, ast.ImportFrom) and found.module in self.sources:
                origin = {one.asname or one.name: one.name for one in found.names}[name]
                return self.resolve(self.sources[found.module], origin)
            if found:
                return None, name
        return source, name

    def module_named(self, source, node):
        """Return the source that a name stands for, as train_gpt in train_gpt.GPT."""
        for statement in source.statements.get(getattr(node, "id", None), ()):
            if isinstance(statement, ast.Import):
                return self.sources.get(statement.names[0].name)
        return None

    def need(self, source, name):
        """Keep the statements that bind a name, or the import of it."""
        for statement in source.statements.get(name, ()):
            target = getattr(statement, "targets", [None])[0]
            if isinstance(target, ast.Attribute) and target.attr not in self.attributes:
                continue  # NAME.other = ...
            owner, origin = self.resolve(source, name)
            if owner is not None and owner is not source:
                self.need(owner, origin)
            elif self.is_of_kernels(source, statement):
                self.stubs[name] = source
            elif owner is None:
                self.need_import(import_of(statement, name), name)
            elif statement not in self.kept:
                self.kept[statement] = source

    def need_import(self, statement, name):
        for alias in statement.names:
            if name != (alias.asname or alias.name.partition(".")[0]):
                continue
            if isinstance(statement, ast.ImportFrom):
                module, there = statement.module, alias.name
            else:
                module, there = alias.name, ""
            if module in self.sources:
                return
            package = module.partition(".")[0]
            logs.require(
                package == "torch" or package in sys.stdlib_module_names,
                f"its forward pass uses {name} of the package {package}, and a plain model file may"
                " import torch alone; compute it in torch, or in the constructor",
                DoesNotFit,
            )
            self.imports[name] = module, there

    def is_of_kernels(self, source, statement):
        """Return whether a statement is an operator for GPUs or training: the forward on a CPU did
        not call it."""
        if isinstance(statement, ast.ClassDef):
            bases = {ast.unparse(base).rpartition(".")[2] for base in statement.bases}
            methods = [one for one in statement.body if isinstance(one, FUNCTIONS)]
            return "Function" in bases and not any(self.ran(source, one) for one in methods)
        if isinstance(statement, FUNCTIONS):
            decorators = " ".join(map(ast.unparse, statement.decorator_list))
            return "custom_op" in decorators and not self.ran(source, statement)
        return False

    def members(self, source, statement):
        """Return the parts of a class that stay."""
        from torch.nn import Module

        runtime = getattr(source.module, statement.name)
        fields = dataclasses.is_dataclass(runtime)
        row = issubclass(runtime, tuple)
        methods = [one for one in statement.body if isinstance(one, FUNCTIONS)]
        ran = [one for one in methods if self.ran(source, one)]
        kept = []
        for member in statement.body:
            if isinstance(member, ast.Expr):  # its docstring
                continue
            if isinstance(member, FUNCTIONS):
                name = member.name
                special = name.startswith("__") and name not in UNUSED
                read = name in self.attributes and name not in ("forward", *UNUSED)
                if ran or runtime in self.live:
                    stays = runtime in self.live and (special or read and not fields)
                else:  # made in a forward pass, but in none that ran
                    stays = name != "__init__" or not issubclass(runtime, Module)
                stays = stays or member in ran
            elif isinstance(member, ast.AnnAssign) and (row or not fields):
                stays = row or member.target.id in self.attributes
            elif isinstance(member, (ast.Assign, ast.AnnAssign)):
                stays = bool(bound(member) & self.attributes)
                if "forward" in bound(member):  # another class's
                    code = runtime.forward.__code__
                    stays = (code.co_filename, code.co_firstlineno) in self.executed
            else:
                stays = True
            if stays:
                kept.append(member)
        # constants that a kept part reads without a dot, as default values
        read = set().union(*(reads(member)[0] for member in kept)) if kept else set()
        return [
            member
            for member in statement.body
            if member in kept or isinstance(member, ast.Assign) and bound(member) & read
        ]

    def parts(self, source, statement):
        """Return the pieces of a kept statement that are read: of a class its head and members."""
        if not isinstance(statement, ast.ClassDef):
            return [statement]
        head = [ast.Expr(one) for one in (*statement.bases, *statement.decorator_list)]
        runtime = getattr(source.module, statement.name)
        members = self.members(source, statement)
        if dataclasses.is_dataclass(runtime):  # its fields lose their defaults
            members = [one for one in members if not isinstance(one, ast.AnnAssign)]
        return head + members

    def close(self):
        """Keep all that kept parts read, and what that reads."""
        known = -1
        while known != len(self.scanned) + len(self.kept):
            known = len(self.scanned) + len(self.kept)
            for statement, source in [*self.kept.items()]:
                if isinstance(statement, ast.ClassDef):
                    self.need(source, statement.name)
                for part in self.parts(source, statement):
                    key = source, ast.unparse(part) if isinstance(part, ast.Expr) else part
                    if key not in self.scanned:
                        self.scanned.add(key)
                        self.scan(source, part)

    def scan(self, source, part):
        names, attributes = reads(part)
        self.attributes |= attributes
        self.annotations |= {(source.name, name) for name in names_of_annotations(part)}
        for name in names:
            self.need(source, name)
        for node in ast.walk(part):
            if isinstance(node, ast.Attribute):
                module = self.module_named(source, node.value)
                if module:
                    self.need(module, node.attr)

    # The text

    def final(self, source, name):
        """Return a name in the plain file: of two that are the same, one begins with its file's."""
        source, name = self.resolve(source, name)
        if source is None or self.taken.get(name, source) is source:
            return name
        return f"{source.name}_{name}"

    def edits(self, source, statement):
        """Return [(begin, end, new text)] of a kept statement."""
        edits = []
        removed = []
        if isinstance(statement, ast.ClassDef):
            members = self.members(source, statement)
            has_text = ast.get_docstring(statement) is not None
            before = None
            for member in statement.body:
                if member not in members and not isinstance(member, ast.Expr):
                    begin = before.end_lineno + 1 if before else first_line(member)
                    removed.append(member)
                    edits.append((source.place(begin), source.place(member.end_lineno + 1), b""))
                before = member
            if not members and not has_text:
                begin, end, _ = edits[0]
                edits[0] = begin, end, b"    pass\n"
            if dataclasses.is_dataclass(getattr(source.module, statement.name)):
                for member in members:
                    if isinstance(member, ast.AnnAssign) and member.value:
                        removed.append(member.value)
                        begin = source.span(member.annotation)[1]
                        edits.append((begin, source.span(member.value)[1], b""))
        nodes = [statement]
        while nodes:
            node = nodes.pop()
            if node in removed:
                continue
            module = isinstance(node, ast.Attribute) and self.module_named(source, node.value)
            if module:
                edits.append((*source.span(node), self.final(module, node.attr).encode()))
                continue
            if isinstance(node, ast.Name) and node.id in source.statements:
                new = self.final(source, node.id)
                if new != node.id:
                    edits.append((*source.span(node), new.encode()))
            nodes += ast.iter_child_nodes(node)
        if isinstance(statement, BLOCKS):
            begin = source.bytes.index(statement.name.encode(), source.span(statement)[0])
            new = self.final(source, statement.name).encode()
            edits.append((begin, begin + len(statement.name), new))
        return edits

    def text_of(self, source, statement):
        """Return a kept statement as the source has it, with the comment above it."""
        line = first_line(statement)
        lines = source.bytes.splitlines(True)
        while lines[line - 2].startswith(b"#") and not lines[line - 2].startswith(b"# ---"):
            line -= 1
        begin = source.place(line)
        text = source.bytes[begin : source.place(statement.end_lineno + 1)]
        for first, last, new in sorted(self.edits(source, statement), reverse=True):
            text = text[: first - begin] + new + text[last - begin :]
        return text.decode()

    def text(self):
        """Return all kept statements, first of the files that are imported."""
        defined = {
            self.final(source, name)
            for statement, source in self.kept.items()
            for name in bound(statement)
        }
        unknown = set()
        for file, name in self.annotations:
            source = self.sources[file]
            if name in source.statements and self.final(source, name) not in defined:
                owner, origin = self.resolve(source, name)
                if owner is None:
                    self.need_import(import_of(source.statements[name][0], name), name)
                elif origin not in self.stubs:
                    unknown.add(origin)
        if unknown:
            self.imports["Any"] = "typing", "Any"
        lines = []
        if unknown:
            lines.append(f"{' = '.join(sorted(unknown))} = Any  # only annotations name these")
        if self.stubs:
            lines.append(f"{' = '.join(sorted(self.stubs))} = None  # of training, or of GPUs")
        texts = ["\n".join(lines) + "\n"] if lines else []
        before = None
        for source in self.sources.values():
            for statement in source.tree.body:
                if statement in self.kept:
                    wide = isinstance(statement, BLOCKS) or isinstance(before, BLOCKS)
                    texts.append("\n\n" * wide + self.text_of(source, statement))
                    before = statement
        return "".join(texts)


# What the model holds


def found_in(thing, names):
    """Return the attribute of an attribute ... of a thing, or None."""
    return reduce(lambda found, name: getattr(found, name, None), names, thing)


class Description:
    """The model as config.json has it: modules, values that kept code reads, shapes of tensors."""

    def __init__(self, model, cut):
        self.model = model
        self.cut = cut
        named = itertools.chain(model.named_parameters(), model.named_buffers())
        self.tensors = dict(named)
        self.names = {id(x): name for name, x in self.tensors.items()}
        self.paths = {id(module): path for path, module in model.named_modules()}

    def name_of(self, thing, where):
        """Return the name of a class or function in the plain file."""
        package, *inner = f"{thing.__module__}.{thing.__qualname__}".split(".")
        if package == "torch" and found_in(sys.modules[package], inner) is thing:
            return ".".join([package, *inner])
        source = self.cut.sources.get(package)
        logs.require(
            source and thing.__qualname__ in source.statements,
            f"{where} is {thing.__module__}.{thing.__qualname__}, which no file of its source"
            " defines; define it at the top of a file",
            DoesNotFit,
        )
        self.cut.need(source, thing.__qualname__)
        return self.cut.final(source, thing.__qualname__)

    def see(self, kind):
        """Note that the model holds an object of a class."""
        self.cut.live.update(kind.__mro__)

    def encode(self, value, where):
        import torch

        if value is None or type(value) in (bool, int, float, str):
            return value
        if isinstance(value, torch.Tensor):
            if id(value) not in self.names:
                owner, _, attribute = where.rpartition(".")
                name = f"{owner}.of_{attribute}".lstrip(".")
                self.names[id(value)] = name
                self.tensors[name] = value
            return {"tensor": self.names[id(value)]}
        if isinstance(value, torch.nn.Module) and id(value) in self.paths:
            return {"module": self.paths[id(value)]}
        if isinstance(value, list):
            return [self.encode(one, f"{where}_{i}") for i, one in enumerate(value)]
        if isinstance(value, range):
            return {"range": [value.start, value.stop, value.step]}
        if type(value) in (tuple, set, frozenset):
            return {type(value).__name__: self.encode([*value], where)}
        if type(value) is dict:
            return {"dict": self.encode([[*pair] for pair in value.items()], where)}
        if isinstance(value, torch.dtype):
            return {"name": str(value)}
        if inspect.isfunction(value) or inspect.isclass(value):
            return {"name": self.name_of(value, where)}
        kind = type(value)
        row = isinstance(value, tuple) and hasattr(value, "_fields")
        logs.require(
            row or dataclasses.is_dataclass(value),
            f"{where} is a {kind.__module__}.{kind.__qualname__}, which config.json cannot hold;"
            " make it numbers, texts, tensors, modules, or a row of them",
            DoesNotFit,
        )
        name = self.name_of(kind, where)
        self.see(kind)
        fields = value._fields if row else [field.name for field in dataclasses.fields(value)]
        return {
            name: {
                field: self.encode(getattr(value, field), f"{where}_{field}")
                for field in fields
                if row or field in self.cut.attributes
            }
        }

    def shape_of(self, x):
        return [str(x.dtype).removeprefix("torch."), *x.shape]

    def describe(self, module, path=""):
        """Return the description of a module and of those in it; plain_model.build reads it."""
        import torch

        kind = type(module)
        where = f"{path or 'the model'} ({kind.__name__})"
        logs.require(
            not module._forward_hooks and not module._forward_pre_hooks,
            f"{where} has a forward hook, which no file can hold; call it in forward",
            DoesNotFit,
        )
        description = {"class": self.name_of(kind, where)}
        self.see(kind)
        of_torch = any(
            base.__module__.startswith("torch.") and base is not torch.nn.Module
            for base in kind.__mro__[:-1]
        )
        standard = {*vars(torch.nn.Module())}
        values = {
            name: self.encode(value, f"{path}.{name}")
            for name, value in vars(module).items()
            if name not in standard and (of_torch or name in self.cut.attributes)
        }
        for name in ("_parameters", "_buffers", "_modules"):
            values |= {key: None for key, value in vars(module)[name].items() if value is None}
        parameters = {}
        for name, x in module._parameters.items():
            if x is not None:
                first = self.names[id(x)]
                own = first == f"{path}.{name}".lstrip(".")
                parameters[name] = self.shape_of(x) if own else first
        buffers = {}
        for name, x in module._buffers.items():
            if x is not None and self.names[id(x)] == f"{path}.{name}".lstrip("."):
                buffers[name] = self.shape_of(x)
            elif x is not None:
                values[name] = {"tensor": self.names[id(x)]}
        modules = {}
        for name, inner in module._modules.items():
            if inner is not None:
                inner_path = f"{path}.{name}".lstrip(".")
                first = self.paths[id(inner)]
                modules[name] = first if first != inner_path else self.describe(inner, inner_path)
        for name in self.tensors:  # of values
            owner, _, last = name.rpartition(".")
            if owner == path and last.startswith("of_") and last not in buffers | parameters:
                buffers[last] = self.shape_of(self.tensors[name])
        rest = {"values": values, "parameters": parameters, "buffers": buffers, "modules": modules}
        return description | {key: value for key, value in rest.items() if value}


# Writing and checking


def rebuild(saved):
    """Return what a saved model is: (model in float32 on the CPU, its windows, the longest sequence
    that its rotary tables allow). Its source is first on the path."""
    program = importlib.import_module(Path(saved["program"]).stem)
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
    found = []
    for length, begins in (
        (1, [0]),
        (1, []),
        (40, []),
        (200, [0, 100]),
        (window * 3 // 2 + 100, [0]),
        (window * 3 // 2 + 100, [0, 70]),
    ):
        length = min(length, longest)
        tokens = torch.randint(0, vocab_size, (length,), generator=generator)
        tokens[length - length // 3 :] = tokens[: length // 3].clone()  # repeats
        tokens[tokens == bos_id] = (bos_id + 1) % vocab_size
        for begin in begins:
            tokens[min(begin, length - 1)] = bos_id
        found.append(tokens)
    return found


def check(folder, name, answers, rows):
    """Print how far the logits of a written folder are from the answers at most. This function
    runs alone, in a process without this project."""
    import importlib
    import sys

    sys.path.insert(0, folder)
    plain = importlib.import_module(name)
    import torch
    from safetensors.torch import load_file

    answers = load_file(answers)
    model = plain.load()
    worst = 0.0
    with torch.inference_mode():
        for key, wanted in answers.items():
            if key.startswith("logits"):
                tokens = answers[key.replace("logits", "tokens")]
                got = model(tokens[None])[0]
                got = got[:: max(1, len(got) // int(rows))]
                scale = wanted.abs().max().clamp_min(1)
                worst = max(worst, ((got - wanted).abs().max() / scale).item())
                assert got.shape == wanted.shape and not torch.isnan(got).any(), "not numbers"
    assert not {"train_gpt", "frontier"} & {*sys.modules}, "it imports the project"
    print(worst)


def answers_of(model, windows, found, vocab_size):
    """Compute {name: tensor}: token sequences, and rows of their logits. Return also (file, first
    line) of each function that was called."""
    import torch

    answers = {}
    executed = set()

    def note(frame, event, _):
        executed.add((frame.f_code.co_filename, frame.f_code.co_firstlineno))

    for i, tokens in enumerate(found):
        sys.setprofile(note)
        with torch.inference_mode():
            logits = model.lm_head.logits(model.trunk(tokens, windows))
        sys.setprofile(None)
        logs.require(
            logits.isfinite().all(), "its logits are not finite: its training diverged", DoesNotFit
        )
        answers[f"tokens{i}"] = tokens
        answers[f"logits{i}"] = logits[:: max(1, len(logits) // ROWS), :vocab_size].clone()
        if i == LOSS_OF:
            check_loss(model, windows, tokens, logits)
    return answers, executed


def check_loss(model, windows, tokens, logits):
    """Raise DoesNotFit unless the loss that the run states is that of the logits."""
    import torch

    targets = tokens.roll(-1)
    targets[-1] = -1
    with torch.inference_mode():
        stated = model(tokens, targets, windows)[1].item()
        ours = torch.nn.functional.cross_entropy(logits[:-1], targets[:-1], reduction="sum").item()
    logs.require(
        abs(stated - ours) <= 1e-4 * max(1.0, abs(stated)),
        f"its loss of a sequence is {stated:.4f}, and that of its logits {ours:.4f}: what its"
        " head's forward computes, lm_head.logits must compute, too",
        DoesNotFit,
    )


def cut_of(model, windows, cut):
    """Cut the source to what the model needs; return (what config.json holds, tensors by name)."""
    cut.attributes |= {"trunk", "lm_head", "logits"}
    known = None
    while known != (known := (len(cut.attributes), len(cut.kept), len(cut.live))):
        description = Description(model, cut)
        content = {
            "windows": description.encode(windows, "windows"),
            "model": description.describe(model),
        }
        cut.close()
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


def import_line(name, module, there):
    """Return the import of a name: of a module, or of what is `there` in it."""
    if there:
        return f"from {module} import {there}" + f" as {name}" * (name != there)
    return f"import {module}" if name == module.partition(".")[0] else f"import {module} as {name}"


def text_of_file(cut, title):
    """Return the plain model file."""
    kept = cut.text()
    head, _, tail = TAIL.read_text("utf-8").partition("\n# ------")
    lines = {line for line in head.splitlines() if line.startswith(("import ", "from "))}
    lines |= {import_line(name, *origin) for name, origin in cut.imports.items()}
    future = "from __future__ import annotations"
    third = sorted(line for line in lines if line.split()[1].startswith(("torch", "safetensors")))
    own = sorted(lines - {*third, future})
    parts = [f'"""{title}"""', "", future, "", *own, "", *third, "", kept, "", f"# ------{tail}"]
    return "\n".join(parts)


def config_of(saved, windows, longest, content):
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


def write(model_path, log, folder):
    """Write the folder of a saved model; return a line about it. log: "" if there is none."""
    import torch

    saved = torch.load(model_path, map_location="cpu", weights_only=True, mmap=True)
    folder = Path(folder).absolute()
    root = Path(__file__).resolve().parent.parent
    in_log = logs.last_run(log).source if log else None
    source = in_log or logs.source_in(root, saved["program"])
    files = logs.files_of(source)
    if len(files) == 1:
        files = {saved["program"]: source}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        place = Path(temporary, "source")
        place.mkdir()
        for name, text in files.items():
            (place / name).write_text(text, "utf-8", "surrogateescape")
        os.symlink(root / "data", place / "data")  # a model may read GPT-2's tokens there
        sys.path.insert(0, str(place))
        # those that are imported first are first in the file
        paths = [place / name for name in reversed(files)]
        result = Path(temporary, "result")
        result.mkdir()
        whence = "in its log" if in_log else "this project's, since its log has none"
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

    model, windows, longest = rebuild(saved)
    vocab_size = saved["vocab_size"]
    found = sequences(vocab_size, saved["bos_id"], windows.long, longest)
    answers, executed = answers_of(model, windows, found, vocab_size)
    cut = Cut([Source(path) for path in paths], executed)
    content, tensors = cut_of(model, windows, cut)
    config = config_of(saved, windows, longest, content)
    title = (
        f"The model of run {saved['run_id']}, cut from its source; README.md says how to use it."
    )
    (result / f"{FILE}.py").write_text(text_of_file(cut, title), "utf-8", "surrogateescape")
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
