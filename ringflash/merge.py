"""Merging partial attention outputs: a monoid.

Legend: `out_bshd` fp32 (fp64 in the fp64 path), `lse_bhs` the natural log of the sum of `exp(scale * q.k)`.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

NEG_INF = float("-inf")


class Partial(NamedTuple):
    """Attention over some of the keys: `out_bshd`, normalised over them, and `lse_bhs`; over none `(0, -inf)`."""

    out: Tensor
    lse: Tensor


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge two partial attention results over disjoint sets of keys into the result over their union.

    Associative and commutative (to rounding), with the exact identity `(0, -inf)`: a row that saw no key. Any order and
    any grouping of the partials gives the same attention. Differentiable.

    Args:
        out_a, out_b: partial outputs `(b, s, h, d)`, each normalised over its own keys. Keep them in fp32: a partial
            rounded to bf16 makes the error grow with the number of merges.
        lse_a, lse_b: their log-sum-exps `(b, h, s)`, natural log.

    Returns:
        `(out, lse)` of the union, in the promoted dtypes of the inputs.

    Source: the online softmax of Milakov and Gimelshein (2018), https://arxiv.org/abs/1805.02867, as flash-attention
    merges blocks (Dao et al., 2022, https://arxiv.org/abs/2205.14135, algorithm 1).

    Example: one key with score 0 and value 1 on each side, `merge([1], 0, [1], 0) -> ([1], log 2)`.
    """
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape:
        raise ValueError(
            f"merge wants two partials of one shape, got out {tuple(out_a.shape)} and {tuple(out_b.shape)}, "
            f"lse {tuple(lse_a.shape)} and {tuple(lse_b.shape)}"
        )
    if out_a.ndim != 4 or lse_a.shape != (out_a.shape[0], out_a.shape[2], out_a.shape[1]):
        raise ValueError(
            f"merge wants out (b, s, h, d) and lse (b, h, s), got {tuple(out_a.shape)} and {tuple(lse_a.shape)}"
        )
    empty = (lse_a == NEG_INF) & (lse_b == NEG_INF)  # logaddexp(-inf, -inf) is -inf, but its gradient is NaN
    pivot = torch.logaddexp(lse_a.masked_fill(empty, 0.0), lse_b.masked_fill(empty, 0.0))
    weight_a = rearrange(torch.exp(lse_a - pivot), "b h s -> b s h 1")
    weight_b = rearrange(torch.exp(lse_b - pivot), "b h s -> b s h 1")
    return out_a * weight_a + out_b * weight_b, pivot.masked_fill(empty, NEG_INF)
