"""The plan: which shards a rank attends to, and what each block of rows sees in them. Pure and cached, integers only.

Legend: `rank` me, `step` 0, 1, ... of the ring, `source` the rank whose K/V is here at that step, `row` an index into a
shard, `position` an index into the global sequence.

Note [One contiguous range]. Positions ascend in every shard, and both ends of the mask's interval never decrease. So
the rows of a shard that a block of queries sees lie in one range, and so do the rows that all of its queries see:

    row      0 ... begin ... full_begin ... full_end ... end ... n
    seen     none        some            all          some    none

The queries that see a block of keys are one range too, by the transposed mask. Of one query row it is the whole mask:
`first <= key row < last` (`Visit.seen_rows`), so whoever masks a tile needs neither positions nor the mask.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache, wraps
from threading import Lock

import torch
from torch import Tensor

from .layout import Run, Runs, count_below, count_rows, cut_runs, layout_runs, runs_to_positions
from .mask import Mask

TABLE_BYTES = 2**27  # of row tables kept at most, on the host and on a device each


def source_rank(rank: int, step: int, world_size: int) -> int:
    """The rank whose K/V `rank` holds at `step`: shards move one rank up at every step."""
    return (rank - step) % world_size


@dataclass(frozen=True)
class Visit:
    """One rank attending to one source's K/V: queries at the positions `queries`, keys at the positions `keys`."""

    queries: Runs
    keys: Runs
    mask: Mask

    def key_ranges(self, block: int) -> Tensor:
        """What each block of `block` query rows sees in the keys: see `block_ranges`."""
        return block_ranges(self.queries, self.keys, self.mask, block)

    def query_ranges(self, block: int) -> Tensor:
        """Which query rows see each block of `block` key rows: see `block_ranges`."""
        return block_ranges(self.keys, self.queries, self.mask.transposed, block)

    def seen_rows(self) -> Tensor:
        """Which key rows each query row sees: see `row_ranges`."""
        return row_ranges(self.queries, self.keys, self.mask)

    @property
    def seen_keys(self) -> tuple[int, int]:
        """The key rows `[begin, end)` from the first to the last that any query sees."""
        begin, _, _, end = self.key_ranges(count_rows(self.queries))[0].tolist()
        return begin, end

    @property
    def is_empty(self) -> bool:
        """Does no query here see any key?"""
        return not _sees_any(self.queries, self.keys, self.mask)


@dataclass(frozen=True)
class Plan:
    """What `rank` does in one pass around the ring.

    `rows[r]` is the number of rows that rank `r` holds. `visits[step]` is the visit at that step, `None` where nothing
    of that source is visible here; step 0 is the rank's own shard, whole, and always a visit. Other visits are about
    the rows `needed[step]` of their source alone, from the first to the last that is visible here. There are
    `hops + 1` steps: shards stop moving when no rank has anything left to see.
    """

    rank: int
    rows: tuple[int, ...]
    visits: tuple[Visit | None, ...]
    needed: tuple[slice, ...]

    @property
    def world_size(self) -> int:
        return len(self.rows)

    @property
    def hops(self) -> int:
        return len(self.visits) - 1

    def source(self, step: int) -> int:
        return source_rank(self.rank, step, self.world_size)


@lru_cache(maxsize=256)
def plan_ring(mask: Mask, layout: str, seq_len: int, rank: int, world_size: int) -> Plan:
    """The plan of `rank` for self-attention over `seq_len` tokens laid out by `layout` over `world_size` ranks."""
    shards = [layout_runs(layout, seq_len, world_size, r) for r in range(world_size)]

    def visit(rank: int, step: int) -> Visit:
        return Visit(shards[rank], shards[source_rank(rank, step, world_size)], mask)

    hops = world_size - 1
    while hops > 0 and all(visit(r, hops).is_empty for r in range(world_size)):
        hops -= 1
    visits: list[Visit | None] = [visit(rank, 0)]
    needed = [slice(0, count_rows(shards[rank]))]
    for step in range(1, hops + 1):
        whole = visit(rank, step)
        begin, end = (0, 0) if whole.is_empty else whole.seen_keys
        visits.append(None if whole.is_empty else Visit(whole.queries, cut_runs(whole.keys, begin, end), mask))
        needed.append(slice(begin, end))
    return Plan(rank, tuple(count_rows(runs) for runs in shards), tuple(visits), tuple(needed))


