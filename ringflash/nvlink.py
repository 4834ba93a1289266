"""Symmetric memory and the copy engine: shards move between the GPUs of one host, and no multiprocessor moves them.

Every rank has a buffer of the same size that all ranks of the group can address. A rank pulls what it needs out of its
peers' buffers by plain contiguous copies on a side stream, which the GPU's copy engine does by itself. Ranks signal
each other by words in device memory, so the host never waits. Knows nothing of attention or of shards' contents.

Legend: `rank` and every peer are ranks within the group; buffers are flat; sizes are in elements, `nbytes` in bytes.

Note [One barrier before, one after]. A pass publishes this rank's K and V once. Before it overwrites its buffer, a
barrier on the stream of the pulls says that every rank has finished the pulls of the pass before; after it, a second
barrier says that every buffer is filled. Both run beside the first visit, where that waits for nobody's shard.

Note [Signals return to zero]. A signal is a word that its sender raises when it is down and its receiver lowers when
it is up; barriers are made of them. No pass leaves one up and no pass counts, so a captured CUDA graph may be replayed,
and passes outside it may come between.

Note [Rendezvous are counted]. Without NCCL, PyTorch's ranks meet in a store, under a number that counts the rendezvous
of the process in all of its groups. Ranks that came to different numbers look for each other in vain until the store's
timeout. So where some ranks are in more groups than others, those groups come last that not all of them are in: make a
call of the largest shapes in the others first.
"""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # PyTorch's permission for several ranks on one GPU
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_GRANULARITY = 2 << 20  # bytes: what the driver maps at a time


class Place(NamedTuple):
    """Where a rank is: what all ranks must know of each other before they may use this transport."""

    host: str
    device: int
    reaches: tuple[int, ...]  # devices whose memory this one can address
    allocator: str  # of symmetric memory: this transport needs "CUDA"
    may_share: bool

    @classmethod
    def here(cls, device: torch.device) -> "Place":
        """The place of this process, whose tensors are on the CUDA `device`."""
        from torch._C._distributed_c10d import _SymmetricMemory

        index = torch.cuda.current_device() if device.index is None else device.index
        boot = Path("/proc/sys/kernel/random/boot_id")  # hosts may have one name
        others = (i for i in range(torch.cuda.device_count()) if i != index)
        reaches = (i for i in others if torch.cuda.can_device_access_peer(index, i))
        return cls(
            host=f"{socket.gethostname()}/{boot.read_text().strip() if boot.exists() else ''}".replace(" ", "_"),
            device=index,
            reaches=(index, *reaches),
            allocator=_SymmetricMemory.get_backend(torch.device("cuda", index)) or "no",
            may_share=os.environ.get(SHARING) == "1",
        )

    def encode(self) -> str:
        return f"{self.host} {self.device} {','.join(map(str, self.reaches))} {self.allocator} {int(self.may_share)}"

    @classmethod
    def decode(cls, text: str) -> "Place":
        host, device, reaches, allocator, may_share = text.split(" ")
        return cls(host, int(device), tuple(map(int, reaches.split(","))), allocator, may_share == "1")


def find_obstacle(places: list[Place], *, share: bool = False) -> str | None:
    """Why ranks at these places can't use this transport, or `None`. With `share`, they may share a GPU if allowed."""
    owner: dict[int, int] = {}
    for rank, place in enumerate(places):
        if place.host != places[0].host:
            return f"ranks 0 and {rank} are on different hosts"
        if place.allocator != "CUDA":
            return f"rank {rank} has {place.allocator} allocator of symmetric memory, wanted CUDA"
        other = owner.setdefault(place.device, rank)
        if other != rank and not share:
            return f"ranks {other} and {rank} share GPU {place.device}"
        if other != rank and not place.may_share:
            return f"ranks {other} and {rank} share GPU {place.device}, which PyTorch allows with {SHARING}=1 alone"
        for device, peer in owner.items():
            if device not in place.reaches or place.device not in places[peer].reaches:
                return f"GPUs {device} and {place.device} (ranks {peer} and {rank}) can't address each other's memory"
    return None


