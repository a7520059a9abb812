"""Triton's interpreter, repaired, as the emulated GPU's processor. UPSTREAM.md describes the
defects.

install() repairs the interpreter and replaces the launches of kernels: Inductor's
CachingAutotuner.run and, for kernels of the script, JITFunction.run. The names in triton.language
are the interpreter's only while a kernel runs, because Triton may compile between two kernels. The
programs of a grid run one after another. Each access is checked: it must lie in the memory of the
kernel's arguments.
"""

import functools
import os
import random
from collections import Counter

import numpy as np
import torch
import triton
import triton.language as tl
from torch._inductor.runtime.benchmarking import Benchmarker, InductorBenchmarker, TritonBenchmarker
from torch._inductor.runtime.triton_heuristics import CachingAutotuner, GridExpr
from triton.language.extra import libdevice as any_libdevice
from triton.language.extra.cuda import libdevice as cuda_libdevice
from triton.runtime import interpreter as base
from triton.runtime.interpreter import TensorHandle
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

import aten

# ---- numbers: the interpreter stores bf16 and fp8 as unsigned integers, since numpy lacks these
# types

NARROW = {
    tl.bfloat16: (torch.bfloat16, torch.int16),
    tl.float8e5: (torch.float8_e5m2, torch.int8),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.int8),
}


def widen(handle: TensorHandle) -> np.ndarray:
    """Return the values of a handle; those of bf16 and fp8 in float32."""
    if handle.dtype.scalar not in NARROW:
        return handle.data
    dtype, bits = NARROW[handle.dtype.scalar]
    stored = np.ascontiguousarray(handle.data).view(torch.empty(0, dtype=bits).numpy().dtype)
    return torch.from_numpy(stored).view(dtype).float().numpy()


def narrow(values: np.ndarray, kind: tl.dtype) -> TensorHandle:
    """Round values to the nearest even of a type, as the GPU does; fp8 saturates (PTX's
    .satfinite)."""
    if kind not in NARROW:
        return TensorHandle(values.astype(base._get_np_dtype(kind)), kind)
    dtype, bits = NARROW[kind]
    x = torch.from_numpy(np.array(values, dtype=np.float32))
    if bits == torch.int8:
        x = x.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return TensorHandle(x.to(dtype).view(bits).numpy().view(base._get_np_dtype(kind)), kind)


def by_torch(name: str):
    return lambda *xs: getattr(torch, name)(
        *(torch.from_numpy(np.ascontiguousarray(x)) for x in xs)
    ).numpy()


# CUDA's functions of libdevice, by their names without __nv_ and without a last f
LIBDEVICE = {
    name: getattr(np, name)
    for name in (
        "exp",
        "exp2",
        "log",
        "log2",
        "log1p",
        "expm1",
        "sqrt",
        "sin",
        "cos",
        "tan",
        "tanh",
        "floor",
        "ceil",
        "trunc",
        "rint",
        "isnan",
        "isinf",
        "signbit",
        "fmod",
        "copysign",
        "nextafter",
    )
}
LIBDEVICE |= {
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "pow": np.power,
    "fabs": np.abs,
    "abs": np.abs,
    "nearbyint": np.rint,
    "isinfd": np.isinf,
    "isnand": np.isnan,
    "finite": np.isfinite,
    "fma": lambda x, y, z: x * y + z,
    "fast_exp": np.exp,
    "fast_log": np.log,
    "fast_tanh": np.tanh,
    "fast_sin": np.sin,
    "fast_cos": np.cos,
    "div_rn": np.divide,
    "sqrt_rn": np.sqrt,
    "rcp_rn": lambda x: 1 / x,
    "llrint": np.rint,
    "erf": by_torch("erf"),
    "lgamma": by_torch("lgamma"),
}

plain = base.InterpreterBuilder
plain_binary = plain.binary_op
plain_load = plain.create_masked_load
plain_store = plain.create_masked_store
plain_atomic = plain.create_atomic_rmw


