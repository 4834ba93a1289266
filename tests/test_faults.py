"""What is lost when a rank is: the others raise within the timeout and say why, and go on in a new group.

Over gloo on CPUs; the last tests do the same on GPUs. And the ways to start the processes of a ring: fork and spawn
here, forkserver in every test that has workers, torchrun in the tests of the README and of the scripts.
"""

import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from oracle import FP32_BOUND, Attention, dense, small_blocks, world
from test_nvlink import nvlink_on_cpus

import stress_ring
from ringflash import comm, gradients, ops, release_buffers, ring_attention, shard
from ringflash.agreement import ABSENT_SECONDS
from ringflash.testing import WorkerError, Workers, random_inputs, relative_error
from world import World

ROOT = Path(__file__).resolve().parents[1]
WORLD_SIZE = 4
LOST = 1  # the rank that something happens to
SURVIVORS = [rank for rank in range(WORLD_SIZE) if rank != LOST]
TIMEOUT = 3.0  # seconds, of the group


def ring_error(group: dist.ProcessGroup, transport: str = "gloo", device: str = "cpu") -> float:
    """Of a step, forward and backward: the largest error of this rank's results, relative to dense attention."""
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    dims = {"heads": 4, "head_dim": 16 if device == "cpu" else 64, "kv_heads": 2}
    inputs = random_inputs(1, 101, **dims, dtype=dtype, device=device)
    inputs = inputs._replace(dlse=torch.zeros_like(inputs.dlse))
    expected = dense(inputs, causal=False)
    leaves = [shard(x, group=group).requires_grad_() for x in inputs[:3]]
    out, lse = ring_attention(*leaves, group=group, seq_len=101, return_lse=True, transport=transport)
    grads = torch.autograd.grad(out, leaves, shard(inputs.dout, group=group))
    wanted = [shard(x, group=group, dim=2 if x is expected.lse else 1) for x in expected]
    results = Attention(out.detach(), lse.detach(), *grads)
    return max(relative_error(x, y) for x, y in zip(results, wanted, strict=True))


@contextmanager
def happening(function: str, visit: int, event: Callable[[], None]) -> Iterator[None]:
    """`event` takes place in the call of that number of the backend's function: of a visit, or the last of a pass."""
    visits, backend_of = itertools.count(1), ops._backend

    def backend_with_event(*key: Any):
        backend = backend_of(*key)

        def visiting(*args: Any, **options: Any) -> Any:
            if next(visits) == visit:
                event()
            return getattr(backend, function)(*args, **options)

        return backend._replace(**{function: visiting})

    with mock.patch.object(ops, "_backend", backend_with_event), mock.patch.object(comm, "GROUP_BYTES", 0):
        yield


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_event() -> None:
    pass


class Report(NamedTuple):
    """What a survivor saw."""

    seconds: float  # until it raised
    words: str
    later_error: float  # of a ring in a new group of the survivors

    def write(self, directory: Path) -> None:
        part = directory / f".{dist.get_rank()}"  # a report is there as a whole or not at all
        part.write_text(json.dumps(self))
        part.rename(directory / f"survivor-{dist.get_rank()}")

    @staticmethod
    def read_all(directory: Path) -> list["Report"]:
        return [Report(*json.loads(path.read_text())) for path in sorted(directory.glob("survivor-*"))]


def lose_a_rank(directory: Path, function: str, fate: str) -> None:
    """Rank `LOST` dies, or hangs, in its second visit by `function`; with no function, it does not come at all."""
    rank, group = dist.get_rank(), dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    assert isinstance(group, dist.ProcessGroup)

    def hang() -> None:
        while len(Report.read_all(directory)) < len(SURVIVORS):
            time.sleep(0.05)

    with small_blocks(), mock.patch.object(gradients, "LAP_BYTES", 0):  # sums go round
        assert ring_error(group) <= FP32_BOUND
        if rank == LOST and not function:
            return hang()
        if rank == LOST:
            with happening(function, 2, die if fate == "dies" else hang), suppress(RuntimeError):  # they are gone
                ring_error(group)
            return None
        words, started = "", time.monotonic()
        try:
            with happening(function or "forward", 2, no_event):  # small groups, as on the lost rank
                ring_error(group)
        except RuntimeError as error:
            words = str(error)
        seconds = time.monotonic() - started
        dist.destroy_process_group()
        store = dist.FileStore(str(directory / "store"), len(SURVIVORS))
        dist.init_process_group("gloo", store=store, rank=SURVIVORS.index(rank), world_size=len(SURVIVORS))
        Report(seconds, words, ring_error(world())).write(directory)


