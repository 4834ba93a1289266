"""The nvlink transport without a GPU: who may use it, and its protocol over memory that CPU processes share.

The double of symmetric memory below does at once, and waits for at once, what a GPU does in the order of a stream. So a
ring that ends here has no wait that depends on later work, and a ring that is right under random delays waits for all
that it needs of its peers.
"""

import gc
import random
import time
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import Attention, gradients, small_blocks, world
from torch import Tensor

from emulation import Loopback, Rank
from peers import Shape, make_inputs, passes_of
from ringflash import comm, nvlink, release_buffers, ring_attention, shard
from ringflash import gradients as dkv
from ringflash.comm import NvlinkTransport
from ringflash.layout import count_rows, layout_runs
from ringflash.mask import Mask
from ringflash.nvlink import Place, find_obstacle
from ringflash.plan import plan_ring, split_visits
from ringflash.testing import random_inputs

LAYOUTS = ["contiguous", "zigzag", "striped"]
MASKS = {"full": {}, "causal": {"causal": True}, "window": {"causal": True, "window": (11, None)}}
PAD_WORDS = 512


class SharedMemory:
    """What PyTorch's handle of symmetric memory offers, on files that all processes of the group map."""

    made = 0
    most_delay = 0.0  # seconds

    def __init__(self, nbytes: int, group: dist.ProcessGroup):
        self.rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        directory: list[Any] = [mkdtemp(dir="/dev/shm" if Path("/dev/shm").exists() else None) if not self.rank else ""]
        dist.broadcast_object_list(directory, group_src=0, group=group)

        def mapped(kind: str, rank: int, size: int, dtype: torch.dtype) -> Tensor:
            return torch.from_file(f"{directory[0]}/{kind}-{rank}", shared=True, size=size, dtype=dtype)

        self.memory = [mapped("memory", rank, nbytes, torch.uint8) for rank in range(world_size)]
        self.pads = [mapped("pad", rank, PAD_WORDS, torch.int32) for rank in range(world_size)]
        dist.barrier(group)
        if not self.rank:
            for path in Path(directory[0]).iterdir():
                path.unlink()
            Path(directory[0]).rmdir()

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype) -> Tensor:
        assert sizes == tuple(self.memory[rank].shape) and dtype == torch.uint8
        return self.memory[rank]

    def get_signal_pad(self, rank: int) -> Tensor:
        return self.pads[rank]

    def _change(self, pad: Tensor, word: int, before: int, after: int, what: str, timeout_ms: int) -> None:
        time.sleep(random.random() * self.most_delay)
        deadline = time.monotonic() + timeout_ms / 1000
        while pad[word] != before:
            assert time.monotonic() < deadline, what
            time.sleep(0)
        pad[word] = after

    def put_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        what = f"rank {self.rank} can't signal rank {rank} on channel {channel}"
        self._change(self.pads[rank], channel * len(self.pads) + self.rank, 0, 1, what, timeout_ms)

    def wait_signal(self, rank: int, channel: int, timeout_ms: int) -> None:
        what = f"rank {self.rank} waits for rank {rank} on channel {channel}"
        self._change(self.pads[self.rank], channel * len(self.pads) + rank, 1, 0, what, timeout_ms)

    def barrier(self, channel: int, timeout_ms: int) -> None:
        others = [rank for rank in range(len(self.pads)) if rank != self.rank]
        for rank in others:
            self.put_signal(rank, channel, timeout_ms)
        for rank in others:
            self.wait_signal(rank, channel, timeout_ms)


class NoStream:
    """A stream on which everything is done at once, and its events."""

    def __init__(self, *_: Any, **__: Any):
        pass

    def wait_stream(self, _: "NoStream") -> None:
        pass

    def record_event(self, _: "NoStream | None" = None) -> "NoStream":
        return self

    def record(self, _: "NoStream") -> None:
        pass

    def wait(self, _: "NoStream | None" = None) -> None:
        pass


