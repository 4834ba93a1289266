"""Check one-GPU attention against dense fp64, beside PyTorch's FlashAttention-2 on the same inputs.

    python scripts/check_local.py                 # lengths 1 to 65536 x head dims x dtypes x masks x heads
    python scripts/check_local.py --million       # 1,048,576 tokens, first, middle, last and spread rows

Fails (exit status 1) when out, dq, dk or dv of ringflash is more than 1.1 times as wrong as FlashAttention-2's, or lse
more than 1e-5; `accuracy.py` says what error means. Short sequences come in large
batches: the error of few numbers is luck, that of many is a property. Rows go to results/check_local.csv. On a CPU,
PyTorch's flash kernel for CPUs takes the place of FlashAttention-2.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from itertools import product

import torch
from einops import rearrange
from torch import Tensor

from accuracy import NAMES, Results, exact, failures, relative_error, squares
from peers import DTYPES, LOADERS, MASKS, Attention, Case, Inputs, Shape, make_inputs, parse_heads
from report import add_output_arguments, append_rows, environment, output_path, significant
from ringflash import flash_attention
from ringflash.mask import Mask
from ringflash.reference import dense_attention

LENGTHS = [1, 2, 3, 17, 64, 127, 129, 256, 1000, 4096, 8191, 16385, 32768, 65535, 65536]
MILLION = 2**20
SAMPLE = 32  # rows at each place of a long sequence

Errors = dict[str, float]


def ours(inputs: Inputs, causal: bool) -> Results:
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out, lse = flash_attention(q, k, v, causal=causal, return_lse=True)
    return Results(out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, inputs.dout))


def trusted(attention: Attention, inputs: Inputs, mask: Mask) -> Results:
    """FlashAttention-2's results. PyTorch does not give its lse: that stays empty."""
    q, k, v = leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attention(q, k, v, mask)
    return Results(out.detach(), out.new_empty(0), *torch.autograd.grad(out, leaves, inputs.dout))


def errors_of(results: Results, reference: Results, dout: Tensor) -> Errors:
    natural = dout.double().norm().item()
    pairs = zip(NAMES, results, reference, strict=True)
    return {n: relative_error(squares(x, ref), natural) for n, x, ref in pairs if x.numel()}


# Every row: short and long sequences


def check_all(case: Case, inputs: Inputs, fa2: Attention) -> Iterator[tuple[str, Errors, Errors]]:
    reference = exact(*inputs, MASKS[case.mask])
    mine = errors_of(ours(inputs, case.causal), reference, inputs.dout)
    has_peer = inputs.q.dtype != torch.float32  # FlashAttention-2 has no fp32, whose limit needs no peer
    yield "all", mine, errors_of(trusted(fa2, inputs, case.who_sees), reference, inputs.dout) if has_peer else {}


# Sampled rows: a sequence too long for dense attention over all of it


def check_sampled(case: Case, inputs: Inputs, fa2: Attention) -> Iterator[tuple[str, Errors, Errors]]:
    """Errors at the first, middle and last rows and at rows spread over the sequence.

    out, lse and dq of a row need all keys but only that row's query: dense attention gives them. dk and dv of a key
    need every query's lse and delta, which come from our own results: lse, out are checked here at the sampled rows,
    and the rounding of out moves delta by far less than the rounding of `dP - delta` that is allowed.
    """
    results, peer = ours(inputs, case.causal), trusted(fa2, inputs, case.who_sees)
    mask, s, n = MASKS[case.mask], case.shape.s, min(SAMPLE, case.shape.s)
    device = inputs.q.device
    places = {
        "first": torch.arange(n, device=device),
        "middle": torch.arange(n, device=device) + (s - n) // 2,
        "last": torch.arange(n, device=device) + s - n,
        "spread": (2 * torch.arange(n, device=device) + 1) * s // (2 * n),
    }
    for place, rows in places.items():
        reference = Results(*exact_queries(inputs, rows, mask), *exact_keys(inputs, results, rows, mask))
        dout = inputs.dout[:, rows]
        mine, theirs = (errors_of(take_rows(r, rows), reference, dout) for r in (results, peer))
        yield place, mine, theirs


def take_rows(results: Results, rows: Tensor) -> Results:
    out, lse, dq, dk, dv = results
    return Results(out[:, rows], lse[:, :, rows] if lse.numel() else lse, dq[:, rows], dk[:, rows], dv[:, rows])


