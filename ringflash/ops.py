"""The operators: `torch.library` registration, fakes, autograd. The backend and the group are looked up at run time.

Plain attention is a ring of one: `group=""` is no group, and its plan has one visit. The group travels by name, and
every option by value, so that `torch.compile` and checkpointing see two opaque operators and nothing else.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad
from torch.distributed.distributed_c10d import _resolve_process_group  # c10d's registry: it has no public name
from torch.nn import Parameter

from . import comm, nvlink, reference, ring
from .agreement import agree, ahead, from_first_rank
from .mask import Documents, by_value, decode
from .merge import Partial
from .plan import Plan, plan_one, plan_ring
from .score import Scoring
from .span import span

T = TypeVar("T")
BACKENDS = ("auto", "torch", "triton")
_PLAIN_TYPES = frozenset((Tensor, Parameter))
HAS_TRITON = importlib.util.find_spec("triton") is not None


def pick_backend(name: str, device: torch.device, dtype: torch.dtype) -> str:
    """The backend that `name` stands for: "auto" is triton on NVIDIA GPUs for fp16, bf16 and fp32, else torch.

    Raises `ValueError` for an unknown name or one that can't run here.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {name!r}")
    obstacle = _triton_obstacle(device.type, dtype)
    if name == "triton" and obstacle:
        raise ValueError(f'backend="triton" can\'t run here: {obstacle}')
    if name == "auto":
        return "torch" if obstacle or device.type == "cpu" else "triton"
    return name


def _triton_obstacle(device_type: str, dtype: torch.dtype) -> str | None:
    """Why the Triton kernels can't take tensors of this kind, or `None`."""
    if dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"the kernels take float16, bfloat16 and float32, got {_short(dtype)}"
    if not HAS_TRITON:
        return "triton is not installed"
    if device_type == "cuda":
        if torch.version.cuda is None:
            return "this PyTorch has no CUDA"
        return None
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return None
    return f"the kernels need an NVIDIA GPU (or TRITON_INTERPRET=1 for CPU tensors), got {device_type} tensors"


@lru_cache
def _backend(name: str, deterministic: bool) -> ring.Backend:
    if name == "torch":  # always deterministic
        return ring.Backend(reference.forward, reference.start_backward, reference.backward, reference.finish_backward)
    from . import local_kernel

    start_backward = partial(local_kernel.start_backward, deterministic=deterministic)
    return ring.Backend(local_kernel.forward, start_backward, local_kernel.backward, local_kernel.finish_backward)


check_transport, pick_transport = comm.check_transport, comm.pick_transport
release_buffers = nvlink.release_buffers


def refuse(group: dist.ProcessGroup, error: Exception, device: torch.device) -> None:
    """Tell the other ranks, which are about to start, that this one refused its arguments."""
    agree(group, "", error=error, device=device)


class _Options(NamedTuple):
    """What an operator is told beside tensors on the device, by value. `group` and `layout` are "" without one."""

    scale: float
    softcap: float | None
    dropout_p: float
    mask: tuple[int, ...]
    documents: Documents | None
    backend: str
    group: str
    layout: str
    layout_mask: tuple[int, ...]
    layout_documents: Documents | None
    seq_len: int
    transport: str
    deterministic: bool

    @staticmethod
    def of(*given: Any) -> "_Options":
        """Of an operator's arguments: there may be lists for tuples, and documents are in tensors."""
        options = _Options(*given)
        if isinstance(options.mask, tuple) and options.documents is None and options.layout_documents is None:
            return options  # what comes most often takes the least time
        return _Options(*map(_hashable, given))


def _hashable(x: Any) -> Any:
    if isinstance(x, Tensor):
        return by_value(x)
    return tuple(x) if isinstance(x, list) else x


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, slopes: Tensor | None, options: _Options, *, compare: bool
) -> tuple[Plan, comm.Transport | None]:
    """The plan of this rank, and what moves its shards. Ranks are compared, before any moves, in the forward pass.
    Raises `ValueError` for documents that are no boundaries of this sequence."""
    kinds = q.shape, k.shape, v.shape, q.dtype, _shape_word(sinks), _shape_word(slopes)
    if not options.group:
        return _find_plan(options, *kinds, 0, 1)[0], None
    group = _resolve_process_group(options.group)  # pyright: ignore[reportArgumentType]
    try:
        plan, words = _find_plan(options, *kinds, group.rank(), group.size())
    except Exception as error:
        if compare:
            refuse(group, error, q.device)
        raise
    if compare:
        agree(group, words, device=q.device)
    if plan.hops == 0:
        return plan, None
    return plan, comm.make_transport(pick_transport(options.transport, group, q.device), group, q.device)