@contextmanager
def nvlink_on_cpus(most_delay: float = 0.0):
    """`ring_attention` of CPU tensors goes by `NvlinkTransport`, over `SharedMemory`."""

    def rendezvous(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, SharedMemory]:
        handle = SharedMemory(nbytes, group)
        return handle.memory[handle.rank], handle

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SharedMemory, "most_delay", most_delay)
        patch.setattr(nvlink, "_rendezvous", rendezvous)
        patch.setattr(nvlink, "_GRANULARITY", 256)
        patch.setattr(comm, "make_transport", lambda name, group, device: NvlinkTransport(group, device))
        patch.setattr(torch.cuda, "Stream", NoStream)
        stream = NoStream()
        patch.setattr(torch.cuda, "current_stream", lambda _=None: stream)
        patch.setattr(torch.cuda, "Event", NoStream)
        patch.setattr(torch.cuda, "set_stream", lambda _: None)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.cuda, "synchronize", lambda _: None)
        yield


def attend(seq_len: int, layout: str, batch: int = 2, seed: int = 0, **options: Any) -> Attention:
    """This rank's share of a random problem, forward and backward."""
    inputs = random_inputs(batch, seq_len, 4, 16, kv_heads=2, v_head_dim=24, seed=seed)
    q, k, v, dout = (shard(x, group=world(), layout=layout) for x in inputs[:4])
    dlse = shard(inputs.dlse, group=world(), layout=layout, dim=2)
    leaves = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    with small_blocks():
        options |= {"layout": layout, "seq_len": seq_len, "return_lse": True}
        out, lse = ring_attention(q, k, v, group=world(), **options)
        grads = gradients((out, lse), leaves, inputs._replace(dout=dout, dlse=dlse))
    return Attention(out.detach(), lse.detach(), *grads)


def same_bits(seq_len: int, layout: str, **options: Any) -> bool:
    """Does the nvlink transport give what gloo gives?"""
    by_gloo = attend(seq_len, layout, **options)
    with nvlink_on_cpus():
        by_nvlink = attend(seq_len, layout, **options)
    return all(map(torch.equal, by_gloo, by_nvlink))


def all_same_bits(layout: str) -> list[bool]:
    lengths = (37, 48, max(dist.get_world_size() - 1, 1))
    results = []
    names = "HALVED_BYTES", "APART_BYTES", "STRAIGHT_BYTES", "LAP_BYTES", "LAP_SHARDS"
    round_the_ring = (
        (0, 0, 0, 0, 1),  # all shards in halves
        (0, dkv.APART_BYTES, 0, 0, 1),  # others' alone
        (dkv.HALVED_BYTES, 0, 0, 0, 1),  # none
    )
    straight_home = (  # between two ranks the first alone, where half a shard is seen
        (0, 0, dkv.STRAIGHT_BYTES, 0, 1),  # from one launch where that is little
        (0, 0, 0, dkv.LAP_BYTES, 1),  # from one launch
        (0, 0, 0, 12 * 2 * (16 + 24) * 4, 1),  # from launches of 1 to 3 shards
    )
    ways = [*product(round_the_ring, lengths), *product(straight_home, lengths[:: 2 if world().size() > 2 else 3])]
    for bounds, seq_len in ways:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in zip(names, bounds, strict=True):
                patch.setattr(dkv, name, value)
            results += [same_bits(seq_len, layout, **mask) for mask in MASKS.values()]
    with nvlink_on_cpus():
        return [*results, release_buffers(world()) > 0, release_buffers(world()) == 0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_pulled_shards_give_the_bits_of_shards_that_are_passed_round(workers, world_size, layout):
    """Even and odd lengths, ranks without rows, halves; buffers that are kept, grow, and are given back."""
    ways = 3 * 3 + 3 * (2 if world_size > 2 else 1)
    assert workers(world_size).run(all_same_bits, layout) == [[True] * (3 * ways + 2)] * world_size


def kept_views() -> tuple[bool, bool]:
    """Does a second pass find all views that the first one made? Are those right that are made anew each time?"""
    counts = []
    with nvlink_on_cpus():
        for _ in range(2):
            attend(24, "zigzag", causal=True)
            (link,) = nvlink._links[world()].values()
            places = [place for places in link.places.values() for place in places]
            counts.append([len(x.seen) for x in (*link.buffers.values(), *places)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvlink, "MOST_VIEWS", 1)
        right = same_bits(24, "zigzag", causal=True)
    with nvlink_on_cpus():
        release_buffers(world())
    return counts[0] == counts[1] and len(counts[0]) > 3, right


def what_is_left_of_released_buffers() -> list[str]:
    """What release_buffers leaves alive, without the garbage collector."""
    gc.disable()
    with nvlink_on_cpus():
        attend(24, "zigzag", causal=True)
        (link,) = nvlink._links[world()].values()
        kept = {**link.buffers, "place": next(iter(link.places.values()))[0]}
        alive = {name: weakref.ref(x) for name, x in kept.items()}
        del link, kept
        release_buffers(world())
        left = [name for name, x in alive.items() if x() is not None]
    gc.enable()
    return left


def test_released_buffers_are_gone_at_once(workers):
    assert workers(2).run(what_is_left_of_released_buffers) == [[]] * 2


def test_views_of_buffers_are_made_once_and_may_be_forgotten(workers):
    assert workers(2).run(kept_views) == [(True, True)] * 2


def test_of_long_lists_of_views_few_are_kept(monkeypatch):
    monkeypatch.setattr(nvlink, "MOST_VIEWS", 100)
    flat = nvlink.Flat(torch.zeros(64))
    for size in range(64):
        flat.see(nvlink.Flat.parts, (*[1] * size, 64 - size))
        assert sum(map(len, flat.seen.values())) < 100 + 64


def test_small_places_are_kept_for_passes_on_their_stream(monkeypatch):
    class Group:
        pass

    group: Any = Group()
    monkeypatch.setattr(nvlink, "KEPT_BYTES", 128)

    def place(size: int, stream: int = 0, captured: bool = False) -> nvlink.Flat:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.cuda, "current_stream", lambda _=None: stream)
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captured)
            (place,) = NvlinkTransport(group, torch.device("cpu")).places([size], torch.float32)
        assert place.x.shape == (size,) and place.x.dtype == torch.float32
        return place

    with nvlink_on_cpus():
        first = place(16)
        assert place(16) is first
        assert place(16, stream=1) is not first  # nothing orders the two streams
        assert place(16, captured=True) is not first  # a graph writes to its own as long as it lives
        assert place(16) is first
        assert place(17) is not place(17) and place(16) is first  # too large to be kept
        place(15)
        assert place(16) is not first  # there were too many


