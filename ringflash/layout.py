"""Layouts: which positions of the global sequence a rank holds.

A layout gives each rank a tuple of runs `(start, step, length)`: the positions `start, start + step, ...`. The runs of
a rank are in ascending order and don't interleave, so the rows of every shard are in ascending order of position.

    layout       4 ranks, 8 tokens       runs of rank 0
    contiguous   01 23 45 67             (0, 1, 2)
    zigzag       07 16 25 34             (0, 1, 1) (7, 1, 1)
    striped      04 15 26 37             (0, 4, 2)
    balanced     contiguous, but for blocks that ranks swap until all have equal work under a mask

    contiguous-by-document, zigzag-by-document: each packed document is cut so, and ranks hold their part of every one
"""

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from .mask import Mask, count_seen


class Run(NamedTuple):
    """The positions `start, start + step, ...`, `length` of them."""

    start: int
    step: int
    length: int


Runs = tuple[Run, ...]
CONTENT = 1.05  # the work of the busiest rank over the mean that "balanced" leaves as it is
BALANCED = 1.02  # and what it aims at where that is exceeded
TILE = 128  # tokens, as most tiles of the kernels have: blocks are multiples of it, or there are
FEW = 8  # blocks of a rank at most, of any size
COUNTED_PIECES = 1024  # of the sequence at most, by which is counted what ranks need of each other
MOST_SPARED = 32  # swaps that spare others' rows: each takes the host time, with every batch


def _split(seq_len: int, parts: int, index: int) -> Run:
    """Part `index` of `seq_len` tokens cut in `parts` nearly equal pieces."""
    begin, end = seq_len * index // parts, seq_len * (index + 1) // parts
    return Run(begin, 1, end - begin)


def _contiguous(seq_len: int, world_size: int, rank: int, layout_mask: Mask | None) -> list[Run]:
    return [_split(seq_len, world_size, rank)]


def _zigzag(seq_len: int, world_size: int, rank: int, layout_mask: Mask | None) -> list[Run]:
    """One piece from each end: under a causal mask every rank has the same work (and equal rows when they divide)."""
    return [_split(seq_len, 2 * world_size, part) for part in (rank, 2 * world_size - 1 - rank)]


