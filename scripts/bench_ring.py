"""Time ring attention beside the fastest one-GPU kernel on the whole sequence, and PyTorch's context_parallel.

    torchrun --nproc-per-node 2 scripts/bench_ring.py
    torchrun --nproc-per-node 8 scripts/bench_ring.py --shapes 1,32,8,131072,128 --layouts zigzag striped
    python scripts/bench_ring.py --emulate 8            # the compute side of 8 ranks, one after the other on one GPU

Shapes are global: `s` tokens over all ranks. Prints time, TFLOP/s a GPU, the speed-up over the fastest one-GPU kernel,
the efficiency (speed-up / ranks) and the peak of memory above the inputs, for the forward pass and for forward and
backward together; appends the rows to results/bench_ring.csv. Everything is timed interleaved in one run: one-GPU
kernels on rank 0 while the others wait, rings from a barrier until the slowest rank is done. What can't run here is
listed with the reason. Runs over gloo on CPUs too, to try the program; its figures mean nothing there.

With `--emulate W` the passes of W ranks are timed one after the other in one process (of many ranks, a sample):
efficiency is the time of one GPU on the whole sequence / (W x the slowest rank's). Beside them stand what the host
needs for each visit, the bytes that arrive during each (from the plan) with their time at 380 GB/s, how much of that is
longer than the visit, and the peak of memory with all that the nvlink transport keeps. Rows go to emulate_ring.csv and
emulate_ring_visits.csv. `emulation.py` says what is left out.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from emulation import emulate
from peers import DTYPES, FORMULA, LOADERS, MASKS, WORK, Case, Inputs, Shape, make_inputs, passes_of, reason
from report import (
    Row,
    add_output_arguments,
    add_timing_arguments,
    append_rows,
    environment,
    format_table,
    output_path,
    significant,
    time_interleaved,
)
from ringflash import ring_attention, shard, transport_of
from ringflash.layout import LAYOUTS, WANT_MASK
from world import World, add_world_arguments, reduce, start_world

SHAPES = ["1,32,8,16384,128", "1,32,8,65536,128", "1,16,16,131072,128"]
BASELINES = ["ringflash", "sdpa-fa2", "sdpa-cudnn", "flash-attn-cute"]
CONTEXT_PARALLEL = {  # PyTorch's: the kernel it is given, how it moves K/V
    "cudnn-alltoall": (SDPBackend.CUDNN_ATTENTION, "alltoall"),
    "cudnn-allgather": (SDPBackend.CUDNN_ATTENTION, "allgather"),
    "fa2-alltoall": (SDPBackend.FLASH_ATTENTION, "alltoall"),
    "fa2-allgather": (SDPBackend.FLASH_ATTENTION, "allgather"),
}


class Candidate(NamedTuple):
    """Something to time on this rank."""

    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None  # None: this rank only waits
    inputs: Inputs
    around: Callable[[], AbstractContextManager[object]] = nullcontext

    def passes(self) -> dict[str, Callable[[], object]]:
        if self.attend is None:
            return dict.fromkeys(WORK, lambda: None)
        return passes_of(self.attend, self.inputs)


class Contender(NamedTuple):
    implementation: str
    layout: str  # empty on one GPU
    ranks: int
    build: Callable[[World, Inputs, bool], Candidate]  # from the whole inputs, and whether the mask is causal

    def __str__(self) -> str:
        return f"{self.ranks}x {self.implementation} {self.layout}".strip()


def one_gpu(name: str) -> Contender:
    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        if world.rank != 0:
            return Candidate(None, whole)
        attention = LOADERS[name]()
        return Candidate(lambda q, k, v: attention(q, k, v, causal), whole)

    return Contender(name, "", 1, build)


def ring(layout: str, backend: str, transport: str, world_size: int) -> Contender:
    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return ring_attention(
                q,
                k,
                v,
                group=world.group,
                layout=layout,
                seq_len=whole.q.shape[1],
                transport=transport,
                causal=causal,
                backend=backend,
            )

        return Candidate(attend, Inputs(*(shard(x, group=world.group, layout=layout) for x in whole)))

    return Contender("ringflash", layout, world_size, build)


def context_parallel(name: str, causal: bool, world_size: int) -> Contender:
    """PyTorch's context_parallel. It takes as many key as query heads, so K/V are repeated, as its user must."""
    kernel, rotation = CONTEXT_PARALLEL[name]
    layout = "zigzag" if causal else "contiguous"  # its head-tail balance is zigzag

    def build(world: World, whole: Inputs, causal: bool) -> Candidate:
        from torch.distributed.tensor.experimental import context_parallel as enter
        from torch.distributed.tensor.experimental._attention import _cp_options, set_rotate_method

        if world.device.type == "cuda" and world.backend != "nccl":
            raise RuntimeError("context_parallel moves CUDA tensors by NCCL, which wants a GPU for every rank")
        mesh = init_device_mesh(world.device.type, (world.size,))

        def around(*buffers: Tensor) -> AbstractContextManager[object]:
            """Inside, scaled_dot_product_attention is a ring and `buffers (b, h, s, d)` are cut to this rank's rows."""
            set_rotate_method(rotation)
            _cp_options.enable_load_balance = causal  # it refuses to balance a full mask
            return enter(mesh, buffers=list(buffers), buffer_seq_dims=[2] * len(buffers), no_restore_buffers={*buffers})

        buffers = [x.transpose(1, 2).contiguous() for x in whole]
        with around(*buffers):
            mine = Inputs(*(x.clone().transpose(1, 2) for x in buffers))  # in memory (b, h, s, d), which it prefers

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

        def patched() -> AbstractContextManager[object]:
            return around(torch.empty(1, 1, 2 * world.size, 1, device=world.device))  # it wants something to cut

        with patched(), torch.no_grad():
            out = attend(*mine[:3])
        expected = ring_attention(*mine[:3], group=world.group, layout=layout, causal=causal)
        assert isinstance(expected, Tensor)
        difference = (out - expected).float().norm() / expected.float().norm()
        if not difference < 0.02:  # ten times the rounding of bf16: another result, so not to be compared
            raise RuntimeError(f"its output differs from ring_attention's by {difference:.1e}")
        return Candidate(attend, mine, patched)

    return Contender(f"context-parallel-{name}", layout, world_size, build)


