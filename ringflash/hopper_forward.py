# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (jitted code is Gluon's language, not Python's types)
"""The forward pass on Hopper GPUs (sm_90), in Gluon. docs/hopper_kernel.md draws who waits for what.

A program is a producer, one warp that loads by TMA, and CONSUMERS warpgroups of ROWS queries each. Programs take pieces
of work, a block of CONSUMERS * ROWS queries of one head each, until there are none left. `hopper_kernel.forward`
launches it and chooses the tile.

Legend: products are written with their shapes: Q, K rows of a tile, D and DV head dims. Scores are in base 2 from the
softmax on (`scale_log2` has LOG2E in it); `lse` in memory is natural log, fp32. Names that end in `_s` lie in shared
memory:

    q_s (CONSUMERS, ROWS, BLOCK_D)      q_full, q_empty   one barrier a consumer
    k_s (STAGES, BLOCK_K, BLOCK_D)      k_full            one a stage
    words_s (STAGES, BLOCK_K)           k_full            where weights are dropped
    v_s (STAGES, BLOCK_K, BLOCK_DV)     v_full            one a stage
                                        free              one a stage, of K of a tile and V of the tile before it
    failed_s (2 * CONSUMERS, 1)         agreed            see `_agree`, where the pivot is FIXED

with axes of length 1 for batch and head, as descriptors have them. `stage` is where a tile lies, `phase` which of its
uses a barrier counts, 0 or 1; `before` and `phase_before` are those of the tile before. `tiles` are the tiles of keys
that a block sees, `(first, full_first, full_stop, stop)`: all but those in `[full_first, full_stop)` need the mask.
Tables in global memory: `blocks` (n_blocks, 6), see `_load_block`; `seen` (2, n_q), the first key row that each query
sees and the one past its last, or None: all; `schedule`, see `hopper_kernel._schedule`, or None: in turns.

Softcap and dropout are there where `cap_scale` and `words` are: see `_cap` and `_drop`. `words` are of the query rows,
and after them of the key rows.

Note [Fixed pivot]. An online softmax subtracts from a row's scores the largest one so far, its *pivot*. So a tile's
weights wait for its maximum, and when that is larger, what is summed is multiplied before the next product: a fifth of
the time. But weights in bf16, and their sums in fp32, have the exponents of fp32: the pivot need not be the largest
score, only near it. So where weights are bf16 the pivot is FIXED behind the masked tiles and one full tile, of which
every row has seen a key.

- A sum above 2^64, for which a score must be 44 above all of those, or 65,536 of them 33, may have overflowed. (So may
  the product with values above 1.8e19.) Then, and where a sum is not a number, the block is not written, and its turn
  comes once more, with an online softmax in all tiles, whatever comes out: see `_agree`.
- In an online softmax the largest weight is 1, which rounding to bf16 leaves as it is. So where one key has nearly all
  of the weight, the output is that key's value. Over a fixed pivot it may be any number. So `row_top` keeps the largest
  one of each thread, and the output is divided by a sum in which these are rounded, as they are in the product. `lse`
  is the logarithm of the sum as it is.

FlashDecoding++ (Hong et al., 2023) has one pivot for all rows, chosen beforehand, and the same way out of an overflow.
"""

import math

