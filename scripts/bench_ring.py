"""Time ring attention beside the fastest one-GPU kernel on the whole sequence, and other ways to share a sequence.

    torchrun --nproc-per-node 2 scripts/bench_ring.py
    torchrun --nproc-per-node 8 scripts/bench_ring.py --shapes 1,32,8,131072,128 --layouts zigzag striped
    python scripts/bench_ring.py --emulate 8            # the compute side of 8 ranks, one after the other on one GPU

Shapes are global: `s` tokens over all ranks. Prints time, TFLOP/s a GPU, the speed-up over the fastest one-GPU kernel,
the efficiency (speed-up / ranks) and the peak of memory above the inputs, for the forward pass and for forward and
backward together; appends the rows to results/bench_ring.csv. Everything is timed interleaved in one run: one-GPU
kernels on rank 0 while the others wait, rings from a barrier until the slowest rank is done. With --everywhere one-GPU
kernels also run on all GPUs at once: their efficiency is the share of rank 0's speed that the slowest has then. The
other ways are those of `contenders.py`: PyTorch's context_parallel, ring_flash_attn, all-to-all, all-gather. Each must
give ringflash's output and gradients before it is timed; what is wrong or can't run here is listed with the reason.
Runs over gloo on CPUs too, to try the program; its figures mean nothing there.

With `--emulate W` the passes of W ranks are timed one after the other in one process (of many ranks, a sample):
efficiency is the time of one GPU on the whole sequence / (W x the slowest rank's). Beside them stand what the host
needs for each visit, the bytes that arrive during each (from the plan) with their time at 380 GB/s, how much of that is
longer than the visit, and the peak of memory with all that the nvlink transport keeps. Rows go to emulate_ring.csv and
emulate_ring_visits.csv. `emulation.py` says what is left out. Emulated ranks know every mask that `--help` lists, real
ones full and causal alone, and the layout of documents:

    python scripts/bench_ring.py --emulate 8 --shapes 1,32,8,65536,128 --baselines ringflash flex fa2-varlen \\
        --masks documents2048 window4096 --layouts balanced zigzag contiguous
"""

import argparse
import math
from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist

from contenders import OTHERS, Candidate, Contender, Unavailable, check, one_gpu, other, ring, together
from emulation import emulate
from peers import DTYPES, FORMULA, LOADERS, MASKS, WORK, Case, Inputs, Shape, add_masks_argument, make_inputs
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
from ringflash import transport_of
from ringflash.layout import LAYOUTS, WANT_MASK
from world import World, add_world_arguments, reduce, start_world

SHAPES = ["1,32,8,16384,128", "1,32,8,65536,128", "1,16,16,131072,128"]
BASELINES = ["ringflash", "sdpa-fa2", "sdpa-cudnn", "flash-attn-cute"]


