"""Draw the efficiency of rings beside other ways to share a sequence, from results/bench_ring.csv alone.

    python scripts/plot_ring.py length      # docs/ring_length.png: against the length, on two GPUs
    python scripts/plot_ring.py ranks       # docs/ring_ranks.png: against the number of GPUs, tokens a GPU fixed

Efficiency is the time of the fastest one-GPU kernel on the whole sequence / (GPUs x time), both of one run. Of each
case the last run counts; rows from CPUs don't. Wants matplotlib (`pip install .[train]`).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from readme_tables import ROOT, Row, group_by, last_run, read_rows

PASSES = ("forward", "forward+backward")
CASE = ("b", "h", "g", "s", "d", "dtype", "mask", "ranks")


def select(rows: Sequence[Row], mask: str, dtype: str, dim: int) -> list[Row]:
    """The measured efficiencies of the last run of each case, on the kind of GPU that was measured last.

    Where ringflash ran with several transports, in a run each, the others are of the last. Raises `ValueError` where
    there is nothing.
    """
    wanted = {"mask": mask, "dtype": dtype, "d": str(dim)}
    rings = [row for row in rows if row["layout"] and row["efficiency"] and wanted.items() <= row.items()]
    rings = [row for row in rings if not row["device"].startswith("CPU")]
    if not rings:
        raise ValueError(f"no efficiency of {mask} {dtype} d{dim} was measured on GPUs")
    device = max(rings, key=lambda row: row["date"])["device"]
    rings = [row for row in rings if row["device"] == device]
    ours = last_run((row for row in rings if row["implementation"] == "ringflash"), *CASE, "transport")
    return ours + last_run((row for row in rings if row["implementation"] != "ringflash"), *CASE)


def label(row: Row) -> str:
    moved = f", {row['transport']}" if row["implementation"] == "ringflash" else ""
    return f"{row['implementation']}{moved}, {row['layout']}"


def heads(row: Row) -> str:
    return f"{row['h']}/{row['g']}"


def by_length(rows: list[Row], ranks: int) -> dict[str, list[Row]]:
    """What goes into one picture: all lengths at that number of GPUs."""
    found = [row for row in rows if row["ranks"] == str(ranks)]
    if not found:
        raise ValueError(f"nothing was measured on {ranks} GPUs")
    return {f"{ranks} GPUs": sorted(found, key=lambda row: int(row["s"]))}


def by_ranks(rows: list[Row]) -> dict[str, list[Row]]:
    """Pictures by tokens a GPU and heads: those measured on more than one number of GPUs."""
    panels: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (int(row["s"]) // int(row["ranks"]), int(row["ranks"]))):
        panels.setdefault(f"{int(row['s']) // int(row['ranks'])} tokens a GPU, heads {heads(row)}", []).append(row)
    panels = {name: group for name, group in panels.items() if len({row["ranks"] for row in group}) > 1}
    if not panels:
        raise ValueError("nothing was measured on more than one number of GPUs with as many tokens on each")
    return panels


def draw(panels: dict[str, list[Row]], against: str, path: Path) -> None:
    """One row of two pictures, forward and forward + backward, for each panel; a line for each implementation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    def tick(row: Row) -> str:
        return f"{row['ranks']}" if against == "ranks" else f"{row['s']}\n{heads(row)}"

    rows = [row for group in panels.values() for row in group]
    style: dict[str, Any] = {}
    for index, name in enumerate(
        sorted({label(row) for row in rows}, key=lambda x: (not x.startswith("ringflash"), x))
    ):
        own = name.startswith("ringflash")
        style[name] = {"color": f"C{index % 10}", "marker": "os^vDP"[index // 10], "linewidth": 2.5 if own else 1.2}
    figure, all_axes = pyplot.subplots(
        len(panels), 2, figsize=(12, 1 + 4 * len(panels)), sharey=True, squeeze=False, layout="constrained"
    )
    for (panel, group), line_of_axes in zip(panels.items(), all_axes, strict=True):
        ticks = list(dict.fromkeys(tick(row) for row in group))
        for axes, which in zip(line_of_axes, PASSES, strict=True):
            lines = group_by([row | {"label": label(row)} for row in group if row["pass"] == which], "label")
            for (name,), points in lines.items():
                x = [ticks.index(tick(row)) for row in points]
                axes.plot(x, [float(row["efficiency"]) for row in points], label=name, **style[name])
            axes.set_xticks(range(len(ticks)), ticks)
            axes.set(title=f"{which}, {panel}", ylim=(0, 1.05))
            axes.set_xlabel("GPUs" if against == "ranks" else "tokens of the whole sequence; heads of q / k and v")
            axes.grid(alpha=0.3)
        line_of_axes[0].set_ylabel("efficiency")
    entries = [axes.get_legend_handles_labels() for axes in figure.axes]
    handles = {name: line for lines, names in entries for line, name in zip(lines, names, strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=2, frameon=False)
    where = sorted({f"{row['device']}, commit {row['commit']}, {row['date'][:10]}" for row in rows})
    about = rows[0]
    figure.suptitle(f"{about['mask']} {about['dtype']} d{about['d']}; {'; '.join(where)}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("against", choices=["length", "ranks"])
    parser.add_argument("--csv", type=Path, default=ROOT / "results" / "bench_ring.csv")
    parser.add_argument("--out", type=Path, metavar="PNG", help="default: docs/ring_length.png or docs/ring_ranks.png")
    parser.add_argument("--ranks", type=int, default=2, help="number of GPUs, against length")
    parser.add_argument("--mask", default="causal")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--dim", type=int, default=128)
    options = parser.parse_args(arguments)
    try:
        rows = select(read_rows(options.csv), options.mask, options.dtype, options.dim)
        panels = by_ranks(rows) if options.against == "ranks" else by_length(rows, options.ranks)
    except ValueError as error:
        parser.error(f"{options.csv}: {error}")
    path = options.out or ROOT / "docs" / f"ring_{options.against}.png"
    draw(panels, options.against, path)
    print(path)


if __name__ == "__main__":
    main()