from .gluon_compat import (
    async_copy,
    copy_async,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

LOG2E = gl.constexpr(math.log2(math.e))
LN2 = gl.constexpr(math.log(2.0))
NEG_INF = gl.constexpr(float("-inf"))
LARGEST_SUM = gl.constexpr(2.0**64)  # of a row's weights, over a pivot that is FIXED
GROUP = gl.constexpr(32)  # pieces of work, after which warps agree which of them failed: bits of a word


@gluon.constexpr_function
def _layout_of_rows(cols, dtype):
    """How a warpgroup writes 64 rows of a product: 16 bytes a thread, 64 a row at a time. A product leaves 4 or 8 bytes
    of each 8 columns with a thread. Every warp keeps its 16 rows, so what it takes to get there stays within warps."""
    unit = 128 // dtype.primitive_bitwidth  # columns of 16 bytes
    units = [[0, unit << bit] for bit in range((cols // unit).bit_length() - 1)]
    registers = [[0, 1 << bit] for bit in range(unit.bit_length() - 1)]
    lanes = [*units[:2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, [8, 0], *units[2:]], lanes, [[16, 0], [32, 0]], [], [64, cols])


# Verbs --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _load_block(blocks, block, TILE: gl.constexpr):
    """The rows `[low, high)` of a block; the tiles of the other side that it sees, `first, full_first, full_stop,
    stop`, at least one; and whether it sees nothing of them."""
    begin = gl.load(blocks + block * 6)
    full_begin = gl.load(blocks + block * 6 + 1)
    full_end = gl.load(blocks + block * 6 + 2)
    end = gl.load(blocks + block * 6 + 3)
    low = gl.load(blocks + block * 6 + 4)
    high = gl.load(blocks + block * 6 + 5)
    first = begin // TILE
    stop = gl.maximum((end + TILE - 1) // TILE, first + 1)
    full_first = gl.minimum((full_begin + TILE - 1) // TILE, stop)
    full_stop = gl.minimum(gl.maximum(full_end // TILE, full_first), stop)
    return low, high, (first, full_first, full_stop, stop), begin == end


@gluon.jit
def _tile_at(i, tiles):
    """The `i`-th tile to visit: the masked ones after the full part, those before it, then the full ones; each from
    the end."""
    first, full_first, full_stop, stop = tiles
    after = stop - full_stop
    masked = after + full_first - first
    return gl.where(
        i < after, stop - 1 - i, gl.where(i < masked, full_first - 1 - (i - after), full_stop - 1 - (i - masked))
    )


@gluon.jit
def _wait_turn(WHO: gl.constexpr):
    """Named barrier `9 + WHO`: wait until another warpgroup gives this one its turn at the tensor cores."""
    if WHO == 0:
        gl.inline_asm_elementwise("bar.sync 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WHO == 1:
        gl.inline_asm_elementwise("bar.sync 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.sync 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _give_turn(WHO: gl.constexpr):
    """Named barrier `9 + WHO`: the turn is that warpgroup's."""
    if WHO == 0:
        gl.inline_asm_elementwise("bar.arrive 9, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WHO == 1:
        gl.inline_asm_elementwise("bar.arrive 10, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        gl.inline_asm_elementwise("bar.arrive 11, 256; mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _mask(x, tile, seen_first, seen_count, UNSEEN: gl.constexpr, BLOCK_K: gl.constexpr, s_layout: gl.constexpr):
    """UNSEEN where a query does not see a key: outside `seen_count` key rows from `seen_first` on."""
    key = tile * BLOCK_K + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, s_layout))
    since_first = (key[None, :] - seen_first[:, None]).to(gl.uint32, bitcast=True)
    return gl.where(since_first < seen_count[:, None].to(gl.uint32, bitcast=True), x, UNSEEN)


@gluon.jit
def _cap(products, cap_scale):
    """Scores in units of the cap: `tanh`, to 2^-11 of its value, in one operation of the special-function unit."""
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=r,r", [products * cap_scale], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _drop(p, row_words, key_words, drop_below):
    """Weights, 0 where they are dropped: score.py, Note [Which weights are dropped]. The arguments broadcast; the
    head's word is in those of rows. (As LLVM writes it, a weight takes five instructions more.)"""
    return gl.inline_asm_elementwise(
        "{.reg .pred kept; .reg .b32 hash; mul.lo.s32 hash, $2, $3; setp.ge.s32 kept, hash, $4;"
        " selp.f32 $0, $1, 0f00000000, kept;}",
        "=r,r,r,r,r", [p, row_words, key_words, drop_below], dtype=gl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _softmax(scores, row_max, scale_log2):
    """One step of the online softmax: `(p, rescale, row_max)`; a row that has seen no key keeps max -inf."""
    new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
    pivot = gl.where(new_max == NEG_INF, 0.0, new_max)
    p = gl.exp2(scores * scale_log2 - pivot[:, None])
    return p, gl.exp2(row_max - pivot), new_max


@gluon.jit
def _add_columns(p):
    """[Q, K] -> [Q, 4]: sums over the columns that a thread has. The four are added once, at the end."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _top_columns(p):
    """[Q, K] -> [Q, 4]: the largest of the columns that a thread has, as an integer, whose order is that of weights.
    (Of integers the machine takes three at once, if one comes after the other.)"""
    bits = gl.reshape(p.to(gl.int32, bitcast=True), [p.shape[0], p.shape[1] // 8, 4, 2])
    return gl.max(gl.reshape(gl.permute(bits, (0, 2, 1, 3)), [p.shape[0], 4, p.shape[1] // 4]), 2)


@gluon.jit
def _pack(p, dtype: gl.constexpr):
    """[Q, K] -> [Q, K / 2]: weights rounded, two in an integer. (LLVM carries values of 16 bits from loop to loop one
    by one, and packs and unpacks them in every step.)"""
    even, odd = gl.split(gl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]))
    if dtype == gl.bfloat16:
        ROUND: gl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
    else:
        ROUND: gl.constexpr = "cvt.rn.f16x2.f32 $0, $2, $1;"
    return gl.inline_asm_elementwise(ROUND, "=r,r,r", [even, odd], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _unpack(pairs, dtype: gl.constexpr, o_layout: gl.constexpr):
    """[Q, K / 2] -> [Q, K]: the left operand of P V. No instructions."""
    even = pairs.to(gl.int16).to(dtype, bitcast=True)
    odd = (pairs >> 16).to(gl.int16).to(dtype, bitcast=True)
    p = gl.reshape(gl.join(even, odd), [pairs.shape[0], pairs.shape[1] * 2])
    return gl.convert_layout(p, gl.DotOperandLayout(0, o_layout, 2))


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and its phase: which of its uses the barriers count, 0 or 1."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def _advance(stages, STAGES: gl.constexpr):
    """`(stage, phase, before, phase_before)` of the tile after this one."""
    stage, phase, _, _ = stages
    next_stage, next_phase = _next_stage(stage, phase, STAGES)
    return next_stage, next_phase, stage, phase


@gluon.jit
def _start_scores(q, k_s, stage, zero, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr):
    """[Q, D] @ [D, K] -> [Q, K]"""
    k_tile = k_s.index(stage).reshape([BLOCK_K, BLOCK_D])
    return warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def _start_out(pairs, v_s, stage, acc, BLOCK_K: gl.constexpr, BLOCK_DV: gl.constexpr, o_layout: gl.constexpr):
    """[Q, K] @ [K, DV] -> [Q, DV]"""
    p = _unpack(pairs, v_s.dtype, o_layout)
    return warpgroup_mma(p, v_s.index(stage).reshape([BLOCK_K, BLOCK_DV]), acc, is_async=True)


@gluon.jit
def _step(
    i, n_masked, stages, tiles, q, k_s, v_s, words_s, barriers, state, zero, seen_first, seen_count, scale_log2,
    cap_scale, row_words, drop_below,
    WHO: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """The scores of tile `i` start, then P V of the tile before; the softmax of tile `i` runs beside that product."""
    k_full, v_full, free = barriers
    acc, pairs, row_max, row_sum = state
    stage, phase, before, phase_before = stages
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        _wait_turn(WHO)
    scores = _start_scores(q, k_s, stage, zero, BLOCK_K, BLOCK_D)
    mbarrier.wait(v_full.index(before), phase_before)
    acc = _start_out(pairs, v_s, before, acc, BLOCK_K, BLOCK_DV, o_layout)
    if PINGPONG:
        _give_turn((WHO + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if cap_scale is not None:
        scores = _cap(scores, cap_scale)
    if i < n_masked:
        scores = _mask(scores, _tile_at(i, tiles), seen_first, seen_count, NEG_INF, BLOCK_K, s_layout)
    p, rescale, row_max = _softmax(scores, row_max, scale_log2)
    row_sum = row_sum * gl.convert_layout(rescale, gl.SliceLayout(1, row_sum.type.layout))[:, None]
    row_sum += _add_columns(p)
    if words_s is not None:
        key_words = words_s.index(stage).load(gl.SliceLayout(0, s_layout))
        p = _drop(p, row_words[:, None], key_words[None, :], drop_below)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(stage))
    pairs = _pack(p, v_s.dtype)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, o_layout))[:, None]
    return acc, pairs, row_max, row_sum


@gluon.jit
def _step_fixed(
    stages, q, k_s, v_s, words_s, barriers, state, zero, pivot, scale_log2, cap_scale, row_words, drop_below,
    WHO: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    CONSUMERS: gl.constexpr, PINGPONG: gl.constexpr, s_layout: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """`_step` of a full tile where the pivot is FIXED."""
    k_full, v_full, free = barriers
    acc, pairs, row_sum, row_top = state
    stage, phase, before, phase_before = stages
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        _wait_turn(WHO)
    scores = _start_scores(q, k_s, stage, zero, BLOCK_K, BLOCK_D)
    mbarrier.wait(v_full.index(before), phase_before)
    acc = _start_out(pairs, v_s, before, acc, BLOCK_K, BLOCK_DV, o_layout)
    if PINGPONG:
        _give_turn((WHO + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(1, deps=[scores])
    if cap_scale is not None:
        scores = _cap(scores, cap_scale)
    p = gl.exp2(scores * scale_log2 - pivot[:, None])
    row_sum += _add_columns(p)
    if words_s is not None:
        key_words = words_s.index(stage).load(gl.SliceLayout(0, s_layout))
        p = _drop(p, row_words[:, None], key_words[None, :], drop_below)
    row_top = gl.maximum(row_top, gl.convert_layout(_top_columns(p), row_top.type.layout))
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index(stage))
    return acc, _pack(p, v_s.dtype), row_sum, row_top


@gluon.jit
def _count_work(schedule, n_work):
    """How many pieces of work this program has."""
    if schedule is None:
        count = (n_work - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)
    else:
        count = gl.load(schedule + gl.program_id(0))
    return count


@gluon.jit
def _take_work(schedule, turn):
    """The piece of work that this program takes at its `turn`."""
    if schedule is None:
        work = turn * gl.num_programs(0) + gl.program_id(0)
    else:
        work = gl.load(schedule + (turn + 1) * gl.num_programs(0) + gl.program_id(0))
    return work


@gluon.jit
def _find_work(work, n_blocks, n_heads, heads_per_kv, heads_together):
    """`(batch, head, kv_head, block)` of a piece of work: `heads_together` heads at a time, so that their keys stay in
    L2, and their blocks from the last one, which is the longest when causal."""
    batch = work // (n_blocks * n_heads)
    place = work - batch * (n_blocks * n_heads)
    group = place // (n_blocks * heads_together)
    place -= group * (n_blocks * heads_together)
    in_group = gl.minimum(heads_together, n_heads - group * heads_together)
    turn = place // in_group
    head = group * heads_together + place - turn * in_group
    return batch, head, head // heads_per_kv, n_blocks - 1 - turn


@gluon.jit
def _write(
    acc, row_max, row_sum, rounding, out, lse, out_before, sinks, keep_scale, head, first_row, end_row, stride_os,
    ROWS: gl.constexpr, BLOCK_DV: gl.constexpr, DV: gl.constexpr, o_layout: gl.constexpr,
):  # fmt: skip
    """Normalise, with the sink as one more key, of value 0, where there are sinks; and merge with what the visits
    before this one left, if any. See merge.py. `rounding` is that of the largest weights, where the pivot is FIXED."""
    rescale = 1.0
    if sinks is not None:
        sink = gl.load(sinks + head) * LOG2E
        largest = gl.maximum(row_max, sink)
        pivot = gl.where(largest == NEG_INF, 0.0, largest)
        rescale = gl.exp2(row_max - pivot)
        row_sum = row_sum * rescale + gl.exp2(sink - pivot)
        row_max = largest
    seen_any = row_sum > 0
    row_sum = gl.where(seen_any, row_sum, 1.0)
    total = gl.where(seen_any, row_max + gl.log2(row_sum), NEG_INF)
    if rounding is not None:
        row_sum += rounding * rescale
    norm = rescale / row_sum
    if keep_scale is not None:
        norm *= keep_scale
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
    in_rows = rows < end_row
    layout: gl.constexpr = _layout_of_rows(BLOCK_DV, out.dtype.element_ty)
    rows_out = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_DV, layout=gl.SliceLayout(0, layout))
    places = rows_out.to(gl.int64)[:, None] * stride_os + cols[None, :]
    inside = (rows_out < end_row)[:, None] & (cols < DV)[None, :]
    if out_before is not None:
        lse_before = gl.load(lse + rows, mask=in_rows, other=NEG_INF) * LOG2E
        largest = gl.maximum(lse_before, total)
        pivot = gl.where(largest == NEG_INF, 0.0, largest)
        weight_before = gl.exp2(lse_before - pivot)
        weight = gl.exp2(total - pivot)
        sum_of_weights = weight_before + weight
        total = pivot + gl.log2(sum_of_weights)
        share = 1.0 / gl.where(sum_of_weights > 0, sum_of_weights, 1.0)
        norm = norm * weight * share
        running = gl.load(out_before + places, mask=inside, other=0.0)
        share_before = gl.convert_layout(weight_before * share, gl.SliceLayout(1, layout))
        result = gl.convert_layout(acc * norm[:, None], layout) + running * share_before[:, None]
        result = result.to(out.dtype.element_ty)
    else:
        result = gl.convert_layout((acc * norm[:, None]).to(out.dtype.element_ty), layout)
    gl.store(out + places, result, mask=inside)
    gl.store(lse + rows, total * LN2, mask=in_rows)


# Roles -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _attend_block(
    WHO: gl.constexpr, stage, phase, q_phase, buffers, barriers, tiles,
    out, lse, out_before, seen, sinks, head, first_row, end_row, n_q, n_k, stride_os, scale_log2, cap_scale,
    words, head_words, drop_below, keep_scale, online, writes,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, IN_PLACE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, PINGPONG: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """ROWS queries against the block's tiles, at least one. Returns the stage and phase that come next, and whether
    sums may have overflowed: then, and where it is not to, it `writes` nothing. `online`: the softmax in all tiles,
    also where the pivot is FIXED, and what comes out is written."""
    q_s, k_s, v_s, words_s, _ = buffers
    q_full, q_empty, k_full, v_full, free, _ = barriers
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, s_layout))
    if seen is None:
        seen_first = gl.full([ROWS], 0, gl.int32, gl.SliceLayout(1, s_layout))
        seen_count = seen_first + n_k
    else:
        seen_first = gl.load(seen + rows, mask=rows < n_q, other=0)
        seen_count = gl.load(seen + n_q + rows, mask=rows < n_q, other=0) - seen_first
    row_words = rows
    if words is not None:
        row_words = gl.load(words + rows, mask=rows < n_q, other=0) * gl.load(head_words)
    first, full_first, full_stop, stop = tiles
    n_tiles = stop - first
    n_masked = n_tiles - (full_stop - full_first)

    # The last tiles come first, of which consumers of a block's first rows see nothing. What they skip they wait for
    # all the same: a wait for the next use of a stage would take the one before for it.
    skipped = 0
    if seen is not None and not PINGPONG:
        seen_stop = gl.max(seen_first + seen_count, 0)
        seen_stop = gl.minimum((seen_stop + BLOCK_K - 1) // BLOCK_K, stop)
        skipped = stop - gl.maximum(seen_stop, gl.maximum(full_stop, first + 1))
    for _ in range(skipped):
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(free.index(stage))
        stage, phase = _next_stage(stage, phase, STAGES)

    # the first tile that is not skipped: scores and softmax alone
    q = q_s.index(WHO).reshape([ROWS, BLOCK_D])
    mbarrier.wait(q_full.index(WHO), q_phase)
    if Q_IN_REGISTERS:
        q = q.load(gl.DotOperandLayout(0, s_layout, 2))
        fence_async_shared()
        mbarrier.arrive(q_empty.index(WHO))
    zero = gl.zeros([ROWS, BLOCK_K], gl.float32, s_layout)
    mbarrier.wait(k_full.index(stage), phase)
    if PINGPONG:
        _wait_turn(WHO)
    scores = _start_scores(q, k_s, stage, zero, BLOCK_K, BLOCK_D)
    if PINGPONG:
        _give_turn((WHO + 1) % CONSUMERS)
    scores = warpgroup_mma_wait(0, deps=[scores])
    if words is None:
        mbarrier.arrive(free.index(stage))
    if cap_scale is not None:
        scores = _cap(scores, cap_scale)
    scores = _mask(scores, _tile_at(skipped, tiles), seen_first, seen_count, NEG_INF, BLOCK_K, s_layout)
    row_max = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(1, s_layout))
    p, rescale, row_max = _softmax(scores, row_max, scale_log2)
    row_sum = _add_columns(p)
    if words is not None:
        key_words = words_s.index(stage).load(gl.SliceLayout(0, s_layout))
        p = _drop(p, row_words[:, None], key_words[None, :], drop_below)
        mbarrier.arrive(free.index(stage))
    pairs = _pack(p, v_s.dtype)
    acc = gl.zeros([ROWS, BLOCK_DV], gl.float32, o_layout)

    stages = _advance((stage, phase, stage, phase), STAGES)
    n_online = n_tiles
    if FIXED:
        n_online = gl.where(online, n_tiles, gl.minimum(n_masked + 1, n_tiles))
    state = (acc, pairs, row_max, row_sum)
    for i in range(skipped + 1, n_online):
        state = _step(
            i, n_masked, stages, tiles, q, k_s, v_s, words_s, (k_full, v_full, free),
            state, zero, seen_first, seen_count, scale_log2, cap_scale, row_words, drop_below,
            WHO, BLOCK_K, BLOCK_D, BLOCK_DV, CONSUMERS, PINGPONG, s_layout, o_layout,
        )  # fmt: skip
        stages = _advance(stages, STAGES)
    acc, pairs, row_max, row_sum = state
    row_top = None
    if FIXED:
        one = gl.full(row_sum.shape, 1.0, gl.float32, row_sum.type.layout)  # the pivot's own weight
        state = (acc, pairs, row_sum, one.to(gl.int32, bitcast=True))
        for _ in range(n_online, n_tiles):
            state = _step_fixed(
                stages, q, k_s, v_s, words_s, (k_full, v_full, free), state, zero,
                row_max, scale_log2, cap_scale, row_words, drop_below,
                WHO, BLOCK_K, BLOCK_D, BLOCK_DV, CONSUMERS, PINGPONG, s_layout, o_layout,
            )  # fmt: skip
            stages = _advance(stages, STAGES)
        acc, pairs, row_sum, row_top = state
    stage, phase, before, phase_before = stages
    if not Q_IN_REGISTERS:
        mbarrier.arrive(q_empty.index(WHO))
    mbarrier.wait(v_full.index(before), phase_before)
    acc = _start_out(pairs, v_s, before, acc, BLOCK_K, BLOCK_DV, o_layout)
    acc = warpgroup_mma_wait(0, deps=[acc])

    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, o_layout))
    row_max = gl.convert_layout(row_max, gl.SliceLayout(1, o_layout))
    failed = 0
    rounding = None
    if FIXED:
        top = row_top.to(gl.float32, bitcast=True)
        rounding = gl.sum(top.to(v_s.dtype).to(gl.float32) - top, 1)
        rounding = gl.convert_layout(rounding, gl.SliceLayout(1, o_layout))
        rows = first_row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, o_layout))
        failed = gl.max(gl.where((row_sum <= LARGEST_SUM) | (rows >= end_row), 0, 1), 0)
        writes = writes & (online | (failed == 0))
    if writes:
        _write(
            acc, row_max, row_sum, rounding, out, lse, out_before, sinks, keep_scale, head, first_row, end_row,
            stride_os, ROWS, BLOCK_DV, DV, o_layout,
        )  # fmt: skip
    return stage, phase, failed


@gluon.jit
def _agree(
    failed, group, failed_s, agreed, WHO: gl.constexpr, CONSUMERS: gl.constexpr, WARPS: gl.constexpr
):  # fmt: skip
    """Which pieces of the group failed for any consumer, a bit each. The producer (WHO is None) takes part, so that
    nobody is two groups ahead: a group's words are in one of two places."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    first = group % 2 * CONSUMERS
    if WHO is not None:
        failed_s.index(first + WHO).store(gl.full([1], failed, gl.int32, layout))
    mbarrier.arrive(agreed.index(0))
    mbarrier.wait(agreed.index(0), group % 2)
    for who in gl.static_range(CONSUMERS):
        failed |= gl.max(failed_s.index(first + who).load(layout), 0)
    return failed


@gluon.jit
def _consumer(
    WHO: gl.constexpr, buffers, barriers, given,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, IN_PLACE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, PINGPONG: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its share of the queries of every piece of work."""
    (
        out, lse, out_before, blocks, seen, sinks, schedule, words, head_words, stride_ob, stride_os, stride_oh, n_q,
        n_k, n_blocks, n_heads, n_work, heads_per_kv, heads_together, scale_log2, cap_scale, drop_below, keep_scale,
    ) = given  # fmt: skip
    if PINGPONG:
        if WHO == CONSUMERS - 1:
            _give_turn(0)
    stage = 0
    phase = 0
    q_phase = 0
    count = _count_work(schedule, n_work)
    for group in range((count + GROUP - 1) // GROUP):
        failed = 0
        todo = -1
        for again in range(2 if FIXED else 1):
            if FIXED:
                if again > 0:
                    todo = _agree(failed, group, buffers[4], barriers[5], WHO, CONSUMERS, 4)
            for turn in range(group * GROUP, gl.minimum(count, group * GROUP + GROUP)):
                work = _take_work(schedule, turn)
                batch, head, kv_head, block = _find_work(work, n_blocks, n_heads, heads_per_kv, heads_together)
                low, high, tiles, nothing = _load_block(blocks, block, BLOCK_K)
                bit = 1 << turn % GROUP
                if ((todo & bit) != 0) & (not IN_PLACE or not nothing):  # else it would merge the identity
                    word_of_head = head_words
                    if head_words is not None:
                        word_of_head += batch * n_heads + head
                    of_head = batch.to(gl.int64) * stride_ob + head.to(gl.int64) * stride_oh
                    before_of_head = out_before
                    if out_before is not None:
                        before_of_head += of_head
                    stage, phase, has_failed = _attend_block(
                        WHO, stage, phase, q_phase, buffers, barriers, tiles,
                        out + of_head, lse + (batch.to(gl.int64) * n_heads + head) * n_q, before_of_head,
                        seen, sinks, head, low + WHO * ROWS, high, n_q, n_k, stride_os, scale_log2, cap_scale,
                        words, word_of_head, drop_below, keep_scale, again > 0, (again == 0) | ((failed & bit) != 0),
                        ROWS, BLOCK_K, BLOCK_D, BLOCK_DV, DV, STAGES, CONSUMERS, IN_PLACE,
                        Q_IN_REGISTERS, PINGPONG, FIXED,
                    )  # fmt: skip
                    failed |= bit * has_failed
                    q_phase ^= 1


@gluon.jit
def _load_keys(batch, row, kv_head, k_desc, k_s, k_full, stage, words, words_s, n_q, n_k, BLOCK_K: gl.constexpr):
    """A tile of keys, and where weights are dropped its words."""
    if words is not None:
        rows = row + gl.arange(0, BLOCK_K, layout=gl.BlockedLayout([1], [32], [1], [0]))
        copy_async(words_s.index(stage), words + n_q + rows, mask=rows < n_k)
        async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
    mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
    tma_load(k_desc, [batch, row, kv_head, 0], k_full.index(stage), k_s.index(stage))


@gluon.jit
def _producer(
    buffers, barriers, descriptors, given,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, IN_PLACE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, PINGPONG: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """One warp: loads the queries of every piece of work, and tile after tile of its keys and values, as room falls
    free: K one tile ahead of V."""
    q_s, k_s, v_s, words_s, failed_s = buffers
    q_full, q_empty, k_full, v_full, free, agreed = barriers
    q_desc, k_desc, v_desc = descriptors
    (
        _, _, _, blocks, _, _, schedule, words, _, _, _, _, n_q, n_k,
        n_blocks, n_heads, n_work, heads_per_kv, heads_together, _, _, _, _,
    ) = given  # fmt: skip
    stage = 0
    phase = 0
    q_phase = 0
    count = _count_work(schedule, n_work)
    for group in range((count + GROUP - 1) // GROUP):
        todo = -1
        for again in range(2 if FIXED else 1):
            if FIXED:
                if again > 0:
                    todo = _agree(0, group, failed_s, agreed, None, CONSUMERS, 1)
            for turn in range(group * GROUP, gl.minimum(count, group * GROUP + GROUP)):
                work = _take_work(schedule, turn)
                batch, head, kv_head, block = _find_work(work, n_blocks, n_heads, heads_per_kv, heads_together)
                low, high, tiles, nothing = _load_block(blocks, block, BLOCK_K)
                bit = 1 << turn % GROUP
                if ((todo & bit) != 0) & (not IN_PLACE or not nothing):  # else it would merge the identity
                    first, full_first, full_stop, stop = tiles
                    n_tiles = stop - first
                    for who in gl.static_range(CONSUMERS):
                        mbarrier.wait(q_empty.index(who), q_phase ^ 1)
                        mbarrier.expect(q_full.index(who), q_desc.block_type.nbytes)
                        tma_load(q_desc, [batch, low + who * ROWS, head, 0], q_full.index(who), q_s.index(who))
                    row = _tile_at(0, tiles) * BLOCK_K
                    mbarrier.wait(free.index(stage), phase ^ 1)
                    _load_keys(batch, row, kv_head, k_desc, k_s, k_full, stage, words, words_s, n_q, n_k, BLOCK_K)
                    for i in range(n_tiles):
                        next_stage, next_phase = _next_stage(stage, phase, STAGES)
                        next_row = _tile_at(i + 1, tiles) * BLOCK_K
                        mbarrier.wait(free.index(next_stage), next_phase ^ 1)
                        if i + 1 < n_tiles:
                            _load_keys(
                                batch, next_row, kv_head, k_desc, k_s, k_full, next_stage, words, words_s, n_q, n_k,
                                BLOCK_K,
                            )  # fmt: skip
                        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
                        tma_load(v_desc, [batch, row, kv_head, 0], v_full.index(stage), v_s.index(stage))
                        stage = next_stage
                        phase = next_phase
                        row = next_row
                    q_phase ^= 1


# Kernel ------------------------------------------------------------------------------------------------------------


@gluon.jit(
    do_not_specialize=["n_q", "n_k", "n_blocks", "n_heads", "n_work", "heads_per_kv", "heads_together", "drop_below"],
    do_not_specialize_on_alignment=["lse", "head_words", "sinks"],  # of a few of very many batches; part of a tensor
)
def forward_kernel(
    q_desc, k_desc, v_desc, out, lse, out_before, blocks, seen, sinks, schedule, words, head_words,
    stride_ob, stride_os, stride_oh, n_q, n_k, n_blocks, n_heads, n_work, heads_per_kv, heads_together, scale_log2,
    cap_scale, drop_below, keep_scale,
    ROWS: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, DV: gl.constexpr,
    STAGES: gl.constexpr, CONSUMERS: gl.constexpr, IN_PLACE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr, PINGPONG: gl.constexpr, FIXED: gl.constexpr,
):  # fmt: skip
    """Blocks of queries of one head each against the keys they see: every `num_programs`-th, or as a schedule says."""
    q_s = gl.allocate_shared_memory(q_desc.dtype, [CONSUMERS, 1, ROWS, 1, BLOCK_D], q_desc.layout)
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    if words is None:
        words_s: gl.constexpr = None
    else:
        words_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for who in gl.static_range(CONSUMERS):
        mbarrier.init(q_full.index(who), count=1)
        mbarrier.init(q_empty.index(who), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1 if words is None else 33)  # TMA, and a warp's lanes that copy words
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=CONSUMERS)
    if FIXED:
        failed_s = gl.allocate_shared_memory(gl.int32, [2 * CONSUMERS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        agreed = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(agreed.index(0), count=CONSUMERS + 1)
    else:
        failed_s: gl.constexpr = None
        agreed: gl.constexpr = None

    buffers = (q_s, k_s, v_s, words_s, failed_s)
    barriers = (q_full, q_empty, k_full, v_full, free, agreed)
    given = (
        out, lse, out_before, blocks, seen, sinks, schedule, words, head_words, stride_ob, stride_os, stride_oh, n_q,
        n_k, n_blocks, n_heads, n_work, heads_per_kv, heads_together, scale_log2, cap_scale, drop_below, keep_scale,
    )  # fmt: skip
    descriptors = (q_desc, k_desc, v_desc)
    # consumers 0 and 1, or 0 to 2: of the list, which jitted code can't add to, all or all but the first
    gl.warp_specialize(
        [
            (_consumer, (
                CONSUMERS - 3, buffers, barriers, given,
                ROWS, BLOCK_K, BLOCK_D, BLOCK_DV, DV, STAGES, CONSUMERS, IN_PLACE,
                Q_IN_REGISTERS, PINGPONG, FIXED,
            )),
            (_consumer, (
                CONSUMERS - 2, buffers, barriers, given,
                ROWS, BLOCK_K, BLOCK_D, BLOCK_DV, DV, STAGES, CONSUMERS, IN_PLACE,
                Q_IN_REGISTERS, PINGPONG, FIXED,
            )),
            (_consumer, (
                CONSUMERS - 1, buffers, barriers, given,
                ROWS, BLOCK_K, BLOCK_D, BLOCK_DV, DV, STAGES, CONSUMERS, IN_PLACE,
                Q_IN_REGISTERS, PINGPONG, FIXED,
            )),
            (_producer, (
                buffers, barriers, descriptors, given,
                ROWS, BLOCK_K, BLOCK_D, BLOCK_DV, DV, STAGES, CONSUMERS, IN_PLACE,
                Q_IN_REGISTERS, PINGPONG, FIXED,
            )),
        ][3 - CONSUMERS :],
        [4, 1] if CONSUMERS == 2 else [4, 4, 1],
        [240, 24] if CONSUMERS == 2 else [160, 160, 32],
    )  # fmt: skip
