"""The Hopper kernels' doubles: what the Gluon kernels do with their launchers' arguments, tile by tile, in plain torch.

Gluon has no interpreter. With these in the kernels' places all around them runs on a CPU: tiles, padding, tables,
splitting of launches, the sum of dQ in the order of registers. They read nothing but what a launcher passes.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ringflash import hopper_kernel
from ringflash.hopper_kernel import Started

NEG_INF = float("-inf")
LOG2E, LN2 = math.log2(math.e), math.log(2.0)


def forget_launches() -> None:
    """Launches are kept with their kernel: another one in its place is not seen by those."""
    for made in vars(hopper_kernel).values():
        if hasattr(made, "cache_clear"):
            made.cache_clear()


class Double:
    """In place of a kernel: `double[grid](**arguments)` runs `program(grid, **arguments)` and keeps both."""

    def __init__(self, program: Callable[..., None]):
        self.program = program
        self.launches: list[tuple[tuple[int, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(**arguments: Any) -> None:
            self.launches.append((grid, arguments))
            self.program(grid, **arguments)

        return launch


def tile_of(descriptor: Any, batch: int, row: int, head: int) -> Tensor:
    """`[rows, cols]` in fp32: what TMA loads, zeros past the tensor's end."""
    _, rows, _, cols = descriptor.block_shape
    tile = torch.zeros(rows, cols)
    inside = descriptor.base[batch, row : row + rows, head].float()
    tile[: inside.shape[0], : inside.shape[1]] = inside
    return tile


