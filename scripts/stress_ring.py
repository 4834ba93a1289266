"""Endurance: ring attention again and again, with random shapes, delays and other traffic; equal inputs, equal bits.

    torchrun --nproc-per-node 2 scripts/stress_ring.py --seconds 120                    # GPUs where there are, else CPU
    torchrun --nproc-per-node 2 scripts/stress_ring.py --iterations 10000 --transport nvlink --seed 1
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 torchrun ...             # nvlink between ranks that share a GPU

A pool of random small problems (shape, heads, layout, mask, dtype) is drawn first, the same on every rank, and each is
checked against fp64 as `check_ring.py` does. Then every iteration takes one of them, forward and backward, and compares
every result with that of the first time, bit by bit. Meanwhile each rank delays itself at random (between visits, and
on the streams of the shards and of the sums beside them), other tensors are allocated and freed, and collectives of
another group are under way. In the end memory must be what it was after the warm-up.

Half of the problems are `deterministic=True`. Of the others, where gradients may differ between runs (on GPUs), they
may by what fp32 sums in another order do. Fails on a wrong first result or a difference (a mismatch), on memory that
grew (a leak), and on a hang, which ends by the groups' timeout: by an error, or under NCCL by the end of the process.
A row goes to results/stress_ring.csv, but for a process that ended. Another `--seed` draws other problems.
"""

import argparse
import gc
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import check_ring
from accuracy import NAMES, failures
from check_ring import one_rank_errors, ring_errors, variants
from peers import DTYPES, Inputs, Shape, make_inputs
from report import add_output_arguments, append_rows, environment, output_path, significant
from ringflash import comm, gradients, nvlink, ring_attention, shard, streams, transport_of
from ringflash.layout import LAYOUTS
from ringflash.testing import relative_error
from world import World, add_world_arguments, reduce, start_world

ANOTHER_ORDER = 0.01  # relative difference of two 16-bit gradients whose fp32 sums went in another order
RESIDENT_SLACK = 48 * 2**20  # bytes that a process's resident memory may grow by: allocators keep what they freed
CLOCK = 2_000_000  # cycles of a GPU in a millisecond, about: `torch.cuda._sleep` counts in those
MISMATCHED, HUNG = 1, 2  # exit status: results or memory are not what they were; an operation did not end


