"""Moving shards between ranks. Knows nothing of attention: packed buffers go round the ring, or are pulled out of it.

Legend: `rank` and every peer are ranks *within the group*; `step`, `source` as in `plan.py`.

Note [Two buffers]. What is attended to lies in one buffer, while what comes next lands in another, so memory does not
depend on the world size. By NVLink every rank publishes its shard once, and pulls of each source the rows that it
needs. By messages, whole shards go from rank to rank (K and V in one message, through two buffers more), and what is
needed of them is copied out as they pass.

Note [Groups]. Forward, every visit after the first merges with what is there, which costs memory traffic, and a launch
ends with idle multiprocessors. So shards that arrived meanwhile are attended to in one launch: 2, then 6 of 8. Their
rows land in ascending order of position, which makes them one visit like any other. The first launch has the rank's own
shard; to wait for a second one costs less by NVLink than a launch for each, unless that one is large: emulated, two
GPUs with 8k tokens each had an efficiency of 0.88 with two launches and have 0.98 with one (results/emulate_ring.csv).
Where a mask lets little of the others' shards be seen, all of that is waited for. All transports group alike, and give
the same bits.

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
most), it is attended to in one launch, the first. And where shards are small (LAP_SHARDS in LAP_BYTES of sums), and no
documents make a new plan with every batch, it is in laps: a launch for as many shards as LAP_BYTES hold. Sums of a lap
go to the ranks whose shards they are of while the next lap is attended to, or the own shard; what came is added to the
own sums, in the order of steps. One buffer is added to while another is sent, each of up to LAP_BYTES; what comes takes
as much, and what messages are sent from as much again. The rule is about the plans of all ranks, so it is one for all.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Works, all_texts, backends_of, has_nccl, in_words, named
from .merge import Sums
from .nvlink import CopyEngine, Flat, Moves, Place, find_obstacle
from .plan import Group, Lap, Piece, Plan, Straight, Visit, go_straight, group_visits, part_rows, split_visits
from .span import span

logger = logging.getLogger("ringflash")
TRANSPORTS = ("auto", "gloo", "nccl", "nvlink")
GROUP_BYTES = 2**27  # most that a group of several shards takes: see Note [Groups]
FIRST_BYTES = 2**27  # most of another shard that is waited for before the first launch
FEW_BYTES = 2**26  # most of several shards: NVLink brings it in about the time that a launch more would take
HALVED_BYTES = 2**26  # sums of a shard that travel in halves: see Note [Halves]
APART_BYTES = 2**27  # most sums of the own shard that lie apart: see Note [dK and dV come home last]
STRAIGHT_BYTES = 2**28  # most sums of others that go straight home: see Note [Straight home]
STRAIGHT_SHARDS = 2  # most of them in shards: to add more to the own sums costs as much as it spares
LAP_BYTES = 2**27  # most sums of a lap
LAP_SHARDS = 8  # of so many shards or more


class Pending(Protocol):
    def wait(self) -> None:
        """Return when what was received may be used on the current stream, and what was sent may be overwritten."""


class Fetch(Protocol):
    def __call__(self, group: Group, into: "Shards | None") -> Pending:
        """Start to bring the pieces of a group to their places; in the order of the groups, also those without."""
        ...


class Transport(Protocol):
    def carry(self, plan: Plan, k: Tensor, v: Tensor) -> AbstractContextManager[Fetch]:
        """A pass around the ring, of which this rank's shards are `k` and `v`."""
        ...

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        """Flat tensors of these sizes, where groups land."""
        ...

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        """Flat tensors of `size` elements that `exchange` and `collect` take; good until `finish`."""
        ...

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        """Start to send one flat tensor and to receive another; an empty one is not sent. Returns at once.

        `tag` is above 0 for dK and dV and counts their exchanges.
        """
        ...

    def collect(self, sums: Flat, ways: "Ways", into: Tensor) -> Pending:
        """Start to bring what other ranks have summed for this one, and to send what this one has in `sums`.

        Once it was waited for, `sums` may be overwritten.
        """
        ...

    def finish(self) -> None:
        """All exchanges of a pass are behind: what was sent may be overwritten, by what comes on the current stream.

        After an error too, before memory goes that something under way reads or writes. (A group of gloo is lost if
        that is given up, even where every rank meets the same error, runs out of memory for one, and would go on.)
        """


