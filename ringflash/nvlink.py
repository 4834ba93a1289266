"""Symmetric memory and the copy engine: shards move between the GPUs of one host, and no multiprocessor moves them.

Every rank has a buffer of the same size that all ranks of the group can address. A rank pulls what it needs out of its
peers' buffers by plain contiguous copies on a side stream, which the GPU's copy engine does by itself. Ranks signal
each other by words in device memory, so the host never waits. Knows nothing of attention or of shards' contents.

Legend: `rank` and every peer are ranks within the group; buffers are flat; sizes are in elements, `nbytes` in bytes.

Note [One barrier before, one after]. A pass publishes this rank's K and V once. Before it overwrites its buffer, a
barrier on the stream of the pulls says that every rank has finished the pulls of the pass before; after it, a second
barrier says that every buffer is filled. Both run beside the first visit, where that waits for nobody's shard. (Behind
the last pull, where no visit waits for it, the first one may find all multiprocessors taken on one rank, and on another
take one from a kernel that has a program for each: forward, from a graph, at 16k tokens, two GPUs had 1.43 of the speed
of one instead of 1.94.)

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
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
SHARING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # PyTorch's permission for several ranks on one GPU
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_GRANULARITY = 2 << 20  # bytes: what the driver maps at a time
MOST_VIEWS = 4096  # of a buffer that are kept: of one shape a pass has a few
KEPT_BYTES = 2**27  # of places for pulls that are kept, in all; those of one pass are half of it at most


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
        # PyTorch zeroes it on the default stream, which may be busy; peers signal here as soon as all have met. Where
        # the others are it writes there too, to memory that the current stream may have freed and not be done with, and
        # signals on any stream read it.
        streams = torch.cuda.default_stream(device), torch.cuda.current_stream(device)
        for stream in streams:
            stream.synchronize()
        try:
            handle = symmetric_memory.rendezvous(memory, group)
        except RuntimeError as error:
            raise RuntimeError(
                f"ringflash: the ranks of group {group.group_name} did not meet to share {nbytes} bytes: {error}. "
                "Either one of them is gone, or they made different numbers of rendezvous before, in other groups: see "
                "Note [Rendezvous are counted] in nvlink.py"
            ) from error
        streams[0].synchronize()
        return memory, handle


class _Seen:
    """Memory that stays for a while, and what was seen in it: views take the host longer to make than to find."""

    def __init__(self):
        self.seen: dict[tuple[Any, ...], Any] = {}
        self.views = 0  # in it: some are lists

    def see(self, view: Callable[..., T], *arguments: Hashable) -> T:
        """`view(self, *arguments)`, the same as when it was asked for before."""
        found = self.seen.get((view, arguments))
        if found is None:
            if self.views >= MOST_VIEWS:
                self.seen.clear()
                self.views = 0
            is_inference = torch.is_inference_mode_enabled()
            with torch.inference_mode(False) if is_inference else nullcontext():  # as in `_Link.buffer`
                found = self.seen[view, arguments] = view(self, *arguments)
            made: object = found
            self.views += len(made) if isinstance(made, (list, tuple)) else 1
        return found


class Flat(_Seen):
    """A flat tensor."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.x = x

    def first(self, size: int) -> Tensor:
        """Its first elements."""
        return self.x[:size]

    def parts(self, sizes: tuple[int, ...]) -> tuple[Tensor, ...]:
        """It in parts of these sizes."""
        return self.x.split_with_sizes(sizes)


class _Symmetric(_Seen):
    """One buffer on every rank, `of[rank]` as seen from here, with its words for signals. Making one is collective."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device):
        super().__init__()
        self.memory, self.handle = _rendezvous(nbytes, group, device)
        self.rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        self.of = [self.handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(world_size)]
        self.nbytes = nbytes
        words = self.handle.get_signal_pad(self.rank).numel()
        self.exchanges = words // world_size // 2  # a channel is a word for each rank, an exchange takes two channels
        self.timeout_ms = _timeout_ms(group, device)
        self.captured = False  # does a CUDA graph know these addresses?

    def part(self, rank: int, dtype: torch.dtype, begin: int, size: int) -> Tensor:
        """`size` elements of the buffer of `rank`."""
        return self.of[rank].view(dtype)[begin : begin + size]

    def sources(
        self, moves: "Moves", dtype: torch.dtype, start: int, memory_of: Callable[[int], int]
    ) -> list[tuple[int, Tensor]]:
        """What goes to which part: see `Moves`, of which `begin` counts from the element `start` of a buffer."""
        return [
            (part, self.part(memory_of(source), dtype, start + begin, moves.sizes[part]))
            for part, source, begin in moves.copies
        ]

    def cut(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        """This rank's memory as `count` buffers of `size` elements, each from an aligned address."""
        step = _aligned(size * dtype.itemsize)
        return [Flat(self.memory[i * step :][: size * dtype.itemsize].view(dtype)) for i in range(count)]

    def barrier(self, channel: int) -> None:
        self.handle.barrier(channel, self.timeout_ms)

    def signal(self, rank: int, channel: int) -> None:
        self.handle.put_signal(rank, channel, self.timeout_ms)

    def wait_for(self, rank: int, channel: int) -> None:
        self.handle.wait_signal(rank, channel, self.timeout_ms)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 256) * 256