def trained_after_inference() -> bool:
    with nvlink_on_cpus():
        with torch.inference_mode():
            x = torch.ones(1, 64, 4, 24)  # larger than what comes, which gets its buffer
            ring_attention(x, x, x, group=world())
            q, k, v = (shard(x, group=world()) for x in random_inputs(1, 24, 4, 16, kv_heads=2, v_head_dim=24)[:3])
            ring_attention(q, k, v, group=world())  # what comes, which gets its views
        try:
            return same_bits(24, "zigzag", batch=1)
        finally:
            release_buffers(world())


def test_a_group_whose_first_call_was_in_inference_mode_can_train(workers):
    assert workers(2).run(trained_after_inference) == [True] * 2


def differing_random_problems(iterations: int, seed: int) -> list[str]:
    """Which problems come out otherwise under random delays. Also leaves no signal up."""
    order, wrong = random.Random(seed), []
    random.seed(dist.get_rank())  # each rank has its own delays
    for iteration in range(iterations):
        options = {
            "seq_len": order.randint(1, 40), "layout": order.choice(LAYOUTS), "batch": order.randint(1, 2),
            "seed": iteration, **MASKS[order.choice(list(MASKS))],
        }  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dkv, "HALVED_BYTES", order.choice([0, dkv.HALVED_BYTES]))
            patch.setattr(dkv, "APART_BYTES", order.choice([0, dkv.APART_BYTES]))
            patch.setattr(dkv, "STRAIGHT_BYTES", order.choice([0, dkv.STRAIGHT_BYTES]))
            patch.setattr(dkv, "LAP_BYTES", order.choice([0, 12 * 2 * (16 + 24) * 4, dkv.LAP_BYTES]))
            patch.setattr(dkv, "LAP_SHARDS", 1)
            patch.setattr(comm, "GROUP_BYTES", order.choice([0, 10_000, comm.GROUP_BYTES]))
            patch.setattr(comm, "FIRST_BYTES", order.choice([0, comm.FIRST_BYTES]))
            expected = attend(**options)
            with nvlink_on_cpus(most_delay=0.002):
                if not all(map(torch.equal, attend(**options), expected)):
                    wrong.append(str(options))
    (link,) = nvlink._links[world()].values()
    dist.barrier()
    up = [name for name, x in link.buffers.items() if x.handle.get_signal_pad(dist.get_rank()).any()]
    wrong += [f"signal up: {name}" for name in up]
    assert sorted(link.buffers) == ["shards", "sums"]
    with nvlink_on_cpus():
        release_buffers(world())
    return wrong


