"""ATen operators of the emulated GPU: computed by the CPU's operators, on the same memory.

install() registers a kernel under the CUDA key for each operator that torch has one for, below
autograd. Operators that only allocate memory or return a view keep torch's kernel. Four operators
that CPUs lack are written out here.
"""

import ctypes
import math

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

CPU = torch.device("cpu")
# they allocate, return views or copy by device.c
KEPT = {
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::resize_",
    "aten::record_stream",
    "aten::_pin_memory",
    "aten::is_pinned",
    "aten::_local_scalar_dense",
    "aten::is_set_to",
    "aten::_efficientzerotensor",
    "aten::_new_zeros_with_same_feature_meta",
    "aten::unfold",
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_to_copy",
}

gpu = ctypes.CDLL("libcuda.so.1")
gpu.dry_gpu_use.argtypes = (
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
)


def extent(x: Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and after its last byte."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.size(), x.stride())) if x.numel() else 0
    return x.data_ptr(), x.data_ptr() + size * x.element_size()


def log_use(name: str, begin: int, end: int, written: bool) -> None:
    """Write a USE line on the current stream to the log of device.c, if it was asked for."""
    gpu.dry_gpu_use(
        torch.cuda.current_stream().cuda_stream, name.encode(), begin, end - begin, written
    )


def sparse_as(x: Tensor, convert) -> Tensor:
    out = torch.sparse_coo_tensor(
        convert(x._indices()), convert(x._values()), x.shape, check_invariants=False
    )
    return out._coalesced_(x.is_coalesced())


def on_cpu(x: Tensor) -> Tensor:
    """Return a CPU tensor on the memory of a GPU tensor."""
    if x.layout == torch.sparse_coo:
        return sparse_as(x, on_cpu)
    storage = x.untyped_storage()
    if not storage.nbytes():
        return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype)
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), CPU, storage.nbytes())
    return torch.empty(0, dtype=x.dtype).set_(same, x.storage_offset(), x.size(), x.stride())


def to_gpu(x: Tensor) -> Tensor:
    """Copy a CPU tensor into a new GPU tensor with the same strides."""
    if x.layout == torch.sparse_coo:
        return sparse_as(x, to_gpu)
    out = torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="cuda")
    begin, end = extent(x)
    ctypes.memmove(out.data_ptr(), begin, end - begin)
    return out


# by id: the GPU's, kept alive, and its stand-in
generators: dict[int, tuple[torch.Generator, torch.Generator]] = {}


def stand_in(generator: torch.Generator) -> torch.Generator:
    if generator.device.type != "cuda":
        return generator
    new = generator, torch.Generator().manual_seed(generator.initial_seed())
    return generators.setdefault(id(generator), new)[1]


def log_uses(op, named: dict) -> None:
    """Write a USE line for each GPU tensor in an operator's arguments {name: value}; its new
    tensors are under ""."""
    writes = {
        "",
        *(
            a.name
            for a in op._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
        ),
    }
    for key, value in named.items():
        for x in tree_leaves(value):
            if isinstance(x, Tensor) and x.is_cuda and x.layout == torch.strided:
                log_use(op._schema.name, *extent(x), key in writes)


def emulated(op, function=None):
    """Return a kernel for CUDA that calls the CPU's kernel of `op`, or `function`, on the same
    memory."""
    name = op._schema.name
    arguments = op._schema.arguments
    outputs = {a.name for a in arguments if a.is_out}

    def kernel(*args, **kwargs):
        named = {a.name: x for a, x in zip(arguments, args)} | kwargs
        log_uses(op, named)
        originals = {}

        def there(x):
            if isinstance(x, Tensor) and x.is_cuda:
                same = on_cpu(x)
                originals[id(same)] = x, same
                return same
            if isinstance(x, Tensor):  # copy_ to the host returns it
                originals[id(x)] = x, x
            if isinstance(x, torch.Generator):
                return stand_in(x)
            return CPU if isinstance(x, torch.device) else x

        def here(x):
            if not isinstance(x, Tensor) or id(x) in originals:
                return originals[id(x)][0] if isinstance(x, Tensor) else x
            new = to_gpu(x)
            log_uses(op, {"": new})
            return new

        # an out= tensor gets the shape and strides that the operator chooses, and is then
        # overwritten
        out = {key: kwargs.pop(key) for key in outputs if isinstance(kwargs.get(key), Tensor)}
        fresh = {key: torch.empty(0, dtype=x.dtype) if x.is_cuda else x for key, x in out.items()}
        originals |= {id(fresh[key]): (x, fresh[key]) for key, x in out.items()}
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = None
        args, kwargs = tree_map(there, (args, kwargs))
        # torch passes Python numbers for tensors to some kernels; only the packet converts them
        number = any(
            isinstance(x, (int, float)) and str(a.type) == "Tensor" for a, x in zip(arguments, args)
        )
        result = (function or (op.overloadpacket if number else op))(*args, **kwargs, **fresh)
        for key, x in out.items():
            if x.is_cuda:
                if x.shape != fresh[key].shape:
                    x.resize_(fresh[key].shape)
                on_cpu(x).copy_(fresh[key])
        if name == "aten::copy_" and not named.get("non_blocking") and not named["self"].is_cuda:
            torch.cuda.current_stream().synchronize()  # as the real copy to the host does
        return tree_map(here, result)

    return kernel


