"""Moving shards between ranks. Knows nothing of attention: packed buffers go round the ring, or are pulled out of it.

Legend: `rank` and every peer are ranks *within the group*; `step`, `source` as in `plan.py`.

Note [Two buffers]. At every step the shard in one buffer is computed on and sent up, while the next one arrives in the
other. K and V of a shard are one message. So memory does not depend on the world size. By NVLink every rank publishes
its shard once, in a third buffer, and pulls of each source the rows that it needs, two visits ahead.

Note [dK and dV travel one hop longer]. The gradients of a shard go round with it, one hop behind: a rank receives what
the ranks before it have summed, adds its own share in place, and sends it on at the next step. After the last visit
they are `hops` ranks away from their owner and go home in one message.
"""

import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .nvlink import NvlinkTransport, Place, find_obstacle
from .plan import Plan, Visit

logger = logging.getLogger("ringflash")
TRANSPORTS = ("auto", "gloo", "nccl", "nvlink")


class Pending(Protocol):
    def wait(self) -> None:
        """Return when what was received may be used on the current stream, and what was sent may be overwritten."""


class Transport(Protocol):
    def buffers(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Two flat tensors of `size` elements that `exchange` takes; good until `finish`."""
        ...

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        """Start to send one flat tensor and to receive another; an empty one is not sent. Returns at once.

        `tag` is above 0 for dK and dV and counts their exchanges.
        """
        ...

    def finish(self) -> None:
        """All exchanges of a pass are behind: what was sent may be overwritten, by what comes on the current stream."""


class _Works:
    """Operations under way on CPU tensors, or on a stream of NCCL's."""

    def __init__(self, works: list[dist.Work], what: str):
        self.works, self.what = works, what

    def wait(self) -> None:
        try:
            for work in self.works:
                work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"ringflash: {self.what} failed: {error}") from error


class _OwnBuffers:
    """What a transport of messages has in common: tensors of its own, and nothing under way once it was waited for."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group, self.device = group, device

    def buffers(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        return [torch.empty(size, dtype=dtype, device=self.device) for _ in range(2)]

    def finish(self) -> None:
        pass


class GlooTransport(_OwnBuffers):
    """Gloo, for CPU tensors; CUDA tensors are staged through pinned host memory (gloo cannot read device memory)."""

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        if send.is_cuda:
            return _Staged(self, send, receive, to, source, tag)
        works = []
        if receive.numel():
            works.append(dist.irecv(receive, group=self.group, group_src=source, tag=tag))
        if send.numel():
            works.append(dist.isend(send, group=self.group, group_dst=to, tag=tag))
        return _Works([w for w in works if w is not None], f"exchange with ranks {to} and {source} of the group")


class _Staged:
    """A gloo exchange of CUDA tensors. The host waits for its copy alone, not for work launched after it."""

    def __init__(self, gloo: GlooTransport, send: Tensor, receive: Tensor, to: int, source: int, tag: int):
        self.gloo, self.receive, self.peers = gloo, receive, (to, source, tag)
        self.host_send = torch.empty(send.shape, dtype=send.dtype, pin_memory=True)
        self.host_receive = torch.empty(receive.shape, dtype=receive.dtype, pin_memory=True)
        self.host_send.copy_(send, non_blocking=True)
        self.copied = torch.cuda.Event()
        self.copied.record()

    def wait(self) -> None:
        self.copied.synchronize()
        self.gloo.exchange(self.host_send, self.host_receive, *self.peers).wait()
        self.receive.copy_(self.host_receive, non_blocking=True)


class NcclTransport(_OwnBuffers):
    """NCCL send/recv on its own stream; `wait` makes the current stream wait, not the host."""

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        operations = []
        if send.numel():
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if receive.numel():
            operations.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, f"exchange with ranks {to} and {source} of the group")


def check_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `ValueError` for an unknown transport, or one that this group has no backend for. Talks to nobody."""
    if name not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {name!r}")
    backends = _backends(group)
    on_gpu = device.type == "cuda"
    can_move = {
        "gloo": backends.get("cpu") == "gloo",
        "nccl": on_gpu and backends.get("cuda") == "nccl",
        "nvlink": on_gpu and torch.version.cuda is not None,
    }
    can_move["auto"] = can_move["gloo"] or can_move["nccl"]
    if not can_move[name]:
        config = dist.get_backend_config(group)
        raise ValueError(f"transport={name!r} can't move {device.type} tensors in a group with backends {config!r}")


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    return dict(part.split(":") for part in dist.get_backend_config(group).split(",") if ":" in part)


_places: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, list[Place]]] = WeakKeyDictionary()


