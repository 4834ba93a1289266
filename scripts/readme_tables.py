"""Write the measured tables of README.md and docs/ from the CSVs in results/: no number there is typed by hand.

    python scripts/readme_tables.py

A table stands between `<!-- table:NAME -->` and `<!-- /table:NAME -->`. Of each CSV, a table shows the last run of each
case; a run is one start of a program, and all of its rows carry the same date.
"""

import argparse
import csv
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path

from accuracy import FP32_LIMIT, NAMES

ROOT = Path(__file__).resolve().parent.parent

Row = dict[str, str]


def read_rows(path: Path) -> list[Row]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def group_by(rows: Iterable[Row], *columns: str) -> dict[tuple[str, ...], list[Row]]:
    """Rows by their values in `columns`, in the order in which those first come."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[column] for column in columns), []).append(row)
    return groups


def last_run(rows: Iterable[Row], *case: str) -> list[Row]:
    """Of each case, the rows of the run that measured it last."""
    groups = group_by(rows, *case).values()
    return [row for group in groups for row in group if row["date"] == max(r["date"] for r in group)]


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def origins(rows: Iterable[Row]) -> str:
    """Where the numbers come from, one line for each device and set of versions; and of which lengths, where that tells
    them apart."""
    seen = group_by(rows, "device", "torch", "triton", "commit")
    lengths = [sorted({int(row.get("s", 0)) for row in group}) for group in seen.values()]
    are_apart = len(lengths) > 1 and len(set(chain(*lengths))) == sum(map(len, lengths))
    return "\n".join(
        f"{device}, torch {torch}, triton {triton}, commit {commit}, {group[-1]['date'][:10]}"
        + (f" ({', '.join(map(str, tokens))} tokens)." if are_apart else ".")
        for ((device, torch, triton, commit), group), tokens in zip(seen.items(), lengths, strict=True)
    )


def shape(row: Row) -> str:
    return f"{row['b']} {row['h']}/{row['g']} {row['s']} {row['d']}"


def cell(numbers: Iterable[float | None], digits: int) -> str:
    texts = ["-" if number is None else f"{number:.{digits}f}" for number in numbers]
    return " / ".join(texts) if set(texts) != {"-"} else "-"


def worst(rows: list[Row], name: str, yardstick: str) -> str:
    """The largest error of one tensor as a multiple of the yardstick's, or as it is where `accuracy.py` limits that.

    Errors too small to hold any rounding to 16 bits are left out of the multiples.
    """
    rows = [row for row in rows if row[f"{name}_error"]]
    if not rows:
        return "-"
    pairs = [(float(row[f"{name}_error"]), float(row[f"{name}_{yardstick}"] or 0)) for row in rows]
    if name == "lse" or rows[0]["dtype"] == "fp32":
        return f"{max(ours for ours, _ in pairs):.1e}"
    return cell([max((ours / theirs for ours, theirs in pairs if min(ours, theirs) > FP32_LIMIT), default=None)], 3)


def lengths(rows: list[Row]) -> str:
    seen = {int(row["s"]) for row in rows}
    return str(min(seen)) if len(seen) == 1 else f"{min(seen)} to {max(seen)}"


def error_table(rows: list[Row], case: Sequence[str], yardstick: str) -> str:
    """One line for each value of `case` (dtype among them): how many cases passed, and the worst of each tensor."""
    lines = [
        [
            *values,
            lengths(group),
            f"{sum(row['passed'] == 'True' for row in group)} of {len(group)}",
            *(worst(group, name, yardstick) for name in NAMES),
        ]
        for values, group in group_by(rows, *case).items()
    ]
    header = [*(column.replace("_", " ") for column in case), "tokens", "passed", *NAMES]
    return table(header, lines) + "\n\n" + origins(rows)


def check_local(rows: list[Row]) -> str:
    case = "device", "b", "h", "g", "s", "d", "dtype", "mask", "rows"
    return error_table(last_run(rows, *case), ("device", "dtype", "d"), "peer")


def check_ring(rows: list[Row]) -> str:
    case = "device", "world", "transport", "backend", "layout", "mask", "dtype", "b", "h", "g", "s", "d"
    return error_table(last_run(rows, *case), ("device", "world", "transport", "dtype"), "one_rank")


def bench_local(rows: list[Row]) -> str:
    case = "device", "b", "h", "g", "s", "d", "dtype", "mask"
    rows = last_run(rows, *case)
    names = [name for (name,), group in group_by(rows, "implementation").items() if any(row["tflops"] for row in group)]

    def line(group: list[Row]) -> list[str]:
        speeds = {(row["implementation"], row["pass"]): float(row["tflops"]) for row in group if row["tflops"]}
        passes = [[speeds.get((name, which)) for which in ("forward", "backward")] for name in names]
        return [f"{shape(group[0])} {group[0]['dtype']} {group[0]['mask']}", *(cell(speed, 0) for speed in passes)]

    return table(["b h/g s d", *names], map(line, group_by(rows, *case).values())) + "\n\n" + origins(rows)


def bench_ring(rows: list[Row]) -> str:
    case = "device", "process_group", "transport", "b", "h", "g", "s", "d", "dtype", "mask"
    rings = (row for row in rows if row["layout"])
    rows = [row for row in last_run(rings, *case, "ranks") if row["median_ms"]]

    def line(group: list[Row]) -> list[str]:
        row, by_pass = group[0], {row["pass"]: row for row in group}
        passes = [by_pass[which] for which in ("forward", "forward+backward")]
        return [
            *(f"{shape(row)} {row['dtype']} {row['mask']}", row["ranks"]),
            row["transport"] if row["implementation"].startswith("ringflash") else "its own",
            f"{row['implementation']}, {row['layout']}",
            cell([float(r["median_ms"]) for r in passes], 2),
            cell([float(r["tflops_per_gpu"]) for r in passes], 0),
            row["fastest_one_gpu"] or "-",
            *("-" if not row["speedup"] else cell([float(r[n]) for r in passes], 2) for n in ("speedup", "efficiency")),
            cell([float(row["peak_mib_above_inputs"])], 0) if row["peak_mib_above_inputs"] else "-",
        ]

    header = [
        "b h/g s d",
        "GPUs",
        "transport",
        "ring",
        "ms",
        "TFLOP/s a GPU",
        "fastest GPU",
        "speed-up",
        "efficiency",
        "peak MiB",
    ]
    lines = map(line, group_by(rows, *case, "ranks", "implementation", "layout").values())
    return table(header, lines) + "\n\n" + origins(rows)


def ring_efficiency(rows: list[Row], emulated: list[Row]) -> str:
    """Efficiency of rings beside others' and beside what a ring's kernels alone would reach; a table for each mask and
    number of GPUs."""
    passes = "forward", "forward+backward"
    problem = "b", "h", "g", "s", "d", "dtype", "mask"
    case = "device", "ranks", *problem
    rows = [row for row in rows if row["layout"] and row["efficiency"]]
    rows = [
        *last_run((row for row in rows if row["implementation"] == "ringflash"), *case, "transport"),
        *last_run((row for row in rows if row["implementation"] != "ringflash"), *case),
    ]
    alone = {
        tuple(row[name] for name in ("device", "world", *problem, "layout", "pass")): row
        for row in last_run(emulated, "device", "world", *problem, "layout")
    }
    emulations: list[Row] = []

    def kernels_alone(row: Row) -> Row | None:
        """The emulation's own efficiency, in its own run, in which the host runs ahead."""
        emulation = alone.get(tuple(row[name] for name in (*case, "layout", "pass")))
        if emulation is None:
            return None
        emulations.append(emulation)
        return row | {"transport": "kernels alone", "efficiency": emulation["own_efficiency"]}

    def label(row: Row) -> str:
        how = [row["transport"]] if row["implementation"].startswith("ringflash") else []
        return ", ".join([row["implementation"], row["layout"], *how])

    rings = [row for row in rows if row["implementation"] == "ringflash"]
    rows = [*filter(None, map(kernels_alone, rings)), *rows]
    tables = []
    for (_, ranks, dtype, mask), group in group_by(rows, "device", "ranks", "dtype", "mask").items():
        found = {(label(row), shape(row), row["pass"]): float(row["efficiency"]) for row in group}
        shapes = list(dict.fromkeys(map(shape, sorted(group, key=lambda row: int(row["s"])))))
        lines = [
            [name, *(cell([found.get((name, column, which)) for which in passes], 2) for column in shapes)]
            for name in dict.fromkeys(map(label, group))
        ]
        tables.append(table([f"{ranks} GPUs, {dtype} {mask}; b h/g s d:", *shapes], lines))
    measured = [row for row in rows if row["transport"] != "kernels alone"]
    tables.append(origins(measured) + (f"\nKernels alone: {origins(emulations)}" if emulations else ""))
    return "\n\n".join(tables)


def accuracy_ring(rows: list[Row]) -> str:
    case = "device", "process_group", "b", "h", "g", "s", "d", "dtype", "mask", "ranks", "implementation", "layout"
    names = [name for name in NAMES if name != "lse"]
    rows = [row for row in last_run(rows, *case) if row["passed"]]

    def line(row: Row) -> list[str]:
        errors = [float(row[f"{name}_error"]) for name in names]
        yardsticks = [float(row[f"{name}_fa2"] or 0) for name in names]
        ratio = max((ours / theirs for ours, theirs in zip(errors, yardsticks, strict=True) if theirs), default=None)
        return [
            *(f"{shape(row)} {row['dtype']} {row['mask']}", row["ranks"]),
            ", ".join(filter(None, (row["implementation"], row["layout"]))),
            *(f"{error:.2e}" for error in errors),
            cell([ratio], 3),
        ]

    return table(["b h/g s d", "GPUs", "", *names, "x FA-2's"], map(line, rows)) + "\n\n" + origins(rows)


def hbm_bytes(rows: list[Row]) -> str:
    rows = last_run(rows, "device", "b", "h", "g", "s", "d", "dtype", "mask", "implementation")

    def line(group: list[Row]) -> list[str]:
        by_pass = {row["pass"]: row for row in group}
        columns = (
            [float(by_pass[p][n]) for p in ("forward", "backward")] for n in ("read_mb", "written_mb", "at_least_mb")
        )
        row = group[0]
        return [f"{shape(row)} {row['dtype']} {row['mask']}", row["implementation"], *(cell(x, 0) for x in columns)]

    groups = group_by(rows, "b", "h", "g", "s", "d", "dtype", "mask", "implementation").values()
    header = ["b h/g s d", "", "read, MB", "written, MB", "read and written at least, MB"]
    return table(header, map(line, groups)) + "\n\n" + origins(rows)