def _striped(seq_len: int, world_size: int, rank: int, layout_mask: Mask | None) -> list[Run]:
    return [Run(rank, world_size, (seq_len - rank + world_size - 1) // world_size)]


def _balanced(seq_len: int, world_size: int, rank: int, layout_mask: Mask | None) -> list[Run]:
    assert layout_mask is not None
    return _deal(seq_len, world_size, layout_mask)[rank]


def _by_document(layout: str, seq_len: int, world_size: int, rank: int, layout_mask: Mask | None) -> list[Run]:
    assert layout_mask is not None and layout_mask.cu_seqlens is not None
    pieces, parts = world_size * (2 if layout == "zigzag" else 1), []
    for start, end in pairwise(layout_mask.cu_seqlens):
        if (end - start) % pieces:
            raise ValueError(
                f"{layout}-by-document wants documents that divide by {pieces}, got one of {end - start} tokens"
            )
        for run in LAYOUTS[layout](end - start, world_size, rank, None):
            parts.append(Run(start + run.start, run.step, run.length))
    return parts


LAYOUTS: dict[str, Callable[[int, int, int, Mask | None], list[Run]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
    "balanced": _balanced,
}
BY_DOCUMENT = {f"{layout}-by-document": partial(_by_document, layout) for layout in ("contiguous", "zigzag")}
WANT_MASK = ("balanced", *BY_DOCUMENT)  # and give ranks as many rows as "contiguous" does


@lru_cache(maxsize=4096)
def layout_runs(layout: str, seq_len: int, world_size: int, rank: int, layout_mask: Mask | None = None) -> Runs:
    """The runs that `rank` holds; empty when the sequence is too short to give it a row.

    `layout_mask` is the mask that the layouts of WANT_MASK go by, and no other.

    Raises `ValueError` for an unknown layout, a negative length, a rank outside the world, or documents of another
    length or that can't be cut.
    """
    _check_layout(layout, seq_len, world_size, rank)
    if layout_mask is not None:
        layout_mask.check_fits(seq_len, seq_len)
    return merge_runs((LAYOUTS | BY_DOCUMENT)[layout](seq_len, world_size, rank, layout_mask))


def rows_held(layout: str, seq_len: int, world_size: int, rank: int) -> int:
    """How many rows `rank` holds, under any mask. A compiler may trace it, with a length that it leaves open."""
    count = _count_held if torch.compiler.is_compiling() else _kept_count
    return count(layout, seq_len, world_size, rank)


def _count_held(layout: str, seq_len: int, world_size: int, rank: int) -> int:
    _check_layout(layout, seq_len, world_size, rank)
    runs = LAYOUTS["contiguous" if layout in WANT_MASK else layout](seq_len, world_size, rank, None)
    return sum(run.length for run in runs)  # unmerged: to compare runs would bind an open length


_kept_count = lru_cache(maxsize=1024)(_count_held)


def _check_layout(layout: str, seq_len: int, world_size: int, rank: int) -> None:
    if layout not in LAYOUTS and layout not in BY_DOCUMENT:
        raise ValueError(f"layout must be one of {sorted(LAYOUTS | BY_DOCUMENT)}, got {layout!r}")
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")


def merge_runs(parts: list[Run]) -> Runs:
    """The same positions in as few runs: empty runs go, and two of one step that touch are one."""
    runs: list[Run] = []
    for run in parts:
        if run.length == 0:
            continue
        if runs and (runs[-1].start + runs[-1].step * runs[-1].length, runs[-1].step) == (run.start, run.step):
            run = Run(runs[-1].start, run.step, runs.pop().length + run.length)
        runs.append(run)
    return tuple(runs)


@lru_cache(maxsize=64)
def _deal(seq_len: int, world_size: int, mask: Mask) -> list[list[Run]]:
    """The pieces of each rank in the balanced layout.

    A query's work is half the keys that it sees, and half those of the tiles that hold some: the time that tiles take,
    but that pairs are to be within CONTENT too. Where they are not, pairs alone are balanced.
    """
    pairs = count_seen(mask, torch.arange(seq_len, device="cpu"), seq_len)
    runs = _deal_work(pairs + _count_tiles(mask, seq_len) * TILE, world_size, mask)
    load = [sum(int(pairs[start : start + length].sum()) for start, _, length in of_rank) for of_rank in runs]
    return runs if max(load) * world_size <= CONTENT * sum(load) else _deal_work(pairs, world_size, mask)


def _count_tiles(mask: Mask, seq_len: int) -> Tensor:
    """How many tiles of TILE keys each query's block of TILE queries sees something of."""
    low = torch.arange(0, seq_len, TILE, device="cpu")
    high = (low + TILE - 1).clamp(max=seq_len - 1)
    begin, end = mask.first(low).clamp(min=0), mask.last(high).clamp(max=seq_len)
    return ((end + TILE - 1) // TILE - begin // TILE).clamp(min=1).repeat_interleave(TILE)[:seq_len]


def _deal_work(work: Tensor, world_size: int, mask: Mask) -> list[list[Run]]:
    """As `_deal`, by the work of each query under the mask.

    Where the contiguous one is not good enough, the sequence is cut in blocks of one size, of which each rank gets as
    many, one behind the other. Then the busiest rank swaps a block with another, again and again, until it is within
    BALANCED of the mean (see `_even_out`). If that fails blocks are halved. So rows are equal, and ranks keep most of
    what lies together: little of a shard is seen by others, and shards are few runs. In the end blocks are swapped that
    spare the rank that needs most of others (see `_spare`). What is left at the end is cut evenly beforehand.
    """
    seq_len = len(work)
    until = torch.cat([work.new_zeros(1), work.cumsum(0)])
    rows = seq_len // world_size
    most = max(rows // TILE, min(rows, FEW), 1)  # blocks of a rank
    blocks = 1
    while True:
        size = rows // blocks
        size -= size % TILE if size > TILE else 0
        tail = world_size * blocks * size
        ends = [_split(seq_len - tail, world_size, rank) for rank in range(world_size)]
        ends = [Run(tail + run.start, 1, run.length) for run in ends]
        load = torch.stack([until[run.start + run.length] - until[run.start] for run in ends])
        weight = until[torch.arange(world_size * blocks + 1, device="cpu") * size].diff()
        load += weight.reshape(world_size, blocks).sum(1)
        limit = int((CONTENT if blocks == 1 else BALANCED) * load.double().mean())
        owners = _even_out(weight, load, limit)
        if blocks == most or load.max() <= limit:
            break
        blocks = min(blocks * 2, most)
    if blocks > 1:
        begin, dealt = torch.arange(world_size * blocks, device="cpu") * size, world_size * blocks * size
        first, last = mask.first(begin).clamp(min=0), mask.last(begin + size - 1).clamp(max=dealt) - 1
        pieces = max(min(size // TILE, COUNTED_PIECES // len(begin)), 1)
        seen_pieces = (x // size * pieces + x % size * pieces // size for x in (first, last))
        _spare(owners, weight, load, limit, pieces, *seen_pieces)
    return [
        [*(Run(index * size, 1, size) for index in (owners == rank).nonzero()[:, 0].tolist()), ends[rank]]
        for rank in range(world_size)
    ]


def _even_out(weight: Tensor, load: Tensor, limit: int) -> Tensor:
    """The owner of each block, when ranks have swapped blocks until no `load`, which is changed, is above the limit, or
    no swap helps the busiest one. Of the swaps that go nearest to the limit it is one that leaves the fewest runs.

    `weight` is that of each block, of which every rank has as many in the beginning; `load` has them in it.
    """
    owners = torch.arange(len(load), device="cpu").repeat_interleave(len(weight) // len(load))
    nobody = owners.new_tensor([-1])
    while load.max() > limit:
        busiest = int(load.argmax())
        mine, others = (owners == busiest).nonzero()[:, 0], (owners != busiest).nonzero()[:, 0]
        them = owners[others]
        less = weight[mine, None] - weight[others]
        worst = torch.maximum(load[busiest] - less, load[them] + less)
        if len(others) == 0 or worst.min() >= load[busiest]:
            break
        beside = torch.stack([torch.cat([nobody, owners[:-1]]), torch.cat([owners[1:], nobody])])  # whose they are

        def touching(blocks: Tensor, whose: Tensor | int, beside: Tensor = beside) -> Tensor:
            return (beside[:, blocks] == whose).sum(0)

        runs = touching(mine, busiest)[:, None] + touching(others, them)
        runs -= (beside[:, mine, None] == them).sum(0) + touching(others, busiest)
        over = (worst - limit).clamp(min=0)
        runs = runs.masked_fill(over > over.min(), 5)  # more than there can be
        best = worst.masked_fill(runs > runs.min(), int(load.max())).argmin()
        i, j = mine[best // len(others)], others[best % len(others)]
        load[owners[j]] += weight[i] - weight[j]
        load[busiest] -= weight[i] - weight[j]
        owners[i], owners[j] = owners[j].clone(), busiest
    return owners


def _spare(owners: Tensor, weight: Tensor, load: Tensor, limit: int, pieces: int, first: Tensor, last: Tensor) -> None:
    """Swap a block of the rank that needs most of others for one of another rank, again and again, as long as both then
    need less than that one did, and no `load` rises above the limit, or the largest.

    A block is so many `pieces`, and `first` and `last` are those of the whole sequence that each block sees. `owners`
    and `load` are changed.
    """
    piece = torch.arange(len(owners) * pieces, device="cpu")
    sees = ((first[:, None] <= piece) & (piece <= last[:, None])).float()  # 0 and 1, of which sums are exact
    holds = torch.eye(len(owners), device="cpu").repeat_interleave(pieces, 1)
    limit = max(limit, int(load.max()))
    for _ in range(MOST_SPARED):
        owned = torch.nn.functional.one_hot(owners, len(load)).T.float()  # of each rank, blocks and then pieces
        owns, wanted = owned @ holds, owned @ sees
        needs = ((wanted > 0) & (owns == 0)).sum(1)
        worst = int(needs.argmax())
        mine, others = (owners == worst).nonzero()[:, 0], (owners != worst).nonzero()[:, 0]
        after = _needs_after(sees, holds, wanted[worst], owns[worst], mine, others)
        less = weight[mine, None] - weight[others]
        fits = torch.maximum(load[worst] - less, load[owners[others]] + less) <= limit
        fits &= after < needs[worst]
        useful = fits.any(0).nonzero()[:, 0]  # few, and the rest takes longest
        others, them, after, fits = others[useful], owners[others[useful]], after[:, useful], fits[:, useful]
        theirs = _needs_after(sees, holds, wanted[them], owns[them], others, mine).T
        most = torch.maximum(after, theirs).masked_fill(~fits, len(piece))
        if not (most < needs[worst]).any():
            return
        best = (most * 2 * len(piece) + after + theirs).argmin()
        i, j = mine[best // len(others)], others[best % len(others)]
        load[owners[j]] += weight[i] - weight[j]
        load[worst] -= weight[i] - weight[j]
        owners[i], owners[j] = owners[j].clone(), worst


def _needs_after(sees: Tensor, holds: Tensor, wanted: Tensor, owns: Tensor, gone: Tensor, come: Tensor) -> Tensor:
    """How many pieces of others a rank needs once block `gone[i]` of it was swapped for `come[j]`: `(gone, come)`.

    `wanted` and `owns` are those of the rank, or for each `i` of the rank that has `gone[i]`: by how many of its blocks
    a piece is seen, and whether it is its own.
    """
    still = (wanted - sees[gone] > 0).float()  # seen by blocks that stay
    away = 1 - owns + holds[gone]
    new = (away * (1 - still)) @ sees[come].T
    no_more = (holds * sees).sum(1)[come] + still @ (holds * (1 - sees))[come].T  # pieces of what comes
    return (away * still).sum(1, keepdim=True) + new - no_more


def count_rows(runs: Runs) -> int:
    return sum(run.length for run in runs)


def cut_runs(runs: Runs, begin: int, end: int) -> Runs:
    """The runs of the rows `[begin, end)`: `cut_runs(((0, 1, 4), (12, 1, 4)), 3, 6) -> ((3, 1, 1), (12, 1, 2))`."""
    cut, first_row = [], 0
    for run in runs:
        low, high = max(begin - first_row, 0), min(end - first_row, run.length)
        if low < high:
            cut.append(Run(run.start + run.step * low, run.step, high - low))
        first_row += run.length
    return tuple(cut)


def runs_to_positions(runs: Runs, device: torch.device | str = "cpu") -> Tensor:
    """Global positions in row order: int64 `(rows,)`, strictly ascending."""
    parts = [torch.arange(r.start, r.start + r.step * r.length, r.step, device=device) for r in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


@lru_cache(maxsize=256)
def _columns(runs: Runs) -> Tensor:
    """start, step, length and first row of each run: int64 `(4, runs)`."""
    start, step, length = torch.tensor(runs, dtype=torch.int64, device="cpu").reshape(len(runs), 3).T
    return torch.stack([start, step, length, length.cumsum(0) - length])


def positions_of(runs: Runs, rows: Tensor) -> Tensor:
    """Positions of the given rows of a shard: int64, like `rows`."""
    start, step, _, first_row = _columns(runs)
    run = torch.searchsorted(first_row[1:], rows, right=True)
    return start[run] + step[run] * (rows - first_row[run])


def count_below(runs: Runs, position: Tensor) -> Tensor:
    """How many positions of `runs` are smaller than each of `position`: int64, like `position`."""
    if len(runs) <= 4:  # a pass for each is faster than a search
        count = torch.zeros_like(position)
        for run in runs:
            below = position - run.start
            if run.step > 1:
                below = (below + run.step - 1).div(run.step, rounding_mode="floor")
            count += below.clamp_(0, run.length)
        return count
    start, step, length, first_row = _columns(runs)
    run = torch.searchsorted(start[1:], position)
    below = (position - start[run] + step[run] - 1).div(step[run], rounding_mode="floor")
    return first_row[run] + torch.minimum(below.clamp(min=0), length[run])


def take_rows(x: Tensor, runs: Runs, dim: int) -> Tensor:
    """The rows of the whole sequence `x` that `runs` name, along `dim`: a new contiguous tensor."""
    parts = []
    for run in runs:
        index = [slice(None)] * x.ndim
        index[dim] = slice(run.start, run.start + run.step * run.length, run.step)
        parts.append(x[tuple(index)])
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def put_rows(x: Tensor, rows: Tensor, runs: Runs, dim: int) -> None:
    """Write `rows` into the whole sequence `x` at the positions of `runs`: the inverse of `take_rows`."""
    begin = 0
    for run in runs:
        index = [slice(None)] * x.ndim
        index[dim] = slice(run.start, run.start + run.step * run.length, run.step)
        x[tuple(index)].copy_(rows.narrow(dim, begin, run.length))
        begin += run.length
