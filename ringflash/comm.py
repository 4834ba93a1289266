"""Moving shards between ranks. Knows nothing of attention: packed buffers go round the ring, in both passes.

Legend: `rank` and every peer are ranks *within the group*; `step`, `source` as in `plan.py`.

Note [Two buffers]. At every step the shard in one buffer is computed on and sent up, while the next one arrives in the
other. K and V of a shard are one message. So memory does not depend on the world size.

Note [dK and dV travel one hop longer]. The gradients of a shard go round with it, one hop behind: a rank receives what
the ranks before it have summed, adds its own share in place, and sends it on at the next step. After the last visit
they are `hops` ranks away from their owner and go home in one message.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from .plan import Plan, Visit

TRANSPORTS = ("auto", "gloo", "nccl", "nvlink")


class Pending(Protocol):
    def wait(self) -> None:
        """Return when what was received may be used on the current stream, and what was sent may be overwritten."""


class Transport(Protocol):
    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        """Start to send one flat tensor and to receive another; an empty one is not sent. Returns at once."""
        ...


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


class GlooTransport:
    """Gloo, for CPU tensors; CUDA tensors are staged through pinned host memory (gloo cannot read device memory)."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

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


class NcclTransport:
    """NCCL send/recv on its own stream; `wait` makes the current stream wait, not the host."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> Pending:
        operations = []
        if send.numel():
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if receive.numel():
            operations.append(dist.P2POp(dist.irecv, receive, group=self.group, group_peer=source))
        works = dist.batch_isend_irecv(operations) if operations else []
        return _Works(works, f"exchange with ranks {to} and {source} of the group")


def pick_transport(name: str, group: dist.ProcessGroup, device: torch.device) -> str:
    """The transport that `name` stands for: "auto" is NCCL where the group has it for this device, else gloo.

    Raises `ValueError` for an unknown name or one that this group has no backend for, `NotImplementedError` for
    "nvlink".
    """
    if name not in TRANSPORTS:
        raise ValueError(f"transport must be one of {TRANSPORTS}, got {name!r}")
    if name == "nvlink":
        raise NotImplementedError('transport="nvlink" is not built yet')
    config = dist.get_backend_config(group)
    backends = dict(part.split(":") for part in config.split(",") if ":" in part)
    if device.type == "cuda" and backends.get("cuda") == "nccl" and name in ("auto", "nccl"):
        return "nccl"
    if backends.get("cpu") == "gloo" and name in ("auto", "gloo"):
        return "gloo"
    raise ValueError(f"transport={name!r} can't move {device.type} tensors in a group with backends {config!r}")


def make_transport(name: str, group: dist.ProcessGroup) -> Transport:
    return {"gloo": GlooTransport, "nccl": NcclTransport}[name](group)


class _Packed(NamedTuple):
    """Two tensors of one shard in one flat buffer: `(b, rows, heads, dim)` each, rows as the shard has them."""

    buffer: Tensor
    shapes: tuple[tuple[int, int, int, int], tuple[int, int, int, int]]

    @staticmethod
    def empty(a: Tensor, b: Tensor, most_rows: int, dtype: torch.dtype) -> "_Packed":
        shape_a, shape_b = ((x.shape[0], most_rows, x.shape[2], x.shape[3]) for x in (a, b))
        size = math.prod(shape_a) + math.prod(shape_b)
        return _Packed(torch.empty(size, dtype=dtype, device=a.device), (shape_a, shape_b))

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


def visits(
    plan: Plan, k: Tensor, v: Tensor, transport: Transport | None
) -> Iterator[tuple[int, Visit | None, Tensor, Tensor]]:
    """Yield `(step, visit, k, v)` for every step of the plan; the next shard is already on its way.

    `k` and `v` are good until the next is asked for. See Note [Two buffers].
    """
    if transport is None or plan.hops == 0:
        yield 0, plan.visits[0], k, v
        return
    here, there = (_Packed.empty(k, v, max(plan.rows), k.dtype) for _ in range(2))
    for mine, packed in zip((k, v), here.views(plan.rows[plan.rank]), strict=True):
        packed.copy_(mine)
    up, down = (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size
    for step, visit in enumerate(plan.visits):
        rows = plan.rows[plan.source(step)]
        arriving = None
        if step < plan.hops:
            next_rows = plan.rows[plan.source(step + 1)]
            arriving = transport.exchange(here.message(rows), there.message(next_rows), up, down, tag=0)
        yield step, visit, *here.views(rows)
        if arriving is not None:
            arriving.wait()
            here, there = there, here


class Gradients:
    """dK and dV on their way round the ring: see Note [dK and dV travel one hop longer].

    Once a step, in the order of the steps: `arrive(step)`, then `take()`, whose tensors the visit adds to in place
    (at step 0 it writes them). In the end `home()`.
    """

    def __init__(self, plan: Plan, k: Tensor, v: Tensor, dtype: torch.dtype, transport: Transport | None):
        self.plan, self.transport = plan, transport
        self.alone: tuple[Tensor, Tensor] | None = None
        self.buffers: list[_Packed] = []
        if transport is None or plan.hops == 0:
            self.alone = k.new_empty(k.shape, dtype=dtype), v.new_empty(v.shape, dtype=dtype)
        else:
            self.buffers = [_Packed.empty(k, v, max(plan.rows), dtype) for _ in range(2)]
        self.pending: Pending | None = None
        self.step = 0

    def _exchange(self, next_source: int, to: int, down: int) -> None:
        assert self.transport is not None
        here, there = self.buffers
        rows, next_rows = self.plan.rows[self.plan.source(self.step)], self.plan.rows[next_source]
        self.pending = self.transport.exchange(here.message(rows), there.message(next_rows), to, down, tag=1)
        self.buffers.reverse()

    def arrive(self, step: int) -> None:
        """Start to bring here what was summed for this step's source, and to send on what is finished here."""
        if step > 0:
            plan = self.plan
            self._exchange(plan.source(step), (plan.rank + 1) % plan.world_size, (plan.rank - 1) % plan.world_size)
        self.step = step

    def take(self) -> tuple[Tensor, Tensor]:
        """The running `(dk, dv)` of this step's source, once they are here."""
        if self.alone is not None:
            return self.alone
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        return self.buffers[0].views(self.plan.rows[self.plan.source(self.step)])

    def home(self) -> tuple[Tensor, Tensor]:
        """This rank's own `(dk, dv)`, summed over all ranks."""
        plan = self.plan
        if self.alone is None:
            owner, holder = (plan.rank - plan.hops) % plan.world_size, (plan.rank + plan.hops) % plan.world_size
            self._exchange(plan.rank, owner, holder)
            self.step = 0
        return self.take()


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
    data = text.encode()[:_MESSAGE_BYTES].ljust(_MESSAGE_BYTES)
    mine = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if not on_gloo:
        mine = mine.to(device if device.type == "cuda" else "cuda")  # what was refused may lie anywhere
    all_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    work = dist.all_gather(all_ranks, mine, group=group, async_op=True)
    if error is not None and not on_gloo:
        return  # the others may be past their check: don't wait for them
    if work is not None:
        try:
            _Works([work], "waiting for every rank of the group to make the same call").wait()
        except RuntimeError:
            if error is None:
                raise
            return  # what this rank refused says more than that the others did not come
    texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in all_ranks]
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
