"""What each rank of a ring does and receives, from the plan itself: no GPU, no communication.

    python scripts/plan_table.py                                    # 4, 8 and 64 ranks of 8192 tokens
    python scripts/plan_table.py --worlds 16 --rows 1024 --layouts zigzag

One line for each world, layout and mask: shards that the busiest rank visits (in fewer launches, where several go in
one), products of its forward pass, how much more than the mean that is, the K/V that the rank with the most receives in
a pass, and how long that takes at the link's speed. Rows go to results/plan_table.csv.
"""

import argparse
from itertools import product

import torch

from report import add_output_arguments, append_rows, environment, format_table, output_path, significant
from ringflash.mask import Mask
from ringflash.plan import Plan, plan_ring

WINDOW = 4096
MASKS = {"causal": Mask(right=0), "causal+window": Mask(left=WINDOW, right=0), "full": Mask()}
LINK_GB_S = 380.0  # each way, by the copy engine, 64 MiB and more: measured on two H200s
FORMULA = "products: 4*h*d*visible pairs; K/V: rows*g*(d+d)*2 bytes"


def visible_pairs(plan: Plan) -> int:
    """(query, key) pairs that one head of this rank sees in a pass."""
    tables = [visit.seen_rows().long() for visit in plan.visits if visit is not None]
    return sum(int((last - first).sum()) for first, last in tables)


def rows_received(plan: Plan) -> int:
    """Rows of other ranks that this rank needs in a pass."""
    return sum(needed.stop - needed.start for needed in plan.needed[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", nargs="+", type=int, default=[4, 8, 64])
    parser.add_argument("--rows", type=int, default=8192, help="tokens a rank")
    parser.add_argument(
        "--layouts", nargs="+", choices=["contiguous", "zigzag", "striped"], default=["zigzag", "striped"]
    )
    parser.add_argument("--masks", nargs="+", choices=MASKS, default=["causal", "causal+window"])
    parser.add_argument("--heads", nargs=2, type=int, default=(32, 8), metavar=("H", "G"))
    parser.add_argument("--dim", type=int, default=128)
    add_output_arguments(parser, "plan_table")
    options = parser.parse_args()
    (heads, kv_heads), dim = options.heads, options.dim
    origin, lines, rows = environment(torch.device("cpu")), [], []
    for world_size, layout, mask in product(options.worlds, options.layouts, options.masks):
        seq_len = options.rows * world_size
        plans = [plan_ring(MASKS[mask], layout, seq_len, rank, world_size) for rank in range(world_size)]
        pairs = [visible_pairs(plan) for plan in plans]
        received = max(map(rows_received, plans)) * kv_heads * 2 * dim * 2
        figures = {
            "visits": max(sum(visit is not None for visit in plan.visits) for plan in plans),
            "tflop": significant(4 * heads * dim * max(pairs) / 1e12),
            "busiest_over_mean": significant(max(pairs) * world_size / sum(pairs)),
            "received_mb": significant(received / 1e6),
            "link_ms": significant(received / LINK_GB_S / 1e6),
        }
        case = {"world": world_size, "layout": layout, "mask": mask, "rows": options.rows}
        lines.append([f"{world_size} x {options.rows} {layout} {mask}", *map(str, figures.values())])
        rows.append(origin | case | {"h": heads, "g": kv_heads, "d": dim} | figures | {"formula": FORMULA})
    print(f"{FORMULA}; link {LINK_GB_S:.0f} GB/s")
    print(format_table(["", "shards", "TFLOP forward", "busiest / mean", "MB received", "ms"], lines))
    append_rows(output_path(options), rows)


if __name__ == "__main__":
    main()
