"""Sums of dK and dV on their way home: what the backward pass attends to at a time, where its sums lie, and which rank
they go to next. Says what goes where, and leaves to the transports of `comm.py` how. Knows nothing of attention.

Legend: as in `comm.py`; `index` counts the groups of a pass.

Note [dK and dV come home last]. Backward, a rank visits its own shard last. The rank above is the first to sum the
gradients of a shard: each receives what those before it have summed, adds its own share in place, and sends it on. From
the last of them, `hops` ranks away, they go home, where the owner adds its share. So nothing travels after the last
visit. Unless shards are large the owner's share lies apart, and is added to what came home as both are rounded: that
visit waits for nothing, and memory for one more shard's sums is spent.

Note [Halves]. A kernel can't add to what has yet to arrive, and the next rank waits for what it adds. So backward,
large shards are visited half by half: the sums of one half travel while those of the other are added to. Of three
buffers of half a shard, one is added to, one is sent, and one is received into. Where nobody waits, a shard is visited
whole, as two launches of half a causal shard take 1.25 times as long as one of 8k rows: the own one when its sums lie
apart, and then also that of the only other rank.

Note [Straight home]. Under documents or a window a rank sees little of the others, of some of them nothing, and sums
that go round would stop at every rank in between. And few keys don't occupy a GPU, nor does the host keep up with many
short launches. So where what any rank sees of all the others is little (STRAIGHT_SHARDS and STRAIGHT_BYTES of sums at
most), it is attended to in one launch, the first. Where shards make one hop alone there is nothing in between: then
that is half a shard at most, of those that would go in halves. And where shards are small (LAP_SHARDS in LAP_BYTES of
sums), and no documents make a new plan with every batch, it is in laps: a launch for as many shards as LAP_BYTES hold.
Sums of a lap go to the ranks whose shards they are of while the next lap is attended to, or the own shard; what came is
added to the own sums, in the order of steps. One buffer is added to while another is sent, each of up to LAP_BYTES;
what comes takes as much, and what messages are sent from as much again. The rule is about the plans of all ranks, so it
is one for all.
"""

import math
from collections import deque
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

import torch
from torch import Tensor

from .comm import Pending, RowShape, Transport, Ways, rows_of, saying, wait_for
from .merge import Sums, empty_like
from .nvlink import Flat, Moves
from .plan import Group, Lap, Piece, Plan, Straight, go_straight, part_rows, split_visits
from .span import span

HALVED_BYTES = 2**26  # sums of a shard that travel in halves: see Note [Halves]
APART_BYTES = 2**27  # most sums of the own shard that lie apart: see Note [dK and dV come home last]
STRAIGHT_BYTES = 2**28  # most sums of others that go straight home: see Note [Straight home]
STRAIGHT_SHARDS = 2  # most of them in shards: to add more to the own sums costs as much as it spares
LAP_BYTES = 2**27  # most sums of a lap
LAP_SHARDS = 8  # of so many shards or more
LAP_RANKS = 128  # in a ring of so many at most: laps of 128 ranks take about 2 s to plan, and four times that for twice


class Packed(NamedTuple):
    """Sums of dK of some rows and then those of dV in one flat buffer: kernels want what they add to contiguous."""

    buffer: Flat
    shape: RowShape

    def views(self, begin: int, end: int, rows: int) -> tuple[Tensor, Tensor]:
        """Rows `[begin, end)` of dK and of dV, of `rows` each."""
        return self.buffer.see(_sums_of, self.shape, begin, end, rows)


def _sums_of(buffer: Flat, shape: RowShape, begin: int, end: int, rows: int) -> tuple[Tensor, Tensor]:
    dk = rows_of(buffer.x, shape, rows, shape.k_dim)
    dv = rows_of(buffer.x[dk.numel() :], shape, rows, shape.v_dim)
    return dk[:, begin:end], dv[:, begin:end]


class Halves(NamedTuple):
    """What the backward pass attends to at a time: see Notes [dK and dV come home last] and [Halves]."""

    groups: tuple[Group, ...]
    parts: int  # of every shard but the own one, which has as many, or one if its sums lie apart
    is_apart: bool