@pytest.mark.parametrize(("world_size", "iterations"), [(2, 10), (3, 40), (4, 10)])  # in pairs, and with 4 some of them
def test_delays_on_any_rank_change_no_bit(workers, world_size, iterations):
    assert workers(world_size).run(differing_random_problems, iterations, 0) == [[]] * world_size


@contextmanager
def late_pulls_of_sums():
    """Sums are pulled when somebody waits for them, as late as the order of streams allows; memory is not clean."""
    pull, finish, under_way = NvlinkTransport.pull_sums, NvlinkTransport.finish, deque()

    class Late:
        def __init__(self, *arguments: Any):
            self.arguments = arguments

        def wait(self) -> None:
            while self in under_way:
                pull(*under_way.popleft().arguments)

    def pull_late(transport: NvlinkTransport, sums: nvlink.Flat, into: nvlink.Flat, moves: nvlink.Moves) -> Late:
        into.x.fill_(float("nan"))
        under_way.append(Late(transport, sums, into, moves))
        return under_way[-1]

    def finish_late(transport: NvlinkTransport) -> None:
        if under_way:
            under_way[-1].wait()
        finish(transport)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NvlinkTransport, "pull_sums", pull_late)
        patch.setattr(NvlinkTransport, "finish", finish_late)
        yield


def differing_in_laps(most_shards: int) -> list[str]:
    wrong = []
    for shards, layout, mask in product(range(1, most_shards + 1), LAYOUTS[:2], MASKS):
        lap_bytes = shards * 10 * 2 * 2 * (16 + 24) * 4
        with mock.patch.multiple(dkv, STRAIGHT_BYTES=0, LAP_SHARDS=1, LAP_BYTES=lap_bytes), nvlink_on_cpus():
            expected = attend(47, layout, **MASKS[mask])
            with late_pulls_of_sums():
                if not all(map(torch.equal, attend(47, layout, **MASKS[mask]), expected)):
                    wrong.append(f"{shards} {layout} {mask}")
    with nvlink_on_cpus():
        release_buffers(world())
    return wrong


def test_a_lap_waits_for_the_pulls_of_sums_that_lie_where_its_own_go(workers):
    assert workers(5).run(differing_in_laps, 2) == [[]] * 5


def test_shared_memory_is_zeroed_before_anybody_meets_and_known_before_anybody_signals():
    """PyTorch does both on the default stream: zeroes it, and lets the others signal there once all have met; then
    writes down where theirs is, to memory that the current stream freed."""
    calls = mock.Mock()
    with (
        mock.patch("torch._C._distributed_c10d._SymmetricMemory", calls.memory),
        mock.patch("torch.distributed._symmetric_memory.rendezvous", calls.meet),
        mock.patch("torch.cuda.default_stream", calls.default_stream),
        mock.patch("torch.cuda.current_stream", calls.current_stream),
    ):
        made = nvlink._rendezvous(512, mock.Mock(), torch.device("cuda", 1))
    names = [name for name, *_ in calls.mock_calls if name not in ("default_stream", "current_stream")]
    waits = [f"{which}_stream().synchronize" for which in ("default", "current")]
    assert names == ["memory.empty_strided_p2p", *waits, "meet", waits[0]]
    assert calls.default_stream.call_args == calls.current_stream.call_args == mock.call(torch.device("cuda", 1))
    assert made == (calls.memory.empty_strided_p2p(), calls.meet())


def test_an_error_of_a_kernel_before_is_not_said_to_be_one_of_the_meeting():
    streams = mock.Mock()
    streams().synchronize.side_effect = RuntimeError("an illegal memory access")
    with (
        mock.patch("torch._C._distributed_c10d._SymmetricMemory"),
        mock.patch("torch.distributed._symmetric_memory.rendezvous"),
        mock.patch.multiple("torch.cuda", default_stream=streams, current_stream=streams),
        pytest.raises(RuntimeError, match=r"^an illegal memory access$"),
    ):
        nvlink._rendezvous(512, mock.Mock(), torch.device("cuda", 1))


