"""Bytes of GPU memory that attention reads and writes, by the hardware's counters, beside what must move at least.

    python scripts/hbm_bytes.py                                  # wants ncu, and the right to read counters
    python scripts/hbm_bytes.py --shape 1,16,16,8192,128

Four things, forward and backward, under the full mask: dense attention in PyTorch's operators, which writes its scores
to memory; PyTorch's FlashAttention-2; `flash_attention`; and one visit of a ring, which merges with (adds to) what the
visits before it left in fp32. Each runs once before it is counted; ncu starts one process for all. Prints a table, and
appends rows to results/hbm_bytes.csv.
"""

import argparse
import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.cuda import profiler
from torch.nn.attention import SDPBackend, sdpa_kernel

from peers import DTYPES, Inputs, Shape, make_inputs
from report import Row, add_output_arguments, append_rows, environment, format_table, output_path, significant
from ringflash import flash_attention, ops
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums
from ringflash.plan import plan_one
from ringflash.score import Scoring

COUNTERS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum"}
WAITING = "spin_kernel"  # what `torch.cuda._sleep` launches: it closes a pass
PASSES = ("forward", "backward")
FORMULA = "at least: every input once and every result once; dense: also every N x N matrix that an operator hands on"


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`softmax(q k^T) v` by operators; as many key/value heads as query heads."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return ((q * q.shape[3] ** -0.5 @ k.transpose(2, 3)).softmax(3) @ v).transpose(1, 2)


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)


Passes = dict[str, Callable[[], Any]]


def whole_passes(attend: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs) -> Passes:
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = attend(*leaves)
    return {
        "forward": lambda: attend(*inputs[:3]),
        "backward": lambda: torch.autograd.grad(out, leaves, inputs.dout, retain_graph=True),
    }


def visit_passes(inputs: Inputs) -> Passes:
    """One visit after the first, forward and backward, without what all visits of a pass share."""
    q, k, v, dout = inputs
    backend = ops._backend(ops.pick_backend("auto", q.device, q.dtype), False)
    visit, scoring = plan_one(Mask(), q.shape[1], k.shape[1]).visits[0], Scoring(q.shape[3] ** -0.5)
    assert visit is not None
    running = Partial(torch.zeros_like(dout, dtype=torch.float32), q.new_zeros(*q.shape[:3], dtype=torch.float32).mT)
    running = Partial(running.out, running.lse.contiguous())
    result = Partial(torch.zeros_like(dout), running.lse)
    state = backend.start_backward(q, result, dout, None, scoring, torch.float32)
    sums = Sums(torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32), fresh=False)
    return {
        "forward": lambda: backend.forward(q, k, v, visit, scoring, into=running, before=running.out),
        "backward": lambda: backend.backward(q, k, v, dout, state, visit, scoring, take_dkv=lambda: sums, first=False),
    }


CASES: dict[str, Callable[[Inputs], Passes]] = {
    "dense": lambda inputs: whole_passes(dense, inputs),
    "sdpa-fa2": lambda inputs: whole_passes(flash_attention_2, inputs),
    "ringflash": lambda inputs: whole_passes(lambda q, k, v: flash_attention(q, k, v), inputs),
    "ring visit": visit_passes,
}


def least_bytes(case: str, pass_name: str, shape: Shape, itemsize: int) -> int:
    """What must move at least: see `FORMULA`. dQ of a ring's backward visit is a sum in fp32 too."""
    b, h, g, s, d = shape
    queries, keys, scores = b * h * s * d, b * g * s * d, b * h * s * s
    if case == "ring visit":
        inputs = (queries + 2 * keys) * itemsize if pass_name == "forward" else (2 * queries + 2 * keys) * itemsize
        return inputs + 2 * 4 * (queries if pass_name == "forward" else queries + 2 * keys)
    matrices = 0
    if case == "dense":  # scores and weights, each written and read; backward dP and dS too, and dS twice
        matrices = scores * itemsize * (4 if pass_name == "forward" else 7)
    tensors = 2 * queries + 2 * keys if pass_name == "forward" else 4 * queries + 4 * keys
    return tensors * itemsize + matrices


def run_all(shape: Shape, dtype: str) -> None:
    """Under ncu: every case's passes in turn, each counted at its second run and closed by a kernel that only waits."""
    for case, pass_name in product(CASES, PASSES):
        run = CASES[case](make_inputs(shape, DTYPES[dtype], torch.device("cuda")))[pass_name]
        run()
        torch.cuda.synchronize()
        profiler.start()
        run()
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        profiler.stop()
        print(f"ran {case} {pass_name}", file=sys.stderr, flush=True)


def count(options: argparse.Namespace) -> list[dict[str, float]]:
    """Bytes read and written by all kernels of a pass, of every pass in the order of `run_all`."""
    tool = shutil.which("ncu")
    if tool is None:
        raise SystemExit("ncu is not there: it comes with CUDA's toolkit")
    ncu = [tool, "--csv", "--profile-from-start", "off", "--clock-control", "none", "--print-units", "base"]
    ncu += ["--metrics", ",".join(COUNTERS.values())]
    again = [sys.executable, str(Path(__file__)), "--once"]
    again += ["--shape", ",".join(map(str, options.shape)), "--dtype", options.dtype]
    return add_up(subprocess.run([*ncu, *again], stdout=subprocess.PIPE, text=True, check=False).stdout)


def add_up(text: str) -> list[dict[str, float]]:
    """The counters of all kernels of each pass in what ncu prints: a pass ends with a kernel that waits.

    Raises `SystemExit` where passes are missing."""
    table = [line for line in text.splitlines() if line.startswith('"')]
    passes, totals = [], dict.fromkeys(COUNTERS, 0.0)
    last = ""
    for row in csv.DictReader(io.StringIO("\n".join(table))):
        if WAITING in row["Kernel Name"]:
            if row["ID"] != last:
                passes.append(totals)
                totals = dict.fromkeys(COUNTERS, 0.0)
            last = row["ID"]
            continue
        for name, counter in COUNTERS.items():
            if row["Metric Name"] == counter:
                totals[name] += float(row["Metric Value"].replace(",", ""))
    if len(passes) != len(CASES) * len(PASSES) or not all(total["read"] > 0 for total in passes):
        raise SystemExit(f"ncu counted {len(passes)} of {len(CASES) * len(PASSES)} passes:\n{text[-2000:]}")
    return passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=Shape.parse, metavar="b,h,g,s,d", default=Shape(1, 16, 16, 8192, 128))
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    add_output_arguments(parser, "hbm_bytes")
    options = parser.parse_args()
    if options.once:
        run_all(options.shape, options.dtype)
        return
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU whose bytes could be counted")
    origin = environment(torch.device("cuda"))
    rows: list[Row] = []
    for (case, pass_name), moved in zip(product(CASES, PASSES), count(options), strict=True):
        least = least_bytes(case, pass_name, options.shape, DTYPES[options.dtype].itemsize)
        rows.append(
            {"implementation": case, **options.shape._asdict(), "dtype": options.dtype, "mask": "full"}
            | {"pass": pass_name, "formula": FORMULA}
            | {f"{name}_mb": significant(nbytes / 1e6) for name, nbytes in moved.items()}
            | {"at_least_mb": significant(least / 1e6)}
        )
    print(*origin.values(), sep=" | ")
    header = ["implementation", "pass", "read_mb", "written_mb", "at_least_mb"]
    print(format_table(header, [[str(row[name]) for name in header] for row in rows]))
    append_rows(output_path(options), [{**origin, **row} for row in rows])


if __name__ == "__main__":
    main()
