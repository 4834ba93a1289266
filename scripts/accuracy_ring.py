"""How wrong a ring is against dense fp64, beside one-GPU kernels and other ways to share a sequence, on equal inputs.

    torchrun --nproc-per-node 2 scripts/accuracy_ring.py
    torchrun --nproc-per-node 4 scripts/accuracy_ring.py --shapes 1,8,2,8192,128 1,8,8,32768,64 --layouts zigzag striped

Prints `||x - ref|| / ||ref||` of out, dq, dk and dv over the whole sequence, and the largest of their multiples of
one-GPU FlashAttention-2's (PyTorch's). Fails (exit status 1 on every rank) when ringflash, in a ring or on one GPU, is
more than 1.1 times as wrong as that in any of them; of others it only says so. What can't run here is listed with the
reason. Rows go to results/accuracy_ring.csv. `check_ring.py` checks more cases, beside one rank's own error.
"""

import argparse
import math
import sys
from itertools import product

import torch
import torch.distributed as dist

from accuracy import Results, exact, failures, relative_error, squares
from contenders import OTHERS, Contender, Unavailable, one_gpu, other, ring, together
from peers import DTYPES, LOADERS, MASKS, Case, Inputs, Shape, make_inputs
from report import Row, add_output_arguments, append_rows, environment, format_table, output_path, significant
from ringflash import positions, transport_of
from ringflash.layout import LAYOUTS, WANT_MASK
from world import World, add_world_arguments, reduce, start_world

NAMES = ("out", "dq", "dk", "dv")
YARDSTICK = "sdpa-fa2"


def errors(contender: Contender, world: World, whole: Inputs, causal: bool, reference: Results) -> dict[str, float]:
    """Of each tensor over the whole sequence, the same on every rank. Raises `Unavailable`."""
    found = together(lambda: contender.build(world, whole, causal).results(), world)
    rows = slice(None)
    if contender.layout:
        rows = positions(whole.q.shape[1], group=world.group, layout=contender.layout, device=world.device)
    sums = torch.zeros(len(NAMES), 2, dtype=torch.float64)
    for index, name in enumerate(NAMES):
        if name in found:  # not where a rank only waits
            sums[index] = squares(found[name], getattr(reference, name)[:, rows])
    sums = reduce(sums, dist.ReduceOp.SUM, world.group)
    natural = whole.dout.double().norm().item()
    return {name: relative_error(part, natural) for name, part in zip(NAMES, sums, strict=True)}


def measure(contenders: list[Contender], case: Case, world: World) -> list[Row]:
    """One row for every contender, the same on every rank. `passed` is empty for what can't run here."""
    whole = make_inputs(case.shape, DTYPES[case.dtype], world.device, seed=1)
    reference = exact(*whole, MASKS[case.mask])
    found: dict[Contender, dict[str, float] | str] = {}
    for contender in contenders:
        try:
            found[contender] = errors(contender, world, whole, case.causal, reference)
        except Unavailable as error:
            found[contender] = str(error)
    yardstick = next((x for c, x in found.items() if c.implementation == YARDSTICK and isinstance(x, dict)), {})
    rows: list[Row] = []
    for contender, outcome in found.items():
        ours = outcome if isinstance(outcome, dict) else {}
        rows.append(
            {"implementation": contender.implementation, "layout": contender.layout, "ranks": contender.ranks}
            | case.columns
            | {f"{name}_error": significant(ours.get(name, math.nan)) for name in NAMES}
            | {f"{name}_fa2": significant(yardstick.get(name, math.nan)) for name in NAMES}
            | {"passed": not failures(ours, yardstick, DTYPES[case.dtype]) if ours else ""}
            | {"note": outcome if isinstance(outcome, str) else ""}
        )
    return rows


def print_table(rows: list[Row], world: World) -> None:
    lines, missing = [], []
    for row in rows:
        name = f"{row['ranks']}x {row['implementation']} {row['layout']}".rstrip()
        if row["note"]:
            missing.append(f"{name} unavailable: {row['note']}")
            continue
        pairs = [(float(str(row[f"{n}_error"])), float(str(row[f"{n}_fa2"] or math.nan))) for n in NAMES]
        ratio = max((ours / theirs for ours, theirs in pairs if theirs > 0), default=math.nan)
        lines.append(
            [name, *(f"{ours:.2e}" for ours, _ in pairs), f"{ratio:.3f}", "ok" if row["passed"] else "WRONGER"]
        )
    world.say(format_table(["", *NAMES, "x FA-2's", ""], lines))
    world.say(*missing, "", sep="\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    parser.add_argument(
        "--shapes", nargs="+", type=Shape.parse, metavar="b,h,g,s,d", help="default: 1,8,2,8192,128; small on a CPU"
    )
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--layouts", nargs="*", choices=sorted(set(LAYOUTS) - set(WANT_MASK)), default=["zigzag"])
    parser.add_argument(
        "--contenders", nargs="*", choices=OTHERS, default=list(OTHERS), help="other ways to share a sequence"
    )
    parser.add_argument("--backend", default="auto", help="attention backend of the ring: auto, triton or torch")
    parser.add_argument("--transport", default="auto")
    add_output_arguments(parser, "accuracy_ring")
    return parser.parse_args(arguments)


def compare(world: World, options: argparse.Namespace) -> int:
    """Measure all cases; returns the exit status, the same on every rank."""
    default = Shape(1, 8, 2, 8192, 128) if world.device.type == "cuda" else Shape(1, 4, 2, 64 * world.size, 32)
    origin = environment(world.device)
    transport = transport_of(world.group, world.device) if options.transport == "auto" else options.transport
    world.say(*origin.values(), f"{world.size} ranks", f"{transport} in a group of {world.backend}", sep=" | ")
    shapes: list[Shape] = options.shapes or [default]
    masks: list[str] = options.masks
    dtypes: list[str] = options.dtypes
    all_rows: list[Row] = []
    for shape, mask, dtype in product(shapes, masks, dtypes):
        case = Case(shape, mask, dtype)
        contenders = [one_gpu(name) for name in LOADERS if name != "flex"]  # which compiles for minutes
        contenders += [ring(layout, options.backend, transport, world.size) for layout in options.layouts]
        contenders += [other(name, case.causal, world.size) for name in options.contenders]
        rows = measure(contenders, case, world)
        world.say(f"\n{case}: relative error against dense fp64")
        print_table(rows, world)
        setting = {"process_group": world.backend, "transport": transport}
        all_rows += [{**origin, **setting, **row} for row in rows]
    if world.rank == 0:
        append_rows(output_path(options), all_rows)
    return 0 if all(row["passed"] for row in all_rows if row["implementation"] == "ringflash") else 1


def main() -> None:
    options = parse()
    world = start_world(options.device, options.pg_backend)
    status = compare(world, options)
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