def tiles_seen(blocks: Tensor, block: int, size: int) -> tuple[int, int, range, range, bool]:
    """The rows `[low, high)` of a block; the tiles that it visits, at least one; those that need no mask; and
    whether it sees nothing."""
    begin, full_begin, full_end, end, low, high = blocks[block].tolist()
    first, stop = begin // size, max(-(-end // size), begin // size + 1)
    full_first = min(-(-full_begin // size), stop)
    full = range(full_first, min(max(full_end // size, full_first), stop))
    return low, high, range(first, stop), full, begin == end


def seen_by_rows(seen: Tensor | None, rows: Tensor, n_q: int, n_k: int) -> tuple[Tensor, Tensor]:
    """`(first, last)` key row of each query row; nothing past the last query where there is a table."""
    if seen is None:
        return torch.zeros_like(rows), torch.full_like(rows, n_k)
    inside = rows.clamp(max=n_q - 1)
    return tuple(torch.where(rows < n_q, end[inside], 0) for end in seen)  # pyright: ignore[reportReturnType]


def kept(a: dict[str, Any], batch: int, head: int, rows: Tensor, keys: Tensor) -> Tensor:
    """Boolean `(rows, keys)`, by what a launcher passes of words; anything past the end."""
    n_q, n_k = a["n_q"], a["n_k"]
    assert a["words"].shape == (n_q + n_k,) and a["head_words"].is_contiguous()
    row_words, key_words = a["words"][rows.clamp(max=n_q - 1)], a["words"][n_q + keys.clamp(max=n_k - 1)]
    return a["head_words"][batch, head] * row_words[:, None] * key_words >= a["drop_below"]


def taken(programs: int, n_work: int, schedule: Tensor | None) -> list[int]:
    """The pieces of work that programs take."""
    if schedule is None:
        return [work for program in range(programs) for work in range(program, n_work, programs)]
    assert schedule.shape[1] == programs and schedule.is_contiguous()
    return [int(schedule[1 + turn, p]) for p in range(programs) for turn in range(int(schedule[0, p]))]


def find_work(work: int, n_blocks: int, n_heads: int, heads_together: int) -> tuple[int, int, int]:
    """`(batch, head, block)`."""
    batch, place = divmod(work, n_blocks * n_heads)
    group, place = divmod(place, n_blocks * heads_together)
    turn, head = divmod(place, min(heads_together, n_heads - group * heads_together))
    return batch, group * heads_together + head, n_blocks - 1 - turn


def forward(grid: tuple[int, ...], **a: Any) -> None:
    n_q, n_k, block_k, n_blocks = a["n_q"], a["n_k"], a["BLOCK_K"], a["n_blocks"]
    block_q = a["ROWS"] * a["CONSUMERS"]
    pieces = taken(grid[0], a["n_work"], a["schedule"])
    assert sorted(pieces) == list(range(a["n_work"]))
    assert a["out"].stride()[:3] == (
        a["stride_ob"],
        a["stride_os"],
        a["stride_oh"],
    )
    work = {find_work(piece, n_blocks, a["n_heads"], a["heads_together"]) for piece in pieces}
    assert len(work) == a["n_work"] and a["blocks"].shape == (n_blocks, 6)
    for batch, head, block in work:
        low, high, tiles, full, nothing = tiles_seen(a["blocks"], block, block_k)
        if a["IN_PLACE"] and nothing:
            continue
        rows = torch.arange(low, low + block_q)
        first, last = seen_by_rows(a["seen"], rows, n_q, n_k)
        q = torch.cat([tile_of(a["q_desc"], batch, row, head) for row in rows[:: a["ROWS"]].tolist()])
        scores, values, keys = [], [], []
        for tile in tiles:
            key = torch.arange(tile * block_k, (tile + 1) * block_k)
            s = q @ tile_of(a["k_desc"], batch, tile * block_k, head // a["heads_per_kv"]).T
            s = (s if a["cap_scale"] is None else torch.tanh(s * a["cap_scale"])) * a["scale_log2"]
            if tile not in full:
                s = s.masked_fill((key < first[:, None]) | (key >= last[:, None]), NEG_INF)
            keys.append(key)
            scores.append(s)
            values.append(tile_of(a["v_desc"], batch, tile * block_k, head // a["heads_per_kv"]))
        scores = torch.cat(scores, 1)
        lse = torch.logsumexp(scores * LN2, 1)
        pivot = torch.where(lse == NEG_INF, 0.0, lse)
        p = torch.exp(scores * LN2 - pivot[:, None])
        if a["words"] is not None:
            p = p * kept(a, batch, head, rows, torch.cat(keys)) * a["keep_scale"]
        out = p @ torch.cat(values)
        if a["sinks"] is not None:
            assert a["out_before"] is None, "sinks belong to the first visit"
            total = torch.logaddexp(lse, a["sinks"][head])
            out, lse = out * torch.exp(lse - torch.where(total == NEG_INF, 0.0, total))[:, None], total
        here = slice(low, high)
        out, lse = out[: here.stop - here.start, : a["DV"]], lse[: here.stop - here.start]
        if a["out_before"] is not None:
            assert a["out_before"].stride() == a["out"].stride() and (a["out_before"] is a["out"]) == a["IN_PLACE"]
            before = a["lse"][batch, head, here]
            total = torch.logaddexp(before, lse)
            pivot = torch.where(total == NEG_INF, 0.0, total)
            weights = torch.exp(before - pivot)[:, None], torch.exp(lse - pivot)[:, None]
            out, lse = a["out_before"][batch, here, head] * weights[0] + out * weights[1], total
        a["out"][batch, here, head] = out.to(a["out"].dtype)
        a["lse"][batch, head, here] = lse


def register_places(block_q: int, block_d: int) -> Tensor:
    """`(block_q, block_d)`: where in a tile of the sum the element of that row and column lies."""
    row, col = torch.arange(block_q)[:, None], torch.arange(block_d)[None, :]
    if block_q == 128:  # a warpgroup has 64 rows, else half of the columns
        warpgroup, row = row // 64, row % 64
    else:
        warpgroup, col = col // (block_d // 2), col % (block_d // 2)
    half = block_q * block_d // 2
    # _add_tile: four floats (upper or lower 8 rows, even or odd column) for each thread, 16 bytes after the next
    thread = row // 16 * 128 + row % 8 * 16 + col // 8 * (64 * 8) + col % 8 // 2 * 4
    return warpgroup * half + thread + row % 16 // 8 * 2 + col % 2


def find_block(place: int, n_batches: int, a: dict[str, Any]) -> tuple[int, int, int]:
    """`(block, kv_head, batch)`."""
    n_blocks, kv_heads, kv_together = a["n_blocks"], a["kv_heads"], a["kv_together"]
    if a["order"] is None:
        group, place = divmod(place, n_blocks * kv_together)
        block, head = divmod(place, min(kv_together, kv_heads * n_batches - group * kv_together))
        batch, kv_head = divmod(group * kv_together + head, kv_heads)
    else:
        head, block = divmod(int(a["order"][place]), n_blocks)
        batch, kv_head = divmod(head, kv_heads)
    return block, kv_head, batch


def p_sent(p: Tensor, dtype: torch.dtype) -> Tensor:
    """What arrives of `p` at the warpgroup that makes dS: Note [P from one consumer to the other]."""
    return p if dtype == torch.float16 else (p * 1024).to(torch.float16).float() / 1024


def backward(grid: tuple[int, ...], **a: Any) -> None:
    n_q, n_k, block_q, block_k, tiles_q = a["n_q"], a["n_k"], a["BLOCK_Q"], a["BLOCK_K"], a["n_tiles_q"]
    narrow = a["q_desc"].base.dtype  # of P and dS
    places = register_places(block_q, a["BLOCK_D"]).flatten()
    n_blocks, kv_heads, n_batches = a["n_blocks"], a["kv_heads"], grid[0] // (a["n_blocks"] * a["kv_heads"])
    assert a["blocks"].shape == (n_blocks, 6) and grid == (n_blocks * kv_heads * n_batches, 1, 1)
    blocks = [find_block(place, n_batches, a) for place in range(grid[0])]
    assert len(set(blocks)) == grid[0]
    for block, kv_head, batch in blocks:
        low, high, tiles, full, nothing = tiles_seen(a["blocks"], block, block_q)
        if a["ADD"] and nothing:
            continue
        key = torch.arange(low, low + block_k)
        full = full if low + block_k <= high else range(0)
        k = tile_of(a["k_desc"], batch, low, kv_head)
        v = tile_of(a["v_desc"], batch, low, kv_head)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        first_head = kv_head * a["heads_per_kv"] + a["first_head"]
        for head, tile in ((h, t) for h in range(first_head, first_head + a["heads"]) for t in tiles):
            assert tile < tiles_q, "a tile that is not there"
            rows = torch.arange(tile * block_q, (tile + 1) * block_q)
            q = tile_of(a["q_desc"], batch, tile * block_q, head)
            dout = tile_of(a["dout_desc"], batch, tile * block_q, head)
            lse, cap = a["lse"][batch, head, rows], a["cap"]
            if cap is None:
                scores, slope = (k @ q.T + lse) * a["scale"] * LOG2E, 1.0
            else:
                tanh = torch.tanh(k @ q.T * a["cap_scale"])
                scores, slope = tanh * cap * LOG2E + lse, 1 - tanh.square()
            if tile not in full:
                first, last = seen_by_rows(a["seen"], rows, n_q, n_k)
                scores = scores.masked_fill((key[:, None] < first) | (key[:, None] >= last.clamp(max=high)), NEG_INF)
            p = torch.exp2(scores)
            delta = a["delta"][batch, head, rows]
            dp, weights = v @ dout.T + delta, p
            if a["words"] is not None:
                keep = kept(a, batch, head, rows, key).T
                dp, weights = torch.where(keep, dp, delta), p * keep
            ds = ((p if block_k == 128 else p_sent(p, narrow)) * slope * dp).to(narrow).float()
            dv += weights.to(narrow).float() @ dout
            dk += ds @ q
            if a["WITH_DQ"]:
                a["dq"][batch, head, tile, places] += (ds.T @ k).flatten()
        here = slice(low, high)
        keep_scale = 1.0 if a["words"] is None else a["keep_scale"]
        for result, total in ((a["dk"], dk * a["scale"] * keep_scale), (a["dv"], dv * keep_scale)):
            assert result.is_contiguous() and result.shape[:3] == (n_batches, n_k, kv_heads)
            total = total[: here.stop - here.start, : result.shape[3]]
            result[batch, here, kv_head] = (result[batch, here, kv_head] + total if a["ADD"] else total).to(
                result.dtype
            )


def dq_in_register_order(state: Started, dq: Tensor, block_q: int, block_d: int) -> None:
    """Add `dq (b, s, h, d)` to the state's sum, as the kernels would."""
    assert state.dq is not None
    b, s, h, d = dq.shape
    tiles = state.dq.shape[2]
    padded = torch.zeros(b, tiles * block_q, h, block_d)
    padded[:, :s, :, :d] = dq
    whole = padded.view(b, tiles, block_q, h, block_d).permute(0, 3, 1, 2, 4).reshape(b, h, tiles, -1)
    state.dq[..., register_places(block_q, block_d).flatten()] += whole