def overwritten_shards(passes: int, failing: int) -> list[str]:
    """Shards that were another pass's, where ranks take their time over visits and nothing else keeps them in step. Of
    `failing` passes the last one fails on every rank, on some sooner. And signals that are up in the end."""
    group, wrong = world(), []
    plan = plan_ring(Mask(), "contiguous", 32, dist.get_rank(), dist.get_world_size())
    random.seed(dist.get_rank())
    with nvlink_on_cpus():
        for number in range(passes):
            k = torch.full((1, 8, 2, 16), 100.0 * number + dist.get_rank())
            transport = NvlinkTransport(group, k.device)
            groups = split_visits(plan, 1, 1)
            fails = number % failing == failing - 1
            with suppress(ArithmeticError), comm.visits(plan, groups, k, -k, transport) as arrivals:
                for index, _, k_here, v_here in arrivals:
                    time.sleep(random.random() * 0.005)
                    if fails and index == dist.get_rank():
                        raise ArithmeticError
                    step = groups[index].last_step
                    expected = 100.0 * number + plan.source(step)
                    if not ((k_here == expected).all() and (v_here == -expected).all()):
                        wrong.append(f"pass {number} step {step}")
        dist.barrier()
        (link,) = nvlink._links[group].values()
        if link.buffers["shards"].handle.get_signal_pad(dist.get_rank()).any():
            wrong.append("signal up")
        release_buffers(group)
    return wrong


@pytest.mark.parametrize("failing", [100, 3])
def test_a_shard_is_published_only_when_all_have_pulled_the_one_before(workers, failing):
    """Also where that pass failed."""
    assert workers(4).run(overwritten_shards, 20, failing) == [[]] * 4


def after_a_failing_pull() -> list[str]:
    """What is wrong in and after a pass whose first pull fails on rank 0 alone."""
    group, wrong = world(), []
    plan = plan_ring(Mask(), "contiguous", 16, dist.get_rank(), dist.get_world_size())
    groups = split_visits(plan, 1, 1)
    with nvlink_on_cpus():
        for number in range(4):
            k = torch.full((1, 8, 2, 16), 100.0 * number + dist.get_rank())
            fails = number == 1 and dist.get_rank() == 0
            failing = mock.Mock(side_effect=ArithmeticError) if fails else NvlinkTransport.copy
            with mock.patch.object(NvlinkTransport, "copy", failing), suppress(ArithmeticError):
                with comm.visits(plan, groups, k, -k, NvlinkTransport(group, k.device)) as arrivals:
                    for index, _, k_here, _ in arrivals:
                        if not (k_here == 100.0 * number + plan.source(groups[index].last_step)).all():
                            wrong.append(f"pass {number} visit {index}")
                if fails:
                    wrong.append("no error")
        release_buffers(group)
    return wrong


def test_a_pull_that_fails_to_start_leaves_the_ranks_in_step(workers):
    assert workers(2).run(after_a_failing_pull) == [[]] * 2


class Capture:
    """Of streams and events whether they are part of a capture, which work outside may not be waited for in."""

    is_under_way = False
    joined: ClassVar[set[int]] = set()


class CapturedEvent(NoStream):
    is_captured = False

    def record(self, _: NoStream) -> None:
        self.is_captured = Capture.is_under_way and id(_) in Capture.joined

    def wait(self, _: NoStream | None = None) -> None:
        if self.is_captured:
            Capture.joined.add(id(_))
        elif Capture.is_under_way and id(_) in Capture.joined:
            raise RuntimeError("dependency created on uncaptured work in another stream")


def error_of_a_capture_after_forward_passes() -> str:
    q, k, v = (shard(x, group=world()).requires_grad_() for x in random_inputs(1, 64, 2, 16)[:3])
    patches = {"Event": CapturedEvent, "is_current_stream_capturing": lambda: Capture.is_under_way}
    with nvlink_on_cpus(), mock.patch.multiple(torch.cuda, **patches):
        ring_attention(q, k, v, group=world(), causal=True)
        with mock.patch.multiple(Capture, is_under_way=True, joined={id(torch.cuda.current_stream())}):
            out = ring_attention(q, k, v, group=world(), causal=True)
            try:
                torch.autograd.grad(out.sum(), (q, k, v))
                return "captured"
            except RuntimeError as error:
                return str(error)
            finally:
                release_buffers(world())


def test_a_capture_of_what_has_not_run_backward_says_so(workers):
    for words in workers(2).run(error_of_a_capture_after_forward_passes):
        assert "make one call with these shapes, forward and backward, before the capture" in words


