"""Layouts share out every position once, ascending in every rank."""

import random
from itertools import chain, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peers import log_normal_documents
from ringflash import layout
from ringflash.layout import (
    LAYOUTS,
    MOST_SPARED,
    Run,
    Runs,
    _deal,
    _spare,
    count_below,
    count_rows,
    layout_runs,
    merge_runs,
    positions_of,
    put_rows,
    rows_held,
    runs_to_positions,
    take_rows,
)
from ringflash.mask import Mask, count_seen

layouts = st.sampled_from(sorted(LAYOUTS))
worlds = st.integers(1, 9)
lengths = st.integers(0, 70)
CAUSAL = Mask(causal=True)


def runs_of(layout: str, seq_len: int, world_size: int, rank: int, mask: Mask = CAUSAL) -> Runs:
    return layout_runs(layout, seq_len, world_size, rank, mask if layout == "balanced" else None)


def held(layout: str, seq_len: int, world_size: int, mask: Mask = CAUSAL) -> list[list[int]]:
    """Positions of each rank."""
    return [runs_to_positions(runs_of(layout, seq_len, world_size, rank, mask)).tolist() for rank in range(world_size)]


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
        runs = runs_of(layout, seq_len, world_size, rank)
        assert positions == sorted(set(positions))
        assert all(run.length > 0 and run.step > 0 for run in runs)
        assert count_rows(runs) == len(positions) == rows_held(layout, seq_len, world_size, rank)