class Builder:
    """Methods that replace those of the interpreter's builder."""

    def cast_impl(self, src, to):
        return narrow(widen(src), to.scalar)

    def create_fp_to_fp(self, src, to, rounding):
        return narrow(widen(src), to.scalar)

    def create_dot(self, a, b, sum, precision, imprecise):
        assert sum.data.dtype == np.float32, f"tl.dot into {sum.dtype} is not emulated"
        return TensorHandle(
            np.matmul(widen(a), widen(b), dtype=np.float32) + sum.data, sum.dtype.scalar
        )

    def binary_op(self, x, y, op):
        kind = x.dtype.scalar
        if kind not in NARROW:
            return plain_binary(self, x, y, op)
        out = op(widen(x), widen(y))
        return TensorHandle(out, kind) if out.dtype == bool else narrow(out, kind)

    def unary_op(self, x, op):
        return narrow(op(widen(x)), x.dtype.scalar)

    def create_extern_elementwise(self, library, path, symbol, args, kind, pure):
        name = symbol.removeprefix("__nv_")
        out = LIBDEVICE[name if name in LIBDEVICE else name.removesuffix("f")](
            *(x.data for x in args)
        )
        return TensorHandle(np.asarray(out).astype(base._get_np_dtype(kind.scalar)), kind.scalar)

    def create_masked_load(self, pointers, mask, *rest, **hints):
        launch.check(pointers, mask, written=False)
        return plain_load(self, pointers, mask, *rest, **hints)

    def create_masked_store(self, pointers, value, mask, *rest, **hints):
        launch.check(pointers, mask, written=True)
        return plain_store(self, pointers, value, mask, *rest, **hints)

    def create_atomic_rmw(self, op, pointers, value, mask, *rest, **hints):
        launch.check(pointers, mask, written=True)
        kind = value.dtype.scalar
        if kind not in NARROW:
            return plain_atomic(self, op, pointers, value, mask, *rest, **hints)
        assert op == base._ir.ATOMIC_OP.FADD, f"atomic {op} of {kind} is not emulated"
        before = np.zeros_like(value.data)
        left = mask.data.copy()
        while left.any():  # each address once
            first = np.unique(np.where(left, pointers.data, 0), return_index=True)[1]
            now = np.zeros_like(left)
            now.flat[first] = left.flat[first]
            turn = TensorHandle(now, tl.int1)
            old = plain_load(self, pointers, turn, None, None, None, False)
            plain_store(self, pointers, narrow(widen(old) + widen(value), kind), turn, None, None)
            before = np.where(now, old.data, before)
            left = left & ~now
        return TensorHandle(before, kind)


