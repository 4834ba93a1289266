"""Endurance: ring attention again and again, with random shapes, delays and other traffic; equal inputs, equal bits.

    torchrun --nproc-per-node 2 scripts/stress_ring.py --seconds 120                    # GPUs where there are, else CPU
    torchrun --nproc-per-node 2 scripts/stress_ring.py --iterations 10000 --transport nvlink

A pool of random small problems (shape, heads, layout, mask, dtype) is drawn first, the same on every rank, and each is
checked against fp64 as `check_ring.py` does. Then every iteration takes one of them, forward and backward, and compares
every result with that of the first time, bit by bit. Meanwhile each rank delays itself at random (between visits, and
the copies of shards beside them), other tensors are allocated and freed, and collectives of another group are under
way. In the end memory must be what it was after the warm-up.

Half of the problems are `deterministic=True`. Of the others, where gradients may differ between runs (on GPUs), they
may by what fp32 sums in another order do. Fails (exit status 1 on every rank) on a wrong first result, on a difference,
on memory that grew; a hang fails by the group's timeout. A row goes to results/stress_ring.csv.
"""

import argparse
import gc
import itertools
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import check_ring
from accuracy import NAMES, failures
from check_ring import maskings, one_rank_errors, ring_errors
from peers import DTYPES, Inputs, Shape, make_inputs
from report import add_output_arguments, append_rows, environment, output_path, significant
from ringflash import comm, ring_attention, shard, transport_of
from ringflash.layout import LAYOUTS
from ringflash.testing import relative_error
from world import World, add_world_arguments, reduce, start_world

ANOTHER_ORDER = 0.01  # relative difference of two 16-bit gradients whose fp32 sums went in another order
RESIDENT_SLACK = 48 * 2**20  # bytes that a process's resident memory may grow by: allocators keep what they freed
SPIN = 2_000_000  # clock cycles of the longest delay of a stream: about 1 ms


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
        mask, layout = pick.choice(list(maskings(1))), pick.choice(list(LAYOUTS))
        return cls(shape, pick.choice(dtypes), layout, mask, pick.random() < 0.5, seed)

    def __str__(self) -> str:
        flags = "deterministic" if self.deterministic else ""
        return f"problem {self.seed}: {self.shape} {self.dtype} {self.layout} {self.mask} {flags}".rstrip()


class Passes:
    """Forward and backward of one problem, on this rank's rows."""

    def __init__(self, problem: Problem, world: World, backend: str, transport: str):
        masking = maskings(problem.shape.s)[problem.mask]
        self.how: dict[str, Any] = {"group": world.group, "layout": problem.layout}
        if problem.layout == "balanced":
            self.how["layout_mask"] = masking.mask
        whole = make_inputs(problem.shape, DTYPES[problem.dtype], world.device, problem.seed)
        self.inputs = Inputs(*(shard(x, **self.how) for x in whole))
        self.how |= {"seq_len": problem.shape.s, "transport": transport, "backend": backend} | masking.options
        self.how["deterministic"] = problem.deterministic
        self.exact = problem.deterministic or world.device.type == "cpu" or backend == "torch"

    def __call__(self, between: Callable[[], None]) -> list[Tensor]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in self.inputs[:3]]
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
    """Random delays of this rank alone: of the host, and of the stream that is current."""

    def __init__(self, world: World):
        self.pick = random.Random(world.rank)
        self.on_gpu = world.device.type == "cuda"

    def __call__(self) -> None:
        if self.pick.random() < 0.2:
            time.sleep(self.pick.random() * 2e-3)
        if self.on_gpu and self.pick.random() < 0.3:
            torch.cuda._sleep(self.pick.randrange(SPIN))  # PyTorch's own tests delay streams so

    def before_each(self, generate: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        def delayed(*arguments: Any) -> Iterator[Any]:
            for x in generate(*arguments):
                self()
                yield x

        return delayed

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside, visits are delayed on the stream that computes, and copies of shards on theirs."""
        visits, pieces = self.before_each(comm.visits), self.before_each(comm._pieces_of)
        with mock.patch.multiple(comm, visits=visits, _pieces_of=pieces):
            yield


class Traffic:
    """Collectives of another group, of which one is always under way; they also carry the ranks' clocks."""

    def __init__(self, world: World):
        self.group = dist.new_group(list(range(world.size)), backend=world.backend)
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
                raise RuntimeError(f"a sum over the other group is wrong: {sums.unique().tolist()}")
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


def endure(world: World, options: argparse.Namespace, transport: str) -> int:
    """Returns the exit status, the same on every rank."""
    on_gpu = world.device.type == "cuda"
    dims, dtypes = options.dims or ([128] if on_gpu else [16, 24]), options.dtypes or (["bf16"] if on_gpu else ["fp32"])
    problems = [Problem.draw(seed, dims, dtypes, 2048 if on_gpu else 192) for seed in range(options.problems)]
    said: list[str] = []

    def complain(iteration: int, problem: Problem, words: list[str]) -> None:
        if words:
            said.append(f"rank {world.rank}, iteration {iteration}, {problem}: {', '.join(words)}")
            print(said[-1], flush=True)

    for problem in problems:
        complain(0, problem, check_first(problem, world, options.backend, transport))
    passes = [Passes(problem, world, options.backend, transport) for problem in problems]
    firsts = [run(lambda: None) for run in passes]
    world.say(f"{len(problems)} problems checked against fp64")

    traffic, delays, common, own = Traffic(world), Delays(world), random.Random(0), random.Random(world.rank)
    kept: list[Tensor] = []

    def iterate(iteration: int, problem: int, elapsed: float) -> float:
        finish = traffic.start(elapsed)
        churn(own, world.device, kept)
        with delays.around():
            results = passes[problem](delays)
        complain(iteration, problems[problem], passes[problem].differences(results, firsts[problem]))
        return finish()

    for problem in range(len(problems)):
        iterate(0, problem, 0.0)
    kept.clear()
    before = Memory.now(world)
    begin = last_word = time.perf_counter()
    done = 0
    for done in itertools.count(1):
        elapsed = iterate(done, common.randrange(len(problems)), time.perf_counter() - begin)
        if time.perf_counter() - last_word > 10:
            last_word = time.perf_counter()
            world.say(f"{done} iterations in {elapsed:.0f} s, {len(said)} complaints on rank 0")
        if done >= options.iterations or elapsed >= options.seconds:
            break
    seconds = time.perf_counter() - begin
    kept.clear()
    after = Memory.now(world)
    if growth := after.growth(before):
        said.append(f"rank {world.rank}, after {done} iterations: {', '.join(growth)}")
        print(said[-1], flush=True)
    worst = reduce(torch.tensor([*before, *after], dtype=torch.float64), dist.ReduceOp.MAX, world.group).long()
    complaints = int(reduce(torch.tensor([float(len(said))]), dist.ReduceOp.SUM, world.group))
    if world.rank == 0:
        row = environment(world.device) | {"world": world.size, "process_group": world.backend, "transport": transport}
        row |= {"backend": options.backend, "problems": len(problems), "iterations": done}
        row |= {"seconds": significant(seconds), "complaints": complaints}
        names = [f"{name}_{when}" for when in ("before", "after") for name in Memory._fields]
        append_rows(output_path(options), [row | dict(zip(names, worst.tolist(), strict=True))])
    world.say(f"{done} iterations in {seconds:.0f} s at {world.size} ranks by {transport}: {complaints} complaints")
    return 1 if complaints else 0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so long, warm-up not counted")
    parser.add_argument("--iterations", type=int, default=10_000, help="stop after so many")
    parser.add_argument("--problems", type=int, default=24)
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
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