def _saying(error: RuntimeError, words: str, *values: object) -> RuntimeError:
    """The error with these words, in which `values` take the places of their `{}`."""
    return RuntimeError(f"{error} ({words.format(*values)})")


def _await(pending: Pending, what: str, *values: object) -> None:
    """Wait for `what`, with `values` in the places of its `{}`: its name in a profile, and in the error if it fails."""
    with span("wait for " + what, *values):
        try:
            pending.wait()
        except RuntimeError as error:
            raise _saying(error, "waiting for " + what, *values) from error


class _Messages(Transport):
    """What transports of messages have in common: whole shards go from rank to rank; tensors are their own, and nothing
    is under way once it was waited for."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device
        self.under_way: list[Works] = []

    def started(self, works: list[tuple[dist.Work | None, str]]) -> Works:
        self.under_way = [*(x for x in self.under_way if x.works), Works(self.group, works)]
        return self.under_way[-1]

    def finish(self) -> None:
        with suppress(RuntimeError):  # a peer is gone: what happened first says more
            for works in self.under_way:
                works.wait()

    @contextmanager
    def carry(self, plan: Plan, k: Tensor, v: Tensor) -> Iterator[Fetch]:
        with span("start of K and V"):
            passing = _Passing(self, plan, k, v)

        def fetch(group: Group, into: Shards | None) -> Pending:
            return _Landing(passing, group, into, torch.cuda.current_stream().record_event() if k.is_cuda else None)

        try:
            yield fetch
            with passing.beside(), span("rest of K and V"):
                while passing.step < plan.hops:  # the others have yet to see what is here
                    passing.go_on()
        except BaseException:  # GeneratorExit where it was a visit that failed
            self.finish()
            raise
        finally:
            passing.join()

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        return [Flat(torch.empty(size, dtype=dtype, device=self.device)) for size in sizes]

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        return [Flat(torch.empty(size, dtype=dtype, device=self.device)) for _ in range(count)]

    def collect(self, sums: Flat, ways: "Ways", into: Tensor) -> Pending:
        collecting, received = _Collecting(), 0
        for to, source, sent, size in ways.legs:
            send = torch.cat([sums.x[begin : begin + length] for begin, length in sent] or [sums.x[:0]])
            receive = into[received : received + size]
            received += size
            collecting.under_way.append((self.exchange(send, receive, to, source, tag=1), send, source))
        return collecting


class _Collecting(Pending):
    """Exchanges under way, with what is sent, and the ranks that they bring sums from."""

    def __init__(self):
        self.under_way: list[tuple[Pending, Tensor, int]] = []

    def wait(self) -> None:
        for pending, _, source in self.under_way:
            _await(pending, "dK and dV from rank {}", source)


class GlooTransport(_Messages):
    """Gloo, for CPU tensors; CUDA tensors are staged through pinned host memory (gloo cannot read device memory)."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError('transport="gloo" can\'t be captured in a CUDA graph: the host moves its shards')
        super().__init__(group, device)

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        if send.is_cuda:
            return _Staged(self, send, receive, to, source, tag)
        works, receiving, sending = [], f"receiving from rank {source}", f"sending to rank {to}"
        if receive.numel():
            with named(self.group, receiving):
                works.append((dist.irecv(receive, group=self.group, group_src=source, tag=tag), receiving))
        if send.numel():
            with named(self.group, sending):
                works.append((dist.isend(send, group=self.group, group_dst=to, tag=tag), sending))
        return self.started(works)