class Problem(NamedTuple):
    shape: Shape
    dtype: str
    layout: str
    mask: str
    deterministic: bool
    seed: int

    @classmethod
    def draw(cls, seed: int, dims: list[int], dtypes: list[str], most_tokens: int) -> "Problem":
        pick = random.Random(seed)
        kv_heads = pick.choice([1, 2, 3])
        shape = Shape(pick.choice([1, 2]), kv_heads * pick.choice([1, 2, 4]), kv_heads, 1, pick.choice(dims))
        shape = shape._replace(s=pick.choice([pick.randint(1, most_tokens), 64 * pick.randint(1, most_tokens // 64)]))
        masks = [name for name, variant in variants(1).items() if not variant.options]
        mask, layout = pick.choice(masks), pick.choice(list(LAYOUTS))
        return cls(shape, pick.choice(dtypes), layout, mask, pick.random() < 0.5, seed)

    def __str__(self) -> str:
        flags = "deterministic" if self.deterministic else ""
        return f"problem {self.seed}: {self.shape} {self.dtype} {self.layout} {self.mask} {flags}".rstrip()


class Passes:
    """Forward and backward of one problem, on this rank's rows."""

    def __init__(self, problem: Problem, world: World, backend: str, transport: str):
        variant = variants(problem.shape.s)[problem.mask]
        self.how: dict[str, Any] = {"group": world.group, "layout": problem.layout}
        # some problems go as large ones would: in several launches forward; backward half by half, in place, in laps
        self.first_bytes = 0 if problem.seed % 2 else comm.FIRST_BYTES
        self.sizes = {
            "HALVED_BYTES": 0 if problem.seed % 3 else gradients.HALVED_BYTES,
            "APART_BYTES": 0 if problem.seed % 4 < 2 else gradients.APART_BYTES,
            "STRAIGHT_BYTES": 0 if problem.seed % 5 < 3 else gradients.STRAIGHT_BYTES,
            "LAP_BYTES": (0, 2**16, gradients.LAP_BYTES)[problem.seed % 5 % 3],
            "LAP_SHARDS": 1,
        }
        if problem.layout == "balanced":
            self.how["layout_mask"] = variant.mask
        whole = make_inputs(problem.shape, DTYPES[problem.dtype], world.device, problem.seed)
        self.inputs = Inputs(*(shard(x, **self.how) for x in whole))
        self.how |= {"seq_len": problem.shape.s, "transport": transport, "backend": backend} | variant.masking
        self.how["deterministic"] = problem.deterministic
        self.exact = problem.deterministic or world.device.type == "cpu" or backend == "torch"

    def __call__(self, between: Callable[[], None]) -> list[Tensor]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in self.inputs[:3]]
        with mock.patch.object(comm, "FIRST_BYTES", self.first_bytes), mock.patch.dict(vars(gradients), self.sizes):
            out, lse = ring_attention(q, k, v, **self.how, return_lse=True)
            between()
            return [out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, self.inputs.dout)]

    def differences(self, results: list[Tensor], first: list[Tensor]) -> list[str]:
        """Which results are not what they were, and by how much."""
        found = []
        for name, x, before in zip(NAMES, results, first, strict=True):
            if not torch.equal(x.view(torch.uint8), before.view(torch.uint8)):
                error = relative_error(x, before)
                if self.exact or name in ("out", "lse") or not error <= ANOTHER_ORDER:
                    found.append(f"{name} by {error:.1e}")
        return found


class Delays:
    """Random delays of this rank alone, of up to `longest` ms: of the host, and of the stream that is current."""

    def __init__(self, world: World, longest: float):
        self.pick, self.longest = random.Random(world.rank), longest
        self.on_gpu = world.device.type == "cuda"

    def __call__(self) -> None:
        if self.pick.random() < 0.2:
            time.sleep(self.pick.random() * self.longest * 1e-3)
        if self.on_gpu and self.pick.random() < 0.3:
            torch.cuda._sleep(int(self.pick.random() * self.longest * CLOCK))  # PyTorch's own tests delay streams so

    def before_each(self, generate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def delayed(*arguments: Any) -> Iterator[Any]:
            for x in generate(*arguments):
                self()
                yield x

        return delayed

    def before(self, call: Callable[..., None]) -> Callable[..., None]:
        def delayed(*arguments: Any) -> None:
            self()
            call(*arguments)

        return delayed

    def after(self, call: Callable[..., None]) -> Callable[..., None]:
        def delayed(*arguments: Any) -> None:
            call(*arguments)
            self()

        return delayed

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, visits are delayed on the streams that compute, and copies and signals on theirs."""
        arrivals, pieces = self.before_each(comm._arrivals), self.before_each(comm._pieces_of)
        on_streams = [(nvlink._Symmetric, name) for name in ("barrier", "signal", "wait_for")]
        with ExitStack() as stack:
            stack.enter_context(mock.patch.multiple(comm, _arrivals=arrivals, _pieces_of=pieces))
            for owner, name in (*on_streams, (nvlink.CopyEngine, "copy")):
                stack.enter_context(mock.patch.object(owner, name, self.before(getattr(owner, name))))
            enter = self.after(streams.SideStream.__enter__)
            stack.enter_context(mock.patch.object(streams.SideStream, "__enter__", enter))
            yield


class Traffic:
    """Collectives of another group, of which one is always under way; they also carry the ranks' clocks."""

    def __init__(self, world: World, timeout: timedelta):
        self.group = dist.new_group(list(range(world.size)), timeout=timeout, backend=world.backend)
        self.device = world.device if world.backend == "nccl" else torch.device("cpu")
        self.world = world

    def start(self, elapsed: float) -> Callable[[], float]:
        """What is returned waits, and gives the largest `elapsed` of all ranks."""
        sums = torch.full((1000,), float(self.world.rank), device=self.device)
        clock = torch.tensor([elapsed], dtype=torch.float64, device=self.device)
        works = [
            dist.all_reduce(sums, group=self.group, async_op=True),
            dist.all_reduce(clock, dist.ReduceOp.MAX, group=self.group, async_op=True),
        ]

        def finish() -> float:
            for work in works:
                assert work is not None
                work.wait()
            if not bool((sums == sum(range(self.world.size))).all()):
                raise ArithmeticError(f"a sum over the other group is wrong: {sums.unique().tolist()}")
            return clock.item()

        return finish


def churn(pick: random.Random, device: torch.device, kept: list[Tensor]) -> None:
    """Allocate, and free what was allocated some iterations ago, so that addresses move."""
    kept.append(torch.full((pick.randrange(1, 2**18),), torch.nan, device=device))
    if len(kept) > pick.randrange(1, 8):
        del kept[: len(kept) // 2 + 1]
    if device.type == "cuda" and pick.random() < 0.01:
        torch.cuda.empty_cache()


class Memory(NamedTuple):
    allocated: int  # bytes on the GPU, 0 without
    tensors: int  # that Python knows
    resident: int  # bytes of this process

    @classmethod
    def now(cls, world: World) -> "Memory":
        gc.collect()
        if world.device.type == "cuda":
            torch.cuda.synchronize()
        tensors = sum(issubclass(type(x), Tensor) for x in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        allocated = torch.cuda.memory_allocated() if world.device.type == "cuda" else 0
        return cls(allocated, tensors, pages * 4096)

    def growth(self, before: "Memory") -> list[str]:
        slack = Memory(allocated=0, tensors=0, resident=RESIDENT_SLACK)
        return [
            f"{name} grew from {then} to {now}"
            for name, now, then, more in zip(self._fields, self, before, slack, strict=True)
            if now > then + more
        ]


def check_first(problem: Problem, world: World, backend: str, transport: str) -> list[str]:
    """What is wrong with a problem's results, against fp64."""
    drawn = check_ring.Problem.draw(problem.shape, problem.dtype, problem.mask, world.device)
    ring = ring_errors(drawn, world, problem.layout, backend, transport)
    return failures(ring, one_rank_errors(drawn, backend), DTYPES[problem.dtype])


class Endurance:
    """Iterations of this rank, and what was wrong with them."""

    def __init__(self, world: World, options: argparse.Namespace, transport: str):
        self.world, self.options, self.transport = world, options, transport
        on_gpu = world.device.type == "cuda"
        dims, dtypes = (
            options.dims or ([128] if on_gpu else [16, 24]),
            options.dtypes or (["bf16" if on_gpu else "fp32"]),
        )
        seeds = range(options.seed * options.problems, (options.seed + 1) * options.problems)
        self.problems = [Problem.draw(seed, dims, dtypes, 2048 if on_gpu else 192) for seed in seeds]
        self.traffic = Traffic(world, timedelta(seconds=options.timeout))
        self.delays = Delays(world, options.longest_delay)
        self.common, self.own = random.Random(options.seed), random.Random(world.rank)
        self.kept: list[Tensor] = []
        self.mismatches = self.leaks = self.done = 0
        self.seconds = 0.0

    def complain(self, words: str) -> None:
        print(f"rank {self.world.rank}, iteration {self.done}, {words}", flush=True)

    def compare(self, problem: Problem, words: list[str]) -> None:
        if words:
            self.mismatches += 1
            self.complain(f"{problem}: {', '.join(words)}")

    def iterate(self, number: int) -> float:
        """One problem; returns the seconds so far of the slowest rank, the same on every rank."""
        finish = self.traffic.start(self.seconds)
        churn(self.own, self.world.device, self.kept)
        with self.delays.around():
            results = self.passes[number](self.delays)
        self.compare(self.problems[number], self.passes[number].differences(results, self.firsts[number]))
        return finish()

    def warm_up(self) -> None:
        options, world = self.options, self.world
        for problem in self.problems:
            self.compare(problem, check_first(problem, world, options.backend, self.transport))
        self.passes = [Passes(problem, world, options.backend, self.transport) for problem in self.problems]
        self.firsts = [run(lambda: None) for run in self.passes]
        for number in range(len(self.problems)):
            self.iterate(number)
        self.world.say(f"{len(self.problems)} problems checked against fp64")

    def memory(self) -> Memory:
        self.kept.clear()
        return Memory.now(self.world)

    def last(self) -> None:
        """Iterate as often or as long as asked for."""
        begin = last_word = time.perf_counter()
        for self.done in itertools.count(1):
            elapsed = self.iterate(self.common.randrange(len(self.problems)))
            self.seconds = time.perf_counter() - begin
            if time.perf_counter() - last_word > 5:
                last_word = time.perf_counter()
                self.world.say(f"{self.done} iterations in {elapsed:.0f} s, {self.mismatches} mismatches on rank 0")
            if self.done >= self.options.iterations or elapsed >= self.options.seconds:
                return


def over_ranks(world: World, op: dist.ReduceOp.RedOpType, *values: float) -> list[float]:
    return reduce(torch.tensor(values, dtype=torch.float64), op, world.group).tolist()


def endure(world: World, options: argparse.Namespace, transport: str) -> int:
    """Returns the exit status, the same on every rank."""
    row: dict[str, Any] = {
        **environment(world.device),
        "world": world.size,
        "process_group": world.backend,
        "transport": transport,
    }
    row |= {"backend": options.backend, "problems": options.problems, "seed": options.seed}
    run, hung = Endurance(world, options, transport), False
    sums = [0] * 2
    worst: list[Any] = [""] * (2 * len(Memory._fields))
    try:
        run.warm_up()
        before = run.memory()
        run.last()
        after = run.memory()
        if growth := after.growth(before):
            run.leaks += 1
            run.complain(", ".join(growth))
        worst = [int(x) for x in over_ranks(world, dist.ReduceOp.MAX, *before, *after)]
        sums = [int(x) for x in over_ranks(world, dist.ReduceOp.SUM, run.mismatches, run.leaks)]
    except RuntimeError as error:  # after a timeout: groups, and perhaps the GPU, are of no more use
        hung = True
        run.complain(str(error))
    if world.rank == 0:
        row |= {"iterations": run.done, "seconds": significant(run.seconds)}
        row |= {"iterations_per_s": significant(run.done / run.seconds) if run.seconds else ""}
        row |= {"hangs": int(hung), "mismatches": sums[0], "leaks": sums[1]}
        names = [f"{name}_{when}" for when in ("before", "after") for name in Memory._fields]
        append_rows(output_path(options), [row | dict(zip(names, worst, strict=True))])
    world.say(
        f"{run.done} iterations in {run.seconds:.0f} s at {world.size} ranks by {transport}: "
        f"{sums[0]} mismatches, {sums[1]} leaks, {int(hung)} hangs"
    )
    return HUNG if hung else MISMATCHED if any(sums) else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, warm-up not counted")
    parser.add_argument("--iterations", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--problems", type=int, default=24, help="drawn for a run")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other problems")
    parser.add_argument("--longest-delay", type=float, default=1.0, metavar="MS", help="of a host or a stream")
    parser.add_argument("--timeout", type=float, default=120.0, help="of the group, in seconds: what a hang is")
    parser.add_argument("--backend", default="auto", help="attention backend: auto, triton or torch")
    parser.add_argument("--transport", choices=comm.TRANSPORTS, default="auto")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: bf16, on a CPU fp32")
    parser.add_argument("--dims", nargs="+", type=int, help="default: 128, on a CPU 16 24")
    add_output_arguments(parser, "stress_ring")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    world = start_world(options.device, options.pg_backend, timeout=timedelta(seconds=options.timeout))
    transport = transport_of(world.group, world.device) if options.transport == "auto" else options.transport
    status = endure(world, options, transport)
    if status == HUNG:
        if world.rank:  # torchrun ends all when one ends, and rank 0 has a row to write
            time.sleep(options.timeout)
        os._exit(status)  # to leave the groups in good order might take as long again
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