@given(layouts, lengths, worlds)
def test_row_counts_are_balanced(layout, seq_len, world_size):
    counts = [len(positions) for positions in held(layout, seq_len, world_size)]
    assert max(counts) - min(counts) <= (2 if layout == "zigzag" else 1)
    if seq_len % (2 * world_size) == 0:
        assert set(counts) == {seq_len // world_size}


@given(st.sampled_from(["contiguous", "striped", "zigzag"]), st.integers(1, 6))
def test_causal_work_of_zigzag_and_striped_is_balanced(layout, world_size):
    seq_len = 8 * world_size
    work = [sum(position + 1 for position in positions) for positions in held(layout, seq_len, world_size)]
    bound = {"zigzag": 0, "striped": 8 * (world_size - 1), "contiguous": 64 * (world_size - 1)}[layout]
    assert max(work) - min(work) == bound


def imbalance(layout: str, seq_len: int, world_size: int, mask: Mask) -> float:
    """Keys seen by the busiest rank's queries over the mean."""
    parts = (torch.tensor(positions) for positions in held(layout, seq_len, world_size, mask))
    seen = [int(count_seen(mask, part, seq_len).sum()) for part in parts]
    return max(seen) * world_size / sum(seen)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_work_under_documents_is_balanced_within_5_percent(world_size, causal):
    documents = [log_normal_documents(65536, seed, sigma=1.0 + seed % 2 / 2) for seed in range(8)]
    for mask in (Mask(causal=causal, cu_seqlens=boundaries) for boundaries in documents):
        assert imbalance("balanced", 65536, world_size, mask) <= 1.05
        rows = [len(positions) for positions in held("balanced", 65536, world_size, mask)]
        assert max(rows) - min(rows) <= (0 if 65536 % world_size == 0 else 1)
    assert imbalance("zigzag", 65536, 8, Mask(causal=causal, cu_seqlens=documents[0])) > 1.3  # what it is there for


def imbalance_of_tiles(seq_len: int, runs_of_ranks: list[list[Run]], mask: Mask) -> float:
    """Tiles of 128 keys that the blocks of 128 queries of the busiest rank visit, over the mean."""
    tiles = []
    for runs in runs_of_ranks:
        low = runs_to_positions(merge_runs(runs))[::128]  # of runs in whole blocks
        begin, end = mask.first(low).clamp(min=0), mask.last(low + 127).clamp(max=seq_len)
        tiles.append(int(((end + 127) // 128 - begin // 128).sum()))
    return max(tiles) * len(tiles) / sum(tiles)


@pytest.mark.parametrize(("world_size", "gain"), [(4, 0.003), (8, 0.007), (16, 0.01)])
def test_tiles_are_balanced_too_not_pairs_alone(world_size, gain):
    """A tile takes the time of a tile, however many of its pairs are visible."""
    masks = [Mask(causal=True, cu_seqlens=log_normal_documents(65536, seed)) for seed in range(8)]
    as_it_is, by_pairs = [], []
    for mask in masks:
        pairs = count_seen(mask, torch.arange(65536), 65536)
        as_it_is.append(imbalance_of_tiles(65536, _deal(65536, world_size, mask), mask))
        by_pairs.append(imbalance_of_tiles(65536, layout._deal_work(pairs, world_size, mask), mask))
    assert sum(as_it_is) <= sum(by_pairs) - len(masks) * gain


@pytest.mark.parametrize(
    "mask", [Mask(), CAUSAL, Mask(4096, 0), Mask(causal=True, chunk=8192), Mask(causal=True, prefix=30000)], ids=repr
)
def test_work_under_other_masks_is_balanced_too(mask):
    assert imbalance("balanced", 50000, 4, mask) <= 1.05


@pytest.mark.parametrize(("seq_len", "world_size"), [(48618, 16), (12030, 6)])
def test_rows_that_blocks_do_not_divide_are_balanced_too(seq_len, world_size):
    """Blocks of more than 128 tokens, cut to that, would leave half of the sequence at the end."""
    for seed in range(8):
        mask = Mask(causal=True, cu_seqlens=log_normal_documents(seq_len, seed))
        assert imbalance("balanced", seq_len, world_size, mask) <= 1.05


def test_the_balanced_layout_cuts_into_few_and_large_runs():
    mask = Mask(causal=True, cu_seqlens=log_normal_documents(65536, 0))
    for rank in range(8):
        runs = layout_runs("balanced", 65536, 8, rank, mask)
        assert len(runs) <= 8 and all(run.length % 128 == 0 for run in runs)
    for even in (Mask(), Mask(4096, 0)):  # nothing to mend: contiguous
        assert [layout_runs("balanced", 65536, 8, rank, even) for rank in range(8)] == [
            layout_runs("contiguous", 65536, 8, rank) for rank in range(8)
        ]


def needs(owners: list[int], sees: list[range], world_size: int, pieces: int) -> list[int]:
    """How many pieces of others' blocks each rank needs."""
    seen = [{p for of, found in zip(owners, sees, strict=True) if of == r for p in found} for r in range(world_size)]
    return [sum(owners[p // pieces] != rank for p in found) for rank, found in enumerate(seen)]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_swapped_that_spare_the_rank_that_needs_most(seed):
    """Every time the swap after which it and its partner need least, as counted one by one."""
    pick = random.Random(seed)
    world_size, each = pick.randint(2, 5), pick.randint(1, 4)
    n, pieces = world_size * each, pick.randint(1, 3)
    ends = sorted(pick.randint(0, n * pieces - 1) for _ in range(n))
    firsts = [pick.randint(max(0, (b - 4) * pieces), (b + 1) * pieces - 1) for b in range(n)]
    sees = [range(low, max(low, high) + 1) for low, high in zip(firsts, ends, strict=True)]
    weight = [pick.randint(1, 9) for _ in range(n)]
    owners = [r for r in range(world_size) for _ in range(each)]
    pick.shuffle(owners)
    load = [sum(w for w, of in zip(weight, owners, strict=True) if of == rank) for rank in range(world_size)]
    limit = max(load) + pick.randint(0, 3)
    result, loads = torch.tensor(owners), torch.tensor(load)
    first, last = torch.tensor([blocks.start for blocks in sees]), torch.tensor([blocks.stop - 1 for blocks in sees])
    _spare(result, torch.tensor(weight), loads, limit, pieces, first, last)
    for _ in range(MOST_SPARED):
        before = needs(owners, sees, world_size, pieces)
        worst, found = before.index(max(before)), []
        for i, j in product(range(n), range(n)):
            if owners[i] == worst != owners[j]:
                other, less = owners[j], weight[i] - weight[j]
                swapped = list(owners)
                swapped[i], swapped[j] = other, worst
                after = needs(swapped, sees, world_size, pieces)
                most, total = max(after[worst], after[other]), after[worst] + after[other]
                if most < before[worst] and max(load[worst] - less, load[other] + less) <= limit:
                    found.append((most * 2 * n * pieces + total, i, j, swapped))
        if not found:
            break
        _, i, j, swapped = min(found)
        load[worst] += weight[j] - weight[i]
        load[owners[j]] += weight[i] - weight[j]
        owners = swapped
    assert result.tolist() == owners and loads.tolist() == load


def most_needed(mask: Mask, seq_len: int, world_size: int) -> int:
    """Rows of others that the rank with most of them sees, in the balanced layout, planned anew."""
    found = []
    for runs in _deal.__wrapped__(seq_len, world_size, mask):
        own = runs_to_positions(merge_runs(runs))
        edges = torch.zeros(seq_len + 1, dtype=torch.int64)
        edges.index_add_(0, mask.first(own).clamp(0, seq_len), torch.ones_like(own))
        edges.index_add_(0, mask.last(own).clamp(0, seq_len), -torch.ones_like(own))
        seen = edges.cumsum(0)[:-1] > 0
        seen[own] = False
        found.append(int(seen.sum()))
    return max(found)


@pytest.mark.parametrize(("world_size", "share"), [(4, 0.95), (8, 0.87), (16, 0.8)])
def test_ranks_need_few_rows_of_each_other(monkeypatch, world_size, share):
    masks = [Mask(causal=True, cu_seqlens=log_normal_documents(65536, seed)) for seed in range(6)]
    spared = [most_needed(mask, 65536, world_size) for mask in masks]
    monkeypatch.setattr(layout, "MOST_SPARED", 0)
    others = [most_needed(mask, 65536, world_size) for mask in masks]
    assert all(map(int.__le__, spared, others)) and sum(spared) <= share * sum(others)


@pytest.mark.parametrize(("world_size", "share"), [(4, 0.7), (8, 0.5), (16, 0.35)])
def test_the_balanced_layout_keeps_documents_together(world_size, share):
    """So many of the keys that a rank's queries see are its own. Of blocks dealt by weight alone 0.54, 0.34, 0.19."""
    mask = Mask(causal=True, cu_seqlens=log_normal_documents(65536, 0))
    here = everywhere = 0
    for rank in range(world_size):
        own = runs_to_positions(layout_runs("balanced", 65536, world_size, rank, mask))
        first = mask.first(own)
        here += int((torch.searchsorted(own, own, right=True) - torch.searchsorted(own, first)).sum())
        everywhere += int((own - first + 1).sum())
    assert here >= share * everywhere


@given(st.lists(st.builds(Run, st.integers(0, 5), st.integers(1, 4), st.integers(0, 5)), max_size=12))
def test_many_runs_count_and_find_positions_as_one_by_one(gaps):
    """Runs one after another, each starting so far past the end of the one before."""
    parts, end = [], 0
    for gap, step, length in gaps:
        parts.append(Run(end + gap, step, length))
        end = parts[-1].start + step * length
    runs = merge_runs(parts)
    positions = [p for run in parts for p in range(run.start, run.start + run.step * run.length, run.step)]
    assert runs_to_positions(runs).tolist() == positions
    if positions:
        assert positions_of(runs, torch.arange(len(positions))).tolist() == positions
    everywhere = range(-2, end + 3)
    below = [sum(p < limit for p in positions) for limit in everywhere]
    assert count_below(runs, torch.tensor(everywhere)).tolist() == below


@given(layouts, lengths, worlds)
def test_count_below_counts(layout, seq_len, world_size):
    everywhere = torch.arange(-3, seq_len + 4)
    for rank, positions in enumerate(held(layout, seq_len, world_size)):
        counts = count_below(runs_of(layout, seq_len, world_size, rank), everywhere)
        assert counts.tolist() == [sum(p < limit for p in positions) for limit in everywhere.tolist()]


@given(layouts, lengths, worlds, st.sampled_from([0, 1, -1]))
def test_take_rows_and_put_rows_are_inverse(layout, seq_len, world_size, dim):
    x = torch.arange(2 * seq_len).reshape(2, seq_len).movedim(1, dim)
    back = torch.full_like(x, -1)
    for rank in range(world_size):
        runs = runs_of(layout, seq_len, world_size, rank)
        rows = take_rows(x, runs, dim)
        assert torch.equal(rows, x.index_select(dim, runs_to_positions(runs)))
        assert rows.is_contiguous() and (rows.numel() == 0 or rows.data_ptr() != x.data_ptr())
        put_rows(back, rows, runs, dim)
    assert torch.equal(back, x)


@pytest.mark.parametrize(
    "layout,expected",
    [
        ("contiguous-by-document", [[0, 1, 4, 5, 6, 7], [2, 3, 8, 9, 10, 11]]),
        ("zigzag-by-document", [[0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]]),
    ],
)
def test_layouts_by_document_give_every_rank_its_part_of_each(layout, expected):
    mask = Mask(cu_seqlens=[0, 4, 12])
    runs = [layout_runs(layout, 12, 2, rank, mask) for rank in range(2)]
    assert [runs_to_positions(own).tolist() for own in runs] == expected
    assert [rows_held(layout, 12, 2, rank) for rank in range(2)] == [6, 6]
    with pytest.raises(ValueError, match=f"{layout} wants documents that divide by [24], got one of 5 tokens"):
        layout_runs(layout, 12, 2, 0, Mask(cu_seqlens=[0, 5, 12]))


def test_positions_are_int64_even_when_there_are_none():
    for seq_len in (0, 1, 9):
        assert runs_to_positions(layout_runs("zigzag", seq_len, 2, 0)).dtype == torch.int64


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match=r"layout must be one of .*balanced.*contiguous.*striped.*zigzag.*'spiral'"):
        layout_runs("spiral", 8, 2, 0)
    with pytest.raises(ValueError, match="cu_seqlens must end at the sequence length 8, got 9"):
        layout_runs("balanced", 8, 2, 0, Mask(cu_seqlens=[0, 9]))
    with pytest.raises(ValueError, match="seq_len must be >= 0, got -1"):
        layout_runs("zigzag", -1, 2, 0)
    with pytest.raises(ValueError, match=r"rank must be in \[0, 2\), got 2"):
        layout_runs("zigzag", 8, 2, 2)
