# pyright: reportArgumentType=false, reportIndexIssue=false, reportOptionalMemberAccess=false
# pyright: reportCallIssue=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
# (jitted code is Triton's language, not Python's types)
"""Launching the Hopper kernels: tiles, descriptors, grids, and the state of a backward pass.

Legend: as in local_kernel.py, whose `kernel_of` says when these kernels are taken. A *tile* of queries is BLOCK_Q rows
of one head; `tiles` counts them, the last one padded.

Note [dQ in register order]. Each block of keys adds its share of dQ to global memory, four floats at a time, straight
from the registers that a product left them in. So while a backward pass is under way, a tile of dQ lies in memory as
`[2, COLS / 8, 4, 8, 4, 2, 2]`: warpgroup, piece of 8 columns, warp of 16 rows, row, pair of columns, upper or lower 8
rows, column of the pair. The warpgroups share a tile by rows where BLOCK_Q is 128, else by columns. `finish_backward`
puts it in order, multiplies by the scale and rounds, once.

Note [Rows of a whole tile]. The scores' accumulators start at `-lse / scale` and dP's at `-delta`, so nothing is
subtracted afterwards. Both rows are padded to whole tiles. Past the end, and where a query sees no key, `-lse / scale`
is -inf: then p is 0, and so is all that comes of it. With a softcap it is `-lse` in base 2, which comes after the cap.
With dropout `delta` is divided by what weights that are kept are multiplied by, and so are the sums, until the end.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import zip_longest
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gluon_compat import TensorDescriptor, gl
from .hopper_backward import backward_kernel
from .hopper_backward_wide import wide_backward_kernel
from .hopper_forward import forward_kernel
from .launch import (
    Kind,
    Launch,
    aligned,
    are_aligned,
    are_odd,
    count_blocks,
    count_multiprocessors,
    is_captured,
    launches_of,
    seen_rows_of,
    stay,
    stay_in_graphs,
    sums_of,
    tma_strides,
    to_device,
    words_of,
)
from .merge import Partial, Sums, empty_like
from .plan import TABLE_BYTES, Visit, keep_by_bytes
from .score import Scoring

LOG2E = math.log2(math.e)
NEG_INF = tl.constexpr(float("-inf"))
ROWS = 64  # of queries in a warpgroup, forward
SHORT_KEYS = 8192  # of a launch: masks that are not full take smaller blocks of queries
MOST_SCHEDULED = 2**16  # pieces, or programs backward that are ordered: the host takes up to 1 us for each, once
JUMP = 512  # rows that nothing of a block sees, and yet it would visit, for which it ends before: some tiles
PROGRAM_COST = 7  # what a program takes backward beside its tiles, in tiles
LONG = 0.3  # of a launch's time: programs that take more start first
LONG_PIECE = 0.15  # of a launch's time forward: so do pieces
PIECE_COST = 1.5  # what a piece of work takes forward beside its tiles, in tiles
MASKED_COST = 0.2  # and what a tile takes more where something is masked
L2_BYTES = 20e6  # that programs side by side may read, or add to: each half of the GPU has its own 25 MB
DTYPES = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


# Before and after a backward pass, in plain Triton ------------------------------------------------------------------


@triton.jit(do_not_specialize=["n_q", "n_heads", "n_blocks"])
def _start_kernel(
    out, dout, lse, dlse, minus_lse, minus_delta, dq,
    stride_ob, stride_os, stride_oh, stride_db, stride_ds, stride_dh, stride_lb, stride_lh, stride_ls,
    n_q, n_heads, n_blocks, unit, keep_scale,
    DV: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HAS_DLSE: tl.constexpr, WITH_DQ: tl.constexpr,
):  # fmt: skip
    """`-lse / unit` and `-delta / keep_scale` of BLOCK rows, `delta = rowsum(dout * out) - dlse`; and dQ's sum, 0.

    See Note [Rows of a whole tile]."""
    block = tl.program_id(0) % n_blocks
    head = tl.program_id(0) // n_blocks % n_heads
    batch = (tl.program_id(0) // n_blocks // n_heads).to(tl.int64)
    rows = block * BLOCK + tl.arange(0, BLOCK)
    cols = tl.arange(0, BLOCK_DV)
    in_rows = rows < n_q
    in_tile = in_rows[:, None] & (cols < DV)[None, :]
    out_rows = out + batch * stride_ob + head.to(tl.int64) * stride_oh + rows.to(tl.int64)[:, None] * stride_os
    dout_rows = dout + batch * stride_db + head.to(tl.int64) * stride_dh + rows.to(tl.int64)[:, None] * stride_ds
    out_tile = tl.load(out_rows + cols[None, :], mask=in_tile, other=0.0).to(tl.float32)
    dout_tile = tl.load(dout_rows + cols[None, :], mask=in_tile, other=0.0).to(tl.float32)
    result = -tl.sum(out_tile * dout_tile, 1)
    if HAS_DLSE:
        dlse += batch * stride_lb + head.to(tl.int64) * stride_lh
        result += tl.load(dlse + rows.to(tl.int64) * stride_ls, mask=in_rows, other=0.0)
    first_row = batch * n_heads + head
    lse_rows = tl.load(lse + first_row * n_q + rows, mask=in_rows, other=NEG_INF)
    padded_rows = first_row * n_blocks * BLOCK + rows
    tl.store(minus_lse + padded_rows, tl.where(lse_rows == NEG_INF, NEG_INF, -lse_rows / unit))
    tl.store(minus_delta + padded_rows, result / keep_scale)
    if WITH_DQ:
        tile = dq + tl.program_id(0).to(tl.int64) * (BLOCK * BLOCK_D)
        tl.store(tile + tl.arange(0, BLOCK * BLOCK_D), tl.zeros([BLOCK * BLOCK_D], tl.float32))


@triton.jit(do_not_specialize=["n_q", "n_heads", "tiles"])
def _finish_kernel(
    total, dq, n_q, n_heads, tiles, scale, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One tile of dQ `(b, s, h, D)`, contiguous, from its sum. See Note [dQ in register order]."""
    program = tl.program_id(0)
    tile = program % tiles
    head = program // tiles % n_heads
    batch = (program // tiles // n_heads).to(tl.int64)
    COLS: tl.constexpr = BLOCK_D * BLOCK_Q // 128  # of a warpgroup's half, which has 64 rows
    x = tl.load(total + program.to(tl.int64) * (BLOCK_Q * BLOCK_D) + tl.arange(0, BLOCK_Q * BLOCK_D)) * scale
    x = tl.reshape(x, [2, COLS // 8, 4, 8, 4, 2, 2])  # warpgroup, piece, warp, row, pair, half, column
    if BLOCK_Q == 128:
        x = tl.permute(x, [0, 2, 5, 3, 1, 4, 6])
    else:
        x = tl.permute(x, [2, 5, 3, 0, 1, 4, 6])
    x = tl.reshape(x, [BLOCK_Q, BLOCK_D])
    rows = tile * BLOCK_Q + tl.arange(0, BLOCK_Q)
    cols = tl.arange(0, BLOCK_D)
    pointers = dq + ((batch * n_q + rows[:, None]) * n_heads + head) * D + cols[None, :]
    tl.store(pointers, x.to(dq.dtype.element_ty), mask=(rows < n_q)[:, None] & (cols < D)[None, :])


# Tiles --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForwardTile:
    """`consumers` warpgroups of ROWS queries each, against `block_k` keys at a time, `stages` of them on their way.

    `block_d`, `block_dv`: head dims as they lie in shared memory; what is past the tensor's own arrives as 0.
    """

    block_d: int
    block_dv: int
    block_k: int
    stages: int
    consumers: int
    q_in_registers: bool
    pingpong: bool  # consumers take turns at the tensor cores

    @property
    def block_q(self) -> int:
        return ROWS * self.consumers

    @property
    def registers(self) -> int:
        """What a thread has before the warpgroups divide them anew."""
        return 168 if self.consumers == 2 else 128


@dataclass(frozen=True)
class BackwardTile:
    """Two warpgroups and `block_k` keys against `block_q` queries at a time, `stages` on their way.

    With 128 keys each warpgroup has half of them; with 64 one sums dV and one dK (hopper_backward_wide.py).
    """

    block_d: int
    block_dv: int
    block_q: int
    block_k: int
    stages: int


@lru_cache
def forward_tile(head_dim: int, v_dim: int, *, is_fixed: bool = False, is_short: bool = False) -> ForwardTile:
    """The forward tile for head dims up to 256. Where the pivot is fixed (hopper_forward.py, Note [Fixed pivot]) a
    third consumer, which the registers of tiles of 64 keys allow, makes it faster; but blocks of 192 queries waste more
    on masks, which shows where few keys are seen."""
    dims = _padded(head_dim), _padded(v_dim)
    if max(dims) == 64:
        return ForwardTile(*dims, block_k=128, stages=2, consumers=3, q_in_registers=False, pingpong=True)
    if max(dims) == 128 and is_fixed and not is_short:
        return ForwardTile(*dims, block_k=64, stages=4, consumers=3, q_in_registers=False, pingpong=False)
    if max(dims) == 128:
        return ForwardTile(*dims, block_k=128, stages=2, consumers=2, q_in_registers=True, pingpong=True)
    return ForwardTile(*dims, block_k=64, stages=2, consumers=2, q_in_registers=False, pingpong=False)


@lru_cache
def backward_tile(head_dim: int, v_dim: int) -> BackwardTile:
    """The backward tile for head dims up to 256."""
    if max(head_dim, v_dim) <= 64:
        return BackwardTile(64, 64, block_q=128, block_k=128, stages=2)
    # 64 queries: the warpgroups share dQ by columns, 64 each or more
    block_k = 128 if max(head_dim, v_dim) <= 128 else 64
    return BackwardTile(max(_padded(head_dim), 128), _padded(v_dim), block_q=64, block_k=block_k, stages=2)


def _padded(dim: int) -> int:
    return max(1 << (dim - 1).bit_length(), 64)


# Launchers ----------------------------------------------------------------------------------------------------------


class _ScoreNumbers(NamedTuple):
    """What the kernels are told of scores beside tensors; what is None leaves its code out."""

    scale: float
    cap: float | None
    cap_scale: float | None
    drop_below: int | None
    keep_scale: float | None

    @staticmethod
    def of(scoring: Scoring) -> "_ScoreNumbers":
        scale, cap, drops = scoring.scale, scoring.softcap, scoring.head_words is not None
        cap_scale = None if cap is None else scale / cap
        keep_scale = 1 / (1 - scoring.dropout_p) if drops else None
        return _ScoreNumbers(scale, cap, cap_scale, scoring.drop_below if drops else None, keep_scale)


def forward(
    q: Tensor, k: Tensor, v: Tensor, visit: Visit, scoring: Scoring, into: Partial, before: Tensor | None
) -> None:
    """As `reference.forward`, of tensors that are not empty."""
    device, kinds = q.device, (Kind.of(q), Kind.of(k), Kind.of(v), Kind.of(into.out))
    sinks = scoring.sinks if before is None else None
    score, merges, in_place = _ScoreNumbers.of(scoring), before is not None, before is into.out
    tile = _forward_tile_of(kinds[0], kinds[1], kinds[2], visit.mask.is_full)
    n_blocks = visit.query_blocks(tile.block_q, JUMP).shape[0]  # `len` takes 2 us
    launch = _forward_launch(*kinds, n_blocks, visit.mask.is_full, sinks is not None, score, merges, in_place, device)
    if launch is None or are_odd(q, k, v):
        return forward(aligned(q), aligned(k), aligned(v), visit, scoring, into, before)
    blocks, seen, schedule, words = _forward_tables(launch, visit, device)
    launch(q, k, v, into.out, into.lse, before, blocks, seen, sinks, schedule, words, scoring.head_words)


def _is_fixed(v: Kind) -> bool:
    return v.dtype == torch.bfloat16


def _forward_tile_of(q: Kind, k: Kind, v: Kind, is_full: bool) -> ForwardTile:
    is_short = not is_full and k.shape[1] <= SHORT_KEYS
    return forward_tile(q.shape[3], v.shape[3], is_fixed=_is_fixed(v), is_short=is_short)


@stay_in_graphs
@keep_by_bytes(TABLE_BYTES)
def _forward_tables(
    launch: Launch, visit: Visit, device: torch.device
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """What blocks of queries and single queries see, where programs take turns by one, their schedule, and dropout's
    words."""
    blocks = visit.query_blocks(ROWS * launch.numbers["CONSUMERS"], JUMP)
    schedule = _schedule(launch, blocks, device) if launch.is_scheduled else None
    return to_device(blocks, device), seen_rows_of(visit, device), schedule, _words_of(launch, visit, device)


@lru_cache(maxsize=1024)
def _forward_launch(
    q: Kind,
    k: Kind,
    v: Kind,
    out: Kind,
    n_blocks: int,
    is_full: bool,
    has_sinks: bool,
    score: _ScoreNumbers,
    merges: bool,
    in_place: bool,
    device: torch.device,
) -> Launch | None:
    """A launch of `forward_kernel`, by all that its form depends on; `None` where q, k or v is not aligned."""
    if not are_aligned(q, k, v):
        return None
    tile = _forward_tile_of(q, k, v, is_full)
    n_batches, n_q, n_heads, _ = q.shape
    _, n_k, kv_heads, v_dim = v.shape
    n_work = n_batches * n_heads * n_blocks
    heads_per_kv, kv_bytes = n_heads // kv_heads, n_k * (q.shape[3] + v_dim) * k.dtype.itemsize
    kv_together = heads_together(kv_heads, kv_bytes, n_blocks * heads_per_kv, count_multiprocessors(device))
    numbers = {
        "stride_ob": out.strides[0],
        "stride_os": out.strides[1],
        "stride_oh": out.strides[2],
        "n_q": n_q,
        "n_k": n_k,
        "n_blocks": n_blocks,
        "n_heads": n_heads,
        "n_work": n_work,
        "heads_per_kv": heads_per_kv,
        "heads_together": kv_together * heads_per_kv,
        "scale_log2": (score.scale if score.cap is None else score.cap) * LOG2E,
        "cap_scale": score.cap_scale,
        "drop_below": score.drop_below,
        "keep_scale": score.keep_scale,
        "ROWS": ROWS,
        "BLOCK_K": tile.block_k,
        "BLOCK_D": tile.block_d,
        "BLOCK_DV": tile.block_dv,
        "DV": v_dim,
        "STAGES": tile.stages,
        "CONSUMERS": tile.consumers,
        "IN_PLACE": in_place,
        "Q_IN_REGISTERS": tile.q_in_registers,
        "PINGPONG": tile.pingpong,
        "FIXED": _is_fixed(v),
    }
    boxes = {
        "q_desc": _descriptor(q, ROWS, tile.block_d),
        "k_desc": _descriptor(k, tile.block_k, tile.block_d),
        "v_desc": _descriptor(v, tile.block_k, tile.block_dv),
    }
    # a ring leaves one to kernels that signal
    resident = count_multiprocessors(device) - (merges or out.dtype != q.dtype)
    way = ways_to_share(n_work, resident, is_full=is_full)
    programs = n_work if way == "grid" else min(n_work, resident)
    tensors = ("out", "lse", "out_before", "blocks", "seen", "sinks", "schedule", "words", "head_words")
    options = {"num_warps": 4, "maxnreg": tile.registers}
    return Launch(forward_kernel, (programs,), boxes, tensors, numbers, is_scheduled=way == "schedule", **options)


def ways_to_share(n_work: int, resident: int, *, is_full: bool) -> Literal["turns", "schedule", "grid"]:
    """How programs of the forward kernel get their pieces of work, blocks of queries of one head each.

    As many programs as are `resident`, one a multiprocessor, load a piece beside the end of the one before. They take
    "turns" where pieces are alike, else what a "schedule" gives them, unless there are more than a host should count:
    then each piece has a program ("grid").
    """
    if is_full or n_work <= resident:
        return "turns"
    return "schedule" if n_work <= MOST_SCHEDULED else "grid"


def share_out(lengths: Sequence[float], programs: int) -> list[list[int]]:
    """Which pieces of work, of these lengths, each program does, in this order: the next one whoever is free first."""
    shares: list[list[int]] = [[] for _ in range(programs)]
    free = [(0.0, program) for program in range(programs)]
    for piece, length in enumerate(lengths):
        since, program = free[0]
        shares[program].append(piece)
        heapq.heapreplace(free, (since + length + PIECE_COST, program))
    return shares


def _schedule(launch: Launch, blocks: Tensor, device: torch.device) -> Tensor:
    """int32 `(1 + most, programs)`: how many pieces of work each program has, then which. Pieces, of `blocks` (see
    `plan.query_blocks`), are counted as `hopper_forward._find_work` does. Of the heads that run together those come
    first that take longest, and before them those of all heads that take more than LONG_PIECE of the launch's time, so
    that programs end at one time."""
    names = "BLOCK_K", "n_heads", "n_blocks", "n_work", "heads_together"
    block_k, n_heads, n_blocks, n_work, heads_together = (launch.numbers[name] for name in names)
    begin, full_begin, full_end, end, _, _ = blocks.flip(0).unbind(1)
    tiles = (count_blocks(end, block_k) - begin // block_k).clamp(min=1)
    full_tiles = (full_end // block_k - count_blocks(full_begin, block_k)).clamp(min=0)
    cost = tiles + MASKED_COST * (tiles - full_tiles)
    by_cost = cost.argsort(descending=True, stable=True)
    groups = [(head, min(heads_together, n_heads - head)) for head in range(0, n_heads, heads_together)]
    of_batch = n_heads * n_blocks
    batches = range(0, n_work, of_batch)
    time = (cost + PIECE_COST).sum() * n_heads * len(batches) / launch.grid[0]
    n_long = int((cost + PIECE_COST > LONG_PIECE * time).sum())
    pieces, lengths = [], []
    for turns in by_cost.split((n_long, n_blocks - n_long)):
        batch = torch.cat([_grid(turns * n, n) + head * n_blocks for head, n in groups])
        pieces += [piece for first in batches for piece in (batch + first).tolist()]
        lengths += torch.cat([cost[turns].repeat_interleave(n) for _, n in groups]).repeat(len(batches)).tolist()
    shares = share_out(lengths, launch.grid[0])
    shares = [[pieces[place] for place in share] for share in shares]
    rows = [list(map(len, shares)), *zip_longest(*shares, fillvalue=-1)]
    return to_device(torch.tensor(rows, dtype=torch.int32, device="cpu"), device)


def _grid(rows: Tensor, columns: int, step: int = 1, first: int = 0) -> Tensor:
    """Each of the rows plus each of so many columns, row by row, flat."""
    return (rows[:, None] + step * torch.arange(first, first + columns, device="cpu")).flatten()


def heads_together(kv_heads: int, head_bytes: int, head_blocks: int, multiprocessors: int) -> int:
    """How many key/value heads run side by side: as many as fit in L2, but no fewer than occupy the GPU, about; a power
    of two, or all.

    Args:
        head_bytes: what the programs of a head read again and again, or add to.
        head_blocks: of a head, blocks that take a program each.
    """
    fit, occupy = math.log2(L2_BYTES / head_bytes), round(math.log2(multiprocessors / head_blocks))
    return min(kv_heads, 1 << max(int(fit), occupy, 0))


@dataclass(frozen=True, eq=False)  # kept by `_pass_of`, so that what goes by it is found by its identity
class _Pass:
    """What all launches of a backward pass are told beside tensors. `q` and `dout` are aligned."""

    q: Kind
    dout: Kind
    with_dq: bool
    score: _ScoreNumbers
    device: torch.device

    @cached_property
    def tile(self) -> BackwardTile:
        return backward_tile(self.q.shape[3], self.dout.shape[3])

    @cached_property
    def tiles(self) -> int:
        return count_blocks(self.q.shape[1], self.tile.block_q)

    @property
    def keep_scale(self) -> float:
        return self.score.keep_scale or 1.0


_pass_of = lru_cache(maxsize=1024)(_Pass)


class Started(NamedTuple):
    """A backward pass by the Hopper kernel, which needs rows of whole tiles and sums dQ in the order of registers."""

    about: _Pass
    q: Tensor
    dout: Tensor
    minus_lse: Tensor  # fp32 (b, h, tiles * BLOCK_Q): see Note [Rows of a whole tile]
    minus_delta: Tensor  # fp32 (b, h, tiles * BLOCK_Q), divided by `keep_scale`
    dq: Tensor | None  # fp32 (b, h, tiles, BLOCK_Q * BLOCK_D): see Note [dQ in register order]; None: not wanted
    head_words: Tensor | None
    is_captured: bool  # in a CUDA graph

    @property
    def delta(self) -> Tensor:
        return self.minus_delta[:, :, : self.q.shape[1]] * -self.about.keep_scale

    @property
    def in_any_order(self) -> bool:
        """Visits add to dQ, which is 0 at first, in memory."""
        return self.dq is not None

    def of(self, batches: slice) -> "Started":
        about, *tensors, is_captured = self
        q, dout, *rest = (None if x is None else x[batches] for x in tensors)
        about = _pass_of(Kind.of(q), Kind.of(dout), about.with_dq, about.score, about.device)
        return Started(about, q, dout, *rest, is_captured)


def start_backward(
    q: Tensor, result: Partial, dout: Tensor, dlse: Tensor | None, scoring: Scoring, *, with_dq: bool
) -> Started:
    """What the visits of a backward pass share; `q` is not empty. Without dQ the visits add to dK and dV alone."""
    out, lse_strides = result.out, None if dlse is None else dlse.stride()
    about = _pass_of(Kind.of(q), Kind.of(dout), with_dq, _ScoreNumbers.of(scoring), q.device)
    launch = _start_launch(about, Kind.of(out), lse_strides)
    if launch is None or are_odd(q, out, dout, result.lse):  # they may come from hooks that kept them elsewhere
        result = Partial(aligned(out), result.lse.clone())
        return start_backward(aligned(q), result, aligned(dout), dlse, scoring, with_dq=with_dq)
    n_batches, _, n_heads, _ = q.shape
    tile, tiles = about.tile, about.tiles
    minus_lse = q.new_empty((n_batches, n_heads, tiles * tile.block_q), dtype=torch.float32)
    minus_delta = torch.empty_like(minus_lse)
    dq_shape = n_batches, n_heads, tiles, tile.block_q * tile.block_d
    dq = q.new_empty(dq_shape, dtype=torch.float32) if with_dq else None
    launch(out, dout, result.lse.contiguous(), dlse, minus_lse, minus_delta, dq)
    return Started(about, q, dout, minus_lse, minus_delta, dq, scoring.head_words, is_captured(q.device))


@lru_cache(maxsize=1024)
def _start_launch(about: _Pass, out: Kind, lse_strides: tuple[int, ...] | None) -> Launch | None:
    """A launch of `_start_kernel`, by all that its form depends on; `None` where q, out or dout is not aligned."""
    if not are_aligned(about.q, out, about.dout):
        return None
    dout, tile, tiles, score = about.dout, about.tile, about.tiles, about.score
    n_batches, n_q, n_heads, v_dim = dout.shape
    strides = zip("odl", (out.strides, dout.strides, lse_strides or (0, 0, 0)), ("bsh", "bsh", "bhs"), strict=True)
    numbers = {
        **{f"stride_{x}{axis}": n for x, of, axes in strides for axis, n in zip(axes, of, strict=False)},
        "n_q": n_q,
        "n_heads": n_heads,
        "n_blocks": tiles,
        "unit": score.scale if score.cap is None else 1 / LOG2E,
        "keep_scale": about.keep_scale,
        "DV": v_dim,
        "BLOCK": tile.block_q,
        "BLOCK_D": tile.block_d,
        "BLOCK_DV": tile.block_dv,
        "HAS_DLSE": lse_strides is not None,
        "WITH_DQ": about.with_dq,
    }
    tensors = ("out", "dout", "lse", "dlse", "minus_lse", "minus_delta", "dq")
    return Launch(_start_kernel, (n_batches * n_heads * tiles,), {}, tensors, numbers, num_warps=4)


def backward(k: Tensor, v: Tensor, state: Started, visit: Visit, take_dkv: Callable[[], Sums]) -> None:
    """As `reference.backward`, of tensors that are not empty. Sums of dK and dV: Note [Long sums] of launch.py."""
    sums = dk, dv, fresh = take_dkv()
    about, q, dout, *rows, dq, head_words, captured = state
    launches = _backward_launches(about, Kind.of(k), Kind.of(v), dk.dtype, fresh, visit)
    if not launches or are_odd(k, v):
        return backward(aligned(k), aligned(v), state, visit, take_dkv=lambda: sums)
    if captured:
        stay(launches)
    with sums_of(launches, dk, dv, contiguous=True) as (total_dk, total_dv):
        for launch, *tables in launches:
            launch(q, k, v, dout, *rows, dq, total_dk, total_dv, *tables, head_words)


@keep_by_bytes(TABLE_BYTES)
def _backward_launches(
    about: _Pass, k: Kind, v: Kind, sums: torch.dtype, fresh: bool, visit: Visit
) -> tuple[tuple[Launch, Tensor, Tensor | None, Tensor | None, Tensor | None], ...]:
    """A visit's launches, and for each what blocks of keys are seen by, the order of programs, what single queries see,
    and dropout's words; no launches where k or v is not aligned.

    Query rows that see a block are both ends of tiles. All four are 0 where none does: a block that nothing adds to is
    still written, from a tile that is there.
    """
    if not are_aligned(k, v):
        return ()
    found, device, blocks = [], about.device, visit.key_blocks(about.tile.block_k, JUMP)
    lengths = (blocks[:, 3] - blocks[:, 0]).clamp(min=0)
    n_programs = len(blocks) * k.shape[0] * k.shape[2]
    is_ordered = n_programs <= MOST_SCHEDULED and bool((lengths[1:] > lengths[:-1]).any())
    shared: dict[tuple[int, int, int], tuple[Tensor, Tensor | None]] = {}  # by launches that differ in heads alone
    for launch, low, high in _launches_of_kinds(about, k, v, sums, fresh, len(blocks), visit.mask.is_full, is_ordered):
        key = low, high, launch.numbers["heads"]
        if key not in shared:
            seen = blocks[:, :4].clamp(low, high)
            table = torch.cat([torch.where(seen[:, :1] == seen[:, 3:], 0, seen), blocks[:, 4:]], dim=1)
            shared[key] = to_device(table, device), _order(launch, table, device) if is_ordered else None
        found.append((launch, *shared[key], seen_rows_of(visit, device), _words_of(launch, visit, device)))
    return tuple(found)


def _order(launch: Launch, table: Tensor, device: torch.device) -> Tensor:
    tiles = (table[:, 3] - table[:, 0]) / launch.numbers["BLOCK_Q"] * launch.numbers["heads"]
    n_heads, multiprocessors = launch.grid[0] // len(table), count_multiprocessors(device)
    return to_device(order_programs(tiles, n_heads, launch.numbers["kv_together"], multiprocessors), device)


def order_programs(tiles: Tensor, n_heads: int, together: int, multiprocessors: int) -> Tensor:
    """In which order programs of the backward kernel start, each with a block of keys of one head: int32, counting
    blocks head by head.

    Blocks of heads that run together start side by side, in order: they read the same queries, and add to the same dQ.
    But a launch ends when its last program does. So programs that take more than LONG of its time start first, of all
    heads, and as much work as half of the longest of the others on every multiprocessor is kept for the end, in the
    shortest ones.

    Args:
        tiles: that the program of each block visits.
    """
    cost = tiles + PROGRAM_COST
    work = cost.sum() * n_heads / multiprocessors
    by_cost = cost.argsort(descending=True, stable=True)
    n_long = int((cost > LONG * work).sum())
    others = by_cost[n_long:]
    late = cost[others[:1]].sum() / 2 / work * cost.sum()
    n_late = int((cost[others].flip(0).cumsum(0) <= late).sum())
    between, last = others.split((len(others) - n_late, n_late))
    between, n_blocks = between.sort().values, len(cost)
    whole = n_heads // together * together  # heads in groups that are whole
    groups = torch.arange(whole, device="cpu").view(-1, 1, together) * n_blocks
    parts = (
        _grid(by_cost[:n_long], n_heads, n_blocks),
        (groups + between[:, None]).flatten(),
        _grid(between, n_heads - whole, n_blocks, whole),
        _grid(last, n_heads, n_blocks),
    )
    return torch.cat(parts).to(torch.int32)


def _words_of(launch: Launch, visit: Visit, device: torch.device) -> Tensor | None:
    return None if launch.numbers["drop_below"] is None else words_of(visit, device)


@lru_cache(maxsize=1024)
def _launches_of_kinds(
    about: _Pass, k: Kind, v: Kind, sums: torch.dtype, fresh: bool, n_blocks: int, is_full: bool, is_ordered: bool
) -> tuple[tuple[Launch, int, int], ...]:
    """The launches of every visit with all that their form depends on, and the query rows `[low, high)` that each sums
    over. Sums of dK and dV are in the dtype `sums`; where several launches add, in fp32. (Which tensors there are is
    part of the form: under the full mask there is no table, and programs may be ordered.)
    """
    _, n_q, n_heads, _ = about.q.shape
    found = []
    for first_head, heads, low, high in launches_of(n_q, heads=n_heads // k.shape[2]):
        add = not fresh or first_head > 0 or low > 0
        found.append((_backward_launch(about, k, v, n_blocks, first_head, heads, add), low, high))
    return tuple(found)


def _backward_launch(about: _Pass, k: Kind, v: Kind, n_blocks: int, first_head: int, heads: int, add: bool) -> Launch:
    """A launch of `backward_kernel` or `wide_backward_kernel` that sums over `heads` heads of a key's."""
    q, dout, tile = about.q, about.dout, about.tile
    kernel = backward_kernel if tile.block_k == 128 else wide_backward_kernel
    n_batches, n_q, n_heads, head_dim = q.shape
    _, n_k, kv_heads, v_dim = v.shape
    row_bytes = (head_dim + v_dim) * q.dtype.itemsize + about.with_dq * tile.block_d * 4  # of queries, dO, sums of dQ
    head_bytes, multiprocessors = n_q * heads * row_bytes, count_multiprocessors(about.device)
    numbers = {
        "n_q": n_q,
        "n_k": n_k,
        "n_blocks": n_blocks,
        "n_tiles_q": about.tiles,
        "kv_heads": kv_heads,
        "kv_together": heads_together(n_batches * kv_heads, head_bytes, n_blocks, multiprocessors),
        "heads_per_kv": n_heads // kv_heads,
        "first_head": first_head,
        "heads": heads,
        **about.score._asdict(),
        "D": head_dim,
        "DV": v_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_K": tile.block_k,
        "BLOCK_D": tile.block_d,
        "BLOCK_DV": tile.block_dv,
        "STAGES": tile.stages,
        "ADD": add,
        "WITH_DQ": about.with_dq,
        "ds_layout": _layout((tile.block_k, tile.block_q), q.dtype),
    }
    boxes = {
        "q_desc": _descriptor(q, tile.block_q, tile.block_d),
        "k_desc": _descriptor(k, tile.block_k, tile.block_d),
        "v_desc": _descriptor(v, tile.block_k, tile.block_dv),
        "dout_desc": _descriptor(dout, tile.block_q, tile.block_dv),
    }
    grid = (n_blocks * kv_heads * n_batches,)
    tensors = ("lse", "delta", "dq", "dk", "dv", "blocks", "order", "seen", "words", "head_words")
    return Launch(kernel, grid, boxes, tensors, numbers, num_warps=4, maxnreg=168)


def finish_backward(state: Started) -> Tensor:
    """dQ `(b, s, h, d)`, contiguous."""
    dq = empty_like(state.q)
    _finish_launch(state.about)(state.dq, dq)
    return dq


@lru_cache(maxsize=1024)
def _finish_launch(about: _Pass) -> Launch:
    """A launch of `_finish_kernel`, by all that its form depends on."""
    n_batches, n_q, n_heads, head_dim = about.q.shape
    tile, tiles = about.tile, about.tiles
    numbers = {
        "n_q": n_q,
        "n_heads": n_heads,
        "tiles": tiles,
        "scale": about.score.scale * about.keep_scale,
        "D": head_dim,
        "BLOCK_Q": tile.block_q,
        "BLOCK_D": tile.block_d,
    }
    return Launch(_finish_kernel, (n_batches * n_heads * tiles,), {}, ("total", "dq"), numbers, num_warps=4)


@lru_cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype):
    """How a tile of that shape lies in shared memory."""
    return gl.NVMMASharedLayout.get_default_for(list(shape), DTYPES[dtype])


def _descriptor(x: Kind, rows: int, cols: int) -> TensorDescriptor:
    """`[rows, cols]` tiles of a head of tensors of that kind, a descriptor of no memory; past the end come zeros."""
    nothing = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
    strides = tma_strides(x.shape, x.strides)
    box = [1, rows, 1, cols]
    return TensorDescriptor(nothing, list(x.shape), strides, box, _layout((1, rows, 1, cols), x.dtype))
