"""Attention without kernels: the dense fp64 oracle, and the blockwise torch backend.

Legend: `q_bshd` `(b, s, h, d)`, `k_bsgd` and `v_bsgd` with `g` key/value heads, each serving `r = h / g` query heads.

The oracle reads like the formula and shares nothing with the rest but two predicates: who sees whom, and which weights
are dropped. The backend has the same four functions as `local_kernel.py` and runs on any device and dtype.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from einops import rearrange, reduce
from torch import Tensor

from .layout import count_rows
from .mask import Mask
from .merge import NEG_INF, Partial, Sums, merge, start_partial
from .plan import Visit
from .score import Scoring, kept, make_words, round_dropout, threshold

BLOCK = 256  # rows a step: scores take b * h * BLOCK * keys


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    head_words: Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The oracle: `softmax(scale q k^T) v` in fp64, all scores at once; differentiable by plain autograd.

    Args:
        q, k, v: `(b, s_q, h, d)`, `(b, s_k, g, d)`, `(b, s_k, g, d_v)`, any float dtype.
        mask: who sees whom, by position.
        scale: default `d ** -0.5`.
        softcap: scores become `softcap * tanh(score / softcap)`.
        alibi_slopes: `(h,)` or `(b, h)`: scores lose `slope * |query position - key position|`.
        sinks: `(h,)`: a score that every query sees, whose value is 0.
        dropout_p, head_words: weights that `score.kept` says are dropped are 0, others divided by `1 - dropout_p`,
            which is rounded as `score.round_dropout` says.
        query_positions, key_positions: int64 `(s_q,)`, `(s_k,)`; by default `0 .. s_k - 1` for keys and the same
            aligned at the end for queries.

    Returns:
        `out (b, s_q, h, d_v)` and `lse (b, h, s_q)`, fp64, natural log; a row that sees no key has `(0, -inf)`.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    if key_positions is None:
        key_positions = torch.arange(k.shape[1], device=q.device)
    if query_positions is None:
        query_positions = torch.arange(q.shape[1], device=q.device) + (k.shape[1] - q.shape[1])
    visible = mask.visible(rearrange(query_positions, "q -> q 1"), rearrange(key_positions, "k -> 1 k"))

    q = rearrange(q.double(), "b q (g r) d -> b g r q d", g=k.shape[2])
    scores = factor * torch.einsum("bgrqd, bkgd -> bgrqk", q, k.double())
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if alibi_slopes is not None:
        slopes = rearrange(alibi_slopes.double().expand(q.shape[0], -1), "b (g r) -> b g r 1 1", g=k.shape[2])
        distance = (rearrange(query_positions, "q -> q 1") - rearrange(key_positions, "k -> 1 k")).abs()
        scores = scores - slopes * distance
    scores = scores.masked_fill(~visible, NEG_INF)
    seen = scores
    if sinks is not None:
        # a sink of -inf is none: filled in again, so that autograd has nothing to say of it, not even NaN
        sink_scores = sinks.double().masked_fill(sinks == NEG_INF, NEG_INF)
        sink_scores = rearrange(sink_scores, "(g r) -> g r 1 1", g=k.shape[2])
        seen = torch.cat([scores, sink_scores.expand(*scores.shape[:-1], 1)], dim=-1)
    lse = torch.logsumexp(seen, dim=-1) if seen.shape[-1] else seen.new_full(seen.shape[:-1], NEG_INF)
    pivot = rearrange(lse.masked_fill(lse == NEG_INF, 0.0), "b g r q -> b g r q 1")
    weights = torch.exp(scores - pivot)
    if dropout_p:
        assert head_words is not None
        keep = kept(head_words.to(q.device), *make_words(query_positions, key_positions), threshold(dropout_p))
        keep = rearrange(keep, "b (g r) q k -> b g r q k", g=k.shape[2])
        weights = weights * keep / (1 - round_dropout(dropout_p))
    out = torch.einsum("bgrqk, bkgd -> bqgrd", weights, v.double())
    return rearrange(out, "b q g r d -> b q (g r) d"), rearrange(lse, "b g r q -> b (g r) q")


def forward(
    q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
) -> None:
    """Attend to one shard and merge the partial result with the running one.

    Args:
        q, k, v: this rank's queries and the source's keys and values.
        visit: who sees whom.
        scoring: what scores are, and which weights are dropped.
        into: where `(out, lse)` go. At the first visit they are overwritten, and have the sinks in them.
        before: the running out, whose lse is in `into`; `None` at the first visit. It is `into.out` itself, or where
            the last visit writes another dtype, a tensor of the same strides.
    """
    if before is None:
        start_partial(into, scoring.sinks)
        before = into.out
    elif before is not into.out:
        into.out.copy_(before)
    for block, (begin, full_begin, full_end, end) in enumerate(visit.key_ranges(BLOCK).tolist()):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        keys = slice(begin, end)
        out, lse = into.out[:, rows], into.lse[:, :, rows]
        if begin == end:
            continue
        scores, _ = _scores(q[:, rows], k[:, keys], visit, scoring, rows, keys)
        if (begin, end) != (full_begin, full_end):
            scores = scores.masked_fill(~_visible(visit, rows, keys, q.device), NEG_INF)
        part_lse = torch.logsumexp(scores, dim=-1)
        pivot = part_lse.masked_fill(part_lse == NEG_INF, 0.0)
        probs = torch.exp(scores - pivot.unsqueeze(-1))
        weights = _drop(probs, _kept(visit, scoring, rows, keys, k.shape[2]), scoring)
        part_out = torch.einsum("bgrqk, bkgd -> bqgrd", weights, _wide(v[:, keys]))
        part_out = rearrange(part_out, "b q g r d -> b q (g r) d")
        part_lse = rearrange(part_lse, "b g r q -> b (g r) q")
        merged_out, merged_lse = merge(before[:, rows], lse, part_out, part_lse)
        out.copy_(merged_out)
        lse.copy_(merged_lse)


class Started(NamedTuple):
    """A backward pass under way."""

    lse: Tensor  # (b, h, s)
    delta: Tensor  # (b, h, s), the dtype of lse: what the softmax subtracts from dP
    dq: Tensor  # (b, s, h, d): the sum so far
    dtype: torch.dtype  # of dq in the end

    @property
    def in_any_order(self) -> bool:
        return False


def start_backward(
    q: Tensor, result: Partial, dout: Tensor, dlse: Tensor | None, scoring: Scoring, sums: torch.dtype
) -> Started:
    """What the visits of a backward pass share: `delta = rowsum(dout * out) - dlse`, and dQ.

    Args:
        result: `(out, lse)` of this rank's rows over the whole sequence.
        dlse: gradient of lse, `(b, h, s)`; 0 where lse is -inf.
        sums: dtype that dQ is summed in, where it is summed in q's shape.
    """
    delta = reduce(_wide(result.out) * _wide(dout), "b s h d -> b h s", "sum")
    delta = delta if dlse is None else delta - dlse
    return Started(result.lse, delta, torch.empty(q.shape, dtype=sums, device=q.device), q.dtype)


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    state: Started,
    visit: Visit,
    scoring: Scoring,
    take_dkv: Callable[[], Sums],
    first: bool,
) -> None:
    """One shard's share of the gradients, by the *global* `lse`: `P = exp(S - lse)` is exact, so shares just add.

    Args:
        state: from `start_backward`; its dq is written when `first`, added to otherwise.
        take_dkv: called once, as late as possible, for the sums to write or to add to.
    """
    lse, delta, dq, _ = state
    results = dq, *(dkv := take_dkv())[:2]
    fresh = first, dkv.fresh, dkv.fresh
    dq, dk, dv = sums = [_wide(torch.zeros_like(x) if is_new else x) for x, is_new in zip(results, fresh, strict=True)]
    for block, (begin, full_begin, full_end, end) in enumerate(visit.key_ranges(BLOCK).tolist()):
        if begin == end:
            continue
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        keys = slice(begin, end)
        wide_k, wide_v = _wide(k[:, keys]), _wide(v[:, keys])
        wide_q, wide_dout = (rearrange(_wide(x[:, rows]), "b q (g r) d -> b q g r d", g=k.shape[2]) for x in (q, dout))
        lse_rows, delta_rows = (rearrange(x[:, :, rows], "b (g r) q -> b g r q 1", g=k.shape[2]) for x in (lse, delta))
        scores, slope = _scores(q[:, rows], k[:, keys], visit, scoring, rows, keys)
        if (begin, end) != (full_begin, full_end):
            scores = scores.masked_fill(~_visible(visit, rows, keys, q.device), NEG_INF)
        probs = torch.exp(scores - lse_rows.masked_fill(lse_rows == NEG_INF, 0.0))
        keep = _kept(visit, scoring, rows, keys, k.shape[2])
        dprobs = _drop(torch.einsum("bqgrd, bkgd -> bgrqk", wide_dout, wide_v), keep, scoring)
        dscores = probs * (dprobs - delta_rows) * slope
        dv[:, keys] += torch.einsum("bgrqk, bqgrd -> bkgd", _drop(probs, keep, scoring), wide_dout)
        dk[:, keys] += torch.einsum("bgrqk, bqgrd -> bkgd", dscores, wide_q)
        dq[:, rows] += rearrange(torch.einsum("bgrqk, bkgd -> bqgrd", dscores, wide_k), "b q g r d -> b q (g r) d")
    for result, total in zip(results, sums, strict=True):
        result.copy_(total)


def finish_backward(state: Started) -> Tensor:
    """dQ of the whole pass, in q's dtype."""
    return state.dq.to(state.dtype)