class _Staged:
    """A gloo exchange of CUDA tensors. The host waits for its copy alone, not for work launched after it."""

    def __init__(self, gloo: GlooTransport, send: Tensor, receive: Tensor, to: int, source: int, tag: int):
        self.gloo, self.receive, self.peers = gloo, receive, (to, source, tag)
        self.host_send = torch.empty(send.shape, dtype=send.dtype, device="cpu", pin_memory=True)
        self.host_receive = torch.empty(receive.shape, dtype=receive.dtype, device="cpu", pin_memory=True)
        self.host_send.copy_(send, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def wait(self) -> None:
        self.copied.synchronize()
        self.gloo.exchange(self.host_send, self.host_receive, *self.peers).wait()
        self.receive.copy_(self.host_receive, non_blocking=True)


class NcclTransport(_Messages):
    """NCCL send/recv on its own stream; `wait` makes the current stream wait, not the host."""

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        operations = []
        if send.numel():
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if receive.numel():
            operations.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return self.started([(work, f"exchange with ranks {to} and {source}") for work in works])


def check_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `ValueError` for an unknown transport, or one that this group has no backend for. Talks to nobody."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {name!r}")
    if (name, device) in _picked.get(group, ()):
        return
    backends = backends_of(group)
    on_gpu = device.type == "cuda"
    can_move = {
        "gloo": backends.get("cpu") == "gloo",
        "nccl": has_nccl(group, device),
        "nvlink": on_gpu and torch.version.cuda is not None,
    }
    can_move["auto"] = can_move["gloo"] or can_move["nccl"]
    if not can_move[name]:
        config = dist.get_backend_config(group)
        raise ValueError(f"transport={name!r} can't move {device.type} tensors in a group with backends {config!r}")


_places: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, list[Place]]] = WeakKeyDictionary()
_picked: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, torch.device], str]] = WeakKeyDictionary()


