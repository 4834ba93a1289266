"""The plan: which shards a rank attends to, and what each block of rows sees in them. Pure and cached, integers only.

Legend: `rank` me, `step` 0, 1, ... of the ring, `source` the rank whose K/V is here at that step, `row` an index into a
shard, `position` an index into the global sequence.

Note [One contiguous range]. Positions ascend in every shard, and both ends of the mask's interval never decrease. So
the rows of a shard that a block of queries sees lie in one range, and so do the rows that all of its queries see:

    row      0 ... begin ... full_begin ... full_end ... end ... n
    seen     none        some            all          some    none

The queries that see a block of keys are one range too, and so are those that see all of it. Of one query row it is the
whole mask: `first <= key row < last` (`Visit.seen_rows`), so whoever masks a tile needs neither positions nor the mask.

Note [Whole tiles]. Of another shard come the rows that are seen here, and those beside them in the same tile. So where
rows of several shards lie one behind the other, each begins with a tile, as it does in its shard. Else a block of
queries whose own keys begin within a tile would see one tile more: under documents of mean length 2048, 8 ranks, that
was 3% of all tiles, and 4% of those of the rank that has most. Not where tiles of the shard are none of the sequence
(a run of its positions that begins within one), and not in short shards, of which it would be much.
"""

from bisect import bisect_left, bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial, wraps
from itertools import accumulate, chain, pairwise, product
from threading import Lock
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from .layout import (
    TILE,
    Run,
    Runs,
    count_below,
    count_rows,
    cut_runs,
    layout_runs,
    merge_runs,
    positions_of,
    runs_to_positions,
)
from .mask import Mask

GROWTH = 3  # how many times as many shards as the group before a group may have
HOLE = 128  # rows of a shard that nobody here sees between others, for which those are pieces of their own
LONG_SHARD = 8 * TILE  # rows: see Note [Whole tiles]
MOST_PIECES = 4  # of a shard in a group, each of which is a copy
TABLE_BYTES = 2**27  # of row tables kept at most, on the host and on a device each
Ranges = list[tuple[int, int]]  # `[begin, end)`, ascending


def source_rank(rank: int, step: int, world_size: int) -> int:
    """The rank whose K/V `rank` holds at `step`: shards move one rank up at every step."""
    return (rank - step) % world_size


@dataclass(frozen=True)
class Visit:
    """One rank attending to one source's K/V: queries at the positions `queries`, keys at the positions `keys`."""

    queries: Runs
    keys: Runs
    mask: Mask

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash((self.queries, self.keys, self.mask)))

    def __hash__(self) -> int:  # once: there may be thousands of runs, and every table of a visit is kept by it
        return vars(self)["_hash"]

    def key_ranges(self, block: int) -> Tensor:
        """What each block of `block` query rows sees in the keys: see `key_ranges`."""
        return key_ranges(self, block)

    def query_ranges(self, block: int) -> Tensor:
        """Which query rows see each block of `block` key rows: see `query_ranges`."""
        return query_ranges(self, block)

    def query_blocks(self, block: int, jump: int) -> Tensor:
        """Blocks of up to `block` query rows, and what each sees in the keys: see `query_blocks`."""
        return query_blocks(self, block, jump)

    def key_blocks(self, block: int, jump: int) -> Tensor:
        """Blocks of up to `block` key rows, and which query rows see each: see `key_blocks`."""
        return key_blocks(self, block, jump)

    def seen_rows(self) -> Tensor:
        """Which key rows each query row sees: see `row_ranges`."""
        return row_ranges(self)

    def positions(self) -> Tensor:
        """Positions of the query rows, and after them of the key rows: see `row_positions`."""
        return row_positions(self)

    @property
    def seen_keys(self) -> tuple[int, int]:
        """The key rows `[begin, end)` from the first to the last that any query sees."""
        seen = _seen_of(self)
        return (seen[0][0], seen[-1][1]) if seen else (0, 0)

    def seen_parts(self, hole: int) -> Ranges:
        """The key rows `[begin, end)` that queries see, in parts between which `hole` rows or more are not seen."""
        return _few_ranges(_seen_of(self), hole)

    @property
    def is_empty(self) -> bool:
        """Does no query here see any key?"""
        return not _seen_of(self)