def pick_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The transport that `name` stands for, the same on every rank. The first call for a group may be collective.

    "auto" is nvlink where every rank has a GPU of its own on one host and they reach each other's memory; else NCCL
    where the group has it for this device; else gloo. Raises `ValueError` as `check_transport` does, and for "nvlink"
    where it can't be.
    """
    check_transport(name, group, device)
    if name in ("gloo", "nccl"):
        return name
    obstacle = "the tensors are not on NVIDIA GPUs"
    if device.type == "cuda" and torch.version.cuda is not None:
        by_device = _places.setdefault(group, {})
        is_new = device not in by_device
        if is_new:
            by_device[device] = [Place.decode(x) for x in _all_texts(group, Place.here(device).encode(), device)]
        obstacle = find_obstacle(by_device[device], share=name == "nvlink")
        if is_new:
            logger.info("nvlink in a group of %d ranks: %s", dist.get_world_size(group), obstacle or "can be used")
    if name == "nvlink" and obstacle:
        raise ValueError(f"transport='nvlink' can't be used in this group: {obstacle}")
    picked = "nvlink" if obstacle is None else "nccl" if _backends(group).get(device.type) == "nccl" else "gloo"
    logger.debug("transport=%r is %s", name, picked)
    return picked


def make_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> Transport:
    return {"gloo": GlooTransport, "nccl": NcclTransport, "nvlink": NvlinkTransport}[name](group, device)


class _Packed(NamedTuple):
    """Two tensors of one shard in one flat buffer: `(b, rows, heads, dim)` each, rows as the shard has them."""

    buffer: Tensor
    shapes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]

    @staticmethod
    def size(a: Tensor, b: Tensor, rows: int) -> int:
        """How many elements `rows` rows of both take."""
        return a.shape[0] * rows * (math.prod(a.shape[2:]) + math.prod(b.shape[2:]))

    @staticmethod
    def over(buffer: Tensor, a: Tensor, b: Tensor) -> "_Packed":
        """Shards like `a` and `b`, with as many rows as go into the flat buffer."""
        shape_a, shape_b = ((x.shape[0], 0, x.shape[2], x.shape[3]) for x in (a, b))
        return _Packed(buffer, (shape_a, shape_b))

    @staticmethod
    def empty(a: Tensor, b: Tensor, most_rows: int) -> "_Packed":
        return _Packed.over(a.new_empty(_Packed.size(a, b, most_rows)), a, b)

    def views(self, rows: int) -> tuple[Tensor, Tensor]:
        """Both tensors of a shard of `rows` rows."""
        (b, _, heads_a, dim_a), (_, _, heads_b, dim_b) = self.shapes
        split = b * rows * heads_a * dim_a
        end = split + b * rows * heads_b * dim_b
        return self.buffer[:split].view(b, rows, heads_a, dim_a), self.buffer[split:end].view(b, rows, heads_b, dim_b)

    def message(self, rows: int) -> Tensor:
        """The part of the buffer that a shard of `rows` rows fills."""
        (b, _, heads_a, dim_a), (_, _, heads_b, dim_b) = self.shapes
        return self.buffer[: b * rows * (heads_a * dim_a + heads_b * dim_b)]


Arrival = tuple[int, Visit | None, Tensor, Tensor]


def visits(plan: Plan, k: Tensor, v: Tensor, transport: Transport | None) -> Iterator[Arrival]:
    """Yield `(step, visit, k, v)` for every step of the plan; the next shard is already on its way.

    `k` and `v` are the rows that the visit is about, good until the next is asked for. See Note [Two buffers].
    """
    if transport is None or plan.hops == 0:
        yield 0, plan.visits[0], k, v
    elif isinstance(transport, NvlinkTransport):
        yield from _pulled(plan, k, v, transport)
    else:
        yield from _passed_round(plan, k, v, transport)


def _passed_round(plan: Plan, k: Tensor, v: Tensor, transport: Transport) -> Iterator[Arrival]:
    """Whole shards go from rank to rank."""
    here, there = (_Packed.empty(k, v, max(plan.rows)) for _ in range(2))
    for mine, packed in zip((k, v), here.views(plan.rows[plan.rank]), strict=True):
        packed.copy_(mine)
    up, down = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
    for step, visit in enumerate(plan.visits):
        rows = plan.rows[plan.source(step)]
        arriving = None
        if step < plan.hops:
            next_rows = plan.rows[plan.source(step + 1)]
            arriving = transport.exchange(here.message(rows), there.message(next_rows), up, down, tag=0)
        k_here, v_here = here.views(rows)
        yield step, visit, k_here[:, plan.needed[step]], v_here[:, plan.needed[step]]
        if arriving is not None:
            arriving.wait()
            here, there = there, here


def _pulled(plan: Plan, k: Tensor, v: Tensor, transport: NvlinkTransport) -> Iterator[Arrival]:
    """Each rank pulls what it needs out of every source's buffer."""
    size = _Packed.size(k, v, max(plan.rows))
    with transport.publishing(size, k.dtype) as buffer:
        for mine, packed in zip((k, v), _Packed.over(buffer, k, v).views(plan.rows[plan.rank]), strict=True):
            packed.copy_(mine)

    def pull(step: int, into: _Packed) -> tuple[_Packed, Pending]:
        source, needed = plan.source(step), plan.needed[step]
        with transport.pulling(source, size, k.dtype) as buffer:
            theirs = _Packed.over(buffer, k, v).views(plan.rows[source])
            for x, there in zip(into.views(needed.stop - needed.start), theirs, strict=True):
                _copy_contiguous(x, there[:, needed])
        return into, transport.pulled()

    ahead = deque(step for step, visit in enumerate(plan.visits) if step > 0 and visit is not None)
    most_rows = max((plan.needed[step].stop - plan.needed[step].start for step in ahead), default=0)
    arriving = deque(pull(ahead.popleft(), _Packed.empty(k, v, most_rows)) for _ in range(min(2, len(ahead))))
    try:
        for step, visit in enumerate(plan.visits):
            if step == 0 or visit is None:
                yield step, visit, k, v
                continue
            here, arrived = arriving.popleft()
            arrived.wait()
            yield step, visit, *here.views(plan.needed[step].stop - plan.needed[step].start)
            if ahead:
                arriving.append(pull(ahead.popleft(), here))
    finally:  # what is freed now was allocated on the current stream: it must not be written to later
        transport.pulled().wait()