def looped_back() -> list[str]:
    """A pass of rank 5 of 8 in a group of one: what it leaves up, and what it has not launched."""
    wrong, inputs = [], make_inputs(Shape(1, 2, 1, 16, 16), torch.float32, torch.device("cpu"))
    with nvlink_on_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(dkv, "HALVED_BYTES", 0)
        transport = Loopback(world(), inputs.q.device)
        rank = Rank(plan_ring(Mask(right=0), "zigzag", 8 * 16, 5, 8), inputs, "torch", transport)
        with rank.around():
            passes_of(rank.attend, inputs)["forward+backward"]()
        for name in ("shards", "sums"):
            if transport.link.buffers[name].handle.get_signal_pad(0).any():
                wrong.append(f"signal up: {name}")
        release_buffers(world())
    return wrong


def test_a_rank_can_be_looped_back_on_itself(workers):
    assert workers(1).run(looped_back) == [[]]


def rows_copied(seq_len: int, layout: str, **mask: Any) -> int:
    """Key rows that this rank pulls in one forward pass: elements of one head of K and V, 16 each."""
    copied, copy = [], NvlinkTransport.copy
    with nvlink_on_cpus(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(comm, "FIRST_BYTES", 0)  # else the rank's own shard is copied beside another
        patch.setattr(NvlinkTransport, "copy", lambda self, into, x: copied.append(x.numel()) or copy(self, into, x))
        q, k, v, *_ = (shard(x, group=world(), layout=layout) for x in random_inputs(1, seq_len, 2, 16, kv_heads=1)[:3])
        ring_attention(q, k, v, group=world(), layout=layout, seq_len=seq_len, **mask)
        release_buffers(world())
    return sum(copied) // (2 * 16)


def test_no_row_is_pulled_that_is_not_seen(workers):
    # zigzag, causal: the later half of a shard is not seen by the ranks above
    assert workers(4).run(rows_copied, 64, "zigzag", causal=True) == [48 - 8 * rank for rank in range(4)]
    # a window of 5 keys reaches 4 rows of the rank below
    assert workers(4).run(rows_copied, 64, "contiguous", causal=True, window=(4, 0)) == [0, 4, 4, 4]


def test_what_a_plan_needs_adds_up():
    """Causal zigzag of P ranks moves half of the shards below and all of those above."""
    for rank in range(8):
        plan = plan_ring(Mask(right=0), "zigzag", 128, rank, 8)
        rows = [needed.stop - needed.start for needed in plan.needed]
        assert rows[0] == count_rows(layout_runs("zigzag", 128, 8, rank)) == 16
        assert sum(rows[1:]) == 8 * rank + 16 * (7 - rank)


# Who may use it ---------------------------------------------------------------------------------------------------


def place(device: int, **changes: Any) -> Place:
    given: dict[str, Any] = {"host": "a", "reaches": (0, 1, 2, 3), "allocator": "CUDA", "may_share": False} | changes
    return Place(device=device, **given)


def test_places_survive_being_sent():
    for sent in (place(3), place(0, reaches=(0,), may_share=True, host="node-7/3f", allocator="NVSHMEM")):
        assert Place.decode(sent.encode()) == sent


@pytest.mark.parametrize(
    ("places", "obstacle"),
    [
        ([place(0), place(1), place(3)], None),
        ([place(0), place(1, host="b")], "ranks 0 and 1 are on different hosts"),
        ([place(0), place(1), place(0)], "ranks 0 and 2 share GPU 0"),
        ([place(0), place(1, reaches=(1,))], "GPUs 0 and 1 (ranks 0 and 1) can't address each other's memory"),
        ([place(0, reaches=(0,)), place(1)], "GPUs 0 and 1 (ranks 0 and 1) can't address each other's memory"),
        ([place(0), place(1, allocator="NVSHMEM")], "rank 1 has NVSHMEM allocator of symmetric memory, wanted CUDA"),
    ],
)
def test_an_obstacle_is_named(places, obstacle):
    assert find_obstacle(places) == obstacle


def test_ranks_share_a_gpu_where_they_ask_to_and_may():
    allowed = [place(0, may_share=True), place(0, may_share=True)]
    assert find_obstacle(allowed, share=True) is None
    assert find_obstacle(allowed) == "ranks 0 and 1 share GPU 0"
    assert "ALLOW_OVERLAPPING_DEVICES=1" in str(find_obstacle([place(0), place(0)], share=True))
