"""Time one-GPU attention under masks, and with the options of scores: what each costs beside what it should.

    python scripts/bench_masks.py
    python scripts/bench_masks.py --shapes 1,16,16,65536,128 --masks window4096 documents2048 --option-shapes

Masks: beside each stand the full mask of the same shape and the peers under the same mask, interleaved in one run, the
forward and the backward pass apart. `factor` is the time over the ideal one: the full mask's time, times the share of
the (query, key) pairs that is visible. A peer whose results differ from ours by more than rounding is not compared.
FlexAttention's block mask is made before, and so are our tables and what a FlashAttention-2 of packed documents takes.

Options: beside each stand the plain call and, where an option takes other kernels, the plain call with those.

Rows go to results/bench_masks.csv and bench_masks_options.csv. What can't run here is listed with the reason. Runs on
a CPU too, to try the program; its figures mean nothing there.
"""

import argparse
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from peers import (
    DTYPES,
    FORMULA,
    LOADERS,
    SIGMA,
    WORK_APART,
    Attention,
    Case,
    Inputs,
    Passes,
    Shape,
    add_masks_argument,
    kernels,
    load,
    make_inputs,
    passes_apart,
    reason,
)
from report import (
    Row,
    Timing,
    add_output_arguments,
    add_timing_arguments,
    append_rows,
    environment,
    format_table,
    output_path,
    significant,
    time_interleaved,
)
from ringflash import flash_attention
from ringflash.ops import pick_backend

SHAPES = ["1,16,16,65536,128", "1,32,8,65536,128"]
OPTION_SHAPES = ["1,16,16,16384,128"]
MASKS = ["window4096", "equal16", "equal16-full", "documents2048", "documents2048-full"]
PEERS = ["flex", "fa2-varlen"]
OPTIONS = ["softcap", "sinks", "dropout", "alibi", "deterministic"]
YARDSTICKS = ["sdpa-fa2", "sdpa-cudnn"]
ROUNDING = 0.02  # relative: several times that of bf16. What differs by more is another result


class Timed(NamedTuple):
    """An implementation under a mask."""

    implementation: str
    case: Case

    def __str__(self) -> str:
        return f"{self.implementation} {self.case.mask}"


def time_apart(
    built: dict[str, Passes], around: dict[str, Callable[[], Any]], options: argparse.Namespace
) -> dict[str, dict[str, Timing]]:
    """By pass, and by what was built."""
    return {
        name: time_interleaved(
            {key: passes[name] for key, passes in built.items()},
            rounds=options.rounds,
            round_ms=options.round_ms,
            device=torch.device(options.device),
            around=around,
        )
        for name in WORK_APART
    }


def time_cells(timing: Timing | None, rounds: int) -> dict[str, object]:
    figures = (timing.median, timing.min, timing.max) if timing else (math.nan,) * 3
    cells: dict[str, object] = {"rounds": rounds if timing else ""}
    return cells | {f"{name}_ms": significant(ms) for name, ms in zip(("median", "min", "max"), figures, strict=True)}


# Masks


def prepare(attention: Attention, case: Case, inputs: Inputs, expected: list[Tensor] | None) -> Passes:
    """Raises where the results, out and the gradients, are not the `expected` ones."""
    mask = case.who_sees
    passes = passes_apart(lambda q, k, v: attention(q, k, v, mask), inputs)
    if expected is not None:
        differences = [
            ((x - y).float().norm() / y.float().norm()).item() for x, y in zip(results(passes), expected, strict=True)
        ]
        if not max(differences) < ROUNDING:
            raise RuntimeError(f"its results differ from ringflash's by {max(differences):.1e}")
    return passes


def results(passes: Passes) -> list[Tensor]:
    out, gradients = passes["forward"](), passes["backward"]()
    assert isinstance(out, Tensor) and isinstance(gradients, tuple)
    return [out, *gradients]