def halved(plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype) -> Halves:
    """How the backward pass goes about a plan, with sums in `dtype`."""
    nbytes = RowShape.of(k, v).size(plan.most_rows) * dtype.itemsize
    is_apart = nbytes <= APART_BYTES
    parts = 2 if nbytes >= HALVED_BYTES and plan.hops > is_apart else 1
    return Halves(split_visits(plan, parts, 1 if is_apart else parts), parts, is_apart)


class Gradients:
    """dK and dV on their way round the ring: see Notes [dK and dV come home last] and [Halves].

    Once for each group, in order: `arrive(index)`, then `take()`. In the end `home()`.
    """

    def __init__(self, plan: Plan, halves: Halves, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport):
        self.transport = transport
        self.groups, self.parts, self.is_apart = halves
        self.like, self.dtype, shape = (k, v), dtype, RowShape.of(k, v)
        self.legs = _legs(plan, self.parts, 1 if self.is_apart else self.parts, shape)
        # before any visit: the own one may run beside others, and memory that those freed could still be in use
        self.own = Sums(*(empty_like(x, dtype) for x in (k, v)), fresh=True) if self.is_apart else None
        size = shape.size(-(-plan.most_rows // self.parts))
        # of this group, of the others of its step, and one for what comes next
        self.buffers = [Packed(x, shape) for x in transport.buffers(self.parts + 1, size, dtype)]
        self.pending: Pending | None = None
        self.leg: _Leg | None = None  # on which what is pending travels
        self.index = 0

    def _wait(self) -> None:
        if self.pending is not None and self.leg is not None:
            wait_for(self.pending, self.leg.words, self.leg.step)
            self.pending = None

    def _send_on(self, index: int) -> None:
        """Start to send what is finished, and to bring here what the same part of the next step adds to."""
        self.leg = leg = self.legs[index]
        send = self.buffers[0].buffer.see(Flat.first, leg.size)
        receive = self.buffers[-1].buffer.see(Flat.first, leg.next_size)
        with span("exchange of dK and dV with ranks {} and {}", leg.to, leg.source):
            try:
                self.pending = self.transport.exchange(send, receive, leg.to, leg.source, tag=index + 1)
            except RuntimeError as error:
                raise saying(error, "starting to bring " + leg.words, leg.step) from error

    def arrive(self, index: int) -> None:
        """Start to bring here what was summed before for this group, or, with halves, for the next."""
        if index > 0:
            self._wait()
            if self.groups[index - 1].last_step > 0:  # else it is at home
                self._send_on(index - 1)
            self.buffers.append(self.buffers.pop(0))
        self.index = index

    def take(self) -> Sums:
        """The running sums of this group, once they are here: of the rows that its visit is about."""
        group = self.groups[self.index]
        if group.last_step == 0 and self.own is not None:
            return self.own
        if self.parts == 1:
            self._wait()
        sums, leg = self.buffers[0], self.legs[self.index]
        fresh = self.index < self.parts
        if fresh and leg.end - leg.begin < leg.rows:  # the ranks that follow may see more
            sums.buffer.see(Flat.first, leg.size).zero_()
            fresh = False
        return Sums(*sums.views(leg.begin, leg.end, leg.rows), fresh)

    def home(self) -> tuple[Tensor, Tensor]:
        """This rank's own `(dk, dv)`, summed over all ranks, in the dtypes of k and v."""
        own = None if self.own is None else self.own[:2]
        self._wait()
        dk, dv = results = [empty_like(x) for x in self.like]
        for part in range(self.parts):  # results must not alias the buffers, which the next pass uses
            cut = part_rows(dk.shape[1], part, self.parts)
            rows, buffer = cut.stop - cut.start, self.buffers[part if self.is_apart else part - self.parts + 1]
            for i, theirs in enumerate(buffer.views(0, rows, rows)):
                into = results[i] if self.parts == 1 else results[i][:, cut]
                if own is None:
                    into.copy_(theirs)
                else:
                    torch.add(own[i] if self.parts == 1 else own[i][:, cut], theirs, out=into)
        self.transport.finish()
        return dk, dv


class _Leg(NamedTuple):
    """What a group adds to, and what travels once it was visited: the sums of its part of a shard, and those that the
    next visit of this part adds to."""

    begin: int  # its visit is about rows `[begin, end)` of the `rows` of its part
    end: int
    rows: int
    to: int  # rank
    source: int  # rank that has the others
    size: int  # elements that go, and that come
    next_size: int
    words: str  # what comes, for `step`
    step: int


@lru_cache(maxsize=256)
def _legs(plan: Plan, parts: int, own_parts: int, shape: RowShape) -> tuple[_Leg, ...]:
    """Of every group of `split_visits(plan, parts, own_parts)`."""
    found = []
    for index, group in enumerate(split_visits(plan, parts, own_parts)):
        step, part = group.last_step, index % parts
        if step < plan.hops:
            next_source, to, source = plan.source(step + 1), plan.rank + 1, plan.rank - 1
            words = "dK and dV at step {}"
        else:
            next_source, to, source = plan.rank, plan.rank - plan.hops, plan.rank + plan.hops
            words = "dK and dV, come home"
        cut, next_cut = (part_rows(plan.rows[rank], part, parts) for rank in (plan.source(step), next_source))
        begin, end = next(((piece.begin, piece.end) for piece in group.pieces), (cut.start, cut.start))
        rows, next_rows = cut.stop - cut.start, next_cut.stop - next_cut.start
        about = begin - cut.start, end - cut.start, rows
        peers = to % plan.world_size, source % plan.world_size
        found.append(_Leg(*about, *peers, shape.size(rows), shape.size(next_rows), words, step + 1))
    return tuple(found)


class OwnRows(NamedTuple):
    """Rows of the own dK or dV."""

    which: int  # 0 or 1
    begin: int
    end: int
    shape: tuple[int, int, int, int]
    size: int


class _Home(NamedTuple):
    """How the sums of a lap go home, and what comes.

    `added` says what that is, in order: from so many ranks the same `places`, none of which overlap.
    """

    ways: Ways
    size: int  # elements that come
    added: tuple[tuple[int, tuple[OwnRows, ...]], ...]


@lru_cache(maxsize=1024)
def _ways_home(lap: Lap, shape: RowShape) -> _Home:
    legs: list[tuple[int, int, tuple[tuple[int, int], ...], int]] = []
    copies: list[tuple[int, int, int]] = []
    sizes: list[int] = []
    came: list[tuple[OwnRows, ...]] = []
    for (to, source), sent, received, their_rows in zip(*lap[1:], strict=True):
        ranges = _ranges(received, their_rows, shape)
        copies += [(len(sizes) + i, source, begin) for i, (begin, _) in enumerate(ranges)]
        sizes += [size for _, size in ranges]
        came.append(tuple(_own_rows(shape, which, *piece[1:3]) for which in (0, 1) for piece in received))
        sent = tuple(_ranges(sent, lap.group.rows, shape))
        legs.append((to, source, sent, sum(size for _, size in ranges)))
    added = tuple((len(list(steps)), places) for places, steps in groupby(filter(None, came)))
    return _Home(Ways(tuple(legs), Moves(tuple(sizes), tuple(copies))), sum(sizes), added)


def _own_rows(shape: RowShape, which: int, begin: int, end: int) -> OwnRows:
    batches, heads, *dims = shape
    rows = batches, end - begin, heads, dims[which]
    return OwnRows(which, begin, end, rows, math.prod(rows))


def _ranges(pieces: tuple[Piece, ...], rows: int, shape: RowShape) -> list[tuple[int, int]]:
    """Where in `Packed` sums of `rows` rows those of the pieces lie, `(begin, size)`: of dK and then of dV, piece by
    piece, batch by batch."""
    found, start = [], 0
    for dim in (shape.k_dim, shape.v_dim):
        row = shape.heads * dim
        for piece, batch in product(pieces, range(shape.batches)):
            found.append((start + (batch * rows + piece.place) * row, (piece.end - piece.begin) * row))
        start += shape.batches * rows * row
    return found


class StraightGradients:
    """dK and dV that go straight home: see Note [Straight home]. Used as `Gradients`."""

    is_apart = True

    def __init__(self, straight: Straight, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport):
        self.transport = transport
        self.laps, self.groups = straight.laps, straight.groups
        self.like, self.dtype, self.shape = (k, v), dtype, RowShape.of(k, v)
        self.own = [empty_like(x, dtype) for x in self.like]  # before any visit, as that of `Gradients`
        self.is_fresh = True  # nothing is there yet
        buffers = transport.buffers(min(len(self.laps), 2), self.shape.size(straight.most_rows), dtype)
        self.buffers = [Packed(x, self.shape) for x in buffers]  # of this lap, and of the one before
        self.on_the_way: deque[tuple[Pending, _Home, Tensor]] = deque()  # what comes in a lap, and where it lands
        self.index = 0

    def arrive(self, index: int) -> None:
        """The sums of the lap before this group go home."""
        self.index = index
        if index == 0:
            return
        home = _ways_home(self.laps[index - 1], self.shape)
        come = self.like[0].new_empty(home.size, dtype=self.dtype)
        with span("dK and dV go home"):
            try:
                pending = self.transport.collect(self.buffers[0].buffer, home.ways, come)
            except RuntimeError as error:
                raise saying(error, "starting to bring dK and dV home") from error
        self.on_the_way.append((pending, home, come))
        self.buffers.reverse()

    def take(self) -> Sums:
        """Where the sums of this group go: of the rows that its visit is about."""
        if self.index == len(self.laps):
            fresh, self.is_fresh = self.is_fresh, False
            return Sums(*self.own, fresh=fresh)
        if len(self.on_the_way) == 2:  # the older one went from the buffer that this lap takes
            self._add()
        rows = self.groups[self.index].rows
        return Sums(*self.buffers[0].views(0, rows, rows), fresh=True)

    def home(self) -> tuple[Tensor, Tensor]:
        """This rank's own `(dk, dv)`, summed over all ranks, in the dtypes of k and v."""
        while self.on_the_way:
            self._add()
        self.transport.finish()
        dk, dv = (x.to(like.dtype) for x, like in zip(self.own, self.like, strict=True))
        return dk, dv

    def _add(self) -> None:
        """Add what came in the oldest lap, in the order of steps: all places of a rank in one launch."""
        if self.is_fresh:
            torch._foreach_zero_(self.own)
            self.is_fresh = False
        pending, home, come = self.on_the_way.popleft()
        wait_for(pending, "dK and dV, come home")
        for ranks, places in home.added:
            sizes = [place.size for place in places]
            theirs, come = come.split_with_sizes((ranks * sum(sizes), come.numel() - ranks * sum(sizes)))
            if ranks > 1:
                theirs = theirs.view(ranks, -1).sum(0)
            parts = [x.view(place.shape) for x, place in zip(theirs.split_with_sizes(sizes), places, strict=True)]
            torch._foreach_add_([self.own[place.which][:, place.begin : place.end] for place in places], parts)


def way_home(plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype) -> Straight | Halves:
    """What the backward pass attends to at a time, its `groups`, and how their sums, in `dtype`, go home."""
    return straight_of(plan, k, v, dtype) or halved(plan, k, v, dtype)


def gradients(
    plan: Plan, way: Straight | Halves, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport
) -> Gradients | StraightGradients:
    """Sums of dK and dV that go that way. Makes the transport's buffers, as every rank does."""
    if isinstance(way, Straight):
        return StraightGradients(way, k, v, dtype, transport)
    return Gradients(plan, way, k, v, dtype, transport)


def straight_of(plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype) -> Straight | None:
    """How sums go straight home, where that is better."""
    if plan.hops == 0:
        return None
    row_bytes = max(RowShape.of(k, v).size(1) * dtype.itemsize, 1)
    few_rows = STRAIGHT_BYTES // row_bytes
    if plan.hops == 1:  # they do anyway, but two halves are four launches
        is_halved = halved(plan, k, v, dtype).parts > 1
        return go_straight(plan, 1, min(few_rows, plan.most_rows // 2)) if is_halved else None
    straight = go_straight(plan, plan.hops, min(few_rows, STRAIGHT_SHARDS * plan.most_rows))
    lap_rows = LAP_BYTES // row_bytes
    lap_steps = lap_rows // max(plan.most_rows, 1)
    may_come_anew = plan.own_visit.mask.cu_seqlens is not None  # with every batch, and laps take long to plan
    is_soon_planned = plan.world_size <= LAP_RANKS and not may_come_anew
    if straight is None and is_soon_planned and lap_steps >= min(LAP_SHARDS, plan.hops):
        straight = go_straight(plan, min(lap_steps, plan.hops), lap_rows)
    return straight
