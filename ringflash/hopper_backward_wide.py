# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false
# (jitted code is Gluon's language, not Python's types)
"""The backward pass on Hopper GPUs (sm_90) at head dims above 128, in Gluon. docs/hopper_kernel.md draws who waits for
what.

As hopper_backward.py, whose verbs, legend and producer these are, but a warpgroup's registers hold one sum of 64 keys
by 256 columns, not two. So a program owns 64 keys, and its two consumers share the work by what they sum: the first
makes P and sums dV, the second makes dS and sums dK. P goes from one to the other through shared memory, dS to both,
and each makes half of the columns of dQ. Beside the buffers and barriers there:

    p_s (STAGES, BLOCK_K, BLOCK_Q), fp16        p_full      one a stage
     or (1, BLOCK_K, BLOCK_Q), fp32
    ds_s (STAGES, BLOCK_K, BLOCK_Q)             ds_full     one a stage: dS is there, and P is read

Note [Slots that need no barrier to fall free]. With two stages or more, P of tile j replaces that of a tile whose
ds_full the first consumer has waited for, a step ago at the latest, and dS of tile j replaces one whose dQ the first
consumer had made before it gave P of tile j away. Where P has one slot, that consumer waits for the ds_full of the
tile before, which it needs soon after in any case, before it stores P.

Note [P from one consumer to the other]. In bf16 P travels as fp16 times 2^P_BITS: 11 bits of it down to 2^-24, where
dS keeps 8, in half of the bytes of fp32. In fp16 dS keeps 11 itself, and would be 1.4 times as wrong after a first
rounding to as many: P travels in fp32, through one slot of the same size. Its reader has it in the same registers as
its writer, so it lies there in their order: 16 bytes a thread, 512 consecutive ones a warp. `p` and dV are 2^P_BITS too
large until the end, which keeps P in fp16 normal down to 2^-24 in the product with dO as well.
"""

import math

from .gluon_compat import fence_async_shared, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from .hopper_backward import (
    NUMBERS,
    _add_tile,
    _find_block,
    _mask,
    _next_tile,
    _producer,
    _rows_of_block,
    _start_dq,
    _write,
)
from .hopper_forward import _load_block, _next_stage

LOG2E = gl.constexpr(math.log2(math.e))
P_BITS = gl.constexpr(10.0)  # p is 1 at most, give or take its rounding: 64 times as much would still be finite
P_UNIT = gl.constexpr(2.0**-10)
# Where one bit more of the place in shared memory leads, in (key, query): four floats of a thread, its warp, its other
# floats, the other warps.
REGISTER_ORDER = gl.constexpr(
    gl.SharedLinearLayout(
        [[0, 1], [8, 0], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [0, 8], [0, 16], [0, 32], [16, 0], [32, 0]]
    )
)


# Verbs --------------------------------------------------------------------------------------------------------------