@pytest.mark.parametrize(
    ("function", "fate"), [("forward", "dies"), ("backward", "dies"), ("forward", "hangs"), ("", "stays away")]
)
def test_when_a_rank_is_lost_the_others_say_why_within_the_timeout_and_go_on_without_it(tmp_path, function, fate):
    with Workers(WORLD_SIZE) as pool:
        pool.GRACE = 30.0  # seconds for the survivors to report
        if fate == "dies":
            with pytest.raises(WorkerError, match=rf"\Arank {LOST} of 4: the process ended with exit code -9\Z"):
                pool.run(lose_a_rank, tmp_path, function, fate)
        else:
            pool.run(lose_a_rank, tmp_path, function, fate)
    reports = Report.read_all(tmp_path)
    assert len(reports) == len(SURVIVORS)
    for rank, (seconds, words, later_error) in zip(SURVIVORS, reports, strict=True):
        assert words.startswith(f"ringflash: rank {rank} of the group: "), words
        if function:
            what = (
                "K and V of step [123]"
                if function == "forward"
                else "(K and V of step|dK and dV at step|dK and dV, come home)"
            )
            peers = f"receiving from rank {(rank - 1) % 4}|sending to rank {(rank + 1) % 4}"
            doing = "waiting for|starting to bring"
            assert re.search(rf"group: ({peers}) failed: .*\(({doing}) {what}", words), words
        else:
            assert f"there was no word from rank {LOST}" in words[-40:], words
        assert seconds < TIMEOUT + ABSENT_SECONDS + 1.0
        assert fate != "dies" or f"rank {LOST} failed" in words or rank == 3, words  # its neighbours name it
        assert later_error <= FP32_BOUND


def fail_everywhere() -> list[float]:
    """Errors of rings, each after one that no rank got through: the same visit raised on all of them."""

    def fail() -> None:
        raise MemoryError

    errors = []
    round_the_ring = itertools.product([0], (0, 2**40), ("forward", "backward"), (1, 3))
    round_the_ring = [*round_the_ring, (0, 0, "finish_backward", 1)]
    straight_home = [(2**40, 0, "backward", 1), (2**40, 0, "backward", 2), (2**40, 0, "finish_backward", 1)]
    in_two_laps = [(34 * 2 * 2 * 16 * 4, 0, "backward", 2), (34 * 2 * 2 * 16 * 4, 0, "backward", 3)]
    for lap, halved, function, visit in (*round_the_ring, *straight_home, *in_two_laps):
        sizes = {"STRAIGHT_BYTES": 0, "LAP_BYTES": lap, "LAP_SHARDS": 1}
        sizes |= {"HALVED_BYTES": halved, "APART_BYTES": 0}
        with mock.patch.multiple(gradients, **sizes), mock.patch.object(comm, "FIRST_BYTES", 0):
            with happening(function, visit, fail), pytest.raises(MemoryError):
                ring_error(world())
            errors.append(ring_error(world()))
    return errors


def fail_everywhere_by_nvlink() -> list[float]:
    with nvlink_on_cpus():
        try:
            return fail_everywhere()
        finally:
            release_buffers(world())


@pytest.mark.parametrize("transport", ["gloo", "nvlink"])
def test_after_a_visit_failed_on_every_rank_the_group_can_go_on(workers, transport):
    """Out of memory, and a smaller batch then."""
    by_rank = workers(3).run(fail_everywhere if transport == "gloo" else fail_everywhere_by_nvlink)
    assert max(map(max, by_rank)) <= FP32_BOUND


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_ring_runs_in_processes_started_by(method):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    run = [sys.executable, str(ROOT / "tests/start_ring.py"), method]
    done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_gloo_is_not_captured_in_a_cuda_graph(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match=r'transport="gloo" can\'t be captured'):
        comm.make_transport("gloo", mock.Mock(), torch.device("cuda"))
    comm.make_transport("gloo", mock.Mock(), torch.device("cpu"))


# On GPUs ----------------------------------------------------------------------------------------------------------