def _timeout_ms(group: dist.ProcessGroup, device: torch.device) -> int:
    """How long the group lets an operation take."""
    backend: Any = group._get_backend(device)  # the timeout has no public name
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG=DETAIL
    return int(backend.options._timeout.total_seconds() * 1000)


class Moves(NamedTuple):
    """Contiguous copies out of the peers' buffers that together fill one flat tensor.

    The tensor is cut into parts of these `sizes`; each of `copies` is `(part, source rank, begin in its buffer)`.
    """

    sizes: tuple[int, ...]
    copies: tuple[tuple[int, int, int], ...]


class _Moment:
    """A moment on a side stream."""

    def __init__(self, link: "_Link"):
        self.link, self.event = link, torch.cuda.Event()

    def wait(self) -> None:
        """What the pass is given from now on comes after it."""
        self.event.wait(self.link.current)


class _Side:
    """A stream beside that of a link's pass. Inside, work goes to it, and comes after what the pass has been given.

    Not to be entered twice. (`torch.cuda.stream`, `wait_stream` and new events take the host three times as long.)
    """

    def __init__(self, link: "_Link"):
        self.link = link
        # small kernels that signal must not queue behind the blocks of a large one
        self.stream = torch.cuda.Stream(link.device, priority=-1)
        self.begun = torch.cuda.Event()
        self.moments = cycle((_Moment(link), _Moment(link)))

    def __enter__(self) -> None:
        self.begun.record(self.link.current)
        self.begun.wait(self.stream)
        torch.cuda.set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self.link.current)

    def mark(self) -> _Moment:
        """Now. May be waited for until the next mark but one."""
        moment = next(self.moments)
        moment.event.record(self.stream)
        return moment


class _Link:
    """What a group keeps on one device: a stream and a buffer for K/V, a stream and a buffer for sums.

    One pass at a time: it is about the stream that was the `current` one when it began.
    """

    current: torch.cuda.Stream
    is_captured: bool  # is the pass, in a CUDA graph?

    def __init__(self, device: torch.device):
        self.device = device
        self.shards, self.sums = _Side(self), _Side(self)
        self.buffers: dict[str, _Symmetric] = {}  # "shards" and "sums"
        self.sums_free: torch.Event | None = None  # the end of the last pass that had sums
        self.retired: list[_Symmetric] = []  # too small by now, but a CUDA graph knows their addresses
        self.places: dict[Hashable, list[Flat]] = {}  # that are kept: see `CopyEngine.places`

    def buffer(self, name: str, nbytes: int, group: dist.ProcessGroup) -> _Symmetric:
        """A buffer of at least `nbytes`, the old one if it will do. The same on every rank, which all call this."""
        old = self.buffers.get(name)
        if old is None or old.nbytes < nbytes:
            if self.is_captured:
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
        self.buffers[name].captured |= self.is_captured
        return self.buffers[name]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.buffers.values(), *self.retired))


_links: WeakKeyDictionary[dist.ProcessGroup, dict[torch.device, _Link]] = WeakKeyDictionary()


def release_buffers(group: dist.ProcessGroup) -> int:
    """Give the group's buffers back, on every device; returns how many bytes they were."""
    links = _links.pop(group, {}).values()
    nbytes = sum(link.nbytes for link in links)
    for link in links:
        torch.cuda.synchronize(link.device)
        for kept in (link.buffers, link.retired, link.places):
            kept.clear()  # a link and its sides know each other, so they stay until the garbage collector comes
    return nbytes