def exact_queries(inputs: Inputs, rows: Tensor, mask: Mask) -> tuple[Tensor, Tensor, Tensor]:
    """`out`, `lse`, `dq` of some rows, fp64."""
    keys = slice(0, int(rows.max()) + 1 if mask.right == 0 else inputs.k.shape[1])
    q = inputs.q[:, rows].double().requires_grad_()
    positions = torch.arange(inputs.k.shape[1], device=q.device)[keys]
    out, lse = dense_attention(
        q, inputs.k[:, keys], inputs.v[:, keys], mask=mask, query_positions=rows, key_positions=positions
    )
    (dq,) = torch.autograd.grad(out, q, inputs.dout[:, rows].double())
    return out.detach(), lse.detach(), dq


def exact_keys(inputs: Inputs, results: Results, rows: Tensor, mask: Mask, block: int = 2**15) -> tuple[Tensor, Tensor]:
    """`dk`, `dv` of some keys, fp64, from a pass over all queries: `P = exp(S - lse)`, `dS = P (dP - delta)`."""
    k, v = inputs.k[:, rows].double(), inputs.v[:, rows].double()
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    scale = k.shape[-1] ** -0.5
    g = k.shape[2]
    for begin in range(0, inputs.q.shape[1], block):
        span = slice(begin, begin + block)
        q, dout, out = (
            rearrange(x[:, span].double(), "b q (g r) d -> b g r q d", g=g)
            for x in (inputs.q, inputs.dout, results.out)
        )
        lse = rearrange(results.lse[:, :, span].double(), "b (g r) q -> b g r q 1", g=g)
        queries = torch.arange(begin, begin + q.shape[3], device=q.device)
        visible = mask.visible(rearrange(queries, "q -> q 1"), rearrange(rows, "k -> 1 k"))
        scores = scale * torch.einsum("bgrqd, bkgd -> bgrqk", q, k)
        probs = torch.exp(scores.masked_fill(~visible, -math.inf) - lse)
        delta = (dout * out).sum(-1, keepdim=True)
        dscores = probs * (torch.einsum("bgrqd, bkgd -> bgrqk", dout, v) - delta)
        dv += torch.einsum("bgrqk, bgrqd -> bkgd", probs, dout)
        dk += scale * torch.einsum("bgrqk, bgrqd -> bkgd", dscores, q)
    return dk, dv


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS)
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--heads", nargs="+", type=parse_heads, metavar="h,g", default=[(4, 4), (4, 1)])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp16"])
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "full"])
    parser.add_argument("--rows", type=int, default=4096, help="a batch has at least this many rows in all")
    parser.add_argument(
        "--million",
        nargs="?",
        type=int,
        const=MILLION,
        metavar="TOKENS",
        help=f"check sampled rows of one sequence of {MILLION} tokens (or TOKENS) instead: h8 g1 d128 causal bf16",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_output_arguments(parser, "check_local")
    options = parser.parse_args()
    device = torch.device(options.device)
    origin = environment(device)
    print(*origin.values(), sep=" | ")
    print("error / FlashAttention-2's error, each against dense fp64\n")
    if options.million:
        check, cases = check_sampled, [Case(Shape(1, 8, 1, options.million, 128), "causal", "bf16")]
    else:
        combinations = product(options.dims, options.dtypes, options.masks, options.heads, options.lengths)
        check = check_all
        cases = [Case(Shape(math.ceil(options.rows / s), h, g, s, d), m, t) for d, t, m, (h, g), s in combinations]

    failed = checked = 0
    for case in cases:
        inputs = make_inputs(case.shape, DTYPES[case.dtype], device, seed=1)
        for rows, mine, theirs in check(case, inputs, LOADERS["sdpa-fa2"]()):
            wrong = failures(mine, theirs, DTYPES[case.dtype])
            cells = [f"{n} {mine[n]:.2e}" + (f"/{theirs[n]:.2e}" if n in theirs else "") for n in NAMES]
            verdict = f"FAILED: {', '.join(wrong)}" if wrong else "ok"
            print(f"{case!s:36s} {rows:6s}", *cells, verdict, sep="  ", flush=True)
            checked += 1
            failed += bool(wrong)
            append_rows(
                output_path(options),
                [
                    origin
                    | {"implementation": "ringflash", "peer": "sdpa-fa2"}
                    | case.columns
                    | {"rows": rows}
                    | {f"{n}_error": significant(mine[n]) for n in NAMES}
                    | {f"{n}_peer": significant(theirs.get(n, math.nan)) for n in NAMES}
                    | {"passed": not wrong}
                ],
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    print(f"\n{checked - failed} of {checked} passed")
    sys.exit(1 if failed or not checked else 0)


if __name__ == "__main__":
    main()
