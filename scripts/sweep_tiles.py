"""Time the portable kernels of one GPU, each alone, with many tiles: where the choices in `choose_tiles` come from.

    python scripts/sweep_tiles.py --dims 128 --kernels dq --tiles 64,64,4,3,tma,registers 128,64,8,3,tma

A tile is `block_q,block_k,warps,stages[,tma[,registers]]`, as in `local_kernel.Tile`. Candidates are interleaved; a
tile that a kernel can't take (shared memory, say) is named with the reason. FLOPs: 4 b h s² d for
`forward` and `dq`, 6 for `dkv`, half when causal: S and dP, which both backward kernels make, are counted once. Rows go
to results/tile_sweep.csv.
With TRITON_INTERPRET=1 and a few tokens it runs on a CPU, to see that it runs.
"""

import argparse
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor

from peers import DTYPES, MASKS, Shape, make_inputs, reason
from report import (
    add_output_arguments,
    add_timing_arguments,
    append_rows,
    environment,
    output_path,
    significant,
    time_interleaved,
)
from ringflash import local_kernel
from ringflash.local_kernel import Tile, Tiles
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums
from ringflash.plan import plan_one
from ringflash.score import Scoring

PRODUCTS = {"forward": 4, "dq": 4, "dkv": 6}


def parse_tile(text: str) -> Tile:
    """`64,64,4,3,tma,registers` -> `Tile(64, 64, 4, 3, tma=True, q_in_registers=True)`."""
    parts = text.split(",")
    numbers, flags = parts[:4], set(parts[4:])
    if len(numbers) < 4 or not flags <= {"tma", "registers"} or ("registers" in flags and "tma" not in flags):
        raise argparse.ArgumentTypeError(f"want block_q,block_k,warps,stages[,tma[,registers]], got {text!r}")
    return Tile(*map(int, numbers), tma="tma" in flags, q_in_registers="registers" in flags)


def describe(tile: Tile) -> str:
    flags = [name for name, on in (("tma", tile.tma), ("registers", tile.q_in_registers)) if on]
    return ",".join([*map(str, (tile.block_q, tile.block_k, tile.num_warps, tile.num_stages)), *flags])


def candidate(kernel: str, tile: Tile, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Mask) -> Callable[[], None]:
    """A call of one kernel with one tile, through the launchers of `local_kernel`."""
    visit = plan_one(mask, q.shape[1], k.shape[1]).visits[0]
    assert visit is not None
    scoring = Scoring(q.shape[3] ** -0.5)
    total = Partial(torch.empty_like(dout), q.new_zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32))
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    state = local_kernel.Started(q.new_zeros(*total.lse.shape, 2, dtype=torch.float32), torch.empty_like(q), q.dtype)

    def call() -> None:
        choose, local_kernel.choose_tiles = local_kernel.choose_tiles, lambda *_: Tiles(tile, tile, tile)
        try:
            if kernel == "forward":
                local_kernel._forward(q, k, v, visit, scoring, into=total, before=None)
            elif kernel == "dq":
                local_kernel._backward_dq(q, k, v, dout, state, visit, scoring, first=True)
            else:
                local_kernel._backward_dkv(q, k, v, dout, state, visit, scoring, lambda: Sums(dk, dv, fresh=True))
        finally:
            local_kernel.choose_tiles = choose

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=PRODUCTS, default=list(PRODUCTS))
    parser.add_argument("--tiles", nargs="+", type=parse_tile, required=True)
    parser.add_argument("--dims", nargs="+", type=int, default=[128])
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "full"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--note", default="", help="what is particular about this run, for its rows")
    add_timing_arguments(parser)
    add_output_arguments(parser, "tile_sweep")
    options = parser.parse_args()

    device = torch.device(options.device)
    columns = environment(device)
    for kernel, dim, mask in product(options.kernels, options.dims, options.masks):
        shape = Shape(1, options.heads, options.heads, options.tokens, dim)
        inputs = make_inputs(shape, DTYPES[options.dtype], device)
        calls: dict[str, Callable[[], None]] = {}
        for tile in options.tiles:
            call = candidate(kernel, tile, *inputs, MASKS[mask])
            try:
                call()
                calls[describe(tile)] = call
            except Exception as error:
                print(f"d{dim} {kernel:7s} {mask:6s} {describe(tile):24s} {reason(error)}", flush=True)
        timings = time_interleaved(calls, rounds=options.rounds, device=device, round_ms=options.round_ms)
        flops = PRODUCTS[kernel] * options.heads * options.tokens**2 * dim * (0.5 if mask == "causal" else 1.0)
        rows = []
        for name, timing in sorted(timings.items(), key=lambda item: item[1].median):
            tflops = flops / timing.median / 1e9
            print(f"d{dim} {kernel:7s} {mask:6s} {name:24s} {timing}  {tflops:.0f} TFLOP/s", flush=True)
            rows.append(
                {
                    **columns,
                    "kernel": kernel,
                    **shape._asdict(),
                    "dtype": options.dtype,
                    "mask": mask,
                    "tile": name,
                    "rounds": options.rounds,
                    "median_ms": significant(timing.median),
                    "min_ms": significant(timing.min),
                    "max_ms": significant(timing.max),
                    "tflops": significant(tflops),
                    "note": options.note,
                    "formula": f"{PRODUCTS[kernel]}*b*h*s*s*d, half when causal",
                }
            )
        append_rows(output_path(options), rows)


if __name__ == "__main__":
    main()
