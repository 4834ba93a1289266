"""The functions of flash-attn 2 and of ring-flash-attention, by their names, argument orders and shapes, for programs
that call those. Each argument works as there or raises; nothing is ignored.

What differs: the lse of a query that sees no key is -inf; `return_attn_probs` gives `(out, lse, None)`, and both `out`
and `lse` are differentiable; `cu_seqlens` must end at the number of tokens, and `max_seqlen` not be too small. Each
call of a varlen form waits for the copy of its boundaries to the host: `flash_attention` and `ring_attention` with a
`Mask`, made once a batch, do not.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import torch.distributed as dist
from torch import Tensor

from . import ops
from .attention import flash_attention, ring_attention
from .mask import Integers, Mask
from .sharding import Group, process_group

Window = tuple[int, int]
Result = Tensor | tuple[Tensor, Tensor, None]  # out, or (out, lse, None)


def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """q `(b, s_q, h, d)`, k and v `(b, s_k, g, d)` -> out `(b, s_q, h, d)`, lse `(b, h, s_q)`."""
    out, lse = flash_attention(
        q, k, v, causal=causal, scale=softmax_scale, window=window_size, softcap=softcap or None,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def flash_attn_kvpacked_func(
    q: Tensor, kv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """kv `(b, s_k, 2, g, d)`; else as `flash_attn_func`."""
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv `(b, s, 3, h, d)`; else as `flash_attn_func`."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, block_table: Tensor | None = None,
) -> Result:  # fmt: skip
    """q `(total_q, h, d)`, k and v `(total_k, g, d)`, boundaries `(documents + 1,)` -> out `(total_q, h, d)`, lse
    `(h, total_q)`. The last query of a document is aligned with its last key."""
    if block_table is not None:
        raise NotImplementedError("block_table is not built")
    alibi_slopes = _slopes_of_all(alibi_slopes)
    mask = Mask(*window_size, causal=causal, cu_seqlens=cu_seqlens_k, cu_seqlens_q=cu_seqlens_q)
    _check_longest("max_seqlen_q", max_seqlen_q, mask.cu_seqlens_q or mask.cu_seqlens)
    _check_longest("max_seqlen_k", max_seqlen_k, mask.cu_seqlens)
    out, lse = flash_attention(
        *_batched(q, k, v), mask=mask, scale=softmax_scale, softcap=softcap or None, alibi_slopes=alibi_slopes,
        dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out[0], lse[0], None) if return_attn_probs else out[0]


def flash_attn_varlen_kvpacked_func(
    q: Tensor, kv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """kv `(total_k, 2, g, d)`; else as `flash_attn_varlen_func`."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0, softmax_scale: float | None = None,
    causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0, alibi_slopes: Tensor | None = None,
    deterministic: bool = False, return_attn_probs: bool = False,
) -> Result:  # fmt: skip
    """qkv `(total, 3, h, d)`; else as `flash_attn_varlen_func`."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


# ring-flash-attention: `group=None` is the default group, and every rank has equally many rows ----------------------


def ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Group | None = None,
) -> Result:  # fmt: skip
    """Rank r holds the r-th piece of the sequence. Shapes as in `flash_attn_func`, of this rank's rows."""
    return _ring(
        "contiguous", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip


def zigzag_ring_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Group | None = None,
) -> Result:  # fmt: skip
    """Of `2 * world_size` pieces of the sequence rank r holds the r-th and the r-th from the end."""
    return _ring(
        "zigzag", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip


def stripe_flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), alibi_slopes: Tensor | None = None, deterministic: bool = False,
    return_attn_probs: bool = False, group: Group | None = None,
) -> Result:  # fmt: skip
    """Rank r holds the tokens r, r + world_size, ..."""
    return _ring(
        "striped", q, k, v, dropout_p, softmax_scale, causal, window_size, alibi_slopes, deterministic,
        return_attn_probs, group,
    )  # fmt: skip


def ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group | None = None,
) -> Result:  # fmt: skip
    """Every document is cut in `world_size` equal pieces, and rank r holds the r-th of each; `cu_seqlens` are the
    boundaries of these pieces, and `max_seqlen` bounds them. Shapes as in `flash_attn_varlen_func`."""
    return _ring_varlen(
        "contiguous-by-document", q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        alibi_slopes, deterministic, return_attn_probs, group,
    )  # fmt: skip