def measure_mask(case: Case, options: argparse.Namespace) -> list[Row]:
    """A row for each pass of each implementation: ours, peers, and full masks."""
    inputs = make_inputs(case.shape, DTYPES[case.dtype], torch.device(options.device))
    full = case._replace(mask="full")
    wanted = [Timed("ringflash", case), *(Timed(name, case) for name in options.peers)]
    wanted += [Timed("ringflash", full), *(Timed(name, full) for name in options.yardsticks)]
    wanted = list(dict.fromkeys(wanted))
    loaded, missing = load(list(dict.fromkeys(timed.implementation for timed in wanted)))
    built: dict[str, Passes] = {}
    notes: dict[str, str] = {}
    expected: dict[Case, list[Tensor]] = {}
    for timed in wanted:
        name = timed.implementation
        try:
            if name in loaded:
                built[str(timed)] = prepare(loaded[name], timed.case, inputs, expected.get(timed.case))
                expected.setdefault(timed.case, results(built[str(timed)]))
        except Exception as error:  # a peer may fail in any way: what matters is that the table says so
            if name == "ringflash":
                raise
            notes[str(timed)] = reason(error)
    expected.clear()
    timings = time_apart(built, {}, options)
    rows: list[Row] = []
    for (pass_name, cost), timed in product(WORK_APART.items(), wanted):
        by_name, share = timings[pass_name], timed.case.flops / full.flops
        timing, whole = by_name.get(str(timed)), by_name.get(str(timed._replace(case=full)))
        ms = timing.median if timing else math.nan
        ideal = share * whole.median if whole else math.nan
        ours = by_name[f"ringflash {timed.case.mask}"].median
        rows.append(
            {"implementation": timed.implementation, "run": case.mask, **timed.case.columns, "sigma": SIGMA}
            | {"pass": pass_name, "formula": FORMULA, "share": significant(share)}
            | time_cells(timing, options.rounds)
            | {"tflops": significant(cost * timed.case.flops / ms / 1e9)}
            | {"factor": significant(ms / ideal), "over_ringflash": significant(ms / ours)}
            | {"note": missing.get(timed.implementation, notes.get(str(timed), ""))}
        )
    return rows


def print_masks(rows: list[Row], options: argparse.Namespace) -> None:
    """A line for each case: what is visible, our factor, and how many times as fast as each peer we are."""

    def both(of: list[Row], implementation: str, column: str) -> str:
        cells = [str(row[column]) for row in of if row["implementation"] == implementation]
        return " / ".join(f"{float(cell):.2f}" if cell else "-" for cell in cells)

    cases: dict[tuple[object, ...], list[Row]] = {}
    for row in (row for row in rows if row["mask"] == row["run"]):
        cases.setdefault(tuple(row[name] for name in ("b", "h", "g", "s", "d", "dtype", "run")), []).append(row)
    lines = []
    for (b, h, g, s, d, dtype, run), of in cases.items():
        mine = both(of, "ringflash", "factor"), both(of, "ringflash", "median_ms")
        theirs = [both(of, name, "over_ringflash") for name in options.peers]
        lines.append([f"b{b} h{h}/{g} s{s} d{d} {dtype} {run}", f"{float(str(of[0]['share'])):.4f}", *mine, *theirs])
    print("\nringflash, forward / backward: time over the ideal one, ms, and each peer's time over ours")
    print(format_table(["", "visible", "factor", "ms", *options.peers], lines))


# Options


def make_options(heads: int, device: torch.device) -> dict[str, dict[str, Any]]:
    """Arguments of `flash_attention` for each of OPTIONS."""
    slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)], device=device)
    sinks = torch.zeros(heads, device=device, requires_grad=True)
    return {
        "softcap": {"softcap": 30.0},
        "sinks": {"sinks": sinks},
        "dropout": {"dropout_p": 0.1},
        "alibi": {"alibi_slopes": slopes},
        "deterministic": {"deterministic": True},
    }