def pick_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The transport that `name` stands for, the same on every rank. The first call for a group may be collective.

    "auto" is nvlink where every rank has a GPU of its own on one host and they reach each other's memory; else NCCL
    where the group has it for this device; else gloo. Raises `ValueError` as `check_transport` does, and for "nvlink"
    where it can't be.
    """
    picked = _picked.setdefault(group, {})
    if (name, device) not in picked:
        picked[name, device] = _pick_transport(name, group, device)
    return picked[name, device]


def _pick_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    check_transport(name, group, device)
    if name in ("gloo", "nccl"):
        return name
    obstacle = "the tensors are not on NVIDIA GPUs"
    if device.type == "cuda" and torch.version.cuda is not None:
        by_device = _places.setdefault(group, {})
        is_new = device not in by_device
        if is_new:
            by_device[device] = [Place.decode(x) for x in all_texts(group, Place.here(device).encode(), device)]
        obstacle = find_obstacle(by_device[device], share=name == "nvlink")
        if is_new:
            logger.info("nvlink in a group of %d ranks: %s", dist.get_world_size(group), obstacle or "can be used")
    if name == "nvlink" and obstacle:
        raise ValueError(f"transport='nvlink' can't be used in this group: {obstacle}")
    picked = "nvlink" if obstacle is None else "nccl" if has_nccl(group, device) else "gloo"
    logger.debug("transport=%r is %s", name, picked)
    return picked


class RowShape(NamedTuple):
    """What is one in all shards of a pass: K `(b, rows, g, d)` and V `(b, rows, g, d_v)`, of any number of rows."""

    batches: int
    heads: int
    k_dim: int
    v_dim: int

    @staticmethod
    def of(k: Tensor, v: Tensor) -> "RowShape":
        batches, _, heads, k_dim = k.shape
        return RowShape(batches, heads, k_dim, v.shape[3])

    @property
    def row(self) -> int:
        """Elements of a row of both, in one batch."""
        return self.heads * (self.k_dim + self.v_dim)

    def size(self, rows: int) -> int:
        """Elements of `rows` rows of both."""
        return self.batches * rows * self.row


class Shards(NamedTuple):
    """K and V of some rows in one flat buffer, `(b, rows, g, d + d_v)`: a head's key and its value side by side.

    So rows that follow each other are one piece of memory in each batch, and one copy moves them.
    """

    buffer: Flat
    shape: RowShape

    def both(self, rows: int) -> Tensor:
        """K and V, as they lie."""
        return self.buffer.see(_both_of, self.shape, rows)

    def views(self, rows: int) -> tuple[Tensor, Tensor]:
        """K and V."""
        return self.buffer.see(_shards_of, self.shape, rows)

    def message(self, rows: int) -> Tensor:
        """The part of the buffer that these rows fill."""
        return self.buffer.see(Flat.first, self.shape.size(rows))


class Packed(NamedTuple):
    """Sums of dK of some rows and then those of dV in one flat buffer: kernels want what they add to contiguous."""

    buffer: Flat
    shape: RowShape

    def views(self, begin: int, end: int, rows: int) -> tuple[Tensor, Tensor]:
        """Rows `[begin, end)` of dK and of dV, of `rows` each."""
        return self.buffer.see(_sums_of, self.shape, begin, end, rows)


def _both_of(buffer: Flat, shape: RowShape, rows: int) -> Tensor:
    return _rows_of(buffer.x, shape, rows, shape.k_dim + shape.v_dim)


def _shards_of(buffer: Flat, shape: RowShape, rows: int) -> tuple[Tensor, Tensor]:
    k, v = _both_of(buffer, shape, rows).split_with_sizes((shape.k_dim, shape.v_dim), dim=3)
    return k, v


def _sums_of(buffer: Flat, shape: RowShape, begin: int, end: int, rows: int) -> tuple[Tensor, Tensor]:
    dk = _rows_of(buffer.x, shape, rows, shape.k_dim)
    dv = _rows_of(buffer.x[dk.numel() :], shape, rows, shape.v_dim)
    return dk[:, begin:end], dv[:, begin:end]


def _rows_of(buffer: Tensor, shape: RowShape, rows: int, dim: int) -> Tensor:
    """`(b, rows, g, dim)`, contiguous, at the beginning of a flat buffer."""
    batches, heads, _, _ = shape
    return buffer.as_strided((batches, rows, heads, dim), (rows * heads * dim, heads * dim, dim, 1))


class _Sources(NamedTuple):
    """The ranks of the group whose shards a group has, in words."""

    plan: Plan
    group: Group

    def __str__(self) -> str:
        return in_words(list(dict.fromkeys(self.plan.source(piece.step) for piece in self.group.pieces)))


Arrival = tuple[int, Visit | None, Tensor, Tensor]


def grouped(plan: Plan, k: Tensor, v: Tensor) -> tuple[Group, ...]:
    """What the forward pass attends to at a time: see Note [Groups]."""
    row_bytes = max(RowShape.of(k, v).size(1) * k.itemsize, 1)
    most, first, few = (nbytes // row_bytes for nbytes in (GROUP_BYTES, FIRST_BYTES, min(FIRST_BYTES, FEW_BYTES)))
    return group_visits(plan, most, first, few)


class Halves(NamedTuple):
    """What the backward pass attends to at a time: see Notes [dK and dV come home last] and [Halves]."""

    groups: tuple[Group, ...]
    parts: int  # of every shard but the own one, which has as many, or one if its sums lie apart
    is_apart: bool


def halved(plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype) -> Halves:
    """How the backward pass goes about a plan, with sums in `dtype`."""
    nbytes = RowShape.of(k, v).size(plan.most_rows) * dtype.itemsize
    is_apart = plan.hops > 0 and nbytes <= APART_BYTES
    parts = 2 if nbytes >= HALVED_BYTES and plan.hops > is_apart else 1
    return Halves(split_visits(plan, parts, 1 if is_apart else parts), parts, is_apart)


def visits(
    plan: Plan, groups: tuple[Group, ...], k: Tensor, v: Tensor, transport: Transport | None
) -> Iterator[Arrival]:
    """Yield `(index, visit, k, v)` for every group; the next one is already on its way.

    `k` and `v` are the rows that the visit is about, good until the next is asked for. See Note [Two buffers].
    """

    def mine(group: Group) -> tuple[Tensor, Tensor]:
        (piece,) = group.pieces
        if piece.begin == 0 and piece.end == k.shape[1]:
            return k, v
        return k[:, piece.begin : piece.end], v[:, piece.begin : piece.end]

    def start(group: Group, place: Shards) -> Pending:
        with span("fetch from {}", _Sources(plan, group)):
            return fetch(group, place)

    if transport is None or plan.hops == 0:
        for index, group in enumerate(groups):
            with span("visit {} from {}", index, _Sources(plan, group)):
                yield index, group.visit, *mine(group)
        return
    shape = RowShape.of(k, v)
    brought, sizes = _brought(groups, shape)
    ahead = deque(brought)
    with transport.carry(plan, k, v) as fetch:
        places = [Shards(x, shape) for x in transport.places(sizes, k.dtype)]
        arriving = deque((place, start(ahead.popleft(), place)) for place in places)
        for index, group in enumerate(groups):
            sources = _Sources(plan, group)
            if group.last_step == 0:
                with span("visit {} from {}", index, sources):
                    yield index, group.visit, *mine(group)
            elif group.visit is None:
                fetch(group, None).wait()
                yield index, None, k, v
            else:
                place, arrived = arriving.popleft()
                with span("wait for {}", sources):
                    arrived.wait()
                with span("visit {} from {}", index, sources):
                    yield index, group.visit, *place.views(group.rows)
                if ahead:
                    arriving.append((place, start(ahead.popleft(), place)))


@lru_cache(maxsize=256)
def _brought(groups: tuple[Group, ...], shape: RowShape) -> tuple[list[Group], list[int]]:
    """The groups that have shards of other ranks, and the sizes of the places where they land in turn."""
    brought = [group for group in groups if group.last_step > 0 and group.visit is not None]
    most_rows = (max(group.rows for group in brought[turn::2]) for turn in range(min(2, len(brought))))
    return brought, [shape.size(rows) for rows in most_rows]


def _pieces_of(group: Group, step: int, into: Shards | None, shard: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Where the pieces of the shard of `step` go, each beside what goes there."""
    for piece in group.pieces:
        if piece.step == step and into is not None:
            place = slice(piece.place, piece.place + piece.end - piece.begin)
            yield into.both(group.rows)[:, place], shard[:, piece.begin : piece.end]