@lru_cache(maxsize=256)
def plan_one(mask: Mask, query_len: int, key_len: int) -> Plan:
    """A ring of one. With unequal lengths the last query is aligned with the last key (bottom-right, as flash-attn)."""
    queries = (Run(key_len - query_len, 1, query_len),) if query_len else ()
    keys = (Run(0, 1, key_len),) if key_len else ()
    return Plan(0, (key_len,), (Visit(queries, keys, mask),), (slice(0, key_len),))


@lru_cache(maxsize=1024)
def block_ranges(rows: Runs, others: Runs, mask: Mask, block: int) -> Tensor:
    """For each block of `block` rows, the range `begin, full_begin, full_end, end` of the `others` that it sees.

    int32 `(blocks, 4)` on the CPU; `begin <= full_begin <= full_end <= end`. See Note [One contiguous range].
    Example: 4 causal queries on 4 keys in blocks of 2 -> `[[0, 0, 1, 2], [0, 0, 3, 4]]`.
    """
    n_rows = count_rows(rows)
    lowest_row = torch.arange(0, n_rows, block)
    begin, lowest_end = _interval(_positions_at(rows, lowest_row), others, mask)
    highest_begin, end = _interval(_positions_at(rows, (lowest_row + block).clamp(max=n_rows) - 1), others, mask)
    end = torch.maximum(end, begin)
    full_begin = torch.minimum(highest_begin, end)
    full_end = torch.maximum(lowest_end, full_begin)
    return torch.stack([begin, full_begin, full_end, end], dim=1).to(torch.int32)


def keep_by_bytes(limit: int) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """As `lru_cache`, for tensors that may be large: keeps `limit` bytes of results, and always the latest.

    A small one counts as 64 KiB, so that few are kept of those too.
    """

    def decorate(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        kept: OrderedDict[Hashable, Tensor] = OrderedDict()
        lock = Lock()
        total = 0

        def cost(x: Tensor) -> int:
            return max(x.nbytes, 2**16)

        @wraps(make)
        def cached(*key: Hashable) -> Tensor:
            nonlocal total
            with lock:
                if key not in kept:
                    kept[key] = make(*key)
                    total += cost(kept[key])
                kept.move_to_end(key)
                while total > limit and len(kept) > 1:
                    total -= cost(kept.popitem(last=False)[1])
                return kept[key]

        return cached

    return decorate


@keep_by_bytes(TABLE_BYTES)
def row_ranges(rows: Runs, others: Runs, mask: Mask) -> Tensor:
    """For each row, the range of the `others` that it sees: int32 `(2, rows)` on the CPU, contiguous.

    `[0]` is the first row seen, `[1]` one past the last; they are equal where nothing is seen, and neither ever
    decreases. Example: 3 causal queries on 3 keys -> `[[0, 0, 0], [1, 2, 3]]`.
    """
    first, last = _interval(runs_to_positions(rows), others, mask)
    return torch.stack([first, torch.maximum(last, first)]).to(torch.int32)


def _interval(position: Tensor, others: Runs, mask: Mask) -> tuple[Tensor, Tensor]:
    """First row of `others` that is seen from each position, and one past the last (before the first: none is)."""
    first, last = mask.first(position), mask.last(position)
    begin = torch.zeros_like(position) if first is None else count_below(others, first)
    end = torch.full_like(position, count_rows(others)) if last is None else count_below(others, last)
    return begin, end


def _positions_at(runs: Runs, rows: Tensor) -> Tensor:
    """Positions of the given rows of a shard."""
    position = torch.zeros_like(rows)
    begin = 0
    for run in runs:
        position = torch.where(rows >= begin, run.start + run.step * (rows - begin), position)
        begin += run.length
    return position


@lru_cache(maxsize=4096)
def _sees_any(queries: Runs, keys: Runs, mask: Mask) -> bool:
    first, last = _interval(runs_to_positions(queries), keys, mask)
    return bool((last > first).any())