# ---- operators that CPUs lack. FlashAttention is defined by softmax over the keys that it may see


def scaled_mm(
    a, b, scale_a, scale_b, bias=None, scale_result=None, out_dtype=None, use_fast_accum=False
):
    assert a.size(1) % 16 == 0 and b.size(1) % 16 == 0, "cuBLASLt needs multiples of 16"
    assert a.stride(1) == 1 and b.stride(0) == 1, (
        "cuBLASLt needs a row-major and a column-major factor"
    )
    assert not (a.dtype == b.dtype == torch.float8_e5m2), "cuBLASLt has no product of e5m2 and e5m2"
    return ((a.float() @ b.float()) * (scale_a * scale_b)).to(out_dtype or a.dtype)


def scores_of(q, k, starts, longest, scale, left, right):
    """Return q k' [H, T, T] in float32, -inf where FlashAttention does not look."""
    ends = starts[0].item(), starts[-1].item()
    assert ends == (
        0,
        q.size(1),
    ), f"documents from {ends[0]} to {ends[1]} are not all of {q.size(1)} tokens"
    assert starts.diff().max() <= longest, f"a document is longer than {longest} tokens"
    at = torch.arange(q.size(1))
    docs = torch.bucketize(at, starts[1:].long(), right=True)
    back = at[:, None] - at
    seen = (
        (docs[:, None] == docs) & ((left < 0) | (back <= left)) & ((right < 0) | (-back <= right))
    )
    return (q @ k.mT * scale).masked_fill(~seen, -math.inf)


def flash_forward(
    q,
    k,
    v,
    starts,
    starts_k,
    longest,
    longest_k,
    dropout,
    causal,
    debug,
    *,
    scale=None,
    window_size_left=-1,
    window_size_right=-1,
):
    assert dropout == 0 and not causal
    q32, k32, v32 = (x.transpose(0, 1).float() for x in (q, k, v))
    scores = scores_of(q32, k32, starts, longest, scale, window_size_left, window_size_right)
    log_sums = scores.logsumexp(-1)
    out = ((scores - log_sums[..., None]).exp() @ v32).transpose(0, 1).to(q.dtype).contiguous()
    return (
        out,
        log_sums,
        torch.empty(2, dtype=torch.uint64),
        torch.empty(0, dtype=torch.uint64),
        out.new_empty(0),
    )


def flash_backward(
    grad,
    q,
    k,
    v,
    out,
    log_sums,
    starts,
    starts_k,
    longest,
    longest_k,
    dropout,
    causal,
    seed,
    offset,
    *,
    scale=None,
    window_size_left=-1,
    window_size_right=-1,
):
    grad32, q32, k32, v32, out32 = (x.transpose(0, 1).float() for x in (grad, q, k, v, out))
    scores = scores_of(q32, k32, starts, longest, scale, window_size_left, window_size_right)
    p = (scores - log_sums[..., None]).exp()
    grad_scores = p * (grad32 @ v32.mT - (grad32 * out32).sum(-1, keepdim=True)) * scale
    return tuple(
        x.transpose(0, 1).to(q.dtype).contiguous()
        for x in (grad_scores @ k32, grad_scores.mT @ q32, p.mT @ grad32)
    )


def rms_norm(x, shape, weight, eps):
    assert weight is None and len(shape) == 1
    x32 = x.float()
    rstd = (
        x32.square().mean(-1, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    ).rsqrt()
    return (x32 * rstd).to(x.dtype), rstd


def rms_norm_backward(grad, x, shape, rstd, weight, mask):
    grad32 = grad.float()
    y = x.float() * rstd
    return ((grad32 - y * (grad32 * y).mean(-1, keepdim=True)) * rstd).to(x.dtype), None


OWN = {
    "aten::_fused_rms_norm": rms_norm,
    "aten::_fused_rms_norm_backward": rms_norm_backward,
    "aten::_scaled_mm": scaled_mm,
    "aten::_flash_attention_forward": flash_forward,
    "aten::_flash_attention_backward": flash_backward,
}
library = torch.library.Library("aten", "IMPL")


def returns_view(op) -> bool:
    aliases = [a.alias_info for a in op._schema.arguments if a.alias_info]
    return bool(aliases) and not any(alias.is_write for alias in aliases)


def install() -> None:
    names = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    for name in [
        *(name for name in names if name.startswith("aten::")),
        "aten::copy_",
    ]:  # copy_: for all devices
        packet, _, variant = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), variant or "default", None)
        if (
            op is not None
            and name not in KEPT
            and not returns_view(op)
            and not name.startswith("aten::set_")
        ):
            library.impl(
                name.removeprefix("aten::"),
                emulated(op, OWN.get(name)),
                "CUDA",
                allow_override=True,
            )
    # other operators of sparse tensors call those above on indices and values
    library.impl(
        "_coalesce", emulated(torch.ops.aten._coalesce.default), "SparseCUDA", allow_override=True
    )
