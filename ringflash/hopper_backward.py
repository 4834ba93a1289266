# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# (jitted code is Gluon's language, not Python's types)
"""The backward pass on Hopper GPUs (sm_90) up to head dim 128, in Gluon. docs/hopper_kernel.md draws who waits for
what.

A program owns BLOCK_K keys of one key/value head: two consumers, warpgroups of half of them each, and a producer, one
warp that loads. It meets every tile of queries that sees its keys, over all query heads that these serve, and sums dK
and dV in registers. `hopper_kernel.backward` launches it, between what that file says of `-lse / scale`, `-delta` and
dQ (Notes [Rows of a whole tile] and [dQ in register order]).

Legend: scores lie transposed, keys by queries. Products are written with their shapes: Q, K rows of a tile, D and DV
head dims. `lse` and `delta` are those rows, fp32, negated as above. Names that end in `_s` lie in shared memory:

    k_s, v_s (1, BLOCK_K, BLOCK_D or BLOCK_DV)          kv_full     once a program
    q_s (STAGES, BLOCK_Q, BLOCK_D)                      q_full      one barrier a stage
    lse_s, seen_s, words_s (STAGES, BLOCK_Q), head_s    q_full
    dout_s (STAGES, BLOCK_Q, BLOCK_DV), delta_s         dout_full   one a stage
                                                        free        one a stage, of all of these
    ds_s (STAGES + 1, BLOCK_K, BLOCK_Q)                 ds_full     where dQ is made, one a slot, of both halves

with axes of length 1 for batch and head, as descriptors have them. `stage` and `slot` are where a tile lies, `phase`
which of its uses a barrier counts, 0 or 1. `tile` counts the tiles of a head, `place` those of all heads, batch after
batch. `home` counts the rows of D that dK has, up to the first of this batch and head. `tiles` are those that see the
keys, `(first, full_first, full_stop, stop, start)`: all but those in `[full_first, full_stop)` need the mask; the one
at `start` is met first. Tables are as in hopper_forward.py, `blocks` of keys.

Softcap and dropout are there where `cap` and `words` are. Under a cap scores start at 0, and `-lse` comes, in base 2,
after it. Of dropped weights the sign says so, from P's rounding to that of dS. `1 / (1 - dropout_p)` is in `delta` and
in what sums are multiplied by at the end, not in weights.
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
from .hopper_forward import _cap, _layout_of_rows, _load_block, _next_stage

LOG2E = gl.constexpr(math.log2(math.e))
NUMBERS = ["n_q", "n_k", "n_blocks", "n_tiles_q", "kv_heads", "kv_together", "heads_per_kv", "first_head", "heads"]
NUMBERS += ["drop_below"]
STAGGER = gl.constexpr(5)  # tiles between the first ones of neighbouring blocks: `_start_at`
STAGGERED = gl.constexpr(512)  # of at most so many tiles
NOWHERE = gl.constexpr(2**31 - 1)  # past the end of all keys
HIDDEN = gl.constexpr(-1e18)  # a capped score of what is not seen: its weight is 0, its derivative is not infinite


# Verbs --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _quads(x, ROWS: gl.constexpr, COLS: gl.constexpr):
    """A product's tile as four tensors `[ROWS / 16, 8, COLS / 8, 4]`: what a thread holds of each 16 x 8 piece."""
    x = gl.permute(gl.reshape(x, [ROWS // 16, 2, 8, COLS // 8, 4, 2]), (0, 2, 3, 4, 1, 5))
    even, odd = gl.split(x)
    upper_even, lower_even = gl.split(even)
    upper_odd, lower_odd = gl.split(odd)
    return upper_even, upper_odd, lower_even, lower_odd


@gluon.jit
def _add_tile(base, x, ROWS: gl.constexpr, COLS: gl.constexpr, layout: gl.constexpr):
    """Add a tile to global memory in register order: 16 consecutive bytes a thread, 512 a warp, no shared memory."""
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    col = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    place = (row // 16 * 128 + row % 8 * 16)[:, None] + (col // 8 * (ROWS * 8) + col % 8 // 2 * 4)[None, :]
    place, _, _, _ = _quads(place, ROWS, COLS)
    a, b, c, d = _quads(x, ROWS, COLS)
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,l,f,f,f,f",
        [(base + place).to(gl.int64), a, b, c, d], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _find_block(order, n_blocks, kv_heads, kv_together):
    """`(block, kv_head, batch)` of this program: as the order says, which counts blocks head by head, or without one
    `kv_together` heads at a time, so that their queries stay in L2, and their blocks from the first one, which the most
    queries see when causal: programs that start last are short."""
    place = gl.program_id(0)
    if order is None:
        n_heads = gl.num_programs(0) // n_blocks  # of all batches
        group = place // (n_blocks * kv_together)
        place -= group * (n_blocks * kv_together)
        in_group = gl.minimum(kv_together, n_heads - group * kv_together)
        block = place // in_group
        head = group * kv_together + place - block * in_group
    else:
        place = gl.load(order + place)
        head = place // n_blocks
        block = place - head * n_blocks
    return block, head % kv_heads, head // kv_heads


@gluon.jit
def _rows_of_block(low, high, ROWS: gl.constexpr, layout: gl.constexpr):
    """ROWS rows from `low` on; those past the end of the block, `high`, are NOWHERE, so no query sees them."""
    rows = low + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    return gl.where(rows < high, rows, NOWHERE)


@gluon.jit
def _start_at(block, first, stop, HAS_TABLE: gl.constexpr):
    """The tile that a block meets first. Under the full mask all blocks would add to dQ of the same tile at once. Where
    tiles are many, they do: those that blocks have to do with at one time would be more than L2 holds."""
    tiles = stop - first
    start = first
    if not HAS_TABLE:
        start += gl.where(tiles > STAGGERED, 0, block * STAGGER % tiles)
    return start


@gluon.jit
def _next_tile(tile, place, first, stop, start, n_tiles_q):
    """The tile after this one, by turns from `start` on, in the next head where they are through; `place` counts over
    all heads."""
    after = gl.where(tile == stop - 1, first, tile + 1)
    place += after - tile
    return after, gl.where(after == start, place + n_tiles_q, place)


@gluon.jit
def _stage_after(stage, phase, is_last, STAGES: gl.constexpr):
    """The next stage, and which use of it; behind the last step the same, which is there: nobody needs its scores."""
    after, phase_after = _next_stage(stage, phase, STAGES)
    return gl.where(is_last, stage, after), gl.where(is_last, phase, phase_after)


@gluon.jit
def _mask(scores, key, seen_s, stage, n_k, HAS_TABLE: gl.constexpr, UNSEEN: gl.constexpr, layout: gl.constexpr):
    """UNSEEN where a query does not see a key: outside its range of key rows, or past the end where all are seen."""
    if HAS_TABLE:
        first = seen_s.index(2 * stage).load(gl.SliceLayout(0, layout))
        count = seen_s.index(2 * stage + 1).load(gl.SliceLayout(0, layout)) - first
        since_first = (key[:, None] - first[None, :]).to(gl.uint32, bitcast=True)
        scores = gl.where(since_first < count[None, :].to(gl.uint32, bitcast=True), scores, UNSEEN)
    else:
        scores = gl.where((key < n_k)[:, None], scores, UNSEEN)
    return scores


@gluon.jit
def _zero(stage):
    """0, as the compiler cannot see: what depends on it is computed in each step and keeps no registers between steps.

    (K's addresses for dQ kept 14 in one of the warpgroups, for which others were spilled; under a cap so do those of K
    and V for the scores and dP.)"""
    return stage >> 8


@gluon.jit
def _weigh(
    scores, unit, minus_lse, row_words, key_words, drop_below,
    dtype: gl.constexpr, CAP: gl.constexpr, DROP: gl.constexpr,
):  # fmt: skip
    """`(weights, p)`: weights as dV takes them, rounded, 0 where they are dropped; and what dP is to be multiplied by,
    negative where they are. The arguments broadcast. Under a cap `scores` are those of `_cap`, and their derivative is
    in `p`. The head's word is in those of keys: score.py, Note [Which weights are dropped].

    Pair by pair: step by step, as LLVM has it, more is under way at once than registers hold."""
    PAIR: gl.constexpr = (
        "{.reg .f32 a, b, c, d; .reg .b32 hash; .reg .pred dropped;"
        " fma.rn.f32 a, $3, $5, $7; fma.rn.f32 b, $4, $6, $8; ex2.approx.ftz.f32 a, a; ex2.approx.ftz.f32 b, b; "
    )
    if DROP:
        SIGNS: gl.constexpr = (
            "mul.lo.s32 hash, $9, $11; setp.lt.s32 dropped, hash, $13; @dropped mul.f32 a, a, 0fBF800000;"
            " mul.lo.s32 hash, $10, $12; setp.lt.s32 dropped, hash, $14; @dropped mul.f32 b, b, 0fBF800000; "
        )
    else:
        SIGNS: gl.constexpr = ""
    if CAP:
        SLOPES: gl.constexpr = (
            "neg.f32 c, $3; neg.f32 d, $4; fma.rn.f32 c, c, $3, 0f3F800000; fma.rn.f32 d, d, $4, 0f3F800000;"
            " mul.f32 $1, a, c; mul.f32 $2, b, d; "
        )
    else:
        SLOPES: gl.constexpr = "mov.f32 $1, a; mov.f32 $2, b; "
    PLACES: gl.constexpr = "=&r,=&r,=&r" + ",r" * 12
    values = [scores, unit, minus_lse, row_words, key_words, drop_below]
    if dtype == gl.bfloat16:
        weights, p = gl.inline_asm_elementwise(
            PAIR + SIGNS + SLOPES + "cvt.rn.relu.bf16x2.f32 $0, b, a;}", PLACES, values,
            dtype=(gl.bfloat16, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        weights, p = gl.inline_asm_elementwise(
            PAIR + SIGNS + SLOPES + "cvt.rn.relu.f16x2.f32 $0, b, a;}", PLACES, values,
            dtype=(gl.float16, gl.float32), is_pure=True, pack=2,
        )  # fmt: skip
    return weights, p


@gluon.jit
def _start_dq(ds, k_s, zero_dq, WHO: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr):
    """A warpgroup's half of dQ over all keys: half of the queries where there are 128, else half of the head dim."""
    if BLOCK_Q == 128:
        tile = warpgroup_mma(ds.slice(WHO * 64, 64, 1).permute((1, 0)), k_s, zero_dq, use_acc=False, is_async=True)
    else:
        HALF: gl.constexpr = BLOCK_D // 2
        tile = warpgroup_mma(ds.permute((1, 0)), k_s.slice(WHO * HALF, HALF, 1), zero_dq, use_acc=False, is_async=True)
    return tile


@gluon.jit
def _start_scores(
    stage, phase, buffers, barriers, cap_scale, zero_scores,
    WHO: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, s_layout: gl.constexpr,
):  # fmt: skip
    """A warpgroup's half of a tile's scores, as soon as its queries are there: [K, D] @ [D, Q] -> [K, Q]."""
    k_s, _, q_s, _, _, lse_s, _, _, _, _ = buffers
    _, q_full, _, _, _ = barriers
    KEYS: gl.constexpr = BLOCK_K // 2
    at = 0 if cap_scale is None else _zero(stage)
    k_mine = k_s.index(at).reshape([BLOCK_K, BLOCK_D]).slice(WHO * KEYS, KEYS, 0)
    q_tile = q_s.index(stage).reshape([BLOCK_Q, BLOCK_D])
    mbarrier.wait(q_full.index(stage), phase)
    if cap_scale is None:
        minus_lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
        scores = minus_lse[None, :].broadcast_to([KEYS, BLOCK_Q])
        scores = warpgroup_mma(k_mine, q_tile.permute((1, 0)), scores, is_async=True)
    else:
        scores = warpgroup_mma(k_mine, q_tile.permute((1, 0)), zero_scores, use_acc=False, is_async=True)
    return scores


@gluon.jit
def _step(
    stages, masked, place_before, buffers, barriers, dk, dv, dq, scores, key, n_k, scale_log2, cap_scale, key_words,
    drop_below, zero_dq, zero_scores,
    WHO: gl.constexpr, FIRST: gl.constexpr, AHEAD: gl.constexpr, WITH_DQ: gl.constexpr, HAS_TABLE: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    s_layout: gl.constexpr, dk_layout: gl.constexpr, dv_layout: gl.constexpr, dq_layout: gl.constexpr,
):  # fmt: skip
    """One tile of queries: adds to dK and dV, leaves its dS, and adds dQ of the tile before it, unless it is FIRST.
    AHEAD, `scores` are there, and those of the tile after it are returned."""
    k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, words_s, head_s = buffers
    _, _, dout_full, ds_full, free = barriers
    stage, phase, stage_after, phase_after, slot, slot_phase, slot_before, slot_phase_before = stages
    KEYS: gl.constexpr = BLOCK_K // 2
    DQ_ROWS: gl.constexpr = 64
    DQ_COLS: gl.constexpr = BLOCK_D * BLOCK_Q // 128
    UNSEEN: gl.constexpr = float("-inf") if cap_scale is None else HIDDEN
    at = 0 if cap_scale is None else _zero(stage)
    v_mine = v_s.index(at).reshape([BLOCK_K, BLOCK_DV]).slice(WHO * KEYS, KEYS, 0)
    q_tile = q_s.index(stage).reshape([BLOCK_Q, BLOCK_D])
    dout_tile = dout_s.index(stage).reshape([BLOCK_Q, BLOCK_DV])
    if not AHEAD:
        scores = _start_scores(
            stage, phase, buffers, barriers, cap_scale, zero_scores, WHO, BLOCK_Q, BLOCK_K, BLOCK_D, s_layout
        )
    mbarrier.wait(dout_full.index(stage), phase)
    minus_delta = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
    dp = minus_delta[None, :].broadcast_to([KEYS, BLOCK_Q])
    dp = warpgroup_mma(v_mine, dout_tile.permute((1, 0)), dp, is_async=True)  # [K, DV] @ [DV, Q] -> [K, Q]
    if not AHEAD:
        scores = warpgroup_mma_wait(1, deps=[scores])
    if cap_scale is not None:
        scores = _cap(scores, cap_scale)
    if masked:
        scores = _mask(scores, key, seen_s, stage, n_k, HAS_TABLE, UNSEEN, s_layout)
    if cap_scale is None and words_s is None:
        p = gl.exp2(scores * scale_log2)
        p_narrow = p.to(q_s.dtype)
    else:
        minus_lse = 0.0
        row_words = 0
        if cap_scale is not None:
            minus_lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))[None, :]
        if words_s is not None:
            row_words = words_s.index(stage).load(gl.SliceLayout(0, s_layout))[None, :]
            key_words *= head_s.index(stage).load(gl.SliceLayout(1, s_layout))
        p_narrow, p = _weigh(
            scores, scale_log2, minus_lse, row_words, key_words[:, None], drop_below, q_s.dtype,
            cap_scale is not None, words_s is not None,
        )  # fmt: skip
    p_narrow = gl.convert_layout(p_narrow, gl.DotOperandLayout(0, dv_layout, 2))
    dv = warpgroup_mma(p_narrow, dout_tile, dv, is_async=True)  # [K, Q] @ [Q, DV] -> [K, DV]
    dp = warpgroup_mma_wait(1, deps=[dp])
    if words_s is not None:
        minus_delta = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
        ds = gl.inline_asm_elementwise(
            "{.reg .pred dropped; .reg .f32 p; setp.lt.f32 dropped, $1, 0f00000000; abs.f32 p, $1;"
            " mul.f32 $0, p, $2; @dropped mul.f32 $0, p, $3;}",
            "=&r,r,r,r", [p, dp, minus_delta[None, :]], dtype=gl.float32, is_pure=True, pack=1,
        ).to(q_s.dtype)  # fmt: skip
    else:
        ds = (p * dp).to(q_s.dtype)
    if WITH_DQ:
        ds_s.index(slot).slice(WHO * KEYS, KEYS, 0).store(ds)
        fence_async_shared()
        mbarrier.arrive(ds_full.index(slot))
    ds_narrow = gl.convert_layout(ds, gl.DotOperandLayout(0, dk_layout, 2))
    ADDS_DQ: gl.constexpr = WITH_DQ and not FIRST
    if ADDS_DQ:
        mbarrier.wait(ds_full.index(slot_before), slot_phase_before)
        k_all = k_s.index(_zero(stage)).reshape([BLOCK_K, BLOCK_D])
        dq_tile = _start_dq(ds_s.index(slot_before), k_all, zero_dq, WHO, BLOCK_Q, BLOCK_D)
    dk = warpgroup_mma(ds_narrow, q_tile, dk, is_async=True)  # [K, Q] @ [Q, D] -> [K, D]
    if ADDS_DQ:
        dv, dq_tile = warpgroup_mma_wait(1, deps=[dv, dq_tile])
    else:
        dv = warpgroup_mma_wait(1, deps=[dv])
    if AHEAD:
        scores = _start_scores(
            stage_after, phase_after, buffers, barriers, cap_scale, zero_scores,
            WHO, BLOCK_Q, BLOCK_K, BLOCK_D, s_layout,
        )  # fmt: skip
    if ADDS_DQ:
        _add_tile(dq + place_before.to(gl.int64) * (BLOCK_Q * BLOCK_D), dq_tile, DQ_ROWS, DQ_COLS, dq_layout)
    dk = warpgroup_mma_wait(1 if AHEAD else 0, deps=[dk])
    mbarrier.arrive(free.index(stage))
    if AHEAD:  # none is under way from one step to the next: ptxas would let each product wait for the one before
        scores = warpgroup_mma_wait(0, deps=[scores])
    else:
        scores = zero_scores
    return dk, dv, scores


@gluon.jit
def _write(
    x, base, rows, n_rows, kv_heads,
    ROWS: gl.constexpr, COLS: gl.constexpr, DIM: gl.constexpr, ADD: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Write, or add to, those of the `rows` that are there of a head of `(b, n_rows, kv_heads, DIM)`, contiguous. One
    program owns each element, so it is no matter when memory adds."""
    x = gl.convert_layout(x.to(base.dtype.element_ty), layout)
    rows = gl.convert_layout(rows, gl.SliceLayout(1, layout))
    cols = gl.arange(0, COLS, layout=gl.SliceLayout(0, layout))
    pointers = base + rows.to(gl.int64)[:, None] * (kv_heads * DIM) + cols[None, :]
    inside = (rows < n_rows)[:, None] & (cols < DIM)[None, :]
    if ADD:
        gl.atomic_add(pointers, x, mask=inside, sem="relaxed")
    else:
        gl.store(pointers, x, mask=inside)


# Roles -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _consumer(
    WHO: gl.constexpr, buffers, barriers, tiles, dq, dk_out, dv_out, home, low, high, n_k, kv_heads,
    n_tiles_q, first_head, heads, scale, cap, cap_scale, words, drop_below, keep_scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr, WITH_DQ: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: half of the program's keys. Its dK and dV, and its half of each tile of dQ one step late."""
    k_s, _, _, _, ds_s, _, _, _, _, _ = buffers
    kv_full, _, _, ds_full, _ = barriers
    KEYS: gl.constexpr = BLOCK_K // 2
    DQ_ROWS: gl.constexpr = 64
    DQ_COLS: gl.constexpr = BLOCK_D * BLOCK_Q // 128
    SLOTS: gl.constexpr = STAGES + 1
    AHEAD: gl.constexpr = BLOCK_Q == 64 and cap_scale is None
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    dk_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DV, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DQ_COLS, 16])
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, dk_layout)
    dv = gl.zeros([KEYS, BLOCK_DV], gl.float32, dv_layout)
    zero_dq = gl.zeros([DQ_ROWS, DQ_COLS], gl.float32, dq_layout)
    zero_scores = gl.zeros([KEYS, BLOCK_Q], gl.float32, s_layout)
    key = _rows_of_block(low + WHO * KEYS, high, KEYS, s_layout)
    scale_log2 = (scale if cap is None else cap) * LOG2E
    key_words = key
    if words is None:
        drop_below = 0
    else:
        key_words = gl.load(words + key, mask=key < n_k, other=0)
    if WITH_DQ:
        dq += WHO * (DQ_ROWS * DQ_COLS)
    first, full_first, full_stop, stop, start = tiles
    tile = start
    place = first_head * n_tiles_q + start
    steps = heads * (stop - first)
    mbarrier.wait(kv_full.index(0), 0)
    scores = zero_scores
    if AHEAD:
        gl.static_assert(STAGES > 1, "a stage falls free when the scores of the next tile have started")
        scores = _start_scores(
            0, 0, buffers, barriers, cap_scale, zero_scores, WHO, BLOCK_Q, BLOCK_K, BLOCK_D, s_layout
        )
        scores = warpgroup_mma_wait(0, deps=[scores])
    stage_after, phase_after = _stage_after(0, 0, AHEAD and steps == 1, STAGES)
    dk, dv, scores = _step(
        (0, 0, stage_after, phase_after, 0, 0, 0, 0), (tile < full_first) | (tile >= full_stop), place,
        buffers, barriers, dk, dv, dq, scores, key, n_k, scale_log2, cap_scale, key_words,
        drop_below, zero_dq, zero_scores,
        WHO, True, AHEAD, WITH_DQ, HAS_TABLE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV,
        s_layout, dk_layout, dv_layout, dq_layout,
    )  # fmt: skip
    slot = 1
    slot_phase = 0
    slot_before = 0
    slot_phase_before = 0
    for step in range(1, steps):
        place_before = place
        tile, place = _next_tile(tile, place, first, stop, start, n_tiles_q)
        stage = stage_after
        phase = phase_after
        stage_after, phase_after = _stage_after(stage, phase, AHEAD and step == steps - 1, STAGES)
        dk, dv, scores = _step(
            (stage, phase, stage_after, phase_after, slot, slot_phase, slot_before, slot_phase_before),
            (tile < full_first) | (tile >= full_stop), place_before,
            buffers, barriers, dk, dv, dq, scores, key, n_k, scale_log2, cap_scale, key_words,
            drop_below, zero_dq, zero_scores,
            WHO, False, AHEAD, WITH_DQ, HAS_TABLE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV,
            s_layout, dk_layout, dv_layout, dq_layout,
        )  # fmt: skip
        slot_before = slot
        slot_phase_before = slot_phase
        slot, slot_phase = _next_stage(slot, slot_phase, SLOTS)
    if WITH_DQ:
        mbarrier.wait(ds_full.index(slot_before), slot_phase_before)
        k_all = k_s.index(0).reshape([BLOCK_K, BLOCK_D])
        dq_tile = _start_dq(ds_s.index(slot_before), k_all, zero_dq, WHO, BLOCK_Q, BLOCK_D)
    if keep_scale is not None:
        scale *= keep_scale
        dv *= keep_scale
    dk_rows: gl.constexpr = _layout_of_rows(BLOCK_D, dk_out.dtype.element_ty)
    dv_rows: gl.constexpr = _layout_of_rows(BLOCK_DV, dv_out.dtype.element_ty)
    _write(dk * scale, dk_out + home.to(gl.int64) * D, key, n_k, kv_heads, KEYS, BLOCK_D, D, ADD, dk_rows)
    _write(dv, dv_out + home.to(gl.int64) * DV, key, n_k, kv_heads, KEYS, BLOCK_DV, DV, ADD, dv_rows)
    if WITH_DQ:  # made while dK and dV were written
        dq_tile = warpgroup_mma_wait(0, deps=[dq_tile])
        _add_tile(dq + place.to(gl.int64) * (BLOCK_Q * BLOCK_D), dq_tile, DQ_ROWS, DQ_COLS, dq_layout)


@gluon.jit
def _producer(
    buffers, barriers, tiles, descriptors, lse, delta, seen, words, head_words, batch, kv_head, n_heads,
    n_q, n_tiles_q, first_row, first_head, heads,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """One warp: loads the keys and values, then tile after tile of queries, dO and their rows, as room falls free."""
    k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, words_s, head_s = buffers
    kv_full, q_full, dout_full, _, free = barriers
    q_desc, k_desc, v_desc, dout_desc = descriptors
    lanes = gl.arange(0, BLOCK_Q, layout=gl.BlockedLayout([1], [32], [1], [0]))
    head_lanes = gl.full([64], 0, gl.int32, gl.BlockedLayout([1], [32], [1], [0]))
    mbarrier.expect(kv_full.index(0), k_desc.block_type.nbytes + v_desc.block_type.nbytes)
    tma_load(k_desc, [batch, first_row, kv_head, 0], kv_full.index(0), k_s.index(0))
    tma_load(v_desc, [batch, first_row, kv_head, 0], kv_full.index(0), v_s.index(0))
    first, full_first, full_stop, stop, start = tiles
    tile = start
    place = first_head * n_tiles_q + start
    stage = 0
    phase = 0
    for _ in range(heads * (stop - first)):
        any_head = place // n_tiles_q  # counted over batches
        head = any_head - batch * n_heads
        rows = tile * BLOCK_Q + lanes
        numbers = place.to(gl.int64) * BLOCK_Q + lanes
        mbarrier.wait(free.index(stage), phase ^ 1)
        copy_async(lse_s.index(stage), lse + numbers)
        if HAS_TABLE:
            copy_async(seen_s.index(2 * stage), seen + rows, mask=rows < n_q)
            copy_async(seen_s.index(2 * stage + 1), seen + n_q + rows, mask=rows < n_q)
        if words is not None:
            copy_async(words_s.index(stage), words + rows, mask=rows < n_q)
            copy_async(head_s.index(stage), head_words + any_head + head_lanes)
        async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)
        mbarrier.expect(q_full.index(stage), q_desc.block_type.nbytes)
        tma_load(q_desc, [batch, tile * BLOCK_Q, head, 0], q_full.index(stage), q_s.index(stage))
        copy_async(delta_s.index(stage), delta + numbers)
        async_copy.mbarrier_arrive(dout_full.index(stage), increment_count=False)
        mbarrier.expect(dout_full.index(stage), dout_desc.block_type.nbytes)
        tma_load(dout_desc, [batch, tile * BLOCK_Q, head, 0], dout_full.index(stage), dout_s.index(stage))
        tile, place = _next_tile(tile, place, first, stop, start, n_tiles_q)
        stage, phase = _next_stage(stage, phase, STAGES)


# Kernel ------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=NUMBERS, do_not_specialize_on_alignment=["head_words"])
def backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse, delta, dq, dk, dv, blocks, order, seen, words, head_words,
    n_q, n_k, n_blocks, n_tiles_q, kv_heads, kv_together, heads_per_kv, first_head, heads, scale,
    cap, cap_scale, drop_below, keep_scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, ADD: gl.constexpr, WITH_DQ: gl.constexpr, ds_layout: gl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head against the queries that see it."""
    HAS_TABLE: gl.constexpr = seen is not None
    block, kv_head, batch = _find_block(order, n_blocks, kv_heads, kv_together)
    low, high, tiles, nothing = _load_block(blocks, block, BLOCK_Q)
    if ADD:
        if nothing:
            return
    first, full_first, full_stop, stop = tiles
    if low + BLOCK_K > high:  # keys past the end must be masked
        full_first = stop
        full_stop = stop
    head = (batch * kv_heads + kv_head) * heads_per_kv + first_head
    home = batch * n_k * kv_heads + kv_head  # below 2^31: memory holds no more rows of K, V and their gradients
    if words is None:
        key_words: gl.constexpr = None
    else:
        key_words = words + n_q

    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, BLOCK_Q, 1, BLOCK_D], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dout_desc.dtype, [STAGES, 1, BLOCK_Q, 1, BLOCK_DV], dout_desc.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    seen_s = gl.allocate_shared_memory(gl.int32, [2 * STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if words is None:
        words_s: gl.constexpr = None
        head_s: gl.constexpr = None
    else:
        words_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        head_s = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_K // 2], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=33)  # TMA, and a warp's lanes that copy lse
        mbarrier.init(dout_full.index(stage), count=33)
        mbarrier.init(free.index(stage), count=2)
    if WITH_DQ:
        ds_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES + 1, BLOCK_K, BLOCK_Q], ds_layout)
        ds_full = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
        for slot in gl.static_range(STAGES + 1):
            mbarrier.init(ds_full.index(slot), count=2)
    else:  # nor a barrier that nobody waits for: Triton would keep the warpgroups' arguments in its place
        ds_s: gl.constexpr = None
        ds_full: gl.constexpr = None
    buffers = (k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, words_s, head_s)
    barriers = (kv_full, q_full, dout_full, ds_full, free)
    tiles = (first, full_first, full_stop, stop, _start_at(block, first, stop, HAS_TABLE))
    descriptors = (q_desc, k_desc, v_desc, dout_desc)
    gl.warp_specialize(
        [
            (_consumer, (
                0, buffers, barriers, tiles, dq, dk, dv, home, low, high, n_k, kv_heads, n_tiles_q, head, heads, scale,
                cap, cap_scale, key_words, drop_below, keep_scale,
                D, DV, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, STAGES, ADD, WITH_DQ, HAS_TABLE,
            )),
            (_consumer, (
                1, buffers, barriers, tiles, dq, dk, dv, home, low, high, n_k, kv_heads, n_tiles_q, head, heads, scale,
                cap, cap_scale, key_words, drop_below, keep_scale,
                D, DV, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, STAGES, ADD, WITH_DQ, HAS_TABLE,
            )),
            (_producer, (
                buffers, barriers, tiles, descriptors, lse, delta, seen, words, head_words, batch, kv_head,
                kv_heads * heads_per_kv, n_q, n_tiles_q, low, head, heads, BLOCK_Q, STAGES, HAS_TABLE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