@lru_cache(maxsize=256)
def _find_plan(
    options: _Options,
    q: torch.Size,
    k: torch.Size,
    v: torch.Size,
    dtype: torch.dtype,
    sinks: str,
    slopes: str,
    rank: int,
    world_size: int,
) -> tuple[Plan, str]:
    """The plan, and the words that all ranks must say alike; by all that a call is told, so they are soon found."""
    query_len, key_len = (options.seq_len, options.seq_len) if options.group else (q[1], k[1])
    mask = decode(options.mask, options.documents, longest=query_len + key_len)  # none are that far apart
    if mask.cu_seqlens_q is not None and options.group:
        raise ValueError("ring_attention takes no mask with cu_seqlens_q: it is self-attention")
    mask.check_fits(query_len, key_len)
    if not options.group:
        return plan_one(mask, query_len, key_len), ""
    laid_out = decode(options.layout_mask, options.layout_documents) if options.layout_mask else None
    left, right, chunk, prefix = map(int, options.mask)  # True is 1, and found as that
    words = (
        f"call=ring_attention b={q[0]} heads={q[2]} kv_heads={k[2]} d={q[3]} d_v={v[3]} dtype={_short(dtype)} "
        f"scale={options.scale!r} causal={right == 0} window=({left},{right}) chunk={chunk} prefix={prefix} "
        f"documents={mask.documents_digest} backend={options.backend} layout={options.layout} "
        f"layout_mask={laid_out and laid_out.digest} seq_len={options.seq_len} transport={options.transport} "
        f"deterministic={bool(options.deterministic)} sinks={sinks} softcap={options.softcap} alibi_slopes={slopes} "
        f"dropout_p={options.dropout_p!r}"
    )
    return plan_ring(mask, options.layout, options.seq_len, rank, world_size, laid_out), words


def _as_given(x: Tensor, words: str) -> AbstractContextManager[object]:
    """On the device of `x`, which may not be the current one, in the dtypes chosen here, also under autocast, and with
    a name in profiles: see `span`."""
    device = x.device
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return _switch(x, words) if elsewhere or torch.is_autocast_enabled(device.type) else span(words)


@contextmanager
def _switch(x: Tensor, words: str) -> Iterator[None]:
    with torch.cuda.device_of(x), torch.autocast(x.device.type, enabled=False), span(words):
        yield


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    head_words: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`(out, lse)` of this rank's queries, and the words that dropout goes by, for the backward pass. Arguments were
    checked by `attention.py`, but for what documents hold: that is checked here, and ranks are compared."""
    options = _Options.of(*others)
    with _as_given(q, "forward"):
        plan, mover = _prepare(q, k, v, sinks, slopes, options, compare=True)
        head_words = _shared_words(q, head_words, options.group)
        scoring = _scoring(q, sinks, slopes, head_words, options)
        out, lse = ring.ring_forward(_backend(options.backend, options.deterministic), plan, mover, q, k, v, scoring)
    return out, lse, head_words


def _shared_words(q: Tensor, head_words: Tensor | None, group: str) -> Tensor | None:
    """The words of heads that rank 0 drew, on q's device; `None` where nothing is dropped."""
    if head_words is None:
        return None
    if q.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError("dropout can't be captured in a CUDA graph: every replay would drop the same weights")
    if group:
        process_group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
        return from_first_rank(process_group, head_words, q.device)
    return ahead(head_words, q.device)


def _scoring(
    q: Tensor, sinks: Tensor | None, slopes: Tensor | None, head_words: Tensor | None, options: _Options
) -> Scoring:
    if slopes is not None:
        slopes = slopes.to(torch.promote_types(q.dtype, torch.float32)).expand(q.shape[0], q.shape[2]).contiguous()
    if sinks is not None:
        sinks = sinks.to(torch.promote_types(q.dtype, torch.float32)).contiguous()
    dropout_p = options.dropout_p
    return Scoring(options.scale, options.softcap, slopes, dropout_p, head_words if dropout_p else None, sinks)


def _shape_word(x: Tensor | None) -> str:
    """`4xfloat32`. What a tensor holds ranks don't compare: it is on the device."""
    return "none" if x is None else "x".join(map(str, (*x.shape, _short(x.dtype))))


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? slopes"
_OPTIONS = (
    "float scale, float? softcap, float dropout_p, SymInt[] mask, Tensor? documents, str backend, str group, "
    "str layout, SymInt[] layout_mask, Tensor? layout_documents, SymInt seq_len, str transport, bool deterministic"
)