def reduce_by_halves(self, inputs):
    """Reduce by any function, whole halves at a time: in the order of a GPU, and not one element
    at a time."""
    inputs, axis = self.unravel(inputs, self.axis)
    parts = [x.handle.data for x in inputs]
    kinds = [x.dtype for x in inputs]
    combine = rewritten(self.combine_fn.fn)
    while (size := parts[0].shape[axis]) > 1:
        assert size % 2 == 0, size
        halves = [
            self.to_tensor(x, kind)
            for half in ((0, size // 2), (size // 2, size))
            for x, kind in zip((np.take(x, range(*half), axis) for x in parts), kinds)
        ]
        out = combine(*halves)
        shape = halves[0].handle.data.shape
        parts = [
            np.broadcast_to(x.handle.data, shape)
            for x in (out if isinstance(out, tuple) else (out,))
        ]
    return [
        self.to_tensor(x if self.keep_dims else x.squeeze(axis), kind)
        for x, kind in zip(parts, kinds)
    ]


# ---- a launch


class Launch:
    """The kernel that runs now: its name and the memory of its arguments."""

    def __init__(self, name: str = "", tensors=()):
        self.name = name
        self.extents = [*map(aten.extent, tensors)]
        self.touched = set()
        storages = (x.untyped_storage() for x in tensors)
        self.storages = [(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages]

    def check(self, pointers: TensorHandle, mask, written: bool) -> None:
        """Raise IndexError if an access lies outside of the memory of all arguments."""
        mask = np.broadcast_to(
            mask.data if isinstance(mask, TensorHandle) else mask, pointers.data.shape
        )
        addresses = pointers.data[mask]
        if not addresses.size:
            return
        low = int(addresses.min())
        high = int(addresses.max()) + max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        for begin, end in (*self.extents, *self.storages):  # Inductor may pass a view's base
            if begin <= low and high <= end:
                self.touched.add((begin, end, written))
                return
        raise IndexError(
            f"{self.name} {'writes' if written else 'reads'} [{low:#x}, {high:#x}), outside of its "
            f"arguments {[(hex(begin), hex(end)) for begin, end in self.storages]}"
        )


launch = Launch()
launches = Counter()
order = random.Random(1)


class Language:
    """A context in which the names in triton.language are the interpreter's."""

    def __init__(self):
        self.depth = 0
        self.before = []

    @functools.cached_property
    def names(self):
        """Return (object, name, the interpreter's value)."""
        scope = base._patch_lang(type("Kernel", (), {"__globals__": {"tl": tl, "core": tl.core}}))
        found = {
            (id(owner), name): (owner, name, getattr(owner, name))
            for owner, name, _ in scope._changes
        }
        scope.restore()
        for name, member in vars(cuda_libdevice).items():
            if tl.core.is_builtin(member):

                def call(*args, member=member, _semantic=None, **kwargs):
                    return member(*args, **kwargs, _semantic=base.interpreter_semantic)

                found |= {
                    (id(owner), name): (owner, name, call)
                    for owner in (any_libdevice, cuda_libdevice)
                }
        return list(found.values())

    def __enter__(self):
        if not self.depth:
            names = self.names
            self.before = [
                (owner, name, vars(owner).get(name, base._MISSING)) for owner, name, _ in names
            ]
            for owner, name, value in names:
                setattr(owner, name, value)
        self.depth += 1

    def __exit__(self, *_):
        self.depth -= 1
        for owner, name, value in self.before if not self.depth else ():
            delattr(owner, name) if value is base._MISSING else setattr(owner, name, value)


language = Language()


@functools.cache
def rewritten(function):
    return base.InterpretedFunction(function).rewrite()


SCALARS = {
    "fp64": (np.float64, tl.float64),
    "fp32": (np.float32, tl.float32),
    "i32": (np.int32, tl.int32),
    "i64": (np.int64, tl.int64),
    "i1": (np.bool_, tl.int1),
}


def as_argument(value, kind):
    if isinstance(value, (int, float)) and kind in SCALARS:
        dtype, ty = SCALARS[kind]
        return tl.tensor(TensorHandle(np.array([value], dtype=dtype), ty), ty)
    return base._implicit_cvt(value)


def interpret(function, grid, arguments, constants, kinds):
    """Run every program of a grid. arguments: {name: value}; kinds: {name: Triton's name of a
    number's type}."""
    global launch
    tensors = [x.base if isinstance(x, TensorDescriptor) else x for x in arguments.values()]
    launch = Launch(function.__name__, [x for x in tensors if isinstance(x, torch.Tensor)])
    launches[function.__name__] += 1
    programs = [(x, y, z) for z in range(grid[2]) for y in range(grid[1]) for x in range(grid[0])]
    if "DRY_GPU_SHUFFLE" in os.environ:
        order.shuffle(programs)
    with language, np.errstate(all="ignore"):
        values = {
            name: as_argument(x, kinds.get(name)) for name, x in arguments.items()
        } | constants
        base.interpreter_builder.set_grid_dim(*grid)
        for program in programs:
            base.interpreter_builder.set_grid_idx(*program)
            rewritten(function)(**values)
    for begin, end, written in launch.touched:
        aten.log_use(launch.name, begin, end, written)


# elements of a tile; numpy's cost is per operation, so fewer and larger programs are faster
TILE = 2**16


def enlarged(tuner):
    """Return a pointwise or row kernel's first configuration with larger tiles, or of another
    kernel that itself."""
    config = tuner.configs[0]
    rows = (tuner.size_hints or {}).get("x")
    tile = config.kwargs.get("XBLOCK")
    if (
        not tile
        or not rows
        or "YBLOCK" in config.kwargs
        or tuner.inductor_meta["grid_type"] != "Grid1D"
    ):
        return config
    row = config.kwargs.get("R0_BLOCK") or triton.next_power_of_2(tuner.size_hints.get("r0_", 1))
    tile = max(tile, min(triton.next_power_of_2(rows), 4096, TILE // row))
    return triton.Config(config.kwargs | {"XBLOCK": tile}, config.num_warps, config.num_stages)


def run_inductor_kernel(tuner, *args, stream, benchmark_run=False, **kwargs):
    config = enlarged(tuner)
    kernel = tuner.fn
    known = (
        tuner.triton_meta["constants"]
        | config.kwargs
        | {
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
        }
    )
    constants = {name: known[name] for name in kernel.arg_names if name in known}
    fixed = {p.name for p in kernel.params if p.is_constexpr and p.name in constants}
    names = [name for name in kernel.arg_names if name not in fixed]
    named = dict(
        zip([*names, *tuner.inductor_meta.get("extra_launcher_args", ())], args, strict=True)
    )
    grid = GridExpr.from_meta(tuner.inductor_meta, config).eval_slow(dict(named))
    interpret(
        kernel.fn,
        grid,
        {name: named[name] for name in names},
        {name: x for name, x in constants.items() if name in fixed},
        tuner.triton_meta["signature"],
    )


def run_kernel(kernel, *args, grid, warmup, **kwargs):
    named = (
        {p.name: p.default for p in kernel.params if p.has_default}
        | dict(zip(kernel.arg_names, args))
        | {name: x for name, x in kwargs.items() if name in kernel.arg_names}
    )
    constants = {p.name: named.pop(p.name) for p in kernel.params if p.is_constexpr}
    grid = grid(named | constants) if callable(grid) else grid
    interpret(kernel.fn, (*grid, 1, 1)[:3], named, constants, {})


def call_nested(kernel, *args, _semantic=None, **kwargs):
    assert language.depth, f"{kernel.__name__} was called outside of a kernel"
    return rewritten(kernel.fn)(*args, **kwargs)


def install() -> None:
    for name, method in vars(Builder).items():
        if not name.startswith("__"):
            setattr(base.InterpreterBuilder, name, method)
    base.ReduceOps.generic_reduce = reduce_by_halves
    # it would abort on integers that wrap around
    base.interpreter_builder.options = base.InterpreterOptions(sanitize_overflow=False)
    JITFunction.__call__ = call_nested
    JITFunction.run = run_kernel
    CachingAutotuner.run = run_inductor_kernel
    CachingAutotuner.precompile = lambda *args, **kwargs: None  # no machine code
    for kind in (
        Benchmarker,
        TritonBenchmarker,
        InductorBenchmarker,
    ):  # takes the first of several choices
        kind.benchmark = kind.benchmark_gpu = lambda *args, **kwargs: 1.0
