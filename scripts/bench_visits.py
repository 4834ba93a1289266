"""Time single visits of a ring on one GPU: what merging, adding in place and a mask's shape cost.

    python scripts/bench_visits.py
    python scripts/bench_visits.py --rows 4096 --heads 16,16,64 --rounds 9

A visit is one launch of the backend, forward or backward; what the visits of a pass share is not in it. Plain visits
write results in the inputs' dtype, `merged` ones merge with (backward: add to) what is there in fp32. `of plain` is
their speed beside the plain visit of the same mask; `of rectangle` is that of a plain visit of a zigzag or striped ring
beside as many queries on so many keys that the visible area is the same, all of it seen. Rows go to
results/bench_visits.csv. Runs on a CPU too, to try the program.
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

from peers import DTYPES, FORMULA, Inputs
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
from ringflash import ops
from ringflash.mask import Mask
from ringflash.merge import Partial, Sums
from ringflash.plan import Visit, plan_one, plan_ring, row_ranges
from ringflash.score import Scoring


def area(visit: Visit) -> int:
    """Pairs of a query and a key that it sees."""
    first, last = row_ranges(visit).long()
    return int((last - first).sum())


def visits_of(rows: int) -> dict[str, Visit]:
    """Visits of rings of 2 with `rows` rows a rank, by layout, rank and step, and rectangles of the same areas."""
    found: dict[str, Visit | None] = {"square": plan_one(Mask(), rows, rows).visits[0]}
    for layout in ("zigzag", "striped"):
        for rank in range(2):
            plan = plan_ring(Mask(right=0), layout, 2 * rows, rank, 2)
            found |= {f"{layout} rank {rank} step {step}": visit for step, visit in enumerate(plan.visits)}
    visits = {name: visit for name, visit in found.items() if visit is not None}
    for name, visit in list(visits.items()):
        visits[f"rectangle of {name}"] = plan_one(Mask(), rows, round(area(visit) / rows)).visits[0] or visit
    return visits


Calls = dict[tuple[str, str, bool], Callable[[], None]]


def calls_of(name: str, visit: Visit, whole: Inputs, backend: ops.ring.Backend) -> Calls:
    """Forward and backward of a visit, plain and merged."""
    n_q, n_k = row_ranges(visit).shape[1], sum(run.length for run in visit.keys)
    q, dout, k, v = whole.q[:, :n_q], whole.dout[:, :n_q], whole.k[:, :n_k], whole.v[:, :n_k]
    scoring, calls = Scoring(q.shape[3] ** -0.5), Calls()
    lse = q.new_full((q.shape[0], q.shape[2], n_q), 10.0, dtype=torch.float32)
    state = backend.start_backward(q, Partial(torch.zeros_like(dout), lse), dout, None, scoring, torch.float32)
    for merged in (False, True):
        dtype = torch.float32 if merged else q.dtype
        total = Partial(torch.zeros_like(dout, dtype=dtype), lse.clone())
        sums = Sums(torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype), fresh=not merged)

        def forward(total: Partial = total, before: Tensor | None = total.out if merged else None) -> None:
            backend.forward(q, k, v, visit, scoring, into=total, before=before)

        def backward(sums: Sums = sums, first: bool = not merged) -> None:
            backend.backward(q, k, v, dout, state, visit, scoring, take_dkv=lambda: sums, first=first)

        calls |= {(name, "forward", merged): forward, (name, "backward", merged): backward}
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192, help="queries, and keys, of a rank")
    parser.add_argument("--heads", default="32,8,128", metavar="h,g,d")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add_timing_arguments(parser)
    add_output_arguments(parser, "bench_visits")
    options = parser.parse_args()
    device, dtype, rows = torch.device(options.device), DTYPES[options.dtype], options.rows
    h, g, d = map(int, options.heads.split(","))
    backend = ops._backend(ops.pick_backend(options.backend, device, dtype), False)
    whole = Inputs(*(torch.randn(1, rows, n, d, device=device, dtype=dtype) for n in (h, g, g, h)))
    visits = visits_of(rows)
    calls = Calls()
    for name, visit in visits.items():
        calls |= calls_of(name, visit, whole, backend)
    for call in calls.values():
        call()
    by_text = {"|".join(map(str, key)): call for key, call in calls.items()}
    timings = time_interleaved(by_text, rounds=options.rounds, round_ms=options.round_ms, device=device)
    flops = {"forward": 4 * h * d, "backward": 10 * h * d}  # a pair that is seen
    speed = {key: flops[key[1]] * area(visits[key[0]]) / timings["|".join(map(str, key))].median / 1e9 for key in calls}
    origin, table = environment(device), list[Row]()
    for (name, pass_name, merged), tflops in speed.items():
        if name.startswith("rectangle of"):
            continue
        of_plain = tflops / speed[name, pass_name, False]
        of_rectangle = speed[name, pass_name, False] / speed[f"rectangle of {name}", pass_name, False]
        table.append(
            {"rows": rows, "h": h, "g": g, "d": d, "dtype": options.dtype, "visit": name, "pass": pass_name}
            | {"merged": merged, "formula": FORMULA, "rounds": options.rounds, "area": area(visits[name])}
            | {"median_ms": significant(timings[f"{name}|{pass_name}|{merged}"].median), "tflops": significant(tflops)}
            | {"of_plain": significant(of_plain), "of_rectangle": "" if merged else significant(of_rectangle)}
        )
    print(*origin.values(), sep=" | ")
    header = ["visit", "pass", "merged", "median_ms", "tflops", "of_plain", "of_rectangle"]
    print(format_table(header, [[str(row[name]) for name in header] for row in table]))
    append_rows(output_path(options), [{**origin, **row} for row in table])


if __name__ == "__main__":
    main()