@contextmanager
def _without_multicast() -> Iterator[None]:
    """PyTorch sets up multicast objects with every rendezvous unless told not to. Nothing here would use them."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def _rendezvous(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Any]:
    """`nbytes` of this device's memory that all ranks of the group can address, and PyTorch's handle to the others'."""
    import torch.distributed._symmetric_memory as symmetric_memory
    from torch._C._distributed_c10d import _SymmetricMemory

    with _without_multicast():  # `symmetric_memory.empty` would keep freed memory in a pool of its own
        memory = _SymmetricMemory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
        try:
            return memory, symmetric_memory.rendezvous(memory, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"ringflash: the ranks of group {group.group_name} did not meet to share {nbytes} bytes: {error}. "
                "Either one of them is gone, or they made different numbers of rendezvous before, in other groups: see "
                "Note [Rendezvous are counted] in nvlink.py"
            ) from error


class _Symmetric:
    """One buffer on every rank, `of[rank]` as seen from here, with its words for signals. Making one is collective."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device):
        self.memory, self.handle = _rendezvous(nbytes, group, device)
        world_size = dist.get_world_size(group)
        self.of = [self.handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(world_size)]
        self.views: dict[tuple[int, torch.dtype], Tensor] = {}
        self.nbytes = nbytes
        words = self.handle.get_signal_pad(dist.get_rank(group)).numel()
        self.exchanges = words // world_size // 2  # a channel is a word for each rank, an exchange takes two channels
        self.timeout_ms = _timeout_ms(group, device)
        self.captured = False  # does a CUDA graph know these addresses?

    def typed(self, rank: int, dtype: torch.dtype) -> Tensor:
        """The buffer of `rank`, flat."""
        if (rank, dtype) not in self.views:
            self.views[rank, dtype] = self.of[rank].view(dtype)
        return self.views[rank, dtype]

    def barrier(self, channel: int) -> None:
        self.handle.barrier(channel, self.timeout_ms)

    def signal(self, rank: int, channel: int) -> None:
        self.handle.put_signal(rank, channel, self.timeout_ms)

    def wait_for(self, rank: int, channel: int) -> None:
        self.handle.wait_signal(rank, channel, self.timeout_ms)


def _timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """How long the group lets an operation take."""
    backend: Any = group._get_backend(device)  # the timeout has no public name
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return int(backend.options._timeout.total_seconds() * 1000)


class _Side:
    """A stream beside the current one. Inside, work goes to it, and comes after what the current one has been given.

    Not to be entered twice. (`torch.cuda.stream` and `wait_stream` take the host three times as long.)
    """

    def __init__(self, stream: torch.cuda.Stream):
        self.stream, self.begun = stream, torch.cuda.Event()

    def __enter__(self) -> None:
        self.before = torch.cuda.current_stream()
        self.begun.record(self.before)
        self.begun.wait(self.stream)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.before)


class _Link:
    """What a group keeps on one device: a stream and a buffer for K/V, a stream and a buffer for sums."""

    def __init__(self, device: torch.device):
        self.device = device
        # small kernels that signal must not queue behind the blocks of a large one
        self.shards, self.sums = (_Side(torch.cuda.Stream(device, priority=-1)) for _ in range(2))
        self.buffers: dict[str, _Symmetric] = {}  # "shards" and "sums"
        self.sums_free: _Moment | None = None
        self.retired: list[_Symmetric] = []  # too small by now, but a CUDA graph knows their addresses

    def buffer(self, name: str, nbytes: int, group: dist.ProcessGroup) -> _Symmetric:
        """A buffer of at least `nbytes`, the old one if it will do. The same on every rank, which all call this."""
        capturing = torch.cuda.is_current_stream_capturing()
        old = self.buffers.get(name)
        if old is None or old.nbytes < nbytes:
            if capturing:
                raise RuntimeError(
                    'transport="nvlink" can\'t make its buffers while a CUDA graph is captured: '
                    "make one call with these shapes, forward and backward, before the capture"
                )
            if old is not None and old.captured:
                self.retired.append(old)
            self.buffers.pop(name, None)
            del old  # its memory is free before more is asked for
            with torch.inference_mode(False):  # what is made in that mode can be written to in that mode alone
                self.buffers[name] = _Symmetric(-(-nbytes // _GRANULARITY) * _GRANULARITY, group, self.device)
        self.buffers[name].captured |= capturing
        return self.buffers[name]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.buffers.values(), *self.retired))


_links: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Link]] = WeakKeyDictionary()


def release_buffers(group: dist.ProcessGroup) -> int:
    """Give the group's buffers back, on every device; returns how many bytes they were."""
    links = _links.pop(group, {}).values()
    for link in links:
        torch.cuda.synchronize(link.device)
    return sum(link.nbytes for link in links)