@lru_cache(maxsize=1024)
def _moves(plan: Plan, group: Group, batches: int, row: int, place: int) -> Moves:
    """What a group is pulled by into a place of `place` elements, from one source after the other in the order of
    steps, in which each rank starts with another one. `row`: elements of a row.

    Pieces that adjoin on both sides are one. Of what lies in `Shards`, both here and there.
    """
    sizes: list[int] = []
    copies: list[tuple[int, int, int, int]] = []
    for batch, piece in product(range(batches), group.pieces):
        source = plan.source(piece.step)
        begin, size = (batch * plan.rows[source] + piece.begin) * row, (piece.end - piece.begin) * row
        if copies and copies[-1][2:] == (source, begin - sizes[-1]):
            sizes[-1] += size
        else:
            copies.append((piece.step, len(sizes), source, begin))
            sizes.append(size)
    return Moves((*sizes, place - sum(sizes)), tuple(copy[1:] for copy in sorted(copies)))


class NvlinkTransport(CopyEngine):
    """Each rank pulls what it needs out of every source's buffer."""

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        return [Flat(torch.empty(size, dtype=dtype, device=self.link.device)) for size in sizes]

    @contextmanager
    def carry(self, plan: Plan, k: Tensor, v: Tensor) -> Iterator[Fetch]:
        shape = RowShape.of(k, v)
        is_waited_for = False

        def fill(mine: Flat) -> None:
            torch.cat((k, v), dim=3, out=Shards(mine, shape).both(k.shape[1]))

        with span("publish K and V"):
            self.publish(shape.size(plan.most_rows), k.dtype, fill)

        def fetch(group: Group, into: Shards | None) -> Pending:
            nonlocal is_waited_for
            if into is None:
                return Works(self.group, [])
            is_waited_for = True
            return self.pull(into.buffer, _moves(plan, group, shape.batches, shape.row, into.buffer.x.numel()))

        try:
            yield fetch
        except BaseException:
            is_waited_for = False
            self.finish()  # nor may the next pass write to sums that are under way
            raise
        finally:  # what is freed now was allocated on the current stream: it must not be read or written to later
            if not is_waited_for:
                self.pulled().wait()

    def collect(self, sums: Flat, ways: "Ways", into: Tensor) -> Pending:
        return self.pull_sums(sums, Flat(into), ways.moves)