class Piece(NamedTuple):
    """Rows `[begin, end)` of the shard of `step`; they lie from row `place` of what a group attends to."""

    step: int
    begin: int
    end: int
    place: int


@dataclass(frozen=True)
class Group:
    """What is attended to in one launch: the visible rows of a shard, of a half of one, or of several shards, without
    large holes.

    The keys of `visit` are the `pieces`, one after the other and in ascending order of position, whichever shards they
    are of: a visit as any other. Without a visit there are no pieces. `last_step` is the step of the last shard.
    """

    last_step: int
    visit: Visit | None
    pieces: tuple[Piece, ...]

    def __post_init__(self):
        object.__setattr__(self, "_hash", hash((self.last_step, self.visit, self.pieces)))

    def __hash__(self) -> int:  # once, as a visit's
        return vars(self)["_hash"]

    @cached_property
    def rows(self) -> int:
        return sum(piece.end - piece.begin for piece in self.pieces)


@dataclass(frozen=True, eq=False)  # plans are cached: the same one has the same identity
class Plan:
    """What `rank` does in one pass around the ring.

    `rows[r]` is the number of rows that rank `r` holds. `visits[step]` is the visit at that step, `None` where nothing
    of that source is visible here; step 0 is the rank's own shard, whole, and always a visit. Other visits are about
    the rows `needed[step]` of their source alone, from the first to the last that is visible here; `parts[step]` are
    the parts of those that are, between which HOLE rows or more are not (and see Note [Whole tiles]). There are
    `hops + 1` steps: shards stop moving when no rank has anything left to see. `plan_of(r)` is the plan of rank `r`,
    where there are others.
    """

    rank: int
    rows: tuple[int, ...]
    visits: tuple[Visit | None, ...]
    parts: tuple[tuple[tuple[int, int], ...], ...]
    plan_of: "Callable[[int], Plan] | None" = None

    @cached_property
    def needed(self) -> tuple[slice, ...]:
        return tuple(slice(parts[0][0], parts[-1][1]) if parts else slice(0, 0) for parts in self.parts)

    @cached_property
    def world_size(self) -> int:
        return len(self.rows)

    @cached_property
    def hops(self) -> int:
        return len(self.visits) - 1

    @cached_property
    def most_rows(self) -> int:
        """Of any rank."""
        return max(self.rows)

    @property
    def own_visit(self) -> Visit:
        """The visit to the rank's own shard."""
        visit = self.visits[0]
        assert visit is not None
        return visit

    def source(self, step: int) -> int:
        return source_rank(self.rank, step, self.world_size)


@lru_cache(maxsize=256)
def plan_ring(
    mask: Mask, layout: str, seq_len: int, rank: int, world_size: int, layout_mask: Mask | None = None
) -> Plan:
    """The plan of `rank` for self-attention over `seq_len` tokens laid out by `layout` over `world_size` ranks.

    `layout_mask` is the mask that the layout goes by, where it does.
    """
    shards = tuple(layout_runs(layout, seq_len, world_size, r, layout_mask) for r in range(world_size))
    visits: list[Visit | None] = [_whole_visit(shards, rank, 0, mask)]
    parts: list[tuple[tuple[int, int], ...]] = [((0, count_rows(shards[rank])),)]
    for step in range(1, _count_hops(shards, mask) + 1):
        whole = _whole_visit(shards, rank, step, mask)
        seen = tuple(_whole_tiles(whole.seen_parts(HOLE), whole.keys, 0, count_rows(whole.keys)))
        visits.append(Visit(whole.queries, cut_runs(whole.keys, seen[0][0], seen[-1][1]), mask) if seen else None)
        parts.append(seen)
    rows = tuple(count_rows(runs) for runs in shards)
    plan_of = partial(_plan_of, mask, layout, seq_len, world_size, layout_mask)
    return Plan(rank, rows, tuple(visits), tuple(parts), plan_of)