class _Moment:
    """A moment on a stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self.event = stream.record_event()

    def wait(self) -> None:
        """What the current stream is given from now on comes after it."""
        self.event.wait()


class CopyEngine:
    """Pulls by the copy engine out of symmetric memory. `device`: of the tensors, a GPU that is the current one.

    One pass at a time: a pass that starts on another stream waits for the one before it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        links = _links.setdefault(group, {})
        if device not in links:
            links[device] = _Link(device)
        self.link = links[device]

    # K and V: published once, pulled by whoever needs them

    @contextmanager
    def publishing(self, size: int, dtype: torch.dtype) -> Iterator[Tensor]:
        """This rank's flat buffer, to be filled inside; afterwards every rank may pull from it.

        Both inside and in `pulling`, work goes to the stream of the pulls. See Note [One barrier before, one after].
        """
        link = self.link
        shards = link.buffer("shards", size * dtype.itemsize, self.group)
        with link.shards:
            shards.barrier(0)
            yield shards.memory[: size * dtype.itemsize].view(dtype)
            shards.barrier(1)

    @contextmanager
    def pulling(self, size: int, dtype: torch.dtype) -> Iterator[Callable[[int], Tensor]]:
        """What each rank published, to be copied inside; what the current stream has been given comes before."""
        with self.link.shards:
            yield lambda rank: self.link.buffers["shards"].typed(rank, dtype)[:size]

    def copy(self, into: Tensor, x: Tensor) -> None:
        """Copy a flat tensor: the copy engine takes nothing else."""
        into.copy_(x, non_blocking=True)

    def pulled(self) -> _Moment:
        """Wait for it to use what was pulled so far."""
        return _Moment(self.link.shards.stream)

    # dK and dV: from buffer to buffer

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Flat buffers for `exchange`, in the same order on every rank; good until `finish`."""
        link = self.link
        nbytes = -(-size * dtype.itemsize // 256) * 256  # each begins at an aligned address
        sums = link.buffer("sums", count * nbytes, self.group)
        if link.sums_free is not None and not torch.cuda.is_current_stream_capturing():
            link.sums_free.wait()  # the pass before this one may have run on another stream
        begins = range(0, count * nbytes, nbytes) if nbytes else [0] * count
        return [sums.memory[begin : begin + size * dtype.itemsize].view(dtype) for begin in begins]

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> _Moment:
        """Pull `receive` out of the buffer that `source` sends from; it is the one that this rank sends from.

        Signals are on channel `2 * tag` (what is sent is complete) and `2 * tag + 1` (it was pulled), as far as the
        channels go.
        """
        link = self.link
        sums = link.buffers["sums"]
        channel = 2 * (tag % sums.exchanges)
        begin = int(send.storage_offset())
        with link.sums:
            sums.signal(to, channel)
            sums.wait_for(source, channel)
            if receive.numel():
                receive.copy_(sums.typed(source, receive.dtype)[begin : begin + receive.numel()])
            sums.signal(source, channel + 1)
            copied = _Moment(link.sums.stream)
            sums.wait_for(to, channel + 1)  # nothing later on this stream overwrites what `to` has yet to pull
        return copied

    def finish(self) -> None:
        """The current stream waits until every buffer is free again, here and for the peers."""
        link = self.link
        torch.cuda.current_stream().wait_stream(link.sums.stream)
        if not torch.cuda.is_current_stream_capturing():
            link.sums_free = _Moment(torch.cuda.current_stream())
