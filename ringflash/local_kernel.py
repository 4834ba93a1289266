# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false
# (jitted code is Triton's language, not Python's types)
"""Local attention in Triton: the backend's four functions, which pick the kernels, and the portable kernels.

`kernel_of` says which kernels a pass gets: those for Hopper GPUs (hopper_kernel.py), or the portable ones below: one
launch per visit forward, two backward (more where sums are long), in every layout and under every mask.

Legend: `q_bshd`, `k_bsgd`, `v_bsgd`, `out_bshd`; `lse_bhs` natural log, fp32; `delta_bhs` fp32. In a kernel, scores are
in base 2 (`LOG2E` folded into the scale), and rows are indices into a shard. Products are written with their shapes:
Q, K rows of a tile, D and DV head dims.

A kernel gets, for each of its blocks, the range `begin, full_begin, full_end, end` of the other side's rows, and for
each query row the range of key rows that it sees (see plan.py, Note [One contiguous range]). Tiles inside
`[full_begin, full_end)` run no mask code; the tiles around them compare rows with those ranges. So no kernel knows a
layout or a mask. ALiBi goes by positions and dropout by the words of score.py, Note [Which weights are dropped]:
`positions` and `words` have those of the query rows, and after them of the key rows. CAP (`None`, or how tanh is made:
"fast", "exact"), ALIBI and DROP are what `score.Scoring` asks for beside a scale.

Note [Options per score]. Beside the products a score costs about 8 instructions, so each one more is seen. What can be
is made per row or by the host: a cap costs a multiplication and a `tanh`, ALiBi a subtraction, an absolute value and a
multiplication, dropout a multiplication, a comparison and a selection. Tables come by pointer: every warp loads all of
a tile's entries (triton 3.6: five instructions a score). By TMA, in tiles of one dimension, an H200 met an illegal
instruction.

Note [What TMA loads]. Streamed tiles (keys in the forward pass) come by TMA on sm_90 and up. A program's resident tiles
(its queries) come by pointer and stay in shared memory: a descriptor's tile is reshaped in registers, and stays there
for the whole loop. dQ takes that where registers last: the left operands of S and dP then cost no shared memory reads,
which bound those products at 64 keys a tile.

Note [Rows in pairs]. Of fewer entries than threads, triton 3.6 has every thread load all that it needs, one at a time:
16 of 64 rows. So what is kept of a row stands side by side (`pairs`: lse in base 2, delta), and dK/dV's loop takes both
in one load where that is what gives each thread an entry (TOGETHER). Where each has enough alone, delta comes later: it
would take registers. Masked loads are 0 past the end: another value costs a selection per entry.

Note [Two kernels backward]. dK/dV of a block of keys, then dQ of a block of queries: seven products instead of five,
but each result is owned by one program, so sums are in place, in fp32 and in one order: always deterministic, and no
two programs add to one element. dQ goes first: the dK/dV that the ring brings may still be on its way.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from . import launch
from .launch import (
    aligned,
    batches_of,
    capability_of,
    count_blocks,
    launches_of,
    positions_of,
    ranges_of,
    seen_rows_of,
    sums_of,
    tma_strides,
    words_of,
)
from .merge import Partial, Sums, start_partial
from .plan import Visit
from .score import Scoring

if TYPE_CHECKING:
    from . import hopper_kernel

LOG2E = tl.constexpr(math.log2(math.e))
LN2 = tl.constexpr(math.log(2.0))
NEG_INF = tl.constexpr(float("-inf"))
Kernels = Literal["hopper", "portable"]
# Arguments whose values differ from visit to visit: a kernel is not compiled anew for each that is 1 or divides by 16.
NUMBERS = ["n_q", "n_k", "low", "high", "heads_per_kv", "first_head", "n_heads", "drop_below"]


# Verbs --------------------------------------------------------------------------------------------------------------


@triton.jit
def _load_rows(
    src,
    batch,
    head,
    row,
    end,
    stride_b,
    stride_s,
    stride_h,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TMA: tl.constexpr,
    CHECK: tl.constexpr,
):
    """Rows `row ... row + ROWS` of one head, `[ROWS, COLS]`; columns past DIM are 0, and so are rows past `end`.

    `src` is a 4-D tensor descriptor (TMA), or a pointer. A descriptor's rows past `end` hold whatever follows there,
    0 past the tensor: what depends on them is masked by the caller, or never stored.
    """
    if TMA:
        tile = src.load([batch, row, head, 0]).reshape([ROWS, COLS])
    else:
        rows = tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        base = src + batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h
        pointers = base + rows[:, None] * stride_s + cols[None, :]
        if CHECK:
            tile = tl.load(pointers, mask=(row + rows < end)[:, None] & (cols < DIM)[None, :], other=0.0)
        elif COLS != DIM:
            tile = tl.load(pointers, mask=(cols < DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def _rows_pointers(base, batch, head, row, stride_b, stride_s, stride_h, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Pointers to rows `row ... row + ROWS` of one head, `[ROWS, COLS]`."""
    base += batch.to(tl.int64) * stride_b + row.to(tl.int64) * stride_s + head.to(tl.int64) * stride_h
    return base + (tl.arange(0, ROWS)[:, None] * stride_s + tl.arange(0, COLS)[None, :])


@triton.jit
def _load(pointers, mask, CHECK: tl.constexpr):
    """0 where CHECK and not `mask`."""
    if CHECK:
        found = tl.load(pointers, mask=mask, other=0)
    else:
        found = tl.load(pointers)
    return found


@triton.jit
def _load_seen(seen_rows, rows, end, n_q, n_k):
    """`(first, last)`: the range of key rows that each query row sees, all of them where there is no table. Empty for
    rows past `end`."""
    if seen_rows is None:
        first = tl.zeros_like(rows)
        last = tl.where(rows < end, n_k, 0)
    else:
        pointers = tl.join(seen_rows + rows, seen_rows + n_q + rows)
        first, last = tl.split(tl.load(pointers, mask=(rows < end)[:, None], other=0))
    return first, last


@triton.jit
def _within(key, first, last):
    """`first <= key < last`, given `first <= last`; the arguments broadcast. One comparison, of unsigned numbers: with
    two, dK/dV spills on sm_90 (d64, triton 3.7)."""
    return (key - first).to(tl.uint32, bitcast=True) < (last - first).to(tl.uint32, bitcast=True)