def zigzag_ring_flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float = 0.0,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1),
    alibi_slopes: Tensor | None = None, deterministic: bool = False, return_attn_probs: bool = False,
    group: Group | None = None,
) -> Result:  # fmt: skip
    """Every document is cut in `2 * world_size` equal pieces, and rank r holds the r-th and the r-th from the end of
    each. Else as `ring_flash_attn_varlen_func`."""
    return _ring_varlen(
        "zigzag-by-document", q, k, v, cu_seqlens, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        alibi_slopes, deterministic, return_attn_probs, group,
    )  # fmt: skip


def _ring(
    layout: str, q: Tensor, k: Tensor, v: Tensor, dropout_p: float, softmax_scale: float | None, causal: bool,
    window_size: Window, alibi_slopes: Tensor | None, deterministic: bool, return_attn_probs: bool,
    group: Group | None,
) -> Result:  # fmt: skip
    out, lse = ring_attention(
        q, k, v, group=_group(group), layout=layout, causal=causal, scale=softmax_scale, window=window_size,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out, lse, None) if return_attn_probs else out


def _ring_varlen(
    layout: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, dropout_p: float,
    softmax_scale: float | None, causal: bool, window_size: Window, alibi_slopes: Tensor | None,
    deterministic: bool, return_attn_probs: bool, group: Group | None,
) -> Result:  # fmt: skip
    group = _group(group)
    with _telling(group, q):
        alibi_slopes = _slopes_of_all(alibi_slopes)
        pieces = Mask(cu_seqlens=cu_seqlens).cu_seqlens or ()
        _check_longest("max_seqlen", max_seqlen, pieces)
        world_size = dist.get_world_size(process_group(group))
        mask = Mask(*window_size, causal=causal, cu_seqlens=[world_size * boundary for boundary in pieces])
        q, k, v = _batched(q, k, v)
    out, lse = ring_attention(
        q, k, v, group=group, layout=layout, layout_mask=mask, mask=mask, scale=softmax_scale,
        alibi_slopes=alibi_slopes, dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
    )  # fmt: skip
    return (out[0], lse[0], None) if return_attn_probs else out[0]


def _group(group: Group | None) -> Group:
    return dist.group.WORLD if group is None else group  # pyright: ignore[reportReturnType]  (None: refused later)


@contextmanager
def _telling(group: Group, q: Tensor) -> Iterator[None]:
    """What this rank refuses here, before `ring_attention` would, the others hear of."""
    try:
        yield
    except Exception as error:
        ops.refuse(process_group(group), error, q.device)
        raise


def _slopes_of_all(alibi_slopes: Tensor | None) -> Tensor | None:
    """Slopes that are the same for every document."""
    if alibi_slopes is not None and alibi_slopes.ndim > 1:
        raise NotImplementedError("alibi_slopes of each document are not built: they must be (heads,)")
    return alibi_slopes


def _unpack(name: str, x: Tensor, ndim: int, parts: int) -> tuple[Tensor, ...]:
    """k and v, or q, k and v, of a tensor that holds them side by side in the third dimension from the end."""
    if x.ndim != ndim or x.shape[-3] != parts:
        raise ValueError(f"{name} must have {ndim} dimensions, {parts} in the third from the end, got {tuple(x.shape)}")
    return x.unbind(-3)


def _batched(*tensors: Tensor) -> tuple[Tensor, ...]:
    for name, x in zip("qkv", tensors, strict=True):
        if x.ndim != 3:
            raise ValueError(f"{name} must be (tokens, heads, head dim), got shape {tuple(x.shape)}")
    return tuple(x.unsqueeze(0) for x in tensors)


def _check_longest(name: str, longest: int, boundaries: Integers | None) -> None:
    lengths = [end - start for start, end in pairwise(boundaries or ())]
    if longest < max(lengths, default=0):
        raise ValueError(f"{name} must be at least the longest document's {max(lengths)} tokens, got {longest}")
