"""Layouts: which positions of the global sequence a rank holds.

A layout gives each rank a tuple of runs `(start, step, length)`: the positions `start, start + step, ...`. The runs of
a rank are in ascending order and don't interleave, so the rows of every shard are in ascending order of position.

    layout       4 ranks, 8 tokens       runs of rank 0
    contiguous   01 23 45 67             (0, 1, 2)
    zigzag       07 16 25 34             (0, 1, 1) (7, 1, 1)
    striped      04 15 26 37             (0, 4, 2)
"""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Run(NamedTuple):
    """The positions `start, start + step, ...`, `length` of them."""

    start: int
    step: int
    length: int


Runs = tuple[Run, ...]


def _split(seq_len: int, parts: int, index: int) -> Run:
    """Part `index` of `seq_len` tokens cut in `parts` nearly equal pieces."""
    begin, end = seq_len * index // parts, seq_len * (index + 1) // parts
    return Run(begin, 1, end - begin)


def _contiguous(seq_len: int, world_size: int, rank: int) -> list[Run]:
    return [_split(seq_len, world_size, rank)]


def _zigzag(seq_len: int, world_size: int, rank: int) -> list[Run]:
    """One piece from each end: under a causal mask every rank has the same work (and equal rows when they divide)."""
    return [_split(seq_len, 2 * world_size, part) for part in (rank, 2 * world_size - 1 - rank)]


def _striped(seq_len: int, world_size: int, rank: int) -> list[Run]:
    return [Run(rank, world_size, (seq_len - rank + world_size - 1) // world_size)]


LAYOUTS: dict[str, Callable[[int, int, int], list[Run]]] = {
    "contiguous": _contiguous,
    "zigzag": _zigzag,
    "striped": _striped,
}


@lru_cache(maxsize=4096)
def layout_runs(layout: str, seq_len: int, world_size: int, rank: int) -> Runs:
    """The runs that `rank` holds; empty when the sequence is too short to give it a row.

    Raises `ValueError` for an unknown layout, a negative length or a rank outside the world.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {sorted(LAYOUTS)}, got {layout!r}")
    if seq_len < 0:
        raise ValueError(f"seq_len must be >= 0, got {seq_len}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be in [0, {world_size}), got {rank}")
    runs: list[Run] = []
    for run in LAYOUTS[layout](seq_len, world_size, rank):
        if run.length == 0:
            continue
        if runs and (runs[-1].start + runs[-1].step * runs[-1].length, runs[-1].step) == (run.start, run.step):
            run = Run(runs[-1].start, run.step, runs.pop().length + run.length)  # two halves that touch are one run
        runs.append(run)
    return tuple(runs)


def count_rows(runs: Runs) -> int:
    return sum(run.length for run in runs)


def cut_runs(runs: Runs, begin: int, end: int) -> Runs:
    """The runs of the rows `[begin, end)`: `cut_runs(((0, 1, 4), (12, 1, 4)), 3, 6) -> ((3, 1, 1), (12, 1, 2))`."""
    cut, first_row = [], 0
    for run in runs:
        low, high = max(begin - first_row, 0), min(end - first_row, run.length)
        if low < high:
            cut.append(Run(run.start + run.step * low, run.step, high - low))
        first_row += run.length
    return tuple(cut)


def runs_to_positions(runs: Runs, device: torch.device | str | None = None) -> Tensor:
    """Global positions in row order: int64 `(rows,)`, strictly ascending."""
    parts = [torch.arange(r.start, r.start + r.step * r.length, r.step, device=device) for r in runs]
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64, device=device)


def count_below(runs: Runs, position: Tensor) -> Tensor:
    """How many positions of `runs` are smaller than each of `position`: int64, like `position`."""
    count = torch.zeros_like(position)
    for run in runs:
        below = torch.div(position - run.start + run.step - 1, run.step, rounding_mode="floor")
        count += below.clamp(0, run.length)
    return count


def take_rows(x: Tensor, runs: Runs, dim: int) -> Tensor:
    """The rows of the whole sequence `x` that `runs` name, along `dim`: a new contiguous tensor."""
    parts = []
    for run in runs:
        index = [slice(None)] * x.ndim
        index[dim] = slice(run.start, run.start + run.step * run.length, run.step)
        parts.append(x[tuple(index)])
    return torch.cat(parts, dim) if parts else x.narrow(dim, 0, 0).clone()


def put_rows(x: Tensor, rows: Tensor, runs: Runs, dim: int) -> None:
    """Write `rows` into the whole sequence `x` at the positions of `runs`: the inverse of `take_rows`."""
    begin = 0
    for run in runs:
        index = [slice(None)] * x.ndim
        index[dim] = slice(run.start, run.start + run.step * run.length, run.step)
        x[tuple(index)].copy_(rows.narrow(dim, begin, run.length))
        begin += run.length