class CopyEngine:
    """Pulls by the copy engine out of symmetric memory, for a pass on the current stream. `device`: of the tensors, a
    GPU that is the current one.

    One pass at a time: a pass that starts on another stream waits for the one before it.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self.group = group
        links = _links.setdefault(group, {})
        if device not in links:
            links[device] = _Link(device)
        self.link = links[device]
        self.link.current = torch.cuda.current_stream(device.index)  # not told which, PyTorch asks what there is
        self.link.is_captured = torch.cuda.is_current_stream_capturing()
        self.has_sent = False  # sums, in this pass

    @staticmethod
    def memory_of(rank: int) -> int:
        """The rank whose memory is that of `rank`."""
        return rank

    # K and V: published once, pulled by whoever needs them

    def places(self, sizes: list[int], dtype: torch.dtype) -> list[Flat]:
        """Flat tensors of these sizes, where pulls go that the current stream waits for. Small ones are kept for later
        passes on that stream, with the views that were made of them; a CUDA graph has its own."""
        link, kept = self.link, self.link.places
        key, nbytes = (*sizes, dtype, link.current), sum(sizes) * dtype.itemsize
        if key in kept and not link.is_captured:
            return kept[key]
        with torch.inference_mode(False):  # as in `_Link.buffer`
            made = [Flat(torch.empty(size, dtype=dtype, device=link.device)) for size in sizes]
        if 2 * nbytes <= KEPT_BYTES and not link.is_captured:
            if nbytes + sum(place.x.nbytes for places in kept.values() for place in places) > KEPT_BYTES:
                kept.clear()
            kept[key] = made
        return made

    def publish(
        self, size: int, dtype: torch.dtype, fill: Callable[[Flat], object], first: list[tuple[Flat, Moves]]
    ) -> list[_Moment]:
        """Let every rank pull what `fill` writes to this rank's buffer of `size` elements, and pull what is `first`.

        That and `pull` happen on the stream of the pulls. See Note [One barrier before, one after].
        """
        link = self.link
        shards = link.buffer("shards", size * dtype.itemsize, self.group)
        with link.shards:
            shards.barrier(0)
            fill(*shards.see(_Symmetric.cut, 1, size, dtype))
            shards.barrier(1)
            return [self._pull_shards(*x) for x in first]

    def pull(self, into: Flat, moves: Moves) -> _Moment:
        """Fill a flat tensor with what was published, after what the current stream has been given."""
        with self.link.shards:
            return self._pull_shards(into, moves)

    def _pull_shards(self, into: Flat, moves: Moves) -> _Moment:
        self._pull(into, moves, self.link.buffers["shards"])
        return self.pulled()

    def _pull(self, into: Flat, moves: Moves, buffer: _Symmetric, start: int = 0) -> None:
        parts = into.see(Flat.parts, moves.sizes)
        for part, theirs in buffer.see(_Symmetric.sources, moves, into.x.dtype, start, self.memory_of):
            self.copy(parts[part], theirs)

    def pulled(self) -> _Moment:
        """Wait for it to use what was pulled so far."""
        return self.link.shards.mark()

    def copy(self, into: Tensor, x: Tensor) -> None:
        """Copy a flat tensor: the copy engine takes nothing else."""
        into.copy_(x, non_blocking=True)

    # dK and dV: from buffer to buffer

    def buffers(self, count: int, size: int, dtype: torch.dtype) -> list[Flat]:
        """Buffers for `exchange` and `collect`, in the same order on every rank; good until `finish`."""
        link = self.link
        sums = link.buffer("sums", count * _aligned(size * dtype.itemsize), self.group)
        if link.sums_free is not None and not link.is_captured:
            link.sums_free.wait(link.current)  # the pass before this one may have run on another stream
        return sums.see(_Symmetric.cut, count, size, dtype)

    def exchange(self, send: Tensor, receive: Tensor, to: int, source: int, tag: int) -> _Moment:
        """Pull `receive` out of the buffer that `source` sends from; it is the one that this rank sends from.

        Signals are on channel `2 * tag` (what is sent is complete) and `2 * tag + 1` (it was pulled), as far as the
        channels go.
        """
        side, sums = self.link.sums, self.link.buffers["sums"]
        self.has_sent = True
        channel = 2 * (tag % sums.exchanges)
        with side:
            self._signal(to, source, channel)
            if receive.numel():
                theirs = self.memory_of(source), receive.dtype, int(send.storage_offset()), receive.numel()
                receive.copy_(sums.see(_Symmetric.part, *theirs))
            copied = side.mark()
            self._signal(source, to, channel + 1)  # nothing later here overwrites what `to` has yet to pull
        return copied

    def pull_sums(self, sums: Flat, into: Flat, moves: Moves) -> _Moment:
        """Fill a flat tensor out of every rank's buffer, once all ranks have their sums in the one that here is `sums`.
        When that was waited for all have pulled what they need."""
        side, buffer = self.link.sums, self.link.buffers["sums"]
        self.has_sent = True
        with side:
            buffer.barrier(0)
            self._pull(into, moves, buffer, int(sums.x.storage_offset()))
            buffer.barrier(1)
            return side.mark()

    def _signal(self, to: int, source: int, channel: int) -> None:
        """Signal `to`, and wait for the signal of `source`."""
        sums = self.link.buffers["sums"]
        if to == source:  # then ranks signal in pairs, and a barrier is the same in one launch
            sums.barrier(channel)
        else:
            sums.signal(self.memory_of(to), channel)
            sums.wait_for(self.memory_of(source), channel)

    def finish(self) -> None:
        """The current stream waits until every buffer is free again, here and for the peers."""
        link = self.link
        if self.has_sent:  # else the stream of sums may be none of a capture
            link.sums.mark().wait()
        if not link.is_captured:
            link.sums_free = link.current.record_event(link.sums_free)