@triton.jit
def _load_range(ranges, block, low, high):
    """`begin, full_begin, full_end, end` of a block, kept to the rows from `low` to `high`."""
    row = ranges + block * 4
    begin = tl.minimum(tl.maximum(tl.load(row), low), high)
    end = tl.minimum(tl.maximum(tl.load(row + 3), begin), high)
    full_begin = tl.minimum(tl.maximum(tl.load(row + 1), begin), end)
    full_end = tl.minimum(tl.maximum(tl.load(row + 2), full_begin), end)
    return begin, full_begin, full_end, end


@triton.jit
def _tile_counts(begin, full_begin, full_end, end, TILE: tl.constexpr):
    """`(left, full, right)`: tiles masked before the full part, tiles in it, tiles masked from there to the end."""
    left = tl.cdiv(full_begin - begin, TILE)
    full = (full_end - full_begin) // TILE
    right = tl.cdiv(end - (full_begin + full * TILE), TILE)
    return left, full, right


@triton.jit
def _masked_tile(i, left, begin, full_begin, full, end, TILE: tl.constexpr):
    """First row of the `i`-th masked tile and the row that it stops before."""
    is_left = i < left
    row = tl.where(is_left, begin + i * TILE, full_begin + (full + i - left) * TILE)
    return row, tl.where(is_left, full_begin, end)


@triton.jit
def _load_entries(table, row, end, ROWS: tl.constexpr):
    """Entries `row ... row + ROWS` of a table; anything past `end`, and of no table."""
    if table is None:
        found = tl.zeros([ROWS], tl.int32)
    else:
        rows = row + tl.arange(0, ROWS)
        found = tl.load(table + rows, mask=rows < end, other=0)
    return found


@triton.jit
def _load_base(positions, row):
    """The position that a block counts from: near it, fp32 is exact."""
    if positions is None:
        base = 0
    else:
        base = tl.load(positions + row)
    return base


@triton.jit
def _tanh(x, CAP: tl.constexpr):
    """To 2^-11 of the value in one instruction where CAP is "fast". Else to the last digits of fp32: near 0, where
    `1 - exp` cancels, by the series."""
    if CAP == "fast":
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)
    square = x * x
    near = x * (1 + square * (-1 / 3 + square * (2 / 15 + square * (-17 / 315 + square * (62 / 2835)))))
    decay = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - decay) / (1 + decay)
    return tl.where(tl.abs(x) < 0.25, near, tl.where(x < 0, -far, far))


@triton.jit
def _score(products, query, key, scale, cap_log2, slope, CAP: tl.constexpr, ALIBI: tl.constexpr):
    """`(scores, unit, derivative)`: scores in units of `unit` in base 2, and where CAP their derivative by
    `scale * products`. `scale` takes products to base 2, with CAP to tanh's argument; `query` and `key` are positions
    from one base. The arguments broadcast."""
    unit = scale
    derivative = products
    if CAP is not None:
        products = _tanh(products * scale, CAP)
        derivative = 1 - products * products
        unit = cap_log2
    if ALIBI:
        products = products * unit - tl.abs(query - key) * slope
        unit = 1.0
    return products, unit, derivative


@triton.jit
def _load_slope(slopes, head, ALIBI: tl.constexpr):
    """ALiBi's slope of a head, counted over batches, in base 2."""
    if ALIBI:
        slope = tl.load(slopes + head) * LOG2E
    else:
        slope = 0.0
    return slope


@triton.jit
def _load_head_word(head_words, head, DROP: tl.constexpr):
    """The word of a head, counted over batches: see score.py, Note [Which weights are dropped]."""
    word = 1
    if DROP:
        word = tl.load(head_words + head)
    return word


@triton.jit
def _kept(row_words, key_words, drop_below):
    """See `score.kept`; the arguments broadcast. The head's word is in those of rows or in those of keys."""
    return row_words * key_words >= drop_below


@triton.jit
def _sign(p, kept):
    """Weights, and those that are dropped negative: what is kept takes no registers of its own."""
    return tl.where(kept, p, -p)


