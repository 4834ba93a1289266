"""Moving shards between ranks. Knows nothing of attention: packed buffers go round the ring, or are pulled out of it.
Which sums of dK and dV go where, `gradients.py` says.

Legend: `rank` and every peer are ranks *within the group*; `step`, `source` as in `plan.py`.

Note [Two buffers]. What is attended to lies in one buffer, while what comes next lands in another, so memory does not
depend on the world size. By NVLink every rank publishes its shard once, and pulls of each source the rows that it
needs. By messages, whole shards go from rank to rank (K and V in one message, through two buffers more), and what is
needed of them is copied out as they pass.

Note [Groups]. Forward, every visit after the first merges with what is there, which costs memory traffic, and a launch
ends with idle multiprocessors. So shards that arrived meanwhile are attended to in one launch. Their rows land in
ascending order of position, which makes them one visit like any other. The first launch has the rank's own shard; to
wait for a second one costs less by NVLink than a launch for each, unless that one is large: emulated, two GPUs with 8k
tokens each had an efficiency of 0.88 with two launches and have 0.98 with one (results/emulate_ring.csv). More of them
are waited for while they are little, FEW_BYTES in all. All transports group alike, and give the same bits.
"""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from itertools import product
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .agreement import Works, all_texts, backends_of, has_nccl, in_words, named
from .nvlink import CopyEngine, Flat, Moves, Place, find_obstacle
from .plan import Group, Plan, Visit, group_visits
from .span import span

logger = logging.getLogger("ringflash")
TRANSPORTS = ("auto", "gloo", "nccl", "nvlink")
GROUP_BYTES = 2**27  # most that a group of several shards takes: see Note [Groups]
FIRST_BYTES = 2**27  # most of another shard that is waited for before the first launch
FEW_BYTES = 2**26  # most of several shards: NVLink brings it in about the time that a launch more would take


class Pending(Protocol):
    def wait(self) -> None:
        """Return when what was received may be used on the current stream, and what was sent may be overwritten."""


class Fetch(Protocol):
    def __call__(self, group: Group, into: "Shards | None") -> Pending:
        """Start to bring the pieces of a group to their places; in the order of the groups, also those without."""
        ...


class Ways(NamedTuple):
    """How sums go straight home, in elements of flat buffers: those of all ranks, and one where they land.

    `legs[step - 1]` is `(to, source, sent, received)`: the rank that gets the pieces `sent`, each `(begin, size)` in
    this rank's buffer, and the one that `received` elements come from. `moves` is what comes as copies out of the
    others' buffers.
    """

    legs: tuple[tuple[int, int, tuple[tuple[int, int], ...], int], ...]
    moves: Moves


class Transport(Protocol):
    def carry(
        self, plan: Plan, k: Tensor, v: Tensor, first: "list[tuple[Group, Shards]]"
    ) -> "AbstractContextManager[tuple[Fetch, list[Pending]]]":
        """A pass around the ring, of which this rank's shards are `k` and `v`. What is `first` is fetched at once."""
        ...

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        """Flat tensors of these sizes, where groups land."""
        ...

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        """Flat tensors of `size` elements that `exchange` and `collect` take; good until `finish`."""
        ...

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        """Start to send one flat tensor and to receive another; an empty one is not sent. Returns at once.

        `tag` is above 0 for dK and dV and counts their exchanges with the same ranks.
        """
        ...

    def collect(self, sums: Flat, ways: Ways, into: Tensor) -> Pending:
        """Start to bring what other ranks have summed for this one, and to send what this one has in `sums`.

        Once it was waited for, `sums` may be overwritten.
        """
        ...

    def finish(self) -> None:
        """All exchanges of a pass are behind: what was sent may be overwritten, by what comes on the current stream.

        After an error too, before memory goes that something under way reads or writes. (A group of gloo is lost if
        that is given up, even where every rank meets the same error, runs out of memory for one, and would go on.)
        """


def saying(error: RuntimeError, words: str, *values: object) -> RuntimeError:
    """The error with these words, in which `values` take the places of their `{}`."""
    return RuntimeError(f"{error} ({words.format(*values)})")


def wait_for(pending: Pending, what: str, *values: object) -> None:
    """Wait for `what`, with `values` in the places of its `{}`: its name in a profile, and in the error if it fails."""
    with span("wait for " + what, *values):
        try:
            pending.wait()
        except RuntimeError as error:
            raise saying(error, "waiting for " + what, *values) from error


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
    def carry(
        self, plan: Plan, k: Tensor, v: Tensor, first: "list[tuple[Group, Shards]]"
    ) -> Iterator[tuple[Fetch, list[Pending]]]:
        with span("start of K and V"):
            passing = _Passing(self, plan, k, v)

        def fetch(group: Group, into: Shards | None) -> Pending:
            return _Landing(passing, group, into, torch.cuda.current_stream().record_event() if k.is_cuda else None)

        try:
            yield fetch, [fetch(*x) for x in first]
            with passing.beside(), span("rest of K and V"):
                while passing.step < plan.hops:  # the others have yet to see what is here
                    passing.go_on()
        except BaseException:
            self.finish()
            raise
        finally:
            passing.join()

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        return [Flat(torch.empty(size, dtype=dtype, device=self.device)) for size in sizes]

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        return [Flat(torch.empty(size, dtype=dtype, device=self.device)) for _ in range(count)]

    def collect(self, sums: Flat, ways: Ways, into: Tensor) -> Pending:
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
            wait_for(pending, "dK and dV from rank {}", source)


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