def _forward_tensors(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """As `_attention`; without dropout, words are empty: an operator gives tensors."""
    out, lse, head_words = _attention(*inputs)
    return out, lse, out.new_empty(0, dtype=torch.int32) if head_words is None else head_words


attention = torch.library.custom_op(
    "ringflash::attention",
    _forward_tensors,
    mutates_args=(),
    schema=f"({_TENSORS}, Tensor? head_words, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
)


@attention.register_fake
def _(q, k, v, sinks, slopes, head_words, *_):
    out = q.new_empty(*q.shape[:3], v.shape[3])
    lse = q.new_empty(q.shape[0], q.shape[2], q.shape[1], dtype=torch.promote_types(q.dtype, torch.float32))
    words = 0 if head_words is None else (q.shape[0], q.shape[2])
    return out, lse, q.new_empty(words, dtype=torch.int32)


def _attention_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out: Tensor,
    lse: Tensor,
    head_words: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    slopes: Tensor | None,
    *others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """`(dq, dk, dv)` of this rank's shards, and `dsinks` by its queries where there are sinks."""
    options = _Options.of(*others)
    with _as_given(q, "backward"):
        plan, mover = _prepare(q, k, v, sinks, slopes, options, compare=False)
        scoring = _scoring(q, sinks, slopes, head_words, options)
        backend = _backend(options.backend, options.deterministic)
        dq, dk, dv, dsinks = ring.ring_backward(backend, plan, mover, q, k, v, Partial(out, lse), dout, dlse, scoring)
    return dq, dk, dv, None if sinks is None or dsinks is None else dsinks.to(sinks.dtype)


def _backward_tensors(*inputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_attention_backward`; without sinks, `dsinks` is empty."""
    dq, dk, dv, dsinks = _attention_backward(*inputs)
    return dq, dk, dv, dq.new_empty(0) if dsinks is None else dsinks


attention_backward = torch.library.custom_op(
    "ringflash::attention_backward",
    _backward_tensors,
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dlse, Tensor out, Tensor lse, Tensor? head_words, {_TENSORS}, {_OPTIONS}) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
)


@attention_backward.register_fake
def _(dout, dlse, out, lse, head_words, q, k, v, sinks, *_):
    dsinks = q.new_empty(0) if sinks is None else sinks
    return tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, dsinks))


_DOCUMENTS = 4, 9  # places of tensors among the options that follow the words


def _setup_context(ctx, inputs, output):
    q, k, v, sinks, slopes, _, *options = inputs
    documents, layout_documents = (options[place] for place in _DOCUMENTS)
    ctx.save_for_backward(q, k, v, sinks, slopes, documents, layout_documents, *output)
    ctx.options = [None if place in _DOCUMENTS else x for place, x in enumerate(options)]
    ctx.set_materialize_grads(False)


def _differentiate(run, ctx, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of q, k, v and sinks; `run` is the operator for the backward pass, or the function behind it."""
    q, k, v, sinks, slopes, *documents, out, lse, head_words = ctx.saved_tensors
    if dout is None and dlse is None:
        return None, None, None, None
    if dout is None:
        dout = torch.zeros_like(out)
    options = ctx.options.copy()
    for place, x in zip(_DOCUMENTS, documents, strict=True):
        options[place] = x
    dq, dk, dv, dsinks = run(dout, dlse, out, lse, head_words, q, k, v, sinks, slopes, *options)
    return dq, dk, dv, None if sinks is None else dsinks


def _backward(ctx, dout, dlse, _):
    nothing = (None,) * (2 + len(ctx.options))
    return *_differentiate(attention_backward, ctx, dout, dlse), *nothing


attention.register_autograd(_backward, setup_context=_setup_context)


def _unasked(run: Callable[..., T], *inputs: Any) -> T:
    """Call a function inside which no mode is asked about PyTorch's functions. A default device is one, and would be
    asked 100 times and more in a pass."""
    with torch._C.DisableTorchFunction():
        return run(*inputs)


class _Eager(torch.autograd.Function):
    """The operators' functions under autograd, without the operators: see `attend`. What needs no gradient comes in one
    tuple: every argument takes time."""

    @staticmethod
    def forward(ctx, q, k, v, sinks, others):
        output = _unasked(_attention, q, k, v, sinks, *others)
        _setup_context(ctx, (q, k, v, sinks, *others), output)
        return output[:2]

    @staticmethod
    def backward(ctx, dout, dlse):  # pyright: ignore[reportIncompatibleMethodOverride]
        # the operator refuses to be differentiated, and can be traced
        is_seen = torch.compiler.is_compiling() or torch.is_grad_enabled()
        run = attention_backward if is_seen else partial(_unasked, _attention_backward)
        return *_differentiate(run, ctx, dout, dlse), None


def attend(*inputs) -> tuple[Tensor, Tensor]:
    """`(out, lse)`, by the operator where somebody looks at operators: a compiler, a tracer, a dispatch mode (selective
    checkpointing, fake tensors), a subclass of Tensor. Else by the same functions without its dispatch, which takes
    the host several times as long as the launch of a kernel."""
    tensors = [x for x in inputs[:6] if x is not None]  # documents, the others, are ours
    if forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError("attention has no forward-mode derivative: take its gradient")
    if torch.compiler.is_compiling() or _is_watched() or not _PLAIN_TYPES.issuperset(map(type, tensors)):
        return attention(*inputs)[:2]
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return _Eager.apply(*inputs[:4], inputs[4:])  # pyright: ignore[reportReturnType]
    return _unasked(_attention, *inputs)[:2]


def _is_watched() -> bool:
    """Is a dispatch mode or a function transform active? (PyTorch has no public name for either question.)"""
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._functorch.maybe_current_level() is not None  # pyright: ignore
