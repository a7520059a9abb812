"""Reads the source of a training script, without running it, for what sets or hides a compiler's switch.

A short list of things is forbidden, and another may be used in one plain way only: a module such as os or torch by
the names of what is in it, torch.compile and getattr by calling them. So nothing of weight travels under a name, in a
container or through a function, where a reader of the text could not follow it. What is written without these words at
all (a word put together at run time, a program within a package) only a human reader can see.
"""

import ast
import functools
import re
import sys
from collections import defaultdict
from typing import NamedTuple

MOST_CHARACTERS = 1 << 20  # of a source: its tree takes a thousand times the memory
MOST_FINDINGS = 100
MOST_MEANINGS = 16  # modules that one name is imported as

_MODULES = r"(?:torch(?:\.compiler)?|os|posix|nt|sys|builtins|importlib)"
_CALLED_ONLY = {"getattr", "setattr", "delattr", "hasattr", "vars", "exec", "eval", "compile", "__import__", "globals"}
_NEVER = {"exec", "eval", "compile", "globals"}
_BUILTINS = {*_CALLED_ONLY, "__builtins__", "__loader__", "__spec__"}
_BY_NAME = {"getattr", "setattr", "delattr"}  # (holder, name, ...) like holder.name
_IMPORTS = {"importlib.import_module", "__import__"}
_COMPILES = {"torch.compile", "torch.compiler.compile"}

_SETTING = re.compile(r"(?:.*\.)?(?:(?:_inductor|\w+_inductor_\w+)(?:\..*)?"
                      r"|_(?:dynamo|functorch)(?:\.(?:.*\.)?config\b.*|\.\*)?)|torch\.(?:compiler|\*)\.config\b.*"
                      r"|triton\.knobs(?:\..*)?|torch\._TorchCompile.*")
_ENVIRONMENT = re.compile(r"(?:.*\.)?(?:environb?(?:\..*)?|putenv|unsetenv)")
_READING = re.compile(r"os\.getenvb?|(?:.*\.)?environb?\.(?:get|items|keys|values|copy)")
# Dotted paths that no run has business with, and what they do
_FORBIDDEN = [
    (_SETTING, "touches the compiler's settings"),
    (re.compile(r"os\.(?:exec[lv]|spawn|posix_spawn|system|popen).*"), "starts a program with hidden switches"),
    (re.compile(r"(?:runpy|imp|code|codeop|marshal)(?:\..*)?|importlib\.(?!import_module$|metadata\b).+"
                r"|torch\.hub\.load.*|exec|eval|compile|globals"), "runs or reaches what cannot be scanned"),
    (re.compile(rf"sys\.modules(?:\..*)?|(?:.*\.)?__(?:globals|builtins|getattribute|subclasses|import|loader|spec)__"
                rf"(?:\..*)?|{_MODULES}(?:\..*)?\.__(?:dict|call|getattr|setattr|delattr)__(?:\..*)?"),
     "reaches a module by a way that cannot be followed"),
    (re.compile(_MODULES), "hands a module on, where its use cannot be followed"),
    (re.compile(r"torch\.compile(?:r\.compile)?(?:\..*)?|" + "|".join(_CALLED_ONLY)), "is not called where it stands"),
]
# Not the compiler's switches: variables of the launcher, the collectives and the allocator, and where caches lie
VARIABLE = re.compile(r"(?!TORCHELASTIC|TORCH_NCCL|PYTORCH_(?:CUDA_|HIP_)?ALLOC_CONF|"
                      r"(?:TORCHINDUCTOR|TRITON)_CACHE_DIR$)"
                      r"(?:TORCH|PYTORCH|TRITON|INDUCTOR)[A-Z0-9]*_[A-Z0-9_]+")
_ASSIGNMENT = re.compile(rf"(?<!\w){VARIABLE.pattern}=")

# What a public index distributes and runs of this kind import. Any other module is code that the log does not hold
_PACKAGES = {"torch", "torchvision", "torchao", "triton", "numpy", "scipy", "matplotlib", "pandas", "sklearn", "numba",
             "tiktoken", "tokenizers", "transformers", "sentencepiece", "datasets", "safetensors", "huggingface_hub",
             "kernels", "flash_attn", "flash_attn_interface", "xformers", "liger_kernel", "cut_cross_entropy",
             "transformer_engine", "apex", "deepspeed", "accelerate", "bitsandbytes", "einops", "tqdm", "rich",
             "requests", "yaml", "omegaconf", "hydra", "wandb", "tensorboard", "psutil", "pynvml", "nvtx", "cuda",
             "cupy", "cutlass", "jaxtyping", "beartype", "typing_extensions", "packaging", "dotenv"}