class _Passing:
    """Whole shards on their way from rank to rank, on a stream of their own where there are streams.

    A shard moves on when somebody waits for one behind it, so that gloo, which moves in the background only what was
    started, has one exchange under way during each visit.
    """

    def __init__(self, transport: "_Messages", plan: Plan, k: Tensor, v: Tensor):
        self.transport, self.plan, self.step = transport, plan, 0
        self.stream = torch.cuda.Stream(k.device, priority=-1) if k.is_cuda else None
        shape = RowShape.of(k, v)
        size = shape.size(plan.most_rows)
        self.shards = [Shards(Flat(k.new_empty(size)), shape) for _ in range(2)]  # the one that is here, the next
        torch.cat((k, v), dim=3, out=self.here)
        self.arriving: Pending | None = None
        with self.beside():
            self._start_next()

    @contextmanager
    def beside(self, since: torch.Event | None = None) -> Iterator[None]:
        """Inside, work goes to the own stream, and comes after what the current one has been given (until `since`)."""
        if self.stream is None:
            yield
            return
        self.stream.wait_event(since or torch.cuda.current_stream().record_event())
        with torch.cuda.stream(self.stream):
            yield

    @property
    def here(self) -> Tensor:
        return self.shards[0].both(self._rows(self.step))

    def _rows(self, step: int) -> int:
        return self.plan.rows[self.plan.source(step)]

    def _start_next(self) -> None:
        if self.step < self.plan.hops:
            send, receive = (x.message(self._rows(self.step + i)) for i, x in enumerate(self.shards))
            up, down = (self.plan.rank + 1) % self.plan.world_size, (self.plan.rank - 1) % self.plan.world_size
            with span("exchange of K and V with ranks {} and {}", up, down):
                try:
                    self.arriving = self.transport.exchange(send, receive, up, down, tag=0)
                except RuntimeError as error:
                    raise _saying(error, "starting to bring K and V of step {}", self.step + 1) from error

    def go_on(self) -> None:
        """To the next step, whose shard is then here, and the one behind it on its way."""
        assert self.arriving is not None
        step = self.step + 1
        _await(self.arriving, "K and V of step {}, which are rank {}'s", step, self.plan.source(step))
        self.shards.reverse()
        self.step += 1
        self._start_next()

    def join(self) -> None:
        """The current stream waits for all that was moved."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)


class _Landing(NamedTuple):
    """A group that will have landed when it was waited for."""

    passing: _Passing
    group: Group
    into: Shards | None
    since: torch.Event | None  # when `into` was free

    def wait(self) -> None:
        passing = self.passing
        with passing.beside(self.since):
            for step in range(passing.step, self.group.last_step + 1):
                if step > passing.step:
                    passing.go_on()
                for x, theirs in _pieces_of(self.group, step, self.into, passing.here):
                    x.copy_(theirs, non_blocking=True)
        passing.join()


class Gradients:
    """dK and dV on their way round the ring: see Notes [dK and dV come home last] and [Halves].

    Once for each group, in order: `arrive(index)`, then `take()`. In the end `home()`.
    """

    def __init__(
        self, plan: Plan, halves: Halves, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport | None
    ):
        self.plan, self.transport = plan, transport
        self.groups, self.parts, self.is_apart = halves
        self.like, self.dtype, shape = (k, v), dtype, RowShape.of(k, v)
        self.legs = _legs(plan, self.parts, 1 if self.is_apart else self.parts, shape)
        self.own: Sums | None = None  # of a ring of one, or apart
        self.buffers: list[Packed] = []  # of this group, of the others of its step, and one for what comes next
        if transport is not None and plan.hops > 0:
            size = shape.size(-(-plan.most_rows // self.parts))
            self.buffers = [Packed(x, shape) for x in transport.buffers(self.parts + 1, size, dtype)]
        self.pending: Pending | None = None
        self.leg: _Leg | None = None  # on which what is pending travels
        self.index = 0

    def _wait(self) -> None:
        if self.pending is not None and self.leg is not None:
            _await(self.pending, self.leg.words, self.leg.step)
            self.pending = None

    def _send_on(self, index: int) -> None:
        """Start to send what is finished, and to bring here what the same part of the next step adds to."""
        assert self.transport is not None
        self.leg = leg = self.legs[index]
        send = self.buffers[0].buffer.see(Flat.first, leg.size)
        receive = self.buffers[-1].buffer.see(Flat.first, leg.next_size)
        with span("exchange of dK and dV with ranks {} and {}", leg.to, leg.source):
            try:
                self.pending = self.transport.exchange(send, receive, leg.to, leg.source, tag=index + 1)
            except RuntimeError as error:
                raise _saying(error, "starting to bring " + leg.words, leg.step) from error

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
        if group.last_step == 0 and (self.is_apart or not self.buffers):
            dk, dv = (x.new_empty(x.shape, dtype=self.dtype) for x in self.like)
            self.own = Sums(dk, dv, fresh=True)
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
        if own is not None and not self.buffers:
            dk, dv = (x.to(like.dtype) for x, like in zip(own, self.like, strict=True))
            return dk, dv
        self._wait()
        dk, dv = results = [x.new_empty(x.shape) for x in self.like]
        for part in range(self.parts):  # results must not alias the buffers, which the next pass uses
            cut = part_rows(dk.shape[1], part, self.parts)
            rows, buffer = cut.stop - cut.start, self.buffers[part if self.is_apart else part - self.parts + 1]
            for i, theirs in enumerate(buffer.views(0, rows, rows)):
                into = results[i] if self.parts == 1 else results[i][:, cut]
                if own is None:
                    into.copy_(theirs)
                else:
                    torch.add(own[i] if self.parts == 1 else own[i][:, cut], theirs, out=into)
        assert self.transport is not None
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


class Ways(NamedTuple):
    """How sums go straight home, in elements of flat buffers: those of all ranks, and one where they land.

    `legs[step - 1]` is `(to, source, sent, received)`: the rank that gets the pieces `sent`, each `(begin, size)` in
    this rank's buffer, and the one that `received` elements come from. `moves` is what comes as copies out of the
    others' buffers. `added` says what that is, in order: from so many ranks the same `places`, none of which overlap.
    """

    legs: tuple[tuple[int, int, tuple[tuple[int, int], ...], int], ...]
    moves: Moves
    size: int  # elements that come
    added: tuple[tuple[int, tuple[OwnRows, ...]], ...]


@lru_cache(maxsize=1024)
def _ways_home(lap: Lap, shape: RowShape) -> Ways:
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
    return Ways(tuple(legs), Moves(tuple(sizes), tuple(copies)), sum(sizes), added)


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

    def __init__(
        self, plan: Plan, straight: Straight, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport | None
    ):
        self.plan, self.transport = plan, transport
        self.laps, self.groups = straight.laps, straight.groups
        self.like, self.dtype, self.shape = (k, v), dtype, RowShape.of(k, v)
        assert transport is not None
        buffers = transport.buffers(min(len(self.laps), 2), self.shape.size(straight.most_rows), dtype)
        self.buffers = [Packed(x, self.shape) for x in buffers]  # of this lap, and of the one before
        self.on_the_way: deque[tuple[Pending, Ways, Tensor]] = deque()  # what comes in a lap, and where it lands
        self.own: list[Tensor] | None = None
        self.index = 0

    def arrive(self, index: int) -> None:
        """The sums of the lap before this group go home."""
        self.index = index
        if index == 0:
            return
        assert self.transport is not None
        ways = _ways_home(self.laps[index - 1], self.shape)
        come = self.like[0].new_empty(ways.size, dtype=self.dtype)
        with span("dK and dV go home"):
            try:
                pending = self.transport.collect(self.buffers[0].buffer, ways, come)
            except RuntimeError as error:
                raise _saying(error, "starting to bring dK and dV home") from error
        self.on_the_way.append((pending, ways, come))
        self.buffers.reverse()

    def take(self) -> Sums:
        """Where the sums of this group go: of the rows that its visit is about."""
        if len(self.on_the_way) == 2:  # the older one went from the buffer that this lap takes
            if self.own is None:
                self.own = [x.new_zeros(x.shape, dtype=self.dtype) for x in self.like]
            self._add(self.own)
        if self.index < len(self.laps):
            rows = self.groups[self.index].rows
            return Sums(*self.buffers[0].views(0, rows, rows), fresh=True)
        fresh = self.own is None
        if self.own is None:
            self.own = [x.new_empty(x.shape, dtype=self.dtype) for x in self.like]
        return Sums(*self.own, fresh=fresh)

    def home(self) -> tuple[Tensor, Tensor]:
        """This rank's own `(dk, dv)`, summed over all ranks, in the dtypes of k and v."""
        assert self.transport is not None and self.own is not None
        while self.on_the_way:
            self._add(self.own)
        self.transport.finish()
        dk, dv = (x.to(like.dtype) for x, like in zip(self.own, self.like, strict=True))
        return dk, dv

    def _add(self, own: list[Tensor]) -> None:
        """Add what came in the oldest lap, in the order of steps: all places of a rank in one launch."""
        pending, ways, come = self.on_the_way.popleft()
        _await(pending, "dK and dV, come home")
        for ranks, places in ways.added:
            sizes = [place.size for place in places]
            theirs, come = come.split_with_sizes((ranks * sum(sizes), come.numel() - ranks * sum(sizes)))
            if ranks > 1:
                theirs = theirs.view(ranks, -1).sum(0)
            parts = [x.view(place.shape) for x, place in zip(theirs.split_with_sizes(sizes), places, strict=True)]
            torch._foreach_add_([own[place.which][:, place.begin : place.end] for place in places], parts)