def measure_options(shape: Shape, dtype: str, options: argparse.Namespace) -> list[Row]:
    """A row for each pass of each option, and of the plain calls."""
    device, case = torch.device(options.device), Case(shape, "causal", dtype)
    inputs = make_inputs(shape, DTYPES[dtype], device)
    backend = pick_backend(options.backend, device, DTYPES[dtype])
    calls: dict[str, dict[str, Any]] = {"plain": {}}
    if backend == "triton":
        calls["plain, portable"] = {}
    calls |= {name: arguments for name, arguments in make_options(shape.h, device).items() if name in options.options}
    built: dict[str, Passes] = {}
    around: dict[str, Callable[[], AbstractContextManager[object]]] = {}
    taken: dict[tuple[str, str], str] = {}  # the kernels of a call in a pass
    for name, arguments in calls.items():

        def watch(seen: set[str], portable: bool = name == "plain, portable") -> AbstractContextManager[object]:
            return kernels(portable, seen) if backend == "triton" else nullcontext()

        def attend(q: Tensor, k: Tensor, v: Tensor, arguments: dict[str, Any] = arguments) -> Tensor:
            return flash_attention(q, k, v, causal=True, backend=backend, **arguments)

        with watch(set()):
            parameters = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
            built[name] = passes_apart(attend, inputs, parameters)
        for pass_name, run in built[name].items():
            seen: set[str] = set()
            with watch(seen):
                run()
            taken[name, pass_name] = "+".join(sorted(seen)) or backend
        around[name] = lambda watch=watch: watch(set())
    timings = time_apart(built, around, options)
    rows: list[Row] = []
    for (pass_name, cost), name in product(WORK_APART.items(), calls):
        timing = timings[pass_name][name]
        plain = {taken[n, pass_name]: timings[pass_name][n].median for n in calls if n.startswith("plain")}
        rows.append(
            {"option": name, **case.columns, "pass": pass_name, "formula": FORMULA, "kernel": taken[name, pass_name]}
            | time_cells(timing, options.rounds)
            | {"tflops": significant(cost * case.flops / timing.median / 1e9)}
            | {"over_same_kernel": significant(timing.median / plain.get(taken[name, pass_name], math.nan))}
            | {"over_plain": significant(timing.median / timings[pass_name]["plain"].median)}
        )
    return rows


def print_options(rows: list[Row], what: str) -> None:
    """One line for each option, forward beside backward."""
    half = len(rows) // 2  # first the forward passes, then the backward ones, in one order

    def line(pair: tuple[Row, Row]) -> list[str]:
        columns = "kernel", "median_ms", "over_same_kernel", "over_plain"
        return [str(pair[0]["option"]), *(" / ".join(str(row[column]) or "-" for row in pair) for column in columns)]

    print(f"\n{what}, forward / backward")
    header = ["", "kernels", "ms", "over plain, same kernels", "over plain"]
    print(format_table(header, list(map(line, zip(rows[:half], rows[half:], strict=True)))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shapes: dict[str, Any] = {"nargs": "*", "type": Shape.parse, "metavar": "b,h,g,s,d"}
    parser.add_argument("--shapes", **shapes, default=list(map(Shape.parse, SHAPES)), help="for masks; may be none")
    parser.add_argument(
        "--option-shapes", **shapes, default=list(map(Shape.parse, OPTION_SHAPES)), help="for options; may be none"
    )
    add_masks_argument(parser, MASKS)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--peers", nargs="*", choices=LOADERS, default=PEERS, help="under each mask")
    parser.add_argument("--yardsticks", nargs="*", choices=LOADERS, default=YARDSTICKS, help="others under a full mask")
    parser.add_argument("--options", nargs="+", choices=OPTIONS, default=OPTIONS)
    parser.add_argument("--backend", default="auto", help="of the calls with options: auto, triton or torch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_timing_arguments(parser)
    add_output_arguments(parser, "bench_masks")
    options = parser.parse_args()
    device, path = torch.device(options.device), output_path(options)
    origin = environment(device)
    print(*origin.values(), sep=" | ")
    print(f"FLOPs: {FORMULA}\n")

    all_rows: list[Row] = []
    for case in (Case(s, m, t) for s, m, t in product(options.shapes, options.masks, options.dtypes)):
        rows = measure_mask(case, options)
        all_rows += rows
        for row in rows:
            figures = f"{row['median_ms']} ms, {row['tflops']} TFLOP/s"
            what = f"{row['implementation']:12s} {case.shape} {row['mask']:18s} {row['pass']:8s}"
            print(what, f"unavailable: {row['note']}" if row["note"] else figures, flush=True)
        append_rows(path, [{**origin, **row} for row in rows])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    for shape, dtype in product(options.option_shapes, options.dtypes):
        rows = measure_options(shape, dtype, options)
        append_rows(path.with_stem(f"{path.stem}_options"), [{**origin, **row} for row in rows])
        print_options(rows, f"{shape} causal {dtype}")
    if all_rows:
        print_masks(all_rows, options)


if __name__ == "__main__":
    main()
