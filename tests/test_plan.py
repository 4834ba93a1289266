"""The plan against brute force over every pair of a query and a key."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_mask import mask_options, masks_of_length
from torch import Tensor

from peers import log_normal_documents
from ringflash import plan as plan_module
from ringflash.layout import LAYOUTS, Run, Runs, layout_runs, runs_to_positions
from ringflash.mask import Mask, area
from ringflash.plan import (
    Group,
    Piece,
    Plan,
    Visit,
    go_straight,
    group_visits,
    keep_by_bytes,
    part_rows,
    plan_one,
    plan_ring,
    source_rank,
    split_visits,
)

layouts = st.sampled_from(sorted(LAYOUTS))
worlds = st.integers(1, 5)
lengths = st.integers(0, 40)
blocks = st.sampled_from([1, 2, 3, 8, 64])


@pytest.fixture(scope="module", params=[3, 128], ids="tiles of {}".format)
def tile(request):
    """Shards here are short: tiles of 3 rows are whole in those of 6 or more, of 128 in none."""
    kept = plan_ring, plan_module._plan_of
    with mock.patch.multiple(plan_module, TILE=request.param, LONG_SHARD=2 * request.param):
        for cached in kept:
            cached.cache_clear()
        yield request.param
    for cached in kept:
        cached.cache_clear()


def held(layout: str, seq_len: int, world_size: int, rank: int, mask: Mask) -> Runs:
    return layout_runs(layout, seq_len, world_size, rank, mask if layout == "balanced" else None)


def pairs_seen(queries: Runs, keys: Runs, mask: Mask) -> Tensor:
    """Boolean (queries, keys)."""
    return mask.visible(runs_to_positions(queries)[:, None], runs_to_positions(keys)[None, :])


def check_ranges(ranges: Tensor, seen: Tensor, block: int) -> None:
    """Nothing is seen outside a range, its full part is what all rows see, its ends are what the outer rows see."""
    assert ranges.shape == (-(-seen.shape[0] // block), 4) and ranges.dtype == torch.int32
    for index, (begin, full_begin, full_end, end) in enumerate(ranges.tolist()):
        rows = seen[index * block : (index + 1) * block]
        assert 0 <= begin <= full_begin <= full_end <= end <= seen.shape[1]
        assert not rows[:, :begin].any() and not rows[:, end:].any()
        assert not rows[0].any() or rows[0, begin]
        assert not rows[-1].any() or rows[-1, end - 1]
        everywhere = rows.all(dim=0).nonzero()[:, 0].tolist()
        assert everywhere == list(range(full_begin, full_end))


def check_blocks(table: Tensor, seen: Tensor, block: int, jump: int) -> None:
    """Do the blocks have every row once, and is each a range as in `check_ranges`, without a jump from row to row?"""
    assert table.dtype == torch.int32
    rows = []
    for *ends, low, high in table.tolist():
        assert 0 < high - low <= block
        rows += range(low, high)
        check_ranges(torch.tensor([ends], dtype=torch.int32), seen[low:high], high - low)
        for row, after in pairwise(seen[low:high]):
            assert not row.any() or not after.any() or after.nonzero()[0] - row.nonzero()[-1] <= jump
    assert rows == list(range(len(seen)))


def check_rows(rows: Tensor, seen: Tensor) -> None:
    """The keys between the two ends are those that are seen, and neither end ever goes back."""
    assert rows.shape == (2, seen.shape[0]) and rows.dtype == torch.int32 and rows.is_contiguous()
    first, last = rows[:, :, None]
    assert (first >= 0).all() and (first <= last).all() and (last <= seen.shape[1]).all()
    key = torch.arange(seen.shape[1])
    assert torch.equal((key >= first) & (key < last), seen)
    assert (rows.diff(dim=1) >= 0).all()


@given(layouts, masks_of_length(40), worlds, blocks, st.data())
def test_ranges_hold_what_each_block_sees(layout, drawn, world_size, block, data):
    rank, source = (data.draw(st.integers(0, world_size - 1)) for _ in range(2))
    seq_len, mask = drawn[0], Mask(**drawn[1])
    queries, keys = (held(layout, seq_len, world_size, r, mask) for r in (rank, source))
    visit, seen = Visit(queries, keys, mask), pairs_seen(queries, keys, mask)
    check_ranges(visit.key_ranges(block), seen, block)
    check_ranges(visit.query_ranges(block), seen.T, block)
    check_rows(visit.seen_rows(), seen)
    jump = data.draw(st.integers(1, 40))
    check_blocks(visit.query_blocks(block, jump), seen, block, jump)
    check_blocks(visit.key_blocks(block, jump), seen.T, block, jump)
    assert visit.is_empty == (not seen.any())


@given(lengths, lengths, mask_options(), blocks)
def test_ranges_of_unequal_lengths_align_at_the_end(query_len, key_len, options, block):
    mask = Mask(**options)
    (visit,) = plan_one(mask, query_len, key_len).visits
    assert visit is not None
    seen = mask.visible(torch.arange(query_len)[:, None] + key_len - query_len, torch.arange(key_len)[None, :])
    check_ranges(visit.key_ranges(block), seen, block)
    check_ranges(visit.query_ranges(block), seen.T, block)
    check_rows(visit.seen_rows(), seen)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=5), mask_options(), blocks)
def test_documents_of_unequal_lengths_align_at_their_ends(pairs, options, block):
    plain = {name: options[name] for name in ("left", "right", "causal")}
    cu_q, cu_k = ([sum(pair[side] for pair in pairs[:n]) for n in range(len(pairs) + 1)] for side in (0, 1))
    (visit,) = plan_one(Mask(**plain, cu_seqlens=cu_k, cu_seqlens_q=cu_q), cu_q[-1], cu_k[-1]).visits
    assert visit is not None
    seen = torch.zeros(cu_q[-1], cu_k[-1], dtype=torch.bool)
    for (q, q_end), (k, k_end) in zip(pairwise(cu_q), pairwise(cu_k), strict=True):
        queries, keys = torch.arange(q_end - q) + (k_end - k) - (q_end - q), torch.arange(k_end - k)
        seen[q:q_end, k:k_end] = Mask(**plain).visible(queries[:, None], keys[None, :])
    check_ranges(visit.key_ranges(block), seen, block)
    check_ranges(visit.query_ranges(block), seen.T, block)
    check_rows(visit.seen_rows(), seen)


@given(layouts, masks_of_length(40), worlds)
def test_the_visits_of_all_ranks_see_every_pair_once(tile, layout, drawn, world_size):
    counted = 0
    hops = set()
    seq_len, mask = drawn[0], Mask(**drawn[1])
    for rank in range(world_size):
        plan = plan_ring(mask, layout, seq_len, rank, world_size, mask if layout == "balanced" else None)
        shards = [held(layout, seq_len, world_size, r, mask) for r in range(world_size)]
        assert plan.rows == tuple(len(runs_to_positions(runs)) for runs in shards)
        assert plan.world_size == world_size and len(plan.visits) == plan.hops + 1
        for step, visit in enumerate(plan.visits):
            assert plan.source(step) == source_rank(rank, step, world_size)
            keys, rows = runs_to_positions(shards[plan.source(step)]), plan.needed[step]
            if visit is not None:
                assert (visit.queries, visit.mask) == (shards[rank], mask)
                assert torch.equal(runs_to_positions(visit.keys), keys[rows])
                seen = pairs_seen(visit.queries, visit.keys, mask)
                more = tile if len(keys) >= 2 * tile else 1
                assert step == 0 or (seen[:, :more].any() and seen[:, -more:].any())  # no tile more than needed moves
                counted += int(seen.sum())
            else:
                assert rows == slice(0, 0)
        hops.add(plan.hops)
    assert counted == area(mask, seq_len, seq_len)
    assert len(hops) == 1  # every rank takes part in every exchange


@pytest.mark.parametrize("tokens", [100, 5000])
def test_one_pair_in_a_visit_is_not_overlooked(tokens):
    """Wherever it is: whether anything is seen is asked of a few rows first."""
    for place in (0, 1, tokens // 3, tokens - 1):
        pair = Visit((Run(0, 2, tokens),), (Run(2 * place + 1, 1, 1),), Mask(left=0, right=1))
        assert not pair.is_empty
        assert Visit(pair.queries, pair.keys, Mask(left=0, right=0)).is_empty


def positions_in(plan: Plan, group: Group, shards: list[Runs]) -> list[int]:
    """Positions of the keys of a group, from where its pieces are said to lie."""
    keys = [-1] * group.rows
    for piece in group.pieces:
        rows = runs_to_positions(shards[plan.source(piece.step)])[piece.begin : piece.end].tolist()
        keys[piece.place : piece.place + len(rows)] = rows
    return keys


@given(layouts, masks_of_length(40), worlds, st.integers(0, 40), st.integers(0, 40), st.data())
def test_groups_and_parts_attend_to_what_the_visits_of_a_plan_do(
    tile, layout, drawn, world_size, most_rows, first_rows, data
):
    seq_len, mask = drawn[0], Mask(**drawn[1])
    rank, balance = data.draw(st.integers(0, world_size - 1)), mask if layout == "balanced" else None
    sizes = most_rows, first_rows, data.draw(st.integers(0, first_rows))
    plan = plan_ring(mask, layout, seq_len, rank, world_size, balance)
    shards = [held(layout, seq_len, world_size, r, mask) for r in range(world_size)]
    expected = [
        (visit.queries, key, mask)
        for step, visit in enumerate(plan.visits)
        if visit is not None
        for key in runs_to_positions(visit.keys).tolist()
    ]
    for groups in (group_visits(plan, *sizes), split_visits(plan, 1, 1), split_visits(plan, 2, 2)):
        found = []
        for group in groups:
            keys = positions_in(plan, group, shards)
            assert group.visit is None or runs_to_positions(group.visit.keys).tolist() == keys
            assert keys == sorted(set(keys)) and min(keys, default=0) >= 0
            assert all(piece.step <= group.last_step for piece in group.pieces)
            if group.visit is not None:
                found += [(group.visit.queries, key, group.visit.mask) for key in keys]
        seen = {key for visit in plan.visits if visit for key in seen_keys(visit)}
        assert {key for _, key, _ in found} >= seen and set(found) <= set(expected) and len(found) == len(set(found))
    grouped = group_visits(plan, *sizes)
    assert seen <= {key for group in grouped for key in positions_in(plan, group, shards)}
    others = [piece for piece in grouped[0].pieces if piece.step > 0]
    steps = {piece.step for piece in others}
    assert sum(piece.end - piece.begin for piece in others) <= (first_rows if len(steps) == 1 else sizes[2])
    for index, group in enumerate(grouped):
        assert group.rows <= (most_rows if index else 2 * most_rows) or len({piece.step for piece in group.pieces}) == 1
    own_last = [step for step in (*range(1, plan.hops + 1), 0) for _ in range(2)]
    assert [group.last_step for group in split_visits(plan, 2, 2)] == own_last
    assert split_visits(plan, 2, 1) == (*split_visits(plan, 2, 2)[:-2], split_visits(plan, 1, 1)[-1])
    for index, group in enumerate(split_visits(plan, 2, 2)):  # a part is about its own rows alone
        cut = part_rows(plan.rows[plan.source(group.last_step)], index % 2, 2)
        assert all(cut.start <= piece.begin <= piece.end <= cut.stop for piece in group.pieces)


@given(layouts, masks_of_length(40), worlds, st.integers(1, 8))
def test_parts_of_a_shard_have_no_large_holes(layout, drawn, world_size, hole):
    mask = Mask(**drawn[1])
    for rank in range(world_size):
        plan = plan_ring(mask, layout, drawn[0], rank, world_size, mask if layout == "balanced" else None)
        for visit in filter(None, plan.visits):
            seen = pairs_seen(visit.queries, visit.keys, mask).any(0)
            parts = visit.seen_parts(hole)
            assert all(begin < end and seen[begin] and seen[end - 1] for begin, end in parts)
            assert all(after - end >= hole for (_, end), (after, _) in pairwise(parts))
            inside = torch.cat([torch.arange(0), *(torch.arange(begin, end) for begin, end in parts)])
            assert set(seen.nonzero()[:, 0].tolist()) <= set(inside.tolist())
            holes = (~seen[inside]).int() if len(inside) else inside
            runs = "".join(map(str, holes.tolist())).split("0")
            assert all(len(run) < hole for run in runs)


@given(layouts, masks_of_length(40), worlds, st.integers(1, 8))
def test_rows_of_long_shards_come_in_whole_tiles(tile, layout, drawn, world_size, hole):
    """With a row that ends a part come those of its tile that lie beside it in the sequence, if that has such tiles."""
    seq_len, mask = drawn[0], Mask(**drawn[1])
    with mock.patch.object(plan_module, "HOLE", hole):
        for rank in range(world_size):
            balance = mask if layout == "balanced" else None
            plan = plan_ring.__wrapped__(mask, layout, seq_len, rank, world_size, balance)
            for step, parts in enumerate(plan.parts[1:], start=1):
                keys = held(layout, seq_len, world_size, plan.source(step), mask)
                narrow = Visit(plan.own_visit.queries, keys, mask).seen_parts(hole)
                expected = {row for begin, end in narrow for row in range(begin, end)}
                at = runs_to_positions(keys).tolist()
                for edge in [x for begin, end in narrow for x in (begin, end - 1)] if len(at) >= 2 * tile else []:
                    beside = [r for r in range(len(at)) if r // tile == edge // tile and at[r] - r == at[edge] - edge]
                    alone = layout == "striped" and world_size > 1
                    expected |= set(beside) if (at[edge] - edge) % tile == 0 and not alone else set()
                rows = [row for begin, end in parts for row in range(begin, end)]
                assert rows == sorted(expected)
                assert all(end < begin for (_, end), (begin, _) in pairwise(parts))


@given(layouts, masks_of_length(40), worlds, st.integers(1, 5), st.integers(0, 60))
def test_what_ranks_send_straight_home_is_what_their_owners_receive(
    tile, layout, drawn, world_size, lap_steps, most_rows
):
    seq_len, mask = drawn[0], Mask(**drawn[1])
    balance = mask if layout == "balanced" else None
    plans = [plan_ring(mask, layout, seq_len, rank, world_size, balance) for rank in range(world_size)]
    ways = [go_straight(plan, lap_steps, most_rows) for plan in plans]
    if None in ways:
        assert ways == [None] * world_size
        return
    for plan, way in zip(plans, ways, strict=True):
        assert way is not None
        assert way.own.pieces == (Piece(0, 0, plan.rows[plan.rank], 0),) and way.own.visit == plan.own_visit
        todo = deque(range(1, plan.hops + 1))
        for number, lap in enumerate(way.laps):
            others, steps = lap.group, [todo.popleft() for _ in lap.sent]
            assert others.last_step == steps[-1] and (len(steps) == lap_steps or not todo)
            assert others.rows <= sum(plan.needed[step].stop - plan.needed[step].start for step in steps)
            assert others.rows <= way.most_rows <= most_rows
            assert sorted(others.pieces) == sorted(piece for pieces in lap.sent for piece in pieces)
            assert sum(piece.end - piece.begin for pieces in lap.received for piece in pieces) <= most_rows
            for place, step in enumerate(steps):
                assert lap.peers[place] == (plan.source(step), plan.source(-step))
                owner = ways[plan.source(step)]
                assert owner is not None
                assert owner.laps[number].received[place] == lap.sent[place]
                assert owner.laps[number].theirs[place] == others.rows
        assert not todo


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_plans_of_many_ranks_look_at_the_rows_of_few_pairs(layout, monkeypatch):
    looked, count_below = [], plan_module.count_below
    monkeypatch.setattr(plan_module, "count_below", lambda *args: looked.append(args) or count_below(*args))
    mask = Mask(causal=True, cu_seqlens=[*range(0, 64 * 64, 33), 64 * 64])
    assert go_straight(plan_ring(mask, layout, 64 * 64, 3, 64), 63, 2 * 64) is not None
    assert len(looked) < 10 * 64


def test_plans_of_other_ranks_do_not_displace_that_of_this_one():
    arguments = Mask(left=2, causal=True), "contiguous", 300, 3, 300
    plan = plan_ring(*arguments)
    assert go_straight(plan, 1, 2) is not None
    assert plan_ring(*arguments) is plan


def seen_keys(visit: Visit) -> list[int]:
    return runs_to_positions(visit.keys)[pairs_seen(visit.queries, visit.keys, visit.mask).any(0)].tolist()


def sizes_of_groups(
    world_size: int, layout: str = "zigzag", most_rows: int = 1 << 30, first_rows: int = 0, few_rows: int = 0,
    rank: int = 0, window: int | None = None,
) -> list[int]:  # fmt: skip
    plan = plan_ring(Mask(window, 0), layout, 64 * world_size, rank, world_size)
    groups = group_visits(plan, most_rows, first_rows, few_rows)
    return [len({piece.step for piece in group.pieces}) for group in groups]


def test_groups_grow_while_there_is_room():
    assert sizes_of_groups(1) == [1]
    assert sizes_of_groups(2) == [1, 1]
    assert sizes_of_groups(4) == [1, 3]
    assert sizes_of_groups(8) == [1, 3, 4]
    assert sizes_of_groups(64) == [1, 3, 9, 27, 24]
    assert sizes_of_groups(64, most_rows=8 * 64) == [1, 3, *[8] * 7, 4]
    assert sizes_of_groups(8, most_rows=64) == [1] * 8
    assert sizes_of_groups(8, rank=7, most_rows=64) == [1, 2, 2, 2, 1]  # of the shards below, half is seen
    assert sizes_of_groups(8, "striped") == [1] * 8


def test_the_first_group_has_a_second_shard_that_is_worth_waiting_for():
    assert sizes_of_groups(2, first_rows=64) == [2]
    assert sizes_of_groups(8, first_rows=64) == [2, 6]
    assert sizes_of_groups(64, first_rows=64) == [2, 6, 18, 38]
    assert sizes_of_groups(64, most_rows=8 * 64, first_rows=64) == [2, 6, *[8] * 7]
    assert sizes_of_groups(8, first_rows=63) == [1, 3, 4]
    assert sizes_of_groups(8, rank=7, first_rows=63) == [2, 6]  # of the shard below, half is seen
    assert sizes_of_groups(8, most_rows=64, first_rows=64) == [2, *[1] * 6]  # the first may be twice as large
    assert sizes_of_groups(8, most_rows=63, first_rows=64) == [1] * 8
    assert sizes_of_groups(8, "striped", first_rows=64) == [1] * 8


def test_the_first_group_has_all_of_little_that_is_seen_elsewhere():
    assert sizes_of_groups(8, rank=3, window=32) == [1, 2]  # 32 rows of each neighbour
    assert sizes_of_groups(8, rank=3, window=32, first_rows=64, few_rows=63) == [2, 1]
    assert sizes_of_groups(8, rank=3, window=32, first_rows=64, few_rows=64) == [3]
    assert sizes_of_groups(8, first_rows=64, few_rows=64 * 4) == [5, 3]
    assert sizes_of_groups(8, first_rows=63, few_rows=63) == [1, 3, 4]


def test_shards_stop_moving_when_nobody_sees_them():
    """A window of one shard's length reaches one neighbour."""
    plan = plan_ring(Mask(left=8, right=0), "contiguous", 64, 7, 8)
    assert plan.hops == 1 and plan.visits[1] is not None
    assert plan_ring(Mask(left=0, right=0), "striped", 64, 3, 8).hops == 0
    assert plan_ring(Mask(right=0), "contiguous", 64, 0, 8).visits[1:] == (None,) * 7


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_under_a_window_only_rows_of_neighbours_move(layout):
    """64k tokens on 8 ranks, 4096 keys: of each piece that a rank holds, the 4095 rows before it, in whole tiles."""
    rows, ranks = 65536 // 8, range(8)
    for rank in ranks:
        plan = plan_ring(Mask(left=4095, causal=True), layout, 8 * rows, rank, 8)
        needed = {plan.source(step): plan.needed[step] for step, visit in enumerate(plan.visits) if visit and step > 0}
        if layout == "contiguous":  # one piece, after the lower rank's
            assert plan.hops == 1 and needed == ({} if rank == 0 else {rank - 1: slice(rows - 4096, rows)})
        else:  # two pieces, after the first of the lower rank and the second of the higher one
            before = {rank - 1: slice(rows // 2 - 4096, rows // 2), rank + 1: slice(rows - 4096, rows)}
            assert needed == {source: cut for source, cut in before.items() if source in ranks}


def count_tiles(visit: Visit) -> int:
    """Tiles of 128 keys that blocks of 128 queries visit."""
    begin, _, _, end, _, _ = visit.query_blocks(128, 512).unbind(1)
    return int(((end + 127) // 128 - begin // 128).sum())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_visit_no_more_tiles_under_documents_than_one_gpu(monkeypatch, world_size, seed):
    mask = Mask(causal=True, cu_seqlens=log_normal_documents(32768, seed))

    def tiles_of_all() -> int:
        tiles = 0
        for rank in range(world_size):
            plan = plan_ring.__wrapped__(mask, "balanced", 32768, rank, world_size, mask)
            (group,) = group_visits(plan, 32768, 32768, 32768)
            assert group.visit is not None
            tiles += count_tiles(group.visit)
        return tiles

    one = count_tiles(plan_one(mask, 32768, 32768).own_visit)
    assert tiles_of_all() == one
    monkeypatch.setattr(plan_module, "LONG_SHARD", 32768)
    assert tiles_of_all() > one  # what whole tiles are for


def test_worked_examples_of_the_docstrings():
    (visit,) = plan_one(Mask(causal=True), 4, 4).visits
    assert visit is not None and visit.key_ranges(2).tolist() == [[0, 0, 1, 2], [0, 0, 3, 4]]
    assert visit.query_ranges(2).tolist() == [[0, 1, 4, 4], [2, 3, 4, 4]]
    (visit,) = plan_one(Mask(causal=True), 3, 3).visits
    assert visit is not None and visit.seen_rows().tolist() == [[0, 0, 0], [1, 2, 3]]


def test_tables_are_kept_up_to_a_number_of_bytes_the_latest_used_longest():
    made = []

    @keep_by_bytes(2**20)
    def table(name: str, size: int) -> Tensor:
        made.append(name)
        return torch.empty(size, dtype=torch.uint8)

    assert table("a", 2**19) is table("a", 2**19)
    table("b", 2**19)
    table("a", 2**19)
    table("c", 2**19)  # b goes: a was used after it
    table("a", 2**19)
    assert made == ["a", "b", "c"]
    assert table("d", 2**21) is table("d", 2**21)  # larger than all that is kept, and kept all the same
    table("a", 2**19)
    assert made == ["a", "b", "c", "d", "a"]
    for index in range(17):  # small ones count as 64 KiB
        table(f"small {index}", 1)
    table("small 1", 1)
    table("small 0", 1)
    assert made[5:] == [*(f"small {index}" for index in range(17)), "small 0"]


def test_a_table_that_goes_while_it_is_made_is_returned_all_the_same():
    class Looked(torch.Tensor):
        """Whoever asks for its size, another thread takes the table before it meanwhile."""

        @property
        def nbytes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
            with ThreadPoolExecutor(1) as other:
                other.submit(table, "before").result()
            return 2**21

    @keep_by_bytes(2**20)
    def table(name: str) -> Tensor:
        return torch.zeros(2**18).as_subclass(torch.Tensor if name == "before" else Looked)

    table("before")
    assert len(table("made")) == 2**18


def test_tables_kept_together_count_together():
    made = []

    @keep_by_bytes(2**20)
    def tables(name: str) -> tuple[str, Tensor, None, Tensor]:
        made.append(name)
        return name, torch.empty(2**18, dtype=torch.uint8), None, torch.empty(2**18, dtype=torch.uint8)

    for name in ("a", "b", "a", "c", "a", "b"):
        assert tables(name)[0] == name
    assert made == ["a", "b", "c", "b"]