def gradients(
    plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport | None
) -> "Gradients | StraightGradients":
    """What the backward pass attends to at a time, its `groups`, and where their sums, in `dtype`, go."""
    straight = straight_of(plan, k, v, dtype)
    if straight is not None:
        return StraightGradients(plan, straight, k, v, dtype, transport)
    return Gradients(plan, halved(plan, k, v, dtype), k, v, dtype, transport)


def straight_of(plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype) -> Straight | None:
    """How sums go straight home, where that is better: between two ranks they do anyway."""
    if plan.hops < 2:
        return None
    row_bytes = max(RowShape.of(k, v).size(1) * dtype.itemsize, 1)
    straight = go_straight(plan, plan.hops, min(STRAIGHT_BYTES // row_bytes, STRAIGHT_SHARDS * plan.most_rows))
    lap_rows = LAP_BYTES // row_bytes
    lap_steps = lap_rows // max(plan.most_rows, 1)
    may_come_anew = plan.own_visit.mask.cu_seqlens is not None  # with every batch, and laps take long to plan
    if straight is None and lap_steps >= min(LAP_SHARDS, plan.hops) and not may_come_anew:
        straight = go_straight(plan, min(lap_steps, plan.hops), lap_rows)
    return straight


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    return {"gloo": GlooTransport, "nccl": NcclTransport, "nvlink": NvlinkTransport}[name](group, device)