on_gpus = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU"),
    pytest.mark.timeout(600),
]
RANKS_ON_GPUS = {"gloo": 3, "nvlink": 3, "nccl": 2}  # where there are fewer GPUs ranks share, but not over NCCL
GPU_TIMEOUT = 10.0  # seconds, of the group
BF16_BOUND = 1e-2


def gpu_pool(transport: str) -> Workers:
    ranks = RANKS_ON_GPUS[transport]
    if transport == "nccl" and torch.cuda.device_count() < ranks:
        pytest.skip(f"NCCL wants a GPU a rank: {ranks} GPUs")
    pool = Workers(ranks, backend="nccl" if transport == "nccl" else "gloo", timeout=300)
    pool.GRACE = 120.0  # NCCL's watchdog takes its time to end a process
    return pool


def group_on_gpus(transport: str) -> dist.ProcessGroup:
    """A group of little patience, once kernels are compiled."""
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    assert ring_error(world(), transport, "cuda") <= BF16_BOUND
    group = dist.new_group(timeout=timedelta(seconds=GPU_TIMEOUT))
    assert isinstance(group, dist.ProcessGroup)
    return group


def ring_error_on_gpus(transport: str) -> float:
    return ring_error(group_on_gpus(transport), transport, "cuda")


def lose_a_rank_on_gpus(directory: Path, transport: str, function: str) -> None:
    """Rank `LOST` dies in its second visit by `function`; the others do what they can, and say how long after."""
    group = group_on_gpus(transport)
    assert ring_error(group, transport, "cuda") <= BF16_BOUND
    died = directory / "died"

    def end() -> None:
        died.write_text(str(time.time()))
        die()

    with happening(function, 2, end if dist.get_rank() == LOST else no_event):
        try:
            for _ in range(2):  # what had been launched before the end may still have been of use
                ring_error(group, transport, "cuda")
        finally:
            (directory / f"seconds-{dist.get_rank()}").write_text(str(time.time() - float(died.read_text())))


@pytest.mark.parametrize("function", ["forward", "backward"])
@pytest.mark.parametrize(
    "transport", [pytest.param(transport, marks=on_gpus) for transport in ("gloo", "nvlink", "nccl")]
)
def test_when_a_rank_on_gpus_is_lost_the_others_end_within_the_timeout_and_can_be_started_again(
    tmp_path, transport, function
):
    """Over gloo by an error of this package; over nvlink by one of CUDA; over NCCL its watchdog ends the process."""
    with gpu_pool(transport) as pool:
        with pytest.raises(WorkerError) as caught:
            pool.run(lose_a_rank_on_gpus, tmp_path, transport, function)
        words = str(caught.value)
        assert (
            re.search(rf"rank {LOST} of \d: the process ended with exit code -9", words) and "no answer in" not in words
        )
        for rank in {*range(pool.world_size)} - {LOST}:
            said = re.search(rf"rank {rank} of \d: (Traceback|the process ended with exit code -6)", words)
            assert said and (said[1] == "Traceback" or transport == "nccl"), words
            if transport != "nccl":
                assert float((tmp_path / f"seconds-{rank}").read_text()) < 2 * GPU_TIMEOUT + 5
        if transport == "gloo":
            assert words.count("RuntimeError: ringflash: rank") >= 2, words
        assert max(pool.run(ring_error_on_gpus, transport)) <= BF16_BOUND


def endure_on_gpus(path: Path, transport: str) -> int:
    group = group_on_gpus(transport)
    backend = dist.get_backend(group)
    device = torch.device("cuda", torch.cuda.current_device())
    where = World(dist.get_rank(), dist.get_world_size(), device, backend, group)
    few = ["--iterations", "200", "--problems", "8", "--timeout", "60", "--csv", str(path)]
    return stress_ring.endure(where, stress_ring.parse(few), transport)


@pytest.mark.parametrize(
    "transport", [pytest.param(transport, marks=on_gpus) for transport in ("gloo", "nvlink", "nccl")]
)
def test_delays_on_any_stream_change_no_bit_and_nothing_leaks(tmp_path, transport):
    """`scripts/stress_ring.py` for longer."""
    with gpu_pool(transport) as pool:
        assert pool.run(endure_on_gpus, tmp_path / "rows.csv", transport) == [0] * pool.world_size
