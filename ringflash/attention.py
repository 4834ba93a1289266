"""The public functions: what they take, what they give, and what they refuse."""

import math
from numbers import Integral, Real
from typing import Literal, TypedDict, Unpack, overload

import torch
from torch import Tensor

from . import ops
from .mask import OPEN, Mask, check_integer_tensor
from .score import draw_head_words, round_dropout
from .sharding import Group, check_layout_mask, check_rows, process_group

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Window = tuple[int | None, int | None]


class _Options(TypedDict, total=False):
    """What both functions take, for type checkers: they return `out`, or `(out, lse)` with `return_lse=True`."""

    causal: bool
    scale: float | None
    window: Window | None
    cu_seqlens: Tensor | None
    mask: Mask | None
    softcap: float | None
    alibi_slopes: Tensor | None
    sinks: Tensor | None
    dropout_p: float
    deterministic: bool
    backend: str


class _RingOptions(_Options, total=False):
    layout: str
    layout_mask: Mask | None
    seq_len: int | None
    transport: str


@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> Tensor: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[Tensor, Tensor]: ...
@overload
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, **options: Unpack[_Options]
) -> Tensor | tuple[Tensor, Tensor]: ...
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention on one device: `softmax(scale * q k^T) v`, without ever holding the scores.

    Args:
        q: queries `(b, s_q, h, d)`; fp16, bf16, fp32 (fp64 with the torch backend). `d` a multiple of 8, 16 to 256.
        k: keys `(b, s_k, g, d)`, the dtype and device of `q`. `g` divides `h`: key/value head `i` serves the query
            heads `i * h / g` to `(i + 1) * h / g - 1` (GQA; MQA is `g = 1`).
        v: values `(b, s_k, g, d_v)`; `d_v` may differ from `d`, within the same limits.
        causal: a query sees no key after it. With unequal lengths the last query is aligned with the last key
            (bottom-right, as flash-attn): query `i` sees the keys up to `i + s_k - s_q`.
        scale: multiplies the scores; positive. Default `d ** -0.5`.
        window: `(left, right)`: a query at position `p` sees keys at `p - left` to `p + right`; `None` or -1 leaves a
            side open. With `causal` a key must be visible under both: `right` counts as 0.
        cu_seqlens: boundaries of packed documents, int32 or int64 `(documents + 1,)`: 0, ascending, the length of the
            sequence. No query sees another document, in any sequence of the batch. Wants `s_q == s_k`. Every call
            waits for its copy to the host: a `Mask` made of it once a batch spares that.
        mask: a `Mask` in place of `causal`, `window` and `cu_seqlens`; prefix-LM and chunked attention too.
        softcap: scores become `softcap * tanh(score / softcap)`; 1e-9 to 1e9. `score` is `scale * q.k`.
        alibi_slopes: ALiBi: scores (capped ones) lose `slope * |query position - key position|`, positions counted as
            `causal` counts them. `(h,)` or `(b, h)`, any float dtype; no gradient.
        sinks: a logit per query head, `(h,)`, any float dtype: the softmax has one more key of that score, with a value
            of 0, which every query sees. It is part of lse. Differentiable.
        dropout_p: the probability, in [0, 1), that a weight is dropped after the softmax; the others are divided by
            `1 - dropout_p`. What counts is the nearest multiple of 2^-31 below 1. lse is without dropout. Which weights
            are dropped follows from positions and from a word for each head of each batch, which every call draws from
            PyTorch's default generator of the CPU (`torch.manual_seed` governs it): the same in a ring of any size and
            layout, with any backend.
        deterministic: bitwise-equal gradients from run to run. On Hopper GPUs (fp16 and bf16) that takes a
            slower backward pass: the default one adds to dQ in any order. Elsewhere gradients always are.
        return_lse: return the log-sum-exp too.
        backend: "triton" (NVIDIA GPUs; fp16, bf16, fp32), "torch" (blockwise, any device and dtype), or "auto": triton
            where it can run, else torch.

    Strides are free: views, transposed and expanded tensors are taken, and copied only where a kernel must.

    Returns:
        `out (b, s_q, h, d_v)` in q's dtype, or `(out, lse)` with `lse (b, h, s_q)`, fp32 (fp64 for fp64), the natural
        log of the sum of `exp(scale * q.k)`. A query that sees no key gets `out = 0`, `lse = -inf` (its sink,
        where there are sinks) and no gradient.
        Both are differentiable, once.

    Raises:
        ValueError: names the argument, what was seen and what is wanted.

    Source: FlashAttention-2, Dao (2023), https://arxiv.org/abs/2307.08691.

    Example: `flash_attention(q, k, v, causal=True)` for `q (1, 4096, 32, 128)`, `k, v (1, 4096, 8, 128)`.
    """
    _check_tensors(q, k, v)
    scoring = _check_scoring(scale, softcap, alibi_slopes, sinks, dropout_p, q)
    masking = _check_mask(mask, causal, window, cu_seqlens)
    backend = ops.pick_backend(backend, q.device, q.dtype)
    out, lse = ops.attend(q, k, v, *scoring, *masking, backend, "", "", (), None, 0, "", deterministic)
    return (out, lse) if return_lse else out


@overload
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    return_lse: Literal[False] = False,
    **options: Unpack[_RingOptions],
) -> Tensor: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: Literal[True], **options: Unpack[_RingOptions]
) -> tuple[Tensor, Tensor]: ...
@overload
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, group: Group, return_lse: bool, **options: Unpack[_RingOptions]
) -> Tensor | tuple[Tensor, Tensor]: ...
def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group,
    layout: str = "zigzag",
    layout_mask: Mask | None = None,
    seq_len: int | None = None,
    transport: str = "auto",
    causal: bool = False,
    scale: float | None = None,
    window: Window | None = None,
    cu_seqlens: Tensor | None = None,
    mask: Mask | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact self-attention over a sequence that is sharded across the ranks of `group`.

    Every rank calls it with its own rows, and gets its rows of the result. K and V go round the ring; partial results
    are merged in fp32. Equal to `flash_attention` on the whole sequence, to rounding.

    Args:
        q, k, v: this rank's rows, `(b, s, h, d)`, `(b, s, g, d)`, `(b, s, g, d_v)`, in the order that `positions` and
            `shard` give. Other limits as in `flash_attention`.
        group: ProcessGroup or 1-D DeviceMesh.
        layout: which positions a rank holds. "zigzag" (one piece from each end) balances causal attention; also
            "contiguous" and "striped", and for documents "balanced", "zigzag-by-document" and "contiguous-by-document".
        layout_mask: for the layouts of documents alone: as it was given to `shard`. See `positions`.
        seq_len: tokens in the global sequence. Default `s * world_size`; say it when the length does not divide evenly.
        transport: how shards move: "gloo" (CPU tensors; CUDA tensors through pinned host memory), "nccl", "nvlink"
            (GPUs of one host that reach each other's memory, in a group of either backend; the copy engine moves
            shards, and no multiprocessor), or "auto": nvlink where every rank has a GPU of its own for it, else NCCL
            where the group has it for this device, else gloo. `transport_of` says which that is.
        Everything else as in `flash_attention`. Sinks and ALiBi slopes are the same on every rank (values are not
            compared). A rank's gradient of sinks is by its own queries; the sum over ranks is the whole, as data
            parallelism sums it. With dropout all ranks go by the words that rank 0 drew, which are broadcast.

    Returns:
        `out (b, s, h, d_v)`, or `(out, lse)`, of this rank's rows; as in `flash_attention`.

    Raises:
        ValueError: on every rank, before any K/V moves: a rank's own bad arguments (the others
            are told which rank refused and why), rows that don't fit the layout, or ranks that disagree with each
            other in shapes, dtypes or options (names which rank passed what).
        RuntimeError: a peer is gone, or did not answer within the group's timeout. Over gloo it names this rank, the
            peer and what it waited for, or who did not come to the call. With "nvlink" the wait is on the device: a
            line on stdout names rank, peer and channel (`2 * n` or one more for the n-th message of dK and dV), the
            CUDA context is lost, and the next call that waits for the device raises. With "nccl" PyTorch's watchdog
            ends the process, unless told otherwise.

    "nvlink" keeps two buffers in a group and device, which grow to the largest call: k and v of a rank once, in their
    dtype, and dk and dv of a rank one and a half times, in fp32 (twice, where they are less than 64 MiB or, between two
    ranks, at most 128 MiB; where they go straight home at most 256 MiB). `release_buffers` gives them back. It also
    keeps up to 128 MiB where others' shards land, of passes where that is at most 64 MiB. During a forward pass, shards
    of several ranks that are attended to at once take up to 128 MiB, the first ones 256 MiB, and as much again arrives;
    a larger shard is attended to alone.

    Source: Ring Attention, Liu et al. (2023), https://arxiv.org/abs/2310.01889; striped: Brandon et al. (2023),
    https://arxiv.org/abs/2311.09431.

    Example: zigzag, 2 ranks, 8 tokens: rank 0 passes its rows 0 1 6 7 and gets the attention output of those.
    """
    ranks = process_group(group)
    try:
        _check_tensors(q, k, v)
        scoring = _check_scoring(scale, softcap, alibi_slopes, sinks, dropout_p, q)
        masking = _check_mask(mask, causal, window, cu_seqlens)
        backend = ops.pick_backend(backend, q.device, q.dtype)
        ops.check_transport(transport, ranks, q.device)
        seq_len = q.shape[1] * ranks.size() if seq_len is None else seq_len
        check_layout_mask(layout, layout_mask)
        balancing = ((), None) if layout_mask is None else (layout_mask.numbers, layout_mask.documents)
        check_rows({"q": q.shape[1], "k and v": k.shape[1]}, seq_len, ranks, layout)
    except Exception as error:  # whatever it is: the other ranks are about to wait for this one
        if not torch.compiler.is_compiling():  # a tracer runs nothing; the call that it gives up runs again without it
            ops.refuse(ranks, error, q.device if isinstance(q, Tensor) else torch.device("cpu"))
        raise
    out, lse = ops.attend(
        q, k, v, *scoring, *masking, backend, ranks.group_name, layout, *balancing, seq_len, transport, deterministic
    )
    return (out, lse) if return_lse else out