def _both_of(buffer: Flat, shape: RowShape, rows: int) -> Tensor:
    return rows_of(buffer.x, shape, rows, shape.k_dim + shape.v_dim)


def _shards_of(buffer: Flat, shape: RowShape, rows: int) -> tuple[Tensor, Tensor]:
    k, v = _both_of(buffer, shape, rows).split_with_sizes((shape.k_dim, shape.v_dim), dim=3)
    return k, v


def rows_of(buffer: Tensor, shape: RowShape, rows: int, dim: int) -> Tensor:
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
    few_bytes = min(FIRST_BYTES, FEW_BYTES)
    return group_visits(plan, GROUP_BYTES // row_bytes, FIRST_BYTES // row_bytes, few_bytes // row_bytes)


@contextmanager
def visits(
    plan: Plan, groups: tuple[Group, ...], k: Tensor, v: Tensor, transport: Transport
) -> Iterator[Iterator[Arrival]]:
    """Inside, the first groups are on their way, beside whatever is done before one is asked for."""
    shape = RowShape.of(k, v)
    brought, sizes = _brought(groups, shape)
    places = [Shards(x, shape) for x in transport.places(sizes, k.dtype)]
    with transport.carry(plan, k, v, list(zip(brought, places, strict=False))) as (fetch, pending):
        yield _arrivals(plan, groups, k, v, brought, places, fetch, pending)


def _arrivals(
    plan: Plan,
    groups: tuple[Group, ...],
    k: Tensor,
    v: Tensor,
    brought: list[Group],
    places: list[Shards],
    fetch: Fetch,
    pending: list[Pending],
) -> Iterator[Arrival]:
    """Yield `(index, visit, k, v)` for every group; the next one is already on its way.

    `k` and `v` are the rows that the visit is about, good until the next is asked for. See Note [Two buffers]. Groups
    that are `brought` lie in the `places` in turn; `pending` are those that are fetched, from the first.
    """

    def mine(group: Group) -> tuple[Tensor, Tensor]:
        (piece,) = group.pieces
        if piece.begin == 0 and piece.end == k.shape[1]:
            return k, v
        return k[:, piece.begin : piece.end], v[:, piece.begin : piece.end]

    landed = 0  # of what is brought
    for index, group in enumerate(groups):
        sources = _Sources(plan, group)
        if group.last_step == 0:
            with span("visit {} from {}", index, sources):
                yield index, group.visit, *mine(group)
        elif group.visit is None:
            fetch(group, None).wait()
            yield index, None, k, v
        else:
            place = places[landed % len(places)]
            with span("wait for {}", sources):
                pending[landed].wait()
            with span("visit {} from {}", index, sources):
                yield index, group.visit, *place.views(group.rows)
            landed += 1
            if len(pending) < len(brought):
                following = brought[len(pending)]
                with span("fetch from {}", _Sources(plan, following)):
                    pending.append(fetch(following, place))


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

    @contextmanager
    def carry(
        self, plan: Plan, k: Tensor, v: Tensor, first: list[tuple[Group, Shards]]
    ) -> Iterator[tuple[Fetch, list[Pending]]]:
        shape = RowShape.of(k, v)

        def fill(mine: Flat) -> None:
            torch.cat((k, v), dim=3, out=Shards(mine, shape).both(k.shape[1]))

        def moves(group: Group, into: Shards) -> tuple[Flat, Moves]:
            place = into.buffer
            return place, _moves(plan, group, shape.batches, shape.row, place.x.numel())

        def fetch(group: Group, into: Shards | None) -> Pending:
            return Works(self.group, []) if into is None else self.pull(*moves(group, into))

        with span("publish K and V"):
            pending = self.publish(shape.size(plan.most_rows), k.dtype, fill, [moves(*x) for x in first])
        try:
            yield fetch, [*pending]
        except BaseException:
            with suppress(RuntimeError):  # what happened first says more
                self.finish()  # the next pass may not write to sums that are under way
            with suppress(RuntimeError):
                self.pulled().wait()
            raise
        if not first:  # else all was waited for, k and v too: what is freed now must not be read or written to later
            self.pulled().wait()

    def collect(self, sums: Flat, ways: Ways, into: Tensor) -> Pending:
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
                    raise saying(error, "starting to bring K and V of step {}", self.step + 1) from error

    def go_on(self) -> None:
        """To the next step, whose shard is then here, and the one behind it on its way."""
        assert self.arriving is not None
        step = self.step + 1
        wait_for(self.arriving, "K and V of step {}, which are rank {}'s", step, self.plan.source(step))
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


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    return {"gloo": GlooTransport, "nccl": NcclTransport, "nvlink": NvlinkTransport}[name](group, device)
