"""Time one-GPU attention, forward and backward, beside the kernels that PyTorch and flash-attention have.

    python scripts/bench_local.py                                          # every implementation, every shape
    python scripts/bench_local.py --shapes 1,16,16,32768,128 --masks causal --only ringflash sdpa-cudnn
    python scripts/bench_local.py --portable --only ringflash flex         # the kernels that other GPUs get

All implementations take the same inputs and are timed interleaved in one run. Prints TFLOP/s and, last, the speed of
ringflash relative to each peer; appends the rows to results/bench_local.csv, or to bench_local_portable.csv. A peer
that can't run here is listed with the reason. Runs on a CPU too, to try the program; its figures mean nothing there.
"""

import argparse
from contextlib import nullcontext

import torch

from peers import (
    DTYPES,
    FORMULA,
    LOADERS,
    WORK_APART,
    Attention,
    Case,
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

SHAPES = ["1,16,16,32768,128", "4,16,16,8192,128", "1,32,8,16384,128", "1,32,32,16384,64", "1,8,8,16384,256"]
PEERS = [name for name in LOADERS if name != "fa2-varlen"]  # which without documents is sdpa-fa2


def measure(
    case: Case, loaded: dict[str, Attention], rounds: int, round_ms: float, device: torch.device
) -> tuple[dict[str, dict[str, Timing]], dict[str, str]]:
    """Timings by pass and implementation, and the reasons of those that failed."""
    inputs = make_inputs(case.shape, DTYPES[case.dtype], device)
    built: dict[str, Passes] = {}
    failed: dict[str, str] = {}
    for name, attention in loaded.items():
        try:
            built[name] = passes_apart(lambda q, k, v, f=attention: f(q, k, v, case.who_sees), inputs)
        except Exception as error:  # a peer may fail in any way: what matters is that the table says so
            failed[name] = reason(error)
    timings = {
        name: time_interleaved(
            {n: passes[name] for n, passes in built.items()}, rounds=rounds, round_ms=round_ms, device=device
        )
        for name in WORK_APART
    }
    return timings, failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shapes", nargs="+", type=Shape.parse, metavar="b,h,g,s,d", default=list(map(Shape.parse, SHAPES))
    )
    add_masks_argument(parser, ["causal", "full"])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16"])
    parser.add_argument("--only", nargs="+", choices=LOADERS, default=PEERS, help="implementations to time")
    parser.add_argument(
        "--portable", action="store_true", help="ringflash by its portable kernels, also on Hopper GPUs"
    )
    add_timing_arguments(parser)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_output_arguments(parser, "bench_local")
    options = parser.parse_args()
    if options.portable:
        options.csv_name = "bench_local_portable.csv"
    with kernels(portable=True, seen=set()) if options.portable else nullcontext():
        compare(options)


def compare(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    origin = environment(device)
    print(*origin.values(), sep=" | ")
    print(f"FLOPs: {FORMULA}\n")

    loaded, missing = load(options.only)
    speeds: dict[Case, dict[str, dict[str, float]]] = {}  # TFLOP/s by pass and implementation
    for case in (Case(s, m, t) for s in options.shapes for m in options.masks for t in options.dtypes):
        timings, failed = measure(case, loaded, options.rounds, options.round_ms, device)
        notes = missing | failed
        speeds[case] = {n: {} for n in WORK_APART}
        rows: list[Row] = []
        for pass_name, cost in WORK_APART.items():
            for name in options.only:
                time = timings[pass_name].get(name)
                speed = cost * case.flops / time.median / 1e9 if time else float("nan")
                if time:
                    speeds[case][pass_name][name] = speed
                    print(f"{name:16s} {case} {pass_name:8s} {speed:8.4g} TFLOP/s  {time}", flush=True)
                rows.append(
                    origin
                    | {"implementation": name}
                    | case.columns
                    | {"pass": pass_name, "formula": FORMULA}
                    | {"rounds": options.rounds if time else ""}
                    | {f"{key}_ms": significant(getattr(time, key)) if time else "" for key in ("median", "min", "max")}
                    | {"tflops": significant(speed), "note": notes.get(name, "")}
                )
        append_rows(output_path(options), rows)
        for name, why in notes.items():
            print(f"{name:16s} {case} unavailable: {why}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()

    print_ratios(speeds, [name for name in options.only if name != "ringflash"])


def print_ratios(speeds: dict[Case, dict[str, dict[str, float]]], others: list[str]) -> None:
    def cell(case: Case, other: str) -> str:
        def ratio(by_name: dict[str, float]) -> str:
            ours, theirs = by_name.get("ringflash"), by_name.get(other)
            return f"{ours / theirs:.2f}" if ours and theirs else "-"

        return " / ".join(ratio(speeds[case][pass_name]) for pass_name in WORK_APART)

    print("\nringflash's speed over each peer's, forward / backward")
    print(format_table(["case", *others], [[str(case), *(cell(case, other) for other in others)] for case in speeds]))


if __name__ == "__main__":
    main()
