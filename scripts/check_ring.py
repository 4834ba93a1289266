"""Check ring attention against dense fp64, beside one rank's attention over the whole sequence, at any world size.

    torchrun --nproc-per-node 2 scripts/check_ring.py                   # GPUs where there are, else CPU and gloo
    torchrun --nproc-per-node 4 scripts/check_ring.py --device cuda     # more ranks than GPUs: they share, over gloo
    torchrun --nproc-per-node 2 scripts/check_ring.py --transport nvlink
    TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1 torchrun ...             # nvlink between ranks that share a GPU

A table of layout x mask x dtype x length x heads, where masks are also options of scores under a causal mask. Fails
(exit status 1 on every rank) when out, dq, dk or dv of the ring is more than 1.1 times as wrong as one rank's on the
same inputs, or more than 1e-5 wrong where that is fp32, as lse always is (with softcap in 16 bits it too is compared
with one rank's); `accuracy.py` says what error means. Gradients are those of a loss that uses out and lse. Rows go to
results/check_ring.csv.
"""

import argparse
import sys
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from accuracy import NAMES, Results, exact, failures, relative_error, squares
from peers import DTYPES, Inputs, Shape, make_inputs, parse_heads
from report import Row, add_output_arguments, append_rows, environment, output_path, significant
from ringflash import flash_attention, positions, ring_attention, shard, transport_of
from ringflash.comm import TRANSPORTS
from ringflash.layout import LAYOUTS
from ringflash.mask import Mask
from ringflash.score import draw_head_words
from world import World, add_world_arguments, reduce, start_world

SEED = 5  # of dropout


class Variant(NamedTuple):
    mask: Mask
    masking: dict[str, Any]  # the mask, as the attention functions take it
    options: dict[str, Any]  # theirs and dense attention's