def _copy_contiguous(into: Tensor, x: Tensor) -> None:
    """Copy rows of a shard, a contiguous piece at a time: the copy engine takes nothing else."""
    for there, piece in [(into, x)] if x.is_contiguous() else zip(into, x, strict=True):
        there.copy_(piece, non_blocking=True)


class Gradients:
    """dK and dV on their way round the ring: see Note [dK and dV travel one hop longer].

    Once a step, in the order of the steps: `arrive(step)`, then `take()`, whose tensors the visit adds to in place
    (at step 0 it writes them). In the end `home()`.
    """

    def __init__(self, plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport | None):
        self.plan, self.transport, self.dtypes = plan, transport, (k.dtype, v.dtype)
        self.alone: tuple[Tensor, Tensor] | None = None
        self.buffers: list[_Packed] = []
        if transport is None or plan.hops == 0:
            self.alone = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
        else:
            size = _Packed.size(k, v, max(plan.rows))
            self.buffers = [_Packed.over(buffer, k, v) for buffer in transport.buffers(size, dtype)]
        self.pending: Pending | None = None
        self.step = 0

    def _exchange(self, next_source: int, to: int, down: int, tag: int) -> None:
        assert self.transport is not None
        here, there = self.buffers
        rows, next_rows = self.plan.rows[self.plan.source(self.step)], self.plan.rows[next_source]
        self.pending = self.transport.exchange(here.message(rows), there.message(next_rows), to, down, tag)
        self.buffers.reverse()

    def arrive(self, step: int) -> None:
        """Start to bring here what was summed for this step's source, and to send on what is finished here."""
        if step > 0:
            plan = self.plan
            up, down = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
            self._exchange(plan.source(step), up, down, tag=step)
        self.step = step

    def take(self) -> tuple[Tensor, Tensor]:
        """The running `(dk, dv)` of this step's source, once they are here: the rows that its visit is about."""
        if self.alone is not None:
            return self.alone
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        dk, dv = self.buffers[0].views(self.plan.rows[self.plan.source(self.step)])
        return dk[:, self.plan.needed[self.step]], dv[:, self.plan.needed[self.step]]

    def home(self) -> tuple[Tensor, Tensor]:
        """This rank's own `(dk, dv)`, summed over all ranks, in the dtypes of k and v."""
        plan = self.plan
        if self.alone is None:
            owner, holder = (plan.rank - plan.hops) % plan.world_size, (plan.rank + plan.hops) % plan.world_size
            self._exchange(plan.rank, owner, holder, tag=plan.hops + 1)
            self.step = 0
        # results must not alias each other, nor buffers that the next pass uses
        dk, dv = (x.to(t, copy=self.alone is None) for x, t in zip(self.take(), self.dtypes, strict=True))
        if self.alone is None and self.transport is not None:
            self.transport.finish()
        return dk, dv


# Agreement between ranks ------------------------------------------------------------------------------------------

_MESSAGE_BYTES = 1024
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[str]] = WeakKeyDictionary()


