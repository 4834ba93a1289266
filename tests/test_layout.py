"""Layouts share out every position once, ascending in every rank."""

from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringflash.layout import (
    LAYOUTS,
    count_below,
    count_rows,
    layout_runs,
    put_rows,
    runs_to_positions,
    take_rows,
)

layouts = st.sampled_from(sorted(LAYOUTS))
worlds = st.integers(1, 9)
lengths = st.integers(0, 70)


def held(layout: str, seq_len: int, world_size: int) -> list[list[int]]:
    """Positions of each rank."""
    return [runs_to_positions(layout_runs(layout, seq_len, world_size, rank)).tolist() for rank in range(world_size)]


@pytest.mark.parametrize(
    "layout,seq_len,expected",
    [
        ("contiguous", 8, [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ("zigzag", 8, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        ("striped", 8, [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("contiguous", 5, [[0], [1], [2], [3, 4]]),
        ("striped", 5, [[0, 4], [1], [2], [3]]),
        ("contiguous", 2, [[], [0], [], [1]]),
        ("zigzag", 2, [[1], [], [], [0]]),
        ("striped", 2, [[0], [1], [], []]),
    ],
)
def test_worked_examples_of_4_ranks(layout, seq_len, expected):
    assert held(layout, seq_len, 4) == expected


def test_zigzag_of_2_ranks_and_8_tokens_gives_rank_0_both_ends():
    assert held("zigzag", 8, 2) == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert layout_runs("zigzag", 8, 2, 0) == ((0, 1, 2), (6, 1, 2))
    assert layout_runs("zigzag", 8, 2, 1) == ((2, 1, 4),)  # two pieces that touch are one run


@given(layouts, lengths, worlds)
def test_ranks_partition_the_positions(layout, seq_len, world_size):
    assert sorted(chain(*held(layout, seq_len, world_size))) == list(range(seq_len))


@given(layouts, lengths, worlds)
def test_positions_ascend_and_runs_are_not_empty(layout, seq_len, world_size):
    for rank, positions in enumerate(held(layout, seq_len, world_size)):
        runs = layout_runs(layout, seq_len, world_size, rank)
        assert positions == sorted(set(positions))
        assert all(run.length > 0 and run.step > 0 for run in runs)
        assert count_rows(runs) == len(positions)


@given(layouts, lengths, worlds)
def test_row_counts_are_balanced(layout, seq_len, world_size):
    counts = [len(positions) for positions in held(layout, seq_len, world_size)]
    assert max(counts) - min(counts) <= (2 if layout == "zigzag" else 1)
    if seq_len % (2 * world_size) == 0:
        assert set(counts) == {seq_len // world_size}


@given(layouts, st.integers(1, 6))
def test_causal_work_of_zigzag_and_striped_is_balanced(layout, world_size):
    seq_len = 8 * world_size
    work = [sum(position + 1 for position in positions) for positions in held(layout, seq_len, world_size)]
    bound = {"zigzag": 0, "striped": 8 * (world_size - 1), "contiguous": 64 * (world_size - 1)}[layout]
    assert max(work) - min(work) == bound


@given(layouts, lengths, worlds)
def test_count_below_counts(layout, seq_len, world_size):
    everywhere = torch.arange(-3, seq_len + 4)
    for rank, positions in enumerate(held(layout, seq_len, world_size)):
        counts = count_below(layout_runs(layout, seq_len, world_size, rank), everywhere)
        assert counts.tolist() == [sum(p < limit for p in positions) for limit in everywhere.tolist()]


@given(layouts, lengths, worlds, st.sampled_from([0, 1, -1]))
def test_take_rows_and_put_rows_are_inverse(layout, seq_len, world_size, dim):
    x = torch.arange(2 * seq_len).reshape(2, seq_len).movedim(1, dim)
    back = torch.full_like(x, -1)
    for rank in range(world_size):
        runs = layout_runs(layout, seq_len, world_size, rank)
        rows = take_rows(x, runs, dim)
        assert torch.equal(rows, x.index_select(dim, runs_to_positions(runs)))
        assert rows.is_contiguous() and (rows.numel() == 0 or rows.data_ptr() != x.data_ptr())
        put_rows(back, rows, runs, dim)
    assert torch.equal(back, x)


def test_positions_are_int64_even_when_there_are_none():
    for seq_len in (0, 1, 9):
        assert runs_to_positions(layout_runs("zigzag", seq_len, 2, 0)).dtype == torch.int64


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"layout must be one of .*contiguous.*striped.*zigzag.*'spiral'"):
        layout_runs("spiral", 8, 2, 0)
    with pytest.raises(ValueError, match="seq_len must be >= 0, got -1"):
        layout_runs("zigzag", -1, 2, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        layout_runs("zigzag", 8, 2, 2)