def warm_up(candidate: Candidate, device: torch.device) -> float:
    """Run both passes; MiB above the inputs that forward and backward take at their peak. NaN on a CPU, and for graphs,
    which have their memory already."""
    passes = candidate.passes()
    with candidate.around():
        for run in passes.values():
            run()
        if device.type == "cpu" or candidate.captured:
            return math.nan
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        passes["forward+backward"]()
        torch.cuda.synchronize(device)
        return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def prepare(
    contender: Contender, trusted: Contender | None, world: World, whole: Inputs, causal: bool
) -> tuple[Candidate, float] | str:
    """A candidate that has run once on every rank, with its peak memory on the worst; or why it can't, on all ranks.

    Its results must be those of `trusted`, which holds the same rows.
    """
    try:
        candidate = together(lambda: contender.build(world, whole, causal), world)
        if trusted is not None:
            together(lambda: check(candidate, trusted.build(world, whole, causal)), world)
        peak = together(lambda: warm_up(candidate, world.device), world)
    except Unavailable as error:
        return str(error)
    return candidate, reduce(torch.tensor(peak, dtype=torch.float64), dist.ReduceOp.MAX, world.group).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    shapes = [Shape.parse(text) for text in SHAPES]
    parser.add_argument("--shapes", nargs="+", type=Shape.parse, metavar="b,h,g,s,d", default=shapes)
    add_masks_argument(parser, ["causal"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--layouts", nargs="*", choices=sorted(LAYOUTS), default=["zigzag"])
    parser.add_argument("--baselines", nargs="*", choices=LOADERS, default=BASELINES, help="one-GPU kernels")
    parser.add_argument(
        "--contenders", nargs="*", choices=OTHERS, default=list(OTHERS), help="other ways to share a sequence"
    )
    parser.add_argument("--backend", default="auto", help="attention backend of the ring: auto, triton or torch")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--graphs", action="store_true", help="also the ring's passes replayed from CUDA graphs")
    parser.add_argument(
        "--everywhere", action="store_true", help="also the one-GPU kernels on every GPU at once: the slowest counts"
    )
    parser.add_argument("--emulate", type=int, metavar="W", help="the compute side of W ranks, one after the other")
    parser.add_argument("--ranks", nargs="+", type=int, help="which of them; default: all of 8, else a sample of 4")
    add_timing_arguments(parser)
    add_output_arguments(parser, "bench_ring")
    options = parser.parse_args()
    if not options.emulate and not (set(options.masks) <= set(MASKS) and set(options.layouts).isdisjoint(WANT_MASK)):
        parser.error(f"masks other than {', '.join(MASKS)}, and layouts that go by a mask, are for --emulate alone")
    if options.emulate and (options.graphs or options.everywhere):
        parser.error("--graphs and --everywhere are for real ranks, not for --emulate")
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

    def our_ring(layout: str) -> Contender:
        return ring(layout, options.backend, transport, world.size)

    for shape, mask, dtype in product(options.shapes, options.masks, options.dtypes):
        case = Case(shape, mask, dtype)
        contenders = [one_gpu(name) for name in options.baselines]
        if options.everywhere:
            contenders += [one_gpu(name, everywhere=True) for name in options.baselines]
        contenders += [our_ring(layout) for layout in options.layouts]
        if options.graphs:
            contenders += [
                ring(layout, options.backend, transport, world.size, captured=True) for layout in options.layouts
            ]
        contenders += [other(name, case.causal, world.size) for name in options.contenders]
        rows = measure(contenders, our_ring, case, options.rounds, options.round_ms, world)
        world.say(f"{case}, {world.size} ranks: ms, TFLOP/s a GPU, speed-up over the fastest GPU, efficiency")
        print_table(rows, world)
        if world.rank == 0:
            append_rows(output_path(options), [{**origin, **setting, **row} for row in rows])
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def measure(
    contenders: list[Contender],
    our_ring: Callable[[str], Contender],
    case: Case,
    rounds: int,
    round_ms: float,
    world: World,
) -> list[Row]:
    """One row for every contender and pass, the same on every rank. `our_ring` of a layout says what is right."""
    whole = make_inputs(case.shape, DTYPES[case.dtype], world.device)
    prepared: dict[str, tuple[Candidate, float] | str] = {}
    for contender in contenders:
        trusted = our_ring(contender.layout) if contender.implementation in OTHERS else None
        prepared[str(contender)] = prepare(contender, trusted, world, whole, case.causal)
    ready = {name: p for name, p in prepared.items() if not isinstance(p, str)}
    around = {name: candidate.around for name, (candidate, _) in ready.items()}
    rows: list[Row] = []
    for pass_name, cost in WORK.items():
        calls = {name: candidate.passes()[pass_name] for name, (candidate, _) in ready.items()}
        timings = time_interleaved(
            calls, rounds=rounds, round_ms=round_ms, device=world.device, group=world.group, around=around
        )
        alone = [c for c in contenders if c.layout == "" and c.implementation in LOADERS and str(c) in timings]
        singles = {c.implementation: timings[str(c)].median for c in alone}
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
