"""Merging partial attention outputs: a monoid.

Legend: `out_bshd` fp32 (fp64 in the fp64 path), `lse_bhs` the natural log of the sum of `exp(scale * q.k)`.
"""

from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

NEG_INF = float("-inf")


def empty_like(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Contiguous, of the shape of `x`: in less time than `new_empty` takes on the host."""
    return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)


class Partial(NamedTuple):
    """Attention over some of the keys: `out_bshd`, normalised over them, and `lse_bhs`; over none `(0, -inf)`."""

    out: Tensor
    lse: Tensor


class Sums(NamedTuple):
    """Where a visit puts its share of dK and dV: `(b, s, g, d)` and `(b, s, g, d_v)`, the rows that it is about."""

    dk: Tensor
    dv: Tensor
    fresh: bool  # nothing is there yet: written to, not added to

    def of(self, batches: slice) -> "Sums":
        return Sums(self.dk[batches], self.dv[batches], self.fresh)


def start_partial(total: Partial, sinks: Tensor | None) -> None:
    """Write what there is before any key: the identity, or of a sink, a key of that score and value 0, `(0, sink)`."""
    total.out.zero_()
    if sinks is None:
        total.lse.fill_(NEG_INF)
    else:
        total.lse.copy_(rearrange(sinks, "h -> h 1"))


def sinks_gradient(lse: Tensor, delta: Tensor, sinks: Tensor) -> Tensor:
    """`(h,)`, fp32 or wider. A sink is a key of probability `P = exp(sink - lse)` whose value is 0, so `dP = 0`, and
    `dS = P * (dP - delta)` as for every key: `-sum of P * delta` over queries, `delta = rowsum(dout * out) - dlse`."""
    probs = torch.exp(rearrange(sinks.to(lse.dtype), "h -> h 1") - lse.masked_fill(lse == NEG_INF, 0.0))
    return -(probs * delta).sum(dim=(0, 2))


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
    larger = torch.maximum(lse_a, lse_b).detach()
    empty = larger == NEG_INF
    larger = larger.masked_fill(empty, 0.0)  # both sides empty: both weights are 0
    weight_a, weight_b = torch.exp(lse_a - larger), torch.exp(lse_b - larger)  # else one of them is 1, no other larger
    total = (weight_a + weight_b).masked_fill(empty, 1.0)
    share_a, share_b = (rearrange(weight / total, "b h s -> b s h 1") for weight in (weight_a, weight_b))
    return out_a * share_a + out_b * share_b, (larger + torch.log(total)).masked_fill(empty, NEG_INF)