def agree(group: dist.ProcessGroup, message: str, *, error: Exception | None = None, device: torch.device) -> None:
    """Make sure that every rank of the group came with the same `message` (a line of `name=value` words).

    Every rank calls this before the first exchange of a pass; a rank that refuses its own arguments calls it with that
    `error` and raises it itself afterwards. The others raise here, naming the rank: `ValueError` for ranks that
    disagree, or the error of the rank that refused.

    Where the group has gloo it is asked at every call, so no disagreement goes unseen. In a group of NCCL alone that
    would stall the device, so only words not seen before in that group are compared.
    """
    if dist.get_world_size(group) == 1:
        return
    text = message if error is None else f"!{type(error).__name__}: {error}"
    on_gloo = "gloo" in dist.get_backend_config(group)
    agreed = _agreed.setdefault(group, set())  # by the group itself: a name may come again, with other ranks
    if not on_gloo and text in agreed:
        return
    all_ranks, work = _gather(group, text, device)
    if error is not None and not on_gloo:
        return  # the others may be past their check: don't wait for them
    if work is not None:
        try:
            _Works([work], "waiting for every rank of the group to make the same call").wait()
        except RuntimeError:
            if error is None:
                raise
            return  # what this rank refused says more than that the others did not come
    texts = _decode(all_ranks)
    if error is not None:
        return
    for rank, said in enumerate(texts):
        if said.startswith("!"):
            kind, _, words = said[1:].partition(": ")
            raise {"NotImplementedError": NotImplementedError}.get(kind, ValueError)(
                f"rank {rank} of the group refused its arguments: {words}"
            )
    if len(set(texts)) > 1:
        raise ValueError(f"the ranks of the group disagree: {_differences(texts)}")
    if not on_gloo:
        if len(agreed) > 4096:  # at the same call on every rank
            agreed.clear()
        agreed.add(text)


def from_first_rank(group: dist.ProcessGroup, x: Tensor, device: torch.device) -> Tensor:
    """Rank 0's `x`, on every rank: on the CPU where the group has gloo, else on the device and without a wait."""
    x = x.to("cpu" if "gloo" in dist.get_backend_config(group) else device, copy=True)
    if dist.get_world_size(group) > 1:
        work = dist.broadcast(x, group=group, group_src=0, async_op=True)
        _Works([work] if work is not None else [], "waiting for what rank 0 of the group drew").wait()
    return x


def _gather(group: dist.ProcessGroup, text: str, device: torch.device) -> tuple[list[Tensor], dist.Work | None]:
    """Start to gather every rank's line of text."""
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if "gloo" not in dist.get_backend_config(group):
        mine = mine.to(device if device.type == "cuda" else "cuda")  # what was refused may lie anywhere
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    return all_ranks, dist.all_gather(all_ranks, mine, group=group, async_op=True)


def _decode(rows: list[Tensor]) -> list[str]:
    return [bytes(row.tolist()).decode(errors="replace").strip() for row in rows]


def _all_texts(group: dist.ProcessGroup, text: str, device: torch.device) -> list[str]:
    """Every rank's line of text, in rank order."""
    rows, work = _gather(group, text, device)
    if work is not None:
        _Works([work], "waiting for every rank of the group to say where it is").wait()
    return _decode(rows)


def _differences(texts: list[str]) -> str:
    """Which words differ, and who said what: `seq_len: 101 (rank 0), 100 (ranks 1, 2)`."""
    words = [{name: value for name, _, value in (word.partition("=") for word in text.split(" "))} for text in texts]
    found = []
    for name in words[0]:
        ranks_by_value: dict[str, list[int]] = {}
        for rank, said in enumerate(words):
            ranks_by_value.setdefault(said.get(name, "nothing"), []).append(rank)
        if len(ranks_by_value) > 1:
            sayings = (
                f"{value} (rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))})"
                for value, ranks in ranks_by_value.items()
            )
            found.append(f"{name}: {', '.join(sayings)}")
    return "; ".join(found)


def _bytes_of(x: Tensor) -> Tensor:
    """The memory of a contiguous tensor."""
    return x.view(-1).view(torch.uint8)


def all_gather_rows(x: Tensor, rows: tuple[int, ...], group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's `x`, where rank `r` has `rows[r]` rows along dim 0. CUDA tensors go through the host on gloo."""
    staged = x.is_cuda and "nccl" not in dist.get_backend_config(group)
    padded = x.new_zeros(max(rows), *x.shape[1:], device="cpu" if staged else x.device)
    padded[: x.shape[0]] = x
    gathered = [torch.empty_like(padded) for _ in rows]
    # as bytes: transports know fewer dtypes than there are
    dist.all_gather([_bytes_of(part) for part in gathered], _bytes_of(padded), group=group)
    return [part[:count].to(x.device) for part, count in zip(gathered, rows, strict=True)]