def variants(seq_len: int, heads: int = 1, device: torch.device | str = "cpu") -> dict[str, Variant]:
    window = max(1, seq_len // 3)
    cuts = [0, *(seq_len * numerator // 32 for numerator in (1, 2, 9, 10, 14, 25)), seq_len]
    masks = {
        "documents": Mask(causal=True, cu_seqlens=cuts),
        "prefix": Mask(causal=True, cu_seqlens=cuts, prefix=[(b - a) // 2 for a, b in pairwise(cuts)]),
        "chunks": Mask(causal=True, chunk=window),
    }
    options: dict[str, dict[str, Any]] = {
        "softcap": {"softcap": 2.0},
        "alibi": {"alibi_slopes": 0.5 ** torch.arange(1, heads + 1, device=device)},
        "sinks": {"sinks": torch.linspace(-2, 2, heads, device=device)},
        "dropout": {"dropout_p": 0.25},
    }
    return {
        "full": Variant(Mask(), {}, {}),
        "causal": Variant(Mask(right=0), {"causal": True}, {}),
        "causal+window": Variant(Mask(left=window, right=0), {"causal": True, "window": (window, 0)}, {}),
        **{name: Variant(mask, {"mask": mask}, {}) for name, mask in masks.items()},
        **{f"causal+{name}": Variant(Mask(right=0), {"causal": True}, given) for name, given in options.items()},
    }


class Problem(NamedTuple):
    """Inputs on the whole sequence, the same on every rank, with their fp64 results."""

    inputs: Inputs
    dlse: Tensor
    variant: Variant
    reference: Results

    @classmethod
    def draw(cls, shape: Shape, dtype: str, mask: str, device: torch.device) -> "Problem":
        inputs = make_inputs(shape, DTYPES[dtype], device, seed=2)
        generator = torch.Generator(device).manual_seed(3)
        dlse = torch.randn(shape.b, shape.h, shape.s, generator=generator, device=device)
        variant = variants(shape.s, shape.h, device)[mask]
        options = dict(variant.options)
        if "dropout_p" in options:
            torch.manual_seed(SEED)
            options["head_words"] = draw_head_words(shape.b, shape.h)
        return cls(inputs, dlse, variant, exact(*inputs, variant.mask, dlse=dlse, **options))

    def arguments(self) -> dict[str, Any]:
        """For an attention function, called next: its dropout draws what the reference's did."""
        torch.manual_seed(SEED)
        return self.variant.masking | self.variant.options

    @property
    def natural(self) -> float:
        return self.inputs.dout.double().norm().item()


def default_lengths(world_size: int, device: torch.device) -> list[int]:
    """One that divides evenly in every layout, an odd one, and one that leaves a rank without rows."""
    even = 2 * world_size * (32 if device.type == "cpu" else 512)
    return [even, even + 2 * (world_size // 2) + 1, max(1, world_size - 1)]


def one_rank_errors(problem: Problem, backend: str) -> dict[str, float]:
    q, k, v = leaves = [x.detach().requires_grad_() for x in problem.inputs[:3]]
    out, lse = flash_attention(q, k, v, **problem.arguments(), return_lse=True, backend=backend)
    results = out, lse, *torch.autograd.grad((out, lse), leaves, (problem.inputs.dout, problem.dlse))
    pairs = zip(NAMES, results, problem.reference, strict=True)
    return {name: relative_error(squares(x, ref), problem.natural) for name, x, ref in pairs}


def ring_errors(problem: Problem, world: World, layout: str, backend: str, transport: str) -> dict[str, float]:
    """Errors over the whole sequence, the same on every rank."""
    group, seq_len = world.group, problem.inputs.q.shape[1]
    how: dict[str, Any] = {"group": group, "layout": layout}
    if layout == "balanced":
        how["layout_mask"] = problem.variant.mask
    *inputs, dout = (shard(x, **how) for x in problem.inputs)
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = ring_attention(
        q,
        k,
        v,
        **how,
        seq_len=seq_len,
        transport=transport,
        backend=backend,
        return_lse=True,
        **problem.arguments(),
    )
    rows = positions(seq_len, **how, device=world.device)
    results = out, lse, *torch.autograd.grad((out, lse), leaves, (dout, problem.dlse[:, :, rows]))
    expected = (
        ref[:, :, rows] if n == "lse" else ref[:, rows] for n, ref in zip(NAMES, problem.reference, strict=True)
    )
    sums = torch.stack([squares(x, ref) for x, ref in zip(results, expected, strict=True)])
    sums = reduce(sums, dist.ReduceOp.SUM, group)
    return {name: relative_error(part, problem.natural) for name, part in zip(NAMES, sums, strict=True)}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_world_arguments(parser)
    parser.add_argument("--backend", default="auto", help="attention backend: auto, triton or torch")
    parser.add_argument("--transport", choices=TRANSPORTS, default="auto")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    names = list(variants(1))
    what = f"masks, and options under a causal one, of {', '.join(names)}; default: all"
    parser.add_argument("--masks", nargs="+", choices=names, default=names, metavar="MASK", help=what)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: fp32 bf16, on a GPU fp16 too")
    parser.add_argument("--lengths", nargs="+", type=int, help="default: even, odd, and one that leaves a rank empty")
    parser.add_argument("--heads", nargs="+", type=parse_heads, metavar="h,g", default=[(4, 4), (4, 2), (4, 1)])
    parser.add_argument("--dims", nargs="+", type=int, help="default: 32, on a GPU 128")
    add_output_arguments(parser, "check_ring")
    return parser.parse_args(arguments)


def check(world: World, options: argparse.Namespace) -> int:
    """Check all cases; returns the exit status, the same on every rank."""
    on_gpu = world.device.type == "cuda"
    dtypes: list[str] = options.dtypes or (["fp32", "bf16", "fp16"] if on_gpu else ["fp32", "bf16"])
    lengths: list[int] = options.lengths or default_lengths(world.size, world.device)
    dims: list[int] = options.dims or [128 if on_gpu else 32]
    heads: list[tuple[int, int]] = options.heads
    masks: list[str] = options.masks
    origin = environment(world.device)
    transport = transport_of(world.group, world.device) if options.transport == "auto" else options.transport
    world.say(*origin.values(), f"{world.size} ranks", f"{transport} in a group of {world.backend}", sep=" | ")
    world.say("ring's error / one rank's, each against dense fp64\n")
    verdicts: list[bool] = []
    for s, d, dtype, (h, g), mask in product(lengths, dims, dtypes, heads, masks):
        shape = Shape(max(1, 256 // s), h, g, s, d)  # the error of few rows is luck: take a batch
        problem = Problem.draw(shape, dtype, mask, world.device)
        one = one_rank_errors(problem, options.backend)
        rows: list[Row] = []
        for layout in options.layouts:
            ring = ring_errors(problem, world, layout, options.backend, transport)
            wrong = failures(ring, one, DTYPES[dtype], capped="softcap" in problem.variant.options)
            label = f"{layout:10s} {mask:13s} {dtype} {shape}"
            verdict = f"FAILED: {', '.join(wrong)}" if wrong else "ok"
            world.say(f"{label:55s}", *(f"{n} {ring[n]:.1e}/{one[n]:.1e}" for n in NAMES), verdict, sep="  ")
            verdicts.append(not wrong)
            rows.append(
                origin
                | {"world": world.size, "process_group": world.backend, "transport": transport}
                | {"backend": options.backend, "layout": layout, "mask": mask, "dtype": dtype}
                | shape._asdict()
                | {f"{n}_error": significant(ring[n]) for n in NAMES}
                | {f"{n}_one_rank": significant(one[n]) for n in NAMES}
                | {"passed": not wrong}
            )
        if world.rank == 0:  # as they come: what was checked stays, whatever comes
            append_rows(output_path(options), rows)
    world.say(f"\n{sum(verdicts)} of {len(verdicts)} passed at {world.size} ranks")
    return 0 if verdicts and all(verdicts) else 1


def main() -> None:
    options = parse()
    world = start_world(options.device, options.pg_backend)
    status = check(world, options)
    dist.destroy_process_group()
    sys.exit(status)


if __name__ == "__main__":
    main()