def _whole_tiles(parts: Ranges, keys: Runs, row: int, rows: int) -> Ranges:
    """Parts of a shard of so many rows, and the rest of the tiles that they begin and end in: see Note [Whole tiles].
    `keys` are its positions from row `row` on."""
    if rows < LONG_SHARD:
        return parts
    edges, wide = [*accumulate((run.length for run in keys), initial=row)], []

    def has_tiles(run: int) -> bool:
        return keys[run].step == 1 and (keys[run].start - edges[run]) % TILE == 0

    for begin, end in parts:
        first, last = bisect_right(edges, begin) - 1, bisect_left(edges, end) - 1
        low = max(begin // TILE * TILE, edges[first]) if has_tiles(first) else begin
        wide.append((low, min(-(-end // TILE) * TILE, edges[last + 1]) if has_tiles(last) else end))
    return _few_ranges(wide, hole=1)


def _whole_visit(shards: tuple[Runs, ...], rank: int, step: int, mask: Mask) -> Visit:
    return Visit(shards[rank], shards[source_rank(rank, step, len(shards))], mask)


@lru_cache(maxsize=256)  # once for the plans of all ranks
def _count_hops(shards: tuple[Runs, ...], mask: Mask) -> int:
    """The last step at which any rank sees anything."""
    ranks = range(len(shards))
    steps = (step for step in reversed(ranks) if not all(_whole_visit(shards, r, step, mask).is_empty for r in ranks))
    return next(steps, 0)


@lru_cache(maxsize=256)  # for all ranks; `plan_ring`'s own stay, however many those are: more is kept by them
def _plan_of(mask: Mask, layout: str, seq_len: int, world_size: int, layout_mask: Mask | None, rank: int) -> Plan:
    return plan_ring.__wrapped__(mask, layout, seq_len, rank, world_size, layout_mask)


@lru_cache(maxsize=256)
def plan_one(mask: Mask, query_len: int, key_len: int) -> Plan:
    """A ring of one. With unequal lengths the last query is aligned with the last key (bottom-right, as flash-attn)."""
    if mask.cu_seqlens_q is not None:
        queries, keys, mask = _align_documents(mask)
    else:
        queries = merge_runs([Run(key_len - query_len, 1, query_len)])
        keys = merge_runs([Run(0, 1, key_len)])
    return Plan(0, (key_len,), (Visit(queries, keys, mask),), (((0, key_len),),))


def _align_documents(mask: Mask) -> tuple[Runs, Runs, Mask]:
    """Positions for documents that have another number of queries than of keys: each gets as many as it has of the
    more, and the last query and the last key get the last of them. And the mask by those positions."""
    assert mask.cu_seqlens is not None and mask.cu_seqlens_q is not None
    queries, keys, ends = [], [], [0]
    for q, q_end, k, k_end in zip(
        mask.cu_seqlens_q, mask.cu_seqlens_q[1:], mask.cu_seqlens, mask.cu_seqlens[1:], strict=False
    ):
        end = ends[-1] + max(q_end - q, k_end - k)
        queries.append(Run(end - (q_end - q), 1, q_end - q))
        keys.append(Run(end - (k_end - k), 1, k_end - k))
        ends.append(end)
    return merge_runs(queries), merge_runs(keys), Mask(mask.left, mask.right, cu_seqlens=ends)


@lru_cache(maxsize=256)
def group_visits(plan: Plan, most_rows: int, first_rows: int, few_rows: int) -> tuple[Group, ...]:
    """The visits of a plan in few groups, every one of up to `GROWTH` times as many shards as the last.

    So a group can arrive while the one before it is computed, and merges are few. The first one is the rank's own
    shard, and with it the next that is visible where those are at most `first_rows` rows, which are waited for, and
    those behind it while all of them are at most `few_rows`. A group of several shards has `most_rows` rows at most,
    the first one twice that.
    Shards whose positions interleave (striped), or would lie in many pieces, are not grouped.
    Example: 8 ranks, full mask, any number of rows, few are none -> steps 0 1 | 2 3 4 5 6 7.
    """
    steps = deque(step for step, visit in enumerate(plan.visits) if step > 0 and visit is not None)
    groups, most = [], plan.world_size
    while steps or not groups:
        members = [steps.popleft() if groups else 0]
        group = _one_shard(plan, members[0])
        own_rows = group.rows
        while steps and len(members) < most:
            larger = _join(plan, [*members, steps[0]])
            if larger is None or len(larger.pieces) > MOST_PIECES * (len(members) + 1):
                break
            if larger.rows > (most_rows if groups else 2 * most_rows):
                break
            if not groups and larger.rows - own_rows > (first_rows if len(members) == 1 else few_rows):
                break
            group = larger
            members.append(steps.popleft())
        groups.append(group)
        most = GROWTH * len(members)
    return tuple(groups)


def _one_shard(plan: Plan, step: int) -> Group:
    needed = plan.needed[step]
    return Group(step, plan.visits[step], (Piece(step, needed.start, needed.stop, 0),))


def _join(plan: Plan, steps: list[int]) -> Group | None:
    """The shards of these steps in one group, or `None` where their positions interleave."""
    found: list[tuple[Run, int, int]] = []  # a run of keys, its step, its first row in the shard
    for step in steps:
        visit = plan.visits[step]
        assert visit is not None
        start = plan.needed[step].start
        for row, end in plan.parts[step]:
            for run in cut_runs(visit.keys, row - start, end - start):
                found.append((run, step, row))
                row += run.length
    keys: list[Run] = []
    pieces: list[Piece] = []
    for run, step, row in sorted(found):
        place = pieces[-1].place + pieces[-1].end - pieces[-1].begin if pieces else 0
        if keys and run.start <= keys[-1].start + keys[-1].step * (keys[-1].length - 1):
            return None
        if pieces and (pieces[-1].step, pieces[-1].end) == (step, row):
            pieces[-1] = pieces[-1]._replace(end=row + run.length)
        else:
            pieces.append(Piece(step, row, row + run.length, place))
        keys.append(run)
    first = plan.visits[steps[0]]
    assert first is not None
    return Group(steps[-1], Visit(first.queries, merge_runs(keys), first.mask), tuple(pieces))


class Lap(NamedTuple):
    """Steps of a backward pass that one launch attends to, and whose sums then go straight home.

    `group` is what is visible of their shards, without a visit where that is nothing. Its `last_step` is the last of
    the steps, whether or not anything of that shard is visible: so as much of K and V has passed before sums move, on
    every rank. (NCCL does one exchange after the other, and ranks whose order differs would wait for each other.)

    For each step, `peers` are the rank whose shard it is and the one whose shard of that step is this rank's; `sent`
    are the pieces of the group that are of that shard; `received` are those of this rank's shard in the other rank's
    group, which has `theirs` rows.
    """

    group: Group
    peers: tuple[tuple[int, int], ...]
    sent: tuple[tuple[Piece, ...], ...]
    received: tuple[tuple[Piece, ...], ...]
    theirs: tuple[int, ...]


class Straight(NamedTuple):
    """A backward pass whose sums go straight to the ranks whose shards they are of: some laps, the same steps on every
    rank, and then the rank's own shard. No rank's group in any lap has more than `most_rows`."""

    laps: tuple[Lap, ...]
    own: Group
    most_rows: int

    @property
    def groups(self) -> tuple[Group, ...]:
        return (*(lap.group for lap in self.laps), self.own)


@lru_cache(maxsize=256)
def go_straight(plan: Plan, lap_steps: int, most_rows: int) -> Straight | None:
    """How sums go straight home in laps of up to `lap_steps` steps; `None`, on every rank, where some rank would sum
    over or receive more than `most_rows` rows in a lap that are not its own, or would do so in many pieces."""
    if plan.hops == 0 or plan.plan_of is None:
        return None
    laps = [range(first, min(first + lap_steps, plan.hops + 1)) for first in range(1, plan.hops + 1, lap_steps)]
    groups: list[list[Group]] = []  # by rank and lap
    received = [[0] * plan.world_size for _ in laps]  # rows, by lap and rank
    for other in map(plan.plan_of, range(plan.world_size)):
        groups.append([])
        for steps, to in zip(laps, received, strict=True):
            needed = other.needed[steps.start : steps.stop]
            if sum(rows.stop - rows.start for rows in needed) > 2 * most_rows:  # with holes: soon found
                return None
            visible = [step for step in steps if other.visits[step] is not None]
            group = _join(other, visible) if visible else Group(steps[-1], None, ())
            if group is None or group.rows > most_rows or len(group.pieces) > MOST_PIECES * len(visible):
                return None
            groups[-1].append(replace(group, last_step=steps[-1]))
            for piece in group.pieces:
                to[other.source(piece.step)] += piece.end - piece.begin
    if max(chain.from_iterable(received)) > most_rows:
        return None

    def lap(number: int, steps: range) -> Lap:
        mine = groups[plan.rank][number]
        peers = [groups[source_rank(plan.rank, -step, plan.world_size)][number] for step in steps]
        return Lap(
            mine,
            tuple((plan.source(step), plan.source(-step)) for step in steps),
            tuple(_of_step(mine, step) for step in steps),
            tuple(_of_step(group, step) for group, step in zip(peers, steps, strict=True)),
            tuple(group.rows for group in peers),
        )

    most = max(group.rows for group in chain.from_iterable(groups))
    return Straight(tuple(lap(*x) for x in enumerate(laps)), _one_shard(plan, 0), most)


def _of_step(group: Group, step: int) -> tuple[Piece, ...]:
    return tuple(piece for piece in group.pieces if piece.step == step)


def part_rows(rows: int, part: int, parts: int) -> slice:
    """The rows of a part of a shard of `rows` rows."""
    return slice(rows * part // parts, rows * (part + 1) // parts)


@lru_cache(maxsize=256)
def split_visits(plan: Plan, parts: int, own_parts: int) -> tuple[Group, ...]:
    """Every step of a plan as `parts` visits, each about one part of the source's rows, and the rank's own shard last,
    as `own_parts` of them: steps 1, ..., hops, 0. Those of step 0 are always visits.
    """
    groups = []
    others = product(range(1, plan.hops + 1), range(parts), (parts,))
    for step, part, parts in (*others, *product((0,), range(own_parts), (own_parts,))):
        visit, needed = plan.visits[step], plan.needed[step]
        cut = part_rows(plan.rows[plan.source(step)], part, parts)
        begin, end = max(cut.start, needed.start), min(cut.stop, needed.stop)
        if visit is not None:
            visit = Visit(visit.queries, cut_runs(visit.keys, begin - needed.start, end - needed.start), visit.mask)
        if visit is not None and step > 0:
            low, high = visit.seen_keys
            if low < high:
                seen = [(begin + low, begin + high)]
                ((low, high),) = _whole_tiles(seen, visit.keys, begin, plan.rows[plan.source(step)])
                visit = Visit(visit.queries, cut_runs(visit.keys, low - begin, high - begin), visit.mask)
                begin, end = low, high
            else:
                visit = None
        groups.append(Group(step, visit, () if visit is None else (Piece(step, begin, end, 0),)))
    return tuple(groups)


@lru_cache(maxsize=1024)
def key_ranges(visit: Visit, block: int) -> Tensor:
    """For each block of `block` query rows, the range `begin, full_begin, full_end, end` of the keys that it sees.

    int32 `(blocks, 4)` on the CPU; `begin <= full_begin <= full_end <= end`. See Note [One contiguous range].
    Example: 4 causal queries on 4 keys in blocks of 2 -> `[[0, 0, 1, 2], [0, 0, 3, 4]]`.
    """
    return _seen_by_queries(visit, *_whole_blocks(count_rows(visit.queries), block))


@lru_cache(maxsize=1024)
def query_ranges(visit: Visit, block: int) -> Tensor:
    """For each block of `block` key rows, the range `begin, full_begin, full_end, end` of the queries that see it.

    As `key_ranges`. A key row is seen from the first query whose `last` is past it to the last whose `first` is not,
    and both ends ascend. Example: 4 causal queries on 4 keys in blocks of 2 -> `[[0, 1, 4, 4], [2, 3, 4, 4]]`.
    """
    return _seeing_keys(visit, *_whole_blocks(count_rows(visit.keys), block))


@lru_cache(maxsize=1024)
def query_blocks(visit: Visit, block: int, jump: int) -> Tensor:
    """What blocks of query rows see: int32 `(blocks, 6)` on the CPU, as `key_ranges` and the rows `[low, high)`.

    A block has up to `block` rows, and ends before a row whose keys begin `jump` keys or more behind those of the row
    before it: rows of a shard may be far apart, and a block is visited from the first key to the last. Example: of 4
    queries two see keys 0 and 1, two keys 8 and 9; blocks of 4, jump 6 -> `[[0, 0, 2, 2, 0, 2], [8, 8, 10, 10, 2, 4]]`.
    """
    if visit.mask.is_full:
        low, high = _whole_blocks(count_rows(visit.queries), block)
    else:
        first, last = row_ranges(visit)
        low, high = _cut_blocks(first, last, block, jump)
    return torch.column_stack([_seen_by_queries(visit, low, high), low, high]).to(torch.int32)


@lru_cache(maxsize=1024)
def key_blocks(visit: Visit, block: int, jump: int) -> Tensor:
    """Which query rows see blocks of key rows: int32 `(blocks, 6)` on the CPU, as `query_ranges` and the rows
    `[low, high)`. As `query_blocks`."""
    n_k = count_rows(visit.keys)
    if visit.mask.is_full:
        low, high = _whole_blocks(n_k, block)
    else:
        first, last = row_ranges(visit)
        key = torch.arange(n_k, dtype=torch.int32, device="cpu")
        begin, end = (torch.searchsorted(ends, key, right=True) for ends in (last, first))
        low, high = _cut_blocks(begin, torch.maximum(begin, end), block, jump)
    return torch.column_stack([_seeing_keys(visit, low, high), low, high]).to(torch.int32)


def _whole_blocks(n_rows: int, block: int) -> tuple[Tensor, Tensor]:
    """Rows `[low, high)` of blocks of `block` rows."""
    low = torch.arange(0, n_rows, block, device="cpu")
    return low, (low + block).clamp(max=n_rows)


def _cut_blocks(first: Tensor, last: Tensor, block: int, jump: int) -> tuple[Tensor, Tensor]:
    """Rows `[low, high)` of blocks of up to `block` rows, of which row `r` sees `[first[r], last[r])` of the others."""
    jumps = (first[1:] - last[:-1] >= jump).nonzero()[:, 0] + 1
    ends = [0, *jumps.tolist(), len(first)]
    parts = [_whole_blocks(end - begin, block) for begin, end in pairwise(ends)]
    low, high = (torch.cat([x + end for x, end in zip(xs, ends, strict=False)]) for xs in zip(*parts, strict=True))
    return low, high


def _seen_by_queries(visit: Visit, low: Tensor, high: Tensor) -> Tensor:
    """See `key_ranges`: of blocks of the query rows `[low, high)`."""
    begin, lowest_end = _seen_from(visit, positions_of(visit.queries, low))
    highest_begin, end = _seen_from(visit, positions_of(visit.queries, high - 1))
    return _ordered(begin, highest_begin, lowest_end, end)


def _seeing_keys(visit: Visit, low: Tensor, high: Tensor) -> Tensor:
    """See `query_ranges`: of blocks of the key rows `[low, high)`."""
    first, last = row_ranges(visit)
    low, highest = low.to(torch.int32), high.to(torch.int32) - 1
    return _ordered(
        begin=torch.searchsorted(last, low, right=True),
        full_begin=torch.searchsorted(last, highest, right=True),
        full_end=torch.searchsorted(first, low, right=True),
        end=torch.searchsorted(first, highest, right=True),
    )


def _ordered(begin: Tensor, full_begin: Tensor, full_end: Tensor, end: Tensor) -> Tensor:
    """The ranges as a table; where a block is seen by nothing, or not all of it by anything, those ends meet."""
    end = torch.maximum(end, begin)
    full_begin = torch.minimum(full_begin, end)
    full_end = torch.maximum(full_end, full_begin)
    return torch.stack([begin, full_begin, full_end, end], dim=1).to(torch.int32)


Kept = TypeVar("Kept", bound="Tensor | tuple[object, ...]")


def keep_by_bytes(limit: int) -> Callable[[Callable[..., Kept]], Callable[..., Kept]]:
    """As `lru_cache`, for tensors that may be large, or tuples of some: keeps `limit` bytes of results, and always
    the latest.

    A small one counts as 64 KiB, so that few are kept of those too.
    """

    def decorate(make: Callable[..., Kept]) -> Callable[..., Kept]:
        kept: OrderedDict[Hashable, Kept] = OrderedDict()
        lock = Lock()
        total = 0

        def tensors(result: object) -> Iterator[Tensor]:
            if isinstance(result, tuple):
                for x in result:
                    yield from tensors(x)
            elif isinstance(result, Tensor):
                yield result

        def cost(result: Kept) -> int:
            once = {id(x): x.nbytes for x in tensors(result)}  # launches of a visit share tables
            return max(sum(once.values()), 2**16)

        @wraps(make)
        def cached(*key: Hashable) -> Kept:
            nonlocal total
            try:
                kept.move_to_end(key)
                return kept[key]
            except KeyError:  # not there, or no more: others may be at it
                pass
            with lock:
                if (found := kept.get(key)) is not None:
                    return found
                made = kept[key] = make(*key)
                total += cost(made)
                while total > limit and len(kept) > 1:
                    total -= cost(kept.popitem(last=False)[1])
                return made

        return cached

    return decorate


@keep_by_bytes(TABLE_BYTES)
def row_ranges(visit: Visit) -> Tensor:
    """For each query row, the range of key rows that it sees: int32 `(2, rows)` on the CPU, contiguous.

    `[0]` is the first row seen, `[1]` one past the last; they are equal where nothing is seen, and neither ever
    decreases. Example: 3 causal queries on 3 keys -> `[[0, 0, 0], [1, 2, 3]]`.
    """
    return torch.stack(_seen_from(visit, runs_to_positions(visit.queries))).to(torch.int32)


@keep_by_bytes(TABLE_BYTES)
def row_positions(visit: Visit) -> Tensor:
    """The position of each query row, and then of each key row: int32 `(query rows + key rows,)` on the CPU.

    What depends on positions beside the mask asks for it: ALiBi and dropout.
    """
    return torch.cat([runs_to_positions(visit.queries), runs_to_positions(visit.keys)]).to(torch.int32)


def _seen_from(visit: Visit, position: Tensor) -> tuple[Tensor, Tensor]:
    """First key row that is seen from each of the query positions, and one past the last."""
    begin = count_below(visit.keys, visit.mask.first(position))
    return begin, torch.maximum(count_below(visit.keys, visit.mask.last(position)), begin)


def _seen_of(visit: Visit) -> Ranges:
    """The key rows that queries see. Runs are asked first: most pairs of many ranks are out of each other's reach."""
    reach = _reach(visit.queries, visit.mask)
    if not any(_reaches(visit.keys, begin, end) for begin, end in reach.tolist()):
        return []
    return [(begin, end) for begin, end in count_below(visit.keys, reach).tolist() if begin < end]


@lru_cache(maxsize=1024)
def _reach(queries: Runs, mask: Mask) -> Tensor:
    """The positions that queries see, whoever holds them, in few ranges `[begin, end)`: int64 `(ranges, 2)`."""
    position = runs_to_positions(queries)
    first, last = mask.first(position), mask.last(position)
    first, last = first[last > first], last[last > first]
    cuts = (first[1:] > last[:-1]).nonzero()[:, 0]
    return torch.stack([torch.cat([first[:1], first[cuts + 1]]), torch.cat([last[cuts], last[-1:]])], dim=1)


def _few_ranges(ranges: Ranges, hole: int) -> Ranges:
    """The same ranges, but those as one between which less than `hole` lies."""
    few: Ranges = []
    for begin, end in ranges:
        if few and begin - few[-1][1] < hole:
            begin = few.pop()[0]
        few.append((begin, end))
    return few


def _reaches(keys: Runs, begin: int, end: int) -> bool:
    """May one of the keys be at a position in `[begin, end)`?"""
    return any(run.start < end and begin < run.start + run.step * run.length for run in keys)