class Scanned(NamedTuple):
    """What a source sets or hides, a text each; and the modules it imports that are in no known package."""
    findings: list
    foreign: list
    imports_torch: bool


@functools.lru_cache(maxsize=64)
def scan(source):
    """Scanned of a source. SyntaxError if it is no Python that can be read."""
    if len(source) > MOST_CHARACTERS:
        raise SyntaxError(f"{len(source):,} characters, and {MOST_CHARACTERS:,} at most are scanned")
    try:
        scanner = _Scanner(ast.parse(source))
    except (ValueError, RecursionError, MemoryError) as error:
        raise SyntaxError(f"{type(error).__name__}: {error}") from None
    foreign = scanner.modules - sys.stdlib_module_names - _PACKAGES
    return Scanned(list(scanner.findings.values()), sorted(foreign), "torch" in scanner.modules)


class _Scanner(ast.NodeVisitor):
    def __init__(self, tree):
        self.findings = {}  # by line
        self.modules = set()  # the top names of what is imported
        self.names = defaultdict(set)  # what a name may stand for: all that it is imported as, anywhere
        for name in _BUILTINS:
            self.names[name].add(name)
        for node in ast.walk(tree):
            for _, name, path in imported(node):
                self.names[name].add(path.removeprefix("builtins."))
                if len(self.names[name]) > MOST_MEANINGS:
                    self.found(node, "imports too many things under one name")
                    self.names[name].pop()
        self.visit(tree)

    def paths(self, node):
        """Dotted paths that an expression may stand for, like {"torch.compile"}; what it cannot follow is `?`."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id) or {"?"}
        if isinstance(node, ast.Attribute):
            return {f"{path}.{node.attr}".removeprefix("builtins.") for path in self.paths(node.value)}
        if isinstance(node, ast.NamedExpr):
            return self.paths(node.value)
        if isinstance(node, ast.Subscript) and "sys.modules" in self.paths(node.value):
            return {text_of(node.slice) or "sys.modules.*"}
        if isinstance(node, ast.Call) and node.args:
            called = self.paths(node.func)
            if called & _BY_NAME and len(node.args) > 1:
                name = text_of(node.args[1]) or "*"
                return {f"{path}.{name}".removeprefix("builtins.") for path in self.paths(node.args[0])}
            if called & _IMPORTS:
                return {text_of(node.args[0]) or "?"}
        return {"?"}

    def found(self, node, what):
        if node.lineno not in self.findings and len(self.findings) < MOST_FINDINGS:
            self.findings[node.lineno] = f"line {node.lineno} {what}: {' '.join(ast.unparse(node).split())[:80]}"

    def visit(self, node):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            return  # a name of the script's own
        if isinstance(node, ast.expr):
            paths, text = self.paths(node), text_of(node)
            for path in paths:
                for pattern, what in _FORBIDDEN:
                    if pattern.fullmatch(path):
                        return self.found(node, what)
                if _ENVIRONMENT.fullmatch(path) and not _READING.fullmatch(path):
                    return self.found(node, "changes the environment, or hands it on")
            if text and (_SETTING.fullmatch(text) or re.fullmatch(r"os\.environb?", text)):
                return self.found(node, "touches the compiler's settings, or the environment")
            if text and (VARIABLE.fullmatch(text) or _ASSIGNMENT.search(text)):
                return self.found(node, "names a compiler's environment variable")
        super().visit(node)

    def visit_Attribute(self, node):
        while isinstance(node, ast.Attribute):  # the whole path was judged
            node = node.value
        if not isinstance(node, ast.Name):
            self.visit(node)

    def visit_Expr(self, node):
        if not isinstance(node.value, ast.Constant):  # a docstring
            self.generic_visit(node)

    def visit_Compare(self, node):
        for part in (node.left, *node.comparators):  # `"torch._dynamo" in sys.modules`, `"NAME" in os.environ`
            if not text_of(part) and not self.paths(part) & {"sys.modules", "os.environ"}:
                self.visit(part)

    def visit_Import(self, node):
        for path, _, _ in imported(node):
            self.modules.add(path.split(".")[0] or "a module beside it")
            if path not in ("torch._dynamo", "torch._functorch") and any(
                    pattern.fullmatch(path) for pattern, _ in _FORBIDDEN[:3]) or path.endswith(".*") and \
                    re.fullmatch(_MODULES, path[:-2]):
                self.found(node, "imports what no run has business with")

    visit_ImportFrom = visit_Import

    def visit_FunctionDef(self, node):
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                plain = field == "decorator_list" and self.paths(part) & _COMPILES
                if isinstance(part, ast.AST) and not plain:
                    self.visit(part)

    visit_AsyncFunctionDef = visit_ClassDef = visit_FunctionDef

    def visit_keyword(self, node):
        if VARIABLE.fullmatch(node.arg or ""):
            self.found(node.value, "names a compiler's environment variable")
        self.visit(node.value)

    def visit_Subscript(self, node):
        name, plain = text_of(node.slice), isinstance(node.ctx, ast.Load)
        if "os.environ" not in self.paths(node.value):
            return self.generic_visit(node)
        if not plain and (name is None or VARIABLE.fullmatch(name)):
            self.found(node, "sets a compiler's environment variable, or one whose name cannot be read")
        if name is None:
            self.visit(node.slice)

    def visit_Call(self, node):
        called, keywords = self.paths(node.func), {keyword.arg for keyword in node.keywords}
        first, second = ([text_of(argument) for argument in node.args[:2]] + [None, None])[:2]
        plain = called & (_COMPILES | _IMPORTS | _CALLED_ONLY - _NEVER)  # mentioned as they may be
        parts = [*node.args, *node.keywords]
        compiles = any(path.endswith(".compile") for part in (node.func, *node.args) for path in self.paths(part))
        if compiles and keywords & {"mode", "options"}:
            self.found(node, "compiles with a mode or options")
        if None in keywords and any(re.fullmatch(r"torch\.compile|\?.*\.compile", path) for path in called):
            self.found(node, "compiles with arguments that cannot be read")
        if "env" in keywords and any(path.startswith("subprocess.") for path in called):
            self.found(node, "starts a program with an environment of its own")
        if called & _IMPORTS:
            if first is None:
                self.found(node, "imports a module whose name cannot be read")
            else:
                self.modules.add(first.split(".")[0])
        if called & {"operator.attrgetter", "operator.methodcaller"} and first is None:
            self.found(node, "reaches for a name that cannot be read")
        if called & {*_BY_NAME, "hasattr"} and len(node.args) > 1:
            holders, last = self.paths(node.args[0]), getattr(node.args[1], "attr", getattr(node.args[1], "id", ""))
            if any(re.fullmatch(rf"{_MODULES}(?:\..*)?", path) for path in holders):
                parts = parts[1:]  # judged with the name, as a path
                if second is None and not (last == "dtype" and "torch" in holders):
                    self.found(node, "reaches into a module by a name that cannot be read")
        elif first is not None and any(map(_READING.fullmatch, called)):
            parts = parts[1:]  # the name of what is read
        elif first is not None and "os.environ.setdefault" in called and not VARIABLE.fullmatch(first):
            plain = called
        for part in parts if plain else [node.func, *parts]:
            self.visit(part)


def imported(node):
    """(what an import statement brings, the name it gets, what that name stands for), as dotted paths; else nothing."""
    if isinstance(node, ast.ImportFrom):
        module = "." * node.level + (node.module or "")
        brought = [(f"{module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
        return [(path, name, path) for path, name in brought]
    if not isinstance(node, ast.Import):
        return []
    tops = [alias.name.split(".")[0] for alias in node.names]  # `import a.b` names a, `import a.b as c` names a.b
    return [(alias.name, alias.asname or top, alias.name if alias.asname else top)
            for alias, top in zip(node.names, tops)]


def text_of(node):
    """The string that an expression of constants makes, or None."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value if isinstance(node.value, str) else node.value.decode("latin-1")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
    elif isinstance(node, ast.JoinedStr):
        parts = [text_of(value.value if isinstance(value, ast.FormattedValue) else value) for value in node.values]
    else:
        return None
    return None if None in parts else "".join(parts)