def _wide(x: Tensor) -> Tensor:
    """At least fp32: where products and sums are made."""
    return x if x.dtype == torch.float64 else x.float()


def _scores(
    q: Tensor, k: Tensor, visit: Visit, scoring: Scoring, rows: slice, keys: slice
) -> tuple[Tensor, Tensor | float]:
    """Scores of these rows, `(b, g, r, q, k)`, and their derivative by the products `q k^T`."""
    q = rearrange(_wide(q), "b q (g r) d -> b g r q d", g=k.shape[2])
    scores, derivative = torch.einsum("bgrqd, bkgd -> bgrqk", q * scoring.scale, _wide(k)), scoring.scale
    if scoring.softcap is not None:
        tanh = torch.tanh(scores / scoring.softcap)
        scores, derivative = scoring.softcap * tanh, scoring.scale * (1 - tanh.square())
    if scoring.slopes is not None:
        query, key = _positions(visit, rows, keys, q.device)
        slopes = rearrange(scoring.slopes, "b (g r) -> b g r 1 1", g=k.shape[2])
        scores = scores - slopes * (query.unsqueeze(1) - key).abs()
    return scores, derivative


def _kept(visit: Visit, scoring: Scoring, rows: slice, keys: slice, kv_heads: int) -> Tensor | None:
    """Boolean `(b, g, r, q, k)`: which weights dropout keeps; `None` where it keeps all."""
    if scoring.head_words is None:
        return None
    query, key = _positions(visit, rows, keys, scoring.head_words.device)
    keep = kept(scoring.head_words, *make_words(query, key), scoring.drop_below)
    return rearrange(keep, "b (g r) q k -> b g r q k", g=kv_heads)


def _drop(x: Tensor, keep: Tensor | None, scoring: Scoring) -> Tensor:
    return x if keep is None else x * keep / (1 - scoring.dropout_p)


def _positions(visit: Visit, rows: slice, keys: slice, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of these queries and of these keys."""
    n_q = count_rows(visit.queries)
    positions = visit.positions().to(device, non_blocking=True)
    return positions[:n_q][rows], positions[n_q:][keys]


def _visible(visit: Visit, rows: slice, keys: slice, device: torch.device) -> Tensor:
    """Boolean `(rows, keys)`: does the query see the key?"""
    first, last = rearrange(visit.seen_rows()[:, rows].to(device, non_blocking=True), "ends q -> ends q 1")
    key = torch.arange(keys.start, keys.stop, device=device)
    return (key >= first) & (key < last)