@gluon.jit
def _accumulate(
    total, left, right, stage_before, phase_before, dq, k_s, ds_s, ds_full, zero_dq,
    WHO: gl.constexpr, FIRST: gl.constexpr, WITH_DQ: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_D: gl.constexpr, dq_layout: gl.constexpr,
):  # fmt: skip
    """total + left @ right; beside it half of dQ of the tile before is made and added, unless there is none."""
    if FIRST:
        total = warpgroup_mma(left, right, total, is_async=True)
    else:
        mbarrier.wait(ds_full.index(stage_before), phase_before)
        if WITH_DQ:
            dq_tile = _start_dq(ds_s.index(stage_before), k_s, zero_dq, WHO, BLOCK_Q, BLOCK_D)
            total = warpgroup_mma(left, right, total, is_async=True)
            dq_tile = warpgroup_mma_wait(1, deps=[dq_tile])
            _add_tile(dq, dq_tile, BLOCK_Q, BLOCK_D // 2, dq_layout)
        else:
            total = warpgroup_mma(left, right, total, is_async=True)
    return warpgroup_mma_wait(0, deps=[total])


@gluon.jit
def _step(
    total, stages, masked, dq, buffers, p_s, barriers, p_full, key, n_k, scale_log2, zero_dq,
    WHO: gl.constexpr, FIRST: gl.constexpr, WITH_DQ: gl.constexpr, HAS_TABLE: gl.constexpr,
    BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    s_layout: gl.constexpr, total_layout: gl.constexpr, dq_layout: gl.constexpr,
):  # fmt: skip
    """One tile of queries: adds to dV (or dK), leaves P (or dS), and adds half of dQ of the tile before it."""
    k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, _, _ = buffers
    _, q_full, dout_full, ds_full, free = barriers
    stage, phase, stage_before, phase_before = stages
    left_layout: gl.constexpr = gl.DotOperandLayout(0, total_layout, 2)
    ONE_SLOT: gl.constexpr = p_s.shape[0] == 1
    slot = 0 if ONE_SLOT else stage
    q_tile = q_s.index(stage).reshape([BLOCK_Q, BLOCK_D])
    dout_tile = dout_s.index(stage).reshape([BLOCK_Q, BLOCK_DV])
    if WHO == 0:
        mbarrier.wait(q_full.index(stage), phase)
        minus_lse = lse_s.index(stage).load(gl.SliceLayout(0, s_layout))
        scores = minus_lse[None, :].broadcast_to([BLOCK_K, BLOCK_Q])
        scores = warpgroup_mma(k_s, q_tile.permute((1, 0)), scores, is_async=True)  # [K, D] @ [D, Q] -> [K, Q]
        scores = warpgroup_mma_wait(0, deps=[scores])
        if masked:
            scores = _mask(scores, key, seen_s, stage, n_k, HAS_TABLE, float("-inf"), s_layout)
        p = gl.exp2(scores * scale_log2 + P_BITS)
        if ONE_SLOT and not FIRST:
            mbarrier.wait(ds_full.index(stage_before), phase_before)
        p_s.index(slot).store(p.to(p_s.dtype))
        mbarrier.arrive(p_full.index(stage))
        left = gl.convert_layout(p.to(q_s.dtype), left_layout)
        right = dout_tile  # [K, Q] @ [Q, DV] -> [K, DV]
        mbarrier.wait(dout_full.index(stage), phase)
    else:
        mbarrier.wait(dout_full.index(stage), phase)
        minus_delta = delta_s.index(stage).load(gl.SliceLayout(0, s_layout))
        dp = minus_delta[None, :].broadcast_to([BLOCK_K, BLOCK_Q])
        dp = warpgroup_mma(v_s, dout_tile.permute((1, 0)), dp, is_async=True)  # [K, DV] @ [DV, Q] -> [K, Q]
        mbarrier.wait(p_full.index(stage), phase)
        p = p_s.index(slot).load(s_layout)
        dp = warpgroup_mma_wait(0, deps=[dp])
        ds = (p.to(gl.float32) * P_UNIT * dp).to(q_s.dtype)
        if WITH_DQ:
            ds_s.index(stage).store(ds)
            fence_async_shared()
        mbarrier.arrive(ds_full.index(stage))
        left = gl.convert_layout(ds, left_layout)
        right = q_tile  # [K, Q] @ [Q, D] -> [K, D]
        mbarrier.wait(q_full.index(stage), phase)
    total = _accumulate(
        total, left, right, stage_before, phase_before, dq, k_s, ds_s, ds_full, zero_dq,
        WHO, FIRST, WITH_DQ, BLOCK_Q, BLOCK_D, dq_layout,
    )  # fmt: skip
    mbarrier.arrive(free.index(stage))
    return total


# Roles -------------------------------------------------------------------------------------------------------------


@gluon.jit
def _consumer(
    WHO: gl.constexpr, buffers, p_s, barriers, p_full, tiles, dq, out, low, high, n_k, kv_heads, n_tiles_q,
    first_head, heads, scale, unit,
    DIM: gl.constexpr, BLOCK_DIM: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_DV: gl.constexpr, STAGES: gl.constexpr, ADD: gl.constexpr, WITH_DQ: gl.constexpr, HAS_TABLE: gl.constexpr,
):  # fmt: skip
    """One warpgroup: the sum of dV (the first) or dK, `unit` of it, and its half of each tile of dQ one step late."""
    k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, words_s, head_s = buffers
    kv_full, _, _, ds_full, _ = barriers
    k_s = k_s.index(0).reshape([BLOCK_K, BLOCK_D])
    v_s = v_s.index(0).reshape([BLOCK_K, BLOCK_DV])
    buffers = (k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, words_s, head_s)
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    total_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_DIM, 16])
    dq_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D // 2, 16])
    TILE: gl.constexpr = BLOCK_Q * BLOCK_D
    total = gl.zeros([BLOCK_K, BLOCK_DIM], gl.float32, total_layout)
    zero_dq = gl.zeros([BLOCK_Q, BLOCK_D // 2], gl.float32, dq_layout)
    key = _rows_of_block(low, high, BLOCK_K, s_layout)
    if WITH_DQ:
        dq += WHO * (TILE // 2)
    first, full_first, full_stop, stop, _ = tiles
    tile = first
    place = first_head * n_tiles_q + first
    mbarrier.wait(kv_full.index(0), 0)
    total = _step(
        total, (0, 0, 0, 0), (tile < full_first) | (tile >= full_stop), dq,
        buffers, p_s, barriers, p_full, key, n_k, scale * LOG2E, zero_dq,
        WHO, True, WITH_DQ, HAS_TABLE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, s_layout, total_layout, dq_layout,
    )  # fmt: skip
    stage, phase = _next_stage(0, 0, STAGES)
    stage_before = 0
    phase_before = 0
    for _ in range(1, heads * (stop - first)):
        dq_before = dq
        if WITH_DQ:
            dq_before += place.to(gl.int64) * TILE
        tile, place = _next_tile(tile, place, first, stop, first, n_tiles_q)
        total = _step(
            total, (stage, phase, stage_before, phase_before), (tile < full_first) | (tile >= full_stop), dq_before,
            buffers, p_s, barriers, p_full, key, n_k, scale * LOG2E, zero_dq,
            WHO, False, WITH_DQ, HAS_TABLE, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, s_layout, total_layout, dq_layout,
        )  # fmt: skip
        stage_before = stage
        phase_before = phase
        stage, phase = _next_stage(stage, phase, STAGES)
    if WITH_DQ:
        mbarrier.wait(ds_full.index(stage_before), phase_before)
        dq_tile = _start_dq(ds_s.index(stage_before), k_s, zero_dq, WHO, BLOCK_Q, BLOCK_D)
        dq_tile = warpgroup_mma_wait(0, deps=[dq_tile])
        _add_tile(dq + place.to(gl.int64) * TILE, dq_tile, BLOCK_Q, BLOCK_D // 2, dq_layout)
    _write(total * unit, out, key, n_k, kv_heads, BLOCK_K, BLOCK_DIM, DIM, ADD, total_layout)


# Kernel ------------------------------------------------------------------------------------------------------------


@gluon.jit(do_not_specialize=NUMBERS)
def wide_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, lse, delta, dq, dk, dv, blocks, order, seen, words, head_words,
    n_q, n_k, n_blocks, n_tiles_q, kv_heads, kv_together, heads_per_kv, first_head, heads, scale,
    cap, cap_scale, drop_below, keep_scale,
    D: gl.constexpr, DV: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
    STAGES: gl.constexpr, ADD: gl.constexpr, WITH_DQ: gl.constexpr, ds_layout: gl.constexpr,
):  # fmt: skip
    """One block of keys of one key/value head against the queries that see it. It knows neither softcap nor dropout."""
    gl.static_assert(cap is None and words is None, "local_kernel.kernel_of")
    gl.static_assert(STAGES >= 2, "see Note [Slots that need no barrier to fall free]")
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
    place = batch.to(gl.int64) * n_k * kv_heads + kv_head
    dk += place * D
    dv += place * DV

    k_s = gl.allocate_shared_memory(k_desc.dtype, [1, 1, BLOCK_K, 1, BLOCK_D], k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [1, 1, BLOCK_K, 1, BLOCK_DV], v_desc.layout)
    q_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, 1, BLOCK_Q, 1, BLOCK_D], q_desc.layout)
    dout_s = gl.allocate_shared_memory(dout_desc.dtype, [STAGES, 1, BLOCK_Q, 1, BLOCK_DV], dout_desc.layout)
    ds_s = gl.allocate_shared_memory(q_desc.dtype, [STAGES, BLOCK_K, BLOCK_Q], ds_layout)
    if q_desc.dtype == gl.float16:  # Note [P from one consumer to the other]
        p_s = gl.allocate_shared_memory(gl.float32, [1, BLOCK_K, BLOCK_Q], REGISTER_ORDER)
    else:
        p_s = gl.allocate_shared_memory(gl.float16, [STAGES, BLOCK_K, BLOCK_Q], ds_layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    seen_s = gl.allocate_shared_memory(gl.int32, [2 * STAGES, BLOCK_Q], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ds_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    p_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(q_full.index(stage), count=33)  # TMA, and a warp's lanes that copy lse
        mbarrier.init(dout_full.index(stage), count=33)
        mbarrier.init(free.index(stage), count=2)
        mbarrier.init(ds_full.index(stage), count=1)
        mbarrier.init(p_full.index(stage), count=1)
    no_words: gl.constexpr = None
    buffers = (k_s, v_s, q_s, dout_s, ds_s, lse_s, delta_s, seen_s, no_words, no_words)
    barriers = (kv_full, q_full, dout_full, ds_full, free)
    tiles = (first, full_first, full_stop, stop, first)
    descriptors = (q_desc, k_desc, v_desc, dout_desc)
    gl.warp_specialize(
        [
            (_consumer, (
                0, buffers, p_s, barriers, p_full, tiles, dq, dv, low, high, n_k, kv_heads, n_tiles_q, head, heads,
                scale, P_UNIT,
                DV, BLOCK_DV, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, STAGES, ADD, WITH_DQ, HAS_TABLE,
            )),
            (_consumer, (
                1, buffers, p_s, barriers, p_full, tiles, dq, dk, low, high, n_k, kv_heads, n_tiles_q, head, heads,
                scale, scale,
                D, BLOCK_D, BLOCK_Q, BLOCK_K, BLOCK_D, BLOCK_DV, STAGES, ADD, WITH_DQ, HAS_TABLE,
            )),
            (_producer, (
                buffers, barriers, tiles, descriptors, lse, delta, seen, words, head_words, batch, kv_head,
                kv_heads * heads_per_kv, n_q, n_tiles_q, low, head, heads, BLOCK_Q, STAGES, HAS_TABLE,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip
