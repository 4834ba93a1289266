"""What the check and benchmark programs share: where they run, how they time, and how results are written.

A program measures, prints a table, and appends the same rows to a CSV in `results/`; plots read the CSV and never
measure again.
"""

import argparse
import csv
import importlib.metadata
import math
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from world import reduce

ROOT = Path(__file__).resolve().parent.parent

Row = Mapping[str, object]


# Where and with what


def commit() -> str:
    """The commit that is running, with `-dirty` when tracked sources differ from it.

    A copy without its history takes `RINGFLASH_COMMIT` from the environment, else `unknown`. Files in `results/` don't
    count as dirt: the programs write them.
    """
    if not (ROOT / ".git").exists():
        return os.environ.get("RINGFLASH_COMMIT") or "unknown"

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(ROOT), *arguments], check=True, capture_output=True, text=True
        ).stdout.strip()

    try:
        dirty = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!results")
        return git("rev-parse", "--short=10", "HEAD") + ("-dirty" if dirty else "")
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("RINGFLASH_COMMIT") or "unknown"


def environment(device: torch.device) -> dict[str, str]:
    """The first columns of every row: date, commit, device and versions."""
    on_gpu = device.type == "cuda"
    try:
        triton = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        triton = "none"
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton,
        "cuda": torch.version.cuda or "none",
        "cudnn": str(torch.backends.cudnn.version() or "none"),
        "nccl": ".".join(map(str, nccl.version())) if on_gpu else "none",
    }


# Results


def add_output_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """`--out DIR` and `--csv PATH`; the default is `results/NAME.csv`."""
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--out", type=Path, metavar="DIR", help=f"append rows to DIR/{name}.csv (default: results)")
    where.add_argument("--csv", type=Path, metavar="PATH", help="append rows to this file instead")
    parser.set_defaults(csv_name=f"{name}.csv")


def output_path(options: argparse.Namespace) -> Path:
    return options.csv or (options.out or ROOT / "results") / options.csv_name


def append_rows(path: Path, rows: Sequence[Row]) -> None:
    """Append `rows` to a CSV, with a header where the file is new.

    Raises `ValueError` when the rows or the file have other columns: a column that changes meaning silently is worse
    than a new file.
    """
    if not rows:
        return
    columns = list(rows[0])
    for row in rows:
        if list(row) != columns:
            raise ValueError(f"every row needs the columns {columns}, got {list(row)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists() or path.stat().st_size == 0
    if not is_new:
        with path.open(newline="") as file:
            header = next(csv.reader(file))
        if header != columns:
            raise ValueError(f"{path} has the columns {header}, these rows have {columns}: choose another --csv")
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def significant(value: float, digits: int = 5) -> str:
    """A number for a CSV cell; empty for NaN, which stands for "not measured"."""
    return "" if math.isnan(value) else f"{value:.{digits}g}"


def format_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns padded to their widest cell; the first column left-aligned, the others right-aligned."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(cells, widths, strict=True)))
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * w for w in widths), *map(line, rows)])


# Timing

CYCLES = 2e6  # of a GPU's clock, at most, in a millisecond
MOST_AHEAD = 10.0  # milliseconds: a candidate may wait for the GPU


def add_timing_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--round-ms", type=float, default=50.0, help="how long to call a candidate for in each round")


@dataclass(frozen=True)
class Timing:
    """One value a round, milliseconds."""

    rounds_ms: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.rounds_ms)

    @property
    def min(self) -> float:
        return min(self.rounds_ms)

    @property
    def max(self) -> float:
        return max(self.rounds_ms)

    def __str__(self) -> str:
        return f"{self.median:.3f} ms ({self.min:.3f}-{self.max:.3f})"


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    around: Mapping[str, Callable[[], AbstractContextManager[object]]] | None = None,
    round_ms: float,
) -> dict[str, Timing]:
    """Time each candidate in each round, so that a drift of the clock or the temperature meets all of them alike.

    A round takes every candidate once, in an order shuffled by the round's number, calls it for about `round_ms` and
    keeps the mean of its calls. On a GPU a call is timed between two CUDA events after the L2 cache was overwritten;
    on a CPU by `perf_counter`. Candidates must have run before (compiled, warmed up). A GPU without a group is kept
    busy before each call for longer than the host takes to launch any candidate: so the time is the GPU's, as where the
    host runs ahead; what the host takes is another number.

    With `group`, every rank calls this with the same names; each call starts at a barrier and counts the slowest rank.
    `around` names context managers that a candidate's calls need and that its time must not contain.
    """
    flush = torch.empty(256 * 2**20, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def call(fn: Callable[[], object]) -> Callable[[], float]:
        """Run `fn` once; what is returned reads its milliseconds, on a GPU once that has caught up."""
        if flush is not None:
            flush.zero_()
        if group is not None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            dist.barrier(group)
        elif device.type == "cuda":
            torch.cuda._sleep(round(1.5 * longest_launch * CYCLES))
        if device.type == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            fn()
            after.record()
            return lambda: before.elapsed_time(after)
        begin = time.perf_counter()
        fn()
        elapsed = (time.perf_counter() - begin) * 1e3
        return lambda: elapsed

    def launch_time(name: str) -> float:
        """Milliseconds that the host takes to launch a call, where nothing makes it wait."""
        with (around or {}).get(name, nullcontext)():
            torch.cuda.synchronize(device)
            begin = time.perf_counter()
            candidates[name]()
            return (time.perf_counter() - begin) * 1e3

    def one_round(name: str, calls: int) -> float:
        with (around or {}).get(name, nullcontext)():
            readings = [call(candidates[name]) for _ in range(calls)]
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        values = torch.tensor([read() for read in readings], dtype=torch.float64)
        if group is not None:
            values = reduce(values, dist.ReduceOp.MAX, group)
        return values.mean().item()

    longest_launch = 0.0
    if group is None and device.type == "cuda":
        longest_launch = min(max(launch_time(name) for name in candidates for _ in range(3)), MOST_AHEAD)
    calls = {name: min(100, max(1, round(round_ms / max(one_round(name, 1), 1e-3)))) for name in candidates}
    timings: dict[str, list[float]] = {name: [] for name in candidates}
    for index in range(rounds):
        for name in random.Random(index).sample(list(candidates), len(candidates)):
            timings[name].append(one_round(name, calls[name]))
    return {name: Timing(tuple(values)) for name, values in timings.items()}