@triton.jit
def _online_softmax_update(scores, row_max, row_sum, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax: `(p, rescale, row_max, row_sum)`; a row that has seen no key keeps max -inf."""
    row_max_new = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    pivot = row_max_new
    if MASKED:
        pivot = tl.where(row_max_new == NEG_INF, 0.0, row_max_new)
    p = tl.exp2(scores * scale_log2 - pivot[:, None])
    rescale = tl.exp2(row_max - pivot)
    return p, rescale, row_max_new, row_sum * rescale + tl.sum(p, 1)


@triton.jit
def _see_sink(sink, row_max, row_sum):
    """The online softmax's step for one more key, of score `sink`, in base 2, and value 0: `(rescale, row_max,
    row_sum)`."""
    row_max_new = tl.maximum(row_max, sink)
    pivot = tl.where(row_max_new == NEG_INF, 0.0, row_max_new)
    rescale = tl.exp2(row_max - pivot)
    return rescale, row_max_new, row_sum * rescale + tl.exp2(sink - pivot)


# Forward ------------------------------------------------------------------------------------------------------------


@triton.jit
def _attend(
    q_tile, k, v, acc, row_max, row_sum, first, last, batch, kv_head, row, end, scale_log2,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    positions, words, base, query, row_words, slope, cap_log2, drop_below, n_q, n_k,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """One tile of keys."""
    k_tile = _load_rows(k, batch, kv_head, row, end, stride_kb, stride_ks, stride_kh, D, BLOCK_K, BLOCK_D, TMA, MASKED)
    scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # [Q, D] @ [D, K] -> [Q, K]
    key = (_load_entries(positions, n_q + row, n_q + n_k, BLOCK_K) - base).to(tl.float32)
    scores, unit, _ = _score(scores, query[:, None], key[None, :], scale_log2, cap_log2, slope, CAP, ALIBI)
    if MASKED:
        key_row = row + tl.arange(0, BLOCK_K)[None, :]
        seen = _within(key_row, first[:, None], tl.maximum(tl.minimum(last, end), first)[:, None])
        scores = tl.where(seen, scores, NEG_INF)
    p, rescale, row_max, row_sum = _online_softmax_update(scores, row_max, row_sum, unit, MASKED)
    v_tile = _load_rows(
        v, batch, kv_head, row, end, stride_vb, stride_vs, stride_vh, DV, BLOCK_K, BLOCK_DV, TMA, MASKED
    )
    if DROP:
        key_words = _load_entries(words, n_q + row, n_q + n_k, BLOCK_K)
        p = _sign(p, _kept(row_words[:, None], key_words[None, :], drop_below))
        p = tl.maximum(p, 0.0)  # chosen in fp32: LLVM would make `where(kept, p, 0)` in bf16, five instructions a score
    # [Q, K] @ [K, DV] -> [Q, DV]
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=NUMBERS)
def _forward_kernel(
    q, k, v, out, lse, out_before, ranges, seen_rows, sinks, positions, words, slopes, head_words,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh,
    n_q, n_k, scale_log2, heads_per_kv, cap_log2, drop_below, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    IN_PLACE: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """One block of queries of one head against the keys it sees; the last block, longest when causal, comes first.

    `out_before` has what the visits before this one left, if any; `out` is the same tensor where IN_PLACE."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // heads_per_kv
    begin, full_begin, full_end, end = _load_range(ranges, block, 0, n_k)
    if IN_PLACE:
        if begin == end:  # merging the identity
            return
    row_q = block * BLOCK_Q
    rows_q = row_q + tl.arange(0, BLOCK_Q)
    q_tile = _load_rows(q, batch, head, row_q, n_q, stride_qb, stride_qs, stride_qh, D, BLOCK_Q, BLOCK_D, False, True)
    acc = tl.zeros([BLOCK_Q, BLOCK_DV], tl.float32)
    row_max = tl.full([BLOCK_Q], NEG_INF, tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    any_head = batch.to(tl.int64) * tl.num_programs(1) + head  # counted over batches
    base = _load_base(positions, row_q)
    query = (_load_entries(positions, row_q, n_q, BLOCK_Q) - base).to(tl.float32)
    row_words = _load_entries(words, row_q, n_q, BLOCK_Q) * _load_head_word(head_words, any_head, DROP)
    slope = _load_slope(slopes, any_head, ALIBI)

    tiles_left, tiles_full, tiles_right = _tile_counts(begin, full_begin, full_end, end, BLOCK_K)
    for i in tl.range(0, tiles_full, disable_licm=True):
        acc, row_max, row_sum = _attend(
            q_tile, k, v, acc, row_max, row_sum, None, None, batch, kv_head, full_begin + i * BLOCK_K, end, scale_log2,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            positions, words, base, query, row_words, slope, cap_log2, drop_below, n_q, n_k,
            D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, TMA, MASKED=False, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip
    first, last = _load_seen(seen_rows, rows_q, n_q, n_q, n_k)
    for i in tl.range(0, tiles_left + tiles_right, disable_licm=True):
        row, stop = _masked_tile(i, tiles_left, begin, full_begin, tiles_full, end, BLOCK_K)
        acc, row_max, row_sum = _attend(
            q_tile, k, v, acc, row_max, row_sum, first, last, batch, kv_head, row, stop, scale_log2,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            positions, words, base, query, row_words, slope, cap_log2, drop_below, n_q, n_k,
            D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, TMA, MASKED=True, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip

    # Epilogue: normalise, and merge with what the visits before this one left. See merge.py.
    if sinks is not None:
        rescale, row_max, row_sum = _see_sink(tl.load(sinks + head) * LOG2E, row_max, row_sum)
        acc *= rescale[:, None]
    seen_any = row_sum > 0
    row_sum = tl.where(seen_any, row_sum, 1.0)
    result = acc / row_sum[:, None]
    if DROP:
        result *= keep_scale
    total = tl.where(seen_any, row_max + tl.log2(row_sum), NEG_INF)
    in_rows = rows_q < n_q
    lse_rows = lse + any_head * n_q + rows_q
    out_rows = _rows_pointers(out, batch, head, row_q, stride_ob, stride_os, stride_oh, BLOCK_Q, BLOCK_DV)
    in_out = in_rows[:, None] & (tl.arange(0, BLOCK_DV) < DV)[None, :]
    if out_before is not None:
        before = tl.load(lse_rows, mask=in_rows, other=NEG_INF) * LOG2E
        largest = tl.maximum(before, total)
        pivot = tl.where(largest == NEG_INF, 0.0, largest)
        weight_before = tl.exp2(before - pivot)
        weight = tl.exp2(total - pivot)
        sum_of_weights = weight_before + weight
        total = pivot + tl.log2(sum_of_weights)
        norm = 1.0 / tl.where(sum_of_weights > 0, sum_of_weights, 1.0)
        out_before = _rows_pointers(out_before, batch, head, row_q, stride_ob, stride_os, stride_oh, BLOCK_Q, BLOCK_DV)
        result *= (weight * norm)[:, None]
        result += tl.load(out_before, mask=in_out, other=0.0) * (weight_before * norm)[:, None]
    tl.store(out_rows, result.to(out.dtype.element_ty), mask=in_out)
    tl.store(lse_rows, total * LN2, mask=in_rows)


# Backward -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=NUMBERS)
def _delta_kernel(
    out, dout, lse, dlse, pairs, stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh,
    stride_lb, stride_lh, stride_ls, n_q,
    DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_DV: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """Of each row lse in base 2, and `delta = rowsum(dout * out) - dlse`: see Note [Rows in pairs]."""
    row, head, batch = tl.program_id(0) * BLOCK_Q, tl.program_id(1), tl.program_id(2)
    rows = row + tl.arange(0, BLOCK_Q)
    in_rows = rows < n_q
    in_tile = in_rows[:, None] & (tl.arange(0, BLOCK_DV) < DV)[None, :]
    out_rows = _rows_pointers(out, batch, head, row, stride_ob, stride_os, stride_oh, BLOCK_Q, BLOCK_DV)
    dout_rows = _rows_pointers(dout, batch, head, row, stride_db, stride_ds, stride_dh, BLOCK_Q, BLOCK_DV)
    out_tile = tl.load(out_rows, mask=in_tile, other=0.0).to(tl.float32)
    dout_tile = tl.load(dout_rows, mask=in_tile, other=0.0).to(tl.float32)
    result = tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        start = batch.to(tl.int64) * stride_lb + head.to(tl.int64) * stride_lh
        result -= tl.load(dlse + start + rows.to(tl.int64) * stride_ls, mask=in_rows, other=0.0)
    rows += (batch.to(tl.int64) * tl.num_programs(1) + head) * n_q
    tl.store(pairs + 2 * rows, tl.load(lse + rows, mask=in_rows, other=0.0) * LOG2E, mask=in_rows)
    tl.store(pairs + 2 * rows + 1, result, mask=in_rows)


@triton.jit
def _dq_step(
    q_tile, dout_tile, k, v, dq, lse_rows, delta_rows, first, last, batch, kv_head, row, end, scale_log2,
    stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    positions, words, base, query, row_words, slope, cap_log2, drop_below, keep_scale, n_q, n_k,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, MASKED: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dQ from one tile of keys."""
    k_tile = _load_rows(k, batch, kv_head, row, end, stride_kb, stride_ks, stride_kh, D, BLOCK_K, BLOCK_D, TMA, MASKED)
    v_tile = _load_rows(
        v, batch, kv_head, row, end, stride_vb, stride_vs, stride_vh, DV, BLOCK_K, BLOCK_DV, TMA, MASKED
    )
    scores = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)  # [Q, D] @ [D, K] -> [Q, K]
    key = (_load_entries(positions, n_q + row, n_q + n_k, BLOCK_K) - base).to(tl.float32)
    scores, unit, derivative = _score(scores, query[:, None], key[None, :], scale_log2, cap_log2, slope, CAP, ALIBI)
    p = tl.exp2(scores * unit - lse_rows[:, None])
    if CAP is not None:
        p *= derivative
    if MASKED:
        key_row = row + tl.arange(0, BLOCK_K)[None, :]
        seen = _within(key_row, first[:, None], tl.maximum(tl.minimum(last, end), first)[:, None])
        p = tl.where(seen, p, 0.0)
    dp = tl.dot(dout_tile, v_tile.T, input_precision=PRECISION)  # [Q, DV] @ [DV, K] -> [Q, K]
    if DROP:
        key_words = _load_entries(words, n_q + row, n_q + n_k, BLOCK_K)
        dp = tl.where(_kept(row_words[:, None], key_words[None, :], drop_below), dp, 0.0) * keep_scale
    ds = p * (dp - delta_rows[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)  # [Q, K] @ [K, D] -> [Q, D]


@triton.jit(do_not_specialize=NUMBERS)
def _dq_kernel(
    q, k, v, dout, pairs, dq, ranges, seen_rows, positions, words, slopes, head_words,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh,
    n_q, n_k, low, high, scale, scale_log2, heads_per_kv, cap_log2, drop_below, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, Q_BY_TMA: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dQ of one block of queries of one head, from the key rows `low` to `high`."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    kv_head = head // heads_per_kv
    begin, full_begin, full_end, end = _load_range(ranges, block, low, high)
    if ADD:
        if begin == end:
            return
    row_q = block * BLOCK_Q
    rows_q = row_q + tl.arange(0, BLOCK_Q)
    in_rows = rows_q < n_q
    q_tile = _load_rows(
        q, batch, head, row_q, n_q, stride_qb, stride_qs, stride_qh, D, BLOCK_Q, BLOCK_D, Q_BY_TMA, True
    )
    dout_tile = _load_rows(
        dout, batch, head, row_q, n_q, stride_ob, stride_os, stride_oh, DV, BLOCK_Q, BLOCK_DV, Q_BY_TMA, True
    )
    any_head = batch.to(tl.int64) * tl.num_programs(1) + head  # counted over batches
    pairs += 2 * (any_head * n_q + rows_q)
    base = _load_base(positions, row_q)
    query = (_load_entries(positions, row_q, n_q, BLOCK_Q) - base).to(tl.float32)
    row_words = _load_entries(words, row_q, n_q, BLOCK_Q) * _load_head_word(head_words, any_head, DROP)
    slope = _load_slope(slopes, any_head, ALIBI)
    lse_rows = tl.load(pairs, mask=in_rows, other=float("inf"))
    delta_rows = tl.load(pairs + 1, mask=in_rows, other=0.0)
    acc = tl.zeros([BLOCK_Q, BLOCK_D], tl.float32)

    tiles_left, tiles_full, tiles_right = _tile_counts(begin, full_begin, full_end, end, BLOCK_K)
    for i in tl.range(0, tiles_full, disable_licm=True):
        acc = _dq_step(
            q_tile, dout_tile, k, v, acc, lse_rows, delta_rows, None, None, batch, kv_head,
            full_begin + i * BLOCK_K, end, scale_log2,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            positions, words, base, query, row_words, slope, cap_log2, drop_below, keep_scale,
            n_q, n_k,
            D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, TMA, MASKED=False, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip
    first, last = _load_seen(seen_rows, rows_q, n_q, n_q, n_k)
    for i in tl.range(0, tiles_left + tiles_right, disable_licm=True):
        row, stop = _masked_tile(i, tiles_left, begin, full_begin, tiles_full, end, BLOCK_K)
        acc = _dq_step(
            q_tile, dout_tile, k, v, acc, lse_rows, delta_rows, first, last, batch, kv_head, row, stop, scale_log2,
            stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
            positions, words, base, query, row_words, slope, cap_log2, drop_below, keep_scale,
            n_q, n_k,
            D, DV, BLOCK_K, BLOCK_D, BLOCK_DV, PRECISION, TMA, MASKED=True, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip

    dq_rows = _rows_pointers(dq, batch, head, row_q, stride_gb, stride_gs, stride_gh, BLOCK_Q, BLOCK_D)
    _store_or_add(dq_rows, acc * scale, in_rows[:, None] & (tl.arange(0, BLOCK_D) < D)[None, :], ADD)


@triton.jit
def _dkv_step(
    k_tile, v_tile, q, dout, pairs, dk, dv, key_row, seen_rows, batch, head, row, end, any_head, n_q, n_k,
    scale_log2, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh,
    positions, words, base, key, key_words, slopes, head_words, cap_log2, drop_below, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    PRECISION: tl.constexpr, TMA: tl.constexpr, TOGETHER: tl.constexpr, MASKED: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dK and dV from one tile of queries; scores transposed, so that P and dS are left operands of their products."""
    rows = row + tl.arange(0, BLOCK_Q)
    first_row = any_head.to(tl.int64) * n_q + row
    q_tile = _load_rows(q, batch, head, row, end, stride_qb, stride_qs, stride_qh, D, BLOCK_Q, BLOCK_D, TMA, MASKED)
    dout_tile = _load_rows(
        dout, batch, head, row, end, stride_ob, stride_os, stride_oh, DV, BLOCK_Q, BLOCK_DV, TMA, MASKED
    )
    scores = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)  # [K, D] @ [D, Q] -> [K, Q]
    if TOGETHER:
        entries = tl.arange(0, 2 * BLOCK_Q)
        both = _load(pairs + 2 * first_row + entries, entries < 2 * (end - row), MASKED)
        lse_rows, delta_rows = tl.split(both.reshape([BLOCK_Q, 2]))
    else:
        lse_rows = _load(pairs + 2 * (first_row + tl.arange(0, BLOCK_Q)), rows < end, MASKED)
    query = (_load_entries(positions, row, n_q, BLOCK_Q) - base).to(tl.float32)
    slope = _load_slope(slopes, any_head, ALIBI)
    scores, unit, derivative = _score(scores, query[None, :], key[:, None], scale_log2, cap_log2, slope, CAP, ALIBI)
    p = tl.exp2(scores * unit - lse_rows[None, :])
    if MASKED:
        first, last = _load_seen(seen_rows, rows, end, n_q, n_k)
        p = tl.where(_within(key_row[:, None], first[None, :], last[None, :]), p, 0.0)
    weights = p
    if DROP:
        key_words *= _load_head_word(head_words, any_head, DROP)
        row_words = _load_entries(words, row, n_q, BLOCK_Q)
        p = _sign(p, _kept(row_words[None, :], key_words[:, None], drop_below))
        weights = tl.maximum(p, 0.0)  # keep_scale comes at the end
    weights = weights.to(dout_tile.dtype)
    if CAP is not None:
        p *= derivative
    dv = tl.dot(weights, dout_tile, dv, input_precision=PRECISION)  # [K, Q] @ [Q, DV] -> [K, DV]
    dp = tl.dot(v_tile, dout_tile.T, input_precision=PRECISION)  # [K, DV] @ [DV, Q] -> [K, Q]
    if not TOGETHER:
        delta_rows = _load(pairs + 2 * (first_row + tl.arange(0, BLOCK_Q)) + 1, rows < end, MASKED)
    if DROP:
        dp = tl.where(p > 0, dp, 0.0) * keep_scale
        p = tl.abs(p)
    ds = p * (dp - delta_rows[None, :])
    dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)  # [K, Q] @ [Q, D] -> [K, D]
    return dk, dv


@triton.jit(do_not_specialize=NUMBERS)
def _dkv_kernel(
    q, k, v, dout, pairs, dk, dv, ranges, seen_rows, positions, words, slopes, head_words,
    stride_qb, stride_qs, stride_qh, stride_kb, stride_ks, stride_kh, stride_vb, stride_vs, stride_vh,
    stride_ob, stride_os, stride_oh, stride_gb, stride_gs, stride_gh, stride_wb, stride_ws, stride_wh,
    n_q, n_k, low, high, scale, scale_log2, heads_per_kv, first_head, n_heads, cap_log2, drop_below, keep_scale,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    ADD: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, TOGETHER: tl.constexpr,
    CAP: tl.constexpr, ALIBI: tl.constexpr, DROP: tl.constexpr,
):  # fmt: skip
    """dK and dV of one block of keys of one key/value head, from `n_heads` of the query heads that it
    serves and their rows `low` to `high`."""
    block = tl.program_id(0)
    kv_head = tl.program_id(1)
    batch = tl.program_id(2)
    begin, full_begin, full_end, end = _load_range(ranges, block, low, high)
    if ADD:
        if begin == end:
            return
    row_k = block * BLOCK_K
    rows_k = row_k + tl.arange(0, BLOCK_K)
    k_tile = _load_rows(
        k, batch, kv_head, row_k, n_k, stride_kb, stride_ks, stride_kh, D, BLOCK_K, BLOCK_D, False, True
    )
    v_tile = _load_rows(
        v, batch, kv_head, row_k, n_k, stride_vb, stride_vs, stride_vh, DV, BLOCK_K, BLOCK_DV, False, True
    )
    base = _load_base(positions, n_q + row_k)
    key = (_load_entries(positions, n_q + row_k, n_q + n_k, BLOCK_K) - base).to(tl.float32)
    key_words = _load_entries(words, n_q + row_k, n_q + n_k, BLOCK_K)
    heads_before = batch * tl.num_programs(1) * heads_per_kv  # in other batches
    acc_dk = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    acc_dv = tl.zeros([BLOCK_K, BLOCK_DV], tl.float32)

    # One flat loop over (head, tile): with a loop per head, ptxas spills 288 bytes on sm_90 (d128, triton 3.6).
    tiles_full = (full_end - full_begin) // BLOCK_Q
    for i in tl.range(0, n_heads * tiles_full, disable_licm=True):
        head = kv_head * heads_per_kv + first_head + i // tiles_full
        acc_dk, acc_dv = _dkv_step(
            k_tile, v_tile, q, dout, pairs, acc_dk, acc_dv, rows_k, seen_rows, batch, head,
            full_begin + i % tiles_full * BLOCK_Q, end, heads_before + head, n_q, n_k,
            scale_log2, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh,
            positions, words, base, key, key_words, slopes, head_words,
            cap_log2, drop_below, keep_scale,
            D, DV, BLOCK_Q, BLOCK_D, BLOCK_DV, PRECISION, TMA, TOGETHER, MASKED=False, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip
    begin, full_begin, full_end, end = _load_range(
        ranges, block, low, high
    )  # again: registers are short in the loop above
    tiles_left, tiles_full, tiles_right = _tile_counts(begin, full_begin, full_end, end, BLOCK_Q)
    tiles_masked = tiles_left + tiles_right
    for i in tl.range(0, n_heads * tiles_masked, disable_licm=True):
        head = kv_head * heads_per_kv + first_head + i // tiles_masked
        row, stop = _masked_tile(i % tiles_masked, tiles_left, begin, full_begin, tiles_full, end, BLOCK_Q)
        acc_dk, acc_dv = _dkv_step(
            k_tile, v_tile, q, dout, pairs, acc_dk, acc_dv, rows_k, seen_rows, batch, head,
            row, stop, heads_before + head, n_q, n_k,
            scale_log2, stride_qb, stride_qs, stride_qh, stride_ob, stride_os, stride_oh,
            positions, words, base, key, key_words, slopes, head_words,
            cap_log2, drop_below, keep_scale,
            D, DV, BLOCK_Q, BLOCK_D, BLOCK_DV, PRECISION, TMA, TOGETHER, MASKED=True, CAP=CAP, ALIBI=ALIBI, DROP=DROP,
        )  # fmt: skip

    if DROP:
        acc_dv *= keep_scale
    in_rows = (rows_k < n_k)[:, None]
    dk_rows = _rows_pointers(dk, batch, kv_head, row_k, stride_gb, stride_gs, stride_gh, BLOCK_K, BLOCK_D)
    dv_rows = _rows_pointers(dv, batch, kv_head, row_k, stride_wb, stride_ws, stride_wh, BLOCK_K, BLOCK_DV)
    _store_or_add(dk_rows, acc_dk * scale, in_rows & (tl.arange(0, BLOCK_D) < D)[None, :], ADD)
    _store_or_add(dv_rows, acc_dv, in_rows & (tl.arange(0, BLOCK_DV) < DV)[None, :], ADD)


@triton.jit
def _store_or_add(pointers, value, mask, ADD: tl.constexpr):
    """Write, or add in place: a reduction in memory, so that what was there takes no registers. One program owns each
    element, so the sum has one order."""
    if ADD:
        tl.atomic_add(pointers, value, mask=mask, sem="relaxed")
    else:
        tl.store(pointers, value.to(pointers.dtype.element_ty), mask=mask)


# Tiles --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tile:
    """How a kernel is cut: rows of queries and keys in a tile, warps, stages of the load pipeline, TMA or pointers, and
    for dQ (with TMA alone) where a program's queries stay."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int
    tma: bool
    q_in_registers: bool = False

    @property
    def together(self) -> bool:
        """Whether dK/dV takes lse and delta in one load: see Note [Rows in pairs]."""
        return self.block_q < 32 * self.num_warps <= 2 * self.block_q


@dataclass(frozen=True)
class Tiles:
    forward: Tile
    dq: Tile
    dkv: Tile


@lru_cache
def choose_tiles(head_dim: int, v_dim: int, dtype: torch.dtype, capability: tuple[int, int], options: int = 0) -> Tiles:
    """The tiles for a shape, dtype and compute capability: a pure function, so every rank makes the same choice.

    Of softcap, ALiBi and dropout, `options` are asked for. Each takes registers, and smaller tiles (not measured yet).
    """
    dim = max(_padded(head_dim), _padded(v_dim))
    if dtype == torch.float32:
        block = 64 if dim <= 64 else 32
        tile = Tile(block, block if dim <= 128 else 16, 4, 1 if dim > 128 else 2, tma=False)
        return Tiles(tile, tile, tile)
    if capability[0] in (9, 10) and options:
        if dim <= 64:
            return Tiles(Tile(64, 128, 4, 3, True), Tile(64, 64, 4, 3, True, True), Tile(64, 64, 4, 2, True))
        if dim <= 128:
            dkv = Tile(64, 64, 4 if options == 1 else 8, 2, True)
            return Tiles(Tile(128, 128, 8, 3, True), Tile(64, 64, 4, 3, True, True), dkv)
        return Tiles(Tile(128, 64, 8, 2, True), Tile(128, 32, 8, 2, True), Tile(32, 64, 8, 1, True))
    if capability[0] in (9, 10):  # data-centre GPUs with TMA and 227 KiB of shared memory; measured on an H200
        if dim <= 64:
            return Tiles(Tile(64, 128, 4, 3, True), Tile(64, 128, 4, 3, True, True), Tile(128, 64, 4, 2, True))
        if dim <= 128:
            return Tiles(Tile(128, 128, 8, 3, True), Tile(64, 64, 4, 3, True, True), Tile(64, 64, 4, 2, True))
        return Tiles(Tile(128, 64, 8, 2, True), Tile(128, 32, 8, 2, True), Tile(64, 64, 8, 1, True))
    if dim <= 64:  # the others have 99 KiB or more
        return Tiles(Tile(128, 64, 4, 3, False), Tile(64, 64, 4, 3, False), Tile(64, 64, 4, 3, False))
    if dim <= 128:
        return Tiles(Tile(128, 64, 8, 2, False), Tile(64, 64, 8, 2, False), Tile(64, 64, 8, 2, False))
    return Tiles(Tile(64, 32, 8, 2, False), Tile(32, 32, 8, 1, False), Tile(32, 32, 8, 1, False))


def _padded(dim: int) -> int:
    return max(1 << (dim - 1).bit_length(), 16)


# The backend's four functions ---------------------------------------------------------------------------------------


def _find_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None
    except ModuleNotFoundError:
        return False


HAS_GLUON = _find_gluon()


@lru_cache
def _hopper():
    """The Hopper kernels, which want Gluon. (An import at every visit takes the host longer than this.)"""
    from . import hopper_kernel

    return hopper_kernel


@lru_cache(maxsize=1024)
def kernel_of(
    which: Literal["forward", "backward"],
    head_dim: int,
    v_dim: int,
    dtype: torch.dtype,
    capability: tuple[int, int],
    *,
    plain: bool = True,
    alibi: bool = False,
) -> Kernels:
    """The kernels that a pass gets: a pure function, so every rank makes the same choice.

    "hopper" (compute capability 9.0, fp16 and bf16) up to head dim 256; up to 128 where scores are not `plain`, a scale
    and no more; never with `alibi`. Its backward adds to dQ in whatever order programs come: a deterministic pass takes
    dQ from the portable kernel (see `Ordered`).
    """
    fits = capability == (9, 0) and dtype in (torch.float16, torch.bfloat16) and not alibi
    return "hopper" if HAS_GLUON and fits and max(head_dim, v_dim) <= (256 if plain else 128) else "portable"


def _kernel_of(which: Literal["forward", "backward"], q: Tensor, v: Tensor, scoring: Scoring) -> Kernels:
    dims, capability = (q.shape[3], v.shape[3]), capability_of(q.device)
    alibi = scoring.slopes is not None
    return kernel_of(which, *dims, q.dtype, capability, plain=scoring.is_plain, alibi=alibi)


class Started(NamedTuple):
    """A backward pass by the portable kernels."""

    pairs: Tensor  # fp32 (b, h, s, 2): lse in base 2, and delta
    dq: Tensor  # (b, s, h, d): the sum so far
    dtype: torch.dtype  # of dq in the end

    @property
    def delta(self) -> Tensor:
        return self.pairs[..., 1]

    @property
    def in_any_order(self) -> bool:
        return False

    def of(self, batches: slice) -> "Started":
        return Started(self.pairs[batches], self.dq[batches], self.dtype)


class Ordered(NamedTuple):
    """A deterministic backward pass on a Hopper GPU: dQ by the portable kernel, dK and dV by the Hopper kernel, where
    each sum has one order."""

    portable: Started
    hopper: "hopper_kernel.Started"

    def of(self, batches: slice) -> "Ordered":
        return Ordered(self.portable.of(batches), self.hopper.of(batches))

    @property
    def dq(self) -> Tensor:
        return self.portable.dq

    @property
    def delta(self) -> Tensor:
        return self.portable.delta

    @property
    def in_any_order(self) -> bool:
        return False


State: TypeAlias = "Started | Ordered | hopper_kernel.Started"


def forward(
    q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
) -> None:
    """Attend to one shard and merge the partial result with the running one. As `reference.forward`."""
    if k.numel() == 0 or q.numel() == 0:  # nothing to launch, and TMA has no descriptor of nothing
        if before is None:
            start_partial(into, scoring.sinks)
        elif before is not into.out:
            into.out.copy_(before)
        return
    if q.shape[0] > launch.MOST_BATCHES:
        for part in batches_of(q):
            total = Partial(into.out[part], into.lse[part])
            earlier = total.out if before is into.out else None if before is None else before[part]
            forward(q[part], k[part], v[part], visit, scoring.of(part), total, earlier)
        return
    if _kernel_of("forward", q, v, scoring) == "hopper":
        _hopper().forward(q, k, v, visit, scoring, into, before)
    else:
        _forward(q, k, v, visit, scoring, into, before)


def start_backward(
    q: Tensor,
    result: Partial,
    dout: Tensor,
    dlse: Tensor | None,
    scoring: Scoring,
    sums: torch.dtype,
    *,
    deterministic: bool = False,
) -> State:
    """What the visits of a backward pass share. As `reference.start_backward`."""
    hopper = None
    if q.numel() and _kernel_of("backward", q, dout, scoring) == "hopper":
        hopper = _hopper().start_backward(q, result, dout, dlse, scoring, with_dq=not deterministic)
        if not deterministic:
            return hopper
    dq = torch.empty(q.shape, dtype=sums, device=q.device)
    portable = Started(_pair_rows(result, dout, dlse), dq, q.dtype)
    return Ordered(portable, hopper) if hopper else portable


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    state: State,
    visit: Visit,
    scoring: Scoring,
    take_dkv: Callable[[], Sums],
    first: bool,
) -> None:
    """One shard's share of the gradients. As `reference.backward`."""
    if k.numel() == 0 or q.numel() == 0:
        dk, dv, fresh = take_dkv()
        for result in ([state.dq] if first else []) + ([dk, dv] if fresh else []):
            result.zero_()
        return
    if q.shape[0] > launch.MOST_BATCHES:
        sums = take_dkv()
        for part in batches_of(q):
            inputs = (x[part] for x in (q, k, v, dout))
            backward(*inputs, state.of(part), visit, scoring.of(part), lambda part=part: sums.of(part), first)
    elif isinstance(state, Started):
        _backward_dq(q, k, v, dout, state, visit, scoring, first)
        _backward_dkv(q, k, v, dout, state, visit, scoring, take_dkv)
    else:
        if isinstance(state, Ordered):
            _backward_dq(q, k, v, dout, state.portable, visit, scoring, first)
            state = state.hopper
        _hopper().backward(k, v, state, visit, take_dkv)


def finish_backward(state: State) -> Tensor:
    """dQ of the whole pass, in q's dtype."""
    if isinstance(state, Ordered):
        state = state.portable
    if isinstance(state, Started):
        return state.dq.to(state.dtype)
    return _hopper().finish_backward(state)


# Launchers of the portable kernels ----------------------------------------------------------------------------------


def _forward(
    q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
) -> None:
    q, k, v = map(aligned, (q, k, v))
    tile = _tiles(q, v, scoring).forward
    shape = _shape(q, k, v, tile)
    _forward_kernel[(count_blocks(q.shape[1], tile.block_q), q.shape[2], q.shape[0])](
        q=q,
        k=_source(k, tile.block_k, shape["BLOCK_D"], tile),
        v=_source(v, tile.block_k, shape["BLOCK_DV"], tile),
        out=into.out,
        lse=into.lse,
        out_before=before,
        ranges=ranges_of(visit, "queries", tile.block_q, q.device),
        seen_rows=seen_rows_of(visit, q.device),
        sinks=scoring.sinks if before is None else None,
        n_q=q.shape[1],
        n_k=k.shape[1],
        IN_PLACE=before is into.out,
        **_scoring(scoring, visit, q),
        **_strides(q=q, k=k, v=v, o=into.out),
        **shape,
    )


def _pair_rows(result: Partial, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """Of each row lse in base 2, and `delta = rowsum(dout * out) - dlse`; fp32 `(b, h, s, 2)`."""
    out, lse = result
    b, s, h, dim = out.shape
    pairs = torch.empty(b, h, s, 2, dtype=torch.float32, device=out.device)
    if pairs.numel() == 0:
        return pairs
    if b > launch.MOST_BATCHES:
        for part in batches_of(out):
            result = Partial(out[part], lse[part])
            pairs[part] = _pair_rows(result, dout[part], None if dlse is None else dlse[part])
        return pairs
    out, dout = aligned(out), aligned(dout)
    lse_strides = (0, 0, 0) if dlse is None else dlse.stride()
    _delta_kernel[(count_blocks(s, 64), h, b)](
        out=out,
        dout=dout,
        lse=lse,
        dlse=dlse,
        pairs=pairs,
        stride_lb=lse_strides[0],
        stride_lh=lse_strides[1],
        stride_ls=lse_strides[2],
        n_q=s,
        DV=dim,
        BLOCK_Q=64,
        BLOCK_DV=_padded(dim),
        HAS_DLSE=dlse is not None,
        num_warps=4,
        **_strides(o=out, d=dout),
    )
    return pairs


def _backward_dq(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, state: Started, visit: Visit, scoring: Scoring, first: bool
) -> None:
    """See Note [Two kernels backward]."""
    q, k, v, dout = map(aligned, (q, k, v, dout))
    tile = _tiles(q, v, scoring).dq
    shape = _shape(q, k, v, tile)
    launches = launches_of(k.shape[1], heads=1)
    with sums_of(launches, state.dq) as (total,):
        for _, _, low, high in launches:
            _dq_kernel[(count_blocks(q.shape[1], tile.block_q), q.shape[2], q.shape[0])](
                q=_source(q, tile.block_q, shape["BLOCK_D"], tile) if tile.q_in_registers else q,
                k=_source(k, tile.block_k, shape["BLOCK_D"], tile),
                v=_source(v, tile.block_k, shape["BLOCK_DV"], tile),
                dout=_source(dout, tile.block_q, shape["BLOCK_DV"], tile) if tile.q_in_registers else dout,
                dq=total,
                low=low,
                high=high,
                ranges=ranges_of(visit, "queries", tile.block_q, q.device),
                Q_BY_TMA=tile.q_in_registers,
                ADD=not first or low > 0,
                **_rows(q, k, state, visit, scoring),
                **_strides(q=q, k=k, v=v, o=dout, g=total),
                **shape,
            )


def _backward_dkv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    state: Started,
    visit: Visit,
    scoring: Scoring,
    take_dkv: Callable[[], Sums],
) -> None:
    """See Note [Two kernels backward]."""
    q, k, v, dout = map(aligned, (q, k, v, dout))
    dk, dv, fresh = take_dkv()
    tile = _tiles(q, v, scoring).dkv
    shape = _shape(q, k, v, tile)
    launches = launches_of(q.shape[1], heads=q.shape[2] // k.shape[2])
    with sums_of(launches, dk, dv) as (total_dk, total_dv):
        for first_head, n_heads, low, high in launches:
            _dkv_kernel[(count_blocks(k.shape[1], tile.block_k), k.shape[2], k.shape[0])](
                q=_source(q, tile.block_q, shape["BLOCK_D"], tile),
                k=k,
                v=v,
                dout=_source(dout, tile.block_q, shape["BLOCK_DV"], tile),
                dk=total_dk,
                dv=total_dv,
                low=low,
                high=high,
                first_head=first_head,
                n_heads=n_heads,
                ranges=ranges_of(visit, "keys", tile.block_k, q.device),
                ADD=not fresh or first_head > 0 or low > 0,
                TOGETHER=tile.together,
                **_rows(q, k, state, visit, scoring),
                **_strides(q=q, k=k, v=v, o=dout, g=total_dk, w=total_dv),
                **shape,
            )


def _rows(q: Tensor, k: Tensor, state: Started, visit: Visit, scoring: Scoring) -> dict[str, object]:
    """What both backward kernels take of the queries' rows and are told of scores."""
    return {
        "pairs": state.pairs,
        "seen_rows": seen_rows_of(visit, q.device),
        "n_q": q.shape[1],
        "n_k": k.shape[1],
        "scale": scoring.scale,
        **_scoring(scoring, visit, q),
    }


def _scoring(scoring: Scoring, visit: Visit, q: Tensor) -> dict[str, object]:
    """What all three kernels are told of scores."""
    positions = None if scoring.slopes is None else positions_of(visit, q.device)
    words = None if scoring.head_words is None else words_of(visit, q.device)
    softcap = scoring.softcap
    return {
        "scale_log2": scoring.scale * LOG2E.value if softcap is None else scoring.scale / softcap,
        "cap_log2": (softcap or 0.0) * LOG2E.value,
        "positions": positions,
        "words": words,
        "slopes": scoring.slopes,
        "head_words": scoring.head_words,
        "drop_below": scoring.drop_below,
        "keep_scale": 1 / (1 - scoring.dropout_p),
        "CAP": None if softcap is None else "fast" if q.is_cuda and q.dtype != torch.float32 else "exact",
        "ALIBI": scoring.slopes is not None,
        "DROP": scoring.head_words is not None,
    }


def _tiles(q: Tensor, v: Tensor, scoring: Scoring) -> Tiles:
    return choose_tiles(q.shape[3], v.shape[3], q.dtype, capability_of(q.device), scoring.options)


def _shape(q: Tensor, k: Tensor, v: Tensor, tile: Tile) -> dict[str, object]:
    return {
        "heads_per_kv": q.shape[2] // k.shape[2],
        "D": q.shape[3],
        "DV": v.shape[3],
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "BLOCK_D": _padded(q.shape[3]),
        "BLOCK_DV": _padded(v.shape[3]),
        "PRECISION": _precision(q.dtype),
        "TMA": tile.tma,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }


def _precision(dtype: torch.dtype) -> str:
    """How a product of fp32 tiles is made: three tf32 products, as exact as fp32. Says nothing to fp16 and bf16."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def _source(x: Tensor, rows: int, cols: int, tile: Tile):
    """What a kernel streams `[rows, cols]` tiles from: a descriptor with TMA, else the tensor."""
    if not tile.tma:
        return x
    return TensorDescriptor(x, list(x.shape), tma_strides(x.shape, x.stride()), [1, rows, 1, cols])


def _strides(**tensors: Tensor) -> dict[str, int]:
    """`stride_qb`, `stride_qs`, `stride_qh` for q, and so on."""
    return {
        f"stride_{name}{axis}": stride
        for name, x in tensors.items()
        for axis, stride in zip("bsh", x.stride(), strict=False)
    }