def transport_of(group: Group, device: torch.device | str | None = None) -> str:
    """What `transport="auto"` stands for in `ring_attention` with tensors on `device`. The same on every rank.

    Every rank of the group calls it, or none: in a group that has not attended on that device yet the ranks ask each
    other where they are. The logger "ringflash" tells too, with the reason where it is not NVLink.

    Args:
        group: ProcessGroup or 1-D DeviceMesh.
        device: of the tensors. Default: this process's current GPU, or the CPU where PyTorch sees none.

    Returns:
        "nvlink", "nccl" or "gloo".

    Raises:
        ValueError: not a group, or the group moves no tensors of that device.

    Example: `transport_of(dist.group.WORLD)` -> `"nvlink"` on two GPUs of one host, `"gloo"` on CPUs.
    """
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    return ops.pick_transport("auto", process_group(group), torch.device(device))


def release_buffers(group: Group) -> int:
    """Give back the device memory that `transport="nvlink"` keeps for a group; the next call makes it anew.

    Every rank of the group calls it, or none, with no pass under way. CUDA graphs that hold a pass must not be
    replayed afterwards. Waits for the devices.

    Args:
        group: ProcessGroup or 1-D DeviceMesh.

    Returns:
        How many bytes this rank gave back; 0 where the group keeps none.

    Raises:
        ValueError: not a group.

    Example: `release_buffers(dist.group.WORLD)` -> 134217728 on each of 4 ranks that trained on 8192 rows of 8 heads of
    128 in bf16.
    """
    return ops.release_buffers(process_group(group))


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} must be a Tensor, got {type(x).__name__}")
        if x.ndim != 4:
            raise ValueError(f"{name} must be (batch, sequence, heads, head dim), got shape {tuple(x.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if not q.device == k.device == v.device:
        raise ValueError(f"q, k and v must be on one device, got {q.device}, {k.device} and {v.device}")
    if q.dtype not in DTYPES:
        raise ValueError(f"q, k and v must be float16, bfloat16, float32 or float64, got {q.dtype}")
    (b, _, h, d), (b_k, s_k, g, d_k), (b_v, s_v, g_v, d_v) = q.shape, k.shape, v.shape
    if not b == b_k == b_v:
        raise ValueError(f"q, k and v must have one batch size, got {b}, {b_k} and {b_v}")
    if s_k != s_v:
        raise ValueError(f"k and v must have one sequence length, got {s_k} and {s_v}")
    if g != g_v:
        raise ValueError(f"k and v must have one number of heads, got {g} and {g_v}")
    if g == 0 or h % g:
        raise ValueError(f"k's heads must divide q's, got {g} and {h}")
    if d != d_k:
        raise ValueError(f"q and k must have one head dim, got {d} and {d_k}")
    for name, dim in (("q and k", d), ("v", d_v)):
        if not 16 <= dim <= 256 or dim % 8:
            raise ValueError(f"head dim must be a multiple of 8 from 16 to 256, got {dim} in {name}")


def _check_scoring(
    scale: float | None,
    softcap: float | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    dropout_p: float,
    q: Tensor,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, float, float | None, float]:
    """Sinks, slopes, heads' words where there is dropout, scale, softcap and dropout, as operators take them."""
    batch, _, heads, head_dim = q.shape
    if sinks is not None:
        _check_of_heads("sinks", sinks, [(heads,)], "a logit per query head", q)
    if alibi_slopes is not None:
        _check_of_heads("alibi_slopes", alibi_slopes, [(heads,), (batch, heads)], "a slope per query head", q)
        if alibi_slopes.requires_grad and torch.is_grad_enabled():
            raise ValueError("alibi_slopes must not require a gradient: there is none of them")
    if softcap is not None:
        softcap = _check_positive("softcap", softcap)
        if not 1e-9 <= softcap <= 1e9:  # what kernels make of it would leave the range of fp32, silently
            raise ValueError(f"softcap must be from 1e-9 to 1e9, got {softcap}")
    if not isinstance(dropout_p, (float, Real)) or not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p must be in [0, 1), got {dropout_p}")
    dropout_p = round_dropout(float(dropout_p)) if dropout_p else 0.0
    factor: float = head_dim**-0.5 if scale is None else _check_positive("scale", scale)
    head_words = draw_head_words(batch, heads) if dropout_p else None
    return sinks, alibi_slopes, head_words, factor, softcap, dropout_p


def _check_of_heads(name: str, x: Tensor, shapes: list[tuple[int, ...]], what: str, q: Tensor) -> None:
    if not isinstance(x, Tensor) or not x.is_floating_point() or tuple(x.shape) not in shapes:
        seen = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        wanted = " or ".join(map(str, shapes))
        raise ValueError(f"{name} must be a floating-point Tensor {wanted}, {what}, got {seen}")
    if x.device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {x.device}")


def _check_positive(name: str, value: float) -> float:
    if not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ValueError(f"{name} must be positive and finite, got {value}")
    return float(value)


def _check_mask(
    mask: Mask | None, causal: bool, window: Window | None, cu_seqlens: Tensor | None
) -> tuple[tuple[int, int, int, int], Tensor | None]:
    """The mask by value, as operators take it: see `mask.decode`, which checks what documents hold."""
    if mask is not None:
        if not isinstance(mask, Mask):
            raise ValueError(f"mask must be a ringflash.Mask, got {type(mask).__name__}")
        if causal or window is not None or cu_seqlens is not None:
            raise ValueError("mask takes the place of causal, window and cu_seqlens: give one or the others")
        return mask.numbers, mask.documents
    sides = (OPEN, OPEN) if window is None else _check_window(window)
    documents = None
    if cu_seqlens is not None:
        if not isinstance(cu_seqlens, Tensor):
            raise ValueError(f"cu_seqlens must be a Tensor, got {type(cu_seqlens).__name__}")
        check_integer_tensor("cu_seqlens", cu_seqlens)
        documents = cu_seqlens.to("cpu", torch.int64).unsqueeze(0)
    return (sides[0], 0 if causal else sides[1], 0, 0), documents


def _check_window(window: Window) -> tuple[int, int]:
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ValueError(f"window must be (left, right), got {window}")
    if not all(side is None or isinstance(side, Integral) for side in window):
        raise ValueError(f"window sides must be integers or None, got {window}")
    left, right = (OPEN if side is None else min(side, 2**62) for side in window)  # operators take 64 bits
    if left < OPEN or right < OPEN:
        raise ValueError(f"window sides must be >= 0, or None or -1 for no bound, got {window}")
    return left, right