def warm_up(candidate: Candidate, device: torch.device) -> float:
    """Run both passes; MiB above the inputs that forward and backward take at their peak, NaN on a CPU."""
    passes = candidate.passes()
    with candidate.around():
        for run in passes.values():
            run()
        if device.type == "cpu":
            return math.nan
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        passes["forward+backward"]()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def prepare(contender: Contender, world: World, whole: Inputs, causal: bool) -> tuple[Candidate, float] | str:
    """A candidate that has run once on every rank, with its peak memory on the worst; or why it can't, on all ranks."""
    candidate, peak, why = None, 0.0, None
    try:
        candidate = contender.build(world, whole, causal)
        peak = warm_up(candidate, world.device)
    except Exception as error:  # whatever it is, the table says so and the others are measured
        why = reason(error)
    reasons: list[str | None] = [None] * world.size
    dist.all_gather_object(reasons, why, world.group)
    for rank, text in enumerate(reasons):
        if text is not None:
            return f"rank {rank}: {text}"
    assert candidate is not None
    return candidate, reduce(torch.tensor(peak, dtype=torch.float64), dist.ReduceOp.MAX, world.group).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    shapes = [Shape.parse(text) for text in SHAPES]
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, metavar="b,h,g,s,d", default=shapes)
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--layouts", nargs="*", choices=sorted(set(LAYOUTS) - set(WANT_MASK)), default=["zigzag"])
    parser.add_argument("--baselines", nargs="*", choices=LOADERS, default=BASELINES, help="one-GPU kernels")
    parser.add_argument(
        "--context-parallel", nargs="*", choices=CONTEXT_PARALLEL, default=list(CONTEXT_PARALLEL), help="PyTorch's"
    )
    parser.add_argument("--backend", default="auto", help="attention backend of the ring: auto, triton or torch")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--emulate", type=int, metavar="W", help="the compute side of W ranks, one after the other")
    parser.add_argument("--ranks", nargs="+", type=int, help="which of them; default: all of 8, else a sample of 4")
    add_timing_arguments(parser)
    add_output_arguments(parser, "bench_ring")
    options = parser.parse_args()
    world = start_world(options.device, options.pg_backend)
    if options.emulate:
        if options.shapes is shapes:
            options.shapes = [Shape(1, 32, 8, rows * options.emulate, 128) for rows in (4096, 8192, 32768)]
        emulate(world, options)
        dist.destroy_process_group()
        return
    origin = environment(world.device)
    world.say(*origin.values(), f"{world.size} ranks", world.backend, sep=" | ")
    world.say(f"FLOPs: {FORMULA}\n")
    transport = transport_of(world.group, world.device) if options.transport == "auto" else options.transport
    setting = {"process_group": world.backend, "transport": transport}

    for shape, mask, dtype in product(options.shapes, options.masks, options.dtypes):
        case = Case(shape, mask, dtype)
        contenders = [one_gpu(name) for name in options.baselines]
        contenders += [ring(layout, options.backend, transport, world.size) for layout in options.layouts]
        contenders += [context_parallel(name, case.causal, world.size) for name in options.context_parallel]
        rows = measure(contenders, case, options.rounds, options.round_ms, world)
        world.say(f"{case}, {world.size} ranks: ms, TFLOP/s a GPU, speed-up over the fastest GPU, efficiency")
        print_table(rows, world)
        if world.rank == 0:
            append_rows(output_path(options), [{**origin, **setting, **row} for row in rows])
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(contenders: list[Contender], case: Case, rounds: int, round_ms: float, world: World) -> list[Row]:
    """One row for every contender and pass, the same on every rank."""
    whole = make_inputs(case.shape, DTYPES[case.dtype], world.device)
    prepared = {str(c): prepare(c, world, whole, case.causal) for c in contenders}
    ready = {name: p for name, p in prepared.items() if not isinstance(p, str)}
    around = {name: candidate.around for name, (candidate, _) in ready.items()}
    rows: list[Row] = []
    for pass_name, cost in WORK.items():
        calls = {name: candidate.passes()[pass_name] for name, (candidate, _) in ready.items()}
        timings = time_interleaved(
            calls, rounds=rounds, round_ms=round_ms, device=world.device, group=world.group, around=around
        )
        singles = {c.implementation: timings[str(c)].median for c in contenders if c.layout == "" and str(c) in timings}
        fastest = min(singles, key=singles.__getitem__, default="")
        for contender in contenders:
            outcome, time = prepared[str(contender)], timings.get(str(contender))
            ms = time.median if time else math.nan
            speedup = singles.get(fastest, math.nan) / ms
            row = (
                {"implementation": contender.implementation, "layout": contender.layout, "ranks": contender.ranks}
                | case.columns
                | {"pass": pass_name, "formula": FORMULA}
                | {"rounds": rounds if time else ""}
                | {f"{key}_ms": significant(getattr(time, key)) if time else "" for key in ("median", "min", "max")}
                | {"tflops_per_gpu": significant(cost * case.flops / contender.ranks / ms / 1e9)}
                | {"fastest_one_gpu": fastest, "speedup": significant(speedup)}
                | {"efficiency": significant(speedup / contender.ranks)}
                | {"peak_mib_above_inputs": "" if isinstance(outcome, str) else significant(outcome[1])}
                | {"note": outcome if isinstance(outcome, str) else ""}
            )
            rows.append(row)
    return rows


def print_table(rows: list[Row], world: World) -> None:
    """One line for every contender, forward beside forward+backward, then why some are missing."""
    columns = ["median_ms", "tflops_per_gpu", "speedup", "efficiency"]
    half = len(rows) // 2  # first the forward passes, then forward+backward, in one order
    lines, missing = [], []
    for forward, both in zip(rows[:half], rows[half:], strict=True):
        name = f"{forward['ranks']}x {forward['implementation']} {forward['layout']}"
        if forward["note"]:
            missing.append(f"{name} unavailable: {forward['note']}")
        else:
            figures = [f"{float(str(row[column]) or math.nan):.4g}" for row in (forward, both) for column in columns]
            lines.append([name, *figures, str(both["peak_mib_above_inputs"])])
    header = [f"{p} {c}" for p in ("fwd", "f+b") for c in ("ms", "TF/s", "speed-up", "eff")]
    world.say(format_table(["", *header, "MiB"], lines))
    world.say(*missing, "", sep="\n")


if __name__ == "__main__":
    main()