def bench_visits(rows: list[Row]) -> str:
    rows = last_run(rows, "device", "rows", "h", "g", "d", "dtype")

    def line(group: list[Row]) -> list[str]:
        found = {(row["pass"], row["merged"]): row for row in group}
        plain, merged = ([found[p, m] for p in ("forward", "backward")] for m in ("False", "True"))
        columns = (plain, "tflops", 0), (plain, "of_rectangle", 2), (merged, "of_plain", 2)
        row = group[0]
        what = f"{row['rows']} rows, {row['h']}/{row['g']} d{row['d']} {row['dtype']}"
        return [what, row["visit"], *(cell([float(row[n]) for row in of], digits) for of, n, digits in columns)]

    header = ["", "visit", "TFLOP/s", "of a rectangle's", "merged, of plain"]
    groups = group_by(rows, "rows", "h", "g", "d", "dtype", "visit").values()
    return table(header, map(line, groups)) + "\n\n" + origins(rows)


TABLES: dict[str, Callable[..., str]] = {
    "check_local": check_local,
    "check_ring": check_ring,
    "bench_local": bench_local,
    "bench_ring": bench_ring,
    "ring_efficiency": ring_efficiency,
    "accuracy_ring": accuracy_ring,
    "hbm_bytes": hbm_bytes,
    "bench_visits": bench_visits,
}
SOURCES = {"ring_efficiency": ("bench_ring", "emulate_ring")}  # the CSVs of a table, where it has not its own name
PLACES = ("README.md", "docs/ring_measured.md", "docs/hopper_kernel.md")


def render(text: str, results: Path) -> str:
    """The text with each of its tables written anew. Raises `KeyError` for a table that nothing here writes."""

    def fill(match: re.Match[str]) -> str:
        sources = [read_rows(results / f"{name}.csv") for name in SOURCES.get(match["name"], (match["name"],))]
        sources = [[row for row in rows if not row["device"].startswith("CPU")] for rows in sources]
        written = TABLES[match["name"]](*sources) if sources[0] else "Not measured yet."
        return f"<!-- table:{match['name']} -->\n{written}\n<!-- /table:{match['name']} -->"

    return re.sub(r"<!-- table:(?P<name>\w+) -->\n.*?<!-- /table:(?P=name) -->", fill, text, flags=re.DOTALL)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for path in (ROOT / place for place in PLACES):
        path.write_text(render(path.read_text(), ROOT / "results"))


if __name__ == "__main__":
    main()
